"""The operations of a sequence (`World.sequence`) are the same in every call, as required for a CUDA graph of
them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from weft.backends.base import Stream, StreamWork
from weft.backends.emulated import EmulatedBackend
from weft.plans import Decomposed, FusedGatherByCopies, Plan, Signaled
from weft.scale import SMALL_TILE

Work = Callable[[StreamWork], object]

M, N, K = 64, 32, 128
OPS: Mapping[str, Callable[..., Any]] = {
    "gather": lambda world, plan, x, w: weft.all_gather_matmul(x, w, world=world, plan=plan),
    "scatter": lambda world, plan, x, w: weft.matmul_reduce_scatter(x, w, world=world, plan=plan),
    "norm": lambda world, plan, x, w: weft.all_reduce_rms_norm(x, x + 1, w[0], world=world, plan=plan, full_residual=True),
}  # fmt: skip
CASES: Mapping[str, tuple[str, Plan, int]] = {  # together with the number of sequences of a call
    "decomposed gather": ("gather", Decomposed(), 1),
    "decomposed scatter": ("scatter", Decomposed(), 1),
    "decomposed scatter in pieces": ("scatter", Decomposed(pieces=2), 2),
    "gather to flags": ("gather", FusedGatherByCopies(tile=SMALL_TILE), 1),
    "signaled scatter": ("scatter", Signaled(copies=True, ctas=1, tile=SMALL_TILE), 1),
    "decomposed norm": ("norm", Decomposed(), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_is_the_same_in_every_call(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, plan, sequences = CASES[case]
    runs: list[tuple[int, object, list[object]]] = []  # the rank, its sequence, and the sequence's operations
    running: dict[int, list[object]] = {}  # by rank
    plain = EmulatedBackend.sequence, EmulatedBackend.copy, EmulatedBackend.run_launch

    def sequence(self: EmulatedBackend, stream: Stream, work: Work) -> Callable[[], StreamWork]:
        def noted(stream_work: StreamWork) -> None:
            running[self.rank] = []
            work(stream_work)
            runs.append((self.rank, work, running.pop(self.rank)))

        return plain[0](self, stream, noted)

    def copy(self: EmulatedBackend, dst: torch.Tensor, src: torch.Tensor, stream: Stream) -> None:
        if self.rank in running:
            running[self.rank].append((dst.data_ptr(), dst.shape, src.data_ptr(), src.shape, id(stream)))
        plain[1](self, dst, src, stream)

    def run_launch(self: EmulatedBackend, launch: Any, stream: Stream, moving: Mapping[str, Any]) -> None:
        if self.rank in running:
            running[self.rank].append(
                (id(launch), id(stream), [v.data_ptr() for v in moving.values() if isinstance(v, torch.Tensor)])
            )
        plain[2](self, launch, stream, moving)

    monkeypatch.setattr(EmulatedBackend, "sequence", sequence)
    monkeypatch.setattr(EmulatedBackend, "copy", copy)
    monkeypatch.setattr(EmulatedBackend, "run_launch", run_launch)

    def main(world: weft.World) -> None:
        kept = []  # so that no address returns
        for call in range(5):
            x = draw(10 * call + world.rank, M // 2 if op == "gather" else M, K)
            kept += [x, OPS[op](world, plan, x, draw(call, N, K))]
        world.synchronize()

    weft.spmd(main, 2, backend="emulated")
    for rank in range(2):
        by_work: dict[object, list[list[object]]] = {}
        for of_rank, work, operations in runs:
            if of_rank == rank:
                by_work.setdefault(work, []).append(operations)
        repeated = [calls for calls in by_work.values() if len(calls) > 2]  # memory may grow in the first two calls
        assert len(repeated) == sequences
        for calls in repeated:
            assert calls[0] and all(operations == calls[0] for operations in calls)


def test_a_world_keeps_a_limited_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence occupies memory of the GPU. Results remain correct when the prepared calls have been dropped."""
    alive: weakref.WeakSet[Callable[[], StreamWork]] = weakref.WeakSet()
    plain, most = EmulatedBackend.sequence, 3

    def sequence(self: EmulatedBackend, stream: Stream, work: Work) -> Callable[[], StreamWork]:
        run = plain(self, stream, work)
        alive.add(run)
        return run

    def main(world: weft.World) -> list[int]:
        w, counts = draw(0, N, K), []
        for m in (2, 4, 6, 8, 10, 2, 4, 6, 8, 10):
            y = weft.all_gather_matmul(torch.ones(m, K).bfloat16(), w, world=world, plan=Decomposed())
            world.synchronize()
            torch.testing.assert_close(y, (torch.ones(2 * m, K).bfloat16() @ w.t()))
            gc.collect()
            counts.append(len(alive))
        return counts

    monkeypatch.setattr(EmulatedBackend, "sequence", sequence)
    monkeypatch.setattr(weft.world, "MOST_SEQUENCES", most)
    for counts in weft.spmd(main, 2, backend="emulated"):
        assert 2 <= max(counts) <= 2 * (most + 1)


@pytest.mark.parametrize("case", CASES)
def test_ranks_may_drop_sequences_at_different_times(case: str) -> None:
    """The ranks reach the limit in different calls if their trials differ. No rank then waits for another to prepare."""
    op, plan, _ = CASES[case]

    def main(world: weft.World) -> None:
        w = draw(0, N, K)
        inputs = [draw(10 * call + world.rank, M // 2 if op == "gather" else M, K) for call in range(3)]
        expected = [OPS[op](world, plan, x, w) for x in inputs]
        for call in range(6):
            if call % 3 == 1 + world.rank:
                world.forget_prepared()
            result = OPS[op](world, plan, inputs[call % 3], w)
            world.synchronize()
            torch.testing.assert_close(result, expected[call % 3], rtol=0, atol=0)

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("case", CASES)
def test_a_call_whose_sequences_were_dropped_can_be_captured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture prepares the call again, although a capture can neither allocate memory that calls share nor exchange
    messages, and although the capture itself reaches the limit."""
    op, plan, _ = CASES[case]

    def main(world: weft.World) -> None:
        backend: Any = world.backend
        x, w = draw(world.rank, M // 2 if op == "gather" else M, K), draw(9, N, K)
        expected = [OPS[op](world, plan, x, w) for _ in range(2)][1]
        world.forget_prepared()
        backend.capturing, backend.captures = lambda: True, lambda stream: True
        allocators = backend.exchange, backend.symmetric, backend.zeros, backend.tensor
        backend.exchange = backend.symmetric = backend.zeros = backend.tensor = None
        results = [OPS[op](world, plan, x, w) for _ in range(2)]
        backend.exchange, backend.symmetric, backend.zeros, backend.tensor = allocators
        del backend.capturing, backend.captures
        world.synchronize()
        for result in results:
            torch.testing.assert_close(result, expected, rtol=0, atol=0)

    monkeypatch.setattr(weft.world, "MOST_SEQUENCES", 1)
    weft.spmd(main, 2, backend="emulated")
