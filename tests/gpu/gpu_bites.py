"""Try to make a race that `weft check` found in a published kernel show wrong sums on two GPUs:

    timeout -k 5 40 torchrun --standalone --nproc-per-node 2 -m tests.gpu.gpu_bites NAME SOURCES

SOURCES is the folder of the package's sources, flashinfer/ or kraken/ (docs/published-kernels.md has the versions). The
program makes calls back to back with the published source, then with a pause before the racing access, which the PTX
memory model allows at any time. It counts the calls with a wrong element. Each part ends after SECONDS. A kernel may
spin without end, so a process exits after LIMIT.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS, LIMIT, BATCH = 3.0, 20, 20
# In every element of an operand. The signs alternate, because FlashInfer quantizes equal elements to the same values.
FACTORS = 1.0, -2.0, 4.0, -8.0, 16.0
Call = Callable[[float], torch.Tensor]  # makes a call with this factor
PAUSES = """

@triton.jit
def pause():
    tl.inline_asm_elementwise(
        "nanosleep.u32 200000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def pause_after_first_warp():
    tl.inline_asm_elementwise(
        "{ .reg .u32 t; .reg .pred p; mov.u32 t, %tid.x; setp.ge.u32 p, t, 32; @p nanosleep.u32 200000; mov.u32 $0, 0; }",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )
"""
# The modules that FlashInfer's file imports from the rest of its package.
STANDING_IN = {
    "__init__.py": "",
    "comm/__init__.py": "",
    "fused/__init__.py": "",
    "api_logging.py": "def flashinfer_api(function):\n    return function\n",
    "utils.py": "def register_custom_op(*args, **options):\n    return lambda function: function\n",
}


def by_halves(pointers: str, value: str, mask: str, rows: str) -> tuple[str, str]:
    """Return a store and its replacement, which stores the odd rows after all warps of rank 0 but the first have
    paused. Only the second store comes after the pause, because a change of the value's layout contains a barrier."""
    store = f"    tl.store({pointers}, {value}, mask={mask})\n"
    even = f"({rows}[:, None] % 2 == 0)"
    halves = [f"    tl.store({pointers}, {value}, mask={mask} & {which})\n" for which in (even, f"({even} == 0)")]
    return store, f"{halves[0]}    if rank == 0:\n        pause_after_first_warp()\n{halves[1]}"


@dataclass(frozen=True)
class Published:
    files: tuple[str, ...]  # the first one contains the kernel
    edit: tuple[str, str]
    call: Callable[[Any, int], Call]
    sum_of: float  # the value of an element of the result for the factor 1

    def module(self, sources: Path, paused: bool, name: str) -> Any:
        """Import the kernel's file in a package of its own, with a pause or as published."""
        folder = Path(tempfile.mkdtemp())
        for file, text in STANDING_IN.items() | {(file, (sources / file).read_text()) for file in self.files}:
            if paused and file == self.files[0]:
                assert text.count(self.edit[0]) == 1, f"{file} does not contain {self.edit[0]!r} once"
                text = text.replace(*self.edit).replace(
                    "import triton.language as tl\n", f"import triton.language as tl\n{PAUSES}", 1
                )
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sys.path.insert(0, str(folder))
        return importlib.import_module(f"{name}.{self.files[0].removesuffix('.py').replace('/', '.')}")


def operands(rank: int, *shape: int) -> dict[float, torch.Tensor]:
    return {f: torch.full(shape, f * (rank + 1), dtype=torch.bfloat16, device="cuda") for f in FACTORS}


def quantized_all_reduce(module: Any, rank: int) -> Call:
    inputs = operands(rank, 1 << 20)
    return lambda factor: module.quantized_all_reduce(inputs[factor], dist.group.WORLD, p2p_phase3=True)


def product(name: str) -> Callable[[Any, int], Call]:
    def bind(module: Any, rank: int) -> Call:
        inputs, weight = operands(rank, 512, 256), torch.ones(256, 512, dtype=torch.bfloat16, device="cuda")
        return lambda factor: getattr(module, name)(inputs[factor], weight)

    return bind


AT_LAST = "    # Phase 3: dequant other ranks' reduced FP8 stripes → BF16 output\n"
KRAKEN = "_ptx_utils/__init__.py", "_ptx_utils/symm_mem_barrier.py", "_ptx_utils/gmem_barrier_arrive_wait.py"
KERNELS = {
    "quantized_all_reduce": Published(
        ("comm/quantized_allreduce.py", "comm/torch_symmetric_memory.py"),
        (AT_LAST, f"{AT_LAST}    if rank == 1:\n        pause()\n"),
        quantized_all_reduce,
        3,
    ),
    "gemm_one_shot_all_reduce": Published(
        ("fused/gemm_one_shot_all_reduce_fused.py", *KRAKEN),
        by_halves("c_ptrs", "c_local", "mask", "offs_cm"),
        product("gemm_one_shot_all_reduce"),
        3 * 256,
    ),
    "gemm_reduce_scatter": Published(
        ("fused/gemm_reduce_scatter_fused.py", *KRAKEN),
        by_halves("symm_ptrs", "c_local", "mask_mn", "offs_symm_m"),
        product("gemm_reduce_scatter"),
        3 * 256,
    ),
}


def stress(call: Call, sum_of: float) -> tuple[int, int]:
    """Return the number of calls and, summed over the ranks, the number of calls with a wrong element. The GPU sleeps
    until the host has launched a batch, so that the calls of a batch follow each other without a gap."""
    calls, wrong, begin = 0, torch.zeros((), dtype=torch.int64, device="cuda"), time.monotonic()
    left = torch.ones((), device="cuda")
    while left.item():
        factors = [FACTORS[i % len(FACTORS)] for i in range(BATCH)]
        torch.cuda._sleep(10_000_000)
        results = [call(factor) for factor in factors]
        # Rounding changes a sum by much less than a value of another call, which changes it by half or more.
        far = [
            ((out.float() / (factor * sum_of) - 1).abs() > 0.1).any()
            for out, factor in zip(results, factors, strict=True)
        ]
        wrong += torch.stack(far).sum()
        calls += BATCH
        left.fill_(float(time.monotonic() - begin < SECONDS))
        dist.all_reduce(left, dist.ReduceOp.MIN)
    dist.all_reduce(wrong)
    return calls, int(wrong.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=KERNELS)
    parser.add_argument("sources", type=Path)
    arguments = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    published = KERNELS[arguments.name]
    for paused in (False, True):
        module = published.module(arguments.sources, paused, "with_pause" if paused else "as_published")
        call = published.call(module, rank)
        call(1.0)
        torch.cuda.synchronize()
        dist.barrier()
        calls, wrong = stress(call, published.sum_of)
        if rank == 0:
            heading = f"{arguments.name}, {'with a pause' if paused else 'as published'}"
            print(
                f"{heading}: "
                + (f"{wrong} wrong results of {calls} calls" if wrong else f"did not bite in {calls} calls"),
                flush=True,
            )
    os._exit(0)


if __name__ == "__main__":
    main()
