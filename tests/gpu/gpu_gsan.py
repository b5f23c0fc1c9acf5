"""Run weft's operators under GSan, Triton's race detector, with one process per GPU (gpu/gsan.sh):

    WEFT_STOCK_TRITON=1 torchrun --nproc-per-node 2 -m tests.gpu.gpu_gsan [NAME ..]

Every tensor comes from GSan's allocator, and symmetric memory from GSan's module instead of torch's. A race ends the
process with a device-side assertion that names the file and line. The program captures no graphs, since GSan's launcher
refuses them. A program under GSan takes all shared memory of its SM, so a plan whose launches share SMs, such as
FusedReduceScatter, raises Unsupported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
from triton.experimental import gsan

import weft
from weft.plans import FusedGather, OneShot, Plan, TwoShotPush

CALLS = 3


def all_reduce(plan: Plan) -> Callable[[weft.World], object]:
    x = torch.ones(40, 1024, dtype=torch.bfloat16, device="cuda")
    return lambda world: weft.all_reduce(x, world=world, plan=plan)


def product(op: str, plan: Plan) -> Callable[[weft.World], object]:
    x, weight = (torch.ones(256, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda world: getattr(weft, op)(x, weight, world=world, plan=plan)


CASES: dict[str, Callable[[], Callable[[weft.World], object]]] = {
    "barrier": lambda: lambda world: world.barrier(),
    "one_shot": lambda: all_reduce(OneShot()),
    "two_shot": lambda: all_reduce(TwoShotPush()),
    "all_gather_matmul": lambda: product("all_gather_matmul", FusedGather()),
    "matmul_reduce_scatter": lambda: product("matmul_reduce_scatter", OneShot()),
}


def main(names: list[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    triton.knobs.compilation.instrumentation_mode = "gsan"
    memory = gsan.symmetric_memory
    memory.configure(dist.group.WORLD)
    symm_mem.empty, symm_mem.rendezvous = memory.empty, memory.rendezvous
    with torch.cuda.use_mem_pool(gsan.create_mem_pool()):
        world = weft.init()
        for name in names or CASES:
            run = CASES[name]()
            for _ in range(CALLS):
                run(world)
            torch.cuda.synchronize()
            if world.rank == 0:
                print(f"{name}: {CALLS} calls without a finding", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
