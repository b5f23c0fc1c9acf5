"""The parts of random calls (gpu_fuzz.py). The module defines the layers, experts and attention of all ranks of a
World. For each op, it defines the arguments of a call, the call itself, and the float32 reference of its results and
gradients.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_attention import Shape, attention
from weft import moe
from weft.lang.mapping import balanced_rows

GATHER, SCATTER, ALL, TO_ALL = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
NORM, SUM, MOE, ATTENTION = "all_reduce_rms_norm", "all_reduce", "moe", "gathered_attention"
TENSOR, EXCHANGE = "tensor_parallel_experts", "dispatch_combine"
ROUTINGS = ("random", "some nowhere", "nowhere", "one expert", "own rank", "in turn", "router")
Result = tuple[torch.Tensor, ...]
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """`plan` is the plan's kind. With `parts`, calls run in a World of some of the ranks, or in a second World of all
    ranks."""

    op: str
    plan: str
    gradients: bool = False
    parts: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.plan}{', gradients' * self.gradients}{', other Worlds' * self.parts}"


@dataclass(frozen=True)
class Call:
    """`offset` is the start of the call's inputs in the pools. `late` is the rank that starts late, by `cycles` clock
    cycles; -1 means no rank."""

    offset: int
    stream: str
    late: int
    cycles: int
    into: bool


@dataclass(frozen=True)
class Round:
    """`world` selects the World, and `rows` are the numbers of rows of all ranks. With `whole` the call also uses rare
    options: the gathered activation, a full residual, tiles in the plan's order, the limits of an MoE layer, or
    dispatch and combine without the layer. `form` selects one of an op's forms. `replays` is the number of times a
    graph of the calls is replayed, or 0 without a graph."""

    index: int
    kind: Kind
    world: int
    plan: Any
    layer: int
    shape: int
    rows: tuple[int, ...]
    whole: bool
    routing: str
    form: int
    calls: tuple[Call, ...]
    replays: int

    @property
    def given_rows(self) -> tuple[int, ...] | None:
        return None if len(set(self.rows)) == 1 else self.rows


class Layer:
    """The weights and inputs of all ranks, and the rounding error of the results. x [W, pool, K] is the input of GEMMs,
    y [W, pool, N] the input of sums, and noise [W, ..] the input of backward passes."""

    def __init__(self, world: weft.World, seed: int, n: int, k: int, dtype: torch.dtype, bias: bool, pool: int) -> None:
        def drawn(seed_offset: int, *shape: int) -> torch.Tensor:
            return draw(seed + seed_offset, *shape, dtype=dtype).to(world.device)

        me, size = world.rank, world.size
        self.n, self.k, self.dtype = n, k, dtype
        self.x, self.y, self.weights = drawn(1, size, pool, k), drawn(2, size, pool, n), drawn(3, size, n, k) * 0.1
        self.noise = drawn(10, size, pool * max(n, k))
        biases = drawn(4, size, n)
        self.weight = self.weights[me].clone()
        self.own_bias, self.bias = (biases[me].clone(), biases[0].clone()) if bias else (None, None)
        self.residual, self.scale, self.shift = drawn(5, pool, n), 1 + 0.1 * drawn(6, n), drawn(7, n) if bias else None
        self.norm = "layer" if bias else "rms"
        self.wide_biases = biases.float() if bias else torch.zeros_like(biases, dtype=torch.float32)
        # A result may deviate by the rounding of the result and of the partial sums, each of which is half an eps of
        # their size.
        self.bound = 8 * torch.finfo(dtype).eps

    def __repr__(self) -> str:
        return f"N {self.n}, K {self.k}, {self.dtype}, {'with' if self.bias is not None else 'without'} bias"

    def gradient(self, rank: int, offset: int, shape: Sequence[int]) -> torch.Tensor:
        count = functools.reduce(lambda a, b: a * b, shape, 1)
        return self.noise[rank, offset : offset + count].view(*shape)


class Experts:
    """The experts of all ranks in a layer with H = K and I = N, two per rank. For each kind of routing, every token of
    the pool has two routes."""

    K = 2

    def __init__(self, world: weft.World, seed: int, layer: Layer, pool: int) -> None:
        self.world, self.layer, size = world, layer, world.size
        e, i, h, device = 2 * size, layer.n, layer.k, world.device
        self.w13, self.w2 = (
            (draw(seed + seed_offset, *shape, dtype=layer.dtype) * 0.1).to(device)
            for seed_offset, shape in ((8, (e, 2, i, h)), (9, (e, h, i)))
        )
        g = torch.Generator().manual_seed(seed)
        shape = size, pool, self.K
        drawn = torch.rand(size, pool, e, generator=g)
        some = drawn.topk(self.K, -1).indices
        rank, token, slot = (torch.arange(n).view([-1 if i == j else 1 for j in range(3)]) for i, n in enumerate(shape))
        ids = {
            "random": some,
            "some nowhere": torch.where(torch.rand(shape, generator=g) < 0.2, -1, some),
            "nowhere": torch.full(shape, -1),
            "one expert": torch.where(slot == 0, e - 1, -1).expand(shape),
            "own rank": (2 * rank + slot).expand(shape),
            "in turn": (token * self.K + slot + rank) % e,
        }
        self.ids = {name: expert_ids.int().contiguous().to(device) for name, expert_ids in ids.items()}
        self.weights = torch.rand(shape, generator=g).to(device)
        scoring = random.Random(seed).choice(("softmax", "sigmoid", "softmax_after"))
        logits = (4 * drawn).view(-1, e).to(device)
        routed, weighed = moe.gate(logits, self.K, world=world, scoring=scoring)
        self.ids["router"], self.router_weights = routed.view(shape), weighed.view(shape)
        self.factors = 1 + torch.arange(e, device=device) % 5 / 4  # these sums are exact

    def routes(self, rank: int, routing: str) -> Result:
        """Return the ids and weights of the pool's tokens."""
        return self.ids[routing][rank], (self.router_weights if routing == "router" else self.weights)[rank]

    @functools.cached_property
    def own_weights(self) -> Result:
        """Return this rank's weights in the layout of `moe`."""
        return self.columns(self.world.size, 1, self.layer.n, (self.w13, self.w2))

    def columns(self, groups: int, tp_size: int, inner: int, whole: Tensors) -> Result:
        """Return this rank's part of all experts' matrices. `tp_size` ranks share the same experts, and each rank holds
        `inner` columns of every expert."""
        group, part = divmod(self.world.rank, tp_size)
        local = len(whole[0]) // groups
        own_experts, cols = slice(group * local, (group + 1) * local), slice(part * inner, (part + 1) * inner)
        w13 = whole[0][own_experts][:, :, cols].flatten(1, 2)
        return moe.pack(w13, world=self.world), whole[1][own_experts][:, :, cols].contiguous()


