"""Gradients of the ops on emulated ranks against float64: every operand, any rows, many schedules.

The reference is the unsharded model, computed in one process. The reference's loss is the sum of the ranks' losses or,
for an all-reduce, any one rank's loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_inference import PLANS, inference_then_training
from tests.emulated.cases_nn import all_gather_grads, emulate, gpu_errors, leaf, reduce_grads, silu_grads
from tests.emulated.cases_ops import OPS, SMALL_FUSED
from tests.gates import some
from weft.ops.all_gather_matmul import op as all_gather_matmul
from weft.plans import Decomposed, Plan

BOUND = 5e-3
ROWS = {2: ([16, 16], [20, 7], [0, 33]), 3: ([16, 16, 16], [17, 17, 16], [20, 0, 7]), 4: ([8] * 4, [33, 1, 0, 5])}
CASES = [(ranks, rows) for ranks, splits in ROWS.items() for rows in splits]


@pytest.mark.parametrize("ranks, rows", some(CASES, 6))
def test_all_gather_matmul(ranks: int, rows: list[int]) -> None:
    for seed, options in enumerate(({}, {"keep": True}, {"through": True, "passes": 2})):
        errors = emulate(lambda world, options=options: all_gather_grads(world, rows, 48, 64, **options), ranks, seed)
        assert max(errors) < BOUND, f"{options}: {errors}"


@pytest.mark.parametrize("ranks, rows", some(CASES, 6))
def test_matmul_reduce_scatter(ranks: int, rows: list[int]) -> None:
    for seed, options in enumerate(({"rows": rows}, {"passes": 2})):
        errors = emulate(lambda world, options=options: reduce_grads(world, sum(rows), 48, 64, **options), ranks, seed)
        assert max(errors) < BOUND, f"{options}: {errors}"


@pytest.mark.parametrize("ranks, m", [(2, 33), (3, 48), (4, 5)])
def test_matmul_all_reduce(ranks: int, m: int) -> None:
    errors = emulate(lambda world: reduce_grads(world, m, 48, 64, everywhere=True, passes=2), ranks)
    assert max(errors) < BOUND, errors


@pytest.mark.parametrize("wants", ["x", "w", "b", "xw", "wb", "xb"])
def test_only_some_operands(wants: str) -> None:
    def rank(world: weft.World) -> float:
        return max(
            all_gather_grads(world, [9, 16], 48, 64, wants=wants),
            all_gather_grads(world, [9, 16], 48, 64, wants=wants, through="x" in wants, keep=True),
            reduce_grads(world, 25, 48, 64, wants=wants),
            reduce_grads(world, 25, 48, 64, wants=wants, everywhere=True),
        )

    errors = emulate(rank, 2)
    assert max(errors) < BOUND, errors


@pytest.mark.parametrize("plan", ["sequential", "decomposed", "fused", Decomposed(), None])
def test_plan_of_the_forward(plan: str | Plan | None) -> None:
    """None represents the plan that the op's class specifies for small Worlds."""

    def rank(world: weft.World) -> float:
        gather, reduce = (plan or SMALL_FUSED[op] for op in OPS[:2])
        return max(all_gather_grads(world, [16, 16], 48, 64, gather), reduce_grads(world, 32, 48, 64, reduce))

    errors = emulate(rank, 2)
    assert max(errors) < BOUND, errors


def test_float16_odd_sizes_and_one_rank() -> None:
    def rank(world: weft.World) -> float:
        w = world.size
        return max(
            all_gather_grads(world, [5] * w, 40, 24, dtype=torch.float16),
            all_gather_grads(world, [5] * w, 13, 11, through=True),
            reduce_grads(world, 7, 13, 11, dtype=torch.float16),
            reduce_grads(world, 7, 13, 11, everywhere=True),
        )

    for ranks in (1, 2):
        errors = emulate(rank, ranks)
        assert max(errors) < BOUND, errors


def test_no_rows_at_all() -> None:
    def rank(world: weft.World) -> None:
        x, w, b = leaf(draw(1, 0, 16), world), leaf(draw(2, 24, 16), world), leaf(draw(3, 24), world)
        y, full = weft.all_gather_matmul_with_gathered(x, w, b, world=world)
        z = weft.matmul_reduce_scatter(x, w, b, world=world)
        (y.sum() + full.sum() + z.sum()).backward()
        assert x.grad is not None and x.grad.shape == (0, 16)
        assert w.grad is not None and not w.grad.any() and b.grad is not None and not b.grad.any()

    emulate(rank, 2)


@pytest.mark.parametrize("block", [0, 16, 64])
def test_silu_mul(block: int) -> None:
    for m, columns in ((20, 40), (1, 8), (3, 300)):
        for dtype in (torch.bfloat16, torch.float16):
            errors = emulate(lambda world, s=(m, columns, block, dtype): silu_grads(world, *s), 1)
            assert max(errors) < BOUND, (m, columns, dtype, errors)


def test_gradients_of_views_and_expanded_gradients() -> None:
    """The gradient of a sum has stride 0; the gradient of a transposed output is transposed."""

    def rank(world: weft.World) -> None:
        x, w = leaf(draw(1 + world.rank, 8, 16), world), leaf(draw(3, 16, 24), world)
        coefficients = torch.ones(24, dtype=torch.bfloat16)
        coefficients[3:] = 3
        grads = []
        for loss in (lambda y: y.sum() + 2 * y.t()[3:].sum(), lambda y: (y * coefficients).sum()):
            y = weft.all_gather_matmul(x, w.t(), world=world)
            z = weft.matmul_reduce_scatter(y, w, world=world)
            (loss(y) + z.sum()).backward()
            grads.append([x.grad, w.grad])
            x.grad = w.grad = None
        for a, b in zip(*grads, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2 * float(b.float().abs().max()))

    emulate(rank, 2)


