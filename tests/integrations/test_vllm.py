"""The vLLM plugin on stand-ins for vLLM's classes, in the emulator: what is found in a model, what is put in its place, that the
model computes the same, and everything that must leave it vLLM's own."""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.integrations import vllm_standin as standin
from tests.integrations.vllm_standin import BF, DecoderLayer, Gemma2Layer, H, Model, ScaledLayer, SparseMlp
from weft.chooser import CallTime, Choice, Chooser
from weft.integrations import vllm
from weft.integrations.vllm import interface, layers, plugin, timing
from weft.integrations.vllm.dataflow import flow_of
from weft.integrations.vllm.row_norm_column import ROW_NORM_COLUMN, row_norm_column

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
    """A method of which the plugin knows nothing but that it gives a partial sum."""

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


def output(model: nn.Module, tokens: int = 24) -> Any:
    with torch.no_grad():
        return model(IDS[:tokens], POSITIONS[:tokens], None)


@pytest.mark.parametrize("tokens", [1, 5, 24])
@pytest.mark.parametrize("name", MODELS)
def test_a_served_model_computes_what_it_did(modules: Any, name: str, tokens: int) -> None:
    """Few tokens, with whole residuals, and many, with those that a rank owns."""
    expected = standin.run(lambda world: output(loaded(MODELS[name]), tokens))[0]
    plugin.register()

    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        model = loaded(MODELS[name])
        output(model, tokens)
        return output(model, tokens), plugin._models[-1].text()

    results = standin.run(main)
    assert (results[0][0] == results[1][0]).all()
    error = (results[0][0].float() - expected.float()).norm() / expected.float().norm()
    assert error < 2e-2, error  # of bfloat16, two layers
    assert "calls decided" in results[0][1], results[0][1]


@pytest.mark.parametrize(
    ("name", "served", "by_rows"),
    [
        ("dense", ["a row-parallel linear with its GEMM, residual and norm (4 times)", "GEMM after it (3 times)"], True),
        ("experts", ["sum of experts, residual and norm (2 times)", "linear with its GEMM, residual and norm (2 times)", "GEMM after it (1 times)"], True),
        ("quantized", ["sum of a row-parallel linear, residual and norm (2 times)", "with its GEMM, residual and norm (2 times)"], True),
        ("gemma 2", ["with its GEMM, residual and norm (4 times)"], True),
        ("scaled", ["a row-parallel GEMM and its sum (4 times)"], None),
    ],
)  # fmt: skip
def test_the_report_says_what_is_served(modules: Any, name: str, served: list[str], by_rows: bool | None) -> None:
    plugin.register()

    def main(world: weft.World) -> str:
        loaded(MODELS[name])
        return plugin._models[-1].text()

    text = standin.run(main)[0]
    assert text.startswith(f"weft {weft.__version__} under vLLM 0.32.0: Model, 2 ranks (emulated)")
    assert all(line in text for line in served), text
    assert ("residuals from 9 tokens on by the rows that a rank owns" in text) == bool(by_rows), text
    assert "leaves to vLLM" not in text, text


def test_sums_that_something_else_reads_stay(modules: Any) -> None:
    """Hidden states between layers are recorded: only the sums inside a layer go to their norms, and residuals are
    whole, since others read them."""
    plugin.register()

    def main(world: weft.World) -> tuple[Any, str]:
        def make() -> nn.Module:
            model = MODELS["dense"]()
            model.recorded = (0,)
            return model

        return output(loaded(make)), plugin._models[-1].text()

    (_, seen), text = standin.run(main)[0]
    assert "residual and norm (3 times)" in text and "a row-parallel GEMM and its sum (1 times)" in text, text
    assert "residuals whole on every rank: they are read between layers" in text, text

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
def test_experts_whose_sum_something_else_takes_stay(modules: Any, attributes: dict[str, Any]) -> None:
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
        return plugin._models[-1].text()

    text = standin.run(main)[0]
    assert "of experts" not in text and "residual and norm (2 times)" in text, text


