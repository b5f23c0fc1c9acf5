"""Run every GPU check for one number of ranks: torchrun --nproc-per-node N -m tests.gpu.gpu_main [--out DIR] [--seconds
S] [--only NAMES]

With WEFT_SHARE_GPU=1, ranks share GPUs if there are more ranks than GPUs. For every check, rank 0 writes a row to
DIR/rows.jsonl (gpu_queue.py): the largest error over ranks, the bound and whether the check passed. Checks that
tests/gpu_record.json lists as passed with this version of weft are not run again. After a failed check the ranks
continue with a new World, since the old World's counters may disagree from then on; if they cannot, the run ends. With
`--stalled-peer OP` the last rank never joins the op, and the other ranks must raise weft.Timeout within its bound.
gpu/run.sh starts these runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_gather_matmul import all_gather_case
from tests.emulated.cases_all_reduce import norm_case
from tests.emulated.cases_attention import Shape
from tests.emulated.cases_inference import PLANS, SEQUENTIAL, inference_cases
from tests.emulated.cases_matmul_reduce import reduce_case
from tests.emulated.cases_models import gpu_cases as model_checks
from tests.emulated.cases_nn import all_gather_grads, compiled_ops, mlp_graph, mlp_inference, reduce_grads
from tests.emulated.cases_ops import FUSED, shared_case
from tests.gpu import gpu_attention, gpu_moe
from tests.gpu.gpu_async_tp import checks as async_tp_checks
from tests.gpu.gpu_attention import checks as attention_checks
from tests.gpu.gpu_fp8 import checks as fp8_checks
from tests.gpu.gpu_guarded import checks as guarded_checks
from tests.gpu.gpu_hf import checks as hf_checks
from tests.gpu.gpu_hf_moe import checks as hf_moe_checks
from tests.gpu.gpu_launches import checks as launch_checks
from tests.gpu.gpu_moe import checks as moe_checks
from tests.gpu.gpu_moe_exchange import checks as exchange_checks
from tests.gpu.gpu_moe_exchange import once as exchange_once
from tests.gpu.gpu_moe_fused import checks as moe_fused_checks
from tests.gpu.gpu_moe_parts_training import checks as moe_parts_training_checks
from tests.gpu.gpu_moe_tensor import checks as moe_tensor_checks
from tests.gpu.gpu_moe_training import checks as moe_training_checks
from tests.gpu.gpu_ops import checks as ops_checks
from tests.gpu.gpu_parallel import checks as parallel_checks
from tests.gpu.gpu_queue import WEFT, Queue, ordered, part_of, recorded, tree_of, tree_of_part
from tests.gpu.gpu_reduce import checks as reduce_checks
from tests.gpu.gpu_routed import checks as routed_checks
from tests.gpu.gpu_router import checks as router_checks
from tests.gpu.gpu_signaled import checks as signaled_checks
from weft.backends import library_gemm
from weft.backends.cuda import GpuBackend
from weft.integrations import quack
from weft.lang.mapping import balanced_rows
from weft.ops.matmul import matmul
from weft.ops.moe.call import Layer
from weft.ops.tiles import with_shape_tiles
from weft.plans import (
    Decomposed,
    FlagGated,
    FusedAllReduce,
    FusedGatherByCopies,
    FusedReduceScatter,
    OneShot,
    Plan,
    TwoShotLowLatency,
)
from weft.timing import cuda_clock

BF16 = 5e-3
GATHER, SCATTER, ALL = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
SECOND = {  # fused plans other than the default: a copy engine pulls, or a different number of programs pulls
    GATHER: FusedGatherByCopies(),
    SCATTER: FusedReduceScatter(pull_programs=64, forward_programs=2),
    ALL: FusedAllReduce(pull_programs=32, forward_programs=4, lag=3),
}

STALLED = (GATHER, "flag_gated", "one_shot", "moe_exchange")
HALF = {op: with_shape_tiles(FUSED[op], [512, 512], 256 * 24, 132) for op in (GATHER, SCATTER, ALL)}
FEW: dict[str, Plan] = {GATHER: OneShot(), SCATTER: OneShot(), ALL: TwoShotLowLatency()}  # plans of low-latency rows


def operands(world: weft.World, op: str, m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = balanced_rows(m, world.size)[world.rank] if op == GATHER else m
    x = draw(seed + world.rank, rows, k).to(world.device)
    return x, (draw(seed + 50 + world.rank, n, k) * 0.1).to(world.device)


def random_shapes(world: weft.World, plan_of: str, count: int) -> float:
    """Draw ops, shapes, biases and dtypes, the same on every rank."""
    rng, worst = random.Random(world.size), 0.0
    for i in range(count):
        m, n, k = rng.randrange(1, 1500), 8 * rng.randrange(1, 80), 8 * rng.randrange(1, 60)
        bias, dtype = rng.random() < 0.5, rng.choice([torch.bfloat16, torch.float16])
        op = rng.choice([GATHER, SCATTER, ALL])
        plan = {"second": SECOND[op], "posted": FEW[op]}.get(plan_of, plan_of)
        if op == GATHER:
            error = all_gather_case(world, balanced_rows(m, world.size), n, k, plan, bias, dtype, seed=i)
        else:
            error = reduce_case(world, m, n, k, plan, bias, op == ALL, dtype, seed=i)
        worst = max(worst, error)
    return worst


def delays(world: weft.World, op: str, plan: Plan) -> float:
    """Random ranks start late in every call, by up to several hundred microseconds; the bits must be the same every
    time."""
    rng = random.Random(100 + world.rank)
    x, w = operands(world, op, 1024, 512, 256)
    fn = getattr(weft, op)
    expected = fn(x, w, world=world, plan=plan).clone()
    for _ in range(40):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        if not torch.equal(fn(x, w, world=world, plan=plan), expected):
            return float("inf")
    world.synchronize()
    return 0.0


def many_calls(world: weft.World, calls: int) -> float:
    """Make back-to-back calls of all ops and plans without synchronisation, and compare every result with the first
    one."""
    todo: list[tuple[Callable[[], torch.Tensor], torch.Tensor]] = []
    for op in (GATHER, SCATTER, ALL):
        for m in (512, 1000):
            x, w = operands(world, op, m, 512, 256, seed=m)
            rows = balanced_rows(m, world.size) if op == GATHER and m % world.size else None
            options = {"rows": rows} if rows else {}
            for plan in (FUSED[op], SECOND[op], FEW[op]):
                fn = partial(getattr(weft, op), x, w, world=world, plan=plan, **options)
                todo.append((fn, fn().clone()))
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    rng = random.Random(7)
    for _ in range(calls):
        fn, expected = rng.choice(todo)
        wrong += (fn() != expected).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def replay(world: weft.World, op: str, plan: Plan, replays: int) -> float:
    """Replay a graph of two calls with new inputs, alternating with eager calls of the same shape: the bits must equal
    those of eager calls."""
    x, w = operands(world, op, 1024, 512, 256)
    fn = partial(getattr(weft, op), x, w, world=world, plan=plan)
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
        y = fn()
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(replays):
        x.add_(0.01 * (i % 3))
        graph.replay()
        wrong += (y != fn()).any() if i % 5 == 0 else 0
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def unmeasured(world: weft.World, op: str, m: int, n: int, k: int) -> float:
    """Check that plan="auto", on a Hopper GPU without a table and a profile, runs one trial of all candidates and gives
    right results."""
    with (
        mock.patch("weft.planner.auto.exact", return_value=None),
        mock.patch("weft.planner.auto._planner_or_unusable", return_value=None),
        mock.patch.object(world.choices, "clock", cuda_clock),
    ):
        case = all_gather_case if op == GATHER else partial(reduce_case, everywhere=op == ALL)
        error = case(world, [m // world.size] * world.size if op == GATHER else m, n, k, "auto", calls=3)
    trial = world.choices.last(op, (m, n, k))
    assert trial is not None and len(trial.times) > 2, trial
    return error


def timed(world: weft.World, op: str, case: Callable[[], float]) -> float:
    """Check that plan="auto" gives right results for an op whose plans are timed at the first call (unless ranks share
    a GPU), and that all ranks time the same plans and choose the same plan."""
    before = {*world.choices.trials}
    with mock.patch.object(world.choices, "clock", cuda_clock), mock.patch.object(world.backend, "clock", cuda_clock):
        error = case()
    trials = [trial for key, trial in world.choices.trials.items() if key not in before and trial.title == op]
    trials_seen = [(trial.sizes, len(trial.times), str(trial.faster)) for trial in trials]
    if world.rank == 0:
        print(*(trial.timings("graph") for trial in trials), sep="\n")
    same = all(other_trials == trials_seen for other_trials in world.exchange(trials_seen))
    return error if trials_seen and same and all(count > 1 for _, count, _ in trials_seen) else float("inf")


def by_trial(world: weft.World, m: int, n: int, k: int) -> float:
    """Check that plan="auto" with quack runs one trial, which is the same on every rank, and gives right results,
    eagerly and in a graph."""
    x, w = operands(world, GATHER, m, n, k)
    expected, auto = (
        weft.all_gather_matmul(x, w, world=world, plan="sequential"),
        partial(weft.all_gather_matmul, x, w, world=world),
    )
    worst = max(distance(auto(), expected) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = auto()
    for _ in range(5):
        y.zero_()
        graph.replay()
        worst = max(worst, distance(y, expected))
    world.synchronize()
    trial = world.choices.last(GATHER, (m, n, k))
    timings = trial and [trial.timings("graph"), str(trial.faster)]
    if world.rank == 0:
        print(timings)
    return (
        worst
        if timings and all(other_timings == timings for other_timings in world.exchange(timings))
        else float("inf")
    )


def streams(world: weft.World) -> float:
    """Make calls on all urgent streams that torch has, none of which is a side stream. The calls share a workspace."""
    x, w = operands(world, SCATTER, 1024, 512, 256)
    x2, w2 = operands(world, GATHER, 1024, 512, 256)
    expected = (
        weft.matmul_reduce_scatter(x, w, world=world, plan="fused"),
        weft.all_gather_matmul(x2, w2, world=world, plan="fused"),
    )
    world.synchronize()
    others = [torch.cuda.Stream(priority=-1) for _ in range(32)]
    results = []
    for i in range(64):
        with torch.cuda.stream(others[i % 32]):
            results.append((0, weft.matmul_reduce_scatter(x, w, world=world, plan="fused")))
            results.append((1, weft.all_gather_matmul(x2, w2, world=world, plan="fused")))
    world.synchronize()
    return 0.0 if all(torch.equal(y, expected[i]) for i, y in results) else float("inf")


def cold_capture(world: weft.World) -> float:
    """Check that a first call inside a capture raises an error with advice, and that the next call works outside."""
    x, w = operands(world, GATHER, 8 * 37 * world.size, 136, 72)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            weft.all_gather_matmul(x, w, world=world, plan="fused")
    except weft.WeftError as e:
        assert "before capturing" in str(e), e
    else:
        return float("inf")
    torch.cuda.synchronize()
    y = weft.all_gather_matmul(x, w, world=world, plan="fused")
    return distance(y, weft.all_gather_matmul(x, w, world=world, plan="sequential"))


def beside_a_capture(world: weft.World) -> float:
    """Destroy the CUDA graphs of calls' copies in another thread while a stream is captured. The capture must stay
    valid."""
    x, w = operands(world, GATHER, 8 * 41 * world.size, 136, 72)
    call = partial(weft.all_gather_matmul, x, w, world=world, plan="decomposed")
    results = [call() for _ in range(4)]
    world.synchronize()

    def drop() -> None:
        world.forget_prepared()
        gc.collect()

    graph, count = torch.cuda.CUDAGraph(), torch.zeros(1, device=world.device)
    thread = threading.Thread(target=drop)
    with torch.cuda.graph(graph):
        count += 1
        thread.start()
        thread.join()
    graph.replay()
    results.append(call())
    world.synchronize()
    return max(float(count != 1), *(distance(result, results[0]) for result in results))


def far_rows(world: weft.World) -> float:
    """Use both halves of arenas with more rows than 24 bits can count."""
    m, wide, worst = 1 << 16, 66 * 256, 0.0
    for op, n, k in ((SCATTER, wide, 64), (GATHER, 64, wide)):
        torch.manual_seed(world.rank)
        rows = m // world.size if op == GATHER else m
        x, w = (torch.randn(r, k, device="cuda", dtype=torch.bfloat16) for r in (rows, n))
        expected = getattr(weft, op)(x, w, world=world, plan="sequential")
        for _ in range(2):
            actual = getattr(weft, op)(x, w, world=world, plan="fused")
            worst = max(worst, distance(actual.float(), expected.float()))
    return worst


def disagree(world: weft.World) -> float:
    """Check that shapes that differ between ranks raise an error on every rank before NCCL is called, and that the
    World still works."""
    x, w = operands(world, SCATTER, 96, 64, 64 + 8 * (world.rank == 0))
    try:
        weft.matmul_reduce_scatter(x, w, world=world, plan="sequential")
    except weft.Mismatch:
        return reduce_case(world, 96, 64, 64, "fused")
    return float("inf")


def groups_by_libraries(world: weft.World) -> float:
    """Check every form of quack's grouped GEMM with groups that end within tiles, an empty group, and rows after the
    last group."""
    rows = [300, 0, 1, 127, 640]
    x, w = (draw(i, *shape).to(world.device) for i, shape in ((1, (1200, 264)), (2, (len(rows), 520, 264))))
    starts = torch.tensor([0, *rows], device=world.device).cumsum(0).int()
    expected = torch.cat([part.float() @ m.float().t() for part, m in zip(x[: sum(rows)].split(rows), w, strict=True)])
    out, worst = world.empty((1200, 520), x.dtype), 0.0
    for form in quack.FORMS:
        out.fill_(7.0)
        quack.product(form)(x, w, out, starts)
        behind = (out[sum(rows) :] != 7.0).any().item()
        worst = max(worst, distance(out[: sum(rows)], expected), float("inf") if behind else 0.0)
    return max(worst, distance(library_gemm.multiply_groups(x, w, starts)[: sum(rows)], expected))


def shared_tiles(world: weft.World, replays: int) -> float:
    """Run weft's own GEMM with its last tiles split into two to six parts and with helpers that compute one to three
    tiles. The bits must be the same every time."""
    worst = 0.0
    for i, (m, n, k, programs, gated) in enumerate(
        [
            (256, 2560, 8192, 132, 0), (512, 2560, 8192, 132, 0), (1024, 2560, 8192, 132, 0), (512, 14336, 8192, 132, 7168),
            (300, 1032, 2056, 116, 0), (77, 8192, 1024, 100, 4096),
        ]
    ):  # fmt: skip
        programs = min(programs, world.sm_count)
        x, w = (draw(i, m, k).to(world.device), (draw(i + 10, n, k) * 0.1).to(world.device))
        out = world.empty((m, gated or n), x.dtype)
        matmul(x, w, out, world, programs, gated)
        expected = x.float() @ w.float().t()
        if gated:
            blocks = expected.view(m, -1, 2, world.backend.scale.interleave)
            expected = (torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]).reshape(m, gated)
        worst, first_result = max(worst, distance(out, expected)), out.clone()
        graph, differ = torch.cuda.CUDAGraph(), torch.zeros((), device=world.device, dtype=torch.int64)
        with torch.cuda.graph(graph):
            matmul(x, w, out, world, programs, gated)
        for _ in range(replays):
            out.zero_()
            graph.replay()
            differ += (out != first_result).any()
        world.synchronize()
        worst = max(worst, float("inf") if differ.item() else 0.0)
    return worst


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    even, uneven, odd = [256] * size, balanced_rows(1000, size), [0, 300, *[33] * (size - 2)]
    yield "torch.compile, fullgraph", 0.0, partial(compiled_ops, world, "aot_eager")
    yield "all-gather gradients", BF16, partial(all_gather_grads, world, even, 520, 264, "fused")
    yield "all-gather gradients, uneven", BF16, partial(all_gather_grads, world, uneven, 520, 264, "fused")
    yield "reduce-scatter gradients", BF16, partial(reduce_grads, world, 1000, 520, 264, "fused")
    for plan_of in ("fused", "second", "posted", "other"):
        for op in (GATHER, SCATTER, ALL):
            plan = {"fused": FUSED[op], "second": SECOND[op], "posted": FEW[op]}.get(plan_of) or Decomposed()
            case = partial(
                *((all_gather_case, world, [256] * size) if op == GATHER else (reduce_case, world, 256 * size)), 1024, 512, plan,
                **({} if op == GATHER else {"everywhere": op == ALL}), calls=3,
            )  # fmt: skip
            yield f"{op} {plan_of}", BF16, case
            yield f"{op} {plan_of}, transposed weight", BF16, partial(case, views=True)
            yield f"{op} {plan_of} delays", 0.0, partial(delays, world, op, plan)
            yield f"{op} {plan_of} replay x100", 0.0, partial(replay, world, op, plan, 100)
    yield (
        "large all-gather + GEMM, second",
        BF16,
        partial(all_gather_case, world, [8192 // size] * size, 2752, 4096, SECOND[GATHER], calls=2),
    )
    yield (
        "large GEMM + reduce-scatter, second",
        BF16,
        partial(reduce_case, world, 8192, 4096, 1376, SECOND[SCATTER], calls=2),
    )
    for op, plan in HALF.items():
        assert plan != FUSED[op]
        case = (
            (all_gather_case, world, [256] * size)
            if op == GATHER
            else (partial(reduce_case, everywhere=op == ALL), world, 256 * size)
        )
        yield f"{op} half tiles", BF16, partial(*case, 1024, 512, plan, calls=3)
        yield f"{op} half tiles delays", 0.0, partial(delays, world, op, plan)
    if quack.lacks() is None and size > 1:
        for form in quack.FORMS:
            plan = FlagGated(*form)
            title = f"{GATHER} flag_gated {form.tile_m} x {form.tile_n}"
            yield title, BF16, partial(all_gather_case, world, [512] * size, 1032, 520, plan, True, calls=3)
            yield f"{title} delays", 0.0, partial(delays, world, GATHER, plan)
            yield f"{title} replay x100", 0.0, partial(replay, world, GATHER, plan, 100)
        yield f"{GATHER} by trial", BF16, partial(by_trial, world, 8192, 5504, 4096)
    if quack.lacks() is None:
        yield "groups of rows by libraries", BF16, partial(groups_by_libraries, world)
    yield "GEMM, shared tiles, replay x50", BF16, partial(shared_tiles, world, 50)
    for op in (GATHER, ALL):
        yield f"{op} fused, out holds x", BF16, partial(shared_case, world, op, 256, 512, FUSED[op])
    yield (
        f"{GATHER} sequential, views",
        BF16,
        partial(all_gather_case, world, even, 520, 264, "sequential", views=True, calls=3),
    )
    if size > 1:
        for tokens in (9, 41):  # sizes that only this check uses
            layer = Layer(tokens, 8 * size, 4, 512, 256, torch.bfloat16)
            case = partial(gpu_moe.against, world, "auto", layer, [tokens])
            yield f"moe by trial, {tokens} tokens", gpu_moe.BOUND, partial(timed, world, "moe", case)
        for m in (9, 701):
            case = partial(norm_case, world, m, 4608, "auto", calls=3)
            yield f"all-reduce + norm by trial, {m} rows", BF16, partial(timed, world, "all_reduce_rms_norm", case)
        case = partial(gpu_attention.long, world, Shape((1016,) * size, 8, 8, 128, causal=True))
        yield "attention by trial", gpu_attention.BOUND, partial(timed, world, "gathered_attention", case)
    for op in (GATHER, SCATTER, ALL):
        yield f"{op} on a GPU nobody measured", BF16, partial(unmeasured, world, op, 2048, 1024, 1032)
    yield "1,000 calls", 0.0, partial(many_calls, world, 1000)
    yield "streams", 0.0, partial(streams, world)
    yield "cold capture", BF16, partial(cold_capture, world)
    if size > 1:
        yield "beside a capture", 0.0, partial(beside_a_capture, world)
    yield "rows beyond 24 bits", BF16, partial(far_rows, world)
    yield "disagreement", BF16, partial(disagree, world)
    yield from inference_cases(world, SEQUENTIAL | PLANS)
    yield "mlp graph", 0.0, partial(mlp_graph, world, 256, 256, 200 * size)
    yield "mlp inference", 1e-2, partial(mlp_inference, world, even, 256, 200 * size, "fused")
    for name, plans in (("fused", FUSED), ("second", SECOND)):
        yield (
            f"all-gather {name}, an empty shard",
            BF16,
            partial(all_gather_case, world, odd, 520, 264, plans[GATHER], True, calls=2),
        )
        yield (
            f"reduce-scatter {name}, uneven",
            BF16,
            partial(reduce_case, world, 1003, 520, 264, plans[SCATTER], True, calls=2),
        )
        yield (
            f"all-reduce {name}, uneven",
            BF16,
            partial(reduce_case, world, 1003, 520, 264, plans[ALL], True, True, calls=2),
        )
    yield f"{ALL} one shot", BF16, partial(reduce_case, world, 33, 8192, 512, OneShot(), True, True, calls=3)
    yield "random shapes, posted", BF16, partial(random_shapes, world, "posted", 6)
    yield "random shapes, second", BF16, partial(random_shapes, world, "second", 6)
    yield "random shapes, fused", BF16, partial(random_shapes, world, "fused", 6)
    yield from ops_checks(world)
    yield from reduce_checks(world)
    yield from fp8_checks(world)
    yield from launch_checks(world)
    yield from guarded_checks(world)
    yield from signaled_checks(world)
    yield from routed_checks(world)
    yield from router_checks(world)
    yield from moe_checks(world)
    yield from exchange_checks(world)
    yield from attention_checks(world)
    yield from moe_fused_checks(world)
    yield from moe_tensor_checks(world)
    yield from moe_training_checks(world)
    yield from moe_parts_training_checks(world)
    yield from model_checks(world)
    yield from hf_checks(world)
    yield from hf_moe_checks(world)
    yield from parallel_checks(world)
    yield from async_tp_checks(world)


def wanted(name: str, only: Sequence[str], without: Sequence[str]) -> bool:
    return any(part in name for part in only) and not any(part in name for part in without)


@contextmanager
def launched() -> Iterator[dict[str, str]]:
    """Return the parts of weft whose kernels this block launches, with the names of their code."""
    parts: dict[str, str] = {}
    launch, prepared = GpuBackend.launch, weft.Launch.__call__

    def note(kernel: Any) -> None:
        if (module := kernel.fn.__module__).startswith("weft."):
            part = part_of(module)
            parts[part] = tree_of_part(part)

    def launched_once(backend: GpuBackend, kernel: Any, *arguments: Any, **options: Any) -> None:
        note(kernel)
        launch(backend, kernel, *arguments, **options)

    def launched_again(one: weft.Launch, stream: Any, /, **moving: Any) -> None:
        note(one.kernel)
        prepared(one, stream, **moving)

    GpuBackend.launch, weft.Launch.__call__ = launched_once, launched_again  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        GpuBackend.launch, weft.Launch.__call__ = launch, prepared  # type: ignore[method-assign]


def outcome_of(name: str, check: Callable[[], float], world: weft.World) -> tuple[float, str, dict[str, str]]:
    """Return the check's error on this rank, the exception that it raised, and the parts whose kernels it launched."""
    message = ""
    with launched() as parts:
        try:
            error = check()
        except Exception as e:
            error, message = float("inf"), f"rank {world.rank}: {e!r}"[:600]
            print(f"{name}: {message}", flush=True)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # ranks on one GPU share its memory
    return error if error == error else float("inf"), message, parts


