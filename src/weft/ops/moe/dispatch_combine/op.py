"""Dispatch and combine by themselves: for experts of the caller's own kernels.

The steps are those of a layer (expert_parallel/dispatched.py), with `place_rows` (place_rows_kernels.py, which says
what orders them) in place of the grouped GEMMs. Two calls may be under way, each in a slot with memory and counters of
its own.
Without symmetric memory tokens and sums go by the library's collectives (collectives.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.autograd.function import once_differentiable

from ....backends.base import SymmetricTensor
from ....errors import WeftError
from ....kernel_launch import GivenLaunch, Launch, prepared
from ....op import check_call
from ....plans import SMALL_DISPATCHED, Dispatched
from ....tensor_checks import check_device, dense, dims, output, overlap, requires_grad
from ....torch_library import CallOptions, Context
from ....transport.memory import lock, rank_word
from ....world import World
from ...common import given_rows, plain_rows
from ..call import MOST_K, Layer, check_routes
from ..expert_parallel import dispatched
from ..expert_parallel.dispatched import LastSums, Prepared, Space
from ..expert_parallel.kernels import Routed
from ..expert_parallel.place_rows import places_rows
from ..expert_parallel.place_rows_kernels import ExpertOrder, Masked, mask_rows
from ..routing import route_tables
from ..tensor_parallel.call import Split
from . import collectives

DISPATCH, COMBINE = "moe.dispatch", "moe.combine"
SLOTS = 2
UnderWay: TypeAlias = "tuple[weakref.ref[Handle], Placed, int]"  # and how many tokens the rank dispatched
ALIGNMENTS = (1, 16, 128)
ROW_LAYOUTS = ("contiguous", "masked")
SUMMERS = 2  # programs of the last sums on an SM


@dataclass(frozen=True)
class Exchange:
    """What one call is, the same on all ranks. tokens: of every rank. most: rows of an expert, masked; 0: contiguous,
    experts begin at multiples of `alignment`."""

    tokens: tuple[int, ...]
    layer: Layer
    alignment: int
    most: int

    def agreed(self, slot: int) -> dict[str, Hashable]:
        layer = self.layer
        return dict(
            rows=self.tokens,
            experts=layer.experts,
            k=layer.k,
            H=layer.hidden,
            dtype=str(layer.dtype),
            expert_alignment=self.alignment,
            max_m=self.most,
            slot=slot,
        )


@dataclass(eq=False, kw_only=True)
class Placed:
    """What calls of one kind and slot have in common, however rows travel."""

    exchange: Exchange
    numbers: tuple[int, int]  # of dispatch and of combine (`World.begin`)
    slot: int
    local: int  # experts of this rank
    shape: tuple[int, ...]  # of rows
    order: ExpertOrder
    weights: torch.Tensor  # float32 [W, C, k], of all ranks
    offsets: torch.Tensor  # int32 [El + 1], of rows
    placed: ExpertOrder  # of rows; masked, with other slots than the tables
    masked: Masked | None = None


@dataclass(eq=False, kw_only=True)
class ByCollectives(Placed):
    """What calls of one kind and slot have in common where the library's collectives move the rows."""

    layer: Split


@dataclass(eq=False, kw_only=True)
class Ready(Placed):
    """What calls of one kind and slot have in common where the kernels move the rows."""

    of: Prepared
    inbox: SymmetricTensor
    outbox: SymmetricTensor
    settled: torch.Tensor  # int32 [W], zeros: counters, and their targets, of sums that wait for no tile here

    def space(self, y: torch.Tensor) -> Space:
        return Space(self.inbox, self.outbox, y, y)

    def rows(self, y: torch.Tensor) -> Routed:
        return Routed(y, self.placed.slots, self.weights)


