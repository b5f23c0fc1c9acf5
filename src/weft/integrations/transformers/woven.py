"""What `weave` did to a model, and how it is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ...plans import Plan
from ...world import World
from .modules import Layers
from .parameters import Parameters, Same


def path_of(base: nn.Module, module: nn.Module) -> str:
    return next((name for name, other in base.named_modules() if other is module), type(module).__name__)


class Bound(Protocol):
    parameters: Parameters


@dataclass
class Woven:
    """What was done to a model. replaced: a line for each kind of module; left: module and reason. undo: puts a
    module's own forward back.

    two_parts: from so many tokens on a pass goes in two token parts, whose `all_reduce_rms_norm` goes by
    two_parts_plan; None: never. experts: whether layers have some. shards_tokens: whether the hidden states of many
    tokens are sharded. In the pass that is on, `causal` says that every token attends to all before it and to no other,
    `recorded` that its hidden states are asked for.
    """

    world: World
    plan: str | Plan
    two_parts: int | None = None
    two_parts_plan: str | Plan = "auto"
    experts: bool = False
    shards_tokens: bool = False
    causal: bool = False
    recorded: bool = False
    replaced: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    layers: Layers | None = None
    same: Same | None = None

    def follow(self, *shards: Bound) -> None:
        """Have the shards bound to their parameters as these are at the start of every pass."""
        self.parameters += [shard.parameters for shard in shards]
        self.undo += [shard.parameters.release for shard in shards]

    def check(self, base: nn.Module) -> None:
        """Check before a pass that the model is as it was woven, but for its parameters' values."""
        assert self.layers is not None
        self.layers.check()
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise ValueError(
                "a woven model computes no gradient, and its parameters require one: call it under "
                "torch.inference_mode() or torch.no_grad(), or unweave it to train"
            )
        self.refresh(base)

    def refresh(self, base: nn.Module) -> None:
        """Bind to their parameters the shards whose parameters have changed."""
        bound = [parameters for parameters in self.parameters if parameters.packed]
        if self.same is None or not self.same.holds():
            bound = self.parameters
        for parameters in bound:
            parameters.refresh(self.world, functools.partial(path_of, base))
        if bound is self.parameters:
            self.same = Same([seen for parameters in bound if not parameters.packed for seen in parameters.seen])

    def forward(self, module: nn.Module, forward: Callable[..., object]) -> None:
        """`module` runs `forward` from now on, as Transformers' own styles install theirs: on the instance."""
        self.replace(module, "forward", forward)

    def undo_all(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def replace(self, module: nn.Module, name: str, method: Callable[..., object]) -> None:
        before = module.__dict__.get(name)

        def undo() -> None:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

        setattr(module, name, method)
        self.undo.append(undo)
