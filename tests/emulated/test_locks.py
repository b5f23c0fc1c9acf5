"""Every lock that a call acquires is needed. Without the lock, two concurrent calls on two streams of a rank share
memory, or compute a wrong result."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_all_reduce import PLANS
from tests.emulated.cases_dispatch_combine import exchange_case
from tests.emulated.cases_expert_parallel import whole_experts
from tests.emulated.cases_models import TINY
from tests.emulated.cases_moe import Layer, Model, reference_gradients, routed, values_of
from tests.emulated.cases_router import some_ids, torch_balance
from tests.emulated.cases_streams import BOUND, OPS, Call
from tests.gates import some
from weft import World, moe
from weft.models import Batch, Cache, Llama
from weft.nn.weave import LayerPlan
from weft.plans import (
    Decomposed,
    FlagGated,
    FusedGatherByCopies,
    HeadParallel,
    OneShot,
    Plan,
    Segmented,
    TwoLevel,
    TwoShotPull,
)
from weft.scale import SMALL_SIGNALED, SMALL_TILE
from weft.transport.memory import Lock

SOURCE = Path(weft.__file__).parent
SEEDS = range(8)
STREAMS = ("first", "second")
COPIED = FusedGatherByCopies(tile=SMALL_TILE)
BY_COPIES = type(SMALL_SIGNALED)(ctas=1, tile=SMALL_TILE, copies=True)
PULL = TwoShotPull(warps=4, stages=2)


@dataclass(frozen=True)
class Taken:
    """A lock that a function acquires, and calls on two streams that require it. `site` is the file and the function;
    `holder` is the lock's name, or the class of the memory that is locked."""

    site: str
    holder: str
    run: Callable[[World], None]
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.site}, {self.holder}"


