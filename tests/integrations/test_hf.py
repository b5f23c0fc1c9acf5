"""Woven Transformers models (`weft.hf`) in the emulator give the tokens and logits of the original model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.gates import covered
from weft import hf
from weft.backends.emulated import EmulatedBackend
from weft.integrations.transformers import forwards
from weft.nn.weave import LayerPlan, Table

transformers = pytest.importorskip("transformers")
BF = torch.bfloat16
SIZES = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=95,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Mistral": dict(sliding_window=None), "Qwen2": {}, "Qwen3": {}}


def tiny_model(kind: str, dtype: torch.dtype = BF, **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS.get(kind, {}), **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # norms of ones and biases of zeros would hide an omitted norm or bias
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.mul_(4)  # logits that differ
    return model.to(dtype)


def alike(actual: torch.Tensor, expected: torch.Tensor, model: Any) -> bool:
    """Return whether tokens [B, S] equal the model's own up to a first token whose two best logits are within 4 ulps
    of bfloat16."""
    with torch.no_grad():
        best = model(expected).logits.float().topk(2).values
    for row, position in enumerate((actual == expected).long().cumprod(1).sum(1).tolist()):
        if (
            position < expected.shape[1]
            and best[row, position - 1, 0] - best[row, position - 1, 1] > 4 * 2**-8 * best[row, position - 1, 0].abs()
        ):
            return False
    return True


IDS = torch.randint(1, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def run(fn: Any, ranks: int = 2, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", **options)


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in KINDS), ("Mistral", dict(sliding_window=4))])
def test_logits_are_the_models_own_to_rounding(kind: str, changes: dict[str, Any]) -> None:
    with torch.no_grad():
        exact = tiny_model(kind, torch.float32, **changes)(IDS).logits
        bf16_logits = tiny_model(kind, **changes)(IDS).logits.float()

    def main(world: weft.World) -> torch.Tensor:
        with torch.no_grad():
            return hf.weave(tiny_model(kind, **changes), world)(IDS).logits.float()

    logits = run(main)
    assert (logits[0] == logits[1]).all()
    error, usual = ((x - exact).norm() / exact.norm() for x in (logits[0], bf16_logits))
    assert error < max(1.3 * usual.item(), 2e-3), (error, usual)


@pytest.mark.parametrize(("plan", "counts"), [("auto", True), ("one_shot", False)])
def test_residuals_held_by_rows_and_whole_give_the_same(
    monkeypatch: pytest.MonkeyPatch, plan: str, counts: bool
) -> None:
    """If hidden states are recorded, they are whole on every rank. Calls with low-latency rows allocate no symmetric
    memory for their operands and results."""

    def main(world: weft.World) -> list[Any]:
        model = hf.weave(tiny_model("Llama"), world, plan=plan)
        with torch.no_grad():
            seen = [model(IDS).logits]
            monkeypatch.setattr("weft.nn.decoder_layer.shards_residual", lambda *_: True)
            world.exchange(None)
            seen.append(model(IDS).logits)
            recorded = model(IDS, output_hidden_states=True)
        assert any(name.startswith("decoder") for name in world._buffers) == counts
        return [*seen, recorded.logits, [h.shape for h in recorded.hidden_states]]

    whole, by_rows, recorded, shapes = run(main)[0]
    assert (whole - by_rows).abs().max() <= 2**-6 * whole.abs().max() and (recorded == whole).all()
    assert shapes == [(2, 9, 64)] * 3


@covered("Llama", covering="[Qwen2]")
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_sharded_tokens_give_what_replicated_ones_give(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers, which no pass shards on its own, process 9 tokens, which two ranks share unevenly, and 18
    tokens."""
    monkeypatch.setattr("weft.integrations.transformers.forwards.SHARDED_FROM", 2)

    def main(world: weft.World) -> list[torch.Tensor]:
        model = hf.weave(tiny_model(kind), world)
        with torch.no_grad():
            replicated = [model(ids).logits for ids in (IDS, IDS[:1])]
            model._weft.shards_tokens = True
            sharded = [model(ids).logits for ids in (IDS, IDS[:1])]
            recorded = model(IDS, output_hidden_states=True)
        assert not torch.equal(replicated[0], sharded[0]), "rounded at other places"
        assert [h.shape for h in recorded.hidden_states] == [(2, 9, 64)] * 3
        return [*replicated, *sharded]

    for one, odd, sharded, sharded_odd in run(main):
        assert (one - sharded).abs().max() <= 2**-5 * one.abs().max()
        assert (odd - sharded_odd).abs().max() <= 2**-5 * odd.abs().max()


