"""The method `generate` of a woven model, in which all ranks use the random draws of rank 0. The emulator cannot run
generate_batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ...errors import Unsupported
from ...transport.collectives import gather
from ...world import World

Method = Callable[..., object]
# the random functions that Transformers' sampling, beam search and assisted decoding call
DRAWS = (torch.multinomial, torch.rand, torch.rand_like)


class RankZeroDraws(TorchFunctionMode):
    """A mode in which every rank uses the random draws of rank 0. The ranks have the same logits but different random
    generators, so each rank would otherwise sample its own token, and one rank could stop before the other ranks."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        drawn = func(*args, **(kwargs or {}))
        if func not in DRAWS or not isinstance(drawn, torch.Tensor):
            return drawn
        world, stream = self.world, self.world.current_stream()
        draws = gather(drawn.reshape(1, -1), world, [1] * world.size, stream)
        world.finish(stream)
        return draws[0].view(drawn.shape)


def without_draws() -> AbstractContextManager[object]:
    """Return a context that turns RankZeroDraws off for a forward pass inside `generate`. Since a forward pass draws
    nothing, the mode would only cost host time at every function. In compiled code the mode is never active."""
    modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()
    only_mode = len(modes) == 1 and isinstance(modes[0], RankZeroDraws)
    return torch._C.DisableTorchFunction() if only_mode else nullcontext()


def same_draws(method: Method, world: World) -> Method:
    """Return the model's `generate`, with the random draws of rank 0 on every rank."""
    return functools.update_wrapper(functools.partial(_generate, method, world), method)


def _generate(method: Method, world: World, *args: object, **kwargs: object) -> object:
    with RankZeroDraws(world):
        return method(*args, **kwargs)


def refuse_batch(*args: object, **kwargs: object) -> NoReturn:
    """Raise Unsupported. This function replaces `generate_batch` on an emulated rank."""
    raise Unsupported(
        "generate_batch runs the model on a thread of its own, on which an emulated rank cannot call an operator: "
        "call generate, or run on GPUs"
    )
