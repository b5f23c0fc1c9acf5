"""Random calls of every op, counted: torchrun --nproc-per-node N tests/gpu_fuzz.py --out DIR [--seconds S] [--calls C]

A round draws an op, a plan, the rows of every rank, and a layer: N, K, dtype, with a bias or without. It makes a few calls of
them, each of other inputs, on a stream, with or without `out`, one rank late; or it captures them in a CUDA graph that is replayed
with new inputs. Calls of one round on several streams are in no order but the library's; rounds follow each other in order, as
different ops on two streams must. Results are compared on the device with what float32 says, and read once in a while.

Every rank draws the same from (seed, number of the round), so `--seed S --only I` repeats round I alone, `--only I:J` those from I to
J - 1. A seed also fixes the layers, rows and plans that its rounds draw from, so that few kernels are compiled; another seed
takes others. Rank 0 writes DIR/fuzz<N>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import draw

import weft
from weft import moe
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.plans import Fused, Plan, Signaled, TwoShot

GATHER, SCATTER, ALL, TO_ALL = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
NORM, SUM, MOE = "all_reduce_rms_norm", "all_reduce", "moe"
OPS = (GATHER, SCATTER, ALL, TO_ALL, NORM, SUM, MOE)
STREAMS = ("fuzz a", "fuzz b")
BATCH = 200  # calls between two looks at the results
NAMED = 20  # wrong calls that are written out
DTYPES = (torch.bfloat16, torch.float16)
Result = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Scale:
    """What is drawn from: (N, K) of layers, most rows, how many shapes, rows of a tile, and of the pools that inputs are cut from."""

    sizes: tuple[tuple[int, int], ...]
    most: int
    shapes: int
    tile: int
    pool: int


GPU = Scale(((1024, 512), (1032, 264), (520, 2056)), 1500, 24, 128, 4096)
SMALL = Scale(((64, 32), (40, 24)), 40, 7, 16, 128)


@dataclass(frozen=True)
class Call:
    """at: where in the pools its inputs begin. late: the rank that starts late, by so many cycles; -1: none."""

    at: int
    stream: str
    late: int
    cycles: int
    into: bool


@dataclass(frozen=True)
class Round:
    """rows: of every rank. whole: also what few ask for: the gathered activation, a full residual, tiles in the plan's order, limits of an MoE
    layer.
    replays: 0, or of a graph of the calls."""

    index: int
    op: str
    plan: str | Plan
    layer: int
    shape: int
    rows: tuple[int, ...]
    whole: bool
    calls: tuple[Call, ...]
    replays: int


class Layer:
    """Weights and inputs of all ranks in float32, and this rank's. x [W, pool, K] for GEMMs, y [W, pool, N] for sums."""

    def __init__(self, world: weft.World, seed: int, n: int, k: int, dtype: torch.dtype, bias: bool, pool: int) -> None:
        def made(of: int, *shape: int) -> torch.Tensor:
            return draw(seed + of, *shape, dtype=dtype).to(world.device)

        me, size = world.rank, world.size
        self.n, self.k, self.dtype = n, k, dtype
        x, y, weight, biases = (
            made(1, size, pool, k),
            made(2, size, pool, n),
            made(3, size, n, k) * 0.1,
            made(4, size, n),
        )
        self.x, self.y, self.weight = x[me].clone(), y[me].clone(), weight[me].clone()
        self.own_bias, self.bias = (biases[me].clone(), biases[0].clone()) if bias else (None, None)
        self.residual, self.scale, self.shift = made(5, pool, n), 1 + 0.1 * made(6, n), made(7, n) if bias else None
        self.norm = "layer" if bias else "rms"
        self.wide_x, self.wide_y, self.wide_weight = x.float(), y.float(), weight.float()
        self.wide_biases = biases.float() if bias else torch.zeros_like(biases, dtype=torch.float32)
        # A result is off by its own rounding and those of the partial sums, each half an eps of what is about as large.
        self.bound = 8 * torch.finfo(dtype).eps

    def __repr__(self) -> str:
        return f"N {self.n}, K {self.k}, {self.dtype}, {'with' if self.bias is not None else 'without'} bias"


