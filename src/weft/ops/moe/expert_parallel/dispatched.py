"""The launches of an MoE layer's experts (kernels.py): what each is given, on which stream it runs, and what it waits
for.

    side stream  start -> dispatch |                         | combine (with GEMM 2)  |
    main stream  share, tables     | GEMM 1 (with dispatch)  | GEMM 2                 | sum

Programs of the side stream share the SMs with a GEMM's, which wait for them or for which they wait. So both of a pair
must fit on an SM at once, whichever comes first; that is checked, and everything loaded, before the first call of a
kind launches anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, NamedTuple

import torch
from triton import JITFunction

from ....backends.base import SymmetricTensor
from ....kernel_launch import Ahead, GivenLaunch, Launch, Matrix, Moved, prepared
from ....lang.channel import BlockChannel
from ....lang.jit import constants
from ....plans import Dispatched, DispatchedGemms, FusedMoe, LowLatency, TileShape
from ....tensor_checks import DTYPES
from ....transport.memory import lock
from ....world import World
from ..call import ACTIVATIONS, NAME, NONE_KEPT, Kept, Layer, MoeCall, MoeOperands, Weights, layer_rows
from ..routing import route_tables
from ..routing.route_tables import Tables, power
from .fused_kernels import LayerSizes
from .kernels import (
    GELU,
    ROW_OF_TILES,
    GatheredSizes,
    RankSums,
    Routed,
    combine_rows,
    dispatch_rows,
    grouped_gemm_in,
    grouped_gemm_out,
    sum_ranks,
)

SEND, SUM = 96, 128  # registers of a thread of the side stream's programs; the GEMM's beside it have the SM's others
ELEMENTS = 32  # that such a thread has in registers at a time
SM_MEMORY = 225 << 10  # bytes of an SM that two programs share, without what each has for itself and for small things
LAST_WARPS, LAST_AN_SM = 4, 4  # of the last sums: warps of a program, and how many of them an SM has


@dataclass(eq=False)
class Prepared:
    """What calls of one layer and plan have in common. Its memory is that of all layers."""

    layer: Layer
    plan: DispatchedGemms
    local: int  # experts on every rank
    rows: int  # of expert order, at most
    senders: int
    summers: int
    came: BlockChannel  # rows of every wave
    summed: BlockChannel  # sums of every rank
    calls: BlockChannel  # of `sum_ranks`
    words: torch.Tensor  # int32, stands for tables
    floats: torch.Tensor
    ahead: Ahead = field(default_factory=Ahead)
    loaded: set[Hashable] = field(default_factory=set)

    @property
    def push_block(self) -> int:
        """Elements that a program of the side stream holds."""
        return 32 * self.plan.side_warps * ELEMENTS

    @property
    def send_block(self) -> int:
        """Rows that `dispatch_rows` sends at a time."""
        assert isinstance(self.plan, Dispatched)
        return min(self.plan.send_rows, max(1, self.push_block // power(self.layer.hidden)))

    @property
    def sent_elements(self) -> int:
        """Elements of a block that is sent."""
        return self.send_block * power(self.layer.hidden) if isinstance(self.plan, Dispatched) else self.push_block

    def gemm(self, side: int, columns: int, sending: bool) -> dict[str, int]:
        """Options of a GEMM beside a program of so many registers a thread. It has as many stages as the plan says, or
        as the SM's memory has room for: an epilogue stores `columns` columns at a time, and programs that are sending
        have blocks of rows under way."""
        plan, item = self.plan, self.layer.dtype.itemsize
        registers = min(255, (65536 - 32 * plan.side_warps * side) // (32 * plan.tile.warps) // 8 * 8)
        rows = self.sent_elements * (plan.send_stages - 1) if sending else 0
        room = SM_MEMORY - item * (plan.tile.block_m * columns + rows)
        stages = room // (item * plan.tile.block_k * (plan.tile.block_m + plan.tile.block_n))
        return dict(num_warps=plan.tile.warps, num_stages=max(1, min(plan.tile.stages, stages)), maxnreg=registers)

    def side_launch(
        self,
        world: World,
        kernel: JITFunction,
        programs: int,
        registers: int,
        ch: BlockChannel,
        **sizes: int,
    ) -> Launch:
        """Programs of the side stream, of so many registers a thread, which move rows of H elements."""
        layer, options = self.layer, dict(num_warps=self.plan.side_warps, maxnreg=registers, co_resident=True)
        sizes |= dict(C=layer.capacity, H=layer.hidden, PROGRAMS=programs)
        return Launch(world, kernel, programs, options, ch=ch, DTYPE=DTYPES[layer.dtype], **sizes)


@dataclass(eq=False)
class Space:
    """turn, half: where calls alternate between two halves of inbox or outbox, the word that says which, and elements
    from the first to the second."""

    inbox: SymmetricTensor
    outbox: SymmetricTensor
    hidden: torch.Tensor
    y: torch.Tensor
    turn: torch.Tensor | None = None
    half: int = 0


@dataclass(frozen=True)
class LastSums:
    """The programs that sum over ranks. tp_size: neighbouring ranks that share the columns of experts. an_sm: programs
    on an SM. co_resident: None where they have the SMs to themselves; else whether another kernel's programs, loaded
    next, must fit on an SM with one of them."""

    tp_size: int = 1
    an_sm: int = LAST_AN_SM
    co_resident: bool | None = None

    @property
    def options(self) -> dict[str, int]:
        if self.co_resident is None:
            registers = 65536 // (32 * LAST_WARPS * LAST_AN_SM)
            return dict(num_warps=LAST_WARPS, maxnreg=registers, per_sm=self.an_sm)
        return dict(num_warps=LAST_WARPS, co_resident=self.co_resident, per_sm=self.an_sm)


def fits(world: World, layer: Layer, plan: DispatchedGemms | FusedMoe | LowLatency) -> str | None:
    """Why the plan cannot serve the call, the same on every rank; None where it can."""
    for name, size in (("H", layer.hidden), ("I", layer.inner)):
        if size % 8:
            return f"rows must be whole 16-byte words, and {name} {size} is not a multiple of 8"
    if layer.experts % world.size or world.size > 32:
        return f"{layer.experts} experts over {world.size} ranks"
    block = world.scale.interleave
    if layer.activation != "gelu" and plan.tile.block_n not in (2 * block, 4 * block):
        return f"tiles of {plan.tile.block_n} columns do not hold 1 or 2 blocks of {block} gate and up rows"
    if -(-layer.hidden // plan.tile.block_n) > ROW_OF_TILES.value:
        return f"H {layer.hidden} is more than {ROW_OF_TILES.value} tiles of {plan.tile.block_n} columns"
    return None


class LayerBytes(NamedTuple):
    """Bytes of a rank. symmetric: inbox, outbox, and all ranks' ids and weights; tables: slots, sources and tiles;
    scratch: hidden and y."""

    symmetric: int
    tables: int
    scratch: int


def memory(world: World, layer: Layer, block_m: int) -> LayerBytes:
    """What calls of a layer take; other layers share it."""
    c, h, size, rows = layer.capacity, layer.hidden, layer.dtype.itemsize, layer_rows(world, layer, block_m)
    routes = world.size * c * layer.k
    tables = 4 * (routes + rows + 4 * rows // block_m)
    return LayerBytes(2 * world.size * c * h * size + 8 * routes, tables, rows * (h + layer.inner) * size)


def plan_state(world: World, layer: Layer, plan: Dispatched) -> Prepared:
    """Collective the first time. Channels of a name are those of all layers with as many programs."""

    def make() -> Prepared:
        senders, summers = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
        came = world.channel(f"{NAME}, rows by {senders} programs", world.size, None, senders)
        summed = world.channel(f"{NAME}, sums by {summers} programs", world.size, None, summers)
        rows, local = layer_rows(world, layer, plan.tile.block_m), layer.experts // world.size
        if layer.max_rows is None:
            mib = memory(world, layer, plan.tile.block_m).scratch / 2**20
            world.log_once(f"{NAME}: {mib:.1f} MiB a rank, for the {rows} rows of the worst case (max_rows)", INFO)
        words, floats = world.zeros((16,), torch.int32), world.zeros((16,), torch.float32)
        calls = world.calls(NAME)
        return Prepared(layer, plan, local, rows, senders, summers, came, summed, calls, words, floats)

    return world.cached((NAME, layer, plan), make)


@prepared
def space(world: World, layer: Layer, rows: int, inbox: str = "inbox") -> Space:
    """Collective when it has to grow. Inbox (of that name) and outbox [W, C, H], hidden [rows, I], y [rows, H]: the
    start of what all layers share."""
    shape = (world.size, layer.capacity, layer.hidden)
    nbytes = world.size * layer.capacity * layer.hidden * layer.dtype.itemsize
    first, second = (world.buffer(f"{NAME} {name}", nbytes).view(0, shape, layer.dtype) for name in (inbox, "outbox"))
    return Space(
        first,
        second,
        scratch(world, "hidden", rows, layer.inner, layer.dtype),
        scratch(world, "y", rows, layer.hidden, layer.dtype),
    )


def scratch(world: World, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, cols] of this rank's memory of that name, which grows at least twofold; what it was before, graphs may
    still use."""
    held: list[torch.Tensor] = world.cached((NAME, name, dtype), list)
    if not held or held[-1].numel() < rows * cols:
        world._no_capture(name)
        world.prepared.clear()
        with world.persistent_allocation():
            held.append(world.empty((max(rows * cols, 2 * held[-1].numel() if held else 0),), dtype))
    return held[-1][: rows * cols].view(rows, cols)


