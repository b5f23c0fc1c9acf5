"""The tables of docs/moe.md on experts on one GPU, compared with libraries and in one launch, and the tables of every
size in bench/results/moe.md. They come from moe_one_gpu.jsonl, moe_launches.jsonl and sm_active.jsonl in
bench/results/<machine>. Scripts of the commits that the rows name counted the launches with torch.profiler and the
active cycles of SMs with NVIDIA's profiler.

The newest row of a name, method and routing, which is the last in the file, counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean

from bench.measure.moe import MEMORY, RATE
from bench.pages.report import HASH
from bench.pages.tables import Rows, by_machine, grid, lines_of

Ratios = dict[int, dict[str, float]]  # by number of tokens and model

# Methods, in the order of the columns.
ONE_LAUNCH = "weft, one launch"
LIBRARIES = ("torch", "torch compiled", "vllm", "quack")
METHODS = (*LIBRARIES, "weft", ONE_LAUNCH)
TITLES = {"vllm": "vLLM", "quack": "quack"}
BELOW = 0.995  # smaller ratios count as below 1.0x


def by_tokens(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))


def ratios_over(us: dict[str, float], weft: dict[str, float]) -> Ratios:
    """Return weft's speedup for each name for which both times were measured."""
    ratios: Ratios = {}
    for name in by_tokens(us.keys() & weft.keys()):
        model, _, tokens = name.rpartition("-")
        ratios.setdefault(int(tokens), {})[model] = us[name] / weft[name]
    return ratios


def times(lines: Rows, method: str) -> dict[str, float]:
    """Return the us by name, with uniform routing."""
    return {r["name"]: r["us"] for r in lines if r["zipf"] == 0 and r["method"] == method}


def fastest_library(lines: Rows) -> dict[str, tuple[float, str]]:
    """Return the us of the fastest library and its name, by name of the size."""
    fastest: dict[str, tuple[float, str]] = {}
    for method in LIBRARIES:
        for name, us in times(lines, method).items():
            fastest[name] = min(fastest.get(name, (us, method)), (us, method))
    return fastest


def beside_fastest(lines: Rows) -> Ratios:
    """Return weft's speedup over the fastest library of each size."""
    return ratios_over({name: us for name, (us, _) in fastest_library(lines).items()}, times(lines, "weft"))


def one_gpu(lines: Rows, method: str) -> Ratios:
    """Return weft's speedup over the method."""
    return ratios_over(times(lines, method), times(lines, "weft"))


def one_gpu_table(results: Path) -> str:
    """Return a table for each GPU, the GPU with the most libraries first: weft's speedup over each library, and over
    the fastest library."""
    parts = []
    for machine, lines in by_machine(results, "moe_one_gpu.jsonl").items():
        over = {title: one_gpu(lines, method) for method, title in TITLES.items()}
        named = {title: ratios for title, ratios in over.items() if ratios}
        if named:
            commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(r["commit"][:HASH] for r in lines))
            gpu = f"{machine.rpartition('-x')[0]}, {commits}"
            remarks = " ".join(filter(None, (below(lines), skewed(lines))))
            text = f"{gpu}:\n\n{ratio_rows(named, beside_fastest(lines))}\n\n{remarks}"
            parts.append((-len(named), text.rstrip()))
    return "\n\n".join(text for _, text in sorted(parts))


def ratio_rows(over: dict[str, Ratios], fastest: Ratios) -> str:
    """Return a row for each number of tokens: the mean speedup over each library, by name of the library, and over the
    fastest library of each size, with the smallest of the latter."""
    columns = over | ({"the fastest": fastest} if len(over) > 1 else {})
    heads = ["tokens", *(f"over {title}" for title in columns), "lowest"]
    rows = []
    for tokens, ratios in sorted(fastest.items()):
        means = [column.get(tokens) for column in columns.values()]
        cells = [f"**{geometric_mean(mean.values()):.2f}x**" if mean else "" for mean in means]
        least, model = min((ratio, model) for model, ratio in ratios.items())
        rows.append([f"{tokens:,}", *cells, f"{least:.2f}x ({model})"])
    return grid(heads, rows)


