"""The forward passes of a woven model, its decoder layers (nn/decoder_layer.py), and its final norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...errors import Unsupported
from ...nn.decoder_layer import (
    HiddenStates,
    ReplicatedStates,
    RMSNorm,
    ShardedStates,
    Sublayer,
    decoder_layer,
    own_rows,
)
from ...nn.weave import halves
from ...ops.norm import rms_norm
from ...world import World
from .generation import without_draws
from .shards import HeadsShard, Module, RowShard
from .woven import Woven

CACHES = "cache", "past_key_values"  # the names of a cache's argument: since Transformers 5.24, and earlier
SHARDED_FROM = 1024  # the least number of tokens for which hidden states of layers with experts are sharded


class Carried(NamedTuple):
    """The output of a woven decoder layer. `recorded` is the residual, [.., H] if hidden states are recorded; it is the
    first field, because Transformers records the first output of a layer."""

    recorded: torch.Tensor
    states: HiddenStates


class ModelForward:
    """The forward pass of all layers. It records whether a dense mask is only causal, because torch's fast attention
    supports no other masks."""

    def __init__(self, base: Any, attention: HeadsShard, woven: Woven) -> None:
        self.base, self.base_forward, self.attention, self.woven = base, base.forward, attention, woven

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        woven, config = self.woven, self.base.config
        if not torch.compiler.is_compiling():
            woven.check(self.base)
        woven.depth = min(config.num_hidden_layers, len(self.base.layers))
        if woven.depth < 1:
            raise Unsupported(f"config.num_hidden_layers is {woven.depth}: a woven model runs one layer or more")
        caches = [kwargs[name] for name in CACHES if kwargs.get(name) is not None]
        for cache in caches:
            check_heads(cache, self.attention)
        only_ids = attention_mask is None and not caches and kwargs.get("position_ids") is None
        woven.causal = only_ids and config._attn_implementation == "sdpa" and has_dense_masks(woven.world)
        woven.recorded = self._requested("output_hidden_states", kwargs)
        if self._requested("output_attentions", kwargs) and woven.world.size > 1:
            raise Unsupported(
                "output_attentions: each rank of a woven model has only the attention weights of its own heads; "
                "weft.hf.unweave(model) returns those of all heads"
            )
        try:
            with without_draws():
                return self.base_forward(input_ids, attention_mask=attention_mask, **kwargs)
        except BaseException:  # the second stream still reads and writes tensors of a pass in two parts
            if not torch.compiler.is_compiling():
                self.woven.world.join_side_streams()
            raise

    def _requested(self, name: str, kwargs: Mapping[str, object]) -> bool:
        value = kwargs.get(name)
        return bool(getattr(self.base.config, name) if value is None else value)


def has_dense_masks(world: World) -> bool:
    """Return whether Transformers makes a mask even if every token attends to all earlier tokens, as inside a CUDA
    graph capture and in compiled code."""
    return torch.compiler.is_compiling() or world.backend.capturing()


def check_heads(cache: object, attention: HeadsShard) -> None:
    """Raise ValueError for a cache that was filled, or allocated early, with a number of heads other than this
    rank's."""
    layers = getattr(cache, "layers", None)
    keys = getattr(layers[0], "keys", None) if layers else None
    heads, ranks = attention.heads[1], attention.world.size
    if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[1] != heads:
        raise ValueError(
            f"the cache has keys {list(keys.shape)} of {keys.shape[1]} heads; each of {ranks} ranks of this woven "
            f"model has {heads} of {heads * ranks} key-value heads: let the woven model fill an empty cache"
        )


class LayerForward:
    """The forward pass of decoder layer `index`. The input is a Carried, or the embedding's hidden states, and the
    output is a Carried. The layer also computes the norm of the next layer, or the model's final norm if no layer
    follows in this pass."""

    def __init__(self, base: Module, index: int, attention: HeadsShard, mlp: Sublayer, woven: Woven) -> None:
        self.layer, self.index, self.attention, self.mlp, self.woven = base.layers[index], index, attention, mlp, woven
        # Looking up a submodule in a module is slow, so the forward pass looks up each one once.
        self.between, self.final_norm = self.layer.post_attention_layernorm, base.norm
        is_last = index + 1 == len(base.layers)
        self.next_norm = base.norm if is_last else base.layers[index + 1].input_layernorm

    def forward(self, hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        attention, woven = self.attention, self.woven
        if isinstance(hidden_states, Carried):
            states = hidden_states.states
        else:
            states = first_states(woven, hidden_states, self._first_norm(hidden_states))
        mask = None if woven.causal and attention.has_causal_mask(self.index) else attention_mask
        last = self.index + 1 == woven.depth
        following = self.final_norm if last else self.next_norm

        def heads(states: HiddenStates) -> tuple[RowShard, torch.Tensor]:
            attend = attention.attend
            return attention.out, attend(states.normed, attention_mask=mask, project=states.project, **kwargs)[0]

        decoder_layer(states, heads, self.mlp, (norm_of(self.between), norm_of(following)), last)
        residual = states.residual
        return Carried(residual.view(states.shape) if woven.recorded else residual, states)

    def _first_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised rows of the embedding."""
        norm, world = self.layer.input_layernorm, self.woven.world
        if not world.batch_invariant:
            normed: torch.Tensor = norm(hidden)
            return normed
        return rms_norm(hidden.flatten(0, -2), *norm_of(norm), world=world).view(hidden.shape)


def first_states(woven: Woven, hidden: torch.Tensor, normed: torch.Tensor) -> HiddenStates:
    """Return the hidden states before the first layer, computed from the embedding's output [.., H]. With many tokens
    the hidden states are in two parts, or sharded if all layers have experts, unless Transformers records tensors that
    would span ranks or parts."""
    world, tokens, recorded = woven.world, hidden.shape[:-1].numel(), woven.recorded
    records_routers = woven.experts and records_router_logits()
    two = woven.two_parts is not None and tokens >= max(2, woven.two_parts) and world.size > 1
    two &= not (recorded or records_routers or torch.compiler.is_compiling())
    if woven.shards_tokens and tokens >= SHARDED_FROM and world.size > 1 and not (two or recorded or records_routers):
        residual_rows, normed_rows = (own_rows(t.flatten(0, -2), world) for t in (hidden, normed))
        return ShardedStates(world, residual_rows, normed_rows, hidden.shape)
    if two:
        cut = halves(tokens)
        return ReplicatedStates(world, hidden, normed, (cut, tokens - cut), plan=woven.two_parts_plan)
    return ReplicatedStates(world, hidden, normed, plan=woven.plan, full_residual=recorded)


def records_router_logits() -> bool:
    """Return whether Transformers records router logits in this forward pass."""
    from transformers.utils.output_capturing import _active_collector

    collector = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return collector is not None and "router_logits" in collector


def norm_of(module: Module) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def norm_forward(carried: Carried) -> torch.Tensor:
    """Return the rows that the last layer has computed with the model's final norm."""
    return carried.states.gathered()
