"""The benchmark of every op and of the whole MLP on every shape, compared with cuBLAS + NCCL and torch's fused ops.

python -m bench.measure.run [--ops ...] [--shapes ... | --size M,H,I ... | --drawn SEED ...] [--modes graph eager] [--tune] [--seconds S] [--out DIR]
torchrun --nproc-per-node N -m bench.measure.run --out DIR --file FILE   the examples of the ops that FILE defines, plan by plan

The benchmark runs on all GPUs, or on those of torchrun's ranks. A size is M tokens over all ranks, hidden size H and intermediate size I
of the whole MLP. The program prints a line for each size, and at the end the rows of the README, and appends rows to DIR/<op>.jsonl. All
methods of one shape and mode are timed in one interleaved run; `us` is the slowest rank's median over rounds. `limit_us` = max(GEMM alone,
bytes each rank must receive / link rate), where a copy engine measures the link rate at the start. --tune first times the candidate plans
of bench/common/candidates.py on every shape, writes them to DIR/sweep.jsonl (for bench/pages/table.py), and lets "auto" choose among them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

import weft
from bench.common import candidates, peers, shapes
from bench.common.program import Program, gains
from bench.common.resume import keep
from bench.common.timing import time_interleaved
from bench.pages import report
from weft.integrations import quack
from weft.op import REGISTRY, Op
from weft.planner.auto import auto as chosen
from weft.planner.search import brief
from weft.planner.table import Measured, learn
from weft.plans import FlagGated, Plan, Sequential

BF = torch.bfloat16
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
NEEDED = ("sequential", "gemm", "comm")  # the methods that every row must contain


def capturable(fn: peers.Run) -> bool:
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return True
    except Exception:
        torch.cuda.synchronize()
        return False


class Bench(Program):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__(a, "", dtype="bfloat16")
        self.methods = tuple(a.methods)
        self.log(f"link {self.link:.0f} GB/s")

    def tune(self, op: str, shape: shapes.MLP, x: torch.Tensor, w: torch.Tensor, mnk: tuple[int, int, int]) -> None:
        """Time the candidates and teach "auto" the fastest plan of each mode."""
        todo, seq = candidates.working(op, self.world, x, w), Sequential().to_json()
        todo[seq] = peers.cublas_nccl(
            op, x, w, self.world.size
        )  # a plan has to be faster than these calls, which do not include weft's host time
        for mode in self.a.modes:
            times = time_interleaved(
                todo, mode=mode, calls=3 if mnk[0] * mnk[1] > 1 << 27 else 10, rounds=3 if mnk[0] > 1024 else 9
            )
            best = min(times, key=lambda q: times[q])
            learn([Measured(op, self.world.size, *mnk, mode, Plan.from_json(best), times[seq] / times[best])])
            m, n, k = mnk
            row = dict(op=op, name=shape.name, M=m, N=n, K=k, mode=mode, times=times)
            row |= {key: self.fixed[key] for key in ("world", "commit", "date")}
            keep(self.world, self.a.out / "sweep.jsonl", [row])
            if self.world.rank == 0:
                three = sorted(times, key=lambda q: times[q])[:4]
                print("   ", mode, " | ".join(f"{times[q]:.0f} {brief(Plan.from_json(q))}" for q in three), flush=True)

    def op(self, op: str, shape: shapes.MLP, tune: bool) -> None:
        world = self.world
        m, n, k = shape.column(world.size) if op == OPS[0] else shape.row(world.size)
        rows = m // world.size if op == OPS[0] else m
        x, w = torch.randn(rows, k, device="cuda", dtype=BF), torch.randn(n, k, device="cuda", dtype=BF) * 0.02
        full, y = torch.randn(m, k, device="cuda", dtype=BF), torch.empty(m, n, device="cuda", dtype=BF)
        if tune:
            self.tune(op, shape, x, w, (m, n, k))
        fn = getattr(weft, op)
        cols = k if op == OPS[0] else n
        received = m * cols * 2 * (world.size - 1) / world.size * (2 if op == OPS[2] else 1)
        fns: dict[str, peers.Run] = {
            "sequential": peers.cublas_nccl(op, x, w, world.size),
            "auto": lambda: fn(x, w, world=world),
            "fused": lambda: fn(x, w, world=world, plan="fused"),
            "decomposed": lambda: fn(x, w, world=world, plan="decomposed"),
            "gemm": lambda: torch.mm(full, w.t(), out=y),
            "comm": peers.collective(op, m, n, k, world.size, BF),
        }
        if quack.lacks() is None:
            fns["auto without quack"] = peers.without_quack(fns["auto"])
        if op == OPS[0] and quack.lacks() is None:
            fns |= {
                f"flag_gated {form.tile_m}x{form.tile_n}": lambda form=form: fn(
                    x, w, world=world, plan=FlagGated(*form)
                )
                for form in quack.FORMS
            }
            fns |= peers.quack_runs(op, x, w, world.size)
        symm_mem = peers.torch_fused(op, x, w)
        if symm_mem:
            fns["torch symm_mem"] = symm_mem
        fns = {name: run for name, run in fns.items() if name in NEEDED or name.startswith(self.methods)}
        self.measure(op, shape, (m, n, k), fns, received, lambda mode: self.taken(op, m, n, k, mode))

    def taken(self, op: str, m: int, n: int, k: int, mode: str) -> Plan:
        """Return the plan that "auto" chose, after a call."""
        trial = self.world.choices.last(op, (m, n, k))
        return trial and next(iter(trial.faster[mode]), None) or chosen(op, self.world, m, n, k, mode)

    def mlp(self, shape: shapes.MLP) -> None:
        world = self.world
        m, n, k = shape.column(world.size)
        inner = shape.intermediate // world.size
        x = torch.randn(m // world.size, k, device="cuda", dtype=BF)
        w_in, w_out = (
            torch.randn(n, k, device="cuda", dtype=BF) * 0.02,
            torch.randn(k, inner, device="cuda", dtype=BF) * 0.02,
        )
        full, mid = torch.randn(m, k, device="cuda", dtype=BF), torch.randn(m, inner, device="cuda", dtype=BF)
        y, z = torch.empty(m, n, device="cuda", dtype=BF), torch.empty(m, k, device="cuda", dtype=BF)
        model = weft.nn.ParallelMLP(k, shape.intermediate, world=world, dtype=BF).to(world.device)

        def forward() -> object:
            with torch.no_grad():
                return model(x)

        def gemms() -> None:
            torch.mm(full, w_in.t(), out=y)
            torch.mm(mid, w_out.t(), out=z)

        ag = peers.collective(OPS[0], m, n, k, world.size, BF)
        rs = peers.collective(OPS[1], m, k, inner, world.size, BF)
        fns: dict[str, peers.Run] = {
            "sequential": peers.cublas_nccl_mlp(x, w_in, w_out, world),
            "auto": forward,
            "gemm": gemms,
            "comm": lambda: (ag(), rs()),
        }
        received = 2 * m * k * 2 * (world.size - 1) / world.size
        self.measure("parallel_mlp", shape, (m, n, k), fns, received, None)

    def time_registered(self, op: Op) -> None:
        """Time a user-defined op on the op's examples: every kind of plan that can run it, compared with sequential."""
        for name, (operands, options) in op.examples(self.world).items():
            call = op.check(self.world, operands, options)
            plans = {kind: op.choose(self.world, call, kind, False) for kind in op.kinds}
            ways = ["auto", *(kind for kind, plan in plans.items() if plan.kind == kind)]
            fns = {kind: lambda kind=kind, x=operands, o=options: op(self.world, kind, x, o) for kind in ways}
            for fn in fns.values():
                fn()
            self.world.synchronize()
            sizes = dict(zip("MNK", op.sizes(call), strict=True))
            for mode in self.a.modes:
                times = time_interleaved(fns, mode=mode, rounds=self.a.rounds)
                shape = dict(op=op.name, name=name, mode=mode, **sizes)
                rows = (dict(shape, method=method, us=round(us, 2)) for method, us in times.items())
                self.keep(rows, f"{op.name}.jsonl")
                self.log(op.name, name, mode, " | ".join(f"{way} {us:.1f}" for way, us in times.items()))

    def measure(
        self,
        op: str,
        shape: shapes.MLP,
        mnk: tuple[int, int, int],
        fns: dict[str, peers.Run],
        received: float,
        taken: Callable[[str], Plan] | None,
    ) -> None:
        m, n, k = mnk
        for fn in fns.values():
            fn()
        self.world.synchronize()
        for mode in self.a.modes:
            todo = dict(fns)
            if mode == "graph" and "torch symm_mem" in todo and not capturable(todo["torch symm_mem"]):
                del todo["torch symm_mem"]
            if mode == "eager":
                todo = {
                    name: run for name, run in todo.items() if name != "decomposed" and not name.startswith("quack")
                }
            calls, rounds = 3 if m * n > 1 << 27 else 10, self.a.rounds
            if mode == "eager" and m <= 1024:  # these times depend on the host, and vary
                calls, rounds = 30, 3 * rounds
            times = time_interleaved(todo, mode=mode, calls=calls, rounds=rounds)
            gemm, comm = times.pop("gemm"), times.pop("comm")
            limit = max(gemm, received / self.link / 1e3)
            plans = {"auto": taken(mode).to_json()} if taken and "auto" in times else {}
            fixed = dict(op=op, name=shape.name, M=m, N=n, K=k, mode=mode)
            fixed |= dict(gemm_us=round(gemm, 2), comm_us=round(comm, 2), limit_us=round(limit, 2))
            rows = (dict(fixed, method=q, us=round(us, 2), plan=plans.get(q)) for q, us in times.items())
            self.keep(rows, f"{op}.jsonl")
            self.log(f"{op} {shape.name} {mode}: gemm {gemm:.0f} comm {comm:.0f} | {gains(times, 'sequential')}")


