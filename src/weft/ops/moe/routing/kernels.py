"""Kernels that send the router's choice to all ranks, and build the tables that place the rows of this rank's experts.

    share           this rank's ids and weights -> ids_all, weights_all [W, max_tokens, K] on every rank | flag
    count_routes    | flag of source me | flag of source me - 1 | ..    for each block of routes: routes to each own
                    expert
    place_routes    for each block: the rows of its routes; for each expert: its tiles, ordered by last source step

Routes are processed in source steps: step j processes the routes of source (me - j) mod W, because rows arrive in this
order. A block contains routes of one source step only, and the blocks are in the order of an expert's rows. The row of
a route is therefore the first row of its expert, plus the counts of all earlier blocks, plus the earlier routes of its
own block. All of this is integer arithmetic on the ids.

Every program of `place_routes` sums the counts of all blocks itself. For 128 experts the counts take up at most 132
KiB, and programs read them from L2. Within a block, histograms count the routes of earlier sections and runs. Routes of
the same run are counted by comparing pairs of routes, and the cost of these comparisons does not depend on the number
of experts.

Memory order. `count_routes` reads a source's ids after it has waited for that source's flag, and `place_routes` may
read them because it runs later on the same stream. Only the programs of one source increment that source's flag, once
per program and call, so one counter per source is enough. `share` only increments flags. `count_routes` reads and
advances the epoch, and waits for all W flags in every call. If HALVES is 1, nothing in this file keeps a source from
overwriting routes that this rank still reads: see `share_routes` in route_tables.py.

If HALVES is 2, calls alternate between two halves of the shared memory. `count_routes` is the only kernel that reads
this memory, and copies the routes to local memory. A rank shares call n + 2 after its own `count_routes` of call n + 1,
which waited for every rank's flag of call n + 1; and each rank set that flag after its reads of call n.

A rank that has no room for some rows reports these rows to the ranks of their tokens. Every rank has one word
(`LeftOut`) for the reports of each other rank. A word is zero unless the other rank has left out rows of this rank's
tokens. `place_routes` (or `mask_rows`) adds to the words on other ranks before the rows are sent back, so the release
of the rows also covers the words. A rank reads its words after it has waited for the rows (`take_left_out`), and clears
them before it shares the routes of its next call. In that call every rank waits for these routes before it adds to the
words.

A rank holds columns of EL experts. TP_SIZE neighbouring ranks hold columns of the same experts; if TP_SIZE is 1, an
expert belongs to one rank.

Symbols of shapes:

    K          the number of routes of a token, one for each expert that is chosen for it
    W, WP      ranks, and W rounded up to a power of two
    EL, ELP    experts of a rank, and EL rounded up to a power of two
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ....lang.channel import address_of, calls_of, end_call, rank_of
from ....lang.intrinsics import count_lost, flush_stores, same_call
from ....lang.jit import jit
from ....lang.primitives import channel_broadcast, channel_wait

LEFT_OUT = tl.constexpr(-2)  # marks a route to one of this rank's experts for which there is no room


class LeftOut(NamedTuple):
    """The words in which ranks report rows that they left out. words: int32 [W], for each rank, how many rows of this
    rank's tokens that rank has left out; addresses: int64 [W], the address of every rank's words."""

    words: torch.Tensor
    addresses: torch.Tensor


class TableKernelSizes(NamedTuple):
    """The sizes that `place_routes` needs.

    There are W ranks, K routes per token, and EL experts on this rank; TP_SIZE ranks share the columns of an expert.
    WP, ELP: W and EL rounded up to powers of two. BM: rows of a tile. A block consists of BLOCK routes, which are
    placed in sections of SECTION routes; a section consists of RUNS runs. CHUNK: the number of blocks whose counts are
    loaded at once. TILES: the number of tiles that are listed at once; 0 means that tiles are not listed. CUMULATIVE:
    whether `targets` accumulate over all calls.
    """

    W: tl.constexpr
    K: tl.constexpr
    EL: tl.constexpr
    TP_SIZE: tl.constexpr
    BM: tl.constexpr
    WP: tl.constexpr
    ELP: tl.constexpr
    BLOCK: tl.constexpr
    SECTION: tl.constexpr
    RUNS: tl.constexpr
    CHUNK: tl.constexpr
    TILES: tl.constexpr
    CUMULATIVE: tl.constexpr


@jit
def half_start_of(ch, HALVES: tl.constexpr):
    """Return the index of the first source in the half that this call uses: 0 or W."""
    tl.static_assert(HALVES <= 2, "calls alternate between at most two halves")
    return 0 if HALVES == 1 else (calls_of(ch) & 1) * ch.world


@jit
def push_routes(
    ids,
    weights,
    all_ids,
    all_weights,
    ch,
    half_start,
    num_routes,
    routes_per_source,
    program,
    PROGRAMS,
    BLOCK: tl.constexpr,
):
    """Store a program's part of this rank's routes on every rank. `half_start` is the index of the first source in the
    half that this call uses. The caller sets the flag afterwards. program: the index of this program among the PROGRAMS
    programs."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for block in range(program, tl.cdiv(routes_per_source, BLOCK), PROGRAMS):
        i = block * BLOCK + tl.arange(0, BLOCK)
        route = tl.load(ids + i, mask=i < num_routes, other=-1)
        weight = tl.load(weights + i, mask=i < num_routes, other=0.0)
        for step in tl.static_range(W):
            rank = (me + 1 + step) % W
            offset = (half_start + me) * routes_per_source + i
            tl.store(address_of(all_ids, rank, tl.int32) + offset, route, mask=i < routes_per_source)
            tl.store(address_of(all_weights, rank, tl.float32) + offset, weight, mask=i < routes_per_source)


