"""The order of GPU checks. Checks that have not passed with this version of weft are shared between the runs.

A row records one check: check, ranks, gpus (ranks share these if they are fewer), outcome, date, seconds, parts (the
files and folders of weft whose kernels the check launched, with the names of their code), and the reason and place of a
failure. A version of weft is identified by the name of the code in src/weft, a hash in which comments, docstrings and
blank lines do not count. This name is the same for every version of Python, and is computed without git, which the GPU
machine lacks.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import hashlib
import io
import json
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

WEFT = Path(__file__).resolve().parents[2] / "src" / "weft"
RECORD = Path(__file__).parents[1] / "gpu_record.json"
TRITON = "3.6.0"  # the version with which weft is developed
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Row = dict[str, Any]


@functools.cache
def tree_of(path: Path) -> str:
    """Return the name of the code in a file or folder; "" if it does not exist."""
    sha = hashlib.sha1()
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    for name, file in sorted((file.relative_to(path).as_posix(), file) for file in files):
        content = code_of(file.read_text("utf-8")).encode() if file.suffix == ".py" else file.read_bytes()
        sha.update(b"%s\0%d\0" % (name.encode(), len(content)) + content)
    return sha.hexdigest() if files else ""


def code_of(text: str) -> str:
    """Return Python text without comments, docstrings, blanks at the ends of lines, and blank lines. The function uses
    only positions in the parsers' results, which are the same in every version of Python."""
    lines = text.split("\n")
    cuts: list[tuple[int, int, int, int]] = []  # the row and column of the beginning, and of the end
    in_string: set[int] = set()  # the rows whose end may be in a string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            cuts.append(_span(node.body[0], lines))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            row, _, last_row, _ = _span(node, lines)
            in_string.update(range(row, last_row))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            (row, column), (last_row, last_column) = token.start, token.end
            cuts.append((row - 1, column, last_row - 1, last_column))
    for row, column, last_row, last_column in sorted(cuts, reverse=True):
        rest = lines[last_row][last_column:].lstrip("; ")  # a statement behind a docstring
        lines[row : last_row + 1] = [lines[row][:column] + rest, *[""] * (last_row - row)]
        in_string.difference_update(range(row, last_row + 1))
    kept = [line if row in in_string else line.rstrip() for row, line in enumerate(lines)]
    return "\n".join(line for row, line in enumerate(kept) if line or row in in_string)


def _span(node: ast.stmt | ast.expr, lines: list[str]) -> tuple[int, int, int, int]:
    """Return the row and column of a node's beginning and of its end; ast counts columns in bytes."""
    row, last_row = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    ends = ((row, node.col_offset), (last_row, node.end_col_offset))
    column, last_column = (len(lines[r].encode()[:c].decode()) for r, c in ends)
    return row, column, last_row, last_column


def part_of(module: str) -> str:
    """Return the file or folder of weft to which a module belongs: "ops/moe", "compute"."""
    names = module.removeprefix("weft.").split(".")
    part = "/".join(names[: 2 if names[0] == "ops" else 1])
    return part if (WEFT / part).is_dir() else f"{part}.py"


def tree_of_part(part: str) -> str:
    return tree_of(WEFT / part)[:12]


def placed(ranks: int, gpus: int, triton: str = TRITON) -> str:
    """Return the record's name for the rows of these ranks, with a suffix if Triton's version is not the one with which
    weft is developed."""
    return f"{ranks} ranks on {gpus} GPU{'s' * (gpus > 1)}{f', Triton {triton}' if triton != TRITON else ''}"


def ordered(names: Sequence[str], rows: Mapping[str, Row], tree: str) -> list[str]:
    """Return the checks that have not passed on this tree. Failed checks come first, then new checks and checks with
    kernels in a part that has changed since, then the rest, the oldest first."""

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
    """A file of check names, from which several processes each remove the next name under a lock. Each worker records
    the name that it holds, so that a crash can be attributed."""

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
