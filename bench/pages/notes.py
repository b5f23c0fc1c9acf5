"""The figures of docs/design-notes.md, which is written by hand: what stands between `<!--NAME-->` and `<!--/-->` there is FIGURES[NAME],
computed from the logs of single experiments in bench/results/<machine>/experiments and from the benchmark's own rows. bench/pages/pages.py
fills them in."""

from __future__ import annotations

import ast
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from bench.pages import report, signaled_page
from weft.planner.profile import shipped

RESULTS = Path(__file__).parents[1] / "results"
ONE_H100 = "nvidia-h100-x1"
MARK = re.compile(r"<!--([a-z][a-z0-9-]*)-->.*?<!--/-->", re.S)


def fill(text: str) -> str:
    """Return the page with today's figures."""
    return MARK.sub(lambda m: f"<!--{m[1]}-->{FIGURES[m[1]]()}<!--/-->", text)


# -- reading -----------------------------------------------------------------------------------------------------------
def log(machine: int | str, name: str) -> list[str]:
    """Return the lines of a log. machine: how many H200s, or its name."""
    folder = f"nvidia-h200-x{machine}" if isinstance(machine, int) else machine
    return (RESULTS / folder / "experiments" / name).read_text().splitlines()


def rows(machine: int | str, name: str) -> list[dict]:
    return [json.loads(line) for line in log(machine, name)]


def parts(start: str, shape: str = "MLP-1") -> dict[str, float]:
    """Return the times by label from a line `START SHAPE [graph] [12s] label us | label us ..` of 8 GPUs."""
    for line in log(8, "roles-and-copies.log"):
        if m := re.fullmatch(rf"{start} {shape}(?: graph)? \[\d+s\] (.*)", line):
            return {q: float(us) for q, us in (part.rsplit(" ", 1) for part in m[1].split(" | "))}
    raise KeyError(start)


def variants(name: str, shape: str = "MLP-1", op: str = "matmul_reduce_scatter") -> dict[str, float]:
    """Return, for 4 GPUs, the times of one op's variants by label."""
    (row,) = (r for r in rows(4, name) if (r["op"], r["name"], r["mode"]) == (op, shape, "graph"))
    return row["times"]


def dicts(machine: int, name: str, pattern: str) -> dict[tuple[str, ...], dict[str, float]]:
    """Return, for every line that matches, the times that follow the pattern, by its groups."""
    matches = ((re.match(pattern, line), line) for line in log(machine, name))
    return {m.groups(): ast.literal_eval(line[m.end() :]) for m, line in matches if m}


# -- saying ------------------------------------------------------------------------------------------------------------
def us(value: float) -> str:
    return (
        f"{value:.1f} us"
        if value < 20 and isinstance(value, float)
        else f"{value / 1000:.1f} ms"
        if value >= 10000
        else f"{value:,.0f} us"
    )


def percent(ratios: Iterable[float]) -> str:
    """Return by how many per cent some times are above or below others: the geometric mean of their ratios."""
    ratio = math.exp(fmean(map(math.log, ratios)))
    return f"{abs(100 * (ratio - 1)):.0f}% {'more' if ratio > 1 else 'less'}"


def span(values: Iterable[float], form: Callable[[float], str]) -> str:
    low, high = form(min(known := list(values))), form(max(known))
    return low if low == high else f"{low} to {high}"


def x(value: float) -> str:
    return f"{value:.2f}x"


# -- experiments -------------------------------------------------------------------------------------------------------


def eager_copies() -> str:
    """Return the us of MLP-1's eager all-gather + GEMM on 8 GPUs, pulled by a copy engine."""
    path = RESULTS / "nvidia-h200-x8/tuning/x8-4.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    (row,) = (r for r in stored if (r["op"], r["name"], r["mode"]) == ("all_gather_matmul", "MLP-1", "eager"))
    plans = {text: json.loads(text) for text in row["times"] if text.startswith("{")}
    return us(min(row["times"][t] for t, p in plans.items() if p.get("class") == "FusedGatherByCopies"))


