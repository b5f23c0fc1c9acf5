"""Dispatch and combine by themselves: for experts of the caller's own kernels.

    dispatched   the steps of a layer (expert_parallel/dispatched.py), with `place_rows` (place_rows_kernels.py, which
                 says what orders them) in place of the grouped GEMMs
    sequential   the library's collectives (collectives.py), which need no symmetric memory

Two calls may be under way, each in a slot with memory and counters of its own. A dispatch is named by its ticket, a
number in host memory, which the combine of it takes: so the two know of each other in a compiled graph too.

Backward: combine's dispatches the gradient of its result, with the same tables, and dispatch's combines the rows'
gradients of that, all with weights of 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ....backends.base import SymmetricTensor
from ....errors import WeftError
from ....kernel_launch import GivenLaunch, Launch, prepared
from ....op import Call, Op, Operands, Returned, Shapes, registered
from ....plans import Dispatched, Plan, Sequential
from ....tensor_checks import bulk, check_device, dense, dims, requires_grad
from ....torch_library import Backward, CallOptions
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
ALIGNMENTS = (1, 16, 128)
ROW_LAYOUTS = ("contiguous", "masked")
SUMMERS = 2  # programs of the last sums on an SM
_numbers = itertools.count()


@dataclass(frozen=True)
class Exchange:
    """What a dispatch and its combine have in common, the same on all ranks. tokens: of every rank. most: rows of an
    expert, masked; 0: contiguous, experts begin at multiples of `alignment`."""

    tokens: tuple[int, ...]
    layer: Layer
    alignment: int
    most: int

    @classmethod
    def from_options(cls, world: World, ids: torch.Tensor, like: torch.Tensor, options: CallOptions) -> Exchange:
        """Return the exchange of tokens or rows `like` these. options: rows of every rank or None, experts, layout,
        alignment, max_m."""
        rows, experts, layout, alignment, max_m = options
        tokens = (ids.shape[0],) * world.size if rows is None else rows
        capacity = max(1, *tokens)
        most = min(max_m or world.size * capacity, world.size * capacity) if layout == "masked" else 0
        layer = Layer(capacity, experts, ids.shape[1], like.shape[-1], 8, like.dtype)
        return cls(tokens, layer, 1 if most else alignment, most)

    def shape(self, world: World) -> tuple[int, ...]:
        """Return the shape of rows."""
        layer, local = self.layer, self.layer.experts // world.size
        if self.most:
            return local, self.most, layer.hidden
        return route_tables.rows_of(world, layer.capacity, layer.k, local, self.alignment), layer.hidden

    def agreed(self, slot: int) -> dict[str, Hashable]:
        layer = self.layer
        sizes = dict(experts=layer.experts, k=layer.k, H=layer.hidden, dtype=str(layer.dtype))
        return dict(rows=self.tokens, **sizes, expert_alignment=self.alignment, max_m=self.most, slot=slot)


@dataclass(frozen=True)
class ExchangeCall(Call):
    """slot: the one that a dispatch is to take, or None. answered: of a combine, whether the dispatch has a gradient
    too."""

    exchange: Exchange
    slot: int | None = None
    answered: bool = False

    @property
    def rows(self) -> int:
        """The most tokens of a rank, and never 0."""
        return self.exchange.layer.capacity


class DispatchOperands(NamedTuple):
    """The operands of `dispatch`. weights: detached, since their gradient is that of `combine`. leaf: those that
    require one, or None, for the handle."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    leaf: torch.Tensor | None = None


class CombineOperands(NamedTuple):
    """The operands of `combine`. ticket: int64 [2] in host memory, the number of the dispatch, and its slot."""

    y: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    ticket: torch.Tensor
    shared: torch.Tensor | None = None


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
    masked: Masked | None = None
    offsets: torch.Tensor = field(init=False)  # int32 [El + 1], of rows
    placed: ExpertOrder = field(init=False)  # of rows; masked, with other slots than the tables

    def __post_init__(self) -> None:
        self.offsets, self.placed = self.order.offsets, self.order

    @property
    def counts(self) -> torch.Tensor:
        return self.order.received if self.masked is None else self.masked.counts

    @property
    def sources(self) -> torch.Tensor:
        return self.order.sources if self.masked is None else self.masked.sources


