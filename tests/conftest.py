"""`@pytest.mark.gpu(n)`: the test needs n GPUs (default 1); if there are fewer, it is skipped with that reason.

Under xdist (`--dist loadgroup`), tests that share GPUs run one after another, so that no test measures another test's
work.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gates import covered_by
from weft.planner import table

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # xdist's workers run in parallel, not torch's threads


@pytest.fixture(autouse=True)
def nothing_learned_stays() -> Iterator[None]:
    """Forget the table rows that a test has learned."""
    yield
    if table._learned:
        table._learned.clear()
        table.learn([])


@pytest.hookimpl(tryfirst=True)  # runs before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    for item in items:
        if covered_by(item.nodeid.removeprefix("tests/"), item.iter_markers("covered")):
            item.add_marker(pytest.mark.gate)
        mark = item.get_closest_marker("gpu")
        if mark is None:
            continue
        needed = mark.args[0] if mark.args else 1
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU{'s' * (needed > 1)}, found {gpus}"))


def pytest_collection_finish() -> None:
    """Freeze the modules that all tests have imported, and run garbage collection less often, which took a tenth of the
    emulator's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the mutation gate's kill rate by protocol, and the kernels that the offline gate compiled."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    properties = [pair for r in reports for pair in getattr(r, "user_properties", ())]
    rows = [value for name, value in properties if name == "mutations"]
    if rows:
        rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
        terminalreporter.section("mutations: caught of those that change something")
        for name, total, caught, equivalent in rows:
            rate = f"{caught} of {total - equivalent}"
            share = caught / max(total - equivalent, 1)
            terminalreporter.line(f"{name:40} {rate:>12} {share:5.0%}, {equivalent} equivalent")
    kernels = [value for name, value in properties if name == "kernel"]
    if kernels:
        terminalreporter.section("kernels compiled for sm_90a")
        for name, registers, shared in kernels if terminalreporter.verbosity > 0 else ():
            terminalreporter.line(f"{name:70} {registers:4} registers {shared:7} bytes shared")
        registers, shared = max(k[1] for k in kernels), max(k[2] for k in kernels)
        terminalreporter.line(
            f"{len(kernels)} variants, at most {registers} registers and {shared} bytes of shared memory"
        )