def same_stream(mode: str) -> str:
    """Return how much longer flags on the copies' stream make a call than flags on another stream, two programs an SM."""
    times = dicts(4, "signals-and-groups.log", r"\d+s (\w+) (\d+) (\d+) (\d+) ")
    return percent(t["two same"] / t["two"] for (m, *_), t in times.items() if m == mode)


def few_programs(*methods: str) -> str:
    """Cells of a table: of one method or, where it has two, of the faster."""
    stored = [r for r in rows("nvidia-h100-x2", "norm-programs.jsonl") if r.get("M") == 4096]
    return " | ".join(
        f"{min(r['us'] for r in stored if r['method'] in methods and r['programs'] == programs):,.0f}"
        for programs in (8, 16, 32, 132)
    )


def nccl_alone() -> str:
    """It stands in the log alone: the rows are weft's."""
    (time,) = (
        m[1]
        for line in log("nvidia-h100-x2", "norm-programs.log")
        if (m := re.search(r"4096 .* NCCL alone (\d+) us", line))
    )
    return f"{time} us"


def grouped_all_reduce(way: str) -> str:
    """Return how much longer an all-reduce by groups takes than the one whose copies push and pull, each with its better
    grouping."""
    best = [{q: min(r["us"][f"{q} 528 "], r["us"][f"{q} 528 w"]) for q in ("copy", "store", "pull")} for r in rows(2, "reduced-groups.jsonl")]  # fmt: skip
    return percent(us[way] / us["copy"] for us in best)


def signaled(op: str, machine: int, copies: bool) -> str:
    """Return the mean speedup of the best signaled plans over cuBLAS + NCCL."""
    cases = signaled_page.op_cases(signaled_page.machines()[f"nvidia-h200-x{machine}"])[op]
    best = ((methods["sequential"]["us"], signaled_page.fastest(methods, copies)) for methods in cases.values())
    return x(report.mean(base / row["us"] for base, row in best if row) or 0)


def signals(variant: str) -> str:
    """Return the us that a GEMM with signals takes beyond the same loop without, the smallest shape."""
    row = next(r for r in rows(1, "gemm-signals.jsonl") if r["run"] == "start")
    return us(row["us"][f"{variant} o1"] - row["us"]["plain"])


def fences() -> str:
    """Return by how much lighter fences shortened fused sums."""
    sums = [r["us"] for r in rows(2, "fences.jsonl") if r["what"].startswith("matmul")]
    return span((100 * (1 - t["after fused"] / t["before fused"]) for t in sums), lambda v: f"{v:.1f}%")


def low_latency_rows(tokens: Sequence[int]) -> str:
    """Return the speedup of low-latency rows over counted ones with the lighter fences, two shots."""
    times = {int(r["what"].split()[1]): r["us"] for r in rows(2, "posted-rows.jsonl")}
    return span((times[n]["fences two"] / times[n]["posted post 16"] for n in tokens), x)


def collectives(kib: Sequence[int]) -> str:
    """Return the times of the library's collectives over those of low-latency rows, 2 GPUs, from the profile."""
    profile = shipped("nvidia-h200-x2")
    assert profile is not None
    known = {(t.operation, t.nbytes): t.us for t in profile.latencies if not t.ctas}
    whats = ("all_gather", "reduce_scatter", "all_reduce")
    return span((known[w, n << 10] / known[f"one_shot {w}", n << 10] for w in whats for n in kib), x)


def tiles(way: str, label: str, shape: str = "2048 2560 8192") -> str:
    (line,) = (line for line in log(1, "shared-tiles.log") if line.startswith(f"{way} {shape} "))
    return us(float(re.search(rf"{label} ([\d.]+)", line)[1]))  # type: ignore[index]


