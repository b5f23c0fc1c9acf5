"""Time, with the loaded model's weights, from how many tokens on each rank should hold only its own residual rows; and
make the first calls of the sizes that requests have, before there are requests."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ...chooser import Choice
from ...planner.auto import planner_on
from ...planner.search import near
from ...world import World
from .dataflow import Flow, Site
from .fp8 import LinearWeight, recipe_of, weight_of
from .interface import VllmObject
from .layers import Classes, SummedGemmaNorm
from .row_norm_column import ROW_NORM_COLUMN, LayerTensors

# The option rows_from of `row_norm_column`: 0 never holds residuals by rows, 1 always does.
RESIDUALS_WHOLE, RESIDUALS_BY_ROWS = 0, 1

# The columns of x if a site computes the row-parallel GEMM, else 0; those of the column-parallel GEMM's result, else 0;
# and the recipes of both weights.
SiteKind: TypeAlias = tuple[int, int, str | None, str | None]

PASS_SITES = 2  # calls in a timed pass of the most frequent kind of site, whatever the number of layers


def rows_from(flow: Flow, classes: Classes, world: World, min_tokens: int, max_tokens: int) -> int:
    """Return the smallest power of two, at least `min_tokens`, from which on, up to `max_tokens`, a pass takes less
    time if each rank holds only its own rows of residuals; 0 if there is none. Each call uses its fastest plan, of
    which the engine's own is one. Collective."""
    kinds = Counter(kind_of(site, classes) for site in flow.sites)
    calls = calls_of_pass(kinds)
    site_by_kind = {kind_of(site, classes): site for site in flow.sites}

    def sites_of(tokens: int) -> list[tuple[LayerTensors, int]]:
        return [(random_operands(site_by_kind[kind], classes, world, tokens), count) for kind, count in calls.items()]

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
            threshold = (threshold or tokens) if faster == RESIDUALS_BY_ROWS else 0
            tokens *= 2
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # the engine measures how much memory is free for its own cache
    return threshold


def prepare_sizes(flow: Flow, classes: Classes, world: World, max_tokens: int, rows_from: int, woven_from: int) -> None:
    """Call the operator for each kind of site with the numbers of tokens of `first_sizes`. Collective. Later calls of
    other numbers then time nothing, search for no plan and compile no kernel, which takes up to seconds. vLLM itself
    calls the sizes that it captures."""
    sites = {(kind_of(site, classes), site.residual): site for site in flow.sites}
    with torch.inference_mode():
        for tokens in first_sizes(world, world.max_captured_rows or 0, max_tokens):
            for site in sites.values():
                tensors, layer = random_operands(site, classes, world, tokens), site.norm
                ROW_NORM_COLUMN(world, "auto", tensors, (layer.variance_epsilon, rows_from, woven_from))
            world.wait_for_streams()  # so that the results of one size at a time take memory
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def first_sizes(world: World, above: int, max_tokens: int) -> list[int]:
    """Return the numbers of tokens to call first, in descending order: near the largest of those that share a plan,
    and near the middle and the start of each octave, since tiles of half the rows suit a range of sizes within it
    (`ops.tiles.suited`), which contains the start, the middle or the end of an octave. Near each there is a size with
    uneven shards, one with even shards that are no multiple of 16 rows, one that is a multiple of 16 itself, and one
    with whole tiles on every rank: Triton compiles a kernel for each such case."""
    planned = near if planner_on(world) is not None else lambda tokens, size: 1 << (tokens - 1).bit_length()
    ends = {planned(tokens, world.size): tokens for tokens in range(above + 1, max_tokens + 1)}.values()
    octaves = [1 << bits for bits in range(above.bit_length() - 1, (max_tokens - 1).bit_length()) if bits >= 0]
    middles = [octave + octave // 2 for octave in octaves]
    sizes = {last - rows for last in (*ends, *middles) for rows in (0, 1, world.size, 16)}
    sizes |= {octave + rows for octave in octaves for rows in (1, world.size, 16, 16 * world.size, 64 * world.size)}
    return sorted((tokens for tokens in sizes if above < tokens <= max_tokens), reverse=True)


def calls_of_pass(kinds: Counter[SiteKind]) -> dict[SiteKind, int]:
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


def kind_of(site: Site, classes: Classes) -> SiteKind:
    row, column = weights(site, classes)
    k, row_recipe = (0, None) if row is None else (row.weight.shape[1], recipe_of(row.scale))
    n, column_recipe = (0, None) if column is None else (column.weight.shape[0], recipe_of(column.scale))
    return k, n, row_recipe, column_recipe


def weights(site: Site, classes: Classes) -> tuple[LinearWeight | None, LinearWeight | None]:
    """Return the weights of the two GEMMs, None for one that the site does not compute."""
    row = weight_of(site.reduction) if classes.is_gemm(site.reduction) else None
    return row, None if site.column is None else weight_of(site.column)


def norm_scale(norm: VllmObject, classes: Classes) -> torch.Tensor:
    """Return what the norm multiplies with, as the layer that replaces it computes it."""
    scale: torch.Tensor = SummedGemmaNorm.scale(norm) if type(norm) is classes.gemma_norm else norm.weight
    return scale


def random_operands(site: Site, classes: Classes, world: World, tokens: int) -> LayerTensors:
    """Return the site's weights with random rows of `tokens` tokens."""
    norm, (row, column) = norm_scale(site.norm, classes), weights(site, classes)
    layer: VllmObject = site.norm

    def rows(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, dtype=layer.weight.dtype, device=world.device)

    x, residual = rows(norm.numel() if row is None else row.weight.shape[1]), rows(norm.numel())
    (row_weight, row_scale), (column_weight, column_scale) = row or (None, None), column or (None, None)
    tensors = x, residual if site.residual else None, norm, row_weight, None, column_weight, None
    return LayerTensors(*tensors, row_scale, column_scale)
