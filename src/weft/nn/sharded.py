"""What the modules share: every rank holds a part of each tensor of the unsharded module, under the unsharded names.

They go in and out as
    state_dict()              this rank's parts, without padding; no communication
    load_state_dict(...)      whole tensors, of which the rank takes its part, or parts as state_dict() gives them;
                              always copied, in the dtype that the module has, also with assign=True
    full_state_dict(model)    the unsharded state dict, on every rank; collective

What state_dict() gives is to be read. Where a parameter holds several tensors or padding it is a copy, and writing to
it changes no weight: write to parameters(), or load.
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

_whole: ContextVar[bool] = ContextVar("whole", default=False)  # whether state dicts being made are to be unsharded


def part_of(what: str, size: int, world: World) -> int:
    """size / world.size, or a ValueError."""
    check_call(what.partition(":")[0], world)
    if size % world.size:
        raise ValueError(f"{what} {size} is not divisible by the world size {world.size}")
    return size // world.size


class Sharded(nn.Module):
    """`sharded_dim`: by name in the state dict, the dimension that ranks split; None: all ranks hold the same. `held`:
    the parameters that these tensors lie in. `ignored`: what a state dict may have and the module does not. What else a
    subclass has, parameters, buffers or modules, is torch's to save and to load, and the same on all ranks. Raises
    TypeError for a dtype that the ops do not take."""

    sharded_dim: dict[str, int | None]
    held: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    def __init__(self, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise TypeError(f"{type(self).__name__}: dtype {dtype}; bfloat16 and float16 are supported")
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

    def whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """The whole tensor of all ranks' parts. Collective."""
        return _gathered(self.world, shard, self.sharded_dim[name])

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

    def split_parameters(self) -> list[nn.Parameter]:
        """Those of which every rank holds another part."""
        held = ((self._parameters[name], self.sharded_dim.get(name, 0)) for name in self.held)
        return [p for p, dim in held if p is not None and dim is not None]

    # -- torch.nn.Module's protocol
    @contextmanager
    def _others(self) -> Iterator[None]:
        """Only the parameters that are torch's to save and to load, for the time being."""
        all_of_them = self._parameters
        self._parameters = {n: p for n, p in all_of_them.items() if n not in self.held}
        try:
            yield
        finally:
            all_of_them.update(self._parameters)  # assign=True makes new ones
            self._parameters = all_of_them

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        with self._others():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.sharded_dim:
            value = self.get_shard(name)
            if value is None:
                continue
            value = value if keep_vars else value.detach()
            destination[prefix + name] = self.whole(name, value) if _whole.get() else value

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
        with self._others():
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        held = {name: shard for name in self.sharded_dim if (shard := self.get_shard(name)) is not None}
        known = {prefix + name for name in (*held, *self.ignored)}
        unexpected_keys[:] = [key for key in unexpected_keys if key not in known]
        mine, split = {}, {}
        for name, shard in held.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.append(prefix + name)
                continue
            part = self.own_part(name, value, shard.shape)
            if part is None:
                error_msgs.append(
                    f"{prefix + name}: {list(value.shape)} is neither the whole tensor nor the part "
                    f"{list(shard.shape)} of one of {self.world.size} ranks"
                )
                continue
            mine[name] = part
            if self.sharded_dim[name] is not None:
                split[name] = value.shape
        if self.world.size > 1 and len({split[name] == held[name].shape for name in split}) > 1:
            shapes = ", ".join(f"{prefix + name} {list(shape)}" for name, shape in split.items())
            error_msgs.append(f"some tensors are whole and some are parts of one of {self.world.size} ranks: {shapes}")
            return
        with torch.no_grad():
            for name, part in mine.items():
                self.set_shard(name, part)


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded state dict of a model that holds these modules, on every rank; everything else in it is as in
    `module.state_dict()`. Collective: all ranks must call it. The result loads into the unsharded model, and back."""
    before = _whole.set(True)
    try:
        return module.state_dict()
    finally:
        _whole.reset(before)


def _gathered(world: World, x: torch.Tensor, dim: int | None) -> torch.Tensor:
    if world.size == 1 or dim is None:
        return x
    first = x.transpose(0, dim).contiguous()
    out = world.empty((world.size * first.shape[0], *first.shape[1:]), x.dtype)
    bits = torch.uint8 if x.dtype.itemsize == 1 else x.dtype  # of 8-bit floats, which not every library moves
    world.all_gather(out.view(bits), first.view(bits), world.current_stream())
    world.finish(world.current_stream())
    return out.transpose(0, dim).contiguous()


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, *, world: World) -> torch.Tensor:
    """Scale the gradients of a model that holds these modules so that their 2-norm over all ranks is at most
    `max_norm`; returns the norm before, a float32 scalar, the same bits on every rank.

    As `torch.nn.utils.clip_grad_norm_` on the unsharded model. That one would scale by the norm of each rank's parts,
    and what all ranks hold the same would drift apart. Parameters that no module of `weft.nn` splits count once: their
    gradients must be the same on all ranks, summed where they are of a rank's own tokens.
    Collective: all ranks must call it, also one without gradients.
    """
    split = {id(p) for part in module.modules() if isinstance(part, Sharded) for p in part.split_parameters()}
    total = torch.zeros((), device=world.device)
    parameters = [p for p in module.parameters() if p.grad is not None]
    for p in parameters:
        square = torch.linalg.vector_norm(p.grad, dtype=torch.float32).square()
        total += square if id(p) in split else square / world.size
    total = all_reduce(total, world=world).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
