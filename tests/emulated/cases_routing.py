"""Routings of layers of experts, and their tables in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from weft import Overflow, World
from weft.ops.moe.routing.route_tables import Tables, TableSizes, builder_of, left_out_words, run_builder, share_routes

Ids = list[list[int]]  # the experts of a rank's tokens


@dataclass
class Layer:
    ranks: int
    experts: int  # experts per rank
    k: int
    max_tokens_per_rank: int
    block_m: int = 4
    calls: int = 3
    max_rows: int | None = None

    @property
    def rows(self) -> int:
        most = self.ranks * self.max_tokens_per_rank * min(self.k, self.experts)
        most = most if self.max_rows is None else min(most, self.max_rows)
        return (-(-most // self.block_m) + self.experts) * self.block_m


def reference(layer: Layer, rank: int, ids: list[Ids]) -> dict[str, Any]:
    """Return a rank's tables except for `targets`, and `lost`, which counts the dropped routes by the rank that owns
    their tokens. `touched` is the number that a call adds to the touched counts, by source step. `ids` are listed by
    rank, without padding."""
    w, el, bm, c = layer.ranks, layer.experts, layer.block_m, layer.max_tokens_per_rank
    slots, rows, offsets, received = [-1] * (w * c * layer.k), [], [0], []
    listed, lost = [], [0] * w
    for e in range(el):
        own_routes = [
            (wave, s, t, slot)
            for wave, s in enumerate((rank - j) % w for j in range(w))
            for t, chosen in enumerate(ids[s])
            for slot, x in enumerate(chosen)
            if x == rank * el + e
        ]
        room = layer.rows - offsets[-1]
        for i, (_, s, t, slot) in enumerate(own_routes):
            slots[(s * c + t) * layer.k + slot] = offsets[-1] + i if i < room else -2
        for _, s, *_ in own_routes[room:]:
            lost[s] += 1
        own_routes = own_routes[:room]
        for tile_start in range(0, len(own_routes), bm):
            waves = [wave for wave, *_ in own_routes[tile_start : tile_start + bm]]
            listed.append((max(waves), e, offsets[-1] + tile_start, min(waves)))
        rows += [s * c + t for _, s, t, _ in own_routes] + [-1] * (-len(own_routes) % bm)
        offsets.append(len(rows))
        received.append(len(own_routes))
    tiles = [[row, e, first_step, last_step] for last_step, e, row, first_step in sorted(listed)]
    touched = [sum(first_step <= j <= last_step for *_, first_step, last_step in tiles) for j in range(w)]
    until = [sum(last <= j for *_, last in tiles) for j in range(w)]
    return dict(route_rows=slots, sources=rows, offsets=offsets, tiles=tiles, tile_count=[len(tiles)], cumulative_tiles=until, received=received, touched=touched, lost=lost)  # fmt: skip


def drawn(layer: Layer, seed: int, tokens: list[int] | None = None) -> list[Ids]:
    """Draw distinct experts for every token, some of them -1, and list them by rank."""
    r = random.Random(seed)
    everyone = range(layer.ranks * layer.experts)
    counts = tokens or [
        layer.max_tokens_per_rank if seed % 2 else r.randint(0, layer.max_tokens_per_rank) for _ in range(layer.ranks)
    ]
    return [[[x if r.random() < 0.9 else -1 for x in r.sample(everyone, layer.k)] for _ in range(n)] for n in counts]


def routing(layer: Layer, routed: Callable[[int], list[Ids]]) -> Callable[[World], None]:
    """Share routes, build their tables, and return the results. `World.barrier` separates calls in place of the rest of
    a layer. `routed(n)` returns every rank's ids in call n."""

    def main(world: World) -> None:
        seen = []
        for n in range(layer.calls):
            own_ids = routed(n)[world.rank]
            ids = torch.tensor(own_ids, dtype=torch.int32).view(len(own_ids), layer.k)
            sizes = TableSizes(layer.experts, layer.max_tokens_per_rank, layer.block_m, layer.max_rows)
            tables = routed_tables(world, ids, weights_of(ids, world.rank), sizes)
            seen.append(copied(world, *tables))
            world.barrier()  # no rank may share routes again before all ranks have read the current ones
        lost = [[reference(layer, r, routed(n))["lost"] for n in range(layer.calls)] for r in range(layer.ranks)]
        by_source = torch.tensor(lost).sum(1)  # [rank whose experts are full, rank of the tokens]
        message = ""
        try:
            world.synchronize()
        except Overflow as e:
            message = str(e)
        own_lost = int(by_source[world.rank].sum())
        start = f"rank {world.rank}: its experts received {own_lost} rows more" if own_lost else ""
        assert message.startswith(start) and bool(message) == bool(own_lost)
        by_source.fill_diagonal_(0)
        assert (
            left_out_words(world).words.tolist() == by_source[:, world.rank].tolist()
        )  # no weighted sums follow, which would read and clear the words
        targets = [0] * layer.ranks
        for n, (ids_all, weights_all, *tables) in enumerate(seen):
            ids = routed(n)
            for source, source_ids in enumerate(ids):
                none = layer.max_tokens_per_rank - len(source_ids)
                assert ids_all[source].tolist() == source_ids + [[-1] * layer.k] * none
                weights = weights_of(torch.tensor(source_ids).view(len(source_ids), layer.k), source)
                assert weights_all[source].tolist() == weights.tolist() + [[0.0] * layer.k] * none
            expected = reference(layer, world.rank, ids)
            expected.pop("lost")
            targets = [a + b for a, b in zip(targets, expected.pop("touched"), strict=True)]
            assert numbers(tables) == dict(expected, targets=targets), f"rank {world.rank}, call {n}"

    return main


