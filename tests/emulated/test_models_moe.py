"""Decoders with experts, biases and norms of the heads are compared with Transformers' logits and with the
definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.emulated.cases import distance
from tests.emulated.cases_models import DENSE, MIXTURES, build_llama, chunked, halves, padded, reference, state
from tests.emulated.cases_nn import emulate
from tests.gates import covered, some
from weft.backends.emulated import EmulatedBackend
from weft.models import Batch, Cache, Config, Graphs, Llama
from weft.models.config import Mixture
from weft.nn.weave import LayerPlan

HALF, FLOAT16 = 4e-3, torch.float16  # float16's rounding error is an eighth of bfloat16's, so a wrong token is noticed
CLASSES = {
    "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip


def of_transformers(config: dict[str, Any]) -> Any:
    """Return Transformers' model with the weights of `state`, in float64, and its configuration."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name = CLASSES[config["model_type"]]
    hf_config = getattr(transformers, f"{name}Config")(
        **config, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{name}ForCausalLM")(hf_config).double().eval()
    model.load_state_dict({k: v.double() for k, v in state(config, dtype=FLOAT16).items()})
    return model


@pytest.mark.parametrize("kind", [*DENSE, *MIXTURES])
def test_the_definition_is_transformers(kind: str) -> None:
    """The definition, which is the reference of every other test, equals Transformers up to the float32 rounding with
    which Transformers computes norms, positions and the routers' softmax."""
    config = (DENSE | MIXTURES)[kind]
    model, ids = of_transformers(config), torch.arange(23) * 5 % 96
    with torch.no_grad():
        expected = model(ids[None]).logits[0].double()
    assert distance(reference(config, state(config, dtype=FLOAT16), ids), expected) < 2e-5


@pytest.mark.parametrize("kind", MIXTURES)
def test_prompt_and_decode_steps_beside_transformers(kind: str) -> None:
    """Two ranks process a prompt of nine tokens, then two single tokens, so one rank has no tokens."""
    hf_model, ids = of_transformers(MIXTURES[kind]), torch.arange(11) * 5 % 96
    with torch.no_grad():
        expected = hf_model(ids[None]).logits[0, 8:].double()

    def rank(world: weft.World) -> float:
        model = Llama(hf_model.config, world=world, dtype=FLOAT16)
        assert model.load_state_dict(hf_model.state_dict()).missing_keys == []
        cache = Cache(hf_model.config, world=world, slots=1, max_len=11, dtype=FLOAT16)
        logits = [model(ids[:9], Batch.prefill([9]), cache).clone()]
        logits += [model(ids[position : position + 1], Batch.decode([position]), cache).clone() for position in (9, 10)]
        world.synchronize()
        return distance(torch.cat(logits), expected)

    assert max(emulate(rank, 2)) < HALF


@covered("qwen2_moe", covering="test_prompt_and_decode_steps_beside_transformers[qwen2_moe]")
@pytest.mark.parametrize("kind", some(MIXTURES, 2))
def test_random_chunks_of_random_requests(kind: str) -> None:
    run = lambda world: chunked(world, "auto", MIXTURES[kind], count=2, longest=7, dtype=FLOAT16)  # noqa: E731
    assert max(emulate(run, 2)) < HALF


@pytest.mark.gate
@pytest.mark.parametrize("kind", MIXTURES)
def test_random_chunks_on_four_ranks(kind: str) -> None:
    run = lambda world: chunked(world, "auto", MIXTURES[kind], count=2, longest=7, dtype=FLOAT16)  # noqa: E731
    assert max(emulate(run, 4)) < HALF


@covered("(plain|sequence)-qwen3", covering=r"[\1-qwen2]")
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("plan", ["plain", "woven", "sequence"])
def test_biases_and_norms_of_heads_by_every_plan(plan: str, kind: str) -> None:
    run = lambda world: chunked(world, plan, DENSE[kind], count=2, longest=9, dtype=FLOAT16)  # noqa: E731
    assert max(emulate(run, 2)) < HALF


def test_padded_layouts_are_refilled() -> None:
    run = lambda world: padded(world, "auto", MIXTURES["qwen2_moe"], count=2, longest=5, sizes=(4, 8))  # noqa: E731
    assert max(emulate(run, 2)) < 8 * HALF


def test_padding_is_routed_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention leaves arbitrary values, even NaN, in padded rows. The padded rows are routed to no expert and change
    no token's result."""
    config, routed = MIXTURES["mixtral"], []

    def kept(x: torch.Tensor, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        routed.append((ids, kwargs["world"].rank))
        return weft.moe.moe(x, ids, *args, **kwargs)

    monkeypatch.setattr("weft.nn.split.moe", kept)

    def rank(world: weft.World) -> float:
        model = build_llama(world, config, dtype=FLOAT16)
        cache, ids = Cache(config, world=world, slots=1, max_len=8, dtype=FLOAT16), torch.arange(3)
        model.model.embed_tokens.weight[95] = float("nan")
        layout = model.layout(Batch.prefill([3]), cache, room=(6, 0, 1))
        logits = model(torch.tensor([0, 1, 2, 95, 95, 95]), layout)
        world.synchronize()
        return distance(logits, reference(config, state(config, dtype=FLOAT16), ids)[-1:])

    assert max(emulate(rank, 2)) < HALF
    assert all(((ids < 0) == (rank == 1)).all() for ids, rank in routed) and len(routed) == 4


# -- rows on every rank, in one part and in two ------------------------------------------------------------------------
COLUMNS = {**MIXTURES, "mixtral": MIXTURES["mixtral"] | dict(intermediate_size=64)}  # 4 ranks have 16-byte rows
SPLITS = ["expert", "tensor"]


@covered("(?:plain|fused)-tensor", covering="[woven-tensor]")
@pytest.mark.parametrize("parallel", SPLITS)
@pytest.mark.parametrize("plan", ["plain", "fused", "woven"])
def test_rows_on_every_rank_in_random_chunks(plan: str, parallel: str) -> None:
    """Single tokens are not woven, and some batches have a part with only padding."""
    kind = "qwen2_moe" if plan == "woven" else "qwen3_moe"
    run = lambda world: chunked(  # noqa: E731
        world, plan, COLUMNS[kind], count=2, longest=7, dtype=FLOAT16, parallel=parallel
    )
    assert max(emulate(run, 2)) < HALF


@covered("tensor", covering="[expert]")
@pytest.mark.parametrize("parallel", SPLITS)
def test_woven_and_padded_layouts_are_refilled(parallel: str) -> None:
    run = lambda world: padded(  # noqa: E731
        world, "woven", MIXTURES["qwen2_moe"], count=2, longest=5, sizes=(4, 8), parallel=parallel
    )
    assert max(emulate(run, 2)) < 8 * HALF


@covered("mixtral-tensor", covering="[mixtral-expert]")
@pytest.mark.parametrize("parallel", SPLITS)
@pytest.mark.parametrize("kind", some(MIXTURES))
def test_woven_is_bit_for_bit_its_two_halves(kind: str, parallel: str) -> None:
    plan = LayerPlan("woven", 5)
    assert emulate(lambda world: halves(world, plan, COLUMNS[kind], parallel=parallel), 2) == [0.0] * 2


def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GEMMs and the attention of libraries, whose sums depend on the number of rows, by definitions whose
    sums do not."""

    def linear(backend: Any, x: torch.Tensor, w: torch.Tensor, bias: None, stream: Any, out: Any = None) -> Any:
        out = backend.empty((x.shape[0], w.shape[0]), x.dtype) if out is None else out
        backend.call(lambda: out.copy_(x.double() @ w.double().t()), [x, w], [out], stream)
        return out

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, enable_gqa: bool = False) -> torch.Tensor:
        ends = [k.shape[2]] if attn_mask is None else attn_mask.sum(1).tolist()
        row_outputs = (sdpa(q[:, :, i : i + 1].double(), *(t[:, :, :n].double() for t in (k, v)), enable_gqa=enable_gqa) for i, n in enumerate(ends))  # fmt: skip
        return torch.cat(list(row_outputs), 2).to(q.dtype)

    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr("weft.backends.base.Backend.linear", linear)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)


# Whole experts and split experts both run in a woven step and in a plain step; the layer around them is the same.
@covered("2-tensor", covering="[2-expert]")
@pytest.mark.parametrize("parallel", SPLITS)
@pytest.mark.parametrize("ranks", some([2, 4]))
def test_a_woven_pass_matches_an_unwoven_one_to_the_bit(
    ranks: int, parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test compares all plans of the norm except "sequential", in which NCCL's order of summation over ranks may
    depend on the number of rows. Two requests have nine and eight tokens; one of them is in both parts."""
    by_rows(monkeypatch)
    config, ids = COLUMNS["mixtral"] | dict(num_hidden_layers=1), torch.arange(17) * 5 % 96
    norms = ["two_shot", "one_shot", "decomposed", "sequential"] if ranks == 2 else ["auto"]

    def rank(world: weft.World) -> None:
        model = build_llama(world, config, parallel=parallel)

        def logits(plan: LayerPlan) -> torch.Tensor:
            cache = Cache(config, world=world, slots=2, max_len=9)
            result = model(ids, Batch.prefill([9, 8]), cache, plan).clone()
            world.synchronize()
            return result

        for norm in norms:
            expected = logits(LayerPlan("fused", norm=norm))
            for split in (0, 5):
                actual = logits(LayerPlan("woven", split, norm=norm))
                if norm == "sequential":
                    assert distance(actual, expected) < 8 * HALF
                else:
                    assert torch.equal(actual, expected), (norm, split)

    emulate(rank, ranks)


def test_experts_beside_a_norm_wait_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all rows on every rank, the experts' ops involve only this rank. "auto" chooses "sequence", whose ops
    involve all ranks."""
    sizes: list[int] = []

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        sizes.append(kwargs["world"].size)
        return weft.moe.moe(*args, **kwargs)

    for module in ("weft.models.mixture", "weft.nn.split"):
        monkeypatch.setattr(f"{module}.moe", seen)

    def rank(world: weft.World) -> None:
        model, ids = build_llama(world, MIXTURES["mixtral"]), torch.arange(6)
        for plan in ("woven", "auto"):
            model(ids, Batch.prefill([6]), Cache(MIXTURES["mixtral"], world=world, slots=1, max_len=6), plan)

    emulate(rank, 2)
    assert sizes.count(1) == 2 * 2 * 2 and sizes.count(2) == 2 * 2, (
        "one call per layer, part and rank; one per layer and rank"
    )


def test_a_part_that_is_read_too_early_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_event = EmulatedBackend.wait_event
    side = lambda self, stream: stream == self.side_stream("weave")  # noqa: E731
    monkeypatch.setattr(
        EmulatedBackend, "wait_event", lambda self, s, e: None if side(self, s) else wait_event(self, s, e)
    )

    def rank(world: weft.World) -> None:
        cache = Cache(MIXTURES["mixtral"], world=world, slots=1, max_len=6)
        build_llama(world, MIXTURES["mixtral"])(torch.arange(6), Batch.prefill([6]), cache, "woven")

    with pytest.raises(weft.WeftError, match="race"):
        emulate(rank, 2)


def rank_over_gloo(world: weft.World) -> tuple[float, float]:
    """Compare woven decoders with whole experts and with split columns with the definition."""
    config = COLUMNS["qwen2_moe"]
    runs = (chunked(world, "woven", config, count=2, longest=7, dtype=FLOAT16, parallel=p) for p in SPLITS)
    whole, columns = runs
    return whole, columns


def test_woven_over_gloo() -> None:
    assert max(map(max, weft.spmd(rank_over_gloo, 2, backend="gloo"))) < HALF


# -- weights and configurations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parallel"), [*((kind, "expert") for kind in (*DENSE, *MIXTURES)), ("qwen2_moe", "tensor")]
)
def test_state_dict_round_trip(kind: str, parallel: str) -> None:
    config = (DENSE | MIXTURES)[kind]
    whole = state(config)

    def rank(world: weft.World) -> None:
        model = build_llama(world, config, parallel=parallel)
        full = weft.nn.full_state_dict(model)
        assert full.keys() == whole.keys()
        assert all(torch.equal(full[k], whole[k]) for k in whole)
        again = Llama(config, world=world, seed=3, parallel=parallel)
        again.load_state_dict(model.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

    emulate(rank, 2)


@pytest.mark.parametrize("kind", MIXTURES)
def test_checkpoints_with_experts_one_by_one(kind: str) -> None:
    config, one_by_one = MIXTURES[kind], {}
    block, names = ("block_sparse_moe", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp", ("gate_proj", "up_proj", "down_proj"))  # fmt: skip
    for name, t in state(config).items():
        place, separator, tensor = name.partition(".experts.")
        place = place.replace(".mlp", f".{block}") if ".mlp" in place and separator + tensor + block != "mlp" else place
        for e, part in enumerate(t if separator else ()):
            projections = zip(names[:2], part.chunk(2), strict=True) if tensor == "gate_up_proj" else [(names[2], part)]
            one_by_one |= {f"{place}.experts.{e}.{n}.weight": p for n, p in projections}
        if not separator:
            one_by_one[place] = t

    def rank(world: weft.World) -> None:
        model, expected = Llama(config, world=world), build_llama(world, config)
        model.load_state_dict(one_by_one)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
        with pytest.raises(RuntimeError, match="experts.gate_up_proj"):
            model.load_state_dict({k: v for k, v in state(config).items() if "gate_up_proj" not in k})

    emulate(rank, 2)


def test_configs_with_experts() -> None:
    small = MIXTURES["qwen3_moe"] | dict(mlp_only_layers=None, decoder_sparse_step=2, num_hidden_layers=4)
    mixture = Config.from_hf(small).mixture
    assert mixture == Mixture(8, 2, 32, True, 0, (0, 2)), "every second layer has experts, starting with the second"
    assert Config.from_hf(MIXTURES["mixtral"]).mixture == Mixture(4, 2, 48)
    assert Config.from_hf(MIXTURES["qwen2_moe"]).mixture == Mixture(8, 3, 40, False, 72)
    assert Config.from_hf(DENSE["qwen2"] | dict(sliding_window=4096, use_sliding_window=False)).qkv_bias
    for wrong, says in (
        (dict(num_experts_per_tok=9), "top_k 9 must be from 1 to the 8 experts"), (dict(num_experts=None), "config has no num_local_experts"),
        (dict(moe_intermediate_size=0), "intermediate_size must be at least 1"),
        (dict(sliding_window=64, use_sliding_window=True), "sliding_window=64 is not computed"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            Config.from_hf(MIXTURES["qwen3_moe"] | wrong)


def test_bad_input() -> None:
    def rank(world: weft.World) -> None:
        config = MIXTURES["mixtral"]
        model, cache = Llama(config, world=world), Cache(config, world=world, slots=1, max_len=8)
        for plan in (LayerPlan("fused", sms=2), LayerPlan("woven", sms=2)):
            with pytest.raises(ValueError, match="experts' GEMMs take all SMs"):
                model(torch.arange(4), Batch.prefill([4]), cache, plan)
            with pytest.raises(ValueError, match="experts' GEMMs take all SMs"):
                Graphs(model, cache, sizes=(4,), several=1, plan=plan)(torch.arange(4), Batch.prefill([4]))
        for wrong, parallel, says in (
            (config | dict(num_local_experts=3), "expert", "num_experts 3 is not divisible by the world size 2"),
            (config | dict(intermediate_size=47), "tensor", "intermediate_size 47 is not divisible by the 2 ranks"),
            (config, "columns", "'columns' is not"),
            (DENSE["qwen3"], "tensor", "no experts to split"),
        ):
            with pytest.raises(ValueError, match=says):
                Llama(wrong, world=world, parallel=parallel)

    emulate(rank, 2)
