"""bench/measure/models.py and bench/measure/models_training.py give the same results on both sides on emulated
ranks."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import weft
from bench.common import collectives
from bench.measure import models as bench
from bench.measure import models_training as training
from bench.pages import tables
from tests.emulated.cases import distance
from tests.emulated.cases_models import MIXTURES, TINY, build_llama
from tests.emulated.cases_nn import emulate
from tests.planner.test_layers import planner, sizes
from weft.models import Batch, Cache
from weft.planner.layers import LayerPredictor, Way
from weft.planner.search import near

BENCH = Path(__file__).parents[2] / "bench"


HALF, FLOAT16 = 4e-3, torch.float16


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_libraries_and_the_decoder_give_the_same(kind: str) -> None:
    """The model has not run a forward pass, so it has no table of rotary positions yet."""
    config, lengths, ids = MIXTURES[kind], (7, 4), torch.arange(11) * 5 % 96

    def rank(world: weft.World) -> float:
        model = build_llama(world, config, dtype=FLOAT16)
        cache = Cache(config, world=world, slots=2, max_len=7, dtype=FLOAT16)
        layout = model.layout(Batch.prefill(lengths), cache, "sequence")
        with torch.no_grad():
            hidden_with = functools.partial(bench.mixture_by_libraries, model, ids, layout)
            actual = hidden_with(collectives.Collectives(world)).clone()
            expected = model.hidden(ids, layout)
            elided = collectives.Elided(world)
            alone(world, elided.passes(lambda: hidden_with(elided)))
        return distance(actual, expected)

    assert max(emulate(rank, 2)) < HALF


def alone(world: weft.World, fn: Callable[[], torch.Tensor]) -> None:
    """Run a pass without communication, with the same values: rank 0 runs one more pass than the other ranks, which
    therefore cannot answer."""
    result = fn().clone()
    if world.rank == 0:
        assert torch.equal(fn(), result)
    world.synchronize()


def test_a_dense_pass_without_communication_is_of_this_ranks_parts() -> None:
    config, ids = TINY, torch.arange(11) * 5 % 96

    def rank(world: weft.World) -> list[float]:
        model = build_llama(world, config, dtype=FLOAT16)
        cache = Cache(config, world=world, slots=2, max_len=7, dtype=FLOAT16)
        layout = model.layout(Batch.prefill((7, 4)), cache, "plain")
        with torch.no_grad():
            whole = model.hidden(ids, layout).clone()
            alone(world, lambda: model.hidden(ids, layout, collectives.norm_alone))
            return [distance(model.hidden(ids, layout, collectives.norm_alone), whole)]

    one, two = emulate(rank, 1), emulate(rank, 2)
    assert one == [[0.0]] and min(min(two)) > 0.01


def test_a_dense_model_runs_by_every_method_and_auto() -> None:
    arguments = argparse.Namespace(layers=1, methods=["fused", "woven own"])

    def rank(world: weft.World) -> dict[str, str]:
        plans = bench.Bench(arguments, world).plans(build_llama(world, TINY), 16)
        return {method: plan.kind for method, plan in plans.items()}

    assert emulate(rank, 2) == [{"libraries": "plain", "fused": "fused", "woven own": "woven"}] * 2


def once(fns: dict[str, Callable[[], object]], **_: object) -> dict[str, float]:
    """Call every function once, instead of timing it."""
    return {name: 1.0 + (fn() is None) for name, fn in fns.items()}


METHODS = {
    "LLaMA2-7B": ["libraries", "woven", tables.ALONE, "auto"],
    "Mixtral-8x7B": ["libraries", "sequence", tables.ALONE, "auto"],
}


@pytest.mark.parametrize("name", METHODS)
def test_a_model_is_measured_by_every_method(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whole measurement runs, and only the clock is replaced."""
    config, _ = bench.MODELS[name]
    small = {key: value for key, value in TINY.items() if key not in ("vocab_size", "num_hidden_layers")}
    monkeypatch.setitem(bench.MODELS, name, (config | small | dict(vocab_size=96), (8, 8)))
    monkeypatch.setattr(bench, "time_interleaved", once)
    monkeypatch.setattr(bench, "WORDS", 96)
    arguments = argparse.Namespace(layers=1, methods=["woven"], rounds=1, out=tmp_path)
    emulate(lambda world: bench.Bench(arguments, world).run(name), 2)
    rows = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    assert [r["method"] for r in rows] == METHODS[name]
    assert all((r["error"] is None) == (r["method"] == tables.ALONE) for r in rows)


@pytest.mark.parametrize("name", training.LAYERS)
def test_a_layer_is_measured_by_both_sides_and_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.LAYERS, name, small_layer(name))
    monkeypatch.setattr(training, "time_interleaved", once)
    arguments = argparse.Namespace(layers=1, rounds=1)
    rows = emulate(lambda world: training.measure(world, name, "graph", arguments), 2)[0]
    assert [r["method"] for r in rows] == ["libraries", "auto", tables.ALONE]
    assert all(r["us"] == 1.0 and r["M"] == 8 * training.LAYERS[name].sequences for r in rows)


