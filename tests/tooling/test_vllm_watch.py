"""The watch over a vLLM worker finds the slow step among many, and the cause of its time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.measure import vllm_engine, vllm_watch
from bench.measure.vllm_watch import Watch

SLOW = 0.05  # in seconds


class Worker:
    """A worker whose steps need no time, except one of 101 tokens, during which garbage is collected."""

    def execute_model(self, scheduler_output: Any) -> int:
        tokens: int = scheduler_output.total_num_scheduled_tokens
        if tokens == 101:
            gc.collect()
            time.sleep(SLOW)
        return tokens


@pytest.fixture(autouse=True)
def _callbacks() -> Iterator[None]:
    callbacks = list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks


def test_the_slowest_step_is_found() -> None:
    """The step is compared with steps of equally many tokens: a longer step with more tokens does not count."""
    worker: Any = Worker()
    watch = Watch(worker, lambda tokens: f"form of {tokens}")
    watch.begin()
    for tokens in (100, 100, 101, 100, 100, 5000):
        assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens)) == tokens
    record = watch.end()
    slowest = record["slowest"][0]
    assert record["steps"] == 6 and (slowest["tokens"], slowest["step"], slowest["form"]) == (101, 2, "form of 101")
    assert slowest["ms"] >= 1e3 * SLOW and slowest["host"] >= 1e3 * SLOW
    assert 0 < slowest["gc"] <= record["gc ms"] and record["longest gc ms"] <= record["gc ms"]


def test_a_turn_has_its_own_record() -> None:
    worker: Any = Worker()
    watch = Watch(worker, lambda tokens: "vLLM")
    watch.begin()
    worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=101))
    gc.disable()
    try:
        watch.begin()
        assert {name: watch.end()[name] for name in ("gc ms", "steps", "slowest")} == {
            "gc ms": 0.0,
            "steps": 0,
            "slowest": [],
        }
    finally:
        gc.enable()


def test_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn's record contains the changes: two calls of cudaMalloc, and the memory of kernels that CUDA loaded outside
    torch's pool."""
    allocations, free = iter([5, 7]), iter([70 << 20, 40 << 20])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda: {"num_device_alloc": next(allocations), "num_alloc_retries": 1}
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 100 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 << 20)
    monkeypatch.setattr(torch.cuda.memory, "host_memory_stats", lambda: {"num_host_alloc": 3})
    watch = Watch(Worker(), lambda tokens: "vLLM")
    watch.begin()
    record = watch.end()
    assert record["num_device_alloc"] == 2 and record["MiB beside torch"] == 30
    assert "num_alloc_retries" not in record and "cudaHostAlloc" not in record


def test_ranks_are_joined_by_the_greatest_number() -> None:
    """The slowest steps belong to the rank that had the slowest single step."""
    ranks = [
        {"steps": 3, "gc ms": 1.0, "slowest": [{"over the median": 2.0, "tokens": 1}]},
        {"steps": 3, "num_device_alloc": 4, "gc ms": 0.5, "slowest": [{"over the median": 9.0, "tokens": 2}]},
        {"steps": 0, "gc ms": 0.0, "slowest": []},
    ]
    record = vllm_watch.of_all(ranks)
    assert (record["steps"], record["gc ms"], record["num_device_alloc"]) == (3, 1.0, 4)
    assert record["slowest"][0]["tokens"] == 2


def test_an_engine_watches_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch covers the workers, through methods that vLLM provides, and this process."""

    class Extended(Worker, vllm_engine.WorkerExtension):
        pass

    worker = Extended()
    llm = SimpleNamespace(llm_engine=None, collective_rpc=lambda name: [getattr(worker, name)()])
    llm.collective_rpc("watch_turns")
    monkeypatch.setattr(vllm_engine, "requests", lambda load: ([], []))
    step = SimpleNamespace(total_num_scheduled_tokens=101)

    def serve(*_: Any) -> vllm_engine.Served:
        worker.execute_model(step)
        return vllm_engine.Served(1.0)

    monkeypatch.setattr(vllm_engine, "serve", serve)
    served = vllm_engine.serve_watched(llm, vllm_engine.Load([], 1), vllm_watch.watched_collections())
    assert served.seconds == 1.0 and served.watched["steps"] == 1 and served.watched["sender's gc ms"] > 0
