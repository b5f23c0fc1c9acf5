"""Run the GPU checks that have not passed with this version of weft, on the GPUs of this machine, in a given time.
gpu/run.sh starts this.

    python -m tests.gpu.gpu_run --out DIR [--minutes 9.5] [--parts checks peers users fuzz] [--ranks 2 4 8]

R ranks run on min(R, G) of the machine's G GPUs, which they share if R > G. Several groups of processes run at once,
with as many ranks as the machine has cores, since checks mostly compile and wait. The parts are: `checks`, the checks
of gpu_main.py, which groups with the same number of ranks share in one queue; `peers`, with ranks that are killed,
stall or are late; `users`, commands that users run; and `fuzz`, random calls. A check that needs much GPU memory runs
alone at the end. Each number of ranks has equally many groups; the number that --ranks names first also has the first
group and the remaining cores. If a group dies or hangs, its current check has failed, and a new group
continues with the remaining checks. All groups end in time; the next call runs the checks that are left.

The program writes DIR/results.json whenever a result is new, and DIR/log.txt, the end of every group's output.
tests/gpu/gpu_record.py adds the results to the record; the next call also starts from results not yet on record.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.gpu_queue import WEFT, Queue, Row, ordered, passed, placed, recorded, tree_of

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ALONE, ALONE_GIB = "rows beyond 24 bits", 16  # a check that runs alone, and the GiB that it needs on each rank
STILL = 150  # the longest time in seconds that a group may spend on one check
STARTS = 3  # the number of groups of a queue that may die before their first check
ENDING = 15  # seconds at the end in which groups may end by themselves
SHOWN = 100_000  # the number of characters kept of a group's output
QUACK = importlib.util.find_spec("quack") is not None
AWAY = ("peer", "node", "killed")  # kinds of gpu_nodes.py
STALLED = ("all_gather_matmul", "one_shot", "moe_exchange", *(("flag_gated",) if QUACK else ()))
EXAMPLES = ("all_gather_rowwise", "all_to_all_table", "context_parallel", "gemm_ring_reduce_scatter", "moe_own_experts", "own_op",
            "torch_async_tp", "tp_mlp", "train_moe")  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A check that runs as a command line: the check passes if the command exits with 0 within `limit` seconds."""

    part: str
    name: str
    ranks: int
    words: tuple[str, ...]
    limit: float
    timeout: int = 20  # the bound of weft's waits, in seconds

    @property
    def key(self) -> str:
        return f"{self.part}-{self.ranks}-{self.name.replace(' ', '_')}"


