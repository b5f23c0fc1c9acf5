"""The World on which ops run: refused input, disagreeing ranks, plans as JSON, workspaces, and waits that expire."""

from __future__ import annotations

import functools
import gc
import io
import itertools
import json
import logging
import os
import pydoc
import random
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from triton import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from tests.emulated.cases import changed, draw
from tests.emulated.cases_ops import FUSED, KINDS, OPS, SMALL_FUSED, case
from tests.gates import some
from weft import Mismatch, Plan, Timeout, Unsupported, WeftError, _triton, moe
from weft.backends import cuda, processes, shared_gpu
from weft.backends.base import StreamWork, timeout_seconds
from weft.backends.cuda import CudaBackend, GpuBackend, _device_of, _why_unreachable
from weft.backends.launcher import Launcher
from weft.backends.shared_gpu import RankDevice
from weft.emulator.bounds import ADDRESS
from weft.kernel_launch import BoundLaunch, Launch, load_in_order
from weft.nn.weave import LayerPlan
from weft.op import REGISTRY
from weft.ops.all_gather_matmul.op import ALL_GATHER_MATMUL
from weft.ops.norm import Remap
from weft.planner.auto import auto
from weft.planner.table import Measured, learn
from weft.plans import (
    Decomposed,
    Dispatched,
    DispatchedColumns,
    FlagGated,
    Fused,
    FusedAllReduce,
    FusedGather,
    FusedGatherByCopies,
    FusedMoe,
    FusedReduce,
    FusedReduceScatter,
    GemmTile,
    OneShot,
    Segmented,
    Sequential,
    Signaled,
    TileShape,
    TwoShot,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)
from weft.scale import SMALL_ALL_REDUCE, SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_TILE

BF = torch.bfloat16


def emulate(fn: Callable[[weft.World], Any], ranks: int = 2, seed: int = 0, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed, **options)


def call(world: weft.World, op: str, x: Any = None, w: Any = None, bias: Any = None, **options: Any) -> Any:
    """Call `op` with x [8, 16] and weight [16, 16] unless they are given."""
    x = draw(world.rank, 8, 16) if x is None else x
    w = draw(9, 16, 16) if w is None else w
    return getattr(weft, op)(x, w, bias, world=world, **{"plan": "fused", **options})


def caught(fn: Callable[[], Any]) -> Exception | None:
    try:
        fn()
    except Exception as error:
        return error
    return None


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("x a list", dict(x=[[1.0] * 16] * 8), TypeError, "x must be a tensor on cpu, got list"),
    ("weight an array", dict(w=np.ones((16, 16))), TypeError, "weight must be a tensor on cpu, got ndarray"),
    ("weight a module", dict(w=torch.nn.Linear(16, 16)), TypeError, "weight must be a tensor on cpu, got Linear"),
    ("bias a number", dict(bias=1.0), TypeError, "bias must be a tensor on cpu, got float"),
    ("out a list", dict(out=[]), TypeError, "out must be a tensor on cpu, got list"),
    ("x 1-D", dict(x=draw(0, 16)), ValueError, r"2-D, got x \[16\] bfloat16 on cpu and weight \[16, 16\]"),
    ("weight 1-D", dict(w=draw(0, 16)), ValueError, r"2-D, got x \[8, 16\].* and weight \[16\]"),
    ("weight 3-D", dict(w=draw(0, 2, 16, 16)), ValueError, r"weight \[2, 16, 16\]"),
    ("K", dict(w=draw(0, 16, 24)), ValueError, r"x \[8, 16\].*weight \[16, 24\].*disagree on K \(weight is \[out, in\]"),
    ("no columns", dict(w=draw(0, 0, 16)), ValueError, r"empty weight \[0, 16\]"),
    ("no K", dict(x=draw(0, 8, 0), w=draw(0, 16, 0)), ValueError, r"empty weight \[16, 0\]"),
    ("weight's dtype", dict(w=draw(0, 16, 16).half()), TypeError, r"weight is \[16, 16\] float16.*x is \[8, 16\] bfloat16"),
    ("float32", dict(x=torch.ones(8, 16), w=torch.ones(16, 16)), TypeError, "float32 on cpu; bfloat16 and float16"),
    ("int", dict(x=torch.ones(8, 16).int(), w=torch.ones(16, 16).int()), TypeError, "int32 on cpu; bfloat16 and float16"),
    ("x elsewhere", dict(x=torch.empty(8, 16, dtype=BF, device="meta")), ValueError, "x .* on meta is not on .* device, cpu"),
    ("weight elsewhere", dict(w=torch.empty(16, 16, dtype=BF, device="meta")), ValueError, "weight .* on meta is not on"),
    ("bias elsewhere", dict(bias=torch.empty(16, dtype=BF, device="meta")), ValueError, "bias .* on meta is not on"),
    ("bias too short", dict(bias=draw(0, 8)), ValueError, r"bias \[8\] .*does not match weight \[16, 16\]"),
    ("bias 2-D", dict(bias=draw(0, 1, 16)), ValueError, r"bias \[1, 16\] .*does not match"),
    ("bias's dtype", dict(bias=draw(0, 16).float()), TypeError, r"bias is \[16\] float32"),
    ("out's shape", dict(out=torch.empty(3, 16, dtype=BF)), ValueError, r"out \[3, 16\].* must be contiguous, \[\d+, 16\]"),
    ("out's dtype", dict(out="float"), ValueError, r"out \[\d+, 16\] float32"),
    ("out's layout", dict(out="strided"), ValueError, "must be contiguous"),
    ("out elsewhere", dict(out="meta"), ValueError, "on meta is not on this rank"),
    ("plan's name", dict(plan="fastest"), ValueError, r"plan 'fastest' is not \"auto\", one of \['decomposed', ('flag_gated', )?'fused', 'one_shot', 'seq"),
    ("plan's type", dict(plan=3), (TypeError, ValueError), "plan"),  # type: ignore[list-item]
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
@pytest.mark.parametrize("op", OPS)
def test_bad_input_is_refused_and_nothing_is_lost(
    op: str, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    """The message quotes the arguments, and the next call works."""

    def main(world: weft.World) -> Exception | None:
        bad = dict(arguments)
        if isinstance(bad.get("out"), str):
            rows = {"all_gather_matmul": 16, "matmul_reduce_scatter": 4, "matmul_all_reduce": 8}[op]
            good = torch.zeros(rows, 16, dtype=BF)
            kinds = {"float": good.float(), "strided": good.t().contiguous().t(), "meta": good.to("meta")}
            bad["out"] = kinds[bad["out"]]
        exception = caught(lambda: call(world, op, **bad))
        assert case(world, op, [8, 8], 16, 16) < 5e-3
        return exception

    for exception in emulate(main):
        assert isinstance(exception, error), repr(exception)
        assert op in str(exception)
        with pytest.raises(error, match=says):
            raise exception


def test_arguments_that_are_not_tensors_are_refused_with_gradients_too() -> None:
    def main(world: weft.World) -> None:
        x, w = draw(0, 8, 16).requires_grad_(), draw(1, 16, 16)
        for op in OPS:
            with pytest.raises(TypeError, match=f"{op}: weight must be a tensor on cpu, got list"):
                getattr(weft, op)(x, [[1.0]], world=world)
        vector = draw(2, 16)
        bad: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: weft.all_reduce([1.0], world=world), TypeError, "all_reduce: x must be a tensor"),
            (lambda: weft.all_reduce(w, world=world, out=[]), TypeError, "all_reduce: out must be a tensor"),
            (lambda: weft.all_reduce_rms_norm(w, None, [1.0], world=world), TypeError, "rms_norm: weight must be a tensor"),
            (lambda: weft.all_reduce_rms_norm(w, None, vector, world=world, out=3), TypeError, "norm: out must be a tensor"),
            (lambda: weft.rms_norm(w, 1e-6, vector, world=world), TypeError, "rms_norm: weight must be a tensor .* got float"),
            (lambda: weft.rms_norm(w, vector, 1e-6, world=world, remap=3), TypeError, "remap must be the weft.Remap .* got 3"),
            (lambda: weft.residual_add(w, None, world=world), TypeError, "residual must be a tensor .* got NoneType"),
            (lambda: weft.silu_mul([1.0], world=world), TypeError, "silu_mul: x must be a tensor, got list"),
            (lambda: weft.matmul_all_to_all([1], w, destinations=[0], world=world), TypeError, "all_to_all: x must be a tensor"),
            (lambda: weft.route([0], world=None), TypeError, "route: world must be a weft.World, got NoneType"),
            (lambda: weft.nn.ParallelMLP(64, 128, world=None), TypeError, "ParallelMLP: world must be a weft.World"),
            (lambda: weft.nn.ParallelMLP(16, 128, world=world)([1.0]), TypeError, "all_gather_matmul: x must be a tensor"),
            (lambda: weft.nn.RowParallelLinear.from_linear([1], world=world), TypeError, "an nn.Linear is needed, got list"),
        ]  # type: ignore[arg-type, list-item, call-overload]  # fmt: skip
        for give, error, says in bad:
            with pytest.raises(error, match=says):
                give()

    emulate(main)


def test_rows_are_integers() -> None:
    def main(world: weft.World) -> None:
        for rows in ([8.5, 8], 8, [None, 8]):
            for op in ("all_gather_matmul", "matmul_reduce_scatter"):
                with pytest.raises(TypeError, match=f"{op}: rows must be integers, one for each rank, got"):
                    call(world, op, rows=rows)

    emulate(main)


def test_memory_has_a_shape_and_a_dtype() -> None:
    def main(world: weft.World) -> None:
        for make in (world.empty, world.zeros, world.symmetric):
            for wrong, error, says in (
                ((16, torch.float32), TypeError, r"a shape is a sequence of integers, such as \(16, 64\), not 16"),
                (((16.0,), torch.float32), TypeError, r"not \(16.0,\)"),
                (((4, -4), torch.float32), ValueError, r"a shape has no negative sizes: \(4, -4\)"),
                (((4,), "float32"), TypeError, "a dtype is one of torch's, such as torch.float32, not 'float32'"),
            ):
                with pytest.raises(error, match=says):
                    make(*wrong)  # type: ignore[operator]
        for values in (3, [[1, 2], [3, 4]]):
            with pytest.raises(ValueError, match="World.tensor takes a list of numbers, not"):
                world.tensor(values, torch.int32)  # type: ignore[arg-type]

    emulate(main)


