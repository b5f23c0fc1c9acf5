"""A mixture-of-experts layer as a module: the router, the experts of this rank, and an optional shared expert."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, pairwise

import torch
from torch import nn

from ..op import check_call
from ..ops.moe.call import ACTIVATIONS
from ..ops.moe.expert_parallel.op import pack
from ..ops.moe.routing.capacity import apply_capacity
from ..ops.moe.routing.placement import expert_placement
from ..ops.moe.routing.router import TopKRouter
from ..plans import FusedMoe, Plan
from ..tensor_checks import check_device, dims
from ..world import World
from .split import Share, routed


class MoE(nn.Module):
    """A mixture-of-experts layer, x [T, H] -> [T, H], for the tokens of every rank.

        router     [E, H], the same on all ranks, with router_bias [E] or None; `scoring` and further options are as in
                   `weft.moe.gate`
        w13, w2    this rank's experts, packed (`weft.moe.pack`), with b13 and b2 or None
        placement  int32 [E] or [E, R], or None
        received   int32 [El], the rows that each of this rank's experts received in the last call, or None without
                   count_received
        dropped    int32 [E], the routes of this rank that were dropped, or None without a capacity_factor

    H is hidden_size, I intermediate_size, E num_experts, k top_k. Router and experts are initialised like
    torch.nn.Linear, from a seed that the first rank of `world` draws. The router is therefore the same on all ranks,
    and an expert is the same on any rank. The constructor is therefore collective. The parameters are frozen:
    `load_experts` loads a checkpoint's tensors, and `requires_grad_()` makes the parameters trainable. A rank's
    gradients of the router and of the shared expert cover only the rank's own tokens. `received` and `dropped` use the
    same memory in every call, so a CUDA graph's replays update them. With plan `FusedMoe(route=True)`, the router runs
    in the layer's launch, unless the caller passes routes to `forward`, or a capacity or a placement changes the
    routes.

    Args:
        world: the ranks.
        expert_group: the ranks over which the experts are split (`world.split`); each group has all experts. None: all
            W ranks.
        shared: a module from [T, H] to [T, H] whose rows are added (a shared expert, the same on all ranks), or None.
        capacity_factor, drop: as in `weft.moe.apply_capacity`; None: no route is dropped.
        max_tokens, max_rows, keep: as in `weft.moe.moe`.
        placement: the physical experts of each logical one, as in `weft.moe.expert_placement`; each number from 0 to
            P - 1 occurs once, and a rank holds P / W. To move experts, write a new placement of as many experts to it
            on all ranks, and call `load_experts`. None: the logical experts are the physical ones.
        parallel: "expert": rank d of W holds experts d E / W to (d + 1) E / W - 1, physical ones where there is a
            placement (`weft.moe.moe`). "tensor": every rank holds I / W columns of all experts
            (`weft.all_gather_grouped_matmul`, `weft.grouped_matmul_reduce_scatter`). A number n: n neighbouring ranks
            share the columns of the same experts, and each such group of ranks has different experts. If ranks share
            columns, placement, max_tokens, max_rows and count_received are not available, and `keep` is as in
            `weft.all_gather_grouped_matmul`.

    Raises:
        ValueError: the ranks do not divide E or P, or the ranks that share columns do not divide I; the placement does
            not have each number once; an option is not available where ranks share columns; or `weft.moe.moe` does not
            know the activation.
    """

    placement: torch.Tensor | None
    received: torch.Tensor | None
    dropped: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        world: World,
        expert_group: World | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        scoring: str = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        shared: nn.Module | None = None,
        capacity_factor: float | None = None,
        drop: str = "position",
        max_tokens: int | None = None,
        max_rows: int | None = None,
        keep: str = "rows",
        placement: torch.Tensor | None = None,
        count_received: bool = False,
        parallel: str | int = "expert",
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        full_world, world = world, world if expert_group is None else expert_group
        check_call("MoE", world, plan)
        if activation not in ACTIVATIONS:
            raise ValueError(f"MoE: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        super().__init__()
        physical = num_experts if placement is None else placed(placement, num_experts)
        self.split = split = Share.for_rank(world, parallel, physical, intermediate_size, placement is not None)
        counted = count_received or None
        split.check(dict(placement=placement, max_tokens=max_tokens, max_rows=max_rows, count_received=counted))
        self.capacity_factor, self.drop, self.max_tokens, self.max_rows = capacity_factor, drop, max_tokens, max_rows
        self.world, self.plan, self.activation, self.top_k = world, plan, activation, top_k
        self.scoring, self.renormalise, self.scale, self.shared, self.keep = scoring, renormalise, scale, shared, keep
        wide = 1 if activation == "gelu" else 2

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=world.device)

        w13 = zeros(split.experts, wide * split.columns, hidden_size)
        w13 = w13 if wide == 1 else pack(w13, world=world)

        def counts(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=world.device)

        self.register_buffer("placement", None if placement is None else placement.to(world.device, torch.int32))
        self.register_buffer("received", counts(split.experts) if count_received else None, persistent=False)
        self.register_buffer("dropped", None if capacity_factor is None else counts(num_experts), persistent=False)

        frozen = partial(nn.Parameter, requires_grad=False)
        self.router = frozen(zeros(num_experts, hidden_size))
        self.router_bias = frozen(zeros(num_experts)) if bias else None
        self.w13, self.w2 = frozen(w13), frozen(zeros(split.experts, hidden_size, split.columns))
        self.b13 = frozen(zeros(*w13.shape[:-1])) if bias else None
        self.b2 = frozen(zeros(split.experts, hidden_size)) if bias and split.part == 0 else None
        self._initialise(full_world.exchange(int(torch.randint(1 << 62, ())))[0])

    def route(
        self, x: torch.Tensor, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the expert ids, int32 [T, k], and weights, float32 [T, k], of the tokens x, and the router's logits
        [T, E]. ids: the expert ids of an earlier pass to reuse (routing replay); if None, the router chooses the best
        experts."""
        return self._top_k_router(x, world=self.world, ids=ids)

    @property
    def _top_k_router(self) -> TopKRouter:
        return TopKRouter(self.router, self.top_k, self.router_bias, self.scoring, self.renormalise, scale=self.scale)

    @property
    def _routes_in_launch(self) -> bool:
        """Return whether the layer's launch includes the router, which requires that nothing changes the router's
        routes."""
        if torch.compiler.is_compiling() or not isinstance(self.plan, FusedMoe) or not self.plan.route:
            return False
        return self.capacity_factor is None and self.placement is None and self.split.tp_size == 1

    def forward(
        self,
        x: torch.Tensor,
        rows: Sequence[int] | None = None,
        routes: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the layer's result for x.

        Args:
            x: [T, H], of the experts' dtype.
            rows: the numbers of tokens of all ranks of the group, if they are not all equal and there is no max_tokens.
            routes: ids and weights of x, from `route` if a loss needs them too, or from the caller's own router. None:
                `route` computes them.

        Raises:
            ValueError: x is not [T, H] of the experts' dtype.
        """
        check_device("MoE", self.world, "x", x)
        if x.dim() != 2 or x.shape[1] != self.w2.shape[1] or x.dtype != self.w13.dtype:
            wanted = f"[T, {self.w2.shape[1]}] {str(self.w13.dtype).removeprefix('torch.')}"
            raise ValueError(f"MoE: x {dims(x)} must be {wanted}, as its experts are: x.flatten(0, -2), x.to(dtype)")
        if routes is None and self._routes_in_launch:
            return self._experts(x, None, None, rows, self._top_k_router)
        ids, weights = self.route(x)[:2] if routes is None else routes
        if self.capacity_factor is not None and self.dropped is not None:
            ids, dropped = apply_capacity(
                ids, weights, self.router.shape[0], self.capacity_factor, drop=self.drop, world=self.world
            )
            self.dropped.copy_(dropped)
        if self.placement is not None:
            ids = expert_placement(ids, self.placement, world=self.world)
        return self._experts(x, ids, weights, rows)

    def _experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        rows: Sequence[int] | None,
        router: TopKRouter | None = None,
    ) -> torch.Tensor:
        shared = None if self.shared is None else self.shared(x)
        whole = dict(max_tokens=self.max_tokens, max_rows=self.max_rows, received=self.received, router=router)
        return routed(
            self.split, x, ids, weights, self.w13, self.w2, self.b13, self.b2, shared, activation=self.activation,
            rows=rows, keep=self.keep, world=self.world, plan=self.plan, **whole,
        )  # fmt: skip

    @torch.no_grad()
    def load_experts(self, state: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Load the router and this rank's experts from a layer's part of a checkpoint, under Transformers' names.

        Args:
            state: the checkpoint's tensors by name: `gate.weight` or `router.weight` (`.bias`); the experts one by one
                (`experts.N.w1/w3/w2.weight` of Mixtral, `experts.N.gate_proj/up_proj/down_proj.weight` of Qwen and
                DeepSeek) or in one tensor: `experts.gate_up_proj` and `experts.down_proj`, [E, 2 I, H] and [E, H, I],
                or GPT-OSS's [E, H, 2 I] and [E, I, H] with alternating gate and up columns and `_bias`es.
            prefix: only names that begin with this prefix are read; the prefix is removed.

        Raises:
            KeyError: a name is missing.
            ValueError: a tensor has a wrong shape.
        """
        names = CheckpointLayer(state, prefix)
        router = "gate" if "gate.weight" in names else "router"
        self._set(self.router, names[f"{router}.weight"])
        if self.router_bias is not None:
            self._set(self.router_bias, names[f"{router}.bias"])
        w13, w2, layout = stacked(names, self.w13.shape[-1])
        own_experts = self._own_experts(self.router.shape[0])
        biases = [] if self.b13 is None else [names[f"experts.{n}_proj_bias"][own_experts] for n in ("gate_up", "down")]
        self._set_experts(layout, w13[own_experts], w2[own_experts], *biases)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw the weights of the router and of this rank's experts. An expert's number is the seed of its values, so
        no rank has to draw the values of other ranks' experts."""
        split, (experts, hidden) = self.split, self.router.shape
        inner, wide = split.columns * split.tp_size, 1 if self.activation == "gelu" else 2
        generator = torch.Generator(self.router.device)

        def draw(fan_in: int, *shape: int) -> torch.Tensor:
            bound, values = fan_in**-0.5, self.router.new_empty(shape)
            return values.uniform_(-bound, bound, generator=generator)

        def expert(number: int) -> list[torch.Tensor]:
            generator.manual_seed(seed + 1 + number)
            shapes = [(hidden, wide * inner, hidden), (inner, hidden, inner), (hidden, wide * inner), (inner, hidden)]
            return [draw(*shape) for shape in (shapes if self.b13 is not None else shapes[:2])]

        generator.manual_seed(seed)
        self._set(self.router, draw(hidden, experts, hidden))
        if self.router_bias is not None:
            self._set(self.router_bias, draw(hidden, experts))
        drawn = zip(*(expert(e) for e in self._own_experts(experts)), strict=True)
        self._set_experts("blocked", *(torch.stack(values) for values in drawn))

    def _set_experts(self, layout: str, w13: torch.Tensor, w2: torch.Tensor, *biases: torch.Tensor) -> None:
        """Set this rank's part of the parameters from all columns of this rank's experts."""
        self._set(self.w13, self._packed(w13, layout))
        self._set(self.w2, w2.chunk(self.split.tp_size, 2)[self.split.part])
        if self.b13 is not None:
            self._set(self.b13, self._packed(biases[0], layout))
        if self.b2 is not None:
            self._set(self.b2, biases[1])

    def _own_experts(self, experts: int) -> list[int]:
        """Return the logical experts that this rank holds, in the order of its physical experts."""
        logical = list(range(experts))
        if self.placement is not None:
            placed(self.placement, experts)
            physical = self.placement.view(experts, -1).tolist()
            logical = [e for _, e in sorted((p, e) for e, row in enumerate(physical) for p in row if p >= 0)]
        return logical[self.split.expert_range]

    def _packed(self, t: torch.Tensor, layout: str) -> torch.Tensor:
        t = self.split.w13_columns(t, layout if self.activation != "gelu" else "")
        return t if self.activation == "gelu" else pack(t, world=self.world, layout=layout)

    def _set(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if parameter.shape != value.shape:
            raise ValueError(f"MoE: a tensor {list(value.shape)} of the checkpoint must be {list(parameter.shape)}")
        parameter.copy_(value)

    def extra_repr(self) -> str:
        (local, hidden, inner), tp_size = self.w2.shape, self.split.tp_size
        inner *= tp_size
        sizes = f"hidden_size={hidden}, intermediate_size={inner}, experts={local} of {self.router.shape[0]}"
        sizes += f", columns over {tp_size}" if tp_size > 1 else ""
        return f"{sizes}, top_k={self.top_k}, rank {self.world.rank} of {self.world.size}"


class CheckpointLayer(dict[str, torch.Tensor]):
    """The tensors of a checkpoint whose names begin with `prefix`, under their names without the prefix. The KeyError
    for a missing name lists the existing names."""

    def __init__(self, state: Mapping[str, torch.Tensor], prefix: str) -> None:
        super().__init__({name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)})
        self.prefix, self.names = prefix, list(state)

    def __missing__(self, name: str) -> torch.Tensor:
        raise self.missing(name + (f" (or {self.prefix}gate.weight)" if name == "router.weight" else ""))

    def missing(self, name: str) -> KeyError:
        if not self.names:
            has = "is empty"
        elif self:
            has = f"has {', '.join(self.prefix + name for name in islice(self, 4))}, .."
        else:
            has = f"has nothing that begins with {self.prefix!r}, but {', '.join(self.names[:4])}, .."
        return KeyError(f"{self.prefix}{name} is missing; the checkpoint {has}")


def placed(table: torch.Tensor, experts: int) -> int:
    """Return P, the number of physical experts, for a placement of `experts` logical experts. Raises ValueError if the
    table is not a placement."""
    if table.dim() not in (1, 2) or table.shape[0] != experts:
        raise ValueError(f"MoE: placement {list(table.shape)} must be [{experts}] or [{experts}, R]")
    rows = table.view(experts, -1).tolist()
    numbers = sorted(p for row in rows for p in row if p >= 0)
    last = any(p < 0 <= q for row in rows for p, q in pairwise(row))
    if numbers != list(range(len(numbers))) or last or any(row[0] < 0 for row in rows):
        raise ValueError("MoE: a placement has each physical expert once, and of each logical one all before a -1")
    return len(numbers)


def stacked(names: CheckpointLayer, hidden: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return the weights of the experts, [E, 2 I, H] and [E, H, I], and the layout of the first weight for `pack`."""
    if "experts.gate_up_proj" in names:
        w13, w2 = names["experts.gate_up_proj"], names["experts.down_proj"]
        if "experts.gate_up_proj_bias" in names:  # the layout of GPT-OSS
            return w13.transpose(1, 2), w2.transpose(1, 2), "interleaved"
        return w13, w2, "blocked"
    numbers = {int(m[1]) for name in names if (m := re.match(r"experts\.(\d+)\.", name))}
    gate, up, down = ("w1", "w3", "w2") if "experts.0.w1.weight" in names else ("gate_proj", "up_proj", "down_proj")
    gate_up = [torch.cat([names[f"experts.{e}.{part}.weight"] for part in (gate, up)]) for e in sorted(numbers)]
    downs = [names[f"experts.{e}.{down}.weight"] for e in sorted(numbers)]
    if not gate_up:
        raise names.missing("experts.gate_up_proj (or experts one by one)")
    return torch.stack(gate_up), torch.stack(downs), "blocked"
