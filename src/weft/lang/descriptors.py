"""Tensor descriptors for GPUs without bulk (TMA) copies, of compute capability 8.x.

A kernel that takes descriptors begins with `x_desc = tiles_of(x_desc)`. On Hopper and later that is what the host
encoded. For an older GPU Triton makes ordinary accesses of a descriptor's, but it does not know what divides the sizes
and strides of one that the host made, and would load element by element. So there a launch replaces descriptors by
their parts (`for_gpu`), of which Triton does know that rows are whole 16-byte words, as a descriptor's
always are, and `tiles_of` makes a descriptor of them on the device: its loads become `cp.async` of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..architectures import HOPPER
from .jit import jit

OUTER = tl.constexpr(16)  # sizes that may differ by rank are passed as so many times themselves


def for_gpu(args: Mapping[str, object], capability: int) -> Mapping[str, object]:
    """A launch's arguments as a GPU of that capability takes them: before Hopper with the parts of each
    TensorDescriptor instead, its tensor, sizes, strides and block.

    Triton compiles another kernel for an integer that 16 divides, so the outer sizes, such as rows of this rank, come
    as 16 times themselves, and every rank runs the same kernel."""
    if capability >= HOPPER:
        return args
    return {name: _parts(value) if isinstance(value, TensorDescriptor) else value for name, value in args.items()}


def _parts(d: TensorDescriptor) -> tuple[object, ...]:
    """A plain tuple, whose tensor a prepared launch does not keep."""
    word = 16 // d.base.dtype.itemsize
    *outer, last = d.shape
    sizes = (*(size * OUTER.value for size in outer), last // word)
    strides = tuple(stride // word for stride in d.strides[:-1])
    return d.base, sizes, strides, tuple(tl.constexpr(n) for n in d.block_shape)


@jit
def tiles_of(desc):
    """The descriptor that a kernel's argument stands for."""
    if isinstance(desc, tl.tuple):  # assigned to names of their own, constants would be numbers
        WORD: tl.constexpr = 128 // desc[0].dtype.element_ty.primitive_bitwidth
        LAST: tl.constexpr = len(desc[3]) - 1
        shape = ()
        strides = ()
        for i in tl.static_range(LAST):
            shape = shape + (desc[1][i] // OUTER,)
            strides = strides + (desc[2][i] * WORD,)
        shape = shape + (desc[1][LAST] * WORD,)
        desc = tl.make_tensor_descriptor(desc[0], shape, strides + (1,), desc[3])
    return desc
