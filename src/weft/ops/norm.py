"""RMSNorm and residual add of rows that are in ordinary order or in the tiles that a signaled plan returns. No rank
waits for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from triton import JITFunction

from ..compute.norm import TileRuns, add_rows
from ..compute.norm import rms_norm as norm_kernel
from ..kernel_launch import Launch, prepared
from ..lang.jit import constants
from ..op import check_call
from ..tensor_checks import DTYPES, check_device, dims
from ..world import World


@dataclass(frozen=True)
class Remap:
    """The layout of a matrix [rows, columns] as tiles of block_m x block_n. The tiles are stored one after another, and
    the left half of each tile before its right half.

    The tiles of group_m tile rows follow one another column by column, then the tiles of the next group_m tile rows.
    There are tiles_m tile rows in all. Tiles at the edges of the matrix are stored as whole tiles; their elements
    outside the matrix are undefined.
    """

    rows: int
    columns: int
    tiles_m: int
    block_m: int
    block_n: int
    group_m: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor that contains the tiles."""
        tiles = self.tiles_m * -(-self.columns // self.block_n)
        return tiles * 2 * self.block_m, self.block_n // 2

    def index(self) -> torch.Tensor:
        """Return int64 [rows, columns] on the CPU; `tiles.flatten()[index]` is the matrix."""
        row = torch.arange(self.rows, device="cpu")[:, None]
        col = torch.arange(self.columns, device="cpu")[None, :]
        half = self.block_n // 2
        tile_row, tile_column = row // self.block_m, col // self.block_n
        group_start = tile_row // self.group_m * self.group_m
        height = (self.tiles_m - group_start).clamp_max(self.group_m)
        tile = group_start * -(-self.columns // self.block_n) + tile_column * height + tile_row - group_start
        strip = (tile * 2 + col % self.block_n // half) * self.block_m + row % self.block_m
        return strip * half + col % half


@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    world: World,
    residual: None = None,
    remap: Remap | None = None,
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    world: World,
    residual: torch.Tensor,
    remap: Remap | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    world: World,
    residual: torch.Tensor | None,
    remap: Remap | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    world: World,
    residual: torch.Tensor | None = None,
    remap: Remap | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return h / sqrt(mean(h^2) + eps) * weight, where h = x or h = x + residual. The mean is over the columns.

    Args:
        x: [M, N]; or, with `remap`, the tiles that `matmul_all_reduce_tiles` or `matmul_reduce_scatter_tiles` returned
            together with that Remap. The norm then stores rows in ordinary order without a further pass over memory
            (FlashOverlap, section 4.3).
        weight: [N].
        eps: the number that is added to the mean of squares.
        world: the World whose device is used. No rank waits for another.
        residual: [M, N], in ordinary order.
        remap: None if x is in ordinary order.

    All tensors are bfloat16, or all are float16. The norm is computed in float32, from h rounded to the dtype.

    Returns:
        [M, N] in ordinary order; with a residual also h [M, N].

    Raises ValueError or TypeError for an invalid shape, dtype or device. The function has no gradient.

    Examples:
        >>> x, weight = torch.full((2, 16), 3.0).bfloat16(), torch.ones(16).bfloat16()
        >>> weft.spmd(lambda world: weft.rms_norm(x, weight, 1e-6, world=world)[0, 0].item(), 1, backend="emulated")
        [1.0]
    """
    rows, n = validate("rms_norm", world, x, remap, {"weight": weight, "residual": residual})
    if weight.shape != (n,):
        raise ValueError(f"rms_norm: weight {dims(weight)} does not match {n} columns")
    x, weight, total = x.contiguous(), weight.contiguous(), None
    if residual is not None:
        residual, total = residual.contiguous(), world.empty((rows, n), x.dtype)
    out = normalising(world, (rows, n), eps, residual is not None, remap)(x, weight, residual, total)
    world.finish(world.current_stream())
    return out if total is None else (out, total)


@prepared
def normalising(
    world: World, size: tuple[int, int], eps: float, has_residual: bool, remap: Remap | None = None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]:
    """Return `rms_norm` of `size` rows and columns as a function of checked, contiguous operands: x, weight, residual,
    and the tensor for h. The last two are None unless `has_residual`."""
    rows, n = size
    if not rows:
        return lambda x, *_: world.empty(size, x.dtype)
    cols = columns(world, remap)
    runs = 1 << (-(-n // cols) - 1).bit_length()
    r = max(1, world.backend.scale.norm_block // (runs * cols))
    warps = min(32, max(4, r * runs * cols // 1024))
    programs = min(-(-rows // r), world.sm_count * max(1, 16 // warps))
    own_parameters = ("eps", eps), ("R", r), ("RUNS", runs), ("PAIRS", world.batch_invariant)
    launch = _launch(world, norm_kernel, programs, warps, size, remap, has_residual, own_parameters)

    def run(
        x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, total: torch.Tensor | None
    ) -> torch.Tensor:
        out = world.empty(size, x.dtype)
        if residual is None:
            residual, total = x, out  # the kernel uses neither, but a launch needs an address
        launch(world.current_stream(), x=x, residual=residual, weight=weight, out=out, total=total)
        return out

    return run


def residual_add(x: torch.Tensor, residual: torch.Tensor, *, world: World, remap: Remap | None = None) -> torch.Tensor:
    """Return x + residual [M, N] in ordinary order; x and remap are as in `rms_norm`. The sum is computed in float32
    and rounded once. Raises the errors of `rms_norm`.

    Examples:
        >>> x = torch.ones(2, 16).bfloat16()
        >>> weft.spmd(lambda world: weft.residual_add(x, x, world=world)[0, 0].item(), 1, backend="emulated")
        [2.0]
    """
    check_call("residual_add", world)
    check_device("residual_add", world, "residual", residual)
    rows, n = validate("residual_add", world, x, remap, {"residual": residual})
    out = world.empty((rows, n), x.dtype)
    if rows:
        launch = rows_launch(world, (rows, n), remap, True)
        launch(world.current_stream(), x=x.contiguous(), residual=residual.contiguous(), out=out)
    world.finish(world.current_stream())
    return out


def rows_launch(world: World, size: tuple[int, int], remap: Remap | None, residual: bool) -> Launch:
    """Return the launch that computes out [M, N] = x, or x + residual, in ordinary order. `size` contains M > 0 and N.
    Without a residual the launch still needs an address as `residual`."""
    (rows, n), cols = size, columns(world, remap)
    r = max(1, world.backend.scale.block // cols)
    programs = min(world.sm_count * 4, -(-rows // r) * -(-n // cols))
    return _launch(world, add_rows, programs, 8, size, remap, residual, (("R", r),))


def columns(world: World, remap: Remap | None) -> int:
    """Return the number of columns in a contiguous run (compute/norm.py)."""
    if remap is not None:
        return remap.block_n // 2
    return world.backend.scale.run_columns


def validate(
    op: str, world: World, x: torch.Tensor, remap: Remap | None, others: dict[str, torch.Tensor | None]
) -> tuple[int, int]:
    """Check the operands, and return the numbers of rows and columns of the matrix."""
    check_call(op, world)
    for name, t in (("x", x), *others.items()):
        if t is not None or name != "residual":
            check_device(op, world, name, t)
    if remap is not None and not isinstance(remap, Remap):
        raise TypeError(f"{op}: remap must be the weft.Remap returned with x, or None, got {remap!r}")
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be 2-D, got {dims(x)}")
    if remap is not None and x.shape != remap.shape:
        raise ValueError(f"{op}: x {dims(x)} is not what {remap} describes, which is {list(remap.shape)}")
    rows, n = x.shape if remap is None else (remap.rows, remap.columns)
    if n == 0:
        raise ValueError(f"{op}: x {dims(x)} has no columns")
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: x is {dims(x)}; bfloat16 and float16 are supported")
    for name, t in (("x", x), *others.items()):
        if t is None:
            continue
        if t.dtype != x.dtype:
            raise TypeError(f"{op}: {name} is {dims(t)}, x is {dims(x)}: one dtype is needed")
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient, which this op does not have; use torch.no_grad()")
    residual = others.get("residual")
    if residual is not None and residual.shape != (rows, n):
        raise ValueError(f"{op}: residual {dims(residual)} does not match the rows [{rows}, {n}]")
    return rows, n


@prepared
def _launch(
    world: World,
    kernel: JITFunction,
    programs: int,
    warps: int,
    size: tuple[int, int],
    remap: Remap | None,
    residual: bool,
    own_parameters: tuple[tuple[str, float], ...],
) -> Launch:
    """Return the launch. `size` contains the numbers of rows and columns, and `own_parameters` maps names to the
    kernel's own parameters."""
    rows, n = size
    tiled = dict(BM=1, GROUP_M=1) if remap is None else dict(BM=remap.block_m, GROUP_M=remap.group_m)
    return Launch(
        world,
        kernel,
        programs,
        dict(num_warps=warps, local=True, enable_fp_fusion=not world.batch_invariant),
        rows=rows,
        N=n,
        **dict(own_parameters),
        tiles_m=0 if remap is None else remap.tiles_m,
        layout=constants(TileRuns, TILED=remap is not None, COLS=columns(world, remap), **tiled),
        RESIDUAL=residual,
        ALIGNED=n % 8 == 0,
    )
