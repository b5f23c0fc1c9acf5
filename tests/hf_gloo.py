"""Two ranks over gloo for tests of `weft.hf` on models that Transformers has split. weft's own ops run on GPUs and in the
emulator, where there are no process groups, so torch's stand in for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import weft


def world_of(*_: object) -> weft.World:
    """Of all ranks; of a World's parts those that weft.hf looks at."""
    world = object.__new__(weft.World)
    scale = SimpleNamespace(whole=1 << 30)  # every rank holds the residual whole
    backend = SimpleNamespace(name="gloo", current_stream=lambda: None, capturing=lambda: False, scale=scale)
    rank, size = dist.get_rank(), dist.get_world_size()
    world.__dict__.update(rank=rank, size=size, backend=backend, device=torch.device("cpu"), name="gloo")
    return world


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = x.float()
    dist.all_reduce(summed)
    h = summed + residual.float()
    return F.rms_norm(h, h.shape[-1:], weight.float(), eps).to(x.dtype), h.to(x.dtype)


def matmul_all_reduce(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: object) -> torch.Tensor:
    y = x.float() @ weight.float().t()
    dist.all_reduce(y)
    called.append(x.shape[0])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def silu_mul(x: torch.Tensor, **_: object) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotary(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv: int, norms: Any, eps: float, **_: object
) -> torch.Tensor:
    d = cos.shape[-1]
    q, k, v = qkv.unflatten(-1, (-1, d)).float().split([heads, kv, kv], 1)
    if norms is not None:
        q, k = (F.rms_norm(t, (d,), norm.float(), eps) for t, norm in zip((q, k), norms, strict=True))
    c, s = (t.float().view(-1, 1, d) for t in (cos, sin))
    c, s = (t.repeat(len(q) // len(t), 1, 1) for t in (c, s))
    q, k = (t * c + torch.cat([-t[..., d // 2 :], t[..., : d // 2]], -1) * s for t in (q, k))
    return torch.cat([q, k, v], 1).flatten(1).to(qkv.dtype)


def gather(x: torch.Tensor, world: weft.World, shards: list[int], stream: object) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in shards]
    dist.all_gather(every, x.contiguous())
    return torch.cat(every)


called: list[int] = []  # rows of matmul_all_reduce
STANDING_IN = {
    "weft.hf.joints.all_reduce_rms_norm": all_reduce_rms_norm,
    "weft.hf.parts.silu_mul": silu_mul,
    "weft.hf.parts.rotary": rotary,
    "weft.hf.parts.gather": gather,
    "weft.hf.weaving.init": world_of,
    "weft.hf.styles.matmul_all_reduce": matmul_all_reduce,
    "weft.hf.styles.world_of": world_of,
}


def on_two_ranks(fn: Callable[[], None], store: Path) -> None:
    """`fn`, of a module, in two processes."""
    mp.spawn(_rank, (str(store), fn), nprocs=2)


def _rank(rank: int, store: str, fn: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    with contextlib.ExitStack() as stack:
        for name, stand_in in STANDING_IN.items():
            stack.enter_context(mock.patch(name, stand_in))
        fn()
    dist.destroy_process_group()


def split(model: Any, **more: Any) -> Any:
    """The model as Transformers splits it over all ranks."""
    from transformers.distributed import DistributedConfig

    over = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    told = dict(state_dict=model.state_dict(), dtype=model.dtype, distributed_config=over, **more)
    return type(model).from_pretrained(None, config=model.config, **told).eval()
