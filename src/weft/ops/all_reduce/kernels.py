"""All-reduce, residual add and RMSNorm or LayerNorm of a matrix [M, H] in one launch, over peer memory.

Each row has an owner: rank r owns M / W consecutive rows. The all-reduce has two shots:

    push      Every rank stores its partial rows in the staging memory of their owner, and counts each block. A block
              consists of the rows that one program sums. With PULL the rows stay in symmetric memory, and the rank
              sends one notification that they are complete.
    sum       The owner reads its rows from its staging memory (PULL: from all ranks), sums the rows in float32 in rank
              order, adds the residual and normalises the sums in registers.
    publish   The owner stores the row in every rank's output, or in symmetric memory, from which the host enqueues a
              copy to the output.

                     t -->
    program p of r   | its rows of every block p -> owners | wait | sum own block p -> all | wait for the owners |
                                                             ^ counted by the other W - 1 ranks

With multicast the switch sums the rows that it reads from all ranks, and stores the results on all ranks.

Order of accesses. A sum needs the part of every rank. Therefore, once a rank has computed a sum in call n + 1, every
rank has begun call n + 1, and every rank's stream has completed its work on the results of call n. So outputs need no
second half. Moreover, a rank ends call n only after every owner has ended its sums of call n, because the rank waits
for the owners' rows. So staging memory and partial rows may be written again immediately. For the same reason, all
ranks have read the counters of a call before any rank increments them for the next call, so one set of counters
suffices. Only one rank increments each counter of `done`. Otherwise a program without rows to sum would increment a
counter earlier than this argument allows.

Symbols of shapes:

    M, H       the numbers of rows and columns of the matrix
    P          H rounded up to a power of two
    W          ranks
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...compute.norm import sum_in_pairs
from ...compute.quantize import divide_by_given_scale, divide_by_scales
from ...lang.channel import address_of, calls_of, end_call, rank_of, select
from ...lang.intrinsics import flush_stores, release_fence, wait_until, window_fence, window_store, window_sum
from ...lang.jit import jit
from ...lang.mapping import first_row
from ...lang.primitives import channel_broadcast
from ...lang.stock import AFTER_FENCE

PLAIN, RMS, LAYER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # NORM
ABSENT, OWN, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # no rows, own rows, or all rows


class Norm(NamedTuple):
    """The parameters of a call's computation. A row has H elements, and P is H rounded up to a power of two. The kernel
    adds the residual (RESIDUAL) to the sum, stores the result (KEEP), and applies NORM and BIAS to it. With SCALED, the
    normalised row is divided by a scale. With GROUP, every GROUP elements are divided by a scale that is returned (P:
    one scale per row; 0: no such scales). With PAIRS, the norm sums a row by `sum_in_pairs`."""

    eps: float
    DTYPE: tl.constexpr
    OUT: tl.constexpr
    H: tl.constexpr
    P: tl.constexpr
    NORM: tl.constexpr
    BIAS: tl.constexpr
    SCALED: tl.constexpr
    RESIDUAL: tl.constexpr
    KEEP: tl.constexpr
    GROUP: tl.constexpr
    PAIRS: tl.constexpr


class Affine(NamedTuple):
    """Pointers to the weight [H], the bias [H] and the scale [1]. A pointer that `Norm` does not use may be arbitrary.
    With GROUP, `scale` points to the scales [M, groups] that the kernel writes or, if rows are stored on all ranks, to
    the addresses of these scales on every rank."""

    weight: tl.tensor
    bias: tl.tensor
    scale: tl.tensor


class Shots(NamedTuple):
    """The parameters that determine how programs traverse rows. A unit contains rows of D owners (`push_rows`). The
    push loop has STAGES stages, and the sum loop SUM_STAGES stages. With PULL, owners read the other ranks' rows. With
    AHEAD, a stage of a sum contains the row of every source (`sum_rows_ahead`), otherwise the row of one source
    (`sum_rows`)."""

    D: tl.constexpr
    STAGES: tl.constexpr
    PULL: tl.constexpr
    AHEAD: tl.constexpr
    SUM_STAGES: tl.constexpr


class RankAddresses(NamedTuple):
    """The addresses of every rank's memory, each of them int64 [world]: the rank's part, staging memory, output, sum +
    residual, and scales."""

    parts: torch.Tensor
    stagings: torch.Tensor
    landings: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor


@jit
def load_row(row, H: tl.constexpr, P: tl.constexpr):
    """Load the H elements at `row`. Return them as [P], padded with zeros."""
    cols = tl.arange(0, P)
    if H == P:
        part = tl.load(row + cols)
    else:
        part = tl.load(row + cols, mask=cols < H, other=0.0)
    return part


@jit
def store_row(row, part, H: tl.constexpr, P: tl.constexpr):
    """Store the first H of [P] elements at `row`."""
    cols = tl.arange(0, P)
    if H == P:
        tl.store(row + cols, part)
    else:
        tl.store(row + cols, part, mask=cols < H)


@jit
def pointer(address, DTYPE: tl.constexpr):
    """Return a pointer to elements of DTYPE, with a hint for the compiler that its address is a multiple of 16
    bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@jit
