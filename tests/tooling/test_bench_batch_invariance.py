"""bench/measure/batch_invariance.py runs on emulated ranks with only the clock replaced: all methods compute the same
layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

import weft
from bench.measure import batch_invariance as bench
from weft.world import World

SMALL = bench.Model(hidden=64, queries=64, keys_values=32, intermediate=64)


def test_all_methods_compute_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(fns: Mapping[object, Callable[[], object]], **_: object) -> dict[object, float]:
        for call in fns.values():
            call()
        return {name: float(i + 1) for i, name in enumerate(fns)}

    monkeypatch.setattr(bench, "time_interleaved", clock)
    monkeypatch.setattr(bench, "TILES", {"16x32": (16, 32, 4, 2)})

    def main(world: weft.World) -> dict[str, tuple[float, float]]:
        measured = bench.Bench(World(world.backend, batch_invariant=True), world)
        with torch.no_grad():
            return measured.measure(SMALL, bench.weights_of(SMALL, world), 3)

    for measured in weft.spmd(main, 2, backend="emulated"):
        assert set(measured) == {
            *("weft norm", "weft rows", "weft shards", "rebuilt"),
            *("auto norm", "auto rows", "auto shards", "libraries"),
        }
