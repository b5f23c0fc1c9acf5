"""The options and tiles of GEMMs with 8-bit operands (compute/scaled_gemm.py), and the checks of their operands and
plans."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from ..architectures import lacks
from ..compute.gemm import Tile
from ..compute.scaled_gemm import BY_BLOCK, BY_ROW, BY_TENSOR, Scales
from ..errors import Unsupported
from ..lang.jit import constants
from ..plans import Fused, FusedGather, FusedGatherByCopies, Plan, TileShape
from ..scaled_tensor import E4M3, SCALE_BLOCK, ScaledTensor, Scaling, scales_shape
from ..tensor_checks import DTYPES, check_device, dims
from ..torch_library import CallOptions
from ..world import World

SCALINGS = {"tensor": BY_TENSOR, "row": BY_ROW, "block": BY_BLOCK}


# The fields of ScaledFactors and ProductOptions, as strings for schemas of torch.library.
SCALED_FACTORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? x_scale, Tensor? weight_scale"
PRODUCT_OPTIONS = "str? recipe, ScalarType? out_dtype, bool use_fast_accum"


class ScaledFactors(NamedTuple):
    """The operands of a GEMM x @ weight.T + bias. The values and the scales of an 8-bit x and weight are separate
    operands."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None


class ProductOptions(NamedTuple):
    """Every op with a GEMM has these options for 8-bit operands. `recipe` is None for 16-bit operands. If `out_dtype`
    is None, the result has the default dtype."""

    recipe: str | None = None
    out_dtype: torch.dtype | None = None
    fast_accum: bool = False

    @property
    def scaling(self) -> Scaling | None:
        return None if self.recipe is None else Scaling(self.recipe, self.fast_accum)


UNSCALED = ProductOptions()


def scaled_factors(
    op: str,
    x: torch.Tensor | ScaledTensor,
    weight: torch.Tensor | ScaledTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast_accum: bool,
) -> tuple[ScaledFactors, CallOptions]:
    """Return the values and scales as separate operands, and the fields of `ProductOptions`."""
    if not isinstance(x, ScaledTensor) and not isinstance(weight, ScaledTensor):
        return ScaledFactors(x, weight, bias), (None, out_dtype, fast_accum)
    if not isinstance(x, ScaledTensor) or not isinstance(weight, ScaledTensor):
        kinds = f"x is a {type(x).__name__} and weight a {type(weight).__name__}"
        raise TypeError(f"{op}: {kinds}: both are a weft.ScaledTensor, as weft.quantize returns it, or neither is")
    (values, scales, by_x), (weight_values, weight_scales, by_weight) = x, weight
    if by_x != by_weight:
        raise ValueError(f"{op}: x has scales by {by_x}, and weight by {by_weight}: one recipe is needed")
    return ScaledFactors(values, weight_values, bias, scales, weight_scales), (by_x, out_dtype, fast_accum)


def check_name(op: str, recipe: str) -> None:
    """Raise ValueError for a recipe that does not exist."""
    if recipe not in SCALINGS:
        raise ValueError(f"{op}: recipe {recipe!r} is not one of {sorted(SCALINGS)}")


def check_quantized(
    op: str, world: World, x: torch.Tensor, columns: int, recipe: str, scale: torch.Tensor | None, static: bool
) -> int:
    """Check the arguments of a function that computes rows of `columns` columns from x and quantizes them. Return the
    number of elements in a row that share a scale, or 0 for a scale by tensor. `scale` is the scale by tensor that the
    caller passed. With `static`, the recipe "tensor" requires it."""
    check_name(op, recipe)
    group = {"tensor": 0, "row": columns, "block": SCALE_BLOCK}[recipe]
    if group and columns % group:
        problem = f"{columns} columns of x {dims(x)} are not a multiple of {group}"
        raise ValueError(f"{op}: {problem}, for scales by block")
    if (recipe != "tensor") if scale is not None else (static and recipe == "tensor"):
        raise ValueError(f"{op}: a scale goes with recipe 'tensor', got {recipe!r} and scale {scale}")
    if scale is not None:
        check_device(op, world, "scale", scale)
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(f"{op}: scale {dims(scale)} must be float32 [1]")
    if missing := lacks(world.backend.capability, "e4m3", "results in float8_e4m3fn"):
        raise Unsupported(f"{op}: {missing}")
    return group


def scales_of(operands: ScaledFactors) -> Scales | None:
    """Return the scales of 8-bit operands as an argument of kernels, or None for 16-bit operands."""
    if operands.x_scale is None or operands.weight_scale is None:
        return None
    return Scales(operands.x_scale, operands.weight_scale)


