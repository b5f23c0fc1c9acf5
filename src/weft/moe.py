"""Mixtures of experts: what a user imports. `moe` runs a layer's experts over the ranks, `gate` makes the routing,
`limit` and `place` change it, `pack` lays out weights, `MoE` is the module; `dispatch` and `combine` are for experts of
one's own kernels."""

from .nn.moe import MoE
from .ops.moe.dispatch_combine.op import Handle, combine, dispatch
from .ops.moe.expert_parallel.op import moe, pack
from .ops.moe.routing.capacity import limit
from .ops.moe.routing.placement import place
from .ops.moe.routing.router import gate, load_balancing_loss, z_loss
from .ops.moe.tensor_parallel.training import KEEPS

__all__ = [
    "KEEPS", "Handle", "MoE", "combine", "dispatch", "gate", "limit", "load_balancing_loss", "moe", "pack", "place",
    "z_loss",
]  # fmt: skip
