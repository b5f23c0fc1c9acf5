"""Which tiles a plan's GEMM is cut into: the usual ones, or ones of half the rows where a second wave is half empty.

T tiles on P programs take T / P waves, rounded up: a last wave that leaves SMs idle takes hardly less than a whole one.
Tiles of 64 x 256 with four warps take half a wave, so they pay where 128 x 256 tiles fill one wave and at most half of
the next. The same product takes 3 to 8% longer in them where all SMs are busy, and more beside communication, since an
SM reads as many columns for half the rows: with more waves they were at most 5% ahead in a GEMM alone, and up to 35%
behind in a sum over ranks (bench/measure/gemm.py, bench/measure/tiles.py, docs/design-notes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..architectures import HOPPER, shared_kib
from ..plans import Fused, FusedGather, FusedGatherByCopies, GemmTile, Plan, Signaled

P = TypeVar("P", bound=Plan)
SMALL_TILES_KIB = 128  # what 128 x 256 x 64 tiles take with mma.sync, three stages of which two are under way


def half_suits(shards: Sequence[int], n: int, programs: int) -> bool:
    """Whether tiles of 64 rows spare half a wave: for rows `shards`, each cut by itself, and n columns."""
    columns = -(-n // 256)
    usual, half = (columns * sum(-(-rows // height) for rows in shards) for height in (128, 64))
    return programs < usual < 2 * programs and half <= 3 * programs


def fitting(plan: P, capability: int) -> P:
    """The plan with tiles for the memory and the registers of a GPU of that capability, where it has 128 x 256 x 64
    ones, for Hopper's. The waves stay the same, but for fused plans before Hopper: mma.sync takes operands from
    registers, and beside programs that pull an SM has not enough of them for 128 x 256."""
    if not isinstance(plan, Fused | Signaled):
        return plan
    tile = plan.tile
    if (tile.block_m, tile.block_n, tile.block_k) != (128, 256, 64):
        return plan
    if isinstance(plan, Fused) and (capability < HOPPER or shared_kib(capability) < SMALL_TILES_KIB):
        return replace(plan, tile=replace(tile, block_n=128))
    return replace(plan, tile=replace(tile, block_k=32)) if shared_kib(capability) < SMALL_TILES_KIB else plan


def suited(plan: Plan, shards: Sequence[int], n: int, sms: int, capability: int = HOPPER) -> Plan:
    """The plan with the tiles that suit rows `shards` by n columns on so many SMs, where it has 128 x 256 ones. Of
    signaled plans those whose groups are not given, in waves. On another GPU than Hopper, where half tiles were not
    measured: `fitting`."""
    if capability != HOPPER:
        return fitting(plan, capability)
    if not isinstance(plan, Fused | Signaled) or (isinstance(plan, Signaled) and plan.groups):
        return plan
    tile: GemmTile = plan.tile
    if (tile.block_m, tile.block_n, tile.warps) != (128, 256, 8):
        return plan
    gathers = isinstance(plan, FusedGather | FusedGatherByCopies)  # the GEMM has its SMs for itself
    if gathers or (isinstance(plan, Signaled) and plan.copies):
        shards = [sum(shards)]  # whose tiles may span them
    taken = plan.ctas if isinstance(plan, Signaled) else plan.pull_programs if isinstance(plan, FusedGather) else 0
    if not half_suits(shards, n, sms - taken):
        return plan
    # Four stages leave room for the programs that sum on the same SMs.
    half = replace(tile, block_m=64, warps=4, stages=5 if gathers or isinstance(plan, Signaled) else 4)
    if isinstance(plan, FusedGather):  # programs have as many bytes under way, in blocks of half the rows
        return replace(plan, tile=half, pull_rows=64, pull_stages=10)
    return replace(plan, tile=half)
