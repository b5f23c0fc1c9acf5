"""Plan "two_level" on emulated nodes: ops are compared with float64 under several schedules. The tests also cover the
limits of a node and the choice of the plan, and a gate removes each event and barrier of the host code once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_all_reduce import FP8, bound, norm_case, sum_case
from tests.emulated.cases_fp8 import case as fp8_case
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_nn import all_gather_grads, reduce_grads
from tests.emulated.cases_ops import OPS, case, shared_case
from tests.emulated.test_mutation import Caller, to_ranks
from tests.gates import covered
from weft import MemoryFault, Unsupported, World
from weft.backends.emulated import EmulatedBackend
from weft.backends.emulated import spmd as emulated
from weft.chooser import Choice, Chooser
from weft.op import REGISTRY
from weft.ops.all_gather_matmul.op import all_gather_swiglu
from weft.ops.all_reduce import two_level as of_sums
from weft.ops.matmul_all_to_all import two_level as of_exchanges
from weft.ops.matmul_reduce import two_level as of_products
from weft.plans import Decomposed, Plan, Sequential, TwoLevel
from weft.prepared import Prepared
from weft.timing import CallTime
from weft.torch_library import plan_of, text_of
from weft.transport.two_level import BETWEEN

BOUND = 5e-3
NODES = [(2, 4), (2, 8), (3, 6)]  # nodes and ranks


def over_nodes(fn: Callable[[World], Any], nodes: Any = 2, ranks: int = 4, seed: int = 0, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", nodes=nodes, seed=seed, **options)


# -- results -----------------------------------------------------------------------------------------------------------
@covered("2-8-(1|3)", covering=r"[2-4-\1]")  # more ranks per node
@covered("3-6-1", covering="[3-6-3]")  # four ranks test the case of one piece
@pytest.mark.parametrize("piece_count", [1, 3])
@pytest.mark.parametrize(("nodes", "ranks"), NODES)
def test_gemms(nodes: int, ranks: int, piece_count: int) -> None:
    """Shards are equal, unequal or empty; results are in a fresh tensor or in `out`."""
    splits = [[8] * ranks, [5 + r % 3 for r in range(ranks)], [9 * (r == 1) + (r > 2) for r in range(ranks)]]

    def main(world: World) -> None:
        for i, rows in enumerate(splits):
            for op in OPS:
                assert (
                    case(world, op, rows, 40, 24, TwoLevel(piece_count), bias=i != 1, into=i == 1, calls=2) < BOUND
                ), op

    over_nodes(main, nodes, ranks, seed=piece_count)


def test_sent_tensors_are_kept_until_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's allocator assigns the memory of a released tensor to the stream's next tensor, even if another stream
    still reads it."""
    sent: list[list[weakref.ref[torch.Tensor]]] = [[] for _ in range(6)]  # sent tensors, for each rank

    def send(world: World, part: torch.Tensor, to: int, into: torch.Tensor, source: int, stream: Any) -> None:
        sent[world.rank].append(weakref.ref(part))
        world.call(lambda: into.zero_(), [], [into], stream)

    for module in (of_products, of_exchanges):
        monkeypatch.setattr(module, "send", send)

    def main(world: World) -> list[bool]:
        held: list[bool] = []
        wait_event, between = world.backend.wait_event, world.side_stream(BETWEEN)

        def waits(stream: Any, event: Any) -> None:
            wait_event(stream, event)
            if stream is not between:
                held.extend(part() is not None for part in sent[world.rank])

        monkeypatch.setattr(world.backend, "wait_event", waits)
        x, w = draw(world.rank, 36, 24), draw(50, 40, 24)
        weft.matmul_reduce_scatter(x, w, world=world, plan=TwoLevel(2))
        sent[world.rank].clear()
        to = drawn(3, world.size, [36] * 6)[world.rank]
        weft.matmul_all_to_all(x, w, destinations=to, world=world, plan=TwoLevel())
        return held

    for held in over_nodes(main, 3, 6):
        assert len(held) == 4 + 2 * 2 and all(held)


@covered("[123]", covering="[0]")
@pytest.mark.parametrize("seed", range(4))
def test_many_schedules(seed: int) -> None:
    def main(world: World) -> None:
        for op in OPS:
            assert case(world, op, [6] * 4, 32, 32, TwoLevel(1 + seed % 2), calls=2) < BOUND
        assert norm_case(world, 9, 64, TwoLevel(2)) < BOUND

    over_nodes(main, seed=seed)