def size(text: str) -> shapes.MLP:
    """Return the shape M,H,I."""
    try:
        tokens, hidden, intermediate = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no M,H,I: tokens, hidden size, intermediate size") from None
    return shapes.MLP(f"{tokens}x{hidden}x{intermediate}", tokens, hidden, intermediate)


def arguments(words: list[str]) -> argparse.Namespace:
    """Return the command line's arguments; `sizes` are all shapes to measure."""
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, help="default: a new folder among the temporary ones")
    p.add_argument("--ops", nargs="*", default=[*OPS, "parallel_mlp"], choices=[*OPS, "parallel_mlp"])
    p.add_argument("--shapes", nargs="*", choices=[s.name for s in shapes.ALL])
    p.add_argument("--size", nargs="*", type=size, default=[], metavar="M,H,I")
    p.add_argument("--drawn", nargs="*", type=int, default=[], metavar="SEED", help="20 sizes drawn at random a seed")
    p.add_argument("--modes", nargs="*", default=["graph", "eager"])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--methods", nargs="*", default=[""], help="those whose name begins with one of these")
    p.add_argument("--tune", action="store_true")
    p.add_argument("--file", type=Path, help="a file that defines ops, which are timed instead")
    p.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this many")
    a = p.parse_args(words)
    a.out = a.out or Path(tempfile.mkdtemp(prefix="weft-bench-"))
    by_name = {s.name: s for s in shapes.ALL}
    names = list(by_name) if a.shapes is None and not a.size and not a.drawn else a.shapes or []
    a.sizes = [*map(by_name.__getitem__, names), *a.size, *(shape for seed in a.drawn for shape in shapes.drawn(seed))]
    return a


