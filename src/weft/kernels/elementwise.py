"""Memory-bound kernels around the overlapped ones: the gated activation, and the sum of staged partials."""

import triton.language as tl

from ..lang.jit import jit


@jit
def silu_mul(x, out, rows, N, stride, INTERLEAVE, BLOCK: tl.constexpr):
    """out [rows, N] = silu(gate) * up; a row of x, `stride` long, alternates INTERLEAVE gate and INTERLEAVE up columns."""
    for b in range(tl.program_id(0), tl.cdiv(rows * N, BLOCK), tl.num_programs(0)):
        i = b.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        ok = i < rows * N
        col = i % N
        at = i // N * stride + col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE
        gate = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        up = tl.load(x + at + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


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
