"""This rank's shard of a Transformers model's attention and MLP: without the wrappers of its tensor parallelism, and
with what comes out of one input in one GEMM. What leaves a sum over ranks is a `Sublayer` of nn/decoder_layer.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ...models.attention import fastest
from ...models.cache import is_long
from ...ops.activation import silu_mul
from ...ops.all_gather_matmul.op import all_gather_matmul
from ...ops.attention.segmented import AttentionConfig
from ...ops.matmul_reduce.op import matmul_reduce_scatter
from ...ops.rotary import rotary
from ...transport.collectives import gather
from ...world import World
from .parameters import Parameters, local_of, shard_of, stacked

Module: TypeAlias = Any  # one of Transformers', whose attributes types do not know


class ColumnShards:
    """This rank's columns of linears that have one input: of linears that hold no others, which become views of a
    stacked weight, by one GEMM; of whole ones among several ranks, each by its own."""

    def __init__(self, linears: Sequence[nn.Linear], world: World) -> None:
        self.world, self.linears = world, linears
        self.widths = [shard_of(linear.weight, 0, world).shape[0] for linear in linears]
        self.weights: Sequence[torch.Tensor] = ()  # of each GEMM
        self.biases: Sequence[torch.Tensor | None] = ()
        self.parameters = Parameters(linears, self._bind)

    def _bind(self) -> None:
        self.weights = self._shards([linear.weight for linear in self.linears], self.weights)
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        held = [bias for bias in self.biases if bias is not None]
        self.biases = self._shards(biases, held) if biases else [None] * len(self.weights)

    def _shards(self, parameters: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.world.size > 1 and not all(isinstance(p, DTensor) for p in parameters):
            return [shard_of(p, 0, self.world) for p in parameters]
        for p in parameters:
            shard_of(p, 0, self.world)  # raises for what is split otherwise
        return [stacked(parameters, held[0] if held else None)]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(self.weights) == 1:
            return _linear(self.world, x, self.weights[0], self.biases[0], out)
        if out is None:
            return torch.cat([F.linear(x, w, b) for w, b in zip(self.weights, self.biases, strict=True)], -1)
        for columns, weight, bias in zip(out.split(self.widths, -1), self.weights, self.biases, strict=True):
            _linear(self.world, x, weight, bias, columns)
        return out

    def gathered(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        """The first GEMM overlaps the gather."""
        gathered = functools.partial(
            all_gather_matmul, x, self.weights[0], self.biases[0], world=self.world, rows=shards
        )
        if len(self.weights) == 1:
            return gathered()
        y, every = gathered(return_gathered=True)
        others = [F.linear(every, w, b) for w, b in zip(self.weights[1:], self.biases[1:], strict=True)]
        return torch.cat([y, *others], -1)


class RowShard:
    """This rank's rows of a linear: a partial sum, to which the first rank adds the bias. whole_bias: the bias, which
    is to be added once."""

    def __init__(self, linear: nn.Linear, world: World) -> None:
        self.world, self.linear = world, linear
        self.parameters = Parameters([linear], self._bind)

    def _bind(self) -> None:
        self.weight, bias = shard_of(self.linear.weight, 1, self.world), self.linear.bias
        self.whole_bias = None if bias is None else local_of(bias).detach()
        self.bias = None if self.world.rank else self.whole_bias

    def partial(self, x: torch.Tensor, out: torch.Tensor | None, part: int) -> torch.Tensor:
        return _linear(self.world, x, self.weight, self.bias, out)

    def sharded(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        return matmul_reduce_scatter(x, self.weight, self.whole_bias, world=self.world, rows=shards)


def _linear(
    world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return world.linear(x, weight, bias, world.current_stream(), out)


class HeadShard:
    """The output head of a model that Transformers has split: this rank's columns, and the others' by the library's
    collective. own: the module's forward before, which torch.compile can follow."""

    def __init__(self, linear: nn.Linear, world: World) -> None:
        self.world, self.own, self.linear = world, linear.forward, linear
        self.parameters = Parameters([linear], self._bind)

    def _bind(self) -> None:
        self.weight = shard_of(self.linear.weight, 0, self.world)

    @staticmethod
    def fits(linear: object, world: World) -> bool:
        return (
            type(linear) is nn.Linear
            and linear.bias is None
            and isinstance(linear.weight, DTensor)
            and tuple(linear.weight.placements) == (Shard(0),)
            and linear.weight.shape[0] % world.size == 0
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.own(x)
        world, y = self.world, F.linear(x, self.weight)
        rows = y.flatten(0, -2)
        every = gather(rows, world, [rows.shape[0]] * world.size, world.current_stream())
        return every.view(world.size, *y.shape).movedim(0, -2).flatten(-2)


class MlpShard:
    def __init__(self, mlp: Module, world: World) -> None:
        self.world, self.gate_up = world, ColumnShards((mlp.gate_proj, mlp.up_proj), world)
        self.down = RowShard(mlp.down_proj, world)

    def partial(self, x: torch.Tensor, out: torch.Tensor | None, part: int) -> torch.Tensor:
        both = None if out is None else self.world.empty((x.shape[0], sum(self.gate_up.widths)), x.dtype)
        return self.down.partial(silu_mul(self.gate_up(x, both), world=self.world), out, part)

    def sharded(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        return self.down.sharded(silu_mul(self.gate_up.gathered(x, shards), world=self.world), shards)


def window_of(attention: Module) -> int | None:
    """The window of sliding-window attention: the module's own, or, where modules have none, the configuration's."""
    has_window: Module = attention if hasattr(attention, "sliding_window") else attention.config
    window: int | None = getattr(has_window, "sliding_window", None)
    return window


class HeadsShard:
    """Attention of this rank's heads. `attend` takes normed hidden states and returns the heads' output [.., heads D],
    and what attention gives besides; its argument `project` gives the projections [.., N] of hidden states. `out`
    leaves the partial sum. window: of sliding-window attention."""

    attend: Callable[..., tuple[torch.Tensor, Any]]

    def __init__(self, attention: Module, world: World) -> None:
        self.module, self.world, self.window = attention, world, window_of(attention)
        self.qkv = ColumnShards((attention.q_proj, attention.k_proj, attention.v_proj), world)
        self.out = RowShard(attention.o_proj, world)


class AttentionShard(HeadsShard):
    """`forward` is the module's but for the output projection, whose rows may go in two token parts. What does not
    change is looked up here: a configuration is slow to ask."""

    def __init__(self, attention: Module, world: World) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().__init__(attention, world)
        self.config, self.attend = attention.config, attention  # whose forward is the one below
        self.dim = d = attention.head_dim
        self.heads = self.qkv.widths[0] // d, self.qkv.widths[1] // d
        self.counts = [width // d for width in self.qkv.widths]
        self.normed = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self.norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self.parameters = Parameters(self.normed, self._bind)
        self.eps = self.normed[0].variance_epsilon if self.normed else 0.0
        self.scaling, self.layer_idx = attention.scaling, attention.layer_idx
        self.known, modeling = ALL_ATTENTION_FUNCTIONS, sys.modules[type(attention).__module__]
        self.eager = modeling.eager_attention_forward
        self.fast = fastest(
            world, AttentionConfig((), *self.heads, d, attention.q_proj.weight.dtype, attention.scaling)
        )

    def _bind(self) -> None:
        if self.normed:
            q, k = (local_of(norm.weight).detach() for norm in self.normed)
            self.norms = q, k

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        *,
        project: Callable[[ColumnShards, torch.Tensor], torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return [.., heads D] in place of hidden states, and what attention gives besides."""
        qkv, (cos, sin) = project(self.qkv, hidden_states), position_embeddings
        shape = qkv.shape[:-1]
        qkv = rotary(qkv.flatten(0, -2), cos, sin, *self.heads, self.norms, self.eps, world=self.world)
        q, k, v = qkv.view(*shape, -1, self.dim).transpose(1, 2).split(self.counts, 1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        name = self.config._attn_implementation
        if name == "sdpa" and (faster := self._faster(q, k, v, attention_mask, kwargs.get("is_causal"))) is not None:
            return faster.reshape(*shape, -1), None
        attend = self.known.get_interface(name, self.eager)
        heads, weights = attend(
            self.module,
            q,
            k,
            v,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.window,
            **kwargs,
        )
        return heads.reshape(*shape, -1), weights

    def _faster(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool | None
    ) -> torch.Tensor | None:
        """Attention [B, M, heads, D] where torch computes it faster than Transformers asks it to; elsewhere None."""
        (b, heads, m, d), kv, scale = q.shape, k.shape[1], self.scaling
        if m == 1 and heads != kv and mask is not None and mask.shape[1] == 1:
            # Query heads of one key head are rows of one call, not each beside a copy of its keys and values.
            rows = q.reshape(b, kv, heads // kv, d)
            return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        if self.fast and mask is None and causal is not False and self.window is None and m == k.shape[2]:
            if is_long(m, m):
                given = q, k, v, None, False, 0.0, True, False
                return torch.ops.aten._scaled_dot_product_cudnn_attention(*given, scale=scale)[0].transpose(1, 2)
        return None
