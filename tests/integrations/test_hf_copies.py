"""Deep copies of woven models (`weft.hf`), which averaged and reference models need: each copy computes with its own
parameters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import weft
from tests.integrations.test_hf import IDS, run
from tests.integrations.test_hf_parameters import other_parameters, small
from weft import hf
from weft.integrations.transformers import moe as hf_moe

pytest.importorskip("transformers")


def logits_of(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(IDS[:1, :4]).logits
    return logits


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe", "GptOss"])
def test_a_copy_and_its_original_compute_each_with_its_own_parameters(kind: str) -> None:
    """The bits equal those of models that have the parameters from the start; this includes a copy that never ran, and
    a copy of that copy."""

    def main(world: weft.World) -> None:
        model = hf.weave(small(kind), world)
        state = other_parameters(kind)
        with torch.no_grad():
            before = logits_of(model)
            twins = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))]
            for twin in twins:
                twin.load_state_dict(state)
                assert (logits_of(model) == before).all()
            model.load_state_dict(state)
            after = logits_of(model)
            assert all((logits_of(twin) == after).all() for twin in twins) and not (after == before).all()
            for p in twins[0].parameters():
                p.zero_()
            assert not logits_of(twins[0]).any() and (logits_of(model) == after).all()
            plain = small(kind)
            plain.load_state_dict(state)
            assert (logits_of(hf.unweave(twins[1])) == logits_of(plain)).all()
            assert (logits_of(model) == after).all() and "generate" in vars(model)

    run(main)


def test_a_deep_copy_behaves_as_its_original() -> None:
    def main(world: weft.World) -> None:
        model = hf.weave(small("Llama"), world, two_parts=2)
        twin = copy.deepcopy(model)
        ids = IDS[:1, :4]
        wanted = dict(max_new_tokens=2, do_sample=False, attention_mask=torch.ones_like(ids))
        assert (twin.generate(ids, **wanted) == model.generate(ids, **wanted)).all()
        assert twin.generate.__wrapped__.__self__ is twin and twin.model.layers[0].forward.__self__.woven is twin._weft
        with torch.no_grad():
            assert (logits_of(twin) == logits_of(model)).all()
            twin.model.layers[0].mlp.forward = twin.model.layers[0].mlp.act_fn.forward
            with pytest.raises(weft.Unsupported, match=r"layers.0.mlp.forward was replaced"):
                logits_of(twin)
            logits_of(model)

    run(main)


def test_unsafe_copies_and_pickles_are_refused_by_name() -> None:
    def main(world: weft.World) -> None:
        model = hf.weave(small("Llama"), world)
        with pytest.raises(TypeError, match="a World cannot be pickled; save a module's state_dict"):
            pickle.dumps(model)
        hf.unweave(model)
        head = model.lm_head
        split_forward = head.forward
        head.forward = lambda x: split_forward(x)  # as Transformers splits a linear
        hf.weave(model, world)
        with pytest.raises(
            weft.Unsupported, match=r"lm_head.forward is tests.integrations.test_hf_copies.*original's weights"
        ):
            copy.deepcopy(model)

    run(main, 1)


def test_a_copy_of_registered_experts_packs_its_own() -> None:
    def main(world: weft.World) -> None:
        experts, forward = small("GptOss").model.layers[0].mlp.experts, hf_moe.experts_forward(lambda: world)
        inputs = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with torch.no_grad():
            before = forward(experts, *inputs)
            twin = copy.deepcopy(experts)
            assert vars(twin)["_weft_experts"].w13 is None, "packed at the first call"
            assert (forward(twin, *inputs) == before).all()
            for p in twin.parameters():
                p.zero_()
            assert not forward(twin, *inputs).any() and (forward(experts, *inputs) == before).all()

    run(main, 1)
