"""Eager calls by "auto", compared with cuBLAS and NCCL: torchrun --nproc-per-node N -m bench.measure.eager --out DIR
[--seconds S]

The program appends rows to DIR/eager.jsonl: the us of calls that run one after another, on the slowest rank, as the
median of interleaved rounds. The GEMMs come from models with hidden sizes of 3,584 to 12,288. Longer GEMMs, which take
as long as in a CUDA graph, are left out. "library" is the two calls of cuBLAS and NCCL that an op replaces; a row of "auto" has
the plan that ran.
"""

from __future__ import annotations

import functools
import itertools

import torch

import weft
from bench.common import peers
from bench.common.program import Program, gains, options
from bench.common.timing import time_interleaved

OPS = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
MODELS = {3584: 18944, 4096: 14336, 8192: 28672, 12288: 49152}  # hidden and intermediate sizes
ROWS = (128, 192, 384, 768, 1152, 1536, 2048, 3072, 4096, 8192, 12288)
MOST = 5e12  # FLOPs of a GEMM


def sizes(world: int) -> dict[str, tuple[str, int, int, int]]:
    """Return, by the name of the case, the op and M, N, K; M counts the rows of all ranks."""
    cases = {}
    for op, (hidden, inner), m in itertools.product(OPS, MODELS.items(), ROWS):
        n, k = (2 * inner // world, hidden) if op == OPS[0] else (hidden, inner // world)
        if 2 * m * n * k <= MOST:
            cases[f"{op} {m}x{n}x{k}"] = op, m, n, k
    return cases


def main() -> None:
    run = Program(options(), "eager.jsonl")
    world = run.world
    with torch.no_grad():
        for op, m, n, k in run.cases(sizes(world.size)):
            rows = m // world.size if op == OPS[0] else m
            x, w = (torch.randn(count, k, device=world.device, dtype=torch.bfloat16) for count in (rows, n))
            calls = dict(
                library=peers.cublas_nccl(op, x, w, world.size),
                auto=functools.partial(getattr(weft, op), x, w, world=world),
            )
            count = max(3, min(12, int(1e13 / (2 * m * n * k))))
            us = time_interleaved(calls, mode="eager", calls=count, rounds=5)
            assert world.ran is not None
            plans = dict(auto=world.ran.plan.to_json())
            run.keep(dict(op=op, method=p, us=round(t, 1), M=m, N=n, K=k, plan=plans.get(p)) for p, t in us.items())
            run.log(f"{op} {m}x{n}x{k}: {gains(us, 'library')}")
    run.end()


if __name__ == "__main__":
    main()
