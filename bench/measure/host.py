"""The host's time for a call: torchrun --nproc-per-node N -m bench.measure.host --out DIR [--calls 1000]

The program appends rows to DIR/host.jsonl: the median us on the slowest rank from a call to its return, of a shape that was called before,
without waiting for the GPU, for each kind of plan of an op. "library" is the two calls of cuBLAS and NCCL that an op replaces.

To compare two versions of weft, run it alternately with each version's src first in PYTHONPATH.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import weft
from bench.common import peers
from bench.common.program import Program, options

BF = torch.bfloat16
OPS = {
    "all_gather_matmul": ("sequential", "decomposed", "fused", "one_shot"),
    "matmul_reduce_scatter": ("sequential", "decomposed", "fused", "one_shot", "signaled"),
    "matmul_all_reduce": ("sequential", "fused", "one_shot", "two_shot", "signaled"),
}
AHEAD = 40  # the calls between two synchronisations; with a full queue the host would wait


def took(fns: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the us that the host needs for a call of each function. The functions alternate after AHEAD calls, because
    a host may be slow for some time."""
    us: dict[str, list[float]] = {name: [] for name in fns}
    for _ in range(calls // AHEAD + 1):
        for name, fn in fns.items():
            for _ in range(AHEAD):
                begin = time.perf_counter()
                fn()
                us[name].append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
    return {name: statistics.median(seen[AHEAD:]) for name, seen in us.items()}


def known_calls(world: weft.World) -> dict[str, dict[str, Callable[[], object]]]:
    """Return, by op and kind of plan, calls of small GEMMs with collectives, whose time is mostly the host's, and of
    the other ops."""
    calls = others(world)
    for op, kinds in OPS.items():
        rows = 256 // world.size if op == "all_gather_matmul" else 256
        x, w = (torch.randn(count, 512, device=world.device, dtype=BF) for count in (rows, 512))
        calls[op] = {"library": peers.cublas_nccl(op, x, w, world.size)} | {
            kind: lambda kind=kind, op=op, x=x, w=w: getattr(weft, op)(x, w, world=world, plan=kind) for kind in kinds
        }
    whole = torch.randn(256, 512, device=world.device, dtype=BF)
    calls["all_reduce"] = {"library": lambda: dist.all_reduce(whole.clone())} | {
        kind: lambda kind=kind: weft.all_reduce(whole, world=world, plan=kind) for kind in ("sequential", "one_shot")
    }
    return calls


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
    a = options(calls=1000)
    run = Program(a, "host.jsonl")
    with torch.no_grad():
        known = [
            dict(op=op, method=name, us=us)
            for op, fns in known_calls(run.world).items()
            for name, us in took(fns, a.calls).items()
        ]
    seen = run.world.exchange(known)
    for row in run.keep(rows[0] | dict(us=round(max(r["us"] for r in rows), 1)) for rows in zip(*seen, strict=True)):
        run.log(row)
    run.end()


if __name__ == "__main__":
    main()