class Experts:
    """Of a layer with H = K and I = N: two experts a rank, of all ranks in float32 and this rank's; and of its tokens in the pool two
    routes each, some of them to none."""

    K = 2

    def __init__(self, world: weft.World, seed: int, layer: Layer, pool: int) -> None:
        e, i, h, device = 2 * world.size, layer.n, layer.k, world.device
        w13, w2 = (
            (draw(seed + of, *shape, dtype=layer.dtype) * 0.1).to(device)
            for of, shape in ((8, (e, 2 * i, h)), (9, (e, h, i)))
        )
        own = slice(2 * world.rank, 2 * world.rank + 2)
        self.w13, self.w2 = moe.pack(w13[own], world=world), w2[own].clone()
        self.wide = w13.float(), w2.float()
        g = torch.Generator().manual_seed(seed + world.rank)
        ids = torch.rand(pool, e, generator=g).topk(self.K, -1).indices
        self.ids = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -1, ids).int().to(device)
        self.weights = torch.rand(ids.shape, generator=g).to(device)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for e, (w13, w2) in enumerate(zip(*self.wide, strict=True)):
            gate, up = (x @ w13.t()).chunk(2, -1)
            out += (weights * (ids == e)).sum(1, keepdim=True) * ((torch.nn.functional.silu(gate) * up) @ w2.t())
        return out


