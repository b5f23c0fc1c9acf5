"""Rows in e4m3 with the scales that they are divided by, in one pass: of a matrix, or of a gated activation."""

from typing import NamedTuple

import triton.language as tl

from ..lang.jit import jit
from .gemm import silu

LARGEST = tl.constexpr(448.0)  # of e4m3
LEAST = tl.constexpr(1e-12)  # a group of zeros has the scale of this as its largest element


class Groups(NamedTuple):
    """What shares a scale: GROUP columns of a row; of all R rows of a tile with SHARED; or, GIVEN, everything, by a
    scale that is an argument. INTERLEAVE: 0, or as in `elementwise.silu_mul`. A tile is R x C elements, C a multiple of
    GROUP; LOOPED: a row is longer than C, and GROUP is all of it."""

    GROUP: tl.constexpr
    SHARED: tl.constexpr
    GIVEN: tl.constexpr
    LOOPED: tl.constexpr
    INTERLEAVE: tl.constexpr
    R: tl.constexpr
    C: tl.constexpr


@jit
def scale_of(largest):
    """The scale of a group whose largest element has that size."""
    return tl.maximum(largest, LEAST) / LARGEST


@jit
def over_scales(values, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """float32 [COUNT GROUP] over the scale of each group, and the scales [COUNT]."""
    parts = tl.reshape(values, (COUNT, GROUP))
    scale = scale_of(tl.max(tl.abs(parts), 1))
    return tl.reshape(parts / scale[:, None], (COUNT * GROUP,)), scale


@jit
def values_of(x, row, col, ok, stride, INTERLEAVE: tl.constexpr):
    """float32 elements of x, or silu(gate) * up of its columns."""
    if INTERLEAVE:
        at = row * stride + (col // INTERLEAVE * (2 * INTERLEAVE) + col % INTERLEAVE)
        gate = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
        values = silu(gate) * tl.load(x + at + INTERLEAVE, mask=ok, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + row * stride + col, mask=ok, other=0.0).to(tl.float32)
    return values


@jit
def quantize_long_row(x, out, scales, t, N, stride, row_stride, groups):
    """A row in two passes, of which the second finds it in the L2 cache."""
    row = t.to(tl.int64)
    c = tl.arange(0, groups.C)
    largest = tl.zeros((groups.C,), tl.float32)
    for start in range(0, N, groups.C):
        col = start + c
        largest = tl.maximum(largest, tl.abs(values_of(x, row, col, col < N, stride, groups.INTERLEAVE)))
    scale = scale_of(tl.max(largest))
    tl.store(scales + row * row_stride, scale)
    for start in range(0, N, groups.C):
        col = start + c
        values = values_of(x, row, col, col < N, stride, groups.INTERLEAVE)
        tl.store(out + row * N + col, (values / scale).to(out.dtype.element_ty), mask=col < N)


@jit(do_not_specialize=("rows", "row_stride", "group_stride"))
def quantize_rows(x, out, scales, rows, N, stride, row_stride, group_stride, groups):
    """out [rows, N] = x over its scales; x's rows are `stride` long. The scale of a row's (SHARED: of R rows') group is
    at row * row_stride + group * group_stride (row: of tiles); GIVEN: all are at `scales`."""
    R: tl.constexpr = groups.R
    C: tl.constexpr = groups.C
    GROUP: tl.constexpr = groups.GROUP
    tiles_n = 1 if groups.LOOPED else tl.cdiv(N, C)
    for t in range(tl.program_id(0), tl.cdiv(rows, R) * tiles_n, tl.num_programs(0)):
        if groups.LOOPED:
            quantize_long_row(x, out, scales, t, N, stride, row_stride, groups)
        else:
            row = (t // tiles_n * R + tl.arange(0, R)).to(tl.int64)[:, None]
            first = t % tiles_n * C
            col = first + tl.arange(0, C)[None, :]
            ok = (row < rows) & (col < N)
            values = values_of(x, row, col, ok, stride, groups.INTERLEAVE)
            if groups.GIVEN:
                values = tl.minimum(tl.maximum(values / tl.load(scales), -LARGEST), LARGEST)
            else:
                parts = tl.reshape(values, (R, C // GROUP, GROUP))
                largest = tl.max(tl.abs(parts), 2)
                group = first // GROUP + tl.arange(0, C // GROUP)[None, :]
                place = row * row_stride + group * group_stride
                there = (row < rows) & (group * GROUP < N)
                if groups.SHARED:
                    largest = tl.max(largest, 0, keep_dims=True)
                    place = (t // tiles_n).to(tl.int64) * row_stride + group * group_stride
                    there = group * GROUP < N
                scale = scale_of(largest)
                tl.store(scales + place, scale, mask=there)
                values = tl.reshape(parts / scale[:, :, None], (R, C))
            tl.store(out + row * N + col, values.to(out.dtype.element_ty), mask=ok)