def of_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, (w13_of_expert, w2_of_expert) in enumerate(zip(w13, w2, strict=True)):
        gate, up = x @ w13_of_expert[0].t(), x @ w13_of_expert[1].t()
        weight = (weights * (ids == e)).sum(1, keepdim=True)
        out = out + weight * ((torch.nn.functional.silu(gate) * up) @ w2_of_expert.t())
    return out


class Heads:
    """The queries, keys and values of all ranks in one pool, [W, pool, heads, D]; the number of key heads is divisible
    by the number of ranks."""

    FORMS: Sequence[dict[str, Any]] = (
        dict(),
        dict(causal=True),
        dict(causal=True, layout="zigzag"),
        dict(causal=True, window=5, sinks=True),
        dict(causal=True, sinks=True),
    )

    def __init__(self, world: weft.World, seed: int, layer: Layer, dim: int, pool: int) -> None:
        self.kv, self.dim = world.size * max(1, 2 // world.size), dim
        shape = world.size, pool
        self.q, self.k, self.v = (
            draw(seed + seed_offset, *shape, heads, dim, dtype=layer.dtype).to(world.device)
            for seed_offset, heads in ((11, 2 * self.kv), (12, self.kv), (13, self.kv))
        )
        self.sinks = draw(seed + 14, 2 * self.kv, dtype=torch.float32).to(world.device)

    def shape(self, rows: tuple[int, ...], form: int) -> Shape:
        """Return a shape. Rows that are not split in zigzag layout are consecutive."""
        options = self.FORMS[form % len(self.FORMS)]
        if "layout" in options and rows != tuple(weft.zigzag_rows(sum(rows), len(rows))):
            options = dict(causal=True)
        return Shape(rows, 2 * self.kv, self.kv, self.dim, **options)


@functools.lru_cache(maxsize=256)
def sees(shape: Shape, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the mask of the keys to which this rank's queries attend, and the positions of every rank's keys."""
    return shape.sees(rank).to(device), *(shape.positions(r).to(device) for r in range(len(shape.rows)))


class Part:
    """All values that are drawn once for a World."""

    def __init__(self, world: weft.World, seed: int, scale: Any) -> None:
        self.world = world
        rng = random.Random(f"{seed}")
        self.layers = [
            Layer(world, 100 * i, *rng.choice(scale.sizes), dtype, rng.random() < 0.5, scale.pool)
            for i, dtype in enumerate((torch.bfloat16, torch.float16))
        ]
        self.experts = [Experts(world, 100 * i, layer, scale.pool) for i, layer in enumerate(self.layers)]
        self.heads = [Heads(world, 100 * i, layer, scale.dim, scale.pool) for i, layer in enumerate(self.layers)]
        self.most_tokens, self.shapes = scale.most + scale.tile, shapes(rng, world.size, scale)
        self.routings = []
        for rows in self.shapes:
            to = [[rng.randrange(world.size) for _ in range(m)] for m in rows]
            sent = [[i for i, d in enumerate(ranks) if d == world.rank] for ranks in to]
            index = [torch.tensor(rows, dtype=torch.int64, device=world.device) for rows in sent]
            self.routings.append((weft.route(to[world.rank], world=world), index))


def shapes(rng: random.Random, size: int, scale: Any) -> list[tuple[int, ...]]:
    """Return numbers of rows of every rank: no rows, a single row, one row per rank, whole tiles, all rows on one rank,
    and random even, balanced and uneven numbers. Few sums are 1 or a multiple of 16, because Triton compiles separate
    kernels for these."""
    one_row = (1,) + (0,) * (size - 1) if rng.random() < 0.5 else (1,) * size
    all_rows = [(0,) * size, one_row, (scale.tile,) * size, (0,) * (size - 1) + (scale.tile + 3,)]
    while len(all_rows) < scale.shapes:
        m, kind = rng.randrange(2, scale.most), len(all_rows) % 3
        even = -(-m // size)
        cuts = sorted(rng.choice([0, rng.randrange(m), m]) for _ in range(size - 1))
        uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, m], strict=True))
        rows = ((even,) * size, tuple(balanced_rows(m, size)), uneven)[kind]
        if sum(rows) % 16:
            all_rows.append(rows)
    return all_rows


# -- the ops -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """inputs_of(rank, offset) returns a rank's inputs; floating-point inputs may require gradients. `own_weights` are
    this rank's weights, which may require gradients too. run(inputs, weights, out) calls the op. `whole` are the
    weights of all ranks, and `own_gradients` extracts this rank's part of their gradients. expected(rank, inputs of all
    ranks, whole) returns a rank's results, all in float32. With `everywhere`, all ranks have the same results, which
    are counted once."""

    inputs_of: Callable[[int, int], Result]
    run: Callable[[Tensors, Tensors, torch.Tensor | None], Result]
    expected: Callable[[int, Sequence[Tensors], Tensors], Result]
    own_weights: Result = ()
    whole: Result = ()
    own_gradients: Callable[[Tensors], Result] = tuple
    everywhere: bool = False


def gather_calls(p: Part, r: Round) -> Calls:
    world, layer, me = p.world, p.layers[r.layer], p.world.rank

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        operands, options = (
            (inputs[0], weights[0], layer.own_bias),
            dict[str, Any](world=world, plan=r.plan, rows=r.given_rows),
        )
        if r.whole:
            return weft.all_gather_matmul_with_gathered(*operands, out=out, **options)
        return (weft.all_gather_matmul(*operands, out=out, **options),)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        full = torch.cat([x for (x,) in inputs])
        y = full @ whole[0][rank].t() + layer.wide_biases[rank]
        return (y, full) if r.whole else (y,)

    return Calls(
        lambda rank, offset: (layer.x[rank, offset : offset + r.rows[rank]],),
        run,
        expected,
        (layer.weight,),
        (layer.weights,),
        lambda gradients: (gradients[0][me],),
    )


def reduce_calls(p: Part, r: Round) -> Calls:
    """Return calls of a sum. Some return tiles in a plan's order, which the residual add and the norm read."""
    world, layer, m, scatter = p.world, p.layers[r.layer], sum(r.rows), r.kind.op == SCATTER
    op: Any = getattr(weft, r.kind.op)
    given_rows = scatter and list(r.rows) != balanced_rows(m, world.size)
    options: dict[str, Any] = dict(world=world, plan=r.plan, **({"rows": r.rows} if given_rows else {}))
    tiles_of = r.whole and not r.kind.gradients

    def rows_of(rank: int) -> slice:
        lo = sum(r.rows[:rank]) if scatter else 0
        return slice(lo, lo + r.rows[rank] if scatter else m)

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        x, residual = inputs
        if not tiles_of:
            return (op(x, weights[0], layer.bias, out=out, **options),)
        tiles, remap = getattr(weft, f"{r.kind.op}_tiles")(x, weights[0], layer.bias, **options)
        normed: Any = weft.rms_norm(tiles, layer.scale, 1e-5, world=world, residual=residual, remap=remap)
        return (weft.residual_add(tiles, residual, world=world, remap=remap), *normed)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        parts = [x[rows_of(rank)] @ w.t() for (x, _), w in zip(inputs, whole[0], strict=True)]
        y = torch.stack(parts).sum(0) + layer.wide_biases[0]
        if not tiles_of:
            return (y,)
        y = y + inputs[rank][1]
        return (y, y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-5) * layer.scale.float(), y)

    def inputs_of(rank: int, offset: int) -> Result:
        rows = rows_of(rank)
        return layer.x[rank, offset : offset + m], layer.residual[offset : offset + rows.stop - rows.start]

    own_gradients = lambda gradients: (gradients[0][world.rank],)  # noqa: E731
    return Calls(inputs_of, run, expected, (layer.weight,), (layer.weights,), own_gradients, everywhere=not scatter)


