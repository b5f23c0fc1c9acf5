"""Transformers' own tensor parallelism with weft's operators, on two gloo ranks: `weft.hf.styles`, and serving of woven
models."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import weft
from tests.gpu import gpu_hf
from tests.integrations import hf_gloo
from tests.integrations.test_hf import IDS, tiny_model
from tests.integrations.test_hf_moe import tiny_mixture
from tests.integrations.test_hf_serve import PROMPTS, check_alike, serving_options, tokens_of
from weft import hf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Transformers loads split models with it")
LINEARS = 2 * 7  # of two layers


def styled() -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    before = {name: ALL_PARALLEL_STYLES[name] for name in ("rowwise", "colwise")}
    for kind in ("Llama", "Qwen2"):  # without biases and with them
        whole = tiny_model(kind)
        with hf.styles() as served:
            model = hf_gloo.split(whole)
        assert served.linears == LINEARS and all(ALL_PARALLEL_STYLES[n] is own_style for n, own_style in before.items())
        hf_gloo.called.clear()
        with pytest.raises(weft.Unsupported, match=r"Linear\(in_features=96.* computes with the original's weights"):
            copy.deepcopy(model.model.layers[0].mlp.down_proj)
        with torch.no_grad():
            expected, actual = whole(IDS).logits.float(), model(IDS).logits.float()
        assert hf_gloo.called == [IDS.numel()] * 4, "o_proj and down_proj of both layers"
        assert (actual - expected).norm() < 0.02 * expected.norm()
        loss = model(IDS).logits.float().sum()  # a gradient is Transformers' own
        loss.backward()
        assert len(hf_gloo.called) == 4 and model.model.layers[0].mlp.down_proj.weight.grad is not None
    with pytest.raises(
        weft.Unsupported, match="embed_tokens.forward is transformers.* original's weights in a deep copy"
    ):
        copy.deepcopy(hf.weave(model))
    plain = hf_gloo.split(tiny_model("Llama", torch.float32))
    with torch.no_grad():
        plain(IDS)
    with hf.styles():
        styled_plain = hf_gloo.split(tiny_model("Llama", torch.float32))
    with torch.no_grad():
        assert (styled_plain(IDS).logits == plain(IDS).logits).all(), "float32 is Transformers' own"
    assert len(hf_gloo.called) == 4


def woven_and_served() -> None:
    os.environ.update(WORLD_SIZE="2")
    model = hf.weave(hf_gloo.split(tiny_model("Qwen3")))
    assert "lm_head: this rank's columns, gathered" in hf.report(model) and "lm_head: Transformers" not in hf.report(
        model
    )
    outputs = hf.paged(model).generate_batch(PROMPTS, **serving_options())
    check_alike(tokens_of(outputs), "Qwen3")


def tokens_of_one_rank() -> None:
    """Run the check that GPUs must pass, with fewer columns and steps."""
    small_sizes = dict(hidden_size=64, intermediate_size=176, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    with mock.patch.dict(gpu_hf.SIZES, small_sizes):
        assert gpu_hf.forced(weft.init(), "Llama", steps=16) == 0.0


def mixture() -> None:
    """Weave Mixtral as Transformers splits it: all experts by columns, and attention by heads."""
    whole = tiny_mixture("Mixtral")
    with torch.no_grad():
        expected = whole(IDS).logits.float()
        actual = hf.weave(hf_gloo.split(whole))(IDS).logits.float()
    assert (actual - expected).norm() < 0.02 * expected.norm()


def all_cases() -> None:
    styled()
    woven_and_served()
    tokens_of_one_rank()
    mixture()


def test_styles_and_a_woven_model_served(tmp_path: Path) -> None:
    hf_gloo.on_two_ranks(all_cases, tmp_path / "store")
