"""The table of sizes drawn at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.common import shapes
from bench.measure import run
from bench.pages.drawn_page import TITLE, drawn
from bench.pages.report import HASH
from weft.planner.predict import Predictor
from weft.planner.profile import shipped
from weft.plans import Plan, Sequential

RESULTS = Path(__file__).parents[2] / "bench/results"


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


ON_TWO = stored("nvidia-h200-x2/drawn.jsonl")
ROWS = stored("nvidia-h200-x4/drawn.jsonl")


def runs_of(
    *commits: str, mode: str = "graph", rows: list[dict[str, Any]] = ROWS
) -> dict[tuple[str, int, int, int], dict[str, dict[str, Any]]]:
    """Return the rows of a mode by method, for each op and size that these commits ran."""
    runs: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row.get("mode", mode) == mode and row["commit"][:HASH] in commits:
            runs.setdefault((row["op"], row["M"], row["N"], row["K"]), {})[row["method"]] = row
    return runs


def ratios_of(commit: str, mode: str = "graph", rows: list[dict[str, Any]] = ROWS) -> list[float]:
    """Return how many times as fast as the fastest library "auto" was, for each op and size that a commit ran."""
    ratios = []
    for methods in runs_of(commit, mode=mode, rows=rows).values():
        us = {method: row["us"] for method, row in methods.items()}
        ratios.append(min(time for method, time in us.items() if method != "auto") / us["auto"])
    return ratios


def rows_of(m: int, us: dict[str, float], date: str = "2026-01-01", commit: str = "aaaa") -> list[dict[str, Any]]:
    fixed = dict(op="all_gather_matmul", M=m, N=8, K=16, mode="graph", seed=1, date=date, commit=commit)
    return [dict(fixed, method=method, us=time) for method, time in us.items()]


def test_auto_is_compared_with_nccl_and_with_the_best_library_of_the_newest_run() -> None:
    rows = rows_of(128, {"sequential": 200.0, "auto": 100.0, "torch symm_mem": 90.0})
    rows += rows_of(256, {"sequential": 100.0, "auto": 400.0})
    rows += rows_of(256, {"sequential": 100.0, "auto": 50.0}, date="2026-01-02", commit="bbbb")
    line = "| 1 | all-gather + GEMM | graph | **2.00x** | 1.34x | 0.90x | 1 of 2 | `aaaa`, `bbbb` |"
    text = drawn(rows)
    assert line in text
    assert text.endswith("Seed 1, below 0.98x of the best library: all-gather + GEMM 128x8x16 (graph) 0.90x, 100 us.")


def test_the_stored_sizes_are_those_of_their_seeds() -> None:
    rows = ROWS + ON_TWO
    for seed in {row["seed"] for row in rows}:
        sizes = shapes.drawn(seed)
        assert run.arguments(["--drawn", str(seed), "--out", "out"]).sizes == sizes
        assert {row["name"] for row in rows if row["seed"] == seed} == {shape.name for shape in sizes}


def test_the_title_states_the_graphs_of_the_later_seed() -> None:
    """Before the planner was changed for three of them."""
    ratios = ratios_of("91898b0e")
    below = sorted(ratio for ratio in ratios if ratio < 0.98)
    text = " ".join(TITLE.split())
    assert f"{len(ratios) - len(below)} of its {len(ratios)} graphs" in text
    assert "the others {:.2f}x, {:.2f}x and {:.2f}x".format(*below) in text


def test_the_title_states_the_graphs_and_eager_calls_of_the_seed_after_the_last_change() -> None:
    graphs, eager = (ratios_of("9b7f3d99", mode) for mode in ("graph", "eager"))
    reached = [(sum(ratio >= 0.98 for ratio in ratios), len(ratios)) for ratios in (graphs, eager)]
    text = " ".join(TITLE.split())
    assert "{} of its {} graphs and {} of its {} eager calls reached 0.98x".format(*reached[0], *reached[1]) in text


def test_the_title_states_the_newest_eager_calls() -> None:
    drawn_sizes = ratios_of("15d7f5a7", "eager", ON_TWO)
    on_two = ratios_of("15d7f5a7", "eager", stored("nvidia-h200-x2/eager.jsonl"))
    on_four = ratios_of("ebf52f65", "eager", stored("nvidia-h200-x4/eager.jsonl"))
    reached = [(sum(ratio >= 0.98 for ratio in ratios), len(ratios)) for ratios in (drawn_sizes, on_two, on_four)]
    text = " ".join(TITLE.split())
    assert "{} of its {} eager calls reached 0.98x. Of".format(*reached[0]) in text
    assert "{} of {} reached 0.98x of cuBLAS and NCCL".format(*reached[1]) in text
    assert "On 4 GPUs {} of {} did".format(*reached[2]) in text


def test_a_tenth_of_long_calls_take_longer_than_predicted_by_what_rivals_states() -> None:
    """The docstring of `Planner.rivals`: 68 calls of more than 150 us, and the errors relative to sequential calls."""
    predictor = Predictor(shipped("nvidia-h200-x4"))
    errors = []
    for (op, *mnk), methods in runs_of("506bc86a", "91898b0e").items():
        plan, us = Plan.from_json(methods["auto"]["plan"]), methods["auto"]["us"]
        if us > 150 and plan != Sequential():
            predicted = predictor.time(op, plan, *mnk) / predictor.time(op, Sequential(), *mnk)
            errors.append(us / methods["sequential"]["us"] / predicted - 1)
    tenth = sorted(errors)[-(len(errors) // 10 + 1) :]
    assert (len(errors), f"{tenth[0]:.0%}", f"{tenth[-1]:.0%}") == (68, "15%", "23%")
