"""gpu_run.py starts the GPU checks, gpu_queue.py shares them between processes, and gpu_record.py stores their results.
In these tests they run stand-ins for the checks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.gpu import gpu_queue, gpu_record, gpu_run
from tests.gpu.gpu_queue import Queue, Row, ordered, placed, tree_of
from tests.gpu.gpu_run import Command, Run
from tests.tooling import trends
from weft.backends.base import timeout_seconds

ROOT = Path(__file__).parents[2]
MACHINE: dict[str, Any] = dict(machine="1 x GPU", versions=dict(triton="3.6.0"), date="2026-11-23 18:00")

# Checks for N ranks, each of which is named after its behaviour.
CHECKS = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from tests.gpu.gpu_queue import Queue
if sys.argv[2:4] != ["-m", "tests.gpu.gpu_main"]:
    out = Path(sys.argv[sys.argv.index("--out") + 1]); out.mkdir()
    results = dict(world=int(sys.argv[1]), seed=7, calls=10, wrong=0, ended="", failed=[], kinds=dict(moe=10))
    sys.exit((out / f"fuzz{sys.argv[1]}.json").write_text(json.dumps(results)) == 0)
after = lambda option: sys.argv[sys.argv.index(option) + 1]
who, out, began = after("--name"), Path(after("--out")), time.time()
alone = sys.argv[4] == "--only"
queue = Queue(Path(after("--queue")))
queue.fill(["alone"] if alone else NAMES)
while name := queue.take(who) if time.time() - began < float(after("--seconds")) else None:
    if name == "dies": os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs": subprocess.run([sys.executable, "-c", "import time; time.sleep(100)", __file__], start_new_session=True)
    row = dict(check=name, ranks=int(sys.argv[1]), gpus=1, outcome="failed" if name == "fails" else "passed", seconds=0.1, parts={},
               date="2026-11-23", bound=0.0, error=0.0)
    with (out / f"{who}.jsonl").open("a") as file: file.write(json.dumps(row) + "\\n")
queue.release(who)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run on a machine with one GPU, whose groups may spend two seconds on a check."""
    monkeypatch.setattr(gpu_run, "STILL", 2)
    monkeypatch.setattr(gpu_run, "ENDING", 0.1)
    monkeypatch.setattr(gpu_run, "tree_of", lambda path: "f" * 40)
    monkeypatch.setattr(gpu_queue, "RECORD", tmp_path / "record.json")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "work").mkdir()
    return Run(tmp_path, tmp_path / "work", gpus=1, gib=100, room=6, minutes=1)


