"""The routes of a mixture of experts: every rank shares its routes with all ranks and builds the tables that place the
rows of its experts.

There are W ranks with T <= max_tokens tokens each, where max_tokens is the same on all ranks. A token has k routes.
Rank d holds experts d * El .. (d + 1) * El - 1. All data stay on the device: after the launches of the router and of
`share`, two more launches build the tables. The host reads no number, so a CUDA graph can capture all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....backends.base import SymmetricTensor
from ....kernel_launch import Launch, prepared
from ....lang.channel import BlockChannel
from ....lang.jit import constants
from ....transport.memory import rank_word
from ....world import World
from .kernels import LeftOut, TableKernelSizes, count_routes, place_routes, share

SHARE, TABLES = "share", "tables"
MAX_SHARE_PROGRAMS = 32  # the largest number of programs of `share`; each of them sets a flag on every rank
MAX_LOCAL_EXPERTS = 512  # the largest number of experts on one rank


@dataclass(frozen=True, eq=False)
class Routes:
    """The state that calls with the same max_tokens_per_rank and k share. halves: 2 if calls alternate between two
    halves of the memory, else 1."""

    shared_ids: SymmetricTensor  # int32 [halves, W, max_tokens, k]
    shared_weights: SymmetricTensor  # float32 [halves, W, max_tokens, k]
    halves: int
    ids: torch.Tensor  # int32 [W, max_tokens, k], in local memory: the only half, or the copy that `count_routes` makes
    flags: BlockChannel  # one counter for each source
    calls: BlockChannel
    left_out: LeftOut | None  # None if the ranks share the columns of experts
    block: int  # the number of routes that a program of `share` stores at once
    programs: int


class TableSizes(NamedTuple):
    """The sizes that determine the tables: El, max_tokens, the number of rows in a tile, and the least number of rows
    for which there is room (None: room for all rows that can arrive)."""

    local_experts: int
    max_tokens_per_rank: int
    block_m: int
    max_rows: int | None = None


class Tables(NamedTuple):
    """The positions of the routes to this rank's El experts. All tensors are int32 and in device memory. The next call
    overwrites them.

    A row is the position of a route in expert order: the experts follow one another, each starting at a multiple of
    block_m. The rows of an expert are ordered by source step, token and top-k slot. Source step j contains the routes
    of source (rank - j) mod W. A tile consists of block_m rows of one expert.

        route_rows        [W * max_tokens * k]: the row of route (s * max_tokens + t) * k + slot; -1 for routes to other
                          ranks' experts or none; -2 for routes that were left out
        sources           [rows]: s * max_tokens + t of the row's token; -1 for none. rows: see `rows_of`
        offsets           [El + 1]: the first row of every expert, and the row after the last tile
        tiles             [rows / block_m, 4]: first row, expert, first and last source step of the tile's rows; ordered
                          by last source step, expert, row
        tile_count        [1]: the number of tiles; later entries of `tiles` are undefined
        cumulative_tiles  [W]: the number of tiles whose last source step is at most j
        received          [El]: the rows of every expert, without padding
        targets           [W]: tiles with first source step <= j <= last source step, in all calls so far, modulo 2^32
    """

    route_rows: torch.Tensor
    sources: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    cumulative_tiles: torch.Tensor
    received: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, eq=False)
class TableBuilder:
    """The launches that fill tables of the same sizes."""

    routes: Routes
    rows: int  # of the tables
    sizes: TableKernelSizes
    counts: torch.Tensor  # int32 [blocks, ELP]: the number of each block's routes to each own expert
    count_launch: Launch
    place_launch: Launch
    place_again_launch: Launch  # the launch for a backward pass, which counts no rows


def share_routes(world: World, routes: Routes, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Store this rank's routes on every rank and set a flag there, on the current stream. The launch waits until all
    ranks are in the same call, but not for their routes: `run_builder` waits for these.

    Args:
        world: the ranks. All ranks must make the same calls in the same order, each followed by `run_builder`.
        ids: int32 [T, k], contiguous: the experts of each token, numbered over all ranks; -1 for none. A token's ids
            are distinct. T is at most max_tokens_per_rank and may differ between ranks.
        weights: float32 [T, k], contiguous.

    From row T of a source on, the shared ids are -1 and the shared weights are 0. A rank may share routes again only
    after every other rank has read its previous routes. In a whole layer, the rows that are sent back ensure this
    order. Otherwise the caller must insert a barrier (`World.barrier`), or calls must alternate between two halves. The
    caller must order calls on two streams in any case.
    """
    launch, num_routes = share_launch(world, routes), ids.numel()
    launch(world.current_stream(), ids=ids, weights=weights, num_routes=num_routes, number=world.number)


