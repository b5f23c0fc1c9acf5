"""The cost and gain of signaled plans: torchrun --nproc-per-node N -m bench.measure.signaled --out DIR [--parts ...] [--seconds S]

Appends rows to DIR/signaled.jsonl. All methods of a shape and mode are interleaved; a time is the slowest rank's
median. The parts:

    gemm   the GEMM alone: cuBLAS; weft's GEMM to rows; the signaled GEMM to tiles, with signals, on all but some SMs
    ops    cuBLAS + NCCL beside signaled plans for GEMM + all-reduce, reduce-scatter and all-to-all, M N of 16 to 256 Mi with K of 1
           to 8 Ki, and the down projections of bench/common/shapes.py

A plan is timed only after its result was right on every rank. A case that fails is printed and left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.language as tl

import weft
from bench.common import peers, shapes
from bench.common.program import Program, gains, is_right, options
from bench.common.timing import time_interleaved
from weft.compute.gemm import gemm_tile, grouped_tile, store_tile
from weft.kernel_launch import Launch, Matrix, prepared
from weft.ops.common import Factors
from weft.ops.matmul_reduce import signaled
from weft.ops.matmul_reduce.call import ReduceCall
from weft.plans import Signaled, partition

BF = torch.bfloat16
RS, AR, A2A = "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
PARTS = ["gemm", "ops"]
CTAS = (4, 8, 16, 24)
Fns = dict[str, Callable[[], object]]


@weft.jit
def plain_gemm(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Run the signaled GEMM's main loop and epilogue, but store ordinary rows and send no signals."""
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
        acc = gemm_tile(x_desc, w_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, None, tm * BM, tn * BN, N, BM, BN, 0)


def plain(world: weft.World, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, left: int) -> None:
    """Launch `plain_gemm`. left: the number of SMs that it leaves free."""
    (m, k), n = x.shape, w.shape[0]

    _plain(world, m, n, k, left)(world.current_stream(), x_desc=x, w_desc=w, out_desc=out)


