"""How each plan prepares all-gather + GEMM. A run returns the gathered activation and the scales of its rows
(`GatheredRows`), or None for a result that the caller does not request. 8-bit rows and their scales are sent unchanged.

sequential   NCCL's all-gather, then a library GEMM (cuBLAS's or quack's)
one_shot     low-latency rows (transport/low_latency.py), then a library GEMM
decomposed   a library GEMM of one group of shards while a copy engine pulls the next
fused        one GEMM with tiles that wait for the chunks that programs of the same launch pull
             (kernels.all_gather_gemm), or for the shards that a copy engine pulls (kernels.copied_gemm)
flag_gated   quack's GEMM, with tiles that wait for the shards that a copy engine pulls
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import triton.language as tl

from ...backends import library_gemm
from ...kernel_launch import Ahead, BoundLaunch, Launch, Matrix, Moved
from ...lang.channel import BlockChannel
from ...lang.jit import constants
from ...lang.mapping import TableMapping
from ...plans import (
    Decomposed,
    FlagGated,
    FusedGather,
    FusedGatherByCopies,
    GemmTile,
    OneShot,
    Plan,
    Sequential,
)
from ...prepared import OwnResult, Run, made_once
from ...transport import collectives, copy_engine, low_latency
from ...transport.collectives import add_bias
from ...transport.interfaces import CollectiveFunction, GatherTransport
from ...transport.memory import Halves, flat, half_elements
from ...world import Arena, World
from .. import by_collectives
from ..activation import silu_mul_launch
from ..common import tile_of, weight_matrix
from ..product import linear
from ..recipes import ScaledFactors, block_rows, scales_of
from ..tiles import splits_last_round
from .call import GATHER_GEMM, GatherCall, GatheredRows
from .kernels import Gathering, Product, Pull, all_gather_gemm, copied_gemm


def with_activation(world: World, call: GatherCall, run: Run) -> Run:
    """Return a run that computes the GEMM's result [M, N] and then applies the activation to it."""
    launch = silu_mul_launch(world, call.rows, call.gated, call.n, world.backend.scale.interleave)

    def activated(operands: ScaledFactors, out: torch.Tensor) -> GatheredRows:
        full = world.empty((call.rows, call.n), call.dtype)
        gathered: GatheredRows = run(operands, full)
        launch(world.current_stream(), x=full, out=out)
        return gathered

    return activated


NOT_RETURNED = GatheredRows(None)


# -- a library GEMM of gathered rows -----------------------------------------------------------------------------------
# The transport that gathers the rows for each class of plans.
GATHERS: Mapping[type[Plan], GatherTransport] = {
    Sequential: collectives.gather_rows,
    OneShot: low_latency.gather_rows,
    Decomposed: copy_engine.gather_rows,
}


def sent_tensors(call: GatherCall, operands: ScaledFactors) -> list[torch.Tensor]:
    """Return this rank's rows of x, and also the rows' scales [m_r, ..] if the call sends them with the rows."""
    scale = operands.x_scale
    if scale is None or not call.scales_in_row:
        return [operands.x]
    return [operands.x, scale.view(len(operands.x), call.scales_in_row)]


