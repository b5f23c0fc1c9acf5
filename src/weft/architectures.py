"""The properties of GPUs of one compute capability that weft decides by. A capability is the compute capability times
ten: 89 for NVIDIA's 8.9."""

from __future__ import annotations

import re

import torch

from .errors import WeftError

AMPERE, ADA, HOPPER = 80, 89, 90
EARLIEST = AMPERE  # the first with mma.sync of bfloat16 and cp.async
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that a program may have, by capability."""


def device_capability(device: torch.device | None = None) -> int:
    """Return the capability that kernels for this GPU are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability_of(target: str) -> int:
    """Return the capability as a number: 90 for "sm_90a", "90" or "9.0". Raises WeftError for a target that LLVM may
    not know, which ends the process."""
    match = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", target)
    capability = int(match[1] + match[2]) if match else 0
    if capability not in SHARED_KIB:
        raise WeftError(f"{target}: no GPU that weft compiles for: {', '.join(f'sm_{known}' for known in SHARED_KIB)}")
    return capability


def dotted(capability: int) -> str:
    """Return NVIDIA's notation of a capability: "8.9" for 89."""
    return f"{capability // 10}.{capability % 10}"


def lacks(capability: int, least: int, feature: str) -> str | None:
    """Return why `feature`, a plural, cannot run on a GPU of that capability; None where it can."""
    if capability >= least:
        return None
    return f"{feature} need compute capability {dotted(least)}, and this GPU has {dotted(capability)}"


def shared_kib(capability: int) -> int:
    """Return the KiB of shared memory that a program may have; for a capability that is not in SHARED_KIB, the least of
    those known."""
    return SHARED_KIB.get(capability, min(SHARED_KIB.values()))
