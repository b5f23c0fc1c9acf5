"""The recipes by which 8-bit operands are scaled (compute/scaled_gemm.py): the recipe that a call's scales mean, and
checks of operands and plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from ..architectures import ADA, lacks
from ..compute.gemm import Tile
from ..compute.scaled_gemm import BLOCK, BY_BLOCK, BY_ROW, BY_TENSOR
from ..errors import Unsupported
from ..lang.jit import constants
from ..plans import Fused, FusedGather, FusedGatherByCopies, Plan, TileShape
from ..tensor_checks import DTYPES, check_device, dims
from ..world import World

E4M3 = torch.float8_e4m3fn
SCALINGS = {"tensor": BY_TENSOR, "row": BY_ROW, "block": BY_BLOCK}
SCALE_BLOCK: int = BLOCK.value


@dataclass(frozen=True)
class Recipe:
    """How the 8-bit operands of a product are scaled. scaling: "tensor", "row" or "block". fast_accum: sums stay in the
    tensor cores' accumulators, except for "block", whose sums are always added in float32."""

    scaling: str
    fast_accum: bool = False

    @property
    def promotes(self) -> bool:
        """Return whether every step of K is added in float32."""
        return self.scaling == "block" or not self.fast_accum


class ScaledFactors(NamedTuple):
    """The operands of a GEMM x @ weight.T + bias, with scales for x and weight in e4m3."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    weight_scale: torch.Tensor | None = None

    @property
    def scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.x_scale, self.weight_scale


def scales_of_part(recipe: Recipe | None, x_scale: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    """Return the scales of some rows of x."""
    return x_scale if recipe is None or x_scale is None or recipe.scaling == "tensor" else x_scale[rows]


def recipe_of(op: str, world: World, operands: ScaledFactors, fast_accum: bool) -> Recipe:
    """Return the recipe that the scales' shapes mean, for x in e4m3. Raises the errors of `check_product`."""
    x, weight, _, x_scale, weight_scale = operands
    if weight.dtype != E4M3:
        raise TypeError(f"{op}: weight is {dims(weight)}; float8_e4m3fn, as x, is supported")
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        if scale is None:
            raise ValueError(f"{op}: x is {dims(x)}: x_scale and weight_scale are needed, and {name} is None")
        check_device(op, world, name, scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{op}: {name} is {dims(scale)}; float32 is needed")
    (_, k), n = x.shape, weight.shape[0]
    for name, size, word in (("K", k, 16), ("N", n, 8)):
        if size % word:
            raise ValueError(
                f"{op}: {name} {size} of x {dims(x)} and weight {dims(weight)} must be a multiple of {word}"
            )
    if missing := lacks(world.capability, ADA, "products of 8-bit operands"):
        raise Unsupported(f"{op}: {missing}")
    assert x_scale is not None and weight_scale is not None
    return Recipe(_scaling(op, x, weight, x_scale, weight_scale), fast_accum)


def _scaling(op: str, x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor) -> str:
    (m, k), n = x.shape, weight.shape[0]
    shapes, blocks = (tuple(x_scale.shape), tuple(weight_scale.shape)), -(-k // SCALE_BLOCK)
    if shapes == ((m, blocks), (-(-n // SCALE_BLOCK), blocks)):
        if k % SCALE_BLOCK == 0:
            return "block"
        if blocks > 1:
            scales = _quote_scales(x_scale, weight_scale)
            raise ValueError(
                f"{op}: K {k} of x {dims(x)} must be a multiple of {SCALE_BLOCK} for scales by block, {scales}"
            )
    if x_scale.numel() == weight_scale.numel() == 1:
        return "tensor"
    if shapes[0] in ((m,), (m, 1)) and shapes[1] in ((n,), (n, 1), (1, n)):
        return "row"
    raise ValueError(
        f"{op}: {_quote_scales(x_scale, weight_scale)} fit no recipe for x {dims(x)} and weight {dims(weight)}: "
        f"by tensor [1] and [1]; by row [{m}, 1] and [{n}, 1]; by block [{m}, {blocks}] "
        f"and [{-(-n // SCALE_BLOCK)}, {blocks}], for K a multiple of {SCALE_BLOCK}"
    )


def _quote_scales(x_scale: torch.Tensor, weight_scale: torch.Tensor) -> str:
    return f"x_scale {list(x_scale.shape)} and weight_scale {list(weight_scale.shape)}"


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


def validate(
    op: str, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: str = ""
) -> None:
    """Raise ValueError or TypeError for every fault of 16-bit operands that this rank can see by itself; the message
    quotes the operands. others: the other dtypes that the op takes, for the message."""
    check_shapes(op, world, x, weight, bias)
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} is {dims(t)}, x is {dims(x)}: one dtype is needed")
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16 and float16{others} are supported")


def check_product(
    op: str, world: World, operands: ScaledFactors, out_dtype: torch.dtype | None, fast_accum: bool
) -> tuple[Recipe | None, torch.dtype]:
    """Check the operands of x @ weight.T + bias. Return the recipe, or None for 16-bit operands, and the dtype of the
    result. Raises the errors of `validate`, and Unsupported for a GPU that does not multiply 8-bit operands."""
    x, weight, bias, x_scale, weight_scale = operands
    if getattr(x, "dtype", None) != E4M3:
        validate(op, world, x, weight, bias, ", and float8_e4m3fn with scales,")
        for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
            if scale is not None:
                raise TypeError(f"{op}: {name} goes with x and weight in float8_e4m3fn, and x is {dims(x)}")
        if out_dtype not in (None, x.dtype):
            raise TypeError(f"{op}: out_dtype {out_dtype} goes with x in float8_e4m3fn, and x is {dims(x)}")
        return None, x.dtype
    check_shapes(op, world, x, weight, bias)
    recipe, dtype = recipe_of(op, world, operands, fast_accum), out_dtype or torch.bfloat16
    if dtype not in DTYPES:
        raise TypeError(f"{op}: out_dtype {dtype}; bfloat16 and float16 are supported")
    if bias is not None and bias.dtype != dtype:
        raise TypeError(f"{op}: bias is {dims(bias)}, and the result {dtype}: one dtype is needed")
    return recipe, dtype


P = TypeVar("P", bound=Plan)


def unfit(recipe: Recipe, tile: TileShape) -> str | None:
    """Return why 8-bit operands of a recipe do not suit the tiles of a plan, or None if they do."""
    if recipe.scaling != "block" or (tile.block_k == SCALE_BLOCK and SCALE_BLOCK % tile.block_n == 0):
        return None
    return f"scales by block need tiles of block_k {SCALE_BLOCK} and block_n at most {SCALE_BLOCK}, not {tile}"


def fit_plan(plan: P, recipe: Recipe) -> P:
    """Return the plan with tiles for 8-bit operands instead of those for 16-bit operands. A step of K has as many
    bytes. If sums are promoted, tiles are 128 x 128, for two programs on each SM; or for one program with twice as many
    warps, if another kernel's programs run on the same SMs."""
    if not isinstance(plan, Fused):
        return plan
    tile = plan.tile
    if tile.block_k == 64 or recipe.scaling == "block":
        tile = replace(tile, block_k=SCALE_BLOCK)
    if not recipe.promotes:
        return replace(plan, tile=tile)
    wide = tile.block_n > SCALE_BLOCK
    if wide:
        tile = replace(tile, block_m=128, block_n=SCALE_BLOCK, warps=8, stages=4)
    if isinstance(plan, FusedGather | FusedGatherByCopies):
        if wide:
            tile = replace(tile, warps=4, stages=3)
        return replace(plan, tile=tile, per_sm=2 if wide else plan.per_sm, flatten=False)
    return replace(plan, tile=tile)


def block_rows(tile: TileShape, recipe: Recipe | None) -> int:
    """Return the rows of the blocks in which tiles are loaded and stored. If sums are promoted, a block has half a
    tile's rows (compute/scaled_gemm.py)."""
    return tile.block_m // 2 if recipe is not None and recipe.promotes else tile.block_m


def scaled_tile(tile: TileShape, group_m: int, recipe: Recipe) -> Tile:
    """Return the tile as kernels take it."""
    return constants(
        Tile,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        GROUP_M=group_m,
        TRANS_B=False,
        SCALED=SCALINGS[recipe.scaling].value,
        PROMOTE=recipe.promotes,
    )
