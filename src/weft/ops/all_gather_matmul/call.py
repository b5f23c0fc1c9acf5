"""The description of one call of all-gather + GEMM."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..common import MatmulCall

GATHER_GEMM = "all_gather_matmul"


class GatheredRows(NamedTuple):
    """The gathered activation [M, K], or None if the caller does not request it, and the scales of its rows, or
    None."""

    x: torch.Tensor | None
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class GatherCall(MatmulCall):
    """A checked call. `gated` is 0, or I if the output is silu(gate) * up [M, I]. In the weight of such a call, blocks
    of `Scale.interleave` gate rows alternate with up blocks of the same size, and the last blocks are padded with
    zeros. `gathered` is true if this rank also returns the gathered activation; each rank decides this for itself."""

    gated: int
    gathered: bool

    @property
    def scales_in_row(self) -> int:
        """Return the number of scales that a rank sends with a row."""
        return 0 if self.scaling is None else self.scaling.scales_in_row(self.k)

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        return super().same_on_all_ranks() | dict(gated=self.gated)
