"""`weft check` accepts correct kernels in plain Triton over torch's symmetric memory, and finds the fault when a
barrier is removed.
"""

import functools

import pytest

from tests.check import fixed_bugs, symmetric_kernels
from weft.check import search
from weft.errors import Deadlock, MemoryFault, Race

KERNELS = {
    "one_shot": (dict(FIRST=False), dict(LAST=False), dict(FENCED=False)),
    "two_shot": (dict(FIRST=False), dict(LAST=False)),
    "gathered_matmul": (dict(wait=False), dict(staged=False), dict(read=False)),
    "push": (dict(wait=False), dict(clear=0), dict(clear=1)),
}
BUGS = ("no_last_barrier", "relaxed_signal", "gpu_scope", "only_one_thread_acquires", "flag_baked_into_graph",
        "one_staging_slot", "pad_cleared_too_late", "lock_without_order", "published_before_all_sent",
        "order_of_peers_differs", "two_generations")  # fmt: skip
FOUND = (Race, Deadlock, MemoryFault, AssertionError)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_kernel_is_clean(kernel, ranks):
    exploration = search(getattr(symmetric_kernels, kernel), ranks, range(3))
    assert not exploration.findings, exploration.findings
    assert exploration.programs


@pytest.mark.parametrize(("kernel", "without"), [(k, w) for k, variants in KERNELS.items() for w in variants], ids=str)
def test_a_kernel_without_a_barrier_is_found(kernel, without):
    exploration = search(functools.partial(getattr(symmetric_kernels, kernel), **without), 2, range(12))
    assert exploration.findings and isinstance(exploration.findings[0][1], FOUND), exploration.findings


@pytest.mark.parametrize("bug", BUGS)
def test_a_public_bug_is_found_and_its_mend_is_clean(bug):
    main = getattr(fixed_bugs, bug)
    exploration = search(functools.partial(main, mended=False), 2, range(20))
    assert exploration.findings and isinstance(exploration.findings[0][1], FOUND), exploration.findings
    mended = search(functools.partial(main, mended=True), 2, range(4))
    assert not mended.findings, mended.findings
    assert mended.programs
