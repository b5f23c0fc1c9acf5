"""Concurrent operators run on several streams of ranks whose hosts run ahead (cases_streams.py)."""

from __future__ import annotations

import pytest

from tests.emulated.cases_streams import OPS, PAIRS, drawn, run
from tests.gates import some

PER_CASE = 4


@pytest.mark.parametrize("first_seed", some(range(0, 400, PER_CASE)))
def test_nothing_is_found_in_random_calls_on_several_streams(first_seed: int) -> None:
    """`python -m tests.emulated.cases_streams 10000` runs more seeds."""
    for seed in range(first_seed, first_seed + PER_CASE):
        run(seed)


def test_tiles_beyond_a_shard_load_nothing_that_the_next_call_writes() -> None:
    """The last tile of five gathered rows extends beyond them, and the next operator on the arena fills the other
    half."""
    run(1423)


def test_the_gates_seeds_cover_every_pair_of_operators_and_plan() -> None:
    sequences = [drawn(seed) for seed in range(400)]
    pairs = {tuple(call.op for call in sequence.calls[:2]) for sequence in sequences[::2]}
    assert pairs == set(PAIRS)
    calls = [(call, sequence) for sequence in sequences for call in sequence.calls]
    for name, op in OPS.items():
        for nodes, plans in ((1, op.plans), (2, op.over_nodes)):
            choices = {
                int(call.choice * len(plans)) for call, sequence in calls if (call.op, sequence.nodes) == (name, nodes)
            }
            assert choices == set(range(len(plans))), (name, nodes)