def in_turn(*calls: tuple[str, str | Plan]) -> Callable[[World], None]:
    """Alternate between two calls of each operator and plan."""

    def main(world: World) -> None:
        results = []
        for i in range(4):
            op, plan = calls[i % 2]
            call = Call(op, 0.0, STREAMS[i % 2], 16, 32, 32, i // 2)
            with on_stream(world, call.stream):
                results.append(OPS[op].run(world, call, plan))
        world.synchronize()
        assert max(distance(*pair) for pair in results) < BOUND

    return main


def twice(site: str, holder: str, op: str, plan: str | Plan, nodes: int = 1) -> Taken:
    return Taken(site, holder, in_turn((op, plan), (op, plan)), nodes)


def backward_passes(world: World) -> None:
    """Run forward passes on both streams, then backward passes on both, which the locks of forward passes do not
    order."""
    layer = Layer(9, 2, 1, 16, 8, torch.bfloat16)
    model, results = Model(world, layer, False), []
    for _ in range(2):
        passes = []
        for i, name in enumerate(STREAMS):
            operands = [routed(i, rank, 9, layer, world.size) for rank in range(world.size)]
            expected, (x, ids, weights, shared, dy) = reference_gradients(model, operands), operands[world.rank]
            leaves = values_of(model, (x.requires_grad_(), weights, shared))
            with on_stream(world, name):
                passes.append((name, whole_experts(world, model, ids, leaves), x, dy, expected["x"]))
        for name, y, x, dy, dx in passes:
            with on_stream(world, name):
                results.append((*torch.autograd.grad(y, x, dy), dx))
    world.synchronize()
    assert max(distance(*pair) for pair in results) < 1.2e-2


def backward_of_halves(world: World) -> None:
    """Run the backward passes of second halves on both streams. Then run the backward passes of first halves, which
    gather nothing before they write scratch memory."""
    layer, passes, results = Layer(9, 2, 1, 16, 16, torch.bfloat16), [], []
    model = Model(world, layer, False, tp_size=world.size)
    for i, name in enumerate(STREAMS):
        operands = [routed(i, rank, 9, layer, world.size) for rank in range(world.size)]
        expected, (x, ids, weights, _, dy) = reference_gradients(model, operands), operands[world.rank]
        common = dict(world=world, plan="dispatched")
        with on_stream(world, name):
            hidden, routes = weft.all_gather_grouped_matmul(
                x.requires_grad_(), ids, weights, model.local_weights.w13, inner=model.inner, keep="rows", **common
            )
            y = weft.grouped_matmul_reduce_scatter(hidden, routes, ids, model.local_weights.w2, **common)
        passes.append((name, y, hidden, x, dy, expected["x"]))
    gradients = []
    for name, y, hidden, _, dy, _ in passes:
        with on_stream(world, name):
            gradients += torch.autograd.grad(y, hidden, dy)
    for (name, _, hidden, x, _, dx), dhidden in zip(passes, gradients, strict=True):
        with on_stream(world, name):
            results.append((*torch.autograd.grad(hidden, x, dhidden), dx))
    world.synchronize()
    assert max(distance(*pair) for pair in results) < 1.2e-2


def combine_elsewhere(world: World) -> None:
    """Call combine on a different stream from dispatch, without passing the rows, because passing them would order the
    streams."""
    layer = Layer(9, 2, 1, 16, 8, torch.bfloat16)
    x, ids, weights, *_ = routed(0, world.rank, 9, layer, world.size)
    for _ in range(2):
        with on_stream(world, STREAMS[0]):
            rows, handle = moe.dispatch(x, ids, weights, experts=layer.experts, world=world)
        with on_stream(world, STREAMS[1]):
            y = moe.combine(world.zeros(rows.shape, rows.dtype), handle)
    world.synchronize()
    assert not y.any()


def decoders(world: World) -> None:
    """Run a decoder in two parts, each with its own cache."""
    model, ids, logits = Llama(TINY, world=world), torch.arange(12) * 5 % 96, []
    for i in range(4):
        with on_stream(world, STREAMS[i % 2]):
            cache = Cache(TINY, world=world, slots=1, max_len=12)
            logits.append(model(ids, Batch.prefill([12]), cache, LayerPlan("woven", 6)))
    world.synchronize()
    assert all(torch.equal(actual, logits[0]) for actual in logits)


def exchange(world: World) -> None:
    assert exchange_case(world, hidden=40, tokens=(17, 3), calls=4, flight=1, alignment=16, streams=STREAMS) == 0


def losses(world: World) -> None:
    results = []
    for i in range(4):
        logits, ids = draw(i, 90, 12, dtype=torch.float32), some_ids(90, 2, 12, i)
        expected = torch_balance(logits, ids)
        with on_stream(world, STREAMS[i % 2]):
            results.append((moe.load_balancing_loss(logits, ids, world=world), expected))
    world.synchronize()
    assert all(distance(*pair) < 1e-4 for pair in results)


GATHER, SCATTER, PRODUCT_SUM = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SUM, TO_RANKS, ROUTED, ATTENTION = "all_reduce", "matmul_all_to_all", "matmul_all_to_all_routed", "gathered_attention"
SUMS, COPIES, LEVELS = "two-shot all-reduce", "copy buffers", TwoLevel()
TAKEN = [
    Taken("ops/all_reduce/runs.py prepare_decomposed", SUMS, in_turn((SUM, Decomposed()), (SUM, PULL))),
    twice("ops/matmul_all_to_all/two_level.py run_exchange", COPIES, TO_RANKS, LEVELS, 2),
    Taken("ops/all_reduce/runs.py prepare_decomposed", COPIES, in_turn((SUM, Decomposed()), (TO_RANKS, BY_COPIES))),
    twice("ops/all_reduce/runs.py _count", SUMS, SUM, PULL),
    twice("ops/all_reduce/multicast.py prepare_multicast", SUMS, SUM, PLANS["multicast"]),
    Taken("ops/matmul_reduce/two_level.py run_reduce_all", COPIES, in_turn((PRODUCT_SUM, LEVELS), (SUM, LEVELS)), 2),
    twice("ops/all_reduce/two_level.py prepare_sum", COPIES, SUM, LEVELS, 2),
    twice("ops/all_gather_matmul/runs.py _by_pull_programs", "Arena", GATHER, "fused"),
    twice("ops/matmul_reduce/runs.py prepare_fused", "Arena", SCATTER, "fused"),
    twice("transport/copy_engine.py stage", COPIES, GATHER, Decomposed()),
    twice("transport/copy_engine.py reduce_rows", COPIES, SCATTER, Decomposed()),
    twice("transport/low_latency.py prepare_posting", "Thirds", SUM, OneShot(warps=4)),
    twice("ops/matmul_reduce/signaled.py _by_collectives", "Signals", SCATTER, "signaled"),
    twice("ops/matmul_reduce/signaled.py _scatter_by_copies", COPIES, SCATTER, BY_COPIES),
    twice("ops/matmul_all_to_all/op.py run_signaled", "Signals", TO_RANKS, "signaled"),
    twice("ops/matmul_all_to_all/op.py run_signaled", COPIES, TO_RANKS, BY_COPIES),
    twice("ops/matmul_all_to_all_routed/runs.py prepare_fused", "Arena", ROUTED, "fused"),
    twice("ops/attention/head_parallel.py prepare_forward", "attention heads", ATTENTION, HeadParallel()),
    twice("transport/copy_engine.py __init__", COPIES, GATHER, FlagGated(tile_m=8, cluster_m=1)),
    twice("transport/copy_engine.py prepare_exchange", "attention keys", ATTENTION, Segmented()),
    twice("ops/moe/expert_parallel/dispatched.py prepare_dispatched", "moe", "moe", "dispatched"),
    twice("ops/moe/expert_parallel/fused.py prepare_fused", "moe", "moe", "fused"),
    twice("ops/moe/expert_parallel/low_latency.py prepare_low_latency", "moe", "moe", "low_latency"),
]
TAKEN += [
    Taken("ops/moe/expert_parallel/backward.py backward", "moe", backward_passes),
    Taken("ops/moe/dispatch_combine/op.py launch_dispatch", "moe.dispatch 0", exchange),
    Taken("ops/moe/dispatch_combine/op.py launch_combine", "moe.dispatch 0", combine_elsewhere),
    Taken("ops/moe/tensor_parallel/backward.py first_half", "moe", backward_of_halves),
    Taken("models/llama.py hidden", "decoder", decoders),
    Taken("ops/moe/routing/losses.py _partials", "partial sums of losses", losses),
]
# Functions in which the mutation skips a lock, and the case that must detect it.
ELSEWHERE = {
    "ops/matmul.py matmul": "GEMM, shared tiles, two streams",
    "ops/matmul_all_to_all_routed/runs.py return_fused": "routed, gradients, two streams",
    "ops/moe/tensor_parallel/dispatched.py acquire_arena": "experts in parts, two streams",
}


def name_of(world: World, holder: Any) -> str:
    names = [key[1] for key, value in world._cache.items() if value is holder and isinstance(holder, Lock)]
    return names[0] if names else type(holder).__name__


def without(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the function skip the lock from now on. Return a list to which each skip adds an entry."""
    order, dropped = World.order, []

    def kept(world: World, holder: Any, stream: Any) -> None:
        caller = sys._getframe(1).f_code
        function = caller.co_qualname.partition(".<locals>")[0].rpartition(".")[2]  # the function that creates the run
        site = f"{Path(caller.co_filename).relative_to(SOURCE)} {function}"
        if (site, name_of(world, holder)) == (taken.site, taken.holder):
            dropped.append(site)
        else:
            order(world, holder, stream)

    monkeypatch.setattr(World, "order", kept)
    return dropped


def emulate(taken: Taken, seed: int) -> None:
    """Run the calls of both streams concurrently, even if they might not fit on the SMs: serialising them would hide
    the missing lock."""

    def main(world: World) -> None:
        world.backend.ledgers = None
        taken.run(world)

    weft.spmd(main, 2 * taken.nodes, backend="emulated", nodes=taken.nodes, seed=seed, ahead=True)


@pytest.mark.parametrize("taken", some(TAKEN, 2), ids=str)
def test_a_lock_that_is_not_taken_is_missed(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(taken, 0)
    dropped = without(taken, monkeypatch)
    with pytest.raises((weft.WeftError, AssertionError)):
        for seed in SEEDS:
            emulate(taken, seed)
    assert dropped


def sites() -> Iterator[str]:
    """Yield every function that acquires a lock or creates a run that acquires one."""
    for path in sorted(path for path in SOURCE.rglob("*.py") if ".order(" in path.read_text()):
        blocks = [ast.parse(path.read_text())]
        blocks += [node for node in blocks[0].body if isinstance(node, ast.ClassDef)]
        for function in itertools.chain(*(block.body for block in blocks)):
            if isinstance(function, ast.FunctionDef):
                calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                names = {
                    ast.unparse(call) for call in calls if isinstance(call, ast.Attribute) and call.attr == "order"
                }
                if names & {"world.order", "node.order"}:
                    yield f"{path.relative_to(SOURCE)} {function.name}"


def test_every_lock_is_taken_away_by_a_test() -> None:
    assert set(sites()) == {taken.site for taken in TAKEN} | set(ELSEWHERE)
