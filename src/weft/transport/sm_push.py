"""Launching the programs that push rows to their readers (sm_push_kernels.py): a way to exchange rows (interfaces.py),
alone and for `copy_engine.exchange_rows`, where copy engines are bound by their latency."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton.language as tl

from ..backends.base import Stream, SymmetricTensor
from ..kernel_launch import Launch, prepared
from ..tensor_checks import DTYPES
from ..world import World
from .copy_engine import Push, Send
from .sm_push_kernels import push_blocks, push_rows

# reader, rows, columns, first element and row length there, and here
Block = tuple[int, int, int, int, int, int, int]


def pushing(programs: int) -> Push:
    """What pushes the two tensors of a Send by so many programs."""

    def push(world: World, memory: SymmetricTensor, send: Send, stream: Stream) -> None:
        x, y = send.tensors
        width, rows = x[0].numel(), memory.local.shape[1]
        launch = _rows(world, programs, send.to, send.first * width, rows * width, x.numel(), x.dtype)
        launch(stream, memory=memory.addresses, x=x, y=y)

    return push


@prepared
def _rows(world: World, programs: int, reader: int, start: int, plane: int, count: int, dtype: torch.dtype) -> Launch:
    sizes = dict(reader=reader, start=start, plane=plane, count=count)
    block = 4 * world.scale.block  # four 16-byte words a thread under way
    return Launch(world, push_rows, programs, dict(num_warps=16, local=True), **sizes, DTYPE=DTYPES[dtype], BLOCK=block)


def block_launch(
    world: World, programs: int, key: tuple[Hashable, ...], blocks: Sequence[Block], dtype: torch.dtype
) -> Launch:
    """What pushes blocks of x to their readers' memory, to be launched with both. key: of the blocks, whose table is
    kept. programs: 0 for as many as the GPU has SMs."""
    table = world.cached(("push", *key), lambda: world.tensor([word for b in blocks for word in b], torch.int64))
    cols = min(1 << (max(b[2] for b in blocks) - 1).bit_length(), 1024)
    rows = max(1, 4 * world.scale.block // cols)
    return Launch(
        world,
        push_blocks,
        programs or world.sm_count,
        dict(num_warps=16, local=True),
        table=table,
        blocks=len(blocks),
        across=-(-max(b[2] for b in blocks) // cols),
        down=-(-max(b[1] for b in blocks) // rows),
        DTYPE=DTYPES.get(dtype, tl.float32),
        ALIGN=8 if dtype in DTYPES else 1,
        ROWS=rows,
        COLS=cols,
    )
