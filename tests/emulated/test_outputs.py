"""The memory of `out=` and `received=` does not change an op's result: it may begin off a 16-byte boundary, or overlap
an operand. One grid covers all functions with such an argument, all kinds of plans and all operands; non-contiguous
memory is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_moe import at_random
from weft import moe
from weft.op import REGISTRY
from weft.ops.moe.call import Layer
from weft.ops.moe.dispatch_combine.op import ROW_LAYOUTS
from weft.ops.moe.routing import route_tables

T, H, INNER, EXPERTS, K = 12, 32, 32, 4, 2
LAYER = Layer(T, EXPERTS, K, H, INNER, torch.bfloat16)
TILE = 16  # rows of a tile in the emulator's plans
Operands = dict[str, torch.Tensor]
Function = Callable[[Operands, torch.Tensor | None], torch.Tensor]


def routes(world: weft.World) -> Operands:
    ids = at_random(0, world.rank, T, LAYER, world.size).int()
    return dict(ids=ids, weights=draw(5 + world.rank, T, K, dtype=torch.float32).abs())


def of_op(name: str, world: weft.World, plan: str) -> tuple[Operands, Function]:
    """Return operands, and a function that calls the op on them with memory for its result."""
    r, how = world.rank, dict(world=world, plan=plan)
    if name.startswith("moe."):
        return of_moe(name, world, plan)
    if name == "gathered_attention":
        operands = {n: draw(3 * i + r, T, heads, 16) for i, (n, heads) in enumerate(dict(q=4, k=2, v=2).items())}
        return operands, lambda t, out: weft.gathered_attention(**t, out=out, causal=True, **how)  # type: ignore[call-overload]
    if name == "all_reduce":
        return dict(x=draw(r, T, H)), lambda t, out: weft.all_reduce(**t, out=out, **how)
    if name == "all_reduce_rms_norm":
        operands = dict(x=draw(r, T, H), residual=draw(7, T, H), weight=draw(8, H))
        return operands, lambda t, out: weft.all_reduce_rms_norm(**t, full_residual=True, out=out, **how)[0]
    if name.endswith("grouped_matmul") or name.startswith("grouped_matmul"):
        return of_half(name, world, how)
    operands = dict(x=draw(r, T, H), weight=draw(9 + r, 2 * H, H), bias=draw(20, 2 * H))
    if name == "matmul_all_to_all":
        to = [(3 * t + r) % world.size for t in range(T)]
        return operands, lambda t, out: weft.matmul_all_to_all(**t, destinations=to, out=out, **how)
    if name == "matmul_all_to_all_routed":
        operands["destinations"] = (torch.arange(T, dtype=torch.int32) * 3 + r) % world.size
        return operands, lambda t, out: weft.matmul_all_to_all_routed(**t, out=out, **how)[0]
    function = getattr(weft, name)
    return operands, lambda t, out: function(*t.values(), out=out, **how)


def of_half(name: str, world: weft.World, how: dict[str, Any]) -> tuple[Operands, Function]:
    operands = routes(world) | dict(x=draw(world.rank, T, H))
    w13 = moe.pack(draw(1, EXPERTS, 2 * INNER, H), world=world)
    if name.startswith("all_gather"):
        first_half = lambda t, out: weft.all_gather_grouped_matmul(**t, w13=w13, out=out, **how)[0]  # noqa: E731
        return operands, lambda t, out: expert_rows(first_half(t, out), world)
    hidden, words = weft.all_gather_grouped_matmul(**operands, w13=w13, **how)
    operands = dict(hidden=hidden.clone(), w2=draw(2, EXPERTS, H, INNER), shared=draw(3, T, H))
    ids = routes(world)["ids"]
    return operands, lambda t, out: weft.grouped_matmul_reduce_scatter(routes=words, ids=ids, **t, out=out, **how)


def first_half_rows(world: weft.World) -> int:
    return route_tables.rows_of(world, T, K, EXPERTS, TILE)


def expert_rows(hidden: torch.Tensor, world: weft.World) -> torch.Tensor:
    """Return the experts' rows, which begin at whole tiles; no kernel may read the rows between them."""
    world.synchronize()
    ids = torch.cat([at_random(0, r, T, LAYER, world.size) for r in range(world.size)])
    counts = ids.flatten().bincount(minlength=EXPERTS)
    tiles = -(-counts // TILE) * TILE
    return torch.cat([hidden[end - n : end - n + m] for end, n, m in zip(tiles.cumsum(0), tiles, counts, strict=True)])


def of_moe(name: str, world: weft.World, plan: str) -> tuple[Operands, Function]:
    local, shared = EXPERTS // world.size, draw(50 + world.rank, T, H)
    operands = dict(x=draw(world.rank, T, H), shared=shared, **routes(world))
    if name == "moe.combine":
        sent = {n: operands.pop(n) for n in ("x", "ids", "weights")}
        rows, handle = moe.dispatch(**sent, experts=EXPERTS, world=world, layout=plan)
        operands["y"] = torch.zeros_like(rows)
        handle.cancel()

        def combine(t: Operands, out: torch.Tensor | None) -> torch.Tensor:
            rows, handle = moe.dispatch(**sent, experts=EXPERTS, world=world, layout=plan)
            t["y"].copy_(rows)
            return moe.combine(t["y"], handle, shared=t["shared"], out=out)

        return operands, combine
    operands["w13"] = moe.pack(draw(1 + world.rank, local, 2 * INNER, H), world=world)
    operands["w2"] = draw(2 + world.rank, local, H, INNER)
    if name == "moe.moe received":

        def counts(t: Operands, out: torch.Tensor | None) -> torch.Tensor:
            out = torch.empty(local, dtype=torch.int32) if out is None else out
            moe.moe(**t, received=out, world=world, plan=plan)
            return out

        return operands, counts
    return operands, lambda t, out: moe.moe(**t, out=out, world=world, plan=plan)


OPS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all", "all_reduce",
    "all_reduce_rms_norm", "gathered_attention", "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter",
    "matmul_all_to_all_routed",
)  # fmt: skip
FUNCTIONS = {name: REGISTRY[name].kinds for name in OPS}  # every public function and its plans
FUNCTIONS |= {"moe.moe": REGISTRY["moe"].kinds, "moe.moe received": REGISTRY["moe"].kinds}
FUNCTIONS["moe.combine"] = list(ROW_LAYOUTS)
FUNCTIONS["matmul"] = ["sequential"]
SAME_OP = {"all_gather_matmul_with_gathered", "all_reduce_rms_norm_quantized"}  # further results of an op listed above