P = TypeVar("P", bound=Placed)


@dataclass(eq=False)
class UnderWay:
    """A dispatch that is not combined. held: says whether somebody may still combine it. answers: of the gradient of a
    combine's result, the number of the dispatch whose backward pass combines it."""

    placed: Placed
    tokens: int  # that this rank dispatched
    held: Callable[[], bool]
    answers: int | None = None


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
    slot: which of the two it has (not in a compiled graph); shape: of rows, and so of y.

    It keeps ids and weights: the same ids make the same rows again, which a backward pass will send dy by. A handle
    that nobody holds any more is cancelled by the next `dispatch` or `combine`.
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
    ticket: torch.Tensor = field(repr=False)
    options: CallOptions = field(repr=False)  # of `Combine`
    versions: tuple[int, ...] = field(default=(), repr=False)  # of ids and weights, as torch counts writes

    @property
    def number(self) -> int:
        return int(self.ticket[0])

    @property
    def slot(self) -> int:
        return int(self.ticket[1])

    @property
    def combined(self) -> bool:
        return self.number not in under_way(self.world)

    def cancel(self) -> None:
        """Collective, in the place of `combine` and with its order: gives the slot back, without a result. For a
        dispatch whose rows nobody wants. Raises WeftError as `combine` does."""
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
    slot: int | None = None,
    plan: str | Plan = "auto",
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
        plan: "auto", "dispatched", "sequential" or such a Plan; that of the combine too. The same on all ranks.

    Returns: rows, memory of its own, and the Handle, to be combined (or cancelled, `handle.cancel()`) once, in the
        order of the dispatches. At most two may be under way, on any streams: two microbatches. With contiguous rows,
        `torch._grouped_mm(rows, w, offs=handle.offsets[1:])` runs the experts.

    Within an expert, rows are by source rank (this one, then the one before it, ..), token and slot: the same call
    makes the same rows. Nothing is read by the host. By "sequential", as without symmetric memory, the library's
    collectives move rows, and every rank gets all tokens on the way. Memory of a slot, shared by all calls: symmetric,
    2 W C H elements and 8 W C k bytes. In a graph of torch.compile the handle's tensors are copies. Differentiable: the
    backward pass of combine dispatches the gradient of its result, that of dispatch combines the rows' gradients, all
    with weights of 1; so there must be both, and ids and weights stay as they are until then.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch: ranks that do not make the same call.
        Overflow: rows of calls before were left out.
        WeftError: no slot is free; the first call of its kind inside a CUDA graph capture.
        Timeout: at a later call or `World.synchronize`, naming the rank that did not arrive.
    """
    options = plain_rows(DISPATCH, rows), experts, layout, expert_alignment, max_m, slot
    detached, leaf = (weights.detach(), weights) if requires_grad(weights) else (weights, None)
    result: tuple[torch.Tensor, Handle] = DISPATCHES(world, plan, DispatchOperands(x, ids, detached, leaf), options)
    return result


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
    gradient = torch.is_grad_enabled() and requires_grad(y, shared, handle.weights)
    before, now = handle.versions, versions(handle.ids, handle.weights)
    if gradient and before and now and before != now:
        raise RuntimeError(f"{COMBINE}: ids or weights were written since {DISPATCH}, and the gradient takes them")
    operands = CombineOperands(y, handle.weights, handle.ids, handle.ticket, shared)
    result: torch.Tensor = COMBINES(handle.world, handle.plan, operands, handle.options, out)
    return result


# -- checks ------------------------------------------------------------------------------------------------------------


def check(world: World, operands: DispatchOperands, options: CallOptions) -> None:
    """Raise for anything that this rank alone can see is wrong."""
    (x, ids, weights, _), (rows, experts, layout, alignment, max_m, slot) = operands, options
    for name, t in (("x", x), ("ids", ids), ("weights", weights)):
        check_device(DISPATCH, world, name, t)
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
    if slot is not None and slot not in range(SLOTS):
        raise ValueError(f"{DISPATCH}: slot {slot!r} is not 0, 1 or None")
    if rows is not None:
        given_rows(DISPATCH, world, rows, x, whole=False)


def check_handle(handle: Handle, world: World | None) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"{COMBINE}: handle must be what weft.moe.dispatch returned, got {type(handle).__name__}")
    if world is not None and world is not handle.world:
        raise WeftError(f"{COMBINE}: the handle is of {handle.world}, not of {world}")
    if torch.compiler.is_compiling():  # which dispatches are under way is known when the graph runs
        return
    if handle.combined:
        raise WeftError(f"{COMBINE}: the handle of slot {handle.slot} was combined already")
    give_back(handle.world)
    number, oldest = next(iter(under_way(handle.world).items()))
    if number != handle.number:
        raise WeftError(
            f"{COMBINE}: the handle of slot {handle.slot} out of order: that of slot {oldest.placed.slot} was"
            " dispatched before it, and is combined or cancelled first"
        )


def check_sums(handle: Handle, y: torch.Tensor, shared: torch.Tensor | None) -> None:
    t, dtype, h = handle.ids.shape[0], handle.dtype, handle.shape[-1]
    for name, given, shape in (("y", y, handle.shape), ("shared", shared, (t, h))):
        if given is None and name == "shared":
            continue
        check_device(COMBINE, handle.world, name, given)
        assert given is not None
        if given.shape != shape:
            raise ValueError(f"{COMBINE}: {name} {dims(given)} must be {list(shape)}, as the handle's")
        if given.dtype != dtype:
            raise TypeError(f"{COMBINE}: {name} is {dims(given)}, and what was dispatched {dtype}")


# -- what is under way -------------------------------------------------------------------------------------------------


def under_way(world: World) -> dict[int, UnderWay]:
    """Dispatches that are not combined, by number, the oldest first."""
    return world.cached(f"{DISPATCH}: under way", dict)


def free_slot(world: World, asked: int | None) -> int:
    give_back(world)
    calls = under_way(world)
    unanswered = [number for number, call in calls.items() if call.answers is not None]
    if len(calls) == SLOTS and unanswered:  # a backward pass that ends at the experts combines none of them
        cancel(world, unanswered[0])
    taken = [call.placed.slot for call in calls.values()]
    free = [s for s in range(SLOTS) if s not in taken and asked in (None, s)]
    if not free:
        which = f"slots {taken} are" if asked is None else f"slot {asked} is"
        raise WeftError(f"{DISPATCH}: {which} under way; a handle has to be combined or cancelled first")
    return free[0]


def give_back(world: World) -> None:
    """Cancel the oldest dispatches, up to the first that somebody holds. On all ranks alike, where they let go of
    handles alike."""
    calls = under_way(world)
    while calls:
        number, oldest = next(iter(calls.items()))
        if oldest.held():
            return
        cancel(world, number)


def cancel(world: World, number: int) -> None:
    """Combine a dispatch to memory that nobody reads."""
    call = under_way(world)[number]
    placed, dtype = call.placed, call.placed.exchange.layer.dtype
    y, out = (world.zeros(shape, dtype) for shape in (placed.shape, (call.tokens, placed.shape[-1])))
    complete(world, number, y, None, out)


# -- what is made once -------------------------------------------------------------------------------------------------


def ready(world: World, exchange: Exchange, plan: Plan, slot: int) -> Placed:
    """Return what calls of this kind, plan and slot have in common. Collective the first time."""

    def make() -> Placed:
        kind = dict(exchange.agreed(slot), plan=plan)
        numbers = world.check_same_on_all_ranks(DISPATCH, **kind), world.check_same_on_all_ranks(COMBINE, **kind)
        local, shape = exchange.layer.experts // world.size, exchange.shape(world)
        common = dict(exchange=exchange, numbers=numbers, slot=slot, local=local, shape=shape)
        if not isinstance(plan, Dispatched):
            return mask(world, gather(world, exchange.layer, exchange.alignment, common))
        prepared_call = mask(world, prepare(world, exchange.layer, exchange.alignment, plan, common))
        load(world, prepared_call)
        return prepared_call

    return world.cached((DISPATCH, exchange, plan, slot), make)


def gather(world: World, whole: Layer, alignment: int, common: dict[str, Any]) -> ByCollectives:
    layer = Split(whole.capacity, whole.experts, whole.k, whole.hidden, 0, whole.dtype, tile=alignment)
    local, total, shape = layer.local(world), layer.rows(world), (world.size, layer.capacity, layer.k)
    routes = world.size * layer.capacity * layer.k
    sizes = shape, (routes,), (total,), (local + 1,), (local,)
    order = ExpertOrder(*(world.zeros(size, torch.int32) for size in sizes))
    return ByCollectives(**common, order=order, weights=world.zeros(shape, torch.float32), layer=layer)


def prepare(world: World, layer: Layer, alignment: int, plan: Dispatched, common: dict[str, Any]) -> Ready:
    w, slot, local = world.size, common["slot"], common["local"]
    senders, summers = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
    came = world.channel(f"{DISPATCH} {slot}, rows by {senders} programs", w, None, senders)
    summed = world.channel(f"{COMBINE} {slot}, sums by {summers} programs", w, None, summers)
    total = route_tables.rows_of(world, layer.capacity, layer.k, local, alignment)
    settled = world.zeros((max(w, 16),), torch.int32)
    calls = world.calls(f"{COMBINE} {slot}")
    of = Prepared(layer, plan, local, total, senders, summers, came, summed, calls, settled, settled)
    nbytes = w * layer.capacity * layer.hidden * layer.dtype.itemsize
    box = (w, layer.capacity, layer.hidden)
    inbox, outbox = (world.buffer(f"{name} {slot}", nbytes).view(0, box, layer.dtype) for name in (DISPATCH, COMBINE))
    ids, weights, tables = route_tables.memory(world, layer.capacity, layer.k, local, alignment, slot)
    order = ExpertOrder(ids, tables.slots, tables.sources, tables.offsets, tables.received)
    return Ready(**common, order=order, weights=weights, of=of, inbox=inbox, outbox=outbox, settled=settled)


def mask(world: World, placed: P) -> P:
    """Return it with what layout "masked" has besides, if it has that layout."""
    layer, most, local = placed.exchange.layer, placed.exchange.most, placed.local

    def ints(*shape: int) -> torch.Tensor:
        return world.zeros(shape, torch.int32)

    if most:
        placed.masked = Masked(ints(world.size * layer.capacity * layer.k), ints(local, most), ints(local))
        placed.placed = placed.order._replace(slots=placed.masked.slots)
        placed.offsets = world.tensor([most * e for e in range(local + 1)], torch.int32)
    return placed


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
    routes, block = made.placed.slots.numel(), world.scale.routes
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


def place(
    world: World, made: Placed, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
) -> None:
    """Dispatch contiguous tensors, in a slot that is free, on the current stream."""
    world.begin(made.numbers[0])
    stream = world.current_stream()
    world.order(lock(world, f"{DISPATCH} {made.slot}"), stream)
    if isinstance(made, Ready):
        send(world, made, x, ids, weights, rows)
        return
    assert isinstance(made, ByCollectives)
    tokens = collectives.place(world, made.layer, made.order, made.weights, x, ids, weights)
    if made.masked is not None:
        masks(world, made)(stream)
    collectives.pick(world, tokens, made.sources, rows)


def send(
    world: World, made: Ready, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor
) -> None:
    """The launches of `place`."""
    stream, side, of, slot = world.current_stream(), world.side_stream(f"{DISPATCH} {made.slot}"), made.of, made.slot
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


def run_dispatch(
    world: World, call: ExchangeCall, plan: Plan, operands: DispatchOperands, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """out = the rows, on the current stream. Returns offsets, counts, sources and the ticket."""
    placed, number = ready(world, call.exchange, plan, free_slot(world, call.slot)), next(_numbers)
    place(world, placed, operands.x, operands.ids, operands.weights, out)
    ticket = torch.tensor([number, placed.slot])
    memory = StorageWeakRef(ticket.untyped_storage())
    under_way(world)[number] = UnderWay(placed, operands.x.shape[0], lambda: not memory.expired())
    return placed.offsets, placed.counts, placed.sources, ticket


def run_combine(world: World, call: ExchangeCall, plan: Plan, operands: CombineOperands, out: torch.Tensor) -> None:
    """out [T, H] = the weighted sums of y's rows, + shared, on the current stream."""
    number, slot = operands.ticket.tolist()
    if number not in under_way(world):
        raise WeftError(f"{COMBINE}: the handle of slot {slot} was combined already")
    complete(world, number, operands.y, operands.shared, out)


