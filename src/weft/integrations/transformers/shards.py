"""This rank's shards of the attention and the MLP of a Transformers model, without the wrappers of Transformers' tensor
parallelism.

One GEMM computes all linears with the same input. A shard whose output the ranks sum is a `Sublayer`
(nn/decoder_layer.py).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ...errors import Unsupported
from ...models.attention import fastest
from ...models.cache import is_long
from ...ops.activation import silu_mul
from ...ops.all_gather_matmul.op import all_gather_matmul, all_gather_matmul_with_gathered
from ...ops.attention.segmented import AttentionConfig
from ...ops.matmul_reduce.op import matmul_reduce_scatter
from ...ops.product import matmul
from ...ops.rotary import rotary
from ...transport.collectives import gather
from ...world import World
from .parameters import Bound, Parameters, local_of, shard_of, stacked

Module: TypeAlias = Any  # an object of Transformers, whose attributes the type checker does not know


class ColumnShards(Bound):
    """This rank's columns of linears with the same input. The weights of linears that Transformers has split, or of a
    single rank, become views of one stacked weight, so that one GEMM computes them; a linear that every rank has whole
    has a separate GEMM."""

    bound = "weights", "biases"
    weights: Sequence[torch.Tensor] = ()  # one weight for each GEMM
    biases: Sequence[torch.Tensor | None] = ()

    def __init__(self, linears: Sequence[nn.Linear], world: World) -> None:
        self.world, self.linears = world, linears
        self.widths = [shard_of(linear.weight, 0, world).shape[0] for linear in linears]
        self.parameters = Parameters(linears, self._bind)

    def _bind(self) -> None:
        self.weights = self._shards([linear.weight for linear in self.linears], self.weights)
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        previous = [bias for bias in self.biases if bias is not None]
        self.biases = self._shards(biases, previous) if biases else [None] * len(self.weights)

    def _shards(self, parameters: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.world.size > 1 and not all(isinstance(p, DTensor) for p in parameters):
            return [shard_of(p, 0, self.world) for p in parameters]
        for p in parameters:
            shard_of(p, 0, self.world)  # raises an error for a parameter that is split differently
        return [stacked(parameters, previous[0] if previous else None)]

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if len(self.weights) == 1:
            return _linear(self.world, x, self.weights[0], self.biases[0], out)
        if out is None:
            parts = zip(self.weights, self.biases, strict=True)
            return torch.cat([_linear(self.world, x, weight, bias, None) for weight, bias in parts], -1)
        for columns, weight, bias in zip(out.split(self.widths, -1), self.weights, self.biases, strict=True):
            _linear(self.world, x, weight, bias, columns)
        return out

    def gathered(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        """Gather the rows of all ranks, and return this rank's columns for them. The first GEMM overlaps the gather."""
        operands, world = (x, self.weights[0], self.biases[0]), self.world
        if len(self.weights) == 1:
            return all_gather_matmul(*operands, world=world, rows=shards)
        y, full_x = all_gather_matmul_with_gathered(*operands, world=world, rows=shards)
        others = [_linear(world, full_x, w, b, None) for w, b in zip(self.weights[1:], self.biases[1:], strict=True)]
        return torch.cat([y, *others], -1)


