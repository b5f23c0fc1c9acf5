"""Two nodes on one machine: torchrun --nproc-per-node N -m tests.gpu.gpu_nodes [--seconds S] [--only W ..] [--out FILE]

WEFT_NODE declares the first half of the ranks one node and the second half a second node. If the ranks share GPUs, NCCL
uses sockets. The checks cover plan "two_level" of every op that supports it: results, gradients, CUDA graphs, and
ranks that start late. The program prints a line for each check, writes the same as JSON to FILE, and exits with 1 if
one fails; no check begins after S seconds, and only checks with one of the words W in their names run.

python -m tests.gpu.gpu_nodes --away peer|node|killed --ranks N [--out FILE]

Plain processes run without a launcher that would end the others. The last rank or the whole second node does not join
an op that all ranks have called before, or the last rank is killed. Every other rank must end by itself within LIMIT
seconds, with weft.Timeout or with an error from torch: NCCL waits for the other node, and its process group bounds that
wait (four times WEFT_TIMEOUT). The program prints the error that each rank raised. If a single peer does not join, the
ranks that do not wait for it in NCCL raise Timeout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_reduce import FP8, bound, norm_case, sum_case
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_nn import all_gather_grads, reduce_grads
from tests.emulated.cases_ops import OPS, case, shared_case
from weft.plans import Plan, Sequential, TwoLevel
from weft.prepared import Prepared

BF16 = 5e-3
WAIT, LIMIT = 5, 150  # seconds: the bound of weft's waits; the time to start, compile, reach both bounds and end torch
TORCHS = r"Watchdog caught collective operation timeout|DistBackendError|NCCL error|ncclRemoteError|Timeout\(ms\)"


def calls_of(world: weft.World, op: str, plan: str | Plan) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Return the operand of a call, and a function that makes the call."""
    x = draw(world.rank, 512 if op == "all_gather_matmul" else 512 * world.size, 256).to(world.device)
    w = (draw(50 + world.rank, 384, 256) * 0.1).to(world.device)
    norm = torch.ones(256, device=world.device, dtype=x.dtype)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: weft.all_reduce(x, world=world, plan=plan),
        "all_reduce_rms_norm": lambda: weft.all_reduce_rms_norm(x, None, norm, world=world, plan=plan)[0],
        **{name: partial(getattr(weft, name), x, w, world=world, plan=plan) for name in OPS},
    }
    if op == "matmul_all_to_all":
        routing = weft.route(drawn(1, world.size, [len(x)] * world.size)[world.rank], world=world)
        calls[op] = lambda: weft.matmul_all_to_all(x, w, destinations=routing, world=world, plan=plan)
    return x, calls[op]


def replayed(world: weft.World, op: str, plan: Plan, replays: int = 8) -> float:
    """Replay a graph of two calls with new inputs. Both replays must give the same bits, and must equal eager calls in
    between up to rounding, because "auto" may choose a different plan for a node inside a graph."""
    x, fn = calls_of(world, op, plan)
    for _ in range(2):
        fn()
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
        y = fn()
    wrong, worst = torch.zeros((), device=world.device, dtype=torch.int64), 0.0
    for i in range(replays):
        x.add_(0.01 * (i % 3))
        graph.replay()
        first_result = y.clone()
        graph.replay()
        wrong += (y != first_result).any()
        if i % 3 == 0:
            worst = max(worst, distance(y.float(), fn().float()))
    world.synchronize()
    return float("inf") if wrong.item() else worst


def late(world: weft.World, op: str, plan: Plan, calls: int = 12) -> float:
    """Random ranks start late in every call: the bits must be the same every time."""
    rng = random.Random(100 + world.rank)
    _, fn = calls_of(world, op, plan)
    expected = fn().clone()
    for _ in range(calls):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        if not torch.equal(fn(), expected):
            return float("inf")
    world.synchronize()
    return 0.0


