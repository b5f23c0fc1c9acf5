"""The demo's picture of a call on GPUs, generated from events that torch.profiler records, shows exactly the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.progress import Progress
from torch.profiler import ProfilerActivity

from weft import demo
from weft.backends.barrier import barrier, wait_group, wait_word
from weft.compute.elementwise import silu_mul
from weft.compute.gemm import matmul
from weft.compute.signaled_gemm import signaled_gemm
from weft.demo import RankTimes, on_gpus, panels, staged
from weft.ops.all_gather_matmul.kernels import all_gather_gemm, copied_gemm
from weft.ops.matmul_reduce.kernels import gemm_reduce
from weft.span import Span
from weft.trace import profile
from weft.trace.picture import render
from weft.trace.profile import recorded, spans_of
from weft.transport.low_latency_kernels import gather_low_latency, scatter_low_latency
from weft.transport.sums import sum_staged

Events = list[dict[str, Any]]
ARGUMENTS = "(ncclDevKernelArgsStorage<4096ul>)"
GATHER, SCATTER = (
    "ncclDevKernel_AllGather_RING_LL" + ARGUMENTS,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL" + ARGUMENTS,
)
UP, DOWN = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
PUSH, OWN = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"
CLOCKS = 7.9e12, 7.9e12 + 40_000.0  # in microseconds, the start of the call according to each rank's clock
FIRST_WAIT = 94_000.0  # the time that rank 0 waits for rank 1


def event(
    name: str, start: float, us: float, stream: int = 7, programs: int = 132, threads: int = 256
) -> dict[str, Any]:
    """Return a kernel, a copy or a runtime call in the format of torch.profiler's trace."""
    if name.startswith("Memcpy"):
        return dict(ph="X", cat="gpu_memcpy", name=name, ts=start, dur=us, args=dict(stream=stream, bytes=1 << 25))
    if name.startswith("cuda"):
        return dict(ph="X", cat="cuda_runtime", name=name, ts=start, dur=us, args={})
    args = dict(stream=stream, grid=[programs, 1, 1], block=[threads, 1, 1])
    return dict(ph="X", cat="kernel", name=name, ts=start, dur=us, args=args)


def before(start: float, wait: float) -> Events:
    """Return the sleep and the barrier, which ends when the call starts."""
    return [
        dict(ph="M", name="process_name", args={}),
        event("cudaGraphLaunch", start - wait - 4900, 30),
        event("at::cuda::(anonymous namespace)::spin_kernel(long)", start - wait - 5000, 5000, 7, 1, 1),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL" + ARGUMENTS, start - wait, wait, 7, 1, 512),
    ]


def sequential(start: float, wait: float, late: float) -> Events:
    """Return a call of 131 + 1395 + 98 + 702 + 163 us that begins 12 us after the barrier, with gaps of 2 us. Rank 1's
    GEMM is `late`, so its last collective waits for less time."""
    stages = ((GATHER, 131.0), (UP, 1395 + late), ("silu_mul", 98.0), (DOWN, 702.0), (SCATTER, 163 - late))
    events, begin = before(start, wait), start + 12
    for name, us in stages:
        events.append(event(name, begin, us))
        begin += us + 2
    return events


def overlapped(start: float, wait: float, late: float) -> Events:
    """Return two GEMMs on two streams beside a copy, then the two launches of one kernel, one of which sums the other's
    tiles."""
    t0 = start + 11
    return [
        *before(start, wait),
        event(OWN, t0, 19), event("barrier", t0 + 20, 5 + late, 21, 1, 32), event(PUSH, t0 + 27 + late, 88, 21),
        event("barrier", t0 + 117 + late, 4, 21, 1, 32), event(UP, t0 + 20, 705), event(UP, t0 + 690, 700, 22),
        event("silu_mul", t0 + 1393, 98), event("gemm_reduce", t0 + 1494, 732, 23, 64, 128),
        event("gemm_reduce", t0 + 1493, 715),
    ]  # fmt: skip


def results(ranks: int = 2, auto: Callable[..., Events] = overlapped) -> list[dict[str, RankTimes]]:
    """Return the results of the demo's ranks."""

    def measured(rank: int, us: float, plan: Callable[..., Events]) -> RankTimes:
        events = plan(CLOCKS[rank % 2], 3.0 if rank else FIRST_WAIT, 4.0 * (rank % 2))
        return RankTimes(5e-3, {"eager": us + 30, "CUDA graph": us}, staged(spans_of(rank, events[::-1])), 2000.0)

    plans = {"sequential": (2487.0, sequential), "auto": (2231.0, auto)}
    return [{name: measured(rank, *plan) for name, plan in plans.items()} for rank in range(ranks)]


