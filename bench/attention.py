"""Attention over gathered keys and values, beside NCCL's all-gather and cuDNN's attention.

torchrun --nproc-per-node N bench/attention.py --out DIR [--shapes 32x32-16384-none ...] [--plans JSON ...] [--backward] [--torch] [--seconds S]

Appends rows to DIR/attention.jsonl. A shape is "<heads>x<kv heads>-<S>-<none|causal|zigzag>", S the rows of all ranks or "<m>*",
rows a rank; D is 128. `us` is a call in a CUDA graph, the slowest rank's median of interleaved rounds. "nccl+cudnn": two
all-gathers and one call of the library; with a causal mask weft's sequential plan, since torch has no call for a part of a
sequence. "compute alone": the library's calls that the mask needs, on keys that are there. "communication alone": the two
all-gathers. overlap = (compute alone + communication alone - us) / communication alone. limit_us = max(FLOPs at RATE, bytes of
the keys that a rank sees of others / the link's measured rate), of the rank that has most to do.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from run import capturable, commit
from timing import error_of, time_interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.op import REGISTRY
from weft.ops.attention import libraries
from weft.ops.attention.sight import Group, Piece, sight
from weft.planner.auto import tried
from weft.plans import Plan

BF = torch.bfloat16
D = 128
RATE = 680.0  # TFLOP/s of the best attention known on an H200 (cuDNN, no mask, 128K)
SHAPES = [
    "24x24-4096*-none",
    "32x32-16384-none",
    "32x32-32768-none",
    "64x8-32768-zigzag",
    "64x64-32768-none",
    "32x32-65536-none",
]
GRAPH = 20_000.0  # us of calls that one graph holds

Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    rows: int  # of a rank
    mask: str  # "none", "causal" or "zigzag"

    @staticmethod
    def of(text: str, world: int) -> Shape:
        heads, length, mask = text.split("-")
        q, kv = map(int, heads.split("x"))
        rows = int(length[:-1]) if length.endswith("*") else int(length) // world
        if mask not in ("none", "causal", "zigzag"):
            raise ValueError(f"mask {mask!r} of {text}")
        return Shape(q, kv, rows, mask)

    @property
    def causal(self) -> bool:
        return self.mask != "none"


class Attention:
    """One shape's operands on this rank, and ways to compute it."""

    def __init__(self, world: weft.World, of: Shape) -> None:
        self.world, self.of = world, of
        own = torch.Generator(world.device).manual_seed(world.rank)

        def draw(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, D, device=world.device, dtype=BF, generator=own)

        self.q, self.k, self.v = (draw(of.rows, heads) for heads in (of.heads, of.kv_heads, of.kv_heads))
        shards = (of.rows,) * world.size
        self.seen = sight(world.rank, shards, of.rows, of.causal, of.mask == "zigzag")
        if not of.causal:
            every = Group(0, tuple(Piece(r, 0, of.rows) for r in range(world.size)))
            self.seen = self.seen._replace(own=(), others=(every,))
        self.there = [(draw(g.rows, of.kv_heads), draw(g.rows, of.kv_heads)) for g in self.seen.others]
        self.library = libraries.right("forward", world.device, BF, of.heads, of.kv_heads, D)[0]
        self.layout = "zigzag" if of.mask == "zigzag" else "contiguous"

    def weft(self, plan: str | Plan) -> torch.Tensor:
        return weft.gathered_attention(
            self.q, self.k, self.v, causal=self.of.causal, layout=self.layout, world=self.world, plan=plan
        )

    def taken(self) -> Plan:
        """What "auto" came to, after a call."""
        op, operands = REGISTRY["gathered_attention"], (self.q, self.k, self.v, None)
        call = op.check(self.world, operands, (self.of.causal, None, 0, None, None, self.layout))
        return tried(op, self.world, call, operands)

    def gathered(self) -> list[torch.Tensor]:
        out = [t.new_empty(self.world.size * len(t), *t.shape[1:]) for t in (self.k, self.v)]
        for full, t in zip(out, (self.k, self.v), strict=True):
            dist.all_gather_into_tensor(full, t)
        return out

    def libraries(self) -> torch.Tensor:
        if self.of.causal:
            return self.weft("sequential")
        return self.library.forward(self.q, *self.gathered(), False, D**-0.5)[0]

    def compute(self) -> None:
        for square in self.seen.own:
            keys = self.k[square.lo : square.hi], self.v[square.lo : square.hi]
            self.library.forward(self.q, *keys, square.causal, D**-0.5)
        for group, keys in zip(self.seen.others, self.there, strict=True):
            self.library.forward(self.q[group.first :], *keys, False, D**-0.5)

    def limit(self, link: float) -> float:
        """us. link: GB/s."""
        of, pairs, received = self.of, 0.0, 0
        for square in self.seen.own:
            pairs += of.rows * (square.hi - square.lo) * (0.5 if square.causal else 1)
        for group in self.seen.others:
            pairs += (of.rows - group.first) * group.rows
            received += sum(p.hi - p.lo for p in group.pieces if p.source != self.world.rank)
        flops, nbytes = 4 * pairs * of.heads * D, received * 2 * of.kv_heads * D * 2
        return max(self.world.exchange(max(flops / RATE / 1e6, nbytes / link / 1e3)))

    def trained(self, plan: str | Plan) -> Run:
        """Forward and backward."""
        leaves, dout = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)], torch.ones_like(self.q)

        def run() -> None:
            self.q, self.k, self.v = leaves
            torch.autograd.grad(self.weft(plan), leaves, dout)
            self.q, self.k, self.v = (t.detach() for t in leaves)

        return run