def chosen(world: weft.World) -> float:
    """Check that both levels exist, and return the error of "auto". If ranks share a GPU, "auto" times nothing and must
    choose cuBLAS and NCCL."""
    levels = world.levels
    assert world.backend.two_level_unsupported is None and levels.node.backend.symmetric_unsupported is None, (
        levels.node.backend.symmetric_unsupported
    )
    assert (levels.node.size, levels.across.size) == (world.size // 2, 2)
    assert levels.node.sm_count == world.sm_count - 8
    _, fn = calls_of(world, "all_gather_matmul", "auto")
    y = [fn() for _ in range(2)][-1]  # weft does not store the first call's decision
    key = next(key for key in world.decided if isinstance(key, tuple) and key[:2] == ("all_gather_matmul", "auto"))
    decided = world.decided[key]
    assert isinstance(decided, Prepared)
    assert not world.backend.shares_gpu or decided.plan == Sequential(), decided.plan
    return distance(y.float(), calls_of(world, "all_gather_matmul", TwoLevel())[1]().float())


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    size = world.size
    yield "levels", BF16, partial(chosen, world)
    for parts in (1, 2):
        plan = TwoLevel(parts)
        for op in OPS:
            yield f"{op}, {parts}", BF16, partial(case, world, op, [256] * size, 512, 256, plan, bias=True, calls=2)
            rows = [300, 0, *(33 + r for r in range(size - 2))]
            yield f"{op}, uneven, {parts}", BF16, partial(case, world, op, rows, 520, 264, plan, into=True, calls=2)
        norm = partial(norm_case, world, 1003, 1024, plan, bias=True)
        yield f"all-reduce + norm, {parts}", BF16, norm
        yield f"all-reduce + norm, whole residual, {parts}", BF16, partial(norm, full=True, norm="layer")
        yield f"all-reduce, {parts}", BF16, partial(sum_case, world, (1000, 512), plan)
    yield "all-reduce + norm, FP8", bound(FP8), partial(norm_case, world, 64, 1024, TwoLevel(2), quantize="tensor")
    sizes = [200 + 100 * (r % 2) for r in range(size)]
    for name, weights in (("", None), (", favourites", [9, 1, *[0] * (size - 2)])):
        to = drawn(3, size, sizes, weights)
        yield f"all-to-all{name}", BF16, partial(all_to_all_case, world, to, 512, 256, "two_level", bias=True)
    for op in ("all_gather_matmul", "matmul_all_reduce"):
        yield f"{op}, out holds an operand", BF16, partial(shared_case, world, op, 64, 256, TwoLevel(2))
    yield "gradients", BF16, partial(all_gather_grads, world, [100] * size, 256, 128, TwoLevel(), through=True)
    yield "gradients, reduced", BF16, partial(reduce_grads, world, 100 * size, 256, 128, TwoLevel(2))
    for op in (*OPS, "all_reduce", "all_reduce_rms_norm", "matmul_all_to_all"):
        plan = TwoLevel() if op == "matmul_all_to_all" else TwoLevel(2)
        yield f"{op}, graph", BF16, partial(replayed, world, op, plan)
        yield f"{op}, late ranks", 0.0, partial(late, world, op, plan)


def run(seconds: float, only: list[str], out: Path | None) -> int:
    world, began, rows, failed = weft.init(), time.time(), [], 0
    for name, limit, check in checks(world):
        if only and not any(words in name for words in only):
            continue
        if world.exchange(time.time() - began)[0] > seconds:
            rows.append(dict(check=name, outcome="not begun"))
            continue
        start = time.time()
        try:
            error = check()
        except Exception as e:
            print(f"rank {world.rank}: {name}: FAILED: {e!r}"[:1000], flush=True)
            os._exit(1)  # the World is unusable, and the launcher ends the other ranks
        torch.cuda.empty_cache()
        worst = max(world.exchange(error if error == error else float("inf")))
        failed += worst > limit
        row: dict[str, Any] = dict(
            check=name, outcome="failed" if worst > limit else "passed", error=str(worst), limit=limit
        )
        rows.append(row | dict(seconds=round(time.time() - start, 1)))
        if world.rank == 0:
            print(f"{time.time() - began:6.1f} s {name}: {worst:.2e} {row['outcome']}", flush=True)
            if out is not None:
                out.write_text(json.dumps(dict(ranks=world.size, rows=rows), indent=1))
    left = sum(row["outcome"] == "not begun" for row in rows)
    if world.rank == 0:
        print(f"{len(rows) - left - failed} passed, {failed} failed, {left} not begun", flush=True)
    torch.distributed.destroy_process_group()
    return 1 if failed or left else 0


# -- ranks that do not join --------------------------------------------------------------------------------------------
def gone(kind: str, ranks: int) -> set[int]:
    return {ranks - 1} if kind == "peer" else set(range(ranks // 2, ranks))


def rank_main(kind: str) -> None:
    world = weft.init()
    x, fn = calls_of(world, "all_reduce", TwoLevel())
    for _ in range(2):
        fn()
    world.synchronize()
    world.exchange("ready")
    if world.rank in gone(kind, world.size):
        time.sleep(1 if kind == "killed" else 2 * LIMIT)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.time()
    try:
        fn()
        world.synchronize()
        time.sleep(2 * LIMIT)  # torch ends the process when it aborts a collective
    except weft.Timeout as e:
        print(f"weft.Timeout after {time.time() - start:.1f} s: {e}", flush=True)
        os._exit(0)
    except Exception as e:
        print(f"{type(e).__name__} after {time.time() - start:.1f} s: {e}", flush=True)
        os._exit(3)


def said_of(code: int, text: str) -> str:
    """Return how a rank ended: The outcome is "weft.Timeout", "torch's error", or a sentence about the failure."""
    if code == 0 and "weft.Timeout after" in text:
        return "weft.Timeout"
    return "torch's error" if code != 0 and re.search(TORCHS, text) else f"exit {code}: {text.strip()[-400:]}"


def stay_away(kind: str, ranks: int, out: Path | None) -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = dict(os.environ, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(port), WEFT_TIMEOUT=str(WAIT))  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.gpu_nodes", "--away", kind], env=dict(shared, RANK=str(r), LOCAL_RANK=str(r)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    away, end, ways, ok = gone(kind, ranks), time.time() + LIMIT, {}, True
    for rank, process in enumerate(running):
        if rank in away:
            continue
        try:
            text, _ = process.communicate(timeout=max(1.0, end - time.time()))
            ways[rank] = said_of(process.returncode, text)
        except subprocess.TimeoutExpired:
            process.kill()
            ways[rank] = f"no end after {LIMIT} s: {process.communicate()[0].strip()[-400:]}"
        in_nccl = kind != "peer" or rank == ranks // 2 - 1  # the rank whose NCCL group includes the missing peer
        ok &= ways[rank] == "weft.Timeout" or (in_nccl and ways[rank] == "torch's error")
    for rank in away:
        running[rank].kill()
        running[rank].wait()
    for rank, way in ways.items():
        print(f"{kind} away, rank {rank} of {ranks}: {way}", flush=True)
    print("ok" if ok else "FAILED", flush=True)
    if out is not None:
        out.write_text(json.dumps(dict(away=kind, ranks=ranks, ok=ok, ways=ways), indent=1))
    return 0 if ok else 1


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--seconds", type=float, default=200.0)
    p.add_argument("--only", nargs="*", default=[])
    p.add_argument("--out", type=Path)
    p.add_argument("--away", choices=["peer", "node", "killed"])
    p.add_argument("--ranks", type=int, default=4)
    a = p.parse_args()
    if "RANK" not in os.environ:
        if a.away is None:
            p.error("start it under torchrun, or with --away")
        return stay_away(a.away, a.ranks, a.out)
    os.environ["WEFT_NODE"] = f"node {2 * int(os.environ['RANK']) // int(os.environ['WORLD_SIZE'])}"
    if a.away is None:
        return run(a.seconds, a.only, a.out)
    rank_main(a.away)
    return 1


if __name__ == "__main__":
    sys.exit(main())