def routed_tables(
    world: World, ids: torch.Tensor, weights: torch.Tensor, sizes: TableSizes
) -> tuple[Tables, torch.Tensor, torch.Tensor]:
    """Share these routes, build the tables, and return them with all ranks' ids and weights."""
    builder, tables = builder_of(world, ids.shape[1], sizes)
    all_weights = builder.routes.shared_weights.local
    share_routes(world, builder.routes, ids, weights)
    run_builder(world, builder, tables, all_weights)
    return tables, builder.routes.ids, all_weights


def weights_of(ids: torch.Tensor, rank: int) -> torch.Tensor:
    return (ids * 8 + rank + 1).float()


def copied(world: World, tables: Tables, *others: torch.Tensor) -> list[torch.Tensor]:
    """Copy the other ranks' entries and then the tables, in stream order."""
    tensors = [*others, *tables]
    kept = [torch.empty_like(t) for t in tensors]
    world.call(lambda: [a.copy_(b) for a, b in zip(kept, tensors, strict=True)], tensors, kept, world.current_stream())
    return kept


def numbers(tables: list[torch.Tensor]) -> dict[str, Any]:
    """Return the tables by name, without entries that have no meaning."""
    out = {name: t.tolist() for name, t in zip(Tables._fields, tables, strict=True)}
    rows = out["offsets"][-1]
    assert out["sources"][rows:] == [-1] * (len(out["sources"]) - rows)
    return dict(out, sources=out["sources"][:rows], tiles=out["tiles"][: out["tile_count"][0]])


def tables_of(ids_all: torch.Tensor, me: int, local: int, rows: int, block_m: int) -> dict[str, torch.Tensor]:
    """Return the tables of rank `me` as tensors. ids_all is [ranks, capacity, k]; `local` is the rank's number of
    experts."""
    ranks, capacity, k = ids_all.shape
    slots, sources = torch.full((ranks, capacity, k), -1), torch.full((rows,), -1)
    offsets, tiles, received, targets, row = [0], [], [], torch.zeros(ranks, dtype=torch.int64), 0
    for expert in range(local):
        expert_start, of_row = row, []
        for wave in range(ranks):
            source = (me - wave) % ranks
            for t, slot in (ids_all[source] == me * local + expert).nonzero().tolist():
                slots[source, t, slot], sources[row] = row, source * capacity + t
                of_row.append(wave)
                row += 1
        for lo in range(0, len(of_row), block_m):
            inside = of_row[lo : lo + block_m]
            tiles.append((inside[-1], expert, expert_start + lo, inside[0]))
            targets[inside[0] : inside[-1] + 1] += 1
        received.append(row - expert_start)
        row = -(-row // block_m) * block_m
        offsets.append(row)
    listed = [(first_step, expert, lo, last_step) for last_step, expert, first_step, lo in sorted(tiles)]
    return dict(
        route_rows=slots.flatten(), sources=sources, offsets=torch.tensor(offsets), tiles=torch.tensor(listed).view(-1, 4),
        tile_count=torch.tensor([len(listed)]), cumulative_tiles=torch.tensor([sum(t[3] <= j for t in listed) for j in range(ranks)]), received=torch.tensor(received), targets=targets,
    )  # fmt: skip
