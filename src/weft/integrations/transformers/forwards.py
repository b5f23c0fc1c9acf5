"""The forward passes of a woven model, of its decoder layers (nn/decoder_layer.py), and of its last norm."""

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
from .generation import drawing_nothing
from .shards import HeadsShard, Module, RowShard
from .woven import Woven

SHARDED_FROM = 1024  # tokens from which hidden states of layers with experts are sharded


class Carried(NamedTuple):
    """What decoder layers hand on. recorded: the residual; [.., H] where hidden states are recorded, and first, since
    Transformers records a layer's first output."""

    recorded: torch.Tensor
    states: HiddenStates


def model_forward(base: Any, done: Woven) -> Callable[..., Any]:
    """A forward pass of all layers. Inside a CUDA graph's capture Transformers hands attention a mask of all pairs of
    tokens also where there is none but the causal one, and with a mask torch has no fast attention."""
    own = base.forward

    def wanted(name: str, kwargs: Mapping[str, object]) -> bool:
        asked = kwargs.get(name)
        return bool(getattr(base.config, name) if asked is None else asked)

    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            done.check(base)
        alone = attention_mask is None and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
        done.causal = alone and base.config._attn_implementation == "sdpa"
        done.recorded = wanted("output_hidden_states", kwargs)
        if wanted("output_attentions", kwargs) and done.world.size > 1:
            raise Unsupported(
                "output_attentions: of a woven model each rank has the attention of its own heads alone; "
                "weft.hf.unweave(model) gives that of all"
            )
        with drawing_nothing():
            return own(input_ids, attention_mask=attention_mask, **kwargs)

    return forward


def layer_forward(
    layer: Module, following: Module, attention: HeadsShard, mlp: Sublayer, last: bool, done: Woven
) -> Callable[..., Carried]:
    """A decoder layer from Carried, or the embedding's hidden states, to Carried. following: the next layer's norm."""
    attend, between = attention.attend, layer.post_attention_layernorm  # which a module is slow to give

    def forward(hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        if isinstance(hidden_states, Carried):
            states = hidden_states.states
        else:
            states = first_states(done, hidden_states, layer.input_layernorm(hidden_states))
        mask = None if done.causal and attention.window is None else attention_mask

        def heads(states: HiddenStates) -> tuple[RowShard, torch.Tensor]:
            return attention.out, attend(states.normed, attention_mask=mask, project=states.project, **kwargs)[0]

        decoder_layer(states, heads, mlp, (norm_of(between), norm_of(following)), last)
        residual = states.residual
        return Carried(residual.view(states.shape) if done.recorded else residual, states)

    return forward


def first_states(done: Woven, hidden: torch.Tensor, normed: torch.Tensor) -> HiddenStates:
    """The hidden states before the first layer, of the embedding's [.., H]: in two parts of many tokens, or sharded of
    layers with experts, unless Transformers records what all ranks or both parts would have to give."""
    world, tokens, recorded = done.world, hidden.shape[:-1].numel(), done.recorded
    whole_routers = done.experts and records_router_logits()
    two = done.two_parts is not None and tokens >= max(2, done.two_parts) and world.size > 1
    two &= not (recorded or whole_routers or torch.compiler.is_compiling())
    if done.shards_tokens and tokens >= SHARDED_FROM and world.size > 1 and not (two or recorded or whole_routers):
        own, own_normed = (own_rows(t.flatten(0, -2), world) for t in (hidden, normed))
        return ShardedStates(world, own, own_normed, hidden.shape)
    if two:
        cut = halves(tokens)
        return ReplicatedStates(world, hidden, normed, (cut, tokens - cut), plan=done.two_parts_plan)
    return ReplicatedStates(world, hidden, normed, plan=done.plan, whole=recorded)


def records_router_logits() -> bool:
    """Whether Transformers records them in this forward pass."""
    from transformers.utils.output_capturing import _active_collector

    collector = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return collector is not None and "router_logits" in collector


def norm_of(module: Module) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def norm_forward(carried: Carried) -> torch.Tensor:
    """The model's last norm, which the last layer has computed."""
    return carried.states.gathered()
