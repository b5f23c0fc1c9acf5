"""Counters that only grow pass 2^31 and 2^32 after 37 hours on a busy server. Every op and plan must stay correct
beyond these limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

import weft
from tests.emulated.test_disagree import BF, EVERY, OPS
from tests.gates import some
from weft import World, moe
from weft.backends.base import SymmetricTensor
from weft.lang.channel import CALLS
from weft.lang.intrinsics import NUMBER_BITS

COUNTING = ("epoch", "barrier_arrivals", "targets")  # words outside channels that grow in proportion to the calls
BEFORE = 2  # the number of calls before the counters are set


def grouped(world: World, m: int, plan: str) -> torch.Tensor:
    torch.manual_seed(1)
    ids, weights = torch.stack([torch.randperm(4)[:2] for _ in range(m)]).int(), torch.rand(m, 2)
    w13, w2 = moe.pack(torch.randn(4, 64, 32).to(BF), world=world), torch.randn(4, 32, 32).to(BF)
    x = torch.randn(m, 32).to(BF)
    hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w13, world=world, plan=plan)
    return weft.grouped_matmul_reduce_scatter(hidden, routes, ids, w2, world=world, plan=plan)


def inside(value: Any, name: object = "") -> Iterator[tuple[object, torch.Tensor]]:
    """Yield the tensors inside objects that a World keeps, with the names of their containers."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, SymmetricTensor):
        return
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from inside(part, key)
    elif hasattr(value, "_fields") or is_dataclass(value):
        names = value._fields if hasattr(value, "_fields") else [field.name for field in fields(value)]
        for field_name in names:
            yield from inside(getattr(value, field_name), field_name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from inside(part, name)


def wrapped(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def age(world: World, calls: int) -> None:
    """Advance every counter as if BEFORE calls of this kind had been made."""
    world.synchronize()
    world.exchange("aged")
    backend: Any = world.backend
    for (rank, name, _), (counters, state, _) in backend.machine.channels.items():
        if rank != world.rank or not isinstance(state, torch.Tensor):
            continue
        calls_made = int(state[CALLS.value])
        aged_calls = calls_made * calls // BEFORE
        state[CALLS.value] = wrapped(aged_calls)
        if name.startswith("calls of "):  # words that contain a launch count in the bits above a number
            number = (1 << NUMBER_BITS) - 1
            for i, word in enumerate(counters.tolist()):
                count = aged_calls - calls_made + (word >> NUMBER_BITS)
                counters[i] = wrapped((count << NUMBER_BITS) + (word & number))
        else:
            counters.copy_(torch.tensor([wrapped(c * calls // BEFORE) for c in counters.tolist()]))
    backend.machine.words.clear()  # the emulator's record of the program that released each value
    seen = set()
    for name, word in inside([world._cache, world._arenas]):
        if name in COUNTING and word.dtype == torch.int32 and word.data_ptr() not in seen:
            seen.add(word.data_ptr())
            first_counts = [c % BEFORE for c in word.tolist()]  # words whose value is 1 in the first call
            aged = [
                wrapped(one + (c - one) * calls // BEFORE) for c, one in zip(word.tolist(), first_counts, strict=True)
            ]
            word.copy_(torch.tensor(aged, dtype=torch.int32))
    world.exchange("aged")


@pytest.mark.parametrize("calls", some([2**31 - 2, 2**32 - 2]))
@pytest.mark.parametrize(("op", "plan"), [*EVERY, ("grouped", "dispatched")], ids=lambda value: str(value))
def test_counters_pass_their_ends(op: str, plan: str, calls: int) -> None:
    call = grouped if op == "grouped" else OPS[op][0]

    def main(world: World) -> None:
        def results() -> list[torch.Tensor]:
            result = call(world, 128 * 4 if plan == "flag_gated" else 4, plan)
            world.synchronize()
            return [t.clone() for t in (result if isinstance(result, tuple) else (result,))]

        first_results = [results() for _ in range(BEFORE)][0]
        age(world, calls)
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(first_results, results(), strict=True))

    weft.spmd(main, 2, backend="emulated", sm_count=4)
