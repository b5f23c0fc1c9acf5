"""`weft tune` without GPUs: every probe runs on emulated ranks without being timed, a partial file is continued, and
failures are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import OutOfResources
from typer.testing import CliRunner

import weft
from tests.emulated.cases import changed
from tests.emulated.cases_ops import SMALL_FUSED
from tests.offline.test_offline import launches
from weft.check.offline import compile_kernel
from weft.check.ptx import broken_rules
from weft.cli import app
from weft.cost.model import Occupancy
from weft.op import REGISTRY, collectives
from weft.planner import tune
from weft.planner.parts import NotMeasured
from weft.planner.predict import Predictor
from weft.planner.probes import calls, gemms
from weft.planner.probes.common import SIZES, WAVES, Bench, Probe, Sizes
from weft.planner.profile import (
    SEND_TO_NODE,
    Gemm,
    Hardware,
    Latency,
    Profile,
    ProfileError,
    TimedCall,
    Wave,
    identity,
    read,
    shipped,
    write,
)
from weft.planner.search import Planner
from weft.planner.simulate import over_nodes
from weft.planner.tune import measure, probes_of, start_of
from weft.planner.tuner import exchanged
from weft.plans import (
    Decomposed,
    Fused,
    FusedReduceScatter,
    GemmTile,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShotLowLatency,
)
from weft.scale import SMALL_SIGNALED, SMALL_TILE

MACHINE = Hardware("nvidia-h200", 2, "nvlink18", 6, "2.11.0", "3.6.0", "2.28.9")
TINY = Sizes(
    gemms=(((16, 32, 32), (32, 32, 64)), ((32, 64, 32), (64, 32, 32))),
    waves=((1, 3, 32), (2, 3, 64)),
    nbytes=((256, 1024), (512, 4096)),
    gather=(((64, 32, 32),), ((32, 64, 32),)),
    reduce=(((64, 32, 32),), ((32, 64, 32),)),
    ctas=(1, 2),
    moved_bytes=1024,
    concurrent_gemm=(32, 32, 32),
    low_latency_bytes=(512, 2048),
    low_latency_shapes=((8, 32, 64),),
    tiles=(Occupancy(SMALL_TILE),),
    signaled=SMALL_SIGNALED,
)


class Nobody:
    """A timer that runs each function once or a few times, and counts the runs."""

    def __init__(self, world: weft.World) -> None:
        self.world, self.runs = world, 0

    def graph(self, fn: Callable[[], object], calls: int = 1) -> float:
        for _ in range(calls):
            fn()
        self.world.synchronize()
        self.runs += calls
        return float(self.runs)

    def eager(self, fn: Callable[[], object]) -> float:
        return self.graph(fn, 2)

    def together(self, fn: Callable[[], object], transfer: Callable[[Any], object]) -> tuple[float, float]:
        side = self.world.side_stream("tune")
        self.world.wait_event(side, self.world.record(self.world.current_stream()))
        transfer(side)
        fn()
        self.world.synchronize()
        return 1.5, 1.25


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    variants_by_op = {op: (plan, changed(plan, pull_programs=1)) for op, plan in SMALL_FUSED.items()}
    monkeypatch.setattr(calls, "variants", lambda capability=90: variants_by_op)


def empty() -> Profile:
    return Profile(MACHINE, "2026-11-20T00:00:00", "weft tune")


def tuned(
    seconds: float = 1e9, start: Profile | None = None, keep: str = ""
) -> tuple[Profile, list[tuple[int, int, str]], list[Probe]]:
    """Run the probes whose name contains `keep` on two emulated ranks."""
    progress: list[tuple[int, int, str]] = []

    def rank(world: weft.World) -> tuple[Profile, list[Probe]]:
        probes = [p for p in probes_of(Bench(world, Nobody(world), TINY)) if re.search(keep, p.name)]
        return measure(world, start or empty(), seconds, probes, lambda p: None, lambda *x: progress.append(x)), probes

    ((profile, probes), (other_profile, _)) = weft.spmd(rank, 2, backend="emulated", races=False)
    assert identical(profile, other_profile)
    return profile, progress, probes


def identical(a: Profile, b: Profile) -> bool:
    return {identity(row) for row in a.rows()} == {identity(row) for row in b.rows()}


def test_every_probe_runs_and_yields_its_rows() -> None:
    profile, progress, probes = tuned()
    assert not [line for line in progress if line[2].startswith("left out")]
    assert len(progress) == len({frozenset(map(identity, p.rows)) for p in probes}), "each probe must run once"
    assert {identity(row) for p in probes for row in p.rows} == {identity(row) for row in profile.rows()}
    whats = {x.operation for x in profile.latencies}
    assert whats >= {"check", "barrier", "all_gather", "reduce_scatter", "all_reduce", "copy", "local", "sum"}
    kinds = {(r.op, json.loads(r.plan)["kind"], r.mode) for r in profile.calls}
    for op in calls.variants():
        for kind in ("sequential", "decomposed", "fused"):
            assert {(op, kind, "graph"), (op, kind, "eager")} <= kinds
    assert (
        len(profile.gemms) == 4
        and len(profile.waves) == 2
        and {b.operation for b in profile.slowdowns} >= {"copy", "all_reduce"}
    )


def test_every_family_of_plans_has_an_eager_call_of_every_op() -> None:
    """The host's time is that of the op and family, so each family that "auto" may choose is timed."""
    profile, _, probes = tuned(keep="eager")
    families = {op: {Plan.from_json(r.plan).family for r in profile.calls if r.op == op} for op in collectives()}
    assert {r.mode for r in profile.calls} == {"eager"}
    for op, timed in families.items():
        for plan in (Sequential(), Decomposed(), OneShot(), TwoShotLowLatency(), Signaled(), Signaled(copies=True)):
            assert (plan.family in timed) == REGISTRY[op].has(plan), (op, plan)
        assert {type(plan) for plan in calls.variants().get(op, ())} <= {
            type(Plan.from_json(r.plan)) for r in profile.calls if r.op == op
        }
    assert len(probes) == len(families)


