"""The plugin in vLLM on a GPU: `gpu/vllm.sh run`. One rank, on which it must serve nothing; or two that share the GPU, started by
torchrun, without the plugin first (WEFT_VLLM=0), whose answers the ranks with it then compare theirs with."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from run_engine import PROMPTS, checkpoint

TOKENS, ROUNDING = 24, 0.1  # of an answer; in the logarithm of a probability, of bfloat16
MODES = {"eager": dict(enforce_eager=True), "graphs": dict(enforce_eager=False)}


def engine(folder: str, ranks: int, mode: str) -> Any:
    from vllm import LLM

    more = dict(distributed_executor_backend="external_launcher", tensor_parallel_size=ranks) if ranks > 1 else {}
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # so that prompts are cut, too
        gpu_memory_utilization=0.8 / ranks - 0.1,
        disable_custom_all_reduce=True,
        seed=0,
        **more,
        **MODES[mode],
    )


def answers(llm: Any) -> list[list[tuple[int, float, float]]]:
    """Tokens, each one's logarithm of a probability, and how far that was ahead of the second best."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    made = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    rows = []
    for answer in (each.outputs[0] for each in made):
        best = [sorted((t.logprob for t in step.values()), reverse=True) for step in answer.logprobs]
        rows.append([(token, b[0], b[0] - b[1]) for token, b in zip(answer.token_ids, best, strict=True)])
    return rows


def compare(made: list[Any], own: list[Any]) -> str:
    """Raises AssertionError where an answer goes another way at a token that was ahead by more than rounding."""
    same, furthest = 0, 0.0
    for mine, theirs in zip(made, own, strict=True):
        for (token, logprob, _), (other, its, ahead) in zip(mine, theirs, strict=True):
            if token != other:
                assert ahead <= ROUNDING, (token, other, ahead)
                break
            same, furthest = same + 1, max(furthest, abs(logprob - its))
    assert furthest <= ROUNDING, furthest
    return f"{same} of {len(own) * TOKENS} tokens the same, logarithms of their probabilities within {furthest:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    off, rank = os.environ.get("WEFT_VLLM") == "0", int(os.environ.get("RANK", "0"))
    known = json.loads(args.out.read_text()) if args.out.exists() and not off else {}
    for kind in ("Llama", "Qwen3", "Qwen3Moe") if args.ranks > 1 else ("Llama",):
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                llm = engine(checkpoint(kind, folder, "bfloat16"), args.ranks, mode)
                made = answers(llm)
                if rank == 0 and not off:
                    import weft

                    print(weft.vllm.report(llm))
                    if args.ranks > 1:
                        print(f"{kind} {mode}: {compare(made, known[f'{kind} {mode}'])}", flush=True)
                del llm
            if off:
                known[f"{kind} {mode}"] = made
    if rank == 0 and off:
        args.out.write_text(json.dumps(known))
    print(f"ended: rank {rank} of {args.ranks}, the plugin {'off' if off else 'on'}", flush=True)


if __name__ == "__main__":
    main()
