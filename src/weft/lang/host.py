"""The host's side of a BlockChannel (TileLink, Table 3): copies, and signals between streams and kernels.

    stream of rank r   rank_copy_data(chunk -> p) | rank_notify(channel of the chunk, p) | next chunk ...
    kernel of rank p   consumer_tile_wait(tile)           passes once the flag behind the tile's chunk has arrived

A copy engine cannot add, so `rank_notify` stores the number of the call. Only one rank may notify such a channel, once
per call. Copies to a peer need no SM, so they proceed even while a kernel that waits for them occupies the whole GPU.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..symmetric import Stream, check_tensors
from .channel import BlockChannel


class Host(Protocol):
    """The attributes and methods of a World that these functions use."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def counter(self, ch: BlockChannel, channel: int, rank: int, /) -> torch.Tensor: ...

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Stream, /) -> None: ...

    def signal(self, word: torch.Tensor, value: torch.Tensor, stream: Stream, /) -> None: ...

    def wait(self, word: torch.Tensor, value: torch.Tensor, stream: Stream, /) -> None: ...


def check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raise an error for a copy that a copy engine cannot perform. For such a copy torch would broadcast, convert, or
    launch a kernel, which needs SMs."""
    check_tensors("copy", dst, src)
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(f"copy of {list(src.shape)} {src.dtype} to {list(dst.shape)} {dst.dtype}")
    for direction, t in (("from", src), ("to", dst)):
        if not t.is_contiguous():
            raise ValueError(f"copy {direction} a tensor that is not contiguous: {list(t.shape)}, strides {t.stride()}")


def beyond(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as an argument of a kernel that accesses memory at a known distance outside of `x`. The emulator
    checks an access against the tensor that its pointer comes from; a pointer from this argument may access any
    tensor."""
    out = x.view_as(x)
    out.reaches_beyond = True  # type: ignore[attr-defined]
    return out


def rank_copy_data(world: Host, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
    """Copy `src` to `dst` (this rank's tensor, or `SymmetricTensor.peers[rank]`) by a copy engine. Both tensors must be
    contiguous and have the same shape and dtype."""
    check_copy(dst, src)
    world.copy(dst, src, stream)


def rank_notify(world: Host, ch: BlockChannel, channel: int, rank: int, call: torch.Tensor, stream: Stream) -> None:
    """Release by a copy engine: store `*call` to `channel` of `rank` after all work that was enqueued on `stream`
    before.

    call: int32 [1] on the device, the number of this call from 1 (`calls_of(ch)` in the kernel that waits). The number
    must not change before the copy has read it. A copy within one GPU may need SMs. So to notify this rank's own
    channel, enqueue the copy on the stream of the kernel that waits, before the launch of this kernel.
    """
    _check_channel(ch)
    if not 0 <= rank < world.size:
        raise ValueError(f"rank {rank} of a world of {world.size}")
    _check_call(call)
    world.signal(world.counter(ch, channel, rank), call, stream)


def rank_wait(world: Host, ch: BlockChannel, channel: int, call: torch.Tensor, stream: Stream) -> None:
    """Acquire: block `stream` until this rank's `channel` has reached `*call` (int32 [1] on the device)."""
    _check_channel(ch)
    _check_call(call)
    world.wait(world.counter(ch, channel, world.rank), call, stream)


def _check_channel(ch: object) -> None:
    if not isinstance(ch, BlockChannel):
        raise TypeError(f"ch is what World.channel returned, a BlockChannel, not {ch!r}")


def _check_call(call: object) -> None:
    if not isinstance(call, torch.Tensor) or call.numel() != 1 or call.dtype != torch.int32:
        raise TypeError(f"the call is an int32 tensor of one word, counted up on the device, not {call!r}")