def waves(world: World, targets: torch.Tensor) -> torch.Tensor:
    """Counters that grow with `targets`, and so are theirs alone. Collective the first time."""
    made: dict[int, tuple[BlockChannel, torch.Tensor]] = world.cached((NAME, "waves"), dict)
    if targets.data_ptr() not in made:
        world._no_capture(NAME)
        made[targets.data_ptr()] = world.channel(f"{NAME}, tiles by wave, {len(made)}", world.size, None), targets
    return made[targets.data_ptr()][0].counters


# -- the launches ------------------------------------------------------------------------------------------------------


def sends(world: World, of: Prepared, x: torch.Tensor, ids: torch.Tensor, at: Space) -> GivenLaunch:
    return GivenLaunch(_sends(world, of), dict(x=x, ids=ids, inboxes=at.inbox.addresses, T=x.shape[0]))


@prepared
def _sends(world: World, of: Prepared) -> Launch:
    layer, k = of.layer, of.layer.k
    sizes = dict(P=power(layer.hidden), K=k, KP=power(k), LOCAL=of.local, ROWS=of.send_block)
    return of.side_launch(world, dispatch_rows, of.senders, SEND, of.came, STAGES=of.plan.send_stages, **sizes)


def gemm_in(
    world: World, of: Prepared, w: Weights, tables: Tables, at: Space, kept: torch.Tensor | None = None
) -> GivenLaunch:
    moving: dict[str, Moved] = dict(
        inbox=at.inbox.local,
        sources=tables.sources,
        w_desc=w.w13,
        hidden_desc=at.hidden,
        kept_desc=kept,
        bias=w.b13,
        tiles=tables.tiles,
        count=tables.count,
        turn=at.turn,
    )
    return GivenLaunch(_gemm_in(world, of, w.w13.shape[1], at.turn is not None, at.half, kept is not None), moving)


