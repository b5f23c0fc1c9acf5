"""x @ weight.T on some of the SMs, so that a communicating kernel beside it finds the others free. Local."""

from __future__ import annotations

from typing import Any

import torch

from ..kernels.gemm import matmul as kernel
from ..plan import Fused
from ..plan.choose import SMALL
from ..world import World
from .all_gather_matmul import gate_block
from .common import descriptor, places


def tile(world: World) -> Fused:
    """The sizes of the GEMM's tiles."""
    return SMALL if world.sm_count < 32 else Fused()


def matmul(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, world: World, programs: int, gated: int = 0
) -> None:
    """out [M, N] = x [M, K] @ weight.T [N, K] by `programs` programs, one a SM; or, gated, out [M, gated] = silu(gate) * up
    for a weight as in `all_gather_swiglu`. On the current stream. Rows must be whole 16-byte words; all contiguous."""
    (m, k), n, t = x.shape, weight.shape[0], tile(world)
    if m == 0:
        return

    def args() -> dict[str, Any]:
        columns = gate_block(world) if gated else t.block_n // 2
        return dict(
            a_desc=descriptor(x, m, k, (t.block_m, t.block_k)), b_desc=descriptor(weight, n, k, (t.block_n, t.block_k)),
            out_desc=descriptor(out, m, out.shape[1], (t.block_m, columns)), M=m, N=n, K=k,
            BM=t.block_m, BN=t.block_n, BK=t.block_k, GROUP_M=t.group_m, GATED=gate_block(world) if gated else 0,
        )  # fmt: skip

    key = (kernel.fn.__name__, m, n, k, gated, programs, x.dtype, *places(x, weight, out))
    options = dict(num_warps=t.warps, num_stages=t.stages)
    tiles = -(-m // t.block_m) * -(-n // t.block_n)
    world.launch(kernel, min(programs, tiles), args, options, world.current_stream(), key)
