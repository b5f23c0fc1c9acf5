"""`generate` of a woven model: what ranks draw at random, and where the emulator cannot follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ...errors import Unsupported
from ...transport.collectives import gather
from ...world import World

Method = Callable[..., object]
DRAWS = (torch.multinomial, torch.rand, torch.rand_like)  # of Transformers' sampling, beams and drafts


class FirstRanksDraws(TorchFunctionMode):
    """What is drawn at random on the first rank is drawn on all. The ranks have the same logits and generators of their
    own, so that each would take a token of its own, and one would end before the others."""

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
        every = gather(drawn.reshape(1, -1), world, [1] * world.size, stream)
        world.finish(stream)
        return every[0].view(drawn.shape)


def drawing_nothing() -> AbstractContextManager[object]:
    """A context manager for a forward pass inside `generate`, whose functions FirstRanksDraws need not look at; it does
    not look at those of compiled code anyway."""
    modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()
    alone = len(modes) == 1 and isinstance(modes[0], FirstRanksDraws)
    return torch._C.DisableTorchFunction() if alone else nullcontext()


def drawn_alike(own: Method, world: World) -> Method:
    @functools.wraps(own)
    def generate(*args: object, **kwargs: object) -> object:
        with FirstRanksDraws(world):
            return own(*args, **kwargs)

    return generate


def not_emulated(own: Method) -> Method:
    @functools.wraps(own)
    def generate_batch(*args: object, **kwargs: object) -> object:
        raise Unsupported(
            "generate_batch runs the model on a thread of its own, on which an emulated rank cannot call an operator: "
            "call generate, or run on GPUs"
        )

    return generate_batch
