"""The chooser, and plan="auto" by timing, with simulated times and a GEMM library that only some ranks may have
installed. tests/gpu/gpu_main.py runs the chooser on GPUs.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_all_gather_matmul import all_gather_case
from weft import chooser
from weft.backends import library_gemm
from weft.backends.emulated import EmulatedBackend
from weft.chooser import Choice, Chooser
from weft.integrations import quack
from weft.op import REGISTRY
from weft.ops.all_gather_matmul.op import ALL_GATHER_MATMUL as OP
from weft.ops.all_gather_matmul.op import AllGatherMatmul, GatherCall
from weft.ops.all_reduce.call import NORM, SumCall
from weft.ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from weft.ops.attention import libraries
from weft.ops.attention.segmented import AttentionConfig
from weft.ops.moe.call import Layer, MoeCall, MoeOperands
from weft.ops.moe.expert_parallel.op import MOE, Moe
from weft.planner.auto import UNUSABLE
from weft.planner.parts import NotMeasured
from weft.planner.predict import Predictor
from weft.planner.profile import shipped
from weft.planner.search import Planner
from weft.planner.table import Measured, learn
from weft.plans import (
    Decomposed,
    Dispatched,
    FlagGated,
    LowLatency,
    OneShot,
    Plan,
    Sequential,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
    is_low_latency,
)
from weft.prepared import Prepared
from weft.timing import CallTime

FORMS = (library_gemm.Form(8, 16, 2, True), library_gemm.Form(8, 32, 2, True), library_gemm.Form(8, 64, 2, True))
FIRST, SECOND, WRONG = (FlagGated(*form) for form in FORMS)
N, K = 16, 24


@pytest.fixture
def us(monkeypatch: pytest.MonkeyPatch) -> dict[Plan, tuple[float, float]]:
    """Set up ranks that have a library whose last form is wrong, on machines with as many programs as a GPU. Return
    each plan's time in us on the GPU and on the host; rank 1 needs 1 us longer. Timed and agreed plans are appended to
    `noted`."""
    took: dict[Plan, tuple[float, float]] = {Sequential(): (100.0, 50.0), FIRST: (90.0, 80.0), SECOND: (80.0, 80.0)}

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, times: int, ahead: float) -> CallTime:
        world: Any = self.ranks
        noted(world).append((choice.sizes[0], plan, times, ahead))
        gpu, host = took[plan]
        return CallTime(gpu + world.rank, host)

    timed_by(monkeypatch, time)
    monkeypatch.setattr(quack, "FORMS", FORMS)
    monkeypatch.setattr(AllGatherMatmul, "autotune_plans", tuple(FlagGated(*form) for form in FORMS))
    monkeypatch.setattr(quack, "lacks", lambda: None)
    monkeypatch.setattr(quack, "waits", lambda form, device, dtype: form != FORMS[2])
    return took


def timed_by(monkeypatch: pytest.MonkeyPatch, time: Any) -> None:
    monkeypatch.setattr(Chooser, "time", time)
    monkeypatch.setattr(EmulatedBackend, "clock", staticmethod(lambda *_: pytest.fail("really timed")))


def noted(world: weft.World) -> list[Any]:
    return world.decided.setdefault("noted", [])


def emulate(fn: Callable[[weft.World], Any], ranks: int = 2) -> Any:
    """Return the ranks' common result."""
    results = weft.spmd(fn, ranks, backend="emulated", sm_count=32)
    assert all(result == results[0] for result in results)
    return results[0]


