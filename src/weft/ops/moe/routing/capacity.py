"""A limit on the routes that every expert takes, between the router and the experts.

torch's operations compute it on the device of the ids; the host reads nothing, so a CUDA graph holds it. Its integers
are summed in a fixed order: the same ids give the same result.
"""

from __future__ import annotations

import math

import torch

from ....tensor_checks import dims

LIMIT = "limit"
DROPS = ("position", "probability")


def limit(
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    capacity_factor: float,
    *,
    drop: str = "position",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every expert takes at most ceil(capacity_factor T k / E) of this rank's routes; further ones are dropped (Fedus
    et al. 2021, "Switch Transformers", equation 3).

    Args:
        ids: int32 [T, k], the experts of each token, -1 for none.
        weights: float32 [T, k].
        experts: E. Ids from E on are dropped, and not counted.
        capacity_factor: above 0. 1: no more than an even routing gives every expert.
        drop: which ones: by "position" those of the last tokens; by "probability" those of the smallest weights, of
            equal ones the later token's.

    Returns:
        int32 [T, k], `ids` with -1 for a route that was dropped; the weights of the token's others are as they were.
        And int32 [E], how many routes to each expert were dropped.

    Raises ValueError, TypeError: shapes, dtypes or options that do not fit, quoted.
    """
    _check_limit(ids, weights, experts, capacity_factor, drop)
    tokens, k = ids.shape
    most = math.ceil(capacity_factor * tokens * k / experts - 1e-6)  # 1.1 * 10 is 11, not a little more
    flat = ids.flatten().long()
    expert = torch.where((flat < 0) | (flat >= experts), experts, flat)
    if drop == "probability":
        best = torch.sort(weights.flatten(), descending=True, stable=True).indices
        order = best[torch.sort(expert[best], stable=True).indices]
    else:
        order = torch.sort(expert, stable=True).indices
    by = expert[order]  # one expert after another
    first = torch.searchsorted(by, torch.arange(experts + 1, device=ids.device))
    place = torch.arange(by.numel(), device=ids.device) - first[by]
    dropped = (place >= most) & (by < experts)
    kept = torch.where(dropped | (by == experts), -1, by).to(torch.int32)
    out = torch.empty_like(kept).scatter_(0, order, kept)
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, by, dropped.to(torch.int32))
    return out.view(tokens, k), counts[:experts]


def _check_limit(ids: torch.Tensor, weights: torch.Tensor, experts: int, factor: float, drop: str) -> None:
    if ids.dim() != 2 or ids.shape[1] < 1 or weights.shape != ids.shape:
        raise ValueError(f"{LIMIT}: ids {dims(ids)} and weights {dims(weights)} must be [T, k]")
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(f"{LIMIT}: ids {dims(ids)} must be int32, weights {dims(weights)} float32")
    if experts < 1 or not 0 < factor < math.inf:
        raise ValueError(f"{LIMIT}: {experts} experts, capacity_factor {factor!r}: both must be above 0")
    if drop not in DROPS:
        raise ValueError(f"{LIMIT}: drop {drop!r} is not one of {list(DROPS)}")
