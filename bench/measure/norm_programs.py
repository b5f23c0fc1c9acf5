"""The benchmark of all-reduce + residual + RMSNorm by number of programs.

torchrun --nproc-per-node N -m bench.measure.norm_programs --out DIR [--tokens ...] [--hidden ...] [--programs ...] [--seconds 90]

x and the output are in symmetric memory, the residual has the own rows. All calls are in CUDA graphs, interleaved. Each
method's rows are compared with a float32 sum before it is timed; one that is wrong is left out, and says so. `copy` rows
are the rates of so many programs that do nothing but copy rows of 16 KiB: inside a GPU, to a peer, and from it. Rows go
to DIR/norm_programs.jsonl, and a table to the standard output. Other ways to load and store rows that were measured are in
bench/results/nvidia-h100-x2/experiments/norm-programs.jsonl ("ahead" is today's kernel).
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
from bench.common.resume import keep
from bench.common.timing import RIGHT, error_of, time_interleaved
from bench.measure.norm import BF, EPS, LINK
from bench.measure.run import commit
from weft.lang.mapping import balanced_rows
from weft.plans import Plan, TwoShotPull, TwoShotPush


def variants(programs: int) -> dict[str, Plan]:
    return {"pull": TwoShotPull(programs), "push": TwoShotPush(programs)}


@triton.jit
def copy_rows(source, target, rows, P: tl.constexpr):
    cols = tl.arange(0, P)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=9):
        tl.store(target + row.to(tl.int64) * P + cols, tl.load(source + row.to(tl.int64) * P + cols))


class Bench:
    def __init__(self, world: weft.World, out: Path, programs: list[int], rounds: int, seconds: float) -> None:
        self.world, self.out, self.programs, self.rounds, self.seconds = world, out, programs, rounds, seconds
        self.start = time.time()
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.fixed = dict(world=world.size, gpu=torch.cuda.get_device_name(), commit=commit(), date=date)

    def log(self, *text: Any) -> None:
        if self.world.rank == 0:
            print(f"{time.time() - self.start:4.0f}s", *text, flush=True)

    def late(self) -> bool:
        return max(self.world.exchange(time.time() - self.start)) > self.seconds

    def write(self, **row: Any) -> None:
        keep(self.world, self.out / "norm_programs.jsonl", [row | self.fixed])

    def copies(self) -> None:
        """GB/s of copies of 32 MiB, which all ranks make at once."""
        world, rows, columns = self.world, 2048, 8192
        memory = world.symmetric((rows, columns), BF, "copied")
        near, buffer = memory.local, torch.zeros(rows, columns, device="cuda", dtype=BF)
        peer = memory.peers[(world.rank + 1) % world.size]
        calls: dict[str, Callable[[], Any]] = {}
        for programs in self.programs:
            for name, (source, target) in dict(local=(buffer, near), push=(buffer, peer), pull=(peer, buffer)).items():
                calls[f"{name} {programs}"] = lambda p=programs, s=source, t=target: copy_rows[(p,)](
                    s, t, rows, columns, num_warps=16
                )
        for call in calls.values():
            call()
        times = time_interleaved(calls, mode="graph", calls=4, rounds=self.rounds)
        for name in ("local", "push", "pull"):
            rates = {p: rows * columns * 2e-3 / times[f"{name} {p}"] for p in self.programs}
            self.log(f"copy, {name}: " + ", ".join(f"{p}: {rate:.0f} GB/s" for p, rate in rates.items()))
            self.write(copy=name, gbs=rates)

    def size(self, m: int, h: int) -> None:
        world = self.world
        rows = balanced_rows(m, world.size)
        lo = sum(rows[: world.rank])
        shard = slice(lo, lo + rows[world.rank])
        torch.manual_seed(world.rank)
        x = world.cached(("x", m, h), lambda: world.symmetric((m, h), BF, "partial")).local
        x.copy_(torch.randn(m, h, device="cuda"))
        out = world.cached(("out", m, h), lambda: world.symmetric((m, h), BF, "normalised")).local
        torch.manual_seed(99)
        residual, weight = torch.randn(m, h, device="cuda").to(BF), torch.randn(h, device="cuda").to(BF)
        kept = residual[shard].clone()
        total = x.float()
        dist.all_reduce(total)
        total += residual.float()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
        calls: dict[str, Callable[[], Any]] = {}
        errors: dict[str, float] = {}
        for programs in self.programs:
            for name, plan in variants(programs).items():
                if self.late():
                    break
                key = f"{name}|{programs}"
                call = lambda p=plan: weft.all_reduce_rms_norm(x, kept, weight, EPS, out=out, world=world, plan=p)  # noqa: E731
                error, message = 0.0, ""
                try:
                    out.zero_()
                    world.synchronize()
                    dist.barrier()  # a peer may store there from its next call on
                    _, new = call()
                    _, new = call()
                    world.synchronize()
                    error = max(error_of(out, expected), error_of(new, total[shard]))
                except Exception as e:
                    error, message = float("inf"), repr(e)[:300]
                errors[key] = max(world.exchange(error))
                if errors[key] < RIGHT:
                    calls[key] = call
                else:
                    self.log("left out:", key, error, message)
        del total, expected
        buffer = torch.zeros_like(x)
        calls["nccl|0"] = lambda: dist.all_reduce(buffer)
        times = time_interleaved(calls, mode="graph", calls=10 if m <= 1024 else 4, rounds=self.rounds)
        self.report(m, h, times, errors)

    def report(self, m: int, h: int, times: dict[str, float], errors: dict[str, float]) -> None:
        world = self.world
        limit = 2 * (world.size - 1) / world.size * m * h * 2 / LINK / 1e3
        self.log(f"{m} tokens x {h}: limit {limit:.0f} us, NCCL alone {times.pop('nccl|0'):.0f} us; us by programs")
        if world.rank:
            return
        print(" " * 34 + "".join(f"{p:8d}" for p in self.programs))
        for name in variants(1):
            row = {p: times[key] for p in self.programs if (key := f"{name}|{p}") in times}
            worst = max((e for key, e in errors.items() if key.split("|")[0] == name), default=0.0)
            shown = "".join(f"{row[p]:8.1f}" if p in row else " " * 7 + "-" for p in self.programs)
            print(f"{name:>32}  {shown}   error {worst:.1e}", flush=True)
        for key, us in times.items():
            name, programs = key.split("|")
            plan = variants(int(programs))[name].to_json()
            self.write(M=m, N=h, method=name, programs=int(programs), us=round(us, 2), error=errors[key],
                       limit_us=round(limit, 2), plan=plan)  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--tokens", nargs="*", type=int, default=[4096, 512, 8192])
    p.add_argument("--hidden", nargs="*", type=int, default=[8192, 5120])
    p.add_argument("--programs", nargs="*", type=int, default=[4, 8, 16, 32, 64, 132])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, default=90, help="start no further size after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    bench = Bench(world, a.out, a.programs, a.rounds, a.seconds)
    bench.copies()
    for h in a.hidden:
        for m in a.tokens:
            if bench.late():
                bench.log(f"out of time at {m} tokens x {h}")
                continue
            try:
                bench.size(m, h)
            except Exception as e:
                print(f"rank {world.rank}, {m} tokens x {h}: {e!r}"[:600], flush=True)
                if isinstance(e, weft.WeftError):
                    raise
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