def serialized() -> str:
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for line in log(1, "shared-tiles.log"):
        way, m, n, k, *rest = line.split()
        times[f"{m} {n} {k}"][way] = float(rest[rest.index("shared") + 1])
    return percent(
        t["serialized"] / t["continuous"] for t in times.values() if {"serialized", "continuous"} <= t.keys()
    )


def moe(method: str) -> str:
    """Return the time of an MoE layer whose small programs divided the SMs' memory, by the method of the experiment."""
    times = {r["method"]: r["us"] for r in rows(2, "moe-memory-divided.jsonl") if r["name"] == "Qwen3-30B-8192"}
    return us(times[method])


def one_launch(**settings: object) -> str:
    """Return the time of an MoE layer by the plan of these settings, or, without any, by the one that "auto" takes."""
    for r in rows(2, "moe-one-launch.jsonl"):
        plan = json.loads(r["method"]) if r["method"].startswith("{") else {}
        named = {key: plan.get(key) for key in ("kind", "pullers", "block_n", "group_m") if key in plan}
        if r["name"] == "Qwen3-30B-8192" and (named == settings if settings else r["method"] == "auto"):
            return us(r["us"])
    raise KeyError(settings)


def moe_now() -> str:
    path = RESULTS / "nvidia-h200-x2/moe.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    return us([r["us"] for r in stored if (r["name"], r["method"], r["zipf"]) == ("Qwen3-30B-8192", "auto", 0.0)][-1])


FEW_MODELS = "Qwen3-30B", "GPT-OSS-120B", "DeepSeek-V3"
FEW = {  # forms of moe-few-rows.jsonl, in run 2
    "steps of 64": dict(plan="low latency", block_m=16, block_k=64, stages=4, waves=1),
    "low latency": dict(plan="low latency", block_m=16, block_k=128, stages=3, warps=4, waves=1),
    "64 x 256": dict(block_m=64, block_n=256, block_k=64),
    "64 x 128": dict(plan="dispatched", block_m=64, block_k=128, warps=4, group_m=4),
    "32 x 128": dict(plan="dispatched", block_m=32, block_k=128, stages=3),
}


def few_rows(form: str, than: str, *names: str) -> str:
    """Return how much longer an MoE layer takes on one H100 in one of the forms FEW than in another."""
    stored = [r for r in rows(ONE_H100, "moe-few-rows.jsonl") if r["run"] == 2]

    def time_of(name: str, kind: str) -> float:
        (us_of_form,) = [
            r["us"] for r in stored if r["name"] == name and all(r.get(k) == v for k, v in FEW[kind].items())
        ]
        return float(us_of_form)

    return percent(time_of(name, form) / time_of(name, than) for name in names)


def in_parts(method: str, op: str = "moe_tp", than: str = "auto") -> str:
    """Return how much longer than by `than` layers take whose experts' columns are split, on 2 GPUs."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for r in rows(2, "moe-in-parts.jsonl"):
        if r["op"] == op:
            times[r["name"]][r["method"]] = r["us"]
    return percent(t[method] / t[than] for t in times.values())


def layers(name: str, method: str, than: str) -> str:
    """Return how much longer whole MoE layers of 8,192 tokens take by `method` than by `than`, on 2 GPUs, in one experiment."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for r in rows(2, name):
        if r["name"].endswith("-8192"):
            times[r["name"]][r["method"]] = r["us"]
    return percent(t[method] / t[than] for t in times.values() if method in t)


