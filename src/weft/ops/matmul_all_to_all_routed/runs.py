"""The calls of GEMM + all-to-all by a routing on the device: how each plan runs them, and how it returns the gradient's
rows (op.py, kernels.py)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from triton import JITFunction

from ...kernel_launch import Ahead, BoundLaunch, Launch, Matrix, prepared
from ...lang.channel import BlockChannel
from ...lang.jit import constants
from ...plans import FusedAllToAll, Plan
from ...prepared import Run
from ...tensor_checks import DTYPES
from ...world import Arena, World
from ..common import MatmulCall, tile_of, weight_matrix
from ..moe.routing.route_tables import power
from .kernels import BlockShape, Inbox, gemm_to_ranks, number_rows, receive_rows, return_rows

GEMM_ALL_TO_ALL_ROUTED = "matmul_all_to_all_routed"
NUMBER_WARPS, NUMBERED_ELEMENTS = 8, 4096  # for a program of `number_rows`, which keeps rows by ranks in registers
COPY_WARPS, COPY_STAGES = 16, 3  # a program that copies rows has 48 KiB in flight, enough for an SM by itself


class RoutedFactors(NamedTuple):
    """The operands of the GEMM, and the destination rank of each row of its result."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    destinations: torch.Tensor


@dataclass(frozen=True)
class StaticCall(MatmulCall):
    """A call with shapes that do not depend on the routing. `shards` contains the rows of one rank only, since all
    ranks have equally many rows. Each rank chooses for itself whether it has a bias and a gradient, so ranks do not
    compare these."""

    gradient: bool = field(kw_only=True)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return dict(m=self.rows, N=self.n, K=self.k, dtype=str(self.dtype))


# -- NCCL's collectives ------------------------------------------------------------------------------------------------


def run_sequential(
    world: World, call: StaticCall, plan: Plan, operands: RoutedFactors, out: Tensor
) -> tuple[Tensor, ...]:
    """Run a library GEMM, copy its rows to one zero-padded block for each rank, and exchange the blocks and the numbers
    of rows by all-to-all."""
    stream, size, (m, n) = world.current_stream(), world.size, (call.rows, call.n)
    x, weight, bias, destinations = operands
    y = world.backend.linear(x, weight, bias, stream)
    target_rows, sent_counts = world.empty((m,), torch.int32), world.empty((size,), torch.int32)

    def number() -> None:
        goes = destinations[:, None] == torch.arange(size, device=y.device)
        earlier = goes.cumsum(0) - goes.long()
        row = destinations * m + (earlier * goes).sum(1)
        target_rows.copy_(torch.where(goes.any(1), row, -1))
        sent_counts.copy_(goes.sum(0))

    world.call(number, [destinations], [target_rows, sent_counts], stream)
    blocks = world.empty((size * m + 1, n), call.dtype)  # the last row receives rows that are not sent

    def sort() -> None:
        blocks.zero_()
        blocks[torch.where(target_rows < 0, size * m, target_rows).long()] = y

    world.call(sort, [y, target_rows], [blocks], stream)
    counts = world.empty((size,), torch.int32)
    world.backend.all_to_all(list(out), list(blocks[:-1].view(out.shape)), stream)
    world.backend.all_to_all(list(counts.split(1)), list(sent_counts.split(1)), stream)
    return (counts, target_rows) if call.gradient else (counts,)


def return_sequential(
    world: World, call: StaticCall, dout: Tensor, counts: Tensor, target_rows: Tensor, returned: Tensor
) -> None:
    """Compute returned [m, N] = the gradients of the rows that this rank sent, by an all-to-all of whole blocks."""
    stream, blocks = world.current_stream(), world.empty(dout.shape, dout.dtype)
    world.backend.all_to_all(list(blocks), list(dout), stream)

    def pick() -> None:
        rows = blocks.view(-1, call.n)[target_rows.clamp(min=0).long()]
        returned.copy_(torch.where((target_rows >= 0)[:, None], rows, 0))

    world.call(pick, [blocks, target_rows], [returned], stream)


# -- fused -------------------------------------------------------------------------------------------------------------


