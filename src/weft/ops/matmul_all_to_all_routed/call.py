"""The description of one call of GEMM + all-to-all by a routing on the device, and its operands."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..common import MatmulCall

GEMM_ALL_TO_ALL_ROUTED = "matmul_all_to_all_routed"


class RoutedFactors(NamedTuple):
    """Operands of the GEMM, and the rank that each row of its result goes to."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    destinations: torch.Tensor


@dataclass(frozen=True)
class StaticCall(MatmulCall):
    """A call whose shapes do not depend on the routing. shards: the rows of one rank, since all ranks have as many. A
    bias is each rank's own, and a gradient each rank's own matter, so ranks do not compare them."""

    gradient: bool = field(kw_only=True)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return dict(m=self.rows, N=self.n, K=self.k, dtype=str(self.dtype))
