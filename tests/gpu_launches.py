"""Checks on GPUs of what is kept between launches: arguments whose addresses change, memory that CUDA graphs must not be given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from cases import distance, draw
from gpu_reduce import PLANS

import weft
from weft.lang.mapping import balanced_rows
from weft.ops.activation import silu_mul
from weft.ops.rotary import rotary
from weft.plans import OneShot, Plan, TwoShot

Tensors = tuple[torch.Tensor, ...]
Op = Callable[..., torch.Tensor]
BF16 = 1e-2
CALLS = 6
POSTED: tuple[Plan, ...] = (OneShot(), TwoShot(post=True))


def reference_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


def reference_rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = qkv.float().view(qkv.shape[0], 8, -1)
    (a, b), (c, s) = heads.chunk(2, 2), (t.float().chunk(2, 1)[0][:, None] for t in (cos, sin))
    turned = torch.cat((a * c - b * s, b * c + a * s), 2)
    return torch.cat((turned[:, :6], heads[:, 6:]), 1).flatten(1)


def normed(world: weft.World, plan: Plan | str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return torch.cat(weft.all_reduce_rms_norm(x, residual, weight, world=world, plan=plan, full_residual=True))


def moving(world: weft.World, op: Op, reference: Op, make: Callable[[int], Tensors]) -> float:
    """Calls of one size, whose tensors lie at other addresses and hold other numbers each time, while those before are
    still there: every result is that of its own, and behind the first ones no launch is prepared anew. In a stream of
    its own too, and in a graph."""
    held, results, prepared = [], [], world.backend.launcher._prepared  # type: ignore[attr-defined]
    for i in range(CALLS):
        held.append(make(i))
        results.append(op(*held[-1]))
        if i == 1:
            many = len(prepared)
    grown = len(prepared) - many
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
    off = max(distance(got, reference(*of)) for got, of in zip(results, held, strict=True))
    return off if grown == 0 else float("inf")


def drawn(world: weft.World, seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return tuple(draw(seed * 10 + i, *shape, dtype=dtype).to(world.device) for i, shape in enumerate(shapes))


def norm_moving(world: weft.World, plan: Plan, m: int, weights: torch.dtype) -> float:
    """x differs by rank, what is the same on all ranks does not."""

    def make(i: int) -> Tensors:
        return *drawn(world, 100 + i + 50 * world.rank, (m, 1024)), *drawn(world, i, (m, 1024), (1024,))

    def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = normed(world, plan, x, residual, weight.to(weights))
        return made

    return moving(world, run, lambda *of: normed(world, "sequential", *of), make)


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
    """Several graphs of one memory pool, each warmed up in that pool, as engines do: what weft keeps of a size for good
    is not given memory that an earlier graph writes to when it is replayed."""
    stream, pool, worst = torch.cuda.Stream(), torch.cuda.MemPool(), 0.0
    made: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, Tensors]] = []
    for m in (56, 88, 24):
        of = *drawn(world, m + world.rank, (m, 512)), *drawn(world, m, (m, 512), (512,))
        want = normed(world, "sequential", *of)
        torch.cuda.synchronize()

        def run(of: Tensors = of) -> torch.Tensor:
            y: torch.Tensor = normed(world, plan, *of)
            behind = [torch.full((64 + i,), -1, device=world.device) for i in range(256)]  # numbers that are no address
            return y + 0 * behind[-1].sum()

        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            for _ in range(2):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, pool=pool.id):
            y = run()
        made.append((graph, y, want, of))
        for each, *_ in made:
            each.replay()
            torch.cuda.synchronize()
        worst = max(worst, *(distance(got, right) for _, got, right, _ in made))
    world.synchronize()
    return worst


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    yield (
        "launches at new addresses, silu_mul", BF16,
        partial(moving, world, partial(silu_mul, world=world), reference_silu, lambda i: drawn(world, i, (24, 512))),
    )  # fmt: skip
    yield (
        "launches at new addresses, rotary", BF16,
        partial(
            moving, world, lambda *of: rotary(*of, 4, 2, world=world), reference_rotary,
            lambda i: drawn(world, i, (24, 8 * 64), (24, 64), (24, 64)),
        ),
    )  # fmt: skip
    for name, plan in PLANS.items():
        if name != "decomposed":
            yield f"launches at new addresses, {name}", BF16, partial(norm_moving, world, plan, 40, torch.bfloat16)
    yield "launches at new addresses, fp32 weight", BF16, partial(norm_moving, world, OneShot(), 8, torch.float32)
    yield "launches at new addresses, all-gather", BF16, partial(gathered, world, OneShot())
    for plan in (*POSTED, TwoShot(rows=2)):
        yield f"launches of graphs in one pool, {plan}", BF16, partial(pools, world, plan)