def load_parameters(weights, norm):
    """Load the parameters of `normalise`: the weight [P], the bias [P] and the scale. A parameter that `norm` does not
    use is 0 (weight, bias) or 1 (scale)."""
    w = 0.0
    b = 0.0
    divisor = 1.0
    if norm.NORM != PLAIN:
        w = load_row(weights.weight, norm.H, norm.P)
    if norm.BIAS:
        b = load_row(weights.bias, norm.H, norm.P)
    if norm.SCALED:
        divisor = tl.load(weights.scale)
    return w, b, divisor


@jit
def sum_row(x, norm):
    """Return the sum of x [P]."""
    if norm.PAIRS:
        total = tl.sum(sum_in_pairs(tl.reshape(x, (1, norm.P)), 1, norm.P))
    else:
        total = tl.sum(x)
    return total


@jit
def normalise(h, w, b, divisor, norm):
    """Return w * norm(h) + b over the first H of [P] float32 elements. With SCALED the result is divided by `divisor`
    and clamped to the range of e4m3."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    y = h
    if norm.NORM == LAYER:
        y = h - sum_row(h, norm) / H
        if H != P:
            y = tl.where(tl.arange(0, P) < H, y, 0.0)
    if norm.NORM != PLAIN:
        y = y * tl.rsqrt(sum_row(y * y, norm) / H + norm.eps) * w.to(tl.float32)
    if norm.BIAS:
        y += b.to(tl.float32)
    if norm.SCALED:
        y = divide_by_given_scale(y, divisor)
    return y


@jit
def store_scales(scales, t, row_scales, norm):
    """Store the scales of row t."""
    g = tl.arange(0, norm.P // norm.GROUP)
    row = t.to(tl.int64) * tl.cdiv(norm.H, norm.GROUP)
    tl.store(scales + row + g, row_scales, mask=g * norm.GROUP < norm.H)


@jit
def store_scales_everywhere(addresses, t, row_scales, me, norm, W: tl.constexpr):
    """Store the scales of row t on every rank. A single store of a block writes to all ranks, because a separate
    address for each rank would need too many registers."""
    RANKS: tl.constexpr = triton.next_power_of_2(W)
    r = tl.arange(0, RANKS)
    g = tl.arange(0, norm.P // norm.GROUP)[None, :]
    row = t.to(tl.int64) * tl.cdiv(norm.H, norm.GROUP)
    to = address_of(addresses, (me + r) % W, tl.float32)[:, None]
    ok = (r < W)[:, None] & (g * norm.GROUP < norm.H)
    tl.store(to + row + g, tl.broadcast_to(row_scales[None, :], (RANKS, norm.P // norm.GROUP)), mask=ok)


@jit
def push_rows(x, stagings, counters, me, pid, M, max_rows, R, norm, shots, W: tl.constexpr):
    """Push this rank's rows to their owners. Each owner has staging memory for max_rows rows of every rank. `stagings`
    and `counters` are the addresses of the owners' staging memory and counters, beginning with the next rank. A unit
    consists of D blocks of R rows, one for each of D owners. One release makes all stores of a unit visible."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    D: tl.constexpr = shots.D
    PROGRAMS = tl.num_programs(0)
    GROUPS: tl.constexpr = (W - 1) // D
    units = tl.cdiv(max_rows, R) * GROUPS
    own_units = tl.maximum(units - pid + PROGRAMS - 1, 0) // PROGRAMS
    cols = tl.arange(0, P)
    for q in tl.range(0, own_units * (R * D), num_stages=shots.STAGES):
        unit = pid + q // (R * D) * PROGRAMS
        block = unit // GROUPS
        step = unit % GROUPS * D + q % D  # consecutive units belong to different owners, so that all links are busy
        owner = (me + 1 + step) % W
        lo = first_row(owner, M, W)
        i = block * R + q // D % R
        ok = (i < first_row(owner + 1, M, W) - lo) & (cols < H)
        part = tl.load(x + (lo + i).to(tl.int64) * H + cols, mask=ok, other=0.0)
        staging = select(stagings, step, W - 1)
        tl.store(pointer(staging, norm.DTYPE) + (me * max_rows + i).to(tl.int64) * H + cols, part, mask=ok)
        if q % (R * D) == R * D - 1:
            flush_stores(False)
            release_fence("sys")
            for k in tl.static_range(D):
                counter = pointer(select(counters, unit % GROUPS * D + k, W - 1), tl.int32)
                tl.atomic_add(counter + block, 1, sem=AFTER_FENCE, scope="sys")


