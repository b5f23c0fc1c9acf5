"""Modules with 8-bit weights: the weights' scales, under the names that checkpoints use, and 8-bit activations.

    "row"     weight_scale [N, 1], one for each output channel (compressed-tensors, "FP8-dynamic"); a single element, as
              in a checkpoint with one scale for each tensor, is used for every channel
    "block"   weight_scale_inv [N / 128, K / 128] (DeepSeek-V3, Qwen3-FP8, Transformers' FineGrainedFP8)

Activations are quantized dynamically, by the same recipe and with scales of their own rows. A checkpoint's
`input_scale` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from ..ops.common import ScaledOptions
from ..ops.quantize import quantize
from ..ops.recipes import E4M3, SCALE_BLOCK
from ..world import World
from .sharded import Sharded

NAMES = {"row": "weight_scale", "block": "weight_scale_inv"}
Activation = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # in 16 bits, or in 8 bits with its scales


def check_recipe(module: str, recipe: str | None, n: int, k: int) -> None:
    """Raise ValueError, which names the `module`, for a recipe that modules do not have, or if its blocks do not divide
    this rank's weight [n, k]."""
    if recipe is None:
        return
    if recipe not in NAMES:
        raise ValueError(f"{module}: recipe {recipe!r} is not one of {sorted(NAMES)}")
    if recipe == "block" and (n % SCALE_BLOCK or k % SCALE_BLOCK):
        raise ValueError(
            f"{module}: this rank's weight [{n}, {k}] is not of whole blocks of {SCALE_BLOCK} x {SCALE_BLOCK}"
        )
    if n % 8 or k % 16:
        raise ValueError(f"{module}: this rank's weight [{n}, {k}] in 8 bits needs N a multiple of 8 and K of 16")


def scale_shape(recipe: str, n: int, k: int) -> tuple[int, int]:
    return (n, 1) if recipe == "row" else (n // SCALE_BLOCK, k // SCALE_BLOCK)


def parameters(recipe: str, n: int, k: int, device: torch.device) -> tuple[nn.Parameter, nn.Parameter]:
    """Return a weight [n, k] of zeros and its scales, as parameters without gradients."""
    weight, scale = torch.zeros(n, k, device=device).to(E4M3), torch.ones(scale_shape(recipe, n, k), device=device)
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def in_shape(value: torch.Tensor, shape: torch.Size, ranks: int, dim: int | None) -> torch.Tensor:
    """Return a checkpoint's scale in the shape of this rank's, or of all `ranks` together, which split it along
    `dim`."""
    if value.numel() == 1:
        return value.reshape(1, 1).expand(shape)
    whole = list(shape)
    if dim is not None and value.numel() == shape.numel() * ranks:
        whole[dim] *= ranks
    return value.reshape(whole) if value.numel() == torch.Size(whole).numel() else value


def quantized_weight(weight: torch.Tensor, recipe: str, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a 16-bit weight in 8 bits, and its scales."""
    return quantize(weight.to(world.device), recipe, weight=True, world=world)


def quantized(x: Activation, recipe: str, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x in 8 bits and its scales; an x that is quantized already is returned unchanged."""
    return x if isinstance(x, tuple) else quantize(x, recipe, world=world)


def scaled_operand(
    x: Activation, scale: torch.Tensor | None, recipe: str | None, dtype: torch.dtype, world: World
) -> tuple[torch.Tensor, ScaledOptions]:
    """Return x and the keyword arguments with which an op multiplies it by a weight with `scale`, for a result of
    `dtype`. Without a recipe these are x unchanged and no keywords."""
    if recipe is None:
        return cast(torch.Tensor, x), {}  # the op raises TypeError for a pair
    rows, x_scale = quantized(x, recipe, world)
    return rows, dict(x_scale=x_scale, weight_scale=scale, out_dtype=dtype, use_fast_accum=True)


class ScaledModule(Sharded):
    """A module whose weights may be of 8 bits. With a `recipe` its state dict has their scales (NAMES), and 16-bit
    weights are rounded to `dtype` and quantized when they are stored."""

    dtype: torch.dtype
    recipe: str | None

    def hold_scales(self, recipe: str, dims: Mapping[str, int | None]) -> None:
        """Name the scales of weights in the state dict. `dims` has, by the prefix of the name, the dimension that ranks
        split."""
        self.sharded_dim = self.sharded_dim | {f"{prefix}{NAMES[recipe]}": dim for prefix, dim in dims.items()}
        self.ignored = tuple(f"{prefix}input_scale" for prefix in dims)

    def local_shard(self, name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        if name.rpartition(".")[2] in NAMES.values():
            value = in_shape(value, shape, self.world.size, self.sharded_dim[name])
        return super().local_shard(name, value, shape)

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        shard = self.get_shard(name)
        assert shard is not None
        if self.recipe is not None and shard.dtype == E4M3 and value.dtype != E4M3:
            value, scale = quantized_weight(value.to(self.dtype), self.recipe, self.world)
            self.set_shard(f"{name.removesuffix('weight')}{NAMES[self.recipe]}", scale)
        shard.copy_(value)
