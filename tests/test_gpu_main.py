"""The driver of the GPU checks itself, on checks made up here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_main
import pytest
from gpu_record import record_of, with_some

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
    assert not gpu_main.run(first, tmp_path, 100, ("",), again)  # type: ignore[arg-type]
    return {r["check"]: r["outcome"] for r in json.loads((tmp_path / "world1.json").read_text())}


def test_a_failed_check_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(tmp_path, monkeypatch, Alone)
    assert list(found.values()) == ["passed", "failed", "passed", "failed"]


def test_ranks_that_cannot_meet_again_skip_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> Any:
        raise RuntimeError("the GPU is gone")

    assert list(outcomes(tmp_path, monkeypatch, again).values()) == ["passed", "failed", "skipped", "skipped"]


def test_no_number_of_another_rank_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(Alone):
        size = 2

        def exchange(self, obj: Any) -> list[Any]:
            return [obj, (float("nan"), "")] if isinstance(obj, tuple) else [obj, obj]

    monkeypatch.setattr(gpu_main, "checks", lambda world: iter([("one", 1.0, lambda: 0.5)]))
    assert not gpu_main.run(Two(), tmp_path, 100, ("",), Two)  # type: ignore[arg-type]


def test_what_a_killed_run_did_not_reach_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> float:
        raise KeyboardInterrupt

    todo = [("first", 1.0, lambda: 0.5), ("hangs", 1.0, killed), ("last", 1.0, lambda: 0.5)]
    monkeypatch.setattr(gpu_main, "checks", lambda world: iter(todo))
    with pytest.raises(KeyboardInterrupt):
        gpu_main.run(Alone(), tmp_path, 100)  # type: ignore[arg-type]
    found = json.loads((tmp_path / "world1.json").read_text())
    assert [r["outcome"] for r in found] == ["passed", "skipped", "skipped"]
    assert found[1]["why"] == "not reached"


XML = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><skipped/></testcase></testsuite></testsuites>"""


def test_the_record_counts_what_ran_and_keeps_what_was(tmp_path: Path) -> None:
    def results(world: int) -> Path:
        out = tmp_path / str(world)
        out.mkdir()
        (out / "machine.json").write_text(json.dumps(dict(machine=f"{world} x GPU", versions={})))
        rows = [dict(check="one", outcome="passed"), dict(check="two", outcome="failed", why="no")]
        (out / f"world{world}.json").write_text(json.dumps(rows))
        (out / "users.xml").write_text(XML)
        return out

    eight = record_of(results(8), "tree", {})
    assert (eight["passed"], eight["failed"], eight["skipped"], eight["worlds"]) == (2, 2, 1, [8])
    assert eight["ran"] == {"world8": "1 of 2", "users": "1 of 3"}
    assert eight["checks"] == ["world8: one", "users: a"] and len(eight["not_passed"]) == 3
    two = record_of(results(2), "tree", eight)
    assert [r["worlds"] for r in two["before"]] == [[8]], "other GPUs of the same tree"
    again = record_of(tmp_path / "2", "tree", two)
    assert [r["worlds"] for r in again["before"]] == [[8]] and "checks" not in again["before"][0]
    assert [r["tree"] for r in record_of(tmp_path / "2", "next", again)["before"]] == ["tree", "tree"]


def test_another_triton_stands_beside_the_record(tmp_path: Path) -> None:
    rows = [dict(check="a", outcome="passed"), dict(check="b", outcome="failed", why="wrong")]
    (tmp_path / "world2.json").write_text(json.dumps(rows))
    machine = dict(machine="2 x GPU", versions=dict(triton="3.9.0"))
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    record = record_of(tmp_path, "new", dict(tree="old", passed=7))
    assert (record["tree"], record["passed"]) == ("old", 7)
    ran = record["triton"]["3.9.0"]
    assert (ran["tree"], ran["passed"], ran["not_passed"]) == ("new", 1, rows[1:])


def test_some_of_the_checks_stand_beside_the_record(tmp_path: Path) -> None:
    """A check that failed in one run of them did not pass; one that was skipped says nothing."""
    runs = dict(a=[("a", "passed"), ("b", "passed")], b=[("a", "failed"), ("c", "skipped"), ("d", "passed")])
    for name, rows in runs.items():
        (tmp_path / name).mkdir()
        said = [dict(check=check, outcome=outcome) for check, outcome in rows]
        (tmp_path / name / "world2.json").write_text(json.dumps(said))
    (tmp_path / "machine.json").write_text(json.dumps(dict(machine="2 x GPU")))
    record = with_some(tmp_path, "new", dict(tree="old", passed=7))
    assert (record["tree"], record["passed"]) == ("old", 7)
    (ran,) = record["some"]
    assert ran["checks"] == ["world2: b", "world2: d"] and [row["check"] for row in ran["not_passed"]] == ["world2: a"]
