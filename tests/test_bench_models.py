"""What bench/models.py and bench/models_training.py compare: both sides give the same, on emulated ranks."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import distance
from cases_models import MIXTURES, TINY, made
from cases_nn import emulate
from test_layers import planner, sizes

import weft
from weft.models import Batch, Cache
from weft.planner.layers import LayerPredictor, Way
from weft.planner.search import near

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import collectives  # noqa: E402
import models as bench  # noqa: E402
import models_training as training  # noqa: E402
import tables  # noqa: E402

HALF, FLOAT16 = 4e-3, torch.float16


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_libraries_give_what_the_decoder_gives(kind: str) -> None:
    """Of a model that no forward pass went through before, which has no table of rotary positions yet."""
    config, lengths, ids = MIXTURES[kind], (7, 4), torch.arange(11) * 5 % 96

    def rank(world: weft.World) -> float:
        model = made(world, config, dtype=FLOAT16)
        cache = Cache(config, world=world, slots=2, max_len=7, dtype=FLOAT16)
        layout = model.layout(Batch.prefill(lengths), cache, "sequence")
        with torch.no_grad():
            by = functools.partial(bench.mixture_by_libraries, model, ids, layout)
            got = by(collectives.Collectives(world)).clone()
            want = model.hidden(ids, layout)[0]
            elided = collectives.Elided(world)
            alone(world, elided.passes(lambda: by(elided)))
        return distance(got, want)

    assert max(emulate(rank, 2)) < HALF


def alone(world: weft.World, fn: Callable[[], torch.Tensor]) -> None:
    """A pass without communication: rank 0 makes one more than the others, which are not there to answer, of the same values."""
    first = fn().clone()
    if world.rank == 0:
        assert torch.equal(fn(), first)
    world.synchronize()


def test_a_dense_pass_without_communication_is_of_this_ranks_parts() -> None:
    config, ids = TINY, torch.arange(11) * 5 % 96

    def rank(world: weft.World) -> list[float]:
        model = made(world, config, dtype=FLOAT16)
        cache = Cache(config, world=world, slots=2, max_len=7, dtype=FLOAT16)
        layout = model.layout(Batch.prefill((7, 4)), cache, "plain")
        with torch.no_grad():
            whole = model.hidden(ids, layout)[0].clone()
            alone(world, lambda: model.hidden(ids, layout, bench.alone)[0])
            return [distance(model.hidden(ids, layout, bench.alone)[0], whole)]

    one, two = emulate(rank, 1), emulate(rank, 2)
    assert one == [[0.0]] and min(min(two)) > 0.01


def test_a_dense_model_runs_by_every_method_and_auto() -> None:
    given = argparse.Namespace(layers=1, methods=["fused", "woven own"])

    def rank(world: weft.World) -> dict[str, str]:
        plans = bench.Bench(world, given).plans(made(world, TINY), 16)
        return {method: plan.kind for method, plan in plans.items()}

    assert emulate(rank, 2) == [{"libraries": "plain", "fused": "fused", "woven own": "woven"}] * 2


def once(fns: dict[str, Callable[[], object]], **_: object) -> dict[str, float]:
    """In place of the clock: every function is called."""
    return {name: 1.0 + (fn() is None) for name, fn in fns.items()}


METHODS = {
    "LLaMA2-7B": ["libraries", "woven", bench.ALONE, "auto"],
    "Mixtral-8x7B": ["libraries", "sequence", bench.ALONE, "auto"],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_model_is_measured_by_every_method(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whole measurement, but for the clock."""
    config, _ = bench.MODELS[name]
    small = {key: value for key, value in TINY.items() if key not in ("vocab_size", "num_hidden_layers")}
    monkeypatch.setitem(bench.MODELS, name, (config | small | dict(vocab_size=96), (8, 8)))
    monkeypatch.setattr(bench, "time_interleaved", once)
    monkeypatch.setattr(bench, "WORDS", 96)
    given = argparse.Namespace(layers=1, methods=["woven"], rounds=1, out=tmp_path)
    emulate(lambda world: bench.Bench(world, given).run(name), 2)
    rows = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    assert [r["method"] for r in rows] == METHODS[name]
    assert all((r["error"] is None) == (r["method"] == bench.ALONE) for r in rows)


