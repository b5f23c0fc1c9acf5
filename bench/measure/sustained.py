"""The operators around the norms of a layer of Llama-70B, repeated for a second: torchrun --nproc-per-node N -m
bench.measure.sustained --out DIR [--tokens 8192]

A GPU that computes without pauses reaches its power limit and lowers its clock, so a gain over cuBLAS and NCCL, during
whose collectives the GPU needs less power, is smaller in sustained load than in a few calls. The program appends rows
to DIR/sustained.jsonl: the us of a layer in the first FIRST calls and in each of the following groups of LATER calls,
and the SM clock (MHz) and power (W) of GPU 0 meanwhile, every PERIOD seconds. "gemms" is the GEMMs alone.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

import torch

import weft
from bench.common.peers import sum_over_ranks
from bench.common.program import Program, options
from weft.backends.library_gemm import one_trial_per_power_of_two
from weft.integrations.vllm.row_norm_column import ROW_NORM_COLUMN, FusedSum, LayerTensors, OwnRows, ShardedTokens
from weft.ops.norm import rms_norm
from weft.timing import length, repeated, span

H, INNER, QKV, EPS = 8192, 28672, 10240, 1e-5
FIRST, LATER = 4, (40, 60, 80)
PERIOD = 0.35
QUERY = "nvidia-smi -i 0 --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits".split()
Call = Callable[[], object]


def calls(world: weft.World, tokens: int) -> dict[str, Call]:
    """Return a layer's operators by method: after attention and after the MLP a row-parallel GEMM, sum, residual and
    norm, and a column-parallel GEMM."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=world.device).bfloat16() / 90

    shards = [(H // world.size, 2 * INNER // world.size), (INNER // world.size, QKV // world.size)]
    halves = [(randn(tokens, k), randn(H, k), randn(n, H)) for k, n in shards]
    norm, residual = torch.ones(H, device=world.device).bfloat16(), randn(tokens, H)
    linear = torch.nn.functional.linear

    def gemms() -> None:
        for x, row, column in halves:
            linear(x, row)
            linear(residual, column)

    def library() -> None:
        for x, row, column in halves:
            y = sum_over_ranks("matmul_all_reduce", linear(x, row), world.size)
            linear(rms_norm(y, norm, EPS, world=world, residual=residual)[0], column)

    def form(plan: weft.Plan) -> Call:
        def run() -> None:
            for x, row, column in halves:
                ROW_NORM_COLUMN(world, plan, LayerTensors(x, residual, norm, row, None, column), (EPS,))

        return run

    forms = {plan.kind: form(plan) for plan in (OwnRows(), ShardedTokens(), FusedSum())}
    return dict(gemms=gemms, library=library) | forms


def readings(stop: threading.Event, seen: list[list[float]]) -> None:
    while not stop.wait(PERIOD):
        answer = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout
        seen.append([float(word) for word in answer.split(",")])


def main() -> None:
    a = options(tokens=8192)
    run = Program(a, "sustained.jsonl", op="row_norm_column", M=a.tokens, H=H)
    one_trial_per_power_of_two()
    with torch.no_grad():
        methods = calls(run.world, a.tokens)
        for call in methods.values():
            repeated(call, 3)()
        for method, call in methods.items():
            run.world.wait_for_streams()
            run.world.exchange(None)
            time.sleep(PERIOD)  # the GPU cools
            stop, seen = threading.Event(), list[list[float]]()
            reader = threading.Thread(target=readings, args=(stop, seen))
            reader.start()
            spans = [(count, span(repeated(call, count))) for count in (FIRST, *LATER)]
            torch.cuda.synchronize()
            stop.set()
            reader.join()
            us = [round(length(events) / count) for count, events in spans]
            rows = [dict(method=method, us=us, calls=[FIRST, *LATER], clock_and_power=seen)]
            run.log(rows[0])
            run.keep(rows)
    run.end()


if __name__ == "__main__":
    main()
