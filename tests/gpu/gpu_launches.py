"""Check on GPUs the state that weft keeps between launches: arguments whose addresses change, and memory that must not
be allocated in the pools of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.gpu.gpu_reduce import PLANS
from weft.lang.mapping import balanced_rows
from weft.ops.activation import silu_mul
from weft.ops.rotary import rotary
from weft.plans import Decomposed, OneShot, Plan, TwoShotLowLatency, TwoShotPush

Tensors = tuple[torch.Tensor, ...]
Op = Callable[..., torch.Tensor]
BF16 = 1e-2
CALLS = 6
POSTED: tuple[Plan, ...] = (OneShot(), TwoShotLowLatency())


def reference_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def reference_rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = qkv.float().view(qkv.shape[0], 8, -1)
    (a, b), (c, s) = heads.chunk(2, 2), (t.float().chunk(2, 1)[0][:, None] for t in (cos, sin))
    rotated = torch.cat((a * c - b * s, b * c + a * s), 2)
    return torch.cat((rotated[:, :6], heads[:, 6:]), 1).flatten(1)


def normed(world: weft.World, plan: Plan | str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.cat(weft.all_reduce_rms_norm(x, residual, weight, world=world, plan=plan, full_residual=True))


def variants(world: weft.World) -> int:
    """Return the number of launches that the World has prepared."""
    prepared = [part for kept in world.prepared.values() for part in (kept if isinstance(kept, tuple) else (kept,))]
    return sum(len(launch.variants) for launch in prepared if isinstance(launch, weft.Launch))


def moving(world: weft.World, op: Op, reference: Op, make: Callable[[int], Tensors]) -> float:
    """Make calls of one size, each with tensors at new addresses and with new values, while earlier tensors are alive.
    Every result must belong to its own call, and weft must prepare no further launch after the first calls. The same
    must hold on a side stream and in a graph."""
    held, results = [], []
    for i in range(CALLS):
        held.append(make(i))
        results.append(op(*held[-1]))
        if i == 1:
            many = variants(world)
    grown = variants(world) - many
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results.append(op(*held[0]))
    torch.cuda.current_stream().wait_stream(stream)
    held.append(held[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results.append(op(*held[1]))
    held.append(held[1])
    graph.replay()
    off = max(distance(actual, reference(*inputs)) for actual, inputs in zip(results, held, strict=True))
    return off if grown == 0 else float("inf")


def drawn(world: weft.World, seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return tuple(draw(seed * 10 + i, *shape, dtype=dtype).to(world.device) for i, shape in enumerate(shapes))


def norm_moving(world: weft.World, plan: Plan, m: int, weights: torch.dtype) -> float:
    """Check the operands of a norm when their addresses change: x differs between ranks, and the operands that must
    agree do not."""

    def make(i: int) -> Tensors:
        return *drawn(world, 100 + i + 50 * world.rank, (m, 1024)), *drawn(world, i, (m, 1024), (1024,))

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = normed(world, plan, x, residual, weight.to(weights))
        return y

    return moving(world, run, lambda *inputs: normed(world, "sequential", *inputs), make)


def gathered(world: weft.World, plan: Plan) -> float:
    x, w = draw(world.rank, balanced_rows(48, world.size)[world.rank], 256), draw(9, 128, 256)
    weight = w.to(world.device)

    def reference(part: torch.Tensor) -> torch.Tensor:
        return weft.all_gather_matmul(part, weight, world=world, plan="sequential")

    return moving(
        world, lambda part: weft.all_gather_matmul(part, weight, world=world, plan=plan), reference,
        lambda i: ((x * (i + 1)).to(world.device),),
    )  # fmt: skip


@torch.no_grad()
def pools(world: weft.World, plan: Plan) -> float:
    """Capture several graphs in one memory pool, each warmed up in that pool, as engines do. weft's memory for a size
    must not be memory to which a replay of an earlier graph writes."""
    stream, pool, worst = torch.cuda.Stream(), torch.cuda.MemPool(), 0.0
    captured: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, Tensors]] = []
    for m in (56, 88, 24):
        inputs = *drawn(world, m + world.rank, (m, 512)), *drawn(world, m, (m, 512), (512,))
        expected = normed(world, "sequential", *inputs)
        torch.cuda.synchronize()

        def run(inputs: Tensors = inputs) -> torch.Tensor:
            y: torch.Tensor = normed(world, plan, *inputs)
            behind = [torch.full((64 + i,), -1, device=world.device) for i in range(256)]  # no valid addresses
            return y + 0 * behind[-1].sum()

        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, pool=pool.id):
            y = run()
        captured.append((graph, y, expected, inputs))
        for earlier_graph, *_ in captured:
            earlier_graph.replay()
            torch.cuda.synchronize()
        worst = max(worst, *(distance(actual, expected_y) for _, actual, expected_y, _ in captured))
    world.synchronize()
    return worst


@torch.no_grad()
def flat(world: weft.World, call: Callable[[], object]) -> float:
    """Return the growth of GPU memory in MiB over 50 eager calls after the first calls; each call has separate
    tensors."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    return (torch.cuda.memory_allocated() - before) / 2**20