@dataclass
class Group:
    """Running processes: a torchrun, or a command that starts several. `queue` supplies the group's checks. `running`
    is the current check, and the time at which it started."""

    command: Command
    process: subprocess.Popen[bytes]
    log: Path
    queue: Queue | None = None
    began: float = field(default_factory=time.time)
    running: tuple[str | None, float] = (None, 0.0)

    def end(self) -> None:
        """End the group's processes and all processes that they started, including torchrun's ranks, which are in
        sessions of their own."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    pids = [pid]
    for one in pids:
        pids += [child for child, parent in parents.items() if parent == one]
    return pids[1:]


def torchrun(ranks: int, *words: str) -> tuple[str, ...]:
    return (*TORCHRUN, f"--nproc-per-node={ranks}", *words)


def commands(
    parts: Sequence[str], ranks: Sequence[int], seconds: int, calls: int, seed: int | None
) -> Iterator[Command]:
    """Return the commands other than gpu_main.py."""
    for n in ranks:
        if "peers" in parts:
            yield Command(
                "peers", "killed peer", n, (sys.executable, "-m", "tests.gpu.gpu_killed", "--ranks", str(n)), 160
            )
            if n >= 4:
                for kind in AWAY:
                    words = (sys.executable, "-m", "tests.gpu.gpu_nodes", "--away", kind, "--ranks", str(n))
                    yield Command("peers", f"two nodes, {kind} away", n, words, 170, 5)
            if n <= 4:
                yield Command("peers", "late peer", n, torchrun(n, "-m", "tests.gpu.gpu_late"), 120)
                yield Command("peers", "batch invariance", n, torchrun(n, "-m", "tests.gpu.gpu_invariant"), 400)
                yield Command("peers", "two streams", n, torchrun(n, "-m", "tests.gpu.gpu_residency"), 120)
                words = torchrun(n, "-m", "tests.gpu.gpu_disagree", "--out", tempfile.gettempdir())
                yield Command("peers", "ranks that disagree", n, words, 200)
                for op in STALLED:
                    words = torchrun(n, "-m", "tests.gpu.gpu_main", "--stalled-peer", op)
                    yield Command("peers", f"stalled peer, {op}", n, words, 120, 5)
        if "users" in parts:
            for folder, test in (("gpu", "test_gpu.py::test_spmd"), ("emulated", "test_autograd.py::test_on_gpus")):
                words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{folder}/{test}[{n}]")
                yield Command("users", test, n, words, 240)
            if n <= 4:
                for name in EXAMPLES:
                    yield Command("users", f"example {name}", n, torchrun(n, f"examples/{name}.py"), 240)
            if n >= 4:
                yield Command("users", "two nodes", n, torchrun(n, "-m", "tests.gpu.gpu_nodes"), 290)
            if n == 2:
                yield Command("users", "own op", n, torchrun(n, "-m", "tests.tooling.test_own_op"), 200)
        if "fuzz" in parts and seconds:
            words = torchrun(n, "-m", "tests.gpu.gpu_fuzz", "--seconds", str(seconds), "--calls", str(calls))
            yield Command(
                "fuzz", "random calls", n, (*words, *(("--seed", str(seed)) if seed is not None else ())), seconds + 90
            )


class Run:
    """One call of gpu/run.sh."""

    def __init__(self, out: Path, work: Path, gpus: int, gib: float, room: int, minutes: float) -> None:
        self.out, self.work, self.gpus, self.gib, self.room = out, work, gpus, gib, room
        self.began = time.time()
        self.until = self.began + 60 * minutes
        self.tree = tree_of(WEFT)
        self.groups: list[Group] = []
        self.rows: list[Row] = []  # rows of commands, and of checks at which groups died
        self.used: dict[str, float] = {}  # minutes of the groups of each part
        self.logs: dict[str, Path] = {}
        self.died: dict[Path, int] = {}
        self.trouble: list[str] = []  # groups that died outside a check
        self.devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")

    # -- groups --------------------------------------------------------------------------------------------------------
    def gpus_of(self, ranks: int) -> list[str]:
        """Return the next GPUs in turn, for a group of ranks with one GPU each."""
        if ranks >= self.gpus:
            return self.devices
        first_device = sum(g.command.ranks for g in self.groups if g.command.ranks < self.gpus)
        return [self.devices[(first_device + i) % self.gpus] for i in range(ranks)]

    def start(self, command: Command, queue: Queue | None = None) -> None:
        number = len(self.logs)
        words = list(command.words)
        if queue is not None:
            seconds = str(max(0, self.until - ENDING - time.time()))
            words += ["--queue", str(queue.path), "--name", f"rows{number}", "--seconds", seconds]
        if queue is not None or command.part == "fuzz":
            words += ["--out", str(self.work / (f"fuzz{number}" if queue is None else "."))]
        log = self.logs[f"{number} {command.key}"] = self.work / f"{number}.log"
        # otherwise torch.compile starts one process per core for each rank
        env = dict(
            {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ,
            CUDA_VISIBLE_DEVICES=",".join(self.gpus_of(command.ranks)), WEFT_SHARE_GPU="1", WEFT_TIMEOUT=str(command.timeout),
        )  # fmt: skip
        with log.open("wb") as file:
            process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=ROOT, start_new_session=True
            )  # fmt: skip
        self.groups.append(Group(command, process, log, queue))
        print(
            f"{time.time() - self.began:5.0f} s: {placed(command.ranks, self.gpus_used(command.ranks))}: {command.name} begins",
            flush=True,
        )

    def gpus_used(self, ranks: int) -> int:
        return min(ranks, self.gpus)

    def free(self) -> int:
        """Return how many more ranks may run. The number is smaller beside checks with absent peers: their waits are so
        short that compiling beside them could make a rank late."""
        quiet = any(g.command.part == "peers" for g in self.groups)
        return (max(8, self.room * 2 // 3) if quiet else self.room) - sum(g.command.ranks for g in self.groups)

    def watch(self) -> bool:
        """Record the groups that have ended, and end the groups that hang. Return whether anything changed."""
        ended = [g for g in self.groups if self.over(g)]
        for group in ended:
            self.remove(group)
        return bool(ended)

    def remove(self, group: Group) -> None:
        self.groups.remove(group)
        part = f"{group.command.part}, {placed(group.command.ranks, self.gpus_used(group.command.ranks))}"
        self.used[part] = self.used.get(part, 0.0) + (time.time() - group.began) / 60

    def over(self, group: Group) -> bool:
        code, checked_at = group.process.poll(), time.time()
        if group.queue is None:
            late = checked_at - group.began > group.command.limit
            if code is None and not late:
                return False
            group.end()
            self.note(
                group,
                group.command.name,
                "" if code == 0 else f"no end after {group.command.limit:g} s" if late else f"exit {code}",
            )
            return True
        who = group.log.stem
        if code is None:
            name = group.queue.running(f"rows{who}")
            if name != group.running[0]:
                group.running = name, checked_at
            if checked_at - (group.running[1] or group.began) <= STILL:
                return False
            group.end()
        name = group.queue.release(f"rows{who}")
        if code == 0:
            return True
        failure = f"no end after {STILL} s" if code is None else f"its processes ended with {code}"
        if name is None:
            self.died[group.queue.path] = self.died.get(group.queue.path, 0) + 1
            self.trouble.append(
                f"{group.command.key}: before or behind all checks: {failure}: {last_output(group.log)}"
            )
        elif not any(row["check"] == name for row in lines(self.work / f"rows{who}.jsonl")):
            self.note(group, name, failure)
        return True

    def note(self, group: Group, name: str, why: str) -> None:
        row: Row = dict(
            check=name, ranks=group.command.ranks, gpus=self.gpus_used(group.command.ranks), outcome="failed" if why else "passed",
            seconds=round(time.time() - group.began, 1), parts={}, date=time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        if why:
            row["why"] = f"{why}: {last_output(group.log)}"
        self.rows.append(row)
        print(
            f"{time.time() - self.began:5.0f} s: {placed(row['ranks'], row['gpus'])}: {name}: {row['outcome']} {why}",
            flush=True,
        )

    # -- results -------------------------------------------------------------------------------------------------------
    def all_rows(self) -> list[Row]:
        return self.rows + [row for path in sorted(self.work.glob("rows*.jsonl")) for row in lines(path)]

    def write(self, machine: dict[str, Any]) -> None:
        fuzz = [json.loads(path.read_text()) for path in sorted(self.work.glob("fuzz*/fuzz*.json"))]
        used = {part: round(minutes, 1) for part, minutes in sorted(self.used.items())}
        results = dict(tree=self.tree, **machine, minutes=used, trouble=self.trouble, rows=self.all_rows(), fuzz=fuzz)
        part = self.out / "results.part"
        part.write_text(json.dumps(results, indent=1))
        part.replace(self.out / "results.json")
        texts = [f"== {name}\n{tail(path, SHOWN)}\n" for name, path in self.logs.items()]
        (self.out / "log.txt").write_text("".join(texts))


def lines(path: Path) -> list[Row]:
    """Return the rows of a file whose last line may be incomplete."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