def weight_bytes(row: dict, matrices: int = 3) -> int:
    """Return the bytes of one expert of a row's layer, in bf16."""
    return 2 * matrices * int(row["K"]) * int(row["N"])


def gigabytes_read(row: dict) -> float:
    """Return the expected GB of the weights of all experts that receive a token, if each token chooses top_k of E
    experts with equal probability."""
    touched = row["E"] * (1 - (1 - row["top_k"] / row["E"]) ** row["M"])
    return float(touched * weight_bytes(row) / 1e9)


def teraflop(row: dict) -> float:
    return float(row["M"] * row["top_k"] * weight_bytes(row) / 1e12)  # 2 bytes per element


def skewed(lines: Rows) -> str:
    """Return the range of speedups over the fastest library with routing by Zipf's law, by number of tokens; "" if none
    were measured."""
    ratios = beside_fastest([r | dict(zipf=0) for r in lines if r["zipf"] != 0])
    parts = [
        f"{min(by_model.values()):.2f}x to {max(by_model.values()):.2f}x at {tokens:,} tokens"
        for tokens, by_model in sorted(ratios.items())
    ]
    return f"With routing by Zipf's law: {', '.join(parts)}." if parts else ""


def reads_bound(row: dict) -> bool:
    """Return whether reading the weights takes longer than computing the FLOPs, at the rates of an H200."""
    return gigabytes_read(row) / MEMORY > teraflop(row) / RATE * 1e3


def spread(values: Iterable[float]) -> str:
    known = sorted(f"{value:.1f}" for value in values)
    return known[0] if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def below(lines: Rows) -> str:
    """Return the sentence on the sizes at which weft is slower than the fastest library: the bound of these sizes, and
    the rates of both."""
    library, sizes = fastest_library(lines), {r["name"]: r for r in lines if r["zipf"] == 0}
    weft = {name: us for name, us in times(lines, "weft").items() if name in library}
    slower = [name for name in by_tokens(weft) if library[name][0] / weft[name] < BELOW]
    reads, computes = ([name for name in slower if reads_bound(sizes[name]) is bound] for bound in (True, False))
    reasons = []
    if reads:
        rates = [spread(gigabytes_read(sizes[n]) / us[n] * 1e3 for n in reads) for us in (weft, firsts(library))]
        most = max(sizes[name]["M"] for name in reads)
        reasons.append(
            f"{len(reads)} size{'s' * (len(reads) > 1)} of up to {most:,} tokens, bound by weights, read {rates[0]} TB/s (the library: {rates[1]})"
        )
    for name in computes:
        us, method = library[name]
        model, tokens = name.rpartition("-")[0], tokens_of(name)
        rates = [f"{teraflop(sizes[name]) / t * 1e6:.0f}" for t in (weft[name], us)]
        reasons.append(
            f"{model} of {tokens} tokens, bound by FLOPs, computes {rates[0]} TFLOP/s ({TITLES.get(method, method)}: {rates[1]})"
        )
    return f"Below 1.0x: {'; '.join(reasons)}." if reasons else ""


def firsts(pairs: dict[str, tuple[float, str]]) -> dict[str, float]:
    return {name: us for name, (us, _) in pairs.items()}


def one_gpu_sizes(results: Path) -> str:
    """Return the times in us by size and method, in a table for each GPU and routing."""
    parts = []
    for machine, lines in by_machine(results, "moe_one_gpu.jsonl").items():
        for zipf in sorted({r["zipf"] for r in lines}):
            routing = "" if zipf == 0 else f", routing by Zipf's law ({zipf})"
            table = one_gpu_rows([r for r in lines if r["zipf"] == zipf])
            parts.append(f"{machine}{routing}, us:\n\n{table}")
    return "\n\n".join(parts)


