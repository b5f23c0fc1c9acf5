"""Training steps of layers, and blocks of a diffusion transformer, as in FlashOverlap (section 6), compared with torch
and NCCL in the same run: torchrun --nproc-per-node N -m bench.measure.models_training --out DIR [--only NAME ..]
[--modes eager graph] [--seconds S]

    Llama-70B training    two sequences of 8,192 tokens; forward and backward
    Mixtral training      four sequences of 8,192 tokens, sizes of Mixtral-8x7B; forward and backward. The ranks have different experts,
                          but of four ranks each pair shares the columns of the same experts (EP 2 x TP 2)
    video diffusion       33,792 tokens, sizes of Step-Video-T2V: full attention, modulated norms, MLP with GELU; forward

The ranks have different rows between the parts of a layer, and different heads and columns inside. Both methods are the same modules of
`weft.nn` and `weft.moe` with the same weights and arithmetic. "libraries" communicates by NCCL's all-gather and
reduce-scatter and computes by cuBLAS and `torch._grouped_mm`, under autograd; "auto" runs the modules as they are. For
the backward pass both save the gathered rows and the inputs of the experts' activations. "without communication" is
"libraries" without its collectives, as in models.py. Both leave out rotary positions, weights of norms, the optimiser,
and attention to a video's text. The program appends rows to DIR/models.jsonl as models.py does; `error` is the largest
of the result's and, of a training step, of the gradients of x and of a weight.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from bench.common.collectives import Collectives, Elided, Gathered, Scattered
from bench.common.program import Program, gains, options
from bench.common.timing import error_of, time_interleaved
from bench.measure.models import experts_here
from bench.pages.tables import ALONE
from weft.ops.activation import silu_mul_blocks

Tensor = torch.Tensor
TOP_K = 2  # the number of experts per token
SHARING = {4: 2}  # for each number of ranks, how many of them share the columns of the same experts
# The first of these backends that can compute the attention is used.
LIBRARIES = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Sizes(NamedTuple):
    """The sizes of a layer. experts 0: a gated MLP, or with `video` an MLP with GELU."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    sequences: int
    tokens: int
    experts: int = 0
    video: bool = False
    head_dim: int = 128


LAYERS = {
    "Llama-70B training": Sizes(8192, 28672, 64, 8, 2, 8192),
    "Mixtral training": Sizes(4096, 14336, 32, 8, 4, 8192, experts=8),
    "video diffusion": Sizes(6144, 24576, 48, 48, 1, 33792, video=True),
}


def column(module: nn.Module, x: Tensor, collectives: Collectives) -> Tensor:
    return F.linear(Gathered.apply(x, collectives), module.weight, module.bias)


def row(module: nn.Module, x: Tensor, collectives: Collectives) -> Tensor:
    y = Scattered.apply(F.linear(x, module.weight), collectives)
    return y if module.bias is None else y + module.bias


def gated(module: nn.Module, x: Tensor, collectives: Collectives) -> Tensor:
    gate_up = F.linear(Gathered.apply(x, collectives), module.gate_up)
    return Scattered.apply(
        F.linear(silu_mul_blocks(gate_up, module.inner, module.block, module.world), module.down), collectives
    )


def mixture(module: nn.Module, x: Tensor, collectives: Collectives) -> Tensor:
    full = Gathered.apply(x, collectives)
    ids, weights, _ = module.route(full)
    return Scattered.apply(
        experts_here(module.world, module.split.group, full, ids, weights, module.w13, module.w2), collectives
    )


BY_LIBRARIES = {
    weft.nn.ColumnParallelLinear: column,
    weft.nn.RowParallelLinear: row,
    weft.nn.ParallelMLP: gated,
    weft.moe.MoE: mixture,
}


