"""bench/measure/eager.py writes rows for every op and size, and the rows of "auto" contain its plan."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from bench.common.program import Program
from bench.measure import eager
from weft.plans import Sequential


def called_once(fns: dict[str, Callable[[], object]], **_: object) -> dict[str, float]:
    return {name: 1.0 for name, fn in fns.items() if fn() is not None}


def test_every_case_has_a_row_of_both_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["eager.py", "--out", str(tmp_path)])
    monkeypatch.setattr(eager, "MODELS", {64: 128})
    monkeypatch.setattr(eager, "ROWS", (8, 16))
    monkeypatch.setattr(eager, "time_interleaved", called_once)
    monkeypatch.setattr(eager.peers, "cublas_nccl", lambda *_: lambda: "library")
    monkeypatch.setattr(Program, "end", lambda run: None)

    def main(world: weft.World) -> None:
        monkeypatch.setattr(weft, "init", lambda: world)
        eager.main()

    weft.spmd(main, 1, backend="emulated")
    rows = [json.loads(line) for line in (tmp_path / "eager.jsonl").read_text().splitlines()]
    sizes = [(128 * 2, 64), (64, 128), (64, 128)]  # N and K on one rank
    expected = [(op, way, m, *size) for op, size in zip(eager.OPS, sizes, strict=True) for m in (8, 16) for way in ("library", "auto")]  # fmt: skip
    assert [(r["op"], r["method"], r["M"], r["N"], r["K"]) for r in rows] == expected
    assert {(r["method"], r["plan"]) for r in rows} == {("library", None), ("auto", Sequential().to_json())}
