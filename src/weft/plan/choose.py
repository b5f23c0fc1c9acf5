"""`plan="auto"`: which Plan serves an (op, M, N, K) on this machine."""

from __future__ import annotations

from ..world import World
from .plan import KINDS, Fused, Plan

SMALL = Fused(
    pullers=2, block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2, pull_rows=8, pull_stages=2, batch=2, lag=1
)  # for worlds of a few programs a rank: the emulator


def choose(op: str, world: World, plan: str, m: int, n: int, k: int) -> Plan:
    if plan == "auto":
        plan = "fused"
    if plan not in KINDS:
        raise ValueError(f'{op}: plan {plan!r} is not "auto", one of {sorted(KINDS)}, or a Plan')
    if plan == "fused":
        return SMALL if world.sm_count < 32 else Fused()
    return KINDS[plan]()
