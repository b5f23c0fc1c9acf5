"""Mixtures of experts, in the form in which users import them.

`moe` runs a layer's experts over the ranks, `gate` computes the routing, `TopKRouter` is a router for `moe`,
`apply_capacity` and `expert_placement` change the routing, `pack` lays out weights, and `MoE` is the module. `dispatch`
and `combine` are for callers that have their own expert kernels.
"""

from .nn.moe import MoE
from .ops.moe.call import KEEPS
from .ops.moe.dispatch_combine.op import Handle, combine, dispatch
from .ops.moe.expert_parallel.op import moe, pack
from .ops.moe.routing.capacity import apply_capacity
from .ops.moe.routing.losses import load_balancing_loss, z_loss
from .ops.moe.routing.placement import expert_placement
from .ops.moe.routing.router import TopKRouter, gate

__all__ = [
    "KEEPS", "Handle", "MoE", "TopKRouter", "apply_capacity", "combine", "dispatch", "expert_placement", "gate",
    "load_balancing_loss", "moe", "pack", "z_loss",
]  # fmt: skip
