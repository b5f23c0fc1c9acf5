"""Batches of tokens of several requests, the cache of keys and values before them, and what a forward pass reads of
both.

A batch is its requests' new tokens, one request after another: whole prompts, chunks of prompts, single tokens to
decode, in any mix. Each request has a slot of the cache, which holds its tokens so far and takes the new ones.

A `Layout` is a batch on the device: int32 tables that the kernels read, filled by one copy. With room for so many
tokens and requests it can be filled again, so that one CUDA graph serves every batch that fits:

    rows      0 ..         singles ..                      tokens
              | one token each    | several tokens each    |
              | request, padding  | request, .., padding   |

Attention of the first rows is another kernel than of the others. The rows go through a layer whole, or in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from ..nn.weave import LayerPlan
from ..world import World
from .config import Config

# A prompt, or a chunk of one, of at least LONG_PROMPT tokens has an attention call of its own, if its length and its
# end are multiples of LENGTH_STEP. For shorter ones flash attention over all requests is as fast.
LONG_PROMPT, LENGTH_STEP = 2048, 512


class Cache:
    """Keys and values, [layers, slots, max_len, kv_heads / W, head_dim] each, of this rank's heads.

    slots: requests that can be held at once. max_len: tokens of the longest. Zeroed; nobody has to clear a slot before
    a new request takes it. Raises ValueError if W does not divide the key and value heads.
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
        c = Config.of(config)
        self.slots, self.max_len = slots, max_len
        shape = (c.num_hidden_layers, slots, max_len, heads_of(c.num_key_value_heads, world), c.head_dim)
        with torch.inference_mode(False):  # calls outside it write here too
            self.keys, self.values = world.zeros(shape, dtype), world.zeros(shape, dtype)


def is_long(tokens: int, end: int) -> bool:
    """Whether attention of the last `tokens` of `end` tokens is a call of its own."""
    return tokens >= LONG_PROMPT and tokens % LENGTH_STEP == 0 == end % LENGTH_STEP


def heads_of(heads: int, world: World) -> int:
    if heads % world.size:
        raise ValueError(f"{heads} key and value heads do not split over {world.size} ranks")
    return heads // world.size


@dataclass(frozen=True)
class Batch:
    """The new tokens of several requests.

    lengths, starts, slots: for each request, its tokens in this batch (at least one), its tokens already in the cache,
    and its slot of the cache. Attention is faster if requests with one token come first.
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
        """New requests in slots 0, 1, .."""
        return cls(tuple(lengths), (0,) * len(lengths), tuple(range(len(lengths))))

    @classmethod
    def decode(cls, starts: Sequence[int]) -> Batch:
        """One token of each of the requests in slots 0, 1, .."""
        return cls((1,) * len(starts), tuple(starts), tuple(range(len(starts))))

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def singles(self) -> int:
        """Requests with one token before the first with more."""
        return sum(1 for _ in takewhile(lambda n: n == 1, self.lengths))

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(n + at for n, at in zip(self.lengths, self.starts, strict=True))

    def split(self, at: int) -> tuple[Batch, Batch]:
        """The first `at` tokens and the rest. A request that lies in both is two chunks: the second starts where the
        first ends, so it finds the first's keys and values in the cache."""
        parts: tuple[list[tuple[int, int, int]], ...] = [], []
        for n, start, slot in zip(self.lengths, self.starts, self.slots, strict=True):
            here = min(n, at)
            at -= here
            if here:
                parts[0].append((here, start, slot))
            if n > here:
                parts[1].append((n - here, start + here, slot))
        first, rest = (Batch(*zip(*p, strict=True)) if p else Batch((), (), ()) for p in parts)
        return first, rest


@dataclass
class Part:
    """Rows of a layout that go through a layer together.

    positions, slots: int32 [rows], those of every token (slot -1: padding). single, several: the requests of one token
    each, in the first rows, and the others. pieces: row, tokens, slot and tokens in the cache of each request. long:
    whether the pieces stay as they are and all of several tokens are long (`LONG_PROMPT`).
    """

    rows: int
    pieces: list[tuple[int, int, int, int]]
    positions: torch.Tensor
    slots: torch.Tensor
    single: Rows
    several: Rows
    long: bool = False


@dataclass
class Rows:
    """`rows` rows of R requests. cu_q int32 [R + 1]: rows before each; kv_at [R + 1]: where its slot begins, in tokens
    of the cache; kv_len [R]: its tokens in the cache, these included; max_q, max_k: bounds of both lengths."""

    rows: int
    max_q: int
    max_k: int
    cu_q: torch.Tensor
    kv_at: torch.Tensor
    kv_len: torch.Tensor


