"""Which tiles a plan's GEMM is cut into: the usual ones, or ones of half the rows where they fill the last wave.

A GEMM of T tiles on P programs takes about T / P rounded up, in waves, and a last wave that leaves SMs idle hardly less
than a whole one. Tiles of 64 x 256 with four warps take half a wave, and for the same product 6% longer where all SMs
are busy (`DEARER`), so they pay where the last wave of 128 x 256 tiles is up to half full and few come before it.
Measured for both main loops at 0.7 to 28 waves (bench/gemm.py, docs/design-notes.md); no other tiles were better
anywhere by more than what the timings vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..plans import Fused, Plan, Signaled

HALF = dict(block_m=64, block_n=256, warps=4, stages=5)
BESIDE = HALF | dict(stages=4)  # leaves room for the programs that sum on the same SMs
DEARER = 1.06  # time of a product in such tiles, all SMs busy, by that in the usual ones
SPARED = 0.1  # of what the last wave lacks in tiles, its time: the others get the power
USUAL = (128, 256, 8, 1), (128, 128, 4, 2)  # block_m, block_n, warps and programs an SM, of the plans that are offered


def waves(tiles: int, programs: int) -> float:
    """How long so many tiles take, in whole waves."""
    whole, rest = divmod(tiles, programs)
    if not rest:
        return whole
    return whole + 1 - (SPARED * (1 - rest / programs) if whole else 0)


def time(block_m: int, shards: Sequence[int], n: int, programs: int) -> float:
    """Of rows `shards`, each cut by itself, in waves of 128 x 256 tiles."""
    tiles = sum(-(-rows // block_m) for rows in shards) * -(-n // 256)
    return waves(tiles, programs) if block_m == 128 else waves(tiles, programs) * DEARER * block_m / 128


def suited(plan: Plan, gathers: bool, shards: Sequence[int], n: int, sms: int) -> Plan:
    """The plan with the tiles that suit rows `shards` by n columns on so many SMs. Of signaled plans those whose groups
    are not given, in waves. gathers: of an all-gather, whose GEMM has its SMs for itself."""
    if not isinstance(plan, Fused | Signaled) or (isinstance(plan, Signaled) and plan.groups):
        return plan
    per_sm = plan.per_sm if isinstance(plan, Fused) else 1
    if (plan.block_m, plan.block_n, plan.warps, per_sm) not in USUAL:
        return plan
    programs = sms - plan.ctas if isinstance(plan, Signaled) else sms - plan.pullers // per_sm if gathers else sms
    if gathers or (isinstance(plan, Signaled) and plan.copies):
        shards = [sum(shards)]  # whose tiles may span them
    if time(64, shards, n, programs) >= time(128, shards, n, programs):
        return plan
    if isinstance(plan, Signaled):
        return replace(plan, **HALF)
    if not gathers:
        return replace(plan, **BESIDE)
    # Pullers have as many bytes under way in blocks of half the rows.
    return replace(plan, pullers=plan.pullers // per_sm, per_sm=1, pull_rows=64, pull_stages=10, **HALF)