def test_a_repeated_name_is_two_tensors() -> None:
    """Two allocations of symmetric memory under one name are two tensors, as docs/writing-kernels.md states; two
    channels of one name are the same channel."""

    def main(world: weft.World) -> None:
        a, b = (world.symmetric((4,), torch.float32, "x") for _ in range(2))
        a.local.fill_(1)
        assert not b.local.any() and a.addresses.tolist() != b.addresses.tolist()
        assert world.channel("x", 4, None).counters is world.channel("x", 4, None).counters

    emulate(main)


@pytest.mark.parametrize("rows", [(8,), (8, 8, 8), (7, 9), (16, 0), (8, -8)])
def test_rows_that_do_not_fit_are_refused(rows: tuple[int, ...]) -> None:
    def main(world: weft.World) -> list[Exception | None]:
        x = draw(0, 15, 16)  # none of these `rows` sums to 15
        return [
            caught(lambda: call(world, "all_gather_matmul", draw(0, 8, 16), rows=rows)) if rows != (8, -8) or world.rank else None,
            caught(lambda: call(world, "matmul_reduce_scatter", x, rows=rows)),
        ]  # fmt: skip

    results = emulate(main)
    for rank, (gather, scatter) in enumerate(results):
        with pytest.raises(ValueError, match=r"rows \[.*\] must name 2 ranks and sum to the rows of x \[15, 16\]"):
            raise scatter or AssertionError("accepted")
        if not (len(rows) == 2 and min(rows) >= 0 and rows[rank] == 8) and gather is not None:
            with pytest.raises(ValueError, match=rf"rows \[.*\] must name 2 ranks and 8 for rank {rank}"):
                raise gather


def test_world_must_be_a_world() -> None:
    for op in OPS:
        with pytest.raises(TypeError, match=f"{op}: world must be a weft.World, got str"):
            getattr(weft, op)(draw(0, 8, 16), draw(1, 16, 16), world="world")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("groups", [(1,), (1, 1, 1), (3, 1), (8,)])
def test_groups_that_do_not_cover_the_world_are_refused(op: str, groups: tuple[int, ...]) -> None:
    def main(world: weft.World) -> Exception | None:
        return caught(lambda: call(world, op, draw(world.rank, 8, 16), plan=Decomposed(groups)))

    for exception in emulate(main, 4):
        assert isinstance(exception, ValueError) and "groups" in str(exception), repr(exception)


CANNOT = [
    *((op, dict(block_n=24)) for op in OPS),
    *((OPS[0], dict(pull_programs=p, split=s)) for p, s in ((0, 1), (6, 1), (40, 1), (2, 4), (3, 2))),
    *((op, dict(forward_programs=0)) for op in OPS[1:]),
]


@pytest.mark.parametrize(("op", "change"), CANNOT, ids=str)
def test_plans_that_cannot_run_are_refused(op: str, change: dict[str, int]) -> None:
    """A plan is refused if it leaves no program for the GEMM, has no pull program, has a chunk that its programs cannot
    share, or has a block whose size is not a power of two."""

    def main(world: weft.World) -> Exception | None:
        return caught(lambda: call(world, op, plan=changed(SMALL_FUSED[op], **change)))

    for exception in emulate(main, sm_count=6):
        assert isinstance(exception, (Unsupported, ValueError)), repr(exception)


@pytest.mark.parametrize(
    ("op", "plan"), [(op, plan) for op in OPS for plan in ("auto", *KINDS, SMALL_FUSED[op], Decomposed((1,)))], ids=str
)
def test_one_rank_is_an_ordinary_gemm(op: str, plan: Any, caplog: Any) -> None:
    def main(world: weft.World) -> float:
        y = call(world, op, draw(0, 5, 12), draw(1, 7, 12), draw(2, 7), plan=plan)
        expected = draw(0, 5, 12).double() @ draw(1, 7, 12).double().t() + draw(2, 7)
        out = torch.zeros(5, 7, dtype=BF)
        assert call(world, op, draw(0, 5, 12), draw(1, 7, 12), draw(2, 7), plan=plan, out=out) is out
        assert torch.equal(out, y)
        assert call(world, op, draw(0, 0, 12), draw(1, 7, 12), plan=plan).shape == (0, 7)
        return ((y.double() - expected).norm() / expected.norm()).item()

    assert emulate(main, 1)[0] < 5e-3
    with caplog.at_level(logging.WARNING, "weft"):
        assert not caplog.records, "one rank alone must log no warning"


def test_one_rank_gathers_a_copy() -> None:
    def main(world: weft.World) -> None:
        x = draw(0, 5, 16)
        _, full = weft.all_gather_matmul_with_gathered(x, draw(1, 8, 16), world=world)
        assert torch.equal(full, x) and full.data_ptr() != x.data_ptr()

    emulate(main, 1)


@pytest.mark.parametrize("plan", ["auto", *KINDS])
def test_no_rows(plan: str) -> None:
    def main(world: weft.World) -> None:
        for op in OPS:
            out = torch.zeros(0, 16, dtype=BF)
            assert call(world, op, draw(0, 0, 16), plan=plan).shape == (0, 16)
            assert call(world, op, draw(0, 0, 16), plan=plan, out=out) is out
        y, full = call(world, "all_gather_matmul_with_gathered", draw(0, 0, 16), plan=plan)
        assert y.shape == (0, 16) and full.shape == (0, 16) and full.dtype == BF

    emulate(main, 3)


# -- ranks that disagree -----------------------------------------------------------------------------------------------


def of_rank(world: weft.World, *values: Any) -> Any:
    return values[min(world.rank, len(values) - 1)]


