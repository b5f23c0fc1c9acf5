"""One operator for the steps between two sublayers of a tensor-parallel decoder: the row-parallel GEMM, the sum over
ranks, residual and RMSNorm, and the column-parallel GEMM. The operator's plans are the possible forms of a forward
pass:

    sequential  GEMM | all_reduce_rms_norm | GEMM
    own rows    the same, but each rank holds only its own rows of the residual
    sequence    GEMM + reduce-scatter | norm of this rank's rows | all-gather + GEMM
    fused sum   GEMM + all-reduce | norm of all rows | GEMM
    woven       two token parts; one part's all_reduce_rms_norm overlaps the other's GEMMs (TokenWeave, section 4):

        caller's   row(0) | row(1)  | column(0) | column(1)
        "weave"             norm(0) | norm(1)

    flashinfer  sequential, with FlashInfer's kernel for the sum and the norm (flashinfer.py)

A pass has one further form, `WovenLayers`: two parts over whole layers, without this operator (woven.py).

A single operator lets a compiled graph with symbolic shapes contain all of these plans: the plan that runs depends on
the number of tokens (`forms`), but no shape in the graph depends on the plan. The residual is always [M, H]. In the
plans own rows, sequence and woven a rank writes only some of the residual's rows, and only the next call of this
operator, which has the same plan, reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...nn.weave import Weave, halves
from ...op import C, Op, RowsCall, registered
from ...ops.all_gather_matmul.op import ALL_GATHER_MATMUL
from ...ops.all_reduce.call import NormOperands
from ...ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from ...ops.common import split_rows
from ...ops.matmul_reduce.op import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER
from ...ops.norm import normalising
from ...plans import Decomposed, Plan, Sequential, TwoShotPull
from ...prepared import Operands, OwnResult, Prepare, Prepared, Returned, made_once
from ...tensor_checks import check_operands, dims
from ...torch_library import CallOptions
from ...world import World
from . import flashinfer
from .flashinfer import FlashInfer
from .fp8 import operand_specs, product, scaled_operands


@dataclass(frozen=True)
class OwnRows(Plan):
    """The sequential steps, except that only the owner of a row holds its residual."""

    kind: ClassVar[str] = "own_rows"


@dataclass(frozen=True)
class ShardedTokens(Plan):
    """The form with GEMM + reduce-scatter, the norm of this rank's rows, and all-gather + GEMM."""

    kind: ClassVar[str] = "sequence_parallel"


@dataclass(frozen=True)
class FusedSum(Plan):
    """The form with GEMM + all-reduce, and the norm of all rows. Its shapes are the same on all ranks, and the host
    launches fewer kernels than for `ShardedTokens`."""

    kind: ClassVar[str] = "fused_sum"


@dataclass(frozen=True)
class TwoParts(Plan):
    """The form with two token parts, in which one part's communication overlaps the other part's GEMMs. The
    communication uses the SMs of its `programs`, and the GEMMs use all other SMs."""

    kind: ClassVar[str] = "woven"
    programs: int = 16


@dataclass(frozen=True)
class WovenLayers(Plan):
    """Two token parts over whole layers (woven.py). The sums run on the SMs of `programs` programs; with 0 programs
    copy engines move the rows."""

    kind: ClassVar[str] = "woven_layers"
    may_be_0 = ("programs",)
    programs: int = 0

    @property
    def norm_plan(self) -> Plan:
        """Return the plan of `all_reduce_rms_norm`."""
        return TwoShotPull(programs=self.programs) if self.programs else Decomposed()


# The forms in the order of comparison. All but the first are only for models in which no module between the layers
# reads the residual.
PASS_FORMS: Sequence[Plan] = (
    Sequential(),
    OwnRows(),
    ShardedTokens(),
    FusedSum(),
    TwoParts(),
    WovenLayers(),
    WovenLayers(programs=16),
)


def forms(world: World) -> dict[int, Plan]:
    """Return the World's table of forms, by the number of tokens of a pass. A pass with a number of tokens that is not
    in the table is sequential."""
    table: dict[int, Plan] = world.cached("forms of passes", dict)
    return table


