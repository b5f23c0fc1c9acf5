"""Layers of whole models that two papers measured, on `weft.models`, compared with torch and NCCL in the same run:
torchrun --nproc-per-node N -m bench.measure.models --out DIR [--only LLaMA2-7B ..] [--layers 2] [--seconds S]
models_training.py times training steps and blocks of a diffusion transformer, and writes to the same file.

TileLink's Figure 11 (8 H800s) has eight models with batch 4 and sequence 8,192, two layers of each; FlashOverlap's inference has a chunk
of 16,384 tokens of Llama-70B. GPT-3's MLPs have two matrices and GELU; here they are gated and have two thirds of the width, with the
same work and bytes. The program appends rows to DIR/models.jsonl: `us` of a forward pass in a CUDA graph (embedding, layers, last norm),
the slowest rank's median of interleaved rounds; `error`, relative to "libraries". The methods:
    libraries    dense: cuBLAS, NCCL's all-reduce, and add and norm in one kernel; experts: NCCL's all-gather, torch's sort, index and
                 `torch._grouped_mm` of this rank's experts, NCCL's reduce-scatter, all on the device, as a graph requires
    fused, woven, sequence    the methods of decoder.py, woven by copy engines; models with experts have sequence alone
    woven own    woven, with weft's own GEMM on all SMs
    auto         the planner's choice; it has a row of its own if it is none of these
    without communication    "libraries" without its collectives: each rank's computation, which is the limit of all overlap. Its
                 `error` is null
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

import weft
from bench.common.collectives import Collectives, Elided, norm_alone
from bench.common.program import Program, gains, options
from bench.common.timing import error_of, time_interleaved
from bench.pages.tables import ALONE
from weft.lang.mapping import balanced_rows
from weft.models import Batch, Cache, Llama
from weft.models.cache import Layout
from weft.models.mixture import MixtureMLP
from weft.nn.weave import LayerPlan
from weft.ops.activation import silu_mul_blocks
from weft.ops.moe.routing.router import gate

Tensor = torch.Tensor
WORDS = 1024  # the vocabulary is small: a whole output head would take longer than 2 layers


def dense(hidden: int, inner: int, heads: int, kv_heads: int = 0) -> dict[str, Any]:
    return dict(
        model_type="llama", hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, head_dim=128,
    )  # fmt: skip


def mixtral(hidden: int, inner: int, heads: int) -> dict[str, Any]:
    mixture = dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    return {**dense(hidden, inner, heads, 8), **mixture}


QWEN15 = dict(
    model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    norm_topk_prob=False, decoder_sparse_step=1,
)  # fmt: skip
FOUR = (8192,) * 4
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # the config, and the new tokens of every request
    "LLaMA2-7B": (dense(4096, 11008, 32), FOUR),
    "Mixtral-8x7B": (mixtral(4096, 14336, 32), FOUR),
    "LLaMA2-70B": (dense(8192, 28672, 64, 8), FOUR),
    "Qwen1.5-2.7B": ({**dense(2048, 5632, 16), **QWEN15}, FOUR),
    "Llama-70B chunk": (dense(8192, 28672, 64, 8), (16384,)),
    "LLaMA2-13B": (dense(5120, 13824, 40), FOUR),
    "Mixtral-8x22B": (mixtral(6144, 16384, 48), FOUR),
    "GPT3-6.7B": (dense(4096, 10944, 32), FOUR),
    "GPT3-175B": (dense(12288, 32768, 96), FOUR),
}


class Picked(torch.autograd.Function):
    """Rows order // k of x, where `order` is a permutation of k times the rows of x and `back` its inverse. The
    backward pass has no atomic additions, unlike torch's `index_select`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        ctx.back, ctx.k = back, k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dx = dy.index_select(0, ctx.back)
        return dx if ctx.k == 1 else dx.view(-1, ctx.k, dx.shape[1]).sum(1), None, None, None


