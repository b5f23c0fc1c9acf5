"""Timelines: the file that Perfetto reads, the order of lanes, and a picture with every kind of span. test_demo.py
tests calls on GPUs.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.backends.emulated import spmd
from weft.span import Span
from weft.trace.perfetto import events, write_json
from weft.trace.picture import draw, render, stacked, waited
from weft.trace.tracks import lanes

COPY = Span(1, "stream:copy", "pull", "copy", 0.0, 4.0)
WORK = Span(0, "kernel:2", "gemm", "compute", 0.0, 3.0)
WAIT = Span(0, "kernel:2", "wait", "wait", 3.0, 5.0, "tile 7, channel 1", (1, "stream:copy"))
CALL = Span(0, "stream:main", "silu_mul", "call", 5.0, 6.0)
SPANS = [COPY, WORK, WAIT, CALL]


def test_lanes_are_by_rank_then_family_then_number() -> None:
    spans = [Span(r, t, "", "compute", 0, 1) for r in (1, 0) for t in ("kernel:10", "kernel:9", "stream:main", "host")]
    order = ["host", "stream:main", "kernel:9", "kernel:10"]
    assert lanes(spans) == [(rank, track) for rank in (0, 1) for track in order]


def test_a_releaser_that_did_nothing_else_has_a_lane() -> None:
    assert lanes([WAIT]) == [(0, "kernel:2"), (1, "stream:copy")]


def test_perfetto_slices_keep_times_and_a_wait_has_an_arrow_from_its_releaser() -> None:
    trace_events = events(SPANS)
    slices = {e["name"]: e for e in trace_events if e["ph"] == "X"}
    assert (slices["gemm"]["ts"], slices["gemm"]["dur"], slices["gemm"]["cat"]) == (0.0, 3.0, "compute")
    assert slices["wait"]["args"] == {"detail": "tile 7, channel 1", "ended by": "rank 1 stream:copy"}
    start, end = (next(e for e in trace_events if e["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"] and start["ts"] == end["ts"] == 5.0
    assert (start["pid"], start["tid"]) == (1, slices["pull"]["tid"])
    assert (end["pid"], end["tid"]) == (0, slices["wait"]["tid"])
    names = {(e["pid"], e["args"]["name"]) for e in trace_events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}


def test_perfetto_lanes_have_names_and_keep_their_order() -> None:
    """Every lane has a name, even if it belongs to a releasing program and has no slice."""
    for spans in (SPANS, [WAIT]):
        trace_events = events(spans)
        named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace_events if e["name"] == "thread_name"}
        order = {
            (e["pid"], e["tid"]): e["args"]["sort_index"] for e in trace_events if e["name"] == "thread_sort_index"
        }
        assert [(rank, named[rank, thread]) for rank, thread in sorted(named, key=lambda lane: order[lane])] == lanes(
            spans
        )
        for span in spans:
            (lane,) = {(e["pid"], e["tid"]) for e in trace_events if e["ph"] == "X" and e["name"] == span.name}
            assert (lane[0], named[lane]) == (span.rank, span.track)


def test_chrome_can_read_the_json(tmp_path: Path) -> None:
    write_json(SPANS, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == events(SPANS)


def test_waiting_is_added_up_by_pair() -> None:
    assert waited([*SPANS, WAIT]) == {(0, 1): 4.0}


def test_concurrent_kernels_have_lanes_of_their_own() -> None:
    """The fused sum consists of two launches of one kernel, whose bars do not overlap."""

    def main(backend: Any) -> None:
        world = weft.World(backend)
        x, w = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16)
        weft.matmul_reduce_scatter(x, w, world=world, plan="fused")
        world.synchronize()

    _, report = spmd(main, 2, record=True)
    extents_by_lane: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for s in stacked(report.timeline):
        if s.kind == "compute":
            extents_by_lane.setdefault((s.rank, s.track), []).append((s.start, s.end))
    assert any(track.startswith("gemm_reduce (pull):") for _, track in extents_by_lane)
    for extents in extents_by_lane.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(extents)))


@pytest.mark.parametrize("spans", [SPANS, [WORK], [WAIT], []], ids=["all", "no waits", "only a wait", "nothing"])
def test_picture(tmp_path: Path, spans: list[Span]) -> None:
    draw({"one": spans, "two": SPANS}, tmp_path / "t.png", unit="us")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_programs_of_a_kernel_share_a_label_and_a_name() -> None:
    spans = [Span(rank, f"gemm:{n}", "gemm", "compute", 0.0, 3.0 + n) for rank in range(2) for n in range(4)]
    spans += [Span(0, "gemm (pull):0", "gemm", "compute", 1.0, 7.0), CALL]
    (axes,) = render({"one": spans}, unit="us").axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["main stream", "pull 0", "program 0\N{EN DASH}3", "program 0\N{EN DASH}3"]
    assert [text.get_text() for text in axes.texts].count("gemm") == 3
