"""Dispatch and combine as separate ops, for callers that have their own expert kernels.

    dispatched   runs the steps of an MoE layer (expert_parallel/dispatched.py), but `place_rows` replaces the grouped
                 GEMMs; place_rows_kernels.py describes the order of the steps
    sequential   uses NCCL's collectives (collectives.py), which need no symmetric memory

Two dispatches may be pending, each in one of two buffers. Each buffer has separate memory and counters. A dispatch
returns an id in host memory, and its combine receives this id as an operand. The two ops are therefore connected in a
compiled graph too.

In the backward pass, combine dispatches the gradient of its result with the same tables, and dispatch combines the
gradients of the rows with all weights equal to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....backends.base import SymmetricTensor
from ....errors import WeftError
from ....kernel_launch import BoundLaunch, Launch, load_in_order, prepared
from ....op import Call, Op, Operands, Returned, Shapes, registered
from ....plans import Dispatched, Plan, Sequential
from ....prepared import unprepared
from ....tensor_checks import Expected, bulk, check_devices, check_operands, dense, dims, requires_grad
from ....torch_library import Backward, CallOptions
from ....transport.memory import lock, rank_word
from ....world import World
from ...common import check_rows, plain_rows
from ..call import MAX_TOPK, check_routes
from ..expert_parallel import dispatched
from ..expert_parallel.dispatched import DispatchedState, LayerWorkspace, make_state, token_memory
from ..expert_parallel.kernels import RoutedRows
from ..expert_parallel.place_rows import order_of, place_rows_launch
from ..expert_parallel.place_rows_kernels import ExpertOrder, Masked, mask_rows
from ..expert_rows import RowOrder, sum_over_ranks
from ..routing import route_tables
from ..tensor_parallel.call import Split
from . import collectives

DISPATCH, COMBINE = "moe.dispatch", "moe.combine"
BUFFERS = 2
ALIGNMENTS = (1, 16, 128)
ROW_LAYOUTS = ("contiguous", "masked")
_numbers = itertools.count()


@dataclass(frozen=True)
class Exchange:
    """The fields that a dispatch and its combine share. All ranks have equal fields.

    tokens: the number of tokens of every rank. max_m: the number of rows that each expert has in the layout "masked"; 0
    means the layout "contiguous", in which each expert's first row is a multiple of layer.tile.
    """

    tokens: tuple[int, ...]
    layer: Split
    max_m: int

    @classmethod
    def from_options(cls, world: World, ids: torch.Tensor, like: torch.Tensor, options: CallOptions) -> Exchange:
        """Return the Exchange for these ids. The tensor `like` defines the shape and dtype of the tokens or rows.
        options: rows of every rank or None, experts, layout, alignment, max_m."""
        rows, experts, layout, alignment, max_m = options
        tokens = (ids.shape[0],) * world.size if rows is None else rows
        most, masked = max(1, *tokens), layout == "masked"
        tile = 1 if masked else alignment
        layer = Split(most, experts, ids.shape[1], like.shape[-1], 8, like.dtype, tile=tile)
        return cls(tokens, layer, min(max_m or world.size * most, world.size * most) if masked else 0)

    def shape(self, world: World) -> tuple[int, ...]:
        """Return the shape of rows."""
        layer = self.layer
        return (layer.local(world), self.max_m, layer.hidden) if self.max_m else (layer.rows(world), layer.hidden)


@dataclass(frozen=True)
class ExchangeCall(Call):
    """A checked call. buffer_index: the buffer that a dispatch must use, or None for any free buffer.
    dispatch_has_gradient: for a combine, whether its dispatch also computes a gradient."""

    exchange: Exchange
    buffer_index: int | None = None
    dispatch_has_gradient: bool = False

    @property
    def rows(self) -> int:
        """Return the largest number of tokens on any rank, but at least 1."""
        return self.exchange.layer.max_tokens_per_rank


class DispatchOperands(NamedTuple):
    """The operands of `dispatch`. The tensor `weights` is detached, because `combine` computes its gradient. leaf: the
    weights before they were detached, for the handle, or None if they require no gradient."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    leaf: torch.Tensor | None = None


class CombineOperands(NamedTuple):
    """The operands of `combine`. handle_id: int64 [2] in host memory, the number of the dispatch and its buffer."""

    y: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    handle_id: torch.Tensor
    shared: torch.Tensor | None = None


