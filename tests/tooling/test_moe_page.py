"""Tables of experts on one GPU, of made-up rows."""

from __future__ import annotations

import json
from pathlib import Path

from bench.measure.moe_one_gpu import Size, ordered, stored
from bench.pages import moe_page

US = {"torch": 400.0, "torch compiled": 300.0, "vllm": 150.0, "quack": 120.0, "weft": 100.0}


def store(results: Path, machine: str, methods: dict[str, float], zipf: float = 0.0) -> None:
    (results / machine).mkdir(parents=True, exist_ok=True)
    with open(results / machine / "moe_one_gpu.jsonl", "a") as f:
        for tokens in (64, 8192):
            for method, us in methods.items():
                f.write(json.dumps(dict(name=f"Mixtral-{tokens}", method=method, us=us, zipf=zipf)) + "\n")


def test_a_column_a_method_and_a_table_a_gpu_and_routing(tmp_path: Path) -> None:
    store(tmp_path, "nvidia-a-x1", US)
    store(tmp_path, "nvidia-a-x1", US | {"weft": 50.0}, zipf=1.0)
    store(tmp_path, "nvidia-b-x1", {"torch": 9.0, "weft": 3.0})
    uniform, skewed, other_gpu = moe_page.one_gpu_sizes(tmp_path).split("us:")[1:]
    assert "| layer, tokens | torch | torch compiled | vllm | quack | weft | vllm / weft | quack / weft |" in uniform
    assert "| Mixtral-64 | 400 | 300 | 150 | 120 | 100 | 1.50x | 1.20x |" in uniform
    assert "| Mixtral-8192 | 400 | 300 | 150 | 120 | 50 | 3.00x | 2.40x |" in skewed
    assert "| layer, tokens | torch | weft |" in other_gpu and "| Mixtral-64 | 9 | 3 |" in other_gpu


def test_ratios_of_each_gpu_of_uniform_routing(tmp_path: Path) -> None:
    store(tmp_path, "nvidia-a-x1", {"vllm": 150.0, "weft": 100.0})
    store(tmp_path, "nvidia-a-x1", {"vllm": 900.0, "weft": 100.0}, zipf=1.0)
    table = moe_page.one_gpu_table(tmp_path)
    assert "| 64 | **1.50x** | 1.50x (Mixtral) | 1.50x (Mixtral) |" in table and "quack" not in table
    store(tmp_path, "nvidia-b-x1", US)
    gpu_b, gpu_a = moe_page.one_gpu_table(tmp_path).split("\n\nnvidia-a:\n\n")
    assert gpu_b.startswith("nvidia-b:") and "mean over quack" in gpu_b and gpu_a == table
    assert "| 8,192 | **1.50x** | 1.50x (Mixtral) | 1.50x (Mixtral) | **1.20x** |" in gpu_b


def test_what_is_important_is_measured_before_the_rest(tmp_path: Path) -> None:
    assert ordered(["a", "b"], [8, 4], [0.0, 1.0], [8])[:5] == [
        Size("a", 8, 0.0), Size("b", 8, 0.0), Size("a", 4, 0.0), Size("b", 4, 0.0), Size("a", 8, 1.0),
    ]  # fmt: skip
    assert ordered(["a"], [8], [0.0, 1.0], [8])[-1] == Size("a", 8, 0.0, compiled=True)
    assert stored(tmp_path / "none.jsonl") == []
