"""Launches of the kernels that push rows (sm_push_kernels.py). `pushing` moves what `copy_engine.prepare_exchange`
sends to other ranks, which pays below some 16 MB, where a copy engine is bound by latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from ..backends.base import Stream, SymmetricTensor
from ..kernel_launch import Launch, prepared
from ..tensor_checks import DTYPES
from ..world import World
from .copy_engine import Push, Send
from .interfaces import TensorList
from .sm_push_kernels import push_blocks, push_rows


class PushBlock(NamedTuple):
    """A block of a matrix that is pushed to `reader`: an entry of the table that `push_blocks` reads. Starts and row
    strides are in elements, `dst` in the reader's memory and `src` in this rank's."""

    reader: int
    rows: int
    columns: int
    dst_start: int
    dst_stride: int
    src_start: int
    src_stride: int


def pushing(programs: int) -> Push:
    """Return a function that prepares pushes of the two tensors of a Send by a kernel of so many programs."""

    def push(world: World, memory: SymmetricTensor, send: Send) -> Callable[[TensorList, Stream], None]:
        _, rows, *shape = memory.local.shape
        width, count, dtype = math.prod(shape), send.rows.stop - send.rows.start, memory.local.dtype
        launch = _push_rows(world, programs, send.reader, send.row * width, rows * width, count * width, dtype)

        def run(tensors: TensorList, stream: Stream) -> None:
            x, y = (t if len(t) == count else t[send.rows] for t in tensors)
            launch(stream, memory=memory.addresses, x=x, y=y)

        return run

    return push


@prepared
def _push_rows(
    world: World, programs: int, reader: int, start: int, y_offset: int, count: int, dtype: torch.dtype
) -> Launch:
    sizes = dict(reader=reader, start=start, y_offset=y_offset, count=count)
    block = 4 * world.backend.scale.block  # a thread has four 16-byte words in flight
    return Launch(world, push_rows, programs, dict(num_warps=16, local=True), **sizes, DTYPE=DTYPES[dtype], BLOCK=block)


def block_launch(
    world: World, programs: int, key: tuple[Hashable, ...], blocks: Sequence[PushBlock], dtype: torch.dtype
) -> Launch:
    """Return the launch that pushes blocks of x into their readers' memory; it takes both. `key` names the blocks,
    whose table is kept. `programs` 0 stands for the number of SMs."""
    table = world.cached(("push", *key), lambda: world.tensor([word for b in blocks for word in b], torch.int64))
    max_rows, max_columns = max(block.rows for block in blocks), max(block.columns for block in blocks)
    cols = min(1 << (max_columns - 1).bit_length(), 1024)
    rows = max(1, 4 * world.backend.scale.block // cols)
    return Launch(
        world,
        push_blocks,
        programs or world.sm_count,
        dict(num_warps=16, local=True),
        table=table,
        blocks=len(blocks),
        tiles_across=-(-max_columns // cols),
        tiles_down=-(-max_rows // rows),
        DTYPE=DTYPES.get(dtype, tl.float32),
        ALIGN=8 if dtype in DTYPES else 1,
        ROWS=rows,
        COLS=cols,
    )
