"""The tables of docs/moe.md, and every size in bench/results/moe.md, from bench/results/<machine>/moe*.jsonl, and of memory from the code.

The newest row of a name, world, method and routing counts, which is the last in the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from bench.measure.moe import MEMORY
from bench.pages.one_gpu_page import geometric, launches, lines_of, one_gpu_sizes, one_gpu_table, weight_bytes
from weft.ops.moe.call import Layer
from weft.ops.moe.expert_parallel.dispatched import memory
from weft.plans import FusedMoe

NOT_MEASURED = "Not measured on GPUs yet."
BEGIN, END = "<!-- made by bench/pages/moe_page.py from bench/results -->", "<!-- end -->"
MEMORY_BEGIN, MEMORY_END = "<!-- memory: made by bench/pages/moe_page.py -->", "<!-- end of memory -->"
TRAINING = "<!-- training: made by bench/pages/moe_page.py from bench/results -->"
TRAINING_END = "<!-- end of training -->"
TABLES = "bench/results/moe.md"
IN_PARTS, IN_PARTS_END = (
    "<!-- in parts: made by bench/pages/moe_page.py from bench/results -->",
    "<!-- end of in parts -->",
)
LAUNCHES, LAUNCHES_END = (
    "<!-- launches: made by bench/pages/one_gpu_page.py from bench/results -->",
    "<!-- end of launches -->",
)


def table(lines: list[dict]) -> str:
    """Return the table with a row for each size: us of the library and of weft, their ratio, and weft's share of the limit and of
    its parts alone."""
    heads = "layer, tokens a GPU | libraries | weft | ratio | limit | of the limit | parts alone | of these"
    rows = [f"| {heads} |", "| --- |" + " --- |" * heads.count("|")]
    newest = {(r["name"], r["method"]): r for r in lines}
    ratios = []
    for name in sorted({r["name"]: None for r in lines}, key=lambda name: -int(name.rpartition("-")[2])):
        library, auto = newest.get((name, "library")), newest.get((name, "auto"))
        if library is None or auto is None:
            continue
        ratios.append(library["us"] / auto["us"])
        model, _, tokens = name.rpartition("-")
        sizes = f"{model} ({auto['K']}, {auto['N']}, {auto['E']}, {auto['top_k']}), {int(tokens):,}"
        bounds = [(auto[kind], 100 * auto[kind] / auto["us"]) for kind in ("limit_us", "alone_us") if kind in auto]
        cells = [cell for us, share in bounds for cell in (f"{us:.0f}", f"{share:.0f}%")] + ["", ""] * (2 - len(bounds))
        rows.append(
            f"| {sizes} | {library['us']:.0f} | {auto['us']:.0f} | **{ratios[-1]:.2f}x** | " + " | ".join(cells) + " |"
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return "\n".join([*rows, "", f"Geometric mean of the ratios: {mean:.2f}x, lowest {min(ratios):.2f}x."])


def experts(lines: list[dict]) -> str:
    """Return the table with a row for each number of experts, of one layer: us of weft and of the library by tokens, and the
    spread over all rows."""
    newest = {(r["E"], r["M"], r["method"]): r["us"] for r in lines}
    tokens = sorted({m for _, m, _ in newest})
    rows = ["| experts | " + " | ".join(f"{m:,} tokens" for m in tokens) + " |", "| --- |" + " --- |" * len(tokens)]
    for e in sorted({e for e, _, _ in newest}):
        cells = []
        for m in tokens:
            auto, library = newest.get((e, m, "auto")), newest.get((e, m, "library"))
            cells.append("" if auto is None or library is None else f"{auto:.0f} ({library:.0f})")
        rows.append(f"| {e} | " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", growth(lines)])


def growth(lines: list[dict]) -> str:
    """Return the sentence that compares the added time of the most experts over the fewest with the time to read their
    weights."""
    auto = [r for r in lines if r["method"] == "auto"]
    newest = {(r["M"], r["E"]): r["us"] for r in auto}
    fewest, most = min(r["E"] for r in auto), max(r["E"] for r in auto)
    tokens = sorted({m for m, e in newest if {(m, fewest), (m, most)} <= newest.keys()})
    added_us = [newest[m, most] - newest[m, fewest] for m in tokens]
    shares = [f"{100 * us / newest[m, fewest]:.0f}% at {m:,}" for m, us in zip(tokens, added_us, strict=True)]
    gigabytes = (most - fewest) // auto[0]["world"] * weight_bytes(auto[0], matrices=2) / 1e9
    return (
        f"{most} experts take {min(added_us):.0f} to {max(added_us):.0f} us longer than {fewest} ({', '.join(shares)} tokens): a GPU's"
        f" {gigabytes:.1f} GB more of weights take {gigabytes / MEMORY * 1e3:.0f} us at {MEMORY} TB/s, and last tiles are partly empty."
    )


def growths(results: Path) -> str:
    """Return the sentence on the number of experts in FlashMoE's layer with two matrices."""
    by_path = ([r for r in lines_of(path) if UNGATED in r["name"]] for path in sorted(results.glob("*/moe.jsonl")))
    return "\n\n".join(f"On {r[0]['world']} GPUs, of FlashMoE's layer, {growth(r)}" for r in by_path if r)