@jit
def store_sum(acc, w, b, divisor, outs, sums, me, weights, i, lo, new_residual, norm, TO: tl.constexpr):
    """Normalise `acc`, the sum of own row i, and store the result in row lo + i of TO outputs. `outs` contains the
    addresses of the outputs, beginning with this rank's output. The sum is stored in `new_residual` (KEEP OWN), or in
    all of `sums` (WHOLE)."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    if norm.KEEP == OWN:
        store_row(new_residual + i.to(tl.int64) * H, acc.to(norm.DTYPE), H, P)
    y = normalise(acc, w, b, divisor, norm)
    if norm.GROUP:
        y, scales = divide_by_scales(y, P // norm.GROUP, norm.GROUP)
        if TO > 1:
            store_scales_everywhere(weights.scale, lo + i, scales, me, norm, TO)
        else:
            store_scales(weights.scale, lo + i, scales, norm)
    y = y.to(norm.OUT)
    row = (lo + i).to(tl.int64) * H
    for k in tl.static_range(TO):
        store_row(pointer(outs[k], norm.OUT) + row, y, H, P)
        if norm.KEEP == WHOLE:
            landing = address_of(sums, (me + k) % TO, norm.DTYPE)
            store_row(landing + row, acc.to(norm.DTYPE), H, P)


@jit
def sum_rows(
    sources, outs, sums, me, weights, start, count, lo, new_residual, norm,
    SOURCES: tl.constexpr, TO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum own rows start .. start + count over `sources`, and pass each sum to `store_sum`. `sources` are the addresses
    of own row 0 on each source. A stage contains the row of one source, so that even wide rows of many sources are in
    flight."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    acc = tl.zeros((P,), tl.float32)
    for q in tl.range(0, count * SOURCES, num_stages=STAGES):
        source = q % SOURCES
        i = start + q // SOURCES  # with 64 bits 24 bytes would spill (Triton 3.9; e4m3 rows of 5,120 on 8 ranks)
        part = load_row(pointer(select(sources, source, SOURCES), norm.DTYPE) + i.to(tl.int64) * H, H, P)
        acc = tl.where(source == 0, 0.0, acc) + part.to(tl.float32)
        if source == SOURCES - 1:
            w, b, divisor = load_parameters(weights, norm)
            store_sum(acc, w, b, divisor, outs, sums, me, weights, i, lo, new_residual, norm, TO)


@jit
def sum_rows_ahead(
    sources, outs, sums, me, weights, start, count, lo, new_residual, norm,
    SOURCES: tl.constexpr, TO: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do the same as `sum_rows`, but with only one wait and one barrier per row. A stage contains the row of every
    source, and the kernel issues all loads before it uses the first one. The parameters are loaded once."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    w, b, divisor = load_parameters(weights, norm)
    for q in tl.range(0, count, num_stages=STAGES):
        i = start + q
        acc = tl.zeros((P,), tl.float32)  # as in `sum_rows`, a sum of negative zeros becomes positive zero
        for k in tl.static_range(SOURCES):
            acc += load_row(pointer(sources[k], norm.DTYPE) + i.to(tl.int64) * H, H, P).to(tl.float32)
        store_sum(acc, w, b, divisor, outs, sums, me, weights, i, lo, new_residual, norm, TO)


@jit(do_not_specialize=("M",))
def two_shot(x, staging, addresses, residual, new_residual, weight, bias, scale, epoch, ch, M, norm, shots):
    """All-reduce x [M, H], this rank's part, and apply the norm. The results are stored in the output [M, H] and, with
    KEEP WHOLE, in the sum + residual [M, H] of every rank. `addresses` contains the addresses of this memory. The ranks
    push rows to this rank's staging memory [W, max_rows, H], which PULL does not use. residual and new_residual are
    [own rows, H] (OWN), or residual is [M, H] (WHOLE). Each program sums one block of R rows. The first counters count
    the arrivals of each own block (with PULL there is only one counter, which each rank increments when its part is
    complete). There is one further counter for each owner, which counts the owner's programs that have stored all of
    their rows."""
    DTYPE: tl.constexpr = norm.DTYPE
    H: tl.constexpr = norm.H
    PROGRAMS = tl.num_programs(0)
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    calls = calls_of(ch)
    max_rows = M // W + (M % W > 0).to(tl.int32)
    R = tl.cdiv(max_rows, PROGRAMS)
    lo = first_row(me, M, W)
    rows = first_row(me + 1, M, W) - lo
    if shots.PULL:
        if pid == 0:
            channel_broadcast(ch, 0, False)
        done = 1
    else:
        stagings = ()
        counters = ()
        for k in tl.static_range(1, W):
            stagings = stagings + (tl.load(addresses.stagings + (me + k) % W),)
            counters = counters + (tl.load(ch.peers + (me + k) % W),)
        push_rows(x, stagings, counters, me, pid, M, max_rows, R, norm, shots, W)
        done = PROGRAMS

    sources = ()
    outs = ()
    for k in tl.static_range(W):
        if shots.PULL:
            sources = sources + (tl.load(addresses.parts + k) + lo.to(tl.int64) * (H * DTYPE.primitive_bitwidth // 8),)
        else:
            own_rows = (x + lo.to(tl.int64) * H).to(tl.int64)
            staged_rows = (staging + k * max_rows.to(tl.int64) * H).to(tl.int64)
            sources = sources + (tl.where(me == k, own_rows, staged_rows),)
        outs = outs + (tl.load(addresses.landings + (me + k) % W),)
    if norm.RESIDUAL == OWN:
        sources = sources + (residual.to(tl.int64),)
    if norm.RESIDUAL == WHOLE:
        sources = sources + ((residual + lo.to(tl.int64) * H).to(tl.int64),)
    SOURCES: tl.constexpr = W + (norm.RESIDUAL != ABSENT)

    weights = Affine(weight, bias, addresses.scales if norm.GROUP else scale)
    start = pid * R
    count = tl.minimum(R, rows - start)
    if count > 0:
        if shots.PULL:
            wait_until(ch.counters, calls * W, ch.guard, pid, -1, "sys")
        else:
            wait_until(ch.counters + pid, calls * (W - 1), ch.guard, pid, -1, "sys")
        sum_block: tl.constexpr = sum_rows_ahead if shots.AHEAD else sum_rows
        sum_block(
            sources, outs, addresses.sums, me, weights, start, count, lo, new_residual, norm, SOURCES, W,
            shots.SUM_STAGES,
        )  # fmt: skip
        channel_broadcast(ch, done + me, False)
    for owner in range(pid, W, PROGRAMS):
        owner_blocks = tl.cdiv(first_row(owner + 1, M, W) - first_row(owner, M, W), R)
        wait_until(ch.counters + done + owner, calls * owner_blocks, ch.guard, -1, owner, "sys")
    end_call(ch, epoch, PROGRAMS)


@jit(do_not_specialize=("M",))
def multicast_shot(windows, residual, new_residual, weight, bias, epoch, ch, M, norm, PROGRAMS: tl.constexpr):
    """All-reduce in two shots through the switch. An owner reads the sum of a row over all ranks by one access to a
    multicast address. It stores the normalised row on all ranks by a second such access. windows, int64 [3], contains
    the multicast addresses of x, of the output and (KEEP WHOLE) of the sum + residual, each [M, H]. Elements are
    16-bit. The counters and the order of accesses are as in `two_shot` with PULL."""
    DTYPE: tl.constexpr = norm.DTYPE
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    W: tl.constexpr = ch.world
    ROW: tl.constexpr = 2 * H
    pid = tl.program_id(0)
    me = rank_of(ch)
    calls = calls_of(ch)
    lo = first_row(me, M, W)
    rows = first_row(me + 1, M, W) - lo
    if pid == 0:
        channel_broadcast(ch, 0, False)
    w, b, _ = load_parameters(Affine(weight, bias, weight), norm)
    if pid < rows:
        wait_until(ch.counters, calls * W, ch.guard, -1, -1, "sys")
        window_fence()
    for i in range(pid, rows, PROGRAMS):
        offset = (lo + i).to(tl.int64) * ROW
        acc = window_sum(tl.load(windows) + offset, H, P, DTYPE)
        if norm.RESIDUAL == OWN:
            acc += load_row(residual + i.to(tl.int64) * H, H, P).to(tl.float32)
        if norm.RESIDUAL == WHOLE:
            acc += load_row(residual + (lo + i).to(tl.int64) * H, H, P).to(tl.float32)
        if norm.KEEP == OWN:
            store_row(new_residual + i.to(tl.int64) * H, acc.to(DTYPE), H, P)
        if norm.KEEP == WHOLE:
            window_store(tl.load(windows + 2) + offset, acc.to(DTYPE), H, P)
        y = normalise(acc, w, b, 1.0, norm)
        window_store(tl.load(windows + 1) + offset, y.to(DTYPE), H, P)
    if pid < rows:
        window_fence()
        channel_broadcast(ch, 1 + me, False)
    for owner in range(pid, W, PROGRAMS):
        owner_rows = first_row(owner + 1, M, W) - first_row(owner, M, W)
        wait_until(ch.counters + 1 + owner, calls * tl.minimum(owner_rows, PROGRAMS), ch.guard, -1, owner, "sys")
        window_fence()
    end_call(ch, epoch, PROGRAMS)


@jit(do_not_specialize=("M",))
def sum_norm(
    x, staging, out, residual, new_residual, weight, bias, scale, me, M, norm,
    W: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the owner's part without communication. The kernel sums the owner's rows of x [M, H] and the other ranks'
    rows in staging [W, max_rows, H], normalises the sums, and stores them in the owner's rows of out [M, H].
    new_residual is [own rows, H], for KEEP OWN. me, int32 [1], contains the number of this rank."""
    H: tl.constexpr = norm.H
    rank = tl.load(me)
    max_rows = M // W + (M % W > 0).to(tl.int32)
    lo = first_row(rank, M, W)
    rows = first_row(rank + 1, M, W) - lo
    sources = ()
    for k in tl.static_range(W):
        own_rows = (x + lo.to(tl.int64) * H).to(tl.int64)
        staged_rows = (staging + k * max_rows.to(tl.int64) * H).to(tl.int64)
        sources = sources + (tl.where(rank == k, own_rows, staged_rows),)
    if norm.RESIDUAL == OWN:
        sources = sources + (residual.to(tl.int64),)
    if norm.RESIDUAL == WHOLE:
        sources = sources + ((residual + lo.to(tl.int64) * H).to(tl.int64),)
    SOURCES: tl.constexpr = W + (norm.RESIDUAL != ABSENT)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        sum_rows(
            sources, (out.to(tl.int64),), x, rank, Affine(weight, bias, scale), block * R,
            tl.minimum(R, rows - block * R), lo, new_residual, norm, SOURCES, 1, STAGES,
        )  # fmt: skip


