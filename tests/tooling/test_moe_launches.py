"""The count of a layer's kernels, beside libraries: what is counted, and that the methods compute one layer."""

from __future__ import annotations

from collections import Counter

import torch

import weft
from bench.common.timing import error_of
from bench.measure import moe_launches
from bench.measure.moe import Layer, Model
from bench.measure.moe_one_gpu import by_one_launch, by_torch


def test_copies_and_fills_are_no_kernels() -> None:
    names = Counter({"moe_layer": 1, "nvjet_tst": 2, "Memcpy DtoD (Device -> Device)": 3, "Memset (Device)": 1})
    assert moe_launches.split(names) == (3, 4)


def test_the_method_of_one_launch_computes_the_layer() -> None:
    def main(world: weft.World) -> float:
        torch.manual_seed(0)
        layer = Layer(world, Model(32, 16, 4, 2), 9, 0.0)
        logits = (layer.logits(layer.xs[0]).float() * 64).sort(1).values
        assert float(logits.diff(dim=1).min()) > 0, "ties would be another layer"
        return error_of(by_one_launch(layer)(layer.xs[0]), by_torch(layer)(layer.xs[0]))

    assert max(weft.spmd(main, 1, backend="emulated")) < 1e-2


def test_libraries_of_one_gpu_are_counted_there_alone() -> None:
    def main(world: weft.World) -> set[str]:
        return set(moe_launches.methods_of(Layer(world, Model(32, 16, 4, 2), 9, 0.0), 1.0))

    (one,), two = weft.spmd(main, 1, backend="emulated"), weft.spmd(main, 2, backend="emulated")
    assert one - two[0] == {"torch", "vllm", "quack"} and "weft, one launch" in two[0] == two[1]
