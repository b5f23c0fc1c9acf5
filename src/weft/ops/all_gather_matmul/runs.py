"""How each plan runs all-gather + GEMM. A run returns the gathered activation, or None where the call wants none.

sequential   NCCL's all-gather, then the library's GEMM
one_shot     low-latency rows (transport/low_latency.py), then the library's GEMM
decomposed   the library's GEMM of one group of shards while a copy engine pulls the next
fused        one GEMM whose tiles wait for the chunks that programs of the same launch pull (kernels.all_gather_gemm),
             or for the shards that a copy engine pulls (kernels.copied_gemm)
awaiting     quack's GEMM, whose tiles wait for the shards that a copy engine pulls
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...backends import library_gemm
from ...backends.base import Stream, SymmetricTensor
from ...kernel_launch import Ahead, GivenLaunch, Launch, Matrix, prepared
from ...lang.channel import BlockChannel
from ...lang.jit import constants
from ...lang.mapping import StaticMapping, TableMapping, shard_tables
from ...op import Direct
from ...plans import Awaiting, Decomposed, FusedGather, FusedGatherByCopies, GemmTile, OneShot, Plan
from ...transport import low_latency
from ...transport.collectives import gather
from ...transport.copies import COPIES, chunks
from ...transport.memory import Halves, flat, half_elements, lock
from ...world import Arena, World
from .. import by_collectives
from ..activation import gate
from ..common import Factors, add_bias, tile_of, transposed, weight_matrix
from .call import GATHER_GEMM, GatherCall
from .kernels import Product, Pull, Shards, all_gather_gemm, copied_gemm


@contextmanager
def ungated(world: World, call: GatherCall, out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield [M, N] to write what the activation is applied to at the end, on its way to `out`; `out` itself where there
    is no activation."""
    full = world.empty((call.rows, call.n), call.dtype) if call.gated else out
    yield full
    if call.gated:
        gate(full, out, world, world.scale.interleave)


# -- sequential and one shot -------------------------------------------------------------------------------------------
def run_sequential(world: World, call: GatherCall, plan: Plan, operands: Factors, out: torch.Tensor) -> torch.Tensor:
    gathered = gather(operands.x, world, call.shards, world.current_stream())
    _multiply_gathered(world, call, gathered, operands, out)
    return gathered.clone() if call.gathered and world.size == 1 else gathered  # one rank: it is x itself


def run_one_shot(world: World, call: GatherCall, plan: OneShot, operands: Factors, out: torch.Tensor) -> torch.Tensor:
    gathered = low_latency.gather(operands.x, world, plan, call.shards, world.current_stream())
    _multiply_gathered(world, call, gathered, operands, out)
    return gathered


def _multiply_gathered(
    world: World, call: GatherCall, gathered: torch.Tensor, operands: Factors, out: torch.Tensor
) -> None:
    with ungated(world, call, out) as full:
        world.linear(gathered, operands.weight, operands.bias, world.current_stream(), full)


def direct_sequential(world: World, call: GatherCall) -> Direct:
    """What a sequential call of equal, contiguous shards comes to, in as little host time as Python takes."""
    check, current, empty, finish = world.check, world.current_stream, world.empty, world.finish
    all_gather, linear, block = world.all_gather, world.linear, world.scale.interleave
    m, k, gated = call.rows, call.k, call.gated

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        check()
        stream = current()
        full = empty((m, k), x.dtype)
        all_gather(full, x, stream)
        y = linear(full, weight, bias, stream)
        if gated:
            both, y = y, empty((m, gated), x.dtype)
            gate(both, y, world, block)
        finish(stream)
        return y, full if call.gathered else None

    return run


# -- decomposed --------------------------------------------------------------------------------------------------------
def run_decomposed(
    world: World, call: GatherCall, plan: Decomposed, operands: Factors, out: torch.Tensor
) -> torch.Tensor:
    with ungated(world, call, out) as full:
        if world.symmetric_reason:
            return by_collectives.gather(world, plan, operands, full)
        return _decomposed(world, call, plan, operands, full)