def grouped(half: str, run: str, method: str, than: str, *names: str) -> str:
    """Return how much longer the "first" or "second" grouped GEMM of an MoE layer takes alone by `method` than by `than`, in one
    run."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for r in rows(1, "grouped-gemms.jsonl"):
        if (r["half"], r["run"]) == (half, run) and (not names or r["name"] in names):
            times[r["name"]][r["method"]] = r["us"]
    return percent(t[method] / t[than] for t in times.values())


def decoder(tokens: int, way: str) -> str:
    for line in log(4, "decoder-norms.log"):
        if f"70B-prefill-{tokens} " in line:
            for part in line.split(": ", 1)[1].split(" | "):
                name, _, ratio = part.rsplit(" ", 2)
                if name == way:
                    return x(float(ratio[1:-2]))
    raise KeyError(way)


def mix(method: str, key: str) -> str:
    """Return the clock in the newest run of the Azure mix on 4 GPUs, or how many times as fast as sequential layers it was."""
    path = RESULTS / "nvidia-h200-x4/decoder.jsonl"
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    methods = {r["method"]: r for r in stored if r["name"] == "70B-Azure"}
    if key == "clock":
        return f"{methods[method]['sm_mhz']} MHz"
    return x(methods["sequential"]["us"] / (methods[method]["gemm_us"] if key == "bound" else methods[method]["us"]))


def serves(method: str, mode: str = "eager") -> str:
    """Return the tokens a second of continuous batching on 2 GPUs, in the newest run."""
    stored = [json.loads(line) for line in (RESULTS / "nvidia-h200-x2" / "hf.jsonl").read_text().splitlines()]
    rates = [r["tokens_s"] for r in stored if "tokens_s" in r and (r["method"], r["mode"]) == (method, mode)]
    return f"{rates[-1]:,.0f} tokens a second"


def short(when: str) -> str:
    (row,) = (r for r in rows(4, "short-curves.jsonl") if r["what"] == "one_shot all_reduce")
    return us(row[when]["524288"])


OWN = "own sums from the rows"
CHAINS = {t: v for (t,), v in dicts(2, "copy-chains.log", r"(\d+) MB x7 graph ").items()}
RS = "matmul_reduce_scatter"
# -- attention, 2 GPUs, 32 heads, 16,384 rows without a mask ---------------------------------------------------------------
ATTENTION = {
    "one": "compute alone",
    "two": "two halves",
    "sequential": "nccl+cudnn",
    "beside": "today, 1, beside",
}


def attention_times(name: str) -> dict[str, float]:
    if name == "attention-parts.jsonl":
        return rows(2, name)[0]["us"]
    times = {r["method"]: r["us"] for r in rows(2, name) if r["name"] == "32x32-16384-none"}
    return times | {"nccl": times["communication alone"]}


def attention_parts(part: str) -> str:
    return us(attention_times("attention-parts.jsonl")[part])


def hidden(name: str, method: str) -> str:
    times = attention_times(name)
    return f"{100 * (times['compute alone'] + times['nccl'] - times[method]) / times['nccl']:.0f}%"


BACKWARD = (("all_gather_matmul", 14336, 8192), ("all_gather_matmul", 4096, 8192),
            ("matmul_reduce_scatter", 8192, 28672), ("matmul_reduce_scatter", 8192, 5120))  # fmt: skip


def trained(method: str) -> list[float]:
    """Return the us of the four calls of a backward pass of Llama-70B's layer, 16,384 tokens on two GPUs."""
    times = {(r["op"], r["N"], r["K"], r["method"]): r["us"] for r in rows(2, "training-calls.jsonl")}
    return [times[*call, method] for call in BACKWARD]


def spread(ours: Sequence[float], others: Sequence[float]) -> str:
    """Return the least and the largest ratio."""
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    return f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x"


def own_attention() -> str:
    """Return cuDNN's time over that of the best form of a kernel of our own, without a mask."""
    times = [r["us"] for r in rows(ONE_H100, "attention-own.jsonl") if not r["name"].endswith("causal")]
    shares = sorted({f"{100 * us['cudnn'] / min(t for q, t in us.items() if q != 'cudnn'):.0f}%" for us in times})
    return shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"


def gathered(method: str) -> float:
    """Return the us of attention, for 32 heads and 16,384 rows without a mask, of two GPUs."""
    lines = (RESULTS / "nvidia-h200-x2/attention.jsonl").read_text().splitlines()
    times = {r["method"]: r["us"] for r in map(json.loads, lines) if r["name"] == "32x32-16384-none"}
    return times[method]