@pytest.mark.parametrize("name", training.LAYERS)
def test_a_layer_is_measured_by_both_sides_and_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.LAYERS, name, small_layer(name))
    monkeypatch.setattr(training, "time_interleaved", once)
    given = argparse.Namespace(layers=1, rounds=1)
    rows = emulate(lambda world: training.measure(world, name, "graph", given), 2)[0]
    assert [r["method"] for r in rows] == ["libraries", "auto", bench.ALONE]
    assert all(r["us"] == 1.0 and r["M"] == 8 * training.LAYERS[name].sequences for r in rows)


def small_layer(name: str) -> training.Sizes:
    of = training.LAYERS[name]
    kv_heads = 8 if of.video else 4
    return of._replace(hidden=64, inner=96, heads=8, kv_heads=kv_heads, tokens=8, head_dim=16, experts=of.experts // 2)


def marks(leaf: torch.Tensor) -> dict[str, bool]:
    """Of the node that adds to the leaf's gradient, as long as a graph has it."""
    with torch.enable_grad():
        return leaf.expand_as(leaf).grad_fn.next_functions[0][0].metadata


@pytest.mark.parametrize("name", training.LAYERS)
def test_a_step_of_libraries_is_a_step_of_weft(name: str) -> None:
    """The result, and of a training step the gradients of x and of every weight. Of the router each side has other
    addends on a rank: their sums are compared. And the leaves of a step's graph are its own."""
    of = sizes = small_layer(name)

    def rank(world: weft.World) -> list[float]:
        step, elided = training.Step(world, sizes, 1), collectives.Elided(world)
        weight = step.layers[0].out.weight
        step.layers[0].register_forward_hook(lambda *_: marks(weight).update(seen=True))
        results = []
        for by in (collectives.Collectives(world), None):
            results.append([t.clone() for t in step(by)])
            assert marks(weight) == {} and not any(t.requires_grad for t in results[-1])
        alone(world, elided.passes(lambda: torch.cat([t.flatten() for t in step(elided)])))
        want, got = results
        names = ["y", "x", *(n for n, _ in step.layers.named_parameters())]
        assert len(got) == (1 if of.video else len(names)) and all(t.norm() > 0 for t in want)
        pairs = zip(names, got, want, strict=False)
        whole = [tuple(map(sum, map(world.exchange, pair))) if "router" in n else pair for n, *pair in pairs]
        return [distance(a, b) for a, b in whole]

    assert max(max(errors) for errors in emulate(rank, 2)) < 3e-2


def test_the_table_names_what_auto_takes_and_what_was_faster() -> None:
    us = {"dense": dict(libraries=30.0, woven=20.0, sequence=15.0, auto=20.0), "step": dict(libraries=30.0, auto=20.0)}
    shape = dict(mode="graph", M=1024, N=64, K=96, layers=2)
    taken = {"dense": dict(taken="woven"), "step": dict(E=8, top_k=2)}
    rows = [dict(shape, name=n, method=m, us=t, **taken[n]) for n, of in us.items() for m, t in of.items()]
    dense, step = tables.models([dict(rows[0], us=99.0), *rows]).splitlines()[-2:]
    assert dense == "| dense | 64 x 96 | 1,024 | 2 | graph | 30 | 20 | **1.50x** | woven | sequence, 2.00x |"
    assert step == "| step | 64 x 96, 2 of 8 experts | 1,024 | 2 | graph | 30 | 20 | **1.50x** |  |  |"


def stored() -> dict[tuple[int, str], dict[str, float]]:
    """us by method, of dense models, by number of GPUs and name."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for path in sorted(BENCH.glob("results/*/models.jsonl")):
        for r in map(json.loads, path.read_text().splitlines()):
            if "model_type" in bench.MODELS.get(r["name"], ({},))[0] and "E" not in r:
                found.setdefault((r["world"], r["name"]), {})[r["method"]] = r["us"]
    return {key: us for key, us in found.items() if "fused" in us}


@pytest.mark.parametrize("key", stored(), ids=str)
def test_what_is_predicted_fastest_was_at_most_3_percent_slower(key: tuple[int, str]) -> None:
    (world, name), us = key, stored()[key]
    config, lengths = bench.MODELS[name]
    heads = (config[f"num_{of}_heads"] for of in ("attention", "key_value"))
    of = sizes(config["hidden_size"], config["intermediate_size"], *heads, config["head_dim"], world)
    p = planner(world)
    way = LayerPredictor(p, of).best(near(sum(lengths), p.predictor.world))
    methods = {Way(w.kind, w.split, w.sms, w.norm): method for method, w in bench.ways(p.predictor.sms).items()}
    assert us[methods[way]] <= min(us.values()) / 0.97 and us[methods[way]] < us["libraries"]
