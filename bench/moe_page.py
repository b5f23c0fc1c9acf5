"""The tables of docs/moe.md, from bench/results/<machine>/moe.jsonl: python bench/moe_page.py

Of the lines of one (name, world, method, routing) the newest counts, which is the last in the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by bench/moe_page.py from bench/results -->", "<!-- end -->"


def table(lines: list[dict]) -> str:
    """A row a size: us of the library and of weft, their ratio, and weft's share of the limit."""
    rows = [
        "| layer, tokens a GPU | libraries | weft | ratio | limit | of the limit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    newest = {(r["name"], r["method"]): r for r in lines}
    ratios = []
    for name in sorted({r["name"]: None for r in lines}, key=lambda name: -int(name.rpartition("-")[2])):
        library, auto = newest.get((name, "library")), newest.get((name, "auto"))
        if library is None or auto is None:
            continue
        ratios.append(library["us"] / auto["us"])
        model, _, tokens = name.rpartition("-")
        sizes = f"{model} ({auto['K']}, {auto['N']}, {auto['E']}, {auto['top_k']}), {int(tokens):,}"
        share = f"{100 * auto['limit_us'] / auto['us']:.0f}%"
        rows.append(
            f"| {sizes} | {library['us']:.0f} | {auto['us']:.0f} | **{ratios[-1]:.2f}x** | {auto['limit_us']:.0f} | {share} |"
        )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return "\n".join([*rows, "", f"Geometric mean of the ratios: {mean:.2f}x, lowest {min(ratios):.2f}x."])


def page(results: Path) -> str:
    parts = []
    for path in sorted(results.glob("*/moe.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for zipf in sorted({r["zipf"] for r in lines}):
            routing = "balanced random routing" if zipf == 0 else f"routing by Zipf's law ({zipf})"
            some = [r for r in lines if r["zipf"] == zipf]
            parts.append(f"{some[0]['world']} GPUs ({path.parent.name}), {routing}, us:\n\n{table(some)}")
    return "\n\n".join(parts)


def main() -> None:
    path = ROOT / "docs" / "moe.md"
    text = path.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n{page(ROOT / 'bench' / 'results')}\n{END}{after}")


if __name__ == "__main__":
    main()
