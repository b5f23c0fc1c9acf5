"""Per-program pull/push rates by transport, and the persistent GEMM alone by programs."""
import os, sys, json
sys.path.insert(0, "src"); sys.path.insert(0, "bench")
import torch, torch.distributed as dist, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TD
import weft
from weft.kernels.gemm import *
from weft.lang.channel import address_of
from timing import time_interleaved
world = weft.init(); W = world.size; me = world.rank; dev = world.device
def say(*a):
    if me == 0: print(*a, flush=True)

@triton.jit(do_not_specialize=["me"])
def tma_pull(src, dst, bases, me, rows, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, ST: tl.constexpr, PUSH: tl.constexpr, TSTORE: tl.constexpr, GR: tl.constexpr, dptr):
    # rows: flat rows of 128 elements of one shard; bases[r]: granules to rank r's buffer
    pid = tl.program_id(0)
    for j in range(1, W):
        if PUSH:
            d = (me + W - j) % W
            s0 = tl.load(bases + me); d0 = tl.load(bases + d); off = me * rows
        else:
            s = (me + j) % W
            s0 = tl.load(bases + s); d0 = tl.load(bases + me); off = s * rows
        for q in tl.range(pid * R, rows, P * R, num_stages=ST):
            v = src.load([s0, off + q, 0])
            if TSTORE:
                dst.store([d0, off + q, 0], v)
            else:
                tl.store(dptr + d0.to(tl.int64) * GR + (off + q).to(tl.int64) * 128 + tl.arange(0, R)[:, None] * 128 + tl.arange(0, 128)[None, :], tl.reshape(v, (R, 128)))

@triton.jit(do_not_specialize=["me"])
def ptr_pull(addr, me, n, W: tl.constexpr, P: tl.constexpr, B: tl.constexpr, ST: tl.constexpr):
    pid = tl.program_id(0); o = tl.arange(0, B)
    for j in range(1, W):
        s = (me + j) % W
        src = address_of(addr, s, tl.bfloat16) + s * n; dst = address_of(addr, me, tl.bfloat16) + s * n
        for q in tl.range(pid * B, n, P * B, num_stages=ST):
            tl.store(dst + q + o, tl.load(src + q + o))

@triton.jit
def gemm(a, b, c, M, N, K, PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, FLAT: tl.constexpr):
    tm_n = tl.cdiv(M, BM); tn_n = tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), tm_n * tn_n, PROGRAMS, flatten=FLAT):
        tm, tn = grouped_tile(t, tm_n, tn_n, GROUP_M)
        acc = gemm_tile(a, b, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(c, acc, c, tm * BM, tn * BN, N, BM, BN, False, False)

def transports():
    n = 64 * 2**20 // W // 2   # elements of a shard
    sym = world.symmetric((W * n,), torch.bfloat16)
    addrs = [p.data_ptr() for p in sym.peers]; base = min(addrs); lo = sym.peers[addrs.index(base)]
    say("span GB", (max(addrs) - base) / 2**30)
    GR = 2**21
    say([hex(a) for a in addrs])
    bases = torch.tensor([(a - base) // GR for a in addrs], dtype=torch.int32, device=dev)
    fns = {}
    big = max(addrs) - base + W * n * 2
    check = {}
    for P in (2, 4, 8, 16):
        for push in (0, 1):
            for R, st, ts in ((128, 5, 1), (128, 6, 0), (64, 8, 0)):
                d = TD(lo, [2**31 - 1, 2**22, 128], [GR // 2, 128, 1], [1, R, 128])
                fns[f"{'push' if push else 'pull'} tma P{P} R{R} st{st} tstore{ts}"] = lambda P=P, push=push, R=R, st=st, ts=ts, d=d: tma_pull[(P,)](d, d, bases, me, n // 128, W=W, P=P, R=R, ST=st, PUSH=push, TSTORE=ts, GR=GR // 2, dptr=lo, num_warps=4)
        for B, st in ((16384, 6), (16384, 3), (8192, 1)):
            fns[f"pull ptr P{P} B{B} st{st}"] = lambda P=P, B=B, st=st: ptr_pull[(P,)](sym.addresses, me, n, W=W, P=P, B=B, ST=st, num_warps=8)
    ok = {}
    for k, f in list(fns.items()):
        try:
            sym.local.zero_(); sym.local[me * n:(me + 1) * n] = me + 1; world.synchronize(); world.exchange(0)
            f(); world.synchronize(); world.exchange(0)
            want = torch.arange(1, W + 1, device=dev, dtype=torch.bfloat16).repeat_interleave(n)
            good = torch.equal(sym.local, want)
        except Exception as e: good = repr(e)[-200:]
        if good is not True: say(k, "BAD", good); del fns[k]
    t = time_interleaved(fns, mode="graph", calls=5, rounds=3)
    for k, v in t.items(): say(f"  {k}: {v:.0f} us {(W-1)*n*2/v/1e3:.0f} GB/s")

def gemms():
    shapes = [(8192, 2752, 4096), (8192, 3584, 4096), (8192, 9216, 4608), (8192, 7168, 8192), (8192, 4096, 1376), (8192, 4096, 2752), (8192, 4608, 4608), (8192, 8192, 3584), (2048, 7168, 8192), (2048, 8192, 3584)]
    for M, N, K in shapes:
        a = torch.randn(M, K, device=dev, dtype=torch.bfloat16); b = torch.randn(N, K, device=dev, dtype=torch.bfloat16); c = torch.empty(M, N, device=dev, dtype=torch.bfloat16)
        fns = {"cublas": lambda: torch.mm(a, b.t(), out=c)}
        cfgs = [(128, 256, 64, 8, 3, 132, 8, True), (128, 256, 64, 8, 3, 128, 8, True), (128, 256, 64, 8, 4, 128, 8, True), (128, 256, 64, 8, 4, 128, 16, True)]
        cfgs += [(128, 128, 64, 4, 3, p, 8, f) for p in (264, 256, 248) for f in (True, False)] + [(128, 128, 64, 4, 3, 264, 16, True), (128, 128, 64, 4, 2, 264, 8, True), (64, 256, 64, 4, 2, 264, 16, True), (128, 128, 32, 4, 5, 264, 8, True)]
        for bm, bn, bk, w, st, p, g, fl in cfgs:
            ad, bd, cd = TD(a, [M, K], [K, 1], [bm, bk]), TD(b, [N, K], [K, 1], [bn, bk]), TD(c, [M, N], [N, 1], [bm, bn // 2])
            f = lambda ad=ad, bd=bd, cd=cd, p=p, bm=bm, bn=bn, bk=bk, g=g, fl=fl, w=w, st=st: gemm[(p,)](ad, bd, cd, M, N, K, PROGRAMS=p, BM=bm, BN=bn, BK=bk, GROUP_M=g, FLAT=fl, num_warps=w, num_stages=st)
            try: f(); torch.cuda.synchronize(); fns[f"{bm}x{bn}x{bk} w{w} s{st} p{p} g{g} f{int(fl)}"] = f
            except Exception as e: say(repr(e)[-150:])
        t = time_interleaved(fns, mode="graph", calls=10, rounds=5)
        say(M, N, K, f"cublas {t['cublas']:.1f} ({2*M*N*K/t['cublas']/1e6:.0f} TF) | " + " | ".join(f"{k} {v:.1f}" for k, v in t.items() if k != "cublas"))
for s in sys.argv[1:]: globals()[s]()
dist.destroy_process_group()
