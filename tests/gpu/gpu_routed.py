"""GPU checks of GEMM + all-to-all with routing on the device; tests/gpu/gpu_main.py runs them among its own checks.

To run them alone: torchrun --nproc-per-node N -m tests.gpu.gpu_main --out DIR --only "routed all-to-all"
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_matmul_all_to_all_routed import DRAWS, MIXED, Caller, routed_case, some_nowhere, uniform
from tests.gpu.gpu_moe_training import replayed
from weft.plans import FusedAllToAll, GemmTile, Plan

BF, BOUND = torch.bfloat16, 5e-3
TILES = FusedAllToAll(tile=GemmTile(block_n=128, warps=4, stages=4))
HALF_TILES = FusedAllToAll(tile=GemmTile(block_m=64, warps=4, stages=4))
Operands = list[torch.Tensor]  # x, weight, bias, destinations, and the gradient of the result


def operands(world: weft.World, call: int, m: int, n: int, k: int) -> Operands:
    """Return one rank's operands of a call; the routing differs between calls."""
    routing = MIXED[call % len(MIXED)](random.Random(call), world.size, m)
    me = world.rank
    tensors = draw(100 * call + me, m, k), draw(40 + me, n, k) * 0.1, draw(80 + me, n)
    destinations = torch.tensor(routing[me], dtype=torch.int32)
    return [t.to(world.device) for t in (*tensors, destinations, draw(100 * call + 90 + me, world.size, m, n))]


