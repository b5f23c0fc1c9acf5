"""What the signaled plan costs and gives: torchrun --nproc-per-node N -m bench.measure.signaled --out DIR [--parts ...] [--seconds S]

Appends rows to DIR/signaled.jsonl, each with "part", all of one interleaved run per shape and mode, medians of the slowest rank:

    wait   how long a stream goes on after it may: a waiting kernel beside cuStreamWaitValue32 and an event
    nccl   time of each collective by bytes a rank and CTAs (0: NCCL's own choice), and the CTAs that it then took
    gemm   the GEMM alone: cuBLAS; weft's, to rows; the signaled one, to tiles with signals, on all but some SMs
    norm   RMSNorm and residual add, from rows and from tiles
    ops    cuBLAS + NCCL beside signaled plans, GEMM + all-reduce, reduce-scatter and all-to-all, M N of 16 to 256 Mi with K of 1
           to 8 Ki, and the down projections of bench/common/shapes.py

A plan is timed only after its result was right on every rank. A case that fails is printed and left out.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import triton.language as tl

import weft
from bench.common import peers, shapes
from bench.common.resume import keep, unfinished
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.run import commit
from weft.compute.gemm import gemm_tile, grouped_tile, store_tile
from weft.kernel_launch import Launch, Matrix, prepared
from weft.ops.common import Factors
from weft.ops.matmul_reduce import signaled
from weft.ops.matmul_reduce.call import ReduceCall
from weft.ops.norm import put_rows
from weft.plans import Signaled, partition

BF = torch.bfloat16
RS, AR, A2A = "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
PARTS = ("wait", "nccl", "gemm", "norm", "ops")
CTAS = (4, 8, 16, 24)
MI = 1 << 20
Fns = dict[str, Callable[[], object]]
T = TypeVar("T")


@weft.jit
def plain_gemm(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """Compute with the signaled GEMM's main loop and epilogue, but store ordinary rows and signal nothing."""
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
        acc = gemm_tile(x_desc, w_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, None, tm * BM, tn * BN, N, BM, BN, 0)


def plain(world: weft.World, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, left: int) -> None:
    """Launch `plain_gemm`. left: the SMs that it leaves free."""
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
    """Return the signaled GEMM of an op alone, to tiles, or (all-reduce) in order to `out`. Its signals are its own: they run
    ahead."""
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