@prepared
def _gemm_in(world: World, of: Prepared, n: int, turns: bool, half: int, kept: bool) -> Launch:
    layer, plan, act, h = of.layer, of.plan, ACTIVATIONS[of.layer.activation], of.layer.hidden
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    block = 0 if act == GELU.value else world.scale.interleave
    sizes = constants(
        GatheredSizes,
        ARRIVALS=of.senders,
        OTHERS=of.senders if turns else 0,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        WHOLE=h % bk == 0,
        ACT=act,
        GATED=block,
        FLATTEN=plan.flatten,
    )
    return Launch(
        world,
        grouped_gemm_in,
        world.sm_count,
        of.gemm(SEND, (block or bn // 2) + (bn // 2 if kept else 0), sending=True),
        w_desc=Matrix(of.local * n, h, (bn, bk)),
        hidden_desc=Matrix(of.rows, layer.inner, (bm, block or bn // 2)),
        kept_desc=Matrix(of.rows, n, (bm, bn // 2)),
        ch=of.came,
        half=half,
        N=n,
        K=h,
        s=sizes,
    )


def gemm_out(
    world: World,
    of: Prepared,
    tables: Tables,
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    counters: torch.Tensor,
    back: bool = False,
    sending: bool = False,
) -> GivenLaunch:
    """out [rows, N] = a [rows, K] @ w, [El, N, K] transposed or (back) [El, K, N], + bias [El, N]; its tiles are
    counted by wave. sending: while programs send on the same SMs."""
    moving: dict[str, Moved] = dict(
        hidden_desc=a, w_desc=w, y_desc=out, bias=bias, tiles=tables.tiles, count=tables.count, counters=counters
    )
    return GivenLaunch(_gemm_out(world, of, a.shape[1], out.shape[1], back, sending), moving)


@prepared
def _gemm_out(world: World, of: Prepared, k: int, n: int, back: bool, sending: bool) -> Launch:
    plan = of.plan
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    return Launch(
        world,
        grouped_gemm_out,
        world.sm_count,
        of.gemm(SUM, bn // 2, sending),
        hidden_desc=Matrix(of.rows, k, (bm, bk)),
        w_desc=Matrix(of.local * k, n, (bk, bn)) if back else Matrix(of.local * n, k, (bn, bk)),
        y_desc=Matrix(of.rows, n, (bm, bn // 2)),
        N=n,
        K=k,
        W=world.size,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        BACK=back,
    )


def sums(
    world: World, of: Prepared, rows: Routed, targets: torch.Tensor, counters: torch.Tensor, at: Space
) -> GivenLaunch:
    moving: dict[str, Moved] = dict(
        of=rows, targets=targets, counters=counters, outboxes=at.outbox.addresses, turn=at.turn
    )
    return GivenLaunch(_sums(world, of, at.half), moving)


@prepared
def _sums(world: World, of: Prepared, half: int) -> Launch:
    layer, plan = of.layer, of.plan
    block = 32 * plan.side_warps * ELEMENTS
    cols = min(power(layer.hidden), block)
    sizes = dict(COLS=cols, K=layer.k, ROWS=min(plan.sum_rows, block // cols))
    return of.side_launch(world, combine_rows, of.summers, SUM, of.summed, half=half, **sizes)


def last(
    world: World,
    of: Prepared,
    rows: Routed,
    ids: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    at: Space,
    counters: torch.Tensor | None = None,
    how: LastSums = LastSums(),  # noqa: B008  # frozen
) -> GivenLaunch:
    """counters: of GEMM 2, where they are to be cleared."""
    moving: dict[str, Moved] = dict(
        of=rows,
        outbox=at.outbox.local,
        ids=ids,
        shared=shared,
        out=out,
        counters=counters,
        turn=at.turn,
        T=out.shape[0],
        number=world.number,
    )
    return GivenLaunch(_last(world, of, at.half, how), moving)


@prepared
def _last(world: World, of: Prepared, half: int, how: LastSums) -> Launch:
    layer = of.layer
    block = min(32 * LAST_WARPS * ELEMENTS // 2, world.scale.norm_block)
    cols = min(power(layer.hidden), block)
    rows = block // cols
    blocks = -(-layer.capacity // rows) * -(-layer.hidden // cols)
    return Launch(
        world,
        sum_ranks,
        min(how.an_sm * world.sm_count, blocks),
        how.options,
        ch=of.summed,
        calls=of.calls,
        half=half,
        C=layer.capacity,
        ARRIVALS=of.summers,
        by=constants(RankSums, H=layer.hidden, K=layer.k, LOCAL=of.local, SHARING=how.tp_size, ROWS=rows, COLS=cols),
    )


def filling(plan: FusedMoe | LowLatency) -> dict[str, int]:
    """Options of a launch that has the GPU to itself, with per_sm programs on every SM."""
    tile = plan.tile
    registers = min(255, 65536 // (32 * tile.warps * plan.per_sm) // 8 * 8)
    return dict(num_warps=tile.warps, num_stages=tile.stages, maxnreg=registers, per_sm=plan.per_sm)


def layer_sizes(world: World, layer: Layer, tile: TileShape, **blocks: int) -> LayerSizes:
    """blocks: GROUP_M, and what is sent and summed at a time."""
    h, act = layer.hidden, ACTIVATIONS[layer.activation]
    return constants(
        LayerSizes,
        H=h,
        INNER=layer.inner,
        P=power(h),
        K=layer.k,
        KP=power(layer.k),
        LOCAL=layer.experts // world.size,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        WHOLE=h % tile.block_k == 0,
        ACT=act,
        GATED=0 if act == GELU.value else world.scale.interleave,
        **blocks,
    )


def load(
    world: World,
    of: Prepared,
    x: torch.Tensor,
    ids: torch.Tensor,
    w: Weights,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    at: Space,
    kept: Kept = NONE_KEPT,
) -> None:
    """Everything that a call launches here, the first time, in pairs of what shares an SM. Raises Unsupported where a
    pair does not."""

    def steps() -> Iterable[GivenLaunch]:
        blank, rows = Tables(*[of.words] * 8), Routed(at.y, of.words, of.floats)
        yield sends(world, of, x, ids, at)
        yield gemm_in(world, of, w, blank, at, kept.both)
        yield sums(world, of, rows, of.words, of.words, at)
        yield gemm_out(world, of, blank, at.hidden, w.w2, w.b2, at.y, of.words)
        yield last(world, of, rows, ids, shared, out, at)

    of.ahead((x, ids, *w, shared, out, kept.both), steps)


# -- a call ------------------------------------------------------------------------------------------------------------


def side_stream(world: World) -> Any:
    """Where rows travel under the GEMMs. One rank's go nowhere and are moved on the current stream: a GEMM and its
    senders, which wait for each other, could find no room on an SM together beside an op of `World.alone`'s parent."""
    return world.side_stream(NAME) if world.size > 1 else world.current_stream()


def dispatch(world: World, of: Prepared, x: torch.Tensor, ids: torch.Tensor, at: Space, start: Any) -> None:
    """x [T, H], of int32 ids [T, k], to the inboxes: on the side stream, behind the event `start`."""
    side = side_stream(world)
    world.wait_event(side, start)
    sends(world, of, x, ids, at).on(side)


def experts(
    world: World,
    of: Prepared,
    w: Weights,
    tables: Tables,
    counters: torch.Tensor,
    at: Space,
    kept: Kept = NONE_KEPT,
) -> Any:
    """Both GEMMs on the current stream, behind what made the tables. Returns the event between them, from which on sums
    may begin: not before, or they would take places on SMs, and tell others that the inbox is read."""
    stream = world.current_stream()
    gemm_in(world, of, w, tables, at, kept.both).on(stream)
    if kept.rows is not None:
        world.copy(kept.rows, at.inbox.local, stream)
    between = world.record(stream)
    gemm_out(world, of, tables, at.hidden, w.w2, w.b2, at.y, counters).on(stream)
    return between


def combine(
    world: World,
    of: Prepared,
    rows: Routed,
    targets: torch.Tensor,
    counters: torch.Tensor,
    at: Space,
    between: Any,
) -> None:
    """The weighted sums of other ranks' rows to their outboxes, on the side stream."""
    side = side_stream(world)
    world.wait_event(side, between)
    sums(world, of, rows, targets, counters, at).on(side)


def total(
    world: World,
    of: Prepared,
    rows: Routed,
    ids: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    at: Space,
) -> None:
    """out [T, H], on the current stream. Behind the side stream: else its programs could keep from an SM this rank's
    sums, for which the other ranks' programs wait; and what these read may be written again behind this call."""
    stream = world.current_stream()
    world.wait_event(stream, world.record(side_stream(world)))
    last(world, of, rows, ids, shared, out, at).on(stream)


def run_dispatched(
    world: World, call: MoeCall, plan: Dispatched, operands: MoeOperands, out: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """out [T, H] = the sum over a token's routes of weight * expert(x) + shared, on the current stream. Returns the
    numbers of rows received, or None, and what is kept.

    Args:
        world: the ranks; all make the same calls in the same order.
        call, plan: the same layer and plan on all ranks, for which `fits` returns None.
        operands: contiguous, on world.device. T is at most the layer's capacity, another T on every rank.
        out: of the layer's dtype; it may hold x or shared.

    Sums are accumulated in float32; an expert's result, and a rank's sum of a token, are rounded to the layer's dtype.
    Memory, shared by all layers: symmetric, 2 W C H elements; ordinary, (H + I) elements for each of `layer_rows` rows.
    The first call of its kind makes it, not in the capture of a CUDA graph.

    Raises:
        Unsupported: the plan's programs do not fit on an SM together.
        Timeout: at a later call or `World.synchronize`, naming the rank that did not arrive.
        Overflow: there, on a rank to whose experts more rows came than `layer_rows`.
    """
    layer, stream, w = call.layer, world.current_stream(), operands.experts
    x, ids, weights, shared = operands.x, operands.ids, operands.weights, operands.shared
    received = call.received(world, operands)
    kept = NONE_KEPT if call.keep is None else Kept(*(world.empty(*t) for t in call.kept(world, plan.tile.block_m)))
    world.order(lock(world, NAME), stream)
    of = plan_state(world, layer, plan)
    at = space(world, layer, of.rows)
    routed, (filling, tables, counters) = route_tables.routes_of(world, layer.capacity, layer.k), tables_of(world, of)
    load(world, of, x, ids, w, shared, out, at, kept)
    start = world.record(stream)
    route_tables.share_routes(world, routed, ids, weights)
    dispatch(world, of, x, ids, at, start)
    route_tables.fill(world, filling, tables, routed.shared_weights.local)
    between = experts(world, of, w, tables, counters, at, kept)
    rows = Routed(at.y, tables.slots, routed.shared_weights.local)
    combine(world, of, rows, tables.targets, counters, at, between)
    total(world, of, rows, ids, shared, out, at)
    if received is not None:
        world.copy(received, tables.received, stream)
    return received, *(t for t in kept if t is not None)


@prepared
def tables_of(world: World, of: Prepared) -> tuple[route_tables.Filling, Tables, torch.Tensor]:
    """What fills the tables of a layer, these, and counters that grow with their `targets`. Collective the first
    time."""
    layer = of.layer
    sizes = route_tables.TableSizes(of.local, layer.capacity, of.plan.tile.block_m, layer.max_rows)
    filling, tables = route_tables.filling_of(world, layer.k, sizes)
    return filling, tables, waves(world, tables.targets)
