"""Attention over gathered keys and values on emulated ranks, compared with float64 attention of the whole sequence; and
its compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_attention import Inputs, Shape, attention_case, gradients_case
from tests.gates import some
from tests.offline import test_offline as offline
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.op import REGISTRY
from weft.ops.attention import backward, libraries, segmented
from weft.ops.attention.key_ranges import causal_key_ranges, packed_key_ranges, split_groups, zigzag_rows
from weft.ops.attention.libraries import BackwardOperands
from weft.plans import HeadParallel, Plan, Segmented, Sequential
from weft.transport import sm_push_kernels

BF, HALF = torch.bfloat16, torch.float16
IN_THREE = Segmented(calls=3)
ONCE = Segmented(calls=1)
PLANS = [Sequential(), Segmented(), ONCE, IN_THREE]
RIGHT = 5e-3


def errors(
    shape: Shape, plan: str | Plan = "segmented", seed: int = 0, preempt: float = 0.05, **options: Any
) -> list[float]:
    return weft.spmd(
        lambda world: attention_case(world, shape, plan, **options), len(shape.rows), backend="emulated", seed=seed, preempt=preempt
    )  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
def test_any_world_against_torch(causal: bool, layout: str, plan: Plan) -> None:
    for ranks in (1, 2, 3, 4):
        shape = Shape((10,) * ranks, causal=causal, layout=layout)
        assert max(errors(shape, plan)) < RIGHT


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
def test_by_heads(causal: bool, layout: str) -> None:
    """The ranks divide the heads among themselves; if the number of heads is not divisible, each rank computes all
    heads."""
    for ranks, rows in ((1, (5,)), (2, (9, 6)), (3, (6, 0, 7)), (4, (5,) * 4)):
        rows = zigzag_rows(sum(rows), ranks) if layout == "zigzag" else rows
        shape = Shape(rows, 2 * ranks, ranks, causal=causal, layout=layout, sinks=ranks == 2)
        assert max(errors(shape, HeadParallel(programs=2), ranks, 0.2, calls=3, into=True)) < RIGHT
    assert max(errors(Shape((5,) * 3, 4, 2, causal=causal, layout=layout), HeadParallel())) < RIGHT


@pytest.mark.parametrize("seed", some(range(6)))
def test_sizes_in_turn_by_heads(seed: int) -> None:
    """One size's results are stored in memory where another size's queries arrive."""

    def main(world: weft.World) -> float:
        kept = []
        for call, rows in enumerate((12, 3, 9, 2, 12)):
            inputs = Inputs(world, Shape((rows,) * 3, 6, 3, causal=True), 100 * call)
            kept.append(
                (weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan="head_parallel"), inputs)
            )
        world.synchronize()
        return max(distance(actual, inputs.expected()[0]) for actual, inputs in kept)

    assert max(weft.spmd(main, 3, backend="emulated", seed=seed, preempt=0.2)) < RIGHT


@pytest.mark.parametrize(
    "name",
    ["packed", "packed, window", "window, fewer queries", "fewer queries", "half", "packed, sinks, fewer queries"],
)
def test_shapes_by_heads(name: str) -> None:
    shape = SHAPES[name]
    ranks = len(shape.rows)
    assert max(errors(replace(shape, heads=2 * ranks, kv_heads=ranks), HeadParallel())) < RIGHT


SHAPES = {
    "uneven": Shape((7, 1, 12)),
    "uneven, causal": Shape((7, 1, 12), causal=True),
    "uneven, zigzag": Shape((7, 7, 6), causal=True, layout="zigzag"),
    "a rank without rows": Shape((0, 9, 5)),
    "a rank without rows, causal": Shape((9, 0, 5), causal=True),
    "a rank without rows, zigzag": Shape((1, 1, 0), causal=True, layout="zigzag"),
    "fewer queries": Shape((8, 8), queries=(3, 0)),
    "more queries than keys": Shape((8, 1), queries=(3, 20)),
    "queries behind a prefix": Shape((8, 8, 8), queries=(0, 3, 8), causal=True),
    "keys of others alone": Shape((0, 8), queries=(5, 2)),
    "zigzag without a mask": Shape((6, 6)),
    "half": Shape((6, 6), dtype=HALF, heads=6, kv_heads=1, dim=24),
    "every head its own": Shape((6, 6), heads=3, kv_heads=3, dim=40, causal=True, scale=0.3),
    "sinks": Shape((6, 5), sinks=True),
    "sinks, zigzag": Shape((6, 6), sinks=True, causal=True, layout="zigzag"),
    "window": Shape((6, 6, 6), causal=True, window=4),
    "long window, sinks": Shape((6, 3, 6), causal=True, window=11, sinks=True),
    "window of one": Shape((6, 6), causal=True, window=1),
    "window, fewer queries": Shape((6, 6), causal=True, window=9, queries=(2, 3)),
    "64 heads, 8 of keys": Shape((3, 2), 64, 8, 8, causal=True, layout="zigzag"),
    "packed": Shape((6, 6, 6), bounds=(0, 4, 9, 9, 18)),
    "packed, causal": Shape((6, 4, 6), causal=True, bounds=(0, 4, 5, 13, 16)),
    "packed, window": Shape((6, 6, 6), causal=True, bounds=(0, 5, 17, 18), window=7),
    "packed, sinks, fewer queries": Shape((6, 6), causal=True, bounds=(0, 5, 12), queries=(2, 3), sinks=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    for plan in (Sequential(), Segmented(), IN_THREE):
        assert max(errors(SHAPES[name], plan)) < RIGHT


@pytest.mark.parametrize("seed", some(range(6)))
def test_schedules(seed: int) -> None:
    for plan in (Segmented(), IN_THREE, ONCE):
        layout, rows = (("contiguous", (7, 4, 5)), ("zigzag", (5, 5, 6)))[seed % 2]
        shape = Shape(rows, causal=True, layout=layout)
        assert max(errors(shape, plan, seed, 0.2, calls=4, into=True)) < RIGHT


@pytest.mark.parametrize("seed", some(range(6)))
def test_calls_on_two_streams(seed: int) -> None:
    assert max(errors(Shape((6, 6)), "segmented", seed, 0.2, calls=4, streams=("first", "second"))) < RIGHT


def test_the_result_does_not_depend_on_the_schedule() -> None:
    def main(world: weft.World) -> torch.Tensor:
        inputs = Inputs(world, Shape((9, 8, 8), causal=True, layout="zigzag"), 3)
        return weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan="segmented").clone()

    first_run, *others = (weft.spmd(main, 3, backend="emulated", seed=seed, preempt=0.2) for seed in range(4))
    assert all(torch.equal(a, b) for run in others for a, b in zip(first_run, run, strict=True))


def test_merging_is_exact_to_its_rounding() -> None:
    """Only the rounding of partial results to 16 bits loses accuracy in the merge: the error is below 1.5 times the
    error of a single pass."""

    def main(world: weft.World) -> tuple[float, float]:
        inputs = Inputs(world, Shape((64,) * 4, dim=64), 5)
        expected, out = inputs.expected()[0], []
        for plan in ("sequential", Segmented(calls=3)):
            out.append(distance(weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan=plan), expected))
        return out[0], out[1]

    for once, merge_partials in weft.spmd(main, 4, backend="emulated"):
        assert merge_partials < 1.8 * once < RIGHT


def test_out_may_hold_q() -> None:
    def main(world: weft.World) -> float:
        inputs, worst = Inputs(world, Shape((6, 6), causal=True), 7), 0.0
        for plan in PLANS:
            q, k, v = inputs.local_qkv()
            actual = weft.gathered_attention(q, k, v, **inputs.options(), plan=plan, out=q)
            assert actual is q
            worst = max(worst, distance(actual, inputs.expected()[0]))
        return worst

    assert max(weft.spmd(main, 2, backend="emulated")) < RIGHT


@pytest.mark.parametrize("batch", [1, 3])
def test_batches(batch: int) -> None:
    """A batch gives the same results and gradients as its entries computed one after another."""

    def main(world: weft.World) -> None:
        entries = [Inputs(world, Shape((5, 6), causal=True, layout="zigzag", sinks=True), i) for i in range(batch)]
        options = entries[0].options() | dict(plan="segmented")
        leaves = [torch.stack(ts).requires_grad_() for ts in zip(*(g.local_qkv() for g in entries), strict=True)]
        out, lse = weft.gathered_attention(*leaves, **options, return_lse=True)
        by_entry = [weft.gathered_attention(*ts, **options, return_lse=True) for ts in zip(*leaves, strict=True)]
        assert torch.equal(out, torch.stack([a for a, _ in by_entry])) and torch.equal(
            lse, torch.stack([b for _, b in by_entry])
        )
        grads, expected = (
            torch.autograd.grad(t.float().square().sum(), leaves) for t in (out, torch.stack([a for a, _ in by_entry]))
        )
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        q, k, v = (t.detach() for t in leaves)
        if batch == 1:
            assert weft.gathered_attention(q, k, v, **options, out=q) is q and torch.equal(q, out)
        else:
            with pytest.raises(weft.Unsupported, match="batch of 1"):
                weft.gathered_attention(q, k, v, **options, out=q)
        with pytest.raises(ValueError, match="same batch"):
            weft.gathered_attention(q, k.repeat(2, 1, 1, 1), v, **options)

    weft.spmd(main, 2, backend="emulated")


def test_operands_that_are_not_contiguous() -> None:
    def main(world: weft.World) -> float:
        inputs = Inputs(world, Shape((6, 6), kv_heads=4), 7)
        stacked = torch.stack(inputs.local_qkv(), 1)
        actual = weft.gathered_attention(*stacked.unbind(1), **inputs.options(), plan="segmented")
        return distance(actual, inputs.expected()[0])

    assert max(weft.spmd(main, 2, backend="emulated")) < RIGHT


def test_unseen_keys_are_not_sent() -> None:
    """A rank pushes only the key rows to which some query of the receiver attends."""

    def main(world: weft.World, shape: Shape) -> int:
        copied, copy = [], world.backend.copy
        inputs = Inputs(world, shape, 0)

        def counted(dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
            copied.append((dst.data_ptr(), len(src)))
            copy(dst, src, stream)

        world.backend.copy = counted  # type: ignore[method-assign]
        weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan="segmented")
        own_keys = world.buffer(segmented.KEYS, 0).local
        inside = range(own_keys.data_ptr(), own_keys.data_ptr() + own_keys.numel())
        return sum(rows for address, rows in copied if address not in inside) // 2

    def rows(shape: Shape) -> list[int]:
        return weft.spmd(lambda world: main(world, shape), len(shape.rows), backend="emulated")

    assert rows(Shape((8,) * 4)) == [24] * 4
    assert rows(Shape((8,) * 4, causal=True)) == [24, 16, 8, 0]
    assert rows(Shape((8,) * 4, causal=True, layout="zigzag")) == [12, 16, 20, 24]
    assert rows(Shape((1, 1, 0), causal=True, layout="zigzag")) == [1, 0, 0]  # a chunk without queries needs no keys
    assert rows(Shape((8,) * 3, bounds=(0, 8, 18, 24))) == [0, 8, 2]
    assert rows(Shape((8,) * 3, causal=True, window=3)) == [2, 2, 0]


# -- which queries attend to which keys --------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [(6,), (5, 8), (4, 0, 7), (3, 3, 3, 3), (9, 1, 2, 5)], ids=str)
def test_blocks_are_the_mask(rows: tuple[int, ...]) -> None:
    """Each pair of a query and a key to which it attends is in exactly one block, and no block contains any other
    pair."""
    for causal, layout in ((False, "contiguous"), (True, "contiguous"), (True, "zigzag")):
        shape = Shape(rows, causal=causal, layout=layout)
        for rank in range(len(rows)):
            seen = causal_key_ranges(rank, rows, rows[rank], causal, layout == "zigzag")
            for calls in (1, 2, 9):
                coverage = torch.zeros(rows[rank], sum(rows), dtype=torch.int)
                key_positions = shape.positions(rank)
                for block in seen.local:
                    whole = torch.ones(rows[rank], block.hi - block.lo, dtype=torch.int)
                    coverage[:, key_positions[block.lo : block.hi]] += whole.tril() if block.causal else whole
                for first_query, key_ranges in split_groups(seen.remote, calls):
                    for key_range in key_ranges:
                        assert key_range.source != rank
                        coverage[first_query:, shape.positions(key_range.source)[key_range.lo : key_range.hi]] += 1
                assert torch.equal(coverage, shape.sees(rank).int())


def test_at_every_step_each_rank_reads_another_ranks_push() -> None:
    for size in (2, 3, 4, 8):
        seen = [causal_key_ranges(rank, (4,) * size, 4, False, False).remote[0].ranges for rank in range(size)]
        for step in range(size - 1):
            assert len({key_ranges[step].source for key_ranges in seen}) == size


def test_zigzag_shares_the_work() -> None:
    for size in (2, 4):
        work = []
        for rank in range(size):
            seen = causal_key_ranges(rank, (8,) * size, 8, True, True)
            work.append(
                sum((8 - first_query) * sum(p.hi - p.lo for p in key_ranges) for first_query, key_ranges in seen.remote)
            )
            assert len(seen.remote) <= 2
        assert len(set(work)) == 1


def test_packed_sequences_by_hand() -> None:
    """Two ranks of 6 rows hold sequences of 4, 5 and 3 rows: rank 1's queries are 3 rows of the second sequence and all
    of the third."""
    seen = packed_key_ranges(1, (6, 6), 6, (0, 4, 9, 12), True, 0)
    assert seen.remote == ((0, ((0, 4, 6), (1, 0, 6))),)
    assert seen.packed == ((0, 3, 6), (0, 5, 8), True, 0)


def test_zigzag_split_and_restore() -> None:
    def main(world: weft.World, length: int) -> None:
        x = draw(1, length, 3, 2)
        shard = weft.zigzag_split(x, world)
        assert len(shard) == zigzag_rows(length, world.size)[world.rank]
        assert torch.equal(shard, x[weft.zigzag_positions(length, world)])
        assert torch.equal(weft.zigzag_restore(shard, world, length), x)
        flat = x[:, 0, 0]
        assert torch.equal(weft.zigzag_restore(weft.zigzag_split(flat, world), world, length), flat)
        if length % world.size == 0 and len(set(zigzag_rows(length, world.size))) == 1:
            assert torch.equal(weft.zigzag_restore(shard, world), x)
        with pytest.raises(ValueError, match="must have"):
            weft.zigzag_restore(x[:0].new_zeros(length + 1, 3, 2), world, length)

    for ranks, length in ((1, 5), (2, 12), (3, 17), (4, 3)):
        weft.spmd(lambda world, length=length: main(world, length), ranks, backend="emulated")


# -- unsupported calls -------------------------------------------------------------------------------------------------
def refused(
    world: weft.World, match: str, error: type = ValueError, q: Any = (4, 4, 16), k: Any = (4, 2, 16), **options: Any
) -> None:
    q, k = (torch.zeros(t, dtype=BF) if isinstance(t, tuple) else t for t in (q, k))
    with pytest.raises(error, match=match):
        weft.gathered_attention(q, k, options.pop("v", k), **options, world=world)


def test_unsupported_calls_are_refused() -> None:
    def main(world: weft.World) -> None:
        refused(world, r"q must be \[m, heads, D\]", q=(4, 16))
        refused(world, r"q must be \[m, heads, D\]", v=torch.zeros(3, 2, 16, dtype=BF))
        refused(world, "must be a multiple of those", q=(4, 3, 16))
        refused(world, "must be a multiple of 8", q=(4, 4, 12), k=(4, 2, 12))
        refused(world, "at most 256", q=(4, 4, 264), k=(4, 2, 264))
        refused(world, "bfloat16 and float16", TypeError, q=torch.zeros(4, 4, 16))
        refused(world, "one dtype", TypeError, q=torch.zeros(4, 4, 16, dtype=HALF))
        refused(world, "must be a tensor", TypeError, q=[1])
        refused(world, "at most as many queries as keys", q=(5, 4, 16), causal=True)
        refused(world, "need as many queries as keys", q=(3, 4, 16), causal=True, layout="zigzag")
        local_rows = 4 + world.rank
        refused(
            world, r"rows \[4, 5\] are no zigzag split of 9, which leaves the ranks \[5, 4\]",
            q=(local_rows, 4, 16), k=(local_rows, 2, 16), causal=True, layout="zigzag", rows=[4, 5],
        )  # fmt: skip
        refused(world, "'ring' is not one of", layout="ring")
        refused(world, "window 0 must be at least 1", causal=True, window=0)
        refused(world, "a window counts", window=3)
        refused(world, "contiguous layout", weft.Unsupported, causal=True, layout="zigzag", window=3)
        refused(world, "must go from 0 up to 8", cu_seqlens=[0, 4])
        refused(world, "must go from 0 up to 8", cu_seqlens=[0, 5, 4, 8])
        refused(world, "at most as many queries as keys", q=(5, 4, 16), cu_seqlens=[0, 8])
        refused(world, r"rows \[4\] must name 2 ranks", rows=[4])
        refused(world, r"sinks .* must be \[4\]", sinks=torch.zeros(3))
        refused(world, "no rank has keys", k=(0, 2, 16))
        refused(world, "plan 'fused' is not", plan="fused")

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize(
    ("pattern", "shapes", "options"),
    [
        ("heads=", ((4, 4, 16), (4, 2, 16)), [{}, {}]),
        ("D=", ((4, 2, 16), (4, 2, 24)), [{}, {}]),
        ("rows=", ((4, 2, 16), (5, 2, 16)), [{}, {}]),
        ("causal=", ((4, 2, 16),) * 2, [{}, {"causal": True}]),
        ("scale=", ((4, 2, 16),) * 2, [{}, {"scale": 0.5}]),
        ("layout=", ((4, 2, 16),) * 2, [{"causal": True}, {"causal": True, "layout": "zigzag"}]),
        ("window=", ((4, 2, 16),) * 2, [{"causal": True}, {"causal": True, "window": 2}]),
        ("packed=", ((4, 2, 16),) * 2, [{}, {"cu_seqlens": (0, 8)}]),
        ("plan=", ((4, 2, 16),) * 2, [{"plan": "sequential"}, {"plan": "segmented"}]),
    ],
)  # fmt: skip
def test_ranks_that_disagree(pattern: str, shapes: Any, options: Any) -> None:
    def main(world: weft.World) -> None:
        t = torch.zeros(shapes[world.rank], dtype=BF)
        with pytest.raises(weft.Mismatch, match=pattern):
            weft.gathered_attention(t, t, t, **options[world.rank], world=world)

    weft.spmd(main, 2, backend="emulated")


def test_ranks_that_disagree_on_heads_of_keys_or_the_dtype() -> None:
    def main(world: weft.World) -> None:
        q, k = torch.zeros(4, 4, 16, dtype=BF), torch.zeros(4, (2, 4)[world.rank], 16, dtype=BF)
        with pytest.raises(weft.Mismatch, match="kv_heads="):
            weft.gathered_attention(q, k, k, world=world)
        t = torch.zeros(4, 4, 16, dtype=(BF, HALF)[world.rank])
        with pytest.raises(weft.Mismatch, match="dtype="):
            weft.gathered_attention(t, t, t, world=world)

    weft.spmd(main, 2, backend="emulated")


def test_candidates_of_auto() -> None:
    """No two of the plans that "auto" times are equivalent: with two ranks there is only one remote piece."""

    def main(world: weft.World, shape: Shape) -> list[str]:
        op = REGISTRY["gathered_attention"]
        options = shape.causal, None, shape.window or 0, shape.bounds, None, shape.layout
        q, kv = (
            torch.empty(shape.rows[world.rank], heads, shape.dim, dtype=shape.dtype)
            for heads in (shape.heads, shape.kv_heads)
        )
        call = op.check(world, op.typed((q, kv, kv, None)), options)
        return [str(plan) for plan in op.candidates(world, call)]

    def tries(shape: Shape) -> list[str]:
        plans, *others = weft.spmd(lambda world: main(world, shape), len(shape.rows), backend="emulated")
        assert all(rank_plans == plans for rank_plans in others)
        return plans

    assert tries(Shape((8, 8))) == ["Segmented()"]
    assert tries(Shape((8,) * 3)) == ["Segmented()", "Segmented(calls=1)"]
    assert tries(Shape((8, 8), causal=True, layout="zigzag")) == ["Segmented()"]
    for options in (dict(), dict(window=3), dict(bounds=(0, 3, 16))):
        assert tries(Shape((8, 8), causal=True, **options)) == ["Segmented()", "HeadParallel()"]
    assert tries(Shape((8, 8), bounds=(0, 3, 16))) == ["Segmented()"]
    assert tries(Shape((8200,) * 2, 8, 8, 128)) == ["Segmented()"]


def test_no_rows_at_all() -> None:
    def main(world: weft.World) -> None:
        t = torch.zeros(0, 2, 16, dtype=BF)
        out, lse = weft.gathered_attention(t, t, t, return_lse=True, world=world)
        assert out.shape == (0, 2, 16) and lse.shape == (2, 0)

    weft.spmd(main, 2, backend="emulated")


# -- attention libraries -----------------------------------------------------------------------------------------------
def test_a_library_that_is_wrong_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first library with correct results is chosen. If no library is correct, the error quotes each library's
    failure."""
    call_shape = torch.device("cpu"), BF, 4, 2, 16

    def library(name: str, forward: Any) -> libraries.AttentionLibrary:
        return libraries.AttentionLibrary(name, forward, libraries.REFERENCE.backward)

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    def in_base_2(*operands: Any) -> Any:
        out, lse = libraries.REFERENCE.forward(*operands)
        return out, lse * 1.4427

    monkeypatch.setattr(libraries, "CUDNN", library("first", refuses))
    monkeypatch.setattr(libraries, "FLASH", library("second", in_base_2))
    reasons = {candidate.name: reason for candidate, reason in libraries.library_errors("forward", *call_shape).items()}
    assert reasons["first"] == "no kernel" and reasons["second"].startswith("results are off by")
    assert set(libraries.library_errors("backward", *call_shape).values()) == {""}
    for use in ("packed", "packed_backward"):
        assert set(libraries.library_errors(use, *call_shape).values()) == {"the library has no such call"}
    wrong = replace(
        library("second", refuses),
        packed_backward=lambda operands, *packed: libraries.REFERENCE.packed(*operands[:3], *packed) * 2,
    )
    monkeypatch.setattr(libraries, "FLASH", wrong)
    assert (
        "off by"
        in {
            candidate.name: reason
            for candidate, reason in libraries.library_errors("packed_backward", *call_shape).items()
        }["second"]
    )
    monkeypatch.setattr(libraries, "FLASH", library("second", libraries.REFERENCE.forward))
    assert [reason for reason in libraries.library_errors("forward", *call_shape).values()] == ["no kernel", ""]


