"""`weft.jit` makes a Triton kernel that also runs in the emulator; `Intrinsic` is the class of the few functions with a
separate emulated form.

One process can compile a kernel for a GPU and interpret it, because nothing is decided at import: a `Kernel` is an
ordinary `JITFunction` to Triton's compiler, and the emulator interprets its Python source. The environment variable
TRITON_INTERPRET is not used and must not be set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, overload

import torch
import triton.language as tl
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .._triton import rewritten_source
from ..symmetric import SymmetricTensor
from .guarded_loads import guard_loads, may_wait


class Kernel(JITFunction):
    """A kernel or device function of weft. Only `World.launch` launches kernels, and it checks them first."""

    guard_loads = True  # a kernel's value also applies to all functions that the kernel calls

    def create_binder(self) -> tuple[object, ...]:
        binder: tuple[object, ...] = super().create_binder()
        if self.guard_loads:
            self.ASTSource = rewritten_source(may_wait, guard_loads)
        return binder


Options = Mapping[str, int]  # the names of a launch's options
OPTIONS = (  # `Backend.launch`
    *("num_warps", "num_stages", "maxnreg", "co_resident", "local", "per_sm", "few_registers", "enable_fp_fusion"),
)


def check_launch(kernel: object, grid: object, options: object) -> None:
    """Raise an error for a kernel, a grid or options that one of the backends would reject."""
    name = getattr(kernel, "__name__", repr(kernel))
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{name} is not a kernel: decorate it with @weft.jit")
    if not isinstance(grid, int):
        raise TypeError(f"{name}: the grid is a number of programs, not {grid!r}")
    if grid < 1:
        raise ValueError(f"{name}: a grid of {grid} programs")
    if not isinstance(options, dict):
        raise TypeError(f"{name}: options are a dict, not {options!r}")
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"{name}: no option {', '.join(map(str, unknown))}; there are {', '.join(OPTIONS)}")


def check_arguments(kernel: JITFunction, args: object, device: torch.device) -> None:
    """Raise an error for launch arguments that no kernel accepts, or that are not on the launch's device."""
    if not isinstance(args, dict):
        raise TypeError(f"{kernel.__name__}: arguments are a dict by name, not {type(args).__name__}")
    constant = {p.name for p in kernel.params if p.is_constexpr}
    for name, value in args.items():
        if name not in constant:
            _check_argument(f"{kernel.__name__}, argument {name}", value, device)


def _check_argument(label: str, value: object, device: torch.device) -> None:
    if isinstance(value, torch.Tensor):
        if value.device != device and not (value.device.type == "cpu" and value.is_pinned()):
            raise ValueError(f"{label}: a tensor on {value.device}, and this rank is on {device}")
    elif isinstance(value, TensorDescriptor):
        _check_argument(label, value.base, device)
    elif isinstance(value, SymmetricTensor):
        raise TypeError(
            f"{label}: a SymmetricTensor is no argument: pass its .local, or its .addresses for all ranks' memory"
        )
    elif isinstance(value, tuple):
        check_tuple(label, value)
        for field, part in _fields(value):
            _check_argument(f"{label}.{field}", part, device)
    elif not (value is None or isinstance(value, (int, float, tl.constexpr, tl.dtype, JITFunction))):
        raise TypeError(
            f"{label}: a {type(value).__name__} is no argument: tensors, numbers, NamedTuples of them and None are, "
            "and what a tl.constexpr parameter takes"
        )


def check_tuple(label: str, value: object) -> None:
    """Raise an error for a descriptor in a tuple. Triton compiles a kernel with such an argument, but cannot launch
    it."""
    if isinstance(value, tuple):
        for field, part in _fields(value):
            if isinstance(part, TensorDescriptor):
                raise TypeError(
                    f"{label}.{field}: a TensorDescriptor must be an argument by itself: Triton takes none in a tuple"
                )
            check_tuple(f"{label}.{field}", part)


def _fields(value: tuple[object, ...]) -> Iterable[tuple[object, object]]:
    return zip(getattr(value, "_fields", range(len(value))), value, strict=True)


class Intrinsic(JITFunction):
    """A device function with inline assembly as its compiled body, and with an emulated form.

    While an emulated kernel runs, a call of the function calls `Intrinsic.emulated[name](*args, **kwargs)` with the
    interpreter's own scalars and tensors. The emulator fills the table when it is imported.
    """

    emulated: dict[str, Callable[..., object]] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            meaning = Intrinsic.emulated[self.fn.__name__]
        except KeyError:
            raise RuntimeError(f"{self.fn.__name__} runs inside a kernel only") from None
        return meaning(*args, **kwargs)


@overload
def jit(fn: Callable[..., object]) -> Kernel: ...
@overload
def jit(
    *, do_not_specialize: tuple[str, ...] = (), guard_loads: bool = True
) -> Callable[[Callable[..., object]], Kernel]: ...
def jit(
    fn: Callable[..., object] | None = None, *, do_not_specialize: tuple[str, ...] = (), guard_loads: bool = True
) -> Kernel | Callable[[Callable[..., object]], Kernel]:
    """Decorate a kernel or a device function (Triton syntax).

    do_not_specialize: the integer arguments that differ between ranks or between calls. For other integers, Triton
    compiles a separate kernel if the value is 1 or divisible by 16. Ranks that run different kernels can hang, and a
    call may have to wait for the compiler. Integers inside a NamedTuple cannot be listed and must be equal on every
    rank.

    guard_loads: whether loads stay after waits in loops that Triton pipelines or flattens, and waits and signals stay
    in the order of the source (lang/guarded_loads.py). Without guard_loads, `weft check` reports loads that run too
    early, but nothing reports waits that run too early. The value for a kernel applies to all device functions that the
    kernel calls.
    """

    def wrap(f: Callable[..., object]) -> Kernel:
        kernel = Kernel(f, do_not_specialize=list(do_not_specialize))
        kernel.guard_loads = guard_loads
        return kernel

    return wrap if fn is None else wrap(fn)


T = TypeVar("T", bound=tuple)


def constants(kind: type[T], **values: object) -> T:
    """Convert a NamedTuple to constants and return it. A kernel receives each field as a `tl.constexpr`, or as a nested
    NamedTuple of constants."""
    return kind(**{name: v if isinstance(v, tuple) else tl.constexpr(v) for name, v in values.items()})
