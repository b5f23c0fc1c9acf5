"""Woven mixtures of experts of Transformers (`weft.hf`), in the emulator and over gloo, give the tokens and logits
of the original model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import weft
from tests.gates import covered, some
from tests.integrations.cases_transformers import Compared, by_taken_routes, compared, routed
from tests.integrations.test_hf import IDS, SIZES, run
from weft import hf
from weft.integrations.transformers import forwards
from weft.integrations.transformers import moe as hf_moe

transformers = pytest.importorskip("transformers")
BF = torch.bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Qwen3Moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4, attention_bias=True),
}  # fmt: skip


def tiny_mixture(kind: str, dtype: torch.dtype = BF, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("_bias"):  # norms of ones and biases of zeros would hide what is left out
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.mul_(4)
    return model.to(dtype)


def logits_of(kind: str, ranks: int, **changes: Any) -> list[torch.Tensor]:
    def main(world: weft.World) -> torch.Tensor:
        with torch.no_grad():
            return hf.weave(tiny_mixture(kind, **changes), world)(IDS).logits.float()

    return run(main, ranks)


def check_logits(kind: str, logits: list[torch.Tensor], **changes: Any) -> None:
    with torch.no_grad():
        exact = tiny_mixture(kind, torch.float32, **changes)(IDS).logits
        bf16_logits = tiny_mixture(kind, **changes)(IDS).logits.float()
    assert (logits[0] == logits[1]).all()
    error, usual = ((x - exact).norm() / exact.norm() for x in (logits[0], bf16_logits))
    assert error < max(1.5 * usual.item(), 1e-2), (error, usual)


def beside_the_model(kind: str, two_parts: int | None = None, **changes: Any) -> Compared:
    """Compare a woven model with the original model on 21 tokens, which are sharded by rows or run in two parts."""
    ids = torch.randint(1, 90, (1, 21), generator=torch.Generator().manual_seed(4))

    def main(world: weft.World) -> Compared:
        with torch.no_grad():
            return compared(tiny_mixture(kind, **changes), ids, world, two_parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "SHARDED_FROM", 8)
        return run(main)[0]


@covered("(Mixtral|GptOss)-2", covering=r"[\1-None]")
@pytest.mark.parametrize("two_parts", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_close_by_the_used_experts_which_are_near_ties(kind: str, two_parts: int | None) -> None:
    comparison = beside_the_model(kind, two_parts)
    assert comparison.of_all < 2e-2 and comparison.of_token < 3e-2 and comparison.unexplained <= 1, comparison


@pytest.mark.parametrize("wrong", ["expert", "weight"])
def test_a_token_at_a_wrong_expert_is_detected(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token has a different second expert, which the original model's forward pass then uses too, or a different
    weight."""

    def routes(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = hf_gate(logits, **options)
        if wrong == "expert":
            ids[3, 1] = logits[3].argmin()
        else:
            weights[3, 1] += 0.5
        return ids, weights

    hf_gate = hf_moe.gate
    monkeypatch.setattr(hf_moe, "gate", routes)
    comparison = beside_the_model("Mixtral", num_hidden_layers=1)
    assert (comparison.unexplained > 1 and comparison.moved) if wrong == "expert" else comparison.of_token > 3e-2, (
        comparison
    )


def test_used_routes_distinguish_a_near_tie_from_stale_memory() -> None:
    """With the routes that were used, logits are close even if a route differs from the model's own. Logits of
    different tokens are far off, and so is a route to the worst expert."""

    def main(world: weft.World) -> list[float]:
        model, ids = tiny_mixture("Mixtral", num_hidden_layers=1), IDS[:1]
        with torch.no_grad(), routed(model) as calls:
            logits, stale = model(ids).logits, model(ids.flip(1)).logits
            taken = calls[0].ids
        worst = taken.clone()
        worst[0, 1] = torch.nn.functional.linear(calls[0].x[0], calls[0].router.weight).argmin()
        with torch.no_grad():
            results = [(logits, taken), (stale, taken), (logits, worst)]
            return [by_taken_routes(model, ids, world, actual, [routes]).error() for actual, routes in results]

    same, stale, wrong = run(main, 1)[0]
    assert same == 0.0 and stale > 0.1 and wrong > 1


@covered("(Mixtral|GptOss)-False", covering=r"[\1-True]")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_to_rounding(kind: str, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if sharded:  # 18 tokens
        monkeypatch.setattr(forwards, "SHARDED_FROM", 8)
    check_logits(kind, logits_of(kind, 2))


def test_an_odd_number_of_tokens_is_split_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "SHARDED_FROM", 8)

    def main(world: weft.World) -> list[torch.Tensor]:
        model = tiny_mixture("Qwen3Moe", num_hidden_layers=1)
        with torch.no_grad():
            return [model(IDS[:1]).logits, hf.weave(model, world)(IDS[:1]).logits]

    for expected, actual in run(main):
        assert (actual - expected).abs().max() <= 2**-4 * expected.abs().max()


def test_dense_layers_and_recorded_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "SHARDED_FROM", 8)

    def main(world: weft.World) -> list[Any]:
        model = tiny_mixture("Qwen3Moe", mlp_only_layers=[0], intermediate_size=96)
        with torch.no_grad():
            expected = model(IDS, output_hidden_states=True, output_router_logits=True)
            actual = hf.weave(model, world)(IDS, output_hidden_states=True, output_router_logits=True)
        assert "without experts" in hf.report(model)
        return [expected, actual]

    for expected, actual in run(main):
        assert (actual.logits - expected.logits).abs().max() <= 2**-4 * expected.logits.abs().max()
        assert [h.shape for h in actual.hidden_states] == [h.shape for h in expected.hidden_states]
        assert [r.shape for r in actual.router_logits] == [r.shape for r in expected.router_logits] == [(18, 6)]
        assert (actual.router_logits[0] - expected.router_logits[0]).abs().max() <= 2**-4 * expected.router_logits[
            0
        ].abs().max()


