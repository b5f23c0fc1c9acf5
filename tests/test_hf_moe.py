"""Transformers' mixtures of experts woven (`weft.hf`), in the emulator and over gloo: the tokens and logits of the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hf import IDS, SIZES, run

import weft
from weft import hf
from weft.hf import moe as hf_moe

transformers = pytest.importorskip("transformers")
BF = torch.bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Qwen3Moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]
    ),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=4, attention_bias=True),
}  # fmt: skip


def made(kind: str, dtype: torch.dtype = BF, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind], **more})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("_bias"):  # norms of ones and biases of zeros would hide what is left out
                p.add_(torch.randn_like(p) * 0.1)
            else:
                p.mul_(4)
    return model.to(dtype)


def logits_of(kind: str, ranks: int, **more: Any) -> list[torch.Tensor]:
    def main(world: weft.World) -> torch.Tensor:
        with torch.no_grad():
            return hf.weave(made(kind, **more), world)(IDS).logits.float()

    return run(main, ranks)


def check_logits(kind: str, logits: list[torch.Tensor], **more: Any) -> None:
    with torch.no_grad():
        exact = made(kind, torch.float32, **more)(IDS).logits
        own = made(kind, **more)(IDS).logits.float()
    assert (logits[0] == logits[1]).all()
    error, usual = ((x - exact).norm() / exact.norm() for x in (logits[0], own))
    assert error < max(1.5 * usual.item(), 1e-2), (error, usual)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_models_own_to_rounding(kind: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if many:  # 18 tokens
        monkeypatch.setattr(hf_moe, "MANY", 8)
    check_logits(kind, logits_of(kind, 2))