@prepared
def share_launch(world: World, routes: Routes) -> Launch:
    """Return the launch of `share`."""
    _, max_tokens_per_rank, k = routes.ids.shape
    return Launch(
        world,
        share,
        routes.programs,
        dict(num_warps=4),
        all_ids=routes.shared_ids.addresses,
        all_weights=routes.shared_weights.addresses,
        ch=routes.flags,
        calls=routes.calls,
        routes_per_source=max_tokens_per_rank * k,
        HALVES=routes.halves,
        BLOCK=routes.block,
        PROGRAMS=routes.programs,
    )


def run_builder(
    world: World, builder: TableBuilder, tables: Tables, weights: torch.Tensor, is_backward: bool = False
) -> None:
    """Wait for all ranks' routes and fill `tables` from them on the current stream. With alternating halves, `weights`
    is filled too. is_backward: whether the routes come from a forward pass, which has already counted the rows that it
    left out.

    Routes to experts from W * El on have no row. If an expert occurs twice in the ids of a token, the token has two
    rows of this expert. Rows beyond `rows_of` are left out, starting with the last experts, and are counted: a later
    call or `World.synchronize` raises Overflow. The ranks of the rows' tokens also raise Overflow, after
    `take_left_out` has run. If the routes of a rank did not arrive, such a call raises Timeout, which names the rank.
    """
    stream = world.current_stream()
    builder.count_launch(stream, weights=weights, sources=tables.sources)
    (builder.place_again_launch if is_backward else builder.place_launch)(stream, tables=tables)


def builder_of(world: World, k: int, sizes: TableSizes, buffer_index: int | None = None) -> tuple[TableBuilder, Tables]:
    """Return the builder and the tables of these sizes, which all calls with equal arguments share. buffer_index: the
    buffer of a separate `dispatch` (dispatch_combine), which uses other memory than layers do and lists no tiles; None
    selects the memory of layers. The first call with given arguments is collective, and a CUDA graph cannot capture
    it."""

    def make() -> tuple[TableBuilder, Tables]:
        routes, list_tiles = routes_of(world, sizes.max_tokens_per_rank, k, buffer_index), buffer_index is None
        builder = make_builder(world, routes, sizes, list_tiles=list_tiles)
        return builder, _tables(world, builder, sizes, list_tiles)

    return world.cached((TABLES, buffer_index, k, sizes), make)


