"""The GEMM libraries: cuBLAS, torch's grouped GEMM, and quack's kernels (integrations/quack.py).

At the first call of a size, the chooser times quack's kernels against cuBLAS, or against torch's grouped GEMM. Later
calls run the fastest one with correct results. Each rank decides for itself, because results are equal up to rounding.

For 8-bit operands (`ScaledOperands`), the chooser selects in the same way among torch's GEMM, DeepGEMM's if it is
installed, and weft's own (ops/scaled_gemm.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch

from ..chooser import Choice, Chooser, bucket
from ..scaled_tensor import SCALE_BLOCK, ScaledTensor, Scaling

GemmFunction = Callable[..., torch.Tensor]  # the arguments are x, weight, out, and starts for a grouped GEMM

FASTER = 1.02  # quack is used if it is this many times as fast as cuBLAS or torch's grouped GEMM
CLOSE = 2e-2  # the largest relative error of a correct result with 16-bit operands


class Form(NamedTuple):
    """A configuration of quack's GEMM: tiles of tile_m x tile_n for each CTA, clusters of cluster_m CTAs."""

    tile_m: int
    tile_n: int
    cluster_m: int
    pingpong: bool


@functools.cache
def quack() -> ModuleType:
    """Import integrations/quack.py on first use, and return the module."""
    from ..integrations import quack

    return quack


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute out [M, N] = x [M, K] @ weight [N, K].T + bias on the current stream, using the fastest library for this
    size, or cuBLAS if there is a bias."""
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif not x.is_cuda or quack().lacks() is not None:
        cublas(x, weight, out)
    else:
        fastest(cublas, x, weight, out)(x, weight, out)


def multiply_groups(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return [M, N], on the current stream, using the fastest library for this size. Rows starts[g] to starts[g + 1]
    equal the same rows of x [M, K] @ weight[g] [N, K].T. starts: int32 [G + 1] on the device, ascending from 0 to at
    most M; rows after the last start are undefined. Requires bfloat16 on a GPU, and N and K that are multiples of 8."""
    if quack().lacks() is not None:
        return torch_groups(x, weight, None, starts)
    out = x.new_empty(x.shape[0], weight.shape[1])
    return fastest(torch_groups, x, weight, out, starts)(x, weight, out, starts)


def cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t(), out=out)


