"""Experts whose columns are split over ranks, for `MoE`: which are this rank's, and how they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.moe.expert_parallel.op import moe
from ..ops.moe.tensor_parallel.op import all_gather_grouped_matmul, grouped_matmul_reduce_scatter
from ..plans import Plan
from ..world import World


@dataclass(frozen=True)
class Share:
    """This rank's share: the `group`-th group of `experts` experts, and of each the `part`-th of `sharing` parts of the
    inner size, which has `columns` columns."""

    experts: int
    columns: int
    tp_size: int
    group: int
    part: int

    @classmethod
    def of(cls, world: World, parallel: str | int, experts: int, inner: int, physical: bool) -> Share:
        """Return this rank's share. physical: whether the experts are those of a placement. Raises ValueError for what
        does not divide."""
        tp_size = {"expert": 1, "tensor": world.size}.get(parallel) if isinstance(parallel, str) else parallel
        if type(tp_size) is not int or tp_size < 1 or world.size % tp_size:
            raise ValueError(f'MoE: parallel {parallel!r} is not "expert", "tensor" or a divisor of {world.size} ranks')
        groups = world.size // tp_size
        if experts % groups:
            by = f"the world size {groups}" if tp_size == 1 else f"{groups} groups of ranks"
            what = "physical experts" if physical else "num_experts"
            raise ValueError(f"MoE: {what} {experts} is not divisible by {by}")
        if inner % tp_size:
            raise ValueError(f"MoE: intermediate_size {inner} is not divisible by the {tp_size} ranks that share it")
        return cls(experts // groups, inner // tp_size, tp_size, *divmod(world.rank, tp_size))

    def check(self, given: Mapping[str, object]) -> None:
        """Raises ValueError for options, None where they are not used, that go with whole experts alone."""
        names = ", ".join(name for name, value in given.items() if value is not None)
        if self.tp_size > 1 and names:
            raise ValueError(f"MoE: {names}: only for whole experts, not where {self.tp_size} ranks share one")

    @property
    def own(self) -> slice:
        return slice(self.group * self.experts, (self.group + 1) * self.experts)

    def of_first(self, t: torch.Tensor, layout: str) -> torch.Tensor:
        """This rank's columns of first matrices or biases [El, N, ..]. layout: that of gate and up, as `pack` takes it;
        "" for one matrix alone."""
        halves = t.chunk(2, 1) if layout == "blocked" else (t,)
        return torch.cat([half.chunk(self.tp_size, 1)[self.part] for half in halves], 1)

    def own_routes(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the routes to this rank's experts, numbered from 0, and their weights, [T, n], as `weft.moe.moe` of
        `World.alone` takes them, given routes [T, k] to the experts of all ranks. Other routes have a number of no
        expert. n is k, or the number of this rank's experts where that is less."""
        if ids.shape[1] <= self.experts:
            return ids - self.own.start, weights
        experts = torch.arange(self.experts, dtype=ids.dtype, device=ids.device)
        chosen = (ids - self.own.start)[:, :, None] == experts
        return torch.where(chosen.any(1), experts, -1), (weights[:, :, None] * chosen).sum(1)


def routed(
    split: Share,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    rows: Sequence[int] | None,
    keep: str = "rows",
    world: World,
    plan: str | Plan = "auto",
    **whole: Any,
) -> torch.Tensor:
    """Return what `weft.moe.moe` does: where ranks share the columns of experts, computed by its two halves. whole:
    further options, which go with whole experts alone."""
    common: dict[str, Any] = dict(rows=rows, world=world, plan=plan)
    of_first: dict[str, Any] = dict(b13=b13, activation=activation, keep=keep)
    if split.tp_size == 1:
        out: torch.Tensor = moe(x, ids, weights, w13, w2, b2=b2, shared=shared, **of_first, **common, **whole)
        return out
    common["tp_size"] = split.tp_size
    hidden, routes = all_gather_grouped_matmul(x, ids, weights, w13, inner=split.columns, **of_first, **common)
    return grouped_matmul_reduce_scatter(hidden, routes, ids, w2, b2=b2, shared=shared, **common)
