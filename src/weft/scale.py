"""The sizes of the pieces of work that kernels process: one set for a GPU, and a set of small sizes for ranks with few
programs, as in the emulator. A backend sets its World's scale, and ops read the scale, so no op tests which backend
runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from .plans import (
    Dispatched,
    DispatchedColumns,
    FusedAllReduce,
    FusedAllToAll,
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
SMALL_GATHER = FusedGather(tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2)
SMALL_REDUCE_SCATTER = FusedReduceScatter(
    tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2, forward_programs=1
)
SMALL_ALL_REDUCE = FusedAllReduce(
    tile=SMALL_TILE, pull_programs=2, pull_rows=8, pull_stages=2, forward_programs=1, lag=1
)
SMALL_ALL_TO_ALL = FusedAllToAll(tile=SMALL_TILE)
SMALL_MOE = FusedMoe(tile=SMALL_TILE, per_sm=1, copy_programs=2, copy_rows=8, copy_stages=2)
SMALL_SIGNALED = Signaled(ctas=1, tile=SMALL_TILE)
SMALL_DISPATCHED = Dispatched(tile=SMALL_TILE, dispatch_programs=2, send_rows=2, combine_programs=2, sum_rows=2)
SMALL_DISPATCHED_COLUMNS = DispatchedColumns(tile=SMALL_TILE, dispatch_programs=2, combine_programs=2, sum_rows=2)
SMALL_LOW_LATENCY = LowLatency(
    tile=TileShape(block_m=16, block_n=32, block_k=32, warps=4, stages=2), copy_programs=2, per_sm=1
)
SMALL_PLANS = (
    *(SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_ALL_REDUCE, SMALL_ALL_TO_ALL, SMALL_SIGNALED),
    *(SMALL_MOE, SMALL_DISPATCHED, SMALL_DISPATCHED_COLUMNS, SMALL_LOW_LATENCY),
    *(Persistent(tile=replace(SMALL_TILE, block_k=128)), TwoShotPush(warps=4, stages=2)),
)


@dataclass(frozen=True)
class Scale:
    """Sizes of the pieces of work. With small sizes a few programs with a few elements exercise a whole protocol.

        plans           by class, the default plan, if it differs from the class's defaults
        presets         whether "auto" is the plan that an op names for ranks with few programs (`Op.emulator_plan`)
        block, norm_block, gate_block    elements that a program of the element-wise, norm, SiLU-mul kernels processes
                                         at a time
        run_columns     columns of a contiguous run of such a block
        interleave      rows of one block of an interleaved gate/up weight
        staging_bytes   the minimum bytes of each of the three buffers for low-latency rows
        min_part_steps  GEMM with shared last tiles: least K steps of a part
        handover_steps  time, in K steps, to hand a part over
        add_steps       time, in K steps, to wait for a part and add it; doubled if a helper has parts of several tiles
        replicated_bytes    bytes of activations up to which a decoder keeps them replicated

    MoE:

        routes, sent_routes     routes that a program masks, or sends, at a time
        section                 routes that are placed together
        counts                  counts that a program loads at a time while it places routes
        placed_elements         elements that a program holds in registers while it places rows
        gradient_block, sum_block    rows and columns of a program's block: activation's gradient, sums of rows
        programs_between_gemms  programs per SM in a launch between two GEMMs
    """

    plans: Mapping[type[Plan], Plan] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    presets: bool = False
    block: int = 4096
    norm_block: int = 4096
    gate_block: int = 2048
    run_columns: int = 128
    interleave: int = 64
    staging_bytes: int = 1 << 20
    min_part_steps: int = 4
    handover_steps: int = 6
    add_steps: int = 11
    replicated_bytes: int = 256 << 10
    routes: int = 512
    sent_routes: int = 1024
    section: int = 128
    counts: int = 4096
    placed_elements: int = 32 * 4 * 32  # 32 elements per thread, 4 warps
    gradient_block: tuple[int, int] = (4, 256)
    sum_block: tuple[int, int] = (32, 64)
    programs_between_gemms: int = 5

    def plan(self, kind: type[P]) -> P:
        """Return the default plan of a class at this scale."""
        return self.plans.get(kind) or kind()  # type: ignore[return-value]

    def preset(self, small: Plan | type[Plan]) -> Plan | None:
        """Return the plan of "auto" on ranks with few programs, from an op's `emulator_plan`; None on other ranks."""
        if not self.presets:
            return None
        return self.plan(small) if isinstance(small, type) else small

    @staticmethod
    def for_programs(programs: int) -> Scale:
        """Return the scale for ranks with this number of resident programs."""
        return SMALL if programs < 32 else Scale()


SMALL = Scale(
    MappingProxyType({type(plan): plan for plan in SMALL_PLANS}),
    presets=True,
    block=256,
    norm_block=64,
    gate_block=256,
    run_columns=16,
    interleave=16,
    staging_bytes=256,
    min_part_steps=1,
    handover_steps=0,
    add_steps=0,
    replicated_bytes=1 << 10,
    routes=32,
    sent_routes=32,
    section=16,
    counts=0,
    placed_elements=64,
    gradient_block=(2, 16),
    sum_block=(8, 16),
    programs_between_gemms=1,
)
