"""The MoE layer with the sizes of real models, compared with NCCL's all-to-all and torch's grouped GEMM.

torchrun --nproc-per-node N -m bench.measure.moe --out DIR [--models ...] [--tokens ...] [--zipf 1.0] [--eager] [--seconds S]
torchrun --nproc-per-node N -m bench.measure.moe --out DIR --one-launch [--seconds 100]
torchrun --nproc-per-node N -m bench.measure.moe --out DIR --stamps [--models ...] [--tokens ...]

The program appends rows to DIR/moe.jsonl or, with --stamps, rows with the shares of a fused call's tasks to
DIR/moe_stamps.jsonl. `us` is the time of a layer with its router in a CUDA graph: the slowest rank's median of
interleaved rounds; the routing changes from call to call within the graph. --one-launch times the plans of one launch
and of few tokens.
"library" is captured with split sizes known in advance and without the router, the fastest form of the libraries; "library, eager"
(--eager) reads the sizes back and has the router, as users write it. "vllm" and "quack", if they are installed, are their gated experts
between NCCL's all-gather and reduce-scatter (bench/common/gathered_experts.py). limit_us = max(FLOPs at RATE, bytes of weights touched /
MEMORY, bytes that dispatch and combine move each way / the link's measured rate). Of the same run: gemm_us, both grouped GEMMs alone, the
faster of torch's and weft's; tables_us, the router and the tables alone; alone_us, the limit of all overlap: max(gemm_us, weights,
bytes) + tables_us.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
from bench.common import gathered_experts
from bench.common.gathered_experts import Experts, layer_by
from bench.common.program import Program, options
from bench.common.timing import capture, error_of, time_interleaved
from bench.measure import moe_alone
from weft import moe
from weft.ops.moe.expert_parallel import fused
from weft.plans import NARROW, FusedMoe, GemmTile, LowLatency, Plan

BF = torch.bfloat16
RATE = 700.0  # TFLOP/s of the best grouped GEMM known on an H200 (docs/moe.md)
MEMORY = 4.3  # TB/s of an H200
Way = Callable[[], torch.Tensor]
ROUTINGS = 4  # the number of routings that the calls in one graph use


@dataclass(frozen=True)
class Model:
    hidden: int
    inner: int
    experts: int
    k: int
    activation: str = "swiglu"


MODELS = {
    "Qwen3-30B": Model(2048, 768, 128, 8),
    "Mixtral-8x7B": Model(4096, 14336, 8, 2),
    "GPT-OSS-120B": Model(2880, 2880, 128, 4),
    "Qwen3-235B": Model(4096, 1536, 128, 8),
    "FlashMoE": Model(2048, 2048, 32, 2),
}
# FlashInfer's published size of its expert-parallel layers on 4 Hopper GPUs, without the inner size, which is assumed to be 2048.
PUBLISHED = {"FlashInfer-EP4": Model(4096, 2048, 32, 6)}
# FlashMoE's experts in its paper: 8 to 128 of them, with GELU and two matrices.
UNGATED = {f"FlashMoE-ungated-E{e}": Model(2048, 2048, e, 2, "gelu") for e in (8, 16, 32, 64, 128)}
KNOWN = MODELS | PUBLISHED | UNGATED


# The plans that run in one launch and the plans for few tokens, each with the sizes at which --one-launch times it.
ONE_LAUNCH = FusedMoe(route=True)
ONE_AN_SM = FusedMoe(tile=GemmTile(), per_sm=1, copy_programs=16, copy_stages=3)
PLANS: dict[str, Plan] = {
    "weft fused": FusedMoe(),
    "weft fused, 8 copy programs": FusedMoe(copy_programs=8),
    "weft fused, 16 copy programs": FusedMoe(copy_programs=16),
    "weft fused, 128 copy programs": FusedMoe(copy_programs=128),
    "weft fused, 256 columns": ONE_AN_SM,
    "weft fused, 256 columns, 8 copy programs": replace(ONE_AN_SM, copy_programs=8),
    "weft fused, 256 columns, 32 copy programs": replace(ONE_AN_SM, copy_programs=32),
    "weft fused, router inside": ONE_LAUNCH,
    "weft fused, 64 rows": FusedMoe(tile=replace(NARROW, block_m=64)),
    "weft low latency": LowLatency(),
    "weft low latency, 32 rows": LowLatency(tile=replace(LowLatency.tile, block_m=32)),
}
STAMPED = ["weft fused", "weft fused, 256 columns"]
FUSED = [*STAMPED, "weft fused, router inside"]
FEW = ["weft low latency", "weft fused, 64 rows", "weft fused, router inside"]
TIMED: list[tuple[str, int, list[str]]] = [
    ("Qwen3-30B", 8192, [name for name in PLANS if "fused" in name and "64 rows" not in name]),
    ("Qwen3-30B", 2048, [*FUSED, "weft fused, 128 copy programs"]),
    ("Qwen3-30B", 512, [*FUSED, "weft fused, 64 rows"]),
    ("FlashMoE", 8192, FUSED),
    ("FlashMoE", 2048, FUSED),
    ("FlashMoE", 512, FUSED),
    *((name, tokens, FEW) for name in ("Qwen3-30B", "GPT-OSS-120B") for tokens in (64, 8, 1)),
    ("Mixtral-8x7B", 8192, FUSED),
]


class Layer:
    """One layer's tensors on this rank, with routings that change from call to call."""

    def __init__(self, world: weft.World, model: Model, tokens: int, zipf: float) -> None:
        self.world, self.model, self.tokens, device = world, model, tokens, world.device
        local = model.experts // world.size
        rank_generator = torch.Generator(device).manual_seed(world.rank)
        same = torch.Generator(device).manual_seed(7)

        def draw(*shape: int, generator: torch.Generator = rank_generator) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=BF, generator=generator)

        self.router = draw(model.experts, model.hidden, generator=same) * 0.02
        skew = torch.arange(1, model.experts + 1, device=device, dtype=torch.float32).log() * -zipf
        self.skew = skew[torch.randperm(model.experts, device=device, generator=same)]
        self.xs = [draw(tokens, model.hidden) for _ in range(ROUTINGS)]
        self.gated = model.activation != "gelu"
        self.w13 = draw(local, (1 + self.gated) * model.inner, model.hidden) * 0.02
        self.w2 = draw(local, model.hidden, model.inner) * 0.02
        self.packed = moe.pack(self.w13, world=world) if self.gated else self.w13
        self.call_index, self.even = 0, zipf == 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.router)
        return y if self.even else (y + self.skew).to(BF)

    def next_tokens(self) -> torch.Tensor:
        self.call_index += 1
        return self.xs[(self.call_index - 1) % ROUTINGS]

    def routed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.next_tokens()
        return x, *moe.gate(self.logits(x), self.model.k, world=self.world)

    def run(self, plan: str | Plan) -> torch.Tensor:
        return self.layer(self.next_tokens(), plan)

    def layer(self, x: torch.Tensor, plan: str | Plan) -> torch.Tensor:
        """Return the layer's result, computed by weft. The launch of ONE_LAUNCH includes the router, so that plan does
        not support skewed routing."""
        world, k, options = self.world, self.model.k, dict(activation=self.model.activation)
        if plan == ONE_LAUNCH:
            router = moe.TopKRouter(self.router, k)
            return moe.moe(x, None, None, self.packed, self.w2, router=router, world=world, plan=ONE_LAUNCH, **options)
        ids, weights = moe.gate(self.logits(x), k, world=world)
        return moe.moe(x, ids, weights, self.packed, self.w2, world=world, plan=plan, **options)


