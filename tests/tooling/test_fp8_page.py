"""The tables of docs/fp8.md, generated from made-up rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.measure import fp8, fp8_ranks
from bench.pages import fp8_page, tables
from weft.ops.scaled_gemm import PROMOTED, WIDE


def row(m: int, **us: float) -> dict:
    return dict(name="a", M=m, N=1000, K=500, us={"bf16: cuBLAS": 1.0} | us)


def test_todays_tiles_count_beside_the_best_library() -> None:
    """Only the newest line of each size counts; a rejected tile does not count, however fast it is."""
    weft_us = {f"row: {fp8.plan_label(plan)}": 10.0 + i for i, plan in enumerate(WIDE)}
    rest = {"row: weft 64x64 w4 s9 x3": 1.0, "row: weft auto": 8.0, "row: torch": 8.0}
    cells = fp8_page.recipe_row(
        "row", [row(10, **weft_us, **rest), row(20, **weft_us, **(rest | {"row: torch": 20.0}))]
    )
    assert cells[:3] == ["by row", "2", "1.26x"] and cells[3] == "0.80x (10x1000x500)"
    assert cells[4:] == ["1.58x", "1.00x (10x1000x500)", "1"]
    assert "| by row | 1 | 2.00x |" in fp8_page.gemms([row(10, **weft_us, **rest), everything(20.0)])


def everything(torch: float) -> dict:
    us: dict[str, float] = {}
    for recipe, (_, plans) in fp8_page.RECIPES.items():
        us |= {f"{recipe}: {fp8.plan_label(plans[0])}": 10.0, f"{recipe}: weft auto": 9.0, f"{recipe}: torch": torch}
    return row(10, **us)


def test_rows_of_another_kernel_are_marked() -> None:
    us = {"block: weft 64x128 w4 s4 x2 nested": 20.0, "block: weft auto": 10.0, "block: deep_gemm": 10.0}
    assert fp8_page.recipe_row("block", [row(10, **us)])[:3] == ["by block, an earlier kernel", "1", "0.50x"]
    us |= {f"block: {fp8.plan_label(PROMOTED[0])} columns": 12.5}
    assert fp8_page.recipe_row("block", [row(10, **us)])[:3] == ["by block", "1", "0.80x"]


def test_a_recipe_without_rows_is_left_out() -> None:
    us = {"row: torch": 8.0, "row: weft auto": 8.0, f"row: {fp8.plan_label(WIDE[0])}": 10.0}
    assert [line.split(" | ")[0] for line in fp8_page.gemms([row(10, **us)]).splitlines()[4:]] == ["| by row"]


def quantized(m: int, **us: float) -> dict:
    return dict(name="quantizing", M=m, N=1000, K=500, us=us)


def test_the_cost_of_quantizing_is_compared_with_one_and_two_kernels() -> None:
    """Means are geometric. Only the newest line of each size counts, and a recipe that was not measured is omitted."""
    with_row = {
        "silu_mul, row": 12.0,
        "quantize after silu_mul, row": 6.0,
        "norm, row": 9.0,
        "quantize after norm, row": 3.0,
    }
    lines = [
        quantized(10, silu_mul=1.0, norm=1.0),
        quantized(10, silu_mul=10.0, norm=10.0, **with_row),
        quantized(20, **(with_row | {"silu_mul, row": 10.8}), silu_mul=10.0, norm=10.0),
        row(10),
    ]
    text = fp8_page.quantizing(lines)
    assert "means of 2 sizes. `silu_mul`: by row 1.14x and 0.71x; add + norm: by row 0.90x and 0.69x." in text
    assert fp8_page.quantizing([row(10)]) == ""


def over_ranks(m: int, mode: str = "graph", recipe: str = "row", **us: float) -> dict:
    """Return a row with a limit of 6 us, sequential at 10 us and "auto" at 8 us; `us` replaces these times."""
    us = {"sequential": 10.0, "weft auto": 8.0, "bf16 weft auto": 16.0} | {
        k.replace("_", " ", 1): v for k, v in us.items()
    }
    op = "all_gather_matmul"
    return dict(op=op, recipe=recipe, name="a", M=m, N=1000, K=500, mode=mode, us=us, limit_us=6.0)


def test_several_ranks_are_a_row_for_each_op_and_recipe() -> None:
    older, newest = over_ranks(10, torch_symm_mem=1.0), over_ranks(10, torch_symm_mem=12.0)
    lines = [older, newest, over_ranks(20, weft_auto=5.0), over_ranks(10, "eager", torch_symm_mem=99.0)]
    *_, line, _, _ = fp8_page.ranks(lines).splitlines()
    cells = ["all-gather + GEMM", "row", "2", "1.58x", "1.25x (10x1000x500)", "1.50x", "1.50x (10x1000x500)"]
    assert line == f"| {' | '.join([*cells, '88%', '2.53x'])} |"


@pytest.mark.parametrize(
    "graph, eager, titles",
    [
        ({}, {"torch_symm_mem": 9.0}, ["all-gather + GEMM", "all-gather + GEMM, eager"]),
        ({"torch_symm_mem": 9.0}, {"torch_symm_mem": 9.0}, ["all-gather + GEMM"]),
        ({}, {}, ["all-gather + GEMM"]),
        (None, {}, ["all-gather + GEMM, eager"]),
    ],
)
def test_eager_calls_are_shown_where_torch_was_not_captured(
    graph: dict[str, float] | None, eager: dict[str, float], titles: list[str]
) -> None:
    lines = [over_ranks(10, "eager", **eager), *([] if graph is None else [over_ranks(10, **graph)])]
    assert [
        line.split(" | ")[0].removeprefix("| ") for line in fp8_page.ranks(lines).splitlines()[4:] if "|" in line
    ] == titles
    assert "In eager calls, over sequential: by row 1.25x to 1.25x; 0 of 1 are slower." in fp8_page.ranks(lines)


def test_a_size_where_nothing_can_be_saved_has_no_share() -> None:
    """If the limit equals sequential's time, "auto" can save nothing, even if it is fast."""
    row_at_limit = over_ranks(10, sequential=6.0) | {"recipe": "block"}
    assert fp8_page.ranks([row_at_limit]).splitlines()[-1].split(" | ")[-2:] == ["", "2.00x |"]


