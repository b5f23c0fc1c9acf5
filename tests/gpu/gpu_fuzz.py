"""Make and count random calls of every op:

    torchrun --nproc-per-node N -m tests.gpu.gpu_fuzz --out DIR [--seconds S] [--calls C]

A round draws a kind: an op, a plan, whether to compute gradients, and whether to use a second World (`World.split`). A
round also draws every rank's number of rows, a layer (N, K, dtype, and whether it has a bias), and a routing for
experts. The round makes a few such calls, each with different inputs, on a stream, with or without `out`, and with one
rank late. Alternatively, the round captures the calls in a CUDA graph and replays the graph with new inputs. Within a
round, only weft orders calls on several streams. Rounds run one after another, as required of different ops on two
streams and of ops of several Worlds. The device compares results with a float32 reference, and the host reads the
comparisons from time to time.

The kinds with the fewest recorded calls on the same number of ranks (tests/gpu_record.json) are drawn most often. Every
rank draws the same values from (seed, index of the round, kind), so `--seed S --only I --kind KIND` repeats round I
alone. `--only I:J` repeats rounds I to J - 1, with the kinds that a run drew if `--record` names its fuzz<N>.json. A
seed also fixes the plan, layer, rows and form of each kind, so that its kernels are compiled once; different seeds
select different values. Before its first round, a run compiles one kind after the other for at most half of its
seconds, and then draws only compiled kinds. Rank 0 writes DIR/fuzz<N>.json. Ranks may share GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from tests.emulated.cases_ops import FUSED, SMALL_FUSED
from tests.gpu.fuzz_calls import (
    ALL,
    ATTENTION,
    CALLS,
    EXCHANGE,
    GATHER,
    MOE,
    NORM,
    ROUTINGS,
    SCATTER,
    TENSOR,
    TRAINED,
    Call,
    Checked,
    Kind,
    Part,
    Result,
    Round,
)
from weft.op import REGISTRY
from weft.plans import (
    FusedAllReduce,
    FusedGatherByCopies,
    Plan,
    Segmented,
    Signaled,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)

OPS = tuple(CALLS)
STREAMS = ("fuzz a", "fuzz b")
BATCH = 200  # calls between two checks of the results
ROUNDS_A_LOOK = 8  # rounds between two checks of the clock, for which all ranks synchronise on the host
SPECIAL_SHAPES = 4  # the number of first shapes, for which Triton compiles special kernels (fuzz_calls.shapes)
FIRST = -1  # the index of a round that only compiles a kind
NAMED = 20  # the number of wrong calls that are printed
EVEN = 100  # kinds with fewer recorded calls than this number are drawn about equally often
RECORD = Path(__file__).parents[1] / "gpu_record.json"
REGISTERED = {TENSOR: "all_gather_grouped_matmul"}  # the registered name of the op that has the plans, if it differs
TRAINED_BY = {MOE: ("sequential", "dispatched")}  # all plans of the other ops have gradients


@dataclass(frozen=True)
class Scale:
    """The ranges of the draw: (N, K) of layers, the largest number of rows, the number of shapes, the rows of a tile,
    attention's head dimension D, and the rows of the pools from which inputs are cut."""

    sizes: tuple[tuple[int, int], ...]
    most: int
    shapes: int
    tile: int
    dim: int
    pool: int


GPU = Scale(((1024, 512), (1032, 264), (520, 2056)), 1500, 24, 128, 64, 4096)
SMALL = Scale(((64, 32), (40, 24)), 40, 7, 16, 16, 128)


