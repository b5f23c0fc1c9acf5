"""FlashInfer's kernel for all-reduce + residual + RMSNorm, which a pass may use as an additional form.

vLLM's compiler inserts this kernel into vLLM's own passes (`fuse_allreduce_rms`) for sums up to a size that depends on
the GPU and the number of ranks: on Hopper 64 MiB with two ranks, 2 MiB with four. The compiler does not see the sums of
the twin. So in the twin the kernel is a form of its own (row_norm_column.py), and only the memory for its workspace
limits the size of a sum. weft uses the one-shot and two-shot kernels of FlashInfer's backend "trtllm", which need no
multicast.
"""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...plans import Plan
from ...world import World
from .. import installed_version
from .interface import VllmObject, gather_objects, option

ROW_BUFFERS = 4  # a workspace has this many buffers for the rows of all ranks: one for two shots, three for one shot
WORKSPACE_BYTES = 256 << 20  # bytes of a workspace: half the size of vLLM's own workspace for two ranks

WorkspaceKey: TypeAlias = tuple[int, torch.dtype]  # the number of columns and the dtype of the rows


@dataclass(frozen=True)
class FlashInfer(Plan):
    """The sequential steps, with FlashInfer's kernel for the sum and the norm in passes of up to `max_tokens`
    tokens."""

    kind: ClassVar[str] = "flashinfer"
    max_tokens: int = 1


class FlashInferWorkspace(NamedTuple):
    """The module `flashinfer.comm`, and the memory that its kernel needs for a call."""

    comm: VllmObject
    memory: VllmObject


def installed() -> str | None:
    """Return the version of the installed FlashInfer, or None."""
    return installed_version("flashinfer-python")


def asked_for(config: VllmObject) -> bool:
    """Return whether vLLM's own passes use the kernel."""
    return bool(option(config, "compilation_config.pass_config.fuse_allreduce_rms")) and installed() is not None


def workspaces(world: World) -> dict[WorkspaceKey, FlashInferWorkspace]:
    """Return the World's workspaces. They are made at the start of an engine."""
    table: dict[WorkspaceKey, FlashInferWorkspace] = world.cached("FlashInfer's workspaces", dict)
    return table


def limit(world: World, h: int, dtype: torch.dtype, max_tokens: int) -> int:
    """Return the largest number of tokens, at most `max_tokens`, for which rows of h columns fit in a workspace."""
    return min(max_tokens, WORKSPACE_BYTES // (ROW_BUFFERS * world.size * h * dtype.itemsize))


def prepare(world: World, h: int, dtype: torch.dtype, tokens: int, group: VllmObject) -> str:
    """Make the workspace for `tokens` tokens, and call the kernel once with few tokens and once with all. Return the
    first error of any rank of vLLM's group, or "" if no rank has an error. The call is collective."""
    for step in (make_workspace, call_kernel):  # so that no rank waits in a kernel for a rank without a workspace
        error = ""
        try:
            step(world, h, dtype, tokens)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        if first_error := next(filter(None, gather_objects(error, group)), ""):
            drop(world)
            return first_error
    return ""


def make_workspace(world: World, h: int, dtype: torch.dtype, tokens: int) -> None:
    comm: VllmObject = importlib.import_module("flashinfer.comm")
    # vLLM does the same: engines on one host with the same seed would draw the same names for the exchange of handles.
    state = random.getstate()
    random.seed(os.urandom(16))
    try:
        memory = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=world.size,
            rank=world.rank,
            max_token_num=tokens,
            hidden_dim=h,
            dtype=dtype,
            group=world.group,
        )
    finally:
        random.setstate(state)
    workspaces(world)[h, dtype] = FlashInferWorkspace(comm, memory)


def call_kernel(world: World, h: int, dtype: torch.dtype, tokens: int) -> None:
    weight = torch.ones(h, dtype=dtype, device=world.device)
    for m in (1, tokens):
        all_reduce_norm(world, torch.zeros(m, h, dtype=dtype, device=world.device), None, weight, 1e-6)
    world.synchronize()


def drop(world: World) -> None:
    """Free the World's workspaces."""
    table = workspaces(world)
    while table:
        table.popitem()[1].memory.destroy()


def all_reduce_norm(
    world: World, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return norm(h) and h, both [M, H] on all ranks, where h = residual + the sum of x over ranks."""
    comm, memory = workspaces(world)[x.shape[1], x.dtype]

    def launch() -> tuple[Tensor, Tensor]:
        rows = x.contiguous()
        y, new_residual = torch.empty_like(rows), torch.empty_like(rows)
        comm.allreduce_fusion(
            input=rows,
            workspace=memory,
            pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            residual_in=torch.zeros_like(rows) if residual is None else residual.contiguous(),
            residual_out=new_residual,
            norm_out=y,
            rms_gamma=weight,
            rms_eps=eps,
            fp32_acc=True,
        )
        return y, new_residual

    reads = [x, weight] + ([] if residual is None else [residual])
    y, new_residual = world.backend.results(launch, [(x.shape, x.dtype)] * 2, reads, world.current_stream())
    return y, new_residual