def stand_in(run: Run, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    script = run.out / "checks.py"
    script.write_text(CHECKS.replace("NAMES", repr(names)))
    monkeypatch.setattr(gpu_run, "torchrun", lambda ranks, *words: (sys.executable, str(script), str(ranks), *words))


def results(run: Run) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((run.out / "results.json").read_text())
    return stored


def test_a_group_that_dies_or_hangs_fails_only_its_check(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "dies", "b", "fails", "hangs", "c"]
    stand_in(run, monkeypatch, names)
    assert not gpu_run.go(run, [], [2, 4], [], MACHINE)
    row_of_check = {(row["ranks"], row["check"]): row for row in results(run)["rows"]}
    assert set(row_of_check) == {(n, name) for n in (2, 4) for name in (*names, "alone")} and len(
        results(run)["rows"]
    ) == len(row_of_check)
    assert {name for (_, name), row in row_of_check.items() if row["outcome"] == "failed"} == {"dies", "fails", "hangs"}
    assert "ended with -9" in row_of_check[2, "dies"]["why"] and "no end after 2 s" in row_of_check[4, "hangs"]["why"]
    assert set(results(run)["minutes"]) == {f"checks{a}, {n} ranks on 1 GPU" for n in (2, 4) for a in ("",)}
    assert not results(run)["trouble"] and "== 1 checks-4-checks" in (run.out / "log.txt").read_text()


def test_groups_that_die_before_a_check_are_started_a_few_times(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "torchrun", lambda ranks, *words: (sys.executable, "-c", "raise SystemExit('no GPU')"))
    assert gpu_run.go(run, [], [2], ["moe"], MACHINE)
    assert len(results(run)["trouble"]) == gpu_run.STARTS and "no GPU" in results(run)["trouble"][0]
    assert not results(run)["rows"]


def test_unreached_measurements_are_left_for_the_next_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(run, monkeypatch, ["a", "hangs"])
    monkeypatch.setattr(gpu_run, "STILL", 100)
    run.until = time.time() + 4
    began = time.time()
    assert gpu_run.go(run, [], [2], [], MACHINE) and time.time() - began < 8
    assert [row["check"] for row in results(run)["rows"]] == ["a"]
    time.sleep(0.5)
    left = subprocess.run(["pgrep", "-f", str(run.out / "checks.py")], capture_output=True, text=True).stdout
    assert not left, "the group's processes must be ended"


def test_commands_pass_by_their_exit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(name: str, words: str, part: str = "users", limit: float = 30) -> Command:
        return Command(part, name, 2, (sys.executable, "-c", words), limit)

    stand_in(run, monkeypatch, [])
    fuzz = next(c for c in gpu_run.commands(["fuzz"], [4], 1, 10, None))
    waiting = [
        command(
            "right",
            "import os; assert os.environ['WEFT_SHARE_GPU'] == '1' and os.environ['CUDA_VISIBLE_DEVICES'] == '0'",
        ),
        command("wrong", "raise SystemExit('not so')"),
        command("slow", "import time; time.sleep(60)", limit=1),
        Command("fuzz", fuzz.name, 4, fuzz.words, 20),
    ]
    assert not gpu_run.go(run, waiting, [], [], MACHINE)
    rows = {row["check"]: row for row in results(run)["rows"]}
    assert [rows[name]["outcome"] for name in ("right", "random calls")] == ["passed", "passed"]
    assert "exit 1: not so" in rows["wrong"]["why"] and "no end after 1 s" in rows["slow"]["why"]
    assert [f["calls"] for f in results(run)["fuzz"]] == [10]


def test_the_reason_of_a_failure_is_its_ranks_output(tmp_path: Path) -> None:
    """The launcher's own report is omitted."""
    log = tmp_path / "log"
    log.write_text(
        "W1123 torch/distributed/run.py:766] x\nrank 0: wrong by 3\nE1123 20:00 torch/distributed/elastic/multiprocessing/api.py:986] failed\n"
        + "Signal 15\n" * 99
    )
    assert gpu_run.last_output(log).endswith("x\nrank 0: wrong by 3")
    log.write_text("W1123 torch/multiprocessing/spawn.py:165] x\nSignal 15")
    assert gpu_run.last_output(log).endswith("Signal 15"), "without output of ranks, all lines are shown"


def test_smaller_groups_leave_room_for_the_one_named_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks that need the whole time of a call come first. More groups, and random calls, start when no check is
    waiting."""
    stand_in(run, monkeypatch, [f"check {i}" for i in range(3)])
    users = [
        Command("users", f"user {i}", 2, (sys.executable, "-c", "import time; time.sleep(1)"), 30) for i in range(2)
    ]
    fuzz = next(c for c in gpu_run.commands(["fuzz"], [2], 1, 10, None))
    waiting = [Command("fuzz", fuzz.name, 2, fuzz.words, 20), *users]
    run.gib = 0
    assert not gpu_run.go(run, waiting, [6, 2], [], MACHINE)
    began = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if line.endswith("begins")]
    place = {n: f"{n} ranks on 1 GPU: " for n in (2, 6)}
    assert began == [
        f"{place[2]}user 0 begins", f"{place[2]}user 1 begins", f"{place[6]}checks begins", f"{place[2]}checks begins",
        f"{place[2]}random calls begins",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "filled", "others", "begun"),
    [
        pytest.param([4, 2], [4, 2], 0, [4, 2, 4, 2, 4, 2, 4], id="the first one gets the rest"),
        pytest.param([2, 4], [4, 2], 0, [2, 4, 2, 4, 2, 4, 2, 2], id="the rest that others cannot use"),
        pytest.param([4, 2], [4, 2], 8, [4, 2, 4, 2], id="room is kept for the larger group"),
        pytest.param([4, 2], [2], 0, [4, 2], id="until the number of checks is known"),
    ],
)
def test_every_number_of_ranks_has_as_many_groups(
    run: Run, monkeypatch: pytest.MonkeyPatch, ranks: list[int], filled: list[int], others: int, begun: list[int]
) -> None:
    """The test sees the groups that start before the first pause."""

    class Pause(Exception):
        pass

    words = ("sh", "-c", "sleep 9")
    monkeypatch.setattr(gpu_run, "checks_of", lambda n, only, alone: Command("checks", "checks", n, words, 30))
    monkeypatch.setattr(gpu_run.time, "sleep", mock.Mock(side_effect=Pause))
    run.room, run.gib = 22, 0
    for n in filled:
        Queue(run.work / f"queue{n}.json").fill([f"check {i}" for i in range(99)])
    run.start(Command("users", "x", others, words, 30))
    with pytest.raises(Pause):
        gpu_run.go(run, [], ranks, [], MACHINE)
    for group in run.groups:
        group.end()
    assert [group.command.ranks for group in run.groups[1:]] == begun


def test_no_more_ranks_run_than_there_is_room_for(run: Run) -> None:
    for ranks, part in ((2, "users"), (2, "users")):
        run.start(Command(part, "x", ranks, (sys.executable, "-c", ""), 5))
    assert run.free() == 2
    run.room = 12
    run.start(Command("peers", "x", 2, (sys.executable, "-c", ""), 5))
    assert run.free() == 2, "fewer ranks run beside absent peers"
    for group in run.groups:
        group.end()


def test_ranks_with_a_gpu_each_take_the_next_ones(run: Run) -> None:
    run.gpus, run.devices = 4, ["a", "b", "c", "d"]
    assert run.gpus_of(2) == ["a", "b"] and run.gpus_of(8) == ["a", "b", "c", "d"]
    run.start(Command("users", "x", 2, (sys.executable, "-c", ""), 5))
    assert run.gpus_of(2) == ["c", "d"]
    run.groups[0].end()


# -- order -------------------------------------------------------------------------------------------------------------


def row(outcome: str, tree: str, date: str = "2026-11-20", **parts: str) -> Row:
    return dict(
        outcome=outcome, tree=tree[:12], date=date, parts={name.replace("_", "/"): tree for name, tree in parts.items()}
    )


def test_failed_checks_come_first_and_unchanged_ones_last(monkeypatch: pytest.MonkeyPatch) -> None:
    this_tree, older_tree = "a" * 40, "b" * 40
    monkeypatch.setattr(gpu_queue, "tree_of_part", lambda part: {"ops/moe": "1", "compute": "2"}[part])
    rows = {
        "same": row("passed", older_tree, ops_moe="1", compute="2"),
        "older": row("passed", older_tree, "2026-11-19", compute="2"),
        "changed": row("passed", older_tree, ops_moe="0", compute="2"),
        "failed": row("failed", older_tree),
        "failed here": row("failed", this_tree),
        "done": row("passed", this_tree, ops_moe="1"),
    }
    names = ["same", "older", "changed", "new", "failed", "failed here", "done"]
    assert ordered(names, rows, this_tree) == ["failed", "failed here", "new", "changed", "older", "same"]


DESCRIBED = '''"""Module."""  # and why

import os  # type: ignore


class Empty:
    "A class" " of nothing."


def f(ä="#", n=3):  # noqa
    r"""Doc \\ with a # and
    two lines."""; x = "ä"  # after a semicolon

    # alone
    def g(): "On one line."
    y = """a  # in a string

    b   
    """
    z = ("a"  # between
         # parts
         "b")
    return f"""{x}  # in a string

    {y}"""  # behind it
'''
PLAIN = '''import os
class Empty:
def f(ä="#", n=3):
    x = "ä"
    def g():
    y = """a  # in a string

    b   
    """
    z = ("a"
         "b")
    return f"""{x}  # in a string

    {y}"""'''


def test_the_code_of_a_file_has_no_comments_and_docstrings() -> None:
    """Strings that are not docstrings remain unchanged. Every version of Python must return this text."""
    assert gpu_queue.code_of(DESCRIBED) == PLAIN


def test_the_name_of_code_tells_every_other_change(tmp_path: Path) -> None:
    def name_of(text: str, path: str = "ops/f.py") -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
        return tree_of(folder)

    name = name_of(DESCRIBED)
    for old, new in (
        ("Module.", "New."),
        ("two lines", "lines"),
        ("  # noqa", ""),
        ("# alone", "\n"),
        ("os  #", "os #"),
    ):
        assert name_of(DESCRIBED.replace(old, new)) == name, old
    for old, new in (
        ("n=3", "n=4"),
        ('"#"', '"# "'),
        ("b   \n", "b\n"),
        ("a  # in", "a  #"),
        ("{x}  #", "{x} #"),
        ("z =", "v ="),
    ):
        assert name_of(DESCRIBED.replace(old, new)) != name, old
    assert name_of("# a", "ops/f.cu") != name_of("# b", "ops/f.cu"), "only Python's comments are known"
    assert len({name, name_of(DESCRIBED, "ops/g.py"), tree_of(tmp_path / "no such file")}) == 3


def test_a_check_is_counted_to_the_part_whose_kernels_it_launches() -> None:
    part_of_module = {
        "ops.moe.kernels": "ops/moe",
        "ops.norm": "ops/norm.py",
        "compute.gemm": "compute",
        "backends.barrier": "backends",
    }
    assert {module: gpu_queue.part_of(f"weft.{module}") for module in part_of_module} == part_of_module


def test_every_name_is_taken_once(tmp_path: Path) -> None:
    queue, names, took = Queue(tmp_path / "queue"), [f"check {i}" for i in range(60)], []
    assert queue.left() is None and queue.release("nobody") is None

    def take(who: str) -> None:
        queue.fill(list(names))
        while name := queue.take(who):
            took.append(name)

    threads = [threading.Thread(target=take, args=(f"rank {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(took) == sorted(names) and queue.left() == 0
    queue.fill(["again"])
    assert queue.take("late") is None, "the queue is filled only once"


# -- the record ----------------------------------------------------------------------------------------------------------


def run_results(tree: str, *rows: Row, fuzz: tuple[dict[str, Any], ...] = (), triton: str = "3.6.0") -> dict[str, Any]:
    machine = MACHINE | dict(versions=dict(triton=triton))
    return dict(
        tree=tree, **machine, minutes={"checks, 4 ranks on 1 GPU": 8.5}, trouble=[], rows=list(rows), fuzz=list(fuzz)
    )


def ran(check: str, outcome: str, ranks: int = 4, gpus: int = 1) -> Row:
    return dict(check=check, ranks=ranks, gpus=gpus, outcome=outcome, date="2026-11-23", seconds=1.0, parts={})


def test_the_next_run_continues_where_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record determines that checks are not repeated if they passed on this tree, on as many ranks and GPUs and
    with this Triton."""
    this_tree, monkeypatched = "c" * 40, tmp_path / "record.json"
    monkeypatch.setattr(gpu_queue, "RECORD", monkeypatched)
    monkeypatch.setattr(gpu_queue.metadata, "version", lambda package: "3.6.0")
    assert gpu_queue.recorded(4, 1) == {}
    first_record = gpu_record.with_results(
        run_results(this_tree, ran("a", "passed"), ran("b", "failed"), ran("b", "passed")), {}
    )
    record = gpu_record.with_results(run_results(this_tree, ran("c", "passed", 4, 4), triton="3.6.0"), first_record)
    record = gpu_record.with_results(run_results(this_tree, ran("d", "passed"), triton="3.9.0"), record)
    monkeypatched.write_text(gpu_record.text(record))
    assert json.loads(monkeypatched.read_text()) == record
    assert set(record["checks"]) == {"4 ranks on 1 GPU", "4 ranks on 4 GPUs", "4 ranks on 1 GPU, Triton 3.9.0"}
    assert ordered(["a", "b", "c", "d"], gpu_queue.recorded(4, 1), this_tree) == ["b", "c", "d"], (
        "a check that failed once counts as failed"
    )
    known = record["checks"]["4 ranks on 1 GPU"]["a"]
    assert (known["tree"], known["date"], known["machine"]) == (this_tree[:12], "2026-11-23", "1 x GPU")
    assert gpu_record.is_known(run_results(this_tree), record) and not gpu_record.is_known(
        run_results("d" * 40), record
    )
    again = gpu_record.with_results(run_results("d" * 40, ran("a", "failed")), record)
    assert again["checks"]["4 ranks on 1 GPU"]["a"]["outcome"] == "failed"
    assert (again["runs"][0]["passed"], again["runs"][0]["failed"], len(again["runs"])) == (0, 1, 4)


def test_commands_that_passed_are_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(gpu_run.commands(["peers", "users", "fuzz"], [4, 2], 60, 1000, None))
    tree = "e" * 40
    rows = {c.name: row("passed", tree) for c in every if c.ranks == 2} | {"killed peer": row("failed", tree)}
    monkeypatch.setattr(gpu_run, "recorded", lambda ranks, gpus: rows if (ranks, gpus) == (2, 1) else {})
    todo = [(c.ranks, c.name) for c in gpu_run.todo(every, 1, tree)]
    assert {name for ranks, name in todo if ranks == 2} == {"killed peer", "random calls"}
    assert {name for ranks, name in todo if ranks == 4} == {c.name for c in every if c.ranks == 4}
    assert todo[0][0] == 4 and todo[-1][1] == "random calls"


def test_random_calls_are_summed_once_for_each_run() -> None:
    def calls(world: int, seed: int, calls: int, wrong: int = 0, ended: str = "") -> dict[str, Any]:
        failed = ["this call"] * wrong
        return dict(
            world=world, seed=seed, calls=calls, wrong=wrong, ended=ended, failed=failed, kinds={"moe fused": calls}
        )

    first_run = run_results("old", fuzz=(calls(2, 7, 100), calls(4, 7, 50, wrong=1)))
    record = gpu_record.with_results(
        first_run, dict(fuzz=dict(trees={"older": dict(calls=5, wrong=0, runs=["2 GPUs, seed 1"], failed=[])}))
    )
    assert (record["fuzz"]["calls"], record["fuzz"]["wrong"]) == (155, 1)
    assert gpu_record.with_results(first_run, record)["fuzz"] == record["fuzz"]
    fuzz_record = gpu_record.with_results(
        run_results("new", fuzz=(calls(4, 8, 10, ended="not finished"), calls(4, 9, 1))), record
    )["fuzz"]
    assert (fuzz_record["calls"], fuzz_record["wrong"]) == (166, 2), "an unfinished run counts as a wrong call"
    assert fuzz_record["trees"]["new"]["kinds"] == {"4 ranks on 1 GPU": {"moe fused": 11}}
    assert fuzz_record["trees"]["new"]["failed"] == ["4 ranks on 1 GPU, seed 8: not finished"]


def test_the_record_that_is_kept_can_be_read() -> None:
    record = json.loads((ROOT / "tests/gpu_record.json").read_text())
    assert {"tree", "checks", "fuzz", "runs"} == set(record) and record["tree"] == record["runs"][0]["tree"]
    for rows in record["checks"].values():
        assert all({"outcome", "tree", "date", "machine"} <= set(row) for row in rows.values())


def test_trends_keep_a_line_a_day_and_the_newest_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trends, "FILE", tmp_path / "trends.csv")
    for day in range(10, 25):
        for minutes in (1.0, 2.0):
            trends.note("make test", minutes, "f" * 40, f"2026-11-{day}")
    trends.note("make gates", 3.0, "f" * 40)
    lines = (tmp_path / "trends.csv").read_text().splitlines()
    assert (
        len(lines) == trends.KEPT + 1
        and lines[1].startswith("2026-11-15,make test,2.0,")
        and lines[0].split(",")[1] == "make gates"
    )
    monkeypatch.setattr(sys, "argv", ["trends.py", "make lint", sys.executable, "-c", "raise SystemExit(3)"])
    assert trends.main() == 3 and "lint" not in (tmp_path / "trends.csv").read_text(), (
        "a failed command must not be recorded"
    )


def test_two_streams_wait_as_long_as_the_run_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "20")
    monkeypatch.delitem(sys.modules, "tests.gpu.gpu_residency", raising=False)
    importlib.import_module("tests.gpu.gpu_residency")
    assert timeout_seconds() == 20


def test_every_example_that_needs_no_model_and_one_launch_runs() -> None:
    others = {"launch", "hf_generate", "hf_serve", "lightning_tp", "two_nodes", "vllm_serve"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - others == set(gpu_run.EXAMPLES)
    assert placed(8, 2) == "8 ranks on 2 GPUs"
