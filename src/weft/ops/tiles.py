"""The choice of tiles for a plan's GEMM: the usual tiles, or tiles of half as many rows if they save half a wave.

P programs compute T tiles in T / P waves, rounded up. A last wave that leaves SMs idle needs hardly less time than a
full wave. A wave of 64 x 256 tiles with four warps needs half the time of a wave of 128 x 256 tiles. So these half
tiles are faster if 128 x 256 tiles fill one wave and at most half of the next. If all SMs are busy, the same GEMM is 3
to 8% slower with half tiles, and even slower during communication, because an SM reads the same number of columns for
half as many rows. With more waves, half tiles were at most 5% faster than 128 x 256 tiles in a separate GEMM, and up to
35% slower in a GEMM with a sum over ranks (H200, 2026-11: tests/planner/test_tiles.py, docs/design-notes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..architectures import HOPPER, features
from ..plans import Fused, FusedGather, FusedGatherByCopies, GemmTile, Plan, Signaled
from ..world import World

P = TypeVar("P", bound=Plan)
SMALL_TILES_KIB = 128  # shared memory of 128 x 256 x 64 tiles with mma.sync: three stages, two of them in flight
SAVED_BY_HALVES = 0.2  # the part of a round's time: 0.08 to 0.32 (fused ops on 2 H200s: tests/planner/test_tiles.py)


def half_tile_is_faster(shards: Sequence[int], n: int, programs: int) -> bool:
    """Return whether tiles of 64 rows save half a wave for n columns and shards with these numbers of rows. Each shard
    begins with a new tile, so if tiles span shards, all rows count as one shard."""
    columns = -(-n // 256)
    usual, half = (columns * sum(-(-rows // height) for rows in shards) for height in (128, 64))
    return programs < usual < 2 * programs and half <= 3 * programs


def splits_last_round(tiles: int, programs: int) -> bool:
    """Return whether two of a GEMM's programs share each tile of the last round (`compute.gemm.whole_tiles`). Calls
    without such a round run a kernel without half tiles."""
    return 0 < 2 * (tiles % programs) <= programs


def with_split_round(us: float, tiles: int, programs: int) -> float:
    """Return the time of a GEMM that splits its last round of tiles where `splits_last_round` says so. `us` is the time
    with whole tiles. A GEMM of less than one round is left as it is: the bytes of its operands bound it."""
    if tiles < programs or not splits_last_round(tiles, programs):
        return us
    return us * (1 - SAVED_BY_HALVES / -(-tiles // programs))


def with_architecture_tiles(plan: P, capability: int) -> P:
    """If the plan has Hopper's 128 x 256 x 64 tiles, return it with tiles that fit the shared memory and registers of a
    GPU of this compute capability. The number of waves stays the same, except for fused plans on GPUs before Hopper. On
    these GPUs mma.sync reads operands from registers, and an SM that also runs pull programs has too few registers for
    128 x 256."""
    if not isinstance(plan, Fused | Signaled):
        return plan
    tile = plan.tile
    if (tile.block_m, tile.block_n, tile.block_k) != (128, 256, 64):
        return plan
    can = features(capability)
    if isinstance(plan, Fused) and (not can.tma or can.shared_kib < SMALL_TILES_KIB):
        return replace(plan, tile=replace(tile, block_n=128))
    return replace(plan, tile=replace(tile, block_k=32)) if can.shared_kib < SMALL_TILES_KIB else plan


def usual_tile(world: World) -> GemmTile:
    """Return the default tile of a GEMM."""
    return with_architecture_tiles(world.backend.scale.plan(FusedGather), world.backend.capability).tile


def with_shape_tiles(plan: Plan, shards: Sequence[int], n: int, sms: int, capability: int = HOPPER) -> Plan:
    """If the plan has 128 x 256 tiles, return the plan with whichever tiles are faster on `sms` SMs, for shards with
    these numbers of rows and n columns. Signaled plans with explicit groups keep their tiles, because their groups are
    counted in waves. Half tiles were measured only on Hopper, so for other GPUs the function returns the result of
    `with_architecture_tiles`."""
    if not features(capability).wgmma:
        return with_architecture_tiles(plan, capability)
    if not isinstance(plan, Fused | Signaled) or (isinstance(plan, Signaled) and plan.groups):
        return plan
    tile: GemmTile = plan.tile
    if (tile.block_m, tile.block_n, tile.warps) != (128, 256, 8):
        return plan
    if isinstance(plan, Fused) or plan.copies:
        shards = [sum(shards)]  # tiles may span shards
    gathers = isinstance(plan, FusedGather | FusedGatherByCopies)  # no other kernel shares the GEMM's SMs
    taken_sms = plan.ctas if isinstance(plan, Signaled) else plan.pull_programs if isinstance(plan, FusedGather) else 0
    if not half_tile_is_faster(shards, n, sms - taken_sms):
        return plan
    # Four stages leave enough shared memory for the sum programs on the same SMs.
    half = replace(tile, block_m=64, warps=4, stages=5 if gathers or isinstance(plan, Signaled) else 4)
    if isinstance(plan, FusedGather):  # blocks of half as many rows keep the number of bytes in flight the same
        return replace(plan, tile=half, pull_rows=64, pull_stages=10)
    return replace(plan, tile=half)
