"""x @ weight.T, after which each row is sent to its destination rank. The destinations are known only on the device.
The op has static shapes, for CUDA graphs and torch.compile, and a gradient (FlashOverlap, section 4.2, but the hosts do
not exchange the routing).

    fused        uses three launches: the first numbers the rows of each destination, the second is a GEMM that stores
                 its rows on their destination ranks, and the third copies the received rows to the result (kernels.py)
    sequential   runs cuBLAS's GEMM, sorts the rows into one block for each rank, and sends the blocks by NCCL's
                 all-to-all

The backward pass sends the gradients of received rows back in the same way. cuBLAS's GEMMs compute dx and dweight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...op import Operands, Shapes, registered
from ...plans import FusedAllToAll, Plan, Sequential
from ...prepared import unprepared
from ...tensor_checks import check_operands, dense
from ...torch_library import Backward, CallOptions, column_sums, product
from ...world import World
from ..common import MatmulOp
from ..recipes import validate
from . import runs
from .runs import GEMM_ALL_TO_ALL_ROUTED, RoutedFactors, StaticCall

MAX_RANKS = 32  # the largest number of counters that a program can increment or poll at once


def matmul_all_to_all_routed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    destinations: torch.Tensor,
    world: World,
    plan: str | Plan = "auto",
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that come to this rank when every rank sends row i of its x @ weight.T + bias to rank
    destinations[i] (FlashOverlap, section 4.2: GEMM + all-to-all of an expert-parallel layer). The host does not read
    the destinations.

    W is the number of ranks, at most 32 for "fused".

    Args:
        x: [m, K], this rank's rows. Every rank has the same m, which may be 0; any number of rows may have no
            destination.
        weight: [N, K], this rank's weight, laid out as in `nn.Linear`. N and K are the same on all ranks.
        bias: [N], this rank's bias, or None.
        destinations: int32 [m] on this rank's device, the destination rank of each row, in any order and any
            distribution. A row is not sent if its destination is -1 or another number that is not a rank. The values
            may differ between replays of a CUDA graph.
        world: the ranks. All ranks must make the same call in the same order.
        plan: "auto", "sequential", "fused" or a Plan of one of these classes; the same on all ranks. "auto" means
            "fused" if this plan supports the call, otherwise "sequential", because the planner has no model of these
            plans.
        out: [W, m, N], contiguous: the tensor for the result, which may share memory with an operand. A call with `out`
            is not differentiable.

    Returns:
        out [W, m, N] and counts int32 [W]. The first counts[s] rows of out[s] came from rank s, in the order that they
            have there; the rows after them are zero.

    x, weight and bias are all bfloat16 or all float16. "fused" needs symmetric memory, and N and K must be multiples of
    8. If this is not so, the op uses the sequential plan, and logs this once. The errors are as for
    `all_gather_matmul`.

    Backward: the gradient of each received row is sent back to the source rank of the row; gradient rows after the
    first counts[s] are not read. dx is 0 for a row that was not sent. The gradients of weight and bias cover this
    rank's rows only. Every backward pass communicates, so a gradient must be needed on all ranks or on none.

    Memory in addition to the result: "fused" uses 2 W m N elements of symmetric memory, which all ops of the World
    share; "sequential" uses (W + 1) m N elements during the call. The sequential all-to-all sends all W m rows,
    including empty ones.

    Examples:
        >>> x, w = torch.ones(3, 16).bfloat16(), torch.ones(8, 16).bfloat16()
        >>> to = torch.tensor([0, 1, -1], dtype=torch.int32)
        >>> def rank(world):
        ...     rows, counts = weft.matmul_all_to_all_routed(x, w, destinations=to, world=world)
        ...     return tuple(rows.shape), counts.tolist()
        >>> weft.spmd(rank, 2, backend="emulated")
        [((2, 3, 8), [1, 1]), ((2, 3, 8), [1, 1])]
    """
    operands = RoutedFactors(x, weight, bias, destinations)
    result: tuple[torch.Tensor, torch.Tensor] = MATMUL_ALL_TO_ALL_ROUTED(world, plan, operands, (), out)
    return result


class MatmulAllToAllRouted(MatmulOp[StaticCall]):
    """The definition of `matmul_all_to_all_routed`. Option: whether a gradient is wanted. Results: out, counts. A run
    saves int32 [m], the position of each row on its destination rank (`kernels.number_rows`)."""

    name = GEMM_ALL_TO_ALL_ROUTED
    signature = "Tensor x, Tensor weight, Tensor? bias, Tensor destinations, bool gradient"
    results, num_saved = 2, 1
    operand_type = RoutedFactors
    runs = {Sequential: unprepared(runs.run_sequential), FusedAllToAll: runs.prepare_fused}
    emulator_plan = FusedAllToAll

    def check(self, world: World, operands: RoutedFactors, options: CallOptions) -> StaticCall:
        (x, weight, bias, destinations), (gradient,) = operands, options
        validate(self.name, world, x, weight, bias)
        m, (n, k) = x.shape[0], weight.shape
        check_operands(self.name, world, dict(destinations=(destinations, (m,), torch.int32)))
        return StaticCall((m,), n, k, x.dtype, False, gradient=gradient)

    def outputs(self, world: World, call: StaticCall) -> Shapes:
        return [((world.size, call.rows, call.n), call.dtype), ((world.size,), torch.int32)]

    def saved_shapes(self, world: World, call: StaticCall, plan: str | Plan) -> Shapes:
        return [((call.rows,), torch.int32)]

    def without_rows(self, world: World, call: StaticCall, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counts, target_rows = (world.zeros((n,), torch.int32) for n in (world.size, 0))
        return (out, counts, target_rows) if call.gradient else (out, counts)

    def expected(self, world: World, call: StaticCall, mode: str) -> Plan:
        return self.default(world, FusedAllToAll)

    def unsupported(self, world: World, call: StaticCall, plan: Plan, asked: str | Plan) -> str | None:
        if world.size > MAX_RANKS:
            return f"its waits poll the counters of at most {MAX_RANKS} ranks"
        return super().unsupported(world, call, plan, asked)

    def saved_tensors(
        self, operands: RoutedFactors, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        (x, weight, *_), (_, counts, target_rows) = operands, results
        return x if needs[1] else None, weight if needs[0] else None, counts, target_rows

    def backward(self, world: World, context: Backward) -> Sequence[torch.Tensor | None]:
        """Return dx, dweight and dbias of a linear layer. The inputs are the gradients that the destination ranks have
        sent back."""
        (x, weight, counts, target_rows), needs, call = context.saved, context.needs, context.call
        dout = context.gradients[0]
        assert dout is not None and counts is not None and target_rows is not None
        dy = world.empty((call.rows, call.n), dout.dtype)
        if call.rows:
            world.begin(self.check_same_on_all_ranks(world, call, context.plan, backward=True))
            give_back = runs.return_sequential if isinstance(context.plan, Sequential) else runs.return_fused
            give_back(world, call, dense(dout), counts, target_rows, dy)
        dx = product(world, dy, weight) if needs[0] and weight is not None else None
        dw = product(world, dy.t(), x) if needs[1] and x is not None else None
        return dx, dw, column_sums(world, dy) if needs[2] else None, None


MATMUL_ALL_TO_ALL_ROUTED = registered(MatmulAllToAllRouted())
