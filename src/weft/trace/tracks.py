"""The order in which a timeline shows its tracks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..span import Span

_FAMILY = {"host": 0, "stream": 1, "all-gather": 3, "copy engine": 4, "reduce": 5}


def _key(lane: tuple[int, str]) -> tuple[int, int, list[tuple[int, str]]]:
    rank, track = lane
    words, family = re.findall(r"\d+|\D+", track), re.split(r":| \d+$", track)[0]
    return rank, _FAMILY.get(family, 2), [(int(p), "") if p.isdigit() else (-1, p) for p in words]


def lanes(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Return every (rank, track), sorted by rank and, within a rank, in this order: the host, streams, programs (by
    number) or compute kernels, communication."""
    seen = {(span.rank, span.track) for span in spans}
    return sorted(seen | {span.releaser for span in spans if span.releaser}, key=_key)
