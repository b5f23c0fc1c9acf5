"""The shapes that are measured: TileLink's MLP-1 to MLP-6 and Llama-70B's MLP at many token counts."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class MLP:
    """Tokens M over all ranks, hidden size H, intermediate size I of the whole (unsharded) gated MLP."""

    name: str
    tokens: int
    hidden: int
    intermediate: int

    def column(self, world: int) -> tuple[int, int, int]:
        """Return (M, N, K) of all-gather + GEMM on one rank: gate and up projections together."""
        return self.tokens, 2 * self.intermediate // world, self.hidden

    def row(self, world: int) -> tuple[int, int, int]:
        """Return (M, N, K) of GEMM + reduce-scatter on one rank: down projection."""
        return self.tokens, self.hidden, self.intermediate // world


TILELINK = [
    MLP("MLP-1", 8192, 4096, 11008),
    MLP("MLP-2", 8192, 4096, 14336),
    MLP("MLP-3", 8192, 3584, 14336),
    MLP("MLP-4", 8192, 4608, 36864),
    MLP("MLP-5", 8192, 8192, 28672),
    MLP("MLP-6", 8192, 8192, 29568),
]
LLAMA_70B = [MLP(f"70B-{m}", m, 8192, 28672) for m in (128, 512, 1024, 2048, 4096, 16384, 32768)]
ALL = TILELINK + LLAMA_70B


def drawn(seed: int, count: int = 20) -> list[MLP]:
    """Return `count` shapes that nobody tuned for, in order: M is a multiple of 64, log-uniform from 128 to 16,384, H a
    multiple of 256 from 2,048 to 12,288, and I is 2 to 4.5 times H."""
    draw, sizes = random.Random(seed), set[tuple[int, int, int]]()
    while len(sizes) < count:
        hidden = 256 * draw.randint(8, 48)
        tokens = 64 * round(2 ** draw.uniform(1, 8))
        sizes.add((tokens, hidden, 512 * round(hidden * draw.uniform(2, 4.5) / 512)))
    return [MLP("x".join(map(str, size)), *size) for size in sorted(sizes)]
