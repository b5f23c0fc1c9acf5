"""GEMM + all-to-all with routing on the device, on emulated ranks. The tests compare results and gradients with torch,
also under torch.compile, mutate every step of its protocol, and compile its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from tests.emulated import test_mutation as mutation
from tests.emulated.cases import changed, draw, on_stream
from tests.emulated.cases_matmul_all_to_all_routed import (
    DRAWS,
    MIXED,
    Caller,
    Draw,
    none,
    routed_case,
    some_nowhere,
    uniform,
)
from tests.emulator.mutate import Mutation
from tests.gates import some
from tests.offline import test_offline as offline
from weft import World
from weft.check import ptx
from weft.check.offline import compile_kernel
from weft.ops.matmul_all_to_all_routed.kernels import half_address, number_rows, receive_rows, return_rows
from weft.plans import FusedAllToAll, GemmTile, Plan
from weft.scale import SMALL_ALL_TO_ALL
from weft.torch_library import plan_of, text_of

BF, HALF = torch.bfloat16, torch.float16
BOUND = 5e-3
WIDE = changed(SMALL_ALL_TO_ALL, block_m=32, block_n=16, block_k=16, group_m=1)


def emulate(fn: Callable[[World], Any], ranks: int, seed: int = 0, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", seed=seed, **options)


def worst(
    ranks: int, m: int, n: int, k: int, plan: str | Plan, seed: int = 0, preempt: float = 0.05, **case: Any
) -> float:
    return max(
        emulate(lambda world: routed_case(world, m, n, k, plan, seed=seed, **case), ranks, seed, preempt=preempt)
    )


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["sequential", "fused", WIDE], ids=["sequential", "fused", "other tiles"])
@pytest.mark.parametrize("ranks", some([1, 2, 3, 4], 2))
def test_routings_that_change_from_call_to_call(ranks: int, plan: str | Plan) -> None:
    for i, (m, n, k) in enumerate(((37, 40, 40), (1, 8, 8), (150, 16, 24), (16, 72, 72))):
        case: dict[str, Any] = dict(bias=i % 2 == 0, gradient=i != 1, into=i == 1, dtype=(BF, HALF)[i == 2])
        assert worst(ranks, m, n, k, plan, seed=i, **case) < BOUND


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("ranks", some([2, 4]))
def test_kinds_of_routings(ranks: int, draws: Draw) -> None:
    assert worst(ranks, 45, 24, 16, "fused", draws=[draws], calls=3, gradient=True) < BOUND


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", some(range(10)))
def test_schedules(seed: int, ranks: int) -> None:
    """Many calls with and without gradients, of two sizes that share their memory, run without synchronisation."""

    def main(world: World) -> float:
        callers = [Caller(world, m, 24, 24, "fused", BF) for m in (35, 20)]
        rng = mutation.random.Random(seed)
        for call in range(6):
            caller = callers[call % 4 == 3]
            routing = MIXED[(call + seed) % len(MIXED)](rng, world.size, caller.sizes[0])
            caller.call(call, routing, bias=call % 2 == 0, gradient=call % 3 == 1)
        return max(caller.error() for caller in callers)

    assert max(emulate(main, ranks, seed, preempt=0.2)) < BOUND


def test_the_arena_is_shared_with_other_ops() -> None:
    """Calls of other ops and of this op alternate in the halves of the arena."""

    def main(world: World) -> float:
        caller, rng = Caller(world, 32, 40, 40, "fused", BF), mutation.random.Random(1)
        x, w = draw(world.rank, 32, 64), draw(9, 40, 64) * 0.1
        outs = []
        for call in range(6):
            caller.call(call, uniform(rng, world.size, 32), gradient=call == 3)
            op = (weft.matmul_all_reduce, weft.all_gather_matmul)[call % 2]
            outs.append((op, op(x, w, world=world, plan="fused")))
        world.synchronize()
        wanted = {op: op(x, w, world=world, plan="sequential") for op, _ in outs}
        assert all(mutation.distance(y, wanted[op].double()) < BOUND for op, y in outs)
        return caller.error()

    for seed in range(4):
        assert max(emulate(main, 2, seed, preempt=0.1)) < BOUND


def test_the_same_call_has_the_same_bits() -> None:
    def main(world: World) -> list[torch.Tensor]:
        x, w = draw(world.rank, 50, 24).requires_grad_(), draw(7, 16, 24).requires_grad_()
        destinations = torch.arange(50, dtype=torch.int32) * 7 % (world.size + 1) - 1
        out, counts = weft.matmul_all_to_all_routed(x, w, destinations=destinations, world=world, plan="fused")
        return [out.detach(), counts, *torch.autograd.grad(out, (x, w), draw(3, *out.shape))]

    wanted = emulate(main, 3)
    for seed in range(1, 5):
        for of_rank, wanted_of_rank in zip(emulate(main, 3, seed, preempt=0.2), wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(of_rank, wanted_of_rank, strict=True))


@pytest.mark.parametrize("plan", ["sequential", "fused"])
def test_no_rows(plan: str) -> None:
    def main(world: World) -> None:
        x, w, b = torch.zeros(0, 16, dtype=BF), draw(1, 24, 16), draw(2, 24)
        nothing = torch.zeros(0, dtype=torch.int32)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        out, counts = weft.matmul_all_to_all_routed(*leaves, destinations=nothing, world=world, plan=plan)
        assert out.shape == (world.size, 0, 24) and counts.tolist() == [0] * world.size
        dx, dw, db = torch.autograd.grad(out, leaves, torch.zeros_like(out))
        assert dx.shape == (0, 16) and not dw.any() and not db.any() and dw.shape == (24, 16)

    emulate(main, 2)


@pytest.mark.parametrize("plan", ["sequential", "fused"])
def test_operands_that_are_not_contiguous_and_out_that_holds_one(plan: str) -> None:
    def main(world: World) -> None:
        m, n, k, size = 24, 16, 8, world.size
        x, w, d = draw(world.rank, m, k), draw(5, n, k), torch.arange(m, dtype=torch.int32) % size
        wanted, _ = weft.matmul_all_to_all_routed(x, w, destinations=d, world=world, plan="sequential")
        strided = torch.stack([d, -d], 1)[:, 0]
        holder = torch.zeros(size, m, n, dtype=BF)
        inside = holder.view(-1)[8 : 8 + m * k].view(m, k)
        inside.copy_(x)
        out, _ = weft.matmul_all_to_all_routed(
            inside, w.t().contiguous().t(), destinations=strided, world=world, plan=plan, out=holder
        )
        world.synchronize()
        assert out is holder and mutation.distance(out, wanted.double()) < BOUND

    emulate(main, 2)


@pytest.mark.parametrize("needs", [("x",), ("w",), ("b",), ("w", "b")], ids=str)
@pytest.mark.parametrize("plan", ["sequential", "fused"])
def test_gradients_of_some_operands(plan: str, needs: tuple[str, ...]) -> None:
    """Requested gradients are the same as in a call that requests all gradients; the gradients that were not requested
    are None."""

    def main(world: World) -> None:
        tensors = dict(x=draw(world.rank, 20, 16), w=draw(3, 24, 16), b=draw(4, 24))
        d = torch.arange(20, dtype=torch.int32) * 3 % (world.size + 1)

        def gradients(names: Iterable[str]) -> dict[str, torch.Tensor]:
            leaves = {name: t.detach().clone().requires_grad_(name in names) for name, t in tensors.items()}
            out, _ = weft.matmul_all_to_all_routed(*leaves.values(), destinations=d, world=world, plan=plan)
            out.backward(draw(9, *out.shape))
            assert all((t.grad is None) == (name not in names) for name, t in leaves.items())
            return {name: leaves[name].grad for name in names}  # type: ignore[misc]

        wanted = gradients(tensors)
        assert all(torch.equal(t, wanted[name]) for name, t in gradients(needs).items())

    emulate(main, 2)


# -- plans, errors, captures -------------------------------------------------------------------------------------------


def test_auto_is_fused_where_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    def plans(world: World) -> list[type[Plan]]:
        plan_classes: list[type[Plan]] = []
        for n, k in ((16, 24), (12, 24), (16, 20)):
            x, w, d = draw(1, 8, k), draw(2, n, k), torch.zeros(8, dtype=torch.int32)
            for asked in ("auto", "fused", "fused"):
                weft.matmul_all_to_all_routed(x, w, destinations=d, world=world, plan=asked)
                plan_classes.append(type(world.ran.plan))
        return plan_classes

    with caplog.at_level(logging.WARNING, "weft"):
        (plan_classes, _) = emulate(plans, 2)
    assert [p.__name__ for p in plan_classes] == ["FusedAllToAll"] * 3 + ["Sequential"] * 6
    lines = [r.getMessage() for r in caplog.records if "sequential instead of fused" in r.getMessage()]
    assert len(lines) == 2 and "N 12" in lines[0] and "K 20" in lines[1]
    assert emulate(plans, 1)[0][0].__name__ == "Sequential"


def test_ranks_on_two_nodes_are_sequential() -> None:
    assert max(emulate(lambda world: routed_case(world, 20, 16, 16, "auto", gradient=True), 4, nodes=2)) < BOUND


def test_errors_quote_the_arguments() -> None:
    def main(world: World) -> None:
        x, w, d = draw(0, 20, 24), draw(1, 40, 24), torch.zeros(20, dtype=torch.int32)
        fn: Any = weft.matmul_all_to_all_routed
        reduce_scatter_plan = weft.plans.FusedReduceScatter()
        for error, says, call in (
            (TypeError, r"destinations \[20\] int64.*must be torch.int32", lambda: fn(x, w, destinations=d.long(), world=world)),
            (ValueError, r"destinations \[19\].*must be \[20\]", lambda: fn(x, w, destinations=d[1:], world=world)),
            (TypeError, "destinations must be a tensor", lambda: fn(x, w, destinations=[0] * 20, world=world)),
            (TypeError, "destinations must be a tensor, got None", lambda: fn(x, w, destinations=None, world=world)),
            (ValueError, r"x \[20, 24\].*weight \[40, 16\]|weight \[40, 16\]", lambda: fn(x, w[:, :16], destinations=d, world=world)),
            (TypeError, "one dtype", lambda: fn(x, w.half(), destinations=d, world=world)),
            (TypeError, "bfloat16 and float16", lambda: fn(x.float(), w.float(), destinations=d, world=world)),
            (ValueError, "out", lambda: fn(x, w, destinations=d, world=world, out=draw(1, 2, 20, 39))),
            (ValueError, "out= has no gradient", lambda: fn(x.detach().requires_grad_(), w, destinations=d, world=world, out=draw(1, 2, 20, 40))),
            (ValueError, "signaled.*fused.*sequential", lambda: fn(x, w, destinations=d, world=world, plan="signaled")),
            (ValueError, "not one of", lambda: fn(x, w, destinations=d, world=world, plan=reduce_scatter_plan)),
            (TypeError, "World", lambda: fn(x, w, destinations=d, world=None)),
        ):  # fmt: skip
            with pytest.raises(error, match=says):
                call()

    emulate(main, 2)


@pytest.mark.parametrize("plan", ["sequential", "fused"])
def test_ranks_that_disagree(plan: str) -> None:
    """Ranks disagree on the number of rows, or on the plan. A bias or a gradient on one rank alone does not affect the
    other ranks."""

    def main(world: World) -> None:
        m = 16 + 8 * world.rank
        x, w, d = draw(1, m, 16), draw(2, 16, 16), torch.zeros(m, dtype=torch.int32)
        with pytest.raises(weft.Mismatch, match="m=16.*m=24"):
            weft.matmul_all_to_all_routed(x, w, destinations=d, world=world, plan=plan)
            world.synchronize()

    emulate(main, 2)

    def alike(world: World) -> None:
        x, w, d = draw(1, 16, 16), draw(2, 16, 16), torch.zeros(16, dtype=torch.int32)
        x.requires_grad_(world.rank == 1)
        bias = w[0] if world.rank else None
        out, counts = weft.matmul_all_to_all_routed(x, w, bias, destinations=d, world=world, plan=plan)
        assert out.requires_grad == (world.rank == 1) and not counts.requires_grad

    emulate(alike, 2)


@pytest.mark.parametrize("plan", ["sequential", "fused", "auto"])
def test_a_capture_allocates_and_compares_nothing(plan: str) -> None:
    """After an eager step, forward and backward passes run as in a capture, with different routings."""

    def main(world: World) -> float:
        caller, rng = Caller(world, 24, 16, 16, plan, BF), mutation.random.Random(2)
        backend: Any = world.backend
        for call in range(5):
            caller.call(call, some_nowhere(rng, world.size, 24), bias=True, gradient=True)
            if call == 1:
                backend.capturing, backend.captures = lambda: True, lambda stream: True
                backend.exchange = backend.symmetric = None  # a call of either method raises an error
        del backend.exchange, backend.symmetric
        return caller.error()

    assert max(emulate(main, 2)) < BOUND


def test_a_plan_is_text_and_back() -> None:
    plan = FusedAllToAll(tile=GemmTile(block_n=128))
    assert Plan.from_json(plan.to_json()) == plan and plan_of(text_of(plan)) == plan


# -- torch.compile -----------------------------------------------------------------------------------------------------


def step(
    world: World, fn: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, d: torch.Tensor
) -> list[torch.Tensor]:
    """Return the results of a function of leaves, and the gradients of the leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    out, counts = fn(*leaves, d)
    gradients = torch.autograd.grad(out, leaves, draw(5, *out.shape).to(out))
    world.synchronize()
    return [out.detach().clone(), counts.clone(), *gradients]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("plan", ["sequential", "fused", SMALL_ALL_TO_ALL], ids=["sequential", "fused", "a plan"])