@dataclass(eq=False)
class ExchangeState:
    """The state that all calls with one signature and buffer share. order: the tables. row_order: the positions of the
    rows; in the layout "masked" they differ from the positions in the tables. kernels: the state of the kernels, or
    None if NCCL's collectives move the rows."""

    exchange: Exchange
    numbers: tuple[int, int]  # how often dispatch and combine were called (`World.begin`)
    buffer_index: int
    order: ExpertOrder
    row_order: ExpertOrder
    weights: torch.Tensor  # float32 [W, max_tokens, k], the weights of all ranks' tokens
    masked: Masked | None
    kernels: KernelState | None


class KernelState(NamedTuple):
    """The state of the kernels that move the rows."""

    dispatched: DispatchedState
    builder: route_tables.TableBuilder
    tables: route_tables.Tables
    inbox: SymmetricTensor
    outbox: SymmetricTensor
    zero_counters: torch.Tensor  # int32 [W], all zeros: the counters and targets for sums that do not wait for tiles

    def space(self, y: torch.Tensor) -> LayerWorkspace:
        return LayerWorkspace(self.inbox, self.outbox, y, y)


@dataclass(eq=False)
class PendingDispatch:
    """A dispatch that has not been combined yet. is_held: a function that returns whether a caller may still combine
    the dispatch. backward_of: for the dispatch of a gradient, the number of the earlier dispatch whose backward pass
    combines this one."""

    state: ExchangeState
    is_held: Callable[[], bool]
    backward_of: int | None = None


@dataclass(eq=False)
class Handle:
    """The result of `dispatch` that the caller passes to `combine`. The tensors describe the El experts of this rank,
    and are in device memory that is valid until `combine`.

    offsets: int32 [El + 1], the first row of every expert, and the end of the last expert's rows; in the layout
    "masked", all offsets are multiples of max_m. counts: int32 [El], the number of rows of every expert, without
    padding. sources: int32, with one entry for each row: s max_tokens + t for token t of rank s, where max_tokens is
    the largest number of tokens on any rank; -1 for rows without a token. buffer_index: the index of the buffer that
    the dispatch uses (not in a compiled graph). shape: the shape of rows, which is also the shape of y.

    The handle keeps ids and weights: a backward pass sends dy with the same ids, so that every row has the same
    position again. If a handle is no longer referenced, the next `dispatch` or `combine` cancels it.
    """

    world: World
    plan: str | Plan
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: torch.Tensor
    counts: torch.Tensor
    sources: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle_id: torch.Tensor = field(repr=False)
    options: CallOptions = field(repr=False)  # the options of the op `Combine`
    versions: tuple[int, ...] = field(default=(), repr=False)  # torch's version counters of ids and weights

    @property
    def number(self) -> int:
        return int(self.handle_id[0])

    @property
    def buffer_index(self) -> int:
        return int(self.handle_id[1])

    @property
    def combined(self) -> bool:
        return self.number not in pending_dispatches(self.world)

    def cancel(self) -> None:
        """Release the buffer without computing a result. Use it for a dispatch whose rows are not needed. The call is
        collective, and replaces `combine` in the order of calls. Raises WeftError as `combine` does."""
        check_handle(self, None)
        self.world.check()
        cancel(self.world, self.number)
        self.world.finish(self.world.current_stream())


def dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    experts: int,
    world: World,
    layout: str = "contiguous",
    expert_alignment: int = 1,
    max_m: int | None = None,
    rows: Sequence[int] | None = None,
    buffer_index: int | None = None,
    plan: str | Plan = "auto",
) -> tuple[torch.Tensor, Handle]:
    """Send every token to the ranks that hold its experts, in rows that are sorted by expert. The interface is like
    DeepEP's `dispatch`, but the counts stay on the device.

    There are W ranks with El = experts / W experts each: rank d has experts d El to (d + 1) El - 1.

    Args:
        x: [T, H], bfloat16 or float16, this rank's tokens; H is a multiple of 8. T may be 0.
        ids: int32 [T, k], the experts of each token, -1 for none; the ids of a token are distinct; k is at most 16. Ids
            outside 0 to experts - 1 are not sent.
        weights: float32 [T, k], for `combine`.
        experts: the number of experts of all ranks.
        world: the ranks. All ranks must make the same calls in the same order.
        layout: "contiguous" returns rows [R, H]: experts follow one another, each starting at a multiple of
            `expert_alignment`. R is the worst case, W max_tokens min(k, El) plus El alignments, where max_tokens is the
            largest number of tokens on any rank. Padding between experts is zero; rows after the last expert are not
            written. "masked" returns rows [El, max_m, H]: only the first counts[e] rows of expert e are written.
        expert_alignment: 1, 16 or 128; for the layout "contiguous".
        max_m: for the layout "masked", the largest number of rows of an expert; None means W max_tokens. If an expert
            has more rows, its last ones, in the order by source rank (this rank, then the previous one, ..), token and
            top-k slot, are left out: they add nothing to the result. The next call of an op or `World.synchronize`
            raises Overflow after the device has counted these rows. The ranks of their tokens raise it too, but only
            after `combine` has run.
        rows: the numbers of tokens of all ranks, if they are not all equal. None: all ranks have as many tokens as this
            one.
        buffer_index: 0 or 1; None selects the first free buffer. The replays of a CUDA graph use the buffers that the
            capture used.
        plan: "auto", "dispatched", "sequential" or a Plan of one of these classes. The plan must be the same on all
            ranks, and the combine uses it too.

    Returns:
        The rows, in memory that belongs to the caller, and the Handle. The caller must combine each handle once (or
            cancel it, `handle.cancel()`), in the order of the dispatches. At most two handles may be pending at a time,
            on any streams, so that two microbatches can overlap. With contiguous rows, `torch._grouped_mm(rows, w,
            offs=handle.offsets[1:])` runs the experts.

    An expert's rows are sorted by source rank (this rank, then the previous one, ..), token and top-k slot, so equal
    calls return equal rows. The host reads no data from the device. With "sequential", which is also used without
    symmetric memory, NCCL's collectives move the rows, and every rank receives all tokens on the way. All calls share
    the two buffers. Each buffer consists of 2 W max_tokens H elements and 8 W max_tokens k bytes of symmetric memory.
    In a graph of torch.compile the handle's tensors are copies.

    The function is differentiable: combine's backward pass dispatches the gradient of the result, and dispatch's
    backward pass combines the rows' gradients, with all weights 1. The caller must therefore call both ops, and must
    not change ids or weights before the backward pass.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Mismatch: the ranks make different calls.
        Overflow: earlier calls left rows out.
        WeftError: no buffer is free, or the first call of this signature is inside a CUDA graph capture.
        Timeout: at a later call or `World.synchronize`, naming the rank that did not arrive.

    Examples:
        >>> x = torch.ones(4, 16).bfloat16()
        >>> ids, weights = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
        >>> def rank(world):
        ...     rows, handle = weft.moe.dispatch(x, ids, weights, experts=2, world=world)
        ...     weft.moe.combine(rows, handle)
        ...     return handle.counts.tolist()
        >>> weft.spmd(rank, 2, backend="emulated")
        [[2], [6]]
    """
    options = plain_rows(DISPATCH, rows), experts, layout, expert_alignment, max_m, buffer_index
    detached, leaf = (weights.detach(), weights) if requires_grad(weights) else (weights, None)
    result: tuple[torch.Tensor, Handle] = DISPATCH_OP(world, plan, DispatchOperands(x, ids, detached, leaf), options)
    return result


