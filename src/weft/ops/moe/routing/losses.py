"""The auxiliary losses that balance a router's choice and keep its logits small. One launch computes a loss, and
another its gradient. No rank waits for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from triton import JITFunction

from ....kernel_launch import Launch, prepared
from ....op import Local, Operands, RowsCall, Shapes, registered
from ....plans import Plan, Sequential
from ....prepared import unprepared
from ....tensor_checks import check_device, check_devices, dims
from ....torch_library import Backward, CallOptions
from ....transport.memory import lock
from ....world import World
from .losses_kernels import balance_backward, balance_loss, square_backward, square_loss
from .route_tables import power

BALANCE, Z_LOSS = "load_balancing_loss", "z_loss"


@dataclass(frozen=True)
class LossCall(RowsCall):
    """A checked call: logits [m, e], and ids [m, k] if the loss depends on ids."""

    e: int
    k: int


class BalanceOperands(NamedTuple):
    logits: torch.Tensor
    ids: torch.Tensor


class Partials(NamedTuple):
    """Memory in which the programs of a loss store their partial sums for the last program. All calls share this
    memory."""

    arrivals: torch.Tensor  # int32 [1], 0 between launches
    sums: torch.Tensor  # float32 [programs, columns]
    counts: torch.Tensor  # int32 [programs, columns]


def _partials(world: World, columns: int) -> Partials:
    """Return the memory. The current stream first waits for earlier calls on other streams."""
    world.order(lock(world, "partial sums of losses"), world.current_stream())
    shape = world.sm_count, columns

    def make() -> Partials:
        sums, counts = world.empty(shape, torch.float32), world.empty(shape, torch.int32)
        return Partials(world.zeros((1,), torch.int32), sums, counts)

    return world.cached(("partial sums of losses", columns), make)


@prepared
def _loss(world: World, kernel: JITFunction, call: LossCall) -> Launch:
    """Return the launch of one of the kernels."""
    columns = power(call.e)
    rows = max(1, world.backend.scale.gate_block // columns)
    programs = min(-(-call.m // rows), world.sm_count)
    sizes = dict(rows=call.m, E=call.e, P=columns, R=rows)  # P: padded columns, R: rows in a block
    if kernel is balance_loss:
        sizes["K"] = call.k
    if kernel is square_loss:
        sizes["PROGRAMS_P"] = power(programs)
    return Launch(world, kernel, programs, dict(num_warps=4, local=True), **sizes)


def _gradient(world: World, kernel: JITFunction, logits: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    """Return the gradient with respect to the logits."""
    logits, dlogits = logits.contiguous(), world.empty(logits.shape, logits.dtype)
    if len(logits):
        launch = _loss(world, kernel, LossCall(logits.shape[0], logits.shape[1], 0))
        launch(world.current_stream(), logits=logits, dlogits=dlogits, **others)
    return dlogits


def run_balance(
    world: World, call: LossCall, plan: Plan, operands: BalanceOperands, out: torch.Tensor
) -> tuple[torch.Tensor]:
    memory, share = _partials(world, power(call.e)), world.empty((call.e,), torch.float32)
    _loss(world, balance_loss, call)(
        world.current_stream(),
        logits=operands.logits,
        ids=operands.ids,
        probabilities=memory.sums,
        routes=memory.counts,
        arrivals=memory.arrivals,
        loss=out,
        share=share,
    )
    return (share,)


class Loss(Local[LossCall]):
    """The base class of both losses. A loss is 0 if there are no tokens."""

    def without_rows(self, world: World, call: LossCall, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(world.zeros(shape, dtype) for shape, dtype in self.outputs(world, call))


class BalanceOp(Loss):
    """Operands: logits, ids. Results: the loss, and each expert's share of the routes, float32 [E], which the gradient
    needs."""

    name = "moe_balance_loss"
    public = BALANCE
    signature = "Tensor logits, Tensor ids"
    results = 2
    operand_type = BalanceOperands
    runs = {Sequential: unprepared(run_balance)}

    def check(self, world: World, operands: BalanceOperands, options: CallOptions) -> LossCall:
        logits, ids = operands
        check_devices(BALANCE, world, operands._asdict())
        if logits.dim() != 2 or ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
            raise ValueError(f"{BALANCE}: logits {dims(logits)} are not [T, E], or ids {dims(ids)} not [T, k]")
        return LossCall(logits.shape[0], logits.shape[1], ids.shape[1])

    def outputs(self, world: World, call: LossCall) -> Shapes:
        return [((), torch.float32), ((call.e,), torch.float32)]

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return operands[0], results[1]

    def backward(self, world: World, ctx: Backward) -> list[torch.Tensor | None]:
        (logits, share), dloss = ctx.saved, ctx.gradients[0]
        assert logits is not None and share is not None
        if dloss is None:
            return [None, None]
        return [_gradient(world, balance_backward, logits, share=share, dloss=dloss.contiguous()), None]


def run_square(world: World, call: LossCall, plan: Plan, operands: tuple[torch.Tensor], out: torch.Tensor) -> None:
    memory = _partials(world, 1)
    _loss(world, square_loss, call)(
        world.current_stream(), logits=operands[0], sums=memory.sums, arrivals=memory.arrivals, loss=out
    )


class SquareOp(Loss):
    """Operand: logits. Result: the loss."""

    name = "moe_z_loss"
    public = Z_LOSS
    signature = "Tensor logits"
    runs = {Sequential: unprepared(run_square)}

    def check(self, world: World, operands: tuple[torch.Tensor], options: CallOptions) -> LossCall:
        (logits,) = operands
        check_device(Z_LOSS, world, "logits", logits)
        if logits.dim() != 2:
            raise ValueError(f"{Z_LOSS}: logits must be [T, E], got {dims(logits)}")
        return LossCall(logits.shape[0], logits.shape[1], 0)

    def outputs(self, world: World, call: LossCall) -> Shapes:
        return [((), torch.float32)]

    def backward(self, world: World, ctx: Backward) -> list[torch.Tensor | None]:
        (logits,), (dloss,) = ctx.saved, ctx.gradients
        assert logits is not None and dloss is not None
        return [_gradient(world, square_backward, logits, dloss=dloss.contiguous())]


BALANCE_OP, SQUARE_OP = registered(BalanceOp()), registered(SquareOp())


def load_balancing_loss(logits: torch.Tensor, ids: torch.Tensor, *, world: World) -> torch.Tensor:
    """Return E * sum over experts of f_e * P_e (Fedus et al. 2021, "Switch Transformers", equations 4 to 6, without
    alpha), for this rank's tokens.

    Args:
        logits: [T, E], of any floating dtype. The loss is differentiable in them.
        ids: integer [T, k], the chosen experts; ids outside 0 to E - 1 count as no expert. If a token has the same
            expert twice, the expert counts twice.
        world: the World of the logits' device. No rank waits for another.

    f_e is the fraction of all routes that select expert e (for k = 1, the paper's fraction of tokens). P_e is the mean
    over the tokens of the softmax at e. The loss is 1 if f and P are both uniform over the experts.

    Returns:
        float32 [], 0 without tokens or routes.

    Raises:
        ValueError, TypeError: a shape or device is invalid; the message quotes it.
    """
    loss: torch.Tensor = BALANCE_OP(world, Sequential(), BalanceOperands(logits, ids))[0]
    return loss


def z_loss(logits: torch.Tensor, *, world: World) -> torch.Tensor:
    """Return the mean over this rank's tokens of logsumexp(logits)^2, a loss that keeps logits small (Zoph et al. 2022,
    "ST-MoE", equation 5, without its coefficient).

    Args:
        logits: [T, E], of any floating dtype. The loss is differentiable in them.
        world: the World of the logits' device. No rank waits for another.

    Returns:
        float32 [], 0 without tokens.

    Raises:
        ValueError, TypeError: the shape or device is invalid; the message quotes it.
    """
    loss: torch.Tensor = SQUARE_OP(world, Sequential(), (logits,))
    return loss
