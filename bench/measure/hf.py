"""A Transformers model with and without token weaving: torchrun --nproc-per-node N -m bench.measure.hf --out DIR
[--tokens 512 ..] [--batches 1 ..]

Llama-3.3-70B's sizes with fewer layers and random weights, under Transformers' tensor parallelism over all ranks. Appends rows to
DIR/hf.jsonl: `us` of a forward pass, the slowest rank's median of interleaved rounds; "prefill": M tokens of one sequence, without a
cache; "decode": one token of each of M sequences over a static cache of `length` tokens. In mode "graph" each method is captured in a
CUDA graph. The methods are "transformers"; "weft", which runs all tokens in one part; and "woven", which runs a prefill in two parts.
error: the logits' relative error against the same weights in float32. --errors appends rows of errors alone to DIR/hf_errors.jsonl, also
for ranks that share a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from transformers.distributed import DistributedConfig

import weft
from bench.common.program import Program, gains, options
from bench.common.timing import error_of, time_interleaved

BF = torch.bfloat16
Make = Callable[[Any], Callable[[], torch.Tensor]]  # of a model, a forward pass
LLAMA_70B = dict(  # the vocabulary is small: a whole head would take longer than 8 of 80 layers
    vocab_size=1024, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
    max_position_embeddings=16384, rms_norm_eps=1e-5,
)  # fmt: skip


def loaded(kind: str, sizes: dict[str, Any], world: weft.World, dtype: torch.dtype = BF, **split: Any) -> Any:
    """Return a model with random weights, which are the same in every call. split: use Transformers' own
    parallelism."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**sizes, dtype=dtype)
    model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
        None,
        config=config,
        state_dict={},
        dtype=dtype,
        distributed_config=DistributedConfig(tp_size=world.size, **split),
    )
    return model.to(world.device).eval()


def prefill(model: Any, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(1000, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    return lambda: model(ids, use_cache=False, logits_to_keep=1).logits


def decode(model: Any, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """Return a function that decodes one token of each sequence at a fixed position, like one step of a server."""
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


def passes(a: argparse.Namespace, name: str) -> dict[str, tuple[str, int, Make]]:
    """Return the phase, the tokens or sequences, and the function that makes a pass of a model, by case, for the options of a program."""
    todo: list[tuple[str, int, Make]] = [("prefill", n, partial(prefill, tokens=n)) for n in a.tokens]
    todo += [("decode", n, partial(decode, batch=n, length=a.length)) for n in a.batches]
    return {f"{name} {phase} {m}": (phase, m, make) for phase, m, make in todo}


def in_parts(model: Any, two_parts: int | None, fn: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        model._weft.two_parts = two_parts
        return fn()

    return run


def ways(models: dict[str, Any], make: Make, prefill: bool) -> dict[str, Any]:
    fns = {name: make(model) for name, model in models.items()}
    woven, one = models["weft"], fns["weft"]
    fns["weft"] = in_parts(woven, None, one)
    return fns | ({"woven": in_parts(woven, 1, one)} if prefill else {})


def measure(run: Program, phase: str, m: int, fns: dict[str, Any], expected: torch.Tensor) -> None:
    errors = {name: error_of(fn(), expected) for name, fn in fns.items()}
    shape = dict(name=f"70B-{phase}-{m}", layers=run.a.layers)
    run.log(f"{phase} {m}: the logits are off float32 by {errors}")
    if run.a.errors:
        rows = (dict(shape, op="hf errors", method=name, error=round(error, 5)) for name, error in errors.items())
        run.keep(rows, "hf_errors.jsonl")
        return
    shape |= dict(op="hf", M=m, N=8192, K=28672, length=run.a.length)
    for mode in ("eager", "graph"):
        times = time_interleaved(fns, mode=mode, calls=1 if m > 2048 else 4, rounds=5)
        run.log(f"{phase} {m} {mode}: {gains(times, 'transformers')}")
        run.keep(
            dict(shape, mode=mode, method=name, us=round(us, 1), error=round(errors[name], 5))
            for name, us in times.items()
        )


def main() -> None:
    a = options(tokens=[512, 2048, 8192], batches=[1, 16, 64], length=1024, layers=8, errors=False)
    run = Program(a, "hf.jsonl")
    with torch.no_grad():
        sizes = LLAMA_70B | dict(num_hidden_layers=a.layers)
        *pair, exact = (loaded("Llama", sizes, run.world, dtype, tp_plan="auto") for dtype in (BF, BF, torch.float32))
        models = dict(zip(("transformers", "weft"), pair, strict=True))
        for copies in (models["weft"], exact):
            for copy, parameter in zip(copies.parameters(), models["transformers"].parameters(), strict=True):
                copy.copy_(parameter)
        weft.hf.weave(models["weft"])
        run.log(weft.hf.report(models["weft"]))
        for phase, m, make in run.cases(passes(a, "70B")):
            with run.tolerating(f"{phase} {m}"):
                measure(run, phase, m, ways(models, make, phase == "prefill"), make(exact)())
    run.end()


if __name__ == "__main__":
    main()
