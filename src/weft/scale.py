"""How large pieces of work are: a GPU's sizes, and those of ranks that hold a few programs, as the emulator's do. A
backend sets its World's scale, and an op reads it, so that no op asks which one it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from .plans import (
    Dispatched,
    DispatchedColumns,
    FusedAllReduce,
    FusedGather,
    FusedMoe,
    FusedReduceScatter,
    GemmTile,
    LowLatency,
    Persistent,
    Plan,
    Signaled,
    TileShape,
    TwoShotPush,
)

P = TypeVar("P", bound=Plan)

SMALL_TILE = GemmTile(block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)
SMALL_PERSISTENT = Persistent(tile=replace(SMALL_TILE, block_k=128))
SMALL_GATHER = FusedGather(tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2)
SMALL_REDUCE_SCATTER = FusedReduceScatter(
    tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2, forward_programs=1, batch=2
)
SMALL_ALL_REDUCE = FusedAllReduce(
    tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2, forward_programs=1, lag=1
)
SMALL_MOE = FusedMoe(tile=SMALL_TILE, per_sm=1, copy_programs=2, copy_rows=8, copy_stages=2)
SMALL_REDUCE = TwoShotPush(warps=4, rows=2, stages=2)
SMALL_SIGNALED = Signaled(ctas=1, tile=SMALL_TILE)
SMALL_DISPATCHED = Dispatched(tile=SMALL_TILE, dispatch_programs=2, send_rows=2, combine_programs=2, sum_rows=2)
SMALL_DISPATCHED_COLUMNS = DispatchedColumns(tile=SMALL_TILE, dispatch_programs=2, combine_programs=2, sum_rows=2)
SMALL_LOW_LATENCY = LowLatency(
    tile=TileShape(block_m=16, block_n=32, block_k=32, warps=4, stages=2), copy_programs=2, per_sm=1
)
SMALL_PLANS = (
    *(SMALL_PERSISTENT, SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_ALL_REDUCE, SMALL_SIGNALED),
    *(SMALL_MOE, SMALL_DISPATCHED, SMALL_DISPATCHED_COLUMNS, SMALL_LOW_LATENCY, SMALL_REDUCE),
)


@dataclass(frozen=True)
class Scale:
    """A GPU's sizes, or sizes so small that a few programs with a few elements show all of a protocol.

    plans: by class, the plan that its name stands for, where that is not the class's defaults. presets: whether "auto"
    is the plan that an op names for ranks of few programs (`Op.small`).
    block, norm_block, gate_block: elements that a program of the element-wise kernels, of the norms, of SiLU-mul takes
    at a time.
    run: columns of a run of such a block. interleave: rows of one block of an interleaved gate/up weight. staged: bytes
    of a third of the memory for low-latency rows, at least. part: K steps of a part of a shared tile, at least; handed,
    added: K steps' time that handing one over takes, and waiting for it and adding it (twice that where a helper has
    parts of several tiles). whole: bytes of activations up to which a decoder leaves them whole.
    MoE: routes, sent_routes: that a program of the kernels that mask them, or send them, takes at a time. section:
    routes that are placed together. counts: that a program which places routes loads at a time. placed: elements that a
    program which places rows has in registers. gradient_block, sum_block: rows and columns that a program of the
    activation's gradient, of the sums of rows, takes. between: programs on an SM of a launch between two GEMMs.
    """

    plans: Mapping[type[Plan], Plan] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    presets: bool = False
    block: int = 4096
    norm_block: int = 4096
    gate_block: int = 2048
    run: int = 128
    interleave: int = 64
    staged: int = 1 << 20
    part: int = 4
    handed: int = 6
    added: int = 11
    whole: int = 256 << 10
    routes: int = 512
    sent_routes: int = 1024
    section: int = 128
    counts: int = 4096
    placed: int = 32 * 8 * 32  # 32 of a thread, of 8 warps
    gradient_block: tuple[int, int] = (4, 256)
    sum_block: tuple[int, int] = (32, 64)
    between: int = 5

    def plan(self, kind: type[P]) -> P:
        """Return the plan that a class's name stands for."""
        return self.plans.get(kind) or kind()  # type: ignore[return-value]

    def preset(self, small: Plan | type[Plan]) -> Plan | None:
        """Return what "auto" is on ranks of few programs, given an op's `small`; None where it is decided."""
        if not self.presets:
            return None
        return self.plan(small) if isinstance(small, type) else small

    @staticmethod
    def of(programs: int) -> Scale:
        """The scale for ranks that hold so many resident programs."""
        return SMALL if programs < 32 else Scale()


SMALL = Scale(
    MappingProxyType({type(plan): plan for plan in SMALL_PLANS}),
    presets=True,
    block=256,
    norm_block=64,
    gate_block=256,
    run=16,
    interleave=16,
    staged=256,
    part=1,
    handed=0,
    added=0,
    whole=1 << 10,
    routes=32,
    sent_routes=32,
    section=16,
    counts=0,
    placed=64,
    gradient_block=(2, 16),
    sum_block=(8, 16),
    between=1,
)