class Fuzz:
    """The rounds of one seed on one World and on Worlds split from it. `counts` are the recorded calls by kind."""

    def __init__(self, world: weft.World, seed: int, scale: Scale, counts: Mapping[str, int] | None = None) -> None:
        self.world, self.seed, self.scale = world, seed, scale
        self.parts = [Part(w, seed, scale) for w in worlds_of(world)]
        rng = random.Random(f"{seed} plans")
        self.plans = {
            op: {"auto": "auto"} if op == EXCHANGE else plans(world, REGISTERED.get(op, op), rng) for op in OPS
        }
        self.kinds = [Kind(op, plan, parts=parts) for op in OPS for plan in self.plans[op] for parts in (False, True)]
        for op in TRAINED:
            trained = TRAINED_BY.get(op, self.plans[op])
            self.kinds += [
                Kind(op, plan, True, parts) for plan in {"auto": 0, **dict.fromkeys(trained)} for parts in (False, True)
            ]
        self.counts = counts or {}
        self.errors = torch.zeros(
            2 * BATCH + 64 * 3, device=world.device
        )  # errors over their bounds, one per call since the last check
        self.pending: list[tuple[Round, int]] = []  # for each of these calls, its round and its index in the round
        self.held: list[Any] = []  # graphs that may still run
        self.checked: Checked | None = None  # the latest round, whose calls may still run

    def order(self) -> list[Kind]:
        """Return all kinds, starting with those that have the fewest recorded calls."""
        draw = random.Random(f"{self.seed} order")
        return sorted(self.kinds, key=lambda kind: (self.counts.get(str(kind), 0), draw.random()))

    def compile(self, kind: Kind) -> None:
        """Make a call of each kind, and replay a graph of the call if the kind may be captured."""
        r = self.draw(FIRST, kind)
        self.run(replace(r, calls=r.calls[:1], replays=0))
        if self.replayable(r):
            self.run(replace(r, calls=r.calls[:1], replays=1))

    def draw(self, index: int, kind: Kind | None = None) -> Round:
        if kind is None:
            weights = [1 / (EVEN + self.counts.get(str(kind), 0)) for kind in self.kinds]
            (kind,) = random.Random(f"{self.seed} {index} kind").choices(self.kinds, weights)
        of_kind, rng = random.Random(f"{self.seed} {kind}"), random.Random(f"{self.seed} {index} {kind}")
        world = of_kind.randrange(1, len(self.parts)) if kind.parts else 0
        part = self.parts[world]
        layer, shape = of_kind.randrange(len(part.layers)), of_kind.randrange(len(part.shapes))
        if shape >= SPECIAL_SHAPES and kind.plan != "auto":  # "auto" would time its plans for each number of rows
            shape = rng.randrange(SPECIAL_SHAPES, len(part.shapes))
        if kind.op in (NORM, ATTENTION) and not sum(part.shapes[shape]):
            shape = 1  # the shape with one row
        rows, plan = part.shapes[shape], self.plans[kind.op][kind.plan]
        whole, form, routing = of_kind.random() < 0.3, of_kind.randrange(60), rng.choice(ROUTINGS)
        r = Round(index, kind, world, plan, layer, shape, rows, whole, routing, form, (), 0)
        replays = rng.choice([3, 8]) if rng.random() < 0.1 and self.replayable(r) else 0
        calls = []
        offsets = [rng.randrange(self.scale.pool - sum(rows)) for _ in range(3)]  # few addresses for few launches
        for _ in range(rng.randrange(1, 4) if replays or kind.gradients else rng.randrange(1, 9)):
            late = rng.randrange(part.world.size) if rng.random() < 0.3 else -1
            stream = "" if replays or rng.random() < 0.5 else rng.choice(STREAMS)
            calls.append(Call(rng.choice(offsets), stream, late, rng.randrange(1000, 300_000), rng.random() < 0.3))
        return replace(r, calls=tuple(calls), replays=replays)

    def replayable(self, r: Round) -> bool:
        """Return whether the round's calls may be captured: none of them reads counts on the host or is the first to
        need its tiles."""
        half = self.parts[r.world].layers[r.layer].dtype == torch.float16
        reads = r.kind.op == MOE and r.kind.plan == "sequential" or r.kind.op == TENSOR and half
        first_tiles = r.whole and r.plan == "auto"
        return bool(sum(r.rows)) and not (r.kind.gradients or reads or first_tiles)

    def described(self, r: Round) -> str:
        part = self.parts[r.world]
        where = f"World {r.world}, of {part.world.size} ranks"
        return f"seed {self.seed}, round {r.index} --kind {str(r.kind)!r}: {r}, {part.layers[r.layer]}, {where}"

    def run(self, r: Round) -> int:
        """Enqueue a round, and return the number of its calls."""
        part = self.parts[r.world]
        checked, before = Checked(part, r), len(self.pending)  # a layer's weights are created on the main stream
        self.join()
        # Before this point a call of the previous round may still read, on another stream, weights whose memory the
        # allocator would otherwise give to the main stream.
        self.checked = checked
        if r.replays:
            self.graph(r, checked)
        else:
            for c in r.calls:
                with part.world.on(stream_of(part.world, c.stream)):
                    inputs, expected = checked.inputs_of(c.offset), checked.expected(c.offset)
                    wait(part.world, c)
                    self.compare(checked, checked.run(inputs, c.offset, self.out(checked, expected, c)), expected)
        return len(self.pending) - before

    def graph(self, r: Round, checked: Checked) -> None:
        """Make the calls once eagerly, capture them, and replay the graph with different inputs."""
        world = self.parts[r.world].world
        static = [tuple(t.clone() for t in checked.inputs_of(c.offset)) for c in r.calls]
        outs = [self.out(checked, checked.expected(c.offset), c) for c in r.calls]
        for c, inputs, out in zip(r.calls, static, outs, strict=True):
            self.compare(checked, checked.run(inputs, c.offset, out), checked.expected(c.offset))
        calls = list(zip(r.calls, static, outs, strict=True))
        results, replay = captured(world, lambda: [checked.run(inputs, c.offset, out) for c, inputs, out in calls])
        self.held.append((replay, static, outs, results))
        for i in range(1, r.replays + 1):
            starts = [(c.offset + 97 * i) % (self.scale.pool - sum(r.rows)) for c in r.calls]
            for start, inputs in zip(starts, static, strict=True):
                for held, new in zip(inputs, checked.inputs_of(start), strict=True):
                    held.copy_(new)
            wait(world, r.calls[i % len(r.calls)])
            replay()
            for start, actual in zip(starts, results, strict=True):
                self.compare(checked, actual, checked.expected(start))

    def join(self) -> None:
        """Order all work on all streams before later work."""
        main = self.world.current_stream()
        others = [stream_of(part.world, name) for part in self.parts for name in STREAMS]
        for stream in others:
            self.world.wait_event(main, self.world.record(stream))
        for stream in others:
            self.world.wait_event(stream, self.world.record(main))

    def out(self, checked: Checked, expected: Result, c: Call) -> torch.Tensor | None:
        """Return memory full of NaN for the result, or None if the call allocates its own."""
        r = checked.round
        tiles = r.whole and r.kind.op in (SCATTER, ALL)
        if not c.into or tiles or r.kind.gradients:
            return None
        return self.world.zeros(tuple(expected[0].shape), checked.layer.dtype).fill_(float("nan"))

    def compare(self, checked: Checked, actual: Result, expected: Result) -> None:
        r, error = checked.round, checked.error(actual, expected)
        if error is not None:
            self.errors[len(self.pending)] = error
        again = self.pending and self.pending[-1][0] is r
        self.pending.append((r, self.pending[-1][1] + 1 if again else 0))

    def verify(self) -> list[tuple[Round, int, float]]:
        """Collectively return the calls since the last check, each with its largest error on any rank, divided by the
        bound."""
        self.join()
        for part in self.parts:
            part.world.synchronize()
        errors = self.errors[: len(self.pending)].tolist()
        by_call = zip(*self.world.exchange(errors), strict=True)
        worst = [max(e if e == e else float("inf") for e in ranks) for ranks in by_call]
        checked_calls = [(*which, e) for which, e in zip(self.pending, worst, strict=True)]
        self.errors.zero_()
        self.pending.clear()
        self.held.clear()
        return checked_calls


