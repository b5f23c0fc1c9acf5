"""The GEMM and the all-reduce of a row-parallel linear as one operator. It computes the linears whose sum
is not computed together with a norm (row_norm_column.py)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...op import Op, RowsCall, registered
from ...ops.matmul_reduce.op import MATMUL_ALL_REDUCE
from ...ops.recipes import validate
from ...plans import Plan, Sequential
from ...prepared import OwnResult
from ...tensor_checks import check_operands
from ...world import World
from .fp8 import operand_specs, scaled_operands


class RowTensors(NamedTuple):
    """The operands. weight_scale contains the scales of a weight in e4m3 (`fp8.LinearWeight`)."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class RowCall(RowsCall):
    n: int
    dtype: torch.dtype


def prepare_sequential(world: World, call: RowCall, plan: Plan) -> OwnResult:
    """Prepare the GEMM and weft's all-reduce, which chooses a plan of its own."""

    def run(operands: RowTensors, out: torch.Tensor | None) -> tuple[torch.Tensor]:
        factors, options = scaled_operands(world, *operands)
        return (MATMUL_ALL_REDUCE(world, "auto", factors, (True, *options), out),)

    return OwnResult(run)


class RowAllReduce(Op[RowCall]):
    """The op row_all_reduce. The operands are x [M, K], weight [N, K] and bias [N] or None, as in
    `weft.matmul_all_reduce`, and the scales of a weight in e4m3, for which this op quantises x."""

    name = "row_all_reduce"
    signature = "Tensor x, Tensor weight, Tensor? bias, Tensor? weight_scale"
    operand_type = RowTensors
    runs = {Sequential: prepare_sequential}
    batch_invariant_plans = (Sequential,)

    def check(self, world: World, operands: RowTensors, options: tuple[object, ...]) -> RowCall:
        x, weight, bias, scale = operands
        if scale is None:
            validate(self.name, world, x, weight, bias)
        else:
            n, k = weight.shape
            specs = {"x": (x, (None, k), x.dtype), "bias": (bias, (n,), x.dtype)}
            check_operands(self.name, world, specs | operand_specs("weight", weight, scale, (n, k), x.dtype))
        return RowCall(x.shape[0], weight.shape[0], x.dtype)

    def meta(
        self, world: World, operands: RowTensors, options: tuple[object, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((operands.x.shape[0], operands.weight.shape[0]), operands.x.dtype)]

    def outputs(self, world: World, call: RowCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), call.dtype)]

    def expected(self, world: World, call: RowCall, mode: str) -> Plan:
        return Sequential()

    def check_same_on_all_ranks(self, world: World, call: RowCall, plan: Plan, **further: Hashable) -> None:
        """Do nothing: the operators that this op calls check that all ranks make the same call."""


ROW_ALL_REDUCE = registered(RowAllReduce())
