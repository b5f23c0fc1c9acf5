"""Mutation gate: break each wait, notify, barrier, fence, event edge and epoch of every kernel and op, one at a time.

A case runs one protocol. A recorded run lists the protocol's sites. For each site, some schedule must report an error
when the site is removed or weakened. EQUIVALENT lists the mutations that no schedule can show, and why they change
nothing. The test fails for an entry that no longer holds (its site is gone, or a schedule catches it). pytest's summary
prints the kill rate.
"""

from __future__ import annotations

import ast
import linecache
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import weft
from tests.emulated.cases import changed, distance, draw, on_stream
from tests.emulated.cases_all_reduce import PLANS
from tests.emulated.cases_attention import Inputs, Shape, attention, attention_case
from tests.emulated.cases_dispatch_combine import exchange_case, overfull
from tests.emulated.cases_expert_parallel import no_room_case, overfull_layers, steps, whole_experts
from tests.emulated.cases_fp8 import factors, wanted
from tests.emulated.cases_moe import in_turn, layer_case, training_case
from tests.emulated.cases_moe_fused_router import MUTATED, router_calls
from tests.emulated.cases_router import (
    some_ids,
    some_weights,
    torch_balance,
    torch_capacity,
    torch_z_loss,
)
from tests.emulated.cases_routing import Layer, drawn, routing
from tests.emulated.cases_tensor_parallel import around_layer, both_halves, first_halves, other_second_halves
from tests.emulator.mutate import Mutation, kill_rate, sites
from weft import World, check
from weft import moe as moe_functions
from weft.architectures import AMPERE
from weft.backends.barrier import wait_group
from weft.backends.emulated import spmd
from weft.compute.gemm import matmul as gemm
from weft.lang.intrinsics import wait_until
from weft.lang.mapping import balanced_rows
from weft.lang.primitives import channel_wait
from weft.nn.weave import run
from weft.ops.all_gather_matmul.kernels import all_gather_gemm, compute_tiles, pull_chunks
from weft.ops.all_reduce.kernels import multicast_shot, two_shot
from weft.ops.matmul import Shares, matmul
from weft.ops.matmul_reduce.kernels import compute_half, gemm_reduce, sum_tiles
from weft.ops.moe.expert_parallel.backward_kernels import take_gradients
from weft.ops.moe.expert_parallel.fused_kernels import (
    grid_barrier,
    make_tables,
    moe_layer,
    tiles_done,
    wait_for_step,
    wait_for_sums,
)
from weft.ops.moe.expert_parallel.kernels import (
    combine_rows,
    grouped_gemm_in,
    grouped_gemm_out,
    half_offset,
    step_increments,
    sum_ranks,
    wait_for_rows,
)
from weft.ops.moe.expert_parallel.low_latency_kernels import low_latency_gemm, routes_of_expert
from weft.ops.moe.expert_parallel.place_rows_kernels import mask_rows, place_rows
from weft.ops.moe.routing.capacity_kernels import limit_experts
from weft.ops.moe.routing.kernels import count_told, half_start_of, place_units, take_left_out, tell_sources
from weft.ops.moe.routing.losses_kernels import balance_loss, square_loss
from weft.ops.moe.tensor_parallel.kernels import keep_shards, push_shard
from weft.plans import (  # fmt: skip
    Decomposed,
    FlagGated,
    FusedGatherByCopies,
    HeadParallel,
    Multicast,
    OneShot,
    Plan,
    Segmented,
    TwoLevel,
    TwoShot,
    TwoShotCounted,
    TwoShotLowLatency,
)
from weft.scale import SMALL_DISPATCHED, SMALL_GATHER, SMALL_LOW_LATENCY, SMALL_MOE, SMALL_SIGNALED, SMALL_TILE
from weft.transport.low_latency_kernels import load_state, rotate_thirds, sum_low_latency

pytestmark = [pytest.mark.gate, pytest.mark.timeout(1800)]  # some hundred runs of a case, while another worker runs too

SEEDS = range(16)  # four with each scheduling policy
MORE = range(16, 256)  # for mutations that these seeds miss: some faults need a rare order of events
Main = Callable[[World], None]


# -- the protocols -----------------------------------------------------------------------------------------------------


def read_neighbour(world: World) -> None:
    """Every rank reads its neighbour's box between two barriers, and repeats this three times."""
    box, out = world.symmetric((8,), torch.float32, "box"), world.empty((8,), torch.float32)
    stream, to = world.current_stream(), (world.rank + 1) % world.size
    for i in range(3):
        world.call(lambda i=i: box.local.fill_(world.rank + 10 * i), [], [box.local], stream)
        world.barrier()
        world.copy(out, box.peers[to], stream)
        world.barrier()
    world.synchronize()
    assert out[0] == to + 20


class Caller:
    """Calls ops as a stream-ordered program does: operations on the caller's stream write inputs and read results."""

    def __init__(self, world: World, dtype: torch.dtype = torch.bfloat16) -> None:
        self.world, self.dtype = world, dtype
        self.tensors: dict[Any, torch.Tensor] = {}
        self.results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, key: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the tensor for a key, which every call rewrites like an activation buffer."""
        dtype = values.dtype if values.dtype in (torch.float8_e4m3fn, torch.float32) else self.dtype
        t = self.tensors.setdefault((key, values.shape), self.world.empty(values.shape, dtype))
        self.world.call(lambda: t.copy_(values), [], [t], self.world.current_stream())
        return t

    def use(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        kept = self.world.empty(actual.shape, self.dtype)
        self.world.call(lambda: kept.copy_(actual), [actual], [kept], self.world.current_stream())
        self.results.append((kept, expected))

    def check(self) -> None:
        self.world.synchronize()
        for actual, expected in self.results:
            assert distance(actual, expected) < 5e-3

    def all_gather_matmul(self, seed: int, shards: tuple[int, ...], n: int, k: int, plan: str | Plan) -> None:
        parts = [draw(seed * 100 + r, rows, k) for r, rows in enumerate(shards)]
        w = draw(seed * 100 + 50, n, k) * 0.1
        x, w_there = self.tensor("shard", parts[self.world.rank]), self.tensor("weight", w)
        rows = None if len(set(shards)) == 1 else shards
        actual, full = weft.all_gather_matmul_with_gathered(x, w_there, world=self.world, plan=plan, rows=rows)
        self.use(actual, torch.cat(parts).double() @ w.double().t())
        self.use(full, torch.cat(parts))

    def reduce(self, seed: int, m: int, n: int, k: int, plan: str | Plan, everywhere: bool) -> None:
        world = self.world
        xs = [draw(seed * 100 + r, m, k) for r in range(world.size)]
        ws = [draw(seed * 100 + 50 + r, n, k) * 0.1 for r in range(world.size)]
        bias = draw(seed * 100 + 99, n)
        op = weft.matmul_all_reduce if everywhere else weft.matmul_reduce_scatter
        x, w = self.tensor("x", xs[world.rank]), self.tensor("w", ws[world.rank])
        actual = op(x, w, self.tensor("bias", bias), world=world, plan=plan)
        expected = sum(x.double() @ w.double().t() for x, w in zip(xs, ws, strict=True)) + bias.double()
        rows = balanced_rows(m, world.size)
        self.use(actual, expected if everywhere else expected.split(rows)[world.rank])

    def of_8_bits(
        self, op: str, seed: int, shards: tuple[int, ...], n: int, k: int, plan: str | Plan, scaling: str
    ) -> None:
        world, me, m = self.world, self.world.rank, sum(shards)
        parts = [factors(seed * 100 + 10 * r, m, n, k, scaling, world.device) for r in range(world.size)]
        (x, w, xs, ws), gather = parts[me], op == AG
        rows = slice(sum(shards[:me]), sum(shards[: me + 1])) if gather else slice(0, m)
        x, xs = (parts[0][0][rows], parts[0][2][rows]) if gather else (x, xs)
        operands = {name: self.tensor(name, t) for name, t in dict(x=x, w=w, xs=xs, ws=ws).items()}
        actual = getattr(weft, op)(
            weft.ScaledTensor(operands["x"], operands["xs"], scaling),
            weft.ScaledTensor(operands["w"], operands["ws"], scaling), world=world, plan=plan,
            **({"rows": shards} if op != AR and len(set(shards)) > 1 else {}),
        )  # fmt: skip
        if gather:
            self.use(actual, wanted(parts[0][0], w, parts[0][2], ws, scaling))
        else:
            expected = sum(wanted(*part, scaling) for part in parts)
            self.use(actual, expected if op == AR else expected.split(shards)[me])

    def norm(self, seed: int, m: int, h: int, plan: str | Plan, full: bool, quantize: str | None = None) -> None:
        """Alternate between a fresh output and one symmetric tensor, which the caller overwrites and so does the next
        call. With `quantize`, the rows' scales are compared too."""
        world, rows = self.world, balanced_rows(m, self.world.size)
        xs = [draw(seed * 100 + r, m, h) for r in range(world.size)]
        old, weight = draw(seed * 100 + 50, m, h), draw(seed * 100 + 51, h)
        lo = 0 if full else sum(rows[: world.rank])
        own_rows = slice(lo, m if full else lo + rows[world.rank])
        out, dtype = None, torch.float8_e4m3fn if quantize else self.dtype
        if seed % 3 and world.multi_node_unsupported is None:
            out = world.cached(("out", m, h), lambda: world.symmetric((m, h), dtype, "out").local)
        x, r = self.tensor("x", xs[world.rank]), self.tensor("residual", old[own_rows])
        options = dict[str, Any](world=world, plan=plan, full_residual=full, out=out)
        scales = None
        if quantize:
            (_, scales, _), new = weft.all_reduce_rms_norm_quantized(x, r, weight, quantize, **options)
        else:
            y, new = weft.all_reduce_rms_norm(x, r, weight, **options)
        total = sum(x.double() for x in xs) + old.double()
        expected = total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6) * weight.double()
        if scales is not None:
            self.use(scales, expected.abs().amax(1, keepdim=True) / 448)
        else:
            self.use(y, expected)
        self.use(new, total[own_rows])
        if out is not None:  # the caller may write to the tensor until its next call
            world.call(lambda: out.zero_(), [], [out], world.current_stream())