def call_of(rows: int, world: weft.World, **options: Any) -> GatherCall:
    fields: dict[str, Any] = dict(dtype=torch.bfloat16, bias=False, gated=0, gathered=False) | options
    return GatherCall((rows // world.size,) * world.size, N, K, **fields)


def auto(world: weft.World, rows: int, **options: Any) -> float:
    return all_gather_case(world, [rows // world.size] * world.size, N, K, "auto", **options)


def taken(world: weft.World, rows: int, **options: Any) -> list[Plan]:
    return [OP.choose(world, call_of(rows, world, **options), "auto", capturing) for capturing in (False, True)]


def test_auto_chooses_the_fastest_of_a_trial(us: dict) -> None:
    """An eager call waits for a slow host, but a call in a graph does not."""

    def rank(world: weft.World) -> list[Any]:
        before = taken(world, 64)
        assert auto(world, 64) < 5e-3
        return [before, taken(world, 64), {plan for _, plan, _, _ in noted(world)}]

    assert emulate(rank) == [[Sequential()] * 2, [SECOND] * 2, {Sequential(), FIRST, SECOND}]
    us[SECOND] = (80.0, 99.5)
    assert emulate(rank)[1] == [FIRST, SECOND]
    us[FIRST] = us[SECOND] = (100.5, 10.0)
    assert emulate(rank)[1] == [Sequential()] * 2


def test_a_plan_must_beat_the_measured_or_predicted_time(us: dict) -> None:
    """Eager calls and graphs have separate bounds."""
    us[Decomposed()] = (70.0, 95.0)

    def rank(world: weft.World) -> list[Plan]:
        if world.rank == 0:
            learn([Measured(OP.name, 2, 64, N, K, mode, Decomposed(), 1.5) for mode in ("eager", "graph")])
        world.exchange("learned")
        auto(world, 64)
        return taken(world, 64)

    assert emulate(rank) == [SECOND, Decomposed()]


@pytest.mark.parametrize(("gpu", "timing"), [(14999.0, (2, 50.0)), (29.0, (10, 250.0))], ids=["long", "short"])
def test_the_gpu_sleeps_until_the_host_is_ahead(gpu: float, timing: tuple[int, float], us: dict) -> None:
    """The GPU sleeps during the first call, and for the additional host time of each further call."""
    us[Sequential()] = (gpu, 50.0)

    def rank(world: weft.World) -> list[Any]:
        auto(world, 64)
        return [(times, ahead) for _, plan, times, ahead in noted(world) if plan == Sequential()]

    assert emulate(rank) == [(1, chooser.LAUNCH), *[timing] * chooser.ROUNDS]


@pytest.mark.parametrize(("us", "rounds"), [(4e3, 5), (1e5, 4), (1.9e5, 3), (1e6, 2)])
def test_long_calls_have_fewer_rounds(us: float, rounds: int) -> None:
    timed: list[str] = []

    def clock(run: Callable[[], object], times: int, ahead: float) -> CallTime:
        run()
        return CallTime(us, 0.0)

    Chooser(clock, lambda: False).choose(Choice("key", lambda mode: "a", lambda: ["a", "b"], timed.append))
    assert timed.count("b") == 1 + 1 + rounds, "a warm-up, the first timed call and the rounds"


@pytest.mark.parametrize(("us", "first_calls", "of_a_round"), [(50e3, [2, 2], 2), (150e3, [2, 1], 1)])
def test_calls_that_are_timed_together_are_timed_alone_if_they_are_long(
    us: float, first_calls: list[int], of_a_round: int
) -> None:
    """Only the first timed call of the first candidate does not know how long a call is."""
    counts: list[int] = []

    def clock(run: Callable[[], object], times: int, ahead: float) -> CallTime:
        counts.append(times)
        return CallTime(us, 0.0)

    choice = Choice("key", lambda mode: "a", lambda: ["a", "b"], lambda name: None, together=2)
    Chooser(clock, lambda: False).choose(choice)
    rounds = chooser.rounds_of(us)
    assert counts == [*first_calls, *[of_a_round] * 2 * rounds]


@pytest.mark.parametrize(
    ("us", "rounds"), [((100, 99.5, 101), (5, 5, 5)), ((100, 90, 101), (5, 5, 0)), ((100, 150, 101), (5, 0, 5)), ((100, 150, 103), (0, 0, 0))]
)  # fmt: skip
def test_only_rivals_are_timed_in_rounds(us: tuple[float, ...], rounds: tuple[int, ...]) -> None:
    """A candidate that is 2% slower than the fastest is none, except the expected candidate."""
    names, running, timed = ("expected", "b", "c"), list[str](), Counter[str]()

    def clock(run: Callable[[], object], times: int, ahead: float) -> CallTime:
        run()
        timed[running[-1]] += 1
        return CallTime(us[names.index(running[-1])], 0.0)

    choice = Choice("key", lambda mode: "expected", lambda: names, running.append, hopeless=1.02)
    Chooser(clock, lambda: False).choose(choice)
    again = [timed[name] - 1 for name in names]  # after the first timed call
    assert tuple(count if count > 1 else 0 for count in again) == rounds, timed


def test_no_plan_always_comes_behind_the_same(us: dict) -> None:
    def rank(world: weft.World) -> list[Plan]:
        auto(world, 64)
        return [plan for _, plan, _, _ in noted(world)][3:]

    plans = emulate(rank)
    rounds = [plans[i : i + 3] for i in range(0, len(plans), 3)]
    assert len(rounds) == chooser.ROUNDS and all(len({*plans_of_round}) == 3 for plans_of_round in rounds)
    assert len({(a, b) for a, b in itertools.pairwise(plans)}) > 3, (
        "if all rounds were alike, there would be 3 such pairs"
    )


def test_one_trial_for_sizes_that_are_close(us: dict) -> None:
    """Rows are rounded as for cuBLAS's GEMM. Sizes that the library does not support keep their former plan."""

    def rank(world: weft.World) -> list[Any]:
        for rows in (544, 576, 560, 544, 552, 576):
            auto(world, rows)
        auto(world, 576, bias=True)
        tried = list(dict.fromkeys(rows for rows, *_ in noted(world)))
        return [tried, taken(world, 576), taken(world, 552), len(noted(world))]

    runs = 3 * (1 + chooser.ROUNDS)
    assert emulate(rank) == [[544, 576], [SECOND] * 2, [Sequential()] * 2, 2 * runs]


def test_a_size_that_the_fastest_plan_cannot_run_takes_the_next(us: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    us[Decomposed()] = (90.0, 50.0)
    monkeypatch.setattr(AllGatherMatmul, "candidates", lambda self, world, call: [FIRST, SECOND, Decomposed()])

    def rank(world: weft.World) -> list[Any]:
        auto(world, 576)
        return [taken(world, 576), taken(world, 552)]

    assert emulate(rank) == [[SECOND] * 2, [Decomposed()] * 2]


def test_the_host_counts_as_for_the_smallest_call_of_a_trial(us: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine, calls with half the rows share the trial. The calls would wait for a host whose time the GPU hides
    here."""
    us[FIRST] = (90.0, 45.0)

    def rank(world: weft.World) -> list[Plan]:
        auto(world, 64)
        return taken(world, 64)

    assert emulate(rank) == [SECOND, SECOND]
    monkeypatch.setattr(library_gemm, "_steps_an_octave", 1)
    assert emulate(rank) == [FIRST, SECOND]


def test_a_plan_must_win_in_the_timed_call_too(us: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is faster only in calls with half the rows, where the sequential plan waits for the host."""
    us[Sequential()], us[FIRST] = (100.0, 60.0), (110.0, 45.0)
    monkeypatch.setattr(library_gemm, "_steps_an_octave", 1)

    def rank(world: weft.World) -> list[Plan]:
        auto(world, 64)
        return taken(world, 64)

    assert emulate(rank) == [Sequential(), SECOND]


@pytest.mark.parametrize("lacking", [{0}, {1}, {0, 1}], ids=str)
def test_a_rank_without_the_library_leaves_all_without_a_trial(lacking: set[int], us: dict, monkeypatch: Any) -> None:
    """The ranks exchange only once which libraries they have installed."""
    ranks: dict[int, int] = {}
    monkeypatch.setattr(quack, "lacks", lambda: "no" if ranks[threading.get_ident()] in lacking else None)
    monkeypatch.setattr(quack, "waits", lambda *args: pytest.fail("compiled"))

    def rank(world: weft.World) -> list[Any]:
        ranks[threading.get_ident()] = world.rank
        exchanged: list[Any] = []
        plain = world.backend.exchange
        monkeypatch.setattr(world.backend, "exchange", lambda value: exchanged.append(value) or plain(value))
        for rows in (64, 96, 64, 40):
            assert auto(world, rows) < 5e-3
        return [taken(world, 64), noted(world), sum(type(value.content) is bool for value in exchanged)]

    assert emulate(rank) == [[Sequential()] * 2, [], 1]


def test_nothing_is_tried_in_a_capture(us: dict, monkeypatch: Any) -> None:
    def rank(world: weft.World) -> list[Any]:
        x, w = draw(world.rank, 32, K), draw(9, N, K)
        call = call_of(64, world)
        capturing = [True]
        monkeypatch.setattr(world.backend, "capturing", lambda: capturing[0])
        world.choices.capturing = world.backend.capturing
        choices = [world.choices.trial(OP.choice(world, call, (x, w, None))), *taken(world, 64)]
        capturing[0] = False
        world.choices.trial(OP.choice(world, call_of(96, world), (draw(world.rank, 48, K), w, None)))
        capturing[0] = True
        return [*choices, world.choices.trial(OP.choice(world, call, (x, w, None))), taken(world, 96)]

    learn([Measured(OP.name, 2, 64, N, K, mode, Sequential(), 1.0) for mode in ("eager", "graph")])
    assert emulate(rank) == [None, Sequential(), Sequential(), None, [SECOND] * 2]


def test_explain_reports_the_trial(us: dict) -> None:
    def rank(world: weft.World) -> str:
        auto(world, 64)
        trial = world.choices.last(OP.name, (64, N, K))
        assert trial is not None and world.choices.last(OP.name, (96, N, K)) is None
        return trial.timings("graph")

    text = emulate(rank)
    assert text.startswith(f"timed at the first call of this size: {SECOND} 81 us, {FIRST} 91 us, Sequential() 101 us")


def test_explain_of_a_world(us: dict) -> None:
    def rank(world: weft.World) -> list[Any]:
        auto(world, 64)
        shown = weft.explain(OP.name, 64, N, K, world=world, profile="nvidia-h200-x2")
        return [shown.plan, shown.why.partition(":")[0]]

    assert emulate(rank) == [SECOND, "timed at the first call of this size"]


def test_explain_says_which_eager_calls_are_timed() -> None:
    for m, mode, timed in ((128, "eager", True), (128, "graph", False), (16384, "eager", False)):
        shown = weft.explain("matmul_all_reduce", m, 4096, 4088, mode=mode, profile="nvidia-h200-x4")
        assert ("time the plans at the first eager call" in shown.why) == timed
    shown = weft.explain("matmul_all_to_all", 128, 4096, 4088, mode="eager", profile="nvidia-h200-x4")
    assert "time the plans" not in shown.why


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce"])
def test_an_unmeasured_hopper_gpu_is_timed_at_the_first_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate that this GPU can run is timed, with low-latency plans only if their rows are few. Candidates
    are also timed with a profile if the host may bound the eager call. Nothing is timed on a GPU of another generation,
    on a GPU with stored rows, or with an unusable profile. If a profile predicts that the GPU bounds the call, only
    plans that it cannot rank are timed, unless memory is scarce or all calls of an octave share the trial."""
    is_hopper, known, planner = [True], [False], list[Any]([None])
    monkeypatch.setattr("weft.planner.auto._is_measured", lambda device: is_hopper[0])
    monkeypatch.setattr("weft.planner.auto.exact", lambda *shape: Sequential() if known[0] else None)
    monkeypatch.setattr("weft.planner.auto._planner_or_unusable", lambda world: planner[0])
    monkeypatch.setattr(AllGatherMatmul, "autotune_plans", ())
    best = REGISTRY[op].variants[-1]

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, *_: Any) -> CallTime:
        world: Any = self.ranks
        noted(world).append(plan)
        return CallTime(*((50.0, 50.0) if plan == best else (100.0, 50.0)))

    timed_by(monkeypatch, time)

    def rank(world: weft.World) -> Any:
        world.backend.name = "cuda"
        monkeypatch.setattr(Prepared, "__call__", lambda self, operands, out: self.plan)
        x, weight = torch.zeros(512, 512).bfloat16(), torch.zeros(512, 512).bfloat16()
        plan = REGISTRY[op].call(
            world,
            "auto",
            (x, weight, None),
            ((None, 0, False, None, None, False) if op == "all_gather_matmul" else (False, None, None, False)),
            None,
        )
        world.backend.name = "emulated"
        return plan, set(noted(world))

    shots = {OneShot(), TwoShotLowLatency()} if op == "matmul_all_reduce" else {OneShot()}
    for most in (1 << 20, (1 << 19) - 1):  # 512 rows of 512 elements are 512 KiB
        monkeypatch.setattr("weft.planner.probes.calls.MOST_LOW_LATENCY_BYTES", most)
        plan, timed = weft.spmd(rank, 2, backend="emulated", sm_count=132)[0]
        assert plan == best and {Sequential(), *REGISTRY[op].variants, Decomposed()} <= timed
        assert {shot for shot in timed if is_low_latency(shot)} == (shots if most == 1 << 20 else set())
    profile = shipped("nvidia-h200-x2")
    assert profile is not None
    predicted = Planner(Predictor(profile))
    monkeypatch.setattr(predicted, "nearest", lambda *_: Sequential())
    rivals = list[Plan]()
    monkeypatch.setattr(predicted, "rivals", lambda *_: rivals)
    for is_hopper[0], known[0], planner[0], us in (
        (False, False, None, None),
        (True, True, None, None),
        (True, False, UNUSABLE, None),
        (True, False, predicted, CallTime(300.0, 100.0)),
        (True, False, predicted, CallTime(150.0, 100.0)),  # on a host half as fast the call waits for the host
    ):
        monkeypatch.setattr(predicted.predictor, "call_time", lambda *_, us=us: us)
        plan, timed = weft.spmd(rank, 2, backend="emulated", sm_count=132)[0]
        assert (plan, bool(timed)) == ((best, True) if us == CallTime(150.0, 100.0) else (Sequential(), False))
    monkeypatch.setattr(predicted.predictor, "call_time", lambda *_: CallTime(300.0, 100.0))
    enough = [True]
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1 << 24 if enough[0] else 1 << 21, 0))
    rivals += Sequential(), best
    assert weft.spmd(rank, 2, backend="emulated", sm_count=132)[0] == (best, {Sequential(), best})
    enough[0] = False
    assert weft.spmd(rank, 2, backend="emulated", sm_count=132)[0] == (Sequential(), set())
    enough[0] = True
    monkeypatch.setattr("weft.backends.library_gemm._steps_an_octave", 1)
    assert weft.spmd(rank, 2, backend="emulated", sm_count=132)[0] == (Sequential(), set())


def test_the_best_plans_of_classes_with_close_predictions_are_rivals() -> None:
    planner = Planner(Predictor(shipped("nvidia-h200-x4")))
    rivals = planner.rivals("all_gather_matmul", 1728, 19200, 10240)
    options = planner.decide("all_gather_matmul", 1728, 19200, 10240).options
    classes = [type(plan) for plan in rivals]
    assert rivals[0] == options[0].plan and len(classes) == len({*classes}) and Sequential in classes
    for option in options:
        assert (option.plan in rivals) <= (option.us <= 1.25 * options[0].us)
    assert planner.rivals("matmul_all_reduce", 7040, 6144, 3712) == [], "one plan is faster than all others by 25%"
    why = weft.explain("all_gather_matmul", 1728, 19200, 10240, profile="nvidia-h200-x4").why
    assert f"{len(rivals)} plans are too close to be ranked" in why


def test_calls_with_new_numbers_of_rows_search_for_no_new_rivals() -> None:
    planner = Planner(Predictor(shipped("nvidia-h200-x4")))
    planner.nearest("all_gather_matmul", 1700, 19200, 10240, "graph")
    searches = planner.decide.cache_info().misses
    for m in (1668, 1700, 1728):
        assert planner.rivals("all_gather_matmul", m, 19200, 10240)
    assert planner.decide.cache_info().misses == searches


def test_no_plan_is_a_rival_if_the_profile_lacks_a_measurement() -> None:
    """The call is sequential (`auto`), and a trial must not raise the error instead."""
    planner = Planner(Predictor(replace(shipped("nvidia-h200-x4"), waves=())))
    assert not planner.host_bounds("matmul_all_reduce", 8192, 6144, 3712)
    with pytest.raises(NotMeasured, match="no waves"):
        planner.nearest("matmul_all_reduce", 8192, 6144, 3712, "graph")
    assert planner.rivals("matmul_all_reduce", 8192, 6144, 3712) == []


def test_explain_names_no_plans_to_time_if_all_calls_of_an_octave_share_a_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.backends.library_gemm._steps_an_octave", 1)
    why = weft.explain("all_gather_matmul", 1728, 19200, 10240, profile="nvidia-h200-x4").why
    assert "too close to be ranked" not in why


def replayed(monkeypatch: pytest.MonkeyPatch, us: dict[type[Plan], float], ran: list[Any]) -> None:
    """Assign to each candidate the time in `us` for its class, by default 100 us, and record the candidates without
    running them."""

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, *_: Any) -> CallTime:
        ran.append(plan)
        return CallTime(us.get(type(plan), 100.0), 1.0)

    timed_by(monkeypatch, time)


def test_an_moe_layer_is_timed_with_max_tokens_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the first call does not affect the choice. Routes are random; if random routes might exceed the
    limit, they are evenly distributed."""
    ran: list[Plan] = []
    replayed(monkeypatch, {LowLatency: 50.0}, ran)

    def main(world: weft.World) -> Any:
        experts, k, hidden, inner = 4 * world.size, 2, 64, 64
        x, ids, weights = torch.randn(3, hidden).bfloat16(), torch.zeros(3, k, dtype=torch.int32), torch.rand(3, k)
        w13 = torch.randn(4, 2 * inner, hidden).bfloat16()
        operands = MoeOperands(x, ids, weights, w13, torch.randn(4, hidden, inner).bfloat16(), shared=x)
        monkeypatch.setattr(Prepared, "__call__", lambda self, operands, out: None)
        monkeypatch.setattr(Moe, "check_same_on_all_ranks", lambda *_: None)
        choices = []
        for most in (4096, 64):
            options = (None, "swiglu", most, 2048 if most == 64 else 16, "rows", False)
            call = MOE.check(world, operands, (*options, False))
            timed, balanced_operands = MOE.balanced(world, call, operands)
            counts = torch.bincount(balanced_operands.ids.flatten(), minlength=experts)
            assert timed.own_tokens == len(balanced_operands.x) and balanced_operands.shared is None
            assert (counts.max() - counts.min() > 1) == (most == 64)
            assert all(len({*row}) == k for row in balanced_operands.ids.tolist())
            choices.append((timed.own_tokens, MOE.choose(world, call, "auto", True).kind))
            world.choices.trial(MOE.choice(world, call, operands))
            choices.append(MOE.choose(world, call, "auto", True).kind)
            trained = MOE.check(world, operands, (*options, True))  # only some of the timed plans support this
            assert MOE.choose(world, trained, "auto", True) == Dispatched() and not MOE.candidates(world, trained)
        return choices

    assert weft.spmd(main, 2, backend="emulated", sm_count=64)[0] == [
        (6, "dispatched"),
        "dispatched",
        (64, "dispatched"),
        "low_latency",
    ]
    assert {LowLatency, Dispatched} == {type(plan) for plan in ran}


@pytest.mark.parametrize(
    ("tokens", "plans"),
    [
        (1, 0),
        (4, 2),
        (6, 3),
        (12, 4),
        (16, 4),
        (17, 3),
        (32, 3),
        (33, 2),
        (48, 4),
        (49, 3),
        (97, 2),
        (192, 2),
        (193, 0),
        (255, 0),
        (256, 2),
        (1 << 14, 2),
    ],
)
def test_an_moe_layer_is_timed_where_plans_come_close(tokens: int, plans: int) -> None:
    """The number of rows of each expert equals the number of tokens."""
    layer = Layer(tokens, 8, 4, 64, 64, torch.bfloat16, "swiglu", None)
    assert len(MOE.candidates(SimpleNamespace(size=2), MoeCall(tokens, None, layer))) == plans  # type: ignore[arg-type]


def test_sums_with_a_norm_are_timed_as_their_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` reports the trial for an op without a model."""
    replayed(monkeypatch, {TwoShotLowLatency: 60.0}, [])

    def main(world: weft.World) -> Any:
        monkeypatch.setattr(Prepared, "__call__", lambda self, operands, out: None)
        choices = []
        for m in (64, 1 << 14):
            call = SumCall(NORM, m, 4096, torch.bfloat16, torch.bfloat16, 1, 1e-5, 0, 0, False, False)
            trial = world.choices.trial(
                ALL_REDUCE_RMS_NORM.choice(world, call, (torch.empty(0), None, None, None, None))
            )
            assert trial is not None
            choices.append(
                ({type(plan) for plan in trial.times}, ALL_REDUCE_RMS_NORM.choose(world, call, "auto", False).kind)
            )
        explanation = weft.explain(NORM, 64, 4096, 1, world=world)
        assert (
            explanation.why.startswith("timed at the first call")
            and explanation.us == 60.0
            and explanation.sequential == 100.0
        )
        with pytest.raises(ValueError, match="no such call was timed"):
            weft.explain(NORM, 65, 4096, 1, world=world)
        return choices

    many_rows_plans = {Sequential, TwoShotPush, TwoShotPull}
    few_rows_plans = {*many_rows_plans, OneShot, TwoShotLowLatency}
    assert weft.spmd(main, 2, backend="emulated", sm_count=132)[0] == [
        (few_rows_plans, "two_shot"),
        (many_rows_plans, "sequential"),
    ]


def test_attention_uses_the_fastest_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first call of a size, and never in a capture, the chooser selects the fastest library with right
    results."""
    slow, fast = (libraries.REFERENCE, replace(libraries.REFERENCE, name="fast"))
    took = {slow: 100.0, fast: 50.0}
    ran: list[str] = []
    monkeypatch.setattr(libraries, "right", lambda *args: (slow, fast))
    monkeypatch.setattr(Chooser, "time", lambda self, choice, library, *_: CallTime(took[library], 1.0))
    monkeypatch.setattr(EmulatedBackend, "clock", True)
    monkeypatch.setattr(Chooser, "alone", Chooser(lambda *_: pytest.fail("really timed"), lambda: capturing[0]))
    capturing = [True]

    def main(world: weft.World) -> list[str]:
        config = AttentionConfig((), 2, 2, 16, torch.bfloat16, 0.25)
        names = []
        for capturing[0], keys in ((True, 40), (False, 40), (True, 40), (True, 90), (False, 41)):
            took[fast] = 50.0 if keys != 41 else 99.5
            names.append(
                config.library(world, "forward", (32, keys, False), lambda library: ran.append(library.name)).name
            )
        return names

    assert weft.spmd(main, 1, backend="emulated")[0] == ["plain", "fast", "fast", "plain", "plain"]
    assert {*ran} == {"plain", "fast"}