def _decomposed(world: World, call: GatherCall, plan: Decomposed, operands: Factors, out: torch.Tensor) -> torch.Tensor:
    """x -> symmetric shard, barrier; a copy engine pulls group after group, each group's GEMM starts when it is there,
    alternating between two streams, so that one fills the SMs that the last tiles of the one before leave idle. The
    barrier behind the copies keeps a fast rank from overwriting its shard in the next call while a peer still reads."""
    (x, weight, bias), rows, me = operands, operands.x.shape[0], world.rank
    stream, copies, second = world.current_stream(), world.side_stream("copy"), world.side_stream("gemm", urgent=False)
    groups = chunks(plan, me, world.size)
    alone = len(groups[0][1]) == 1  # the own rows, which are in x
    gathered, shard = _staged(x, world, stream, copies, call.gathered or not alone)
    parts, outs, landed = gathered.split(rows), out.split(rows), []
    with world.on(copies):  # once, not for every copy
        for group in groups:
            for p in group[1]:
                if p != me:
                    world.copy(parts[p], shard.peers[p], copies)
            landed.append(world.record(copies))
        world.barrier(copies)
    for i, (first, ranks) in enumerate(groups):
        lane, own, one = second if i % 2 else stream, alone and i == 0, len(ranks) == 1
        if not own:
            world.wait_event(lane, landed[i])
        run = slice(first * rows, (first + len(ranks)) * rows)
        part = x if own else parts[first] if one else gathered[run]
        world.linear(part, weight, bias, lane, outs[first] if one else out[run])
    world.wait_event(stream, world.record(second))
    world.wait_event(stream, world.record(copies))
    return gathered


def _staged(
    x: torch.Tensor, world: World, stream: Stream, copies: Stream, whole: bool
) -> tuple[torch.Tensor, SymmetricTensor]:
    """A fresh gathered [world x rows, K], with x in this rank's rows (`whole`), and the symmetric shard with x in it;
    `copies` goes on once every rank has staged its shard. On the caller's stream, before the GEMM: a copy within a GPU
    takes SMs."""
    rows, k = x.shape
    shard = world.buffer("shard", rows * k * x.element_size()).view(0, (rows, k), x.dtype)
    world.order(lock(world, COPIES), stream)
    gathered = world.empty((world.size * rows, k), x.dtype)
    world.copy(shard.local, x, stream)
    world.wait_event(copies, world.record(stream))
    world.barrier(copies)
    if whole:
        world.copy(gathered[world.rank * rows : (world.rank + 1) * rows], x, stream)
    return gathered, shard


# -- fused -------------------------------------------------------------------------------------------------------------
def run_fused(
    world: World, call: GatherCall, plan: FusedGather, operands: Factors, out: torch.Tensor
) -> torch.Tensor | None:
    if not call.gated or _gated_in_epilogue(world, plan.tile):
        return _pulled(world, call, plan, operands, out, call.gated)
    with ungated(world, call, out) as full:
        return _pulled(world, call, plan, operands, full, 0)


def run_fused_by_copies(
    world: World, call: GatherCall, plan: FusedGatherByCopies, operands: Factors, out: torch.Tensor
) -> torch.Tensor:
    if not call.gated or _gated_in_epilogue(world, plan.tile):
        return _copied(world, call, plan, operands, out, call.gated)
    with ungated(world, call, out) as full:
        return _copied(world, call, plan, operands, full, 0)


def _gated_in_epilogue(world: World, tile: GemmTile) -> bool:
    """Whether a tile's columns hold blocks of gate beside their blocks of up."""
    return tile.block_n in (2 * world.scale.interleave, 4 * world.scale.interleave)


