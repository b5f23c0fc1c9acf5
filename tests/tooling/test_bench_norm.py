"""bench/measure/norm.py: torch's methods do not overwrite each other's operands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from bench.measure import norm as bench


def test_the_one_shot_sum_reads_partial_sums_after_the_two_shot_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's two-shot all-reduce works in place: in shared memory it would leave its sum as input to the one-shot
    all-reduce."""
    group = SimpleNamespace(WORLD=SimpleNamespace(group_name="all"))
    monkeypatch.setattr(bench.dist, "group", group)
    monkeypatch.setattr(bench.symm, "empty", lambda m, h, **_: torch.empty(m, h, dtype=torch.bfloat16))
    monkeypatch.setattr(bench.symm, "rendezvous", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_", lambda part, *_: part.mul_(2), raising=False)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", lambda part, *_: part * 2, raising=False)

    def main(world: weft.World) -> None:
        x, weight = torch.ones(4, 64).bfloat16(), torch.ones(64).bfloat16()
        seen: list[torch.Tensor] = []
        program: Any = SimpleNamespace(world=world, log=print, norm=lambda total, *_: seen.append(total.clone()))
        methods = bench.Bench.methods(program, 4, 64, x, x, x, weight)
        for name in ("torch two_shot", "torch two_shot", "torch one_shot"):
            methods[name][0]()
        assert torch.equal(seen[-1], 2 * x)

    weft.spmd(main, 1, backend="emulated")
