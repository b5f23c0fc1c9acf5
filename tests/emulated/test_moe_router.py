"""Capacity, placement and the router's losses need one launch each. The kernels' results equal the results of torch
operations that define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.emulated.cases_router import (
    some_ids,
    some_weights,
    torch_balance,
    torch_capacity,
    torch_placement,
    torch_z_loss,
)
from weft import moe

DRAWN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAN, INF = float("nan"), float("inf")


def emulate(fn: Callable[[weft.World], Any], ranks: int = 1) -> Any:
    results = weft.spmd(fn, ranks, backend="emulated")
    return results[0] if ranks == 1 else results


@contextmanager
def launches() -> Iterator[list[str]]:
    """Return the names of the kernels launched inside the context."""
    names: list[str] = []
    run = weft.Launch.__call__

    def counted(self: weft.Launch, /, stream: Any, **moving: Any) -> None:
        names.append(self.kernel.__name__)
        run(self, stream, **moving)

    weft.Launch.__call__ = counted  # type: ignore[method-assign]
    try:
        yield names
    finally:
        weft.Launch.__call__ = run  # type: ignore[method-assign]


def test_each_is_one_launch() -> None:
    """After the first call, each call is one launch, and so is its gradient."""
    ids, weights, logits = some_ids(40, 3, 6, 0), some_weights(40, 3, 1), torch.randn(40, 6, requires_grad=True)
    table = torch.arange(12, dtype=torch.int32).view(6, 2)

    def main(world: weft.World) -> None:
        for call, kernels in (
            (lambda: moe.apply_capacity(ids, weights, 6, 0.5, world=world), ["limit_experts"]),
            (lambda: moe.apply_capacity(ids, weights, 6, 0.5, drop="probability", world=world), ["limit_experts"]),
            (lambda: moe.expert_placement(ids, table, world=world), ["place_experts"]),
            (lambda: moe.load_balancing_loss(logits, ids, world=world), ["balance_loss"]),
            (lambda: moe.z_loss(logits, world=world), ["square_loss"]),
            (
                lambda: moe.load_balancing_loss(logits, ids, world=world).backward(),
                ["balance_loss", "balance_backward"],
            ),
            (lambda: moe.z_loss(logits, world=world).backward(), ["square_loss", "square_backward"]),
        ):
            for _ in range(2):
                with launches() as names:
                    call()
                assert names == kernels

    emulate(main)


# -- capacity ----------------------------------------------------------------------------------------------------------


def same_capacity(world: weft.World, ids: torch.Tensor, weights: torch.Tensor, experts: int, factor: float) -> None:
    for drop in ("position", "probability"):
        kept, dropped = moe.apply_capacity(ids, weights, experts, factor, drop=drop, world=world)
        world.synchronize()
        expected, counts = torch_capacity(ids, weights, experts, factor, drop)
        assert kept.dtype == dropped.dtype == torch.int32 and kept.shape == ids.shape
        assert torch.equal(kept, expected) and torch.equal(dropped, counts), drop
        assert int(dropped.sum()) == int(((ids >= 0) & (ids < experts)).sum() - (kept >= 0).sum())


@DRAWN
@given(
    tokens=st.integers(0, 150),
    k=st.integers(1, 5),
    experts=st.integers(1, 20),
    factor=st.sampled_from([1e-9, 0.05, 0.5, 1.0, 1.1, 3.0, 50.0]),
    seed=st.integers(0, 999),
)
def test_a_capacity_of_any_routing(tokens: int, k: int, experts: int, factor: float, seed: int) -> None:
    """Tokens list an expert twice, ids are out of range, and weights are equal, NaN or infinite; lists and ids have
    several blocks."""
    ids, weights = some_ids(tokens, k, experts, seed), some_weights(tokens, k, seed)
    emulate(lambda world: same_capacity(world, ids, weights, experts, factor))


@pytest.mark.parametrize("weight", ["equal", "ordered", "reversed", "zeros", "nan", "close", "far"])
def test_a_capacity_where_one_expert_has_all_routes(weight: str) -> None:
    """The ids and the list have more than one block; the keys of the weights differ in the last or in the first
    bits."""
    n = 640
    ordered = torch.arange(n, dtype=torch.float32)
    weights = dict(
        equal=torch.ones(n),
        ordered=ordered,
        reversed=ordered.flip(0),
        zeros=torch.where(ordered % 2 == 0, 0.0, -0.0),
        nan=torch.where(ordered % 3 == 0, NAN, ordered),
        close=(ordered.flip(0) % 300).int().add(0x3F800000).view(torch.float32),
        far=torch.where(ordered % 2 == 0, 1.0, -1.0) * 2.0 ** (ordered % 250 - 125),
    )[weight].view(-1, 2)
    ids = torch.ones(n // 2, 2, dtype=torch.int32)
    emulate(lambda world: [same_capacity(world, ids, weights, 3, factor) for factor in (0.01, 0.7, 1.5, 2.9)])


def test_a_capacity_of_views_on_ranks_of_different_sizes() -> None:
    def main(world: weft.World) -> None:
        tokens = (70, 0)[world.rank]
        ids, weights = some_ids(3, tokens, 7, 1).t(), some_weights(tokens, 6, 2)[:, ::2]
        if tokens:
            assert not ids.is_contiguous() and not weights.is_contiguous()
        same_capacity(world, ids, weights, 7, 0.4)

    emulate(main, 2)


def test_weights_that_require_a_gradient_have_none_from_a_capacity() -> None:
    def main(world: weft.World) -> None:
        logits = torch.randn(20, 4, requires_grad=True)
        ids, weights = moe.gate(logits, 2, world=world)
        kept, _ = moe.apply_capacity(ids, weights, 4, 0.5, drop="probability", world=world)
        (weights * (kept >= 0)).sum().backward()
        assert not kept.requires_grad and logits.grad is not None and bool(logits.grad.abs().sum() > 0)

    emulate(main)


def test_a_capacity_is_not_rounded_up_by_an_error_of_float64() -> None:
    ids, weights = torch.zeros(20, 1, dtype=torch.int32), torch.ones(20, 1)
    kept, dropped = emulate(lambda world: moe.apply_capacity(ids, weights, 2, 1.1, world=world))
    assert (kept >= 0).sum() == 11 and dropped.tolist() == [9, 0]


def test_wrong_arguments_of_a_capacity_are_refused() -> None:
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)

    def main(world: weft.World) -> None:
        for error, match, arguments, options in (
            (ValueError, "apply_capacity: .*must be", (ids, weights[:2], 4, 1.0), {}),
            (TypeError, "int32", (ids.long(), weights, 4, 1.0), {}),
            (ValueError, "capacity_factor 0", (ids, weights, 4, 0), {}),
            (ValueError, "capacity_factor inf", (ids, weights, 4, math.inf), {}),
            (ValueError, "0 experts", (ids, weights, 0, 1.0), {}),
            (ValueError, "'last' is not one of", (ids, weights, 4, 1.0), dict(drop="last")),
            (TypeError, "ids must be a tensor", (None, weights, 4, 1.0), {}),
        ):
            with pytest.raises(error, match=match):
                moe.apply_capacity(*arguments, world=world, **options)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a weft.World"):
            moe.apply_capacity(ids, weights, 4, 1.0, world=None)  # type: ignore[arg-type]

    emulate(main)


# -- placement ---------------------------------------------------------------------------------------------------------


def same_placement(world: weft.World, ids: torch.Tensor, table: torch.Tensor) -> None:
    physical = moe.expert_placement(ids, table, world=world)
    world.synchronize()
    assert physical.dtype == torch.int32
    assert torch.equal(physical, torch_placement(ids, table, world.rank))


@DRAWN
@given(
    tokens=st.integers(0, 150),
    k=st.integers(1, 5),
    experts=st.integers(1, 20),
    replicas=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_a_placement_of_any_routing(tokens: int, k: int, experts: int, replicas: int, seed: int) -> None:
    """A table with one column is equivalent to a one-dimensional table. Some experts have fewer replicas than the
    others, or no replica."""
    ids, g = some_ids(tokens, k, experts, seed), torch.Generator().manual_seed(seed)
    table = torch.randperm(experts * max(replicas, 1), generator=g).int().view(experts, -1)
    table[torch.arange(table.shape[1]) >= torch.randint(0, 9, (experts, 1), generator=g)] = -1
    table = table if replicas else table[:, 0].contiguous()
    emulate(lambda world: same_placement(world, ids, table), 2)


def test_a_placement_of_views() -> None:
    ids, table = some_ids(3, 70, 4, 1).t(), torch.arange(16, dtype=torch.int32).view(4, 4).t()
    emulate(lambda world: same_placement(world, ids, table), 2)


def test_physical_experts_by_token() -> None:
    def main(world: weft.World) -> None:
        ids = torch.tensor([[0, 1], [0, 2], [2, -1], [0, 7]], dtype=torch.int32)
        one = torch.tensor([2, 0, 1], dtype=torch.int32)
        assert moe.expert_placement(ids, one, world=world).tolist() == [[2, 0], [2, 1], [1, -1], [2, -1]]
        many = torch.tensor([[4, 0, 3], [1, -1, -1], [2, 5, -1]], dtype=torch.int32)
        physical = moe.expert_placement(ids, many, world=world).tolist()
        assert physical == (
            [[4, 1], [0, 5], [2, -1], [4, -1]] if world.rank == 0 else [[0, 1], [3, 2], [5, -1], [0, -1]]
        )
        with pytest.raises(ValueError, match="must be int32"):
            moe.expert_placement(ids, many.long(), world=world)

    emulate(main, 2)


# -- losses ------------------------------------------------------------------------------------------------------------

Losses = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def losses(world: weft.World, ids: torch.Tensor) -> list[Losses]:
    """Return each loss as computed by its kernel and by torch."""
    return [
        (lambda x: moe.load_balancing_loss(x, ids, world=world), lambda x: torch_balance(x, ids)),
        (lambda x: moe.z_loss(x, world=world), torch_z_loss),
    ]


def same_losses(world: weft.World, logits: torch.Tensor, ids: torch.Tensor) -> None:
    for kernel, by_torch in losses(world, ids):
        results = []
        for loss in (kernel, by_torch):
            leaf = logits.detach().requires_grad_()
            value = loss(leaf)
            assert value.shape == () and value.dtype == torch.float32
            (3 * value).backward()
            world.synchronize()
            results.append((value.detach(), leaf.grad))
        (value, grad), (expected, expected_grad) = results
        torch.testing.assert_close(value, expected, rtol=3e-6, atol=1e-6, equal_nan=True)
        assert grad is not None and expected_grad is not None and grad.dtype == logits.dtype
        rtol, atol = (2e-2, 1e-5) if logits.dtype.itemsize == 2 else (3e-5, 1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=rtol, atol=atol, equal_nan=True)
        torch.testing.assert_close(kernel(logits), expected, rtol=3e-6, atol=1e-6, equal_nan=True)


@DRAWN
@given(
    tokens=st.integers(0, 90),
    experts=st.integers(1, 40),
    k=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_losses_of_any_routing(tokens: int, experts: int, k: int, dtype: torch.dtype, wide: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, experts, generator=g) * 3).to(dtype)
    ids = some_ids(tokens, k, experts, seed)
    emulate(lambda world: same_losses(world, logits, ids.long() if wide else ids))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("special", ["nan", "all nan", "-inf", "all -inf", "inf", "-inf and inf"])
def test_losses_of_logits_that_are_not_finite(special: str) -> None:
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    row = logits[3]
    if special.startswith("all"):
        row[:] = float(special.removeprefix("all "))
    else:
        for column, value in enumerate(special.split(" and ")):
            row[column] = float(value)
    emulate(lambda world: same_losses(world, logits, some_ids(20, 2, 6, 1)))


def test_losses_of_views_and_of_the_largest_router() -> None:
    wide = torch.randn(9, 512, generator=torch.Generator().manual_seed(2))
    emulate(lambda world: same_losses(world, wide, some_ids(9, 16, 512, 3)))
    emulate(lambda world: same_losses(world, wide[:, :90].t(), some_ids(4, 90, 9, 3).t()))


def test_losses_have_the_same_bits_in_every_schedule() -> None:
    logits, ids = torch.randn(200, 12, generator=torch.Generator().manual_seed(2)), some_ids(200, 2, 12, 4)

    def main(world: weft.World) -> list[float]:
        values = [moe.load_balancing_loss(logits, ids, world=world), moe.z_loss(logits, world=world)]
        world.synchronize()
        return [v.item() for v in values]

    assert len({tuple(weft.spmd(main, 1, backend="emulated", seed=seed)[0]) for seed in range(6)}) == 1


def test_losses_by_their_formulas() -> None:
    def main(world: weft.World) -> None:
        logits, ids = torch.randn(12, 4), torch.arange(24).view(12, 2).int() % 4
        assert moe.load_balancing_loss(torch.zeros(12, 4), ids, world=world).item() == pytest.approx(1)
        p = torch.softmax(logits, 1).mean(0)
        to_one = moe.load_balancing_loss(logits, torch.full((12, 1), 2), world=world)
        assert to_one.item() == pytest.approx(4 * p[2].item())
        assert moe.load_balancing_loss(logits, torch.full((12, 1), -1), world=world).item() == 0
        assert moe.z_loss(torch.zeros(3, 8), world=world).item() == pytest.approx(math.log(8) ** 2)
        with pytest.raises(ValueError, match="T, E"):
            moe.z_loss(torch.zeros(8), world=world)
        with pytest.raises(ValueError, match="T, k"):
            moe.load_balancing_loss(torch.zeros(3, 8), ids, world=world)

    emulate(main)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_of_them_compiled(dynamic: bool) -> None:
    table = torch.tensor([[3, 0], [1, -1], [2, 5], [6, 7]], dtype=torch.int32)

    def main(world: weft.World) -> None:
        def step(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ids, weights = moe.gate(logits, 2, world=world)
            kept, dropped = moe.apply_capacity(ids, weights, 4, 0.7, drop="probability", world=world)
            loss = moe.load_balancing_loss(logits, ids, world=world) + moe.z_loss(logits, world=world)
            return (weights * (kept >= 0)).sum() + loss, moe.expert_placement(kept, table, world=world), dropped

        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for tokens in (30, 17) if dynamic else (30,):
            logits = torch.randn(tokens, 4)
            results = []
            for fn in (step, compiled):
                leaf = logits.clone().requires_grad_()
                loss, *rest = fn(leaf)
                loss.backward()
                results.append([loss.detach(), *rest, leaf.grad])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    torch._dynamo.reset()
    emulate(main)