def to_all_calls(p: Part, r: Round) -> Calls:
    world, layer, (routing, index) = p.world, p.layers[r.layer], p.routings[r.shape]

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        x, bias = inputs[0], layer.own_bias
        return (weft.matmul_all_to_all(x, weights[0], bias, destinations=routing, world=world, plan=r.plan, out=out),)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        parts = zip(inputs, index, whole[0], layer.wide_biases, strict=True)
        return (torch.cat([x[rows] @ w.t() + b for (x,), rows, w, b in parts]),)

    return Calls(
        lambda rank, offset: (layer.x[rank, offset : offset + r.rows[rank]],),
        run,
        expected,
        (layer.weight,),
        (layer.weights,),
    )


def norm_calls(p: Part, r: Round) -> Calls:
    world, layer, m = p.world, p.layers[r.layer], sum(r.rows)
    counts = balanced_rows(m, world.size)

    def rows_of(rank: int) -> slice:
        lo = 0 if r.whole else sum(counts[:rank])
        return slice(lo, m if r.whole else lo + counts[rank])

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        x, residual = inputs
        return weft.all_reduce_rms_norm(
            x, residual, layer.scale, 1e-5, bias=layer.shift, norm=layer.norm, full_residual=r.whole, out=out, world=world,
            plan=r.plan,
        )  # fmt: skip

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        residual = inputs[0][1] if r.whole else torch.cat([part for _, part in inputs])
        total = torch.stack([x for x, _ in inputs]).sum(0) + residual
        y = total - total.mean(1, keepdim=True) if layer.norm == "layer" else total
        y = y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-5) * layer.scale.float()
        return y if layer.shift is None else y + layer.shift.float(), total[rows_of(rank)]

    def inputs_of(rank: int, offset: int) -> Result:
        rows = rows_of(rank)
        return layer.y[rank, offset : offset + m], layer.residual[offset + rows.start : offset + rows.stop]

    return Calls(inputs_of, run, expected)


