"""The two halves of a tensor-parallel layer, each an nn.Linear of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import nn

from ..ops.all_gather_matmul.op import all_gather_matmul
from ..ops.matmul_reduce.op import matmul_all_reduce, matmul_reduce_scatter
from ..plans import Plan
from ..world import World
from .sharded import Sharded, divide_by_ranks


class _ParallelLinear(Sharded):
    weight: nn.Parameter
    bias: nn.Parameter | None
    sharded_parameters = ("weight", "bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world: World,
        bias: bool,
        plan: str | Plan,
        dtype: torch.dtype,
        weight_shape: tuple[int, int],
        bias_shape: int,
    ) -> None:
        super().__init__(world, dtype)
        self.in_features, self.out_features, self.plan = in_features, out_features, plan
        self.weight = nn.Parameter(torch.empty(weight_shape, dtype=dtype, device=world.device))
        self.bias = nn.Parameter(torch.zeros(bias_shape, dtype=dtype, device=world.device)) if bias else None
        self.fill({"weight": in_features**-0.5})

    def get_shard(self, name: str) -> torch.Tensor | None:
        return self.weight if name == "weight" else self.bias

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        self.get_shard(name).copy_(value)  # type: ignore[union-attr]

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, world: World, plan: str | Plan = "auto", **options: Any) -> Self:
        """This rank's part of a whole `nn.Linear`, which must be the same on all ranks; copies it to `world.device`.
        What is frozen stays so. dtype: the linear's, if it is not given. Raises as the constructor."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_linear: an nn.Linear is needed, got {type(linear).__name__}")
        options.setdefault("dtype", linear.weight.dtype)
        made = cls(
            linear.in_features, linear.out_features, world=world, bias=linear.bias is not None, plan=plan, **options
        )
        made.load_state_dict(linear.state_dict())
        for name, p in linear.named_parameters():
            getattr(made, name).requires_grad_(p.requires_grad)
        return made

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {super().extra_repr()}"


class ColumnParallelLinear(_ParallelLinear):
    """all_gather(x) @ weight.T + bias; every rank holds out_features / W of the outputs.

        forward     x [m_r, in_features] -> [M, out_features / W]
        parameters  weight [out_features / W, in_features], bias [out_features / W]

    keep_gathered: the backward pass finds the gathered x [M, in_features] kept, and does not gather it again. State
    dicts have nn.Linear's names (`weft.nn.full_state_dict`). Raises ValueError if W does not divide out_features,
    TypeError for a dtype other than bfloat16 and float16.
    """

    sharded_dim = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        world: World,
        bias: bool = True,
        keep_gathered: bool = False,
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        n = divide_by_ranks("ColumnParallelLinear: out_features", out_features, world)
        super().__init__(in_features, out_features, world, bias, plan, dtype, (n, in_features), n)
        self.keep_gathered = keep_gathered

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """rows: rows of every rank's x, where they are not all equal."""
        keep = self.keep_gathered and torch.is_grad_enabled() and self.weight.requires_grad
        made = all_gather_matmul(
            x, self.weight, self.bias, world=self.world, plan=self.plan, rows=rows, return_gathered=keep
        )
        return made[0] if isinstance(made, tuple) else made


class RowParallelLinear(_ParallelLinear):
    """The sum over ranks of x @ weight.T, + bias; every rank holds in_features / W of the inputs.

        forward     x [M, in_features / W] -> [m_r, out_features] (reduce="scatter") or [M, out_features] (reduce="all")
        parameters  weight [out_features, in_features / W], bias [out_features], the same on all ranks

    The gradient of the bias is the same on all ranks, so their copies stay equal. State dicts have nn.Linear's names
    (`weft.nn.full_state_dict`). Raises ValueError if W does not divide in_features, TypeError for a dtype other than
    bfloat16 and float16.
    """

    sharded_dim = {"weight": 1, "bias": None}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        world: World,
        bias: bool = True,
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
        reduce: str = "scatter",
    ) -> None:
        if reduce not in ("scatter", "all"):
            raise ValueError(f'RowParallelLinear: reduce {reduce!r} is not "scatter" or "all"')
        k = divide_by_ranks("RowParallelLinear: in_features", in_features, world)
        self.reduce = reduce
        super().__init__(in_features, out_features, world, bias, plan, dtype, (out_features, k), out_features)

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """rows: rows that every rank gets; None: as evenly as possible, longer shards first. With reduce="all" every
        rank gets all of them, whatever `rows` says."""
        if self.reduce == "all":
            return matmul_all_reduce(x, self.weight, self.bias, world=self.world, plan=self.plan)
        return matmul_reduce_scatter(x, self.weight, self.bias, world=self.world, plan=self.plan, rows=rows)
