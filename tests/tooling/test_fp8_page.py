"""The table of docs/fp8.md, of made-up rows."""

from __future__ import annotations

from bench.measure import fp8
from bench.pages import fp8_page
from weft.ops.scaled_gemm import PROMOTED, WIDE


def row(m: int, **us: float) -> dict:
    return dict(name="a", M=m, N=1000, K=500, us={"bf16: cuBLAS": 1.0} | us)


def test_todays_tiles_count_beside_the_best_library() -> None:
    """Of the lines of one size the newest; a tile that was dropped does not count, however fast."""
    weft_us = {f"row: {fp8.plan_label(plan)}": 10.0 + i for i, plan in enumerate(WIDE)}
    rest = {"row: weft 64x64 w4 s9 x3": 1.0, "row: weft auto": 8.0, "row: torch": 8.0}
    cells = fp8_page.recipe_row(
        "row", [row(10, **weft_us, **rest), row(20, **weft_us, **(rest | {"row: torch": 20.0}))]
    )
    assert cells[:3] == ["by row", "2", "1.26x"] and cells[3] == "0.80x (10 x 1000 x 500)"
    assert cells[4:] == ["1.58x", "1.00x (10 x 1000 x 500)", "1"]
    assert "| by row | 1 | 2.00x |" in fp8_page.gemms([row(10, **weft_us, **rest), everything(20.0)])


def everything(torch: float) -> dict:
    us: dict[str, float] = {}
    for recipe, (_, plans) in fp8_page.RECIPES.items():
        us |= {f"{recipe}: {fp8.plan_label(plans[0])}": 10.0, f"{recipe}: weft auto": 9.0, f"{recipe}: torch": torch}
    return row(10, **us)


def test_rows_of_another_kernel_are_said_to_be() -> None:
    us = {"block: weft 64x128 w4 s4 x2 nested": 20.0, "block: weft auto": 10.0, "block: deep_gemm": 10.0}
    assert fp8_page.recipe_row("block", [row(10, **us)])[:3] == ["by block, an earlier kernel", "1", "0.50x"]
    us |= {f"block: {fp8.plan_label(PROMOTED[0])} columns": 12.5}
    assert fp8_page.recipe_row("block", [row(10, **us)])[:3] == ["by block", "1", "0.80x"]