def rows_of(
    world: World, max_tokens_per_rank: int, k: int, local_experts: int, block_m: int, max_rows: int | None = None
) -> int:
    """Return the number of rows in the tables, in whole tiles. There is room for max_rows rows (None: as many as arrive
    if each token's experts are distinct), plus one partial tile for every expert."""
    max_rows_needed = world.size * max_tokens_per_rank * min(k, local_experts)
    max_rows_needed = max_rows_needed if max_rows is None else min(max_rows_needed, max_rows)
    return -(-max_rows_needed // block_m) * block_m + local_experts * block_m


def routes_of(
    world: World, max_tokens_per_rank: int, k: int, buffer_index: int | None = None, alternating: bool = False
) -> Routes:
    """Return the state that calls with one max_tokens_per_rank and k share. The first call is collective."""

    def make() -> Routes:
        shape = (world.size, max_tokens_per_rank, k)
        block = world.backend.scale.sent_routes
        programs = min(-(-max_tokens_per_rank * k // block), MAX_SHARE_PROGRAMS, world.sm_count)
        buffer_shape = (2, *shape) if alternating else shape
        ids, weights = (world.symmetric(buffer_shape, dtype, SHARE) for dtype in (torch.int32, torch.float32))
        suffix = ", alternating halves" if alternating else "" if buffer_index is None else f", buffer {buffer_index}"
        flags = world.channel(
            f"routes of {max_tokens_per_rank} tokens to {k} experts{suffix}", world.size, None, programs
        )
        local_ids = world.empty(shape, torch.int32) if alternating else ids.local
        # All layers count their calls in one channel.
        calls = world.calls("moe" if buffer_index is None else f"routes, buffer {buffer_index}")
        left_out = None if alternating else left_out_words(world, buffer_index)
        return Routes(ids, weights, 1 + alternating, local_ids, flags, calls, left_out, block, programs)

    return world.cached((SHARE, max_tokens_per_rank, k, buffer_index, alternating), make)


def left_out_words(world: World, buffer_index: int | None = None) -> LeftOut:
    """Return the words that `tell_sources` increments: one set for all layers, and one for each buffer of a separate
    `dispatch`. The first call is collective."""
    owner = "layers" if buffer_index is None else f"buffer {buffer_index}"
    channel = world.channel(f"rows left out, {owner}", world.size, None)
    return LeftOut(channel.counters, channel.peers)


def power(n: int) -> int:
    """Return n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def _tables(world: World, builder: TableBuilder, sizes: TableSizes, list_tiles: bool) -> Tables:
    def empty(*shape: int) -> torch.Tensor:
        return world.empty(shape, torch.int32)

    el, w = sizes.local_experts, world.size
    return Tables(
        route_rows=empty(builder.routes.ids.numel()),
        sources=empty(builder.rows),
        offsets=empty(el + 1),
        tiles=world.zeros((builder.rows // sizes.block_m if list_tiles else 1, 4), torch.int32),
        tile_count=empty(1),
        cumulative_tiles=empty(w),
        received=empty(el),
        targets=world.zeros((w,), torch.int32),
    )


def make_builder(
    world: World,
    routes: Routes,
    sizes: TableSizes,
    *,
    list_tiles: bool = True,
    tp_size: int = 1,
    cumulative_targets: bool = True,
) -> TableBuilder:
    """Return the builder of tables for experts whose columns `tp_size` neighbouring ranks share.

    list_tiles: whether tiles are listed. If tiles are not listed, a call that uses the other buffer may run at the same
    time, and the waiting programs share the SMs with this call. cumulative_targets: whether `targets` grow from call to
    call. A section consists of 128 routes. The number of sections in a block is chosen such that there are at most two
    blocks per SM.
    """
    kernel_sizes = table_kernel_sizes(world, routes, sizes, list_tiles, tp_size, cumulative_targets)
    block, elp, k = kernel_sizes.BLOCK.value, kernel_sizes.ELP.value, routes.ids.shape[2]
    routes_per_source = sizes.max_tokens_per_rank * k
    blocks = world.size * -(-routes_per_source // block)
    rows = rows_of(world, sizes.max_tokens_per_rank, k, sizes.local_experts, sizes.block_m, sizes.max_rows)
    counts = world.empty((blocks, elp), torch.int32)
    common = dict(ids=routes.ids, counts=counts, routes_per_source=routes_per_source, rows=rows)
    programs = min(blocks, world.sm_count)
    count_launch = Launch(
        world,
        count_routes,
        programs,
        dict(num_warps=4) if list_tiles else dict(num_warps=4, co_resident=True),
        **common,
        all_ids=routes.shared_ids.local,
        all_weights=routes.shared_weights.local,
        ch=routes.flags,
        arrivals=routes.programs,
        EL=sizes.local_experts,
        TP_SIZE=tp_size,
        ELP=elp,
        BLOCK=block,
        HALVES=routes.halves,
        PROGRAMS=programs,
    )
    place_programs = min(max(blocks, sizes.local_experts), 2 * world.sm_count)
    options, arguments = dict(num_warps=4, maxnreg=168, local=True), dict(rank=rank_word(world), s=kernel_sizes)
    place, place_again = (
        Launch(world, place_routes, place_programs, options, **common, **arguments, guard=guard, left_out=left_out)
        for guard, left_out in ((world.backend.guard(), routes.left_out), (None, None))
    )
    return TableBuilder(routes, rows, kernel_sizes, counts, count_launch, place, place_again)


def table_kernel_sizes(
    world: World, routes: Routes, sizes: TableSizes, list_tiles: bool, tp_size: int, cumulative_targets: bool
) -> TableKernelSizes:
    """Return the kernels' sizes. All further arguments are as in `make_builder`."""
    w, k, section = world.size, routes.ids.shape[2], world.backend.scale.section
    routes_per_source = sizes.max_tokens_per_rank * k
    wp, elp = power(w), max(32, power(sizes.local_experts))
    block = section
    while block < 16 * section and w * -(-routes_per_source // block) > 2 * world.sm_count:
        block *= 2
    blocks_per_source = -(-routes_per_source // block)
    return constants(
        TableKernelSizes,
        W=w,
        K=k,
        EL=sizes.local_experts,
        TP_SIZE=tp_size,
        BM=sizes.block_m,
        WP=wp,
        ELP=elp,
        BLOCK=block,
        SECTION=section,
        RUNS=min(8, 2048 // elp),
        CHUNK=max(1, min(power(blocks_per_source), world.backend.scale.counts // (wp * elp))),
        TILES=section // 2 if list_tiles else 0,
        CUMULATIVE=cumulative_targets,
    )
