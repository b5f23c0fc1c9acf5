"""The runner of torch's own test suites, on suites of a few lines, and the table generated from its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pages import suites_page

ROOT = Path(__file__).parents[2]


EAGER = """
import unittest, torch, torch.distributed as dist

class AsyncTPTest(unittest.TestCase):
    def test_gather(self):
        x = torch.rand(4, 8)
        a, _ = torch.ops.symm_mem.fused_all_gather_matmul(x, [torch.rand(8, 4)], 0, dist.group.WORLD.group_name)
        assert a.shape == (4 * self.world_size, 8) and a.dtype == torch.get_default_dtype()
        assert torch.allclose(a, 1.002 * a) == (a.dtype == torch.bfloat16)

    def test_of_one_rank(self):
        assert self.rank == 0

    @unittest.skip("no time")
    def test_scaled(self): ...

    def test_multimem(self): raise SystemExit("must not be called")
"""
COMPILED = """
import unittest, torch, torch.distributed as dist
from torch.distributed._symmetric_memory import _test_mode, is_symm_mem_enabled_for_group

class MicroPipelineTPTest(unittest.TestCase):
    def setUp(self):
        from torch.testing._internal.distributed.fake_pg import FakeStore
        self.world_size = 2
        dist.init_process_group("fake", world_size=2, rank=0, store=FakeStore())

    def tearDown(self):
        dist.destroy_process_group()

    def test_scatter(self):
        name = dist.group.WORLD.group_name
        assert torch._inductor.config._micro_pipeline_tp
        with _test_mode():
            import torch.distributed._symmetric_memory as theirs
            assert is_symm_mem_enabled_for_group(name) and theirs._is_test_mode == (dist.get_backend() == "fake")
            y = torch.ops.symm_mem.fused_matmul_reduce_scatter(torch.rand(4, 8), torch.rand(8, 4), "sum", 0, name)
        assert y.shape == (2, 4)

class MicroPipelineTP4GPUTest(MicroPipelineTPTest): ...
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_of_two_small_suites(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "test_symmetric_memory.py").write_text(EAGER)
    (tmp_path / "test_micro_pipeline_tp.py").write_text(COMPILED)
    launch = [sys.executable] + ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (
        ranks > 1
    )
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "."))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = [*launch, "-m", "tests.gpu.gpu_torch_suites", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "torch_suites.jsonl").read_text().splitlines()]
    outcomes = {
        (r["way"], r["suite"], r["test"]): (
            r["outcome"],
            *(sum(r.get(side, {}).values()) for side in ("served", "fell_through")),
        )
        for r in rows
    }
    assert {r["world"] for r in rows} == {ranks} and len(outcomes) == len(rows)
    if ranks == 1:
        suites = ("MicroPipelineTPTest", "MicroPipelineTP4GPUTest")
        assert outcomes == {("torch", s, "scatter"): ("failed", 0, 0) for s in suites} | {
            ("weft", s, "scatter"): ("passed", 0, 1) for s in suites
        }, "torch has no such operator on CPUs; weft lets torch compute instead"
        return
    gather, alone, scaled = (("AsyncTPTest", test) for test in ("gather", "of_one_rank", "scaled"))
    # weft serves a gloo group in bfloat16; torch computes in float32.
    assert outcomes == {
        ("torch", *gather): ("failed", 0, 0), ("weft", *gather): ("passed", 0, 1), ("bfloat16", *gather): ("passed", 1, 0),
        **{(way, *alone): ("failed", 0, 0) for way in ("torch", "weft", "bfloat16")},  # fails on the second rank
        **{(way, *scaled): ("skipped", 0, 0) for way in ("torch", "weft")},
        ("bfloat16", "MicroPipelineTPTest", "scatter"): ("passed", 1, 0),
    }  # fmt: skip


def row(test: str, way: str, outcome: str = "passed", world: int = 2, **counts: dict[str, int]) -> dict:
    return dict(suite="S", test=test, way=way, world=world, outcome=outcome, torch="2.11", **counts)


def test_the_table_counts_the_newest_of_each_test() -> None:
    lines = [row("a", "torch", "failed"), row("a", "torch"), row("b", "torch", "failed"), row("b", "weft", "failed")]
    lines += [
        row("a", "weft", fell_through={"op: of float32": 2, "op: scaled": 1}),
        row("a", "bfloat16", served={"op": 3}),
    ]
    lines += [row("c", "bfloat16", "failed"), row("a", "weft", "skipped", world=1)]
    assert suites_page.suites(lines).splitlines() == [
        "torch 2.11:",
        "",
        "| suite | process group |  | passed | failed | skipped | calls served | calls by torch |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `S` | 2 GPUs | torch alone | 1 | 1 | 0 |  |  |",
        "| `S` | 2 GPUs | weft in place | 1 | 1 | 0 | 0 | 3 |",
        "| `S` | fake | weft in place | 0 | 0 | 1 | 0 | 0 |",
        "| `S` | 2 GPUs | weft in place, bfloat16 | 1 | 1 | 0 | 3 | 0 |",
        "",
        "torch alone fails in: `b`.",
        "",
        "Only with weft fail: `c`.",
        "",
        "Calls by torch: 2 (of float32), 1 (scaled).",
    ]
