"""An MoE layer whose experts are split over the ranks. Tokens are sent to the ranks that hold their experts, and
weighted sums are sent back.

    fused        uses one launch, which also builds the tables; all programs fetch their work from one queue (fused.py,
                 fused_kernels.py; FlashMoE)
    dispatched   uses four launches and two more for the tables, all without the host (dispatched.py, kernels.py):
                 tokens are sent during the first grouped GEMM, sums during the second
    low_latency  uses three launches without tables, for few tokens (low_latency.py, low_latency_kernels.py)
    sequential   uses NCCL's all-to-all, grouped GEMMs, and an all-to-all back. The host reads the number of rows for
                 each rank, so a CUDA graph cannot capture such a call

Only the plans dispatched and sequential support gradients. backward.py dispatches dy like the tokens, and combines the
gradients of the rows. The sequential plan uses NCCL's all-to-all for x and dy, autograd for the grouped GEMMs, and an
all-to-all back.

The routing is an input: the caller passes the ids and weights of every token's experts, which `weft.moe.gate` or
another router has computed. The caller may pass a router instead. `FusedMoe(route=True)` runs it in the layer's launch
(`MoeWithRouter`); other plans run it before the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar, NamedTuple, TypeVar

import torch

from ....architectures import lacks
from ....chooser import bucket
from ....op import Op, Operands, Returned, Shapes, registered
from ....plans import Dispatched, FusedMoe, GemmTile, LowLatency, Plan, Sequential
from ....prepared import unprepared
from ....symmetric import check_tensors
from ....tensor_checks import Expected, bulk, check_devices, check_operands, dense, dims
from ....torch_library import Backward, CallOptions
from ....world import World
from ...common import check_rows, plain_rows
from ..call import ACTIVATIONS, KEEPS, MAX_TOPK, NAME, Kept, Layer, MoeCall, MoeOperands, check_routes
from ..routing.router import RouterOperands, TopKRouter, check_gate, run_gate
from . import backward, dispatched, fused, low_latency, sequential
from .dispatched import prepare_dispatched
from .fused import prepare_fused
from .low_latency import prepare_low_latency
from .sequential import run_sequential

LOW_LATENCY_MAX_ROWS = 8  # the low-latency plan is expected to be the fastest up to this average number of rows


class RowRange(NamedTuple):
    """The range of average numbers of rows per expert for which a plan is considered.

    expected_to: the largest number for which the plan is expected to be the fastest, unless an earlier plan in the list
    is expected to be; 0 means never. timed_from, timed_to: the range in which the plan is timed, with up to
    `most_routes` routes of all ranks.
    """

    plan: Plan
    expected_to: float
    timed_from: float
    timed_to: float
    most_routes: float = inf


# With few rows per expert, reading the weights determines the time. K steps of 128, which read 256 contiguous bytes of
# a row, took 1% to 5% less time than K steps of 64 (3% on average, 1 H100, 2026-11). If H is above 8,192, the block of
# rows to send leaves NARROW_64 only one stage, so no range contains this plan alone.
NARROW_64 = Dispatched(GemmTile(block_m=64, block_n=128, block_k=128, warps=4, stages=2, group_m=4), 2, flatten=False)
NARROW_32 = replace(NARROW_64, tile=replace(NARROW_64.tile, block_m=32, stages=3))
LOW_LATENCY_32 = LowLatency(replace(LowLatency.tile, block_m=32))
# Fewer programs send more slowly, but slow down the GEMM on their SMs less. On 4 H200s with 8,192 tokens each, layers
# with 64 programs took 1% to 7% less time than with 128 (Qwen3-30B), 1% less (Qwen3-235B), or up to 4% more (FlashMoE,
# GPT-OSS; 2026-11).
# Four programs on each SM that sent the sums after the second GEMM, instead of one beside it, made no layer of 512
# tokens with tiles of 128 rows faster on 2 H200s (0% to 3% slower, 2026-11).
FEW_SENDERS = Dispatched(dispatch_programs=64)
BY_ROWS = (
    RowRange(LowLatency(), LOW_LATENCY_MAX_ROWS, 0, 16, low_latency.MAX_ROUTES),
    RowRange(LOW_LATENCY_32, 0, 6, 32, 1024),  # the limit exists because every program scans all routes for each tile
    RowRange(NARROW_32, 16, 4, 48),
    RowRange(NARROW_64, 48, 12, 96),
    RowRange(Dispatched(tile=GemmTile(block_m=64, stages=4, group_m=16)), 0, 48, 192),
    RowRange(FEW_SENDERS, 0, 256, inf),
    RowRange(Dispatched(), inf, 48, inf),
)

# For each plan class, the function that returns the reason why the plan cannot serve a layer, or None.
UNSUPPORTED: Mapping[type[Plan], Callable[..., str | None]] = {
    Dispatched: dispatched.unsupported,
    FusedMoe: fused.unsupported,
    LowLatency: low_latency.unsupported,
}


def moe(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    router: TopKRouter | None = None,
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
    """Return out[t] = the sum over the token's routes of weight * expert(x[t]), + shared[t]. The function computes the
    layer of FlashMoE, section 3, but not with FlashMoE's kernel.

    There are W ranks and E experts, El = E / W on each rank: rank d has experts d El to (d + 1) El - 1. For expert
    parallelism within groups of ranks, where each group holds all experts, `world` is one group: with 4 ranks,
    `everyone.split(rank // 2)` makes two groups of 2.

    Args:
        x: [T, H], this rank's tokens. T may be 0.
        ids: int32 [T, k], the experts of each token, -1 for none; k is at most 16. Ids outside 0 to E - 1 are not sent.
            If an expert occurs twice in a token's ids, it counts twice, with both weights, and as two of the `max_rows`
            rows.
        weights: float32 [T, k].
        w13: this rank's first matrices: [El, I, H] for "gelu". For other activations [El, blocks, 2, rows of a block,
            H], the layout to which `weft.moe.pack` converts a checkpoint's matrices. An expert has N rows in all.
        w2: [El, H, I].
        router: the router that chooses ids and weights, which must then be None. `FusedMoe(route=True)` runs it in the
            layer's launch; other plans, and torch.compile, run it before the layer.
        b13, b2: biases, b13 in the layout of w13 without H, and b2 [El, H]; or None.
        shared: [T, H], added to the sum (the rows of a shared expert), or None.
        activation: "swiglu" is silu(gate) * up; "gelu" has no gate matrix; "gpt_oss" is (up + 1) * gate * sigmoid(1.702
            gate), with gate at most 7 and up clamped to [-7, 7].
        rows: the numbers of tokens of all ranks, in rank order, if they are not all equal. None without max_tokens: all
            ranks have as many tokens as this one. None with max_tokens: each rank has any number of tokens up to
            max_tokens, and the other ranks need not know it.
        max_tokens: the largest number of tokens that any rank may have in this call or in later calls. Calls with the
            same max_tokens share tables and memory, and need no new agreement between the ranks, whatever T is. None
            with rows: the largest number in rows. None without rows: min(8 E, 8192) / (W k) if T is not larger, so that
            ranks may decode batches of different sizes, otherwise T.
        max_rows: the number of rows for which each rank has room at least (a row is one token for one expert). Further
            rows are left out of the sums, starting with the last experts. They cause Overflow in eager calls and in
            CUDA graphs. None: room for the worst case, W max_tokens min(k, El) rows; the first call logs how many bytes
            this needs. The sequential plan has room for all rows.
        received: int32 [El], contiguous: the tensor to which the call writes, for each of this rank's experts, the
            number of received rows for which there was room; or None. Each rank decides for itself whether it passes
            `received`.
        keep: the tensors that a call whose operands require a gradient saves for its backward pass, in addition to its
            operands. With "nothing", the backward pass sends x again. "rows" saves the tokens as they arrived, W
            max_tokens H elements. "activation" also saves N elements for each row for which there is room, so that the
            backward pass needs one GEMM less. The sequential plan saves nothing.
        world: the ranks. All ranks must make the same calls in the same order.
        plan: "auto", "sequential", "dispatched", "fused", "low_latency" (few tokens) or a Plan of one of these classes;
            the same on all ranks.
        out: [T, H], contiguous: the tensor for the result; it may be x or shared.

    x, experts, biases and shared are all bfloat16 or all float16, on `world.device`. Sums are accumulated in float32
    and in a fixed order, so equal calls give equal bits. An expert's result is rounded to the dtype. Each rank's sum
    over a token's experts is also rounded before the ranks' sums are added: this is one more rounding per rank than if
    one rank added all results of a token.

    No token is dropped, unless `weft.moe.apply_capacity` dropped it before the call or max_rows leaves no room for it.
    All layers of the World share 2 W max_tokens H elements and 8 W max_tokens k bytes of symmetric memory, and H + I
    elements of ordinary memory for each of max_rows + 128 El rows.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Mismatch, Timeout: as for `all_gather_matmul`.
        Overflow: at a later call of an op or `World.synchronize`, on a rank that left rows out and on the ranks of
            their tokens. The message contains the number of rows.
        WeftError: a sequential call, or the first call of a shape, is inside a CUDA graph capture.

    Examples:
        >>> x, w13, w2 = torch.ones(4, 16).bfloat16(), torch.ones(1, 8, 16).bfloat16(), torch.ones(1, 16, 8).bfloat16()
        >>> ids, weights = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
        >>> def rank(world):
        ...     return tuple(weft.moe.moe(x, ids, weights, w13, w2, activation="gelu", world=world).shape)
        >>> weft.spmd(rank, 2, backend="emulated")
        [(4, 16), (4, 16)]
    """
    named = None if rows is None else plain_rows(NAME, rows)
    options = named, activation, max_tokens, max_rows, keep, received is not None
    w13, b13 = packed(NAME, "w13", w13, 5, activation), b13 if b13 is None else packed(NAME, "b13", b13, 4, activation)
    if router is not None:
        if ids is not None or weights is not None:
            raise ValueError(f"{NAME}: a router chooses ids and weights, which must be None")
        if isinstance(plan, FusedMoe) and plan.route and not torch.compiler.is_compiling():
            operands = operands_with_router(world, router, x, w13, w2, b13, b2, shared, received)
            result: torch.Tensor = MOE_WITH_ROUTER(world, plan, operands, (*options, False, router.options), out)
            return result
        ids, weights, _ = router(x, world=world)
    layer_operands = MoeOperands(x, ids, weights, w13, w2, b13, b2, shared, received)  # type: ignore[arg-type]
    result = MOE(world, plan, layer_operands, options, out)
    return result


class Moe(Op[MoeCall]):
    """The definition of `weft.moe.moe`.

    Operands: x, ids, weights, w13, w2, b13, b2, shared, and, only in direct calls, received. Options: rows of every
    rank or None, activation, max_tokens, max_rows, keep, whether the numbers of received rows are wanted, and whether a
    gradient is wanted. Results: out; int32 [El], the numbers of received rows, or None. A run saves the tensors in
    `call.Kept`.
    """

    name = NAME
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? shared,"
        " SymInt[]? rows, str activation, SymInt? max_tokens, SymInt? max_rows, str keep, bool counted, bool gradient"
    )
    results, num_saved = 2, 2
    operand_type = MoeOperands
    runs = {
        Sequential: unprepared(run_sequential),
        Dispatched: prepare_dispatched,
        FusedMoe: prepare_fused,
        LowLatency: prepare_low_latency,
    }
    emulator_plan = Dispatched
    autotune_plans: ClassVar[Sequence[Plan]] = tuple(plan for plan, *_ in BY_ROWS)
    by_library = False  # a CUDA graph cannot capture a call of the sequential plan

    def check(self, world: World, operands: MoeOperands, options: CallOptions) -> MoeCall:
        x, ids, weights, w13, w2, *_ = operands
        rows, activation, max_tokens, max_rows, keep, counted, gradient = options
        check_devices(NAME, world, operands._asdict())
        check_routes(x, ids, weights)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{NAME}: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        if keep not in KEEPS:
            raise ValueError(f"{NAME}: keep {keep!r} is not one of {list(KEEPS)}")
        check_experts(world, operands, activation)
        tokens, experts = None if rows is None else check_rows(NAME, world, rows, x, whole=False), len(w13) * world.size
        if tokens is None and max_tokens is None:
            low_latency_tokens = 0 if gradient else max_decode_tokens(world, experts, ids.shape[1])
            if x.shape[0] <= low_latency_tokens:
                max_tokens = low_latency_tokens
            else:
                tokens = (x.shape[0],) * world.size
        most_tokens = max(tokens or x.shape[:1])
        if max_tokens is not None and max_tokens < most_tokens:
            raise ValueError(f"{NAME}: {most_tokens} tokens of a rank are more than max_tokens {max_tokens}")
        if max_rows is not None and max_rows < 0:
            raise ValueError(f"{NAME}: max_rows {max_rows} must not be negative")
        inner = w2.shape[2]
        if ids.shape[1] > min(experts, MAX_TOPK):
            raise ValueError(
                f"{NAME}: k {ids.shape[1]} of ids {dims(ids)}: at most {MAX_TOPK}, and no more than {experts} experts"
            )
        max_tokens_per_rank = max(1, most_tokens if max_tokens is None else max_tokens)
        layer = Layer(max_tokens_per_rank, experts, ids.shape[1], x.shape[1], inner, x.dtype, activation, max_rows)
        return MoeCall(x.shape[0], tokens, layer, keep if gradient else None, counted or gradient)

    def meta(self, world: World, operands: MoeOperands, options: CallOptions) -> Shapes:
        x, (*_, counted, gradient) = operands.x, options
        results = (tuple(x.shape), x.dtype), ((operands.w13.shape[0],), torch.int32)
        return list(results[: 1 + (counted or gradient)])

    def outputs(self, world: World, call: MoeCall) -> Shapes:
        layer = call.layer
        results = ((call.own_tokens, layer.hidden), layer.dtype), ((layer.experts // world.size,), torch.int32)
        return list(results[: 1 + call.counted])

    def saved_shapes(self, world: World, call: MoeCall, plan: str | Plan) -> Shapes:
        plan = plan if isinstance(plan, Dispatched) else world.backend.scale.plan(Dispatched)
        return call.saved_shapes(world, plan.tile.block_m)

    def postprocess(
        self, world: World, plan: str | Plan, operands: MoeOperands, options: CallOptions, results: Operands
    ) -> Returned:
        (y, counts), received = results[:2], operands.received
        if received is not None and counts is not received:
            received.copy_(counts)
        return y

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return *operands[:7], *results[2:]

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        dy, layer = ctx.gradients[0], ctx.call.layer
        if dy is None:
            return [None] * 8
        saved, dy = [None if t is None else dense(t) for t in ctx.saved], dense(dy)
        operands, wants_experts = self.typed(saved[:7]), any(ctx.needs[3:7])
        if isinstance(ctx.plan, Dispatched):
            kept = Kept(*(t for t in saved[7:] if t is not None and t.numel()))
            gradients = backward.backward(world, layer, ctx.plan, dy, operands, kept, wants_experts)
        else:
            gradients = sequential.backward(world, layer, dy, operands, wants_experts)
        return [gradients.x, None, *gradients[1:], dy]

    def sizes(self, call: MoeCall) -> tuple[int, int, int]:
        return call.layer.max_tokens_per_rank, call.layer.inner, call.layer.hidden

    def multiply_adds(self, call: MoeCall) -> int:
        """Return the number of multiply-adds with the gate, up and down matrices for balanced routes."""
        layer = call.layer
        return 3 * layer.max_tokens_per_rank * layer.k * layer.inner * layer.hidden

    def expected(self, world: World, call: MoeCall, mode: str) -> Plan:
        """Choose a plan by the average number of rows per expert, because this number decides which plan's tiles are
        full. Only one of the plans that are chosen in this way supports a call with a gradient."""
        if call.keep is not None:
            return Dispatched()
        rows = self._rows(world, call)
        plans = [plan for plan, expected_to, *_ in BY_ROWS if rows <= expected_to]
        if isinstance(plans[0], LowLatency) and low_latency.unsupported(world, call.layer, plans[0]) is not None:
            return plans[1]
        return plans[0]

    def candidates(self, world: World, call: MoeCall) -> Sequence[Plan]:
        """Return the plans whose range includes this call's average number of rows per expert. Timing any other plan
        would compile a kernel and allocate memory to no purpose."""
        rows = self._rows(world, call)
        plans = [
            r.plan
            for r in BY_ROWS
            if r.timed_from <= rows <= r.timed_to
            and rows * call.layer.experts <= r.most_routes
            and r.plan in self.autotune_plans
        ]
        return plans if len(plans) > 1 and call.keep is None else ()

    def _rows(self, world: World, call: MoeCall) -> float:
        """Return the average number of rows per expert."""
        return call.layer.max_tokens_per_rank * world.size * call.layer.k / call.layer.experts

    def trial_key(self, call: MoeCall) -> Hashable:
        """Return `keep`, and the layer with its number of tokens rounded up to a power of two. The key contains no
        router, because a call with a router is a call of the op `MoeWithRouter`. Decisions for that op have a separate
        name, and no plan of it is timed."""
        return call.keep, replace(call.layer, max_tokens_per_rank=bucket(call.layer.max_tokens_per_rank, 1))

    def balanced(self, world: World, call: MoeCall, operands: MoeOperands) -> tuple[MoeCall, MoeOperands]:
        """Return a call with the largest allowed number of tokens and randomly drawn experts. The first call itself may
        have few tokens, or the tokens of a warm-up, which all select the same experts."""
        layer, device = call.layer, operands.x.device
        k, max_rows = layer.k, layer.max_rows
        tokens_that_fit = (
            layer.max_tokens_per_rank if max_rows is None else max(max_rows - layer.experts // world.size, 0) // k
        )
        tokens = min(layer.max_tokens_per_rank, tokens_that_fit)
        local_experts = -(-layer.experts // world.size)
        if max_rows is None or world.size * tokens * min(k, local_experts) + local_experts <= max_rows:
            # Evenly distributed routes would fill the tiles of all experts equally. With 16 rows per expert, every
            # expert would need one tile of 16 rows, whereas under real routing half of the experts need two tiles and
            # their weights are read twice.
            generator = torch.Generator(device).manual_seed(world.rank)
            ids = torch.rand(tokens, layer.experts, device=device, generator=generator).topk(k).indices.int()
        else:  # with this max_rows there might be no room for the rows of random routes
            route = torch.arange(tokens * k, device=device, dtype=torch.int32).view(tokens, k)
            ids = (route + world.rank * tokens * k) % layer.experts
        x, weights = operands.x.new_ones(tokens, layer.hidden), operands.weights.new_full((tokens, k), 1 / k)
        balanced_operands = operands._replace(x=x, ids=ids, weights=weights, shared=None, received=None)
        return replace(call, own_tokens=tokens, tokens=None), balanced_operands

    def unsupported(self, world: World, call: MoeCall, plan: Plan, asked: str | Plan) -> str | None:
        if call.keep is not None and not isinstance(plan, Dispatched):
            raise ValueError(f"{NAME}: plan {plan.kind!r} has no gradient; 'auto', 'dispatched' and 'sequential' have")
        return (
            world.backend.symmetric_unsupported
            or lacks(world.backend.capability, "tma", "an MoE layer's kernels")
            or UNSUPPORTED[type(plan)](world, call.layer, plan)
        )

    def dense_operands(self, plan: Plan, operands: MoeOperands) -> MoeOperands:
        """Make all operands contiguous except `received`, because the call writes the caller's tensor."""
        read = MoeOperands._make(bulk(operands._replace(received=None)))
        return read._replace(received=operands.received)


