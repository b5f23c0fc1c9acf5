"""The benchmark report: which rows count, what a ratio is of, and that the README is changed between its marks only."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.plans import Signaled

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import report  # noqa: E402
import signaled_page  # noqa: E402


def row(method: str, us: float, **changes) -> dict:
    base = {
        "op": "all_gather_matmul", "name": "MLP-1", "M": 8192, "N": 2752, "K": 4096, "world": 8, "dtype": "bf16",
        "mode": "graph", "gemm_us": 200.0, "comm_us": 150.0, "limit_us": 210.0, "commit": "a" * 40,
        "date": "2026-01-01T00:00:00",
    }  # fmt: skip
    return base | {"method": method, "us": us} | changes


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "results" / "box").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


def store(repo: Path, rows: list[dict], op: str = "all_gather_matmul") -> None:
    (repo / "results" / "box" / f"{op}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def write(repo: Path) -> tuple[str, str]:
    report.write(repo / "results", repo / "docs", repo / "README.md")
    return (repo / "docs" / "benchmarks.md").read_text(), (repo / "README.md").read_text()


def line_of(page: str, name: str) -> list[str]:
    return [c.strip() for c in next(x for x in page.splitlines() if x.startswith(f"| {name} ")).split("|")[1:-1]]


def test_ratios_are_to_sequential_and_to_the_limit(repo: Path) -> None:
    store(
        repo, [row("sequential", 420), row("auto", 280, plan="fused(rows=128)"), row("fused", 281), row("torch", 600)]
    )
    page, readme = write(repo)
    assert line_of(page, "MLP-1") == [
        "MLP-1", "8192 x 2752 x 4096", "200", "150", "210", "420", "280", "**1.50x**", "75%", "fused 281",
        "600 (0.70x)", "fused(rows=128)",
    ]  # fmt: skip
    assert "**1.50x** | 0.70x (torch) | 75% | 1.50x (MLP-1) |" in readme
    assert readme.startswith("before\n") and readme.endswith("after\n") and "old" not in readme


def test_weft_without_something_is_no_peer(repo: Path) -> None:
    """The best of weft's own ways is named, the best of other libraries' is the peer."""
    ways = [
        row("fused", 290),
        row("equal split", 250),
        row("116 SMs, cuBLAS", 260),
        row("torch two_shot", 300),
        row("torch one_shot", 310),
    ]
    ways += [row("sequential", 420), row("auto", 280)]
    store(repo, [r | {"op": "decoder"} for r in ways], "decoder")
    page, readme = write(repo)
    assert "equal split 250" in line_of(page, "MLP-1") and "### decoder, forward (`decoder`)" in page
    assert "| 1.40x (torch two_shot) |" in readme


def test_geometric_mean_is_over_the_mlp_shapes_only(repo: Path) -> None:
    rows = []
    for i, us in enumerate((100, 200, 400, 100, 200, 400), 1):
        rows += [row("sequential", 400, name=f"MLP-{i}"), row("auto", us, name=f"MLP-{i}")]
    rows += [row("sequential", 99, name="70B-128"), row("auto", 100, name="70B-128")]
    store(repo, rows)
    page, readme = write(repo)
    assert line_of(page, "geometric mean")[7] == "**2.00x**"
    assert "MLP-1 to MLP-6 | **2.00x**" in readme and "0.99x (70B-128)" in readme


def test_the_newest_run_counts_alone(repo: Path) -> None:
    """Its rows may stand before the older ones; what only the older run had is not beside them."""
    new = "2026-02-01T00:00:00"
    rows = [row("auto", 100, date=new), row("auto", 300), row("sequential", 300), row("fused", 50)]
    store(repo, [*rows, row("sequential", 200, date=new), row("decomposed", 150, date=new)])
    assert line_of(write(repo)[0], "MLP-1")[5:8] == ["200", "100", "**2.00x**"]
    assert line_of(write(repo)[0], "MLP-1")[9] == "decomposed 150"


def test_what_was_not_measured_is_a_dash(repo: Path) -> None:
    store(repo, [row("auto", 100), row("sequential", 130, mode="eager", name="70B-512", limit_us=None)])
    page, _ = write(repo)
    assert line_of(page, "MLP-1")[7] == "**–**"
    assert line_of(page, "70B-512")[6] == "–"


def test_shapes_are_in_the_order_of_their_numbers(repo: Path) -> None:
    rows = [row("auto", 1, name=n) for n in ("70B-1024", "70B-512", "MLP-2", "MLP-1")]
    assert [c.name for c in report.cases(rows, "all_gather_matmul", 8, "graph")] == [
        "MLP-1", "MLP-2", "70B-512", "70B-1024",
    ]  # fmt: skip


def test_writing_twice_changes_nothing(repo: Path) -> None:
    store(repo, [row("sequential", 420), row("auto", 280)])
    write(repo)
    files = [p for p in repo.rglob("*") if p.is_file()]
    before = {p: p.read_bytes() for p in files}
    write(repo)
    assert {p: p.read_bytes() for p in repo.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ('{"op": "x"}', "lacks name, world"), ("", "no results in")]
)
def test_bad_results_are_named(repo: Path, text: str, says: str) -> None:
    (repo / "results" / "box" / "x.jsonl").write_text(text)
    with pytest.raises(WeftError, match=says):
        write(repo)


def test_a_readme_without_marks_is_not_touched(repo: Path) -> None:
    store(repo, [row("auto", 1)])
    (repo / "README.md").write_text("mine")
    with pytest.raises(WeftError, match="must hold"):
        write(repo)
    assert (repo / "README.md").read_text() == "mine"


def signaled_rows(op: str, times: dict[str, float], **changes) -> list[dict]:
    """4 x 128 tiles on 128 programs: four waves, in groups of one wave by default."""
    plan = {
        m: None if m == "sequential" else json.loads(Signaled(ctas=4, copies=m.startswith("copies")).to_json())
        for m in times
    }
    base = {
        "part": "ops", "op": op, "M": 4096, "N": 4096, "K": 1024, "mode": "graph", "gemm_us": 100.0, "comm_us": 80.0,
        "world": 4, "gpu": "box", "commit": "a" * 40, "date": "2026-01-01T00:00:00", "run": "1",
    }  # fmt: skip
    return [base | {"method": m, "us": us, "plan": plan[m]} | changes for m, us in times.items()]


def test_the_signaled_page_counts_wins_and_fractions_of_the_bound() -> None:
    """The bound is 100 + 80 / 4 = 120 us: the GEMM, then the transfer of the last of four groups."""
    name, copies = "default, 4 CTAs", "copies, 4 SMs"
    rows = signaled_rows("matmul_all_to_all", {"sequential": 300, name: 150, f"{name}, tiles": 1, copies: 125})
    rows += signaled_rows("matmul_all_to_all", {"sequential": 300, name: 400, copies: 400}, K=2048)
    page = signaled_page.page({"a machine": rows}, 132)
    nccl = ["150", "**2.00x**", f"{name} (4)", "80%", "80%"]
    assert line_of(page, "4096 x 4096 x 1024")[4:] == [*nccl, "125", "**2.40x**", "4 SMs (4)", "96%", "96%"]
    assert line_of(page, "4096 x 4096 x 2048")[4:9] == ["400", "0.75x", f"{name} (4)", "30%", "30%"]
    assert line_of(page, "mean")[4:9] == ["", "**1.22x**", "", "55%", "55%"]
    assert "With NCCL none wins on 1 of 2 shapes: 4096 x 4096 x 2048." in page
    goal = [line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| GEMM + all-to-all | ")]
    assert ["NCCL", "55%", "30%", "80%", "missed", "1.22x", "2.00x |"] in goal


def test_the_signaled_page_takes_a_shape_from_its_last_run_alone() -> None:
    rows = signaled_rows("matmul_all_to_all", {"sequential": 300, "default, 4 CTAs": 150, "halves": 1})
    rows += signaled_rows("matmul_all_to_all", {"sequential": 300, "default, 4 CTAs": 200}, run="2")
    assert {m: r["us"] for m, r in signaled_page.cases(rows, "ops", "matmul_all_to_all")[4096, 4096, 1024].items()} == {
        "sequential": 300, "default, 4 CTAs": 200,
    }  # fmt: skip


def test_a_signaled_bound_is_the_longer_way() -> None:
    assert signaled_page.bound(100, 80, (0, 1, 2, 3, 4)) == 120
    assert signaled_page.bound(80, 100, (0, 1, 2, 3, 4)) == 120
    assert signaled_page.bound(100, 80, (0, 4)) == 180
    assert signaled_page.bound(100, 80, (0, 1, 2, 3, 4), own_last=True) == 105
    assert signaled_page.bound(100, 50, (0, 1, 2, 3, 4), own_last=True) == 100
