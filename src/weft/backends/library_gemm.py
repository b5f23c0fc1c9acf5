"""The GEMMs of libraries: cuBLAS, torch's grouped one, and quack's (CuTe DSL), if weft[quack] is installed.

quack's kernels for Hopper let two consumer warp groups alternate on the tensor cores ("ping-pong"), which is faster
than cuBLAS on many shapes and slower on some (docs/guide.md). The chooser therefore times them against cuBLAS, or
torch's grouped GEMM, at the first call of a size; the fastest with correct results runs from then on. Each rank decides
for itself, as results are equal up to rounding.

Products of 8-bit operands (`ScaledOperands`) are torch's, DeepGEMM's if it is installed, and weft's own, chosen in the
same way (ops/scaled_gemm.py).

quack's GEMM can also wait: before it loads rows of A it waits for a flag of their shard (`flag_gated`). If its results
are correct (`waits`), plan="auto" of all-gather + GEMM tries it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch

from .. import architectures
from ..chooser import Choice, Chooser, bucket
from ..scaled_tensor import SCALE_BLOCK, ScaledTensor, Scaling

GemmFunction = Callable[..., torch.Tensor]  # takes x, weight, out, and starts for a grouped GEMM; returns the result

OLDEST, BEFORE = (0, 6, 5), (0, 7)  # supported versions of quack-kernels: from OLDEST, before BEFORE
FASTER = 1.02  # quack is used if it is this many times as fast as cuBLAS, or torch's grouped GEMM
CLOSE = 2e-2  # largest relative error of a correct result of 16-bit operands


class Form(NamedTuple):
    """A configuration of quack's GEMM: tiles of tile_m x tile_n for each CTA, clusters of cluster_m CTAs."""

    tile_m: int
    tile_n: int
    cluster_m: int
    pingpong: bool


FORMS = (Form(128, 192, 2, True), Form(128, 160, 2, True), Form(128, 256, 2, False))


def installed() -> str | None:
    """Return the version of quack-kernels, or None."""
    try:
        return metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


@functools.cache
def lacks() -> str | None:
    """Return the reason why quack's GEMM is not used in this process, or None."""
    version = installed()
    if version is None:
        return "not installed (pip install weft[quack])"
    if not OLDEST <= numbers(version) < BEFORE:
        wanted = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, BEFORE))}"
        return f"quack-kernels {version} is not one of {wanted}, for which weft was written"
    if not torch.cuda.is_available() or not architectures.features(architectures.device_capability()).wgmma:
        return "its GEMM is used on Hopper GPUs alone"
    try:
        import quack.gemm  # noqa: F401
    except Exception as e:  # a library may raise anything if its dependencies do not suit it
        return f"quack-kernels {version} cannot be imported: {type(e).__name__}: {e}"
    return None


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out [M, N] = x [M, K] @ weight [N, K].T, on the current stream, by the fastest library for this size."""
    if not x.is_cuda or lacks() is not None:
        cublas(x, weight, out)
    else:
        fastest(cublas, x, weight, out)(x, weight, out)


def multiply_groups(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return [M, N], whose rows starts[g] to starts[g + 1] are those of x [M, K] @ weight[g] [N, K].T, on the current
    stream, by the fastest library for this size. starts: int32 [G + 1] on the device, rising from 0 to at most M; rows
    beyond are undefined. bfloat16, on a GPU, N and K multiples of 8."""
    if lacks() is not None:
        return torch_groups(x, weight, None, starts)
    out = x.new_empty(x.shape[0], weight.shape[1])
    return fastest(torch_groups, x, weight, out, starts)(x, weight, out, starts)


def cublas(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t(), out=out)


def torch_groups(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, starts: torch.Tensor) -> torch.Tensor:
    """Return torch's grouped GEMM, in new memory: torch takes no `out`."""
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=starts[1:])


