"""The interfaces of transports. An op either computes with each arrival as soon as the arrival is complete, or computes
parts and sends each part.

    gather    every rank gets the rows of all ranks     with gather(tensors) as (full, arrivals): compute on each
    reduce    every rank gets its rows, or all rows,    with reduce(out, bias) as parts: compute each part, then send it
              of the sum over ranks
    exchange  rows go to the ranks that read them       exchanged = exchange(..): wait for what some ranks sent

A transport prepares a function for one of these three interfaces and calls of one shape. The file of a transport is
named after the mechanism that moves the bytes: NCCL (collectives.py), copy engines (copy_engine.py), low-latency rows
(low_latency.py), kernels that push (sm_push.py), two levels of nodes (two_level.py). Transports do not depend on the
computation of the op. A transport orders the streams, and assigns a stream, the `lane`, to each arrival and each part.
The op computes on this stream. Several arrivals or parts alternate between the caller's stream and a second stream as
lanes, so that one computation fills the SMs that the last tiles of the previous one leave idle. When the context ends,
the caller's stream is ordered after all computations and transfers.

The programs that pull, push or sum in the same launch as a GEMM (ops/*/kernels.py) do not use these interfaces, because
they share SMs and registers with the tiles that wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from ..backends.base import Stream

TensorList: TypeAlias = Sequence[torch.Tensor]
# A collective of whole tensors, such as `World.all_gather`: it stores its result for x in `out`. The arguments are
# (out, x, stream).
CollectiveFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Stream], object]


class ArrivedRows(NamedTuple):
    """Rows that have arrived. `rows` is their range among the rows of all ranks, `tensors` contains these rows of each
    gathered tensor, and `lane` is the stream that may read them."""

    rows: slice
    tensors: TensorList
    lane: Stream


class GatheredTensors(NamedTuple):
    """The tensors that a gather fills. `full` contains each tensor with the rows of all ranks in rank order; it is
    complete when the gather ends. When an iteration over `arrivals` reaches an arrival, the lane of this arrival waits
    for its rows."""

    full: TensorList
    arrivals: Iterable[ArrivedRows]


class PartialRows(NamedTuple):
    """Rows to compute next. `rows` is their range in the result, or None for all rows. `partial` is the memory for this
    rank's part of the sum, or None for new memory. `lane` is the stream on which to compute. The op must call `send`
    with the result immediately after it has enqueued the computation on the lane."""

    rows: slice | None
    partial: torch.Tensor | None
    lane: Stream
    send: Callable[[torch.Tensor], object]


TensorSpecs: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each tensor
GatherRows: TypeAlias = Callable[
    [TensorList], AbstractContextManager[GatheredTensors]
]  # a function of this rank's tensors [m_r, ..]
# The arguments are (out, bias); this rank's rows of the sum + bias are stored in `out`.
ReduceRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], AbstractContextManager[Iterable[PartialRows]]]
# The arguments are (world, plan, rows of every rank, specs of this rank's tensors, keep). With `keep`, `full` also
# contains this rank's rows.
GatherTransport: TypeAlias = Callable[..., GatherRows]
# The arguments are (world, plan, rows of every rank, columns, dtype).
ReduceTransport: TypeAlias = Callable[..., ReduceRows]
