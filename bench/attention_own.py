"""An attention kernel of our own that waits for keys inside its loop, beside cuDNN's, on one GPU, where all keys are there.

torchrun --nproc-per-node 1 bench/attention_own.py --out DIR [--seconds S]

One persistent launch: a program takes tiles of queries in turn; of each it goes over the keys' segments, behind a wait for each,
and keeps the maximum and the sum of the softmax on the way, so that nothing is merged (TileLink's published form). Appends rows to
DIR/attention-own.jsonl: us by method of one interleaved run, CUDA graphs; queries m are half of the keys S, as on two ranks, or
all of them with a causal mask. A form that is wrong, or does not compile, is printed and left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from run import commit
from timing import RIGHT, error_of, time_interleaved

import weft
from weft.lang.intrinsics import wait_until
from weft.ops.attention.libraries import CUDNN
from weft.transport.memory import descriptor

BF, D = torch.bfloat16, 128
SHAPES = [(32, 32, 16384, False), (32, 32, 32768, False), (64, 8, 16384, False), (32, 32, 16384, True)]
GRAPH = 20_000.0  # us of calls that one graph holds
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Form:
    """ahead: the next keys' scores are under way during a softmax."""

    bm: int
    bn: int
    warps: int
    stages: int
    ahead: bool
    segments: int = 2

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn} w{self.warps} s{self.stages}{' ahead' * self.ahead}, {self.segments} segments"


FORMS = [
    Form(128, 128, 8, 2, False),
    Form(128, 64, 4, 2, False),
    Form(128, 64, 8, 2, True),
    Form(128, 128, 8, 3, False),
    Form(128, 64, 8, 4, False),
    Form(128, 128, 8, 2, False, 8),
]


@weft.jit
def softened(s, top, total, acc, scale):
    """p of scores s, with the top, the sum and the results so far put to the new top. In powers of 2."""
    higher = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - higher[:, None])
    less = tl.exp2(top - higher)
    return p, higher, total * less + tl.sum(p, 1), acc * less[:, None]


@weft.jit
def square(q, k_desc, v_desc, lo, hi, col, row, top, total, acc, scale, BM: tl.constexpr, BN: tl.constexpr):
    """Keys lo to hi, of which query i of these sees those up to row + i."""
    i, j = tl.arange(0, BM), tl.arange(0, BN)
    for at in tl.range(lo, hi, BN, num_stages=1):
        s = tl.dot(q, k_desc.load([at, col]).T)
        s = tl.where((row + i)[:, None] >= (at + j)[None, :], s, float("-inf"))
        p, top, total, acc = softened(s, top, total, acc, scale)
        acc = tl.dot(p.to(v_desc.dtype), v_desc.load([at, col]), acc)
    return top, total, acc


