"""Each generated page equals the output of its program, and every stored result is used."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import weft
from bench.common import stored as calls_of
from bench.pages import hardware_page, layer_picture, pages, report, table, ways
from bench.pages.vllm_page import with_second_stock
from weft.planner.table import DECODER, KEY, stored

ROOT = Path(__file__).parents[2]


DOCS = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS, IN_TABLES, OF_MEASUREMENTS = 27_000, 7_300, 1_500
SLOW = ("docs/planner.md", "bench/results/predictions.md")  # these predict thousands of calls


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.gate if n in SLOW else ()) for n in pages.PAGES])
def test_a_page_equals_the_output_of_its_program(name: str) -> None:
    assert (ROOT / name).read_text() == pages.PAGES[name](), f"{name} is out of date: run make pages"


def test_the_shipped_table_equals_the_output_of_its_program() -> None:
    text, _ = table.table_of("nvidia-h200")
    assert text == (table.TABLES / "nvidia-h200.json").read_text(), "run python -m bench.pages.table nvidia-h200"


def test_the_table_has_no_eager_rows_of_calls_that_wait_for_the_host() -> None:
    us = {tuple(r[name] for name in KEY): r["us"] for r in stored("nvidia-h200") if r["op"] != DECODER}
    eager = {key: t for key, t in us.items() if key[-1] == "eager"}
    assert len(eager) > 90 and all(t < 1.2 * us[*key[:-1], "graph"] for key, t in eager.items())


def test_a_table_is_made_beside_rows_of_other_benchmarks() -> None:
    """The same folder contains rows without an op, such as those of batch-invariant layers."""
    rows = json.loads(table.table_of("nvidia-h100")[0])
    assert rows and all(row["confirmed"] for row in rows)


def test_the_benchmark_confirms_an_equal_plan_whose_text_differs(tmp_path: Path, monkeypatch) -> None:
    """The tuning run stored a field that the plan no longer has."""
    plan = {"kind": "fused", "class": "FusedReduceScatter"}
    fixed = dict(op="matmul_reduce_scatter", name="MLP-1", world=4, M=8192, N=4096, K=2752, mode="graph")
    times = {json.dumps(plan | {"batch": 1}): 100.0, table.SEQUENTIAL: 200.0}
    calls = [dict(fixed, method="sequential", us=150.0, plan=None)]
    calls += [dict(fixed, method="auto", us=100.0, plan=json.dumps(plan))]
    (tmp_path / "bench/results/a-x4/tuning").mkdir(parents=True)
    (tmp_path / "bench/results/a-x4/tuning/x4-1.jsonl").write_text(json.dumps(dict(fixed, times=times)) + "\n")
    (tmp_path / "bench/results/a-x4/matmul_reduce_scatter.jsonl").write_text("\n".join(map(json.dumps, calls)))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (row,) = json.loads(table.table_of("a")[0])
    assert row["confirmed"] and row["speedup"] == 1.5


def test_calls_of_different_runs_of_the_benchmark_are_separate(tmp_path: Path) -> None:
    """Only calls of one run were interleaved."""
    row = dict(
        op="matmul_all_reduce", method="sequential", world=4, M=8, N=8, K=8, mode="graph", plan=None, gemm_us=1.0
    )
    (tmp_path / "a-x4").mkdir()
    lines = [
        json.dumps(dict(row, comm_us=1.0, us=us, date=date)) for us, date in ((3.0, "2026-01-01"), (4.0, "2026-01-02"))
    ]
    (tmp_path / "a-x4/matmul_all_reduce.jsonl").write_text("\n".join(lines))
    assert {r.run: r.call.us for r in calls_of.rows("a-x4", tmp_path)} == {
        "benchmark 2026-01-01": 3.0,
        "benchmark 2026-01-02": 4.0,
    }


def test_the_page_counts_many_failed_checks_of_one_kind() -> None:
    assert hardware_page.listed(["b", "a 1", "c 1", "a 2", "a 3", "c 2", "a 4"]) == "4 of *a ..*, *b*, *c 1*, *c 2*"


def test_the_docs_are_short_enough() -> None:
    words = {page.name: words_of(page.read_text()) for page in DOCS}
    assert sum(words.values()) <= MOST_WORDS and words["measurements.md"] <= OF_MEASUREMENTS, words
    cells = {page.name: words_of("\n".join(re.findall(r"^\|.*$", page.read_text(), re.M))) for page in DOCS}
    assert sum(cells.values()) <= IN_TABLES, cells


def words_of(text: str) -> int:
    """Return the number of words on a page. Figures in tables count, but tables' rules and HTML comments do not."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text, flags=re.S)))


