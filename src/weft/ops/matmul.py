"""x @ weight.T on some of the SMs, so that a communicating kernel beside it finds the others free. Local."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compute.gemm import matmul as kernel
from ..kernel_launch import Launch, Matrix, prepared
from ..plans import FusedGather, GemmTile
from ..transport.memory import lock
from ..world import World
from .common import tile_of
from .tiles import fitting

# The kernel's arguments without it.
ALONE = dict(sums=None, ch=None, turn=None, shared=0, each=1, parts=1, first=0, SHARE=False)


def tile(world: World) -> GemmTile:
    """The GEMM's tiles."""
    return fitting(world.scale.plan(FusedGather), world.capability).tile


@dataclass(frozen=True)
class Shares:
    """How programs share the last tiles of a GEMM (`kernels.gemm.matmul`), and how long it takes, in K steps of a
    tile."""

    time: int
    shared: int = 0  # tiles
    each: int = 1  # tiles that a helper has a part of
    parts: int = 1  # of a tile
    first: int = 0  # K steps of the first part

    @classmethod
    def of(cls, world: World, tiles: int, steps: int, programs: int) -> Shares:
        """The quickest for `tiles` tiles of `steps` K steps; none where the last wave is so full that sharing it costs
        more than it spares."""
        part, handed, cost = world.scale.min_part_steps, world.scale.handover_steps, world.scale.add_steps
        waves, rest = divmod(tiles, programs)
        best = cls((waves + (rest > 0)) * steps)
        for each in range(1, 5) if rest else ():
            parts = min(programs // rest, steps // part) if each == 1 else 2
            if parts < 2:
                continue
            helpers = -(-rest // each) * (parts - 1)
            first = (steps + handed * (parts - 1)) * each // (each + parts - 1)
            time = waves * steps + first + cost * min(each, 2)
            if rest + helpers <= programs and 0 < first <= steps - (parts - 1) and time < best.time:
                best = cls(time, rest, each, parts, first)
        return best


def matmul(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, world: World, programs: int, gated: int = 0
) -> None:
    """out [M, N] = x [M, K] @ weight.T [N, K] by `programs` programs, one a SM; or, gated, out [M, gated] = silu(gate)
    * up for a weight as in `all_gather_swiglu`. On the current stream. Rows must be whole 16-byte words; all
    contiguous."""
    (m, k), n, t = x.shape, weight.shape[0], tile(world)
    if m == 0:
        return
    tiles, steps = -(-m // t.block_m) * -(-n // t.block_n), -(-k // t.block_k)
    shares = Shares.of(world, tiles, steps, programs)
    stream = world.current_stream()
    if shares.shared:
        world.order(lock(world, "parts of tiles"), stream)
    launch = _matmul(world, m, n, k, out.shape[1], gated > 0, programs)
    launch(stream, a_desc=x, b_desc=weight, out_desc=out)


@prepared
def _matmul(world: World, m: int, n: int, k: int, columns: int, gated: bool, programs: int) -> Launch:
    """columns: of the output."""
    t, block = tile(world), world.scale.interleave
    tiles, steps = -(-m // t.block_m) * -(-n // t.block_n), -(-k // t.block_k)
    shares = Shares.of(world, tiles, steps, programs)
    return Launch(
        world,
        kernel,
        programs if shares.shared else min(programs, tiles),
        dict(num_warps=t.warps, num_stages=t.stages),
        a_desc=Matrix(m, k, (t.block_m, t.block_k)),
        b_desc=Matrix(n, k, (t.block_n, t.block_k)),
        out_desc=Matrix(m, columns, (t.block_m, block if gated else t.block_n // 2)),
        M=m,
        N=n,
        K=k,
        tile=tile_of(t, t.group_m),
        GATED=block if gated else 0,
        **(sharing(world, t, shares, programs) if shares.shared else ALONE),
    )


def sharing(world: World, t: GemmTile, shares: Shares, programs: int) -> dict[str, object]:
    """Arguments of the kernel for tiles that programs share. The memory of the parts is of all shapes together."""

    def make() -> dict[str, object]:
        ch = world.local_channel("parts of tiles", [1] * (shares.shared * (shares.parts - 1)))
        numbers = dict(shared=shares.shared, each=shares.each, parts=shares.parts, first=shares.first)
        return dict(ch=ch, turn=world.zeros((1,), torch.int32), SHARE=True, **numbers)

    room = (programs, t.block_m, t.block_n)  # helpers have no more parts than there are programs
    sums = world.cached(("parts of tiles", room), lambda: world.empty(room, torch.float32))
    return dict(sums=sums, **world.cached(shares, make))
