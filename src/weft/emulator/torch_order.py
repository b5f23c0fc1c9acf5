"""This module runs the torch operations of host code in the order of the rank's current stream.

On a GPU a torch operation is enqueued on the current stream, after the kernels that are already there. In the emulator,
a torch operation computes on CPU memory at once. Therefore an operation on a tensor that the emulator tracks first
waits until the current stream is drained, and its reads and writes are recorded as the stream's own. An operation that
no event orders after a kernel on another stream is a race. An operation that returns a number instead of a tensor also
orders the host after the stream, as on a GPU.

If operators return after their streams are drained, torch operations are ordered only while a stream of the rank has
remaining work that host code itself has enqueued (`TorchOrder.set`). Otherwise (`spmd(..., ahead=True)`) they are
always ordered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, overrides
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from .torch_operation import HOST_READS, TorchOperation, tensors_in

if TYPE_CHECKING:
    from .machine import Machine

Mode = TorchDispatchMode | TorchFunctionMode


def _in_memory(t: Tensor) -> bool:
    return t.numel() > 0 and t.layout is torch.strided and t.device.type == "cpu"


class StreamOrder(TorchDispatchMode):
    """Run the torch operations of one rank's host thread in the order of its current stream."""

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()
        self.machine, self.rank = machine, rank

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        host = self.machine.host_threads[self.rank]
        if host.in_call or not self._ordered() or func.is_view:
            return func(*args, **kwargs)
        operation = TorchOperation.from_call(func, args, kwargs)
        reads, writes = ([t for t in tensors if self._known(t)] for tensors in operation[:2])
        if not reads and not writes:
            return func(*args, **kwargs)
        with host.calling():
            self.machine.streams.torch_operation(self.rank, func.__name__, reads, writes, operation.returns_numbers)
            result = func(*args, **kwargs)
            self.machine.streams.written_by_torch(
                self.rank, [t for t in tensors_in(result) if _in_memory(t) and not self._known(t)]
            )
        return result

    def _ordered(self) -> bool:
        return self.machine.ahead or not self.machine.streams.idle_on(self.rank)

    def _known(self, t: Tensor) -> bool:
        """Return whether an operation of the emulator has used this memory."""
        if not _in_memory(t):
            return False
        region = self.machine.memory.find(t.data_ptr(), t.data_ptr() + 1)
        return region is not None and not region.storage.expired()

    def host_reads(self, t: Tensor) -> None:
        """Order the host, which is about to read the tensor's memory, after the current stream."""
        host = self.machine.host_threads[self.rank]
        if self._ordered() and self._known(t):
            with host.calling():
                self.machine.streams.torch_operation(self.rank, "a read by the host", [t], [], True)


class HostReads(TorchFunctionMode):
    """Order host reads of a tensor's memory that are not operations and so bypass `StreamOrder`."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self.order = order

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in HOST_READS:
            self.order.host_reads(cast(Tensor, args[0]))
        return func(*args, **(kwargs or {}))


class TorchOrder:
    """Switch the order of one rank's torch operations on and off."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.dispatch = StreamOrder(machine, rank)
        self.function = HostReads(self.dispatch)

    def set(self, busy: bool) -> None:
        """Switch the order on or off on the calling thread. The rank's torch modes are placed below the modes that host
        code has entered, so that host code may leave its own modes in any order."""
        dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
        if (self.dispatch in dispatch_modes) != busy:
            _put_lowest(self.dispatch, busy, dispatch_modes, _python_dispatch)
            _put_lowest(self.function, busy, overrides._get_current_function_mode_stack(), overrides)


def _put_lowest(mode: Mode, present: bool, stack: Sequence[Mode], of_torch: ModuleType) -> None:
    """Put a mode below all other modes on torch's stack, or remove the mode. of_torch: the module of the stack."""
    for _ in stack:
        of_torch._pop_mode()
    for kept in [*([mode] if present else ()), *(m for m in stack if m is not mode)]:
        of_torch._push_mode(kept)
