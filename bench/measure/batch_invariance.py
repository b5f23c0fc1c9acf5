"""The benchmark of batch-invariant dense layers: weft's mode, a reimplementation of vLLM's mode, and layers without
such a mode.

torchrun --nproc-per-node N -m bench.measure.batch_invariance --out DIR [--models ...] [--tokens ...] [--seconds 420]

A layer consists of the linears, sums, residual adds and norms of a Llama layer on N ranks: QKV, output, gate and up, SiLU-mul, down.
The output projection reads fixed rows instead of attention's output. All methods are interleaved, in CUDA graphs:

    weft norm        `matmul` and `all_reduce_rms_norm` on a batch-invariant World
    weft rows        `matmul_all_reduce` and `rms_norm` on it, with the sum during the GEMM
    weft shards      `all_gather_matmul`, `matmul_reduce_scatter` and `rms_norm` of own rows; the same bits as "weft rows"
    rebuilt          what vLLM 0.33 does with VLLM_BATCH_INVARIANT=1: a persistent Triton GEMM without TMA, a one-stage sum of
                     any size in the order of the ranks, add, and a norm of one program a row. The GEMM's tile and the sum's
                     programs are the fastest of a few for each shape, timed first: a better table than vLLM's own
    auto ..          the same three ways on an ordinary World
    libraries        cuBLAS, NCCL, and add and norm in one kernel

The program compares each method's rows with float32 before it times them, and prints and leaves out a method that is wrong. It appends
rows to DIR/batch_invariance.jsonl, and prints the ratio of "rebuilt" to each of weft's ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

import weft
from bench.common.program import Program, gains, options, worst_error
from bench.common.timing import RIGHT, error_of, time_interleaved
from weft.lang.channel import address_of, calls_of, end_call
from weft.lang.intrinsics import wait_until
from weft.lang.mapping import balanced_rows
from weft.lang.primitives import channel_broadcast

BF = torch.bfloat16
Tensor = torch.Tensor
EPS = 1e-5
TILES = {  # the tiles of the rebuilt GEMM: rows, columns, warps, stages; BK is 64
    "128x128": (128, 128, 8, 3),
    "128x256": (128, 256, 8, 3),
    "64x128": (64, 128, 4, 4),
    "16x128": (16, 128, 4, 5),
    "16x64": (16, 64, 4, 6),
}
BLOCKS = (36, 132)  # the numbers of programs of the rebuilt sum; vLLM's kernel has 36


@dataclass(frozen=True)
class Model:
    """The sizes of a whole layer: hidden size, columns of the queries, columns of keys and values together, and columns
    of the gate."""

    hidden: int
    queries: int
    keys_values: int
    intermediate: int


MODELS = {"Llama-8B": Model(4096, 4096, 2048, 14336), "Llama-70B": Model(8192, 8192, 2048, 28672)}


class Weights(NamedTuple):
    """A rank's part of a layer's weights."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """The inputs of a layer of m tokens: normalised rows and their residual, which are the same on all ranks, and this
    rank's columns of attention's output."""

    normed: Tensor
    residual: Tensor
    heads: Tensor


# -- the rebuilt mode's kernels ----------------------------------------------------------------------------------------
@weft.jit(do_not_specialize=("M",))
def pointer_gemm(
    a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Compute out [M, N] = a [M, K] @ b [N, K]^T with ordinary loads; each persistent program computes one tile after
    another."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        top = t // (GROUP * tiles_n) * GROUP
        height = min(tiles_m - top, GROUP)
        r = t % (GROUP * tiles_n)
        rows = (top + r % height) * BM + tl.arange(0, BM)
        cols = r // height * BN + tl.arange(0, BN)
        a_rows = tl.max_contiguous(tl.multiple_of(tl.where(rows < M, rows, 0), BM), BM).to(tl.int64)
        b_rows = tl.max_contiguous(tl.multiple_of(tl.where(cols < N, cols, 0), BN), BN).to(tl.int64)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(a + a_rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            w = tl.load(b + b_rows[None, :] * K + k[:, None], mask=k[:, None] < K, other=0.0)
            acc = tl.dot(x, w, acc)
        ok = (rows < M)[:, None] & (cols < N)[None, :]
        tl.store(out + rows.to(tl.int64)[:, None] * N + cols[None, :], acc.to(out.dtype.element_ty), mask=ok)


@weft.jit(do_not_specialize=("count",))
def one_stage(parts, out, epoch, ch, count, BLOCK: tl.constexpr):
    """Compute out [count], the sum of the parts of all ranks in the order of the ranks; each rank reads all parts.
    parts: the addresses of the parts. Channel 0 counts the ranks whose parts are complete, and channel 1 + p the ranks
    whose program p has finished reading."""
    W: tl.constexpr = ch.world
    pid, calls = tl.program_id(0), calls_of(ch)
    if pid == 0:
        channel_broadcast(ch, 0, False)
    wait_until(ch.counters, calls * W, ch.guard, -1, -1, "sys")
    i = tl.arange(0, BLOCK)
    for block in range(pid, tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        ok = i < count - start
        acc = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(W):
            part = address_of(parts, rank, out.dtype.element_ty)
            acc += tl.load(tl.multiple_of(part, 8) + start + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + start + i, acc.to(out.dtype.element_ty), mask=ok)
    channel_broadcast(ch, 1 + pid, False)
    wait_until(ch.counters + 1 + pid, calls * W, ch.guard, -1, -1, "sys")
    end_call(ch, epoch, tl.num_programs(0))


@weft.jit
def row_norm(x, weight, out, N, eps, BLOCK: tl.constexpr):
    """Compute out = x / rms(x) * weight [N]. One program computes a row, in two passes over that row."""
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, BLOCK)
    squares = 0.0
    for start in range(0, N, BLOCK):
        part = tl.load(x + row + start + i, mask=start + i < N, other=0.0).to(tl.float32)
        squares += tl.sum(part * part)
    scale = tl.rsqrt(squares / N + eps)
    for start in range(0, N, BLOCK):
        ok = start + i < N
        part = tl.load(x + row + start + i, mask=ok, other=0.0).to(tl.float32)
        w = tl.load(weight + start + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + row + start + i, (part * scale * w).to(out.dtype.element_ty), mask=ok)


# -- methods -----------------------------------------------------------------------------------------------------------
class Method(ABC):
    """One way to run the linears and sums of a layer. `layer` returns the normalised rows, and `whole` gathers them on
    all ranks."""

    def __init__(self, world: weft.World, plan: str = "auto") -> None:
        self.world, self.plan = world, plan

    @abstractmethod
    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's columns [M, N] for the rows x."""

    @abstractmethod
    def row(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new residual, which is the residual + the sum over ranks of x @ weight.T, and its normalised
        rows."""

    def rows_of_rank(self, rows: Tensor) -> Tensor:
        """Return the rows that this rank holds between linears, given the rows of all ranks."""
        return rows

    def whole(self, rows: Tensor) -> Tensor:
        return rows

    def residual(self, rows: Tensor) -> Tensor:
        return self.rows_of_rank(rows)

    def layer(self, batch: Batch, weights: Weights) -> Callable[[], Tensor]:
        """Return a call of the layer."""
        x, residual = self.rows_of_rank(batch.normed), self.residual(batch.residual)

        def call() -> Tensor:
            self.column(x, weights.qkv)
            y, kept = self.row(batch.heads, weights.out, residual, weights.norms[0])
            hidden = weft.silu_mul(self.column(y, weights.gate_up), world=self.world)
            y, _ = self.row(hidden, weights.down, kept, weights.norms[1])
            return y

        return call


class Rows(Method):
    """All ranks have all rows, summed by matmul_all_reduce."""

    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        return weft.matmul(x, weight, world=self.world)

    def row(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        y = weft.matmul_all_reduce(x, weight, world=self.world, plan=self.plan)
        return weft.rms_norm(y, norm, EPS, world=self.world, residual=residual)


class FusedNorm(Rows):
    """All ranks have all rows. Sum, residual add and norm are one op, in which the owner of a row keeps the row's
    residual."""

    def residual(self, rows: Tensor) -> Tensor:
        return rows.split(balanced_rows(len(rows), self.world.size))[self.world.rank].contiguous()

    def row(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        y = weft.matmul(x, weight, world=self.world)
        return weft.all_reduce_rms_norm(y, residual, norm, EPS, world=self.world, plan=self.plan)


class Shards(Method):
    """Each rank holds its own rows between linears."""

    def rows_of_rank(self, rows: Tensor) -> Tensor:
        self.rows = balanced_rows(len(rows), self.world.size)
        return rows.split(self.rows)[self.world.rank].contiguous()

    def whole(self, rows: Tensor) -> Tensor:
        return torch.cat([t.to(rows.device) for t in self.world.exchange(rows.cpu())])

    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        return weft.all_gather_matmul(x, weight, world=self.world, plan=self.plan, rows=self.rows)

    def row(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        y = weft.matmul_reduce_scatter(x, weight, world=self.world, plan=self.plan, rows=self.rows)
        return weft.rms_norm(y, norm, EPS, world=self.world, residual=residual)


class Rebuilt(Method):
    """A reimplementation of vLLM's mode. `tune` sets a tile for each shape and the number of programs of the sum."""

    def __init__(self, world: weft.World) -> None:
        super().__init__(world)
        self.tiles: dict[tuple[int, ...], str] = {}
        self.blocks: dict[tuple[int, ...], int] = {}

    def partials(self, m: int, n: int) -> Any:
        world = self.world
        return world.cached(("partial sums", m, n), lambda: world.symmetric((m, n), BF, "partial sums"))

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor, tile: str) -> Tensor:
        (m, k), n, (bm, bn, warps, stages), world = x.shape, weight.shape[0], TILES[tile], self.world

        def make() -> weft.Launch:
            programs = min(world.sm_count, -(-m // bm) * -(-n // bn))
            options = dict(num_warps=warps, num_stages=stages, local=True)
            return weft.Launch(
                world, pointer_gemm, programs, options, M=m, N=n, K=k, BM=bm, BN=bn, BK=min(64, k), GROUP=8
            )

        world.cached(("gemm", m, n, k, tile), make)(world.current_stream(), a=x, b=weight, out=out)
        return out

    def sum(self, m: int, n: int, out: Tensor, blocks: int) -> Tensor:
        world = self.world

        def make() -> weft.Launch:
            programs = min(blocks, world.sm_count)
            ch = world.channel(f"one stage {m} x {n}, {blocks}", 1 + programs, None)
            epoch, parts = world.zeros((1,), torch.int32), self.partials(m, n).addresses
            return weft.Launch(
                world, one_stage, programs, dict(num_warps=16), parts=parts, epoch=epoch, ch=ch, count=m * n, BLOCK=4096
            )

        world.cached(("one stage", m, n, blocks), make)(world.current_stream(), out=out)
        return out

    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        out = self.world.empty((len(x), len(weight)), BF)
        return self.multiply(x, weight, out, self.tiles[(*x.shape, len(weight))])

    def row(self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        world, (m, k), n = self.world, x.shape, len(weight)
        total = self.multiply(x, weight, self.partials(m, n).local, self.tiles[m, k, n])
        if world.size > 1:
            total = self.sum(m, n, world.empty((m, n), BF), self.blocks[m, n])
        kept, y, stream = world.empty((m, n), BF), world.empty((m, n), BF), world.current_stream()
        world.call(lambda: torch.add(total, residual, out=kept), [total, residual], [kept], stream)

        def make() -> weft.Launch:
            return weft.Launch(world, row_norm, m, dict(num_warps=4, local=True), N=n, eps=EPS, BLOCK=1024)

        world.cached(("norm", m, n), make)(stream, x=kept, weight=norm, out=y)
        return y, kept

    def tune(self, batch: Batch, weights: Weights, fastest: Callable[[dict[Any, Callable[[], object]]], Any]) -> None:
        """Set the tile of each product and the number of programs of the sum for these sizes."""
        m, hidden = batch.normed.shape
        for weight in (weights.qkv, weights.out, weights.gate_up, weights.down):
            x = torch.zeros(m, weight.shape[1], device=weight.device, dtype=BF)
            out = torch.empty(m, len(weight), device=weight.device, dtype=BF)
            calls = {tile: lambda t=tile, x=x, w=weight, y=out: self.multiply(x, w, y, t) for tile in TILES}
            self.tiles[m, weight.shape[1], len(weight)] = fastest(calls)
        if self.world.size > 1:
            total = torch.empty(m, hidden, device=weights.out.device, dtype=BF)
            sums = {blocks: lambda b=blocks: self.sum(m, hidden, total, b) for blocks in BLOCKS}
            self.blocks[m, hidden] = fastest(sums)


# -- a measurement -----------------------------------------------------------------------------------------------------
def drawn(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed)).to(BF)


def weights_of(model: Model, world: weft.World) -> Weights:
    h, rank, d = model.hidden, 1000 * world.rank, world.device
    q, kv, inner = (n // world.size for n in (model.queries, model.keys_values, model.intermediate))
    norms = drawn(1, d, h), drawn(2, d, h)
    parts = (q + kv, h), (h, q), (2 * inner, h), (h, inner)
    qkv, out, gate_up, down = (drawn(rank + i, d, *shape) * shape[1] ** -0.5 for i, shape in enumerate(parts, 3))
    return Weights(qkv, out, gate_up, down, norms)


def batch_of(model: Model, m: int, world: weft.World) -> Batch:
    d = world.device
    normed, residual = drawn(20, d, m, model.hidden), drawn(21, d, m, model.hidden)
    return Batch(normed, residual, drawn(1000 * world.rank + 22, d, m, model.queries // world.size))


def expected(batch: Batch, w: Weights, world: weft.World) -> Tensor:
    """Return the layer's rows in float32."""

    def row(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        parts = world.exchange((x.float() @ weight.float().t()).cpu())
        return residual + sum(part.to(residual.device) for part in parts)

    def norm(h: Tensor, weight: Tensor) -> Tensor:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()

    kept = row(batch.heads, w.out, batch.residual.float())
    gate, up = (norm(kept, w.norms[0]) @ w.gate_up.float().t()).chunk(2, 1)
    return norm(row(torch.nn.functional.silu(gate) * up, w.down, kept), w.norms[1])


class Bench:
    """The methods on two Worlds of the same ranks, one of which is batch-invariant."""

    def __init__(self, invariant: weft.World, ordinary: weft.World, rounds: int = 5) -> None:
        self.world, self.rounds = invariant, rounds
        self.rebuilt = Rebuilt(ordinary)
        self.methods: dict[str, Method] = {
            "weft norm": FusedNorm(invariant),
            "weft rows": Rows(invariant),
            "weft shards": Shards(invariant),
            "rebuilt": self.rebuilt,
            "auto norm": FusedNorm(ordinary),
            "auto rows": Rows(ordinary),
            "auto shards": Shards(ordinary),
            "libraries": Rows(ordinary, "sequential"),
        }

    def fastest(self, calls: dict[Any, Callable[[], object]]) -> Any:
        """Return the name of the fastest call among the calls that can run; all ranks return the same name."""
        good = {name: call for name, call in calls.items() if worst_error(self.world, str(name), call) == 0}
        us = time_interleaved(good, mode="graph", calls=4, rounds=3)
        return min(us, key=us.__getitem__)

    def measure(self, model: Model, weights: Weights, m: int) -> dict[str, tuple[float, float]]:
        """Return the time in us and the error of each method whose result is correct."""
        batch = batch_of(model, m, self.world)
        rows, calls, errors = expected(batch, weights, self.world), {}, {}
        self.rebuilt.tune(batch, weights, self.fastest)
        for name, method in self.methods.items():
            call = method.layer(batch, weights)
            error = worst_error(method.world, name, call, lambda y, method=method: error_of(method.whole(y), rows))
            if error < RIGHT:
                calls[name], errors[name] = call, error
        us = time_interleaved(calls, mode="graph", calls=10 if m <= 512 else 4, rounds=self.rounds)
        return {name: (us[name], errors[name]) for name in calls}


def main() -> None:
    a = options(models=list(MODELS), tokens=[2048, 8192, 64, 512, 1], rounds=5)
    bench = Bench(weft.init(batch_invariant=True), weft.init(batch_invariant=False), a.rounds)
    run = Program(a, "batch_invariance.jsonl", bench.world)
    weights = {name: weights_of(MODELS[name], run.world) for name in a.models}
    for name, m in run.cases({f"invariant {name} {m}": (name, m) for name in a.models for m in a.tokens}):
        measured = bench.measure(MODELS[name], weights[name], m)
        if "rebuilt" in measured:
            run.log(f"{name}, {m} tokens:", gains({method: us for method, (us, _) in measured.items()}, "rebuilt"))
        shape = dict(model=name, M=m)
        run.keep(dict(shape, method=q, us=round(us, 2), error=error) for q, (us, error) in measured.items())
    run.end()


if __name__ == "__main__":
    main()
