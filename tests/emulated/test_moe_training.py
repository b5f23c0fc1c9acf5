"""Gradients of layers of experts, whole or split by columns, on emulated ranks are compared with float64. The options
for training whole experts and the compiled kernels are tested too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_dispatch_combine import exchanged
from tests.emulated.cases_expert_parallel import no_room_case, whole_experts
from tests.emulated.cases_moe import KINDS, NAMES, Model, Run, at_random, gradients, in_turn, routed, training_case
from tests.emulated.cases_tensor_parallel import both_halves
from tests.gates import covered, some
from tests.offline import test_offline as offline
from weft import moe
from weft.check import ptx
from weft.check.offline import Compiled, compile_kernel
from weft.ops.moe.call import Kept, Layer, MoeOperands, Weights, layer_rows
from weft.ops.moe.expert_parallel import backward
from weft.ops.moe.expert_rows import sums
from weft.plans import Dispatched

BF, HALF = torch.bfloat16, torch.float16
BOUND = 1.2e-2


WAYS: dict[str, tuple[Run, dict[str, Any]]] = {"whole": (whole_experts, {}), "columns": (both_halves, dict(inner=16))}


def right(way: str, ranks: int, seed: int = 0, preempt: float = 0.05, **case: Any) -> bool:
    """Return whether every gradient's error is within the bound."""
    run, sizes = WAYS[way]
    case = sizes | (dict(tp_size=ranks) if way == "columns" else {}) | case
    errors = weft.spmd(
        lambda world: training_case(world, run, **case), ranks, backend="emulated", seed=seed, preempt=preempt
    )
    return all(error < BOUND for rank in errors for error in rank.values())


WORLDS: list[tuple[str, int, dict[str, Any]]] = [
    ("whole", 1, dict(experts=3)), ("whole", 2, dict()), ("whole", 4, dict(experts=8, k=3, calls=2)),
    ("columns", 1, dict()), ("columns", 2, dict()), ("columns", 3, dict(calls=1)), ("columns", 4, dict(tp_size=2, calls=1)),
]  # fmt: skip


@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
@pytest.mark.parametrize(("way", "ranks", "changes"), WORLDS, ids=str)
def test_against_float64(way: str, ranks: int, changes: dict[str, Any], plan: str) -> None:
    """Ranks have different numbers of tokens, and some have none. Every operand has a gradient, the calls save
    different tensors, and in some cases only some ranks share an expert's columns."""
    assert right(way, ranks, plan=plan, **changes)


