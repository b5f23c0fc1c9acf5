"""The results of weft's own GEMM, whose programs share the last tiles, are compared with torch's for several shapes and
numbers of programs. The way in which programs share tiles is tested too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft
from tests.emulated.cases import distance, draw
from weft.ops.matmul import Shares, matmul
from weft.scale import Scale

H200: Any = SimpleNamespace(sm_count=132, backend=SimpleNamespace(scale=Scale()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    m=st.integers(1, 70), n=st.integers(1, 20), k=st.integers(1, 60), programs=st.integers(1, 6), seed=st.integers(0, 9)
)  # fmt: skip
def test_against_torch(m: int, n: int, k: int, programs: int, seed: int) -> None:
    def rank(world: weft.World) -> None:
        results = []
        for call in range(2):
            x, w = draw(seed + call, m, 8 * k), draw(seed + 20, 8 * n, 8 * k) * 0.1
            out = world.empty((m, 8 * n), x.dtype)
            matmul(x, w, out, world, programs)
            world.synchronize()
            assert distance(out, x.double() @ w.double().t()) < 3e-3
            results.append(out)
        again = world.empty((m, 8 * n), x.dtype)
        matmul(x, w, again, world, programs)
        world.synchronize()
        assert torch.equal(again, results[1]), "the parts must be added in a fixed order"

    weft.spmd(rank, 1, backend="emulated", seed=seed)


@pytest.mark.parametrize("programs", [5, 6])
def test_gated(programs: int) -> None:
    """Tiles alternate 16 gate rows and 16 up rows, and programs share two or four tiles."""

    def rank(world: weft.World) -> None:
        for m in (16, 32, 48):
            x, gate, up = draw(1, m, 192), draw(2, 32, 192) * 0.1, draw(3, 32, 192) * 0.1
            weight = torch.cat([part for pair in zip(gate.split(16), up.split(16), strict=True) for part in pair])
            out = world.empty((m, 32), x.dtype)
            matmul(x, weight, out, world, programs, gated=32)
            world.synchronize()
            expected = torch.nn.functional.silu(x.double() @ gate.double().t()) * (x.double() @ up.double().t())
            assert distance(out, expected) < 5e-3

    weft.spmd(rank, 1, backend="emulated")


@given(tiles=st.integers(1, 2000), steps=st.integers(1, 512), programs=st.integers(1, 132))
def test_parts_fit_the_programs_and_the_steps(tiles: int, steps: int, programs: int) -> None:
    s = Shares.choose(H200, tiles, steps, programs)
    assert s.time <= -(-tiles // programs) * steps
    if s.shared_tiles:
        assert s.shared_tiles == tiles % programs and s.parts > 1
        assert s.shared_tiles + -(-s.shared_tiles // s.tiles_per_helper) * (s.parts - 1) <= programs, (
            "finishing programs and helpers must fit"
        )
        assert s.shared_tiles * (s.parts - 1) <= programs, "every part needs a slot of its own"
        assert 0 < s.first_steps <= steps - (s.parts - 1), "every part needs a step"
        assert s.time >= tiles // programs * steps + s.first_steps + H200.backend.scale.add_steps


def test_which_tiles_are_shared() -> None:
    assert Shares.choose(H200, 2 * 132, 128, 132).shared_tiles == 0, "whole waves share no tile"
    assert Shares.choose(H200, 128, 128, 132).shared_tiles == 0, "an almost full wave shares no tile"
    assert Shares.choose(H200, 40, 4, 132).shared_tiles == 0, "a short K shares no tile"
    narrow = Shares.choose(H200, 40, 128, 132)
    assert (narrow.shared_tiles, narrow.tiles_per_helper, narrow.parts) == (40, 1, 3)
    nearly = Shares.choose(H200, 132 + 92, 128, 132)
    assert (nearly.shared_tiles, nearly.tiles_per_helper, nearly.parts) == (92, 3, 2) and nearly.first_steps > 96, (
        "each helper must compute the ends of three tiles"
    )