def texts(figure: Figure) -> Iterator[Text]:
    """Return all drawn text; matplotlib also keeps tick labels outside an axis."""
    ticks = [tick for axes in figure.axes for tick in axes.xaxis.get_major_ticks()]
    beyond = {tick.label1 for tick in ticks if not 0 <= tick.get_loc() <= figure.axes[0].get_xlim()[1]}
    for text in figure.findobj(Text):
        if isinstance(text, Text) and text.get_visible() and text.get_text() and text not in beyond:
            yield text


def lanes_of(spans: list[Span], rank: int = 0) -> dict[str, list[str]]:
    names_by_lane: dict[str, list[str]] = {}
    for s in sorted(spans, key=lambda s: s.start):
        if s.rank == rank:
            names_by_lane.setdefault(s.track, []).append(s.name)
    return names_by_lane


@pytest.mark.parametrize(("plan", "start", "end"), [(sequential, 12, 2509), (overlapped, 11, 2237)])
def test_a_call_starts_where_all_ranks_left_the_barrier(plan: Callable[..., Events], start: float, end: float) -> None:
    """One rank waited 94 ms for another rank, whose clock is 40 ms ahead; the picture shows neither the wait nor the
    difference."""
    for rank, wait in enumerate((FIRST_WAIT, 3.0)):
        spans = spans_of(rank, plan(CLOCKS[rank], wait, 0.0))
        assert {s.rank for s in spans} == {rank}
        assert min(s.start for s in spans) == pytest.approx(start, abs=0.01)
        assert max(s.end for s in spans) == pytest.approx(end, abs=0.01)
        assert not any("spin" in s.detail or "AllReduce" in s.detail for s in spans)


def test_without_a_barrier_there_is_no_call() -> None:
    assert spans_of(0, []) == spans_of(0, [event(UP, 0, 10)]) == []


def test_lanes_and_stages_have_names() -> None:
    (rank, _) = results()
    assert lanes_of(rank["sequential"].spans) == {
        "all-gather": ["all-gather"],
        "compute": ["gate, up GEMM", "SiLU-mul", "down GEMM"],
        "reduce": ["reduce-scatter"],
    }
    assert lanes_of(rank["auto"].spans) == {
        "copy engine": ["all-gather", "barrier", "all-gather", "barrier"],
        "compute": ["gate, up GEMM", "SiLU-mul", "down GEMM"],
        "compute 2": ["gate, up GEMM"],
        "reduce": ["reduce-scatter"],
    }


def test_later_copies_belong_to_the_reduce_scatter() -> None:
    events = [
        *before(0, 3), event("all_gather_gemm", 1, 10), event(DOWN, 12, 10), event(PUSH, 23, 5),
        event("sum_staged", 29, 2),
    ]  # fmt: skip
    assert lanes_of(staged(spans_of(0, events))) == {
        "compute": ["all-gather + gate, up GEMM", "down GEMM"], "copy engine": ["reduce-scatter"], "reduce": ["sum"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lane", "kernels"),
    [
        ("compute", (all_gather_gemm, copied_gemm, silu_mul, matmul, gemm_reduce, signaled_gemm)),
        ("all-gather", (gather_low_latency,)),
        ("reduce", (scatter_low_latency, sum_staged, wait_group, wait_word)),
        ("copy engine", (barrier,)),
    ],
)
def test_every_kernel_of_the_layer_has_a_lane_and_a_name(lane: str, kernels: tuple[Any, ...]) -> None:
    for kernel in kernels:
        (span,) = spans_of(0, [*before(0, 3), event(kernel.__name__, 1, 5)])
        assert span.track == lane and span.detail == kernel.__name__
        assert span.name != kernel.__name__ or kernel is barrier
    assert {silu_mul.__name__, all_gather_gemm.__name__, copied_gemm.__name__} == set(demo.HIDDEN)


@pytest.mark.parametrize(
    "name",
    [
        UP,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_kernel__5x_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)",
    ],
)
def test_a_library_gemm_is_a_gemm(name: str) -> None:
    (span,) = spans_of(0, [*before(0, 3), event(name, 1, 5)])
    assert (span.track, span.name, span.kind) == ("compute", "GEMM", "compute")


def test_the_picture_is_cut_to_the_call_and_has_the_gain() -> None:
    figure = render(panels(results()), unit="us")
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 1.005 * 2497))
    names = [text.get_text() for text in texts(figure)]
    assert names.count("271 us saved (11%)") == 1
    for stage, times in {
        "all-gather": 4,
        "SiLU-mul": 4,
        "down GEMM": 4,
        "gate, up GEMM": 6,
        "reduce-scatter": 4,
    }.items():
        assert sum(text.get_text() == stage for axes in (above, below) for text in axes.texts) == times
    assert [label.get_text() for label in below.get_yticklabels()] == ["compute", "copy engine", "reduce"] * 2
    titles = [axes.get_title(loc="left") for axes in (above, below)]
    assert titles == ["sequential (cuBLAS, then NCCL): median 2487 us", "auto: median 2231 us, 1.11x"]
    assert not any("stream" in name for name in names)