def test_all_reduce_backward_communicates_nothing() -> None:
    """Rank 0 runs the call alone: any collective would deadlock."""

    def rank(world: weft.World) -> None:
        x, w = leaf(draw(1, 8, 16), world), leaf(draw(2, 24, 16), world)
        y = weft.matmul_all_reduce(x, w, world=world)
        if world.rank == 0:
            y.sum().backward()

    emulate(rank, 2)


def test_rows_are_read_once() -> None:
    """`rows` may be a list that the caller changes before the backward pass, or a tensor, whose elements are not
    ints."""

    def rank(world: weft.World) -> None:
        whole, w = draw(1, 8, 64), draw(2, 32, 64).requires_grad_()
        x, g = whole.split([3, 5])[world.rank], draw(3, 8, 32)
        grads, decided = [], 0
        for changed in (None, [5, 3], None):
            rows = [3, 5] if len(grads) < 2 else torch.tensor([3, 5])
            w.grad = None
            y = weft.all_gather_matmul(x, w, world=world, rows=rows)
            z = weft.matmul_reduce_scatter(whole, w, world=world, rows=rows)
            if changed:
                rows[:] = changed
            y.backward(g)
            z.backward(g.split([3, 5])[world.rank])
            world.synchronize()
            assert w.grad is not None
            grads.append(w.grad.clone())
            decided = decided if len(grads) > 2 else len(world.decided)  # the second call prepares a graph's plan
        assert all(torch.equal(grads[0], grad) for grad in grads[1:])
        assert len(world.decided) == decided, "the plan of each call must be chosen once"

    emulate(rank, 2)


def test_gathered_but_unused_costs_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("the gradient of an output that the loss does not use was communicated")

    monkeypatch.setattr(all_gather_matmul, "reduce_scatter_in_backward", never)
    monkeypatch.setattr(all_gather_matmul, "gather_in_backward", never)  # the backward pass uses the kept activation
    assert max(emulate(lambda world: all_gather_grads(world, [16, 9], 48, 64, keep=True), 2)) < BOUND


def test_without_gradients_nothing_is_recorded() -> None:
    def rank(world: weft.World) -> None:
        x, w = leaf(draw(1, 8, 16), world), leaf(draw(2, 24, 16), world)
        with torch.no_grad():
            y, full = weft.all_gather_matmul_with_gathered(x, w, world=world)
            z = weft.matmul_reduce_scatter(x, w, world=world)
            h = weft.silu_mul(y, world=world)
        assert not any(t.requires_grad for t in (y, full, z, h))
        assert full.data_ptr() != x.data_ptr()
        assert not weft.all_gather_matmul(x.detach(), w.detach(), world=world).requires_grad

    for ranks in (1, 2):
        emulate(rank, ranks)


def test_inference_mode_then_training() -> None:
    """Both modes must be able to use the memory that the first calls allocate."""

    def rank(world: weft.World) -> float:
        x, w = draw(1, 16, 64), draw(2, 48, 64)
        with torch.inference_mode():
            for plan in ("sequential", "decomposed", "fused"):
                weft.all_gather_matmul(x, w, world=world, plan=plan)
                weft.matmul_reduce_scatter(x, w, world=world, plan=plan)
        views = [v for memory in world._buffers.values() for v in memory._views.values()]
        assert views and not any(t.is_inference() for v in views for t in (v.local, *v.peers))
        plans = ("sequential", "decomposed", "fused")
        return max(all_gather_grads(world, [16] * world.size, 48, 64, plan) for plan in plans)

    assert max(emulate(rank, 2)) < BOUND


def test_errors() -> None:
    def rank(world: weft.World) -> None:
        x, w = leaf(draw(1, 8, 16), world), leaf(draw(2, 24, 16), world)
        calls: list[Any] = [
            lambda: weft.all_gather_matmul(x, w, world=world, out=torch.zeros(8 * world.size, 24).to(x)),
            lambda: weft.matmul_reduce_scatter(x, w, world=world, out=torch.zeros(8 // world.size, 24).to(x)),
            lambda: weft.matmul_all_reduce(x, w, world=world, out=torch.zeros(8, 24).to(x)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="out= has no gradient"):
                call()
        y = weft.matmul_all_reduce(x, w, world=world)
        (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()
        with pytest.raises(ValueError, match=r"rows \[3, 4\] must name 2 ranks and sum to the rows of x \[8, 16\]"):
            weft.matmul_reduce_scatter(x, w, world=world, rows=[3, 4])
        with pytest.raises(ValueError, match=r"x must be \[M, 2I\]"):
            weft.silu_mul(torch.zeros(4, 3).bfloat16(), world=world)
        with pytest.raises(TypeError, match="bfloat16 and float16"):
            weft.silu_mul(torch.zeros(4, 4), world=world)
        with pytest.raises(TypeError, match="world must be a weft.World"):
            weft.all_gather_matmul(x, w, world=None)  # type: ignore[arg-type]

    emulate(rank, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_on_gpus(ranks: int) -> None:
    """Ops and modules, also compiled and captured, run on the GPUs of this machine; ranks share GPUs if there are too
    few."""
    for results in weft.spmd(gpu_errors, ranks, backend="shared"):
        bad = {name: error for name, (error, bound) in results.items() if not error <= bound}
        assert not bad, bad


@pytest.mark.parametrize("name", PLANS)
def test_a_world_that_evaluates_first_trains_afterwards(name: str) -> None:
    assert emulate(lambda world: inference_then_training(world, PLANS[name]), 2) == [0.0, 0.0]
