"""State dicts, initialisation and gradient clipping of modules whose tensors are sharded over the ranks.

Every rank holds its shard of each tensor of the unsharded module, under the same name.

    state_dict()              this rank's shards, without padding and without communication
    load_state_dict(...)      loads this rank's shard of unsharded tensors, or shards from state_dict(); values are
                              copied in the module's own dtype, also with assign=True
    full_state_dict(model)    the unsharded state dict on every rank; collective

Do not write to the tensors of state_dict(): if a parameter holds several tensors or padding, they are copies, and a
write to them changes no weight. Write to parameters(), or load a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from ..op import check_call
from ..ops.all_reduce.op import all_reduce
from ..tensor_checks import DTYPES
from ..world import World

_unsharded: ContextVar[bool] = ContextVar("unsharded", default=False)  # whether state_dict() returns unsharded tensors


def divide_by_ranks(name: str, size: int, world: World) -> int:
    """Return size / world.size. Raises ValueError, with `name`, if the ranks do not divide the size."""
    check_call(name.partition(":")[0], world)
    if size % world.size:
        raise ValueError(f"{name} {size} is not divisible by the world size {world.size}")
    return size // world.size


class Sharded(nn.Module):
    """A module with sharded tensors.

    `sharded_dim` contains, for each name in the state dict, the dimension that the ranks split; None: all ranks hold
    the same tensor. `sharded_parameters` lists the names of the parameters that store these tensors. `ignored` are
    names in state dicts that the module does not use. torch saves and loads a subclass's other parameters, buffers and
    modules, which are the same on all ranks. Raises TypeError for a dtype that the ops do not support.
    """

    sharded_dim: dict[str, int | None]
    sharded_parameters: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise TypeError(f"{type(self).__name__}: dtype {dtype}; bfloat16 and float16 are supported")
        self.world = world

    def get_shard(self, name: str) -> torch.Tensor | None:
        """Return this rank's shard of a tensor of the state dict, unpadded; None if the module has no such tensor."""
        raise NotImplementedError

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        """Write this rank's shard of a tensor. A subclass overrides this method if `get_shard` returns a copy."""
        shard = self.get_shard(name)
        assert shard is not None
        shard.copy_(value)

    def local_shard(self, name: str, value: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
        """Return this rank's shard, of shape `shape`, of an unsharded tensor. Return the tensor itself if it is already
        a shard, and None if it is neither."""
        dim, world = self.sharded_dim[name], self.world
        if value.shape == shape:
            return value
        if dim is None or value.dim() != len(shape):
            return None
        unsharded_shape = list(shape)
        unsharded_shape[dim] *= world.size
        if list(value.shape) != unsharded_shape:
            return None
        return value.narrow(dim, world.rank * shape[dim], shape[dim])

    def unsharded(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor that consists of all ranks' shards. Collective."""
        return gathered(self.world, shard, self.sharded_dim[name])

    @torch.no_grad()
    def fill(self, init: dict[str, float]) -> None:
        """Draw each tensor of `init` uniformly between -bound and +bound, with a different seed on each rank. A bias
        has the bound 0, so all ranks have the same bias."""
        seed = int(torch.randint(2**40, (1,)).item()) * self.world.size + self.world.rank
        generator = torch.Generator(self.world.device).manual_seed(seed)
        for name, bound in init.items():
            shape = self.get_shard(name).shape  # type: ignore[union-attr]
            drawn = torch.empty(shape, device=self.world.device).uniform_(-bound, bound, generator=generator)
            self.set_shard(name, drawn)

    def extra_repr(self) -> str:
        return f"rank {self.world.rank} of {self.world.size}"

    def split_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are split over the ranks."""
        parameters = ((self._parameters[name], self.sharded_dim.get(name, 0)) for name in self.sharded_parameters)
        return [p for p, dim in parameters if p is not None and dim is not None]

    # -- torch.nn.Module's protocol
    @contextmanager
    def _without_sharded(self) -> Iterator[None]:
        """Return a context in which torch can access only the parameters that it saves and loads itself."""
        parameters = self._parameters
        self._parameters = {n: p for n, p in parameters.items() if n not in self.sharded_parameters}
        try:
            yield
        finally:
            parameters.update(self._parameters)  # assign=True replaces parameters
            self._parameters = parameters

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        with self._without_sharded():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.sharded_dim:
            value = self.get_shard(name)
            if value is None:
                continue
            value = value if keep_vars else value.detach()
            destination[prefix + name] = self.unsharded(name, value) if _unsharded.get() else value

    def converted(self, state_dict: Mapping[str, torch.Tensor], prefix: str) -> Mapping[str, torch.Tensor]:
        """Return the state dict with this module's tensors in the format of their shards. Raises ValueError for tensors
        that cannot be converted."""
        return state_dict

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        try:
            state_dict = self.converted(state_dict, prefix)
        except ValueError as error:
            error_msgs.append(str(error))
            return
        with self._without_sharded():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        shards = {name: shard for name in self.sharded_dim if (shard := self.get_shard(name)) is not None}
        names = {prefix + name for name in (*shards, *self.ignored)}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in names]
        new_shards, split = {}, {}
        for name, shard in shards.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.append(prefix + name)
                continue
            part = self.local_shard(name, value, shard.shape)
            if part is None:
                error_msgs.append(
                    f"{prefix + name}: {list(value.shape)} is neither the unsharded tensor nor the shard "
                    f"{list(shard.shape)} of one of {self.world.size} ranks"
                )
                continue
            new_shards[name] = part
            if self.sharded_dim[name] is not None:
                split[name] = value.shape
        if self.world.size > 1 and len({split[name] == shards[name].shape for name in split}) > 1:
            shapes = ", ".join(f"{prefix + name} {list(shape)}" for name, shape in split.items())
            error_msgs.append(f"some tensors are unsharded and some are shards of {self.world.size} ranks: {shapes}")
            return
        with torch.no_grad():
            for name, part in new_shards.items():
                self.set_shard(name, part)


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the unsharded state dict of a model that contains these modules, on every rank; `module.state_dict()`
    provides its other entries. Collective: all ranks must call it. The result can be loaded into the unsharded model
    and into the sharded model."""
    token = _unsharded.set(True)
    try:
        return module.state_dict()
    finally:
        _unsharded.reset(token)


def gathered(world: World, x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return the shards of all ranks, joined along `dim`. Collective, unless `dim` is None."""
    if world.size == 1 or dim is None:
        return x
    shard = x.transpose(0, dim).contiguous()
    out = world.empty((world.size * shard.shape[0], *shard.shape[1:]), x.dtype)
    bits = torch.uint8 if x.dtype.itemsize == 1 else x.dtype  # collectives of some backends do not support 8-bit floats
    world.all_gather(out.view(bits), shard.view(bits), world.current_stream())
    world.finish(world.current_stream())
    return out.transpose(0, dim).contiguous()


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, *, world: World) -> torch.Tensor:
    """Scale the gradients of a model that contains these modules so that their 2-norm over all ranks is at most
    `max_norm`. Return the norm before scaling, a float32 scalar with the same bits on every rank.

    The result equals that of `torch.nn.utils.clip_grad_norm_` on the unsharded model. On the sharded model, torch's
    function would scale by the norm of each rank's shards, and replicated parameters would diverge. Parameters that no
    module of `weft.nn` splits are counted once: their gradients must be the same on all ranks, so gradients of a rank's
    own tokens must be summed over the ranks first. Collective: all ranks must call it, including ranks without
    gradients.
    """
    split = {id(p) for part in module.modules() if isinstance(part, Sharded) for p in part.split_parameters()}
    total = torch.zeros((), device=world.device)
    parameters = [p for p in module.parameters() if p.grad is not None]
    for p in parameters:
        norm_squared = torch.linalg.vector_norm(p.grad, dtype=torch.float32).square()
        total += norm_squared if id(p) in split else norm_squared / world.size
    total = all_reduce(total, world=world).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
