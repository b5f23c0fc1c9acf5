"""What GPUs of one compute capability offer a kernel, as far as weft decides by it. A capability is ten times what
NVIDIA calls it: 89 for compute capability 8.9."""

from __future__ import annotations

import re

import torch

from .errors import WeftError

AMPERE, ADA, HOPPER = 80, 89, 90
EARLIEST = AMPERE  # mma.sync of bfloat16, cp.async, and waits that release no SM but poll (nanosleep)
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that a program may have, by capability."""


def of(device: torch.device | None = None) -> int:
    """The capability that kernels for this GPU are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def capability_of(target: str) -> int:
    """90 for "sm_90a", "90" or "9.0". Raises WeftError for any that LLVM may not know, which ends the process."""
    found = re.fullmatch(r"(?:sm_)?(\d{1,2})\.?(\d)[af]?", target)
    capability = int(found[1] + found[2]) if found else 0
    if capability not in SHARED_KIB:
        raise WeftError(f"{target}: no GPU that weft compiles for: {', '.join(f'sm_{each}' for each in SHARED_KIB)}")
    return capability


def spoken(capability: int) -> str:
    """NVIDIA's notation of a capability: "8.9" for 89."""
    return f"{capability // 10}.{capability % 10}"


def lacks(capability: int, least: int, what: str) -> str | None:
    """Why `what`, a plural, cannot run on such a GPU: the capability that it needs; None where it can."""
    if capability >= least:
        return None
    return f"{what} need compute capability {spoken(least)}, and this GPU has {spoken(capability)}"


def shared_kib(capability: int) -> int:
    """KiB of shared memory that a program may have; for a capability not in SHARED_KIB, the least of those known."""
    return SHARED_KIB.get(capability, min(SHARED_KIB.values()))