@jit(do_not_specialize=("M",))
def add_norm(x, out, residual, new_residual, weight, bias, scale, me, M, norm, W: tl.constexpr):
    """Add the residual (ABSENT or WHOLE) to x [M, H], which is already summed over ranks, and normalise all rows,
    without communication. me, int32 [1], contains the number of this rank."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    KEEP: tl.constexpr = norm.KEEP
    w, b, divisor = load_parameters(Affine(weight, bias, scale), norm)
    rank = tl.load(me)
    lo = first_row(rank, M, W)
    for t in range(tl.program_id(0), M, tl.num_programs(0)):
        row = t.to(tl.int64) * H
        acc = load_row(x + row, H, P).to(tl.float32)
        if norm.RESIDUAL == WHOLE:
            acc += load_row(residual + row, H, P).to(tl.float32)
        if KEEP == WHOLE:
            store_row(new_residual + row, acc.to(norm.DTYPE), H, P)
        if KEEP == OWN:
            if (t >= lo) & (t < first_row(rank + 1, M, W)):
                store_row(new_residual + row - lo.to(tl.int64) * H, acc.to(norm.DTYPE), H, P)
        y = normalise(acc, w, b, divisor, norm)
        if norm.GROUP:
            y, scales = divide_by_scales(y, P // norm.GROUP, norm.GROUP)
            store_scales(scale, t, scales, norm)
        store_row(out + row, y.to(norm.OUT), H, P)
