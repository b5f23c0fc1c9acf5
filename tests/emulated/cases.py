"""What the ops must compute, written once for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

import weft
from weft.lang.mapping import balanced_rows
from weft.plans import Fused, FusedAllReduce, FusedGather, FusedReduceScatter, Plan
from weft.scale import SMALL_ALL_REDUCE, SMALL_GATHER, SMALL_REDUCE_SCATTER

P = TypeVar("P", bound=Plan)
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
KINDS = ("sequential", "decomposed", "fused", "one_shot")
FUSED: dict[str, Fused] = dict(zip(OPS, (FusedGather(), FusedReduceScatter(), FusedAllReduce()), strict=True))
SMALL_FUSED: dict[str, Fused] = dict(zip(OPS, (SMALL_GATHER, SMALL_REDUCE_SCATTER, SMALL_ALL_REDUCE), strict=True))


def changed(plan: P, **changes: Any) -> P:
    """The plan with other values of its fields, or of its tile's."""
    tile: Any = plan.tile  # type: ignore[attr-defined]
    in_tile = {name: changes.pop(name) for name in list(changes) if hasattr(tile, name)}
    return replace(plan, tile=replace(tile, **in_tile), **changes)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same values on every rank and device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error; NaN counts as infinite."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return 0.0
    got, want = got.to(want.device).to(want.dtype), want
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def wide(t: torch.Tensor, world: weft.World) -> torch.Tensor:
    """float64 for small references, float32 on the GPU for large ones."""
    return t.double() if t.numel() < 1 << 20 else t.to(world.device).float()


def product(x: torch.Tensor, w: torch.Tensor, world: weft.World) -> torch.Tensor:
    """x @ w.T, in float64 or float32."""
    x = wide(x, world)
    return x @ wide(w, world).to(x).t()


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values in memory that is not contiguous."""
    return t.t().contiguous().t() if t.dim() == 2 else t


def all_gather_case(
    world: weft.World, shards: Sequence[int], n: int, k: int, plan: object = "fused", bias: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1, views: bool = False, into: bool = False,
) -> float:  # fmt: skip
    """Largest error over `calls` calls with fresh inputs, the gathered activation included.

    views: inputs that are not contiguous. into: results written to `out`.
    """
    worst, device = 0.0, world.device
    m = sum(shards)
    for call in range(calls):
        s = seed * 1000 + call * 10
        parts = [draw(s + 100000 * (r + 1), rows, k, dtype=dtype) for r, rows in enumerate(shards)]
        w = draw(s + 1 + 7 * world.rank, n, k, dtype=dtype) * 0.1
        b = draw(s + 2, n, dtype=dtype) if bias else None
        x_there, w_there, b_there = (None if t is None else t.to(device) for t in (parts[world.rank], w, b))
        if views:
            x_there, w_there = strided(x_there), strided(w_there)
        out = world.zeros((m, n), dtype) if into else None
        got, gathered = weft.all_gather_matmul(
            x_there, w_there, b_there, world=world, plan=plan, out=out, return_gathered=True,
            rows=None if len(set(shards)) == 1 else shards,
        )  # fmt: skip
        world.synchronize()
        if into:
            assert got is out
        full = torch.cat(parts)
        want = product(full, w, world)
        if b is not None:
            want = want + b.to(want)
        worst = max(worst, distance(got, want), distance(gathered, full.to(want)))
    return worst


def reduce_case(
    world: weft.World, m: int, n: int, k: int, plan: object = "fused", bias: bool = False, everywhere: bool = False,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, calls: int = 1, views: bool = False, into: bool = False,
    rows: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Largest error over `calls` calls of GEMM + reduce-scatter (by `rows`, or as evenly as possible), or + all-reduce."""
    worst, me, device = 0.0, world.rank, world.device
    op: Any = weft.matmul_all_reduce if everywhere else weft.matmul_reduce_scatter
    shards = list(rows or balanced_rows(m, world.size))
    for call in range(calls):
        s = seed * 1000 + call * 10
        xs = [draw(s + 100000 * (r + 1), m, k, dtype=dtype) for r in range(world.size)]
        ws = [draw(s + 200000 * (r + 1), n, k, dtype=dtype) * 0.1 for r in range(world.size)]
        b = draw(s + 2, n, dtype=dtype) if bias else None
        x_there, w_there, b_there = (None if t is None else t.to(device) for t in (xs[me], ws[me], b))
        if views:
            x_there, w_there = strided(x_there), strided(w_there)
        out = world.zeros((m if everywhere else shards[me], n), dtype) if into else None
        more = {} if rows is None else {"rows": rows}
        got = op(x_there, w_there, b_there, world=world, plan=plan, out=out, **more)
        world.synchronize()
        if into:
            assert got is out
        want = sum(product(x, w, world) for x, w in zip(xs, ws, strict=True))
        if b is not None:
            want = want + b.to(want)
        if not everywhere:
            want = want[sum(shards[:me]) : sum(shards[: me + 1])]
        worst = max(worst, distance(got, want))
    return worst


def shared_case(world: weft.World, op: str, rows: int, n: int, plan: object) -> float:
    """`out` holds x: in the own rows of an all-gather's, or x is an all-reduce's."""
    xs, w = [draw(r, rows, n) for r in range(world.size)], draw(9, n, n) * 0.1
    if op == "all_gather_matmul":
        out = world.zeros((rows * world.size, n), w.dtype)
        x, want = out[rows * world.rank :][:rows], product(torch.cat(xs), w, world)
    else:
        out = x = world.zeros((rows, n), w.dtype)
        want = sum(product(x, w, world) for x in xs)
    x.copy_(xs[world.rank])
    assert getattr(weft, op)(x, w.to(world.device), world=world, plan=plan, out=out) is out
    world.synchronize()
    return distance(out, want)


def case(world: weft.World, op: str, rows: Sequence[int], n: int, k: int, plan: object = "fused", **more: Any) -> float:
    """One op over `rows` of every rank; M is their sum. An all-reduce, and an all-gather of no rows named, need only M."""
    if op == "all_gather_matmul":
        return all_gather_case(world, rows, n, k, plan, **more)
    if op == "matmul_all_reduce":
        return reduce_case(world, sum(rows), n, k, plan, everywhere=True, **more)
    balanced = list(rows) == balanced_rows(sum(rows), world.size)
    return reduce_case(world, sum(rows), n, k, plan, rows=None if balanced else rows, **more)


def on_stream(world: weft.World, name: str) -> Any:
    """`world`'s current stream is its stream `name` inside, as under `torch.cuda.stream`."""
    if world.device.type == "cuda":
        return torch.cuda.stream(world.side_stream(name)) if name else nullcontext()
    return _emulated_stream(world.backend, name)


@contextmanager
def _emulated_stream(backend: Any, name: str) -> Iterator[None]:
    before, chosen = backend.current_stream, backend.side_stream(name)
    backend.current_stream = lambda: chosen
    try:
        yield
    finally:
        backend.current_stream = before
