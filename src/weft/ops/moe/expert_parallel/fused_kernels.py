"""An MoE layer's experts in one persistent launch (FlashMoE, sections 3 and 4): programs draw tickets from one queue.

    copy programs  routes | tables | tokens to others | tickets | sums of step 1 | tickets | sums of 2 | .. | own tokens
    the others            | tables | tickets ...                                                         | own tokens

    queue          GEMM 1 of step 0 | GEMM 1 of 1 | GEMM 2 of 1 | GEMM 1 of 2 | GEMM 2 of 2 | .. | GEMM 2 of step 0

"Step" means a source step. kernels.py explains source steps, the table of tiles, and the functions that this file
combines. Tiles are in the order of the table, by the last source step of their rows. GEMM 2 of a source step
immediately follows GEMM 1 of the step, so that the sums of the step are sent during the GEMMs of the next step. GEMM 2
of step 0 computes this rank's own tokens and sends nothing, so it comes last, where it overlaps the sums of the last
step. Own tokens are read from x and not from the inbox. At its end, each program sums own tokens over all ranks.

Before all tickets, every rank sends its routes to every rank, and all programs of a rank together build its tables
(routing/kernels.py). Each program counts some blocks of routes, a grid barrier follows, each program places some
blocks, and another grid barrier follows.

The router is a separate launch before this one, or, with `memory.logits`, the first work of this launch
(route_kernels.py). In the latter case all programs compute tiles of logits, a grid barrier follows, each program
chooses the experts of some rows, and another grid barrier follows.

Who waits for whom. Before a program chooses experts, it waits until all programs have computed their tiles of logits.
Before a copy program shares routes, it waits for the choices of all programs. Both waits are for programs of the same
launch. All programs are resident, and until then they wait for nothing else, with one exception: after its choices, one
program waits until every other rank's launch has reached the same point. So all experts of a rank's tokens are chosen
before any rank counts them. A tile of GEMM 1 waits for the rows of its source steps, which copy programs of other ranks
send before they draw a ticket. A tile of GEMM 2 waits for its row of tiles of GEMM 1, whose tickets are earlier. A copy
program sends the sums of a source step once it has drawn a ticket that follows all tiles with rows of the step. So a
ticket waits only for earlier tickets of this rank, or for work that other ranks' copy programs do before all tickets.
The sums that a copy program sends wait only for tickets before its current ticket. The end of a program waits only for
tickets and for other ranks' copy programs. Programs draw tickets in rising order and are all resident, so some program
can always proceed. There is no barrier between the phases.

Memory order. The order from call to call is the order in kernels.py, except for the inbox, which is separate. A rank
that has sent the sums of a source step may still read rows of other steps. If the next call has a different size, one
rank's section of the inbox may overlap another rank's previous section. So rows are written to this inbox only after
the tables are built. For the tables a rank waits for the ids of all other ranks, which send their ids after the end of
their previous call. `done`, which counts finished tiles of GEMM 1 for each row of tiles, has two halves: a call
increments one half and clears the other.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ....compute.gemm import column_halves, gemm_tile, grouped_tile
from ....lang.channel import BlockChannel, address_of, calls_of, end_call, rank_of, take_ticket
from ....lang.intrinsics import flush_stores, globaltimer, wait_until
from ....lang.jit import jit
from ....lang.primitives import channel_broadcast, channel_notify
from ..routing.kernels import LeftOut, clear_sources, count_block, place_units, push_routes, take_left_out
from ..routing.route_tables import Tables
from .kernels import (
    ROW_OF_TILES,
    RoutedRows,
    add_bias,
    count_tiles,
    gathered_tile,
    send_rows,
    send_sums,
    step_increments,
    store_activated,
    store_sums,
    sum_of_ranks,
    weighted_sum,
)
from .route_kernels import RouterSizes, RouterTensors, choose_experts, compare_calls_once, compute_logits

# The phases whose time (without waits) a program measures, and the whole run time of the program. The values are
# indices into the program's row of stamps.
DISPATCH_TIME, FIRST_GEMM_TIME, SECOND_GEMM_TIME, COMBINE_TIME, FINAL_SUM_TIME, TOTAL_TIME = (
    tl.constexpr(i) for i in range(6)
)
STAMPS = tl.constexpr(6)


class LayerMemory(NamedTuple):
    """The memory that all calls of one layer and plan use. The tensors correspond to the ones in kernels.py.

    ids, weights: the routes of all ranks [W, max_tokens, K]; each rank also has the address of every rank's tensors.
    tables: the tables, which have `rows` rows and contain route_rows. counts: as in `count_routes`. barrier_arrivals:
    int32 [2], the number of arrivals at each grid barrier in all calls. done: int32 [2, rows_of_tiles], and counters:
    int32 [W], are local to this GPU. stamps: int64 [programs, STAMPS], or None: the ns that each program has spent in
    each phase in all calls. logits [max_tokens, E], calls, and number int32 [1] are for a launch that includes the
    router: it stores its logits there and calls `compare_calls_once`, and `barrier_arrivals` has four words. If a
    separate launch chose ids and weights, these three fields are None.
    """

    inbox: torch.Tensor
    inboxes: torch.Tensor
    outbox: torch.Tensor
    outboxes: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor
    all_ids: torch.Tensor
    weights: torch.Tensor
    all_weights: torch.Tensor
    route_rows: torch.Tensor
    counts: torch.Tensor
    tables: Tables
    rows: int
    barrier_arrivals: torch.Tensor
    counters: torch.Tensor
    done: torch.Tensor
    rows_of_tiles: int
    copy_programs: int
    epoch: torch.Tensor
    left_out: LeftOut | None
    stamps: torch.Tensor | None
    logits: torch.Tensor | None = None
    calls: BlockChannel | None = None
    number: torch.Tensor | None = None


class LayerOperands(NamedTuple):
    """The caller's tensors. x, out [T, H]; shared [T, H] or None; ids int32, weights float32 [T, K], which the launch
    writes if there is a router; b13 [experts, N] and b2 [experts, H], or None."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None
    out: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    router: RouterTensors | None = None


