"""What is kept of repeated checks of ranks that share a GPU (gpu_shared.py), and which checks those are."""

from __future__ import annotations

import gpu_shared
from gpu_record import repeated

RUN = dict(run="H200, 12:00, 4 processes", checks={"a": dict(passed=3, failed=0), "b": dict(passed=1, failed=2)})


def test_a_run_counts_once_and_for_its_tree() -> None:
    first = repeated([RUN], "tree 1", {})
    assert first == {"tree 1": dict(runs=[RUN["run"]], passed={"a": 3, "b": 1}, failed={"b": 2})}
    assert repeated([RUN], "tree 1", first) == first
    more = repeated([dict(RUN, run="later")], "tree 1", first)["tree 1"]
    assert (more["passed"], more["failed"]) == ({"a": 6, "b": 2}, {"b": 4})
    assert repeated([RUN], "tree 2", first)["tree 1"] == first["tree 1"]


def test_what_several_workers_did_is_added() -> None:
    entry = dict(passed=1, failed=1, seconds=0.5, why=["x"])
    assert gpu_shared.merged([{"a": entry}, {"a": entry}]) == {
        "a": dict(passed=2, failed=2, seconds=1.0, why=["x", "x"])
    }


def test_every_check_of_ranks_that_share_a_gpu_is_repeated() -> None:
    names = set(gpu_shared.checks())
    assert {"test_posted_rows_of_every_op[2]", "test_two_streams", "test_ranks_that_share_a_gpu[4]"} <= names
    assert not any("stays_away" in name or "on_gpus" in name or "first_use" in name for name in names)
