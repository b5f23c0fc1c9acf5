import sys, time, cProfile, pstats, threading
sys.path.insert(0, "src"); sys.path.insert(0, "tests")
import torch, weft
from cases import *
import weft.backends.launcher as L
orig = L._prepare
def spy(kernel, compiled, grid, values):
    try:
        run = compiled.run
        print("scratch", run.global_scratch_size, run.profile_scratch_size, "launch", run.launch.__name__, "metas", getattr(compiled.metadata, "tensordesc_meta", "none") is not None, flush=True)
    except Exception as e: print("spy", repr(e))
    r = orig(kernel, compiled, grid, values)
    print(kernel.fn.__name__, "prepared" if r else "NOT prepared", flush=True)
    return r
L._prepare = spy
def main(w):
    W = w.size
    e = [all_gather_case(w, (256,)*W, 512, 256, "fused", calls=4), reduce_case(w, 256*W, 512, 256, "fused", calls=4), reduce_case(w, 256*W, 512, 256, "fused", calls=4, everywhere=True), all_gather_case(w, balanced_rows(1000, W), 520, 264, "fused", calls=4)]
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16); wt = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    for _ in range(5): weft.all_gather_matmul(x, wt, world=w, plan="fused")
    w.synchronize(); w.exchange(0)
    t = time.perf_counter()
    for _ in range(200): y = weft.all_gather_matmul(x, wt, world=w, plan="fused")
    dt = (time.perf_counter() - t) / 200 * 1e6
    w.synchronize(); w.exchange(0)
    if w.rank == 0: pr = cProfile.Profile(); pr.enable()
    for _ in range(200): y = weft.all_gather_matmul(x, wt, world=w, plan="fused")
    if w.rank == 0:
        pr.disable(); pstats.Stats(pr).sort_stats("tottime").print_stats(18)
    w.synchronize(); w.exchange(0)
    return e, round(dt), len(w.backend.launcher._prepared)
print(weft.spmd(main, 2, backend="loopback"))
