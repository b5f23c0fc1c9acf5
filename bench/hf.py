"""A Transformers model woven, beside itself: torchrun --nproc-per-node N bench/hf.py --out DIR [--tokens 512 ..] [--batches 1 ..]

Llama-3.3-70B's sizes with fewer layers, random weights, Transformers' tensor parallelism over all ranks. Appends rows to
DIR/hf.jsonl: `us` of a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence,
without a cache; "decode": one token of each of M sequences over a static cache of `length` tokens. mode "graph": captured in a
CUDA graph, both ways. Methods "transformers" and "weft".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from run import commit
from timing import error_of, time_interleaved
from transformers.distributed import DistributedConfig

import weft

BF = torch.bfloat16
LLAMA_70B = dict(  # of the vocabulary a few words: a whole head under 8 of 80 layers would hide them
    vocab_size=1024, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
    max_position_embeddings=16384, rms_norm_eps=1e-5,
)  # fmt: skip


def loaded(layers: int, world: weft.World) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**LLAMA_70B, num_hidden_layers=layers, dtype=BF)
    split = DistributedConfig(tp_size=world.size, tp_plan="auto")
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict={}, dtype=BF, distributed_config=split
    )
    return model.to(world.device).eval()


def prefill(model: Any, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(1000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """One token each, always at the same place: what a step of a server's batch takes."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=length + 8)
    ids = torch.randint(1000, (batch, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    start = torch.randint(1000, (batch, length), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    model(start, past_key_values=cache, logits_to_keep=1)
    at = torch.full((1, 1), length, device="cuda")

    def step() -> torch.Tensor:
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length") and isinstance(layer.cumulative_length, torch.Tensor):
                layer.cumulative_length.fill_(length)
        return model(ids, past_key_values=cache, position_ids=at, logits_to_keep=1).logits

    return step


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--tokens", nargs="*", type=int, default=[512, 2048, 8192])
    p.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    start, world = time.time(), weft.init()
    with torch.no_grad():
        models = {"transformers": loaded(a.layers, world), "weft": loaded(a.layers, world)}
        for mine, other in zip(models["weft"].parameters(), models["transformers"].parameters(), strict=True):
            mine.copy_(other)
        weft.hf.weave(models["weft"])
        if world.rank == 0:
            print(weft.hf.report(models["weft"]), flush=True)
        todo: list[tuple[str, int, Callable[[Any], Callable[[], torch.Tensor]]]] = [
            *(("prefill", n, lambda model, n=n: prefill(model, n)) for n in a.tokens),
            *(("decode", n, lambda model, n=n: decode(model, n, a.length)) for n in a.batches),
        ]
        for what, m, make in todo:
            if max(world.exchange(time.time() - start)) > a.seconds:
                break
            try:
                fns = {name: make(model) for name, model in models.items()}
                error = error_of(fns["weft"](), fns["transformers"]())
                times = {mode: time_interleaved(fns, mode=mode, calls=4, rounds=5) for mode in ("eager", "graph")}
            except Exception as e:  # one size that cannot be timed leaves the others
                print(f"{what} {m}: rank {world.rank}: {type(e).__name__}: {e}"[:500], flush=True)
                continue
            for mode, us in times.items():
                if world.rank == 0:
                    print(f"{time.time() - start:.0f}s {what} {m} {mode}: {us['transformers']:.0f} -> {us['weft']:.0f} "
                          f"({us['transformers'] / us['weft']:.3f}x), error {error:.4f}", flush=True)  # fmt: skip
                    rows = [
                        dict(op="hf", name=f"70B-{what}-{m}", M=m, N=8192, K=28672, layers=a.layers, world=world.size, mode=mode,
                             method=method, us=round(t, 1), error=round(error, 5), length=a.length, commit=commit())
                        for method, t in us.items()
                    ]  # fmt: skip
                    with open(a.out / "hf.jsonl", "a") as f:
                        f.writelines(json.dumps(row) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
