"""Kernels that wait inside a pipelined loop (lang/guarded_loads.py), and their expected results on every backend: each
function runs on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from weft import World
from weft.compute.gemm import gemm_tile
from weft.lang.jit import Kernel

N, PARTS, STAGES = 32, 4, 3

# -- loops in which each iteration needs a part that another rank has sent ---------------------------------------------


@weft.jit
def with_pointers(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    index = tl.arange(0, N)
    block = index[:, None] * N + index[None, :]
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(tl.load(received + part * N * N + block), tl.load(w + part * N * N + block))
    return total


@weft.jit
def with_moving_pointers(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    index = tl.arange(0, N)
    block = index[:, None] * N + index[None, :]
    total = tl.zeros((N, N), tl.float32)
    a, b = received + block, w + block
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(tl.load(a), tl.load(b))
        a += N * N
        b += N * N
    return total


@weft.jit
def with_descriptors(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(received_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
    return total


@weft.jit
def for_the_next_iteration(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    wl.peer_tile_wait(ch, 0, -1)
    for part in range(parts):
        total += tl.dot(received_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
        wl.peer_tile_wait(ch, min(part + 1, parts - 1), -1)
    return total


@weft.jit
def for_several_iterations(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    index = tl.arange(0, N)
    block = index[:, None] * N + index[None, :]
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        if part % 2 == 0:
            wl.peer_tile_wait(ch, part, -1)
            wl.peer_tile_wait(ch, part + 1, -1)
        total += tl.dot(tl.load(received + part * N * N + block), tl.load(w + part * N * N + block))
    return total


@weft.jit
def in_a_loop_within_an_if(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        if part % 2 == 0:
            for awaited in range(part, part + 2):
                wl.peer_tile_wait(ch, awaited, -1)
        total += tl.dot(received_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
    return total


FORMS = {
    form.fn.__name__: form
    for form in (
        with_pointers, with_moving_pointers, with_descriptors, for_the_next_iteration, for_several_iterations,
        in_a_loop_within_an_if,
    )
}  # fmt: skip


def exchange_and_sum(
    w, received, boxes, received_desc, w_desc, out, delays, epoch, ch, parts, total_of: tl.constexpr, N: tl.constexpr
):
    """out [N, N] = sum over parts of received [parts, N, N] @ w [parts, N, N], where `received` is the w of the
    previous rank. One program sends the parts, each after the number of atomics that `delays` [parts + 1] lists for it,
    while the other program sums."""
    index = tl.arange(0, N)
    block = index[:, None] * N + index[None, :]
    if tl.program_id(0) == 0:
        to = (wl.rank_of(ch) + 1) % ch.world
        for part in range(parts):
            for _ in range(tl.load(delays + part)):
                tl.atomic_add(delays + parts, 0, sem="relaxed")
            wl.tile_push_data(boxes, to, part * N * N + block, tl.load(w + part * N * N + block), None)
            wl.peer_tile_notify(ch, part, to, False)
    else:
        tl.store(out + block, total_of(received, received_desc, w, w_desc, ch, parts, N))
    wl.end_call(ch, epoch, 2)


def count_wrong_sums(
    world: World,
    form: str,
    kernel: Kernel,
    n: int = N,
    parts: int = PARTS,
    delays: Iterable[list[int]] = ([0] * PARTS,),
) -> int:
    """Return the number of calls with a wrong sum if the parts are sent after these delays."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
    weights = [torch.randint(-2, 3, (parts, n, n), generator=g).bfloat16().to(world.device) for g in generators]
    w, before = weights[world.rank], weights[world.rank - 1]
    expected = torch.bmm(before.float(), w.float()).sum(0)  # whole numbers, exact in any order
    received, out = world.symmetric((parts, n, n), torch.bfloat16, f"received {n}"), world.empty((n, n), torch.float32)
    blocks = [TensorDescriptor.from_tensor(t.view(parts * n, n), [n, n]) for t in (received.local, w)]
    args = dict(
        w=w, received=received.local, boxes=received.addresses, received_desc=blocks[0], w_desc=blocks[1], out=out
    )
    args |= dict(
        epoch=world.zeros((1,), torch.int32), ch=world.channel(f"sum of {form}, {n}", parts, None), parts=parts
    )
    args |= dict(total_of=FORMS[form], N=n, delays=world.empty((parts + 1,), torch.int32))
    wrong = 0
    for call, ahead_of_part in enumerate(delays):
        if call:  # the kernel must not mistake parts of the previous call for parts of this call
            world.synchronize()
            world.exchange(None)
            received.local.zero_()
            world.synchronize()
            world.exchange(None)
        args["delays"].copy_(torch.tensor([*ahead_of_part, 0]))
        world.launch(kernel, 2, args, dict(num_stages=STAGES), world.current_stream())
        world.synchronize()
        wrong += not torch.equal(out, expected)
    return wrong


