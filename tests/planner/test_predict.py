"""The planner: profiles that keep only valid values, predictions that follow their rules, choices of the plan with the
best prediction, and the fallback of "auto", which is logged.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
import weft.planner
from bench.common import stored
from tests.emulated.cases import changed
from weft.backends.base import Event, StreamWork
from weft.backends.emulated import EmulatedBackend
from weft.cost.decomposed import Chunking, divisions
from weft.cost.fused import Pulling
from weft.cost.model import ITEM, Occupancy, filled
from weft.cost.queues import Step, Work, side_by_side
from weft.cost.signaled import SIGNAL_COST, Moving, Signaling, groupings
from weft.errors import WeftError
from weft.op import REGISTRY
from weft.ops.tiles import with_split_round
from weft.planner import auto as weft_auto
from weft.planner import profile, search, table
from weft.planner.curves import Curve, Smooth
from weft.planner.parts import Gemms, NotMeasured, Tiles
from weft.planner.predict import Predictor
from weft.planner.profile import (
    Gemm,
    Hardware,
    Latency,
    Profile,
    ProfileError,
    Slowdown,
    TimedCall,
    UsedCtas,
    Wave,
    identity,
    nearest_machine,
)
from weft.planner.search import Planner, candidates
from weft.planner.simulate import Level, ScaledPredictor, Topology, cluster, nvlink, pcie, simulate_from
from weft.plans import (
    Decomposed,
    Fused,
    FusedAllReduce,
    FusedGather,
    FusedGatherByCopies,
    FusedReduceScatter,
    GemmTile,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoLevel,
    TwoShotLowLatency,
    TwoShotPush,
    partition,
)
from weft.scale import SMALL_TILE
from weft.timing import CallTime
from weft.transport.order import group_steps
from weft.transport.signals import schedule

MACHINE = Hardware("nvidia-h200", 8, "nvlink18", 132, "2.11.0", "3.6.0", "2.28.9")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SIZES = [1 << i for i in range(16, 31)]
NARROW = GemmTile(block_n=128, warps=4)
VARIANT = FusedGather(tile=NARROW, per_sm=2, pull_programs=16)
VARIANTS: dict[str, Fused] = {
    "all_gather_matmul": VARIANT,
    "matmul_reduce_scatter": FusedReduceScatter(pull_programs=16),
    "matmul_all_reduce": FusedAllReduce(pull_programs=16),
}
COPIED = FusedGatherByCopies()
REACHED = Pulling(fixed=15.0, rate=180.0, drain=330.0, slow=1.08)


def gemm_us(m: int, n: int, k: int) -> float:
    """Return the time of a GEMM on a GPU with 132 SMs whose GEMM library uses 128 x 256 tiles."""
    return 4 + math.ceil(math.ceil(m / 128) * math.ceil(n / 256) / 132) * (1.5 + 0.0112 * k)


def moved_us(operation: str, nbytes: int, ctas: int = 0) -> float:
    return 14 + nbytes / {0: 320e3, 4: 150e3, 8: 290e3, 16: 315e3}[ctas] * (2 if operation == "all_reduce" else 1)


def made_up_profile(ran: Sequence[TimedCall] = (), machine: Hardware = MACHINE) -> Profile:
    """Return a profile of a machine that follows simple laws."""
    grid = itertools.product((64, 256, 1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096, 8192), (1024, 4096, 8192))
    waves = [
        Wave(128, bn, 64, warps, 3, per_sm, 132 * per_sm, tiles * per_sm, k, 6 + math.ceil(tiles / 132) * (1.5 + 0.0114 * k))
        for bn, warps, per_sm in ((256, 8, 1), (128, 4, 2)) for tiles in (132, 264, 528, 1056) for k in (1024, 4096, 8192)
    ]  # fmt: skip
    latencies = [Latency(w, c, s, moved_us(w, s, c)) for w in COLLECTIVES for c in (0, 4, 8, 16) for s in SIZES]
    latencies += [Latency("copy", 0, s, 6 + s / 376e3) for s in SIZES]
    latencies += [Latency("local", 0, s, 2 + s / 1.7e6) for s in SIZES]
    latencies += [Latency("sum", 0, s, 5 + s / 0.4e6) for s in SIZES]
    latencies += [Latency("barrier", 0, 0, 8.0), Latency("check", 0, 0, 100.0)]
    slowdowns = [Slowdown("copy", 0, 1.1, 1.05), *(Slowdown(w, c, 1.06, 1.1) for w in COLLECTIVES for c in (4, 8, 16))]
    return Profile(
        machine, "2026-11-20T00:00:00", "made up", tuple(Gemm(m, n, k, gemm_us(m, n, k)) for m, n, k in grid),
        tuple(waves), tuple(latencies), tuple(slowdowns), (), tuple(ran),
    )  # fmt: skip


def with_fused() -> Profile:
    """Return the profile with calls of one fused plan, whose times follow from REACHED."""
    p, rows = Predictor(made_up_profile()), []
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for m, n, k in (
            (8192, 4096, 1536),
            (8192, 8192, 4096),
            (2048, 8192, 4096),
            (4096, 4096, 4096),
            (16384, 2048, 4096),
        ):
            rows.append(
                TimedCall(
                    op,
                    VARIANTS[op].to_json(),
                    m,
                    n,
                    k,
                    "graph",
                    fused_us(p, op, VARIANTS[op], (m, n, k), REACHED),
                )
            )
    return made_up_profile(rows)


def fused_us(p: Predictor, op: str, plan: Fused, size: tuple[int, int, int], pull: Pulling) -> float:
    """Return a fused plan's time in us for a call, whose pull programs follow `pull`."""
    return p.cost(op, plan).us(p, REGISTRY[op].gemm_call(*size), plan, pull)


# -- profiles --------------------------------------------------------------------------------------------------------
def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    p = with_fused() + [UsedCtas("all_reduce", 8, 1 << 26, 8)]
    profile.write(p, tmp_path / "deep" / "p.json")
    again = profile.read(tmp_path / "deep" / "p.json")
    assert again == p and again.digest == p.digest
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["p.json"]  # no incomplete file is left
    assert (p + [Gemm(1, 1, 1, 5.0)]).digest != p.digest


def test_a_measurement_replaces_the_one_of_the_same_thing() -> None:
    p = made_up_profile()
    again = p + [replace(p.gemms[3], us=1.0), replace(p.latencies[5], us=2.0), Slowdown("copy", 0, 3.0, 4.0)]
    assert len(list(again.rows())) == len(list(p.rows()))
    assert again.gemms[3].us == 1.0 and again.latencies[5].us == 2.0
    assert Slowdown("copy", 0, 3.0, 4.0) in again.slowdowns
    assert len({identity(row) for row in p.rows()}) == len(list(p.rows()))


def wrong(op: str, plan: Plan, *size: int, mode: str = "graph") -> TimedCall:
    return TimedCall(op, plan.to_json(), *size, mode, 10.0)


WRONG: dict[str, tuple[Any, str]] = {  # rows with the right types that no probe measures
    "a GEMM of no rows": (Gemm(0, 64, 64, 10.0), "m = 0"),
    "a negative size": (Gemm(64, -5, 64, 10.0), "n = -5"),
    "waves of no program": (Wave(128, 256, 64, 8, 3, 1, 0, 132, 1024, 10.0), "programs = 0"),
    "more CTAs than SMs": (Latency("all_reduce", 132, 1 << 20, 10.0), "leave one of 132 SMs"),
    "a call of no K": (wrong("matmul_all_reduce", Sequential(), 64, 64, 0), "k = 0"),
    "an op of another version": (wrong("matmul_broadcast", Sequential(), 64, 64, 64), "of no op and mode"),
    "another way to launch": (wrong("matmul_all_reduce", Sequential(), 64, 64, 64, mode="fast"), "of no op and mode"),
    "a plan of another op": (wrong("matmul_all_reduce", FusedGather(), 64, 64, 64), "FusedGather() is not one of"),
    "a field of another op": (wrong("matmul_all_reduce", Signaled(copies=True), 64, 64, 64), "copies means nothing"),
    "a plan of too many CTAs": (wrong("matmul_all_reduce", Signaled(ctas=200), 64, 64, 64), "leaves nothing of 132"),
    "a plan of too many programs": (
        wrong("all_gather_matmul", FusedGather(pull_programs=132), 64, 64, 64),
        "leaves nothing of 132",
    ),
}


def broken() -> dict[str, tuple[str, str]]:
    text = made_up_profile().to_json()
    data = json.loads(text)
    gemm_row = json.dumps(data["gemms"][0])

    def row(new: str) -> str:
        assert gemm_row in text
        return text.replace(gemm_row, new, 1)

    without = {k: v for k, v in data.items() if k != "waves"}
    return {
        "empty": ("", "Expecting value"),
        "cut off": (text[: len(text) // 2], "not a usable profile"),
        "a list": ("[]", "not a usable profile"),
        "an older format": (text.replace('"format": 3', '"format": 2'), "format is 2"),
        "a section is missing": (json.dumps(without), "lacks 'waves'"),
        "a row too short": (row("[64, 1024, 1024]"), "is no Gemm"),
        "text for a number": (row('[64, 1024, 1024, "fast"]'), "'fast'"),
        "a time of nothing": (row("[64, 1024, 1024, 0.0]"), "us = 0.0"),
        "a negative time": (row("[64, 1024, 1024, -3.0]"), "us = -3.0"),
        "no number": (row("[64, 1024, 1024, NaN]"), "us = nan"),
        "a size that is none": (row("[64.5, 1024, 1024, 3.0]"), "m = 64.5"),
        "a plan of another version": (
            (
                made_up_profile()
                + [TimedCall("matmul_reduce_scatter", '{"kind": "signaled", "once": 1}', 8, 8, 8, "graph", 1.0)]
            ).to_json(),
            "'once'",
        ),
        "a machine without SMs": (text.replace('"sms": 132', '"ms": 132'), "lacks 'sms'"),
        "not text": ("\ud800", ""),
        **{defect: ((made_up_profile() + [bad]).to_json(), says) for defect, (bad, says) in WRONG.items()},
        "a row twice": (
            replace(made_up_profile(), gemms=(*made_up_profile().gemms, made_up_profile().gemms[0])).to_json(),
            "appears twice",
        ),
        "no SMs": (made_up_profile(machine=replace(MACHINE, sms=0)).to_json(), "sms = 0"),
        "no ranks": (made_up_profile(machine=replace(MACHINE, world=0)).to_json(), "world = 0"),
    }


def test_a_cached_profile_of_old_plans_is_refused(tmp_path: Path) -> None:
    once = '{"kind": "two_shot", "post": true, "programs": 0, "rows": 1, "warps": 16}'
    row = TimedCall("matmul_all_reduce", once, 8192, 4096, 4096, "graph", 500.0)
    path = tmp_path / "p.json"
    path.write_text((made_up_profile() + [row]).to_json().replace('"format": 3', '"format": 2'))
    with pytest.raises(ProfileError) as e:
        profile.read(path)
    says = "not a usable profile: its format is 2, this weft reads 3; move it away, or `weft tune --again`"
    assert str(e.value) == f"{path}: {says}"


@pytest.mark.parametrize("defect", broken())
def test_a_file_that_is_no_profile_is_named(defect: str, tmp_path: Path) -> None:
    text, says = broken()[defect]
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ProfileError) as e:
        profile.read(path)
    assert str(path) in str(e.value) and says in str(e.value)


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(ProfileError, match="nowhere.json"):
        profile.read(Path("nowhere.json"))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(profile, "cache_path", lambda machine: tmp_path / f"{machine.name}.json")
    monkeypatch.setattr(profile, "shipped", lambda name: None)
    return tmp_path / "nvidia-h200-x8.json"


def test_an_unreadable_directory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(profile, "cache_path", lambda machine: Path("/root/p.json"))
    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ProfileError, match="/root/p.json: .*Permission denied"):
        profile.find(MACHINE)


