"""All-reduce and all-reduce + norm on emulated ranks are compared with torch: every plan, any shape, many schedules,
bad input. The emulator itself raises an error for a race, a deadlock or a read of unwritten memory."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from tests.emulated.cases_all_reduce import FP8, PLANS, bound, norm_case, random_case, sum_case
from tests.emulated.cases_ops import case
from tests.gates import some
from weft.lang.mapping import balanced_rows
from weft.ops.all_reduce import op as reduce_plans
from weft.ops.all_reduce.call import NormOperands, SumCall, sum_call
from weft.ops.all_reduce.op import ALL_REDUCE, ALL_REDUCE_RMS_NORM
from weft.planner import auto as planner
from weft.planner.table import Measured, learn
from weft.plans import (
    Decomposed,
    FusedAllReduce,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    TwoShotLowLatency,
    TwoShotPull,
    TwoShotPush,
)
from weft.scale import Scale
from weft.transport.low_latency_kernels import EMPTY

BF16 = 5e-3
EVERY = {"sequential": Sequential(), **PLANS}


def emulate(
    fn: Callable[[weft.World], Any], ranks: int, seed: int = 0, ahead: bool = True, **options: Any
) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed, ahead=ahead, **options)


@pytest.mark.parametrize("ranks", some([3, 1, 2, 4]))
@pytest.mark.parametrize("name", EVERY)
def test_every_plan_against_torch(name: str, ranks: int) -> None:
    plan = EVERY[name]
    for seed, (m, h, options) in enumerate(
        [
            (8, 64, {}),
            (1, 64, {}),
            (ranks - 1 or 1, 40, dict(full=True)),
            (13, 40, dict(bias=True, norm="layer", weights=torch.float32)),
            (6, 32, dict(residual=False, views=True)),
            (5, 192, dict(dtype=torch.float16, into="plain", full=True)),
        ]
    ):
        assert max(emulate(lambda w, m=m, h=h, k=options: norm_case(w, m, h, plan, **k), ranks, seed)) < BF16
    assert max(emulate(lambda w: norm_case(w, 5, 32, plan, dtype=torch.float32), ranks)) < 1e-5
    assert max(emulate(lambda w: norm_case(w, 5, 128, plan, quantize="tensor"), ranks)) < bound(FP8) * 1.5
    for recipe, h in (("row", 136), ("block", 384)):
        options = dict(quantize=recipe, full=recipe == "row")
        assert max(emulate(lambda w, h=h, k=options: norm_case(w, 5, h, plan, **k), ranks)) < bound(FP8) * 1.5
    for shape in ((7, 24), (3, 2, 16), (8,), (0, 8)):
        assert max(emulate(lambda w, s=shape: sum_case(w, s, plan), ranks)) < BF16


@pytest.mark.parametrize("name", PLANS)
def test_symmetric_operands(name: str) -> None:
    """Peers store results directly to the caller's symmetric memory and read partial rows directly from there."""
    for m in (1, 9):
        options = dict(into="symmetric", symmetric=True, calls=3)
        assert max(emulate(lambda w, m=m, k=options: norm_case(w, m, 64, PLANS[name], **k), 3)) < BF16


