"""A row-parallel linear's GEMM and its sum over ranks as one operator, for linears whose sum no norm computes
(row_norm_column.py)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ...op import Call, Op, registered
from ...ops.common import Factors
from ...ops.matmul_reduce.op import matmul_all_reduce
from ...ops.recipes import validate
from ...plans import Plan, Sequential
from ...world import World
from .row_norm_column import Engine


@dataclass(frozen=True)
class RowCall(Call):
    m: int
    n: int
    k: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.m


def run_sequential(world: World, call: RowCall, plan: Plan, operands: Factors) -> torch.Tensor:
    """Compute the GEMM and the all-reduce with weft, whose operator has plans of its own."""
    return matmul_all_reduce(*operands, world=world)


def run_engine(world: World, call: RowCall, plan: Engine, operands: Factors) -> torch.Tensor:
    from vllm.distributed import tensor_model_parallel_all_reduce

    x, weight, bias = operands
    partial = world.linear(x.contiguous(), weight, None if world.rank else bias, world.current_stream())
    total: torch.Tensor = tensor_model_parallel_all_reduce(partial)
    return total


class RowAllReduce(Op[RowCall]):
    """row_all_reduce. The operands are x [M, K], weight [N, K] and bias [N] or None, as for
    `weft.matmul_all_reduce`."""

    name = "row_all_reduce"
    signature = "Tensor x, Tensor weight, Tensor? bias"
    takes = Factors
    runs = {Sequential: run_sequential, Engine: run_engine}
    tries = (Sequential(),)

    def check(self, world: World, operands: Factors, options: tuple[object, ...]) -> RowCall:
        x, weight, bias = operands
        validate(self.name, world, x, weight, bias)
        return RowCall(x.shape[0], weight.shape[0], weight.shape[1], x.dtype)

    def meta(
        self, world: World, operands: Factors, options: tuple[object, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((operands.x.shape[0], operands.weight.shape[0]), operands.x.dtype)]

    def outputs(self, world: World, call: RowCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), call.dtype)]

    def sizes(self, call: RowCall) -> tuple[int, int, int]:
        return call.m, call.n, call.k

    def expected(self, world: World, call: RowCall, mode: str) -> Plan:
        return Engine() if world.device.type == "cuda" else Sequential()

    def trial_key(self, call: RowCall) -> Hashable:
        """Return the call with its number of tokens rounded up to a power of two."""
        return replace(call, m=1 << (call.m - 1).bit_length())

    def check_same_on_all_ranks(self, world: World, call: RowCall, plan: Plan, **further: Hashable) -> None:
        """Check nothing: the operators that this one calls check that all ranks make the same call."""

    def execute(
        self, world: World, call: RowCall, plan: Plan, operands: Factors, out: torch.Tensor | None
    ) -> torch.Tensor:
        if not call.m:
            return world.empty((0, call.n), call.dtype)
        y: torch.Tensor = self.runs[type(plan)](world, call, plan, operands)
        return y


ROW_ALL_REDUCE = registered(RowAllReduce())
