"""Checks of the operands of every op (shape, device, layout) and of its `out`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import triton.language as tl

if TYPE_CHECKING:
    from .world import World

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# The tensor, shape and dtype by name; None in a shape allows any size.
Expected = Mapping[str, tuple[torch.Tensor | None, tuple[int | None, ...], torch.dtype]]


def dims(t: torch.Tensor) -> str:
    """Return the shape, dtype and device of a tensor, for an error."""
    return f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def check_device(op: str, world: World, name: str, t: object) -> None:
    """Raise TypeError for an object that is not a tensor, and ValueError for a tensor that is not on this rank's
    device."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor on {world.device}, got {type(t).__name__}")
    if t.device.type != world.device.type or (t.device.index is not None and t.device.index != world.device.index):
        raise ValueError(f"{op}: {name} {dims(t)} is not on this rank's device, {world.device}")


def check_devices(op: str, world: World, operands: Mapping[str, object]) -> None:
    """Raise the errors of `check_device` for each operand, by name, that is not None."""
    for name, t in operands.items():
        if t is not None:
            check_device(op, world, name, t)


def check_operands(op: str, world: World, expected: Expected) -> None:
    """Raise the errors of `check_device`, ValueError for a tensor with an unexpected shape, and TypeError for a tensor
    with an unexpected dtype. The error names the first wrong operand. An operand may be None."""
    for name, (t, shape, dtype) in expected.items():
        if t is None:
            continue
        check_device(op, world, name, t)
        if t.dim() != len(shape) or any([n not in (None, size) for size, n in zip(t.shape, shape, strict=True)]):
            words = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{op}: {name} {dims(t)} must be [{words}]")
        if t.dtype != dtype:
            raise TypeError(f"{op}: {name} {dims(t)} must be {dtype}")


def dense(t: torch.Tensor) -> torch.Tensor:
    """Return `t` as a contiguous tensor, at an address aligned for bulk copies, and with allocated memory even if it
    has no elements."""
    t = t.contiguous()
    return t if bulky(t) else t.clone()


def bulk(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return `dense` of each tensor."""
    return [None if t is None else dense(t) for t in tensors]


def bulky(t: torch.Tensor) -> bool:
    """Return whether `dense` would return the tensor itself."""
    return t.is_contiguous() and t.numel() > 0 and t.data_ptr() % 16 == 0


def overlap(out: torch.Tensor | None, *others: torch.Tensor | None) -> bool:
    """Return whether `out` shares, or may share, bytes with one of the other tensors."""

    def end(t: torch.Tensor) -> int:
        last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        return t.data_ptr() + (last + 1) * t.element_size()

    return out is not None and any(
        t is not None and t.numel() and out.data_ptr() < end(t) and t.data_ptr() < end(out) for t in others
    )


def check_output(op: str, world: World, out: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError unless `out` can hold a result of this shape and dtype."""
    check_device(op, world, "out", out)
    assert isinstance(out, torch.Tensor)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"{op}: out {dims(out)} must be contiguous, {list(shape)} {dtype} on {world.device}")


def requires_grad(*tensors: object) -> bool:
    """Return whether one of these tensors requires a gradient. A later check refuses objects that are not tensors."""
    return any([isinstance(t, torch.Tensor) and t.requires_grad for t in tensors])
