"""This rank's part of a Transformers model's linears and MLPs, without the wrappers of its tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ..ops.activation import silu_mul
from ..world import World


def part_of(weight: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part: a view of a whole tensor."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    share = weight.shape[dim] // world.size
    return weight.detach().narrow(dim, world.rank * share, share)


def bias_part(linear: nn.Linear, world: World, rows: bool) -> torch.Tensor | None:
    """Of columns this rank's; of rows the whole one, which the first rank adds to its partial sum."""
    if linear.bias is None:
        return None
    if not rows:
        return part_of(linear.bias, 0, world)
    bias = linear.bias.to_local() if isinstance(linear.bias, DTensor) else linear.bias.detach()
    return bias if world.rank == 0 else None


def linear_part(linear: nn.Linear, world: World, rows: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = part_of(linear.weight, int(rows), world), bias_part(linear, world, rows)
    return lambda x: F.linear(x, weight, bias)


def mlp_part(mlp: Any, world: World) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gate and up are stacked, which takes their bytes once more."""
    first = [part_of(linear.weight, 0, world) for linear in (mlp.gate_proj, mlp.up_proj)]
    weight, biases = torch.cat(first), [bias_part(linear, world, False) for linear in (mlp.gate_proj, mlp.up_proj)]
    bias = None if biases[0] is None or biases[1] is None else torch.cat([biases[0], biases[1]])
    down = linear_part(mlp.down_proj, world, True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        both = F.linear(x.flatten(0, -2), weight, bias)
        return down(silu_mul(both, world=world)).view(x.shape)

    return forward
