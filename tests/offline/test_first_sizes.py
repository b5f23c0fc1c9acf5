"""The sizes that the vLLM plugin calls before requests do are enough: no other size compiles a kernel of its own."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton

import weft
from tests.offline.test_offline import Launch, launches
from weft import _triton
from weft.check.offline import HOPPER, OfflineDriver, for_gpu, standing_in
from weft.integrations.vllm.timing import first_sizes
from weft.ops.common import split_rows

CAPTURED, MOST = 512, 8192  # vLLM's defaults
BF = torch.bfloat16
COLUMNS = dict(o_proj=8192, qkv=5120)  # of Llama-70B on two ranks


def gather(world: weft.World, tokens: int, columns: int) -> None:
    rows = split_rows(world, tokens)
    x, weight = torch.empty(rows[world.rank], 512, dtype=BF), torch.empty(columns, 512, dtype=BF)
    weft.all_gather_matmul(x, weight, world=world, rows=rows if len(set(rows)) > 1 else None, plan="fused")


def scatter(world: weft.World, tokens: int, columns: int) -> None:
    x, weight = torch.empty(tokens, 512, dtype=BF), torch.empty(columns, 512, dtype=BF)
    weft.matmul_reduce_scatter(x, weight, world=world, plan="fused")


def sum_and_norm(world: weft.World, tokens: int, columns: int) -> None:
    x, own_rows = torch.empty(tokens, columns, dtype=BF), split_rows(world, tokens)[world.rank]
    residual, norm = torch.empty(own_rows, columns, dtype=BF), torch.ones(columns, dtype=BF)
    weft.all_reduce_rms_norm(x, residual, norm, 1e-6, world=world, plan="two_shot")


def compiled_by(launch: Launch) -> tuple[str, str]:
    """Return what Triton keeps a compiled kernel by."""
    with standing_in(OfflineDriver(HOPPER)):
        kernel: Any = launch.kernel
        device = triton.runtime.driver.active.get_current_device()
        *_, binder = kernel.device_caches[device]
        arguments = for_gpu(launch.args, HOPPER) | _triton.options(launch.options)
        _, specialization, options = binder(**arguments, debug=False)
    return kernel.__name__, f"{specialization} {options}"


def kernels(sizes: Sequence[int], op: Callable[[weft.World, int, int], None], columns: int) -> set[tuple[str, str]]:
    """One size at a time: launches hold their operands."""
    return {
        compiled_by(launch)
        for tokens in sizes
        for launch in launches(lambda world, tokens=tokens: op(world, tokens, columns), 2)[0]
    }


@functools.cache
def sizes_called_first() -> list[int]:
    return weft.spmd(lambda world: first_sizes(world, CAPTURED, MOST), 2, backend="emulated")[0]


@pytest.mark.gate
@pytest.mark.parametrize(
    "op, layer",
    [(gather, "qkv"), (gather, "o_proj"), (scatter, "o_proj"), (sum_and_norm, "o_proj")],
)
def test_no_other_size_compiles_a_kernel(op: Callable[[weft.World, int, int], None], layer: str) -> None:
    draw = random.Random(0)
    sizes = [draw.randrange(CAPTURED + 1, MOST + 1) for _ in range(12)]
    sizes += [draw.randrange(CAPTURED + 1, 1200) for _ in range(16)] + list(range(640, 1280, 128))
    compiled_first = kernels(sizes_called_first(), op, COLUMNS[layer])
    assert compiled_first and kernels(sizes, op, COLUMNS[layer]) <= compiled_first
