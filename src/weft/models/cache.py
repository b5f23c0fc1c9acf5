"""Batches of tokens of several requests, the cache of keys and values before them, and what a forward pass reads of both.

A batch is its requests' new tokens, one request after another: whole prompts, chunks of prompts, single tokens to decode,
in any mix. Each request has a slot of the cache, which holds its tokens so far and takes the new ones.

A `Layout` is a batch on the device: int32 tables that the kernels read, filled by one copy. Padded to a fixed number of
tokens and requests it can be filled again, so that one CUDA graph serves every batch that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..nn.weave import LayerPlan
from ..world import World
from .config import Config


class Cache:
    """Keys and values, [layers, slots, max_len, kv_heads / W, head_dim] each, of this rank's heads.

    slots: requests that can be held at once. max_len: tokens of the longest. Zeroed; nobody has to clear a slot before a
    new request takes it. Raises ValueError if W does not divide the key and value heads.
    """

    def __init__(
        self, config: Any, *, world: World, slots: int, max_len: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        c = Config.of(config)
        self.slots, self.max_len = slots, max_len
        shape = (c.num_hidden_layers, slots, max_len, heads_of(c.num_key_value_heads, world), c.head_dim)
        self.keys, self.values = world.zeros(shape, dtype), world.zeros(shape, dtype)


def heads_of(heads: int, world: World) -> int:
    if heads % world.size:
        raise ValueError(f"{heads} key and value heads do not split over {world.size} ranks")
    return heads // world.size


@dataclass(frozen=True)
class Batch:
    """By request: tokens in this batch (at least one), tokens already in the cache, and the slot of the cache."""

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
    def ends(self) -> tuple[int, ...]:
        return tuple(n + at for n, at in zip(self.lengths, self.starts, strict=True))

    def split(self, at: int) -> tuple[Batch, Batch]:
        """The first `at` tokens and the rest. A request that lies in both is two chunks: the second starts where the first
        ends, so it finds the first's keys and values in the cache."""
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
    """Consecutive tokens of a batch that go through a layer together: `rows` of them, padding included.

    positions, slots int32 [rows]: of every token (slot -1: padding). For R requests, cu_q int32 [R + 1]: rows before each;
    kv_at [R + 1]: where its slot begins, in tokens of the cache; kv_len [R]: its tokens in the cache, these included; max_q,
    max_k: bounds of both lengths. last int32 [requests of the whole batch]: row of the request's last token, -1 if not here.
    """

    batch: Batch
    rows: int
    requests: int
    max_q: int
    max_k: int
    positions: torch.Tensor
    slots: torch.Tensor
    cu_q: torch.Tensor
    kv_at: torch.Tensor
    kv_len: torch.Tensor
    last: torch.Tensor


class Layout:
    """A batch, its plan, and its device tables (`Llama.layout` makes it). No forward pass copies from or waits for the host.

    With `tokens` and `requests` the tables have room for as many, and `fill` takes any batch that fits; with `tokens` alone,
    for as many requests of one token each, to decode.
    """

    def __init__(
        self, batch: Batch, cache: Cache, plan: LayerPlan, world: World, tokens: int | None = None,
        requests: int | None = None,
    ) -> None:  # fmt: skip
        self.world, self.cache, self.plan = world, cache, plan
        self.padded = tokens is not None
        self.tokens = batch.tokens if tokens is None else tokens
        self.requests = requests or (batch.requests if tokens is None else tokens)
        self.decode = requests is None and self.tokens == self.requests
        at = plan.split if plan.kind == "woven" else 0
        self.splits = (at, self.tokens - at) if 0 < at < self.tokens else (self.tokens,)
        values = self._values(batch)
        self.table = _upload(world, _flat(values))
        self.parts: list[Part] = []
        columns = [self.table[lo : lo + n] for lo, n in _ranges([len(c) for part in values for c in part])]
        for i, (rows, piece) in enumerate(zip(self.splits, self._pieces(batch), strict=True)):
            mine = columns[6 * i : 6 * i + 6]
            if self.padded:
                max_q, max_k = 1 if self.decode else rows, cache.max_len
            else:
                max_q, max_k = max(piece.lengths), max(piece.ends)
            self.parts.append(Part(piece, rows, len(mine[4]), max_q, max_k, *mine))

    def _pieces(self, batch: Batch) -> tuple[Batch, ...]:
        return batch.split(self.splits[0]) if len(self.splits) == 2 else (batch,)

    def _values(self, batch: Batch) -> list[list[list[int]]]:
        """By part: positions, slots, cu_q, kv_at, kv_len, last."""
        cache = self.cache
        if batch.requests == 0:
            raise ValueError("an empty batch")
        if max(batch.slots) >= cache.slots or max(batch.ends) > cache.max_len:
            raise ValueError(f"{batch} does not fit a cache of {cache.slots} slots of {cache.max_len} tokens")
        if batch.tokens > self.tokens or batch.requests > self.requests or (self.decode and max(batch.lengths) > 1):
            raise ValueError(f"{batch} does not fit a layout of {self.tokens} tokens of {self.requests} requests")
        out, seen, pieces = [], 0, self._pieces(batch)
        for i, (rows, part) in enumerate(zip(self.splits, pieces, strict=True)):
            positions = [at + j for n, at in zip(part.lengths, part.starts, strict=True) for j in range(n)]
            slots = [s for n, s in zip(part.lengths, part.slots, strict=True) for _ in range(n)]
            cu_q, last = [0], [-1] * self.requests
            for n in part.lengths:
                cu_q.append(cu_q[-1] + n)
            goes_on = i == 0 and len(pieces) == 2 and bool(set(part.slots) & set(pieces[1].slots))
            for r in range(part.requests - goes_on):
                last[seen + r] = cu_q[r + 1] - 1
            seen += part.requests - goes_on
            room = (rows if self.decode else self.requests) if self.padded else part.requests
            extra = room - part.requests
            cu_q += [cu_q[-1] + (j + 1 if self.decode else 0) for j in range(extra)]
            kv_at = [s * cache.max_len for s in part.slots] + [0] * (extra + 1)
            pad = rows - part.tokens
            out.append([
                positions + [0] * pad, slots + [-1] * pad, cu_q, kv_at, list(part.ends) + [0] * extra, last,
            ])  # fmt: skip
        return out

    def fill(self, batch: Batch) -> None:
        """Another batch in the same tables, by one copy on the current stream."""
        if not self.padded:
            raise ValueError("a layout made without `tokens` cannot be filled again")
        world, table = self.world, self.table
        values = torch.tensor(_flat(self._values(batch)), dtype=torch.int32, pin_memory=table.is_cuda)
        world.call(lambda: table.copy_(values, non_blocking=True), [], [table], world.current_stream())
        for part, piece in zip(self.parts, self._pieces(batch), strict=True):
            part.batch = piece


def _flat(values: list[list[list[int]]]) -> list[int]:
    return [i for part in values for column in part for i in column]


def _upload(world: World, values: list[int]) -> torch.Tensor:
    """From pinned memory, so that the host does not wait for the stream."""
    if world.device.type != "cuda":
        return world.tensor(values, torch.int32)
    return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(world.device, non_blocking=True)


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    out, at = [], 0
    for n in counts:
        out.append((at, n))
        at += n
    return out
