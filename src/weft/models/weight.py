"""The replicated weights of a decoder: embeddings, norms and routers."""

from __future__ import annotations

import torch
from torch import nn

from ..nn.sharded import Sharded
from ..world import World


class Weight(Sharded):
    """A tensor that is the same on every rank, under the name `weight`."""

    sharded_dim = {"weight": None}
    sharded_parameters = ("weight",)

    def __init__(self, *shape: int, world: World, dtype: torch.dtype, seed: int | None = None) -> None:
        super().__init__(world, dtype)
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype, device=world.device))
        if seed is not None:
            generator = torch.Generator(world.device).manual_seed(seed)
            with torch.no_grad():
                self.weight.normal_(0, shape[-1] ** -0.5, generator=generator)

    def get_shard(self, name: str) -> torch.Tensor:
        return self.weight