@pytest.mark.parametrize("name", PLANS)
def test_calls_of_the_same_operands(name: str) -> None:
    """All calls use one prepared launch; the emulator compares its arguments with each call's."""

    def main(world: weft.World) -> float:
        x, w, out = draw(world.rank, 5, 128), draw(3, 128), world.symmetric((5, 128), torch.bfloat16, "out").local
        kept = [weft.all_reduce_rms_norm(x, None, w, world=world, plan=PLANS[name], out=out)[1] for _ in range(8)]
        return float(len({t.data_ptr() for t in kept}))

    emulate(main, 2)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("plan", [OneShot(warps=4), TwoShotLowLatency(warps=4)], ids=["one shot", "two shots"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_posted_rows_may_hold_anything(plan: Plan, dtype: torch.dtype, seed: int) -> None:
    """Rows may contain infinities, negative zeros, and the bits that mark memory as not yet written (two NaNs, or one
    32-bit NaN)."""

    bits = torch.int32 if dtype == torch.float32 else torch.int16

    def main(world: weft.World) -> tuple[torch.Tensor, ...]:
        x = draw(world.rank, 5, 64, dtype=dtype)
        x[0] = -0.0
        x[1, ::3] = -0.0
        if world.rank:
            x[2, :8] = torch.full((8,), -1, dtype=bits).view(dtype)
        x[4, 1], x[4, 9] = float("inf"), float("nan")
        residual = torch.full((balanced_rows(5, world.size)[world.rank], 64), -0.0, dtype=dtype)
        y, kept = weft.all_reduce_rms_norm(x, residual, torch.ones(64, dtype=dtype), world=world, plan=plan)
        total = weft.all_reduce(x, world=world, plan=plan)
        world.synchronize()
        return x.double(), y.clone(), total.clone()

    results = emulate(main, 3, seed)
    expected = sum(x for x, _, _ in results)
    for _, y, total in results:
        assert torch.equal(y.view(bits), results[0][1].view(bits)) and torch.equal(
            total.view(bits), results[0][2].view(bits)
        )
        numbers = [0, 1, 3]
        assert distance(total[numbers], expected[numbers]) < BF16 and torch.equal(y[0], torch.zeros_like(y[0]))
        assert total[2].isnan().nonzero().flatten().tolist() == list(range(8))
        assert total[4].isinf().nonzero().tolist() == [[1]] and total[4].isnan().nonzero().tolist() == [[9]]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("plan", [OneShot(warps=4), TwoShotLowLatency(warps=4)], ids=["one shot", "two shots"])
def test_posted_results_keep_the_smallest_numbers(plan: Plan, full: bool) -> None:
    """A sum or a row that rounds to a denormal or to a negative zero is stored as that number."""

    def main(world: weft.World) -> None:
        for dtype, small in ((torch.float16, -6e-8), (torch.bfloat16, -1e-39)):
            x = torch.zeros(4, 64, dtype=dtype)
            x[:, 0], x[:, 2:4] = 100, small
            rows = 4 if full else balanced_rows(4, world.size)[world.rank]
            operands = x, torch.zeros(rows, 64, dtype=dtype), torch.ones(64, dtype=dtype)
            y, kept = weft.all_reduce_rms_norm(*operands, world=world, plan=plan, full_residual=full)
            world.synchronize()
            assert y[:, 0].float().sub(8).abs().max() < 0.1 and kept[:, 0].eq(100 * world.size).all()
            assert y[:, 2:].abs().max() < 1e-6 and torch.signbit(y[:, 2:4]).all()
            assert kept[:, 2:4].float().eq(world.size * x[0, 2].float()).all()

    emulate(main, 2)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", [name for name in PLANS if name != "multicast"])
def test_in_place(name: str, seed: int) -> None:
    """`out` may be x. Rows of a buffer that also contains x are not mistaken for x."""

    def main(world: weft.World) -> None:
        for seed in range(3):
            xs = [draw(10 * seed + r, 9, 64) for r in range(world.size)]
            x = xs[world.rank].clone()
            assert weft.all_reduce(x, world=world, plan=PLANS[name], out=x) is x
            buffer = torch.cat([xs[world.rank], torch.zeros(9, 64, dtype=x.dtype)])
            weft.all_reduce(buffer[:9], world=world, plan=PLANS[name], out=buffer[9:])
            world.synchronize()
            expected = sum(x.double() for x in xs)
            assert max(distance(x, expected), distance(buffer[9:], expected)) < BF16

    emulate(main, 3, seed, preempt=0.2)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", [name for name in PLANS if name != "multicast"])
def test_out_may_share_memory_with_the_residual(name: str, seed: int) -> None:
    """`out` may overlap the residual: `out` may be this rank's rows of the residual, or begin one row later."""

    def main(world: weft.World) -> float:
        m, h, worst = 8, 64, 0.0
        lo = sum(balanced_rows(m, world.size)[: world.rank])
        for full in (False, True):
            xs, old = [draw(r, m, h) for r in range(world.size)], draw(8, m, h)
            buffer, weight = world.zeros((m + 1, h), xs[0].dtype), torch.ones(h, dtype=xs[0].dtype)
            own_rows = slice(0, m) if full else slice(lo, lo + balanced_rows(m, world.size)[world.rank])
            residual = buffer[own_rows]
            residual.copy_(old[own_rows])
            y, new = weft.all_reduce_rms_norm(
                xs[world.rank], residual, weight, 1e-6, world=world, plan=PLANS[name], out=buffer[1:] if full else buffer[:m],
                full_residual=full,
            )  # fmt: skip
            world.synchronize()
            total = sum(x.double() for x in xs) + old.double()
            expected = total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6)
            worst = max(worst, distance(y, expected), distance(new, total[own_rows]))
        return worst

    assert max(emulate(main, 3, seed)) < BF16


def test_preparing_a_capture_does_not_write_a_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """`out` is the residual. An eager call that prepares a later capture's plan must not write to that plan's
    memory."""
    chosen = dict(graph=OneShot(warps=4), eager=Sequential())
    monkeypatch.setattr(reduce_plans.AllReduceRmsNorm, "auto", lambda op, world, call, mode: chosen[mode])

    def main(world: weft.World) -> float:
        x, old, weight = torch.ones(6, 64).bfloat16(), draw(8, 6, 64), torch.ones(64).bfloat16()
        residual = old.clone()
        _, new = weft.all_reduce_rms_norm(x, residual, weight, 1e-6, world=world, out=residual, full_residual=True)
        world.synchronize()
        return distance(new, world.size + old.double())

    assert max(emulate(main, 2)) < BF16


@pytest.mark.parametrize("name", PLANS)
def test_residuals_at_odd_addresses_of_ranks_without_rows(name: str) -> None:
    def main(world: weft.World) -> float:
        x, flat = torch.ones(2, 64).bfloat16(), torch.zeros(2 * 64 + 1).bfloat16()[1:].view(2, 64)
        own_rows = slice(min(world.rank, 2), min(world.rank + 1, 2))
        y, _ = weft.all_reduce_rms_norm(x, flat[own_rows], x[0], 1e-6, world=world, plan=PLANS[name])
        world.synchronize()
        return distance(y, torch.ones(2, 64).double())

    assert max(emulate(main, 3)) < BF16


@pytest.mark.parametrize("plan", [TwoShotPush(warps=4, stages=2), Multicast()], ids=["two shots", "multicast"])
def test_partial_words_are_not_signalled(plan: Plan) -> None:
    """Peers store 16 bytes at a time."""

    def main(world: weft.World) -> float:
        x, launch = draw(world.rank, 6, 64), world.backend.launch
        out = world.symmetric((6 * 64 + 8,), x.dtype).local[1:][: 6 * 64].view(6, 64)

        def look(kernel: Any, grid: int, args: Any, *options_and_stream: Any) -> None:
            values = args() if callable(args) else args
            for name in ("landings", "windows"):
                assert name not in values or not (values[name] % 16).any()
            launch(kernel, grid, values, *options_and_stream)

        world.backend.launch = look  # type: ignore[method-assign]
        weft.all_reduce_rms_norm(x, None, torch.ones(64).bfloat16(), 1e-6, world=world, plan=plan, out=out)
        world.synchronize()
        total = sum(draw(r, 6, 64).double() for r in range(world.size))
        return distance(out, total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6))

    assert max(emulate(main, 2)) < BF16


