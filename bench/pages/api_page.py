"""The lists in docs/api.md, which make the page useful without the site: the public names of each module and, for the
names of `weft` itself, the first sentence of the docstring."""

from __future__ import annotations

import importlib
import inspect
import re

BLOCK = re.compile(r"<!--names of (\S+)-->\n.*?<!--/-->\n", re.S)


def filled(text: str) -> str:
    return BLOCK.sub(lambda block: f"<!--names of {block[1]}-->\n{names(block[1])}\n<!--/-->\n", text)


def names(name: str) -> str:
    module = importlib.import_module(name)
    public = [key for key, item in inspect.getmembers(module) if not key.startswith("_") and _defined_in(name, item)]
    public = [key for key in getattr(module, "__all__", public) if not inspect.ismodule(getattr(module, key))]
    if name != "weft":
        return ", ".join(f"`{key}`" for key in public)
    return "\n".join(
        [
            "| name | what it is |",
            "| --- | --- |",
            *(f"| `{key}` | {sentence(getattr(module, key))} |" for key in public),
        ]
    )


def sentence(item: object) -> str:
    """Return the first sentence of the docstring without "Return" and parentheses. The sentence is cut at a semicolon,
    at ", or" and, after four words, at a colon."""
    paragraph = " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
    sentences = re.split(r"(?<=\.)\s(?=[A-Z`])", paragraph)
    short = len(sentences[0].split()) < 3 and len(sentences) > 1  # "Collective."
    text = re.sub(r" \([^()]*\)", "", " ".join(sentences[: 1 + short])).removeprefix("Return ")
    text = re.split(r"; |, or ", text)[0]
    head, colon, _ = text.partition(": ")
    text = head if colon and len(head.split()) >= 4 else text
    return (
        (text[:1].upper() + text[1:] if re.match(r"the |this |each |how ", text) else text)
        .rstrip(".")
        .replace("|", "\\|")
    )


def _defined_in(module: str, item: object) -> bool:
    """Return whether the module itself defines the object. This is needed for modules without `__all__`."""
    return getattr(item, "__module__", "") == module
