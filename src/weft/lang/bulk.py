"""Bulk (TMA) copies: whether the GPU has them, and a fence between bulk and ordinary accesses, which Triton lacks."""

import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from ..architectures import features
from .jit import Intrinsic


def _target_features():
    """Return the features of the GPU that Triton compiles for, or None if Triton has no target."""
    target = current_target()
    return None if target is None else features(target.arch)


_target_features.__triton_builtin__ = True  # Triton calls the function while it compiles


@constexpr_function
def bulk_copies():
    """Return whether the target GPU has bulk (TMA) copies, which use a separate proxy. For a GPU without them Triton
    turns accesses through a descriptor into ordinary accesses, which need neither the wait for bulk stores nor a proxy
    fence: the next block barrier covers them."""
    gpu = _target_features()
    return gpu is not None and gpu.tma


@Intrinsic
def bulk_fence():
    """Order this program's earlier ordinary accesses before its later bulk (TMA) accesses of the same memory."""
    if bulk_copies():
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
