"""The checks of ranks that share one GPU (test_gpu.py, test_signaled.py), many times each:

    python tests/gpu_shared.py --out DIR --seconds 200 --workers 4

Every worker is a process that makes the checks in an order of its own, again and again until the time is over; the workers share the
GPU, so what one holds is late for another. DIR/shared.json has the passes and failures of every check. Where ranks stand still for
STILL seconds, far less than a wait is allowed, DIR/stalls.log gets what each is waiting for: the stacks of their threads, with native
frames where py-spy is on the path, whether their streams are idle, and whether a small kernel on a stream of its own still runs. If it
does not, the driver holds everything back behind a kernel that spins, and no signal is lost.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.backends import loopback
from weft.world import World

STILL = 4.0
SEPARATE = (
    "test_a_rank_that_stays_away_is_named",
    "test_first_use_of_a_kernel_beside_one_that_waits",
)  # expires; starts processes


def checks() -> dict[str, Callable[[], None]]:
    """By name and parameters, as pytest has them."""
    import test_gpu
    import test_signaled

    found: dict[str, Callable[[], None]] = {}
    for module in (test_gpu, test_signaled):
        for name, test in inspect.getmembers(module, inspect.isfunction):
            marks = {m.name: m for m in getattr(test, "pytestmark", ())}
            if not name.startswith("test_") or (module is test_signaled and "gpu" not in marks):
                continue
            if name in SEPARATE or marks.get("gpu", test_gpu.pytestmark[0]).args:
                continue
            given = [m.args for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
            for values in itertools.product(*(choices for _, choices in given)):
                bound = dict(zip((names for names, _ in given), values, strict=True))
                found[f"{name}[{'-'.join(map(str, values))}]" if values else name] = partial(test, **bound)
    return found


class Watch(threading.Thread):
    """Writes the stacks of this process once whenever its ranks have stood still for a while."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.log, self.check = log, ""
        self.stream, self.one = torch.cuda.Stream(), torch.zeros(1, device="cuda")  # allocating might wait later
        self.one.add_(1)
        torch.cuda.synchronize()

    def ranks(self) -> tuple[Any, ...]:
        frames = sys._current_frames()
        alive = [t for t in threading.enumerate() if t.name.startswith("rank ")]
        return tuple((t.name, frames[t.ident].f_lasti, id(frames[t.ident])) for t in alive if t.ident in frames)

    def run(self) -> None:
        last, since = (), time.monotonic()
        while True:
            time.sleep(0.25)
            now = self.ranks()
            if now != last or not now:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > STILL:
                self.tell()
                since = time.monotonic() + 1e6

    def runs(self) -> bool:
        """Whether a small kernel does, within a second."""
        with torch.cuda.stream(self.stream):
            self.one.add_(1)
            ended = torch.cuda.Event()
            ended.record()
        time.sleep(1)
        return ended.query()

    def tell(self) -> None:
        frames = sys._current_frames()
        lines = [f"== {self.check}, process {os.getpid()}: still for {STILL} s; a small kernel runs: {self.runs()}"]
        for world in sorted(World._all.copy().values(), key=lambda w: w.rank):
            busy = [
                f"{hex(s.cuda_stream)} {'idle' if s.query() else 'busy'}"
                for s in list(world.backend._by_handle.values())
            ]
            lines.append(f"{world}: streams {busy}, record {world.backend.record_words.words.tolist()}")
        for t in threading.enumerate():
            if t.name.startswith("rank ") and t.ident in frames:
                lines += [t.name, *traceback.format_stack(frames[t.ident])[-6:]]
        if spy := shutil.which("py-spy"):
            dump = [spy, "dump", "--native", "--pid", str(os.getpid())]
            lines.append(subprocess.run(dump, capture_output=True, text=True).stdout)
        with self.log.open("a") as f:
            f.write("\n".join(lines) + "\n")


def work(number: int, out: Path, until: float, only: str, rounds: int) -> None:
    """One process: its results go to a file of its own, after every check."""
    for name, value in loopback.SETTINGS.items():  # the watch starts CUDA
        os.environ.setdefault(name, value)
    named = {name: check for name, check in checks().items() if only in name}
    rng, watch = random.Random(number), Watch(out / "stalls.log")
    watch.start()
    results: dict[str, dict[str, Any]] = {name: dict(passed=0, failed=0, seconds=0.0, why=[]) for name in named}
    path = out / f"shared-{number}.json"
    for _ in range(rounds):
        order = list(named)
        rng.shuffle(order)
        for name in order:
            if time.time() > until:
                return
            watch.check, began = name, time.time()
            entry = results[name]
            try:
                named[name]()
                entry["passed"] += 1
            except Exception as e:
                entry["failed"] += 1
                entry["why"].append(f"{type(e).__name__}: {e}"[:600])
            entry["seconds"] += time.time() - began
            path.write_text(json.dumps(results))


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for name in sorted({name for part in parts for name in part}):
        entries = [part[name] for part in parts if name in part]
        total[name] = {key: sum((e[key] for e in entries), type(entries[0][key])()) for key in entries[0]}
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--rounds", type=int, default=10**6, help="in one process; then a fresh one takes its place")
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.worker >= 0:
        work(given.worker, given.out, given.until, given.only, given.rounds)
        return
    until, started = time.time() + given.seconds, itertools.count()

    def start() -> subprocess.Popen[bytes]:
        number = next(started)
        log = (given.out / f"shared-{number}.log").open("w")
        again = [sys.executable, __file__, "--out", str(given.out), "--only", given.only, "--rounds", str(given.rounds)]
        return subprocess.Popen([*again, "--worker", str(number), "--until", str(until)], stdout=log, stderr=log)

    running = [start() for _ in range(given.workers)]
    while running:
        time.sleep(0.2)
        ended = [p for p in running if p.poll() is not None]
        running = [p for p in running if p not in ended]
        running += [start() for p in ended if time.time() < until - 10]
        if time.time() > until + 30:
            for p in running:
                p.kill()
    files = sorted(given.out.glob("shared-*.json"))
    total = merged([json.loads(f.read_text()) for f in files])
    run = f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {next(started)} processes"
    (given.out / "shared.json").write_text(json.dumps(dict(run=run, checks=total), indent=1))
    for f in [*files, *given.out.glob("shared-*.log")]:
        if f.suffix == ".json" or not f.stat().st_size:
            f.unlink()
    for name, entry in total.items():
        each = entry["seconds"] / max(1, entry["passed"] + entry["failed"])
        print(f"{entry['passed']:5} passed {entry['failed']:3} failed {each:7.2f} s each  {name}", *entry["why"][:2])


if __name__ == "__main__":
    main()
