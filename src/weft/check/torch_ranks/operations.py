"""Operations of torch run in the order of a rank's current stream, which records the memory that they read and
write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...emulator.tasks import EmulatedStream
from ...emulator.torch_operation import HOST_READS, TorchOperation, tensors_in
from ...errors import Unsupported
from .ranks import Rank, current_rank, next_state, untracked, with_random_numbers

Operator: TypeAlias = Any  # an operator that torch dispatches, or an argument or result of one
Operands: TypeAlias = tuple[Operator, ...]
Keywords: TypeAlias = dict[str, Operator]
RandomState: TypeAlias = Callable[[], torch.Tensor]  # returns the state in which an operation draws random numbers

CPU = torch.device("cpu")
_REFUSED = {"set_", "resize_", "resize_as_"}


def _on_cpu(value: object) -> object:
    """Return a device argument that names a GPU as the CPU, and any other argument unchanged."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return CPU
    return value


def _copied_to_host(t: torch.Tensor, *args: Operator, **kwargs: Operator) -> torch.Tensor:
    """Return a copy that later writes on the device do not change. The host waits for the copy."""
    copy = t.clone()
    current_rank().wait_for(current_rank().stream())
    return copy.to(*args, **kwargs) if args or kwargs else copy


def _to_host(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether the arguments of `Tensor.to` name the CPU."""
    named = [*args, kwargs.get("device")]
    return any(a == "cpu" or (isinstance(a, torch.device) and a.type == "cpu") for a in named)


class Devices(TorchFunctionMode):
    """Make every tensor report the rank's GPU as its device, although it is in CPU memory."""

    def __torch_function__(
        self, func: Operator, types: object, args: Operands = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", current_rank().rank)
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func is torch.Tensor.get_device:
            return current_rank().rank
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.cpu:
            return _copied_to_host(args[0])
        if func is torch.Tensor.to and _to_host(args[1:], kwargs):
            return _copied_to_host(*args, **kwargs)
        if func in HOST_READS:
            current_rank().wait_for(current_rank().stream())
            with untracked():
                return func(*args, **kwargs)
        return func(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})


class Operations(TorchDispatchMode):
    """Enqueues every operation on the rank's current stream. The results have memory at once, but receive their values
    only when the stream has run the operation."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Operands = (), kwargs: Keywords | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        name = func._schema.name.partition("::")[2]
        if func._schema.name == "symm_mem::stream_write_value32_":
            return self._write_value(*args, **kwargs)
        if name in _REFUSED or not func._schema.name.startswith(("aten::", "prims::")):
            raise Unsupported(f"the emulator does not run {func._schema.name}")
        generator = kwargs.get("generator") or self.rank.generator
        if "generator" in kwargs:
            kwargs["generator"] = None  # the operation draws from the process's generator, in the state of `generator`
        with untracked():
            if func.is_view:
                out = func(*args, **kwargs)
                if _shares_memory(out, args, kwargs):
                    return out  # otherwise the operation was a copy
            operation = TorchOperation.from_call(func, args, kwargs)

            def draw() -> object:
                other_args, other_kwargs = tree_map_only(torch.Tensor, torch.empty_like, (args, kwargs))
                return func(*other_args, **other_kwargs)

            numbers = functools.partial(next_state, generator, None if operation.reads else draw)
            if operation.returns_numbers:
                return self._value(func, operation, args, kwargs, numbers)
            try:
                shapes = self._shapes(func, args, kwargs)
            except NotImplementedError:  # torch cannot compute the shapes without the values
                return self._value(func, operation, args, kwargs, numbers)
            return self._enqueued(func, operation, args, kwargs, shapes, numbers)

    def _value(
        self, func: Operator, operation: TorchOperation, args: Operands, kwargs: Keywords, numbers: RandomState
    ) -> object:
        """Run an operation whose value the host needs, after the stream has reached it."""
        result: list[object] = []
        stream = self.rank.stream()
        self._run(lambda: result.append(func(*args, **kwargs)), func, operation.reads, [], stream, numbers)
        self.rank.wait_for(stream)
        return result[0]

    def _enqueued(
        self,
        func: Operator,
        operation: TorchOperation,
        args: Operands,
        kwargs: Keywords,
        shapes: object,
        numbers: RandomState,
    ) -> object:
        """Enqueue an operation whose results have these shapes, and return them."""
        reads, writes, _ = operation
        returned, spec = tree_flatten(shapes)
        targets = iter(writes)
        fresh: list[torch.Tensor] = []
        results: list[object] = []
        for like in returned:
            if not isinstance(like, torch.Tensor):
                results.append(like)
            elif writes:
                results.append(next(targets))
            else:
                fresh.append(self._memory(like))
                results.append(fresh[-1])
        name = func._schema.name.partition("::")[2]
        if name.startswith(("empty", "new_empty")):
            return tree_unflatten(results, spec)

        if name == "copy_" and args[0].dtype == args[1].dtype and args[0].shape == args[1].shape:
            dst, src, stream = args[0], args[1], self.rank.stream()
            self.rank.enqueue_or_capture(lambda: self.rank.streams.copy(dst, src, stream))
            return dst

        def run() -> None:
            values = tensors_in(func(*args, **kwargs))
            for memory, value in zip(fresh, values if fresh else (), strict=True):
                memory.copy_(value)

        self._run(run, func, reads, [*writes, *fresh], self.rank.stream(), numbers)
        return tree_unflatten(results, spec)

    def _run(
        self,
        run: Callable[[], object],
        func: Operator,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        stream: EmulatedStream,
        numbers: RandomState,
    ) -> None:
        def enqueue() -> None:
            named: functools.partial[object] = functools.partial(run)
            if torch.Tag.nondeterministic_seeded in func.tags:
                named = functools.partial(with_random_numbers, numbers(), run)
            named.__name__ = func._schema.name  # type: ignore[attr-defined]
            self.rank.streams.call(named, reads, writes, stream)

        self.rank.enqueue_or_capture(enqueue)

    def _shapes(self, func: Operator, args: Operands, kwargs: Keywords) -> object:
        """Return the results without values."""
        meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        meta_kwargs = {k: torch.device("meta") if isinstance(v, torch.device) else v for k, v in meta[1].items()}
        if any(a.name == "device" for a in func._schema.arguments) and "device" not in meta_kwargs:
            meta_kwargs["device"] = torch.device("meta")
        return func(*meta[0], **meta_kwargs)

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        """Return new, unwritten memory of the rank with a tensor's shape and strides."""
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        memory = self.rank.backend.empty((span,), like.dtype)
        self.rank.allocated.append(memory)
        return memory.as_strided(like.shape, like.stride())

    def _write_value(self, word: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Store a word by the stream itself, after a memory barrier (cuStreamWriteValue32)."""
        with untracked():
            target = word.view(torch.int32)[offset : offset + 1]
            value = self.rank.backend.tensor([val - (1 << 32) if val >= 1 << 31 else val], torch.int32)
            stream = self.rank.stream()
            self.rank.enqueue_or_capture(lambda: self.rank.streams.signal(target, value, stream))
        return word


def _shares_memory(out: object, args: object, kwargs: object) -> bool:
    storages = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
    return all(t.untyped_storage().data_ptr() in storages for t in tensors_in(out))
