"""The map from logical to physical experts, applied between the router and the experts.

The computation consists of torch operations on the device of the ids. The host reads nothing, so a CUDA graph can
capture it.
"""

from __future__ import annotations

import torch

from ....tensor_checks import dims
from ....world import World

EXPERT_PLACEMENT = "place"


def expert_placement(ids: torch.Tensor, table: torch.Tensor, *, world: World) -> torch.Tensor:
    """Map logical experts to physical ones, for experts that move between ranks or have replicas (DeepSeek-V3, section
    3.4). Of an expert with n replicas, token t of rank r takes replica (t + r) mod n.

    Args:
        ids: int32 [T, k], logical experts, -1 for none.
        table: int32 [E] or [E, R], the physical experts of each logical one: up to R replicas, followed by -1. Physical
            expert p is expert p mod El of rank p // El, as in `weft.moe.moe`.
        world: the ranks.

    Returns:
        int32 [T, k], physical experts; -1 for none, for logical experts outside 0 to E - 1, and for experts without a
            replica.

    Raises:
        ValueError: shapes or dtypes do not fit; the message quotes them.
    """
    if table.dim() not in (1, 2) or table.dtype != torch.int32 or ids.dim() != 2 or ids.dtype != torch.int32:
        raise ValueError(
            f"{EXPERT_PLACEMENT}: ids {dims(ids)} and table {dims(table)} must be int32 [T, k], and [E] or [E, R]"
        )
    replicas = table.view(table.shape[0], -1)
    count = (replicas >= 0).sum(1)
    valid = (ids >= 0) & (ids < table.shape[0])
    logical = torch.where(valid, ids, 0).long()
    replica = torch.arange(ids.shape[0], device=ids.device)[:, None] + world.rank
    return torch.where(valid, replicas[logical, replica % count[logical].clamp_min(1)], -1)
