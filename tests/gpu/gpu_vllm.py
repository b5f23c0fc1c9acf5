"""The plugin in vLLM on a GPU: `gpu/vllm.sh run`. torchrun starts one rank, on which the plugin must serve nothing, or
several ranks that share the GPU. The ranks first run without the plugin (WEFT_VLLM=0). Then ranks with the plugin
compare their answers with the first run's answers. The twin runs all passes, in each of its forms, because nothing can
be timed on a shared GPU. Requests are split into chunks, share prefixes, and are preempted, because the cache is too
small for all of them; one request is aborted. The test compares the probabilities of given tokens with the model in
float32. The error may be at most 1.5 times vLLM's own error. The kinds LlamaFP8 (which needs compressed_tensors) and
LlamaFP8Block, which KINDS may name, have FP8 linears, whose GEMMs weft must serve.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.integrations.engines.run_engine import PROMPTS, QUANTIZED, checkpoint, exact

TOKENS, ROUNDING = 24, 0.1  # the number of tokens of an answer; bfloat16's rounding error of a log probability
ROUNDING_OF_FP8 = 1.0  # for FP8 linears; not yet run on a GPU, but an engine on CPU ranks differed by up to 0.5
BLOCKS = 24  # blocks of 16 tokens in the cache, fewer than CROWD needs
CROWD = [[i, *range(40)] for i in range(8)]
FURTHER = 1.5  # the largest allowed ratio of weft's error in the probabilities to vLLM's
PASS_FORMS = ("sequential", "own_rows", "sequence_parallel", "fused_sum", "woven", "woven_layers")
MODES = {"eager": dict(enforce_eager=True), "graphs": dict(enforce_eager=False)}


def engine(folder: str, ranks: int, mode: str) -> Any:
    from vllm import LLM

    parallel = dict(distributed_executor_backend="external_launcher", tensor_parallel_size=ranks) if ranks > 1 else {}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # splits prompts into chunks too
        gpu_memory_utilization=0.05,  # successive engines in one process do not free all their memory
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
        disable_log_stats=False,
        disable_custom_all_reduce=True,
        seed=0,
        **parallel,
        **MODES[mode],
    )


@contextmanager
def forced(form: str) -> Iterator[None]:
    """Make the twin run all passes in one form."""
    from weft.integrations.vllm import plugin
    from weft.integrations.vllm.row_norm_column import PASS_FORMS

    plan = next(compared for compared in PASS_FORMS if compared.kind == form)
    with mock.patch.object(plugin, "untimed", lambda passes: [(1, passes.max_tokens, plan)]):
        yield


@contextmanager
def woven(llm: Any, form: str) -> Iterator[list[int]]:
    """Return the numbers of tokens of the passes that ran whole layers in two parts, after a start that timed
    nothing."""
    from weft.integrations.vllm.served import models
    from weft.integrations.vllm.woven import WovenPass

    run, tokens = WovenPass.__call__, list[int]()

    def noted(self: Any, plan: Any, input_ids: Any, positions: Any) -> Any:
        tokens.append(len(input_ids))
        return run(self, plan, input_ids, positions)

    if form == "woven_layers":
        llm.collective_rpc(lambda worker: models[-1].passes.woven.attach(worker.model_runner))
    with mock.patch.object(WovenPass, "__call__", noted):
        yield tokens
    assert bool(tokens) == (form == "woven_layers"), tokens


def answers(llm: Any) -> list[list[tuple[int, float, float]]]:
    """Return the tokens, the log probability of each token, and its margin over the second-best token."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    rows = []
    for answer in (output.outputs[0] for output in outputs):
        best = [sorted((t.logprob for t in step.values()), reverse=True) for step in answer.logprobs]
        rows.append([(token, b[0], b[0] - b[1]) for token, b in zip(answer.token_ids, best, strict=True)])
    return rows


def crowded(llm: Any) -> tuple[list[list[int]], int]:
    """Return the answers to more requests than fit in the cache, during which one additional request is aborted, and
    the number of preempted requests."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    engine, answers = llm.llm_engine, {}
    for i, prompt in enumerate(CROWD):
        engine.add_request(f"crowd-{i}", {"prompt_token_ids": prompt}, params)
    engine.add_request("aborted", {"prompt_token_ids": CROWD[0]}, params)
    for step in itertools.count():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        if step == 3:
            engine.abort_request(["aborted"])
        if not engine.has_unfinished_requests():
            break
    assert "aborted" not in answers or len(answers["aborted"]) < TOKENS
    preempted = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return [answers[f"crowd-{i}"] for i in range(len(CROWD))], preempted


def forced_logprobs(llm: Any) -> list[float]:
    """Return the log probability of each token of CROWD, given the tokens before it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in CROWD], params)
    return [
        float(step[token].logprob)
        for output, prompt in zip(outputs, CROWD, strict=True)
        for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]


