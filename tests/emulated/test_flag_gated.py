"""quack's GEMM may wait without a limit, because the copy engines that set its flags need neither an SM nor a peer. The
emulator runs the plan's host code with a GEMM that waits for each shard (tests/emulated/test_ops.py, test_mutation.py);
tests/gpu/gpu_main.py runs quack's GEMM on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases_all_gather_matmul import all_gather_case
from weft.backends import library_gemm
from weft.backends.emulated import EmulatedBackend
from weft.integrations import quack
from weft.plans import FlagGated

PLAN = FlagGated(tile_m=8, cluster_m=1)


def noted(monkeypatch: Any, ranks: int) -> list[list[tuple[str, str, tuple[Any, ...]]]]:
    """Return, for each rank, the stream operations of a second call in the order of the host's calls: (operation,
    stream, arguments)."""
    ops_by_rank: list[list[tuple[str, str, tuple[Any, ...]]]] = [[] for _ in range(ranks)]

    def listening(method: str, stream_index: int) -> None:
        plain: Callable[..., Any] = getattr(EmulatedBackend, method)

        def record(self: EmulatedBackend, *args: Any) -> Any:
            ops_by_rank[self.rank].append((method, args[stream_index].name, args))
            return plain(self, *args)

        monkeypatch.setattr(EmulatedBackend, method, record)

    def rank(world: weft.World) -> float:
        worst = all_gather_case(world, [16] * ranks, 16, 24, PLAN)
        ops_by_rank[world.rank].clear()
        return max(worst, all_gather_case(world, [16] * ranks, 16, 24, PLAN))

    for method, stream_index in (
        ("copy", 2),
        ("signal", 2),
        ("wait", 2),
        ("wait_event", 0),
        ("launch", 4),
        ("call", 3),
    ):
        listening(method, stream_index)
    assert max(weft.spmd(rank, ranks, backend="emulated")) < 5e-3
    return ops_by_rank


@pytest.mark.parametrize("ranks", [2, 3])
def test_flags_stand_behind_a_bounded_barrier_alone_and_before_the_gemm(ranks: int, monkeypatch: Any) -> None:
    for me, stream_ops in enumerate(noted(monkeypatch, ranks)):
        copies = [(op, args) for op, stream, args in stream_ops if "copy" in stream]
        copy_ops = [op for op, _ in copies]
        staged = copy_ops.index("launch")  # the barrier
        assert copy_ops[:staged] == ["wait_event"], "the barrier must follow the staging of x"
        assert copy_ops[staged + 1 : staged + 2 * ranks - 1] == ["copy", "signal"] * (ranks - 1)
        flags = [args for op, args in copies if op == "signal"]
        words = [word.data_ptr() for word, _, _ in flags]
        assert words == [words[0] + 4 * ((me + 1 + j) % ranks - (me + 1) % ranks) for j in range(ranks - 1)]
        first_word = words[0] - 4 * ((me + 1) % ranks)
        copied = [args for op, stream, args in stream_ops if op == "copy" and "copy" not in stream]
        (own_flags,) = [source for to, source, _ in copied if to.data_ptr() == first_word]
        assert own_flags.tolist() == [int(rank == me) for rank in range(ranks)], (
            "only this rank's flag must be set before the copies"
        )
        assert all(value.data_ptr() != own_flags[me].data_ptr() for _, value, _ in flags), (
            "no flag may come from a peer"
        )
        order = [op for op, _, _ in stream_ops]
        last = max(i for i, op in enumerate(order) if op == "signal")
        assert last < order.index("wait"), "all signals must be enqueued before the GEMM that waits"


def test_one_call_of_the_library(monkeypatch: Any) -> None:
    """The GEMM receives the flags, the call's number, and the index of the shard that is already present."""
    gemm_args: dict[str, Any] = {}

    def gemm(x: Any, weight: Any, out: Any, c: Any, ticket: Any, *tile: int, pingpong: bool, ag_args: Any) -> None:
        gemm_args.update(tile=tile, pingpong=pingpong, ag=ag_args, x=x)

    class Module:
        AllGatherArguments = staticmethod(lambda *args: args)

    monkeypatch.setattr(Module, "gemm", staticmethod(gemm), raising=False)
    monkeypatch.setitem(__import__("sys").modules, "quack", Module)
    monkeypatch.setitem(__import__("sys").modules, "quack.gemm", Module)
    x, w, out = torch.ones(8, 4), torch.ones(6, 4), torch.empty(8, 6)
    flags, call = torch.zeros(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    quack.flag_gated(x, w, out, flags, call, 1, library_gemm.Form(128, 160, 2, True))
    assert gemm_args["tile"] == (128, 160, 2, 1) and gemm_args["pingpong"] and gemm_args["x"] is x
    assert gemm_args["ag"][0] is flags and gemm_args["ag"][1] is call and gemm_args["ag"][2:] == (2, 1)


def test_flags_of_a_first_call_in_inference_mode_are_writable(monkeypatch: Any) -> None:
    """Outside inference mode, torch allows no in-place write to tensors that were created inside it."""
    written: list[bool] = []
    plain_signal = EmulatedBackend.signal

    def signal(self: EmulatedBackend, word: torch.Tensor, *args: Any) -> None:
        written.append(word.is_inference())
        plain_signal(self, word, *args)

    monkeypatch.setattr(EmulatedBackend, "signal", signal)

    def rank(world: weft.World) -> float:
        with torch.inference_mode():
            all_gather_case(world, [16] * 2, 16, 24, PLAN)
        return all_gather_case(world, [16] * 2, 16, 24, PLAN)

    assert max(weft.spmd(rank, 2, backend="emulated")) < 5e-3
    assert len(written) == 2 * 2 and not any(written)


def identity() -> torch.Tensor:
    return torch.eye(16).bfloat16()


def filled(rows: int, value: float) -> torch.Tensor:
    return torch.full((rows, 16), value).bfloat16()


def first_call_of_a_size_beside_another(world: weft.World) -> list[float]:
    """Call two sizes on two streams of a host that runs ahead: loading the second GEMM sets flags while
    the first GEMM waits for its own."""
    weft.all_gather_matmul(filled(16, 0.0), identity(), world=world, plan=PLAN)
    world.synchronize()
    finish, world.backend.finish = world.backend.finish, lambda stream=None: None
    with world.on(world.side_stream("user a")):
        y = weft.all_gather_matmul(filled(16, world.rank + 1.0), identity(), world=world, plan=PLAN)
    with world.on(world.side_stream("user b")):
        weft.all_gather_matmul(filled(8, 9.0), identity(), world=world, plan=PLAN)
    world.backend.finish = finish
    world.synchronize()
    return [y[16 * rank, 0].item() for rank in range(world.size)]


@pytest.mark.parametrize("seed", range(3))
def test_loading_sets_no_flag_for_which_another_call_waits(seed: int) -> None:
    assert weft.spmd(first_call_of_a_size_beside_another, 2, backend="emulated", seed=seed) == [[1.0, 2.0]] * 2


def call_after_one_that_raised(world: weft.World) -> list[float]:
    weft.all_gather_matmul(filled(16, 0.0), identity(), world=world, plan=PLAN)
    world.synchronize()
    linear, world.backend.linear = world.backend.linear, lambda *_: [][0]
    with pytest.raises(IndexError):
        weft.all_gather_matmul(filled(16, 50.0), identity(), world=world, plan=PLAN)
    world.backend.linear = linear
    y = weft.all_gather_matmul(filled(16, world.rank + 1.0), identity(), world=world, plan=PLAN)
    world.synchronize()
    return [y[16 * rank, 0].item() for rank in range(world.size)]


@pytest.mark.parametrize("seed", range(3))
def test_a_call_that_raised_leaves_no_flag_to_be_set(seed: int) -> None:
    assert weft.spmd(call_after_one_that_raised, 2, backend="emulated", seed=seed) == [[1.0, 2.0]] * 2