class LayerTensors(NamedTuple):
    """The operands.

    x: [M, K], this rank's columns of the activation; if `row` is None, this rank's partial sum [M, H].
    residual: [M, H] or None. It is the residual of an earlier call with the same plan, or equal on all ranks. norm: the
    RMSNorm's weight [H], of x's dtype or float32.
    row: [H, K], this rank's shard of the row-parallel weight. row_bias: [H], equal on all ranks.
    column: [N, H], this rank's shard of the column-parallel weight. column_bias: [N], this rank's shard.
    row_scale, column_scale: the scales of weights in e4m3 (`fp8.LinearWeight`). The operator quantises x and the
        normalised rows by row, or by block if the weight has scales by block.
    """

    x: Tensor
    residual: Tensor | None
    norm: Tensor
    row: Tensor | None = None
    row_bias: Tensor | None = None
    column: Tensor | None = None
    column_bias: Tensor | None = None
    row_scale: Tensor | None = None
    column_scale: Tensor | None = None


@dataclass(frozen=True)
class RowNormColumnCall(RowsCall):
    """A checked call. m is the number of tokens; k and n are the numbers of columns of x and of the result, or 0 if the
    call omits that GEMM. residual, biases: whether the call has a residual, and the biases of both GEMMs. `plain_norm`
    is true if the norm's weight has the dtype of x."""

    h: int
    k: int
    n: int
    dtype: torch.dtype
    eps: float
    residual: bool
    biases: tuple[bool, bool]
    plain_norm: bool


# -- the plans ---------------------------------------------------------------------------------------------------------
PassRun: TypeAlias = Callable[[LayerTensors], tuple[Tensor, Tensor]]


def by_operators(make: Callable[..., PassRun]) -> Prepare:
    """Return a function that prepares a plan. make(world, call, plan) returns the plan's run, in which each operator
    allocates its own results."""

    def prepare(world: World, call: RowNormColumnCall, plan: Plan) -> OwnResult:
        run = make(world, call, plan)
        return OwnResult(lambda t, out: run(t))

    return prepare


class DecidedOp(Generic[C]):
    """An op that a form calls with operands of the same layouts, none of which requires a gradient. Eager calls find
    their decision by the options alone, since `Op.call` needs more host time to look it up by the layouts."""

    def __init__(self, world: World, op: Op[C], plan: str | Plan = "auto") -> None:
        self.world, self.op, self.plan = world, op, plan
        self._decided: dict[Hashable, Prepared[C]] = {}

    def __call__(self, operands: Operands, options: CallOptions) -> Returned:
        world, op = self.world, self.op
        addresses = op.operand_addresses(world, operands, None) if op.depends_on_addresses else None
        key = options, Op.table_version, addresses
        known, capturing = self._decided.get(key), world.backend.capturing()
        if known is not None and not capturing:
            world.begin(known.number, known.launches)
            return known(operands, None)
        results = op.call(world, self.plan, operands, options, None)
        if not capturing and id(world.ran) in map(id, world.decided.values()):
            self._decided[key] = world.ran  # the first call may leave the decision to the second (`Op._decide`)
        return results