def own_needs(method: str) -> str:
    """Return the share of the library's speed that is enough for a kernel that hides all communication to be as fast as
    `method`."""
    return f"{100 * gathered('compute alone') / gathered(method):.0f}%"


# By loop, the forms of tiles (bench/measure/gemm.py).
USUAL, HALF = "128x256 w8 s3 x1", "64x256 w4 s5 x1"


def forms(form: str, over: str, low: float, high: float, loop: str = "flat") -> list[float]:
    """Return times over those of another form, or of cuBLAS, of all shapes of `low` to `high` waves of 128 x 256 tiles on 132
    SMs."""
    label = lambda q: q if q in ("cuBLAS", "shared") else f"{loop} {q}"  # noqa: E731
    ratios = []
    for r in rows(1, "tile-forms.jsonl"):
        waves = -(-r["M"] // 128) * -(-r["N"] // 256) / 132
        if low <= waves <= high and label(form) in r["us"]:
            ratios.append(r["us"][label(form)] / r["us"][label(over)])
    return ratios


def apart() -> str:
    """Return by how much the ratio of two forms differs, at most, between two runs of one shape of many waves."""
    ratios: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for r in rows(1, "tile-forms.jsonl"):
        ratios[r["M"], r["N"], r["K"]].append(r["us"][f"flat {HALF}"] / r["us"][f"flat {USUAL}"])
    return f"{100 * (max(max(v) / min(v) for v in ratios.values()) - 1):.0f}%"


def in_ops(low: float, high: float) -> str:
    """Return the time of whole ops in half tiles over the usual ones, every op and way to move, at so many waves."""
    ratios = []
    for r in rows(2, "tile-plans.jsonl"):
        if low <= -(-r["M"] // 128) * -(-r["N"] // 256) / 132 <= high:
            ratios += [r["us"][f"{way} half"] / r["us"][f"{way} usual"] for way in r["chosen"]]
    return span(ratios, x)


def promoted_loop(form: str, recipe: str = "block") -> str:
    """Return DeepGEMM's time, or torch's with promoted sums by row ("slow"), over that of a loop of 8-bit operands, of all
    sizes."""
    library = {"block": "deep_gemm", "slow": "torch"}[recipe]
    us = [r["us"] for r in rows(1, "fp8-block-forms.jsonl")]
    return span((t[f"{recipe}: {library}"] / t[f"{recipe}: weft {form}"] for t in us), x)


LOOPS = {
    "tall": "128x128 w8 s4 x1 nested",
    "halves": "128x128 w4 s3 x2 halves",
    "specialized": "128x128 w4 s2 x1 unrolled specialized",
}


# -- guarded loads, and kernels around the router, on one H100 ---------------------------------------------------------
def guard_row() -> dict:
    (row,) = map(json.loads, (RESULTS / ONE_H100 / "guarded.jsonl").read_text().splitlines())
    return row


def guard_time(form: str) -> str:
    """Return the time of a GEMM that waits with guarded loads, and without."""
    guarded_us, alone_us = (us(guard_row()["us"][f"{form}, {guard}"]) for guard in ("guarded", "alone"))
    return f"{guarded_us.removesuffix(' us')} / {alone_us}"


def wrong_calls(guard: str) -> str:
    """Return how many calls with late data gave wrong results, from the form with the fewest to that with the most."""
    row = guard_row()
    return f"{span((n for name, n in row['wrong'].items() if name.endswith(f', {guard}')), str)} of {row['calls']}"


def around_router(part: str) -> str:
    """Return weft's time in a CUDA graph for 4,096 tokens, and torch's."""
    stored = [json.loads(line) for line in (RESULTS / ONE_H100 / "router.jsonl").read_text().splitlines()]
    (times,) = (r["us"] for r in stored if (r["tokens"], r["mode"]) == (4096, "graph"))
    weft_us, torch_us = (us(times[f"{part}, {method}"]) for method in ("weft", "torch"))
    return f"{weft_us.removesuffix(' us')} / {torch_us}"


AROUND_ROUTER = {"position": "capacity by position", "placement": "placement", "balancing": "load balancing"}
EACH, BY_WAVE = "each tile counted", "counted by wave"  # runs of grouped GEMMs alone
THREE, TWO = "128x256, 3 stages", "128x128, 2 an SM"

FIGURES: dict[str, Callable[[], str]] = {
    "pull-few": lambda: us(parts("AG roles")["Fpull4"]),
    "pull-many": lambda: us(parts("AG roles")["Fpull16"]),
    "pull-gemm": lambda: us(parts("AG roles")["cublas"]),
    "gather-programs": lambda: us(parts("AG")["F12"]),
    "gather-copies": lambda: us(parts("AG")["F0"]),
    "gather-chunks": lambda: us(parts("AG")["dec8"]),
    "gather-torch": lambda: us(parts("AG")["torch"]),
    "gather-sequential": lambda: us(parts("AG")["seq"]),
    "gather-eager-copies": eager_copies,
    "gather-eager-programs": lambda: us(parts("AG", "MLP-1 eager")["F12"]),
    "flags-behind": lambda: us(CHAINS["8"]["serial"]),
    "flags-beside": lambda: us(CHAINS["8"]["side"]),
    "flags-eager": partial(same_stream, "eager"),
    "tells-owners": lambda: us(parts("RS roles")["Tgemm"]),
    "tells-itself": lambda: us(parts("RS roles")["Tgemm-local"]),
    "forward-sixteen": lambda: us(variants("forwarders-16.jsonl")["B64f16"]),
    "forward-inside": lambda: us(variants("forwarders-16.jsonl")["T24f8j0"]),
    "forward-sequential": lambda: us(variants("forwarders-16.jsonl")["seq"]),
    "join": lambda: us(variants("join-and-in-flight.jsonl")["T16"]),
    "join-not": lambda: us(variants("join-and-in-flight.jsonl")["T24j0"]),
    "signaled-nccl": partial(signaled, RS, 4, False),
    "signaled-copies": partial(signaled, RS, 4, True),
    "sums-stored": partial(grouped_all_reduce, "store"),
    "sums-pulled": partial(grouped_all_reduce, "pull"),
    "second-stream": lambda: percent(
        r["us"]["RS dec 1 pri 0"] / r["us"]["RS dec 1 pri -1"] for r in rows(2, "second-stream.jsonl")
    ),
    "signals-behind": partial(signals, "now"),
    "signals-late": partial(signals, "lflat2"),
    "fences": fences,
    "posted-few": partial(low_latency_rows, (1, 16, 32, 64, 128, 256)),
    "posted-many": partial(low_latency_rows, (2048,)),
    "posted-collectives": partial(collectives, (64, 256, 1024)),
    "serialized": serialized,
    "tail-cublas": partial(tiles, "lines", "cublas"),
    "tail-plain": partial(tiles, "lines", "plain"),
    "tail-continuous": partial(tiles, "continuous", "shared"),
    "tail-lines": partial(tiles, "lines", "shared"),
    "forms-cublas": lambda: percent(forms(USUAL, "cuBLAS", 5, 99)),
    "forms-stages": lambda: span(forms("128x256 w8 s4 x1", USUAL, 5, 99), x),
    "forms-tall": lambda: span(forms("256x128 w8 s4 x1", USUAL, 5, 99), x),
    "forms-two": lambda: span(forms("128x128 w4 s3 x2", USUAL, 5, 99), x),
    "forms-few": lambda: span(forms(HALF, USUAL, 1.2, 1.5), x),
    "forms-apart": apart,
    "halves-few": partial(in_ops, 1.2, 1.5),
    "halves-many": partial(in_ops, 4, 6.5),
    "moe-divided": partial(moe, "auto"),
    "moe-now": moe_now,
    "moe-several": one_launch,
    "moe-movers-half": partial(one_launch, kind="fused", pullers=128, block_n=128),
    "moe-movers-all": partial(one_launch, kind="fused", pullers=264, block_n=128),
    "few-steps": partial(few_rows, "low latency", "steps of 64", *(f"{m}-64" for m in FEW_MODELS)),
    "few-32": partial(few_rows, "32 x 128", "64 x 256", "GPT-OSS-120B-512", "DeepSeek-V3-512"),
    "few-64": partial(few_rows, "64 x 128", "64 x 256", "Qwen3-30B-512"),
    "moe-own": partial(layers, "moe-own-sums.jsonl", OWN, "own sums through the outbox"),
    "grouped-counted": partial(grouped, "second", EACH, "uncounted", THREE, "Qwen3-30B"),
    "grouped-first-four": partial(grouped, "first", BY_WAVE, "4 stages", THREE),
    "grouped-second-four": partial(grouped, "second", BY_WAVE, "4 stages", THREE),
    "grouped-two-first": partial(grouped, "first", EACH, TWO, THREE),
    "grouped-quack-torch": partial(grouped, "second", BY_WAVE, "quack 128x192pp", "torch"),
    "grouped-quack-torch-first": partial(grouped, "first", BY_WAVE, "quack 128x192pp", "torch"),
    "moe-scheduler": partial(layers, "moe-scheduler.jsonl", "fused, scheduler", "fused, tickets"),
    "parts-own-whole": partial(in_parts, "own sums from the rows", "moe_tp", "own sums through the outbox"),
    "parts-narrow": partial(in_parts, '{"block_n": 128, "stages": 4}'),
    "few-norm-nccl": nccl_alone,
    "few-norm-pull": partial(few_programs, "pull ahead"),
    "few-norm-push": partial(few_programs, "push ahead"),
    "norms-programs": partial(decoder, 8192, "equal split"),
    "norms-copies": partial(decoder, 8192, "equal split, norm decomposed"),
    "norms-none": partial(decoder, 8192, "no communication"),
    "norms-few-copies": partial(decoder, 1024, "132 SMs, norm decomposed"),
    "norms-few-programs": partial(
        decoder, 1024, '132 SMs, norm {"kind":"two_shot","programs":16,"pull":true,"rows":8}'
    ),
    "mix-clock": partial(mix, "sequential", "clock"),
    "mix-clock-woven": partial(mix, "woven", "clock"),
    "mix-woven": partial(mix, "woven", "speedup"),
    "mix-auto": partial(mix, "auto", "speedup"),
    "served-woven": partial(serves, "weft"),
    "served": partial(serves, "transformers paged"),
    "served-woven-graphs": partial(serves, "weft", "async"),
    "served-graphs": partial(serves, "transformers paged", "async"),
    **{f"attention-{name}": partial(attention_parts, part) for name, part in ATTENTION.items()},
    "attention-pulled": partial(hidden, "attention-parts.jsonl", "today"),
    "attention-pushed": partial(hidden, "attention-early.jsonl", "Segmented()"),
    "attention-own": own_attention,
    "attention-own-segmented": partial(own_needs, "weft"),
    "turned-ratio": lambda: spread(trained("auto, turned"), trained("auto")),
    **{f"promoted-{name}": partial(promoted_loop, form) for name, form in LOOPS.items()},
    "promoted-halves-slow": partial(promoted_loop, LOOPS["halves"], "slow"),
    "guarded": partial(guard_time, "step_by_step"),
    "guard-wrong": partial(wrong_calls, "alone"),
    "guarded-wrong": partial(wrong_calls, "guarded"),
    **{f"router-{name}": partial(around_router, part) for name, part in AROUND_ROUTER.items()},
    "short-before": partial(short, "before"),
    "short-after": partial(short, "after"),
}