def test_a_compiled_graph(plan: str | Plan, dynamic: bool) -> None:
    """Two calls and their gradients form one graph without a break. New destinations need no new graph, and the number
    of rows may be symbolic."""

    def main(world: World) -> None:
        graphs = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, counts = weft.matmul_all_to_all_routed(x, w, b, destinations=d, world=world, plan=plan)
            rows = out.view(-1, w.shape[0])[: d.shape[0]]
            again, _ = weft.matmul_all_to_all_routed(rows, w, destinations=d, world=world, plan=plan)
            return out + again, counts

        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic or None)
        for call, m in enumerate((24, 24, 40) if dynamic else (24, 24)):
            x, w, b = draw(world.rank + call, m, 16), draw(2, 16, 16) * 0.1, draw(3, 16)
            d = (torch.arange(m, dtype=torch.int32) * (call + 2) + world.rank) % (world.size + 1) - 1
            for eager, graph_result in zip(step(world, fn, x, w, b, d), step(world, compiled, x, w, b, d), strict=True):
                assert torch.equal(eager, graph_result)
            with torch.no_grad():
                assert all(torch.equal(a, b) for a, b in zip(fn(x, w, b, d), compiled(x, w, b, d), strict=True))
        assert len(graphs) == 2, "one graph with gradients and one without"

    emulate(main, 2)


