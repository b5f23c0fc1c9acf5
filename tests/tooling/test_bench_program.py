"""The parts that the measuring programs share (bench/common/program.py): options with their defaults, and stamped
rows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from bench.common.program import Program, gains, options, worst_error


def test_options_have_the_types_of_their_defaults(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "new"), "--tokens", "8", "16", "--zipf", "1", "--plans", "{}", "--weave-from", "4", "--tune"]  # fmt: skip
    a = options(words, tokens=[8192], zipf=[0.0], plans=[], weave_from=128, tune=False, rounds=5)
    assert (a.tokens, a.zipf, a.plans, a.weave_from, a.tune, a.rounds) == ([8, 16], [1.0], ["{}"], 4, True, 5)
    assert a.out.is_dir() and a.seconds == 1e9


def test_a_word_that_is_no_choice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["--out", str(tmp_path), "--models", "b"], choices=dict(models=["a"]), models=["a"])
    assert "'b'" in capsys.readouterr().err


def test_rank_0_writes_rows_that_describe_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_COMMIT", "abc")

    def main(world: weft.World) -> int:
        run = Program(options(["--out", str(tmp_path)]), "rows.jsonl", world, dtype="bfloat16")
        return len(run.keep([dict(us=1.0), dict(us=2.0)]))

    assert weft.spmd(main, 2, backend="emulated") == [2, 2]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["us"] for r in rows] == [1.0, 2.0]
    assert all((r["world"], r["commit"], r["dtype"]) == (2, "abc", "bfloat16") and r["date"] for r in rows)


def test_a_case_that_fails_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main(world: weft.World) -> None:
        run = Program(options(["--out", str(tmp_path)]), "rows.jsonl", world)
        with run.tolerating("a case"):
            raise ValueError("no such size")

    weft.spmd(main, 1, backend="emulated")
    assert capsys.readouterr().out == "rank 0, a case: ValueError: no such size\n"


def test_gains_are_over_the_base() -> None:
    assert gains({"sequential": 30.0, "auto": 20.0}, "sequential") == "sequential 30 (1.00x) | auto 20 (1.50x)"


def test_the_worst_error_is_of_all_ranks_and_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that raises an error makes the result infinite everywhere, and rank 0 prints the reason."""

    def main(world: weft.World) -> list[float]:
        results = iter([1.0e-3, 2.0e-3])
        error = worst_error(world, "good", lambda: next(results) * (1 + world.rank), float)

        def fails() -> None:
            if world.rank == 1:
                raise ValueError("no such plan")

        return [error, worst_error(world, "bad", fails)]

    assert weft.spmd(main, 2, backend="emulated") == [[4.0e-3, float("inf")]] * 2
    assert capsys.readouterr().out == "left out: bad: inf ValueError('no such plan')\n"
