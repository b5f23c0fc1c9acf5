"""The file that `weft check` and `weft trace` are given runs as it does by `python FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weft import check


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever it is checked, by a relative path too."""
    there, elsewhere = tmp_path / "kernels", tmp_path / "elsewhere"
    there.mkdir(), elsewhere.mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    for i, (target, cwd) in enumerate(
        [(there / "a.py", elsewhere), (Path("../kernels/b.py"), elsewhere), (Path("c.py"), there)]
    ):
        (there / f"neighbour_{i}.py").write_text(f"number = {i}\n")
        (there / target.name).write_text(
            f"import neighbour_{i}\n\n\ndef main(world):\n    return neighbour_{i}.number\n"
        )
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(there))])
        monkeypatch.chdir(cwd)
        assert check.load(str(target))(None) == i