def test_sums_again() -> None:
    """Later calls, in place, into given memory and into a fresh tensor, run a shorter code path. Each of them checks
    `out`."""

    def main(world: weft.World) -> None:
        for plan in (OneShot(programs=2, warps=4), TwoShotLowLatency(programs=3, warps=4)):
            for call in range(4):
                xs = [draw(10 * call + r, 7, 64) for r in range(world.size)]
                expected, x = sum(x.double() for x in xs), xs[world.rank].clone()
                into = world.zeros((1 + 7 * 64,), x.dtype)[1:].view(7, 64)
                results = [weft.all_reduce(x, world=world, plan=plan)]
                results += [weft.all_reduce(x, world=world, plan=plan, out=o) for o in (into, x)]
                world.synchronize()
                assert results[1] is into and results[2] is x and max(distance(y, expected) for y in results) < BF16
                with pytest.raises(ValueError, match="must be contiguous"):
                    weft.all_reduce(x, world=world, plan=plan, out=x.float())

    emulate(main, 3)


@pytest.mark.parametrize("seed", some(range(4)))
def test_two_streams_of_one_capture_are_put_in_order(seed: int) -> None:
    """Both streams share one memory for low-latency rows."""

    def main(world: weft.World) -> None:
        backend: Any = world.backend
        one, two = OneShot(programs=2, warps=4), TwoShotLowLatency(programs=2, warps=4)
        x, z, w = draw(world.rank, 4, 64), draw(10 + world.rank, 4, 64), torch.eye(64, dtype=torch.bfloat16)
        gather = lambda: weft.all_gather_matmul(x, w, world=world, plan=one)  # noqa: E731
        total = lambda: weft.all_reduce(z, world=world, plan=two)  # noqa: E731
        gather(), total()
        with on_stream(world, "second"):
            total()
        world.synchronize()
        first_stream, second_stream = world.current_stream(), world.side_stream("second")
        backend.capturing, backend.captures = lambda: True, lambda stream: stream in (first_stream, second_stream)
        for _ in range(4):
            world.wait_event(second_stream, world.record(first_stream))
            a = gather()
            with on_stream(world, "second"):
                b = total()
            world.wait_event(first_stream, world.record(second_stream))
            world.synchronize()
            assert distance(a, torch.cat([draw(r, 4, 64) for r in range(world.size)]).double()) < BF16
            assert distance(b, sum(draw(10 + r, 4, 64).double() for r in range(world.size))) < BF16

    emulate(main, 2, seed)


