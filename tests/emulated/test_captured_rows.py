"""Tests of the sizes that are prepared for a capture: all sizes or, if an engine declares its largest captured size,
the sizes up to that one. Other sizes may be called between the calls that prepare a capture and the capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from weft.integrations.vllm.plugin import limit_captures
from weft.ops.all_reduce.op import AllReduceRmsNorm, SumCall
from weft.plans import OneShot, Plan, TwoShotLowLatency, TwoShotPull, TwoShotPush
from weft.prepared import Prepared

EAGER, GRAPH = OneShot(), TwoShotPush()
ROWS = 4


def plans_run(monkeypatch: pytest.MonkeyPatch, max_captured_rows: int | None) -> list[tuple[list[Plan], list[Plan]]]:
    """Return, for each of two ranks, the plans of two eager calls of ROWS rows and of one captured call, and the plans
    that ran only to prepare the capture."""
    plans: Mapping[str, Plan] = {"eager": EAGER, "graph": GRAPH}
    monkeypatch.setattr(AllReduceRmsNorm, "auto", lambda self, world, call, mode: plans[mode])
    warmed_up: list[list[Plan]] = [[], []]
    warm_up_capture = AllReduceRmsNorm.warm_up_capture

    def recorded(op: AllReduceRmsNorm, prepared: Prepared[SumCall], *operands: Any) -> None:
        warmed_up[prepared.world.rank].append(prepared.plan)
        warm_up_capture(op, prepared, *operands)

    monkeypatch.setattr(AllReduceRmsNorm, "warm_up_capture", recorded)

    def main(world: weft.World) -> list[Plan]:
        world.max_captured_rows = max_captured_rows
        x, weight, ran = torch.ones(ROWS, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16), []
        for capturing in (False, False, True):
            world.backend.capturing = lambda: capturing  # type: ignore[method-assign]  # noqa: B023
            assert torch.equal(weft.all_reduce_rms_norm(x, None, weight, world=world)[0], x)
            ran.append(world.ran.plan)
        return ran

    return list(zip(weft.spmd(main, 2, backend="emulated"), warmed_up, strict=True))


@pytest.mark.parametrize("max_captured_rows", [None, ROWS, ROWS + 1])
def test_the_second_call_also_runs_the_plan_of_a_capture(
    monkeypatch: pytest.MonkeyPatch, max_captured_rows: int | None
) -> None:
    assert plans_run(monkeypatch, max_captured_rows) == [([EAGER, EAGER, GRAPH], [GRAPH])] * 2


@pytest.mark.parametrize("max_captured_rows", [0, ROWS - 1])
def test_a_size_beyond_all_captures_runs_one_plan(monkeypatch: pytest.MonkeyPatch, max_captured_rows: int) -> None:
    """A capture of a size above the largest named one runs the plan of eager calls, whose memory is already allocated."""
    assert plans_run(monkeypatch, max_captured_rows) == [([EAGER, EAGER, EAGER], [])] * 2


@pytest.mark.parametrize("eager_calls", [1, 2])
def test_a_later_trial_does_not_change_the_plan_of_a_capture(monkeypatch: pytest.MonkeyPatch, eager_calls: int) -> None:
    """Sizes share trials. After the calls that prepare a capture, the first call of another size may run a trial, which
    chooses a plan that no call of the captured size has run."""
    chosen: dict[str, Plan] = {}
    monkeypatch.setattr(AllReduceRmsNorm, "auto", lambda self, world, call, mode: chosen[mode])

    def main(world: weft.World) -> Plan:
        x, weight = torch.ones(ROWS, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
        chosen.update(eager=EAGER, graph=GRAPH)
        for _ in range(eager_calls):
            weft.all_reduce_rms_norm(x, None, weight, world=world)
        world.exchange(None)
        chosen.update(eager=TwoShotLowLatency(), graph=TwoShotPull())
        world.exchange(None)
        world.backend.capturing = lambda: True  # type: ignore[method-assign]
        assert torch.equal(weft.all_reduce_rms_norm(x, None, weight, world=world)[0], x)
        return world.ran.plan

    assert weft.spmd(main, 2, backend="emulated") == [EAGER if eager_calls == 1 else GRAPH] * 2


GROWING: Mapping[str, Callable[..., torch.Tensor]] = {
    "arena, gather": lambda world, x, w: weft.all_gather_matmul(x, w, world=world, plan="fused"),
    "arena, scatter": lambda world, x, w: weft.matmul_reduce_scatter(x, w, world=world, plan="fused"),
    "low-latency rows": lambda world, x, w: weft.all_reduce(x, world=world, plan=TwoShotLowLatency()),
    "staging": lambda world, x, w: weft.all_reduce(x, world=world, plan="two_shot"),
}


@pytest.mark.parametrize("case", GROWING)
def test_a_size_can_be_captured_after_memory_has_grown_for_another(case: str) -> None:
    """The larger call drops the smaller call's run. A capture makes the run again in the new memory, although a capture
    can neither allocate memory that calls share nor exchange messages."""
    op = GROWING[case]

    def main(world: weft.World) -> None:
        backend: Any = world.backend
        w, x = draw(9, 32, 128), draw(world.rank, 64, 128)
        expected = [op(world, x, w) for _ in range(2)][1]
        (prepared,) = world.prepared_calls
        op(world, draw(world.rank, 1024, 128), w)
        assert prepared not in world.prepared_calls
        backend.capturing, backend.captures = lambda: True, lambda stream: True
        collectives = backend.exchange, backend.symmetric
        backend.exchange = backend.symmetric = None
        result = op(world, x, w)
        backend.exchange, backend.symmetric = collectives
        del backend.capturing, backend.captures
        world.synchronize()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize(
    ("sizes", "earlier", "expected"),
    [([1, 2, 512], None, 512), ([], None, 0), ([1, 8], 512, 512), (None, None, None), (None, 512, 512)],
)
def test_vllm_names_the_sizes_that_it_captures(
    sizes: list[int] | None, earlier: int | None, expected: int | None
) -> None:
    """An engine without graphs captures no size; a process's second engine may capture more sizes; an unknown
    configuration means that all sizes are captured."""

    def main(world: weft.World) -> int | None:
        world.max_captured_rows = earlier
        limit_captures(world, SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes)))
        return world.max_captured_rows

    assert weft.spmd(main, 1, backend="emulated") == [expected]
