"""weft's plugin of pytest: the fixture `emulated_ranks`. It imports weft, and with it torch, in the tests that use it.

def test_all_reduce(emulated_ranks):
    emulated_ranks(4, main)  # main(rank, world_size), as torchrun would run it; no GPU is needed
"""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def emulated_ranks(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function (ranks, main, schedules=20, seed=0) that runs main(rank, world_size), or main(world), on
    emulated ranks under that many schedules. It raises the first race, deadlock or error of `main`, and fails if no
    kernel ran. The section "weft" of the test's report says what ran."""

    def run(ranks: int, main: Callable[..., object], schedules: int = 20, seed: int = 0) -> None:
        from weft.check import search

        exploration = search(main, ranks, range(seed, seed + schedules))
        request.node.add_report_section(
            "call", "weft", f"{ranks} ranks: {exploration.runs} schedules, {exploration.programs} programs"
        )
        for number, error in exploration.findings:
            error.add_note(f"the same again: emulated_ranks({ranks}, .., schedules=1, seed={number})")
            raise error
        if not exploration.programs:
            pytest.fail("no kernel was launched, so there was nothing to check", pytrace=False)

    return run
