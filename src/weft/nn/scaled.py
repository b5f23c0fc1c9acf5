"""Modules with 8-bit weights: the scales of the weights, named as in checkpoints, and 8-bit activations.

    "row"     weight_scale [N, 1], one for each output channel (compressed-tensors, "FP8-dynamic"); a single element, as
              in a checkpoint with one scale for each tensor, is used for every channel
    "block"   weight_scale_inv [N / 128, K / 128] (DeepSeek-V3, Qwen3-FP8, Transformers' FineGrainedFP8)

Activations are quantized dynamically, by the same recipe and with scales of their own rows. A checkpoint's
`input_scale` is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn

from ..compute.quantize import LARGEST
from ..ops.quantize import quantize
from ..scaled_tensor import E4M3, SCALE_BLOCK, ScaledTensor, scales_shape
from ..world import World
from .sharded import Sharded, gathered

NAMES = {"row": "weight_scale", "block": "weight_scale_inv"}
Activation = torch.Tensor | ScaledTensor


def in_shape(value: torch.Tensor, shape: torch.Size, ranks: int, dim: int | None) -> torch.Tensor:
    """Return a checkpoint's scale in the shape of this rank's scale. The checkpoint's scale may also be the scale of
    all `ranks`, which split it along `dim`."""
    if value.numel() == 1:
        return value.reshape(1, 1).expand(shape)
    whole = list(shape)
    if dim is not None and value.numel() == shape.numel() * ranks:
        whole[dim] *= ranks
    return value.reshape(whole) if value.numel() == torch.Size(whole).numel() else value


def quantized(x: Activation, weight: ScaledTensor, world: World) -> ScaledTensor:
    """Return x in 8 bits, for the GEMM with the weight; an x that is already quantized is returned unchanged."""
    return x if isinstance(x, ScaledTensor) else quantize(x, weight.recipe, world=world)


class ProductKeywords(TypedDict, total=False):
    """The keyword arguments that configure 8-bit operands of an op with a GEMM."""

    out_dtype: torch.dtype | None
    use_fast_accum: bool


def product_operands(
    x: Activation, weight: Activation, dtype: torch.dtype, world: World
) -> tuple[Activation, ProductKeywords]:
    """Return x as the operand for the weight, quantized if the weight has 8 bits, and the keyword arguments for a
    result of `dtype`."""
    if not isinstance(weight, ScaledTensor):
        return x, {}
    return quantized(x, weight, world), ProductKeywords(out_dtype=dtype, use_fast_accum=True)


class ScaledModule(Sharded):
    """A module whose weights may have 8 bits. If ranks split a weight's columns, its row scales are computed from whole
    rows, and so are the same on all ranks. If ranks split a weight's columns, its scales by row are computed from whole
    rows, and so are the same on all ranks."""

    def __init__(self, world: World, dtype: torch.dtype, recipe: str | None) -> None:
        super().__init__(world, dtype)
        self.dtype, self.recipe = dtype, recipe
        if recipe not in (None, *NAMES):
            raise ValueError(f"{type(self).__name__}: recipe {recipe!r} is not one of {sorted(NAMES)}")
        self.scales_name = None if recipe is None else NAMES[recipe]

    def add_matrix(self, name: str, rows: Sequence[int], k: int) -> None:
        """Add the parameter `name`, a weight of zeros with k columns, whose parts have these numbers of rows. Also add
        `name`_scale, the scales of an 8-bit weight, or None. In 8 bits, neither parameter has a gradient. Raises
        ValueError if a part is not divisible into blocks."""
        n, device, scale_name = sum(rows), self.world.device, f"{name}_scale"
        if self.recipe is None:
            self.register_parameter(name, nn.Parameter(torch.zeros(n, k, dtype=self.dtype, device=device)))
            self.register_parameter(scale_name, None)
            return
        for part in rows:
            weight = f"{type(self).__name__}: this rank's weight [{part}, {k}]"
            if self.recipe == "block" and (part % SCALE_BLOCK or k % SCALE_BLOCK):
                raise ValueError(f"{weight} is not of whole blocks of {SCALE_BLOCK} x {SCALE_BLOCK}")
            if part % 8 or k % 16:
                raise ValueError(f"{weight} in 8 bits needs N a multiple of 8 and K of 16")
        shape = scales_shape(self.recipe, n, k, SCALE_BLOCK)
        for parameter, t in ((name, torch.zeros(n, k).to(E4M3)), (scale_name, torch.ones(shape))):
            self.register_parameter(parameter, nn.Parameter(t.to(device), requires_grad=False))

    def name_scales(self, *prefixes: str) -> None:
        """Name the scales of the weights with these prefixes in the state dict. Ranks split block scales like the
        weights, but row scales have no columns to split."""
        if self.scales_name is None:
            return
        for prefix in prefixes:
            dim = self.sharded_dim[f"{prefix}weight"]
            split = None if dim == 1 and self.recipe == "row" else dim
            self.sharded_dim = self.sharded_dim | {f"{prefix}{self.scales_name}": split}
        self.ignored = tuple(f"{prefix}input_scale" for prefix in prefixes)

    def weight_operand(self, name: str) -> Activation:
        """Return the weight `name` of this module as an operand of ops."""
        weight, scales = getattr(self, name), getattr(self, f"{name}_scale")
        return weight if scales is None or self.recipe is None else ScaledTensor(weight, scales, self.recipe)

    def scale_name(self, name: str) -> str | None:
        """Return the name of the scales of an 8-bit weight, or None for any other tensor."""
        shard = self.get_shard(name)
        if shard is None or shard.dtype != E4M3:
            return None
        return f"{name.removesuffix('weight')}{self.scales_name}"

    @torch.no_grad()
    def fill(self, init: dict[str, float]) -> None:
        """Draw values as `Sharded.fill` does. The scales of 8-bit weights depend only on the bound, so the scales of
        one row are the same on all ranks."""
        scales = {name: scale for name in init if (scale := self.scale_name(name)) is not None}
        super().fill({name: LARGEST.value if name in scales else bound for name, bound in init.items()})
        for name, scale in scales.items():
            self.get_shard(scale).fill_(init[name] / LARGEST.value)  # type: ignore[union-attr]

    def local_shard(self, name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        if name.rpartition(".")[2] in NAMES.values():
            value = in_shape(value, shape, self.world.size, self.sharded_dim[name])
        return super().local_shard(name, value, shape)

    def unsharded(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        if name.rpartition(".")[2] in NAMES.values() and self.sharded_dim[name] is None:
            of_ranks = gathered(self.world, shard, 0).view(self.world.size, *shard.shape)
            if not torch.equal(of_ranks.view(torch.int32), shard.expand_as(of_ranks).contiguous().view(torch.int32)):
                raise ValueError(
                    f"{type(self).__name__}: {name} {list(shard.shape)} differs between ranks, whose columns of the "
                    "weight are in units of it; load the unsharded weight to have them quantized alike"
                )
        return super().unsharded(name, shard)

    def converted(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> Mapping[str, torch.Tensor]:
        in_8_bits = {**state_dict}
        for name in self.sharded_dim:
            scale_name, value = self.scale_name(name), state_dict.get(prefix + name)
            if scale_name is not None and value is not None and value.dtype != E4M3:
                in_8_bits |= self._quantized(prefix, name, scale_name, value)
        return in_8_bits

    def _quantized(self, prefix: str, name: str, scale_name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a 16-bit weight of a state dict in 8 bits, and its scales, by name. Raises ValueError for row scales
        of a shard whose columns ranks split: the scale of a row depends on the columns of all ranks."""
        shard = self.get_shard(name)
        assert shard is not None and self.recipe is not None
        part = self.local_shard(name, value, shard.shape)
        if part is None:
            return {}  # the caller reports the shapes that match
        if part is value and self.world.size > 1 and self.sharded_dim[scale_name] is None:
            raise ValueError(
                f"{prefix + name}: the scales of 8-bit rows cannot be computed from a 16-bit shard "
                f"{list(value.shape)} of one of {self.world.size} ranks; load the unsharded tensor"
            )
        weight, scale, _ = quantize(value.to(self.world.device, self.dtype), self.recipe, weight=True, world=self.world)
        return {prefix + name: weight, prefix + scale_name: scale}
