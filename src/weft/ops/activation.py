"""SiLU-mul, the gated activation of a Llama MLP. No rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Never

import torch
from triton import JITFunction

from ..compute.elementwise import silu_mul as silu_mul_kernel
from ..compute.elementwise import silu_mul_backward as backward_kernel
from ..kernel_launch import Launch, prepared
from ..op import Local, RowsCall, registered
from ..plans import Plan, Sequential
from ..prepared import Run
from ..scaled_tensor import ScaledTensor
from ..tensor_checks import DTYPES, check_device, dims
from ..torch_library import Backward, CallOptions
from ..world import World
from .quantize import scaled_rows
from .removed import unexpected

_OP = "silu_mul"


@dataclass(frozen=True)
class SiluCall(RowsCall):
    """A checked call. The result is [m, columns] for x [m, stride], in which blocks of `interleave` gate and up columns
    alternate."""

    columns: int
    stride: int
    interleave: int
    dtype: torch.dtype


class SiluOperands(NamedTuple):
    x: torch.Tensor


def prepare_silu_mul(world: World, call: SiluCall, plan: Plan) -> Run:
    if not call.columns:
        return lambda operands, out: None
    launch = silu_mul_launch(world, call.m, call.columns, call.stride, call.interleave)
    return lambda operands, out: launch(world.current_stream(), x=operands.x, out=out)


class SiluMul(Local[SiluCall]):
    """The op silu(gate) * up. The options are columns and interleave."""

    name = _OP
    signature = "Tensor x, SymInt columns, SymInt interleave"
    operand_type = SiluOperands
    runs = {Sequential: prepare_silu_mul}
    batch_invariant_plans = (Sequential,)

    def check(self, world: World, operands: SiluOperands, options: CallOptions) -> SiluCall:
        (x,), (columns, interleave) = operands, options
        check_device(_OP, world, "x", x)
        if x.dim() != 2 or x.shape[1] % 2:
            raise ValueError(f"{_OP}: x must be [M, 2I], gate then up, got {dims(x)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{_OP}: x is {dims(x)}; bfloat16 and float16 are supported")
        return SiluCall(x.shape[0], columns, x.shape[1], interleave, x.dtype)

    def outputs(self, world: World, call: SiluCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.columns), call.dtype)]

    def sizes(self, call: SiluCall) -> tuple[int, int, int]:
        return call.m, call.columns, 1

    def backward(self, world: World, context: Backward) -> list[torch.Tensor | None]:
        (x,), (dy,), (_, interleave) = context.saved, context.gradients, context.options
        assert x is not None and dy is not None
        x, dy = x.contiguous(), dy.contiguous()
        dx = world.empty(tuple(x.shape), x.dtype)
        if x.numel():
            (rows, columns), stride = dy.shape, x.shape[1]
            launch = _elementwise(world, backward_kernel, rows, columns, stride, stride // 2, interleave)
            launch(world.current_stream(), dy=dy, x=x, dx=dx)
        return [dx]


SILU_MUL = registered(SiluMul())


def silu_mul(x: torch.Tensor, *, world: World, **removed: Never) -> torch.Tensor:
    """Return silu(gate) * up [M, I], the activation of a Llama MLP. x [M, 2 I] contains the gate columns, followed by
    the up columns.

    One launch computes the result in float32, and another launch computes the gradient. x is bfloat16 or float16 on
    `world.device`. Raises ValueError or TypeError for any other x. No rank waits for another.

    Examples:
        >>> x = torch.ones(2, 16).bfloat16()  # gate [2, 8], then up [2, 8]
        >>> weft.spmd(lambda world: weft.silu_mul(x, world=world)[0, 0].item(), 1, backend="emulated")
        [0.73046875]
    """
    if removed:
        raise unexpected(_OP, removed)
    columns = columns_of(_OP, x)
    return silu_mul_blocks(x, columns, columns, world)


def silu_mul_quantized(
    x: torch.Tensor, recipe: str, *, scale: torch.Tensor | None = None, world: World
) -> ScaledTensor:
    """Return `silu_mul` in 8 bits.

    One launch computes the values and their scales. The function has no gradient. recipe and scale are as in
    `weft.quantize`, but the recipe "tensor" requires a scale. Raises the errors of `weft.quantize`.

    Examples:
        >>> x = torch.ones(2, 32).bfloat16()
        >>> weft.spmd(lambda world: weft.silu_mul_quantized(x, "row", world=world).values.shape, 1, backend="emulated")
        [torch.Size([2, 16])]
    """
    columns = columns_of("silu_mul_quantized", x)
    return scaled_rows(world, x, scale, (recipe, columns, columns, 1, False))


def columns_of(op: str, x: torch.Tensor) -> int:
    """Return I for x [M, 2 I]. Raises TypeError or ValueError if x has another dtype or shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: x must be a tensor, got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [M, 2I], gate then up, got {list(x.shape)}")
    return x.shape[1] // 2


def silu_mul_blocks(x: torch.Tensor, columns: int, block: int, world: World) -> torch.Tensor:
    """Return `silu_mul` [M, columns] of x [M, S], in which blocks of `block` gate columns and `block` up columns
    alternate; the last two blocks are padded."""
    return SILU_MUL(world, Sequential(), SiluOperands(x), (columns, block))


def launch_silu_mul(x: torch.Tensor, out: torch.Tensor, world: World, interleave: int) -> None:
    """Compute out [M, I] from x [M, S] on the current stream (`silu_mul_launch`)."""
    rows, columns = out.shape
    if rows and columns:
        silu_mul_launch(world, rows, columns, x.shape[1], interleave)(world.current_stream(), x=x, out=out)


def silu_mul_launch(world: World, rows: int, columns: int, stride: int, interleave: int) -> Launch:
    """Return the launch that computes out [rows, columns] = silu(gate) * up. In x [rows, stride] blocks of `interleave`
    gate columns and `interleave` up columns alternate; the last two blocks are padded."""
    return _elementwise(world, silu_mul_kernel, rows, columns, stride, columns, interleave)


@prepared
def _elementwise(
    world: World, kernel: JITFunction, rows: int, columns: int, stride: int, width: int, interleave: int
) -> Launch:
    """Return the launch. A row of the kernel's input has `stride` elements, and the kernel's tiles of R x C elements
    cover `width` columns."""
    block = world.backend.scale.gate_block
    c = min(1 << (width - 1).bit_length(), block)
    r = block // c
    programs = min(world.sm_count * 8, -(-rows // r) * -(-width // c))
    sizes = dict(rows=rows, N=columns, stride=stride, INTERLEAVE=interleave, R=r, C=c)
    return Launch(world, kernel, programs, dict(num_warps=8), **sizes)
