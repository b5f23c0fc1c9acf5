"""`weft.prepare` calls every size that has its own plan in advance, so that no user's request waits for compilation."""

from __future__ import annotations

import operator
from collections.abc import Callable

from rich.console import Console
from rich.progress import track

from ..world import World
from .search import near

TILE_ROWS = 64  # the rows of the smallest tiles of GEMMs


def sizes(rows: int, multiple: int, world: int) -> list[int]:
    """Return multiples of `multiple` up to `rows`, in descending order: the two largest multiples for each plan and
    number of tile rows. If the chunks of the largest multiple are whole blocks, those of the second one may not be, and
    then a fused gather needs a separately compiled kernel. So does a GEMM whose last round of tiles is split."""
    alike: dict[tuple[int, int], list[int]] = {}
    for m in range(rows // multiple * multiple, 0, -multiple):
        alike.setdefault((near(m, world), -(-m // TILE_ROWS)), []).append(m)
    return [m for sizes_alike in alike.values() for m in sizes_alike[:2]]


def prepare(call: Callable[[int], object], rows: int, *, multiple: int | None = None, world: World) -> None:
    """Call `call` once for every size that has its own plan, so that later calls compile no kernel and search for no
    plan. The function is collective, must be called outside CUDA graphs, and waits for the GPU. Rank 0 shows progress
    on stderr.

        weft.prepare(lambda m: weft.matmul_all_reduce(x[:m], w, world=world), 8192, world=world)

    A later call of a new size still compares its arguments with the other ranks, and allocates its memory.

    Args:
        call: makes the calls of one size, in rows of all ranks together; the same on all ranks.
        rows: the largest size.
        multiple: all sizes are multiples of this. None: the number of ranks, as in an all-gather of even shards.
        world: the World of the calls.

    Raises:
        TypeError, ValueError: `rows` or `multiple` is not an int, or below 1.
    """
    multiple = world.size if multiple is None else multiple
    for name, value in (("rows", rows), ("multiple", multiple)):
        try:
            if operator.index(value) < 1:
                raise ValueError(f"prepare: {name} {value} must be at least 1")
        except TypeError:
            raise TypeError(f"prepare: {name} {value!r} must be an int") from None
    console = Console(stderr=True, quiet=world.rank != 0)
    for m in track(sizes(rows, multiple, world.size), "weft: plans and kernels", console=console):
        call(m)
    world.wait_for_streams()