def worlds_of(world: weft.World) -> list[weft.World]:
    """Return the World of all ranks, a second World of all ranks and, for an even number of ranks, Worlds of each half:
    neighbouring ranks and alternate ranks."""
    worlds = [world, world.split(0)]
    if world.size % 2 == 0:
        worlds.append(world.split(world.rank // (world.size // 2)))
    if world.size % 4 == 0:
        worlds.append(world.split(world.rank % 2))
    return worlds


def stream_of(world: weft.World, name: str) -> Any:
    return world.side_stream(name, urgent=False) if name else world.current_stream()


def wait(world: weft.World, c: Call) -> None:
    if c.late == world.rank and world.device.type == "cuda":
        torch.cuda._sleep(c.cycles)


def captured(world: weft.World, fn: Callable[[], list[Result]]) -> tuple[list[Result], Callable[[], Any]]:
    """Return fn's results, and a function that computes them again in the same memory. On a machine without graphs, the
    returned function is fn itself."""
    if world.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = fn()
        return results, graph.replay
    results = fn()

    def again() -> None:
        for held, new in zip(results, fn(), strict=True):
            for old, t in zip(held, new, strict=True):
                old.copy_(t)

    return results, again


def plans(world: weft.World, op: str, rng: random.Random) -> dict[str, str | Plan]:
    """Return plans by kind, including "auto"; if a kind has several forms, one of them is drawn. Multicast needs an
    address that maps to all GPUs."""
    plans_by_kind: dict[str, str | Plan] = {"auto": "auto"}
    for kind in REGISTRY[op].kinds:
        forms: list[str | Plan] = [kind]
        if kind == "fused" and op != MOE:
            usual: Any = SMALL_FUSED[op] if world.backend.scale.presets else FUSED[op]
            if op == GATHER:
                forms.append(FusedGatherByCopies(tile=usual.tile))
            else:
                options = {"lag": 3} if isinstance(usual, FusedAllReduce) else {}
                forms.append(replace(usual, forward_programs=2, **options))
        elif kind == "signaled":
            signaled: Any = REGISTRY[op].default(world, Signaled)
            forms += [replace(signaled, groups=(1, 1)), replace(signaled, copies=True)]
        elif kind == "two_shot":
            forms += [TwoShotLowLatency(), TwoShotPush(warps=8, spread=True), TwoShotPull(programs=16)]
        elif kind == "segmented":
            forms += [Segmented(calls=1), Segmented(calls=3)]
        if kind != "multicast":
            plans_by_kind[kind] = rng.choice([form for form in forms if form == kind or REGISTRY[op].has(form)])
    return plans_by_kind


# -- the driver ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """With `only`, run these rounds and write nothing. Otherwise run from round 0 until the given number of calls or of
    seconds is reached. `kind` is the kind of all rounds. If `kind` is "", each round draws a kind according to
    `counts`, the recorded calls, from the kinds in `compiled`, by default from all kinds."""

    seconds: float = 1000
    calls: int = 1_000_000
    only: Sequence[int] = ()
    kind: str = ""
    counts: Mapping[str, int] | None = None
    compiled: Sequence[str] = ()


def run(world: weft.World, out: Path, seed: int, rounds: Rounds, scale: Scale = GPU) -> dict[str, Any]:
    """Return the results that rank 0 writes."""
    return Run(world, out, seed, rounds, scale).run()


class Run:
    """The rounds of a seed from the first to the last, and their results, which rank 0 writes."""

    def __init__(self, world: weft.World, out: Path, seed: int, rounds: Rounds, scale: Scale) -> None:
        self.world, self.out, self.rounds = world, out, rounds
        self.started, self.index, self.counts = time.time(), 0, dict(rounds.counts or {})
        self.fuzz = Fuzz(world, seed, scale, self.counts)
        self.by_name = {str(kind): kind for kind in self.fuzz.kinds}
        if rounds.kind and rounds.kind not in self.by_name:
            raise ValueError(f"no kind {rounds.kind!r}; there are {', '.join(self.by_name)}")
        self.kind = self.by_name.get(rounds.kind)
        self.kinds_of: Counter[str] = Counter()
        self.results: dict[str, Any] = dict(world=world.size, gpus=gpus_of(world), seed=seed, calls=0, wrong=0, largest=0.0, seconds=0.0,
                                            failed=[], drawn_by=self.counts, compiling=0.0)  # fmt: skip

    def run(self) -> dict[str, Any]:
        self.write("not finished")  # results that remain if the run is killed
        try:
            if self.rounds.compiled:
                self.fuzz.kinds = [self.by_name[name] for name in self.rounds.compiled]
            elif self.world.device.type == "cuda" and not self.rounds.only:
                self.compile()
            self.go()
            self.look()
        except Exception as e:
            latest = self.fuzz.described(self.fuzz.draw(self.index, self.kind))
            print(f"ended by {e!r}\nat the latest in {latest}", flush=True)
            self.write(f"rank {self.world.rank}, round {self.index}: {e!r}"[:600])
            raise
        self.write("")
        return self.results

    def compile(self) -> None:
        """Call one kind after another, for at most half of the time. The calls are compared but not counted, and only
        the called kinds are drawn afterwards."""
        self.index, chosen = FIRST, self.kind
        order = [chosen] if chosen else self.fuzz.order()
        compiled = []
        for kind in order:
            self.kind = kind  # error messages name this kind
            self.fuzz.compile(kind)
            compiled.append(kind)
            if len(self.fuzz.pending) >= BATCH:
                self.look()
            if self.over(self.rounds.seconds / 2):
                break
        self.look()
        self.kind, self.fuzz.kinds = chosen, compiled
        self.kinds_of.clear()
        compiling = max(self.world.exchange(time.time() - self.started))
        self.results.update(calls=0, compiling=round(compiling, 1), compiled=[str(kind) for kind in compiled])

    def go(self) -> None:
        """Run all rounds."""
        for index in self.rounds.only or itertools.count():
            self.index = index
            self.fuzz.run(self.fuzz.draw(index, self.kind))
            if len(self.fuzz.pending) >= BATCH:
                self.look()
            if self.rounds.only:
                continue
            if self.results["calls"] + len(self.fuzz.pending) >= self.rounds.calls:
                break
            if index % ROUNDS_A_LOOK == 0 and self.over(self.rounds.seconds):
                break

    def over(self, seconds: float) -> bool:
        """Collectively return whether this number of seconds has passed on any rank."""
        return max(self.world.exchange(time.time() - self.started)) > seconds

    def write(self, ended: str) -> None:
        seconds = time.time() - self.started - self.results["compiling"]
        self.results.update(seconds=round(seconds, 1), ended=ended, kinds=dict(sorted(self.kinds_of.items())))
        if self.world.rank == 0 and not self.rounds.only:
            (self.out / f"fuzz{self.world.size}.json").write_text(json.dumps(self.results, indent=1))

    def look(self) -> None:
        failed = self.results["failed"]
        for r, call, error in self.fuzz.verify():
            self.results["calls"] += 1
            self.kinds_of[str(r.kind)] += 1
            self.results["largest"] = max(self.results["largest"], error) if error < 1e30 else self.results["largest"]
            if error <= 1:
                continue
            self.results["wrong"] += 1
            if len(failed) < NAMED:
                failed.append(f"{error:.3g} x its bound: call {call} of {self.fuzz.described(r)}")
                if self.world.rank == 0:
                    print(f"WRONG by {failed[-1]}", flush=True)
        self.write("not finished")


def counts_in(path: Path, ranks: int) -> dict[str, int]:
    """Return how often each kind was called on `ranks` ranks, summed over all versions in a record (gpu_record.json).
    For a run's results (fuzz<N>.json), return the counts with which the run drew its calls, so that it can be
    repeated."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if "drawn_by" in known:
        return known["drawn_by"]  # type: ignore[no-any-return]
    total: Counter[str] = Counter()
    for version in known.get("fuzz", {}).get("trees", {}).values():
        for place, kinds in version.get("kinds", {}).items():
            if place.startswith(f"{ranks} ranks "):
                total.update(kinds)
    return dict(total)


def compiled_in(path: Path) -> list[str]:
    """Return the kinds that a run compiled, from its results (fuzz<N>.json), or none from a record."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return list(known.get("compiled", ()))


def gpus_of(world: weft.World) -> int:
    """Return the number of GPUs that the ranks use; emulated ranks and CPU processes count as one GPU each."""
    if world.device.type != "cuda":
        return world.size
    return len(set(world.exchange(str(torch.cuda.get_device_properties(world.device).uuid))))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--calls", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, help="default: the time")
    p.add_argument("--only", help="I or I:J: these rounds alone")
    p.add_argument("--kind", default="", help="of all rounds, as a wrong call names it")
    p.add_argument(
        "--record", type=Path, default=RECORD, help="by which kinds are drawn, or a run's results, to draw its kinds"
    )
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    seed_of_rank = int(time.time()) if a.seed is None else a.seed
    drawn_from = counts_in(a.record, world.size), compiled_in(a.record)
    seed, (counts, compiled) = world.exchange((seed_of_rank, drawn_from))[0]
    lo, _, hi = (a.only or "").partition(":")
    only = range(int(lo), int(hi or int(lo) + 1)) if lo else ()
    results = run(world, a.out, seed, Rounds(a.seconds, a.calls, only, a.kind, counts, compiled))
    if world.rank == 0:
        rate = 60 * results["calls"] / results["seconds"]
        outcome = f"{results['calls']} calls, {results['wrong']} wrong, {results['seconds']} s, {rate:.0f} a minute"
        outcome += f", behind {results['compiling']} s in which kernels were compiled"
        on = (
            f"{results['gpus']} GPUs"
            if results["gpus"] == world.size
            else f"{world.size} ranks on {results['gpus']} GPUs"
        )
        print(f"fuzz on {on}, seed {seed}: {outcome}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.exit(1 if results["wrong"] else 0)


if __name__ == "__main__":
    main()
