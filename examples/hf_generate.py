"""Generate tokens with a Transformers model that is split over all GPUs. One line runs its communication with weft.

torchrun --nproc-per-node N examples/hf_generate.py meta-llama/Llama-3.1-8B-Instruct
python examples/hf_generate.py --emulated     a small random model on two emulated ranks, on a CPU
"""

from __future__ import annotations

import sys

import torch
import transformers

import weft


def emulated(world: weft.World) -> list[int]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()  # whole on every rank
    model = weft.hf.weave(model, world)  # each rank computes with its shard
    ids = torch.arange(1, 9)[None]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0].tolist()


def main(name: str) -> None:
    from transformers.distributed import DistributedConfig

    world = weft.init()
    split = DistributedConfig(tp_size=world.size, tp_plan="auto")
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, distributed_config=split)
    model = weft.hf.weave(model)  # the one line
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    inputs = tokenizer("Weaving is", return_tensors="pt").to(world.device)
    tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    if world.rank == 0:
        print(weft.hf.report(model))
        print(tokenizer.decode(tokens[0]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["--emulated"]:
        print(weft.spmd(emulated, 2, backend="emulated")[0])
    elif len(sys.argv) != 2:
        sys.exit(__doc__)
    else:
        main(sys.argv[1])
