"""Measurements that end within a given time; the next run with the same folder and arguments continues them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import weft

BEGAN = time.time()  # about the time at which the program began
T = TypeVar("T")


def arguments_of(words: Sequence[str]) -> str:
    """Return a program's name and its arguments, without the folder and the seconds."""
    kept = [Path(words[0]).stem, *words[1:]]
    for option in {"--out", "--seconds"}.intersection(kept):
        position = kept.index(option)
        del kept[position : position + 2]
    return " ".join(kept)


def unfinished(world: weft.World | None, out: Path, cases: Mapping[str, T], seconds: float = 1e9) -> Iterator[T]:
    """Yield the cases of this program that OUT/cases.txt does not list as ended, until the program has run for
    `seconds`.

    A case ends when the caller asks for the next one. A case that began in an earlier run and did not end comes last,
    because it may have crashed that run. The function prints the names of the remaining cases. Collective; a program of
    one process has no World.
    """
    path, is_rank_0 = out / "cases.txt", world is None or world.rank == 0

    def exchange(value: Any) -> list[Any]:
        return world.exchange(value) if world else [value]

    text = path.read_text() if is_rank_0 and path.exists() else ""
    known = set(exchange(text)[0].splitlines())
    program = arguments_of(sys.argv)
    todo = [name for name in cases if f"ended: {program}: {name}" not in known]
    if is_rank_0 and len(todo) < len(cases):
        print(f"{len(cases) - len(todo)} of {len(cases)} cases are in {path}, and not measured again", flush=True)
    todo.sort(key=lambda name: f"began: {program}: {name}" in known)

    def note(event: str, name: str) -> None:
        if is_rank_0:
            with path.open("a") as file:
                file.write(f"{event}: {program}: {name}\n")

    for i, name in enumerate(todo):
        if max(exchange(time.time() - BEGAN)) > seconds:
            if is_rank_0:
                print(f"{len(todo) - i} cases left: {', '.join(todo[i:])}", flush=True)
            return
        note("began", name)
        yield cases[name]
        note("ended", name)


def keep(world: weft.World | None, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a file, on rank 0."""
    if world is None or world.rank == 0:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
