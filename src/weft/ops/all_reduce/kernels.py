"""All-reduce, residual add and RMSNorm or LayerNorm of a matrix [M, H] in one launch, over peer memory.

A row has an owner: rank r owns a run of M / W rows. Two shots, each by pushing or by pulling:

    push      every rank stores its partial rows in their owner's staging memory, block by block, and counts each block
    (PULL)    or leaves them where they are, in symmetric memory, and says once that they are there
    sum       the owner takes its rows from its staging memory (from all ranks), sums them in fp32 in the order of the
              ranks, adds the residual, normalises in registers
    publish   and stores the row in every rank's output, or in landing memory, which the host has copied to it

                     t -->
    program of r     | my rows of blocks 0, P, .. -> owners | wait | sum block 0 of mine -> all | wait | sum .. | done?
                                                              ^ counted by the other W - 1

    (multicast) or both by the switch, which sums what it reads from all ranks and stores on all of them

Order of accesses. A row needs every rank's part. So what a rank does in call n + 1 behind a sum comes after every rank
has begun call n + 1, and so after everything that every rank's stream did between the two calls with what call n gave
it: outputs and landing memory need no second half. And a rank ends call n only after every owner has ended its sums of
call n, because it waits for their rows: staging memory and partial rows may be written again at once. The counters of a
call are done with in the same way before anybody counts for the next call, so one set is enough. `done` is counted by
one rank a counter, because a program without rows to sum would otherwise be ahead of that argument.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...compute.quantize import divide_by_scales
from ...lang.channel import address_of, calls_of, end_call, rank_of, select
from ...lang.intrinsics import flush_stores, release_fence, wait_until, window_fence, window_store, window_sum
from ...lang.jit import jit
from ...lang.mapping import first_row
from ...lang.primitives import channel_broadcast

PLAIN, RMS, LAYER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # NORM
ABSENT, OWN, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # a residual: of the own rows, or of all


class Norm(NamedTuple):
    """What a call computes: rows of H elements, P being H rounded up to a power of two; a NORM, with a BIAS, over a
    scale (SCALED), or over scales of the row's own, one for each GROUP of its elements (P: of all); 0: none. A RESIDUAL
    is added before, and the sum KEEPt."""

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


class Affine(NamedTuple):
    """[H] weight and bias, and the scale [1]; pointers to anything where `Norm` has none. With GROUP, scale is where
    scales [M, groups] are written: for rows that go to other ranks too, the addresses of every rank's."""

    weight: tl.tensor
    bias: tl.tensor
    scale: tl.tensor


class Shots(NamedTuple):
    """R: rows of a block; D: owners a unit; STAGES: rows under way. PULL, BULK as in `two_shot`."""

    PROGRAMS: tl.constexpr
    R: tl.constexpr
    D: tl.constexpr
    STAGES: tl.constexpr
    PULL: tl.constexpr
    BULK: tl.constexpr


class Places(NamedTuple):
    """Addresses of every rank's memory, int64, by rank: its part, staging memory, output, sum + residual, and scales.
    BULK: stagings and landings hold granules of the descriptors instead."""

    parts: torch.Tensor
    stagings: torch.Tensor
    landings: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor


@jit
def load_row(row, H: tl.constexpr, P: tl.constexpr):
    """Return [P] elements: the H at `row`, then zeros."""
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
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@jit
def store_bulk(desc, granule, t, part, P: tl.constexpr):
    """Store row t of the rank at `granule`, through a descriptor of [granule, row, line, 128 bytes], which ends rows at
    H."""
    desc.store([granule, t, 0, 0], tl.reshape(part, (1, 1, P // desc.block_shape[3], desc.block_shape[3])))


@jit
def parameters(weights, norm):
    """Return what `normalise` needs, loaded early: [P] weight and bias, and the scale; 0 or 1 for what is not there."""
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
def normalise(h, w, b, divisor, norm):
    """Return w * norm(h) + b over the first H of [P] fp32 elements; SCALED: over `divisor`, within fp8 e4m3's range."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    y = h
    if norm.NORM == LAYER:
        y = h - tl.sum(h) / H
        if H != P:
            y = tl.where(tl.arange(0, P) < H, y, 0.0)
    if norm.NORM != PLAIN:
        y = y * tl.rsqrt(tl.sum(y * y) / H + norm.eps) * w.to(tl.float32)
    if norm.BIAS:
        y += b.to(tl.float32)
    if norm.SCALED:
        y = tl.minimum(tl.maximum(y / divisor, -448.0), 448.0)
    return y


@jit
def store_scales(scales, t, values, norm):
    """Store the scales of row t."""
    g = tl.arange(0, norm.P // norm.GROUP)
    row = t.to(tl.int64) * tl.cdiv(norm.H, norm.GROUP)
    tl.store(scales + row + g, values, mask=g * norm.GROUP < norm.H)


@jit
def store_scales_everywhere(addresses, t, values, me, norm, W: tl.constexpr):
    """Store the scales of row t on every rank, by one store: an address a rank would take registers that are not
    there."""
    RANKS: tl.constexpr = triton.next_power_of_2(W)
    r = tl.arange(0, RANKS)
    g = tl.arange(0, norm.P // norm.GROUP)[None, :]
    row = t.to(tl.int64) * tl.cdiv(norm.H, norm.GROUP)
    to = address_of(addresses, (me + r) % W, tl.float32)[:, None]
    ok = (r < W)[:, None] & (g * norm.GROUP < norm.H)
    tl.store(to + row + g, tl.broadcast_to(values[None, :], (RANKS, norm.P // norm.GROUP)), mask=ok)


@jit
def push_rows(x, stage_desc, stages, boxes, me, pid, M, most, norm, shots, W: tl.constexpr):
    """Push this rank's rows to their owners' slots for it. stages, boxes: addresses of staging memory (BULK: granules)
    and counters, from the next rank on. A unit is block b of D owners, R rows each, and is released as one."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    R: tl.constexpr = shots.R
    D: tl.constexpr = shots.D
    PROGRAMS: tl.constexpr = shots.PROGRAMS
    GROUPS: tl.constexpr = (W - 1) // D
    units = tl.cdiv(M // W + (M % W > 0).to(tl.int32), R) * GROUPS
    mine = tl.maximum(units - pid + PROGRAMS - 1, 0) // PROGRAMS
    cols = tl.arange(0, P)
    for q in tl.range(0, mine * (R * D), num_stages=shots.STAGES):
        unit = pid + q // (R * D) * PROGRAMS
        block = unit // GROUPS
        step = unit % GROUPS * D + q % D  # owners in turn, so that no link and no owner waits for another
        owner = (me + 1 + step) % W
        lo = first_row(owner, M, W)
        i = block * R + q // D % R
        there = i < first_row(owner + 1, M, W) - lo
        ok = there & (cols < H)
        part = tl.load(x + (lo + i).to(tl.int64) * H + cols, mask=ok, other=0.0)
        stage = select(stages, step, W - 1)
        if shots.BULK:  # a row past the last is outside the descriptor's tensor
            store_bulk(stage_desc, stage, tl.where(there, me * most + i, 1 << 24), part, P)
        else:
            tl.store(pointer(stage, norm.DTYPE) + (me * most + i).to(tl.int64) * H + cols, part, mask=ok)
        if q % (R * D) == R * D - 1:
            flush_stores(shots.BULK)
            release_fence("sys")
            for k in tl.static_range(D):
                box = pointer(select(boxes, unit % GROUPS * D + k, W - 1), tl.int32)
                tl.atomic_add(box + block, 1, sem="relaxed", scope="sys")


@jit
def sum_rows(
    sources, out_desc, outs, sums, me, weights, first, count, lo, new_residual, norm,
    SOURCES: tl.constexpr, TO: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Sum own rows first .. first + count over `sources` (addresses of own row 0), normalise, and store them as rows lo
    + .. of the TO `outs` (addresses; BULK: granules), from this rank's on. KEEP: the sum goes to `new_residual` (OWN),
    or to all of `sums` (WHOLE)."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    DTYPE: tl.constexpr = norm.DTYPE
    OUT: tl.constexpr = norm.OUT
    KEEP: tl.constexpr = norm.KEEP
    acc = tl.zeros((P,), tl.float32)
    for q in tl.range(0, count * SOURCES, num_stages=STAGES):
        source = q % SOURCES
        i = (first + q // SOURCES).to(tl.int64)
        part = load_row(pointer(select(sources, source, SOURCES), DTYPE) + i * H, H, P)
        acc = tl.where(source == 0, 0.0, acc) + part.to(tl.float32)
        if source == SOURCES - 1:
            w, b, divisor = parameters(weights, norm)
            if KEEP == OWN:
                store_row(new_residual + i * H, acc.to(DTYPE), H, P)
            y = normalise(acc, w, b, divisor, norm)
            if norm.GROUP:
                y, values = divide_by_scales(y, P // norm.GROUP, norm.GROUP)
                if TO > 1:
                    store_scales_everywhere(weights.scale, lo + i, values, me, norm, TO)
                else:
                    store_scales(weights.scale, lo + i, values, norm)
            y = y.to(OUT)
            for k in tl.static_range(TO):
                if BULK:
                    store_bulk(out_desc, outs[k], lo + first + q // SOURCES, y, P)
                else:
                    store_row(pointer(outs[k], OUT) + (lo + i) * H, y, H, P)
                if KEEP == WHOLE:
                    landing = address_of(sums, (me + k) % TO, DTYPE)
                    store_row(landing + (lo + i) * H, acc.to(DTYPE), H, P)


@jit(do_not_specialize=("M",))
def two_shot(
    x, staging, stage_desc, out_desc, places, residual, new_residual, weight, bias, scale, turn, ch, M, norm, shots
):
    """x [M, H], this rank's part, and everybody's in `places` (PULL). staging [W, most, H]. Results go to every rank's
    output [M, H] and, KEEP WHOLE, sum + residual [M, H]. residual, new_residual: [own rows, H] (OWN), or residual [M,
    H] (WHOLE). Counters: arrivals of each own block (PULL: of each rank's word that its part is there, in one), then
    each owner's ends."""
    DTYPE: tl.constexpr = norm.DTYPE
    H: tl.constexpr = norm.H
    R: tl.constexpr = shots.R
    PROGRAMS: tl.constexpr = shots.PROGRAMS
    W: tl.constexpr = ch.world
    pid = tl.program_id(0)
    me = rank_of(ch)
    calls = calls_of(ch)
    most = M // W + (M % W > 0).to(tl.int32)
    lo = first_row(me, M, W)
    rows = first_row(me + 1, M, W) - lo
    if shots.PULL:
        if pid == 0:
            channel_broadcast(ch, 0, False)
        done = 1
    else:
        stages = ()
        boxes = ()
        for k in tl.static_range(1, W):
            stages = stages + (tl.load(places.stagings + (me + k) % W),)
            boxes = boxes + (tl.load(ch.peers + (me + k) % W),)
        push_rows(x, stage_desc, stages, boxes, me, pid, M, most, norm, shots, W)
        done = tl.cdiv(most, R)

    sources = ()
    outs = ()
    for k in tl.static_range(W):
        if shots.PULL:
            sources = sources + (tl.load(places.parts + k) + lo.to(tl.int64) * (H * DTYPE.primitive_bitwidth // 8),)
        else:
            own = (x + lo.to(tl.int64) * H).to(tl.int64)
            slot = (staging + k * most.to(tl.int64) * H).to(tl.int64)
            sources = sources + (tl.where(me == k, own, slot),)
        outs = outs + (tl.load(places.landings + (me + k) % W),)
    if norm.RESIDUAL == OWN:
        sources = sources + (residual.to(tl.int64),)
    if norm.RESIDUAL == WHOLE:
        sources = sources + ((residual + lo.to(tl.int64) * H).to(tl.int64),)
    SOURCES: tl.constexpr = W + (norm.RESIDUAL != ABSENT)

    weights = Affine(weight, bias, places.scales if norm.GROUP else scale)
    blocks = tl.cdiv(rows, R)
    for block in range(pid, blocks, PROGRAMS):
        if shots.PULL:
            wait_until(ch.counters, calls * W, ch.guard, block, -1, "sys")
        else:
            wait_until(ch.counters + block, calls * (W - 1), ch.guard, block, -1, "sys")
        sum_rows(
            sources, out_desc, outs, places.sums, me, weights, block * R, tl.minimum(R, rows - block * R), lo,
            new_residual, norm, SOURCES, W, shots.STAGES, shots.BULK,
        )  # fmt: skip
    if pid < blocks:
        channel_broadcast(ch, done + me, shots.BULK)
    for owner in range(pid, W, PROGRAMS):
        theirs = tl.cdiv(first_row(owner + 1, M, W) - first_row(owner, M, W), R)
        wait_until(ch.counters + done + owner, calls * tl.minimum(theirs, PROGRAMS), ch.guard, -1, owner, "sys")
    end_call(ch, turn, PROGRAMS)


@jit(do_not_specialize=("M",))
def multicast_shot(windows, residual, new_residual, weight, bias, turn, ch, M, norm, PROGRAMS: tl.constexpr):
    """Two shots through the switch: an owner reads the sum of a row over all ranks, and stores the normalised row on
    all of them, each by one access to a multicast address. windows: int64 [3], those of every rank's x, output and
    (KEEP WHOLE) sum + residual, [M, H]. Elements of 16 bits. Counters, and the order of accesses, are those of
    `two_shot` with PULL."""
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
    w, b, _ = parameters(Affine(weight, bias, weight), norm)
    if pid < rows:
        wait_until(ch.counters, calls * W, ch.guard, -1, -1, "sys")
        window_fence()
    for i in range(pid, rows, PROGRAMS):
        at = (lo + i).to(tl.int64) * ROW
        acc = window_sum(tl.load(windows) + at, H, P, DTYPE)
        if norm.RESIDUAL == OWN:
            acc += load_row(residual + i.to(tl.int64) * H, H, P).to(tl.float32)
        if norm.RESIDUAL == WHOLE:
            acc += load_row(residual + (lo + i).to(tl.int64) * H, H, P).to(tl.float32)
        if norm.KEEP == OWN:
            store_row(new_residual + i.to(tl.int64) * H, acc.to(DTYPE), H, P)
        if norm.KEEP == WHOLE:
            window_store(tl.load(windows + 2) + at, acc.to(DTYPE), H, P)
        y = normalise(acc, w, b, 1.0, norm)
        window_store(tl.load(windows + 1) + at, y.to(DTYPE), H, P)
    if pid < rows:
        window_fence()
        channel_broadcast(ch, 1 + me, False)
    for owner in range(pid, W, PROGRAMS):
        theirs = first_row(owner + 1, M, W) - first_row(owner, M, W)
        wait_until(ch.counters + 1 + owner, calls * tl.minimum(theirs, PROGRAMS), ch.guard, -1, owner, "sys")
        window_fence()
    end_call(ch, turn, PROGRAMS)


@jit(do_not_specialize=("M",))
def sum_norm(
    x, staging, out, residual, new_residual, weight, bias, scale, me, M, norm,
    W: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The owner's part without communication: its rows of x [M, H] and the other ranks', which stand in staging [W,
    most, H], to its rows of out [M, H]. new_residual: [own rows, H], of KEEP OWN. me: int32 [1], this rank."""
    H: tl.constexpr = norm.H
    rank = tl.load(me)
    most = M // W + (M % W > 0).to(tl.int32)
    lo = first_row(rank, M, W)
    rows = first_row(rank + 1, M, W) - lo
    sources = ()
    for k in tl.static_range(W):
        own = (x + lo.to(tl.int64) * H).to(tl.int64)
        slot = (staging + k * most.to(tl.int64) * H).to(tl.int64)
        sources = sources + (tl.where(rank == k, own, slot),)
    if norm.RESIDUAL == OWN:
        sources = sources + (residual.to(tl.int64),)
    if norm.RESIDUAL == WHOLE:
        sources = sources + ((residual + lo.to(tl.int64) * H).to(tl.int64),)
    SOURCES: tl.constexpr = W + (norm.RESIDUAL != ABSENT)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        sum_rows(
            sources, x, (out.to(tl.int64),), x, rank, Affine(weight, bias, scale), block * R,
            tl.minimum(R, rows - block * R), lo, new_residual, norm, SOURCES, 1, STAGES, False,
        )  # fmt: skip


@jit(do_not_specialize=("M",))
def add_norm(x, out, residual, new_residual, weight, bias, scale, me, M, norm, W: tl.constexpr):
    """The same without communication: x [M, H] is summed already, and the residual is ABSENT or WHOLE. me: int32 [1],
    this rank."""
    H: tl.constexpr = norm.H
    P: tl.constexpr = norm.P
    KEEP: tl.constexpr = norm.KEEP
    w, b, divisor = parameters(Affine(weight, bias, scale), norm)
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
            y, values = divide_by_scales(y, P // norm.GROUP, norm.GROUP)
            store_scales(scale, t, values, norm)
        store_row(out + row, y.to(norm.OUT), H, P)
