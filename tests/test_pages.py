"""Pages that are made of stored results are what their makers make of them, and nothing is stored that nothing is made of."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import weft

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import layer_picture  # noqa: E402
import notes  # noqa: E402
import pages  # noqa: E402
import report  # noqa: E402
import table  # noqa: E402

DOCS = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS, OF_MEASUREMENTS = 39_370, 1_500
SLOW = "docs/planner.md"  # predicts some thousand calls


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.gate if n == SLOW else ()) for n in pages.PAGES])
def test_a_page_is_what_its_maker_makes(name: str) -> None:
    assert (ROOT / name).read_text() == pages.PAGES[name](), f"{name} is not of today's results: make pages"


def test_the_shipped_table_is_what_its_maker_makes() -> None:
    text, _ = table.made("nvidia-h200")
    assert text == (table.TABLES / "nvidia-h200.json").read_text(), "python bench/table.py nvidia-h200"


def test_the_docs_are_short_enough() -> None:
    words = {page.name: words_of(page.read_text()) for page in DOCS}
    assert sum(words.values()) <= MOST_WORDS and words["measurements.md"] <= OF_MEASUREMENTS, words


def words_of(text: str) -> int:
    """Figures of tables count, their rules do not, nor marks for what fills in a figure."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text, flags=re.S)))


def test_every_picture_is_shown_and_every_one_shown_is_there() -> None:
    shown = {Path(name).name for page in [ROOT / "README.md", *DOCS] for name in re.findall(r"\]\(([^)]*img/[^)]+)\)", page.read_text())}  # fmt: skip
    assert shown == {path.name for path in (ROOT / "docs/img").iterdir()}


def test_the_readmes_picture_is_of_stored_rows(tmp_path: Path) -> None:
    """What is left of a layer beside its GEMMs and what of the collectives is not hidden takes time, and little."""
    t = layer_picture.times(report.load(ROOT / "bench/results" / layer_picture.MACHINE))
    assert t.weft < t.sequential and max(t.gather, t.scatter) < t.first
    assert all(0 < t.rest(whole) < 0.15 * whole for whole in (t.sequential, t.weft))
    (path,) = layer_picture.plots(ROOT / "bench/results", tmp_path)
    assert path.read_bytes() == (ROOT / "docs/img" / path.name).read_bytes(), "make pages"
    text = path.read_text()
    assert f"{t.weft:.0f} us" in text and f"{t.sequential / t.weft:.2f}x" in text


def test_every_experiment_is_told_of() -> None:
    """The notes' figures, and what the predictor's tests are fitted to, are made of all that is kept."""
    makers = "".join((ROOT / "bench" / name).read_text() for name in ("notes.py", "stored.py"))
    said = (ROOT / "docs/design-notes.md").read_text()
    kept = [path for path in (ROOT / "bench/results").glob("*/experiments/*")]
    assert kept and [path.name for path in kept if path.name not in makers + said] == []


def test_figures_of_the_design_notes_are_filled_in() -> None:
    """By hand stand sizes and settings alone; and a mark that begins a line would begin a block of HTML."""
    text = (ROOT / "docs/design-notes.md").read_text()
    assert set(notes.MARK.findall(text)) == set(notes.FIGURES)
    by_hand = notes.MARK.sub("", text)
    assert not re.search(r"\d\s*(us\b|ms\b|%|MHz|TFLOP|GB/s)|\d\.\d+x|<!--", by_hand)
    assert not re.search(r"^\s*<!--", text, re.M)


@pytest.mark.parametrize("name", ["attention", "moe", "transformers", "models", "parallel", "papers"])
def test_times_stand_in_what_is_made_of_results_alone(name: str) -> None:
    text = (ROOT / f"docs/{name}.md").read_text()
    by_hand = re.sub(r"<!--[^>]*made by.*?<!-- end[^>]*-->|```.*?```", "", text, flags=re.S)
    assert len(by_hand) < len(text) or "made by" not in text
    assert not re.findall(r"\d\s*(?:us|ms)\b|\d\.\d+x", by_hand)


def test_filling_in_takes_what_is_there_away() -> None:
    name = next(iter(notes.FIGURES))
    assert notes.fill(f"a <!--{name}-->old<!--/-->, b") == f"a <!--{name}-->{notes.FIGURES[name]()}<!--/-->, b"
    with pytest.raises(KeyError, match="unheard-of"):
        notes.fill("<!--unheard-of-->1<!--/-->")


def test_the_reference_has_every_public_module() -> None:
    """Of a module it has what `__all__` says, and without one what does not begin with an underscore."""
    named = set(re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.M))
    modules = {f"weft.{name}" for name in weft.__all__ if isinstance(getattr(weft, name), ModuleType)}
    assert {"weft", *modules} <= named, "docs/api.md lacks a line `::: weft.NAME`"
    for name in named:
        assert importlib.import_module(name).__doc__


def test_the_reference_says_in_a_clone_what_every_name_is() -> None:
    """The site's directives are no text."""
    text = (ROOT / "docs/api.md").read_text()
    for name in weft.__all__:
        if not isinstance(getattr(weft, name), ModuleType):
            assert re.search(rf"^\| `{name}` \| \S.*\w.* \|$", text, re.M), f"{name}: make pages"
    assert all(f"`{name}`" in text for name in weft.moe.__all__)


def test_the_site_has_every_page() -> None:
    nav = re.findall(r"^  - [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(nav) == sorted([*(page.name for page in DOCS), "index.md"])