@dataclass(eq=False)
class Handle:
    """What `dispatch` gives `combine`. Of the El experts of this rank, in device memory that is good until `combine`:

    offsets: int32 [El + 1], first row of every expert, and the end of the last; masked, multiples of max_m.
    counts: int32 [El], rows of every expert, without padding.
    sources: int32, of the shape of rows without H: s C + t for token t of rank s, C the most tokens of a rank; -1 for
        rows of no token.
    slot: which of the two it has; shape: of rows, and so of y.

    It keeps ids and weights: the same ids make the same rows again, which a backward pass will send dy by. A handle
    that nobody holds any more is cancelled by the next `dispatch` or `combine`.
    """

    world: World
    slot: int
    shape: tuple[int, ...]
    offsets: torch.Tensor
    counts: torch.Tensor
    sources: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    ready: Placed = field(repr=False)
    combined: bool = False
    versions: tuple[int, ...] = field(default=(), repr=False)  # of ids and weights, as torch counts writes
    node: weakref.ref[torch.autograd.graph.Node] | None = field(default=None, repr=False)  # of x's gradient
    back: Handle | None = field(default=None, repr=False)  # of the gradient, under way from combine's to dispatch's

    def cancel(self) -> None:
        """Collective, in the place of `combine` and with its order: gives the slot back, without a result. For a
        dispatch whose rows nobody wants. Raises WeftError as `combine` does."""
        check_handle(self, None)
        self.world.check()
        cancel(self.world, self.ready, self.ids.shape[0])
        self.combined = True
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
    slot: int | None = None,
) -> tuple[torch.Tensor, Handle]:
    """Every token to the ranks of its experts, in rows by expert (the interface is DeepEP's `dispatch`, with counts
    that stay on the device).

    W ranks, El = experts / W of them on each: rank d has experts d El to (d + 1) El - 1.

    Args:
        x: [T, H], bfloat16 or float16, this rank's tokens; H a multiple of 8. T may be 0.
        ids: int32 [T, k], the experts of each token, -1 for none, those of a token distinct; k at most 16. Ids outside
            0 to experts - 1 go nowhere.
        weights: float32 [T, k], for `combine`.
        experts: of all ranks.
        world: the ranks. All of them must make the same calls in the same order.
        layout: "contiguous", rows [R, H]: expert after expert, each from a multiple of `expert_alignment` on, R the
            most that there can be, W C min(k, El) and El alignments, C the most tokens of a rank. Padding between
            experts is zero, what lies behind the last one is left alone.
            "masked", rows [El, max_m, H]: the first counts[e] of expert e; the others are left alone.
        expert_alignment: 1, 16 or 128; of layout "contiguous".
        max_m: of layout "masked", the most rows of an expert; W C if None. Of an expert with more the last ones, by
            source rank (this one, then the one before it, ..), token and slot, are left out: they add nothing to
            the result, and once the device has counted them, the next call of an op or `World.synchronize` raises
            Overflow.
        rows: tokens of every rank, where they are not all equal. None: all have as many as this one.
        slot: 0 or 1, None: the first that is free. A CUDA graph's replays take the slots that its capture took.

    Returns: rows, memory of its own, and the Handle, to be combined (or cancelled, `handle.cancel()`) once, in the
        order of the dispatches. At most two may be under way, on any streams: two microbatches. With contiguous rows,
        `torch._grouped_mm(rows, w, offs=handle.offsets[1:])` runs the experts.

    Within an expert, rows are by source rank (this one, then the one before it, ..), token and slot: the same call
    makes the same rows. Nothing is read by the host. Without symmetric memory the library's collectives move rows, and
    every rank gets all tokens on the way. Memory of a slot, shared by all calls: symmetric, 2 W C H elements
    and 8 W C k bytes. Not to be compiled by torch.compile. Differentiable: the backward pass of combine dispatches the
    gradient of its result, that of dispatch combines the rows' gradients, all with weights of 1; so there must be both,
    and ids and weights stay as they are until then.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch: ranks that do not make the same call.
        Overflow: rows of calls before were left out.
        WeftError: no slot is free; the first call of its kind inside a CUDA graph capture.
        Timeout: at a later call or `World.synchronize`, naming the rank that did not arrive.
    """
    options = (experts, layout, expert_alignment, max_m, plain_rows(DISPATCH, rows))
    exchange = checked(world, x, ids, weights, options)
    world.check()
    lost = world.backend.left_out()
    taken = free_slot(world, slot)
    if torch.is_grad_enabled() and x.requires_grad:
        found: list[Handle] = []
        placed = DispatchedRows.apply(x, ids, weights, exchange, taken, found, world)
        return world.behind((placed, found[0]), lost)
    given = begin(world, exchange, taken, dense(x), dense(ids), dense(weights))
    world.finish(world.current_stream())
    return world.behind(given, lost)


