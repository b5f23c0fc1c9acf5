"""The tables of docs/moe.md, and the tables of every size in bench/results/moe.md, from
bench/results/<machine>/moe*.jsonl. The tables of memory are computed by the code.

The newest row of a name, world, method and routing, which is the last in the file, counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from types import SimpleNamespace

import torch

from bench.measure.moe import MEMORY
from bench.pages.one_gpu_page import launches, one_gpu_sizes, one_gpu_table, weight_bytes
from bench.pages.report import HASH
from bench.pages.tables import Rows, between, by_machine, gpus, grid
from weft.ops.moe.call import Layer
from weft.ops.moe.expert_parallel.dispatched import memory
from weft.plans import FusedMoe

NOT_MEASURED = "Not measured on GPUs yet."
TABLES = "bench/results/moe.md"
LAYER = "layer, tokens a GPU"


def layer_of(name: str) -> str:
    """Return a row's name as a table cell: the model and the number of tokens."""
    model, _, tokens = name.rpartition("-")
    return f"{model}, {int(tokens):,}"


def most_tokens_first(names: Iterable[str]) -> list[str]:
    return sorted(dict.fromkeys(names), key=lambda name: -int(name.rpartition("-")[2]))


def us_or_empty(row: dict | None) -> str:
    return f"{row['us']:.0f}" if row else ""


def table(lines: Rows) -> str:
    """Return the table with a row for each size: the us of the library and of weft, the ratio of the two, and the
    limit, and the time of weft's parts alone, as shares of weft's time."""
    newest = {(r["name"], r["method"]): r for r in lines}
    rows, ratios = [], []
    for name in most_tokens_first(r["name"] for r in lines):
        library, auto = newest.get((name, "library")), newest.get((name, "auto"))
        if library is None or auto is None:
            continue
        ratios.append(library["us"] / auto["us"])
        model, _, tokens = name.rpartition("-")
        sizes = f"{model} ({auto['K']}, {auto['N']}, {auto['E']}, {auto['top_k']}), {int(tokens):,}"
        bounds = [(auto[kind], 100 * auto[kind] / auto["us"]) for kind in ("limit_us", "alone_us") if kind in auto]
        cells = [cell for us, share in bounds for cell in (f"{us:.0f}", f"{share:.0f}%")] + ["", ""] * (2 - len(bounds))
        rows.append([sizes, us_or_empty(library), us_or_empty(auto), f"**{ratios[-1]:.2f}x**", *cells])
    head = [LAYER, "libraries", "weft", "ratio", "limit", "of the limit", "parts alone", "of these"]
    mean = f"Geometric mean of the ratios: {geometric_mean(ratios):.2f}x, lowest {min(ratios):.2f}x."
    return f"{grid(head, rows)}\n\n{mean}"


def experts(lines: Rows) -> str:
    """Return the table of one layer with a row for each number of experts: the us of weft and of the library by number
    of tokens, and the spread over all rows."""
    newest = {(r["E"], r["M"], r["method"]): r["us"] for r in lines}
    tokens = sorted({m for _, m, _ in newest})
    rows = []
    for e in sorted({e for e, _, _ in newest}):
        pairs = [(newest.get((e, m, "auto")), newest.get((e, m, "library"))) for m in tokens]
        rows.append([str(e), *("" if None in pair else "{:.0f} ({:.0f})".format(*pair) for pair in pairs)])
    return f"{grid(['experts', *(f'{m:,} tokens' for m in tokens)], rows)}\n\n{growth(lines)}"


def growth(*of_machines: Rows) -> str:
    """Return the sentence that compares, for each number of GPUs, the time that the most experts take beyond the fewest
    with the time to read their weights."""
    parts = []
    for lines in of_machines:
        auto = [r for r in lines if r["method"] == "auto"]
        newest = {(r["M"], r["E"]): r["us"] for r in auto}
        fewest, most = min(r["E"] for r in auto), max(r["E"] for r in auto)
        tokens = sorted({m for m, e in newest if {(m, fewest), (m, most)} <= newest.keys()})
        added_us = [newest[m, most] - newest[m, fewest] for m in tokens]
        shares = [f"{100 * us / newest[m, fewest]:.0f}% at {m:,}" for m, us in zip(tokens, added_us, strict=True)]
        gigabytes = (most - fewest) // auto[0]["world"] * weight_bytes(auto[0], matrices=2) / 1e9
        parts.append(
            f"on {gpus(auto[0]['world'])} {min(added_us):.0f} to {max(added_us):.0f} us ({', '.join(shares)} tokens;"
            f" {gigabytes:.1f} GB more weights take {gigabytes / MEMORY * 1e3:.0f} us at {MEMORY} TB/s)"
        )
    return f"{most} experts take longer than {fewest}: {'; '.join(parts)}. Last tiles are partly empty."


