"""The random calls of tests/gpu/gpu_fuzz.py on emulated ranks. All calls are right, and the report of a wrong call
names it and can be used to repeat it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.gpu import gpu_fuzz
from tests.gpu.fuzz_calls import ROUTINGS, TRAINED, Heads, Kind, Layer, Round
from tests.gpu.gpu_record import fuzzed
from weft.op import REGISTRY

OPS = set(gpu_fuzz.OPS)
SUM, NORM = "all_reduce", "all_reduce_rms_norm"


def fuzz(
    out: Path, seed: int, only: Sequence[int] = (), calls: int = 24, ranks: int = 2, kind: str = "", **options: Any
) -> dict[str, Any]:
    rounds = gpu_fuzz.Rounds(calls=calls, only=only, kind=kind)
    return weft.spmd(
        lambda world: gpu_fuzz.run(world, out, seed, rounds, gpu_fuzz.SMALL), ranks, backend="emulated", **options
    )[0]


@pytest.mark.parametrize(
    "seed, ranks", [(1, 2), *(pytest.param(s, r, marks=pytest.mark.gate) for s in range(2, 6) for r in (2, 3, 4))]
)
def test_calls_of_many_kinds_are_right(seed: int, ranks: int, tmp_path: Path) -> None:
    results = fuzz(tmp_path, seed, ranks=ranks)
    assert not results["wrong"] and results["calls"] >= 24 and 0 < results["largest"] < 0.7
    assert json.loads((tmp_path / f"fuzz{ranks}.json").read_text()) == results
    assert sum(results["kinds"].values()) == results["calls"] and results["gpus"] == ranks


def of_every_kind(world: weft.World) -> list[str]:
    """Return the errors of one round of every kind."""
    fuzz, wrong = gpu_fuzz.Fuzz(world, 5, gpu_fuzz.SMALL), []
    for index, kind in enumerate(fuzz.kinds):
        fuzz.run(fuzz.draw(index, kind))
        wrong += [fuzz.described(r) for r, _, error in fuzz.verify() if not error <= 1]
    return wrong


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.gate)])
def test_every_kind_over_gloo(ranks: int) -> None:
    """Only sequential plans run, so this test covers the drawn calls, their arguments and the comparison."""
    assert weft.spmd(of_every_kind, ranks, backend="gloo") == [[]] * ranks


@pytest.mark.gate
@pytest.mark.parametrize("part", range(6))
def test_every_kind_on_emulated_ranks(part: int) -> None:
    def main(world: weft.World) -> list[str]:
        fuzz, wrong = gpu_fuzz.Fuzz(world, 7, gpu_fuzz.SMALL), []
        for index, kind in list(enumerate(fuzz.kinds))[part::6]:
            fuzz.run(fuzz.draw(index, kind))
            wrong += [fuzz.described(r) for r, _, error in fuzz.verify() if not error <= 1]
        return wrong

    assert weft.spmd(main, 2, backend="emulated") == [[]] * 2


def rounds(seed: int, count: int, kind: Kind | None = None, counts: dict[str, int] | None = None) -> list[Round]:
    def main(world: weft.World) -> list[Round]:
        drawn = gpu_fuzz.Fuzz(world, seed, gpu_fuzz.SMALL, counts)
        return [drawn.draw(i, kind) for i in range(count)]

    first_rank, second_rank = weft.spmd(main, 2, backend="emulated")
    assert first_rank == second_rank, "every rank must draw the same calls"
    return first_rank


def test_the_drawn_calls() -> None:
    drawn = rounds(5, 1000)
    assert drawn == rounds(5, 1000) and drawn != rounds(6, 1000)
    assert {r.kind.op for r in drawn} == OPS and {r.kind.op for r in drawn if r.kind.gradients} == set(TRAINED)
    for op in OPS & set(REGISTRY):
        plans = {r.kind.plan for r in drawn if r.kind.op == op and not r.kind.gradients}
        assert plans == {"auto", *REGISTRY[op].kinds} - {"multicast"}
        assert all(r.plan == r.kind.plan or r.plan.kind == r.kind.plan for r in drawn if r.kind.op == op)
    assert {r.world for r in drawn if not r.kind.parts} == {0} and {r.world for r in drawn if r.kind.parts} == {1, 2}
    rows = {r.rows for r in drawn if len(r.rows) == 2}
    assert (0, 0) in rows and any(min(m) == 0 < max(m) for m in rows) and any(0 < min(m) < max(m) for m in rows)
    calls = [c for r in drawn for c in r.calls]
    assert {c.late for c in calls} == {-1, 0, 1} and {c.stream for c in calls} == {"", *gpu_fuzz.STREAMS}
    assert {c.into for c in calls} == {r.whole for r in drawn} == {bool(r.replays) for r in drawn} == {False, True}
    assert {r.routing for r in drawn} == set(ROUTINGS)


def test_a_rounds_weights_live_until_all_streams_are_joined() -> None:
    """Otherwise the next round's weights could overwrite them while a call on another stream reads them."""

    def main(world: weft.World) -> list[bool]:
        fuzz, alive = gpu_fuzz.Fuzz(world, 5, gpu_fuzz.SMALL), []
        kind, join = Kind("tensor_parallel_experts", "sequential"), fuzz.join
        fuzz.run(fuzz.draw(0, kind))
        assert fuzz.checked is not None
        weights = [weakref.ref(w) for w in fuzz.checked.calls.own_weights]

        def note_and_join() -> None:
            alive.extend(weight() is not None for weight in weights)
            join()

        fuzz.join = note_and_join  # type: ignore[method-assign]
        fuzz.run(fuzz.draw(1, kind))
        return alive

    assert weft.spmd(main, 2, backend="emulated") == [[True, True]] * 2


