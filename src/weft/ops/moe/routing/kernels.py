"""Who goes where: every rank's routes to all ranks, and from them the tables that place the rows of this rank's
experts.

    share           ids and weights of the own tokens -> every rank's ids_all, weights_all [W, C, K] | flag
    count_routes    | flag of source me | flag of source me - 1 | ..    for each block of routes: how many go to each
    own expert
    place_routes    for each block: its routes' rows; for each expert: its tiles, in the order of their last wave

Routes are taken in waves: wave j holds those of source (me - j) mod W, in which order rows arrive. A block of routes
lies in one wave, and the order of blocks is that of the rows of an expert. So a route's row is: first row of its
expert, + counts of all earlier blocks, + earlier routes of its block. Everything is an integer that depends on the ids
alone.

Every program of `place_routes` adds up the counts of all blocks by itself: of 128 experts they are at most 132 KiB, out
of L2, which should cost less than another launch. Inside a block the earlier routes are those of earlier sections and
runs, which are counted, and those of the own run, with which a route is compared: that costs the same for any number of
experts.

Order of accesses. A source's ids are read by `count_routes` behind the wait for its flag, and by `place_routes` because
it comes later on the stream. The flags of a source are counted by its programs alone, each once a call, so one counter
a source is enough. `share` only counts others' counters; the number of the call is read and counted by `count_routes`,
which waits for all W flags in every call. What keeps a source from sharing its next call's routes while this rank reads
these is not here, where HALVES is 1: see `share` in route_tables.py.

Where HALVES is 2, calls take two halves of the shared memory in turn, and `count_routes`, the only reader, copies what
was shared to memory of this rank alone. A rank shares call n + 2 behind its own `count_routes` of call n + 1, which
heard from every rank; and each of them shared call n + 1 behind its reads of call n.

Own experts: EL of them, which SHARING neighbouring ranks have alike, each some of their columns (1: experts of one rank
alone).
"""

from typing import NamedTuple

import triton.language as tl

from ....lang.channel import address_of, calls_of, end_call, rank_of
from ....lang.intrinsics import count_lost, same_call
from ....lang.jit import jit
from ....lang.primitives import channel_broadcast, channel_wait

LEFT_OUT = tl.constexpr(-2)  # the slot of a route to an own expert that found no row


class Placing(NamedTuple):
    """Sizes of `place_routes`. W ranks, K routes a token; WP, ELP: W, EL rounded up to a power of two. BM: rows of a
    tile. A block is BLOCK routes, SECTION of which are placed at a time, in RUNS runs; the counts of CHUNK blocks are
    loaded at a time. TILES tiles are listed at a time; 0: none is. RUNNING: targets are those of all calls together."""

    W: tl.constexpr
    K: tl.constexpr
    EL: tl.constexpr
    SHARING: tl.constexpr
    BM: tl.constexpr
    WP: tl.constexpr
    ELP: tl.constexpr
    BLOCK: tl.constexpr
    SECTION: tl.constexpr
    RUNS: tl.constexpr
    CHUNK: tl.constexpr
    TILES: tl.constexpr
    RUNNING: tl.constexpr


@jit
def own_half(ch, HALVES: tl.constexpr):
    """Return the first source's place in the half of this call."""
    tl.static_assert(HALVES <= 2, "calls take two halves in turn")
    return 0 if HALVES == 1 else (calls_of(ch) & 1) * ch.world


