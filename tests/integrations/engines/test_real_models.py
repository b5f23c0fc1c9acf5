"""The plugin on vLLM's own classes and models, without an engine: what it goes through, and what it sees in a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by `make engines`, in an environment of its own")

import torch  # noqa: E402

from tests.integrations.engines.run_engine import EXPERTS, SIZES  # noqa: E402
from weft.integrations.vllm.dataflow import Flow, flow_of  # noqa: E402
from weft.integrations.vllm.interface import TRIED_VLLM, read_interface  # noqa: E402
from weft.integrations.vllm.layers import Classes  # noqa: E402

GELU = dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=32)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3MoeForCausalLM": ("qwen3_moe", EXPERTS),  # first: only a mixture makes the groups of experts
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "GemmaForCausalLM": ("gemma", dict(hidden_act="gelu_pytorch_tanh")),
    "Gemma2ForCausalLM": ("gemma2", GELU),
    "GraniteForCausalLM": ("granite", {}),
}


class Everywhere(Classes):
    """One rank, so that no sum is made: those that would be."""

    def reduces(self, module: Any) -> bool:
        return isinstance(module, self.runner) or (isinstance(module, self.row) and module.reduce_results)

    def plain(self, linear: Any) -> bool:
        return True


def flow(architecture: str, folder: Path) -> Flow:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    kind, config_changes = MODELS[architecture]
    config = dict(architectures=[architecture], model_type=kind, hidden_act="silu", torch_dtype="bfloat16", **SIZES)
    (folder / "config.json").write_text(json.dumps({**config, **config_changes}))
    args = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True)
    config = args.create_engine_config()
    objects = read_interface().objects
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1)
        with torch.device("meta"):
            model = initialize_model(vllm_config=config, model_config=config.model_config)
    names = ("row", "column", "norm", "unquantized", "gemma_norm", "runner")
    return flow_of(model, Everywhere(**{name: objects[name] for name in names}))


def test_the_interface_is_the_known_one() -> None:
    interface = read_interface()
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
    """Of two layers."""
    seen = flow(architecture, tmp_path)
    assert (len(seen.sites), sum(site.column is not None for site in seen.sites)) == (sites, columns), seen
    assert seen.by_rows == by_rows and not seen.left, seen.left
