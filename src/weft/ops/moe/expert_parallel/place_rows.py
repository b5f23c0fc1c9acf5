"""The launch that stores arrived rows in expert order (place_rows_kernels.py)."""

from __future__ import annotations

import torch

from ....kernel_launch import BoundLaunch, Launch, prepared
from ....world import World
from ..routing.route_tables import Tables, power
from .dispatched import DispatchedState
from .place_rows_kernels import ExpertOrder, place_rows

# The number of `place_rows` programs per SM, and the warps and registers per thread of each: these programs fit on an
# SM together with a dispatch program, and one of them with a GEMM.
PLACE_PER_SM, PLACE_WARPS, PLACE_REGISTERS = 2, 4, 96


def order_of(tables: Tables, ids: torch.Tensor) -> ExpertOrder:
    """Return the tables that define the position of each row. ids: int32 [W, max_tokens, k]."""
    return ExpertOrder(ids, tables.route_rows, tables.sources, tables.offsets, tables.received)


def place_rows_launch(
    world: World,
    state: DispatchedState,
    inbox: torch.Tensor,
    rows: torch.Tensor,
    order: ExpertOrder,
    arrivals: int,
    clear_padding: bool = True,
    epoch: torch.Tensor | None = None,
    half_size: int = 0,
) -> BoundLaunch:
    """Return the launch that copies the tokens of inbox [W, max_tokens, H] to the positions in rows [.., H] that
    `order` defines. The launch waits for `arrivals` arrivals from every rank. clear_padding: whether rows without a
    token are set to zero. epoch, half_size: as in `LayerWorkspace`."""
    launch = _place_rows(world, state, arrivals, clear_padding, half_size)
    return BoundLaunch(launch, dict(inbox=inbox, rows=rows, order=order, epoch=epoch))


@prepared
def _place_rows(world: World, state: DispatchedState, arrivals: int, clear_padding: bool, half_size: int) -> Launch:
    layer, block, programs = state.layer, world.backend.scale.placed_elements, PLACE_PER_SM * world.sm_count
    cols = min(power(layer.hidden), block)
    return Launch(
        world,
        place_rows,
        programs,
        dict(num_warps=PLACE_WARPS, maxnreg=PLACE_REGISTERS, co_resident=True),
        ch=state.dispatch_flags,
        half_size=half_size,
        max_tokens=layer.max_tokens_per_rank,
        ARRIVALS=arrivals,
        H=layer.hidden,
        COLS=cols,
        K=layer.k,
        EL=state.local_experts,
        ROWS=block // cols,
        STAGES=state.plan.send_stages,
        PADDED=clear_padding,
        PROGRAMS=programs,
    )
