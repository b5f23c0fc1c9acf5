import sys, os, time, traceback
sys.path.insert(0, "tests"); sys.path.insert(0, "src")
import torch, torch.distributed as dist
import weft
from weft.plan import *
from cases import *
world = weft.init()
def say(*a):
    if world.rank == 0: print(*a, flush=True)
t0 = time.time()
say(world, torch.__version__)
def case(name, f):
    try:
        e = f()
    except weft.WeftError as ex:
        print(world.rank, name, repr(ex), flush=True); raise
    except Exception as ex:
        if world.rank == 0: traceback.print_exc()
        e = float("inf")
    es = world.exchange(e)
    say(f"{time.time()-t0:6.1f}s {name}: {max(es):.2e} {'OK' if max(es) < 5e-3 else 'WRONG ' + str(es)}")
W = world.size
case("ag seq", lambda: all_gather_case(world, (256,)*W, 512, 256, "sequential"))
case("ag dec", lambda: all_gather_case(world, (256,)*W, 512, 256, "decomposed", calls=3))
case("ag fused", lambda: all_gather_case(world, (256,)*W, 512, 256, "fused", calls=4))
case("ag fused bias f16", lambda: all_gather_case(world, (256,)*W, 520, 264, "fused", bias=True, dtype=torch.float16, calls=4))
case("ag fused uneven", lambda: all_gather_case(world, balanced_rows(1000, W), 520, 264, "fused", calls=4))
case("ag fused uneven0", lambda: all_gather_case(world, [0, 300] + [33]*(W-2), 520, 264, "fused", calls=4))
case("rs seq", lambda: reduce_case(world, 1000, 512, 256, "sequential", bias=True))
case("rs dec", lambda: reduce_case(world, 256*W, 512, 256, "decomposed", bias=True, calls=3))
case("rs fused", lambda: reduce_case(world, 256*W, 512, 256, "fused", calls=4))
case("rs fused bias", lambda: reduce_case(world, 1003, 520, 264, "fused", bias=True, dtype=torch.float16, calls=4))
case("ar seq", lambda: reduce_case(world, 1000, 512, 256, "sequential", bias=True, everywhere=True))
case("ar dec", lambda: reduce_case(world, 256*W, 512, 256, "decomposed", bias=True, everywhere=True, calls=3))
case("ar fused", lambda: reduce_case(world, 256*W, 512, 256, "fused", everywhere=True, calls=4))
case("ar fused bias", lambda: reduce_case(world, 1003, 520, 264, "fused", bias=True, everywhere=True, calls=4))
case("ag fused big", lambda: all_gather_case(world, (1024,)*W, 2752, 4096, "fused", calls=3))
case("rs fused big", lambda: reduce_case(world, 8192, 4096, 1376, "fused", calls=3))
dist.destroy_process_group()
