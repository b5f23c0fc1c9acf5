"""A row-parallel linear's GEMM and sum over ranks, where no norm follows that could take the sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from ...op import Call, Op, Operands, registered
from ...ops.common import validate
from ...ops.matmul_reduce.op import matmul_all_reduce
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


class RowAllReduce(Op[RowCall]):
    """Operands: x [M, K], weight [N, K], bias [N] or None, as `weft.matmul_all_reduce` takes them."""

    name = "row_all_reduce"
    signature = "Tensor x, Tensor weight, Tensor? bias"
    runs = {Sequential: "_weft", Engine: "_engine"}
    tries = (Sequential(),)

    def check(self, world: World, operands: Operands, options: tuple[object, ...]) -> RowCall:
        x, weight, bias = operands
        assert x is not None and weight is not None
        validate(self.name, world, x, weight, bias)
        return RowCall(x.shape[0], weight.shape[0], weight.shape[1], x.dtype)

    def meta(
        self, world: World, operands: Operands, options: tuple[object, ...]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        x, weight, _ = operands
        assert x is not None and weight is not None
        return [((x.shape[0], weight.shape[0]), x.dtype)]

    def outputs(self, world: World, call: RowCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, call.n), call.dtype)]

    def sizes(self, call: RowCall) -> tuple[int, int, int]:
        return call.m, call.n, call.k

    def auto(self, world: World, call: RowCall, mode: str) -> Plan:
        return Engine() if world.device.type == "cuda" else Sequential()

    def candidates(self, world: World, call: RowCall) -> Sequence[Plan]:
        return self.tries if world.device.type == "cuda" else ()

    def alike(self, call: RowCall) -> Hashable:
        """Numbers of tokens up to the same power of two."""
        return replace(call, m=1 << (call.m - 1).bit_length())

    def agree(self, world: World, call: RowCall, plan: Plan, **more: Hashable) -> None:
        """The operators that it is made of do."""

    def execute(
        self, world: World, call: RowCall, plan: Plan, operands: Operands, out: torch.Tensor | None
    ) -> torch.Tensor:
        if not call.m:
            return world.empty((0, call.n), call.dtype)
        run: Callable[..., torch.Tensor] = getattr(self, str(self.runs[type(plan)]))
        return run(world, *operands)

    def _weft(self, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return matmul_all_reduce(x, weight, bias, world=world)

    def _engine(self, world: World, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from vllm.distributed import tensor_model_parallel_all_reduce

        partial = world.linear(x.contiguous(), weight, None if world.rank else bias, world.current_stream())
        summed: torch.Tensor = tensor_model_parallel_all_reduce(partial)
        return summed


ROW_ALL_REDUCE = registered(RowAllReduce())
