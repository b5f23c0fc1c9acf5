"""The decoder's forward pass as CUDA graphs, one for each padded size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..nn.weave import LayerPlan
from .cache import Batch, Cache, Layout
from .llama import Llama


class Graphs:
    """The forward pass as CUDA graphs, one for each padded size; eager on a World without CUDA.

        forward     token ids [M], Batch -> logits [requests, vocab], valid until the next call of this size

    sizes: the sizes, in rising order, to which tokens and requests of one token are padded.
    several: the largest number of requests with more than one token.

    If the padded requests of one token leave too little room for other requests, they are padded to the next smaller
    size, and the surplus counts as requests of several tokens. The first batch of a size runs twice before its capture.
    Ranks must make the same calls.

    Raises ValueError for sizes that do not rise from 1, ids that do not match the batch, and batches and caches that do
    not fit; Unsupported where attention runs request by request (there is no flash kernel for this dtype and GPU),
    since such a graph could run only a single batch.
    """

    def __init__(
        self, model: Llama, cache: Cache, *, sizes: tuple[int, ...], several: int, plan: str | LayerPlan = "auto"
    ) -> None:
        sizes = tuple(sizes)
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)) or several < 0:
            raise ValueError(
                f"sizes {sizes}, several {several}: sizes must rise from at least 1, several must be at least 0"
            )
        if model.world.device.type == "cuda" and not model.flash:
            raise Unsupported(f"CUDA graphs need flash attention for {model.dtype}, heads of {model.config.head_dim}")
        self.model, self.cache, self.sizes, self.several, self.plan = model, cache, sizes, several, plan
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._pool: Any = None

    def __call__(self, ids: Tensor, batch: Batch) -> Tensor:
        return self.prepare(ids, batch)()

    def prepare(self, ids: Tensor, batch: Batch) -> Callable[[], Tensor]:
        """Prepare a batch on the host. Return a function that runs the forward pass on the current stream. The function
        may be called any number of times."""
        if ids.shape != (batch.tokens,):
            raise ValueError(f"{list(ids.shape)} token ids for a batch of {batch.tokens} tokens")
        room = self._room(batch)
        singles = room[1]
        captured = self._captured.get(room)
        if captured is None:
            captured = _Captured(self.model, self.model.layout(batch, self.cache, self.plan, room))
            self._captured[room] = captured
        layout, static_ids, world = captured.layout, captured.ids, self.model.world
        fill, lead = layout.filling(batch), min(batch.singles, singles)
        copies = [(static_ids[:lead], ids[:lead]), (static_ids[singles : singles + batch.tokens - lead], ids[lead:])]

        def run() -> Tensor:
            fill()
            for dst, src in copies:
                world.call(functools.partial(dst.copy_, src), [src], [dst], world.current_stream())
            return self._run(captured)[: batch.requests]

        return run

    def _room(self, batch: Batch) -> tuple[int, int, int]:
        """Return the room of the layout that runs the batch: tokens, singles and several."""
        tokens, singles, several = self._size(batch.tokens), 0, self.several
        if batch.singles:
            singles = self._size(batch.singles)
        if singles + batch.tokens - batch.singles > tokens:
            below = max((size for size in self.sizes if size < singles), default=0)
            several += singles - 1 - below  # at most this many requests of one token exceed `below`
            singles = below
        return tokens, singles, several if tokens > singles else 0

    def _size(self, tokens: int) -> int:
        """Return the smallest padded size for `tokens`."""
        size = next((s for s in self.sizes if s >= tokens), None)
        if size is None:
            raise ValueError(f"{tokens} tokens are more than the largest size, {self.sizes[-1]}")
        return size

    def _run(self, captured: _Captured) -> Tensor:
        if self.model.world.device.type != "cuda":
            return self.model(captured.ids, captured.layout)
        if captured.graph is None:
            captured.graph, captured.logits = captured.capture(self._pool)
            self._pool = captured.graph.pool()
        captured.graph.replay()
        return captured.logits


class _Captured:
    """A layout, its token ids, and, after the first run, its graph and logits."""

    def __init__(self, model: Llama, layout: Layout) -> None:
        self.model, self.layout = model, layout
        with torch.inference_mode(False):  # made outside inference mode, since a call may run outside it
            self.ids = model.world.zeros((layout.tokens,), torch.int64)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = self.ids  # a placeholder until there is a graph

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
