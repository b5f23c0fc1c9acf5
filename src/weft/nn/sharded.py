"""What the modules share: every rank holds a part of each tensor of the unsharded module, under the unsharded names.

They go in and out as
    state_dict()              this rank's parts, without padding; no communication
    load_state_dict(...)      whole tensors, of which the rank takes its part, or parts as state_dict() gives them
    full_state_dict(model)    the unsharded state dict, on every rank; collective
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..world import World


def part_of(what: str, size: int, world: World) -> int:
    """size / world.size, or a ValueError."""
    if size % world.size:
        raise ValueError(f"{what} {size} is not divisible by the world size {world.size}")
    return size // world.size


class Sharded(nn.Module):
    """`sharded_dim`: by name in the state dict, the dimension that ranks split; None: all ranks hold the same."""

    sharded_dim: dict[str, int | None]

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def get_shard(self, name: str) -> torch.Tensor | None:
        """This rank's part of a tensor of the state dict, unpadded; None where the module has none."""
        raise NotImplementedError

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        raise NotImplementedError

    def own_part(self, name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """The part of shape `shape` of a whole tensor, or the tensor itself where it is one; None if it is neither."""
        dim, world = self.sharded_dim[name], self.world
        if value.shape == shape:
            return value
        if dim is None or value.dim() != len(shape):
            return None
        whole = list(shape)
        whole[dim] *= world.size
        return value.narrow(dim, world.rank * shape[dim], shape[dim]) if list(value.shape) == whole else None

    @torch.no_grad()
    def fill(self, init: dict[str, float]) -> None:
        """Draw uniformly in +-bound, each rank by a seed of its own. A bias starts at zero, so that all ranks agree."""
        seed = int(torch.randint(2**40, (1,)).item()) * self.world.size + self.world.rank
        generator = torch.Generator(self.world.device).manual_seed(seed)
        for name, bound in init.items():
            shape = self.get_shard(name).shape  # type: ignore[union-attr]
            drawn = torch.empty(shape, device=self.world.device).uniform_(-bound, bound, generator=generator)
            self.set_shard(name, drawn)

    def extra_repr(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """A copy has parameters of its own and the same World."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.world)] = self.world
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    # -- torch.nn.Module's protocol
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name in self.sharded_dim:
            value = self.get_shard(name)
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name in self.sharded_dim:
            held, value = self.get_shard(name), state_dict.get(prefix + name)
            if held is None:
                continue
            if value is None:
                missing_keys.append(prefix + name)
                continue
            mine = self.own_part(name, value, held.shape)
            if mine is None:
                error_msgs.append(
                    f"{prefix + name}: {list(value.shape)} is neither the whole tensor nor the part {list(held.shape)} "
                    f"of one of {self.world.size} ranks"
                )
                continue
            with torch.no_grad():
                self.set_shard(name, mine)
        mine_only = {name for name in self.sharded_dim if self.get_shard(name) is not None}
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k[len(prefix) :] not in mine_only]


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a model that holds these modules, on every rank; everything else in it is as in
    `module.state_dict()`. Collective: all ranks must call it. The result loads into the unsharded model, and back."""
    state = module.state_dict()
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, Sharded):
            for name, dim in part.sharded_dim.items():
                key = f"{prefix}.{name}" if prefix else name
                if dim is not None and key in state:
                    state[key] = _gathered(part.world, state[key], dim)
    return state


def _gathered(world: World, x: torch.Tensor, dim: int) -> torch.Tensor:
    if world.size == 1:
        return x
    first = x.transpose(0, dim).contiguous()
    out = world.empty((world.size * first.shape[0], *first.shape[1:]), x.dtype)
    world.all_gather(out, first, world.current_stream())
    world.finish(world.current_stream())
    return out.transpose(0, dim).contiguous()