@jit(do_not_specialize=("number", "num_routes"))
def share(
    ids, weights, all_ids, all_weights, ch, calls, number, num_routes, routes_per_source,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Store this rank's first `num_routes` routes on every rank, followed by ids of -1 and weights of 0 up to
    `routes_per_source`. all_ids and all_weights contain one address for each rank. The kernel writes to the next rank
    first and to this rank last.

    Then one program waits until all ranks are in this call, because all layers with the same max_tokens share counters
    and memory. The next kernel on the stream, `count_routes`, waits for the routes.
    """
    half_start = half_start_of(ch, HALVES)
    push_routes(
        ids,
        weights,
        all_ids,
        all_weights,
        ch,
        half_start,
        num_routes,
        routes_per_source,
        tl.program_id(0),
        PROGRAMS,
        BLOCK,
    )
    channel_broadcast(ch, rank_of(ch), False)
    if tl.program_id(0) == PROGRAMS - 1:
        same_call(calls, number)


@jit
def own_experts(ids, source, i, routes_per_source, first_expert, EL: tl.constexpr):
    """Return which of this rank's EL experts the routes i of a source select, counted from `first_expert`. The result
    is -1 for an expert of another rank and for no expert."""
    e = tl.load(ids + source * routes_per_source + i, mask=i < routes_per_source, other=-1) - first_expert
    return tl.where((e >= 0) & (e < EL), e, -1)


@jit
def copy_routes(dst, routes, source, source_in_half, i, routes_per_source):
    """Copy the routes i of a source from the shared memory to dst."""
    tl.store(
        dst + source * routes_per_source + i,
        tl.load(routes + source_in_half * routes_per_source + i, mask=i < routes_per_source),
        mask=i < routes_per_source,
    )


@jit
def clear_sources(sources, rows, program, PROGRAMS, BLOCK: tl.constexpr):
    """Set this program's part of sources [rows] to -1. A row without a token keeps the value -1."""
    for lo in range(program * BLOCK, rows, PROGRAMS * BLOCK):
        row = lo + tl.arange(0, BLOCK)
        tl.store(sources + row, tl.full((BLOCK,), -1, tl.int32), mask=row < rows)


@jit
def count_block(ids, counts, source, block, i, routes_per_source, first_expert, EL: tl.constexpr, ELP: tl.constexpr):
    """Store counts [.., ELP] of a block: how many of the routes i of a source select each own expert."""
    e = own_experts(ids, source, i, routes_per_source, first_expert, EL)
    counts_per_expert = tl.histogram(tl.maximum(e, 0), ELP, mask=e >= 0)
    tl.store(counts + block * ELP + tl.arange(0, ELP), counts_per_expert)


@jit
def count_routes(
    all_ids, all_weights, ids, weights, counts, sources, ch, routes_per_source, rows, arrivals,
    EL: tl.constexpr, TP_SIZE: tl.constexpr, ELP: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Wait for every source's flag (`arrivals` arrivals). Then compute counts [W * blocks of a source, ELP]: for each
    block, the number of routes to each of the EL own experts.

    With two halves it also copies the routes of this call's half to ids and weights [W, routes_per_source]. In any case
    the kernel sets sources [rows] to -1.
    """
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    clear_sources(sources, rows, pid, PROGRAMS, BLOCK)
    blocks_per_source = tl.cdiv(routes_per_source, BLOCK)
    half_start = half_start_of(ch, HALVES)
    for block in range(pid, W * blocks_per_source, PROGRAMS):
        source = (me - block // blocks_per_source + W) % W
        channel_wait(ch, source, arrivals, block, source)
        i = block % blocks_per_source * BLOCK + tl.arange(0, BLOCK)
        count_block(all_ids, counts, half_start + source, block, i, routes_per_source, me // TP_SIZE * EL, EL, ELP)
        if HALVES > 1:
            copy_routes(ids, all_ids, source, half_start + source, i, routes_per_source)
            copy_routes(weights, all_weights, source, half_start + source, i, routes_per_source)
    end_call(ch, None, PROGRAMS)


@jit
def add_counts(counts, block, blocks_per_source, s):
    """Return two tensors: int32 [WP, ELP], the number of rows for every source step and expert, and int32 [ELP], for
    each expert the number of rows in all blocks before `block`."""
    rows_per_step = tl.zeros((s.WP, s.ELP), tl.int32)
    before = tl.zeros((s.ELP,), tl.int32)
    source_step = tl.arange(0, s.WP)[:, None, None]
    e = tl.arange(0, s.ELP)[None, None, :]
    for lo in tl.range(0, blocks_per_source, s.CHUNK, num_stages=3):
        i = lo + tl.arange(0, s.CHUNK)[None, :, None]
        block_index = source_step * blocks_per_source + i
        mask = (source_step < s.W) & (i < blocks_per_source)
        block_counts = tl.load(counts + block_index * s.ELP + e, mask=mask, other=0)
        rows_per_step += tl.sum(block_counts, 1)
        before += tl.sum(tl.sum(tl.where(block_index < block, block_counts, 0), 1), 0)
    return rows_per_step, before


@jit
def place_block(ids, tables, block, blocks_per_source, first_row, me, routes_per_source, row_limit, s):
    """Store the rows of a block's routes, section by section. A row from `row_limit` on is replaced by LEFT_OUT.

    first_row [ELP]: for every expert, the first row that no earlier block fills. A section consists of RUNS runs.
    Histograms count an expert's routes in earlier runs, and comparing pairs of routes counts the earlier routes in the
    same run.
    """
    source = (me - block // blocks_per_source + s.W) % s.W
    RUN: tl.constexpr = s.SECTION // s.RUNS
    n = tl.arange(0, s.SECTION)
    index_in_run = tl.arange(0, RUN)
    begin = block % blocks_per_source * s.BLOCK
    for section in range(begin, tl.minimum(begin + s.BLOCK, routes_per_source), s.SECTION):
        i = section + n
        expert = own_experts(ids, source, i, routes_per_source, me // s.TP_SIZE * s.EL, s.EL)
        is_own = expert >= 0
        runs = tl.reshape(expert, (s.RUNS, RUN))
        is_earlier = (runs[:, :, None] == runs[:, None, :]) & (
            index_in_run[None, :, None] < index_in_run[None, None, :]
        )
        earlier = tl.reshape(tl.sum(is_earlier.to(tl.int32), 1), (s.SECTION,))

        key = n // RUN * s.ELP + tl.maximum(expert, 0)
        counts_per_run = tl.reshape(tl.histogram(key, s.RUNS * s.ELP, mask=is_own), (s.RUNS, s.ELP))
        rows = first_row[None, :] + tl.cumsum(counts_per_run, 0) - counts_per_run
        row = tl.gather(tl.reshape(rows, (s.RUNS * s.ELP,)), key, 0) + earlier
        row = tl.where(row < row_limit, row, LEFT_OUT)
        first_row += tl.sum(counts_per_run, 0)
        route = source * routes_per_source + i
        tl.store(tables.route_rows + route, tl.where(is_own, row, -1), mask=i < routes_per_source)
        tl.store(tables.sources + row, route // s.K, mask=is_own & (row >= 0))


@jit
def tiles_until(rows, total, BM: tl.constexpr):
    """Return how many tiles of an expert with `total` rows are complete once its first `rows` rows have arrived."""
    return tl.where(rows == total, tl.cdiv(total, BM), rows // BM)


@jit
def list_tiles(tiles, rows_per_step, expert, first_row, s):
    """Store the tiles of an expert whose first row is `first_row`, at their positions in the list of all tiles, which
    is ordered by last source step, expert and row. TILES entries are stored at once. The source step of a row is the
    number of source steps whose rows end before this row."""
    source_step = tl.arange(0, s.WP)
    e = tl.arange(0, s.ELP)
    ends = tl.cumsum(rows_per_step, 0)
    total = tl.sum(rows_per_step, 0)[None, :]
    tiles_before = tiles_until(ends - rows_per_step, total, s.BM)  # the tiles that are complete before this source step
    new_tiles = tiles_until(ends, total, s.BM) - tiles_before
    tiles_per_step = tl.sum(new_tiles, 1)
    list_start = tl.cumsum(tiles_per_step, 0) - tiles_per_step + tl.sum(tl.where(e[None, :] < expert, new_tiles, 0), 1)
    is_expert = e[None, :] == expert
    shift = list_start - tl.sum(tl.where(is_expert, tiles_before, 0), 1)
    ends = tl.sum(tl.where(is_expert, ends, 0), 1)
    rows = tl.max(ends, 0)
    for lo in range(0, tl.cdiv(rows, s.BM), s.TILES):
        tile = lo + tl.arange(0, s.TILES)
        mask = tile * s.BM < rows
        last_row = tl.minimum(rows, (tile + 1) * s.BM) - 1
        first_step = tl.sum((ends[None, :] <= (tile * s.BM)[:, None]).to(tl.int32), 1)
        last_step = tl.sum((ends[None, :] <= last_row[:, None]).to(tl.int32), 1)
        list_index = tile + tl.sum(tl.where(source_step[None, :] == last_step[:, None], shift[None, :], 0), 1)
        tl.store(tiles + 4 * list_index, first_row + tile * s.BM, mask=mask)
        tl.store(tiles + 4 * list_index + 1, tl.full((s.TILES,), 0, tl.int32) + expert, mask=mask)
        tl.store(tiles + 4 * list_index + 2, first_step, mask=mask)
        tl.store(tiles + 4 * list_index + 3, last_step, mask=mask)


@jit
def store_totals(tables, rows_per_step, starts, s):
    """Store the totals: the experts' numbers of rows and offsets, the number of tiles, and the target of every source
    step. The target of a step is the number of tiles that contain rows of the step: the tiles that begin before the
    step's rows end, without the tiles that end before these rows begin."""
    e = tl.arange(0, s.ELP)
    source_step = tl.arange(0, s.WP)
    rows = tl.sum(rows_per_step, 0)
    tiles = tl.cdiv(rows, s.BM)
    tl.store(tables.received + e, rows, mask=e < s.EL)
    tl.store(tables.offsets + e, starts, mask=e < s.EL)
    tl.store(tables.offsets + s.EL, tl.sum(tiles, 0) * s.BM)
    tl.store(tables.tile_count, tl.sum(tiles, 0))
    ends = tl.cumsum(rows_per_step, 0)
    tl.store(
        tables.cumulative_tiles + source_step, tl.sum(tiles_until(ends, rows[None, :], s.BM), 1), mask=source_step < s.W
    )
    touched = tl.sum(tl.cdiv(ends, s.BM) - tiles_until(ends - rows_per_step, rows[None, :], s.BM), 1)
    if s.CUMULATIVE:
        touched += tl.load(tables.targets + source_step, mask=source_step < s.W, other=0)
    tl.store(tables.targets + source_step, touched, mask=source_step < s.W)


@jit
def rows_with_room(rows_per_step, starts, rows):
    """Return how many rows of `rows_per_step` are below row `rows`, for experts that begin at `starts`."""
    room = tl.maximum(rows - starts, 0)[None, :]
    ends = tl.cumsum(rows_per_step, 0)
    return tl.minimum(ends, room) - tl.minimum(ends - rows_per_step, room)


@jit
def tell_sources(left_out, me, ranks, rows):
    """Report the numbers of rows that this rank left out: add each number to this rank's word on the rank of the rows'
    tokens. `ranks` are distinct. Exactly one program of a launch must call this function. left_out: `LeftOut`."""
    mask = (rows > 0) & (ranks != me)
    words = tl.load(left_out.addresses + ranks, mask=mask, other=0).to(tl.pointer_type(tl.int32)) + me
    tl.store(words, tl.load(words, mask=mask, other=0) + rows, mask=mask)


@jit
def count_told(words, guard, W: tl.constexpr):
    """Count the rows of this rank's tokens that other ranks left out (`count_lost`). Return whether there are any."""
    ranks = tl.arange(0, triton.next_power_of_2(W))
    rows = tl.load(words + ranks, mask=ranks < W, other=0)
    any_lost = tl.max(rows, 0) > 0
    if any_lost:
        for rank in range(W):
            count_lost(guard, rank, tl.sum(tl.where(ranks == rank, rows, 0), 0))
    return any_lost


@jit
def take_left_out(left_out, guard, W: tl.constexpr):
    """Count the rows of this rank's tokens that other ranks have left out, and clear the words (`tell_sources`).
    Exactly one program of a launch must call this function, after the program has waited for all ranks' rows."""
    any_lost = count_told(left_out.words, guard, W)
    flush_stores(False)  # all threads have loaded the words before one thread clears them
    if any_lost:
        ranks = tl.arange(0, triton.next_power_of_2(W))
        tl.store(left_out.words + ranks, tl.zeros_like(ranks), mask=ranks < W)


@jit
def place_routes(ids, counts, tables, rank, guard, left_out, routes_per_source, rows, s):
    """Fill the tables (`Tables` in route_tables.py) of `rows` rows, which are whole tiles. s: `TableKernelSizes`.

    A unit of work is one block of routes and one expert's tiles (none if TILES is 0); unit 0 also stores the totals. If
    more rows arrive than there is room for, the last rows of the last experts are left out: their route row is LEFT_OUT
    and they are in no tile. Rows that are left out are counted unless guard is None, and are reported to the ranks of
    their tokens unless left_out is None.
    """
    place_units(ids, counts, tables, tl.load(rank), guard, left_out, routes_per_source, rows, s)


@jit
def place_units(ids, counts, tables, me, guard, left_out, routes_per_source, rows, s):
    """Do this program's part of `place_routes`."""
    blocks_per_source = tl.cdiv(routes_per_source, s.BLOCK)
    blocks = s.W * blocks_per_source
    e = tl.arange(0, s.ELP)
    for unit in range(tl.program_id(0), tl.maximum(blocks, s.EL), tl.num_programs(0)):
        rows_per_step, before = add_counts(counts, unit, blocks_per_source, s)
        padded_rows = tl.cdiv(tl.sum(rows_per_step, 0), s.BM) * s.BM
        starts = tl.cumsum(padded_rows, 0) - padded_rows
        if unit < blocks:
            place_block(ids, tables, unit, blocks_per_source, starts + before, me, routes_per_source, rows, s)
        rows_placed = rows_with_room(rows_per_step, starts, rows)
        if s.TILES:
            if unit < s.EL:
                first_row = tl.sum(tl.where(e == unit, starts, 0), 0)
                list_tiles(tables.tiles, rows_placed, unit, first_row, s)
        if unit == 0:
            store_totals(tables, rows_placed, tl.minimum(starts, rows), s)
            if guard is not None:
                rows_lost = tl.sum(rows_per_step - rows_placed, 1)
                total_lost = tl.sum(rows_lost, 0)
                if total_lost > 0:
                    count_lost(guard, me, total_lost)
                    if left_out is not None:
                        tell_sources(left_out, me, (me - tl.arange(0, s.WP) + s.W) % s.W, rows_lost)
