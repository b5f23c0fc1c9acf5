"""The measured plans: the fastest one for each measured shape, by GPU model and way of launching.

`bench/pages/table.py` makes `tables/<gpu>.json` from the results of `bench/measure/run.py --tune`. A row has the op,
world, M, N, K (of the GEMM on one rank, but M of all ranks), mode ("graph": captured in a CUDA graph, "eager"), the
fastest plan and its speedup over cuBLAS + NCCL: the one that the benchmark confirmed, or that of the tuning run, less
what such runs overstated elsewhere.

Rows of the op DECODER, from `bench/measure/decoder.py --tune`, have the way in which a decoder's layers run from M
tokens on; N and K are its hidden and its intermediate size (`nn.weave.Table`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..op import Op
from ..plans import Plan, Sequential

if TYPE_CHECKING:
    from ..world import World

DECODER = "decoder"
StoredRow: TypeAlias = dict[str, Any]  # as it is stored
KEY = ("op", "world", "M", "N", "K", "mode")  # the fields that identify a row
GAIN = 1.02  # a plan with a smaller speedup is not worth its memory


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
    us: float | None = None


@functools.cache
def stored(gpu: str) -> tuple[StoredRow, ...]:
    """Return the rows of one GPU model as they are stored; empty if it was not measured."""
    path = resources.files(__package__) / "tables" / f"{gpu}.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else ()


@functools.cache
def load(gpu: str) -> tuple[Measured, ...]:
    """Return the rows of ops on one GPU model."""
    return tuple(
        Measured(op, world, m, n, k, mode, Plan.from_json(json.dumps(r["plan"])), r["speedup"], r["us"])
        for r in stored(gpu)
        for op, world, m, n, k, mode in [itemgetter(*KEY)(r)]
        if op != DECODER
    )


def layers(gpu: str, world: int, hidden: int, intermediate: int) -> list[StoredRow]:
    """Return the rows of decoders of these sizes."""
    key = DECODER, world, hidden, intermediate
    return [r for r in stored(gpu) if (r["op"], r["world"], r["N"], r["K"]) == key]


def gpu_of(world: World) -> str:
    """Return the GPU model whose plans this World runs: its own, or, for ranks that share a GPU without measured plans,
    a model that has some."""
    gpu = gpu_model(world.device)
    return gpu if load(gpu) or not world.backend.shares_gpu else next(iter(models()), gpu)


def models() -> list[str]:
    """Return the GPU models that have measured plans."""
    files = (resources.files(__package__) / "tables").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


_learned: list[Measured] = []


def learn(rows: list[Measured]) -> None:
    """Add rows measured in this process; they take precedence over the shipped ones of the same shape. Every rank must
    learn the same rows."""
    _learned[:0] = rows
    Op.table_version += 1
    exact.cache_clear()


@functools.cache
def gpu_model(device: torch.device) -> str:
    """Return the GPU model, such as "nvidia-h200"; "none" without a GPU."""
    if device.type != "cuda":
        return "none"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@functools.lru_cache(maxsize=65536)
def exact(gpu: str, op: str, world: int, m: int, n: int, k: int, mode: str) -> Plan | None:
    """Return the plan of the row of exactly this shape, Sequential if nothing won there, None without a row."""
    measured = row(gpu, op, world, m, n, k, mode)
    return None if measured is None else measured.plan if measured.speedup >= GAIN else Sequential()


def row(gpu: str, op: str, world: int, m: int, n: int, k: int, mode: str) -> Measured | None:
    """Return the row of exactly this shape, or None. The rows of an op that was only measured in graphs also count for
    eager calls: its plan is one launch in place of several."""
    rows = [r for r in (*_learned, *load(gpu)) if r.op == op]
    modes = (mode, *({"graph"} if all(r.mode == "graph" for r in rows) else ()))
    for r in rows:
        if (r.world, r.m, r.n, r.k) == (world, m, n, k) and r.mode in modes:
            return r
    return None
