"""The properties of GPUs on which weft's decisions depend, by compute capability. weft writes a compute capability as
an integer, ten times NVIDIA's number: 89 for 8.9."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from .errors import WeftError

AMPERE, HOPPER = 80, 90


@dataclass(frozen=True)
class Features:
    """The features on which weft's decisions depend, for the GPUs of one compute capability.

    shared_kib: the maximum shared memory of a program, in KiB. bf16: mma.sync of bfloat16, and cp.async. e4m3: GEMM
    operands and results in float8_e4m3fn. tma: bulk copies by tensor descriptors. multicast: addresses that refer to
    the memory of all ranks at once. mma: the instruction of the tensor cores. For checks of compiled kernels, gpus:
    names of such GPUs; threads: the largest number of threads on an SM; nvlink: whether ranks have NVLink, and
    therefore atomics in peers' memory.
    """

    gpus: str
    shared_kib: int
    threads: int = 1536
    nvlink: bool = False
    bf16: bool = True
    e4m3: bool = False
    tma: bool = False
    multicast: bool = False
    mma: str = "mma.sync"

    @property
    def wgmma(self) -> bool:
        """Return whether the tensor cores are Hopper's; the tiles and plans of "auto" were measured on Hopper."""
        return self.mma == "wgmma.mma_async"


B200 = Features("B200", 227, threads=2048, nvlink=True, e4m3=True, tma=True, multicast=True, mma="tcgen05.mma")
RTX_5090 = Features("RTX 5090, RTX PRO 6000", 99, e4m3=True, tma=True, multicast=True)
# CUDA C++ Programming Guide, "Technical specifications per compute capability".
FEATURES = {
    80: Features("A100, A800", 163, threads=2048, nvlink=True),
    86: Features("A40, A6000, RTX 3090", 99),  # some of these GPUs are connected in pairs by NVLink
    89: Features("L40S, RTX 4090", 99, e4m3=True),
    90: replace(B200, gpus="H100, H200", mma="wgmma.mma_async"),
    100: B200,
    103: replace(B200, gpus="B300"),
    120: RTX_5090,
    121: replace(RTX_5090, gpus="DGX Spark"),
}


def features(capability: int) -> Features:
    """Return the features of a GPU of this capability. For a capability that is not in FEATURES, return the features of
    the next older one, with the smallest shared memory of all entries."""
    if capability in FEATURES:
        return FEATURES[capability]
    least = min(known.shared_kib for known in FEATURES.values())
    older = [known for known in FEATURES if known < capability]
    return replace(FEATURES[max(older)], shared_kib=least) if older else Features("", least, bf16=False)


def device_capability(device: torch.device | None = None) -> int:
    """Return the capability for which kernels for this GPU are compiled."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability_of(target: str) -> int:
    """Return the capability as a number: 90 for "sm_90a", "90" or "9.0". Raises WeftError for a target that LLVM may
    not support, because LLVM would end the process."""
    match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", target)
    capability = int(match[1] + match[2]) if match else 0
    if capability not in FEATURES:
        raise WeftError(f"{target}: no GPU that weft compiles for: {', '.join(f'sm_{known}' for known in FEATURES)}")
    return capability


def dotted(capability: int) -> str:
    """Return NVIDIA's notation of a capability: "8.9" for 89."""
    return f"{capability // 10}.{capability % 10}"


def lacks(capability: int, feature: str, subject: str) -> str | None:
    """Return the reason why `subject` (a plural noun) cannot run on a GPU of that capability; None if the GPU has the
    feature."""
    if getattr(features(capability), feature):
        return None
    least = min(known for known, can in FEATURES.items() if getattr(can, feature))
    return f"{subject} need compute capability {dotted(least)}, and this GPU has {dotted(capability)}"