@prepared
def _plain(world: weft.World, m: int, n: int, k: int, left: int) -> Launch:
    tile = Signaled.tile
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    return Launch(
        world, plain_gemm, world.sm_count - left, dict(num_warps=tile.warps, num_stages=tile.stages),
        x_desc=Matrix(m, k, (bm, bk)), w_desc=Matrix(n, k, (bn, bk)), out_desc=Matrix(m, n, (bm, bn // 2)),
        tiles_m=-(-m // bm), tiles_n=-(-n // bn), N=n, K=k, BM=bm, BN=bn, BK=bk, GROUP_M=tile.group_m,
    )  # fmt: skip


def reordered(
    world: weft.World, op: str, x: torch.Tensor, w: torch.Tensor, plan: Signaled, out: torch.Tensor | None = None
) -> Callable[[], object]:
    """Return the signaled GEMM of an op alone, which writes tiles or (all-reduce) rows in order to `out`. This GEMM has
    separate signals, for which nothing waits."""
    (m, k), n = x.shape, w.shape[0]
    call = ReduceCall((m // world.size,) * world.size, n, k, x.dtype, False, m, op == AR, out is not None)
    tiling = signaled.tiling_of(world, call, plan, out is not None and op == AR and n % 8 == 0)
    signals = signaled.signals_of(world, call, plan, tiling, f"GEMM of {op}")
    gemm = signaled.gemm_of(world, call, plan, signals, tiling)

    def run() -> torch.Tensor:
        tiles = out if tiling.in_order and out is not None else world.empty((tiling.rows, tiling.cols), x.dtype)
        signaled.launch_on(gemm, Factors(x, w), tiles)(world.current_stream())
        return tiles

    return run


class Bench(Program):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__(a, "signaled.jsonl", dtype="bfloat16")

    def rand(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF) * scale

    def times(self, fns: Fns, mode: str, calls: int = 10) -> dict[str, float]:
        return {
            n: round(us, 2) for n, us in time_interleaved(fns, mode=mode, calls=calls, rounds=self.a.rounds).items()
        }

    # -- parts
    def gemm(self) -> None:
        for m, n, k in self.cases({f"signaled GEMM {mnk}": mnk for mnk in self.mnk()}):
            self.gemm_of(m, n, k)

    def gemm_of(self, m: int, n: int, k: int) -> None:
        world = self.world
        x, w, y = self.rand(m, k), self.rand(n, k, scale=0.02), torch.empty(m, n, device="cuda", dtype=BF)
        fns: Fns = {"cublas": lambda: torch.mm(x, w.t(), out=y)}
        for ctas in (0, *CTAS):
            fns[f"plain, {ctas} CTAs left"] = partial(plain, world, x, w, y, ctas)
            for op in (AR, RS) if ctas else ():
                fns[f"{op}, {ctas} CTAs left"] = reordered(world, op, x, w, Signaled(ctas=ctas))
        fns[f"{AR}, in order, 8 CTAs left"] = reordered(world, AR, x, w, Signaled(ctas=8), y)
        fns[f"{AR}, a wave a group"] = reordered(world, AR, x, w, Signaled(ctas=8, groups=(1,) * 99))
        expected = x @ w.t()
        plain(world, x, w, y, 8)
        if not is_right(world, "plain GEMM", lambda: y, expected):
            return
        for mode in self.a.modes:
            times = self.times(fns, mode, self.calls(m, n, k))
            self.keep(dict(part="gemm", M=m, N=n, K=k, mode=mode, method=q, us=us) for q, us in times.items())
            base = times["plain, 8 CTAs left"]
            figures = ", ".join(f"{q} {us:.0f} ({us / base - 1:+.1%})" for q, us in times.items())
            self.log(f"gemm {m}x{n}x{k} {mode}: {figures}")

    def mnk(self) -> list[tuple[int, int, int]]:
        sizes = [(4096, 4096), (8192, 8192), (16384, 8192), (32768, 8192)]
        shapes_of_grid = [(m, n, k) for m, n in sizes for k in (1024, 2048, 4096, 8192)]
        return shapes_of_grid + [s.row(self.world.size) for s in shapes.ALL if s.name in self.a.shapes]

    def calls(self, m: int, n: int, k: int) -> int:
        return 10 if m * n * k < 1 << 37 else 3

    def plans(self, op: str, m: int, n: int) -> dict[str, Signaled]:
        """Return some plans: several groups with 8 CTAs, the default groups with other numbers of CTAs, and, if the op
        supports them, plans whose groups copy engines move."""
        owners = self.world.size if op == RS else 1
        plan = replace(Signaled(), ctas=8)
        out = {f"default, {ctas} CTAs": replace(plan, ctas=ctas) for ctas in CTAS}
        tiles = owners * -(-m // owners // plan.tile.block_m) * -(-n // plan.tile.block_n)
        waves = -(-tiles // (self.world.sm_count - plan.ctas))
        groups = {"one group": (waves,), "a wave a group": (1,) * min(waves, 16)}
        if waves > 2:
            groups |= {
                "last wave": (waves - 1, 1),
                "first wave": (1, waves - 1),
                "halves": (waves - waves // 2, waves // 2),
            }
        known = {partition((), waves)}
        for name, g in groups.items():
            if partition(g, waves) not in known:
                known.add(partition(g, waves))
                out[name] = replace(plan, groups=g)
        for sms in (4, 8, 16) if op != AR else ():
            copies = replace(plan, ctas=sms, copies=True)
            waves = -(-tiles // (self.world.sm_count - sms))
            out[f"copies, {sms} SMs"] = copies
            out[f"copies, a wave a group, {sms} SMs"] = replace(copies, groups=(1,) * min(waves, 16))
        return out

    def ops(self) -> None:
        cases = {f"signaled {op} {mnk}": (op, *mnk) for mnk in self.mnk() for op in self.a.ops}
        for op, m, n, k in self.cases(cases):
            with self.tolerating(f"{op} {m}x{n}x{k}"):
                self.op(op, m, n, k)
            self.world.synchronize()

    def op(self, op: str, m: int, n: int, k: int) -> None:
        world, size = self.world, self.world.size
        if op == RS and m % size:
            return
        x, w = self.rand(m, k), self.rand(n, k, scale=0.02)
        y = torch.empty(m, n, device="cuda", dtype=BF)
        run: Callable[..., Any]
        if op == A2A:
            rng = random.Random(1)
            to = [rng.choices(range(size), [1 + r % 3 for r in range(size)], k=m) for _ in range(size)]
            routing = weft.route(to[world.rank], world=world)
            run = lambda plan: weft.matmul_all_to_all(x, w, destinations=routing, world=world, plan=plan)  # noqa: E731
            seq: Callable[[], Any] = lambda: run("sequential")  # noqa: E731
            received = [counts[world.rank] for counts in routing.counts]
            outs = torch.empty(sum(received), n, device="cuda", dtype=BF).split(received)
            parts = y.split(routing.counts[world.rank])
            comm: Callable[[], object] = lambda: world.backend.all_to_all(outs, parts, world.current_stream())  # noqa: E731
        else:
            run = lambda plan: getattr(weft, op)(x, w, world=world, plan=plan)  # noqa: E731
            seq = peers.cublas_nccl(op, x, w, size)  # type: ignore[assignment]
            comm = peers.collective(op, m, n, k, size, BF)
        expected = seq()
        plans = self.plans(op, m, n)
        plans = {name: p for name, p in plans.items() if is_right(world, f"{op} {name}", lambda p=p: run(p), expected)}
        fns: Fns = {"sequential": seq, "gemm": lambda: torch.mm(x, w.t(), out=y), "comm": comm}
        fns |= {name: lambda p=p: run(p) for name, p in plans.items()}
        for mode in self.a.modes:
            times = self.times(fns, mode, self.calls(m, n, k))
            gemm, alone = times.pop("gemm"), times.pop("comm")
            self.keep(
                dict(part="ops", op=op, M=m, N=n, K=k, mode=mode, method=name, us=us, gemm_us=gemm, comm_us=alone,
                     plan=json.loads(plans[name].to_json()) if name != "sequential" else None)
                for name, us in times.items()
            )  # fmt: skip
            self.log(f"{op} {m}x{n}x{k} {mode}: gemm {gemm:.0f} comm {alone:.0f} | {gains(times, 'sequential')}")


def main() -> None:
    names = [s.name for s in shapes.TILELINK]
    modes = ["graph", "eager"]
    a = options(choices=dict(parts=PARTS), parts=PARTS, ops=[AR, RS, A2A], shapes=names, modes=modes, rounds=5)
    bench = Bench(a)
    torch.manual_seed(bench.world.rank)
    with torch.no_grad():
        for part in a.parts:
            getattr(bench, part)()
    bench.end()


if __name__ == "__main__":
    main()
