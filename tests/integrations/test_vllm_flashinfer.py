"""FlashInfer's all-reduce and norm can be a form of a pass. The tests use a stand-in for its package on CPU ranks over
gloo."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.integrations.vllm_standin as standin
import weft
from tests.integrations.test_vllm_start import MOST, Gain, faked, started, times_of
from weft.integrations.vllm import flashinfer
from weft.integrations.vllm.flashinfer import FlashInfer
from weft.integrations.vllm.row_norm_column import RowNormColumn
from weft.plans import Plan, Sequential

TOKENS = 4  # that a workspace holds


class Workspaces:
    """A stand-in for the module `flashinfer.comm`, which counts its workspaces. If `error` is set, the class raises it
    instead of creating a workspace."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)

    def __init__(self, error: str = "") -> None:
        self.error, self.created, self.destroyed, self.calls = error, 0, 0, 0

    def create_allreduce_fusion_workspace(self, *, max_token_num: int, hidden_dim: int, **options: Any) -> Any:
        assert options["backend"] == "trtllm" and max_token_num == TOKENS and hidden_dim == standin.H
        if self.error:
            raise RuntimeError(self.error)
        self.created += 1
        return SimpleNamespace(max_token_num=max_token_num, destroy=self.destroy)

    def destroy(self) -> None:
        self.destroyed += 1

    def allreduce_fusion(
        self, input: torch.Tensor, workspace: Any, pattern: int, *, residual_in: torch.Tensor,
        residual_out: torch.Tensor, norm_out: torch.Tensor, rms_gamma: torch.Tensor, rms_eps: float, **options: Any,
    ) -> None:  # fmt: skip
        assert pattern == 1 and len(input) <= workspace.max_token_num
        self.calls += 1
        total = input.float()
        dist.all_reduce(total)
        total += residual_in.float()
        residual_out.copy_(total)
        norm_out.copy_(torch.rms_norm(total, total.shape[-1:], eps=rms_eps) * rms_gamma.float())


def started_with(
    world: weft.World, gain: Gain, error_of: int | None = None, asked_for: bool = True, version: str | None = "1.0"
) -> tuple[Any, Workspaces]:
    """Start an engine in a separate process, in which FlashInfer of that version is installed; creating a workspace
    fails on the rank `error_of`. Return the model's report, and the counts of workspaces."""
    comm = Workspaces("no memory" if world.rank == error_of else "")
    with pytest.MonkeyPatch.context() as monkeypatch, standin.served_by_plugin(monkeypatch):
        monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
        monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)  # type: ignore[arg-type]
        monkeypatch.setattr(flashinfer, "installed", lambda: version)
        row = TOKENS * flashinfer.ROW_BUFFERS * world.size * standin.H * 2
        monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", row)
        faked(monkeypatch)
        times_of(monkeypatch, gain)
        standin.enter(world)
        world.backend.compares = False  # for every call on the host, where most of the time is spent
        worker, report = started(world, fuse_allreduce_rms=asked_for)
        return (worker, report), comm


def chosen(op: RowNormColumn, world: weft.World, call: Any, asked: str | Plan, capturing: bool) -> Plan:
    """Return the plan that ranks would choose on GPUs."""
    assert isinstance(asked, Plan)
    return asked if op.unsupported(world, call, asked, asked) is None else Sequential()


def few_tokens(world: weft.World) -> tuple[list[Any], list[int], float, bool]:
    """Let FlashInfer win. Return the ranges, the numbers of workspaces created and destroyed, the difference between
    passes and vLLM's own, and whether requests called the kernel."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(RowNormColumn, "choose", chosen)
        (worker, report), comm = started_with(world, lambda tokens, form: 1.5 if isinstance(form, FlashInfer) else 0.9)
        model, calls = worker.model_runner.model, comm.calls
        arguments = torch.arange(TOKENS), torch.arange(TOKENS), None
        with torch.inference_mode():
            actual = model(*arguments)
            calls = comm.calls - calls
            report.passes.remove()
            expected = model(*arguments)
    ranges = [(compared.low, compared.high, compared.form) for compared in report.ranges]
    difference = float((actual - expected).float().norm() / expected.float().norm())
    return ranges, [comm.created, comm.destroyed], difference, calls == 4


def outcomes(world: weft.World) -> dict[str, tuple[list[Plan], list[int], str]]:
    """Return, for each case, the forms that were compared, the numbers of workspaces created and destroyed, and the
    report."""
    results = {}
    for name, options in CASES.items():
        (_, report), comm = started_with(world, lambda tokens, form: 1.5 if form == Sequential() else 0.9, **options)
        results[name] = list(report.forms), [comm.created, comm.destroyed], report.text()
    return results


CASES: dict[str, dict[str, Any]] = {
    "loses": {}, "not installed": dict(version=None), "not asked for": dict(asked_for=False), "error": dict(error_of=1)
}  # fmt: skip


def main(world: weft.World) -> tuple[Any, Any]:
    return few_tokens(world), outcomes(world)


@pytest.fixture(scope="module")
def engines() -> Any:
    """Return the results of two ranks, which start once for all tests."""
    return weft.spmd(main, 2, backend="gloo")


def test_the_kernel_serves_the_passes_that_it_wins(engines: Any) -> None:
    """The form serves up to as many tokens as its workspace can hold, and the model gives the same results."""
    for ranges, workspaces, difference, called in (winning for winning, _ in engines):
        assert ranges == [(1, 1, FlashInfer(TOKENS)), (2, 4, FlashInfer(TOKENS)), (5, 8, None), (9, MOST, None)]
        assert workspaces == [1, 0] and called
        assert difference < 2e-2


def test_without_the_kernel_nothing_changes(engines: Any) -> None:
    """A workspace that is faster for no size is freed; an error on one rank removes the form on all ranks."""
    for results in (others for _, others in engines):
        forms, workspaces, text = results["loses"]
        assert forms == [Sequential(), FlashInfer(TOKENS)] and workspaces == [1, 1] and "FlashInfer's" not in text
        for name in ("not installed", "not asked for"):
            assert results[name][:2] == ([Sequential()], [0, 0]) and "FlashInfer" not in results[name][2], results[name]
        forms, workspaces, text = results["error"]
        assert forms == [Sequential()] and workspaces[0] == workspaces[1]
        assert "leaves to vLLM FlashInfer's all-reduce and norm: RuntimeError: no memory" in text
