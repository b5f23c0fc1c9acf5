"""What one call of all-gather + GEMM computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..common import MatmulCall

GATHER_GEMM = "all_gather_matmul"


@dataclass(frozen=True)
class GatherCall(MatmulCall):
    """gated: 0, or the columns I of an output silu(gate) * up [M, I], for a weight whose rows alternate
    `Scale.interleave` gate and as many up rows, the last blocks padded with zeros. gathered: the gathered activation is
    returned too; each rank's own choice."""

    gated: int
    gathered: bool

    def agreed(self) -> dict[str, Hashable]:
        return super().agreed() | dict(gated=self.gated)