@dataclass(frozen=True)
class Pulls:
    """How the shards travel: `split` programs share a chunk, in blocks of rows x cols elements. An own chunk is copied
    in `parts` parts, a multiple of `split`."""

    split: int
    parts: int
    rows: int
    cols: int
    bulk: bool  # chunks are whole blocks, at whole blocks

    @classmethod
    def of(cls, plan: FusedGather, k: int, even: bool) -> Pulls:
        chunk, rows = plan.tile.block_m * k, plan.pull_rows
        cols, split = plan.tile.block_n // 2, plan.split
        return cls(split, -(-16 // split) * split, rows, cols, even and chunk % (split * rows * cols) == 0)


def _whole_tiles(shards: tuple[int, ...], tile: GemmTile) -> bool:
    """Whether all shards are as many whole tiles of rows."""
    return len(set(shards)) == 1 and shards[0] % tile.block_m == 0


def _tables(world: World, shards: Sequence[int], tile: int, channel: int, arrivals: int) -> TableMapping:
    """Return the mapping of the tiles as device tables, for shards that are unequal or not whole tiles: as integers of
    a mapping their lengths would each compile another kernel."""
    t = shard_tables(shards, tile_rows=tile, channel_rows=channel)
    names = ("row_lo", "row_hi", "rank", "channel_lo", "channel_hi")
    return TableMapping(*world.words(*(t[name] for name in names), [arrivals] * t["channel_base"][-1]))


def _pull_channel(world: World, call: GatherCall, plan: FusedGather, parts: int) -> tuple[BlockChannel, Shards]:
    """Return the channel and tables of one shape, collective the first time. Counters: one a chunk of block_m rows,
    then `ready`."""

    def make() -> tuple[BlockChannel, Shards]:
        shards, bm = call.shards, plan.tile.block_m
        t = shard_tables(list(shards), tile_rows=bm, channel_rows=bm)
        chunks = t["channel_base"][-1]
        mapping: StaticMapping | TableMapping
        if _whole_tiles(shards, plan.tile):
            mapping = StaticMapping.over(call.rows, world.size, tile_rows=bm, channel_rows=bm, arrivals=parts)
        else:
            mapping = _tables(world, shards, bm, bm, parts)
        own = -(-shards[world.rank] // bm) * parts + 1
        name = f"{GATHER_GEMM} {list(shards)}x{call.n}x{call.k} {call.dtype} {plan}"
        ch = world.channel(name, chunks + 1, mapping, [parts] * chunks + [own])
        return ch, Shards(*world.words(t["offset"], t["channel_base"]))

    return world.cached((GATHER_GEMM, call.shards, call.n, call.k, call.dtype, plan), make)


def _gemm_arguments(
    world: World, call: GatherCall, tile: GemmTile, gated: int, trans_b: bool, workers: int, flatten: bool
) -> dict[str, object]:
    """Return the arguments that both kernels take for the GEMM."""
    block = world.scale.interleave
    columns = block if gated else tile.block_n // 2
    return dict(
        w_desc=weight_matrix(call, tile, trans_b),
        out_desc=Matrix(call.rows, gated or call.n, (tile.block_m, columns)),
        M=call.rows,
        N=call.n,
        K=call.k,
        product=constants(
            Product,
            tile=tile_of(tile, tile.group_m, trans_b),
            WORKERS=workers,
            GATED=block if gated else 0,
            FLATTEN=flatten,
        ),
    )


def _options(plan: FusedGather | FusedGatherByCopies) -> dict[str, int]:
    return dict(num_warps=plan.tile.warps, num_stages=plan.tile.stages, per_sm=plan.per_sm)


@prepared
def _pulled_launch(
    world: World, call: GatherCall, plan: FusedGather, gated: int, trans_b: bool, arena: Arena
) -> Launch:
    tile, bm, bk = plan.tile, plan.tile.block_m, plan.tile.block_k
    k, programs = call.k, world.sm_count * plan.per_sm
    even, half = _whole_tiles(call.shards, tile), half_elements(arena.half, k, call.dtype)
    pull = Pulls.of(plan, k, even)
    ch, shards = _pull_channel(world, call, plan, pull.parts)
    view, granules = flat(world, arena.memory)
    bulk = pull.bulk and view is not None and half % pull.cols == 0
    whole_arena = Matrix(half // k + call.rows, k, (bm, bk))
    arena_desc = whole_arena.argument(arena.memory.local.view(call.dtype))
    return Launch(
        world,
        all_gather_gemm,
        programs,
        _options(plan),
        # A shard that is not whole tiles is read from the arena alone.
        x_desc=Matrix(call.shards[0], k, (bm, bk)) if even else arena_desc,
        own=call.shards[0] // bm if even else 0,
        arena=Halves.of(arena, granules, half),
        arena_desc=arena_desc,
        flat_desc=view.descriptor(call.dtype, pull.rows, pull.cols) if bulk and view else arena_desc,
        ch=ch,
        shards=shards,
        **_gemm_arguments(world, call, tile, gated, trans_b, programs - plan.pull_programs, plan.flatten and even),
        pull=constants(
            Pull,
            PULLERS=plan.pull_programs,
            PARTS=pull.parts,
            SPLIT=pull.split,
            BULK=bulk,
            ROWS=pull.rows,
            COLS=pull.cols,
            STAGES=plan.pull_stages,
        ),
    )


def _pulled(
    world: World, call: GatherCall, plan: FusedGather, operands: Factors, out: torch.Tensor, gated: int
) -> torch.Tensor | None:
    """One launch: some of its programs pull the peers' shards into the arena, the others compute."""
    (x, weight, bias), stream = operands, world.current_stream()
    arena = world.arena(call.rows * call.k * x.element_size(), row=call.k * x.element_size())
    world.order(arena, stream)
    epoch = arena.epoch.clone() if call.gathered else None
    launch = _pulled_launch(world, call, plan, gated, transposed(weight), arena)
    source = dict(x_desc=x) if "x_desc" in launch.moving else {}
    launch(stream, x=x, **source, w_desc=weight, bias=bias, out_desc=out)
    return None if epoch is None else _copy_of_half(world, call, arena, epoch)


def _copy_of_half(world: World, call: GatherCall, arena: Arena, epoch: torch.Tensor) -> torch.Tensor:
    """A copy of the arena's half that call number `epoch` filled, row by row: torch copies a few long rows slowly."""
    m, k, first = call.rows, call.k, half_elements(arena.half, call.k, call.dtype) // call.k
    gathered, stream = world.empty((m, k), call.dtype), world.current_stream()
    rows = torch.as_strided(arena.memory.local.view(call.dtype), (first + m, k), (k, 1))
    numbers = world.cached(("numbers", m), lambda: world.tensor(list(range(m)), torch.int64))
    world.call(
        lambda: torch.index_select(rows, 0, numbers + epoch % 2 * first, out=gathered), [rows], [gathered], stream
    )
    return gathered


@prepared
def _copied_launch(
    world: World, call: GatherCall, plan: FusedGatherByCopies, gated: int, trans_b: bool
) -> tuple[Launch, Ahead]:
    rows, bm, bk = call.shards[0], plan.tile.block_m, plan.tile.block_k
    ch, epoch, offsets = _copy_channel(world, call, plan)
    workers = world.sm_count * plan.per_sm - 1
    launch = Launch(
        world,
        copied_gemm,
        workers,
        _options(plan),
        x_desc=Matrix(rows, call.k, (bm, bk)),
        gathered_desc=Matrix(call.rows, call.k, (bm, bk)),
        own=rows // bm if rows % bm == 0 else 0,
        ch=ch,
        turn=epoch,
        offsets=offsets,
        **_gemm_arguments(world, call, plan.tile, gated, trans_b, workers, plan.flatten),
    )
    return launch, Ahead()


def _copy_channel(
    world: World, call: GatherCall, plan: FusedGatherByCopies
) -> tuple[BlockChannel, torch.Tensor, torch.Tensor]:
    """Return the channel of one shape, one counter a shard, the number of the call, which goes with it, and where
    shards begin; collective the first time."""

    def make() -> tuple[BlockChannel, torch.Tensor, torch.Tensor]:
        rows, size, bm = call.shards[0], world.size, plan.tile.block_m
        whole = StaticMapping.over(call.rows, size, tile_rows=bm, channel_rows=rows, arrivals=1)
        mapping = whole if rows % bm == 0 else _tables(world, call.shards, bm, rows, 1)
        offsets = world.tensor([r * rows for r in range(size)], torch.int32)
        ch = world.channel(f"{GATHER_GEMM} {list(call.shards)}x{call.n}x{call.k} {plan}", size, mapping, 1)
        return ch, world.tensor([1], torch.int32), offsets

    return world.cached(("copied", GATHER_GEMM, call.shards, call.n, call.k, plan), make)


def _copied(
    world: World, call: GatherCall, plan: FusedGatherByCopies, operands: Factors, out: torch.Tensor, gated: int
) -> torch.Tensor:
    """A copy engine pulls shard after shard, nearest peer first, and sets each one's channel behind it; one GEMM kernel
    takes the tiles as they come. It leaves a place on one SM for the barriers that run at the same time. In a CUDA
    graph another stream sets the channels, so that the next copy does not wait for that; launched one by one, the
    host's time for two more calls a peer costs more."""
    (x, weight, bias), rows, size, me = operands, call.shards[0], world.size, world.rank
    ch, epoch, _ = _copy_channel(world, call, plan)
    stream, copies, captured = world.current_stream(), world.side_stream("copy"), world.capturing()
    signals = world.side_stream("signal") if captured else copies
    gathered, shard = _staged(x, world, stream, copies, call.gathered or rows % plan.tile.block_m != 0)
    launch, ahead = _copied_launch(world, call, plan, gated, transposed(weight))
    moving = dict(x_desc=x, gathered_desc=gathered, w_desc=weight, bias=bias, out_desc=out)
    ahead((bias,), lambda: (GivenLaunch(launch, moving),))
    launch(stream, **moving)
    parts, flags = gathered.split(rows), ch.counters.split(1)
    with world.on(copies):  # once, not for every copy
        for j in range(1, size):
            p = (me + j) % size
            world.copy(parts[p], shard.peers[p], copies)
            if captured:
                world.wait_event(signals, world.record(copies))
            world.signal(flags[p], epoch, signals)
        world.barrier(copies)
    for other in (copies, signals) if captured else (copies,):
        world.wait_event(stream, world.record(other))
    return gathered


# -- awaiting ----------------------------------------------------------------------------------------------------------


def run_awaiting(world: World, call: GatherCall, plan: Awaiting, operands: Factors, out: torch.Tensor) -> torch.Tensor:
    with ungated(world, call, out) as full:
        return _awaiting(world, call, plan, operands, full)


def _awaiting(world: World, call: GatherCall, plan: Awaiting, operands: Factors, out: torch.Tensor) -> torch.Tensor:
    """A copy engine pulls shard after shard, nearest peer first, to symmetric memory, which the library's GEMM reads,
    and behind each one sets the flag for which that GEMM waits.

    The GEMM takes every SM, registers and all, and looks at its flags without a limit. So they must come to be set
    without an SM, and without a peer. All ranks have met in a barrier before it starts, which is bounded, and nothing
    but that barrier stands before the copies that set them. Each is copied from its peer's memory, as a copy within a
    GPU may need an SM: a one that stands there. So the copies end, and with them the GEMM, even where the barrier
    expired. Flags are cleared before the barrier, behind the last call's GEMM, as it compares numbers without a wrap;
    the own one is then set. The GEMM is loaded, and run once, before anything waits in it."""
    (x, weight, bias), rows, size, me = operands, call.shards[0], world.size, world.rank
    stream, copies, on_gpu = world.current_stream(), world.side_stream("copy"), world.backend.name == "cuda"
    shards = world.buffer("gathered", call.rows * call.k * x.element_size()).view(0, (size, rows, call.k), x.dtype)
    gathered, parts = shards.local.view(call.rows, call.k), shards.local.unbind(0)
    form = gemm_form(plan)
    flags, own, ones = world.cached((GATHER_GEMM, "flags"), lambda: _flags(world))
    words, one = flags.split(1), ones.local

    def multiply() -> bool:
        if on_gpu:
            library_gemm.awaiting(gathered, weight, out, flags, one, me, form)
        return on_gpu

    def load() -> bool:
        flags.fill_(1)
        return multiply()

    world.cached(("awaiting", GATHER_GEMM, call.rows, call.n, call.k, x.dtype, plan), load)
    world.order(lock(world, COPIES), stream)
    world.copy(parts[me], x, stream)
    world.copy(flags, own, stream)
    world.wait_event(copies, world.record(stream))
    world.barrier(copies)
    all_staged = world.record(copies)
    world.wait_event(stream, all_staged)
    with world.on(copies):
        for p in ((me + j) % size for j in range(1, size)):
            world.copy(parts[p], shards.peers[p][p], copies)
            world.signal(words[p], ones.peers[p], copies)
        world.barrier(copies)
    if on_gpu:
        world.call(multiply, [gathered, weight, flags, one], [out], stream)
    else:  # what the kernel does, shard by shard
        for p in ((me + j) % size for j in range(size)):
            world.wait(words[p], one, stream)
            world.linear(parts[p], weight, None, stream, out[p * rows : (p + 1) * rows])
    add_bias(world, out, bias, stream)
    world.wait_event(stream, world.record(copies))
    if not call.gathered:
        return gathered
    kept = world.empty((call.rows, call.k), x.dtype)
    world.copy(kept, gathered, stream)
    return kept


def usable(world: World, plans: Sequence[Awaiting], dtype: torch.dtype) -> list[Awaiting]:
    """Return the plans that every rank can run. Collective, plan by plan: a rank may have to compile what another has
    kept."""
    there = all(world.exchange(library_gemm.lacks() is None))
    return [p for p in plans if there and all(world.exchange(library_gemm.waits(gemm_form(p), world.device, dtype)))]


def gemm_form(plan: Awaiting) -> library_gemm.Form:
    return library_gemm.Form(plan.tile_m, plan.tile_n, plan.cluster_m, plan.pingpong)


def _flags(world: World) -> tuple[torch.Tensor, torch.Tensor, SymmetricTensor]:
    """A flag for each rank's shard, int32; what they are where this rank's alone is set; and a one on every rank."""
    with torch.inference_mode(False):  # copies write the flags in calls that come outside it too
        ones = world.symmetric((1,), torch.int32, f"{GATHER_GEMM}, a one")
        ones.local.fill_(1)
        world.wait_for_streams()
        world.exchange(GATHER_GEMM)  # nobody copies another's before it is there
        own = world.tensor([int(rank == world.rank) for rank in range(world.size)], torch.int32)
        return world.zeros((world.size,), torch.int32), own, ones