def gathering(
    plan: str | Plan, *shapes: tuple[tuple[int, ...], int, int], calls: int = 4, captured: bool = False
) -> Main:
    """With `captured`, the first call of each shape runs as outside the capture of a CUDA graph, and all later calls as
    inside one."""

    def main(world: World) -> None:
        caller = Caller(world)
        for i in range(calls):
            if captured and i == len(shapes):
                backend: Any = world.backend
                backend.capturing, backend.captures = lambda: True, lambda stream: True
            caller.all_gather_matmul(i, *shapes[i % len(shapes)], plan)
        caller.check()

    return main


@weft.jit
def wait_on_every_sm(word, value, guard):
    """Wait on every SM for a flag that this rank's own copy engine sets."""
    wait_until(word, tl.load(value), guard, -1, -1, "gpu")


def flag_gated(world: World) -> None:
    """The kernel that waits for the flags occupies every SM, as cuBLAS's GEMM does on a GPU."""

    def wait(word: torch.Tensor, value: torch.Tensor, stream: Any) -> None:
        args = dict(word=word, value=value, guard=world.backend.guard())
        world.launch(wait_on_every_sm, world.sm_count, args, dict(num_warps=1), stream)

    world.backend.wait = wait  # type: ignore[method-assign]
    gathering(FlagGated(tile_m=8), ((16, 16), 16, 32))(world)


def reducing(plan: str | Plan, *shapes: tuple[int, int, int], everywhere: bool = False, calls: int = 4) -> Main:
    def main(world: World) -> None:
        caller = Caller(world)
        for i in range(calls):
            caller.reduce(i, *shapes[i % len(shapes)], plan, everywhere)
        caller.check()

    return main


def before_hopper(main: Main) -> Main:
    """Run as on a GPU before Hopper, where the signaled GEMM is a loop over tiles."""

    def on_ampere(world: World) -> None:
        world.backend.capability = AMPERE
        main(world)

    return on_ampere


def norming(
    plan: str | Plan, *shapes: tuple[int, int], full: bool = False, calls: int = 5, quantize: str | None = None
) -> Main:
    def main(world: World) -> None:
        caller = Caller(world)
        for i in range(calls):
            caller.norm(i, *shapes[i % len(shapes)], plan, full, quantize)
        caller.check()

    return main


def of_8_bits(op: str, plan: str | Plan, *shapes: tuple[tuple[int, ...], int, int], scaling: str = "row") -> Main:
    """Call an op around a GEMM of 8-bit operands; an op that gathers rows also gathers their scales."""

    def main(world: World) -> None:
        caller = Caller(world)
        for i in range(4):
            caller.of_8_bits(op, i, *shapes[i % len(shapes)], plan, scaling)
        caller.check()

    return main