class Library:
    """The layer as users write it with torch.distributed and torch._grouped_mm."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.size = layer, layer.world.size
        self.w13_t, self.w2_t = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)
        self.fixed = self.counts(layer.xs[0])

    def gate(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, e = torch.topk(self.layer.logits(x).float().softmax(-1), self.layer.model.k)
        return p / p.sum(-1, keepdim=True), e

    def counts(self, x: torch.Tensor) -> tuple:
        """Return the weights, the order of the routes, the rows to and from each rank, the order by expert and its
        ends. The host waits for the GPU."""
        model, size = self.layer.model, self.size
        local = model.experts // size
        p, e = self.gate(x)
        flat = e.flatten()
        order, send = flat.argsort(stable=True), torch.bincount(flat, minlength=model.experts)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send)
        gives, gets = torch.stack([send.view(size, local).sum(1), recv.view(size, local).sum(1)]).tolist()
        expert_of_row = torch.repeat_interleave(torch.arange(local, device=x.device).repeat(size), recv)
        ends = torch.bincount(expert_of_row, minlength=local).cumsum(0).int()
        place = expert_of_row.argsort(stable=True)
        return p, order, gives, gets, place, place.argsort(), ends

    def experts(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        projected = torch._grouped_mm(rows, self.w13_t, offs=ends)
        if self.layer.gated:
            a, b = projected.chunk(2, -1)
            hidden = F.silu(a) * b
        else:
            hidden = F.gelu(projected)
        return torch._grouped_mm(hidden, self.w2_t, offs=ends)

    def layer_of(self, x: torch.Tensor, routed: tuple) -> torch.Tensor:
        p, order, gives, gets, place, back, ends = routed
        t, k = p.shape
        received, z = x.new_empty(sum(gets), x.shape[1]), x.new_empty(t * k, x.shape[1])
        dist.all_to_all_single(received, x[order // k], gets, gives)
        dist.all_to_all_single(z, self.experts(received[place], ends)[back], gives, gets)
        return (z[order.argsort()].view(t, k, -1) * p.to(BF)[:, :, None]).sum(1)

    def known(self) -> torch.Tensor:
        return self.layer_of(self.layer.xs[0], self.fixed)

    def eager(self) -> torch.Tensor:
        x = self.layer.xs[0]
        return self.layer_of(x, self.counts(x))


def baselines(layer: Layer, installed: Mapping[str, Callable[[Layer], Experts]]) -> dict[str, Way]:
    """Return, for each library that runs in a CUDA graph, the layer with the library's gated experts between NCCL's
    collectives."""
    runs: dict[str, Way] = {}
    for name, experts_of in installed.items() if layer.gated else ():
        try:
            run = layer_by(layer, experts_of(layer))
            capture(run, 1)
            runs[name] = run
        except Exception as error:  # a library may raise any exception, and raises it on all ranks
            print(f"{name}: {type(error).__name__}: {error}"[:400], flush=True)
    return runs


def limits(layer: Layer, link: float) -> tuple[float, float]:
    """Return the us that the rank with the most work needs for its FLOPs, and for the bytes of its weights or rows.
    link: GB/s."""
    model, world, size = layer.model, layer.world, layer.world.size
    local, flops, touched, sent = model.experts // size, 0.0, 0.0, 0.0
    matrix = (2 + layer.gated) * model.hidden * model.inner  # the number of elements of an expert
    for x in layer.xs:
        ids = layer.logits(x).float().topk(model.k).indices
        rows = torch.bincount(ids.flatten(), minlength=model.experts)
        dist.all_reduce(rows)
        local_rows = rows[world.rank * local :][:local]
        flops += 2 * local_rows.sum().item() * matrix
        touched += 2 * (local_rows > 0).sum().item() * matrix
        to = (
            torch.stack([(ids // local == r).any(1).sum() for r in range(size) if r != world.rank]).sum()
            if size > 1
            else 0
        )
        sent += float(to) * model.hidden * 2
    every = world.exchange((flops / RATE / 1e6, max(touched / MEMORY / 1e6, sent / link / 1e3)))
    return max(us for us, _ in every) / ROUTINGS, max(us for _, us in every) / ROUTINGS


def measure(
    world: weft.World, name: str, tokens: int, plans: Sequence[str], a: argparse.Namespace, link: float
) -> list[dict]:
    """Return the rows of a layer by "auto", by the plans of these names, and by the libraries."""
    layer = Layer(world, KNOWN[name], tokens, a.zipf)
    library, model = Library(layer), KNOWN[name]
    ways: dict[str, Way] = {"auto": partial(layer.run, "auto")} | {way: partial(layer.run, PLANS[way]) for way in plans}
    ways |= baselines(layer, a.installed)
    expected, errors = library.known(), dict[str, float]()
    for way, run in ways.items():
        layer.call_index = 0
        errors[way] = round(error_of(run(), expected), 5)
    gemms = moe_alone.gemms_of(layer, library)
    fns = {"library": library.known, **ways, **gemms, "tables": moe_alone.tables(layer)}
    calls = ROUTINGS if tokens > 2048 else 2 * ROUTINGS
    times = time_interleaved(fns, mode="graph", calls=calls, rounds=5)
    if a.eager:
        times["library, eager"] = time_interleaved({"": library.eager}, mode="eager", calls=5, rounds=5)[""]
    shape = dict(
        op="moe", name=f"{name}-{tokens}", M=tokens, N=model.inner, K=model.hidden, E=model.experts, top_k=model.k
    )
    by_flops, by_bytes = limits(layer, link)
    alone = {name: times.pop(name) for name in (*gemms, "tables")}
    gemm = sum(min(alone[f"{half} {whose}"] for whose in ("torch", "weft")) for half in ("first", "second"))
    shape |= dict(
        activation=model.activation, mode="graph", zipf=a.zipf, versions=a.versions, gemm_us=round(gemm, 1),
        tables_us=round(alone["tables"], 1), alone_us=round(max(gemm, by_bytes) + alone["tables"], 1),
        limit_us=round(max(by_flops, by_bytes), 1),
    )  # fmt: skip
    return [dict(shape, method=way, us=round(us, 1), error=errors.get(way)) for way, us in times.items()]


def stamps(world: weft.World, name: str, tokens: int, way: str) -> dict:
    """Return the share of each task in the time, without waits, that the programs of fused calls spend on this rank."""
    layer, plan = Layer(world, KNOWN[name], tokens, 0.0), PLANS[way]
    assert isinstance(plan, FusedMoe)
    times = fused.stamped(world, world.sm_count * plan.per_sm)
    for calls in (2, 2 * ROUTINGS):
        times.zero_()
        for _ in range(calls):
            layer.run(plan)
        torch.cuda.synchronize()
    *parts, whole = times.double().mean(0).tolist()
    kinds = ("sending", "GEMM 1", "GEMM 2", "sums", "own sums")
    shares = {kind: round(part / whole, 4) for kind, part in zip(kinds, parts, strict=True)}
    fixed = dict(op="moe stamps", name=f"{name}-{tokens}", method=way)
    return fixed | dict(us=round(whole / calls / 1e3, 1), in_tasks=round(sum(parts) / whole, 4), **shares)


def main() -> None:
    sizes = dict(models=list(MODELS), tokens=[512, 2048, 8192], zipf=0.0)
    a = options(choices=dict(models=KNOWN), **sizes, one_launch=False, stamps=False, eager=False)
    todo = [(name, tokens, list[str]()) for tokens in sorted(a.tokens, reverse=True) for name in a.models]
    if a.one_launch:
        todo = TIMED
    run = Program(a, "moe_stamps.jsonl" if a.stamps else "moe.jsonl")
    world, link = run.world, run.link
    a.installed, a.versions = gathered_experts.installed(world) if world.size > 1 else ({}, {})
    with torch.no_grad():
        for name, tokens, ways in run.cases(
            {f"MoE {name} {tokens}": (name, tokens, ways) for name, tokens, ways in todo}
        ):
            if a.stamps:
                run.log(*run.keep(stamps(world, name, tokens, way) for way in STAMPED))
                continue
            try:
                rows = run.keep(measure(world, name, tokens, ways, a, link))
            except weft.WeftError as e:
                print(f"{name} {tokens}: {type(e).__name__}: {e}"[:400], flush=True)
                continue
            figures = " | ".join(f"{r['method']} {r['us']:.0f} ({r['error']})" for r in rows)
            run.log(f"{rows[0]['name']} limit {rows[0]['limit_us']}: {figures}")
    run.end()


if __name__ == "__main__":
    main()
