"""Measurements that continue after an interruption: finished cases are not repeated, and a case that ended a run comes
last."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from bench.common import resume
from bench.common.resume import keep, unfinished

CASES = {"one": 1, "two": 2, "three": 3}


def test_a_run_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    """The first run ends within the second case, so the next run executes that case last."""

    def main(world: weft.World) -> list[list[int]]:
        cases = unfinished(world, tmp_path, CASES)
        begun = [next(cases), next(cases)]
        cases.close()
        world.synchronize()
        world.exchange(None)
        return [begun, list(unfinished(world, tmp_path, CASES)), list(unfinished(world, tmp_path, CASES))]

    assert weft.spmd(main, 2, backend="emulated") == [[[1, 2], [3, 2], []]] * 2


def test_other_arguments_are_other_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement with a different folder or time limit is the same measurement, because users may move the
    results."""

    def measured(*words: str) -> list[int]:
        monkeypatch.setattr(resume.sys, "argv", ["bench/measure/moe.py", *words])
        return list(unfinished(None, tmp_path, CASES))

    assert measured("--seconds", "10", "--tokens", "8", "--out", "here") == [1, 2, 3]
    assert measured("--tokens", "8", "--out", "there", "--seconds", "20") == []
    assert measured("--tokens", "16", "--out", "here") == [1, 2, 3]


def test_cases_without_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(world: weft.World) -> list[int]:
        taken = []
        for case in unfinished(world, tmp_path, CASES, seconds=10):
            taken.append(case)
            if case == 2 and world.rank == 1:
                monkeypatch.setattr(resume, "BEGAN", resume.BEGAN - 11)
        return taken

    monkeypatch.setattr(resume, "BEGAN", resume.time.time())
    assert weft.spmd(main, 2, backend="emulated") == [[1, 2]] * 2
    assert capsys.readouterr().out == "1 cases left: three\n"


def test_rank_0_keeps_the_rows(tmp_path: Path) -> None:
    weft.spmd(lambda world: keep(world, tmp_path / "rows.jsonl", [{"us": 1}, {"us": 2}]), 2, backend="emulated")
    assert (tmp_path / "rows.jsonl").read_text() == '{"us": 1}\n{"us": 2}\n'
