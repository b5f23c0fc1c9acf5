"""Memory-bound kernels that run between the overlapped kernels: the gated activation, its gradient, and the rotary
embedding of a decoder."""

import triton.language as tl

from ..lang.jit import jit


@jit(do_not_specialize=("rows",))
def silu_mul(x, out, rows, N, stride, INTERLEAVE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Compute out [rows, N] = silu(gate) * up. A row of x has `stride` elements, in which blocks of INTERLEAVE gate
    columns alternate with blocks of INTERLEAVE up columns. A tile has R x C elements of out."""
    tiles_n = tl.cdiv(N, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
        col = (t % tiles_n * C + tl.arange(0, C))[None, :]
        ok = (row < rows) & (col < N)
        offset = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + offset, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x + offset + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * N + col, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


@jit(do_not_specialize=("rows",))
def silu_mul_backward(dy, x, dx, rows, N, stride, INTERLEAVE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Compute dx, the gradient of `silu_mul` with respect to x, from dy [rows, N]. dx has the layout of x. The padding
    columns of dx become zero."""
    half = stride // 2
    tiles_n = tl.cdiv(half, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
        col = (t % tiles_n * C + tl.arange(0, C))[None, :]
        ok = (row < rows) & (col < half)
        offset = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + offset, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x + offset + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
        d = tl.load(dy + row * N + col, mask=ok & (col < N), other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(dx + offset, (d * up * s * (1.0 + gate * (1.0 - s))).to(dx.dtype.element_ty), mask=ok)
        tl.store(dx + offset + INTERLEAVE, (d * gate * s).to(dx.dtype.element_ty), mask=ok)


ROWS = tl.constexpr(16)  # the number of rows in a block in `rotate` and `rotate_and_keep`


@jit(do_not_specialize=("rows", "max_len"))
def rotate_and_keep(
    qkv,
    bias,
    norms,
    keys,
    values,
    rotary,
    positions,
    slots,
    rows,
    max_len,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Add the bias to queries, keys and values, normalise and rotate queries and keys, and store keys and values in the
    cache.

    qkv is [rows, (HEADS + 2 KV) D], and its queries are rotated in place. The kernel reads bias [(HEADS + 2 KV) D] if
    BIAS is set. If EPS is above zero, it reads norms [2, D], which contain the RMSNorm weights of a query head, then of
    a key head. A token is stored in keys and values [slots, max_len, KV, D] at its slot and position (int32 [rows]). A
    token with slot -1 is not stored. rotary float32 [.., D] contains the cosines, then the sines, for each position.
    HALF is D / 2 rounded up to a power of two.
    """
    WIDTH: tl.constexpr = (HEADS + 2 * KV) * D
    c = tl.arange(0, HALF)[None, :]
    inside = c < D // 2
    for t in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (HEADS + 2 * KV), tl.num_programs(0)):
        head = t % (HEADS + 2 * KV)
        row = t // (HEADS + 2 * KV) * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        position = tl.load(positions + row, mask=row_ok, other=0)[:, None]
        slot = tl.load(slots + row, mask=row_ok, other=-1)[:, None]
        ok = row_ok[:, None] & inside
        offset = row[:, None].to(tl.int64) * WIDTH + head * D + c
        left = tl.load(qkv + offset, mask=ok, other=0.0)
        right = tl.load(qkv + offset + D // 2, mask=ok, other=0.0)
        a = left.to(tl.float32)
        b = right.to(tl.float32)
        if BIAS:
            a += tl.load(bias + head * D + c, mask=inside, other=0.0).to(tl.float32)
            b += tl.load(bias + head * D + D // 2 + c, mask=inside, other=0.0).to(tl.float32)
        cache_offset = (slot.to(tl.int64) * max_len + position) * (KV * D) + c
        cache_ok = ok & (slot >= 0)
        if head < HEADS + KV:
            if EPS > 0:
                weight = norms + tl.where(head < HEADS, 0, D) + c
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + EPS)[:, None]
                a = a * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
                b = b * scale * tl.load(weight + D // 2, mask=inside, other=0.0).to(tl.float32)
            angle = position * D + c
            cos = tl.load(rotary + angle, mask=ok, other=0.0)
            sin = tl.load(rotary + angle + D // 2, mask=ok, other=0.0)
            left = (a * cos - b * sin).to(left.dtype)
            right = (b * cos + a * sin).to(right.dtype)
            if head < HEADS:
                tl.store(qkv + offset, left, mask=ok)
                tl.store(qkv + offset + D // 2, right, mask=ok)
            else:
                cache_offset += (head - HEADS) * D
                tl.store(keys + cache_offset, left, mask=cache_ok)
                tl.store(keys + cache_offset + D // 2, right, mask=cache_ok)
        else:
            cache_offset += (head - HEADS - KV) * D
            tl.store(values + cache_offset, a.to(left.dtype), mask=cache_ok)
            tl.store(values + cache_offset + D // 2, b.to(right.dtype), mask=cache_ok)


@jit(do_not_specialize=("rows", "period"))
def rotate(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    out,
    rows,
    period,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Compute out = qkv [rows, (HEADS + 2 KV) D] with rotated queries and keys. Row r is rotated by the angles in row r
    % period of cos and sin [period, D]. If EPS is above zero, RMSNorm is applied to each head first. Values are copied.
    HALF is D / 2 rounded up to a power of two."""

    c = tl.arange(0, HALF)[None, :]
    inside = c < D // 2
    for t in range(tl.program_id(0), tl.cdiv(rows, ROWS) * (HEADS + 2 * KV), tl.num_programs(0)):
        head = t % (HEADS + 2 * KV)
        row = (t // (HEADS + 2 * KV) * ROWS + tl.arange(0, ROWS))[:, None]
        ok = (row < rows) & inside
        offset = row.to(tl.int64) * ((HEADS + 2 * KV) * D) + head * D + c
        left = tl.load(qkv + offset, mask=ok, other=0.0)
        right = tl.load(qkv + offset + D // 2, mask=ok, other=0.0)
        if head < HEADS + KV:
            a = left.to(tl.float32)
            b = right.to(tl.float32)
            if EPS > 0:
                scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + EPS)[:, None]
                if head < HEADS:
                    a = a * scale * tl.load(query_norm + c, mask=inside, other=0.0).to(tl.float32)
                    b = b * scale * tl.load(query_norm + D // 2 + c, mask=inside, other=0.0).to(tl.float32)
                else:
                    a = a * scale * tl.load(key_norm + c, mask=inside, other=0.0).to(tl.float32)
                    b = b * scale * tl.load(key_norm + D // 2 + c, mask=inside, other=0.0).to(tl.float32)
            angle = (row % period).to(tl.int64) * D + c
            x = tl.load(cos + angle, mask=ok, other=0.0).to(tl.float32)
            y = tl.load(sin + angle, mask=ok, other=0.0).to(tl.float32)
            left = (a * x - b * y).to(left.dtype)
            right = (b * x + a * y).to(right.dtype)
        tl.store(out + offset, left, mask=ok)
        tl.store(out + offset + D // 2, right, mask=ok)