def complete(world: World, number: int, y: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor) -> None:
    """Combine a dispatch, whose slot is free from then on."""
    placed, stream = under_way(world)[number].placed, world.current_stream()
    world.begin(placed.numbers[1])
    world.order(lock(world, f"{DISPATCH} {placed.slot}"), stream)
    if isinstance(placed, Ready):
        sums(world, placed, y).on(stream)
        total_of(world, placed, y, shared, out).on(stream)
    else:
        assert isinstance(placed, ByCollectives)
        collectives.sums(world, placed.layer, placed.placed.slots, placed.weights, y, shared, out)
    del under_way(world)[number]


def versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    """How often torch wrote them; a compiled graph, and tensors made in inference mode, which have no gradient, count
    nothing."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(0 if t.is_inference() else t._version for t in tensors)


# -- the ops -----------------------------------------------------------------------------------------------------------


class ExchangeOp(Op[ExchangeCall]):
    """What both have in common. `ready` has the ranks agree, on the slot too."""

    small = Dispatched
    by_library = False

    def expected(self, world: World, call: ExchangeCall, mode: str) -> Plan:
        return Dispatched()

    def fits(self, world: World, call: ExchangeCall, plan: Plan, asked: str | Plan) -> str | None:
        return world.symmetric_reason

    def check_same_on_all_ranks(self, world: World, call: ExchangeCall, plan: Plan, **more: Hashable) -> int | None:
        return None


class Dispatch(ExchangeOp):
    """Options: rows of every rank or None, experts, layout, expert_alignment, max_m, slot. Results: rows; offsets,
    counts and sources, memory of the slot; the ticket."""

    name, public = "moe_dispatch", DISPATCH
    signature = (
        "Tensor x, Tensor ids, Tensor weights, SymInt[]? rows, SymInt experts, str layout, SymInt expert_alignment,"
        " SymInt? max_m, SymInt? slot"
    )
    results, lends, wraps = 5, 3, True
    takes = DispatchOperands
    runs = {Sequential: run_dispatch, Dispatched: run_dispatch}

    def check(self, world: World, operands: DispatchOperands, options: CallOptions) -> ExchangeCall:
        check(world, operands, options)
        return ExchangeCall(Exchange.from_options(world, operands.ids, operands.x, options[:-1]), options[-1])

    def outputs(self, world: World, call: ExchangeCall) -> Shapes:
        shape, local = call.exchange.shape(world), call.exchange.layer.experts // world.size
        return [(shape, call.exchange.layer.dtype), *((n, torch.int32) for n in ((local + 1,), (local,), shape[:-1]))]

    def fake(self, world: World, operands: DispatchOperands, options: CallOptions) -> list[torch.Tensor]:
        ticket = operands.x.new_empty((2,), dtype=torch.int64, device="cpu")
        return [*super().fake(world, operands, options), ticket]

    def returned(self, world: World, call: ExchangeCall, result: torch.Tensor, more: Operands) -> Returned:
        return result, *more

    def wrapped(
        self, world: World, plan: str | Plan, operands: DispatchOperands, options: CallOptions, results: Operands
    ) -> Returned:
        (rows, offsets, counts, sources, ticket), (x, ids, weights, leaf) = results, operands
        weights, gradients = weights if leaf is None else leaf, torch.is_grad_enabled()
        if gradients and not torch.compiler.is_compiling():
            # The experts' backward pass may read the tables when the slot has those of another call.
            offsets, counts, sources = offsets.clone(), counts.clone(), sources.clone()
        tables, options = (offsets, counts, sources), (*options[:-1], gradients and x.requires_grad)
        shape, written = tuple(rows.shape), versions(ids, weights)
        return rows, Handle(world, plan, shape, rows.dtype, *tables, ids, weights, ticket, options, written)

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return results[-1:]

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        (ticket,), (drows, *_) = given.saved, given.gradients
        assert ticket is not None and drows is not None
        calls, number = under_way(world), int(ticket[0])
        back = next((n for n, call in calls.items() if call.answers == number), None)
        if back is None:
            raise WeftError(f"{DISPATCH}: a gradient of rows without one of what {COMBINE} made of this handle")
        weights, dx = calls[back].placed.weights, world.empty(given.shapes[0], drows.dtype)
        world.call(lambda: weights.fill_(1.0), [], [weights], world.current_stream())
        complete(world, back, dense(drows), None, dx)
        return [dx, None, None]


class Combine(ExchangeOp):
    """Options: those of the dispatch but for the slot, and whether that has a gradient. Operands may be any of the
    dispatch's shapes: what is under way is known by the ticket alone."""

    name, public = "moe_combine", COMBINE
    signature = (
        "Tensor y, Tensor weights, Tensor ids, Tensor ticket, Tensor? shared, SymInt[]? rows, SymInt experts,"
        " str layout, SymInt expert_alignment, SymInt? max_m, bool answered"
    )
    takes = CombineOperands
    runs = {Sequential: run_combine, Dispatched: run_combine}

    def check(self, world: World, operands: CombineOperands, options: CallOptions) -> ExchangeCall:
        exchange = Exchange.from_options(world, operands.ids, operands.y, options[:-1])
        return ExchangeCall(exchange, answered=options[-1])

    def meta(self, world: World, operands: CombineOperands, options: CallOptions) -> Shapes:
        return [((operands.ids.shape[0], operands.y.shape[-1]), operands.y.dtype)]

    def outputs(self, world: World, call: ExchangeCall) -> Shapes:
        layer = call.exchange.layer
        return [((call.exchange.tokens[world.rank], layer.hidden), layer.dtype)]

    def dense_operands(self, plan: Plan, operands: CombineOperands) -> CombineOperands:
        y, shared = bulk((operands.y, operands.shared))
        assert y is not None
        return operands._replace(y=y, shared=shared)

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return operands[:4]

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        y, weights, ids, ticket = (dense(t) for t in given.saved if t is not None)
        (dout,), call, stream = given.gradients, given.call, world.current_stream()
        assert dout is not None
        placed, number = ready(world, call.exchange, given.plan, free_slot(world, None)), next(_numbers)
        drows = world.zeros(placed.shape, dout.dtype)
        place(world, placed, dense(dout), ids, weights, drows)
        task = torch._C._current_graph_task_id()
        held = lambda: torch._C._current_graph_task_id() == task  # noqa: E731
        under_way(world)[number] = UnderWay(placed, len(ids), held, int(ticket[0]))
        dy, dots = of_routes(world, placed, drows, y)
        dots_here = dots
        if world.size > 1:
            dots_here = world.empty(dots.shape, torch.float32)
            world.all_to_all(list(dots_here), list(dots), stream)
        own, dweights = dots_here[:, : weights.numel()], world.empty(weights.shape, torch.float32)
        world.call(lambda: torch.sum(own, 0, out=dweights.view(-1)), [dots_here], [dweights], stream)
        if not call.answered:  # else the dispatch's backward pass combines it
            complete(world, number, drows, None, world.empty(dout.shape, dout.dtype))
        return [dy, dweights, None, None, dout]


def of_routes(world: World, made: Placed, rows: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows, of the gradient, times their routes' weights, zero where there is none; and float32 [W, C k], of every
    rank's routes the product of rows and y."""
    layer = made.exchange.layer
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


DISPATCHES, COMBINES = registered(Dispatch()), registered(Combine())
