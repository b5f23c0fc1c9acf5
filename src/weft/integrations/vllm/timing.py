"""The number of tokens from which on residuals are held by rows, timed on the loaded model's own weights."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch

from ...chooser import Choice
from ...world import World
from .dataflow import Flow, Site
from .interface import Theirs
from .layers import Classes
from .row_norm_column import ROW_NORM_COLUMN, LayerTensors

RESIDUALS_WHOLE, RESIDUALS_BY_ROWS = (
    0,
    1,
)  # the number of tokens from which on a call holds the residual by rows; 0: never


def rows_from(flow: Flow, classes: Classes, world: World, least: int, most: int) -> int:
    """The smallest power of two of tokens, at least `least`, from which on, up to `most`, the sites of a pass take less
    time with residuals held by rows than with whole ones, each by its fastest plan, of which the engine's own is one.
    0: there is none. Collective; also makes the trials of these sizes, so that requests wait for none."""
    kinds = Counter(shapes(site, classes) for site in flow.sites)
    one_each = {shapes(site, classes): site for site in flow.sites}
    found, tokens = 0, 1 << (least - 1).bit_length()
    with torch.inference_mode():
        while tokens <= most:
            sites = [(drawn(one_each[kind], classes, world, tokens), count) for kind, count in kinds.items()]
            choice = Choice(
                ("residuals", tokens, *kinds.items()),
                lambda mode: RESIDUALS_WHOLE,
                lambda: (RESIDUALS_BY_ROWS,),
                functools.partial(one_pass, world, sites),
                title="residuals by rows",
                sizes=(tokens,),
                worth=1.0,
            )
            found = (found or tokens) if world.choices.choose(choice, "eager") == RESIDUALS_BY_ROWS else 0
            tokens *= 2
    return found


def one_pass(world: World, sites: Sequence[tuple[LayerTensors, int]], rows_from: int) -> None:
    """Call the operator with each kind of site's tensors, as often as there are such sites."""
    for tensors, count in sites:
        for _ in range(count):
            ROW_NORM_COLUMN(world, "auto", tensors, (1e-6, rows_from, 0))


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


def drawn(site: Site, classes: Classes, world: World, tokens: int) -> LayerTensors:
    """Return the site's weights, and random rows of so many tokens."""
    norm, row, column = operands(site, classes)

    def rows(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, dtype=norm.dtype, device=world.device)

    x, residual = rows(norm.numel() if row is None else row.shape[1]), rows(norm.numel())
    return LayerTensors(x, residual if site.residual else None, norm, row, None, column, None)
