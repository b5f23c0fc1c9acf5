"""Ranks make different calls. All ranks have made each of these calls before. No rank may silently return a wrong
result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl

import weft
from weft import Mismatch, World, moe
from weft.backends.base import Stream, StreamWork
from weft.backends.emulated import EmulatedBackend
from weft.lang.channel import end_call
from weft.ops.all_reduce.call import SumOperands

BF = torch.bfloat16


def ones(*shape: int, dtype: torch.dtype = BF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def attention(world: World, m: int, plan: str, causal: bool = False) -> torch.Tensor:
    return weft.gathered_attention(*(ones(m, 2, 16) for _ in range(3)), causal=causal, world=world, plan=plan)


def norm(world: World, m: int, plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    return weft.all_reduce_rms_norm(ones(m, 8), None, ones(8), 1e-6, world=world, plan=plan)


def layer(world: World, m: int, plan: str) -> torch.Tensor:
    w13, w2 = moe.pack(ones(2, 32, 16), world=world), ones(2, 16, 16)
    ids = torch.arange(m)[:, None].int() % 4
    return moe.moe(ones(m, 16), ids, torch.ones(m, 1), w13, w2, rows=[m, m], world=world, plan=plan)


def dispatched(world: World, m: int, plan: str) -> torch.Tensor:
    ids = torch.arange(m)[:, None].int() % 4
    rows, handle = moe.dispatch(ones(m, 16), ids, torch.ones(m, 1), experts=4, world=world)
    return moe.combine(rows, handle)


# For each op, a function that calls it with a given number of rows on this rank, and the op's plans.
OPS: dict[str, tuple[Callable[[World, int, str], Any], tuple[str, ...]]] = {
    "all_gather_matmul": (
        lambda world, m, plan: weft.all_gather_matmul(ones(m, 16), ones(8, 16), world=world, plan=plan),
        ("sequential", "decomposed", "fused", "one_shot", "flag_gated"),
    ),
    "matmul_reduce_scatter": (
        lambda world, m, plan: weft.matmul_reduce_scatter(ones(2 * m, 16), ones(8, 16), world=world, plan=plan),
        ("sequential", "decomposed", "fused", "one_shot", "signaled"),
    ),
    "matmul_all_reduce": (
        lambda world, m, plan: weft.matmul_all_reduce(ones(2 * m, 16), ones(8, 16), world=world, plan=plan),
        ("sequential", "decomposed", "fused", "one_shot", "two_shot", "signaled"),
    ),
    "all_reduce": (
        lambda world, m, plan: weft.all_reduce(ones(m, 16), world=world, plan=plan),
        ("sequential", "decomposed", "one_shot", "two_shot"),
    ),
    "all_reduce_rms_norm": (norm, ("sequential", "decomposed", "one_shot", "two_shot")),
    "gathered_attention": (attention, ("sequential", "segmented", "head_parallel")),
    "moe": (layer, ("sequential", "dispatched", "fused", "low_latency")),
    "moe.dispatch": (dispatched, ("",)),
}
EVERY = [(op, plan) for op, (_, plans) in OPS.items() for plan in plans]


@pytest.mark.parametrize(("op", "plan"), EVERY, ids=lambda value: value)
@pytest.mark.parametrize("seed", range(2))
def test_known_calls_of_other_rows_raise(op: str, plan: str, seed: int) -> None:
    call = OPS[op][0]

    def main(world: World) -> None:
        for m in (4, 5, 4 + world.rank):
            call(world, m, plan)
        world.synchronize()

    with pytest.raises(Mismatch, match=rf"rank 0: {op} .*rank 1: {op} ") as raised:
        weft.spmd(main, 2, backend="emulated", seed=seed, sm_count=4)
    message = str(raised.value)
    assert "4" in message and "5" in message, message


# Plans whose kernels compare calls. The other plans with waits wait on a channel that belongs to this call.
COMPARE = ("decomposed", "one_shot", "segmented", "head_parallel", "low_latency", "dispatched", "fused", "")
KERNELS = [(op, plan) for op, plan in EVERY if plan in COMPARE and (plan != "fused" or op == "moe")]
KERNELS.remove(("matmul_all_reduce", "decomposed"))  # NCCL sums the parts of this plan


@pytest.mark.parametrize(("op", "plan"), KERNELS, ids=lambda value: value)
@pytest.mark.parametrize("seed", range(3))
def test_kernels_compare_the_numbers_of_their_calls(
    monkeypatch: pytest.MonkeyPatch, op: str, plan: str, seed: int
) -> None:
    """The kernels compare calls, because hosts do not compare prepared calls, as on a GPU."""
    monkeypatch.setattr(EmulatedBackend, "compares", False)
    call = OPS[op][0]

    def main(world: World) -> None:
        for m in (4, 5, 4 + world.rank):
            call(world, m, plan)
        world.synchronize()

    with pytest.raises(Mismatch, match=rf"ranks disagree on this call: rank 0: {op} .*rank 1: {op} ") as raised:
        # Some plans push rows before the barrier that compares calls, which is a race if the ranks disagree.
        weft.spmd(main, 2, backend="emulated", seed=seed, sm_count=4, races=plan != "head_parallel")
    message = str(raised.value)
    assert "4" in message and "5" in message, message


def test_replayed_copies_compare_the_numbers_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU replays the second call of a sequence, with that call's number. It may be part of a trial, which runs while
    the number is still the previous call's."""
    monkeypatch.setattr(EmulatedBackend, "compares", False)
    enqueued, worlds = EmulatedBackend.sequence, {}

    def sequence(
        self: EmulatedBackend, stream: Stream, work: Callable[[StreamWork], object]
    ) -> Callable[[], StreamWork]:
        numbers, world = [], worlds[self.rank]

        def replay(stream_work: StreamWork) -> None:
            numbers.append(world.number)
            with mock.patch.object(world, "number", numbers[:2][-1]):
                work(stream_work)

        return enqueued(self, stream, replay)

    monkeypatch.setattr(EmulatedBackend, "sequence", sequence)
    all_reduce = OPS["all_reduce"][0]

    def main(world: World) -> None:
        worlds[world.rank] = world
        norm(world, 8, "one_shot"), all_reduce(world, 5, "decomposed")  # memory that grows later ends sequences
        for m in (5, 4):
            all_reduce(world, m, "decomposed")
            prepared = world.ran
            norm(world, 8, "one_shot")
            prepared(SumOperands(ones(m, 16)), None)
        all_reduce(world, 4 + world.rank, "decomposed")
        world.synchronize()

    with pytest.raises(Mismatch, match="disagree on this call: rank 0: all_reduce .*rank 1: all_reduce "):
        weft.spmd(main, 2, backend="emulated", sm_count=4)


