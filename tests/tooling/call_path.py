"""The Python functions that a first call and a known call of a shape enter, from the public function to the launches:
`python -m tests.tooling.call_path`.

The program counts these functions on rank 0 of an emulated World, in the first and in the third call of a shape. The
program does not count functions that the emulator and its backend call: on a GPU, one call of CUDA or NCCL replaces
them. A comprehension counts as one if Python runs it as a function (3.11, but not 3.12 and later).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import weft
from weft.integrations.vllm.row_norm_column import OwnRows, ShardedTokens, forms
from weft.plans import Plan, Sequential

SOURCE = str(Path(weft.__file__).parent) + "/"
EMULATOR = tuple(SOURCE + part for part in ("emulator/", "backends/emulated"))
Make = Callable[[weft.World], Callable[[], object]]
BF = torch.bfloat16


def all_gather(plan: str) -> Make:
    def make(world: weft.World) -> Callable[[], object]:
        x, w = torch.randn(32, 64).to(BF), torch.randn(64, 64).to(BF)
        return lambda: weft.all_gather_matmul(x, w, world=world, plan=plan)

    return make


def matmul_reduce(op: Callable[..., object], plan: str) -> Make:
    def make(world: weft.World) -> Callable[[], object]:
        x, w = torch.randn(64, 64).to(BF), torch.randn(64, 64).to(BF)
        return lambda: op(x, w, world=world, plan=plan)

    return make


def attention(world: weft.World) -> Callable[[], object]:
    q, k, v = (torch.randn(16, 2, 16).to(BF) for _ in range(3))
    return lambda: weft.gathered_attention(q, k, v, causal=True, world=world, plan="segmented")


def moe(plan: str) -> Make:
    def make(world: weft.World) -> Callable[[], object]:
        x, first_ids = torch.randn(8, 64).to(BF), torch.randint(0, 4, (8,), dtype=torch.int32)
        ids, weights = torch.stack([first_ids, (first_ids + 1) % 4], 1), torch.rand(8, 2)
        w13, w2 = weft.moe.pack(torch.randn(2, 64, 64).to(BF), world=world), torch.randn(2, 64, 32).to(BF)
        return lambda: weft.moe.moe(x, ids, weights, w13, w2, world=world, plan=plan)

    return make


def row_norm_column(form: Plan) -> Make:
    """The operator of vLLM's compiled passes, which torch's dispatcher calls."""

    def make(world: weft.World) -> Callable[[], object]:
        x, residual, row, column = (torch.randn(64, 64).to(BF) for _ in range(4))
        forms(world)[64], world.max_captured_rows = form, 1
        weights = torch.ones(64).to(BF), row, None, column, *[None] * 3
        return lambda: torch.ops.weft.row_norm_column(x, residual, *weights, 1e-6, world.name, "auto")

    return make


# For each name: the call, and the largest numbers of functions that a first call and a known call may enter.
CALLS: dict[str, tuple[Make, int, int]] = {
    "all-gather + GEMM, sequential": (all_gather("sequential"), 85, 10),
    "all-gather + GEMM, fused": (all_gather("fused"), 215, 11),
    "all-gather + GEMM, one shot": (all_gather("one_shot"), 195, 14),
    "GEMM + reduce-scatter, fused": (matmul_reduce(weft.matmul_reduce_scatter, "fused"), 213, 14),
    "GEMM + reduce-scatter, one shot": (matmul_reduce(weft.matmul_reduce_scatter, "one_shot"), 200, 15),
    "GEMM + reduce-scatter, signaled": (matmul_reduce(weft.matmul_reduce_scatter, "signaled"), 205, 20),
    "GEMM + all-reduce, two shots": (matmul_reduce(weft.matmul_all_reduce, "two_shot"), 200, 15),
    "gathered attention, segmented": (attention, 205, 31),
    "MoE, dispatched": (moe("dispatched"), 500, 21),
    "MoE, fused": (moe("fused"), 430, 15),
    "MoE, low latency": (moe("low_latency"), 330, 16),
    "vLLM's row, norm and column, sequential": (row_norm_column(Sequential()), 335, 37),
    "vLLM's row, norm and column, own rows": (row_norm_column(OwnRows()), 335, 37),
    "vLLM's row, norm and column, sharded tokens": (row_norm_column(ShardedTokens()), 527, 34),
}


class CallPath:
    """Count the functions of weft that are entered, except those that the emulator enters."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self._inside = 0  # frames of the emulator that have not returned

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        emulated = file.startswith(EMULATOR)
        if event == "call":
            if not self._inside and not emulated and file.startswith(SOURCE):
                self.entered[f"{file.removeprefix(SOURCE)}:{frame.f_code.co_name}"] += 1
            self._inside += emulated
        elif event == "return":
            self._inside -= emulated


def entered(make: Make) -> tuple[Counter[str], Counter[str]]:
    """Return how often a first call and a known call enter each function."""

    def rank(world: weft.World) -> list[Counter[str]]:
        call, paths = make(world), [CallPath() for _ in range(3)]
        for path in paths:
            sys.setprofile(path if world.rank == 0 else None)
            try:
                call()
            finally:
                sys.setprofile(None)
        world.synchronize()
        return [path.entered for path in paths]

    with torch.no_grad():
        first_call, _, known_call = weft.spmd(rank, 2, backend="emulated")[0]
    return first_call, known_call


def main() -> None:
    for name, (make, *most) in CALLS.items():
        for title, functions, limit in zip(("first", "known"), entered(make), most, strict=True):
            print(f"{functions.total():4d} functions in a {title} call, at most {limit}: {name}")
            if len(sys.argv) > 1:
                print("     " + ", ".join(f"{where} {n}" for where, n in functions.most_common()))


if __name__ == "__main__":
    main()
