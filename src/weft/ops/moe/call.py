"""What one call of an MoE layer computes, and its tensors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...op import Call
from ...tensor_checks import DTYPES, dims
from ...world import World
from .expert_parallel.kernels import CLAMPED, GELU, SWIGLU
from .routing.route_tables import rows_of

NAME = "moe"
MOST_K = 16  # experts of a token
ACTIVATIONS = {"swiglu": SWIGLU.value, "gelu": GELU.value, "gpt_oss": CLAMPED.value}


@dataclass(frozen=True)
class Layer:
    """What one call computes. capacity: C, tokens that a rank has at most, in this call, the same on all ranks. hidden,
    inner: H and I. activation: "swiglu", silu(gate) * up; "gelu", without a gate; "gpt_oss", (up + 1) * gate *
    sigmoid(1.702 gate) with gate at most 7 and up from -7 to 7. max_rows: rows of its experts that a rank has room for;
    None: as many as can come."""

    capacity: int
    experts: int
    k: int
    hidden: int
    inner: int
    dtype: torch.dtype
    activation: str = "swiglu"
    max_rows: int | None = None


class Weights(NamedTuple):
    """The matrices and biases of this rank's El experts. w13 [El, N, H]: N = I for "gelu"; else blocks of
    `world.scale.interleave` gate and as many up rows in turn, the last padded with zeros. w2 [El, H, I]. b13 [El, N],
    laid out as the rows of w13; b2 [El, H]."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


class Kept(NamedTuple):
    """What a call leaves for its backward pass, or None: rows [W, C, H], tokens as they came; both [rows, N], what the
    activation is of, with its bias."""

    rows: torch.Tensor | None = None
    both: torch.Tensor | None = None


NONE_KEPT = Kept()


class MoeOperands(NamedTuple):
    """The operands of `weft.moe.moe`, with the first matrices and their biases flat: [El, N, H] and [El, N]. The
    operator that has a gradient is never given `received`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    received: torch.Tensor | None = None

    @property
    def experts(self) -> Weights:
        return Weights(self.w13, self.w2, self.b13, self.b2)


@dataclass(frozen=True)
class MoeCall(Call):
    """own: tokens of this rank. tokens: of every rank, or None, at most the layer's capacity. Whether there are biases,
    and `own`, is each rank's own, and not told. Of a call with a gradient, keep: what it keeps for its backward pass,
    and block_m: rows of a tile of the plan, by which those that are kept lie; of any other None and 0."""

    own: int
    tokens: tuple[int, ...] | None
    layer: Layer
    keep: str | None = None
    block_m: int = 0

    @property
    def rows(self) -> int:
        """The most tokens of a rank, and never 0: a rank without tokens does not know of the others'."""
        return self.layer.capacity

    def agreed(self) -> dict[str, Hashable]:
        layer = self.layer
        agreed: dict[str, Hashable] = dict(
            rows=self.tokens,
            max_tokens=layer.capacity,
            max_rows=layer.max_rows,
            experts=layer.experts,
            k=layer.k,
            H=layer.hidden,
            I=layer.inner,
            dtype=str(layer.dtype),
            activation=layer.activation,
        )
        return agreed if self.keep is None else dict(agreed, keep=self.keep)

    def trained_outputs(self, world: World) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes of what a call with a gradient returns beside its result: the numbers of rows
        received, and what `Kept` has."""
        layer = self.layer
        made: list[tuple[tuple[int, ...], torch.dtype]] = [((layer.experts // world.size,), torch.int32)]
        if self.keep != "nothing":
            made.append(((world.size, layer.capacity, layer.hidden), layer.dtype))
        if self.keep == "activation":
            made.append(((layer_rows(world, layer, self.block_m), first_columns(world, layer)), layer.dtype))
        return made

    def buffers(self, world: World, operands: MoeOperands) -> tuple[torch.Tensor | None, Kept]:
        """Return memory for the numbers of rows received, the caller's or None without a gradient, and for what is
        kept."""
        if self.keep is None:
            return operands.received, NONE_KEPT
        received, *kept = (world.empty(shape, dtype) for shape, dtype in self.trained_outputs(world))
        return received, Kept(*kept)


def layer_rows(world: World, layer: Layer, block_m: int) -> int:
    """Return the rows of a layer's tables, and of what is in expert order, in tiles of block_m rows."""
    return rows_of(world, layer.capacity, layer.k, layer.experts // world.size, block_m, layer.max_rows)


def first_columns(world: World, layer: Layer) -> int:
    """Return N, the columns of an expert's first GEMM: rows of its w13."""
    block = world.scale.interleave
    return layer.inner if layer.activation == "gelu" else 2 * -(-layer.inner // block) * block


def check_routes(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, op: str = NAME) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be [T, H], bfloat16 or float16, got {dims(x)}")
    for name, t, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        if t.dim() != 2 or t.shape[0] != x.shape[0] or t.shape[1] < 1 or t.shape != ids.shape:
            raise ValueError(f"{op}: {name} {dims(t)} must be [T, k], for x {dims(x)} and ids {dims(ids)}")
        if t.dtype != dtype:
            raise TypeError(f"{op}: {name} {dims(t)} must be {dtype}")
