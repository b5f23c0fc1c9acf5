"""Layers whose experts' columns are split over the ranks, with TileLink's sizes, compared with NCCL and torch's grouped
GEMM.

torchrun --nproc-per-node N -m bench.measure.moe_tensor --out DIR [--models ...] [--tokens ...] [--seconds S]

The program appends rows to DIR/moe_tensor.jsonl, of three ops: both halves and "moe_tp", the whole layer. `us` is a call in a CUDA graph,
the slowest rank's median of interleaved rounds; M counts the tokens of all ranks. weft's
routing changes from call to call within the graph, which also builds the tables; "library" knows the order of its rows in advance:
all-gather, index, `torch._grouped_mm` and activation; then `torch._grouped_mm`, index, weighted sum, reduce-scatter. limit_us = max(the
GEMM, bytes of the collective / the link's measured rate), and for the whole the sum of both halves' limits; gemm_us is the faster of
`torch._grouped_mm` and weft's GEMM alone in the same run. tables_us is the time of a call's tables alone, for which its first GEMM waits
and which "library" does not build.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
from bench.common.program import Program, options
from bench.common.timing import error_of, time_interleaved
from bench.measure.moe import BF, ROUTINGS, Model
from bench.measure.moe_alone import waiting_for_nobody
from weft import moe
from weft.ops.moe.call import Weights
from weft.ops.moe.expert_parallel import dispatched
from weft.ops.moe.expert_parallel.op import packed
from weft.ops.moe.routing import route_tables
from weft.ops.moe.tensor_parallel.call import GatherOperands, Split, route_parts
from weft.ops.moe.tensor_parallel.dispatched import plan_state, table_builder
from weft.ops.moe.tensor_parallel.op import FIRST_HALF, GATHER_NAME
from weft.plans import DispatchedColumns

MODELS = {f"MoE-{i + 1}": Model(2048, 1536, e, k) for i, (e, k) in enumerate([(8, 2), (32, 2), (32, 5)])}
MODELS |= {f"MoE-{i + 4}": Model(4096, 2048, e, k) for i, (e, k) in enumerate([(8, 2), (32, 2), (32, 5)])}
MODELS["Flux"] = Model(8192, 8192, 32, 4, "gelu")  # the size in the paper, where an expert has one matrix for each half


class Layer:
    """One layer's tensors on this rank, with routings that change from call to call. all_tokens: the tokens of all
    ranks."""

    def __init__(self, world: weft.World, model: Model, all_tokens: int) -> None:
        self.world, self.model, device, size = world, model, world.device, world.size
        self.inner, self.all_tokens, self.tokens = model.inner // size, all_tokens, all_tokens // size
        generator = torch.Generator(device).manual_seed(world.rank)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=BF, generator=generator)

        wide = 1 if model.activation == "gelu" else 2
        self.x = draw(self.tokens, model.hidden)
        self.w13 = draw(model.experts, wide * self.inner, model.hidden) * 0.02
        self.w2 = draw(model.experts, model.hidden, self.inner) * 0.02
        self.packed = self.w13 if wide == 1 else moe.pack(self.w13, world=world)
        scores = [torch.rand(self.tokens, model.experts, device=device, generator=generator) for _ in range(ROUTINGS)]
        top = [s.topk(model.k) for s in scores]
        self.routes = [(t.indices.int(), t.values / t.values.sum(1, keepdim=True)) for t in top]
        self.call_index = 0

    def first_half(self, index: int | None = None) -> tuple[torch.Tensor, ...]:
        if index is None:
            index, self.call_index = self.call_index % ROUTINGS, self.call_index + 1
        ids, weights = self.routes[index]
        outputs = weft.all_gather_grouped_matmul(
            self.x, ids, weights, self.packed, inner=self.inner, activation=self.model.activation, world=self.world
        )
        return *outputs, ids

    def second_half(self, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return weft.grouped_matmul_reduce_scatter(*outputs, self.w2, world=self.world)


class Library:
    """The layer as users write it with torch.distributed and torch._grouped_mm, for the first of the routings."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.size = layer, layer.world.size
        self.w13, self.w2 = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)
        ids, weights = (self.gathered(t) for t in layer.routes[0])
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        self.rows, self.back, self.weights = order // layer.model.k, order.argsort(), weights.to(BF)[:, :, None]
        self.ends = torch.bincount(flat, minlength=layer.model.experts).cumsum(0).int()
        self.ordered = self.gathered(layer.x)[self.rows]
        self.hidden = self.activated(torch._grouped_mm(self.ordered, self.w13, offs=self.ends))

    def gathered(self, t: torch.Tensor) -> torch.Tensor:
        full = t.new_empty(self.size * t.shape[0], *t.shape[1:])
        dist.all_gather_into_tensor(full, t.contiguous())
        return full

    def activated(self, projected: torch.Tensor) -> torch.Tensor:
        if self.layer.model.activation == "gelu":
            return F.gelu(projected)
        gate, up = projected.chunk(2, -1)
        return F.silu(gate) * up

    def first_half(self) -> torch.Tensor:
        return self.activated(torch._grouped_mm(self.gathered(self.layer.x)[self.rows], self.w13, offs=self.ends))

    def second_half(self, hidden: torch.Tensor) -> torch.Tensor:
        model = self.layer.model
        y = torch._grouped_mm(hidden, self.w2, offs=self.ends)
        part = (y[self.back].view(self.layer.all_tokens, model.k, model.hidden) * self.weights).sum(1)
        out = part.new_empty(self.layer.tokens, model.hidden)
        dist.reduce_scatter_tensor(out, part)
        return out

    def gemms(self) -> dict[str, Callable[[], object]]:
        return {
            "first": lambda: torch._grouped_mm(self.ordered, self.w13, offs=self.ends),
            "second": lambda: torch._grouped_mm(self.hidden, self.w2, offs=self.ends),
        }


