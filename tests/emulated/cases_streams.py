"""Random calls of all operators on several streams of ranks whose hosts run ahead. The calls check whether weft's
locks, barriers and events order concurrent operators' accesses to shared memory. The expected result is computed before
the call, because torch waits for a call whose operands it reads. A seed draws the calls:

python -m tests.emulated.cases_streams 10000 [first seed] # the number of seeds; prints the failing ones

Half of the seeds cycle through the pairs of operators, each pair on two streams of two ranks, twice; the others draw up
to five calls on three streams of two to four ranks, on one node or two.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_attention import Inputs, Shape
from weft import World, moe
from weft.plans import (
    FusedGatherByCopies,
    HeadParallel,
    Plan,
    Segmented,
    TwoLevel,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)
from weft.scale import SMALL_TILE

BOUND = 1.2e-2  # the sequential plan of a layer rounds up to four hidden rows
STREAMS = ("", "first", "second")
Result = tuple[torch.Tensor, torch.Tensor]  # the actual result, and the expected one in float32 or wider
Run = Callable[[World, "Call", Any], Result]


@dataclass(frozen=True)
class Call:
    """One call, the same on all ranks. `op` is a name in OPS, and `choice`, in [0, 1), selects one of its plans."""

    op: str
    choice: float
    stream: str
    m: int
    n: int
    k: int
    seed: int

    def plan(self, world: World) -> str | Plan:
        plans = OPS[self.op].plans if world.multi_node_unsupported is None else OPS[self.op].over_nodes
        return plans[int(self.choice * len(plans))]

    def tensors(self, world: World, *shape: int) -> list[torch.Tensor]:
        """All ranks' tensors."""
        return [draw(self.seed + rank, *shape) for rank in range(world.size)]

    def weight(self) -> torch.Tensor:
        return draw(self.seed + 50, self.n, self.k) * 0.1


@dataclass(frozen=True)
class Op:
    """`run` calls the op with a plan. `over_nodes` lists the plans for ranks on several nodes; an op without such plans
    is skipped there."""

    run: Run
    plans: Sequence[str | Plan]
    over_nodes: Sequence[str | Plan] = ()


def gather(world: World, call: Call, plan: str | Plan) -> Result:
    xs, w = call.tensors(world, call.m, call.k), call.weight()
    expected = torch.cat(xs).float() @ w.float().t()
    return weft.all_gather_matmul(xs[world.rank], w, world=world, plan=plan), expected


def reduce_scatter(world: World, call: Call, plan: str | Plan) -> Result:
    xs, w = call.tensors(world, call.m * world.size, call.k), call.weight()
    expected = (torch.stack(xs).float().sum(0) @ w.float().t())[call.m * world.rank :][: call.m]
    return weft.matmul_reduce_scatter(xs[world.rank], w, world=world, plan=plan), expected


def all_reduce_product(world: World, call: Call, plan: str | Plan) -> Result:
    xs, w = call.tensors(world, call.m, call.k), call.weight()
    expected = torch.stack(xs).float().sum(0) @ w.float().t()
    return weft.matmul_all_reduce(xs[world.rank], w, world=world, plan=plan), expected


def all_reduce(world: World, call: Call, plan: str | Plan) -> Result:
    xs = call.tensors(world, call.m, call.n)
    expected = torch.stack(xs).float().sum(0)
    return weft.all_reduce(xs[world.rank], world=world, plan=plan), expected


def norm(world: World, call: Call, plan: str | Plan) -> Result:
    xs, weight = call.tensors(world, call.m, call.n), torch.ones(call.n, dtype=torch.bfloat16)
    total = torch.stack(xs).float().sum(0)
    expected = total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6)
    y, _ = weft.all_reduce_rms_norm(xs[world.rank], None, weight, 1e-6, world=world, plan=plan, full_residual=True)
    return y, expected


def to_ranks(world: World, call: Call, plan: str | Plan) -> Result:
    xs, w = call.tensors(world, call.m, call.k), call.weight()
    rng = random.Random(call.seed)
    destinations = [[rng.randrange(world.size) for _ in range(call.m)] for _ in range(world.size)]
    rows = [x[[i for i, to in enumerate(d) if to == world.rank]] for x, d in zip(xs, destinations, strict=True)]
    expected = torch.cat(rows).float() @ w.float().t()
    # All calls use one routing, since calls on two streams share a routing's tables.
    routing = world.cached((call.seed, call.m), lambda: weft.route(destinations[world.rank], world=world))
    return weft.matmul_all_to_all(xs[world.rank], w, destinations=routing, world=world, plan=plan), expected


def routed(world: World, call: Call, plan: str | Plan) -> Result:
    xs, w = call.tensors(world, call.m, call.k), call.weight()
    generator = torch.Generator().manual_seed(call.seed)
    to = [torch.randint(-1, world.size, (call.m,), generator=generator).int() for _ in range(world.size)]
    expected = torch.zeros(world.size, call.m, call.n)
    for rank, (x, destinations) in enumerate(zip(xs, to, strict=True)):
        rows = x[destinations == world.rank].float() @ w.float().t()
        expected[rank, : len(rows)] = rows
    y, _ = weft.matmul_all_to_all_routed(xs[world.rank], w, destinations=to[world.rank], world=world, plan=plan)
    return y, expected