def test_every_picture_is_shown_and_every_one_shown_is_there() -> None:
    shown = {Path(name).name for page in [ROOT / "README.md", *DOCS] for name in re.findall(r"\]\(([^)]*img/[^)]+)\)", page.read_text())}  # fmt: skip
    assert shown == {path.name for path in (ROOT / "docs/img").iterdir()}


def test_the_readmes_picture_is_of_stored_rows(tmp_path: Path) -> None:
    """In the picture, the time outside GEMMs and hidden collectives is positive but small."""
    t = layer_picture.times(report.load(ROOT / "bench/results" / layer_picture.MACHINE))
    assert t.weft < t.sequential and max(t.gather, t.scatter) < t.gate_up
    assert all(0 < t.rest(whole) < 0.15 * whole for whole in (t.sequential, t.weft))
    (path,) = layer_picture.plots(ROOT / "bench/results", tmp_path)
    assert path.read_bytes() == (ROOT / "docs/img" / path.name).read_bytes(), "make pages"
    text = path.read_text()
    assert f"{t.weft:.0f} us" in text and f"{t.sequential / t.weft:.2f}x" in text
    assert f"Mean of all sizes: {mean_of('parallel_mlp', MACHINES[-1])}" in text


OPS = {  # titles of the lines for many tokens and for up to 512, and the files of their rows
    "all-gather + GEMM": "all_gather_matmul",
    "GEMM + reduce-scatter": "matmul_reduce_scatter",
    "GEMM + all-reduce": "matmul_all_reduce",
    "all-reduce + residual + norm": "all_reduce_rms_norm",
    "whole MLP, forward": "parallel_mlp",
}
LAYERS: dict[str, tuple[str, str, str, Callable[[dict], bool]]] = {  # file, baseline, method, and a filter of rows
    "decoder, forward: prefill": ("decoder", "sequential", "auto", lambda r: "-prefill-" in r["name"]),
    "decoder, forward: decode": ("decoder", "sequential", "auto", lambda r: "-decode-" in r["name"]),
    "all-gather + GEMM, with quack": ("quack/all_gather_matmul", "sequential", "auto", lambda r: True),
    "experts over the ranks, forward": ("moe", "library", "auto", lambda r: r["zipf"] == 0),
    "attention over all ranks' keys": ("attention", "nccl+cudnn", "weft", lambda r: r["op"] == "gathered_attention"),
    "Llama-70B": ("hf", "transformers", "weft", lambda r: "us" in r),
    "Qwen3-30B": ("hf_moe", "transformers", "weft", lambda r: "Qwen3-30B" in r["name"]),
}
DATED = {title for title in LAYERS if title.startswith("decoder")} | set(OPS)  # only the last run of a size counts
MACHINES = ("nvidia-h200-x2", "nvidia-h200-x4")  # the README's columns


def stored_rows(machine: str, file: str) -> list[dict]:
    path = ROOT / "bench/results" / machine / f"{file}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def source_of(title: str) -> tuple[str, str, str, Callable[[dict], bool]]:
    """Return the file, the baseline, the method and the filter of a line's rows."""
    op = title.partition(", ≤512 tokens")[0]
    return LAYERS.get(title) or (OPS[op], "sequential", "auto", lambda r: (r["M"] <= 512) == ("≤" in title))


def ratios_of(machine: str, title: str, mode: str, library: str = "") -> dict[str, float]:
    """Return the speedup of weft, or of the library, over the baseline for each size. The test computes the speedup
    from the stored rows with separate code."""
    op = title.partition(", ≤512 tokens")[0]
    file, base, method, counts = source_of(title)
    every = [r for r in stored_rows(machine, file) if counts(r)]
    ratios = {}
    for name in {r["name"] for r in every}:
        run = [r for r in every if r["name"] == name and r.get("mode", "graph") == mode]
        last = max((r["date"] for r in run), default="") if op in DATED else None
        us = {r["method"]: r["us"] for r in run if last is None or r["date"] == last}
        if base in us and method in us:
            eager = [r["us"] for r in every if (r["name"], r["method"], r.get("mode")) == (name, base, "eager")]
            base_us = min(us[base], eager[-1]) if op not in DATED and mode == "graph" and eager else us[base]
            of_library = [t for m, t in us.items() if m.startswith(library) and "backward" not in m]
            if of_library:
                ratios[name] = base_us / (min(of_library) if library else us[method])
    return ratios