def small_layer(name: str) -> training.Sizes:
    layer_sizes = training.LAYERS[name]
    kv_heads = 8 if layer_sizes.video else 4
    return layer_sizes._replace(
        hidden=64, inner=96, heads=8, kv_heads=kv_heads, tokens=8, head_dim=16, experts=layer_sizes.experts // 2
    )


def marks(leaf: torch.Tensor) -> dict[str, bool]:
    """Return the object that identifies the node that adds to the leaf's gradient. The object lives as long as a graph
    refers to the node."""
    with torch.enable_grad():
        return leaf.expand_as(leaf).grad_fn.next_functions[0][0].metadata


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in training.LAYERS), ("Mixtral training", 4)])
def test_a_step_of_libraries_is_a_step_of_weft(name: str, ranks: int) -> None:
    """The results are equal, as are a training step's gradients of x and of every weight. On a rank, the two sides add
    different terms of the router's gradient, so the test compares sums over ranks. No other step uses the leaves of a
    step's graph."""
    sizes = small_layer(name)

    def rank(world: weft.World) -> list[float]:
        step, elided = training.Step(world, sizes, 1), collectives.Elided(world)
        weight = step.layers[0].out.weight
        step.layers[0].register_forward_hook(lambda *_: marks(weight).update(seen=True))
        results = []
        for side_collectives in (collectives.Collectives(world), None):
            results.append([t.clone() for t in step(side_collectives)])
            assert marks(weight) == {} and not any(t.requires_grad for t in results[-1])
        alone(world, elided.passes(lambda: torch.cat([t.flatten() for t in step(elided)])))
        expected, actual = results
        names = ["y", "x", *(n for n, _ in step.layers.named_parameters())]
        assert len(actual) == (1 if sizes.video else len(names)) and all(t.norm() > 0 for t in expected)
        pairs = zip(names, actual, expected, strict=False)
        whole = [tuple(map(sum, map(world.exchange, pair))) if "router" in n else pair for n, *pair in pairs]
        return [distance(a, b) for a, b in whole]

    assert max(max(errors) for errors in emulate(rank, ranks)) < 3e-2


