"""Switches that tests set for the rest of a process: they treat this GPU as an older one, and the link between ranks as
a less capable one.

as_gpu(80)           kernels are compiled for sm_80 (mma.sync, cp.async, no TMA), and their PTX is assembled for this
                     machine's GPU, since newer GPUs can run it. A program has as much shared memory as on sm_80. Call
                     this before the first World.
without("peers")     no rank can address a peer's memory, as over PCIe without peer access: an allocation of symmetric
                     memory fails
without("atomics")   ranks can load from and store to peers' memory, but cannot use atomics on it, as over PCIe
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler

from weft import architectures
from weft.backends.cuda import CudaBackend


def as_gpu(capability: int, target: int | None = None) -> None:
    """`target` is the capability of this machine's GPU, by default the one that torch reports."""
    if target is None:
        major, minor = torch.cuda.get_device_capability()
        target = 10 * major + minor
        driver: Any = triton.runtime.driver.active
        driver.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        compiler.max_shared_mem = lambda device: architectures.FEATURES[capability].shared_kib << 10
        architectures.device_capability = lambda device=None: capability
    # Kernels compiled for an older GPU need a separate cache: their key contains the older GPU, which could not run
    # them.
    folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    triton.knobs.cache.dir = str(folder / f"sm_{capability}_on_sm_{target}")
    assemble = CUDABackend.make_cubin

    def make_cubin(backend: Any, source: Any, metadata: Any, options: Any, _: int) -> Any:
        return assemble(backend, source, metadata, options, target)

    CUDABackend.make_cubin = make_cubin


def without(hidden: str) -> None:
    reasons = {
        "peers": "the tests hide the peers' memory",
        "atomics": "the tests hide atomics in the peers' memory",
    }
    reason, compare = reasons[hidden], CudaBackend._compare_devices

    def compare_devices(backend: CudaBackend) -> None:
        compare(backend)
        backend.symmetric_unsupported = reason
        if hidden == "peers":
            backend.peers_unsupported = reason

    def symmetric(*_: object) -> None:
        raise AssertionError("symmetric memory was asked for in a World without peer access")

    CudaBackend._compare_devices = compare_devices  # type: ignore[method-assign]
    if hidden == "peers":
        CudaBackend.symmetric = symmetric  # type: ignore[assignment,method-assign]
