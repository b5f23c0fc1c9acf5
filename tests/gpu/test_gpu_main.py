"""Tests of the driver of the GPU checks, with simulated checks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.gpu import gpu_main, gpu_queue
from tests.gpu.gpu_queue import Queue
from weft.backends import uploads
from weft.backends.cuda import GpuBackend

Check = tuple[str, float, Callable[[], float]]


class Alone:
    """The part of a World of one rank that the driver uses."""

    rank, size, device = 0, 1, torch.device("cpu")

    def exchange(self, obj: Any) -> list[Any]:
        return [obj]


def run_checks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checks: Callable[[Any], Iterator[Check]],
    again: Callable[[], Any] = Alone,
    world: Any = None,
    seconds: float = 100,
) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Return whether the ranks could synchronise to the end, and each check's row."""
    world = world or Alone()
    monkeypatch.setattr(gpu_main, "checks", checks)
    monkeypatch.setattr(gpu_queue, "RECORD", tmp_path / "none")
    queue = Queue(tmp_path / "queue.json")
    queue.fill(gpu_main.todo_of(world, 1, [""], []))
    in_step = gpu_main.run(world, tmp_path / "rows.jsonl", queue, seconds, again)
    path = tmp_path / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len({row["check"] for row in rows}) == len(rows)
    return in_step, {row["check"]: row for row in rows}


def of_each_kind(first_world: Any) -> Callable[[Any], Iterator[Check]]:
    def checks(world: Any) -> Iterator[Check]:
        def times_out() -> float:
            raise weft.Timeout("a peer did not arrive")

        yield "right", 1.0, lambda: 0.5
        yield "times out", 1.0, times_out
        yield "on another World", 0.0, lambda: float(world is first_world)
        yield "too far off", 1.0, lambda: 2.0

    return checks


def test_a_failed_check_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_world = Alone()
    in_step, rows = run_checks(tmp_path, monkeypatch, of_each_kind(first_world), world=first_world)
    assert in_step and [row["outcome"] for row in rows.values()] == ["passed", "failed", "passed", "failed"]
    assert "a peer did not arrive" in rows["times out"]["why"] and (rows["right"]["ranks"], rows["right"]["gpus"]) == (
        1,
        1,
    )


def test_ranks_that_cannot_meet_again_leave_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> Any:
        raise RuntimeError("the GPU is gone")

    in_step, rows = run_checks(tmp_path, monkeypatch, of_each_kind(None), again)
    assert not in_step and [row["outcome"] for row in rows.values()] == ["passed", "failed"]
    assert Queue(tmp_path / "queue.json").left() == 2


def test_ranks_that_do_not_meet_after_a_check_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Alone):
        def exchange(self, obj: Any) -> list[Any]:
            if isinstance(obj, tuple):
                raise weft.Timeout("the connection to a rank is lost")
            return [obj]

    in_step, rows = run_checks(tmp_path, monkeypatch, lambda world: iter([("one", 1.0, lambda: 0.5)]), world=Lost())
    assert not in_step and rows["one"]["outcome"] == "failed" and "connection" in rows["one"]["why"]


def test_no_number_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = run_checks(tmp_path, monkeypatch, lambda world: iter([("one", 1.0, lambda: float("nan"))]))
    assert rows["one"]["outcome"] == "failed" and rows["one"]["error"] == "inf"


def test_no_check_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_step, rows = run_checks(tmp_path, monkeypatch, of_each_kind(None), seconds=0)
    assert in_step and not rows and Queue(tmp_path / "queue.json").left() == 4


def test_a_killed_runs_check_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> float:
        raise KeyboardInterrupt

    todo = [("first", 1.0, lambda: 0.5), ("hangs", 1.0, killed), ("last", 1.0, lambda: 0.5)]
    with pytest.raises(KeyboardInterrupt):
        run_checks(tmp_path, monkeypatch, lambda world: iter(todo))
    queue = Queue(tmp_path / "queue.json")
    assert queue.running("rows") == "hangs" == queue.release("rows") and queue.left() == 1


def test_a_row_names_the_parts_whose_kernels_were_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(GpuBackend, "launch", lambda backend, kernel, *arguments: launches.append(kernel))

    def kernel(module: str) -> Any:
        return SimpleNamespace(fn=SimpleNamespace(__module__=module))

    def launch(*modules: str) -> float:
        for module in modules:
            GpuBackend.launch(None, kernel(module), 1)  # type: ignore[arg-type, call-arg]
        return 0.0

    checks: list[Check] = [
        ("moe", 0.0, lambda: launch("weft.ops.moe.expert_parallel.kernels", "weft.compute.gemm", "some.users.kernel")),
        ("none", 0.0, lambda: launch()),
    ]
    _, rows = run_checks(tmp_path, monkeypatch, lambda world: iter(checks))
    assert rows["moe"]["parts"] == {part: gpu_queue.tree_of_part(part) for part in ("ops/moe", "compute")}
    assert rows["none"]["parts"] == {} and len(launches) == 3
    assert all(len(known) == 12 for known in rows["moe"]["parts"].values())


def test_uploads_are_waited_for_until_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is ordered after a copy that is still running; in a capture the host waits for the copy."""

    class Copied:
        ended = False

        def query(self) -> bool:
            return self.ended

        def synchronize(self) -> None:
            self.ended = True

    class Stream:
        def __init__(self) -> None:
            self.behind: list[object] = []

        def wait_event(self, event: object) -> None:
            self.behind.append(event)

    capturing = False
    monkeypatch.setattr(uploads, "any_call_allowed", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    earlier, later, streams = Copied(), Copied(), [Stream() for _ in range(4)]
    table = uploads.Uploads(torch.device("cuda", 0))
    table.pending = {copied: torch.empty(0) for copied in (earlier, later)}  # type: ignore[misc]
    table.precede(streams[0])  # type: ignore[arg-type]
    assert streams[0].behind == [earlier, later]
    earlier.ended = True
    table.precede(streams[1])  # type: ignore[arg-type]
    assert streams[1].behind == [later]
    capturing = True
    table.precede(streams[2])  # type: ignore[arg-type]
    assert later.ended and not streams[2].behind and not table.pending
    with pytest.raises(weft.WeftError, match="make the call once before"):
        table.tensor([1], torch.int32)
