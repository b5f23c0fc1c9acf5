"""The state of a woven model, which records the replaced modules and how to restore them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ...errors import Unsupported
from ...plans import Plan
from ...world import World
from .modules import Layers, Numbers, copy_reason, path_of
from .parameters import Bound, Parameters, Unchanged


@dataclass
class Woven:
    """The state of a woven model.

    A deep copy of the model has its own state: every forward and function in the state is a method of an object, or has
    its arguments in a functools.partial, so that copy.deepcopy binds it to the copied modules. `model` is the whole
    model.

    `replaced` contains a line for each kind of replaced module; `left` contains the name of each module that was not
    replaced, and the reason. The functions of `undo` restore the modules. A pass with at least `two_parts` tokens runs
    in two token parts, with `two_parts_plan` for `all_reduce_rms_norm`; if `two_parts` is None, every pass runs in one
    part. `experts` is true if any layer has experts, `shards_tokens` if the hidden states of many tokens are sharded.
    For the current pass, `causal` is true if a dense mask is only causal, `depth` is the number of layers that run, and
    `recorded` is true if Transformers records hidden states.
    """

    model: nn.Module
    world: World
    plan: str | Plan
    two_parts: int | None = None
    two_parts_plan: str | Plan = "auto"
    experts: bool = False
    shards_tokens: bool = False
    causal: bool = False
    depth: int = 0
    recorded: bool = False
    replaced: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)
    layers: Layers | None = None
    unchanged: Unchanged | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> Woven:
        """Return the state of a copied model. The first pass of the copy binds its shards to its parameters. Raises
        Unsupported if a module has a forward that copy.deepcopy cannot bind to the copied module."""
        if why := copy_reason(self.model):
            raise Unsupported(why)
        twin = memo[id(self)] = copy.copy(self)
        for name, value in vars(self).items():
            setattr(twin, name, None if name == "unchanged" else copy.deepcopy(value, memo))
        return twin

    def follow(self, *shards: Bound) -> None:
        """Bind these shards to their current parameters at the start of every later pass."""
        self.parameters += [shard.parameters for shard in shards]
        self.undo += [shard.parameters.release for shard in shards]

    def check(self, base: nn.Module) -> None:
        """Check before a pass that since weaving nothing has changed except the numbers and parameters that a woven
        model follows."""
        assert self.layers is not None
        self.layers.check()
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise ValueError(
                "a woven model computes no gradients, and its parameters require them: call it under "
                "torch.inference_mode() or torch.no_grad(), or unweave it to train"
            )
        self.refresh(base)

    def refresh(self, base: nn.Module, *_: object) -> None:
        """Rebind the shards with changed parameters. This method is also the base model's hook after
        `load_state_dict`."""
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
        """Make `module` run `forward` by setting it on the instance, as Transformers' own styles do."""
        self.replace(module, "forward", forward)

    def undo_all(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def replace(self, module: nn.Module, name: str, method: Callable[..., object]) -> None:
        self.undo.append(functools.partial(_restore, module, name, vars(module).get(name)))
        setattr(module, name, method)


def _restore(module: nn.Module, name: str, method: Callable[..., object] | None) -> None:
    if method is None:
        delattr(module, name)
    else:
        setattr(module, name, method)
