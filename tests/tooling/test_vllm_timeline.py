"""Timelines of a layer from synthetic traces, and the way in which the benchmark of vLLM records and writes them."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.measure import vllm_serving
from bench.measure.vllm_engine import Load, Setup, TracedLoad, WorkerExtension
from bench.measure.vllm_serving import TRACED
from bench.measure.vllm_timeline import CLASSES, Kernel, NoTimeline, Trace, by_step, means, parsed, timeline, trace_of

LAYERS, EPOCH = 4, 7_000_000
ATTENTION = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
# (name, stream, start in the layer, us) of a layer of 100 us: the sum overlaps the second GEMM for 15 us, and no kernel
# runs from 65 to 70 us and from 90 to 100 us.
LAYER = [
    (ATTENTION, 7, 0, 20),
    ("nvjet_sm90_tst_256x128", 7, 20, 20),
    ("two_shot", 9, 40, 25),
    ("nvjet_sm90_tst_128x160", 7, 50, 15),
    ("rms_norm", 7, 70, 20),
]


def traced(
    steps: int = 3,
    ahead: float = 500.0,
    late: float = 0.0,
    tokens: int = 1024,
    graph: bool = False,
    behind: bool = False,
) -> Trace:
    """Return the trace of steps that begin every 1,000 us on the host. The host launches all kernels of a step at once, `ahead` us
    before the GPU starts the first, or each kernel 2 us before its start (`behind`); the kernels are `late` us later than usual."""
    base, events = 3_000_000, []
    for step in range(steps):
        launched = 1000.0 * step + 1
        for index, (name, stream, offset, us) in enumerate(LAYER * LAYERS):
            number = len(events)
            start = 1000.0 * step + ahead + late + 100 * (index // len(LAYER)) + offset
            call = start - 2 if behind else launched
            correlation = step if graph else number
            calls = (
                []
                if graph and index
                else [dict(ph="X", cat="cuda_runtime", ts=call, dur=1.5, tid=5, args=dict(correlation=correlation))]
            )
            arguments = dict(stream=stream, correlation=correlation)
            kernel = dict(
                ph="X", cat="gpu_memcpy" if "Memcpy" in name else "kernel", name=name, ts=start, dur=us, args=arguments
            )
            events += [*calls, kernel]
    begins = [(base + 1_000_000 * step, base + 1_000_000 * step + 90_000, tokens) for step in range(steps)]
    chrome = {"baseTimeNanoseconds": base, "traceEvents": [{"ph": "M", "name": "process_name"}, *events[::-1]]}
    return parsed(json.loads(json.dumps(trace_of(chrome, begins, EPOCH))))


def test_a_layer_lasts_from_its_attention_to_the_next() -> None:
    row = timeline([traced(), traced(late=3.0)], 1024, LAYERS)
    assert row["layer"]["us"] == 100 and row["layers_us"] == [100, 100, 100]
    assert row["layer"]["classes"] == {
        "attention": [20, 1], "fused GEMM": [0, 0], "communication": [25, 1], "GEMM": [35, 2], "norm": [20, 1], "rest": [0, 0],
    }  # fmt: skip
    assert (row["layer"]["overlap_us"], row["layer"]["idle_us"], row["layer"]["busy"]) == (15, 15, 0.85)
    starts_and_gaps = [(start, gap, stream, kind) for start, _, gap, stream, kind, _, _ in row["kernels"]]
    assert starts_and_gaps == [
        (0, 10, 7, "attention"), (20, 0, 7, "GEMM"), (40, 0, 9, "communication"), (50, -15, 7, "GEMM"), (70, 5, 7, "norm"),
    ]  # fmt: skip
    assert row["by_rank"] == [[0, 100, 15, 25], [3, 100, 15, 25]]


def test_a_step_has_the_hosts_time_and_the_time_to_the_next() -> None:
    """A step's kernels are those that the host launched during it, even if they run during the next step's launches."""
    step = timeline([traced(ahead=900.0)], 1024, LAYERS)["step"]
    assert step["us"] == 390 and step["classes"]["GEMM"] == [140, 8] and step["to_next_us"] == 610
    assert step["host_us"] == 90 and step["calls"] == 20 and step["calls_us"] == 30
    assert step["idle_for_host_us"] == 0 and not step["host_bound"]


def test_a_step_whose_kernels_wait_for_their_launches_is_host_bound() -> None:
    """The host launches each kernel 2 us before its start: the GPU's idle time is the host's up to half a us before the start."""
    step = timeline([traced(behind=True)], 1024, LAYERS)["step"]
    gaps = LAYERS * (5 - 0.5) + (LAYERS - 1) * (10 - 0.5)
    assert step["idle_for_host_us"] == gaps and step["host_bound"]


def test_the_kernels_of_a_graph_are_launched_by_one_call() -> None:
    step = timeline([traced(graph=True)], 1024, LAYERS)["step"]
    assert step["calls"] == 1 and step["classes"]["attention"] == [80, 4] and step["idle_for_host_us"] == 0


def test_a_layer_in_two_parts_contains_both() -> None:
    one = traced()
    parts = [
        Kernel(ATTENTION, k.start + 35, k.start + 45, 7, k.call_begin, k.call_end)
        for k in one.kernels
        if k.kind == "attention"
    ]
    two = Trace(one.steps, sorted([*one.kernels, *parts], key=lambda kernel: kernel.start), one.calls)
    row = timeline([two], 1024, LAYERS)
    assert row["layer"]["us"] == 100 and row["layer"]["classes"]["attention"] == [30, 2]


def test_a_trace_without_the_step_or_its_attention_says_so() -> None:
    with pytest.raises(NoTimeline, match=r"no step of 8192 tokens .* the steps by tokens are \{1024: 3\}.*60 kernels"):
        timeline([traced()], 8192, LAYERS)
    with pytest.raises(NoTimeline, match=r"4 attention kernels in a step of 3 layers; .*two_shot"):
        timeline([traced()], 1024, 3)
    empty = parsed(trace_of({"traceEvents": []}, [(EPOCH, EPOCH + 1, 1024)], EPOCH))
    with pytest.raises(NoTimeline, match="the trace has 0 kernels"):
        timeline([empty], 1024, LAYERS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16", "rest"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<(AllReduceFusionPattern)1",
            "communication",
        ),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "rest"),
        ("two_shot_low_latency", "communication"),
        ("sum_norm", "communication"),
        ("low_latency_gemm", "fused GEMM"),
        ("signaled_gemm", "GEMM"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("fused_moe_kernel", "GEMM"),
        ("void vllm::moe::moe_sum_vec_kernel<c10::BFloat16", "rest"),
        ("triton_red_fused_0", "norm"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16", "rest"),
    ],
)
def test_classes_of_kernels(name: str, kind: str) -> None:
    assert Kernel(name, 0, 1, 7, 0, 0).kind == kind and kind in CLASSES


class Worker(WorkerExtension):
    def execute_model(self, scheduled: Any) -> str:
        return f"{scheduled.total_num_scheduled_tokens} tokens"


def test_a_worker_records_its_steps_only_during_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = functools.partial(torch.profiler.profile, activities=[torch.profiler.ProfilerActivity.CPU])
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profile())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("TEARDOWN_CUPTI", "")
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "")
    worker = Worker()
    assert worker.start_trace() is None
    assert [worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens)) for tokens in (8, 64)] == [
        "8 tokens",
        "64 tokens",
    ]
    fields = worker.stop_trace(0)
    assert isinstance(fields, dict), fields
    trace = parsed(fields)
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    assert [step.tokens for step in trace.steps] == [8, 64] and not trace.kernels
    assert 0 < trace.steps[0].begin <= trace.steps[0].end <= trace.steps[1].begin


@pytest.mark.parametrize("method", ["start_trace", "stop_trace"])
def test_an_error_of_one_ranks_profiler_is_the_result(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker returns its error, so that the other ranks' answers are read too."""

    def collective_rpc(name: str, args: tuple[int, ...] = ()) -> list[Any]:
        return [None, "CUPTI_ERROR_NOT_INITIALIZED"] if name == method else [None, None]

    monkeypatch.setattr(Load, "run", lambda load, llm: SimpleNamespace(seconds=1.0))
    result = TracedLoad(Load([(16, 1)], 1), 16, LAYERS, tmp_path / "trace.json.gz").run(
        SimpleNamespace(collective_rpc=collective_rpc)
    )
    assert result.keys() == {"error"} and method in result["error"] and "CUPTI_ERROR_NOT_INITIALIZED" in result["error"]