def sum_calls(p: Part, r: Round) -> Calls:
    layer, m = p.layers[r.layer], sum(r.rows)
    return Calls(
        lambda rank, offset: (layer.y[rank, offset : offset + m],),
        lambda inputs, weights, out: (weft.all_reduce(inputs[0], world=p.world, plan=r.plan, out=out),),
        lambda rank, inputs, whole: (torch.stack([x for (x,) in inputs]).sum(0),),
    )


def routed(p: Part, r: Round) -> Callable[[int, int], Result]:
    """Return x, ids and weights for a rank's tokens."""
    layer, experts = p.layers[r.layer], p.experts[r.layer]

    def inputs_of(rank: int, offset: int) -> Result:
        own_rows = slice(offset, offset + r.rows[rank])
        ids, weights = experts.routes(rank, r.routing)
        return layer.x[rank, own_rows], ids[own_rows], weights[own_rows]

    return inputs_of


def moe_calls(p: Part, r: Round) -> Calls:
    """Return calls in which every rank's number of tokens is known or, with `whole`, unknown. Calls with unknown
    numbers allow up to the largest number of tokens of any round, and have space for this round's rows."""
    world, experts = p.world, p.experts[r.layer]
    limits: dict[str, Any] = dict(rows=r.rows)
    if r.whole:
        limits = dict(max_tokens=p.most_tokens, max_rows=experts.K * sum(r.rows))
    keep = moe.KEEPS[r.form % len(moe.KEEPS)]

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        return (moe.moe(*inputs, *weights, **limits, keep=keep, world=world, plan=r.plan, out=out),)

    def own_gradients(gradients: Tensors) -> Result:
        return experts.columns(world.size, 1, p.layers[r.layer].n, gradients)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        return (of_experts(*inputs[rank], *whole),)

    return Calls(routed(p, r), run, expected, experts.own_weights, (experts.w13, experts.w2), own_gradients)