def test_tracing_leaves_nothing_in_the_model(modules: Any) -> None:
    class Remembering(Model):
        seen: Any = None

        def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None) -> Any:
            self.seen = self.positions = positions
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    plugin.register()

    def main(world: weft.World) -> tuple[Any, bool, str]:
        model = loaded(lambda: Remembering(DecoderLayer))
        return model.seen, hasattr(model, "positions"), plugin._models[-1].text()

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
        return output(loaded(lambda: Branching(DecoderLayer))), plugin._models[-1].text()

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
        (dict(parallel_config=SimpleNamespace(enable_dbo=True)), "enable_dbo"),
        (dict(compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True))), "enable_sp"),
    ],
)
def test_what_leaves_a_model_to_vllm(modules: Any, changes: dict[str, Any], why: str) -> None:
    plugin.register()

    def main(world: weft.World) -> tuple[set[type], str, torch.Tensor]:
        model = loaded(MODELS["dense"], **changes)
        report = plugin._models[-1]
        if report.async_tp is not None:
            report.async_tp.close()
        return {type(m) for m in model.modules()}, report.text(), output(model)

    kinds, text, actual = standin.run(main)[0]
    assert "leaves to vLLM all: " in text and why in text, text
    assert not any(kind.__name__.startswith("Weft") for kind in kinds)
    assert (actual == standin.run(lambda world: output(MODELS["dense"]()))[0]).all()


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
        return plugin._models[-1].text(), output(model)

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
    """Whatever an operator of the model on one rank would wait for in vain on another."""
    plugin.register()
    find_candidates = plugin.find_candidates

    def different(*arguments: Any) -> Any:
        candidates = find_candidates(*arguments)
        return DIFFERENCES[difference](candidates) if standin.current_world().rank == 1 else candidates

    monkeypatch.setattr(plugin, "find_candidates", different)

    def main(world: weft.World) -> tuple[set[type], str]:
        model = loaded(MODELS["dense"])
        return {type(m) for m in model.modules()}, plugin._models[-1].text()

    for kinds, text in standin.run(main):
        assert "leaves to vLLM all: ranks have different models" in text, text
        assert not any(kind.__name__.startswith("Weft") for kind in kinds)


