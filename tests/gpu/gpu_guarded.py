"""GPU checks of kernels that wait inside a pipelined loop; tests/gpu/gpu_main.py runs them among its own checks.

To run them alone: torchrun --nproc-per-node N -m tests.gpu.gpu_main --out DIR --only "guarded loads"
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch

import weft
from tests.emulated.cases_guarded_loads import (
    CHAINS,
    FORMS,
    PRODUCTS,
    chained,
    count_wrong_sums,
    exchange_and_sum,
    product,
    product_launch,
)

SIZE, PARTS = 64, 8  # columns per block, and number of blocks
CALLS = 40
LONGEST = 40  # the delay of a part, in atomics of about a microsecond each
TILE, STEPS = (128, 128, 64), 4


def wrong_sums(world: weft.World, form: str, guard: bool, calls: int = CALLS) -> float:
    """Return the number of calls with wrong sums while parts arrived with random delays. Without the guard this
    function checks nothing, because chance decides whether a call is wrong."""
    rng = random.Random(world.rank)
    delays = [[rng.randrange(LONGEST) for _ in range(PARTS)] for _ in range(calls)]
    return float(count_wrong_sums(world, form, weft.jit(guard_loads=guard)(exchange_and_sum), SIZE, PARTS, delays))


def product_error(world: weft.World, form: str) -> float:
    """Return the number of wrong elements in a guarded GEMM of integers over several calls."""
    generator = torch.Generator().manual_seed(world.rank)
    a, b = (torch.randint(-2, 3, (512, 1024), generator=generator).bfloat16().to(world.device) for _ in range(2))
    expected, wrong = (a.double() @ b.double().t()).bfloat16(), 0
    kernel = weft.jit(guard_loads=True)(product)
    launch, out = product_launch(world, form, kernel, a, b, STEPS, TILE, 8, 8)
    for _ in range(5):
        out.zero_()
        launch()
        wrong += int((out != expected).sum())
    return float(wrong)


def chain_ends(world: weft.World, form: str) -> float:
    """The tiles of a loop wait for one another; if Triton flattened the loop on its own, the waits would expire."""
    chained(form, True)(world)
    return 0.0


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    for form in FORMS:
        yield f"guarded loads, {form}, late parts", 0.0, partial(wrong_sums, world, form, True)
    for form in PRODUCTS:
        yield f"guarded loads, product {form}", 0.0, partial(product_error, world, form)
    for form in CHAINS:
        yield f"guarded loads, {form}", 0.0, partial(chain_ends, world, form)
