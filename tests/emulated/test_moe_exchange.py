"""`weft.moe.dispatch` and `combine` on emulated ranks, whose results must equal the reference bit for bit; and their
compiled kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_dispatch_combine import (
    Routes,
    by_grouped_gemm,
    exchange_case,
    launch_combine,
    launch_dispatch,
    microbatches,
    noticed,
    one_by_one,
    overflows,
    overfull,
    trained,
    two_under_way,
)
from tests.emulated.cases_moe import Model, at_random, in_turn, nowhere, some_nowhere, to_few
from tests.gates import covered, some
from tests.offline import test_offline as offline
from weft import moe
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.ops.moe.call import Layer
from weft.ops.moe.dispatch_combine import op
from weft.ops.moe.expert_parallel.place_rows_kernels import place_rows

BF = torch.bfloat16
STREAMS = ("first", "second")


def wrong(ranks: int, seed: int = 0, preempt: float = 0.05, **case: Any) -> int:
    return sum(weft.spmd(lambda w: exchange_case(w, **case), ranks, backend="emulated", seed=seed, preempt=preempt))


@covered("4-4-1-(contiguous|masked)", covering=r"[3-6-2-\1]")
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize(("ranks", "experts", "k"), [(1, 3, 2), (2, 4, 3), (3, 6, 2), (4, 4, 1)])
def test_any_world(ranks: int, experts: int, k: int, layout: str) -> None:
    """Ranks have different numbers of tokens, or no tokens; two calls are pending on one stream."""
    assert wrong(ranks, experts=experts, k=k, layout=layout) == 0


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("ids_of", [to_few, nowhere, some_nowhere], ids=lambda f: f.__name__)
def test_routings(ids_of: Any, layout: str) -> None:
    """All tokens are routed to one rank's experts; some experts, ranks and calls have no rows; some routes have no
    expert."""
    assert wrong(2, ids_of=ids_of, layout=layout, calls=1) == 0
    assert wrong(3, experts=3, k=1, ids_of=ids_of, layout=layout, tokens=(18, 3, 0), calls=1, flight=1) == 0


@covered(r"1-(\w+)", covering=r"[3-\1]")
@pytest.mark.parametrize("options", [dict(), dict(alignment=16), dict(layout="masked"), dict(layout="masked", max_m=3)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_without_symmetric_memory_by_the_librarys_collectives(ranks: int, options: dict[str, Any]) -> None:
    """On two streams, NCCL's collectives give the same rows, results and dropped rows as weft's kernels."""

    def rank(world: weft.World) -> int:
        world.backend.symmetric_unsupported = "GPU 0 has no peer access to GPUs [1]"
        world.backend.symmetric = None  # type: ignore[assignment,method-assign]
        return exchange_case(world, experts=2 * world.size, streams=STREAMS, **options)

    assert weft.spmd(rank, ranks, backend="emulated", preempt=0.2) == [0] * ranks


@pytest.mark.parametrize("alignment", [16, 128])
def test_alignments(alignment: int) -> None:
    """The padding after an expert's rows is zero, over several blocks of columns."""
    assert wrong(2, alignment=alignment, hidden=72, tokens=(20, 3), calls=1, flight=1) == 0


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_two_under_way_on_two_streams(layout: str, seed: int) -> None:
    assert wrong(3, seed, 0.2, streams=STREAMS, experts=6, tokens=(9, 0, 12), ids_of=in_turn, layout=layout) == 0


@pytest.mark.parametrize("seed", some(range(4)))
def test_a_slot_on_changing_streams(seed: int) -> None:
    """Successive calls alternate between streams: calls that share a buffer are ordered, even on different streams."""
    assert wrong(2, seed, 0.2, calls=4, flight=1, streams=STREAMS, ids_of=in_turn) == 0


@pytest.mark.parametrize("max_m", [1, 4, 13])
def test_rows_without_room_are_dropped_and_counted(max_m: int) -> None:
    """The last rows of an expert are dropped. The result is the sum of a token's remaining rows, even if none
    remain."""
    assert wrong(2, layout="masked", max_m=max_m, tokens=(20, 13), ids_of=in_turn) == 0