def run(
    world: weft.World,
    rows: Path,
    queue: Queue,
    seconds: float,
    again: Callable[[], weft.World] = weft.init,
    gpus: int = 1,
    checks_of: Callable[[weft.World], Iterator[tuple[str, float, Callable[[], float]]]] | None = None,
) -> bool:
    """Run checks from the queue until it is empty or the time is up, and write each outcome as a line of JSON to
    `rows`. Return whether the ranks could synchronise after every check. `again` creates a new World after a failed
    check, since the old World's counters may disagree. `checks_of` returns the checks, by default this file's."""
    start, who = time.time(), rows.stem
    todo = {name: (bound, check) for name, bound, check in (checks_of or checks)(world)}
    while name := world.exchange(queue.take(who) if world.rank == 0 and time.time() - start < seconds else None)[0]:
        began, (bound, check) = time.time(), todo[name]
        error, message, parts = outcome_of(name, check, world)
        try:
            errors = world.exchange((error, message))
        except weft.WeftError as e:
            errors, usable = [(float("inf"), repr(e))], False
        else:
            usable = True
        worst, took = max(e for e, _ in errors), time.time() - began
        row = dict(
            check=name, ranks=world.size, gpus=gpus, outcome="passed" if worst <= bound else "failed", bound=bound,
            error=worst if worst < 1e30 else "inf", seconds=round(took, 1), parts=parts, date=time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        if worst > bound:
            row["why"] = "; ".join(s for _, s in errors if s)
        if world.rank == 0:
            with rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{time.time() - start:6.1f} s {name}: {worst:.2e} {row['outcome']} ({took:.1f} s)", flush=True)
        if worst > bound:
            if not usable:
                return False
            try:
                world = again()
                todo = {name: (bound, check) for name, bound, check in (checks_of or checks)(world)}
            except Exception as e:
                print(f"no other World: {e!r}"[:600], flush=True)
                return False
    if world.rank == 0:
        queue.release(who)
    return True


def stalled_peer(world: weft.World, op: str) -> bool:
    """Check that WEFT_TIMEOUT bounds the wait, and that the error names the peer and the memory on which the kernel
    waited."""
    x, w = operands(world, GATHER, 256 * world.size, 256, 128)
    calls = {
        GATHER: lambda: weft.all_gather_matmul(x, w, world=world, plan="fused"),
        "flag_gated": lambda: weft.all_gather_matmul(x, w, world=world, plan="flag_gated"),
        "one_shot": lambda: weft.all_reduce(x, world=world, plan="one_shot"),
        "moe_exchange": lambda: exchange_once(world),
    }
    calls[op]()
    world.synchronize()
    world.exchange("ready")
    if world.rank == world.size - 1:
        time.sleep(12)
        return True
    start = time.time()
    try:
        calls[op]()
        world.synchronize()
    except weft.Timeout as e:
        took, message = time.time() - start, str(e)
    else:
        took, message = -1.0, "no Timeout"
    named = {
        GATHER: [GATHER],
        "flag_gated": [f"{GATHER}, staged"],
        "one_shot": [
            "OneShot",
            "calls of low-latency rows",
        ],  # the wait on the rows or on the call's number, whichever expires first
        "moe_exchange": ["calls of routes"],
    }[op]
    ok = 0 < took < 10 and any(name in message for name in named) and f"rank {world.size - 1}" in message
    print(
        f"stalled peer of {op}, rank {world.rank}: {'ok' if ok else 'FAILED'} after {took:.1f} s: {message}", flush=True
    )
    return ok


def todo_of(world: weft.World, gpus: int, only: Sequence[str], without: Sequence[str]) -> list[str]:
    names = [name for name, _, _ in checks(world) if wanted(name, only, without)]
    return ordered(names, recorded(world.size, gpus), tree_of(WEFT))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, default=Path("gpu/out"))
    p.add_argument("--name", default="rows", help="of the file of rows, which no other process writes")
    p.add_argument("--queue", type=Path, help="shared with other processes; default: one of its own")
    p.add_argument("--seconds", type=float, default=120, help="after which no check begins")
    p.add_argument("--only", nargs="*", default=[""], help="checks whose name contains one of these")
    p.add_argument("--without", nargs="*", default=[], help="not those whose name contains one of these")
    p.add_argument("--stalled-peer", choices=STALLED)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    if a.stalled_peer:
        ok = stalled_peer(world, a.stalled_peer)
    else:
        gpus = len(set(world.exchange(str(torch.cuda.get_device_properties(world.device).uuid))))
        queue = Queue(a.queue or a.out / f"queue-{a.name}.json")
        names = todo_of(world, gpus, a.only, a.without)  # on every rank, because this call may be collective
        if world.rank == 0:
            if a.queue is None:
                queue.path.unlink(missing_ok=True)
            queue.fill(names)
        ok = run(world, a.out / f"{a.name}.jsonl", queue, a.seconds, gpus=gpus)
    sys.stdout.flush()
    if a.stalled_peer or not ok:
        os._exit(0 if ok else 1)  # a stalled peer does not take part in closing the World
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
