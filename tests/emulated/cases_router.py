"""Capacity, placement and the router's losses in torch operations. On every backend the kernels' results must equal
them.
"""

from __future__ import annotations

import math

import torch


def torch_capacity(
    ids: torch.Tensor, weights: torch.Tensor, experts: int, factor: float, drop: str
) -> tuple[torch.Tensor, torch.Tensor]:
    expert_capacity = math.ceil(factor * ids.numel() / experts - 1e-6)
    flat = ids.flatten().long()
    expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
    if drop == "probability":
        by_weight = torch.sort(weights.flatten(), descending=True, stable=True).indices
        order = by_weight[torch.sort(expert[by_weight], stable=True).indices]
    else:
        order = torch.sort(expert, stable=True).indices
    sorted_expert = expert[order]
    expert_start = torch.searchsorted(sorted_expert, torch.arange(experts + 1, device=ids.device))
    position = torch.arange(sorted_expert.numel(), device=ids.device) - expert_start[sorted_expert]
    dropped = (position >= expert_capacity) & (sorted_expert < experts)
    sorted_ids = torch.where(dropped | (sorted_expert == experts), -1, sorted_expert).to(torch.int32)
    kept_ids = torch.empty_like(sorted_ids).scatter_(0, order, sorted_ids)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, sorted_expert, dropped.to(torch.int32))
    return kept_ids.view(ids.shape), counts[:experts]


def torch_placement(ids: torch.Tensor, table: torch.Tensor, rank: int) -> torch.Tensor:
    replicas = table.view(table.shape[0], -1)
    count = (replicas >= 0).sum(1)
    valid = (ids >= 0) & (ids < table.shape[0])
    logical = torch.where(valid, ids, 0).long()
    replica = torch.arange(ids.shape[0], device=ids.device)[:, None] + rank
    return torch.where(valid, replicas[logical, replica % count[logical].clamp_min(1)], -1)


def torch_balance(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    tokens, experts = logits.shape
    mean = torch.softmax(logits.float(), -1).sum(0) / max(tokens, 1)
    routes = torch.zeros(experts + 1, device=ids.device)  # the last entry counts routes to no expert
    expert = torch.where((ids < 0) | (ids >= experts), experts, ids).flatten().long()
    routes.scatter_add_(0, expert, torch.ones(ids.numel(), device=ids.device))
    share = routes[:experts] / routes[:experts].sum().clamp_min(1)
    return experts * (share * mean).sum()


def torch_z_loss(logits: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits.float(), -1).square().sum() / max(logits.shape[0], 1)


def some_ids(tokens: int, k: int, experts: int, seed: int) -> torch.Tensor:
    """Return int32 [tokens, k]: expert numbers, among which low numbers are more frequent. A token may list an expert
    twice, and some entries are -1 or another invalid expert number."""
    g = torch.Generator().manual_seed(seed)
    ids = (torch.rand(tokens, k, generator=g).square() * experts).int()
    kind = torch.randint(0, 12, (tokens, k), generator=g)
    for number, wrong in enumerate((-1, experts, 2**31 - 1, -(2**31))):
        ids[kind == number] = wrong
    return ids


def some_weights(tokens: int, k: int, seed: int, odd: bool = True) -> torch.Tensor:
    """Return float32 [tokens, k], many of them equal. With `odd`, some are negative, zeros of either sign,
    infinities or NaN."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.randn(tokens, k, generator=g)
    kind = torch.randint(0, 20, (tokens, k), generator=g)
    weights = torch.where(kind < 8, weights.mul(2).round().div(2), weights.abs())
    for number, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan")) if odd else ()):
        weights[kind == 19 - number] = special
    return weights
