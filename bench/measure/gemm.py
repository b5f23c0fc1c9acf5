"""weft's GEMM without communication, tile by tile: torchrun --nproc-per-node 1 -m bench.measure.gemm --out DIR [--seconds S]

One GPU. Each tile configuration of both main loops, the flattened one (all-gather + GEMM, `compute.gemm.matmul`) and the
written-out one that tells of its tiles (the sums over ranks), and "shared", the first one with its last tiles shared by all
programs, beside cuBLAS, and quack's where it can be imported: all of one
shape in one interleaved run, CUDA graphs. Appends a row a shape to DIR/gemm.jsonl, us by method; a configuration that is wrong
is printed and left out. Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
from bench.common import shapes
from bench.common.resume import keep, unfinished
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.run import commit
from weft.compute.gemm import FLUSHED, Tile, column_halves, grouped_tile, matmul
from weft.lang.intrinsics import flush_stores
from weft.lang.jit import constants
from weft.ops.matmul import ALONE
from weft.ops.matmul import matmul as shared
from weft.transport.memory import descriptor

BF = torch.bfloat16
FEW = [  # down and up projections of several models, and a square one
    (8192, 5504, 4096), (8192, 2752, 4096), (8192, 4096, 2752), (8192, 14336, 8192), (8192, 8192, 7168), (2048, 14336, 8192),
    (1024, 8192, 7168), (8192, 8192, 8192),
]  # fmt: skip
SMALL = [  # 0.7 to 6 waves of 128 x 256 tiles on 132 SMs, most with a last one that is not full
    (1024, 2752, 4096), (384, 13824, 5120), (1024, 5504, 4096), (2048, 2752, 4096), (1536, 4096, 3584), (512, 14336, 8192),
    (2048, 3584, 4736), (1536, 5120, 6912), (2048, 4096, 2752), (4096, 2752, 4096), (3072, 5120, 3456), (2048, 8192, 3584),
    (4096, 4096, 1376), (4096, 4352, 4096), (5120, 5120, 3456),
]  # fmt: skip
QUACK = [(128, 256, False), (128, 192, True), (128, 160, True), (256, 192, False)]  # tile, ping-pong; clusters of 2 x 1


@dataclass(frozen=True)
class Form:
    """A tile configuration of one of the loops."""

    loop: str  # "flat" or "told"
    bm: int
    bn: int
    warps: int
    stages: int
    per_sm: int = 1
    group: int = 8
    left: int = 0  # SMs that it leaves

    def __str__(self) -> str:
        group = f" g{self.group}" if self.group != 8 else ""
        left = f" -{self.left}" if self.left else ""
        return f"{self.loop} {self.bm}x{self.bn} w{self.warps} s{self.stages} x{self.per_sm}{group}{left}"

    def launch(self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, sms: int) -> Callable[[], object]:
        (m, k), n = x.shape, w.shape[0]
        a, b = descriptor(x, m, k, (self.bm, 64)), descriptor(w, n, k, (self.bn, 64))
        c = descriptor(y, m, n, (self.bm, self.bn // 2))
        tile = constants(Tile, BM=self.bm, BN=self.bn, BK=64, GROUP_M=self.group, TRANS_B=False)
        options = dict(num_warps=self.warps, num_stages=self.stages)
        grid = (min((sms - self.left) * self.per_sm, -(-m // self.bm) * -(-n // self.bn)),)
        if self.loop == "flat":
            return lambda: matmul[grid](a, b, c, M=m, N=n, K=k, tile=tile, GATED=0, **ALONE, **options)
        counts = torch.zeros(1, dtype=torch.int32, device=x.device)
        return lambda: notifying_matmul[grid](a, b, c, counts, m, n, k, tile, **options)


@weft.jit(do_not_specialize=("M",))
def notifying_matmul(a_desc, b_desc, out_desc, counts, M, N, K, tile):
    """Compute by the loop of ops/matmul_reduce/kernels.py, in ordinary order: it notifies every tile, FLUSHED steps into the
    next."""
    BM: tl.constexpr = tile.BM
    BN: tl.constexpr = tile.BN
    BK: tl.constexpr = tile.BK
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    late = min(FLUSHED, steps - 1)
    t = tl.program_id(0) - tl.num_programs(0)
    step, row, col, stored = steps - 1, 0, 0, -1
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, tl.cdiv(tiles_m * tiles_n - tl.program_id(0), tl.num_programs(0)) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            t += tl.num_programs(0)
            tm, tn = grouped_tile(t, tiles_m, tiles_n, tile.GROUP_M)
            row, col = tm * BM, tn * BN
        acc = tl.dot(a_desc.load([row, step * BK]), b_desc.load([col, step * BK]).T, acc)
        if (step == late) & (stored >= 0):
            flush_stores(True)
            tl.atomic_add(counts, 1, sem="release", scope="gpu")
            stored = -1
        if step == steps - 1:
            left, right = column_halves(acc, BM, BN)
            out_desc.store([row, col], left.to(out_desc.dtype))
            out_desc.store([row, col + BN // 2], right.to(out_desc.dtype))
            stored = t
            acc = tl.zeros((BM, BN), tl.float32)
    if stored >= 0:
        flush_stores(True)
        tl.atomic_add(counts, 1, sem="release", scope="gpu")


def forms() -> Iterator[Form]:
    """Two first runs also had forms that were slower, or no better, and are gone: tiles that are stored in one
    piece ("whole"), 128 x 128 of 8 warps, 256 x 128 with 3 stages, 64 x 128 with two programs an SM, groups of 4 and 16."""
    for loop in ("flat", "told"):
        yield Form(loop, 128, 256, 8, 3)
        yield Form(loop, 128, 256, 8, 4)
        yield Form(loop, 256, 128, 8, 4)
        yield Form(loop, 128, 128, 4, 3, 2)
        yield Form(loop, 64, 256, 4, 5)


def compiled(form: Form) -> str:
    """Compile it, in a process of its own; what went wrong, if something did."""
    try:
        x, w, y = (torch.zeros(512, 512, device="cuda", dtype=BF) for _ in range(3))
        form.launch(x, w, y, 1)()
        torch.cuda.synchronize()
        return ""
    except Exception as e:
        return repr(e)[:200]


def all_shapes(sets: list[str]) -> list[tuple[str, tuple[int, int, int]]]:
    names = {mnk: name for name, part in (("few", FEW), ("small", SMALL)) for mnk in part if name in sets}
    for s in shapes.TILELINK if "MLP" in sets else ():
        names |= {s.column(4): f"{s.name} column x4", s.row(4): f"{s.name} row x4"}
    return [(name, mnk) for mnk, name in names.items()]


def library(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> dict[str, Callable[[], object]]:
    fns: dict[str, Callable[[], object]] = {"cuBLAS": lambda: torch.mm(x, w.t(), out=y)}
    try:
        from quack.gemm import gemm as quack_gemm
    except ImportError:
        return fns
    for bm, bn, pp in QUACK:
        fns[f"quack {bm}x{bn}{' pingpong' if pp else ''}"] = lambda bm=bm, bn=bn, pp=pp: quack_gemm(
            x, w, y, None, None, bm, bn, 2, 1, pingpong=pp
        )
    return fns


def right(
    fns: dict[str, Callable[[], object]], y: torch.Tensor, expected: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Return the forms that give the right result."""
    good = {}
    for name, fn in fns.items():
        try:
            y.zero_()
            fn()
            err = error_of(y, expected)
            if err < RIGHT:
                good[name] = fn
            else:
                print("wrong:", name, err, flush=True)
        except Exception:
            print("failed:", name, traceback.format_exc(limit=1)[-300:], flush=True)
    return good


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this many")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--processes", type=int, default=12)
    p.add_argument("--sets", nargs="*", default=["small", "few", "MLP"], help="of shapes")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    start, todo = time.time(), list(forms())
    with ProcessPoolExecutor(a.processes, multiprocessing.get_context("spawn")) as pool:
        bad = {f for f, error in zip(todo, pool.map(compiled, todo), strict=True) if error and not print(f, error)}
    print(f"{time.time() - start:.0f}s: compiled", flush=True)
    world = weft.init()
    props = torch.cuda.get_device_properties(0)
    fixed = dict(
        gpu=props.name, commit=commit(), triton=triton.__version__, rounds=a.rounds,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    cases = {f"GEMM {name} {mnk}": (name, mnk) for name, mnk in all_shapes(a.sets)}
    for name, (m, n, k) in unfinished(world, a.out, cases, a.seconds):
        x, w = torch.randn(m, k, device="cuda", dtype=BF), torch.randn(n, k, device="cuda", dtype=BF) * 0.02
        y = torch.empty(m, n, device="cuda", dtype=BF)
        fns = library(x, w, y)
        fns |= {str(f): f.launch(x, w, y, props.multi_processor_count) for f in todo if f not in bad}
        fns["shared"] = lambda x=x, w=w, y=y: shared(x, w, y, world, world.sm_count)
        times = time_interleaved(right(fns, y, x @ w.t()), mode="graph", calls=3, rounds=a.rounds)
        row = dict(name=name, M=m, N=n, K=k, us={q: round(t, 2) for q, t in times.items()}, **fixed)
        keep(world, a.out / "gemm.jsonl", [row])
        best = sorted(times, key=lambda q: times[q])[:4]
        speedups = " | ".join(f"{q} {times['cuBLAS'] / times[q]:.3f}" for q in best)
        print(f"{time.time() - start:4.0f}s {m}x{n}x{k} cuBLAS {times['cuBLAS']:.0f} us | {speedups}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    from bench.measure import gemm  # by the name that the compiling processes know it by

    gemm.main()