class LayerSizes(NamedTuple):
    """The sizes that depend on the layer and the plan. P, KP: H and K rounded up to powers of two. INNER: the inner
    size. EVEN_K: as in `gathered_tile`; BLOCK, ACT: as in `store_activated`. A block that is sent consists of
    SEND_ROWS rows of P elements, and STAGES blocks are in flight. A block that is summed consists of SUM_ROWS rows of
    COLS elements. router: the sizes of the router if the launch includes one."""

    H: tl.constexpr
    INNER: tl.constexpr
    P: tl.constexpr
    K: tl.constexpr
    KP: tl.constexpr
    EL: tl.constexpr
    BM: tl.constexpr
    BN: tl.constexpr
    BK: tl.constexpr
    GROUP_M: tl.constexpr
    EVEN_K: tl.constexpr
    ACT: tl.constexpr
    BLOCK: tl.constexpr
    SEND_ROWS: tl.constexpr
    STAGES: tl.constexpr
    SUM_ROWS: tl.constexpr
    COLS: tl.constexpr
    router: RouterSizes | None = None


@jit
def add_time(memory, phase, start):
    """Add the ns since `start` to the time that this program has spent in a phase."""
    if memory.stamps is not None:
        word = memory.stamps + tl.program_id(0) * STAMPS + phase
        tl.store(word, tl.load(word) + globaltimer() - start)


@jit
def clock(memory):
    """Return the time in ns if times are measured, otherwise 0."""
    return 0 if memory.stamps is None else globaltimer()


