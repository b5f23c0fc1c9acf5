"""The router in an MoE layer's launch and the router in a separate launch sum a row's scores in one order for any
number of warps, because every sum has the same layout along a row."""

from __future__ import annotations

import re

import pytest

import weft
from tests.emulated.cases_moe_fused_router import RoutedLayer, RouterCase
from tests.offline.test_offline import launches
from weft.check.offline import Compiled, compile_kernel
from weft.plans import FusedMoe, GemmTile

LAYERS = {
    "16 experts": RoutedLayer(16, 4, 512, 256, (40,)),
    "60 experts": RoutedLayer(60, 4, 512, 256, (40,)),
    "groups": RoutedLayer(160, 6, 512, 256, (40,), groups=8, top_groups=3, scale=2.5),
    "after the choice": RoutedLayer(32, 4, 512, 256, (40,), scoring="softmax_after"),
}
PLANS = FusedMoe(route=True), FusedMoe(tile=GemmTile(), per_sm=1, route=True)  # layouts for 4 warps and for 8
SUM = re.compile(r'%(?:w|total)\w* = "tt\.reduce"\(%\w+\)[\s\S]*?\(tensor<\d+x(\d+)xf32, (#\w+)>\)')
ALONG_A_ROW = re.compile(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[\d+, (\d+)\]")


def compiled(sizes: RoutedLayer, plan: FusedMoe) -> dict[str, Compiled]:
    """Return the layer's kernel and the separate router's kernel, by name."""

    def calls(world: weft.World) -> None:
        case = RouterCase(world, sizes, plan)
        case.call(0)
        case.routes(case.results[0][0])

    return {
        launch.kernel.__name__: compile_kernel(launch.kernel, launch.args, launch.options)
        for launch in launches(calls, 2)[0]
    }


def sums_of(kernel: Compiled) -> list[tuple[str, ...]]:
    """Return, for each sum over a row's experts, the number of columns and the layout along the row."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", kernel.ttgir, re.MULTILINE))
    return [
        (columns, *(number for _, number in ALONG_A_ROW.findall(layouts[name])))
        for columns, name in SUM.findall(kernel.ttgir)
    ]


@pytest.mark.gate
@pytest.mark.parametrize("name", LAYERS)
def test_the_order_of_a_rows_sums_does_not_depend_on_the_warps(name: str) -> None:
    kernels = [compiled(LAYERS[name], plan) for plan in PLANS]
    expected = sums_of(kernels[0]["choose"])
    assert expected and all(len(one) == 4 for one in expected)
    for compiled_kernels in kernels:
        assert sums_of(compiled_kernels["moe_layer"]) == expected


@pytest.mark.gate
def test_ids_and_weights_are_stored_one_by_one() -> None:
    """No store may use the hint about the order of addresses, which does not always hold."""
    ptx = compiled(LAYERS["60 experts"], PLANS[0])["choose"].ptx
    stores = re.findall(r"st\.global\S*", ptx)
    assert stores and set(stores) == {"st.global.b32"}
