"""The baselines of weft's ops: cuBLAS + NCCL, torch's own fused ops, and quack's all-gather + GEMM if it is installed. Each has the same
operands and result as weft's op."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

import weft
from weft.backends import library_gemm
from weft.integrations import quack
from weft.op import Op

Run = Callable[[], object]


def cublas_nccl(op: str, x: torch.Tensor, w: torch.Tensor, world: int) -> Run:
    """Return a function that runs cuBLAS's GEMM and NCCL's collective one after the other, with outputs from the
    caching allocator."""
    if op == "all_gather_matmul":

        def run() -> torch.Tensor:
            full = torch.empty(x.shape[0] * world, x.shape[1], device=x.device, dtype=x.dtype)
            dist.all_gather_into_tensor(full, x)
            return full @ w.t()

        return run
    return lambda: sum_over_ranks(op, x @ w.t(), world)


def sum_over_ranks(op: str, y: torch.Tensor, world: int) -> torch.Tensor:
    """Return what NCCL's collective of a sum over ranks makes of the partial sums y: this rank's rows, or y itself with all rows."""
    if op == "matmul_all_reduce":
        dist.all_reduce(y)
        return y
    out = torch.empty(y.shape[0] // world, y.shape[1], device=y.device, dtype=y.dtype)
    dist.reduce_scatter_tensor(out, y)
    return out


def cublas_nccl_mlp(x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, world: weft.World) -> Run:
    """Return a function that runs an MLP: all-gather, gate and up projections in one GEMM, weft's SiLU-mul kernel, down
    projection, reduce-scatter."""
    gather_gemm = cublas_nccl("all_gather_matmul", x, w_in, world.size)

    def run() -> object:
        return cublas_nccl("matmul_reduce_scatter", weft.silu_mul(gather_gemm(), world=world), w_out, world.size)()

    return run


def torch_fused(op: str, x: torch.Tensor, w: torch.Tensor) -> Run | None:
    """Return a call of torch.distributed's asynchronous tensor parallelism (symmetric memory), or None for an op that
    torch lacks."""
    group = dist.group.WORLD.group_name
    symm.enable_symm_mem_for_group(group)
    if op == "all_gather_matmul":
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, group)
    if op == "matmul_reduce_scatter":
        return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group)
    return None


def quack_runs(op: str, x: torch.Tensor, w: torch.Tensor, world: int) -> dict[str, Run]:
    """Return quack's all-gather + GEMM, by name, in each form of quack's GEMM that weft tries; empty if quack cannot
    run. These calls need CUDA graphs."""
    if op != "all_gather_matmul" or quack.lacks() is not None:
        return {}
    from quack.distributed import AllGatherRunner
    from quack.gemm import gemm

    runner = AllGatherRunner(x.shape[0], x.shape[1], x.dtype)

    def run_of(form: library_gemm.Form) -> Run:
        def run() -> torch.Tensor:
            out = torch.empty(x.shape[0] * world, w.shape[0], device=x.device, dtype=x.dtype)
            runner.capture_lockstep = True
            tile = form.tile_m, form.tile_n, form.cluster_m, 1
            with runner.gather(x) as (full, gather_args):
                gemm(full, w, out, None, None, *tile, pingpong=form.pingpong, ag_args=gather_args)
            return out

        return run

    fit = [form for form in quack.FORMS if x.shape[0] % (form.tile_m * form.cluster_m) == 0]
    return {f"quack {form.tile_m}x{form.tile_n}": run_of(form) for form in fit}


def without_quack(run: Run) -> Run:
    """Return a function that calls `run` as if quack were not installed."""

    def alone() -> object:
        lacks, quack.lacks = quack.lacks, lambda: "left out"
        # "auto" stores the decisions of each table version separately.
        knowledge, Op.table_version = Op.table_version, -1 - Op.table_version
        try:
            return run()
        finally:
            quack.lacks, Op.table_version = lacks, knowledge

    return alone


def collective(op: str, m: int, n: int, k: int, world: int, dtype: torch.dtype) -> Run:
    """Return a call of NCCL's collective alone, with the sizes of this op."""
    cols = k if op == "all_gather_matmul" else n
    full = torch.randn(m, cols, device="cuda", dtype=dtype)
    part = torch.randn(m // world, cols, device="cuda", dtype=dtype)
    if op == "all_gather_matmul":
        return lambda: dist.all_gather_into_tensor(full, part)
    if op == "matmul_reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, full)
    return lambda: dist.all_reduce(full)


def link_rate(world: weft.World) -> float:
    """Return the GB/s at which a copy engine pulls 64 MiB from the next rank in a CUDA graph while every rank does the
    same."""
    from bench.common.timing import time_interleaved

    memory = world.symmetric((64 << 20,), torch.uint8, "link probe")
    destination = torch.empty_like(memory.local)
    peer = memory.peers[(world.rank + 1) % world.size]
    us = time_interleaved({"copy": lambda: destination.copy_(peer)}, mode="graph", calls=10, rounds=5)["copy"]
    return destination.numel() / us / 1e3