def test_dropped_rows_of_a_full_buffer_add_nothing() -> None:
    assert wrong(2, layout="masked", max_m=13, tokens=(20, 13), ids_of=overfull, calls=3, flight=1) == 0


def test_a_repeated_expert_without_room_is_dropped() -> None:
    """The expert's tokens list it twice, so it receives twice as many rows as distinct ids could give. Routes without a
    row in the tables add nothing, although their tokens had other routes in the previous call, and both ranks are
    notified."""

    def rank(world: weft.World) -> None:
        x, weights, y, reported = draw(world.rank, 8, 32), torch.ones(8, 2), world.empty((8, 32), BF), Counter[int]()
        for ids in (torch.tensor([[0, 1]] * 8), torch.zeros(8, 2)):
            rows, handle = moe.dispatch(x, ids.int(), weights, experts=2, world=world, layout="masked")
            with overflows(world, reported):
                moe.combine(rows, handle, out=y)
        reported += noticed(world)
        assert torch.equal(y, 2 * x if world.rank == 0 else 0 * x) and reported == {0: 16}

    weft.spmd(rank, 2, backend="emulated")


def routed(world: weft.World, t: int = 6, h: int = 32, k: int = 2, experts: int = 4) -> tuple[torch.Tensor, ...]:
    ids = at_random(0, world.rank, t, Layer(t, experts, k, h, 8, BF), world.size).int()
    return tuple(
        a.to(world.device) for a in (draw(world.rank, t, h), ids, draw(9 + world.rank, t, k, dtype=torch.float32).abs())
    )


def test_the_bits_of_a_layer() -> None:
    """The layer's experts scale their rows by the same factors as the reference: their matrices are multiples of the
    identity, and for large x the GELU of x is x."""

    def rank(world: weft.World) -> None:
        x, ids, weights = routed(world)
        x = (x.abs() + 16).to(BF)
        scales = [2.0 ** (e % 5) for e in range(2 * world.rank, 2 * world.rank + 2)]
        w13, w2 = torch.eye(32, dtype=BF).repeat(2, 1, 1), torch.stack([torch.eye(32, dtype=BF) * s for s in scales])
        shared = draw(50 + world.rank, 6, 32)
        expected = moe.moe(x, ids, weights, w13, w2, shared=shared, activation="gelu", world=world)
        for layout in op.ROW_LAYOUTS:
            rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world, layout=layout)
            y, flat = torch.empty_like(rows).view(-1, 32), rows.view(-1, 32)
            for e, scale in enumerate(scales):
                lo, n = int(handle.offsets[e]), int(handle.counts[e])
                y[lo : lo + n] = flat[lo : lo + n] * scale
            assert torch.equal(moe.combine(y.view(rows.shape), handle, shared=shared), expected)

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("alignment", op.ALIGNMENTS)
def test_torchs_grouped_gemm_accepts_the_rows(alignment: int) -> None:
    def rank(world: weft.World) -> None:
        layer = Layer(6, 4, 2, 32, 24, BF, "gelu")
        model, (x, ids, weights) = Model(world, layer, False), routed(world)
        rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world, expert_alignment=alignment)
        assert all(int(lo) % alignment == 0 for lo in handle.offsets)
        ends = handle.offsets[1:]
        hidden = torch._grouped_mm(rows, model.local_weights.w13.transpose(1, 2), offs=ends)
        y = torch._grouped_mm(torch.nn.functional.gelu(hidden), model.local_weights.w2.transpose(1, 2), offs=ends)
        actual, expected = moe.combine(y, handle), model(x, ids, weights)
        assert ((actual - expected).norm() / expected.norm()) < 1.2e-2

    weft.spmd(rank, 2, backend="emulated")


