"""Passes that run whole layers in two parts are tested on stand-ins for vLLM's classes: attention with a cache of keys,
batches whose requests are split, and the engines and models that do not support such passes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.integrations import test_vllm_start as starts
from tests.integrations import vllm_standin as standin
from tests.integrations.vllm_standin import HEADS, DecoderLayer, Gemma2Layer, H, Model, ScaledLayer, SparseMlp
from weft.integrations.vllm import compare, plugin, served, start, woven
from weft.integrations.vllm.row_norm_column import WovenLayers
from weft.integrations.vllm.twin import Passes
from weft.integrations.vllm.woven import AttentionParts, WovenPass
from weft.plans import GemmTile, Sequential

SLOTS, NAME = 64, "attention"
# Requests as (tokens of this pass, tokens with those in the cache): a prompt; a decode, a prompt's later chunk and a prompt.
PROMPT, MIXED = [(24, 24)], [(1, 9), (8, 14), (12, 12)]


class CachedAttention(nn.Module):
    """Attention over the slots of each request, which returns NaN for padding."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.cache, self.rows = torch.empty(2, SLOTS, d, dtype=standin.BF), list[int]()

    def fill(self) -> None:
        self.cache.copy_(torch.randn(self.cache.shape, generator=torch.Generator().manual_seed(3)))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        context = standin.get_forward_context()
        self.rows.append(len(q))
        slots, out = context.slot_mapping[NAME], torch.full_like(v, float("nan"))
        self.cache[0, slots[slots >= 0]], self.cache[1, slots[slots >= 0]] = k[slots >= 0], v[slots >= 0]
        batch = context.attn_metadata[NAME].batch
        starts = batch.query_start_loc_cpu.tolist()
        for begin, end, length, table in zip(starts, starts[1:], batch.seq_lens.tolist(), batch.slots, strict=False):
            keys, values = self.cache[:, table[:length]].float()
            last = torch.arange(length - (end - begin), length)[:, None]
            scores = (q[begin:end].float() @ keys.t()).masked_fill(torch.arange(length) > last, float("-inf"))
            out[begin:end] = (scores.softmax(1) @ values).to(v.dtype)
        return out