MOE = registered(Moe())


def operands_with_router(
    world: World, router: TopKRouter, x: torch.Tensor, *experts: torch.Tensor | None
) -> MoeOperands:
    """Return the operands of a call that includes the router. experts: the operands from w13 to received."""
    check_tensors(NAME, x)
    shape = *x.shape[:1], router.k
    routes = world.empty(shape, torch.int32), world.empty(shape, torch.float32)
    return MoeOperands._make([x, *routes, *experts, router.weight, router.bias, router.choice_bias])


def run_sequential_with_router(
    world: World, call: MoeCall, plan: Plan, operands: MoeOperands, out: torch.Tensor
) -> tuple[torch.Tensor | None]:
    """Run the router before the layer."""
    x, weight, bias, options = operands.x, operands.router, operands.router_bias, call.router
    assert weight is not None and options is not None
    logits = world.empty((x.shape[0], weight.shape[0]), x.dtype)

    def multiply() -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)

    world.call(multiply, [t for t in (x, weight, bias) if t is not None], [logits], world.current_stream())
    route_operands = RouterOperands(logits, operands.choice_bias)
    ids = run_gate(world, route_operands, operands.weights, call.layer.k, options)
    return run_sequential(world, call, plan, operands._replace(ids=ids), out)


class MoeWithRouter(Moe):
    """The definition of `weft.moe.moe` for plans whose launch includes the router. The op has no gradient, and
    torch.compile does not use it.

    Operands: the operands of `Moe`, then the router's tensors. Options: the options of `Moe`, then `RouterOptions`.
    """

    name, public, signature, num_saved = "moe_with_router", NAME, "", 0
    runs = {Sequential: unprepared(run_sequential_with_router), FusedMoe: prepare_fused}
    autotune_plans = ()

    def check(self, world: World, operands: MoeOperands, options: CallOptions) -> MoeCall:
        *layer_options, router = options
        call, x = super().check(world, operands, tuple(layer_options)), operands.x
        shape = call.layer.experts, x.shape[1]
        bias = operands.router_bias, shape[:1], x.dtype
        check_operands(NAME, world, {"router": (operands.router, shape, x.dtype), "router bias": bias})
        logits = x.new_empty(x.shape[0], call.layer.experts)
        check_gate(world, RouterOperands(logits, operands.choice_bias), call.layer.k, router)
        return replace(call, router=router)

    def multiply_adds(self, call: MoeCall) -> int:
        """Return the number of multiply-adds with the layer's matrices and in the router."""
        layer = call.layer
        return super().multiply_adds(call) + layer.max_tokens_per_rank * layer.experts * layer.hidden

    def no_gradient(self, operands: Sequence[torch.Tensor | None]) -> str | None:
        return "a plan that includes the router does not have"


