"""The tables of bench/results/attention.md, bench/results/transformers.md and bench/results/models.md, from
bench/results/<machine>/{attention,hf,hf_moe,models}.jsonl.

The newest line of a name, mode and method, which is the last in the file, counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from weft.errors import WeftError

ALONE = "without communication"
BEGIN, END = "<!-- made by bench/pages/pages.py from bench/results -->", "<!-- end -->"
Rows = list[dict]


CP = [f"torch context_parallel, {rotate}" for rotate in ("allgather", "alltoall")]
KINDS = {"Sequential": "sequential", "Segmented": "segmented", "HeadParallel": "head_parallel"}
TRAINED = [f"{way}, forward and backward" for way in CP]


def best(us: list[float]) -> str:
    return f"{min(us):.0f}" if us else ""


ATTENTION = """# Attention over the keys of all ranks

`torchrun --nproc-per-node N -m bench.measure.attention --out DIR` timed these calls against NCCL's all-gather and cuDNN. "causal" is a causal mask in
the zigzag layout.

All in CUDA graphs, except weft's forward and backward of 64x8-32768-causal (eager). For segmented plans, "hidden" is (attention
alone + NCCL's gather alone - weft) / NCCL's gather alone; "attention alone" is the segmented plan's calls without communication,
on the rank with the most work. torch's context_parallel is the faster of its two rotations, with cuDNN; it has no contiguous
layout. [examples/context_parallel.py](../../examples/context_parallel.py) splits one prompt over the ranks. The rows of 65,536 and
the prefills were measured with an earlier `"auto"`.

"""
TRANSFORMERS = """# Transformers models

Llama-70B's sizes with 8 layers and random weights, and mixtures of experts, with Transformers' own parallelism and woven, in one
run (`bench/measure/hf.py`, `bench/measure/hf_moe.py`). The ratio refers to the faster woven way; the eager columns come from earlier versions.
"prefill-M": M tokens of one sequence; "decode-M": one token of each of M sequences, after 1,024 tokens in the cache.

"""
MODELS = """# Whole models as others measured them

Two layers of the models of TileLink's Figure 11 with four requests of 8,192 tokens, and of FlashOverlap's chunk of 16,384 tokens
(`bench/measure/models.py`); training steps, and blocks of a video diffusion transformer of Step-Video-T2V's sizes
(`bench/measure/models_training.py`). GPT-3's MLPs are gated here, with two thirds of the width: the same work and bytes.

"Libraries" alternates with weft in the same run: cuBLAS, NCCL's all-reduce, then add and norm in one kernel; with experts, and in
training and diffusion, NCCL's all-gather and reduce-scatter, and `torch._grouped_mm`. "Woven own" is woven with `sms` of the
whole GPU. Empty cells were not measured. The limit is the baseline over the baseline without its collectives; "hidden" is the
share of the difference that weft saves, above 100% if weft also computes less or has faster kernels.

"""


def attention(lines: Rows) -> str:
    """Return the table of calls, and the table of prefills that consist of such calls."""
    newest = {(r["name"], r["method"]): r for r in lines}

    def least(name: str, *methods: str) -> str:
        return best([newest[name, method]["us"] for method in methods if (name, method) in newest])

    calls, prefills = [], []
    for name in dict.fromkeys(r["name"] for r in lines):
        library, alone = newest.get((name, "nccl+cudnn")), newest.get((name, "compute alone"))
        for method in ("weft", "Segmented()"):
            weft = newest.get((name, method))
            if not library or not weft or (method != "weft" and weft["plan"] == newest[name, "weft"]["plan"]):
                continue
            us = [name, f"{library['us']:.0f}", f"{weft['us']:.0f}", f"{library['us'] / weft['us']:.2f}x"]
            if not alone:
                prefills.append([*us, least(name, *CP)])
                continue
            plan = KINDS[weft["plan"].partition("(")[0]] + ", by name" * (method != "weft")
            hidden = f"{100 * weft['overlap']:.0f}%" if plan.startswith("segmented") else ""
            others = least(name, *CP), least(name, "weft, forward and backward"), least(name, *TRAINED)
            calls.append([*us, plan, hidden, f"{alone['us']:.0f}", *(others if method == "weft" else [""] * 3)])
    head = ["shape: heads x kv heads, S, mask", "gather, then attention", "weft", "ratio", "its plan", "hidden"]
    head += ["attention alone", "torch's context_parallel", "forward and backward: weft", "torch's"]
    text = "us:\n\n" + grid(head, calls)
    head = ["sizes, layers, tokens", "gather, then attention", "weft", "ratio", "torch's context_parallel"]
    return text + "\n\nprefill of one prompt, us:\n\n" + grid(head, prefills) if prefills else text


def transformers(lines: Rows) -> str:
    """Return the table of forward passes."""
    newest = {(r["name"], r["mode"], r["method"]): r["us"] for r in lines}
    rows = []
    for name in dict.fromkeys(name for name, _, _ in newest):
        row = [name]
        for mode in ("eager", "graph"):
            transformers_us, *ways = (newest.get((name, mode, method)) for method in ("transformers", "weft", "woven"))
            least = min(us for us in ways if us)
            row += ["" if us is None else f"{us:.0f}" for us in (transformers_us, *ways)] + [
                f"{transformers_us / least:.2f}x"
            ]
        rows.append(row)
    head = [f"{mode}{way}" for mode in ("eager: ", "graph: ") for way in ("own", "woven", "in two parts", "ratio")]
    return "us:\n\n" + grid(["sizes, part, tokens", *head], rows)


def mixtures(lines: Rows) -> str:
    """Return the table that compares Transformers' expert parallelism with the same model woven."""
    newest = {(r["name"], r["mode"], r["method"]): r["us"] for r in lines}
    rows = []
    for name, mode in dict.fromkeys((name, mode) for name, mode, _ in newest):
        transformers_us, woven = newest.get((name, mode, "transformers")), newest.get((name, mode, "weft"))
        if transformers_us and woven:
            rows.append([name, mode, f"{transformers_us:.0f}", f"{woven:.0f}", f"{transformers_us / woven:.2f}x"])
    return "us:\n\n" + grid(["sizes, part, tokens", "mode", "own", "woven", "ratio"], rows)


