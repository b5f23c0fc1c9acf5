"""weft.prepare chooses plans for exactly those calls that it makes."""

from __future__ import annotations

import random

import pytest
import torch

import weft
from weft import World
from weft.planner.predict import Predictor
from weft.planner.prepare import sizes
from weft.planner.profile import shipped
from weft.planner.search import Planner, near


@pytest.mark.parametrize("world, multiple", [(2, 2), (4, 4), (2, 1), (4, 1), (1, 1)])
def test_sizes_have_every_size_that_is_decided_for(world: int, multiple: int) -> None:
    rows = 3000
    nearest_sizes = {near(m, world) for m in sizes(rows, multiple, world)}
    assert nearest_sizes == {near(m, world) for m in range(multiple, rows + 1, multiple)}
    assert all(m % multiple == 0 and 0 < m <= rows for m in sizes(rows, multiple, world))
    assert len(sizes(rows, multiple, world)) < 320 * 2


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_plan_is_searched_afterwards(op: str) -> None:
    profile = shipped("nvidia-h200-x2")
    assert profile is not None
    planner = Planner(Predictor(profile))
    for m in sizes(1500, 2, 2):
        planner.nearest(op, m, 2048, 1024, "eager", True)
    searched = planner.decide.cache_info().misses
    for m in random.Random(0).sample(range(2, 1501, 2), 60):
        planner.nearest(op, m, 2048, 1024, "eager", True)
    assert planner.decide.cache_info().misses == searched


def test_it_calls_every_size_on_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def run(world: World) -> list[int]:
        x, seen = torch.ones(24, 64, dtype=torch.bfloat16), []

        def call(m: int) -> None:
            seen.append(m)
            weft.all_reduce(x[:m], world=world)

        weft.prepare(call, 24, world=world)
        decided = len(world.decided)
        weft.all_reduce(x[: seen[-1]], world=world)
        assert len(world.decided) >= decided > 0
        return seen

    assert weft.spmd(run, 2, backend="emulated") == [sizes(24, 2, 2)] * 2
    assert "plans and kernels" in capsys.readouterr().err


@pytest.mark.parametrize("rows, multiple, error", [(0, None, ValueError), (8, 0, ValueError), (2.5, None, TypeError)])
def test_impossible_calls_are_refused(rows: int, multiple: int | None, error: type[Exception]) -> None:
    def run(world: World) -> None:
        weft.prepare(lambda m: None, rows, multiple=multiple, world=world)

    with pytest.raises(error, match="prepare: "):
        weft.spmd(run, 1, backend="emulated")
