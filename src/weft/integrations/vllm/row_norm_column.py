"""The steps between two sublayers of a tensor-parallel decoder as one operator: the row-parallel GEMM, the sum over
ranks, residual and RMSNorm, and the column-parallel GEMM.

    sequential  GEMM | all_reduce_rms_norm | GEMM
    engine      GEMM | the engine's own all-reduce and norm | GEMM
    sequence    GEMM + reduce-scatter | norm of this rank's rows | all-gather + GEMM
    woven       the tokens in two parts, one's all_reduce_rms_norm under the other's GEMMs (TokenWeave, section 4):

        caller's   row(0) | row(1)  | column(0) | column(1)
        "weave"             norm(0) | norm(1)

It is one operator so that a compiled graph with symbolic shapes contains all of these plans: which plan runs depends on
the number of tokens, but no shape in the graph does. The residual is always [M, H]. For many tokens only this rank's
rows of it are defined (`ResidualRows`), and only the next call of this operator reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...nn.weave import Weave, halves
from ...op import Call, Op, registered
from ...ops.all_gather_matmul.op import all_gather_matmul
from ...ops.all_reduce.op import all_reduce_rms_norm
from ...ops.common import split_rows
from ...ops.matmul_reduce.op import matmul_reduce_scatter
from ...ops.norm import rms_norm
from ...plans import Plan, Sequential
from ...tensor_checks import check_operands, dims
from ...world import World
from .fp8 import operand_specs, product, recipe_of, scaled_rows


@dataclass(frozen=True)
class Engine(Plan):
    """The engine's own all-reduce and norm."""

    kind: ClassVar[str] = "engine"


@dataclass(frozen=True)
class ShardedTokens(Plan):
    """GEMM + reduce-scatter, norm of this rank's rows, all-gather + GEMM."""

    kind: ClassVar[str] = "sequence_parallel"


@dataclass(frozen=True)
class TwoParts(Plan):
    """The tokens in two parts, one's communication under the other's GEMMs."""

    kind: ClassVar[str] = "woven"


class ResidualRows(IntEnum):
    """The rows of the residual that are defined on a rank: all rows; the rows that it owns (`weft.lang.balanced_rows`);
    or the rows that it owns of each half of the tokens."""

    WHOLE = 0
    OWN = 1
    HALVES = 2


class LayerTensors(NamedTuple):
    """The operands. x is [M, K], or without a row-parallel weight this rank's partial sum [M, H]. row_scale and
    column_scale are those of weights in e4m3 (`fp8.LinearWeight`)."""

    x: Tensor
    residual: Tensor | None
    norm: Tensor
    row: Tensor | None
    row_bias: Tensor | None
    column: Tensor | None
    column_bias: Tensor | None
    row_scale: Tensor | None = None
    column_scale: Tensor | None = None


@dataclass(frozen=True)
class RowNormColumnCall(Call):
    """m is the number of tokens; k and n are the columns of x and of the result, 0 without that GEMM. `plain_norm` says
    that the norm's weight has the dtype of x. The recipes are those of weights in e4m3."""

    m: int
    h: int
    k: int
    n: int
    dtype: torch.dtype
    eps: float
    residual: bool
    plain_norm: bool
    layout: ResidualRows
    row_recipe: str | None = None
    column_recipe: str | None = None

    @property
    def rows(self) -> int:
        return self.m


# -- the plans ---------------------------------------------------------------------------------------------------------
def run_sequential(world: World, call: RowNormColumnCall, plan: Plan, t: LayerTensors) -> tuple[Tensor, Tensor]:
    if call.layout is ResidualRows.HALVES:
        return run_woven(world, call, plan, t)
    whole = call.layout is ResidualRows.WHOLE
    own_range = slice(None) if whole else own_row_range(world, call.m)
    residuals = None if t.residual is None else t.residual[own_range]
    y, new_residual = all_reduce_rms_norm(
        row_product(world, t, t.x), residuals, t.norm, call.eps, full_residual=whole, world=world
    )
    return column_product(world, t, y), new_residual if whole else residual_of_rows(
        world, call, [(own_range, new_residual)]
    )


