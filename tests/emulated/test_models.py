"""The decoder on emulated ranks is compared with its definition in float64: every plan, with chunks and history, woven
and unwoven.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_models import (
    TINY,
    build_llama,
    chunked,
    greedy,
    halves,
    lengthy,
    padded,
    reference,
    rotary,
    state,
)
from tests.emulated.cases_nn import emulate
from tests.gates import covered, some
from weft.models import Batch, Cache, Config, Graphs, Llama
from weft.models.cache import LENGTH_STEP, LONG_PROMPT, Part
from weft.nn.weave import LayerPlan
from weft.ops.attention.segmented import merge_partials
from weft.plans import OneShot, TwoShotPull

BF16 = 2.5e-2  # error of a single row of logits after two layers
OWN = LayerPlan("woven", sms=5)  # weft's own GEMM leaves one of six SMs free
PLANS = {"plain": "plain", "fused": "fused", "woven": "woven", "woven, own GEMM": OWN, "sequence": "sequence"}
PULLED = TwoShotPull(programs=2, warps=4).to_json()  # peers read the partial outputs without a copy
NORMS = {
    "fused, pulled": LayerPlan("fused", norm=PULLED), "woven, pulled": LayerPlan("woven", norm=PULLED),
    "woven, one shot": LayerPlan("woven", norm=OneShot(programs=2, warps=4).to_json()),
    "fused, sequential": LayerPlan("fused", norm="sequential"),
}  # fmt: skip


@covered("woven, own GEMM-2", covering="test_single_rank[woven, own GEMM]")
@pytest.mark.parametrize("ranks", some([2, 4]))
@pytest.mark.parametrize("plan", PLANS)
def test_random_chunks_of_random_requests(plan: str, ranks: int) -> None:
    small = dict(count=3) if ranks == 2 else dict(count=2, longest=7)
    assert max(emulate(lambda world: chunked(world, PLANS[plan], **small), ranks)) < BF16


@pytest.mark.parametrize("plan", some(NORMS, 2))
def test_norms_of_every_kind_read_and_write_in_place(plan: str) -> None:
    def main(world: weft.World) -> tuple[float, set[str]]:
        return chunked(world, NORMS[plan], count=3), {name for name in world._buffers if name.startswith("two-shot")}

    results = emulate(main, 2)
    assert max(error for error, _ in results) < BF16
    copied = {"two-shot all-reduce, x", "two-shot all-reduce, out"}
    assert not any(copied & buffers for _, buffers in results), (
        "partial and normalised rows must be in symmetric memory"
    )


@pytest.mark.parametrize("seed", some(range(1, 5)))
def test_random_splits_and_schedules(seed: int) -> None:
    """float16's rounding error is an eighth of bfloat16's, so a wrong token is noticed."""
    plan = LayerPlan("woven", 1 + 3 * seed)  # shorter batches are not split
    run = lambda world: chunked(world, plan, seed=seed, count=3, dtype=torch.float16)  # noqa: E731
    assert max(emulate(run, 2, seed)) < 4e-3
    assert max(emulate(run, 1, seed)) < 4e-3


@covered("0-5", covering="[5-5]")
@pytest.mark.parametrize("split", some([5, 6, 8]))
@pytest.mark.parametrize("sms", [0, 5])
def test_woven_is_bit_for_bit_its_two_halves(split: int, sms: int) -> None:
    """The batch of 5, 6 and 2 tokens is split between two requests, inside one request, and after a request's first
    token."""
    assert emulate(lambda world: halves(world, LayerPlan("woven", split, sms)), 2, split) == [0.0] * 2


@pytest.mark.gate
def test_woven_is_bit_for_bit_its_two_halves_on_four_ranks() -> None:
    assert emulate(lambda world: halves(world, LayerPlan("woven", 7), lengths=(9, 11)), 4) == [0.0] * 4


@pytest.mark.parametrize("plan", some(["woven", "sequence"]))
def test_greedy_tokens_are_the_plain_decoders(plan: str) -> None:
    assert emulate(lambda world: greedy(world, plan, "plain", steps=4), 2) == [0.0] * 2


@pytest.mark.parametrize("plan", some(["fused", "woven", "sequence"], 2))
def test_padded_layouts_are_refilled(plan: str) -> None:
    assert max(emulate(lambda world: padded(world, plan, count=3, longest=9), 2)) < BF16


@covered("(fused|woven|sequence)", covering=r"test_random_chunks_of_random_requests[\1-2]")
@pytest.mark.parametrize("plan", PLANS)
def test_single_rank(plan: str) -> None:
    assert max(emulate(lambda world: chunked(world, PLANS[plan], count=2, longest=8), 1)) < BF16


def by_tables(
    world: weft.World, qkv: torch.Tensor, part: Part, keys: torch.Tensor, values: torch.Tensor, heads: int,
    out: torch.Tensor, flash: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute attention only from the tables, as a flash kernel does."""
    d, regions = keys.shape[-1], (part.single, part.several)

    def attend() -> None:
        out.zero_()
        first_row = 0
        for region in regions:
            k, v = keys.flatten(0, 1), values.flatten(0, 1)
            assert region.cu_q[0] == 0 and region.cu_q[-1] <= region.rows
            for r in range(len(region.kv_len)):
                (lo, hi), end, start = region.cu_q[r : r + 2].tolist(), region.kv_len[r], region.kv_at[r]
                assert hi - lo <= region.max_q and end <= region.max_k
                if hi > lo and end:
                    q = qkv[first_row + lo : first_row + hi, : heads * d].view(-1, heads, d).transpose(0, 1)[None]
                    seen = torch.ones(hi - lo, int(end), dtype=torch.bool).tril(int(end) - (hi - lo))
                    keys_values = (t[start : start + end].transpose(0, 1)[None] for t in (k, v))
                    y = F.scaled_dot_product_attention(q, *keys_values, attn_mask=seen, enable_gqa=True)
                    out[first_row + lo : first_row + hi] = y[0].transpose(0, 1).flatten(1)
            first_row += region.rows

    tables = [t for r in regions for t in (r.cu_q, r.kv_at, r.kv_len) if t.numel()]
    world.call(attend, [qkv, keys, values, *tables], [out], world.current_stream())
    return out


