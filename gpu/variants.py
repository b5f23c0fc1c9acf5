import sys, importlib, pathlib
sys.path.insert(0, "src"); sys.path.insert(0, "bench")
import torch, torch.distributed as dist
import weft, shapes
from dataclasses import replace
from weft.plan import *
import weft.ops.matmul_reduce as mr, weft.ops.all_gather_matmul as ag
from timing import time_interleaved
world = weft.init(); me = world.rank; dev = world.device; BF = torch.bfloat16
def say(*a):
    if me == 0: print(*a, flush=True)
F = Fused(); TWO = Fused(block_n=128, warps=4, per_sm=2, pull_stages=6, pullers=8)
src = pathlib.Path("src/weft/kernels/gemm_reduce.py").read_text()
def variant(name, *subs):
    t = src
    for a, b in subs:
        assert a in t, a
        t = t.replace(a, b)
    p = pathlib.Path(f"src/weft/kernels/v_{name}.py")
    if me == 0: p.write_text(t)
    world.exchange(0)
    importlib.invalidate_caches()
    return importlib.import_module(f"weft.kernels.v_{name}").gemm_reduce
notify = "            channel_notify(ch, channels + lm * tiles_n + tn, owner)\n"
K = {"full": mr.kernel,
     "nopull": variant("nopull", ("        ticket = take_ticket(ch, draw)\n        while", "        ticket = take_ticket(ch, draw) + 1000000\n        while")),
     "nopull nonotify": variant("nonotify", ("        ticket = take_ticket(ch, draw)\n        while", "        ticket = take_ticket(ch, draw) + 1000000\n        while"), (notify, "            pass\n")),
     "nosettle": variant("nosettle", (notify, "            tl.atomic_add(address_of(ch.peers, owner, tl.int32) + channels + lm * tiles_n + tn, 1, sem=\"relaxed\", scope=\"sys\")\n")),
     "nojoin": variant("nojoin", ("        ticket = take_ticket(ch, draw)\n        while", "        ticket = take_ticket(ch, draw)\n        if pid >= PULLERS:\n            ticket = end\n        while")),
}
for name in sys.argv[1:]:
    s = next(q for q in shapes.ALL if q.name == name)
    m, n, k = s.row(world.size)
    x = torch.randn(m, k, device=dev, dtype=BF); w = torch.randn(n, k, device=dev, dtype=BF) * 0.02; y = torch.empty(m, n, device=dev, dtype=BF)
    fns = {"gemm": lambda: torch.mm(x, w.t(), out=y), "dec": lambda: weft.matmul_reduce_scatter(x, w, world=world, plan=Decomposed((1,)*world.size))}
    for pn, plan in {"F4": replace(F, pullers=4, stages=4), "F12": replace(F, pullers=12, stages=4), "T8": TWO, "T24": replace(TWO, pullers=24)}.items():
        for kn, kern in K.items():
            def run(plan=plan, kern=kern):
                mr.kernel = kern; world.backend.launcher._prepared.clear()
                return weft.matmul_reduce_scatter(x, w, world=world, plan=plan)
            fns[f"{pn} {kn}"] = run
    t = time_interleaved(fns, mode="graph", calls=10, rounds=5)
    say(name, {q: round(v) for q, v in t.items()})
# eager host cost
for name in ("70B-128", "70B-512", "70B-1024"):
    s = next(q for q in shapes.ALL if q.name == name)
    mr.kernel = K["full"]
    m, n, k = s.column(world.size)
    x = torch.randn(m // world.size, k, device=dev, dtype=BF); w = torch.randn(n, k, device=dev, dtype=BF) * 0.02
    m2, n2, k2 = s.row(world.size)
    x2 = torch.randn(m2, k2, device=dev, dtype=BF); w2 = torch.randn(n2, k2, device=dev, dtype=BF) * 0.02
    fns = {}
    for pn, plan in {"seq": Sequential(), "T16s8": replace(TWO, pullers=16, split=8), "T24s8": replace(TWO, pullers=24, split=8), "F8s8": replace(F, pullers=8, split=8), "T16s4": replace(TWO, pullers=16, split=4)}.items():
        fns["ag " + pn] = lambda plan=plan: weft.all_gather_matmul(x, w, world=world, plan=plan)
    for pn, plan in {"seq": Sequential(), "F4": replace(F, batch=2), "T8": replace(TWO, batch=2), "T16": replace(TWO, batch=2, pullers=16)}.items():
        fns["rs " + pn] = lambda plan=plan: weft.matmul_reduce_scatter(x2, w2, world=world, plan=plan)
    for pn, plan in {"seq": Sequential(), "F8": replace(F, pullers=8), "T16": replace(TWO, pullers=16)}.items():
        fns["ar " + pn] = lambda plan=plan: weft.matmul_all_reduce(x2, w2, world=world, plan=plan)
    for mode in ("graph", "eager"):
        say(name, mode, {q: round(v) for q, v in time_interleaved(fns, mode=mode, calls=20, rounds=5).items()})
dist.destroy_process_group()
