"""Several ranks run as processes on one GPU. Every operator works as on several GPUs, with a GPU's memory order, NCCL
and torch's symmetric memory, but not at the speed of several GPUs.

The GPU runs each process for a time slice in turn, so a spinning kernel uses up only its own slice and blocks no other
rank. NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). Therefore, up to NCCL 2.29, each rank
declares itself a separate host, and ranks communicate over a socket of the loopback device. From 2.30 on, NCCL has an
option that accepts such ranks. The processes map each other's symmetric memory as between GPUs.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import WeftError

log = logging.getLogger("weft")
VARIABLE = "WEFT_SHARE_GPU"


@dataclass(frozen=True)
class RankDevice:
    """The GPU of a rank. gpus: the UUIDs of all GPUs that are visible to the rank, in its order; index: its own GPU
    among them. reason: why the rank has no symmetric memory with any peers. may_share: whether WEFT_SHARE_GPU=1 is
    set."""

    host: str
    gpus: tuple[str, ...]
    index: int
    reason: str | None
    may_share: bool = False

    @property
    def gpu(self) -> tuple[str, str]:
        return self.host, self.gpus[self.index]


def may_share() -> bool:
    """Return whether WEFT_SHARE_GPU=1 is set. Raises ValueError for a value that is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r} must be 1, which lets ranks share a GPU, or 0")
    return value == "1"


def settings(rank: int) -> dict[str, str]:
    """Return the environment variables of a rank that shares its GPU. These variables disable multicast, which would
    bind one GPU to one object twice."""
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


def prepare() -> None:
    """Set those of these variables that are unset, if WEFT_SHARE_GPU=1 and this host has more ranks than GPUs. Set the
    loopback device only if all ranks are on this host. LOCAL_RANK becomes the number of the rank's GPU, because
    Transformers and most scripts use it as such. Raises WeftError if torch.distributed was initialised without the
    variables, because NCCL reads them once."""
    if not may_share():
        return
    started = dist.is_initialized()
    rank = dist.get_rank() if started else int(os.environ.get("RANK", "0"))
    ranks = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if local <= torch.cuda.device_count():
        return
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    needed = settings(rank)
    if local < ranks:
        del needed["NCCL_SOCKET_IFNAME"]
    missing = {name: value for name, value in needed.items() if name not in os.environ}
    if started and missing:
        variables = " ".join(f"{name}={value}" for name, value in missing.items())
        raise WeftError(
            f"rank {rank} shares its GPU, but torch.distributed started before weft could tell NCCL so: call "
            f"weft.init() first, or start the process with {variables}"
        )
    os.environ.update(missing)


def shared_gpus(devices: Sequence[RankDevice]) -> int:
    """Return the number of GPUs that these ranks share, or 0 if each rank has its own GPU."""
    gpus = len({device.gpu for device in devices})
    return gpus if gpus < len(devices) else 0


@functools.cache
def log_shared_gpus(ranks: int, gpus: int) -> None:
    """Log one line, once per process."""
    log.warning(
        f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)}, which take{'s' * (gpus == 1)} them in turn: for function, "
        "not for speed"
    )