MOE_WITH_ROUTER = MoeWithRouter()  # not registered among the ops that the planner and torch.compile look up


def max_decode_tokens(world: World, experts: int, k: int) -> int:
    """Return the number of tokens per rank up to which all calls without `rows` and `max_tokens` have the same size. In
    decode, the ranks of a data-parallel server have different numbers of tokens in every step. The result is the
    largest number of tokens that the low-latency plan supports, because this plan scans the routes of this many tokens
    in any case."""
    return min(LOW_LATENCY_MAX_ROWS * experts, low_latency.MAX_ROUTES) // (world.size * k)


def check_experts(world: World, operands: MoeOperands, activation: str) -> None:
    """Raise ValueError or TypeError if the shapes or dtypes of the experts' tensors do not match x or each other."""
    x, _, _, w13, w2, b13, b2, shared, received, *_ = operands
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0] or w13.shape[0] < 1:
        raise ValueError(f"{NAME}: w13 {dims(w13)} and w2 {dims(w2)} must be [El, N, H] and [El, H, I]")
    local_experts, n, h = w13.shape
    inner, block = w2.shape[2], world.backend.scale.interleave
    wanted = inner if activation == "gelu" else 2 * -(-inner // block) * block
    if h != x.shape[1] or w2.shape[1] != h or n != wanted:
        raise ValueError(
            f"{NAME}: for x {dims(x)} and w2 {dims(w2)}, w13 must be [{local_experts}, {wanted}, {x.shape[1]}] as"
            f" weft.moe.pack makes it, and w2 [{local_experts}, {x.shape[1]}, I]; w13 is {dims(w13)}"
        )
    expected: Expected = {
        "w13": (w13, tuple(w13.shape), x.dtype),
        "w2": (w2, tuple(w2.shape), x.dtype),
        "b13": (b13, (local_experts, n), x.dtype),
        "b2": (b2, (local_experts, h), x.dtype),
        "shared": (shared, tuple(x.shape), x.dtype),
    }
    check_operands(NAME, world, expected)
    if received is not None and (
        received.shape != (local_experts,) or received.dtype != torch.int32 or not received.is_contiguous()
    ):
        raise ValueError(f"{NAME}: received {dims(received)} must be int32 [{local_experts}], contiguous")


MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, "torch.Tensor | None")