def run_engine(world: World, call: RowNormColumnCall, plan: Engine, t: LayerTensors) -> tuple[Tensor, Tensor]:
    # x is cloned, because FlashInfer's kernel writes the residual into its input.
    partial = t.x.clone() if t.row is None else row_product(world, t, t.x)
    y, new_residual = engine_all_reduce_norm()(partial, t.residual, EngineNorm(world, t.norm, call.eps))
    return column_product(world, t, y), new_residual


def run_sequence_parallel(
    world: World, call: RowNormColumnCall, plan: ShardedTokens, t: LayerTensors
) -> tuple[Tensor, Tensor]:
    assert t.row is not None and t.column is not None
    counts, own_range = split_rows(world, call.m), own_row_range(world, call.m)
    x, scales = scaled_rows(world, t.x, t.row, t.row_scale)
    y = matmul_reduce_scatter(x, t.row, t.row_bias, world=world, **scales)
    y, new_residual = EngineNorm(world, t.norm, call.eps)(y, None if t.residual is None else t.residual[own_range])
    rows = None if len(set(counts)) == 1 else counts
    y, scales = scaled_rows(world, y, t.column, t.column_scale)
    out = all_gather_matmul(y, t.column, t.column_bias, world=world, rows=rows, **scales)
    return out, residual_of_rows(world, call, [(own_range, new_residual)])


def run_woven(world: World, call: RowNormColumnCall, plan: Plan, t: LayerTensors) -> tuple[Tensor, Tensor]:
    cut, weave, normed, residuals = halves(call.m), Weave(world, 2), [], []
    parts = (slice(0, cut), slice(cut, call.m))
    for i, part in enumerate(parts):
        partial, own_range = row_product(world, t, t.x[part]), own_row_range(world, part.stop - part.start, part.start)
        with weave.reducing(i, partial):
            residual = None if t.residual is None else t.residual[own_range]
            y, new_residual = all_reduce_rms_norm(partial, residual, t.norm, call.eps, world=world)
        normed.append(y)
        residuals.append((own_range, new_residual))
    out, main = world.empty((call.m, call.n or call.h), call.dtype), world.current_stream()
    for i, (part, y) in enumerate(zip(parts, normed, strict=True)):
        weave.wait(i)
        if t.column is None or t.column_scale is not None:
            world.copy(out[part], column_product(world, t, y), main)
        else:
            world.linear(y, t.column, t.column_bias, main, out[part])
    return out, residual_of_rows(world, call, residuals)


def own_row_range(world: World, m: int, start: int = 0) -> slice:
    """Return this rank's row range among m rows that begin with row `start`."""
    counts = split_rows(world, m)
    start += sum(counts[: world.rank])
    return slice(start, start + counts[world.rank])


def residual_of_rows(world: World, call: RowNormColumnCall, residuals: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Return the residual [M, H] with these rows filled in; with none if the call has no residual, which no call
    reads."""
    residual, stream = world.empty((call.m, call.h), call.dtype), world.current_stream()
    for rows, new_residual in residuals if call.residual else ():
        world.copy(residual[rows], new_residual, stream)
    return residual


def row_product(world: World, t: LayerTensors, x: Tensor) -> Tensor:
    """Return this rank's partial sum, to which rank 0 adds the bias."""
    return x if t.row is None else product(world, x, t.row, None if world.rank else t.row_bias, t.row_scale)


def column_product(world: World, t: LayerTensors, y: Tensor) -> Tensor:
    return y if t.column is None else product(world, y, t.column, t.column_bias, t.column_scale)


# -- the engine's own --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EngineNorm:
    """An RMSNorm with the attributes and the signature of vLLM's."""

    world: World
    weight: Tensor
    variance_epsilon: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon, world=self.world), x
        return rms_norm(x, self.weight, self.variance_epsilon, world=self.world, residual=residual)