@covered("Qwen3", covering="[Llama]")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_two_parts_match_one_part(kind: str) -> None:
    """The caller's stream is ordered with the second stream: a read that is too early is a race."""

    def main(world: weft.World) -> list[torch.Tensor]:
        model, options = tiny_model(kind), dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(IDS))
        with torch.no_grad():
            one = hf.weave(model, world, two_parts=None)(IDS).logits, model.generate(IDS, **options)
            two = hf.weave(hf.unweave(model), world, two_parts=2)(IDS).logits, model.generate(IDS, **options)
            recorded = model(IDS, output_hidden_states=True)
            assert "from 2 tokens on in two parts" in hf.report(model)
        assert len(recorded.hidden_states) == 3
        return [*one, *two, recorded.logits]

    for one, tokens, two, again, recorded in run(main, seed=1):
        assert (one - two).abs().max() <= 2**-6 * one.abs().max() and (tokens == again).all()
        assert (recorded - one).abs().max() <= 2**-6 * one.abs().max()


@pytest.mark.parametrize("left_out", ["wait", "second stream's wait"])
def test_two_parts_without_an_order_of_streams_are_a_race(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: weft.World) -> None:
        with torch.no_grad():
            hf.weave(tiny_model("Llama"), world, two_parts=2)(IDS)

    if left_out == "wait":
        monkeypatch.setattr("weft.nn.weave.Weave.wait", lambda *_: None)
    else:
        wait_event = EmulatedBackend.wait_event
        side = lambda self, stream: stream == self.side_stream("weave")  # noqa: E731
        monkeypatch.setattr(
            EmulatedBackend, "wait_event", lambda self, s, e: None if side(self, s) else wait_event(self, s, e)
        )
    with pytest.raises(weft.WeftError, match="race"):
        run(main)


def test_two_parts_by_default_where_they_were_measured_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Table(
        ((1, LayerPlan("fused")), (4, LayerPlan("woven")), (6, LayerPlan("fused")),
         (8, LayerPlan("woven", norm="two_shot")), (9, LayerPlan("sequence")))
    )  # fmt: skip

    def main(world: weft.World) -> list[tuple[Any, Any]]:
        chosen = []
        for known, asked in ((Table(), "auto"), (measured, "auto"), (measured, 3), (measured, None)):
            monkeypatch.setattr("weft.nn.weave.table", lambda *_, known=known: known)
            world.exchange(None)
            done = hf.weave(tiny_model("Llama"), world, two_parts=asked)._weft
            world.exchange(None)
            chosen.append((done.two_parts, done.two_parts_plan))
        with pytest.raises(ValueError, match="two_parts"):
            hf.weave(tiny_model("Llama"), world, two_parts="often")
        return chosen

    assert run(main)[0] == [(None, "auto"), (8, "two_shot"), (3, "two_shot"), (None, "auto")]


@pytest.mark.parametrize("static", [False, True])
def test_generate_gives_the_models_own_tokens(static: bool) -> None:
    cache_options = dict(cache_implementation="static") if static else {}
    wanted = dict(max_new_tokens=6, do_sample=False, **cache_options)
    expected = tiny_model("Qwen3").generate(IDS, attention_mask=torch.ones_like(IDS), **wanted)

    def main(world: weft.World) -> torch.Tensor:
        return hf.weave(tiny_model("Qwen3"), world).generate(IDS, attention_mask=torch.ones_like(IDS), **wanted)

    for tokens in run(main):
        assert alike(tokens, expected, tiny_model("Qwen3"))