def packed(op: str, name: str, t: MaybeTensor, dim: int, activation: str) -> MaybeTensor:
    """Return a tensor that `pack` has returned, which has `dim` dimensions, as [El, N, ..]. Tensors for "gelu" are
    returned unchanged. Raises ValueError for a tensor that is not packed, because the shapes of a checkpoint's matrices
    could be valid while every result would be wrong."""
    if activation == "gelu" or not isinstance(t, torch.Tensor):  # `check` raises for other types
        return t
    if t.dim() != dim or t.shape[2] != 2:
        raise ValueError(f"{op}: {name} {dims(t)} is not what weft.moe.pack makes of a gate and an up matrix")
    return t.flatten(1, 3)


def pack(w13: torch.Tensor, *, world: World, layout: str = "blocked") -> torch.Tensor:
    """Interleave gate and up rows of the first matrices (or biases) in the blocks that the kernels read. The result is
    [El, blocks, 2, rows of a block, ..]: blocks of `world.backend.scale.interleave` gate rows alternate with up blocks
    of the same size, and the last block is padded with zeros.

    Args:
        w13: [El, 2 I, ..]. With layout "blocked", I gate rows are followed by I up rows (Mixtral's w1 and w3, or Qwen's
            gate_proj and up_proj, concatenated). With "interleaved", gate and up rows alternate (GPT-OSS, transposed to
            [El, 2 I, H]).
        world: the World whose kernels read the result.

    Raises:
        ValueError: the layout is neither "blocked" nor "interleaved", or the number of rows is odd.
        TypeError: w13 is not a tensor.
    """
    check_tensors("pack", w13)
    if layout not in ("blocked", "interleaved") or w13.dim() < 2 or w13.shape[1] % 2:
        raise ValueError(
            f'pack: w13 {dims(w13)} must be [El, 2 I, ..], layout "blocked" or "interleaved", got {layout!r}'
        )
    gate, up = w13.chunk(2, 1) if layout == "blocked" else (w13[:, 0::2], w13[:, 1::2])
    (local_experts, inner, *rest), block = gate.shape, world.backend.scale.interleave
    blocks = -(-inner // block)
    interleaved = w13.new_zeros(local_experts, 2, blocks * block, *rest)
    interleaved[:, 0, :inner], interleaved[:, 1, :inner] = gate, up
    return interleaved.view(local_experts, 2, blocks, block, *rest).transpose(1, 2).contiguous()