def heads_in_float64(layer_sizes: training.Sizes, qkv: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return causal attention of one rank's heads, [M, .. D], from its queries, keys and values."""
    q, k, v = (
        t.view(layer_sizes.sequences, layer_sizes.tokens, -1, layer_sizes.head_dim).transpose(1, 2)
        for t in qkv.split(
            [
                n // ranks * layer_sizes.head_dim
                for n in (layer_sizes.heads, layer_sizes.kv_heads, layer_sizes.kv_heads)
            ],
            1,
        )
    )
    k, v = (t.repeat_interleave(layer_sizes.heads // layer_sizes.kv_heads, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * layer_sizes.head_dim**-0.5
    later = torch.ones(layer_sizes.tokens, layer_sizes.tokens).triu(1).bool()
    return (
        (scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
        .transpose(1, 2)
        .reshape(layer_sizes.sequences * layer_sizes.tokens, -1)
    )


def experts_in_float64(
    x: torch.Tensor, routing: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, block: int
) -> torch.Tensor:
    """Return the part of a rank's result that its columns of the experts contribute. routing is [M, experts of the
    rank]."""
    inner, total = w2.shape[2], torch.zeros_like(x)
    for e in range(len(w2)):
        gate, up = (x @ w13[e].flatten(0, -2).t()).view(len(x), -1, 2, block).unbind(2)
        hidden = (F.silu(gate) * up).reshape(len(x), -1)[:, :inner]
        total = total + routing[:, e, None] * (hidden @ w2[e].t())
    return total


def test_experts_over_two_groups_train_as_the_whole_layer() -> None:
    """With EP 2 x TP 2 on four ranks, both sides of the benchmark compute the whole layer's result and the gradients of
    x and of every weight."""
    ranks, layer_sizes = 4, training.LAYERS["Mixtral training"]
    layer_sizes = layer_sizes._replace(
        hidden=64, inner=96, heads=16, kv_heads=8, sequences=2, tokens=10, head_dim=16, experts=4
    )

    def whole(world: weft.World, step: training.Step) -> list[torch.Tensor]:
        """Return this rank's part of every tensor."""
        layer, me = step.layers[0], world.rank
        assert (layer.mlp.split.experts, layer.mlp.split.columns) == (layer_sizes.experts // 2, layer_sizes.inner // 2)
        rank_tensors = [t.detach().clone() for t in (step.x, step.dy, *step.layers.parameters())]
        (xs, dys, *weights) = (
            [t.double().requires_grad_() for t in every] for every in zip(*world.exchange(rank_tensors), strict=True)
        )
        named = dict(zip((name.removeprefix("0.") for name, _ in step.layers.named_parameters()), weights, strict=True))
        x = torch.cat(xs)
        y = F.rms_norm(x, x.shape[1:])
        parts = zip(named["qkv.weight"], named["out.weight"], strict=True)
        x = x + sum(heads_in_float64(layer_sizes, y @ qkv.t(), ranks) @ out.t() for qkv, out in parts)
        y = F.rms_norm(x, x.shape[1:])
        top = (
            torch.cat(  # every rank has a separate copy of the router, for its tokens
                [t @ router.t() for t, router in zip(y.chunk(ranks), named["mlp.router"], strict=True)]
            )
            .softmax(1)
            .topk(training.TOP_K)
        )
        routing = torch.zeros(len(x), layer_sizes.experts, dtype=torch.float64)
        routing = routing.scatter(1, top.indices, top.values / top.values.sum(1, keepdim=True)).chunk(2, 1)
        parts = zip(named["mlp.w13"], named["mlp.w2"], strict=True)
        block = world.backend.scale.interleave
        x = x + sum(experts_in_float64(y, routing[r // 2], *w, block) for r, w in enumerate(parts))
        wanted = [t[me] for t in (xs, *weights)]
        return [x.chunk(ranks)[me].detach(), *torch.autograd.grad(x, wanted, torch.cat(dys).detach())]

    def rank(world: weft.World) -> dict[str, float]:
        step = training.Step(world, layer_sizes, 1)
        names, expected = ["y", "x", *(n for n, _ in step.layers.named_parameters())], whole(world, step)
        errors = {}
        for side, side_collectives in (("weft", None), ("libraries", collectives.Collectives(world))):
            actual = [t.clone() for t in step(side_collectives)]
            world.synchronize()
            for name, a, b in zip(names, actual, expected, strict=True):
                if "router" in name:  # the libraries' gradient covers all tokens
                    a, b = (sum(world.exchange(t.double())) for t in (a, b))
                errors[f"{side}: {name}"] = distance(a, b)
        return errors

    for errors in emulate(rank, ranks):
        assert max(errors.values()) < 3e-2, errors


def test_the_table_names_the_plan_of_auto_and_faster_ones() -> None:
    us = {
        "dense": {"libraries": 30.0, "woven": 20.0, "sequence": 15.0, "auto": 20.0, tables.ALONE: 10.0},
        "step": dict(libraries=30.0, auto=20.0),
    }
    shape = dict(mode="graph", M=1024, N=64, K=96, layers=2)
    taken = {"dense": dict(taken="woven"), "step": dict(E=8, top_k=2)}
    rows = [dict(shape, name=n, method=m, us=t, **taken[n]) for n, times in us.items() for m, t in times.items()]
    before = [dict(rows[0], us=99.0, date="then"), dict(rows[0], method="fused", us=1.0, date="then")]
    dense, step = tables.models([*before, *rows]).splitlines()[-2:]
    assert dense == (
        "| dense | 64x96 | 1,024 | 2 | graph | 30 | 20 | **1.50x** | 10 | 3.00x | 50% | woven | sequence, 2.00x |"
    )
    assert step == "| step | 64x96, 2 of 8 | 1,024 | 2 | graph | 30 | 20 | **1.50x** |  |  |  |  |  |"


def stored() -> dict[tuple[int, str], dict[str, float]]:
    """Return the times by method of each dense model on each number of GPUs, from the latest run that timed every
    method."""
    runs: dict[tuple[int, str, str], dict[str, float]] = {}
    for path in sorted(BENCH.glob("results/*/models.jsonl")):
        for r in map(json.loads, path.read_text().splitlines()):
            if "model_type" in bench.MODELS.get(r["name"], ({},))[0] and "E" not in r and r["method"] != tables.ALONE:
                runs.setdefault((r["world"], r["name"], r["date"]), {})[r["method"]] = r["us"]
    return {key[:2]: us for key, us in runs.items() if set(bench.ways(0)) <= set(us)}


@pytest.mark.parametrize("key", stored(), ids=str)
def test_the_plan_predicted_fastest_was_at_most_3_percent_slower(key: tuple[int, str]) -> None:
    (world, name), us = key, stored()[key]
    config, lengths = bench.MODELS[name]
    heads = (config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    decoder_sizes = sizes(config["hidden_size"], config["intermediate_size"], *heads, config["head_dim"], world)
    p = planner(world)
    way = LayerPredictor(p, decoder_sizes).best(near(sum(lengths), p.predictor.world))
    methods = {Way(w.kind, w.split, w.sms, w.norm): method for method, w in bench.ways(p.predictor.sms).items()}
    assert us[methods[way]] <= min(us.values()) / 0.97 and us[methods[way]] < us["libraries"]
