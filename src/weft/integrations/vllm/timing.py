"""Time, with the loaded model's weights, from how many tokens on each rank should hold only its own residual rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import torch

from ...chooser import Choice
from ...world import World
from .dataflow import Flow, Site
from .interface import VllmObject
from .layers import Classes
from .row_norm_column import ROW_NORM_COLUMN, LayerTensors

# The option rows_from of `row_norm_column`: 0 never holds residuals by rows, 1 always does.
RESIDUALS_WHOLE, RESIDUALS_BY_ROWS = 0, 1

PASS_SITES = 2  # calls in a timed pass of the most frequent kind of site, whatever the number of layers


def rows_from(flow: Flow, classes: Classes, world: World, min_tokens: int, max_tokens: int) -> int:
    """Return the smallest power of two, at least `min_tokens`, from which on, up to `max_tokens`, a pass takes less
    time if each rank holds only its own rows of residuals; 0 if there is none. Each call uses its fastest plan, of
    which the engine's own is one. Collective. It also makes the trials of these sizes, and of one token less, which the
    ranks do not divide, so that no request waits for them."""
    kinds = Counter(shapes(site, classes) for site in flow.sites)
    calls = calls_of_pass(kinds)
    site_by_shapes = {shapes(site, classes): site for site in flow.sites}

    def sites_of(tokens: int) -> list[tuple[LayerTensors, int]]:
        return [(random_operands(site_by_shapes[kind], classes, world, tokens), count) for kind, count in calls.items()]

    threshold, tokens = 0, 1 << (min_tokens - 1).bit_length()
    with torch.inference_mode():
        while tokens <= max_tokens:
            choice = Choice(
                ("residuals", tokens, *kinds.items()),
                lambda mode: RESIDUALS_WHOLE,
                lambda: (RESIDUALS_BY_ROWS,),
                functools.partial(one_pass, world, sites_of(tokens)),
                title="residuals by rows",
                sizes=(tokens,),
                worth=1.0,
            )
            faster = world.choices.choose(choice, "eager")
            one_pass(world, sites_of(max(tokens - 1, 1)), faster)
            threshold = (threshold or tokens) if faster == RESIDUALS_BY_ROWS else 0
            tokens *= 2
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # the engine measures how much memory is free for its own cache
    return threshold


def calls_of_pass(kinds: Counter[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return how often a timed pass calls each kind of site: in the model's proportions, PASS_SITES times the most
    frequent one. All sites of a model of 80 layers would take a minute a size, and their results, which streams behind
    the host still use, all of the memory."""
    most = max(kinds.values(), default=1)
    return {kind: calls for kind, count in kinds.items() if (calls := round(count * PASS_SITES / most))}


def one_pass(world: World, sites: Sequence[tuple[LayerTensors, int]], rows_from: int) -> None:
    """Call the operator so often with the tensors of each kind of site."""
    for tensors, count in sites:
        for _ in range(count):
            ROW_NORM_COLUMN(world, "auto", tensors, (1e-6, rows_from, 0))


def shapes(site: Site, classes: Classes) -> tuple[int, int]:
    """Return the columns of x if the site computes the row-parallel GEMM, else 0, and those of the column-parallel
    GEMM's result, else 0."""
    row, column = operands(site, classes)[1:]
    return 0 if row is None else row.shape[1], 0 if column is None else column.shape[0]


def operands(site: Site, classes: Classes) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the weights of the norm and of the two GEMMs, None for one that the site does not compute."""
    norm: VllmObject = site.norm
    reduction: VllmObject = site.reduction
    column: VllmObject = site.column
    return (
        norm.weight,
        reduction.weight if classes.is_gemm(reduction) else None,
        None if column is None else column.weight,
    )


def random_operands(site: Site, classes: Classes, world: World, tokens: int) -> LayerTensors:
    """Return the site's weights with random rows of `tokens` tokens."""
    norm, row, column = operands(site, classes)

    def rows(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, dtype=norm.dtype, device=world.device)

    x, residual = rows(norm.numel() if row is None else row.shape[1]), rows(norm.numel())
    return LayerTensors(x, residual if site.residual else None, norm, row, None, column, None)