def step(
    world: weft.World, plan: str | Plan, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, d: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the result, the counts, and the three gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    out, counts = weft.matmul_all_to_all_routed(*leaves, destinations=d, world=world, plan=plan)
    return out.detach(), counts, *torch.autograd.grad(out, leaves, dout)


def graph_replays(world: weft.World, plan: str) -> float:
    """Replay the forward and backward passes in one CUDA graph with new rows and destinations: the bits must equal
    those of eager calls."""
    drawn = partial(operands, world, m=500, n=512, k=256)
    pairs = replayed(partial(step, world, plan), drawn)
    return float(sum(not torch.equal(a, b) for results in pairs for a, b in results))


def many_replays(world: weft.World, replays: int) -> float:
    """Replay a graph of two calls with random late ranks, without synchronising. Destinations come from a table on the
    device, and the device also sums the results. Return the number of wrong elements."""
    m, n, k = 300, 256, 128
    drawn = [operands(world, call, m, n, k) for call in range(5)]
    wanted = [weft.matmul_all_to_all_routed(*o[:3], destinations=o[3], world=world, plan="fused") for o in drawn]
    wanted = [(out.clone(), counts.clone()) for out, counts in wanted]
    x, w, b, d, _ = (t.clone() for t in drawn[0])
    rng = random.Random(world.rank)
    weft.matmul_all_to_all_routed(x, w, b, destinations=d, world=world, plan="fused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [weft.matmul_all_to_all_routed(x, w, b, destinations=d, world=world, plan="fused") for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    for i in range(replays):
        call = i % len(drawn)
        for t, new in zip((x, w, b, d), drawn[call], strict=False):
            t.copy_(new)
        if rng.random() < 0.2:
            torch.cuda._sleep(rng.randrange(1000, 500000))
        graph.replay()
        for out, counts in results:
            wrong += (out != wanted[call][0]).sum() + (counts != wanted[call][1]).sum()
    world.synchronize()
    return float(wrong.item())


def same_bits(world: weft.World) -> float:
    """Repeat the same call and its gradients while random ranks start late."""
    inputs, wrong = operands(world, 3, 700, 520, 264), 0
    wanted = [t.clone() for t in step(world, "fused", *inputs)]
    for call in range(12):
        if (call + world.rank) % 3 == 0:
            torch.cuda._sleep(300000)
        wrong += sum(not torch.equal(a, b) for a, b in zip(step(world, "fused", *inputs), wanted, strict=True))
    world.synchronize()
    return float(wrong)


def nothing_is_read(world: weft.World, plan: str) -> float:
    """Check that the host does not wait in a repeated step: torch raises an error if one of its functions would
    wait."""
    inputs = operands(world, 0, 400, 256, 128)
    for _ in range(2):
        step(world, plan, *inputs)
    world.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(world, plan, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    world.synchronize()
    return 0.0


def streams(world: weft.World) -> float:
    """Make calls of two sizes that share the arena, on three streams."""
    inputs = [operands(world, call, 256 + 44 * (call % 2), 256, 128) for call in range(6)]
    wanted = [[t.clone() for t in step(world, "fused", *o)] for o in inputs]
    others, results = [torch.cuda.Stream() for _ in range(3)], []
    world.synchronize()
    for i in range(30):
        with torch.cuda.stream(others[i % 3]):
            results.append((i % 6, step(world, "fused", *inputs[i % 6])))
    world.synchronize()
    return float(
        sum(not torch.equal(a, b) for call, of_call in results for a, b in zip(of_call, wanted[call], strict=True))
    )


def compiled(world: weft.World) -> float:
    """Compare a step that Inductor compiled under torch.compile, with new destinations in every call, with eager
    steps."""

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, counts = weft.matmul_all_to_all_routed(torch.relu(x), w, b, destinations=d, world=world, plan="fused")
        return torch.relu(out), counts

    graph, worst = torch.compile(fn, fullgraph=True), 0.0
    for call in range(4):
        *tensors, d, dout = operands(world, call, 300, 256, 128)
        results = []
        for run in (fn, graph):
            leaves = [t.detach().requires_grad_() for t in tensors]
            out, counts = run(*leaves, d)
            results.append([out.detach(), counts.float(), *torch.autograd.grad(out, leaves, dout)])
        world.synchronize()
        worst = max(worst, *(distance(a, b.double()) for a, b in zip(*results, strict=True)))
    return worst


def two_sizes(world: weft.World) -> float:
    """Make successive calls of two sizes that share the arena, with and without gradients."""
    callers = [Caller(world, m, 512, 256, "fused", BF) for m in (900, 64)]
    rng = random.Random(5)
    for call in range(8):
        caller = callers[call % 3 == 2]
        caller.call(call, some_nowhere(rng, world.size, caller.sizes[0]), bias=True, gradient=call % 2 == 0)
    return max(caller.error() for caller in callers)


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    name = "routed all-to-all"
    for plan in ("sequential", "fused"):
        case = partial(routed_case, world, plan=plan, gradient=True)
        yield f"{name}, {plan}, changing routings", BOUND, partial(case, 1000, 1024, 256, bias=True)
        yield f"{name}, {plan}, odd sizes", BOUND, partial(case, 333, 520, 264, dtype=torch.float16)
        yield f"{name}, {plan}, in a graph", 0.0, partial(graph_replays, world, plan)
        yield f"{name}, {plan}, the host reads nothing", 0.0, partial(nothing_is_read, world, plan)
    for kind, routing in DRAWS.items():
        yield (
            f"{name}, {kind}",
            BOUND,
            partial(routed_case, world, 777, 256, 128, "fused", draws=[routing], calls=2, gradient=True),
        )
    for tiles, plan in (("128 x 128", TILES), ("64 x 256", HALF_TILES)):
        yield f"{name}, {tiles}", BOUND, partial(routed_case, world, 1500, 1032, 264, plan, bias=True, gradient=True)
    yield f"{name}, one row", BOUND, partial(routed_case, world, 1, 8, 8, "fused", gradient=True)
    yield (
        f"{name}, many rows",
        BOUND,
        partial(routed_case, world, 9000, 64, 64, "fused", draws=[uniform], calls=2, gradient=True),
    )
    yield (
        f"{name}, several waves",
        BOUND,
        partial(routed_case, world, 4096, 2048, 512, "fused", draws=[uniform], calls=2),
    )
    yield f"{name}, two sizes", BOUND, partial(two_sizes, world)
    yield f"{name}, replay x100, late ranks", 0.0, partial(many_replays, world, 100)
    yield f"{name}, the same bits", 0.0, partial(same_bits, world)
    yield f"{name}, streams", 0.0, partial(streams, world)
    yield f"{name}, compiled", 1e-2, partial(compiled, world)
