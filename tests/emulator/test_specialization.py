"""A new number of rows compiles nothing: Triton's key of a compiled kernel does not depend on the number of rows. The
test records the launches on an emulated World, where no kernel runs, and binds them as for an H200. The exceptions are
listed: a constant that depends on the rows has only a few values, each with a stated reason.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterable

import pytest
import torch

import weft
from tests.gates import some
from tests.offline.test_offline import BF, Launch, launches, specialised
from weft import World
from weft.ops.all_gather_matmul.op import all_gather_swiglu
from weft.ops.norm import Remap
from weft.planner.prepare import sizes
from weft.planner.search import near
from weft.plans import (
    Decomposed,
    FusedAllReduce,
    FusedGather,
    FusedGatherByCopies,
    FusedReduceScatter,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)

RANKS, N, K = 2, 1024, 512
AG, RS, AR, A2A = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"
Run = Callable[[World, int], object]


def gemm(op: str, plan: Plan, gated: bool = False) -> Run:
    def run(world: World, m: int) -> None:
        rows = [(m + world.size - 1 - r) // world.size for r in range(world.size)]
        x, w = torch.zeros(rows[world.rank] if op == AG else m, K, dtype=BF), torch.zeros(N, K, dtype=BF)
        if op == A2A:
            to = [i * i % world.size for i in range(m)]
            weft.matmul_all_to_all(x, w, destinations=to, world=world, plan=plan)
        elif gated:
            all_gather_swiglu(x, w, N // 2, world=world, plan=plan, rows=rows)
        elif op == AG:
            weft.all_gather_matmul(x, w, world=world, plan=plan, rows=rows)
        else:
            getattr(weft, op)(x, w, world=world, plan=plan)

    return run


def norm(plan: Plan, full: bool = False) -> Run:
    def run(world: World, m: int) -> None:
        x, w = torch.zeros(m, N, dtype=BF), torch.zeros(N, dtype=BF)
        rows = m if full else (m + world.size - 1 - world.rank) // world.size
        residual = torch.zeros(rows, N, dtype=BF)
        weft.all_reduce_rms_norm(x, residual, w, full_residual=full, world=world, plan=plan)

    return run


def rows_alone(world: World, m: int) -> None:
    """Call the row-wise ops that run between the GEMMs, on ordinary rows and on tiles."""
    weight, residual = torch.zeros(N, dtype=BF), torch.zeros(m, N, dtype=BF)
    for remap in (None, Remap(m, N, -(-m // 128), 128, 256, 8)):
        x = residual if remap is None else torch.zeros(remap.shape, dtype=BF)
        weft.rms_norm(x, weight, 1e-6, world=world, remap=remap)
        weft.residual_add(x, residual, world=world, remap=remap)
    weft.silu_mul(residual, world=world)


ONE = 1, ""
SPLIT = 2, "two programs may share each tile of the last round"
WHOLE = 4, f"shards that are whole blocks are pulled by bulk copies, and {SPLIT[1]}"
BLOCKS = 4, "few rows are cut in smaller blocks, so that every program has some"
CASES: dict[str, tuple[Run, tuple[int, str]]] = {
    "all-gather, fused": (gemm(AG, FusedGather()), WHOLE),
    "all-gather, fused, gated": (gemm(AG, FusedGather(), True), WHOLE),
    "all-gather, copied": (gemm(AG, FusedGatherByCopies()), SPLIT),
    "all-gather, one shot": (gemm(AG, OneShot()), BLOCKS),
    "reduce-scatter, fused": (gemm(RS, FusedReduceScatter()), SPLIT),
    "reduce-scatter, decomposed": (gemm(RS, Decomposed()), ONE),
    "reduce-scatter, one shot": (gemm(RS, OneShot()), BLOCKS),
    "reduce-scatter, signaled": (gemm(RS, Signaled()), ONE),
    "reduce-scatter, signaled, copies": (gemm(RS, Signaled(copies=True)), ONE),
    "all-reduce, fused": (gemm(AR, FusedAllReduce()), SPLIT),
    "all-reduce, one shot": (gemm(AR, OneShot()), ONE),
    "all-reduce, two shots": (gemm(AR, TwoShotLowLatency()), ONE),
    "all-reduce, signaled": (gemm(AR, Signaled()), ONE),
    "all-to-all, signaled": (gemm(A2A, Signaled()), ONE),
    "rows alone": (rows_alone, (2, "with a residual and without")),
}
for name, plan in {
    "sequential": Sequential(),
    "one shot": OneShot(),
    "two shots": TwoShotPush(),
    "posted": TwoShotLowLatency(),
    "pulled": TwoShotPull(),
    "decomposed": Decomposed(),
    "multicast": Multicast(),
}.items():
    CASES[f"norm, {name}"] = norm(plan), ONE
    CASES[f"norm, {name}, full"] = norm(plan, True), ONE


def key(launch: Launch) -> Hashable:
    """Return the key of a compiled kernel. Addresses are multiples of 16 bytes, as all addresses are except a
    caller's."""
    name, _, options, arguments, compile_options = specialised(launch)
    return name, options, re.sub(r"\('(\*k?\w+)', ''\)", r"('\1', 'D')", arguments), compile_options


def keys_of(run: Run, rows: Iterable[int]) -> dict[Hashable, set[Hashable]]:
    """Return the keys of the kernels that rank 0 launches for these numbers of rows, by the part of the call."""

    def all_sizes(world: World) -> None:
        for m in rows:
            run(world, m)

    keys_by_part: dict[Hashable, set[Hashable]] = {}
    for launch in launches(all_sizes, RANKS)[0]:
        tiled = launch.args["layout"].TILED.value if "layout" in launch.args else None
        part = launch.kernel.__name__, launch.args.get("COMPUTE"), tiled
        keys_by_part.setdefault(part, set()).add(key(launch))
    return keys_by_part


@pytest.mark.parametrize("name", some(CASES, 5))
def test_a_new_number_of_rows_is_no_new_kernel(name: str) -> None:
    run, (most, _) = CASES[name]
    draw = random.Random(name)
    rows = [1, 2, 16, 17, 255, 256, 4096, *(draw.randint(3, 6000) for _ in range(8)), 512, 5 * 128 * RANKS]

    for part, keys in keys_of(run, rows).items():
        assert len(keys) <= most, f"{part}:\n" + "\n".join(map(str, sorted(keys, key=str)))


def test_prepare_compiles_every_kernel_of_a_plan() -> None:
    """The sizes between 3,970 and 4,096 rows share a plan, and shards of 2,016 rows are whole blocks but part tiles. So
    do those between 6,146 and 6,400 rows, which are 49 or 50 rows of tiles: 49 x 4 tiles on 132 SMs split the last
    round, and 50 x 4 do not."""
    for planned, others, count in ((4096, [2 * 2016], 4), (6400, range(6146, 6400, 62), 8)):
        prepared = [m for m in sizes(planned, RANKS, RANKS) if near(m, RANKS) == planned]
        assert len(prepared) == count and all(near(m, RANKS) == planned for m in others)
        for name in ("all-gather, fused", "all-gather, copied", "reduce-scatter, fused"):
            run = CASES[name][0]
            assert keys_of(run, prepared) == keys_of(run, [*prepared, *others]), name
