"""The interfaces of transports: an op computes on arrivals as they come, or computes parts and sends them.

    gather    every rank gets the rows of all ranks     with gather(tensors) as (full, arrivals): compute on each
    reduce    every rank gets its rows, or all rows,    with reduce(out, bias) as parts: compute each part, then send it
              of the sum over ranks
    exchange  rows go to the ranks that read them       exchanged = exchange(..): wait for what some ranks sent

A transport prepares a function of one of these kinds for calls of one shape. Its file is named after the mover of the
bytes: NCCL (collectives.py), copy engines (copy_engine.py), low-latency rows (low_latency.py), kernels that push
(sm_push.py), two levels of nodes (two_level.py). No transport knows what an op computes. It orders the streams, and
assigns each arrival and each part a stream, the `lane`, on which the op computes. If there are several, the lanes are
the caller's stream and a second stream in turn, so that one computation fills the SMs that the last tiles of the
previous one leave idle. When the context ends, the caller's stream is ordered after all computations and transfers.

The programs that pull, push or sum in the same launch as a GEMM (ops/*/kernels.py) are not transports of this kind:
they share SMs and registers with the tiles that wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch

from ..backends.base import Stream

TensorList: TypeAlias = Sequence[torch.Tensor]


class ArrivedRows(NamedTuple):
    """Rows that have arrived. `rows` is their range in the whole, `tensors` holds them, one tensor for each gathered
    tensor, and `lane` is the stream that may read them."""

    rows: slice
    tensors: TensorList
    lane: Stream


class GatheredTensors(NamedTuple):
    """`full` is each tensor with the rows of all ranks in rank order, complete when the gather ends. Iterating to the
    next of `arrivals` makes its lane wait for it."""

    full: TensorList
    arrivals: Iterable[ArrivedRows]


class PartialRows(NamedTuple):
    """Rows to compute next. `rows` is their range in the whole, None for all rows; `partial` is the memory for this
    rank's part of the sum, None for new memory; `lane` is the stream to compute on. Call `send` with the result right
    after its computation was enqueued on the lane."""

    rows: slice | None
    partial: torch.Tensor | None
    lane: Stream
    send: Callable[[torch.Tensor], object]


TensorSpecs: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]  # the shape and dtype of each tensor
GatherRows: TypeAlias = Callable[
    [TensorList], AbstractContextManager[GatheredTensors]
]  # of this rank's tensors [m_r, ..]
# (out, bias); `out` gets this rank's rows of the sum + bias.
ReduceRows: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None], AbstractContextManager[Iterable[PartialRows]]]
# (world, plan, rows of every rank, specs of this rank's tensors, keep); `keep` puts this rank's rows into `full` too.
GatherTransport: TypeAlias = Callable[..., GatherRows]
# (world, plan, rows of every rank, columns, dtype).
ReduceTransport: TypeAlias = Callable[..., ReduceRows]
