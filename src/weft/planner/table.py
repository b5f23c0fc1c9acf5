"""Measured plans: what was best for which shape, per GPU model and per way of launching.

`tables/<gpu>.json` is made by `bench/pages/table.py` from the results of `bench/measure/run.py --tune`. A row names op,
world, M, N, K (global sizes of the GEMM on one rank), mode ("graph": captured in a CUDA graph, "eager"), the plan that
won and its speed relative to cuBLAS + NCCL: as the benchmark confirmed it, or as the tuning run had it less what such
runs overstated elsewhere.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import torch

from ..op import Op
from ..plans import Plan, Sequential

if TYPE_CHECKING:
    from ..world import World

GAIN = 1.02  # a plan that won by less is not worth its memory


@dataclass(frozen=True)
class Measured:
    op: str
    world: int
    m: int
    n: int
    k: int
    mode: str
    plan: Plan
    speedup: float


@functools.cache
def load(gpu: str) -> tuple[Measured, ...]:
    """The rows of one GPU model; empty for a model nobody measured."""
    path = resources.files(__package__) / "tables" / f"{gpu}.json"
    if not path.is_file():
        return ()
    return tuple(
        Measured(
            r["op"], r["world"], r["M"], r["N"], r["K"], r["mode"], Plan.from_json(json.dumps(r["plan"])), r["speedup"]
        )
        for r in json.loads(path.read_text())
    )


def gpu_of(world: World) -> str:
    """The GPU model by whose plans this World runs: its own; for ranks that share a GPU of which no plans were
    measured, a model of which some were."""
    gpu = gpu_model(world.device)
    return gpu if load(gpu) or not world.backend.shares_gpu else next(iter(models()), gpu)


def models() -> list[str]:
    """The GPU models of which plans were measured."""
    files = (resources.files(__package__) / "tables").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


_learned: list[Measured] = []


def learn(rows: list[Measured]) -> None:
    """Rows measured in this process; they stand before the shipped ones of the same shape. Every rank must learn the
    same."""
    _learned[:0] = rows
    Op.knowledge += 1
    exact.cache_clear()


@functools.cache
def gpu_model(device: torch.device) -> str:
    """ "nvidia-h200" and the like; "none" without a GPU."""
    if device.type != "cuda":
        return "none"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@functools.lru_cache(maxsize=65536)
def exact(gpu: str, op: str, world: int, m: int, n: int, k: int, mode: str) -> Plan | None:
    """The plan of the row of exactly this shape, Sequential where nothing won there; None without such a row. An op
    that was measured in graphs alone is one launch in place of several, which the host is no slower with."""
    rows = [r for r in (*_learned, *load(gpu)) if r.op == op]
    modes = (mode, *({"graph"} if all(r.mode == "graph" for r in rows) else ()))
    for r in rows:
        if (r.world, r.m, r.n, r.k) == (world, m, n, k) and r.mode in modes:
            return r.plan if r.speedup >= GAIN else Sequential()
    return None
