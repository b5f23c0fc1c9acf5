"""The random calls of tests/gpu_fuzz.py on emulated ranks: all of them right, one that is wrong named and found again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_fuzz
import pytest
import torch

import weft
from weft.op import REGISTRY

OPS = set(gpu_fuzz.OPS)


def fuzz(
    out: Path, seed: int, only: Sequence[int] = (), calls: int = 24, ranks: int = 2, **more: Any
) -> dict[str, Any]:
    def main(world: weft.World) -> dict[str, Any]:
        return gpu_fuzz.run(world, out, seed, 1000, calls, only, gpu_fuzz.SMALL)

    return weft.spmd(main, ranks, backend="emulated", **more)[0]


@pytest.mark.parametrize(
    "seed, ranks", [(1, 2), *(pytest.param(s, r, marks=pytest.mark.gate) for s in range(2, 6) for r in (2, 3, 4))]
)
def test_calls_of_every_op_are_right(seed: int, ranks: int, tmp_path: Path) -> None:
    found = fuzz(tmp_path, seed, ranks=ranks)
    assert not found["wrong"] and found["calls"] >= 24 and 0 < found["largest"] < 0.5
    assert json.loads((tmp_path / f"fuzz{ranks}.json").read_text()) == found
    assert sum(found["kinds"].values()) == found["calls"]


def rounds(seed: int, count: int) -> list[gpu_fuzz.Round]:
    def main(world: weft.World) -> list[gpu_fuzz.Round]:
        drawn = gpu_fuzz.Fuzz(world, seed, gpu_fuzz.SMALL)
        return [drawn.draw(i) for i in range(count)]

    first, second = weft.spmd(main, 2, backend="emulated")
    assert first == second, "every rank draws the same"
    return first


def test_what_is_drawn() -> None:
    drawn = rounds(5, 400)
    assert drawn == rounds(5, 400) and drawn != rounds(6, 400)
    assert {r.op for r in drawn} == OPS
    for op in OPS:
        plans = {r.plan if isinstance(r.plan, str) else r.plan.kind for r in drawn if r.op == op}
        assert plans == {"auto", *REGISTRY[op].kinds} - {"multicast"}
    rows = {r.rows for r in drawn}
    assert (0, 0) in rows and any(min(m) == 0 < max(m) for m in rows) and any(0 < min(m) < max(m) for m in rows)
    calls = [c for r in drawn for c in r.calls]
    assert {c.late for c in calls} == {-1, 0, 1} and {c.stream for c in calls} == {"", *gpu_fuzz.STREAMS}
    assert {c.into for c in calls} == {r.whole for r in drawn} == {bool(r.replays) for r in drawn} == {False, True}


def test_a_wrong_call_is_named_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one rank's result, a little off, of calls with `out` alone, in a round among others."""
    index, bad = next(
        (r.index, r)
        for r in rounds(3, 200)
        if r.op == gpu_fuzz.SUM and sum(r.rows) and not r.replays and r.calls[-1].into
    )
    right = weft.all_reduce

    def wrong(x: torch.Tensor, *, world: weft.World, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        y = right(x, world=world, out=out, **more)
        if out is not None and world.rank == 1:
            y[-1, -1] += 0.5 * y.float().norm() / y.numel() ** 0.5
        return y

    monkeypatch.setattr(weft, "all_reduce", wrong)
    before = [r.index for r in rounds(3, index) if r.op == gpu_fuzz.NORM][:1]
    found = fuzz(tmp_path, 3, [*before, index])
    assert found["wrong"] == sum(c.into for c in bad.calls)
    assert f"call {len(bad.calls) - 1} of seed 3, round {index}: " in found["failed"][-1]
    assert fuzz(tmp_path, 3, [index])["failed"] == found["failed"] and not list(tmp_path.iterdir())


def test_a_run_that_ends_early_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    calls = 0

    def stays_away(self: gpu_fuzz.Fuzz, r: gpu_fuzz.Round) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise weft.Timeout("a peer did not arrive")
        return 1

    monkeypatch.setattr(gpu_fuzz.Fuzz, "run", stays_away)
    with pytest.raises(weft.Timeout):
        fuzz(tmp_path, 1, ranks=1)
    assert "a peer did not arrive" in json.loads((tmp_path / "fuzz1.json").read_text())["ended"]
    assert "seed 1, round 2: " in capfd.readouterr().out
