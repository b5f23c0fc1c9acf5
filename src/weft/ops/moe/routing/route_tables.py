"""Routes of a mixture of experts: shared with all ranks, and made into the tables that place the rows of every rank's
own experts.

W ranks, each with T <= C tokens, C the same on all; k routes a token; rank d holds experts d * El .. (d + 1) * El - 1.
Everything stays on the device: two launches after that of the gate and of `share`, no number read by the host,
capturable in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....backends.base import SymmetricTensor
from ....kernel_launch import Launch, prepared
from ....lang.channel import BlockChannel
from ....lang.jit import constants
from ....op import check_call
from ....tensor_checks import check_device, dense, dims
from ....transport.memory import rank_word
from ....world import World
from .kernels import Placing, count_routes, place_routes
from .kernels import share as share_kernel

SHARE, TABLES = "share", "tables"
SHARERS = 32  # programs that share, at most: each tells every rank
EXPERTS = 512  # of one rank, at most
LOADED = 4096  # counts that a program of `place_routes` loads at a time


@dataclass(frozen=True, eq=False)
class Routes:
    """What the calls of one capacity and k have in common. Halves: 1, or 2 that calls take in turn."""

    shared_ids: SymmetricTensor  # int32 [halves, W, C, k]
    shared_weights: SymmetricTensor  # float32 [halves, W, C, k]
    halves: int
    ids: torch.Tensor  # int32 [W, C, k], here: the only half, or what `count_routes` copied of one
    flags: BlockChannel  # a counter a source
    calls: BlockChannel
    block: int  # routes that a program shares at a time
    programs: int


class TableSizes(NamedTuple):
    """Sizes of tables: El, C, rows of a tile, and the rows that there is room for at least (None: for all that can
    come)."""

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
class Filling:
    """What fills tables of one kind."""

    routes: Routes
    rows: int  # that the tables have
    how: Placing
    counts: torch.Tensor  # int32 [blocks, ELP]: of each block's routes those to each own expert
    counting: Launch
    placing: Launch


def share(
    world: World,
    ids: torch.Tensor,
    weights: torch.Tensor,
    capacity: int,
    *,
    slot: int | None = None,
    turns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's routes on every rank: stores this rank's there and flags them, on the current stream. Waits for
    all ranks to be in the same call, and for no routes.

    Args:
        world: the ranks. All of them must make the same call in the same order, each followed by `tables` of the same
            capacity and k.
        ids: int32 [T, k], T at most capacity and not the same on all ranks: experts of all ranks, those of a token
            distinct; -1: none.
        weights: float32 [T, k].
        capacity: C, the same on all ranks, at least 1.
        slot: of a dispatch by itself (dispatch_combine), which has memory of its own; None: a layer's.
        turns: calls take the halves of memory of their own in turn; `fill` follows, not `tables`.

    Returns: ids_all int32 and weights_all float32 [W, C, k], by source rank; from row T of a source on -1 and 0. What
        others send is there behind the waits of `tables`. The memory is that of every call of this capacity, k and
        slot. With turns they mean something to `fill` alone.

    A rank may share again only once every other has read what it shared before: it has to hear so (in a whole layer, by
    the rows that come back), or a barrier stands between (`World.barrier`), or calls take turns. The same goes for
    streams, also where calls take turns: those on two of them are ordered by the caller.

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
    routes = routes_of(world, capacity, ids.shape[1], slot, turns)
    ids, weights = dense(ids), dense(weights)

    share_routes(world, routes, ids, weights)
    return routes.ids, routes.shared_weights.local


def share_routes(world: World, routes: Routes, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """`share` of contiguous tensors that fit."""
    launch, count = _share(world, routes), ids.numel()
    launch(world.current_stream(), ids=ids, weights=weights, given=count, number=world.number)


@prepared
def _share(world: World, routes: Routes) -> Launch:
    _, capacity, k = routes.ids.shape
    return Launch(
        world,
        share_kernel,
        routes.programs,
        dict(num_warps=4),
        all_ids=routes.shared_ids.addresses,
        all_weights=routes.shared_weights.addresses,
        ch=routes.flags,
        calls=routes.calls,
        padded=capacity * k,
        HALVES=routes.halves,
        BLOCK=routes.block,
        PROGRAMS=routes.programs,
    )


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
    routes = routes_of(world, capacity, ids_all.shape[2], slot)
    if ids_all.data_ptr() != routes.ids.data_ptr():
        raise ValueError(f"{TABLES}: ids_all {dims(ids_all)} is not what `share` returned")
    sizes = TableSizes(experts_local, capacity, block_m, max_rows)
    filling, made = _filled(world, routes, sizes, name, slot)
    fill(world, filling, made, routes.shared_weights.local)
    return made


def fill(world: World, filling: Filling, made: Tables, weights: torch.Tensor) -> None:
    """The tables `made` of what was shared last, and where calls take turns its weights; on the current stream."""
    stream = world.current_stream()
    filling.counting(stream, weights=weights, sources=made.sources)
    filling.placing(stream, made=made)


def memory(
    world: World, capacity: int, k: int, experts_local: int, block_m: int, slot: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, Tables]:
    """What `share` returns, and the tables, in calls of these sizes. Collective the first time."""
    routes = routes_of(world, capacity, k, slot)
    _, made = _filled(world, routes, TableSizes(experts_local, capacity, block_m), None, slot)
    return routes.ids, routes.shared_weights.local, made


def filling_of(world: World, k: int, sizes: TableSizes) -> tuple[Filling, Tables]:
    """What `tables` of these sizes are, and what fills them. Collective the first time."""
    return _filled(world, routes_of(world, sizes.capacity, k), sizes, None, None)


def rows_of(world: World, capacity: int, k: int, experts_local: int, block_m: int, max_rows: int | None = None) -> int:
    """Return the rows that the tables have, in whole tiles: for max_rows (None: what distinct experts can get), and
    every expert's last tile."""
    most = world.size * capacity * min(k, experts_local)
    most = most if max_rows is None else min(most, max_rows)
    return -(-most // block_m) * block_m + experts_local * block_m


def routes_of(world: World, capacity: int, k: int, slot: int | None = None, turns: bool = False) -> Routes:
    """Return what the calls of one capacity and k have in common. Collective the first time."""

    def make() -> Routes:
        shape = (world.size, capacity, k)
        block = 32 if world.scale.small else 1024
        programs = min(-(-capacity * k // block), SHARERS, world.sm_count)
        both = (2, *shape) if turns else shape
        ids, weights = (world.symmetric(both, dtype, SHARE) for dtype in (torch.int32, torch.float32))
        of = ", in turn" if turns else "" if slot is None else f", slot {slot}"
        flags = world.channel(f"routes of {capacity} tokens to {k} experts{of}", world.size, None, programs)
        here = world.empty(shape, torch.int32) if turns else ids.local
        calls = world.calls("moe" if slot is None else f"routes, slot {slot}")  # all layers take turns
        return Routes(ids, weights, 1 + turns, here, flags, calls, block, programs)

    return world.cached((SHARE, capacity, k, slot, turns), make)


def _filled(
    world: World, routes: Routes, sizes: TableSizes, name: Hashable, slot: int | None
) -> tuple[Filling, Tables]:
    def make() -> tuple[Filling, Tables]:
        filling = prepare(world, routes, sizes, listed=slot is None)
        return filling, _tables(world, filling, sizes, listed=slot is None)

    return world.cached((TABLES, name, slot, routes.ids.shape, sizes), make)


def power(n: int) -> int:
    """Return n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def _tables(world: World, filling: Filling, sizes: TableSizes, listed: bool) -> Tables:
    def empty(*shape: int) -> torch.Tensor:
        return world.empty(shape, torch.int32)

    el, w = sizes.experts_local, world.size
    return Tables(
        slots=empty(filling.routes.ids.numel()),
        sources=empty(filling.rows),
        offsets=empty(el + 1),
        tiles=world.zeros((filling.rows // sizes.block_m if listed else 1, 4), torch.int32),
        count=empty(1),
        listed=empty(w),
        received=empty(el),
        targets=world.zeros((w,), torch.int32),
    )


def prepare(
    world: World, routes: Routes, sizes: TableSizes, *, listed: bool = True, sharing: int = 1, running: bool = True
) -> Filling:
    """What fills tables of experts that `sharing` neighbouring ranks have alike. running: `targets` grow from call to
    call. Sections of 128 routes, and as many of them a block as leave two blocks an SM. Where no tiles are listed,
    another slot's call may run at the same time, and what waits shares the SMs with it."""
    el, capacity, bm, most = sizes
    w, k, small = world.size, routes.ids.shape[2], world.scale.small
    padded, wp, elp = capacity * k, power(w), max(32, power(el))
    section = 16 if small else 128
    block = section
    while block < 16 * section and w * -(-padded // block) > 2 * world.sm_count:
        block *= 2
    per_source = -(-padded // block)
    blocks = w * per_source
    chunk = max(1, min(power(per_source), (elp if small else LOADED) // (wp * elp)))
    rows = rows_of(world, capacity, k, el, bm, most)
    counts = world.empty((blocks, elp), torch.int32)
    common = dict(ids=routes.ids, counts=counts, padded=padded, rows=rows)
    programs = min(blocks, world.sm_count)
    how = constants(
        Placing,
        W=w,
        K=k,
        EL=el,
        SHARING=sharing,
        BM=bm,
        WP=wp,
        ELP=elp,
        BLOCK=block,
        SECTION=section,
        RUNS=min(8, 2048 // elp),
        CHUNK=chunk,
        TILES=section // 2 if listed else 0,
        RUNNING=running,
    )
    count = Launch(
        world,
        count_routes,
        programs,
        dict(num_warps=4) if listed else dict(num_warps=4, co_resident=True),
        **common,
        all_ids=routes.shared_ids.local,
        all_weights=routes.shared_weights.local,
        ch=routes.flags,
        arrivals=routes.programs,
        EL=el,
        SHARING=sharing,
        ELP=elp,
        BLOCK=block,
        HALVES=routes.halves,
        PROGRAMS=programs,
    )
    places = min(max(blocks, el), 2 * world.sm_count)
    options = dict(num_warps=4, maxnreg=168, local=True)
    numbers = dict(rank=rank_word(world), guard=world.guard(), s=how)
    return Filling(routes, rows, how, counts, count, Launch(world, place_routes, places, options, **common, **numbers))
