"""`weft.init(batch_invariant=True)` makes the bits of a row equal over batches, owners, plans and schedules; on other
Worlds they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

import weft
from tests.emulated.cases import changed, draw
from tests.emulated.cases_models import TINY
from tests.gates import some
from tests.gpu import gpu_invariant
from weft.backends import emulated
from weft.compute.norm import sum_in_pairs
from weft.integrations.vllm.row_all_reduce import ROW_ALL_REDUCE
from weft.integrations.vllm.row_norm_column import ROW_NORM_COLUMN, LayerTensors
from weft.models import Llama
from weft.nn import ParallelMLP
from weft.ops.all_gather_matmul.op import all_gather_swiglu
from weft.ops.all_reduce.call import NormOperands, SumCall
from weft.ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from weft.ops.matmul import invariant_matmul, matmul, multiply_with_tile
from weft.ops.product import MATMUL
from weft.ops.product import matmul as product
from weft.ops.recipes import UNSCALED, ScaledFactors
from weft.plans import (
    Decomposed,
    FusedAllReduce,
    FusedGather,
    FusedGatherByCopies,
    FusedReduceScatter,
    GemmTile,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
    is_low_latency,
)
from weft.scale import SMALL

W, K, N = 3, 64, 64
ODD = 6  # rows whose bits the test compares
BATCHES = ((6, 0), (9, 3), (18, 11))  # the number of rows of a batch, and the index of the first compared row
TILE = SMALL.plan(FusedGather).tile
Op = Callable[[weft.World, str | Plan, int, int], torch.Tensor]


def rows(seed: int, columns: int) -> torch.Tensor:
    """Return rows with denormals, negative zeros, infinities and outliers that cancel each other, and two ordinary
    rows."""
    x = draw(seed, ODD, columns)
    x[0] *= 1e-39
    x[1] = -0.0
    x[2, seed % columns] = float("inf")
    x[3, ::7], x[3, 1::7] = 1e30, -1e30
    return x


def batch(seed: int, m: int, begin: int, columns: int) -> torch.Tensor:
    """Return the compared rows among other rows that differ in each batch."""
    x = draw(1000 * seed + m, m, columns)
    x[begin : begin + ODD] = rows(seed, columns)
    return x


def shards(m: int) -> list[int]:
    """Return the ranks' numbers of rows, which are equal if m is a multiple of 6."""
    return [m // W] * W if m % 6 == 0 else [m - 4, 0, 4] if m % 2 else [1, m - 3, 2]


def own_shard(t: torch.Tensor, m: int, world: weft.World) -> torch.Tensor:
    return t.split(shards(m))[world.rank].contiguous()


def from_owners(world: weft.World, y: torch.Tensor, begin: int) -> torch.Tensor:
    return torch.cat(world.exchange(y.clone()))[begin : begin + ODD]


def gather(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, w, bias = own_shard(batch(1, m, begin, K), m, world), draw(60 + world.rank, N, K), draw(70, N)
    y = weft.all_gather_matmul(x, w, bias, world=world, plan=plan, rows=shards(m))
    return y[begin : begin + ODD].clone()


def swiglu(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, w = own_shard(batch(1, m, begin, K), m, world), draw(60 + world.rank, N, K) * 0.1
    return all_gather_swiglu(x, w, N // 2, world, plan, shards(m))[begin : begin + ODD].clone()


def scatter(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, w = batch(10 + world.rank, m, begin, K), draw(60 + world.rank, N, K)
    return from_owners(world, weft.matmul_reduce_scatter(x, w, world=world, plan=plan, rows=shards(m)), begin)


def reduce(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, w = batch(10 + world.rank, m, begin, K), draw(60 + world.rank, N, K)
    return weft.matmul_all_reduce(x, w, world=world, plan=plan)[begin : begin + ODD].clone()


def norm(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, residual, w = batch(10 + world.rank, m, begin, N), batch(5, m, begin, N), draw(61, N)
    y, kept = weft.all_reduce_rms_norm(x, residual, w, world=world, plan=plan, full_residual=True)
    return torch.cat([y, kept], 1)[begin : begin + ODD].clone()


def vllm_sublayers(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    """Call the operator of vLLM's passes twice, since a repeated call runs a shorter code path; or call the operators
    that it replaces."""
    x, residual = batch(10 + world.rank, m, begin, K), batch(5, m, begin, N)
    row, w, column = draw(60 + world.rank, N, K), draw(61, N), draw(80 + world.rank, N, N)
    if plan == "operators":
        rows = product(x, row, world=world)
        y, kept = weft.all_reduce_rms_norm(rows, residual, w, world=world, full_residual=True)
        y = product(y, column, world=world)
    else:
        for _ in range(2):
            y, kept = ROW_NORM_COLUMN(world, plan, LayerTensors(x, residual, w, row, column=column), (1e-6,))
    return torch.cat([y, kept], 1)[begin : begin + ODD].clone()


def vllm_row(world: weft.World, plan: str | Plan, m: int, begin: int) -> torch.Tensor:
    x, w = batch(10 + world.rank, m, begin, K), draw(60 + world.rank, N, K)
    return ROW_ALL_REDUCE(world, plan, (x, w, None, None))[begin : begin + ODD].clone()


GATHERS = (
    *("auto", Sequential(), FusedGather(tile=TILE, pull_programs=2, pull_rows=8), Decomposed(), OneShot(warps=4)),
    *(changed(SMALL.plan(FusedGather), block_n=16), FusedGatherByCopies(tile=TILE)),
)
OPS: dict[Op, Sequence[str | Plan]] = {
    gather: GATHERS,
    swiglu: ("auto", Sequential(), changed(SMALL.plan(FusedGather), block_n=64)),
    scatter: ("auto", changed(SMALL.plan(FusedReduceScatter), block_m=32), Decomposed(), OneShot(warps=4)),
    reduce: ("auto", changed(SMALL.plan(FusedAllReduce), block_n=16), TwoShotLowLatency(), OneShot()),
    norm: ("auto", TwoShotPush(warps=4, stages=2), TwoShotPull(warps=8), TwoShotLowLatency(), OneShot(), Decomposed()),
    vllm_sublayers: ("auto", "operators"),
    vllm_row: ("auto",),
}  # fmt: skip


def served(plan: str | Plan, m: int) -> bool:
    """Return whether the plan can serve the shards of m rows."""
    copies = isinstance(plan, Decomposed | FusedGatherByCopies)
    return not (copies and len(set(shards(m))) > 1) and not (isinstance(plan, OneShot) and 0 in shards(m))


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bits, with one pattern for all NaNs, whose sign is arbitrary on a CPU."""
    return torch.where(t.isnan(), torch.full_like(t, float("nan")), t).view(torch.int16)


def check(op: Op, plans: Sequence[str | Plan], seed: int) -> None:
    """Assert that the compared rows have the same bits under all plans and in all batches."""

    def main(world: weft.World) -> dict[tuple[str, int], torch.Tensor]:
        calls = [(plan, m, begin) for plan in plans for m, begin in BATCHES if op in (reduce, norm) or served(plan, m)]
        results = {(str(plan), m): op(world, plan, m, begin) for plan, m, begin in calls}
        world.synchronize()
        return results

    for rank, results in enumerate(weft.spmd(main, W, backend="emulated", seed=seed)):
        (reference, expected), *others = results.items()
        for key, y in others:
            assert torch.equal(bits(y), bits(expected)), f"rank {rank}: {key} differs from {reference}"


@pytest.mark.parametrize("seed", some(range(2)))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_a_row_keeps_its_bits(op: Op, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    check(op, OPS[op], seed)


def ring(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum as NCCL's ring does: the sum of each part of the elements starts on a different rank, and every step
    rounds."""
    flat = [t.reshape(-1) for t in tensors]
    part = -(-flat[0].numel() // len(flat))
    total = torch.empty_like(flat[0])
    for p, chunk in enumerate(total.split(part)):
        chunk.copy_(flat[(p + 1) % len(flat)].split(part)[p])
        for step in range(2, len(flat) + 1):
            chunk.add_(flat[(p + step) % len(flat)].split(part)[p])
    return total.view(tensors[0].shape)


@pytest.mark.parametrize("op", [reduce, norm], ids=lambda op: op.__name__)
def test_sums_of_a_ring_break_the_promise(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "sum_in_order", ring)
    with pytest.raises(AssertionError, match="Sequential.* differs from"):
        check(op, [Sequential()], 0)


@pytest.mark.parametrize("op", [swiglu, norm], ids=lambda op: op.__name__)
def test_plans_differ_without_the_promise(op: Op) -> None:
    """An epilogue keeps gate and up in float32, and a fused norm keeps the sum; sequential plans round them."""
    with pytest.raises(AssertionError, match="differs from"):
        check(op, [Sequential(), OPS[op][0]], 0)


def test_shared_last_tiles_break_the_promise() -> None:
    """If there are few tiles, programs split K among them, so a row's bits differ from those of a sum over K in one
    order."""

    def main(world: weft.World) -> None:
        x, w = draw(1, 96, 640), draw(2, N, 640)
        x[:, 0], x[:, -1], w[:, 0], w[:, -1] = 1e6, -1e6, 1, 1
        followed = []
        for m in (16, 96):
            out = world.empty((m, N), x.dtype)
            matmul(x[:m].contiguous(), w, out, world, 6)
            whole = invariant_matmul(world, x[:m].contiguous(), w, None, world.current_stream())
            world.synchronize()
            followed.append((out[:16].clone(), whole[:16].clone()))
        (shared, whole), (not_shared, whole_again) = followed
        assert not torch.equal(shared, not_shared) and torch.equal(whole, whole_again)

    weft.spmd(main, 1, backend="emulated")


def test_tiles_of_any_size_give_the_same_bits() -> None:
    """For each of 64 equal rows, tiles of several sizes produce the same bits; K steps of a different length produce
    different bits."""

    def main(world: weft.World) -> None:
        x, w = rows(3, 256)[4:].repeat(32, 1), draw(2, N, 256)
        x[:, 0], x[:, -1], w[:, 0], w[:, -1] = 1e6, -1e6, 1, 1  # the sums between these are rounded coarsely

        def product(tile: GemmTile) -> torch.Tensor:
            out = world.empty((64, N), x.dtype)
            multiply_with_tile(world, tile, x, w, None, out)
            world.synchronize()
            return out

        expected = product(TILE)
        assert torch.equal(expected, expected[:2].repeat(32, 1))
        for bm, bn in ((16, 16), (32, 32), (64, 64), (32, 128)):
            assert torch.equal(product(replace(TILE, block_m=bm, block_n=bn)), expected)
        assert not torch.equal(product(replace(TILE, block_k=16)), expected)

    weft.spmd(main, 1, backend="emulated")


@weft.jit
def pair_sums(x, out, N, P: tl.constexpr):
    r, c = tl.arange(0, 4), tl.arange(0, P)
    tile = tl.load(x + r[:, None] * N + c[None, :], mask=c[None, :] < N, other=0.0)
    tl.store(out + r, sum_in_pairs(tile, 4, P))


def test_a_norm_adds_neighbours_and_then_their_sums() -> None:
    """Zeros after the end of a row change nothing."""

    def main(world: weft.World) -> None:
        x = draw(1, 4, 50, dtype=torch.float32) * 1e3
        expected = torch.nn.functional.pad(x, (0, 14))
        while expected.shape[1] > 1:
            expected = expected[:, ::2] + expected[:, 1::2]
        assert not torch.equal(expected[:, 0], x.cumsum(1)[:, -1]), "a different order must give different bits"
        for width in (64, 256):
            out, stream = world.zeros((4,), torch.float32), world.current_stream()
            world.launch(pair_sums, 1, dict(x=x, out=out, N=50, P=width), dict(num_warps=4), stream)
            world.synchronize()
            assert torch.equal(out, expected[:, 0])

    weft.spmd(main, 1, backend="emulated")


REFUSED: dict[str, tuple[Op, Any]] = {
    "NCCL's sum": (reduce, "sequential"),
    "NCCL's sums of groups": (scatter, Signaled(ctas=1, tile=TILE)),
    "NCCL's sums of parts": (reduce, "decomposed"),
    "the switch": (norm, Multicast()),
    "rounding of tokens' shards": (vllm_sublayers, "sequence_parallel"),
    "other steps of K": (gather, changed(SMALL.plan(FusedGather), block_k=16)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_breaks_the_promise_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    op, plan = REFUSED[name]

    def main(world: weft.World) -> None:
        kind = plan if isinstance(plan, str) else plan.kind
        with pytest.raises(weft.Unsupported, match=f"plan '{kind}' on a batch-invariant World"):
            op(world, plan, 6, 0)

    weft.spmd(main, W, backend="emulated")


def test_an_op_or_a_world_without_the_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: weft.World) -> None:
        assert world.batch_invariant and world.split(0).batch_invariant and world.alone.batch_invariant
        q = draw(1, 4, 2, 16)
        with pytest.raises(weft.Unsupported, match="gathered_attention.*batch-invariant World"):
            weft.gathered_attention(q, q, q, world=world)
        with pytest.raises(weft.Unsupported, match="Llama on a batch-invariant World"):
            Llama(TINY, world=world)
        x = draw(1, 6, 60)
        with pytest.raises(weft.Unsupported, match="K 60 must be a multiple of 8"):
            weft.all_gather_matmul(x, draw(2, N, 60), world=world)
        with pytest.raises(weft.Unsupported, match="the bias"):
            weft.matmul_all_reduce(draw(1, 6, N), draw(2, N, N), draw(3, N), world=world, plan=OneShot())
        with pytest.raises(weft.Unsupported, match="LayerNorm by pairs"):
            weft.all_reduce_rms_norm(
                draw(1, 6, 64), None, draw(2, 64), norm="layer", world=world, plan=TwoShotLowLatency()
            )

    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    weft.spmd(main, 2, backend="emulated")
    with pytest.raises(weft.Unsupported, match="batch_invariant: "):
        weft.spmd(main, 2, backend="emulated", nodes=2)


def test_ranks_without_peer_access_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error message gives the reason: without peer access, decomposed plans run with cuBLAS and NCCL."""

    def main(world: weft.World) -> None:
        world.backend.symmetric_unsupported = world.backend.peers_unsupported = "no peer access"
        x, w = draw(1, 6, K), draw(2, N, K)
        with pytest.raises(weft.Unsupported, match="matmul_reduce_scatter.*batch-invariant World"):
            weft.matmul_reduce_scatter(x, w, world=world)
        with pytest.raises(weft.Unsupported, match="cuBLAS multiplies"):
            weft.all_gather_matmul(x, w, world=world, plan="decomposed")

    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    weft.spmd(main, 2, backend="emulated")


def test_auto_times_the_plans_that_keep_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" does not time plans whose low-latency rows would need much memory. The ranks do not choose a plan for
    `matmul` together: each rank times its tiles by itself."""
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")

    def main(world: weft.World) -> None:
        for m, are_few in ((8, True), (1 << 13, False)):
            x = NormOperands(torch.empty(m, 8192, dtype=torch.bfloat16, device="meta"))
            call = SumCall("all_reduce", m, 8192, x.x.dtype, x.x.dtype, 0, 0.0, 0, 0, False, False)
            plans = ALL_REDUCE_RMS_NORM.choice(world, call, x).candidates()
            assert {TwoShotPush, TwoShotPull, Decomposed} <= {type(plan) for plan in plans}
            assert any(is_low_latency(plan) for plan in plans) == are_few and Sequential() not in plans
        operands = ScaledFactors(draw(1, 8, K), draw(2, N, K), None)
        product = MATMUL.check(world, operands, UNSCALED)
        assert not MATMUL.choice(world, product, operands).candidates()

    weft.spmd(main, 2, backend="emulated", sm_count=40)


def test_ranks_that_do_not_all_promise_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: weft.World) -> None:
        world.batch_invariant = world.rank == 0
        with pytest.raises(weft.Mismatch, match="batch_invariant=True"):
            weft.all_gather_matmul(draw(1, 6, K), draw(2, N, K), world=world, plan="sequential")

    weft.spmd(main, 2, backend="emulated")


def test_an_mlp_is_batch_invariant_by_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")

    def main(world: weft.World) -> list[torch.Tensor]:
        torch.manual_seed(world.rank)
        mlp, followed = ParallelMLP(N, 96, world=world), []
        for m, begin in BATCHES:
            x = own_shard(batch(1, m, begin, N), m, world)
            with torch.no_grad():
                followed.append(from_owners(world, mlp(x, shards(m)), begin))
        return followed

    for expected, *others in weft.spmd(main, W, backend="emulated"):
        assert all(torch.equal(bits(y), bits(expected)) for y in others)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "all_reduce_rms_norm"])
def test_the_check_on_gpus_follows_a_row(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_BATCH_INVARIANT", "1")
    assert weft.spmd(gpu_invariant.follow, 2, backend="emulated", args=(op, 8, 24, 32, 32)) == [0, 0]