def test_eager_calls_of_an_op_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's speed changes within minutes, so that only times of the same rounds can be compared. A plan that is
    unsupported here is left out alone."""
    op, order = "matmul_all_reduce", list[str]()
    plans = [Sequential(), OneShot(), Decomposed()]

    def public(b: Bench, op: str, *shape: int) -> Callable[[Plan], Callable[[], None]]:
        def fn(plan: Plan) -> None:
            if isinstance(plan, Decomposed):
                raise weft.Unsupported("not here")
            order.append(plan.kind)

        return lambda plan: partial(fn, plan)

    monkeypatch.setattr(calls, "_public", public)

    class Timer(Nobody):
        def eager(self, fn: Callable[[], object]) -> float:
            fn()
            return 1.0

    def rank(world: weft.World) -> list[Any]:
        return list(calls.eager_calls_of(Bench(world, Timer(world), TINY), op, plans, 8, 8, 8).run())

    (rows,) = weft.spmd(rank, 1, backend="emulated")
    assert [r.plan for r in rows] == [plan.to_json() for plan in (Sequential(), OneShot())]
    timed_kinds = [set(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert timed_kinds == [{"sequential", "one_shot"}] * (1 + calls.EAGER_ROUNDS)


def test_the_measurements_are_enough_to_plan() -> None:
    profile, _, _ = tuned(keep="GEMM|waves|MiB|KiB|0 KiB|barrier|matmul|all_|reduce|copy|local|sum")
    planner = Planner(Predictor(profile))
    for op in calls.variants():
        decision = planner.decide(op, 64, 32, 32)
        kinds = {"sequential", "decomposed", "fused"} | ({"signaled"} if op != "all_gather_matmul" else set())
        assert {o.plan.kind for o in decision.options} == kinds
    assert {o.plan.kind for o in planner.decide("matmul_all_to_all", 64, 32, 32).options} == {"sequential", "signaled"}


def test_the_real_list_starts_with_the_rows_of_any_prediction() -> None:
    """The list contains the sizes for GPUs, and no probe runs."""

    def rank(world: weft.World) -> list[tuple]:
        bench = Bench.__new__(Bench)
        bench.world, bench.timer, bench.sizes, bench.copies = world, Nobody(world), SIZES, True
        bench.x = bench.w = bench.out = torch.empty(1 << 28, dtype=torch.bfloat16, device="meta")
        bench.full = bench.part = torch.empty(1 << 29, dtype=torch.bfloat16, device="meta")
        return [(p.name, p.rows) for p in probes_of(bench)]

    probes = weft.spmd(rank, 2, backend="emulated", sm_count=132)[0]
    every = [row for _, gives in probes for row in gives]
    first_rows = [row for _, gives in probes[: len(probes) // 4] for row in gives]
    assert {type(r) for r in first_rows} >= {Gemm, Wave, Latency}
    assert {r.operation for r in first_rows if isinstance(r, Latency)} >= {
        "barrier",
        "copy",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
    }
    sizes = {r.nbytes for r in every if isinstance(r, Latency) and r.operation == "all_reduce" and r.ctas == 0}
    assert min(sizes) == 1 << 16 and max(sizes) == 1 << 30
    ordered = sorted(sizes)
    assert all(b <= 2 * a for a, b in zip(ordered, ordered[1:], strict=False)), "successive sizes may at most double"
    assert len({identity(row) for row in every if not isinstance(row, Latency) or row.ctas == 0}) < len(every) + 1
    assert all(r.tiles >= r.programs and r.programs % r.per_sm == 0 for r in every if isinstance(r, Wave))
    for r in every:
        if isinstance(r, TimedCall):
            plan = Plan.from_json(r.plan)
            assert not isinstance(plan, Fused) or r.m % 2 == 0


def test_a_file_is_continued() -> None:
    half, _, _ = tuned(keep="GEMM")
    start = replace(half, gemms=half.gemms[:2])
    again, progress, _ = tuned(start=start, keep="GEMM")
    assert identical(again, half)
    assert [g for g in again.gemms if g in start.gemms] == list(start.gemms), "stored measurements are not repeated"
    assert progress[0][1] == len(progress) == 2


def test_time_is_bounded() -> None:
    profile, progress, _ = tuned(seconds=-1.0, keep="GEMM")
    assert not list(profile.rows()) and progress == [(0, 14, "left out: 14 probes, since -1 s are over")]


def test_a_probe_that_fails_on_one_rank_is_skipped_on_all() -> None:
    messages: list[str] = []

    def rank(world: weft.World) -> Profile:
        def run() -> list[Any]:
            if world.rank == 1:
                raise weft.Unsupported("no such thing here\nand more")
            return [Gemm(1, 1, 1, 5.0)]

        good = Probe("good", (Gemm(2, 2, 2, 1.0),), lambda: [Gemm(2, 2, 2, 6.0)])
        bad = Probe("bad", (Gemm(1, 1, 1, 1.0),), run)
        return measure(world, empty(), 1e9, [bad, good], lambda p: None, lambda i, n, message: messages.append(message))

    profiles = weft.spmd(rank, 2, backend="emulated")
    assert all(p.gemms == (Gemm(2, 2, 2, 6.0),) for p in profiles)
    assert messages == ["bad", "left out: bad: Unsupported: no such thing here", "good"]


def test_a_probe_that_fails_during_an_exchange_is_skipped_on_all() -> None:
    messages: list[str] = []

    def rank(world: weft.World) -> Profile:
        def run(m: float) -> list[Any]:
            if m == 1 and world.rank == 1:
                raise RuntimeError("out of memory")
            return [Gemm(int(m), 1, 1, max(exchanged(world, "time", 5.0) + exchanged(world, "time", m)))]

        probes = [Probe(f"{n}", (Gemm(n, 1, 1, 1.0),), partial(run, float(n))) for n in (1, 2)]
        return measure(world, empty(), 1e9, probes, lambda p: None, lambda i, n, message: messages.append(message))

    profiles = weft.spmd(rank, 3, backend="emulated")
    assert all(p.gemms == (Gemm(2, 1, 1, 5.0),) for p in profiles)
    assert messages == ["1", "left out: 1: RuntimeError: another rank failed", "2"]


def test_the_file_is_saved_on_the_first_rank_only(tmp_path: Path) -> None:
    def rank(world: weft.World) -> None:
        probe = Probe("one", (Gemm(2, 2, 2, 1.0),), lambda: [Gemm(2, 2, 2, 6.0)])
        save = lambda p: write(p, tmp_path / f"{world.rank}.json")  # noqa: E731
        measure(world, empty(), 1e9, [probe], save, lambda *x: None)

    weft.spmd(rank, 2, backend="emulated")
    assert [f.name for f in tmp_path.iterdir()] == ["0.json"]
    assert read(tmp_path / "0.json").gemms == (Gemm(2, 2, 2, 6.0),)


def test_a_file_of_another_machine_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert start_of(MACHINE, path).machine == MACHINE
    write(replace(empty(), machine=replace(MACHINE, gpu="nvidia-h100"), gemms=(Gemm(1, 1, 1, 1.0),)), path)
    with pytest.raises(ProfileError, match="gpu nvidia-h100, here nvidia-h200"):
        start_of(MACHINE, path)
    path.write_text("{")
    with pytest.raises(ProfileError, match="not a usable profile"):
        start_of(MACHINE, path)
    write(replace(empty(), created="2020-01-01", gemms=(Gemm(1, 1, 1, 1.0),)), path)
    continued = start_of(MACHINE, path)
    assert continued.gemms == (Gemm(1, 1, 1, 1.0),) and continued.created == "2020-01-01", (
        "the stored rows keep their date"
    )


def test_again_measures_stored_probes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--again` also replaces a file that cannot be read; without the option, such a file is reported."""
    path = tmp_path / "p.json"
    monkeypatch.setattr(tune, "this_machine", lambda device, size: MACHINE)
    monkeypatch.setattr(tune, "CudaTimer", Nobody)
    probe = Probe("GEMM", (Gemm(64, 64, 64, 1.0),), lambda: [Gemm(64, 64, 64, 7.5)])
    monkeypatch.setattr(tune, "probes_of", lambda bench: [probe])
    monkeypatch.setattr(tune, "Bench", lambda world, timer: None)
    go = lambda again: weft.spmd(lambda w: tune.run(w, 1e9, path, lambda *x: None, again), 2, backend="emulated")  # noqa: E731
    for text in (replace(empty(), created="2020-01-01", gemms=(Gemm(64, 64, 64, 5.0),)).to_json(), "{"):
        path.write_text(text)
        if text == "{":
            with pytest.raises(ProfileError, match="move it away, or `weft tune --again`"):
                go(False)
        else:
            assert go(False)[0] == (str(path), 1, 1) and read(path).gemms[0].us == 5.0
        assert go(True)[1] == (str(path), 1, 1)
        assert read(path).gemms == (Gemm(64, 64, 64, 7.5),) and read(path).created > "2026"


