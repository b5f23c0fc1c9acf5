"""Figures are SVG files whose bytes depend only on the drawing."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


def figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    empty = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(empty)
    return empty


def save(drawn: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "weft", "svg.fonttype": "none"}):
        drawn.savefig(path, metadata={"Date": None})
