"""A Transformers model woven, beside itself: torchrun --nproc-per-node N bench/hf.py --out DIR [--tokens 512 ..] [--batches 1 ..]
[--serve 64]

Llama-3.3-70B's sizes with fewer layers, random weights, Transformers' tensor parallelism over all ranks. Appends rows to
DIR/hf.jsonl: `us` of a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence,
without a cache; "decode": one token of each of M sequences over a static cache of `length` tokens. mode "graph": captured in a
CUDA graph, all ways. Methods "transformers"; "weft", in one part whatever the tokens; "woven", prefill in two parts.

--serve N: continuous batching of N requests with ShareGPT's lengths (prompts and outputs --shorter times as short), all there at
the start; rows of `tokens_s`, output tokens a second of the second of two runs. Method "transformers" with its own attention,
"transformers paged" with weft.hf.paged, "weft" woven and with that. mode "graph": use_cuda_graph=True.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decoder
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


def in_parts(model: Any, two_parts: int | None, fn: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        model._weft.two_parts = two_parts
        return fn()

    return run


def ways(models: dict[str, Any], make: Callable[[Any], Callable[[], torch.Tensor]], prefill: bool) -> dict[str, Any]:
    fns = {name: make(model) for name, model in models.items()}
    woven, one = models["weft"], fns["weft"]
    fns["weft"] = in_parts(woven, None, one)
    return fns | ({"woven": in_parts(woven, 1, one)} if prefill else {})


# -- continuous batching -----------------------------------------------------------------------------------------------


def served(model: Any, prompts: list[list[int]], outputs: list[int], graph: bool) -> float:
    """Output tokens a second. The ranks meet over gloo: NCCL is the loop's, which runs in a thread of its own."""
    meeting = dist.new_group(backend="gloo")
    options = dict(
        block_size=256, num_blocks=4 + sum(-(-(len(p) + n) // 256) for p, n in zip(prompts, outputs, strict=True))
    )
    batching = transformers.generation.ContinuousBatchingConfig(max_batch_tokens=1024, use_cuda_graph=graph, **options)
    wanted = transformers.GenerationConfig(
        max_new_tokens=max(outputs), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    told = dict(generation_config=wanted, continuous_batching_config=batching, block=True, timeout=5)
    with model.continuous_batching_context_manager(**told) as manager:
        for turn in range(2):
            dist.barrier(meeting)
            start, done = time.time(), 0
            for prompt, n in zip(prompts, outputs, strict=True):
                manager.add_request(prompt, max_new_tokens=n, request_id=f"{turn} {done}")
                done += 1
            while done:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the loop of continuous batching has ended")
                done -= result is not None and result.is_finished()
            torch.cuda.synchronize()
            rate = sum(outputs) / (time.time() - start)
    return rate


def serve(models: dict[str, Any], a: argparse.Namespace, world: weft.World) -> None:
    rng = random.Random(7)
    prompt_lengths, outputs = (decoder.lengths(stats, a.serve, rng) for stats in decoder.MIXES["ShareGPT"])
    outputs = [max(2, n // a.shorter) for n in outputs]
    prompts = [[rng.randrange(1, 1000) for _ in range(max(2, n // a.shorter))] for n in prompt_lengths]
    own, woven = models["transformers"], models["weft"]
    woven._weft.two_parts = None
    for mode in a.modes:
        for method, model in (("weft", woven), ("transformers paged", own), ("transformers", own)):
            weft.hf.paged(model) if method != "transformers" else model.set_attn_implementation("sdpa")
            rate = served(model, prompts, outputs, mode == "graph")
            note(a, world, f"{method} serves {rate:.0f} tokens/s {mode}", [
                dict(op="hf", name="70B-serve-ShareGPT", M=a.serve, layers=a.layers, world=world.size, mode=mode, method=method,
                     tokens_s=round(rate, 1), outputs=sum(outputs), prompts=sum(map(len, prompts)), commit=commit())
            ])  # fmt: skip
    for model in models.values():
        model.set_attn_implementation("sdpa")


def note(a: argparse.Namespace, world: weft.World, said: str, rows: list[dict[str, object]]) -> None:
    if world.rank == 0:
        print(f"{time.time() - a.start:.0f}s {said}", flush=True)
        with open(a.out / "hf.jsonl", "a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--tokens", nargs="*", type=int, default=[512, 2048, 8192])
    p.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--serve", type=int, default=0, help="requests of continuous batching")
    p.add_argument("--shorter", type=int, default=1)
    p.add_argument("--modes", nargs="*", default=["eager"], choices=["eager", "graph"], help="of continuous batching")
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    a.start, world = time.time(), weft.init()
    with torch.no_grad():
        models = {"transformers": loaded(a.layers, world), "weft": loaded(a.layers, world)}
        for mine, other in zip(models["weft"].parameters(), models["transformers"].parameters(), strict=True):
            mine.copy_(other)
        weft.hf.weave(models["weft"])
        note(a, world, weft.hf.report(models["weft"]), [])
        todo: list[tuple[str, int, Callable[[Any], Callable[[], torch.Tensor]]]] = [
            *(("prefill", n, lambda model, n=n: prefill(model, n)) for n in a.tokens),
            *(("decode", n, lambda model, n=n: decode(model, n, a.length)) for n in a.batches),
        ]
        for what, m, make in todo:
            if max(world.exchange(time.time() - a.start)) > a.seconds:
                break
            try:
                fns = ways(models, make, what == "prefill")
                want = fns["transformers"]()
                errors = {name: error_of(fn(), want) for name, fn in fns.items()}
                times = {mode: time_interleaved(fns, mode=mode, calls=4, rounds=5) for mode in ("eager", "graph")}
            except Exception as e:  # one size that cannot be timed leaves the others
                print(f"{what} {m}: rank {world.rank}: {type(e).__name__}: {e}"[:500], flush=True)
                continue
            for mode, us in times.items():
                own = us["transformers"]
                told = ", ".join(
                    f"{method} {t:.0f} ({own / t:.3f}x), off {errors[method]:.4f}" for method, t in us.items()
                )
                note(a, world, f"{what} {m} {mode}: {told}", [
                    dict(op="hf", name=f"70B-{what}-{m}", M=m, N=8192, K=28672, layers=a.layers, world=world.size, mode=mode,
                         method=method, us=round(t, 1), error=round(errors[method], 5), length=a.length, commit=commit())
                    for method, t in us.items()
                ])  # fmt: skip
        if a.serve and max(world.exchange(time.time() - a.start)) <= a.seconds:
            serve(models, a, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
