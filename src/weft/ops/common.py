"""The base of the ops with one GEMM: options, checks, descriptors, and the choice of plans for a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar

import torch

from ..architectures import lacks
from ..backends import library_gemm
from ..compute.gemm import Tile
from ..errors import Unsupported
from ..kernel_launch import Matrix
from ..lang.jit import constants
from ..op import Call, Op, Operands
from ..plans import (
    Decomposed,
    FlagGated,
    Fused,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TileShape,
    TwoLevel,
    is_low_latency,
)
from ..scaled_tensor import E4M3, Scaling
from ..tensor_checks import bulk, bulky
from ..world import World
from .recipes import ScaledFactors, scaled_tile, tile_unsupported, with_scaled_tiles
from .tiles import usual_tile, with_architecture_tiles, with_shape_tiles


class Factors(NamedTuple):
    """The operands of a GEMM x @ weight.T + bias."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class MatmulCall(Call):
    """A checked call of a GEMM [M, K] x [N, K]^T on every rank, with its collective. `shards` contains the number of
    rows of each rank, `n` and `k` are N and K, `dtype` is the result's dtype, and `bias` is true if there is a bias.
    `scaling` is the scaling of 8-bit operands, or None for operands of the result's dtype."""

    shards: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype
    bias: bool
    scaling: Scaling | None = field(default=None, kw_only=True)

    @property
    def operand_dtype(self) -> torch.dtype:
        """Return the dtype of x and of the weight."""
        return self.dtype if self.scaling is None else E4M3

    @cached_property
    def rows(self) -> int:
        return sum(self.shards)

    @property
    def even(self) -> bool:
        return min(self.shards) == max(self.shards)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        scaled = {} if self.scaling is None else dict(scaling=self.scaling)
        return dict(rows=self.shards, N=self.n, K=self.k, dtype=str(self.dtype), bias=self.bias) | scaled


M = TypeVar("M", bound=MatmulCall)
AnyFactors = TypeVar("AnyFactors", Factors, ScaledFactors)


class MatmulOp(Op[M]):
    """The base class of the ops with one GEMM. The operands are x, weight and bias."""

    def sizes(self, call: M) -> tuple[int, int, int]:
        return call.rows, call.n, call.k

    operand_type: ClassVar[Callable[..., Operands]] = Factors
    transposes: ClassVar[tuple[type[Plan], ...]] = ()  # the plans that support a weight [N, K] stored as [K, N]

    def trial_key(self, call: M) -> Hashable:
        """Return the key of the trial that decides this call; calls with equal keys share a trial. The number of rows
        is rounded in the same way as for trials of cuBLAS's GEMM."""
        return tuple((call.same_on_all_ranks() | dict(rows=library_gemm.stepped(call.rows), even=call.even)).items())

    def no_gradient(self, operands: Sequence[torch.Tensor | None]) -> str | None:
        dtype = getattr(operands[0], "dtype", None)
        return "products of float8_e4m3fn do not have" if dtype == E4M3 else super().no_gradient(operands)

    def scaling(self, call: M) -> str:
        return "" if call.scaling is None else call.scaling.recipe

    def _with_operand_tiles(self, call: M, plan: Plan) -> Plan:
        """Return the plan. If the call has 8-bit operands, the plan has tiles for them."""
        return plan if call.scaling is None else with_scaled_tiles(plan, call.scaling)

    def _named(self, world: World, call: M, name: str, capturing: bool) -> Plan:
        return self._with_operand_tiles(call, super()._named(world, call, name, capturing))

    def expected(self, world: World, call: M, mode: str) -> Plan:
        """Return the plan that is expected to be the fastest. For 8-bit operands the result is the sequential plan: the
        planner has no rates for such operands, so only trials can select another plan."""
        return super().expected(world, call, mode) if call.scaling is None else Sequential()

    def choose(self, world: World, call: M, asked: str | Plan, capturing: bool) -> Plan:
        """Return the Plan to run. A Plan from the caller keeps its tiles. If the caller passed "auto" or the name of a
        plan class, the tiles are chosen for the shape. With 8-bit operands, tiles for such operands replace the tiles
        of every plan."""
        if isinstance(asked, Plan):
            asked = self._with_operand_tiles(call, asked)
        plan = super().choose(world, call, asked, capturing)
        if call.scaling is not None or not isinstance(asked, str):
            return plan
        if self.collective == "all_to_all":
            return with_architecture_tiles(plan, world.backend.capability)
        return with_shape_tiles(plan, call.shards, call.n, world.sm_count, world.backend.capability)

    def batch_invariance_unsupported(self, world: World, call: M, plan: Plan) -> str | None:
        """Return the reason why the plan is not batch-invariant, or None if it is. Every batch-invariant plan adds the
        K steps in ascending order, and all K steps have the same length."""
        if call.scaling is not None:
            return "libraries multiply 8-bit operands"
        if isinstance(plan, Decomposed) and world.size > 1 and world.backend.symmetric_unsupported is not None:
            return f"cuBLAS multiplies and NCCL sums: {world.backend.symmetric_unsupported}"
        k_step, tile = usual_tile(world).block_k, getattr(plan, "tile", None)
        if tile is not None and tile.block_k != k_step:
            return f"its GEMM adds K in steps of {tile.block_k}, other plans in steps of {k_step}"
        return super().batch_invariance_unsupported(world, call, plan) or check_16_byte_rows(K=call.k, N=call.n)

    def dense_operands(self, plan: Plan, operands: AnyFactors) -> AnyFactors:
        """Return dense operands. A weight that is stored as [K, N], as in the GEMM of a gradient, is not copied if the
        plan supports it, because the copy would need as much time as some collectives."""
        x, weight, *extra = operands
        takes_transposed = isinstance(plan, self.transposes) and not weight.is_contiguous() and bulky(weight.t())
        if takes_transposed and weight.dtype != E4M3:
            dense_x, *dense_extra = bulk((x, *extra))
            return self.operand_type(dense_x, weight, *dense_extra)
        return self.operand_type(*bulk(operands))

    def unsupported(self, world: World, call: M, plan: Plan, asked: str | Plan) -> str | None:
        if call.scaling is not None and (reason := self.why_not_8_bits(world, call.scaling, plan)):
            return reason
        if is_low_latency(plan):
            return (
                world.backend.peers_unsupported
                or check_16_byte_rows(K=call.k, N=call.n)
                or self.why_uneven(world, call, plan, asked)
            )
        if isinstance(plan, Fused):
            return (
                world.backend.symmetric_unsupported
                or check_16_byte_rows(K=call.k, N=call.n)
                or self.why_uneven(world, call, plan, asked)
            )
        if isinstance(plan, Decomposed):
            return self.why_uneven(world, call, plan, asked)
        if isinstance(plan, TwoLevel):
            return None
        assert isinstance(plan, Signaled)
        reason = lacks(world.backend.capability, "bf16", "weft's kernels") or check_16_byte_rows(K=call.k)
        reason = reason or (world.backend.symmetric_unsupported if plan.copies else None)
        if reason is None and not 0 < plan.ctas < world.sm_count:
            raise Unsupported(
                f"{self.name}: {plan.ctas} CTAs of the communicator leave none of {world.sm_count} SMs for the GEMM"
            )
        return reason

    def why_not_8_bits(self, world: World, scaling: Scaling, plan: Plan) -> str | None:
        """Return the reason why the plan does not support 8-bit operands, or None if it does."""
        if isinstance(plan, Fused):
            return tile_unsupported(scaling, plan.tile)
        if isinstance(plan, Signaled | FlagGated):
            return "its GEMM takes 16-bit operands"
        if isinstance(plan, TwoLevel):
            return "no scales of 8-bit operands go between nodes"
        return world.backend.symmetric_unsupported if isinstance(plan, Decomposed) else None

    def why_uneven(self, world: World, call: M, plan: Plan, asked: str | Plan) -> str | None:
        """Return the reason why the plan does not support shards of these lengths, or None if it does. If the caller
        did not request the plan, the reason is "", and nothing is logged."""
        why = None
        if isinstance(plan, OneShot) and self.collective != "all_reduce":
            if asked == "auto" and world.size * max(call.shards) > 2 * call.rows:
                return ""  # the plan would allocate memory for the longest shard on every rank
            if min(call.shards) == 0 < max(call.shards):
                why = "a rank without rows would not wait for the other ranks"
        elif not call.even and self.copies_shards(plan):
            why = "copies need shards of one length"
        return "" if why and asked == "auto" else why

    def copies_shards(self, plan: Plan) -> bool:
        """Return whether a copy engine moves the shards as a whole."""
        return isinstance(plan, Decomposed)


