"""For `make docs`: README.md is the first page, and links that lead out of docs/ become text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def on_files(files: Files, *, config: Any) -> Files:
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A link to ../README.md leads to the first page; other links out of docs/ become text."""
    markdown = markdown.replace("](../README.md", "](index.md")
    out = r"\.\./[^)]+" + (r"|(?:src|tests|examples|bench|gpu)/[^)]+" if page.file.src_uri == "index.md" else "")
    return re.sub(rf"\[([^\]]+)\]\((?:{out})\)", r"\1", markdown)
