"""The number of tokens from which on residuals are held by rows, timed on the loaded model's own weights."""

from __future__ import annotations

from collections import Counter

import torch

from ...planner.timing import CudaTimer, Timer
from ...world import World
from .dataflow import Flow, Site
from .interface import Theirs
from .layers import Classes
from .row_norm_column import ROW_NORM_COLUMN


def rows_from(flow: Flow, classes: Classes, world: World, least: int, most: int, timer: Timer | None = None) -> int:
    """The smallest power of two of tokens, at least `least`, from which on, up to `most`, the sites of a pass take less
    time with residuals held by rows than with whole ones, each by its fastest plan, of which the engine's own is one.
    0: there is none. Collective; also makes the trials of these sizes, so that requests wait for none."""
    timer = timer or CudaTimer(world)
    kinds = Counter(shapes(site, classes) for site in flow.sites)
    one_each = {shapes(site, classes): site for site in flow.sites}
    found, tokens = 0, 1 << (least - 1).bit_length()
    with torch.inference_mode():
        while tokens <= most:
            whole, by_rows = (
                sum(
                    count * us(one_each[kind], classes, world, tokens, threshold, timer)
                    for kind, count in kinds.items()
                )
                for threshold in (0, 1)
            )
            found = (found or tokens) if by_rows < whole else 0
            tokens *= 2
    return found


def shapes(site: Site, classes: Classes) -> tuple[int, int]:
    """Columns of x where the site computes the first GEMM, else 0, and of the result of the second, or 0."""
    row, column = operands(site, classes)[1:]
    return 0 if row is None else row.shape[1], 0 if column is None else column.shape[0]


def operands(site: Site, classes: Classes) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The norm's weight, and those of the GEMMs that the site computes."""
    norm: Theirs = site.norm
    reduction: Theirs = site.reduction
    column: Theirs = site.column
    return (
        norm.weight,
        reduction.weight if classes.is_gemm(reduction) else None,
        None if column is None else column.weight,
    )


def us(site: Site, classes: Classes, world: World, tokens: int, rows_from: int, timer: Timer) -> float:
    """Return the time of one call of the operator with the site's weights and so many tokens, in us."""
    norm, row, column = operands(site, classes)

    def drawn(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, dtype=norm.dtype, device=world.device)

    x, residual = drawn(norm.numel() if row is None else row.shape[1]), drawn(norm.numel())
    given = x, residual if site.residual else None, norm, row, None, column, None
    return timer.eager(lambda: ROW_NORM_COLUMN(world, "auto", given, (1e-6, rows_from, 0)))
