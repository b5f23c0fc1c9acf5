"""Values that differ between the threads of one program, computed from %tid, and branches that depend on them.

In the emulator a program is one task, and its values are whole blocks. The number of a thread is an exception: a
`ThreadTensor` contains a value for each thread. Kernels can compute with it, compare it, and branch on it. An `if` then
runs its body for the threads whose condition is true, and its `else` afterwards for the other threads. The emulator
refuses any other use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import triton.language as tl

from ..errors import Unsupported

if TYPE_CHECKING:
    from .tasks import Task

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# Thread numbers are not negative, so division rounds in the same way in Python and on the GPU.
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")


def _refuse(use: str) -> NoReturn:
    raise Unsupported(f"{use} that depends on the number of a thread (%tid): the emulator takes it under `if` alone")


class ThreadTensor(tl.tensor):
    """A scalar with the value by_thread[t] on thread t; used as a tensor, it has the value of thread 0."""

    exist = False  # whether any ThreadTensor exists, so that functions of the language have to check for them

    def __init__(self, plain: tl.tensor, by_thread: np.ndarray) -> None:
        super().__init__(plain.handle, plain.type)
        self.plain, self.by_thread = plain, by_thread
        ThreadTensor.exist = True

    def __bool__(self) -> bool:
        _refuse("a loop, or a condition with `and`, `or` or `not`,")

    def to(self, dtype: tl.dtype, **_: object) -> ThreadTensor:
        return ThreadTensor(self.plain.to(dtype), self.by_thread)


def _method(name: str, operation: Callable[..., np.ndarray]) -> Callable[..., object]:
    """Return the method of this name of tl.tensor, for values that differ between threads."""

    def apply(self: ThreadTensor, operand: object, **_: object) -> object:
        if isinstance(operand, ThreadTensor):
            plain_operand, values = operand.plain, operand.by_thread
        elif isinstance(operand, tl.tensor):
            if operand.handle.data.size > 1 or operand.dtype.is_ptr():
                _refuse("a block or an address")
            plain_operand, values = operand, operand.handle.data.item()
        else:
            plain_operand, values = operand, np.asarray(getattr(operand, "value", operand))
        plain = getattr(tl.tensor, name)(self.plain, plain_operand)
        return ThreadTensor(plain, operation(self.by_thread.astype(np.int64), np.asarray(values, np.int64)))

    return apply


for _name in (*_COMPARISONS, *_ARITHMETIC):
    _operation = getattr(operator, f"__{_name}__")
    setattr(ThreadTensor, f"__{_name}__", _method(f"__{_name}__", _operation))
    if _name in _ARITHMETIC:
        setattr(ThreadTensor, f"__r{_name}__", _method(f"__r{_name}__", lambda a, b, do=_operation: do(b, a)))


def refuse_thread_values(*values: object) -> None:
    """Raise Unsupported if one of a function's arguments differs between threads."""
    if any(isinstance(value, ThreadTensor) for value in values):
        _refuse("a function of the language")


class Branch:
    """An `if` statement whose condition may differ between threads. While `then()` or `otherwise()` is true and until
    `leave()`, the task's `threads` are the threads that take the branch."""

    def __init__(self, task: Task, condition: object) -> None:
        self.task, self.before = task, task.threads
        self.taken: np.ndarray | None = None
        if isinstance(condition, ThreadTensor):
            everyone = np.ones(len(condition.by_thread), np.bool_) if self.before is None else self.before
            self.taken = everyone & condition.by_thread.astype(np.bool_)
            self.left = everyone & ~self.taken
        else:
            self.value = bool(condition)

    def then(self) -> bool:
        return self.value if self.taken is None else self._enter(self.taken)

    def otherwise(self) -> bool:
        return not self.value if self.taken is None else self._enter(self.left)

    def _enter(self, threads: np.ndarray) -> bool:
        if threads.any():
            self.task.threads = threads
        return bool(threads.any())

    def returns(self) -> None:
        """Refuse a return by only some threads of the program, because the other threads would continue."""
        if self.taken is not None and self.task.threads is not None and not self.task.threads.all():
            _refuse("a return in a branch")

    def leave(self) -> None:
        self.task.threads = self.before
