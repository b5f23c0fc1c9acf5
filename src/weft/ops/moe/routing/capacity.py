"""The op that limits every expert to a capacity, by dropping routes from the router's choice before the experts run.
The op is one launch, and no rank waits for another.

The host reads nothing, so a CUDA graph can capture the launch. The choice of the dropped routes depends only on the ids
and weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....kernel_launch import Launch, prepared
from ....op import Local, RowsCall, Shapes, registered
from ....plans import Plan, Sequential
from ....prepared import Run
from ....tensor_checks import check_devices, dims
from ....torch_library import CallOptions
from ....world import World
from .capacity_kernels import limit_experts
from .route_tables import power

APPLY_CAPACITY = "apply_capacity"
DROPS = ("position", "probability")
LIST = 1024  # the largest number of listed routes that a program reads at a time


@dataclass(frozen=True)
class CapacityCall(RowsCall):
    """A checked call: ids [m, k] of `experts` experts, and the capacity factor, which is an expert's capacity divided
    by an even share of the routes."""

    k: int
    experts: int
    factor: float
    drop: str

    @property
    def expert_capacity(self) -> int:
        # Without the subtraction, 1.1 * 10, which is a little more than 11 in float, would be rounded up to 12.
        return math.ceil(self.factor * self.m * self.k / self.experts - 1e-6)


class CapacityOperands(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor


def prepare_capacity(world: World, call: CapacityCall, plan: Plan) -> Run:
    routes, by_weight = call.m * call.k, call.drop == "probability"
    launch = _limit(world, call.experts, by_weight, min(power(routes), world.backend.scale.block))
    capacity = min(call.expert_capacity, routes)

    def run(operands: CapacityOperands, out: torch.Tensor) -> tuple[torch.Tensor]:
        dropped = world.empty((call.experts,), torch.int32)
        launch(
            world.current_stream(),
            ids=operands.ids,
            weights=operands.weights,
            kept_ids=out,
            dropped=dropped,
            listed=world.empty((2, routes), torch.int32) if by_weight else None,
            routes=routes,
            capacity=capacity,
        )
        return (dropped,)

    return run


@prepared
def _limit(world: World, experts: int, by_weight: bool, block: int) -> Launch:
    """Return the launch, in which a program reads `block` routes at a time."""
    sizes = dict(E=experts, BY_WEIGHT=by_weight, BLOCK=block, LIST=min(block, LIST))
    programs = min(experts + 1, world.sm_count)
    return Launch(world, limit_experts, programs, dict(num_warps=16 if block > 2048 else 4, local=True), **sizes)


class CapacityOp(Local[CapacityCall]):
    """Operands: ids, weights; options: experts, capacity_factor, drop. Results: ids, dropped routes."""

    name = "moe_capacity"
    public = APPLY_CAPACITY
    signature = "Tensor ids, Tensor weights, SymInt experts, float capacity_factor, str drop"
    results = 2
    operand_type = CapacityOperands
    runs = {Sequential: prepare_capacity}

    def check(self, world: World, operands: CapacityOperands, options: CallOptions) -> CapacityCall:
        (ids, weights), (experts, factor, drop) = operands, options
        check_devices(APPLY_CAPACITY, world, operands._asdict())
        if ids.dim() != 2 or ids.shape[1] < 1 or weights.shape != ids.shape:
            raise ValueError(f"{APPLY_CAPACITY}: ids {dims(ids)} and weights {dims(weights)} must be [T, k]")
        if ids.dtype != torch.int32 or weights.dtype != torch.float32:
            raise TypeError(f"{APPLY_CAPACITY}: ids {dims(ids)} must be int32, weights {dims(weights)} float32")
        if experts < 1 or not 0 < factor < math.inf:
            raise ValueError(f"{APPLY_CAPACITY}: {experts} experts, capacity_factor {factor!r}: both must be above 0")
        if drop not in DROPS:
            raise ValueError(f"{APPLY_CAPACITY}: drop {drop!r} is not one of {list(DROPS)}")
        return CapacityCall(ids.shape[0], ids.shape[1], experts, factor, drop)

    def outputs(self, world: World, call: CapacityCall) -> Shapes:
        return [((call.m, call.k), torch.int32), ((call.experts,), torch.int32)]

    def without_rows(self, world: World, call: CapacityCall, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out, world.zeros((call.experts,), torch.int32)


CAPACITY = registered(CapacityOp())


def apply_capacity(
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    capacity_factor: float,
    *,
    world: World,
    drop: str = "position",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop routes so that every expert receives at most ceil(capacity_factor T k / E) of this rank's routes (Fedus et
    al. 2021, "Switch Transformers", equation 3).

    Args:
        ids: int32 [T, k], the experts of each token, -1 for none. A token may have two routes to the same expert.
        weights: float32 [T, k].
        experts: E. Ids outside 0 to E - 1 are dropped and not counted.
        capacity_factor: a positive number. With a factor of 1, an expert receives at most as many routes as under even
            routing.
        world: the World of the ids' device. No rank waits for another.
        drop: which routes are dropped. "position" drops the last tokens' routes; "probability" drops the routes with
            the smallest weights, and among equal weights the later tokens' routes. A NaN is greater than all numbers.

    Returns:
        int32 [T, k], which is `ids` with -1 in place of each dropped route, and int32 [E], the number of
            dropped routes of each expert. The weights of a token's other routes are not changed.

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is invalid; the message quotes it.
    """
    weights = weights.detach() if isinstance(weights, torch.Tensor) else weights
    options = experts, float(capacity_factor), drop
    kept_ids, dropped = CAPACITY(world, Sequential(), CapacityOperands(ids, weights), options)
    return kept_ids, dropped