def float32_logprobs(folder: str) -> list[float]:
    """Return the same log probabilities, computed by Transformers in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor(CROWD)).logits.log_softmax(-1)
    return logits[:, :-1].gather(-1, torch.tensor(CROWD)[:, 1:, None]).flatten().tolist()


def distance(logprobs: list[float], reference: list[float]) -> float:
    """Return the root mean square of the differences."""
    return float((torch.tensor(logprobs) - torch.tensor(reference)).square().mean().sqrt())


def compare(actual: list[Any], expected: list[Any], rounding: float) -> dict[str, Any]:
    """Return the number of tokens that equal vLLM's own, up to the first difference in each answer, and the largest
    difference between log probabilities. Raise AssertionError if an answer differs at a token whose margin exceeds
    rounding."""
    same, furthest = 0, 0.0
    for own_answer, expected_answer in zip(actual, expected, strict=True):
        for (token, logprob, _), (expected_token, its, ahead) in zip(own_answer, expected_answer, strict=True):
            if token != expected_token:
                assert ahead <= rounding, (token, expected_token, ahead)
                break
            same, furthest = same + 1, max(furthest, abs(logprob - its))
    assert furthest <= rounding, furthest
    return dict(same=same, tokens=len(expected) * TOKENS, furthest=round(furthest, 4))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument(
        "--kind", default="Llama", help="as run_engine.KINDS has it; vLLM makes its groups once a process"
    )
    parser.add_argument("--forms", nargs="+", default=PASS_FORMS, choices=PASS_FORMS)
    parser.add_argument("--out", type=Path, required=True, help="answers without the plugin, JSON")
    parser.add_argument("--rows", type=Path, help="a line for each comparison is added here, JSON")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    rounding = ROUNDING_OF_FP8 if args.kind in QUANTIZED else ROUNDING
    if args.kind in QUANTIZED:
        os.environ["WEFT_VLLM_FP8"] = "1"
        os.environ["VLLM_USE_DEEP_GEMM_E8M0"] = "0"  # otherwise scales are powers of two, which weft does not support
    off, rank = os.environ.get("WEFT_VLLM") != "1", int(os.environ.get("RANK", "0"))
    known = json.loads(args.out.read_text()) if args.out.exists() and not off else {}
    with tempfile.TemporaryDirectory(prefix=f"rank{rank}-") as folder:
        checkpoint(args.kind, folder, "bfloat16")
        reference = float32_logprobs(exact(args.kind, folder))
        for mode, form in itertools.product(MODES, args.forms if args.ranks > 1 and not off else PASS_FORMS[:1]):
            job = f"{args.kind} {mode}"
            with forced(form):
                llm = engine(folder, args.ranks, mode)
                with woven(llm, form):
                    actual, forced_now = answers(llm), forced_logprobs(llm)
                    (crowd, preempted), again = crowded(llm), answers(llm)
            compare(again, actual, rounding)  # prompts with prefixes that the cache contains
            error = distance(forced_now, reference)
            if off:
                known[job] = dict(answers=actual, crowd=crowd, error=error)
            elif rank == 0:
                import weft

                report = weft.vllm.report(llm)
                print(report)
                assert args.ranks == 1 or args.kind not in QUANTIZED or "with its FP8 GEMM" in report
                if args.ranks > 1:
                    vllm_results = known[job]
                    row = dict(
                        op="vllm",
                        ranks=args.ranks,
                        model=args.kind,
                        mode=mode,
                        form=form,
                        **compare(actual, vllm_results["answers"], rounding),
                    )
                    row |= dict(error=round(error, 5), vllm_error=round(vllm_results["error"], 5), preempted=preempted)
                    row |= dict(
                        crowd=sum(a == b for a, b in zip(crowd, vllm_results["crowd"], strict=True)),
                        requests=len(crowd),
                    )
                    assert error <= FURTHER * vllm_results["error"], (error, vllm_results["error"])
                    row |= dict(
                        vllm=version("vllm"), gpu=torch.cuda.get_device_name(), commit=os.environ.get("WEFT_COMMIT")
                    )
                    print(row, flush=True)
                    if args.rows:
                        with open(args.rows, "a") as file:
                            file.write(json.dumps(row) + "\n")
            del llm
    if rank == 0 and off:
        args.out.write_text(json.dumps(known))
    print(f"ended: rank {rank} of {args.ranks}, the plugin {'off' if off else 'on'}", flush=True)


if __name__ == "__main__":
    main()
