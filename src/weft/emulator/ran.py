"""A record of the kernels that ran, from which they are compiled. The record contains the kernels' variants, without
the memory of the tensors, and the loads that follow waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Place = tuple[tuple[str, int], ...]  # the file and line, then the file and line of each enclosing call
Function = Callable[..., object]  # the Python function behind a kernel or device function


@dataclass(frozen=True)
class Pointer:
    """A tensor without its memory: Triton specialises for a tensor's dtype and for whether its address is a multiple of
    16 bytes."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def stand_in(value: object) -> object:
    """Return a launch argument without its memory."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, TensorDescriptor):
        return TensorDescriptor(stand_in(value.base), value.shape, value.strides, value.block_shape, value.padding)
    if isinstance(value, tuple):
        fields = [stand_in(part) for part in value]
        return value._make(fields) if hasattr(value, "_make") else tuple(fields)
    return value


def _key(value: object) -> Hashable:
    """Return a key that is equal for stand-ins that compile to the same code. The key does not contain a hash of the
    kernel, because Triton would compute that hash while its language is patched."""
    if isinstance(value, Pointer):
        return value
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, len(value.shape), tuple(value.block_shape), value.padding
    if isinstance(value, tuple):
        return tuple(_key(part) for part in value)
    if isinstance(value, tl.constexpr):
        return "constexpr", _key(value.value)
    return (type(value), id(value)) if isinstance(value, JITFunction) else (type(value), str(value))


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel and the arguments of a launch for which Triton compiles it."""

    kernel: JITFunction
    args: Mapping[str, object]  # keyed by name; stand-ins replace tensors
    options: Mapping[str, int]


@dataclass
class Ran:
    """The kernels of a run."""

    variants: dict[Hashable, Variant] = field(default_factory=dict)
    functions: dict[Function, JITFunction] = field(default_factory=dict)  # kernels and the functions that they call
    behind: set[Place] = field(default_factory=set)  # loads that only a wait of the program orders after the store
    before: set[Place] = field(default_factory=set)  # loads that some program executes before any wait

    @property
    def awaited(self) -> set[Place]:
        """Return the loads that need a wait, on lines on which every load followed a wait."""
        before = {place[0] for place in self.before}
        return {place for place in self.behind if place[0] not in before}

    def launched(self, kernel: JITFunction, args: Mapping[str, object], options: Mapping[str, int]) -> None:
        stand_ins = {name: stand_in(value) for name, value in args.items()}
        key = id(kernel), *((name, _key(stand_ins[name])) for name in sorted(stand_ins)), *sorted(options.items())
        self.variants.setdefault(key, Variant(kernel, stand_ins, options))

    def add(self, later: Ran) -> None:
        for key, variant in later.variants.items():
            self.variants.setdefault(key, variant)
        self.functions |= later.functions
        self.behind |= later.behind
        self.before |= later.before