class RowShard(Bound):
    """This rank's input columns of a row-parallel linear, whose output is a partial sum. Rank 0 adds the bias to its
    partial sum; `full_bias` is for an operator that adds the bias to the full sum."""

    bound = "weight", "bias", "full_bias"

    def __init__(self, linear: nn.Linear, world: World) -> None:
        self.world, self.linear = world, linear
        self.parameters = Parameters([linear], self._bind)

    def _bind(self) -> None:
        self.weight, bias = shard_of(self.linear.weight, 1, self.world), self.linear.bias
        self.full_bias = None if bias is None else local_of(bias).detach()
        self.bias = None if self.world.rank else self.full_bias

    def partial(self, x: torch.Tensor, out: torch.Tensor | None, part: int) -> torch.Tensor:
        return _linear(self.world, x, self.weight, self.bias, out)

    def sharded(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        return matmul_reduce_scatter(x, self.weight, self.full_bias, world=self.world, rows=shards)


def _linear(
    world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if world.batch_invariant:
        y = matmul(x.flatten(0, -2), weight, bias, world=world).view(*x.shape[:-1], len(weight))
        if out is None:
            return y
        world.call(lambda: out.copy_(y), [y], [out], world.current_stream())
        return out
    if out is None:
        return F.linear(x, weight, bias)
    return world.backend.linear(x, weight, bias, world.current_stream(), out)


class HeadShard(Bound):
    """The output head of a model that Transformers has split. A rank computes its own columns, and NCCL's all-gather
    collects the columns of the other ranks. `eager_forward` is the module's own forward, which torch.compile can
    trace."""

    bound = ("weight",)

    def __init__(self, linear: nn.Linear, world: World) -> None:
        self.world, self.eager_forward, self.linear = world, linear.forward, linear
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
            return self.eager_forward(x)
        world, y = self.world, _linear(self.world, x, self.weight, None, None)
        rows = y.flatten(0, -2)
        columns = gather(rows, world, [rows.shape[0]] * world.size, world.current_stream())
        return columns.view(world.size, *y.shape).movedim(0, -2).flatten(-2)


class MlpShard:
    """This rank's columns of gate and up, and its input columns of down."""

    def __init__(self, mlp: Module, world: World) -> None:
        self.world, self.gate_up = world, ColumnShards((mlp.gate_proj, mlp.up_proj), world)
        self.down = RowShard(mlp.down_proj, world)

    def partial(self, x: torch.Tensor, out: torch.Tensor | None, part: int) -> torch.Tensor:
        gate_up = None if out is None else self.world.empty((x.shape[0], sum(self.gate_up.widths)), x.dtype)
        return self.down.partial(silu_mul(self.gate_up(x, gate_up), world=self.world), out, part)

    def sharded(self, x: torch.Tensor, shards: Sequence[int] | None) -> torch.Tensor:
        return self.down.sharded(silu_mul(self.gate_up.gathered(x, shards), world=self.world), shards)


class HeadsShard(Bound):
    """The attention of this rank's heads. `attend` computes the heads' output [.., heads D] and the attention weights
    from normalised hidden states; its argument `project` computes the projections [.., N]. `out` is the output
    projection, `heads` the number of query heads and of key-value heads."""

    attend: Callable[..., tuple[torch.Tensor, Any]]

    def __init__(self, attention: Module, world: World) -> None:
        self.module, self.world = attention, world
        self.qkv = ColumnShards((attention.q_proj, attention.k_proj, attention.v_proj), world)
        self.out = RowShard(attention.o_proj, world)
        self.heads = self.qkv.widths[0] // attention.head_dim, self.qkv.widths[1] // attention.head_dim

    def has_causal_mask(self, layer: int) -> bool:
        """Return whether the mask that Transformers makes for layer `layer` has no window."""
        config = self.module.config
        if getattr(config, "sliding_window", None) is None:
            return True
        kinds = getattr(config, "layer_types", None) if getattr(self.module, "sliding_window", 0) is None else None
        return kinds is not None and kinds[layer] == "full_attention"


class AttentionShard(HeadsShard):
    """Attention without the output projection, for passes in one or two token parts. As in Transformers' forward, every
    call reads the `followed` numbers of the module and of its configuration."""

    bound = ("norm_weights",)
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None = None
    followed = "scaling", "layer_idx", "attention_dropout", "is_causal", "sliding_window"
    functions: ClassVar[Any]  # Transformers' registry of attentions, which a deep copy shares

    def __init__(self, attention: Module, world: World) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        super().__init__(attention, world)
        AttentionShard.functions = ALL_ATTENTION_FUNCTIONS
        self.attend = attention  # `weave` replaces this module's forward by the method `forward` below
        self.dim = d = attention.head_dim
        self.head_counts = [width // d for width in self.qkv.widths]
        self.norm_modules = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self.parameters = Parameters(self.norm_modules, self._bind)
        self.window_in_module = hasattr(attention, "sliding_window")
        self.has_window = self.window_in_module or hasattr(attention.config, "sliding_window")
        self.takes_cache = "cache" in inspect.signature(type(attention).forward).parameters
        self.eager = sys.modules[type(attention).__module__].eager_attention_forward
        self.has_cudnn = fastest(
            world, AttentionConfig((), *self.heads, d, attention.q_proj.weight.dtype, attention.scaling)
        )

    def _bind(self) -> None:
        if self.norm_modules:
            q, k = (local_of(norm.weight).detach() for norm in self.norm_modules)
            self.norm_weights = q, k

    @property
    def window(self) -> int | None:
        """Return the window size that Transformers passes to an attention function for sliding-window attention."""
        if not self.has_window:
            return None
        window: int | None = (self.module if self.window_in_module else self.module.config).sliding_window
        return window

    def norm_eps(self) -> float:
        """Return the eps of the query and key norms. Raises Unsupported if the two differ."""
        if not self.norm_modules:
            return 0.0
        q_eps, k_eps = (norm.variance_epsilon for norm in self.norm_modules)
        if q_eps != k_eps:
            raise Unsupported(
                f"layers.{self.module.layer_idx}.self_attn: q_norm.variance_epsilon is {q_eps} and "
                f"k_norm.variance_epsilon {k_eps}; a woven model computes both norms in one launch, with one epsilon"
            )
        eps: float = q_eps
        return eps

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Module = None,
        attention_mask: Module = None,
        past_key_values: Module = None,
        *,
        project: Callable[[ColumnShards, torch.Tensor], torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return the heads' output [.., heads D] in place of hidden states, and the attention weights.

        Since Transformers 5.24 an attention module receives every cache as `cache` and updates it. In earlier versions
        the module updates `past_key_values`, while the attention function updates `cache`, the cache of continuous
        batching."""
        module, qkv, (cos, sin) = self.module, project(self.qkv, hidden_states), position_embeddings
        shape, window, dropout = qkv.shape[:-1], self.window, module.attention_dropout if module.training else 0.0
        qkv = rotary(qkv.flatten(0, -2), cos, sin, *self.heads, self.norm_weights, self.norm_eps(), world=self.world)
        q, k, v = qkv.view(*shape, -1, self.dim).transpose(1, 2).split(self.head_counts, 1)
        if self.takes_cache and (cache := kwargs.pop("cache", past_key_values)) is not None:
            k, v = cache.update(k, v, module.layer_idx, kwargs=kwargs)
        elif past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        name = module.config._attn_implementation
        if name == "sdpa" and not dropout:
            causal = kwargs.get("is_causal")
            causal = module.is_causal if causal is None else causal
            if (faster := self._faster_attention(q, k, v, attention_mask, causal and window is None)) is not None:
                return faster.reshape(*shape, -1), None
        attend = self.functions.get_interface(name, self.eager)
        heads, weights = attend(
            module, q, k, v, attention_mask, dropout=dropout, scaling=module.scaling, sliding_window=window, **kwargs
        )
        return heads.reshape(*shape, -1), weights

    def _faster_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool
    ) -> torch.Tensor | None:
        """Return attention [B, M, heads, D] if torch provides a faster call than Transformers, else None. The faster
        call depends on the batch, so the result is always None in a batch-invariant World."""
        if self.world.batch_invariant:
            return None
        (b, heads, m, d), kv, scale = q.shape, k.shape[1], self.module.scaling
        if m == 1 and heads != kv and mask is not None and mask.shape[1] == 1:
            # The query heads that share a key head become rows of one call, so that keys and values are not repeated.
            rows = q.reshape(b, kv, heads // kv, d)
            return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        if self.has_cudnn and mask is None and causal and m == k.shape[2] and is_long(m, m):
            args = q, k, v, None, False, 0.0, True, False
            return torch.ops.aten._scaled_dot_product_cudnn_attention(*args, scale=scale)[0].transpose(1, 2)
        return None
