"""The launches that run an MoE layer's experts (kernels.py): their arguments, streams and waits.

    side stream  start -> dispatch | tables -> local_first  | combine (with GEMM 2)  |
    main stream  share, tables     | GEMM 1 (with dispatch)  | GEMM 2                 | sum

Programs of the side stream share the SMs with a GEMM's programs, and one of the two launches waits for the other. One
side-stream program and the GEMM's `per_sm` programs must therefore fit on an SM at the same time, whichever is launched
first. The first call of a layer and plan checks this condition and loads all kernels before it launches one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, NamedTuple

import torch
from triton import JITFunction

from ....backends.base import SymmetricTensor
from ....kernel_launch import Ahead, BoundLaunch, Launch, Matrix, Moved, prepared
from ....lang.channel import BlockChannel
from ....lang.jit import constants
from ....plans import Dispatched, DispatchedGemms, FusedMoe, LowLatency, TileShape
from ....prepared import Run
from ....tensor_checks import DTYPES
from ....transport.memory import lock
from ....world import World
from ..call import ACTIVATIONS, NAME, Layer, MoeCall, MoeOperands, Weights, first_columns, layer_rows
from ..routing import route_tables
from ..routing.kernels import LeftOut
from ..routing.route_tables import Tables, power
from ..tensor_parallel.call import Split
from .fused_kernels import LayerSizes
from .kernels import (
    ROUTES_TOGETHER,
    ROW_OF_TILES,
    GatheredSizes,
    RankSumSizes,
    RoutedRows,
    combine_rows,
    dispatch_rows,
    grouped_gemm_in,
    grouped_gemm_out,
    local_first,
    sum_ranks,
)

# The number of registers for each of the 32 * side_warps threads of a side-stream program. The GEMM on the same SM uses
# the remaining registers.
DISPATCH_REGISTERS, COMBINE_REGISTERS = 96, 128
ELEMENTS_PER_THREAD = 32  # the number of elements that a program holds in registers at once, for each of these threads
SM_MEMORY = 225 << 10  # bytes of shared memory for the tiles of all programs on an SM, without the reserved part
WGMMA_ROWS = 64  # smaller tiles use mma.sync with operands in registers, which needs one buffer less
RESERVED_MEMORY = 1 << 10  # bytes of shared memory that CUDA reserves for each program
FINAL_SUM_WARPS, FINAL_SUM_PER_SM = 4, 4  # the warps of a `sum_ranks` program, and the number of such programs per SM
SHARED_SUM_PER_SM = 2  # the number of `sum_ranks` programs per SM if other kernels use the SM too


@dataclass(eq=False)
class DispatchedState:
    """The state that all calls of one layer and plan share. All layers share the memory."""

    layer: Layer
    plan: DispatchedGemms
    local_experts: int  # the number of experts on each rank
    rows: int  # the largest number of rows in expert order
    dispatch_programs: int
    combine_programs: int
    dispatch_flags: BlockChannel  # the counters of arrived rows, one for each source step
    combine_flags: BlockChannel  # the counters of arrived sums, one for each rank
    calls: BlockChannel  # the channel that `same_call` uses in `sum_ranks`
    left_out: LeftOut | None  # the words that `sum_ranks` counts and clears
    ahead: Ahead = field(default_factory=Ahead)

    @property
    def push_block(self) -> int:
        """Return the number of elements that a program of the side stream holds at once."""
        return 32 * self.plan.side_warps * ELEMENTS_PER_THREAD

    @property
    def send_block(self) -> int:
        """Return the number of rows that a program of `dispatch_rows` sends at once."""
        assert isinstance(self.plan, Dispatched)
        return min(self.plan.send_rows, max(1, self.push_block // power(self.layer.hidden)))

    @property
    def sent_elements(self) -> int:
        """Return the number of elements in a block that is sent."""
        return self.send_block * power(self.layer.hidden) if isinstance(self.plan, Dispatched) else self.push_block

    def gemm(self, side_registers: int, columns: int, with_dispatch: bool) -> dict[str, int]:
        """Return the launch options of a GEMM with `per_sm` programs on each SM. The programs share the SM with a
        side-stream program that uses `side_registers` registers per thread.

        The GEMM has the plan's number of stages, or fewer if they do not fit in the SM's shared memory. The epilogue of
        the GEMM needs shared memory to store `columns` columns at once. If dispatch runs at the same time
        (with_dispatch), the dispatch programs need shared memory for the blocks of rows that they have in flight.
        """
        plan, tile, item = self.plan, self.plan.tile, self.layer.dtype.itemsize
        threads = 32 * tile.warps * plan.per_sm
        registers = min(255, (65536 - 32 * plan.side_warps * side_registers) // threads // 8 * 8)
        rows = self.sent_elements * (plan.send_stages - 1) if with_dispatch else 0
        program_bytes = (SM_MEMORY - RESERVED_MEMORY * (plan.per_sm - 1) - item * rows) // plan.per_sm
        step_bytes = item * tile.block_k * (tile.block_m + tile.block_n)
        buffers = (program_bytes - item * tile.block_m * columns) // step_bytes
        stages = buffers if tile.block_m >= WGMMA_ROWS else buffers + 1
        return dict(
            num_warps=tile.warps,
            num_stages=max(1, min(tile.stages, stages)),
            maxnreg=registers,
            per_sm=plan.per_sm,
        )

    def gemm_programs(self, world: World) -> int:
        """Return the number of programs of a GEMM."""
        return world.sm_count * self.plan.per_sm

    def side_launch(self, world: World, kernel: JITFunction, is_dispatch: bool, split: int = 1, **sizes: int) -> Launch:
        """Return the launch of a side-stream kernel that moves rows of H elements. is_dispatch: whether the rows are
        tokens; if not, they are sums. split: the factor by which a program has more warps than side_warps, with fewer
        registers each."""
        layer, programs, registers, ch = self.layer, self.combine_programs, COMBINE_REGISTERS, self.combine_flags
        if is_dispatch:
            programs, registers, ch = self.dispatch_programs, DISPATCH_REGISTERS, self.dispatch_flags
        options = dict(num_warps=split * self.plan.side_warps, maxnreg=registers // split, co_resident=True)
        sizes |= dict(max_tokens=layer.max_tokens_per_rank, H=layer.hidden, PROGRAMS=programs)
        return Launch(world, kernel, programs, options, ch=ch, DTYPE=DTYPES[layer.dtype], **sizes)


@dataclass(eq=False)
class LayerWorkspace:
    """The memory that a call uses.

    If calls alternate between two halves of inbox or outbox, the parity of the word `epoch` selects the half, and
    half_size is the distance in elements from the first half to the second.
    """

    inbox: SymmetricTensor
    outbox: SymmetricTensor
    hidden: torch.Tensor
    y: torch.Tensor
    epoch: torch.Tensor | None = None
    half_size: int = 0


def unsupported(world: World, layer: Layer, plan: DispatchedGemms | FusedMoe | LowLatency) -> str | None:
    """Return the reason, the same on every rank, why the plan cannot serve the call, or None if it can."""
    for name, size in (("H", layer.hidden), ("I", layer.inner)):
        if size % 8:
            return f"rows must be whole 16-byte words, and {name} {size} is not a multiple of 8"
    if layer.experts % world.size or world.size > 32:
        return f"{layer.experts} experts over {world.size} ranks"
    block = world.backend.scale.interleave
    if layer.activation != "gelu" and plan.tile.block_n not in (2 * block, 4 * block):
        return f"tiles of {plan.tile.block_n} columns do not hold 1 or 2 blocks of {block} gate and up rows"
    if -(-layer.hidden // plan.tile.block_n) > ROW_OF_TILES.value // 2:
        return f"H {layer.hidden} is more than {ROW_OF_TILES.value // 2} tiles of {plan.tile.block_n} columns"
    return None


class LayerBytes(NamedTuple):
    """The bytes that a rank allocates. symmetric: for inbox, outbox, and all ranks' ids and weights. tables: for route
    rows, sources and tiles. scratch: for hidden and y."""

    symmetric: int
    tables: int
    scratch: int


def memory(world: World, layer: Layer, block_m: int) -> LayerBytes:
    """Return the bytes that calls of a layer use. All layers share this memory."""
    c, h, size, rows = layer.max_tokens_per_rank, layer.hidden, layer.dtype.itemsize, layer_rows(world, layer, block_m)
    routes = world.size * c * layer.k
    ordered = 2 * routes + world.size * c if orders_routes(world, layer) else 0
    tables = 4 * (routes + ordered + rows + 4 * rows // block_m)
    return LayerBytes(2 * world.size * c * h * size + 8 * routes, tables, rows * (h + layer.inner) * size)


def make_state(
    world: World,
    layer: Layer,
    plan: DispatchedGemms,
    local_experts: int,
    rows: int,
    sends: str,
    sums: str,
    left_out: LeftOut | None = None,
    calls: str = NAME,
) -> DispatchedState:
    """Return the state of a layer and plan. The call is collective. The names `sends` and `sums` identify the data that
    the side-stream programs send and sum: states with equal names and equal numbers of programs share channels. calls:
    the channel that counts the calls."""
    n, m = min(plan.dispatch_programs, world.sm_count), min(plan.combine_programs, world.sm_count)
    dispatch_flags = world.channel(f"{sends} by {n} programs", world.size, None, n)
    combine_flags = world.channel(f"{sums} by {m} programs", world.size, None, m)
    counted = world.calls(calls)
    return DispatchedState(layer, plan, local_experts, rows, n, m, dispatch_flags, combine_flags, counted, left_out)


def plan_state(world: World, layer: Layer, plan: Dispatched) -> DispatchedState:
    """Return the state of this layer and plan. The first call is collective. Layers with equal numbers of programs
    share channels."""

    def make() -> DispatchedState:
        rows = layer_rows(world, layer, plan.tile.block_m)
        if layer.max_rows is None:
            mib = memory(world, layer, plan.tile.block_m).scratch / 2**20
            world.log_once(f"{NAME}: {mib:.1f} MiB a rank, for the {rows} rows of the worst case (max_rows)", INFO)
        left_out = route_tables.left_out_words(world)
        names = f"{NAME}, rows", f"{NAME}, sums"
        return make_state(world, layer, plan, layer.experts // world.size, rows, *names, left_out)

    return world.cached((NAME, layer, plan), make)


@prepared
def make_workspace(world: World, layer: Layer, rows: int, inbox: str = "inbox") -> LayerWorkspace:
    """Return views of the memory that all layers share: inbox (of that name) and outbox [W, max_tokens, H], hidden
    [rows, I], y [rows, H]. The call is collective when the memory has to grow."""
    inbox_memory, outbox_memory = (token_memory(world, layer, f"{NAME} {name}") for name in (inbox, "outbox"))
    hidden = scratch(world, "hidden", rows, layer.inner, layer.dtype)
    return LayerWorkspace(inbox_memory, outbox_memory, hidden, scratch(world, "y", rows, layer.hidden, layer.dtype))


def token_memory(world: World, layer: Layer, name: str) -> SymmetricTensor:
    """Return [W, max_tokens, H] in the symmetric memory with this name. The call is collective when the memory has to
    grow."""
    shape = world.size, layer.max_tokens_per_rank, layer.hidden
    return world.buffer(name, math.prod(shape) * layer.dtype.itemsize).view(0, shape, layer.dtype)


def scratch(world: World, name: str, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [rows, cols] in this rank's memory with this name. Whenever the memory grows, its size at least doubles.
    The previous memory is kept, because CUDA graphs may still use it."""
    allocations: list[torch.Tensor] = world.cached((NAME, name, dtype), list)
    if not allocations or allocations[-1].numel() < rows * cols:
        world._no_capture(name)
        world.forget_prepared()
        with world.persistent_allocation():
            allocations.append(
                world.empty((max(rows * cols, 2 * allocations[-1].numel() if allocations else 0),), dtype)
            )
    return allocations[-1][: rows * cols].view(rows, cols)