DISAGREE: dict[str, Callable[[weft.World, str], Any]] = {
    "K": lambda w, op: call(w, op, draw(0, 8, of_rank(w, 16, 24)), draw(1, 16, of_rank(w, 16, 24))),
    "N": lambda w, op: call(w, op, w=draw(1, of_rank(w, 16, 24), 16)),
    "M": lambda w, op: call(w, op, draw(0, of_rank(w, 8, 9), 16)),
    "no rows": lambda w, op: call(w, op, draw(0, of_rank(w, 0, 8), 16)),
    "dtype": lambda w, op: call(w, op, draw(0, 8, 16, dtype=of_rank(w, BF, torch.half)), draw(1, 16, 16, dtype=of_rank(w, BF, torch.half))),
    "bias": lambda w, op: call(w, op, bias=of_rank(w, None, draw(2, 16))),
    "plan's kind": lambda w, op: call(w, op, plan=of_rank(w, "fused", "decomposed")),
    "plan's parameters": lambda w, op: call(w, op, plan=of_rank(w, SMALL_FUSED[op], changed(SMALL_FUSED[op], pull_programs=1))),
    "op": lambda w, op: call(w, of_rank(w, op, OPS[OPS.index(op) - 1])),
    "N that falls back": lambda w, op: call(w, op, w=draw(1, of_rank(w, 16, 12), 16)),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("difference", DISAGREE)
@pytest.mark.parametrize("op", OPS)
def test_a_disagreement_raises_on_every_rank(op: str, difference: str, seed: int) -> None:
    """The error is raised before any launch and quotes every rank's call; the next call works."""

    def main(world: weft.World) -> Exception | None:
        exception = caught(lambda: DISAGREE[difference](world, op))
        assert case(world, op, [8] * world.size, 16, 16) < 5e-3
        return exception

    for exception in emulate(main, 3, seed):
        assert isinstance(exception, Mismatch), repr(exception)
        assert all(f"rank {r}: " in str(exception) for r in range(3)) and op in str(exception)


def test_a_disagreement_names_what_differs() -> None:
    def main(world: weft.World) -> Exception | None:
        return caught(lambda: call(world, "all_gather_matmul", w=draw(1, of_rank(world, 16, 24), 16)))

    for exception in emulate(main):
        assert str(exception).endswith("rank 0: all_gather_matmul N=16; rank 1: all_gather_matmul N=24"), exception


def test_plans_that_disagree_are_named_by_their_differences() -> None:
    def main(world: weft.World) -> list[str]:
        x, w, messages = draw(world.rank, 8, 16), draw(9, 16, 16), []
        for op, operands, plans in (
            ("all_gather_matmul", (x, w), (SMALL_GATHER, changed(SMALL_GATHER, pull_programs=1, block_k=16))),
            ("all_reduce", (x,), (TwoShotPull(), TwoShotPull(stages=3))),
            ("matmul_reduce_scatter", (x, w), (OneShot(), Decomposed(pieces=2))),
        ):
            run = functools.partial(getattr(weft, op), *operands, world=world)
            run(plan="sequential")
            messages.append(str(caught(functools.partial(run, plan=of_rank(world, *plans)))))
        return messages

    for gather, reduce, scatter in emulate(main):
        gather = gather.removeprefix("ranks disagree on this call: ")
        assert gather == "; ".join(
            f"rank {r}: all_gather_matmul plan=FusedGather(tile=GemmTile(block_k={block_k}), pull_programs={programs})"
            for r, block_k, programs in ((0, 32, 2), (1, 16, 1))
        )
        assert reduce.endswith("rank 0: all_reduce plan=TwoShotPull(stages=9); rank 1: all_reduce plan=TwoShotPull(stages=3)")  # fmt: skip
        assert "plan=OneShot(); rank 1:" in scatter and scatter.endswith("plan=Decomposed(pieces=2)")


def test_ranks_at_different_calls_are_named_in_short() -> None:
    """The other rank routes rows, exchanges an object of the caller, or calls an all-reduce."""

    def main(world: weft.World) -> list[str]:
        op = functools.partial(call, world, "all_gather_matmul", plan=SMALL_GATHER)
        other_calls = (
            lambda: weft.route([0], world=world),
            lambda: world.exchange(list(range(1000))),
            lambda: weft.all_reduce(draw(0, 8, 16), world=world),
        )
        return [str(caught(op if world.rank else do)) for do in other_calls]

    (routed, exchanged, _), (route, exchange, reduce) = emulate(main)
    assert (
        "rank 0: route of ('', b" in route
        and "rank 0: exchange of [0, 1, 2" in exchange
        and "rank 0: all_reduce op=all_reduce m=1" in reduce
    )
    assert max(map(len, (route, exchange, reduce))) < 700
    assert routed == route and exchanged == exchange, "an exchange must not return another rank's call as an object"


def test_a_plan_is_described_by_its_differences_from_the_default() -> None:
    assert str(FusedGather()) == "FusedGather()" and str(Dispatched()) == "Dispatched()"
    text = "FusedGather(tile=GemmTile(block_n=128, warps=4), flatten=False)"
    assert str(FusedGather(tile=GemmTile(block_n=128, warps=4), flatten=False)) == text
    assert str(Signaled(groups=(1, 2))) == "Signaled(groups=(1, 2))"


def test_rows_named_differently_disagree() -> None:
    def main(world: weft.World) -> Exception | None:
        return caught(lambda: call(world, "all_gather_matmul", rows=of_rank(world, (8, 8), (4, 8))))

    for exception in emulate(main):
        assert isinstance(exception, Mismatch) and "(4, 8)" in str(exception)


def test_order_of_ops_on_first_use() -> None:
    def main(world: weft.World) -> list[Exception | None]:
        order = OPS if world.rank else (OPS[1], OPS[0], OPS[2])
        return [caught(lambda op=op: call(world, op)) for op in order]

    for first_error, second_error, third_error in emulate(main):
        assert isinstance(first_error, Mismatch) and isinstance(second_error, Mismatch) and third_error is None


def test_agreement_costs_one_exchange_a_shape() -> None:
    def main(world: weft.World) -> None:
        backend: Any = world.backend
        count, exchange = [0], backend.exchange
        backend.exchange = lambda obj: (count.__setitem__(0, count[0] + 1), exchange(obj))[1]
        call(world, "all_gather_matmul")
        first_count = count[0]
        for _ in range(3):
            call(world, "all_gather_matmul")
        assert first_count > 0 and count[0] == first_count

    emulate(main)


# -- fallbacks ---------------------------------------------------------------------------------------------------------


def test_without_symmetric_memory_fused_is_sequential_and_logs_once(caplog: Any) -> None:
    def main(world: weft.World) -> float:
        world.backend.symmetric_unsupported = "GPU 0 has no peer access to GPUs [1]"
        world.backend.symmetric = None  # type: ignore[assignment,method-assign]
        return max(case(world, op, [9, 8], 16, 16, "fused", calls=3) for op in OPS)

    with caplog.at_level(logging.WARNING, "weft"):
        assert max(emulate(main)) < 5e-3
    messages = sorted(r.getMessage() for r in caplog.records)
    assert len(messages) == len(OPS), "each op must log one line"
    assert all("sequential instead of fused: GPU 0 has no peer access to GPUs [1]" in line for line in messages)


# -- plans -------------------------------------------------------------------------------------------------------------

tiles = st.builds(GemmTile, block_m=st.sampled_from([64, 128]), stages=st.integers(1, 5), group_m=st.integers(1, 9))
plans = st.one_of(
    st.just(Sequential()),
    st.builds(Decomposed, st.lists(st.sampled_from([1, 2, 4]), max_size=4).map(tuple)),
    st.builds(FusedGather, tile=tiles, pull_programs=st.integers(1, 32), flatten=st.booleans(), split=st.integers(1, 4)),
    st.builds(FusedGatherByCopies, tile=tiles, per_sm=st.integers(1, 2)),
    st.builds(FusedReduceScatter, pull_programs=st.integers(0, 32), pull_rows=st.sampled_from([8, 64])),
    st.builds(FusedAllReduce, tile=tiles, lag=st.integers(0, 8)),
    st.builds(FusedMoe, tile=tiles, copy_rows=st.sampled_from([1, 8])),
    st.builds(TwoShotPush, spread=st.booleans(), stages=st.sampled_from([2, 9])),
    st.builds(TwoShotPull, programs=st.integers(0, 9)),
    st.builds(TwoShotLowLatency, warps=st.sampled_from([4, 16])),
    st.builds(Dispatched, tile=tiles),
    st.builds(DispatchedColumns, tile=tiles),
)  # fmt: skip


def test_a_plan_stored_under_an_old_name_or_with_an_old_field_is_read() -> None:
    assert Plan.from_json('{"kind": "awaiting", "tile_m": 8}') == FlagGated(tile_m=8)
    assert Plan.from_json('{"kind": "segmented", "calls": 1, "push_programs": 0}') == Segmented(calls=1)


@given(plans)
def test_plan_survives_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan and type(again) is type(plan) and hash(again) == hash(plan)
    assert json.loads(plan.to_json())["kind"] == plan.kind and plan.kind in plan.to_json()


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"fused"', "{}", '{"kind": "warped"}', '{"kind": ["fused"]}', '{"kind": "fused", "pullerz": 1}', '{"kind": "fused", "pullers": "x"}',
     '{"kind": "sequential", "groups": [1]}'],
)  # fmt: skip
def test_invalid_plans_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(text)


def test_a_stored_plan_names_its_class_where_the_kind_has_several() -> None:
    assert "class" not in json.loads(Signaled().to_json())
    for op in OPS:
        assert json.loads(FUSED[op].to_json())["class"] == type(FUSED[op]).__name__
    stored = '{"kind": "fused", "class": "FusedMoe", "tile": {"block_m": 64}}'
    assert Plan.from_json(stored) == FusedMoe(tile=replace(FusedMoe.tile, block_m=64))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind": "fused", "pullers": 4}', r'"class" of kind \'fused\' must be one of .*FusedGather.*, got None'),
        ('{"kind": "fused", "class": "Signaled"}', r"must be one of .*FusedGather.*, got 'Signaled'"),
        ('{"kind": "fused", "class": "Fused"}', r"must be one of .*FusedGather.*, got 'Fused'"),
        ('{"kind": "segmented", "push_programs": 16}', "unexpected keyword argument 'push_programs'"),
        ('{"kind": "signaled", "block_m": 128}', "unexpected keyword argument 'block_m'"),
        ('{"kind": "signaled", "tile": {"rows": 128}}', "unexpected keyword argument 'rows'"),
        ('{"kind": "signaled", "tile": {"block_m": 24}}', "block_m=24 must be a power of two"),
        ('{"kind": "dispatched", "senders": 2}', '"class" of kind .dispatched. must be one of .*Dispatched'),
        ('{"kind": "two_shot", "post": true}', '"class" of kind .two_shot. must be one of .*TwoShotLowLatency'),
    ],
)
def test_a_plan_stored_by_another_version_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan.from_json(text)


@pytest.mark.parametrize("op", OPS)
def test_a_plan_of_another_ops_kernel_is_refused(op: str) -> None:
    others = [FUSED[other_op] for other_op in OPS if other_op != op]

    def main(world: weft.World) -> list[Exception | None]:
        return [caught(lambda plan=plan: call(world, op, plan=plan)) for plan in (*others, FusedMoe())]

    for exceptions in emulate(main):
        assert all(isinstance(e, ValueError) and "is not one of" in str(e) for e in exceptions), exceptions


@pytest.mark.parametrize("op", OPS)
def test_no_rows_are_the_librarys_also_where_shapes_were_measured(op: str) -> None:
    def main(world: weft.World) -> Plan:
        learn([Measured(op, 2, 512, 16, 16, "eager", FUSED[op], 1.5)])
        return auto(op, world, 0, 16, 16, "eager")

    assert emulate(main) == [Sequential()] * 2


def test_a_plan_that_was_learned_later_is_prepared_for_graphs_too() -> None:
    """Each eager call runs once the plan that a capture would run."""

    def main(world: weft.World) -> None:
        backend: Any = world.backend
        x, w = draw(world.rank, 64, 64), draw(1, 64, 64)
        for later in (replace(SMALL_GATHER, pull_programs=1), replace(SMALL_GATHER, pull_programs=3)):
            backend.capturing = lambda: False
            learn([Measured("all_gather_matmul", 2, 128, 64, 64, "graph", later, 1.5)])
            for _ in range(2):
                weft.all_gather_matmul(x, w, world=world)
            backend.capturing, backend.captures = lambda: True, lambda stream: True
            weft.all_gather_matmul(x, w, world=world)

    emulate(main, sm_count=40)


def test_a_size_that_is_called_once_prepares_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    """A capture after one call runs the plan of eager calls, and weft logs this; a capture after two calls runs the
    plan of graphs. A rank whose operand has a different layout takes part in the call too."""
    ran: dict[int, list[str]] = {0: [], 1: []}

    class Noted(type(ALL_GATHER_MATMUL)):  # type: ignore[misc]
        def prepare(self, world: weft.World, call: Any, plan: Plan) -> Any:
            run = super().prepare(world, call, plan)
            return lambda operands, out: ran[world.rank].append(plan.kind) or run(operands, out)

        def auto(self, world: weft.World, call: Any, mode: str) -> Plan:
            return SMALL_GATHER if mode == "graph" else Decomposed()

    op = Noted()

    def main(world: weft.World) -> list[list[str]]:
        backend: Any = world.backend
        x, w = draw(world.rank, 64, 64), draw(1, 64, 64)
        transposed = w if world.rank else w.t().contiguous().t()
        seen = []
        for weight, capturing in ((w, False), (w, True), (transposed, False), (w, False), (w, True)):
            backend.capturing, backend.captures = lambda c=capturing: c, lambda stream: True
            ran[world.rank].clear()
            op(world, "auto", (x, weight, None), (None, 0, False, None, None, False))
            seen.append(list(ran[world.rank]))
        return seen

    def on_a_stream_of_its_own(world: weft.World) -> list[str]:
        x, w = draw(world.rank, 64, 64), draw(1, 64, 64)
        ran[world.rank].clear()
        with world.on(world.side_stream("warm-up")):
            op(world, "auto", (x, w, None), (None, 0, False, None, None, False))
        return list(ran[world.rank])

    eager, graph = "decomposed", "fused"
    assert emulate(main) == [[[eager], [eager], [graph, eager], [eager], [graph]]] * 2
    assert emulate(on_a_stream_of_its_own) == [[graph, eager]] * 2
    assert sum("call a size twice" in r.message for r in caplog.records) > 0


