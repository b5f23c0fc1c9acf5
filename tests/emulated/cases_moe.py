"""What the steps of an MoE layer must compute; each function runs on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from weft.ops.moe.call import Layer, MoeCall, MoeOperands, Weights
from weft.ops.moe.expert_parallel import dispatched, fused, low_latency
from weft.ops.moe.expert_parallel.op import MOE
from weft.plans import Dispatched, FusedMoe, LowLatency, Plan
from weft.scale import SMALL_DISPATCHED

Ids = Callable[[int, int, int, Layer, int], torch.Tensor]  # call, rank, T, layer, world: int32 [T, k]


def tables_of(ids_all: torch.Tensor, me: int, local: int, rows: int, block_m: int) -> dict[str, torch.Tensor]:
    ranks, capacity, k = ids_all.shape
    slots, sources = torch.full((ranks, capacity, k), -1), torch.full((rows,), -1)
    offsets, tiles, received, targets, row = [0], [], [], torch.zeros(ranks, dtype=torch.int64), 0
    for expert in range(local):
        first, of_row = row, []
        for wave in range(ranks):
            source = (me - wave) % ranks
            for t, slot in (ids_all[source] == me * local + expert).nonzero().tolist():
                slots[source, t, slot], sources[row] = row, source * capacity + t
                of_row.append(wave)
                row += 1
        for lo in range(0, len(of_row), block_m):
            inside = of_row[lo : lo + block_m]
            tiles.append((inside[-1], expert, first + lo, inside[0]))
            targets[inside[0] : inside[-1] + 1] += 1
        received.append(row - first)
        row = -(-row // block_m) * block_m
        offsets.append(row)
    listed = [(first, expert, lo, last) for last, expert, first, lo in sorted(tiles)]
    return dict(
        slots=slots.flatten(), sources=sources, offsets=torch.tensor(offsets), tiles=torch.tensor(listed).view(-1, 4),
        count=torch.tensor([len(listed)]), listed=torch.tensor([sum(t[3] <= j for t in listed) for j in range(ranks)]), received=torch.tensor(received), targets=targets,
    )  # fmt: skip


# -- routings ----------------------------------------------------------------------------------------------------------


def at_random(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * call + rank)
    return torch.rand(t, layer.experts, generator=g).topk(layer.k, -1).indices


def some_nowhere(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(100 * call + rank + 50)
    ids = at_random(call, rank, t, layer, world)
    return torch.where(torch.rand(ids.shape, generator=g) < 0.4, -1, ids)


def to_few(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    """Of all tokens the same experts, others in every call: all of one rank, and most experts are empty."""
    return ((call * layer.k + torch.arange(layer.k)) % layer.experts).expand(t, -1)


def nowhere(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    return torch.full((t, layer.k), -1)


def in_turn(call: int, rank: int, t: int, layer: Layer, world: int) -> torch.Tensor:
    return (at_random, to_few, nowhere, some_nowhere)[call % 4](call, rank, t, layer, world)


# -- a layer -----------------------------------------------------------------------------------------------------------


def interleaved(w: torch.Tensor, block: int) -> torch.Tensor:
    """[El, 2 I, ..], gate then up, in blocks of gate and of up rows [El, blocks, 2, block, ..], the last padded."""
    gate, up = w.chunk(2, 1)
    inner = gate.shape[1]
    blocks = -(-inner // block)
    both = w.new_zeros(w.shape[0], 2, blocks * block, *w.shape[2:])
    both[:, 0, :inner], both[:, 1, :inner] = gate, up
    return both.view(w.shape[0], 2, blocks, block, *w.shape[2:]).transpose(1, 2).contiguous()


def expert(
    x: torch.Tensor, w13: Any, w2: Any, b13: Any, b2: Any, activation: str, kept: torch.dtype | None = None
) -> torch.Tensor:
    """kept: what the input of the activation is rounded to, of which its gradient takes no notice."""
    both = x @ w13.t() + b13
    if kept is not None:
        both = both.detach().to(kept).to(both.dtype) + (both - both.detach())
    if activation == "gelu":
        return torch.nn.functional.gelu(both) @ w2.t() + b2
    gate, up = both.chunk(2, -1)
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ w2.t() + b2
    return (torch.nn.functional.silu(gate) * up) @ w2.t() + b2


class Model:
    """All ranks' weights of one layer, and this rank's on its device."""

    def __init__(self, world: weft.World, layer: Layer, biases: bool, seed: int = 0) -> None:
        e, h, i, wide = layer.experts, layer.hidden, layer.inner, 1 if layer.activation == "gelu" else 2
        self.layer, dtype = layer, layer.dtype
        self.w13, self.w2 = (
            draw(seed + 1, e, wide * i, h, dtype=dtype) * 0.2,
            draw(seed + 2, e, h, i, dtype=dtype) * 0.2,
        )
        self.b13, self.b2 = (draw(seed + j, e, n, dtype=dtype) * biases for j, n in ((3, wide * i), (4, h)))
        if layer.activation == "gpt_oss":
            self.w13 *= 8  # so that some are clamped
        local = e // world.size
        own = slice(world.rank * local, (world.rank + 1) * local)
        block = world.scale.interleave
        w13, b13 = self.w13[own], self.b13[own]
        if wide == 2:
            w13, b13 = interleaved(w13, block), interleaved(b13, block)
        there = [t.contiguous().to(world.device) for t in (w13, self.w2[own], b13, self.b2[own])]
        self.own = Weights(*there[: 4 if biases else 2])

    @property
    def flat(self) -> Weights:
        """As the steps take them."""
        w13, w2, b13, b2 = self.own
        local, h = w13.shape[0], w13.shape[-1]
        return Weights(w13.reshape(local, -1, h), w2, None if b13 is None else b13.reshape(local, -1), b2)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [T, H]."""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for e in range(self.layer.experts):
            t, slot = (ids == e).nonzero(as_tuple=True)
            y = expert(
                x[t].float(), *(w[e].float() for w in (self.w13, self.w2, self.b13, self.b2)), self.layer.activation
            )
            out.index_add_(0, t, weights[t, slot, None] * y)
        return out


