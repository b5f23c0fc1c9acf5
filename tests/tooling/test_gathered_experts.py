"""The layer whose experts run in vLLM's or quack's kernels, between NCCL's collectives, on emulated ranks, where torch
replaces both kernels."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from bench.common import gathered_experts, quack_moe
from bench.common.gathered_experts import layer_by, quack_experts, vllm_experts
from bench.common.quack_moe import FORMS, Routed, local_routes
from bench.common.timing import error_of
from bench.measure.moe import Layer, Model

MODEL = Model(32, 16, 6, 3)


def fused_experts(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, *, global_num_experts: int, expert_map: Any) -> Any:
    """A stand-in for vLLM's function: ids number all experts, and `expert_map` maps them to this rank's experts."""
    assert ids.dtype == torch.int32 and expert_map.shape == (global_num_experts,) == (MODEL.experts,)
    out = torch.zeros_like(x, dtype=torch.float32)
    for token, slot in torch.nonzero(expert_map[ids.long()] >= 0).tolist():
        local = expert_map[ids[token, slot]]
        gate, up = (w1[local].float() @ x[token].float()).chunk(2)
        out[token] += weights[token, slot] * (w2[local].float() @ (F.silu(gate) * up))
    return out.to(x.dtype)


def of_rows(rows: torch.Tensor, w: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return a grouped GEMM whose rows after the last group have arbitrary values."""
    out = torch.full((len(rows), w.shape[1]), float("nan"), dtype=rows.dtype)
    for expert, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        out[begin:end] = rows[begin:end] @ w[expert].t()
    return out


def gated_gemm(form: Any, x: Any, w13: Any, starts: Any, tokens: Any) -> Any:
    gate_up = of_rows(x[tokens.long()], w13, starts)
    return F.silu(gate_up[:, ::2]) * gate_up[:, 1::2]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(VllmConfig=object, set_current_vllm_config=lambda config: nullcontext())
    modules = {"vllm": SimpleNamespace(), "vllm.config": config, "vllm.model_executor": SimpleNamespace()}
    modules["vllm.model_executor.layers"] = SimpleNamespace()
    modules["vllm.model_executor.layers.fused_moe"] = SimpleNamespace(fused_experts=fused_experts)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(quack_moe, "gated_gemm", gated_gemm)
    monkeypatch.setattr(quack_moe, "second_gemm", lambda form, hidden, w2, starts: of_rows(hidden, w2, starts))
    monkeypatch.setattr(gathered_experts, "time_interleaved", lambda fns, **options: dict.fromkeys(fns, 1.0))


@pytest.mark.usefixtures("libraries")
def test_both_libraries_compute_the_layer() -> None:
    def main(world: weft.World) -> list[float]:
        layer = Layer(world, MODEL, 7, 0.0)
        expected = layer.run("sequential")
        errors = []
        for experts in (vllm_experts(layer), quack_experts(layer, FORMS[:2])):
            layer.call_index = 0
            errors.append(error_of(layer_by(layer, experts)(), expected))
        return errors

    assert max(error for errors in weft.spmd(main, 3, backend="emulated") for error in errors) < 1e-2


def test_routes_to_other_ranks_are_behind_the_last_group() -> None:
    ids, weights = torch.tensor([[0, 3], [2, 3]], dtype=torch.int32), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    starts, tokens, rows, kept = local_routes(ids, weights, first_expert=2, local=2)
    assert starts.tolist() == [0, 1, 3] and tokens.tolist() == [1, 0, 1, 0]  # expert 2, expert 3, then the rest
    assert rows.tolist() == [0, 1, 0, 2] and kept.tolist() == [[[0.0, 0.75], [0.5, 0.5]]]


@pytest.mark.usefixtures("libraries")
def test_a_rank_without_routes_adds_nothing() -> None:
    """The GEMMs of a rank without routes write no row, and their memory contains NaN."""

    def main(world: weft.World) -> torch.Tensor:
        experts = quack_moe.QuackExperts(world, torch.ones(2, 32, 8), torch.ones(2, 8, 16), 1)
        routed: Routed = local_routes(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), first_expert=4, local=2)
        out = experts.sums(torch.ones(3, 8), routed)
        world.synchronize()
        return out

    assert weft.spmd(main, 1, backend="emulated")[0].count_nonzero() == 0
