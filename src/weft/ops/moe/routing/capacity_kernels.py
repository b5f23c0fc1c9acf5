"""The kernel that limits every expert to a capacity. No rank and no program waits for another.

A program handles one expert at a time. Routes to no expert are treated as the routes of one additional expert. The
program reads the ids of all routes in order and counts the expert's routes, so this count is a route's position among
the routes of its expert, and the result does not depend on how programs are scheduled.

    by position    one pass over the ids drops each route whose position is not below the capacity
    by weight      the same pass keeps all routes and counts them; only if there are more than the capacity:
                       a second pass lists the expert's routes, each with a sort key of its weight
                       | all threads' stores are complete
                       four passes over the list find the smallest key that is kept, a byte at a time (radix selection)
                       the last pass drops smaller keys, and of equal ones the later routes

Each program also counts the routes of all lower experts in the first pass, and stores its own list after theirs. The
lists therefore do not overlap, and together they have as many entries as there are routes.
"""

import triton.language as tl

from ....lang.jit import jit
from .router_kernels import key_of


@jit
def load_own(ids, i, routes, expert, E: tl.constexpr):
    """Return which of the routes i belong to this expert, and which belong to lower experts. Expert E represents routes
    to no expert."""
    chosen = tl.load(ids + i, mask=i < routes, other=-1)
    chosen = tl.where((chosen >= 0) & (chosen < E), chosen, E)
    return (chosen == expert) & (i < routes), (chosen < expert) & (i < routes)


@jit
def weight_key(weight):
    """Return int32 bits that, compared as unsigned integers, are in the order of the float32 weights. A NaN comes after
    all numbers."""
    key = tl.where(weight == weight, key_of(weight), 0x7FFFFFFF)
    return key ^ -(2**31)


@jit
def list_own(ids, weights, listed, routes, expert, start, E: tl.constexpr, BLOCK: tl.constexpr):
    """List the expert's routes from entry `start` on. The first half of `listed` receives their keys, and the second
    half their indices."""
    for lo in range(0, routes, BLOCK):
        i = lo + tl.arange(0, BLOCK)
        is_own, _ = load_own(ids, i, routes, expert, E)
        entry = start + tl.cumsum(is_own.to(tl.int32), 0) - 1
        weight = tl.load(weights + i, mask=is_own, other=0.0)
        tl.store(listed + entry, weight_key(weight), mask=is_own)
        tl.store(listed + routes + entry, i, mask=is_own)
        start += tl.sum(is_own.to(tl.int32), 0)


@jit
def smallest_kept(keys, count, capacity, LIST: tl.constexpr):
    """Return the smallest of the `capacity` greatest keys among `count` unsigned keys, and how many keys equal to it
    are among the `capacity` greatest. With a capacity of 0, return the greatest possible key and 0."""
    prefix = tl.full((), 0, tl.uint32)
    kept = capacity
    byte = tl.arange(0, 256)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros((256,), tl.int32)
        for lo in range(0, count, LIST):
            i = lo + tl.arange(0, LIST)
            key = tl.load(keys + i, mask=i < count, other=0).to(tl.uint32, bitcast=True)
            upper = key >> shift
            counts += tl.histogram((upper & 255).to(tl.int32), 256, mask=(i < count) & ((upper >> 8) == prefix))
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        smallest = tl.sum((at_least >= kept).to(tl.int32), 0) - 1
        kept -= tl.sum(tl.where(byte > smallest, counts, 0), 0)
        prefix = (prefix << 8) | smallest.to(tl.uint32)
    return prefix, kept


@jit
def drop_smallest(kept_ids, keys, listed_routes, count, capacity, LIST: tl.constexpr):
    """Store -1 for the listed routes, except the routes with the `capacity` greatest of the `count` keys. Among routes
    with equal keys, the earlier ones are kept."""
    threshold, kept = smallest_kept(keys, count, capacity, LIST)
    equal_before = 0
    for lo in range(0, count, LIST):
        i = lo + tl.arange(0, LIST)
        key = tl.load(keys + i, mask=i < count, other=0).to(tl.uint32, bitcast=True)
        route = tl.load(listed_routes + i, mask=i < count, other=0)
        equal = (key == threshold) & (i < count)
        order = equal_before + tl.cumsum(equal.to(tl.int32), 0) - 1
        dropped = (key < threshold) | (equal & (order >= kept))
        tl.store(kept_ids + route, tl.full((LIST,), -1, tl.int32), mask=dropped & (i < count))
        equal_before += tl.sum(equal.to(tl.int32), 0)


@jit(do_not_specialize=("routes", "capacity"))
def limit_experts(
    ids,
    weights,
    kept_ids,
    dropped,
    listed,
    routes,
    capacity,
    E: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):
    """Compute kept_ids [routes] = the ids, with -1 in place of ids outside 0 to E - 1 and of routes beyond an expert's
    capacity. Also compute dropped [E] = the number of routes of each expert beyond its capacity. listed int32 [2,
    routes] is memory for the lists, which is used only if BY_WEIGHT. The kernel reads BLOCK routes of the ids, or LIST
    routes of a list, at a time."""
    for expert in range(tl.program_id(0), E + 1, tl.num_programs(0)):
        count, lower_count = 0, 0
        for lo in range(0, routes, BLOCK):
            i = lo + tl.arange(0, BLOCK)
            is_own, is_lower = load_own(ids, i, routes, expert, E)
            kept = is_own & (expert < E)
            if BY_WEIGHT:
                lower_count += tl.sum(is_lower.to(tl.int32), 0)
            else:
                kept = kept & (count + tl.cumsum(is_own.to(tl.int32), 0) - 1 < capacity)
            tl.store(kept_ids + i, tl.where(kept, expert, -1), mask=is_own)
            count += tl.sum(is_own.to(tl.int32), 0)
        excess = tl.maximum(count - capacity, 0)
        tl.store(dropped + expert, excess, mask=expert < E)
        if BY_WEIGHT:
            if (excess > 0) & (expert < E):
                list_own(ids, weights, listed, routes, expert, lower_count, E, BLOCK)
                # The barrier is needed because other threads of this program stored the list, and the ids that are
                # overwritten here.
                tl.debug_barrier()
                own_list = listed + lower_count
                drop_smallest(kept_ids, own_list, own_list + routes, count, capacity, LIST)
