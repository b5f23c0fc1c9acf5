"""Memory-bound kernels around the overlapped ones: the gated activation, and the sum of staged partials."""

import triton.language as tl

from ..lang.jit import jit


@jit
def silu_mul(x, out, rows, N, stride, INTERLEAVE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """out [rows, N] = silu(gate) * up; a row of x, `stride` long, alternates INTERLEAVE gate and as many up columns."""
    tiles_n = tl.cdiv(N, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
        col = (t % tiles_n * C + tl.arange(0, C))[None, :]
        ok = (row < rows) & (col < N)
        at = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x + at + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row * N + col, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


@jit
def silu_mul_backward(dy, x, dx, rows, N, stride, INTERLEAVE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """dx, laid out as x in `silu_mul`, from dy [rows, N]; the padding columns of dx become zero."""
    half = stride // 2
    tiles_n = tl.cdiv(half, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
        col = (t % tiles_n * C + tl.arange(0, C))[None, :]
        ok = (row < rows) & (col < half)
        at = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x + at + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
        d = tl.load(dy + row * N + col, mask=ok & (col < N), other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(dx + at, (d * up * s * (1.0 + gate * (1.0 - s))).to(dx.dtype.element_ty), mask=ok)
        tl.store(dx + at + INTERLEAVE, (d * gate * s).to(dx.dtype.element_ty), mask=ok)


@jit
def sum_staged(own, staging, out, bias, rows, N, me, W: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out [rows, N] = sum over ranks in rank order, fp32: `own` for this rank, staging [W, rows, N] for the others.
    me: int32 [1], this rank."""
    count = rows * N
    rank = tl.load(me)
    for b in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        i = b * BLOCK + tl.arange(0, BLOCK)
        ok = i < count
        acc = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(W):
            src = staging + r * count.to(tl.int64)
            if r == rank:
                src = own
            acc += tl.load(src + i, mask=ok, other=0.0).to(tl.float32)
        if BIAS:
            acc += tl.load(bias + i % N, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + i, acc.to(out.dtype.element_ty), mask=ok)
