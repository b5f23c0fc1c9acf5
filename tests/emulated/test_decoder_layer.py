"""The tests compare one decoder layer with its definition in float64, for each layout of hidden states over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_nn import emulate
from weft.nn.decoder_layer import (
    HiddenStates,
    ReplicatedStates,
    RMSNorm,
    ShardedStates,
    Sublayer,
    all_reduce_then_norm,
    decoder_layer,
    own_rows,
)

Tensor = torch.Tensor
H, INNER, TOKENS, EPS, FLOAT16 = 64, 96, 13, 1e-5, torch.float16
SHAPES = {"qkv": (2 * H, H), "out": (H, 2 * H), "up": (INNER, H), "down": (H, INNER)}
WEIGHTS = {name: draw(i, *shape, dtype=FLOAT16) * 0.1 for i, (name, shape) in enumerate(SHAPES.items())}
NORMS = [1 + 0.1 * draw(10 + i, H, dtype=FLOAT16) for i in range(5)]
HIDDEN = draw(20, TOKENS, H, dtype=FLOAT16)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def definition(layers: int) -> Tensor:
    """Compute the last norm [TOKENS, H]. The stand-in for attention mixes each token with its predecessor."""
    w, x = {name: t.double() for name, t in WEIGHTS.items()}, HIDDEN.double()
    y = rms(x, NORMS[0])
    for layer in range(layers):
        x = x + mixed(y @ w["qkv"].t()) @ w["out"].t()
        x = x + (rms(x, NORMS[2 * layer + 1]) @ w["up"].t()).relu() @ w["down"].t()
        y = rms(x, NORMS[2 * layer + 2])
    return y


def mixed(qkv: Tensor) -> Tensor:
    return torch.tanh(qkv + F.pad(qkv, (0, 0, 1, -1)))


class Linear:
    """This rank's columns or rows of a weight."""

    def __init__(self, world: weft.World, name: str, dim: int) -> None:
        self.world, self.weight = world, WEIGHTS[name].chunk(world.size, dim)[world.rank].contiguous()
        self.widths = [self.weight.shape[0]]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.world.backend.linear(x, self.weight, None, self.world.current_stream(), out)

    def gathered(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        return weft.all_gather_matmul(x, self.weight, world=self.world, rows=shards)

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        return self(x, out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        return weft.matmul_reduce_scatter(x, self.weight, world=self.world, rows=shards)


class Mlp:
    def __init__(self, world: weft.World) -> None:
        self.world, self.up, self.down = world, Linear(world, "up", 0), Linear(world, "down", 1)

    def relu(self, x: Tensor) -> Tensor:
        self.world.call(x.relu_, [x], [x], self.world.current_stream())
        return x

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        return self.down(self.relu(self.up(x)), out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        return self.down.sharded(self.relu(self.up.gathered(x, shards)), shards)


class EachPart:
    """Attention over one part of the tokens after another; the first token of a part attends to the last token of the
    part before."""

    def __init__(self, world: weft.World) -> None:
        self.world, self.qkv, self.out = world, Linear(world, "qkv", 0), Linear(world, "out", 1)
        self.cache = world.zeros((1, self.qkv.widths[0]), FLOAT16)

    def __call__(self, states: HiddenStates) -> tuple[Sublayer, Tensor]:
        return self, states.normed

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        return self.out(self.heads(self.qkv(x), part), out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        return self.out.sharded(self.heads(self.qkv.gathered(x, shards), 0), shards)

    def heads(self, qkv: Tensor, part: int) -> Tensor:
        heads = self.world.empty(qkv.shape, qkv.dtype)

        def attend() -> None:
            before = self.cache if part else torch.zeros_like(self.cache)
            heads.copy_(mixed(torch.cat([before, qkv]))[1:])
            self.cache.copy_(qkv[-1:])

        self.world.call(attend, [qkv], [heads, self.cache], self.world.current_stream())
        return heads


class AllAtOnce(EachPart):
    """Attention over all tokens in one call."""

    def __call__(self, states: HiddenStates) -> tuple[Sublayer, Tensor]:
        return self.out, self.heads(states.project(self.qkv, states.normed), 0)


def states_of(world: weft.World, how: str) -> HiddenStates:
    first_norm = lambda x: weft.rms_norm(x, NORMS[0], EPS, world=world)  # noqa: E731
    if how == "sharded":
        shard = own_rows(HIDDEN, world)
        return ShardedStates(world, shard, first_norm(shard), HIDDEN.shape)
    parts = {"two parts": (5, TOKENS - 5)}.get(how, ())
    if how == "plain":
        return ReplicatedStates(
            world, HIDDEN, first_norm(HIDDEN), full_residual=True, allreduce_norm=all_reduce_then_norm
        )
    return ReplicatedStates(world, HIDDEN, first_norm(HIDDEN), parts, full_residual=how == "whole")


def last_norm(world: weft.World, how: str, attention: Callable[[weft.World], EachPart], layers: int = 2) -> Tensor:
    states = states_of(world, how)
    for layer in range(layers):
        norms = [RMSNorm(NORMS[2 * layer + i], EPS) for i in (1, 2)]
        decoder_layer(states, attention(world), Mlp(world), (norms[0], norms[1]), layer == layers - 1)
    y = states.gathered()
    world.finish(world.current_stream())
    return y


HOW = ("one part", "whole", "plain", "two parts", "sharded")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("attention", [EachPart, AllAtOnce])
@pytest.mark.parametrize("how", HOW)
def test_every_way_gives_the_layers_definition(how: str, attention: type[EachPart], ranks: int) -> None:
    """Ranks share the 13 tokens unevenly."""
    results = emulate(lambda world: last_norm(world, how, attention), ranks)
    assert all(torch.equal(y, results[0]) for y in results)
    assert distance(results[0], definition(2)) < 2e-3


def test_the_last_rows_outlive_the_next_pass() -> None:
    def rank(world: weft.World) -> bool:
        first_pass = last_norm(world, "two parts", AllAtOnce)
        kept = first_pass.clone()
        last_norm(world, "two parts", AllAtOnce, layers=1)
        return torch.equal(first_pass, kept)

    assert emulate(rank, 2) == [True, True]


@pytest.mark.parametrize("attention", [EachPart, AllAtOnce])
def test_two_parts_that_do_not_wait_are_a_race(attention: type[EachPart], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.nn.weave.Weave.wait", lambda *_: None)
    with pytest.raises(weft.WeftError, match="race"):
        emulate(lambda world: last_norm(world, "two parts", attention), 2)


def test_more_than_two_parts_are_refused() -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(ValueError, match="3 parts: one or two are woven"):
            ReplicatedStates(world, HIDDEN, HIDDEN, (4, 4, 5))

    emulate(rank, 1)