def combine(
    y: torch.Tensor,
    handle: Handle,
    *,
    out: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    world: World | None = None,
) -> torch.Tensor:
    """out[t] = the sum over the token's routes of weight * its row of y, + shared[t]: as `weft.moe.moe` sums, so that
    where its experts give the same y, the result has the same bits.

    Sums are accumulated in float32 and in a fixed order: a rank's sum of a token's experts there, by slot, is rounded
    to the dtype; the token's rank adds these in the order of the ranks.

    Args:
        y: of the shape, dtype and order of the rows that came with the handle. Rows of no token are not read.
        handle: of `dispatch`, not combined yet, and the older one of two. Its `ids` are not read again.
        out: [T, H], contiguous: where to write the result; it may hold, or overlap, y or shared: the result is then
            made elsewhere and copied.
        shared: [T, H], added to the sum (a shared expert's rows), or None.
        world: the ranks, where it is to be checked that the handle is theirs.

    Differentiable in y, shared and the weights that were dispatched; not with out.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Overflow: rows of calls before were left out.
        WeftError: a handle that was combined already, is not the older one, or is of another World.
        Timeout: as `dispatch`.
    """
    check_handle(handle, world)
    check_sums(handle, y, shared)
    world = handle.world
    world.check()
    lost = world.backend.left_out()
    t = handle.ids.shape[0]
    if torch.is_grad_enabled() and requires_grad(y, shared, handle.weights):
        if out is not None:
            raise ValueError(f"{COMBINE}: out= has no gradient, and an operand requires one; use torch.no_grad()")
        return world.behind(CombinedRows.apply(y, handle.weights, shared, handle), lost)
    given = output(COMBINE, world, out, (t, handle.shape[-1]), y.dtype)
    y, shared = dense(y), None if shared is None else dense(shared)
    # Tokens are done one after another, and a token's rows of y lie anywhere among those of others.
    apart = given.data_ptr() % 16 != 0 or overlap(out, y, shared)
    result = world.empty(given.shape, y.dtype) if apart else given
    end(handle, y, shared, result)
    stream = world.current_stream()
    if result is not given:
        world.copy(given, result, stream)
    world.finish(stream)
    return world.behind(given, lost)


# -- checks ------------------------------------------------------------------------------------------------------------


def checked(world: World, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, options: CallOptions) -> Exchange:
    """What is called; by what is the same, checked once. Raises for anything that this rank alone can see is wrong."""
    check_call(DISPATCH, world)
    for name, t in (("x", x), ("ids", ids), ("weights", weights)):
        check_device(DISPATCH, world, name, t)
    key = (DISPATCH, x.shape, x.dtype, ids.shape, ids.dtype, weights.shape, weights.dtype, *options)
    found: Exchange | None = world.decided.get(key)
    if found is None:
        found = world.decided[key] = check(world, x, ids, weights, *options)
    return found


def check(
    world: World,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    layout: str,
    alignment: int,
    max_m: int | None,
    rows: tuple[int, ...] | None,
) -> Exchange:
    check_routes(x, ids, weights, DISPATCH)
    if layout not in ROW_LAYOUTS or alignment not in ALIGNMENTS:
        raise ValueError(
            f"{DISPATCH}: layout {layout!r} is one of {list(ROW_LAYOUTS)}, expert_alignment {alignment!r} of"
            f" {list(ALIGNMENTS)}"
        )
    if not isinstance(experts, int) or experts < 1 or experts % world.size or world.size > 32:
        raise ValueError(f"{DISPATCH}: {experts!r} experts over {world.size} ranks, of which there are at most 32")
    local, k = experts // world.size, ids.shape[1]
    if local > route_tables.EXPERTS or k > min(experts, MOST_K):
        raise ValueError(
            f"{DISPATCH}: k {k} of ids {dims(ids)}: at most {MOST_K}, and no more than {experts} experts, of which a"
            f" rank has at most {route_tables.EXPERTS}"
        )
    if x.shape[1] % 8 or not x.shape[1]:
        raise ValueError(f"{DISPATCH}: rows must be whole 16-byte words, and H of x {dims(x)} is no multiple of 8")
    if max_m is not None and (layout != "masked" or not isinstance(max_m, int) or max_m < 1):
        raise ValueError(f'{DISPATCH}: max_m {max_m!r} is a number of rows, of layout "masked", not {layout!r}')
    tokens = (x.shape[0],) * world.size if rows is None else given_rows(DISPATCH, world, rows, x, whole=False)
    capacity = max(1, *tokens)
    most = min(max_m or world.size * capacity, world.size * capacity) if layout == "masked" else 0
    layer = Layer(capacity, experts, k, x.shape[1], 8, x.dtype)
    return Exchange(tokens, layer, 1 if most else alignment, most)


