"""weft's kernels with stock Triton (`make newest` runs this file with WEFT_STOCK_TRITON=1): no memory access remains in
inline assembly, and GSan instruments the accesses that replace it.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from tests.offline.test_offline import CASES, launches
from weft.check import offline
from weft.lang import stock

pytestmark = [
    pytest.mark.gate,
    pytest.mark.skipif(not stock.IN_USE, reason="for WEFT_STOCK_TRITON=1, with Triton 3.9"),
]
ORDERS = (  # the fence, and `flush_stores` with and without bulk stores
    "fence.proxy.async.global; mov.b32 $0, 0;",
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.sync 0; mov.b32 $0, 0;",
    "bar.sync 0; mov.b32 $0, 0;",
)
NAMES = (
    *("all_gather_matmul x2 plan 0", "matmul_all_reduce x2 plan 0", "matmul_reduce_scatter x2 signaled 0"),
    *("all-reduce x8, one shot", "all-reduce x8, two shots", "World.barrier"),
)


def launches_of(name: str) -> list[Any]:
    return launches(*CASES[name])[0]


@pytest.mark.parametrize("name", NAMES)
def test_assembly_only_orders_bulk_accesses(name: str) -> None:
    for launch in launches_of(name):
        compiled = offline.compile_kernel(launch.kernel, launch.args, launch.options)
        texts = set(re.findall(r'inline_asm "([^"]*)"', compiled.ttgir))
        assert texts <= {*ORDERS}, name


def test_gsan_instruments_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 * 1024})
    monkeypatch.setattr(offline.OfflineDriver, "utils", utils, raising=False)
    monkeypatch.setattr(offline, "names_own_files", lambda kernel, ptx: True)  # the PTX names GSan's own files too
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.instrumentation_mode = "gsan"
        (launch,) = launches_of("wait_word")
        compiled = offline.compile_kernel(launch.kernel, launch.args, launch.options)
    assert "__triton_gsan_atomic_begin_scalar" in compiled.ptx