CALLS: dict[str, Callable[[World], Any]] = {
    "gather": lambda world: OPS["all_gather_matmul"][0](world, 4, "decomposed"),
    "gather in float16": lambda world: weft.all_gather_matmul(
        ones(4, 16, dtype=torch.float16), ones(8, 16, dtype=torch.float16), world=world, plan="decomposed"
    ),
    "gather in one shot": lambda world: OPS["all_gather_matmul"][0](world, 4, "one_shot"),
    "scatter": lambda world: OPS["matmul_reduce_scatter"][0](world, 4, "decomposed"),
    "reduce": lambda world: OPS["all_reduce"][0](world, 8, "decomposed"),
    "causal": lambda world: attention(world, 4, "segmented", True),
}


@pytest.mark.parametrize(("rank_0_call", "rank_1_call"), list(itertools.combinations(CALLS, 2)))
def test_known_calls_of_another_op_dtype_or_plan_raise(rank_0_call: str, rank_1_call: str) -> None:
    def main(world: World) -> None:
        for _ in range(2):
            CALLS[rank_0_call](world)
            CALLS[rank_1_call](world)
        world.synchronize()
        CALLS[rank_1_call if world.rank else rank_0_call](world)
        world.synchronize()

    with pytest.raises(Mismatch, match="ranks disagree on this call: rank 0: .*; rank 1: "):
        weft.spmd(main, 2, backend="emulated", sm_count=4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unlike", [*CALLS, "exchange", "symmetric 'user'"])
def test_a_known_call_and_a_first_call_raise_a_mismatch(unlike: str, seed: int) -> None:
    """A first call begins with an exchange between hosts, which a rank that repeats a prepared call does not join."""
    calls: dict[str, Callable[[World], Any]] = {
        "exchange": lambda world: world.exchange([torch.ones(2)]),
        "symmetric 'user'": lambda world: world.symmetric((4,), BF),
        **CALLS,
    }

    def main(world: World) -> None:
        norm(world, 8, "one_shot")
        if world.rank == 0:
            calls[unlike](world)
        norm(world, 8, "one_shot")
        world.synchronize()

    named = r"rank 0: \w+.* first_call=True; rank 1: all_reduce_rms_norm .*first_call=False"
    with pytest.raises(Mismatch, match=named) as raised:
        weft.spmd(main, 2, backend="emulated", sm_count=4, seed=seed)
    assert unlike in CALLS or f"rank 0: {unlike} " in str(raised.value)


def test_a_call_that_one_rank_has_forgotten_raises() -> None:
    def main(world: World) -> None:
        for _ in range(2):
            norm(world, 8, "one_shot")
        if world.rank == 0:
            world.decided.clear(), world._numbers.clear()
        norm(world, 8, "one_shot")

    with pytest.raises(
        Mismatch, match="rank 0: all_reduce_rms_norm first_call=True; rank 1: all_reduce_rms_norm first_"
    ):
        weft.spmd(main, 2, backend="emulated", sm_count=4)


@pytest.mark.parametrize("plan", ["auto", "sequential"])
@pytest.mark.parametrize("known", [False, True])
def test_shapes_of_one_size_raise(plan: str, known: bool) -> None:
    def main(world: World) -> None:
        shapes = (8, 32), (4, 64), (4, 8, 8)
        for shape in shapes if known else ():
            weft.all_reduce(ones(*shape), world=world, plan=plan)
        weft.all_reduce(ones(*shapes[world.rank]), world=world, plan=plan)
        world.synchronize()

    says = r"rank 0: all_reduce shape=\(8, 32\).*rank 1: all_reduce shape=\(4, 64\)"
    with pytest.raises(Mismatch, match=says):
        weft.spmd(main, 2, backend="emulated")


def test_split_worlds_make_calls_of_their_own() -> None:
    def main(world: World) -> None:
        split_a, split_b = world.split(world.rank // 2), world.split(world.rank // 2)
        for _ in range(2):
            for part, m in ((split_a, 3 + world.rank // 2), (split_b, 5)):
                OPS["all_reduce"][0](part, m, "sequential")
        world.synchronize()

    weft.spmd(main, 4, backend="emulated")


def test_a_launch_that_ranks_make_known_ones_of_raises() -> None:
    """The kernel is the user's own; each rank launches it with a different grid."""

    def main(world: World) -> None:
        ch = world.channel("own", world.size, None)
        for grid in (1, 2, 1 + world.rank):
            world.launch(end_of_call, grid, dict(ch=ch), dict(num_warps=1), world.current_stream())
        world.synchronize()

    with pytest.raises(
        Mismatch, match="rank 0: launch of end_of_call by 1 programs.*rank 1: launch of end_of_call by 2"
    ):
        weft.spmd(main, 2, backend="emulated")


@weft.jit
def end_of_call(ch):  # type: ignore[no-untyped-def]
    end_call(ch, None, tl.num_programs(0))