def free_slot(world: World, asked: int | None) -> int:
    give_back(world)
    taken = [ready.slot for _, ready, _ in under_way(world)]
    if asked is not None and asked not in range(SLOTS):
        raise ValueError(f"{DISPATCH}: slot {asked!r} is not 0, 1 or None")
    free = [s for s in range(SLOTS) if s not in taken and asked in (None, s)]
    if not free:
        which = f"slots {taken} are" if asked is None else f"slot {asked} is"
        raise WeftError(f"{DISPATCH}: {which} under way; a handle has to be combined or cancelled first")
    return free[0]


def under_way(world: World) -> list[UnderWay]:
    """Dispatches that are not combined, the oldest first."""
    return world.cached(f"{DISPATCH}: handles", list)


def give_back(world: World) -> None:
    """Cancel the oldest dispatches, up to the first whose handle somebody holds. On all ranks alike, where they let go
    of handles alike."""
    held = under_way(world)
    while held and held[0][0]() is None:
        cancel(world, *held[0][1:])


def cancel(world: World, made: Placed, tokens: int) -> None:
    """Combine the oldest dispatch, of so many tokens, to memory that nobody reads."""
    y, out = (world.zeros(shape, made.exchange.layer.dtype) for shape in (made.shape, (tokens, made.shape[-1])))
    finished(world, made, y, None, out)


def check_handle(handle: Handle, world: World | None) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"{COMBINE}: handle must be what weft.moe.dispatch returned, got {type(handle).__name__}")
    if world is not None and world is not handle.world:
        raise WeftError(f"{COMBINE}: the handle is of {handle.world}, not of {world}")
    if handle.combined:
        raise WeftError(f"{COMBINE}: the handle of slot {handle.slot} was combined already")
    give_back(handle.world)
    oldest, ready, _ = under_way(handle.world)[0]
    if oldest() is not handle:
        raise WeftError(
            f"{COMBINE}: the handle of slot {handle.slot} out of order: that of slot {ready.slot} was dispatched"
            " before it, and is combined or cancelled first"
        )


def check_sums(handle: Handle, y: torch.Tensor, shared: torch.Tensor | None) -> None:
    layer, t = handle.ready.exchange.layer, handle.ids.shape[0]
    for name, given, shape in (("y", y, handle.shape), ("shared", shared, (t, layer.hidden))):
        if given is None and name == "shared":
            continue
        check_device(COMBINE, handle.world, name, given)
        assert given is not None
        if given.shape != shape:
            raise ValueError(f"{COMBINE}: {name} {dims(given)} must be {list(shape)}, as the handle's")
        if given.dtype != layer.dtype:
            raise TypeError(f"{COMBINE}: {name} is {dims(given)}, and what was dispatched {layer.dtype}")


# -- what is made once -------------------------------------------------------------------------------------------------


def ready(world: World, exchange: Exchange, slot: int) -> Placed:
    """Return what calls of this kind and slot have in common. Collective the first time."""
    make = gather if world.symmetric_reason else prepare
    return world.cached((DISPATCH, exchange, slot), lambda: make(world, exchange, slot))


def numbers_of(world: World, exchange: Exchange, slot: int) -> tuple[int, int]:
    """Return the numbers of dispatch and of combine, on which the ranks agree. Collective the first time."""
    return world.check_same_on_all_ranks(DISPATCH, **exchange.agreed(slot)), world.check_same_on_all_ranks(
        COMBINE, **exchange.agreed(slot)
    )