def memory_cases(world: weft.World) -> Iterator[tuple[str, Callable[[], object]]]:
    """Return calls of every op with each of its plans, and with new operand tensors in each call."""
    size, dev, bf = world.size, world.device, torch.bfloat16

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=dev, dtype=bf)

    gather = weft.all_gather_matmul, lambda: (new(128, 512), new(256, 512))
    scatter = weft.matmul_reduce_scatter, lambda: (new(128 * size, 512), new(256, 512))
    everywhere = weft.matmul_all_reduce, lambda: (new(128 * size, 512), new(256, 512))
    for op, operands, plans in (
        (*gather, ("sequential", "decomposed", "fused", "one_shot")),
        (*scatter, ("sequential", "decomposed", "fused", "one_shot", "signaled")),
        (*everywhere, ("sequential", "fused", "one_shot", "two_shot", "signaled")),
    ):
        for plan in plans:
            yield f"{op.__name__}, {plan}", partial(lambda op, operands, plan: op(*operands(), world=world, plan=plan), op, operands, plan)  # fmt: skip
    experts, k, tokens, hidden, inner = 4 * size, 2, 64, 512, 256
    w13 = weft.moe.pack(new(4, 2 * inner, hidden), world=world)
    w2 = new(4, hidden, inner)

    def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.rand(tokens, experts, device=dev).topk(k).indices.int()
        return new(tokens, hidden), ids, torch.rand(tokens, k, device=dev)

    for plan in ("dispatched", "fused", "low_latency"):
        yield f"moe, {plan}", partial(lambda plan: weft.moe.moe(*routed(), w13, w2, world=world, plan=plan), plan)

    def there_and_back() -> torch.Tensor:
        x, ids, weights = routed()
        rows, handle = weft.moe.dispatch(x, ids, weights, experts=experts, world=world)
        return weft.moe.combine(rows, handle)

    yield "dispatch, combine", there_and_back

    def attention() -> torch.Tensor:
        return weft.gathered_attention(new(256, 8, 64), new(256, 8, 64), new(256, 8, 64), world=world, plan="segmented")

    yield "gathered_attention, segmented", attention


ASLEEP = 400_000_000  # the clock cycles for which the GPU is kept busy, a fifth of a second


@torch.no_grad()
def first_call_of_a_size(world: weft.World, kind: str) -> float:
    """Return the error of the first call of a size, which the host enqueues on a busy stream without waiting, and the
    error of the same call on a second stream, which uses the first call's tables. torch raises an error if the host
    waits."""
    gather = kind in ("fused", "one_shot")
    op = weft.all_gather_matmul if gather else weft.matmul_reduce_scatter
    weight = draw(9, 256, 512).to(world.device)
    results = []

    def run(rows: int, plan: str) -> torch.Tensor:
        x = draw(rows + world.rank, rows * (1 if gather else world.size), 512).to(world.device)
        return op(x, weight, world=world, plan=plan)

    for _ in range(2):
        run(128, kind)
    expected = run(64, "sequential")
    x = draw(64 + world.rank, 64 * (1 if gather else world.size), 512).to(world.device)
    second = torch.cuda.Stream()
    world.synchronize()
    torch.cuda._sleep(ASLEEP)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results.append(op(x, weight, world=world, plan=kind))
        with torch.cuda.stream(second):
            results.append(op(x, weight, world=world, plan=kind))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    world.synchronize()
    return max(distance(result, expected) for result in results)


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    yield (
        "launches at new addresses, silu_mul", BF16,
        partial(moving, world, partial(silu_mul, world=world), reference_silu, lambda i: drawn(world, i, (24, 512))),
    )  # fmt: skip
    yield (
        "launches at new addresses, rotary", BF16,
        partial(
            moving, world, lambda *tensors: rotary(*tensors, 4, 2, world=world), reference_rotary,
            lambda i: drawn(world, i, (24, 8 * 64), (24, 64), (24, 64)),
        ),
    )  # fmt: skip
    for name, plan in PLANS.items():
        if name != "decomposed":
            yield f"launches at new addresses, {name}", BF16, partial(norm_moving, world, plan, 40, torch.bfloat16)
    yield "launches at new addresses, fp32 weight", BF16, partial(norm_moving, world, OneShot(), 8, torch.float32)
    yield "launches at new addresses, all-gather", BF16, partial(gathered, world, OneShot())
    yield "launches at new addresses, all-gather by copies", BF16, partial(gathered, world, Decomposed())
    for plan in (*POSTED, TwoShotPush()):
        yield f"launches of graphs in one pool, {plan}", BF16, partial(pools, world, plan)
    for kind in ("fused", "one_shot", "signaled", "decomposed"):
        yield f"first call of a size waits for no stream, {kind}", BF16, partial(first_call_of_a_size, world, kind)
    for name, call in memory_cases(world):
        yield f"launches keep no memory, {name}", 1.0, partial(flat, world, call)