ENDED = (
    "torch/distributed/elastic/multiprocessing/api.py",
    "torch/multiprocessing/spawn.py",
)  # files that report the end of a rank


def last_output(path: Path, characters: int = 600) -> str:
    """Return the end of the ranks' own output, without the launcher's report, which fills a screen."""
    lines = tail(path, SHOWN).splitlines()
    launcher_line = next((i for i, line in enumerate(lines) if any(name in line for name in ENDED)), len(lines))
    return "\n".join(lines[:launcher_line] or lines)[-characters:]


def tail(path: Path, characters: int) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


def todo(all_of_them: Sequence[Command], gpus: int, tree: str) -> list[Command]:
    """Return the checks that did not pass on this tree, in the order of gpu_queue.py; random calls are always new."""
    ranked: list[tuple[int, Command]] = []
    for ranks in dict.fromkeys(c.ranks for c in all_of_them):
        by_name = {c.name: c for c in all_of_them if c.ranks == ranks and c.part != "fuzz"}
        ranked += enumerate(by_name[name] for name in ordered(list(by_name), recorded(ranks, min(ranks, gpus)), tree))
    fuzz = [c for c in all_of_them if c.part == "fuzz"]
    return [c for _, c in sorted(ranked, key=lambda entry: entry[0])] + fuzz


def checks_of(ranks: int, only: Sequence[str], alone: bool) -> Command:
    name = "checks alone" if alone else "checks"
    words = ["--only", ALONE] if alone else [*(["--only", *only] if only else []), "--without", ALONE]
    return Command("checks", name, ranks, torchrun(ranks, "-m", "tests.gpu.gpu_main", *words), 1e9)