def test_every_function_with_out_is_covered() -> None:
    writing = set()
    for prefix, module in (("", weft), ("moe.", moe)):
        for name in module.__all__:
            function = getattr(module, name)
            names = inspect.signature(function).parameters if inspect.isfunction(function) else {}
            writing |= {f"{prefix}{name}"} if "out" in names else set()
            writing |= {f"{prefix}{name} received"} if "received" in names and "out" in names else set()
    assert writing == {*FUNCTIONS, *SAME_OP}


def over(operand: torch.Tensor, result: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of the operand and memory for the result, both in one allocation; the memory begins a given number
    of bytes after the copy."""
    size = lambda t: t.numel() * t.element_size()  # noqa: E731
    memory = torch.zeros(size(operand) + shift + size(result) + 64, dtype=torch.uint8)
    copy = memory[: size(operand)].view(operand.dtype).view(operand.shape).copy_(operand)
    return copy, memory[shift : shift + size(result)].view(result.dtype).view(result.shape)


def output_locations(operands: Operands, result: torch.Tensor) -> Iterator[tuple[str, Operands, torch.Tensor]]:
    unaligned = torch.empty(result.numel() + 1, dtype=result.dtype)[1:].view(result.shape)
    yield "unaligned", {n: t.clone() for n, t in operands.items()}, unaligned
    for name, operand in operands.items():
        for shift in (0, 16):
            copy, out = over(operand, result, shift)
            yield f"{shift} bytes into {name}", {n: copy if n == name else t.clone() for n, t in operands.items()}, out


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, plans in FUNCTIONS.items() for plan in plans])
def test_results_in_unaligned_or_shared_memory(name: str, plan: str) -> None:
    def rank(world: weft.World) -> list[str]:
        inputs, function = of_op(name, world, plan)
        expected = function({n: t.clone() for n, t in inputs.items()}, None).clone()
        result = torch.empty(first_half_rows(world), INNER, dtype=expected.dtype) if name == OPS[7] else expected
        wrong = []
        for place, operands, out in output_locations(inputs, result):
            actual = function(operands, out)
            world.synchronize()
            if not torch.equal(actual, expected):
                wrong.append(place)
        strided = torch.empty(*expected.shape, 2, dtype=expected.dtype)[..., 0]
        with pytest.raises(ValueError, match="(out|received) .* must be .*contiguous"):
            function({n: t.clone() for n, t in inputs.items()}, strided)
        return wrong

    assert weft.spmd(rank, 2, backend="emulated", preempt=0.1) == [[], []]
