"""Transformers' tensor-parallel styles, served by weft: the official way, of single linears alone, before loading.

rowwise   `matmul_all_reduce`: the GEMM under its own all-reduce, where that pays
colwise   this rank's GEMM, without a wrapper's host time
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...ops.matmul_reduce.op import MATMUL_ALL_REDUCE, matmul_all_reduce
from ...plans import Plan
from ...tensor_checks import DTYPES
from ..torch_async_tp import world_of

Forward = Callable[..., torch.Tensor]


def styles(plan: str | Plan = "auto") -> Styles:
    """Models that are loaded from this call on, with `distributed_config=DistributedConfig(tp_size=..)`, have weft's
    linears: Transformers' styles "rowwise" and "colwise", by which its plans name them, are weft's.

    Returns a Styles; as a context manager, or by `close()`, it gives the names back to Transformers. Models that were
    loaded keep what they have. plan: of `weft.matmul_all_reduce`; ValueError for one that it does not have. What a call
    is not of (a gradient, another dtype than bfloat16 and float16, a group that has no World) goes on to Transformers'
    own, at each call anew. `weave` goes further than this, and may follow it.
    """
    return Styles(plan)


class Styles:
    """linears: how many have been given a forward of weft's."""

    def __init__(self, plan: str | Plan) -> None:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        MATMUL_ALL_REDUCE.check_plan(plan)
        self.plan, self.linears = plan, 0
        self._table, self._before = ALL_PARALLEL_STYLES, {n: ALL_PARALLEL_STYLES[n] for n in ("rowwise", "colwise")}
        for name, own in self._before.items():
            ALL_PARALLEL_STYLES[name] = self._style(type(own), _rows if name == "rowwise" else _columns)

    def _style(self, own: type[Any], compute: Callable[..., torch.Tensor | None]) -> Any:
        """An object of Transformers' style, all of it inherited but the forward that it installs."""
        taken = self

        class Style(own):
            def install_forward(self, module: Any, mesh: Any) -> Any:
                super().install_forward(module, mesh)
                plain = type(module) is nn.Linear
                if plain:
                    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
                    module.forward = _first(functools.partial(compute, module, group, taken.plan), module.forward)
                taken.linears += plain
                return module

        return Style()

    def close(self) -> None:
        for name, own in self._before.items():
            self._table[name] = own

    def __enter__(self) -> Styles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _first(compute: Callable[[torch.Tensor], torch.Tensor | None], own: Forward) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        made = None if torch.is_grad_enabled() or isinstance(x, DTensor) or x.dtype not in DTYPES else compute(x)
        return own(x) if made is None else made

    return forward


def _rows(module: Any, group: Any, plan: str | Plan, x: torch.Tensor) -> torch.Tensor | None:
    world, weight = world_of(group.group_name, x), _local(module.weight, Shard(1))
    if world is None or weight is None or weight.dtype != x.dtype:
        return None
    bias = None if module.bias is None else _local(module.bias, Replicate())
    y = matmul_all_reduce(x.flatten(0, -2), weight, bias, world=world, plan=plan)
    return y.view(*x.shape[:-1], y.shape[-1])


def _columns(module: Any, group: Any, plan: str | Plan, x: torch.Tensor) -> torch.Tensor | None:
    weight = _local(module.weight, Shard(0))
    if weight is None or weight.dtype != x.dtype:
        return None
    return F.linear(x, weight, None if module.bias is None else _local(module.bias, Shard(0)))


def _local(parameter: torch.Tensor, placement: Shard | Replicate) -> torch.Tensor | None:
    """This rank's part of what lies as expected; quantised weights do not."""
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (placement,):
        return None
    return parameter.to_local()
