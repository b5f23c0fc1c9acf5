"""SiLU-mul, the gated activation between the two halves of a Llama MLP. Local: no rank waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton import JITFunction

from ..backends.base import Stream
from ..compute.elementwise import silu_mul as kernel
from ..compute.elementwise import silu_mul_backward as backward_kernel
from ..library import Backward, CallOptions
from ..op import Call, Direct, Local, Operands, check_call, registered
from ..operands import DTYPES, aligned, check_device, dims
from ..plans import Plan, Sequential
from ..world import World

_OP = "silu_mul"


@dataclass(frozen=True)
class SiluCall(Call):
    """out [m, columns] of x [m, stride], which alternates blocks of `interleave` gate and up columns."""

    m: int
    columns: int
    stride: int
    interleave: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.m


class SiluMul(Local[SiluCall]):
    """silu(gate) * up. Options: columns, interleave."""

    name = _OP
    signature = "Tensor x, SymInt columns, SymInt interleave"
    runs = {Sequential: "_run"}

    def check(self, world: World, operands: Operands, options: CallOptions) -> SiluCall:
        (x,), (columns, interleave) = operands, options
        assert x is not None
        validate(x, world)
        return SiluCall(x.shape[0], columns, x.shape[1], interleave, x.dtype)

    def outputs(self, world: World, call: SiluCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.columns), call.dtype)]

    def sizes(self, call: SiluCall) -> tuple[int, int, int]:
        return call.m, call.columns, 1

    def backward(self, world: World, given: Backward) -> list[torch.Tensor | None]:
        (x,), (dy,), (_, interleave) = given.saved, given.gradients, given.options
        assert x is not None and dy is not None
        x, dy = x.contiguous(), dy.contiguous()
        dx = world.empty(tuple(x.shape), x.dtype)
        _launch(backward_kernel, dict(dy=dy, x=x, dx=dx), (*dy.shape, x.shape[1]), x.shape[1] // 2, world, interleave)
        return [dx]

    def direct(self, world: World, call: SiluCall, plan: Plan) -> Direct | None:
        if not call.columns:
            return None
        sizes = call.m, call.columns, call.stride
        launch = _launcher(kernel, sizes, call.columns, world, call.interleave, call.dtype)
        check, finish = world.check, world.finish

        def run(x: torch.Tensor) -> torch.Tensor:
            check()
            out = world.empty((call.m, call.columns), call.dtype)
            finish(launch(dict(x=aligned(x), out=out)))
            return out

        return run

    def _run(self, world: World, call: SiluCall, plan: Plan, operands: Operands, out: torch.Tensor) -> None:
        (x,) = operands
        assert x is not None
        gate(x, out, world, call.interleave)


SILU_MUL = registered(SiluMul())


def silu_mul(x: torch.Tensor, *, world: World) -> torch.Tensor:
    """silu(gate) * up [M, I] for x [M, 2 I], whose columns are gate, then up: the activation of a Llama MLP.

    Computed in float32, in one launch; differentiable, also in one launch. x is bfloat16 or float16 on `world.device`.
    Raises ValueError or TypeError for anything else. No rank waits for another.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"silu_mul: x must be a tensor, got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_mul: x must be [M, 2I], gate then up, got {list(x.shape)}")
    return silu_mul_blocks(x, x.shape[1] // 2, x.shape[1] // 2, world)


def silu_mul_blocks(x: torch.Tensor, columns: int, block: int, world: World) -> torch.Tensor:
    """`silu_mul` [M, columns] of x [M, S] that alternates `block` gate and `block` up columns, the last two padded."""
    return SILU_MUL(world, Sequential(), (x,), (columns, block))


def validate(x: torch.Tensor, world: World) -> None:
    check_call(_OP, world)
    check_device(_OP, world, "x", x)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{_OP}: x must be [M, 2I], gate then up, got {dims(x)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{_OP}: x is {dims(x)}; bfloat16 and float16 are supported")


def gate(x: torch.Tensor, out: torch.Tensor, world: World, interleave: int) -> None:
    """out [M, I] = silu(gate) * up; x [M, S] alternates `interleave` gate, then as many up columns, the last padded."""
    _launch(kernel, dict(x=x, out=out), (*out.shape, x.shape[1]), out.shape[1], world, interleave)


def _launch(
    kernel: JITFunction,
    tensors: dict[str, torch.Tensor],
    sizes: tuple[int, int, int],
    width: int,
    world: World,
    interleave: int,
) -> None:
    if sizes[0] and width:
        _launcher(kernel, sizes, width, world, interleave, tensors["x"].dtype)(tensors)


def _launcher(
    kernel: JITFunction,
    sizes: tuple[int, int, int],
    width: int,
    world: World,
    interleave: int,
    dtype: torch.dtype,
) -> Callable[[dict[str, torch.Tensor]], Stream]:
    """A function that launches the kernel on its tensors, on the current stream, which it returns. sizes: rows, N,
    stride of the kernel; width: columns that its tiles of R x C elements cover."""
    rows, n, stride = sizes
    block = world.scale.gate_block
    c = min(1 << (width - 1).bit_length(), block)
    programs = min(world.sm_count * 8, -(-rows // (block // c)) * -(-width // c))
    numbers = dict(rows=rows, N=n, stride=stride, INTERLEAVE=interleave, R=block // c, C=c)
    key, options = (kernel.fn.__name__, *sizes, interleave, dtype), dict(num_warps=8)

    def launch(tensors: dict[str, torch.Tensor]) -> Stream:
        stream = world.current_stream()
        world.launch(kernel, programs, lambda: dict(**tensors, **numbers), options, stream, key, tensors)
        return stream

    return launch
