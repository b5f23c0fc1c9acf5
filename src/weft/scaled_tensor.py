"""The 8-bit operand: a matrix in e4m3 together with its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
SCALE_BLOCK = 128  # with recipe "block", the columns of a row, and the rows and columns of a weight, that share a scale


class ScaledTensor(NamedTuple):
    """An 8-bit matrix with its scales.

    The matrix is `values`, with each element multiplied by its scale. values: torch.float8_e4m3fn [R, K]. scales:
    float32. recipe: selects the elements that share a scale.

        "tensor"    all of them: [1]
        "row"       a row: [R, 1] or [R], of a weight also [1, R]
        "block"     128 columns of a row: [R, K / 128], for K a multiple of 128; of a weight 128 x 128 elements:
                    [R / 128 rounded up, K / 128] (DeepSeek-V3, section 3.3.2)
    """

    values: torch.Tensor
    scales: torch.Tensor
    recipe: str

    def dequantized(self, rows: int = 1) -> torch.Tensor:
        """Return the values in float32. rows: the number of rows that share a block scale: 128 for a weight."""
        scales = self.scales
        if self.recipe == "row":
            scales = scales.view(-1, 1)
        elif self.recipe == "block":
            scales = scales.repeat_interleave(rows, 0)[: len(self.values)].repeat_interleave(SCALE_BLOCK, 1)
        return self.values.float() * scales


def scales_shape(recipe: str, rows: int, columns: int, block_rows: int) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix. block_rows: the number of rows that share a block scale."""
    by_block = -(-rows // block_rows), columns // SCALE_BLOCK
    return {"tensor": (1,), "row": (rows, 1), "block": by_block}[recipe]


@dataclass(frozen=True)
class Scaling:
    """The way in which a GEMM of 8-bit operands is computed. recipe: the operands' `ScaledTensor.recipe`. fast_accum:
    sums stay in the tensor cores' accumulators, except with recipe "block", which always adds them in float32."""

    recipe: str
    fast_accum: bool = False

    @property
    def by_block(self) -> bool:
        return self.recipe == "block"

    @property
    def promotes(self) -> bool:
        """Return whether a GEMM adds the partial product of each step along K to a float32 accumulator."""
        return self.by_block or not self.fast_accum

    def scales_in_row(self, k: int) -> int:
        """Return the number of scales for a row of x with k elements; 0 if one scale serves the whole tensor."""
        return {"tensor": 0, "row": 1, "block": k // SCALE_BLOCK}[self.recipe]
