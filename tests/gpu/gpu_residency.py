"""Run two operators on two streams, each of which needs all SMs and waits for the other ranks: torchrun
--nproc-per-node 2 -m tests.gpu.gpu_residency

Every rank makes the calls in the same order. A sleep precedes one of the calls, so rank 0's GPU begins with the first
call and the other ranks' GPUs with the second. The World makes the second call start after the first, so both end,
eagerly and in a graph. At the end the program stops the World from ordering the calls: then both calls wait for free
SMs until `weft.Timeout`, within seconds. The program prints a line for each case, and exits with 1 if one fails.
"""

from __future__ import annotations

import os

os.environ["WEFT_TIMEOUT"] = "5"

from collections.abc import Callable
from typing import Any

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
    except weft.Timeout:
        return "Timeout"
    return "ended"


def main() -> None:
    world, failed = weft.init(), False
    by_name = calls(world)
    for _ in range(2):
        for call in by_name.values():
            call()
    world.synchronize()
    cases = [("gather", "experts", "ended"), ("sum", "experts", "ended"), ("gather", "sum", "ended")]
    for name_a, name_b, expected in [*cases, ("gather", "experts", "Timeout")]:
        if expected == "Timeout":
            weft.World.order_residents = lambda *_: None  # type: ignore[method-assign]
        outcomes = [""] * world.size
        rounds = 3 if expected == "ended" else 30  # if other processes share the GPUs, some rounds do not hang
        dist.all_gather_object(outcomes, outcome(world, by_name[name_a], by_name[name_b], rounds))
        actual = "Timeout" if "Timeout" in outcomes else "ended"  # an expired wait lets other ranks' waits end
        failed |= actual != expected
        verdict = "ok" if actual == expected else "FAILED"
        print(f"{name_a} beside {name_b}, rank {world.rank}: {actual}, {verdict}", flush=True)
    os._exit(failed)  # the World is unusable after a Timeout


if __name__ == "__main__":
    main()
