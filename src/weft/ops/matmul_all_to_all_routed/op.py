"""x @ weight.T, where each row is sent to a rank that only the device knows: static shapes for CUDA graphs and
torch.compile, and a gradient (FlashOverlap, section 4.2, without an exchange of the routing among hosts).

    fused        three launches: one numbers the rows of each destination, a GEMM stores its rows on their destination
                 ranks, and one copies the received rows to the result (kernels.py)
    sequential   the library's GEMM, rows sorted into one block for each rank, and the library's all-to-all of these
                 blocks

The backward pass returns the gradients of received rows the same way; the library's GEMMs compute dx and dweight.
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

MAX_RANKS = 32  # the most counters that one notify of all ranks increments and one wait polls


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
    destinations[i] (FlashOverlap, section 4.2: GEMM + all-to-all of an expert-parallel layer). No host reads these.

    W is the number of ranks, at most 32 for "fused".

    Args:
        x: [m, K], this rank's rows. Every rank has the same m, which may be 0; any number of rows may have no
            destination.
        weight: [N, K], this rank's own, laid out as in `nn.Linear`. N and K are the same on all ranks.
        bias: [N], this rank's own, or None.
        destinations: int32 [m] on this rank's device, the destination rank of each row, in any order and balance. A row
            is not sent if its destination is -1 or any number that is not a rank. A CUDA graph may be replayed with
            different values.
        world: the ranks. All of them must make the same call in the same order.
        plan: "auto", "sequential", "fused" or such a Plan; the same on all ranks. "auto" is "fused" where that can
            serve the call, otherwise "sequential": the planner has no model of either.
        out: [W, m, N], contiguous: the tensor for the result, which may share memory with an operand. It is not
            differentiable.

    Returns:
        out [W, m, N] and counts int32 [W]: the first counts[s] rows of out[s] came from rank s, in that rank's order;
            the rows after them are zero.

    x, weight and bias are all bfloat16 or all float16. "fused" needs N and K that are multiples of 8, and symmetric
    memory; otherwise the op runs sequentially, and logs that once. The errors are as for `all_gather_matmul`.

    Backward: the gradient of each received row is sent back to the source rank of the row; gradient rows after the
    first counts[s] are not read. dx is 0 for a row that was not sent. The gradients of weight and bias cover this
    rank's rows only. Every backward pass communicates, so a gradient must be needed on all ranks or on none.

    Memory in addition to the result: symmetric, shared by all ops of the World, 2 W m N elements (fused); during the
    call (W + 1) m N elements (sequential). The sequential all-to-all sends all W m rows, including empty ones.

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
    saves int32 [m], the place of each row at its destination (`kernels.number_rows`)."""

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
        """Return dx, dweight and dbias of a linear layer, from the gradients that the destinations returned."""
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
