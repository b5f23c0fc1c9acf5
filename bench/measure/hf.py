"""A Transformers model woven, beside itself: torchrun --nproc-per-node N -m bench.measure.hf --out DIR [--tokens 512 ..] [--batches 1 ..]
[--serve 64]

Llama-3.3-70B's sizes with fewer layers, random weights, Transformers' tensor parallelism over all ranks. Appends rows to
DIR/hf.jsonl: `us` of a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence,
without a cache; "decode": one token of each of M sequences over a static cache of `length` tokens. mode "graph": captured in a
CUDA graph, all ways. Methods "transformers"; "weft", in one part whatever the tokens; "woven", prefill in two parts. error: of the
logits, relative, to those of the same weights in float32. --errors: rows of errors alone, DIR/hf_errors.jsonl, also for ranks
that share a GPU.

--serve N: continuous batching of N requests with ShareGPT's lengths (prompts and outputs --shorter times as short), all there at
the start; rows of `tokens_s`, output tokens a second of the second of two runs, `steps`, and us of a step on the host by what it does
there. Method "transformers" with its own attention, "transformers paged" with weft.hf.paged, "weft" woven and with that. mode
"graph": use_cuda_graph=True; "async": with use_async_batching=True too, which prepares a step while the one before runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import weft
from bench.common.resume import keep, unfinished
from bench.common.timing import error_of, time_interleaved
from bench.measure import decoder
from bench.measure.run import commit

BF = torch.bfloat16
LLAMA_70B = dict(  # of the vocabulary a few words: a whole head under 8 of 80 layers would hide them
    vocab_size=1024, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
    max_position_embeddings=16384, rms_norm_eps=1e-5,
)  # fmt: skip


def loaded(layers: int, world: weft.World, dtype: torch.dtype = BF) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**LLAMA_70B, num_hidden_layers=layers, dtype=dtype)
    split = DistributedConfig(tp_size=world.size, tp_plan="auto")
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict={}, dtype=dtype, distributed_config=split
    )
    return model.to(world.device).eval()


def prefill(model: Any, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(1000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs one token of each sequence, always at the same position, as a step of a server's batch does."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=length + 8)
    ids = torch.randint(1000, (batch, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    start = torch.randint(1000, (batch, length), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    model(start, past_key_values=cache, logits_to_keep=1)
    position = torch.full((1, 1), length, device="cuda")

    def step() -> torch.Tensor:
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length") and isinstance(layer.cumulative_length, torch.Tensor):
                layer.cumulative_length.fill_(length)
        return model(ids, past_key_values=cache, position_ids=position, logits_to_keep=1).logits

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


def served(model: Any, prompts: list[list[int]], outputs: list[int], mode: str) -> dict[str, float]:
    """Of the second of two runs output tokens a second, steps, and us of a step: preparing it, launching it, waiting for what it
    gives, and accounting. The loop of continuous batching runs here and not in its thread, so that a rank that fails is seen to."""
    room = 4 + sum(-(-(len(p) + n) // 256) for p, n in zip(prompts, outputs, strict=True))
    batching = transformers.generation.ContinuousBatchingConfig(
        max_batch_tokens=1024,
        use_cuda_graph=mode != "eager",
        use_async_batching=mode == "async",
        block_size=256,
        num_blocks=room,
        allow_block_sharing=False,
    )
    wanted = transformers.GenerationConfig(
        max_new_tokens=max(outputs), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(generation_config=wanted, continuous_batching_config=batching)
    manager.warmup()
    status, loop = manager.background_thread_status, manager.batch_processor
    spent: dict[str, float] = {}
    for name, owner, method in (
        ("prepare", loop, "prepare_next_batch"), ("launch", loop, "_generation_step"), ("account", loop, "update_batch"),
        ("wait", loop.inputs_and_outputs, "retrieve_device_outputs"),
    ):  # fmt: skip
        setattr(owner, method, timed(spent, name, getattr(owner, method)))
    for run in range(2):
        status.clear()
        for i, (prompt, n) in enumerate(zip(prompts, outputs, strict=True)):
            manager.add_request(prompt, max_new_tokens=n, request_id=f"{run} {i}")
        status.request_stop(status.FLUSH_AND_STOP, dist.get_rank())  # once all are served
        torch.cuda.synchronize()
        dist.barrier()
        spent.clear()
        start = time.time()
        manager._run_generation_loop()
        torch.cuda.synchronize()
        seconds = time.time() - start
        results = [manager.get_result(timeout=1) for _ in prompts]
        if [
            r and len(r.generated_tokens) for r in sorted(results, key=lambda r: int(r.request_id.split()[1]))
        ] != outputs:
            raise RuntimeError(f"the loop of continuous batching has ended early: {status.fatal_error}")
    spent["launch"] -= spent["wait"]
    steps = manager.current_batch
    manager.batch_processor = None
    manager.destroy()
    del manager, loop
    gc.collect()  # a pool of memory that goes while the next one's graphs are made ends the process
    return {"tokens_s": sum(outputs) / seconds, "steps": steps} | {k: v / steps * 1e6 for k, v in spent.items()}


def timed(spent: dict[str, float], name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

    return run


def serve(models: dict[str, Any], a: argparse.Namespace, world: weft.World) -> None:
    rng = random.Random(7)
    prompt_lengths, outputs = (decoder.lengths(stats, a.serve, rng) for stats in decoder.MIXES["ShareGPT"])
    outputs = [max(2, n // a.shorter) for n in outputs]
    prompts = [[rng.randrange(1, 1000) for _ in range(max(2, n // a.shorter))] for n in prompt_lengths]
    plain, woven = models["transformers"], models["weft"]
    woven._weft.two_parts = None
    for mode, method in ((mode, method) for mode in a.modes for method in a.served):
        model = woven if method == "weft" else plain
        if method == "transformers":
            model.set_attn_implementation("sdpa")
            if mode != "eager":  # a mask of all tokens to the whole cache at each step
                continue
        else:
            weft.hf.paged(model)
        faulthandler.dump_traceback_later(a.patience, exit=True)
        figures = served(model, prompts, outputs, mode)
        faulthandler.cancel_dump_traceback_later()
        model.set_attn_implementation("sdpa")
        rounded = {name: round(value, 1) for name, value in figures.items()}
        note(a, world, f"{method} serves {rounded} {mode}", [
            dict(op="hf", name="70B-serve-ShareGPT", M=a.serve, layers=a.layers, world=world.size, mode=mode, method=method,
                 **rounded, outputs=sum(outputs), prompts=sum(map(len, prompts)), commit=commit())
        ])  # fmt: skip


def note(
    a: argparse.Namespace, world: weft.World, text: str, rows: list[dict[str, object]], file: str = "hf.jsonl"
) -> None:
    keep(world, a.out / file, rows)
    if world.rank == 0:
        print(f"{time.time() - a.start:.0f}s {text}", flush=True)


def note_errors(a: argparse.Namespace, world: weft.World, name: str, errors: dict[str, float]) -> None:
    fixed = dict(op="hf errors", name=name, layers=a.layers, world=world.size, commit=commit())
    rows = [dict(fixed, method=method, error=round(error, 5)) for method, error in errors.items()]
    figures = ", ".join(f"{method} {error:.4f}" for method, error in errors.items())
    note(a, world, f"{name}: off float32 by {figures}", rows, "hf_errors.jsonl")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--tokens", nargs="*", type=int, default=[512, 2048, 8192])
    p.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--serve", type=int, default=0, help="requests of continuous batching")
    p.add_argument("--shorter", type=int, default=1)
    p.add_argument(
        "--modes", nargs="*", default=["eager"], choices=["eager", "graph", "async"], help="of continuous batching"
    )
    p.add_argument("--served", nargs="*", default=["weft", "transformers paged", "transformers"])
    p.add_argument(
        "--patience", type=float, default=60, help="seconds for one way to serve; then where it hangs is said"
    )
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    p.add_argument("--errors", action="store_true", help="nothing is timed")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    a.start, world = time.time(), weft.init()
    with torch.no_grad():
        models = {"transformers": loaded(a.layers, world), "weft": loaded(a.layers, world)}
        exact = loaded(a.layers, world, torch.float32)
        for copies in (models["weft"], exact):
            for copy, parameter in zip(copies.parameters(), models["transformers"].parameters(), strict=True):
                copy.copy_(parameter)
        weft.hf.weave(models["weft"])
        note(a, world, weft.hf.report(models["weft"]), [])
        todo: list[tuple[str, int, Callable[[Any], Callable[[], torch.Tensor]]]] = [
            *(("prefill", n, lambda model, n=n: prefill(model, n)) for n in a.tokens),
            *(("decode", n, lambda model, n=n: decode(model, n, a.length)) for n in a.batches),
        ]
        cases = {f"70B {phase} {m}": (phase, m, make) for phase, m, make in todo}
        for phase, m, make in unfinished(world, a.out, cases, a.seconds):
            try:
                fns = ways(models, make, phase == "prefill")
                expected = make(exact)()
                errors = {name: error_of(fn(), expected) for name, fn in fns.items()}
                if a.errors:
                    note_errors(a, world, f"70B-{phase}-{m}", errors)
                    continue
                times = {
                    mode: time_interleaved(fns, mode=mode, calls=1 if m > 2048 else 4, rounds=5)
                    for mode in ("eager", "graph")
                }
            except Exception as e:  # one size that cannot be timed leaves the others
                print(f"{phase} {m}: rank {world.rank}: {type(e).__name__}: {e}"[:500], flush=True)
                continue
            for mode, us in times.items():
                base = us["transformers"]
                figures = ", ".join(
                    f"{method} {t:.0f} ({base / t:.3f}x), off {errors[method]:.4f}" for method, t in us.items()
                )
                note(a, world, f"{phase} {m} {mode}: {figures}", [
                    dict(op="hf", name=f"70B-{phase}-{m}", M=m, N=8192, K=28672, layers=a.layers, world=world.size, mode=mode,
                         method=method, us=round(t, 1), error=round(errors[method], 5), length=a.length, commit=commit())
                    for method, t in us.items()
                ])  # fmt: skip
        for _ in unfinished(world, a.out, {f"70B serves {a.serve}": a.serve} if a.serve else {}, a.seconds):
            serve(models, a, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