def first_half_of(layer: Layer, outputs: tuple[torch.Tensor, ...]) -> tuple[GatherOperands, Split]:
    """Return the operands and sizes of the first half's call that returned `outputs`."""
    w13 = packed(GATHER_NAME, "w13", layer.packed, 5, layer.model.activation)
    operands = GatherOperands(layer.x, outputs[2], layer.routes[0][1], w13)
    options = (None, layer.model.activation, layer.inner, layer.world.size, "rows", False)
    return operands, FIRST_HALF.check(layer.world, operands, options).layer


def own_gemms(layer: Layer, library: Library, outputs: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Return weft's GEMMs alone, for the routing of the call that returned `outputs`. These GEMMs do not wait."""
    world, (hidden, routes, _) = layer.world, outputs
    operands, kind = first_half_of(layer, outputs)
    state, tables = plan_state(world, kind, DispatchedColumns()), route_parts(world, kind, routes).tables
    y, full = hidden.new_empty(hidden.shape[0], layer.model.hidden), library.gathered(layer.x)
    workspace = dispatched.LayerWorkspace(SimpleNamespace(local=full), None, torch.empty_like(hidden), y)
    weights = Weights(operands.w13, layer.w2)
    return waiting_for_nobody(world, state, weights, tables, workspace, hidden)


def tables_alone(layer: Layer, outputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    """Return a function that does the work before the first GEMM of a call: it shares the routes with all ranks and
    builds the tables."""
    world, routes = layer.world, outputs[1].clone()
    operands, kind = first_half_of(layer, outputs)
    builder, (weights, tables) = table_builder(world, kind), route_parts(world, kind, routes)

    def run() -> None:
        route_tables.share_routes(world, builder.routes, operands.ids, operands.weights)
        route_tables.run_builder(world, builder, tables, weights)

    return run


def measure(world: weft.World, name: str, tokens: int, link: float) -> list[dict]:
    model = MODELS[name]
    layer = Layer(world, model, tokens)
    library = Library(layer)
    outputs = layer.first_half(0)
    gemm_fns = own_gemms(layer, library, outputs)
    error = error_of(layer.second_half(outputs), library.second_half(library.hidden))
    ops: dict[str, dict[str, Callable[[], object]]] = {
        "all_gather_grouped_matmul": dict(library=library.first_half, auto=layer.first_half),
        "grouped_matmul_reduce_scatter": dict(
            library=lambda: library.second_half(library.hidden), auto=lambda: layer.second_half(outputs)
        ),
        "moe_tp": dict(
            library=lambda: library.second_half(library.first_half()),
            auto=lambda: layer.second_half(layer.first_half()),
        ),
    }
    every = {f"{op} {way}": fn for op, fns in ops.items() for way, fn in fns.items()}
    every |= {f"gemm {half} torch": fn for half, fn in library.gemms().items()}
    every |= {f"gemm {half} weft": fn for half, fn in gemm_fns.items()}
    every["tables"] = tables_alone(layer, outputs)
    times = time_interleaved(every, mode="graph", calls=2 * ROUTINGS, rounds=5)

    moved = (world.size - 1) * layer.tokens * model.hidden * 2 / link / 1e3
    gemm = {half: min(times[f"gemm {half} {of_whom}"] for of_whom in ("torch", "weft")) for half in ("first", "second")}
    bounds = dict(zip(ops, (max(us, moved) for us in gemm.values()), strict=False))
    bounds["moe_tp"] = sum(bounds.values())
    gemms = dict(zip(ops, gemm.values(), strict=False)) | {"moe_tp": sum(gemm.values())}
    shape = dict(name=name, M=tokens, N=model.inner, K=model.hidden, E=model.experts, top_k=model.k)
    fixed = dict(mode="graph", error=round(error, 5), tables_us=round(times["tables"], 1))
    return [
        dict(op=op, **shape, method=way, us=round(times[f"{op} {way}"], 1), limit_us=round(bounds[op], 1),
             gemm_us=round(gemms[op], 1), **fixed)
        for op, fns in ops.items() for way in fns
    ]  # fmt: skip


def summary(rows: list[dict]) -> str:
    lines = [f"{rows[0]['name']}-{rows[0]['M']} error {rows[0]['error']}, tables {rows[0]['tables_us']} us"]
    for op in dict.fromkeys(r["op"] for r in rows):
        of_op = [r for r in rows if r["op"] == op]
        figures = " | ".join(f"{r['method']} {r['us']:.0f}" for r in of_op)
        lines.append(f"    {op}: limit {of_op[0]['limit_us']:.0f} (GEMM {of_op[0]['gemm_us']:.0f}): {figures}")
    return "\n".join(lines)


def main() -> None:
    a = options(models=list(MODELS), tokens=[8192])
    run = Program(a, "moe_tensor.jsonl")
    cases = {f"columns {name} {tokens}": (name, tokens) for name, tokens in itertools.product(a.models, a.tokens)}
    link = run.link
    with torch.no_grad():
        for name, tokens in run.cases(cases):
            run.log(summary(run.keep(measure(run.world, name, tokens, link))))
    run.end()


if __name__ == "__main__":
    main()