def growths(results: Path) -> str:
    """Return the sentence on the number of experts in FlashMoE's layer with two matrices."""
    of_machines = ([r for r in lines if UNGATED in r["name"]] for lines in by_machine(results, "moe.jsonl").values())
    stored = [lines for lines in of_machines if lines]
    return f"In FlashMoE's layer {growth(*stored)}" if stored else ""


def auto_us(results: Path) -> dict[str, dict[int, float]]:
    """Return weft's us with balanced routing by name and number of GPUs."""
    us: dict[str, dict[int, float]] = {}
    for r in (r for lines in by_machine(results, "moe.jsonl").values() for r in lines):
        if r["method"] == "auto" and r["zipf"] == 0:
            us.setdefault(r["name"], {})[r["world"]] = r["us"]
    return us


def scaling(results: Path) -> str:
    """Return the table of times in us on one GPU and on several GPUs, with the same number of tokens on each GPU."""
    us = {name: by_world for name, by_world in auto_us(results).items() if 1 in by_world}
    worlds = sorted({w for by_world in us.values() for w in by_world})
    rows = []
    for name, by_world in us.items():
        times = [(w, by_world.get(w)) for w in worlds]
        cells = ["" if t is None else f"{t:.0f}" + f" ({t / by_world[1]:.2f}x)" * (w > 1) for w, t in times]
        rows += [[layer_of(name), *cells]] if len(by_world) > 1 else []
    return grid([LAYER, *map(gpus, worlds)], rows) if rows else ""


def overlap_efficiency(results: Path) -> str:
    """Return the table of T(2) / T(N), FlashMoE's overlap efficiency: the time on 2 GPUs divided by the time on N, with
    the same number of tokens on each GPU."""
    us = auto_us(results)
    worlds = sorted({world for by_world in us.values() for world in by_world if world > 2})
    rows = [
        [layer_of(name), *(f"{by_world[2] / by_world[w]:.2f}" if w in by_world else "" for w in worlds)]
        for name, by_world in us.items()
        if 2 in by_world and by_world.keys() & set(worlds)
    ]
    return grid([LAYER, *map(gpus, worlds)], rows) if rows else NOT_MEASURED


PEERS = ("vllm", "quack", "library, eager")


def beside_peers(results: Path) -> str:
    """Return the table of alternatives over several GPUs: vLLM's and quack's experts between NCCL's collectives, and
    eager PyTorch. The ratio is the time of the fastest alternative divided by weft's."""
    rows = []
    for machine, lines in by_machine(results, "moe.jsonl").items():
        newest = {(r["name"], r["zipf"], r["method"]): r for r in lines}
        for name, zipf, method in newest:
            peers = [newest.get((name, zipf, peer)) for peer in PEERS]
            if method == "auto" and any(peers):
                auto = newest[name, zipf, method]
                ratio = min(r["us"] for r in peers if r) / auto["us"]
                layer = layer_of(name) + (f", Zipf {zipf}" if zipf else "")
                cells = [*map(us_or_empty, (*peers, auto)), f"**{ratio:.2f}x**", f"`{auto['commit'][:HASH]}`"]
                rows.append([machine, layer, *cells])
    return grid(["GPUs", LAYER, *PEERS, "weft", "ratio", "commit"], rows) if rows else NOT_MEASURED


LATE = {"library": "libraries", "auto": "weft", "all-reduce": "all-reduce alone"}
LATE_TEXT = """A different rank is late in each call. Times are from the common beginning of the other ranks to the end on the last rank, in CUDA graphs.
A layer is the libraries' time without a delay. The late rank sleeps for a number of its GPU's cycles, so its us vary with the clock.
The last column is NCCL's all-reduce of a rank's rows.
"""