def test_the_machines_own_profile_is_found(cache: Path) -> None:
    assert profile.find(MACHINE) is None
    profile.write(made_up_profile(), cache)
    assert profile.find(MACHINE) == made_up_profile()


@pytest.mark.parametrize("changed", [{"link": "pcie"}, {"torch": "2.12.0"}, {"world": 4}, {"sms": 114}])
def test_a_profile_of_another_machine_is_refused(cache: Path, changed: dict[str, Any]) -> None:
    profile.write(made_up_profile(machine=replace(MACHINE, **changed)), cache)
    with pytest.raises(ProfileError, match="another machine") as e:
        profile.find(MACHINE)
    ((name, value),) = changed.items()
    assert f"{name} {value}, here {getattr(MACHINE, name)}" in str(e.value)


def test_a_shipped_profile_serves_other_versions_but_no_other_links(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "shipped", {"nvidia-h200-x8": made_up_profile()}.get)
    assert profile.find(replace(MACHINE, torch="2.12.0")) == made_up_profile()
    assert profile.find(replace(MACHINE, link="pcie")) is None
    assert profile.find(replace(MACHINE, world=4)) is None


def test_the_cache_keeps_machines_apart() -> None:
    pytest.importorskip("platformdirs")
    others = [
        replace(MACHINE, **{n: v}) for n, v in (("world", 4), ("link", "pcie"), ("torch", "2.12.0"), ("nccl", "3"))
    ]
    paths = {profile.cache_path(m) for m in [MACHINE, *others]}
    assert len(paths) == 5 and all(p is not None and p.parent.parent.name == "weft" for p in paths)


@pytest.mark.parametrize(
    ("links", "fails", "says"),
    [(18, False, "nvlink18"), (0, False, "pcie"), (18, True, "unknown"), (None, False, "unknown")],
)
def test_the_kind_of_link_is_asked_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, links: int | None, fails: bool, says: str
) -> None:
    class Nvml:
        nvmlInit_v2 = nvmlShutdown = staticmethod(lambda: 0)

        def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
            assert uuid == b"GPU-1234"
            return int(fails)

        def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, state: Any) -> int:
            state._obj.value = 1
            return 0 if link < (links or 0) else 2

    def load(name: str) -> Nvml:
        if links is None:
            raise OSError(f"{name}: no such file")
        return Nvml()

    monkeypatch.setattr(profile.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "1234"}))
    assert profile._link(torch.device("cuda", 0), 8) == says
    assert profile._link(torch.device("cuda", 0), 1) == "none"


def test_shipped_profiles_can_be_used() -> None:
    for path in (Path(profile.__file__).parent / "profiles").glob("*.json"):
        p = profile.shipped(path.stem)
        assert p is not None and p.machine.name == path.stem and p.source.startswith("weft tune")
        assert Planner(Predictor(p)).decide("matmul_reduce_scatter", 8192, 4096, 1376).sequential


# -- interpolation ---------------------------------------------------------------------------------------------------
def test_a_curve_passes_through_measurements_and_keeps_latency() -> None:
    c = Curve([(1 << 20, 20.0), (1 << 16, 12.0), (1 << 22, 50.0)])
    assert [c(1 << 16), c(1 << 20), c(1 << 22)] == [12.0, 20.0, 50.0]
    assert c(1) == 12.0  # the latency, and not zero bytes divided by the bandwidth
    assert c(3 << 19) == pytest.approx(25.0)
    assert c(1 << 24) == pytest.approx(50 + 12 * (1 << 20) * 30 / (3 << 20))
    assert Curve([(0, 7.0)])(1 << 30) == 7.0
    assert Curve([(1 << 16, 12.0), (1 << 20, 10.0)])(1 << 30) == 10.0  # a falling curve does not fall further


@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8)), min_size=3, max_size=20, unique=True), st.data())
@settings(max_examples=50, deadline=None)
def test_local_passes_near_its_points_and_stays_within_them(points: list[tuple[float, float]], data: Any) -> None:
    plane = [0.3 * x - 0.2 * y for x, y in points]
    f = Smooth(points, plane)
    x, y = data.draw(st.tuples(st.floats(-2, 10), st.floats(-2, 10)))
    assert min(plane) - 1e-9 <= f(x, y) <= max(plane) + 1e-9
    for p, v in zip(points, plane, strict=True):
        assert abs(f(*p) - v) < 0.25


@pytest.mark.parametrize(
    ("tiles", "programs", "per_sm", "waves"),
    [
        (132, 132, 1, 1),
        (133, 132, 1, 2),
        (264, 132, 1, 2),
        (1, 132, 1, 1),
        (264 + 100, 264, 2, 1.5),
        (264 + 133, 264, 2, 2),
        (100, 264, 2, 0.5),
    ],
)
def test_waves_are_whole_or_half_where_two_programs_share_an_sm(
    tiles: int, programs: int, per_sm: int, waves: float
) -> None:
    assert filled(tiles, programs, per_sm, 0) == waves


def test_gemm_times_pass_through_measured_ones_and_go_on_sensibly() -> None:
    g = Gemms(made_up_profile().gemms, 132)
    for known in made_up_profile().gemms[::5]:
        assert g(known.m, known.n, known.k) == known.us
    sizes = [8, 64, 1024, 8192, 65536]
    assert all(g(a, 4096, 4096) <= 1.02 * g(b, 4096, 4096) for a, b in itertools.pairwise(sizes))
    assert all(g(4096, a, 4096) <= 1.02 * g(4096, b, 4096) for a, b in itertools.pairwise(sizes))
    assert all(g(4096, 4096, a) <= 1.02 * g(4096, 4096, b) for a, b in itertools.pairwise(sizes))
    with pytest.raises(NotMeasured):
        Gemms(made_up_profile().gemms[:3], 132)


def test_gemm_times_respect_waves() -> None:
    """Each measured GEMM is predicted from all others, with far smaller errors than by interpolation without tiles."""
    times: dict[tuple[int, int, int], list[float]] = {}
    for r in stored.rows("nvidia-h200-x8"):
        if r.gemm and r.call.mode == "graph":
            times.setdefault(r.shape, []).append(r.gemm)
    known = [Gemm(*shape, statistics.fmean(us)) for shape, us in times.items()]
    with_waves, without = [], []
    for g in known:
        rest = [x for x in known if x is not g]
        plain = Smooth([[math.log2(v) for v in (x.m, x.n, x.k)] for x in rest], [math.log(x.us) for x in rest])
        with_waves.append(abs(Gemms(rest, 132)(g.m, g.n, g.k) / g.us - 1))
        without.append(abs(math.exp(plain(*(math.log2(v) for v in (g.m, g.n, g.k)))) / g.us - 1))
    assert len(known) > 20 and statistics.fmean(with_waves) < min(0.05, statistics.fmean(without) / 2)


def test_tiles_recover_the_law_of_their_waves() -> None:
    t = Tiles([w for w in made_up_profile().waves if w.per_sm == 1])
    for tiles, k in ((264, 2048), (792, 6144), (400, 4096)):
        assert t(tiles, 132, 1, k) == pytest.approx(6 + math.ceil(tiles / 132) * (1.5 + 0.0114 * k), rel=0.03)


# -- the models ------------------------------------------------------------------------------------------------------
def test_sequential_is_the_sum_of_its_parts() -> None:
    p = Predictor(made_up_profile())
    assert p.time("all_gather_matmul", Sequential(), 8192, 4096, 4096) == pytest.approx(
        gemm_us(8192, 4096, 4096) + moved_us("all_gather", 8192 * 4096 * 2)
    )
    assert p.time("matmul_all_reduce", Sequential(), 8192, 4096, 1024) == pytest.approx(
        gemm_us(8192, 4096, 1024) + moved_us("all_reduce", 8192 * 4096 * 2)
    )


def steps_of(p: Predictor, op: str, plan: Plan, m: int, n: int, k: int) -> list[Step]:
    """Return the start and end of each step of a call."""
    return p.cost(op, plan).steps(p, REGISTRY[op].gemm_call(m, n, k), plan, p.parameters(op, plan))


