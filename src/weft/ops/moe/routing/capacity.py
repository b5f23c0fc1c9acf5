"""A capacity for every expert, applied to the router's choice before the experts run.

The computation consists of torch operations on the device of the ids. The host reads nothing, so a CUDA graph can
capture it. Its integers are summed in a fixed order, so the same ids give the same result.
"""

from __future__ import annotations

import math

import torch

from ....tensor_checks import dims

APPLY_CAPACITY = "limit"
DROPS = ("position", "probability")


def apply_capacity(
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    capacity_factor: float,
    *,
    drop: str = "position",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop routes so that every expert takes at most ceil(capacity_factor T k / E) of this rank's routes (Fedus et al.
    2021, "Switch Transformers", equation 3).

    Args:
        ids: int32 [T, k], the experts of each token, -1 for none.
        weights: float32 [T, k].
        experts: E. Ids from E on are dropped and not counted.
        capacity_factor: a number above 0. With 1 an expert takes no more than an even routing would give it.
        drop: which routes are dropped. "position" drops those of the last tokens; "probability" drops those of the
            smallest weights, and of equal weights those of the later tokens.

    Returns:
        int32 [T, k], `ids` with -1 where a route was dropped; the weights of a token's other routes are not changed.
            And int32 [E], the number of dropped routes of each expert.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message quotes them.
    """
    _check_capacity(ids, weights, experts, capacity_factor, drop)
    tokens, k = ids.shape
    # Without the subtraction, 1.1 * 10, which is a little more than 11 in float, would give 12.
    expert_capacity = math.ceil(capacity_factor * tokens * k / experts - 1e-6)
    flat = ids.flatten().long()
    expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
    if drop == "probability":
        by_weight = torch.sort(weights.flatten(), descending=True, stable=True).indices
        order = by_weight[torch.sort(expert[by_weight], stable=True).indices]
    else:
        order = torch.sort(expert, stable=True).indices
    sorted_expert = expert[order]  # in ascending order
    expert_start = torch.searchsorted(sorted_expert, torch.arange(experts + 1, device=ids.device))
    position = torch.arange(sorted_expert.numel(), device=ids.device) - expert_start[sorted_expert]
    dropped = (position >= expert_capacity) & (sorted_expert < experts)
    sorted_ids = torch.where(dropped | (sorted_expert == experts), -1, sorted_expert).to(torch.int32)
    kept_ids = torch.empty_like(sorted_ids).scatter_(0, order, sorted_ids)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, sorted_expert, dropped.to(torch.int32))
    return kept_ids.view(tokens, k), counts[:experts]


def _check_capacity(ids: torch.Tensor, weights: torch.Tensor, experts: int, factor: float, drop: str) -> None:
    if ids.dim() != 2 or ids.shape[1] < 1 or weights.shape != ids.shape:
        raise ValueError(f"{APPLY_CAPACITY}: ids {dims(ids)} and weights {dims(weights)} must be [T, k]")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(f"{APPLY_CAPACITY}: ids {dims(ids)} must be int32, weights {dims(weights)} float32")
    if experts < 1 or not 0 < factor < math.inf:
        raise ValueError(f"{APPLY_CAPACITY}: {experts} experts, capacity_factor {factor!r}: both must be above 0")
    if drop not in DROPS:
        raise ValueError(f"{APPLY_CAPACITY}: drop {drop!r} is not one of {list(DROPS)}")
