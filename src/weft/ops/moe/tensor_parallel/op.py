"""Both halves of a layer of experts whose columns are split over the ranks (TileLink, section 7.2): all-gather +
grouped GEMM, and grouped GEMM + weighted sum over a token's experts + reduce-scatter.

    dispatched   rows travel under the first half's GEMM, sums under the second's (dispatched.py)
    sequential   the library's collectives and grouped GEMM (sequential.py); keeps nothing

The rows of all ranks' tokens lie in expert order on every rank, in `rows` of tiles of 128; the routes say where.

Gradients: dy goes to all ranks as x did, and the rows' dx are summed as results are (backward.py), or by the library
(sequential.py). That of the routes' weights is made by the second half, of the columns that a rank has, and summed over
the ranks by the first, whose operand they are. It goes from the one to the other as the gradient of the routes, which
are therefore float32 where a gradient is asked for, of the same bits; only its words of the weights mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ....architectures import HOPPER, lacks
from ....op import Op, Operands, Returned, Shapes, registered
from ....plans import DispatchedColumns, Plan, Sequential
from ....tensor_checks import DTYPES, Expected, check_operands, dense, dims
from ....torch_library import Backward, CallOptions
from ....world import World
from ...common import given_rows, plain_rows
from ..call import ACTIVATIONS, KEEPS, MOST_K, Kept
from ..expert_parallel.op import packed
from . import backward, dispatched, sequential
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, sections

GATHERING, SCATTERING = "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter"
FLOATS = torch.float32  # of routes that have a gradient


def all_gather_grouped_matmul(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    *,
    b13: torch.Tensor | None = None,
    activation: str = "swiglu",
    inner: int | None = None,
    rows: Sequence[int] | None = None,
    sharing: int | None = None,
    keep: str = "rows",
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half: the rows of all ranks' tokens, one for each of a token's experts, times the columns that this
    rank has of them, and the activation (TileLink, section 7.2).

    W ranks, E experts, El = E sharing / W on each; a rank has I of the columns of each of its experts.

    Args:
        x: [T, H], this rank's tokens. T may be 0.
        ids, weights: int32 and float32 [T, k], as `weft.moe.moe` takes them.
        w13, b13: this rank's columns of the first matrices, and their biases or None, as `weft.moe.moe` takes them.
        activation: as in `weft.moe.moe`.
        inner: I, where w13's last block is padded. None: all columns that w13 has.
        rows: tokens of every rank, where they are not all equal.
        sharing: ranks that share an expert's columns, neighbours, a divisor of W. None: all. Ranks r and r + sharing
            have other experts, in the order of the ranks.
        keep: what a call whose operands require a gradient keeps for its backward pass beside its operands and results:
            "nothing": x is sent again; "rows": W C H elements, tokens as they came; "activation": these and R N
            elements, which saves a GEMM. The sequential plan keeps nothing.
        world, plan: as in `weft.moe.moe`.
        out: [R, I], contiguous: where to write hidden.

    Returns hidden [R, I] and routes, for `grouped_matmul_reduce_scatter`. hidden has the experts' rows one after
    another, each expert's from a multiple of 128 on, by source rank (this one first, then the one before, ..), token
    and slot; R = W C min(k, El) in whole tiles + 128 El, for C the most tokens of a rank; what lies between the
    experts and behind the last is no row. routes: int32 words, which mean something to the second half alone; where an
    operand requires a gradient float32 of the same bits, by which the second half gives that of the weights.

    No token is dropped. Symmetric memory, shared with other ops of the World: 2 W C H elements. The backward pass has
    memory of its own, of all layers: H + 2 N elements for each row.

    Raises as `weft.moe.moe` does; a sequential call can be captured if it is in bfloat16.
    """
    w13, b13 = packed(GATHERING, "w13", w13, 5, activation), packed(GATHERING, "b13", b13, 4, activation)
    options = plain_rows(GATHERING, rows), activation, inner or 0, world.size if sharing is None else sharing, keep
    hidden, routes = FIRST_HALF(world, plan, GatherOperands(x, ids, weights, w13, b13), options, out)
    return hidden, routes