def test_signaled_follows_the_accumulate_rule() -> None:
    """The test computes the expected time independently, group by group."""
    m, n, k = 8192, 8192, 4096
    p, plan = Predictor(made_up_profile()), Signaled(groups=(2, 3, 5, 7), ctas=8)
    tiles, programs = 64 * 32, 132 - 8
    waves = math.ceil(tiles / programs)
    assert waves == 17
    alone = p.tiles(Occupancy(plan.tile), programs, tiles, m, n, k) / waves
    signaling, gemm = p.parameters("matmul_all_reduce", plan), alone * (2 + 15 * 1.06)
    assert isinstance(signaling, Signaling)
    done, gemm_end = -signaling.gap, 0.0
    ends = [0, 192, 576, 1152, tiles]  # 248, 620 and 1240, rounded down to whole groups of 3 rows of 32 tiles
    for i, g in enumerate((2, 3, 5, 7)):
        gemm_end += g * alone * (1.06 if i else 1.0)
        count = ends[i + 1] - ends[i]
        us = moved_us("all_reduce", count * 128 * 256 * 2, 8)
        begin = max(gemm_end + signaling.signal, done + signaling.gap)
        under = min(max(gemm - begin, 0.0), us * 1.1)  # the transfer is slower while the GEMM runs
        done = begin + under + us - under / 1.1
    assert p.time("matmul_all_reduce", plan, m, n, k) == pytest.approx(done)
    steps = steps_of(p, "matmul_all_reduce", plan, m, n, k)
    for queue in ("gemm", "comm"):
        queue_steps = [s for s in steps if s.queue == queue]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(queue_steps)), (
            "a queue runs one operation at a time"
        )


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("shape", [(8192, 8192, 64), (1000, 520, 64), (100, 4096, 64)])
def test_groups_are_those_of_the_ops_schedule(op: str, shape: tuple[int, int, int]) -> None:
    p, plan = Predictor(made_up_profile()), Signaled(ctas=8)
    part = p.signaled_parts(op, plan, *shape)
    m, n, _ = shape
    owners = 8 if op == "matmul_reduce_scatter" else 1
    tiles = owners * math.ceil(math.ceil(m / owners) / 128) * math.ceil(n / 256)
    rows = max(1, min(8, 124 // math.ceil(n / 256)))  # rows of tiles in a group, which an in-place sum does not split
    unit = 1 if op == "matmul_reduce_scatter" else rows * math.ceil(n / 256)
    for groups in ((1,) * part.waves, (), (2, 3)):
        made_there = schedule(tiles, 124, groups, owners, unit)
        assert part.tiles == tiles and sorted({0, *part.ends(groups)}) == list(made_there.bounds)


def test_fewer_sms_for_the_gemm_mean_more_waves() -> None:
    p = Predictor(made_up_profile())
    few_ctas, many_ctas = (p.signaled_parts("matmul_all_reduce", Signaled(ctas=c), 8192, 8192, 4096) for c in (4, 16))
    assert (few_ctas.waves, many_ctas.waves) == (16, 18) and few_ctas.tiles == many_ctas.tiles


@pytest.mark.parametrize(
    ("groups", "waves", "means"),
    [
        ((2, 3), 5, (2, 3)),
        ((2, 3), 9, (2, 7)),
        ((2, 3, 4), 4, (2, 2)),
        ((), 10, (3, 3, 3, 1)),
        ((), 1, (1,)),
        ((), 3, (1, 1, 1)),
    ],
)
def test_groups_of_other_gemms_still_mean_something(
    groups: tuple[int, ...], waves: int, means: tuple[int, ...]
) -> None:
    assert partition(groups, waves) == means


def test_all_to_all_waits_for_the_busiest_rank() -> None:
    p = Predictor(made_up_profile())
    for plan in (Sequential(), Signaled()):
        even, uneven = (p.time("matmul_all_to_all", plan, 8192, 4096, 2048, received=r) for r in (None, 16384))
        assert uneven > even
        assert p.time("matmul_all_to_all", plan, 8192, 4096, 2048, received=100) == even


def test_decomposed_chunks_wait_for_their_shards() -> None:
    p = Predictor(made_up_profile())
    for groups in ((1,) * 8, (1, 1, 2, 4), (8,)):
        steps = steps_of(p, "all_gather_matmul", Decomposed(groups), 8192, 4096, 8192)
        gemms = [s for s in steps if s.name.startswith("gemm")]
        copies = [s for s in steps if s.name == "copy"]
        assert len(gemms) == len(groups) and len(copies) == len(groups) - (groups[0] == 1)
        for g, c in zip(gemms[groups[0] == 1 :], copies, strict=True):
            assert g.start >= c.end - 1e-9
        assert sum(g.end - g.start for g in gemms) >= sum(gemm_us(g * 1024, 4096, 8192) for g in groups) * 0.99
        for passes in (1, 2):
            pushed = steps_of(p, "matmul_reduce_scatter", Decomposed(groups, passes), 8192, 8192, 4096)
            times = passes if groups == (1,) * 8 else 1
            assert [s.name for s in pushed].count("sum") == times and pushed[-1].name == "sum"
            assert [s.name for s in pushed if s.name.startswith("gemm")] == [
                f"gemm {i}" for i in range(len(groups))
            ] * times
            for queue in ("gemm", "comm", "sum"):
                queue_steps = [s for s in pushed if s.queue == queue]
                assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(queue_steps)), (
                    "a queue runs one operation at a time"
                )


def test_a_copy_engine_pulls_whole_shards() -> None:
    """If links are slow, the last shard determines the end: the shard arrives, and then the wave of its rows runs."""
    plan, pull = COPIED, Pulling(fixed=10.0, slow=1.0)
    m, n, k = 8192, 4096, 4096
    size = m // 8 * k * 2
    p = Predictor(made_up_profile() + [Latency("copy", 0, s, s / 20e3) for s in SIZES])
    gemm, staged = p.tiles(Occupancy(plan.tile), 131, 64 * 16, m, n, k), 2 + size / 1.7e6
    all_staged = staged + 8.0 + p.chunking.gap
    slow = fused_us(p, "all_gather_matmul", plan, (m, n, k), pull)
    assert slow == pytest.approx(10 + all_staged + 7 * size / 20e3 + gemm / 8, rel=1e-3)
    p = Predictor(made_up_profile() + [Latency("copy", 0, s, s / 1e6) for s in SIZES])
    assert fused_us(p, "all_gather_matmul", plan, (m, n, k), pull) == pytest.approx(10 + staged + gemm, rel=0.01)
    p = Predictor(made_up_profile() + [TimedCall("all_gather_matmul", q.to_json(), m, n, k, "graph", 900.0) for q in (plan, FusedGather())])  # fmt: skip
    for even in (True, False):
        fused = [q for q in candidates(p, "all_gather_matmul", m, n, k, even) if isinstance(q, Fused)]
        assert set(fused) == ({plan, FusedGather()} if even else {FusedGather()})


def test_only_the_tiles_of_the_last_wave_are_pulled_after_the_gemm() -> None:
    p, k, drain = Predictor(made_up_profile()), 4096, 100.0
    plan = FusedReduceScatter()
    pull = Pulling(fixed=0.0, rate=1e6, drain=drain, slow=1.0)  # nothing else slows down the pull programs
    for columns in (17, 32):  # a row of tiles for each of 8 ranks: 136 tiles, 4 in a second wave; 256 tiles, 124 in it
        tiles, n = 8 * columns, plan.tile.block_n * columns
        gemm = with_split_round(p.tiles(Occupancy(plan.tile), p.sms, tiles, 1024, n, k), tiles, p.sms)
        after = fused_us(p, "matmul_reduce_scatter", plan, (1024, n, k), pull) - gemm
        assert after == pytest.approx(7 * 128 * n * 2 * (tiles - p.sms) / tiles / (drain * 1e3), rel=1e-6)


def test_an_all_gather_waits_for_whole_waves() -> None:
    """Tiles that wait for a shard occupy their programs: after the shard's arrival, the GEMM needs as many waves as
    these tiles have."""
    plan, pull = COPIED, Pulling(fixed=10.0, slow=1.0)
    p = Predictor(made_up_profile())
    n, k = 4096, 8192
    us = lambda m: fused_us(p, "all_gather_matmul", plan, (m, n, k), pull)  # noqa: E731
    all_staged = 2 + 8.0 + p.chunking.gap
    wave = 1.5 + 0.0114 * k
    # 128 tiles form one wave, which waits for the last shard; 256 tiles form two waves, the first of which waits for
    # the third
    assert us(1024) == pytest.approx(
        10 + all_staged + 128 * k * 2 / 1.7e6 + 7 * (6 + 128 * k * 2 / 376e3) + wave, rel=0.1
    )
    assert us(2048) == pytest.approx(
        10 + all_staged + 256 * k * 2 / 1.7e6 + 3 * (6 + 256 * k * 2 / 376e3) + 2 * wave, rel=0.1
    )


def test_side_by_side_both_are_slowed_until_the_shorter_ends() -> None:
    while_copying = Slowdown("copy", 0, 2.0, 1.5)
    ends = lambda *works, slowdown=while_copying: [s.end for s in side_by_side(works, slowdown)]  # noqa: E731
    assert ends(Work("gemm", "", 100.0)) == [100.0]
    # the copy lasts 60, during which the GEMM does 30 of its work
    assert ends(Work("gemm", "", 100.0), Work("comm", "", 40.0)) == pytest.approx([130.0, 60.0])
    assert Predictor(made_up_profile()).slowdown("all_gather", 0) == Slowdown("all_gather", 0, 1.0, 1.0)  # not measured


def test_gemms_on_two_streams_share_the_sms() -> None:
    """Two GEMMs of equal length then end at the time at which the second one would end on a single stream."""
    alone = Slowdown("copy", 0, 1.0, 1.0)
    gemm_1, gemm_2, gemm_3 = Work("gemm", "", 30.0), Work("gemm 2", "", 30.0), Work("gemm", "", 10.0)
    copy = Work("comm", "", 5.0, gemm_1)
    steps = side_by_side([gemm_1, gemm_2, gemm_3, copy], alone)
    assert [(s.start, s.end) for s in steps] == [(0, 60), (0, 60), (60, 70), (60, 65)]
    late = Work("gemm 2", "", 30.0, Work("comm", "", 20.0))
    steps = side_by_side([Work("gemm", "", 40.0), late.after, late], alone)
    assert [s.end for s in steps] == [60, 20, 70]  # the first runs alone for 20, then both run at half speed


def test_the_cost_of_decomposed_calls_is_fitted_to_them() -> None:
    """On this machine, copies are faster in a call than in a chain of copies."""
    predictor = Predictor(made_up_profile())
    predictor.chunking = Chunking(copy=0.8)
    shapes = ((8192, 2048, 4096), (8192, 8192, 2048), (2048, 4096, 8192), (1024, 4096, 8192), (16384, 2048, 2048))
    calls = [
        TimedCall(op, plan.to_json(), *s, "graph", predictor.model(op, plan, *s))
        for op in ("all_gather_matmul", "matmul_reduce_scatter") for plan in (Decomposed(), Decomposed((1, 1, 2, 4))) for s in shapes
    ]  # fmt: skip
    assert Predictor(made_up_profile(calls)).chunking.copy == pytest.approx(0.8, rel=0.05)
    assert Predictor(made_up_profile()).chunking == Chunking()


def test_one_group_by_copies_takes_the_sum_of_its_steps() -> None:
    op = "matmul_all_to_all"
    p, plan, (m, n, k) = Predictor(made_up_profile()), Signaled(ctas=4, copies=True, groups=(99,)), (8192, 4096, 2048)
    part, barrier = m * n * 2 * 7 / 8, p.latency("barrier") + Moving().gap
    expected = (
        p.tiles(Occupancy(plan.tile), 128, 64 * 16, m, n, k)
        + SIGNAL_COST
        + 2 * barrier
        + p.latency("copy", part) * Moving().copy
    )
    assert p.model(op, plan, m, n, k) == pytest.approx(expected)
    several = steps_of(p, op, replace(plan, groups=(2, 2, 2, 2)), m, n, k)
    gemms = [s for s in several if s.name.startswith("group")]
    assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(gemms)), "the GEMMs must follow one another"
    for gemm, copy in zip(gemms, [s for s in several if s.name == "copy"], strict=True):
        assert copy.start >= gemm.end + barrier - 1e-9, "a copy must wait until every rank has the group"


