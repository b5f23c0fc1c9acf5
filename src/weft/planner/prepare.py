"""`weft.prepare`: calls of every size that a plan is found for, made before anybody waits for one."""

from __future__ import annotations

import operator
from collections.abc import Callable

from rich.console import Console
from rich.progress import track

from ..world import World
from .search import near


def sizes(rows: int, multiple: int, world: int) -> list[int]:
    """Multiples of `multiple`, from `rows` downwards: of those that one plan is found for the largest, and the next,
    whose shards are no whole tiles where the largest one's are, which is another compiled kernel."""
    found: dict[int, list[int]] = {}
    for m in range(rows // multiple * multiple, 0, -multiple):
        found.setdefault(near(m, world), []).append(m)
    return [m for alike in found.values() for m in alike[:2]]


def prepare(call: Callable[[int], object], rows: int, *, multiple: int | None = None, world: World) -> None:
    """Make calls of all sizes that a plan is found for: the calls that come later compile no kernel and search for no
    plan. Collective; outside CUDA graphs; waits for the GPU. Rank 0 shows how far it is on stderr.

        weft.prepare(lambda m: weft.matmul_all_reduce(x[:m], w, world=world), 8192, world=world)

    A call of a new size still compares notes with the other ranks, and has its memory to allocate.

    Args:
        call: makes the calls of one size, in rows of all ranks together. Alike on all ranks.
        rows: the most that will come.
        multiple: sizes are multiples of it. None: of the number of ranks, as an all-gather of even shards has them.
        world: the World of the calls.

    Raises:
        TypeError, ValueError: `rows` or `multiple` is no int, or below 1.
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