def torch_groups(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, starts: torch.Tensor) -> torch.Tensor:
    """Return the result of torch's grouped GEMM, in new memory, because torch's function has no `out`."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=starts[1:])


_steps_an_octave = 8  # calls whose M is rounded to the same step share a trial


def one_trial_per_power_of_two() -> None:
    """Let all calls of this process whose M is rounded up to the same power of two share a trial. Engines need this,
    because their batches contain any number of tokens: with eight trials an octave, requests in the first minutes would
    wait for trials."""
    global _steps_an_octave
    _steps_an_octave = 1


def stepped(m: int) -> int:
    """Return M rounded up to one of eight steps an octave, or to a power of two after `one_trial_per_power_of_two`."""
    return bucket(m, _steps_an_octave)


def rows_ratio() -> float:
    """Return the ratio of the largest to the smallest M among the calls that share a trial."""
    return 1 + 1 / _steps_an_octave


def fastest(
    library: GemmFunction, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *starts: torch.Tensor
) -> GemmFunction:
    """Return the fastest GEMM for these operands. The GEMM is cuBLAS's, or torch's grouped GEMM, if operands are not
    contiguous, if their rows are not whole 16-byte words, or if the size is first used in a capture. weight: [N, K], or
    [G, N, K] for the groups of rows that begin at `starts`. The trial of a size writes `out` many times."""
    plain = x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    if not plain or x.shape[0] == 0 or x.shape[1] % 8 or weight.shape[-2] % 8:
        return library
    key = library, stepped(x.shape[0]), *weight.shape, x.dtype, x.device
    operands = (x, weight, out, *starts)
    known = Chooser.alone.trials.get(key)
    if known is not None:
        return known.chosen("graph")
    choice = Choice(
        key,
        expected=lambda mode: library,
        candidates=lambda: correct_products(library, operands),
        run=lambda product: product(*operands),
        worth=FASTER,
    )
    return Chooser.alone.choose(choice)


def correct_products(library: GemmFunction, operands: Sequence[torch.Tensor]) -> list[GemmFunction]:
    """Return the GEMM of cuBLAS, or torch's grouped GEMM, and the forms of quack's GEMM whose results are close to its
    result."""
    try:
        expected = library(*operands).clone()
        return [library, *(product for product in quack().products() if is_close(product, operands, expected))]
    except torch.OutOfMemoryError:
        return [library]


def is_close(product: GemmFunction, operands: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    """Return whether the rows of a result are close to the rows of `expected` (CLOSE), for all rows that belong to a
    group."""
    _, _, out, *starts = operands
    rows = int(starts[0][-1]) if starts else len(expected)
    try:
        out.zero_()
        product(*operands)
        error = (out[:rows].float() - expected[:rows].float()).norm() / expected[:rows].float().norm().clamp_min(1e-30)
        return bool(error < CLOSE)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # this version of the library lacks the form, or the form does not support this shape
        return False


# -- products of 8-bit operands ----------------------------------------------------------------------------------------


class ScaledOperands(NamedTuple):
    """The operands of a GEMM: x [M, K], weight [N, K] and bias [N] or None. fast_accum: the same as use_fast_accum in
    torch._scaled_mm."""

    x: ScaledTensor
    weight: ScaledTensor
    bias: torch.Tensor | None
    fast_accum: bool

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.x.recipe, self.fast_accum)


ScaledProduct = Callable[[ScaledOperands, torch.Tensor], object]  # a function of the operands and out [M, N]


def dequantized_product(o: ScaledOperands, out: torch.Tensor) -> None:
    """Compute the GEMM of the float32 values, for CPU tensors."""
    y = o.x.dequantized() @ o.weight.dequantized(SCALE_BLOCK).t()
    out.copy_(y if o.bias is None else y + o.bias.float())


def torch_scaled(o: ScaledOperands, out: torch.Tensor) -> None:
    """Compute the GEMM with torch, which uses cuBLAS or CUTLASS."""
    x, weight = o.x.scales, o.weight.scales
    if o.x.recipe == "row":
        x, weight = x.view(-1, 1), weight.view(1, -1)
    torch._scaled_mm(
        o.x.values, o.weight.values.t(), x, weight, o.bias, out_dtype=out.dtype, use_fast_accum=o.fast_accum, out=out
    )


def torch_scaled_by_block(o: ScaledOperands, out: torch.Tensor) -> None:
    """Compute the GEMM with torch and cuBLAS of CUDA 12.9 or later. cuBLAS requires the scales of x in column-major
    order, and the weight's scales with a row stride of whole 16-byte words. `torch.nn.functional.scaled_mm` always
    returns new memory. The operator that it calls writes to `out`, which saves a copy of the result."""
    from torch.nn.functional import ScalingType

    x, weight = [o.x.scales.t().contiguous().t()], o.weight.scales
    missing = -weight.shape[1] % 4
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))[:, :-missing]
    by_x, by_weight = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]
    multiply = torch.ops.aten._scaled_mm_v2.out
    multiply(o.x.values, o.weight.values.t(), x, by_x, [], [weight.t()], by_weight, [], None, out.dtype, out=out)
    if o.bias is not None:
        out.add_(o.bias)


def deep_gemm_by_block(o: ScaledOperands, out: torch.Tensor) -> None:
    """Compute the GEMM with DeepGEMM, if sgl-deep-gemm is installed. DeepGEMM compiles a kernel at the first use of
    each size."""
    import deep_gemm

    deep_gemm.fp8_gemm_nt(o.x[:2], o.weight[:2], out)
    if o.bias is not None:
        out.add_(o.bias)


@functools.cache
def scaled_products(scaling: Scaling) -> dict[str, ScaledProduct]:
    """Return the libraries' GEMMs with this scaling, by name. `correct_names` drops a GEMM that cannot run here."""
    if not scaling.by_block:
        return {"torch": torch_scaled}
    products: dict[str, ScaledProduct] = {}
    if hasattr(torch.nn.functional, "scaled_mm") and hasattr(torch.ops.aten._scaled_mm_v2, "out"):
        products["torch"] = torch_scaled_by_block
    if find_spec("deep_gemm") is not None:
        products["deep_gemm"] = deep_gemm_by_block
    return products


def correct_names(products: Mapping[str, Callable[[], object]], out: torch.Tensor) -> list[str]:
    """Return the names of the functions whose results are close to the first function's result. Each function writes
    its result to `out`."""
    trusted, *others = products
    try:
        products[trusted]()
        expected = out.clone()
        return [
            trusted,
            *(name for name in others if is_close(lambda *_, run=products[name]: run(), (out, out, out), expected)),
        ]
    except torch.OutOfMemoryError:
        return [trusted]