@weft.jit(do_not_specialize=("m", "n", "heads", "each"))
def attention(
    q_desc, k_desc, v_desc, out, lse, flags, guard, m, n, heads, each, scale, CAUSAL: tl.constexpr, AHEAD: tl.constexpr,
    SEGMENTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """q, out [m, heads * BD], k, v [n, heads / each * BD], lse [heads, m]; n in SEGMENTS, each behind its flag."""
    blocks = m // BM
    for t in tl.range(tl.program_id(0), blocks * heads, tl.num_programs(0)):
        head = t // blocks
        row = (blocks - 1 - t % blocks) * BM  # the longest first
        col = head // each * BD
        q = q_desc.load([row, head * BD])
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, BD), tl.float32)
        seen = row // BN * BN if CAUSAL else n
        for segment in tl.range(SEGMENTS):
            wait_until(flags + segment, 1, guard, segment, -1)
            lo, hi = segment * (n // SEGMENTS), min((segment + 1) * (n // SEGMENTS), seen)
            if AHEAD:
                if lo < hi:
                    s = tl.dot(q, k_desc.load([lo, col]).T)
                    p, top, total, acc = softened(s, top, total, acc, scale)
                    s = tl.dot(q, k_desc.load([lo + BN, col]).T)
                    for at in tl.range(lo, hi - 2 * BN, 2 * BN):  # twice, so that no register of scores under way is copied
                        acc = tl.dot(p.to(v_desc.dtype), v_desc.load([at, col]), acc)
                        after = tl.dot(q, k_desc.load([at + 2 * BN, col]).T)
                        p, top, total, acc = softened(s, top, total, acc, scale)
                        acc = tl.dot(p.to(v_desc.dtype), v_desc.load([at + BN, col]), acc)
                        s = tl.dot(q, k_desc.load([at + 3 * BN, col]).T)
                        p, top, total, acc = softened(after, top, total, acc, scale)
                    acc = tl.dot(p.to(v_desc.dtype), v_desc.load([hi - 2 * BN, col]), acc)
                    p, top, total, acc = softened(s, top, total, acc, scale)
                    acc = tl.dot(p.to(v_desc.dtype), v_desc.load([hi - BN, col]), acc)
            else:
                for at in tl.range(lo, hi, BN):
                    s = tl.dot(q, k_desc.load([at, col]).T)
                    p, top, total, acc = softened(s, top, total, acc, scale)
                    acc = tl.dot(p.to(v_desc.dtype), v_desc.load([at, col]), acc)
        if CAUSAL:
            top, total, acc = square(q, k_desc, v_desc, seen, row + BM, col, row, top, total, acc, scale, BM, BN)
        at = (row + tl.arange(0, BM)).to(tl.int64)[:, None] * (heads * BD) + head * BD + tl.arange(0, BD)[None, :]
        tl.store(out + at, (acc / total[:, None]).to(v_desc.dtype))
        tl.store(lse + head.to(tl.int64) * m + row + tl.arange(0, BM), (top + tl.log2(total)) * 0.6931471805599453)


class Case:
    def __init__(self, device: torch.device, heads: int, kv_heads: int, n: int, causal: bool, sms: int) -> None:
        def draw(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, D, device=device, dtype=BF)

        self.heads, self.kv_heads, self.causal, self.sms = heads, kv_heads, causal, sms
        self.q, self.k, self.v = draw(n if causal else n // 2, heads), draw(n, kv_heads), draw(n, kv_heads)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(heads, len(self.q), device=device)
        self.flags = torch.ones(64, dtype=torch.int32, device=device)

    def library(self) -> tuple[torch.Tensor, torch.Tensor]:
        return CUDNN.forward(self.q, self.k, self.v, self.causal, D**-0.5)

    def launch(self, form: Form, guard: torch.Tensor) -> tuple[dict, dict, int]:
        """Arguments, options and programs."""
        m, n = len(self.q), len(self.k)
        args = dict(
            q_desc=descriptor(self.q, m, self.heads * D, (form.bm, D)),
            k_desc=descriptor(self.k, n, self.kv_heads * D, (form.bn, D)),
            v_desc=descriptor(self.v, n, self.kv_heads * D, (form.bn, D)),
            out=self.out,
            lse=self.lse, flags=self.flags, guard=guard, m=m, n=n, scale=D**-0.5 * LOG2E,
            heads=self.heads, each=self.heads // self.kv_heads, CAUSAL=self.causal, AHEAD=form.ahead,
            SEGMENTS=form.segments, BM=form.bm, BN=form.bn, BD=D,
        )  # fmt: skip
        per_sm = 2 if form.warps == 4 else 1
        return args, dict(num_warps=form.warps, num_stages=form.stages), min(self.sms * per_sm, m // form.bm * self.heads)

    def own(self, form: Form, guard: torch.Tensor) -> Callable[[], object]:
        args, options, programs = self.launch(form, guard)
        return lambda: attention[(programs,)](**args, **options)


def compiled(form: Form, causal: bool) -> str:
    """Compile it, in a process of its own; what went wrong, if something did."""
    try:
        device = torch.device("cuda")
        case = Case(device, 1, 1, 4096, causal, 1)
        guard = torch.tensor([10**9, 0, 0, 0], device=device)
        case.own(form, guard)()
        torch.cuda.synchronize()
        error = max(error_of(a, b) for a, b in zip((case.out, case.lse), case.library(), strict=True))
        return "" if error < RIGHT else f"off by {error:.2g}"
    except Exception as e:
        return repr(e)[:300]


def measure(world: weft.World, forms: list[Form], shape: tuple[int, int, int, bool]) -> dict:
    heads, kv_heads, n, causal = shape
    case = Case(world.device, *shape, world.sm_count)
    guard = torch.tensor([10**9, 0, 0, 0], device=world.device)
    fns: dict[str, Callable[[], object]] = {"cudnn": case.library}
    fns |= {str(form): case.own(form, guard) for form in forms}
    want, errors = case.library(), {}
    for form in forms:
        case.out.zero_()
        fns[str(form)]()
        errors[str(form)] = max(error_of(a, b) for a, b in zip((case.out, case.lse), want, strict=True))
    right = {name: fn for name, fn in fns.items() if errors.get(name, 0.0) < RIGHT}
    for name in fns.keys() - right.keys():
        print("wrong:", name, errors[name], flush=True)
    flops = 4 * len(case.q) * n * heads * D / (2 if causal else 1)
    us = time_interleaved(right, mode="graph", calls=max(1, int(GRAPH / (flops / 500e6))), rounds=5)
    return dict(
        what="one persistent launch that waits for keys inside its loop, all keys there",
        name=f"{heads}x{kv_heads}-{n}-{'causal' if causal else 'none'}",
        M=len(case.q), S=n, N=heads, K=D,
        us={name: round(t, 1) for name, t in us.items()},
        tflops={name: round(flops / t / 1e6, 1) for name, t in us.items()},
        error={name: round(e, 5) for name, e in errors.items()},
        gpu=torch.cuda.get_device_properties(0).name, triton=triton.__version__, commit=commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this many")
    p.add_argument("--processes", type=int, default=12)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    start, good = time.time(), {False: [], True: []}
    todo = [(form, causal) for causal in good for form in FORMS]
    with ProcessPoolExecutor(a.processes, multiprocessing.get_context("spawn")) as pool:
        for (form, causal), said in zip(todo, pool.map(compiled, *zip(*todo, strict=True)), strict=True):
            good[causal] += [] if said else [form]
            if said:
                print(form, causal, said, flush=True)
    print(f"{time.time() - start:.0f}s: compiled", flush=True)
    world = weft.init()
    for shape in SHAPES:
        if time.time() - start > a.seconds:
            break
        row = measure(world, good[shape[3]], shape)
        with open(a.out / "attention-own.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")
        print(f"{time.time() - start:.0f}s", row["name"], row["us"], row["tflops"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
