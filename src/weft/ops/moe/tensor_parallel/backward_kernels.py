"""The only additional kernel for the backward passes of both halves of a layer whose experts are split by columns over
the ranks. All other kernels are the kernels of the forward pass (kernels.py) and of a layer of whole experts
(expert_parallel).

In the second half, dy [T, H] has the role of x in the first half: every rank pushes its dy to all ranks, `place_rows`
stores the rows in expert order, and dy @ w2 is the gradient of this rank's part of the activation.
`activation_gradient` (IDENTITY) multiplies this gradient by the routing weights. `activation_gradient` also computes
the part of the routing weights' gradients that this rank's columns contribute.

    side stream  | push_shard |
    main stream  | place_rows      | grouped_gemm_out | activation_gradient | grouped_wgrad, row_sums

In the first half, the second half's kernel for sums of results sums a token's dx over its experts and ranks, with all
weights equal to 1. x is sent again if neither x nor the input of the activation was saved.

    side stream  | push_shard |                                               | combine_rows                |
    main stream  | place_rows      | grouped_gemm_out | activation_backward   | grouped_gemm_out, ..wgrad   | sum_ranks

Memory order. Each of the two transfers is a call that uses the arena, like the calls of the forward pass. Before the
last kernel of such a call ends, every rank has notified it: `place_rows` has waited for all ranks' rows, and
`sum_ranks` for all ranks' sums.
"""

import triton.language as tl

from ....lang.jit import jit
from ..activations import GELU
from ..expert_parallel.backward_kernels import gated_gradient, gelu_gradient


@jit
def activation_backward(preactivation, dy, out, sources, tiles, tile_count, N, inner, s):
    """Compute out [rows, N] = the gradient of preactivation [rows, N] from dy [rows, inner], the gradient of the
    activation. Rows without a token become zeros. sources, tiles, tile_count: `Tables` in route_tables.py; s:
    `GradientSizes`."""
    ROWS: tl.constexpr = s.ROWS
    COLS: tl.constexpr = s.COLS
    GATE_BLOCK: tl.constexpr = s.GATE_BLOCK
    PER: tl.constexpr = s.BM // ROWS
    columns = N if GATE_BLOCK == 0 else N // 2
    for unit in range(tl.program_id(0), tl.load(tile_count) * PER, tl.num_programs(0)):
        row = tl.load(tiles + 4 * (unit // PER)) + unit % PER * ROWS + tl.arange(0, ROWS)
        valid = (tl.load(sources + row) >= 0)[:, None]
        for part in range(0, columns, COLS):
            c = part + tl.arange(0, COLS)[None, :]
            offsets = row.to(tl.int64)[:, None] * inner + c
            dx = tl.load(dy + offsets, mask=valid & (c < inner), other=0.0).to(tl.float32)
            if s.ACT == GELU:
                offsets = row.to(tl.int64)[:, None] * N + c
                _, derivative = gelu_gradient(
                    tl.load(preactivation + offsets, mask=valid & (c < columns), other=0.0).to(tl.float32)
                )
                tl.store(out + offsets, (dx * derivative).to(out.dtype.element_ty), mask=c < columns)
            else:
                offsets = row.to(tl.int64)[:, None] * N + c // GATE_BLOCK * (2 * GATE_BLOCK) + c % GATE_BLOCK
                gate = tl.load(preactivation + offsets, mask=valid & (c < columns), other=0.0).to(tl.float32)
                up = tl.load(preactivation + offsets + GATE_BLOCK, mask=valid & (c < columns), other=0.0).to(tl.float32)
                _, dgate, dup = gated_gradient(gate, up, s.ACT)
                tl.store(out + offsets, (dx * dgate).to(out.dtype.element_ty), mask=c < columns)
                tl.store(out + offsets + GATE_BLOCK, (dx * dup).to(out.dtype.element_ty), mask=c < columns)
