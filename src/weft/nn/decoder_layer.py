"""The communication between the sublayers of a tensor-parallel decoder layer.

A layer has two sublayers, attention and an MLP or experts. After each sublayer, the ranks sum their partial outputs,
add the residual, and apply the norm of the next sublayer. `HiddenStates` says which rows of [M, H] a rank has between
them:

    replicated   all tokens       sublayer: partial sum | all_reduce_rms_norm
    two parts    all tokens       the same for two token parts, one part's all_reduce_rms_norm under the other's GEMMs
                                  (weave.py)
    sharded      its own tokens   all-gather + GEMM .. GEMM + reduce-scatter | add and norm of its own rows

With many replicated tokens each rank holds only its own rows of the residual, because `all_reduce_rms_norm` sums a row
at its owner and only the normalised rows are needed everywhere. `weft.models` and integrations/transformers supply the
sublayers, with their weights, attention and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..lang.mapping import balanced_rows
from ..ops.all_reduce.op import all_reduce_rms_norm, posts_rows
from ..ops.norm import rms_norm
from ..plans import Plan
from ..transport.collectives import gather
from ..world import World
from .weave import Weave


class RMSNorm(NamedTuple):
    """The weight [H] and eps of an RMSNorm."""

    weight: Tensor
    eps: float


class ColumnParallel(Protocol):
    """Several linears with one input. `widths` contains the number of this rank's columns for each linear."""

    widths: Sequence[int]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's columns [M, sum(widths)] for rows x [M, H], in `out` if it is not None."""

    def gathered(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        """Return this rank's columns for the rows of all ranks; x contains only this rank's rows. `shards` is the
        number of rows of each rank, or None if the numbers are equal."""


class PartialSum(Protocol):
    """A module for replicated tokens, whose output the ranks sum."""

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        """Return this rank's partial sum [M, H] for the rows x [M, K] of token part `part`, in `out` if it is not None.
        No rank waits for another."""


class Sublayer(PartialSum, Protocol):
    """A module whose output the ranks sum: whole attention, only its output projection, an MLP, or experts."""

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        """Return this rank's rows [m_r, H] of the sum over the ranks. For an MLP and experts, x contains this rank's
        rows; for an output projection, x contains the rows of all ranks. `shards` is as for `ColumnParallel`."""


class ReplicatedStates:
    """Hidden states of all tokens on every rank, in one token part or in two.

    `shape` is [.., H]. `normed` [.., H] is the next sublayer's input. `residual` is the residual of the first
    part of the tokens: either all rows or this rank's own rows.
    """

    def __init__(
        self,
        world: World,
        hidden: Tensor,
        normed: Tensor,
        parts: Sequence[int] = (),
        *,
        plan: str | Plan = "auto",
        full_residual: bool = False,
        allreduce_norm: Callable[..., tuple[Tensor, Tensor]] = all_reduce_rms_norm,
    ) -> None:
        """Create replicated states: hidden and normed [.., H] are the embedding and its norm for the first sublayer.
        `parts` is empty, or contains the numbers of tokens of two parts. `plan` is the plan of `allreduce_norm`, which
        has the same arguments as `all_reduce_rms_norm`. A replacement function requires a single part, and need not
        write to `out`. With `full_residual`, every rank holds the whole residual for any number of tokens."""
        rows = hidden.flatten(0, -2)
        m, h = rows.shape
        parts = parts or (m,)
        self.world, self.shape, self._sum = world, hidden.shape, partial(allreduce_norm, world=world, plan=plan)
        self._cuts = [slice(end - n, end) for n, end in zip(parts, accumulate(parts), strict=True)]
        self._full_residual = [full_residual or not shards_residual(world, n, h, rows.dtype) for n in parts]
        self._residuals = [
            rows[cut] if full else own_rows(rows[cut], world)
            for cut, full in zip(self._cuts, self._full_residual, strict=True)
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
        """Return [.., N], the linears applied to x [.., H], which is `normed` or a hook's replacement for it. Each
        token part is computed as soon as its norm has ended."""
        x = x.flatten(0, -2)
        if self._weave.parts == 1:
            return linears(x).view(*self.shape[:-1], -1)
        out = self.world.empty((x.shape[0], sum(linears.widths)), x.dtype)
        for i, cut in enumerate(self._cuts):
            self._weave.wait(i)
            linears(x[cut], out[cut])
        self.world.finish(self.world.current_stream())
        return out.view(*self.shape[:-1], -1)

    def add(self, sublayer: PartialSum, x: Tensor, norm: RMSNorm, last: bool = False) -> None:
        """Add the sublayer's output for x [.., K], the rows of all tokens, and apply the norm. The second stream
        reduces one token part while the caller's stream computes the other part. With `last`, the result outlives the
        pass."""
        x, out, partials = x.flatten(0, -2), None if last else self._norm_memory, self._partial_memory
        if out is None and self._weave.parts == 2:
            out = self.world.empty(self._normed.shape, self._normed.dtype)
        for i, cut in enumerate(self._cuts):
            self._weave.wait(i)
            rows = sublayer.partial(x[cut], None if partials is None else partials[cut], i)
            with self._weave.reducing(i, rows, self._residuals[i]):
                y, self._residuals[i] = self._sum(
                    rows,
                    self._residuals[i],
                    *norm,
                    full_residual=self._full_residual[i],
                    out=None if out is None else out[cut],
                )
        self._normed = y if out is None else out

    def gathered(self) -> Tensor:
        """Return the normalised rows [.., H] of all tokens, ordered on the caller's stream. The rows are valid until
        the next pass, or longer if the last `add` had `last`."""
        for i in range(len(self._cuts)):
            self._weave.wait(i)
        return self.normed

    def _memory(self, use: str, rows: Tensor, plan: str | Plan) -> Tensor | None:
        """Return memory with the shape of `rows` that `all_reduce_rms_norm` reads or writes without a copy. The memory
        is symmetric if the ranks have symmetric memory. Return None if such memory saves no copy; the writer then
        allocates its result.

        All passes share this memory, because only one pass runs at a time. A sublayer writes its partial output there
        only after the previous norm has ended on this rank. This implies that every owner has summed its rows. Peers
        store normalised rows there only after this rank has entered the norm, and therefore after the sublayer that
        read the previous rows.
        """
        world, (m, h), dtype = self.world, rows.shape, rows.dtype
        local = torch.compiler.is_compiling() or world.size == 1 or world.backend.symmetric_unsupported
        if self._weave.parts == 1 and (local or posts_rows(world, m, h, dtype, plan)):
            return None
        if local:
            return world.empty((m, h), dtype)
        return world.buffer(f"decoder {use}", m * h * dtype.itemsize).view(0, (m, h), dtype).local


class ShardedStates:
    """Hidden states sharded by tokens: each rank has its own `balanced_rows`.

    `shape` is [.., H] of all ranks' hidden states. `residual` and `normed` [m_r, H] are this rank's rows.
    """

    def __init__(self, world: World, residual: Tensor, normed: Tensor, shape: torch.Size) -> None:
        self.world, self.residual, self.normed, self.shape = world, residual, normed, shape
        self._counts = balanced_rows(shape[:-1].numel(), world.size)
        self._shards = None if len(set(self._counts)) == 1 else tuple(self._counts)

    def project(self, linears: ColumnParallel, x: Tensor) -> Tensor:
        """Return [.., N], the linears applied to the rows of all ranks; x [m_r, H] contains this rank's rows."""
        return linears.gathered(x, self._shards).view(*self.shape[:-1], -1)

    def add(self, sublayer: Sublayer, x: Tensor, norm: RMSNorm, last: bool = False) -> None:
        """Add the sublayer's output for x, as in `Sublayer.sharded`, and apply the norm to this rank's rows."""
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
    """Run a layer on the hidden states.

    `attention` returns a sublayer and its input: the whole of attention and `states.normed`, if each token part attends
    separately; or, if all tokens attend together, the output projection and [.., K], the output of this rank's heads,
    computed with `states.project`. The input of `mlp` is `states.normed`. `norms` are the norms before the MLP and
    before the next layer. For the `last` layer, the second one is the model's final norm.
    """
    states.add(*attention(states), norms[0])
    states.add(mlp, states.normed, norms[1], last)


def own_rows(rows: Tensor, world: World) -> Tensor:
    """Return this rank's own rows [m_r, H] of rows [M, H]."""
    counts = balanced_rows(rows.shape[0], world.size)
    return rows.narrow(0, sum(counts[: world.rank]), counts[world.rank]).contiguous()


def shards_residual(world: World, rows: int, hidden: int, dtype: torch.dtype) -> bool:
    """Return whether each rank holds only its own rows of a residual of `rows` tokens. For small messages every rank
    sums all rows itself, and therefore holds all of them."""
    return (
        world.size > 1 and rows >= world.size and rows * hidden * dtype.itemsize > world.backend.scale.replicated_bytes
    )


def all_reduce_then_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, world: World, **_: object
) -> tuple[Tensor, Tensor]:
    """Compute `all_reduce_rms_norm` with a full residual: NCCL's all-reduce, which overwrites x, then add and norm in
    one kernel."""
    if world.size > 1:
        world.all_reduce(x, world.current_stream())
    return rms_norm(x, weight, eps, world=world, residual=residual)
