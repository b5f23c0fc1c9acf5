"""`weft tune` ends with a table and a plot of the profile's predictions."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from weft.planner.profile import Profile, shipped
from weft.planner.summary import TOKENS, gains, plot, table

PREDICTED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


@pytest.fixture(scope="module")
def profile() -> Profile:
    shipped_profile = shipped("nvidia-h200-x4")
    assert shipped_profile is not None
    return shipped_profile


def test_gains_are_those_that_explain_has(profile: Profile) -> None:
    import weft

    every = gains(profile)
    assert {(gain.op, gain.tokens) for gain in every} == {(op, tokens) for op in PREDICTED for tokens in TOKENS}
    for gain in every[:: len(TOKENS)]:
        n, k = (14336, 8192) if gain.op == PREDICTED[0] else (8192, 7168)
        options = weft.explain(gain.op, gain.tokens, n, k, profile=profile).options
        assert gain.taken in [option.us for option in options] and gain.taken <= gain.sequential


def test_table_and_plot(profile: Profile, tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(table(profile))
    text = console.export_text()
    assert "nvidia-h200-x4" in text and text.count("matmul_all_reduce") == len(TOKENS) and "x" in text
    plot(profile, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")


def test_missing_measurements_are_left_out(profile: Profile, tmp_path: Path) -> None:
    from dataclasses import replace

    empty = replace(profile, gemms=())
    assert gains(empty) == []
    plot(empty, tmp_path / "empty.png")
