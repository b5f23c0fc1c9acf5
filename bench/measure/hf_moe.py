"""A Transformers mixture of experts woven, beside Transformers' own expert parallelism of it:
torchrun --nproc-per-node N -m bench.measure.hf_moe --out DIR [--models Qwen3-30B ..] [--tokens 2048 ..] [--batches 1 ..] [--forms]

Sizes of Mixtral-8x7B, Qwen3-30B-A3B and GPT-OSS-120B with fewer layers, random weights. Appends rows to DIR/hf_moe.jsonl: `us` of
a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence, without a cache; "decode": one
token of each of M sequences over a static cache of `length` tokens. mode "graph": captured in a CUDA graph, both ways. Methods
"transformers" and "weft"; with --forms also both forms of a woven layer, "weft few" and "weft many", whatever the tokens.
"""

from __future__ import annotations

import argparse
import functools
import gc
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
from bench.measure.hf import decode, prefill
from bench.measure.run import commit
from weft.integrations.transformers import forwards

BF = torch.bfloat16
COMMON = dict(vocab_size=1024, max_position_embeddings=16384, rms_norm_eps=1e-5)  # a few words, as in hf.py
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B": ("Qwen3Moe", dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    )),
    "Mixtral-8x7B": ("Mixtral", dict(
        hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, num_attention_heads=32,
        num_key_value_heads=8, sliding_window=None,
    )),
    "GPT-OSS-120B": ("GptOss", dict(
        hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, sliding_window=128,
    )),
}  # fmt: skip


def own_parallelism(ranks: int) -> DistributedConfig:
    """Return expert parallelism as this version of Transformers has it."""
    if hasattr(DistributedConfig, "ep_size"):
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def loaded(name: str, layers: int, world: weft.World) -> Any:
    torch.manual_seed(1)
    kind, sizes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON, **sizes, num_hidden_layers=layers, dtype=BF)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls.from_pretrained(
        None, config=config, state_dict={}, dtype=BF, distributed_config=own_parallelism(world.size)
    )
    return model.to(world.device).eval()


def of_form(fn: Callable[[], torch.Tensor], sharded_from: int) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        before, forwards.SHARDED_FROM = forwards.SHARDED_FROM, sharded_from
        try:
            return fn()
        finally:
            forwards.SHARDED_FROM = before

    return run


def ways(models: dict[str, Any], make: Callable[[Any], Callable[[], torch.Tensor]], forms: bool) -> dict[str, Any]:
    fns = {name: make(model) for name, model in models.items()}
    if forms:
        fns |= {"weft few": of_form(fns["weft"], 1 << 30), "weft many": of_form(fns["weft"], 1)}
    return fns


def measured(name: str, phase: str, m: int, fns: dict[str, Any], world: weft.World, a: argparse.Namespace) -> None:
    error = error_of(fns["weft"](), fns["transformers"]())
    for mode in a.modes:
        try:
            times = time_interleaved(fns, mode=mode, calls=4, rounds=a.rounds)
        except Exception as e:  # what cannot be captured leaves the rest
            print(f"{name} {phase} {m} {mode}: rank {world.rank}: {type(e).__name__}: {e}"[:500], flush=True)
            continue
        if world.rank:
            continue
        ratio = times["transformers"] / times["weft"]
        figures = ", ".join(f"{method} {us:.0f}" for method, us in times.items())
        print(
            f"{time.time() - a.start:.0f}s {name} {phase} {m} {mode}: {figures} ({ratio:.3f}x), error {error:.4f}",
            flush=True,
        )
        keep(world, a.out / "hf_moe.jsonl", [
            dict(op="hf_moe", name=f"{name}-{phase}-{m}", M=m, layers=a.layers, world=world.size, mode=mode, method=method,
                 us=round(us, 1), error=round(error, 5), length=a.length, transformers=transformers.__version__, commit=commit())
            for method, us in times.items()
        ])  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    p.add_argument("--tokens", nargs="*", type=int, default=[2048, 8192])
    p.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    p.add_argument("--modes", nargs="*", default=["graph", "eager"])
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--forms", action="store_true", help="both forms of a woven layer too")
    p.add_argument("--seconds", type=float, default=1e9, help="start nothing further after this many")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    a.start, world = time.time(), weft.init()
    transformers.logging.set_verbosity_error()  # all that is missing from an empty checkpoint
    transformers.logging.disable_progress_bar()
    for name in a.models:
        with torch.no_grad():
            models = {"transformers": loaded(name, a.layers, world), "weft": loaded(name, a.layers, world)}
            for copy, parameter in zip(models["weft"].parameters(), models["transformers"].parameters(), strict=True):
                copy.copy_(parameter)
            weft.hf.weave(models["weft"], world)
            if world.rank == 0:
                print(f"{time.time() - a.start:.0f}s {name}\n{weft.hf.report(models['weft'])}", flush=True)
            todo = [("prefill", n, functools.partial(prefill, tokens=n)) for n in a.tokens]
            todo += [("decode", n, functools.partial(decode, batch=n, length=a.length)) for n in a.batches]
            cases = {f"{name} {phase} {m}": (phase, m, make) for phase, m, make in todo}
            for phase, m, make in unfinished(world, a.out, cases, a.seconds):
                try:
                    fns = ways(models, make, a.forms and phase == "prefill")
                    measured(name, phase, m, fns, world, a)
                except Exception as e:  # one size that cannot be timed leaves the others
                    print(f"{name} {phase} {m}: rank {world.rank}: {type(e).__name__}: {e}"[:500], flush=True)
        models.clear()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
