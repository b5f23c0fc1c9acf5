"""This program writes every page that is made from stored results, with its plots: python -m bench.pages.pages (or make
pages)

It writes docs/measurements.md and the tables in bench/results as a whole, and in other pages the blocks between marks.
No GPU is needed: the same results give the same pages, and a test compares the committed pages with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from bench.pages import (
    api_page,
    drawn_page,
    fp8_page,
    front,
    hardware_page,
    layer_picture,
    moe_page,
    papers_page,
    predict,
    quack_page,
    report,
    signaled_page,
    simulate,
    suites_page,
    tables,
    vllm_page,
    ways,
)
from weft.errors import WeftError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
MEASUREMENTS = f"""# Measurements

<!-- made by bench/pages/pages.py from bench/results; do not edit -->

{report.INTRODUCTION}
The planner [predicts](planner.md#how-well-it-predicts) such times.
"""


def measurements() -> str:
    machines = report.load_all(RESULTS)
    chapters = [report.digest(name, machines[name], front.layers(RESULTS / name)) for name in report.new(machines)]
    chapters += [ways.moe(RESULTS), signaled_page.digest(signaled_page.machines(), signaled_page.sms())]
    chapters += [ways.ways(RESULTS), ways.host(RESULTS)]
    return "\n".join([MEASUREMENTS, *(chapter.rstrip() + "\n" for chapter in chapters if chapter)])


def planner() -> str:
    digests = "\n".join([predict.digest(predict.runs_of(machines())), simulate.digest()]).rstrip()
    return filled("docs/planner.md", digests)


def predictions() -> str:
    return "# Predictions\n\n" + "\n".join([predict.chapter(predict.runs_of(machines())), simulate.chapter()])


def every_size(machine: str) -> str:
    return report.chapter(machine, report.load_all(RESULTS)[machine])


def machines() -> list[str]:
    return sorted(path.name for path in RESULTS.iterdir())


def readme() -> str:
    figures = f"\n{front.figures(RESULTS)}\n\n{front.one_gpu(RESULTS)}"
    text = filled("README.md", figures, report.BEGIN, report.END)
    return tables.between(text, tables.BEGIN, tables.END, front.doors(RESULTS))


def page_of(head: str, *made_of: tuple[str, Callable[[tables.Rows], str]]) -> str:
    """Return a page of tables. Each table covers the machines that have its file."""
    return f"{head}{tables_of(made_of)}\n"


def tables_of(made_of: Iterable[tuple[str, Callable[[tables.Rows], str]]]) -> str:
    return "\n\n".join(filter(None, (tables.page(RESULTS, file, table) for file, table in made_of)))


def filled(name: str, text: str, begin: str = tables.BEGIN, end: str = tables.END) -> str:
    return tables.between((ROOT / name).read_text(), begin, end, text)


PAGES: dict[str, Callable[[], str]] = {
    "docs/measurements.md": measurements,
    "docs/planner.md": planner,
    predict.TABLES: predictions,
    "docs/batch-invariance.md": lambda: filled("docs/batch-invariance.md", ways.batch_invariance(RESULTS)),
    "docs/moe.md": lambda: moe_page.filled((ROOT / "docs/moe.md").read_text(), RESULTS),
    moe_page.TABLES: lambda: moe_page.chapter(RESULTS),
    "docs/fp8.md": lambda: filled("docs/fp8.md", tables_of(fp8_page.TABLES)),
    "bench/results/attention.md": lambda: page_of(tables.ATTENTION, ("attention.jsonl", tables.attention)),
    "docs/guide.md": lambda: filled("docs/guide.md", quack_page.digest(RESULTS)),
    quack_page.TABLES: lambda: quack_page.chapter(RESULTS),
    "docs/papers.md": lambda: filled("docs/papers.md", papers_page.table(RESULTS)),
    "docs/tested.md": lambda: filled("docs/tested.md", hardware_page.record(), hardware_page.RECORD),
    "bench/results/transformers.md": lambda: page_of(
        tables.TRANSFORMERS, ("hf.jsonl", tables.transformers), ("hf_moe.jsonl", tables.mixtures)
    ),
    drawn_page.TABLE: lambda: page_of(drawn_page.TITLE, ("drawn.jsonl", drawn_page.drawn)),
    suites_page.TABLE: lambda: page_of(suites_page.TITLE, ("torch_suites.jsonl", suites_page.suites)),
    "docs/vllm.md": lambda: filled("docs/vllm.md", tables_of([("vllm_serving.jsonl", vllm_page.serving)])),
    vllm_page.TABLES: lambda: vllm_page.chapter(RESULTS),
    "bench/results/models.md": lambda: page_of(tables.MODELS, ("models.jsonl", tables.models)),
    "docs/api.md": lambda: api_page.filled((ROOT / "docs/api.md").read_text()),
    "docs/hardware.md": lambda: filled("docs/hardware.md", hardware_page.tables(), hardware_page.BEGIN),
    "README.md": readme,
    signaled_page.TABLES: lambda: signaled_page.chapter(signaled_page.machines(), signaled_page.sms()),
    **{report.table_name(name): partial(every_size, name) for name in report.new(report.load_all(RESULTS))},
}


def plots(folder: Path) -> list[Path]:
    paths = report.plots(report.load_all(RESULTS), folder) + signaled_page.plots(folder)
    paths += predict.plots(predict.runs_of(machines()), folder) + simulate.plots(folder)
    return paths + layer_picture.plots(RESULTS, folder)


def main() -> None:
    try:
        for name, text in {name: make() for name, make in PAGES.items()}.items():
            (ROOT / name).write_text(text)
            print(f"wrote {name}")
    except WeftError as error:
        raise SystemExit(str(error)) from None
    print(f"and {len(plots(ROOT / 'docs/img'))} plots")


if __name__ == "__main__":
    main()
