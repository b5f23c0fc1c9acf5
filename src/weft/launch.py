"""`init` creates the World of this process's ranks, and `spmd` runs one function as N ranks of any backend."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from .world import World

R = TypeVar("R")


def init(group: ProcessGroup | None = None, *, check: bool | None = None, batch_invariant: bool | None = None) -> World:
    """Return the World of a torch.distributed group (default: all ranks of torchrun's environment), one GPU per
    process. With a group over gloo the ranks are CPU processes, which serve as the reference: every op accepts CPU
    tensors and runs its sequential plan, and the ranks compare every call.

    check: at each call of an op the hosts wait for each other and compare their calls, so that ranks whose calls differ
    raise Mismatch before anything is launched, with any plan. Without check, kernels compare calls, at no cost, where
    ranks read memory that other ranks wrote; calls that communicate only by NCCL's collectives are not compared (plan
    "sequential", and "signaled" by NCCL). The replays of a CUDA graph are compared only by kernels in the graph. None:
    check if the environment sets WEFT_CHECK=1.

    batch_invariant: with given weights and ranks, the bits of a row of a result depend on that row of the operands
    alone: not on the other rows or their number, the row's position, the rank that owns it, the plan, or whether a CUDA
    graph runs. The promise holds for forward passes of `matmul`, `all_gather_matmul`, `matmul_reduce_scatter`,
    `matmul_all_reduce`, `all_reduce`, `all_reduce_rms_norm`, `silu_mul` and `rms_norm` with 16-bit rows. "auto" does
    not consider plans that break this promise. A call that names such a plan raises Unsupported, as does every other
    op. None: true if the environment sets WEFT_BATCH_INVARIANT=1.

    Initialises torch.distributed with NCCL unless it is initialised. Without a launcher the World has one rank, and
    every op is an ordinary GEMM. Raises RuntimeError without a GPU, unless the group is over gloo (`spmd(...,
    backend="gloo")` creates such a group; `spmd(..., backend="emulated")` needs no group).
    """
    from .backends import gloo

    if gloo.serves(group):
        return World(gloo.GlooBackend(group), batch_invariant=batch_invariant)
    from .backends.cuda import CudaBackend

    backend = CudaBackend(group, os.environ.get("WEFT_CHECK", "0") == "1" if check is None else check)
    return World(backend, batch_invariant=batch_invariant)


def init_gloo() -> World:
    """Return the World of all ranks of torchrun's environment, as CPU processes that share this machine's cores."""
    from .backends import gloo

    gloo.start()
    return init()


def runs_nothing(fn: Callable[..., object]) -> bool:
    """Return whether calling fn only creates a coroutine or a generator."""
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return any(kind(fn) for kind in kinds)


def spmd(
    fn: Callable[..., R],
    world_size: int,
    *,
    backend: str = "cuda",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[R]:
    """Run `fn(world, *args, **kwargs)` as `world_size` ranks and return their results by rank.

    backend: "cuda" (a process and a GPU for each rank; under torchrun the calling process is one of them), "shared"
    (the same, but ranks share GPUs if there are fewer GPUs than ranks; do not measure speed with it), "gloo" (CPU
    processes: every op by its sequential plan, as a reference), "emulated" (CPU; options `seed`, `sm_count`, `races`,
    `nodes`, `ahead`, ...). An exception in one rank ends the other ranks, and `spmd` raises it. Ranks in separate
    processes receive copies of the arguments; ranks in the calling process receive the caller's objects.

    Raises:
        TypeError: fn is not callable, or is an async or generator function, whose body a call does not run.
        ValueError: the world has no ranks, the backend is unknown, or there are fewer GPUs than ranks.
    """
    if not callable(fn) or runs_nothing(fn):
        raise TypeError(f"spmd takes a function of a World that runs when it is called, not {fn!r}")
    if world_size < 1:
        raise ValueError(f"a world of {world_size} ranks")
    kwargs_of_fn = {**(kwargs or {})}
    if backend == "emulated":
        from .backends.emulated import spmd as run

        try:
            return run(lambda b: fn(World(b), *args, **kwargs_of_fn), world_size, **options)[0]
        except Exception as error:
            from .emulator.host import folded

            raise folded(error)  # noqa: B904 (it is the same error)
    if backend not in ("cuda", "shared", "gloo"):
        raise ValueError(f'backend {backend!r}: not one of "cuda", "shared", "gloo", "emulated"')
    from .backends import shared_gpu
    from .backends.processes import check_gpus, packed, unpacked
    from .backends.processes import spmd as run_processes

    share, start = backend == "shared" or shared_gpu.may_share(), init_gloo if backend == "gloo" else init
    if "RANK" in os.environ:
        os.environ[shared_gpu.VARIABLE] = str(int(share))
        world = start()
        if world.size != world_size:
            raise ValueError(f"spmd over {world_size} ranks under a launcher of {world.size}")
        return [unpacked(sent) for sent in world.exchange(packed(fn(world, *args, **kwargs_of_fn), world))]
    if backend != "gloo":
        check_gpus(world_size, share)
    return run_processes(start, fn, world_size, args, kwargs_of_fn, share, **options)
