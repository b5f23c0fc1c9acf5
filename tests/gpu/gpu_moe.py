"""The GPU checks of the MoE layer; gpu_main.py runs them. `checks` yields a name, a bound and a function for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import Model, at_random, in_turn, some_nowhere, to_few
from weft import moe
from weft.ops.moe.call import Layer
from weft.ops.moe.expert_parallel.op import NARROW_32, NARROW_64
from weft.plans import Dispatched, GemmTile, Plan

BOUND = 1.2e-2
BF = torch.bfloat16


def routed(world: weft.World, layer: Layer, tokens: int, call: int, ids_of: Callable = at_random) -> tuple:
    x = draw(10 * call + world.rank, tokens, layer.hidden).to(world.device)
    ids = ids_of(call, world.rank, tokens, layer, world.size).int().to(world.device)
    weights = draw(10 * call + 5 + world.rank, tokens, layer.k, dtype=torch.float32).abs().to(world.device)
    return x, ids, weights


def moe_by_plan(
    model: Model, world: weft.World, inputs: tuple, plan: str | Plan, rows: list[int] | None = None
) -> torch.Tensor:
    w = model.local_weights
    return moe.moe(
        *inputs, w.w13, w.w2, b13=w.b13, b2=w.b2, activation=model.layer.activation, rows=rows, world=world, plan=plan
    )


def against(
    world: weft.World,
    plan: str | Plan,
    layer: Layer,
    tokens: list[int],
    ids_of: Callable = at_random,
    biases: bool = False,
) -> float:
    """Make calls without a synchronisation between them; the reference runs on the host."""
    model, kept = Model(world, layer, biases), []
    for call in range(4):
        counts = [tokens[(r + call) % len(tokens)] for r in range(world.size)]
        inputs = routed(world, layer, counts[world.rank], call, ids_of)
        kept.append((moe_by_plan(model, world, inputs, plan, counts), model(*(t.cpu() for t in inputs))))
    world.synchronize()
    return max((distance(actual.cpu(), expected) for actual, expected in kept if actual.numel()), default=0.0)


def graph_replays(world: weft.World, plan: str | Plan) -> float:
    """Replay a CUDA graph with new tokens and routings each time; the bits must equal those of eager calls."""
    layer = Layer(256, 16, 4, 512, 256, BF)
    model = Model(world, layer, False)
    held = routed(world, layer, 256, 0)
    moe_by_plan(model, world, held, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_by_plan(model, world, held, plan)
    wrong = 0
    for call in range(1, 6):
        fresh = routed(world, layer, 256, call, in_turn)
        expected = moe_by_plan(model, world, fresh, plan).clone()
        for t, new in zip(held, fresh, strict=True):
            t.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        wrong += int(not torch.equal(out, expected))
    return float(wrong)


def many_calls(world: weft.World, count: int) -> float:
    """Alternate between three routings, with random late ranks: the bits must be the same every time."""
    layer = Layer(300, 16, 4, 512, 256, BF)
    model = Model(world, layer, False)
    inputs = [routed(world, layer, 300, call, ids_of) for call, ids_of in enumerate((at_random, to_few, some_nowhere))]
    expected = [moe_by_plan(model, world, g, "dispatched").clone() for g in inputs]
    rng = random.Random(world.rank)
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(count):
        if rng.random() < 0.1:
            torch.cuda._sleep(rng.randrange(1000, 400000))
        wrong += (moe_by_plan(model, world, inputs[i % 3], "dispatched") != expected[i % 3]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def two_layers(world: weft.World) -> float:
    """Alternate, without synchronisation, between layers of different sizes that share memory."""
    layers = [Layer(200, 8, 2, 256, 512, BF), Layer(64, 16, 4, 1024, 128, BF, "gelu")]
    models = [Model(world, layer, False, 10 * i) for i, layer in enumerate(layers)]
    kept = []
    for call in range(6):
        model = models[call % 2]
        inputs = routed(world, model.layer, model.layer.max_tokens_per_rank, call)
        kept.append((moe_by_plan(model, world, inputs, "dispatched"), model(*(t.cpu() for t in inputs))))
    world.synchronize()
    return max(distance(actual.cpu(), expected) for actual, expected in kept)


def gate_case(world: weft.World) -> float:
    logits = draw(3, 1000, 128).to(world.device)
    ids, weights = moe.gate(logits, 8, world=world)
    top = logits.float().softmax(-1).topk(8)
    same = (ids.sort(1).values == top.indices.sort(1).values).all(1)
    if same.float().mean() < 0.98:  # topk may order equal logits differently
        return float("inf")
    expected = top.values / top.values.sum(1, keepdim=True)
    return distance(weights[same], expected[same])


def over_groups(world: weft.World) -> float:
    """Alternate between calls over pairs of ranks, each of which holds all experts, and calls over all ranks. With 2
    ranks, the pair is a separate World too."""
    pair = world.split(world.rank // 2)
    layer = Layer(200, 8, 2, 256, 128, BF)
    models, kept = [Model(w, layer, False) for w in (pair, world)], []
    for call in range(6):
        w, model = (pair, world)[call % 2], models[call % 2]
        inputs = routed(world, layer, 200 - 10 * call, call)
        kept.append((moe_by_plan(model, w, inputs, "dispatched"), model(*(t.cpu() for t in inputs))))
    pair.synchronize()
    world.synchronize()
    return max(distance(actual.cpu(), expected) for actual, expected in kept)


def of_any_length(world: weft.World, plan: str) -> float:
    """Make calls that all have the same max_tokens: no rank knows the other ranks' numbers of tokens, and no rank
    allocates memory after the first call."""
    layer = Layer(300, 8 * world.size, 4, 256, 128, BF)
    model, kept, sizes = Model(world, layer, False), [], set()
    for call, tokens in enumerate((300, 0, 7, 299, 1, 128)):
        inputs = routed(world, layer, (tokens + 31 * world.rank) % 301, call)
        actual = moe.moe(*inputs, *model.local_weights[:2], max_tokens=300, world=world, plan=plan)
        sizes.add((len(world._cache), len(world._channels)))
        kept.append((actual, model(*(t.cpu() for t in inputs))))
    world.synchronize()
    wrong = max(distance(actual.cpu(), expected) for actual, expected in kept if actual.numel())
    return wrong if len(sizes) == 1 else float("inf")


def left_out(world: weft.World) -> float:
    """In a graph, route all tokens of all ranks to rank 0's second expert, for which the rank has space for 128 rows
    and one tile. The dropped routes cause one error, and the order of source ranks determines the routes that are
    dropped. A call without drops follows."""
    layer = Layer(800, 4 * world.size, 1, 256, 128, BF)
    model, received = Model(world, layer, False), torch.zeros(4, dtype=torch.int32, device=world.device)
    x, ids, weights = routed(world, layer, 800, 0)
    ids.fill_(-1)

    def call() -> torch.Tensor:
        return moe.moe(
            x, ids, weights, *model.local_weights[:2], max_rows=128, received=received, world=world, plan="dispatched"
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ids.fill_(1)
    world.synchronize()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    message = ""
    try:
        world.synchronize()
    except weft.Overflow as e:
        message = str(e)
    room = 5 * 128
    lost = 2 * (800 * world.size - room)
    reported = f"its experts received {lost} rows more"
    if world.rank:
        reported = "rank 0's experts received 1600 rows of this rank's tokens more"
    right = message.startswith(f"rank {world.rank}: {reported}")
    right = right and received.tolist() == [0, room * (world.rank == 0), 0, 0]
    expected = model(x.cpu(), ids.cpu(), weights.cpu())
    expected[room if world.rank == 0 else 0 :] = 0
    wrong = distance(out.cpu(), expected) if world.rank == 0 else float(out.abs().max())
    world.exchange("looked")
    ids.copy_(torch.arange(800, device=world.device)[:, None] % (64 * layer.experts))  # few of these ids are experts
    graph.replay()
    world.synchronize()
    wrong = max(wrong, distance(out.cpu(), model(x.cpu(), ids.cpu(), weights.cpu())))
    return wrong if right else float("inf")


def before_the_experts(world: weft.World) -> float:
    """Run the router, the limit and the replicas in a graph. The bits must equal those of eager calls, and the counts
    must have the right sum."""
    e = 4 * world.size
    table = torch.arange(2 * e, dtype=torch.int32).view(2, e).t().contiguous()  # two replicas of each expert
    layer = moe.MoE(
        256, 128, e, 2, world=world, capacity_factor=0.8, drop="probability", placement=table, count_received=True
    )
    for i, p in enumerate((layer.router, layer.w13, layer.w2)):
        p.copy_((draw(i + 10 * world.rank * (i > 0), *p.shape) * 0.2).to(world.device))
    x = draw(world.rank, 333, 256).to(world.device)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        wrong = 0
        for call in range(1, 4):
            x.copy_(draw(100 * call + world.rank, 333, 256))
            expected = layer(x).clone()
            counts = layer.received.clone(), layer.dropped.clone()
            layer.received.zero_()
            layer.dropped.zero_()
            graph.replay()
            world.synchronize()
            same = torch.equal(layer.received, counts[0]) and torch.equal(layer.dropped, counts[1])
            wrong += not (same and torch.equal(out, expected))
            rows, gone = zip(*world.exchange((int(counts[0].sum()), int(counts[1].sum()))), strict=True)
            wrong += sum(rows) + sum(gone) != 2 * 333 * world.size or not sum(gone)
    return float(wrong)


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    common = dict(max_tokens_per_rank=0, experts=8 * size, k=4, hidden=512, inner=256, dtype=BF)

    def layer(**changes: object) -> Layer:
        return Layer(**(common | changes))  # type: ignore[arg-type]

    yield "moe gate", 1e-3, partial(gate_case, world)
    for plan in ("sequential", "dispatched"):
        yield f"moe {plan}, even", BOUND, partial(against, world, plan, layer(max_tokens_per_rank=384), [384])
        yield (
            f"moe {plan}, uneven and none",
            BOUND,
            partial(against, world, plan, layer(max_tokens_per_rank=300), [300, 0, 1, 37]),
        )
        yield f"moe {plan}, to few", BOUND, partial(against, world, plan, layer(max_tokens_per_rank=200), [200], to_few)
        yield (
            f"moe {plan}, some nowhere",
            BOUND,
            partial(against, world, plan, layer(max_tokens_per_rank=150), [150], some_nowhere),
        )
        for act in ("gelu", "gpt_oss"):
            biased = layer(max_tokens_per_rank=100, activation=act, hidden=720, inner=360)
            yield f"moe {plan}, {act}, biases", BOUND, partial(against, world, plan, biased, [100], at_random, True)
    yield (
        "moe dispatched, 128 columns a tile",
        BOUND,
        partial(
            against, world, Dispatched(tile=GemmTile(stages=4, block_n=128)), layer(max_tokens_per_rank=260), [260]
        ),
    )
    for name, narrow in (("32", NARROW_32), ("64", NARROW_64)):
        case = partial(against, world, narrow, layer(max_tokens_per_rank=260), [260])
        yield f"moe dispatched, two programs an SM of {name} rows", BOUND, case
    yield "moe in a graph", 0.0, partial(graph_replays, world, "dispatched")
    yield "moe of two layers", BOUND, partial(two_layers, world)
    yield "moe over groups", BOUND, partial(over_groups, world)
    for plan in ("sequential", "dispatched"):
        yield f"moe {plan}, any number of tokens", BOUND, partial(of_any_length, world, plan)
    yield "moe, rows left out", BOUND, partial(left_out, world)
    yield "moe, limit and replicas in a graph", 0.0, partial(before_the_experts, world)
    yield "moe 1000 calls, delays", 0.0, partial(many_calls, world, 1000)
