"""The description of one call of GEMM + reduce-scatter or GEMM + all-reduce."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..common import MatmulCall

GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"


@dataclass(frozen=True)
class ReduceCall(MatmulCall):
    """A checked call. `m` is the number of rows of x. With `everywhere`, all ranks receive the whole sum (all-reduce);
    otherwise each rank receives its shard (reduce-scatter). If `reorder` is false, the result may consist of the tiles
    of a signaled plan, and the call also returns a Remap, which is None for rows in ordinary order."""

    m: int
    everywhere: bool
    reorder: bool

    @property
    def rows(self) -> int:
        return self.m

    @property
    def op(self) -> str:
        return GEMM_ALL_REDUCE if self.everywhere else GEMM_REDUCE_SCATTER

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return super().same_on_all_ranks() | dict(reorder=self.reorder)
