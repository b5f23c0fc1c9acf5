"""What docs/api.md lists of each module, so that the page says something where no site is made of it: public names, and of
weft's own the first sentence of the docstring."""

from __future__ import annotations

import importlib
import inspect
import re

BLOCK = re.compile(r"<!--names of (\S+)-->\n.*?<!--/-->\n", re.S)


def filled(text: str) -> str:
    return BLOCK.sub(lambda block: f"<!--names of {block[1]}-->\n{names(block[1])}\n<!--/-->\n", text)


def names(name: str) -> str:
    module = importlib.import_module(name)
    own = [each for each, item in inspect.getmembers(module) if not each.startswith("_") and _of(name, item)]
    own = [each for each in getattr(module, "__all__", own) if not inspect.ismodule(getattr(module, each))]
    if name != "weft":
        return ", ".join(f"`{each}`" for each in own)
    return "\n".join(
        [
            "| name | what it is |",
            "| --- | --- |",
            *(f"| `{each}` | {sentence(getattr(module, each))} |" for each in own),
        ]
    )


def sentence(item: object) -> str:
    """The first of its docstring, without its source and what follows a semicolon, which the docstring has."""
    first = " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
    sentences = re.split(r"(?<=\.)\s(?=[A-Z])", first)
    short = len(sentences[0].split()) < 3 and len(sentences) > 1  # "Collective."
    said = re.sub(r" \([A-Z][^()]*, section [^()]*\)", "", " ".join(sentences[: 1 + short])).partition(";")[0]
    return said.rstrip(".").replace("|", "\\|")


def _of(module: str, item: object) -> bool:
    """Whether it is defined there: of a module without `__all__`."""
    return getattr(item, "__module__", "") == module