def go(run: Run, waiting: list[Command], ranks: Sequence[int], only: Sequence[str], machine: dict[str, Any]) -> bool:
    """Run until no check is left or the time is over; return whether any check is left."""
    queues = {n: Queue(run.work / f"queue{n}.json") for n in ranks}
    alone = [n for n in sorted(ranks) if not only and n / run.gpus_used(n) * ALONE_GIB <= run.gib]
    alone = [n for n in alone if not passed(recorded(n, run.gpus_used(n)).get(ALONE), run.tree)]
    alone_queues = {n: Queue(run.work / f"queue-alone{n}.json") for n in alone}
    written = 0.0

    def groups_of(n: int) -> int:
        return sum(g.queue is queues[n] for g in run.groups)

    def usable(n: int) -> bool:
        """Return whether another group may start for this queue. It may if checks are left, or their number is unknown,
        and groups do not die before their first check."""
        return queues[n].left() != 0 and run.died.get(queues[n].path, 0) < STARTS

    def command_of(*parts: str) -> bool:
        for command in waiting:
            needs = command.limit if command.part == "fuzz" else min(command.limit, 60)
            if command.part in parts and command.ranks <= run.free() and time.time() + needs < run.until:
                waiting.remove(command)
                run.start(command)
                return True
        return False

    def group_of_checks(n: int) -> bool:
        if n > run.free():
            return False
        run.start(checks_of(n, only, False), queues[n])
        return True

    def next_group() -> bool:
        if time.time() > run.until - 4 * ENDING:
            return False
        if command_of("peers") or command_of("users"):
            return True
        queued = sorted(filter(usable, queues), key=groups_of)  # among equals, as --ranks names them
        if queued and not groups_of(queued[0]):
            return group_of_checks(queued[0])
        if any(c.part != "fuzz" for c in waiting) or any(queues[n].left() is None for n in queued):
            return False
        long = [n for n in queued if (queues[n].left() or 0) > 12 * (groups_of(n) + 1)]
        # The time of a check hardly depends on the number of ranks, so equally many groups pass equally many checks. A
        # group of many ranks waits for the cores of its share: groups of few ranks would take them as they become free.
        behind = [n for n in long if groups_of(n) < run.room // sum(long)]
        if behind:
            return group_of_checks(behind[0])
        if any(group_of_checks(n) for n in long):
            return True
        if command_of("fuzz"):
            return True
        if not run.groups and alone and (n := alone.pop(0)):
            run.start(checks_of(n, only, True), alone_queues[n])
            return True
        return False

    while time.time() < run.until:
        news = run.watch()
        while next_group():
            news = True
        if not run.groups:
            break
        if news or time.time() - written > 20:
            written = time.time()
            run.write(machine)
        time.sleep(0.5)
    cut = list(run.groups)
    for group in cut:
        group.end()
        run.remove(group)
    run.write(machine)
    return bool(cut or waiting or alone or any(q.left() != 0 for q in queues.values()))


def machine_of() -> dict[str, Any]:
    """Return the machine's description, which a separate process determines so that this one allocates no GPU
    memory."""
    asked = """if True:
        import json, torch, triton
        p = torch.cuda.get_device_properties(0)
        print(json.dumps(dict(gpus=torch.cuda.device_count(), gib=p.total_memory / 2**30, gpu=torch.cuda.get_device_name(0), versions=dict(
            torch=torch.__version__, triton=triton.__version__, cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version()))))))
    """
    printed = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    machine: dict[str, Any] = json.loads(printed)
    return machine


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--minutes", type=float, default=9.5)
    p.add_argument(
        "--parts", nargs="+", choices=["checks", "peers", "users", "fuzz"], default=["checks", "peers", "users", "fuzz"]
    )
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    p.add_argument("--only", nargs="*", default=[], help="checks whose name contains one of these")
    p.add_argument("--fuzz-seconds", type=int, default=60)
    p.add_argument("--fuzz-calls", type=int, default=1_000_000)
    p.add_argument("--seed", type=int)
    p.add_argument("--room", type=int, default=len(os.sched_getaffinity(0)), help="ranks at once")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    began, machine = time.time(), machine_of()
    gpus, gib = machine.pop("gpus"), machine.pop("gib")
    machine = dict(machine=f"{gpus} x {machine.pop('gpu')}", **machine, date=time.strftime("%Y-%m-%d %H:%M"))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(a.out, Path(folder), gpus, gib, max(a.room, *a.ranks), a.minutes - (time.time() - began) / 60)
        waiting = todo(list(commands(a.parts, a.ranks, a.fuzz_seconds, a.fuzz_calls, a.seed)), gpus, run.tree)
        left = go(run, waiting, a.ranks if "checks" in a.parts else [], a.only, machine)
        rows = run.all_rows()
        wrong = sum(f["wrong"] + bool(f["ended"]) for f in json.loads((a.out / "results.json").read_text())["fuzz"])
    failed = [row for row in rows if row["outcome"] == "failed"]
    for row in failed:
        print(f"FAILED {placed(row['ranks'], row['gpus'])}: {row['check']}: {row.get('why', '')[:300]}")
    print(*run.trouble, sep="\n")
    for command in waiting:
        print(f"NOT BEGUN, of {command.limit} s at most: {command.name}, {command.ranks} ranks")
    print(
        f"{len(rows) - len(failed)} passed, {len(failed)} failed, {wrong} random calls wrong; {'some are left' if left else 'nothing is left'}"
    )
    return 1 if failed or wrong or run.trouble else 0


if __name__ == "__main__":
    sys.exit(main())
