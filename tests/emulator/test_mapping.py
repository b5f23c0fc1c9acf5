"""The mappings and tile orders are tested as plain functions: every row belongs to exactly one tile, one rank and one
channel."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.compute.gemm import grouped_tile
from weft.lang.mapping import (
    StaticMapping,
    balanced_rows,
    channel_arrivals,
    shard_tables,
    static_channels,
    static_rank,
    static_rows,
)
from weft.plans import Decomposed
from weft.transport.order import group_steps, peer_at

settings.register_profile("mapping", max_examples=150, deadline=None)
settings.load_profile("mapping")

worlds = st.integers(1, 8)
shards = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@st.composite
def static_mappings(draw: st.DrawFn, single: bool = False) -> tuple[StaticMapping, int]:
    """Draw a StaticMapping and its number of ranks; tiles may be longer than a channel or a shard unless `single` is
    set."""
    world, tile = draw(worlds), draw(st.integers(1, 24))
    channel = tile * draw(st.integers(1, 4)) if single else draw(st.integers(1, 24))
    rows = world * channel * draw(st.integers(1, 4))
    arrivals = channel // tile if single else 1
    return StaticMapping.over(rows, world, tile_rows=tile, channel_rows=channel, arrivals=arrivals), world


def tiles_of(m: StaticMapping) -> range:
    return range(-(-m.rows // m.tile_rows))


# -- StaticMapping -----------------------------------------------------------------------------------------------------


@given(static_mappings())
def test_static_every_row_has_one_tile_and_its_channels(case: tuple[StaticMapping, int]) -> None:
    m, world = case
    seen: Counter[int] = Counter()
    for tile in tiles_of(m):
        lo, hi = static_rows.fn(m, tile)
        seen.update(range(lo, hi))
        assert 0 <= static_rank.fn(m, tile) < world
        assert static_rank.fn(m, tile) == lo // m.rank_rows, "the rank must hold the tile's first row"
        first_channel, channels_end = static_channels.fn(m, tile)
        assert set(range(first_channel, channels_end)) == {row // m.channel_rows for row in range(lo, hi)}
        if m.single:
            assert channels_end == first_channel + 1
    assert seen == Counter(range(m.rows))
    assert len({row // m.channel_rows for row in range(m.rows)}) == m.rows // m.channel_rows
    for row in range(m.rows):  # a channel never spans ranks
        assert row // m.channel_rows * m.channel_rows // m.rank_rows == row // m.rank_rows


@given(static_mappings(single=True))
def test_consumers_wait_for_the_static_producer_counts(case: tuple[StaticMapping, int]) -> None:
    m, _ = case
    arrived: Counter[int] = Counter()
    for tile in tiles_of(m):
        channel, _ = static_channels.fn(m, tile)
        arrived[channel] += 1
    assert set(arrived) == set(range(m.rows // m.channel_rows))
    assert all(arrived[c] == channel_arrivals.fn(m, c) for c in arrived)


@given(static_mappings(single=True), st.integers(1, 60), st.randoms(use_true_random=False))
def test_static_a_wait_passes_exactly_when_its_rows_are_produced(
    case: tuple[StaticMapping, int], consumer_tile: int, rng: Random
) -> None:
    """Producers finish in any order; a consumer tile of a different size may start only when all its channels are
    complete."""
    producer, world = case
    consumer = StaticMapping.over(
        producer.rows, world, tile_rows=consumer_tile, channel_rows=producer.channel_rows, arrivals=producer.arrivals
    )
    order = list(tiles_of(producer))
    rng.shuffle(order)
    done: set[int] = set()
    arrived: Counter[int] = Counter()
    last = len(tiles_of(consumer)) - 1
    for tile in order:
        done.update(range(*static_rows.fn(producer, tile)))
        arrived[static_channels.fn(producer, tile)[0]] += 1
        for waiting in (0, last // 2, last):
            channels = range(*static_channels.fn(consumer, waiting))
            if all(arrived[c] >= channel_arrivals.fn(consumer, c) for c in channels):
                assert done >= set(range(*static_rows.fn(consumer, waiting)))
    assert done == set(range(producer.rows))
    assert all(arrived[c] == producer.arrivals for c in range(producer.rows // producer.channel_rows))


@pytest.mark.parametrize(
    ("rows", "world", "channel", "says"),
    [(10, 4, 1, "10 rows do not split evenly over 4 ranks"), (12, 2, 4, "shard of 6 rows is not a multiple of 4 rows")],
)
def test_static_refuses_unsupported_sizes(rows: int, world: int, channel: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StaticMapping.over(rows, world, tile_rows=2, channel_rows=channel, arrivals=1)


# -- tables ------------------------------------------------------------------------------------------------------------


@given(shards, st.integers(1, 48), st.integers(1, 48))
def test_tables_every_row_has_one_tile_rank_and_channel(rows: list[int], tile: int, channel: int) -> None:
    t = shard_tables(rows, tile_rows=tile, channel_rows=channel)
    m, world = sum(rows), len(rows)
    assert t["offset"] == [0, *accumulate(rows)]
    assert t["channel_base"] == [0, *accumulate(-(-r // channel) for r in rows)]
    owner = [r for r, n in enumerate(rows) for _ in range(n)]
    channel_of = [t["channel_base"][r] + i // channel for r, n in enumerate(rows) for i in range(n)]
    assert sorted(set(channel_of)) == list(range(t["channel_base"][world])), "every channel must have rows"
    seen: Counter[int] = Counter()
    for tile_at, (lo, hi) in enumerate(zip(t["row_lo"], t["row_hi"], strict=True)):
        assert hi > lo and hi - lo <= tile
        seen.update(range(lo, hi))
        assert t["rank"][tile_at] == owner[lo]
        channels = range(t["channel_lo"][tile_at], t["channel_hi"][tile_at])
        assert set(channels) == {channel_of[row] for row in range(lo, hi)}, (
            "the channels must be those of the tile's rows"
        )
    assert seen == Counter(range(m))


@given(static_mappings(single=True))
def test_tables_agree_with_the_affine_form(case: tuple[StaticMapping, int]) -> None:
    m, world = case
    t = shard_tables([m.rank_rows] * world, tile_rows=m.tile_rows, channel_rows=m.channel_rows)
    for tile in tiles_of(m):
        assert (t["row_lo"][tile], t["row_hi"][tile]) == static_rows.fn(m, tile)
        assert t["rank"][tile] == static_rank.fn(m, tile)
        assert (t["channel_lo"][tile], t["channel_hi"][tile]) == static_channels.fn(m, tile)


@given(st.integers(0, 5000), worlds)
def test_balanced_rows(rows: int, world: int) -> None:
    split = balanced_rows(rows, world)
    assert len(split) == world and sum(split) == rows
    assert split == sorted(split, reverse=True) and max(split) - min(split) <= 1


# -- tile orders -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
def test_grouped_tile_is_a_permutation(tiles_m: int, tiles_n: int, group: int) -> None:
    order = [grouped_tile.fn(t, tiles_m, tiles_n, group) for t in range(tiles_m * tiles_n)]
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]


@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_reduce_order_interleaves_owners_and_tickets_follow_it(
    world: int, tiles_m: int, tiles_n: int, groups: int
) -> None:
    """In gemm_reduce's order, each owner's tiles follow the order of the tickets, and the k-th tiles of all owners are
    adjacent."""
    group = groups * world
    for me in range(world):
        by_owner: dict[int, list[tuple[int, int]]] = {r: [] for r in range(world)}
        for t in range(world * tiles_m * tiles_n):
            tm, tn = grouped_tile.fn(t, world * tiles_m, tiles_n, group)
            by_owner[(tm + me + 1) % world].append((tm // world, tn))
            longest, shortest = max(map(len, by_owner.values())), min(map(len, by_owner.values()))
            assert longest - shortest <= 1, "owners' numbers of tiles may differ by one"
        tickets = [grouped_tile.fn(s, tiles_m, tiles_n, group // world) for s in range(tiles_m * tiles_n)]
        assert all(tiles == tickets for tiles in by_owner.values())


# -- chunk groups of the decomposed plans ------------------------------------------------------------------------------


def partitions(size: int) -> list[tuple[int, ...]]:
    """Yield all valid `groups` of a world of `size`."""
    all_groups: list[tuple[int, ...]] = []

    def grow(start: int, groups: tuple[int, ...]) -> None:
        if start == size:
            all_groups.append(groups)
        for g in (1, 2, 4, 8):
            if start + g <= size and start % g == 0:
                grow(start + g, (*groups, g))

    grow(0, ())
    return all_groups


@pytest.mark.parametrize("size", range(1, 9))
def test_group_steps_reach_every_peer_once_in_contiguous_runs(size: int) -> None:
    power = size & (size - 1) == 0
    plans = [Decomposed(), *(Decomposed(g) for g in partitions(size) if power)]
    for plan in plans:
        steps = group_steps(plan, size)
        assert [s for group in steps for s in group] == list(range(size))
        assert steps[0][0] == 0, "this rank's shard must come first"
        for rank in range(size):
            peers = [[peer_at(s, rank, size) for s in group] for group in steps]
            assert sorted(p for group in peers for p in group) == list(range(size))
            assert peers[0][0] == rank
            for group in peers:
                assert sorted(group) == list(range(min(group), min(group) + len(group)))
        for s in range(size):  # no two ranks read from the same peer in one step
            assert sorted(peer_at(s, rank, size) for rank in range(size)) == list(range(size))


@pytest.mark.parametrize("groups", [(3, 1), (1, 2, 1), (1,), (1, 1, 2, 4), (0, 4), (-4, 8)])
def test_groups_that_do_not_fit_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups"):
        group_steps(Decomposed(groups), 4)
