"""The plugin on vLLM's own classes and models, without an engine. The tests cover the classes that the plugin patches,
and the operators that it finds in a model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by `make engines`, in an environment of its own")

import torch  # noqa: E402

import weft  # noqa: E402
from tests.emulated.cases_fp8 import scaled  # noqa: E402
from tests.integrations.engines.run_engine import EXPERTS, QUANTIZED, SIZES  # noqa: E402
from weft.integrations.vllm import fp8  # noqa: E402
from weft.integrations.vllm.dataflow import Flow, calls_of, flow_of  # noqa: E402
from weft.integrations.vllm.interface import COMMUNICATING, FP8_METHODS, TRIED_VLLM, read_interface  # noqa: E402
from weft.integrations.vllm.layers import Classes  # noqa: E402

GELU = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=32)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", EXPERTS),  # first, because only a mixture creates the groups of experts
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "GemmaForCausalLM": ("gemma", dict(hidden_act="gelu_pytorch_tanh")),
    "Gemma2ForCausalLM": ("gemma2", GELU),
    "GraniteForCausalLM": ("granite", {}),
}


class Everywhere(Classes):
    """A counter, on one rank, of the sums that several ranks would compute."""

    def reduces(self, module: Any) -> bool:
        return isinstance(module, self.runner) or (isinstance(module, self.row) and module.reduce_results)

    def plain(self, linear: Any) -> bool:
        return True


@contextmanager
def configured(architecture: str, folder: Path, **further: Any) -> Iterator[Any]:
    """Set vLLM's configuration of a model, and its groups of one rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs

    kind, config_changes = MODELS[architecture]
    config = dict(architectures=[architecture], model_type=kind, hidden_act="silu", torch_dtype="bfloat16", **SIZES)
    (folder / "config.json").write_text(json.dumps({**config, **config_changes, **further}))
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True)
    engine_config = args.create_engine_config()
    with set_current_vllm_config(engine_config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1)
        yield engine_config


def flow(architecture: str, folder: Path) -> Flow:
    from vllm.model_executor.model_loader.utils import initialize_model

    objects = read_interface().objects
    with configured(architecture, folder) as config, torch.device("meta"):
        model = initialize_model(vllm_config=config, model_config=config.model_config)
    names = ("row", "column", "norm", "unquantized", "gemma_norm", "runner")
    return flow_of(model, Everywhere(**{name: objects[name] for name in names}))


def test_the_interface_is_the_known_one() -> None:
    interface = read_interface(fp8=True)
    assert not interface.missing and interface.tried and interface.version.startswith(TRIED_VLLM)


@pytest.mark.parametrize(
    ("architecture", "sites", "columns", "by_rows"),
    [
        ("Qwen3MoeForCausalLM", 4, 1, True), ("LlamaForCausalLM", 4, 3, True), ("MistralForCausalLM", 4, 3, True),
        ("Qwen2ForCausalLM", 4, 3, True), ("GemmaForCausalLM", 4, 3, True), ("Gemma2ForCausalLM", 4, 0, True),
        ("GraniteForCausalLM", 0, 0, False),
    ],
)  # fmt: skip
def test_what_is_seen_in_a_model(architecture: str, sites: int, columns: int, by_rows: bool, tmp_path: Path) -> None:
    """The model has two layers."""
    seen = flow(architecture, tmp_path)
    assert (len(seen.sites), sum(site.column is not None for site in seen.sites)) == (sites, columns), seen
    assert seen.by_rows == by_rows and not seen.left, seen.left


@pytest.mark.parametrize(
    ("module", "layer", "function"),
    [
        ("deepseek_v32", "DeepseekV32DecoderLayer", "fused_allreduce_rms_norm"),
        ("deepseek_v4", "DeepseekV4DecoderLayer", "sp_reduce_scatter"),
        ("kimi_k3", "KimiDecoderLayer", "sp_reduce_scatter"),
    ],
)
def test_layers_that_communicate_by_themselves_are_named(module: str, layer: str, function: str) -> None:
    """The test covers the families below vllm/models/ that can be imported without a GPU."""
    kind = getattr(importlib.import_module(f"vllm.models.{module}.nvidia.model"), layer)
    instance = kind.__new__(kind)
    torch.nn.Module.__init__(instance)
    assert function in calls_of(instance, COMMUNICATING)[layer]


def test_an_fp8_linear_is_read_and_multiplied_as_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint comes from compressed-tensors."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    with configured("LlamaForCausalLM", tmp_path, quantization_config=QUANTIZED["LlamaFP8"]) as config:
        linear: Any = RowParallelLinear(
            256,
            384,
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=config.quant_config,
            prefix="layers.0.o_proj",
        )
    weight, scale = scaled(torch.randn(384, 256), "row")
    linear.weight.data.copy_(weight)
    linear.weight_scale.data.copy_(scale)
    linear.quant_method.process_weights_after_loading(linear)
    objects = read_interface(fp8=True).objects
    linears = fp8.Fp8Linears(tuple(objects[name] for name in FP8_METHODS))
    linears.find([linear])
    assert list(linears.reasons.values()) == [""]
    assert (fp8.weight_of(linear).weight.float() == weight.float()).all()

    def difference(world: weft.World) -> str:
        return fp8.difference(world, linear, torch.bfloat16)

    assert weft.spmd(difference, 1, backend="emulated") == [""]
    monkeypatch.setattr(fp8, "scale_of", lambda linear: linear.weight_scale * 1.02)
    assert weft.spmd(difference, 1, backend="emulated") == ["weft's product differs by 2e-02 of its norm"]
