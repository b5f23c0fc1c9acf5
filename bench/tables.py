"""The tables of docs/attention.md and docs/transformers.md, from bench/results/<machine>/{attention,hf}.jsonl.

Of the lines of one (name, mode, method) the newest counts, which is the last in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

BEGIN, END = "<!-- made by bench/pages.py from bench/results -->", "<!-- end -->"
Rows = list[dict]


CP = [f"torch context_parallel, {rotate}" for rotate in ("allgather", "alltoall")]
TRAINED = [f"{way}, forward and backward" for way in CP]


def best(us: list[float]) -> str:
    return f"{min(us):.0f}" if us else ""


def attention(lines: Rows) -> str:
    head = ["shape: heads x kv heads, S, mask", "gather, then attention", "weft", "ratio", "hidden", "attention alone"]
    head += ["torch's context_parallel", "forward and backward: weft", "torch's"]
    newest = {(r["name"], r["method"]): r for r in lines}
    rows = []
    for name in dict.fromkeys(r["name"] for r in lines):
        library, weft, alone = (newest.get((name, method)) for method in ("nccl+cudnn", "weft", "compute alone"))
        if library and weft and alone:
            hidden = "" if weft["overlap"] is None or "Sequential" in weft["plan"] else f"{100 * weft['overlap']:.0f}%"
            us = [f"{library['us']:.0f}", f"{weft['us']:.0f}", f"{library['us'] / weft['us']:.2f}x", hidden]
            torchs, both = ([r["us"] for (n, m), r in newest.items() if n == name and m in of] for of in (CP, TRAINED))
            trained = newest.get((name, "weft, forward and backward"))
            rows.append(
                [name, *us, f"{alone['us']:.0f}", best(torchs), best([trained["us"]] if trained else []), best(both)]
            )
    return grid(head, rows)


def transformers(lines: Rows) -> str:
    newest = {(r["name"], r["mode"], r["method"]): r["us"] for r in lines}
    rows = []
    for name in dict.fromkeys(r["name"] for r in lines):
        row = [name]
        for mode in ("eager", "graph"):
            own, woven = (newest[name, mode, method] for method in ("transformers", "weft"))
            row += [f"{own:.0f}", f"{woven:.0f}", f"{own / woven:.2f}x"]
        rows.append(row)
    return grid(["sizes, part, tokens", "eager: own", "woven", "ratio", "graph: own", "woven", "ratio"], rows)


def grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(results: Path, file: str, table: Callable[[Rows], str]) -> str:
    parts = []
    for path in sorted(results.glob(f"*/{file}")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        parts.append(f"{lines[0]['world']} GPUs ({path.parent.name}), us:\n\n{table(lines)}")
    return "\n\n".join(parts)