def test_the_cost_of_copied_groups_is_fitted_to_their_calls() -> None:
    op = "matmul_all_to_all"
    predictor, kind = Predictor(made_up_profile()), Signaled(ctas=4, copies=True)
    predictor._parameters[op, kind.family] = Moving(gap=20.0)
    shapes = ((8192, 2048, 4096), (8192, 8192, 2048), (2048, 4096, 8192), (1024, 4096, 2048), (16384, 2048, 2048))
    plans = (kind, replace(kind, groups=(1,) * 16))
    calls = [TimedCall(op, q.to_json(), *s, "graph", predictor.model(op, q, *s)) for q in plans for s in shapes]
    moving = Predictor(made_up_profile(calls)).parameters(op, kind)
    assert isinstance(moving, Moving) and moving.gap == pytest.approx(20.0, rel=0.1)
    assert Predictor(made_up_profile()).parameters(op, kind) == Moving()


def test_a_fused_variant_is_fitted_to_its_calls() -> None:
    p = Predictor(with_fused())
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        pull = p.parameters(op, VARIANTS[op])
        assert isinstance(pull, Pulling) and pull.slow == pytest.approx(REACHED.slow, rel=0.05)
        for m, n, k in ((8192, 4096, 2048), (4096, 8192, 4096), (16384, 4096, 2048)):
            expected = fused_us(Predictor(made_up_profile()), op, VARIANTS[op], (m, n, k), REACHED)
            assert p.time(op, VARIANTS[op], m, n, k) == pytest.approx(expected, rel=0.05)
    with pytest.raises(NotMeasured, match="no call of matmul_all_reduce"):
        p.time("matmul_all_reduce", FusedAllReduce(pull_programs=77), 8192, 4096, 2048)


def test_measured_calls_correct_predictions_near_them() -> None:
    plan, shape = Sequential().to_json(), (8192, 4096, 4096)
    bare = Predictor(made_up_profile()).time("matmul_all_reduce", Sequential(), *shape)
    p = Predictor(made_up_profile([TimedCall("matmul_all_reduce", plan, *shape, "graph", bare * 1.2)]))
    assert p.time("matmul_all_reduce", Sequential(), *shape) == pytest.approx(bare * 1.2, rel=0.01)
    far = (64, 1024, 1024)
    assert p.time("matmul_all_reduce", Sequential(), *far) < 1.12 * p.model("matmul_all_reduce", Sequential(), *far)


def test_a_slow_host_chooses_other_plans_for_eager_calls() -> None:
    """With 12 us per launch in the profile instead of 2 us, eager calls have fewer parts or run sequentially; calls in
    graphs do not change."""
    op, shapes = "all_gather_matmul", [(8192, 2816, 1024), (8192, 4096, 1024)]
    fast, slow = (Planner(Predictor(made_up_profile() + [Latency("launch", 0, 0, us)])) for us in (2.0, 12.0))
    for shape in shapes:
        assert fast.decide(op, *shape, "graph").plan == slow.decide(op, *shape, "graph").plan
        plans = [planner.decide(op, *shape, "eager").plan for planner in (fast, slow)]
        assert isinstance(plans[0], Decomposed)
        many_operations, few_operations = (operations(fast.predictor, op, plan) for plan in plans)
        assert many_operations > few_operations
    assert plans[1] != plans[0] and slow.decide(op, *shapes[0], "eager").plan == Sequential()


def test_fused_plans_take_the_time_of_their_tiles() -> None:
    """Tiles span shards. So 4,224 rows are 33 tiles although each of 4 shards has 8.25, and take a time between those
    of 32 and of 36 tiles. On 132 SMs, 18 x 21 tiles are 3 waves, although shards of 4.5 tiles, each tiled separately,
    would be 4 waves, as 20 x 21 tiles are, of which the last is split into halves."""
    known = profile.shipped("nvidia-h200-x4")
    assert known is not None
    p = Predictor(known)
    for plan in (FusedGather(), FusedGatherByCopies()):
        us = [p.time("all_gather_matmul", plan, m, 14336, 8192) for m in (4096, 4224, 4608)]
        assert us == sorted(set(us)), (plan, us)
    part, whole = (p.time("matmul_reduce_scatter", FusedReduceScatter(), m, 5376, 5376) for m in (2304, 2560))
    assert part < 0.88 * whole


def operations(predictor: Predictor, op: str, plan: Plan) -> int:
    return predictor.cost(op, plan).operations(plan, predictor.world)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_operations_of_plans_are_those_that_a_known_call_gives_to_streams(op: str) -> None:
    """A sequence is one operation, because known calls launch it as one graph."""
    plans: list[Plan] = [Decomposed(), Decomposed((1, 1, 2)), Decomposed((2, 2))]
    if op == "all_gather_matmul":
        plans.append(FusedGatherByCopies(tile=SMALL_TILE))
    if op == "matmul_reduce_scatter":
        by_copies = Signaled(copies=True, ctas=1, tile=SMALL_TILE)
        plans += [Decomposed((1,) * 4, 2), by_copies, replace(by_copies, groups=(1, 1, 1))]
    predictor = Predictor(replace(made_up_profile(), machine=replace(MACHINE, world=4)))

    def main(world: weft.World) -> list[int]:
        backend: Any = world.backend
        seen: list[str] = []
        for name in "launch copy signal linear all_reduce call wait_event".split():
            counts = name not in ("call", "wait_event")

            def stub(*args: Any, counts: bool = counts, name: str = name, **kwargs: Any) -> object:
                seen.extend([name] if counts else [])
                return kwargs.get("out", args[-1])  # `linear` returns its output

            setattr(backend, name, stub)

        class Graph(StreamWork):
            def __call__(self) -> list[Event]:
                launched = len(seen)
                events = super().__call__()
                seen[launched:] = ["graph"]
                return events

        backend.sequence = lambda stream, work: lambda: Graph(backend, stream, work)
        x, w = torch.zeros(16 if op == "all_gather_matmul" else 64, 64), torch.zeros(64, 64)
        operation_counts = []
        for plan in plans:
            seen.clear()
            getattr(weft, op)(x.bfloat16(), w.bfloat16(), world=world, plan=plan)
            operation_counts.append(len(seen))
        return operation_counts

    for counts in weft.spmd(main, 4, backend="emulated"):
        assert counts == [operations(predictor, op, plan) for plan in plans]


def test_the_hosts_present_speed_counts() -> None:
    """The speed of the host during profiling does not affect the prediction, and a measured bound of the host's time is
    scaled."""
    op, plan, shape = "matmul_all_reduce", Decomposed(), (128, 256, 256)
    known = made_up_profile([TimedCall(op, plan.to_json(), *shape, "eager", 300.0)]) + [Latency("launch", 0, 0, 4.0)]
    as_profiled, on_slower_host = Predictor(known), Predictor(known, launch=8.0)
    assert as_profiled.time(op, plan, *shape, "eager") == pytest.approx(300.0)
    assert on_slower_host.time(op, plan, *shape, "eager") == pytest.approx(600.0)
    many_us = Predictor(made_up_profile(), launch=50.0).time(op, plan, *shape, "eager")
    assert many_us == 50.0 * operations(as_profiled, op, plan)


def test_ranks_take_the_slowest_host() -> None:
    assert weft_auto.host_time([3.1, 7.0, None]) == 8.0 == weft_auto.host_time([6.0])
    assert weft_auto.host_time([3.1, 10.0], profiled=11.0) == 11.0, (
        "a host as fast as the profile's must change nothing"
    )
    assert weft_auto.host_time([None, None]) is None
    assert weft_auto.time_launch(torch.device("cpu")) is None


def test_eager_calls_take_the_hosts_time_at_least() -> None:
    plan = Sequential().to_json()
    p = Predictor(made_up_profile([
        TimedCall("matmul_all_reduce", plan, 128, 256, 256, "eager", 300.0),
        TimedCall("matmul_all_reduce", plan, 8192, 4096, 4096, "graph", 980.0),
    ]))  # fmt: skip
    assert p.time("matmul_all_reduce", Sequential(), 128, 256, 256, "eager") == pytest.approx(300.0)
    assert p.time("matmul_all_reduce", Sequential(), 8192, 4096, 4096, "eager") == pytest.approx(980.0, rel=0.01)


def test_missing_measurements_are_named() -> None:
    p = Predictor(replace(made_up_profile(), latencies=()))
    with pytest.raises(NotMeasured, match="all_reduce was not measured on nvidia-h200-x8"):
        p.time("matmul_all_reduce", Sequential(), 8192, 4096, 4096)
    with pytest.raises(NotMeasured, match="with 12 CTAs"):
        Predictor(made_up_profile()).time("matmul_all_reduce", Signaled(ctas=12), 8192, 4096, 4096)
    with pytest.raises(NotMeasured, match="no waves"):
        Predictor(replace(made_up_profile(), waves=())).time("matmul_all_reduce", Signaled(), 8192, 4096, 4096)
    with pytest.raises(ValueError, match="none of 132 SMs"):
        Predictor(made_up_profile()).time("matmul_all_reduce", Signaled(ctas=132), 8192, 4096, 4096)


# -- the search ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 4, 8])
def test_divisions_are_all_that_the_op_accepts(size: int) -> None:
    all_divisions = set(divisions(size))
    for count in range(2, size + 1):
        for groups in itertools.product((1, 2, 4, 8), repeat=count):
            try:
                group_steps(Decomposed(groups), size)
                assert groups in all_divisions
            except ValueError:
                assert groups not in all_divisions


@pytest.mark.parametrize("size", [3, 6, 16, 32, 128])
def test_divisions_of_other_worlds_are_valid(size: int) -> None:
    assert divisions(size)
    for groups in divisions(size):
        group_steps(Decomposed(groups), size)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
@pytest.mark.parametrize("shape", [(4096, 4096, 8192), (4096, 8192, 1024), (8192, 4096, 1536), (2048, 8192, 16384)])
def test_groupings_hold_the_best_of_all_partitions(op: str, shape: tuple[int, int, int]) -> None:
    p, plan = Predictor(made_up_profile()), Signaled(ctas=8)
    waves = p.signaled_parts(op, plan, *shape).waves
    assert 3 < waves < 12
    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, waves)))
        for size in range(waves) for cuts in itertools.combinations(range(1, waves), size)
    ]  # fmt: skip
    us = lambda groups: p.time(op, replace(plan, groups=groups), *shape)  # noqa: E731
    candidates = groupings(p.signaled_parts(op, plan, *shape))
    assert all(sum(g) == waves and min(g) > 0 for g in candidates)
    assert min(map(us, candidates)) == pytest.approx(min(map(us, every)))