def test_handles() -> None:
    """Two handles may be pending. Each handle is used once, in order, in the World that created it. The caller may
    choose the buffer."""

    def rank(world: weft.World) -> None:
        operands = routed(world)
        (a, handle_a), (b, handle_b) = (moe.dispatch(*operands, experts=4, world=world) for _ in range(2))
        assert (handle_a.buffer_index, handle_b.buffer_index) == (0, 1)
        with pytest.raises(weft.WeftError, match=r"buffers \[0, 1\] are in use; a handle has to be combined"):
            moe.dispatch(*operands, experts=4, world=world)
        with pytest.raises(weft.WeftError, match="buffer 1 is out of order: that of buffer 0 was dispatched before"):
            moe.combine(b, handle_b)
        one = moe.combine(a, handle_a).clone()
        with pytest.raises(weft.WeftError, match="buffer 0 was combined already"):
            moe.combine(a, handle_a)
        with pytest.raises(weft.WeftError, match="buffer 1 is in use"):
            moe.dispatch(*operands, experts=4, world=world, buffer_index=1)
        assert torch.equal(moe.combine(b, handle_b), one)
        a, handle_a = moe.dispatch(*operands, experts=4, world=world, buffer_index=1)
        assert handle_a.buffer_index == 1
        with pytest.raises(weft.WeftError, match=r"the handle is of World\(rank="):
            moe.combine(a, handle_a, world=weft.World(world.backend))
        with pytest.raises(TypeError, match="must be what weft.moe.dispatch returned, got int"):
            moe.combine(a, 3)  # type: ignore[arg-type]
        out = torch.empty(6, 32, dtype=BF)
        assert moe.combine(a, handle_a, out=out) is out and torch.equal(out, one)

    weft.spmd(rank, 2, backend="emulated")


def rank_calls(fn: Any, ranks: int = 2, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", **options)


def test_handles_outlive_a_mismatch_that_is_caught() -> None:
    """The buffer stays in use, and the caller can still combine with the handle."""

    def rank(world: weft.World) -> None:
        operands = routed(world)
        expected = moe.combine(*moe.dispatch(*operands, experts=4, world=world))
        rows, first_handle = moe.dispatch(*operands, experts=4, world=world)
        with pytest.raises(weft.Mismatch):
            weft.all_reduce(draw(0, 8 + 8 * world.rank, 64), world=world)
            world.synchronize()
        second_rows, second_handle = moe.dispatch(*operands, experts=4, world=world)
        assert (first_handle.buffer_index, second_handle.buffer_index) == (0, 1)
        assert torch.equal(moe.combine(rows, first_handle), expected) and torch.equal(
            moe.combine(second_rows, second_handle), expected
        )

    rank_calls(rank)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("layout", op.ROW_LAYOUTS)
def test_a_cancelled_or_dropped_handle_returns_its_slot(layout: str, seed: int) -> None:
    """Slots are returned in the order of the dispatches, and another dispatch's rows stay intact."""

    def rank(world: weft.World) -> None:
        operands = routed(world)

        def dispatch() -> tuple[torch.Tensor, moe.Handle]:
            return moe.dispatch(*operands, experts=4, world=world, layout=layout)

        expected = moe.combine(*dispatch())
        for _ in range(2):
            (_, first_handle), (rows, second_handle) = dispatch(), dispatch()
            with pytest.raises(weft.WeftError, match="out of order"):
                second_handle.cancel()
            first_handle.cancel()
            with pytest.raises(weft.WeftError, match="buffer 0 was combined already"):
                first_handle.cancel()
            assert torch.equal(moe.combine(rows, second_handle), expected)
        for _ in range(3):
            dispatch()
        (_, first_handle), (rows, second_handle) = dispatch(), dispatch()
        del first_handle
        assert torch.equal(moe.combine(rows, second_handle), expected)

    rank_calls(rank, seed=seed, preempt=0.2)


def test_a_gradient_of_the_experts_returns_its_slot() -> None:
    """The slot is returned even if one backward pass covers more calls than there are slots."""

    def rank(world: weft.World) -> None:
        x, ids, weights = routed(world)
        x, scale = x.requires_grad_(), torch.ones(32, dtype=BF, requires_grad=True)
        for alone, calls in ((True, 1), (True, 3), (True, 1), (False, 1)):
            y = torch.zeros((), dtype=BF)
            for _ in range(calls):
                rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world)
                y = y + moe.combine(torch.where((handle.sources >= 0)[:, None], rows, 0) * scale, handle) / calls
            if alone:
                (scale_grad,) = torch.autograd.grad(y.float().sum(), scale)
            else:
                y.float().sum().backward()
                assert torch.equal(scale.grad, scale_grad) and x.grad is not None and x.grad.any()
        assert not op.pending_dispatches(world)

    rank_calls(rank)


