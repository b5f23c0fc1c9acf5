"""Serve many requests: Transformers' continuous batching, split over all GPUs, with weft's communication and attention.

torchrun --nproc-per-node N examples/hf_serve.py meta-llama/Llama-3.1-8B-Instruct
python examples/hf_serve.py --small     a small random model in one process on a CPU, with nothing to weave
"""

from __future__ import annotations

import sys

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

import weft

PROMPTS = ["Weaving is", "A loom has", "The warp of a fabric is", "To spin wool into yarn, first"]


def small() -> list[list[int]]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip
    model = weft.hf.paged(transformers.LlamaForCausalLM(config).eval())
    batching = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
    generation = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answers = model.generate_batch(
        [[1, 2, 3], [4], [5, 6]], generation_config=generation, continuous_batching_config=batching
    )
    return [request.generated_tokens for request in answers.values()]


def main(name: str) -> None:
    from transformers.distributed import DistributedConfig

    world = weft.init()
    split = DistributedConfig(tp_size=world.size, tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, distributed_config=split)
    model = weft.hf.paged(weft.hf.weave(model))  # the one line
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    answers = model.generate_batch(tokenizer(PROMPTS)["input_ids"], max_new_tokens=64)
    if world.rank == 0:
        for prompt, request in zip(PROMPTS, answers.values(), strict=True):
            print(prompt + tokenizer.decode(request.generated_tokens))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["--small"]:
        print(small())
    else:
        main(sys.argv[1])