def experts_here(
    world: weft.World, group: int, full: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor
) -> Tensor:
    """Return this rank's part of the weighted sums [M, H] of all tokens `full`, computed by torch's operators,
    differentiable. w13, w2: the operands of `weft.moe.moe` for this group's experts, with all their columns or some."""
    (local, hidden, inner), k = w2.shape, ids.shape[1]
    local_ids = ids.flatten() - group * local
    local_ids, order = local_ids.masked_fill((local_ids < 0) | (local_ids >= local), local).sort(stable=True)
    is_local = (local_ids < local)[:, None]  # the other rows belong to no expert of this rank and are undefined
    last = torch.arange(local, dtype=local_ids.dtype, device=local_ids.device)
    ends = torch.searchsorted(local_ids, last, right=True, out_int32=True)
    back = order.argsort()
    rows = Picked.apply(full, order, back, k)
    if rows.requires_grad:
        rows = torch.where(is_local, rows, 0)
    gate_up = torch._grouped_mm(rows, w13.flatten(1, 3).transpose(1, 2), offs=ends)
    y = torch._grouped_mm(
        silu_mul_blocks(gate_up, inner, world.backend.scale.interleave, world), w2.transpose(1, 2), offs=ends
    )
    y = torch.where(is_local, y, 0) * weights.flatten()[order, None].to(y.dtype)
    return Picked.apply(y, back, order, 1).view(-1, k, hidden).sum(1)


def experts_by_libraries(mlp: MixtureMLP, x: Tensor, rows: int, k: int, collectives: Collectives) -> Tensor:
    """Compute `mlp(x)` with the libraries: gather the tokens of all ranks, apply this rank's experts, and return the
    sums of this rank's tokens."""
    world, experts = mlp.world, mlp.experts
    full = collectives.gather(x, rows)
    ids, weights = gate(full @ mlp.gate.weight.t(), k, world=world, renormalise=mlp.mixture.renormalise)
    partial = experts_here(world, world.rank, full, ids, weights, experts.w13, experts.w2)
    if mlp.mixture.shared_intermediate_size:
        shared = mlp.shared_expert
        middle = silu_mul_blocks(full @ shared.gate_up.t(), shared.inner, shared.block, world)
        partial += (middle @ shared.down.t()) * (full @ mlp.shared_expert_gate.weight.t()).sigmoid()
    return collectives.sum(partial)


def mixture_by_libraries(model: Llama, ids: Tensor, layout: Layout, collectives: Collectives) -> Tensor:
    """Compute `model.hidden` with the libraries for a model with experts. Between layers every rank has only its own
    rows."""
    world, c, part, rows = model.world, model.config, layout.parts[0], layout.tokens
    norm = functools.partial(weft.rms_norm, world=world)
    norms, shards = model._norms(), balanced_rows(rows, world.size)
    assert c.mixture is not None
    x = model.model.embed_tokens.weight[ids].split(shards)[world.rank]
    residual, y = x, norm(x, *norms[0])
    for index, layer in enumerate(model.model.layers):
        qkv = collectives.gather(y, rows) @ layer.self_attn.qkv.t()
        out = torch.empty(rows, layer.self_attn.out.shape[1], dtype=qkv.dtype, device=qkv.device)
        heads = model._heads(layer.self_attn, index, part, layout, qkv, out)
        world.finish(world.current_stream())
        y = collectives.sum(heads @ layer.self_attn.out.t())
        y, residual = norm(y, *norms[2 * index + 1], residual=residual)
        y = experts_by_libraries(layer.mlp, y, rows, c.mixture.top_k, collectives)
        y, residual = norm(y, *norms[2 * index + 2], residual=residual)
    return collectives.gather(y, rows)


