"""Bulk (TMA) copies: a test whether the GPU supports them, and a fence between bulk and ordinary accesses, which Triton
lacks."""

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from ..architectures import features
from .jit import Intrinsic


def _target_features():
    """Return the features of Triton's target GPU, or None if Triton has no target."""
    target = current_target()
    return None if target is None else features(target.arch)


_target_features.__triton_builtin__ = True  # Triton calls this function during compilation


@constexpr_function
def bulk_copies():
    """Return whether the target GPU has bulk (TMA) copies, which use a separate proxy. For a GPU without bulk copies,
    Triton converts accesses through a descriptor into ordinary accesses. The next block barrier orders ordinary
    accesses, so they need neither a wait for bulk stores nor a proxy fence."""
    gpu = _target_features()
    return gpu is not None and gpu.tma


@Intrinsic
def bulk_fence():
    """Order ordinary accesses of this program before its later bulk (TMA) accesses to the same memory."""
    if bulk_copies():
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
