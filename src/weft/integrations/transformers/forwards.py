"""The forward passes of a woven model, its decoder layers (nn/decoder_layer.py), and its final norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from .generation import without_draws
from .shards import HeadsShard, Module, RowShard
from .woven import Woven

CACHES = "cache", "past_key_values"  # a cache's argument since Transformers 5.24, and before
SHARDED_FROM = 1024  # the number of tokens from which on hidden states of layers with experts are sharded


class Carried(NamedTuple):
    """The output of a woven decoder layer. `recorded` is the residual, [.., H] if hidden states are recorded; it is the
    first field, because Transformers records the first output of a layer."""

    recorded: torch.Tensor
    states: HiddenStates


def model_forward(base: Any, woven: Woven) -> Callable[..., Any]:
    """Return the forward pass of all layers. It notes whether the mask is only causal: inside a CUDA graph capture
    Transformers passes attention a dense mask even then, and torch has no fast attention with a mask."""
    base_forward = base.forward

    def requested(name: str, kwargs: Mapping[str, object]) -> bool:
        value = kwargs.get(name)
        return bool(getattr(base.config, name) if value is None else value)

    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            woven.check(base)
        only_ids = attention_mask is None and all(kwargs.get(name) is None for name in ("position_ids", *CACHES))
        woven.causal = only_ids and base.config._attn_implementation == "sdpa"
        woven.recorded = requested("output_hidden_states", kwargs)
        if requested("output_attentions", kwargs) and woven.world.size > 1:
            raise Unsupported(
                "output_attentions: each rank of a woven model has only the attention weights of its own heads; "
                "weft.hf.unweave(model) returns those of all heads"
            )
        try:
            with without_draws():
                return base_forward(input_ids, attention_mask=attention_mask, **kwargs)
        except BaseException:  # the second stream of a pass in two parts still reads and writes its tensors
            if not torch.compiler.is_compiling():
                woven.world.join_side_streams()
            raise

    return forward


def layer_forward(
    layer: Module, following: Module, attention: HeadsShard, mlp: Sublayer, last: bool, woven: Woven
) -> Callable[..., Carried]:
    """Return the forward pass of a decoder layer, from Carried, or from the embedding's hidden states, to Carried.
    `following` is the next layer's norm."""
    # Looking an attribute up in a module is slow, so it is done once.
    attend, between = attention.attend, layer.post_attention_layernorm

    def forward(hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        if isinstance(hidden_states, Carried):
            states = hidden_states.states
        else:
            states = first_states(woven, hidden_states, layer.input_layernorm(hidden_states))
        mask = None if woven.causal and attention.window is None else attention_mask

        def heads(states: HiddenStates) -> tuple[RowShard, torch.Tensor]:
            return attention.out, attend(states.normed, attention_mask=mask, project=states.project, **kwargs)[0]

        decoder_layer(states, heads, mlp, (norm_of(between), norm_of(following)), last)
        residual = states.residual
        return Carried(residual.view(states.shape) if woven.recorded else residual, states)

    return forward


def first_states(woven: Woven, hidden: torch.Tensor, normed: torch.Tensor) -> HiddenStates:
    """Return the hidden states before the first layer, from the embedding's [.., H]: of many tokens in two parts, or
    sharded if all layers have experts, unless Transformers records tensors that would span ranks or parts."""
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
    """Return the rows of the model's final norm, which the last layer has computed."""
    return carried.states.gathered()