@covered("Mixtral-False", covering="[GptOss-False]")
@pytest.mark.parametrize(("kind", "static"), [("Mixtral", False), ("Qwen3Moe", True), ("GptOss", False)])
def test_generate_gives_the_models_own_tokens(kind: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks share the prompt by rows, and all ranks compute the later tokens."""
    monkeypatch.setattr(forwards, "SHARDED_FROM", 8)
    ids = IDS[1:] if kind == "GptOss" else IDS  # the two best tokens of its first row are within rounding
    cache_options = dict(cache_implementation="static") if static else {}
    wanted = dict(max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids), **cache_options)
    layers = 2 if kind == "GptOss" else 1  # one of each kind of attention
    expected = tiny_mixture(kind, num_hidden_layers=layers).generate(ids, **wanted)

    def main(world: weft.World) -> torch.Tensor:
        return hf.weave(tiny_mixture(kind, num_hidden_layers=layers), world).generate(ids, **wanted)

    for tokens in run(main):
        assert (tokens == expected).all()


def test_unweave_puts_everything_back_and_the_report_names_the_layers() -> None:
    def main(world: weft.World) -> None:
        model = tiny_mixture("GptOss")
        before, own_logits = {k: v.clone() for k, v in model.state_dict().items()}, model(IDS).logits
        hf.weave(model, world)
        report = hf.report(model)
        assert "GptOssMLP" in report and "whole experts" in report and "q_proj" in report and "lm_head" in report
        after = model.state_dict()
        assert list(after) == list(before) and all((after[k] == before[k]).all() for k in before)
        assert (hf.unweave(model)(IDS).logits == own_logits).all()
        assert not [m for m in model.modules() if {"forward", "sinks"} & vars(m).keys()]

    run(main)


def test_what_cannot_be_woven_is_named() -> None:
    def main(world: weft.World) -> None:
        olmoe = transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)
        clamped, without_experts = tiny_mixture("GptOss"), tiny_mixture("Mixtral")
        clamped.model.layers[1].mlp.experts.limit = 5.0
        without_experts.model.layers[1].mlp.experts = torch.nn.Identity()
        for model, says in (
            (transformers.OlmoeForCausalLM(olmoe).bfloat16(), "OlmoeDecoderLayer"),
            (clamped, r"layers.1.mlp.experts has alpha and limit \(1.702, 5.0\)"),
            (without_experts, "layers.1.mlp.experts is torch.nn.modules.linear.Identity"),
            (tiny_mixture("Qwen3Moe", torch.float32), "float32"),
            (tiny_mixture("Mixtral", num_local_experts=5), "5 experts do not divide by 2 ranks"),
            (tiny_mixture("Mixtral", hidden_act="gelu"), "gelu"),
        ):
            with pytest.raises(weft.Unsupported, match=says):
                hf.weave(model, world)

    run(main)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_under_transformers_own_parallelism(kind: str) -> None:
    """With `experts_implementation="weft"`, each of two ranks holds half of the experts, numbered from 0. The next
    number represents all experts of the other rank, as in Transformers' router."""
    from transformers.integrations.moe import ExpertsInterface

    def main(world: weft.World) -> None:
        model = tiny_mixture(kind)
        experts = model.model.layers[0].mlp.experts
        count, k = experts.num_experts // world.size, 2
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(7, SIZES["hidden_size"], generator=generator).to(BF)
        ids = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:k] for _ in range(7)])
        weights = torch.rand(7, k, generator=generator).to(BF)
        with torch.no_grad():
            expected = experts(x, ids, weights).float()
            for name, p in list(experts.named_parameters()):
                setattr(experts, name, torch.nn.Parameter(p.detach().split(count)[world.rank].clone()))
            local_ids = ids - world.rank * count
            local_ids = local_ids.masked_fill((local_ids < 0) | (local_ids >= count), count)
            forward = hf_moe.experts_forward(lambda: world)
            parts = world.exchange(forward(experts, x, local_ids, weights).float())
            none = forward(experts, x, torch.full_like(ids, count), weights)
        assert (sum(parts) - expected).norm() <= 2e-2 * expected.norm() and not none.any()
        assert all(part.norm() > 0.1 * expected.norm() for part in parts)
        hf.register_experts(world)
        assert "weft" in ExpertsInterface()

    run(main)