def one_gpu_rows(lines: Rows) -> str:
    us = {(r["name"], r["method"]): r["us"] for r in lines}
    commits = {r["name"]: r["commit"][:HASH] for r in lines if r["method"] == "weft"}
    methods = [m for m in METHODS if any(method == m for _, method in us)]
    over = [m for m in ("vllm", "quack") if m in methods]
    heads = ["layer, tokens", *methods, *(f"{m} / weft" for m in over), "commit"]
    rows = []
    for name in sorted({n for n, _ in us}, key=lambda n: (n.rpartition("-")[0], int(n.rpartition("-")[2]))):
        cells = [f"{us[name, m]:.0f}" if (name, m) in us else "" for m in methods]
        pairs = [(us.get((name, m)), us.get((name, "weft"))) for m in over]
        cells += [f"{library_us / weft_us:.2f}x" if library_us and weft_us else "" for library_us, weft_us in pairs]
        rows.append([name, *cells, f"`{commits[name]}`"])
    return grid(heads, rows)


# By the title of the row: its method in moe_launches.jsonl, in sm_active.jsonl and in moe_one_gpu.jsonl.
LAUNCHES = {
    "one launch": (ONE_LAUNCH, "one launch", ONE_LAUNCH),
    "`FusedMoe()`": ("weft fused", "fused", ""),
    '`"auto"`': ("weft auto", "weft", "weft"),
    "torch": ("torch", "torch", "torch"),
    "NCCL, torch": ("library", "", ""),
}
LAUNCHED = "Qwen3-30B"


def launches(results: Path) -> str:
    """Return the table of the number of kernels, active SMs and us by plan for one layer with its router, and the time
    of the plan of one launch compared with "auto"."""
    parts = []
    for path in sorted(results.glob("*/moe_launches.jsonl")):
        kernels = {(r["name"], r["method"]): r for r in lines_of(path)}
        active = {(r["name"], r["method"]): r["active"] for r in lines_of(path.with_name("sm_active.jsonl"))}
        lines = lines_of(path.with_name("moe_one_gpu.jsonl"))
        counted, watched = (
            by_tokens({name for name, _ in rows if name.startswith(f"{LAUNCHED}-")}) for rows in (kernels, active)
        )
        timed = counted[-1]
        heads = [f"kernels, {tokens_of(name)}" for name in counted] + [f"SMs active, {tokens_of(n)}" for n in watched]
        heads = [f"{LAUNCHED}, tokens", *heads, f"us, {tokens_of(timed)}"]
        rows = []
        for title, (launched, profiled, method) in LAUNCHES.items():
            counts = [kernels[name, launched] for name in counted]
            cells = [f"{r['kernels']}" + f" + {r['copies']}" * (r["copies"] > 0) for r in counts]
            cells += [f"{100 * active[n, profiled]:.1f}%" if (n, profiled) in active else "" for n in watched]
            us = times(lines, method).get(timed)
            rows.append([title, *cells, "" if us is None else f"{us:.0f}"])
        parts.append(f"{grid(heads, rows)}\n\n{beside_auto(lines)}")
    return "\n\n".join(parts)


def tokens_of(name: str) -> str:
    return f"{int(name.rpartition('-')[2]):,}"


def beside_auto(lines: Rows) -> str:
    """Return the sentence on the ratio of the time of one launch to the time of "auto", by number of tokens."""
    over = ratios_over(times(lines, ONE_LAUNCH), times(lines, "weft"))
    ends = [(tokens, [100 * (r - 1) for r in ratios.values()]) for tokens, ratios in over.items()]
    spreads = [f"{min(percents):+.0f} to {max(percents):+.0f}% at {tokens:,}" for tokens, percents in ends]
    return f'Time of one launch beside that of `"auto"`, all layers, by tokens: {", ".join(spreads)}.'
