"""GPU checks of capacity, placement and the router's losses; tests/gpu/gpu_main.py runs them among its own checks.

To run them alone: torchrun --nproc-per-node N -m tests.gpu.gpu_main --out DIR --only "around the router"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from bench.common.timing import events_on_gpu
from tests.emulated.cases_router import (
    some_ids,
    some_weights,
    torch_balance,
    torch_capacity,
    torch_placement,
    torch_z_loss,
)
from weft import moe

SIZES = ((64, 8, 128), (1000, 3, 60), (4096, 8, 512), (5, 2, 1), (0, 2, 4))  # tokens, k, experts


def capacities(world: weft.World) -> float:
    """Return the number of results that differ from torch's, for random routes and for all routes to one expert."""
    wrong = 0
    for seed, (tokens, k, experts) in enumerate(SIZES):
        weights = some_weights(tokens, k, seed).to(world.device)
        for ids in (some_ids(tokens, k, experts, seed).to(world.device), torch.zeros_like(weights, dtype=torch.int32)):
            for drop in ("position", "probability"):
                for factor in (0.3, 1.0):
                    results = moe.apply_capacity(ids, weights, experts, factor, drop=drop, world=world)
                    expected = torch_capacity(ids, weights, experts, factor, drop)
                    wrong += sum(not torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    return float(wrong)


def placements(world: weft.World) -> float:
    wrong = 0
    for seed, (tokens, k, experts) in enumerate(SIZES):
        ids = some_ids(tokens, k, experts, seed).to(world.device)
        for replicas in (1, 3):
            table = torch.arange(experts * replicas, dtype=torch.int32, device=world.device).view(experts, replicas)
            table[::2, 1:] = -1
            expected = torch_placement(ids, table, world.rank)
            wrong += not torch.equal(moe.expert_placement(ids, table, world=world), expected)
    return float(wrong)


def losses(world: weft.World) -> float:
    """Return the largest relative error of the losses and their gradients, or infinity if a second call gives different
    bits."""
    worst = 0.0
    for seed, (tokens, k, experts) in enumerate(SIZES[:4]):
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(tokens, experts, generator=g).to(world.device).requires_grad_()
        ids = some_ids(tokens, k, experts, seed).to(world.device)
        for kernel, by_torch in (
            (partial(moe.load_balancing_loss, ids=ids, world=world), partial(torch_balance, ids=ids)),
            (partial(moe.z_loss, world=world), torch_z_loss),
        ):
            value, again, expected = kernel(logits), kernel(logits), by_torch(logits)
            (grad,), (expected_grad,) = (torch.autograd.grad(v, logits) for v in (value, expected))
            worst = max(worst, float((value - expected).detach().abs() / expected.detach().abs().clamp_min(1e-6)))
            worst = max(worst, float((grad - expected_grad).norm() / expected_grad.norm().clamp_min(1e-6)))
            worst = worst if torch.equal(value, again) else float("inf")
    return worst


def kernels_of(call: Callable[[], object]) -> int:
    """Return the number of kernels, copies and fills that the GPU runs in a repeated call."""
    return len(events_on_gpu(call))


def one_launch_each(world: weft.World) -> float:
    """Return the number of calls that need more than one kernel on the GPU."""
    ids, weights = some_ids(512, 8, 128, 0).to(world.device), some_weights(512, 8, 0).to(world.device)
    logits = torch.randn(512, 128, device=world.device)
    table = torch.arange(128, dtype=torch.int32, device=world.device)
    calls: tuple[Callable[[], object], ...] = (
        lambda: moe.apply_capacity(ids, weights, 128, 0.5, world=world),
        lambda: moe.apply_capacity(ids, weights, 128, 0.5, drop="probability", world=world),
        lambda: moe.expert_placement(ids, table, world=world),
        lambda: moe.load_balancing_loss(logits, ids, world=world),
        lambda: moe.z_loss(logits, world=world),
    )
    return float(sum(kernels_of(call) != 1 for call in calls))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    yield "around the router, capacity", 0.0, partial(capacities, world)
    yield "around the router, placement", 0.0, partial(placements, world)
    yield "around the router, losses", 1e-4, partial(losses, world)
    yield "around the router, one launch each", 0.0, partial(one_launch_each, world)
