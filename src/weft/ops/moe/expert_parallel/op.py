"""A mixture-of-experts layer with its experts split over the ranks: tokens go to their experts and weighted sums come
back.

    fused        one launch, tables included: every program draws its work from one queue (fused.py, fused_kernels.py;
                 FlashMoE)
    dispatched   four launches and two of tables, everything on the device (dispatched.py, kernels.py): tokens travel
                 under the first grouped GEMM, sums under the second. The same as launches on streams
    low_latency  three launches for few tokens, without tables (low_latency.py, low_latency_kernels.py)
    sequential   the library's all-to-all, a grouped GEMM of it, and all-to-all back. The host reads how many rows go
                 where, so a CUDA graph cannot hold it

The last but fused and low_latency have gradients: backward.py, where dy goes as the tokens went and the rows' gradients
come home; and, sequential, the library's all-to-all of x and dy, autograd of its grouped GEMMs, all-to-all back.

The routing is given: ids and weights of every token's experts, from `weft.moe.gate` or anything else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch

from ....architectures import HOPPER, lacks
from ....backends.base import check_tensors
from ....op import Op, Operands, Returned, Shapes, registered
from ....plans import Dispatched, FusedMoe, GemmTile, LowLatency, Plan, Sequential
from ....tensor_checks import bulk, check_device, dense, dims
from ....torch_library import Backward, CallOptions
from ....world import World
from ...common import given_rows, plain_rows
from ..call import ACTIVATIONS, KEEPS, MOST_K, NAME, Kept, Layer, MoeCall, MoeOperands, check_routes
from . import backward, dispatched, fused, low_latency, sequential
from .dispatched import run_dispatched
from .fused import run_fused
from .low_latency import run_low_latency
from .sequential import run_sequential

# Rows of an expert, on the average, up to which tiles of 64 rows were faster on H200s (docs/design-notes.md), and up to
# which the plan for few tokens was (docs/moe.md): what is expected until it is timed.
FEW_ROWS_MOST, LOW_LATENCY_MOST, TIMED_WITHIN = 48, 8, 4
FEW_ROWS = Dispatched(tile=GemmTile(block_m=64, stages=4, group_m=16))


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activation: str = "swiglu",
    rows: Sequence[int] | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    received: torch.Tensor | None = None,
    keep: str = "rows",
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = the sum over the token's routes of weight * expert(x[t]), + shared[t] (FlashMoE, section 3; its layer,
    not its kernel).

    W ranks, E experts, El = E / W of them on each: rank d has experts d El to (d + 1) El - 1. For experts over groups
    of ranks, each with all of them, `world` is one group: of 4 ranks `everyone.split(rank // 2)` makes two of 2.

    Args:
        x: [T, H], this rank's tokens. T may be 0.
        ids: int32 [T, k], the experts of each token, -1 for none; k at most 16. Ids outside 0 to E - 1 go nowhere. An
            expert that comes twice in a token's ids counts twice, with both weights; it takes two rows of `max_rows`.
        weights: float32 [T, k].
        w13: this rank's first matrices: [El, I, H] for "gelu", else [El, blocks, 2, rows of a block, H], what
            `weft.moe.pack` makes of a checkpoint's; N rows in all. w2: [El, H, I].
        b13, b2: biases, laid out as w13 without H, and [El, H], or None.
        shared: [T, H], added to the sum (a shared expert's rows), or None.
        activation: "swiglu", silu(gate) * up; "gelu", of two matrices; "gpt_oss", (up + 1) * gate * sigmoid(1.702
            gate), gate at most 7, up from -7 to 7.
        rows: tokens of every rank, in the order of the ranks, where they are not all equal. None: all have as many as
            this one, or, with max_tokens, any number up to it, which the ranks need not know of each other.
        max_tokens: C, that any rank may have in this or another call. Calls of one C share tables, memory and
            agreements, whatever their T. None: with rows the most tokens of a rank in this call; without, up to
            min(8 E, 8192) / (W k) tokens, that number, so that ranks may decode different batches; above it T.
        max_rows: rows of its experts that a rank has room for at least (a row: a token's for one expert). Those that
            find no room are left out of the sums, the last experts' first: Overflow, here and in CUDA graphs. None:
            the worst case, W C min(k, El), whose bytes the first call logs. The sequential plan has room for all.
        received: int32 [El], contiguous, wherever it lies: where to write how many rows came to each of this rank's
            experts and found room; or None. Each rank's own choice.
        keep: what a call whose operands require a gradient keeps for its backward pass, of each layer, beside its
            operands: "nothing": x is sent again; "rows": W C H elements, tokens as they came; "activation": these and
            N elements for each row that a rank has room for, which saves a GEMM. The sequential plan keeps nothing.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", "sequential", "dispatched", "fused", "low_latency" (few tokens) or such a Plan; the same on all
            ranks.
        out: [T, H], contiguous: where to write the result; it may hold x or shared.

    x, experts, biases and shared are bfloat16 or all float16, on `world.device`. Sums are accumulated in float32 and in
    a fixed order: the same call gives the same bits. An expert's result is rounded to the dtype, and so is a rank's sum
    of a token's experts there, before the ranks' sums are added: one rounding a rank more than if a token's results
    were added at once.

    No token is dropped but by `weft.moe.limit` before or max_rows here. Memory, shared by all layers of the World:
    symmetric, 2 W C H elements and 8 W C k bytes; ordinary, H + I elements for each of max_rows + 128 El rows.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch, Timeout: as `all_gather_matmul`.
        Overflow: at a later call of an op or `World.synchronize`, on a rank that left rows out, with their number.
        WeftError: a sequential call, or the first of a shape, inside a CUDA graph capture.
    """
    options = plain_rows(NAME, rows), activation, max_tokens, max_rows, keep, received is not None
    w13, b13 = packed(NAME, "w13", w13, 5, activation), packed(NAME, "b13", b13, 4, activation)
    operands = MoeOperands(x, ids, weights, w13, w2, b13, b2, shared, received)
    result: torch.Tensor = MOE(world, plan, operands, options, out)
    return result


