"""The planner's choice for a decoder's layers, compared with every measured method, on GPUs whose profile weft ships."""

from __future__ import annotations

import functools
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from weft.nn.weave import LayerPlan
from weft.planner import layers
from weft.planner.layers import DecoderSizes, LayerPredictor, Way, predicted
from weft.planner.predict import Predictor
from weft.planner.profile import Profile, shipped
from weft.planner.search import Planner, near
from weft.plans import Plan

RESULTS = Path(__file__).parents[2] / "bench/results"
FITTED = "70B"  # the sizes to which planner/layers.py's constants were fitted
GPUS = {world: f"nvidia-h200-x{world}" for world in (2, 4)}


def profile_of(world: int) -> Profile:
    profile = shipped(GPUS[world])
    assert profile is not None
    return profile


@functools.cache
def planner(world: int) -> Planner:
    return Planner(Predictor(profile_of(world)))


def sizes(hidden: int, inner: int, heads: int, kv_heads: int, dim: int, world: int) -> DecoderSizes:
    q, kv, inner = heads * dim // world, kv_heads * dim // world, inner // world
    return DecoderSizes((q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))


class Case(NamedTuple):
    world: int
    name: str
    mode: str
    tokens: int
    sizes: DecoderSizes
    us: dict[Way, float]  # the fastest time for every kind, number of SMs and norm


@functools.cache
def cases() -> list[Case]:
    """Return the methods that were measured together, from the newest run of each size and mode."""
    out = []
    for world, machine in GPUS.items():
        runs: dict[Any, dict[Way, float]] = defaultdict(dict)
        newest: dict[Any, str] = {}
        for line in (RESULTS / machine / "decoder.jsonl").read_text().splitlines():
            r = json.loads(line)
            # Mixes of requests, and runs that limit cuBLAS's SMs, are omitted.
            if r["plan"] is None or r["method"].endswith("cuBLAS"):
                continue
            shape = r["N"], r["K"], r.get("heads", 64), r.get("kv_heads", 8), r.get("head_dim", 128), world
            key = r["name"], r["mode"], r["M"], sizes(*shape)
            if newest.setdefault(key, r["date"]) < r["date"]:
                newest[key], runs[key] = r["date"], {}
            if newest[key] == r["date"]:
                p = json.loads(r["plan"])
                way = Way(p["kind"], 0, p["sms"], p["norm"])
                runs[key][way] = min(r["us"], runs[key].get(way, r["us"]))
        out += [Case(world, *key, us) for key, us in runs.items()]
    return out


def chosen(case: Case) -> float | None:
    """Return the measured time of the method that is predicted to be fastest, or None if it was not timed."""
    p = planner(case.world)
    return case.us.get(LayerPredictor(p, case.sizes).best(near(case.tokens, p.predictor.world), case.mode))


def test_rows_of_other_models_are_there() -> None:
    graph = [c for c in cases() if c.mode == "graph"]
    assert sum(not c.name.startswith(FITTED) for c in graph) >= 20
    assert sum(chosen(c) is None for c in cases()) <= 8


@pytest.mark.parametrize(
    "case", [c for c in cases() if not c.name.startswith(FITTED)], ids=lambda c: f"{c.name} {c.mode}"
)
def test_sizes_that_nothing_was_fitted_to(case: Case) -> None:
    """In a graph the choice is at most 3% slower than the fastest measured method, and at most 2% slower than the plain
    layer."""
    us = chosen(case)
    if us is None:
        pytest.skip("not timed")
    assert us <= case.us[Way("plain")] / 0.98
    assert case.mode == "eager" or us <= min(case.us.values()) / 0.97, case


def test_sizes_that_the_constants_are_of() -> None:
    timed = [(us, c) for c in cases() if c.name.startswith(FITTED) and (us := chosen(c)) is not None]
    behind = [min(c.us.values()) / us for us, c in timed if c.mode == "graph"]
    assert len(behind) > 30 and min(behind) > 0.94 and statistics.fmean(behind) > 0.985
    assert all(us <= c.us[Way("plain")] / 0.98 for us, c in timed)


def test_predicted_gains() -> None:
    """In graphs, half of the predicted gains over the plain layer are within 4% of the measured gain."""
    off = []
    for case in cases():
        layer = LayerPredictor(planner(case.world), case.sizes)
        for way in [w for w in layer.ways(case.tokens)[1:] if w in case.us and case.mode == "graph"]:
            gain = layer.time(Way("plain"), case.tokens) / layer.time(way, case.tokens)
            off.append(abs(gain * case.us[way] / case.us[Way("plain")] - 1))
    assert len(off) > 80 and statistics.median(off) < 0.04, statistics.median(off)


# -- what the choice depends on -----------------------------------------------------------------------------------------
LLAMA_8B = sizes(4096, 14336, 32, 8, 128, 4)


def test_choices_can_be_run() -> None:
    layer = LayerPredictor(planner(4), LLAMA_8B)
    for tokens in (4, 100, 1000, 4096, 32768):
        for way in layer.ways(tokens):
            assert LayerPlan(*way).kind == way.kind
            assert 0 < layer.time(way, tokens) <= layer.time(way, tokens, "eager")


def test_few_tokens_are_fused_and_many_woven_or_by_sequence() -> None:
    best = LayerPredictor(planner(4), LLAMA_8B).best
    assert [best(tokens).kind for tokens in (4, 64, 512)] == ["fused"] * 3
    assert {best(tokens).kind for tokens in (8192, 16384, 32768)} <= {"woven", "sequence"}


def test_a_slow_host_keeps_eager_passes_plain() -> None:
    profile = profile_of(4)
    slow = [
        replace(r, us=20 * r.us)
        for r in profile.calls
        if r.mode == "eager" and Plan.from_json(r.plan).kind == "sequential"
    ]
    usual, slower = (LayerPredictor(Planner(Predictor(p)), LLAMA_8B) for p in (profile, profile + slow))
    assert usual.best(32768, "eager") != slower.best(32768, "eager") == Way("plain")
    assert usual.best(32768) == slower.best(32768) != Way("plain"), "in a graph, the host's speed must not matter"


def test_wefts_gemm_needs_whole_words() -> None:
    odd = replace(LLAMA_8B, down=(4096, 3587))
    assert any(way.sms for way in LayerPredictor(planner(4), LLAMA_8B).ways(4096))
    assert not any(way.sms for way in LayerPredictor(planner(4), odd).ways(4096))


class Machine:
    """The part of a World that the prediction uses."""

    def __init__(self, planner: Planner | None, reason: str | None = None) -> None:
        self.kept: dict[Any, Any] = {"planner": planner}
        self.messages = [""]
        self.backend = SimpleNamespace(limits_ctas=True, symmetric_unsupported=reason)

    def cached(self, key: Any, make: Any) -> Any:
        return self.kept.setdefault(key, None) or self.kept.update({key: make()}) or self.kept[key]

    def log_once(self, message: str) -> None:
        self.messages.append(message)


def test_plain_where_nothing_can_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "planner_on", lambda world: world.kept["planner"])
    lacking = Planner(Predictor(replace(profile_of(4), latencies=())))

    def way(world: Any, tokens: int = 4096) -> Way:
        return predicted(world, LLAMA_8B, tokens, "graph")

    assert way(Machine(planner(4))) != Way("plain")
    assert way(Machine(None)) == way(Machine(planner(4), "no peers")) == way(Machine(planner(4)), 0) == Way("plain")
    world = Machine(lacking)
    assert way(world) == Way("plain") and "was not measured" in world.messages[-1]
