"""Small tables are copied to a GPU without making the host wait for its streams."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import WeftError

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def any_call_allowed() -> Iterator[None]:
    """Return a context manager that lets this thread make calls that CUDA forbids while any thread captures a stream,
    since some of them would affect the capture. The thread queries only events that no capture contains."""
    mode = ctypes.c_int(RELAXED)
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Uploads:
    """The uploads of a rank, and the order of other streams after them.

    An upload is a copy from pinned memory on the current stream. A later reader of the tensor may be on any stream.
    Therefore each launch, and each call of an operator, first orders its stream after the uploads that have not ended
    (`precede`). Without uploads, `precede` only checks that `pending` is empty. `pending` maps the event of each copy
    to the tensor, and so keeps the tensor's memory until the copy ends. Threads may add and remove entries at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: dict[torch.cuda.Event, torch.Tensor] = {}

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of these values on the GPU. Raise WeftError in a capture, because streams outside it cannot
        wait for its events."""
        if torch.cuda.is_current_stream_capturing():
            raise WeftError("a table is needed inside a CUDA graph capture: make the call once before it")
        pinned = torch.tensor(list(values), dtype=dtype, device="cpu", pin_memory=True)
        with torch.cuda.device(self.device):
            tensor = pinned.to(self.device, non_blocking=True)  # torch keeps `pinned` alive until the copy has ended
            copied = torch.cuda.Event()
            copied.record()
        self.pending[copied] = tensor
        return tensor

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Order later operations of `stream` after all uploads. A captured stream cannot wait for an event from outside
        the capture, so the host waits instead: only a first call uploads, and captures come later."""
        with any_call_allowed():
            capturing = torch.cuda.is_current_stream_capturing()
            for copied in list(self.pending):
                if capturing:
                    copied.synchronize()
                if copied.query():
                    self.pending.pop(copied, None)
                else:
                    stream.wait_event(copied)
