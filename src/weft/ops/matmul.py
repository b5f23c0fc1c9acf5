"""x @ weight.T on some of the SMs, so that a kernel that communicates concurrently has the others. No rank waits for
another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compute.gemm import matmul as kernel
from ..kernel_launch import Launch, Matrix, prepared
from ..plans import FusedGather, GemmTile
from ..transport.memory import lock
from ..world import World
from .common import tile_of
from .tiles import with_architecture_tiles

# The kernel's arguments for a GEMM without shared tiles.
ALONE = dict(
    partials=None, epoch=None, ch=None, shared_tiles=0, tiles_per_helper=1, parts=1, first_steps=0, SHARE=False
)


def tile(world: World) -> GemmTile:
    """Return the shape of the GEMM's tiles."""
    return with_architecture_tiles(world.scale.plan(FusedGather), world.capability).tile


@dataclass(frozen=True)
class Shares:
    """How programs share the last tiles of a GEMM (`compute.gemm.matmul`), and how long the GEMM takes, in K steps of a
    tile. A tile is split along K into `parts` parts, the first of which has first_steps K steps; a helper computes one
    part of tiles_per_helper tiles."""

    time: int
    shared_tiles: int = 0
    tiles_per_helper: int = 1
    parts: int = 1
    first_steps: int = 0

    @classmethod
    def choose(cls, world: World, tiles: int, steps: int, programs: int) -> Shares:
        """Return the fastest for `tiles` tiles of `steps` K steps. No tiles are shared if the last wave is so full that
        sharing it costs more than it saves."""
        part, handover, cost = world.scale.min_part_steps, world.scale.handover_steps, world.scale.add_steps
        waves, rest = divmod(tiles, programs)
        best = cls((waves + (rest > 0)) * steps)
        for tiles_per_helper in range(1, 5) if rest else ():
            parts = min(programs // rest, steps // part) if tiles_per_helper == 1 else 2
            if parts < 2:
                continue
            helpers = -(-rest // tiles_per_helper) * (parts - 1)
            first_steps = (steps + handover * (parts - 1)) * tiles_per_helper // (tiles_per_helper + parts - 1)
            time = waves * steps + first_steps + cost * min(tiles_per_helper, 2)
            if rest + helpers <= programs and 0 < first_steps <= steps - (parts - 1) and time < best.time:
                best = cls(time, rest, tiles_per_helper, parts, first_steps)
        return best


def matmul(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, world: World, programs: int, gated: int = 0
) -> None:
    """Compute out [M, N] = x [M, K] @ weight.T [N, K] with `programs` programs, one on each SM, on the current stream;
    with `gated`, out [M, gated] = silu(gate) * up for a weight as in `all_gather_swiglu`. All tensors are contiguous,
    and their rows are whole 16-byte words."""
    (m, k), n, t = x.shape, weight.shape[0], tile(world)
    if m == 0:
        return
    tiles, steps = -(-m // t.block_m) * -(-n // t.block_n), -(-k // t.block_k)
    shares = Shares.choose(world, tiles, steps, programs)
    stream = world.current_stream()
    if shares.shared_tiles:
        world.order(lock(world, "parts of tiles"), stream)
    launch = _matmul(world, m, n, k, out.shape[1], gated > 0, programs)
    launch(stream, a_desc=x, b_desc=weight, out_desc=out)


@prepared
def _matmul(world: World, m: int, n: int, k: int, columns: int, gated: bool, programs: int) -> Launch:
    """Return the launch. columns: those of the output."""
    t, block = tile(world), world.scale.interleave
    tiles, steps = -(-m // t.block_m) * -(-n // t.block_n), -(-k // t.block_k)
    shares = Shares.choose(world, tiles, steps, programs)
    return Launch(
        world,
        kernel,
        programs if shares.shared_tiles else min(programs, tiles),
        dict(num_warps=t.warps, num_stages=t.stages),
        a_desc=Matrix(m, k, (t.block_m, t.block_k)),
        b_desc=Matrix(n, k, (t.block_n, t.block_k)),
        out_desc=Matrix(m, columns, (t.block_m, block if gated else t.block_n // 2)),
        M=m,
        N=n,
        K=k,
        tile=tile_of(t, t.group_m),
        GATED=block if gated else 0,
        **(share_arguments(world, t, shares, programs) if shares.shared_tiles else ALONE),
    )


def share_arguments(world: World, t: GemmTile, shares: Shares, programs: int) -> dict[str, object]:
    """Return the kernel's arguments for tiles that programs share. GEMMs of all shapes use the same memory for partial
    tiles."""

    def make() -> dict[str, object]:
        ch = world.local_channel("parts of tiles", [1] * (shares.shared_tiles * (shares.parts - 1)))
        return dict(
            ch=ch,
            epoch=world.zeros((1,), torch.int32),
            SHARE=True,
            shared_tiles=shares.shared_tiles,
            tiles_per_helper=shares.tiles_per_helper,
            parts=shares.parts,
            first_steps=shares.first_steps,
        )

    shape = (programs, t.block_m, t.block_n)  # helpers have no more parts than there are programs
    partials = world.cached(("parts of tiles", shape), lambda: world.empty(shape, torch.float32))
    return dict(partials=partials, **world.cached(shares, make))