class Gone:
    """A World whose peer has ended."""

    rank, size, asked = 0, 2, 0

    def __init__(self, failing_exchange: int) -> None:
        self.failing_exchange = failing_exchange

    def exchange(self, value: Any) -> list[Any]:
        self.asked += 1
        if self.asked == self.failing_exchange:
            raise weft.Timeout("rank 0: the connection to a rank is lost")
        assert self.asked < self.failing_exchange, "the exchange was called again after it failed"
        return [value, value]


@pytest.mark.parametrize("failing_exchange", [2, 3])
def test_a_rank_that_is_gone_ends_the_run(failing_exchange: int) -> None:
    world: Any = Gone(failing_exchange)

    def run() -> list[Any]:
        world.exchange("time")
        return [Gemm(1, 1, 1, 1.0)]

    with pytest.raises(weft.Timeout, match="is lost"):
        measure(world, empty(), 1e9, [Probe("one", (Gemm(1, 1, 1, 1.0),), run)], lambda p: None, lambda *x: None)


def test_a_probe_that_triton_cannot_launch_is_left_out() -> None:
    messages: list[str] = []

    def rank(world: weft.World) -> Profile:
        def large() -> list[Any]:
            raise OutOfResources(163840, 101376, "shared memory")

        probes = [
            Probe("large", (Gemm(1, 1, 1, 1.0),), large),
            Probe("good", (Gemm(2, 2, 2, 1.0),), lambda: [Gemm(2, 2, 2, 6.0)]),
        ]
        return measure(world, empty(), 1e9, probes, lambda p: None, lambda i, n, message: messages.append(message))

    assert all(p.gemms == (Gemm(2, 2, 2, 6.0),) for p in weft.spmd(rank, 2, backend="emulated"))
    assert "left out: large: OutOfResources: out of resource: shared memory" in messages[1]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="says what happens with too few GPUs")