@functools.cache
def quack_form(form: Form) -> GemmFunction:
    def run(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        from quack.gemm import gemm

        tile_m, tile_n, cluster_m, pingpong = form
        gemm(x, weight, out, None, None, tile_m, tile_n, cluster_m, 1, pingpong=pingpong, cu_seqlens_m=starts)
        return out

    return run


_steps_an_octave = 8  # in which calls share a trial


def one_trial_per_power_of_two() -> None:
    """Let all calls of this process with M up to the same power of two share a trial. Engines need it, whose batches
    have any number of tokens: with eight trials an octave, requests of the first minutes would wait for some of
    them."""
    global _steps_an_octave
    _steps_an_octave = 1


def stepped(m: int) -> int:
    """Return M rounded up to one of eight steps an octave, or to a power of two after `one_trial_per_power_of_two`."""
    return bucket(m, _steps_an_octave)


def fastest(
    library: GemmFunction, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *starts: torch.Tensor
) -> GemmFunction:
    """Return the fastest product for these operands. It is the library's for operands that are not contiguous or whose
    rows are not whole 16-byte words, and for a size first seen in a capture. weight: [N, K], or [G, N, K] for the
    groups of rows that begin at `starts`. Writes `out` many times if the size is measured."""
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
    """Return the library's product, and the forms of quack's GEMM with the same results."""
    try:
        expected = library(*operands).clone()
        return [library, *(product for product in map(quack_form, FORMS) if is_close(product, operands, expected))]
    except torch.OutOfMemoryError:
        return [library]


def is_close(product: GemmFunction, operands: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    """Return whether a product's rows are close to those of `expected` (CLOSE), for all rows that are in a group."""
    _, _, out, *starts = operands
    rows = int(starts[0][-1]) if starts else len(expected)
    try:
        out.zero_()
        product(*operands)
        error = (out[:rows].float() - expected[:rows].float()).norm() / expected[:rows].float().norm().clamp_min(1e-30)
        return bool(error < CLOSE)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # this version of the library lacks the form, or it does not take this shape
        return False


def flag_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    call: torch.Tensor,
    me: int,
    form: Form,
) -> None:
    """Compute out = x @ weight.T for x [M, K] of equal shards, one for each of `flags` (int32). Rows of shard s are
    loaded once flags[s] >= call (int32 [1] on the device), this rank's shard, `me`, before the next ones in ring order.
    The wait has no timeout, and every SM polls in no particular order: an operation that sets a flag must be ordered
    after the rows, need no SM, and run even if a peer fails (docs/protocol.md, "Flags of the copy engine")."""
    from quack.gemm import AllGatherArguments, gemm

    waiting = AllGatherArguments(flags, call, flags.numel(), me)
    tile_m, tile_n, cluster_m, pingpong = form
    gemm(x, weight, out, None, None, tile_m, tile_n, cluster_m, 1, pingpong=pingpong, ag_args=waiting)


@functools.cache
def waits(form: Form, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `flag_gated` computes correct results in this form, for a product whose flags are set. This
    compiles the kernel, which takes seconds if quack has not cached it."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the user's generator alone
    x, weight = (torch.randn(512, 256, device=device, generator=generator).to(dtype) for _ in range(2))
    out, call = torch.empty(512, 512, device=device, dtype=dtype), torch.ones(1, device=device, dtype=torch.int32)

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        flag_gated(x, weight, out, call.repeat(2), call, 0, form)
        return out

    return is_close(product, (x, weight, out), x @ weight.t())


# -- products of 8-bit operands ----------------------------------------------------------------------------------------


class ScaledOperands(NamedTuple):
    """The operands of a product: x [M, K], weight [N, K] and bias [N] or None. fast_accum: as use_fast_accum of
    torch._scaled_mm."""

    x: ScaledTensor
    weight: ScaledTensor
    bias: torch.Tensor | None
    fast_accum: bool

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.x.recipe, self.fast_accum)


ScaledProduct = Callable[[ScaledOperands, torch.Tensor], object]  # takes the operands and out [M, N]


def dequantized_product(o: ScaledOperands, out: torch.Tensor) -> None:
    """Multiply the float32 values, for CPU tensors."""
    y = o.x.dequantized() @ o.weight.dequantized(SCALE_BLOCK).t()
    out.copy_(y if o.bias is None else y + o.bias.float())


def torch_scaled(o: ScaledOperands, out: torch.Tensor) -> None:
    """Multiply by torch, which uses cuBLAS or CUTLASS."""
    x, weight = o.x.scales, o.weight.scales
    if o.x.recipe == "row":
        x, weight = x.view(-1, 1), weight.view(1, -1)
    torch._scaled_mm(
        o.x.values, o.weight.values.t(), x, weight, o.bias, out_dtype=out.dtype, use_fast_accum=o.fast_accum, out=out
    )


def torch_scaled_by_block(o: ScaledOperands, out: torch.Tensor) -> None:
    """Multiply by torch with cuBLAS of CUDA 12.9 or later. It takes x's scales column-major, and the weight's with a
    row stride of whole 16-byte words. `torch.nn.functional.scaled_mm` always returns new memory; the operator beneath
    it writes `out`, without a copy of the result."""
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
    """Multiply by DeepGEMM, if sgl-deep-gemm is installed. It compiles a kernel at the first use of each size."""
    import deep_gemm

    deep_gemm.fp8_gemm_nt(o.x[:2], o.weight[:2], out)
    if o.bias is not None:
        out.add_(o.bias)


@functools.cache
def scaled_products(scaling: Scaling) -> dict[str, ScaledProduct]:
    """Return the libraries' products with such scales, by name. One that cannot run here is dropped when it is tried
    (`correct_names`)."""
    if not scaling.by_block:
        return {"torch": torch_scaled}
    products: dict[str, ScaledProduct] = {}
    if hasattr(torch.nn.functional, "scaled_mm") and hasattr(torch.ops.aten._scaled_mm_v2, "out"):
        products["torch"] = torch_scaled_by_block
    if find_spec("deep_gemm") is not None:
        products["deep_gemm"] = deep_gemm_by_block
    return products


def correct_names(products: Mapping[str, Callable[[], object]], out: torch.Tensor) -> list[str]:
    """Return the names of those functions, which write `out`, whose results are close to those of the function listed
    before all others."""
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
