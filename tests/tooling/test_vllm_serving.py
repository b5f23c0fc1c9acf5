"""The benchmark of vLLM with simulated engines: the order of turns, the contents of a row, and the way in which
requests are sent and timed."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bench.measure import vllm_engine, vllm_serving
from bench.measure.vllm_engine import Load, Served
from bench.measure.vllm_serving import MIXES, Mix, Tokens
from bench.pages import vllm_page


@dataclass
class Turns:
    """An engine that spends `seconds` on each turn and records the turn."""

    method: str
    seconds: deque[float]
    order: list[str]

    def serve(self, load: Load) -> Served:
        self.order.append(self.method)
        return Served(self.seconds.popleft(), [0.010, 0.020, 0.030], [0.001] * 98 + [0.005] * 2)


def test_a_repeat_is_stock_method_stock() -> None:
    """The machine slows down by half in the second repeat: the ratio stays the same, and the null (vLLM against itself)
    shows the noise of the last repeat."""
    order: list[str] = []
    stock = Turns("stock", deque([4.0, 4.0, 6.0, 6.0, 4.0, 5.0]), order)
    weft = Turns("weft", deque([2.0, 3.0, 2.0]), order)
    load = MIXES["decode"].load(8, 0.0)
    results = vllm_serving.take_turns({"stock": stock, "weft": weft}, load, 3, time.monotonic() + 60)
    assert order == ["stock", "weft", "stock"] * 3
    row = vllm_serving.comparison(results, "weft")
    assert row["ratio"] == 2.0 and row["ratio_range"] == [2.0, 2.25] and row["null_range"] == [0.8, 1.0]
    assert row["baseline_seconds"] == [[4.0, 4.0], [6.0, 6.0], [4.0, 5.0]] and row["seconds"] == [2.0, 3.0, 2.0]
    assert row["latency"]["weft"] == {"first_token_ms": [20.0, 30.0], "between_tokens_ms": [1.0, 5.0]}


def test_a_row_of_the_second_stock_engine_shows_what_two_turns_of_one_engine_cannot() -> None:
    """The second stock engine has the settings of the other, and here it is slower by a quarter."""
    order: list[str] = []
    seconds = {"stock": [4.0] * 4, "weft": [2.0] * 2, "stock again": [5.0] * 2}
    engines = {method: Turns(method, deque(times), order) for method, times in seconds.items()}
    results = vllm_serving.take_turns(engines, MIXES["decode"].load(8, 0.0), 2, time.monotonic() + 60)
    assert order == ["stock", "weft", "stock again", "stock"] * 2
    row = vllm_serving.comparison(results, "stock again")
    assert row["ratio"] == 0.8 and row["null_range"] == [1.0, 1.0]
    assert vllm_engine.METHODS["stock again"] == vllm_engine.METHODS["stock"]


def test_turns_end_with_the_time() -> None:
    order: list[str] = []
    engines = {name: Turns(name, deque([1.0] * 6), order) for name in ("stock", "weft")}
    results = vllm_serving.take_turns(engines, MIXES["decode"].load(8, 0.0), 3, time.monotonic())
    assert {name: len(served) for name, served in results.items()} == {"stock": 2, "weft": 1}


def test_requests_are_scaled_until_stock_is_busy_long_enough() -> None:
    """The first turn is not timed; the next 8 requests need one second."""
    asked: list[int] = []

    def serve(load: Load) -> Served:
        asked.append(len(load.lengths))
        return Served(60.0 if len(asked) == 1 else len(load.lengths) / 8)

    load = vllm_serving.scaled(SimpleNamespace(serve=serve), MIXES["decode"], 0.0)
    assert asked == [8, 8, 27] and len(load.lengths) == 27 and load.in_flight == 8


@pytest.mark.parametrize(("name", "tokens"), [("chat", (299, 324)), ("fixed", (1024, 128))])
def test_lengths_have_the_published_means(name: str, tokens: tuple[int, int]) -> None:
    lengths = MIXES[name].load(20000, 0.0).lengths
    means = [sum(column) / len(lengths) for column in zip(*lengths, strict=True)]
    assert means == pytest.approx(tokens, rel=0.03)


@dataclass
class EngineOfOneTokenAStep:
    """An engine like `LLMEngine`: every step lasts `seconds` and produces one token for each request, until the request
    has all its tokens."""

    seconds: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    most: int = 0

    def add_request(self, name: str, prompt: object, tokens: int) -> None:
        self.left[name] = tokens
        self.most = max(self.most, len(self.left))

    def step(self) -> list[Any]:
        time.sleep(self.seconds)
        self.left = {name: tokens - 1 for name, tokens in self.left.items()}
        outputs = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0])], finished=tokens == 0)
            for name, tokens in self.left.items()
        ]
        self.left = {name: tokens for name, tokens in self.left.items() if tokens}
        return outputs


def test_no_more_requests_are_in_flight_than_the_mix_has() -> None:
    """A time is recorded to each request's first token, and for each further token."""
    load = Mix(3, Tokens(16), Tokens(4)).load(10, 0.0)
    engine = EngineOfOneTokenAStep()
    served = vllm_engine.serve(engine, load, [None] * 10, [tokens for _, tokens in load.lengths])
    assert engine.most == 3 and len(served.first_token) == 10 and len(served.between_tokens) == 10 * 3


