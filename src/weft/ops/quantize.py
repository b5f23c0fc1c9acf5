"""Quantization of the rows of a matrix or of SiLU-mul to 8 bits. One launch computes the rows and their scales. No rank
waits for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..compute.quantize import LARGEST, LEAST, Groups, quantize_rows
from ..kernel_launch import Launch
from ..lang.jit import constants
from ..op import Local, RowsCall, registered
from ..plans import Plan, Sequential
from ..prepared import Run
from ..scaled_tensor import E4M3, SCALE_BLOCK, ScaledTensor, scales_shape
from ..tensor_checks import DTYPES, bulk, check_device, dims
from ..torch_library import CallOptions
from ..world import World
from .recipes import check_quantized

_OP = "quantize"
IN_REGISTERS = 16384  # the number of columns that a program holds in registers


class QuantizeOperands(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizeCall(RowsCall):
    """A checked call. The result is [m, n] for x [m, stride]. `interleave` is 0, or the size of the alternating blocks
    of gate and up columns in x. `block_rows` rows share a scale by block. With `by_columns`, the scales by block are
    stored column after column. With `static_scale`, the scale is an operand."""

    n: int
    stride: int
    dtype: torch.dtype
    recipe: str
    interleave: int
    block_rows: int
    by_columns: bool
    static_scale: bool

    @property
    def scales(self) -> tuple[int, ...]:
        """Return the shape of the scales."""
        return scales_shape(self.recipe, self.m, self.n, self.block_rows)

    @property
    def by_tensor(self) -> bool:
        return self.recipe == "tensor"


def prepare_quantize(world: World, call: QuantizeCall, plan: Plan) -> Run:
    by_tensor, by_columns, launch = call.by_tensor, call.by_columns, _launch(world, call) if call.n else None
    shape = call.scales[::-1] if by_columns else call.scales

    def run(operands: QuantizeOperands, out: torch.Tensor) -> tuple[torch.Tensor]:
        (x, scale), stream, scales = operands, world.current_stream(), world.empty(shape, torch.float32)
        if scale is not None:
            world.copy(scales, scale.view(1), stream)
        elif by_tensor:
            world.call(lambda: scales.copy_(_largest(x) / LARGEST.value), [x], [scales], stream)
        if by_columns:
            scales = scales.t()
        if launch is not None:
            launch(stream, x=x, out=out, scales=scales)
        return (scales,)

    return run


class Quantize(Local[QuantizeCall]):
    """The op quantize. The options are the fields of `QuantizeCall` and columns, the number of columns of the result.
    The results are the rows and the scales."""

    name = _OP
    signature = (
        "Tensor x, Tensor? scale, str recipe, SymInt columns, SymInt interleave, SymInt block_rows, bool by_columns"
    )
    results = 2
    operand_type = QuantizeOperands
    runs = {Sequential: prepare_quantize}

    def check(self, world: World, operands: QuantizeOperands, options: CallOptions) -> QuantizeCall:
        (x, scale), (recipe, columns, interleave, block_rows, by_columns) = operands, options
        op = "silu_mul_quantized" if interleave else _OP
        check_device(op, world, "x", x)
        if x.dim() != 2:
            raise ValueError(f"{op}: x must be 2-D, got {dims(x)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{op}: x is {dims(x)}; bfloat16 and float16 are supported")
        check_quantized(op, world, x, columns, recipe, scale, static=interleave > 0)
        m, stride = x.shape
        static = scale is not None
        return QuantizeCall(m, columns, stride, x.dtype, recipe, interleave, block_rows, by_columns, static)

    def outputs(self, world: World, call: QuantizeCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), E4M3), (call.scales, torch.float32)]

    def sizes(self, call: QuantizeCall) -> tuple[int, int, int]:
        return call.m, call.n, 1

    def dense_operands(self, plan: Plan, operands: QuantizeOperands) -> QuantizeOperands:
        return QuantizeOperands(*bulk(operands))  # type: ignore[arg-type]


QUANTIZE = registered(Quantize())


def _largest(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x.new_full((), LEAST.value, dtype=torch.float32)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().clamp_min(LEAST.value)


def _launch(world: World, call: QuantizeCall) -> Launch:
    block, by_row, shared = world.backend.scale.gate_block, call.recipe == "row", call.block_rows > 1
    width = 1 << (call.n - 1).bit_length()
    cols = min(width, IN_REGISTERS if by_row else SCALE_BLOCK if shared else max(block, SCALE_BLOCK))
    if not (by_row or shared or call.by_tensor):
        cols = min(max(cols, SCALE_BLOCK), 1024)
    looped = by_row and cols < call.n
    rows = call.block_rows if shared else 1 if looped else max(1, block // cols)
    groups, last = (1, 1) if call.by_tensor else call.scales
    return Launch(
        world,
        quantize_rows,
        min(world.sm_count * 8, -(-call.m // rows) * (1 if looped else -(-call.n // cols))),
        dict(num_warps=16 if cols > 8192 or shared else 8, local=True),
        rows=call.m,
        N=call.n,
        stride=call.stride,
        row_stride=1 if call.by_columns else last,
        group_stride=groups if call.by_columns else 1,
        groups=constants(
            Groups,
            GROUP=cols if by_row else SCALE_BLOCK,
            SHARED=shared,
            STATIC=call.by_tensor,
            LOOPED=looped,
            INTERLEAVE=call.interleave,
            R=rows,
            C=cols,
        ),
    )


def quantize(
    x: torch.Tensor,
    recipe: str,
    *,
    scale: torch.Tensor | None = None,
    weight: bool = False,
    by_columns: bool = False,
    world: World,
) -> ScaledTensor:
    """Quantize x to 8 bits, as an operand of the ops with a GEMM, and return the result.

    Args:
        x: [M, K], bfloat16 or float16.
        recipe: as in `weft.ScaledTensor`. K is a multiple of 128 for "block".
        scale: float32 [1], for "tensor". x is divided by this scale and clamped to +-448. None: torch first computes
            the scale from the largest magnitude in x.
        weight: if true, each scale by block covers 128 x 128 elements, as in a weight.
        by_columns: if true, scales by block are stored column after column, the layout that DeepGEMM reads.
            `weft.matmul` supports both layouts; ops across ranks first copy such scales to the other layout.

    A scale is the largest magnitude of its elements divided by 448; each element is divided by its scale and rounded to
    nearest.

    Returns:
        A `weft.ScaledTensor`, with scales [M, 1], [M, K / 128], [M / 128 rounded up, K / 128] (weight) or [1].

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid, or x requires a gradient; the message quotes it.
        Unsupported: the GPU does not support e4m3.

    Examples:
        >>> x = torch.ones(2, 16).bfloat16()
        >>> def rank(world):
        ...     y = weft.quantize(x, "row", world=world)
        ...     return tuple(y.values.shape), tuple(y.scales.shape)
        >>> weft.spmd(rank, 1, backend="emulated")
        [((2, 16), (2, 1))]
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{_OP}: x must be a tensor, got {type(x).__name__}")
    columns = x.shape[1] if x.dim() == 2 else 0
    by_block = recipe == "block"
    options = recipe, columns, 0, SCALE_BLOCK if weight and by_block else 1, by_columns and by_block
    return scaled_rows(world, x, scale, options)


def scaled_rows(world: World, x: torch.Tensor, scale: torch.Tensor | None, options: CallOptions) -> ScaledTensor:
    """Return the op's result with these options as a ScaledTensor."""
    values, scales = QUANTIZE(world, Sequential(), QuantizeOperands(x, scale), options)
    return ScaledTensor(values, scales, options[0])