@contextmanager
def context_parallel(case: Attention, rotate: str) -> Iterator[Run]:
    """torch's own, by cuDNN, with the rows split as it likes."""
    import torch.distributed.tensor.experimental._attention as cp  # torch's private module, which may be elsewhere

    of, size = case.of, case.world.size
    cp.set_rotate_method(rotate)
    cp._cp_options.enable_load_balance = of.causal
    whole = [
        torch.randn(1, heads, of.rows * size, D, device=case.world.device, dtype=BF)
        for heads in (of.heads, of.kv_heads, of.kv_heads)
    ]
    mesh = dist.init_device_mesh("cuda", (size,))
    with (
        cp.context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]),
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        torch.no_grad(),
    ):
        yield lambda: F.scaled_dot_product_attention(*whole, is_causal=of.causal, enable_gqa=of.heads != of.kv_heads)


def peers_of(world: weft.World, case: Attention, calls: int) -> dict[tuple[str, str], float]:
    """us by method and mode; not interleaved with the others, since torch changes what it calls while it is on."""
    found = {}
    for rotate in ("allgather", "alltoall"):
        method = f"torch context_parallel, {rotate}"
        try:
            with context_parallel(case, rotate) as fn:
                fn()
                mode = "graph" if all(world.exchange(capturable(fn))) else "eager"
                found[method, mode] = time_interleaved({method: fn}, mode=mode, calls=calls, rounds=5)[method]
        except (ImportError, AttributeError, RuntimeError, ValueError, TypeError) as e:  # alike on all ranks
            print(f"{method}: {e}"[:300], flush=True)
    return found


def once(fn: Run) -> float:
    """us of one call, the second."""
    took = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        took = (time.perf_counter() - start) * 1e6
    return took


def measure(world: weft.World, text: str, a: argparse.Namespace, link: float) -> list[dict]:
    of = Shape.of(text, world.size)
    case = Attention(world, of)
    ways: dict[str, str | Plan] = {"weft": "auto"} | {str(p): p for p in a.plans}
    fns: dict[str, Run] = {
        "nccl+cudnn": case.libraries,
        "compute alone": case.compute,
        "communication alone": case.gathered,
    }
    fns |= {way: lambda plan=plan: case.weft(plan) for way, plan in ways.items()}
    error = error_of(case.weft("auto"), case.libraries())
    with torch.no_grad():
        calls = max(1, min(10, int(GRAPH / max(world.exchange(once(case.libraries))))))
        times = time_interleaved(fns, mode="graph", calls=calls, rounds=5)
    compute, communication = times["compute alone"], times["communication alone"]
    mask = "none" if not of.causal else "causal" if of.mask == "zigzag" else "causal contiguous"
    total = of.rows * world.size
    shape = dict(op="gathered_attention", name=f"{of.heads}x{of.kv_heads}-{total}-{mask}", M=total, N=of.heads, K=D)
    fixed = dict(
        world=world.size,
        limit_us=round(case.limit(link), 1),
        error=round(error, 5),
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        link_gbs=round(link, 1),
        library=case.library.name,
    )
    rows = []
    for way, us in times.items():
        alone = way.endswith(" alone")
        hidden = None if alone else round((compute + communication - us) / communication, 3)
        chosen = str(case.taken()) if way == "weft" else way if way in ways else None
        rows.append(dict(shape, mode="graph", method=way, us=round(us, 1), plan=chosen, overlap=hidden, **fixed))
    if a.torch:
        for (way, mode), us in peers_of(world, case, calls).items():
            rows.append(dict(shape, mode=mode, method=way, us=round(us, 1), **fixed))
    if a.backward:
        both = {way: case.trained(plan) for way, plan in (("sequential", "sequential"), ("weft", "auto"))}
        for way, us in time_interleaved(both, mode="eager", calls=3, rounds=5).items():
            rows.append(dict(shape, mode="eager", method=f"{way}, forward and backward", us=round(us, 1), **fixed))
    return rows


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--shapes", nargs="*", default=SHAPES)
    p.add_argument("--plans", nargs="*", default=[], help="plans as JSON, timed beside auto")
    p.add_argument("--backward", action="store_true", help="forward and backward too, eager")
    p.add_argument("--torch", action="store_true", help="torch's context_parallel too, in a run of its own")
    p.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this many")
    a = p.parse_args()
    a.plans = [Plan.from_json(plan) for plan in a.plans]
    a.out.mkdir(parents=True, exist_ok=True)
    start, world = time.time(), weft.init()
    link = peers.link_rate(world)
    for text in a.shapes:
        if max(world.exchange(time.time() - start)) > a.seconds:
            break
        rows = measure(world, text, a, link)
        torch.cuda.empty_cache()
        if world.rank == 0:
            with open(a.out / "attention.jsonl", "a") as f:
                f.writelines(json.dumps(row) + "\n" for row in rows)
            said = " | ".join(
                f"{r['method']} {r['us']:.0f}" + (f" ({r['overlap']})" if r.get("overlap") else "") for r in rows
            )
            print(f"{time.time() - start:.0f}s {rows[0]['name']} x{world.size} limit {rows[0]['limit_us']} "
                  f"error {rows[0]['error']} plan {rows[3]['plan']}: {said}", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
