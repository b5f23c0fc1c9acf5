"""The op that maps logical to physical experts, between the router and the experts, in one launch. No rank waits for
another.

The host reads nothing, so a CUDA graph can capture the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....kernel_launch import Launch, prepared
from ....op import Local, RowsCall, Shapes, registered
from ....plans import Plan, Sequential
from ....prepared import Run
from ....tensor_checks import check_devices, dims
from ....torch_library import CallOptions
from ....transport.memory import rank_word
from ....world import World
from .placement_kernels import place_experts
from .route_tables import power

EXPERT_PLACEMENT = "expert_placement"


@dataclass(frozen=True)
class PlacementCall(RowsCall):
    """A checked call: ids [m, k] of logical experts, each of which has at most `replicas` physical experts."""

    k: int
    experts: int
    replicas: int


class PlacementOperands(NamedTuple):
    ids: torch.Tensor
    table: torch.Tensor


def prepare_placement(world: World, call: PlacementCall, plan: Plan) -> Run:
    routes, columns = call.m * call.k, power(max(call.replicas, 1))
    block = max(16, world.backend.scale.gate_block // columns)
    programs = min(-(-routes // block), 4 * world.sm_count)
    launch = _place(world, programs, block, columns, call.k, call.experts, call.replicas)

    def run(operands: PlacementOperands, out: torch.Tensor) -> None:
        if routes:
            launch(world.current_stream(), ids=operands.ids, table=operands.table, physical_ids=out, routes=routes)

    return run


@prepared
def _place(world: World, programs: int, block: int, columns: int, k: int, experts: int, replicas: int) -> Launch:
    """Return the launch, in which a program handles `block` routes and `columns` replicas at a time."""
    sizes = dict(K=k, E=experts, R=replicas, RP=columns, BLOCK=block)
    return Launch(world, place_experts, programs, dict(num_warps=4, local=True), rank=rank_word(world), **sizes)


class PlacementOp(Local[PlacementCall]):
    """Operands: ids, table. Result: physical ids."""

    name = "moe_placement"
    public = EXPERT_PLACEMENT
    signature = "Tensor ids, Tensor table"
    operand_type = PlacementOperands
    runs = {Sequential: prepare_placement}

    def check(self, world: World, operands: PlacementOperands, options: CallOptions) -> PlacementCall:
        ids, table = operands
        check_devices(EXPERT_PLACEMENT, world, operands._asdict())
        if table.dim() not in (1, 2) or table.dtype != torch.int32 or ids.dim() != 2 or ids.dtype != torch.int32:
            raise ValueError(
                f"{EXPERT_PLACEMENT}: ids {dims(ids)} and table {dims(table)} must be int32 [T, k], and [E] or [E, R]"
            )
        return PlacementCall(ids.shape[0], ids.shape[1], table.shape[0], table.shape[1] if table.dim() == 2 else 1)

    def outputs(self, world: World, call: PlacementCall) -> Shapes:
        return [((call.m, call.k), torch.int32)]


PLACEMENT = registered(PlacementOp())


def expert_placement(ids: torch.Tensor, table: torch.Tensor, *, world: World) -> torch.Tensor:
    """Map logical experts to physical ones, for experts that move between ranks or have replicas (DeepSeek-V3, section
    3.4). If an expert has n replicas, token t of rank r is sent to replica (t + r) mod n.

    Args:
        ids: int32 [T, k], logical experts, -1 for none.
        table: int32 [E] or [E, R], the physical experts of each logical expert: up to R replicas, followed by -1.
            Physical expert p is expert p mod El of rank p // El, as in `weft.moe.moe`.
        world: the ranks, none of which waits for another.

    Returns:
        int32 [T, k], physical experts; -1 for none, for logical experts outside 0 to E - 1, and for experts without a
            replica.

    Raises:
        ValueError, TypeError: a shape, dtype or device is invalid; the message quotes it.
    """
    physical_ids: torch.Tensor = PLACEMENT(world, Sequential(), PlacementOperands(ids, table))
    return physical_ids
