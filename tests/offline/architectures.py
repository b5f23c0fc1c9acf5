"""Compile the kernels that the ops launch on GPUs other than Hopper, without such a GPU, and check their rules.

    python -m tests.offline.architectures [--targets sm_80 sm_89 ..] [--only NAMES] [--write]        (make architectures)

The cases are those of test_offline.py whose plans such a GPU supports, with tiles that fit it. The program exits with 1
if a kernel breaks a rule. --write stores the results, with the date and versions, in tests/architectures.json, from
which `make pages` makes the table of docs/hardware.md. test_offline_architectures.py, in `make gates`, runs a selection.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from tests.emulated.cases import changed
from tests.emulated.cases_ops import FUSED
from tests.gpu.gpu_queue import WEFT, tree_of
from tests.offline.test_offline import (
    ALONE,
    AR,
    CASES,
    GEMMS,
    OPS,
    SECOND,
    Launch,
    broken_rules,
    call,
    computes,
    launches,
    norm,
    to_ranks,
)  # fmt: skip
from weft import World
from weft.architectures import FEATURES, capability_of, features
from weft.check import ptx
from weft.check.offline import Compiled, compile_kernel
from weft.check.ptx import signals_not_by_thread_zero, signals_outside_first_warp
from weft.ops.tiles import with_architecture_tiles
from weft.plans import Decomposed, OneShot, Sequential, Signaled, TwoShotLowLatency, TwoShotPull, TwoShotPush

RECORD = Path(__file__).parents[1] / "architectures.json"
TARGETS = tuple(f"sm_{capability}" for capability, can in FEATURES.items() if not can.wgmma)
Fn = Callable[[World], Any]


@dataclass(frozen=True)
class Case:
    fn: Fn
    ranks: int


def cases(capability: int) -> Iterator[tuple[str, Case]]:
    """Return, by name, the launches of an op on such a GPU: plans with the GPU's own tiles, and the plans of CASES
    without tiles."""
    fit = functools.partial(with_architecture_tiles, capability=capability)
    sizes: dict[str, dict[str, Any]] = {
        "": {}, ", bias float16": dict(bias=True, dtype=torch.float16), ", one row": dict(m=1),
        ", odd sizes": dict(m=33, n=1032, k=520, bias=True),
    }  # fmt: skip
    for name, options in sizes.items():
        for op in OPS:
            plans = {"decomposed": Decomposed(), "low latency": TwoShotLowLatency() if op == AR else OneShot()}
            if op != OPS[0]:
                plans |= {"signaled": fit(Signaled()), "signaled, 16 CTAs": changed(fit(Signaled()), block_n=128)}
            if op == OPS[1]:
                plans |= {"signaled by copies": replace(fit(Signaled()), ctas=4, copies=True)}
            if features(capability).nvlink:
                plans |= {"fused": fit(FUSED[op]), "fused, second": fit(SECOND[op])}
            for kind, plan in plans.items():
                if kind != "signaled by copies" or name in ("", ", bias float16"):  # copy engines move whole tiles
                    yield f"{op} {kind}{name}", Case(call(op, plan, **options), 8)
    for op in OPS if features(capability).nvlink else ():
        yield f"{op} fused, transposed weight", Case(call(op, fit(FUSED[op]), transposed=True), 2)
    for n, k, dtype in ((1024, 512, torch.bfloat16), (1032, 520, torch.float16)):
        plan = fit(Signaled())
        yield f"to ranks signaled {n}", Case(to_ranks(plan, n, k, True, dtype), 8)
    for name, plan in {
        "one shot": OneShot(), "two shots, posted": TwoShotLowLatency(), "sequential": Sequential(),
        "two shots": TwoShotPush(), "two shots, pulled": TwoShotPull(), "decomposed": Decomposed(),
    }.items():  # fmt: skip
        yield f"all-reduce + norm {name}", Case(norm(plan), 8)
        yield f"all-reduce + norm {name}, float32", Case(norm(plan, 40, 16384, dtype=torch.float32), 8)
        if features(capability).e4m3:
            yield f"all-reduce + norm {name}, fp8", Case(norm(plan, 40, 5120, fp8=True), 8)
    for name in ("silu_mul", "rotary", "rms_norm and residual_add", "wait_word", "World.barrier", "decoder"):
        yield name, Case(*CASES[name])
    if features(capability).tma:
        yield from ((name, Case(*case)) for name, case in CASES.items() if name.startswith(("MoE", "all-reduce x8, ")))


def outcome(launch: Launch, k: Compiled, capability: int) -> list[str]:
    """Return the protocol's rules that the kernel breaks."""
    gpu = features(capability)
    kib, threads = gpu.shared_kib + 1, gpu.threads  # CUDA reserves 1 KiB for each program
    programs, warps = -(-launch.grid // 132), launch.options["num_warps"]
    registers = -(-k.registers // 8) * 8
    gemm = (launch.kernel.__name__ in GEMMS and computes(launch)) or launch.kernel.__name__ in ALONE
    wrong = [f"spills {k.spills} bytes"] * (k.spills > 0) + [*k.warnings]
    if k.shared > features(capability).shared_kib << 10 or (k.shared and programs * (k.shared + 1024) > kib << 10):
        wrong.append(f"{programs} programs of {k.shared} bytes of shared memory")
    if programs * warps * 32 > threads or programs * warps * 32 * registers > 65536:
        wrong.append(f"{programs} programs of {warps * 32} threads with {registers} registers")
    if (gpu.mma in k.ptx) != gemm or "wgmma" in k.ptx:
        wrong.append(f"{gpu.mma}: {gpu.mma in k.ptx}, and the kernel is {'a' if gemm else 'no'} GEMM")
    if not features(capability).tma:
        wrong += [f"{text} is Hopper's" for text in ("cp.async.bulk", "fence.proxy.async", "multimem") if text in k.ptx]
        if gemm and "cp.async.cg.shared.global" not in k.ptx:
            wrong.append("loads of tiles are not asynchronous, in 16-byte words")
        wrong += ptx.broken_rules(k.ptx)
    else:
        wrong += broken_rules(launch, k)
    wrong += signals_not_by_thread_zero(k.ptx) + signals_outside_first_warp(k.ptx)
    return wrong


def compiled(capability: int, case: Case) -> list[tuple[Launch, Compiled]]:
    """Yield each launch of rank 0, once, with its compiled kernel."""
    by_hash: dict[str, tuple[Launch, Compiled]] = {}
    for launch in launches(case.fn, case.ranks, capability)[0]:
        k = compile_kernel(launch.kernel, launch.args, launch.options, capability)
        by_hash.setdefault(k.hash, (launch, k))
    return list(by_hash.values())


def over_sm_limits(kernels: list[tuple[Launch, Compiled]], capability: int) -> list[str]:
    """Return whether pull programs and GEMM programs, which share an SM, exceed its limits."""
    small = [pair for pair in kernels if pair[0].options.get("co_resident")]
    pairs = [(a, b) for a in small for b in kernels if b not in small and b[0].kernel is a[0].kernel]
    shared = [a[1].shared + b[1].shared + 2048 for a, b in pairs]
    registers = [sum(-(-k.registers // 8) * 8 * 32 * launch.options["num_warps"] for launch, k in pair) for pair in pairs]  # fmt: skip
    kib = features(capability).shared_kib + 1
    return [f"{n} bytes beside each other on an SM" for n in shared if n > kib << 10] + [
        f"{n} registers beside each other on an SM" for n in registers if n > 65536
    ]


def judged(target: str, name: str) -> dict[str, Any]:
    """Return a case as JSON: its kernels, each with registers, spills and shared memory, and their faults."""
    capability = capability_of(target)
    case = dict(cases(capability))[name]
    try:
        launches_and_code = compiled(capability, case)
    except (TritonError, RuntimeError, TypeError, ValueError) as e:
        return dict(target=target, case=name, kernels=[], wrong=[f"{type(e).__name__}: {str(e)[-400:]}"])
    kernels = [(launch.kernel.__name__, k.registers, k.spills, k.shared) for launch, k in launches_and_code]
    wrong = [
        f"{launch.kernel.__name__}: {rule}"
        for launch, k in launches_and_code
        for rule in outcome(launch, k, capability)
    ]
    return dict(target=target, case=name, kernels=kernels, wrong=wrong + over_sm_limits(launches_and_code, capability))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for each target the number of cases, the number of different launches, the largest numbers of registers
    and bytes of shared memory, and the faults."""
    out: dict[str, Any] = {}
    for target in sorted({row["target"] for row in rows}, key=lambda t: int(re.sub(r"\D", "", t))):
        of_target = [row for row in rows if row["target"] == target]
        kernels = [tuple(k) for row in of_target for k in row["kernels"]]
        out[target] = dict(
            cases=len(of_target), launches=len(kernels), kernels=dict(sorted(Counter(k[0] for k in kernels).items())),
            registers=max(k[1] for k in kernels), shared=max(k[3] for k in kernels),
            wrong={row["case"]: row["wrong"] for row in of_target if row["wrong"]},
        )  # fmt: skip
    return out


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--targets", nargs="+", default=TARGETS)
    p.add_argument("--only", default="", help="cases whose name matches this")
    p.add_argument("--write", action="store_true")
    p.add_argument("--workers", type=int, default=2)
    a = p.parse_args()
    todo = [(t, n) for t in a.targets for n, _ in cases(capability_of(t)) if re.search(a.only, n)]
    rows, began = [], time.time()
    with ProcessPoolExecutor(a.workers) as pool:
        for row in pool.map(judged, *zip(*todo, strict=True)):
            rows.append(row)
            for rule in row["wrong"]:
                print(f"{row['target']} {row['case']}: {rule}", flush=True)
    by_target = summary(rows)
    for target, totals in by_target.items():
        print(f"{target}: {totals['cases']} cases, {totals['launches']} launches, at most {totals['registers']} registers and "
              f"{totals['shared']} bytes of shared memory; {len(totals['wrong'])} cases break a rule")  # fmt: skip
    print(f"{time.time() - began:.0f} s")
    if a.write:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        versions = dict(date=time.strftime("%Y-%m-%d"), tree=tree_of(WEFT)[:12], torch=torch.__version__)
        record.setdefault(f"Triton {triton.__version__}", {}).update({t: dict(versions, **totals) for t, totals in by_target.items()})  # fmt: skip
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return int(any(totals["wrong"] for totals in by_target.values()))


if __name__ == "__main__":
    sys.exit(main())
