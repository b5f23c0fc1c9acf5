"""Which Plan a kind's name, or "auto", means for an (op, M, N, K)."""

from __future__ import annotations

from ..world import World
from .auto import auto
from .plan import KINDS, Fused, Plan, Signaled, TwoShot

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
    forward=1,
    batch=2,
    lag=1,
)  # this and the next two: for worlds of a few programs a rank, as in the emulator
SMALL_REDUCE = TwoShot(warps=4, rows=2, stages=2)
SMALL_SIGNALED = Signaled(ctas=1, block_m=16, block_n=32, block_k=32, group_m=2, warps=4, stages=2)

FUSED = {
    "all_gather_matmul": Fused(),
    "matmul_reduce_scatter": Fused(pullers=48, pull_rows=64, pull_stages=4, forward=16),
    "matmul_all_reduce": Fused(pullers=96, pull_rows=32, pull_stages=7, forward=16),
}

REDUCE = ("all_reduce_rms_norm", "all_reduce")  # ops of no GEMM: N is the row's length, K is 1


def kinds(op: str) -> list[str]:
    """The kinds of plans that serve an op."""
    if op in REDUCE:
        return ["sequential", "decomposed", "one_shot", "two_shot", "multicast"]
    if op not in FUSED:
        return ["sequential", "signaled"]
    after = [] if op == "all_gather_matmul" else ["signaled"]  # a signal is for communication that comes after the GEMM
    shots = ["one_shot", "two_shot"] if op == "matmul_all_reduce" else ["one_shot"]
    return ["sequential", "decomposed", "fused", *shots, *after]


def fused_default(op: str, world: World) -> Fused:
    """What plan="fused" means: block sizes and pullers that served most shapes on 8 H200s."""
    return SMALL if world.sm_count < 32 else FUSED[op]


def choose(op: str, world: World, plan: str, m: int, n: int, k: int, capturing: bool) -> Plan:
    """The Plan for "auto" (see auto.py) or a kind's name. `capturing`: in a CUDA graph, where many small launches cost little.
    Raises ValueError for any other name."""
    if plan == "auto":
        if world.sm_count < 32:
            return SMALL_REDUCE if op in REDUCE else SMALL if op in FUSED else SMALL_SIGNALED
        return auto(op, world, m, n, k, "graph" if capturing else "eager")
    if plan not in kinds(op):
        raise ValueError(f'{op}: plan {plan!r} is not "auto", one of {sorted(kinds(op))}, or a Plan')
    if plan == "signaled" and world.sm_count < 32:
        return SMALL_SIGNALED
    return fused_default(op, world) if plan == "fused" else KINDS[plan]()