def exits_without_a_result(rank: int, init: Any, fn: Any, args: Any, kwargs: Any, environment: Any, queue: Any) -> None:
    if rank == 0:
        queue.put((0, fn))


def test_ranks_that_end_without_a_result_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    torch.save(torch.ones(2), kept)
    monkeypatch.setattr(processes, "_rank_main", exits_without_a_result)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] ended without a result"):
        processes.spmd(weft.init, kept.getvalue(), 2, (), {}, False)  # type: ignore[arg-type]


def test_ranks_are_given_a_port_that_is_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was free when the launcher checked it may belong to a different program when a rank starts to listen
    on it."""

    def start(fn: Any, args: Any, **_: Any) -> NoReturn:
        environment = next(value for value in args if isinstance(value, dict) and "MASTER_PORT" in value)
        socket.create_connection((environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))).close()
        raise InterruptedError("somebody listens")

    monkeypatch.setattr(processes.mp, "start_processes", start)
    with pytest.raises(InterruptedError):
        processes.spmd(weft.init, repr, 2, (), {}, False)


def test_an_unknown_option_of_a_world_is_refused() -> None:
    with pytest.raises(TypeError, match="sm_counts"):
        weft.spmd(lambda world: None, 2, backend="emulated", sm_counts=8)
    with pytest.raises(ValueError, match="a world of 0 ranks"):
        weft.spmd(lambda world: None, 0, backend="emulated")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: FusedGather(pull_programs=0), ValueError, "pull_programs=0 must be at least 1"),
        (lambda: FusedReduceScatter(pull_programs=-1), ValueError, "pull_programs=-1 must be at least 0"),
        (lambda: GemmTile(group_m=0), ValueError, "group_m=0 must be at least 1"),
        (lambda: GemmTile(block_m=24), ValueError, "block_m=24 must be a power of two"),
        (lambda: FusedGather(pull_programs=2.5), TypeError, "pull_programs=2.5 must be int"),  # type: ignore[arg-type]
        (lambda: FusedGather(flatten=1), TypeError, "flatten=1 must be bool"),  # type: ignore[arg-type]
        (lambda: FusedGather(tile=TileShape()), TypeError, "tile=TileShape.* must be GemmTile"),  # type: ignore[arg-type]
        (lambda: Fused(), TypeError, "Fused is the abstract base of .*FusedGather.*FusedMoe.*"),
        (lambda: FusedReduce(), TypeError, "FusedReduce is the abstract base of .*"),
        (lambda: TwoShot(), TypeError, "TwoShot is the abstract base of .*TwoShotPush.*TwoShotPull.*TwoShotLowLatency.*"),
        (lambda: Decomposed(pieces=0), ValueError, "pieces=0 must be at least 1"),
        (lambda: Decomposed((1, 0)), ValueError, r"groups=\(1, 0\) must be at least 1"),
        (lambda: Decomposed([1, 1]), TypeError, "must be a tuple of ints"),  # type: ignore[arg-type]
        (lambda: Signaled(groups=(2, 0)), ValueError, r"groups=\(2, 0\) must be at least 1"),
        (lambda: Signaled(ctas=0), ValueError, "ctas=0 must be at least 1"),
        (lambda: OneShot(programs=-1), ValueError, "programs=-1 must be at least 0"),
        (lambda: TwoShotPush(warps=0), ValueError, "warps=0 must be at least 1"),
        (lambda: LayerPlan("woven", sms=-1), ValueError, "at least 0"),
        (lambda: LayerPlan(norm="two_sht"), ValueError, "norm 'two_sht' is not one of"),
        (lambda: LayerPlan(norm=FusedGather()), ValueError, "is not one of"),
    ],
)  # fmt: skip
def test_a_plan_has_only_numbers_that_it_can_have(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("op", "plan", "field"),
    [
        *((op, Decomposed(pieces=2), "pieces") for op in (OPS[0], OPS[2], "all_reduce", "all_reduce_rms_norm")),
        *((op, Decomposed((1, 1)), "groups") for op in ("all_reduce", "all_reduce_rms_norm")),
    ],
)  # fmt: skip
def test_a_field_that_an_op_could_only_ignore_is_refused(op: str, plan: Plan, field: str) -> None:
    REGISTRY[op].check_plan(Decomposed())
    with pytest.raises(ValueError, match=rf"^{op}: Decomposed\(.*\): {field} means nothing to this op$"):
        REGISTRY[op].check_plan(plan)


def test_the_plan_of_a_layer_accepts_a_plan_for_its_norms() -> None:
    plan = TwoShotPull(programs=16)
    assert LayerPlan("woven", norm=plan).norm_plan == plan == LayerPlan("woven", norm=plan.to_json()).norm_plan


OTHERWISE: dict[str, Plan] = {  # fused plans other than those of pull programs
    OPS[0]: FusedGatherByCopies(tile=SMALL_TILE),
    OPS[1]: replace(SMALL_REDUCE_SCATTER, pull_programs=0, forward_programs=2),
    OPS[2]: replace(SMALL_ALL_REDUCE, pull_programs=0, forward_programs=2),
}


# -- capture -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "plan"), [(op, plan) for op in OPS for plan in ("auto", *KINDS, OTHERWISE[op])], ids=str
)
def test_first_use_inside_a_capture_raises_with_advice(op: str, plan: str | Plan) -> None:
    """After a call outside a capture, the capture allocates nothing and makes no exchange between hosts."""

    def main(world: weft.World) -> Exception | None:
        backend: Any = world.backend
        backend.capturing = lambda: True
        exception = caught(lambda: call(world, op, plan=plan))
        backend.capturing = lambda: False
        call(world, op, plan=plan)
        exchange, symmetric = backend.exchange, backend.symmetric
        backend.capturing = lambda: True
        backend.exchange = backend.symmetric = None
        call(world, op, plan=plan)
        backend.exchange, backend.symmetric, backend.capturing = exchange, symmetric, lambda: False
        assert case(world, op, [8, 8], 16, 16, plan) < 5e-3
        return exception

    for exception in emulate(main):
        assert isinstance(exception, WeftError), repr(exception)
        assert op in str(exception) and "before capturing" in str(exception)


# -- workspaces --------------------------------------------------------------------------------------------------------


def test_a_graph_keeps_the_arena_half_of_its_capture() -> None:
    def main(world: weft.World) -> bool:
        epoch = weakref.ref(world.arena(64).epoch)
        assert world.arena(4096).epoch is not epoch()
        gc.collect()
        return epoch() is not None

    assert all(emulate(main))


def test_growing_batches_share_a_workspace() -> None:
    def main(world: weft.World) -> list[tuple[str, int]]:
        backend: Any = world.backend
        allocations, symmetric = [], backend.symmetric
        backend.symmetric = lambda nbytes, name: allocations.append((name, nbytes)) or symmetric(nbytes, name)
        for rows in range(32, 321, 32):  # two ranks share these rows in tiles of 16
            for plan in ("decomposed", "fused"):
                weft.matmul_reduce_scatter(draw(0, rows, 16), draw(1, 64, 16), world=world, plan=plan)
        return allocations

    for allocations in emulate(main):
        for name, most in (("staging", 320 * 64 * 2), ("arena", 2 * 320 * 64 * 2 + 4096)):
            sizes = [nbytes for buffer_name, nbytes in allocations if buffer_name == name]
            assert 1 < len(sizes) <= 5 and most / 2 < sizes[-1] <= 2 * most, (name, sizes)


def test_workspaces_grow_and_are_shared() -> None:
    def main(world: weft.World) -> list[tuple[str, int]]:
        backend: Any = world.backend
        allocations, symmetric = [], backend.symmetric

        def count(nbytes: int, name: str) -> Any:
            allocations.append((name, nbytes))
            return symmetric(nbytes, name)

        backend.symmetric = count
        for rows in (8, 8, 64, 16, 64):
            assert case(world, "all_gather_matmul", [rows] * 2, 16, 256) < 5e-3
            assert case(world, "matmul_reduce_scatter", [rows // 2] * 2, 32, 16) < 5e-3
            assert case(world, "all_gather_matmul", [rows] * 2, 16, 256, "decomposed") < 5e-3
        return allocations

    for allocations in emulate(main):
        sizes: dict[str, list[int]] = {}
        for name, nbytes in allocations:
            sizes.setdefault(name, []).append(nbytes)
        assert set(sizes) == {"arena", "channels", "shard"}
        assert all(s == sorted(s) for s in sizes.values()), "buffers are replaced only to grow"
        assert len(sizes["arena"]) == len(sizes["shard"]) == 2 and len(sizes["channels"]) == 1
        gathered = 2 * 64 * 256 * 2
        assert sizes["arena"][-1] <= 2 * gathered + (1 << 12) and sizes["shard"][-1] == gathered // 2


def test_channels() -> None:
    def main(world: weft.World) -> None:
        a, again, b = (world.channel(name, n, None) for name, n in (("a", 3), ("a", 3), ("b", 70)))
        assert a.counters.data_ptr() == again.counters.data_ptr() and a.state.tolist()[0] == world.rank
        lo, hi = a.counters.data_ptr(), a.counters.data_ptr() + 4 * 3
        assert not lo <= b.counters.data_ptr() < hi and b.counters.numel() == 70 and not b.counters.any()
        addresses = world.exchange(a.counters.data_ptr())
        assert [peer & ADDRESS for peer in a.peers.tolist()] == addresses
        with pytest.raises(WeftError, match=r"many: \d+ channels; at most"):
            world.channel("many", 1 << 30, None)

    emulate(main, 3)


def test_symmetric_memory_of_different_sizes_disagrees() -> None:
    def main(world: weft.World) -> Exception | None:
        return caught(lambda: world.symmetric((8 + world.rank,), torch.float32, "x"))

    assert all(isinstance(e, Mismatch) and "'x'" in str(e) for e in emulate(main))


@pytest.mark.parametrize("name", ["meet", "signal"])
def test_streams_of_ranks_can_be_ordered(name: str) -> None:
    """World.barrier orders the write and the read, and so do World.signal and World.wait; a user's op may use
    either."""

    def main(world: weft.World) -> None:
        box, flag = world.symmetric((4,), torch.float32), world.symmetric((1,), torch.int32)
        stream, one, out = world.current_stream(), world.tensor([1], torch.int32), world.empty((4,), torch.float32)
        to, after = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        world.call(lambda: box.local.fill_(world.rank), [], [box.local], stream)
        if name == "meet":
            world.barrier()
        else:
            world.signal(flag.peers[after], one, stream)
            world.wait(flag.local, one, stream)
        world.copy(out, box.peers[to], stream)
        world.synchronize()
        assert out.tolist() == [to] * 4

    for seed in range(4):
        emulate(main, 3, seed)


@pytest.mark.parametrize("seed", some(range(3)))
def test_repeated_launches_compute_correctly(seed: int) -> None:
    """Calls of a few sizes are made in random order, with tensors at new addresses each time, while the memory that
    they share grows."""

    def main(world: weft.World) -> tuple[int, float]:
        backend: Any = world.backend
        run, launched = backend.run_launch, []

        def noted(launch: weft.Launch, stream: Any, moving: Any) -> None:
            launched.append(launch)
            run(launch, stream, moving)

        backend.run_launch = noted
        rng = random.Random(seed)
        plans = ["fused", "decomposed", "more programs"]
        sizes = [(8, 16, 16), (8, 32, 16), (24, 16, 16), (9, 16, 24)]
        worst = 0.0
        for i in range(120):
            op, plan = rng.choice(OPS), rng.choice(plans)
            if plan == "more programs":
                plan = changed(SMALL_FUSED[op], pull_programs=4, **({"split": 2} if op == OPS[0] else {}))
            rows, n, k = rng.choice(sizes[: 1 + i // 30])
            dtype, bias, into = rng.choice([BF, torch.half]), rng.random() < 0.3, rng.random() < 0.3
            worst = max(worst, case(world, op, [rows] * 2, n, k, plan, dtype=dtype, bias=bias, into=into, seed=i))
        return len(launched) - len(set(launched)), worst

    for again, worst in emulate(main, seed=seed):
        assert again > 20, "too few launches were repeated for the test to show anything"
        assert worst < 5e-3


# -- expired waits -----------------------------------------------------------------------------------------------------


def gpu_backend(words: list[int], describe: Callable[[int], str] = "address {:#x}".format) -> Any:
    """Return the part of a GpuBackend that `check` needs, with a record in the form that a kernel writes
    (lang/intrinsics.py)."""
    uploads = SimpleNamespace(pending=[])
    backend: Any = SimpleNamespace(rank=1, size=2, describe=describe, disagreement=None, _waits=None, uploads=uploads)
    backend.check = lambda: GpuBackend.check(backend)
    backend.left_out = lambda: GpuBackend.left_out(backend)
    backend.waits_of_all_ranks = lambda own_wait: ["", own_wait]
    backend.record_words = SimpleNamespace(words=np.array(words, np.int64))
    return backend


def test_an_expired_wait_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "2.5")

    def main(world: weft.World) -> tuple[int, int, str, str]:
        ch = world.channel("matmul_reduce_scatter 64x64x64", 8, None)
        counter_address = ch.counters.data_ptr() + 4 * 5
        peer = (int(ch.peers[1 - world.rank]) & ADDRESS) + 4 * 7
        return counter_address, peer, world._describe(counter_address), world._describe(peer)

    counter_address, peer, counter_name, peer_name = emulate(main)[0]
    assert counter_name == "channel 5 of matmul_reduce_scatter 64x64x64"
    assert "channel 7 of matmul_reduce_scatter 64x64x64" in peer_name, "a peer's counter must be named too"
    says = r"rank 1: a wait on channel 5 of matmul_reduce.*, tile 12, expired after 2.5 s: counter stands at 3, needs 8; rank 0 did not"
    with pytest.raises(Timeout, match=says):
        gpu_backend(
            [1, counter_address, 8, 3, 12, 0, 0, 0], lambda address: counter_name if address == counter_address else "?"
        ).check()
    with pytest.raises(Timeout, match=f"a wait on address {counter_address:#x}.*any peer did not arrive"):
        gpu_backend([1, counter_address, 8, 3, 12, -1, 0, 0]).check()
    gpu_backend([0, counter_address, 8, 3, 12, 0, 0, 0]).check()
    assert timeout_seconds() == 2.5
    monkeypatch.delenv("WEFT_TIMEOUT")
    assert timeout_seconds() == 30


def test_every_op_looks_for_expired_waits() -> None:
    def main(world: weft.World) -> list[Exception | None]:
        def expired() -> None:
            raise Timeout("expired")

        world.backend.check = expired  # type: ignore[method-assign]
        return [caught(lambda op=op: call(world, op)) for op in OPS]

    assert all(isinstance(e, Timeout) for errors in emulate(main) for e in errors)


def test_a_grid_that_is_not_resident_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    props = SimpleNamespace(
        shared_memory_per_multiprocessor=228 << 10, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
    small: list[Any] = []  # kernels that leave all of an SM's shared memory free
    monkeypatch.setattr(_triton, "share_all_memory", small.append)

    def compiled_with(shared: int) -> Any:
        metadata = SimpleNamespace(num_warps=8, shared=shared << 10)
        return SimpleNamespace(metadata=metadata, n_regs=120, _init_handles=lambda: None)

    launcher = Launcher(SimpleNamespace(sm_count=132, capability=90, device=None))  # type: ignore[arg-type]
    kernel = Kernel(compiled_with(100))
    launcher.load(kernel, 264, {}, {})
    with pytest.raises(Unsupported, match="emulate: 265 programs are not resident at once on 132 SMs, 2 an SM"):
        launcher.load(kernel, 265, {}, {})
    launcher.load(kernel, 265, {}, dict(local=True))  # programs of a local kernel do not wait for each other
    large = Kernel(compiled_with(180))
    with pytest.raises(Unsupported, match="133 programs are not resident at once on 132 SMs, 1 an SM"):
        launcher.load(large, 133, {}, {})
    fitting = launcher.load(Kernel(compiled_with(46)), 132, {}, dict(co_resident=True))
    assert len(small) == 1
    launcher.load(large, 132, {}, {}, fitting)  # 46 and 180 KiB fit on one SM
    too_large = launcher.load(Kernel(compiled_with(48)), 132, {}, dict(co_resident=True))
    with pytest.raises(
        Unsupported, match="its programs do not fit on an SM together with those of the launch before it"
    ):
        launcher.load(large, 132, {}, {}, too_large)
    for alone in (large, Kernel(compiled_with(220))):
        launcher.load(alone, 132, {}, {})  # the kernel that was loaded last may belong to another operator


def test_each_pair_of_launches_that_shares_an_sm_is_checked() -> None:
    """The launches of a call are loaded in order, and a launch is checked against the launch before it only if that has
    the option co_resident."""
    loads: list[tuple[str, str | None]] = []

    def load(kernel: Any, grid: int, args: Any, options: Any, co_resident: str | None) -> str:
        loads.append((kernel.__name__, co_resident))
        return str(kernel.__name__)

    machine: Any = SimpleNamespace(run_launch=None, load=load)

    def step(name: str, **options: bool) -> BoundLaunch:
        kernel: Any = SimpleNamespace(__name__=name, arg_names=[], params=[])
        return BoundLaunch(Launch(machine, kernel, 1, options), {})

    pull, copy = (step(name, co_resident=True) for name in ("pull", "copy"))
    load_in_order([step("first"), pull, copy, step("gemm"), step("last")])
    load_in_order([pull])
    load_in_order([step("of another operator")])
    co_resident = {"gemm": "copy"}
    names = "first", "pull", "copy", "gemm", "last", "pull", "of another operator"
    assert loads == [(name, co_resident.get(name)) for name in names]


def test_another_dtype_is_another_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant for the same integers is loaded before any kernel spins."""
    monkeypatch.setattr(Launcher, "occupancy", lambda *_: 1)
    loaded: list[bool] = []
    compiled = SimpleNamespace(_init_handles=lambda: loaded.append(True))
    launcher, kernel = Launcher(SimpleNamespace(sm_count=132, capability=90, device=None)), Kernel(compiled)  # type: ignore[arg-type]

    def load(dtype: torch.dtype, with_bias: bool = True) -> bool:
        x, channel = torch.empty(8, 64, dtype=dtype), (torch.empty(4, dtype=torch.int32), 7)
        desc = TensorDescriptor(x, [8, 64], [64, 1], [4, 16])
        loaded.clear()
        launcher.load(kernel, 1, dict(x=x, desc=desc, bias=x if with_bias else None, ch=channel, n=5), {})
        return bool(loaded)

    assert [load(BF), load(BF), load(torch.float16), load(BF), load(BF, False), load(BF, False)] == [
        True, False, True, False, True, False,
    ]  # fmt: skip


