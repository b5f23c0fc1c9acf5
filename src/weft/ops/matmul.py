"""The GEMM x @ weight.T on some of the SMs, so that a concurrent communication kernel can use the other SMs. No rank
waits for another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..backends import library_gemm
from ..backends.base import Stream
from ..chooser import Choice, Chooser
from ..compute.gemm import matmul as kernel
from ..compute.gemm import whole_matmul
from ..kernel_launch import Launch, Matrix, prepared
from ..plans import GemmTile
from ..transport.memory import lock
from ..world import World
from .common import tile_of
from .tiles import usual_tile

# The arguments of the kernel for a GEMM without shared tiles.
ALONE = dict(
    partials=None, epoch=None, ch=None, shared_tiles=0, tiles_per_helper=1, parts=1, first_steps=0, SHARE=False
)


@dataclass(frozen=True)
class Shares:
    """The parameters for sharing the last tiles of a GEMM among programs (`compute.gemm.matmul`), and the time of the
    GEMM, in K steps of a tile. A tile is split along K into `parts` parts; the first part consists of first_steps K
    steps. A helper computes one part of each of tiles_per_helper tiles."""

    time: int
    shared_tiles: int = 0
    tiles_per_helper: int = 1
    parts: int = 1
    first_steps: int = 0

    @classmethod
    def choose(cls, world: World, tiles: int, steps: int, programs: int) -> Shares:
        """Return the fastest Shares for `tiles` tiles of `steps` K steps. Programs share no tiles if the last wave is
        so full that sharing its tiles would cost more time than it saves."""
        part, handover, cost = (
            world.backend.scale.min_part_steps,
            world.backend.scale.handover_steps,
            world.backend.scale.add_steps,
        )
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
    """Compute out [M, N] = x [M, K] @ weight.T [N, K] on the current stream, with `programs` programs, one on each SM.
    With `gated` compute out [M, gated] = silu(gate) * up for a weight as in `all_gather_swiglu`. All tensors are
    contiguous, and their rows are whole 16-byte words."""
    (m, k), n, stream = x.shape, weight.shape[0], world.current_stream()
    if m == 0:
        return
    launch, shares_tiles = _matmul(world, m, n, k, out.shape[1], gated > 0, programs)
    if shares_tiles:
        world.order(lock(world, "parts of tiles"), stream)
    launch(stream, a_desc=x, b_desc=weight, out_desc=out)


@prepared
def _matmul(world: World, m: int, n: int, k: int, columns: int, gated: bool, programs: int) -> tuple[Launch, bool]:
    """Return the launch, and whether the programs of the launch share tiles. The output has `columns` columns."""
    t, block = usual_tile(world), world.backend.scale.interleave
    tiles, steps = -(-m // t.block_m) * -(-n // t.block_n), -(-k // t.block_k)
    shares = Shares.choose(world, tiles, steps, programs)
    launch = Launch(
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
    return launch, shares.shared_tiles > 0


def share_arguments(world: World, t: GemmTile, shares: Shares, programs: int) -> dict[str, object]:
    """Return the kernel's arguments for shared tiles. GEMMs of all shapes use the same memory for partial tiles."""

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

    shape = (programs, t.block_m, t.block_n)  # helpers compute at most as many parts as there are programs
    partials = world.cached(("parts of tiles", shape), lambda: world.empty(shape, torch.float32))
    return dict(partials=partials, **world.cached(shares, make))


# The tiles that `invariant_matmul` times on a Hopper GPU. With few rows, narrow tiles keep all SMs busy.
INVARIANT_TILES = (
    GemmTile(),
    GemmTile(block_m=64, warps=4, stages=5),
    GemmTile(block_n=128, stages=5),
    GemmTile(block_m=64, block_n=128, warps=4, stages=6),
    GemmTile(block_m=64, block_n=64, warps=4, stages=8),
    GemmTile(block_m=64, block_n=32, warps=4, stages=8),
)


def invariant_matmul(
    world: World,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stream: Stream,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, in `out` or in a new tensor, computed with the fastest tile for this size. An element
    has the same bits with every tile and in the fused plans, because all of them add the K steps in ascending order,
    and all K steps have the same length. The operands must be dense, except that the weight may be stored as [K, N].
    The size of a row must be a multiple of 16 bytes."""
    out = world.empty((x.shape[0], weight.shape[0]), x.dtype) if out is None else out
    if len(x):
        with world.on(stream):
            multiply_with_tile(world, _fastest_tile(world, x, weight, bias, out), x, weight, bias, out)
    return out


def multiply_with_tile(
    world: World, t: GemmTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    launch = _whole_matmul(world, (*out.shape, x.shape[1]), t, not weight.is_contiguous())
    launch(world.current_stream(), a_desc=x, b_desc=weight, out_desc=out, bias=bias)


@prepared
def _whole_matmul(world: World, size: tuple[int, int, int], t: GemmTile, trans_b: bool) -> Launch:
    """Return the launch. `size` is M, N and K. With `trans_b` the weight is stored as [K, N]."""
    (m, n, k), (bm, bn, bk) = size, (t.block_m, t.block_n, t.block_k)
    return Launch(
        world,
        whole_matmul,
        min(world.sm_count, -(-m // bm) * -(-n // bn)),
        dict(num_warps=t.warps, num_stages=t.stages, local=True),
        a_desc=Matrix(m, k, (bm, bk)),
        b_desc=Matrix(k, n, (bk, bn)) if trans_b else Matrix(n, k, (bn, bk)),
        out_desc=Matrix(m, n, (bm, bn // 2)),
        M=m,
        N=n,
        K=k,
        tile=tile_of(t, t.group_m, trans_b),
    )


def _fastest_tile(
    world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> GemmTile:
    """Return the fastest tile for these operands. If the size has not been measured yet, the function times GEMMs with
    all tiles, and these GEMMs write `out`."""
    usual = usual_tile(world)
    if not x.is_cuda or usual not in INVARIANT_TILES:
        return usual
    key = invariant_matmul, library_gemm.stepped(len(x)), *weight.shape, weight.is_contiguous(), x.dtype, x.device
    known = Chooser.alone.trials.get(key)
    if known is not None:
        return known.chosen("graph")
    choice = Choice(
        key, lambda mode: usual, lambda: INVARIANT_TILES, lambda t: multiply_with_tile(world, t, x, weight, bias, out)
    )
    return Chooser.alone.choose(choice)