@pytest.mark.parametrize("plan", [OneShot(programs=2, warps=4), TwoShotLowLatency(programs=2, warps=4)])
def test_one_eager_call_prepares_all_captured_ones(plan: Plan) -> None:
    def main(world: weft.World) -> None:
        backend: Any = world.backend
        x = draw(world.rank, 4, 64)
        weft.all_reduce(x, world=world, plan=plan)
        backend.capturing, backend.captures = lambda: True, lambda stream: True
        for _ in range(3):
            y = weft.all_reduce(x, world=world, plan=plan)
        assert distance(y, sum(draw(r, 4, 64).double() for r in range(world.size))) < BF16

    emulate(main, 2)


@pytest.mark.parametrize("plan", ["one_shot", "two_shot"])
def test_weights_of_another_dtype_in_the_same_place(plan: str) -> None:
    """Prepared launches are stored by address, so a tensor of another dtype at the same address needs another
    launch."""

    def main(world: weft.World) -> None:
        x, memory, out = draw(world.rank, 4, 64), torch.zeros(64 * 4, dtype=torch.uint8), draw(9, 4, 64)
        expected = None
        for dtype in (torch.bfloat16, torch.float32):
            w = memory.view(dtype)[:64]
            w.copy_(torch.arange(64))
            for _ in range(30):  # until the new residual is at the address of an earlier one
                weft.all_reduce_rms_norm(x, None, w, world=world, plan=plan, out=out)
            expected = out.double() if expected is None else expected
        assert distance(out, expected) < BF16

    emulate(main, 2)


def test_multicast_runs_a_program_on_every_sm() -> None:
    def main(world: weft.World) -> float:
        return weft.all_reduce(torch.ones(8, 64, dtype=torch.bfloat16), world=world, plan=Multicast(programs=0)).sum()

    assert emulate(main, 2) == [1024, 1024]


def test_posted_memory_grows_by_doubling() -> None:
    def main(world: weft.World) -> int:
        for m in (1, 2, 3, 5, 6, 10, 11, 21, 22, 32):
            weft.all_reduce(draw(world.rank, m, 64), world=world, plan=OneShot(programs=2, warps=4))
        world.synchronize()
        return sum(key[0] == "low-latency rows" for key in world._cache if isinstance(key, tuple))

    assert emulate(main, 2) == [6, 6]  # M rows need 384 M bytes: sizes from 512 to 16,384


