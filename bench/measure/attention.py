"""Attention over gathered keys and values, compared with NCCL's all-gather followed by cuDNN's attention.

torchrun --nproc-per-node N -m bench.measure.attention --out DIR [--shapes 32x32-16384-none ...] [--plans JSON ...] [--backward] [--torch]
         [--decoder 32768 ...] [--seconds S]

The program appends rows to DIR/attention.jsonl. A shape is "<heads>x<kv heads>-<S>-<none|causal|zigzag>", where S counts the rows of all
ranks, or is "<m>*" for m rows on each rank; D is 128. `us` is the time of a call in a CUDA graph: the slowest rank's
median of interleaved rounds. The method "nccl+cudnn" makes two all-gathers and one call of cuDNN; with a causal mask it
is weft's sequential plan, because torch cannot compute a part of a sequence. "compute alone" makes the library calls
that the mask requires, on keys that are already local. "communication alone" makes the two all-gathers. overlap =
(compute alone + communication alone - us) / communication alone.

--decoder times the context-parallel prefill of prompts with these numbers of tokens (examples/context_parallel.py)
through LAYERS layers of Llama-3.1-8B's sizes: `op` "context_parallel_prefill", `M` tokens, `N` layers, `K` hidden size;
"nccl+cudnn" is the sequential plan. --torch adds torch's context_parallel.
"""

from __future__ import annotations

import argparse
import runpy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from bench.common.program import Program, options
from bench.common.timing import error_of, time_interleaved
from bench.measure.run import capturable
from weft.op import REGISTRY
from weft.ops.attention import libraries
from weft.ops.attention.key_ranges import KeyGroup, KeyRange, causal_key_ranges
from weft.plans import Plan

BF = torch.bfloat16
D = 128
LAYERS = 4
SHAPES = [
    "24x24-4096*-none",
    "32x32-16384-none",
    "32x32-32768-none",
    "64x8-32768-zigzag",
    "64x8-32768-causal",
    "64x64-32768-none",
    "32x32-65536-none",
]
GRAPH = 20_000.0  # the us of the calls in one graph
ROUNDS = 9  # long calls differ by 1% from one round to the next

Run = Callable[[], object]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k and v of this rank


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    rows: int  # the number of rows of a rank
    mask: str  # "none", "causal" or "zigzag"

    @staticmethod
    def parsed(text: str, world: int) -> Shape:
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
    """One shape's operands on this rank, and the ways to compute it."""

    def __init__(self, world: weft.World, shape: Shape) -> None:
        self.world, self.shape = world, shape
        generator = torch.Generator(world.device).manual_seed(world.rank)

        def draw(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, D, device=world.device, dtype=BF, generator=generator)

        self.q, self.k, self.v = (draw(shape.rows, heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
        shards = (shape.rows,) * world.size
        self.key_ranges = causal_key_ranges(world.rank, shards, shape.rows, shape.causal, shape.mask == "zigzag")
        if not shape.causal:
            every = KeyGroup(0, tuple(KeyRange(r, 0, shape.rows) for r in range(world.size)))
            self.key_ranges = self.key_ranges._replace(local=(), remote=(every,))
        self.remote_keys = [
            (draw(g.rows, shape.kv_heads), draw(g.rows, shape.kv_heads)) for g in self.key_ranges.remote
        ]
        self.library = libraries.right("forward", world.device, BF, shape.heads, shape.kv_heads, D)[0]
        self.layout = "zigzag" if shape.mask == "zigzag" else "contiguous"

    def weft(self, plan: str | Plan) -> torch.Tensor:
        return weft.gathered_attention(
            self.q, self.k, self.v, causal=self.shape.causal, layout=self.layout, world=self.world, plan=plan
        )

    def taken(self) -> Plan:
        """Return the plan that "auto" chose, after a call."""
        op, operands = REGISTRY["gathered_attention"], (self.q, self.k, self.v, None)
        call = op.check(self.world, operands, (self.shape.causal, None, 0, None, None, self.layout))
        return op.choose(self.world, call, "auto", True)

    def gathered(self) -> list[torch.Tensor]:
        out = [t.new_empty(self.world.size * len(t), *t.shape[1:]) for t in (self.k, self.v)]
        for full, t in zip(out, (self.k, self.v), strict=True):
            dist.all_gather_into_tensor(full, t)
        return out

    def libraries(self) -> torch.Tensor:
        if self.shape.causal:
            return self.weft("sequential")
        return self.library.forward(self.q, *self.gathered(), False, None, D**-0.5)[0]

    def compute(self) -> None:
        for block in self.key_ranges.local:
            keys = self.k[block.lo : block.hi], self.v[block.lo : block.hi]
            self.library.forward(self.q, *keys, block.causal, None, D**-0.5)
        for group, keys in zip(self.key_ranges.remote, self.remote_keys, strict=True):
            self.library.forward(self.q[group.first_query :], *keys, False, None, D**-0.5)

    def trained(self, plan: str | Plan) -> Run:
        """Return a function that runs the forward and the backward pass."""
        leaves, dout = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)], torch.ones_like(self.q)

        def run() -> None:
            self.q, self.k, self.v = leaves
            torch.autograd.grad(self.weft(plan), leaves, dout)
            self.q, self.k, self.v = (t.detach() for t in leaves)

        return run


@contextmanager
def context_parallel(world: weft.World, rows: int, causal: bool, rotate: str) -> Iterator[Attend]:
    """Yield torch's own context parallelism over cuDNN for `rows` rows of every rank. With a mask torch needs the
    sequence in the zigzag layout."""
    import torch.distributed.tensor.experimental._attention as cp  # torch's private module, which another version may lack

    cp.set_rotate_method(rotate)
    cp._cp_options.enable_load_balance = causal
    length = torch.empty(
        1, 1, rows * world.size, 1, device=world.device
    )  # torch reads only the length of the split buffer

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)

    with (
        cp.context_parallel(dist.init_device_mesh("cuda", (world.size,)), buffers=[length], buffer_seq_dims=[2]),
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
    ):
        yield attention


