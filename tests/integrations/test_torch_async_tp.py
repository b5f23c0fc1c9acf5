"""weft serves torch's fused operators. The tests call torch.ops.symm_mem on emulated ranks and over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_fp8 import dequantized, scaled
from tests.emulated.cases_nn import emulate
from tests.gates import some
from weft.integrations.torch_async_tp import (
    FUSED_GATHER,
    FUSED_SCATTER,
    NATIVE,
    SCALED_GATHER,
    SCALED_SCATTER,
    async_tp,
)
from weft.scaled_tensor import E4M3

BF16 = 1e-2
LAYOUTS = [((8, 32), 0), ((8, 3, 32), 0), ((3, 4, 32), 1), ((2, 4, 3, 32), 1)]  # shape of a rank's shard, dimension


def weights(count: int, rank: int, transposed: bool, n: int = 24) -> list[torch.Tensor]:
    matrices = [draw(40 + 10 * i + rank, n + 8 * i, 32) for i in range(count)]
    return [w.t() if transposed else w.t().contiguous() for w in matrices]


def as_fallback(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Gather along `dim`, with the strides that torch's fake implementation promises to compiled code."""
    return torch.cat([part.movedim(dim, 0) for part in parts]).contiguous().movedim(0, dim)


@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
@pytest.mark.parametrize(("count", "return_a"), [(1, False), (1, True), (3, False), (3, True)])
def test_all_gather(shape: tuple[int, ...], dim: int, count: int, return_a: bool) -> None:
    parts = [draw(rank, *shape) for rank in range(2)]
    whole = as_fallback(parts, dim)

    def rank(world: weft.World) -> float:
        bs = weights(count, world.rank, transposed=count == 1)
        a, ys = torch.ops.symm_mem.fused_all_gather_matmul(parts[world.rank], bs, dim, world.name, return_A=return_a)
        world.synchronize()
        assert (a is None) is not return_a and len(ys) == count
        if a is not None:
            assert torch.equal(a, whole) and a.stride() == whole.stride()
        errors = []
        for y, b in zip(ys, bs, strict=True):
            expected = (whole.movedim(dim, 0) @ b).movedim(0, dim)
            assert y.stride() == expected.stride(), "compiled code counts on it"
            errors.append(distance(y.double(), whole.double() @ b.double()))
        return max(errors)

    with async_tp() as counts:
        assert max(emulate(rank, 2)) < BF16
    assert counts.served == {FUSED_GATHER: 2} and not counts.fell_through


@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
@pytest.mark.parametrize(("transposed", "reduce_op"), [(True, "sum"), (False, "sum"), (True, "avg")])
def test_reduce_scatter(shape: tuple[int, ...], dim: int, transposed: bool, reduce_op: str) -> None:
    inputs = [draw(rank, *shape) for rank in range(2)]
    total = sum(x.double() @ weights(1, r, transposed)[0].double() for r, x in enumerate(inputs))

    def rank(world: weft.World) -> float:
        b = weights(1, world.rank, transposed)[0]
        y = torch.ops.symm_mem.fused_matmul_reduce_scatter(inputs[world.rank], b, reduce_op, dim, world.name)
        world.synchronize()
        assert y.is_contiguous(), "compiled code counts on it"
        return distance(y.double(), total.chunk(2, dim)[world.rank] / (2 if reduce_op == "avg" else 1))

    with async_tp() as counts:
        assert max(emulate(rank, 2)) < BF16
    assert counts.served == {FUSED_SCATTER: 2} and not counts.fell_through


