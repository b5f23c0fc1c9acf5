"""The kernel that maps logical to physical experts, route by route. No rank and no program waits for another."""

import triton.language as tl

from ....lang.jit import jit


@jit(do_not_specialize=("routes",))
def place_experts(
    ids,
    table,
    rank,
    physical_ids,
    routes,
    K: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute physical_ids [routes] = the physical experts that table [E, R] lists for the logical experts `ids`, or -1
    for none. Each token has K consecutive ids. RP: R rounded up to a power of two. rank: the address of this rank's
    number."""
    me = tl.load(rank)
    replica = tl.arange(0, RP)[None, :]
    for lo in range(tl.program_id(0) * BLOCK, routes, tl.num_programs(0) * BLOCK):
        i = lo + tl.arange(0, BLOCK)
        logical = tl.load(ids + i, mask=i < routes, other=-1)
        is_expert = (logical >= 0) & (logical < E)
        row = tl.where(is_expert, logical, 0).to(tl.int64) * R
        entries = tl.load(table + row[:, None] + replica, mask=is_expert[:, None] & (replica < R), other=-1)
        count = tl.sum((entries >= 0).to(tl.int32), 1)
        index = (i // K + me) % tl.maximum(count, 1)
        physical = tl.load(table + row + index, mask=is_expert & (count > 0), other=-1)
        tl.store(physical_ids + i, physical, mask=i < routes)
