"""The state of a woven model: what `weave` replaced, and how to undo it."""

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
from .parameters import Parameters, Unchanged


def path_of(base: nn.Module, module: nn.Module) -> str:
    """Return the name of `module` in the model, else its type's name."""
    return next((name for name, child in base.named_modules() if child is module), type(module).__name__)


class Bound(Protocol):
    parameters: Parameters


@dataclass
class Woven:
    """The state of a woven model.

    `replaced` has a line for each kind of module that was replaced, `left` the module and reason of the others. The
    functions of `undo` restore the modules. From `two_parts` tokens on (None: never) a pass runs in two token parts,
    whose `all_reduce_rms_norm` uses `two_parts_plan`. `experts` says whether any layer has experts, `shards_tokens`
    whether the hidden states of many tokens are sharded. Of the current pass, `causal` says that the mask is only
    causal, and `recorded` that Transformers records hidden states.
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
    unchanged: Unchanged | None = None

    def follow(self, *shards: Bound) -> None:
        """Bind these shards to their current parameters at the start of every pass."""
        self.parameters += [shard.parameters for shard in shards]
        self.undo += [shard.parameters.release for shard in shards]

    def check(self, base: nn.Module) -> None:
        """Check before a pass that only the values of parameters have changed since weaving."""
        assert self.layers is not None
        self.layers.check()
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise ValueError(
                "a woven model computes no gradients, and its parameters require them: call it under "
                "torch.inference_mode() or torch.no_grad(), or unweave it to train"
            )
        self.refresh(base)

    def refresh(self, base: nn.Module) -> None:
        """Rebind the shards whose parameters have changed."""
        bound = [parameters for parameters in self.parameters if parameters.packed]
        if self.unchanged is None or not self.unchanged.holds():
            bound = self.parameters
        for parameters in bound:
            parameters.refresh(self.world, functools.partial(path_of, base))
        if bound is self.parameters:
            self.unchanged = Unchanged(
                [state for parameters in bound if not parameters.packed for state in parameters.states]
            )

    def forward(self, module: nn.Module, forward: Callable[..., object]) -> None:
        """Make `module` run `forward`, which is set on the instance, as Transformers' own styles do."""
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
