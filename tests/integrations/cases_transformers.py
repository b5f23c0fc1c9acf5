"""Compare a woven mixture of experts with the original model. The two models round in different places, so they may
choose different experts for a token whose next two best experts are within rounding. Therefore the original model runs
with the experts that the woven model chose. All logits must then be close, and rounding must explain each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import weft
from weft import hf
from weft.integrations.transformers.moe import router_of
from weft.integrations.transformers.parameters import local_of


class Routed(NamedTuple):
    """One call of a router: x [T, H], ids [T, k]."""

    router: Any
    x: torch.Tensor
    ids: torch.Tensor


class Compared(NamedTuple):
    """The fields are the distance of the logits relative to their norm, for all tokens (`of_all`) and for the farthest
    token (`of_token`); `unexplained`, the largest such value over routers and tokens; and `moved`, the number of routes
    that differ from the original model's."""

    of_all: float
    of_token: float
    unexplained: float
    moved: int

    def error(self) -> float:
        """Return the largest distance of logits, or the distance of a route that rounding does not explain."""
        return max(self.of_all, self.of_token, self.unexplained if self.unexplained > 1 else 0.0)


@contextmanager
def routed(model: Any) -> Iterator[list[Routed]]:
    """Record the calls of the routers of a model's layers in order, before parallelism changes the ids. In a capture, x
    is not recorded, because the graph reuses its memory."""
    seen: list[Routed] = []

    def see(router: Any, inputs: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        seen.append(Routed(router, x.new_empty(0) if captured else x, out[2].long()))

    mlps = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router_of(mlp).register_forward_hook(see, prepend=True) for mlp in mlps]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class Taking(TorchFunctionMode):
    """A mode in which each `torch.topk`, which only routers call, returns the next element of `ids`, on this thread
    only."""

    def __init__(self, ids: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.ids = iter(ids)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.topk:
            return func(*args, **(kwargs or {}))
        ids = next(self.ids)
        return args[0].gather(-1, ids), ids


def unexplained(router: Any, x: torch.Tensor, ids: torch.Tensor) -> tuple[float, int]:
    """Return a measure of the error in the choice of experts by the float32 logits of x. The measure is the maximum
    over all tokens of the difference between the best logit that was not chosen and the lowest chosen one, divided by
    the difference that rounding to bf16 can cause. Also return the number of routes that are not among the best k.
    Rounding explains a value of at most 1.

    Two models round each element of the router's input, and each logit, by at most 2^-9 of it, so that they differ by
    2^-8: the difference of two logits by 2^-8 (|x| . |w_a - w_b| + |a| + |b|), if all signs conspire. x itself was
    rounded earlier, at different places in the two models. But signs do not conspire: n roundings of each of H elements
    have a standard deviation of 0.64 sqrt(n / H) of that bound, which allows H / 10 roundings at five deviations.
    """
    weight, bias = (
        None if t is None else local_of(t).detach().float() for t in (router.weight, getattr(router, "bias", None))
    )
    assert weight is not None
    logits = F.linear(x.float(), weight, bias)
    taken = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    best, a = logits.masked_fill(taken, -torch.inf).max(1)
    least, b = logits.masked_fill(~taken, torch.inf).min(1)
    explained = (x.float().abs() * (weight[a] - weight[b]).abs()).sum(1) + best.abs() + least.abs()
    best_ids = logits.topk(ids.shape[1]).indices
    return ((best - least) / (2**-8 * explained)).max().item(), int((~taken.gather(1, best_ids)).sum())


def compared(model: Any, ids: torch.Tensor, world: weft.World, two_parts: int | None = None) -> Compared:
    """Compare the woven model's logits of ids [.., S] with those of the original model on all ranks."""
    hf.weave(model, world, two_parts=two_parts)
    with routed(model) as calls:
        actual = model(ids, use_cache=False).logits
    hf.unweave(model)
    return by_taken_routes(model, ids, world, actual, [call.ids for call in calls], two_parts)


def by_taken_routes(
    model: Any,
    ids: torch.Tensor,
    world: weft.World,
    actual: torch.Tensor,
    taken: Sequence[torch.Tensor],
    two_parts: int | None = None,
) -> Compared:
    """Compare a woven model's logits `actual` with those of the original model, which uses the routes `taken`, on
    all ranks."""
    if two_parts:  # a router routes the calls one after the other
        taken = [torch.cat(pair) for pair in zip(taken[::2], taken[1::2], strict=True)]
    if taken[0].shape[0] < ids.numel():  # each rank routes its own rows
        taken = [torch.cat(world.exchange(t.cpu())).to(ids.device) for t in taken]
    with routed(model) as calls, Taking(taken):
        expected = model(ids, use_cache=False).logits.float()
    assert len(calls) == len(taken)
    explained = [unexplained(call.router, call.x, taken_ids) for call, taken_ids in zip(calls, taken, strict=True)]
    off = (actual.float() - expected).norm(dim=-1)
    return Compared(
        (off.norm() / expected.norm()).item(),
        (off / expected.norm(dim=-1)).max().item(),
        max(ratio for ratio, _ in explained),
        sum(moved for _, moved in explained),
    )
