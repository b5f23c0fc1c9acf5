"""Run the plans for GPUs before Hopper on the GPU at hand as if it were such a GPU (older.py):

    WEFT_SHARE_GPU=1 torchrun --standalone --nproc-per-node N -m tests.gpu.gpu_older --out DIR [--gpu sm_80] [--without peers] [--seconds S]
    torchrun --standalone --nproc-per-node 1 -m tests.gpu.gpu_older --out DIR --gpu sm_80 --speed

A call that falls back to the sequential plan fails its check. tests/gpu/gpu_record.py reads DIR/results.json, where the
rows of each switch have a separate name. --speed times the signaled GEMM, the same loop without signals, and a plain
GEMM through pointers with one tile per program, all compiled alike, and writes DIR/speed.json; the GPU must be
otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_gather_matmul import all_gather_case
from tests.emulated.cases_all_reduce import bound, norm_case, sum_case
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_matmul_reduce import reduce_case
from tests.emulated.cases_norm import tiles_case
from tests.emulated.cases_ops import FUSED
from tests.gpu import older
from tests.gpu.gpu_main import ALL, BF16, GATHER, SCATTER, SECOND, delays, replay, run
from tests.gpu.gpu_queue import WEFT, Queue, tree_of
from tests.gpu.gpu_signaled import random_shapes, replay_to_ranks, streams
from weft.architectures import capability_of, features
from weft.compute.gemm import gemm_tile, grouped_tile, store_tile
from weft.kernel_launch import Launch, Matrix
from weft.lang.descriptors import tiles_of
from weft.ops.common import Factors
from weft.ops.matmul_reduce import signaled
from weft.ops.matmul_reduce.call import ReduceCall
from weft.ops.tiles import with_architecture_tiles
from weft.plans import Decomposed, GemmTile, OneShot, Plan, Signaled, TwoShotLowLatency, TwoShotPull, TwoShotPush

Check = tuple[str, float, Callable[[], float]]
OPS = GATHER, SCATTER, ALL
SMALL = Signaled(groups=(1, 1, 1), tile=GemmTile(block_m=64, block_n=64, warps=4))
FORMS = (128, 256, 64, 8, 3), (128, 128, 32, 4, 4), (128, 256, 32, 8, 3), (128, 128, 64, 8, 3), (64, 256, 32, 4, 4)
SHAPES = [(4096, 8192, 1024), (4096, 8192, 2048), (4096, 8192, 8192), (8192, 8192, 4096)]  # M, N and K for --speed


def gemm_case(world: weft.World, op: str, rows: int, n: int, k: int, plan: Plan | str, **options: Any) -> float:
    """`rows` is the number of rows of each rank."""
    if op == GATHER:
        return all_gather_case(world, [rows] * world.size, n, k, plan, **options)
    return reduce_case(world, rows * world.size, n, k, plan, everywhere=op == ALL, **options)


def of_plan(world: weft.World, op: str, name: str, plan: Plan | str) -> Iterator[Check]:
    yield f"{op} {name}", BF16, partial(gemm_case, world, op, 256, 1024, 512, plan, bias=True, calls=3)
    yield (
        f"{op} {name}, odd sizes",
        BF16,
        partial(gemm_case, world, op, 33, 1032, 520, plan, bias=True, dtype=torch.float16),
    )
    if not isinstance(plan, str):
        yield f"{op} {name} delays", 0.0, partial(delays, world, op, plan)
        yield f"{op} {name} replay x100", 0.0, partial(replay, world, op, plan, 100)


def moved_by_nccl(world: weft.World) -> Iterator[Check]:
    """Run plans that do not need symmetric memory."""
    size, to_fit = world.size, partial(with_architecture_tiles, capability=world.backend.capability)
    for op in OPS:
        yield from of_plan(world, op, "decomposed", Decomposed())
    for op in (SCATTER, ALL):
        for name, plan in {
            "signaled": to_fit(Signaled()),
            "signaled, one wave a group": to_fit(Signaled(groups=(1,) * 12, ctas=4)),
            "signaled, small tiles": SMALL,
        }.items():
            yield from of_plan(world, op, name, plan)
        yield f"{op} signaled by name", BF16, partial(gemm_case, world, op, 512, 2048, 512, "signaled", calls=2)
        yield f"{op} signaled, uneven", BF16, partial(reduce_case, world, 1003, 519, 264, to_fit(Signaled()), True, op == ALL)  # fmt: skip
        yield f"{op} signaled, large", BF16, partial(gemm_case, world, op, 8192 // size, 8192, 1024, to_fit(Signaled()))
        tiled = replace(to_fit(Signaled()), groups=(1, 1))
        yield f"{op} signaled, tiles", BF16, partial(tiles_case, world, op, 1000, 1032, 264, tiled)
    to_even = drawn(1, size, [2000] * size)
    to_odd = drawn(2, size, [3000, 0, *[77] * size][:size], [9, *[1] * (size - 1)])
    for name, plan in (("signaled", to_fit(Signaled())), ("signaled, small tiles", SMALL)):
        yield f"all-to-all {name}", BF16, partial(all_to_all_case, world, to_even, 1024, 128, plan, bias=True)
        yield f"all-to-all {name}, unbalanced", BF16, partial(all_to_all_case, world, to_odd, 520, 264, plan)
    yield "all-to-all signaled replay x100", 0.0, partial(replay_to_ranks, world, SMALL, 100)
    yield "signaled streams", 0.0, partial(streams, world, to_fit(Signaled(groups=(1,))))


def only_stored(world: weft.World) -> Iterator[Check]:
    """Run plans that need peer access but no atomics."""
    for op in OPS:
        yield from of_plan(world, op, "low latency", TwoShotLowLatency() if op == ALL else OneShot())
    yield f"{ALL} one shot", BF16, partial(gemm_case, world, ALL, 4, 1024, 512, OneShot(), bias=True, calls=3)
    for name, plan in (("one shot", OneShot()), ("two shots, low latency", TwoShotLowLatency())):
        yield f"all-reduce {name}", bound(torch.bfloat16), partial(sum_case, world, (64, 1024), plan)
        yield f"all-reduce + norm {name}", bound(torch.bfloat16), partial(norm_case, world, 40, 8192, plan)


def counted(world: weft.World) -> Iterator[Check]:
    """Run plans that need peer access and atomics, as over NVLink."""
    for op in OPS:
        for name, plan in (("fused", FUSED[op]), ("fused, second", SECOND[op])):
            yield from of_plan(world, op, name, with_architecture_tiles(plan, world.backend.capability))
        yield f"{op} fused by name", BF16, partial(gemm_case, world, op, 256, 1024, 512, "fused", calls=2)
    yield from of_plan(world, SCATTER, "signaled by copies", replace(SMALL, ctas=4, copies=True))
    for name, plan in {
        "two shots": TwoShotPush(),
        "two shots, spread": TwoShotPush(warps=8, spread=True),
        "two shots, pulled": TwoShotPull(),
        "decomposed": Decomposed(),
    }.items():
        yield f"all-reduce {name}", bound(torch.bfloat16), partial(sum_case, world, (250, 1024), plan)
        yield f"all-reduce + norm {name}", bound(torch.bfloat16), partial(norm_case, world, 250, 8192, plan)
    yield "signaled, random shapes", BF16, partial(random_shapes, world, 6)


def checks(world: weft.World) -> Iterator[Check]:
    kinds = [moved_by_nccl(world)]
    if world.backend.peers_unsupported is None:
        kinds.append(only_stored(world))
    if world.backend.symmetric_unsupported is None:
        kinds.append(counted(world))
    for kind in kinds:
        for name, most, check in kind:
            yield name, most, partial(as_planned, check)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Record weft's log messages in this block about plans that weft did not run."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage()) if "instead of" in record.getMessage() else None  # type: ignore[assignment,method-assign]  # fmt: skip
    logging.getLogger("weft").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("weft").removeHandler(handler)


def as_planned(check: Callable[[], float]) -> float:
    with listening() as messages:
        error = check()
    if messages:
        raise AssertionError("; ".join(messages))
    return error


# -- speed -------------------------------------------------------------------------------------------------------------


@weft.jit
def no_signals(
    x_desc, w_desc, out_desc, tiles_m, tiles_n, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP_M: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Compute the GEMM in weft's loop over tiles, and store rows in order."""
    x_desc, w_desc, out_desc = tiles_of(x_desc), tiles_of(w_desc), tiles_of(out_desc)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLAT):
        tm, tn = grouped_tile(t, tiles_m, tiles_n, GROUP_M)
        acc = gemm_tile(x_desc, w_desc, tm * BM, tn * BN, K, BM, BN, BK)
        store_tile(out_desc, acc, None, tm * BM, tn * BN, N, BM, BN, 0)