def test_a_machine_without_a_table_is_not_on_the_page(tmp_path: Path) -> None:
    for machine, lines in {"gpu-x1": [quantized(10, silu_mul=1.0, norm=1.0)], "gpu-x2": [everything(20.0)]}.items():
        (tmp_path / machine).mkdir()
        (tmp_path / machine / "fp8.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tables.page(tmp_path, "fp8.jsonl", fp8_page.gemms).startswith("2 GPUs (gpu-x2), times as fast:")
    assert "gpu-x1" not in tables.page(tmp_path, "fp8.jsonl", fp8_page.gemms)
    assert tables.page(tmp_path, "fp8_ranks.jsonl", fp8_page.ranks) == ""


def test_sizes_over_ranks_are_whole_and_in_the_order_of_importance() -> None:
    """Every recipe of the first number of tokens precedes the second number; sums on all ranks come last. With block
    scaling, K is a multiple of the block size, even on 8 ranks."""
    for world in (2, 4, 8):
        sizes = list(fp8_ranks.sizes(world, ["row", "block", "tensor"], list(fp8_ranks.OPS)))
        assert len(sizes) == len(set(sizes)) == 3 * 3 * 3 * 6
        assert {(s.m, s.op) for s in sizes[:18]} == {(4096, "all_gather_matmul"), (4096, "matmul_reduce_scatter")}
        assert {s.op for s in sizes[108:]} == {"matmul_all_reduce"} and sizes[0].name.startswith("Llama-70B")
        assert all(s.k % 128 == 0 and s.n % 8 == 0 and s.m % (world * 8) == 0 for s in sizes)


@pytest.mark.parametrize(
    "op, recipe, received",
    [
        ("all_gather_matmul", "tensor", 512 * 256 / 2),
        ("all_gather_matmul", "row", 512 * (256 + 4) / 2),
        ("all_gather_matmul", "block", 512 * (256 + 8) / 2),
        ("matmul_reduce_scatter", "row", 512 * 1024 * 2 / 2),
        ("matmul_all_reduce", "block", 512 * 1024 * 2),
    ],
)
def test_a_rank_receives_8_bit_rows_with_scales_or_sums_in_bfloat16(op: str, recipe: str, received: float) -> None:
    assert fp8_ranks.Size(op, recipe, "a", 512, 1024, 256).received(2) == received