def test_kinds_with_few_recorded_calls_are_drawn_most() -> None:
    """Kinds can be drawn again from a run's own results."""
    many = {str(Kind(op, "auto")): 100_000 for op in OPS if op != SUM}
    drawn = [str(r.kind) for r in rounds(5, 1000, counts=many)]
    assert not set(drawn) & set(many) and drawn.count(f"{SUM} auto") > 2


def test_only_compiled_kinds_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that compile a kind are compared, but not counted. Compiling ends after half of the time, and the run ends
    when the time is up."""
    run, rounds_run = gpu_fuzz.Fuzz.run, []

    def noted(self: gpu_fuzz.Fuzz, r: Round) -> int:
        rounds_run.append(r)
        return run(self, r)

    def main(world: weft.World) -> dict[str, Any]:
        rounds = gpu_fuzz.Rounds(seconds=100, counts={str(Kind(SUM, "auto")): 9})
        fuzz_run = gpu_fuzz.Run(world, tmp_path, 3, rounds, gpu_fuzz.SMALL)
        monkeypatch.setattr(fuzz_run, "over", lambda seconds: len(rounds_run) > (6 if seconds == 50 else 30))
        fuzz_run.compile()
        fuzz_run.go()
        fuzz_run.look()
        return fuzz_run.results

    monkeypatch.setattr(gpu_fuzz.Fuzz, "run", noted)
    (results,) = weft.spmd(main, 1, backend="emulated")
    compiling = [r for r in rounds_run if r.index == gpu_fuzz.FIRST]
    assert (
        7 <= len(compiling) <= 8
        and {len(r.calls) for r in compiling} == {1}
        and {r.replays for r in compiling} <= {0, 1}
    )
    assert [str(r.kind) for r in compiling if not r.replays] == results["compiled"]
    counted = [r for r in rounds_run if r.index != gpu_fuzz.FIRST]
    assert 0 < len(counted) < 40 and {str(r.kind) for r in counted} <= set(results["compiled"])
    assert results["calls"] == sum(len(r.calls) * (1 + r.replays) for r in counted) and not results["wrong"]


def test_a_round_of_a_kind_does_not_depend_on_the_record() -> None:
    drawn = rounds(3, 20)
    last = drawn[-1]
    assert rounds(3, 20, last.kind, {str(last.kind): 9})[-1] == last


def test_a_wrong_call_is_named_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one rank's result is slightly wrong, but only in calls with `out`."""
    kind = Kind(SUM, "sequential")
    bad = next(r for r in rounds(3, 200, kind) if sum(r.rows) and not r.replays and r.calls[-1].into)
    right = weft.all_reduce

    def wrong(x: torch.Tensor, *, world: weft.World, out: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        y = right(x, world=world, out=out, **options)
        if out is not None and world.rank == 1:
            y[-1, -1] += 0.5 * y.float().norm() / y.numel() ** 0.5
        return y

    monkeypatch.setattr(weft, "all_reduce", wrong)
    results = fuzz(tmp_path, 3, [bad.index], kind=str(kind))
    assert results["wrong"] == sum(c.into for c in bad.calls)
    description = f"call {len(bad.calls) - 1} of seed 3, round {bad.index} --kind 'all_reduce sequential': "
    assert description in results["failed"][-1]
    assert not list(tmp_path.iterdir()), "repeated rounds must write no results"
    with pytest.raises(ValueError, match="no kind 'all_reduce quick'; there are all_gather_matmul auto, "):
        fuzz(tmp_path, 3, [1], kind="all_reduce quick")


@pytest.mark.parametrize("leaf", [0, 1])
def test_a_wrong_gradient_is_noticed(leaf: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient belongs to an operand or to a weight."""
    kind = Kind("all_gather_matmul", "sequential", gradients=True)
    index = next(r.index for r in rounds(3, 50, kind) if min(r.rows) > 1)
    right = torch.autograd.grad

    def wrong(y: torch.Tensor, leaves: Any, *operands: Any, **options: Any) -> Any:
        gradients = list(right(y, leaves, *operands, **options))
        if leaves[0].dtype != torch.float32:
            gradients[leaf] = gradients[leaf] * 1.5
        return gradients

    assert not fuzz(tmp_path, 3, [index], kind=str(kind))["wrong"]
    monkeypatch.setattr(torch.autograd, "grad", wrong)
    assert fuzz(tmp_path, 3, [index], kind=str(kind))["wrong"]


def test_a_run_that_ends_early_names_its_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    calls = 0

    def stays_away(self: gpu_fuzz.Fuzz, r: Round) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise weft.Timeout("a peer did not arrive")
        return 1

    monkeypatch.setattr(gpu_fuzz.Fuzz, "run", stays_away)
    with pytest.raises(weft.Timeout):
        fuzz(tmp_path, 1, ranks=1)
    assert "a peer did not arrive" in json.loads((tmp_path / "fuzz1.json").read_text())["ended"]
    assert "seed 1, round 2 --kind '" in capfd.readouterr().out


def test_the_recorded_calls(tmp_path: Path) -> None:
    """A record's calls are counted for each number of ranks, over all numbers of GPUs and all versions. A run's results
    contain the counts with which it drew its calls."""

    def ran(world: int, seed: int, **kinds: int) -> dict[str, Any]:
        calls = sum(kinds.values())
        return dict(world=world, seed=seed, calls=calls, wrong=0, ended="", failed=[], kinds=kinds, drawn_by={})

    first_fuzz = fuzzed([ran(4, 1, a=3, b=2), ran(2, 1, a=1)], "old", 1, {})
    both_fuzz = fuzzed([ran(4, 2, a=5)], "new", 4, first_fuzz)
    record, results = tmp_path / "gpu_record.json", tmp_path / "fuzz4.json"
    record.write_text(json.dumps(dict(fuzz=both_fuzz)))
    assert gpu_fuzz.counts_in(record, 4) == dict(a=8, b=2) and gpu_fuzz.counts_in(record, 2) == dict(a=1)
    results.write_text(json.dumps(dict(ran(4, 3, a=1), drawn_by=dict(b=7))))
    assert gpu_fuzz.counts_in(results, 4) == dict(b=7) and gpu_fuzz.counts_in(tmp_path / "none.json", 4) == {}


def test_rows_of_a_zigzag_split_alone_are_in_zigzag() -> None:
    def main(world: weft.World) -> list[str]:
        heads, form = Heads(world, 1, Layer(world, 0, 64, 32, torch.bfloat16, False, 16), 16, 16), 2
        return [heads.shape(rows, form).layout for rows in ((4, 4), (3, 4), (4, 3), (0, 7), (0, 0))]

    assert weft.spmd(main, 2, backend="emulated")[0] == ["zigzag", "zigzag", *["contiguous"] * 2, "zigzag"]
