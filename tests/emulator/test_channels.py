"""On every rank each channel has separate counters, whatever was allocated before it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import weft
import weft.lang as wl
from weft import world as world_module
from weft.emulator.bounds import ADDRESS


@weft.jit
def notify_next(ch, epoch):
    """Every rank increments channel 0 of the next rank, and waits for its own channel 0."""
    me = wl.rank_of(ch)
    wl.channel_notify(ch, 0, (me + 1) % ch.world, False)
    wl.channel_wait(ch, 0, 1, 0, (me + 1) % ch.world)
    wl.end_call(ch, epoch, 1)


def test_channels_that_do_not_fit_get_a_new_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels that do not fit into the current block are all allocated in a new block, and no two channels share a
    counter."""
    monkeypatch.setattr(world_module, "_COUNTERS", 128)
    sizes = [64, 64, 1, 100, 128, 3, 60, 65]

    def main(world: weft.World) -> None:
        channels = [world.channel(f"channel {i}", n, None, 1 if n == 1 else None) for i, n in enumerate(sizes)]
        assert [ch.counters.numel() for ch in channels] == sizes
        for rank in range(world.size):
            starts = [int(ch.peers[rank]) & ADDRESS for ch in channels]
            if rank == world.rank:
                assert starts == [ch.counters.data_ptr() for ch in channels]
            extents = sorted((start, start + 4 * n) for start, n in zip(starts, sizes, strict=True))
            assert all(end <= start for (_, end), (start, _) in pairwise(extents))
        for i, (ch, n) in enumerate(zip(channels, sizes, strict=True)):
            if n > 1:
                for channel in (0, n - 1):
                    world.counter(ch, channel, 1 - world.rank).fill_(10 * i + 1)
        world.exchange("written")
        for i, (ch, n) in enumerate(zip(channels, sizes, strict=True)):
            assert [ch.counters[0], ch.counters[-1], ch.counters.sum()] == (
                [10 * i + 1] * 2 + [20 * i + 2] if n > 1 else [0] * 3
            )
        args = dict(ch=channels[2], epoch=world.zeros((1,), torch.int32))
        world.launch(notify_next, 1, args, dict(num_warps=1), world.current_stream())
        world.synchronize()
        assert [int(ch.counters[0]) for ch in channels[1:4]] == [11, 1, 31]
        with pytest.raises(weft.WeftError, match="too many: 129 channels; at most 128"):
            world.channel("too many", 129, None)

    weft.spmd(main, 2, backend="emulated")
