"""Routes of a mixture of experts: shared with all ranks, and made into the tables that place the rows of every rank's
own experts.

W ranks, each with T <= C tokens, C the same on all; k routes a token; rank d holds experts d * El .. (d + 1) * El - 1.
Everything stays on the device: two launches after that of the gate and of `share`, no number read by the host,
capturable in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...backends.base import SymmetricTensor
from ...lang.channel import BlockChannel
from ...op import check_call
from ...operands import check_device, dense, dims, places
from ...transport.memory import rank_word
from ...world import World
from .routing_kernels import count_routes, place_routes
from .routing_kernels import share as share_kernel

SHARE, TABLES = "share", "tables"
SHARERS = 32  # programs that share, at most: each tells every rank
EXPERTS = 512  # of one rank, at most
LOADED = 4096  # counts that a program of `place_routes` loads at a time


@dataclass(frozen=True, eq=False)
class Routes:
    """What the calls of one capacity and k have in common."""

    ids: SymmetricTensor  # int32 [W, C, k]
    weights: SymmetricTensor  # float32 [W, C, k]
    flags: BlockChannel  # a counter a source
    block: int  # routes that a program shares at a time
    programs: int


class TableSizes(NamedTuple):
    """Of tables: El, C, rows of a tile, and rows that there is room for at least (None: for all that can come)."""

    experts_local: int
    capacity: int
    block_m: int
    max_rows: int | None = None


class Tables(NamedTuple):
    """Where the routes to this rank's El experts go, in device memory that the next call writes again; all int32.

    A row is a route's place in expert order: expert by expert, each from a multiple of block_m on; within an expert by
    wave, token and slot. Wave j holds the routes of source (rank - j) mod W. A tile is block_m rows of one expert.

        slots     [W * C * k]: row of the route (s * C + t) * k + slot; -1: to another rank's expert, or none; -2:
                  left out
        sources   [rows]: s * C + t of the row's token; -1: none. rows: `rows_of`
        offsets   [El + 1]: first row of every expert, and the row after the last tile
        tiles     [rows / block_m, 4]: first row, expert, first and last wave of its rows; by last wave, expert, row
        count     [1]: how many tiles there are; what `tiles` holds behind them means nothing
        listed    [W]: how many tiles there are up to the last one whose last wave is j
        received  [El]: rows of every expert, without padding
        targets   [W]: tiles with first wave <= j <= last wave, in all calls so far, modulo 2^32
    """

    slots: torch.Tensor
    sources: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]  # a tuple has a method of that name, which nobody calls
    listed: torch.Tensor
    received: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Prepared:
    """The tables of one kind of call, and its launches: (kernel, programs, arguments, options)."""

    tables: Tables
    launches: tuple[tuple[Any, int, dict[str, Any], dict[str, int]], ...]


def share(
    world: World, ids: torch.Tensor, weights: torch.Tensor, capacity: int, *, slot: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's routes on every rank: stores this rank's there and flags them, on the current stream. Waits for
    nobody.

    Args:
        world: the ranks. All of them must make the same call in the same order, each followed by `tables` of the same
            capacity and k.
        ids: int32 [T, k], T at most capacity and not the same on all ranks: experts of all ranks, those of a token
            distinct; -1: none.
        weights: float32 [T, k].
        capacity: C, the same on all ranks, at least 1.
        slot: of a dispatch by itself (exchange.py), which has memory of its own; None: a layer's.

    Returns: ids_all int32 and weights_all float32 [W, C, k], by source rank; from row T of a source on -1 and 0. What
        others send is there behind the waits of `tables`. The memory is that of every call of this capacity, k and
        slot.

    A rank may share again only once every other has read what it shared before: it has to hear so (in a whole layer, by
    the rows that come back), or a barrier stands between (`World.meet`). The same goes for streams: calls on two of
    them are ordered by the caller.

    The first call of a capacity and k makes memory, and is collective; not in the capture of a CUDA graph.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Mismatch: on every rank, where capacity or k differ.
    """
    check_call(SHARE, world)
    for name, t, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        check_device(SHARE, world, name, t)
        if t.dtype != dtype:
            raise TypeError(f"{SHARE}: {name} {dims(t)} must be {dtype}")
        if t.dim() != 2 or t.shape != ids.shape or t.shape[1] < 1:
            raise ValueError(f"{SHARE}: {name} must be [T, k], as ids {dims(ids)}, got {dims(t)}")
    if not isinstance(capacity, int) or capacity < max(1, ids.shape[0]):
        raise ValueError(f"{SHARE}: capacity {capacity!r} is too small for ids {dims(ids)}, or no number of tokens")
    routes = _routes(world, capacity, ids.shape[1], slot)
    ids, weights = dense(ids), dense(weights)

    def args() -> dict[str, Any]:
        return dict(
            ids=ids,
            weights=weights,
            all_ids=routes.ids.addresses,
            all_weights=routes.weights.addresses,
            ch=routes.flags,
            given=ids.numel(),
            padded=capacity * ids.shape[1],
            BLOCK=routes.block,
            PROGRAMS=routes.programs,
        )

    key = (routes, ids.numel(), *places(ids, weights))
    world.launch(share_kernel, routes.programs, args, dict(num_warps=4), world.current_stream(), key)
    return routes.ids.local, routes.weights.local


