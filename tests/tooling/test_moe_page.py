"""Tables of experts on one GPU, generated from made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import torch

import weft
from bench.common.timing import error_of
from bench.measure.moe import ONE_LAUNCH, Layer, Model
from bench.measure.moe_one_gpu import Size, by_torch, by_weft, ordered, stored
from bench.measure.moe_stragglers import figures
from bench.measure.moe_timeline import after_meeting
from bench.pages import moe_page, one_gpu_page

ROOT = Path(__file__).parents[2]
SIZES = dict(N=1024, K=2048, E=8, top_k=2, commit="0123456789")  # 12.6 MB of weights per expert
US = {"torch": 400.0, "torch compiled": 300.0, "vllm": 150.0, "quack": 120.0, "weft": 100.0}


def store(results: Path, machine: str, methods: dict[str, float], zipf: float = 0.0) -> None:
    (results / machine).mkdir(parents=True, exist_ok=True)
    with open(results / machine / "moe_one_gpu.jsonl", "a") as f:
        for tokens in (64, 8192):
            for method, us in methods.items():
                row = dict(name=f"Mixtral-{tokens}", method=method, us=us, zipf=zipf, M=tokens, **SIZES)
                f.write(json.dumps(row) + "\n")


def test_a_column_a_method_and_a_table_a_gpu_and_routing(tmp_path: Path) -> None:
    store(tmp_path, "nvidia-a-x1", US)
    store(tmp_path, "nvidia-a-x1", US | {"weft": 50.0}, zipf=1.0)
    store(tmp_path, "nvidia-b-x1", {"torch": 9.0, "weft": 3.0})
    uniform, skewed, other_gpu = one_gpu_page.one_gpu_sizes(tmp_path).split("us:")[1:]
    assert "| torch | torch compiled | vllm | quack | weft | vllm / weft | quack / weft | commit |" in uniform
    assert "| Mixtral-64 | 400 | 300 | 150 | 120 | 100 | 1.50x | 1.20x | `01234567` |" in uniform
    assert "| Mixtral-8192 | 400 | 300 | 150 | 120 | 50 | 3.00x | 2.40x | `01234567` |" in skewed
    assert "| layer, tokens | torch | weft | commit |" in other_gpu and "| Mixtral-64 | 9 | 3 |" in other_gpu


def test_ratios_of_each_gpu_of_uniform_routing(tmp_path: Path) -> None:
    store(tmp_path, "nvidia-a-x1", {"vllm": 150.0, "weft": 100.0})
    store(tmp_path, "nvidia-a-x1", {"vllm": 900.0, "weft": 100.0}, zipf=1.0)
    table = one_gpu_page.one_gpu_table(tmp_path)
    assert "| 64 | **1.50x** | 1.50x (Mixtral) |" in table and "quack" not in table and "Below" not in table
    assert table.endswith(
        "\n\nWith routing by Zipf's law: 9.00x to 9.00x at 64 tokens, 9.00x to 9.00x at 8,192 tokens."
    )
    store(tmp_path, "nvidia-b-x1", US)
    assert one_gpu_page.one_gpu_table(tmp_path).endswith(f"\n\n{table}"), "the GPU with the most libraries comes first"
    gpu_b = one_gpu_page.one_gpu_table(tmp_path).removesuffix(table)
    assert gpu_b.startswith("nvidia-b, `01234567`:") and "| over quack | over the fastest | lowest |" in gpu_b
    assert "| 8,192 | **1.50x** | **1.20x** | **1.20x** | 1.20x (Mixtral) |" in gpu_b


def test_ratios_below_one_name_their_bound(tmp_path: Path) -> None:
    """64 tokens read all eight experts, 101 MB, in 100 us and in 50 us; 8,192 tokens need 0.2 TFLOP."""
    store(tmp_path, "nvidia-a-x1", US | {"vllm": 50.0})
    assert one_gpu_page.one_gpu_table(tmp_path).splitlines()[-1] == (
        "Below 1.0x: 1 size of up to 64 tokens, bound by weights, read 1.0 TB/s (the library: 2.0);"
        " Mixtral of 8,192 tokens, bound by FLOPs, computes 2062 TFLOP/s (vLLM: 4123)."
    )


def test_a_tie_is_not_below_one(tmp_path: Path) -> None:
    store(tmp_path, "nvidia-a-x1", {"vllm": 99.6, "weft": 100.0})
    assert "Below" not in one_gpu_page.one_gpu_table(tmp_path)


def write(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_launches_of_one_layer_by_plan(tmp_path: Path) -> None:
    """A plan that was not profiled has an empty cell; the sentence includes all layers."""
    store(tmp_path, machine := "nvidia-a-x1", {"weft": 100.0, "weft, one launch": 125.0})
    counts = {"weft, one launch": 1, "weft fused": 4, "weft auto": 10, "torch": 47, "library": 88}
    write(
        tmp_path / machine / "moe_launches.jsonl",
        *(dict(name="Qwen3-30B-64", method=m, kernels=n, copies=3 * (m == "torch")) for m, n in counts.items()),
    )
    write(tmp_path / machine / "sm_active.jsonl", dict(name="Qwen3-30B-2048", method="one launch", active=0.9938))
    text = one_gpu_page.launches(tmp_path)
    assert "| Qwen3-30B, tokens | kernels, 64 | SMs active, 2,048 | us, 64 |" in text
    assert "| one launch | 1 | 99.4% |  |" in text and "| torch | 47 + 3 |  |  |" in text
    assert text.endswith("by tokens: +25 to +25% at 64, +25 to +25% at 8,192.")


def test_times_of_many_experts_stand_beside_their_bytes() -> None:
    """Each of two GPUs has 60 of the 120 additional experts, each with two matrices of 2,048 x 2,048: 1.0 GB. A number of
    tokens that one of the layers lacks is left out."""
    row = dict(name="-ungated-", method="auto", world=2, N=2048, K=2048)
    us = {(4096, 8): 300.0, (4096, 128): 450.0, (8192, 8): 500.0, (8192, 128): 700.0}
    two = [dict(row, M=m, E=e, us=t) for (m, e), t in us.items()]
    four = [dict(r, world=4) for r in two if (r["M"], r["E"]) != (4096, 128)]
    assert moe_page.growth(two, four) == (
        "128 experts take longer than 8: on 2 GPUs 150 to 200 us (50% at 4,096, 40% at 8,192 tokens; 1.0 GB more weights take 234 us"
        " at 4.3 TB/s); on 4 GPUs 200 to 200 us (40% at 8,192 tokens; 0.5 GB more weights take 117 us at 4.3 TB/s)."
        " Last tiles are partly empty."
    )


def test_important_sizes_are_measured_first(tmp_path: Path) -> None:
    assert ordered(["a", "b"], [8, 4], [0.0, 1.0], [8])[:5] == [
        Size("a", 8, 0.0), Size("b", 8, 0.0), Size("a", 4, 0.0), Size("b", 4, 0.0), Size("a", 8, 1.0),
    ]  # fmt: skip
    assert ordered(["a"], [8], [0.0, 1.0], [8])[-1] == Size("a", 8, 0.0, compiled=True)
    assert stored(tmp_path / "none.jsonl") == []


def test_several_gpus_are_compared_with_the_usual_choice(tmp_path: Path) -> None:
    """If a library was missing, its cell is empty, and the fastest of the other libraries is compared."""
    for world, us in ((2, {"auto": 80.0}), (4, {"auto": 100.0, "vllm": 150.0, "library, eager": 400.0})):
        (tmp_path / f"a-x{world}").mkdir()
        rows = [dict(name="Mixtral-512", method=m, us=t, zipf=0.0, world=world, **SIZES) for m, t in us.items()]
        (tmp_path / f"a-x{world}/moe.jsonl").write_text("\n".join(map(json.dumps, rows)))
    peers = moe_page.beside_peers(tmp_path)
    assert peers.splitlines()[2:] == ["| a-x4 | Mixtral, 512 | 150 |  | 400 | 100 | **1.50x** | `01234567` |"]
    assert moe_page.overlap_efficiency(tmp_path).splitlines()[-1] == "| Mixtral, 512 | 0.80 |"


def test_layers_over_ranks_are_faster_than_with_other_experts_as_the_page_says() -> None:
    us: dict[str, dict[str, float]] = {}
    for gpus in ("nvidia-h200-x2", "nvidia-h200-x4"):
        for row in map(json.loads, (ROOT / f"bench/results/{gpus}/moe.jsonl").read_text().splitlines()):
            if row.get("versions") == {"vllm": "0.26.0", "quack": "0.6.5"}:
                us.setdefault(f"{gpus}: {row['name']}", {})[row["method"]] = row["us"]
    gains = [min(times["vllm"], times["quack"]) / times["auto"] for times in us.values()]
    text = " ".join((ROOT / "docs/moe.md").read_text().split())
    assert len(gains) == 20 and min(gains) > 1
    assert "On two and four H200s all layers were faster than with vLLM's or quack's experts over ranks." in text


def test_stragglers_by_delay(tmp_path: Path) -> None:
    """Calls of two ranks, each of which is late in turn, end after 40 us."""
    row = dict(name="Mixtral-512", method="auto", delay=1.0, delay_us=20.0, **figures([(40.0, 30.0), (30.0, 40.0)] * 2))
    assert row["us"] == row["p95_us"] == 40.0
    (tmp_path / "a-x2").mkdir()
    rows = [row | dict(delay_us=19.0, us=50.0), row]  # an older run, in which a layer took less time
    (tmp_path / "a-x2/moe_stragglers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert moe_page.stragglers(tmp_path).splitlines()[-1] == "| a-x2 | Mixtral, 512 | 1 | 20 |  | 40 / 40 |  |"
    assert moe_page.stragglers(tmp_path).count("a-x2") == 1


def test_where_a_layer_spends_its_time(tmp_path: Path) -> None:
    """Kernels before the ranks' last meeting are left out, and so is the wait for other ranks in `share`. Runs of a layer
    are averaged. A layer by a plan with other kernels has no line."""
    kernels = after_meeting(
        [
            ("sum_ranks", 60.0, 80.0),
            ("ncclDevKernel", 95.0, 100.0),
            ("combine_rows", 231.0, 320.0),
            ("count_routes", 102.0, 112.0),
            ("share", 112.0, 122.0),
            ("dispatch_rows", 103.0, 125.0),
            ("grouped_gemm_in", 130.0, 230.0),
            ("grouped_gemm_out", 230.0, 290.0),
            ("sum_ranks", 325.0, 340.0),
        ]
    )
    assert kernels[0] == ("count_routes", 2.0, 12.0) and len(kernels) == 7
    longer = [(kernel, begin, end + 2 * (kernel == "sum_ranks")) for kernel, begin, end in kernels]
    alone = dict(first=dict(torch=80.0, weft=90.0), second=dict(torch=50.0, weft=40.0))
    rows = [
        dict(name=f"Mixtral-{tokens}", us=240.0, kernels=listed, **alone)
        for tokens, listed in ((8192, kernels), (8192, longer), (64, []))
    ]
    (tmp_path / "a-x4").mkdir()
    (tmp_path / "a-x4/moe_timeline.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = moe_page.timelines(tmp_path)
    assert "Means of 2 layers" in table
    assert table.splitlines()[-1] == "| a-x4 | Mixtral, 8,192 | 228 | 10 | 100 (80) | 60 (40) | 30 | 16 |"


def test_the_notes_on_combine_are_those_of_the_experiment() -> None:
    """The design notes say how long after GEMM 2 combine ends, in us, before and after a change."""
    late: dict[str, list[float]] = {}
    for line in (ROOT / "bench/results/nvidia-h200-x4/experiments/moe-combine.jsonl").read_text().splitlines():
        row = json.loads(line)
        for kernels in row.get("kernels", {}).values():
            ends = {name: end for name, _, end in kernels}
            late.setdefault(row["variant"], []).append(ends["combine_rows"] - ends["grouped_gemm_out"])
    us = {variant: median(times) for variant, times in late.items()}
    after = us["local routes first, four at a time by 8 warps"]
    assert (
        round(us["all routes"], -1) == round(us["all routes, stored in local memory"], -1) == 90 and round(after) == 2
    )
    notes = " ".join((ROOT / "docs/design-notes.md").read_text().split())
    assert "it ended 90 us after GEMM 2, also with stores to local memory" in notes and "four at a time: 2 us." in notes


def test_the_comment_on_late_sums_is_that_of_the_experiment() -> None:
    """The comment beside the plans says how much slower layers are whose sums are sent after the second GEMM."""
    path, tiles = ROOT / "bench/results/nvidia-h200-x2/experiments/moe-combine-after.jsonl", "tiles of 128 rows"
    times = [json.loads(line)["us"] for line in path.read_text().splitlines()]
    percent = [100 * (us[f"{tiles}, sums after GEMM 2"] / us[tiles] - 1) for us in times]
    source = (ROOT / "src/weft/ops/moe/expert_parallel/op.py").read_text()
    assert f"({abs(round(min(percent)))}% to {round(max(percent))}% slower, 2026-11)" in source and len(times) == 5


def test_the_notes_on_the_last_round_of_tiles_are_those_of_the_experiments() -> None:
    """The kernel's text says how much less time layers take whose last round of tiles is split, and the design notes
    say what tiles with a few rows more took beside the fastest tiles without."""
    experiments = ROOT / "bench/results/nvidia-h200-x1/experiments"
    us: dict[tuple[str, int], dict[str, float]] = {}
    for row in map(json.loads, (experiments / "moe-last-round.jsonl").read_text().splitlines()):
        if row["tile"] == "128 x 256" and row["rows_per_expert"] <= 512:
            us.setdefault((row["layer"], row["rows_per_expert"]), {})[row["last_round"]] = min(row["us"])
    less = [round(100 * (1 - t["halves"] / t["whole tiles"])) for t in us.values()]
    gemm = " ".join((ROOT / "src/weft/compute/gemm.py").read_text().split())
    assert f"tiles of 128 x 256 took {min(less)}% to {max(less)}% less time (1 H200" in gemm
    ratios: dict[int, list[float]] = {}
    for row in map(json.loads, (experiments / "moe-tails.jsonl").read_text().splitlines()):
        tails = min(t for tile, t in row["us"].items() if "+" in tile)
        whole = min(t for tile, t in row["us"].items() if "+" not in tile)
        ratios.setdefault(row["rows_per_expert"], []).append(tails / whole)
    notes = " ".join((ROOT / "docs/design-notes.md").read_text().split())
    ranges = {rows: f"{min(values):.2f} to {max(values):.2f}" for rows, values in ratios.items()}
    assert f"took {ranges[64]} of the time with 64 rows per expert and {ranges[128]} with 128" in notes


def test_the_notes_on_training_steps_are_those_of_the_experiment() -> None:
    """The comment in the backward pass says what it saves to place rows beside a GEMM. Steps with saved activations
    became faster where the GPU's power does not limit the GEMMs, and no others slower. In the new tree's steps of call 1
    the first GEMM stored the activation's input before the activation, and not after it."""
    path = ROOT / "bench/results/nvidia-h200-x2/experiments/moe-step.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    us = {(r["tree"], r["kernel"]): fmean(r["us"]) for r in rows if "kernel" in r}
    alone, gemm = us["old", "place_rows of x"], us["old", "grouped_gemm_out of dy"]
    longer = us["new", "grouped_gemm_out of dy, beside place_rows of x"] - gemm
    source = " ".join((ROOT / "src/weft/ops/moe/expert_parallel/backward.py").read_text().replace("#", "").split())
    assert (
        f"Alone `place_rows` took {alone:.0f} us. Beside the next GEMM it lengthens that by {longer:.0f} us" in source
    )
    steps: dict[tuple[str, str, str], list[float]] = {}
    for r in rows:
        if "kernel" not in r:
            steps.setdefault((r["layer"], r["keep"], r["tree"]), []).append(r["us"])
    less = {key: 1 - fmean(steps[*key, "new"]) / fmean(steps[*key, "old"]) for key in {k[:2] for k in steps}}
    assert less["Qwen3-30B", "activation"] > 0.03 and min(less.values()) > -0.01


def test_the_method_of_one_launch_computes_the_layer() -> None:
    def main(world: weft.World) -> float:
        torch.manual_seed(0)
        layer = Layer(world, Model(32, 16, 4, 2), 9, 0.0)
        logits = (layer.logits(layer.xs[0]).float() * 64).sort(1).values
        assert float(logits.diff(dim=1).min()) > 0, "with ties, the routes would be ambiguous"
        return error_of(by_weft(layer, ONE_LAUNCH)(layer.xs[0]), by_torch(layer)(layer.xs[0]))

    assert max(weft.spmd(main, 1, backend="emulated")) < 1e-2
