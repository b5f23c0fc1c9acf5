"""The tests run `weft.moe` with every plan: its errors, its operator under torch.compile, and the module, whose
parameters have the names of a checkpoint.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_moe import Model, at_random
from weft import moe
from weft.ops.moe.call import Layer, MoeCall
from weft.ops.moe.expert_parallel.op import MOE
from weft.plans import Dispatched, LowLatency
from weft.scale import SMALL_DISPATCHED

BOUND = 1.2e-2  # a result is rounded twice to bfloat16


def test_the_same_bits_by_any_schedule() -> None:
    def rank(world: weft.World) -> torch.Tensor:
        layer = Layer(6, 4, 2, 32, 24, torch.bfloat16)
        w = Model(world, layer, False).local_weights
        x, weights = draw(world.rank, 6, 32).to(world.device), torch.rand(6, 2).to(world.device)
        ids = at_random(0, world.rank, 6, layer, world.size).int().to(world.device)
        weights.copy_(draw(7 + world.rank, 6, 2, dtype=torch.float32).abs())
        y = moe.moe(x, ids, weights, w.w13, w.w2, world=world)
        world.synchronize()
        return y.clone()

    first_run = weft.spmd(rank, 2, backend="emulated")
    for seed in range(1, 4):
        for a, b in zip(first_run, weft.spmd(rank, 2, backend="emulated", seed=seed), strict=True):
            assert torch.equal(a, b)


def test_compiled_whole() -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(5, 4, 2, 32, 24, torch.bfloat16)
        w = Model(world, layer, False).local_weights
        x, weights = draw(world.rank, 5, 32), draw(3, 5, 2, dtype=torch.float32).abs()
        ids = at_random(0, world.rank, 5, layer, world.size).int()
        fn = torch.compile(
            lambda x: moe.moe(x, ids, weights, w.w13, w.w2, world=world) * 2, backend="aot_eager", fullgraph=True
        )
        actual, expected = fn(x), moe.moe(x, ids, weights, w.w13, w.w2, world=world) * 2
        world.synchronize()
        assert torch.equal(actual, expected)

    torch._dynamo.reset()
    weft.spmd(rank, 2, backend="emulated")


def test_errors_quote_the_arguments() -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(4, 4, 2, 32, 24, torch.bfloat16)
        w = Model(world, layer, False).local_weights
        x, ids, weights = draw(1, 4, 32), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)

        def wrong(error: type[Exception], match: str, **changes: Any) -> None:
            arguments = dict(x=x, ids=ids, weights=weights, w13=w.w13, w2=w.w2) | changes
            with pytest.raises(error, match=match):
                moe.moe(**arguments, world=world)

        wrong(TypeError, "ids .*int64.* must be torch.int32", ids=ids.long())
        wrong(ValueError, r"ids .* must be \[T, k\]", ids=ids[:3])
        wrong(TypeError, "weights .* must be torch.float32", weights=weights.bfloat16())
        wrong(ValueError, "activation 'relu' is not one of", activation="relu")
        wrong(ValueError, r"w13 must be \[2, .*weft.moe.pack", w13=w.w13[:, :-1])
        wrong(ValueError, "w13 .* is not what weft.moe.pack makes", w13=w.w13.flatten(1, 3))  # as in a checkpoint
        wrong(ValueError, "b13 .* is not what weft.moe.pack makes", b13=w.w13[..., 0].flatten(1, 3))
        wrong(TypeError, "w2 .*float16.* must be torch.bfloat16", w2=w.w2.half())
        wrong(ValueError, r"shared .* must be \[4, 32\]", shared=x[:2])
        wrong(ValueError, "k 9 of ids", ids=torch.zeros(4, 9, dtype=torch.int32), weights=torch.zeros(4, 9))
        wrong(ValueError, "rows .* must name 2 ranks", rows=[4])
        wrong(ValueError, "out= has no gradient", x=x.clone().requires_grad_(), out=torch.empty_like(x))
        wrong(ValueError, "keep 'all' is not one of", x=x.clone().requires_grad_(), keep="all")

    weft.spmd(rank, 2, backend="emulated")


def test_ranks_that_disagree() -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(4, 4, 1 + world.rank, 32, 24, torch.bfloat16)
        w = Model(world, layer, False).local_weights
        k = layer.k
        with pytest.raises(weft.Mismatch, match="k="):
            moe.moe(draw(1, 4, 32), torch.zeros(4, k, dtype=torch.int32), torch.zeros(4, k), w.w13, w.w2, world=world)

    weft.spmd(rank, 2, backend="emulated")


def checkpoint(kind: str, e: int, h: int, i: int) -> dict[str, torch.Tensor]:
    w13, w2 = draw(1, e, 2 * i, h) * 0.2, draw(2, e, h, i) * 0.2
    state = {"mlp.gate.weight": draw(3, e, h)}
    for n in range(e):
        gate, up = w13[n].chunk(2)
        if kind == "mixtral":
            parts = dict(w1=gate, w3=up, w2=w2[n])
        elif kind == "qwen":
            parts = dict(gate_proj=gate, up_proj=up, down_proj=w2[n])
        else:
            parts = {}
        state |= {f"mlp.experts.{n}.{name}.weight": t for name, t in parts.items()}
    if kind == "stacked":
        state |= {"mlp.experts.gate_up_proj": w13, "mlp.experts.down_proj": w2}
    if kind == "gpt_oss":
        interleaved = torch.stack(w13.chunk(2, 1), 2).flatten(1, 2)  # gate and up rows alternate
        state = {"mlp.router.weight": state["mlp.gate.weight"], "mlp.router.bias": draw(4, e)} | {
            "mlp.experts.gate_up_proj": interleaved.transpose(1, 2),
            "mlp.experts.gate_up_proj_bias": torch.zeros(e, 2 * i), "mlp.experts.down_proj": w2.transpose(1, 2),
            "mlp.experts.down_proj_bias": torch.zeros(e, h),
        }  # fmt: skip
    return state


@pytest.mark.parametrize("parallel", ["expert", "tensor"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen", "stacked", "gpt_oss"])
def test_the_module_loads_a_checkpoint(kind: str, parallel: str) -> None:
    e, h, i, k = 4, 32, 32, 2
    state, oss = checkpoint(kind, e, h, i), kind == "gpt_oss"
    w13, w2 = draw(1, e, 2 * i, h) * 0.2, draw(2, e, h, i) * 0.2

    def rank(world: weft.World) -> float:
        shared = nn.Linear(h, h, bias=False).bfloat16().to(world.device).requires_grad_(False)
        layer = moe.MoE(
            h, i, e, k, world=world, activation="gpt_oss" if oss else "swiglu", bias=oss, shared=shared,
            scoring="softmax_after" if oss else "softmax", parallel=parallel,
        )  # fmt: skip
        layer.load_experts(state, "mlp.")
        x = draw(50 + world.rank, 6, h)
        with torch.no_grad():
            y = layer(x.to(world.device))
        world.synchronize()
        logits = (x.float() @ state[f"mlp.{'router' if oss else 'gate'}.weight"].float().t()).bfloat16()
        if oss:
            logits = (logits.float() + state["mlp.router.bias"].float()).bfloat16()
        score = logits.float() if oss else logits.float().softmax(-1)
        top, ids = score.topk(k, -1)
        weights = top.softmax(-1) if oss else top / top.sum(-1, keepdim=True)
        expected = shared(x).float()
        for t in range(6):
            for slot in range(k):
                n = ids[t, slot]
                gate, up = (x[t].float() @ w13[n].float().t()).chunk(2)
                if oss:
                    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                else:
                    inner = torch.nn.functional.silu(gate) * up
                expected[t] += weights[t, slot] * (inner @ w2[n].float().t())
        return distance(y, expected)

    assert max(weft.spmd(rank, 2, backend="emulated")) < 2e-2


def test_the_module_names_missing_weights() -> None:
    def rank(world: weft.World) -> None:
        layer = moe.MoE(32, 24, 4, 2, world=world)
        state = checkpoint("qwen", 4, 32, 24)
        only = {"mlp.gate.weight": state["mlp.gate.weight"]}
        for partial_state, prefix, says in (
            ({}, "", r"router.weight \(or gate.weight\) is missing; the checkpoint is empty"),
            (state, "mpl.", r"mpl.router.weight .* nothing that begins with 'mpl.', but mlp.gate.weight, "),
            (only, "mlp.", r"mlp.experts.gate_up_proj \(or experts one by one\) .* has mlp.gate.weight, .."),
            (
                {n: t for n, t in state.items() if "experts.1.up" not in n},
                "mlp.",
                "mlp.experts.1.up_proj.weight is missing",
            ),
        ):
            with pytest.raises(KeyError, match=says):
                layer.load_experts(partial_state, prefix)
        with pytest.raises(ValueError, match="must be"):
            layer.load_experts(checkpoint("qwen", 4, 40, 24), "mlp.")
        assert "experts=2 of 4" in repr(layer) and state
        with pytest.raises(ValueError, match="num_experts 5 is not divisible"):
            moe.MoE(32, 24, 5, 2, world=world)
        with pytest.raises(ValueError, match="intermediate_size 25 is not divisible"):
            moe.MoE(32, 25, 5, 2, world=world, parallel="tensor")
        with pytest.raises(ValueError, match="parallel 3 is not"):
            moe.MoE(32, 24, 4, 2, world=world, parallel=3)
        with pytest.raises(ValueError, match="placement, max_rows: only for whole experts, not where 2"):
            moe.MoE(32, 24, 4, 2, world=world, parallel="tensor", placement=torch.arange(4), max_rows=9)
        with pytest.raises(ValueError, match="count_received: only for whole"):
            moe.MoE(32, 24, 4, 2, world=world, parallel=2, count_received=True)
        assert "columns over 2" in repr(moe.MoE(32, 24, 5, 2, world=world, parallel="tensor"))

    weft.spmd(rank, 2, backend="emulated")


def test_a_plan_of_another_op_is_refused() -> None:
    def rank(world: weft.World) -> None:
        w = Model(world, Layer(4, 4, 1, 32, 24, torch.bfloat16), False).local_weights
        operands = draw(1, 4, 32), torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), w.w13, w.w2
        with pytest.raises(ValueError, match="one_shot"):
            moe.moe(*operands, world=world, plan="one_shot")
        moe.moe(*operands, world=world, plan=SMALL_DISPATCHED)

    weft.spmd(rank, 2, backend="emulated")


def test_one_rank_runs_by_a_plan_that_a_graph_holds() -> None:
    def main(world: weft.World) -> None:
        layer = Layer(8, 12, 2, 32, 24, torch.bfloat16)
        for asked, kind in (("auto", Dispatched), ("dispatched", Dispatched), ("low_latency", LowLatency)):
            assert isinstance(MOE.choose(world, MoeCall(8, (8,), layer), asked, True), kind)

    weft.spmd(main, 1, backend="emulated")