def combine(
    y: torch.Tensor,
    handle: Handle,
    *,
    out: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """Return out[t] = the sum over the token's routes of weight * its row of y, + shared[t]. The sums are in the same
    order as in `weft.moe.moe`, so the same y gives the same bits.

    Sums are accumulated in float32 and in a fixed order. Each rank adds a token's rows in the order of the top-k slots
    and rounds the sum to the dtype. The token's rank adds these sums in rank order.

    Args:
        y: the experts' results, with the shape, dtype and order of the rows that `dispatch` returned. Rows without a
            token are not read.
        handle: the result of a `dispatch` that has not been combined yet; if two are pending, the older one. The
            handle's `ids` are not read again.
        out: [T, H], contiguous: the tensor for the result. `out` may overlap y or shared; in this case the result is
            computed in other memory and copied.
        shared: [T, H], added to the sum (the rows of a shared expert), or None.
        world: the ranks, to check that the handle belongs to them; or None.

    The function is differentiable in y, shared and the dispatched weights. A call with `out` is not differentiable.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
        Overflow: earlier calls left rows out.
        WeftError: the handle has already been combined, is not the oldest pending one, or belongs to a different World.
        Timeout: as `dispatch`.

    Examples:
        >>> x = torch.ones(4, 16).bfloat16()
        >>> ids, weights = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
        >>> def rank(world):
        ...     rows, handle = weft.moe.dispatch(x, ids, weights, experts=2, world=world)
        ...     return weft.moe.combine(2 * rows, handle)[0, 0].item()
        >>> weft.spmd(rank, 2, backend="emulated")
        [2.0, 2.0]
    """
    check_handle(handle, world)
    expected: Expected = {
        "y": (y, handle.shape, handle.dtype),
        "shared": (shared, (len(handle.ids), handle.shape[-1]), handle.dtype),
    }
    check_operands(COMBINE, handle.world, expected)
    gradient = torch.is_grad_enabled() and requires_grad(y, shared, handle.weights)
    before, current_versions = handle.versions, versions(handle.ids, handle.weights)
    if gradient and before and current_versions and before != current_versions:
        raise RuntimeError(f"{COMBINE}: ids or weights were written since {DISPATCH}, and the gradient needs them")
    operands = CombineOperands(y, handle.weights, handle.ids, handle.handle_id, shared)
    result: torch.Tensor = COMBINE_OP(handle.world, handle.plan, operands, handle.options, out)
    return result


# -- checks ------------------------------------------------------------------------------------------------------------


def check_handle(handle: Handle, world: World | None) -> None:
    """Raise TypeError or WeftError for a handle that cannot be combined now."""
    if not isinstance(handle, Handle):
        raise TypeError(f"{COMBINE}: handle must be what weft.moe.dispatch returned, got {type(handle).__name__}")
    if world is not None and world is not handle.world:
        raise WeftError(f"{COMBINE}: the handle is of {handle.world}, not of {world}")
    if torch.compiler.is_compiling():  # which dispatches are pending is known only when the graph runs
        return
    if handle.combined:
        raise WeftError(f"{COMBINE}: the handle of buffer {handle.buffer_index} was combined already")
    give_back(handle.world)
    number, oldest = next(iter(pending_dispatches(handle.world).items()))
    if number != handle.number:
        raise WeftError(
            f"{COMBINE}: the handle of buffer {handle.buffer_index} is out of order: that of buffer"
            f" {oldest.state.buffer_index} was dispatched before it, and must be combined or cancelled first"
        )


# -- pending dispatches ------------------------------------------------------------------------------------------------


def pending_dispatches(world: World) -> dict[int, PendingDispatch]:
    """Return the pending dispatches by number, oldest first."""
    return world.cached(f"{DISPATCH}: pending", dict)


def free_buffer(world: World, asked: int | None) -> int:
    """Return the index of a free buffer, which is `asked` unless `asked` is None. Raises WeftError if none is free."""
    give_back(world)
    calls = pending_dispatches(world)
    unfinished = [number for number, call in calls.items() if call.backward_of is not None]
    if len(calls) == BUFFERS and unfinished:  # a backward pass that stopped at the experts left this dispatch pending
        cancel(world, unfinished[0])
    taken = [call.state.buffer_index for call in calls.values()]
    free = [s for s in range(BUFFERS) if s not in taken and asked in (None, s)]
    if not free:
        which = f"buffers {taken} are" if asked is None else f"buffer {asked} is"
        raise WeftError(f"{DISPATCH}: {which} in use; a handle has to be combined or cancelled first")
    return free[0]


def give_back(world: World) -> None:
    """Cancel the oldest dispatches, up to the first one whose handle is still referenced. All ranks cancel the same
    dispatches if they drop the same handles."""
    calls = pending_dispatches(world)
    while calls:
        number, oldest = next(iter(calls.items()))
        if oldest.is_held():
            return
        cancel(world, number)


def cancel(world: World, number: int) -> None:
    """Combine a dispatch, and write the result to memory that nothing reads."""
    call = pending_dispatches(world)[number]
    exchange = call.state.exchange
    shapes = exchange.shape(world), (exchange.tokens[world.rank], exchange.layer.hidden)
    y, out = (world.zeros(shape, exchange.layer.dtype) for shape in shapes)
    launch_combine(world, number, y, None, out)


# -- state made once ---------------------------------------------------------------------------------------------------


def exchange_state(world: World, exchange: Exchange, plan: Plan, buffer_index: int) -> ExchangeState:
    """Return the state that calls with this signature, plan and buffer share. The first call is collective."""
    layer, max_m = exchange.layer, exchange.max_m

    def ints(*shape: int) -> torch.Tensor:
        return world.zeros(shape, torch.int32)

    def make() -> ExchangeState:
        sizes = dict(experts=layer.experts, k=layer.k, H=layer.hidden, dtype=str(layer.dtype), max_m=max_m)
        kind = dict(rows=exchange.tokens, **sizes, expert_alignment=layer.tile, buffer_index=buffer_index, plan=plan)
        numbers = world.check_same_on_all_ranks(DISPATCH, **kind), world.check_same_on_all_ranks(COMBINE, **kind)
        el, shape = layer.local(world), (world.size, layer.max_tokens_per_rank, layer.k)
        num_routes, kernels = math.prod(shape), None
        if isinstance(plan, Dispatched):
            kernels = kernel_state(world, layer, plan, buffer_index)
            routes = kernels.builder.routes
            order, weights = order_of(kernels.tables, routes.ids), routes.shared_weights.local
        else:
            order = ExpertOrder(ints(*shape), ints(num_routes), ints(layer.rows(world)), ints(el + 1), ints(el))
            weights = world.zeros(shape, torch.float32)
        masked, row_order = None, order
        if max_m:
            masked = Masked(ints(num_routes), ints(el, max_m), ints(el))
            offsets = world.tensor([max_m * e for e in range(el + 1)], torch.int32)
            row_order = ExpertOrder(order.ids, masked.route_rows, masked.sources, offsets, masked.counts)
        state = ExchangeState(exchange, numbers, buffer_index, order, row_order, weights, masked, kernels)
        if kernels is not None:
            load(world, state, kernels)
        return state

    return world.cached((DISPATCH, exchange, plan, buffer_index), make)


def kernel_state(world: World, layer: Split, plan: Dispatched, buffer_index: int) -> KernelState:
    """Return the state of a buffer's kernels. The call is collective."""
    dispatch_name, combine_name = f"{DISPATCH} {buffer_index}", f"{COMBINE} {buffer_index}"
    names = f"{dispatch_name}, rows", f"{combine_name}, sums"
    left_out = route_tables.left_out_words(world, buffer_index)
    state = make_state(world, layer, plan, layer.local(world), layer.rows(world), *names, left_out, combine_name)
    sizes = route_tables.TableSizes(state.local_experts, layer.max_tokens_per_rank, layer.tile)
    tables = route_tables.builder_of(world, layer.k, sizes, buffer_index)
    inbox, outbox = (token_memory(world, layer, name) for name in (dispatch_name, combine_name))
    return KernelState(state, *tables, inbox, outbox, world.zeros((max(world.size, 16),), torch.int32))


def load(world: World, state: ExchangeState, kernels: KernelState) -> None:
    """Load all kernels except the kernels that build the tables, before any rank waits for another. The last kernel is
    loaded a second time, as a kernel that need not share an SM with another launch."""
    layer = state.exchange.layer
    one_row = world.empty((1, layer.hidden), layer.dtype)
    space = kernels.space(one_row)
    load_in_order(
        (
            dispatched.dispatch_launch(world, kernels.dispatched, one_row, state.order.ids[world.rank], space),
            place_launch(world, state, kernels, one_row),
            *combine_launches(world, state, kernels, one_row, None, one_row),
            combine_launches(world, state, kernels, one_row, None, one_row, co_resident=False)[1],
        )
    )


# -- the launches ------------------------------------------------------------------------------------------------------


def place_launch(world: World, state: ExchangeState, kernels: KernelState, rows: torch.Tensor) -> BoundLaunch:
    """Return the launch of `place_rows`. With an alignment, the launch also sets the padding rows to zero."""
    arrivals, is_padded = kernels.dispatched.dispatch_programs, state.exchange.layer.tile > 1
    return place_rows_launch(world, kernels.dispatched, kernels.inbox.local, rows, state.row_order, arrivals, is_padded)


@prepared
def mask_launch(world: World, state: ExchangeState, is_backward: bool) -> Launch:
    """Return the launch of `mask_rows`. A backward pass does not count rows that are left out, because the forward pass
    has counted them."""
    left_out = None if state.kernels is None or is_backward else state.kernels.dispatched.left_out
    routes, block = state.row_order.route_rows.numel(), world.backend.scale.routes
    layer, local_experts = state.exchange.layer, state.exchange.layer.local(world)
    programs = min(max(-(-routes // block), local_experts), world.sm_count)
    return Launch(
        world,
        mask_rows,
        programs,
        dict(num_warps=4, local=True),
        order=state.order,
        masked=state.masked,
        rank=rank_word(world),
        guard=None if is_backward else world.backend.guard(),
        left_out=left_out,
        routes=routes,
        MAX_M=state.exchange.max_m,
        max_tokens=layer.max_tokens_per_rank,
        EL=local_experts,
        BLOCK=block,
        PROGRAMS=programs,
    )


def combine_launches(
    world: World,
    state: ExchangeState,
    kernels: KernelState,
    y: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    co_resident: bool = True,
) -> tuple[BoundLaunch, BoundLaunch]:
    """Return the launches of `combine_rows` and of the sum over ranks.

    The sum reads the ids that `share` copied, so the caller may overwrite the original ids. Its launch has fewer and
    smaller programs than in a whole layer, so that the waiting programs of two buffers leave room on the SMs for the
    dispatch programs.
    """
    rows, space = RoutedRows(y, state.row_order.route_rows, state.weights), kernels.space(y)
    zeros = kernels.zero_counters
    final_sum = dispatched.final_sum_launch(
        world, kernels.dispatched, rows, state.order.ids[world.rank], shared, out, space, co_resident=co_resident
    )
    return dispatched.combine_launch(world, kernels.dispatched, rows, zeros, zeros, space), final_sum


# -- a call ------------------------------------------------------------------------------------------------------------


def launch_dispatch(
    world: World,
    state: ExchangeState,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    is_backward: bool = False,
) -> None:
    """Dispatch contiguous tensors in a free buffer, on the current stream. is_backward: x is a gradient."""
    world.begin(state.numbers[0])
    stream, kernels = world.current_stream(), state.kernels
    world.order(lock(world, f"{DISPATCH} {state.buffer_index}"), stream)
    if kernels is not None:
        side, start = world.side_stream(f"{DISPATCH} {state.buffer_index}"), world.record(stream)
        route_tables.share_routes(world, kernels.builder.routes, ids, weights)
        world.wait_event(side, start)
        dispatched.dispatch_launch(world, kernels.dispatched, x, ids, kernels.space(rows)).on(side)
        route_tables.run_builder(world, kernels.builder, kernels.tables, state.weights, is_backward)
    else:
        tokens = collectives.gather_tokens(world, state.exchange.layer, state.order, state.weights, x, ids, weights)
    if state.masked is not None:
        mask_launch(world, state, is_backward)(stream)
    if kernels is not None:
        place_launch(world, state, kernels, rows).on(stream)
        world.wait_event(stream, world.record(side))  # from here on the caller may overwrite x and ids
    else:
        collectives.pick_rows(world, tokens, state.row_order.sources, rows)


def run_dispatch(
    world: World, call: ExchangeCall, plan: Plan, operands: DispatchOperands, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Fill `out` with the rows, on the current stream. Return offsets, counts, sources and the handle's id."""
    state, number = exchange_state(world, call.exchange, plan, free_buffer(world, call.buffer_index)), next(_numbers)
    launch_dispatch(world, state, operands.x, operands.ids, operands.weights, out)
    handle_id = torch.tensor([number, state.buffer_index], device="cpu")
    memory = StorageWeakRef(handle_id.untyped_storage())
    pending_dispatches(world)[number] = PendingDispatch(state, lambda: not memory.expired())
    _, _, sources, offsets, counts = state.row_order
    return offsets, counts, sources, handle_id


def run_combine(world: World, call: ExchangeCall, plan: Plan, operands: CombineOperands, out: torch.Tensor) -> None:
    """Compute out [T, H] = the weighted sums of y's rows, + shared, on the current stream."""
    number, buffer_index = operands.handle_id.tolist()
    if number not in pending_dispatches(world):
        raise WeftError(f"{COMBINE}: the handle of buffer {buffer_index} was combined already")
    launch_combine(world, number, operands.y, operands.shared, out)


def launch_combine(world: World, number: int, y: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor) -> None:
    """Combine a dispatch and free its buffer."""
    pending, stream = pending_dispatches(world)[number], world.current_stream()
    state = pending.state
    world.begin(state.numbers[1])
    world.order(lock(world, f"{DISPATCH} {state.buffer_index}"), stream)
    if state.kernels is not None:
        for step in combine_launches(world, state, state.kernels, y, shared, out):
            step.on(stream)
    else:
        collectives.combine(world, state.exchange.layer, state.row_order.route_rows, state.weights, y, shared, out)
        if state.masked is not None and pending.backward_of is None:
            collectives.tell_sources(world, state.masked.route_rows)
    del pending_dispatches(world)[number]


def versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the number of writes that torch has counted for each tensor. Torch counts no writes in compiled graphs,
    nor to tensors that were made in inference mode and therefore have no gradient."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(0 if t.is_inference() else t._version for t in tensors)


# -- the ops -----------------------------------------------------------------------------------------------------------


class ExchangeOp(Op[ExchangeCall]):
    """The base class of both operators. In `exchange_state` the ranks check that they make the same call with the same
    buffer."""

    emulator_plan = Dispatched
    by_library = False

    def expected(self, world: World, call: ExchangeCall, mode: str) -> Plan:
        return Dispatched()

    def unsupported(self, world: World, call: ExchangeCall, plan: Plan, asked: str | Plan) -> str | None:
        return world.backend.symmetric_unsupported

    def check_same_on_all_ranks(self, world: World, call: ExchangeCall, plan: Plan, **details: Hashable) -> int | None:
        return None


class Dispatch(ExchangeOp):
    """The definition of `dispatch`. Options: rows of every rank or None, experts, layout, expert_alignment, max_m,
    buffer_index. Results: rows; offsets, counts and sources, which are in memory of the buffer; the handle's id."""

    name, public = "moe_dispatch", DISPATCH
    signature = (
        "Tensor x, Tensor ids, Tensor weights, SymInt[]? rows, SymInt experts, str layout, SymInt expert_alignment,"
        " SymInt? max_m, SymInt? buffer_index"
    )
    results, num_borrowed_outputs = 5, 3
    operand_type = DispatchOperands
    runs = {Sequential: unprepared(run_dispatch), Dispatched: unprepared(run_dispatch)}

    def check(self, world: World, operands: DispatchOperands, options: CallOptions) -> ExchangeCall:
        (x, ids, weights, _), (rows, experts, layout, alignment, max_m, buffer_index) = operands, options
        check_devices(DISPATCH, world, dict(x=x, ids=ids, weights=weights))
        check_routes(x, ids, weights, DISPATCH)
        if layout not in ROW_LAYOUTS or alignment not in ALIGNMENTS:
            raise ValueError(
                f"{DISPATCH}: layout {layout!r} is one of {list(ROW_LAYOUTS)}, expert_alignment {alignment!r} of"
                f" {list(ALIGNMENTS)}"
            )
        if not isinstance(experts, int) or experts < 1 or experts % world.size or world.size > 32:
            raise ValueError(f"{DISPATCH}: {experts!r} experts over {world.size} ranks, of which there are at most 32")
        local_experts, k = experts // world.size, ids.shape[1]
        if local_experts > route_tables.MAX_LOCAL_EXPERTS or k > min(experts, MAX_TOPK):
            raise ValueError(
                f"{DISPATCH}: k {k} of ids {dims(ids)}: at most {MAX_TOPK}, and no more than {experts} experts, of"
                f" which a rank has at most {route_tables.MAX_LOCAL_EXPERTS}"
            )
        if x.shape[1] % 8 or not x.shape[1]:
            raise ValueError(f"{DISPATCH}: rows must be whole 16-byte words, and H of x {dims(x)} is no multiple of 8")
        if max_m is not None and (layout != "masked" or not isinstance(max_m, int) or max_m < 1):
            raise ValueError(f'{DISPATCH}: max_m {max_m!r} is a number of rows, of layout "masked", not {layout!r}')
        if buffer_index is not None and buffer_index not in range(BUFFERS):
            raise ValueError(f"{DISPATCH}: buffer_index {buffer_index!r} is not 0, 1 or None")
        if rows is not None:
            check_rows(DISPATCH, world, rows, x, whole=False)
        return ExchangeCall(Exchange.from_options(world, ids, x, options[:-1]), buffer_index)

    def outputs(self, world: World, call: ExchangeCall) -> Shapes:
        shape, local_experts = call.exchange.shape(world), call.exchange.layer.experts // world.size
        return [
            (shape, call.exchange.layer.dtype),
            *((n, torch.int32) for n in ((local_experts + 1,), (local_experts,), shape[:-1])),
        ]

    def fake(self, world: World, operands: DispatchOperands, options: CallOptions) -> list[torch.Tensor]:
        handle_id = operands.x.new_empty((2,), dtype=torch.int64, device="cpu")
        return [*super().fake(world, operands, options), handle_id]

    def postprocess(
        self, world: World, plan: str | Plan, operands: DispatchOperands, options: CallOptions, results: Operands
    ) -> Returned:
        (rows, offsets, counts, sources, handle_id), (x, ids, weights, leaf) = results, operands
        weights, gradients = weights if leaf is None else leaf, torch.is_grad_enabled()
        if gradients and not torch.compiler.is_compiling():
            # The experts' backward pass may read the tables after a later call has reused the buffer.
            offsets, counts, sources = offsets.clone(), counts.clone(), sources.clone()
        tables, options = (offsets, counts, sources), (*options[:-1], gradients and x.requires_grad)
        shape, versions_then = tuple(rows.shape), versions(ids, weights)
        return rows, Handle(world, plan, shape, rows.dtype, *tables, ids, weights, handle_id, options, versions_then)

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return results[-1:]

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        (handle_id,), (drows, *_) = ctx.saved, ctx.gradients
        assert handle_id is not None and drows is not None
        calls, number = pending_dispatches(world), int(handle_id[0])
        backward_number = next((n for n, call in calls.items() if call.backward_of == number), None)
        if backward_number is None:
            raise WeftError(f"{DISPATCH}: a gradient of rows without one of what {COMBINE} made of this handle")
        weights, dx = calls[backward_number].state.weights, world.empty(ctx.shapes[0], drows.dtype)
        world.call(lambda: weights.fill_(1.0), [], [weights], world.current_stream())
        launch_combine(world, backward_number, dense(drows), None, dx)
        return [dx, None, None]


class Combine(ExchangeOp):
    """The definition of `combine`. Options: the options of the dispatch except buffer_index, and whether the dispatch
    computes a gradient. The operands may have the shapes of any pending dispatch, because the handle's id alone
    identifies the dispatch."""

    name, public = "moe_combine", COMBINE
    signature = (
        "Tensor y, Tensor weights, Tensor ids, Tensor handle_id, Tensor? shared, SymInt[]? rows, SymInt experts,"
        " str layout, SymInt expert_alignment, SymInt? max_m, bool dispatch_has_gradient"
    )
    operand_type = CombineOperands
    runs = {Sequential: unprepared(run_combine), Dispatched: unprepared(run_combine)}

    def check(self, world: World, operands: CombineOperands, options: CallOptions) -> ExchangeCall:
        exchange = Exchange.from_options(world, operands.ids, operands.y, options[:-1])
        return ExchangeCall(exchange, dispatch_has_gradient=options[-1])

    def meta(self, world: World, operands: CombineOperands, options: CallOptions) -> Shapes:
        return [((operands.ids.shape[0], operands.y.shape[-1]), operands.y.dtype)]

    def outputs(self, world: World, call: ExchangeCall) -> Shapes:
        layer = call.exchange.layer
        return [((call.exchange.tokens[world.rank], layer.hidden), layer.dtype)]

    def dense_operands(self, plan: Plan, operands: CombineOperands) -> CombineOperands:
        y, shared = bulk((operands.y, operands.shared))
        assert y is not None
        return operands._replace(y=y, shared=shared)

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return operands[:4]

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        y, weights, ids, handle_id = (dense(t) for t in ctx.saved if t is not None)
        (dout,), call = ctx.gradients, ctx.call
        assert dout is not None
        state, number = exchange_state(world, call.exchange, ctx.plan, free_buffer(world, None)), next(_numbers)
        drows = world.zeros(call.exchange.shape(world), dout.dtype)
        launch_dispatch(world, state, dense(dout), ids, weights, drows, is_backward=True)
        task = torch._C._current_graph_task_id()
        is_held = lambda: torch._C._current_graph_task_id() == task  # noqa: E731
        pending_dispatches(world)[number] = PendingDispatch(state, is_held, int(handle_id[0]))
        dy, dots = route_gradients(world, state, drows, y)
        dweights = sum_over_ranks(world, dots, weights)
        if not call.dispatch_has_gradient:  # otherwise the dispatch's backward pass combines the gradient's dispatch
            launch_combine(world, number, drows, None, world.empty(dout.shape, dout.dtype))
        return [dy, dweights, None, None, dout]


def route_gradients(
    world: World, state: ExchangeState, rows: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the gradient times the weights of their routes, with zeros in rows without a route. Also
    return float32 [W, max_tokens k]: for every rank's routes, the dot product of the gradient's row and the row of
    y."""
    layer = state.exchange.layer
    dy = world.empty(rows.shape, rows.dtype)
    dots = world.empty((world.size, layer.max_tokens_per_rank * layer.k), torch.float32)
    _, rows_by_route, sources, offsets, _ = state.row_order
    route_rows, weights = (t.view(-1, layer.k) for t in (rows_by_route, state.weights))
    order = RowOrder(route_rows, weights, sources.view(-1), offsets)

    def fill() -> None:
        gradient, y_rows = rows.view(-1, layer.hidden).float(), y.view(-1, layer.hidden)
        dy.view(gradient.shape).copy_(gradient * order.row_weights())
        products = (gradient * torch.where(order.is_token, y_rows, 0)).sum(1)
        dots.view(-1).copy_(order.by_route(products))

    world.call(fill, [rows, y, *order.read], [dy, dots], world.current_stream())
    return dy, dots


DISPATCH_OP, COMBINE_OP = registered(Dispatch()), registered(Combine())
