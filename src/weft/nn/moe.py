"""A mixture-of-experts layer as a module: router, experts of this rank, and a shared expert beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ..op import check_call
from ..ops.moe.gate import gate
from ..ops.moe.op import moe, pack
from ..ops.moe.steps import ACTIVATIONS
from ..plans import Plan
from ..world import World
from .split import Share, in_parts


class MoE(nn.Module):
    """x [T, H] -> [T, H], the tokens of every rank. Inference only.

    parallel: "expert": rank d of W holds experts d E / W to (d + 1) E / W - 1 (`weft.moe.moe`). "tensor": every rank
    holds I / W columns of all experts (`weft.all_gather_grouped_matmul`, `weft.grouped_matmul_reduce_scatter`). A
    number: so many neighbouring ranks share the columns of the same experts, and others have others.

        router   [E, H], the same on all ranks, with router_bias [E] or None; `scoring` and further options are those of
                 `weft.moe.gate`
        w13, w2  this rank's experts, packed (`weft.moe.pack`), with b13 and b2 or None

    H hidden_size, I intermediate_size, E num_experts, k top_k. shared: a module from [T, H] to [T, H] whose rows are
    added (a shared expert, the same on all ranks), or None. Weights start at zero: `load_experts` takes a checkpoint's.

    Raises ValueError where the ranks do not divide E, or those that share columns I, and for an activation that
    `weft.moe.moe` does not know.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        world: World,
        activation: str = "swiglu",
        bias: bool = False,
        scoring: str = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        shared: nn.Module | None = None,
        parallel: str | int = "expert",
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        check_call("MoE", world, plan)
        if activation not in ACTIVATIONS:
            raise ValueError(f"MoE: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        super().__init__()
        self.split = Share.of(world, parallel, num_experts, intermediate_size)
        local, inner = self.split.experts, self.split.columns
        self.world, self.plan, self.activation, self.top_k = world, plan, activation, top_k
        self.scoring, self.renormalise, self.scale, self.shared = scoring, renormalise, scale, shared
        wide = 1 if activation == "gelu" else 2

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=world.device)

        first = zeros(local, wide * inner, hidden_size)
        first = first if wide == 1 else pack(first, world=world)

        def frozen(t: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(t, requires_grad=False)

        self.router = frozen(zeros(num_experts, hidden_size))
        self.router_bias = frozen(zeros(num_experts)) if bias else None
        self.w13, self.w2 = frozen(first), frozen(zeros(local, hidden_size, inner))
        self.b13 = frozen(zeros(*first.shape[:2])) if bias else None
        self.b2 = frozen(zeros(local, hidden_size)) if bias and self.split.part == 0 else None

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """rows: tokens of every rank, where they are not all equal."""
        logits = nn.functional.linear(x, self.router, self.router_bias)
        ids, weights = gate(
            logits, self.top_k, world=self.world, scoring=self.scoring, renormalise=self.renormalise, scale=self.scale
        )
        shared = None if self.shared is None else self.shared(x)
        run = moe if self.split.sharing == 1 else partial(in_parts, self.split)
        return run(
            x, ids, weights, self.w13, self.w2, b13=self.b13, b2=self.b2, shared=shared, activation=self.activation,
            rows=rows, world=self.world, plan=self.plan,
        )  # fmt: skip

    @torch.no_grad()
    def load_experts(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Router and this rank's experts from a layer's part of a checkpoint, as Transformers names it.

        state, prefix: of names that begin with prefix: `gate.weight` or `router.weight` (`.bias`); the experts one by
        one (`experts.N.w1/w3/w2.weight` of Mixtral, `experts.N.gate_proj/up_proj/down_proj.weight` of Qwen and
        DeepSeek) or in one tensor: `experts.gate_up_proj` and `experts.down_proj`, [E, 2 I, H] and [E, H, I], or
        GPT-OSS's [E, H, 2 I] and [E, I, H] with gate and up in turn and `_bias`es.

        Raises KeyError for a name that is missing, ValueError for a tensor of another shape.
        """
        names = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
        router = "gate" if "gate.weight" in names else "router"
        self._set(self.router, names[f"{router}.weight"])
        if self.router_bias is not None:
            self._set(self.router_bias, names[f"{router}.bias"])
        w13, w2, layout = stacked(names, self.w13.shape[2])
        own, split = self.split.own, self.split
        self._set(self.w13, self._packed(w13[own], layout))
        self._set(self.w2, w2[own].chunk(split.sharing, 2)[split.part])
        if self.b13 is not None:
            self._set(self.b13, self._packed(names["experts.gate_up_proj_bias"][own], layout))
        if self.b2 is not None:
            self._set(self.b2, names["experts.down_proj_bias"][own])

    def _packed(self, t: torch.Tensor, layout: str) -> torch.Tensor:
        t = self.split.of_first(t, layout if self.activation != "gelu" else "")
        return t if self.activation == "gelu" else pack(t, world=self.world, layout=layout)

    def _set(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if parameter.shape != value.shape:
            raise ValueError(f"MoE: a tensor {list(value.shape)} of the checkpoint must be {list(parameter.shape)}")
        parameter.copy_(value)

    def extra_repr(self) -> str:
        (local, hidden, inner), sharing = self.w2.shape, self.split.sharing
        inner *= sharing
        sizes = f"hidden_size={hidden}, intermediate_size={inner}, experts={local} of {self.router.shape[0]}"
        sizes += f", columns over {sharing}" if sharing > 1 else ""
        return f"{sizes}, top_k={self.top_k}, rank {self.world.rank} of {self.world.size}"


def stacked(names: Mapping[str, torch.Tensor], hidden: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Experts [E, 2 I, H] and [E, H, I], and the layout of the first for `pack`."""
    if "experts.gate_up_proj" in names:
        w13, w2 = names["experts.gate_up_proj"], names["experts.down_proj"]
        if "experts.gate_up_proj_bias" in names:  # GPT-OSS
            return w13.transpose(1, 2), w2.transpose(1, 2), "interleaved"
        return w13, w2, "blocked"
    found = {int(m[1]) for name in names if (m := re.match(r"experts\.(\d+)\.", name))}
    gate, up, down = ("w1", "w3", "w2") if "experts.0.w1.weight" in names else ("gate_proj", "up_proj", "down_proj")
    first = [torch.cat([names[f"experts.{e}.{part}.weight"] for part in (gate, up)]) for e in sorted(found)]
    second = [names[f"experts.{e}.{down}.weight"] for e in sorted(found)]
    if not first:
        raise KeyError("experts.gate_up_proj, or experts one by one")
    return torch.stack(first), torch.stack(second), "blocked"
