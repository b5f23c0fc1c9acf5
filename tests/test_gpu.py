"""The ops on one GPU: 2, 4 and 8 ranks as threads, each with its share of the SMs, so with a GPU's real order of memory.

What several GPUs show is in gpu_main.py; here only that the examples run on them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPS, case, draw, on_stream
from cases_reduce import bound, norm_case

import weft
from weft.lang.mapping import balanced_rows
from weft.op import REGISTRY
from weft.plans import Decomposed, OneShot, Plan, TwoShot

os.environ.setdefault("WEFT_TIMEOUT", "10")
EXAMPLES = sorted(
    {*(Path(__file__).parent.parent / "examples").glob("*.py")}
    - {Path(__file__).parent.parent / f"examples/{name}.py" for name in ("hf_generate", "hf_serve", "lightning_tp")}
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def loopback(fn: Callable[[weft.World], Any], ranks: int) -> list[Any]:
    return weft.spmd(fn, ranks, backend="loopback")


def fused(op: str) -> Plan:
    """The default of an all-gather. Sums launch two kernels a rank; on a GPU that several ranks share, programs of one rank's
    may stand where another's GEMM was to be, so few and small ones."""
    if op == "all_gather_matmul":
        return REGISTRY[op].fused
    return replace(REGISTRY[op].fused, pullers=6, forward=2, pull_rows=16, pull_stages=2)


def second(op: str) -> Plan:
    """Another fused plan: a copy engine pulls, or fewer programs do."""
    return replace(fused(op), pullers=0 if op == "all_gather_matmul" else 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_posted_rows_of_every_op(ranks: int) -> None:
    """Random shapes, uneven ranks, late ones, calls of all-reduces between them: the same bits again."""
    plans = {op: [OneShot(programs=8), OneShot(programs=5, warps=4)] for op in OPS}
    plans["matmul_all_reduce"] = [OneShot(programs=8), TwoShot(programs=8, post=True)]

    def main(world: weft.World) -> float:
        rng, late, worst, calls = random.Random(5), random.Random(world.rank), 0.0, []
        for i in range(30):
            op, n, k = (
                rng.choice(OPS),
                rng.choice([64, 1032, 2048]),
                rng.choice([72, 264]),
            )  # each other N is compiled for
            rows = [rng.randrange(1, 40) for _ in range(ranks)] if i % 2 else [rng.randrange(1, 40)] * ranks
            worst = max(worst, case(world, op, rows, n, k, rng.choice(plans[op]), calls=2, seed=i, bias=i % 3 == 0))
        for op in OPS:
            for plan in plans[op]:
                m = 8 * ranks
                x = draw(world.rank, 8 if op == OPS[0] else m, 136).to(world.device)
                args = dict(weight=draw(50 + world.rank, 264, 136).to(world.device), world=world, plan=plan)
                run = partial(getattr(weft, op), x, **args)
                calls.append((run, run().clone()))
        y = torch.ones(3, 1024, device=world.device)
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        for _ in range(150):
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1000, 300_000))
            run, want = rng.choice(calls)
            wrong += (run() != want).any()
            if rng.random() < 0.3:
                wrong += (weft.all_reduce(y, world=world, plan=OneShot(programs=3)) != ranks).any()
        world.synchronize()
        return float("inf") if wrong.item() else worst

    assert max(loopback(main, ranks)) < 5e-3


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("op", OPS)
def test_every_kind(op: str, ranks: int) -> None:
    """Whole and part tiles, uneven ranks, a bias, float16; and the error of the fused kernels beside sequential's."""

    def main(world: weft.World) -> dict[str, float]:
        worst: dict[str, float] = {}
        for name, kind in dict(
            sequential="sequential", decomposed="decomposed", fused=fused(op), second=second(op), one_shot=OneShot()
        ).items():
            for rows, n, k, more in (
                ([128] * ranks, 512, 256, {}),
                (balanced_rows(333, ranks), 264, 136, dict(bias=True, calls=3)),
                (balanced_rows(1, ranks), 264, 136, {}),
                ([100] * ranks, 264, 136, dict(dtype=torch.float16, views=True, into=True)),
            ):
                worst[name] = max(worst.get(name, 0.0), case(world, op, rows, n, k, kind, **more))
        return worst

    for worst in loopback(main, ranks):
        assert worst["sequential"] < 5e-3
        assert all(error <= 1.5 * worst["sequential"] for error in worst.values()), worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_late_ranks_and_many_calls_give_the_same_bits(ranks: int) -> None:
    def main(world: weft.World) -> bool:
        rng, wrong = random.Random(world.rank), torch.zeros((), dtype=torch.int64, device=world.device)
        calls: list[tuple[Any, dict[str, Any], torch.Tensor]] = []
        for op in OPS:
            for m in (256, 250):
                rows = balanced_rows(m, ranks)
                x = draw(world.rank, rows[world.rank] if op == OPS[0] else m, 136).to(world.device)
                args = dict(world=world, plan=fused(op), **({"rows": rows} if op == OPS[0] else {}))
                w = draw(50 + world.rank, 264, 136).to(world.device)
                fn: Any = getattr(weft, op)
                args = dict(args, weight=w, **{"x_shard" if op == OPS[0] else "x": x})
                calls.append((fn, args, fn(**args).clone()))
        same = random.Random(7)
        for _ in range(200):
            if rng.random() < 0.2:
                torch.cuda._sleep(rng.randrange(1000, 400_000))
            fn, args, want = same.choice(calls)
            wrong += (fn(**args) != want).any()
        world.synchronize()
        return not wrong.item()

    assert all(loopback(main, ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_reduces_of_many_ranks(ranks: int) -> None:
    """Random shapes and plans, late ranks: as torch has it, and the same bits again."""
    plans = [OneShot(programs=8), TwoShot(programs=8, post=True), TwoShot(programs=8, rows=2), Decomposed()]

    def main(world: weft.World) -> float:
        rng, late, worst = random.Random(3), random.Random(world.rank), 0.0
        calls = []
        for i in range(40):
            plan, m, h = rng.choice(plans), rng.randrange(1, 70), rng.choice([520, 2048])
            worst = max(worst, norm_case(world, m, h, plan, full=rng.random() < 0.3, seed=i, calls=2))
        for plan in plans:
            for m in (3, 64):
                x, own = (
                    draw(world.rank, m, 1024),
                    draw(50 + world.rank, balanced_rows(m, world.size)[world.rank], 1024),
                )
                given = [t.to(world.device) for t in (x, own, draw(9, 1024))]
                want = [t.clone() for t in weft.all_reduce_rms_norm(*given, 1e-5, world=world, plan=plan)]
                calls.append((plan, given, want))
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        for _ in range(150):
            plan, given, want = rng.choice(calls)
            if late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1000, 300_000))
            for got, first in zip(weft.all_reduce_rms_norm(*given, 1e-5, world=world, plan=plan), want, strict=True):
                wrong += (got != first).any()
            if rng.random() < 0.1:
                world.barrier()
        world.synchronize()
        return float("inf") if wrong.item() else worst

    assert max(loopback(main, ranks)) < bound(torch.bfloat16)


