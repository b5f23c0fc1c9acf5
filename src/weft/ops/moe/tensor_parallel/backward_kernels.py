"""What the backward passes of both halves of a layer whose experts' columns are split over ranks need beside the
kernels of its forward pass (kernels.py) and of a layer of whole experts (expert_parallel).

Of the second half, dy [T, H] is what x is in the first: every rank pushes its own to all, `place_rows` puts it in the
order of the experts, and dy @ w2 is the activation's gradient here. `activation_gradient` (IDENTITY) multiplies it with
the routes' weights, and has the gradients of these, as far as they are of the columns here.

    side stream  | push_shard |
    main stream  | place_rows      | grouped_gemm_out | activation_gradient | grouped_wgrad, row_sums

Of the first, a row's dx is summed over its token's experts and ranks as the second half sums results, with weights of
one. x is sent again where neither it nor what the activation was of was kept.

    side stream  | push_shard |                                               | combine_rows                |
    main stream  | place_rows      | grouped_gemm_out | activation_backward   | grouped_gemm_out, ..wgrad   | sum_ranks

Order of accesses. Each of the two transfers is a call of the arena, as those of the forward pass are: its last kernel
has heard from every rank in it, `place_rows` of their rows, `sum_ranks` of their sums.
"""

import triton.language as tl

from ....lang.jit import jit
from ..expert_parallel.backward_kernels import gated_gradient, gelu_gradient
from ..expert_parallel.kernels import GELU


@jit
def activation_backward(both, dy, out, sources, tiles, count, N, inner, s):
    """out [rows, N] = the gradient of both [rows, N], of which dy [rows, inner] is the gradient of the activation;
    zeros in rows of no token. sources, tiles, count: route_tables.py, `Tables`; s: `GradientSizes`."""
    ROWS: tl.constexpr = s.ROWS
    COLS: tl.constexpr = s.COLS
    GATED: tl.constexpr = s.GATED
    PER: tl.constexpr = s.BM // ROWS
    wide = N if GATED == 0 else N // 2
    for unit in range(tl.program_id(0), tl.load(count) * PER, tl.num_programs(0)):
        row = tl.load(tiles + 4 * (unit // PER)) + unit % PER * ROWS + tl.arange(0, ROWS)
        there = (tl.load(sources + row) >= 0)[:, None]
        for part in range(0, wide, COLS):
            c = part + tl.arange(0, COLS)[None, :]
            at = row.to(tl.int64)[:, None] * inner + c
            dx = tl.load(dy + at, mask=there & (c < inner), other=0.0).to(tl.float32)
            if s.ACT == GELU:
                at = row.to(tl.int64)[:, None] * N + c
                _, by = gelu_gradient(tl.load(both + at, mask=there & (c < wide), other=0.0).to(tl.float32))
                tl.store(out + at, (dx * by).to(out.dtype.element_ty), mask=c < wide)
            else:
                at = row.to(tl.int64)[:, None] * N + c // GATED * (2 * GATED) + c % GATED
                gate = tl.load(both + at, mask=there & (c < wide), other=0.0).to(tl.float32)
                up = tl.load(both + at + GATED, mask=there & (c < wide), other=0.0).to(tl.float32)
                _, by_gate, by_up = gated_gradient(gate, up, s.ACT)
                tl.store(out + at, (dx * by_gate).to(out.dtype.element_ty), mask=c < wide)
                tl.store(out + at + GATED, (dx * by_up).to(out.dtype.element_ty), mask=c < wide)
