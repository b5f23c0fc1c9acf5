"""Cases of GEMM + all-to-all with routing on the device, for every backend: each function runs on one rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.plans import Plan

Routing = list[list[int]]  # the destinations of every rank's rows
Draw = Callable[[random.Random, int, int], Routing]  # called with (rng, ranks, m)


def uniform(rng: random.Random, ranks: int, m: int) -> Routing:
    return [[rng.randrange(ranks) for _ in range(m)] for _ in range(ranks)]


def some_nowhere(rng: random.Random, ranks: int, m: int) -> Routing:
    """Draw destinations, some of which are not ranks; one rank sends nothing."""
    nothing = rng.randrange(ranks)
    return [
        [rng.choice([-1, -7, ranks, 1 << 30]) if s == nothing or rng.random() < 0.3 else rng.randrange(ranks) for _ in range(m)]
        for s in range(ranks)
    ]  # fmt: skip


def to_one(rng: random.Random, ranks: int, m: int) -> Routing:
    """Send all rows of all ranks to one rank."""
    rank = rng.randrange(ranks)
    return [[rank] * m for _ in range(ranks)]


def uneven(rng: random.Random, ranks: int, m: int) -> Routing:
    """Draw sorted destinations. Each sender sends most of its rows to one rank, which differs between senders."""
    return [sorted(rng.choices(range(ranks), [5 * (d == (s + 1) % ranks) + 0.2 for d in range(ranks)], k=m)) for s in range(ranks)]  # fmt: skip


def none(rng: random.Random, ranks: int, m: int) -> Routing:
    return [[-1] * m for _ in range(ranks)]


DRAWS: dict[str, Draw] = {f.__name__: f for f in (uniform, some_nowhere, to_one, uneven, none)}
MIXED: tuple[Draw, ...] = (uniform, none, to_one, some_nowhere, uneven)  # for successive calls


def expected(routing: Routing, ys: Sequence[torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [W, m, N] and counts of one rank, given the results ys [m, N] of all ranks."""
    m, n = ys[0].shape
    out, counts = torch.zeros(len(ys), m, n, dtype=ys[0].dtype), torch.zeros(len(ys), dtype=torch.int32)
    for s, (destinations, y) in enumerate(zip(routing, ys, strict=True)):
        rows = [i for i, d in enumerate(destinations) if d == rank]
        out[s, : len(rows)], counts[s] = y[rows], len(rows)
    return out, counts


def sent_back(routing: Routing, douts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Return the gradients [m, N] of one rank's rows, given all ranks' douts [W, m, N]."""
    dy, numbers = torch.zeros_like(douts[0][0]), [0] * len(douts)
    for i, d in enumerate(routing[rank]):
        if 0 <= d < len(douts):
            dy[i] = douts[d][rank, numbers[d]]
            numbers[d] += 1
    return dy


class Caller:
    """Calls of a stream-ordered program. Operations on the stream rewrite the inputs before each call and copy the
    results, without any synchronisation."""

    def __init__(self, world: weft.World, m: int, n: int, k: int, plan: str | Plan, dtype: torch.dtype) -> None:
        self.world, self.sizes, self.plan, self.dtype = world, (m, n, k), plan, dtype
        self.held: dict[str, torch.Tensor] = {}
        self.seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # (name, result, expected result)

    def put(self, name: str, values: torch.Tensor) -> torch.Tensor:
        t = self.held.get(name)
        if t is None or t.shape != values.shape:
            t = self.held[name] = self.world.empty(values.shape, values.dtype)
        self.world.call(lambda: t.copy_(values), [], [t], self.world.current_stream())
        return t

    def see(self, name: str, result: torch.Tensor, wanted: torch.Tensor) -> None:
        kept = self.world.empty(result.shape, result.dtype)
        self.world.call(lambda: kept.copy_(result), [result], [kept], self.world.current_stream())
        self.seen.append((name, kept, wanted))

    def inputs(self, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return x, weight and bias of every rank."""
        m, n, k = self.sizes
        ranks = range(self.world.size)
        xs = [draw(100 * seed + r, m, k, dtype=self.dtype) for r in ranks]
        ws = [draw(100 * seed + 40 + r, n, k, dtype=self.dtype) * 0.1 for r in ranks]
        return xs, ws, [draw(100 * seed + 80 + r, n, dtype=self.dtype) for r in ranks]

    def call(self, seed: int, routing: Routing, bias: bool = False, gradient: bool = False, into: bool = False) -> None:
        """Make one call, and, with a gradient, its backward pass. Every second rank has a bias."""
        world, me = self.world, self.world.rank
        xs, ws, bs = self.inputs(seed)
        ys = [x.double() @ w.double().t() + (b.double() if bias and r % 2 == 0 else 0) for r, (x, w, b) in enumerate(zip(xs, ws, bs, strict=True))]  # fmt: skip
        x, w, b = self.put("x", xs[me]), self.put("w", ws[me]), self.put("b", bs[me]) if bias and me % 2 == 0 else None
        destinations = self.put("destinations", torch.tensor(routing[me], dtype=torch.int32))
        out = self.put("out", torch.ones(world.size, *ys[0].shape, dtype=self.dtype)) if into else None
        x, w, b = (None if t is None else t.detach().requires_grad_(gradient) for t in (x, w, b))
        operands = [t for t in (x, w, b) if t is not None]
        result, counts = weft.matmul_all_to_all_routed(
            x, w, b, destinations=destinations, world=world, plan=self.plan, out=out
        )
        assert out is None or result is out
        wanted, wanted_counts = expected(routing, ys, me)
        self.see("out", result.detach(), wanted)
        self.see("counts", counts, wanted_counts)
        if gradient:
            # The backward pass must not read the rows after those received.
            douts = [draw(100 * seed + 90 + r, *wanted.shape, dtype=self.dtype) for r in range(world.size)]
            dy = sent_back(routing, douts, me).double()
            gradients = torch.autograd.grad(result, operands, self.put("dout", douts[me]))
            expected_grads = dy @ ws[me].double(), dy.t() @ xs[me].double(), dy.sum(0)
            for name, t, expected_grad in zip(("dx", "dw", "db"), gradients, expected_grads, strict=False):
                self.see(name, t, expected_grad)

    def error(self) -> float:
        """Return the largest error of the results; counts and zero rows must be exact."""
        self.world.synchronize()
        worst = 0.0
        for name, result, wanted in self.seen:
            if name == "counts":
                assert torch.equal(result.cpu(), wanted), (name, result, wanted)
            elif name == "out":
                is_zero = (wanted == 0).all(-1)
                assert not result.cpu()[is_zero].any(), "rows after the received ones must be zero"
            scale = wanted.double().abs().max()
            if name == "counts" or not scale:
                assert name == "counts" or not result.any(), name
                continue
            worst = max(worst, distance(result.double().cpu(), wanted.double()))
            assert ((result.double().cpu() - wanted.double()).abs() <= 2.0**-6 * scale).all(), (
                f"{name}: an element differs"
            )
        return worst


def routed_case(
    world: weft.World, m: int, n: int, k: int, plan: str | Plan, *, draws: Sequence[Draw] = MIXED, calls: int = 5,
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> float:  # fmt: skip
    """Return the error of calls with different routings, and of their gradients."""
    caller, rng = Caller(world, m, n, k, plan, dtype), random.Random(seed)
    for call in range(calls):
        caller.call(seed * 50 + call, draws[call % len(draws)](rng, world.size, m), **options)
    return caller.error()