def test_a_kernel_that_no_sm_can_hold_is_unsupported() -> None:
    def too_large() -> None:
        raise OutOfResources(163840, 101376, "shared memory")

    launcher = Launcher(SimpleNamespace(sm_count=132, capability=90, device=None))  # type: ignore[arg-type]
    with pytest.raises(
        Unsupported, match="emulate: a program does not fit on this GPU: out of resource: shared memory"
    ):
        launcher.load(Kernel(SimpleNamespace(_init_handles=too_large)), 1, {}, {})


def test_a_prepared_launch_is_on_the_gpu_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the thread's current device, and does not change it."""
    current_device, launched = [0], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current_device[0] = current_device[0], device.index
        yield
        current_device[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current_device[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", on)
    launcher = Launcher(SimpleNamespace(capability=90, device=torch.device("cuda", 2)))  # type: ignore[arg-type]
    launch = SimpleNamespace(
        moving=(), variants={(): lambda stream, addresses: launched.append((current_device[0], stream))}
    )
    for current in (0, 2):
        current_device[0] = current
        launcher.run(launch, SimpleNamespace(cuda_stream=7), {})  # type: ignore[arg-type]
        assert current_device[0] == current
    assert launched == [(2, 7), (2, 7)]


def test_a_side_stream_leaves_the_current_gpu_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_stream also makes the stream's device the current one."""
    current = [0]
    stream: Any = SimpleNamespace(device_index=2)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream.device_index))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    backend: Any = SimpleNamespace(device=torch.device("cuda", 2), current_stream=lambda: stream)
    for thread in (0, 2):
        current[0] = thread
        with GpuBackend.on(backend, stream):
            assert current == [2]
        assert current == [thread]


