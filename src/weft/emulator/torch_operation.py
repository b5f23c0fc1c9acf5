"""The reads and writes of a torch operation, and whether its result is returned to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

# Methods that read memory without an operation of the dispatcher.
HOST_READS = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__reduce_ex__,
    Tensor.__dlpack__,
    Tensor.__repr__,
    Tensor.__format__,
}


def _operators(names: str) -> set[object]:
    return {getattr(torch.ops.aten, name) for name in names.split()}


# Operations that use only a tensor's shape, dtype and device, and operations that do not read the tensor that they
# overwrite.
_SHAPE_ONLY = _operators(
    "empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_empty_strided new_zeros new_ones "
    "new_full is_same_size"
)
_OF_NUMBERS = {Tag.data_dependent_output, Tag.dynamic_output_shape}
_OVERWRITE = _operators("copy_ fill_ zero_ random_ normal_ uniform_ exponential_ bernoulli_")


class TorchOperation(NamedTuple):
    """One operation on tensors. writes: the arguments that the operation writes, in the order of its results.
    returns_numbers: its result depends on values that the host has to know, as the result of `Tensor.item` does."""

    reads: list[Tensor]
    writes: list[Tensor]
    returns_numbers: bool

    @classmethod
    def from_call(cls, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> TorchOperation:
        """Return the operation of a call of the dispatcher, from its schema."""
        arguments = func._schema.arguments
        named = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
        written = [(argument, t) for argument, value in named if argument.is_write for t in tensors_in(value)]
        overwritten = {id(t) for argument, t in written if argument.kwarg_only or func.overloadpacket in _OVERWRITE}
        taken = () if func.overloadpacket in _SHAPE_ONLY else tensors_in((args, kwargs))
        numbers = not _OF_NUMBERS.isdisjoint(func.tags) or func.overloadpacket is torch.ops.aten.is_nonzero
        return cls([t for t in taken if id(t) not in overwritten], [t for _, t in written], numbers)


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
