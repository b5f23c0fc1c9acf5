"""The router of a mixture of experts is compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from weft.ops.moe.routing.router import gate


def emulate(fn: Any) -> Any:
    return weft.spmd(fn, 1, backend="emulated")[0]


def best(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return the columns of each row's n largest values; the leftmost of equal values comes first."""
    return torch.sort(x, dim=1, descending=True, stable=True).indices[:, :n]


def reference(
    logits: torch.Tensor, k: int, scoring: str = "softmax", renormalise: bool = True, bias: torch.Tensor | None = None,
    groups: int = 0, top_groups: int = 0, scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    x = logits.float()
    scores = {"softmax": torch.softmax(x, 1), "sigmoid": torch.sigmoid(x)}.get(scoring, x)
    select = scores if bias is None else scores + bias.float()
    if groups:
        t, e = x.shape
        by_group = select.view(t, groups, e // groups)
        kept = best(by_group.topk(min(2, e // groups), 2).values.sum(2), top_groups)
        out = torch.ones(t, groups, dtype=torch.bool).scatter(1, kept, False)
        select = select.masked_fill(out.repeat_interleave(e // groups, 1), float("-inf"))
    ids = best(select, k)
    w = scores.gather(1, ids)
    if scoring == "softmax_after":
        w = torch.softmax(w, 1)
    elif scoring == "llama4":
        w = torch.sigmoid(w)
    elif renormalise:
        w = w / (w.sum(1, keepdim=True) + 1e-20)
    return ids.int(), w * scale


def same(logits: torch.Tensor, k: int, **options: Any) -> None:
    ids, weights = emulate(lambda world: gate(logits, k, world=world, **options))
    expected, expected_weights = reference(logits, k, **options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-9)


def drawn(t: int, e: int, seed: int, tied: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(t, e, generator=torch.Generator().manual_seed(seed)) * 2
    return (x.round() if tied else x).to(dtype)


def test_a_trainable_bias_alone_makes_no_gradient() -> None:
    bias = torch.nn.Parameter(torch.zeros(16))
    _, weights = emulate(lambda world: gate(drawn(3, 16, 1), 2, world=world, bias=bias))
    assert not weights.requires_grad


@pytest.mark.parametrize("tied", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_after", "sigmoid", "llama4"])
def test_against_torch(scoring: str, tied: bool) -> None:
    for seed, (t, e, k) in enumerate([(7, 8, 2), (5, 60, 4), (1, 128, 8), (3, 512, 16), (9, 5, 5), (2, 1, 1)]):
        same(drawn(t, e, seed, tied), k, scoring=scoring)
    bias = drawn(1, 60, 9)[0].div(8)
    same(drawn(6, 60, 7, tied), 6, scoring=scoring, bias=bias, scale=2.5, renormalise=False)
    same(drawn(6, 60, 8, tied, torch.bfloat16), 3, scoring=scoring, bias=bias)
    same(drawn(6, 60, 8, tied, torch.float16), 3, scoring=scoring, renormalise=False)


@pytest.mark.parametrize(
    "e, groups, top, k", [(256, 8, 4, 8), (160, 8, 3, 6), (12, 6, 2, 3), (6, 6, 2, 2), (12, 1, 1, 2)]
)
def test_the_choice_is_limited_to_the_best_groups(e: int, groups: int, top: int, k: int) -> None:
    for scoring in ("sigmoid", "softmax", "softmax_after"):
        same(
            drawn(6, e, 1), k, scoring=scoring, bias=drawn(1, e, 2)[0].div(8), groups=groups, top_groups=top, scale=2.5
        )
    same(drawn(6, e, 3, tied=True), k, groups=groups, top_groups=top, scoring="llama4")


def test_no_tokens_and_views() -> None:
    ids, weights = emulate(lambda world: gate(torch.empty(0, 16), 2, world=world))
    assert ids.shape == weights.shape == (0, 2)
    same(drawn(16, 6, 1).t(), 3)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_ids_are_distinct_for_any_logits() -> None:
    x = drawn(6, 16, 1)
    x[0], x[1, 3:], x[2, ::2], x[3], x[4] = float("nan"), float("nan"), float("inf"), float("-inf"), -0.0
    x[4, 1::2] = 0.0
    for scoring in ("softmax", "softmax_after", "sigmoid", "llama4"):
        ids, _ = emulate(lambda world, s=scoring: gate(x, 8, world=world, scoring=s, bias=torch.zeros(16)))
        assert all(len(set(row)) == 8 and 0 <= min(row) and max(row) < 16 for row in ids.tolist())
        if scoring == "llama4":
            assert ids[1].tolist()[:3] == best(x[1:2, :3], 3)[0].tolist() and ids[4].tolist() == list(range(8))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(k=0), "k must be from 1 to 8"),
        (dict(k=9), "k must be from 1 to 8"),
        (dict(scoring="tanh"), "tanh"),
        (dict(bias=torch.zeros(4)), r"bias \[4\]"),
        (dict(groups=3, top_groups=1), "3 equal groups"),
        (dict(groups=4), "go together"),
        (dict(groups=4, top_groups=1, k=3), "fewer than k = 3"),
        (dict(logits=torch.zeros(8)), r"must be \[T, E\]"),
        (dict(logits=torch.zeros(2, 513)), "from 1 to 512"),
        (dict(ids=torch.zeros(2, 3, dtype=torch.int32)), r"ids \[2, 3\]"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = dict(dict(logits=torch.zeros(2, 8), k=2), **options)
    with pytest.raises(ValueError, match=message):
        emulate(lambda world: gate(world=world, **arguments))
    with pytest.raises(TypeError, match="are supported"):
        emulate(lambda world: gate(torch.zeros(2, 8, dtype=torch.float64), 2, world=world))
