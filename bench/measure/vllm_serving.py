"""Throughput of vLLM with and without the plugin, on the GPUs of one machine: requests with the lengths of chats, of papers to be
summarised, of prompts alone, and a small batch that decodes.

python -m bench.measure.vllm_serving --out DIR [--models ...] [--methods ...] [--mixes ...] [--repeats R] [--seconds S]

Appends rows to DIR/vllm_serving.jsonl. Every method is an engine of its own process: "stock" without the plugin, "weft" with it, "async tp"
vLLM's own sequence parallelism and fused GEMMs without it. Models have random weights, their published layer sizes and LAYERS layers of
them, so that an engine starts within a minute. `seconds`: of each repeat, from the first request to the last answer; `requests`,
`tokens_in`, `tokens_out`: of one repeat. Tensor parallelism over all GPUs, CUDA graphs and compiled code as vLLM has them by default, no
prefix caching, 8,192 tokens a step. A method that fails has no rows; its log is DIR/vllm_serving-<model>-<method>.log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

LAYERS = 16
LLAMA = dict(architecture="Llama", rope_theta=500000.0)
MODELS: dict[str, dict[str, Any]] = {
    "Llama-70B": dict(LLAMA, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256),
    "Llama-8B": dict(LLAMA, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256),
    "Qwen2.5-32B": dict(
        architecture="Qwen2", hidden_size=5120, intermediate_size=27648, num_attention_heads=40, num_key_value_heads=8, vocab_size=152064
    ),
    "Qwen3-30B-A3B": dict(
        architecture="Qwen3Moe", hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
}  # fmt: skip
METHODS = ("stock", "weft", "async tp")
LONGEST, TOKENS_A_STEP = 16384, 8192


@dataclass(frozen=True)
class Mix:
    """Requests whose lengths are log-normal with these means; spread 0 makes all equal."""

    requests: int
    mean_in: int
    mean_out: int
    spread: float = 0.0

    def lengths(self) -> list[tuple[int, int]]:
        """Return the tokens of each request and of its answer, the same at every call."""
        draw = random.Random(0)
        shift = self.spread**2 / 2  # so that the mean of the log-normal is one
        return [
            (self.length(self.mean_in, draw, shift), self.length(self.mean_out, draw, shift))
            for _ in range(self.requests)
        ]

    def length(self, mean: int, draw: random.Random, shift: float) -> int:
        factor = draw.lognormvariate(-shift, self.spread) if self.spread else 1.0
        return max(1, min(round(mean * factor), LONGEST // 2))


MIXES = {
    "chat": Mix(256, 220, 190, 0.9),  # ShareGPT's means
    "papers": Mix(32, 6000, 200, 0.5),  # summaries of arXiv's papers
    "prompts": Mix(64, 2048, 1),
    "decode": Mix(8, 128, 128),
}


def checkpoint(model: str, folder: str) -> None:
    """Write the configuration of a model; vLLM makes its weights (load_format="dummy")."""
    import transformers

    sizes = dict(MODELS[model])
    kind = sizes.pop("architecture")
    config = getattr(transformers, f"{kind}Config")(
        **sizes,
        num_hidden_layers=LAYERS,
        max_position_embeddings=2 * LONGEST,
        architectures=[f"{kind}ForCausalLM"],
        torch_dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)


def engine(folder: str, method: str, gpus: int) -> Any:
    from vllm import LLM

    passes = (
        {"compilation_config": {"pass_config": {"enable_sp": True, "fuse_gemm_comms": True}}}
        if method == "async tp"
        else {}
    )
    return LLM(
        folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        tensor_parallel_size=gpus,
        max_model_len=LONGEST,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_num_seqs=256,
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        seed=0,
        **passes,
    )


def serve(llm: Any, mix: Mix) -> float:
    """Return the seconds for all requests of a mix."""
    from vllm import SamplingParams

    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(1000, 30000) for _ in range(tokens)]} for tokens, _ in mix.lengths()
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for _, tokens in mix.lengths()
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure(model: str, method: str, mixes: list[str], repeats: int, out: Path) -> None:
    """Start one engine and append a row for each mix."""
    import torch

    gpus = torch.cuda.device_count()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(model, folder)
        llm = engine(folder, method, gpus)
    print(f"{model} {method}: started in {time.perf_counter() - start:.0f} s", flush=True)
    if method == "weft":
        import weft

        print(weft.vllm.report(llm), flush=True)
    for name, mix in ((name, MIXES[name]) for name in mixes):
        serve(llm, mix)  # a first time, for what is compiled for a shape when it is met
        seconds = [round(serve(llm, mix), 4) for _ in range(repeats)]
        lengths = mix.lengths()
        row = dict(
            op="vllm serving", model=model, layers=LAYERS, ranks=gpus, mix=name, method=method, seconds=seconds, requests=mix.requests,
            tokens_in=sum(tokens for tokens, _ in lengths), tokens_out=sum(tokens for _, tokens in lengths), vllm=version("vllm"),
            gpu=torch.cuda.get_device_name(), commit=os.environ.get("WEFT_COMMIT"), date=time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        print(row, flush=True)
        with open(out / "vllm_serving.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    if method == "weft":
        print(weft.vllm.report(llm), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["Llama-70B"], choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS[:2]), choices=METHODS)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=560, help="after which no engine is started or goes on")
    parser.add_argument("--one", action="store_true", help="measure in this process: one model, one method")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        return measure(args.models[0], args.methods[0], args.mixes, args.repeats, args.out)
    end = time.monotonic() + args.seconds
    for model in args.models:
        for method in args.methods:
            if (left := end - time.monotonic()) < 60:
                print(f"{model} {method}: no time left", flush=True)
                continue
            command = [
                sys.executable,
                "-m",
                "bench.measure.vllm_serving",
                "--one",
                "--out",
                str(args.out),
                "--models",
                model,
            ]
            command += ["--methods", method, "--mixes", *args.mixes, "--repeats", str(args.repeats)]
            with open(args.out / f"vllm_serving-{model}-{method.replace(' ', '_')}.log", "w") as log:
                environment = os.environ | {"WEFT_VLLM": str(int(method == "weft"))}
                ended = subprocess.run(
                    ["timeout", "-k", "5", str(int(left)), *command], stdout=log, stderr=log, env=environment
                )
            print(f"{model} {method}: {'done' if ended.returncode == 0 else f'failed, {ended.returncode}'}", flush=True)


if __name__ == "__main__":
    main()