@jit
def send_tokens(x, ids, memory, ch, T, max_tokens, s):
    """Send a copy program's part of the tokens, beginning with the tokens for rank me + 1. Counter j - 1 of rank me + j
    belongs to source step j of that rank and receives `copy_programs` arrivals."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    for j in range(1, W):
        rank = (me + j) % W
        dst = address_of(memory.inboxes, rank, x.dtype.element_ty) + (me * max_tokens).to(tl.int64) * s.H
        send_rows(
            x,
            ids,
            dst,
            rank,
            T,
            tl.program_id(0),
            s.H,
            s.P,
            s.K,
            s.KP,
            s.EL,
            s.SEND_ROWS,
            s.STAGES,
            memory.copy_programs,
        )
        channel_notify(ch, j - 1, rank, False)  # this happens even without rows, because waits count calls


@jit
def share_routes(ids, weights, memory, ch, T, max_tokens, s):
    """Send a copy program's part of this rank's routes to all ranks. When rank r has shared its routes, counter 2 W - 2
    + r of every rank has received `copy_programs` arrivals."""
    W: tl.constexpr = ch.world
    push_routes(
        ids,
        weights,
        memory.all_ids,
        memory.all_weights,
        ch,
        0,
        T * s.K,
        max_tokens * s.K,
        tl.program_id(0),
        memory.copy_programs,
        256,
    )
    channel_broadcast(ch, 2 * W - 2 + rank_of(ch), False)


@jit
def grid_barrier(memory, ch, barrier: tl.constexpr):
    """Wait until all programs of this launch have arrived here. Afterwards each program sees all earlier stores of all
    programs."""
    flush_stores(False)
    tl.atomic_add(memory.barrier_arrivals + barrier, 1, sem="release", scope="gpu")
    wait_until(
        memory.barrier_arrivals + barrier,
        (tl.load(memory.epoch) + 1) * tl.num_programs(0),
        ch.guard,
        -1,
        rank_of(ch),
        "gpu",
    )


@jit
def make_tables(memory, ch, max_tokens, s, table_sizes):
    """Build the tables as `count_routes` and `place_routes` do. All programs share the work. table_sizes:
    `TableKernelSizes`."""
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    P = tl.num_programs(0)
    me = rank_of(ch)
    routes_per_source = max_tokens * s.K
    blocks_per_source = tl.cdiv(routes_per_source, table_sizes.BLOCK)
    clear_sources(memory.tables.sources, memory.rows, pid, P, table_sizes.BLOCK)
    for block in range(pid, W * blocks_per_source, P):
        source = (me - block // blocks_per_source + W) % W
        wait_until(
            ch.counters + 2 * W - 2 + source, calls_of(ch) * memory.copy_programs, ch.guard, block, source, "sys"
        )
        i = block % blocks_per_source * table_sizes.BLOCK + tl.arange(0, table_sizes.BLOCK)
        count_block(
            memory.ids,
            memory.counts,
            source,
            block,
            i,
            routes_per_source,
            me * table_sizes.EL,
            table_sizes.EL,
            table_sizes.ELP,
        )
    grid_barrier(memory, ch, 0)
    place_units(
        memory.ids,
        memory.counts,
        memory.tables,
        me,
        ch.guard,
        memory.left_out,
        routes_per_source,
        memory.rows,
        table_sizes,
    )
    grid_barrier(memory, ch, 1)


@jit
def tiles_done(memory, i):
    """Return the address of the counter that counts this call's finished tiles of GEMM 1 in row of tiles i."""
    return memory.done + (tl.load(memory.epoch) & 1) * memory.rows_of_tiles + i


@jit
def clear_tiles(memory):
    """Clear a program's part of the next call's counters of tiles."""
    next_call_tiles = memory.done + (1 - (tl.load(memory.epoch) & 1)) * memory.rows_of_tiles
    for lo in range(tl.program_id(0) * 128, memory.rows_of_tiles, tl.num_programs(0) * 128):
        i = lo + tl.arange(0, 128)
        tl.store(next_call_tiles + i, tl.zeros((128,), tl.int32), mask=i < memory.rows_of_tiles)


@jit
def token_rows(x, inbox, source, me, max_tokens, K):
    """Return pointers to the rows of tokens s * max_tokens + t. This rank's tokens are in x, and the other ranks'
    tokens are in the inbox."""
    is_own = source // max_tokens == me
    return tl.where(is_own, x + (source - me * max_tokens).to(tl.int64) * K, inbox + source.to(tl.int64) * K)


@jit
def first_gemm_tile(operands, memory, w_desc, hidden_desc, ch, i, tn, N, K, max_tokens, s):
    """Compute one tile of GEMM 1 and the activation. The tile's rows have arrived."""
    K = K // 8 * 8  # the length of a row is a multiple of 16 bytes
    me = rank_of(ch)
    row = tl.load(memory.tables.tiles + 4 * i)
    expert = tl.load(memory.tables.tiles + 4 * i + 1)
    source = tl.load(memory.tables.sources + row + tl.arange(0, s.BM))[:, None]
    rows = token_rows(operands.x, memory.inbox, source, me, max_tokens, K)
    acc = gathered_tile(rows, source >= 0, w_desc, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK, s.EVEN_K)
    store_activated(hidden_desc, None, acc, operands.b13, expert, row, tn * s.BN, N, s)
    flush_stores(True)
    tl.atomic_add(tiles_done(memory, i), 1, sem="release", scope="gpu")