def test_ranks_draw_the_same_tokens() -> None:
    """All ranks draw the first rank's tokens, although each rank has a separate generator; beams agree too."""

    def main(world: weft.World) -> list[Any]:
        model = hf.weave(tiny_model("Llama", num_hidden_layers=1), world)
        drawn = dict(max_new_tokens=5, do_sample=True, temperature=4.0, attention_mask=torch.ones_like(IDS))
        drawn_tokens = [model.generate(IDS, **drawn, **options).tolist() for options in ({}, {}, dict(num_beams=2))]
        assert drawn_tokens[0] != drawn_tokens[1]
        hf.unweave(model)
        assert "generate" not in vars(model)
        return drawn_tokens

    first_rank, second_rank = run(main)
    assert first_rank == second_rank


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_a_cache_of_other_heads_is_refused(kind: str) -> None:
    """In three cases caches contain all heads: the original model cached the prompts, prefix tuning is used, or a cache
    is allocated early."""
    changes = dict(num_local_experts=4) if kind == "Mixtral" else {}

    def main(world: weft.World) -> None:
        model = tiny_model(kind, num_hidden_layers=1, **changes)
        filled, early = transformers.DynamicCache(), transformers.StaticCache(config=model.config, max_cache_len=16)
        early.early_initialization(2, 2, 16, BF, torch.device("cpu"))
        with torch.no_grad():
            model(IDS, past_key_values=filled)
            hf.weave(model, world)
            for cache, length in ((filled, 9), (early, 16)):
                says = (
                    rf"keys \[2, 2, {length}, 16\] of 2 heads; each of 2 ranks of this woven model has 1 of 2 key-value"
                )
                with pytest.raises(ValueError, match=says):
                    model(IDS, past_key_values=cache)

    run(main)


def test_attention_weights_of_one_ranks_heads_are_refused() -> None:
    def main(world: weft.World) -> None:
        model = tiny_model("Llama", num_hidden_layers=1)
        model.set_attn_implementation("eager")
        hf.weave(model, world)
        with torch.no_grad():
            for config, asked in ((False, True), (True, None)):
                model.config.output_attentions = config
                with pytest.raises(weft.Unsupported, match="output_attentions: .* its own heads"):
                    model(IDS, output_attentions=asked)

    run(main)


def test_continuous_batching_on_an_emulated_rank_names_alternatives() -> None:
    """The thread of continuous batching would only log the error and return empty lists."""

    def main(world: weft.World) -> None:
        model = hf.weave(tiny_model("Llama", num_hidden_layers=1), world)
        with pytest.raises(weft.Unsupported, match="thread of its own.*call generate"):
            model.generate_batch([[1, 2]], max_new_tokens=2)
        assert "generate_batch" not in vars(hf.unweave(model))

    run(main, 1)


def test_the_report_names_what_the_model_has() -> None:
    def main(world: weft.World) -> None:
        llama, qwen = (hf.report(hf.weave(tiny_model(kind, num_hidden_layers=1), world)) for kind in ("Llama", "Qwen3"))
        assert "norms of heads" in qwen and "norms of heads" not in llama and "rotary in one launch" in llama
        assert ("by a GEMM each" in llama) == (world.size > 1) == ("in one GEMM" not in llama)

    run(main, 1)
    run(main, 2)


def test_unweave_puts_everything_back() -> None:
    def main(world: weft.World) -> None:
        model = tiny_model("Llama")
        before, own_logits = {k: v.clone() for k, v in model.state_dict().items()}, model(IDS).logits
        hf.weave(model, world)
        assert "Qwen" not in (report := hf.report(model)) and "all_reduce_rms_norm" in report and "lm_head" in report
        after = model.state_dict()
        assert list(after) == list(before) and all((after[k] == before[k]).all() for k in before)
        with pytest.raises(ValueError, match="woven already"):
            hf.weave(model, world)
        assert (hf.unweave(model)(IDS).logits == own_logits).all()
        assert not [m for m in model.modules() if "forward" in vars(m)]
        with pytest.raises(ValueError, match="is not woven"):
            hf.report(model)

    run(main)


class Linear(torch.nn.Linear):
    """A linear layer whose class has the name of torch's, like peft's Linear."""