@jit
def push_routes(ids, weights, all_ids, all_weights, ch, half, given, padded, first, PROGRAMS, BLOCK: tl.constexpr):
    """Push a program's part of `share`, before its flag, it being number `first` of PROGRAMS; to places from `half`
    on."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for block in range(first, tl.cdiv(padded, BLOCK), PROGRAMS):
        i = block * BLOCK + tl.arange(0, BLOCK)
        route = tl.load(ids + i, mask=i < given, other=-1)
        weight = tl.load(weights + i, mask=i < given, other=0.0)
        for step in tl.static_range(W):
            rank = (me + 1 + step) % W
            place = (half + me) * padded + i
            tl.store(address_of(all_ids, rank, tl.int32) + place, route, mask=i < padded)
            tl.store(address_of(all_weights, rank, tl.float32) + place, weight, mask=i < padded)


@jit(do_not_specialize=("number", "given"))
def share(
    ids, weights, all_ids, all_weights, ch, calls, number, given, padded,
    HALVES: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The `given` first routes, then -1 of weight 0 up to `padded`, to this rank's place on every rank (by address),
    from the next rank on, this one last. Then one program waits for all ranks to be in this call, as `count_routes`,
    which comes next, does for their routes: counters and memory of a capacity are those of all layers."""
    half = own_half(ch, HALVES)
    push_routes(ids, weights, all_ids, all_weights, ch, half, given, padded, tl.program_id(0), PROGRAMS, BLOCK)
    channel_broadcast(ch, rank_of(ch), False)
    if tl.program_id(0) == PROGRAMS - 1:
        same_call(calls, number)


@jit
def own_experts(ids, source, i, padded, first, EL: tl.constexpr):
    """Return the number, among the EL own experts that begin with `first`, of the expert of routes i of a source; -1:
    another rank's, or none."""
    e = tl.load(ids + source * padded + i, mask=i < padded, other=-1) - first
    return tl.where((e >= 0) & (e < EL), e, -1)


@jit
def copy_routes(to, routes, source, place, i, padded):
    tl.store(to + source * padded + i, tl.load(routes + place * padded + i, mask=i < padded), mask=i < padded)


@jit
def clear_sources(sources, rows, first, PROGRAMS, BLOCK: tl.constexpr):
    """Set a program's share of sources [rows] to -1, which placing leaves in rows without a token."""
    for lo in range(first * BLOCK, rows, PROGRAMS * BLOCK):
        row = lo + tl.arange(0, BLOCK)
        tl.store(sources + row, tl.full((BLOCK,), -1, tl.int32), mask=row < rows)


@jit
def count_block(ids, counts, source, block, i, padded, first, EL: tl.constexpr, ELP: tl.constexpr):
    """counts [.., ELP] of a block: how many of routes i of a source go to each own expert."""
    e = own_experts(ids, source, i, padded, first, EL)
    found = tl.histogram(tl.maximum(e, 0), ELP, mask=e >= 0)
    tl.store(counts + block * ELP + tl.arange(0, ELP), found)


