"""The list of equivalent mutations names lines of code with their comments, so an edited comment would break a gate."""

from __future__ import annotations

from pathlib import Path

from tests.emulated.test_mutation import EQUIVALENT

ROOT = Path(__file__).resolve().parents[2]


def test_an_equivalent_mutation_names_lines_that_exist() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py"), *(ROOT / "tests").rglob("cases*.py")]
    text = "\n".join(path.read_text() for path in files)
    assert [mutation.code for mutation in EQUIVALENT if mutation.code not in text] == []
