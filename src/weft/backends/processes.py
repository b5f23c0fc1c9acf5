"""`weft.spmd` without a launcher: each rank is a spawned process that sends its result through a queue."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from queue import Empty
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.multiprocessing as mp

from .shared_gpu import VARIABLE

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

R = TypeVar("R")


class RankWorld(Protocol):
    """The part of the interface of a World that a rank's process uses."""

    def synchronize(self) -> None: ...

    def exchange(self, value: str, /) -> Sequence[str]: ...


def _rank_main(
    rank: int,
    init: Callable[[], RankWorld],
    fn: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    environment: dict[str, str],
    queue: Queue[tuple[int, bytes]],
) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    world = init()
    queue.put((rank, packed(fn(world, *args, **kwargs), world)))
    world.exchange("done")
    torch.distributed.destroy_process_group()
    leave(queue)


def leave(queue: Queue[tuple[int, bytes]]) -> None:
    """End this process, once its result has been sent, without Python's finalization. During finalization, a gloo
    thread that still holds a tensor would wait for the interpreter's lock and abort the process
    (pytorch/pytorch#179291)."""
    queue.close()
    queue.join_thread()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def packed(result: object, world: RankWorld) -> bytes:
    """Return a rank's result as bytes. A queue would instead send handles of this process's memory, and would not raise
    an error here for an object that cannot be sent. Raises Timeout if a wait of the rank has expired."""
    world.synchronize()
    file = io.BytesIO()
    torch.save(result, file)
    return file.getvalue()


def unpacked(sent: bytes) -> Any:
    """Return the result with its tensors on the CPU, because their GPU memory belonged to another process."""
    return torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)


def check_gpus(size: int, share: bool) -> None:
    """Raise ValueError if there are fewer GPUs than these ranks need. share: ranks may share GPUs."""
    gpus, needed = torch.cuda.device_count(), 1 if share else size
    if gpus < needed:
        others = 'without any: backend="emulated" or "gloo"' if not gpus else 'to share: backend="shared"'
        raise ValueError(f"{size} ranks need {needed} GPU{'s' * (needed > 1)}; this machine has {gpus} ({others})")


def spmd(
    init: Callable[[], RankWorld],
    fn: Callable[..., R],
    size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    share: bool,
) -> list[R]:
    """Run `fn` as `size` spawned ranks, and return the results by rank.

    init makes a rank's World. Both functions must be importable by name from a module, the arguments must be picklable,
    and `torch.save` must support the result, whose tensors return on the CPU. share: ranks may share GPUs. An exception
    in one rank ends the other ranks and is raised here.
    """
    # This process opens the store through which ranks find each other, so that no other process can use its port first.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = dict(
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # this process, not rank 0, owns the store; torchrun sets this too
        TORCHELASTIC_RESTART_COUNT="0",
    )
    environment[VARIABLE] = str(int(share))
    context = mp.get_context("spawn")
    queue = context.Queue()
    running = mp.start_processes(
        _rank_main, (init, fn, args, kwargs, environment, queue), nprocs=size, join=False, start_method="spawn"
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
            ended = running.join(timeout=0)  # ends the other ranks and raises an error if a rank has raised one
    while not running.join():
        pass
    return [results[r] for r in range(size)]