@jit
def count_routes(
    all_ids, all_weights, ids, weights, counts, sources, ch, padded, rows, arrivals,
    EL: tl.constexpr, SHARING: tl.constexpr, ELP: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """counts [W * blocks of a source, ELP]: how many routes of the block go to each of the EL own experts. Waits for
    every source's flag, of so many arrivals. Of two halves copies that of this call to ids and weights [W, padded]. And
    sources [rows] = -1."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    clear_sources(sources, rows, pid, PROGRAMS, BLOCK)
    per_source = tl.cdiv(padded, BLOCK)
    half = own_half(ch, HALVES)
    for block in range(pid, W * per_source, PROGRAMS):
        source = (me - block // per_source + W) % W
        channel_wait(ch, source, arrivals, block, source)
        i = block % per_source * BLOCK + tl.arange(0, BLOCK)
        count_block(all_ids, counts, half + source, block, i, padded, me // SHARING * EL, EL, ELP)
        if HALVES > 1:
            copy_routes(ids, all_ids, source, half + source, i, padded)
            copy_routes(weights, all_weights, source, half + source, i, padded)
    end_call(ch, None, PROGRAMS)


@jit
def add_counts(counts, block, per_source, s):
    """Return int32 [WP, ELP]: rows of every wave and expert; and [ELP]: those of them that come before `block`."""
    waves = tl.zeros((s.WP, s.ELP), tl.int32)
    before = tl.zeros((s.ELP,), tl.int32)
    wave = tl.arange(0, s.WP)[:, None, None]
    e = tl.arange(0, s.ELP)[None, None, :]
    for lo in tl.range(0, per_source, s.CHUNK, num_stages=3):
        i = lo + tl.arange(0, s.CHUNK)[None, :, None]
        at = wave * per_source + i
        ok = (wave < s.W) & (i < per_source)
        part = tl.load(counts + at * s.ELP + e, mask=ok, other=0)
        waves += tl.sum(part, 1)
        before += tl.sum(tl.sum(tl.where(at < block, part, 0), 1), 0)
    return waves, before


@jit
def place_block(ids, made, block, per_source, first_row, me, padded, limit, s):
    """Place a block's routes in rows, section by section; none past `limit`. first_row [ELP]: of every expert, its
    first row that no earlier block has. A section is RUNS runs: counts tell how many routes to an expert the earlier
    runs have, comparison in pairs how many its own has."""
    source = (me - block // per_source + s.W) % s.W
    RUN: tl.constexpr = s.SECTION // s.RUNS
    n = tl.arange(0, s.SECTION)
    of_run = tl.arange(0, RUN)
    begin = block % per_source * s.BLOCK
    for section in range(begin, tl.minimum(begin + s.BLOCK, padded), s.SECTION):
        i = section + n
        e = own_experts(ids, source, i, padded, me // s.SHARING * s.EL, s.EL)
        here = e >= 0
        runs = tl.reshape(e, (s.RUNS, RUN))
        same = (runs[:, :, None] == runs[:, None, :]) & (of_run[None, :, None] < of_run[None, None, :])
        earlier = tl.reshape(tl.sum(same.to(tl.int32), 1), (s.SECTION,))

        key = n // RUN * s.ELP + tl.maximum(e, 0)
        found = tl.reshape(tl.histogram(key, s.RUNS * s.ELP, mask=here), (s.RUNS, s.ELP))
        rows = first_row[None, :] + tl.cumsum(found, 0) - found
        row = tl.gather(tl.reshape(rows, (s.RUNS * s.ELP,)), key, 0) + earlier
        row = tl.where(row < limit, row, LEFT_OUT)
        first_row += tl.sum(found, 0)
        at = source * padded + i
        tl.store(made.slots + at, tl.where(here, row, -1), mask=i < padded)
        tl.store(made.sources + row, at // s.K, mask=here & (row >= 0))


@jit
def tiles_until(rows, total, BM: tl.constexpr):
    """Return how many tiles of an expert of `total` rows hold none but its first `rows`."""
    return tl.where(rows == total, tl.cdiv(total, BM), rows // BM)


@jit
def list_tiles(tiles, waves, x, first_row, s):
    """List the tiles of expert x, which begins at `first_row`, where they stand among those of all experts: by last
    wave, expert, row. TILES are listed at a time. A tile's last wave is the one of its last row: how many waves end
    before that row."""
    wave = tl.arange(0, s.WP)
    e = tl.arange(0, s.ELP)
    ends = tl.cumsum(waves, 0)
    total = tl.sum(waves, 0)[None, :]
    done = tiles_until(ends - waves, total, s.BM)  # by the wave before
    new = tiles_until(ends, total, s.BM) - done
    of_wave = tl.sum(new, 1)
    place = tl.cumsum(of_wave, 0) - of_wave + tl.sum(tl.where(e[None, :] < x, new, 0), 1)
    mine = e[None, :] == x
    shift = place - tl.sum(tl.where(mine, done, 0), 1)
    ends = tl.sum(tl.where(mine, ends, 0), 1)
    rows = tl.max(ends, 0)
    for lo in range(0, tl.cdiv(rows, s.BM), s.TILES):
        tile = lo + tl.arange(0, s.TILES)
        ok = tile * s.BM < rows
        last_row = tl.minimum(rows, (tile + 1) * s.BM) - 1
        first = tl.sum((ends[None, :] <= (tile * s.BM)[:, None]).to(tl.int32), 1)
        last = tl.sum((ends[None, :] <= last_row[:, None]).to(tl.int32), 1)
        at = tile + tl.sum(tl.where(wave[None, :] == last[:, None], shift[None, :], 0), 1)
        tl.store(tiles + 4 * at, first_row + tile * s.BM, mask=ok)
        tl.store(tiles + 4 * at + 1, tl.full((s.TILES,), 0, tl.int32) + x, mask=ok)
        tl.store(tiles + 4 * at + 2, first, mask=ok)
        tl.store(tiles + 4 * at + 3, last, mask=ok)


@jit
def totals(made, waves, starts, s):
    """What there is once: offsets and rows of the experts, the number of tiles, and the targets of every wave: the
    tiles with rows before its end, but for those that end before it begins."""
    e = tl.arange(0, s.ELP)
    wave = tl.arange(0, s.WP)
    rows = tl.sum(waves, 0)
    tiles = tl.cdiv(rows, s.BM)
    tl.store(made.received + e, rows, mask=e < s.EL)
    tl.store(made.offsets + e, starts, mask=e < s.EL)
    tl.store(made.offsets + s.EL, tl.sum(tiles, 0) * s.BM)
    tl.store(made.count, tl.sum(tiles, 0))
    ends = tl.cumsum(waves, 0)
    tl.store(made.listed + wave, tl.sum(tiles_until(ends, rows[None, :], s.BM), 1), mask=wave < s.W)
    touched = tl.sum(tl.cdiv(ends, s.BM) - tiles_until(ends - waves, rows[None, :], s.BM), 1)
    if s.RUNNING:
        touched += tl.load(made.targets + wave, mask=wave < s.W, other=0)
    tl.store(made.targets + wave, touched, mask=wave < s.W)


@jit
def with_room(waves, starts, rows):
    """Return what of `waves` has its rows before `rows`, of experts that begin at `starts`."""
    room = tl.maximum(rows - starts, 0)[None, :]
    ends = tl.cumsum(waves, 0)
    return tl.minimum(ends, room) - tl.minimum(ends - waves, room)


@jit
def place_routes(ids, counts, made, rank, guard, padded, rows, s):
    """made: the tables (route_tables.py, `Tables`), of so many rows, whole tiles. s: `Placing`. A unit of work is a
    block of routes and an expert's tiles (none: TILES 0); the first writes the totals too.

    Where more rows come than there are, the last experts' last ones are left out: their slot is LEFT_OUT, and they have
    no tile."""
    place_units(ids, counts, made, tl.load(rank), guard, padded, rows, s)


@jit
def place_units(ids, counts, made, me, guard, padded, rows, s):
    """Do this program's share of the work of `place_routes`."""
    per_source = tl.cdiv(padded, s.BLOCK)
    blocks = s.W * per_source
    e = tl.arange(0, s.ELP)
    for unit in range(tl.program_id(0), tl.maximum(blocks, s.EL), tl.num_programs(0)):
        waves, before = add_counts(counts, unit, per_source, s)
        padded_rows = tl.cdiv(tl.sum(waves, 0), s.BM) * s.BM
        starts = tl.cumsum(padded_rows, 0) - padded_rows
        if unit < blocks:
            place_block(ids, made, unit, per_source, starts + before, me, padded, rows, s)
        kept = with_room(waves, starts, rows)
        if s.TILES:
            if unit < s.EL:
                first_row = tl.sum(tl.where(e == unit, starts, 0), 0)
                list_tiles(made.tiles, kept, unit, first_row, s)
        if unit == 0:
            totals(made, kept, tl.minimum(starts, rows), s)
            count_lost(guard, tl.sum(tl.sum(waves - kept, 0), 0))