def tensor_calls(p: Part, r: Round) -> Calls:
    """Return calls whose experts are split by columns over all ranks, some ranks, or none."""
    world, experts, n = p.world, p.experts[r.layer], p.layers[r.layer].n
    divisors = [s for s in range(1, world.size + 1) if world.size % s == 0 and n >= 8 * s]
    tp_size = divisors[r.form % len(divisors)]
    inner = n // tp_size // 8 * 8
    whole = experts.w13[:, :, : inner * tp_size], experts.w2[:, :, : inner * tp_size]
    common: dict[str, Any] = dict(rows=r.given_rows, tp_size=tp_size, world=world, plan=r.plan)
    keep = moe.KEEPS[r.form % len(moe.KEEPS)]

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        x, ids, of_routes = inputs
        hidden, routes = weft.all_gather_grouped_matmul(x, ids, of_routes, weights[0], inner=inner, keep=keep, **common)
        return (weft.grouped_matmul_reduce_scatter(hidden, routes, ids, weights[1], out=out, **common),)

    def own_gradients(gradients: Tensors) -> Result:
        return experts.columns(world.size // tp_size, tp_size, inner, gradients)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        return (of_experts(*inputs[rank], *whole),)

    return Calls(routed(p, r), run, expected, own_gradients(whole), whole, own_gradients)


def exchange_calls(p: Part, r: Round) -> Calls:
    """Return calls of dispatch and combine in which each expert multiplies its rows by a separate factor."""
    world, experts = p.world, p.experts[r.layer]
    own_experts = slice(2 * world.rank, 2 * world.rank + 2)
    options: dict[str, Any] = dict(layout="masked") if r.whole else dict(expert_alignment=(1, 16, 128)[r.form % 3])

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        x, ids, of_routes = inputs
        received, handle = moe.dispatch(x, ids, of_routes, experts=2 * world.size, world=world, rows=r.rows, **options)
        factors = experts.factors[own_experts].to(received.dtype)
        if r.whole:
            y = received * factors[:, None, None]
        else:
            row = torch.arange(len(received), device=received.device, dtype=torch.int32)
            expert = torch.searchsorted(handle.offsets[1:].contiguous(), row, right=True).clamp(max=1)
            y = received * factors[expert][:, None]
        return (moe.combine(y, handle, out=out),)

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        x, ids, weights = inputs[rank]
        factor = torch.where(ids >= 0, experts.factors[ids.clamp(min=0).long()] * weights, 0.0)
        return (x * factor.sum(1, keepdim=True),)

    return Calls(routed(p, r), run, expected)


def attention_calls(p: Part, r: Round) -> Calls:
    world, heads = p.world, p.heads[r.layer]
    shape = heads.shape(r.rows, r.form)
    sinks = heads.sinks if shape.sinks else None

    def inputs_of(rank: int, offset: int) -> Result:
        return tuple(t[rank, offset : offset + r.rows[rank]] for t in (heads.q, heads.k, heads.v))

    def run(inputs: Tensors, weights: Tensors, out: torch.Tensor | None) -> Result:
        return (
            weft.gathered_attention(
                *inputs, causal=shape.causal, layout=shape.layout, window=shape.window, sinks=sinks, rows=r.given_rows, world=world,
                plan=r.plan, out=out,
            ),
        )  # fmt: skip

    def expected(rank: int, inputs: Sequence[Tensors], whole: Tensors) -> Result:
        mask, *positions = sees(shape, rank, world.device)
        order = torch.cat(positions).argsort()
        k, v = (torch.cat([tensors[i] for tensors in inputs])[order] for i in (1, 2))
        return (attention(inputs[rank][0], k, v, mask, shape.dim**-0.5, sinks)[0],)

    return Calls(inputs_of, run, expected)


CALLS: dict[str, Callable[[Part, Round], Calls]] = {
    GATHER: gather_calls, SCATTER: reduce_calls, ALL: reduce_calls, TO_ALL: to_all_calls, NORM: norm_calls, SUM: sum_calls,
    MOE: moe_calls, TENSOR: tensor_calls, EXCHANGE: exchange_calls, ATTENTION: attention_calls,
}  # fmt: skip
TRAINED = (GATHER, SCATTER, ALL, MOE, TENSOR, EXCHANGE, ATTENTION)  # the operands with gradients


class Checked:
    """The calls of a round in executable form: an op's calls and, with gradients, their backward passes, with the
    comparisons."""

    def __init__(self, p: Part, r: Round) -> None:
        self.part, self.round, self.calls = p, r, CALLS[r.kind.op](p, r)
        self.layer = p.layers[r.layer]
        self.bound = self.layer.bound * (1 + r.kind.gradients)  # the factors in a gradient's products were rounded too

    def inputs_of(self, offset: int) -> Result:
        return self.calls.inputs_of(self.part.world.rank, offset)

    def run(self, inputs: Tensors, offset: int, out: torch.Tensor | None) -> Result:
        calls = self.calls
        if not self.round.kind.gradients:
            return calls.run(inputs, calls.own_weights, out)
        leaf_inputs, weights = ([leaf(t) for t in tensors] for tensors in (inputs, calls.own_weights))
        y, *_ = calls.run(leaf_inputs, weights, None)
        leaves = [t for t in (*leaf_inputs, *weights) if t.requires_grad]
        rank = 0 if calls.everywhere else self.part.world.rank
        dy = self.layer.gradient(rank, offset, y.shape)
        grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        return y.detach(), *(t if g is None else g for t, g in zip(map(torch.zeros_like, leaves), grads, strict=True))

    def error(self, actual: Tensors, expected: Tensors) -> torch.Tensor | None:
        """Return the largest error of an element, relative to the sizes of the element and of its tensor, divided by
        the bound. The result is NaN if an element is NaN, and None if there is no element. If the terms of a gradient
        cancel, its error comes from the rounding of those terms. For a routing weight, the terms are products of rows;
        for other gradients, they are about as large as the largest tensor, in float32."""
        sizes = [t.square().mean().sqrt() if t.numel() else t.new_zeros(()) for t in expected]
        least = [1e-6 + 1e-3 * self.round.kind.gradients * torch.stack(sizes).max()] * len(expected)
        if self.round.kind.gradients and self.round.kind.op in (MOE, TENSOR, EXCHANGE):
            least[2] = least[2] + sizes[0] * expected[0].shape[1] ** 0.5
        worst = []
        for g, w, size, floor in zip(actual, expected, sizes, least, strict=True):
            fits = g.shape == w.shape and g.dtype in (self.layer.dtype, torch.float32)
            assert fits, f"{list(g.shape)} {g.dtype}, expected {list(w.shape)}"
            if w.numel():
                worst.append(((w - g).abs() / (w.abs() + size + floor)).max())
        return torch.stack(worst).max() / self.bound if worst else None

    def expected(self, offset: int) -> Result:
        calls, world = self.calls, self.part.world
        inputs = [[wide(t) for t in calls.inputs_of(rank, offset)] for rank in range(world.size)]
        whole = [wide(t) for t in calls.whole]
        if not self.round.kind.gradients:
            return calls.expected(world.rank, inputs, whole)
        whole = [leaf(t) for t in whole]
        inputs = [[leaf(t) for t in tensors] for tensors in inputs]
        loss, own_results = torch.zeros((), device=world.device), None
        with torch.enable_grad():
            for rank in range(1 if calls.everywhere else world.size):
                y, *_ = calls.expected(rank, inputs, whole)
                own_results = y if calls.everywhere or rank == world.rank else own_results
                loss = loss + (y * self.layer.gradient(rank, offset, y.shape).float()).sum()
        assert own_results is not None
        floats = [t for t in inputs[world.rank] if t.requires_grad]
        grads = torch.autograd.grad(loss, [*floats, *whole], allow_unused=True)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip([*floats, *whole], grads, strict=True)]
        return own_results.detach(), *gradients[: len(floats)], *calls.own_gradients(gradients[len(floats) :])


def wide(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.is_floating_point() else t


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.is_floating_point())
