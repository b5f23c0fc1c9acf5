"""Checks that the modules of a woven model's layers are Transformers' own.

A woven model computes its layers without calling most of their modules. So each module must be as Transformers made it,
when the model is woven and at every pass after that.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import Unsupported

TRUSTED = ("transformers.", "weft.")  # a woven layer calls the forwards and hooks of these, or does their work
Hooks = Mapping[int, Callable[..., object]]


def check_modules(layers: Sequence[nn.Module], called: Sequence[Hooks]) -> None:
    """Raise Unsupported, naming the module, for a class that is not the model's own, and for a foreign forward or hook,
    which would not be called. `called` are the hooks that a woven model calls as the model itself does."""
    from transformers.activations import ACT2FN

    for path, module in _named(layers):
        kind = type(module)
        modeling = sys.modules[kind.__module__]
        is_own = kind.__module__.startswith("transformers.models.") and getattr(modeling, kind.__name__, None) is kind
        if not is_own and kind not in (nn.Linear, type(ACT2FN["silu"])):
            raise Unsupported(
                f"{path} is {kind.__module__}.{kind.__qualname__}, which is not one of the model's own classes"
            )
        for forward in (kind.forward, vars(module).get("forward")):
            if forward is not None and not _is_from(forward, *TRUSTED, "torch.nn."):
                raise Unsupported(f"{path}.forward is {_name(forward)}, which a woven model would not call")
    for path, hooks in _uncalled(layers, called):
        _check_hooks(path, hooks)


class Layers:
    """The modules, forwards and hooks of a woven model's layers at the time of weaving."""

    def __init__(self, base: nn.Module, layers: Sequence[nn.Module], called: Sequence[Hooks]) -> None:
        norm = base.get_submodule("norm")
        self._hooks = [*_uncalled(layers, called), ("norm", norm._forward_pre_hooks)]
        self._hook_dicts = [hooks for _, hooks in self._hooks]
        # (path, dictionary, key, value): where each module, and each forward of an instance, is stored
        self._entries: list[tuple[str, dict[str, Any], str, object]] = []
        for path, module in (("layers", base.get_submodule("layers")), *_named(layers)):
            self._entries += [
                (f"{path}.{name}", module._modules, name, child) for name, child in module._modules.items()
            ]
        self._entries += [(f"model.{name}", base._modules, name, base._modules[name]) for name in ("layers", "norm")]
        for path, module in (*_named(layers), ("norm", norm)):
            self._entries.append((f"{path}.forward", vars(module), "forward", vars(module).get("forward")))
        self._dicts = [entries for _, entries, _, _ in self._entries]
        self._names, self._values = [name for _, _, name, _ in self._entries], [value for *_, value in self._entries]

    def check(self) -> None:
        """Raise Unsupported, naming the module, if a module or its forward was replaced, or if it has a hook that is
        not called."""
        # The comparisons loop in C, since this runs at every pass.
        if not all(map(operator.is_, map(dict.get, self._dicts, self._names), self._values)):
            path = next(path for path, entries, name, value in self._entries if entries.get(name) is not value)
            raise Unsupported(
                f"{path} was replaced after the model was woven, which has no effect on a woven model: call "
                "weft.hf.unweave(model) and weave it again"
            )
        if any(self._hook_dicts):
            for path, hooks in self._hooks:
                _check_hooks(path, hooks)


def _named(layers: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for i, layer in enumerate(layers):
        yield from layer.named_modules(prefix=f"layers.{i}")


def _uncalled(layers: Sequence[nn.Module], called: Sequence[Hooks]) -> Iterator[tuple[str, Hooks]]:
    for path, module in _named(layers):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if not any(hooks is called_hooks for called_hooks in called):
                yield path, hooks


def _check_hooks(path: str, hooks: Hooks) -> None:
    for hook in hooks.values():
        if not _is_from(hook, *TRUSTED):
            raise Unsupported(
                f"{path} has the hook {_name(hook)}, which a woven model would not call with the module's own values"
            )


def _is_from(function: object, *owners: str) -> bool:
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith(owners)


def _name(function: object) -> str:
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
