"""Emulated Worlds that `World.split` creates from some of a World's ranks."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from weft.lang.channel import BlockChannel
from weft.lang.primitives import channel_wait


def test_parts_by_the_ranks_arguments() -> None:
    def main(world: weft.World) -> list[object]:
        rows, cols = world.split(world.rank // 2), world.split(f"column {world.rank % 2}")
        alone = world.split(world.rank)
        assert (rows.size, cols.size, alone.size, alone.rank) == (2, 2, 1, 0)
        assert len({w.name for w in (world, rows, cols, alone)}) == 4
        return [rows.exchange(world.rank), cols.exchange(world.rank), alone.exchange(0), world.exchange(rows.rank)]

    assert weft.spmd(main, 4, backend="emulated") == [
        [[0, 1], [0, 2], [0], [0, 1, 0, 1]],
        [[0, 1], [1, 3], [0], [0, 1, 0, 1]],
        [[2, 3], [0, 2], [0], [0, 1, 0, 1]],
        [[2, 3], [1, 3], [0], [0, 1, 0, 1]],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_ops_of_several_parts(seed: int) -> None:
    """Worlds of some ranks, and Worlds split from these, sum with flags and with NCCL, alternating with sums over all
    ranks."""

    def main(world: weft.World) -> float:
        pairs, others = world.split(world.rank // 2), world.split(world.rank % 2)
        one = pairs.split(pairs.rank)
        worst = 0.0
        for call, (w, ranks) in enumerate(
            [(pairs, [2 * (world.rank // 2) + i for i in range(2)]), (world, range(4)), (others, [world.rank % 2, world.rank % 2 + 2])]
            * 2
        ):  # fmt: skip
            expected = torch.stack([draw(10 * call + r, 16, 32).float() for r in ranks]).sum(0)
            for plan in ("sequential", "one_shot", "decomposed"):
                worst = max(
                    worst, distance(weft.all_reduce(draw(10 * call + world.rank, 16, 32), world=w, plan=plan), expected)
                )
        assert one.size == 1
        world.synchronize()
        return worst

    assert max(weft.spmd(main, 4, backend="emulated", seed=seed)) < 1e-2


@weft.jit
def waits(ch: BlockChannel):  # type: ignore[no-untyped-def]
    channel_wait(ch, 1, 1, 0, 0)


def test_a_part_that_hangs_names_its_channel() -> None:
    def main(world: weft.World) -> None:
        part = world.split(world.rank // 2)
        world.channel("of all", 8, None)
        ch = part.channel("of a part", 2, None)
        part.launch(waits, 1, dict(ch=ch), dict(num_warps=1), part.current_stream())
        part.synchronize()

    with pytest.raises(weft.WeftError, match=r"channel 1 of of a part of rank 3"):
        weft.spmd(main, 4, backend="emulated")


def test_a_rank_missing_from_a_part_is_a_deadlock() -> None:
    def main(world: weft.World) -> None:
        part = world.split(world.rank // 2)
        if world.rank != 2:
            part.exchange("here")

    with pytest.raises(weft.Deadlock, match=r"which ranks \[2\] have not called"):
        weft.spmd(main, 4, backend="emulated")