@covered(
    "(?:whole|columns)-(?:to few|some nowhere)-sequential",
    covering="emulated/test_gloo.py::test_every_op_against_torch_and_its_errors",
)
@covered("columns-(gelu|nowhere|uneven)-sequential", covering=r"[whole-\1-sequential]")
@pytest.mark.parametrize("plan", ["sequential", "dispatched"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_kinds_of_layers(way: str, kind: str, plan: str) -> None:
    """Activations and biases vary; some routes have no expert, and experts have no rows or several tiles."""
    calls = 1 if way == "columns" or kind == "uneven" else 3
    assert right(way, 2, plan=plan, calls=calls, **KINDS[kind])


WANTS = {
    "whole": [("x",), ("weights",), ("w2",), ("x", "b13"), ("shared",)],
    "columns": [("x",), ("weights",), ("w13",), ("w2",), ("x", "b13"), ("w2", "b2"), ("shared",)],
}


@covered(r"whole-\('w2',\)", covering="[columns-('w2', 'b2')]")
@covered(r"columns-\('w2',\)", covering="[columns-('w2', 'b2')]")
@covered(r"columns-\('(x|weights|shared)',\)", covering=r"[whole-('\1',)]")
@pytest.mark.parametrize(
    ("way", "wants"), [(way, operands) for way, wants in WANTS.items() for operands in wants], ids=str
)
def test_only_some_operands(way: str, wants: tuple[str, ...]) -> None:
    keep = moe.KEEPS if way == "whole" else ("nothing",)
    for plan in ("sequential", "dispatched"):
        assert right(way, 2, plan=plan, wants=wants, biases=True, calls=1, keep=keep)


@pytest.mark.parametrize("seed", some(range(6)))
def test_schedules(seed: int) -> None:
    assert right("whole", 3, seed, 0.2, experts=6, k=3, hidden=40, tokens=(13, 0, 20))


@pytest.mark.parametrize("seed", some(range(4)))
def test_schedules_of_columns(seed: int) -> None:
    case = dict(hidden=24, inner=8, experts=3, k=1, tokens=(5, 0, 9), calls=4, ids_of=in_turn)
    assert right("columns", 3, seed, 0.2, **case)


def test_no_tokens_at_all() -> None:
    """All gradients are zero, so no relative error is defined."""
    for wants in (("x", "weights", "shared"), NAMES):
        case = dict(inner=16, tp_size=2, tokens=(0,), calls=1, wants=wants)
        errors = weft.spmd(lambda world, case=case: training_case(world, both_halves, **case), 2, backend="emulated")
        assert all(error == 0 for rank in errors for error in rank.values())


def test_shared_rows_that_are_not_contiguous() -> None:
    """A call with a gradient gives the same result as a call without one, wherever the shared expert's rows are in
    memory."""

    def rank(world: weft.World) -> bool:
        layer = Layer(9, 4, 2, 32, 24, BF)
        model = Model(world, layer, False)
        x, ids, weights, shared, _ = routed(0, world.rank, 9, layer, world.size, at_random)
        local_weights, strided_shared = model.local_weights, shared.t().contiguous().t()
        expected = moe.moe(
            x, ids, weights, local_weights.w13, local_weights.w2, shared=shared, world=world, plan="dispatched"
        )
        x.requires_grad_()
        y = moe.moe(
            x, ids, weights, local_weights.w13, local_weights.w2, shared=strided_shared, world=world, plan="dispatched"
        )
        world.synchronize()
        return torch.equal(y, expected)

    assert all(weft.spmd(rank, 2, backend="emulated"))


def bits(world: weft.World) -> list[torch.Tensor]:
    """Return the results and the gradients of one call, for every choice of saved tensors."""
    layer = Layer(21, 4, 2, 32, 24, BF)
    model = Model(world, layer, True)
    operands = routed(0, world.rank, 21, layer, world.size, at_random)
    kept = []
    for keep in (*moe.KEEPS, "rows"):
        y, grads = gradients(world, whole_experts, model, operands, plan="dispatched", keep=keep)
        world.synchronize()
        kept.append([y.clone(), *(grads[name].clone() for name in NAMES)])  # type: ignore[union-attr]
    for others in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], others, strict=True))
    return kept[0]


@pytest.mark.gate
def test_the_bits_do_not_depend_on_the_saved_tensors_or_the_order() -> None:
    first_run, *others = [weft.spmd(bits, 2, backend="emulated", seed=seed, preempt=0.1) for seed in range(3)]
    for run in others:
        for a, b in zip(first_run, run, strict=True):
            assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_rows_that_find_no_room() -> None:
    weft.spmd(no_room_case, 2, backend="emulated")


@pytest.mark.parametrize(
    "ranks, wants, options",
    [
        (1, ("x", "weights", "shared"), dict()), (2, ("x", "weights", "shared"), dict(layout="masked")),
        (4, ("x", "weights"), dict(expert_alignment=16)), (2, ("weights",), dict()), (2, ("x",), dict()),
    ],
    ids=str,
)  # fmt: skip
def test_dispatch_and_combine(ranks: int, wants: tuple[str, ...], options: dict[str, Any]) -> None:
    errors = weft.spmd(lambda world: exchanged(world, wants, **options), ranks, backend="emulated")
    assert max(errors) < BOUND


# -- the module --------------------------------------------------------------------------------------------------------


