"""The order in which a decomposed plan sends shards to the other ranks, or receives shards from them."""

from __future__ import annotations

import functools

from ..plans import Decomposed


def group_steps(plan: Decomposed, size: int) -> list[range]:
    """Return the steps of every group. Step s transfers the shard of rank ^ s. So each step is a perfect matching of
    ranks, and a group of 2^i steps transfers the shards of one contiguous run of ranks. If the world size is not a
    power of two, each group consists of one shard, and the groups are in ring order."""
    if size & (size - 1):
        return [range(s, s + 1) for s in range(size)]
    groups, steps, start = plan.groups or (1,) * size, [], 0
    for g in groups:
        if g < 1 or g & (g - 1) or start % g:
            raise ValueError(f"groups {groups}: each must be a power of two that divides the shards before it")
        steps.append(range(start, start + g))
        start += g
    if start != size:
        raise ValueError(f"groups {groups} do not sum to the world size {size}")
    return steps


def peer_at(step: int, rank: int, size: int) -> int:
    return rank ^ step if size & (size - 1) == 0 else (rank + step) % size


@functools.lru_cache(maxsize=1024)
def chunks(plan: Decomposed, rank: int, size: int) -> tuple[tuple[int, list[int]], ...]:
    """Return, for each group, the first rank of its run, and its ranks in the order of the steps."""
    groups = [[peer_at(s, rank, size) for s in group] for group in group_steps(plan, size)]
    return tuple((min(group), group) for group in groups)