def timed(fns: dict[str, Run], world: weft.World, calls: int) -> dict[tuple[str, str], float]:
    """Return the us of each function by name and mode, in CUDA graphs if all functions can be captured."""
    for fn in fns.values():
        fn()  # "auto" times plans now, because a capture cannot
    mode = "graph" if all(world.exchange(all(map(capturable, fns.values())))) else "eager"
    return {(name, mode): us for name, us in time_interleaved(fns, mode=mode, calls=calls, rounds=5).items()}


def peers_of(
    world: weft.World, rows: int, causal: bool, calls: int, use: Callable[[Attend], Run]
) -> dict[tuple[str, str], float]:
    """Return the us of use(torch's attention) by method and mode. These calls are not interleaved with the others,
    because torch replaces its attention while context parallelism is on."""
    times = {}
    for rotate in ("allgather", "alltoall"):
        method = f"torch context_parallel, {rotate}"
        try:
            with context_parallel(world, rows, causal, rotate) as attention:
                times |= timed({method: use(attention)}, world, calls)
        except (ImportError, AttributeError, RuntimeError, ValueError, TypeError) as e:  # on all ranks
            print(f"{method}: {e}"[:300], flush=True)
    return times


def peer_attention(case: Attention, backward: bool) -> Callable[[Attend], Run]:
    def use(attention: Attend) -> Run:
        q, k, v = (t.detach().requires_grad_(backward) for t in (case.q, case.k, case.v))

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return attention(q, k, v)

        return (lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), torch.ones_like(q))) if backward else forward

    return use


def once(fn: Run) -> float:
    """Return the us of one call, after one call that is not timed."""
    took = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        took = (time.perf_counter() - start) * 1e6
    return took


def measure(world: weft.World, text: str, a: argparse.Namespace) -> list[dict]:
    size = Shape.parsed(text, world.size)
    case = Attention(world, size)
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
        times = time_interleaved(fns, mode="graph", calls=calls, rounds=ROUNDS)
    compute, communication = times["compute alone"], times["communication alone"]
    mask = "none" if not size.causal else "causal" if size.mask == "zigzag" else "causal contiguous"
    total = size.rows * world.size
    shape = dict(
        op="gathered_attention", name=f"{size.heads}x{size.kv_heads}-{total}-{mask}", M=total, N=size.heads, K=D
    )
    fixed = dict(error=round(error, 5), library=case.library.name)
    rows = []
    for way, us in times.items():
        alone = way.endswith(" alone")
        hidden = None if alone else round((compute + communication - us) / communication, 3)
        chosen = str(case.taken()) if way == "weft" else way if way in ways else None
        rows.append(dict(shape, mode="graph", method=way, us=round(us, 1), plan=chosen, overlap=hidden, **fixed))
    for backward in (False, True)[: a.torch * (1 + a.backward)]:
        for (way, mode), us in peers_of(world, size.rows, size.causal, calls, peer_attention(case, backward)).items():
            method = f"{way}, forward and backward" if backward else way
            rows.append(dict(shape, mode=mode, method=method, us=round(us, 1), **fixed))
    if a.backward:
        runs = {way: case.trained(plan) for way, plan in (("sequential", "sequential"), ("weft", "auto"))}
        for (way, mode), us in timed(runs, world, calls).items():
            rows.append(dict(shape, mode=mode, method=f"{way}, forward and backward", us=round(us, 1), **fixed))
    return rows


def decoded(world: weft.World, length: int, a: argparse.Namespace) -> list[dict]:
    """Return the rows of a whole prefill."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/context_parallel.py"))
    sizes = example["LLAMA_8B"] | dict(num_hidden_layers=LAYERS)
    model, rows = example["whole_model"](sizes, world), length // world.size
    ids = torch.zeros(rows, dtype=torch.int64, device=world.device)
    positions, rotary = weft.zigzag_positions(length, world), model.config.rotary(length, world.device)

    def use(attention: Attend) -> Run:
        return lambda: example["prefill"](model, ids, positions, rotary, attention)

    plans = {"nccl+cudnn": "sequential", "weft": "auto"}
    times = timed({way: use(example["zigzag_attention"](world, plan)) for way, plan in plans.items()}, world, 1)
    if a.torch:
        times |= peers_of(world, rows, True, 1, use)
    return [
        dict(op="context_parallel_prefill", name=f"Llama-3.1-8B, {LAYERS} layers, {length}", M=length, N=LAYERS,
             K=sizes["hidden_size"], mode=mode, method=way, us=round(us, 1))
        for (way, mode), us in times.items()
    ]  # fmt: skip


def main() -> None:
    a = options(shapes=SHAPES, plans=[], backward=False, decoder=[], torch=False)
    a.plans = [Plan.from_json(plan) for plan in a.plans]
    run = Program(a, "attention.jsonl")
    for text in run.cases({f"attention {shape}": shape for shape in a.shapes}):
        rows = run.keep(measure(run.world, text, a))
        figures = " | ".join(f"{r['method']} {r['us']:.0f} ({r.get('overlap')})" for r in rows)
        run.log(f"{rows[0]['name']} error {rows[0]['error']} plan {rows[3]['plan']}: {figures}")
    for length in run.cases({f"prefill {tokens}": int(tokens) for tokens in a.decoder}):
        rows = run.keep(decoded(run.world, length, a))
        run.log(rows[0]["name"], {row["method"]: row["us"] for row in rows})
    run.end()


if __name__ == "__main__":
    main()
