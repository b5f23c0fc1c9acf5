"""Tensor descriptors for GPUs of compute capability 8.x, which have no bulk (TMA) copies.

A kernel with descriptor arguments begins with `x_desc = tiles_of(x_desc)`. On Hopper and later GPUs, `tiles_of` returns
the descriptor that the host encoded. For an older GPU, Triton converts accesses through a descriptor into ordinary
accesses. But Triton does not know the divisors of a host descriptor's sizes and strides, and would load element by
element. So for an older GPU a launch passes the descriptor's fields instead (`for_gpu`). From the fields Triton can
infer that rows are whole 16-byte words, which is true for every descriptor. On the device, `tiles_of` creates a
descriptor from the fields. Loads through that descriptor become `cp.async` of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..architectures import features
from .jit import jit

OUTER = tl.constexpr(16)  # a launch multiplies sizes that may differ between ranks by this number


def for_gpu(args: Mapping[str, object], capability: int) -> Mapping[str, object]:
    """Return a launch's arguments for a GPU of this compute capability. For a GPU without bulk copies, each
    TensorDescriptor is replaced by its tensor, sizes, strides and block.

    Triton compiles a separate kernel for integers divisible by 16. The outer sizes, such as the number of this rank's
    rows, are therefore multiplied by 16, so that every rank runs the same kernel.
    """
    if features(capability).tma:
        return args
    return {name: _unpacked(value) if isinstance(value, TensorDescriptor) else value for name, value in args.items()}


def _unpacked(descriptor: TensorDescriptor) -> tuple[object, ...]:
    """Return the fields of a descriptor as a plain tuple, so that a prepared launch does not keep its tensor alive."""
    word = 16 // descriptor.base.dtype.itemsize
    *outer, last = descriptor.shape
    sizes = (*(size * OUTER.value for size in outer), last // word)
    strides = tuple(stride // word for stride in descriptor.strides[:-1])
    return descriptor.base, sizes, strides, tuple(tl.constexpr(n) for n in descriptor.block_shape)


@jit
def tiles_of(desc):
    """Return a kernel's argument if it is a descriptor; otherwise make a descriptor of the fields that it contains."""
    if isinstance(desc, tl.tuple):  # if a constant were assigned to a name, it would no longer be a constexpr
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