def test_what_cannot_be_woven_is_named() -> None:
    def main(world: weft.World) -> None:
        gemma = transformers.GemmaConfig(**SIZES)
        adapted = tiny_model("Llama")
        adapted.model.layers[1].mlp.down_proj = Linear(96, 64)
        for model, says in (
            (transformers.GemmaForCausalLM(gemma), r"GemmaDecoderLayer.*weft.hf.styles\(\)"),
            (adapted, "layers.1.mlp.down_proj is tests.integrations.test_hf.Linear, not a plain nn.Linear"),
            (tiny_model("Llama", torch.float32), "float32"),
            (tiny_model("Llama", hidden_act="gelu"), "gelu"),
            (tiny_model("Llama", num_key_value_heads=1), "1 key-value heads"),
        ):
            with pytest.raises(weft.Unsupported, match=says):
                hf.weave(model, world)
        with pytest.raises(ValueError, match="weave it with a World"):
            hf.weave(tiny_model("Llama"))
        model = hf.weave(tiny_model("Llama"), world)
        with pytest.raises(ValueError, match=r"woven model computes no gradient.*torch.no_grad\(\)"):
            model(IDS)
        model.requires_grad_(False)(IDS)
        with pytest.raises(ValueError, match="all_reduce_rms_norm: plan 'fusd'"):
            hf.weave(hf.unweave(model), world, plan="fusd")

    run(main)


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_worlds(ranks: int) -> None:
    heads = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    with torch.no_grad():
        own_logits = tiny_model("Llama", **heads)(IDS).logits.float()

    def main(world: weft.World) -> torch.Tensor:
        with torch.no_grad():
            return hf.weave(tiny_model("Llama", **heads), world)(IDS).logits.float()

    for logits in run(main, ranks):
        assert (logits - own_logits).norm() < 0.02 * own_logits.norm()


def test_the_example_runs_emulated() -> None:
    example = Path(__file__).parents[2] / "examples" / "hf_generate.py"
    run = subprocess.run([sys.executable, example, "--emulated"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.startswith("[1, 2, 3, 4, 5, 6, 7, 8, "), run.stderr[-2000:]


def test_no_mask_where_every_token_attends_to_all_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers creates a mask during the capture of a CUDA graph, although only padding needs a mask."""
    modeling = transformers.models.llama.modeling_llama
    own_mask = modeling.create_causal_mask

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor:
        attention_mask = own_mask(*args, **kwargs)
        return torch.ones(9, 9, dtype=torch.bool).tril()[None, None] if attention_mask is None else attention_mask

    monkeypatch.setattr(modeling, "create_causal_mask", mask)
    monkeypatch.setattr(forwards, "has_dense_masks", lambda _: True)

    def main(world: weft.World) -> list[bool]:
        model, masks = tiny_model("Llama"), []
        note = lambda _, args, kwargs: masks.append(kwargs.get("attention_mask") is not None)  # noqa: E731
        model.model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            expected = model(IDS).logits
            hf.weave(model, world)
            actual = model(IDS).logits
            padded = torch.ones_like(IDS)
            padded[0, :3] = 0
            model(IDS, attention_mask=padded)
        assert (actual - expected).abs().max() <= 2**-5 * expected.abs().max()
        return masks

    assert run(main) == [[True, False, True]] * 2


def test_tokens_keep_their_bits_in_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence runs alone and in a batch; eager attention computes each sequence separately. A library would split K
    if there were few rows."""
    linear = torch.nn.functional.linear

    def library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[:-1].numel() > 9:
            return linear(x, weight, bias)
        (left, right), (upper, lower) = x.chunk(2, -1), weight.chunk(2, -1)
        return linear(left, upper, bias) + linear(right, lower)

    monkeypatch.setattr(torch.nn.functional, "linear", library)
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    batch = torch.randint(1, 90, (3, 9), generator=torch.Generator().manual_seed(1))

    def main(world: weft.World) -> None:
        model = hf.weave(tiny_model("Llama", attn_implementation="eager"), world)
        with torch.no_grad():
            alone, together = (model.base_model(ids).last_hidden_state for ids in (batch[:1], batch))
        world.synchronize()
        assert torch.equal(alone[0], together[0])

    run(main)


def test_experts_are_refused_where_rows_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    model = tiny_model("Mixtral", num_local_experts=4)

    def main(world: weft.World) -> None:
        with pytest.raises(weft.Unsupported, match="Mixtral.* on a batch-invariant World"):
            hf.weave(model, world)

    run(main, 1)
