"""The command line of the benchmark (bench/measure/run.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.common import shapes
from bench.measure import run


def test_sizes_of_the_command_line() -> None:
    """The command line may request sizes alone or beside named shapes; without either, it requests every shape."""
    alone = run.arguments(["--op", "all_gather_matmul", "--size", "300,5376,21504", "--out", "out"])
    assert alone.sizes == [shapes.MLP("300x5376x21504", 300, 5376, 21504)] and alone.ops == ["all_gather_matmul"]
    named = run.arguments(["--shapes", "MLP-2", "MLP-1", "--size", "8,64,128", "16,64,128", "--out", "out"])
    assert [s.name for s in named.sizes] == ["MLP-2", "MLP-1", "8x64x128", "16x64x128"]
    assert run.arguments(["--out", "out"]).sizes == shapes.ALL


def test_a_size_that_is_none_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.arguments(["--size", "300,5376"])
    assert "'300,5376' is no M,H,I: tokens, hidden size, intermediate size" in capsys.readouterr().err


def test_without_a_launcher_every_gpu_gets_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def starts(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(run.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(run.subprocess, "run", starts)
    monkeypatch.setattr(sys, "argv", ["run.py", "--op", "matmul_all_reduce", "--out", "out"])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 3 and "--nproc-per-node=4" in started[0]
    assert started[0][-6:] == ["-m", "bench.measure.run", "--op", "matmul_all_reduce", "--out", "out"]