FIRST_USES = dict(
    any=lambda y: y.bool().any(), sum=lambda y: y.double().sum(), norm=lambda y: y.norm(), var=lambda y: y.var(), cumsum=lambda y: y.cumsum(1),
    topk=lambda y: y.topk(5), argmax=lambda y: y.argmax(1), sort=lambda y: y.sort(), median=lambda y: y.median(1), softmax=lambda y: y.softmax(1),
    randn=torch.randn_like, layer_norm=lambda y: torch.nn.functional.layer_norm(y, y.shape[1:]),
)  # fmt: skip


def first_use(name: str) -> None:
    """In a process of its own. What rank 0 does first while its kernel waits for rank 1's does not hold that back."""

    def main(world: weft.World) -> None:
        y = torch.ones(3, 1024, device=world.device)
        weft.all_reduce(y, world=world, plan=OneShot(programs=3))
        world.synchronize()
        world.exchange(None)
        if world.rank:
            time.sleep(0.5)
        weft.all_reduce(y, world=world, plan=OneShot(programs=3))
        if not world.rank:
            FIRST_USES[name](y)
        world.synchronize()

    loopback(main, 2)


@pytest.mark.parametrize("name", FIRST_USES)
def test_first_use_of_a_kernel_beside_one_that_waits(name: str) -> None:
    run = [sys.executable, "-c", f"import test_gpu; test_gpu.first_use({name!r})"]
    ended = subprocess.run(
        run, capture_output=True, text=True, env={**os.environ, "WEFT_TIMEOUT": "3"}, cwd=Path(__file__).parent
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_two_streams() -> None:
    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(6):
            with on_stream(world, ("first", "second")[i % 2]):
                for op in OPS:
                    worst = max(worst, case(world, op, [128] * world.size, 264, 136, fused(op), seed=i))
        return worst

    assert max(loopback(main, 2)) < 5e-3


def test_a_rank_that_stays_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "2")

    def main(world: weft.World) -> None:
        x, w = draw(world.rank, 128, 136).to(world.device), draw(9, 264, 136).to(world.device)
        weft.all_gather_matmul(x, w, world=world, plan="fused")
        world.synchronize()
        world.exchange(None)
        if world.rank == 0:
            weft.all_gather_matmul(x, w, world=world, plan="fused")
            world.synchronize()

    with pytest.raises(weft.Timeout, match=r"all_gather_matmul.*after 2 s.*rank 1 did not arrive"):
        loopback(main, 2)


def test_ranks_that_disagree() -> None:
    def main(world: weft.World) -> str:
        with pytest.raises(weft.Mismatch) as caught:
            case(world, OPS[1], [32 + 8 * world.rank] * 2, 64, 64, fused(OPS[1]))
        assert case(world, OPS[1], [32] * 2, 64, 64, fused(OPS[1])) < 5e-3
        return str(caught.value)

    assert all("rank 0: " in said and "rank 1: " in said for said in loopback(main, 2))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_on_gpus(example: Path) -> None:
    """As a user starts them."""
    for ranks in {2, torch.cuda.device_count()}:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        run = subprocess.run([*torchrun, example], capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stdout + run.stderr
