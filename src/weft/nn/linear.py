"""The two halves of a tensor-parallel layer. Each half is an nn.Linear that is split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import nn

from ..ops.all_gather_matmul.op import all_gather_matmul, all_gather_matmul_with_gathered
from ..ops.matmul_reduce.op import matmul_all_reduce, matmul_reduce_scatter
from ..plans import Plan
from ..world import World
from .scaled import NAMES, Activation, ProductKeywords, ScaledModule, product_operands
from .sharded import divide_by_ranks


class _ParallelLinear(ScaledModule):
    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_scale: nn.Parameter | None
    sharded_parameters = ("weight", "bias", "weight_scale")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        world: World,
        bias: bool,
        plan: str | Plan,
        dtype: torch.dtype,
        weight_shape: tuple[int, int],
        recipe: str | None,
    ) -> None:
        super().__init__(world, dtype, recipe)
        self.in_features, self.out_features, self.plan = in_features, out_features, plan
        (n, k), self.bias = weight_shape, None
        self.add_matrix("weight", [n], k)
        self.name_scales("")
        if bias:
            zeros = torch.zeros(n, dtype=dtype, device=world.device)
            self.bias = nn.Parameter(zeros, requires_grad=recipe is None)
        self.fill({"weight": in_features**-0.5})

    def get_shard(self, name: str) -> torch.Tensor | None:
        return self.weight_scale if name in NAMES.values() else self.weight if name == "weight" else self.bias

    def operands(self, x: Activation) -> tuple[Activation, Activation, ProductKeywords]:
        weight = self.weight_operand("weight")
        x, options = product_operands(x, weight, self.dtype, self.world)
        return x, weight, options

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, world: World, plan: str | Plan = "auto", **options: Any) -> Self:
        """Return this rank's shard of a whole `nn.Linear`, which must be the same on all ranks. The shard is copied to
        `world.device` and, with a `recipe`, quantized. Frozen parameters stay frozen. dtype: by default the linear's
        dtype. Raises the same errors as the constructor."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"{cls.__name__}.from_linear: an nn.Linear is needed, got {type(linear).__name__}")
        options.setdefault("dtype", linear.weight.dtype)
        module = cls(
            linear.in_features, linear.out_features, world=world, bias=linear.bias is not None, plan=plan, **options
        )
        module.load_state_dict(linear.state_dict())
        for name, p in linear.named_parameters():
            getattr(module, name).requires_grad_(p.requires_grad and module.recipe is None)
        return module

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {super().extra_repr()}"


class ColumnParallelLinear(_ParallelLinear):
    """all_gather(x) @ weight.T + bias; every rank holds out_features / W of the outputs.

        forward     x [m_r, in_features] -> [M, out_features / W]
        parameters  weight [out_features / W, in_features], bias [out_features / W]

    keep_gathered: save the gathered x [M, in_features] for the backward pass, which otherwise gathers it again. recipe:
    "row" or "block": the weight is e4m3, with float32 weight_scale [out_features / W, 1] or weight_scale_inv
    [out_features / W / 128, in_features / 128], and no gradient (nn/scaled.py); x has 16 bits, or 8 bits as
    `weft.quantize` returns it. State dicts have nn.Linear's names (`weft.nn.full_state_dict`). Raises ValueError if W
    does not divide out_features, TypeError for a dtype other than bfloat16 and float16.
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
        recipe: str | None = None,
    ) -> None:
        n = divide_by_ranks("ColumnParallelLinear: out_features", out_features, world)
        super().__init__(in_features, out_features, world, bias, plan, dtype, (n, in_features), recipe)
        self.keep_gathered = keep_gathered

    def forward(self, x: Activation, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the layer. rows: the number of rows of every rank's x, if they are not all equal."""
        (x, weight, options), world, plan = self.operands(x), self.world, self.plan
        if self.keep_gathered and torch.is_grad_enabled() and self.weight.requires_grad:
            rows_of_x = cast(torch.Tensor, x)  # the op raises an error for any other input
            return all_gather_matmul_with_gathered(rows_of_x, weight, self.bias, world=world, plan=plan, rows=rows)[0]
        return all_gather_matmul(x, weight, self.bias, world=world, plan=plan, rows=rows, **options)


class RowParallelLinear(_ParallelLinear):
    """The sum over ranks of x @ weight.T, + bias; every rank holds in_features / W of the inputs.

        forward     x [M, in_features / W] -> [m_r, out_features] (reduce="scatter") or [M, out_features] (reduce="all")
        parameters  weight [out_features, in_features / W], bias [out_features], the same on all ranks

    The gradient of the bias is the same on all ranks, so their copies stay equal. recipe: as in ColumnParallelLinear;
    weight_scale [out_features, 1], the same on all ranks, or weight_scale_inv [out_features / 128, in_features / W /
    128]. State dicts have nn.Linear's names (`weft.nn.full_state_dict`). Raises ValueError if W does not divide
    in_features, TypeError for a dtype other than bfloat16 and float16.
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
        recipe: str | None = None,
    ) -> None:
        if reduce not in ("scatter", "all"):
            raise ValueError(f'RowParallelLinear: reduce {reduce!r} is not "scatter" or "all"')
        k = divide_by_ranks("RowParallelLinear: in_features", in_features, world)
        self.reduce = reduce
        super().__init__(in_features, out_features, world, bias, plan, dtype, (out_features, k), recipe)

    def forward(self, x: Activation, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the layer. rows: the number of rows that every rank receives; None: M is split as evenly as possible,
        longer shards on lower ranks. With reduce="all" every rank receives all rows, and `rows` is ignored."""
        (x, weight, options), world, plan = self.operands(x), self.world, self.plan
        if self.reduce == "all":
            return matmul_all_reduce(x, weight, self.bias, world=world, plan=plan, **options)
        return matmul_reduce_scatter(x, weight, self.bias, world=world, plan=plan, rows=rows, **options)