class LayerOf(nn.Module):
    """x [m_r, H] -> [m_r, H], the rows of this rank. collectives: NCCL's collectives, which run with the libraries'
    GEMMs, or None for weft's ops."""

    def __init__(self, s: Sizes, world: weft.World) -> None:
        super().__init__()
        self.s, self.world, bias = s, world, s.video
        columns = functools.partial(weft.nn.ColumnParallelLinear, s.hidden, world=world, bias=bias, keep_gathered=True)
        back = functools.partial(weft.nn.RowParallelLinear, out_features=s.hidden, world=world, bias=bias)
        self.qkv = columns((s.heads + 2 * s.kv_heads) * s.head_dim)
        self.out = back(s.heads * s.head_dim)
        if s.video:
            self.mlp = nn.Sequential(columns(s.inner), nn.GELU("tanh"), back(s.inner))
            self.modulation = nn.Parameter(torch.randn(6, s.hidden, dtype=torch.bfloat16, device=world.device) * 0.1)
        elif s.experts:
            options = dict(world=world, parallel=SHARING.get(world.size, 1), keep="activation")
            self.mlp = weft.moe.MoE(s.hidden, s.inner, s.experts, TOP_K, **options).requires_grad_()
            with torch.no_grad():
                self.mlp.router.normal_(generator=torch.Generator(world.device).manual_seed(1))
                for w in (self.mlp.w13, self.mlp.w2):
                    w.uniform_(-(w.shape[2] ** -0.5), w.shape[2] ** -0.5)
        else:
            self.mlp = weft.nn.ParallelMLP(s.hidden, s.inner, world=world, keep_gathered=True)

    def attention(self, qkv: Tensor) -> Tensor:
        s, w = self.s, self.world.size
        heads = qkv.view(s.sequences, s.tokens, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads // w, s.kv_heads // w, s.kv_heads // w], 1)
        with sdpa_kernel(LIBRARIES, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=not s.video, enable_gqa=s.heads != s.kv_heads)
        return y.transpose(1, 2).reshape(s.sequences * s.tokens, -1)

    def norm(self, x: Tensor, offset: int) -> Tensor:
        if not self.s.video:
            return F.rms_norm(x, x.shape[1:])
        shift, scale = self.modulation[offset], self.modulation[offset + 1]
        return torch.addcmul(shift, F.layer_norm(x, x.shape[1:]), 1 + scale)

    def gate(self, y: Tensor, offset: int) -> Tensor:
        return y * self.modulation[offset + 2] if self.s.video else y

    def forward(self, x: Tensor, collectives: Collectives | None) -> Tensor:
        def run(module: nn.Module, y: Tensor) -> Tensor:
            if isinstance(module, nn.Sequential):
                return functools.reduce(lambda y, part: run(part, y), module, y)
            return (
                module(y)
                if collectives is None or type(module) not in BY_LIBRARIES
                else BY_LIBRARIES[type(module)](module, y, collectives)
            )

        x = x + self.gate(run(self.out, self.attention(run(self.qkv, self.norm(x, 0)))), 0)
        return x + self.gate(run(self.mlp, self.norm(x, 3)), 3)


class Layers(nn.ModuleList):
    def forward(self, x: Tensor, collectives: Collectives | None) -> Tensor:
        return functools.reduce(lambda x, layer: layer(x, collectives), self, x)


class Step:
    """A step of several layers: a call returns the result and, of a training step, the gradients of x and of each
    weight.

    The autograd graph of each call has separate leaves. Leaves of an earlier call would stay bound to the stream of
    that call as long as its autograd graph exists, and no CUDA graph could be captured on another stream.
    """

    def __init__(self, world: weft.World, s: Sizes, layers: int) -> None:
        torch.manual_seed(1)
        generator = torch.Generator(world.device).manual_seed(2 + world.rank)
        self.s, self.layers = s, Layers(LayerOf(s, world) for _ in range(layers))
        shape = s.sequences * s.tokens // world.size, s.hidden
        draw = functools.partial(torch.randn, shape, dtype=torch.bfloat16, device=world.device, generator=generator)
        self.x, self.dy = draw(), draw()

    def __call__(self, collectives: Collectives | None) -> tuple[Tensor, ...]:
        trained = not self.s.video
        x, *weights = (t.detach().requires_grad_(trained) for t in (self.x, *self.layers.parameters()))
        named = dict(zip((name for name, _ in self.layers.named_parameters()), weights, strict=True))
        with torch.set_grad_enabled(trained):
            y = torch.func.functional_call(self.layers, named, (x, collectives))
            return y.detach(), *(torch.autograd.grad(y, [x, *weights], self.dy) if trained else ())


def measure(world: weft.World, name: str, mode: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    s = LAYERS[name]
    step = Step(world, s, a.layers)
    elided = Elided(world)
    ways = {"libraries": lambda: step(Collectives(world)), "auto": lambda: step(None)}
    ways[ALONE] = elided.passes(lambda: step(elided))
    expected = [t.clone() for t in ways["libraries"]()[:3]]
    error = max(error_of(actual, t) for actual, t in zip(ways["auto"](), expected, strict=False))
    errors = {"libraries": 0.0, "auto": round(error, 5), ALONE: None}
    times = time_interleaved(ways, mode=mode, calls=1, rounds=a.rounds)
    fixed = dict(op="models", dtype="bfloat16", mode=mode, layers=a.layers)
    shape = dict(name=name, M=s.sequences * s.tokens, N=s.hidden, K=s.inner)
    shape |= dict(E=s.experts, top_k=TOP_K) if s.experts else {}
    return [dict(shape, method=way, us=round(us, 1), error=errors[way], **fixed) for way, us in times.items()]


def main() -> None:
    a = options(
        choices=dict(only=LAYERS, modes=["eager", "graph"]),
        only=list(LAYERS),
        modes=["eager", "graph"],
        layers=2,
        rounds=5,
    )
    run = Program(a, "models.jsonl")
    cases = {f"training {name}, {mode}": (mode, name) for mode, name in itertools.product(a.modes, a.only)}
    for mode, name in run.cases(cases):
        rows = run.keep(measure(run.world, name, mode, a))
        times = gains({r["method"]: r["us"] for r in rows}, "libraries")
        run.log(f"{name}, {mode}: {times}, errors {[r['error'] for r in rows]}")
    run.end()


if __name__ == "__main__":
    main()
