"""torch.distributed._symmetric_memory on emulated ranks: memory with one copy per rank, which all ranks address, and
signal pads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed._symmetric_memory as symm_mem

from ...errors import Mismatch
from .cuda import Stream
from .ranks import Rank, current_rank, refused, untracked

SIGNAL_PAD_BYTES = 2048  # torch's default size
_state = {"signal pad": SIGNAL_PAD_BYTES}


class SymmetricHandle:
    """The result of `rendezvous`: every rank's copy of a tensor allocated by `empty`, and every rank's signal pad."""

    def __init__(self, rank: Rank, tensor: torch.Tensor) -> None:
        self._rank, self.rank, self.world_size = rank, rank.rank, rank.size
        self.device, self.offset, self.multicast_ptr = torch.device("cuda", rank.rank), 0, 0
        backend = rank.backend
        with untracked():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            start = tensor.data_ptr() - raw.data_ptr()
            local = raw[start : start + tensor.numel() * tensor.element_size()]
            pad = backend.zeros((_state["signal pad"] // 4,), torch.int32)
            backend.name_elements(pad, _next_name(rank, "signal pad"))
            peers = backend._exchange((local, pad, tuple(tensor.shape), tensor.dtype))
        for number, (_, _, shape, dtype) in enumerate(peers):
            if (shape, dtype) != (tuple(tensor.shape), tensor.dtype):
                raise Mismatch(
                    f"rendezvous: rank {rank.rank} has {list(tensor.shape)} {tensor.dtype}, "
                    f"rank {number} {list(shape)} {dtype}"
                )
        self._buffers: list[torch.Tensor] = [buffer for buffer, *_ in peers]
        self._pads: list[torch.Tensor] = [pad for _, pad, *_ in peers]
        self.buffer_size, self.signal_pad_size = local.numel(), pad.numel() * 4
        with untracked():
            typed = [b.view(tensor.dtype) for b in self._buffers]
            bounds = backend.machine.bounds
            tables = [backend.table(typed, "symmetric memory"), backend.table(self._pads, "signal pad")]
            self._tables = tables
            self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = (bounds.pointer(t, "table of pointers") for t in tables)
            self.buffer_ptrs, self.signal_pad_ptrs = (t.tolist() for t in tables)

    @staticmethod
    def has_multicast_support(*_: object) -> bool:
        return False

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        return _part(self._buffers[rank], sizes, dtype, storage_offset)

    get_remote_tensor = get_buffer

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        pad = self._pads[rank]
        with untracked():
            raw = pad.view(torch.uint8)
        kind = dtype or torch.uint32
        return _part(raw, sizes or [raw.numel() // kind.itemsize], kind, storage_offset)

    # -- operations of the stream, by one thread for each peer
    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        for step in range(1, self.world_size):
            self.put_signal((self.rank + step) % self.world_size, channel)
        for step in range(1, self.world_size):
            self.wait_signal((self.rank - step) % self.world_size, channel)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Enqueue a wait until the word for this rank in a peer's pad is 0, followed by a releasing store of 1."""
        self._swap(self._word(dst_rank, self.rank, channel), 0, 1, f"put_signal to rank {dst_rank}")

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Enqueue an acquiring wait until the word for a peer in this rank's pad is 1, followed by a store of 0."""
        self._swap(self._word(self.rank, src_rank, channel), 1, 0, f"wait_signal from rank {src_rank}")

    @staticmethod
    def stream_write_value32(input: torch.Tensor, offset: int, val: int) -> torch.Tensor:
        """Enqueue a store of a word by the stream itself."""
        written: torch.Tensor = torch.ops.symm_mem.stream_write_value32_(input, offset, val)
        return written

    def _word(self, owner: int, sender: int, channel: int) -> int:
        index = self.world_size * channel + sender
        if not 0 <= index < self._pads[owner].numel():
            raise IndexError(
                f"channel {channel} of {self.world_size} ranks lies outside a pad of {self.signal_pad_size} bytes"
            )
        return self._pads[owner].data_ptr() + 4 * index

    def _swap(self, address: int, expected: int, value: int, text: str) -> None:
        machine, stream = self._rank.backend.machine, self._rank.stream()

        def do() -> None:
            machine.poll_word(address, lambda word: word == expected, acquires=bool(expected))
            machine.store_word(address, value, store=False, releases=not expected)

        self._rank.enqueue_or_capture(lambda: self._rank.streams.enqueue(stream, text, do))


