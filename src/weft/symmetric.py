"""Symmetric memory, which every rank allocates and all ranks can address, and helpers for the memory and streams of a
World."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

Stream: TypeAlias = Any  # torch.cuda.Stream or the emulator's stream; only the backend itself interprets it
Reads: TypeAlias = Sequence[torch.Tensor | Callable[[], torch.Tensor]]  # `Backend.call` describes the functions

VIEWS = 4096  # cached views of one symmetric tensor


def outlives_call() -> AbstractContextManager[None]:
    """Return a context manager for creating objects that a World keeps. The context manager suspends the torch modes of
    the call that first needs the objects: outside inference mode, torch refuses writes to tensors that were created in
    it."""
    return _outside_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:  # the guard restored the keys that it found, but emulated ranks enter and leave dispatcher modes meanwhile
        for key in ("Python", "PythonTLSSnapshot"):
            torch._C._dispatch_tls_set_dispatch_key_included(key, torch._C._len_torch_dispatch_stack() > 0)


def check_memory(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the sizes as a tuple; raise TypeError or ValueError if these are not a shape and a dtype."""
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"a shape is a sequence of integers, such as (16, 64), not {shape!r}") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"a shape has no negative sizes: {sizes}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is one of torch's, such as torch.float32, not {dtype!r}")
    return sizes


def check_tensors(caller: str, *tensors: object) -> None:
    """Raise TypeError for an object that is not a tensor."""
    for t in tensors:
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{caller}: tensors are needed, not {type(t).__name__}")


@dataclass(frozen=True, eq=False)
class SymmetricTensor:
    """Memory with one shape on every rank, which all ranks can address.

    `local` is this rank's copy; `peers[r]` is rank r's copy as a tensor that this rank can read and write
    (`peers[rank]` is `local`); `addresses` is an int64 device tensor [world] with the address of every rank's copy, for
    kernels; `multicast` is the address that refers to all copies at once (NVLink multicast), or 0 without multicast.
    The memory is zero-filled at creation. A reference to any of the tensors keeps the memory alive.
    """

    local: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    multicast: int = 0
    _views: dict[tuple[tuple[int, ...], torch.dtype], SymmetricTensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Return, on every rank, the bytes from byte `offset` on, with this shape and dtype. A view at offset 0 is
        cached, because every eager call requests it."""
        key = (tuple(shape), dtype)
        if offset == 0 and key in self._views:
            return self._views[key]
        nbytes = math.prod(shape) * dtype.itemsize
        multicast = self.multicast + offset if self.multicast else 0
        with outlives_call():
            local, *peers = [
                t.view(torch.uint8).view(-1)[offset : offset + nbytes].view(dtype).view(*shape)
                for t in (self.local, *self.peers)
            ]
            addresses = self.table(peers, offset)
            view = replace(self, local=local, peers=tuple(peers), addresses=addresses, multicast=multicast, _views={})
        if offset == 0:
            if len(self._views) >= VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def table(self, peers: Sequence[torch.Tensor], offset: int) -> torch.Tensor:
        """Return the `addresses` of a view whose `peers` begin `offset` bytes further on."""
        return self.addresses + offset if offset else self.addresses  # an addition is a launch
