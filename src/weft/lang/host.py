"""The host's side of a BlockChannel (TileLink, Table 3): copies, and signals between streams and kernels.

    stream of rank r   rank_copy_data(chunk -> p) | rank_notify(channel of the chunk, p) | next chunk ...
    kernel of rank p   consumer_tile_wait(tile)           goes on once the flag behind the tile's chunk has landed

A copy engine cannot add, so `rank_notify` stores the number of the call: a channel that it raises is raised by one rank
and has one arrival a call. Towards a peer neither needs an SM, so they go on beside a kernel that fills the GPU and
waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..backends.base import Stream, check_tensors
from .channel import BlockChannel

if TYPE_CHECKING:
    from ..world import World


def check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raise for what a copy engine cannot do: torch would broadcast, convert, or copy by a kernel, which needs SMs."""
    check_tensors("copy", dst, src)
    if dst.shape != src.shape or dst.dtype != src.dtype:
        raise ValueError(f"copy of {list(src.shape)} {src.dtype} to {list(dst.shape)} {dst.dtype}")
    for what, t in (("from", src), ("to", dst)):
        if not t.is_contiguous():
            raise ValueError(f"copy {what} a tensor that is not contiguous: {list(t.shape)}, strides {t.stride()}")


def beyond(x: torch.Tensor) -> torch.Tensor:
    """`x` for a kernel that means to reach past it, to memory at a known distance. The emulator holds an access to the
    tensor that its pointer was derived from; from this one it may go to any tensor there is."""
    out = x.view_as(x)
    out.reaches_beyond = True  # type: ignore[attr-defined]
    return out


def rank_copy_data(world: World, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
    """Copy engine: `dst` (own, or `SymmetricTensor.peers[rank]`) from `src`, same shape and dtype, both contiguous."""
    check_copy(dst, src)
    world.copy(dst, src, stream)


def rank_notify(world: World, ch: BlockChannel, channel: int, rank: int, call: torch.Tensor, stream: Stream) -> None:
    """Release by copy engine: `channel` of `rank` stands at `*call`, behind everything given to `stream` before.

    call: int32 [1] on the device, the number of this call from 1 (`calls_of(ch)` in the kernel that waits). It must not
    change before the copy has read it. For this rank's own channel, give it to the stream that launches the kernel that
    waits, before the launch: a copy within one GPU may need SMs.
    """
    _check_channel(ch)
    if not 0 <= rank < world.size:
        raise ValueError(f"rank {rank} of a world of {world.size}")
    _check_call(call)
    world.signal(world.counter(ch, channel, rank), call, stream)


def rank_wait(world: World, ch: BlockChannel, channel: int, call: torch.Tensor, stream: Stream) -> None:
    """Acquire: `stream` goes on once this rank's `channel` has reached `*call` (int32 [1] on the device)."""
    _check_channel(ch)
    _check_call(call)
    world.wait(world.counter(ch, channel, world.rank), call, stream)


def _check_channel(ch: object) -> None:
    if not isinstance(ch, BlockChannel):
        raise TypeError(f"ch is what World.channel returned, a BlockChannel, not {ch!r}")


def _check_call(call: object) -> None:
    if not isinstance(call, torch.Tensor) or call.numel() != 1 or call.dtype != torch.int32:
        raise TypeError(f"the call is an int32 tensor of one word, counted up on the device, not {call!r}")
