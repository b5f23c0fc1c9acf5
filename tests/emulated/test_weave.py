"""The tests check which calls of a woven layer overlap, where a batch is split, and which plan "auto" chooses from the
measured table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.backends.emulated import spmd
from weft.models import Batch, Llama
from weft.nn import weave
from weft.nn.weave import LayerPlan, LayerTimes, Table, halves
from weft.planner.table import layers

TINY = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4
)  # fmt: skip


# -- the order ---------------------------------------------------------------------------------------------------------


def stages(world: weft.World, parts: int, log: list[tuple[str, int, int, str]]) -> list[torch.Tensor]:
    """Run four stages. Each stage is a GEMM followed by an all-reduce that takes about as long as the GEMM."""
    rows, width = 64 // parts, 64
    w = torch.full((width, width), 1 / 128)
    outs = [world.empty((rows, width), torch.float32) for _ in range(parts)]
    ys = [torch.full((rows, width), float(i + 1)) for i in range(parts)]
    main = world.current_stream()

    def compute(k: int, i: int, y: torch.Tensor) -> torch.Tensor:
        log.append(("compute", k, i, world.current_stream().name))
        world.call(lambda: torch.mm(y, w, out=outs[i]), [y, w], [outs[i]], main)
        return outs[i]

    def reduce(k: int, i: int, partial: torch.Tensor) -> torch.Tensor:
        log.append(("reduce", k, i, world.current_stream().name))
        y = world.empty((rows, width), torch.float32)
        world.all_reduce(partial, world.current_stream())
        world.copy(y, partial, world.current_stream())
        return y

    stage_fns = [lambda i, y, k=k: compute(k, i, y) for k in range(4)]
    ys = weave.run(world, ys, stage_fns, reduce)
    kept = [world.empty((rows, width), torch.float32) for _ in ys]
    for y, to in zip(ys, kept, strict=True):
        world.call(lambda y=y, to=to: to.copy_(y), [y], [to], main)
    world.synchronize()
    return kept


def end_of(parts: int) -> tuple[float, list[Any], list[Any]]:
    """Return the virtual time at which the last stage ends, the calls in order, and the results of rank 0."""
    logs: list[list[Any]] = [[], []]
    results, report = spmd(lambda b: stages(weft.World(b), parts, logs[b.rank]), 2)
    return max(s.end for s in report.timeline), logs[0], results[0]


def test_one_part_is_reduced_under_the_others_compute() -> None:
    whole, _, alone = end_of(1)
    woven, log, halves = end_of(2)
    assert woven < 0.75 * whole
    order = [(kind, k, i) for k in range(4) for i in (0, 1) for kind in ("compute", "reduce")]
    assert [entry[:3] for entry in log] == order
    assert {entry[3] for entry in log if entry[0] == "reduce"} == {"weave"}
    assert {entry[3] for entry in log if entry[0] == "compute"} == {"main"}
    assert torch.equal(halves[0], alone[0][:32]) and torch.equal(halves[1], 2 * halves[0])


# -- where to split ----------------------------------------------------------------------------------------------------


def waves(programs: int) -> Callable[[int, int], float]:
    return lambda tiles, k: -(-tiles // programs) * k


def test_the_model_of_waves() -> None:
    p = LayerTimes.of_tiles([(256, 10)], [(512, 3), (256, 1)], tile=(128, 256), time=waves(4), rows=1024)
    assert p.step == 128 and len(p.attention) == 8
    assert p.attention == (10, 10, 10, 10, 20, 20, 20, 20)
    assert p.mlp == (4, 4, 7, 7, 3 * 3 + 2, 3 * 3 + 2, 4 * 3 + 2, 4 * 3 + 2)
    assert p.layer(128, 129) == 10 + 10 + 4 + 4
    assert p.layer(128, 2048) == 10 + 40 + 4 + 28, "times past the table's end must grow in proportion"


def test_the_smart_split_adds_no_waves() -> None:
    """For ten row tiles of one column, four programs need 3 waves without a split, 2 + 2 waves with an even split, and
    2 + 1 waves with a split after 4 or 8 row tiles."""
    p = LayerTimes.of_tiles([(256, 1)], [(256, 1)], tile=(128, 256), time=waves(4), rows=1280)
    assert p.layer(640, 640) == 2 * (2 + 2)
    assert p.split(1280) in (512, 768)
    assert p.layer(p.split(1280), 1280 - p.split(1280)) == 2 * 3


def test_a_long_norm_wants_even_parts() -> None:
    """The GEMMs alone would be best split after 4 or 6 of 10 row tiles."""
    p = LayerTimes.of_tiles([(256, 1)], [(256, 1)], tile=(128, 256), time=waves(4), rows=1280)
    measured = LayerTimes(128, p.attention, p.mlp, tuple(float(i * i) for i in range(1, 11)))
    assert measured.split(1280) == 640


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 5000), n=st.integers(1, 9), programs=st.integers(1, 132), norm=st.floats(0, 50)
)  # fmt: skip
def test_no_split_at_whole_steps_is_better(tokens: int, n: int, programs: int, norm: float) -> None:
    p = LayerTimes.of_tiles([(n * 200, 7)], [(n * 300, 9)], tile=(128, 256), time=waves(programs), rows=2048)
    p = LayerTimes(p.step, p.attention, p.mlp, tuple(norm * i for i in range(1, 17)))
    split = p.split(tokens)
    assert 0 < split < tokens
    if tokens > 128:
        best = min(p.layer(s, tokens - s) for s in range(128, tokens, 128))
        assert split % 128 == 0 and p.layer(split, tokens - split) <= 1.01 * best


# -- plans -------------------------------------------------------------------------------------------------------------


def test_the_plan_of_auto() -> None:
    def rank(world: weft.World) -> None:
        model = Llama(TINY, world=world)
        name = weave.name_of(world, 64, 96)
        assert model.plan("auto", 5000) == LayerPlan("plain"), "without measurements, the plan must be plain"
        table = Table(
            ((16, LayerPlan("fused")), (256, LayerPlan("woven")), (512, LayerPlan("woven", sms=100)), (4096, LayerPlan("sequence"))),
            LayerTimes(128, (1, 2, 9, 10), (1, 2, 9, 10)),
            ((1024, LayerPlan("fused")),),
        )  # fmt: skip
        assert Table.from_rows(table.to_rows(2, 64, 96)) == table
        weave.learn_layers(name, table)
        try:
            assert model.plan("auto", 15) == LayerPlan("plain")
            assert model.plan("auto", 16) == model.plan("auto", 255) == LayerPlan("fused")
            assert model.plan("auto", 512).sms == 100
            assert model.plan("auto", 300) == LayerPlan("woven", 128), "split at a step of the GEMMs' profile"
            assert model.plan("auto", 4097) == LayerPlan("sequence")
            eager = [model.plan("auto", tokens, "eager").kind for tokens in (512, 4097)]
            assert eager == ["plain", "fused"], "eager launches have measurements of their own"
        finally:
            del weave._learned[name]

    weft.spmd(rank, 2, backend="emulated")


def test_a_woven_plan_gets_a_split() -> None:
    def rank(world: weft.World) -> None:
        model = Llama(TINY, world=world)
        assert model.plan("woven", 100) == LayerPlan("woven", 50), (
            "without measurements, the split must be in the middle"
        )
        assert model.plan(LayerPlan("woven", 7), 100).split == 7
        assert model.plan("woven", 1) == LayerPlan("fused"), "a single token cannot be split"
        tiles = model.plan(LayerPlan("woven", sms=2), 100)
        assert tiles.split % 16 == 0 and tiles.sms == 2
        attention, mlp = model.gemms()
        assert attention == [(3 * 64 // 2, 64), (64, 32)] and mlp == [(96, 64), (64, 48)]

    weft.spmd(rank, 2, backend="emulated")


def test_invalid_plans_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kind 'knitted' is not one of \['plain', 'fused', 'woven', 'sequence'\]"):
        LayerPlan("knitted")
    for kind, options in (("fused", dict(split=3)), ("sequence", dict(sms=4)), ("sequence", dict(norm="one_shot"))):
        with pytest.raises(ValueError, match="only a woven layer is split|a sequence-parallel layer take no sms"):
            LayerPlan(kind, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [0, 3])
def test_one_or_two_parts_are_woven(parts: int) -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(ValueError, match=f"{parts} parts: one or two are woven"):
            weave.run(world, [torch.zeros(2, 2)] * parts, [lambda i, y: y], lambda k, i, y: y)

    weft.spmd(rank, 1, backend="emulated")


# -- batches -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 6))
def test_a_split_keeps_every_token(data: Any, count: int) -> None:
    lengths = tuple(data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)))
    starts = tuple(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    batch = Batch(lengths, starts, tuple(range(count)))
    split = data.draw(st.integers(0, batch.tokens))

    def tokens(b: Batch) -> list[tuple[int, int]]:
        return [(s, p) for n, p0, s in zip(b.lengths, b.starts, b.slots, strict=True) for p in range(p0, p0 + n)]

    prefix, suffix = batch.split(split)
    assert prefix.tokens == split and tokens(prefix) + tokens(suffix) == tokens(batch)


def test_invalid_batches_are_refused() -> None:
    for lengths, starts, slots in (
        ((1, 2), (0,), (0, 1)),
        ((0,), (0,), (0,)),
        ((1,), (-1,), (0,)),
        ((1, 1), (0, 0), (3, 3)),
    ):
        with pytest.raises(ValueError, match="Batch"):
            Batch(lengths, starts, slots)


def test_halves_are_whole_tiles_if_there_are_two() -> None:
    assert [halves(t) for t in (2, 255, 256, 300, 640, 1664, 2048)] == [1, 127, 128, 128, 256, 768, 1024]


RESULTS = Path(__file__).parents[2] / "bench/results"


@pytest.mark.parametrize("world", [2, 4])
def test_the_shipped_table_selects_the_fastest_measured_plan(world: int) -> None:
    """For every size and mode, the newest run's plan is within 1% of the fastest method in a graph; in eager mode, a
    pass without weaving is chosen if it is within 2%. Woven plans with different SMs or norms are different methods."""
    table = Table.from_rows(layers("nvidia-h200", world, 8192, 28672))
    rows = [json.loads(line) for line in (RESULTS / f"nvidia-h200-x{world}/decoder.jsonl").read_text().splitlines()]
    runs: dict[tuple[str, int], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["plan"] and row["name"].startswith("70B") and not row["method"].endswith("cuBLAS"):
            runs[row["mode"], row["M"]][row["date"]].append(row)
    assert len(runs) > 10
    for (mode, tokens), by_date in runs.items():
        newest = by_date[max(by_date)]
        plan = table.choose(tokens, mode)
        plan_times = [
            r["us"]
            for r in newest
            if (p := json.loads(r["plan"])) and (p["kind"], p["sms"], p["norm"]) == (plan.kind, plan.sms, plan.norm)
        ]
        assert plan_times and min(plan_times) <= (1.01 if mode == "graph" else 1.021) * min(r["us"] for r in newest), (
            tokens,
            plan,
        )
