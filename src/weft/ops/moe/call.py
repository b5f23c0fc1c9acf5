"""The description of one MoE call: its sizes and options, its operands, and the tensors that it saves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...op import Call, Shapes
from ...tensor_checks import DTYPES, dims
from ...world import World
from .activations import CLAMPED, GELU, SWIGLU
from .routing.route_tables import rows_of

NAME = "moe"
MAX_TOPK = 16  # the largest number of experts per token
KEEPS = ("nothing", "rows", "activation")  # the tensors saved for a backward pass
ACTIVATIONS = {"swiglu": SWIGLU.value, "gelu": GELU.value, "gpt_oss": CLAMPED.value}


@dataclass(frozen=True)
class Layer:
    """The sizes and options of one MoE call, the same on all ranks.

    max_tokens_per_rank: the largest number of tokens on any rank, which is called max_tokens in shapes. hidden, inner:
    H and I. k: the number of experts per token. activation: "swiglu" is silu(gate) * up; "gelu" has no gate matrix;
    "gpt_oss" is (up + 1) * gate * sigmoid(1.702 gate) with gate at most 7 and up clamped to [-7, 7]. max_rows: the
    number of rows for which a rank has room; None means room for the worst case.
    """

    max_tokens_per_rank: int
    experts: int
    k: int
    hidden: int
    inner: int
    dtype: torch.dtype
    activation: str = "swiglu"
    max_rows: int | None = None

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        """Return the sizes that the ranks compare in addition to their numbers of tokens and rows."""
        return dict(
            experts=self.experts,
            k=self.k,
            H=self.hidden,
            I=self.inner,
            dtype=str(self.dtype),
            activation=self.activation,
        )


class RouterOptions(NamedTuple):
    """The options of `weft.moe.gate` except k, for a router that a layer's launch includes."""

    scoring: str
    renormalise: bool
    groups: int
    top_groups: int
    scale: float

    @property
    def renormalises(self) -> bool:
        """Return whether the weights are divided by their sum. With other scorings the option has no effect."""
        return self.renormalise and self.scoring in ("softmax", "sigmoid")


class Weights(NamedTuple):
    """The matrices and biases of this rank's El experts.

    w13 [El, N, H]: for "gelu" N = I. For other activations, blocks of `world.backend.scale.interleave` gate rows
    alternate with up blocks of the same size, and the last block is padded with zeros. w2 [El, H, I]. b13 [El, N] has
    the layout of w13's rows. b2 is [El, H].
    """

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None


class Kept(NamedTuple):
    """The tensors that a call saves for its backward pass; a tensor that is not saved is None.

    rows [W, max_tokens, H]: the tokens as they arrived. preactivation [rows, N]: the result of the first GEMM with its
    bias, to which the activation is applied.
    """

    rows: torch.Tensor | None = None
    preactivation: torch.Tensor | None = None


class MoeOperands(NamedTuple):
    """The operands of `weft.moe.moe`, with the first matrices and their biases flat: [El, N, H] and [El, N]. Eager
    calls without a gradient write the tensor `received`; other calls return the numbers as a result. router,
    router_bias, choice_bias: the tensors of a router that the call includes (`TopKRouter`); such a call writes ids and
    weights."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    received: torch.Tensor | None = None
    router: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None

    @property
    def experts(self) -> Weights:
        return Weights(self.w13, self.w2, self.b13, self.b2)


@dataclass(frozen=True)
class MoeCall(Call):
    """A checked call.

    own_tokens: the number of this rank's tokens. tokens: every rank's number of tokens, or None if it is known only
    that no number exceeds max_tokens_per_rank. counted: whether the call returns the numbers of received rows. keep:
    which tensors are saved for the backward pass; None means that no gradient is wanted. router: the router that the
    call includes, or None if ids and weights are operands.

    Each rank decides for itself whether there are biases. The ranks compare neither this choice nor `own_tokens` nor
    `counted`.
    """

    own_tokens: int
    tokens: tuple[int, ...] | None
    layer: Layer
    keep: str | None = None
    counted: bool = False
    router: RouterOptions | None = None

    @property
    def rows(self) -> int:
        """Return the largest number of tokens on any rank. The result is at least 1, because a rank without tokens does
        not know the other ranks' numbers."""
        return self.layer.max_tokens_per_rank

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        rows = dict(rows=self.tokens, max_tokens=self.layer.max_tokens_per_rank, max_rows=self.layer.max_rows)
        values = rows | self.layer.same_on_all_ranks()
        if self.router is not None:
            values["router"] = self.router
        return values if self.keep is None else dict(values, keep=self.keep)

    def saved_shapes(self, world: World, block_m: int) -> Shapes:
        """Return the shapes and dtypes of the tensors in `Kept`, for rows in tiles of block_m."""
        return kept_shapes(world, self.layer, self.keep, layer_rows(world, self.layer, block_m))

    def received(self, world: World, operands: MoeOperands) -> torch.Tensor | None:
        """Return the tensor for the numbers of received rows: the caller's tensor, a new tensor, or None."""
        if operands.received is not None or not self.counted:
            return operands.received
        return world.empty((self.layer.experts // world.size,), torch.int32)


def kept_shapes(world: World, layer: Layer, keep: str | None, rows: int) -> Shapes:
    """Return the shapes and dtypes of the tensors in `Kept`, for this number of rows in expert order."""
    arrived, preactivation = (world.size, layer.max_tokens_per_rank, layer.hidden), (rows, first_columns(world, layer))
    shapes = [(arrived, layer.dtype), (preactivation, layer.dtype)]
    return shapes[: 0 if keep is None else KEEPS.index(keep)]


def layer_rows(world: World, layer: Layer, block_m: int) -> int:
    """Return the number of rows in expert order that a layer's tables have, in tiles of block_m rows."""
    return rows_of(world, layer.max_tokens_per_rank, layer.k, layer.experts // world.size, block_m, layer.max_rows)


def first_columns(world: World, layer: Layer) -> int:
    """Return N, the number of columns that an expert's first GEMM computes, which is the number of rows of its w13."""
    block = world.backend.scale.interleave
    return layer.inner if layer.activation == "gelu" else 2 * -(-layer.inner // block) * block


def check_routes(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, op: str = NAME) -> None:
    """Raise ValueError or TypeError for x, ids or weights whose shapes or dtypes do not match."""
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be [T, H], bfloat16 or float16, got {dims(x)}")
    for name, t, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        if t.dim() != 2 or t.shape[0] != x.shape[0] or t.shape[1] < 1 or t.shape != ids.shape:
            raise ValueError(f"{op}: {name} {dims(t)} must be [T, k], for x {dims(x)} and ids {dims(ids)}")
        if t.dtype != dtype:
            raise TypeError(f"{op}: {name} {dims(t)} must be {dtype}")
