"""The experts, or the columns of experts, that a rank of `MoE` holds, and the functions that run these experts."""

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
    """This rank's share of the experts: the `experts` experts of group `group`. `tp_size` ranks split the columns of an
    expert; this rank holds part `part`, which has `columns` columns."""

    experts: int
    columns: int
    tp_size: int
    group: int
    part: int

    @classmethod
    def for_rank(cls, world: World, parallel: str | int, experts: int, inner: int, physical: bool) -> Share:
        """Return this rank's share. `physical` is true if a placement numbers the experts. Raises ValueError for sizes
        that are not divisible by the ranks."""
        tp_size = {"expert": 1, "tensor": world.size}.get(parallel) if isinstance(parallel, str) else parallel
        if type(tp_size) is not int or tp_size < 1 or world.size % tp_size:
            raise ValueError(f'MoE: parallel {parallel!r} is not "expert", "tensor" or a divisor of {world.size} ranks')
        groups = world.size // tp_size
        if experts % groups:
            divisor = f"the world size {groups}" if tp_size == 1 else f"{groups} groups of ranks"
            count = "physical experts" if physical else "num_experts"
            raise ValueError(f"MoE: {count} {experts} is not divisible by {divisor}")
        if inner % tp_size:
            raise ValueError(f"MoE: intermediate_size {inner} is not divisible by the {tp_size} ranks that split it")
        return cls(experts // groups, inner // tp_size, tp_size, *divmod(world.rank, tp_size))

    def check(self, options: Mapping[str, object]) -> None:
        """Raise ValueError if ranks split experts and one of `options`, which require whole experts, is not None."""
        names = ", ".join(name for name, value in options.items() if value is not None)
        if self.tp_size > 1 and names:
            raise ValueError(f"MoE: {names}: only for whole experts, not where {self.tp_size} ranks split one")

    @property
    def expert_range(self) -> slice:
        """Return this rank's range among the experts of all ranks."""
        return slice(self.group * self.experts, (self.group + 1) * self.experts)

    def w13_columns(self, t: torch.Tensor, layout: str) -> torch.Tensor:
        """Return this rank's columns of w13 or b13 [El, N, ..]. `layout` is the layout of gate and up, as for `pack`;
        "" for experts without a gate."""
        halves = t.chunk(2, 1) if layout == "blocked" else (t,)
        return torch.cat([half.chunk(self.tp_size, 1)[self.part] for half in halves], 1)

    def local_routes(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the routes to this rank's experts, numbered from 0, and their weights, both [T, n], for `weft.moe.moe`
        with `World.alone`. ids and weights [T, k] are routes to the experts of all ranks. Routes to other ranks receive
        an id that belongs to no expert. n is the smaller of k and the number of this rank's experts."""
        if ids.shape[1] <= self.experts:
            return ids - self.expert_range.start, weights
        experts = torch.arange(self.experts, dtype=ids.dtype, device=ids.device)
        chosen = (ids - self.expert_range.start)[:, :, None] == experts
        return torch.where(chosen.any(1), experts, -1), (weights[:, :, None] * chosen).sum(1)


def routed(
    split: Share,
    x: torch.Tensor,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
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
    **expert_options: Any,
) -> torch.Tensor:
    """Return the result of `weft.moe.moe`; if ranks split the columns of experts, the layer's two halves compute it.
    `expert_options` are further options, which require whole experts."""
    common: dict[str, Any] = dict(rows=rows, world=world, plan=plan)
    w13_options: dict[str, Any] = dict(b13=b13, activation=activation, keep=keep)
    if split.tp_size == 1:
        out: torch.Tensor = moe(
            x, ids, weights, w13, w2, b2=b2, shared=shared, **w13_options, **common, **expert_options
        )
        return out
    assert ids is not None and weights is not None
    common["tp_size"] = split.tp_size
    hidden, routes = all_gather_grouped_matmul(x, ids, weights, w13, inner=split.columns, **w13_options, **common)
    return grouped_matmul_reduce_scatter(hidden, routes, ids, w2, b2=b2, shared=shared, **common)
