"""Batches of tokens from several requests, the key-value cache, and the device tables that a forward pass reads.

A batch is the new tokens of its requests, one request after another: whole prompts, chunks of prompts and single tokens
to decode, in any mix. Each request has a slot of the cache, which holds its earlier tokens and receives the new ones.

A `Layout` is a batch on the device: int32 tables that one copy fills and the kernels read. A layout with room for a
number of tokens and requests can be filled again, so that one CUDA graph can run every batch that fits:

    rows      0 ..         singles ..                      tokens
              | one token each    | several tokens each    |
              | request, padding  | request, .., padding   |

A separate kernel computes attention of the rows before `singles`. A layer processes all rows together or in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from ..nn.sharded import divide_by_ranks
from ..nn.weave import LayerPlan
from ..world import World
from .config import Config

# A prompt, or a chunk of one, of at least LONG_PROMPT tokens has an attention call of its own if its length and its end
# are multiples of LENGTH_STEP. All other chunks share one flash attention call.
LONG_PROMPT, LENGTH_STEP = 2048, 512


class Cache:
    """Keys and values of this rank's heads, each [layers, slots, max_len, kv_heads / W, head_dim], zeroed.

    `config` is a model's config, as for `weft.models.Llama`. `slots` is the number of requests that the cache holds at
    once, `max_len` the largest number of tokens of one request. A new request can reuse a slot that is not cleared.
    Raises ValueError if W does not divide the key and value heads.
    """

    def __init__(
        self,
        config: Config | Mapping[str, object] | object,
        *,
        world: World,
        slots: int,
        max_len: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        c = Config.from_hf(config)
        self.slots, self.max_len = slots, max_len
        heads = divide_by_ranks("num_key_value_heads", c.num_key_value_heads, world)
        shape = (c.num_hidden_layers, slots, max_len, heads, c.head_dim)
        with torch.inference_mode(False):  # made outside inference mode, since calls outside it also write here
            self.keys, self.values = world.zeros(shape, dtype), world.zeros(shape, dtype)


def is_long(tokens: int, end: int) -> bool:
    """Return whether the attention of the last `tokens` tokens of `end` is a separate library call."""
    return tokens >= LONG_PROMPT and tokens % LENGTH_STEP == 0 == end % LENGTH_STEP


@dataclass(frozen=True)
class Batch:
    """The new tokens of several requests.

    `lengths`, `starts` and `slots` are, for each request, the number of its tokens in this batch (at least one), the
    number already in the cache, and its slot of the cache. Requests with one token should come first: only leading
    requests use the decode kernel.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("lengths", "starts", "slots"):
            object.__setattr__(self, name, tuple(int(i) for i in getattr(self, name)))
        if not len(self.lengths) == len(self.starts) == len(self.slots):
            raise ValueError(f"{self}: not one length, start and slot for each request")
        if min(self.lengths, default=1) < 1 or min(self.starts + self.slots, default=0) < 0:
            raise ValueError(f"{self}: lengths from 1, starts and slots from 0")
        if len(set(self.slots)) < len(self.slots):
            raise ValueError(f"{self}: two requests in one slot")

    @classmethod
    def prefill(cls, lengths: Sequence[int]) -> Batch:
        """Return the batch of the whole prompts of new requests, in slots 0, 1, .."""
        return cls(tuple(lengths), (0,) * len(lengths), tuple(range(len(lengths))))

    @classmethod
    def decode(cls, starts: Sequence[int]) -> Batch:
        """Return the batch of one token of each request in slots 0, 1, .."""
        return cls((1,) * len(starts), tuple(starts), tuple(range(len(starts))))

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Return the number of new tokens of all requests."""
        return sum(self.lengths)

    @property
    def singles(self) -> int:
        """Return the number of requests with one token before the first request with several."""
        return sum(1 for _ in takewhile(lambda n: n == 1, self.lengths))

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the number of tokens of each request in the cache after this batch."""
        return tuple(n + start for n, start in zip(self.lengths, self.starts, strict=True))

    def split(self, tokens: int) -> tuple[Batch, Batch]:
        """Return the first `tokens` tokens and the rest as two batches. A request in both of them becomes two chunks;
        the second chunk starts where the first ends and finds the first chunk's keys and values in the cache."""
        parts: tuple[list[tuple[int, int, int]], ...] = [], []
        for n, start, slot in zip(self.lengths, self.starts, self.slots, strict=True):
            count = min(n, tokens)
            tokens -= count
            if count:
                parts[0].append((count, start, slot))
            if n > count:
                parts[1].append((n - count, start + count, slot))
        prefix, suffix = (Batch(*zip(*p, strict=True)) if p else Batch((), (), ()) for p in parts)
        return prefix, suffix