def check_16_byte_rows(**sizes: int) -> str | None:
    """Return the reason why bulk copies do not support rows with these numbers of elements, or None if they do. `sizes`
    maps names to these numbers."""
    for name, size in sizes.items():
        if size % 8:
            return f"{name} {size} must be a multiple of 8 (16-byte rows for bulk copies)"
    return None


def check_rows(op: str, world: World, rows: Sequence[int], x: torch.Tensor, whole: bool) -> tuple[int, ...]:
    """Check and return the caller's `rows`, the number of rows of every rank. With `whole`, x contains the rows of all
    ranks instead of only this rank's rows."""
    valid, own_rows = len(rows) == world.size and min(rows) >= 0, x.shape[0]
    if whole and not (valid and sum(rows) == own_rows):
        raise ValueError(
            f"{op}: rows {list(rows)} must name {world.size} ranks and sum to the rows of x {list(x.shape)}"
        )
    if not whole and not (valid and rows[world.rank] == own_rows):
        raise ValueError(f"{op}: rows {list(rows)} must name {world.size} ranks and {own_rows} for rank {world.rank}")
    return tuple(rows)


def split_rows(world: World, m: int) -> tuple[int, ...]:
    """Return `balanced_rows` of M without comparing any sizes, because sizes may be symbols under torch.compile."""
    return tuple((m + world.size - 1 - r) // world.size for r in range(world.size))


def plain_rows(op: str, rows: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return a copy of the caller's list or tensor as a tuple. The tuple is part of the key of decisions, and the
    backward pass reads it later."""
    if rows is None or torch.compiler.is_compiling():
        return rows  # type: ignore[return-value]  # may hold symbols
    try:
        return tuple(operator.index(r) for r in rows)
    except TypeError:
        raise TypeError(f"{op}: rows must be integers, one for each rank, got {rows!r}") from None


def tile_of(tile: TileShape, group_m: int, trans_b: bool = False, scaling: Scaling | None = None) -> Tile:
    """Return a kernel's Tile. With `trans_b` the weight [N, K] is stored as [K, N]. `scaling` is the scaling of 8-bit
    operands, or None."""
    if scaling is not None:
        return scaled_tile(tile, group_m, scaling)
    return constants(Tile, BM=tile.block_m, BN=tile.block_n, BK=tile.block_k, GROUP_M=group_m, TRANS_B=trans_b)


def weight_matrix(call: MatmulCall, tile: TileShape, trans_b: bool = False, parts: int = 1) -> Matrix:
    """Return the weight's descriptor, with blocks for the tiles of a GEMM, or for one of `parts` parts of their
    columns."""
    (n, k), (bn, bk) = (call.n, call.k), (tile.block_n // parts, tile.block_k)
    return Matrix(k, n, (bk, bn)) if trans_b else Matrix(n, k, (bn, bk))