def mean_of(file: str, machine: str) -> str:
    """Return the geometric mean, over all sizes, of an op's speedups in CUDA graphs."""
    (title,) = (title for title, name in OPS.items() if name == file)
    ratios = [r for size in ("", ", ≤512 tokens") for r in ratios_of(machine, title + size, "graph").values()]
    return f"{statistics.geometric_mean(ratios):.2f}x"


def lines_of_the_readme(heading: str) -> list[list[str]]:
    part = (ROOT / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", part, re.M)[2:]]


def test_the_readmes_means_are_those_of_the_stored_rows() -> None:
    """The README states weft's mean, the best other library's mean, and the lowest ratio over all sizes and both
    modes."""
    table = lines_of_the_readme("How fast it is")
    assert len(table) == len(LAYERS) - 2 + 2 * len(OPS)  # Transformers' lines are in the other table
    for name, *cells, lowest in table:
        title = name.partition(" (over ")[0]
        for machine, mean, best in zip(MACHINES, cells[::2], cells[1::2], strict=True):
            ratios = ratios_of(machine, title, "graph").values()
            assert mean == (f"**{statistics.geometric_mean(ratios):.2f}x**" if ratios else "–"), title
            by_library = {library: ratios_of(machine, title, "graph", library) for library in ("torch", "quack")}
            means = [(statistics.geometric_mean(r.values()), library) for library, r in by_library.items() if r]
            assert best == ("{:.2f}x {}".format(*max(means)) if means else "–"), title
        machines = (*MACHINES, "nvidia-h100-x4")
        every = [r for m in machines for mode in ("graph", "eager") for r in ratios_of(m, title, mode).values()]
        assert lowest == f"{min(every):.2f}x", title


def test_the_readmes_doors_have_the_gains_of_the_stored_rows() -> None:
    vllm, transformers, mlp, *rest = (cells[2:] for cells in lines_of_the_readme("Use"))
    assert mlp == [f"**{mean_of('parallel_mlp', machine)}**" for machine in MACHINES]
    for machine, cell in zip(MACHINES, transformers, strict=True):
        for model, mean in re.findall(r"(\S+) \*\*(\S+)x\*\*", cell):
            assert mean == f"{statistics.geometric_mean(ratios_of(machine, model, 'graph').values()):.2f}"
    for machine, cell in zip(("nvidia-h100-x2", "nvidia-h100-x4"), vllm, strict=True):
        rows = with_second_stock(stored_rows(machine, "vllm_serving"))
        ratios = {(r["model"], r["mix"]): r["ratio"] for r in rows}
        (model,) = {model for model, _ in ratios}
        assert cell == f"{model} **{min(ratios.values()):.2f}x to {max(ratios.values()):.2f}x**"
    assert rest == [["–", "–"]] * 2  # no gain was measured for the user's kernels and `weft check`


def test_each_mean_names_the_commits_of_its_rows() -> None:
    """Each mean names the commits and dates of its own rows; a mean without a source has that of the line above."""
    chapters = re.split(r"^## (nvidia-\S+)$", (ROOT / "docs/measurements.md").read_text(), flags=re.M)[1:]
    for machine, chapter in zip(chapters[::2], chapters[1::2], strict=True):
        lines = re.findall(r"^\| (.*?) \| .*\*\*.* \| (.*) \|$", chapter.partition("\n## ")[0], re.M)
        assert lines and lines[0][1], machine
        folder = ROOT / "bench/results" / machine
        paths = [*folder.glob("*.jsonl"), *folder.glob("quack/*.jsonl")]
        every = [r for path in paths for r in stored_rows(machine, str(path.relative_to(folder).with_suffix("")))]
        source = ""
        for title, named in lines:
            source, rows = named or source, every
            if title in LAYERS or title.partition(", ≤")[0] in OPS:
                file, _, _, counts = source_of(title)
                rows = [r for r in stored_rows(machine, file) if counts(r)]
            assert (hashes := set(re.findall(r"`([0-9a-f]{8})`", source))), title
            assert hashes <= {r.get("commit", "")[: report.HASH] for r in rows}, title
            assert set(re.findall(r"\d{4}-\d\d-\d\d", source)) <= {r.get("date", "")[:10] for r in rows}, title


def test_the_readmes_other_figures_are_those_of_the_stored_rows() -> None:
    """The README's other figures are the times of experts on one GPU compared with vLLM's and quack's, the gain for a
    prompt, in total and from overlap, and vLLM's lowest repeat."""
    text = (ROOT / "README.md").read_text()
    one = {(r["name"], r["method"]): r["us"] for r in stored_rows("nvidia-h100-x1", "moe_one_gpu") if r["zipf"] == 0}
    names = {name for name, method in one if method == "weft"}
    over = [min(one[name, library] for library in ("vllm", "quack")) / one[name, "weft"] for name in names]
    assert f"**{min(over):.2f}x to {max(over):.2f}x**" in text
    us = {(r["mode"], r["method"]): r["us"] for r in stored_rows(MACHINES[-1], "hf") if r["name"] == "70B-prefill-8192"}
    plain, woven = (min(t for (_, m), t in us.items() if (m == "transformers") == which) for which in (True, False))
    overlap = ratios_of(MACHINES[-1], "decoder, forward: prefill", "graph")["70B-prefill-8192"]
    assert f"**{plain / woven:.2f}x** at 8,192 tokens on 4 GPUs, **{overlap:.2f}x** is overlap" in text
    machines = ("nvidia-h100-x2", "nvidia-h100-x4")
    served = [r for m in machines for r in with_second_stock(stored_rows(m, "vllm_serving"))]
    lowest, null = (min(r[field][0] for r in served) for field in ("ratio_range", "null_range"))
    mixes = {(r["model"], r["mix"]): r for r in served}.values()
    noise = [max(r["null_range"][1], 1 / r["null_range"][0]) for r in mixes]
    within = sum(1 / n <= r["ratio"] <= n for r, n in zip(mixes, noise, strict=True))
    assert f"lowest repeat {lowest:.2f}x (stock's own {null:.2f}x), {within} of {len(mixes)} within noise" in text


def test_the_ranges_on_two_gpus_are_those_that_an_engine_stored() -> None:
    """docs/vllm.md states the sizes that the twin serves, and the speed of whole layers in two parts."""
    text = " ".join((ROOT / "docs/vllm.md").read_text().split())
    ranges = json.loads((ROOT / "bench/results/nvidia-h100-x2/vllm_ranges.json").read_text())["ranges"]
    ((low, high),) = [(low, high) for low, high, form, *_ in ranges if form is None and high <= 512]
    (prefill,) = [low for low, _, form, *_ in ranges if form is not None and low > 512]
    assert f"decodes of up to 512 tokens, except {low} to {high}, and prefills of {prefill:,} tokens and more" in text
    tokens, us = ranges[-1][3][0]
    woven = us["vLLM"] / min(time for way, time in us.items() if way.startswith("WovenLayers"))
    assert f"({woven:.2f}x at {tokens:,} tokens of Llama-8B)" in text


def test_the_ranges_and_times_of_comparisons_are_those_of_the_stored_reports() -> None:
    text = " ".join((ROOT / "docs/vllm.md").read_text().split())
    reports = {gpus: (ROOT / f"bench/results/nvidia-h200-x{gpus}/vllm_ranges.log").read_text() for gpus in (2, 4)}
    newest = reports[2].split("The report of")[1]
    lines = re.findall(r"^  (\d+) to (\d+) tokens: (\w+)", newest, re.M)
    starts, end = list[int](), 0  # of the parts that the twin serves without a gap
    for low, high in [(int(low), int(high)) for low, high, way in lines if way != "vLLM"]:
        starts += [low] if low != end + 1 else []
        end = high
    assert "Llama-70B" in newest and end == 8192 and "\n  513 to 768 tokens: vLLM" in newest and 161 in starts
    assert f"Llama-70B's passes of 161 to 512 and from {starts[-1]:,} tokens on" in text
    costs = re.findall(r"compared in (\d+) s, of which timed passes took (\d+) s", "".join(reports.values()))
    whole, timed = (sorted(map(int, seconds)) for seconds in zip(*costs, strict=True))
    assert f"took {whole[0]} to {whole[-1]} s, timed passes {timed[0]} to {timed[-1]} s" in text


def test_what_the_twin_serves_on_four_gpus_is_what_the_stored_reports_say() -> None:
    text = " ".join((ROOT / "docs/vllm.md").read_text().split())
    whole_log = (ROOT / "bench/results/nvidia-h200-x4/vllm_ranges.log").read_text()
    parts = whole_log.split("The report of")[1:]
    reports = {" ".join(re.search(r"0, ([\w.-]+) with (\d+)", part).groups()): part for part in parts}  # type: ignore[union-attr]
    unserved: dict[str, list[tuple[int, int]]] = {name: [] for name in reports}
    gains: dict[int, list[float]] = {512: [], 2048: [], 8192: []}  # by the largest number of tokens
    for name, lines in reports.items():
        assert "since the start: 0 compiles, 0 trials, 0 decisions, 0 uploads, 0 preparations, 0 allocations" in lines
        for low, high, way, times in re.findall(r"^  (\d+) to (\d+) tokens: (vLLM|\w+\(.*?\)) \((.*)", lines, re.M):
            if way == "vLLM":
                unserved[name].append((int(low), int(high)))
            size = next(most for most in gains if int(high) <= most)
            gains[size] += map(float, re.findall(rf"([\d.]+)x by {re.escape(way)}", times))
    smallest = [(1, 1), (2, 2)]
    deep = unserved.pop("Llama-70B 80")
    assert unserved == {"Llama-70B 16": smallest, "Qwen3-30B-A3B 16": [], "Llama-8B 16": []} and deep[:2] == smallest
    assert "served all passes of Qwen3-30B and Llama-8B, and of Llama-70B from 3 tokens on" in text
    assert ["with 80 layers except {:,} to {:,}".format(*span) in text for span in deep[2:]] == [True]
    captured, middle, prefills = ((min(of_size), max(of_size)) for of_size in gains.values())
    assert f"up to 512 tokens {captured[0]:.2f}x to {captured[1]:.2f}x as fast, up to 2,048" in text
    assert f"{middle[0]:.1f}x to {middle[1]:.1f}x, above {prefills[0]:.2f}x to {prefills[1]:.1f}x" in text
    chat = [r for gpus in (2, 4) for r in stored_rows(f"nvidia-h200-x{gpus}", "vllm_serving") if r["mix"] == "chat"]
    assert f'("chat": {min(r["ratio_range"][0] for r in chat):.2f}x)' in text


def test_gains_under_lasting_load_are_those_of_the_stored_rows() -> None:
    text = " ".join((ROOT / "bench/results/vllm.md").read_text().split())
    us: dict[tuple[str, int], list[float]] = {}
    for r in stored_rows("nvidia-h100-x4", "sustained"):
        for calls, time in zip(r["calls"], r["us"], strict=True):
            us.setdefault((r["method"], calls), []).append(time)
    late, early = (
        sorted(a / b for a, b in zip(us["library", n], us["sequence_parallel", n], strict=True)) for n in (80, 4)
    )
    assert f"gain {late[-1]:.2f}x after 80 calls, {early[0]:.2f}x to {early[-1]:.2f}x after 4" in text
    assert {f"{gain:.2f}" for gain in late} == {f"{late[-1]:.2f}"}


def test_the_figures_of_traced_steps_are_those_of_the_stored_rows() -> None:
    """What vLLM's page says of layers, of steps and of the time between tokens."""
    text = " ".join((ROOT / "bench/results/vllm.md").read_text().split())
    rows = {(r["tokens"], r["method"]): r["means"]["layer"] for r in stored_rows("nvidia-h200-x4", "vllm_timeline")}
    (stock, weft), (shorter, sharded) = (tuple(rows[tokens, m] for m in ("stock", "weft")) for tokens in (8192, 4096))
    hidden, others, longer = (stock[k] - weft[k] for k in ("communication_us", "other_us", "compute_us"))
    assert f"hides {hidden:,.0f} of {stock['communication_us']:,.0f} us of communication and {others:.0f} us of" in text
    assert f"GEMMs and attention take {-longer:.0f} us longer" in text
    share = 1 - sharded["communication_us"] / shorter["communication_us"]
    assert f"hides {share:.0%} of the communication" in text
    assert f"take {sharded['compute_us'] / shorter['compute_us'] - 1:.0%} longer" in text
    steps = {(r["tokens"], r["method"]): r["by_step"] for r in stored_rows("nvidia-h200-x4", "vllm_timeline")}
    engines = ("stock", "weft", "stock again")
    (weft_first, weft_later), (again_first, again_later) = (
        (compute[0], statistics.mean(compute[1:])) for compute in (steps[8192, m]["compute_us"] for m in engines[1:])
    )
    assert (
        f"took {weft_first:,.0f} us a layer, as long as stock's in later steps, and {weft_later:,.0f} us later" in text
    )
    slower = weft_later / weft_first - 1, again_later / again_first - 1
    assert f"(+{slower[0]:.0%}; stock again {again_first:,.0f} and {again_later:,.0f} us, +{slower[1]:.0%})" in text
    idle_gpu, *later = steps[8192, "weft"]["first_gemm_us"]
    assert f"took {idle_gpu:.0f} us in the first step, and {statistics.median(later):.0f} us later" in text
    waits = (statistics.median(steps[64, m]["first_sum_us"][1:]) for m in engines)
    assert "takes {:.0f}, {:.0f} and {:.0f} us in the median".format(*waits) in text
    before, after = ([steps[24, m]["layer_us"][i] for m in engines] for i in (0, -1))
    assert "takes {:.0f}, {:.0f} and {:.0f} us (stock, weft".format(*before) in text
    assert "later {:.0f}, {:.0f} and {:.0f} us".format(*after) in text
    rows_of_mixes = [r for r in stored_rows("nvidia-h200-x4", "vllm_serving") if r["model"] == "Llama-70B"]
    served = {(r["mix"], r["method"]): r["latency"] for r in rows_of_mixes}
    papers, decode = (
        [
            served[mix, "weft"]["weft"]["between_tokens_ms"][0],
            served[mix, "weft"]["stock"]["between_tokens_ms"][0],
            served[mix, "stock again"]["stock again"]["between_tokens_ms"][0],
        ]
        for mix in ("papers", "decode")
    )
    assert "take {:.2f} ms (stock {:.2f}, stock again {:.2f})".format(*papers) in text
    assert 'those of "decode" take {:.2f} ({:.2f}, {:.2f})'.format(*decode) in text
    stock_ms, weft_ms = (served["papers", "weft"][m]["first_token_ms"][0] for m in ("stock", "weft"))
    slower_decode = papers[0] / papers[1] - 1
    assert f"First tokens come {stock_ms / weft_ms:.2f}x as fast, decodes are {slower_decode:.0%} slower" in text


def test_errors_against_float32_are_those_of_the_stored_rows() -> None:
    """The speedups are those of Transformers' models, woven and unwoven."""
    errors: dict[str, dict[str, float]] = {}
    for r in stored_rows("nvidia-h100-x2", "hf_errors"):
        errors.setdefault(r["method"], {})[r["name"]] = r["error"]
    text = " ".join((ROOT / "docs/transformers.md").read_text().split())
    spans = (f"{min(e.values()):.3f} to {max(e.values()):.3f}" for e in (errors["weft"], errors["transformers"]))
    assert "logits were off by {} and the model's own by {}, weft's by less at all four sizes".format(*spans) in text
    assert len(errors["weft"]) == 4 and all(e < errors["transformers"][name] for name, e in errors["weft"].items())
    assert all(e <= errors["weft"][name] for name, e in errors["woven"].items())


def test_means_beside_other_kernels_are_those_of_the_stored_rows() -> None:
    """The means are for experts on one GPU by number of tokens, FlashMoE's single launch, and quack's GEMM."""
    moe, papers, guide = ((ROOT / f"docs/{name}.md").read_text() for name in ("moe", "papers", "guide"))
    for machine in ("nvidia-h100-x1", "nvidia-h200-x1"):
        rows = [r for r in stored_rows(machine, "moe_one_gpu") if r["zipf"] == 0]
        one = {(r["M"], r["name"], r["method"]): r["us"] for r in rows}
        for tokens in {m for m, _, _ in one}:
            weft_us = {name: us for (m, name, method), us in one.items() if (m, method) == (tokens, "weft")}
            over = [one[tokens, name, "vllm"] / us for name, us in weft_us.items()]
            assert f"| {tokens:,} | **{statistics.geometric_mean(over):.2f}x** |" in moe
    us = {(r["name"], r["method"]): r["us"] for r in stored_rows("nvidia-h200-x2", "moe") if r["zipf"] == 0}
    names = [name for name, method in us if method == "library, beside one launch"]
    fused = {
        name: min(t for (n, method), t in us.items() if n == name and method.startswith("weft fused")) for name in names
    }
    for base in ("library, beside one launch", "weft dispatched"):
        mean = statistics.geometric_mean(us[name, base] / fused[name] for name in names)
        assert f" {mean:.2f}x" in papers[papers.index("plan `fused` over NCCL") :]
    rows = [
        json.loads(line)["us"]
        for line in (ROOT / "bench/results/nvidia-h200-x1/quack/gemms.jsonl").read_text().splitlines()
    ]
    over = [t["cuBLAS"] / min(time for name, time in t.items() if name.startswith("quack")) for t in rows]
    assert f"**{statistics.geometric_mean(over):.2f}x** as fast as cuBLAS on {len(over)} shapes" in guide


def test_a_mean_over_shapes_is_of_one_card(tmp_path: Path) -> None:
    """A shape that only H100s measured does not count in the mean over H200s."""
    plan = json.dumps({"kind": "sequential"})
    for machine, name in (("nvidia-h100-x4", "MLP-2"), ("nvidia-h200-x4", "MLP-1")):
        folder = tmp_path / machine / "tuning"
        folder.mkdir(parents=True)
        row = {"op": "all_gather_matmul", "name": name, "mode": "graph", "world": 4, "times": {plan: 100.0}}
        (folder / "x4-1.jsonl").write_text(json.dumps(row) + "\n")
    assert {key: list(shapes) for key, shapes in ways.tuned(tmp_path).items()} == {("all_gather_matmul", 4): ["MLP-1"]}


def test_every_stored_experiment_is_read() -> None:
    """Fitting the predictor, and tests of the rule for tiles and of notes, use all stored logs of single experiments."""
    names = (
        "bench/common/stored.py",
        "tests/planner/test_tiles.py",
        "tests/tooling/test_moe_page.py",
        "tests/emulated/test_nccl.py",
    )
    readers = "".join((ROOT / name).read_text() for name in names)
    kept = list((ROOT / "bench/results").glob("*/experiments/*"))
    assert kept and [path.name for path in kept if path.name not in readers] == []


@pytest.mark.parametrize("name", ["attention", "moe", "transformers", "models", "parallel", "papers"])
def test_times_stand_in_what_is_made_of_results_alone(name: str) -> None:
    text = (ROOT / f"docs/{name}.md").read_text()
    by_hand = re.sub(r"<!--[^>]*made by.*?<!-- end[^>]*-->|```.*?```", "", text, flags=re.S)
    assert len(by_hand) < len(text) or "made by" not in text
    assert not re.findall(r"\d\s*(?:us|ms)\b|\d\.\d+x", by_hand)


def test_the_reference_has_every_public_module() -> None:
    """A module's names are those in `__all__`, by default all without a leading underscore."""
    named = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M))
    modules = {f"weft.{name}" for name in weft.__all__ if isinstance(getattr(weft, name), ModuleType)}
    assert {"weft", *modules} <= named, "docs/api.md lacks a line `::: weft.NAME`"
    for name in named:
        assert importlib.import_module(name).__doc__


def test_the_reference_describes_every_name_in_a_clone() -> None:
    """The site's directives do not count as text."""
    text = (ROOT / "docs/api.md").read_text()
    for name in weft.__all__:
        if not isinstance(getattr(weft, name), ModuleType):
            assert re.search(rf"^\| `{name}` \| \S.*\w.* \|$", text, re.M), f"{name} is out of date: run make pages"
    assert all(f"`{name}`" in text for name in weft.moe.__all__)


def test_the_site_has_every_page() -> None:
    nav = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted([*(page.name for page in DOCS), "index.md"])