def test_fakes_have_the_shapes_of_the_real() -> None:
    def main(world: World) -> None:
        name, ops = world.name, torch.ops.weft
        x, w, b = draw(1, 10, 16), draw(2, 24, 16), draw(3, 24)
        d = torch.arange(10, dtype=torch.int32) % world.size
        dout, counts = draw(4, world.size, 10, 24), torch.full((world.size,), 2, dtype=torch.int32)
        targets = torch.full((10,), -1, dtype=torch.int32)
        sizes = [10, 16, 24, 16, 24, 10], [2, 2, 1, 1], "torch.bfloat16 torch.bfloat16 torch.bfloat16 torch.int32"
        needs = [True, True, True, False]
        for op, args in (
            (ops.matmul_all_to_all_routed, (x, w, b, d, False, name, "fused")),
            (ops.matmul_all_to_all_routed, (x, w, b, d, True, name, "fused")),
            (ops.matmul_all_to_all_routed_backward, ([x, w, counts, targets], [dout, None], *sizes, needs, name, "fused", True)),
        ):  # fmt: skip
            with torch.no_grad():
                real = op(*args)
            mode = FakeTensorMode()

            def fake_of(a: Any, mode: FakeTensorMode = mode) -> Any:
                if isinstance(a, list):
                    return [fake_of(item) for item in a]
                return mode.from_tensor(a.detach()) if isinstance(a, torch.Tensor) else a

            fakes = [fake_of(a) for a in args]
            with mode:
                fake = op(*fakes)
            for a, faked in zip(real, fake, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (faked.shape, faked.dtype, faked.stride()), op

    emulate(main, 2)


def test_opcheck() -> None:
    def main(world: World) -> None:
        x, w, b = (t.requires_grad_() for t in (draw(1, 10, 16), draw(2, 24, 16), draw(3, 24)))
        args = (x, w, b, torch.zeros(10, dtype=torch.int32), True, world.name, "auto")
        tests = ("test_schema", "test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.weft.matmul_all_to_all_routed.default, args, test_utils=tests)

    emulate(main, 1)


# -- mutation ----------------------------------------------------------------------------------------------------------


def calls(**case: Any) -> mutation.Main:
    def main(world: World) -> None:
        assert routed_case(world, 37, 40, 40, "fused", bias=True, **case) < BOUND

    return main


def on_two_streams(gradient: bool) -> mutation.Main:
    """Alternate calls between two streams. No call drains its stream, as on a GPU."""

    def main(world: World) -> None:
        callers = {name: Caller(world, 37, 40, 40, "fused", BF) for name in ("first", "second")}
        rng = mutation.random.Random(1)
        for call in range(6):
            name = ("first", "second")[call % 2]
            with on_stream(world, name):
                callers[name].call(call, uniform(rng, world.size, 37), gradient=gradient)
        assert max(caller.error() for caller in callers.values()) < BOUND

    return main


ONE_HALF = mutation.instead(
    half_address, "use one half of the arena in every call", ("tl.load(inbox.epoch) & 1", "0 * tl.load(inbox.epoch)")
)
OLD = "calls_of(ch) * ARRIVALS", "(calls_of(ch) - 1) * ARRIVALS"
OLD_ROWS = mutation.instead(receive_rows, "wait for the previous call's rows", OLD)
OLD_GRADIENTS = mutation.instead(return_rows, "wait for the previous call's gradients", OLD)
OTHER_SOURCE = mutation.instead(
    receive_rows, "wait for the next source", ("ch.counters + source", "ch.counters + (source + 1) % W")
)
ROWS_OF_TWO_BLOCKS = mutation.instead(
    number_rows, "number the rows before the block without those of its predecessor",
    ("block * BLOCK", "(block - 1) * BLOCK"),
)  # fmt: skip
FORWARD = [ONE_HALF, OLD_ROWS, ROWS_OF_TWO_BLOCKS]
MUTATED: dict[str, tuple[mutation.Case, list[Mutation]]] = {
    "routed": (mutation.Case(calls(calls=4), 2), FORWARD),
    "routed, three ranks": (mutation.Case(calls(calls=4, draws=(none, uniform)), 3), [*FORWARD, OTHER_SOURCE]),
    "routed, gradients": (mutation.Case(calls(calls=4, gradient=True), 2), [*FORWARD, OLD_GRADIENTS]),
    "routed, two streams": (mutation.Case(on_two_streams(False), 2, kernels=False, ahead=True), []),
    "routed, gradients, two streams": (mutation.Case(on_two_streams(True), 2, kernels=False, ahead=True), []),
}
END_OF_CALL = [
    mutation.Equivalent(
        (), "make flush_stores(...) not wait for bulk stores", "flush_stores(True)", "there are no bulk stores", "end_call"
    ),
    mutation.Equivalent(
        (), "remove tl.store(...)", "tl.store(ch.state + TICKET, 0)", "these kernels draw no tickets"
    ),
]  # fmt: skip


@pytest.mark.gate
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTATED)
def test_every_mutation_is_caught(name: str, record_property: Callable[[str, object], None]) -> None:
    case, epochs = MUTATED[name]
    equivalent = list(END_OF_CALL) if case.kernels else []
    mutation.every_mutation_is_caught(name, case, epochs, equivalent, record_property)


# -- compiled ----------------------------------------------------------------------------------------------------------

COMPILED = {  # ranks, m, n, k, dtype, bias, plan
    "x8": (8, 512, 4096, 2048, BF, True, FusedAllToAll()),
    "x2": (2, 4096, 7168, 2048, BF, False, FusedAllToAll()),
    "odd": (4, 300, 520, 264, HALF, True, FusedAllToAll(tile=GemmTile(block_n=128, warps=4, stages=4))),
    "half tiles": (2, 1000, 512, 8, HALF, True, FusedAllToAll(tile=GemmTile(block_m=64, warps=4, stages=4))),
    "narrow": (2, 1000, 16, 8, HALF, False, FusedAllToAll()),
    "x32": (32, 1, 512, 256, BF, False, FusedAllToAll()),
}
AWAITED = {"receive_rows": ("tl.load(src +", "tl.load(counts_here"), "return_rows": ("tl.load(rows +",)}


def launching(name: str) -> Callable[[World], None]:
    _, m, n, k, dtype, bias, plan = COMPILED[name]

    def main(world: World) -> None:
        x, w = torch.empty(m, k, dtype=dtype).requires_grad_(), torch.empty(n, k, dtype=dtype)
        b, d = torch.empty(n, dtype=dtype) if bias else None, torch.empty(m, dtype=torch.int32)
        out, _ = weft.matmul_all_to_all_routed(x, w, b, destinations=d, world=world, plan=plan)
        torch.autograd.grad(out, x, torch.empty_like(out))

    return main


@pytest.mark.gate
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    by_rank, plan = offline.launches(launching(name), COMPILED[name][0]), COMPILED[name][-1]
    assert [launch.kernel.__name__ for launch in by_rank[0]] == [
        "number_rows",
        "gemm_to_ranks",
        "receive_rows",
        "return_rows",
    ]
    for launch in by_rank[0]:
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        kernel, steps = launch.kernel.__name__, ptx.steps_of(k.ptx)
        record_property("kernel", (f"routed all-to-all, {name}: {kernel}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == (kernel == "gemm_to_ranks")

        def waits(instruction: Any, texts: tuple[str, ...] = AWAITED.get(kernel, ())) -> bool:
            return any(text in instruction.source for text in texts)

        for text in AWAITED.get(kernel, ()):
            assert any(text in s.source for s in steps), text
        assert ptx.broken_rules(k.ptx, waits) == []
        assert ptx.signals_not_by_thread_zero(k.ptx) == [] and ptx.signals_outside_first_warp(k.ptx) == []
        rows = [s for s in steps if "st.global" in s.text and "tl.store(row +" in s.source]
        rows += [s for s in steps if "st.global" in s.text and "tl.store(dst +" in s.source]
        rows += [s for s in steps if "st.global" in s.text and "tl.store(returned +" in s.source]
        assert (rows or kernel == "number_rows") and all("v4.b32" in s.text for s in rows), [str(s) for s in rows][:2]
        if kernel == "gemm_to_ranks":
            assert sum("cp.async.bulk.tensor.2d.shared" in s.text for s in steps) == 2 * plan.tile.stages
    for others in by_rank[1:]:
        for a, b in zip(by_rank[0], others, strict=True):
            assert offline.specialised(a) == offline.specialised(b)


def test_other_rows_are_the_same_kernels() -> None:
    """Kernels are not specialised by the number of rows, although Triton specialises integer arguments for 1 and for
    multiples of 16."""

    def kernels(m: int) -> list[Any]:
        COMPILED["rows"] = replaced = (2, m, 512, 256, BF, True, FusedAllToAll())
        assert replaced[1] == m
        return [offline.specialised(launch)[3] for launch in offline.launches(launching("rows"), 2)[0]]

    wanted = kernels(48)
    COMPILED.pop("rows")
    for m in (1, 33):
        assert kernels(m) == wanted
        COMPILED.pop("rows")