def tables(
    world: World,
    ids_all: torch.Tensor,
    experts_local: int,
    capacity: int,
    block_m: int,
    max_rows: int | None = None,
    *,
    name: Hashable = None,
    slot: int | None = None,
) -> Tables:
    """The tables of this rank's experts, once all ranks' routes have come; on the current stream.

    Args:
        world: the ranks.
        ids_all: int32 [W, C, k], what `share` returned. An expert that comes twice in one token's ids has two rows.
        experts_local: El, experts on every rank, at most 512.
        capacity: C, as given to `share`.
        block_m: rows of a tile.
        max_rows: rows that there is room for at least, however they fall on the experts. None: as many as can come
            where a token's experts are distinct.
        name: calls of one name and these sizes have one set of tables, and of `targets`; layers whose counters are not
            the same take different names.
        slot: as given to `share`. Of a dispatch by itself no tiles are listed.

    Routes to experts past W * El go nowhere. Rows past `rows_of` are left out, the last experts' first, and counted:
    Overflow. The first call of its kind makes memory; not in the capture of a CUDA
    graph.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, quoted.
        Timeout: at a later call or `World.synchronize`, naming a rank whose routes did not come.
        Overflow: there, where rows were left out on this rank.
    """
    check_call(TABLES, world)
    check_device(TABLES, world, "ids_all", ids_all)
    if ids_all.dtype != torch.int32 or ids_all.dim() != 3 or ids_all.shape[:2] != (world.size, capacity):
        raise ValueError(f"{TABLES}: ids_all {dims(ids_all)} must be int32 [{world.size}, {capacity}, k]")
    if not 1 <= experts_local <= EXPERTS or block_m < 1 or (max_rows is not None and max_rows < 0):
        said = f"{experts_local} experts of 1 to {EXPERTS}, tiles of {block_m} rows, max_rows {max_rows}"
        raise ValueError(f"{TABLES}: {said}")
    routes = _routes(world, capacity, ids_all.shape[2], slot)
    if ids_all.data_ptr() != routes.ids.local.data_ptr():
        raise ValueError(f"{TABLES}: ids_all {dims(ids_all)} is not what `share` returned")
    sizes = TableSizes(experts_local, capacity, block_m, max_rows)
    prepared = _prepared(world, routes, sizes, name, slot)
    for kernel, programs, args, options in prepared.launches:
        world.launch(kernel, programs, args, options, world.current_stream(), (prepared, kernel.fn.__name__))
    return prepared.tables


