"""The description of one call of all-reduce, with or without a norm, and its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import triton.language as tl

from ...backends.base import SymmetricTensor
from ...lang.jit import constants
from ...op import Call
from ...transport.low_latency import VECTOR
from ...world import World
from .kernels import ABSENT, LAYER, PLAIN, RMS, Norm

NORM, PLAIN_SUM = "all_reduce_rms_norm", "all_reduce"
SUMMED_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
OUTPUTS = {**SUMMED_DTYPES, torch.float8_e4m3fn: tl.float8e4nv}
NORMS = {"rms": RMS, "layer": LAYER}

Symmetric = SymmetricTensor | None


@dataclass(frozen=True)
class SumCall(Call):
    """A checked call of `op`. `m` and `h` are M and H, and `norm` is a constant in kernels.py. `residual` describes the
    residual, and `keep` the sum that is returned: ABSENT, OWN (this rank's rows) or WHOLE. If `scaled` is set, the
    result is divided by a scale, which is an operand. `group` elements of a row share a returned scale; 0 means that no
    scales are returned. With `pairs`, which a batch-invariant World sets, the norm sums a row by `sum_in_pairs` and
    rounds its products. `shape` is the shape of a tensor that is summed as this matrix, or () for a matrix that is
    normalised."""

    op: str
    m: int
    h: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    norm: int
    eps: float
    residual: int
    keep: int
    bias: bool
    scaled: bool
    group: int = 0
    pairs: bool = False
    shape: tuple[int, ...] = field(default=(), repr=False)

    @property
    def scales(self) -> tuple[int, int]:
        """Return the shape of the scales in the result."""
        return self.m, self.h // self.group if self.group else 0

    @property
    def rows(self) -> int:
        return self.m

    @property
    def padded(self) -> int:
        """Return P, which is H rounded up to a power of two."""
        return 1 << (self.h - 1).bit_length()

    @property
    def computed(self) -> Norm:
        """Return the call's sizes, dtypes and options, as an argument of kernels."""
        sizes = constants(
            Norm,
            eps=0.0,
            DTYPE=SUMMED_DTYPES[self.dtype],
            OUT=OUTPUTS[self.out_dtype],
            H=self.h,
            P=self.padded,
            NORM=self.norm,
            BIAS=self.bias,
            SCALED=self.scaled,
            RESIDUAL=self.residual,
            KEEP=self.keep,
            GROUP=self.padded if self.group == self.h else self.group,
            PAIRS=self.pairs,
        )
        return sizes._replace(eps=self.eps)

    def options(self, warps: int, per_sm: int = 1) -> dict[str, int]:
        """Return the launch options. `warps` is adjusted so that each thread processes from 16 to 256 bytes of a row.
        The register limit lets per_sm programs share all registers of an SM. With a lower limit, ptxas would spill some
        words to make room for one more program."""
        row = self.padded * self.dtype.itemsize
        warps = max(1, min(max(warps, row // 8192), row // 512))
        registers = min(255, 65536 // (32 * warps * per_sm))
        return dict(num_warps=warps, maxnreg=registers, enable_fp_fusion=not self.pairs)


class NormOperands(NamedTuple):
    """The operands. kept: contiguous memory for the sum with the residual, which overlaps no other operand; None
    (always so in calls with a gradient or under torch.compile): the call allocates it."""

    x: torch.Tensor
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    kept: torch.Tensor | None = None


class SumOperands(NamedTuple):
    x: torch.Tensor


@dataclass
class Tensors:
    """A call's operands, and the tensors for its results: out, kept (the sum with the residual) and scales. If x and
    out are in symmetric memory, x_shared and out_shared are x and out on every rank."""

    x: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    x_shared: Symmetric = None
    out_shared: Symmetric = None

    OPTIONAL: ClassVar = ("residual", "new_residual", "weight", "bias", "scale")  # a kernel's optional arguments

    def as_matrices(self, world: World, call: SumCall, shares_x: bool) -> Tensors:
        """Return the tensors with x and out as matrices. If they are in symmetric memory, the result also
        contains every rank's out, and with `shares_x` every rank's x."""
        x, out = self.x, self.out
        if call.op == PLAIN_SUM:
            x, out = x.view(call.m, call.h), out.view(call.m, call.h)
        shared_x, shared_out = world.shared(x) if shares_x else None, world.shared(out)
        on_ranks = shared_x and shared_x[0], shared_out and shared_out[0]
        return Tensors(x, out, self.residual, self.weight, self.bias, self.scale, self.kept, self.scales, *on_ranks)

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the kernels' optional arguments by name. An argument that would be None is replaced by x."""
        scale = self.scale if self.scales is None else self.scales
        tensors = self.residual, self.kept, self.weight, self.bias, scale
        return {name: self.x if t is None else t for name, t in zip(self.OPTIONAL, tensors, strict=True)}


def sum_call(world: World, shape: Sequence[int], dtype: torch.dtype) -> SumCall:
    """Return the call that sums a tensor of any shape over ranks. The call treats the tensor as a matrix of rows."""
    n = math.prod(shape)
    columns = _columns(world, n, shape[-1] if shape else 1, dtype.itemsize)
    rows, none = n // columns if columns else 0, ABSENT.value
    fields = rows, columns, dtype, dtype, PLAIN.value, 0.0, none, none, False, False
    return SumCall(PLAIN_SUM, *fields, pairs=world.batch_invariant, shape=tuple(shape))


def _columns(world: World, n: int, last: int, itemsize: int) -> int:
    """Return the number of columns of the matrix for n elements, where `last` is the size of the last dimension. If
    possible, rows consist of whole 16-byte words. Rows have about 1,024 elements, or up to 8,192 if there are still two
    rows per SM. A kernel is compiled for each number of columns, so the function returns one of only a few numbers for
    most sizes."""
    vector, columns = VECTOR // itemsize, 0
    for columns in (last, n & -n):
        for f in (2, 3, 5, 7):
            while columns % (f * vector) == 0 and (
                columns > 8192 or (columns > 1024 and n // columns < 2 * world.sm_count)
            ):
                columns //= f
        while 0 < columns < 512 and n // columns % 2 == 0:
            columns *= 2
        if columns <= 8192 and columns % vector == 0:
            break
    return columns