@jit
def second_gemm_tile(operands, memory, hidden_desc, w_desc, y_desc, ch, i, tn, tiles_n, N, K, s):
    """Compute one tile of GEMM 2. Its rows of hidden are complete."""
    tile = memory.tables.tiles + 4 * i
    row = tl.load(tile)
    expert = tl.load(tile + 1)
    acc = gemm_tile(hidden_desc, w_desc, row, expert * N + tn * s.BN, K, s.BM, s.BN, s.BK)
    acc = add_bias(acc, operands.b2, expert, tn * s.BN, N, s.BN)
    left, right = column_halves(acc, s.BM, s.BN)
    y_desc.store([row, tn * s.BN], left.to(y_desc.dtype))
    y_desc.store([row, tn * s.BN + s.BN // 2], right.to(y_desc.dtype))
    increments = step_increments(tl.load(tile + 2), tl.load(tile + 3), tn, tiles_n, -1, ch.world)
    count_tiles(memory.counters, increments, ch.world)


@jit
def last_step_with(tiles, first_tile, end_tile, source_step, BLOCK: tl.constexpr):
    """Return the last source step of the tiles from `first_tile` to `end_tile` that have rows of `source_step`; without
    such a tile, `source_step`."""
    last_step = source_step
    for lo in range(first_tile, end_tile, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        first_steps = tl.load(tiles + 4 * i + 2, mask=i < end_tile, other=0x7FFF)
        last_steps = tl.load(tiles + 4 * i + 3, mask=i < end_tile, other=0)
        last_step = tl.maximum(last_step, tl.max(tl.where(first_steps <= source_step, last_steps, 0)))
    return last_step


@jit
def wait_for_step(memory, ch, source_step):
    """Wait until all tiles with rows of a source step are done."""
    wait_until(
        memory.counters + source_step,
        tl.load(memory.tables.targets + source_step) * ROW_OF_TILES,
        ch.guard,
        source_step,
        rank_of(ch),
        "gpu",
    )


@jit
def send_step_sums(memory, ch, source_step, max_tokens, s):
    """Send a copy program's part of one source step's sums to the source rank. When rank me + j has summed this rank's
    tokens, counter W - 1 + j - 1 of this rank has received `copy_programs` arrivals."""
    W: tl.constexpr = ch.world
    me = rank_of(ch)
    rank = (me - source_step + W) % W
    dst = address_of(memory.outboxes, rank, memory.y.dtype.element_ty) + (me * max_tokens).to(tl.int64) * s.H
    send_sums(
        RoutedRows(memory.y, memory.route_rows, memory.weights, None),
        dst,
        rank,
        max_tokens,
        tl.program_id(0),
        memory.y.dtype.element_ty,
        s.H,
        s.COLS,
        s.K,
        s.SUM_ROWS,
        memory.copy_programs,
    )
    # Also without rows, this rank notifies the other, to announce that it has read its inbox.
    channel_notify(ch, W + source_step - 2, rank, False)


@jit
def wait_for_sums(ch, memory):
    """Wait until the copy programs of all other ranks have sent their sums of this rank's tokens."""
    W: tl.constexpr = ch.world
    for j in range(1, W):
        source = (rank_of(ch) + j) % W
        wait_until(ch.counters + W + j - 2, calls_of(ch) * memory.copy_programs, ch.guard, -1, source, "sys")


@jit
def sum_own_tokens(ids, shared, out, memory, ch, T, max_tokens, s):
    """Sum a program's part of this rank's tokens over all ranks. This rank's sums over its own experts are rounded like
    sums that are sent; then the other ranks' sums are added."""
    W: tl.constexpr = ch.world
    PARTS: tl.constexpr = (s.H + s.COLS - 1) // s.COLS
    me = rank_of(ch)
    for block in range(tl.program_id(0), tl.cdiv(T, s.SUM_ROWS) * PARTS, tl.num_programs(0)):
        first_token = block // PARTS * s.SUM_ROWS
        t = first_token + tl.arange(0, s.SUM_ROWS)
        cols = block % PARTS * s.COLS + tl.arange(0, s.COLS)[None, :]
        routed = RoutedRows(memory.y, memory.route_rows, memory.weights, None)
        own_sum, _ = weighted_sum(
            routed, me * max_tokens + first_token, T - first_token, cols, s.H, s.K, s.SUM_ROWS, s.COLS
        )
        acc = sum_of_ranks(
            memory.outbox,
            ids,
            t,
            T,
            max_tokens,
            cols,
            own_sum,
            me,
            W,
            s.H,
            s.K,
            s.KP,
            s.EL,
            1,
            s.SUM_ROWS,
            s.COLS,
        )
        store_sums(acc, shared, out, t, T, cols, s.H)


@jit
def route(operands, memory, ch, T, s):
    """Choose the experts for all tokens of this rank. All programs share the work."""
    compute_logits(operands.x, operands.router, memory.logits, T, s.H, s.router)
    grid_barrier(memory, ch, 2)
    choose_experts(operands.router, memory.logits, operands.ids, operands.weights, T, s.router)
    compare_calls_once(memory.calls, memory.number)
    grid_barrier(memory, ch, 3)


@jit(do_not_specialize=("T", "max_tokens"))
def moe_layer(
    operands, memory, w13_desc, w2_desc, hidden_in, hidden_out, y_desc, ch, T, max_tokens, N, H, K, s, table_sizes
):
    """The kernel of a whole layer. operands: `LayerOperands`, memory: `LayerMemory`, s: `LayerSizes`, table_sizes:
    `TableKernelSizes`.

    w13_desc [experts N, H], w2_desc [experts H, K] with K the inner size. hidden [rows, K] has one descriptor for
    stores (`store_activated`) and one for loads, [BM, BK]; y_desc [rows, H] has blocks [BM, BN / 2]. The loops need N,
    H and K as integers too. `ch` has three groups of counters: W - 1 for arrived rows, by source step from 1 on; W - 1
    for arrived sums, from rank me + 1 on; and W for arrived routes, by rank.
    """
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    launch_start = clock(memory)
    clear_tiles(memory)
    if memory.logits is not None:
        route(operands, memory, ch, T, s)
    if pid < memory.copy_programs:
        share_routes(operands.ids, operands.weights, memory, ch, T, max_tokens, s)
    make_tables(memory, ch, max_tokens, s, table_sizes)
    if pid < memory.copy_programs:
        start = clock(memory)
        send_tokens(operands.x, operands.ids, memory, ch, T, max_tokens, s)
        add_time(memory, DISPATCH_TIME, start)
    ticket = take_ticket(ch, 1)
    phase_start = 0
    for phase in range(0, 2 * W):
        source_step = (phase - phase // 2) % W
        is_first_gemm = (phase == 0) | ((phase % 2 == 1) & (phase < 2 * W - 1))
        first_tile = tl.load(memory.tables.cumulative_tiles + source_step - 1, mask=source_step > 0, other=0)
        num_tiles = tl.load(memory.tables.cumulative_tiles + source_step) - first_tile
        tiles_n = tl.where(is_first_gemm, tl.cdiv(N, s.BN), tl.cdiv(H, s.BN))
        phase_end = phase_start + num_tiles * tiles_n
        if is_first_gemm & (ticket < phase_end):
            for j in range(1, source_step + 1):
                source = (rank_of(ch) - j + W) % W
                wait_until(
                    ch.counters + j - 1, calls_of(ch) * memory.copy_programs, ch.guard, first_tile, source, "sys"
                )
        while ticket < phase_end:
            i, tn = grouped_tile(ticket - phase_start, num_tiles, tiles_n, s.GROUP_M)
            i += first_tile
            if is_first_gemm:
                start = clock(memory)
                first_gemm_tile(operands, memory, w13_desc, hidden_in, ch, i, tn, N, H, max_tokens, s)
                add_time(memory, FIRST_GEMM_TIME, start)
            else:
                wait_until(tiles_done(memory, i), tl.cdiv(N, s.BN), ch.guard, i, rank_of(ch), "gpu")
                start = clock(memory)
                second_gemm_tile(operands, memory, hidden_out, w2_desc, y_desc, ch, i, tn, tiles_n, H, K, s)
                add_time(memory, SECOND_GEMM_TIME, start)
            ticket = take_ticket(ch, 1)
        phase_start = phase_end
        if (pid < memory.copy_programs) & (is_first_gemm == 0):  # source step 0 contains this rank's own tokens
            for j in range(1, source_step + 1):
                all_tiles = tl.load(memory.tables.cumulative_tiles + W - 1)
                if last_step_with(memory.tables.tiles, first_tile, all_tiles, j, 256) == source_step:
                    wait_for_step(memory, ch, j)
                    start = clock(memory)
                    send_step_sums(memory, ch, j, max_tokens, s)
                    add_time(memory, COMBINE_TIME, start)
    wait_for_step(memory, ch, 0)
    wait_for_sums(ch, memory)
    start = clock(memory)
    sum_own_tokens(operands.ids, operands.shared, operands.out, memory, ch, T, max_tokens, s)
    add_time(memory, FINAL_SUM_TIME, start)
    add_time(memory, TOTAL_TIME, launch_start)
    if memory.left_out is not None:
        if pid == 0:
            take_left_out(memory.left_out, ch.guard, W)
    end_call(ch, memory.epoch, tl.num_programs(0))