def reducing_on_two_streams(plan: str | Plan) -> Main:
    """Make the calls of `two_streams` with a plan that has no all-gather and shares only counters between calls. With
    copies, all calls are reduce-scatters. No op drains its stream, so that calls overlap as on a GPU."""
    has_all_reduce = plan != COPIES

    def main(world: World) -> None:
        world.backend.finish = lambda stream=None: None  # type: ignore[method-assign]
        callers = {name: Caller(world) for name in ("first", "second")}
        for i in range(6):
            name = ("first", "second")[i % 2]
            with on_stream(world, name):
                callers[name].reduce(i, 96, 40, 40, plan, has_all_reduce and i // 2 % 2 == 0)
        for caller in callers.values():
            caller.check()

    return main


def to_ranks(plan: str | Plan, rows: tuple[int, ...], calls: int = 4) -> Main:
    """Send every rank's rows to random ranks, by two routings; in one of them the last rank has no rows. Each routing
    has one result tensor, which the caller reads and overwrites."""

    def main(world: World) -> None:
        caller, rng, n, k, me = Caller(world), random.Random(1), 40, 40, world.rank
        drawn = [[[rng.randrange(world.size) for _ in range(m)] for m in some] for some in (rows, (*rows[:-1], 0))]
        routings = [weft.route(to[me], world=world) for to in drawn]
        outs = [world.empty((sum(d == me for part in to for d in part), n), caller.dtype) for to in drawn]
        for i in range(calls):
            routing_index = (0, 1, 1, 0)[i % 4]
            to, out = drawn[routing_index], outs[routing_index]
            xs = [draw(i * 100 + r, len(part), k) for r, part in enumerate(to)]
            ws = [draw(i * 100 + 50 + r, n, k) * 0.1 for r in range(world.size)]
            x, w = caller.tensor("x", xs[me]), caller.tensor("w", ws[me])
            weft.matmul_all_to_all(x, w, destinations=routings[routing_index], world=world, plan=plan, out=out)
            ys = [(x.double() @ w.double().t()) for x, w in zip(xs, ws, strict=True)]
            caller.use(out, torch.cat([y[[j for j, d in enumerate(to[r]) if d == me]] for r, y in enumerate(ys)]))
        caller.check()

    return main


def two_streams(plan: str | Plan) -> Main:
    """Alternate between two streams that only the accesses to weft's own workspace order."""

    def main(world: World) -> None:
        callers = {name: Caller(world) for name in ("first", "second")}
        for i in range(4):
            for name, caller in callers.items():
                with on_stream(world, name):
                    for gather in (True, False) if i % 2 else (False, True):
                        if gather:
                            caller.all_gather_matmul(i, (16,) * world.size, 16, 32, plan)
                        else:
                            caller.reduce(i, 16 * world.size, 16, 32, plan, False)
        for caller in callers.values():
            caller.check()

    return main


# Half of a tile has a block of gate and one of up columns, and most tiles are computed by halves.
WIDE_DISPATCHED = changed(SMALL_DISPATCHED, block_n=64, per_sm=2)


def moe(*streams: str, plan: Plan = SMALL_DISPATCHED, experts: int = 4, k: int = 2) -> Main:
    """Cycle through routings of all kinds, with several tiles per expert and several tiles per row."""

    def main(world: World) -> None:
        sizes = dict(experts=experts, k=k, hidden=40, inner=40, tokens=(20, 13))
        assert layer_case(world, steps, **sizes, calls=5, ids_of=in_turn, streams=streams, plan=plan) < 5e-3

    return main


def moe_gradients(world: World) -> None:
    """Train small layers that save nothing, their rows, or also their activations, with a new routing in every call."""
    keep = "nothing", "rows", "nothing", "activation"  # no token has an expert in the third call
    sizes = dict(experts=2, k=1, hidden=16, inner=8, tokens=(5, 3), ids_of=in_turn, keep=keep)
    assert max(training_case(world, whole_experts, calls=4, wants=("x", "weights", "w13"), **sizes).values()) < 1.2e-2


def gradients_in_parts(world: World) -> None:
    """Train layers whose experts are split by columns over the ranks, with a new routing in every call."""
    sizes = dict(experts=2, k=1, hidden=16, inner=8, tokens=(3, 2), ids_of=in_turn, keep=("nothing", "rows"))
    assert (
        max(training_case(world, both_halves, tp_size=world.size, calls=4, wants=("x", "weights"), **sizes).values())
        < 1.2e-2
    )


def in_parts(*streams: str) -> Main:
    """Call layers whose experts are split by columns over the ranks."""

    def main(world: World) -> None:
        sizes = dict(tokens=(18, 5), experts=2, k=1, hidden=40, inner=16, calls=4)
        assert layer_case(world, both_halves, tp_size=world.size, **sizes, streams=streams) < 1.2e-2

    return main


def exchanging(*streams: str, layout: str = "contiguous", flight: int = 2) -> Main:
    """Keep `flight` calls pending, with routings of all kinds; experts begin at multiples of 16. Two programs share a
    rank's routes."""

    def main(world: World) -> None:
        case = dict(layout=layout, alignment=16, max_m=3 if layout == "masked" else 0, streams=streams or ("main",))
        calls = 4 // flight
        assert exchange_case(world, hidden=40, tokens=(17, 3), calls=calls, flight=flight, ids_of=in_turn, **case) == 0

    return main


def router_losses(world: World) -> None:
    """Compute the losses of logits whose rows several programs share, three times."""
    for seed in range(3):
        logits = draw(seed, 90, 12, dtype=torch.float32)
        ids = some_ids(90, 2, 12, seed)
        losses = moe_functions.load_balancing_loss(logits, ids, world=world), moe_functions.z_loss(logits, world=world)
        world.synchronize()
        for loss, expected in zip(losses, (torch_balance(logits, ids), torch_z_loss(logits)), strict=True):
            torch.testing.assert_close(loss, expected)


def capacities(world: World) -> None:
    for seed in range(2):
        ids, weights = some_ids(200, 2, 3, seed), some_weights(200, 2, seed)
        results = moe_functions.apply_capacity(ids, weights, 3, 0.5, drop="probability", world=world)
        world.synchronize()
        expected = torch_capacity(ids, weights, 3, 0.5, "probability")
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def first_half(world: World) -> None:
    assert first_halves(world, "dispatched", "sequential") < 1.2e-2


def around(world: World) -> None:
    assert around_layer(world) < 1.2e-2


def attending(shape: Shape, plan: Plan | list[Plan], *streams: str) -> Main:
    def main(world: World) -> None:
        assert attention_case(world, shape, plan, calls=4, into=True, streams=streams) < 5e-3

    return main


def attention_gradients(world: World) -> None:
    """Compute only the gradients of queries, so that no all-to-all of the keys' gradients synchronises the ranks. The
    memory of keys and values is overwritten for each call."""
    shape, held = (
        Shape((4, 4), causal=True, layout="zigzag"),
        [world.empty((4, 2, 16), torch.bfloat16) for _ in range(2)],
    )
    for seed in range(3):
        inputs, dout = Inputs(world, shape, 100 * seed), draw(seed, 4, shape.heads, shape.dim)
        q, *keys = inputs.local_qkv()
        for to, t in zip(held, keys, strict=True):
            world.call(lambda to=to, t=t: to.copy_(t), [], [to], world.current_stream())
        k, v = held
        weft.gathered_attention(q.requires_grad_(), k, v, **inputs.options(), plan="segmented").backward(dout)
        scale, wide = shape.dim**-0.5, inputs.q.double().requires_grad_()
        attention(wide, inputs.k.double(), inputs.v.double(), shape.sees(world.rank), scale, None)[0].backward(
            dout.double()
        )
        assert q.grad is not None and wide.grad is not None and distance(q.grad, wide.grad) < 8e-3


def sharing_tiles(*streams: str) -> Main:
    """Six programs compute two tiles that three programs share each, and four tiles whose ends two helpers compute.
    Calls alternate between these streams, which have no other order."""

    def main(world: World) -> None:
        for tiles, tiles_per_helper, parts in ((2, 1, 3), (4, 2, 2)):
            shares = Shares.choose(world, tiles, 6, 6)
            assert (shares.shared_tiles, shares.tiles_per_helper, shares.parts) == (tiles, tiles_per_helper, parts)
        callers = {name: Caller(world) for name in streams}
        for i in range(6):
            name = streams[i % len(streams)]
            with on_stream(world, name):
                caller, (m, n, k) = callers[name], ((16, 64, 192), (32, 64, 192))[i // len(streams) % 2]
                x, w = draw(i, m, k), draw(i + 50, n, k) * 0.1
                x_there, w_there = caller.tensor("x", x), caller.tensor("w", w)
                out = caller.tensors.setdefault(("out", m, n), world.empty((m, n), caller.dtype))
                matmul(x_there, w_there, out, world, 6)
                caller.use(out, x.double() @ w.double().t())
        for caller in callers.values():
            caller.check()

    return main


def woven_stages(world: World) -> None:
    """Run three stages of two parts, twice; every rank sums half of each part's rows."""
    w, main = torch.full((16, 16), 1 / 32), world.current_stream()
    norm = torch.ones(16)
    partials = [world.empty((4, 16), torch.float32) for _ in range(2)]
    results = []

    def compute(i: int, y: torch.Tensor) -> torch.Tensor:
        world.call(lambda: torch.mm(y, w, out=partials[i]), [y, w], [partials[i]], main)
        return partials[i]

    for _ in range(2):
        ys = [draw(i, 4, 16, dtype=torch.float32) for i in range(2)]
        residuals = [y[2 * world.rank :][:2].clone() for y in ys]
        expected = [y.double() for y in ys]
        for i in range(2):
            y, kept = expected[i], expected[i]
            for _ in range(3):
                kept = kept + world.size * (y @ w.double())
                y = kept * (kept.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
            expected[i] = y

        def reduce(k: int, i: int, partial: torch.Tensor, residuals: list[torch.Tensor] = residuals) -> torch.Tensor:
            y, residuals[i] = weft.all_reduce_rms_norm(partial, residuals[i], norm, 1e-5, world=world)
            return y

        for actual, right in zip(run(world, ys, [compute] * 3, reduce), expected, strict=True):
            kept = world.empty((4, 16), torch.float32)
            world.call(lambda actual=actual, kept=kept: kept.copy_(actual), [actual], [kept], main)
            results.append((kept, right))
    world.synchronize()
    assert max(distance(actual, right) for actual, right in results) < 1e-5


@dataclass(frozen=True)
class Case:
    run: Main
    ranks: int
    kernels: bool | tuple[Any, ...] = (
        True  # False: only host code, since another case covers these kernels; a tuple: only these kernels
    )
    nodes: int = 1
    file: str = ""  # only host code, including barriers, of files whose names end with this
    ahead: bool = False  # whether operators return before their streams are drained, as on a GPU


FEW = OneShot(programs=3, warps=4)
COPIES = replace(SMALL_SIGNALED, copies=True)
AG, RS, AR, A2A = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
CASES = {
    "World.barrier": Case(read_neighbour, 3),
    f"{AG} fused": Case(gathering("fused", ((16, 16), 32, 128)), 2),
    f"{AG} fused, split": Case(gathering(replace(SMALL_GATHER, split=2), ((16, 16), 32, 128)), 2),
    f"{AG} fused, uneven": Case(gathering("fused", ((20, 0, 12), 40, 128)), 3),
    f"{AG} fused, copied": Case(gathering(FusedGatherByCopies(tile=SMALL_TILE), ((16, 16), 32, 128)), 2),
    f"{AG}, halves of tiles": Case(gathering("fused", ((48, 48), 32, 64)), 2, kernels=(compute_tiles,)),
    f"{AG}, halves of tiles, copied": Case(
        gathering(FusedGatherByCopies(tile=SMALL_TILE), ((48, 48), 32, 64)), 2, kernels=(compute_tiles,)
    ),
    f"{AG} by copies, captured": Case(
        gathering(FusedGatherByCopies(tile=SMALL_TILE), ((16, 16), 32, 128), captured=True), 2, kernels=False
    ),
    f"{AG} fused, copied, part tiles": Case(gathering(FusedGatherByCopies(tile=SMALL_TILE), ((20, 20), 32, 128)), 2),
    f"{AG} flag_gated": Case(flag_gated, 2, kernels=(wait_on_every_sm,)),  # with the stand-in's signals and waits
    f"{AG} decomposed": Case(gathering("decomposed", ((8, 8), 16, 16)), 2),
    f"{AG} decomposed, groups": Case(gathering(Decomposed((1, 1, 2)), ((4,) * 4, 16, 16), calls=2), 4, kernels=False),
    f"{RS} fused": Case(reducing("fused", (52, 40, 40)), 3),  # the runs of 16-row tiles have lengths 2, 1 and 1
    f"{RS} decomposed": Case(reducing("decomposed", (8, 16, 16)), 2),
    f"{RS} decomposed, groups": Case(reducing(Decomposed((1, 1, 2)), (16, 16, 16), calls=2), 4, kernels=False),
    f"{RS} decomposed, pieces": Case(reducing(Decomposed(pieces=2), (8, 16, 16)), 2, kernels=False),
    f"{AR} fused": Case(reducing("fused", (3, 8, 8), (35, 40, 40), everywhere=True, calls=5), 2),
    f"{AG} one shot": Case(gathering(FEW, *(((5, 5, 5), 16, 64),) * 2, ((2, 2, 2), 16, 40), calls=5), 3),
    f"{AG} one shot, uneven": Case(gathering(FEW, ((3, 1, 5), 16, 264), calls=5), 3),
    f"{RS} one shot": Case(reducing(FEW, *((6, 64, 16),) * 2, (3, 40, 16), calls=5), 3),
    f"{RS} one shot, uneven": Case(reducing(FEW, (7, 264, 16), calls=5), 3),
    f"{AR} decomposed": Case(reducing("decomposed", (8, 16, 16), everywhere=True), 2),
    f"{AG} fused, 8 bits by row": Case(of_8_bits(AG, "fused", ((16, 16), 32, 256)), 2),
    f"{AG} fused, 8 bits by block": Case(of_8_bits(AG, "fused", ((20, 0, 12), 40, 256), scaling="block"), 3),
    f"{AG} fused, copied, 8 bits": Case(
        of_8_bits(AG, FusedGatherByCopies(tile=SMALL_TILE), ((16, 16), 32, 128), scaling="block"), 2
    ),
    f"{AG} decomposed, 8 bits": Case(of_8_bits(AG, "decomposed", ((8, 8), 16, 16)), 2, kernels=False),
    f"{RS} fused, 8 bits": Case(of_8_bits(RS, "fused", ((18, 17), 40, 128), scaling="block"), 2),
    f"{RS} decomposed, 8 bits": Case(of_8_bits(RS, "decomposed", ((8, 8), 16, 16)), 2, kernels=False),
    f"{AR} fused, 8 bits": Case(of_8_bits(AR, "fused", ((18, 17), 40, 48)), 2),
    "fused, two streams": Case(two_streams("fused"), 2, kernels=False),
    "decomposed, two streams": Case(two_streams("decomposed"), 2, kernels=False),
    "posted, two streams": Case(two_streams(FEW), 2, kernels=False),
    "weave": Case(woven_stages, 2, kernels=False),
    "moe dispatched": Case(moe("main"), 2),
    "gradients of experts": Case(moe_gradients, 2, kernels=(place_rows,)),
    "gradients of experts in parts": Case(gradients_in_parts, 2, kernels=(place_rows, keep_shards)),
    "experts in parts": Case(
        in_parts("main"), 2, kernels=(push_shard, grouped_gemm_in, grouped_gemm_out, combine_rows, sum_ranks)
    ),
    "experts in parts, first half alone": Case(first_half, 2, kernels=(push_shard, grouped_gemm_in)),
    "experts in parts around a layer": Case(around, 2, kernels=False),
    "experts in parts, two streams": Case(in_parts("first", "second"), 2, kernels=False),
    "halves of tiles of experts": Case(
        moe("main", plan=WIDE_DISPATCHED),
        2,
        kernels=(grouped_gemm_in, grouped_gemm_out, combine_rows),
        file="expert_parallel/kernels.py",
    ),
    "moe dispatched, two streams": Case(moe("first", "second"), 2, kernels=False),
    "moe dispatched, many routes": Case(moe("first", "second", experts=16, k=6), 2, kernels=False),
    "MoE in one launch": Case(moe("main", plan=SMALL_MOE), 2),
    "MoE in one launch, two streams": Case(moe("first", "second", plan=SMALL_MOE), 2, kernels=False),
    "MoE in one launch with its router": Case(router_calls(MUTATED), 2),
    "MoE in one launch with its router, two streams": Case(
        router_calls(MUTATED, streams=("first", "second")), 2, kernels=False
    ),
    "MoE of few tokens": Case(moe("main", plan=SMALL_LOW_LATENCY), 2),
    "MoE of few tokens, two streams": Case(moe("first", "second", plan=SMALL_LOW_LATENCY), 2, kernels=False),
    "GEMM, shared tiles": Case(sharing_tiles("first"), 1, ahead=True),
    "GEMM, shared tiles, two streams": Case(sharing_tiles("first", "second"), 1, kernels=False, ahead=True),
}
ROUTES = Layer(2, 2, 2, 20, calls=3, max_rows=16)  # of about 36 rows
ZIGZAG = Shape((5, 6), causal=True, layout="zigzag", sinks=True)
PACKED = Shape((6, 5), causal=True, bounds=(0, 4, 11))
BY_HEADS = Shape((3, 4), causal=True, sinks=True)
CASES |= {
    "attention segmented": Case(attending(Shape((4, 4, 4)), Segmented()), 3),
    "attention segmented, zigzag": Case(attending(ZIGZAG, Segmented()), 2),
    "attention gradients": Case(attention_gradients, 2, kernels=False),
    "attention segmented, packed": Case(attending(PACKED, Segmented()), 2, kernels=False),
    "attention segmented, two streams": Case(
        attending(ZIGZAG, Segmented(), "first", "second"), 2, kernels=False, ahead=True
    ),
    "attention by heads": Case(attending(BY_HEADS, HeadParallel(programs=2)), 2),
    "attention by heads, two streams": Case(
        attending(BY_HEADS, HeadParallel(programs=2), "first", "second"), 2, kernels=False, ahead=True
    ),
}
CASES["router losses"] = Case(router_losses, 1, kernels=(balance_loss, square_loss))
CASES["capacities"] = Case(capacities, 1, kernels=(limit_experts,))
CASES["MoE routes"] = Case(routing(ROUTES, lambda n: drawn(ROUTES, 2 * n + 1)), 2)
CASES |= {
    "MoE exchange": Case(exchanging(), 2, kernels=(place_rows, combine_rows, sum_ranks)),
    "MoE exchange, masked": Case(exchanging(layout="masked"), 2, kernels=(mask_rows, place_rows, combine_rows)),
    "MoE exchange, two streams": Case(exchanging("first", "second", flight=1), 2, kernels=False),
}
NORMS = {f"all-reduce + norm, {name}": plan for name, plan in PLANS.items()}
CASES |= {name: Case(norming(plan, (7, 64), (7, 64), (2, 64)), 3) for name, plan in NORMS.items()}
CASES |= {
    # With 7 rows in blocks of two, one of three programs has nothing to push, so only the end of the call orders its
    # reads.
    f"{name}, full": Case(norming(plan, (7 if isinstance(plan, TwoShotCounted) else 5, 64), full=True), 2)
    for name, plan in NORMS.items()
}
SCALES = {name: plan for name, plan in NORMS.items() if not isinstance(plan, Multicast | TwoShotLowLatency)}
CASES |= {f"{name}, scales": Case(norming(plan, (7, 64), quantize="row"), 2) for name, plan in SCALES.items()}
CASES |= {
    f"{AR} signaled": Case(reducing("signaled", (35, 40, 40), everywhere=True), 2),
    f"{AR} signaled, in tiles": Case(reducing("signaled", (35, 39, 40), everywhere=True), 2),
    f"{RS} signaled": Case(reducing("signaled", (70, 40, 40)), 2),
    f"{A2A} signaled": Case(to_ranks("signaled", (70, 30)), 2),
    f"{AR} signaled, before Hopper": Case(before_hopper(reducing("signaled", (35, 40, 40), everywhere=True)), 2),
    f"{RS} signaled by copies": Case(reducing(COPIES, (64, 40, 40)), 2),
    f"{A2A} signaled by copies": Case(to_ranks(COPIES, (70, 30)), 2),
    "signaled, two streams": Case(reducing_on_two_streams("signaled"), 2, kernels=False),
    "signaled by copies, two streams": Case(reducing_on_two_streams(COPIES), 2, kernels=False),
}
OVER_NODES = {
    f"{AG} over nodes": gathering(TwoLevel(2), ((8,) * 4, 16, 32), calls=3),
    f"{AG} over nodes, uneven": gathering(TwoLevel(), ((8, 0, 3, 5), 16, 32), calls=3),
    f"{RS} over nodes": reducing(TwoLevel(2), (16, 16, 32), calls=3),
    f"{AR} over nodes": reducing(TwoLevel(2), (9, 16, 32), everywhere=True),
    f"{A2A} over nodes": to_ranks(TwoLevel(), (9, 6, 7, 8)),
    "all-reduce + norm over nodes": norming(TwoLevel(2), (7, 64)),
    "all-reduce + norm over nodes, full": norming(TwoLevel(2), (7, 64), full=True),
}
CASES |= {name: Case(main, 4, False, nodes=2, file="two_level.py") for name, main in OVER_NODES.items()}
for example in sorted((Path(__file__).parents[2] / "examples").glob("*.py")):
    if "@weft.jit" in example.read_text():  # the other operators use ops that are tested above
        CASES[f"examples/{example.name}"] = Case(check.load(str(example)), 2)


# -- epochs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replace(Mutation):
    """Replaces expressions in one function: (old, new) pairs of source text."""

    edits: tuple[tuple[str, str], ...] = ()

    def apply(self, tree: ast.Module) -> None:
        left = dict(self.edits)

        class Edit(ast.NodeTransformer):
            def generic_visit(self, node: ast.AST) -> ast.AST:
                node = super().generic_visit(node)
                new = left.pop(ast.unparse(node), None) if isinstance(node, ast.expr) else None
                return node if new is None else ast.copy_location(ast.parse(new, mode="eval").body, node)

        Edit().visit(tree)
        ast.fix_missing_locations(tree)
        if left:
            raise LookupError(f"{self}: {list(left)} not found in the source")


def instead(fn: Any, description: str, *edits: tuple[str, str]) -> Replace:
    code = fn.fn.__code__
    return Replace(code.co_filename, code.co_firstlineno, description, "replace", fn.fn.__qualname__, edits=edits)


ONE_HALF = "use one half of the arena in every call", ("tl.load(arena.epoch) & 1", "0 * tl.load(arena.epoch)")
OLD_PEER = instead(
    pull_chunks, "wait for the peers' previous call", ("calls_of(ch) * (chunks * PARTS + 1)", "(calls_of(ch) - 1) * (chunks * PARTS + 1)")
)  # fmt: skip
OLD_WAIT = instead(
    channel_wait, "wait for the previous call", ("calls_of(ch) * arrivals", "(calls_of(ch) - 1) * arrivals")
)
OLD_SUMS = instead(sum_tiles, "sum what the previous call announced", ("calls_of(ch) * W", "(calls_of(ch) - 1) * W"))
HALF_AS_WHOLE = instead(
    compute_half,
    "count half of a tile as the whole tile",
    (
        "count_stored(stored + tl.load(runs.positions + tm) * grid.tiles_n + tn, 1)",
        "count_stored(stored + tl.load(runs.positions + tm) * grid.tiles_n + tn, 2)",
    ),
)
OWN_RUN = instead(
    sum_tiles, "wait for the positions of the own run alone", ("tl.where(i == steps, position_before, i)", "tl.where(i == steps, position_before, tl.where(tm * BM < hi, i, 0))")
)  # fmt: skip
EPOCHS = {
    f"{AG} fused": [instead(all_gather_gemm, *ONE_HALF), OLD_PEER, OLD_WAIT],
    f"{AG} fused, split": [instead(all_gather_gemm, *ONE_HALF), OLD_PEER, OLD_WAIT],
    f"{AG} fused, uneven": [instead(all_gather_gemm, *ONE_HALF), OLD_PEER, OLD_WAIT],
    f"{AG}, halves of tiles": [OLD_WAIT],
    f"{AG}, halves of tiles, copied": [OLD_WAIT],
    f"{RS} fused": [instead(gemm_reduce, *ONE_HALF), OLD_SUMS, OWN_RUN, HALF_AS_WHOLE],
    f"{AR} fused": [instead(gemm_reduce, *ONE_HALF), OLD_SUMS],
}
EPOCHS |= {
    name: [OLD_WAIT, instead(wait_group, "do not count the call", ("calls_of(ch)", "calls_of(ch) - 1"))]
    for name in CASES
    if "signaled" in name and CASES[name].kernels
}

EPOCHS["GEMM, shared tiles"] = [instead(gemm, "add the previous call's parts", ("calls_of(ch)", "calls_of(ch) - 1"))]
EPOCHS["moe dispatched"] = [
    instead(wait_for_rows, "wait for the previous call's rows", ("calls_of(ch) * ARRIVALS", "(calls_of(ch) - 1) * ARRIVALS")),
    instead(sum_ranks, "wait for the previous call's sums", ("calls_of(ch) * ARRIVALS", "(calls_of(ch) - 1) * ARRIVALS")),
    instead(combine_rows, "wait for the next source step", ("counters + source_step", "counters + (source_step + 1) % W")),
    instead(grouped_gemm_out, "count tiles again with the next source step's", ("tl.zeros_like(increments)", "increments")),
]  # fmt: skip
EPOCHS["halves of tiles of experts"] = [
    instead(step_increments, "count the first half as the whole tile", ("tl.where(half == 0, 1, whole - 1)", "tl.where(half == 0, whole, 0)")),
]  # fmt: skip
EPOCHS["MoE exchange"] = [
    OLD_WAIT, EPOCHS["moe dispatched"][1],
    instead(place_rows, "wait for the previous call's rows", ("calls_of(ch) * ARRIVALS", "(calls_of(ch) - 1) * ARRIVALS")),
    instead(place_rows, "wait for the next source step", ("ch.counters + source_step", "ch.counters + (source_step + 1) % W")),
]  # fmt: skip
EPOCHS["MoE exchange, masked"] = EPOCHS["MoE exchange"]
EPOCHS["MoE in one launch"] = [
    instead(moe_layer, "wait for the previous call's rows", ("calls_of(ch) * memory.copy_programs", "(calls_of(ch) - 1) * memory.copy_programs")),
    instead(wait_for_sums, "wait for the previous call's sums", ("calls_of(ch) * memory.copy_programs", "(calls_of(ch) - 1) * memory.copy_programs")),
    instead(wait_for_step, "wait for the next source step", ("memory.counters + source_step", "memory.counters + (source_step + 1) % 2")),
    instead(tiles_done, "count tiles in one half", ("tl.load(memory.epoch) & 1", "0 * tl.load(memory.epoch)")),
    instead(make_tables, "count the previous call's routes", ("calls_of(ch) * memory.copy_programs", "(calls_of(ch) - 1) * memory.copy_programs")),
    instead(grid_barrier, "meet in the previous call", ("tl.load(memory.epoch) + 1", "tl.load(memory.epoch)")),
]  # fmt: skip
EPOCHS["MoE in one launch with its router"] = EPOCHS["MoE in one launch"]
EPOCHS["MoE of few tokens"] = [
    instead(
        low_latency_gemm,
        "wait for the previous call's rows",
        ("calls_of(ch) * memory.copy_programs", "(calls_of(ch) - 1) * memory.copy_programs"),
    ),
    EPOCHS["MoE in one launch"][1],
]
EPOCHS["experts in parts"] = [
    instead(half_offset, "use one half of the arena in every call", ("tl.load(epoch) & 1", "0 * tl.load(epoch)")),
    *EPOCHS["moe dispatched"][:3],  # no program has tiles of the two last source steps, so it counts once
]  # fmt: skip
EPOCHS["experts in parts, first half alone"] = [
    *EPOCHS["experts in parts"][:2],
    instead(half_start_of, "use one half of the routes in every call", ("calls_of(ch) & 1", "0 * calls_of(ch)")),
]
EPOCHS["gradients of experts in parts"] = [
    EPOCHS["experts in parts"][0],
    *EPOCHS["MoE exchange"][2:],
    instead(
        keep_shards,
        "keep the other half",
        ("inbox + half_size - half_offset(epoch, half_size)", "inbox + half_offset(epoch, half_size)"),
    ),
]
OLD_DONE = instead(
    two_shot, "wait for the owners' previous call",
    ("calls * owner_blocks", "(calls - 1) * owner_blocks"),
)  # fmt: skip
OLD_BLOCK = instead(two_shot, "sum the previous call's blocks", ("calls * (W - 1)", "(calls - 1) * (W - 1)"))
OLD_PARTS = instead(two_shot, "pull the previous call's rows", ("calls * W", "(calls - 1) * W"))
MULTICAST = [
    instead(
        multicast_shot, "wait for the owners' previous call",
        ("calls * tl.minimum(owner_rows, PROGRAMS)", "(calls - 1) * tl.minimum(owner_rows, PROGRAMS)"),
    ),
    instead(multicast_shot, "sum the previous call's rows", ("calls * W", "(calls - 1) * W")),
]  # fmt: skip
CLEAR_NEXT = "clear the third that is filled next"
POSTED = [
    instead(load_state, "use one third in every call", ("third_index * words", "0 * words")),
    instead(load_state, CLEAR_NEXT, ("(third_index + 2) % 3", "(third_index + 1) % 3")),
    instead(load_state, "clear nothing", ("tl.load(state + 2 * pid + 1)", "0 * tl.load(state + 2 * pid + 1)")),
    instead(rotate_thirds, "do not count the call", ("(third_index + 1) % 3", "third_index")),
    instead(rotate_thirds, "forget half of what was filled", ("filled", "filled // 2")),
    instead(sum_low_latency, "do not wait", ("tl.max(empty)", "0 * tl.max(empty)")),
]
LAST_ROW = instead(rotate_thirds, "forget the last row that was filled", ("filled", "filled - 8"))
LAST = instead(sum_low_latency, "do not wait for the last rank", ("k + 1", "(k + 1) * (k + 1 != W)"))
OWNER = instead(sum_low_latency, "do not wait for the owner", ("owner + 1", "0 * owner"))
EPOCHS["MoE routes"] = [OLD_WAIT]
EPOCHS |= {name: [*POSTED, OWNER] for name in (f"{AG} one shot", f"{AG} one shot, uneven")}
EPOCHS |= {name: [*POSTED, LAST] for name in (f"{RS} one shot", f"{RS} one shot, uneven")}
for name, plan in NORMS.items():
    if isinstance(plan, Decomposed):
        continue  # its only counters are the counters of `read_neighbour`, which has a case
    if isinstance(plan, Multicast):
        mutations = MULTICAST
    elif isinstance(plan, TwoShot) and not plan.low_latency:
        mutations = [OLD_DONE, OLD_PARTS if plan.pull else OLD_BLOCK]
    else:
        mutations = [*POSTED, LAST_ROW, LAST, OWNER]
    EPOCHS[name] = mutations
    # With two ranks, a peer continues only after nearly all programs of this rank have cleared their words; a full
    # residual is not pushed.
    seldom = [CLEAR_NEXT, *([OWNER.description] if isinstance(plan, OneShot) else [])]
    EPOCHS[f"{name}, full"] = [m for m in mutations if m.description not in seldom]


# -- mutations that change nothing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equivalent:
    cases: tuple[str, ...]
    description: str
    code: str  # part of the mutated line
    why: str
    function: str = ""  # the function with this line, if several functions contain it


FUSED = tuple(name for name in CASES if " fused" in name)
EXAMPLES = tuple(name for name in CASES if name.startswith("examples/"))
POSTING = tuple(name for name, case in CASES.items() if ("one shot" in name or "posted" in name) and case.kernels)
NORMING = tuple(
    name
    for name in CASES
    if name.split(",")[0] == "all-reduce + norm" and "decomposed" not in name and name not in POSTING
)
TWO_SHOTS = tuple(name for name in NORMING if "two shots" in name or "multicast" in name)
SIGNALED = tuple(name for name in CASES if "signaled" in name)
SHARED = ("GEMM, shared tiles",)
ROUTING = ("MoE routes",)
EXCHANGE = ("MoE exchange", "MoE exchange, masked")
MOE = tuple(name for name in CASES if name.startswith("moe"))
IN_PARTS = ("experts in parts", "experts in parts, first half alone", "gradients of experts in parts")
BOTH_HALVES = ("experts in parts", "experts in parts, two streams")
AROUND = "experts in parts around a layer"
GRADIENTS = ("gradients of experts",)
LAYERS = tuple(
    name for name in CASES if name.startswith("MoE ") and name not in (*ROUTING, *EXCHANGE) and "exchange" not in name
)
EQUIVALENT = [
    Equivalent(
        (*FUSED, *EXAMPLES, *NORMING, *SHARED, *ROUTING, *EXCHANGE, *GRADIENTS, MOE[0], *IN_PARTS, *(n for n in LAYERS if CASES[n].kernels)),
        "make flush_stores(...) not wait for bulk stores",
        "flush_stores(True)",
        "bulk stores that a peer reads were settled by their own notify, the others (the output) are read by "
        "later work of the stream, for which the kernel's end completes them; the count of ended programs publishes only "
        "the words of `state`, which ordinary loads read",
        "end_call",
    ),
    Equivalent(
        (*(n for n in FUSED if n.startswith(AG)), *EXAMPLES, *NORMING, *SHARED, *ROUTING, *EXCHANGE, *GRADIENTS, MOE[0], *IN_PARTS, "MoE of few tokens"),
        "remove tl.store(...)",
        "tl.store(ch.state + TICKET, 0)",
        "these kernels draw no tickets, so the word is 0 already",
    ),
    Equivalent(
        SHARED, "make flush_stores(...) not wait for bulk stores", "flush_stores(True)",
        "a part is stored by ordinary stores; the bulk ones are of whole tiles, which nobody here reads",
        "matmul",
    ),
    Equivalent(
        ("examples/all_gather_rowwise.py",),
        "remove tl.store(...)", "tl.store(epoch,",
        "nobody reads `epoch`: no flag is set to it, and the example's host code picks the half",
    ),
    *[
        Equivalent(
            tuple(n for n in NORMING if "multicast" in n), "remove window_fence(...)", "window_fence()",
            "memory has no second address here: reading the PTX finds it (test_offline.py)",
        )
    ] * 3,
    Equivalent(
        TWO_SHOTS + SHARED, "remove tl.store(...)", "tl.store(epoch,",
        "nobody reads `epoch`: these need no second half of anything",
    ),
    Equivalent(
        POSTING, "remove flush_stores(...)", "flush_stores(False)",
        "it orders the threads of one program, of which there is one here: each has read the program's state before one of "
        "them counts it",
        "rotate_thirds",
    ),
    *[
        Equivalent(
            cases, description, code, "the ranks of these cases make one call: those that do not are in test_disagree.py and test_moe_fused_router.py", function
        )
        for cases, description, code, function in (
            (POSTING, "remove compare_calls(...)", "compare_calls(calls", ""),
            (POSTING, "remove same_call(...)", "same_call(calls", "compare_calls"),
            (("MoE of few tokens",), "remove same_call(...)", "same_call(memory.calls", "low_latency_gemm"),
            (("MoE in one launch",), "remove same_call(...)", "same_call(calls", "compare"),
            (("MoE in one launch",), "drop compare", "self._run(", ""),
            (("MoE in one launch with its router",), "remove same_call(...)", "same_call(calls", "compare_calls_once"),
            (("MoE in one launch with its router",), "remove compare_calls_once(...)", "compare_calls_once(", "route"),
            ((MOE[0], *ROUTING), "remove same_call(...)", "same_call(calls", "share"),
        )
    ],
    Equivalent(
        (MOE[0], EXCHANGE[0]), "remove same_call(...)", "same_call(calls",
        "the share of routes before it has compared the ranks' calls; every program here waits for all ranks itself",
        "sum_ranks",
    ),
    Equivalent(
        IN_PARTS[:1], "remove same_call(...)", "same_call(calls",
        "the ranks make one call here: see test_second_halves_are_compared", "sum_ranks",
    ),
    Equivalent(
        (f"{AG} fused", f"{AG} fused, split", f"{AG} fused, 8 bits by row", f"{AG}, halves of tiles"),
        "let wait_until(...) pass one arrival early",
        "calls_of(ch) * arrivals",
        "these wait for peers' chunks only, which pullers count in steps of several arrivals; where shards are uneven, the "
        "own parts count one by one",
    ),
    Equivalent(
        (f"{AG} fused", f"{AG} fused, split", f"{AG} fused, 8 bits by row"), "make tl.atomic_add(...) relaxed instead of release",
        'tl.atomic_add(ch.counters + ready, 1, sem="release", scope="sys")',
        "no shard is empty here: a peer waits for all counts of `ready`, and the fenced ones of the parts, made by "
        "programs that started later than the previous call ended, order as much (the uneven case has an empty shard)",
    ),
    Equivalent(
        (f"{RS} fused", f"{RS} fused, 8 bits"), "remove flush_stores(...)", "flush_stores(BULK)",
        "only forwarders broadcast here: they store nothing, and the wait before it ends with a block barrier",
        "channel_broadcast",
    ),
    Equivalent(
        tuple(n for n in SIGNALED if "copies" not in n and A2A not in n), "drop wait_event",
        "world.wait_event(comm, world.record(stream))",
        "everything on the communicator's stream stands behind a wait for counts of this call's GEMM, whose programs start "
        "after all that the caller's stream was given before. On a GPU the edge makes the stream part of a graph's capture. (Only in "
        "an all-to-all can a rank run no GEMM.)",
    ),
    *[
        Equivalent(
            EXCHANGE, description, "wait_until(",
            "y is there by the stream's order: counters and targets are zero, and stay so", function="combine_rows",
        )
        for description in ("remove wait_until(...)", "let wait_until(...) pass one arrival early")
    ],
    Equivalent(
        ("moe dispatched", "experts in parts"), "let wait_until(...) pass one arrival early", "wait_until(",
        "a whole tile counts 2; half a tile counts 1, and the case with halves of tiles catches the mutation", "combine_rows",
    ),
    Equivalent(
        ("MoE in one launch", "MoE in one launch with its router"), "let wait_until(...) pass one arrival early", "wait_until(",
        "a whole tile counts 2, and one launch has whole tiles only", "wait_for_step",
    ),
    Equivalent(
        ("MoE in one launch", "moe dispatched", EXCHANGE[0]), "remove flush_stores(...)", "flush_stores(False)",
        "it orders the threads of one program, of which there is one here: each has loaded the words before one of them clears them",
        "take_left_out",
    ),
    Equivalent(
        GRADIENTS, "drop wait_event", "# as in `dispatched.prepare_dispatched`", "as the next entry, of which this is the backward pass",
    ),
    Equivalent(
        ("moe dispatched, many routes",), "drop wait_event", "world.wait_event(side, first_gemm_done)",
        "it keeps combine's programs off the SMs of the first GEMM; here the order of the routes has waited for the tables",
    ),
    Equivalent(
        (*GRADIENTS, *(name for name in CASES if name.startswith("moe dispatched"))), "drop wait_event",
        "world.wait_event(stream, world.record(side))",
        "here the next call begins with a share of routes, which waits for all ranks to be in it, each behind its last sums: these have "
        "waited for all programs of this rank's side stream, whose last act is to notify them. The second half of experts in parts "
        "shares no routes: the case of one around a layer sees it",
    ),
    Equivalent(
        (*BOTH_HALVES, AROUND, "gradients of experts in parts"), "drop wait_event",
        "world.wait_event(stream, world.record(side))  # the caller may write x again",
        "the second half's own wait for the side stream comes before the caller writes x again; the case of the first half alone sees it",
    ),
    *[
        Equivalent(
            BOTH_HALVES[1:], "drop wait_event", order,
            "among these calls each of the two does what the other does: one orders them and other ops that use the arena, one them "
            "and layers of whole experts, whose scratch they share",
        )
        for order in ("world.order(arena, stream)", "world.order(lock(world, NAME), stream)")
    ],
    Equivalent(
        (f"{AG} by copies, captured",), "drop wait_event", "world.wait_event(copies, world.record(signals))",
        "the GEMM has waited for every flag; a capture must join each of its streams, which nothing is here",
    ),
    Equivalent(
        ("attention gradients",), "drop wait_event", "world.wait_event(world.current_stream(), fetched.end)",
        "keys stay as they are until the backward pass has ended, whose pushes come behind these on one stream, and are "
        "waited for",
    ),
]  # fmt: skip


# -- faults in the computation -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A fault outside the sites of a protocol, and a run that raises an error with the fault and passes without it."""

    fault: Mutation
    run: Main
    ranks: int = 2


def by_wave(call: int, rank: int, t: int, layer: Any, world: int) -> torch.Tensor:
    """Make each of three ranks route every token to both other ranks, which have an expert for each sender."""
    ids = [2 * peer + (peer - rank) % 3 - 1 for peer in range(3) if peer != rank]
    return torch.tensor(ids).expand(t, -1)


def layers_in_one_launch(world: World) -> None:
    """Call layers of different sizes in succession. A rank may send to memory from which a third rank still reads rows,
    without a notification from that rank."""
    assert (
        layer_case(world, steps, experts=6, tokens=(9, 7, 8), ids_of=by_wave, calls=2, layers=2, plan=SMALL_MOE) < 5e-3
    )


def many_few_tokens(world: World) -> None:
    """Draw a routing in which an expert's routes are in several of the blocks that are searched for them."""
    assert layer_case(world, steps, k=4, hidden=16, inner=8, tokens=(70, 66), calls=1, plan=SMALL_LOW_LATENCY) < 5e-3


def left_out(world: World) -> None:
    case = dict(layout="masked", max_m=13, tokens=(20, 13), ids_of=overfull)
    assert exchange_case(world, calls=3, flight=1, **case) == 0


def overfull_calls(world: World) -> None:
    overfull_layers(world, "dispatched", calls=3)


def overfull_routes(world: World) -> None:
    routing(ROUTES, lambda n: drawn(ROUTES, 2 * n + 1))(world)


TOKENS = "send_tokens(operands.x, operands.ids, memory, ch, T, max_tokens, s)"
SHARE = "share_routes(operands.ids, operands.weights, memory, ch, T, max_tokens, s)"
PLANTED = {
    "send tokens before the tables": Planted(
        instead(moe_layer, "send tokens first", (TOKENS, "None"), (SHARE, f"({SHARE}, {TOKENS})")),
        layers_in_one_launch,
        ranks=3,
    ),
    "forget the rows of pieces before": Planted(
        instead(routes_of_expert, "begin at 0", ("tl.sum(matches, 0)", "0 * tl.sum(matches, 0)")), many_few_tokens
    ),
    "take a route that was left out for one of others": Planted(
        instead(mask_rows, "-1 for -2", ("tl.where(row_in_expert < MAX_M, e * MAX_M + row_in_expert, LEFT_OUT)", "tl.where(row_in_expert < MAX_M, e * MAX_M + row_in_expert, -1)")),
        left_out,
    ),
    "forget what other ranks left out": Planted(
        instead(count_told, "do not count", ("count_lost(guard, rank, tl.sum(tl.where(ranks == rank, rows, 0), 0))", "None")), overfull_calls
    ),
    "count rows that were left out again": Planted(
        instead(take_left_out, "do not clear", ("tl.zeros_like(ranks)", "tl.load(left_out.words + ranks, mask=ranks < W, other=0)")),
        overfull_calls,
    ),
    "take what was left out before the sums": Planted(
        instead(sum_ranks, "take first", ("same_call(calls, number)", "(take_left_out(left_out, ch.guard, W), same_call(calls, number))")),
        overfull_calls,
    ),
    "forget what was told before": Planted(
        instead(tell_sources, "forget those of the call before", ("tl.load(words, mask=mask, other=0) + rows", "rows")), overfull_routes
    ),
    "tell another rank of rows that were left out": Planted(
        instead(place_units, "count in waves", ("(me - tl.arange(0, s.WP) + s.W) % s.W", "(me + tl.arange(0, s.WP)) % s.W")), overfull_calls, ranks=3
    ),
    "leave gradients for the next call": Planted(
        instead(take_gradients, "do not clear", ("tl.zeros((BLOCK,), tl.float32)", "tl.load(dweights_inbox + i, mask=i < num_routes)")),
        no_room_case,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught(name: str) -> None:
    planted = PLANTED[name]

    def run(backend: Any) -> None:
        planted.run(World(backend))

    spmd(run, planted.ranks)
    ((_, failure),) = kill_rate(run, planted.ranks, [planted.fault], SEEDS)
    assert failure is not None and "LookupError" not in failure


def test_second_halves_are_compared() -> None:
    """Ranks whose second halves belong to different prepared calls raise Mismatch, although no host compares these
    calls, as on a GPU. Without the comparison before the last sums, the disagreement would go unnoticed."""

    def run(backend: Any) -> None:
        backend.compares = False
        other_second_halves(World(backend))

    for seed in range(3):
        with pytest.raises(weft.Mismatch, match="rank 0: grouped_matmul_reduce_scatter .*; rank 1: "):
            spmd(run, 2, seed=seed)
    spmd(run, 2, mutation=instead(sum_ranks, "do not compare", ("same_call(calls, number)", "None")))


# -- the gate ----------------------------------------------------------------------------------------------------------


def line_of(m: Mutation) -> str:
    """Return the mutated line, or the definition of the function whose expressions are replaced."""
    line = linecache.getline(m.file, m.line).strip()
    return f"def {m.function}" if m.kind == "replace" else line


@pytest.mark.parametrize("name", CASES)
def test_every_mutation_is_caught(name: str, record_property: Callable[[str, object], None]) -> None:
    equivalent = [e for e in EQUIVALENT if name in e.cases]
    every_mutation_is_caught(name, CASES[name], EPOCHS.get(name, ()), equivalent, record_property)


def every_mutation_is_caught(
    name: str,
    case: Case,
    epochs: Iterable[Mutation],
    unused: list[Equivalent],
    record_property: Callable[[str, object], None],
) -> None:
    """Require that at least one schedule catches each mutation. If a mutation that no schedule can show is listed in
    `unused`, remove it from there."""

    def run(backend: Any) -> None:
        backend.ledgers = None  # calls that need the same SMs overlap, because ordering them could hide a missing event
        case.run(World(backend))

    options: dict[str, Any] = dict(nodes=case.nodes, ahead=case.ahead)
    _, report = spmd(run, case.ranks, record=True, **options)
    reached = list(case.kernels) if isinstance(case.kernels, tuple) else None if case.kernels else []
    mutations = [*sites(reached, report), *epochs]
    if case.file:
        mutations = [m for m in mutations if m.file.endswith(case.file)]
    elif not case.kernels:
        mutations = [m for m in mutations if m.method == "wait_event"]
    assert mutations, "the case has no site to mutate"
    caught, wrong = 0, []
    for mutation in mutations:
        entry = next(
            (
                e
                for e in unused
                if e.description == mutation.description
                and e.code in line_of(mutation)
                and e.function in mutation.function
            ),
            None,
        )
        seeds = SEEDS if entry is None else SEEDS[:4]
        ((_, failure),) = kill_rate(run, case.ranks, [mutation], seeds, **options)
        if failure is None and entry is None:
            ((_, failure),) = kill_rate(run, case.ranks, [mutation], MORE, **options)
        caught += failure is not None
        if entry is not None:
            unused.remove(entry)
        if failure is None and entry is None:
            wrong.append(f"not caught: {mutation}: {line_of(mutation)}")
        if failure is not None and failure.startswith("LookupError"):
            wrong.append(f"not made: {mutation}: {failure}")
        if failure is not None and entry is not None:
            wrong.append(f"listed as equivalent, but caught: {mutation}: {failure}")
    wrong += [f"listed as equivalent, but not there: {e.description}: {e.code}" for e in unused]
    equivalent = len(mutations) - caught - sum(w.startswith("not caught") for w in wrong)
    record_property("mutations", (name, len(mutations), caught, equivalent))
    assert not wrong, "\n".join(wrong)
