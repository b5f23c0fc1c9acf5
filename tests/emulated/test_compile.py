"""The ops run as torch.library operators, and their graphs under torch.compile must have no break.

The tests in this file do not need Inductor: "aot_eager" traces through the fake implementations and the registered
gradients, and then runs the ops. Ranks compile one after the other, each on its own thread.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_fp8 import factors
from tests.emulated.cases_nn import compiled_ops, compiled_out, emulate, mlp_training
from tests.gates import some
from weft.lang.mapping import balanced_rows
from weft.ops.matmul_reduce.op import MatmulAllReduce
from weft.plans import (
    Decomposed,
    FusedGatherByCopies,
    FusedMoe,
    LowLatency,
    Plan,
    Sequential,
)
from weft.scale import SMALL_ALL_REDUCE, SMALL_GATHER
from weft.torch_library import LIBRARY, plan_of, text_of

NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "silu_mul")


def samples(world: weft.World) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return operators and their arguments: the differentiable operators, then the backward passes of some of them."""
    ops, name, w = torch.ops.weft, world.name, world.size

    def t(*shape: int) -> torch.Tensor:
        return draw(sum(shape) + world.rank, *shape)

    def p(*shape: int) -> torch.Tensor:
        return t(*shape).requires_grad_()

    rows = [8 + 2 * (r == 0) for r in range(w)]
    m_local, m = rows[world.rank], sum(rows)
    text = text_of(SMALL_GATHER)
    x8, w8, xs, ws = factors(1, 7, 24, 256, "row", world.device)
    eight_bits = x8, w8, None, xs, ws
    norm = t(7, 16), t(balanced_rows(7, w)[world.rank], 16), t(16), None, None

    def grads(
        op: Any, saved: list[Any], dys: list[Any], shapes: list[list[int]], needs: list[bool], plan: str, *options: Any
    ) -> Any:
        sizes, dims = [n for shape in shapes for n in shape], [len(shape) for shape in shapes]
        dtypes = " ".join("torch.bfloat16" if shape else "none" for shape in shapes)
        return op, (saved, dys, sizes, dims, dtypes, needs, name, plan, *options)

    gather, scatter, all_reduce = ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce
    weight, bias, unscaled = [24, 16], [24], (None, None)
    return [
        (gather, (p(8, 16), p(24, 16), p(24), *unscaled, None, 0, True, None, None, False, name, "auto")),
        (gather, (p(m_local, 16), p(24, 16), None, *unscaled, rows, 0, False, None, None, False, name, text)),
        (scatter, (p(9, 16), p(24, 16), p(24), *unscaled, None, True, None, None, False, name, "auto")),
        (scatter, (p(m, 16), p(24, 16), p(24), *unscaled, rows, True, None, None, False, name, "auto")),
        (all_reduce, (p(9, 16), p(24, 16), p(24), *unscaled, True, None, None, False, name, "auto")),
        (ops.silu_mul, (p(10, 64), 24, 16, name, "auto")),
        (gather, (t(8, 16), t(64, 16), None, *unscaled, None, 24, False, None, None, False, name, "auto")),
        (gather, (*eight_bits, None, 0, True, "row", None, False, name, "auto")),
        (scatter, (*eight_bits, None, True, "row", torch.float16, True, name, "auto")),
        (all_reduce, (*eight_bits, True, "row", None, False, name, "auto")),
        grads(
            ops.all_gather_matmul_backward, [t(8 * w, 16), t(24, 16)], [t(8 * w, 24), t(8 * w, 16), None],
            [[8, 16], weight, bias, [], []], [True] * 3 + [False] * 2, "auto", None, 0, True, None, None, False,
        ),
        grads(
            ops.all_gather_matmul_backward, [t(m_local, 16), None], [t(m, 24), None, None],
            [[m_local, 16], weight, [], [], []], [False, True, False, False, False], text, rows, 0, False, None, None, False,
        ),
        grads(
            ops.matmul_reduce_scatter_backward, [t(m, 16), t(24, 16)], [t(m_local, 24)],
            [[m, 16], weight, bias, [], []], [True] * 3 + [False] * 2, "auto", rows, True, None, None, False,
        ),
        grads(
            ops.matmul_all_reduce_backward, [t(9, 16), t(24, 16)], [t(9, 24)],
            [[9, 16], weight, bias, [], []], [True, False, True, False, False], "auto", True, None, None, False,
        ),
        grads(ops.silu_mul_backward, [t(10, 64)], [t(10, 24)], [[10, 64]], [True], "auto", 24, 16),
        (ops.rotary, (t(6, 32), t(1, 3, 8), t(2, 1, 3, 8)[0], t(8), t(8), 2, 1, 1e-6, name, text_of(Sequential()))),
        (ops.all_reduce, (t(7, 16), name, "auto")),
        (ops.all_reduce_rms_norm, (*norm, 1e-6, "rms", torch.bfloat16, False, None, name, "auto")),
        (
            ops.all_reduce_rms_norm,
            (t(7, 16), None, t(16), t(16), None, 1e-6, "layer", torch.float16, True, None, name, "auto"),
        ),
        (ops.all_reduce_rms_norm, (t(7, 256), None, t(256), None, None, 1e-6, "rms", None, True, "block", name, "auto")),
        (ops.quantize, (t(7, 256), None, "block", 128, 128, 1, False, name, text_of(Sequential()))),
        (ops.matmul, (*eight_bits, "row", None, True, name, "auto")),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fakes_have_the_shapes_of_the_real(ranks: int) -> None:
    def rank(world: weft.World) -> None:
        for op, args in samples(world):
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
            for a, b in zip(*(o if isinstance(o, tuple | list) else (o,) for o in (real, fake)), strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op

    emulate(rank, ranks)


WRONG = dict(dtype=lambda t: t.float(), rows=lambda t: t[:1].clone(), strides=lambda t: t.t().contiguous().t())


@pytest.mark.parametrize(
    ("wrong_property", "compiled"),
    [
        *((wrong_property, False) for wrong_property in WRONG),
        *some([(wrong_property, True) for wrong_property in WRONG]),
    ],
)
def test_a_graphs_out_must_suit_an_eager_call(wrong_property: str, compiled: bool) -> None:
    wrong = WRONG[wrong_property]

    def rank(world: weft.World) -> None:
        x, w, y = draw(1, 8, 64), draw(2, 32, 64), torch.zeros(8, 64).bfloat16()
        calls: list[tuple[Any, tuple[int, ...]]] = [
            (lambda out: weft.all_gather_matmul(x, w, world=world, out=out), (8 * world.size, 32)),
            (lambda out: weft.matmul_reduce_scatter(x, w, world=world, out=out), (8 // world.size, 32)),
            (lambda out: weft.matmul_all_reduce(x, w, world=world, out=out), (8, 32)),
            (lambda out: weft.all_reduce(x, world=world, out=out), (8, 64)),
            (lambda out: weft.all_reduce_rms_norm(x, None, w[0], world=world, out=out)[0], (8, 64)),
        ]
        for call, shape in calls:
            out = wrong(torch.zeros_like(y).resize_(shape))
            torch._dynamo.reset()
            with pytest.raises((ValueError, TypeError), match=r"\bout\b"):
                (torch.compile(call, backend="aot_eager") if compiled else call)(out)

    emulate(rank, 2)


def test_opcheck() -> None:
    """opcheck tests the schemas (nothing aliased or written), gradients, and AOT dispatch with symbolic shapes."""
    tests = ("test_schema", "test_autograd_registration", "test_aot_dispatch_dynamic")

    def rank(world: weft.World) -> None:
        for op, args in samples(world):
            schemas = (
                op != torch.ops.weft.quantize
                and "block" not in args
                and getattr(args[0], "dtype", None) != torch.float8_e4m3fn
            )
            # test_schema computes on copies of the tensors, and torch has no 8-bit arithmetic
            torch.library.opcheck(op.default, args, test_utils=tests if schemas else tests[1:])

    emulate(rank, 1)


def test_every_op_is_registered() -> None:
    assert LIBRARY.ns == "weft"
    for name in NAMES:
        assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.weft, name).default.tags
        assert hasattr(torch.ops.weft, f"{name}_backward")


def test_plans_travel_as_text() -> None:
    fused = SMALL_GATHER, FusedGatherByCopies(flatten=False), FusedMoe(), LowLatency()
    for plan in (*fused, Decomposed(), Decomposed((1, 1, 2)), Decomposed((4,)), Sequential()):
        assert plan_of(text_of(plan)) == plan
    assert text_of(Sequential()) == "Sequential"
    for text in ("auto", "fused"):
        assert plan_of(text_of(text)) == text


def test_numbers_of_a_plan_are_constants_in_a_graph_with_symbols() -> None:
    for plan in (SMALL_GATHER, Decomposed((1, 1, 2)), FusedMoe(), FusedGatherByCopies(flatten=False)):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, plan=plan: (x + 1, text_of(plan)), backend="eager", fullgraph=True, dynamic=True
        )
        assert compiled(torch.zeros(3))[1] == text_of(plan)


def test_plans_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may create plans outside the graph or inside it, and may change them between calls."""

    def rank(world: weft.World) -> None:
        seen: list[Any] = []
        choose = MatmulAllReduce.choose

        @torch.compile(backend="aot_eager", fullgraph=True)
        def fn(x: torch.Tensor, weight: torch.Tensor, plan: Any) -> torch.Tensor:
            y = weft.matmul_all_reduce(x, weight, world=world, plan=plan)
            return weft.matmul_all_reduce(y, weight, world=world, plan=Decomposed(groups=(2,)))

        def spy(op: Any, world: weft.World, call: Any, asked: Any, capturing: bool) -> Plan:
            if not capturing:
                seen.append(asked)
            return choose(op, world, call, asked, capturing)

        x, weight = draw(1, 8, 16), draw(2, 16, 16)
        monkeypatch.setattr(MatmulAllReduce, "choose", spy)
        for plan in (SMALL_ALL_REDUCE, Decomposed(), "sequential", "auto"):
            world.decided.clear()
            fn(x, weight, plan)
            assert seen == [plan, Decomposed((2,))]
            seen.clear()

    emulate(rank, 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_graph_of_all_ops(ranks: int) -> None:
    emulate(compiled_ops, ranks)


def test_graph_with_symbolic_rows() -> None:
    emulate(lambda world: compiled_ops(world, dynamic=True), 2)


def test_out_in_a_graph() -> None:
    emulate(compiled_out, 2)


@pytest.mark.parametrize("shards", [[16, 16], [20, 7]])
def test_compiled_mlp_trains(shards: list[int]) -> None:
    ratios = emulate(lambda world: mlp_training(world, shards, 64, 80, steps=2, rate=0.03, compiled="aot_eager"), 2)
    assert max(ratios) < 1.5, ratios


def test_errors() -> None:
    def rank(world: weft.World) -> None:
        x, w = draw(1, 8, 16), draw(2, 24, 16)
        with pytest.raises(RuntimeError, match="no World named 'elsewhere'"):
            torch.ops.weft.matmul_all_reduce(x, w, None, None, None, True, None, None, False, "elsewhere", "auto")
        with pytest.raises(RuntimeError, match="has no gradient"):
            options = None, 8, False, None, None, False, world.name, "auto"
            torch.ops.weft.all_gather_matmul(x.requires_grad_(), w, None, None, None, *options)

    emulate(rank, 1)


def test_worlds_of_other_sizes_have_other_names() -> None:
    """The names distinguish Worlds of equal rank and size in processes that share torch's cache of compiled graphs."""

    def main(world: weft.World) -> tuple[str, str]:
        return world.name, world.split(world.rank).name

    for size in (2, 4):
        assert all(name.endswith(f"/{size}") for name, _ in weft.spmd(main, size, backend="emulated"))
        assert all(name.endswith("/1") for _, name in weft.spmd(main, size, backend="emulated"))


def test_a_rank_compiles_once_for_any_number_of_ranks_and_runs() -> None:
    """torch.compile caches by the function's code, which is the same for all ranks."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(x: torch.Tensor, world: weft.World) -> torch.Tensor:
        return weft.all_reduce(x * 2, world=world) + 1

    def main(world: weft.World) -> float:
        compiled = torch.compile(step, fullgraph=True, backend=kept)
        return compiled(torch.ones(1, 8, dtype=torch.bfloat16), world).mean().item()

    sizes = 4, 5, 4
    for size in sizes:
        assert weft.spmd(main, size, backend="emulated") == [2 * size + 1] * size
    assert len(graphs) == sum({*sizes})