class Moe(Op[MoeCall]):
    """Operands: x, ids, weights, w13, w2, b13, b2, shared, and of direct calls received; options: rows of every rank or
    None, activation, max_tokens, max_rows, keep, whether the numbers of rows received are wanted, whether a gradient
    is. Results: out; int32 [El] rows received, or None. A run keeps what `call.Kept` has."""

    name = NAME
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? shared,"
        " SymInt[]? rows, str activation, SymInt? max_tokens, SymInt? max_rows, str keep, bool counted, bool gradient"
    )
    results, keeps, wraps = 2, 2, True
    takes = MoeOperands
    runs = {
        Sequential: run_sequential,
        Dispatched: run_dispatched,
        FusedMoe: run_fused,
        LowLatency: run_low_latency,
    }
    small = Dispatched
    tries: ClassVar[Sequence[Plan]] = (LowLatency(), FEW_ROWS, Dispatched())
    by_library = False  # whose calls no CUDA graph holds

    def check(self, world: World, operands: MoeOperands, options: CallOptions) -> MoeCall:
        x, ids, weights, w13, w2, *_ = operands
        rows, activation, max_tokens, max_rows, keep, counted, gradient = options
        for name, t in operands._asdict().items():
            if t is not None or name not in MoeOperands._field_defaults:
                check_device(NAME, world, name, t)
        check_routes(x, ids, weights)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{NAME}: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        if keep not in KEEPS:
            raise ValueError(f"{NAME}: keep {keep!r} is not one of {list(KEEPS)}")
        check_experts(world, operands, activation)
        tokens, experts = None if rows is None else given_rows(NAME, world, rows, x, whole=False), len(w13) * world.size
        if tokens is None and max_tokens is None:
            few_tokens = 0 if gradient else decoded(world, experts, ids.shape[1])
            if x.shape[0] <= few_tokens:
                max_tokens = few_tokens
            else:
                tokens = (x.shape[0],) * world.size
        most = max(tokens or x.shape[:1])
        if max_tokens is not None and max_tokens < most:
            raise ValueError(f"{NAME}: {most} tokens of a rank are more than max_tokens {max_tokens}")
        if max_rows is not None and max_rows < 0:
            raise ValueError(f"{NAME}: max_rows {max_rows} must not be negative")
        inner = w2.shape[2]
        if ids.shape[1] > min(experts, MOST_K):
            raise ValueError(
                f"{NAME}: k {ids.shape[1]} of ids {dims(ids)}: at most {MOST_K}, and no more than {experts} experts"
            )
        capacity = max(1, most if max_tokens is None else max_tokens)
        layer = Layer(capacity, experts, ids.shape[1], x.shape[1], inner, x.dtype, activation, max_rows)
        return MoeCall(x.shape[0], tokens, layer, keep if gradient else None, counted or gradient)

    def meta(self, world: World, operands: MoeOperands, options: CallOptions) -> Shapes:
        x, (*_, counted, gradient) = operands.x, options
        results = (tuple(x.shape), x.dtype), ((operands.w13.shape[0],), torch.int32)
        return list(results[: 1 + (counted or gradient)])

    def outputs(self, world: World, call: MoeCall) -> Shapes:
        layer = call.layer
        results = ((call.own, layer.hidden), layer.dtype), ((layer.experts // world.size,), torch.int32)
        return list(results[: 1 + call.counted])

    def kept(self, world: World, call: MoeCall, plan: str | Plan) -> Shapes:
        plan = plan if isinstance(plan, Dispatched) else world.scale.plan(Dispatched)
        return call.kept(world, plan.tile.block_m)

    def returned(self, world: World, call: MoeCall, result: torch.Tensor, more: Operands) -> Returned:
        return result, *more

    def wrapped(
        self, world: World, plan: str | Plan, operands: MoeOperands, options: CallOptions, results: Operands
    ) -> Returned:
        (y, counts), received = results[:2], operands.received
        if received is not None and counts is not received:
            received.copy_(counts)
        return y

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands[:7], *results[2:]

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        dy, layer = given.gradients[0], given.call.layer
        if dy is None:
            return [None] * 8
        saved, dy = [None if t is None else dense(t) for t in given.saved], dense(dy)
        operands, experts = self.typed(saved[:7]), any(given.needs[3:7])
        if isinstance(given.plan, Dispatched):
            kept = Kept(*(t for t in saved[7:] if t is not None and t.numel()))
            gradients = backward.backward(world, layer, given.plan, dy, operands, kept, experts)
        else:
            dx, dweights, of_experts = sequential.backward(world, layer, dy, operands, experts)
            gradients = backward.Gradients(dx, dweights, *of_experts)
        return [gradients.x, None, *gradients[1:], dy]

    def sizes(self, call: MoeCall) -> tuple[int, int, int]:
        return call.layer.capacity, call.layer.inner, call.layer.hidden

    def multiply_adds(self, call: MoeCall) -> int:
        """Return the multiply-adds of the gate, up and down matrix for balanced routes."""
        layer = call.layer
        return 3 * layer.capacity * layer.k * layer.inner * layer.hidden

    def expected(self, world: World, call: MoeCall, mode: str) -> Plan:
        """Choose by the average number of rows of an expert, which says whose tiles it fills. A gradient has one of
        these plans."""
        if call.keep is not None:
            return Dispatched()
        rows = self._rows(world, call)
        few_tokens = rows <= LOW_LATENCY_MOST and low_latency.fits(world, call.layer, LowLatency()) is None
        return LowLatency() if few_tokens else FEW_ROWS if rows <= FEW_ROWS_MOST else Dispatched()

    def candidates(self, world: World, call: MoeCall) -> Sequence[Plan]:
        """Return the plans whose rows of an expert are within a factor of TIMED_WITHIN: to try another would compile a
        kernel, and take memory, in vain."""
        rows = self._rows(world, call)
        near = [
            (LowLatency(), rows <= TIMED_WITHIN * LOW_LATENCY_MOST),
            (FEW_ROWS, LOW_LATENCY_MOST / TIMED_WITHIN <= rows <= TIMED_WITHIN * FEW_ROWS_MOST),
            (Dispatched(), rows >= FEW_ROWS_MOST / TIMED_WITHIN),
        ]
        plans = [plan for plan, is_near in near if is_near and plan in self.tries]
        return plans if len(plans) > 1 and call.keep is None else ()

    def _rows(self, world: World, call: MoeCall) -> float:
        """Return the rows of an expert, on the average."""
        return call.layer.capacity * world.size * call.layer.k / call.layer.experts

    def trial_key(self, call: MoeCall) -> Hashable:
        """Return the layer with its number of tokens rounded up to a power of two, and what is kept."""
        return call.keep, replace(call.layer, capacity=1 << (call.layer.capacity - 1).bit_length())

    def balanced(self, world: World, call: MoeCall, operands: MoeOperands) -> tuple[MoeCall, MoeOperands]:
        """Return a call of as many tokens as a rank may have, whose routes are spread evenly over the experts: the
        first call may be of few tokens, or of made-up ones that all take the same experts."""
        layer, device = call.layer, operands.x.device
        k, room = layer.k, layer.max_rows
        fits = layer.capacity if room is None else max(room - layer.experts // world.size, 0) // k
        tokens = min(layer.capacity, fits)
        route = torch.arange(tokens * k, device=device, dtype=torch.int32).view(tokens, k)
        ids = (route + world.rank * tokens * k) % layer.experts
        x, weights = operands.x.new_ones(tokens, layer.hidden), operands.weights.new_full((tokens, k), 1 / k)
        given = operands._replace(x=x, ids=ids, weights=weights, shared=None, received=None)
        return replace(call, own=tokens, tokens=None), given

    def fits(self, world: World, call: MoeCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.keep is not None and not isinstance(plan, Dispatched):
            raise ValueError(f"{NAME}: plan {plan.kind!r} has no gradient; 'auto', 'dispatched' and 'sequential' have")
        if isinstance(plan, FusedMoe):
            reason = fused.fits(world, call.layer, plan)
        elif isinstance(plan, LowLatency):
            reason = low_latency.fits(world, call.layer, plan)
        else:
            assert isinstance(plan, Dispatched)
            reason = dispatched.fits(world, call.layer, plan)
        return world.symmetric_reason or lacks(world.capability, HOPPER, "an MoE layer's kernels") or reason

    def dense_operands(self, plan: Plan, operands: MoeOperands) -> MoeOperands:
        """`received` is written, and so stays where it is."""
        *read, received = operands
        return MoeOperands._make([*bulk(read), received])


MOE = registered(Moe())


def decoded(world: World, experts: int, k: int) -> int:
    """Tokens of a rank up to which calls without `rows` and `max_tokens` are calls of one size: as in decode, where
    ranks of a data-parallel server have different numbers of them at every step. As many as the plan for few tokens
    serves; it looks through the routes of all of them in any case."""
    return min(LOW_LATENCY_MOST * experts, low_latency.ROUTES) // (world.size * k)


def check_experts(world: World, operands: MoeOperands, activation: str) -> None:
    x, _, _, w13, w2, b13, b2, shared, received = operands
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0] or w13.shape[0] < 1:
        raise ValueError(f"{NAME}: w13 {dims(w13)} and w2 {dims(w2)} must be [El, N, H] and [El, H, I]")
    local, n, h = w13.shape
    inner, block = w2.shape[2], world.scale.interleave
    wanted = inner if activation == "gelu" else 2 * -(-inner // block) * block
    if h != x.shape[1] or w2.shape[1] != h or n != wanted:
        raise ValueError(
            f"{NAME}: for x {dims(x)} and w2 {dims(w2)}, w13 must be [{local}, {wanted}, {x.shape[1]}] as weft.moe.pack"
            f" makes it, and w2 [{local}, {x.shape[1]}, I]; w13 is {dims(w13)}"
        )
    for name, t, shape in (("b13", b13, (local, n)), ("b2", b2, (local, h)), ("shared", shared, tuple(x.shape))):
        if t is not None and t.shape != shape:
            raise ValueError(f"{NAME}: {name} {dims(t)} must be {list(shape)}")
    if received is not None and (
        received.shape != (local,) or received.dtype != torch.int32 or not received.is_contiguous()
    ):
        raise ValueError(f"{NAME}: received {dims(received)} must be int32 [{local}], contiguous")
    for name, t in (("w13", w13), ("w2", w2), ("b13", b13), ("b2", b2), ("shared", shared)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{NAME}: {name} is {dims(t)}, x is {dims(x)}: one dtype is needed")


Given = TypeVar("Given", torch.Tensor, "torch.Tensor | None")


def packed(op: str, name: str, t: Given, dim: int, activation: str) -> Given:
    """[El, N, ..] of what `pack` made, of so many dimensions; [El, I, ..] of "gelu" as it is. Raises ValueError for
    another tensor: of a checkpoint's the product would have as many rows, and none of them right."""
    if activation == "gelu" or not isinstance(t, torch.Tensor):  # what is no tensor is refused further on
        return t
    if t.dim() != dim or t.shape[2] != 2:
        raise ValueError(f"{op}: {name} {dims(t)} is not what weft.moe.pack makes of a gate and an up matrix")
    return t.flatten(1, 3)


def pack(w13: torch.Tensor, *, world: World, layout: str = "blocked") -> torch.Tensor:
    """First matrices (or biases) as the kernels take them: [El, blocks, 2, rows of a block, ..], blocks of
    `world.scale.interleave` gate and as many up rows in turn, the last padded with zeros.

    Args:
        w13: [El, 2 I, ..]. layout "blocked": I gate, then I up rows (Mixtral's w1 and w3, Qwen's gate_proj and up_proj,
            one after the other); "interleaved": gate and up row by row (GPT-OSS, transposed to [El, 2 I, H]).

    Raises ValueError for another layout or an odd number of rows, TypeError for what is no tensor.
    """
    check_tensors("pack", w13)
    if layout not in ("blocked", "interleaved") or w13.dim() < 2 or w13.shape[1] % 2:
        raise ValueError(
            f'pack: w13 {dims(w13)} must be [El, 2 I, ..], layout "blocked" or "interleaved", got {layout!r}'
        )
    gate, up = w13.chunk(2, 1) if layout == "blocked" else (w13[:, 0::2], w13[:, 1::2])
    (local, inner, *rest), block = gate.shape, world.scale.interleave
    blocks = -(-inner // block)
    both = w13.new_zeros(local, 2, blocks * block, *rest)
    both[:, 0, :inner], both[:, 1, :inner] = gate, up
    return both.view(local, 2, blocks, block, *rest).transpose(1, 2).contiguous()