def summing(form: str, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(exchange_and_sum)

    def main(world: World) -> None:
        assert count_wrong_sums(world, form, kernel) == 0

    return main


# -- a GEMM that waits for every part of K -----------------------------------------------------------------------------


@weft.jit
def step_by_step(
    a, b, a_desc, b_desc, ch, row, col, K, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(K // BK):
        wl.peer_tile_wait(ch, step // STEPS, -1)
        acc = tl.dot(a_desc.load([row, step * BK]), b_desc.load([col, step * BK]).T, acc)
    return acc


@weft.jit
def step_by_step_with_pointers(
    a, b, a_desc, b_desc, ch, row, col, K, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    k = tl.arange(0, BK)
    a_block = a + (row + tl.arange(0, BM))[:, None] * K + k[None, :]
    b_block = b + (col + tl.arange(0, BN))[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(K // BK):
        wl.peer_tile_wait(ch, step // STEPS, -1)
        acc = tl.dot(tl.load(a_block + step * BK), tl.load(b_block + step * BK), acc)
    return acc


@weft.jit
def by_segments(
    a, b, a_desc, b_desc, ch, row, col, K, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Compute the matrix product without a guard: its pipelined loop contains no wait."""
    acc = tl.zeros((BM, BN), tl.float32)
    for part in range(K // (STEPS * BK)):
        wl.peer_tile_wait(ch, part, -1)
        for step in range(part * STEPS, part * STEPS + STEPS):
            acc = tl.dot(a_desc.load([row, step * BK]), b_desc.load([col, step * BK]).T, acc)
    return acc


PRODUCTS = {form.fn.__name__: form for form in (step_by_step, step_by_step_with_pointers, by_segments)}


def product(a, b, a_desc, b_desc, out_desc, epoch, ch, M, N, K, programs, tile_of: tl.constexpr, STEPS: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out [M, N] = a [M, K] @ b [N, K]^T. Before every STEPS steps of K, a program waits for a notify by the first
    program."""
    pid = tl.program_id(0)
    if pid == 0:
        for part in range(K // (STEPS * BK)):
            wl.peer_tile_notify(ch, part, wl.rank_of(ch), False)
    tiles_m = M // BM
    for tile in range(pid, tiles_m * (N // BN), programs):
        row, col = tile % tiles_m * BM, tile // tiles_m * BN
        acc = tile_of(a, b, a_desc, b_desc, ch, row, col, K, STEPS, BM, BN, BK)
        out_desc.store([row, col], acc.to(tl.bfloat16))
    wl.end_call(ch, epoch, programs)


def product_launch(
    world: World, form: str, kernel: Kernel, a: torch.Tensor, b: torch.Tensor, steps: int, tile: tuple[int, int, int], programs: int, warps: int
) -> tuple[Callable[[], None], torch.Tensor]:  # fmt: skip
    """Return a launch of `product`, which may be repeated, and its result."""
    (m, k), n, (bm, bn, bk) = a.shape, b.shape[0], tile
    out = world.empty((m, n), torch.bfloat16)
    args: dict[str, Any] = dict(a=a, b=b, M=m, N=n, K=k, programs=programs, STEPS=steps, BM=bm, BN=bn, BK=bk)
    blocks = dict(a_desc=(a, [bm, bk]), b_desc=(b, [bn, bk]), out_desc=(out, [bm, bn]))
    args |= {name: TensorDescriptor.from_tensor(t, block) for name, (t, block) in blocks.items()}
    args |= dict(epoch=world.zeros((1,), torch.int32), ch=world.channel(f"product {form}", k // (steps * bk), None))
    args |= dict(tile_of=PRODUCTS[form])
    options = dict(num_warps=warps, num_stages=STAGES)
    return lambda: world.launch(kernel, programs, args, options, world.current_stream()), out


def multiplying(form: str, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(product)

    def main(world: World) -> None:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randint(-2, 3, (64, 128), generator=generator).bfloat16().to(world.device) for _ in range(2))
        launch, out = product_launch(world, form, kernel, a, b, 2, (32, 32, 32), 2, 4)
        launch()
        world.synchronize()
        assert torch.equal(out, (a.float() @ b.float().t()).bfloat16())

    return main


# -- loops in which a tile waits for the previous tile's notify --------------------------------------------------------


@weft.jit
def tiles_of_a_gemm(a_desc, b_desc, out_desc, ch, me, tiles, K, N: tl.constexpr):
    for t in tl.range(0, tiles, flatten=True):
        wl.peer_tile_wait(ch, t, me)
        acc = gemm_tile(a_desc, b_desc, t * N, 0, K, N, N, N)
        out_desc.store([t * N, 0], acc.to(tl.bfloat16))
        wl.peer_tile_notify(ch, t + 1, me)


@weft.jit
def steps_of_a_gemm(a_desc, b_desc, out_desc, ch, me, tiles, K, N: tl.constexpr):
    for t in range(tiles):
        wl.peer_tile_wait(ch, t, me)
        acc = tl.dot(a_desc.load([t * N, 0]), b_desc.load([0, 0]).T)
        out_desc.store([t * N, 0], acc.to(tl.bfloat16))
        wl.peer_tile_notify(ch, t + 1, me)


CHAINS = {chain.fn.__name__: chain for chain in (tiles_of_a_gemm, steps_of_a_gemm)}


def chain(a_desc, b_desc, out_desc, epoch, ch, tiles, K, tiles_in_turn: tl.constexpr, N: tl.constexpr):
    me = wl.rank_of(ch)
    wl.peer_tile_notify(ch, 0, me)
    tiles_in_turn(a_desc, b_desc, out_desc, ch, me, tiles, K, N)
    wl.end_call(ch, epoch, 1)


def chained(form: str, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(chain)

    def main(world: World) -> None:
        k = N if form == "steps_of_a_gemm" else 2 * N
        a = torch.randint(-2, 3, (PARTS * N, k), generator=torch.Generator().manual_seed(0)).bfloat16().to(world.device)
        out = world.empty((PARTS * N, N), torch.bfloat16)
        descriptors = [TensorDescriptor.from_tensor(t, [N, N]) for t in (a, a[:N], out)]
        args = dict(zip(("a_desc", "b_desc", "out_desc"), descriptors, strict=True))
        args |= dict(epoch=world.zeros((1,), torch.int32), ch=world.channel("tiles", PARTS + 1, None), tiles=PARTS, K=k)
        args |= dict(tiles_in_turn=CHAINS[form], N=N)
        world.launch(kernel, 1, args, dict(num_stages=STAGES), world.current_stream())
        world.synchronize()
        assert torch.equal(out.cpu(), (a.float() @ a[:N].float().t()).bfloat16().cpu())

    return main
