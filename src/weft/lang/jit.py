"""`weft.jit`: a Triton kernel that also runs in the emulator, and `intrinsic`: the few functions that differ there.

One process can compile a kernel for a GPU and interpret it, because nothing is decided at import: a `Kernel` is an
ordinary `JITFunction` to Triton's compiler, and the emulator interprets its Python source. The environment variable
TRITON_INTERPRET is not used and must not be set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import JITFunction


class Kernel(JITFunction):
    """A kernel or device function of weft. Launched through `World.launch` only, which checks it first."""


OPTIONS = ("num_warps", "num_stages", "maxnreg", "beside", "local", "per_sm", "few_registers")  # see `Backend.launch`


def check_launch(kernel: Any, grid: Any, options: Any) -> None:
    """Raise for a grid or options that only some backend would take."""
    name = kernel.__name__
    if not isinstance(grid, int):
        raise TypeError(f"{name}: the grid is a number of programs, not {grid!r}")
    if grid < 1:
        raise ValueError(f"{name}: a grid of {grid} programs")
    if not isinstance(options, dict):
        raise TypeError(f"{name}: options are a dict, not {options!r}")
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"{name}: no option {', '.join(map(str, unknown))}; there are {', '.join(OPTIONS)}")


class Intrinsic(JITFunction):
    """A device function whose compiled body is inline assembly; the emulator supplies what it means.

    While an emulated kernel runs, calling it calls `Intrinsic.emulated[name](*args, **kwargs)` with the interpreter's
    own scalars and tensors. The emulator fills the table when it is imported.
    """

    emulated: dict[str, Callable[..., Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            meaning = Intrinsic.emulated[self.fn.__name__]
        except KeyError:
            raise RuntimeError(f"{self.fn.__name__} runs inside a kernel only") from None
        return meaning(*args, **kwargs)


def jit(fn: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """Decorate a kernel or a device function (Triton syntax).

    do_not_specialize: integer arguments that differ between ranks. Triton compiles another kernel for an integer equal
    to 1 or divisible by 16, and ranks that run different kernels can hang; integers inside a NamedTuple cannot be
    listed and must be equal on every rank.
    """

    def wrap(f: Callable[..., Any]) -> Kernel:
        return Kernel(f, do_not_specialize=list(do_not_specialize))

    return wrap if fn is None else wrap(fn)


def intrinsic(fn: Callable[..., Any]) -> Intrinsic:
    """Decorate a device function whose body is inline assembly (see `Intrinsic`)."""
    return Intrinsic(fn)
