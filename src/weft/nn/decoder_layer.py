"""A tensor-parallel decoder layer: what stands between its sublayers, whoever computes these.

A layer has two sublayers, attention and an MLP or experts. Behind each the ranks sum what they computed, add the
residual and take the norm before the next sublayer. Which rows of [M, H] a rank has in between, `HiddenStates` says:

    replicated   all tokens       sublayer: partial sum | all_reduce_rms_norm
    in two       the same, of two parts of the tokens, one's all_reduce_rms_norm under the other's GEMMs (weave.py)
    sharded      its own tokens   all-gather + GEMM .. GEMM + reduce-scatter | add and norm of its own rows

A replicated residual of many tokens is held by rows at their owners all the same: only the normalised rows are needed
everywhere, and `all_reduce_rms_norm` sums a row at its owner. `weft.models` and Transformers' models
(integrations/transformers) bring the sublayers, with their weights, attention and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ..lang.mapping import balanced_rows
from ..ops.all_reduce.op import all_reduce_rms_norm, posts_rows
from ..ops.norm import rms_norm
from ..plans import Plan
from ..transport.collectives import gather
from ..world import World
from .weave import Weave

Tensor = torch.Tensor


class RMSNorm(NamedTuple):
    """An RMSNorm: weight [H], eps."""

    weight: Tensor
    eps: float


class ColumnParallel(Protocol):
    """Linears of one input, of whose columns this rank has `widths`."""

    widths: Sequence[int]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's columns [M, sum(widths)] of rows [M, H], in `out` where there is one."""

    def gathered(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        """Return this rank's columns of all ranks' rows, of which x are this rank's. shards: rows of every rank, None
        where they are all equal."""


class Sublayer(Protocol):
    """Attention, its output projection alone, an MLP, or experts: what ends in a sum over ranks."""

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        """Return this rank's part of the sum [M, H], of the rows x [M, K] of token part `part`, in `out` where there is
        one. No rank waits for another."""

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        """Return this rank's rows [m_r, H] of the sum. x: of an MLP or experts this rank's rows, of an output
        projection those of all ranks. shards: as for `ColumnParallel`."""


class ReplicatedStates:
    """Hidden states of which every rank has all tokens, in one part or in two.

    shape: [.., H] of the hidden states. normed: [.., H], what the next sublayer takes. residual: that of the first
    token part, all rows or this rank's own.
    """

    def __init__(
        self,
        world: World,
        hidden: Tensor,
        normed: Tensor,
        parts: Sequence[int] = (),
        *,
        plan: str | Plan = "auto",
        whole: bool = False,
        allreduce_norm: Callable[..., tuple[Tensor, Tensor]] = all_reduce_rms_norm,
    ) -> None:
        """hidden, normed: [.., H], the embedding and its norm before the first sublayer. parts: tokens of each of two
        parts, or nothing. plan: of `allreduce_norm`. whole: whether the residual is whole on every rank however many
        tokens there are. allreduce_norm: called as `all_reduce_rms_norm`; another one need not write `out`, and goes
        with one part."""
        rows = hidden.flatten(0, -2)
        m, h = rows.shape
        parts = parts or (m,)
        self.world, self.shape, self._sum = world, hidden.shape, partial(allreduce_norm, world=world, plan=plan)
        self._cuts = [slice(end - n, end) for n, end in zip(parts, accumulate(parts), strict=True)]
        self._whole = [whole or not shards_residual(world, n, h, rows.dtype) for n in parts]
        self._residuals = [
            rows[cut] if whole else own_rows(rows[cut], world)
            for cut, whole in zip(self._cuts, self._whole, strict=True)
        ]
        self._weave, self._normed = Weave(world, len(parts)), normed.flatten(0, -2)
        own_memory = len(parts) == 1 and allreduce_norm is not all_reduce_rms_norm
        self._norm_memory, self._partial_memory = (
            None if own_memory else self._memory(use, rows, plan) for use in ("norm", "partial")
        )

    @property
    def normed(self) -> Tensor:
        return self._normed.view(self.shape)

    @property
    def residual(self) -> Tensor:
        return self._residuals[0]

    def project(self, linears: ColumnParallel, x: Tensor) -> Tensor:
        """Return [.., N], the linears of x [.., H], `normed` or what a hook made of it: of each token part as soon as
        its norm is done."""
        x = x.flatten(0, -2)
        if self._weave.parts == 1:
            return linears(x).view(*self.shape[:-1], -1)
        out = self.world.empty((x.shape[0], sum(linears.widths)), x.dtype)
        for i, cut in enumerate(self._cuts):
            self._weave.wait(i)
            linears(x[cut], out[cut])
        self.world.finish(self.world.current_stream())
        return out.view(*self.shape[:-1], -1)

    def add(self, sublayer: Sublayer, x: Tensor, norm: RMSNorm, last: bool = False) -> None:
        """Add what the sublayer gives for x [.., K], rows of all tokens, and take the norm: each token part's on the
        second stream while the caller's stream goes on with the other. last: the result outlives the pass."""
        x, out, partials = x.flatten(0, -2), None if last else self._norm_memory, self._partial_memory
        if out is None and self._weave.parts == 2:
            out = self.world.empty(self._normed.shape, self._normed.dtype)
        for i, cut in enumerate(self._cuts):
            self._weave.wait(i)
            rows = sublayer.partial(x[cut], None if partials is None else partials[cut], i)
            with self._weave.reducing(i, rows, self._residuals[i]):
                held, to = dict(full_residual=self._whole[i]), None if out is None else out[cut]
                y, self._residuals[i] = self._sum(rows, self._residuals[i], *norm, **held, out=to)
        self._normed = y if out is None else out

    def gathered(self) -> Tensor:
        """Return the normalised rows [.., H] of all tokens, ordered on the caller's stream. Unless `add` was told that
        they are the last, they are valid until the next pass."""
        for i in range(len(self._cuts)):
            self._weave.wait(i)
        return self.normed

    def _memory(self, use: str, rows: Tensor, plan: str | Plan) -> Tensor | None:
        """Return the memory, of rows' shape, that `all_reduce_rms_norm` reads or writes without a copy: symmetric,
        where the ranks have it. None where that gains nothing, and whoever writes takes memory of its own.

        One pass at a time, so it is the same for every pass. A sublayer writes its partial output there only when the
        norm before has ended here, which it does when every owner has summed its rows; the peers store rows only when
        the norm has begun here, behind the sublayer that reads the last ones.
        """
        world, (m, h), dtype = self.world, rows.shape, rows.dtype
        apart = torch.compiler.is_compiling() or world.size == 1 or world.symmetric_reason
        if self._weave.parts == 1 and (apart or posts_rows(world, m, h, dtype, plan)):
            return None
        if apart:
            return world.empty((m, h), dtype)
        with torch.inference_mode(False):  # the next pass may come outside it
            return world.buffer(f"decoder {use}", m * h * dtype.itemsize).view(0, (m, h), dtype).local


class ShardedStates:
    """Hidden states of which every rank has its own tokens, `balanced_rows` of them.

    shape: [.., H] of all ranks' hidden states. residual, normed: [m_r, H], this rank's rows.
    """

    def __init__(self, world: World, residual: Tensor, normed: Tensor, shape: torch.Size) -> None:
        self.world, self.residual, self.normed, self.shape = world, residual, normed, shape
        self._counts = balanced_rows(shape[:-1].numel(), world.size)
        self._shards = None if len(set(self._counts)) == 1 else tuple(self._counts)

    def project(self, linears: ColumnParallel, x: Tensor) -> Tensor:
        """Return [.., N], the linears of all ranks' rows, of which x [m_r, H] are this rank's."""
        return linears.gathered(x, self._shards).view(*self.shape[:-1], -1)

    def add(self, sublayer: Sublayer, x: Tensor, norm: RMSNorm, last: bool = False) -> None:
        """Add what the sublayer gives for x, as `Sublayer.sharded` takes it, and take the norm of this rank's rows."""
        y = sublayer.sharded(x.flatten(0, -2), self._shards)
        weight = norm.weight.to(y.dtype)
        self.normed, self.residual = rms_norm(y, weight, norm.eps, world=self.world, residual=self.residual)

    def gathered(self) -> Tensor:
        """Return the normalised rows [.., H] of all ranks, ordered on the caller's stream."""
        stream = self.world.current_stream()
        rows = gather(self.normed, self.world, self._counts, stream)
        self.world.finish(stream)
        return rows.view(self.shape)


HiddenStates: TypeAlias = ReplicatedStates | ShardedStates


def decoder_layer(
    states: HiddenStates,
    attention: Callable[[HiddenStates], tuple[Sublayer, Tensor]],
    mlp: Sublayer,
    norms: tuple[RMSNorm, RMSNorm],
    last: bool = False,
) -> None:
    """Take the hidden states through a layer.

    attention: what leaves its sum over ranks, and the rows that this takes: the whole sublayer and `states.normed`,
    where each token part attends for itself; or, where attention is of all tokens at once, its output projection and
    the output [.., K] of this rank's heads, projected by `states.project`. mlp: takes `states.normed`. norms: before
    the MLP, and before the next layer, which for the `last` layer is the model's last.
    """
    states.add(*attention(states), norms[0])
    states.add(mlp, states.normed, norms[1], last)


def own_rows(rows: Tensor, world: World) -> Tensor:
    """Return those of rows [M, H] that this rank owns, [m_r, H]."""
    counts = balanced_rows(rows.shape[0], world.size)
    return rows.narrow(0, sum(counts[: world.rank]), counts[world.rank]).contiguous()


def shards_residual(world: World, rows: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether the residual of so many tokens is best held by rows, each at its owner: not where every rank sums all
    rows itself, as is fastest for small messages."""
    return world.size > 1 and rows >= world.size and rows * hidden * dtype.itemsize > world.scale.replicated_bytes


def all_reduce_then_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, world: World, **_: object
) -> tuple[Tensor, Tensor]:
    """`all_reduce_rms_norm` with a whole residual, by the library's all-reduce, which overwrites x, then add and norm
    in one kernel."""
    if world.size > 1:
        world.all_reduce(x, world.current_stream())
    return rms_norm(x, weight, eps, world=world, residual=residual)
