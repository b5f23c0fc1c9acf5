"""The sizes that the vLLM plugin calls before requests do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.integrations.vllm_standin as standin
import weft
from tests.integrations.vllm_standin import DecoderLayer, Model
from weft.integrations.vllm import fp8, interface, layers, plugin, timing
from weft.integrations.vllm.dataflow import Flow, flow_of
from weft.integrations.vllm.row_norm_column import ROW_NORM_COLUMN, LayerTensors
from weft.ops.all_reduce.op import ALL_REDUCE_RMS_NORM

MODELS: dict[str, Any] = {
    "dense": lambda: Model(DecoderLayer),
    "gemma": lambda: Model(functools.partial(DecoderLayer, norm=standin.GemmaRMSNorm), standin.GemmaRMSNorm),
    "fp8": lambda: standin.in_fp8(Model(DecoderLayer), standin.CompressedTensorsLinearMethod()),
}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.served_by_plugin(monkeypatch):
        yield


def classes_and_flow(name: str) -> tuple[layers.Classes, Flow]:
    objects = interface.read_interface().objects
    names = ("row", "column", "norm", "unquantized", "gemma_norm")
    classes = layers.Classes(**{class_name: objects[class_name] for class_name in names})
    return classes, flow_of(MODELS[name](), classes)


def test_the_first_sizes_are_those_that_kernels_are_compiled_for() -> None:
    """Without a profile an octave shares a plan. At its start, middle and end there is a size with uneven shards, two whose
    shards are no multiple of 16 rows, and one with whole tiles on every rank; none that vLLM captures."""

    def main(world: weft.World) -> list[int]:
        return timing.first_sizes(world, 64, 256)

    for sizes in weft.spmd(main, 2, backend="emulated"):
        assert sizes == [
            256,
            255,
            254,
            240,
            192,
            191,
            190,
            176,
            160,
            144,
            130,
            129,
            128,
            127,
            126,
            112,
            96,
            95,
            94,
            80,
            66,
            65,
        ]


def test_every_planned_size_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a profile, which finds a plan for 16 sizes an octave."""
    monkeypatch.setattr(timing, "planner_on", lambda world: object())

    def main(world: weft.World) -> list[int]:
        return timing.first_sizes(world, 512, 1024)

    (sizes, *_) = weft.spmd(main, 2, backend="emulated")
    assert set(range(544, 1025, 32)) <= set(sizes)
    assert sizes == sorted(set(sizes), reverse=True) and min(sizes) > 512


@pytest.mark.parametrize("name", MODELS)
def test_the_first_calls_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The model's own pass then decides nothing new: it has the same kinds of sites, norms and epsilon, and nothing is
    prepared for a capture of more tokens than vLLM captures."""
    tokens, threshold = 24, 9
    monkeypatch.setenv(fp8.WEFT_VLLM_FP8, "1")
    monkeypatch.setattr(fp8, "difference", lambda *_: "")  # `weft.matmul` times its kernels
    monkeypatch.setattr(plugin, "thresholds", lambda *_: (threshold, 0))
    monkeypatch.setattr(timing, "first_sizes", lambda world, above, max_tokens: [max_tokens])
    monkeypatch.setattr(plugin, "make_one_trial_an_octave", lambda: None)
    prepare_sizes = timing.prepare_sizes

    def timed(flow: Flow, classes: layers.Classes, world: weft.World, *tokens: int) -> None:
        world.backend.clock = None
        prepare_sizes(flow, classes, world, *tokens)

    monkeypatch.setattr(timing, "prepare_sizes", timed)

    def main(world: weft.World) -> tuple[set[Any], set[Any]]:
        def row_norm_columns() -> set[Any]:
            return {key for key in world.decided if isinstance(key, tuple) and key[0] == ROW_NORM_COLUMN.name}

        world.backend.clock = lambda *_: pytest.fail("timed")
        config = standin.config(
            MODELS[name],
            scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace(), cudagraph_capture_sizes=[1, 8]),
        )
        model = standin.BaseModelLoader().load_model(vllm_config=config, model_config=None)
        prepared = row_norm_columns()
        ids = torch.zeros(tokens, dtype=torch.long)
        with torch.inference_mode():
            model(ids, torch.arange(tokens), None)
        return prepared, row_norm_columns()

    plugin.register()
    for prepared, later in standin.run(main):
        assert prepared and later == prepared


def test_a_trial_is_for_any_epsilon() -> None:
    """So that the trials before requests, whatever epsilon they use, are those of the model."""

    def main(world: weft.World) -> None:
        x, norm = torch.zeros(8, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
        tensors = LayerTensors(x, x, norm, None, None, None, None)
        keys = {
            ROW_NORM_COLUMN.trial_key(ROW_NORM_COLUMN.check(world, tensors, (epsilon, 0, 0)))
            for epsilon in (1e-5, 1e-6)
        }
        assert len(keys) == 1
        weft.all_reduce_rms_norm(x, None, norm, 1e-5, world=world)
        call = world.ran.call
        assert ALL_REDUCE_RMS_NORM.trial_key(call) == ALL_REDUCE_RMS_NORM.trial_key(replace(call, eps=1e-6))

    weft.spmd(main, 2, backend="emulated")
