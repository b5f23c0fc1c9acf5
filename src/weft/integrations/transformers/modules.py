"""Checks that the modules of a woven model's layers are Transformers' own.

A woven model computes its layers without calling most of the layers' modules. So each module must be as Transformers
made it, both when the model is woven and at every later pass.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import NamedTuple, NoReturn

from torch import nn

from ...errors import Unsupported

TRUSTED = ("transformers.", "weft.")  # packages whose forwards and hooks a woven layer calls or reproduces
Hooks = Mapping[int, Callable[..., object]]


def check_modules(layers: Sequence[nn.Module], called: Sequence[Hooks]) -> None:
    """Raise Unsupported, naming the module, for a class that is not the model's own, and for a foreign forward or hook,
    which a woven model would not call. `called` are the hooks that a woven model calls as the original model does."""
    from transformers.activations import ACT2FN

    for path, module in _named(layers):
        kind = type(module)
        modeling = sys.modules[kind.__module__]
        is_own = kind.__module__.startswith("transformers.models.") and getattr(modeling, kind.__name__, None) is kind
        if not is_own and kind not in (nn.Linear, type(ACT2FN["silu"])):
            raise Unsupported(f"{path} is {class_of(module)}, which is not one of the model's own classes")
        for forward in (kind.forward, vars(module).get("forward")):
            if forward is not None and not _is_from(forward, *TRUSTED, "torch.nn."):
                raise Unsupported(f"{path}.forward is {_name(forward)}, which a woven model would not call")
    for path, hooks in _uncalled(layers, called):
        _check_hooks(path, hooks)


UNBOUND = (
    "which computes with the original's weights in a deep copy: load the model a second time in place of copying it"
)


def copy_reason(model: nn.Module) -> str | None:
    """Return why the model cannot be copied, or None if it can. The reason is a module with a forward that
    copy.deepcopy does not bind to the copied module."""
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FunctionType) and forward.__closure__:
            return f"{path}.forward is {_name(forward)}, {UNBOUND}"
    return None


def refuse_copy(why: str, memo: dict[int, object]) -> NoReturn:
    """Raise Unsupported. This function is the `__deepcopy__` of modules that cannot be copied."""
    raise Unsupported(why)


class Numbers(NamedTuple):
    """Numbers of a module that are constants in the module's shard: a woven model ignores later changes."""

    module: nn.Module
    names: tuple[str, ...]
    values: tuple[object, ...]

    @classmethod
    def built_in(cls, module: nn.Module, *followed: str) -> Numbers:
        """Return all numbers of the module except the `followed` and the private ones."""
        numbers = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, int | float) and name not in ("training", *followed) and not name.startswith("_")
        }
        return cls(module, tuple(numbers), tuple(numbers.values()))

    def check(self, path: str) -> None:
        """Raise Unsupported, naming the module and the number, if a number has changed."""
        attributes = vars(self.module)
        if all(map(operator.eq, map(attributes.get, self.names), self.values)):
            return
        for name, value in zip(self.names, self.values, strict=True):
            if (current := attributes.get(name)) != value:
                raise Unsupported(
                    f"{path}.{name} was {value} when the model was woven and is {current} now, which a woven model "
                    "does not follow: call weft.hf.unweave(model) and weave it again"
                )


class Layers:
    """The modules, forwards, hooks and unfollowed numbers of a woven model's layers at the time of weaving."""

    def __init__(
        self, base: nn.Module, layers: Sequence[nn.Module], called: Sequence[Hooks], numbers: Sequence[Numbers]
    ) -> None:
        norm, self._base = base.get_submodule("norm"), base
        self._hooks = [*_uncalled(layers, called), ("norm", norm._forward_pre_hooks)]
        self._hook_dicts = [hooks for _, hooks in self._hooks]
        # (path, module, child's name, child)
        self._children: list[tuple[str, nn.Module, str, nn.Module | None]] = []
        for path, module in (("layers", base.get_submodule("layers")), *_named(layers)):
            self._children += [(f"{path}.{name}", module, name, child) for name, child in module._modules.items()]
        self._children += [(f"model.{name}", base, name, base._modules[name]) for name in ("layers", "norm")]
        self._forwards = [
            (f"{path}.forward", module, vars(module).get("forward"))
            for path, module in (*_named(layers), ("norm", norm))
        ]
        self._numbers = numbers
        self._unchanged: Callable[[], bool] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a deep copy. It excludes the comparison, which refers to this model's modules."""
        return vars(self) | {"_unchanged": None}

    def check(self) -> None:
        """Raise Unsupported, naming what has changed, if a module, its forward or an unfollowed number was replaced, or
        if a module has a hook that is not called."""
        if self._unchanged is None:
            self._unchanged = self._comparison()
        if not self._unchanged():
            self._name_change()
        if any(self._hook_dicts):
            for path, hooks in self._hooks:
                _check_hooks(path, hooks)

    def _comparison(self) -> Callable[[], bool]:
        """Return a function that returns whether everything is unchanged. The function runs at every pass, so its loops
        run in C."""
        _, dicts, names, values = map(list, zip(*self._entries(), strict=True))
        for module, number_names, numbers in self._numbers:
            dicts += [vars(module)] * len(numbers)
            names, values = [*names, *number_names], [*values, *numbers]
        return lambda: all(map(operator.eq, map(dict.get, dicts, names), values))

    def _entries(self) -> Iterator[tuple[str, Mapping[str, object], str, object]]:
        """Yield an entry for each child and each forward: its path, the dictionary that contains it, its name in the
        dictionary, and its value when the model was woven."""
        for path, module, name, child in self._children:
            yield path, module._modules, name, child
        for path, module, forward in self._forwards:
            yield path, vars(module), "forward", forward

    def _name_change(self) -> None:
        for path, values, name, value in self._entries():
            if values.get(name) != value:
                raise Unsupported(
                    f"{path} was replaced after the model was woven, which has no effect on a woven model: call "
                    "weft.hf.unweave(model) and weave it again"
                )
        for numbers in self._numbers:
            numbers.check(path_of(self._base, numbers.module))


def class_of(module: object) -> str:
    """Return the name of a module's class, prefixed by the name of the Python module that defines the class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def path_of(base: nn.Module, module: nn.Module) -> str:
    """Return the name of `module` in the model, or its type's name."""
    return next((name for name, child in base.named_modules() if child is module), type(module).__name__)


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