def gather(world: World, exchange: Exchange, slot: int) -> ByCollectives:
    numbers = numbers_of(world, exchange, slot)
    given = exchange.layer
    layer = Split(given.capacity, given.experts, given.k, given.hidden, 0, given.dtype, tile=exchange.alignment)
    local, total, shape = layer.local(world), layer.rows(world), (world.size, layer.capacity, layer.k)
    routes = world.size * layer.capacity * layer.k
    ids, slots, sources, offsets, received = (
        world.zeros(size, torch.int32) for size in (shape, (routes,), (total,), (local + 1,), (local,))
    )
    order = ExpertOrder(ids, slots, sources, offsets, received)
    made = ByCollectives(
        exchange=exchange,
        numbers=numbers,
        slot=slot,
        local=local,
        shape=(total, layer.hidden),
        order=order,
        weights=world.zeros(shape, torch.float32),
        offsets=offsets,
        placed=order,
        layer=layer,
    )
    if exchange.most:
        mask(world, made)
    return made


def prepare(world: World, exchange: Exchange, slot: int) -> Ready:
    numbers = numbers_of(world, exchange, slot)
    layer, w, most = exchange.layer, world.size, exchange.most
    plan, local = SMALL_DISPATCHED if world.scale.small else Dispatched(), layer.experts // w
    senders, summers = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
    came = world.channel(f"{DISPATCH} {slot}, rows by {senders} programs", w, None, senders)
    summed = world.channel(f"{COMBINE} {slot}, sums by {summers} programs", w, None, summers)
    total = route_tables.rows_of(world, layer.capacity, layer.k, local, exchange.alignment)
    settled = world.zeros((max(w, 16),), torch.int32)
    calls = world.calls(f"{COMBINE} {slot}")
    of = Prepared(layer, plan, local, total, senders, summers, came, summed, calls, settled, settled)
    nbytes = w * layer.capacity * layer.hidden * layer.dtype.itemsize
    box = (w, layer.capacity, layer.hidden)
    inbox, outbox = (world.buffer(f"{name} {slot}", nbytes).view(0, box, layer.dtype) for name in (DISPATCH, COMBINE))
    ids, weights, tables = route_tables.memory(world, layer.capacity, layer.k, local, exchange.alignment, slot)
    order = ExpertOrder(ids, tables.slots, tables.sources, tables.offsets, tables.received)
    made = Ready(
        exchange=exchange,
        numbers=numbers,
        slot=slot,
        local=local,
        shape=(total, layer.hidden),
        order=order,
        weights=weights,
        offsets=tables.offsets,
        placed=order,
        of=of,
        inbox=inbox,
        outbox=outbox,
        settled=settled,
    )
    if most:
        mask(world, made)
    load(world, made)
    return made


def mask(world: World, made: Placed) -> None:
    """What layout "masked" has besides."""
    layer, most, local = made.exchange.layer, made.exchange.most, made.local

    def ints(*shape: int) -> torch.Tensor:
        return world.zeros(shape, torch.int32)

    made.masked = Masked(ints(world.size * layer.capacity * layer.k), ints(local, most), ints(local))
    made.placed = made.order._replace(slots=made.masked.slots)
    made.shape = (local, most, layer.hidden)
    made.offsets = world.tensor([most * e for e in range(local + 1)], torch.int32)


def load(world: World, made: Ready) -> None:
    """Everything but the tables, before a rank waits for another. The last one once more, as what no other launch has
    to fit beside."""
    layer = made.exchange.layer
    one = world.empty((1, layer.hidden), layer.dtype)
    for step in (
        dispatched.sends(world, made.of, one, made.order.ids[world.rank], made.space(one)),
        placing(world, made, one),
        sums(world, made, one),
        total_of(world, made, one, None, one),
        total_of(world, made, one, None, one, co_resident=False),
    ):
        step.launch.load(**step.moving)


# -- the launches ------------------------------------------------------------------------------------------------------


def placing(world: World, made: Ready, rows: torch.Tensor) -> GivenLaunch:
    padded = made.exchange.alignment > 1
    return places_rows(world, made.of, made.inbox.local, rows, made.placed, made.of.senders, padded)


