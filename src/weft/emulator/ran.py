"""What of kernels ran, so that it can be compiled: variants of kernels without their tensors' memory, and loads behind
waits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Place = tuple[tuple[str, int], ...]  # file and line, then those of the calls that led there
Function = Callable[..., object]  # of Python, as a kernel was written


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor: Triton compiles for its dtype, and for whether it begins at a whole 16-byte word."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def stand_in(value: object) -> object:
    """The launch argument without memory."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, TensorDescriptor):
        return TensorDescriptor(stand_in(value.base), value.shape, value.strides, value.block_shape, value.padding)
    if isinstance(value, tuple):
        parts = [stand_in(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def _key(value: object) -> Hashable:
    """Equal for stand-ins that compile to the same. No hash of a kernel: Triton would make it while its language is
    patched."""
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
    """A kernel as it was launched."""

    kernel: JITFunction
    args: Mapping[str, object]  # by name, stand-ins for tensors
    options: Mapping[str, int]


@dataclass
class Ran:
    variants: dict[Hashable, Variant] = field(default_factory=dict)
    functions: dict[Function, JITFunction] = field(default_factory=dict)  # kernels and what they call
    behind: set[Place] = field(default_factory=set)  # loads of what the program could know of by a wait of its own only
    before: set[Place] = field(default_factory=set)  # loads that some program made before any wait

    @property
    def awaited(self) -> set[Place]:
        """Loads that need a wait, and whose line had one before it whenever one was made there."""
        before = {place[0] for place in self.before}
        return {place for place in self.behind if place[0] not in before}

    def launched(self, kernel: JITFunction, args: Mapping[str, object], options: Mapping[str, int]) -> None:
        made = {name: stand_in(value) for name, value in args.items()}
        key = id(kernel), *((name, _key(made[name])) for name in sorted(made)), *sorted(options.items())
        self.variants.setdefault(key, Variant(kernel, made, options))

    def add(self, other: Ran) -> None:
        for key, variant in other.variants.items():
            self.variants.setdefault(key, variant)
        self.functions |= other.functions
        self.behind |= other.behind
        self.before |= other.before
