"""No plan reads values that belong to no token: Some values are NaN: rows between experts, memory left by earlier
calls, the weights of dropped routes, and tokens without routes. These NaN values change no bit of a result or a
gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_moe import Model, at_random
from tests.gates import some
from weft import moe
from weft.op import REGISTRY
from weft.ops.moe.call import Layer
from weft.ops.moe.dispatch_combine.op import ROW_LAYOUTS

BF = torch.bfloat16
T, H = 9, 32
LAYER = Layer(T, 4, 2, H, 24, BF)
NAN = float("nan")


def poison(world: weft.World) -> None:
    """Fill all memory that MoE layers' calls share with NaN while no call uses it."""
    world.synchronize()
    world.exchange("before")
    scratch = [t for key, held in world._cache.items() if isinstance(held, list) and "moe" in str(key) for t in held]
    shared = [m.local for name, m in world._buffers.items() if "moe" in name] + [a.memory.local for a in world._arenas]
    for t in (*(t for t in scratch if isinstance(t, torch.Tensor)), *shared):
        t.view(torch.uint8).fill_(255)  # NaN in any float dtype
    world.exchange("behind")


def ids_of(world: weft.World, rank: int) -> torch.Tensor:
    """The ids include -1 and the number after the last expert; routes with these ids are dropped."""
    ids = at_random(0, rank, T, LAYER, world.size).int()
    ids[::4], ids[1, 1] = -1, 4
    return ids


def routed(world: weft.World, bad: float) -> dict[str, torch.Tensor]:
    """Return x, ids and weights. Some routes, and all routes of some tokens, are dropped. The dropped routes' weights
    and these tokens have the value `bad`."""
    ids = ids_of(world, world.rank)
    has_expert = (ids >= 0) & (ids < 4)
    weights = torch.where(has_expert, draw(3 + world.rank, T, 2, dtype=torch.float32).abs(), bad)
    return dict(x=torch.where(has_expert.any(1, keepdim=True), draw(world.rank, T, H), bad), ids=ids, weights=weights)


def leaves(operands: dict[str, torch.Tensor], trains: bool) -> dict[str, torch.Tensor]:
    return {n: t.clone().requires_grad_(trains and t.is_floating_point()) for n, t in operands.items()}


def results(y: torch.Tensor, operands: dict[str, torch.Tensor], world: weft.World, trains: bool) -> list[torch.Tensor]:
    """Return the result, and the gradients of the operands that require them."""
    if trains:
        y.backward(draw(70 + world.rank, *y.shape))
    world.synchronize()
    return [y.detach().clone(), *(t.grad for t in operands.values() if trains and t.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) and bool(s.isfinite().all()) for s, t in zip(a, b, strict=True))


def layer_case(world: weft.World, plan: str, keep: str | None, bad: float) -> list[torch.Tensor]:
    model, trains = Model(world, LAYER, True), keep is not None
    names = ("w13", "w2", "b13", "b2")
    operands = leaves(routed(world, bad) | dict(zip(names, model.local_weights, strict=True)), trains)
    options: dict[str, Any] = dict(keep=keep) if keep else {}
    for _ in range(2):
        if bad != 0:
            poison(world)
        y = moe.moe(**operands, world=world, plan=plan, **options)
    if bad != 0 and trains:
        poison(world)
    return results(y, operands, world, trains)


def halves_case(world: weft.World, plan: str, keep: str, bad: float) -> list[torch.Tensor]:
    model = Model(world, Layer(T, 4, 2, H, 32, BF), True, tp_size=world.size)
    w13, w2, b13, b2 = (None if t is None else t.clone().requires_grad_() for t in model.local_weights)
    operands = leaves(routed(world, bad), True)
    common: dict[str, Any] = dict(world=world, plan=plan)
    hidden, routes = weft.all_gather_grouped_matmul(**operands, w13=w13, b13=b13, keep=keep, **common)
    world.synchronize()
    real = real_rows(world, hidden.shape[0])
    hidden = torch.where(real[:, None], hidden, bad)
    if bad != 0:
        poison(world)
    y = weft.grouped_matmul_reduce_scatter(hidden, routes, operands["ids"], w2, b2=b2, **common)
    if bad != 0:
        poison(world)
    weights = {n: t for n, t in dict(w13=w13, w2=w2, b13=b13, b2=b2).items() if t is not None}
    return results(y, operands | weights, world, True)


def real_rows(world: weft.World, rows: int, tile: int = 16) -> torch.Tensor:
    """Return a bool tensor [rows] that is true for the rows of `hidden` that belong to a token; each expert begins at a
    whole tile."""
    ids = torch.cat([ids_of(world, r) for r in range(world.size)]).flatten()
    real, first_row = torch.zeros(rows, dtype=torch.bool), 0
    for count in ids[(ids >= 0) & (ids < 4)].bincount(minlength=4).tolist():
        real[first_row : first_row + count] = True
        first_row += -(-count // tile) * tile
    return real


def exchange_case(world: weft.World, layout: str, alignment: int, bad: float) -> list[torch.Tensor]:
    operands = leaves(routed(world, bad), True)
    for _ in range(2):
        rows, handle = moe.dispatch(**operands, experts=4, world=world, layout=layout, expert_alignment=alignment)
        real = (handle.sources >= 0).view(-1)[: rows.numel() // H].view(*rows.shape[:-1], 1)
        y = rows * torch.where(real, 3.0, bad).to(BF)  # the rows' gradient is then `bad` there too
        if bad != 0:
            poison(world)
        out = moe.combine(y, handle)
    if bad != 0:
        poison(world)
    return results(out, operands, world, True)


CASES = {f"moe, {plan}": (layer_case, plan, None) for plan in REGISTRY["moe"].kinds}
CASES |= {
    f"moe, {plan}, {keep}": (layer_case, plan, keep) for plan in ("sequential", "dispatched") for keep in moe.KEEPS
}
CASES |= {
    f"halves, {plan}, {keep}": (halves_case, plan, keep) for plan in ("sequential", "dispatched") for keep in moe.KEEPS
}
CASES |= {f"exchange, {layout}": (exchange_case, layout, 1) for layout in ROW_LAYOUTS}
CASES["exchange, aligned"] = (exchange_case, "contiguous", 16)


@pytest.mark.parametrize("name", some(CASES, 5))
def test_memory_of_no_token_is_not_read(name: str) -> None:
    case, *options = CASES[name]

    def rank(world: weft.World) -> bool:
        return same(case(world, *options, 0.0), case(world, *options, NAN))  # type: ignore[operator]

    assert weft.spmd(rank, 2, backend="emulated") == [True, True]