def ways(sms: int) -> dict[str, LayerPlan]:
    """Return a dense model's layer plans by method, on a GPU of `sms` SMs."""
    return {
        "libraries": LayerPlan("plain"),
        "fused": LayerPlan("fused"),
        "woven": LayerPlan("woven", norm="decomposed"),
        "woven own": LayerPlan("woven", sms=sms, norm="decomposed"),
        "sequence": LayerPlan("sequence"),
    }


class Bench(Program):
    def __init__(self, a: argparse.Namespace, world: weft.World | None = None) -> None:
        super().__init__(a, "models.jsonl", world, op="models", dtype="bfloat16", mode="graph", layers=a.layers)

    def plans(self, model: Llama, tokens: int) -> dict[str, LayerPlan]:
        """Return the plans by method. If "auto" chooses a plan that is not among the others, its plan comes last."""
        auto = model.plan("auto", tokens)
        if model.config.mixture is not None:
            return {"sequence": auto}
        plans = {
            name: model.plan(plan, tokens)
            for name, plan in ways(self.world.sm_count).items()
            if name in ("libraries", *self.a.methods)
        }
        return plans if auto in plans.values() else {**plans, "auto": auto}

    @torch.no_grad()
    def run(self, name: str) -> None:
        config, lengths = MODELS[name]
        world = self.world
        model = Llama(dict(config, vocab_size=WORDS, num_hidden_layers=self.a.layers), world=world)
        batch = Batch.prefill(lengths)
        cache = Cache(model.config, world=world, slots=len(lengths), max_len=max(lengths))
        ids = torch.arange(batch.tokens, device=world.device) % WORDS
        plans = self.plans(model, batch.tokens)

        def hidden_by(plan: LayerPlan) -> Callable[[], Tensor]:
            layout = model.layout(batch, cache, plan)
            return lambda: model.hidden(ids, layout)

        todo = {method: hidden_by(plan) for method, plan in plans.items()}
        if model.config.mixture is None:
            layout = model.layout(batch, cache, "plain")
            todo[ALONE] = lambda: model.hidden(ids, layout, norm_alone)
        else:
            layout, elided = model.layout(batch, cache, "sequence"), Elided(world)
            hidden_with = functools.partial(mixture_by_libraries, model, ids, layout)
            todo = {
                "libraries": lambda: hidden_with(Collectives(world)),
                **todo,
                ALONE: elided.passes(lambda: hidden_with(elided)),
            }
        expected = todo["libraries"]().clone()
        errors = {
            method: None if method == ALONE else round(error_of(fn(), expected), 5) for method, fn in todo.items()
        }
        times = time_interleaved(todo, mode="graph", calls=1, rounds=self.a.rounds)
        auto = model.plan("auto", batch.tokens)
        taken = next(method for method, plan in plans.items() if plan == auto)
        times["auto"], errors["auto"] = times[taken], errors[taken]
        self.record(name, batch.tokens, model, times, errors, taken)

    def record(
        self, name: str, tokens: int, model: Llama, times: dict[str, float], errors: dict[str, float | None], taken: str
    ) -> None:
        """Keep the rows. taken: the method whose plan "auto" chose."""
        c, shape = model.config, dict(N=model.config.hidden_size)
        if c.mixture is None:
            shape |= dict(K=c.intermediate_size)
        else:
            shape |= dict(K=c.mixture.intermediate_size, E=c.mixture.num_experts, top_k=c.mixture.top_k)
        self.log(f"{name}: {gains(times, 'libraries')} ({taken}), errors {errors}")
        self.keep(
            dict(name=name, M=tokens, **shape, method=method, us=round(us, 1), error=errors[method], taken=taken)
            for method, us in times.items()
        )


def main() -> None:
    known = list(ways(0))
    a = options(choices=dict(only=MODELS, methods=known), only=list(MODELS), methods=known, layers=2, rounds=5)
    bench = Bench(a)
    for name in bench.cases({f"forward pass {name}": name for name in a.only}):
        with bench.tolerating(name):
            bench.run(name)
    bench.end()


if __name__ == "__main__":
    main()