def test_groupings_of_many_waves_are_not_many_groups_too_coarse() -> None:
    p, plan = Predictor(made_up_profile()), Signaled(ctas=8)
    shape = (65536, 8192, 2048)
    waves = p.signaled_parts("matmul_all_reduce", plan, *shape).waves
    best = min(
        p.time("matmul_all_reduce", replace(plan, groups=g), *shape)
        for g in groupings(p.signaled_parts("matmul_all_reduce", plan, *shape))
    )
    equal = min(
        p.time("matmul_all_reduce", replace(plan, groups=partition((g,) * waves, waves)), *shape)
        for g in (1, 2, 4, 8, 16, 32)
    )
    assert best <= equal


SHAPES = [(op, m, n, k) for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce") for m in (512, 8192, 32768) for n, k in ((4096, 1376), (8192, 3584), (7168, 8192))]  # fmt: skip


def steps_of_python(count: int = 100_000) -> int:
    total = 0
    for i in range(count):
        total += i * i % 7
    return total


def test_a_decision_takes_as_long_as_170_thousand_steps_of_python() -> None:
    """The counted steps need about 10 ms on an idle core. The test counts steps, because another thread on the core
    would slow down the clock."""
    profile = with_fused() + [TimedCall(op, changed(VARIANTS[op], pull_programs=p).to_json(), *shape, "graph", 900.0) for op, *_ in SHAPES[::9] for p in range(17, 21) for shape in ((8192, 4096, 4096), (2048, 8192, 4096))]  # fmt: skip
    took: list[tuple[float, float]] = []
    for _ in range(5):  # each planner is new and has stored no decision
        planner = Planner(Predictor(profile))
        planner.decide("matmul_all_reduce", 1024, 1024, 1024)
        for shape in SHAPES:
            times = [time.process_time()]
            decision = planner.decide(*shape)
            times.append(time.process_time())
            steps_of_python()
            times.append(time.process_time())
            took.append((times[1] - times[0], times[2] - times[1]))
            assert len(decision.options) > 25
    decision_took, steps_took = map(statistics.median, zip(*took, strict=True))
    assert decision_took < 1.7 * steps_took, took
    start = time.process_time()
    assert planner.decide(*SHAPES[0]) is planner.decide(*SHAPES[0])
    assert time.process_time() - start < 0.001


@given(
    st.sampled_from(["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"]),
    st.integers(1, 1 << 16), st.integers(1, 1 << 14), st.integers(1, 1 << 14), st.sampled_from(["graph", "eager"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_nothing_slower_than_sequential_is_chosen(op: str, m: int, n: int, k: int, mode: str) -> None:
    planner = _shared_planner()
    d = planner.decide(op, m, n, k, mode, m % 8 == 0)
    assert d.us is not None and d.sequential is not None
    assert isinstance(d.plan, Sequential) or d.us * table.GAIN < d.sequential
    assert d.us == min(o.us for o in d.options) or isinstance(d.plan, Sequential)
    if n % 8 or k % 8:
        assert d.plan.kind != "fused"
    if k % 8:
        assert d.plan.kind != "signaled"
    if m % 8:
        assert d.plan.kind != "decomposed"


_PLANNER: list[Planner] = []


def _shared_planner() -> Planner:
    if not _PLANNER:
        _PLANNER.append(Planner(Predictor(with_fused())))
    return _PLANNER[0]


def test_serving_decides_for_the_nearest_of_few_token_counts() -> None:
    planner = Planner(Predictor(with_fused()))
    decided: list[int] = []
    inner = planner.decide
    planner.decide = lambda op, m, *a, **options: (decided.append(m), inner(op, m, *a, **options))[1]  # type: ignore[assignment, func-returns-value]
    for m in range(1, 8193):
        planner.nearest("matmul_all_reduce", m, 8192, 3584, "graph")
    for m, near in zip(range(1, 8193), decided, strict=True):
        assert 0 <= near - m <= max(m / 16, 8) and (m % 8 or near % 8 == 0)
        if m >= 128 and m & (m - 1) == 0:
            assert near == m
    assert len(set(decided)) < 350


def just_over() -> list[tuple[str, int, int, int]]:
    """Return shapes that need an extra wave: their rows fill a few tiles and a small part of one more."""
    ops = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    return [
        (op, tiles * 128 + rows, n, k)
        for op in ops for tiles in (5, 9, 13, 17, 18, 25, 33) for rows in (4, 7) for n, k in ((2560, 8192), (8192, 7168))
    ]  # fmt: skip


def test_another_ms_plan_is_chosen_only_if_it_is_faster_here() -> None:
    planner = Planner(Predictor(profile.shipped("nvidia-h200-x4")))  # type: ignore[arg-type]
    p, kept = planner.predictor, 0
    for op, m, n, k in just_over():
        plan = planner.nearest(op, m, n, k, "graph")
        kept += not isinstance(plan, Sequential)
        if not isinstance(plan, Sequential):
            assert p.time(op, plan, m, n, k) * table.GAIN < p.time(op, Sequential(), m, n, k), (op, m, n, k, plan)
    assert kept > len(just_over()) / 2
    planner.decide = lambda *a, **options: replace(p_slow, op=a[0])  # type: ignore[assignment]
    p_slow = search.Decision("", 1, 1, 1, 4, "graph", Decomposed((1,) * 4), "")
    assert planner.nearest("matmul_all_reduce", 33, 256, 256, "graph") == Sequential(), "the plan is slower at this M"


def few_rows() -> Profile:
    """Return measurements in which one shot is fastest up to 2 MiB, and two shots above. All-gathers and
    reduce-scatters behave alike, and sizes above 8 MiB were not measured."""
    sizes = [1 << i for i in range(16, 24)]
    rows = [
        Latency(f"one_shot {operation}", 0, s, 3 + s / 3e5)
        for operation in ("all_gather", "reduce_scatter")
        for s in sizes
    ]
    rows += [Latency("one_shot all_reduce", 0, s, 3 + s / 2e5) for s in sizes]
    rows += [Latency("two_shot all_reduce", 0, s, 8 + s / 4e5) for s in sizes]
    return made_up_profile() + rows


def test_posted_rows_are_predicted_where_they_were_measured() -> None:
    p = Predictor(few_rows())
    for op, nbytes in (("all_gather_matmul", 128 * 8192 * 2), ("matmul_reduce_scatter", 128 * 4096 * 2)):
        expected = p.gemm(128, 4096, 8192) + 3 + nbytes / 3e5
        assert p.time(op, OneShot(), 128, 4096, 8192) == pytest.approx(expected)
        with pytest.raises(NotMeasured):
            p.time(op, TwoShotLowLatency(), 128, 4096, 8192)
        assert [q for q in candidates(p, op, 128, 4096, 8192) if q.kind in ("one_shot", "two_shot")] == [OneShot()]
        assert not [q for q in candidates(p, op, 4, 4096, 8192) if q.kind == "one_shot"], (
            "there are fewer rows than ranks"
        )
        assert not [q for q in candidates(p, op, 2048, 4096, 8192) if q.kind == "one_shot"], (
            "the size exceeds the measured ones"
        )
    planner = Planner(p)
    assert planner.decide("matmul_all_reduce", 128, 4096, 8192).plan == OneShot()
    assert planner.decide("matmul_all_reduce", 512, 4096, 8192).plan == TwoShotLowLatency()
    assert planner.decide("matmul_all_reduce", 64, 4096, 8192).us == pytest.approx(
        p.gemm(64, 4096, 8192) + 3 + 64 * 4096 * 2 / 2e5
    )
    for plan in (TwoShotPush(), OneShot(programs=3)):
        with pytest.raises(NotMeasured):
            p.time("matmul_all_reduce", plan, 128, 4096, 8192)


def test_a_sum_alone_is_chosen_by_measurements(find_returns: Callable[[Any], None]) -> None:
    find_returns(few_rows())
    sizes = [1 << 16, 1 << 20, 6 << 20, 16 << 20]  # an element has 2 bytes
    plans = [auto(Stub(), "all_reduce", (1, nbytes // 2, 1)) for nbytes in sizes]
    assert plans == [OneShot(), OneShot(), TwoShotLowLatency(), Sequential()]
    find_returns(made_up_profile())
    assert auto(Stub(), "all_reduce", (1, 1 << 16, 1)) == Sequential()
    find_returns(replace(made_up_profile(), latencies=()))
    assert auto(Stub(), "all_reduce", (1, 1 << 16, 1)) == Sequential()


def test_tiles_of_few_rows_take_as_long_as_the_weight_is_read() -> None:
    """The time to read memory does not depend on a wave of tiles: no plan's GEMM reads the weight in less time than
    cuBLAS."""
    p = Predictor(made_up_profile() + [Gemm(64, 65536, 8192, 400.0), Gemm(16, 32768, 8192, 210.0)])
    rate = min(g.us / (g.m * g.k + g.n * g.k + g.m * g.n) for g in p.profile.gemms)
    two, (m, n, k) = Occupancy(NARROW, 2), (16, 32768, 8192)
    assert p.tiles(two, 264, 256, m, n, k) == 210 > p._tiles_us(two, 264, 256, k)
    p = Predictor(
        made_up_profile() + [Gemm(64, 65536, 8192, 400.0), Gemm(16, 32768, 8192, 900.0)]
    )  # rows without measurements of memory bandwidth
    assert p.tiles(two, 264, 256, m, n, k) == pytest.approx(rate * (m * k + n * k + m * n))
    wide = (8192, 4096, 4096)
    assert p.tiles(two, 264, 2048, *wide) == p._tiles_us(two, 264, 2048, wide[2])


def test_host_bound_calls_do_not_measure_the_gpu() -> None:
    shape, rows = (128, 4096, 8192), few_rows()
    op, plan = "matmul_reduce_scatter", OneShot()
    small = [TimedCall(op, plan.to_json(), 256, 256, 256, mode, us) for mode, us in (("graph", 6.0), ("eager", 50.0))]
    p = Predictor(rows + small)
    assert p.time(op, plan, *shape, "eager") == p.time(op, plan, *shape) > 50
    assert p.time(op, plan, 8, 256, 256, "eager") == 50 > p.time(op, plan, 8, 256, 256)


# The host's us for a small call (4 H200, 2026-11).
HOST_US = {
    "all_gather_matmul": {Sequential(): 68.4, FusedGather(): 33.9, OneShot(): 82.6, Decomposed(): 247.0},
    "matmul_reduce_scatter": {
        Sequential(): 145.0,
        FusedReduceScatter(): 91.6,
        OneShot(): 109.9,
        Decomposed(): 582.3,
        Signaled(groups=(1,)): 255.7,
    },
    "matmul_all_reduce": {
        Sequential(): 154.3,
        FusedAllReduce(): 96.5,
        OneShot(): 120.6,
        TwoShotLowLatency(): 128.9,
        Signaled(groups=(1,)): 243.8,
    },
}


def with_host_times(factor: float = 1.0) -> profile.Profile:
    """Return the shipped profile with HOST_US, multiplied by `factor`, instead of its own eager calls."""
    known = profile.shipped("nvidia-h200-x4")
    assert known is not None
    eager = [
        TimedCall(op, plan.to_json(), 512, 256, 256, "eager", us * factor)
        for op, times in HOST_US.items()
        for plan, us in times.items()
    ]
    return replace(known, calls=(*(r for r in known.calls if r.mode == "graph"), *eager))


def test_the_hosts_time_is_that_of_the_op_and_kind() -> None:
    p = Predictor(with_host_times() + [Latency("launch", 0, 0, 10.0)])
    for op, times in HOST_US.items():
        assert {plan: p.host(op, plan) for plan in times} == times
    op, copied = "all_gather_matmul", FusedGatherByCopies()
    assert p.host(op, FusedGather(pull_programs=12, split=4)) == 33.9, (
        "all variants of a class need as much of the host"
    )
    assert p.host(op, copied) == 33.9 + 10 * 2, "the host also submits a staging copy and a graph"
    scatter, by_copies = "matmul_reduce_scatter", Signaled(groups=(1,) * 16, copies=True)
    assert p.host(scatter, by_copies) == HOST_US[scatter][Signaled(groups=(1,))], "one graph moves all groups"
    further = operations(p, "matmul_all_reduce", Decomposed()) - operations(p, op, Decomposed())
    assert p.host("matmul_all_reduce", Decomposed()) == 247.0 + 10 * further, "without a call of this op, another's"
    assert p.host("matmul_reduce_scatter", Decomposed((2, 2))) == 582.3, "fewer operations subtract nothing"


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_a_plan_that_needs_less_of_the_host_wins_where_the_host_bounds(factor: float) -> None:
    """The first two calls chose sequential, at 0.71x of cuBLAS and NCCL (4 H200, 2026-11)."""
    planner = Planner(Predictor(with_host_times(factor)))
    for op, shape in (("matmul_reduce_scatter", (192, 8192, 7168)), ("matmul_all_reduce", (128, 4096, 3584))):
        decision = planner.decide(op, *shape, "eager")
        assert isinstance(decision.plan, Fused | OneShot | TwoShotLowLatency)
        assert planner.predictor.host(op, decision.plan) < planner.predictor.host(op, Sequential())
    gather = planner.decide("all_gather_matmul", 128, 14336, 8192, "eager").plan
    assert gather != OneShot() or factor < 1, "one shot needs more of the host than sequential"


def test_plans_compete_on_the_present_host_and_on_a_slower_one() -> None:
    sequential = CallTime(100.0, 60.0)
    assert search.wins(CallTime(90.0, 40.0), sequential, "eager")
    assert search.wins(CallTime(99.0, 40.0), sequential, "eager"), "faster on a slow host, and never slower"
    assert not search.wins(CallTime(99.0, 40.0), sequential, "graph")
    assert not search.wins(CallTime(101.0, 40.0), sequential, "eager"), "slower on a fast host"
    assert not search.wins(CallTime(80.0, 90.0), sequential, "eager"), "slower on a slow host"
    assert search.wins(CallTime(80.0, 90.0), sequential, "graph")


def test_copies_are_for_rows_that_they_can_move() -> None:
    """M must be divisible into shards of whole tiles, but the M of the grid point used for the prediction need not
    be."""
    plan = Signaled(ctas=4, copies=True)
    ran = [
        TimedCall("matmul_reduce_scatter", plan.to_json(), *shape, "graph", 30.0)
        for shape in ((1024, 4096, 1024), (2048, 4096, 2048))
    ]
    planner = Planner(Predictor(made_up_profile(ran)))
    size = planner.predictor.world
    shape = (128 * size, 4096, 1024)
    assert isinstance(planner.nearest("matmul_reduce_scatter", *shape, "graph"), Signaled)
    assert planner.nearest("matmul_reduce_scatter", *shape, "graph").copies  # type: ignore[attr-defined]
    for rows_over in (2, size):
        nearest_plan = planner.nearest("matmul_reduce_scatter", shape[0] + rows_over, *shape[1:], "graph")
        assert not (isinstance(nearest_plan, Signaled) and nearest_plan.copies)


def test_a_decision_prints_itself() -> None:
    d = _shared_planner().decide("matmul_all_reduce", 8192, 8192, 3584)
    lines = str(d).splitlines()
    assert lines[0].startswith("matmul_all_reduce, M 8192, N 8192, K 3584, 8 GPUs, in a CUDA graph: ")
    assert search.brief(d.plan) in lines[0] and "made up" in lines[1]
    for kind in ("sequential", "decomposed", "fused", "signaled"):
        assert any(kind in line and " us " in line for line in lines[2:])
    assert sum(line.startswith("  >") for line in lines) == 1


# -- weft.explain(..) and auto ------------------------------------------------------------------------------------------
def test_the_plan_package_is_a_function_too() -> None:
    assert weft.plans.Plan is Plan and weft.plans.Fused is Fused
    d = weft.explain("matmul_reduce_scatter", 5000, 4096, 1376, profile=with_fused())
    assert d == weft.explain("matmul_reduce_scatter", 5000, 4096, 1376, profile=with_fused())
    assert "predicted" in d.why
    with pytest.raises(ValueError, match="not 'matmul'"):
        weft.explain("matmul", 1, 1, 1, profile=made_up_profile())
    with pytest.raises(ValueError, match="mode"):
        weft.explain("matmul_all_reduce", 1, 1, 1, mode="fast", profile=made_up_profile())
    with pytest.raises(ValueError, match="M 0, N 1 and K 1"):
        weft.explain("matmul_all_reduce", 0, 1, 1, profile=made_up_profile())
    with pytest.raises(ProfileError, match="nor a profile that ships with weft: nvidia-h200-x2"):
        weft.explain("matmul_all_reduce", 1, 1, 1, profile="nvidia-h200-x3")
    with pytest.raises(ProfileError, match="not of 4 GPUs"):
        weft.explain("matmul_all_reduce", 1, 1, 1, world=4, profile=made_up_profile())
    with pytest.raises(AttributeError, match="nothing"):
        weft.plans.nothing  # noqa: B018


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_explain_shows_the_plan_of_auto(find_returns: Callable[[Any], None], mode: str) -> None:
    """The shapes include sizes served by the plan of a larger M, shapes in the table, and shapes for which no plan is
    faster."""
    known = profile.shipped("nvidia-h200-x4")
    find_returns(known)
    world, near = Stub(), 0
    world.size = 4
    measured = [(r.op, r.m, r.n, r.k) for r in table.load("nvidia-h200") if r.world == 4 and r.mode == mode][:9]
    for op, *shape in (*just_over(), *measured):
        shown = weft.explain(op, *shape, mode=mode, profile=known)
        assert shown.plan == auto(world, op, tuple(shape), mode == "graph"), (op, shape)
        assert shown.us is not None or shown.why.startswith("measured")  # the profile may lack a measured plan
        assert [o.us for o in shown.options] == sorted(o.us for o in shown.options)
        near += "as for M " in shown.why
    assert near == len(just_over())
    with pytest.raises(TypeError, match="M 8192.5, N 4096 and K 1024 must be ints"):
        weft.explain("matmul_all_reduce", 8192.5, 4096, 1024, profile=known)  # type: ignore[arg-type]


def test_explain_predicts_with_the_launch_time_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    known = made_up_profile() + [Latency("launch", 0, 0, 10.0)]
    monkeypatch.setattr(weft_auto, "_planners", {})
    for explained, measured in ((10.0, 40.0), (40.0, 20.0), (20.0, 80.0)):
        assert weft_auto.planner_of(known).predictor.launch == explained
        assert weft_auto.planner_of(known, measured).predictor.launch == measured


def test_a_measured_row_comes_before_the_prediction() -> None:
    row = next(r for r in table.load("nvidia-h200") if r.world == 8 and r.speedup > 1.1)
    d = weft.explain(row.op, row.m, row.n, row.k, mode=row.mode, profile=with_fused())
    assert d.plan == row.plan and "measured" in d.why


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_a_profile_must_be_named() -> None:
    with pytest.raises(ProfileError, match="no GPU here"):
        weft.explain("matmul_all_reduce", 8192, 4096, 1024)


class Stub:
    """The part of a World that the choice uses."""

    size, sm_count, device, rank = 8, 132, torch.device("cpu"), 3

    def __init__(
        self, backend: str = "cuda", exchange: Callable[..., list[Any]] = lambda v, title="": [v] * 8, limits: bool = True,
        shares: bool = False,
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.backend = type("Backend", (), {"name": backend, "limits_ctas": limits, "shares_gpu": shares})
        self.messages: list[str] = []
        self.kept: dict[Any, Any] = {}

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def log_once(self, message: str) -> None:
        if message not in self.messages:
            self.messages.append(message)

    def check_same_on_all_ranks(self, title: str) -> None:
        assert title == 'the first call with plan="auto"'


def auto(
    world: Stub, op: str = "matmul_all_reduce", shape: tuple[int, int, int] = (8192, 5120, 3072), capturing: bool = True
) -> Plan:
    return weft_auto.auto(op, world, *shape, "graph" if capturing else "eager")  # type: ignore[arg-type]


@pytest.fixture
def find_returns(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return the result of `find` on a machine of 8 H200s."""
    monkeypatch.setattr(table, "gpu_model", lambda device: "nvidia-h200")
    monkeypatch.setattr(weft_auto, "this_machine", lambda device, world: MACHINE)
    monkeypatch.setattr(weft_auto, "time_check", lambda device: 101.0)

    def finds(result: Any) -> None:
        def find(machine: Hardware) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(weft_auto, "find", find)

    return finds


def test_auto_asks_the_table_then_the_profile(find_returns: Callable[[Any], None]) -> None:
    find_returns(with_fused())
    world = Stub()
    row = next(r for r in table.load("nvidia-h200") if r.world == 8 and r.mode == "graph" and r.speedup > 1.1)
    assert auto(world, row.op, (row.m, row.n, row.k)) == row.plan
    shape = (8192, 5120, 3072)
    assert auto(world) == _shared_planner().decide("matmul_all_reduce", *shape).plan
    assert not world.messages
    find_returns(None)
    assert auto(Stub()) == Sequential(), "until its plans are timed, the op runs sequentially"
    find_returns(with_fused())
    assert auto(Stub("emulated")) == Sequential()


def test_ranks_that_share_a_gpu_decide_as_on_the_nearest_machine(
    find_returns: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that share a GPU use the nearest machine's profile without timing anything, and rows for their GPU model or
    for another model with rows; `explain` names the machine."""
    find_returns(None)  # `find` is not called
    monkeypatch.setattr(weft_auto, "time_launch", lambda device: pytest.fail("timed"))
    monkeypatch.setattr(weft_auto, "time_check", lambda device: pytest.fail("timed"))
    monkeypatch.setattr(weft_auto, "nearest_machine", lambda machine: with_fused())
    shape = (8192, 5120, 3072)
    assert auto(Stub(shares=True)) == _shared_planner().decide("matmul_all_reduce", *shape).plan
    monkeypatch.setattr(table, "gpu_model", lambda device: "nvidia-h100")
    row = next(r for r in table.load("nvidia-h200") if r.world == 8 and r.mode == "graph" and r.speedup > 1.1)
    assert auto(Stub(shares=True), row.op, (row.m, row.n, row.k)) == row.plan
    monkeypatch.setattr(weft_auto, "nearest_machine", lambda machine: None)
    assert auto(Stub(shares=True)) == auto(Stub()) == Sequential()
    assert auto(Stub(shares=True), row.op, (row.m, row.n, row.k)) == row.plan
    assert auto(Stub(), row.op, (row.m, row.n, row.k)) == Sequential(), "ranks with a GPU each do not use these rows"


def test_the_nearest_machine_has_as_many_gpus() -> None:
    h100 = replace(MACHINE, gpu="nvidia-h100", world=4, link="network")
    nearest = nearest_machine(h100)
    assert nearest is not None and nearest.machine.name == "nvidia-h200-x4"
    assert nearest_machine(replace(h100, world=3)) is None


def test_explain_reports_that_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: weft.World) -> str:
        world.backend.shares_gpu = True
        return weft.explain("matmul_all_reduce", 8192, 5120, 3072, world=world, profile="nvidia-h200-x2").why

    assert weft.spmd(main, 2, backend="emulated")[0].startswith("ranks that share a GPU decide as on nvidia-h200-x2: ")


def test_explain_reports_that_ranks_on_several_nodes_run_the_sequential_plan() -> None:
    """On a single node the ranks would overlap communication."""

    def main(world: weft.World, reason: str | None) -> tuple[Plan, str]:
        world.multi_node_unsupported = reason
        explanation = weft.explain("matmul_all_reduce", 8192, 5120, 3072, world=world, profile="nvidia-h200-x2")
        return explanation.plan, explanation.why

    assert weft.spmd(main, 2, backend="emulated", args=(None,))[0][0] != Sequential()
    plan, why = weft.spmd(main, 2, backend="emulated", args=("its ranks are on 2 nodes, 1 each",))[0]
    assert plan == Sequential() and "its ranks are on 2 nodes, 1 each" in why


def test_times_of_graphs_decide_eager_calls_without_their_own() -> None:
    """The times in graphs determine the plan until somebody measures the shape eagerly."""
    key = "nvidia-h200", "all_reduce_rms_norm", 2, 16, 8192, 1
    taken = table.exact(*key, "graph")
    assert isinstance(taken, OneShot) and table.exact(*key, "eager") == taken
    table.learn([table.Measured(*key[1:], "eager", OneShot(), 0.9)])
    assert table.exact(*key, "eager") == Sequential() and table.exact(*key, "graph") == taken


def test_a_measured_loser_stays_sequential(find_returns: Callable[[Any], None]) -> None:
    find_returns(with_fused())
    table.learn([table.Measured("matmul_all_reduce", 8, 8192, 5120, 3080, "graph", FusedAllReduce(), 0.9)])
    assert auto(Stub(), shape=(8192, 5120, 3080)) == Sequential()


def test_an_unusable_profile_makes_auto_sequential(find_returns: Callable[[Any], None]) -> None:
    find_returns(ProfileError("p.json: not a usable profile: cut off"))
    world = Stub()
    assert auto(world) == Sequential() and auto(world, "all_gather_matmul") == Sequential()
    assert len(world.messages) == 1 and "p.json: not a usable profile: cut off" in world.messages[0]


def test_a_profile_that_breaks_the_planner_makes_auto_sequential(
    find_returns: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_returns(made_up_profile() + [Gemm(3, 3, 3, 3.0)])  # a profile that no other test uses
    monkeypatch.setattr(weft_auto, "Predictor", lambda profile, launch: 1 / 0)
    world = Stub()
    assert auto(world) == Sequential()
    assert len(world.messages) == 1 and "ZeroDivisionError" in world.messages[0]
    find_returns(replace(made_up_profile(), gemms=()))
    monkeypatch.setattr(weft_auto, "Predictor", Predictor)
    assert auto(world := Stub()) == Sequential() and "sequential: 0 GEMMs measured" in " ".join(world.messages)


def test_ranks_meet_at_the_profile_before_they_can_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured table contains one rank's shape; the other rank's shape is missing, empty, or belongs to another op.
    All ranks raise Mismatch."""
    known = profile.shipped("nvidia-h200-x2")
    assert known is not None
    monkeypatch.setattr(EmulatedBackend, "name", "cuda")
    monkeypatch.setattr(table, "gpu_model", lambda device: "nvidia-h200")
    monkeypatch.setattr(weft_auto, "_is_measured", lambda device: True)
    monkeypatch.setattr(weft_auto, "this_machine", lambda device, world: known.machine)
    monkeypatch.setattr(weft_auto, "find", lambda machine: known)
    monkeypatch.setattr(weft_auto, "self_check", lambda profile, device: None)
    rows = [r for r in table.load("nvidia-h200") if (r.world, r.op, r.mode) == (2, "matmul_all_reduce", "eager")]
    m, n, k = min((r.m, r.n, r.k) for r in rows)

    def call(world: weft.World, rows: int, plan: Any = "auto") -> str:
        x, w = torch.empty(rows, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
        with pytest.raises(weft.Mismatch) as e:
            weft.matmul_all_reduce(x, w, world=world, plan=plan)
        return str(e.value)

    for rank_1 in (dict(rows=m + 2), dict(rows=0), dict(rows=m, plan="sequential")):
        errors = weft.spmd(
            lambda world, changed=rank_1: call(world, **(changed if world.rank else dict(rows=m))),
            2, backend="emulated", sm_count=132,
        )  # fmt: skip
        assert all("rank 0: " in s and "rank 1: " in s for s in errors)


def test_worlds_share_a_planner(find_returns: Callable[[Any], None]) -> None:
    find_returns(made_up_profile())
    a, b = Stub(), Stub()
    auto(a), auto(b)
    assert a.kept["planner"] is b.kept["planner"]


def test_a_world_without_a_limit_of_ctas_has_no_two_level_plan(find_returns: Callable[[Any], None]) -> None:
    find_returns(made_up_profile())
    limited, shapes = Signaled(ctas=8), [(8190, 5120, 3072), (8190, 8192, 3584)]  # uneven rows: no plan is decomposed
    assert all(isinstance(auto(Stub(), shape=s), Signaled) for s in shapes)
    table.learn([table.Measured("matmul_all_reduce", 8, 8192, 5120, 3080, "graph", limited, 1.5)])
    for shape in (*shapes, (8192, 5120, 3080)):
        assert not isinstance(auto(Stub(limits=False), shape=shape), Signaled)
    assert auto(Stub(), shape=(8192, 5120, 3080)) == limited


def test_the_self_check_leaves_the_users_numbers_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        record = synchronize = lambda self, stream=None: None  # noqa: E731

        def elapsed_time(self, end_event: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(weft_auto, "CHECK", (8, 8, 8))
    before = torch.get_rng_state()
    assert weft_auto.self_check(made_up_profile(), torch.device("cpu")) == pytest.approx(50 / 100)
    assert torch.equal(torch.get_rng_state(), before)

    def full(*size: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "randn", full)
    assert weft_auto.self_check(made_up_profile(), torch.device("cpu")) is None


def test_ranks_with_different_profiles_are_sequential(find_returns: Callable[[Any], None]) -> None:
    other_digest = (made_up_profile() + [Gemm(1, 1, 1, 1.0)]).digest
    for own_profile, peer_digest in (
        (made_up_profile(), other_digest),
        (made_up_profile(), None),
        (None, other_digest),
        (made_up_profile(), "q.json: broken"),
    ):
        find_returns(own_profile)
        world = Stub(exchange=lambda value, title="", peer=peer_digest: [value] * 7 + [(peer, None)])
        assert auto(world) == Sequential()
        assert len(world.messages) == 1 and '"auto" is sequential' in world.messages[0]


def test_a_profile_that_lacks_something_is_sequential_there(find_returns: Callable[[Any], None]) -> None:
    find_returns(
        replace(
            made_up_profile(), latencies=tuple(x for x in made_up_profile().latencies if x.operation != "all_reduce")
        )
    )
    world = Stub()
    assert auto(world) == Sequential()
    assert any("all_reduce was not measured" in s for s in world.messages)
    assert auto(world, "all_gather_matmul").kind != "sequential"


@pytest.mark.parametrize(("us", "says"), [(105.0, False), (93.0, False), (125.0, True), (80.0, True)])
def test_changed_clocks_are_noticed(
    find_returns: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    us: float,
    says: bool,
) -> None:
    find_returns(with_fused())
    monkeypatch.setattr(weft_auto, "time_check", lambda device: us)
    with caplog.at_level(logging.WARNING, "weft"):
        auto(Stub())
    warnings = [r.getMessage() for r in caplog.records if "clocks" in r.getMessage()]
    assert bool(warnings) == says
    if says:
        assert f"{us:.0f}% of its time" in warnings[0] and "rank 3" in warnings[0] and "weft tune" in warnings[0]


def test_the_emulator_never_looks_for_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(machine: Hardware) -> Profile:
        raise AssertionError("looked")

    monkeypatch.setattr(weft_auto, "find", find)
    x, w = torch.randn(8, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    weft.spmd(lambda world: weft.matmul_all_reduce(x, w, world=world).shape, 2, backend="emulated", sm_count=40)


# -- other machines --------------------------------------------------------------------------------------------------
def test_the_measured_machine_is_simulated_as_it_was_measured() -> None:
    p = Predictor(with_fused())
    scaled = ScaledPredictor(p, nvlink(8), nvlink(8))
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for plan in (Sequential(), Decomposed((1, 1, 2, 4)), VARIANTS[op], Signaled()):
            if op != "all_gather_matmul" or plan.kind != "signaled":
                assert scaled.time(op, plan, 8192, 4096, 2048) == pytest.approx(
                    p.time(op, plan, 8192, 4096, 2048), rel=0.01
                )


def test_slower_links_and_more_hops_take_longer() -> None:
    p = Predictor(with_fused())
    us = lambda t, layer="mlp": simulate_from(p, t, layer, [(8192, 8192, 28672)], nvlink(8)).rows[0]  # noqa: E731
    links = [us(t) for t in (nvlink(8), nvlink(8, 12), nvlink(8, 6), pcie(8, 5), pcie(8, 4))]
    assert all(a.us < b.us and a.sequential < b.sequential for a, b in itertools.pairwise(links))
    nodes = [us(cluster(64, gbs=g), "matmul_all_reduce") for g in (100.0, 50.0, 25.0)]
    assert all(a.us < b.us for a, b in itertools.pairwise(nodes))
    counts = [us(cluster(c)) for c in (16, 64, 256, 1024)]
    assert all(a.gemm > b.gemm and a.comm <= b.comm * 1.01 for a, b in itertools.pairwise(counts))
    assert all(plan.kind != "fused" for c in counts for plan in c.plans)
    assert all(r.us <= r.sequential for r in (*links, *nodes, *counts))


def test_two_levels_are_predicted_over_nodes() -> None:
    """Two nodes hide most of their traffic behind their GEMMs. A faster network leaves less traffic to hide, and with
    more nodes the GEMM is too short to hide all of it."""
    p = Predictor(with_fused())
    row = lambda nodes, gbs=50.0: simulate_from(  # noqa: E731
        p, cluster(8 * nodes, gbs=gbs), "mlp", [(32768, 8192, 28672)], nvlink(8)
    ).rows[0]
    two, many = row(2), row(128)
    assert {plan.kind for plan in two.plans} == {"two_level"} and many.us <= many.sequential
    assert two.speedup > 1.2 > many.speedup and max(two.gemm, two.comm) <= two.us
    assert row(2, 100.0).us < two.us < row(2, 25.0).us
    scaled = ScaledPredictor(p, cluster(16), nvlink(8))
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        steps = steps_of(scaled, op, TwoLevel(2), 32768, 4096, 4096)
        gemms, sends = ([s for s in steps if s.queue == queue] for queue in ("gemm", "comm"))
        assert all(a.end <= b.start for queue_steps in (gemms, sends) for a, b in itertools.pairwise(queue_steps))
        assert any(a.start < b.end and b.start < a.end for a in gemms for b in sends), "GEMMs and sends must overlap"
        lone = scaled.over_nodes
        assert lone is not None and lone.nodes == 2
        least = max(sum(s.end - s.start for s in queue_steps) for queue_steps in (gemms, sends))
        assert least <= scaled.time(op, TwoLevel(2), 32768, 4096, 4096) <= sum(s.end - s.start for s in steps)
    with pytest.raises(NotMeasured, match="no model of"):
        scaled.time("matmul_all_to_all", TwoLevel(), 32768, 4096, 4096)
    for topology in (nvlink(8), cluster(8, per_node=1), Topology("net", (Level(8, 5.0, 50.0),), peer_access=False)):
        assert ScaledPredictor(p, topology, nvlink(8)).over_nodes is None
    with pytest.raises(NotMeasured):
        p.time("all_gather_matmul", TwoLevel(), 32768, 4096, 4096)


def test_noise_at_short_copies_is_not_scaled_to_a_fast_link() -> None:
    """Measured times of short copies sometimes decrease with the size."""
    p = with_fused()
    noisy = [replace(x, us=x.us - 2) if (x.operation, x.nbytes) == ("copy", 1 << 17) else x for x in p.latencies]
    scaled = ScaledPredictor(Predictor(replace(p, latencies=tuple(noisy))), pcie(8, 4), nvlink(8))
    copies = scaled.curves["copy", 0]
    assert all(us >= copies.us[0] for us in copies.us)
    pulling = scaled.parameters("all_gather_matmul", VARIANT)
    assert isinstance(pulling, Pulling) and pulling.rate < 32


def test_a_topology_counts_its_gpus() -> None:
    t = Topology("racks", (Level(8, 1.0, 400.0), Level(4, 5.0, 50.0), Level(2, 10.0, 10.0)))
    assert (
        t.gpus == 64 and not t.one_level and nvlink(8).one_level and not replace(nvlink(8), peer_access=False).one_level
    )
    assert t.rate() == min(400.0, 50.0 * 8, 10.0 * 32)
    assert t.latency() == 3 * 1.0 + 2 * 5.0 + 10.0
    assert [x.count for x in t.resized(16).levels] == [8, 2, 1] and [x.count for x in t.resized(12).levels] == [4, 1, 3]
    assert nvlink(8).resized(4).gpus == 4 and cluster(64).resized(128).gpus == 128
    with pytest.raises(ValueError, match="a level has"):
        Topology("none", (Level(0, 1.0, 1.0),))


def test_a_network_is_no_nvlink_also_where_nodes_have_one_gpu() -> None:
    p, size = Predictor(with_fused()), [(8192, 8192, 28672)]
    alone, network = cluster(8, per_node=1), Topology("net", (Level(8, 5.0, 50.0),), peer_access=False)
    assert not alone.one_level and not cluster(64).resized(5).one_level and cluster(8).one_level
    rows = [simulate_from(p, t, "mlp", size, nvlink(8)).rows[0] for t in (alone, network)]
    assert rows[0].us == pytest.approx(rows[1].us) and rows[0].plans == rows[1].plans


def test_as_many_gpus_as_asked_for_are_simulated() -> None:
    assert cluster(4).gpus == 4 and cluster(4).levels[0].count == 4 and cluster(12, per_node=4).gpus == 12
    for gpus, per_node in ((12, 8), (20, 8), (0, 8), (8, 0), (8, -1), (8.0, 8)):
        with pytest.raises(ValueError, match="whole n"):
            cluster(gpus, per_node)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole number of GPUs"):
        nvlink(8).resized(0)
    one = weft.simulate(nvlink(1), "mlp", ((m, 4096, 14336) for m in (1024, 2048)), profile=with_fused())
    assert len(one.rows) == 2 and all(r.us == r.sequential for r in one.rows)
    with pytest.raises(ValueError, match="whole ones"):
        weft.simulate(nvlink(8), "mlp", [(8192.5, 4096, 14336)], profile=with_fused())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="measured_on has 1 GPUs"):
        weft.simulate(nvlink(8), "mlp", [(8192, 4096, 14336)], profile=with_fused(), measured_on=nvlink(1))


def test_simulate_prints_and_draws(tmp_path: Path) -> None:
    profile.write(with_fused(), tmp_path / "p.json")
    result = weft.simulate(cluster(32), "mlp", [(8192, 8192, 28672), (2048, 8192, 28672)], profile=tmp_path / "p.json")
    assert "mlp on 32 GPUs" in str(result) and "simulated" in str(result) and len(str(result).splitlines()) == 4
    result.plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match='not "mlp"'):
        weft.simulate(cluster(32), "attention", [(1, 1, 1)], profile=with_fused())
    with pytest.raises(ValueError, match="three numbers"):
        weft.simulate(cluster(32), "mlp", [(8192, 0, 1)], profile=with_fused())
    with pytest.raises(ValueError, match="measured_on"):
        weft.simulate(
            cluster(32), "mlp", [(1, 8, 8)], profile=made_up_profile(machine=replace(MACHINE, link="unknown"))
        )


# -- predictions compared with measurements --------------------------------------------------------------------------
HELD_OUT = [(8192, 4096, 1792), (8192, 3584, 4096), (2048, 8192, 3584), (4096, 7168, 8192), (8192, 8192, 3584)]


@pytest.mark.gate
def test_stored_calls_of_shapes_left_out_are_predicted() -> None:
    """Each call's time is predicted from a profile that is fitted to calls of the other shapes. The errors of a broken
    model are well above the bounds."""
    rows = [r for r in stored.rows("nvidia-h200-x8") if r.call.mode == "graph" and r.run not in stored.OLD]
    errors: dict[str, list[float]] = {}
    of_best = []
    for shape in HELD_OUT:
        p = Predictor(stored.fitted([r for r in rows if r.shape != shape], 8))
        ran: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for r in rows:
            if r.shape == shape:
                plan = Plan.from_json(r.call.plan)
                predicted = p.time(r.call.op, plan, *shape)
                errors.setdefault(plan.kind, []).append(abs(predicted / r.call.us - 1))
                ran.setdefault((r.run, r.call.op), []).append((predicted, r.call.us))
        of_best += [min(us for _, us in pairs) / min(pairs)[1] for pairs in ran.values()]
    assert {kind: statistics.fmean(e) < 0.07 for kind, e in errors.items()} == dict.fromkeys(errors, True), errors
    assert set(errors) == {"sequential", "decomposed", "fused"} and sum(map(len, errors.values())) > 60
    assert statistics.fmean(of_best) > 0.95


def test_errors_of_weft_are_weft_errors() -> None:
    assert issubclass(NotMeasured, ProfileError) and issubclass(ProfileError, WeftError) and ITEM == 2


def test_eager_calls_are_sequential_where_little_is_predicted_to_be_won() -> None:
    """With the shipped profile, "auto" ignores a gain below EAGER_GAIN in an eager call, but not in a graph."""
    planner = weft_auto.planner_of(weft_auto.profile_for("nvidia-h200-x2", None))
    op = "matmul_reduce_scatter"
    sizes = [(m, 12288, 24576) for m in (768, 1536, 2048, 4096)]
    for m, n, k in sizes:
        decision = planner.decide(op, m, n, k, "eager")
        assert decision.sequential is not None and decision.us is not None
        ratio = decision.sequential / decision.options[0].us
        assert isinstance(decision.plan, Sequential) == (ratio <= search.EAGER_GAIN)
    kept = [isinstance(planner.decide(op, *size, "eager").plan, Sequential) for size in sizes]
    assert True in kept and False in kept


def test_plans_with_several_streams_must_win_on_a_slow_host() -> None:
    """With the shipped profile and a host that is half as fast, "auto" chooses a plan only if the plan hides the host's
    time."""
    planner = weft_auto.planner_of(weft_auto.profile_for("nvidia-h200-x2", None))
    op, hidden, bare = "all_gather_matmul", (1536, 18944, 3584), (1536, 14336, 4096)
    assert isinstance(planner.decide(op, *hidden, "eager").plan, Decomposed | FusedGatherByCopies)
    decision = planner.decide(op, *bare, "eager")
    assert not isinstance(decision.plan, Decomposed) and isinstance(decision.options[0].plan, Decomposed)
    assert isinstance(planner.decide(op, *bare, "graph").plan, Decomposed)
    times = [planner.predictor.call_time(op, plan, *bare) for plan in (decision.options[0].plan, Sequential())]
    assert times[0].us("eager", search.SLOW_HOST) > times[1].us("eager", search.SLOW_HOST)