def test_the_command_reports_that_it_needs_gpus() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 1 and "at least 2 GPUs" in result.output


def test_the_plain_gemm_is_right() -> None:
    """The matmul of compute/gemm.py times the waves."""

    def rank(world: weft.World) -> float:
        probes = Bench.__new__(Bench)
        probes.world, (m, n, k) = world, (48, 64, 64)
        probes.x, probes.w = (torch.randn(size, k).bfloat16() for size in (m, n))
        probes.out = world.empty((m * n,), torch.bfloat16)
        gemms.run_tiles(probes, SMALL_TILE, 5, m, n, k)
        world.finish(world.current_stream())
        expected = probes.x.double() @ probes.w.double().t()
        return ((probes.out.view(m, n).double() - expected).norm() / expected.norm()).item()

    assert weft.spmd(rank, 1, backend="emulated")[0] < 5e-3


@pytest.mark.parametrize(("tile", "per_sm"), WAVES, ids=str)
def test_the_tiles_that_are_timed_compile_without_spills(tile: GemmTile, per_sm: int) -> None:
    """The kernels compile for sm_90a, with the configured number of programs per SM, and use tensor cores."""

    def fn(world: weft.World) -> None:
        probes = Bench.__new__(Bench)
        probes.world = world
        probes.x = probes.w = probes.out = torch.zeros(1 << 20, dtype=torch.bfloat16)
        gemms.run_tiles(probes, tile, 132 * per_sm, 1024, 512, 256)

    ((launch,),) = launches(fn, 1)
    k = compile_kernel(launch.kernel, launch.args, launch.options)
    assert k.spills == 0 and "wgmma.mma_async" in k.ptx and broken_rules(k.ptx) == []
    assert per_sm * (k.shared + 1024) <= 228 << 10
    assert per_sm * k.registers * 32 * tile.warps <= 65536


