"""The documents are correct: the README's code runs, links work, and no figure is typed by hand."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from bench.pages import report, tables

ROOT = Path(__file__).parents[2]


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize(("page", "function"), [("README.md", "mlp"), ("docs/moe.md", "layer")])
def test_the_first_code_of_a_page_runs_unchanged(page: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The code runs in the emulator with the page's sizes; its function accepts the sizes for GPUs."""
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    assert capsys.readouterr().out
    (sizes,) = re.findall(rf"# .*{function}\(weft.init\(\), ([\d, ]+)\)", code)
    inspect.signature(names[function]).bind(None, *sizes.split(", "))


def test_the_guide_says_how_many_graphs_a_world_keeps() -> None:
    assert f"at most {weft.world.MOST_SEQUENCES:,} CUDA graphs" in (ROOT / "docs/guide.md").read_text()


def test_the_tutorial_runs_and_prints_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first and the last code of the page are `layer.py`; the other code runs in order in a second file, after the
    page's import."""
    page = (ROOT / "docs/tutorial.md").read_text()
    layer_code, *others, main_code = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "layer.py").write_text(layer_code + main_code)
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = re.findall(r"`(from layer import [^`]*)`", page)
    names: dict[str, Any] = {}
    for code in (line, *others):
        exec(code, names)
    del sys.modules["layer"]
    printed_error, *plans = capsys.readouterr().out.splitlines()
    shown = {plan: float(error) for plan, error in map(str.split, plans[:3])}
    assert shown.keys() == {"sequential", "decomposed", "fused"} and all(
        1e-4 < e < 5e-3 for e in (float(printed_error), *shown.values())
    )
    assert "matmul_reduce_scatter" in plans[3] and any("sequential" in line for line in plans[4:-1])
    assert plans[-1].startswith(
        "ranks disagree on this call: rank 0: all_gather_matmul rows=(16, 16, 16, 16); rank 1: "
    )


def test_the_code_with_ones_own_experts_runs() -> None:
    code = re.search(r"## Experts of your own\n.*?```python\n(.*?)```", (ROOT / "docs" / "moe.md").read_text(), re.S)
    assert code
    source = code[1].replace("world = weft.init()", "")
    for real, small in (("128, 8, 2048, 768", "8, 2, 32, 16"), ("512", "6")):
        assert real in source
        source = source.replace(real, small)

    def rank(world: weft.World) -> torch.Size:
        names = {"world": world}
        exec(source, names)
        return names["y"].shape  # type: ignore[attr-defined]

    assert weft.spmd(rank, 2, backend="emulated") == [(6, 32)] * 2


PRINTING = [(page.name, *example) for page in PAGES for example in re.findall(r"<!-- prints -->\n```python\n(.*?)```\n\n```\n(.*?)```", page.read_text(), re.S)]  # fmt: skip


@pytest.mark.parametrize("code, shown", [row[1:] for row in PRINTING], ids=[row[0] for row in PRINTING])
def test_an_example_prints_the_output_on_its_page(code: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example runs on emulated ranks."""
    exec(code, {"__name__": "example"})
    assert capsys.readouterr().out == shown


MODULES = {"weft": weft, "wl": weft.lang, "moe": weft.moe}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_names_on_a_page_can_be_imported(page: Path) -> None:
    """A page names a function or module as a caller reaches it, by attributes or by an import."""
    text = page.read_text()
    for name in set(re.findall(r"\b(?:weft|wl|moe)(?:\.(?!NAME)[A-Za-z_]\w*)+", text)) - {"moe.md"}:
        module, *attributes = name.split(".")
        value: Any = MODULES[module]
        for attribute in attributes:
            if not hasattr(value, attribute) and inspect.ismodule(value):
                importlib.import_module(f"{value.__name__}.{attribute}")
            value = getattr(value, attribute)
    for line in re.findall(r"`(from weft[\w.]* import [\w, ]+)`", text):
        exec(line, {})


def ops() -> dict[str, Any]:
    """Return the functions that accept tensors and a World."""
    functions = {name: getattr(weft, name) for name in weft.__all__ if inspect.isfunction(getattr(weft, name))}
    of_moe = {f"moe.{name}": getattr(weft.moe, name) for name in ("moe", "dispatch", "combine")}
    on_worlds = {name: f for name, f in functions.items() if "world" in inspect.getfullargspec(f).kwonlyargs}
    return {name: f for name, f in (on_worlds | of_moe).items() if name not in ("explain", "prepare")}


@pytest.mark.parametrize("name", ops())
def test_the_example_of_an_ops_docstring_prints_the_shown_output(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(ops()[name], name, globs={"torch": torch, "weft": weft})
    assert example.examples and example.examples[-1].want
    assert not doctest.DocTestRunner().run(example).failed


@pytest.mark.gate
def test_the_example_over_gloo_runs_under_torchrun(tmp_path: Path) -> None:
    (code,) = re.findall(r"<!-- torchrun -->\n```python\n(.*?)```", (ROOT / "docs/guide.md").read_text(), re.S)
    (tmp_path / "example.py").write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run([*torchrun, str(tmp_path / "example.py")], capture_output=True, text=True, timeout=300)
    assert run.stdout.count("16.0") == 2, run.stdout + run.stderr  # the lines of the two processes may mix


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_the_contributors_page_names_existing_commands() -> None:
    text, makefile = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\w+)`", text))
    assert {"lint", "test", "gates", "wheel", "pages", "docs", "gpu"} <= targets
    assert targets <= set(re.findall(r"^(\w[\w-]*):", makefile, re.M))
    assert all(
        f"make --no-print-directory {target}" in (ROOT / ".ci/run").read_text()
        for target in ("lint", "wheel", "test", "newest", "gates")
    )
    for name in re.findall(r"`(?:python )?((?:tests|bench|gpu|\.ci)/[\w/.]+)[` ]", text):
        assert name == "gpu/out" or (ROOT / name).exists(), name


def test_ci_ends_with_the_gates() -> None:
    assert re.findall(r"make --no-print-directory (\w+)", (ROOT / ".ci/run").read_text())[-1] == "gates"


def test_the_readme_states_no_speed_outside_the_generated_blocks() -> None:
    text = (ROOT / "README.md").read_text()
    for begin, end in ((report.BEGIN, report.END), (tables.BEGIN, tables.END)):
        before, rest = text.split(begin)
        text = before + rest.split(end)[1]
    assert not re.search(r"\d\s*(x faster|us\b|TFLOP|GB/s|%)|\d\.\d+x", text)


def test_the_readme_is_short() -> None:
    """Code and tables count as words."""
    words = re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.S))
    assert len(words) <= 600, len(words)


def test_the_readmes_first_screen_has_a_picture_code_and_one_line_that_installs() -> None:
    """A table of ways to use weft, and a table of figures, follow the first screen."""
    text = (ROOT / "README.md").read_text()
    screen, *parts = re.split(r"^## ", text, flags=re.M)
    assert "overlap and fusion" in screen.split("\n\n")[1] and screen.index("![") < screen.index("```python")
    code, shown = re.findall(r"```\w*\n(.*?)```", screen, re.S)
    assert len(re.findall(r"\S.*", code)) <= 8 and "print(" in code and shown
    (install,) = re.findall(r"```\w*\n(.*?)```", parts[0], re.S)
    assert parts[0].startswith("Install\n") and len(install.splitlines()) == 1
    assert [len(re.findall(r"^\|", part, re.M)) > 0 for part in parts[:3]] == [False, True, True]
