"""The comparison of gpu_vllm_invariant.py finds each way in which an engine's answers may depend on other requests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import gpu_vllm_invariant as check
from weft.integrations.vllm import compare
from weft.integrations.vllm.row_norm_column import PASS_FORMS

DEPENDENCES = {
    "": lambda phase: False,
    "the batch": lambda phase: phase.seed is not None,
    "chunks": lambda phase: phase.tokens == check.FEW,
    "the prefix cache": lambda phase: phase.cached,
}


class Engine:
    """An engine whose log probabilities depend on one of DEPENDENCES."""

    def __init__(self, dependence: str) -> None:
        self.dependence, self.max_num_scheduled_tokens = dependence, check.MOST
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=self)))

    def schedule(self) -> Any:
        return SimpleNamespace(total_num_scheduled_tokens=self.max_num_scheduled_tokens)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.schedule()
        return [self.answer(prompt["prompt_token_ids"], p, len(prompts)) for prompt, p in zip(prompts, params, strict=True)]  # fmt: skip

    def answer(self, prompt: list[int], params: Any, requests: int) -> Any:
        cached, split = not params.skip_reading_prefix_cache, self.max_num_scheduled_tokens < check.MOST
        wrong = {"the batch": requests > 1, "chunks": split, "the prefix cache": cached}.get(self.dependence, False)
        tokens = [sum(prompt) + step for step in range(params.max_tokens)]
        steps = [{token: SimpleNamespace(logprob=-1 / (1 + token) - 1e-9 * wrong)} for token in tokens]
        prompt_steps = None if cached else [{token: SimpleNamespace(logprob=-1.0)} for token in prompt]
        answer = SimpleNamespace(token_ids=tokens, logprobs=steps)
        return SimpleNamespace(
            prompt_token_ids=prompt, prompt_logprobs=prompt_steps, outputs=[answer], num_cached_tokens=int(cached)
        )


@pytest.mark.parametrize("dependence", DEPENDENCES)
def test_dependent_answers_are_found(dependence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(check, "kernels", lambda *_: {})
    record = check.Record(tmp_path / "results.json")
    check.follow(Engine(dependence), "vllm", 100, record)
    for number, phase in enumerate(check.PHASES):
        equal = 0 if DEPENDENCES[dependence](phase) else len(check.LENGTHS)
        assert record.results[f"phase {number}, {phase}"]["equal"] == equal, phase
    assert record.failed == bool(dependence)


def test_weft_serves_all_passes_whatever_the_comparison_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's start takes the ranges from the result of the comparison."""
    vllm, passes = compare.Range(1, 8, None, ()), SimpleNamespace(max_tokens=8)
    result = compare.Comparison(passes, repr, [vllm])  # type: ignore[arg-type]
    monkeypatch.setattr(compare, "compare", lambda passes, allowed, run, vocabulary: result)
    with check.serving_all() as ranges:
        comparison = compare.compare(passes, PASS_FORMS, repr, 32)  # type: ignore[arg-type]
    assert ranges == [vllm]
    assert comparison.ranges == [compare.Range(1, 8, PASS_FORMS[0], ())] and comparison.timed_seconds == 0