def prepare_fused(world: World, call: StaticCall, plan: FusedAllToAll) -> Run:
    """Prepare three launches on one stream. All three are loaded before the first runs, since the last waits for other
    ranks."""
    arena, m = _arena(world, call), call.rows
    numbering, gemm, receiving = _fused_launches(world, call, plan, arena)
    ahead = Ahead()

    def run(operands: RoutedFactors, out: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias, destinations = operands
        stream = world.current_stream()
        world.order(arena, stream)
        target_rows, counts = world.empty((m,), torch.int32), world.empty((world.size,), torch.int32)
        row_addresses = world.empty((m,), torch.int64)
        steps = (
            BoundLaunch(
                numbering, dict(destinations=destinations, target_rows=target_rows, row_addresses=row_addresses)
            ),
            BoundLaunch(gemm, dict(x_desc=x, w_desc=weight, bias=bias, row_addresses=row_addresses)),
            BoundLaunch(receiving, dict(out=out, counts=counts)),
        )
        ahead((bias, out), lambda: steps)
        for step in steps:
            step.on(stream)
        return (counts, target_rows) if call.gradient else (counts,)

    return run


def return_fused(
    world: World, call: StaticCall, dout: Tensor, counts: Tensor, target_rows: Tensor, returned: Tensor
) -> None:
    """Compute returned [m, N] = the gradients of the rows that this rank sent, pushed by the other ranks."""
    stream, arena = world.current_stream(), _arena(world, call)
    world.order(arena, stream)
    launch = _copy_launch(world, return_rows, call, arena, "gradient", None)
    launch(stream, dout=dout, counts=counts, target_rows=target_rows, returned=returned)


def _arena(world: World, call: StaticCall) -> Arena:
    """Return the arena, with room for the rows and counts of all sources in each half."""
    return world.arena(world.size * (call.rows * call.n * call.dtype.itemsize + torch.int32.itemsize))


def _inbox(arena: Arena) -> Inbox:
    return Inbox(arena.memory.addresses, arena.epoch, arena.half)


def _channel(world: World, direction: str, call: StaticCall, plan: Plan | None) -> BlockChannel:
    """Return the channel of one shape, with a counter for each source. Every program of the source notifies it once."""
    name = f"{GEMM_ALL_TO_ALL_ROUTED}, {direction} {call.rows}x{call.n}x{call.k} {call.dtype} {plan}"
    return world.channel(name, world.size, None, arrivals=world.sm_count)


def _fused_launches(world: World, call: StaticCall, plan: FusedAllToAll, arena: Arena) -> tuple[Launch, Launch, Launch]:
    """Return the launches that number the rows, compute and send them, and receive them."""
    tile, programs = plan.tile, world.sm_count
    block = min(world.backend.scale.routes, NUMBERED_ELEMENTS // power(world.size))
    shared: dict[str, object] = dict(ch=_channel(world, "rows", call, plan), m=call.rows, N=call.n)
    options = dict(num_warps=NUMBER_WARPS, local=True)
    number_programs = min(-(-call.rows // block), programs)
    numbering = Launch(world, number_rows, number_programs, options, inbox=_inbox(arena), BLOCK=block, **shared)
    gemm = Launch(
        world,
        gemm_to_ranks,
        programs,
        dict(num_warps=tile.warps, num_stages=tile.stages, local=True),
        x_desc=Matrix(call.rows, call.k, (tile.block_m, tile.block_k)),
        w_desc=weight_matrix(call, tile),
        K=call.k,
        DTYPE=DTYPES[call.dtype],
        tile=tile_of(tile, tile.group_m),
        **shared,
    )
    return numbering, gemm, _copy_launch(world, receive_rows, call, arena, "rows", plan)


@prepared
def _copy_launch(
    world: World, kernel: JITFunction, call: StaticCall, arena: Arena, direction: str, plan: Plan | None
) -> Launch:
    """Return the launch of `receive_rows` or `return_rows`. Each thread copies two 16-byte words at once."""
    elements = 2 * world.backend.scale.block
    cols = min(power(call.n), elements, 1024)
    return Launch(
        world,
        kernel,
        world.sm_count,
        dict(num_warps=COPY_WARPS),
        inbox=_inbox(arena),
        ch=_channel(world, direction, call, plan),
        m=call.rows,
        N=call.n,
        ARRIVALS=world.sm_count,
        shape=constants(BlockShape, ROWS=elements // cols, COLS=cols, STAGES=COPY_STAGES),
    )
