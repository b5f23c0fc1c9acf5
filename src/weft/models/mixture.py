"""The MLP of a decoder's layer as a mixture of experts, its experts split over the ranks: each brings its own rows.

    rows of this rank -> router, gate -> weft.moe -> + sigmoid(x . shared_expert_gate) * shared_expert(x) -> same rows

The experts' dispatch and combine move rows between the ranks themselves, so the layer before leaves the rows where
their owner is (the plan "sequence" of llama.py): attention ends with a reduce-scatter and begins with an all-gather, as
it does before a dense MLP. Were the rows on every rank, as the other plans leave them, each rank would route a part of
them and an all-gather would follow: the same bytes as the all-gather of "sequence", but beside no GEMM, and an
all-reduce before it where a reduce-scatter does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from ..nn.mlp import ParallelMLP
from ..nn.moe import CheckpointLayer, stacked
from ..nn.sharded import Sharded, part_of
from ..ops.moe.gate import gate
from ..ops.moe.op import moe, pack
from ..world import World
from .config import Config
from .weight import Weight

Tensor = torch.Tensor


class Experts(Sharded):
    """Experts d E / W to (d + 1) E / W - 1 of rank d. State dict: gate_up_proj [E / W, 2 I, H], down_proj [E / W, H, I]
    as in Transformers.

    parameters  w13 as `weft.moe.pack` lays it out, w2 [E / W, H, I]
    """

    sharded_dim = {"gate_up_proj": 0, "down_proj": 0}
    held = ("w13", "w2")

    def __init__(self, experts: int, hidden: int, inner: int, world: World, dtype: torch.dtype) -> None:
        super().__init__(world, dtype)
        local, self.block = part_of("num_experts", experts, world), world.scale.interleave
        both = 2 * -(-inner // self.block) * self.block
        self.w13 = nn.Parameter(torch.zeros(local, both, hidden, dtype=dtype, device=world.device))
        self.w2 = nn.Parameter(torch.empty(local, hidden, inner, dtype=dtype, device=world.device))
        self.fill({"gate_up_proj": hidden**-0.5, "down_proj": inner**-0.5})

    def get_shard(self, name: str) -> Tensor:
        if name == "down_proj":
            return self.w2
        local, both, hidden = self.w13.shape
        halves = self.w13.view(local, -1, 2, self.block, hidden).transpose(1, 2).reshape(local, 2, both // 2, hidden)
        return halves[:, :, : self.w2.shape[2]].flatten(1, 2)

    def set_shard(self, name: str, value: Tensor) -> None:
        if name == "down_proj":
            self.w2.copy_(value)
        else:
            self.w13.copy_(pack(value, world=self.world))


class MixtureMLP(nn.Module):
    """x [m_r, H] -> [m_r, H], the rows of this rank. State dict: gate.weight, experts.*, and where there is a shared
    expert, shared_expert.{gate,up,down}_proj.weight and shared_expert_gate.weight, as Transformers names them.

    The router is whole on every rank, the experts are split, and the shared expert is tensor-parallel. Experts load one
    by one too, as checkpoints have them: w1, w3 and w2 (Mixtral), or gate_proj, up_proj and down_proj (Qwen).
    """

    def __init__(self, config: Config, world: World, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        mixture, hidden = config.mixture, config.hidden_size
        assert mixture is not None
        self.world, self.mixture = world, mixture
        self.gate = Weight(mixture.num_experts, hidden, world=world, dtype=dtype, seed=seed)
        self.experts = Experts(mixture.num_experts, hidden, mixture.intermediate_size, world, dtype)
        if inner := mixture.shared_intermediate_size:
            self.shared_expert = ParallelMLP(hidden, inner, world=world, dtype=dtype)
            self.shared_expert_gate = Weight(1, hidden, world=world, dtype=dtype, seed=seed + 1)

    def forward(self, x: Tensor, rows: Sequence[int] | None = None, slots: Tensor | None = None) -> Tensor:
        """rows: rows of every rank's x, where they are not all equal. slots: int32 [m_r]; rows of slot -1 are padding,
        which goes to no expert."""
        world, mixture, stream = self.world, self.mixture, self.world.current_stream()
        logits = world.linear(x, self.gate.weight, None, stream)
        ids, weights = gate(logits, mixture.top_k, world=world, renormalise=mixture.renormalise)
        if slots is not None:
            world.call(lambda: ids.masked_fill_(slots[:, None] < 0, -1), [ids, slots], [ids], stream)
        shared = self._shared(x, rows) if mixture.shared_intermediate_size else None
        return moe(x, ids, weights, self.experts.w13, self.experts.w2, shared=shared, rows=rows, world=world)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        single = [name for name in state_dict if re.match(rf"{re.escape(prefix)}experts\.\d", name)]
        if single:
            names = CheckpointLayer({name: state_dict.pop(name) for name in single}, prefix)
            w13, w2, _ = stacked(names, self.gate.weight.shape[1])
            state_dict |= {f"{prefix}experts.gate_up_proj": w13, f"{prefix}experts.down_proj": w2}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _shared(self, x: Tensor, rows: Sequence[int] | None) -> Tensor:
        world, stream = self.world, self.world.current_stream()
        share = world.linear(x, self.shared_expert_gate.weight, None, stream)
        y = self.shared_expert(x, rows)
        world.call(lambda: y.mul_(share.sigmoid()), [y, share], [y], stream)
        return y


def mlp_of(config: Config, at: int, world: World, dtype: torch.dtype, seed: int) -> ParallelMLP | MixtureMLP:
    """The MLP of layer `at`."""
    if config.mixture is not None and at not in config.mixture.dense_layers:
        return MixtureMLP(config, world, dtype, seed)
    return ParallelMLP(config.hidden_size, config.intermediate_size, world=world, dtype=dtype)
