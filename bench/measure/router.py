"""Capacity, placement and the router's losses, by weft's kernels and by torch: torchrun --nproc-per-node 1 -m bench.measure.router --out DIR

128 experts, 8 of them a token. Appends a row for each number of tokens and mode to DIR/router.jsonl, us by method; a loss with
its gradient is "step". Takes about a minute.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import triton

import weft
from bench.common.resume import keep
from bench.common.timing import time_interleaved
from bench.measure.run import commit
from tests.emulated.cases_router import torch_balance, torch_capacity, torch_placement, torch_z_loss
from weft import moe

EXPERTS, K, TOKENS = 128, 8, (64, 256, 1024, 4096, 16384)


def methods(world: weft.World, tokens: int) -> dict[str, Callable[[], object]]:
    logits = torch.randn(tokens, EXPERTS, device=world.device, dtype=torch.bfloat16)
    ids, weights = moe.gate(logits, K, world=world)
    table = torch.arange(2 * EXPERTS, dtype=torch.int32, device=world.device).view(EXPERTS, 2)
    leaf = logits.clone().requires_grad_()
    fns: dict[str, Callable[[], object]] = {}
    for drop in ("position", "probability"):
        fns[f"capacity by {drop}, torch"] = lambda drop=drop: torch_capacity(ids, weights, EXPERTS, 1.0, drop)
        fns[f"capacity by {drop}, weft"] = lambda drop=drop: moe.apply_capacity(
            ids, weights, EXPERTS, 1.0, drop=drop, world=world
        )
    fns["placement, torch"] = lambda: torch_placement(ids, table, world.rank)
    fns["placement, weft"] = lambda: moe.expert_placement(ids, table, world=world)
    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "load balancing, torch": lambda x: torch_balance(x, ids),
        "load balancing, weft": lambda x: moe.load_balancing_loss(x, ids, world=world),
        "z-loss, torch": torch_z_loss,
        "z-loss, weft": lambda x: moe.z_loss(x, world=world),
    }
    for name, loss in losses.items():
        fns[name] = lambda loss=loss: loss(logits)
        fns[f"{name}, step"] = lambda loss=loss: torch.autograd.grad(loss(leaf), leaf)
    return fns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    world = weft.init()
    common = dict(
        gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, commit=commit(),
        date=f"{datetime.datetime.now():%Y-%m-%d}", experts=EXPERTS, k=K,
    )  # fmt: skip
    for tokens in TOKENS:
        for mode in ("graph", "eager"):
            us = time_interleaved(methods(world, tokens), mode=mode)
            row = common | dict(tokens=tokens, mode=mode, us={name: round(t, 2) for name, t in us.items()})
            print(json.dumps(row), flush=True)
            keep(world, out / "router.jsonl", [row])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
