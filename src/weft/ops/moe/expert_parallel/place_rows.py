"""The launch that places arrived rows in the order of their experts (place_rows_kernels.py)."""

from __future__ import annotations

import torch

from ....kernel_launch import GivenLaunch, Launch, prepared
from ....world import World
from ..routing.route_tables import power
from .dispatched import Prepared
from .place_rows_kernels import ExpertOrder, place_rows

PLACERS, REGISTERS = 8, 96  # warps of a placing program, and registers of a thread: two and a sender share an SM


def places_rows(
    world: World,
    of: Prepared,
    inbox: torch.Tensor,
    rows: torch.Tensor,
    order: ExpertOrder,
    arrivals: int,
    padded: bool = True,
    turn: torch.Tensor | None = None,
    half: int = 0,
) -> GivenLaunch:
    """The launch that places inbox [W, C, H] in rows [.., H], each where `order` has it, behind so many arrivals of
    every rank. padded: rows of no token are zero. turn, half: as `Space` has them, of calls that alternate between
    halves."""
    launch = _place_rows(world, of, arrivals, padded, half)
    return GivenLaunch(launch, dict(inbox=inbox, rows=rows, order=order, turn=turn))


@prepared
def _place_rows(world: World, of: Prepared, arrivals: int, padded: bool, half: int) -> Launch:
    layer, block = of.layer, world.scale.placed_elements
    cols = min(power(layer.hidden), block)
    return Launch(
        world,
        place_rows,
        world.sm_count,
        dict(num_warps=PLACERS, maxnreg=REGISTERS, co_resident=True),
        ch=of.came,
        half=half,
        C=layer.capacity,
        ARRIVALS=arrivals,
        H=layer.hidden,
        COLS=cols,
        K=layer.k,
        EL=of.local,
        ROWS=block // cols,
        STAGES=of.plan.send_stages,
        PADDED=padded,
        PROGRAMS=world.sm_count,
    )