def summed_norm(
    world: World, call: RowNormColumnCall, full_residual: bool, plan: str | Plan = "auto"
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `all_reduce_rms_norm` as a function of x, residual, weight and the memory for the new residual."""
    decided, options = DecidedOp(world, ALL_REDUCE_RMS_NORM, plan), (call.eps, "rms", None, full_residual, None)

    def run(x: Tensor, residual: Tensor | None, weight: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, new_residual, _ = decided(NormOperands(x, residual, weight, kept=kept), options)
        return y, new_residual

    return run


def sequential(world: World, call: RowNormColumnCall, plan: Plan) -> PassRun:
    sum_norm = summed_norm(world, call, True)

    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        y, residual = sum_norm(row_product(world, t, t.x), t.residual, t.norm)
        return column_product(world, t, y), residual

    return run


def with_flashinfer(world: World, call: RowNormColumnCall, plan: FlashInfer) -> PassRun:
    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        world.check()  # weft's operators check this, but none runs before the kernel
        y, residual = flashinfer.all_reduce_norm(world, row_product(world, t, t.x), t.residual, t.norm, call.eps)
        return column_product(world, t, y), residual

    return run


def own_rows(world: World, call: RowNormColumnCall, plan: Plan) -> PassRun:
    own_range, sum_norm = own_row_range(world, call.m), summed_norm(world, call, False)

    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        residual = None if t.residual is None else t.residual[own_range]
        new_residual = world.empty((call.m, call.h), call.dtype)
        y, _ = sum_norm(row_product(world, t, t.x), residual, t.norm, new_residual[own_range])
        return column_product(world, t, y), new_residual

    return run


def sequence_parallel(world: World, call: RowNormColumnCall, plan: ShardedTokens) -> PassRun:
    """Shard the tokens between both GEMMs. If a GEMM is missing or the norm is in float32, run as OwnRows instead."""
    if not (call.k and call.n and call.plain_norm):
        return own_rows(world, call, plan)
    counts, own_range = split_rows(world, call.m), own_row_range(world, call.m)
    rows = None if len(set(counts)) == 1 else tuple(counts)
    scatter, gather = DecidedOp(world, MATMUL_REDUCE_SCATTER), DecidedOp(world, ALL_GATHER_MATMUL)
    norm = made_once(normalising, world, (counts[world.rank], call.h), call.eps, call.residual)

    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        assert t.row is not None and t.column is not None
        operands, options = scaled_operands(world, t.x, t.row, t.row_bias, t.row_scale)
        y = scatter(operands, (None, True, *options))
        residual = None if t.residual is None else t.residual[own_range].contiguous()
        new_residual = world.empty((call.m, call.h), call.dtype)
        y = norm()(y, t.norm.contiguous(), residual, new_residual[own_range])
        operands, options = scaled_operands(world, y, t.column, t.column_bias, t.column_scale)
        return gather(operands, (rows, 0, False, *options))[0], new_residual

    return run


def fused_sum(world: World, call: RowNormColumnCall, plan: FusedSum) -> PassRun:
    """Sum the row-parallel GEMM's tiles while it computes. If that GEMM is missing or the norm is in float32, run
    sequentially."""
    if not (call.k and call.plain_norm):
        return sequential(world, call, plan)
    size, reduce = (call.m, call.h), DecidedOp(world, MATMUL_ALL_REDUCE)
    norm = made_once(normalising, world, size, call.eps, call.residual)

    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        assert t.row is not None
        operands, options = scaled_operands(world, t.x, t.row, t.row_bias, t.row_scale)
        total = reduce(operands, (True, *options))
        residual, new_residual = None, total
        if t.residual is not None:
            residual, new_residual = t.residual.contiguous(), world.empty(size, call.dtype)
        y = norm()(total, t.norm.contiguous(), residual, new_residual)
        return column_product(world, t, y), new_residual

    return run


def woven(world: World, call: RowNormColumnCall, plan: TwoParts) -> PassRun:
    cut, norm_plan = halves(call.m), TwoShotPull(programs=plan.programs)
    parts = [
        (part, own_row_range(world, part.stop - part.start, part.start), summed_norm(world, call, False, norm_plan))
        for part in (slice(0, cut), slice(cut, call.m))  # may have different sizes
    ]

    def run(t: LayerTensors) -> tuple[Tensor, Tensor]:
        weave, normed, new_residual = Weave(world, 2), [], world.empty((call.m, call.h), call.dtype)
        for i, (part, own_range, sum_norm) in enumerate(parts):
            partial = row_product(world, t, t.x[part])
            with weave.reducing(i, partial):
                residual = None if t.residual is None else t.residual[own_range]
                y, _ = sum_norm(partial, residual, t.norm, new_residual[own_range])
            normed.append(y)
        out, main = world.empty((call.m, call.n or call.h), call.dtype), world.current_stream()
        for i, ((part, *_), y) in enumerate(zip(parts, normed, strict=True)):
            weave.wait(i)
            if t.column is None or t.column_scale is not None:
                world.copy(out[part], column_product(world, t, y), main)
            else:
                world.backend.linear(y, t.column, t.column_bias, main, out[part])
        return out, new_residual

    return run


MAKERS: Mapping[type[Plan], Callable[..., PassRun]] = {
    Sequential: sequential,
    OwnRows: own_rows,
    ShardedTokens: sequence_parallel,
    FusedSum: fused_sum,
    TwoParts: woven,
    FlashInfer: with_flashinfer,
}


def own_row_range(world: World, m: int, start: int = 0) -> slice:
    """Return this rank's row range of the m rows that begin with row `start`."""
    counts = split_rows(world, m)
    start += sum(counts[: world.rank])
    return slice(start, start + counts[world.rank])


def row_product(world: World, t: LayerTensors, x: Tensor) -> Tensor:
    """Return this rank's partial sum, to which only rank 0 adds the bias."""
    return x if t.row is None else product(world, x, t.row, None if world.rank else t.row_bias, t.row_scale)


def column_product(world: World, t: LayerTensors, y: Tensor) -> Tensor:
    return y if t.column is None else product(world, y, t.column, t.column_bias, t.column_scale)


# -- the operator ------------------------------------------------------------------------------------------------------
class RowNormColumn(Op[RowNormColumnCall]):
    """The op row_norm_column. It computes norm(h) @ column.T + column_bias, where h is the residual + row_bias + the
    sum of x @ row.T over ranks. The operands are LayerTensors, the option is the norm's eps.

    Plan "auto" is the World's form for the number of tokens. All plans but sequential and FlashInfer need symmetric
    memory and at least one token for each rank; without these the call runs sequentially. The first result is the
    product [M, N], or the normalised rows [M, H] if `column` is None; the second is h [M, H]. With the plans OwnRows,
    ShardedTokens and TwoParts a rank has only its own rows of h; with ShardedTokens it has none without a residual."""

    name = "row_norm_column"
    signature = (
        "Tensor x, Tensor? residual, Tensor norm, Tensor? row, Tensor? row_bias, Tensor? column, Tensor? column_bias,"
        " Tensor? row_scale, Tensor? column_scale, float eps"
    )
    results = 2
    operand_type = LayerTensors
    runs = {plan: by_operators(make) for plan, make in MAKERS.items()}
    batch_invariant_plans = (Sequential,)

    def call(
        self, world: World, plan: str | Plan, operands: LayerTensors, options: CallOptions, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Make a call. A known call runs at once and skips the rest of `Op.call`, since the operators that it calls
        check their operands and wait for other ranks themselves."""
        if plan == "auto":
            plan = forms(world).get(operands[0].shape[0], PASS_FORMS[0])
        t = LayerTensors(*operands)
        known_runs: dict[Hashable, PassRun] = world.cached("runs of passes", dict)
        key = plan, options, *[None if operand is None else (operand.shape, operand.dtype) for operand in t]
        run = known_runs.get(key)
        results: tuple[Tensor, Tensor]
        if run is None or out is not None:
            results = super().call(world, plan, t, options, out)
            ran = world.ran
            if ran.call.rows:
                known_runs[key] = MAKERS[type(ran.plan)](world, ran.call, ran.plan)
            return results
        try:
            results = run(t)
        except BaseException:  # `Op.call` does the same
            world.join_side_streams()
            raise
        world.finish(world.current_stream())
        return results

    def waits(self, world: World, plan: Plan | type[Plan]) -> bool:
        return False  # the operators that the plans call wait themselves

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
        (eps,) = options
        assert isinstance(eps, float)
        has_residual, biases = residual is not None, (row_bias is not None, column_bias is not None)
        return RowNormColumnCall(m, h, k, n, x.dtype, eps, has_residual, biases, norm.dtype == x.dtype)

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

    def unsupported(self, world: World, call: RowNormColumnCall, plan: Plan, asked: str | Plan) -> str | None:
        """Return the reason why a plan is unsupported, which is the same for all calls of a pass."""
        if isinstance(plan, FlashInfer):
            prepared = (call.h, call.dtype) in flashinfer.workspaces(world) and call.plain_norm
            return None if prepared and call.m <= plan.max_tokens else ""  # weft only profiles such passes
        return world.backend.symmetric_unsupported or (
            f"{call.m} tokens of {world.size} ranks" if call.m < world.size else None
        )

    def check_same_on_all_ranks(self, world: World, call: RowNormColumnCall, plan: Plan, **further: Hashable) -> None:
        """Do nothing: the operators that this op calls check that all ranks make the same call."""


ROW_NORM_COLUMN = registered(RowNormColumn())
