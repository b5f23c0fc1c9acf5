"""quack's GEMM (CuTe DSL), if weft[quack] is installed.

In quack's kernels for Hopper, two consumer warp groups alternate on the tensor cores ("ping-pong"). The kernels are
faster than cuBLAS on many shapes and slower on some (docs/guide.md), so weft times both libraries for each shape
(backends/library_gemm.py).

quack's GEMM can also wait for flags: before it loads rows of A, it waits for the flag of the shard that contains them
(`flag_gated`). If the results of this GEMM are correct (`waits`), plan="auto" of all-gather + GEMM also times this
GEMM.
"""

from __future__ import annotations

import functools

import torch

from .. import architectures
from ..backends.library_gemm import Form, GemmFunction, is_close
from . import installed_version

OLDEST, BEFORE = (0, 6, 5), (0, 7)  # the supported quack-kernels: from OLDEST up to, but not including, BEFORE
FORMS = (Form(128, 192, 2, True), Form(128, 160, 2, True), Form(128, 256, 2, False))


def installed() -> str | None:
    """Return the version of quack-kernels, or None."""
    return installed_version("quack-kernels")


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
    """Return the reason why this process cannot use quack's GEMM, or None if it can."""
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
    except Exception as e:  # quack may raise any exception if its dependencies have wrong versions
        return f"quack-kernels {version} cannot be imported: {type(e).__name__}: {e}"
    return None


@functools.cache
def product(form: Form) -> GemmFunction:
    def run(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        from quack.gemm import gemm

        tile_m, tile_n, cluster_m, pingpong = form
        gemm(x, weight, out, None, None, tile_m, tile_n, cluster_m, 1, pingpong=pingpong, cu_seqlens_m=starts)
        return out

    return run


def products() -> list[GemmFunction]:
    """Return all forms of the GEMM. Each form has the arguments x, weight and out; a grouped GEMM also has starts."""
    return [product(form) for form in FORMS]


def flag_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    flags: torch.Tensor,
    call: torch.Tensor,
    me: int,
    form: Form,
) -> None:
    """Compute out = x @ weight.T, where x [M, K] consists of equal shards, one for each of `flags` (int32). The GEMM
    loads rows of shard s once flags[s] >= `call`, an int32 [1] on the device. It starts with this rank's shard, `me`,
    and continues in ring order. The wait has no timeout, and the SMs poll in no particular order. So the operation that
    sets a flag must be ordered after the copy of the rows, must need no SM, and must run even if a peer fails
    (docs/protocol.md, "Flags of the copy engine")."""
    from quack.gemm import AllGatherArguments, gemm

    waiting = AllGatherArguments(flags, call, flags.numel(), me)
    tile_m, tile_n, cluster_m, pingpong = form
    gemm(x, weight, out, None, None, tile_m, tile_n, cluster_m, 1, pingpong=pingpong, ag_args=waiting)


@functools.cache
def waits(form: Form, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `flag_gated` computes correct results in this form, when the flags are already set. The check
    compiles the kernel, which takes seconds unless quack has cached the compiled kernel."""
    generator = torch.Generator(device).manual_seed(0)  # a separate generator leaves the user's generator unchanged
    x, weight = (torch.randn(512, 256, device=device, generator=generator).to(dtype) for _ in range(2))
    out, call = torch.empty(512, 512, device=device, dtype=dtype), torch.ones(1, device=device, dtype=torch.int32)

    def gated_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        flag_gated(x, weight, out, call.repeat(2), call, 0, form)
        return out

    return is_close(gated_product, (x, weight, out), x @ weight.t())
