"""The measured plans: the fastest plan for each measured shape, by GPU model and launch mode.

`bench/pages/table.py` generates `tables/<gpu>.json` from the results of `bench/measure/run.py --tune`. A row has the
op, world, M, N, K (N and K of the GEMM on one rank, M of all ranks), mode ("graph": captured in a CUDA graph, "eager"),
the fastest plan and its speedup over cuBLAS + NCCL. The speedup is either the one that the benchmark confirmed, or the
speedup of the tuning run, reduced by the amount by which tuning runs overstated other speedups.

Rows of the op DECODER, from `bench/measure/decoder.py --tune`, contain the fastest way to run a decoder's layers from M
tokens on; N and K are the decoder's hidden and intermediate size (`nn.weave.Table`).
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
StoredRow: TypeAlias = dict[str, Any]  # a row in its stored form
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
    """Return the rows of one GPU model in their stored form; empty if the model was not measured."""
    path = resources.files(__package__) / "tables" / f"{gpu}.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else ()


@functools.cache
def load(gpu: str) -> tuple[Measured, ...]:
    """Return the rows of ops on one GPU model, without rows of decoders."""
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
    """Return the GPU model whose measured plans this World uses: its own model or, for ranks that share a GPU without
    measured plans, a different model."""
    gpu = gpu_model(world.device)
    return gpu if load(gpu) or not world.backend.shares_gpu else next(iter(models()), gpu)


def models() -> list[str]:
    """Return the GPU models that have measured plans."""
    files = (resources.files(__package__) / "tables").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


_learned: list[Measured] = []


def learn(rows: list[Measured]) -> None:
    """Add rows measured in this process. The added rows have precedence over shipped rows for the same shape. Every
    rank must add the same rows."""
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
    """Return the plan in the row for exactly this shape, Sequential if no plan was faster there, or None without a
    row."""
    measured = row(gpu, op, world, m, n, k, mode)
    return None if measured is None else measured.plan if measured.speedup >= GAIN else Sequential()


def row(gpu: str, op: str, world: int, m: int, n: int, k: int, mode: str) -> Measured | None:
    """Return the row for exactly this shape, or None. Eager calls also use the rows of an op that was measured only in
    graphs, because the op's plan is one launch instead of several."""
    rows = [r for r in (*_learned, *load(gpu)) if r.op == op]
    modes = (mode, *({"graph"} if all(r.mode == "graph" for r in rows) else ()))
    for r in rows:
        if (r.world, r.m, r.n, r.k) == (world, m, n, k) and r.mode in modes:
            return r
    return None
