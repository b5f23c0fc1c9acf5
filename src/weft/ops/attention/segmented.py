"""Segmented attention: ranks push key ranges to each other while a library computes attention over ranges that have
arrived.

    main stream  barrier | attention over local keys | attention over remote keys .. | merge
    copy stream           | push | push | push

Every rank pushes its keys and values into the buffers of the ranks that read them, and notifies the reader after each
range (`copy_engine.prepare_exchange`). Readers wait for these notifications between two calls of the attention library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends.base import Event
from ...backends.library_gemm import stepped
from ...chooser import Choice, Chooser
from ...kernel_launch import Launch, prepared
from ...plans import Plan, Segmented
from ...transport.collectives import gather_all
from ...transport.copy_engine import Send, prepare_exchange
from ...transport.memory import workspace
from ...world import World
from . import libraries
from .kernels import merge
from .key_ranges import KeyGroup, KeyRanges, buffer_rows, split_groups
from .libraries import AttentionLibrary, Packed, SequenceOffsets

GroupsByRank = Sequence[Sequence[KeyGroup]]  # the remote keys that each rank reads if it has as many queries as keys

KEYS = "attention keys"  # the buffer for remote keys and values, and the barrier that protects it


@dataclass(frozen=True)
class AttentionConfig:
    """The sizes that all library calls of one operator call share. `shards` contains every rank's number of keys, `dim`
    is the head dimension, and `scale` multiplies q K^T."""

    shards: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float

    def library(
        self, world: World, use: str, sizes: tuple[int, int, bool], run: Callable[[AttentionLibrary], object]
    ) -> AttentionLibrary:
        """Return the attention library with which the function `run` is fastest. `run` computes attention with the
        library that it receives. `sizes` are the numbers of queries and of keys, and whether the mask is causal. The
        libraries are timed at the first call of these sizes."""
        key = use, sizes, self.dtype, self.heads, self.kv_heads, self.dim
        library: AttentionLibrary | None = world.decided.get(key)
        if library is not None:
            return library
        queries, keys, causal = sizes
        usable = self.usable(world, use, min(queries, keys))
        library, decided = usable[0], True
        if len(usable) > 1 and world.backend.clock is not None:
            kind = world.device, self.dtype, self.heads, self.kv_heads, self.dim
            choice_key = use, stepped(queries), stepped(keys), causal, *kind
            library = Chooser.alone.choose(Choice(choice_key, lambda mode: usable[0], lambda: usable, run))
            decided = choice_key in Chooser.alone.trials  # a capture cannot time libraries, so a later call decides
        if decided:
            world.decided[key] = library
        return library

    def usable(self, world: World, use: str, rows: int) -> Sequence[AttentionLibrary]:
        """Return the libraries with correct results for a call of at least `rows` queries and keys. The library that is
        expected to be the fastest comes first."""
        kind = use, world.device, self.dtype, self.heads, self.kv_heads, self.dim
        correct = world.cached(("attention libraries", *kind), lambda: libraries.right(*kind))
        return [library for library in correct if library.min_rows <= rows] or correct[-1:]


class KeyValues(NamedTuple):
    """Keys and values k and v [n, kv heads, D]. `wait` is a function that makes the current stream wait until they have
    arrived, or None if they have already arrived."""

    k: Tensor
    v: Tensor
    wait: Callable[[], None] | None = None


class FetchedKeyValues(NamedTuple):
    """The remote keys and values for each library call, with their key ranges in the order of the rows. The main stream
    waits for the event `end` before the operator returns."""

    remote: list[tuple[KeyGroup, KeyValues]]
    end: Event | None = None


class Partial(NamedTuple):
    """A partial result, attention over some of the keys: out [m - first_query, heads, D] and lse [heads, m -
    first_query] for the queries from `first_query` on."""

    first_query: int
    out: Tensor
    lse: Tensor


# -- fetching keys and values ------------------------------------------------------------------------------------------
def prepare_fetch(
    world: World, config: AttentionConfig, plan: Plan, key_ranges: KeyRanges, groups_by_rank: GroupsByRank
) -> Callable[[KeyValues], FetchedKeyValues]:
    """Return a function that receives the local keys and values and fetches the remote keys and values in this rank's
    key ranges. If sequences are packed, all of them are for one library call."""
    if world.size == 1:
        return lambda local_kv: FetchedKeyValues([])
    if isinstance(plan, Segmented):
        groups = split_groups(key_ranges.remote, 1 if key_ranges.packed else plan.calls)
        return _prepare_push(world, config, groups, groups_by_rank)
    return lambda local_kv: FetchedKeyValues(all_gather_key_values(world, config, local_kv, key_ranges.remote))


def all_gather_key_values(
    world: World, config: AttentionConfig, local_kv: KeyValues, groups: Sequence[KeyGroup]
) -> list[tuple[KeyGroup, KeyValues]]:
    """All-gather K and V with NCCL. If the ranges of a group are not contiguous, copy them into one tensor. Return each
    group with its keys and values."""
    stream, columns = world.current_stream(), config.kv_heads * config.dim
    gathered = gather_all([t.reshape(-1, columns) for t in local_kv[:2]], world, config.shards, stream)
    starts = [sum(config.shards[:r]) for r in range(world.size)]
    fetched = []
    for first_query, unsorted in groups:
        group = KeyGroup(first_query, tuple(sorted(unsorted)))
        spans = [slice(starts[r.source] + r.lo, starts[r.source] + r.hi) for r in group.ranges]
        start, stop = spans[0].start, spans[-1].stop
        if stop - start == group.rows:
            k, v = (t[start:stop] for t in gathered)
        else:
            k, v = (concatenate(world, [t[span] for span in spans]) for t in gathered)
        shape = (-1, config.kv_heads, config.dim)
        fetched.append((group, KeyValues(k.view(shape), v.view(shape))))
    return fetched


def concatenate(world: World, parts: list[Tensor]) -> Tensor:
    """Concatenate the rows of these matrices and return them as one matrix."""
    out = world.empty((sum(map(len, parts)), parts[0].shape[1]), parts[0].dtype)
    world.call(lambda: torch.cat(parts, out=out), parts, [out], world.current_stream())
    return out


def _prepare_push(
    world: World, config: AttentionConfig, groups: Sequence[KeyGroup], groups_by_rank: GroupsByRank
) -> Callable[[KeyValues], FetchedKeyValues]:
    """Return a function that pushes local keys and values into the buffers of the ranks that read them, and returns the
    keys and values that the other ranks push into this rank's buffer.

    Copy engines push. Pushing with 16 programs on SMs took 1.02 to 1.10 times as long for 8,192 to 65,536 tokens (2
    H200, 2026-11).
    """
    me, total = world.rank, sum(config.shards)
    memory = workspace(world, KEYS, (2, total, config.kv_heads, config.dim), config.dtype)
    sends = [
        Send(reader, row, slice(key_range.lo, key_range.hi))
        for reader in (*world.other_ranks, me)  # in packed sequences, local and remote keys form one run
        for key_range, row in buffer_rows(groups_by_rank[reader])
        if key_range.source == me
    ]
    exchange = prepare_exchange(world, KEYS, memory, sends)
    row_of_source = {key_range.source: row - key_range.lo for key_range, row in buffer_rows(groups_by_rank[me])}
    remote = []
    for group in groups:
        start = row_of_source[group.ranges[0].source] + group.ranges[0].lo
        k, v = memory.local[:, start : start + group.rows]
        remote.append((group, k, v, [key_range.source for key_range in group.ranges]))

    def fetch(local_kv: KeyValues) -> FetchedKeyValues:
        exchanged = exchange(local_kv[:2])
        arriving = [(group, KeyValues(k, v, partial(exchanged.wait, sources))) for group, k, v, sources in remote]
        return FetchedKeyValues(arriving, exchanged.end)

    return fetch


# -- attention ---------------------------------------------------------------------------------------------------------
def prepare_forward(
    world: World, config: AttentionConfig, plan: Plan, m: int, key_ranges: KeyRanges, groups_by_rank: GroupsByRank
) -> Callable[[Tensor, KeyValues, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]:
    """Return a function of q with m rows, local keys and values, sinks, and `out` or None, which returns out [m, heads,
    D] and lse float32 [heads, m]."""
    packed = key_ranges.packed
    fetch = prepare_fetch(world, config, plan, key_ranges if m else KeyRanges((), ()), groups_by_rank)
    local = [(block.lo, block.hi, packed or block.causal) for block in key_ranges.local if m]

    def forward(q: Tensor, local_kv: KeyValues, sinks: Tensor | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
        fetched, partials = fetch(local_kv), []
        for lo, hi, mask in local:
            kv = KeyValues(local_kv.k[lo:hi], local_kv.v[lo:hi])
            partials.append(attend(world, config, 0, q, kv, mask))
        for (first_query, _), kv in fetched.remote:
            partials.append(attend(world, config, first_query, q[first_query:], kv, packed or False))
        if fetched.end is not None:
            world.wait_event(world.current_stream(), fetched.end)
        if out is None and len(partials) == 1 and sinks is None:
            return partials[0].out, partials[0].lse
        result = world.empty(q.shape, q.dtype) if out is None else out
        lse = world.empty((config.heads, m), torch.float32)
        merge_partials(world, partials, sinks, result, lse)
        return result, lse

    return forward


def attend(
    world: World, config: AttentionConfig, first_query: int, q: Tensor, kv: KeyValues, mask: bool | Packed
) -> Partial:
    """Compute attention of q over `kv` with a library. `mask` is either a Packed or a bool, whether the mask is
    causal."""
    use, sizes = "packed" if isinstance(mask, Packed) else "forward", (q.shape[0], kv.k.shape[0], mask is True)
    outputs = ((q.shape, q.dtype), ((config.heads, q.shape[0]), torch.float32))
    offsets = sequence_offsets(world, mask)
    if kv.wait is not None:
        kv.wait()

    def attention(library: AttentionLibrary) -> Sequence[Tensor]:
        return library.function(use)(q, kv.k, kv.v, mask, offsets, config.scale)

    library, operands = config.library(world, use, sizes, attention), [q, kv.k, kv.v, *(offsets or ())]
    out, lse = world.backend.results(lambda: attention(library), outputs, operands, world.current_stream())
    return Partial(first_query, out, lse)


def sequence_offsets(world: World, mask: bool | Packed) -> SequenceOffsets | None:
    """Return the offsets of packed sequences as tensors. The World keeps these tensors, because a CUDA graph reads them
    at every replay."""
    if isinstance(mask, bool):
        return None
    queries, keys = mask.cu_queries, mask.cu_keys
    tensor = world.tensor
    return world.cached(
        ("sequence offsets", queries, keys), lambda: (tensor(queries, torch.int32), tensor(keys, torch.int32))
    )


def merge_partials(world: World, partials: Sequence[Partial], sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Merge partial results into `out` and `lse`. Each partial result begins either at query 0 or at one later query,
    which is the same for all of them."""
    m, heads, d = out.shape
    if not m:
        return
    partials = sorted(partials, key=lambda partial: partial.first_query)
    full, first_query = len([p for p in partials if p.first_query == 0]), partials[-1].first_query
    launch = _merge(world, m, heads, d, first_query, full, sinks is not None)
    launch(
        world.current_stream(),
        outs=tuple([p.out for p in partials]),
        lses=tuple([p.lse for p in partials]),
        sinks=lse if sinks is None else sinks,
        out=out,
        lse=lse,
    )


@prepared
def _merge(world: World, m: int, heads: int, d: int, first_query: int, full: int, sinks: bool) -> Launch:
    """Prepare the merge of `full` partial results that cover all queries and of further results that begin at
    `first_query`."""
    cols = 1 << (d - 1).bit_length()
    rows = max(world.backend.scale.block // cols, 1)
    sizes = dict(M=m, first_query=first_query, HEADS=heads, D=d, FULL=full, SINKS=sinks, ROWS=rows, COLS=cols)
    programs = min(world.sm_count * 4, heads * -(-m // rows))
    return Launch(world, merge, programs, dict(num_warps=4, local=True), **sizes)