def sent_specs(world: World, call: GatherCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of `sent_tensors`."""
    m = call.shards[world.rank]
    scales = [((m, call.scales_in_row), torch.float32)] if call.scales_in_row else []
    return [((m, call.k), call.operand_dtype), *scales]


def gathered_operands(operands: ScaledFactors, x: torch.Tensor, *scales: torch.Tensor) -> ScaledFactors:
    """Return the operands of the GEMM of gathered rows x. `scales` are the rows' scales, if they were gathered."""
    _, weight, bias, x_scale, weight_scale = operands
    return ScaledFactors(x, weight, bias, scales[0] if scales else x_scale, weight_scale)  # faster than _replace


def _gather_of(world: World, call: GatherCall, plan: Sequential | OneShot) -> CollectiveFunction | None:
    """Return NCCL's all-gather, or one by low-latency rows. Return None for unequal shards, or for rows that are not
    whole 16-byte words."""
    if isinstance(plan, OneShot):
        return low_latency.prepare_gather(world, plan, call.shards, call.k, call.dtype)
    return world.all_gather if call.even else None


def prepare_at_once(world: World, call: GatherCall, plan: Sequential | OneShot) -> Run | OwnResult:
    """Prepare one all-gather and a library GEMM of all rows. A transport gathers the rows of other calls: with scales,
    an activation, unequal shards or rows that need padding, and on batch-invariant Worlds."""
    plain = world.size > 1 and call.scaling is None and not call.gated and not world.batch_invariant
    gather = _gather_of(world, call, plan) if plain else None
    if gather is None:
        return prepare_gathered(world, call, plan)
    current, empty, linear = world.current_stream, world.empty, world.backend.linear
    shape, dtype, keep = (call.rows, call.k), call.dtype, call.gathered

    def run(operands: ScaledFactors, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, bias, *_ = operands
        stream, gathered = current(), empty(shape, dtype)
        gather(gathered, x, stream)
        return linear(gathered, weight, bias, stream, out), gathered if keep else None, None

    return OwnResult(run)


def prepare_gathered(world: World, call: GatherCall, plan: Plan) -> Run:
    """Prepare GEMMs of the rows, in the order in which the plan's transport delivers the rows."""
    if isinstance(plan, Decomposed) and world.backend.symmetric_unsupported:

        def by_collectives_alone(operands: ScaledFactors, out: torch.Tensor) -> GatheredRows:
            gathered = by_collectives.gather(world, plan, operands, out)
            return GatheredRows(gathered if call.gathered else None)

        return with_activation(world, call, by_collectives_alone) if call.gated else by_collectives_alone
    gather = GATHERS[type(plan)](world, plan, call.shards, sent_specs(world, call), call.gathered)

    def run(operands: ScaledFactors, out: torch.Tensor) -> GatheredRows:
        with gather(sent_tensors(call, operands)) as (gathered, arrivals):
            for rows, parts, lane in arrivals:
                linear(world, call.scaling, call.dtype, gathered_operands(operands, *parts), lane, out[rows])
        if not call.gathered:
            return NOT_RETURNED
        # With one rank the gathered tensors are the operands themselves.
        return GatheredRows(*gathered) if world.size > 1 else GatheredRows(*(t.clone() for t in gathered))

    return with_activation(world, call, run) if call.gated else run


# -- fused -------------------------------------------------------------------------------------------------------------
def prepare_fused(world: World, call: GatherCall, plan: FusedGather | FusedGatherByCopies) -> Run:
    prepare: Callable[..., Run] = _by_pull_programs if isinstance(plan, FusedGather) else _by_copy_engine
    if not call.gated or _gated_in_epilogue(world, plan.tile):
        return prepare(world, call, plan, call.gated)
    return with_activation(world, call, prepare(world, call, plan, 0))


def _gated_in_epilogue(world: World, tile: GemmTile) -> bool:
    """Return whether the GEMM's epilogue computes the activation. It does if the columns of a tile are whole pairs of a
    gate block and its up block, but not on a batch-invariant World, where every plan rounds gate and up before the
    activation."""
    return not world.batch_invariant and tile.block_n in (
        2 * world.backend.scale.interleave,
        4 * world.backend.scale.interleave,
    )


def _tiles(shards: Sequence[int], bm: int) -> list[range]:
    """Return, for each rank, the tiles of bm rows that contain rows of the rank's shard."""
    bounds = itertools.pairwise([0, *itertools.accumulate(shards)])
    return [range(lo // bm, -(-hi // bm)) if lo < hi else range(0) for lo, hi in bounds]


def _arrivals(tiles: Sequence[range], parts: int) -> list[int]:
    """Return, for each tile, the number of parts of its chunks. Every rank has one chunk in each of its tiles."""
    return [parts * chunks for chunks in Counter(itertools.chain(*tiles)).values()]


def _mapping(world: World, rows: int, bm: int, tiles: Sequence[range], arrivals: Sequence[int] | None) -> TableMapping:
    """Return the mapping in which every tile waits for one channel: the tile's own channel with this number of
    `arrivals`, or, with None, the channel of the rank whose rows of the tile arrive last. `tiles` are the ranks' tiles.
    The mapping consists of tables for shards of every length, because a StaticMapping for some would be one more kernel
    to compile."""
    rows_lo = range(0, rows, bm)
    last = [0] * len(rows_lo)
    for rank in (world.rank, *world.other_ranks):  # in the order in which shards arrive
        for tile in tiles[rank]:
            last[tile] = rank
    channels = last if arrivals is None else range(len(rows_lo))
    arrivals_of = [1] * world.size if arrivals is None else arrivals
    rows_hi = [*rows_lo[1:], rows]
    tables = world.words(rows_lo, rows_hi, last, channels, [channel + 1 for channel in channels], arrivals_of)
    return TableMapping(*tables)._replace(single=tl.constexpr(True))


def _offsets(world: World, shards: tuple[int, ...]) -> torch.Tensor:
    """Return the first row of each rank's shard, and the number of all rows."""
    return world.tensor([0, *itertools.accumulate(shards)], torch.int32)


def _pull_channel(world: World, call: GatherCall, plan: FusedGather, parts: int) -> tuple[BlockChannel, torch.Tensor]:
    """Return the channel and the offsets of one shape. The first call is collective. The channel has a counter for each
    tile, then `ready`."""

    def make() -> tuple[BlockChannel, torch.Tensor]:
        shards, bm = call.shards, plan.tile.block_m
        tiles = _tiles(shards, bm)
        of_tiles = _arrivals(tiles, parts)
        arrivals = [*of_tiles, parts * len(tiles[world.rank]) + 1]
        name = f"{GATHER_GEMM} {list(shards)}x{call.n}x{call.k} {call.dtype} {plan}"
        ch = world.channel(name, len(arrivals), _mapping(world, call.rows, bm, tiles, of_tiles), arrivals)
        return ch, _offsets(world, shards)

    return world.cached((GATHER_GEMM, call.shards, call.n, call.k, call.dtype, plan), make)


# A GEMM with this many columns of the result for each gathered row computes about as fast as rows arrive: 650 TFLOP/s
# beside 110 GB/s by the usual number of pull programs and 330 GB/s by a copy engine (2 H200, 2026-11).
FEW_COLUMNS: Mapping[type[Plan], int] = {FusedGather: 6000, FusedGatherByCopies: 2000}


def halves_while_gathering(
    world: World, call: GatherCall, plan: FusedGather | FusedGatherByCopies, gated: int, programs: int
) -> bool:
    """Return whether two of the GEMM's programs share each tile of its last round. They do so only under three
    conditions:

    - The rounds before it compute the tiles of own rows on every rank, so that the last round reads only gathered rows.
    - Half of a tile's columns are whole pairs of a gate block and its up block.
    - If rows arrive more slowly than tiles are computed (FEW_COLUMNS), either every program or no program that computes
      a half has waited for the last rows in the round before. Otherwise the call would end half a tile later:
      8,192 x 2,752 x 4,096 with FusedGather took 9% more time (2 H200, 2026-11).
    """
    tile = plan.tile
    if call.scaling is not None or (gated and tile.block_n != 4 * world.backend.scale.interleave):
        return False
    columns, other_rows = -(-call.n // tile.block_n), call.rows - max(call.shards)
    tiles, most_own_tiles = -(-call.rows // tile.block_m) * columns, -(-max(call.shards) // tile.block_m) * columns
    last_round = tiles % programs
    if not splits_last_round(tiles, programs) or most_own_tiles > tiles - last_round:
        return False
    # The last rows are those of the last shard or of the last group of tile rows.
    last_rows = call.shards[0] if isinstance(plan, FusedGatherByCopies) else tile.group_m * tile.block_m
    waiting = -(-min(last_rows, other_rows) // tile.block_m) * columns - last_round
    slow_rows = call.n * call.rows < FEW_COLUMNS[type(plan)] * other_rows
    return not slow_rows or waiting >= programs or waiting + 2 * last_round <= programs


def _gemm_arguments(
    world: World, call: GatherCall, tile: GemmTile, gated: int, halves: bool, trans_b: bool
) -> dict[str, object]:
    """Return the GEMM's arguments, which are the same for both kernels."""
    columns = world.backend.scale.interleave if gated else tile.block_n // 2
    return dict(
        w_desc=weight_matrix(call, tile, trans_b),
        w_half_desc=weight_matrix(call, tile, trans_b, parts=2) if halves else None,
        out_desc=Matrix(call.rows, gated or call.n, (block_rows(tile, call.scaling), columns)),
        M=call.rows,
        N=call.n,
        K=call.k,
    )


def _product(world: World, call: GatherCall, tile: GemmTile, gated: int, trans_b: bool, **options: object) -> Product:
    gated = world.backend.scale.interleave if gated else 0
    return constants(Product, tile=tile_of(tile, tile.group_m, trans_b, call.scaling), GATED=gated, **options)


def _options(plan: FusedGather | FusedGatherByCopies) -> dict[str, int]:
    return dict(num_warps=plan.tile.warps, num_stages=plan.tile.stages, per_sm=plan.per_sm)


def _pulled_launch(
    world: World, call: GatherCall, plan: FusedGather, gated: int, halves: bool, arena: Arena, trans_b: bool
) -> Launch:
    tile, bm, bk = plan.tile, plan.tile.block_m, plan.tile.block_k
    k, programs, own_rows = call.k, world.sm_count * plan.per_sm, call.shards[world.rank]
    dtype = call.operand_dtype
    half = half_elements(arena.half, k, dtype)
    rows, cols = plan.pull_rows, tile.block_n // dtype.itemsize  # a pulled block has as many bytes for every dtype
    parts = -(-16 // plan.split) * plan.split  # the own shard's chunks are copied in this many parts
    ch, offsets = _pull_channel(world, call, plan, parts)
    view, granules = flat(world, arena.memory)
    whole_blocks = math.gcd(bm, *call.shards) * k % (plan.split * rows * cols) == 0
    bulk = whole_blocks and view is not None and half % cols == 0
    blocks = block_rows(tile, call.scaling), bk
    whole_arena = Matrix(half // k + call.rows, k, blocks)
    arena_desc = whole_arena.argument(arena.memory.local.view(dtype))
    return Launch(
        world,
        all_gather_gemm,
        programs,
        _options(plan),
        # An empty tensor has no descriptor, and the kernel does not read it.
        x_desc=Matrix(own_rows, k, blocks) if own_rows else arena_desc,
        arena=Halves.from_arena(arena, granules, half),
        arena_desc=arena_desc,
        flat_desc=view.descriptor(dtype, rows, cols) if bulk and view else arena_desc,
        ch=ch,
        offsets=offsets,
        **_gemm_arguments(world, call, tile, gated, halves, trans_b),
        how=Gathering(
            constants(
                Pull,
                PULL_PROGRAMS=plan.pull_programs,
                PARTS=parts,
                SPLIT=plan.split,
                BULK=bulk,
                ROWS=rows,
                COLS=cols,
                STAGES=plan.pull_stages,
            ),
            _product(
                world,
                call,
                tile,
                gated,
                trans_b,
                GEMM_PROGRAMS=programs - plan.pull_programs,
                FLATTEN=plan.flatten,
            ),
        ),
    )


def _by_pull_programs(world: World, call: GatherCall, plan: FusedGather, gated: int) -> Run:
    """Prepare one launch, in which some programs pull the peers' shards into the arena while all other programs
    compute."""
    row = call.k * call.operand_dtype.itemsize
    arena = world.arena(_tiled_rows(call, plan) * row + 4 * call.rows * _scales_stride(call), row=row)
    halves = halves_while_gathering(world, call, plan, gated, world.sm_count * plan.per_sm - plan.pull_programs)
    launches = made_once(_pulled_launch, world, call, plan, gated, halves, arena)
    reads_own_rows = call.shards[world.rank] > 0
    copy_of_half = _copy_of_half(world, call, plan, arena) if call.gathered else None

    def run(operands: ScaledFactors, out: torch.Tensor) -> GatheredRows:
        x, weight, bias, *_ = operands
        stream = world.current_stream()
        world.order(arena, stream)
        epoch = None if copy_of_half is None else arena.epoch.clone()
        moving: dict[str, Moved] = dict(x=x, w_desc=weight, bias=bias, out_desc=out)
        moving["scales"] = scales_of(operands) if call.scaling else None
        if reads_own_rows:
            moving["x_desc"] = x
        if halves:
            moving["w_half_desc"] = weight
        launches(not weight.is_contiguous())(stream, **moving)
        return NOT_RETURNED if copy_of_half is None or epoch is None else copy_of_half(epoch)

    return run


def _tiled_rows(call: GatherCall, plan: FusedGather) -> int:
    """Return the number of rows of whole tiles. Tiles load so many rows of an arena's half, which must not reach the
    other half, because a later op's call may already write it. Scales follow these rows (`kernels.gathered_scales`)."""
    return -(-call.rows // plan.tile.block_m) * plan.tile.block_m


def _scales_stride(call: GatherCall) -> int:
    """Return the stride of a row's scales in the arena, in float32: whole 16-byte words."""
    return call.scales_in_row + -call.scales_in_row % 4


def _copy_of_half(
    world: World, call: GatherCall, plan: FusedGather, arena: Arena
) -> Callable[[torch.Tensor], GatheredRows]:
    """Return a function that copies the half of the arena that call number `epoch` filled. The device selects the rows,
    since the host does not know the epoch of a call in a CUDA graph."""
    m, k, dtype, columns = call.rows, call.k, call.operand_dtype, call.scales_in_row
    half_rows, memory, begin = half_elements(arena.half, k, dtype) // k, arena.memory.local, _tiled_rows(call, plan)
    half_words = k * dtype.itemsize // 2  # 16-bit words, a dtype in which torch can select rows
    rows = torch.as_strided(memory.view(torch.int16), (half_rows + m, half_words), (half_words, 1))
    numbers = world.cached(("numbers", m), lambda: world.tensor(list(range(m)), torch.int64))
    stride = _scales_stride(call)
    halves = [
        memory[start : start + 4 * m * stride].view(torch.float32).view(m, stride)[:, :columns]
        for start in (begin * k, (half_rows + begin) * k)
        if columns
    ]

    def copy(epoch: torch.Tensor) -> GatheredRows:
        gathered, stream = world.empty((m, k), dtype), world.current_stream()

        def select() -> object:
            return torch.index_select(rows, 0, numbers + epoch % 2 * half_rows, out=gathered.view(torch.int16))

        # The copy reads this call's half alone: the next op's call may already write the other half.
        read = [lambda: rows[int(epoch) % 2 * half_rows :][:m]]
        world.call(select, read, [gathered], stream)
        if not columns:
            return GatheredRows(gathered)
        scales = world.empty((m, columns), torch.float32)
        read = [lambda: halves[int(epoch) % 2]]
        world.call(lambda: scales.copy_(torch.where(epoch % 2 == 1, halves[1], halves[0])), read, [scales], stream)
        return GatheredRows(gathered, scales)

    return copy


def _workers(world: World, plan: FusedGatherByCopies) -> int:
    """Return the number of GEMM programs: one less than fit on the GPU, so that concurrent barriers find room on an
    SM."""
    return world.sm_count * plan.per_sm - 1


def _copied_launch(
    world: World, call: GatherCall, plan: FusedGatherByCopies, gated: int, halves: bool, trans_b: bool
) -> Launch:
    blocks = block_rows(plan.tile, call.scaling), plan.tile.block_k
    ch, epoch, offsets = _copy_channel(world, call, plan)
    workers = _workers(world, plan)
    return Launch(
        world,
        copied_gemm,
        workers,
        _options(plan),
        x_desc=Matrix(call.shards[0], call.k, blocks),
        gathered_desc=Matrix(call.rows, call.k, blocks),
        ch=ch,
        epoch=epoch,
        offsets=offsets,
        **_gemm_arguments(world, call, plan.tile, gated, halves, trans_b),
        product=_product(world, call, plan.tile, gated, trans_b, GEMM_PROGRAMS=workers, FLATTEN=plan.flatten),
    )


def _copy_channel(
    world: World, call: GatherCall, plan: FusedGatherByCopies
) -> tuple[BlockChannel, torch.Tensor, torch.Tensor]:
    """Return the channel of one shape, which has a counter for each shard, its epoch, and the offsets of the shards.
    The first call is collective."""

    def make() -> tuple[BlockChannel, torch.Tensor, torch.Tensor]:
        bm = plan.tile.block_m
        mapping = _mapping(world, call.rows, bm, _tiles(call.shards, bm), None)
        name = f"{GATHER_GEMM} {list(call.shards)}x{call.n}x{call.k} {plan}"
        ch = world.channel(name, world.size, mapping, [int(r != world.rank) for r in range(world.size)])
        return ch, world.tensor([1], torch.int32), _offsets(world, call.shards)

    return world.cached(("copied", GATHER_GEMM, call.shards, call.n, call.k, plan), make)


def _by_copy_engine(world: World, call: GatherCall, plan: FusedGatherByCopies, gated: int) -> Run:
    """Prepare one GEMM kernel, with tiles that wait for the shards. A copy engine pulls one shard after another, and
    sets the channel of each shard after it."""
    ch, epoch, _ = _copy_channel(world, call, plan)
    flags, keep = ch.counters.split(1), call.gathered or call.shards[0] % plan.tile.block_m != 0
    halves = halves_while_gathering(world, call, plan, gated, _workers(world, plan))
    launches, ahead = made_once(_copied_launch, world, call, plan, gated, halves), Ahead()
    gather = copy_engine.gather_to_flags(world, sent_specs(world, call), keep, call.gathered, flags, epoch)

    def run(operands: ScaledFactors, out: torch.Tensor) -> GatheredRows:
        x, weight, bias, *_ = operands
        with gather(sent_tensors(call, operands)) as gathered:
            launch = launches(not weight.is_contiguous())
            moving: dict[str, Moved] = dict(x_desc=x, gathered_desc=gathered[0], w_desc=weight, bias=bias, out_desc=out)
            if halves:
                moving["w_half_desc"] = weight
            moving |= dict(scales=scales_of(operands), all_scales=gathered_operands(operands, *gathered).x_scale)
            ahead((bias, weight if weight.is_contiguous() else None), lambda: (BoundLaunch(launch, moving),))
            launch(world.current_stream(), **moving)
        return GatheredRows(*gathered) if call.gathered else NOT_RETURNED

    return run


# -- flag-gated --------------------------------------------------------------------------------------------------------


def prepare_flag_gated(world: World, call: GatherCall, plan: FlagGated) -> Run:
    run = functools.partial(_flag_gated, world, call, plan)
    return with_activation(world, call, run) if call.gated else run


def _flag_gated(
    world: World, call: GatherCall, plan: FlagGated, operands: ScaledFactors, out: torch.Tensor
) -> GatheredRows:
    """Run quack's GEMM on shards in symmetric memory. A copy engine pulls one shard after another, and sets a flag
    after each shard. The GEMM waits for the flags without a time limit (`copy_engine.FlaggedShards`). Therefore it is
    loaded, and run once with all flags set, before a call waits in it."""
    (x, weight, bias, *_), rows, form = operands, call.shards[0], gemm_form(plan)
    stream, on_gpu, shards = world.current_stream(), world.backend.name == "cuda", copy_engine.FlaggedShards(world, x)
    gathered, flags, one = shards.gathered, shards.flags, shards.one

    def multiply() -> bool:
        if on_gpu:
            library_gemm.quack().flag_gated(gathered, weight, out, flags, one, world.rank, form)
        return on_gpu

    def load() -> bool:
        # The lock that `shards` holds orders this work after a call on another stream, whose GEMM waits for the same
        # flags.
        world.call(lambda: flags.fill_(1), [], [flags], world.current_stream())
        return multiply()

    world.cached(("flag_gated", GATHER_GEMM, call.rows, call.n, call.k, x.dtype, plan), load)
    with shards.gathering(x):
        if on_gpu:
            world.call(multiply, [gathered, weight, flags, one], [out], stream)
        else:  # on a CPU torch computes the same result shard by shard
            for p in (world.rank, *world.other_ranks):
                world.wait(flags[p : p + 1], one, stream)
                world.backend.linear(gathered.split(rows)[p], weight, None, stream, out.split(rows)[p])
        add_bias(world, out, bias, stream)
    if not call.gathered:
        return NOT_RETURNED
    kept = world.empty((call.rows, call.k), x.dtype)
    world.copy(kept, gathered, stream)
    return GatheredRows(kept)


def usable(world: World, plans: Sequence[FlagGated], dtype: torch.dtype) -> list[FlagGated]:
    """Return the plans that every rank can run. The function is collective for each plan, because a rank may have to
    compile a kernel that another rank has in its cache."""
    quack = library_gemm.quack()
    installed = all(world.exchange(quack.lacks() is None))
    return [p for p in plans if installed and all(world.exchange(quack.waits(gemm_form(p), world.device, dtype)))]


def gemm_form(plan: FlagGated) -> library_gemm.Form:
    return library_gemm.Form(plan.tile_m, plan.tile_n, plan.cluster_m, plan.pingpong)