class Fuzz:
    """The rounds of one seed on one World."""

    def __init__(self, world: weft.World, seed: int, scale: Scale) -> None:
        self.world, self.seed, self.scale = world, seed, scale
        rng = random.Random(f"{seed}")
        self.layers = [
            Layer(world, 100 * i, *rng.choice(scale.sizes), dtype, rng.random() < 0.5, scale.pool)
            for i, dtype in enumerate(DTYPES)
        ]
        self.experts = [Experts(world, 100 * i, layer, scale.pool) for i, layer in enumerate(self.layers)]
        self.shapes = shapes(rng, world.size, scale)
        self.routings = []
        for rows in self.shapes:
            to = [[rng.randrange(world.size) for _ in range(m)] for m in rows]
            sent = [[i for i, d in enumerate(ranks) if d == world.rank] for ranks in to]
            index = [torch.tensor(rows, dtype=torch.int64, device=world.device) for rows in sent]
            self.routings.append((weft.route(to[world.rank], world=world), index))
        self.plans = {op: plans(world, op, rng) for op in OPS}
        self.errors = torch.zeros(
            2 * BATCH + 64 * 3, device=world.device
        )  # over its bound, of calls since the last look
        self.pending: list[tuple[Round, int]] = []  # the round that made each, and which of its calls it is
        self.held: list[Any] = []  # graphs that may still run

    def draw(self, index: int) -> Round:
        rng = random.Random(f"{self.seed} {index}")
        op, layer, shape = rng.choice(OPS), rng.randrange(len(self.layers)), rng.randrange(len(self.shapes))
        rows = self.shapes[shape]
        if op == NORM and not sum(rows):
            op = SUM
        replays = rng.choice([3, 8]) if rng.random() < 0.1 and sum(rows) else 0
        calls = []
        places = [rng.randrange(self.scale.pool - sum(rows)) for _ in range(3)]  # few: launches are kept by address
        for _ in range(rng.randrange(1, 4) if replays else rng.randrange(1, 9)):
            late = rng.randrange(self.world.size) if rng.random() < 0.3 else -1
            stream = "" if replays or rng.random() < 0.5 else rng.choice(STREAMS)
            calls.append(Call(rng.choice(places), stream, late, rng.randrange(1000, 300_000), rng.random() < 0.3))
        plan = rng.choice(self.plans[op])
        if op == MOE and plan == "sequential":
            replays = 0  # it reads counts on the host
        whole = rng.random() < 0.3 and not (replays and plan == "auto")  # whose tiles a graph may be the first to have
        return Round(index, op, plan, layer, shape, rows, whole, tuple(calls), replays)

    def said(self, r: Round) -> str:
        return f"seed {self.seed}, round {r.index}: {r}, {self.layers[r.layer]}"

    def run(self, r: Round) -> int:
        """Enqueue a round; the number of its calls."""
        self.join()
        call = CALLS[r.op](self, r)
        before = len(self.pending)
        if r.replays:
            self.graph(r, call)
        else:
            for c in r.calls:
                with self.world.on(self.stream(c.stream)):
                    given, want = call.given(c.at), call.want(c.at)
                    self.wait(c)
                    self.compare(r, call.run(given, self.out(r, want, c)), want)
        return len(self.pending) - before

    def graph(self, r: Round, call: Calls) -> None:
        """The calls once as they are, then captured, and replayed with inputs from elsewhere."""
        static = [call.given(c.at) for c in r.calls]
        static = [tuple(t.clone() for t in given) for given in static]
        outs = [self.out(r, call.want(c.at), c) for c in r.calls]
        for c, given, out in zip(r.calls, static, outs, strict=True):
            self.compare(r, call.run(given, out), call.want(c.at))
        results, replay = self.captured(lambda: [call.run(given, out) for given, out in zip(static, outs, strict=True)])
        self.held.append((replay, static, outs, results))
        for i in range(1, r.replays + 1):
            at = [(c.at + 97 * i) % (self.scale.pool - sum(r.rows)) for c in r.calls]
            for start, given in zip(at, static, strict=True):
                for held, new in zip(given, call.given(start), strict=True):
                    held.copy_(new)
            self.wait(r.calls[i % len(r.calls)])
            replay()
            for start, got in zip(at, results, strict=True):
                self.compare(r, got, call.want(start))

    def captured(self, fn: Callable[[], list[Result]]) -> tuple[list[Result], Callable[[], Any]]:
        """fn's results, and what makes them again in the same memory: where there are no graphs, fn itself."""
        if self.world.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = fn()
            return results, graph.replay
        results = fn()

        def again() -> None:
            for held, new in zip(results, fn(), strict=True):
                for old, t in zip(held, new, strict=True):
                    old.copy_(t)

        return results, again

    def stream(self, name: str) -> Any:
        return self.world.side_stream(name, urgent=False) if name else self.world.current_stream()

    def join(self) -> None:
        """Everything on every stream before what comes next."""
        main, others = self.world.current_stream(), [self.stream(name) for name in STREAMS]
        for other in others:
            self.world.wait_event(main, self.world.record(other))
        for other in others:
            self.world.wait_event(other, self.world.record(main))

    def wait(self, c: Call) -> None:
        if c.late == self.world.rank and self.world.device.type == "cuda":
            torch.cuda._sleep(c.cycles)

    def out(self, r: Round, want: Result, c: Call) -> torch.Tensor | None:
        """Where the call is to write, full of NaN; None where it chooses."""
        tiles = r.whole and r.op in (SCATTER, ALL)
        if not c.into or tiles:
            return None
        return self.world.zeros(tuple(want[0].shape), self.layers[r.layer].dtype).fill_(float("nan"))

    def compare(self, r: Round, got: Result, want: Result) -> None:
        """The largest error of an element, against its own size and its tensor's, over the bound; NaN where one is NaN."""
        layer, worst = self.layers[r.layer], []
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape and g.dtype == layer.dtype, f"{list(g.shape)} {g.dtype}, not {list(w.shape)}"
            if w.numel():
                worst.append(((w - g).abs() / (w.abs() + w.square().mean().sqrt() + 1e-6)).max())
        if worst:
            self.errors[len(self.pending)] = torch.stack(worst).max() / layer.bound
        again = self.pending and self.pending[-1][0] is r
        self.pending.append((r, self.pending[-1][1] + 1 if again else 0))

    def verify(self) -> list[tuple[Round, int, float]]:
        """Collective. The calls since the last look, and of each its largest error on any rank, over the bound."""
        self.join()
        self.world.synchronize()
        errors = self.errors[: len(self.pending)].tolist()
        by_call = zip(*self.world.exchange(errors), strict=True)
        worst = [max(e if e == e else float("inf") for e in ranks) for ranks in by_call]
        made = [(*which, e) for which, e in zip(self.pending, worst, strict=True)]
        self.errors.zero_()
        self.pending.clear()
        self.held.clear()
        return made


