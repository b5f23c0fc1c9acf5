"""Which Plan a kind's name, or "auto", means for an (op, M, N, K)."""

from __future__ import annotations

from dataclasses import replace

from ..world import World
from .auto import auto
from .plan import KINDS, Fused, Plan, Signaled

SMALL = Fused(
    pullers=2,
    block_m=16,
    block_n=32,
    block_k=32,
    group_m=2,
    warps=4,
    stages=2,
    pull_rows=8,
    pull_stages=2,
    batch=2,
    lag=1,
)  # for worlds of a few programs a rank: the emulator

SMALL_SIGNALED = Signaled(ctas=1, block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)

# Two programs a SM: one's epilogue and notify under the other's main loop.
TWO = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)
FUSED = {
    "all_gather_matmul": Fused(),
    "matmul_reduce_scatter": replace(TWO, pullers=16),
    "matmul_all_reduce": replace(TWO, pullers=32, lag=12),
}


def fused_default(op: str, world: World) -> Fused:
    """What plan="fused" means: block sizes and pullers that served most shapes on 8 H200s."""
    return SMALL if world.sm_count < 32 else FUSED[op]


def choose(op: str, world: World, plan: str, m: int, n: int, k: int, capturing: bool) -> Plan:
    """The Plan for "auto" (see auto.py) or a kind's name. `capturing`: in a CUDA graph, where many small launches cost little.
    Raises ValueError for any other name."""
    if plan == "auto":
        if world.sm_count < 32:
            return SMALL if op in FUSED else SMALL_SIGNALED
        return auto(op, world, m, n, k, "graph" if capturing else "eager")
    if plan not in KINDS:
        raise ValueError(f'{op}: plan {plan!r} is not "auto", one of {sorted(KINDS)}, or a Plan')
    if plan == "signaled" and world.sm_count < 32:
        return SMALL_SIGNALED
    return fused_default(op, world) if plan == "fused" else KINDS[plan]()
