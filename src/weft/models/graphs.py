"""The decoder's forward pass as CUDA graphs, one for each padded size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import Unsupported
from ..nn.weave import LayerPlan
from .cache import Batch, Cache, Layout
from .llama import Llama

Tensor = torch.Tensor


class Graphs:
    """The forward pass as CUDA graphs, one for each padded size; eager on a World without CUDA.

        forward     token ids [M], Batch -> logits [requests, vocab], valid until the next call of this size

    sizes: the sizes, rising, to which tokens and requests of one token are padded; several: the most requests with more
    tokens. Where the requests of one token do not fit when padded, beside the others in the padded tokens, they take
    the size below and the rest of them go with the others. The first batch of a size runs twice before it is captured.
    Ranks must make the same calls. Raises ValueError for sizes that do not rise from 1, ids that are not the batch's,
    and batches and caches that do not fit; Unsupported where attention goes request by request (no flash kernels for
    this dtype and GPU): such a graph would serve one batch.
    """

    def __init__(
        self, model: Llama, cache: Cache, *, sizes: tuple[int, ...], several: int, plan: str | LayerPlan = "auto"
    ) -> None:
        sizes = tuple(sizes)
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)) or several < 0:
            raise ValueError(f"sizes {sizes}, several {several}: sizes must rise from at least 1, several from 0")
        if model.world.device.type == "cuda" and not model.flash:
            raise Unsupported(f"CUDA graphs need flash attention for {model.dtype}, heads of {model.config.head_dim}")
        self.model, self.cache, self.sizes, self.several, self.wanted = model, cache, sizes, several, plan
        self._made: dict[tuple[int, int, int], _Captured] = {}
        self._pool: Any = None

    def __call__(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.prepare(ids, batch)()

    def prepare(self, ids: Tensor, batch: Batch) -> Callable[[], Tensor]:
        """Do the host's work for a batch. The function returned does the rest, on the current stream, as often as it is
        called."""
        if ids.shape != (batch.tokens,):
            raise ValueError(f"{list(ids.shape)} token ids for a batch of {batch.tokens} tokens")
        room = self._room(batch)
        singles = room[1]
        made = self._made.get(room)
        if made is None:
            made = _Captured(self.model, self.model.layout(batch, self.cache, self.wanted, room))
            self._made[room] = made
        layout, held, world = made.layout, made.ids, self.model.world
        fill, lead = layout.filling(batch), min(batch.singles, singles)
        spread = [(held[:lead], ids[:lead]), (held[singles : singles + batch.tokens - lead], ids[lead:])]

        def run() -> Tensor:
            fill()
            for to, part in spread:
                fill_in = functools.partial(to.copy_, part)
                world.call(fill_in, [part], [to], world.current_stream())
            return self._run(made)[: batch.requests]

        return run

    def _room(self, batch: Batch) -> tuple[int, int, int]:
        """Return the room of the layout that serves the batch: tokens, singles and several."""
        tokens, singles, several = self._size(batch.tokens), 0, self.several
        if batch.singles:
            singles = self._size(batch.singles)
        if singles + batch.tokens - batch.singles > tokens:
            below = max((size for size in self.sizes if size < singles), default=0)
            several += singles - 1 - below  # the most that `below` has no room for
            singles = below
        return tokens, singles, several if tokens > singles else 0

    def _size(self, least: int) -> int:
        size = next((s for s in self.sizes if s >= least), None)
        if size is None:
            raise ValueError(f"{least} tokens, padded, are more than {self.sizes[-1]}")
        return size

    def _run(self, made: _Captured) -> Tensor:
        if self.model.world.device.type != "cuda":
            return self.model(made.ids, made.layout)
        if made.graph is None:
            made.graph, made.logits = made.capture(self._pool)
            self._pool = made.graph.pool()
        made.graph.replay()
        return made.logits


class _Captured:
    """A layout, its ids, and, once it has run, its graph."""

    def __init__(self, model: Llama, layout: Layout) -> None:
        self.model, self.layout = model, layout
        with torch.inference_mode(False):  # a call may come outside it
            self.ids = model.world.zeros((layout.tokens,), torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = self.ids  # until there is a graph

    def capture(self, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.model(self.ids, self.layout)
        self.model.world.synchronize()
        with torch.cuda.graph(graph, stream=stream, pool=pool):
            logits = self.model(self.ids, self.layout)
        return graph, logits
