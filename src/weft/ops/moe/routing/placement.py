"""Physical experts of logical ones, between the router and the experts. torch's operations compute it on the device of
the ids; the host reads nothing, so a CUDA graph holds it.
"""

from __future__ import annotations

import torch

from ....tensor_checks import dims
from ....world import World

PLACE = "place"


def place(ids: torch.Tensor, table: torch.Tensor, *, world: World) -> torch.Tensor:
    """Physical experts of logical ones, where experts are moved between ranks or have replicas (DeepSeek-V3, section
    3.4): of an expert's n replicas token t of rank r takes number (t + r) mod n.

    Args:
        ids: int32 [T, k], logical experts, -1 for none.
        table: int32 [E] or [E, R], the physical experts of each logical one: up to R replicas, behind them -1. Physical
            expert p is number p mod El of rank p // El, as `weft.moe.moe` has it.
        world: the ranks.

    Returns: int32 [T, k]; -1 for none, for logical experts outside 0 to E - 1, and for those without a replica.

    Raises ValueError, TypeError: shapes or dtypes that do not fit, quoted.
    """
    if table.dim() not in (1, 2) or table.dtype != torch.int32 or ids.dim() != 2 or ids.dtype != torch.int32:
        raise ValueError(f"{PLACE}: ids {dims(ids)} and table {dims(table)} must be int32 [T, k], and [E] or [E, R]")
    replicas = table.view(table.shape[0], -1)
    count = (replicas >= 0).sum(1)
    there = (ids >= 0) & (ids < table.shape[0])
    logical = torch.where(there, ids, 0).long()
    turn = torch.arange(ids.shape[0], device=ids.device)[:, None] + world.rank
    return torch.where(there, replicas[logical, turn % count[logical].clamp_min(1)], -1)
