"""weft's forms of Transformers' tensor-parallel styles, for single linears of models that are loaded later.

rowwise   `matmul_all_reduce`: the GEMM overlaps its own all-reduce, if that is faster
colwise   this rank's GEMM, without the host time of a wrapper
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...ops.matmul_reduce.op import MATMUL_ALL_REDUCE, matmul_all_reduce
from ...plans import Plan
from ...tensor_checks import DTYPES
from ..torch_async_tp import world_of
from .modules import UNBOUND, refuse_copy

Forward = Callable[..., torch.Tensor]


def styles(plan: str | Plan = "auto") -> Styles:
    """Replace Transformers' styles "rowwise" and "colwise" by weft's, for models that are loaded from now on with
    `distributed_config=DistributedConfig(tp_size=..)`.

    Return a Styles, which restores Transformers' styles at the end of its context, or in `close()`; loaded models keep
    their linears. `plan` is a plan of `weft.matmul_all_reduce`; any other plan raises ValueError. Calls with a
    gradient, a dtype other than bfloat16 and float16, or a group without a World use Transformers' own linears. `weave`
    overlaps more than these styles, and may be called afterwards.
    """
    return Styles(plan)


class Styles(AbstractContextManager["Styles"]):
    """The registration of weft's styles. `linears` counts the linears that have weft's forward."""

    def __init__(self, plan: str | Plan) -> None:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        MATMUL_ALL_REDUCE.check_plan(plan)
        self.plan, self.linears = plan, 0
        self._table, self._before = ALL_PARALLEL_STYLES, {n: ALL_PARALLEL_STYLES[n] for n in ("rowwise", "colwise")}
        for name, style in self._before.items():
            ALL_PARALLEL_STYLES[name] = self._style(type(style), _rows if name == "rowwise" else _columns)

    def _style(self, base: type[Any], compute: Callable[..., torch.Tensor | None]) -> Any:
        """Return an instance of Transformers' style `base` that replaces each linear's forward by a forward with
        `compute`."""
        styles = self

        class Style(base):
            def install_forward(self, module: Any, mesh: Any) -> Any:
                super().install_forward(module, mesh)
                plain = type(module) is nn.Linear
                if plain:
                    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
                    module.__deepcopy__ = functools.partial(
                        refuse_copy, f"{module} has a forward that Transformers has split, {UNBOUND}"
                    )
                    module.forward = _with_fallback(
                        functools.partial(compute, module, group, styles.plan), module.forward
                    )
                styles.linears += plain
                return module

        return Style()

    def close(self) -> None:
        for name, style in self._before.items():
            self._table[name] = style

    def __exit__(self, *_: object) -> None:
        self.close()


def _with_fallback(compute: Callable[[torch.Tensor], torch.Tensor | None], fallback: Forward) -> Forward:
    """Return a forward that calls `compute`, or `fallback` if `compute` does not apply or returns None."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = None if torch.is_grad_enabled() or isinstance(x, DTensor) or x.dtype not in DTYPES else compute(x)
        return fallback(x) if y is None else y

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
    """Return the local tensor of a DTensor with this placement; None for any other tensor, such as a quantised
    weight."""
    if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (placement,):
        return None
    return parameter.to_local()
