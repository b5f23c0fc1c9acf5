"""An MoE layer with quack's grouped GEMMs runs in the emulator, where torch computes the GEMMs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from bench.common import quack_moe
from bench.common.quack_moe import FORMS, QuackExperts, fastest, interleaved, usable

T, H, INNER, E, K = 13, 160, 24, 5, 3


def gemm_gated(A: Any, B: Any, *, activation: str, store_preact: bool, cu_seqlens_m: Any, A_idx: Any, tuned: bool,
               config: Any) -> tuple[None, torch.Tensor]:  # fmt: skip
    """A stand-in for quack's function, for pairs of adjacent columns."""
    assert (activation, store_preact, tuned, B.shape) == ("swiglu", False, False, (E, H, 2 * INNER))
    assert cu_seqlens_m.dtype == A_idx.dtype == torch.int32 and A_idx.shape == (T * K,) and config.cluster_n == 1
    parts = A[A_idx.long()].split(cu_seqlens_m.diff().tolist())
    z = torch.cat([part @ w for part, w in zip(parts, B, strict=True)])
    return None, F.silu(z[:, ::2]) * z[:, 1::2]


def gemm(x: Any, w: Any, out: Any, c: Any, semaphore: Any, *tile: int, pingpong: bool, cu_seqlens_m: Any) -> None:
    parts = x.split(cu_seqlens_m.diff().tolist())
    out.copy_(torch.cat([part @ m.t() for part, m in zip(parts, w, strict=True)]))


@pytest.fixture
def quack(monkeypatch: Any) -> None:
    modules = dict(
        gemm_interface=dict(gemm_gated=gemm_gated), gemm=dict(gemm=gemm), gemm_config=dict(GemmConfig=SimpleNamespace)
    )
    monkeypatch.setitem(__import__("sys").modules, "quack", SimpleNamespace())
    for name, contents in modules.items():
        monkeypatch.setitem(__import__("sys").modules, f"quack.{name}", SimpleNamespace(**contents))
    quack_moe._config.cache_clear()


@pytest.mark.usefixtures("quack")
def test_the_layer_is_that_of_its_formula() -> None:
    """In successive calls, the tables, the order of the weights' rows, and the sums are right."""
    results = []

    def main(world: weft.World) -> None:
        torch.manual_seed(0)
        w13, w2 = torch.randn(E, 2 * INNER, H), torch.randn(E, H, INNER)
        layer = QuackExperts(world, w13, w2, K)
        for _ in range(3):
            x, logits = torch.randn(T, H), torch.randn(T, E)
            out = layer(x, logits)
            world.synchronize()
            weights, ids = logits.softmax(-1).topk(K)
            weights = weights / weights.sum(-1, keepdim=True)
            gate, up = torch.einsum("th,enh->ten", x, w13).chunk(2, -1)
            every = torch.einsum("ten,ehn->teh", F.silu(gate) * up, w2)
            chosen = every.gather(1, ids[:, :, None].expand(-1, -1, H))
            results.append((out, (chosen * weights[:, :, None]).sum(1)))

    weft.spmd(main, 1, backend="emulated")
    assert len(results) == 3
    for out, expected in results:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)


def test_rows_of_the_gate_and_up_projections_alternate() -> None:
    w = torch.arange(8).view(1, 4, 2)
    assert interleaved(w).tolist() == [[[0, 1], [4, 5], [2, 3], [6, 7]]]


def test_the_fastest_form_that_runs() -> None:
    def broken() -> torch.Tensor:
        raise ValueError("no such tile")

    timed: list[str] = []

    def time_of(fns: dict[str, Any]) -> dict[str, float]:
        timed.extend(fns)
        return {name: float(len(fns) - i) for i, name in enumerate(fns)}

    fns = {FORMS[0]: broken, FORMS[1]: lambda: torch.ones(1), FORMS[2]: lambda: torch.ones(1)}
    assert fastest(fns, time_of) == FORMS[2] and timed == [str(FORMS[1]), str(FORMS[2])]
    with pytest.raises(RuntimeError, match="no such tile"):
        fastest({FORMS[0]: broken}, time_of)


def test_forms_are_tried_in_processes_that_end() -> None:
    """Without a GPU no form gives a right result, and no trial exceeds its time limit."""
    assert usable(0.3, FORMS[:2]) == []


def test_each_form_is_tried_once(monkeypatch: Any, tmp_path: Any) -> None:
    """A form for which no process had time is tried next time."""
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    asked: list[list[object]] = []

    def tried(seconds: float, forms: list[object]) -> dict[object, bool]:
        asked.append(forms)
        return {form: form != FORMS[1] for form in forms[:2]}

    monkeypatch.setattr(quack_moe, "tried", tried)
    right = [usable(1.0, FORMS[:3]) for _ in range(3)]
    assert right == [[FORMS[0]], [FORMS[0], FORMS[2]], [FORMS[0], FORMS[2]]]
    assert asked == [[*FORMS[:3]], [FORMS[2]], []]


def test_quacks_signatures_have_these_arguments() -> None:
    """If quack is installed, its function signatures must contain these names."""
    interface, plain = pytest.importorskip("quack.gemm_interface"), pytest.importorskip("quack.gemm")
    assert inspect.signature(gemm_gated).parameters.keys() <= inspect.signature(interface.gemm_gated).parameters.keys()
    assert {"pingpong", "cu_seqlens_m"} <= inspect.signature(plain.gemm).parameters.keys()
