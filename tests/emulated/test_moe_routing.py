"""Emulated ranks share routes and compute routing tables, which must equal tables computed in plain Python. The
emulator itself raises an error for a race, a deadlock or a read of unwritten memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases_routing import Ids, Layer, copied, drawn, numbers, reference, routed_tables, routing
from tests.gates import some
from weft.ops.moe.routing.route_tables import TableSizes


def check(layer: Layer, routed: Callable[[int], list[Ids]], seed: int = 0, **options: Any) -> None:
    weft.spmd(routing(layer, routed), layer.ranks, backend="emulated", seed=seed, **options)


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize(
    "layer",
    [
        Layer(1, 6, 2, 9),
        Layer(2, 3, 3, 7),
        Layer(3, 2, 2, 11, block_m=8),
        Layer(4, 4, 4, 6),
        Layer(4, 1, 1, 9),
    ],
    ids=lambda layer: f"{layer.ranks} ranks, {layer.experts} experts",
)
def test_tables_of_random_routes(layer: Layer, seed: int) -> None:
    """Every call has new tokens, and in every second call the ranks have different numbers of tokens."""
    check(layer, lambda n: drawn(layer, 10 * seed + n), seed)


def test_many_blocks_and_sections() -> None:
    """There are more blocks than programs, several sections in each block, and several chunks of counts."""
    layer = Layer(2, 5, 4, 70, calls=2)
    check(layer, lambda n: drawn(layer, n), sm_count=2)


def test_more_experts_than_blocks() -> None:
    layer = Layer(2, 40, 2, 5, calls=2)
    check(layer, lambda n: drawn(layer, n))


@pytest.mark.parametrize("expert", [0, 5])
def test_all_tokens_to_one_expert(expert: int) -> None:
    """The second call routes all tokens to a different expert; the other ranks have nothing to do."""
    layer = Layer(3, 2, 1, 30)
    check(layer, lambda n: [[[(expert + n) % 6]] * 30 for _ in range(3)])


@pytest.mark.parametrize("max_rows", [0, 5, 16, 39])
def test_rows_without_room_are_left_out(max_rows: int) -> None:
    """The first expert or the last one is full, with several tiles, followed by experts without rows."""
    layer = Layer(2, 3, 2, 20, max_rows=max_rows)
    check(layer, lambda n: drawn(layer, n, [20, 20]))
    check(Layer(2, 3, 1, 20, max_rows=max_rows), lambda n: [[[n]] * 20, [[2 - n]] * 20])


def test_no_rank_has_a_token() -> None:
    layer = Layer(3, 2, 2, 4)
    check(layer, lambda n: drawn(layer, n, [0, 0, 0] if n != 1 else [0, 4, 1]))


def test_ids_of_no_expert_go_nowhere() -> None:
    layer = Layer(2, 2, 2, 4)
    check(layer, lambda n: [[[-1, -1], [99, 2], [-5, 1]], [[4, -1], [0, 3]]])


@pytest.mark.parametrize("seed", some(range(6)))
def test_schedules(seed: int) -> None:
    layer = Layer(3, 2, 2, 20, calls=4)
    check(layer, lambda n: drawn(layer, n), seed, preempt=0.3)


def test_layers_of_several_sizes_take_turns() -> None:
    """Layers with equal max_tokens_per_rank and k share memory; layers with equal sizes also share tables."""
    two_experts, three_experts = Layer(2, 2, 2, 5), Layer(2, 3, 2, 5, block_m=8)

    def main(world: weft.World) -> list[dict[str, Any]]:
        tables = []
        for n, layer in enumerate((two_experts, three_experts, two_experts)):
            ids = torch.tensor(drawn(layer, 2 * n + 1)[world.rank], dtype=torch.int32)
            sizes = TableSizes(layer.experts, layer.max_tokens_per_rank, layer.block_m)
            tables.append(copied(world, routed_tables(world, ids, ids.float(), sizes)[0]))
            world.barrier()
        world.synchronize()
        return [numbers(call_tables) for call_tables in tables]

    for rank, tables in enumerate(weft.spmd(main, 2, backend="emulated")):
        expected = [
            reference(layer, rank, drawn(layer, 2 * n + 1))
            for n, layer in enumerate([two_experts, three_experts, two_experts])
        ]
        assert all(
            m["route_rows"] == w["route_rows"] and m["offsets"] == w["offsets"]
            for m, w in zip(tables, expected, strict=True)
        )
        added = [w["touched"] for w in expected]
        assert tables[1]["targets"] == added[1]
        assert tables[2]["targets"] == [a + b for a, b in zip(added[0], added[2], strict=True)]
