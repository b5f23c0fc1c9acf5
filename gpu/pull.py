import sys
sys.path.insert(0, "src"); sys.path.insert(0, "bench")
import torch, torch.distributed as dist, weft
from dataclasses import replace
from weft.plan import *
from timing import time_interleaved
world = weft.init(); F = Fused(); TWO = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)
m, n, k = 8192, 256, 4096
x = torch.randn(m // world.size, k, device="cuda", dtype=torch.bfloat16); w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
fns = {}
for name, p in {"F4": F, "F8": replace(F, pullers=8), "F8s8": replace(F, pullers=8, split=8), "F12s4": replace(F, pullers=12, split=4), "T8": TWO, "T8s8": replace(TWO, split=8), "T16s8": replace(TWO, pullers=16, split=8), "T24s8": replace(TWO, pullers=24, split=8)}.items():
    fns[name] = lambda p=p: weft.all_gather_matmul(x, w, world=world, plan=p)
for mode in ("graph", "eager"):
    t = time_interleaved(fns, mode=mode, calls=10, rounds=5)
    if world.rank == 0: print("pull alone", mode, {q: f"{v:.0f} us {m*k*2*(world.size-1)/world.size/v/1e3:.0f} GB/s" for q, v in t.items()}, len(world.backend.launcher._prepared), flush=True)
dist.destroy_process_group()
