"""The launch of the kernel that pushes blocks of a matrix (sm_push_kernels.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from ..kernel_launch import Launch
from ..tensor_checks import DTYPES
from ..world import World
from .sm_push_kernels import push_blocks


class PushBlock(NamedTuple):
    """A block of a matrix that is pushed to `reader`: an entry of the table that `push_blocks` reads. Starts and row
    strides are in elements; `dst` is in the reader's memory, and `src` is in this rank's matrix."""

    reader: int
    rows: int
    columns: int
    dst_start: int
    dst_stride: int
    src_start: int
    src_stride: int


def block_launch(
    world: World, programs: int, key: tuple[Hashable, ...], blocks: Sequence[PushBlock], dtype: torch.dtype
) -> Launch:
    """Return the launch that pushes blocks of x into their readers' memory. The arguments of the launch are x and this
    memory. The World caches the table of the blocks under `key`. If `programs` is 0, there is one program for each
    SM."""
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