def test_vllm_loads_without_the_plugin(modules: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Off; a class that is missing; other parameters; an exception: none of them is vLLM's."""
    load_model = standin.BaseModelLoader.load_model
    monkeypatch.setenv("WEFT_VLLM", "0")
    plugin.register()
    assert standin.BaseModelLoader.load_model is load_model
    monkeypatch.delenv("WEFT_VLLM")

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


def test_an_untried_version_is_served_and_says_so(modules: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """As far as its classes are those that are known: experts' runner is not."""
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
    assert standin.WorkerBase().weft_report().count("Model, 2 ranks") == 2  # both ranks are of this process


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


def test_compiled_code_is_named_by_what_is_served(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()

    def main(world: weft.World) -> Any:
        seen = standin.config(MODELS["dense"])
        standin.BaseModelLoader().load_model(vllm_config=seen, model_config=None)
        return seen.additional_config["weft"]

    named = standin.run(main)
    assert (
        named[0][2] == named[1][2]
        and weft.__version__ in named[0]
        and "layers.0.post_attention_layernorm" in named[0][2]
    )
    monkeypatch.setattr(plugin, "thresholds", lambda *_: (8, 16))
    assert [code[3:] for code in standin.run(main)] == [[8, 16]] * 2 != [code[3:] for code in named]


def fused_allreduce_rms_norm(hidden_states: torch.Tensor, residual: torch.Tensor, norm: Any) -> Any:
    """As vLLM names it."""
    raise AssertionError("vLLM's own")


def test_norms_of_new_style_models(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the function was imported, and back; one that takes something else stays."""
    known_form, other_form = ModuleType("vllm.models.new.model"), ModuleType("vllm.models.other.model")
    known_form.fused_allreduce_rms_norm = fused_allreduce_rms_norm  # type: ignore[attr-defined]
    other_form.fused_allreduce_rms_norm = lambda x, norm: None  # type: ignore[attr-defined]
    for module in (known_form, other_form):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def main(world: weft.World) -> Any:
        norm, x, residual = standin.RMSNorm(3), standin.drawn(world.rank, 6, H).data, standin.drawn(9, 6, H).data
        served = plugin.fused_norm(fused_allreduce_rms_norm, world)(x, residual, norm)
        return *served, *norm(weft.all_reduce(x, world=world), residual)

    y, kept, expected, h = standin.run(main)[0]
    assert (y.float() - expected.float()).norm() < 1e-2 * expected.float().norm()
    assert (kept.float() - h.float()).norm() < 1e-2 * h.float().norm()

    report, counts = plugin.ServedModel("", ""), Counter[str]()
    plugin.serve_fused_norms(SimpleNamespace(), report, counts)  # type: ignore[arg-type]
    assert counts.total() == 1 and known_form.fused_allreduce_rms_norm.weft
    assert report.left == [
        "vllm.models.other.model.fused_allreduce_rms_norm, which takes x, norm, not hidden_states, residual, norm"
    ]
    report.undo[0]()
    assert known_form.fused_allreduce_rms_norm is fused_allreduce_rms_norm


# -- the operator ------------------------------------------------------------------------------------------------------
M, K, N = 24, 32, 48
GIVEN = dict(rows_from=1)


def operands(rank: int, ranks: int = 2) -> dict[str, torch.Tensor]:
    t = {name: standin.drawn(i, *shape).data for i, (name, shape) in enumerate(dict(x=(ranks, M, K), residual=(M, H), norm=(H,), row=(ranks, H, K), row_bias=(H,), column=(ranks, N, H), column_bias=(ranks, N)).items())}  # fmt: skip
    return {
        name: tensor[rank] if name in ("x", "row", "column", "column_bias") else tensor for name, tensor in t.items()
    }


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("auto", {}), ("auto", GIVEN), ("sequential", GIVEN), ("sequence_parallel", GIVEN),
        ("auto", dict(GIVEN, woven_from=8)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_form_gives_the_same(plan: str, options: dict[str, Any], ranks: int) -> None:
    """Twice in a row, the second time with the residual of the first, and without the second GEMM."""

    def main(world: weft.World) -> list[torch.Tensor]:
        t = operands(world.rank, ranks)
        x, residual, norm = t.pop("x"), t.pop("residual"), t.pop("norm")
        y, kept = row_norm_column(x, residual, norm, 1e-6, **t, **options, world=world, plan=plan)
        row = dict(row=t["row"], row_bias=t["row_bias"])
        last, _ = row_norm_column(x, kept, norm, 1e-6, **row, **options, world=world)
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


def test_the_engines_kernel_leaves_the_callers_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's kernel writes the residual into its input."""

    def fused(x: torch.Tensor, residual: torch.Tensor, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        results: tuple[torch.Tensor, torch.Tensor] = norm(x.clone(), residual)
        x.copy_(residual)
        return results

    monkeypatch.setattr(sys.modules[row_norm_column.__module__], "engine_all_reduce_norm", lambda: fused)

    def main(world: weft.World) -> bool:
        t = [standin.drawn(i, *shape).data for i, shape in enumerate(((M, H), (M, H), (H,)))]
        before = [tensor.clone() for tensor in t]
        ROW_NORM_COLUMN(world, "engine", (*t, *[None] * 6), (1e-6, 0, 0))
        world.synchronize()
        return all(map(torch.equal, t, before))

    assert standin.run(main) == [True, True]


def test_residuals_of_many_tokens_are_held_by_rows() -> None:
    """What a rank does not own of the residual may be anything."""

    def main(world: weft.World, tokens: int) -> torch.Tensor:
        t = operands(world.rank)
        x, residual, norm = t.pop("x")[:tokens], t.pop("residual")[:tokens].clone(), t.pop("norm")
        row_counts = weft.lang.balanced_rows(tokens, world.size)
        first_row = sum(row_counts[: world.rank])
        residual[:first_row], residual[first_row + row_counts[world.rank] :] = float("nan"), float("nan")
        return row_norm_column(x, residual, norm, 1e-6, **t, rows_from=1, world=world)[0]

    assert all(y.isfinite().all() for y in standin.run(lambda world: main(world, 24)))


def test_torch_compile_follows_a_served_model(modules: Any) -> None:
    """In one graph for any number of tokens, that names no layer."""
    plugin.register()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def main(world: weft.World) -> list[torch.Tensor]:
        model = loaded(MODELS["dense"])
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        with torch.no_grad():
            outs = [compiled(IDS[:n].clone(), POSITIONS[:n].clone(), None) for n in (24, 7, 3)]
            return [*outs, *(model(IDS[:n], POSITIONS[:n], None) for n in (24, 7, 3))]

    outputs = standin.run(main)[0]
    assert all((a == b).all() for a, b in zip(outputs[:3], outputs[3:], strict=True))
    calls = [str(n.target) for graph in graphs for n in graph.graph.nodes if "row_norm_column" in str(n.target)]
    assert len(calls) == 4 * len(graphs) and len(graphs) == 2, [str(graph.graph) for graph in graphs]


def test_gpu_plans_by_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whole rows are the engine's until a trial finds weft's faster; rows that ranks own are tried in both forms."""
    world: Any = SimpleNamespace(
        device=torch.device("cuda", 0), size=2, symmetric_reason=None, scale=weft.scale.Scale()
    )

    def call(tokens: int, **options: Any) -> Any:
        t = [torch.empty(tokens, 4096, dtype=BF, device="meta"), None, torch.empty(4096, dtype=BF, device="meta")]
        matrix = torch.empty(4096, 4096, dtype=BF, device="meta")
        monkeypatch.setattr("weft.integrations.vllm.row_norm_column.check_operands", lambda *_: None)
        return ROW_NORM_COLUMN.check(world, (*t, matrix, None, matrix, None, None, None), (1e-6, options.get("rows_from", 16), options.get("woven_from", 0)))  # fmt: skip

    def plans(call: Any) -> tuple[str, list[str]]:
        return ROW_NORM_COLUMN.expected(world, call, "eager").kind, [
            p.kind for p in ROW_NORM_COLUMN.candidates(world, call)
        ]

    assert plans(call(8)) == ("engine", ["sequential"])
    assert plans(call(4096, rows_from=0)) == ("engine", ["sequential"])
    assert plans(call(4096)) == ("sequential", ["sequence_parallel"])
    assert plans(call(4096, woven_from=4096)) == ("woven", [])
    assert (
        ROW_NORM_COLUMN.trial_key(call(65))
        == ROW_NORM_COLUMN.trial_key(call(128))
        != ROW_NORM_COLUMN.trial_key(call(129))
    )


def test_a_timed_pass_does_not_grow_with_the_layers() -> None:
    """All sites of 80 layers took all the memory of a GPU: their results, which other streams still used, waited for them."""
    kinds = Counter({(4096, 14336): 80, (14336, 5120): 79, (14336, 0): 1})
    assert timing.calls_of_pass(kinds) == {(4096, 14336): 2, (14336, 5120): 2}
    assert timing.calls_of_pass(Counter({(64, 128): 2, (64, 0): 1})) == {(64, 128): 2, (64, 0): 1}


def test_where_residuals_by_rows_begin_is_timed(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are faster up to the most tokens; each kind of site as often as there are such."""

    def time(self: Chooser, choice: Choice[int], rows_from: int, *_: Any) -> CallTime:
        """By rows pays from 32 tokens on, but for `slow`."""
        (tokens,) = choice.sizes
        us = 1.0 if not rows_from else 0.5 if tokens >= 32 and tokens != slow else 2.0
        return CallTime(us, us)

    def one_pass(world: weft.World, sites: Any, rows_from: int) -> None:
        calls.extend((len(t.x), rows_from, t.row is not None, t.column is not None) for t, _ in sites)
        counts.append([count for _, count in sites])

    monkeypatch.setattr(Chooser, "time", time)
    monkeypatch.setattr(timing, "one_pass", one_pass)
    counts: list[list[int]] = []
    calls: list[tuple[int, int, bool, bool]] = []
    slow = 0

    def main(world: weft.World) -> Any:
        objects = interface.read_interface().objects
        classes = layers.Classes(**{name: objects[name] for name in ("row", "column", "norm", "unquantized")})
        flow = flow_of(MODELS["dense"](), classes)
        world.choices.clock = lambda *_: pytest.fail("really timed")
        return timing.rows_from(flow, classes, world, 9, 256)

    assert standin.run(main) == [32, 32]
    slow = 128
    assert standin.run(main) == [256, 256]
    slow = 256
    assert standin.run(main) == [0, 0]
    assert {call[0] for call in calls} == {16, 32, 64, 128, 256}
    assert {call[2:] for call in calls} == {(True, True), (True, False)}