def stragglers(results: Path) -> str:
    """Return the table of layers in which one rank begins late: the median and the 95th percentile of the time until
    the last rank ends."""
    newest: dict[tuple[str, str, str], dict[str, str]] = {}
    for machine, lines in by_machine(results, "moe_stragglers.jsonl").items():
        for r in lines:
            cells = newest.setdefault((machine, layer_of(r["name"]), f"{r['delay']:g}"), {})
            cells |= {r["method"]: f"{r['us']:.0f} / {r['p95_us']:.0f}", "late": f"{r['delay_us']:.0f}"}
    rows = [[*layer, *(cells.get(column, "") for column in ("late", *LATE))] for layer, cells in newest.items()]
    head = ["GPUs", LAYER, "late by, layers", "late by, us", *LATE.values()]
    return f"{LATE_TEXT}\n{grid(head, rows)}" if rows else NOT_MEASURED


TIMELINE_TEXT = """In parentheses the GEMMs alone, by the faster of torch and weft. Both GEMMs run beside programs that move rows. "Before" are the router
and the tables, without the wait in which the ranks share their counts. Means of {runs} layers of the first rank, by torch.profiler.
"""
TIMELINE = ["us", "before", "GEMM 1", "GEMM 2", "combine after GEMM 2", "last sums"]


def stages(row: dict) -> list[float] | None:
    """Return the values of TIMELINE's columns for a traced layer, or None if its plan has other kernels."""
    kernels = {kernel: (begin, end) for kernel, begin, end in row["kernels"]}
    if not {"grouped_gemm_in", "grouped_gemm_out", "combine_rows", "sum_ranks"} <= kernels.keys():
        return None
    spans = {kernel: end - begin for kernel, (begin, end) in kernels.items()}
    (starts, _), (_, ends) = kernels["grouped_gemm_in"], kernels["grouped_gemm_out"]
    before = sum(
        spans[kernel]
        for kernel, (_, end) in kernels.items()
        if end <= starts and kernel not in ("share", "dispatch_rows")
    )
    us = row["us"] - min(begin for begin, _ in kernels.values()) - spans.get("share", 0)
    tail = max(0, kernels["combine_rows"][1] - ends)
    return [us, before, spans["grouped_gemm_in"], spans["grouped_gemm_out"], tail, spans["sum_ranks"]]


def timelines(results: Path) -> str:
    """Return the table of where a layer's time goes."""
    traced: dict[tuple[str, str], list[tuple[list[float], dict]]] = {}
    for machine, lines in by_machine(results, "moe_timeline.jsonl").items():
        for r in lines:
            if values := stages(r):
                traced.setdefault((machine, layer_of(r["name"])), []).append((values, r))
    rows = []
    for layer, runs in traced.items():
        cells = [f"{fmean(values):.0f}" for values in zip(*(v for v, _ in runs), strict=True)]
        for column, half in (("GEMM 1", "first"), ("GEMM 2", "second")):
            cells[TIMELINE.index(column)] += f" ({fmean(min(r[half].values()) for _, r in runs):.0f})"
        rows.append([*layer, *cells])
    if not rows:
        return NOT_MEASURED
    counts = sorted({len(runs) for runs in traced.values()})
    text = TIMELINE_TEXT.format(runs=" or ".join(map(str, counts)))
    return f"{text}\n{grid(['GPUs', LAYER, *TIMELINE], rows)}"


UNGATED = "-ungated-"
PLANS = {"libraries": "library, beside one launch", "dispatched": "weft dispatched", "low latency": "weft low latency"}


def plans(lines: Rows) -> str:
    """Return the table with a row for each size of the runs that time all plans: the us of each plan, and of the fused
    plan with its fastest settings."""
    newest = {(r["name"], r["method"]): r["us"] for r in lines}
    rows = []
    for name in most_tokens_first(n for n, m in newest if m == PLANS["libraries"]):
        fused = min((us for (n, m), us in newest.items() if n == name and m.startswith("weft fused")), default=None)
        every = [*(newest.get((name, method)) for method in PLANS.values()), fused]
        rows.append([layer_of(name), *("" if us is None else f"{us:.0f}" for us in every)])
    return grid([LAYER, *PLANS, "fused"], rows)


def of_all_plans(results: Path) -> str:
    """Return the tables of the runs that time all plans, with balanced routing."""
    parts = []
    for machine, every in by_machine(results, "moe.jsonl").items():
        lines = [r for r in every if r["zipf"] == 0 and UNGATED not in r["name"]]
        if any(r["method"] == PLANS["libraries"] for r in lines):
            parts.append(f"{gpus(lines[0]['world'])} ({machine}), us:\n\n{plans(lines)}")
    return "\n\n".join(parts)