def test_side_streams_are_no_streams_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch returns its 32 streams of a priority in turn. On one of them, the programs of a fused GEMM + reduce-scatter
    that pull would wait for the GEMM after them, if the call were on the same one. A dropped World's streams return to
    later Worlds under the same names: a captured stream must not become that of persistent allocations."""
    created: list[tuple[int, int]] = []

    def create(stream: Any, flags: int, priority: int) -> int:
        created.append((flags, priority))
        stream._obj.value = len(created)
        return 0

    driver = SimpleNamespace(cuStreamCreateWithPriority=create)
    for module, name, value in [
        (cuda, "driver", lambda: driver), (cuda, "_unused_streams", functools.cache(lambda *_: [])),
        (torch.cuda, "Stream", lambda *_, **__: pytest.fail("a stream of torch")),
        (torch.cuda, "ExternalStream", lambda handle, device: handle),
        (torch.cuda, "device", lambda device: nullcontext()), (torch.cuda, "is_current_stream_capturing", bool),
    ]:  # fmt: skip
        monkeypatch.setattr(module, name, value)

    def world() -> CudaBackend:
        backend = CudaBackend.__new__(CudaBackend)
        vars(backend).update(device=None, _streams={})
        return backend

    world_a, world_b = world(), world()
    streams = [backend.side_stream(name) for backend in (world_a, world_b) for name in ("pull", "copy", "pull")]
    assert streams == [1, 2, 1, 3, 4, 3] and world_a.side_stream("gemm", urgent=False) == 5
    assert created == [*[(cuda.NON_BLOCKING, -1)] * 4, (cuda.NON_BLOCKING, 0)]
    del world_a
    world_c = world()
    assert [world_c.side_stream(name) for name in ("copy", "comm", "pull")] == [2, 6, 1]
    assert [world_c.side_stream(name, urgent=False) for name in ("persistent", "gemm")] == [7, 5]


def test_a_launch_is_loaded_on_the_gpu_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the thread's current device: a kernel that is loaded on a different GPU would be
    loaded again while a kernel waits."""
    current, loaded = [0], []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    backend: Any = CudaBackend.__new__(CudaBackend)
    backend.device = torch.device("cuda", 2)
    backend.launcher = SimpleNamespace(load=lambda *_: loaded.append(current[-1]))
    launch = weft.Launch(backend, emulated_word, 1, {}, counters=1)
    launch.load()
    assert (loaded, current) == ([2], [0])


@weft.jit
def emulated_word(counters): ...  # type: ignore[no-untyped-def]


class Kernel:
    """A stand-in for a JITFunction that compiles to `compiled`."""

    def __init__(self, compiled: Any) -> None:
        self.fn, self.params, self.warmup = emulate, [], lambda grid, **values: compiled


# -- spmd --------------------------------------------------------------------------------------------------------------


def test_spmd() -> None:
    assert emulate(lambda w: (w.rank, w.size, w.device.type), 3) == [(r, 3, "cpu") for r in range(3)]
    assert emulate(lambda w: w.exchange(w.rank * 10), 3) == [[0, 10, 20]] * 3
    assert "World(rank=1, size=2, backend='emulated'" in emulate(repr)[1]
    with pytest.raises(ValueError, match='backend \'warp\': not one of "cuda", "shared", "gloo", "emulated"'):
        weft.spmd(repr, 2, backend="warp")
    with pytest.raises(AttributeError, match="nonsense"):
        emulate(lambda w: w.nonsense)


def test_a_failing_rank_ends_the_others() -> None:
    def main(world: weft.World) -> None:
        if world.rank == 1:
            raise KeyError("mine")
        call(world, "all_gather_matmul")

    with pytest.raises(KeyError, match="mine"):
        emulate(main)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="says what happens without a GPU")
def test_without_a_gpu_init_names_the_backend_to_use() -> None:
    with pytest.raises(RuntimeError, match='backend="emulated"'):
        weft.init()
    with pytest.raises(ValueError, match="2 ranks need 2 GPUs"):
        weft.spmd(repr, 2)


def test_memory_and_graphs_end_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection may end a World during a capture. torch would abort the process if the World's memory were
    released then, and CUDA would invalidate the capture if a graph were destroyed without an exemption."""
    exempt, destroyed = False, []

    @contextmanager
    def exemption() -> Iterator[None]:
        nonlocal exempt
        exempt = True
        yield
        exempt = False

    class Memory:
        pass

    class Graph:
        def __del__(self) -> None:
            destroyed.append(exempt)

    def is_left(capturing: bool) -> bool:
        """Return whether a World's memory is left after the World has ended."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        backend: Any = CudaBackend.__new__(CudaBackend)
        backend.held, memory = cuda._held_by(backend), Memory()
        backend.replay = cuda._GraphWork(backend, backend, repr)  # a cycle of references
        backend.held.append(memory)
        backend.replay.graphs.append(Graph())
        seen = weakref.ref(memory)
        del backend, memory
        gc.collect()
        return seen() is not None

    monkeypatch.setattr(cuda, "any_call_allowed", exemption)
    assert is_left(capturing=True) and not is_left(capturing=False)
    assert destroyed == [True, True]
    cuda._dropped_in_captures.clear()


def test_a_world_keeps_memory_that_graphs_may_use() -> None:
    """A CUDA graph contains the addresses of the memory that its calls used, which growth therefore must not free."""

    def main(world: weft.World) -> None:
        arena, buffer = world.arena(256), world.buffer("rows", 256)
        kept = [weakref.ref(t) for t in (arena.memory.local, arena.epoch, buffer.local, *buffer.peers)]
        grown = world.arena(1024).memory, world.buffer("rows", 1024)
        assert grown[0] is not arena.memory and grown[1] is not buffer
        del arena, buffer
        gc.collect()
        assert all(t() is not None for t in kept)

    weft.spmd(main, 2, backend="emulated")