def scaled_weight(seed: int, n: int, rowwise: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 8-bit weights [32, n], their scale in the layout of torch._scaled_mm, and their values."""
    w, scale = scaled(draw(seed, n, 32), "row" if rowwise else "tensor")
    return w.t(), scale.view(1, -1) if rowwise else scale, dequantized(w, scale).double().t()


@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_all_gather(shape: tuple[int, ...], dim: int, rowwise: bool, replicated: bool) -> None:
    whole = as_fallback([draw(rank, *shape) for rank in range(2)], dim)
    rows, scale = scaled(whole.reshape(-1, 32), "row" if rowwise else "tensor")
    rows, scale = rows.view(whole.shape), scale.view(*whole.shape[:-1], 1) if rowwise else scale
    values = rows.double() * scale.double()

    def rank(world: weft.World) -> float:
        ws = [scaled_weight(40 + 10 * i + world.rank, 24 + 8 * i, rowwise) for i in range(2)]
        own_rows = rows.chunk(2, dim)[world.rank].contiguous()
        own_scale = scale if replicated or not rowwise else scale.chunk(2, dim)[world.rank].contiguous()
        a, ys = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            own_rows, [w for w, _, _ in ws], own_scale, [s for _, s, _ in ws], dim, world.name, [None, draw(1, 32)], [None] * 2,
            [torch.bfloat16] * 2, [False, True],
        )  # fmt: skip
        world.synchronize()
        assert torch.equal(a.view(torch.uint8), rows.view(torch.uint8)) and a.stride() == whole.stride()
        wants = [values @ ws[0][2], values @ ws[1][2] + draw(1, 32).double()]
        for y in ys:
            assert (
                y.stride() == (whole.movedim(dim, 0) @ torch.zeros(32, y.shape[-1]).bfloat16()).movedim(0, dim).stride()
            )
        return max(distance(y.double(), expected) for y, expected in zip(ys, wants, strict=True))

    with async_tp() as counts:
        assert max(emulate(rank, 2)) < BF16
    assert counts.served == {SCALED_GATHER: 2} and not counts.fell_through


@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
@pytest.mark.parametrize(("rowwise", "reduce_op"), [(False, "sum"), (True, "sum"), (True, "avg")])
def test_scaled_reduce_scatter(shape: tuple[int, ...], dim: int, rowwise: bool, reduce_op: str) -> None:
    xs = [scaled(draw(rank, *shape).reshape(-1, 32), "row" if rowwise else "tensor") for rank in range(2)]
    ws = [scaled_weight(50 + rank, 24, rowwise) for rank in range(2)]
    total = sum(dequantized(*x).double() @ w[2] for x, w in zip(xs, ws, strict=True)).view(*shape[:-1], 24)

    def rank(world: weft.World) -> float:
        (x, scale), (w, w_scale, _) = xs[world.rank], ws[world.rank]
        y = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            x, w, scale, w_scale, reduce_op, dim, 0, world.name, [*shape[:-1], 24], None, None, torch.bfloat16, True
        )
        world.synchronize()
        assert y.is_contiguous()
        return distance(y.double(), total.chunk(2, dim)[world.rank] / (2 if reduce_op == "avg" else 1))

    with async_tp() as counts:
        assert max(emulate(rank, 2)) < BF16
    assert counts.served == {SCALED_SCATTER: 2} and not counts.fell_through


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torchs_own_cases_in_bf16(dim: int) -> None:
    """The sizes are those of torch's AsyncTPTest, [8, 64, 32] gathered and scattered over [32, 16], with three weights.
    Along the last dimension torch's own operator runs, which raises an error without a GPU."""
    whole, b = draw(3, 8, 64, 32), draw(4, 32, 16)
    terms = [draw(5 + rank, 8, 64, 32) for rank in range(2)]

    def rank(world: weft.World) -> float:
        part = whole.chunk(2, dim)[world.rank].contiguous()
        try:
            a, ys = torch.ops.symm_mem.fused_all_gather_matmul(part, [b] * 3, dim, world.name)
            z = torch.ops.symm_mem.fused_matmul_reduce_scatter(terms[world.rank], b, "avg", dim, world.name)
        except NotOnGpus:
            assert dim == 2
            return 0.0
        world.synchronize()
        assert torch.equal(a, whole) and len(ys) == 3
        mean = ((terms[0].double() + terms[1].double()) / 2) @ b.double()
        expected = whole.double() @ b.double()
        return max(*(distance(y.double(), expected) for y in ys), distance(z.double(), mean.chunk(2, dim)[world.rank]))

    class NotOnGpus(Exception):
        pass

    def torchs(name: str, x: torch.Tensor) -> Callable[..., Any]:
        raise NotOnGpus

    with pytest.MonkeyPatch.context() as patch, async_tp() as counts:
        patch.setattr("weft.integrations.torch_async_tp._torchs", torchs)
        assert max(emulate(rank, 2)) < BF16
    if dim < 2:
        assert counts.served == {FUSED_GATHER: 2, FUSED_SCATTER: 2} and not counts.fell_through
    else:
        assert counts.fell_through == {(FUSED_GATHER, "along the last dimension"): 2}


@pytest.mark.parametrize("ranks", some([1, 4], 1))
def test_other_numbers_of_ranks_and_another_plan(ranks: int) -> None:
    parts = [draw(rank, 4, 32) for rank in range(ranks)]

    def rank(world: weft.World) -> float:
        b = weights(1, 0, True)[0]
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(parts[world.rank], [b], 0, world.name)
        z = torch.ops.symm_mem.fused_matmul_reduce_scatter(torch.cat(parts), b, "sum", 0, world.name)
        world.synchronize()
        expected = torch.cat(parts).double() @ b.double()
        return max(distance(y.double(), expected), distance(z.double(), ranks * expected.chunk(ranks)[world.rank]))

    for plan in ("auto", "decomposed"):
        with async_tp(plan=plan) as counts:
            assert max(emulate(rank, ranks)) < BF16
        assert counts.served.total() == 2 * ranks


# -- what torch computes -----------------------------------------------------------------------------------------------

X, W, ONE = draw(0, 8, 32), draw(1, 32, 16), torch.ones(1)
X8, W8 = X.to(E4M3), W.t().contiguous().to(E4M3).t()


def scaled_gather(op: Any, g: str, b_scale: Any = ONE, result: Any = None, out: Any = torch.bfloat16) -> Any:
    return op.fused_all_gather_scaled_matmul(X8, [W8], ONE, [b_scale], 0, g, [None], [result], [out], [False])


def scaled_scatter(op: Any, g: str, reduce_op: str = "sum", bias: Any = None, rows: int = 8) -> Any:
    shape = [rows, 16]
    return op.fused_scaled_matmul_reduce_scatter(
        X8[:rows], W8, ONE, ONE, reduce_op, 0, 0, g, shape, bias, None, torch.bfloat16
    )


@pytest.mark.parametrize(
    ("call", "name", "why"),
    [
        (lambda op, g: op.fused_all_gather_matmul(X.float(), [W.float()], 0, g), FUSED_GATHER, "of float32"),
        (lambda op, g: op.fused_all_gather_matmul(X, [W, W.half()], 0, g), FUSED_GATHER, "of bfloat16, float16"),
        (lambda op, g: op.fused_all_gather_matmul(X, [W], 1, g), FUSED_GATHER, "along the last dimension"),
        (lambda op, g: op.fused_all_gather_matmul(X, [W], -1, g), FUSED_GATHER, "along the last dimension"),
        (lambda op, g: op.fused_all_gather_matmul(X, [], 0, g), FUSED_GATHER, "no matrix"),
        (lambda op, g: op.fused_all_gather_matmul(X, [W[:8]], 0, g), FUSED_GATHER, "shapes that do not fit"),
        (lambda op, g: op.fused_matmul_reduce_scatter(X, W, "max", 0, g), FUSED_SCATTER, "reduces by max"),
        (lambda op, g: op.fused_matmul_reduce_scatter(X, W, "sum", 1, g), FUSED_SCATTER, "along the last dimension"),
        (lambda op, g: op.fused_matmul_reduce_scatter(X[:7], W, "sum", 0, g), FUSED_SCATTER, "does not divide by the ranks"),
        (lambda op, g: op.fused_scaled_matmul_reduce_scatter(X, W, ONE, ONE, "sum", 0, 0, g, [8, 16]), SCALED_SCATTER, "of bfloat16"),
        (lambda op, g: scaled_gather(op, g, out=None), SCALED_GATHER, "results of None"),
        (lambda op, g: scaled_gather(op, g, b_scale=torch.ones(1, 16)), SCALED_GATHER, "scales neither by tensor nor by row"),
        (lambda op, g: scaled_gather(op, g, result=ONE), SCALED_GATHER, "a scale of the result"),
        (lambda op, g: scaled_scatter(op, g, reduce_op="max"), SCALED_SCATTER, "reduces by max"),
        (lambda op, g: scaled_scatter(op, g, bias=W[0]), SCALED_SCATTER, "a bias, which torch adds on every rank"),
        (lambda op, g: scaled_scatter(op, g, rows=7), SCALED_SCATTER, "does not divide by the ranks"),
    ],
)  # fmt: skip
def test_other_calls_reach_torch_unchanged(
    call: Callable[[Any, str], Any], name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def torchs(name: str, x: torch.Tensor) -> Callable[..., Any]:
        def fallback(a: torch.Tensor, *args: Any, **_: Any) -> Any:
            seen.append((name, (a, *args)))
            return a.clone() if "reduce_scatter" in name else (a.clone(), [a.clone()])

        return fallback

    monkeypatch.setattr("weft.integrations.torch_async_tp._torchs", torchs)
    with async_tp() as counts:
        emulate(lambda world: call(torch.ops.symm_mem, world.name), 2)
    assert counts.fell_through == {(name, why): 2} and not counts.served
    assert [n for n, _ in seen] == [name] * 2 and counts.report() == f"{name}: 2 by torch ({why})"


def test_torchs_test_mode_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._symmetric_memory import _test_mode

    monkeypatch.setattr("weft.integrations.torch_async_tp._torchs", lambda name, x: lambda a, *args: a.clone())
    with _test_mode(), async_tp() as counts:
        emulate(lambda world: torch.ops.symm_mem.fused_matmul_reduce_scatter(X, W, "sum", 0, world.name), 2)
    assert counts.fell_through == {(FUSED_SCATTER, "torch's test mode"): 2}


def test_calls_passed_to_torch_make_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's test mode uses fake process groups, from which no World can be created."""
    from torch.distributed._symmetric_memory import _test_mode

    def refuse(group_name: str) -> weft.World:
        raise AssertionError("of a group of which nothing is computed")

    monkeypatch.setattr("weft.integrations.torch_async_tp._world", refuse)
    monkeypatch.setattr("weft.integrations.torch_async_tp._torchs", lambda name, x: lambda a, *args, **_: (a, [a]))

    def call(x: torch.Tensor, w: torch.Tensor) -> None:
        emulate(lambda world: torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, world.name), 2)

    with async_tp() as counts:
        call(X.float(), W.float())
        with _test_mode():
            call(X, W)
    assert counts.fell_through == {(FUSED_GATHER, "of float32"): 2, (FUSED_GATHER, "torch's test mode"): 2}


@pytest.mark.parametrize("takes", [True, False])
def test_who_asks_torch_for_its_native_kernel_gets_it(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as torch_symm_mem

    asked: list[int] = []
    monkeypatch.setattr(
        "weft.integrations.torch_async_tp._torchs", lambda name, x: lambda a, *args, **_: (a.clone(), [a.clone()])
    )
    monkeypatch.setattr(
        torch_symm_mem, "_should_use_fused_all_gather_matmul_native", lambda *arguments: asked.append(1) or takes
    )
    call = lambda world: torch.ops.symm_mem.fused_all_gather_matmul(X, [W], 0, world.name)  # noqa: E731
    with async_tp() as counts:
        emulate(call, 2)
        assert counts.served == {FUSED_GATHER: 2} and not asked, "nobody asked for it"
        monkeypatch.setenv(NATIVE, "1")
        emulate(call, 2)
    why = FUSED_GATHER, f"its native kernel, by {NATIVE}"
    assert counts.served.total() == (2 if takes else 4) and counts.fell_through == ({why: 2} if takes else {})


def over_gloo(rank: int, store: str) -> None:
    """CPU processes are served like GPUs; calls that weft does not support reach torch's CPU implementation."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    group, config = dist.group.WORLD, torch._inductor.config
    assert group is not None
    x, w = torch.ones(4, 8) * (rank + 1), torch.eye(8)
    expected = torch.cat([torch.ones(4, 8), 2 * torch.ones(4, 8)])
    with async_tp(group) as counts:
        assert config._micro_pipeline_tp and f"symm_mem::{FUSED_GATHER}" in config.custom_should_partition_ops
        assert dist._symmetric_memory.is_symm_mem_enabled_for_group(group.group_name)
        for dtype in (torch.bfloat16, torch.float32):
            x, w = x.to(dtype), w.to(dtype)
            a, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [2 * w], 0, group.group_name)
            z = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "avg", 0, group.group_name)
            assert torch.equal(a, expected.to(dtype)) and torch.equal(y, 2 * expected.to(dtype))
            assert torch.equal(z, torch.full((2, 8), 1.5, dtype=dtype))
    assert not config._micro_pipeline_tp and not config.custom_should_partition_ops
    assert counts.served == {FUSED_GATHER: 1, FUSED_SCATTER: 1}
    assert counts.fell_through == {(FUSED_GATHER, "of float32"): 1, (FUSED_SCATTER, "of float32"): 1}
    dist.destroy_process_group()


def compiled_over_gloo(rank: int, store: str) -> None:
    """The micro-pipeline pass, which requires NCCL, inserts the operators that weft serves: cases of torch's
    MicroPipelineTPTest, in bf16. `gather` and `scatter` are dimensions of x [.., 32] and of x @ w."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.is_nccl_available = lambda: True
    group = dist.group.WORLD
    assert group is not None
    w = draw(9, 32, 16)

    def gather(x: torch.Tensor, dim: int, whole: bool) -> list[torch.Tensor]:
        a = functional.all_gather_tensor(x, dim, group)
        return [a, a @ w] if whole else [a @ w]

    def scatter(x: torch.Tensor, dim: int, reduce_op: str) -> list[torch.Tensor]:
        return [functional.reduce_scatter_tensor(x @ w, reduce_op, dim, group)]

    def layer(x: torch.Tensor, *_: object) -> list[torch.Tensor]:
        hidden = (functional.all_gather_tensor(x, 0, group) @ w).relu()
        return [functional.reduce_scatter_tensor(hidden @ w.t(), "sum", 0, group)]

    g, s = FUSED_GATHER, FUSED_SCATTER
    cases: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, int]]] = [
        (layer, (4, 32), (), {g: 1, s: 1}),
        (gather, (32, 32), (0, True), {g: 1}),
        (gather, (1, 64, 32), (0, False), {g: 1}),
        (gather, (64, 16), (1, False), {}),  # along K: nothing to fuse
        (scatter, (64, 32), (0, "avg"), {s: 1}),
        (scatter, (2, 64, 32), (1, "sum"), {s: 1}),
    ]
    for fn, shape, arguments, wanted in cases:
        x = draw(rank, *shape)
        with async_tp(group) as counts, torch.no_grad():
            torch._dynamo.reset()
            actual = torch.compile(fn, fullgraph=True)(x, *arguments)
        errors = [distance(y, z) for y, z in zip(actual, fn(x, *arguments), strict=True)]
        assert max(errors) < BF16, (shape, arguments, errors)
        assert counts.served == wanted and not counts.fell_through, (shape, arguments)
    dist.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path: Path) -> None:
    mp.spawn(over_gloo, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.gate
def test_compiled_over_gloo(tmp_path: Path) -> None:
    mp.spawn(compiled_over_gloo, (str(tmp_path / "store"),), nprocs=2)


# -- in torch's place and back -----------------------------------------------------------------------------------------


def registrations() -> list[str]:
    return [
        torch._C._dispatch_dump(f"symm_mem::{name}")
        for name in (FUSED_GATHER, FUSED_SCATTER, SCALED_GATHER, SCALED_SCATTER)
    ]


def test_the_operators_go_back_to_torch() -> None:
    import torch.distributed._symmetric_memory  # noqa: F401

    before = registrations()
    with async_tp():
        during = registrations()
        with async_tp():
            assert registrations() == during
        assert registrations() == during, "the first one is still served"
    assert all(a != b for a, b in zip(before, during, strict=True)) and registrations() == before
    with pytest.raises(NotImplementedError):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(X, W, "sum", 0, "none")


def test_for_good_and_one_in_another() -> None:
    call = lambda world: torch.ops.symm_mem.fused_matmul_reduce_scatter(X, W, "sum", 0, world.name)  # noqa: E731
    outer = async_tp()
    try:
        with async_tp() as inner:
            emulate(call, 2)
        emulate(call, 2)
        assert (inner.served.total(), outer.served.total()) == (2, 4)
        assert outer.report() == "fused_matmul_reduce_scatter: 4 served"
    finally:
        outer.close()
    outer.close()
    assert not weft.integrations.torch_async_tp._active and not weft.integrations.torch_async_tp._libraries
    with async_tp() as unused:
        assert unused.report() == "none of torch's fused operators was called"