def page(results: Path) -> str:
    parts = []
    for machine, lines in by_machine(results, "moe.jsonl").items():
        where = f"{gpus(lines[0]['world'])} ({machine})"
        for zipf in sorted({r["zipf"] for r in lines}):
            routing = "balanced random routing" if zipf == 0 else f"routing by Zipf's law ({zipf})"
            some = [r for r in lines if r["zipf"] == zipf and UNGATED not in r["name"]]
            parts.append(f"{where}, {routing}, us:\n\n{table(some)}")
        ungated = [r for r in lines if UNGATED in r["name"]]
        if ungated:
            setup = "FlashMoE's experts as in its paper (H = I = 2048, k = 2, GELU of two matrices, not gated)"
            parts.append(f"{where}, {setup}, us of weft and of the libraries:\n\n{experts(ungated)}")
    grown = scaling(results)
    return "\n\n".join([*parts, *([f"With the same number of tokens on each GPU, us:\n\n{grown}"] if grown else [])])


def stamps(results: Path) -> str:
    """Return the table of the shares of each task in the one launch of fused calls."""
    kinds = ("sending", "GEMM 1", "GEMM 2", "sums", "own sums")
    stored = by_machine(results, "moe_stamps.jsonl")
    newest = {(machine, r["name"], r["method"]): r for machine, lines in stored.items() for r in lines}
    rows = [
        [str(r["world"]), layer_of(r["name"]), r["method"], us_or_empty(r), *(f"{100 * r[kind]:.0f}%" for kind in ("in_tasks", *kinds))]
        for r in newest.values()
    ]  # fmt: skip
    return grid(["GPUs", LAYER, "plan", "us", "in tasks", *kinds], rows) if rows else NOT_MEASURED


def in_parts(lines: Rows) -> tuple[str, str]:
    """Return the table with a row for each size and op: the us of the library and of weft, the ratio of the two, and
    weft's share of the limit. The means by op follow."""
    newest = {(r["name"], r["op"], r["method"]): r for r in lines}
    rows, pairs_by_op = [], dict[str, list[tuple[float, float]]]()
    for (name, op, method), auto in newest.items():
        library = newest.get((name, op, "library"))
        if method != "auto" or library is None:
            continue
        ratio, share = library["us"] / auto["us"], auto["limit_us"] / auto["us"]
        pairs_by_op.setdefault(op, []).append((ratio, share))
        sizes = f"{name} ({auto['K']}, {auto['N']}, {auto['E']}, {auto['top_k']})"
        us = us_or_empty(library), us_or_empty(auto)
        rows.append([sizes, op, *us, f"**{ratio:.2f}x**", f"{auto['limit_us']:.0f}", f"{100 * share:.0f}%"])
    means = []
    for op, pairs in pairs_by_op.items():
        ratios, shares = zip(*pairs, strict=True)
        mean = f"geometric mean **{geometric_mean(ratios):.2f}x**, lowest {min(ratios):.2f}x"
        means.append(f"- `{op}`: {mean}, at least {100 * min(shares):.0f}% of the limit.")
    head = ["layer (H, I, E, k)", "op", "libraries", "weft", "ratio", "limit", "of the limit"]
    return grid(head, rows), "\n\n".join(means)


def page_in_parts(results: Path, sizes: bool = True) -> str:
    """Return the section on experts in two parts. sizes: whether the section has a line for each size, and not only the
    means."""
    parts = []
    for machine, lines in by_machine(results, "moe_tensor.jsonl").items():
        for world, tokens in sorted({(r["world"], -r["M"]) for r in lines}):
            some = [r for r in lines if r["world"] == world and r["M"] == -tokens]
            every_size, means = in_parts(some)
            text = f"{every_size}\n\n{means}" if sizes else means.replace("\n\n", "\n")
            parts.append(f"{world} GPUs ({machine}), {-tokens:,} tokens in all{', us' * sizes}:\n\n{text}")
            alone = [r["tables_us"] for r in some if "tables_us" in r]
            if alone and sizes:
                parts.append(
                    f"The tables alone, which the limit does not include: {min(alone):.0f} to {max(alone):.0f} us."
                )
    return "\n\n".join(parts) or NOT_MEASURED


