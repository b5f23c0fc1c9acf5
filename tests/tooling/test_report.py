"""The pages of measurements: the rows that count, the methods that a ratio compares, and the README, in which only the
text between the marks changes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.pages import report, signaled_page, tables
from weft.errors import WeftError
from weft.plans import FusedGatherByCopies, Signaled


def row(method: str, us: float, **changes) -> dict:
    base = {
        "op": "all_gather_matmul", "name": "MLP-1", "M": 8192, "N": 2752, "K": 4096, "world": 8, "dtype": "bf16",
        "mode": "graph", "gemm_us": 200.0, "comm_us": 150.0, "limit_us": 210.0, "commit": "a" * 40,
        "date": "2026-12-01T00:00:00",
    }  # fmt: skip
    return base | {"method": method, "us": us} | changes


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "results" / "box").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    return tmp_path


def store(repo: Path, rows: list[dict], op: str = "all_gather_matmul") -> None:
    (repo / "results" / "box" / f"{op}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def write(repo: Path) -> str:
    """Return two texts: the chapters of docs/measurements.md, and the tables of every size."""
    machines = report.load_all(repo / "results")
    pages = [
        page
        for machine, rows in machines.items()
        for page in (report.digest(machine, rows), report.chapter(machine, rows))
    ]
    return "\n".join(pages)


def line_of(page: str, name: str) -> list[str]:
    return [c.strip() for c in next(x for x in page.splitlines() if x.startswith(f"| {name} ")).split("|")[1:-1]]


def test_ratios_are_to_sequential_and_to_the_limit(repo: Path) -> None:
    store(
        repo,
        [
            row("sequential", 420),
            row("auto", 280, plan=FusedGatherByCopies().to_json()),
            row("fused", 281),
            row("torch", 600),
        ],
    )
    page = write(repo)
    assert line_of(page, "MLP-1") == [
        "MLP-1", "8192×2752×4096", "200", "150", "210", "420", "280", "**1.50x**", "75%", "0.70x", "fused",
    ]  # fmt: skip
    assert line_of(page, "all-gather + GEMM")[1:] == [
        "**1.50x**", "–", "0.70x torch", "1.50x (MLP-1, graph)", "2026-12-01 `aaaaaaaa`",
    ]  # fmt: skip


def test_weft_without_something_is_no_peer(repo: Path) -> None:
    """The best method of another library is the peer."""
    ways = [
        row("fused", 290),
        row("equal split", 250),
        row("116 SMs, cuBLAS", 260),
        row("torch two_shot", 300),
        row("torch one_shot", 310),
    ]
    ways += [row("sequential", 420), row("auto", 280)]
    store(repo, [r | {"op": "decoder"} for r in ways], "decoder")
    page = write(repo)
    assert (
        line_of(page, "shape")[-3:] == ["torch one_shot", "torch two_shot", "plan"] and "## decoder, forward, 8" in page
    )
    assert "| 1.40x torch two_shot |" in page


def test_a_geometric_mean_is_over_all_shapes_of_a_size(repo: Path) -> None:
    rows = []
    for i, us in enumerate((100, 200, 400, 100, 200, 400), 1):
        rows += [row("sequential", 400, name=f"MLP-{i}"), row("auto", us, name=f"MLP-{i}")]
    for tokens, us in ((128, 100), (512, 400), (513, 200)):
        rows += [row(method, t, name=f"70B-{tokens}", M=tokens) for method, t in (("sequential", 200), ("auto", us))]
    store(repo, rows)
    page = write(repo)
    assert line_of(page, "all-gather + GEMM")[1] == "**1.81x**"  # 64 ** (1 / 7)
    assert line_of(page, "all-gather + GEMM, ≤512 tokens")[1] == "**1.00x**"
    assert line_of(page, "all-gather + GEMM, ≤512 tokens")[4] == "0.50x (70B-512, graph)"


def test_only_the_newest_run_counts(repo: Path) -> None:
    """Newer rows may precede older rows in the file; rows that only the older run contains are not shown beside the
    newer ones."""
    new = "2026-12-02T00:00:00"
    rows = [row("auto", 100, date=new), row("auto", 300), row("sequential", 300), row("fused", 50)]
    store(repo, [*rows, row("sequential", 200, date=new), row("decomposed", 150, date=new)])
    assert line_of(write(repo), "MLP-1")[5:8] == ["200", "100", "**2.00x**"]


def test_missing_measurements_are_dashes(repo: Path) -> None:
    store(repo, [row("auto", 100), row("sequential", 130, name="70B-512", limit_us=None)])
    page = write(repo)
    assert line_of(page, "MLP-1")[7] == "–"
    assert line_of(page, "70B-512")[6] == "–"


def test_eager_calls_are_beside_the_same_in_a_graph(repo: Path) -> None:
    eager = [row("sequential", 500, mode="eager"), row("auto", 400, mode="eager"), row("torch", 250, mode="eager")]
    graph = [row("sequential", 420), row("auto", 280), row("torch", 600)]
    store(repo, [*eager, *graph, *(r | {"name": "70B-512"} for r in graph)])
    page = write(repo)
    assert line_of(page, "MLP-1")[5:] == [
        "420",
        "280",
        "**1.50x**",
        "75%",
        "0.70x",
        "–",
        "500",
        "400",
        "**1.25x**",
        "2.00x",
    ]
    assert line_of(page, "70B-512")[11:] == ["–"] * 4
    assert line_of(page, "all-gather + GEMM")[1:4] == ["**1.50x**", "**1.25x**", "0.70x torch"]


def test_a_shape_that_ran_in_one_mode_alone_has_a_line(repo: Path) -> None:
    store(repo, [row("sequential", 420), row("auto", 280), row("auto", 100, mode="eager", name="70B-512")])
    page = write(repo)
    assert line_of(page, "70B-512") == ["70B-512", "8192×2752×4096", *["–"] * 9, "100", "–"]


def test_a_decoders_plan_names_its_split_and_norms(repo: Path) -> None:
    plan = {"kind": "woven", "split": 384, "sms": 0, "norm": "decomposed"}
    rows = [row("sequential", 420, op="decoder"), row("auto", 280, op="decoder", plan=json.dumps(plan))]
    store(repo, rows, "decoder")
    assert line_of(write(repo), "MLP-1")[-1] == "woven split 384 norm decomposed"


def test_files_of_other_benchmarks_are_passed_over(repo: Path) -> None:
    """The programs for other tables read these files, whose rows have different fields."""
    store(repo, [row("sequential", 420), row("auto", 280)])
    before = write(repo)
    store(repo, [{"what": "known", "op": "all_gather_matmul", "us": 1}], "host")
    assert write(repo) == before


def test_shapes_are_in_the_order_of_their_numbers(repo: Path) -> None:
    rows = [row("auto", 1, name=n) for n in ("70B-1024", "70B-512", "MLP-2", "MLP-1")]
    assert [c.name for c in report.cases(rows, "all_gather_matmul", 8, "graph")] == [
        "MLP-1", "MLP-2", "70B-512", "70B-1024",
    ]  # fmt: skip


def test_plotting_twice_gives_the_same_bytes(repo: Path) -> None:
    store(repo, [row("sequential", 420), row("auto", 280)])
    machines = report.load_all(repo / "results")
    (path,) = report.plots(machines, repo / "docs/img")
    before = path.read_bytes()
    assert report.plots(machines, repo / "docs/img") == [path] and path.read_bytes() == before
    assert f"](img/{path.name})" in write(repo)


@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ('{"op": "x"}', "lacks name, world"), ("", "no results in")]
)
def test_bad_results_are_named(repo: Path, text: str, says: str) -> None:
    (repo / "results" / "box" / "decoder.jsonl").write_text(text)
    with pytest.raises(WeftError, match=says):
        write(repo)


def test_only_the_text_between_the_marks_is_changed() -> None:
    page, marks = "a\n{}\n{}\n{}\nz", (report.BEGIN, report.END)
    changed = tables.between(page.format(report.BEGIN, "old", report.END), *marks, "new")
    assert changed == page.format(report.BEGIN, "new", report.END)
    with pytest.raises(WeftError, match="must hold"):
        tables.between("mine", *marks, "new")


def signaled_rows(op: str, times: dict[str, float], **changes) -> list[dict]:
    """Return rows of 4 x 128 tiles on 128 programs: four waves, in groups of one wave by default."""
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
    """The bound is 100 + 80 / 4 = 120 us: the time of the GEMM, then the transfer of the last of four groups."""
    name, copies = "default, 4 CTAs", "copies, 4 SMs"
    rows = signaled_rows("matmul_all_to_all", {"sequential": 300, name: 150, f"{name}, tiles": 1, copies: 125})
    rows += signaled_rows("matmul_all_to_all", {"sequential": 300, name: 400, copies: 400}, K=2048)
    page = signaled_page.ops({"a machine": rows}, 132)
    assert line_of(page, "4096×4096×1024")[1:] == ["300", "**2.00x**", "80%", "**2.40x**", "96%"]
    assert line_of(page, "4096×4096×2048")[1:] == ["300", "0.75x", "30%", "0.75x", "30%"]
    assert line_of(page, "mean")[1:] == ["", "**1.22x**", "55%", "**1.34x**", "63%"]
    goal = [line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| GEMM + all-to-all | 4 | NCCL")]
    assert goal == [["4", "NCCL", "55%", "30%", "80%", "55%", "missed", "1.22x", "2.00x", "1/2 |"]]


def test_the_signaled_page_reads_a_shape_only_from_its_last_run() -> None:
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


def test_an_earlier_version_has_no_chapter_and_no_plots(repo: Path) -> None:
    store(repo, [row(method, us, date="2026-11-20T00:00:00") for method, us in (("sequential", 420), ("auto", 280))])
    machines = report.load_all(repo / "results")
    assert [*machines] == ["box"] and not report.new(machines) and not report.plots(machines, repo / "docs/img")


def test_a_benchmark_ends_in_a_table_and_plots(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "bench/results/nvidia-h200-x2/matmul_reduce_scatter.jsonl"
    (tmp_path / stored.name).write_text(stored.read_text())
    table, plots = report.ending(tmp_path)
    names = list(table.columns[1].cells)
    assert "MLP-1" in names and len(names) == table.row_count > 10
    assert all(cell.endswith("x") and float(cell[:-1]) > 0 for cell in table.columns[5].cells)
    assert [path.parent for path in plots] == [tmp_path] and all(path.stat().st_size > 1000 for path in plots)
