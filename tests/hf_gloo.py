"""Two ranks over gloo for tests of `weft.hf` on models that Transformers has split: a World whose ops are torch's, since
weft's own run on GPUs and in the emulator, where there are no process groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import weft


def world_of(group: Any = None) -> weft.World:
    world = object.__new__(weft.World)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    backend = SimpleNamespace(
        current_stream=lambda: None,
        scale=SimpleNamespace(whole=1 << 30),
        linear=lambda x, w, b, stream, out=None: torch.nn.functional.linear(x, w, b),
    )
    world.__dict__.update(rank=rank, size=size, backend=backend, device=torch.device("cpu"), name="gloo")
    return world


def all_reduce_rms_norm(x: Any, residual: Any, weight: Any, eps: float, *, world: Any, **_: Any) -> tuple[Any, Any]:
    summed = x.float()
    dist.all_reduce(summed)
    h = summed + residual.float()
    normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), h.to(x.dtype)


def matmul_all_reduce(x: Any, w: Any, *, world: Any, **_: Any) -> Any:
    y = x @ w.t()
    dist.all_reduce(y)
    return y


def silu_mul(x: Any, *, world: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def stand_ins() -> mock._patch_dict:
    """Patches of the ops, where weft.hf calls them."""
    import contextlib

    stack = contextlib.ExitStack()
    for name, fn in (
        ("weft.hf.joints.all_reduce_rms_norm", all_reduce_rms_norm),
        ("weft.hf.parts.silu_mul", silu_mul),
        ("weft.hf.weaving.init", world_of),
    ):
        stack.enter_context(mock.patch(name, fn))
    return stack