@cache
def engine_all_reduce_norm() -> Callable[[Tensor, Tensor | None, EngineNorm], tuple[Tensor, Tensor]]:
    """Return vLLM's norm(all_reduce(x), residual): FlashInfer's kernel where vLLM uses it, else its all-reduce and
    norm."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    def plain(x: Tensor, residual: Tensor | None, norm: EngineNorm) -> tuple[Tensor, Tensor]:
        return norm(tensor_model_parallel_all_reduce(x), residual)

    try:
        from vllm.models.common.ops.fused_allreduce_rms_norm import fused_allreduce_rms_norm
    except ImportError:
        return plain
    return lambda x, residual, norm: (plain if residual is None else fused_allreduce_rms_norm)(x, residual, norm)


# -- the operator ------------------------------------------------------------------------------------------------------
class RowNormColumn(Op[RowNormColumnCall]):
    """row_norm_column. The operands are those of LayerTensors. The options are eps, the number of tokens from which on
    a rank holds only its own rows of the residual, and the number from which on the tokens run in two parts (0: never).
    Returns the product [M, N], or without a column-parallel weight the normalised rows [M, H], and the residual [M,
    H]."""

    name = "row_norm_column"
    signature = (
        "Tensor x, Tensor? residual, Tensor norm, Tensor? row, Tensor? row_bias, Tensor? column, Tensor? column_bias,"
        " Tensor? row_scale, Tensor? column_scale, float eps, int rows_from, int woven_from"
    )
    results = 2
    takes = LayerTensors
    runs = {
        Sequential: run_sequential,
        Engine: run_engine,
        ShardedTokens: run_sequence_parallel,
        TwoParts: run_woven,
    }
    tries = (Sequential(), ShardedTokens())

    def waits(self, world: World, plan: Plan | type[Plan]) -> bool:
        """Return whether the engine's own kernels wait; weft's operators, which the other plans call, wait by
        themselves."""
        return plan is Engine or isinstance(plan, Engine)

    def check(self, world: World, operands: LayerTensors, options: tuple[object, ...]) -> RowNormColumnCall:
        x, residual, norm, row, row_bias, column, column_bias, row_scale, column_scale = operands
        if x.dim() != 2 or norm.dim() != 1:
            raise ValueError(f"{self.name}: x {dims(x)} must be [M, K] and the norm's weight {dims(norm)} [H]")
        (m, k), h = x.shape, norm.shape[0]
        k, n = (0 if row is None else k), (0 if column is None else column.shape[0])
        if norm.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{self.name}: the norm's weight is {dims(norm)}, x is {dims(x)}")
        specs = {
            "x": (x, (m, k or h), x.dtype),
            "residual": (residual, (m, h), x.dtype),
            "row_bias": (row_bias, (h,), x.dtype),
            "column_bias": (column_bias, (n,), x.dtype),
        }
        specs |= operand_specs("row", row, row_scale, (h, k), x.dtype)
        specs |= operand_specs("column", column, column_scale, (n, h), x.dtype)
        check_operands(self.name, world, specs)
        eps, rows_from, woven_from = options
        assert isinstance(eps, float) and isinstance(rows_from, int) and isinstance(woven_from, int)
        layout = ResidualRows.WHOLE
        if 0 < rows_from <= m and m >= world.size and not world.symmetric_reason:
            layout = ResidualRows.HALVES if 0 < woven_from <= m else ResidualRows.OWN
        same_dtype, recipes = norm.dtype == x.dtype, (recipe_of(row_scale), recipe_of(column_scale))
        return RowNormColumnCall(m, h, k, n, x.dtype, eps, residual is not None, same_dtype, layout, *recipes)

    def meta(
        self, world: World, operands: LayerTensors, options: tuple[object, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        x, norm, column = operands.x, operands.norm, operands.column
        (m, _), h = x.shape, norm.shape[0]
        return [((m, h if column is None else column.shape[0]), x.dtype), ((m, h), x.dtype)]

    def outputs(self, world: World, call: RowNormColumnCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n or call.h), call.dtype), ((call.m, call.h), call.dtype)]

    def sizes(self, call: RowNormColumnCall) -> tuple[int, int, int]:
        return call.m, call.n or call.h, call.k or call.h

    def scaling(self, call: RowNormColumnCall) -> str:
        return call.row_recipe or call.column_recipe or ""

    # -- which plan
    def expected(self, world: World, call: RowNormColumnCall, mode: str) -> Plan:
        """Return the plan without a trial. On GPUs that is the engine's own for whole rows, which the engine has tuned
        for its machine."""
        if call.layout is ResidualRows.HALVES:
            return TwoParts()
        prefers_engine = world.device.type == "cuda" and self.fits(world, call, Engine(), "auto") is None
        return Engine() if prefers_engine else Sequential()

    def candidates(self, world: World, call: RowNormColumnCall) -> Sequence[Plan]:
        plan = Sequential() if call.layout is ResidualRows.WHOLE else ShardedTokens()
        return (plan,) if self.fits(world, call, plan, "auto") is None else ()

    def trial_key(self, call: RowNormColumnCall) -> Hashable:
        """Return the call with its number of tokens rounded up to a power of two, for any epsilon."""
        return replace(call, m=1 << (call.m - 1).bit_length(), eps=0.0)

    def fits(self, world: World, call: RowNormColumnCall, plan: Plan, asked: str | Plan) -> str | None:
        gemms = call.k and call.n
        if isinstance(plan, Engine) and (call.layout is not ResidualRows.WHOLE or not call.plain_norm):
            return "the engine's own norm needs whole rows and a weight of their dtype"
        if isinstance(plan, ShardedTokens) and not (call.layout is ResidualRows.OWN and gemms and call.plain_norm):
            return "sequence parallelism needs both GEMMs, and a residual of which each rank holds its own rows"
        if isinstance(plan, TwoParts) != (call.layout is ResidualRows.HALVES):
            return "two parts need a residual of which each rank holds its own rows of both"
        return None

    def check_same_on_all_ranks(self, world: World, call: RowNormColumnCall, plan: Plan, **further: Hashable) -> None:
        """Check nothing: the operators that this one calls check that all ranks make the same call."""

    def execute(
        self, world: World, call: RowNormColumnCall, plan: Plan, operands: LayerTensors, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert out is None, "this operator has no out="
        if not call.m:
            y, residual = (world.empty(*shape) for shape in self.outputs(world, call))
            return y, residual
        y, residual = self.runs[type(plan)](world, call, plan, operands)
        world.finish(world.current_stream())
        return y, residual


ROW_NORM_COLUMN = registered(RowNormColumn())


def row_norm_column(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    *,
    row: Tensor | None = None,
    row_bias: Tensor | None = None,
    column: Tensor | None = None,
    column_bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
    rows_from: int = 0,
    woven_from: int = 0,
    world: World,
    plan: str | Plan = "auto",
) -> tuple[Tensor, Tensor]:
    """Return norm(h) @ column.T + column_bias, and h = residual + the sum over ranks of x @ row.T, + row_bias.

    Args:
        x: [M, K], this rank's columns of the activation; without `row` this rank's partial sum [M, H].
        residual: [M, H], or None. It is the residual of an earlier call with the same rows_from and woven_from, or the
            same on all ranks.
        norm, eps: the RMSNorm's weight [H], of x's dtype or float32, and its epsilon.
        row: [H, K], this rank's shard of the row-parallel weight. row_bias: [H], the same on all ranks.
        column: [N, H], this rank's shard of the column-parallel weight, or None. column_bias: [N], this rank's.
        row_scale, column_scale: the scales of weights in e4m3, float32: [N], or [1] for the whole weight, and x and the
            normalised rows are quantised by row; or [N / 128, K / 128], and these are quantised by block.
        rows_from: the number of tokens from which on each rank has only its own rows of the residual, which then only
            this operator may read; 0: never. Without symmetric memory each rank has all rows.
        woven_from: the number of tokens from which on the tokens run in two parts; 0: never.
        world, plan: as in `weft.all_reduce_rms_norm`; plan may also be "engine", "sequence_parallel" or "woven".

    Returns:
        [M, N], or without `column` the normalised rows [M, H]; and h [M, H], which is undefined if ranks hold their own
        rows and there is no residual.

    Raises as `weft.all_reduce_rms_norm`.
    """
    options = eps, rows_from, woven_from
    operands = LayerTensors(x, residual, norm, row, row_bias, column, column_bias, row_scale, column_scale)
    results: tuple[Tensor, Tensor] = ROW_NORM_COLUMN(world, plan, operands, options)
    return results
