"""Decoder layers of a woven Transformers model: what they hand on, and what stands between their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..lang.mapping import balanced_rows
from ..models.llama import keeps_shards
from ..ops.all_reduce.op import all_reduce_rms_norm
from ..plans import Plan
from ..world import World


class Carried(NamedTuple):
    """What decoder layers hand on. residual: [.., H] of all tokens, or the rows [m_r, H] that this rank owns; first,
    since Transformers records a layer's first output as its hidden states. normed: [.., H]."""

    residual: torch.Tensor
    normed: torch.Tensor


@dataclass
class Woven:
    """What was done to a model. replaced: a line for each kind of module; left: module and reason. undo: puts a
    module's own forward back. causal: in this forward pass every token attends to all before it, and to no other."""

    world: World
    plan: str | Plan
    causal: bool = False
    replaced: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """`module` runs `forward` from now on, as Transformers' own styles install theirs: on the instance."""
        before = module.__dict__.get("forward")

        def undo() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        module.forward = forward
        self.undo.append(undo)


def model_forward(base: Any, done: Woven) -> Callable[..., Any]:
    """A forward pass of all layers. Inside a CUDA graph's capture Transformers hands attention a mask of all pairs of
    tokens also where there is none but the causal one, and with a mask torch has no fast attention."""
    own = base.forward

    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        alone = attention_mask is None and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
        done.causal = alone and base.config._attn_implementation == "sdpa"
        return own(input_ids, attention_mask=attention_mask, **kwargs)

    return forward


def layer_forward(layer: Any, following: Any, done: Woven) -> Callable[..., Carried]:
    """A decoder layer from Carried, or the embedding's hidden states, to Carried. following: the next layer's norm."""
    join = functools.partial(joined, world=done.world, plan=done.plan)
    slides = getattr(layer.self_attn, "sliding_window", None) is not None

    def forward(hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        if isinstance(hidden_states, Carried):
            carried = hidden_states
        else:
            carried = Carried(held_rows(hidden_states, done.world), layer.input_layernorm(hidden_states))
        mask = None if done.causal and not slides else attention_mask
        partial, _ = layer.self_attn(carried.normed, attention_mask=mask, **kwargs)
        carried = join(partial, carried.residual, layer.post_attention_layernorm)
        return join(layer.mlp(carried.normed), carried.residual, following)

    return forward


def held_rows(hidden: torch.Tensor, world: World) -> torch.Tensor:
    """Of the embedding's rows what this rank holds of the residual: its own, where tokens are many and nobody asked for
    hidden states."""
    rows = hidden.flatten(0, -2)
    if recorded("hidden_states") or not keeps_shards(world, rows.shape[0], rows.shape[1], rows.dtype):
        return hidden
    counts = balanced_rows(rows.shape[0], world.size)
    first = sum(counts[: world.rank])
    return rows[first : first + counts[world.rank]].contiguous()


def recorded(*names: str) -> bool:
    """Whether Transformers records one of these in this forward pass."""
    from transformers.utils.output_capturing import _active_collector

    recorded = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return recorded is not None and any(name in recorded for name in names)


def joined(partial: torch.Tensor, residual: torch.Tensor, norm: Any, *, world: World, plan: str | Plan) -> Carried:
    whole = residual.shape == partial.shape  # [batch, tokens, H]; rows of this rank are [m_r, H]
    rows, held = partial.flatten(0, -2), residual.view(-1, residual.shape[-1])
    weight, eps = norm.weight, norm.variance_epsilon
    normed, kept = all_reduce_rms_norm(rows, held, weight, eps, full_residual=whole, world=world, plan=plan)
    return Carried(kept.view(residual.shape), normed.view(partial.shape))
