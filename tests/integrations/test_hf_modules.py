"""Modules that differ from Transformers' own (`weft.hf`): a woven model refuses, by name, the modules that it would
omit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.integrations.test_hf import IDS, run, tiny_model
from tests.integrations.test_hf_moe import tiny_mixture
from weft import hf

transformers = pytest.importorskip("transformers")
llama = transformers.models.llama.modeling_llama


def five_times(module: nn.Module, args: Any, out: Any) -> Any:
    return out * 5


def doubled(module: nn.Module, args: Any) -> Any:
    return None


class LlamaMLP(llama.LlamaMLP):
    """A module with the same name as the model's own module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def small(kind: str = "Llama") -> Any:
    return (tiny_mixture if kind == "Qwen3Moe" else tiny_model)(kind, num_hidden_layers=1)


def put_mlp(layer: Any) -> None:
    layer.mlp = LlamaMLP(layer.mlp.config).bfloat16()


def put_forward(layer: Any) -> None:
    layer.mlp.forward = functools.partial(five_times, layer.mlp, ())


def put_class(layer: Any) -> None:
    layer.__class__ = type("LlamaDecoderLayer", (llama.LlamaDecoderLayer,), {})


BEFORE: dict[str, Callable[[Any], object]] = {
    r"layers.0.mlp is tests.integrations.test_hf_modules.LlamaMLP": put_mlp,
    r"layers.0.mlp.forward is tests.integrations.test_hf_modules.five_times": put_forward,
    r"layers.0 is tests.integrations.test_hf_modules.LlamaDecoderLayer": put_class,
    r"layers.0.mlp.act_fn is torch.nn.modules.activation.GELU": lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    r"layers.0.mlp has the hook tests.integrations.test_hf_modules.five_times": lambda layer: (
        layer.mlp.register_forward_hook(five_times)
    ),
    r"layers.0 has the hook tests.integrations.test_hf_modules.five_times": lambda layer: layer.register_forward_hook(
        five_times
    ),
    r"layers.0.self_attn has": lambda layer: layer.self_attn.register_forward_hook(five_times),
    r"layers.0.self_attn.q_proj has": lambda layer: layer.self_attn.q_proj.register_forward_pre_hook(doubled),
    r"layers.0.post_attention_layernorm has": lambda layer: layer.post_attention_layernorm.register_forward_hook(
        five_times
    ),
}
AFTER: dict[str, Callable[[Any], object]] = {
    r"layers.0.mlp was replaced": put_mlp,
    r"layers.0.mlp.forward was replaced": put_forward,
    r"layers.0.self_attn.v_proj was replaced": lambda layer: setattr(layer.self_attn, "v_proj", nn.Linear(64, 32)),
    **{says: change for says, change in BEFORE.items() if " has" in says},
}


def test_what_a_woven_model_would_leave_out_is_refused() -> None:
    def main(world: weft.World) -> None:
        for says, change in BEFORE.items():
            model = small()
            change(model.model.layers[0])
            with pytest.raises(weft.Unsupported, match=says):
                hf.weave(model, world)
            assert not hasattr(model, "_weft") and "forward" not in vars(model.model)

    run(main)


def test_a_class_whose_forward_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    forward = llama.LlamaMLP.forward
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 2)

    def main(world: weft.World) -> None:
        with pytest.raises(weft.Unsupported, match=r"layers.0.mlp.forward is tests.integrations.test_hf_modules"):
            hf.weave(model, world)

    run(main, 1)


def test_later_changes_are_refused_at_the_next_pass() -> None:
    def main(world: weft.World) -> None:
        for says, change in AFTER.items():
            model = hf.weave(small(), world)
            change(model.model.layers[0])
            with torch.no_grad(), pytest.raises(weft.Unsupported, match=says):
                model(IDS)
        model = hf.weave(tiny_model("Llama"), world)
        model.model.layers = model.model.layers[:1]
        with torch.no_grad(), pytest.raises(weft.Unsupported, match=r"model.layers was replaced"):
            model(IDS)

    run(main, 1)


def test_hooks_on_called_modules_are_kept() -> None:
    """Hooks have the same effect on the modules that a woven model calls as in the original model."""

    def thrice(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 3

    def main(world: weft.World) -> None:
        model = small()
        model.model.embed_tokens.register_forward_hook(thrice)
        model.model.norm.register_forward_hook(thrice)
        model.lm_head.register_forward_hook(thrice)

        seen: list[str] = []
        model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append("attention"))
        with torch.no_grad():
            expected = model(IDS).logits
            actual = hf.weave(model, world)(IDS).logits
            model(IDS, output_hidden_states=True)  # Transformers' own hooks
            model(IDS)
        assert (actual - expected).abs().max() <= 2**-5 * expected.abs().max() and seen == ["attention"] * 4

    run(main)


def test_a_routers_hook_is_called() -> None:
    def main(world: weft.World) -> None:
        model, calls = small("Qwen3Moe"), []
        hf.weave(model, world)
        model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            model(IDS)
            assert calls == [1]
            model.model.layers[0].mlp.experts.register_forward_hook(five_times)
            with pytest.raises(weft.Unsupported, match=r"layers.0.mlp.experts has the hook"):
                model(IDS)

    run(main, 1)