WRITES = {
    "copy_": lambda p: p.copy_(p.flip(0)),
    "another tensor": lambda p: torch.nn.Parameter(p.flip(0)),
    "another tensor by way of .data": lambda p: setattr(p, "data", p.flip(0)),
    "freed and made again": lambda p: setattr(p, "data", p.data.flip(0).clone()),
}


@covered("GptOss-(.*)", covering=r"[Mixtral-\1]")
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_experts_that_are_written_are_laid_out_anew(kind: str, how: str) -> None:
    """This holds for each of their tensors, even if the allocator places a new tensor at the address of an old one."""

    def main(world: weft.World) -> None:
        experts = tiny_mixture(kind).model.layers[0].mlp.experts
        x = torch.randn(7, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).to(BF)
        ids, weights = torch.arange(14).view(7, 2) % experts.num_experts, torch.rand(7, 2).to(BF)
        forward = hf_moe.experts_forward(lambda: world)
        with torch.no_grad():
            for p in experts.parameters():
                p.normal_(std=0.1)
            for name in [n for n, _ in experts.named_parameters()]:
                before = forward(experts, x, ids, weights)
                written = WRITES[how](getattr(experts, name))
                if isinstance(written, torch.nn.Parameter):
                    setattr(experts, name, written)
                actual, expected = forward(experts, x, ids, weights), experts(x, ids, weights).float()
                assert (actual - expected).norm() <= 2e-2 * expected.norm() and not torch.equal(actual, before), name
                laid_out = vars(experts)["_weft_experts"].w13
                assert torch.equal(forward(experts, x, ids, weights), actual)
                assert vars(experts)["_weft_experts"].w13 is laid_out

    weft.spmd(main, 1, backend="emulated")


def test_experts_that_transformers_has_split_already() -> None:
    """Transformers has split whole experts over the ranks, or the columns of all experts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def split(experts: Any, rank: int, columns: bool) -> None:
        gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        if columns:
            halves = [half.chunk(2, 1)[rank] for half in gate_up.chunk(2, 1)]
            parts = torch.cat(halves, 1), down.chunk(2, 2)[rank].contiguous()
            placements: Any = _StridedShard(dim=1, split_factor=2), Shard(2)
        else:
            parts, placements = (gate_up.chunk(2)[rank], down.chunk(2)[rank]), (Shard(0), Shard(0))
        for name, part, place, whole in zip(
            ("gate_up_proj", "down_proj"), parts, placements, (gate_up, down), strict=True
        ):
            placed = DTensor.from_local(part, mesh, [place], run_check=False, shape=whole.shape, stride=whole.stride())
            setattr(experts, name, torch.nn.Parameter(placed))

    def main(world: weft.World, columns: bool) -> list[torch.Tensor]:
        model = tiny_mixture("Qwen3Moe", num_hidden_layers=1)
        with torch.no_grad():
            expected = model(IDS).logits
            for layer in model.model.layers:
                split(layer.mlp.experts, world.rank, columns)
            hf.weave(model, world)
            assert ("columns of all experts" in hf.report(model)) == columns
            return [expected, model(IDS).logits]

    try:
        for columns, least in ((False, 1000), (True, 1000), (True, 8)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forwards, "SHARDED_FROM", least)
                for expected, actual in run(functools.partial(main, columns=columns)):
                    assert (actual - expected).abs().max() <= 2**-4 * expected.abs().max(), (columns, least)
    finally:
        dist.destroy_process_group()


@covered("Mixtral-2", covering="[Qwen3Moe-2]")
@pytest.mark.parametrize("ranks", some([2, 4]))
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_two_parts_match_one_part(kind: str, ranks: int) -> None:
    """The experts of 18 tokens run in two parts, and one part's experts run during the other's norm: a read that is too
    early is a race. A dense layer may be between two such layers, and a pass that records router logits runs in one
    part."""
    changes = dict(mlp_only_layers=[0], intermediate_size=96) if kind == "Qwen3Moe" else {}
    if ranks == 4:
        changes |= dict(num_key_value_heads=4) | (dict(num_experts=8) if kind == "Qwen3Moe" else {})

    def main(world: weft.World) -> list[torch.Tensor]:
        model, options = (
            tiny_mixture(kind, **changes),
            dict(max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(IDS)),
        )
        with torch.no_grad():
            one = hf.weave(model, world, two_parts=None)(IDS).logits, model.generate(IDS, **options)
            two = hf.weave(hf.unweave(model), world, two_parts=2)(IDS).logits, model.generate(IDS, **options)
            recorded = model(IDS, output_router_logits=True)
        assert "from 2 tokens on in two parts" in hf.report(model)
        assert all(logits.shape[0] == 18 for logits in recorded.router_logits)
        return [*one, *two, recorded.logits]

    for one, tokens, two, again, recorded in run(main, ranks, seed=1):
        assert (one - two).abs().max() <= 2**-5 * one.abs().max() and (tokens == again).all()
        assert (recorded - one).abs().max() <= 2**-5 * one.abs().max()
