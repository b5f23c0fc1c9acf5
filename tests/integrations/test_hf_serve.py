"""Transformers' continuous batching with weft's attention, woven or unwoven, generates the same tokens as generate."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.integrations.test_hf import alike, run, tiny_model
from weft import hf

transformers = pytest.importorskip("transformers")
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [21, 22, 23, 24, 25, 26, 27, 28], [31, 32, 33]]


def serving_options(**options: Any) -> dict[str, Any]:
    batching = transformers.generation.ContinuousBatchingConfig(
        **{_page(): 16}, num_blocks=32, max_batch_tokens=12, allow_block_sharing=False
    )
    wanted = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=95, pad_token_id=0)
    return dict(generation_config=wanted, continuous_batching_config=batching, **options)


def _page() -> str:
    """Return the option for the number of tokens of a page, under the name that this version uses."""
    names = transformers.generation.ContinuousBatchingConfig.__dataclass_fields__
    return "page_size" if "page_size" in names else "block_size"


def alone(model: Any) -> list[list[int]]:
    """Return the result of generate for each request separately."""
    prompts = [torch.tensor([prompt]) for prompt in PROMPTS]
    wanted = dict(max_new_tokens=6, do_sample=False, eos_token_id=95, pad_token_id=0)
    generated = [
        model.generate(ids, attention_mask=torch.ones_like(ids), **wanted)[0, ids.shape[1] :] for ids in prompts
    ]
    return [tokens.tolist() for tokens in generated]


def served(model: Any) -> list[list[int]]:
    return tokens_of(model.generate_batch(PROMPTS, **serving_options()))


def tokens_of(outputs: dict[str, Any]) -> list[list[int]]:
    return [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[-1]))]


def check_alike(actual: list[list[int]], kind: str) -> None:
    """In a woven bfloat16 model, either of two tokens is right if the model's two best logits are equal up to
    rounding."""
    model = tiny_model(kind)
    for prompt, tokens, expected in zip(PROMPTS, actual, alone(model), strict=True):
        assert len(tokens) == len(expected)
        assert alike(torch.tensor([prompt + tokens]), torch.tensor([prompt + expected]), model), (tokens, expected)


@pytest.mark.parametrize(("kind", "changes"), [("Llama", {}), ("Mistral", dict(sliding_window=4)), ("Qwen3", {})])
def test_requests_served_together_match_single_ones(kind: str, changes: dict[str, Any]) -> None:
    """Prompts run in chunks too: twelve tokens per step are fewer than the tokens of a prompt."""
    model = tiny_model(kind, torch.float32, **changes)
    assert served(hf.paged(model)) == alone(tiny_model(kind, torch.float32, **changes))


# Since Transformers 5.24 an argument of the loop states whether its caller is in inference mode.
TAKES_MODE = (
    "use_inference_mode"
    in inspect.signature(transformers.generation.ContinuousBatchingManager._run_generation_loop).parameters
)


def test_served_woven() -> None:
    """The loop of continuous batching runs without its thread, which the emulator cannot follow."""

    def main(world: weft.World) -> list[list[int]]:
        manager = hf.paged(hf.weave(tiny_model("Qwen3"), world)).init_continuous_batching(**serving_options())
        names, status = manager.add_requests(PROMPTS), manager.background_thread_status
        status.request_stop(status.FLUSH_AND_STOP, 0)
        with torch.no_grad():
            manager._run_generation_loop(*([False] if TAKES_MODE else []))
        outputs = [manager.get_result(timeout=1) for _ in names]
        return tokens_of({output.request_id: output for output in outputs})

    check_alike(run(main, 1)[0], "Qwen3")


def test_use_outside_continuous_batching_is_refused() -> None:
    model = hf.paged(tiny_model("Llama"))
    with pytest.raises(ValueError, match="generate_batch"):
        model(torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    model(torch.tensor([[1, 2]]))


def test_the_example_serves() -> None:
    example = Path(__file__).parents[2] / "examples" / "hf_serve.py"
    run = subprocess.run([sys.executable, example, "--small"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.startswith("[[") and run.stdout.count(",") == 23, run.stderr[-2000:]