class Bench:
    def __init__(self, world: weft.World, a: argparse.Namespace) -> None:
        self.world, self.a, self.start = world, a, time.time()
        self.fixed = {
            "world": world.size, "dtype": "bfloat16", "commit": commit(), "gpu": torch.cuda.get_device_name(0),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }  # fmt: skip

    def rand(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF) * scale

    def unfinished(self, cases: Mapping[str, T]) -> Iterator[T]:
        return unfinished(
            self.world, self.a.out, {f"signaled {name}": case for name, case in cases.items()}, self.a.seconds
        )

    def log(self, text: str) -> None:
        if self.world.rank == 0:
            print(f"{time.time() - self.start:4.0f}s {text}", flush=True)

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        keep(self.world, self.a.out / "signaled.jsonl", [{**row, **self.fixed} for row in rows])

    def times(self, fns: Fns, mode: str, calls: int = 10) -> dict[str, float]:
        return {
            n: round(us, 2) for n, us in time_interleaved(fns, mode=mode, calls=calls, rounds=self.a.rounds).items()
        }

    def right(self, name: str, fn: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
        """Return whether two calls are right on every rank."""
        worst, message = 0.0, ""
        try:
            for _ in range(2):
                worst = max(worst, error_of(fn(), expected))
            self.world.synchronize()
        except weft.Unsupported as e:
            worst, message = float("inf"), str(e)
        worst = max(self.world.exchange(worst))
        if worst > RIGHT:
            self.log(f"left out: {name}: {worst} {message}")
        return worst <= RIGHT

    # -- parts
    def wait(self) -> None:
        """Time the us from the end of what a stream waits for to the end of its own next kernel."""
        world, side = self.world, torch.cuda.Stream(priority=-1)
        word, value, one = (torch.tensor([v], device="cuda", dtype=torch.int32) for v in (0, 1, 1))
        driver = ctypes.CDLL("libcuda.so.1")
        ends: dict[str, list[float]] = {}

        def stream_value() -> None:
            wrong = driver.cuStreamWaitValue32_v2(
                ctypes.c_void_p(side.cuda_stream),
                ctypes.c_uint64(word.data_ptr()),
                ctypes.c_uint32(1),
                ctypes.c_uint(0),
            )
            if wrong:
                raise RuntimeError(f"cuStreamWaitValue32: error {wrong}")

        def trial(name: str) -> None:
            main = torch.cuda.current_stream()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            word.zero_()
            torch.cuda.synchronize()
            if name == "kernel":
                world.wait(word, value, side)
            elif name == "stream value":
                stream_value()
            with torch.cuda.stream(side):
                if name != "event":
                    one.add_(0)
                    b.record()
            torch.cuda._sleep(400_000)
            a.record()
            word.add_(1)
            if name == "event":
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    one.add_(0)
                    b.record()
            torch.cuda.synchronize()
            ends.setdefault(name, []).append(a.elapsed_time(b) * 1e3)

        for _ in range(30):
            for name in ("event", "kernel", "stream value"):
                trial(name)
        medians = {name: sorted(v)[len(v) // 2] for name, v in ends.items()}
        self.log(f"wait: {medians}")
        self.write([dict(part="wait", method=name, us=round(us, 2)) for name, us in medians.items()])

    def nccl(self) -> None:
        world = self.world
        sizes = [1 << b for b in range(16, 29)] if not self.a.quick else [1 << b for b in (18, 22, 26)]
        for ctas in self.unfinished({f"NCCL, {ctas} CTAs": ctas for ctas in (0, 2, *CTAS)}):
            on = world.backend.communicator(ctas) if ctas else None
            took = {}
            for op, nbytes in ((o, s) for o in ("all_reduce", "reduce_scatter", "all_to_all") for s in sizes):
                fn = self.collective(op, nbytes, on)
                if nbytes == sizes[-1]:
                    took[op] = self.grid(fn)
                us = self.times({op: fn}, "graph", 10 if nbytes < 64 * MI else 3)[op]
                row = dict(part="nccl", op=op, bytes=nbytes, ctas=ctas, us=us)
                self.write([row | ({"took": took[op]} if op in took else {})])
            self.log(f"nccl, at most {ctas or 'any number of'} CTAs: took {took}")

    def collective(self, op: str, nbytes: int, on: Any) -> Callable[[], object]:
        """Return a call of the library's collective on a communicator `on`. nbytes: the bytes of this rank's whole input."""
        world, size = self.world, self.world.size
        x = torch.zeros(nbytes // 2 // size * size, device="cuda", dtype=BF)
        if op == "all_reduce":
            return lambda: world.all_reduce(x, world.current_stream(), on)
        if op == "reduce_scatter":
            part = torch.empty(x.numel() // size, device="cuda", dtype=BF)
            return lambda: world.reduce_scatter(part, x, world.current_stream(), on)
        outs, parts = (t.split(x.numel() // size) for t in (torch.empty_like(x), x))
        return lambda: world.backend.all_to_all(outs, parts, world.current_stream(), on)

    def grid(self, fn: Callable[[], object]) -> int | None:
        """Return the number of CTAs of the NCCL kernel that `fn` launches."""
        fn()
        self.world.synchronize()
        path = self.a.out / f"trace{self.world.rank}.json"
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                fn()
                torch.cuda.synchronize()
            prof.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
            return max(
                e["args"]["grid"][0]
                for e in events
                if "nccl" in e.get("name", "").lower() and "grid" in e.get("args", {})
            )
        except Exception as e:  # a profiler that is not there costs only this figure
            self.log(f"CTAs not known: {e!r}"[:200])
            return None
        finally:
            path.unlink(missing_ok=True)

    def gemm(self) -> None:
        for m, n, k in self.unfinished({f"GEMM {mnk}": mnk for mnk in self.mnk()}):
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
        if not self.right("plain GEMM", lambda: y, expected):
            return
        for mode in self.a.modes:
            times = self.times(fns, mode, self.calls(m, n, k))
            self.write([dict(part="gemm", M=m, N=n, K=k, mode=mode, method=q, us=us) for q, us in times.items()])
            base = times["plain, 8 CTAs left"]
            figures = ", ".join(f"{q} {us:.0f} ({us / base - 1:+.1%})" for q, us in times.items())
            self.log(f"gemm {m}x{n}x{k} {mode}: {figures}")

    def norm(self) -> None:
        sizes = (1024, 8192), (4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192)
        for m, n in self.unfinished({f"norm {mn}": mn for mn in sizes}):
            self.norm_of(m, n)

    def norm_of(self, m: int, n: int) -> None:
        world, remap = self.world, weft.Remap(m, n, -(-m // 128), 128, 256, 8)
        tiles, weight, residual = self.rand(*remap.shape), self.rand(n), self.rand(m, n)
        rows = torch.empty(m, n, device="cuda", dtype=BF)
        put_rows(world, tiles, remap, None, rows)
        fns: Fns = {
            "torch rms_norm": lambda: torch.nn.functional.rms_norm(rows, (n,), weight, 1e-6),
            "put in order": partial(put_rows, world, tiles, remap, None, rows),
        }
        for name, x, r in (("rows", rows, None), ("tiles", tiles, remap)):
            norm = partial(weft.rms_norm, x, weight, 1e-6, world=world, remap=r)
            fns[f"rms_norm, {name}"] = norm
            fns[f"rms_norm + residual, {name}"] = partial(norm, residual=residual)
            fns[f"residual_add, {name}"] = partial(weft.residual_add, x, residual, world=world, remap=r)
        if not self.right(f"norm {m}x{n}", fns["rms_norm, tiles"], fns["torch rms_norm"]()):  # type: ignore[arg-type]
            return
        for mode in self.a.modes:
            times = self.times(fns, mode)
            self.write([dict(part="norm", M=m, N=n, mode=mode, method=q, us=us) for q, us in times.items()])
            overhead = times["rms_norm, tiles"] / times["rms_norm, rows"] - 1
            residual_overhead = times["rms_norm + residual, tiles"] / times["rms_norm + residual, rows"] - 1
            figures = ", ".join(f"{q} {us:.1f}" for q, us in times.items())
            self.log(f"norm {m}x{n} {mode}: remap {overhead:+.1%}, with residual {residual_overhead:+.1%} | {figures}")

    def mnk(self) -> list[tuple[int, int, int]]:
        sizes = [(4096, 4096), (8192, 8192), (16384, 8192), (32768, 8192)]
        shapes_of_grid = [(m, n, k) for m, n in sizes for k in (1024, 2048, 4096, 8192)]
        if not self.a.grid:
            shapes_of_grid = []
        return shapes_of_grid + [s.row(self.world.size) for s in shapes.ALL if s.name in self.a.shapes]

    def calls(self, m: int, n: int, k: int) -> int:
        return 10 if m * n * k < 1 << 37 else 3

    def plans(self, m: int, n: int, owners: int) -> dict[str, Signaled]:
        """Return a few plans: groups of a plan with 8 CTAs, other numbers of CTAs of the default, and what copy engines move."""
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
        for sms in (4, 8, 16):
            copies = replace(plan, ctas=sms, copies=True)
            waves = -(-tiles // (self.world.sm_count - sms))
            out[f"copies, {sms} SMs"] = copies
            out[f"copies, a wave a group, {sms} SMs"] = replace(copies, groups=(1,) * min(waves, 16))
        return out

    def ops(self) -> None:
        for op, m, n, k in self.unfinished({f"{op} {mnk}": (op, *mnk) for mnk in self.mnk() for op in self.a.ops}):
            try:
                self.op(op, m, n, k)
            except Exception:
                print(f"rank {self.world.rank}: {op} {m}x{n}x{k}: {traceback.format_exc()}", flush=True)
                self.world.synchronize()
            torch.cuda.empty_cache()

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
        plans = self.plans(m, n, size if op == RS else 1)
        plans = {name: p for name, p in plans.items() if self.right(f"{op} {name}", lambda p=p: run(p), expected)}
        fns: Fns = {"sequential": seq, "gemm": lambda: torch.mm(x, w.t(), out=y), "comm": comm}
        fns |= {name: lambda p=p: run(p) for name, p in plans.items()}
        if op != A2A:  # what comes next reads the tiles
            fns |= {
                f"{name}, tiles": partial(getattr(weft, f"{op}_tiles"), x, w, world=world, plan=p)
                for name, p in plans.items()
                if p.ctas == 8 and not p.copies
            }
        for mode in self.a.modes:
            times = self.times(fns, mode, self.calls(m, n, k))
            gemm, alone, base = times.pop("gemm"), times.pop("comm"), times["sequential"]
            self.write(
                [
                    dict(part="ops", op=op, M=m, N=n, K=k, mode=mode, method=name, us=us, gemm_us=gemm, comm_us=alone,
                         plan=json.loads(plans[name.removesuffix(", tiles")].to_json()) if name != "sequential" else None)
                    for name, us in times.items()
                ]
            )  # fmt: skip
            figures = " | ".join(f"{name} {us:.0f} ({base / us:.2f}x)" for name, us in times.items())
            self.log(f"{op} {m}x{n}x{k} {mode}: gemm {gemm:.0f} comm {alone:.0f} | {figures}")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    p.add_argument("--ops", nargs="*", default=[AR, RS, A2A])
    p.add_argument("--shapes", nargs="*", default=[s.name for s in shapes.TILELINK], help="of bench/common/shapes.py")
    p.add_argument("--grid", type=int, default=1, help="0: without the M N x K grid")
    p.add_argument("--modes", nargs="*", default=["graph", "eager"])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--quick", action="store_true", help="few sizes of the collectives")
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    torch.manual_seed(world.rank)
    bench = Bench(world, a)
    with torch.no_grad():
        for part in a.parts:
            try:
                getattr(bench, part)()
            except Exception:
                print(f"rank {world.rank}: {part}: {traceback.format_exc()}", flush=True)
                torch.cuda.synchronize()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