def shapes(rng: random.Random, size: int, scale: Scale) -> list[tuple[int, ...]]:
    """Rows of every rank: none, one in all or each, whole tiles, all of one rank, and drawn ones, even, balanced and uneven. Triton
    compiles for one row, and for multiples of 16, so few sums are such."""
    few = (1,) + (0,) * (size - 1) if rng.random() < 0.5 else (1,) * size
    made = [(0,) * size, few, (scale.tile,) * size, (0,) * (size - 1) + (scale.tile + 3,)]
    while len(made) < scale.shapes:
        m, kind = rng.randrange(2, scale.most), len(made) % 3
        even = -(-m // size)
        cuts = sorted(rng.choice([0, rng.randrange(m), m]) for _ in range(size - 1))
        uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, m], strict=True))
        rows = ((even,) * size, tuple(balanced_rows(m, size)), uneven)[kind]
        if sum(rows) % 16:
            made.append(rows)
    return made


def plans(world: weft.World, op: str, rng: random.Random) -> list[str | Plan]:
    """ "auto" and every kind, some in one of several forms. Multicast needs an address that stands for all GPUs."""
    found: list[str | Plan] = ["auto"]
    for kind in REGISTRY[op].kinds:
        forms: list[str | Plan] = [kind]
        if kind == "fused":
            usual = REGISTRY[op].default(world, Fused)
            forms.append(replace(usual, pullers=0) if op == GATHER else replace(usual, batch=3, lag=3, forward=2))
        elif kind == "signaled":
            signaled: Any = REGISTRY[op].default(world, Signaled)
            forms += [replace(signaled, groups=(1, 1)), replace(signaled, copies=True)]
        elif kind == "two_shot":
            forms += [TwoShot(post=True), TwoShot(warps=8, rows=4, bulk=True), TwoShot(rows=2, pull=True)]
        if kind != "multicast":
            found.append(rng.choice(forms))
    return found


# -- the ops: what a call is given, what it does, and what float32 says of it --------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """given(at): this rank's inputs. run(given, out): the op. want(at): its results."""

    given: Callable[[int], Result]
    run: Callable[[Result, torch.Tensor | None], Result]
    want: Callable[[int], Result]


def gather_calls(f: Fuzz, r: Round) -> Calls:
    world, layer, me = f.world, f.layers[r.layer], f.world.rank
    rows = None if len(set(r.rows)) == 1 else r.rows

    def run(given: Result, out: torch.Tensor | None) -> Result:
        y = weft.all_gather_matmul(
            given[0],
            layer.weight,
            layer.own_bias,
            world=world,
            plan=r.plan,
            out=out,
            return_gathered=r.whole,
            rows=rows,
        )
        return y if isinstance(y, tuple) else (y,)

    def want(at: int) -> Result:
        full = torch.cat([layer.wide_x[p, at : at + m] for p, m in enumerate(r.rows)])
        y = full @ layer.wide_weight[me].t() + layer.wide_biases[me]
        return (y, full) if r.whole else (y,)

    return Calls(lambda at: (layer.x[at : at + r.rows[me]],), run, want)