@prepared
def masks(world: World, made: Placed) -> Launch:
    routes, block = made.placed.slots.numel(), 32 if world.scale.small else 512
    programs = min(max(-(-routes // block), made.local), world.sm_count)
    return Launch(
        world,
        mask_rows,
        programs,
        dict(num_warps=4, local=True),
        order=made.order,
        masked=made.masked,
        rank=rank_word(world),
        guard=world.guard(),
        routes=routes,
        MOST=made.exchange.most,
        EL=made.local,
        BLOCK=block,
        PROGRAMS=programs,
    )


def sums(world: World, made: Ready, y: torch.Tensor) -> GivenLaunch:
    return dispatched.sums(world, made.of, made.rows(y), made.settled, made.settled, made.space(y))


def total_of(
    world: World,
    made: Ready,
    y: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    co_resident: bool = True,
) -> GivenLaunch:
    """The sum over ranks: of what `share` kept of the ids, so that the caller may write his again. By fewer and
    smaller programs, so that those of two slots, which wait, leave room for what sends."""
    how = LastSums(an_sm=SUMMERS, co_resident=co_resident)
    return dispatched.last(
        world, made.of, made.rows(y), made.order.ids[world.rank], shared, out, made.space(y), how=how
    )


# -- a call ------------------------------------------------------------------------------------------------------------


def begin(
    world: World,
    exchange: Exchange,
    slot: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    clear: bool = False,
) -> tuple[torch.Tensor, Handle]:
    """`dispatch` of contiguous tensors, in a slot that is free, on the current stream. clear: rows of no token are
    zero."""
    made, stream = ready(world, exchange, slot), world.current_stream()
    world.begin(made.numbers[0])
    rows = (world.zeros if clear else world.empty)(made.shape, exchange.layer.dtype)
    world.order(lock(world, f"{DISPATCH} {slot}"), stream)
    if isinstance(made, Ready):
        send(world, made, slot, x, ids, weights, rows)
    else:
        assert isinstance(made, ByCollectives)
        given = collectives.place(world, made.layer, made.order, made.weights, x, ids, weights)
        if made.masked is not None:
            masks(world, made)(stream)
        sources = made.order.sources if made.masked is None else made.masked.sources
        collectives.pick(world, given, sources, rows)
    counts, sources = made.order.received, made.order.sources
    if made.masked is not None:
        counts, sources = made.masked.counts, made.masked.sources
    handle = Handle(world, slot, made.shape, made.offsets, counts, sources, ids, weights, made)
    handle.versions = versions(ids, weights)
    under_way(world).append((weakref.ref(handle), made, ids.shape[0]))
    return rows, handle


def send(
    world: World,
    made: Ready,
    slot: int,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """The launches of `begin`."""
    stream, side, of = world.current_stream(), world.side_stream(f"{DISPATCH} {slot}"), made.of
    capacity, alignment = made.exchange.layer.capacity, made.exchange.alignment
    start = world.record(stream)
    ids_all, _ = route_tables.share(world, ids, weights, capacity, slot=slot)
    world.wait_event(side, start)
    dispatched.sends(world, of, x, ids, made.space(rows)).on(side)
    route_tables.tables(world, ids_all, of.local, capacity, alignment, slot=slot)
    if made.masked is not None:
        masks(world, made)(stream)
    placing(world, made, rows).on(stream)
    world.wait_event(stream, world.record(side))  # the caller may write x and ids again


def end(handle: Handle, y: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor) -> None:
    """`combine` of contiguous tensors, of the oldest handle, on the current stream."""
    finished(handle.world, handle.ready, y, shared, out)
    handle.combined = True


def finished(world: World, made: Placed, y: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor) -> None:
    """Combine the oldest dispatch, whose slot is free from then on."""
    world.begin(made.numbers[1])
    stream = world.current_stream()
    world.order(lock(world, f"{DISPATCH} {made.slot}"), stream)
    if isinstance(made, Ready):
        sums(world, made, y).on(stream)
        total_of(world, made, y, shared, out).on(stream)
    else:
        assert isinstance(made, ByCollectives)
        collectives.sums(world, made.layer, made.placed.slots, made.weights, y, shared, out)
    del under_way(world)[0]


def versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    """How often torch wrote them; those made in inference mode, which have no gradient, count nothing."""
    return tuple(0 if t.is_inference() else t._version for t in tensors)


# -- gradients ---------------------------------------------------------------------------------------------------------


class DispatchedRows(torch.autograd.Function):
    """Rows of x; the Handle goes to a list."""

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        exchange: Exchange,
        slot: int,
        found: list[Handle],
        world: World,
    ) -> torch.Tensor:
        rows, ctx.handle = begin(world, exchange, slot, dense(x), dense(ids), dense(weights))
        ctx.handle.weights, ctx.handle.node = weights, weakref.ref(ctx)
        ctx.handle.versions = versions(ctx.handle.ids, weights)
        found.append(ctx.handle)
        world.finish(world.current_stream())
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, drows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back, ctx.handle.back = ctx.handle.back, None
        if back is None:
            raise WeftError(f"{DISPATCH}: a gradient of rows without one of what {COMBINE} made of this handle")
        check_handle(back, None)
        world = back.world
        dx = world.empty((back.ids.shape[0], back.shape[-1]), drows.dtype)
        world.call(lambda: back.ready.weights.fill_(1.0), [], [back.ready.weights], world.current_stream())
        end(back, dense(drows), None, dx)
        world.finish(world.current_stream())
        return dx, *(None,) * 6


class CombinedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, handle: Handle
    ) -> torch.Tensor:
        world, ctx.handle = handle.world, handle
        if versions(handle.ids, weights) != handle.versions:
            raise RuntimeError(f"{COMBINE}: ids or weights were written since {DISPATCH}, and the gradient takes them")
        ctx.save_for_backward(y, weights, handle.ids)  # torch raises where one is written before the backward pass
        out = world.empty((handle.ids.shape[0], handle.shape[-1]), y.dtype)
        end(handle, dense(y), None if shared is None else dense(shared), out)
        world.finish(world.current_stream())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y, weights, ids), handle = ctx.saved_tensors, ctx.handle
        world, made, stream = handle.world, handle.ready, handle.world.current_stream()
        slot = free_slot(world, None)
        rows, back = begin(world, made.exchange, slot, dense(dout), ids, dense(weights), True)
        dy, dots = of_routes(world, back, rows, dense(y))
        came = world.empty(dots.shape, torch.float32)
        if world.size > 1:
            world.all_to_all(list(came), list(dots), stream)
        else:
            came = dots
        dweights = world.empty(weights.shape, torch.float32)
        given = weights.numel()
        world.call(lambda: torch.sum(came[:, :given], 0, out=dweights.view(-1)), [came], [dweights], stream)
        node = None if handle.node is None else handle.node()
        if node is not None and torch._C._will_engine_execute_node(node):
            handle.back = back  # combined by dispatch's backward pass
        else:
            end(back, rows, None, world.empty(dout.shape, dout.dtype))
        world.finish(stream)
        return dy, dweights, dout if ctx.needs_input_grad[2] else None, None


def of_routes(world: World, back: Handle, rows: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows, of the gradient, times their routes' weights, zero where there is none; and float32 [W, C k], of every
    rank's routes the product of rows and y."""
    made, layer = back.ready, back.ready.exchange.layer
    dy = world.empty(rows.shape, rows.dtype)
    dots = world.empty((world.size, layer.capacity * layer.k), torch.float32)

    def fill() -> None:
        flat, slots = rows.view(-1, layer.hidden), made.placed.slots.long()
        there, place = slots >= 0, torch.where(slots >= 0, slots, flat.shape[0])
        weight = torch.zeros(flat.shape[0] + 1, device=rows.device)
        full = torch.zeros(flat.shape[0] + 1, dtype=torch.bool, device=rows.device)
        weight[place], full[place] = made.weights.flatten(), True
        gradient = flat.float()
        dy.view(-1, layer.hidden).copy_(gradient * weight[:-1, None])
        products = torch.zeros_like(weight)
        torch.sum(gradient * torch.where(full[:-1, None], y.view(-1, layer.hidden), 0), 1, out=products[:-1])
        dots.view(-1).copy_(torch.where(there, products[place], 0))

    world.call(fill, [rows, y, made.placed.slots, made.weights], [dy, dots], world.current_stream())
    return dy, dots