def test_time_lost_is_called_lost() -> None:
    slow = panels(
        results(auto=lambda start, wait, late: [*sequential(start, wait, late), event(SCATTER, start + 2600, 12)])
    )
    assert "103 us lost (4%)" in [text.get_text() for text in texts(render(slow, unit="us"))]


@pytest.mark.parametrize("ranks", [2, 8])
def test_texts_do_not_overlap_or_leave_the_page(ranks: int) -> None:
    figure = render(
        panels(results(ranks)), unit="us", heading="tensor-parallel MLP, 8 x a GPU with a long name, and sizes"
    )
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    assert {f"rank {rank}" for rank in range(min(ranks, 4))} == {name for name, _ in boxes if name.startswith("rank")}
    page = figure.bbox
    for name, box in boxes:
        assert page.x0 <= box.x0 < box.x1 <= page.x1 and page.y0 <= box.y0 < box.y1 <= page.y1, name
    for (one, a), (two, b) in combinations(boxes, 2):
        assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1), (one, two)


def test_the_profiler_starts_before_the_ranks_meet_and_records_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """This demo runs on a CPU. The demo does not record the first call, and each call follows a host barrier, a sleep
    and a device barrier."""
    steps: list[str] = []
    calls = iter((torch.sin, torch.cos))

    def call() -> None:
        steps.append("call")
        next(calls)(torch.ones(4))

    monkeypatch.setattr(profile, "ACTIVITIES", (ProfilerActivity.CPU,))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: steps.append("sleep"))
    world = SimpleNamespace(
        rank=0, zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype), current_stream=lambda: None,
        exchange=lambda value, title="": steps.append("hosts"), all_reduce=lambda word, stream: steps.append("GPUs"),
        synchronize=lambda: steps.append("done"),
    )  # fmt: skip
    ran = {e["name"] for e in recorded(world, call) if e.get("cat") == "cpu_op"}  # type: ignore[arg-type]
    assert "aten::cos" in ran and "aten::sin" not in ran
    assert steps == ["hosts", "sleep", "GPUs", "call", "done"] * 2


@pytest.mark.parametrize("seen", [True, False])
def test_the_demo_on_gpus_writes_its_picture_if_anything_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    rank_results = results()
    if not seen:
        rank_results[1]["auto"].spans = []
    monkeypatch.setattr(demo, "spmd", lambda fn, ranks: rank_results)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    result = on_gpus(3, tmp_path / "demo.png", Progress(disable=True))
    assert result.ok and (tmp_path / "demo.png").exists() == seen
    assert ("recorded nothing" in result.notes[0]) != seen
    assert "2487 us with cuBLAS + NCCL, 2231 us with weft, 2000 us without" in result.notes[-1]


def test_the_emulated_layer_ends_earlier_with_weft(tmp_path: Path) -> None:
    """In the sequential plan, the stages run one after another; in weft's plan, collectives run beside GEMMs."""
    drawn: dict[str, list[Span]] = {}

    def draw(panels: dict[str, list[Span]], path: Path, **_: object) -> None:
        drawn.update(panels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "draw", draw)
        notes = demo.compared(tmp_path / "picture.png")
    before, after = drawn.values()
    machine = demo.shipped(demo.PROFILE)
    assert machine is not None
    parts, (m, h, i) = demo.PartTimes(machine), demo.REAL
    took = {s.name: s.end - s.start for s in before}
    assert took["all-gather"] == pytest.approx(parts.latency("all_gather", 2 * m * h), rel=1e-6)
    assert took["gate, up GEMM"] == pytest.approx(parts.gemm(m, 2 * i // 4, h), rel=1e-6)
    assert took["reduce-scatter"] == pytest.approx(took["all-gather"])
    lanes = lanes_of(before)
    assert lanes == {"SMs": ["gate, up GEMM", "SiLU-mul", "down GEMM"], "link": ["all-gather", "reduce-scatter"]}
    assert len(lanes_of(after)["SMs"]) == 2 * demo.EMULATED_RANKS + 2
    busy = sum(s.end - s.start for s in after if s.track == "SMs")
    end = max(s.end for s in after)
    assert busy < end < 1.05 * busy < max(s.end for s in before), "the SMs must hardly wait"
    assert f"{1 - end / max(s.end for s in before):.0%} earlier" in notes[1]