def _next_name(rank: Rank, name: str) -> str:
    """Return a name for reports, which from a rank's second tensor of this name on ends with the tensor's number."""
    rank.named[name] += 1
    return name if rank.named[name] == 1 else f"{name} {rank.named[name]}"


def _part(raw: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
    """Return elements of a rank's bytes as a tensor. Raises ValueError for elements outside these bytes."""
    shape = [int(n) for n in sizes]
    begin, end = storage_offset * dtype.itemsize, (storage_offset + math.prod(shape)) * dtype.itemsize
    if end > raw.numel():
        raise ValueError(f"{shape} {dtype} at element {storage_offset} lies outside {raw.numel()} bytes")
    with untracked():
        return raw[begin:end].view(dtype).view(shape)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, device: object = None) -> torch.Tensor:
    """Return unwritten memory for `rendezvous`."""
    shape = size[0] if isinstance(size[0], Sequence) else [int(n) for n in size if isinstance(n, int)]
    rank = current_rank()
    with untracked():
        tensor = rank.backend.empty(tuple(shape), dtype or torch.get_default_dtype())
        rank.backend.name_elements(tensor, _next_name(rank, "symmetric memory"))
    return tensor


def rendezvous(tensor: torch.Tensor, group: object = None) -> SymmetricHandle:
    """Return the SymmetricHandle of a tensor of `empty`, the same object each time. Collective."""
    rank = current_rank()
    handles = rank.__dict__.setdefault("handles", {})
    key = tensor.data_ptr()
    if key not in handles:
        handles[key] = SymmetricHandle(rank, tensor)
        handles[key].tensor = tensor  # the memory exists as long as the rank does
    return handles[key]


def _workspace(group: object, min_size: int) -> SymmetricHandle:
    rank = current_rank()
    spaces = rank.__dict__.setdefault("workspaces", [])
    if not spaces or spaces[-1].buffer_size < min_size:
        spaces.append(rendezvous(empty(min_size, dtype=torch.uint8)))
    return spaces[-1]


def _backend_stream(priority: int = 0) -> Stream:
    """Return the rank's stream of this priority for torch's local pipelines, the same stream each time."""
    streams = current_rank().__dict__.setdefault("backend_streams", {})
    if priority not in streams:
        streams[priority] = Stream(priority=priority)
    stream: Stream = streams[priority]
    return stream


def replacements() -> Iterator[tuple[object, str, object]]:
    """Yield (place, name, value) of each object that replaces torch's."""
    functions = dict(
        empty=empty,
        rendezvous=rendezvous,
        get_symm_mem_workspace=_workspace,
        _get_backend_stream=_backend_stream,
        enable_symm_mem_for_group=lambda group: None,
        is_symm_mem_enabled_for_group=lambda group: True,
        is_symm_mem_tensor=lambda t: t.data_ptr() in current_rank().__dict__.get("handles", {}),
        set_backend=lambda name: None,
        get_backend=lambda device=None: "CUDA",
        is_nvshmem_available=lambda: False,
        get_signal_pad_size=lambda: _state["signal pad"],
        set_signal_pad_size=lambda size: _state.update({"signal pad": size}),
        **{name: refused(f"{symm_mem.__name__}.{name}") for name in ("get_mem_pool", "put_signal", "wait_signal")},
    )
    for name, value in functions.items():
        yield symm_mem, name, value
    yield symm_mem._SymmetricMemory, "signal_pad_size", _state["signal pad"]
