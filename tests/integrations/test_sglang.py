"""The SGLang plugin is tested on a module with SGLang's own names, with stand-ins for its imports. If SGLANG_WHEEL
names a folder with SGLang's Python files, the plugin is tested on SGLang's own module."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from weft.integrations import sglang

WHEEL = os.environ.get("SGLANG_WHEEL")
SEAMS = """
import torch

SP_SUPPORTED_ARCHITECTURES = frozenset({"Qwen3ForCausalLM"})


def initialize_layernorm_sp(*, model_config):
    return model_config.hf_config.architectures[0] in SP_SUPPORTED_ARCHITECTURES


def column_parallel_g_matmul(linear, input_parallel, bias):
    group = linear.tp_group.device_group.group_name
    _, ys = torch.ops.symm_mem.fused_all_gather_matmul(input_parallel, [linear.weight.t()], gather_dim=0, group_name=group)
    return ys[0]


def row_parallel_gbar_matmul(linear, input_, bias):
    group = linear.tp_group.device_group.group_name
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(input_, linear.weight.t(), "sum", scatter_dim=0, group_name=group)
"""


class Unquantized:
    pass


def packages() -> dict[str, ModuleType]:
    """Provide the imports of layernorm_sp that a call of a linear needs."""
    call_context: dict[str, Any] = {}
    context = dict(
        get_flags=lambda: SimpleNamespace(sp=SimpleNamespace(enabled=True)),
        get_forward=lambda: SimpleNamespace(sp_active=True),
        get_parallel=lambda: SimpleNamespace(tp_group=call_context["group"]),
        call_context=call_context,
    )
    contents = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.layers": {}, "sglang.srt.utils": {}, "sglang.srt.layers.quantization": {},
        "sglang.srt.runtime_context": context,
        "sglang.srt.utils.common": dict(ceil_align=lambda n, k: -(-n // k) * k),
        "sglang.srt.layers.quantization.unquant": dict(UnquantizedLinearMethod=Unquantized),
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in contents}
    for name, names in contents.items():
        modules[name].__dict__.update(names)
        modules[name].__path__ = []  # a package
    return modules


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param("wheel", marks=pytest.mark.skipif(not WHEEL, reason="SGLANG_WHEEL names no folder")),
    ]
)
def seams(request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "layernorm_sp.py"
    path.write_text(SEAMS)
    if request.param == "wheel":
        path = Path(str(WHEEL)) / "sglang/srt/layers/layernorm_sp.py"
    for name, module in packages().items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location(sglang.LAYERNORM_SP, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, sglang.LAYERNORM_SP, module)
    monkeypatch.delenv(sglang.WEFT_SGLANG, raising=False)
    yield module
    while sglang._served:
        sglang._served.pop().close()


def test_a_layers_seams_are_served(seams: ModuleType) -> None:
    """SGLang's linears call the served functions with a rank's tokens."""
    m, k, n = 8, 32, 48
    x, w = torch.randn(2, m // 2, k).bfloat16(), torch.randn(2, n, k).bfloat16()
    y, v = torch.randn(2, m, k).bfloat16(), torch.randn(2, n, k).bfloat16()
    sglang.register()

    def main(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
        group = SimpleNamespace(
            world_size=2, rank_in_group=world.rank, device_group=SimpleNamespace(group_name=world.name)
        )
        sys.modules["sglang.srt.runtime_context"].call_context["group"] = group  # type: ignore[attr-defined]

        def linear(weight: torch.Tensor) -> Any:
            return SimpleNamespace(weight=weight, bias=None, tp_group=group, quant_method=Unquantized())

        if hasattr(seams, "set_sp_num_tokens"):
            seams.set_sp_num_tokens(m)
        gathered = seams.column_parallel_g_matmul(linear(w[world.rank]), x[world.rank], None)
        sys.modules["sglang.srt.runtime_context"].call_context["group"] = group  # type: ignore[attr-defined]
        return gathered, seams.row_parallel_gbar_matmul(linear(v[world.rank]), y[world.rank], None)

    # The ranks run one after the other, because the context belongs to the process, which contains both ranks.
    results = weft.spmd(main, 2, backend="emulated")
    full = x.flatten(0, 1).float()
    reduced = sum(y[r].float() @ v[r].float().t() for r in range(2)).chunk(2)  # type: ignore[union-attr]
    for rank, (gathered, scattered) in enumerate(results):
        for actual, expected in ((gathered, full @ w[rank].float().t()), (scattered, reduced[rank])):
            assert (actual.float() - expected).norm() < 5e-3 * expected.norm()
    assert "fused_all_gather_matmul: 2 served" in sglang.report()
    assert "fused_matmul_reduce_scatter: 2 served" in sglang.report()


def test_dense_architectures_are_taken(seams: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    before = seams.SP_SUPPORTED_ARCHITECTURES
    with caplog.at_level(logging.INFO):
        sglang.register()
        sglang.register()
    assert before | sglang.DENSE == seams.SP_SUPPORTED_ARCHITECTURES and len(sglang._served) == 1
    assert "now also for LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM" in caplog.text


def test_sglang_starts_without_the_plugin(
    seams: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's permissions do not change if the plugin is disabled, torch lacks the operators, a function has different
    parameters, or the module does not exist."""
    before = seams.SP_SUPPORTED_ARCHITECTURES
    for value in ("0", "off"):
        monkeypatch.setenv(sglang.WEFT_SGLANG, value)
        sglang.register()
        assert not sglang._served
    monkeypatch.delenv(sglang.WEFT_SGLANG)
    with monkeypatch.context() as patch:
        patch.delattr(sglang, "async_tp")
        sglang.register()
    assert "serves nothing: NameError" in caplog.text
    monkeypatch.setattr(seams, "row_parallel_gbar_matmul", lambda linear, x: None)
    sglang.register()
    assert "row_parallel_gbar_matmul takes linear, x, not linear, input_, bias" in caplog.text
    monkeypatch.setitem(sys.modules, sglang.LAYERNORM_SP, None)
    sglang.register()
    assert "serves nothing: ModuleNotFoundError" in caplog.text
    assert before == seams.SP_SUPPORTED_ARCHITECTURES and sglang.report() == "weft serves nothing here"
