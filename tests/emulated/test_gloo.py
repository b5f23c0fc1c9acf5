"""Ranks as CPU processes over gloo: every op runs its sequential plan, with the same checks and errors as on any
World."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_reduce import norm_case, sum_case
from tests.emulated.cases_attention import Shape, attention_case, gradients_case
from tests.emulated.cases_dispatch_combine import exchange_case, exchanged
from tests.emulated.cases_expert_parallel import whole_experts
from tests.emulated.cases_inference import SEQUENTIAL, inference_cases
from tests.emulated.cases_matmul_all_to_all import all_to_all_case
from tests.emulated.cases_matmul_all_to_all_routed import routed_case
from tests.emulated.cases_models import chunked
from tests.emulated.cases_moe import layer_case, nowhere, some_nowhere, to_few, training_case
from tests.emulated.cases_nn import (
    all_gather_grads,
    compiled_ops,
    compiled_out,
    linear_pair,
    mlp_training,
    reduce_grads,
    silu_grads,
)
from tests.emulated.cases_ops import case
from tests.emulated.cases_tensor_parallel import both_halves, routes_case
from weft import moe

BF16, EXPERTS, DECODER = 5e-3, 1.2e-2, 2.5e-2  # the error bounds of the emulated ranks
Case = tuple[str, float, Callable[[], Any]]


# -- every op ----------------------------------------------------------------------------------------------------------
def gemms_and_sums(world: weft.World) -> Iterator[Case]:
    rows = [9, 16, 0][: world.size]
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        for plan in ("auto", "fused"):
            yield f"{op}, {plan}", BF16, lambda op=op, plan=plan: case(world, op, rows, 48, 64, plan, bias=True)
    to = [[(i + r) % world.size for i in range(11 + r)] for r in range(world.size)]
    yield "matmul_all_to_all", BF16, lambda: all_to_all_case(world, to, 48, 64, "auto", bias=True)
    routed = dict(bias=True, gradient=True)
    yield "matmul_all_to_all_routed", BF16, lambda: routed_case(world, 30, 16, 24, "auto", **routed)
    for norm, full in (("rms", False), ("layer", True)):
        options = dict(norm=norm, full=full, bias=full)
        yield f"all_reduce_rms_norm, {norm}", BF16, lambda options=options: norm_case(world, 7, 64, "auto", **options)
    yield "all_reduce_rms_norm of fp8", 2e-2, lambda: norm_case(world, 7, 64, "auto", quantize="tensor")
    yield "all_reduce", BF16, lambda: sum_case(world, (5, 24), "auto", views=True)
    yield "all_reduce of float32", 1e-5, lambda: sum_case(world, (3, 5), "one_shot", dtype=torch.float32, into=True)


def evaluations(world: weft.World) -> Iterator[Case]:
    """Return cases for inference mode. These checks run first, so that the World allocates its persistent memory in
    inference mode."""
    yield from inference_cases(world, SEQUENTIAL)


def mixtures(world: weft.World) -> Iterator[Case]:
    experts = 2 * world.size
    for layout in ("contiguous", "masked"):
        for ids_of in (to_few, nowhere, some_nowhere):
            options = dict(layout=layout, ids_of=ids_of, experts=experts)
            yield f"exchange, {layout}, {ids_of.__name__}", 0.0, lambda options=options: exchange_case(world, **options)
    yield "exchange, rows left out", 0.0, lambda: exchange_case(world, experts, layout="masked", max_m=3)
    yield "exchange, aligned", 0.0, lambda: exchange_case(world, experts, alignment=16)
    wants = ("x", "weights", "shared")
    yield "exchange, gradients", EXPERTS, lambda: exchanged(world, wants, layout="masked")
    halves = dict(inner=16, tp_size=world.size, plan="auto")
    for ids_of in (some_nowhere, to_few):
        options = dict(ids_of=ids_of, biases=True)
        kind = ids_of.__name__
        yield (
            f"tensor-parallel, {kind}",
            EXPERTS,
            lambda options=options: layer_case(world, both_halves, shared=True, **halves, **options),
        )
        yield (
            f"moe, {kind}",
            EXPERTS,
            lambda options=options: largest(training_case(world, whole_experts, experts, plan="auto", **options)),
        )
        yield (
            f"parts, {kind}",
            EXPERTS,
            lambda options=options: largest(training_case(world, both_halves, **halves, **options)),
        )
    yield "routes", 0.0, lambda: routes_case(world, "auto", (20, 7, 0)[: world.size], world.size) or 0.0


def attention_and_modules(world: weft.World) -> Iterator[Case]:
    rows = (9, 6, 0)[: world.size]
    shapes = dict(
        causal=Shape(rows, causal=True),
        zigzag=Shape((8,) * world.size, causal=True, layout="zigzag"),
        window=Shape(rows, causal=True, window=5, sinks=True),
    )
    for name, shape in shapes.items():
        yield f"attention, {name}", BF16, lambda shape=shape: attention_case(world, shape, "auto")
        yield f"attention, {name}, gradients", EXPERTS, lambda shape=shape: gradients_case(world, shape, "auto")
    yield (
        "all_gather_matmul, gradients",
        BF16,
        lambda: all_gather_grads(world, [9, 16, 0][: world.size], 48, 64, keep=True),
    )
    yield "matmul_reduce_scatter, gradients", BF16, lambda: reduce_grads(world, 25, 48, 64)
    yield "matmul_all_reduce, gradients", BF16, lambda: reduce_grads(world, 25, 48, 64, everywhere=True)
    yield "silu_mul, gradients", BF16, lambda: silu_grads(world, 9, 40, 16)
    yield "torch.compile", 0.0, lambda: compiled_ops(world)
    yield "torch.compile, out=", 0.0, lambda: compiled_out(world)
    yield "ParallelMLP, trained", 1.5, lambda: mlp_training(world, [16] * world.size, 64, 40 * world.size)
    yield "linears", 7e-3, lambda: linear_pair(world, [9, 7, 4][: world.size], 64, 48 * world.size, "scatter")
    if world.size == 2:
        for plan in ("auto", "woven", "sequence"):
            yield f"decoder, {plan}", DECODER, lambda plan=plan: chunked(world, plan, count=2, longest=7)


def largest(errors: dict[str, float]) -> float:
    return max(errors.values())


def wrong(world: weft.World, cases: Any) -> dict[str, Any]:
    """Return the cases whose errors exceed their bounds, and the number of cases."""
    failures: dict[str, Any] = {
        name: (error, bound) for name, bound, run in cases(world) if not (error := run()) <= bound
    }
    world.synchronize()
    return failures


def all_ops(world: weft.World) -> list[dict[str, Any]]:
    return [wrong(world, cases) for cases in (evaluations, gemms_and_sums, mixtures, attention_and_modules)]


# -- agreement and errors ----------------------------------------------------------------------------------------------
def raised(fn: Callable[[], object]) -> str:
    try:
        fn()
    except (weft.WeftError, ValueError, TypeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def checks(world: weft.World) -> list[str]:
    """Run the requested checks on every rank, in the order of `CHECKS`."""
    me, x, w = world.rank, draw(1, 8, 64), draw(2, 32, 64)
    gate = moe.pack(draw(3, 1, 48, 64), world=world), draw(4, 1, 64, 24)
    ids, weights = torch.zeros(8, 1, dtype=torch.int32), torch.ones(8, 1)
    messages = [
        raised(lambda: weft.all_reduce(draw(1, 8 + me), world=world)),
        raised(lambda: weft.all_gather_matmul(draw(1, 8, 64 + 64 * me), draw(2, 32, 64 + 64 * me), world=world)),
        raised(lambda: weft.all_reduce(x, world=world) if me else weft.matmul_all_reduce(x, w, world=world)),
        raised(lambda: moe.moe(x, ids, weights, *gate, activation=("swiglu", "gpt_oss")[me], world=world)),
        raised(lambda: moe.dispatch(x, ids, weights, experts=2, expert_alignment=(1, 16)[me], world=world)),
        raised(lambda: world.all_gather(world.empty((16 + 4 * me,), x.dtype), x[0, : 8 + 2 * me], None)),
        raised(lambda: world.backend.all_to_all(list(x[:2].clone()), [x[0, : 8 + me], x[1, : 8 + me]], None)),
        raised(lambda: world.exchange(1) if me else world.all_reduce(x.clone(), None)),
        raised(lambda: weft.all_gather_matmul(x, w[:, :32], world=world)),
        raised(lambda: weft.all_gather_matmul(x, w, world=world, plan="quick")),
        raised(lambda: world.symmetric((4,), x.dtype)),
        raised(lambda: world.channel("mine", 1, None)),
    ]
    assert distance(weft.all_reduce(x, world=world), 2 * x.double()) < BF16, "refused calls must leave no trace"
    return messages


CHECKS = (
    r"Mismatch: ranks disagree on this call: rank 0: all_reduce .*h=8.* rank 1: all_reduce .*",
    "Mismatch: ranks disagree on this call: rank 0: all_gather_matmul K=64; rank 1: all_gather_matmul K=128",
    "Mismatch: ranks disagree on this call: rank 0: matmul_all_reduce .*; rank 1: all_reduce .*",
    "Mismatch: ranks disagree on this call: .*activation=swiglu.*activation=gpt_oss",
    "Mismatch: ranks disagree on this call: .*expert_alignment=1;.*expert_alignment=16",
    "Mismatch: ranks give a gather or a sum 16, 20 bytes, by rank",
    "Mismatch: rank 0 expects 128 bytes from rank 0, which sends 16",
    "Mismatch: ranks make different calls: rank 0: a gather or a sum, rank 1: a host-side exchange",
    "ValueError: all_gather_matmul: .*",
    "ValueError: all_gather_matmul: plan 'quick' is not .*",
    "Unsupported: user: ranks are CPU processes, which have no symmetric memory; .*emulated.*",
    "Unsupported: channels: ranks are CPU processes, .*",
)


# Both parts share one start, since every start imports torch once per rank.
def ops_and_checks(world: weft.World) -> tuple[list[dict[str, Any]], list[str]]:
    return all_ops(world), checks(world)


def test_every_op_against_torch_and_its_errors() -> None:
    for failures, messages in weft.spmd(ops_and_checks, 2, backend="gloo"):
        assert failures == [{}] * 4
        assert len(messages) == len(CHECKS)
        for text, pattern in zip(messages, CHECKS, strict=True):
            assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.gate
def test_every_op_against_torch_on_three_ranks() -> None:
    assert weft.spmd(all_ops, 3, backend="gloo") == [[{}] * 4] * 3


# -- Worlds ------------------------------------------------------------------------------------------------------------
def parts(world: weft.World) -> tuple[Any, ...]:
    """Run ops on Worlds that `World.split` returned, possibly of unequal sizes, and on a World over a caller's
    group."""
    part = world.split(world.rank == 0)
    sums = [weft.all_reduce(torch.full((8,), 1.0 + world.rank), world=w)[0].item() for w in (world, part)]
    # A sum that is rounded after each rank remains 256, because bfloat16 represents no odd numbers above 256.
    rows = torch.full((world.size, 8), 256.0 if world.rank == 0 else 1.0).bfloat16()
    world.reduce_scatter(own_row := torch.empty(1, 8).bfloat16(), rows, None)
    world.all_reduce(rows, None)
    assert (rows == 258).all() and (own_row == 258).all()
    group = dist.new_group([0, 2])
    if world.rank != 1:
        some = weft.init(group)
        sums.append(weft.all_reduce(torch.full((8,), 1.0 + world.rank), world=some)[0].item())
        if world.rank == 2:  # rank 1 alone creates a World of one rank
            assert some.alone.size == 1 and some.alone is some.alone and some.alone.alone is some.alone
            assert weft.all_reduce(torch.full((8,), 3.0), world=some.alone)[0].item() == 3.0
    refused = raised(lambda: part.split(0))
    return part.rank, part.size, sums, refused, repr(world)


def test_worlds_of_parts() -> None:
    rank_0, rank_1, rank_2 = weft.spmd(parts, 3, backend="gloo")
    assert (
        rank_0[:3] == (0, 1, [6.0, 1.0, 4.0])
        and rank_1[:3] == (0, 2, [6.0, 5.0])
        and rank_2[:3] == (1, 2, [6.0, 5.0, 4.0])
    )
    assert "a World of 2 of torch.distributed's ranks cannot be split" in rank_1[3]
    assert rank_1[4] == "World(rank=1, size=3, backend='gloo', device='cpu')"


def stays_away(rank: int, store: str, out: str) -> None:
    os.environ["WEFT_TIMEOUT"] = "2"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    world = weft.init()
    weft.all_reduce(torch.ones(8), world=world)
    text = raised(lambda: weft.all_reduce(torch.ones(8), world=world)) if rank == 0 else ""
    (Path(out) / f"{rank}").write_text(text)
    dist.barrier()
    os._exit(0)  # at a normal exit, a gloo thread that is still waiting occasionally aborts the process


def test_a_missing_rank_is_a_timeout(tmp_path: Path) -> None:
    mp.spawn(stays_away, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    assert (tmp_path / "0").read_text().startswith("Timeout: rank 0: not every rank joined within 2 s: ")


FAILS = """
import sys, torch, torch.distributed as dist, weft
def main(world):
    if world.rank == 1:
        raise ArithmeticError("rank 1 is wrong")
    weft.all_reduce(torch.ones(8), world=world)
if __name__ == "__main__":
    weft.spmd(main, 2, backend="gloo")
"""


def test_an_error_on_one_rank_ends_the_others(tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text(FAILS)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120)
    assert done.returncode and "ArithmeticError: rank 1 is wrong" in done.stderr
    line = "gloo: ranks are CPU processes, the reference: every op runs by its sequential plan"
    assert done.stderr.count(line) == 1, "exactly one rank must log one line"