def start_ranks() -> int:
    """Run this program as one rank per GPU, and return its exit status."""
    if (gpus := torch.cuda.device_count()) < 2:
        raise SystemExit(f"the benchmark needs at least 2 GPUs, and there {'is' if gpus == 1 else 'are'} {gpus} here")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return subprocess.run([*torchrun, "-m", "bench.measure.run", *sys.argv[1:]]).returncode


def main() -> None:
    a = arguments(sys.argv[1:])
    if "RANK" not in os.environ:
        raise SystemExit(start_ranks())
    a.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(a)
    torch.manual_seed(bench.world.rank)
    if a.file:
        known = set(REGISTRY)
        sys.path.insert(0, str(a.file.parent))
        importlib.import_module(a.file.stem)
        for name in sorted(set(REGISTRY) - known):
            bench.time_registered(REGISTRY[name])
        bench.end()
        return
    cases = {f"{op} {shape.name}": (op, shape) for shape in a.sizes for op in a.ops}
    for op, shape in bench.cases(cases):
        bench.mlp(shape) if op == "parallel_mlp" else bench.op(op, shape, a.tune)
    if bench.world.rank == 0:
        table, plots = report.ending(a.out)
        Console().print(table)
        print("plots:", *plots)
        print(report.table_of_means(report.load(a.out)))
    bench.end()


if __name__ == "__main__":
    main()
