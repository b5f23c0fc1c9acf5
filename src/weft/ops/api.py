"""The public ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan import Plan
from ..world import World
from . import all_gather_matmul as _ag
from . import matmul_reduce as _mr


def all_gather_matmul(
    x_shard: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    rows: Sequence[int] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    result, gathered = _ag.forward(x_shard, weight, bias, world, plan, out, return_gathered, rows)
    return (result, gathered) if return_gathered else result  # type: ignore[return-value]


def matmul_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World, plan: str | Plan = "auto", out: torch.Tensor | None = None) -> torch.Tensor:
    return _mr.forward(x, weight, bias, world, plan, out, False)


def matmul_all_reduce(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, world: World, plan: str | Plan = "auto", out: torch.Tensor | None = None) -> torch.Tensor:
    return _mr.forward(x, weight, bias, world, plan, out, True)
