"""Decoder layers of a woven Transformers model: what they hand on, and what stands between their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ...backends.base import Event
from ...errors import Unsupported
from ...lang.mapping import balanced_rows
from ...models.llama import joined as room
from ...models.llama import keeps_shards
from ...nn.weave import LayerPlan, halves
from ...ops.all_reduce.op import all_reduce_rms_norm, posts_rows
from ...plans import Plan
from ...world import World
from .generation import drawing_nothing
from .modules import Layers
from .parameters import Parameters, Same
from .parts import Columns, Module, RowPart, Rows


def path_of(base: nn.Module, module: nn.Module) -> str:
    return next((name for name, other in base.named_modules() if other is module), type(module).__name__)


class Bound(Protocol):
    parameters: Parameters


class HeadsPart(Protocol):
    """Attention of this rank's heads. `attend` takes normed hidden states and returns the heads' output and what
    attention gives besides; its argument `columns` runs the projections of rows. `out` leaves the partial sum. `window`
    is that of sliding-window attention."""

    out: RowPart
    window: int | None

    @property
    def attend(self) -> Callable[..., Any]: ...


@dataclass
class Woven:
    """What was done to a model. replaced: a line for each kind of module; left: module and reason. undo: puts a
    module's own forward back.

    two_parts: from so many tokens on a pass goes in two parts, whose joints go by two_parts_plan; None: never. In the
    pass that is on, `causal` says that every token attends to all before it and to no other, `recorded` that its hidden
    states are asked for.
    """

    world: World
    plan: str | Plan
    two_parts: int | None = None
    two_parts_plan: str | Plan = "auto"
    causal: bool = False
    recorded: bool = False
    replaced: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    layers: Layers | None = None
    same: Same | None = None

    def follow(self, *parts: Bound) -> None:
        """Have the parts bound to their parameters as these are at the start of every pass."""
        self.parameters += [part.parameters for part in parts]
        self.undo += [part.parameters.release for part in parts]

    def check(self, base: nn.Module) -> None:
        """Check before a pass that the model is as it was woven, but for its parameters' values."""
        assert self.layers is not None
        self.layers.check()
        if torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()):
            raise ValueError(
                "a woven model computes no gradient, and its parameters require one: call it under "
                "torch.inference_mode() or torch.no_grad(), or unweave it to train"
            )
        self.refresh(base)

    def refresh(self, base: nn.Module) -> None:
        """Bind to their parameters the parts whose parameters have changed."""
        bound = [parameters for parameters in self.parameters if parameters.packed]
        if self.same is None or not self.same.holds():
            bound = self.parameters
        for parameters in bound:
            parameters.refresh(self.world, functools.partial(path_of, base))
        if bound is self.parameters:
            self.same = Same([seen for parameters in bound if not parameters.packed for seen in parameters.seen])

    def forward(self, module: nn.Module, forward: Callable[..., object]) -> None:
        """`module` runs `forward` from now on, as Transformers' own styles install theirs: on the instance."""
        self.replace(module, "forward", forward)

    def undo_all(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def replace(self, module: nn.Module, name: str, method: Callable[..., object]) -> None:
        before = module.__dict__.get(name)

        def undo() -> None:
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

        setattr(module, name, method)
        self.undo.append(undo)


# -- a pass ------------------------------------------------------------------------------------------------------------
class Carried(NamedTuple):
    """What decoder layers hand on. residual: of the pass's first part; [.., H] where hidden states are recorded, and
    first, since Transformers records a layer's first output. normed: [.., H]. on: the pass."""

    residual: torch.Tensor
    normed: torch.Tensor
    on: Pass


class Pass:
    """A forward pass's rows in one part, or in two whose joints run on a second stream (nn/weave.py has the order).

    residuals: each part's, whole or by rows. normed, partial: where joints write and read [M, H]; symmetric memory
    where the ranks' rows are many and counted, in which a joint needs no copies. One pass at a time, so it is the same
    for all.
    """

    def __init__(self, done: Woven, hidden: torch.Tensor, in_one: bool = False) -> None:
        """`in_one`: the pass has one part, however many rows there are."""
        rows, world = hidden.flatten(0, -2), done.world
        m, h = rows.shape
        self.world, self.shape, self.recorded = world, hidden.shape, done.recorded
        self.twice = done.two_parts is not None and not self.recorded and m >= max(2, done.two_parts)
        self.twice &= world.size > 1 and not in_one and not torch.compiler.is_compiling()
        cut = halves(m)
        self.cuts = (slice(0, cut), slice(cut, m)) if self.twice else (slice(None),)
        self.plan = done.two_parts_plan if self.twice else done.plan
        self.residuals = [held_rows(rows[part], world, self.recorded) for part in self.cuts]
        self.whole = [r.shape[0] == rows[part].shape[0] for r, part in zip(self.residuals, self.cuts, strict=True)]
        self.ready: list[Event | None] = [None, None]
        self.spent: list[object] = [None, None]
        self.normed, self.partial = (self._room(what, m, h, rows.dtype) for what in ("norm", "partial"))

    def _room(self, what: str, m: int, h: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory [m, h] that joints write or read; None where whoever writes takes memory of its own."""
        alone = torch.compiler.is_compiling() or all(self.whole)
        if alone or (not self.twice and posts_rows(self.world, m, h, dtype, self.plan)):
            return self.world.empty((m, h), dtype) if self.twice else None
        with torch.inference_mode(False):  # the next pass may come outside it
            made: torch.Tensor = self.world.cached(
                ("hf", what, m, h, dtype), lambda: room(self.world, LayerPlan("fused"), f"{what} 0", m, h, dtype)
            )
        return made

    def wait(self, i: int) -> None:
        """The caller's stream waits for part i's last joint, behind which nobody reads what that took."""
        event = self.ready[i]
        if event is not None:
            self.world.wait_event(self.world.current_stream(), event)
            self.ready[i] = self.spent[i] = None

    def columns(self, linears: Columns, x: torch.Tensor) -> torch.Tensor:
        """Apply the linears to all rows of x, to each part's as soon as its joint is done."""
        if not self.twice:
            return linears(x)
        out = self.world.empty((x.shape[0], sum(linears.widths)), x.dtype)
        for i, part in enumerate(self.cuts):
            self.wait(i)
            linears(x[part], out[part])
        self.world.finish(self.world.current_stream())
        return out

    def joined(self, compute: Rows, x: torch.Tensor, norm: Module, last: bool = False) -> torch.Tensor:
        """The norm of the residual and the ranks' sum of compute(x), each part's on the second stream while the caller
        goes on with the other. With `last` the result outlives the pass."""
        out = None if last else self.normed
        if self.twice:
            return self._woven(compute, x, norm, out)
        return self._join(0, compute(x, self.partial), norm, out)

    def _woven(self, compute: Rows, x: torch.Tensor, norm: Module, out: torch.Tensor | None) -> torch.Tensor:
        world, main, side = self.world, self.world.current_stream(), self.world.side_stream("weave")
        assert self.partial is not None
        if out is None:
            out = world.empty(self.partial.shape, self.partial.dtype)
        for i, part in enumerate(self.cuts):
            self.wait(i)
            partial = compute(x[part], self.partial[part])
            world.wait_event(side, world.record(main))
            with world.on(side):
                self.spent[i] = self.residuals[i]
                self._join(i, partial, norm, out[part])
            self.ready[i] = world.record(side)
        return out

    def _join(self, i: int, partial: torch.Tensor, norm: Module, out: torch.Tensor | None) -> torch.Tensor:
        residual, whole = self.residuals[i], self.whole[i]
        weight, eps, world, plan = norm.weight, norm.variance_epsilon, self.world, self.plan
        y, self.residuals[i] = all_reduce_rms_norm(
            partial, residual, weight, eps, full_residual=whole, out=out, world=world, plan=plan
        )
        return y


def held_rows(rows: torch.Tensor, world: World, recorded: bool) -> torch.Tensor:
    """The embedding's rows that this rank holds as residual: its own where tokens are many and nobody asked for hidden
    states, else all."""
    if recorded or not keeps_shards(world, rows.shape[0], rows.shape[1], rows.dtype):
        return rows
    counts = balanced_rows(rows.shape[0], world.size)
    first = sum(counts[: world.rank])
    return rows[first : first + counts[world.rank]].contiguous()


# -- forwards ----------------------------------------------------------------------------------------------------------
def model_forward(base: Any, done: Woven) -> Callable[..., Any]:
    """A forward pass of all layers. Inside a CUDA graph's capture Transformers hands attention a mask of all pairs of
    tokens also where there is none but the causal one, and with a mask torch has no fast attention."""
    own = base.forward

    def wanted(name: str, kwargs: Mapping[str, object]) -> bool:
        asked = kwargs.get(name)
        return bool(getattr(base.config, name) if asked is None else asked)

    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            done.check(base)
        alone = attention_mask is None and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
        done.causal = alone and base.config._attn_implementation == "sdpa"
        done.recorded = wanted("output_hidden_states", kwargs)
        if wanted("output_attentions", kwargs) and done.world.size > 1:
            raise Unsupported(
                "output_attentions: of a woven model each rank has the attention of its own heads alone; "
                "weft.hf.unweave(model) gives that of all"
            )
        with drawing_nothing():
            return own(input_ids, attention_mask=attention_mask, **kwargs)

    return forward


def norm_forward(carried: Carried) -> torch.Tensor:
    """The model's last norm, which the last layer has computed."""
    for i in range(len(carried.on.cuts)):
        carried.on.wait(i)
    return carried.normed


def layer_forward(
    layer: Module, following: Module, attention: HeadsPart, mlp: Rows, last: bool, done: Woven
) -> Callable[..., Carried]:
    """A decoder layer from Carried, or the embedding's hidden states, to Carried. following: the next layer's norm."""
    attend, between = attention.attend, layer.post_attention_layernorm  # which a module is slow to give

    def forward(hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        if isinstance(hidden_states, Carried):
            on, normed = hidden_states.on, hidden_states.normed
        else:
            on, normed = Pass(done, hidden_states), layer.input_layernorm(hidden_states)
        mask = None if done.causal and attention.window is None else attention_mask
        heads, _ = attend(normed, attention_mask=mask, columns=on.columns, **kwargs)
        y = on.joined(attention.out, heads.flatten(0, -2), between)
        y = on.joined(mlp, y, following, last).view(on.shape)
        return Carried(on.residuals[0].view(on.shape) if on.recorded else on.residuals[0], y, on)

    return forward