def test_the_time_to_the_first_token_counts_from_the_arrival() -> None:
    """1,000 requests arrive per second, and each request is served alone in two steps of 5 ms: the last request waits
    for all earlier ones."""
    load = Mix(1, Tokens(16), Tokens(2)).load(6, 1000.0)
    served = vllm_engine.serve(EngineOfOneTokenAStep(0.005), load, [None] * 6, [2] * 6)
    assert load.arrivals() == sorted(load.arrivals()) and load.arrivals()[0] > 0
    assert served.first_token[-1] > 0.03 and min(served.between_tokens) >= 0.005


class AllReduceFusionPass:
    """A pass like vLLM's: the object contains the number of matches in the last compiled graph."""

    def __init__(self, matches: int) -> None:
        self.matched_count = matches


def test_matches_are_those_of_the_passes_that_live() -> None:
    """The passes of two compilations are counted, even if the worker has frozen its objects, which stay frozen."""
    passes = [AllReduceFusionPass(30), AllReduceFusionPass(2)]
    gc.freeze()
    try:
        assert vllm_engine.replaced_matches("AllReduceFusionPass") == 32
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
    del passes
    gc.collect()
    assert vllm_engine.replaced_matches("AllReduceFusionPass") == 0


def row(ratio: float, mix: str = "decode", date: str = "2026-11-26", method: str = "weft") -> dict[str, Any]:
    latency = {"first_token_ms": [10.0, 20.0], "between_tokens_ms": [1.0, 2.0]}
    return dict(
        model="Llama-8B", layers=16, ranks=4, mix=mix, method=method, baseline="stock", seconds=[1.0], baseline_seconds=[[1.0, 1.01]],
        ratio=ratio, ratio_range=[ratio - 0.03, ratio + 0.02], null_range=[0.98, 1.01], latency={method: latency, "stock": latency}, requests=8,
        rate=0.0, tokens_in=1024, tokens_out=512, tokens_a_step=8192, vllm="0.26.0", gpu="NVIDIA H100", date=date,
        **{"fused all-reduce": {"stock": {"asked": True, "backend": "trtllm", "matches": 32}}},
    )  # fmt: skip


def test_the_log_contains_the_memory_allocated_during_requests() -> None:
    """Both ranks had allocated 10 segments before; rank 1 has allocated two more, of 20 MiB and 2 MiB."""
    line = vllm_engine.allocations([(10, 5 << 30)] * 2, [(10, 5 << 30), (12, (5 << 30) + (22 << 20))])
    assert line.endswith("by rank: 0 segments of 0 MiB in all, 2 segments of 22 MiB in all")


def test_the_page_shows_the_difference_of_the_two_stock_turns() -> None:
    """Only the newest row of a model, mix and method counts, and the page names the mixes of each date."""

    page = vllm_page.serving([row(1.5), row(1.02)])
    assert page.startswith("vLLM 0.26.0, 2026-11-26:") and "1.50x" not in page
    page_of_dates = vllm_page.serving([row(1.5, "prompts"), row(1.02), row(1.1, "prompts", "2026-11-27")])
    assert "2026-11-26 (decode), 2026-11-27 (prompts):" in page_of_dates and "1.50x" not in page_of_dates
    assert "| Llama-8B | decode: 128 + 64 | 1.02x | 0.99–1.04 | 0.98–1.01 |" in page
    assert "**1.10x**" in page_of_dates  # 1.02x is not bold, because the inverse of 0.98 is larger
    times = vllm_page.latencies([row(1.02)])
    assert (
        "16 layers" in times and "(trtllm)" in times and "| decode: 128 + 64 | 8 | 10.0, 20.0 / 10.0, 20.0 |" in times
    )


def test_the_page_names_the_layers_of_a_whole_model() -> None:
    """A row of all layers does not replace the row of 16 layers."""
    lines = [row(1.02), row(1.1) | {"layers": 80}]
    for page in (vllm_page.serving(lines), vllm_page.latencies(lines)):
        assert "| Llama-8B | decode: 128 + 64 |" in page and "| Llama-8B, 80 layers | decode: 128 + 64 |" in page


def test_the_page_shows_a_second_stock_engine_as_noise() -> None:
    """The second stock engine has no line of its own. The range of its ratios widens stock vLLM's range in the same
    mix, so that a speedup within that range is not bold."""
    lines = [row(1.04), row(1.04, "prompts"), row(1.05, method="stock again")]
    page, times = vllm_page.serving(lines), vllm_page.latencies(lines)
    assert "| Llama-8B | decode: 128 + 64 | 1.04x | 1.01–1.06 | 0.98–1.07 |" in page
    assert "| Llama-8B | prompts: 128 + 64 | **1.04x** | 1.01–1.06 | 0.98–1.01 |" in page
    assert "stock again" not in page + times and times.count("Llama-8B") == 2


def test_an_engines_process_imports_no_torch_before_its_environment_is_set() -> None:
    """A process of `multiprocessing` imports the parent's main module before it runs `vllm_engine.main`, which sets the
    environment of the engine. The stock engine also contains nothing of weft except the package's lazy names."""
    names = "'torch', 'triton', 'vllm', 'weft.world'"
    imports = f"import sys, bench.measure.vllm_serving; print([name for name in ({names}) if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"
