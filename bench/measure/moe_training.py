"""Forward and backward passes of the MoE layer with the sizes of real models, compared with torch's grouped GEMM under
autograd with NCCL's all-to-all or, for layers whose columns are split over the ranks, NCCL's all-gather and
reduce-scatter.

torchrun --nproc-per-node N -m bench.measure.moe_training --out DIR [--models ...] [--tokens 8192] [--parallel expert tensor] [--keep ...]
    [--seconds S]

The program appends rows to DIR/moe_training.jsonl: `op` "moe_backward" (after a forward pass that is not timed) and "moe_step" (forward and
backward), us of the slowest rank in a CUDA graph, and TFLOP/s per GPU for three matrices an expert: 12 H I operations for each row
backward and 18 for each step, without recomputation. "library" is captured with split sizes known in advance; no method includes
the router. The names of layers with split columns contain "tensor".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
from bench.common.collectives import Collectives, Gathered, Scattered
from bench.common.program import Program, options
from bench.common.timing import error_of, time_interleaved
from bench.measure.moe import MODELS, Layer, Library, Model
from weft import moe

Tensor = torch.Tensor


class Exchanged(torch.autograd.Function):
    """The all-to-all of rows; the backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gives: list[int], gets: list[int]) -> Tensor:
        ctx.splits = gives, gets
        received = rows.new_empty(sum(gets), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), gets, gives)
        return received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        gives, gets = ctx.splits
        back = dy.new_empty(sum(gives), dy.shape[1])
        dist.all_to_all_single(back, dy.contiguous(), gives, gets)
        return back, None, None