def test_the_driver_copies_contiguous_tensors_and_torch_copies_others(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []

    def driver_copy(*arguments: int) -> int:
        copied.append(arguments)
        return status

    backend: Any = CudaBackend.__new__(CudaBackend)
    backend.device, backend.uploads = torch.device("cuda", 2), SimpleNamespace(pending={})
    monkeypatch.setattr(cuda, "_driver_copy", lambda: driver_copy)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream.cuda_stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    stream, source, status, current = SimpleNamespace(cuda_stream=7), torch.arange(6.0).view(2, 3), 0, 0
    target = torch.zeros(2, 3)
    backend.copy(target, source, stream)
    assert copied == [(target.data_ptr(), source.data_ptr(), 24, 7)] and not target.any()
    backend.copy(target.t(), source.t(), stream)
    assert len(copied) == 1 and torch.equal(target, source)
    status = 201  # the thread has no context
    backend.copy(target.zero_(), source, stream)
    assert len(copied) == 2 and torch.equal(target, source)
    stream.cuda_stream, status = 0, 0  # the default stream, of GPU 2; to the driver, of the thread's current GPU 0
    backend.copy(target.zero_(), source, stream)
    assert len(copied) == 2 and torch.equal(target, source)
    current = 2
    backend.copy(target.zero_(), source, stream)
    assert len(copied) == 3 and not target.any()


def test_an_error_in_a_sequence_is_raised_after_its_capture_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA cannot end the capture of streams that are not joined; that error would hide the first one."""

    class Graph:
        def capture_begin(self, **options: str) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")
            raise RuntimeError("unjoined work")

    def work(stream_work: StreamWork) -> None:
        raise KeyboardInterrupt

    calls: list[str] = []
    monkeypatch.setattr(cuda, "any_call_allowed", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    backend: Any = SimpleNamespace(uploads=SimpleNamespace(pending={}), on=lambda stream: nullcontext())
    with pytest.raises(KeyboardInterrupt):
        cuda._GraphWork(backend, None, work).capture(())  # type: ignore[arg-type]
    assert calls == ["begin", "end"]


def test_a_replayed_sequence_waits_for_events_and_records_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call enqueues the work, and the later calls replay its graph, in which the events of other streams are
    external: internal events would add those streams to the capture."""
    calls: list[object] = []

    class Event:
        def __init__(self, external: bool = False) -> None:
            self.external = external

        def record(self, stream: str) -> None:
            calls.append(("record", self.external, stream))

        def wait(self, stream: str) -> None:
            calls.append(("wait", self.external, stream))

    class Graph:
        def capture_begin(self, **options: str) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    def work(stream_work: StreamWork) -> None:
        stream_work.wait("part")
        calls.append("copy")
        stream_work.mark()

    def call() -> list[object]:
        calls.clear()
        work_of_call = sequence()
        work_of_call.record("part", "gemm")
        *marks, _ = work_of_call()
        for mark in marks:
            backend.wait_event("gemm", mark)
        return list(calls)

    monkeypatch.setattr(cuda, "any_call_allowed", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(cuda, "_On", lambda backend, stream: nullcontext())
    backend: Any = CudaBackend.__new__(CudaBackend)
    backend._events, backend.launcher, backend._plain_launcher = [], None, None
    backend.uploads = SimpleNamespace(pending={})
    sequence, capturing = backend.sequence("copies", work), False

    def enqueued(external: bool) -> list[object]:
        ends = [("record", external, "copies")]
        return [("wait", external, "copies"), "copy", *ends, *ends]

    one_by_one = [("record", False, "gemm"), *enqueued(False), ("wait", False, "gemm")]
    replayed = [("record", True, "gemm"), "replay", ("wait", True, "gemm")]
    assert call() == one_by_one
    assert call() == [("record", True, "copies"), "begin", *enqueued(True), "end", *replayed]
    assert call() == replayed
    capturing = True
    assert call() == one_by_one


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set only the environment variables of rank 1 of 4 on a host with one GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in (*shared_gpu.settings(0), "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # monkeypatch deletes the variable again after the test
    for name, value in dict(RANK="1", WORLD_SIZE="4", WEFT_SHARE_GPU="1").items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_ranks_that_share_a_gpu_configure_nccl_before_it_starts(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setenv("NCCL_SOCKET_IFNAME", "eth0")
    one_gpu.setenv("LOCAL_RANK", "1")
    shared_gpu.prepare()
    assert os.environ["LOCAL_RANK"] == "0"  # Transformers loads models on this rank's GPU
    assert os.environ["NCCL_HOSTID"] == "rank1" and os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_ranks_on_several_hosts_that_share_gpus_do_not_talk_by_loopback(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setenv("LOCAL_WORLD_SIZE", "2")
    shared_gpu.prepare()
    assert os.environ["NCCL_HOSTID"] == "rank1" and "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize("changed", [dict(WEFT_SHARE_GPU="0"), dict(LOCAL_WORLD_SIZE="1"), dict(WORLD_SIZE="1")])
def test_ranks_with_their_own_gpus_leave_nccl_unset(one_gpu: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    for name, value in changed.items():
        one_gpu.setenv(name, value)
    shared_gpu.prepare()
    assert "NCCL_HOSTID" not in os.environ


def test_sharing_a_gpu_after_init_process_group_raises_advice(one_gpu: pytest.MonkeyPatch) -> None:
    for name, value in dict(is_initialized=True, get_rank=3, get_world_size=4).items():
        one_gpu.setattr(dist, name, lambda value=value: value)
    one_gpu.setenv("NCCL_NET", "Socket")
    with pytest.raises(WeftError, match="rank 3 shares its GPU, but .* start the process with NCCL_HOSTID=rank3 ") as e:
        shared_gpu.prepare()
    assert "NCCL_NET" not in str(e.value) and "NCCL_HOSTID" not in os.environ
    for name, value in shared_gpu.settings(3).items():
        one_gpu.setenv(name, value)
    shared_gpu.prepare()


def test_an_unknown_value_of_weft_share_gpu_is_refused(one_gpu: pytest.MonkeyPatch) -> None:
    one_gpu.setenv("WEFT_SHARE_GPU", "yes")
    with pytest.raises(ValueError, match="WEFT_SHARE_GPU='yes' must be 1"):
        shared_gpu.prepare()


def test_one_log_line_reports_that_ranks_share(caplog: pytest.LogCaptureFixture) -> None:
    """weft logs this line whether or not sharing was requested: ranks that happen to be on one GPU share it too."""
    devices = [shared_gpu.RankDevice(HERE, SEEN, rank % 2, None) for rank in range(5)]
    assert shared_gpu.shared_gpus(devices) == 2 and shared_gpu.shared_gpus(devices[:2]) == 0
    shared_gpu.log_shared_gpus.cache_clear()
    for _ in range(2):
        shared_gpu.log_shared_gpus(5, 2)
    shared_gpu.log_shared_gpus(4, 1)
    assert [r.message for r in caplog.records] == [
        "5 ranks share 2 GPUs, which take them in turn: for function, not for speed",
        "4 ranks share 1 GPU, which takes them in turn: for function, not for speed",
    ]


@pytest.mark.parametrize("gpus", [0, 1])
def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """The error explains how to share GPUs; processes that weft starts need no setting."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WEFT_SHARE_GPU", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started: list[dict[str, str]] = []

    def start(main: Any, args: Any, **options: Any) -> Any:
        started.extend(argument for argument in args if isinstance(argument, dict) and "WEFT_SHARE_GPU" in argument)
        raise KeyboardInterrupt

    monkeypatch.setattr(mp, "start_processes", start)
    with pytest.raises(ValueError, match='backend="shared"' if gpus else 'backend="emulated"'):
        weft.spmd(repr, 4)
    with pytest.raises(KeyboardInterrupt if gpus else ValueError):
        weft.spmd(repr, 4, backend="shared")
    assert [e["WEFT_SHARE_GPU"] + e["LOCAL_WORLD_SIZE"] for e in started] == ["14"] * gpus


def test_under_a_launcher_results_are_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sends its results only when the GPU has finished. An exchange of tensors would send handles to the memory
    of a different process."""
    did: list[str] = []

    def exchange(sent: bytes) -> list[bytes]:
        did.append("exchange")
        assert type(sent) is bytes
        return [sent, sent]

    world = SimpleNamespace(size=2, exchange=exchange, synchronize=lambda: did.append("synchronize"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("weft.launch.init", lambda: world)
    results = weft.spmd(lambda w: {"y": torch.ones(2)}, 2)
    assert [r["y"].tolist() for r in results] == [[1, 1]] * 2 and did == ["synchronize", "exchange"]
    with pytest.raises(ValueError, match="spmd over 3 ranks under a launcher of 2"):
        weft.spmd(repr, 3)


def test_worlds_have_the_same_names_in_each_run() -> None:
    """The keys of torch.compile's caches, including those on disk, contain a World's name. A World therefore has the
    same name in every run, and the Worlds of one run have different names."""

    def names(world: weft.World) -> tuple[str, str]:
        return world.name, world.split(0).name

    of_a_run = emulate(names)
    assert of_a_run == emulate(names)
    assert len({*itertools.chain(*of_a_run)}) == 4


# -- the processes of a World of GPUs, without the GPUs ----------------------------------------------------------------


def of_group(group: Any) -> Any:
    """Replace the part of a CudaBackend that communicates with other processes."""
    backend: Any = CudaBackend.__new__(CudaBackend)
    backend.rank, backend.size = dist.get_rank(group), dist.get_world_size(group)
    if backend.size > 1:
        backend.group = group
        backend._connect()
    return backend


@contextmanager
def of_gpus(current: int) -> Iterator[None]:
    """Replace the part of CUDA that constructing a CudaBackend needs."""
    with (
        mock.patch.multiple(cuda, Record=lambda device: None, Launcher=lambda backend: None),
        mock.patch.multiple(
            torch.cuda, is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 4, set_device=lambda device: None,
            current_device=lambda: current, get_device_capability=lambda device: (9, 0), can_device_access_peer=lambda a, b: True,
            get_device_properties=lambda d: SimpleNamespace(
                uuid=f"GPU {d}",
                multi_processor_count=132,
                regs_per_multiprocessor=65536,
                shared_memory_per_multiprocessor=233472,
                max_threads_per_multi_processor=2048,
            ),
        ),
    ):  # fmt: skip
        yield


def of_three(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    dist.new_group([0, 2])  # rank 1 belongs to fewer groups than rank 0
    if rank < 2:
        with torch.device("meta"):  # "meta" represents a default device that is a GPU
            group_backend, again = of_group(pair), of_group(pair)
            assert group_backend.exchange(rank) == [0, 1]
            assert again.exchange({"rank": "x" * 1000 * rank}) == [{"rank": ""}, {"rank": "x" * 1000}]
            assert group_backend.exchange([]) == [[], []]
    everyone = of_group(dist.group.WORLD)
    assert everyone.exchange(rank) == [0, 1, 2]
    with of_gpus(rank):
        whole = CudaBackend()
        assert (whole.device.index, whole.symmetric_unsupported, whole.limits_ctas) == (rank, None, True)
        assert not whole.shares_gpu
        if rank < 2:
            some = CudaBackend(pair)
            assert not some.limits_ctas and some.communicator(8) is None and some.exchange(rank) == [0, 1]
    assert len(dist.distributed_c10d._world.pg_names) == (3 if rank == 0 else 2), (
        "weft must remove its groups from torch"
    )
    with of_gpus(rank):
        part = whole.split([[1], [0, 2]])
        assert (part.rank, part.size) == ((0, 2), (0, 1), (1, 2))[rank]
        assert part.exchange(rank) == ([1] if rank == 1 else [0, 2])
        with pytest.raises(Unsupported, match="cannot be split"):
            part.split([[0], [1]])
        alone = part.alone()
        assert (alone.rank, alone.size, alone.exchange(rank), alone.device) == (0, 1, [rank], part.device)
    if rank == 2:
        return
    with pytest.raises(Timeout, match="not every rank joined within 2 s|the connection to a rank is lost"):
        everyone.exchange("without rank 2")


@pytest.mark.gate
def test_ranks_that_are_in_different_numbers_of_groups_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "2")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(of_three, (port,), nprocs=3)


@pytest.mark.parametrize(
    ("env", "started", "bound", "touched", "index"),
    [
        ({}, False, None, False, 3),  # a single process uses its current device
        ({"LOCAL_RANK": "5"}, False, None, True, 5),  # a process that torchrun started
        ({"LOCAL_RANK": "5", "RANK": "13"}, True, None, False, 5),  # with a group, before it has chosen a GPU
        ({"LOCAL_RANK": "5"}, True, None, True, 3),  # with a group, after it has chosen a GPU
        ({"RANK": "13"}, False, None, False, 5),
        ({"RANK": "13"}, False, None, True, 3),
        ({}, True, None, True, 3),  # the user's mp.spawn and set_device
        ({"LOCAL_RANK": "5"}, True, torch.device("cuda", 6), True, 6),
        ({"LOCAL_RANK": "5"}, True, torch.device("cpu"), True, 3),
    ],
)
def test_the_gpu_that_a_process_has_chosen_is_kept(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], started: bool, bound: Any, touched: bool, index: int
) -> None:
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: touched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert _device_of(SimpleNamespace(bound_device_id=bound)) == torch.device("cuda", index)


HERE, SEEN = "host boot", ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([(HERE, SEEN, 0, None), (HERE, SEEN, 1, None)], None),
        ([(HERE, SEEN, 3, None), (HERE, SEEN, 0, None), (HERE, SEEN, 2, None)], "GPU 3 has no peer access to GPUs [2]"),
        ([(HERE, SEEN, 0, None), (HERE, SEEN, 1, "too old")], "too old (rank 1)"),
        ([(HERE, ("a",), 0, None), (HERE, ("b",), 0, None)], "ranks 0 and 1 do not see the same GPUs"),
        ([(HERE, ("a",), 0, None), (HERE, ("a", "b"), 1, None)], "do not see the same GPUs"),
        ([(HERE, SEEN, 1, None), (HERE, SEEN, 1, None)], "ranks 0 and 1 share a GPU"),
        (
            [(HERE, ("a",), 0, None), (HERE, ("b", "a"), 1, None)],
            "ranks 0 and 1 share a GPU (WEFT_SHARE_GPU=1 lets them",
        ),
        ([(HERE, SEEN, 1, None, True), (HERE, SEEN, 1, None, True)], None),
        ([(HERE, SEEN, rank % 2, None, True) for rank in range(8)], None),
        ([(HERE, SEEN, 1, None, True), (HERE, SEEN, 1, None)], "ranks 0 and 1 share a GPU"),
    ],
)
def test_why_ranks_cannot_address_each_other(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Any], says: str | None
) -> None:
    def access(index: int, peer: int) -> bool:
        if max(index, peer) > 3:
            raise AssertionError("Invalid device id")
        return {index, peer} != {2, 3}

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    reason = _why_unreachable([RankDevice(*rank) for rank in ranks])
    assert reason is None if says is None else says in str(reason), reason


def test_every_rank_exchanges_its_reasons_once() -> None:
    """All ranks exchange reasons even if only one rank has one, for instance if a machine has two generations of
    GPUs."""
    count, barrier, slots, outcomes = 2, threading.Barrier(2, timeout=10), [None, None], {}

    def exchange(backend: Any, value: Any) -> list[Any]:
        backend.asked += 1
        slots[backend.rank] = value
        barrier.wait()
        return list(slots)

    def rank_main(rank: int) -> None:
        backend: Any = CudaBackend.__new__(CudaBackend)
        backend.rank, backend.size, backend.device, backend.asked = rank, count, torch.device("cuda", rank), 0
        backend._compare_devices()
        outcomes[rank] = backend.symmetric_unsupported, backend.asked

    with (
        mock.patch.object(CudaBackend, "exchange", exchange),
        mock.patch.multiple(
            torch.cuda, get_device_capability=lambda d: (7 + d.index, 5), device_count=lambda: count,
            get_device_properties=lambda i: SimpleNamespace(uuid=f"GPU {i}"), can_device_access_peer=lambda a, b: True,
        ),
    ):  # fmt: skip
        threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    reason = "weft's kernels need compute capability 8.0, and this GPU has 7.5 (rank 0)"
    assert outcomes == {0: (reason, 1), 1: (reason, 1)}


@pytest.mark.parametrize("setting", ["30s", "", "inf", "nan", "-1", "0", "1e12"])
def test_a_bound_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", setting)
    with pytest.raises(ValueError, match=f"WEFT_TIMEOUT={setting!r} must be a number of seconds"):
        timeout_seconds()


def test_the_record_of_expired_waits_is_on_the_host_for_any_default_device() -> None:
    def zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # memory cannot be pinned here
        return torch.zeros(*size, **options)

    with mock.patch.object(cuda, "torch", SimpleNamespace(zeros=zeros, int64=torch.int64)), torch.device("meta"):
        record = cuda.Record(torch.device("cpu"))
    assert record.guard[0] == timeout_seconds() * 1e9 and record.host.device.type == "cpu"


def test_numbers_on_the_host_are_there_for_any_default_device() -> None:
    """With torch.set_default_device("cuda"), `torch.tensor` and the like make tensors on the GPU unless they name a
    device."""
    x, ids, weights = draw(0, 4, 16), torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
    w13, w2 = draw(1, 1, 8, 16), draw(2, 1, 16, 8)

    def main(world: weft.World) -> list[torch.Tensor]:
        y = moe.moe(x, ids, weights, w13, w2, activation="gelu", world=world, plan="sequential")
        rows, handle = moe.dispatch(x, ids, weights, experts=2, world=world, plan="sequential")
        return [y, moe.combine(rows, handle)]

    def on_meta(world: weft.World) -> list[torch.Tensor]:
        with torch.device("meta"):
            return main(world)

    expected, results = (weft.spmd(f, 2, backend="emulated") for f in (main, on_meta))
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    remap = Remap(4, 4, tiles_m=1, block_m=4, block_n=4, group_m=1)
    with torch.device("meta"):
        assert remap.index().device.type == "cpu"


# -- errors of a user's first day --------------------------------------------------------------------------------------
def test_no_operator_runs_on_a_world_that_is_closed() -> None:
    def main(world: weft.World) -> None:
        x, w = torch.zeros(4, 32).bfloat16(), torch.zeros(16, 32).bfloat16()
        for _ in range(3):
            weft.all_gather_matmul(x, w, world=world, plan="sequential")
        world.close()
        for plan in ("sequential", "fused"):
            with pytest.raises(WeftError, match=f"rank {world.rank}'s World is closed"):
                weft.all_gather_matmul(x, w, world=world, plan=plan)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("setting", ["abc", "0"])
def test_a_bound_that_is_no_time_is_refused_by_every_backend(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", setting)
    with pytest.raises(ValueError, match=f"WEFT_TIMEOUT={setting!r} must be a number of seconds"):
        weft.spmd(lambda world: None, 2, backend="emulated")


def test_spmd_gives_the_function_its_arguments() -> None:
    def main(world: weft.World, x: int, *, y: int) -> tuple[int, int, int]:
        return world.rank, x, y

    assert weft.spmd(main, 2, backend="emulated", args=(3,), kwargs={"y": 4}, seed=1) == [(0, 3, 4), (1, 3, 4)]


def test_spmd_refuses_coroutines_and_generators() -> None:
    async def coroutine(world: weft.World) -> None: ...

    def generator(world: weft.World) -> Iterator[None]:
        yield

    async def async_generator(world: weft.World) -> AsyncIterator[None]:
        yield

    for fn in (coroutine, generator, async_generator, None):
        with pytest.raises(TypeError, match="spmd takes a function of a World that runs when it is called, not "):
            weft.spmd(fn, 2, backend="emulated")  # type: ignore[arg-type]


def test_a_notice_comes_once_and_not_once_a_rank(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: weft.World) -> None:
        for rows in (4, 4, 8):
            x, w = torch.zeros(rows, 12).bfloat16(), torch.zeros(16, 12).bfloat16()
            weft.all_gather_matmul(x, w, world=world, plan="fused")

    weft.spmd(main, 3, backend="emulated")
    notices = [record.getMessage() for record in caplog.records]
    assert len(notices) == 1 and "sequential instead of fused" in notices[0], notices


def test_help_shows_the_signatures_of_the_worlds_methods() -> None:
    text = pydoc.render_doc(weft.World, renderer=pydoc.plaintext)
    assert "attrgetter" not in text and ": None\n" not in text
    assert "copy(dst, src, stream): Copy `src` to `dst` by a copy engine" in text


def test_collectives_of_one_rank_ask_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of `World.alone` cannot communicate GPU tensors."""
    alone: Any = CudaBackend.__new__(CudaBackend)
    alone.size = 1
    monkeypatch.setattr(CudaBackend, "copy", lambda self, dst, src, stream: dst.copy_(src))
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(3, 2, 3)
    alone.all_gather(out[0], x, None)
    alone.reduce_scatter(out[1], x, None)
    alone.all_to_all([out[2]], [x], None)
    alone.all_reduce(out, None)
    assert (out == x).all()


def test_symmetric_memory_frees_the_allocators_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's cache may occupy all of a GPU's memory although no tensor uses it. After any other error, weft does not
    retry the allocation."""
    from torch.distributed import _symmetric_memory as symm

    from weft.backends import cuda

    steps: list[str] = []

    def empty(nbytes: int, **_: object) -> torch.Tensor:
        steps.append("empty")
        if "cache" not in steps:
            raise RuntimeError(f"CUDA driver error: {why}")
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(symm, "empty", empty)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("cache"))
    why = "out of memory"
    assert len(cuda._symmetric_memory(256, torch.device("cpu"))) == 256
    assert steps == ["empty", "wait", "cache", "empty"]
    steps.clear()
    why = "invalid argument"
    with pytest.raises(RuntimeError, match=why):
        cuda._symmetric_memory(256, torch.device("cpu"))
    assert steps == ["empty"]


@pytest.mark.parametrize("handle", [0, 7])
def test_a_collective_runs_on_its_stream_which_waits_for_it(monkeypatch: pytest.MonkeyPatch, handle: int) -> None:
    """The collective belongs to NCCL's backend of the group, or to the communicator that the caller passes."""
    backend, streams = CudaBackend.__new__(CudaBackend), [SimpleNamespace(cuda_stream=n) for n in (0, handle)]
    backend.size, backend.device, backend.uploads = 2, torch.device("cpu"), SimpleNamespace(pending={})  # type: ignore
    backend._by_handle, backend.collective = {0: streams[0]}, backend._collective  # type: ignore[dict-item]
    steps: list[tuple[str, int]] = []
    current = [0]

    def communicator(name: str) -> SimpleNamespace:
        def allreduce(tensors: object, options: object) -> SimpleNamespace:
            steps.append((name, current[0]))
            return SimpleNamespace(wait=lambda: steps.append(("wait", current[0])))

        return SimpleNamespace(allreduce=allreduce)

    backend.group = SimpleNamespace(_get_backend=lambda device: communicator("own"))  # type: ignore[assignment]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream.cuda_stream))
    backend.all_reduce(torch.zeros(2), streams[1])  # type: ignore[arg-type]
    limited = SimpleNamespace(_get_backend=lambda device: communicator("limited"))
    backend.all_reduce(torch.zeros(2), streams[1], backend._collectives(limited))  # type: ignore[arg-type]
    assert steps == [("own", handle), ("wait", handle), ("limited", handle), ("wait", handle)] and current == [0]