def grouped_matmul_reduce_scatter(
    hidden: torch.Tensor,
    routes: torch.Tensor,
    ids: torch.Tensor,
    w2: torch.Tensor,
    *,
    b2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    rows: Sequence[int] | None = None,
    sharing: int | None = None,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The second half: out[t] = the sum over the token's routes, and over the ranks that share the expert's columns, of
    weight * (the route's row of hidden @ w2), + shared[t] (TileLink, section 7.2).

    Args:
        hidden, routes: what `all_gather_grouped_matmul` returned, of the same rows and sharing. They stay as they are.
        ids: int32 [T, k], as given there.
        w2: [El, H, I], this rank's columns of the second matrices.
        b2: [El, H], added by each rank that gives one, so by one of those that share an expert; else None.
        shared: [T, H], added to the sum (a shared expert's rows), or None.
        rows, sharing, world, plan: as there.
        out: [T, H], contiguous: where to write the result; it may hold shared.

    Sums are accumulated in float32 and in a fixed order, over the slots, then over the ranks: the same call gives the
    same bits. A row of hidden @ w2 is rounded to the dtype, and so is what another rank sends.

    Differentiable in hidden, w2, b2, shared, and by way of the routes in the weights. Memory: symmetric as there;
    ordinary, H elements for each row of hidden, and H + I for its backward pass.

    Raises as `weft.moe.moe` does; a sequential call can be captured if it is in bfloat16.
    """
    options = plain_rows(SCATTERING, rows), world.size if sharing is None else sharing
    operands = ScatterOperands(hidden, routes, ids, w2, b2, shared)
    result: torch.Tensor = SECOND_HALF(world, plan, operands, options, out)
    return result


G = TypeVar("G", bound=GroupedCall)


class Half(Op[G]):
    """What both have in common."""

    small = DispatchedColumns

    def sizes(self, call: G) -> tuple[int, int, int]:
        return call.layer.capacity, call.layer.inner, call.layer.hidden

    def expected(self, world: World, call: G, mode: str) -> Plan:
        return DispatchedColumns()

    def fits(self, world: World, call: G, plan: Plan, asked: str | Plan) -> str | None:
        assert isinstance(plan, DispatchedColumns)
        reason = world.symmetric_reason or lacks(world.capability, HOPPER, "an MoE layer's kernels")
        return reason or dispatched.fits(world, call.layer, plan)

    def layer(
        self,
        world: World,
        ids: torch.Tensor,
        tokens: Sequence[int],
        matrix: tuple[int, int, int],
        dtype: torch.dtype,
        activation: str,
        sharing: int,
    ) -> Split:
        """matrix: El, H, I. Raises ValueError for a number of ranks that cannot share."""
        local, hidden, inner = matrix
        if type(sharing) is not int or sharing < 1 or world.size % sharing:
            raise ValueError(f"{self.title}: sharing {sharing!r} does not divide {world.size} ranks")
        experts, k = local * (world.size // sharing), ids.shape[1]
        if k > min(experts, MOST_K):
            raise ValueError(f"{self.title}: k {k} of ids {dims(ids)}: at most {MOST_K}, and no more than {experts}")
        tile = world.scale.plan(DispatchedColumns).tile.block_m
        return Split(max(tokens), experts, k, hidden, inner, dtype, activation, sharing=sharing, tile=tile)

    def given(self, world: World, rows: Sequence[int] | None, x: torch.Tensor) -> tuple[int, ...]:
        return (x.shape[0],) * world.size if rows is None else given_rows(self.title, world, rows, x, whole=False)


class AllGatherGroupedMatmul(Half[FirstHalfCall]):
    """Operands: x, ids, weights, w13, b13; options: rows of every rank or None, activation, inner or 0, sharing, keep,
    whether a gradient is asked for. Results: hidden, routes. A run keeps what `call.Kept` has."""

    name = GATHERING
    partial = True  # what lies between experts is no row
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor? b13, SymInt[]? rows, str activation, int inner,"
        " int sharing, str keep, bool gradient"
    )
    results, keeps = 2, 2
    takes = GatherOperands
    runs = {Sequential: sequential.run_gather, DispatchedColumns: dispatched.run_gather}

    def check(self, world: World, operands: GatherOperands, options: CallOptions) -> FirstHalfCall:
        (x, ids, weights, w13, b13), (rows, activation, inner, sharing, keep, gradient) = operands, options
        for name, t, dim in (("x", x, 2), ("ids", ids, 2), ("w13", w13, 3)):
            if t.dim() != dim or 0 in t.shape[1:]:
                raise ValueError(
                    f"{self.title}: x {dims(x)}, ids {dims(ids)} and w13 {dims(w13)}: {name} has {dim} sizes"
                )
        if x.dtype not in DTYPES:
            raise TypeError(f"{self.title}: x is {dims(x)}; bfloat16 and float16 are supported")
        (tokens, h), (local, n, _), k, dtype = x.shape, w13.shape, ids.shape[1], x.dtype
        wanted: Expected = {
            "x": (x, (tokens, h), dtype),
            "ids": (ids, (tokens, k), torch.int32),
            "weights": (weights, (tokens, k), torch.float32),
            "w13": (w13, (None, None, h), dtype),
            "b13": (b13, (local, n), dtype),
        }
        check_operands(self.title, world, wanted)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{self.title}: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        block, gated = world.scale.interleave, activation != "gelu"
        columns, step = (n // 2, block) if gated else (n, 1)  # the last block may be padded
        if n % (2 * step if gated else 1) or not columns - step < (inner or columns) <= columns:
            raise ValueError(
                f"{self.title}: w13 {dims(w13)} is not what weft.moe.pack makes of {inner or 'its'} columns for"
                f" {activation}"
            )
        every = self.given(world, rows, x)
        layer = self.layer(world, ids, every, (local, h, inner or columns), dtype, activation, sharing)
        return FirstHalfCall(every, layer, keep if gradient else None)

    def outputs(self, world: World, call: FirstHalfCall) -> Shapes:
        return call.outputs(world)

    def kept(self, world: World, call: FirstHalfCall, plan: str | Plan) -> Shapes:
        return call.kept(world)

    def returned(self, world: World, call: FirstHalfCall, result: torch.Tensor, more: Operands) -> Returned:
        return result, *((call.routes(world),) if more is None else more)  # None: of no rows

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return *operands, *results[1:]

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        layer, (wants_x, _, wants_weights, *experts) = given.call.layer, given.needs
        if not given.call.rows:
            return nothing(given, 5)
        *saved, routes = (None if t is None else dense(t) for t in given.saved[:6])
        assert routes is not None
        dhidden, droutes = (None if t is None else dense(t) for t in given.gradients)
        operands, dx, dw13, db13 = self.typed(saved), None, None, None
        if wants_x or any(experts):
            if dhidden is None:
                dhidden = world.zeros((layer.rows(world), layer.inner), layer.dtype)
            of_rows, wants = (world, layer, dhidden, operands, routes), (wants_x, any(experts))
            if isinstance(given.plan, DispatchedColumns):
                kept = Kept(*(dense(t) for t in given.saved[6:] if t is not None and t.numel()))
                dx, dw13, db13 = backward.first_half(*of_rows, given.plan, kept, *wants)
            else:
                dx, dw13, db13 = sequential.gather_gradients(*of_rows, *wants)
        dweights = backward.at_home(world, layer, droutes, operands.weights) if wants_weights else None
        return [dx, None, dweights, dw13, db13]


class GroupedMatmulReduceScatter(Half[GroupedCall]):
    """Operands: hidden, routes, ids, w2, b2, shared; options: rows of every rank or None, sharing."""

    name = SCATTERING
    signature = (
        "Tensor hidden, Tensor routes, Tensor ids, Tensor w2, Tensor? b2, Tensor? shared, SymInt[]? rows, int sharing"
    )
    takes = ScatterOperands
    runs = {Sequential: sequential.run_scatter, DispatchedColumns: dispatched.run_scatter}

    def check(self, world: World, operands: ScatterOperands, options: CallOptions) -> GroupedCall:
        (hidden, routes, ids, w2, b2, shared), (rows, sharing) = operands, options
        for name, t, dim in (("hidden", hidden, 2), ("ids", ids, 2), ("w2", w2, 3)):
            if t.dim() != dim or 0 in t.shape[1:]:
                raise ValueError(
                    f"{self.title}: hidden {dims(hidden)}, ids {dims(ids)} and w2 {dims(w2)}: {name} has {dim} sizes"
                )
        if hidden.dtype not in DTYPES:
            raise TypeError(f"{self.title}: hidden is {dims(hidden)}; bfloat16 and float16 are supported")
        tokens, (local, h, inner), dtype = self.given(world, rows, ids), w2.shape, hidden.dtype
        layer = self.layer(world, ids, tokens, (local, h, inner), dtype, "", sharing)
        wanted: Expected = {
            "hidden": (hidden, (layer.rows(world), inner), dtype),
            "routes": (routes, (sum(sections(world, layer)),), FLOATS if routes.dtype == FLOATS else torch.int32),
            "ids": (ids, (None, None), torch.int32),
            "w2": (w2, (None, None, None), dtype),
            "b2": (b2, (local, h), dtype),
            "shared": (shared, (ids.shape[0], h), dtype),
        }
        check_operands(self.title, world, wanted)
        return GroupedCall(tokens, replace(layer, activation="gelu"))  # none: it is behind hidden

    def outputs(self, world: World, call: GroupedCall) -> Shapes:
        return [((call.tokens[world.rank], call.layer.hidden), call.layer.dtype)]

    def saved(self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]) -> Operands:
        return operands[:5]

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        (dy,), layer, experts = given.gradients, given.call.layer, any(given.needs[3:5])
        if dy is None:
            return [None] * 6
        if not given.call.rows or not any(given.needs[:5]):
            return [*nothing(given, 5), dy]
        operands: ScatterOperands = self.typed([None if t is None else dense(t) for t in given.saved])
        if isinstance(given.plan, DispatchedColumns):
            gradients = backward.second_half(world, layer, given.plan, dense(dy), operands, experts)
        else:
            gradients = sequential.scatter_gradients(world, layer, dense(dy), operands, experts)
        return [*gradients[:2], None, *gradients[2:], dy]


def nothing(given: Backward, count: int) -> list[torch.Tensor | None]:
    """Return zeros as gradients of the first `count` operands, which were saved first."""
    wanted = zip(given.saved[:count], given.needs, strict=False)
    return [torch.zeros_like(t) if need and t is not None else None for t, need in wanted]


FIRST_HALF, SECOND_HALF = registered(AllGatherGroupedMatmul()), registered(GroupedMatmulReduceScatter())
