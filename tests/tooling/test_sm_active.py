"""bench/measure/sm_active.py reads the profiler's report of one MoE layer."""

from __future__ import annotations

import pytest

from bench.measure.sm_active import ACTIVE, DURATION, kernels_of, share

HEAD = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'


def report(*kernels: tuple[str, dict[str, str]]) -> list[str]:
    rows = [
        f'"{number}","{name}","Command line profiler metrics","{metric}","","{value}"'
        for number, (name, metrics) in enumerate(kernels)
        for metric, value in metrics.items()
    ]
    return ["==PROF== Connected to process 7", "a line of the layer's own", HEAD, *rows]


def test_kernels_are_read_in_their_order() -> None:
    """Two launches of one kernel remain two."""
    kernels = [
        ("gate, of 8", {ACTIVE: "50.5", DURATION: "1,000"}),
        ("experts", {DURATION: "3000", ACTIVE: "90"}),
        ("experts", {DURATION: "1000", ACTIVE: "10"}),
    ]
    assert kernels_of(report(*kernels)) == [
        ("gate, of 8", 1000.0, 50.5),
        ("experts", 3000.0, 90.0),
        ("experts", 1000.0, 10.0),
    ]


def test_the_share_is_weighted_by_time() -> None:
    us, active = share([("gate", 1000.0, 50.0), ("experts", 3000.0, 90.0)])
    assert us == 4.0 and active == pytest.approx(0.8)


def test_a_kernel_without_its_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="experts: ncu reports"):
        kernels_of(report(("experts", {ACTIVE: "90"})))
