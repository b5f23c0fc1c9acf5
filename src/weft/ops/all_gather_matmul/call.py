"""What one call of all-gather + GEMM computes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..common import MatmulCall
from ..recipes import SCALE_BLOCK

GATHER_GEMM = "all_gather_matmul"


class GatheredRows(NamedTuple):
    """The gathered activation [M, K], or None where no caller wants it, and the scales of its rows, or None."""

    x: torch.Tensor | None
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class GatherCall(MatmulCall):
    """gated: 0, or the columns I of an output silu(gate) * up [M, I], for a weight whose rows alternate
    `Scale.interleave` gate and as many up rows, the last blocks padded with zeros. gathered: the gathered activation is
    returned too; each rank's own choice."""

    gated: int
    gathered: bool

    @property
    def scales_in_row(self) -> int:
        """How many scales travel with a row."""
        scaling = self.recipe and self.recipe.scaling
        return self.k // SCALE_BLOCK if scaling == "block" else int(scaling == "row")

    def agreed(self) -> dict[str, Hashable]:
        return super().agreed() | dict(gated=self.gated)