# -- compiled kernels --------------------------------------------------------------------------------------------------
LAUNCHES = {
    "even": (Shape((64,) * 4, 32, 8, 128), Segmented()),
    "zigzag": (Shape((55, 55, 55, 54), 32, 8, 128, True, "zigzag"), Segmented()),
    "sinks": (Shape((64,) * 2, 64, 8, 64, sinks=True), Segmented(calls=1)),
    "odd": (Shape((60, 30), 24, 24, 96, dtype=HALF), Segmented(calls=3)),
    "heads": (Shape((64, 30), 24, 8, 96, causal=True), HeadParallel()),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", LAUNCHES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    shape, plan = LAUNCHES[name]

    def main(world: weft.World) -> None:
        inputs = Inputs(world, shape, 0)
        weft.gathered_attention(*inputs.local_qkv(), **inputs.options(), plan=plan)

    by_rank = offline.launches(main, len(shape.rows))
    modules = segmented.merge.__module__, sm_push_kernels.__name__
    launches_by_rank = [[a for a in launches if a.kernel.__module__ in modules] for launches in by_rank]
    by_heads = isinstance(plan, HeadParallel)
    assert {a.kernel.__name__ for a in launches_by_rank[0]} == ({"push_blocks"} if by_heads else {"merge"})
    for launch in launches_by_rank[0]:
        compiled = compile_kernel(launch.kernel, launch.args, launch.options)
        record_property("kernel", (f"attention {name}: {launch.kernel.__name__}", compiled.registers, compiled.shared))
        offline.fits(launch, compiled)
        assert (
            ptx.broken_rules(compiled.ptx, lambda step: False) == []
            and ptx.signals_not_by_thread_zero(compiled.ptx) == []
        )
        steps = ptx.steps_of(compiled.ptx)
        moved = "outs[n]", "x + src_start", "dst + row"
        rows = [
            s for s in steps if ("ld.global" in s.text or "st.global" in s.text) and any(m in s.source for m in moved)
        ]
        if by_heads and launch.args["x"].dtype == torch.float32:
            continue  # this tensor has one number per query and head
        assert rows and all("v4.b32" in s.text or "v2.b64" in s.text for s in rows), [str(s) for s in rows][:2]


# -- gradients ---------------------------------------------------------------------------------------------------------
GRADIENTS = {
    "no mask": Shape((6, 6, 6)),
    "causal": Shape((6, 6, 6), causal=True),
    "zigzag": Shape((6, 6, 6), causal=True, layout="zigzag"),
    "one rank": Shape((9,), causal=True),
    "uneven": Shape((5, 6, 6), causal=True, layout="zigzag", heads=3, kv_heads=3),
    "uneven, a rank without rows": Shape((7, 0, 9), dtype=HALF, scale=0.2),
    "fewer queries": Shape((5, 5), causal=True, queries=(2, 0)),
    "sinks": Shape((6, 6), causal=True, layout="zigzag", sinks=True),
    "window": Shape((6, 3, 6), causal=True, window=7, sinks=True),
    "packed": Shape((6, 6, 6), bounds=(0, 6, 9, 18)),
    "packed, causal": Shape((6, 0, 7), causal=True, bounds=(0, 4, 5, 13)),
    "packed, one rank": Shape((9,), causal=True, bounds=(0, 4, 9), window=3),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    shape = GRADIENTS[name]
    for seed in range(2):
        grad_errors = weft.spmd(
            lambda world, seed=seed: gradients_case(world, shape, seed=seed),
            len(shape.rows),
            backend="emulated",
            seed=seed,
        )
        assert max(grad_errors) < 8e-3, grad_errors


def test_gradients_do_not_depend_on_the_schedule() -> None:
    def main(world: weft.World) -> list[torch.Tensor]:
        inputs = Inputs(world, Shape((6, 6, 6), causal=True, layout="zigzag"), 3)
        leaves = [t.requires_grad_() for t in inputs.local_qkv()]
        weft.gathered_attention(*leaves, **inputs.options()).float().square().sum().backward()
        return [t.grad.clone() for t in leaves if t.grad is not None]

    first_run, *others = (weft.spmd(main, 3, backend="emulated", seed=seed, preempt=0.2) for seed in range(3))
    assert all(
        torch.equal(x, y)
        for run in others
        for a, b in zip(first_run, run, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def test_libraries_are_given_gradients_and_operands_at_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN reads 16 bytes at once, even if the caller's tensor or the gradient begins at an unaligned address."""
    seen: list[bool] = []
    unwatched = backward.gradients

    def gradients(world: weft.World, config: Any, operands: BackwardOperands, mask: Any) -> Any:
        # The attention library allocates the lse itself.
        seen.extend(t.data_ptr() % 16 == 0 for t in operands[:4] + operands[5:])
        return unwatched(world, config, operands, mask)

    def off(t: torch.Tensor) -> torch.Tensor:
        moved = t.new_empty(t.numel() + 3)[3:].view(t.shape)
        return moved.copy_(t)

    def main(world: weft.World) -> None:
        inputs = Inputs(world, Shape((6, 6), causal=True, layout="zigzag"), 3)
        grads = []
        for place in (torch.clone, off):
            leaves = [place(t).requires_grad_() for t in inputs.local_qkv()]
            out = weft.gathered_attention(*leaves, **inputs.options())
            grads.append(torch.autograd.grad(out, leaves, place(draw(7, *out.shape, dtype=out.dtype))))
        assert all(map(torch.equal, *grads))

    monkeypatch.setattr(backward, "gradients", gradients)
    weft.spmd(main, 2, backend="emulated")
    assert len(seen) >= 20 and all(seen)


def test_unrequested_and_missing_gradients() -> None:
    def main(world: weft.World) -> None:
        inputs = Inputs(world, Shape((6, 6), causal=True), 3)
        q, k, v = inputs.local_qkv()
        weft.gathered_attention(q.requires_grad_(), k, v, **inputs.options()).sum().backward()
        assert q.grad is not None and k.grad is None
        out, lse = weft.gathered_attention(q, k, v, **inputs.options(), return_lse=True)
        with pytest.raises(RuntimeError, match="lse .* has no gradient"):
            (out.sum() + lse.sum()).backward()
        short_q = q.detach()[:5].requires_grad_()
        for options in (dict(window=3), dict(cu_seqlens=(0, 12))):
            with pytest.raises(RuntimeError, match="as many queries as keys"):
                weft.gathered_attention(short_q, k, v, causal=True, **options, world=world)

    weft.spmd(main, 2, backend="emulated")


def test_compiled_calls_have_gradients() -> None:
    def main(world: weft.World) -> float:
        inputs = Inputs(world, Shape((6, 6), causal=True, layout="zigzag"), 3)
        grads = []
        for compiled in (False, True):

            def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return weft.gathered_attention(q, k, v, **inputs.options()) * 2

            leaves = [t.requires_grad_() for t in inputs.local_qkv()]
            fn = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
            fn(*leaves).sum().backward()
            grads.append([t.grad for t in leaves])
        return max(distance(a, b) for a, b in zip(*grads, strict=True))

    assert weft.spmd(main, 1, backend="emulated") == [0.0]
