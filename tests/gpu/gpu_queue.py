"""The order of GPU checks. Checks that have not passed with this version of weft are shared between the runs.

A row records one check: check, ranks, gpus (ranks share these if they are fewer), outcome, date, seconds, parts (the
files and folders of weft whose kernels the check launched, with git's names for their contents), and the reason and
place of a failure. A checkout of weft is identified by git's name for the content of src/weft, which is computed here:
the GPU machine has no git.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

WEFT = Path(__file__).resolve().parents[2] / "src" / "weft"
RECORD = Path(__file__).parents[1] / "gpu_record.json"
TRITON = "3.6.0"  # the version with which weft is developed
Row = dict[str, Any]


def tree_of(path: Path) -> str:
    """Return git's name for the content of a file or folder, without Python's caches; "" if it does not exist."""
    if path.is_file():
        return _name(b"blob", path.read_bytes()).hex()
    return _tree(path).hex() if path.is_dir() else ""


def _name(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content).digest()


def _tree(folder: Path) -> bytes:
    entries = []
    for path in folder.iterdir():
        if path.is_dir():
            if path.name != "__pycache__" and any(path.iterdir()):
                entries.append((path.name + "/", b"40000", _tree(path)))
        elif path.suffix != ".pyc":
            mode = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            entries.append((path.name, mode, _name(b"blob", path.read_bytes())))
    lines = (mode + b" " + name.rstrip("/").encode() + b"\0" + sha for name, mode, sha in sorted(entries))
    return _name(b"tree", b"".join(lines))


def part_of(module: str) -> str:
    """Return the file or folder of weft to which a module belongs: "ops/moe", "compute"."""
    names = module.removeprefix("weft.").split(".")
    part = "/".join(names[: 2 if names[0] == "ops" else 1])
    return part if (WEFT / part).is_dir() else f"{part}.py"


@functools.cache
def tree_of_part(part: str) -> str:
    return tree_of(WEFT / part)[:12]


def placed(ranks: int, gpus: int, triton: str = TRITON) -> str:
    """Return the record's name for the rows of these ranks, with a suffix if Triton's version is not the one with which
    weft is developed."""
    return f"{ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}{f', Triton {triton}' if triton != TRITON else ''}"


def ordered(names: Sequence[str], rows: Mapping[str, Row], tree: str) -> list[str]:
    """Return the checks that have not passed on this tree: first failed ones, then new ones and those whose kernels are
    in a part that has changed since, then the rest, the oldest first."""

    def rank(name: str) -> tuple[int, str]:
        row = rows.get(name)
        if row is None or row["outcome"] == "failed":
            return (1 if row is None else 0, "")
        changed = any(tree_of_part(part) != known for part, known in row["parts"].items())
        return (1 if changed else 2, row["date"])

    return sorted((n for n in names if not passed(rows.get(n), tree)), key=rank)


def passed(row: Row | None, tree: str) -> bool:
    return row is not None and row["outcome"] == "passed" and row["tree"] == tree[:12]


def recorded(ranks: int, gpus: int) -> dict[str, Row]:
    """Return the recorded checks for this number of ranks and GPUs, by name."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    place = placed(ranks, gpus, metadata.version("triton"))
    rows: dict[str, Row] = record.get("checks", {}).get(place, {})
    return rows


class Queue:
    """A file of check names, from which several processes each take the next one, under a lock. Each worker records the
    name that it holds, so that a crash can be attributed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            state = json.loads(file.read() or "{}")
            yield state
            file.truncate(0)
            file.write(json.dumps(state))

    def fill(self, names: list[str]) -> None:
        """Fill the queue; only the first process does so."""
        with self._state() as state:
            if "todo" not in state:
                state.update(todo=names, running={})

    def take(self, who: str) -> str | None:
        with self._state() as state:
            state["running"].pop(who, None)
            if not state["todo"]:
                return None
            state["running"][who] = name = state["todo"].pop(0)
            return name

    def release(self, who: str) -> str | None:
        """Return the name that `who` held, and release it."""
        with self._state() as state:
            return state.get("running", {}).pop(who, None)

    def running(self, who: str) -> str | None:
        with self._state() as state:
            return state.get("running", {}).get(who)

    def left(self) -> int | None:
        """Return the number of names that no process has taken, or None before the queue is filled."""
        with self._state() as state:
            return len(state["todo"]) if "todo" in state else None