def test_ranks_that_share_a_gpu_are_not_measured(tmp_path: Path) -> None:
    def main(world: weft.World) -> None:
        world.backend.shares_gpu = True
        with pytest.raises(ProfileError, match="ranks share a GPU"):
            tune.run(world, 1.0, tmp_path / "profile.json", lambda *x: None)

    weft.spmd(main, 2, backend="emulated")


def test_ranks_on_several_nodes_are_not_measured(tmp_path: Path) -> None:
    """Otherwise their profile would be used for one node with as many GPUs."""

    def main(world: weft.World) -> None:
        with pytest.raises(ProfileError, match="or of equal nodes, and of this World its ranks are on 2 nodes, 1 each"):
            tune.run(world, 1.0, tmp_path / "profile.json", lambda *x: None)

    weft.spmd(main, 2, backend="emulated", nodes=2)


def test_over_nodes_alike_the_link_between_is_measured() -> None:
    """The link is added to one node's profile, which then predicts for any number of nodes."""

    def main(world: weft.World) -> Profile:
        probes = list(probes_of(Bench(world, Nobody(world), TINY)))
        start = replace(empty(), machine=replace(MACHINE, world=2, link="nvlink18"))
        return measure(world, start, 1e9, probes, lambda p: None, lambda *x: None)

    profile = weft.spmd(main, 4, backend="emulated", nodes=2, races=False)[0]
    sizes = sorted({size for part in TINY.nbytes for size in part})
    assert sorted((x.operation, x.nbytes) for x in profile.latencies) == [(SEND_TO_NODE, size) for size in sizes]
    assert len(list(profile.rows())) == len(sizes)
    links = [Latency(SEND_TO_NODE, 0, size, 10.0 + size / 40e3) for size in sizes]
    topology = over_nodes(replace(profile, latencies=tuple(links)), 16)
    assert topology.gpus == 32 and topology.levels[1].count == 16
    assert topology.levels[1].gbs == pytest.approx(40.0) and topology.levels[1].latency_us == links[0].us
    with pytest.raises(NotMeasured, match="the link between nodes was not measured"):
        over_nodes(replace(profile, latencies=()), 16)


def test_a_profile_of_plans_with_removed_fields_has_the_plans_of_today() -> None:
    """Otherwise `weft tune` would measure these plans again beside the old rows."""
    call = TimedCall(
        "matmul_reduce_scatter", '{"kind": "fused", "class": "FusedReduceScatter", "batch": 1}', 8, 8, 8, "graph", 1.0
    )
    of_a_machine = shipped("nvidia-h200-x2")
    assert of_a_machine is not None
    (kept,) = Profile.from_json(replace(of_a_machine, calls=(call,)).to_json()).calls
    assert kept.plan == FusedReduceScatter().to_json() != call.plan