def memory(
    world: World, capacity: int, k: int, experts_local: int, block_m: int, slot: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    """What `share` returns, and the tables, in calls of these sizes. Collective the first time."""
    routes = _routes(world, capacity, k, slot)
    made = _prepared(world, routes, TableSizes(experts_local, capacity, block_m), None, slot)
    return routes.ids.local, routes.weights.local, made.tables


def rows_of(world: World, capacity: int, k: int, experts_local: int, block_m: int, max_rows: int | None = None) -> int:
    """Rows that the tables have, in whole tiles: for max_rows (None: what distinct experts can get), and every expert's
    last tile."""
    most = world.size * capacity * min(k, experts_local)
    most = most if max_rows is None else min(most, max_rows)
    return -(-most // block_m) * block_m + experts_local * block_m


def _routes(world: World, capacity: int, k: int, slot: int | None) -> Routes:
    def make() -> Routes:
        shape = (world.size, capacity, k)
        block = 32 if world.scale.small else 1024
        programs = min(-(-capacity * k // block), SHARERS, world.sm_count)
        ids, weights = (world.symmetric(shape, dtype, SHARE) for dtype in (torch.int32, torch.float32))
        of = "" if slot is None else f", slot {slot}"
        flags = world.channel(f"routes of {capacity} tokens to {k} experts{of}", world.size, None, programs)
        return Routes(ids, weights, flags, block, programs)

    return world.cached((SHARE, capacity, k, slot), make)


def _prepared(world: World, routes: Routes, sizes: TableSizes, name: Hashable, slot: int | None) -> _Prepared:
    key = (TABLES, name, slot, routes.ids.local.shape, sizes)
    return world.cached(key, lambda: _prepare(world, routes, sizes, slot is None))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _prepare(world: World, routes: Routes, sizes: TableSizes, listed: bool) -> _Prepared:
    """Sections of 128 routes, and as many of them a block as leave two blocks an SM. Where no tiles are listed, another
    slot's call may run at the same time, and what waits shares the SMs with it."""
    el, capacity, bm, most = sizes
    w, k, small = world.size, routes.ids.local.shape[2], world.scale.small
    padded, wp, elp = capacity * k, _power(w), max(32, _power(el))
    section = 16 if small else 128
    block = section
    while block < 16 * section and w * -(-padded // block) > 2 * world.sm_count:
        block *= 2
    per_source = -(-padded // block)
    blocks = w * per_source
    chunk = max(1, min(_power(per_source), (elp if small else LOADED) // (wp * elp)))
    rows = rows_of(world, capacity, k, el, bm, most)

    def empty(*shape: int) -> torch.Tensor:
        return world.empty(shape, torch.int32)

    made = Tables(
        slots=empty(w * padded),
        sources=empty(rows),
        offsets=empty(el + 1),
        tiles=world.zeros((rows // bm if listed else 1, 4), torch.int32),
        count=empty(1),
        listed=empty(w),
        received=empty(el),
        targets=world.zeros((w,), torch.int32),
    )
    common = dict(ids=routes.ids.local, counts=empty(blocks, elp), padded=padded, EL=el, ELP=elp, BLOCK=block)
    programs = min(blocks, world.sm_count)
    counting = dict(
        common, sources=made.sources, ch=routes.flags, rows=rows, arrivals=routes.programs, PROGRAMS=programs
    )
    placing = dict(
        common,
        made=made,
        rank=rank_word(world),
        guard=world.guard(),
        rows=rows,
        W=w,
        K=k,
        BM=bm,
        WP=wp,
        SECTION=section,
        RUNS=min(8, 2048 // elp),
        CHUNK=chunk,
        TILES=section // 2 if listed else 0,
    )
    places = min(max(blocks, el), 2 * world.sm_count)
    return _Prepared(
        made,
        (
            (count_routes, programs, counting, dict(num_warps=4) if listed else dict(num_warps=4, beside=True)),
            (place_routes, places, placing, dict(num_warps=4, maxnreg=168, local=True)),
        ),
    )
