"""What an op sees of a transport, whoever moves the bytes: arrivals to compute on, or parts to compute and send.

    Gather    every rank gets the rows of all ranks          with gather(..) as (full, arrivals): compute each arrival
    Reduce    every rank gets the sum over ranks of its      with reduce(..) as parts: compute each part, send it
              rows, or of all rows
    Scatter   rows that a rank computed go to their owners   Reduce's first half: a part that is sent
    Exchange  every rank's rows go to the ranks that read    arrived = exchange(..): wait for what a rank sent
              them

A way to do one of these is a function of one of the types below, in the file of what moves the bytes: the library's
collectives (collectives.py), copy engines (copy_engine.py), low-latency rows (low_latency.py), programs that push
(sm_push.py), two levels of nodes (two_level.py). It orders the streams, and what it yields says on which stream, the
`lane`, an op computes: by turns on the caller's and on a second one where there are several parts, so that one fills
the SMs that the last tiles of the one before leave idle. Entering waits for no arrival. Leaving orders the caller's
stream behind all that is computed and moved, and behind the last use of this rank's memory by others.

Programs of a GEMM's own launch that pull, push or sum (ops/*/kernels.py) are no ways of these: they share registers and
SMs with the tiles that wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from ..backends.base import Stream

Tensors: TypeAlias = Sequence[torch.Tensor]


class ArrivedRows(NamedTuple):
    """Rows that are there. rows: of the whole. tensors: these rows of each tensor that is gathered. lane: the stream on
    which they may be read."""

    rows: slice
    tensors: Tensors
    lane: Stream


class GatheredTensors(NamedTuple):
    """full: each tensor with the rows of all ranks, in the order of the ranks; complete on the caller's stream when the
    gather ends. arrivals: the rows as they come; taking one orders its lane behind it."""

    full: Tensors
    arrivals: Iterable[ArrivedRows]


class PartialRows(NamedTuple):
    """Rows to compute next. rows: of the whole, None for all of them. partial: where to write this rank's part of their
    sum, None for new memory. lane: the stream to compute on. send: called with what was computed, as soon as it was
    given to the lane."""

    rows: slice | None
    partial: torch.Tensor | None
    lane: Stream
    send: Callable[[torch.Tensor], object]


# (world, plan, rows of every rank, this rank's tensors [m_r, ..], keep): with `keep` `full` has this rank's rows too.
Gather: TypeAlias = Callable[..., AbstractContextManager[GatheredTensors]]
# (world, plan, rows of every rank, out, bias): out is this rank's rows of the sum, + bias.
Reduce: TypeAlias = Callable[..., AbstractContextManager[Iterable[PartialRows]]]