@pytest.mark.parametrize("name", ["ids", "weights"])
def test_routes_that_are_written_before_the_backward_pass(name: str) -> None:
    """Changed routes would send the gradient to different rows, so a change before or after combine raises an error.
    Without a gradient, routes may change."""

    def rank(world: weft.World) -> None:
        x, ids, weights = routed(world)
        written = dict(ids=ids, weights=weights)[name]
        x = x.requires_grad_()
        rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world)
        y = moe.combine(rows, handle)
        written.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.float().sum().backward()
        rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world)
        written.sub_(1)
        with pytest.raises(RuntimeError, match="ids or weights were written since"):
            moe.combine(rows, handle)
        with torch.no_grad():
            moe.combine(rows, handle)

    rank_calls(rank)


def test_errors_quote_the_arguments() -> None:
    def rank(world: weft.World) -> None:
        x, ids, weights = routed(world)

        def refused(error: type[Exception], match: str, **changes: Any) -> None:
            arguments = dict(x=x, ids=ids, weights=weights, experts=4) | changes
            with pytest.raises(error, match=match):
                moe.dispatch(**arguments, world=world)

        refused(TypeError, "moe.dispatch: ids .*int64.* must be torch.int32", ids=ids.long())
        refused(ValueError, r"ids .* must be \[T, k\]", ids=ids[:3])
        refused(ValueError, "5 experts over 2 ranks", experts=5)
        refused(ValueError, "layout 'padded' is one of", layout="padded")
        refused(ValueError, "expert_alignment 8 of", expert_alignment=8)
        refused(ValueError, "max_m 8 is a number of rows, of layout", max_m=8)
        refused(ValueError, "no multiple of 8", x=draw(1, 6, 36))
        refused(ValueError, "rows .* must name 2 ranks", rows=[6])
        refused(ValueError, "buffer_index 2 is not 0, 1 or None", buffer_index=2)
        refused(ValueError, "k 5 of ids", ids=torch.zeros(6, 5, dtype=torch.int32), weights=torch.zeros(6, 5))
        rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world)
        for error, match, y, options in (
            (ValueError, r"y .* must be \[", rows[1:], {}),
            (TypeError, "y .*float16.* must be torch.bfloat16", rows.half(), {}),
            (ValueError, r"shared .* must be \[6, 32\]", rows, dict(shared=x[1:])),
            (ValueError, "out= has no gradient", rows.clone().requires_grad_(), dict(out=torch.empty_like(x))),
        ):
            with pytest.raises(error, match=match):
                moe.combine(y, handle, **options)
        moe.combine(rows, handle)

    weft.spmd(rank, 2, backend="emulated")


def test_ranks_that_disagree() -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(weft.Mismatch, match="expert_alignment="):
            moe.dispatch(*routed(world), experts=4, world=world, expert_alignment=(1, 16)[world.rank])

    weft.spmd(rank, 2, backend="emulated")