@dataclass
class Part:
    """Rows of a layout that a layer processes together.

    `positions` and `slots` int32 [rows] are the position and slot of every token (slot -1: padding). `single` are the
    requests of one token each, in the first rows, `several` the other requests. `chunks` contains (first row, tokens,
    slot, tokens in the cache) for each request. With `long` each request of `several` is a prompt with a separate
    attention call (`LONG_PROMPT`). A layout that can be filled again never contains such prompts.
    """

    rows: int
    chunks: list[tuple[int, int, int, int]]
    positions: torch.Tensor
    slots: torch.Tensor
    single: Rows
    several: Rows
    long: bool = False


@dataclass
class Rows:
    """The `rows` rows of R requests. cu_q int32 [R + 1] is the number of rows before each request, kv_at [R + 1] the
    first row of its slot in the flattened cache, and kv_len [R] the number of its tokens in the cache, including the
    new ones. max_q and max_k bound the rows and the cached tokens of a request."""

    rows: int
    max_q: int
    max_k: int
    cu_q: torch.Tensor
    kv_at: torch.Tensor
    kv_len: torch.Tensor


class Layout:
    """A batch, its plan, and its device tables, made by `Llama.layout`. A forward pass neither copies from the host nor
    waits for the host.

    last: int32 [requests], the row of each request's last token, -1 for a missing request.
    room: (tokens, singles, several), the number of rows, the rows for requests of one token, and the requests of
        several tokens. A layout with room can be filled with any batch that fits (`filling`). Requests of one token
        beyond `singles` count as requests of several tokens.
    """

    def __init__(
        self, batch: Batch, cache: Cache, plan: LayerPlan, world: World, room: tuple[int, int, int] | None = None
    ) -> None:
        self.world, self.cache, self.plan, self.padded = world, cache, plan, room is not None
        exact = batch.tokens, batch.singles, batch.requests - batch.singles
        self.tokens, self.singles, self.several = room or exact
        self.requests = self.singles + self.several
        prefix = plan.split if plan.kind == "woven" else 0
        self.splits = (prefix, self.tokens - prefix) if 0 < prefix < self.tokens else (self.tokens,)
        host, chunks = self._values(batch)
        lengths = [len(c) for part in host for c in part]
        with torch.inference_mode(False):  # made outside inference mode, since a fill may run outside it
            self.table = world.zeros((sum(lengths),), torch.int32)
            columns = iter(self.table.split(lengths))
        self.last, self.parts = next(columns), list[Part]()
        lo = 0
        for rows, part_chunks in zip(self.splits, chunks, strict=True):
            positions, slots = next(columns), next(columns)
            single = max(0, min(self.singles - lo, rows))
            max_q, max_k = (rows - single, cache.max_len) if self.padded else (0, 1)
            if not self.padded:
                max_q = max((n for row, n, _, _ in part_chunks if row >= single), default=0)
                max_k = max(end for *_, end in part_chunks)
            ones, several = (
                Rows(r, q, max_k, *(next(columns) for _ in range(3))) for r, q in ((single, 1), (rows - single, max_q))
            )
            prompts = [] if self.padded else [(n, end) for row, n, _, end in part_chunks if row >= single]
            long = len(prompts) > 0 and all(is_long(n, end) for n, end in prompts)
            self.parts.append(Part(rows, part_chunks, positions, slots, ones, several, long))
            lo += rows
        self._filling(host, chunks)()

    def rows(self, batch: Batch) -> list[int]:
        """Return the first row of each request. Raises ValueError for a batch that does not fit."""
        cache, lead = self.cache, min(batch.singles, self.singles)
        if batch.requests == 0:
            raise ValueError("an empty batch")
        if max(batch.slots) >= cache.slots or max(batch.ends) > cache.max_len:
            raise ValueError(f"{batch} does not fit a cache of {cache.slots} slots of {cache.max_len} tokens")
        if batch.tokens - lead > self.tokens - self.singles or batch.requests - lead > self.several:
            raise ValueError(
                f"{batch} does not fit a layout of {self.tokens} tokens, {self.singles} requests of one token and "
                f"{self.several} of several"
            )
        several = np.cumsum((0, *batch.lengths[lead:]))[:-1] + self.singles
        return [*range(lead), *several.tolist()]

    def _values(self, batch: Batch) -> tuple[list[list[np.ndarray]], list[list[tuple[int, int, int, int]]]]:
        """Return the table of last rows followed by the columns of each part's tables, and the chunks of each part."""
        cache, first_rows = self.cache, self.rows(batch)
        positions, slots = np.zeros(self.tokens, np.int32), np.full(self.tokens, -1, np.int32)
        last = np.full(self.requests, -1, np.int32)
        last[: batch.requests] = np.add(first_rows, batch.lengths) - 1
        for row, n, start, slot in zip(first_rows, batch.lengths, batch.starts, batch.slots, strict=True):
            positions[row : row + n] = np.arange(start, start + n)
            slots[row : row + n] = slot
        tables, chunks, lo = [[last]], [], 0
        for rows in self.splits:
            hi, single, part_chunks = lo + rows, max(0, min(self.singles - lo, rows)), []
            for row, n, end, slot in zip(first_rows, batch.lengths, batch.ends, batch.slots, strict=True):
                start, stop = max(row, lo), min(row + n, hi)
                if start < stop:
                    part_chunks.append((start - lo, stop - start, slot, end - (row + n - stop)))
            columns = [positions[lo:hi], slots[lo:hi]]
            ones = [chunk for chunk in part_chunks if chunk[0] < single]
            several = [chunk for chunk in part_chunks if chunk[0] >= single]
            requests = self.several if self.padded else len(several)
            for region, room, pad_rows in ((ones, single, 1), (several, requests, 0)):
                pad = room - len(region)
                cu_q = np.cumsum([0, *(n for _, n, _, _ in region), *[pad_rows] * pad])
                kv_at = [slot * cache.max_len for _, _, slot, _ in region] + [0] * (pad + 1)
                columns += [np.array(c, np.int32) for c in (cu_q, kv_at, [end for *_, end in region] + [0] * pad)]
            tables.append(columns)
            chunks.append(part_chunks)
            lo = hi
        return tables, chunks

    def filling(self, batch: Batch) -> Callable[[], None]:
        """Prepare a new batch on the host. Return a function that fills the tables by one copy, on the stream that is
        current when the caller calls it."""
        if not self.padded:
            raise ValueError("a layout made without room cannot be filled again")
        return self._filling(*self._values(batch))

    def _filling(
        self, tables: list[list[np.ndarray]], chunks: list[list[tuple[int, int, int, int]]]
    ) -> Callable[[], None]:
        world, table = self.world, self.table
        values = torch.from_numpy(np.concatenate([c for part in tables for c in part]))
        if table.is_cuda:
            values = values.pin_memory()  # so that the host does not wait for the copy

        def fill() -> None:
            world.call(lambda: table.copy_(values, non_blocking=True), [], [table], world.current_stream())
            for part, part_chunks in zip(self.parts, chunks, strict=True):
                part.chunks = part_chunks

        return fill
