"""The plugin in vLLM itself, on CPU ranks over gloo (`make engines`): seven starts of an engine, in five processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by `make engines`, in an environment of its own")

HERE = Path(__file__).parent
QUIET = dict(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="INFO",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip


def engines(folder: Path, *jobs: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Return the results of the jobs, and the log."""
    out = folder / "out.json"
    env = {**os.environ, **QUIET, "VLLM_CACHE_ROOT": str(folder / "cache"), "WEFT_VLLM": "1", **variables}
    done = subprocess.run(
        [sys.executable, str(HERE / "run_engine.py"), str(out), *jobs],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(out.read_text()), done.stdout + done.stderr


def alike(actual: list[Any], expected: list[Any], rounding: float) -> bool:
    """Return whether answers agree up to a token whose logit led by no more than rounding."""
    for actual_answer, expected_answer in zip(actual, expected, strict=True):
        for (token, _), (expected_token, ahead) in zip(actual_answer, expected_answer, strict=True):
            if token != expected_token:
                if ahead > rounding:
                    return False
                break
    return True


@pytest.mark.timeout(1000)
def test_two_engines_of_one_process(tmp_path: Path) -> None:
    """A dense model and one with experts generate vLLM's own tokens. weft's operators sum over ranks, and each model
    logs one line."""
    results, log = engines(tmp_path, "Llama:eager", "Qwen3Moe:eager")
    for name, rounding in (("Llama:eager", 1e-3), ("Qwen3Moe:eager", 0.1)):  # of float32, and of bfloat16
        assert alike(results[name]["tokens"], results[name]["own"], rounding), results[name]
        assert len({token for row in results[name]["tokens"] for token, _ in row}) > 5  # of a model that computes
    dense, experts = results["Llama:eager"]["report"], results["Qwen3Moe:eager"]["report"]
    assert (
        "LlamaForCausalLM, 2 ranks (gloo)" in dense
        and "the sum of a row-parallel linear, residual and norm (4 times)" in dense
    )
    assert "the sum of experts, residual and norm (2 times)" in experts
    assert all("row_norm_column: " in text and "calls decided, by sequential" in text for text in (dense, experts))
    assert all("leaves to vLLM" not in text for text in (dense, experts))
    assert log.count("under vLLM") == 2, log  # from the first rank of each engine
    assert "untried" not in log


@pytest.mark.timeout(1000)
def test_fp8_linears(tmp_path: Path) -> None:
    """The linears are those of compressed-tensors. weft's product equals vLLM's, and is used only if it overlaps with
    communication, which never happens here."""
    results, _ = engines(tmp_path, "LlamaFP8:eager", WEFT_VLLM_FP8="1")
    report = results["LlamaFP8:eager"]["report"]
    assert "a row-parallel linear with its FP8 GEMM, residual and norm (4 times)" in report
    assert "the column-parallel FP8 GEMM after it (3 times)" in report and "leaves to vLLM" not in report
    # Sums that bfloat16 rounds differently change how some elements are rounded to e4m3.
    assert alike(results["LlamaFP8:eager"]["tokens"], results["LlamaFP8:eager"]["own"], 0.3), results


@pytest.mark.timeout(1000)
def test_compiled_code_with_and_without_the_plugin(tmp_path: Path) -> None:
    """Both engines share vLLM's cache of compiled code; WEFT_VLLM=0 disables the plugin."""
    served, _ = engines(tmp_path, "Qwen3:compiled")
    assert "row_norm_column: " in served["Qwen3:compiled"]["report"]
    unserved, log = engines(tmp_path, "Qwen3:compiled", WEFT_VLLM="0")
    assert alike(served["Qwen3:compiled"]["tokens"], unserved["Qwen3:compiled"]["tokens"], 1e-3), (served, unserved)
    assert "under vLLM" not in log


@pytest.mark.timeout(1000)
def test_passes_in_two_parts_over_whole_layers(tmp_path: Path) -> None:
    """A dense model and one with experts run decode steps, prompts in chunks, cached prefixes and a preempted request.
    The batches contain several requests, one of which is split."""
    results, _ = engines(tmp_path, "Llama:woven", "Qwen3Moe:woven")
    for name, rounding in (("Llama:woven", 1e-3), ("Qwen3Moe:woven", 0.1)):
        job = results[name]
        assert alike(job["tokens"], job["own"], rounding), job
        assert job["batches"][0] == job["batches"][1] and len(job["batches"][0]) > 10
        assert any(requests > 1 and not between for _, requests, between in job["batches"][0]), job["batches"]
        assert job["metrics"]["vllm:num_preemptions"] > 0 and job["metrics"]["vllm:prefix_cache_hits"] > 0
