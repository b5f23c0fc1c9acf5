"""Check woven mixtures of experts (`weft.hf`) on GPUs against Transformers' own expert parallelism in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch

import weft
from tests.emulated.cases import distance
from tests.gpu.gpu_hf import BOUND, captured, ids_of, replayed, written
from tests.integrations.cases_transformers import by_taken_routes, compared, routed
from weft import hf
from weft.integrations.transformers.forwards import SHARDED_FROM
from weft.op import Op
from weft.plans import Plan

BF = torch.bfloat16
SIZES = dict(
    vocab_size=1024, hidden_size=512, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=1023, num_experts_per_tok=2,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(num_experts=16, moe_intermediate_size=384, intermediate_size=768, norm_topk_prob=True),
    "Mixtral": dict(num_local_experts=8, intermediate_size=768, sliding_window=None),
    "GptOss": dict(num_local_experts=8, intermediate_size=768, sliding_window=128),
}


def loaded(world: weft.World, kind: str) -> Any:
    """Return a model whose experts Transformers has split over all ranks; its random weights are the same every
    time."""
    import transformers
    from transformers.distributed import DistributedConfig

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind], dtype=BF)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    with_ep = dict(ep_size=world.size) if hasattr(DistributedConfig, "ep_size") else dict(enable_expert_parallel=True)
    split = DistributedConfig(tp_size=world.size, **with_ep)
    transformers.logging.set_verbosity_error()  # an empty checkpoint lacks only this parameter
    transformers.logging.disable_progress_bar()
    model = cls.from_pretrained(None, config=config, state_dict={}, dtype=BF, distributed_config=split)
    return model.to(world.device).eval()


@torch.no_grad()
def forward(world: weft.World, kind: str, two_parts: int | None = None) -> float:
    """Run few tokens, which all ranks hold, and many tokens, sharded unevenly or in two parts. Compare each token's
    logits with those of the original model for the experts that the woven model used, and check that rounding explains
    the choice of experts."""
    model, worst = loaded(world, kind), 0.0
    for shape in ((2, 5), (1, 1027)):
        ids = ids_of(world, *shape)
        assert (ids.numel() >= SHARDED_FROM) == (shape[0] == 1)
        comparison = compared(model, ids, world, two_parts)
        if not world.rank:
            print(f"hf {kind} {list(shape)}: {comparison}", flush=True)
        worst = max(worst, comparison.error())
    return worst


@contextmanager
def eager_plans() -> Iterator[None]:
    """Make captures use the plans of eager calls."""
    choose = Op.choose

    def eager(self: Any, world: weft.World, call: Any, asked: str | Plan, capturing: bool) -> Plan:
        return choose(self, world, call, asked, False)

    with mock.patch.object(Op, "choose", eager):
        yield


@torch.no_grad()
def graph(world: weft.World, two_parts: int | None = None) -> float:
    """Return the distance between a CUDA graph's replays, each with different tokens, and Transformers' own model with
    the graph's routes, and check that rounding explains these routes. Plans in graphs and in eager calls round in
    different places, which may decide between nearly equal scores of a router. A graph that reads stale memory gives
    logits that are far off, or routes that rounding does not explain."""
    model, ids = hf.weave(loaded(world, "Qwen3Moe"), world, two_parts=two_parts), ids_of(world, 1, 1027)
    with routed(model) as calls:
        replay, logits = captured(model, ids, world)  # two eager passes and the capture
        taken = [call.ids for call in calls[-len(calls) // 3 :]]
    calls.clear()
    itself, worst = loaded(world, "Qwen3Moe"), 0.0
    for i in range(3):
        ids.copy_((ids * 7 + i) % 1000 + 2)
        replay.replay()
        comparison = by_taken_routes(itself, ids, world, logits, taken, two_parts)
        eager = distance(logits, model(ids, use_cache=False).logits)
        if not world.rank:
            print(f"hf mixture in a graph, replay {i}: {comparison}; off eager calls by {eager:.4f}", flush=True)
        worst = max(worst, comparison.error())
    world.synchronize()
    return worst


def graph_by_eager_plans(world: weft.World) -> float:
    """Return the distance between a graph and eager calls, both with the plans of eager calls; the distance is 0,
    because a plan gives the same bits every time."""
    with eager_plans():
        return replayed(hf.weave(loaded(world, "Qwen3Moe"), world), ids_of(world, 1, 1027), world)


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    if find_spec("transformers") is None:
        return
    for kind in KINDS:
        yield f"hf {kind}", BOUND, partial(forward, world, kind)
        yield f"hf {kind} in two parts", BOUND, partial(forward, world, kind, 2)
    yield "hf mixture in a graph", BOUND, partial(graph, world)
    yield "hf mixture in a graph, in two parts", BOUND, partial(graph, world, 2)
    yield "hf mixture in a graph, by the plans of eager calls", 0.0, partial(graph_by_eager_plans, world)
    yield "hf mixture written", BOUND, lambda: written(loaded(world, "Qwen3Moe"), ids_of(world, 1, 64), world)