def layer_of(world: weft.World, parallel: str = "expert", inner: int = 24, **options: Any) -> moe.MoE:
    layer = moe.MoE(32, inner, 4, 2, world=world, parallel=parallel, **options)
    state = {"gate.weight": draw(9, 4, 32), "experts.gate_up_proj": draw(10, 4, 2 * inner, 32) * 0.2}
    layer.load_experts(state | {"experts.down_proj": draw(11, 4, 32, inner) * 0.2})
    return layer.requires_grad_()


def step(layer: moe.MoE, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """Return the loss with auxiliary losses, and the gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        ids, weights, logits = layer.route(x)
        aux_loss = moe.load_balancing_loss(logits, ids, world=layer.world) + moe.z_loss(logits, world=layer.world)
        return layer(x, routes=(ids, weights)).float().square().sum() + aux_loss

    loss = (loss_of if call is None else call(loss_of))(x)
    loss.backward()
    layer.world.synchronize()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]  # type: ignore[list-item, union-attr]


# test_the_bits_do_not_depend_on_the_saved_tensors_or_the_order compares all tensors that may be saved, in eager calls.
@covered("tensor-32-(?:nothing|activation)", covering="[tensor-32-rows]")
@pytest.mark.parametrize(
    "parallel, inner, keep", [("expert", 24, "rows"), *(("tensor", 32, keep) for keep in moe.KEEPS)]
)
def test_the_module_trains_compiled_as_in_eager(parallel: str, inner: int, keep: str) -> None:
    def rank(world: weft.World) -> None:
        layer, x = layer_of(world, parallel, inner, keep=keep), draw(world.rank, 9, 32)
        expected = step(layer, x)
        actual = step(layer, x, lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True))
        assert all(t.norm() > 0 for t in expected[1:])
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    torch._dynamo.reset()
    weft.spmd(rank, 2, backend="emulated")


def test_columns_and_whole_experts_train_alike() -> None:
    """The loss with auxiliary losses and the gradients of x and the router agree."""

    def rank(world: weft.World) -> None:
        x = draw(world.rank, 9, 32)
        (*parts, _, _), (*whole, _, _) = (step(layer_of(world, parallel, 32), x) for parallel in ("tensor", "expert"))
        assert len(parts) == 3 and all(distance(a, b) < BOUND for a, b in zip(parts, whole, strict=True))

    weft.spmd(rank, 2, backend="emulated")


@pytest.mark.parametrize("parallel, inner", [("expert", 24), ("tensor", 32)])
def test_checkpointed_and_replayed(parallel: str, inner: int) -> None:
    """A recomputed pass gives the same bits, as does a pass replayed with the ids of an earlier pass."""

    def rank(world: weft.World) -> None:
        layer, x = layer_of(world, parallel, inner, scoring="sigmoid"), draw(world.rank, 9, 32)
        ids = layer.route(x)[0].clone()

        def replayed(x: torch.Tensor) -> torch.Tensor:
            return layer(x, routes=layer.route(x, ids)[:2]).float().square().sum()

        def alone(x: torch.Tensor) -> torch.Tensor:
            return layer(x).float().square().sum()

        def again(x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(replayed, x, use_reentrant=False)  # type: ignore[no-any-return]

        first_grads, *others = [step(layer, x, lambda _, fn=fn: fn) for fn in (alone, replayed, again)]
        for grads in others:
            assert all(torch.equal(a, b) for a, b in zip(first_grads, grads, strict=True))

    weft.spmd(rank, 2, backend="emulated")


# -- compiled ----------------------------------------------------------------------------------------------------------

SIZES = {  # hidden, inner, experts (few, because their gradients are in memory), k
    "Qwen3-30B": (2048, 768, 128, 8),
    "Mixtral": (4096, 14336, 2, 2),
    "GPT-OSS": (2880, 2880, 16, 4),
    "odd": (1032, 520, 16, 3),
}
CASES = {  # activation, biases, dtype, ranks, kept
    "Qwen3-30B": ("swiglu", False, BF, 8, "rows"),
    "Mixtral": ("swiglu", False, BF, 2, "activation"),
    "GPT-OSS": ("gpt_oss", True, BF, 8, "nothing"),
    "odd": ("gelu", True, HALF, 8, "rows"),
}
NEW = {"activation_gradient", "grouped_wgrad", "row_sums", "take_gradients"}


def launching(name: str) -> Callable[[weft.World], None]:
    activation, biases, dtype, ranks, keep = CASES[name]
    h, i, e, k = SIZES[name]

    def main(world: weft.World) -> None:
        layer = Layer(64, e, k, h, i, dtype, activation)
        block, local, t = world.backend.scale.interleave, e // ranks, 30 + world.rank
        n = i if activation == "gelu" else -(-i // block) * 2 * block
        shapes = [(local, n, h), (local, h, i), (local, n), (local, h)][: 4 if biases else 2]
        expert_weights = Weights(*[torch.zeros(1, dtype=dtype).expand(shape) for shape in shapes])
        x, ids, weights = torch.zeros(t, h, dtype=dtype), torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        empty = torch.zeros(1, dtype=dtype)
        rows = layer_rows(world, layer, Dispatched().tile.block_m)
        kept = Kept(
            None if keep == "nothing" else empty.expand(ranks, 64, h),
            empty.expand(rows, n) if keep == "activation" else None,
        )
        backward.backward(world, layer, Dispatched(), x, MoeOperands(x, ids, weights, *expert_weights), kept, True)

    return main


def awaited(name: str) -> Callable[[Any], bool]:
    """Return a predicate for steps that load data written by other programs or ranks."""
    text = {"place_rows": "tl.load(inbox", "combine_rows": "tl.load(routed.y +", "sum_ranks": "tl.load(outbox"}.get(
        name
    )
    return lambda step: text is not None and text in step.source


@pytest.mark.gate
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_and_keep_the_rules(name: str, record_property: Callable[[str, object], None]) -> None:
    by_rank = offline.launches(launching(name), CASES[name][3])
    kernels: dict[str, tuple[Any, Compiled]] = {}
    for launch in by_rank[0]:
        kernel = launch.kernel.__name__
        if kernel not in NEW | {"grouped_gemm_out", "dispatch_rows", "combine_rows", "place_rows"}:
            continue
        k = compile_kernel(launch.kernel, launch.args, launch.options)
        kernels[kernel] = launch, k
        record_property("kernel", (f"moe backward {name}: {kernel}", k.registers, k.shared))
        offline.fits(launch, k)
        assert ("wgmma.mma_async" in k.ptx) == (kernel in ("grouped_gemm_out", "grouped_wgrad"))
        waits = awaited(kernel) if launch.args.get("ARRIVALS") != 0 else awaited("")  # 0 stands for saved rows
        assert ptx.broken_rules(k.ptx, waits) == [] and ptx.signals_not_by_thread_zero(k.ptx) == []
    assert NEW - (set() if CASES[name][1] else {"row_sums"}) <= set(kernels)
    for small in ("dispatch_rows", "combine_rows", "place_rows"):
        for large in ("grouped_gemm_out", "grouped_wgrad"):
            pair = kernels[small], kernels[large]
            assert sum(k.shared + 1024 for _, k in pair) <= 228 << 10, "both kernels must fit on one SM"
            if small != "dispatch_rows":
                assert sum(-(-k.registers // 8) * 8 * 32 * a.options["num_warps"] for a, k in pair) <= 65536
    for others in by_rank[1:]:
        for a, b in zip(by_rank[0], others, strict=True):
            assert offline.specialised(a) == offline.specialised(b)


def test_an_infinity_stays_in_the_sum_of_its_expert() -> None:
    rows, offsets = torch.ones(5, 2), torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    rows[0, 0] = torch.inf
    assert sums(rows, offsets).tolist() == [[torch.inf, 2], [0, 0], [2, 2]]