def models(lines: Rows) -> str:
    """Return the table of layers of whole models from the last run of each: cuBLAS and NCCL, "auto", the limit without
    communication, and the fastest way of weft."""
    rows = []
    for name, mode in dict.fromkeys((r["name"], r["mode"]) for r in lines):
        r, us = newest_run([r for r in lines if (r["name"], r["mode"]) == (name, mode)])
        base, auto, taken = us["libraries"], us["auto"], r.get("taken", "auto")
        sizes = f"{r['N']}x{r['K']}" + (f", {r['top_k']} of {r['E']}" if "E" in r else "")
        best = min((m for m in us if m not in ("libraries", "auto", ALONE)), key=us.__getitem__, default="auto")
        faster = f"{best}, {base / us[best]:.2f}x" if us[best] < auto else ""
        limit = ["", "", ""]
        if alone := us.get(ALONE):
            share = f"{100 * (base - auto) / (base - alone):.0f}%" if alone < base else ""
            limit = [f"{alone:.0f}", f"{base / alone:.2f}x", share]
        ways = [f"{auto:.0f}", f"**{base / auto:.2f}x**", *limit, "" if taken == "auto" else taken, faster]
        rows.append([name, sizes, f"{r['M']:,}", str(r["layers"]), mode, f"{base:.0f}", *ways])
    head = ["model", "hidden x inner, experts", "tokens", "layers", "mode", "libraries", '`"auto"`', "ratio"]
    head += [ALONE, "limit", "hidden", "it takes", "faster in this run"]
    return "us:\n\n" + grid(head, rows)


def newest_run(rows: Rows) -> tuple[dict, dict[str, float]]:
    """Return a row of the last run, and the run's us by method."""
    last = rows[-1]
    return last, {r["method"]: r["us"] for r in rows if r.get("date") == last.get("date")}


def lines_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_machine(results: Path, file: str) -> dict[str, Rows]:
    """Return the rows of each machine that has the file."""
    return {path.relative_to(results).parts[0]: lines_of(path) for path in sorted(results.glob(f"*/{file}"))}


def gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def gpus_of(machine: str) -> str:
    return gpus(int(machine.rpartition("x")[2]))


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int | None = None) -> str:
    """Return a table. text_columns: the number of left-aligned columns; the others are right-aligned."""
    align = ["---"] * len(head)
    if text_columns is not None:
        align = [":---" if i < text_columns else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, align, *rows))


def between(text: str, begin: str, end: str, block: str) -> str:
    """Return the text of a page with this block between two marks. Raises WeftError if the page lacks a mark."""
    before, _, rest = text.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not end_mark:
        raise WeftError(f"a page must hold {begin}, and {end} after it")
    return f"{before}{begin}\n{block}\n{end}{after}"


def page(results: Path, file: str, table: Callable[[Rows], str]) -> str:
    """Return, for each machine with a table, the machine's name and the table."""
    parts = []
    for machine, lines in by_machine(results, file).items():
        if text := table(lines):
            parts.append(f"{gpus_of(machine)} ({machine}), {text}")
    return "\n\n".join(parts)
