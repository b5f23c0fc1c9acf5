"""The MLP of a decoder layer as a mixture of experts, which ranks split by experts or by columns. Like the hidden
states (nn/decoder_layer.py), it has two forms:

    sharded      own rows -> router -> weft.moe over the ranks -> + shared expert -> same rows
    replicated   all rows -> router -> weft.moe of this rank alone -> + its part of the shared expert -> partial sum

sharded, in the plan "sequence" (llama.py): the experts' dispatch and combine, which move rows between the ranks,
overlap the experts' GEMMs, so the preceding layer leaves the rows with their owner. Attention ends with a
reduce-scatter and begins with an all-gather, as it does before a dense MLP.

replicated, in the other plans: every rank has all rows, and computes the contribution of its experts, or of its columns
of all experts, to their sums. Only the following all-reduce moves rows. This all-reduce and the weaving are the same as
for a dense MLP.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..nn.mlp import ParallelMLP
from ..nn.moe import CheckpointLayer, stacked
from ..nn.sharded import Sharded
from ..nn.split import Share, routed
from ..ops.moe.expert_parallel.op import moe, pack
from ..ops.moe.routing.router import gate
from ..world import World
from .config import Config, Mixture
from .weight import Weight


class Experts(Sharded):
    """Experts d E / W to (d + 1) E / W - 1 of rank d, or columns d I / W to (d + 1) I / W - 1 of all E. State dict:
    gate_up_proj [El, 2 Il, H], down_proj [El, H, Il], with names and order as in Transformers.

    parameters  w13 as `weft.moe.pack` lays it out, w2 [El, H, Il]
    """

    sharded_parameters = ("w13", "w2")

    def __init__(self, mixture: Mixture, hidden: int, world: World, dtype: torch.dtype) -> None:
        super().__init__(world, dtype)
        self.split = split = Share.for_rank(
            world, mixture.parallel, mixture.num_experts, mixture.intermediate_size, False
        )
        columns, inner, block = mixture.parallel == "tensor", split.columns, world.backend.scale.interleave
        self.sharded_dim = {"gate_up_proj": 1, "down_proj": 2} if columns else {"gate_up_proj": 0, "down_proj": 0}
        shape = split.experts, -(-inner // block), 2, block, hidden
        self.w13 = nn.Parameter(torch.zeros(shape, dtype=dtype, device=world.device))
        self.w2 = nn.Parameter(torch.empty(split.experts, hidden, inner, dtype=dtype, device=world.device))
        self.fill({"gate_up_proj": hidden**-0.5, "down_proj": mixture.intermediate_size**-0.5})

    def get_shard(self, name: str) -> Tensor:
        if name == "down_proj":
            return self.w2
        halves = self.w13.transpose(1, 2).flatten(2, 3)
        return halves[:, :, : self.w2.shape[2]].flatten(1, 2)

    def set_shard(self, name: str, value: Tensor) -> None:
        if name == "down_proj":
            self.w2.copy_(value)
        else:
            self.w13.copy_(pack(value, world=self.world))

    def local_shard(self, name: str, value: Tensor, shape: torch.Size) -> Tensor | None:
        """Return this rank's part of a tensor. The part of gate_up_proj contains columns of gate and columns of up."""
        part = super().local_shard(name, value, shape)
        gate_and_up = name == "gate_up_proj" and part is not None and value.shape != shape
        return self.split.w13_columns(value, "blocked") if gate_and_up and self.split.tp_size > 1 else part

    def unsharded(self, name: str, shard: Tensor) -> Tensor:
        value, tp_size = super().unsharded(name, shard), self.split.tp_size
        if name == "gate_up_proj" and tp_size > 1:
            return value.unflatten(1, (tp_size, 2, -1)).transpose(1, 2).flatten(1, 3)
        return value