def reduce_calls(f: Fuzz, r: Round) -> Calls:
    """Also in the order of tiles that a plan leaves, through the residual add and the norm that read it."""
    world, layer, m = f.world, f.layers[r.layer], sum(r.rows)
    lo = sum(r.rows[: world.rank]) if r.op == SCATTER else 0
    hi = lo + r.rows[world.rank] if r.op == SCATTER else m
    op: Any = getattr(weft, r.op)
    given_rows = r.op == SCATTER and list(r.rows) != balanced_rows(m, world.size)
    more: dict[str, Any] = dict(world=world, plan=r.plan, **({"rows": r.rows} if given_rows else {}))

    def run(given: Result, out: torch.Tensor | None) -> Result:
        x, residual = given
        if not r.whole:
            return (op(x, layer.weight, layer.bias, out=out, **more),)
        tiles, remap = op(x, layer.weight, layer.bias, reorder=False, **more)
        normed: Any = weft.rms_norm(tiles, layer.scale, 1e-5, world=world, residual=residual, remap=remap)
        return (weft.residual_add(tiles, residual, world=world, remap=remap), *normed)

    def want(at: int) -> Result:
        parts = torch.bmm(layer.wide_x[:, at + lo : at + hi], layer.wide_weight.transpose(1, 2))
        y = parts.sum(0) + layer.wide_biases[0]
        if not r.whole:
            return (y,)
        y = y + layer.residual[at : at + hi - lo].float()
        return (y, y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-5) * layer.scale.float(), y)

    return Calls(lambda at: (layer.x[at : at + m], layer.residual[at : at + hi - lo]), run, want)


def to_all_calls(f: Fuzz, r: Round) -> Calls:
    world, layer, (routing, index) = f.world, f.layers[r.layer], f.routings[r.shape]

    def run(given: Result, out: torch.Tensor | None) -> Result:
        x, weight, bias = given[0], layer.weight, layer.own_bias
        return (weft.matmul_all_to_all(x, weight, bias, destinations=routing, world=world, plan=r.plan, out=out),)

    def want(at: int) -> Result:
        parts = zip(layer.wide_x, index, layer.wide_weight, layer.wide_biases, strict=True)
        return (torch.cat([x[at:][rows] @ w.t() + b for x, rows, w, b in parts]),)

    return Calls(lambda at: (layer.x[at : at + r.rows[world.rank]],), run, want)


def norm_calls(f: Fuzz, r: Round) -> Calls:
    world, layer, m = f.world, f.layers[r.layer], sum(r.rows)
    own = balanced_rows(m, world.size)
    lo = 0 if r.whole else sum(own[: world.rank])
    hi = m if r.whole else lo + own[world.rank]

    def run(given: Result, out: torch.Tensor | None) -> Result:
        x, residual = given
        return weft.all_reduce_rms_norm(
            x, residual, layer.scale, 1e-5, bias=layer.shift, norm=layer.norm, full_residual=r.whole, out=out, world=world,
            plan=r.plan,
        )  # fmt: skip

    def want(at: int) -> Result:
        total = layer.wide_y[:, at : at + m].sum(0) + layer.residual[at : at + m].float()
        y = total - total.mean(1, keepdim=True) if layer.norm == "layer" else total
        y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-5) * layer.scale.float()
        return y if layer.shift is None else y + layer.shift.float(), total[lo:hi]

    return Calls(lambda at: (layer.y[at : at + m], layer.residual[at + lo : at + hi]), run, want)


def sum_calls(f: Fuzz, r: Round) -> Calls:
    layer, m = f.layers[r.layer], sum(r.rows)
    return Calls(
        lambda at: (layer.y[at : at + m],),
        lambda given, out: (weft.all_reduce(given[0], world=f.world, plan=r.plan, out=out),),
        lambda at: (layer.wide_y[:, at : at + m].sum(0),),
    )