@pytest.mark.parametrize(("nodes", "ranks"), NODES)
def test_sums(nodes: int, ranks: int) -> None:
    def main(world: World) -> None:
        for m, piece_count in ((1, 3), (7, 1), (2 * ranks + 1, 2)):
            plan = TwoLevel(piece_count)
            for full in (False, True):
                assert norm_case(world, m, 64, plan, full=full, bias=True, norm="layer", seed=m) < BOUND
            assert norm_case(world, m, 48, plan, residual=False, into="plain", views=True) < BOUND
            assert sum_case(world, (m, 3, 16), plan, into=m == 7) < BOUND
        assert norm_case(world, 9, 64, TwoLevel(2), quantize="tensor") < bound(FP8)
        assert norm_case(world, 9, 64, TwoLevel(2), dtype=torch.float32, full=True) < 1e-5
        assert sum_case(world, (0, 16), TwoLevel()) == 0

    over_nodes(main, nodes, ranks)


@pytest.mark.parametrize(("nodes", "ranks"), NODES)
def test_all_to_all(nodes: int, ranks: int) -> None:
    """Destinations are even or skewed, or leave ranks without rows to send or receive; rows need not be a multiple of
    16 bytes."""
    sizes = [3 + 5 * (r % 2) for r in range(ranks)]
    all_rows = [
        drawn(1, ranks, sizes),
        drawn(2, ranks, sizes, [1, 9, *[0] * (ranks - 2)]),
        drawn(3, ranks, [0, *sizes[1:]], [0, 1, *[2] * (ranks - 2)]),
    ]

    def main(world: World) -> None:
        for i, rows in enumerate(all_rows):
            assert all_to_all_case(world, rows, 20 - i, 24, "two_level", bias=i == 0, into=i == 1, again=i != 2) < BOUND

    over_nodes(main, nodes, ranks)


def test_gated_and_no_rows() -> None:
    def main(world: World) -> None:
        parts, w = [draw(r, 12, 32) for r in range(4)], draw(9, 32, 32) * 0.1
        for plan in (TwoLevel(), TwoLevel(2)):
            y = all_gather_swiglu(parts[world.rank], w, 16, world=world, plan=plan, rows=None)
            gate_up = (torch.cat(parts).double() @ w.double().t()).view(-1, 1, 2, 16)
            world.synchronize()
            assert distance(y, (torch.nn.functional.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]).flatten(1)) < BOUND
        for op in OPS:
            assert case(world, op, [0] * 4, 32, 32, TwoLevel()) == 0

    over_nodes(main)


def test_out_may_hold_an_operand() -> None:
    def main(world: World) -> None:
        for op in ("all_gather_matmul", "matmul_all_reduce"):
            assert shared_case(world, op, 8, 32, TwoLevel(2)) < BOUND

    over_nodes(main)


@pytest.mark.parametrize(("nodes", "ranks"), NODES[::2])
def test_gradients(nodes: int, ranks: int) -> None:
    """The operators of a backward pass use "auto", which chooses two levels on emulated nodes."""
    rows = [7, 5] * (ranks // 2)
    used: list[str] = []

    def main(world: World) -> None:
        send = world.levels.across.backend.all_to_all

        def noted(*args: Any, **options: Any) -> None:
            used.append("backward" if torch._C._current_graph_task_id() != -1 else "forward")
            send(*args, **options)

        object.__setattr__(world.levels.across.backend, "all_to_all", noted)
        assert all_gather_grads(world, rows, 48, 32, TwoLevel(), through=True) < BOUND
        assert reduce_grads(world, sum(rows), 48, 32, TwoLevel(2), rows=rows) < BOUND
        assert reduce_grads(world, 13, 48, 32, TwoLevel(2), everywhere=True) < BOUND

    over_nodes(main, nodes, ranks)
    assert set(used) == {"forward", "backward"}


def test_the_same_bits() -> None:
    """Results have the same bits in every call and under any schedule; all ranks receive the same bits from an
    all-reduce."""

    def main(world: World) -> list[torch.Tensor]:
        x, w, shard = draw(world.rank, 10, 32), draw(9, 32, 32), draw(50 + world.rank, 6, 32)
        results = []
        for _ in range(2):
            results += [
                weft.all_gather_matmul(shard, w, world=world, plan=TwoLevel(2)),
                weft.matmul_reduce_scatter(x, w, world=world, plan=TwoLevel()),
                weft.matmul_all_reduce(x, w, world=world, plan=TwoLevel(2)),
                weft.all_reduce(x, world=world, plan=TwoLevel(2)),
            ]
        world.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results[:4], results[4:], strict=True))
        return results[:4]

    runs = [over_nodes(main, seed=seed) for seed in range(2)]
    for rank in range(4):
        assert all(torch.equal(a, b) for a, b in zip(runs[0][rank], runs[1][rank], strict=True))
        assert all(torch.equal(runs[0][rank][i], runs[0][0][i]) for i in (2, 3))