class MixtureMLP(nn.Module):
    """A mixture of experts as the MLP of a decoder layer.

    x [m_r, H] -> [m_r, H], the rows of this rank (`forward`), or x [M, H] of all ranks -> a partial sum
    (`partial_sums`). State dict: gate.weight, experts.*, and where there is a shared expert,
    shared_expert.{gate,up,down}_proj.weight and shared_expert_gate.weight, with Transformers' names.

    Every rank has the whole router; the experts are split, and the shared expert is tensor-parallel. Experts can also
    be loaded one by one, as checkpoints store them: w1, w3 and w2 (Mixtral), or gate_proj, up_proj and down_proj
    (Qwen).
    """

    def __init__(self, config: Config, world: World, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        mixture, hidden = config.mixture, config.hidden_size
        assert mixture is not None
        self.world, self.mixture = world, mixture
        self.gate = Weight(mixture.num_experts, hidden, world=world, dtype=dtype, seed=seed)
        self.experts = Experts(mixture, hidden, world, dtype)
        self.alone = world.alone  # allocated here, because a CUDA graph capture cannot allocate it
        if inner := mixture.shared_intermediate_size:
            self.shared_expert = ParallelMLP(hidden, inner, world=world, dtype=dtype)
            self.shared_expert_gate = Weight(1, hidden, world=world, dtype=dtype, seed=seed + 1)

    def forward(self, x: Tensor, rows: Sequence[int] | None = None, slots: Tensor | None = None) -> Tensor:
        """Return the MLP's result for this rank's rows. rows: the numbers of rows of all ranks, if they are not all
        equal. slots: int32 [m_r], the cache slot of each row; rows with slot -1 are padding, sent to no expert."""
        experts, (ids, weights) = self.experts, self._routes(x, slots)
        shared = self.shared(x, self.shared_expert(x, rows)) if self.mixture.shared_intermediate_size else None
        weights_of_experts = experts.w13, experts.w2
        return routed(experts.split, x, ids, weights, *weights_of_experts, shared=shared, rows=rows, world=self.world)

    def partial_sums(self, x: Tensor, slots: Tensor | None, shared: Tensor | None, out: Tensor | None) -> Tensor:
        """Return [M, H] = shared + this rank's part of the sums for x [M, H], in `out` unless it is None. No rank waits
        for another rank. shared: [M, H] or None; `out` may be the same tensor. slots: int32 [M]."""
        world, experts, (ids, weights) = self.world, self.experts, self._routes(x, slots)
        shape = ids.shape[0], min(ids.shape[1], experts.split.experts)
        own_routes = world.empty(shape, torch.int32), world.empty(shape, torch.float32)

        def pick() -> None:
            for dst, routes in zip(own_routes, experts.split.local_routes(ids, weights), strict=True):
                dst.copy_(routes)

        world.call(pick, [ids, weights], own_routes, world.current_stream())
        return moe(x, own_routes[0], own_routes[1], experts.w13, experts.w2, shared=shared, world=self.alone, out=out)

    def shared(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply y, the rows or partial sums of the shared expert for x, in place by each row's sigmoid gate, and
        return it."""
        world, stream = self.world, self.world.current_stream()
        share = world.backend.linear(x, self.shared_expert_gate.weight, None, stream)
        world.call(lambda: y.mul_(share.sigmoid()), [y, share], [y], stream)
        return y

    def _routes(self, x: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ids int32 and weights float32, both [rows, k], of routes to the experts of all ranks."""
        world, stream = self.world, self.world.current_stream()
        logits = world.backend.linear(x, self.gate.weight, None, stream)
        ids, weights = gate(logits, self.mixture.top_k, world=world, renormalise=self.mixture.renormalise)
        if slots is not None:
            world.call(lambda: ids.masked_fill_(slots[:, None] < 0, -1), [ids, slots], [ids], stream)
        return ids, weights

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        single = [name for name in state_dict if re.match(rf"{re.escape(prefix)}experts\.\d", name)]
        if single:
            names = CheckpointLayer({name: state_dict.pop(name) for name in single}, prefix)
            w13, w2, _ = stacked(names, self.gate.weight.shape[1])
            state_dict |= {f"{prefix}experts.gate_up_proj": w13, f"{prefix}experts.down_proj": w2}
        super()._load_from_state_dict(state_dict, prefix, *args)


def mlp_of(config: Config, layer_index: int, world: World, dtype: torch.dtype, seed: int) -> ParallelMLP | MixtureMLP:
    """Return the MLP of layer `layer_index`."""
    if config.mixture is not None and layer_index not in config.mixture.dense_layers:
        return MixtureMLP(config, world, dtype, seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    return ParallelMLP(hidden, inner, world=world, dtype=dtype, recipe=config.recipe)
