"""The driver of the GPU checks itself, on checks made up here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_main
import pytest

import weft


class Alone:
    """What the driver asks of a World of one rank."""

    rank, size = 0, 1

    def exchange(self, obj: Any) -> list[Any]:
        return [obj]


def outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Callable[[], Any]) -> dict[str, str]:
    first = Alone()

    def checks(world: Any) -> Iterator[tuple[str, float, Callable[[], float]]]:
        def times_out() -> float:
            raise weft.Timeout("a peer did not arrive")

        yield "right", 1.0, lambda: 0.5
        yield "times out", 1.0, times_out
        yield "on another World", 0.0, lambda: float(world is first)
        yield "too far off", 1.0, lambda: 2.0

    monkeypatch.setattr(gpu_main, "checks", checks)
    assert not gpu_main.run(first, tmp_path, 100, "", again)  # type: ignore[arg-type]
    return {r["check"]: r["outcome"] for r in json.loads((tmp_path / "world1.json").read_text())}


def test_a_failed_check_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(tmp_path, monkeypatch, Alone)
    assert list(found.values()) == ["passed", "failed", "passed", "failed"]


def test_ranks_that_cannot_meet_again_skip_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> Any:
        raise RuntimeError("the GPU is gone")

    assert list(outcomes(tmp_path, monkeypatch, again).values()) == ["passed", "failed", "skipped", "skipped"]