def of_plan(plan: Plan) -> Any:
    """The module that runs such plans."""
    return {Dispatched: dispatched, FusedMoe: fused, LowLatency: low_latency}[type(plan)]


def moe_case(
    world: weft.World, experts: int = 4, k: int = 2, hidden: int = 32, inner: int = 24, tokens: Sequence[int] = (7, 5, 0, 9),
    activation: str = "swiglu", biases: bool = False, shared: bool = False, calls: int = 3, ids_of: Ids = at_random,
    plan: Plan | Sequence[Plan] = SMALL_DISPATCHED, dtype: torch.dtype = torch.bfloat16, layers: int = 1, streams: Sequence[str] = ("main",),
) -> float:  # fmt: skip
    """Largest error over calls with new tokens and routings, each through all layers, by the plans and on the streams in turn. Nothing synchronises between
    them: inputs are written again, and results taken, by work on the stream."""
    models = [
        Model(
            world, Layer(max(tokens) + 1 + 5 * j, experts, k, hidden + 8 * j, inner, dtype, activation), biases, 10 * j
        )
        for j in range(layers)
    ]
    plans = [plan] if isinstance(plan, Plan) else plan
    for model in models:
        assert all(of_plan(p).fits(world, model.layer, p) is None for p in plans)
    buffers: dict[Any, torch.Tensor] = {}
    kept = []
    for call in range(calls):
        for j, model in enumerate(models):
            counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
            name = streams[call % len(streams)]
            with on_stream(world, name):
                one = one_call(
                    world,
                    model,
                    counts,
                    1000 * call + 100 * j,
                    call,
                    ids_of,
                    plans[len(kept) % len(plans)],
                    shared,
                    (buffers, name),
                )
                kept.append(one)
    world.synchronize()
    return max(distance(got, want) for got, want in kept)


def one_call(
    world: weft.World, model: Model, counts: Sequence[int], seed: int, call: int, ids_of: Ids, plan: Plan,
    shared: bool, held: tuple[dict[Any, torch.Tensor], str],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result, and what it should be."""
    layer, me, stream = model.layer, world.rank, world.current_stream()
    xs = [draw(seed + r, t, layer.hidden, dtype=layer.dtype) for r, t in enumerate(counts)]
    theirs = [
        (ids_of(call, r, t, layer, world.size).int(), draw(seed + 50 + r, t, layer.k, dtype=torch.float32).abs())
        for r, t in enumerate(counts)
    ]
    ids, weights = theirs[me]
    more = draw(seed + 99, *xs[me].shape, dtype=layer.dtype)

    def there(name: str, values: torch.Tensor) -> torch.Tensor:
        """In memory that is written again for every call."""
        t = held[0].setdefault((held[1], name, values.shape), world.empty(values.shape, values.dtype))
        world.call(lambda: t.copy_(values), [], [t], stream)
        return t

    given = [there("x", xs[me]), there("ids", ids), there("weights", weights), *model.flat]
    operands = MoeOperands(*given, shared=there("shared", more) if shared else None)
    result = there("out", xs[me])
    MOE.runs[type(plan)](world, MoeCall(counts[me], None, layer), plan, operands, result)
    got = world.empty(result.shape, layer.dtype)
    world.call(lambda: got.copy_(result), [result], [got], stream)
    want = model(xs[me], ids, weights)
    return got, want + more.float() if shared else want