def test_a_drop_is_raised_once_at_the_next_synchronize() -> None:
    def rank(world: weft.World) -> None:
        x, _, weights = routed(world)
        ids = torch.tensor([[0, -1]] * 6, dtype=torch.int32)
        rows, handle = moe.dispatch(x, ids, weights, experts=4, world=world, layout="masked", max_m=5)
        assert rows.shape == (2, 5, 32) and handle.counts.tolist() == ([5, 0] if world.rank == 0 else [0, 0])
        if world.rank == 0:
            with pytest.raises(weft.Overflow, match="7 rows more"):
                world.synchronize()
        world.synchronize()
        kept = moe.combine(rows, handle)
        if world.rank == 1:
            with pytest.raises(weft.Overflow, match="rank 0's experts received 6 rows of this rank's tokens more"):
                world.synchronize()
        assert ((kept != 0).any(1).tolist()) == ([True] * 5 + [False] if world.rank == 0 else [False] * 6)
        assert not noticed(world)

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("plan", ["dispatched", "sequential"])
def test_a_backward_pass_counts_no_drop_again(plan: str) -> None:
    """The backward pass places rows as its forward pass did. The forward pass has counted the dropped rows on both
    ranks."""

    def rank(world: weft.World) -> None:
        x, _, weights = routed(world)
        x.requires_grad_(), weights.requires_grad_()
        ids = torch.tensor([[0, -1]] * 6, dtype=torch.int32)
        options: dict[str, Any] = dict(experts=4, world=world, layout="masked", max_m=5, plan=plan)
        rows, handle = moe.dispatch(x, ids, weights, **options)
        reported = noticed(world)
        y = moe.combine(rows * 2, handle)
        assert reported + noticed(world) == ({0: 7} if world.rank == 0 else {0: 6})
        y.float().sum().backward()
        assert x.grad is not None and noticed(world) == {}

    weft.spmd(rank, 2, backend="emulated")


# -- in a graph of torch.compile ---------------------------------------------------------------------------------------


ALL = ("x", "weights", "w1", "w2")


