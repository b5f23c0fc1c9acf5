"""Mixtures of experts: what a user imports. `moe` runs a layer's experts over the ranks, `gate` makes the routing,
`limit` and `place` change it, `pack` lays out weights, `MoE` is the module; `dispatch` and `combine` are for experts of
one's own kernels."""

from .nn.moe import MoE
from .ops.moe.choice import limit, place
from .ops.moe.exchange import Handle, combine, dispatch
from .ops.moe.gate import gate, load_balancing_loss, z_loss
from .ops.moe.grouped_training import KEEPS
from .ops.moe.op import moe, pack

__all__ = [
    "KEEPS", "Handle", "MoE", "combine", "dispatch", "gate", "limit", "load_balancing_loss", "moe", "pack", "place",
    "z_loss",
]  # fmt: skip
