"""The host's time for a call: torchrun --nproc-per-node N -m bench.measure.host --out DIR [--calls 1000] [--parts known auto]

Appends rows to DIR/host.jsonl, of the slowest rank. "library" is the two calls of cuBLAS and NCCL that an op replaces.

known    the median us from a call to its return, of a shape that was called before, without waiting for the GPU: an op by each kind
         of plan
auto     the us of an eager call back to back, the op by "auto", of GEMMs of models from 3,584 to 12,288 wide; the median of
         interleaved rounds

To compare two versions of weft, run it alternately with each version's src first in PYTHONPATH.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import weft
from bench.common import peers
from bench.common.program import Program, options
from bench.common.timing import time_interleaved

BF = torch.bfloat16
OPS = {
    "all_gather_matmul": ("sequential", "decomposed", "fused", "one_shot"),
    "matmul_reduce_scatter": ("sequential", "decomposed", "fused", "one_shot", "signaled"),
    "matmul_all_reduce": ("sequential", "fused", "one_shot", "two_shot", "signaled"),
}
AHEAD = 40  # calls between two synchronisations: a queue that is full makes the host wait


def took(fns: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the host's us for a call of each function. The functions alternate after AHEAD calls, because a host may
    be slow for a while."""
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
    """Time known calls of small GEMMs with collectives, for which the host's time decides, and of the other ops."""
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


MODELS = {3584: 18944, 4096: 14336, 8192: 28672, 12288: 49152}  # hidden and intermediate sizes
ROWS = (128, 192, 384, 768, 1152, 1536, 2048, 3072, 4096, 8192, 12288)
MOST = 5e12  # FLOPs of a GEMM; a longer one takes as long in a graph


def eager_auto(world: weft.World, calls: int) -> list[dict]:
    """Time eager calls of GEMMs with collectives, where the GPU's time counts too."""
    rows = []
    with torch.no_grad():
        for op, (hidden, inner), m in itertools.product(OPS, MODELS.items(), ROWS):
            part = inner // world.size
            n, k = (2 * part, hidden) if op == "all_gather_matmul" else (hidden, part)
            flops = 2 * m * n * k
            if flops > MOST:
                continue
            x, w = operands(world, op, m, n, k)
            fns = {
                "library": peers.cublas_nccl(op, x, w, world.size),
                "auto": functools.partial(getattr(weft, op), x, w, world=world),
            }
            us = time_interleaved(fns, mode="eager", calls=max(3, min(12, int(1e13 / flops))), rounds=5)
            rows += [dict(what="auto", op=op, method=name, us=t, M=m, N=n, K=k) for name, t in us.items()]
    return rows


PARTS = {"known": known, "auto": eager_auto}


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


def main() -> None:
    a = options(calls=1000, parts=list(PARTS), choices=dict(parts=PARTS))
    run = Program(a, "host.jsonl")
    seen = run.world.exchange([row for part in a.parts for row in PARTS[part](run.world, a.calls)])
    for row in run.keep(rows[0] | dict(us=round(max(r["us"] for r in rows), 1)) for rows in zip(*seen, strict=True)):
        run.log(row)
    run.end()


if __name__ == "__main__":
    main()