@covered("fused", covering="[woven]")
@pytest.mark.parametrize("plan", ["fused", "woven"])
def test_the_tables_lead_to_every_requests_keys(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.models.llama.attend", by_tables)
    for seed in range(2):
        assert max(emulate(lambda world, s=seed: chunked(world, plan, seed=s), 1)) < BF16
        assert max(emulate(lambda world, s=seed: padded(world, plan, seed=s, count=3, longest=9), 1)) < BF16


@pytest.mark.parametrize("plan", some(["plain", "fused", "woven", "sequence"], 2))
def test_long_prompts_are_given_to_the_fastest_library(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition replaces the attention library here, for whole prompts and for chunks; the two partial results of
    a chunk are merged."""
    merges = []
    monkeypatch.setattr("weft.models.cache.LONG_PROMPT", 4)
    monkeypatch.setattr("weft.models.cache.LENGTH_STEP", 2)
    monkeypatch.setattr("weft.models.attention.fastest", lambda world, config: True)
    monkeypatch.setattr("weft.models.attention.merge_partials", lambda *a: merges.append(a) or merge_partials(*a))
    assert max(emulate(lambda world: lengthy(world, plan, long=6), 2)) < BF16
    assert len(merges) == 2 * TINY["num_hidden_layers"], "only the second chunk is merged, in each layer on both ranks"


def test_which_prompts_are_long() -> None:
    """A batch counts as a batch of long prompts if, in every entry with several tokens, their number is a multiple of
    the step, and if the layout is not refilled."""

    def rank(world: weft.World) -> None:
        cache = Cache(TINY, world=world, slots=4, max_len=3 * LONG_PROMPT)
        model = Llama(TINY, world=world)
        for batch, long in (
            (Batch.prefill([LONG_PROMPT]), True),
            (Batch((1, 1, LONG_PROMPT), (5, 9, LONG_PROMPT), (0, 1, 2)), True),
            (Batch.prefill([LONG_PROMPT, LONG_PROMPT - LENGTH_STEP]), False),
            (Batch.prefill([LONG_PROMPT + 1]), False),
            (Batch((LONG_PROMPT,), (1,), (0,)), False),
            (Batch.decode([LONG_PROMPT - 1]), False),
        ):
            assert [part.long for part in model.layout(batch, cache, "plain").parts] == [long], batch
        room = (LONG_PROMPT, 0, 1)
        assert not model.layout(Batch.prefill([LONG_PROMPT]), cache, "plain", room).parts[0].long

    weft.spmd(rank, 1, backend="emulated")


# -- weights and configurations ----------------------------------------------------------------------------------------


def test_rotary_scaling_and_tied_embeddings() -> None:
    config = dict(
        TINY, num_hidden_layers=1, tie_word_embeddings=True,
        rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    )  # fmt: skip
    weights = state(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    ids = torch.arange(20) * 3 % 96

    def rank(world: weft.World) -> float:
        model = Llama(config, world=world)
        assert model.load_state_dict(weights).missing_keys == []
        logits = model(ids, Batch.prefill([20]), Cache(config, world=world, slots=1, max_len=20))
        world.synchronize()
        return distance(logits, reference(config, weights, ids)[-1:])

    assert max(emulate(rank, 2)) < BF16
    plain = Config.from_hf(dict(TINY)).rotary(20, torch.device("cpu"))
    scaled = Config.from_hf(config).rotary(20, torch.device("cpu"))
    assert torch.equal(plain[:, 0], scaled[:, 0]), "the highest frequency must not change"
    assert torch.allclose(scaled[8, 15], plain[1, 15], atol=1e-6), "the lowest frequency must be eight times lower"


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)  # fmt: skip


@pytest.mark.parametrize(
    "scaling", [{}, dict(rope_type="linear", factor=4.0), LLAMA3, LLAMA3 | dict(factor=32.0, low_freq_factor=2.0)]
)
def test_rotary_positions_are_hugging_faces(scaling: dict[str, Any]) -> None:
    """With the parameters of Llama 3.1, some frequencies are kept, some are divided, and some are interpolated."""
    config = dict(TINY, head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    cos, sin = rotary(config, 3000)
    assert (Config.from_hf(config).rotary(3000, torch.device("cpu")) - torch.cat([cos, sin], 1)).abs().max() < 1e-6
    if scaling:
        plain, scaled = rotary(config | dict(rope_scaling={}), 2)[1][1].asin(), sin[1].asin()
        slower = plain / scaled  # the ratio for each frequency, at one position
        assert slower[-1] == pytest.approx(scaling["factor"])
        if scaling["rope_type"] == "llama3":
            between = (slower > 1.001) & (slower < 0.999 * scaling["factor"])
            assert slower[0] == pytest.approx(1) and between.sum() >= 3


def test_a_tied_head_is_in_the_state_dict_and_is_ignored_when_loaded() -> None:
    config = dict(TINY, tie_word_embeddings=True)
    whole = state(config) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    names = state(config).keys()

    def rank(world: weft.World) -> None:
        nested = torch.nn.ModuleDict({"m": Llama(config, world=world)})
        for model, prefix in ((nested, "m."), (nested["m"], "")):
            model.load_state_dict({prefix + k: v for k, v in whole.items()})
            full = weft.nn.full_state_dict(model)
            assert full.keys() == {prefix + k for k in names}
            assert torch.equal(full[f"{prefix}lm_head.weight"], whole["model.embed_tokens.weight"])
            model.load_state_dict(full)
            model.load_state_dict({k: v for k, v in full.items() if "lm_head" not in k})

    emulate(rank, 2)


def test_the_dtype_follows_the_weights() -> None:
    def rank(world: weft.World) -> None:
        model = build_llama(world, TINY)
        model.load_state_dict({k: v.float() for k, v in state(TINY).items()}, assign=True)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "loading must not change it"
        ids, batch, half = torch.arange(4), Batch.prefill([4]), copy.deepcopy(model).half()
        assert half.dtype == torch.float16 and model.dtype == torch.bfloat16
        cache = Cache(TINY, world=world, slots=2, max_len=8, dtype=torch.float16)
        logits = half(ids, batch, cache)
        assert logits.dtype == torch.float16
        assert distance(logits, reference(TINY, state(TINY), ids)[-1:]) < BF16
        with pytest.raises(TypeError, match="dtype torch.float32"):
            Llama(TINY, world=world, dtype=torch.float32)

    emulate(rank, 2)


def test_state_dict_round_trip() -> None:
    def rank(world: weft.World) -> None:
        whole = state(TINY)
        model = build_llama(world, TINY)
        full = weft.nn.full_state_dict(model)
        assert full.keys() == whole.keys()
        assert all(torch.equal(full[k], whole[k]) for k in whole)
        again = Llama(TINY, world=world, seed=3)
        again.load_state_dict(model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

    emulate(rank, 2)


def test_drawn_weights_agree_where_they_are_whole() -> None:
    def rank(world: weft.World) -> dict[str, torch.Tensor]:
        return dict(Llama(TINY, world=world).state_dict())

    a, b = emulate(rank, 2)
    same = {name for name in a if torch.equal(a[name], b[name])}
    assert {n for n in a if "_proj" not in n} == same
    assert a["model.layers.0.mlp.up_proj.weight"].shape == (48, 64)


def test_objects_and_dicts_are_configs() -> None:
    class Hugging:
        pass

    h = Hugging()
    h.__dict__.update(TINY, hidden_act="silu", rope_scaling=None, attention_bias=False)
    assert Config.from_hf(h) == Config.from_hf(TINY) == Config.from_hf(Config.from_hf(TINY))
    newer = {k: v for k, v in TINY.items() if k != "rope_theta"} | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    assert Config.from_hf(newer) == Config.from_hf(TINY)
    for wrong, says in (
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"), (dict(attention_bias=True), "attention_bias"),
        (dict(rope_scaling={"rope_type": "yarn"}), "'yarn' is not one of"), (dict(num_key_value_heads=3), "not a multiple"),
        (dict(hidden_size=None), "no hidden_size"), (dict(head_dim=15), "head_dim 15 is odd"),
        (dict(num_hidden_layers=0), "num_hidden_layers 0 must be at least 1"), (dict(num_key_value_heads=0), "num_key_value_heads 0"),
        (dict(num_attention_heads=0, head_dim=None), "num_attention_heads 0 must be at least 1"),
        (dict(rope_scaling={"factor": 8.0}), "has no rope_type"),
        (dict(rope_scaling={"type": "linear"}), "'linear' has no factor"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}), "no high_freq_factor, original"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            Config.from_hf({**TINY, **wrong})
    sizes = (96, 64, 96, 2, 8, 4, 16)
    assert Config(*sizes) == Config.from_hf({k: v for k, v in TINY.items() if k != "rms_norm_eps"})
    for rope, numbers, says in (("yarn", (8.0,), "'yarn' is not one of"), ("linear", (), "'linear' takes")):
        with pytest.raises(ValueError, match=says):
            Config(*sizes, rope=rope, rope_numbers=numbers)


def test_bad_input() -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(ValueError, match="num_key_value_heads 2 is not divisible by the world size 4"):
            Llama({**TINY, "num_key_value_heads": 2}, world=world)
        with pytest.raises(ValueError, match="intermediate_size 98 is not divisible by the world size 4"):
            Llama({**TINY, "intermediate_size": 98}, world=world)
        model, cache = Llama(TINY, world=world), Cache(TINY, world=world, slots=2, max_len=8)
        ids = torch.zeros(4, dtype=torch.int64)
        for batch in (Batch((4,), (5,), (0,)), Batch((4,), (0,), (2,)), Batch((), (), ())):
            with pytest.raises(ValueError, match="does not fit a cache of 2 slots of 8 tokens|empty batch"):
                model(ids[: batch.tokens], batch, cache)
        with pytest.raises(ValueError, match=r"\[3\] token ids for a layout of 4 tokens"):
            model(ids[:3], Batch((4,), (0,), (0,)), cache)
        layout = model.layout(Batch.decode([0, 3]), cache, room=(4, 4, 0))
        with pytest.raises(
            ValueError, match="does not fit a layout of 4 tokens, 4 requests of one token and 0 of several"
        ):
            layout.filling(Batch((2,), (0,), (0,)))
        with pytest.raises(ValueError, match="cannot be filled again"):
            model.layout(Batch.prefill([4]), cache).filling(Batch.prefill([4]))
        with pytest.raises(ValueError, match="needs a cache"):
            model(ids, Batch.prefill([4]))
        for plan in (None, OneShot(programs=2, warps=4), 3):
            with pytest.raises(TypeError, match='plan must be "auto", a kind or a LayerPlan'):
                model(ids, Batch.prefill([4]), cache, plan)  # type: ignore[arg-type]
        narrow = {**TINY, "intermediate_size": 48}
        with pytest.raises(ValueError, match=r"rows of whole 16-byte words; weights here are \[\(64, 12\)\]"):
            Llama(narrow, world=world).layout(Batch.prefill([4]), cache, LayerPlan("fused", sms=5))

    emulate(rank, 4)


def test_beside_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(**TINY, attn_implementation="eager")
    torch.manual_seed(0)
    hf_model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    ids = torch.arange(17) * 5 % 96
    with torch.no_grad():
        expected = hf_model.float()(ids[None]).logits[0, -1:].double()

    def rank(world: weft.World) -> float:
        model = Llama(config, world=world)
        model.load_state_dict(hf_model.state_dict())
        logits = model(ids, Batch.prefill([17]), Cache(config, world=world, slots=1, max_len=17), "woven")
        world.synchronize()
        return distance(logits, expected)

    assert max(emulate(rank, 2)) < BF16


@pytest.mark.parametrize("plan", ["plain", "woven"])
def test_ranks_given_other_ids_or_another_batch_disagree(plan: str) -> None:
    def main(world: weft.World, ids: torch.Tensor, lengths: tuple[int, ...]) -> None:
        cache = Cache(TINY, world=world, slots=2, max_len=8)
        build_llama(world, TINY)(ids, Batch.prefill(lengths), cache, plan)

    ids = torch.arange(8)
    for rank_1_ids, lengths, says in (
        (ids.flip(0), (3, 5), r"rank 0: decoder ids=\[0, 1, 2.*; rank 1: decoder ids=\[7, 6, 5"),
        (ids, (5, 3), r"rank 0: decoder batch=.*; rank 1: decoder batch="),
        (torch.arange(6), (3, 3), r"rank 0: decoder tokens=8 .*; rank 1: decoder tokens=6 "),
    ):
        batches = [(ids, (3, 5)), (rank_1_ids, lengths)]
        with pytest.raises(weft.Mismatch, match=says):
            emulate(lambda world, batches=batches: main(world, *batches[world.rank]), 2)


def test_ids_of_padded_rows_may_differ() -> None:
    def main(world: weft.World) -> torch.Tensor:
        model, batch = build_llama(world, TINY), Batch.prefill([3])
        layout = model.layout(batch, Cache(TINY, world=world, slots=1, max_len=8), "plain", (5, 0, 1))
        return model(torch.tensor([1, 2, 3, world.rank, world.rank]), layout)

    rank_0_logits, rank_1_logits = emulate(main, 2)
    assert torch.equal(rank_0_logits, rank_1_logits)


def test_graphs_serve_batches_up_to_their_largest_size() -> None:
    """Five single tokens and two tokens of a prompt fit in a batch of eight, although five single tokens alone are
    padded to eight."""

    def main(world: weft.World) -> bool:
        cache = Cache(TINY, world=world, slots=6, max_len=8)
        graphs = Graphs(build_llama(world, TINY), cache, sizes=(4, 8), several=1, plan="fused")
        batch = Batch((1,) * 5 + (2,), (0,) * 6, tuple(range(6)))
        return bool(graphs(torch.arange(7), batch).isfinite().all())

    assert all(weft.spmd(main, 2, backend="emulated"))


def test_graphs_of_a_full_budget_are_few() -> None:
    """A scheduler passes all decoding requests, and chunks of prompts up to a constant number of tokens."""
    budget, sizes = 16, (4, 8, 16)

    def main(world: weft.World) -> None:
        cache = Cache(TINY, world=world, slots=17, max_len=20)
        graphs = Graphs(build_llama(world, TINY), cache, sizes=sizes, several=2, plan="plain")
        for singles in range(budget + 1):
            rest = budget - singles
            lengths = (1,) * singles + tuple(n for n in (rest - rest // 2, rest // 2) if n)
            graphs.prepare(torch.arange(budget), Batch(lengths, (0,) * len(lengths), tuple(range(len(lengths)))))
        assert len(graphs._captured) <= 2 * len(sizes) + 1
        assert {tokens for tokens, *_ in graphs._captured} == {budget}
        graphs._captured.clear()
        graphs.prepare(torch.arange(8), Batch((1, 1, 1, 5), (0,) * 4, (0, 1, 2, 3)))
        assert [tokens for tokens, *_ in graphs._captured] == [8], (
            "the captured batch must be as small as the tokens allow"
        )

    emulate(main, 1)


def test_graphs_refuse_foreign_batches() -> None:
    def main(world: weft.World) -> None:
        model, cache = build_llama(world, TINY), Cache(TINY, world=world, slots=6, max_len=8)
        for sizes, several in (((), 2), ((8, 4), 2), ((4, 4), 2), ((0, 4), 2), ((4,), -1)):
            with pytest.raises(ValueError, match="sizes must rise"):
                Graphs(model, cache, sizes=sizes, several=several)
        graphs = Graphs(model, cache, sizes=(4, 8), several=2)
        for ids in (torch.tensor([7]), torch.arange(4), torch.arange(3)[None]):
            with pytest.raises(ValueError, match="token ids for a batch of 3 tokens"):
                graphs(ids, Batch.decode([0, 0, 0]))

    emulate(main, 2)


def test_tensors_made_in_inference_mode_can_be_used_outside_it() -> None:
    def main(world: weft.World) -> None:
        model = build_llama(world, TINY)
        with torch.inference_mode():
            cache = Cache(TINY, world=world, slots=2, max_len=8)
            graphs = Graphs(model, cache, sizes=(8,), several=2)
            inference_logits = graphs(torch.arange(4), Batch.prefill([4])).clone()
            layout = model.layout(Batch.prefill([4]), cache, room=(8, 0, 2))
        assert not layout.table.is_inference() and not cache.keys.is_inference()
        layout.filling(Batch.prefill([5]))()
        assert torch.equal(graphs(torch.arange(4), Batch.prefill([4])), inference_logits)

    emulate(main, 2)


@pytest.mark.parametrize(
    "changes", [dict(num_key_value_heads=8), dict(num_key_value_heads=2, head_dim=32), dict(num_hidden_layers=3)]
)
def test_a_cache_of_another_config_is_refused(changes: dict[str, int]) -> None:
    def main(world: weft.World) -> None:
        model, cache = build_llama(world, TINY), Cache({**TINY, **changes}, world=world, slots=2, max_len=8)
        ids, batch = torch.arange(4), Batch.prefill([4])
        layout = Llama({**TINY, **changes}, world=world).layout(batch, cache)
        for call in (
            lambda: model(ids, batch, cache), lambda: model(ids, layout),
            lambda: Graphs(model, cache, sizes=(4,), several=1)(ids, batch),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="a cache of another config: its keys are"):
                call()

    emulate(main, 2)


def test_a_cache_of_another_dtype_is_refused() -> None:
    def main(world: weft.World) -> None:
        cache = Cache(TINY, world=world, slots=2, max_len=8, dtype=torch.float16)
        with pytest.raises(ValueError, match=r"a cache of torch.float16 for a model of torch.bfloat16"):
            build_llama(world, TINY)(torch.arange(2), Batch.prefill([2]), cache)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("kind", ["gemma2", "olmoe", "phi3"])
def test_models_with_other_norms_biases_or_experts_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="only llama, mistral, qwen2"):
        Config.from_hf(dict(vars(Config.from_hf(TINY)), model_type=kind))