def scaling(results: Path) -> str:
    """Return the table of us on 1 GPU and on several, with the same number of tokens on each GPU."""
    us: dict[str, dict[int, float]] = {}
    for path in sorted(results.glob("*/moe.jsonl")):
        for r in map(json.loads, path.read_text().splitlines()):
            if r["method"] == "auto" and r["zipf"] == 0:
                us.setdefault(r["name"], {})[r["world"]] = r["us"]
    worlds = sorted({w for by_world in us.values() if 1 in by_world for w in by_world})
    rows = ["| layer, tokens a GPU | " + " | ".join(f"{w} GPU{'s' * (w > 1)}" for w in worlds) + " |"]
    rows.append("| --- |" + " --- |" * len(worlds))
    for name, by_world in us.items():
        if 1 in by_world and len(by_world) > 1:
            cells = [
                f"{by_world[w]:.0f}" + f" ({by_world[w] / by_world[1]:.2f}x)" * (w > 1) if w in by_world else ""
                for w in worlds
            ]
            model, _, tokens = name.rpartition("-")
            rows.append(f"| {model}, {int(tokens):,} | " + " | ".join(cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def overlap_efficiency(results: Path) -> str:
    """Return the table of T(2) / T(N), FlashMoE's overlap efficiency: us on 2 GPUs over us on N, with the same number
    of tokens on each GPU."""
    us: dict[str, dict[int, float]] = {}
    for path in sorted(results.glob("*/moe.jsonl")):
        for r in lines_of(path):
            if r["method"] == "auto" and r["zipf"] == 0:
                us.setdefault(r["name"], {})[r["world"]] = r["us"]
    worlds = sorted({world for by_world in us.values() for world in by_world if world > 2})
    rows = [
        "| layer, tokens a GPU | " + " | ".join(f"{w} GPUs" for w in worlds) + " |",
        "| --- |" + " --- |" * len(worlds),
    ]
    for name, by_world in us.items():
        if 2 in by_world and by_world.keys() & set(worlds):
            model, _, tokens = name.rpartition("-")
            shares = [f"{by_world[2] / by_world[w]:.2f}" if w in by_world else "" for w in worlds]
            rows.append(f"| {model}, {int(tokens):,} | " + " | ".join(shares) + " |")
    return "\n".join(rows) if len(rows) > 2 else NOT_MEASURED


PEERS = ("vllm", "quack", "library, eager")


def beside_peers(results: Path) -> str:
    """Return the table of alternatives over several GPUs: vLLM's and quack's experts between NCCL's collectives, and
    eager PyTorch. The ratio is the fastest one's us over weft's."""
    rows = [f"| GPUs | layer, tokens a GPU | {' | '.join(PEERS)} | weft | ratio | commit |", "| --- |" + " --- |" * 7]
    for path in sorted(results.glob("*/moe.jsonl")):
        newest = {(r["name"], r["zipf"], r["method"]): r for r in lines_of(path)}
        for name, zipf, method in newest:
            peers = [newest.get((name, zipf, peer)) for peer in PEERS]
            if method == "auto" and any(peers):
                auto, (model, _, tokens) = newest[name, zipf, method], name.rpartition("-")
                cells = [f"{r['us']:.0f}" if r else "" for r in (*peers, auto)]
                ratio = min(r["us"] for r in peers if r) / auto["us"]
                layer = f"{model}, {int(tokens):,}{f', Zipf {zipf}' if zipf else ''}"
                rows.append(
                    f"| {path.parent.name} | {layer} | {' | '.join(cells)} | **{ratio:.2f}x** | `{auto['commit'][:8]}` |"
                )
    return "\n".join(rows) if len(rows) > 2 else NOT_MEASURED


def stragglers(results: Path) -> str:
    """Return the table of layers in which one rank begins late: median and 95th percentile of the time to the last
    rank's end."""
    newest: dict[tuple, dict[str, str]] = {}
    methods: dict[str, None] = {}
    for path in sorted(results.glob("*/moe_stragglers.jsonl")):
        for r in lines_of(path):
            methods[r["method"]] = None
            newest.setdefault((path.parent.name, r["name"], r["delay"], r["delay_us"]), {})[r["method"]] = (
                f"{r['us']:.0f} / {r['p95_us']:.0f}"
            )
    rows = [
        "| GPUs | layer | late by, layers | us | " + " | ".join(methods) + " |",
        "| --- |" + " --- |" * (3 + len(methods)),
    ]
    for (machine, name, delay, us), cells in newest.items():
        rows.append(f"| {machine} | {name} | {delay} | {us:.0f} | {' | '.join(cells.get(m, '') for m in methods)} |")
    return "\n".join(rows) if newest else NOT_MEASURED


UNGATED = "-ungated-"
PLANS = {"libraries": "library, beside one launch", "dispatched": "weft dispatched", "low latency": "weft low latency"}


def plans(lines: list[dict]) -> str:
    """Return the table with a row for each size of the runs that time all plans: us of each plan, and of the fused plan
    with its fastest settings."""
    newest = {(r["name"], r["method"]): r["us"] for r in lines}
    rows = ["| layer, tokens a GPU | libraries | dispatched | low latency | fused |", "| --- | --- | --- | --- | --- |"]
    for name in sorted(
        dict.fromkeys(n for n, m in newest if m == PLANS["libraries"]), key=lambda n: -int(n.rpartition("-")[2])
    ):
        fused = min((us for (n, m), us in newest.items() if n == name and m.startswith("weft fused")), default=None)
        every = [*(newest.get((name, method)) for method in PLANS.values()), fused]
        model, _, tokens = name.rpartition("-")
        rows.append(
            f"| {model}, {int(tokens):,} | " + " | ".join("" if us is None else f"{us:.0f}" for us in every) + " |"
        )
    return "\n".join(rows)


def of_all_plans(results: Path) -> str:
    """Return the runs that time all plans, with balanced routing."""
    parts = []
    for path in sorted(results.glob("*/moe.jsonl")):
        lines = [r for r in lines_of(path) if r["zipf"] == 0 and UNGATED not in r["name"]]
        if any(r["method"] == PLANS["libraries"] for r in lines):
            parts.append(f"{lines[0]['world']} GPUs ({path.parent.name}), us:\n\n{plans(lines)}")
    return "\n\n".join(parts)


def page(results: Path) -> str:
    parts = []
    for path in sorted(results.glob("*/moe.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        every = f"{lines[0]['world']} GPU{'s' * (lines[0]['world'] > 1)} ({path.parent.name})"
        for zipf in sorted({r["zipf"] for r in lines}):
            routing = "balanced random routing" if zipf == 0 else f"routing by Zipf's law ({zipf})"
            some = [r for r in lines if r["zipf"] == zipf and UNGATED not in r["name"]]
            where = f"{every}, {routing}, us"
            parts.append(f"{where}:\n\n{table(some)}")
        ungated = [r for r in lines if UNGATED in r["name"]]
        if ungated:
            setup = "FlashMoE's experts as its paper has them (H = I = 2048, k = 2, GELU of two matrices, not gated)"
            parts.append(f"{every}, {setup}, us of weft, and of the libraries:\n\n{experts(ungated)}")
    grown = scaling(results)
    return "\n\n".join([*parts, *([f"With as many tokens on each GPU, us:\n\n{grown}"] if grown else [])])


def stamps(results: Path) -> str:
    """Return the table of the shares of each task in the one launch of fused calls."""
    kinds = ("sending", "GEMM 1", "GEMM 2", "sums", "own sums")
    rows = [
        "| GPUs | layer, tokens a GPU | plan | us | in tasks | " + " | ".join(kinds) + " |",
        "| --- |" + " --- |" * 9,
    ]
    newest: dict[tuple, dict] = {}
    for path in sorted(results.glob("*/moe_stamps.jsonl")):
        for line in path.read_text().splitlines():
            r = json.loads(line)
            newest[path.parent.name, r["name"], r["method"]] = r
    for r in newest.values():
        model, _, tokens = r["name"].rpartition("-")
        shares = " | ".join(f"{100 * r[kind]:.0f}%" for kind in ("in_tasks", *kinds))
        rows.append(f"| {r['world']} | {model}, {int(tokens):,} | {r['method']} | {r['us']:.0f} | {shares} |")
    return "\n".join(rows) if newest else NOT_MEASURED


def in_parts(lines: list[dict]) -> str:
    """Return the table with a row for each size and op: us of the library and of weft, their ratio, and weft's share of the
    limit; means by op."""
    rows = ["| layer (H, I, E, k) | op | libraries | weft | ratio | limit | of the limit |", "| --- |" + " --- |" * 6]
    newest = {(r["name"], r["op"], r["method"]): r for r in lines}
    pairs_by_op: dict[str, list[tuple[float, float]]] = {}
    for (name, op, method), auto in newest.items():
        library = newest.get((name, op, "library"))
        if method != "auto" or library is None:
            continue
        ratio, share = library["us"] / auto["us"], auto["limit_us"] / auto["us"]
        pairs_by_op.setdefault(op, []).append((ratio, share))
        sizes = f"{name} ({auto['K']}, {auto['N']}, {auto['E']}, {auto['top_k']})"
        rows.append(
            f"| {sizes} | {op} | {library['us']:.0f} | {auto['us']:.0f} | **{ratio:.2f}x** | {auto['limit_us']:.0f} | {100 * share:.0f}% |"
        )
    for op, pairs in pairs_by_op.items():
        lowest, least = min(ratio for ratio, _ in pairs), min(share for _, share in pairs)
        rows += [
            "",
            f"- `{op}`: geometric mean **{geometric(ratio for ratio, _ in pairs):.2f}x**, lowest {lowest:.2f}x, at least {100 * least:.0f}% of the limit.",
        ]
    return "\n".join(rows)


def page_in_parts(results: Path, sizes: bool = True) -> str:
    """Return the section on experts in two parts. sizes: with a line for each size, and not only the means."""
    parts = []
    for path in sorted(results.glob("*/moe_tensor.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for world, tokens in sorted({(r["world"], -r["M"]) for r in lines}):
            some = [r for r in lines if r["world"] == world and r["M"] == -tokens]
            text = in_parts(some)
            text = text if sizes else "\n".join(line for line in text.splitlines() if line.startswith("- "))
            parts.append(f"{world} GPUs ({path.parent.name}), {-tokens:,} tokens in all{', us' * sizes}:\n\n{text}")
            alone = [r["tables_us"] for r in some if "tables_us" in r]
            if alone and sizes:
                parts.append(
                    f"The tables alone, of which the limit knows nothing: {min(alone):.0f} to {max(alone):.0f} us."
                )
    return "\n\n".join(parts) or NOT_MEASURED


def memory_table() -> str:
    """Return the table of MiB per rank for FlashMoE's sizes on 8 GPUs, by tokens per GPU and experts; computed, not
    measured."""
    ranks = SimpleNamespace(size=8)
    rows = [
        "| tokens a GPU | experts | symmetric | tables | experts' rows, worst case | `max_rows` 25% above an even share |",
        "| --- |" + " --- |" * 5,
    ]
    for tokens in (4096, 16384):
        for experts in (16, 128):
            layer = Layer(tokens, experts, 2, 2048, 2048, torch.bfloat16)
            worst = memory(ranks, layer, FusedMoe.tile.block_m)  # type: ignore[arg-type]
            even = memory(ranks, replace(layer, max_rows=tokens * 2 * 5 // 4), FusedMoe.tile.block_m)  # type: ignore[arg-type]
            mib = [f"{n / 2**20:,.0f}" for n in (worst.symmetric, worst.tables, worst.scratch, even.scratch)]
            rows.append(f"| {tokens:,} | {experts} | " + " | ".join(mib) + " |")
    return "\n".join(rows)


TRAINED = "library", "weft, keep nothing", "weft, keep rows", "weft, keep activation"


def training(results: Path, backward: bool = False) -> str:
    """Return the table with a row for each layer: us and TFLOP/s a GPU of each method, of forward and backward pass. backward: also of
    the backward pass alone."""
    parts = []
    for path in sorted(results.glob("*/moe_training.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        newest = {(r["name"], r["op"], r["method"]): r for r in lines}
        heads = [
            "layer, tokens a GPU",
            *["pass"] * backward,
            "libraries",
            *(m.removeprefix("weft, ") for m in TRAINED[1:]),
        ]
        rows = [f"| {' | '.join(heads)} |", "| --- |" + " --- |" * (len(heads) - 1)]
        for name, op in dict.fromkeys((r["name"], r["op"]) for r in lines if backward or r["op"] != "moe_backward"):
            stored = (newest.get((name, op, method)) for method in TRAINED)
            cells = ["" if r is None else f"{r['us']:.0f} us, {r['tflops']:.0f}" for r in stored]
            passes = "backward" if op == "moe_backward" else "forward and backward"
            layer = name.replace("-tensor-", ", columns over ranks, ") if "-tensor-" in name else name
            rows.append(f"| {' | '.join([layer, *[passes] * backward, *cells])} |")
        parts.append(f"{lines[0]['world']} GPUs ({path.parent.name}):\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def between(text: str, begin: str, end: str, block: str) -> str:
    return f"{text.split(begin)[0]}{begin}\n{block}\n{end}{text.split(end)[1]}"


def filled(text: str, results: Path) -> str:
    text = between(text, BEGIN, END, f"{one_gpu_table(results)}\n\n{growths(results)}")
    text = between(text, LAUNCHES, LAUNCHES_END, launches(results))
    text = between(text, MEMORY_BEGIN, MEMORY_END, memory_table())
    text = between(text, TRAINING, TRAINING_END, training(results))
    return between(text, IN_PARTS, IN_PARTS_END, page_in_parts(results, sizes=False))


HEAD = """# Mixtures of experts

"libraries" are those of [the page](../../docs/moe.md#what-it-reaches). Sizes are hidden, inner, experts and experts of a token. "limit" is
the largest of the experts' FLOPs at 700 TFLOP/s, the bytes of the weights touched at 4.3 TB/s, and the bytes of dispatch or combine at the
link's measured rate; "parts alone" are both grouped GEMMs alone, or the bytes where those take longer, and before them the router and the
tables.
"""


def chapter(results: Path) -> str:
    """Return the tables of every size."""
    sections = {
        "Whole layers, forward": page(results),
        "One GPU, beside vLLM's fused experts, quack's grouped GEMMs and torch": one_gpu_sizes(results),
        "Plan by plan": of_all_plans(results),
        "Columns of every expert over the ranks": page_in_parts(results),
        "Over several GPUs, beside vLLM's experts, quack's and eager PyTorch, us": beside_peers(results),
        "T(2) / T(N), of as many tokens a GPU": overlap_efficiency(results),
        "One rank late, median / 95th percentile, us": stragglers(results),
        "Training": training(results, backward=True),
        "Where the time of the one launch goes, of calls that are launched one by one": stamps(results),
    }
    return "\n".join([HEAD, *(f"## {title}\n\n{text}\n" for title, text in sections.items())])