@pytest.mark.parametrize(
    ("ranks", "wants", "options"),
    [
        (1, ALL, dict()), (2, ALL, dict()), (2, ("w1", "w2"), dict()), (2, ("x",), dict(expert_alignment=16)),
        (2, ALL, dict(plan="sequential")),
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_graph_holds_both(ranks: int, wants: tuple[str, ...], options: dict[str, Any]) -> None:
    """The forward and backward passes form one graph without a break and give the bits of eager calls, overlapping or
    not; no buffer stays in use."""

    def rank(world: weft.World) -> None:
        routes, local = routed(world), 4 // world.size
        w1, w2 = draw(3 + world.rank, local, 32, 16), draw(5 + world.rank, local, 16, 32)
        expected = trained(world, one_by_one, routes, w1, w2, wants, **options)
        assert all(t.norm() > 0 for t in expected[2:])
        for way in (two_under_way, torch.compile(two_under_way, backend="aot_eager", fullgraph=True)):
            actual = trained(world, way, routes, w1, w2, wants, **options)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), way
        assert not op.pending_dispatches(world)

    torch._dynamo.reset()
    weft.spmd(rank, ranks, backend="emulated")


def checkpointed(world: weft.World, routes: Routes, w1: torch.Tensor, w2: torch.Tensor) -> Any:
    def step(x: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Any:
        return two_under_way(world, (x, routes[1], weights), w1, w2)

    return torch.utils.checkpoint.checkpoint(step, routes[0], routes[2], w1, w2, use_reentrant=False)


def offloaded(world: weft.World, routes: Routes, w1: torch.Tensor, w2: torch.Tensor) -> Any:
    """Make the backward pass receive copies of the saved tensors."""
    with torch.autograd.graph.save_on_cpu():
        return two_under_way(world, routes, w1, w2)


def halves_compiled(dispatch_compiled: bool, combine_compiled: bool) -> Callable[..., Any]:
    """Call dispatch and combine, each in a separate graph or outside any graph. combine receives the handle that
    dispatch returns."""

    def graph(fn: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
        return torch.compile(fn, backend="aot_eager", fullgraph=True) if compiled else fn

    def step(world: weft.World, routes: Routes, w1: torch.Tensor, w2: torch.Tensor) -> Any:
        sends = graph(lambda *operands: moe.dispatch(*operands, experts=4, world=world), dispatch_compiled)
        sums = graph(lambda y, handle: moe.combine(y, handle, shared=routes[0]), combine_compiled)
        results, counts = [], torch.zeros(w1.shape[0], dtype=torch.int32)
        for microbatch in microbatches(world, routes, w1):
            rows, handle = sends(*microbatch)
            counts = counts + handle.counts
            results.append(sums(by_grouped_gemm(rows, handle, w1, w2), handle))
        return results[0] + 2 * results[1], counts

    return step


WAYS = dict(
    checkpointed=checkpointed,
    offloaded=offloaded,
    dispatch_compiled=halves_compiled(True, False),
    combine_compiled=halves_compiled(False, True),
)


@pytest.mark.parametrize("way", WAYS)
def test_saved_tensors_may_be_recomputed_or_moved(way: str) -> None:
    def rank(world: weft.World) -> None:
        routes, w1, w2 = routed(world), draw(3 + world.rank, 2, 32, 16), draw(5 + world.rank, 2, 16, 32)
        expected = trained(world, one_by_one, routes, w1, w2)
        assert all(torch.equal(a, b) for a, b in zip(trained(world, WAYS[way], routes, w1, w2), expected, strict=True))
        assert not op.pending_dispatches(world)

    torch._dynamo.reset()
    weft.spmd(rank, 2, backend="emulated")


# -- compiled ----------------------------------------------------------------------------------------------------------


def launching(ranks: int, h: int, experts: int, k: int, layout: str) -> Callable[[weft.World], None]:
    def main(world: weft.World) -> None:
        t = 300 + world.rank
        x, ids, weights = torch.zeros(t, h, dtype=BF), torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        rows = tuple(300 + r for r in range(ranks))
        options = (rows, experts, layout, 1, 16 if layout == "masked" else None, 0)
        y, handle = launch_dispatch(world, op.DispatchOperands(x, ids, weights), options)
        launch_combine(world, y, handle, None, x)

    return main


WAITING = {
    "place_rows": "tl.load(inbox", "combine_rows": "tl.load(routed.y +", "sum_ranks": "tl.load(outbox", "count_routes": "tl.load(ids",
}  # fmt: skip


@pytest.mark.gate
@pytest.mark.parametrize("layout", op.ROW_LAYOUTS)
@pytest.mark.parametrize(("ranks", "h", "experts", "k"), [(8, 2048, 128, 8), (2, 2880, 128, 4), (4, 7168, 256, 8)])
def test_kernels_compile_and_keep_the_rules(ranks: int, h: int, experts: int, k: int, layout: str) -> None:
    by_rank = offline.launches(launching(ranks, h, experts, k, layout), ranks)
    kernels = {}
    for launch in by_rank[0]:
        compiled = compile_kernel(launch.kernel, launch.args, launch.options)
        name = launch.kernel.__name__
        kernels[name] = launch, compiled
        offline.fits(launch, compiled)
        assert (name in WAITING or name == "share") == ("ld.acquire" in compiled.ptx), (
            "the kernel share compares calls and reads no rows"
        )
        text = WAITING.get(name)
        waits = lambda step: text is not None and text in step.source  # noqa: B023, E731
        assert any(waits(step) for step in ptx.steps_of(compiled.ptx)) == (text is not None)
        assert ptx.broken_rules(compiled.ptx, waits) == [] and ptx.signals_not_by_thread_zero(compiled.ptx) == []
    assert len(kernels) == 7 + (layout == "masked")
    an_sm = {name: -(-a.grid // offline.SMS) for name, (a, _) in kernels.items()}
    held = {n: an_sm[n] * -(-c.registers // 8) * 8 * 32 * a.options["num_warps"] for n, (a, c) in kernels.items()}
    waiting = max(held[name] for name in WAITING if name != "combine_rows")
    assert 2 * waiting + held["dispatch_rows"] <= 65536, f"both buffers wait, so none can send: {held}"
    rows = [
        s
        for s in ptx.steps_of(kernels["place_rows"][1].ptx)
        if "st.global" in s.text and "tl.store(rows + offsets, part" in s.source
    ]
    assert rows and all("v4.b32" in s.text or "v2.b64" in s.text for s in rows), [str(s) for s in rows][:2]
    for others in by_rank[1:]:
        for a, b in zip(by_rank[0], others, strict=True):
            assert a.kernel is not place_rows or offline.specialised(a) == offline.specialised(b)
