"""Follow one row through random batches of a batch-invariant World: torchrun --nproc-per-node N -m
tests.gpu.gpu_invariant [CALLS]

Each call of an op has a different number of rows, a different position of the row, different rows around it, and one of
the batch-invariant plans; every tenth call runs as a CUDA graph. The program prints a line for each op, and exits with
1 if the row's bits ever differed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from functools import partial

import torch

import weft
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.plans import Decomposed, FusedGatherByCopies

Call = Callable[[str | weft.Plan, torch.Tensor, torch.Tensor], torch.Tensor]
EVEN = Decomposed, FusedGatherByCopies  # plans that need equal shards


def own_rows(x: torch.Tensor, world: weft.World) -> torch.Tensor:
    return x.split(balanced_rows(len(x), world.size))[world.rank].contiguous()


def ops(world: weft.World) -> dict[str, Call]:
    """Return, for each op, a function that calls it with a plan and the unsharded x and weight, and returns this rank's
    rows of the result."""

    def gather(plan: str | weft.Plan, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shards = balanced_rows(len(x), world.size)
        return weft.all_gather_matmul(own_rows(x, world), w, world=world, plan=plan, rows=shards)

    def norm(plan: str | weft.Plan, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(-3, 3, x.shape[1], device=x.device).bfloat16()  # equal on all ranks, like the residual
        residual = own_rows(weight.expand_as(x), world)
        return weft.all_reduce_rms_norm(x, residual, weight, world=world, plan=plan)[0]

    return {
        "all_gather_matmul": gather,
        "matmul_reduce_scatter": lambda plan, x, w: weft.matmul_reduce_scatter(x, w, world=world, plan=plan),
        "matmul_all_reduce": lambda plan, x, w: weft.matmul_all_reduce(x, w, world=world, plan=plan),
        "all_reduce_rms_norm": norm,
        "all_reduce": lambda plan, x, w: weft.all_reduce(x, world=world, plan=plan),
        "matmul": lambda plan, x, w: weft.matmul(x, w, world=world),
    }


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of a call in a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    return y.clone()


def follow(world: weft.World, op: str, calls: int, most_rows: int, n: int, k: int) -> int:
    """Return the number of calls, the same on all ranks, in which the row's bits differed from those of the first
    call."""
    rng, device = random.Random(op), world.device
    shared = op == "all_gather_matmul"  # the op whose x is the same on all ranks
    generator = torch.Generator(device).manual_seed(0 if shared else world.rank)
    draw = partial(torch.randn, device=device, generator=generator)
    row, w = draw(k).bfloat16(), draw(n, k).bfloat16()
    row[: k // 4] *= 1e-3
    row[k // 2 : k // 2 + 2] = torch.tensor([3e4, -3e4])
    kinds, expected, wrong = REGISTRY[op].batch_invariant_plans, None, 0
    fewest = world.size if shared or op == "matmul_reduce_scatter" else 1  # OneShot needs a row on each rank
    for i in range(calls):
        m = rng.choice([fewest, rng.randrange(fewest, 64), rng.randrange(fewest, most_rows)])
        kind = rng.choice(kinds)
        if issubclass(kind, EVEN):
            m = -(-m // world.size) * world.size
        place, x = rng.randrange(m), draw(m, k).bfloat16()
        x[place] = row
        plan = "auto" if i % 10 == 0 else world.backend.scale.plan(kind)
        call = partial(ops(world)[op], plan, x, w)
        y = replayed(call) if i % 10 == 9 and device.type == "cuda" else call()
        world.synchronize()
        parts = world.exchange(y.cpu() if op == "matmul_reduce_scatter" else y[place].cpu())
        bits = (torch.cat(parts)[place] if op == "matmul_reduce_scatter" else torch.cat(parts)).view(torch.int16)
        expected = bits if expected is None else expected
        wrong += not torch.equal(bits, expected)
    return wrong


def main() -> None:
    world, calls, failed = weft.init(batch_invariant=True), int(sys.argv[1]) if len(sys.argv) > 1 else 200, False
    for op in ops(world):
        wrong = follow(world, op, calls, 4096, 2048, 1024)
        failed |= wrong > 0
        if world.rank == 0:
            print(f"batch invariance, {op}: {'FAILED' if wrong else 'ok'}: {wrong} of {calls} calls wrong", flush=True)
    os._exit(failed)


if __name__ == "__main__":
    main()