# -- the launches ------------------------------------------------------------------------------------------------------


def dispatch_launch(
    world: World, state: DispatchedState, x: torch.Tensor, ids: torch.Tensor, workspace: LayerWorkspace
) -> BoundLaunch:
    """Return the launch of `dispatch_rows`."""
    return BoundLaunch(
        _dispatch_launch(world, state), dict(x=x, ids=ids, inboxes=workspace.inbox.addresses, T=x.shape[0])
    )


@prepared
def _dispatch_launch(world: World, state: DispatchedState) -> Launch:
    layer, k = state.layer, state.layer.k
    sizes = dict(P=power(layer.hidden), K=k, KP=power(k), EL=state.local_experts, ROWS=state.send_block)
    return state.side_launch(world, dispatch_rows, True, STAGES=state.plan.send_stages, **sizes)


def block_columns(world: World, layer: Layer, block_n: int) -> int:
    """Return the columns of a block that the first GEMM stores (`store_activated`), half or a quarter of block_n, the
    columns of its tile. Gate and up columns alternate in such blocks."""
    block = world.backend.scale.interleave
    return block if layer.activation != "gelu" else max(block_n // 4, min(block_n // 2, block))


def first_gemm(
    world: World,
    state: DispatchedState,
    w: Weights,
    tables: Tables,
    workspace: LayerWorkspace,
    preactivation: torch.Tensor | None = None,
) -> BoundLaunch:
    """Return the launch of `grouped_gemm_in`. preactivation: the tensor in which the launch saves the input of the
    activation, or None."""
    moving: dict[str, Moved] = dict(
        inbox=workspace.inbox.local,
        sources=tables.sources,
        w_desc=w.w13,
        w_half_desc=w.w13,
        hidden_desc=workspace.hidden,
        preactivation_desc=preactivation,
        bias=w.b13,
        tiles=tables.tiles,
        tile_count=tables.tile_count,
        epoch=workspace.epoch,
    )
    return BoundLaunch(
        _first_gemm(world, state, w.w13.shape[1], workspace.epoch is not None, workspace.half_size), moving
    )


@prepared
def _first_gemm(world: World, state: DispatchedState, n: int, alternating: bool, half_size: int) -> Launch:
    layer, plan, act, h = state.layer, state.plan, ACTIVATIONS[state.layer.activation], state.layer.hidden
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k
    block = block_columns(world, layer, bn)
    sizes = constants(
        GatheredSizes,
        ARRIVALS=state.dispatch_programs,
        OTHER_PROGRAMS=state.dispatch_programs if alternating else 0,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        EVEN_K=h % bk == 0,
        ACT=act,
        BLOCK=block,
        FLATTEN=plan.flatten,
        HALVES=bn == 4 * block,
    )
    return Launch(
        world,
        grouped_gemm_in,
        state.gemm_programs(world),
        state.gemm(DISPATCH_REGISTERS, block, with_dispatch=True),
        w_desc=Matrix(state.local_experts * n, h, (bn, bk)),
        w_half_desc=Matrix(state.local_experts * n, h, (bn // 2, bk)),
        hidden_desc=Matrix(state.rows, layer.inner, (bm, block)),
        preactivation_desc=Matrix(state.rows, n, (bm, block)),
        ch=state.dispatch_flags,
        half_size=half_size,
        N=n,
        K=h,
        s=sizes,
    )


class GroupedProduct(NamedTuple):
    """The operands of a grouped GEMM: rows [rows, K], the experts' matrices, and biases [El, N] or None."""

    a: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None = None


def grouped_gemm(
    world: World,
    state: DispatchedState,
    tables: Tables,
    product: GroupedProduct,
    out: torch.Tensor,
    counters: torch.Tensor,
    kn_weight: bool = False,
    with_dispatch: bool = False,
) -> BoundLaunch:
    """Return the launch that computes out [rows, N] = a @ w + bias and counts tiles by source step. w is [El, N, K] and
    is transposed in the GEMM, or, with kn_weight, [El, K, N]. with_dispatch: whether dispatch programs run on the same
    SMs."""
    a, w, bias = product
    moving: dict[str, Moved] = dict(
        hidden_desc=a,
        w_desc=w,
        w_half_desc=w,
        y_desc=out,
        bias=bias,
        tiles=tables.tiles,
        tile_count=tables.tile_count,
        counters=counters,
    )
    return BoundLaunch(_grouped_gemm(world, state, a.shape[1], out.shape[1], kn_weight, with_dispatch), moving)


@prepared
def _grouped_gemm(world: World, state: DispatchedState, k: int, n: int, kn_weight: bool, with_dispatch: bool) -> Launch:
    plan, experts = state.plan, state.local_experts
    bm, bn, bk = plan.tile.block_m, plan.tile.block_n, plan.tile.block_k

    def weights(columns: int) -> Matrix:
        return Matrix(experts * k, n, (bk, columns)) if kn_weight else Matrix(experts * n, k, (columns, bk))

    return Launch(
        world,
        grouped_gemm_out,
        state.gemm_programs(world),
        state.gemm(COMBINE_REGISTERS, bn // 2, with_dispatch),
        hidden_desc=Matrix(state.rows, k, (bm, bk)),
        w_desc=weights(bn),
        w_half_desc=weights(bn // 2),
        y_desc=Matrix(state.rows, n, (bm, bn // 2)),
        N=n,
        K=k,
        W=world.size,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP_M=plan.tile.group_m,
        KN_WEIGHT=kn_weight,
    )


def combine_launch(
    world: World,
    state: DispatchedState,
    rows: RoutedRows,
    targets: torch.Tensor,
    counters: torch.Tensor,
    workspace: LayerWorkspace,
) -> BoundLaunch:
    """Return the launch of `combine_rows`. counters: GEMM 2's counters."""
    moving: dict[str, Moved] = dict(
        routed=rows, targets=targets, counters=counters, outboxes=workspace.outbox.addresses, epoch=workspace.epoch
    )
    # Programs that load four rows together need half the registers, so that twice as many warps hide their latency.
    split = 1 if rows.counts is None else 2
    return BoundLaunch(_combine_launch(world, state, workspace.half_size, split), moving)


@prepared
def _combine_launch(world: World, state: DispatchedState, half_size: int, split: int) -> Launch:
    layer, plan = state.layer, state.plan
    block = 32 * plan.side_warps * ELEMENTS_PER_THREAD
    cols = min(power(layer.hidden), block)
    sizes = dict(COLS=cols, K=layer.k, ROWS=min(plan.sum_rows, block // cols))
    return state.side_launch(world, combine_rows, False, split, half_size=half_size, **sizes)


def final_sum_launch(
    world: World,
    state: DispatchedState,
    rows: RoutedRows,
    ids: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    workspace: LayerWorkspace,
    counters: torch.Tensor | None = None,
    co_resident: bool | None = None,
) -> BoundLaunch:
    """Return the launch of `sum_ranks`. counters: the counters of GEMM 2 if this launch must clear them. co_resident:
    None if the programs do not share the SMs; otherwise, whether programs of the kernel that is loaded next must fit on
    an SM together with one of these programs."""
    moving: dict[str, Moved] = dict(
        routed=rows,
        outbox=workspace.outbox.local,
        ids=ids,
        shared=shared,
        out=out,
        counters=counters,
        epoch=workspace.epoch,
        T=out.shape[0],
        number=world.number,
    )
    return BoundLaunch(_final_sum_launch(world, state, workspace.half_size, co_resident), moving)


@prepared
def _final_sum_launch(world: World, state: DispatchedState, half_size: int, co_resident: bool | None) -> Launch:
    layer, threads = state.layer, 32 * FINAL_SUM_WARPS
    if co_resident is None:
        options = dict(maxnreg=65536 // (threads * FINAL_SUM_PER_SM), per_sm=FINAL_SUM_PER_SM)
    else:
        options = dict(co_resident=co_resident, per_sm=SHARED_SUM_PER_SM)
    block = min(threads * ELEMENTS_PER_THREAD // 2, world.backend.scale.norm_block)
    cols = min(power(layer.hidden), block)
    rows = block // cols
    blocks = -(-layer.max_tokens_per_rank // rows) * -(-layer.hidden // cols)
    return Launch(
        world,
        sum_ranks,
        min(options["per_sm"] * world.sm_count, blocks),
        dict(options, num_warps=FINAL_SUM_WARPS),
        ch=state.combine_flags,
        calls=state.calls,
        left_out=state.left_out,
        half_size=half_size,
        max_tokens=layer.max_tokens_per_rank,
        ARRIVALS=state.combine_programs,
        s=constants(
            RankSumSizes,
            H=layer.hidden,
            K=layer.k,
            EL=state.local_experts,
            TP_SIZE=layer.tp_size if isinstance(layer, Split) else 1,
            ROWS=rows,
            COLS=cols,
        ),
    )


def persistent_options(plan: FusedMoe | LowLatency) -> dict[str, int]:
    """Return the options of a launch that runs alone on the GPU, with per_sm programs on every SM."""
    tile = plan.tile
    registers = min(255, 65536 // (32 * tile.warps * plan.per_sm) // 8 * 8)
    return dict(num_warps=tile.warps, num_stages=tile.stages, maxnreg=registers, per_sm=plan.per_sm)


def layer_sizes(world: World, layer: Layer, tile: TileShape, **blocks: int) -> LayerSizes:
    """Return a layer's sizes, for kernels that run the whole layer. blocks: GROUP_M, and the sizes of the blocks that
    are sent and summed."""
    h, act = layer.hidden, ACTIVATIONS[layer.activation]
    return constants(
        LayerSizes,
        H=h,
        INNER=layer.inner,
        P=power(h),
        K=layer.k,
        KP=power(layer.k),
        EL=layer.experts // world.size,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        EVEN_K=h % tile.block_k == 0,
        ACT=act,
        BLOCK=block_columns(world, layer, tile.block_n),
        **blocks,
    )


# -- a call ------------------------------------------------------------------------------------------------------------


def side_stream(world: World) -> Any:
    """Return the side stream, on which rows are transferred during the GEMMs.

    A single rank sends nothing and uses the current stream. On a side stream, a GEMM and the dispatch programs for
    which it waits might not fit on an SM together with programs of another op, which belongs to the World from which
    `World.alone` was made.
    """
    return world.side_stream(NAME) if world.size > 1 else world.current_stream()


def prepare_dispatched(world: World, call: MoeCall, plan: Dispatched) -> Run:
    """Prepare calls of a layer: out [T, H] = the sum over a token's routes of weight * expert(x) + shared, on the
    current stream. A run returns the numbers of received rows, or None, and the saved tensors.

    The operands of a run are contiguous and on world.device. T is at most the layer's max_tokens_per_rank and may
    differ between ranks. `out` may be x or shared. Layer and plan must be the same on all ranks, and `unsupported` must
    return None for them.

    Sums are accumulated in float32; an expert's result, and a rank's sum of a token, are rounded to the layer's dtype.
    All layers share their memory: 2 W max_tokens H elements of symmetric memory, and H + I elements of ordinary memory
    for each of `layer_rows` rows. The first call of a layer and plan allocates the memory and cannot be captured in a
    CUDA graph.

    A run raises: Unsupported: the plan's programs do not fit on an SM together. Timeout: at a later call or
        `World.synchronize`, naming the rank that did not arrive. Overflow: at a later call or `World.synchronize`, on a
        rank whose experts received more than `layer_rows` rows, and on the ranks of these rows' tokens.
    """
    layer, state, block_m = call.layer, plan_state(world, call.layer, plan), plan.tile.block_m
    space, holder = make_workspace(world, layer, state.rows), lock(world, NAME)
    builder, tables, counters = tables_of(world, layer, block_m)
    weights_all, saved = builder.routes.shared_weights.local, call.saved_shapes(world, block_m)
    share, send = route_tables.share_launch(world, builder.routes), _dispatch_launch(world, state)
    gemm_in = _first_gemm(world, state, first_columns(world, layer), False, 0)
    gemm_out = _grouped_gemm(world, state, layer.inner, layer.hidden, False, False)
    order, rows = ordered_routes(world, layer, block_m, state.rows)
    combine, combined = combine_launch(world, state, rows, tables.targets, counters, space)
    final_sum = _final_sum_launch(world, state, 0, None)
    pairs = send, gemm_in, combine, gemm_out, final_sum  # the launches whose programs share an SM
    side_of_many = world.side_stream(NAME) if world.size > 1 else None  # `side_stream`

    listed: dict[str, Moved] = dict(tiles=tables.tiles, tile_count=tables.tile_count)
    in_fixed = dict(listed, inbox=space.inbox.local, sources=tables.sources, hidden_desc=space.hidden, epoch=None)
    out_fixed = dict(listed, hidden_desc=space.hidden, y_desc=space.y, counters=counters)
    sum_fixed: dict[str, Moved] = dict(routed=rows, outbox=space.outbox.local, counters=None, epoch=None)

    def run(operands: MoeOperands, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ids, weights, w13, w2, b13, b2, shared, received, *_ = operands
        stream, kept = world.current_stream(), tuple([world.empty(*spec) for spec in saved])
        side, preactivation = side_of_many or stream, kept[1] if len(kept) > 1 else None
        if received is None and call.counted:
            received = call.received(world, operands)
        sent: dict[str, Moved] = dict(x=x, ids=ids, inboxes=space.inbox.addresses, T=x.shape[0])
        in_moving = dict(in_fixed, w_desc=w13, w_half_desc=w13, bias=b13, preactivation_desc=preactivation)
        out_moving = dict(out_fixed, w_desc=w2, w_half_desc=w2, bias=b2)
        sum_moving = dict(sum_fixed, ids=ids, shared=shared, out=out, T=out.shape[0], number=world.number)
        world.order(holder, stream)
        moving = sent, in_moving, combined, out_moving, sum_moving
        tensors = x, ids, w13, w2, b13, b2, shared, out, preactivation
        state.ahead(tensors, lambda: map(BoundLaunch, pairs, moving))
        start = world.record(stream)
        share(stream, ids=ids, weights=weights, num_routes=ids.numel(), number=world.number)
        world.wait_event(side, start)
        send(side, **sent)
        builder.count_launch(stream, weights=weights_all, sources=tables.sources)
        builder.place_launch(stream, tables=tables)
        if order is not None:
            world.wait_event(side, world.record(stream))
            order(side)
        gemm_in(stream, **in_moving)
        # Combine may start only after the first GEMM. Earlier, its programs would occupy room on the SMs, and unless
        # `order` precedes them, the tables would be incomplete.
        first_gemm_done = world.record(stream)
        gemm_out(stream, **out_moving)
        world.wait_event(side, first_gemm_done)
        if kept:  # all rows have arrived, and other ranks overwrite none before combine announces its sums
            world.copy(kept[0], space.inbox.local, side)
        combine(side, **combined)
        # Without this wait, the programs of the sum could keep this rank's combine programs off the SMs while other
        # ranks wait for them. Moreover, a later call may overwrite memory that the combine programs read.
        world.wait_event(stream, world.record(side))
        final_sum(stream, **sum_moving)
        if received is not None:
            world.copy(received, tables.received, stream)
        return received, *kept

    return run


def orders_routes(world: World, layer: Layer) -> bool:
    """Return whether each token's local routes are moved to the front: not if all routes are local, or are few enough
    to be added together in any case."""
    return world.size > 1 and layer.k > ROUTES_TOGETHER.value


@prepared
def ordered_routes(world: World, layer: Layer, block_m: int, rows: int) -> tuple[Launch | None, RoutedRows]:
    """Return the launch that moves each token's local routes to the front (`local_first`), or None if they stay in the
    order of the slots; and y [rows, H] with the tables in that order. The first call is collective."""
    builder, tables, _ = tables_of(world, layer, block_m)
    weights, y = builder.routes.shared_weights.local, make_workspace(world, layer, rows).y
    if not orders_routes(world, layer):
        return None, RoutedRows(y, tables.route_rows, weights)
    shape, k, empty = tuple(weights.shape), layer.k, world.empty

    def make() -> tuple[torch.Tensor, ...]:
        return empty(shape, torch.int32), empty(shape, torch.float32), empty(shape[:2], torch.int32)

    # CUDA graphs may still use these tables when the World drops its prepared objects.
    routed = RoutedRows(y, *world.cached((NAME, "local routes", shape), make))
    tokens, block = math.prod(shape[:2]), world.backend.scale.routes // power(k)
    fixed = dict(route_rows=tables.route_rows, weights=weights, routed=routed, tokens=tokens)
    programs, options = min(-(-tokens // block), world.sm_count), dict(num_warps=4, local=True)
    return Launch(world, local_first, programs, options, **fixed, K=k, KP=power(k), BLOCK=block), routed


@prepared
def tables_of(world: World, layer: Layer, block_m: int) -> tuple[route_tables.TableBuilder, Tables, torch.Tensor]:
    """Return the builder of a layer's tables with tiles of block_m rows, the tables, and the counters to which the
    `targets` of the tables refer. The first call is collective."""
    local_experts = layer.experts // world.size
    sizes = route_tables.TableSizes(local_experts, layer.max_tokens_per_rank, block_m, layer.max_rows)
    builder, tables = route_tables.builder_of(world, layer.k, sizes)
    counters = world.channel(f"{NAME}, tiles by source step, for k {layer.k} and {sizes}", world.size, None).counters
    return builder, tables, counters
