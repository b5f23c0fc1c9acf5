"""Options of `weft.moe` on emulated ranks: groups of ranks, the size of memory, and counts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_expert_parallel import overfull_layers
from tests.emulated.cases_moe import Model, at_random
from tests.gates import covered, some
from weft import moe
from weft.ops.moe.call import Layer

PLANS = ("sequential", "dispatched")
BOUND = 1.2e-2
LAYER = Layer(6, 8, 2, 32, 24, torch.bfloat16)


def local_operands(
    world: weft.World, layer: Layer, tokens: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this rank's x, ids and weights, drawn with a seed that depends on its rank."""
    ids = at_random(seed, world.rank, tokens, layer, world.size).int()
    weights = draw(10 * seed + 5 + world.rank, tokens, layer.k, dtype=torch.float32).abs()
    return draw(10 * seed + world.rank, tokens, layer.hidden), ids, weights


def emulate(fn: Any, ranks: int = 2, **options: Any) -> list[Any]:
    return weft.spmd(fn, ranks, backend="emulated", **options)


# -- groups of ranks ---------------------------------------------------------------------------------------------------


@covered(r"3-(\w+)", covering=r"[0-\1]")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", [0, 3])
def test_experts_over_groups_of_the_ranks(plan: str, seed: int) -> None:
    """Layers over two groups of two ranks, each of which holds all experts, alternate with a sum over all ranks and a
    sum over the other pairs."""

    def main(world: weft.World) -> float:
        group, across = world.split(world.rank // 2), world.split(world.rank % 2)
        model, worst = Model(group, LAYER, False), 0.0
        for call in range(3):
            x, ids, weights = local_operands(world, LAYER, (5, 2, 0, 6)[(world.rank + call) % 4], call)
            y = moe.moe(x, ids, weights, *model.local_weights[:2], max_tokens=6, world=group, plan=plan)
            worst = max([worst, distance(y, model(x, ids, weights))] if y.numel() else [worst])
            whole = weft.all_reduce(torch.full((2, 8), 1.0 + world.rank, dtype=torch.bfloat16), world=world)
            pair = weft.all_reduce(torch.full((2, 8), 1.0 + world.rank, dtype=torch.bfloat16), world=across)
            world.synchronize()
            assert (whole == 10).all() and (pair == 2 * (world.rank % 2) + 4).all()
        return worst

    assert max(emulate(main, 4, seed=seed)) < BOUND


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_one_workspace_for_any_number_of_tokens(plan: str) -> None:
    """No rank knows the other ranks' numbers of tokens. From the second call on, ranks allocate nothing and compare
    nothing."""

    def main(world: weft.World) -> float:
        model, kept = Model(world, LAYER, False), []
        for call, counts in enumerate([(6, 6), (0, 3), (5, 0), (0, 0), (1, 6)]):
            x, ids, weights = local_operands(world, LAYER, counts[world.rank], call)
            if call:
                world.backend.exchange = lambda *_: pytest.fail("agrees on what was agreed")  # type: ignore[method-assign]
            sizes_before = len(world._cache), len(world._channels)
            y = moe.moe(x, ids, weights, *model.local_weights[:2], max_tokens=6, world=world, plan=plan)
            assert not call or sizes_before == (len(world._cache), len(world._channels))
            kept.append((y, model(x, ids, weights)))
        del world.backend.exchange
        world.synchronize()
        return max(distance(y, expected) for y, expected in kept if y.numel())

    assert max(emulate(main)) < BOUND


def test_more_tokens_than_max_tokens() -> None:
    def main(world: weft.World) -> None:
        expert_weights = Model(world, LAYER, False).local_weights[:2]
        with pytest.raises(ValueError, match="6 tokens of a rank are more than max_tokens 5"):
            moe.moe(*local_operands(world, LAYER, 6), *expert_weights, max_tokens=5, world=world)
        with pytest.raises(ValueError, match="max_rows -1"):
            moe.moe(*local_operands(world, LAYER, 6), *expert_weights, max_rows=-1, world=world)

    emulate(main)


@pytest.mark.parametrize("differ", ["max_tokens", "max_rows"])
def test_ranks_that_disagree_on_a_limit(differ: str) -> None:
    def main(world: weft.World) -> None:
        expert_weights = Model(world, LAYER, False).local_weights[:2]
        with pytest.raises(weft.Mismatch, match=f"{differ}=2{world.rank}"):
            moe.moe(*local_operands(world, LAYER, 6), *expert_weights, **{differ: 20 + world.rank}, world=world)

    emulate(main)


def all_to(world: weft.World, expert: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route every token of every rank to one expert, with weight 1."""
    x = draw(world.rank, tokens, LAYER.hidden)
    return x, torch.full((tokens, 1), expert, dtype=torch.int32), torch.ones(tokens, 1)


OWN = "rank {}: its experts received {} rows more than max_rows (or max_m) has room for;"
OTHERS = "rank {}: rank {}'s experts received {} rows of this rank's tokens more than max_rows (or max_m) has room for;"


def overflow_of(world: weft.World) -> str:
    """Return the error that `World.synchronize` raises; it is raised only once."""
    message = ""
    try:
        world.synchronize()
    except weft.Overflow as e:
        message = str(e)
    world.synchronize()
    return message


@covered("[123]", covering="[0]")
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_find_no_room_are_left_out_counted_and_raised(seed: int) -> None:
    """Tiles have 16 rows, and each rank has 4 experts; 100 rows are routed to one expert, which has space for 80. The
    rank's own rows come first. Both the full rank and the rank of the tokens are notified."""

    def main(world: weft.World) -> None:
        model, tokens = Model(world, LAYER, False), 50
        received = torch.full((4,), -1, dtype=torch.int32)
        x, ids, weights = all_to(world, 1, tokens)

        def call(ids: torch.Tensor) -> torch.Tensor:
            return moe.moe(x, ids, weights, *model.local_weights[:2], max_rows=16, received=received, world=world)

        call((ids + 4) * (world.rank == 0))  # the dropped rows in the outboxes must not be summed again
        world.synchronize()
        actual = call(ids).clone()
        assert received.tolist() == ([0, 80, 0, 0] if world.rank == 0 else [0, 0, 0, 0])
        assert overflow_of(world).startswith((OWN.format(0, 20), OTHERS.format(1, 0, 20))[world.rank])
        kept = tokens if world.rank == 0 else 30
        expected = model(x, ids, weights)
        assert distance(actual[:kept], expected[:kept]) < BOUND and not actual[kept:].any()
        again = call(torch.arange(tokens, dtype=torch.int32)[:, None] % 8)  # the World still works
        world.synchronize()
        assert distance(again, model(x, torch.arange(tokens)[:, None] % 8, weights)) < BOUND

    emulate(main, seed=seed)


@pytest.mark.parametrize("plan", ["dispatched", "fused"])
@pytest.mark.parametrize("seed", some(range(6)))
def test_every_rank_that_lost_rows_learns_which_ranks_were_full(plan: str, seed: int) -> None:
    emulate(lambda world: overfull_layers(world, plan), 3, seed=seed, ahead=True)


def test_room_for_max_rows_however_they_fall() -> None:
    def main(world: weft.World) -> float:
        model, worst = Model(world, LAYER, False), 0.0
        for ids_of in (lambda t: t * 0, lambda t: t % 4, lambda t: (t * t) % 8):
            x, _, weights = all_to(world, 0, 17)
            ids = ids_of(torch.arange(17, dtype=torch.int32))[:, None]
            y = moe.moe(x, ids, weights, *model.local_weights[:2], max_rows=34, world=world)
            world.synchronize()
            worst = max(worst, distance(y, model(x, ids, weights)))
        return worst

    assert max(emulate(main)) < BOUND


def test_overflow_is_raised_by_the_next_call_of_an_op() -> None:
    def main(world: weft.World) -> None:
        expert_weights = Model(world, LAYER, False).local_weights[:2]
        moe.moe(*all_to(world, 4, 50), *expert_weights, max_rows=0, world=world)
        with pytest.raises(
            weft.Overflow, match=("rank 0: rank 1's", "rank 1: its")[world.rank] + " experts received 36 rows"
        ):
            weft.silu_mul(torch.ones(2, 32, dtype=torch.bfloat16), world=world)

    emulate(main)


@covered(r"1-(\w+)", covering=r"[0-\1]")
@pytest.mark.parametrize("plan", ["dispatched", "sequential"])
@pytest.mark.parametrize("seed", range(2))
def test_the_call_that_raises_overflow_was_made(plan: str, seed: int) -> None:
    """The error contains the result, and all ranks can continue together."""

    def main(world: weft.World) -> list[str]:
        x, ids, weights = all_to(world, 4, 50)
        expert_weights, messages = Model(world, LAYER, False).local_weights[:2], []
        expected = moe.moe(x, ids, weights, *expert_weights, world=world, plan="sequential").clone()
        moe.moe(x, ids, weights, *expert_weights, max_rows=4, world=world, plan="dispatched")
        for _ in range(3):
            try:
                y = moe.moe(x, ids, weights, *expert_weights, world=world, plan=plan)
            except weft.Overflow as e:
                messages.append(str(e))
                y = e.result
            assert distance(y, expected) < BOUND
        world.synchronize()
        return messages

    messages_by_rank = emulate(main, seed=seed)
    assert [len(messages) for messages in messages_by_rank] == [1, 1]
    assert all("rank 1" in message for (message,) in messages_by_rank)


def test_drops_before_a_wait_inside_a_call_are_raised_after_it() -> None:
    """As on a GPU, the host may receive the number of rows only after the call has begun."""

    def main(world: weft.World) -> int:
        x, ids, weights = all_to(world, 4, 50)
        expert_weights, raised, backend = Model(world, LAYER, False).local_weights[:2], 0, world.backend
        moe.moe(x, ids, weights, *expert_weights, max_rows=4, world=world, plan="dispatched")
        counted, calls = backend.left_out, [0]

        def late() -> int:
            calls[0] += 1
            return 0 if calls[0] == 1 else counted()

        backend.left_out = late  # type: ignore[method-assign]
        for _ in range(3):
            try:
                moe.moe(x, ids, weights, *expert_weights, world=world, plan="sequential")
            except weft.Overflow:
                raised += 1
        return raised

    assert emulate(main) == [1, 1]


def test_the_worst_case_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: weft.World) -> None:
        expert_weights = Model(world, LAYER, False).local_weights[:2]
        for options in (dict(max_rows=20), {}, {}):
            moe.moe(*local_operands(world, LAYER, 6), *expert_weights, **options, world=world)

    with caplog.at_level(logging.INFO, "weft"):
        emulate(main)
    most = 8 * 8 // (2 * 2)  # the largest number of tokens of a rank if the ranks' numbers differ little
    rows = 2 * most * 2 + 4 * 16  # padded to tiles of 16
    messages = [r.message for r in caplog.records if "max_rows" in r.message]
    assert len(messages) == 1 and all(f"for the {rows} rows of the worst case" in line for line in messages)


# -- counts, and repeated experts --------------------------------------------------------------------------------------


@covered(r"1-(\w+)", covering=r"[2-\1]")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_received_by_each_expert(plan: str, ranks: int) -> None:
    def main(world: weft.World) -> None:
        local, all_ids = 8 // world.size, [at_random(3, r, 6, LAYER, world.size) for r in range(world.size)]
        expert_weights, received = (
            Model(world, LAYER, False).local_weights[:2],
            torch.full((local,), -1, dtype=torch.int32),
        )
        moe.moe(*local_operands(world, LAYER, 6, 3), *expert_weights, received=received, world=world, plan=plan)
        world.synchronize()
        expected = torch.stack(all_ids).flatten().bincount(minlength=8)[world.rank * local :][:local]
        assert received.tolist() == expected.tolist()
        with pytest.raises(ValueError, match=rf"received .* must be int32 \[{local}\]"):
            moe.moe(*local_operands(world, LAYER, 6), *expert_weights, received=received.long(), world=world)

    emulate(main, ranks)


@covered(r"1-(\w+)", covering=r"[0-\1]")
@pytest.mark.parametrize("plan", ["dispatched", "fused", "low_latency"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_received_in_successive_calls(plan: str, seed: int) -> None:
    """Routes of the next call, which some ranks have already begun, are not counted."""
    calls = 3

    def main(world: weft.World) -> None:
        local, expert_weights = LAYER.experts // world.size, Model(world, LAYER, False).local_weights[:2]
        counts = [torch.full((local,), -1, dtype=torch.int32) for _ in range(calls)]
        for i, received in enumerate(counts):
            moe.moe(*local_operands(world, LAYER, 6, i), *expert_weights, received=received, world=world, plan=plan)
        world.synchronize()
        for i, received in enumerate(counts):
            ids = torch.cat([at_random(i, r, 6, LAYER, world.size).flatten() for r in range(world.size)])
            assert received.tolist() == ids.bincount(minlength=8)[world.rank * local :][:local].tolist(), i

    emulate(main, 4, seed=seed)


def test_counts_under_torch_compile() -> None:
    def main(world: weft.World) -> None:
        expert_weights, (x, ids, weights) = (
            Model(world, LAYER, False).local_weights[:2],
            local_operands(world, LAYER, 6),
        )

        def fn(x: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
            y = moe.moe(x, ids, weights, *expert_weights, received=received, max_tokens=8, max_rows=40, world=world)
            return y * received.sum()

        eager, compiled = (torch.zeros(4, dtype=torch.int32) for _ in range(2))
        expected, actual = fn(x, eager), torch.compile(fn, backend="aot_eager", fullgraph=True)(x, compiled)
        world.synchronize()
        assert torch.equal(actual, expected) and torch.equal(eager, compiled) and eager.any()

    torch._dynamo.reset()
    emulate(main)


@pytest.mark.parametrize("plan", PLANS)
def test_a_repeated_expert_counts_twice(plan: str) -> None:
    """A rank with a single expert then receives twice as many rows as distinct ids could give. The rows fit if max_rows
    allows; otherwise they are dropped and reported."""

    def main(world: weft.World) -> float:
        layer = Layer(40, 2, 2, 32, 24, torch.bfloat16)
        model, x = Model(world, layer, False), draw(world.rank, 40, 32)
        weights = draw(7 + world.rank, 40, 2, dtype=torch.float32).abs()
        worst = 0.0
        for t in (3, 40):
            ids = torch.zeros(t, 2, dtype=torch.int32)
            y = moe.moe(x[:t], ids, weights[:t], *model.local_weights[:2], world=world, plan=plan)
            if t == 40 and plan == "dispatched":  # 160 rows arrive; there is space for 80 and a tile
                assert overflow_of(world).startswith((OWN.format(0, 64), OTHERS.format(1, 0, 64))[world.rank])
                continue
            world.synchronize()
            if t == 3:
                worst = max(worst, distance(y, model(x[:t], ids, weights[:t])))
        return worst

    assert max(emulate(main)) < BOUND


# -- options that change a routing -------------------------------------------------------------------------------------


def module_case(world: weft.World, **options: Any) -> tuple[moe.MoE, torch.Tensor, torch.Tensor]:
    """Return a layer of 4 experts, its result for 9 tokens, and the float32 reference, which ignores the options."""
    e, h, i = 4, 32, 24
    state = {"gate.weight": draw(3, e, h), "experts.gate_up_proj": draw(1, e, 2 * i, h) * 0.2}
    state["experts.down_proj"] = draw(2, e, h, i) * 0.2
    layer = moe.MoE(h, i, e, 2, world=world, **options)
    layer.load_experts(state)
    x = draw(50 + world.rank, 9, h)
    plain = moe.MoE(h, i, e, 2, world=world)
    plain.load_experts(state)
    with torch.no_grad():
        actual, expected = layer(x).clone(), plain(x)
    return layer, actual, expected


def test_the_module_moves_experts() -> None:
    """Experts are replicated, then replaced and loaded again; the result stays the same."""

    def main(world: weft.World) -> None:
        table = torch.tensor([[3, 0, -1], [1, -1, -1], [2, 4, 5], [6, 7, -1]], dtype=torch.int32)
        layer, actual, expected = module_case(world, placement=table, count_received=True)
        assert distance(actual, expected) < BOUND and tuple(layer.w2.shape[:1]) == (4,)
        assert int(sum(world.exchange(int(layer.received.sum())))) == 2 * 9 * 2
        assert layer._own_experts(4) == ([0, 1, 2, 0] if world.rank == 0 else [2, 2, 3, 3])
        layer.placement.copy_(table.flip(0))
        state = {"gate.weight": draw(3, 4, 32), "experts.gate_up_proj": draw(1, 4, 48, 32) * 0.2}
        layer.load_experts(state | {"experts.down_proj": draw(2, 4, 32, 24) * 0.2})
        with torch.no_grad():
            again = layer(draw(50 + world.rank, 9, 32))
        assert distance(again, expected) < BOUND and "placement" in layer.state_dict()
        for wrong in ([[0, 1], [2, -1], [3, 3], [4, 5]], [[-1, 0], [1, 2], [3, -1], [4, 5]], [[0], [1], [2]]):
            with pytest.raises(ValueError, match="placement"):
                module_case(world, placement=torch.tensor(wrong, dtype=torch.int32))

    emulate(main)


@pytest.mark.parametrize("parallel", ["expert", "tensor"])
def test_a_fresh_module_is_initialised(parallel: str) -> None:
    """Weights are initialised as in torch.nn.Linear: all ranks have the same router, an expert does not depend on its
    rank, and a second module has different weights. The module can be trained."""

    def main(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
        def fresh() -> moe.MoE:
            return moe.MoE(32, 48, 4, 2, world=world, bias=True, activation="gelu", parallel=parallel).requires_grad_()

        torch.manual_seed(world.rank)
        layer, other_layer = fresh(), fresh()
        for name, p in layer.named_parameters():
            bound = (48 if name in ("w2", "b2") else 32) ** -0.5
            assert 0.5 * bound < p.detach().abs().max() <= bound and p.unique().numel() > 1, name
            assert not torch.equal(p, dict(other_layer.named_parameters())[name]), name
        layer(draw(world.rank, 9, 32)).float().square().sum().backward()
        world.synchronize()
        assert all(p.grad is not None and p.grad.any() for name, p in layer.named_parameters() if "router" not in name)
        routers = world.exchange(layer.router.detach())
        assert all(torch.equal(r, routers[0]) for r in routers)
        return layer.w13.detach().clone(), layer.w2.detach().clone()

    parts = emulate(main)
    assert not torch.equal(parts[0][0], parts[1][0])


def test_the_module_over_a_group_with_limits() -> None:
    def main(world: weft.World) -> None:
        group = world.split(world.rank // 2)
        layer, actual, expected = module_case(world, expert_group=group, max_tokens=9, max_rows=40, capacity_factor=9.0)
        assert distance(actual, expected) < BOUND and not layer.dropped.any() and "experts=2 of 4" in repr(layer)
        layer, actual, expected = module_case(world, expert_group=group, capacity_factor=0.25, drop="probability")
        assert layer.dropped.sum() >= 9 * 2 - 4 * 2 and distance(actual, expected) > BOUND
        assert layer.received is None and (layer.max_tokens, layer.max_rows) == (None, None)

    emulate(main, 4)
