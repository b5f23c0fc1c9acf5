"""SiLU-mul, the gated activation between the two halves of a Llama MLP."""

from __future__ import annotations

import torch

from ..kernels.elementwise import silu_mul as kernel
from ..world import World


def gate(x: torch.Tensor, out: torch.Tensor, world: World, interleave: int) -> None:
    """out [M, I] = silu(gate) * up; x [M, S] alternates blocks of `interleave` gate and up columns, the last ones padded."""
    rows, n = out.shape
    block = 2048 if world.sm_count > 32 else 256
    programs = min(world.sm_count * 8, -(-rows * n // block))
    args = dict(x=x, out=out, rows=rows, N=n, stride=x.shape[1], INTERLEAVE=interleave, BLOCK=block)
    world.launch(kernel, programs, args, dict(num_warps=8), world.current_stream())
