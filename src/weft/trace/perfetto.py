"""Spans are written as Chrome trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

A rank is a process, a track is a thread of the process, and an arrow leads to each wait from the track whose notify
ended the wait.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..span import Span
from .tracks import lanes

TraceEvent = dict[str, Any]  # an event in its JSON form


def events(spans: Sequence[Span]) -> list[TraceEvent]:
    """Return trace events with times in microseconds (the emulator's unit, one kB, counts as a microsecond)."""
    thread = {lane: number for number, lane in enumerate(lanes(spans))}
    out: list[TraceEvent] = []
    for rank in sorted({rank for rank, _ in thread}):
        out.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for (rank, track), number in thread.items():
        thread_ids = {"pid": rank, "tid": number}
        out.append({"ph": "M", "name": "thread_name", **thread_ids, "args": {"name": track}})
        out.append({"ph": "M", "name": "thread_sort_index", **thread_ids, "args": {"sort_index": number}})
    for number, span in enumerate(spans):
        thread_ids = {"pid": span.rank, "tid": thread[span.rank, span.track]}
        args = {"detail": span.detail} if span.detail else {}
        if span.releaser:
            args["ended by"] = f"rank {span.releaser[0]} {span.releaser[1]}"
        out.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                **thread_ids,
                "ts": span.start,
                "dur": span.end - span.start,
            }
            | ({"args": args} if args else {})
        )
        if span.releaser in thread:
            flow = {"name": "release", "cat": "release", "id": number, "ts": span.end}
            out.append({"ph": "s", **flow, "pid": span.releaser[0], "tid": thread[span.releaser]})
            out.append({"ph": "f", "bp": "e", **flow, **thread_ids})
    return out


def write_json(spans: Sequence[Span], path: Path) -> None:
    path.write_text(json.dumps({"traceEvents": events(spans), "displayTimeUnit": "ns"}))
