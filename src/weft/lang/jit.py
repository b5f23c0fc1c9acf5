"""`weft.jit`: a Triton kernel that also runs in the emulator, and `intrinsic`: the few functions that differ there.

One process can compile a kernel for a GPU and interpret it, because nothing is decided at import: a `Kernel` is an
ordinary `JITFunction` to Triton's compiler, and the emulator interprets its Python source. The environment variable
TRITON_INTERPRET is not used and must not be set.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.jit import JITFunction


class Kernel(JITFunction):
    """A kernel or device function of weft. Launched through `World.launch` only, which checks it first."""


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

    Raises ValueError for a loop with flatten=True that Triton 3.6 is known to compile to something else than it says.
    """

    def wrap(f: Callable[..., Any]) -> Kernel:
        kernel = Kernel(f, do_not_specialize=list(do_not_specialize))
        for name, line in carried(kernel.parse()):
            raise ValueError(
                f"{f.__name__}, line {kernel.starting_line_number + line - 1}: `{name}` is carried from one round of a loop "
                "with flatten=True to the next and read in its inner loop, where Triton gives the next round's value; write "
                "one loop over all inner steps (docs/writing-kernels.md, rule 2)"
            )
        return kernel

    return wrap if fn is None else wrap(fn)


def carried(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a flattened loop assigns behind an inner loop that reads them, and the lines of these inner loops."""
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
            continue
        flatten = next((k.value for k in loop.iter.keywords if k.arg == "flatten"), ast.Constant(False))
        if isinstance(flatten, ast.Constant) and not flatten.value:
            continue
        known = _names(loop.target, ast.Store)
        for i, statement in enumerate(loop.body):
            if isinstance(statement, ast.For):
                later = set().union(*(_names(s, ast.Store) for s in loop.body[i + 1 :]))
                yield from ((name, statement.lineno) for name in sorted(_names(statement, ast.Load) & later - known))
            known |= _names(statement, ast.Store)


def _names(node: ast.AST, context: type) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def intrinsic(fn: Callable[..., Any]) -> Intrinsic:
    """Decorate a device function whose body is inline assembly (see `Intrinsic`)."""
    return Intrinsic(fn)