def test_a_worker_whose_profiler_fails_still_runs_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(activities: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setenv("TEARDOWN_CUPTI", "")
    monkeypatch.setenv("DISABLE_CUPTI_LAZY_REINIT", "")
    worker = Worker()
    assert "RuntimeError: no CUPTI" in (worker.start_trace() or "")
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=8)) == "8 tokens" and not worker.traced_steps


class TracedEngine:
    """An engine whose layers all have the same trace, or whose steps of `fails` tokens have no timeline."""

    facts = dict(vllm="0.26.0", gpu="H200")
    setup = SimpleNamespace(model="Llama-8B", layers=LAYERS, gpus=(0, 1), tokens_a_step=4096)

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.order = fails, list[str]()

    def serve(self, load: Load) -> SimpleNamespace:
        self.order.append("serve")
        return SimpleNamespace(seconds=0.5)

    def timeline(self, load: Load, tokens: int) -> dict[str, Any]:
        self.order.append("trace")
        return {"error": "no CUPTI"} if tokens == self.fails else timeline([traced(tokens=tokens)], tokens, LAYERS)


def test_each_engine_and_number_of_tokens_has_a_file_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may measure several models."""
    sent = list[TracedLoad]()
    monkeypatch.setattr(vllm_serving.Engine, "answer", lambda engine, timeout: {})
    for model in ("Llama-8B", "Llama-70B"):
        for method in ("stock", "stock again"):
            engine = vllm_serving.Engine(Setup(model, method, (0, 1), 4096, 0.5, 0), tmp_path / f"{model}.log")
            engine.pipe = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
            for tokens in (24, 64):
                engine.timeline(TRACED[tokens], tokens)
    assert len({traced_load.file for traced_load in sent}) == len(sent) == 8


def test_rows_compare_each_method_with_stock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engines trace only steps that fit into their budget of tokens, after all untraced turns; a failure affects only its row."""
    engines = {"weft": TracedEngine(fails=2048), "stock": TracedEngine()}
    vllm_serving.measure_timeline(engines, argparse.Namespace(out=tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "vllm_timeline.jsonl").read_text().splitlines()]
    assert [(row["tokens"], row["method"]) for row in rows] == [
        (n, m) for n in TRACED if n <= 4096 for m in ("stock", "weft")
    ]
    assert engines["weft"].order == ["serve"] * 10 + ["trace"] * 6
    assert {row["tokens"]: row.get("error") for row in rows if row["method"] == "weft"} == {
        4096: None,
        2048: "no CUPTI",
        1024: None,
        64: None,
        24: None,
    }
    assert (
        rows[1]["ratio_layer"] == {"attention": 1, "communication": 1, "GEMM": 1, "norm": 1, "all": 1}
        and "ratio_layer" not in rows[0]
    )
    assert "Llama-8B 2048 tokens, weft: no CUPTI" in capsys.readouterr().out
    assert "two_shot" in (tmp_path / "vllm_timeline.txt").read_text() and len(json.dumps(rows[0])) < 4500