@weft.jit
def of_pointers(
    x, w, out, tiles_m, tiles_n, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr
):
    """Compute one tile per program, through pointers without bounds checks, as most Triton GEMMs do; the tiles must
    divide the sizes."""
    tm, tn = grouped_tile(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    rows, cols, ks = tm * BM + tl.arange(0, BM), tn * BN + tl.arange(0, BN), tl.arange(0, BK)
    a, b = x + rows[:, None] * K + ks[None, :], w + cols[None, :] * K + ks[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, tl.cdiv(K, BK)):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK
    tl.store(out + rows[:, None] * N + cols[None, :], acc.to(out.dtype.element_ty))


def us(runs: dict[str, Callable[[], object]], rounds: int = 15, calls: int = 5) -> dict[str, float]:
    """Return ways to compute x @ w.T on all SMs but one: the signaled GEMM, with ordinary rows and with tiles, with
    groups of one wave and with a single group; and the same loop without signals."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 2):
        for name, fn in runs.items():
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(calls):
                fn()
            b.record()
            b.synchronize()
            if i > 1:
                took[name].append(a.elapsed_time(b) / calls * 1e3)
    return {name: sorted(times)[len(times) // 2] for name, times in took.items()}


def ways(world: weft.World, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return ways to compute x @ w.T on all SMs but one: the signaled GEMM, with ordinary rows and with tiles, with
    groups of one wave and with a single group; and the same loop without signals. Also return a GEMM through pointers,
    with several tile sizes."""
    (m, k), n, stream, programs = x.shape, len(w), world.current_stream(), world.sm_count - 1
    call = ReduceCall((m,), n, k, x.dtype, bias=False, m=m, everywhere=True, reorder=True)

    def signaled_gemm(plan: Signaled, in_order: bool) -> Callable[[], None]:
        tiling = signaled.tiling_of(world, call, plan, in_order)
        signals = signaled.signals_of(world, call, plan, tiling, "GEMM alone")
        to = out if in_order else out.view(tiling.rows, tiling.cols)
        gemm = signaled.launch_on(signaled.gemm_of(world, call, plan, signals, tiling), Factors(x, w), to)

        def run_way() -> None:
            gemm(stream)
            signals.waits[-1](stream)  # a small kernel that ends the call; nothing waits for the other groups

        return run_way

    plan = with_architecture_tiles(
        Signaled(ctas=1, copies=True), world.backend.capability
    )  # ctas equals the number of idle SMs
    runs: dict[str, Callable[[], None]] = {}
    for groups, grouping in ((1,) * 64, "a wave a group"), ((64,), "one group"):
        for in_order, where in (True, "rows"), (False, "tiles"):
            runs[f"{where}, {grouping}"] = signaled_gemm(replace(plan, groups=groups), in_order)
    tile = plan.tile
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    loop = Launch(
        world, no_signals, programs, dict(num_warps=tile.warps, num_stages=tile.stages),
        x_desc=Matrix(m, k, (bm, bk)), w_desc=Matrix(n, k, (bn, bk)), out_desc=Matrix(m, n, (bm, bn // 2)),
        tiles_m=m // bm, tiles_n=n // bn, N=n, K=k, BM=bm, BN=bn, BK=bk, GROUP_M=tile.group_m,
        FLAT=features(world.backend.capability).tma,
    )  # fmt: skip
    runs["no signals"] = partial(loop, stream, x_desc=x, w_desc=w, out_desc=out)
    for form in FORMS:
        bm, bn, bk, warps, stages = form
        if world.backend.capability == 80 or form != FORMS[0]:  # it needs more shared memory than older GPUs have
            grid, options = m // bm * (n // bn), dict(num_warps=warps, num_stages=stages)
            sizes = dict(tiles_m=m // bm, tiles_n=n // bn, N=n, K=k, BM=bm, BN=bn, BK=bk, GROUP_M=8)
            if world.device.type == "cuda":  # Triton launches it: its programs do not wait, so all need not be resident
                runs[f"pointers {form}"] = partial(of_pointers[(grid,)], x, w, out, **sizes, **options)
            else:
                pointers = Launch(world, of_pointers, grid, options, **sizes)
                runs[f"pointers {form}"] = partial(pointers, stream, x=x, w=w, out=out)
    return runs


def speed(world: weft.World, m: int, n: int, k: int) -> dict[str, float]:
    """Return the times of `ways`, and the time of cuBLAS, which runs code for this GPU instead of code for sm_80."""
    x, w = draw(1, m, k).to(world.device), (draw(2, n, k) * 0.1).to(world.device)
    out, expected = world.empty((m, n), x.dtype), x.float() @ w.float().t()
    runs = ways(world, x, w, out)
    for name, run_way in runs.items():
        out.zero_()
        run_way()
        world.synchronize()
        assert "tiles" in name or distance(out.float(), expected) < BF16, name
    times = us(runs | {"cuBLAS": lambda: torch.mm(x, w.t(), out=out)})
    best = min(t for name, t in times.items() if name.startswith("pointers"))
    timings: dict[str, float] = {"m": m, "n": n, "k": k, **times}
    for where in ("rows", "tiles"):
        time = times[f"{where}, a wave a group"]
        timings |= {
            f"{where}: signals cost": time / times[f"{where}, one group"] - 1,
            f"{where}: of the best of pointers": best / time,
        }
    return timings


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--gpu", default="sm_80", help="sm_80, sm_86 or sm_89; sm_90: as it is")
    p.add_argument("--without", choices=["peers", "atomics"])
    p.add_argument("--seconds", type=float, default=500, help="after which no check begins")
    p.add_argument("--only", default="", help="checks whose name contains this")
    p.add_argument("--speed", action="store_true")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    if a.gpu != "sm_90":
        older.as_gpu(capability_of(a.gpu))
    if a.without:
        older.without(a.without)
    world = weft.init()
    versions = dict(torch=torch.__version__, triton=__import__("triton").__version__, cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())))  # fmt: skip
    gpus = len(set(world.exchange(str(torch.cuda.get_device_properties(world.device).uuid))))
    results: dict[str, Any] = dict(
        tree=tree_of(WEFT), machine=f"{gpus} x {torch.cuda.get_device_name()}", versions=versions,
        date=time.strftime("%Y-%m-%d %H:%M"), compiled_for=a.gpu,
    )  # fmt: skip
    if a.speed:
        results["rows"] = [speed(world, *shape) for shape in SHAPES]
        (a.out / "speed.json").write_text(json.dumps(results, indent=1))
        print(json.dumps(results["rows"], indent=1))
        return
    like = f", compiled for {a.gpu}{f', without {a.without}' if a.without else ''}"
    name = f"older-{a.gpu}-{a.without or 'all'}-x{world.size}"
    rows, queue = a.out / f"{name}.jsonl", Queue(a.out / f"{name}.queue")
    if world.rank == 0:
        rows.unlink(missing_ok=True)
        queue.path.unlink(missing_ok=True)
        queue.fill([name for name, _, _ in checks(world) if a.only in name])
    ok = run(world, rows, queue, a.seconds, gpus=gpus, checks_of=checks)
    if world.rank == 0:
        checked_rows = [dict(json.loads(line), like=like) for line in rows.read_text().splitlines()]
        left, failed = queue.left(), [row["check"] for row in checked_rows if row["outcome"] == "failed"]
        minutes = {f"older{like}, {world.size} ranks": round((time.time() - began) / 60, 1)}
        results |= dict(
            rows=checked_rows, fuzz=[], minutes=minutes, trouble=[] if ok else ["the ranks could not go on"]
        )
        (a.out / f"{name}.json").write_text(json.dumps(results, indent=1))
        print(f"{len(checked_rows) - len(failed)} passed, {len(failed)} failed, {left} not begun{like}, {world.size} ranks", failed, flush=True)  # fmt: skip
        ok = ok and not failed
    sys.stdout.flush()
    if not ok:
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