class CachedBlock(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.qkv_proj = standin.QKVParallelLinear(seed, 3 * HEADS, H)
        self.attn, self.o_proj = (
            CachedAttention(HEADS // self.qkv_proj.tp_size),
            standin.RowParallelLinear(seed + 1, H, HEADS),
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.chunk(3, -1)
        output, _ = self.o_proj(self.attn(q + positions[:, None].to(q.dtype) * 0.01, k, v))
        return output


class CachedLayer(DecoderLayer):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.self_attn = CachedBlock(seed)


MODELS: dict[str, Any] = {
    "dense": lambda: Model(CachedLayer),
    "experts": lambda: Model(functools.partial(CachedLayer, mlp=SparseMlp)),
    "gemma": lambda: Model(functools.partial(CachedLayer, norm=standin.GemmaRMSNorm), standin.GemmaRMSNorm),
}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.served_by_plugin(monkeypatch):
        monkeypatch.setattr(plugin, "untimed", lambda passes: [(1, passes.max_tokens, WovenLayers())])
        plugin.register()
        yield


def loaded(make: Any, **changes: Any) -> tuple[Any, Passes | None]:
    model = standin.BaseModelLoader().load_model(vllm_config=standin.config(make, **changes), model_config=None)
    return model, plugin.models[-1].passes


def attached(passes: Passes) -> standin.Builder:
    """Return the metadata builder of an engine whose passes are woven."""
    assert passes.woven is not None, passes.unwoven
    builder = standin.Builder(standin.FullAttentionSpec(), [NAME], None, None)
    passes.woven.attach(SimpleNamespace(attn_groups=[[standin.AttentionGroup(builder)]]))
    return builder


def one_pass(model: Any, builder: standin.Builder, requests: Sequence[tuple[int, int]], **changes: Any) -> torch.Tensor:
    """Run a pass of the batch on a new cache, as vLLM's runner does."""
    for layer in model.layers:
        layer.self_attn.attn.fill()
    width = max(length for _, length in requests)
    tables = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[: len(requests) * width].view(-1, width)
    starts = torch.tensor([0, *(new for new, _ in requests)]).cumsum(0)
    tokens = int(starts[-1])
    batch = standin.Batch(starts, torch.tensor([length for _, length in requests]), tables, tokens)
    for name, value in changes.items():
        setattr(batch, name, value)
    context = standin.get_forward_context()
    context.attn_metadata = {NAME: builder.build(common_prefix_len=0, common_attn_metadata=batch)}
    slots = [table[length - new : length] for table, (new, length) in zip(tables, requests, strict=True)]
    context.slot_mapping = {NAME: torch.cat(slots)}
    positions = torch.cat([torch.arange(length - new, length) for new, length in requests])
    ids = torch.randint(0, 32, (tokens,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        return model(ids, positions, None)


def cached(model: Any) -> torch.Tensor:
    return torch.stack([layer.self_attn.attn.cache.float() for layer in model.layers])


def attended(model: Any) -> list[int]:
    """Return the numbers of tokens for which the first layer's attention ran, and clear the record."""
    rows = model.layers[0].self_attn.attn.rows
    copy = list(rows)
    rows.clear()
    return copy


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("requests", [PROMPT, MIXED], ids=["prompt", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_pass_in_two_parts_computes_the_same(name: str, requests: list[tuple[int, int]]) -> None:
    """A pass in two parts gives the results of the twin's whole pass, with a split inside each request and between two
    requests. The mixed batch is padded to 24 tokens."""

    def main(world: weft.World) -> None:
        world.backend.reference = (name, requests) != ("dense", MIXED)  # type: ignore[attr-defined]
        model, passes = loaded(MODELS[name])
        assert passes is not None
        builder = attached(passes)
        passes.serve([(1, passes.max_tokens, Sequential())])
        expected = one_pass(model, builder, requests)
        keys, tokens = cached(model), attended(model)
        passes.serve([(1, passes.max_tokens, WovenLayers(programs=world.size - 1))])
        for cut in (5, 9) if requests is MIXED else (9,):
            passes.woven._cuts[24] = cut  # type: ignore[union-attr]
            actual = one_pass(model, builder, requests)
            assert actual.shape == expected.shape and relative(actual, expected) < 3e-2
            assert relative(cached(model), keys) < 3e-2
            assert attended(model) == [cut, 24 - cut] != tokens

    standin.run(main)


@pytest.mark.parametrize(
    ("changes", "cut"),
    [({"causal": False}, 9), ({"encoder_seq_lens": torch.ones(3)}, 9), ({}, 21), ({"num_actual_tokens": 20}, 9)],
)
def test_a_batch_that_cannot_be_split_is_vllms(changes: dict[str, Any], cut: int) -> None:
    """A batch whose tokens all fit into the first part, and a pass of embeddings, are not woven either."""

    def main(world: weft.World) -> None:
        model, passes = loaded(MODELS["dense"])
        assert passes is not None
        builder = attached(passes)
        passes.woven._cuts[24] = cut  # type: ignore[union-attr]
        one_pass(model, builder, MIXED, **changes)
        assert attended(model) == [21]

    standin.run(main)


def test_metadata_of_another_batch_are_not_split() -> None:
    def main(world: weft.World) -> None:
        model, passes = loaded(MODELS["dense"])
        assert passes is not None and passes.woven is not None
        builder = attached(passes)
        one_pass(model, builder, PROMPT)
        context = standin.get_forward_context()
        assert len(attended(model)) == 2 and passes.woven.can_run(24)
        context.attn_metadata = {NAME: builder.buffer, "another layer": SimpleNamespace()}
        assert not passes.woven.can_run(24)
        context.attn_metadata = None  # as where vLLM measures memory
        assert passes.woven.can_run(24)

    standin.run(main)


def test_an_engine_is_left_as_it_was() -> None:
    def main(world: weft.World) -> None:
        _, passes = loaded(MODELS["dense"])
        assert passes is not None
        builder = attached(passes)
        assert "build" in vars(builder)
        assert passes.woven is not None and passes.woven.attention is not None
        assert [part.config for part in passes.woven.attention._parts] == [passes.woven.config] * 2
        passes.remove()
        assert "build" not in vars(builder)

    standin.run(main)


class Activation(standin.CustomOp):
    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("native")
        return torch.nn.functional.silu(x)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("kernel")
        return torch.nn.functional.silu(x)


class WithoutKernel(Activation):
    forward_cuda = standin.CustomOp.forward_cuda


class ActivatedMLP(standin.MLP):
    def __init__(self, seed: int, kind: type[Activation]) -> None:
        super().__init__(seed)
        self.act_fn = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


@pytest.mark.parametrize(("kind", "called"), [(Activation, "kernel"), (WithoutKernel, "native")])
def test_operators_run_by_kernels_where_nothing_compiles_them(kind: type[Activation], called: str) -> None:
    """A norm that sums nothing also runs as its kernel. vLLM's own passes use the operators unchanged."""

    def main(world: weft.World) -> None:
        world.backend.reference = True  # type: ignore[attr-defined]
        model, passes = loaded(
            lambda: Model(functools.partial(CachedLayer, mlp=functools.partial(ActivatedMLP, kind=kind)))
        )
        assert passes is not None
        builder, activation = attached(passes), model.layers[0].mlp.act_fn
        model.layers[0].input_layernorm.forward_native = lambda *_: pytest.fail("vLLM's norm")
        one_pass(model, builder, PROMPT)
        assert activation.calls == [called] * 2 and activation._forward_method == activation.forward_native

    standin.run(main)


@pytest.mark.parametrize(("tokens", "prefix"), [(512, 256), (2432, 1024), (4352, 2048), (8192, 4096)])
def test_parts_have_the_fewest_waves(monkeypatch: pytest.MonkeyPatch, tokens: int, prefix: int) -> None:
    """One of four ranks with 132 SMs runs Llama-70B's GEMMs. At 4,352 tokens, parts of 1,408 and 2,944 have the
    fewest waves, but the GEMMs of so few tokens would not hide the other part's sums."""
    monkeypatch.setattr(woven, "usual_tile", lambda world: GemmTile(128, 256))
    sizes = [[], [(14336, 8192), (8192, 7168)], [(2560, 8192), (8192, 2048)]]
    stages = [SimpleNamespace(sizes=lambda gemms=gemms: gemms) for gemms in sizes]
    world = SimpleNamespace(backend=SimpleNamespace(sm_count=132))
    assert woven.smart_split(world, stages, tokens) == prefix  # type: ignore[arg-type]


def recording() -> nn.Module:
    model = MODELS["dense"]()
    model.recorded = (0,)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Model(Gemma2Layer, standin.GemmaRMSNorm), "adds no residual"),
        (lambda: Model(ScaledLayer), "0 sums before a norm"),
        (recording, "the residual of the norm"),
    ],
)
def test_a_model_without_one_chain_of_sums_says_why(make: Any, reason: str) -> None:
    def main(world: weft.World) -> None:
        _, passes = loaded(make)
        assert passes is not None and passes.woven is None and reason in str(passes.unwoven)
        assert f"runs no pass in two parts over whole layers: {passes.unwoven}" in plugin.models[-1].text()
        assert not any(isinstance(form, WovenLayers) for form in plugin.models[-1].forms)

    standin.run(main)


@pytest.mark.parametrize(
    ("changes", "specs", "reason"),
    [
        ({"kv_transfer_config": "a connector"}, [standin.FullAttentionSpec], "keys and values go to other engines"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, [standin.FullAttentionSpec], "scales of keys"),
        ({}, [standin.FullAttentionSpec] * 2, "2 kinds of attention"),
        ({}, [standin.MambaSpec], "attention by MambaSpec"),
    ],
)
def test_an_engine_whose_batches_cannot_be_split_says_why(
    changes: dict[str, Any], specs: list[Any], reason: str
) -> None:
    """In that case, the woven form is not compared."""

    def main(world: weft.World) -> None:
        _, passes = loaded(MODELS["dense"], **changes)
        report = plugin.models[-1]
        assert any(isinstance(form, WovenLayers) for form in report.forms)
        start.attach(report, SimpleNamespace(attn_groups=[[SimpleNamespace(kv_cache_spec=spec()) for spec in specs]]))
        assert passes is not None and passes.woven is None and reason in report.text()
        assert not any(isinstance(form, WovenLayers) for form in report.forms)

    standin.run(main)


def test_no_rank_weaves_if_one_cannot() -> None:
    """All ranks compare passes together, even if vLLM's constructors raise an error on one of them."""

    def main(world: weft.World) -> None:
        _, passes = loaded(MODELS["dense"])
        assert passes is not None and passes.woven is not None

        def attach(runner: object) -> None:
            if world.rank == 1:
                raise AssertionError("Current vLLM config is not set.")

        passes.woven.attach = attach  # type: ignore[method-assign]
        start.attach(plugin.models[-1], SimpleNamespace())
        assert passes.woven is None and passes.unwoven is not None and "config is not set" in passes.unwoven

    standin.run(main)


def test_nothing_is_made_during_requests() -> None:
    """Woven passes of random sizes cause no compile, trial, decision or upload after one pass of each size."""

    def main(world: weft.World) -> None:
        world.backend.reference = True  # type: ignore[attr-defined]
        model, passes = loaded(MODELS["dense"])
        assert passes is not None
        builder, report, draw = attached(passes), plugin.models[-1], random.Random(0)
        passes.serve([(9, 24, WovenLayers())])
        for size in sorted(set(passes.sizes) - {0}, reverse=True):
            one_pass(model, builder, [(size, size)])
        attended(model)
        report.counts = served.counts(world)
        for _ in range(6):
            new = draw.randint(9, 20)
            one_pass(model, builder, [(new - 1, new), (1, 12)])
        assert "since the start: 0 compiles, 0 trials, 0 decisions, 0 uploads" in report.text(), report.text()
        assert len(attended(model)) == 12

    standin.run(main)


@pytest.mark.parametrize("gain", [1.5, 0.9])
def test_whole_layers_are_woven_where_that_wins(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """Passes with enough tokens are compared. If other forms are faster, the engine's builder is vLLM's own again."""
    builder = standin.Builder(standin.FullAttentionSpec(), [NAME], None, None)
    monkeypatch.setattr(standin.ModelRunner, "attn_groups", [[standin.AttentionGroup(builder)]], raising=False)
    monkeypatch.setattr(standin.ModelRunner, "_dummy_run", lambda self, num_tokens, **options: None)
    monkeypatch.setattr(compare, "FEWEST_TOKENS", 9)
    starts.faked(monkeypatch)
    timed = starts.times_of(monkeypatch, lambda tokens, form: gain if form == WovenLayers(programs=16) else 1.1)
    release, released = WovenPass.release, []
    monkeypatch.setattr(WovenPass, "release", lambda self: released.append(self.attention) or release(self))

    def main(world: weft.World) -> Any:
        return starts.started(world)[1].ranges

    monkeypatch.setattr(AttentionParts, "__init__", lambda self, *_: None)
    monkeypatch.setattr(AttentionParts, "release", lambda self: None)
    for ranges in standin.run(main):
        forms = {compared.low: compared.form for compared in ranges}
        assert forms[9] == (WovenLayers(programs=16) if gain > 1.1 else Sequential())
    assert {tokens for tokens, way in timed if "WovenLayers" in way} == {9, 12}
    assert bool([attention for attention in released if attention is not None]) == (gain < 1.1)
