"""The GEMM x @ weight.T + bias with 8-bit operands on one GPU, by weft's own kernel or by a library, and the choice
between them.

The first call of a size outside a CUDA graph capture times all implementations. From then on, calls of this size run
the fastest implementation with correct results, as for GEMMs with 16-bit operands (backends/library_gemm.py). If a size
was not measured before a capture, the captured call uses weft's own kernel. On CPU tensors torch multiplies the
dequantized values.
"""

from __future__ import annotations

from functools import partial

import torch

from ..backends import library_gemm
from ..backends.base import Stream
from ..backends.library_gemm import ScaledOperands
from ..chooser import Choice, Chooser
from ..compute.scaled_gemm import Scales, scaled_matmul
from ..kernel_launch import Launch, Matrix, prepared
from ..plans import GemmTile, Persistent
from ..scaled_tensor import Scaling
from ..world import World
from .recipes import block_rows, scaled_tile

# The first call of a size times these plans and cuBLAS, and uses the fastest. With scales by row, plans with tiles of
# 128 x 128 and 5 stages needed at least 1.07 times the time of the fastest implementation at each of 45 sizes (H200,
# 2026-11).
WIDE = (Persistent(tile=GemmTile(block_k=128, stages=4)),)
PROMOTED = (Persistent(tile=GemmTile(block_n=128, block_k=128, warps=4, stages=3), per_sm=2, flatten=False),)
PERSISTENT_PLANS = {str(plan): plan for plan in (*WIDE, *PROMOTED)}


def persistent_plans(scaling: Scaling) -> tuple[Persistent, ...]:
    """Return the plans of weft's own kernel that the first call times."""
    return PROMOTED if scaling.promotes else WIDE


def default_plan(world: World, scaling: Scaling) -> Persistent:
    return world.backend.scale.plan(Persistent) if world.backend.scale.presets else persistent_plans(scaling)[0]


def multiply_persistent(world: World, plan: Persistent, operands: ScaledOperands, out: torch.Tensor) -> None:
    """Compute out [M, N] with weft's own kernel, on the current stream."""
    (x, x_scales, _), (weight, weight_scales, _), bias, _ = operands
    if len(x) == 0:
        return
    size, by_columns = (len(x), len(weight), x.shape[1]), not x_scales.is_contiguous()
    launch = _persistent_launch(world, operands.scaling, plan, size, by_columns)
    scales = Scales(x_scales, weight_scales)
    launch(world.current_stream(), x_desc=x, w_desc=weight, out_desc=out, bias=bias, scales=scales)


@prepared
def _persistent_launch(
    world: World, scaling: Scaling, plan: Persistent, size: tuple[int, int, int], by_columns: bool
) -> Launch:
    """Return the launch of weft's own kernel. `size` is M, N and K."""
    (m, n, k), tile = size, plan.tile
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    rows = block_rows(tile, scaling)
    return Launch(
        world,
        scaled_matmul,
        min(world.sm_count * plan.per_sm, -(-m // bm) * -(-n // bn)),
        dict(num_warps=tile.warps, num_stages=tile.stages, per_sm=plan.per_sm, local=True),
        x_desc=Matrix(m, k, (rows, bk)),
        w_desc=Matrix(n, k, (bn, bk)),
        out_desc=Matrix(m, n, (rows, bn // 2)),
        M=m,
        N=n,
        K=k,
        tile=scaled_tile(tile, tile.group_m, scaling),
        BY_COLUMNS=by_columns,
        FLATTEN=plan.flatten,
    )


def product(world: World, scaling: Scaling, name: str) -> library_gemm.ScaledProduct:
    """Return the function with this name. The function computes the GEMM by weft's own kernel with a plan's tiles, or
    by a library."""
    if name in PERSISTENT_PLANS:
        return partial(multiply_persistent, world, PERSISTENT_PLANS[name])
    return library_gemm.scaled_products(scaling)[name]


def multiply(world: World, operands: ScaledOperands, stream: Stream, out: torch.Tensor) -> None:
    """Compute out [M, N] on `stream` with the fastest implementation of the GEMM. x and weight are contiguous."""
    (x, x_scales, _), (weight, weight_scales, _), bias, _ = operands
    if not x.is_cuda:
        tensors = [t for t in (x, weight, bias, x_scales, weight_scales) if t is not None]
        world.call(lambda: library_gemm.dequantized_product(operands, out), tensors, [out], stream)
        return
    if len(x) == 0:
        return
    with world.on(stream):
        product(world, operands.scaling, fastest(world, operands, out))(operands, out)


def fastest(world: World, operands: ScaledOperands, out: torch.Tensor) -> str:
    """Return the name of the fastest implementation. If the size has not been measured yet, the function times all
    implementations, which write `out`."""
    (x, x_scales, _), (weight, _, _), *_ = operands
    scaling = operands.scaling
    layout = scaling, out.dtype, x_scales.is_contiguous()
    key = multiply, library_gemm.stepped(len(x)), *weight.shape, x.device, *layout
    known = Chooser.alone.trials.get(key)
    if known is not None:
        return known.chosen("graph")
    own_names = [str(plan) for plan in persistent_plans(scaling)]
    names = [*own_names, *library_gemm.scaled_products(scaling)]
    products = {name: partial(product(world, scaling, name), operands, out) for name in names}
    return Chooser.alone.choose(
        Choice(
            key,
            lambda mode: own_names[0],
            lambda: library_gemm.correct_names(products, out),
            lambda name: products[name](),
        )
    )