def test_rows_shorter_than_measured_run_with_nccl(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def main(world: weft.World) -> list[str]:
        world.backend.sm_count, world.backend.scale = 132, Scale()
        kinds = []
        for shape in ((128, 8192), (31, 5120), (1000000,), (160, 48), (1000008,), (3, 16392), (2, 7), ()):
            x = torch.empty(shape, dtype=torch.bfloat16)
            kinds.append(reduce_plans.ALL_REDUCE.choose(world, sum_call(world, x.shape, x.dtype), "auto", True).kind)
        return kinds

    monkeypatch.setattr(planner, "auto", lambda *a: TwoShotLowLatency())
    posts, library = "two_shot", "sequential"
    assert emulate(main, 2)[0] == [posts, posts, posts, posts, library, posts, library, library]
    assert not caplog.text


@pytest.mark.parametrize("times", some([1, 3]))
def test_posted_memory_is_cleared_to_the_last_word(times: int) -> None:
    """Every call clears two thirds of the memory, whatever the previous calls were."""

    def main(world: weft.World) -> None:
        call_count = 0
        for i, (op, plan, rows, n, k) in enumerate(
            [
                ("matmul_all_reduce", OneShot(programs=3, warps=4), [9, 4, 6], 64, 16),
                ("matmul_reduce_scatter", OneShot(programs=2, warps=4), [5, 2, 1], 40, 16),
                ("all_gather_matmul", OneShot(programs=3, warps=4), [3, 4, 2], 16, 64),
                ("matmul_all_reduce", TwoShotLowLatency(programs=5, warps=4), [9, 4, 6], 64, 16),
                ("all_gather_matmul", OneShot(programs=1, warps=4), [2, 2, 2], 16, 40),
                ("matmul_reduce_scatter", OneShot(programs=4, warps=4), [4, 4, 4], 72, 16),
            ]
            * times
        ):
            for _ in range(1 + i % 2):
                assert case(world, op, rows, n, k, plan) < BF16
                call_count += 1
            full = i % 3 == 0
            norm_case(
                world, 7, 64, TwoShotLowLatency(programs=4, warps=4) if full else OneShot(warps=4), full=full, calls=1
            )
            call_count += 1
            world.exchange(None)
            words = world.buffer("low-latency rows", 1).local.view(torch.int32)
            third = words.numel() // 192 * 64
            for buffer_index in (call_count % 3, (call_count + 1) % 3):
                assert (words[buffer_index * third :][:third] == EMPTY.value).all(), (i, op, buffer_index)
            world.exchange(None)

    def start(world: weft.World) -> None:
        sum_case(world, (64, 64), OneShot(warps=4), calls=3)  # the memory does not grow after this call
        main(world)

    emulate(start, 3)


@pytest.mark.parametrize("seed", some(range(4)))
def test_posted_memory_is_set_up_beside_other_ops(seed: int) -> None:
    """One stream sets up the memory while another op's barriers run on the other stream."""

    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(3):
            with on_stream(world, "second"):
                worst = max(worst, sum_case(world, (5 + 8 * i, 64), OneShot(programs=3, warps=4)))
            worst = max(worst, norm_case(world, 6, 64, Decomposed(), calls=1))
        return worst

    assert max(emulate(main, 2, seed)) < BF16


def test_sizes_that_are_no_words_are_sequential(caplog: pytest.LogCaptureFixture) -> None:
    assert max(emulate(lambda w: sum_case(w, (3, 5), "two_shot"), 2)) < BF16
    assert "sequential instead of two_shot: 15 elements are no whole 16-byte words" in caplog.text


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", some(range(6)))
def test_schedules(name: str, seed: int) -> None:
    """Calls of two shapes alternate under frequent preemption, with more and with fewer programs than rows."""
    plan = PLANS[name]
    if not isinstance(plan, Decomposed):
        plan = replace(plan, programs=(2, 6, 3)[seed % 3])

    def main(world: weft.World) -> float:
        worst = 0.0
        for i in range(4):
            worst = max(worst, norm_case(world, (7, 2)[i % 2], 64, plan, full=i > 1, seed=i, calls=1))
        return worst

    assert max(emulate(main, 3, seed, preempt=0.2)) < BF16


@pytest.mark.parametrize("seed", some(range(6)))
def test_plans_in_turn(seed: int) -> None:
    """Successive calls of all plans, shapes and dtypes share the workspaces."""

    def main(world: weft.World) -> float:
        rng = random.Random(seed)
        return max(random_case(world, rng.choice(list(PLANS.values())), rng, 12, 200) for _ in range(10))

    assert max(emulate(main, 2 + seed % 3, seed)) <= 1


def calls_of(world: weft.World, plan: Plan, count: int) -> list[torch.Tensor]:
    rows = balanced_rows(7, world.size)[world.rank]
    out = []
    for i in range(count):
        x, r = draw(i * 10 + world.rank, 7, 64), draw(i * 10 + 5 + world.rank, rows, 64)
        out += weft.all_reduce_rms_norm(x, r, draw(i, 64), world=world, plan=plan)
        out.append(weft.all_reduce(x, world=world, plan=plan))
    world.synchronize()
    return out


@functools.cache
def in_one_shot() -> list[list[torch.Tensor]]:
    return emulate(lambda w: [t.clone() for t in calls_of(w, OneShot(), 2)], 3)


@pytest.mark.parametrize("seed", some(range(3)))
@pytest.mark.parametrize("name", PLANS)
def test_same_bits_on_every_rank_and_in_every_schedule(name: str, seed: int) -> None:
    """All plans sum in rank order, so all give the same bits."""
    results_by_rank = emulate(lambda w: [t.clone() for t in calls_of(w, PLANS[name], 2)], 3, seed)
    for results, rank_0_results, one_shot_results in zip(
        results_by_rank, [results_by_rank[0]] * 3, in_one_shot(), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(results, one_shot_results, strict=True))
        assert all(
            torch.equal(a, b) for i, (a, b) in enumerate(zip(results, rank_0_results, strict=True)) if i % 3 != 1
        )


@pytest.mark.parametrize("name", PLANS)
def test_results_are_tensors_of_their_own(name: str) -> None:
    def main(world: weft.World) -> None:
        kept = [(t, t.clone()) for _ in range(4) for t in calls_of(world, PLANS[name], 1)]
        world.exchange(None)
        assert all(torch.equal(t, then) for t, then in kept)
        assert len({t.data_ptr() for t, _ in kept}) == len(kept)

    emulate(main, 2)


@pytest.mark.parametrize("seed", some(range(4)))
@pytest.mark.parametrize("name", PLANS)
def test_two_streams(name: str, seed: int) -> None:
    """No call drains its stream, as on a GPU: only weft's ordering of accesses to shared memory orders the streams."""

    def main(world: weft.World) -> float:
        rows, results = balanced_rows(5, world.size), []
        lo = sum(rows[: world.rank])
        for i in range(6):
            full, weight = i // 2 == 1, draw(i * 10 + 9, 64)
            xs, old = [draw(i * 10 + r, 5, 64) for r in range(world.size)], draw(i * 10 + 8, 5, 64)
            own_rows = slice(0, 5) if full else slice(lo, lo + rows[world.rank])
            with on_stream(world, ("main", "second")[i % 2]):
                actual = weft.all_reduce_rms_norm(
                    xs[world.rank], old[own_rows], weight, world=world, plan=PLANS[name], full_residual=full
                )
            total = sum(x.double() for x in xs) + old.double()
            expected = total * torch.rsqrt((total * total).mean(1, keepdim=True) + 1e-6) * weight.double()
            results += zip(actual, (expected, total[own_rows]), strict=True)
        world.synchronize()
        return max(distance(y, expected) for y, expected in results)

    assert max(emulate(main, 2, seed)) < BF16


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_the_sum_with_the_residual_is_written_to_given_rows(name: str, full: bool) -> None:
    """A layer keeps only its own rows of a residual of all rows, without a copy."""

    def main(world: weft.World) -> tuple[bool, bool, float]:
        rows = balanced_rows(5, world.size)
        lo = sum(rows[: world.rank])
        own_rows = slice(0, 5) if full else slice(lo, lo + rows[world.rank])
        xs, old, weight = [draw(r, 5, 64) for r in range(world.size)], draw(8, 5, 64), draw(9, 64)
        residual = torch.full((7, 64), 7.0, dtype=old.dtype)
        kept = residual[1:6][own_rows]
        operands = NormOperands(xs[world.rank], old[own_rows], weight, kept=kept)
        _, result, _ = ALL_REDUCE_RMS_NORM(world, PLANS[name], operands, (1e-6, "rms", None, full, None))
        world.synchronize()
        total = sum(x.double() for x in xs) + old.double()
        others = torch.cat([residual[: 1 + own_rows.start], residual[1 + own_rows.stop :]])
        return result.data_ptr() == kept.data_ptr(), bool(others.eq(7).all()), distance(kept, total[own_rows])

    for same, untouched, error in emulate(main, 2):
        assert same and untouched and error < BF16


@pytest.mark.parametrize(
    "kept",
    [torch.empty(4, 64), torch.empty(2, 64, dtype=torch.float16), torch.empty(2, 128)[:, ::2]],
    ids=["all rows", "another dtype", "not contiguous"],
)
def test_memory_that_cannot_hold_the_sum_with_the_residual_is_refused(kept: torch.Tensor) -> None:
    """A kernel would write beyond it, or weft would write to a copy of it."""

    def main(world: weft.World) -> None:
        operands = NormOperands(torch.zeros(4, 64), None, torch.ones(64), kept=kept)
        with pytest.raises(ValueError, match=r"kept .* must be contiguous, \[2, 64\] torch.float32"):
            ALL_REDUCE_RMS_NORM(world, "two_shot", operands, (1e-6, "rms", None, False, None))

    emulate(main, 2)


@pytest.mark.parametrize("seed", some(range(8)))
def test_a_symmetric_output_is_the_callers_until_its_next_call(seed: int) -> None:
    """A fast peer's next call does not overwrite data that a rank's stream reads between two calls."""

    def main(world: weft.World) -> bool:
        out = world.symmetric((6, 32), torch.bfloat16, "out").local
        stream, ok = world.current_stream(), []
        for i in range(4):
            x = draw(i * 10 + world.rank, 6, 32)
            y = weft.all_reduce(x, world=world, plan=TwoShotPush(warps=4), out=out)
            kept = world.empty((6, 32), torch.bfloat16)
            world.call(lambda k=kept, y=y: k.copy_(y), [y], [kept], stream)
            ok.append((kept, sum(draw(i * 10 + r, 6, 32).double() for r in range(world.size))))
        world.synchronize()
        return all((k.double() - expected).norm() / expected.norm() < BF16 for k, expected in ok)

    assert all(emulate(main, 3, seed, preempt=0.2))


# -- plans -------------------------------------------------------------------------------------------------------------


def test_auto_chooses_the_measured_plan() -> None:
    def main(world: weft.World) -> list[str]:
        world.backend.sm_count, world.backend.scale = 132, Scale()
        ops, NORM, SUM = {op.name: op for op in (ALL_REDUCE_RMS_NORM, ALL_REDUCE)}, "all_reduce_rms_norm", "all_reduce"

        def resolve(op: str, m: int, capturing: bool) -> Plan:
            call = SumCall(op, m, 8192, torch.bfloat16, torch.bfloat16, 1, 1e-5, 0, 0, False, False)
            return ops[op].choose(world, call, "auto", capturing)

        learn([Measured(NORM, 2, 64, 8192, 1, "graph", OneShot(), 1.4)])
        learn([Measured(NORM, 2, 4096, 8192, 1, "graph", TwoShotPush(), 1.2)])
        learn([Measured(NORM, 2, 4096, 8192, 1, "eager", Sequential(), 1.0)])
        kinds = [resolve(NORM, m, True).kind for m in (64, 256, 4096)]
        return [*kinds, *(resolve(op, 4096, False).kind for op in (NORM, SUM))]

    assert emulate(main, 2)[0] == ["one_shot", "sequential", "two_shot", "sequential", "sequential"]


def test_an_eager_call_prepares_the_plan_of_a_capture() -> None:
    """The capture runs a different plan, with x and out in symmetric memory, without an exchange between hosts."""

    def main(world: weft.World) -> bool:
        backend: Any = world.backend
        backend.sm_count, backend.scale = 32, Scale()
        x, out = (world.symmetric((6, 64), torch.bfloat16, name).local for name in ("x", "out"))
        x.copy_(draw(world.rank, 6, 64))
        weight = draw(9, 64)
        for mode, plan in (("eager", OneShot(programs=2, warps=4)), ("graph", TwoShotPull(programs=2, warps=4))):
            learn([Measured("all_reduce_rms_norm", 2, 6, 64, 1, mode, plan, 1.5)])
        expected = weft.all_reduce_rms_norm(x, None, weight, 1e-6, world=world, out=out)[0].clone()
        out.zero_()
        world.exchange(None)  # peers write to `out` next
        backend.capturing, exchange, backend.exchange = lambda: True, backend.exchange, None
        actual = weft.all_reduce_rms_norm(x, None, weight, 1e-6, world=world, out=out)[0]
        backend.exchange = exchange
        return torch.equal(actual, expected)

    assert all(emulate(main, 2))


def test_without_a_multicast_address_or_for_wide_elements_it_is_sequential(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: weft.World) -> float:
        backend: Any = world.backend
        wide = norm_case(world, 5, 64, Multicast(), dtype=torch.float32)
        backend.machine.add_window = lambda *_: 0
        return max(wide, norm_case(world, 5, 64, Multicast()))

    assert max(emulate(main, 2)) < BF16
    assert "instead of multicast: multicast needs x and the output in bfloat16, or both in float16" in caplog.text
    assert "instead of multicast: symmetric memory has no multicast address" in caplog.text


def test_plans_survive_json() -> None:
    for plan in (*PLANS.values(), OneShot(programs=4), TwoShotPull(programs=8, stages=3)):
        assert Plan.from_json(plan.to_json()) == plan


# -- bad input ---------------------------------------------------------------------------------------------------------


def raises(error: type[Exception], match: str, *args: Any, ranks: int = 2, **options: Any) -> None:
    def main(world: weft.World) -> None:
        op: Any = weft.all_reduce_rms_norm_quantized if len(args) > 3 else weft.all_reduce_rms_norm
        with pytest.raises(error, match=match):
            op(*args, world=world, **options)

    emulate(main, ranks)


def test_bad_input() -> None:
    x, w = draw(0, 6, 64), draw(1, 64)
    raises(ValueError, r"x must be \[M, H\].*\[64\]", w, None, w)
    raises(ValueError, r"M at least 1, got \[0, 64\]", x[:0], None, w)
    raises(ValueError, r"H 60 of x \[6, 60\].*not a multiple of 8", x[:, :60], None, w[:60])
    raises(ValueError, r"at most 16384", draw(0, 1, 16392), None, draw(0, 16392))
    raises(TypeError, r"residual is \[3, 64\] float16.*one dtype", x, draw(2, 3, 64, dtype=torch.float16), w)
    raises(ValueError, r"residual \[6, 64\].*must be \[3, 64\], the rows of rank \d of 2", x, x, w)
    raises(ValueError, r"residual \[3, 64\].*must be \[6, 64\], all rows", x, x[:3], w, full_residual=True)
    raises(ValueError, r"weight \[32\].*must be \[64\]", x, None, w[:32])
    raises(ValueError, r"bias \[32\].*must be \[64\]", x, None, w, bias=w[:32])
    raises(TypeError, r"weight is \[64\] float16", x, None, w.half())
    raises(TypeError, r"x is .*int32", x.int(), None, w)
    raises(TypeError, r"out_dtype torch.int8", x, None, w, out_dtype=torch.int8)
    raises(TypeError, r"out_dtype torch.float8_e4m3fn is not one of", x, None, w, out_dtype=FP8)
    raises(ValueError, r"a scale goes with", x, None, w, "tensor")
    raises(ValueError, r"a scale goes with", x, None, w, "row", scale=torch.ones(1))
    raises(ValueError, r"scale \[2\].*float32 \[1\]", x, None, w, "tensor", scale=torch.ones(2))
    raises(ValueError, r"recipe 'column' is not one of", x, None, w, "column")
    raises(ValueError, r"64 columns of x .* not a multiple of 128", x, None, w, "block")
    raises(ValueError, r'norm "batch"|norm \'batch\'', x, None, w, norm="batch")
    raises(ValueError, r"requires a gradient", x.requires_grad_(), None, w)
    x = x.detach()
    raises(ValueError, r"plan 'fused' is not", x, None, w, plan="fused")
    raises(ValueError, r"Fused.* is not one of", x, None, w, plan=FusedAllReduce())
    raises(TypeError, r"plan must be", x, None, w, plan=3)
    raises(ValueError, r"out \[6, 32\].*must be contiguous, \[6, 64\]", x, None, w, out=draw(0, 6, 32))


@pytest.mark.parametrize("before", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize(
    "op",
    ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "all_reduce", "all_reduce_rms_norm"],
)  # fmt: skip
def test_every_op_reports_that_an_earlier_wait_expired(op: str, before: bool) -> None:
    """Every op, even a prepared one, raises the Timeout before it does anything else."""

    def main(world: weft.World) -> None:
        x, w, options = draw(world.rank, 8, 64), draw(9, 64, 64), {}
        operands: tuple[Any, ...] = (x, w)
        if op == "matmul_all_to_all":
            options = dict(destinations=weft.route([0, 1] * 4, world=world))
        elif op == "all_reduce":
            operands, options = (x,), dict(plan=OneShot(programs=2, warps=4))
        elif op == "all_reduce_rms_norm":
            operands = (x, None, w[0])
        call = lambda: getattr(weft, op)(*operands, world=world, **options)  # noqa: E731
        if before:
            call(), call()

        def expired() -> None:
            raise weft.Timeout("expired")

        world.backend.check = expired  # type: ignore[method-assign]
        world.backend.launch = world.backend.call = None  # type: ignore[method-assign,assignment]
        with pytest.raises(weft.Timeout, match="expired"):
            call()

    emulate(main, 2)


def test_ranks_that_disagree() -> None:
    def main(world: weft.World) -> None:
        with pytest.raises(weft.Mismatch):
            weft.all_reduce(draw(0, 4 + world.rank, 16), world=world, plan="two_shot")
        assert sum_case(world, (4, 16), "two_shot") < BF16

    emulate(main, 2)


def test_gemm_plans_and_norm_plans_are_not_interchangeable() -> None:
    def main(world: weft.World) -> None:
        with pytest.raises(ValueError, match="plan 'two_shot' is not"):
            weft.matmul_reduce_scatter(draw(0, 8, 16), draw(1, 16, 16), world=world, plan="two_shot")
        with pytest.raises(ValueError, match="not one of"):
            weft.matmul_all_reduce(draw(0, 8, 16), draw(1, 16, 16), world=world, plan=Multicast())
        with pytest.raises(ValueError, match="not one of"):
            weft.all_reduce(draw(0, 8, 16), world=world, plan=FusedAllReduce())

    emulate(main, 2)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", some([3, 2]))
def test_compiles_as_one_graph(ranks: int) -> None:
    """The graph is correct for an even split of rows among the ranks and for 7 rows."""

    def main(world: weft.World) -> None:
        rows = balanced_rows(7, world.size)[world.rank]
        x, r, w = draw(world.rank, 7, 64), draw(9 + world.rank, rows, 64), draw(3, 64)

        def layer(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, r = weft.all_reduce_rms_norm(x * 2, r, w, world=world, plan=TwoShotPush(warps=4))
            z, full = weft.all_reduce_rms_norm(x, None, w, norm="layer", bias=w, full_residual=True, world=world)
            return y + 1, r, r.new_ones(r.shape), z, full, weft.all_reduce(y, world=world, plan="one_shot")

        for wrong in (
            lambda x: weft.all_reduce(x, world=world),
            lambda x: weft.all_reduce_rms_norm(x, r, w, world=world),
        ):
            with pytest.raises(Exception, match="requires a gradient"):
                torch.compile(wrong, fullgraph=True, backend="aot_eager")(x.clone().requires_grad_())
        compiled_results = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, r)
        assert all(torch.equal(a, b) for a, b in zip(compiled_results, layer(x, r), strict=True))

    emulate(main, ranks, ahead=False)  # torch does not compile under a torch dispatch mode
