"""Both halves of an MoE layer whose experts are split by columns over the ranks (TileLink, section 7.2). The first half
is an all-gather and a grouped GEMM. The second half is a grouped GEMM, the weighted sum over a token's experts, and a
reduce-scatter.

    dispatched   sends rows during the first half's GEMM, and sums during the second half's GEMM (dispatched.py)
    sequential   uses NCCL's collectives and torch's grouped GEMM (sequential.py); it saves nothing for the backward
                 pass

Every rank holds the rows of all ranks' tokens in expert order, in tiles of 128 rows. The routes contain the position of
each row.

Gradients: dy is sent to all ranks like x, and the dx of the rows are summed like results (backward.py) or by NCCL
(sequential.py). The backward pass of the second half computes this rank's part of the routing weights' gradient. The
weights are an operand of the first half, so the backward pass of the first half sums the parts over the ranks. Between
the halves, these parts are passed as the gradient of the routes. For this reason the routes are float32 with the same
bits if a gradient is requested. In the gradient of the routes, only the words that belong to the weights are defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ....architectures import lacks
from ....op import Op, Operands, Shapes, registered
from ....plans import DispatchedColumns, Plan, Sequential
from ....prepared import unprepared
from ....tensor_checks import DTYPES, Expected, check_operands, dense, dims
from ....torch_library import Backward, CallOptions
from ....world import World
from ...common import check_rows, plain_rows
from ..call import ACTIVATIONS, KEEPS, MAX_TOPK, Kept
from ..expert_parallel.op import packed
from . import backward, dispatched, sequential
from .call import FirstHalfCall, GatherOperands, GroupedCall, ScatterOperands, Split, section_words

GATHER_NAME, SCATTER_NAME = "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter"
DIFFERENTIABLE_ROUTES = torch.float32  # the dtype of routes that require a gradient


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
    tp_size: int | None = None,
    keep: str = "rows",
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation of all ranks' tokens times this rank's columns of the experts. The op is the first half of
    an MoE layer whose experts are split by columns over the ranks (TileLink, section 7.2). A token has one row for each
    of its experts.

    There are W ranks and E experts. Each rank holds I columns of each of its El = E tp_size / W experts.

    Args:
        x: [T, H], this rank's tokens. T may be 0.
        ids, weights: int32 and float32 [T, k], as in `weft.moe.moe`.
        w13, b13: this rank's columns of the first matrices, and their biases or None, as in `weft.moe.moe`.
        activation: as in `weft.moe.moe`.
        inner: I, which must be passed if w13's last block is padded. None: all columns of w13.
        rows: the numbers of tokens of all ranks, if they are not all equal.
        tp_size: the number of neighbouring ranks that share the columns of an expert, a divisor of W. None: all ranks.
            Ranks r and r + tp_size have different experts, in rank order.
        keep: the tensors that a call whose operands require a gradient saves for its backward pass, in addition to its
            operands and results. With "nothing", the backward pass sends x again. "rows" saves the tokens as they
            arrived, W max_tokens H elements. "activation" also saves R N elements, so that the backward pass needs one
            GEMM less. The sequential plan saves nothing.
        world, plan: as in `weft.moe.moe`.
        out: [R, I], contiguous: the tensor for hidden.

    Returns:
        hidden [R, I] and routes, for `grouped_matmul_reduce_scatter`. In hidden the experts follow one another, each
            starting at a multiple of 128. An expert's rows are sorted by source rank (this rank first, then the
            previous one, ..), token and top-k slot. R = W max_tokens min(k, El) in whole tiles + 128 El, where
            max_tokens is the largest number of tokens on any rank. Values between the experts and after the last expert
            are undefined. routes: int32 words, which only the second half can read. If an operand requires a gradient,
            the routes are float32 with the same bits, and the second half returns the gradient of the weights as their
            gradient.

    No token is dropped. The op shares 2 W max_tokens H elements of symmetric memory with other ops of the World. The
    backward passes of all layers share H + 2 N elements for each row.

    Raises the errors of `weft.moe.moe`, except that a CUDA graph can capture a sequential call in bfloat16.

    Examples:
        >>> x, w13, w2 = torch.ones(4, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16(), torch.ones(2, 16, 8).bfloat16()
        >>> ids, weights = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
        >>> def rank(world):
        ...     hidden, _ = weft.all_gather_grouped_matmul(x, ids, weights, w13, activation="gelu", world=world)
        ...     return hidden.shape[1]
        >>> weft.spmd(rank, 2, backend="emulated")
        [8, 8]
    """
    w13, b13 = packed(GATHER_NAME, "w13", w13, 5, activation), packed(GATHER_NAME, "b13", b13, 4, activation)
    options = plain_rows(GATHER_NAME, rows), activation, inner or 0, world.size if tp_size is None else tp_size, keep
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
    tp_size: int | None = None,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's weighted sum of hidden @ w2, + shared. The op is the second half of an MoE layer whose
    experts are split by columns over the ranks (TileLink, section 7.2). In full, out[t] = the sum of weight * (the
    route's row of hidden @ w2) over the token's routes and over the ranks that share the expert's columns, + shared[t].

    Args:
        hidden, routes: the results of `all_gather_grouped_matmul` with the same rows and tp_size. The call does not
            change these tensors.
        ids: int32 [T, k], as passed to `all_gather_grouped_matmul`.
        w2: [El, H, I], this rank's columns of the second matrices.
        b2: [El, H] or None. Every rank that passes b2 adds it, so only one of the ranks that share an expert should
            pass it.
        shared: [T, H], added to the sum (the rows of a shared expert), or None.
        rows, tp_size, world, plan: as in `all_gather_grouped_matmul`.
        out: [T, H], contiguous: the tensor for the result, which may be the tensor `shared`.

    Sums are accumulated in float32 and in a fixed order: first over the top-k slots, then over the ranks. So equal
    calls give equal bits. A row of hidden @ w2 is rounded to the dtype, and so is each sum that a remote rank sends.

    The function is differentiable in hidden, w2, b2 and shared, and, through the routes, in the weights. The op uses
    the symmetric memory of `all_gather_grouped_matmul`. It also uses ordinary memory: H elements for each row of
    hidden, and H + I elements for each row in the backward pass.

    Raises the errors of `weft.moe.moe`, except that a CUDA graph can capture a sequential call in bfloat16.

    Examples:
        >>> x, w13, w2 = torch.ones(4, 16).bfloat16(), torch.ones(2, 8, 16).bfloat16(), torch.ones(2, 16, 8).bfloat16()
        >>> ids, weights = torch.tensor([[0], [1], [1], [1]], dtype=torch.int32), torch.ones(4, 1)
        >>> def rank(world):
        ...     hidden, routes = weft.all_gather_grouped_matmul(x, ids, weights, w13, activation="gelu", world=world)
        ...     return tuple(weft.grouped_matmul_reduce_scatter(hidden, routes, ids, w2, world=world).shape)
        >>> weft.spmd(rank, 2, backend="emulated")
        [(4, 16), (4, 16)]
    """
    options = plain_rows(SCATTER_NAME, rows), world.size if tp_size is None else tp_size
    operands = ScatterOperands(hidden, routes, ids, w2, b2, shared)
    result: torch.Tensor = SECOND_HALF(world, plan, operands, options, out)
    return result


G = TypeVar("G", bound=GroupedCall)


class Half(Op[G]):
    """The base class of both halves' operators."""

    emulator_plan = DispatchedColumns

    def sizes(self, call: G) -> tuple[int, int, int]:
        return call.layer.max_tokens_per_rank, call.layer.inner, call.layer.hidden

    def expected(self, world: World, call: G, mode: str) -> Plan:
        return DispatchedColumns()

    def unsupported(self, world: World, call: G, plan: Plan, asked: str | Plan) -> str | None:
        assert isinstance(plan, DispatchedColumns)
        reason = world.backend.symmetric_unsupported or lacks(world.backend.capability, "tma", "an MoE layer's kernels")
        return reason or dispatched.unsupported(world, call.layer, plan)

    def layer(
        self,
        world: World,
        ids: torch.Tensor,
        tokens: Sequence[int],
        weight_shape: tuple[int, int, int],
        dtype: torch.dtype,
        activation: str,
        tp_size: int,
    ) -> Split:
        """Return the layer. weight_shape: El, H, I. Raises ValueError for a tp_size that does not divide the ranks."""
        local_experts, hidden, inner = weight_shape
        if type(tp_size) is not int or tp_size < 1 or world.size % tp_size:
            raise ValueError(f"{self.title}: tp_size {tp_size!r} does not divide {world.size} ranks")
        experts, k = local_experts * (world.size // tp_size), ids.shape[1]
        if k > min(experts, MAX_TOPK):
            raise ValueError(f"{self.title}: k {k} of ids {dims(ids)}: at most {MAX_TOPK}, and no more than {experts}")
        tile = world.backend.scale.plan(DispatchedColumns).tile.block_m
        return Split(max(tokens), experts, k, hidden, inner, dtype, activation, tp_size=tp_size, tile=tile)

    def tokens_per_rank(self, world: World, rows: Sequence[int] | None, x: torch.Tensor) -> tuple[int, ...]:
        """Return the numbers of tokens of all ranks."""
        return (x.shape[0],) * world.size if rows is None else check_rows(self.title, world, rows, x, whole=False)

    def check_sizes(self, **operands: tuple[torch.Tensor, int]) -> None:
        """Raise ValueError for an operand that does not have this number of dimensions, or in which a dimension other
        than the rows is empty. Raise TypeError if the first operand has an unsupported dtype."""
        for name, (t, dim) in operands.items():
            if t.dim() != dim or 0 in t.shape[1:]:
                every = ", ".join(f"{operand} {dims(tensor)}" for operand, (tensor, _) in operands.items())
                raise ValueError(f"{self.title}: {every}: {name} has {dim} sizes")
        name, (t, _) = next(iter(operands.items()))
        if t.dtype not in DTYPES:
            raise TypeError(f"{self.title}: {name} is {dims(t)}; bfloat16 and float16 are supported")


class AllGatherGroupedMatmul(Half[FirstHalfCall]):
    """The definition of the first half.

    Operands: x, ids, weights, w13, b13. Options: rows of every rank or None, activation, inner or 0, tp_size, keep, and
    whether a gradient is wanted. Results: hidden, routes. A run saves the tensors in `call.Kept`.
    """

    name = GATHER_NAME
    partial = True  # values between the experts are undefined
    signature = (
        "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor? b13, SymInt[]? rows, str activation, int inner,"
        " int tp_size, str keep, bool gradient"
    )
    results, num_saved = 2, 2
    operand_type = GatherOperands
    runs = {Sequential: unprepared(sequential.run_gather), DispatchedColumns: unprepared(dispatched.run_gather)}

    def check(self, world: World, operands: GatherOperands, options: CallOptions) -> FirstHalfCall:
        (x, ids, weights, w13, b13), (rows, activation, inner, tp_size, keep, gradient) = operands, options
        self.check_sizes(x=(x, 2), ids=(ids, 2), w13=(w13, 3))
        (tokens, h), (local_experts, n, _), k, dtype = x.shape, w13.shape, ids.shape[1], x.dtype
        wanted: Expected = {
            "x": (x, (tokens, h), dtype),
            "ids": (ids, (tokens, k), torch.int32),
            "weights": (weights, (tokens, k), torch.float32),
            "w13": (w13, (None, None, h), dtype),
            "b13": (b13, (local_experts, n), dtype),
        }
        check_operands(self.title, world, wanted)
        if activation not in ACTIVATIONS:
            raise ValueError(f"{self.title}: activation {activation!r} is not one of {list(ACTIVATIONS)}")
        if keep not in KEEPS:
            raise ValueError(f"{self.title}: keep {keep!r} is not one of {list(KEEPS)}")
        block, gated = world.backend.scale.interleave, activation != "gelu"
        columns, step = (n // 2, block) if gated else (n, 1)  # the last block may be padded
        if n % (2 * step if gated else 1) or not columns - step < (inner or columns) <= columns:
            raise ValueError(
                f"{self.title}: w13 {dims(w13)} is not what weft.moe.pack makes of {inner or 'its'} columns for"
                f" {activation}"
            )
        all_tokens = self.tokens_per_rank(world, rows, x)
        layer = self.layer(world, ids, all_tokens, (local_experts, h, inner or columns), dtype, activation, tp_size)
        return FirstHalfCall(all_tokens, layer, keep if gradient else None)

    def outputs(self, world: World, call: FirstHalfCall) -> Shapes:
        return call.outputs(world)

    def saved_shapes(self, world: World, call: FirstHalfCall, plan: str | Plan) -> Shapes:
        return call.saved_shapes(world)

    def without_rows(self, world: World, call: FirstHalfCall, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out, call.routes(world)

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return *operands, *results[1:]

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        layer, (wants_x, _, wants_weights, *wants_experts) = ctx.call.layer, ctx.needs
        if not ctx.call.rows:
            return zero_gradients(ctx, 5)
        *saved, routes = (None if t is None else dense(t) for t in ctx.saved[:6])
        assert routes is not None
        dhidden, droutes = (None if t is None else dense(t) for t in ctx.gradients)
        operands, dx, dw13, db13 = self.typed(saved), None, None, None
        if wants_x or any(wants_experts):
            if dhidden is None:
                dhidden = world.zeros((layer.rows(world), layer.inner), layer.dtype)
            gather_arguments, wants = (world, layer, dhidden, operands, routes), (wants_x, any(wants_experts))
            if isinstance(ctx.plan, DispatchedColumns):
                kept = Kept(*(dense(t) for t in ctx.saved[6:] if t is not None and t.numel()))
                dx, dw13, db13 = backward.first_half(*gather_arguments, ctx.plan, kept, *wants)
            else:
                dx, dw13, db13 = sequential.gather_gradients(*gather_arguments, *wants)
        dweights = backward.reduce_dweights(world, layer, droutes, operands.weights) if wants_weights else None
        return [dx, None, dweights, dw13, db13]


class GroupedMatmulReduceScatter(Half[GroupedCall]):
    """The definition of the second half. Operands: hidden, routes, ids, w2, b2, shared. Options: rows of every rank or
    None, tp_size."""

    name = SCATTER_NAME
    signature = (
        "Tensor hidden, Tensor routes, Tensor ids, Tensor w2, Tensor? b2, Tensor? shared, SymInt[]? rows, int tp_size"
    )
    operand_type = ScatterOperands
    runs = {Sequential: unprepared(sequential.run_scatter), DispatchedColumns: unprepared(dispatched.run_scatter)}

    def check(self, world: World, operands: ScatterOperands, options: CallOptions) -> GroupedCall:
        (hidden, routes, ids, w2, b2, shared), (rows, tp_size) = operands, options
        self.check_sizes(hidden=(hidden, 2), ids=(ids, 2), w2=(w2, 3))
        tokens, (local_experts, h, inner), dtype = self.tokens_per_rank(world, rows, ids), w2.shape, hidden.dtype
        layer = self.layer(world, ids, tokens, (local_experts, h, inner), dtype, "", tp_size)
        wanted: Expected = {
            "hidden": (hidden, (layer.rows(world), inner), dtype),
            "routes": (
                routes,
                (sum(section_words(world, layer)),),
                DIFFERENTIABLE_ROUTES if routes.dtype == DIFFERENTIABLE_ROUTES else torch.int32,
            ),
            "ids": (ids, (None, None), torch.int32),
            "w2": (w2, (None, None, None), dtype),
            "b2": (b2, (local_experts, h), dtype),
            "shared": (shared, (ids.shape[0], h), dtype),
        }
        check_operands(self.title, world, wanted)
        # This half does not use the activation, so any value will do.
        return GroupedCall(tokens, replace(layer, activation="gelu"))

    def outputs(self, world: World, call: GroupedCall) -> Shapes:
        return [((call.tokens[world.rank], call.layer.hidden), call.layer.dtype)]

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return operands[:5]

    def backward(self, world: World, ctx: Backward) -> Sequence[torch.Tensor | None]:
        (dy,), layer, wants_experts = ctx.gradients, ctx.call.layer, any(ctx.needs[3:5])
        if dy is None:
            return [None] * 6
        if not ctx.call.rows or not any(ctx.needs[:5]):
            return [*zero_gradients(ctx, 5), dy]
        operands: ScatterOperands = self.typed([None if t is None else dense(t) for t in ctx.saved])
        if isinstance(ctx.plan, DispatchedColumns):
            gradients = backward.second_half(world, layer, ctx.plan, dense(dy), operands, wants_experts)
        else:
            gradients = sequential.scatter_gradients(world, layer, dense(dy), operands, wants_experts)
        return [*gradients[:2], None, *gradients[2:], dy]


def zero_gradients(ctx: Backward, count: int) -> list[torch.Tensor | None]:
    """Return zeros for the gradients of the first `count` operands, which are the first saved tensors."""
    wanted = zip(ctx.saved[:count], ctx.needs, strict=False)
    return [torch.zeros_like(t) if need and t is not None else None for t, need in wanted]


FIRST_HALF, SECOND_HALF = registered(AllGatherGroupedMatmul()), registered(GroupedMatmulReduceScatter())