def experts(world: World, call: Call, plan: str | Plan) -> Result:
    """Compute two experts per rank."""
    size, hidden, count = 16, 16, 2 * world.size
    w13, w2 = draw(call.seed + 60, count, 2 * size, hidden) * 0.3, draw(call.seed + 61, count, hidden, size) * 0.3
    local = slice(2 * world.rank, 2 * world.rank + 2)
    x = draw(call.seed + world.rank, call.m, hidden)
    ids = torch.arange(call.m)[:, None].int() * (call.seed + 1) % count
    gate, up = (
        torch.einsum("mh,mih->mi", x.float(), w13[ids[:, 0]][:, part].float())
        for part in (slice(size), slice(size, None))
    )
    expected = torch.einsum("mi,mhi->mh", torch.nn.functional.silu(gate) * up, w2[ids[:, 0]].float())
    packed = moe.pack(w13[local], world=world)
    return moe.moe(x, ids, torch.ones(call.m, 1), packed, w2[local], world=world, plan=plan), expected


def attend(world: World, call: Call, plan: str | Plan) -> Result:
    inputs = Inputs(world, Shape((call.m,) * world.size, causal=call.seed % 2 > 0), call.seed)
    expected, _ = inputs.expected()
    return weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan=plan), expected


SHOTS = (TwoShotPush(warps=4, stages=2), TwoShotPull(warps=4, stages=2, programs=1), TwoShotPull(warps=4, stages=2))
SUMS = ("sequential", "decomposed", "one_shot", *SHOTS, TwoShotLowLatency())
LEVELS = ("two_level", TwoLevel(2), "sequential")
OPS = {
    "all_gather_matmul": Op(
        gather, ("sequential", "decomposed", "fused", "one_shot", FusedGatherByCopies(tile=SMALL_TILE)), LEVELS
    ),
    "matmul_reduce_scatter": Op(
        reduce_scatter, ("sequential", "decomposed", "fused", "one_shot", "signaled"), LEVELS
    ),
    "matmul_all_reduce": Op(
        all_reduce_product, ("sequential", "decomposed", "fused", "one_shot", "two_shot", "signaled"), LEVELS
    ),
    "all_reduce": Op(all_reduce, SUMS, LEVELS[:2]),
    "all_reduce_rms_norm": Op(norm, SUMS, LEVELS[:2]),
    "matmul_all_to_all": Op(to_ranks, ("sequential", "signaled"), ("two_level", "sequential")),
    "matmul_all_to_all_routed": Op(routed, ("sequential", "fused")),
    "moe": Op(experts, ("sequential", "dispatched", "fused", "low_latency")),
    "gathered_attention": Op(attend, (Segmented(), HeadParallel(programs=2))),
}  # fmt: skip
PAIRS = [*itertools.combinations_with_replacement(OPS, 2)]


@dataclass(frozen=True)
class Drawn:
    """The calls of one seed. With `warm`, each call runs once beforehand, on a single stream."""

    calls: tuple[Call, ...]
    ranks: int
    nodes: int
    warm: bool


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)

    def call(op: str, stream: str) -> Call:
        m, n, k = rng.choice((4, 5, 8, 16, 24)), rng.choice((16, 32, 40)), rng.choice((16, 32))
        return Call(op, rng.random(), stream, m, n, k, rng.randrange(1000))

    if seed % 2 == 0:
        pair = tuple(call(*named) for named in zip(PAIRS[seed // 2 % len(PAIRS)], STREAMS[1:], strict=True))
        return Drawn(pair * 2, 2, 1, rng.random() < 0.5)
    ranks, nodes = rng.choice(((2, 1), (2, 1), (3, 1), (4, 1), (4, 2)))
    ops = [name for name, op in OPS.items() if nodes == 1 or op.over_nodes]
    calls = tuple(call(rng.choice(ops), rng.choice(STREAMS)) for _ in range(rng.randint(3, 5)))
    return Drawn(calls, ranks, nodes, rng.random() < 0.5)


def run(seed: int) -> None:
    """Make the calls of a seed, and raise the first error."""
    sequence = drawn(seed)

    def main(world: World) -> None:
        if sequence.warm:
            for call in sequence.calls:
                OPS[call.op].run(world, call, call.plan(world))
            world.synchronize()
        results = []
        for call in sequence.calls:
            with on_stream(world, call.stream):
                results.append((call, *OPS[call.op].run(world, call, call.plan(world))))
        world.synchronize()
        for call, actual, expected in results:
            assert distance(actual, expected) < BOUND, (call, distance(actual, expected))

    try:
        weft.spmd(main, sequence.ranks, backend="emulated", nodes=sequence.nodes, seed=seed, ahead=True)
    except Exception as error:
        error.add_note(f"seed {seed}: {sequence}")
        raise


if __name__ == "__main__":
    count, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    failed = 0
    for seed in range(first_seed, first_seed + count):
        try:
            run(seed)
        except Exception as error:
            failed += 1
            print(f"{type(error).__name__}: {error}", *error.__notes__, sep="\n", flush=True)
    print(f"{failed} of {count} seeds failed")
    sys.exit(failed > 0)
