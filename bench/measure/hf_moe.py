"""A woven Transformers mixture of experts, compared with Transformers' own expert parallelism:
torchrun --nproc-per-node N -m bench.measure.hf_moe --out DIR [--models Qwen3-30B ..] [--tokens 2048 ..] [--batches 1 ..]

The models have the sizes of Mixtral-8x7B, Qwen3-30B-A3B and GPT-OSS-120B with fewer layers, and random weights. The program appends rows
to DIR/hf_moe.jsonl: `us` of a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence, without
a cache; "decode": one token of each of M sequences over a static cache of `length` tokens. In mode "graph" both methods,
"transformers" and "weft", are captured in CUDA graphs.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import weft
from bench.common.program import Program, gains, options
from bench.common.timing import error_of, time_interleaved
from bench.measure.hf import loaded, passes

COMMON = dict(vocab_size=1024, max_position_embeddings=16384, rms_norm_eps=1e-5)  # the vocabulary is small, as in hf.py
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


def own_parallelism(ranks: int) -> dict[str, Any]:
    """Return the options that enable expert parallelism in this version of Transformers."""
    return dict(ep_size=ranks) if hasattr(DistributedConfig, "ep_size") else dict(enable_expert_parallel=True)


def measured(run: Program, name: str, phase: str, m: int, fns: dict[str, Any]) -> None:
    error = error_of(fns["weft"](), fns["transformers"]())
    for mode in run.a.modes:
        with run.tolerating(f"{name} {phase} {m} {mode}"):
            times = time_interleaved(fns, mode=mode, calls=4, rounds=run.a.rounds)
            run.log(f"{name} {phase} {m} {mode}: {gains(times, 'transformers')}, error {error:.4f}")
            fixed = dict(op="hf_moe", name=f"{name}-{phase}-{m}", M=m, mode=mode, error=round(error, 5))
            run.keep(dict(fixed, method=method, us=round(us, 1)) for method, us in times.items())


def main() -> None:
    sizes = dict(models=list(MODELS), tokens=[2048, 8192], batches=[1, 16, 64], length=1024, layers=4)
    a = options(choices=dict(models=MODELS), **sizes, modes=["graph", "eager"], rounds=5)
    fixed = dict(layers=a.layers, length=a.length, transformers=transformers.__version__)
    run = Program(a, "hf_moe.jsonl", **fixed)
    transformers.logging.set_verbosity_error()  # otherwise Transformers lists everything that an empty checkpoint lacks
    transformers.logging.disable_progress_bar()
    for name in a.models:
        with torch.no_grad():
            kind, config = MODELS[name]
            config = COMMON | config | dict(num_hidden_layers=a.layers)
            split = own_parallelism(run.world.size)
            models = {method: loaded(kind, config, run.world, **split) for method in ("transformers", "weft")}
            for copy, parameter in zip(models["weft"].parameters(), models["transformers"].parameters(), strict=True):
                copy.copy_(parameter)
            weft.hf.weave(models["weft"], run.world)
            run.log(f"{name}\n{weft.hf.report(models['weft'])}")
            for phase, m, make in run.cases(passes(a, name)):
                with run.tolerating(f"{name} {phase} {m}"):
                    measured(run, name, phase, m, {method: make(model) for method, model in models.items()})
        models.clear()
        gc.collect()
        torch.cuda.empty_cache()
    run.end()


if __name__ == "__main__":
    main()