class Layout:
    """A batch, its plan, and its device tables (`Llama.layout` makes it). No forward pass copies from or waits for the
    host.

    last: int32 [requests], the row of each request's last token, -1 of a request that is not there.
    room: (tokens, singles, several), rows in all, rows for requests of one token, and requests of several; then `fill`
    takes any batch that fits. Requests of one token for which `singles` has no room count as of several.
    """

    def __init__(
        self, batch: Batch, cache: Cache, plan: LayerPlan, world: World, room: tuple[int, int, int] | None = None
    ) -> None:
        self.world, self.cache, self.plan, self.padded = world, cache, plan, room is not None
        exact = batch.tokens, batch.singles, batch.requests - batch.singles
        self.tokens, self.singles, self.several = room or exact
        self.requests = self.singles + self.several
        at = plan.split if plan.kind == "woven" else 0
        self.splits = (at, self.tokens - at) if 0 < at < self.tokens else (self.tokens,)
        host, pieces = self._values(batch)
        lengths = [len(c) for part in host for c in part]
        with torch.inference_mode(False):  # a fill may come outside it
            self.table = world.zeros((sum(lengths),), torch.int32)
            columns = iter(self.table.split(lengths))
        self.last, self.parts = next(columns), list[Part]()
        lo = 0
        for rows, mine in zip(self.splits, pieces, strict=True):
            positions, slots = next(columns), next(columns)
            single = max(0, min(self.singles - lo, rows))
            longest, k = (rows - single, cache.max_len) if self.padded else (0, 1)
            if not self.padded:
                longest = max((n for row, n, _, _ in mine if row >= single), default=0)
                k = max(end for *_, end in mine)
            ones, several = (
                Rows(r, q, k, *(next(columns) for _ in range(3))) for r, q in ((single, 1), (rows - single, longest))
            )
            others = [] if self.padded else [(n, end) for row, n, _, end in mine if row >= single]
            long = len(others) > 0 and all(is_long(n, end) for n, end in others)
            self.parts.append(Part(rows, mine, positions, slots, ones, several, long))
            lo += rows
        self._filling(host, pieces)()

    def rows(self, batch: Batch) -> list[int]:
        """The first row of every request. Raises ValueError for a batch that does not fit."""
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
        others = np.cumsum((0, *batch.lengths[lead:]))[:-1] + self.singles
        return [*range(lead), *others.tolist()]

    def _values(self, batch: Batch) -> tuple[list[list[np.ndarray]], list[list[tuple[int, int, int, int]]]]:
        """Return the table of last rows, then for each part the columns of its tables in order; and for each part its
        pieces."""
        cache, at = self.cache, self.rows(batch)
        positions, slots = np.zeros(self.tokens, np.int32), np.full(self.tokens, -1, np.int32)
        last = np.full(self.requests, -1, np.int32)
        last[: batch.requests] = np.add(at, batch.lengths) - 1
        for row, n, start, slot in zip(at, batch.lengths, batch.starts, batch.slots, strict=True):
            positions[row : row + n] = np.arange(start, start + n)
            slots[row : row + n] = slot
        tables, pieces, lo = [[last]], [], 0
        for rows in self.splits:
            hi, single, mine = lo + rows, max(0, min(self.singles - lo, rows)), []
            for row, n, end, slot in zip(at, batch.lengths, batch.ends, batch.slots, strict=True):
                first, after = max(row, lo), min(row + n, hi)
                if first < after:
                    mine.append((first - lo, after - first, slot, end - (row + n - after)))
            columns = [positions[lo:hi], slots[lo:hi]]
            ones = [p for p in mine if p[0] < single]
            others = [p for p in mine if p[0] >= single]
            for region, room, grows in ((ones, single, 1), (others, self.several if self.padded else len(others), 0)):
                pad = room - len(region)
                cu_q = np.cumsum([0, *(p[1] for p in region), *[grows] * pad])
                kv_at = [p[2] * cache.max_len for p in region] + [0] * (pad + 1)
                columns += [np.array(c, np.int32) for c in (cu_q, kv_at, [p[3] for p in region] + [0] * pad)]
            tables.append(columns)
            pieces.append(mine)
            lo = hi
        return tables, pieces

    def filling(self, batch: Batch) -> Callable[[], None]:
        """Do the host's work for another batch. The function returned does the rest: one copy, on the stream that is
        current then."""
        if not self.padded:
            raise ValueError("a layout made without room cannot be filled again")
        return self._filling(*self._values(batch))

    def _filling(
        self, tables: list[list[np.ndarray]], pieces: list[list[tuple[int, int, int, int]]]
    ) -> Callable[[], None]:
        world, table = self.world, self.table
        values = torch.from_numpy(np.concatenate([c for part in tables for c in part]))
        if table.is_cuda:
            values = values.pin_memory()  # so that the host does not wait for the copy

        def fill() -> None:
            world.call(lambda: table.copy_(values, non_blocking=True), [], [table], world.current_stream())
            for part, mine in zip(self.parts, pieces, strict=True):
                part.pieces = mine

        return fill
