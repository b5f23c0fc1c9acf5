"""Run torch's own tests of its fused operators with torch alone and with weft in its place.

    torchrun --nproc-per-node N -m tests.gpu.gpu_torch_suites FOLDER --out DIR    on N GPUs, N of 2 and 4
    python -m tests.gpu.gpu_torch_suites FOLDER --out DIR                         on one GPU: fake process groups

FOLDER contains test_symmetric_memory.py and test_micro_pipeline_tp.py from torch's repository (test/distributed, and
tensor/parallel in it), at the installed version, and also expecttest if that is not installed. The program appends a
line to DIR/torch_suites.jsonl for each test and each way to run it:

    torch     unchanged
    weft      unchanged, with weft.torch.async_tp()
    bfloat16  the same in bfloat16 and, for tests with torch's fake group and test mode, on a group of GPUs without that
              mode. weft leaves float32 to torch, so it serves calls only here. Results may differ within the bfloat16
              tolerances of torch.testing.

A rank replaces a worker process of torch's runner: it creates the test's object and calls the test. A test passes only
if it passes on every rank. Tests that need NVLink multicast are not run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import re
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.integrations.torch_async_tp import AsyncTP, async_tp

EAGER, COMPILED, COMPILED_4 = "AsyncTPTest", "MicroPipelineTPTest", "MicroPipelineTP4GPUTest"
MODULES = {EAGER: "test_symmetric_memory", COMPILED: "test_micro_pipeline_tp", COMPILED_4: "test_micro_pipeline_tp"}
WAYS = ("torch", "weft", "bfloat16")
NEVER = "multimem|multicast"
NOT_IN_BFLOAT16 = "scaled|native|layout"  # tests of fp8, tests already in bfloat16, and tests without GPUs

ALLCLOSE = torch.allclose


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return torch.allclose with the tolerances of torch.testing.assert_close in bfloat16."""
    return ALLCLOSE(a, b, rtol=1.6e-2, atol=1e-5)


def suites(world: int) -> list[tuple[str, str]]:
    """Return (suite, way) pairs. Suites use real groups or, for one process, fake groups."""
    if world == 1:
        return [(suite, way) for way in ("torch", "weft") for suite in (COMPILED, COMPILED_4)]
    compiled = {2: COMPILED, 4: COMPILED_4}.get(world)
    return [(EAGER, way) for way in WAYS] + ([(compiled, "bfloat16")] if compiled else [])


@contextlib.contextmanager
def in_bfloat16(module: ModuleType, suite: str) -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    compares = mock.patch.object(torch, "allclose", near)
    try:
        with compares if suite == EAGER else mock.patch.object(module, "_test_mode", real_mode):
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def real_mode(group_names: set[str] | None = None) -> Iterator[None]:
    """Replace torch's test mode, which computes without symmetric memory, by groups of GPUs."""
    import torch.distributed._symmetric_memory as torch_symm_mem

    for name in group_names or {dist.group.WORLD.group_name}:  # type: ignore[union-attr]
        torch_symm_mem.enable_symm_mem_for_group(name)
    yield


def called(test: unittest.TestCase, fake: bool) -> None:
    """Return the test as torch's runner calls it, in a worker process or alone."""
    method = getattr(test, test._testMethodName)
    for skipped in (type(test), method):
        if getattr(skipped, "__unittest_skip__", False):
            raise unittest.SkipTest(skipped.__unittest_skip_why__)
    torch.manual_seed(1234)
    if not fake:
        test.rank, test.world_size = dist.get_rank(), dist.get_world_size()  # type: ignore[attr-defined]
        return method()
    test.setUp()
    try:
        method()
    finally:
        test.tearDown()


def outcome(test: unittest.TestCase, fake: bool) -> tuple[str, str]:
    """Return whether the test passed, was skipped or failed, and the reason."""
    try:
        called(test, fake)
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as left:  # a worker process reports a skip by this exit code
        from torch.testing._internal.common_distributed import TEST_SKIPS

        why = [skip.message for skip in TEST_SKIPS.values() if skip.exit_code == left.code]
        return ("skipped", why[0]) if why else ("failed", f"exit {left.code}")
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return "passed", ""


def counted(counts: AsyncTP | None) -> dict[str, dict[str, int]]:
    if counts is None:
        return {}
    fell = {f"{name}: {why}": n for (name, why), n in sorted(counts.fell_through.items())}
    return dict(served=dict(sorted(counts.served.items())), fell_through=fell)


def ran(module: ModuleType, suite: str, name: str, way: str, fake: bool) -> dict[str, Any]:
    """Run one test in one way on this rank."""
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        counts = stack.enter_context(async_tp()) if way != "torch" else None
        if way == "bfloat16":
            stack.enter_context(in_bfloat16(module, suite))
        if suite != EAGER:
            stack.enter_context(torch._inductor.config.patch(_micro_pipeline_tp=True))
            torch._dynamo.reset()
        result, why = outcome(getattr(module, suite)(name), fake)
        torch.use_deterministic_algorithms(False)
    return dict(outcome=result, why=why, seconds=round(time.perf_counter() - start, 2)) | counted(counts)


def imported(suite: str) -> ModuleType:
    """Import a suite. To decide whether CPU tests can run, torch's helpers would compile C++, but no test here runs on
    a CPU."""
    with mock.patch("torch._inductor.codecache.CppCodeCache.load", side_effect=OSError("not asked")):
        return importlib.import_module(MODULES[suite])


def names(module: ModuleType, suite: str, way: str, part: str) -> list[str]:
    left = NEVER + (f"|{NOT_IN_BFLOAT16}" if way == "bfloat16" else "")
    test_names = sorted(name for name in dir(getattr(module, suite)) if name.startswith("test_"))
    index, parts = map(int, part.split("/"))
    return [name for name in test_names if not re.search(left, name)][index::parts]


def together(own_row: dict[str, Any], ranks: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the worst outcome of all ranks, with the first rank's counts."""
    if ranks is None:
        return own_row
    all_of: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of, own_row, group=ranks)
    worst = max(all_of, key=lambda row: ("passed", "skipped", "failed").index(row["outcome"]))
    return all_of[0] | dict(outcome=worst["outcome"], why=worst["why"])


def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    today, commit = datetime.date.today().isoformat(), os.environ.get("WEFT_COMMIT", "unknown")
    return dict(gpu=gpu, torch=torch.__version__, date=today, commit=commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--only", nargs="+", default=list(MODULES), help="suites, by name")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth test from the Ith, for several processes")
    args = parser.parse_args()
    sys.path.insert(0, str(args.folder))
    args.out.mkdir(parents=True, exist_ok=True)
    world, ranks = int(os.environ.get("WORLD_SIZE", 1)), None
    if world > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        ranks = dist.new_group(backend="gloo")
    for suite, way in suites(world):
        if way not in args.ways or suite not in args.only:
            continue
        module = imported(suite)
        for name in names(module, suite, way, args.part):
            case = dict(op="torch_suites", suite=suite, test=name.removeprefix("test_"), way=way, world=world)
            row = case | together(ran(module, suite, name, way, fake=world == 1), ranks) | machine()
            if int(os.environ.get("RANK", 0)) == 0:
                with (args.out / "torch_suites.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(way, suite, name, row["outcome"], row.get("served"), row["seconds"], row["why"], flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