def test_compiled() -> None:
    def main(world: World) -> None:
        x, w, shard = draw(world.rank, 8, 32), draw(9, 32, 32), draw(1 + world.rank, 2, 32)

        def two_ops(x: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = weft.all_gather_matmul(shard, w, world=world, plan=TwoLevel(2))
            return y, weft.matmul_reduce_scatter(x, w, world=world, plan="two_level")

        graph = torch.compile(two_ops, backend="aot_eager", fullgraph=True)
        for compiled_result, eager in zip(graph(x, shard), two_ops(x, shard), strict=True):
            assert torch.equal(compiled_result, eager)

    over_nodes(main)


# -- what overlaps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPS)
def test_transfers_run_under_the_gemm(op: str) -> None:
    """On each rank, a transfer between nodes runs at the same time as a program of the node's kernel. The first call
    allocates the node's memory, for which the ranks wait."""

    def main(backend: Any) -> None:
        world = World(backend)
        for _ in range(2):
            assert case(world, op, [16] * 4, 32, 64, TwoLevel(2)) < BOUND

    _, report = emulated(main, 4, nodes=2)
    for rank in range(4):
        spans = [span for span in report.timeline if span.rank == rank]
        between = [span for span in spans if span.track.startswith("stream:between nodes")]
        gemms = [span for span in spans if "gemm" in span.name]
        assert between and any(a.start < b.end and b.start < a.end for a in between for b in gemms), (op, rank)


# -- levels ------------------------------------------------------------------------------------------------------------
def test_levels() -> None:
    def main(world: World) -> None:
        levels = world.levels
        assert world.levels is levels and world.backend.two_level_unsupported is None
        assert (levels.node.size, levels.node.rank, levels.node.multi_node_unsupported) == (2, world.rank % 2, None)
        assert levels.across.exchange(world.rank) == [world.rank % 2, world.rank % 2 + 2, world.rank % 2 + 4]
        assert levels.across.rank == world.node and levels.across.backend.symmetric_unsupported is not None
        assert levels.node.sm_count < world.sm_count, "the node's kernels must leave SMs to transfers"
        with pytest.raises(Unsupported, match="no two levels: its ranks are on one node"):
            _ = levels.node.levels

    over_nodes(main, 3, 6)


def test_a_timeout_on_one_node_is_raised_by_all_ranks() -> None:
    def main(world: World) -> None:
        node = world.levels.node
        with mock.patch.object(node.backend, "check", side_effect=weft.Timeout("rank 1: a wait")):
            for check in (world.check, world.synchronize):
                with pytest.raises(weft.Timeout, match=f"node {world.node}, whose ranks count from 0: rank 1: a wait"):
                    check()
        with pytest.raises(weft.Timeout, match="unusable"):  # the ranks' states differ
            world.check()
        world.close()
        with pytest.raises(weft.WeftError, match="closed"):
            node.check()

    over_nodes(main)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ((3, 1), "its ranks are on 2 nodes, 3 . 1"),
        (4, "its ranks are on 4 nodes, 1 each"),
        (1, "its ranks are on one node"),
    ],
)
def test_no_levels(nodes: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    """cuBLAS and NCCL run everything, and the reason is logged once."""

    def main(world: World) -> None:
        with pytest.raises(Unsupported, match=f"no two levels: {says}"):
            _ = world.levels
        for _ in range(2):
            for op in OPS:
                assert case(world, op, [4] * 4, 32, 32, "two_level") < BOUND
                assert case(world, op, [4] * 4, 32, 32, TwoLevel(2)) < BOUND

    over_nodes(main, nodes)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (len(OPS) if nodes == 1 else 1) and all(says.replace(" . ", " + ") in line for line in lines)


def test_interleaved_nodes_have_no_levels() -> None:
    from weft.backends.nodes import why_no_levels

    assert why_no_levels((0, 0, 1, 1)) is None
    assert (
        why_no_levels((0, 1, 0, 1)) == "its ranks are on 2 nodes, 2 each, and those of a node do not follow each other"
    )


# -- the choice of the plan --------------------------------------------------------------------------------------------
def test_the_chosen_plans(caplog: pytest.LogCaptureFixture) -> None:
    """A plan for a single node runs as sequential here. "auto" also runs as sequential if nothing was timed and ranks
    have many programs. A plan that a trial chose is kept. An op without a two-level plan raises an error that says
    this."""

    def main(world: World) -> None:
        op = REGISTRY["all_gather_matmul"]
        call = op.check(world, op.typed((draw(1, 4, 32), draw(2, 32, 32))), (None, 0, False, None, None, False))

        def chosen(plan: str | Plan) -> Plan:
            return op.choose(world, call, plan, False)

        assert chosen("two_level") == chosen(TwoLevel()) == TwoLevel() and chosen(TwoLevel(3)) == TwoLevel(3)
        assert chosen("sequential") == chosen("fused") == chosen(Decomposed()) == Sequential()
        assert chosen("auto") == TwoLevel()
        choice = op.choice(world, call, ())
        assert choice.candidates() == [TwoLevel(), TwoLevel(2)]
        scale, world.backend.scale = world.backend.scale, type(world.backend.scale)()
        assert chosen("auto") == Sequential()
        trial = type("Found", (), {"faster": {"eager": (TwoLevel(2),), "graph": ()}})()
        world.choices.trials[choice.key] = trial
        assert chosen("auto") == TwoLevel(2) and op.choose(world, call, "auto", True) == Sequential()
        world.backend.scale = scale
        moe = REGISTRY["gathered_attention"]
        assert moe.choose(world, call, "segmented", False) == Sequential()

    over_nodes(main)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "all_gather_matmul: sequential instead of fused: its ranks are on 2 nodes, 2 each"
    assert "gathered_attention on this World runs by its sequential plan: its ranks are on 2 nodes, 2 each" in lines[-1]


@pytest.mark.parametrize("plan", ["auto", "two_level"])
def test_scales_do_not_go_between_nodes(plan: str, caplog: pytest.LogCaptureFixture) -> None:
    """Calls with 8-bit operands, and norms that return scales, run as sequential between nodes."""

    def main(world: World) -> None:
        for op in OPS[:3]:
            assert fp8_case(world, op, [4] * 4, 32, 128, "row", plan) < BOUND
        x, weight = draw(1, 8, 128), draw(2, 128)
        y, same = (
            weft.all_reduce_rms_norm_quantized(x, None, weight, "row", world=world, plan=norm_plan)[0]
            for norm_plan in (plan, "sequential")
        )
        assert torch.equal(y.values.view(torch.uint8), same.values.view(torch.uint8)) and torch.equal(
            y.scales, same.scales
        )

    over_nodes(main)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (4 if plan == "two_level" else 0), messages
    assert all("sequential instead of two_level" in message and "between nodes" in message for message in messages)


@pytest.mark.parametrize(("us", "plan"), [(80.0, TwoLevel(2)), (100.0, Sequential())])
def test_auto_chooses_the_plan_measured_faster(us: float, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL over all ranks takes 100 us, and the two-level plan in one piece takes 120 us."""

    def time(self: Chooser, choice: Choice[Plan], plan: Plan, *rest: Any) -> CallTime:
        world: Any = self.ranks
        took = us if plan == TwoLevel(2) else 120.0 if isinstance(plan, TwoLevel) else 100.0
        return CallTime(took if world.size == 4 else 1.0, 1.0)

    monkeypatch.setattr(Chooser, "time", time)
    monkeypatch.setattr(EmulatedBackend, "clock", staticmethod(lambda *_: pytest.fail("really timed")))

    def main(world: World) -> set[Plan]:
        assert case(world, "matmul_reduce_scatter", [4] * 4, 32, 32, "auto", calls=2) < BOUND
        return {call.plan for call in world.decided.values() if isinstance(call, Prepared)}

    assert over_nodes(main, sm_count=32) == [{plan}] * 4


def test_the_plan_as_text() -> None:
    assert Plan.from_json(TwoLevel(3).to_json()) == plan_of(text_of(TwoLevel(3))) == TwoLevel(3)
    for piece_count in (0, -1):
        with pytest.raises(ValueError, match="pieces"):
            TwoLevel(piece_count)
    with pytest.raises(ValueError, match="pieces means nothing to this op"):
        REGISTRY["matmul_all_to_all"].check_plan(TwoLevel(2))


# -- memory of another node --------------------------------------------------------------------------------------------
@weft.jit
def store_one(word):
    tl.store(word, 1)


def reach(world: World, how: str, shared: dict[int, torch.Tensor]) -> None:
    shared[world.rank] = world.zeros((4,), torch.int32)
    world.exchange("allocated")
    if world.rank == 1:
        stream, peer_memory = world.current_stream(), shared[2]
        if how == "copy":
            world.copy(shared[1], peer_memory, stream)
        elif how == "call":
            world.call(lambda: peer_memory.add_(1), [peer_memory], [peer_memory], stream)
        elif how == "signal":
            world.signal(peer_memory[:1], shared[1][:1], stream)
        elif how == "wait":
            world.wait(peer_memory[:1], shared[1][:1], stream)
        else:
            world.launch(store_one, 1, dict(word=peer_memory), dict(num_warps=1), stream)
    world.synchronize()


@pytest.mark.parametrize("how", ["copy", "call", "signal", "wait", "kernel"])
def test_memory_of_another_node_is_out_of_reach(how: str) -> None:
    shared: dict[int, torch.Tensor] = {}
    with pytest.raises(MemoryFault, match=r"by rank 1: rank 1 is on node 0, rank 2 on node 1, and between nodes only"):
        over_nodes(lambda world: reach(world, how, shared))
    over_nodes(lambda world: reach(world, how, shared), nodes=1)


def test_collectives_between_nodes_are_events() -> None:
    """A rank may read the data once the transfer has ended, and nothing else orders the read. The emulator detects a
    rank that does not wait for the transfer."""

    def main(world: World, wait: bool) -> None:
        across, stream, side = world.levels.across, world.current_stream(), world.side_stream("side")
        local, all_of = world.empty((4,), torch.float32), world.empty((8,), torch.float32)
        kept = world.empty((8,), torch.float32)
        world.call(lambda: local.fill_(world.rank), [], [local], stream)
        world.wait_event(side, world.record(stream))
        across.all_gather(all_of, local, side)
        if wait:
            world.wait_event(stream, world.record(side))
        world.copy(kept, all_of, stream)
        world.synchronize()
        assert kept.tolist() == [world.rank % 2] * 4 + [world.rank % 2 + 2] * 4

    over_nodes(lambda world: main(world, True))
    with pytest.raises((weft.Race, MemoryFault)):
        for seed in range(8):
            over_nodes(lambda world: main(world, False), seed=seed)


# -- every barrier removed once ----------------------------------------------------------------------------------------
BARRIERS = [
    (str(module.__file__), line)
    for module in (of_products, of_sums, of_exchanges)
    for line, text in enumerate(Path(str(module.__file__)).read_text().splitlines(), 1)
    if ".barrier(" in text
]


def everything(world: World) -> None:
    """Call every op that has barriers several times over the same memory, on ranks that continue at once."""
    caller = Caller(world)
    for i in range(3):
        caller.reduce(i, 9, 16, 32, TwoLevel(2), True)
    for i in range(3):
        caller.norm(10 + i, 7, 64, TwoLevel(2), i == 1)
    caller.check()
    to_ranks(TwoLevel(), (9, 6, 7, 8))(world)


def without_barrier(place: tuple[str, int] | None, seed: int) -> None:
    """Run `everything` without the barrier on a given line of a file."""

    def main(world: World) -> None:
        node = world.levels.node
        barrier = node.barrier

        def kept(stream: Any) -> None:
            caller = sys._getframe(1)
            if (caller.f_code.co_filename, caller.f_lineno) != place:
                barrier(stream)

        node.barrier = kept  # type: ignore[method-assign, assignment]
        everything(world)

    over_nodes(main, seed=seed, ahead=True)


@pytest.mark.gate
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", [None, *BARRIERS])
def test_every_barrier_is_needed(place: tuple[str, int] | None) -> None:
    """With all barriers, the whole run succeeds."""
    if place is None:
        assert len(BARRIERS) == 5
        for seed in range(4):
            without_barrier(place, seed)
        return
    for seed in range(64):
        try:
            without_barrier(place, seed)
        except (weft.Race, weft.Deadlock, MemoryFault, AssertionError):
            return
    raise AssertionError(f"the barrier at {place} is not needed")
