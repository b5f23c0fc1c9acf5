"""Host time of a call: torchrun --nproc-per-node N -m bench.measure.host --out FILE [--calls 1000] [--sizes 300]
[--parts known new auto]; or, of several versions of weft in turn, python -m bench.measure.host --out FILE --ranks N --rounds 3
--trees old=OLD/src new=src (known calls alone; ranks may share GPUs, with WEFT_SHARE_GPU=1)

known    us from call to return, of a shape that was called before, without waiting for the GPU: the two library calls that an op
         replaces, and the op by each kind of plan. Medians.
new M    us of the first call of a number of rows, N and K known and prepared: median, and the slowest of `sizes` random ones.
auto     us of eager calls back to back, "auto" beside the two library calls, of GEMMs of models from 3,584 to 12,288 wide; the
         median of interleaved rounds on the slowest rank.

One JSON line a measurement, the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from bench.common import peers
from bench.common.timing import time_interleaved
from weft.planner.prepare import sizes as prepared

BF = torch.bfloat16
OPS = {
    "all_gather_matmul": ("sequential", "decomposed", "fused", "one_shot"),
    "matmul_reduce_scatter": ("sequential", "decomposed", "fused", "one_shot", "signaled"),
    "matmul_all_reduce": ("sequential", "fused", "one_shot", "two_shot", "signaled"),
}
MOST_ROWS = 2048  # of all ranks, in first calls
AHEAD = 40  # calls between two synchronisations: a queue that is full makes the host wait


def took(fns: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the us on the host of a call of each function. The functions alternate after AHEAD calls, because hosts are slower
    for a while."""
    us: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(calls // AHEAD + 1):
        for name, fn in fns.items():
            for _ in range(AHEAD):
                begin = time.perf_counter()
                fn()
                us[name].append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
    return {name: statistics.median(seen[AHEAD:]) for name, seen in us.items()}


def operands(world: weft.World, op: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = m // world.size if op == "all_gather_matmul" else m
    return torch.randn(rows, k, device=world.device, dtype=BF), torch.randn(n, k, device=world.device, dtype=BF)


def known(world: weft.World, calls: int) -> list[dict]:
    """Time known calls: of small GEMMs, so that the host's time is what counts, and of the ops without one."""
    rows = []
    with torch.no_grad():
        for op, fns in others(world).items():
            rows += [dict(what="known", op=op, method=name, us=us) for name, us in took(fns, calls).items()]
        for op, kinds in OPS.items():
            x, w = operands(world, op, 256, 512, 512)
            fns = {"library": peers.cublas_nccl(op, x, w, world.size)}
            fns |= {
                kind: lambda kind=kind, op=op, x=x, w=w: getattr(weft, op)(x, w, world=world, plan=kind)
                for kind in kinds
            }
            rows += [dict(what="known", op=op, method=name, us=us) for name, us in took(fns, calls).items()]
        x = torch.randn(256, 512, device=world.device, dtype=BF)

        def library() -> None:
            dist.all_reduce(x.clone())

        fns = {"library": library} | {
            kind: lambda kind=kind: weft.all_reduce(x, world=world, plan=kind) for kind in ("sequential", "one_shot")
        }
        rows += [dict(what="known", op="all_reduce", method=name, us=us) for name, us in took(fns, calls).items()]
    return rows


def others(world: weft.World) -> dict[str, dict[str, Callable[[], object]]]:
    """Return, by op and plan, calls of the ops that are not a GEMM with a collective: MoE, attention, all-reduce + norm."""
    device, experts = world.device, 8 * world.size

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=BF)

    x, ids = new(64, 512), torch.rand(64, experts, device=device).topk(2).indices.int()
    weights, w13 = torch.rand(64, 2, device=device), weft.moe.pack(new(8, 512, 512), world=world)
    w2, (q, k, v), (residual, norm) = new(8, 512, 256), (new(128, 8, 64) for _ in range(3)), (new(64, 512), new(512))

    def moe(plan: str) -> Callable[[], object]:
        return lambda: weft.moe.moe(x, ids, weights, w13, w2, world=world, plan=plan)

    def attention(plan: str) -> Callable[[], object]:
        return lambda: weft.gathered_attention(q, k, v, causal=True, world=world, plan=plan)

    def reduce_norm(plan: str) -> Callable[[], object]:
        return lambda: weft.all_reduce_rms_norm(x, residual, norm, full_residual=True, world=world, plan=plan)

    return {
        "moe": {plan: moe(plan) for plan in ("dispatched", "fused", "low_latency")},
        "gathered_attention": {plan: attention(plan) for plan in ("sequential", "segmented")},
        "all_reduce_rms_norm": {plan: reduce_norm(plan) for plan in ("sequential", "one_shot", "two_shot")},
    }


def in_turn(a: argparse.Namespace) -> None:
    """Time known calls of several versions of weft, each in processes of its own, in turns: medians over the rounds."""
    trees, seen = dict(tree.split("=", 1) for tree in a.trees), {}
    for round_index in range(a.rounds):
        for name, source in trees.items():
            with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as rows:
                env = os.environ | {
                    "PYTHONPATH": f"{source}:{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"
                }
                run = ["torchrun", "--nproc-per-node", str(a.ranks), "-m", "bench.measure.host", "--parts", "known"]
                subprocess.run([*run, "--calls", str(a.calls), "--out", rows.name], env=env, check=True)
                for line in rows:
                    row = json.loads(line)
                    seen.setdefault((row["op"], row["method"]), {}).setdefault(name, []).append(row["us"])
        print(f"round {round_index + 1} of {a.rounds}", file=sys.stderr)
    with open(a.out, "w") as f:
        for (op, method), us in seen.items():
            medians = {name: round(statistics.median(rounds), 1) for name, rounds in us.items()}
            row = dict(what="known in turn", op=op, method=method, world=a.ranks, rounds=a.rounds, us=medians)
            f.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def new_sizes(world: weft.World, sizes: int) -> list[dict]:
    """Time one call each of random sizes that `weft.prepare` did not call."""
    rows, size = [], world.size
    never = sorted(set(range(8 * size, MOST_ROWS, size)) - set(prepared(MOST_ROWS, size, size)))
    for op, kinds in OPS.items():
        for kind in ("library", "auto", *kinds):
            us: list[float] = []

            def call(m: int, op: str = op, kind: str = kind, us: list[float] = us) -> None:
                x, w = operands(world, op, m, 1024, 1024)
                library = peers.cublas_nccl(op, x, w, world.size)
                world.synchronize()
                begin = time.perf_counter()
                with torch.no_grad():
                    library() if kind == "library" else getattr(weft, op)(x, w, world=world, plan=kind)
                us.append(1e6 * (time.perf_counter() - begin))

            weft.prepare(call, MOST_ROWS, world=world)
            us.clear()
            for m in random.Random(f"{op} {kind}").sample(never, sizes):
                call(m)
            world.synchronize()
            late = sorted(us)
            rows.append(
                dict(
                    what="new M",
                    op=op,
                    method=kind,
                    us=statistics.median(late),
                    p90=late[len(late) * 9 // 10],
                    worst=late[-1],
                )
            )
    return rows


MODELS = {3584: 18944, 4096: 14336, 8192: 28672, 12288: 49152}  # hidden and intermediate sizes
ROWS = (128, 192, 384, 768, 1152, 1536, 2048, 3072, 4096, 8192, 12288)
MOST = 5e12  # FLOPs of a GEMM; a longer one takes as long in a graph


def eager_auto(world: weft.World) -> list[dict]:
    rows = []
    with torch.no_grad():
        for op in OPS:
            for hidden, inner in MODELS.items():
                part = inner // world.size
                n, k = (2 * part, hidden) if op == "all_gather_matmul" else (hidden, part)
                for m in ROWS:
                    if 2 * m * n * k > MOST:
                        break
                    x, w = operands(world, op, m, n, k)
                    fns: dict[str, Callable[[], object]] = {
                        "library": peers.cublas_nccl(op, x, w, world.size),
                        "auto": lambda op=op, x=x, w=w: getattr(weft, op)(x, w, world=world),  # type: ignore[misc]
                    }
                    us = time_interleaved(
                        fns, mode="eager", calls=max(3, min(12, int(1e13 / (2 * m * n * k)))), rounds=5
                    )
                    rows += [dict(what="auto", op=op, method=way, us=t, M=m, N=n, K=k) for way, t in us.items()]
    return rows


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--calls", type=int, default=1000)
    p.add_argument("--sizes", type=int, default=300)
    p.add_argument("--parts", nargs="*", default=["known", "new", "auto"])
    p.add_argument("--trees", nargs="*", default=[])
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    a = p.parse_args()
    if a.trees:
        in_turn(a)
        return
    world = weft.init()
    parts = dict(
        known=lambda: known(world, a.calls), new=lambda: new_sizes(world, a.sizes), auto=lambda: eager_auto(world)
    )
    rank_rows = [row for part in a.parts for row in parts[part]()]
    seen = world.exchange(rank_rows)
    if world.rank == 0:
        numbers = ("us", "p90", "worst")
        with open(a.out, "w") as f:
            for rows in zip(*seen, strict=True):
                slowest = {name: round(max(r[name] for r in rows), 1) for name in numbers if name in rows[0]}
                row = {**rows[0], **slowest, "world": world.size}
                f.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