def memory_table() -> str:
    """Return the table of MiB per rank for FlashMoE's sizes on 8 GPUs, by tokens per GPU and experts; computed, not
    measured."""
    ranks, rows = SimpleNamespace(size=8), []
    for tokens in (4096, 16384):
        for experts in (16, 128):
            layer = Layer(tokens, experts, 2, 2048, 2048, torch.bfloat16)
            worst = memory(ranks, layer, FusedMoe.tile.block_m)  # type: ignore[arg-type]
            even = memory(ranks, replace(layer, max_rows=tokens * 2 * 5 // 4), FusedMoe.tile.block_m)  # type: ignore[arg-type]
            sizes = (worst.symmetric, worst.tables, worst.scratch, even.scratch)
            rows.append([f"{tokens:,}", str(experts), *(f"{n / 2**20:,.0f}" for n in sizes)])
    head = ["tokens a GPU", "experts", "symmetric", "tables", "experts' rows, worst case"]
    return grid([*head, "`max_rows` 25% above an even share"], rows)


TRAINED = "library", "weft, keep nothing", "weft, keep rows", "weft, keep activation"


def training(results: Path, backward: bool = False) -> str:
    """Return the table with a row for each layer: us and TFLOP/s per GPU of each method for forward and backward pass
    together. backward: whether to add the backward pass alone."""
    parts = []
    head = [LAYER, *["pass"] * backward, "libraries", *(m.removeprefix("weft, ") for m in TRAINED[1:])]
    for machine, lines in by_machine(results, "moe_training.jsonl").items():
        newest = {(r["name"], r["op"], r["method"]): r for r in lines}
        rows = []
        for name, op in dict.fromkeys((r["name"], r["op"]) for r in lines if backward or r["op"] != "moe_backward"):
            stored = (newest.get((name, op, method)) for method in TRAINED)
            cells = ["" if r is None else f"{r['us']:.0f} us, {r['tflops']:.0f}" for r in stored]
            passes = "backward" if op == "moe_backward" else "forward and backward"
            layer = name.replace("-tensor-", ", columns over ranks, ") if "-tensor-" in name else name
            rows.append([layer, *[passes] * backward, *cells])
        parts.append(f"{gpus(lines[0]['world'])} ({machine}):\n\n{grid(head, rows)}")
    return "\n\n".join(parts)


def filled(text: str, results: Path) -> str:
    origin = "made by bench/pages/moe_page.py"
    blocks = {
        (f"{origin} from bench/results", "end"): f"{one_gpu_table(results)}\n\n{growths(results)}",
        ("launches: made by bench/pages/one_gpu_page.py from bench/results", "end of launches"): launches(results),
        (f"memory: {origin}", "end of memory"): memory_table(),
        (f"training: {origin} from bench/results", "end of training"): training(results),
        (f"in parts: {origin} from bench/results", "end of in parts"): page_in_parts(results, sizes=False),
    }
    for (begin, end), block in blocks.items():
        text = between(text, f"<!-- {begin} -->", f"<!-- {end} -->", block)
    return text


HEAD = """# Mixtures of experts

"libraries" are the libraries of [the page](../../docs/moe.md#what-it-reaches). Sizes are hidden size, inner size, experts and experts per token. "limit" is
the largest of three times: the experts' FLOPs at 700 TFLOP/s, the bytes of the weights touched at 4.3 TB/s, and the bytes of dispatch or combine at the
link's measured rate; "parts alone" are both grouped GEMMs alone, or the bytes if these take longer, preceded by the router and the
tables.
"""


def chapter(results: Path) -> str:
    """Return the tables of every size."""
    sections = {
        "Whole layers, forward": page(results),
        "One GPU, compared with vLLM's fused experts, quack's grouped GEMMs and torch": one_gpu_sizes(results),
        "Plan by plan": of_all_plans(results),
        "Experts whose columns are split over the ranks": page_in_parts(results),
        "Several GPUs, compared with the experts of vLLM and quack and with eager PyTorch, us": beside_peers(results),
        "T(2) / T(N), with the same number of tokens per GPU": overlap_efficiency(results),
        "One rank late, median / 95th percentile, us": stragglers(results),
        "Where a layer's time goes, us": timelines(results),
        "Training": training(results, backward=True),
        "Shares of each task in the time of the single launch, in eager calls": stamps(results),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}\n" for title, text in sections.items())])