class Timed:
    """A layer whose operands are leaves of the autograd graph, with a training step and a backward pass to time. dy:
    the gradient of the layer's result."""

    dy: Tensor

    def weft(self, keep: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result and the leaves: x, the routes' weights, and the first and second matrices."""
        raise NotImplementedError

    def libraries(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        raise NotImplementedError

    def step(self, forward: Callable[[], tuple]) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y, leaves = forward()
            return torch.autograd.grad(y, leaves, self.dy)

        return run

    def back(self, forward: Callable[[], tuple]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that runs the backward pass. Its first call runs the forward pass, on the stream of that call."""
        forward_outputs: list[tuple] = []

        def run() -> tuple[Tensor, ...]:
            if not forward_outputs:
                forward_outputs.append(forward())
            y, leaves = forward_outputs[0]
            return torch.autograd.grad(y, leaves, self.dy, retain_graph=True)

        return run


class Trained(Timed):
    """A layer whose experts are distributed over the ranks."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.library = layer, Library(layer)
        x = layer.xs[0]
        self.x, self.dy = x.clone().requires_grad_(), torch.randn_like(x)
        with torch.no_grad():
            self.ids, weights = moe.gate(layer.logits(x), layer.model.k, world=layer.world)
        self.weights = weights.requires_grad_()
        self.w13, self.packed, self.w2 = (t.requires_grad_() for t in (layer.w13, layer.packed, layer.w2))
        p, *self.routed = self.library.fixed
        self.p = p.clone().requires_grad_()

    def weft(self, keep: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        w = self.layer.world
        y = moe.moe(self.x, self.ids, self.weights, self.packed, self.w2, keep=keep, world=w, plan="dispatched")
        return y, (self.x, self.weights, self.packed, self.w2)

    def libraries(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        order, gives, gets, place, back, ends = self.routed
        (t, k), w13, w2 = self.p.shape, self.w13.transpose(1, 2), self.w2.transpose(1, 2)
        received = Exchanged.apply(self.x.index_select(0, order // k), gives, gets).index_select(0, place)
        a, b = torch._grouped_mm(received, w13, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(a) * b, w2, offs=ends)
        z = Exchanged.apply(y.index_select(0, back), gets, gives).index_select(0, order.argsort()).view(t, k, -1)
        return (z * self.p.to(z.dtype)[:, :, None]).sum(1), (self.x, self.p, self.w13, self.w2)


class InParts(Timed):
    """A layer in which every rank has some columns of every expert."""

    def __init__(self, world: weft.World, model: Model, tokens: int) -> None:
        self.world, self.k, self.inner, device = world, model.k, model.inner // world.size, world.device
        self.collectives = Collectives(world)
        generator = torch.Generator(device).manual_seed(world.rank)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

        self.x, self.dy = draw(tokens, model.hidden).requires_grad_(), draw(tokens, model.hidden)
        w13 = draw(model.experts, 2 * self.inner, model.hidden) * 0.02
        self.packed = moe.pack(w13, world=world).requires_grad_()
        self.w13, self.w2 = (
            w13.requires_grad_(),
            (draw(model.experts, model.hidden, self.inner) * 0.02).requires_grad_(),
        )
        with torch.no_grad():
            self.ids, weights = moe.gate(draw(tokens, model.experts), model.k, world=world)
            flat = Gathered.apply(self.ids, self.collectives).flatten().long()
        self.weights, self.order = weights.requires_grad_(), flat.argsort(stable=True)
        self.ends = torch.bincount(flat, minlength=model.experts).cumsum(0).int()
        self.rows, self.place = self.order // model.k, self.order.argsort()

    def weft(self, keep: str) -> tuple[Tensor, tuple[Tensor, ...]]:
        common = dict(world=self.world, plan="dispatched")
        hidden, routes = weft.all_gather_grouped_matmul(
            self.x, self.ids, self.weights, self.packed, inner=self.inner, keep=keep, **common
        )
        y = weft.grouped_matmul_reduce_scatter(hidden, routes, self.ids, self.w2, **common)
        return y, (self.x, self.weights, self.packed, self.w2)

    def libraries(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        w13, w2 = self.w13.transpose(1, 2), self.w2.transpose(1, 2)
        received = Gathered.apply(self.x, self.collectives).index_select(0, self.rows)
        a, b = torch._grouped_mm(received, w13, offs=self.ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(a) * b, w2, offs=self.ends).index_select(0, self.place)
        weights = Gathered.apply(self.weights, self.collectives).to(y.dtype)[:, :, None]
        part = (y.view(-1, self.k, y.shape[1]) * weights).sum(1)
        return Scattered.apply(part, self.collectives), (self.x, self.weights, self.w13, self.w2)


def measure(world: weft.World, name: str, tokens: int, parallel: str, keep: list[str]) -> list[dict]:
    model = MODELS[name]
    it = Trained(Layer(world, model, tokens, 0.0)) if parallel == "expert" else InParts(world, model, tokens)
    ways: dict[str, Callable[[], tuple]] = {"library": it.libraries}
    ways |= {f"weft, keep {kept}": partial(it.weft, kept) for kept in keep}
    expected, error = it.step(it.libraries)(), 0.0
    for way, forward in ways.items():
        if way != "library":
            actual = it.step(forward)()
            error = max(error, error_of(actual[0], expected[0]), error_of(actual[3], expected[3]))
    name = f"{name}-{tokens}" if parallel == "expert" else f"{name}-{parallel}-{tokens}"
    shape = dict(name=name, M=tokens, N=model.inner, K=model.hidden, E=model.experts, top_k=model.k)
    fixed = dict(mode="graph", zipf=0.0, error=round(error, 5))
    rows = []
    for op, timed, flops in (("moe_backward", it.back, 12), ("moe_step", it.step, 18)):
        times = time_interleaved({way: timed(f) for way, f in ways.items()}, mode="graph", calls=2, rounds=5)
        for way, us in times.items():
            rate = flops * tokens * model.k * model.hidden * model.inner / us / 1e6
            rows.append(dict(shape, op=op, method=way, us=round(us, 1), tflops=round(rate, 1), **fixed))
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    keep, parallel = ["rows", "activation", "nothing"], ["expert", "tensor"]
    a = options(models=["Qwen3-30B", "Mixtral-8x7B"], tokens=[8192], parallel=parallel, keep=keep)
    run = Program(a, "moe_training.jsonl")
    sizes = itertools.product(a.parallel, a.models, a.tokens)
    cases = {f"training {name} {tokens}, {parallel}": (parallel, name, tokens) for parallel, name, tokens in sizes}
    for parallel, name, tokens in run.cases(cases):
        for r in run.keep(measure(run.world, name, tokens, parallel, a.keep)):
            figures = f"{r['method']} {r['us']:.0f} us, {r['tflops']:.0f} TFLOP/s"
            run.log(f"{r['op']} {r['name']} error {r['error']}: {figures}")
    run.end()


if __name__ == "__main__":
    main()