def test_the_means_divide_a_layer_by_what_runs() -> None:
    """A sum counts only while no GEMM runs. The first step is left out, and a rank's wait for others does not count as a
    step's communication."""
    waiting = traced()
    sums = [Kernel("two_shot", k.start - 4, k.end, 9, k.call_begin, k.call_end) for k in waiting.kernels if k.kind == "communication"]  # fmt: skip
    waiting.kernels[:] = [k for k in waiting.kernels if k.kind != "communication"] + sums
    row = means([traced(), waiting], 1024, LAYERS)
    assert row == {
        "steps": 2, "step_us": 390, "step_communication_us": 25 * LAYERS,
        "layer": {"us": 100, "compute_us": 55, "other_us": 20, "communication_us": 10, "idle_us": 15},
    }  # fmt: skip


def test_a_steps_first_sum_includes_the_wait_for_the_last_rank() -> None:
    """A copy is no sum."""
    waiting = traced()
    kernel = min((k for k in waiting.kernels if k.kind == "communication"), key=lambda k: k.start)
    waiting.kernels[waiting.kernels.index(kernel)] = Kernel("two_shot", kernel.start - 4, kernel.end, 9, kernel.call_begin, kernel.call_end)  # fmt: skip
    waiting.kernels.insert(
        0, Kernel("Memcpy DtoD", kernel.start - 99, kernel.start, 9, kernel.call_begin, kernel.call_end)
    )
    steps = by_step([traced(), waiting], 1024, LAYERS)
    plain = by_step([traced()], 1024, LAYERS)
    assert len(steps["layer_us"]) == 3 and set(steps["layer_us"]) == {100}
    assert steps["first_gemm_us"] == plain["first_gemm_us"] and min(steps["first_gemm_us"]) > 0
    assert (
        steps["first_sum_us"][0] == plain["first_sum_us"][0] + 4
        and steps["first_sum_us"][1:] == plain["first_sum_us"][1:]
    )
