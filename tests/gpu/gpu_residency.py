"""Run two operators on two streams, each of which needs all SMs and waits for the other ranks: torchrun
--nproc-per-node 2 -m tests.gpu.gpu_residency

Every rank makes the calls in the same order. A sleep precedes one of the calls, so rank 0's GPU begins with the first
call and the other ranks' GPUs with the second. The World makes the second call start after the first, so both end,
eagerly and in a graph. At the end the program stops the World from ordering the calls: then both calls wait for free
SMs until `weft.Timeout`. If ranks share a GPU, this case is left out: the GPU's time slices may be longer than the
sleep, so that all ranks may begin with the same call. The program prints a line for each case, with the number of
waits that ordered the calls, since even calls that nothing orders may end by chance. The program exits with 1 at the
first case that fails.

The run sets the time limit of waits: a rank that shares its GPU with other processes may be late by seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft
from weft import moe
from weft.plans import TwoShotPull

SLEEP = 200_000_000  # cycles, about 0.1 s
TOKENS, HIDDEN, INNER, EXPERTS = 2048, 2048, 768, 4
Call = Callable[[], Any]


def calls(world: weft.World) -> dict[str, Call]:
    """Return an all-gather + GEMM, a sum and a layer of experts, each of which launches a program on every SM."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=world.device).bfloat16()

    x, w = randn(TOKENS, HIDDEN), randn(HIDDEN, HIDDEN)
    w13, w2 = moe.pack(randn(EXPERTS, 2 * INNER, HIDDEN), world=world), randn(EXPERTS, HIDDEN, INNER)
    scores, ids = torch.rand(TOKENS, EXPERTS * world.size, device=world.device).topk(2, -1)
    return {
        "gather": lambda: weft.all_gather_matmul(x, w, world=world, plan="fused"),
        "sum": lambda: weft.all_reduce(x, world=world, plan=TwoShotPull()),
        "experts": lambda: moe.moe(x, ids.int(), scores, w13, w2, world=world, plan="fused"),
    }


def on_two_streams(world: weft.World, call_a: Call, call_b: Call) -> None:
    main, streams = torch.cuda.current_stream(), [world.side_stream(f"user {name}") for name in "ab"]
    late = 1 if world.rank == 0 else 0
    for i, (stream, call) in enumerate(zip(streams, (call_a, call_b), strict=True)):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            if i == late:
                torch.cuda._sleep(SLEEP)
            call()
    for stream in streams:
        main.wait_stream(stream)


def outcome(world: weft.World, call_a: Call, call_b: Call, rounds: int) -> str:
    """Return "", or the error of an expired wait. After such a wait, ranks may also count different calls."""
    world.exchange(None)
    try:
        for _ in range(rounds):
            on_two_streams(world, call_a, call_b)
        world.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            on_two_streams(world, call_a, call_b)
        graph.replay()
        world.synchronize()
    except (weft.Timeout, weft.Mismatch) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    world = weft.init()
    by_name = calls(world)
    for _ in range(2):
        for call in by_name.values():
            call()
    world.synchronize()
    cases = [("gather", "experts", True), ("sum", "experts", True), ("gather", "sum", True)]
    if not world.backend.shares_gpu:
        cases.append(("gather", "experts", False))
    for name_a, name_b, ordered in cases:
        if not ordered:
            weft.World.order_residents = lambda *_: None  # type: ignore[method-assign]
        outcomes = [""] * world.size
        rounds = 3 if ordered else 30  # if other processes share the GPUs, some rounds do not hang
        with mock.patch.object(world.backend, "start_after", wraps=world.backend.start_after) as start_after:
            dist.all_gather_object(outcomes, outcome(world, by_name[name_a], by_name[name_b], rounds))
        waits, expired = start_after.call_count, any(outcomes)  # an expired wait lets other ranks' waits end
        ok = (not expired and waits >= 2 * rounds) if ordered else (expired and not waits)
        actual = outcomes[world.rank] or "ended"
        print(
            f"{name_a} beside {name_b}, rank {world.rank}: {'ok' if ok else 'FAILED'}: {waits} waits, {actual}",
            flush=True,
        )
        if not ok:
            break
    os._exit(not ok)  # the World is unusable after a Timeout


if __name__ == "__main__":
    main()
