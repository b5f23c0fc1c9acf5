"""SiLU-mul, the gated activation between the two halves of a Llama MLP. Local: no rank waits for another."""

from __future__ import annotations

from typing import Any

import torch

from ..compute.elementwise import silu_mul as kernel
from ..compute.elementwise import silu_mul_backward as backward_kernel
from ..op import check_call
from ..operands import DTYPES, check_device, dims, places
from ..world import World

OP = "silu_mul"


def forward(x: torch.Tensor, world: World, columns: int, interleave: int) -> torch.Tensor:
    """[M, columns] = silu(gate) * up; x [M, S] alternates blocks of `interleave` gate and up columns."""
    validate(x, world)
    x = x.contiguous()
    out = world.empty((x.shape[0], columns), x.dtype)
    gate(x, out, world, interleave)
    world.finish(world.current_stream())
    return out


def backward(dy: torch.Tensor, x: torch.Tensor, world: World, interleave: int) -> torch.Tensor:
    """The gradient of `x`."""
    x, dy = x.contiguous(), dy.contiguous()
    dx = world.empty(tuple(x.shape), x.dtype)
    _launch(backward_kernel, dict(dy=dy, x=x, dx=dx), (*dy.shape, x.shape[1]), x.shape[1] // 2, world, interleave)
    world.finish(world.current_stream())
    return dx


def validate(x: torch.Tensor, world: World) -> None:
    check_call(OP, world)
    check_device(OP, world, "x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{OP}: x must be [M, 2I], gate then up, got {dims(x)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{OP}: x is {dims(x)}; bfloat16 and float16 are supported")


def gate(x: torch.Tensor, out: torch.Tensor, world: World, interleave: int) -> None:
    """out [M, I] = silu(gate) * up; x [M, S] alternates `interleave` gate, then as many up columns, the last padded."""
    _launch(kernel, dict(x=x, out=out), (*out.shape, x.shape[1]), out.shape[1], world, interleave)


def _launch(
    kernel: Any, tensors: dict[str, Any], sizes: tuple[int, int, int], width: int, world: World, interleave: int
) -> None:
    """sizes: rows, N, stride of the kernel; width: columns that its tiles of R x C elements cover."""
    rows, n, stride = sizes
    if rows == 0 or width == 0:
        return
    block = world.scale.gate_block
    c = min(1 << (width - 1).bit_length(), block)
    tiles = -(-rows // (block // c)) * -(-width // c)
    key = (kernel.fn.__name__, *sizes, interleave, tensors["x"].dtype, *places(*tensors.values()))

    def args() -> dict[str, Any]:
        return dict(**tensors, rows=rows, N=n, stride=stride, INTERLEAVE=interleave, R=block // c, C=c)

    world.launch(kernel, min(world.sm_count * 8, tiles), args, dict(num_warps=8), world.current_stream(), key)
