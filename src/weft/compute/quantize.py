"""Kernels that quantize the rows of a matrix, or of a gated activation, to e4m3, and compute the scales in the same
pass."""

from typing import NamedTuple

import triton.language as tl

from ..lang.jit import jit
from .gemm import silu

LARGEST = tl.constexpr(448.0)  # the largest value of e4m3
LEAST = tl.constexpr(1e-12)  # a group of zeros has the same scale as a group with this largest magnitude


class Groups(NamedTuple):
    """The parameters that determine which elements share a scale. By default GROUP columns of a row share a scale. With
    SHARED, GROUP columns of all R rows of a tile do. With STATIC, all elements do, and the scale is an argument.
    INTERLEAVE is 0, or as in `elementwise.silu_mul`. A tile has R x C elements, and C is a multiple of GROUP. With
    LOOPED a row is longer than C, and GROUP is the whole row."""

    GROUP: tl.constexpr
    SHARED: tl.constexpr
    STATIC: tl.constexpr
    LOOPED: tl.constexpr
    INTERLEAVE: tl.constexpr
    R: tl.constexpr
    C: tl.constexpr


@jit
def e4m3_scale(largest):
    """Return the scale of a group whose largest magnitude is `largest`."""
    return tl.maximum(largest, LEAST) / LARGEST


@jit
def divide_by_given_scale(values, scale):
    """Return values / scale, clamped to the range of e4m3. A NaN stays a NaN."""
    most = tl.minimum(values / scale, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(most, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def divide_by_scales(values, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """Divide the values, float32 [COUNT GROUP], by the scales of their groups. Return the quotients and the scales
    [COUNT]."""
    parts = tl.reshape(values, (COUNT, GROUP))
    scale = e4m3_scale(tl.max(tl.abs(parts), 1))
    return tl.reshape(parts / scale[:, None], (COUNT * GROUP,)), scale


@jit
def load_values(x, row, col, ok, stride, INTERLEAVE: tl.constexpr):
    """Load elements of x as float32; with INTERLEAVE, compute silu(gate) * up of its columns."""
    if INTERLEAVE:
        offset = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + offset, mask=ok, other=0.0).to(tl.float32)
        values = silu(gate) * tl.load(x + offset + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + row * stride + col, mask=ok, other=0.0).to(tl.float32)
    return values


@jit
def quantize_long_row(x, out, scales, t, N, stride, row_stride, groups):
    """Quantize row t in two passes; the second pass reads the row from the L2 cache."""
    row = t.to(tl.int64)
    c = tl.arange(0, groups.C)
    largest = tl.zeros((groups.C,), tl.float32)
    for start in range(0, N, groups.C):
        col = start + c
        largest = tl.maximum(largest, tl.abs(load_values(x, row, col, col < N, stride, groups.INTERLEAVE)))
    scale = e4m3_scale(tl.max(largest))
    tl.store(scales + row * row_stride, scale)
    for start in range(0, N, groups.C):
        col = start + c
        values = load_values(x, row, col, col < N, stride, groups.INTERLEAVE)
        tl.store(out + row * N + col, (values / scale).to(out.dtype.element_ty), mask=col < N)


@jit(do_not_specialize=("rows", "row_stride", "group_stride"))
def quantize_rows(x, out, scales, rows, N, stride, row_stride, group_stride, groups):
    """Compute out [rows, N] = x / scale, rounded to e4m3; rows of x have `stride` elements. The scale of a group is
    stored at row * row_stride + group * group_stride of `scales`; with SHARED, `row` counts rows of tiles. With STATIC
    the kernel reads the scale of all elements from `scales`."""
    R: tl.constexpr = groups.R
    C: tl.constexpr = groups.C
    GROUP: tl.constexpr = groups.GROUP
    tiles_n = 1 if groups.LOOPED else tl.cdiv(N, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        if groups.LOOPED:
            quantize_long_row(x, out, scales, t, N, stride, row_stride, groups)
        else:
            row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
            first_col = t % tiles_n * C
            col = first_col + tl.arange(0, C)[None, :]
            ok = (row < rows) & (col < N)
            values = load_values(x, row, col, ok, stride, groups.INTERLEAVE)
            if groups.STATIC:
                values = divide_by_given_scale(values, tl.load(scales))
            else:
                parts = tl.reshape(values, (R, C // GROUP, GROUP))
                largest = tl.max(tl.abs(parts), 2)
                group = first_col // GROUP + tl.arange(0, C // GROUP)[None, :]
                scale_offset = row * row_stride + group * group_stride
                group_ok = (row < rows) & (group * GROUP < N)
                if groups.SHARED:
                    largest = tl.max(largest, 0, keep_dims=True)
                    scale_offset = (t // tiles_n).to(tl.int64) * row_stride + group * group_stride
                    group_ok = group * GROUP < N
                scale = e4m3_scale(largest)
                tl.store(scales + scale_offset, scale, mask=group_ok)
                values = tl.reshape(parts / scale[:, :, None], (R, C))
            tl.store(out + row * N + col, values.to(out.dtype.element_ty), mask=ok)
