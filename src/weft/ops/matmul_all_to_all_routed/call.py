"""The description of one call of GEMM + all-to-all by a routing on the device, and its operands."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..common import MatmulCall

GEMM_ALL_TO_ALL_ROUTED = "matmul_all_to_all_routed"


class RoutedFactors(NamedTuple):
    """The operands of the GEMM, and the destination rank of each row of its result."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    destinations: torch.Tensor


@dataclass(frozen=True)
class StaticCall(MatmulCall):
    """A call with shapes that do not depend on the routing. shards: the rows of one rank, since all ranks have equally
    many. Each rank chooses for itself whether it has a bias and a gradient, so ranks do not compare these."""

    gradient: bool = field(kw_only=True)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return dict(m=self.rows, N=self.n, K=self.k, dtype=str(self.dtype))
