"""`weft.spmd(backend="cuda")` and `"shared"` without a launcher: a spawned process for each rank, results through a
queue."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.multiprocessing as mp

from .shared_gpu import VARIABLE

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from ..world import World

R = TypeVar("R")


def _rank_main(
    rank: int,
    init: Callable[[], World],
    fn: Callable[[World], object],
    environment: dict[str, str],
    queue: Queue[tuple[int, bytes]],
) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    world = init()
    queue.put((rank, packed(fn(world), world)))
    world.exchange("done")
    torch.distributed.destroy_process_group()


def packed(result: object, world: World) -> bytes:
    """A rank's result by value, and made here, where what cannot be sent raises: a queue would send handles of this
    process's memory. Raises Timeout where a wait of what made it has expired."""
    world.synchronize()
    file = io.BytesIO()
    torch.save(result, file)
    return file.getvalue()


def unpacked(sent: bytes) -> Any:
    """Tensors on the CPU: the GPU that they were on is another process's."""
    return torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)


def spmd(init: Callable[[], World], fn: Callable[[World], R], size: int, share: bool) -> list[R]:
    """init makes a rank's World. Both functions must be importable by name (of a module), and the result one that
    `torch.save` takes; tensors come back on the CPU. share: ranks may share GPUs. A failing rank ends the others and is
    raised here. Raises ValueError for fewer GPUs than that takes."""
    gpus, needed = torch.cuda.device_count(), 1 if share else size
    if gpus < needed:
        others = 'without any: backend="emulated"' if not gpus else 'to share: backend="shared"'
        raise ValueError(f"{size} ranks need {needed} GPU{'s' * (needed > 1)}; this machine has {gpus} ({others})")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = dict(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    environment[VARIABLE] = str(int(share))
    context = mp.get_context("spawn")
    queue = context.Queue()
    running = mp.start_processes(
        _rank_main, (init, fn, environment, queue), nprocs=size, join=False, start_method="spawn"
    )
    results: dict[int, R] = {}
    ended = False
    while len(results) < size:
        try:
            rank, value = queue.get(timeout=0.2)
            results[rank] = unpacked(value)
        except Empty:
            if ended:
                missing = sorted(set(range(size)) - set(results))
                raise RuntimeError(f"ranks {missing} ended without a result") from None
            ended = running.join(timeout=0)  # raises what a rank raised, after ending the others
    while not running.join():
        pass
    return [results[r] for r in range(size)]