def scales_of_part(scaling: Scaling | None, x_scale: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return the scales of the given rows of x."""
    return x_scale if scaling is None or x_scale is None or scaling.recipe == "tensor" else x_scale[rows]


def check_scaled(op: str, world: World, operands: ScaledFactors, scaling: Scaling) -> None:
    """Raise ValueError or TypeError for 8-bit operands that cannot be multiplied; the message quotes them. Raise
    Unsupported if the GPU cannot multiply such operands."""
    (x, weight, _, x_scale, weight_scale), kind = operands, scaling.recipe
    check_name(op, kind)
    n, k = weight.shape
    for size_name, size, word in (("K", k, SCALE_BLOCK if kind == "block" else 16), ("N", n, 8)):
        if size % word:
            quoted = f"x {dims(x)} and weight {dims(weight)}"
            raise ValueError(f"{op}: {size_name} {size} of {quoted} must be a multiple of {word}, for scales by {kind}")
    for name, values, scales, block_rows in (("x", x, x_scale, 1), ("weight", weight, weight_scale, SCALE_BLOCK)):
        if values.dtype != E4M3:
            raise TypeError(f"{op}: {name}.values is {dims(values)}; float8_e4m3fn is supported")
        check_device(op, world, f"{name}.scales", scales)
        assert scales is not None
        if scales.dtype != torch.float32:
            raise TypeError(f"{op}: {name}.scales is {dims(scales)}; float32 is needed")
        shape, actual = scales_shape(kind, len(values), k, block_rows), tuple(scales.shape)
        is_vector = kind != "block" and scales.numel() == max(actual, default=1) == shape[0]
        if actual != shape and not is_vector:
            problem = f"{name}.scales {list(actual)} do not fit {name}.values {dims(values)}"
            raise ValueError(f"{op}: {problem}: by {kind} they are {list(shape)}")
    if missing := lacks(world.backend.capability, "e4m3", "products of 8-bit operands"):
        raise Unsupported(f"{op}: {missing}")


def check_shapes(op: str, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError or TypeError for tensors that cannot be multiplied; the message quotes them."""
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is not None or name != "bias":
            check_device(op, world, name, t)
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"{op}: x and weight must be 2-D, got x {dims(x)} and weight {dims(weight)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x {dims(x)} and weight {dims(weight)} disagree on K (weight is [out, in] as in nn.Linear)"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"{op}: empty weight {dims(weight)}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"{op}: bias {dims(bias)} does not match weight {dims(weight)}")


def validate(op: str, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError or TypeError for every error in 16-bit operands that this rank can detect alone. The message
    quotes the operands."""
    check_shapes(op, world, x, weight, bias)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} is {dims(t)}, x is {dims(x)}: one dtype is needed")
    if x.dtype not in DTYPES:
        hint = ", and float8_e4m3fn in a weft.ScaledTensor(values, scales, recipe)" if x.dtype == E4M3 else ""
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16 and float16 are supported{hint}")


def check_product(
    op: str, world: World, operands: ScaledFactors, options: ProductOptions
) -> tuple[Scaling | None, torch.dtype]:
    """Check the operands of x @ weight.T + bias. Return the scaling of 8-bit operands, or None for 16-bit operands, and
    the dtype of the result. Raises the errors of `validate` and of `check_scaled`."""
    (x, weight, bias, *_), scaling, out_dtype = operands, options.scaling, options.out_dtype
    if scaling is None:
        validate(op, world, x, weight, bias)
        if out_dtype not in (None, x.dtype):
            raise TypeError(f"{op}: out_dtype {out_dtype} goes with x in float8_e4m3fn, and x is {dims(x)}")
        return None, x.dtype
    check_shapes(op, world, x, weight, bias)
    dtype = out_dtype or torch.bfloat16
    check_scaled(op, world, operands, scaling)
    if dtype not in DTYPES:
        raise TypeError(f"{op}: out_dtype {dtype}; bfloat16 and float16 are supported")
    if bias is not None and bias.dtype != dtype:
        raise TypeError(f"{op}: bias is {dims(bias)}, and the result {dtype}: one dtype is needed")
    return scaling, dtype


P = TypeVar("P", bound=Plan)


def tile_unsupported(scaling: Scaling, tile: TileShape) -> str | None:
    """Return the reason why the tiles of a plan do not suit 8-bit operands, or None if they do."""
    if not scaling.by_block or (tile.block_k == SCALE_BLOCK and SCALE_BLOCK % tile.block_n == 0):
        return None
    return f"scales by block need tiles of block_k {SCALE_BLOCK} and block_n at most {SCALE_BLOCK}, not {tile}"


def with_scaled_tiles(plan: P, scaling: Scaling) -> P:
    """Return the plan with tiles for 8-bit instead of 16-bit operands. The number of bytes in a K step stays the same.
    If sums are promoted, tiles are 128 x 128. With such tiles, each SM runs two programs, or, if programs of a second
    kernel run on the same SMs, one program with twice as many warps."""
    if not isinstance(plan, Fused):
        return plan
    tile = plan.tile
    if tile.block_k == 64 or scaling.by_block:
        tile = replace(tile, block_k=SCALE_BLOCK)
    if not scaling.promotes:
        return replace(plan, tile=tile)
    wide = tile.block_n > SCALE_BLOCK
    if wide:
        tile = replace(tile, block_m=128, block_n=SCALE_BLOCK, warps=8, stages=4)
    if isinstance(plan, FusedGather | FusedGatherByCopies):
        if wide:
            tile = replace(tile, warps=4, stages=3)
        return replace(plan, tile=tile, per_sm=2 if wide else plan.per_sm, flatten=False)
    return replace(plan, tile=tile)


def block_rows(tile: TileShape, scaling: Scaling | None) -> int:
    """Return the number of rows in the blocks that kernels load and store. If sums are promoted, a block has half a
    tile's rows (compute/scaled_gemm.py)."""
    return tile.block_m // 2 if scaling is not None and scaling.promotes else tile.block_m


def scaled_tile(tile: TileShape, group_m: int, scaling: Scaling) -> Tile:
    """Return the tile as an argument of kernels."""
    return constants(
        Tile,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        GROUP_M=group_m,
        TRANS_B=False,
        SCALED=SCALINGS[scaling.recipe].value,
        PROMOTE=scaling.promotes,
    )