def moe_calls(f: Fuzz, r: Round) -> Calls:
    """With the tokens of every rank, or, `whole`, without: up to as many as any round has, and with room for this one's rows."""
    world, layer, experts, me = f.world, f.layers[r.layer], f.experts[r.layer], f.world.rank
    limits: dict[str, Any] = dict(rows=r.rows)
    if r.whole:
        limits = dict(max_tokens=f.scale.most + f.scale.tile, max_rows=experts.K * sum(r.rows))

    def given(at: int) -> Result:
        there = slice(at, at + r.rows[me])
        return layer.x[there], experts.ids[there], experts.weights[there]

    def run(given: Result, out: torch.Tensor | None) -> Result:
        return (moe.moe(*given, experts.w13, experts.w2, **limits, world=world, plan=r.plan, out=out),)

    def want(at: int) -> Result:
        x, ids, weights = given(at)
        return (experts(x.float(), ids, weights),)

    return Calls(given, run, want)


CALLS = {
    GATHER: gather_calls, SCATTER: reduce_calls, ALL: reduce_calls, TO_ALL: to_all_calls, NORM: norm_calls, SUM: sum_calls,
    MOE: moe_calls,
}  # fmt: skip


# -- the driver ----------------------------------------------------------------------------------------------------------------


def run(
    world: weft.World, out: Path, seed: int, seconds: float, calls: int, only: Sequence[int] = (), scale: Scale = GPU
) -> dict[str, Any]:
    """Rounds from 0 until `calls` are made or `seconds` are over, or those of `only`, of which nothing is written; what rank 0 writes."""
    start, fuzz, index = time.time(), Fuzz(world, seed, scale), 0
    kinds_of: Counter[str] = Counter()
    failed: list[str] = []
    found: dict[str, Any] = dict(world=world.size, seed=seed, calls=0, wrong=0, largest=0.0, seconds=0.0, failed=failed)

    def write(ended: str) -> None:
        found.update(seconds=round(time.time() - start, 1), ended=ended, kinds=dict(sorted(kinds_of.items())))
        if world.rank == 0 and not only:
            (out / f"fuzz{world.size}.json").write_text(json.dumps(found, indent=1))

    def look() -> None:
        for r, call, error in fuzz.verify():
            found["calls"] += 1
            found["largest"] = max(found["largest"], error) if error < 1e30 else found["largest"]
            if error <= 1:
                continue
            found["wrong"] += 1
            if len(failed) < NAMED:
                failed.append(f"{error:.3g} x its bound: call {call} of {fuzz.said(r)}")
                if world.rank == 0:
                    print(f"WRONG by {failed[-1]}", flush=True)
        write("not finished")

    write("not finished")  # a run that is killed stays at this
    try:
        for index in only or itertools.count():
            r = fuzz.draw(index)
            kinds_of[f"{r.op} {r.plan if isinstance(r.plan, str) else r.plan.kind}"] += fuzz.run(r)
            if len(fuzz.pending) >= BATCH:
                look()
                if max(world.exchange(time.time() - start)) > seconds:
                    break
            if not only and found["calls"] + len(fuzz.pending) >= calls:
                break
        look()
    except Exception as e:
        print(f"ended by {e!r}\nat the latest in {fuzz.said(fuzz.draw(index))}", flush=True)
        write(f"rank {world.rank}, round {index}: {e!r}"[:600])
        raise
    write("")
    return found


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--calls", type=int, default=1_000_000)
    p.add_argument("--seed", type=int, help="default: the time")
    p.add_argument("--only", help="I or I:J: these rounds alone")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    seed = world.exchange(int(time.time()))[0] if a.seed is None else a.seed
    lo, _, hi = (a.only or "").partition(":")
    only = range(int(lo), int(hi or int(lo) + 1)) if lo else ()
    found = run(world, a.out, seed, a.seconds, a.calls, only)
    if world.rank == 0:
        rate = 60 * found["calls"] / found["seconds"]
        said = f"{found['calls']} calls, {found['wrong']} wrong, {found['seconds']} s, {rate:.0f} a minute"
        print(f"fuzz on {world.size} GPUs, seed {seed}: {said}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
