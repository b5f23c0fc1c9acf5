"""The router of a mixture of experts (`weft.moe.gate`), which is local to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....kernel_launch import Launch, prepared
from ....lang.jit import constants
from ....op import Local, Operands, RowsCall, Shapes, registered
from ....plans import Plan, Sequential
from ....prepared import unprepared
from ....tensor_checks import check_devices, dims
from ....torch_library import Backward, CallOptions
from ....world import World
from ..call import RouterOptions
from .route_tables import power
from .router_kernels import LLAMA4, SIGMOID, SOFTMAX, SOFTMAX_AFTER, GateSizes, choose, router_backward

OP = "gate"
SCORINGS = {"softmax": SOFTMAX, "softmax_after": SOFTMAX_AFTER, "sigmoid": SIGMOID, "llama4": LLAMA4}
LOGITS = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS, MAX_K = 512, 16  # the largest E and k
GATE_WARPS = 4  # the number of warps in a program of `choose`


def gate(
    logits: torch.Tensor,
    k: int,
    *,
    world: World,
    scoring: str = "softmax",
    renormalise: bool = True,
    bias: torch.Tensor | None = None,
    groups: int = 0,
    top_groups: int = 0,
    scale: float = 1.0,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k best experts of every token and compute their weights. The function is differentiable in logits,
    also under torch.compile.

    Args:
        logits: [T, E], bfloat16, float16 or float32; T may be 0, E at most 512.
        k: the number of experts per token, 1 to 16.
        world: the World of the logits' device. No rank waits for another.
        scoring: how a weight is computed before it is scaled:
            "softmax"        softmax over all experts (Mixtral, Qwen3, DeepSeek-V2)
            "softmax_after"  softmax over the chosen experts' logits (GPT-OSS)
            "sigmoid"        sigmoid of the logit (DeepSeek-V3)
            "llama4"         the sigmoid too, but experts are chosen by their logits, and weights are never divided
        renormalise: whether the weights are divided by the sum of the chosen experts' weights ("softmax" and "sigmoid"
            only).
        bias: [E], float32 or the dtype of logits. The bias is added to the scores (or to the logits, if the logits
            decide the choice) and affects only the choice, not the weights (Wang et al. 2024, "Auxiliary-Loss-Free Load
            Balancing").
        groups, top_groups: the experts form `groups` groups of consecutive experts, and only experts in the best
            top_groups groups can be chosen. A group's score is the sum of its two best biased scores (DeepSeek-V3,
            section 2.1.2). 0: no groups.
        scale: a factor for the final weights.
        ids: int32 [T, k], experts that an earlier call chose (routing replay; Zheng et al. 2025, "Group Sequence Policy
            Optimization", section 5.3). A token's ids are distinct; an id of -1 means no expert and has the weight 0.
            For ids that `gate` itself chose, the weights have the same bits as in that call. None: `gate` chooses the
            experts.

    All computation is in float32. The experts with the greatest scores are chosen; among equal scores, the lower expert
    is chosen. A NaN counts as greater than all numbers, so the ids of a token are distinct for any logits.

    Returns:
        ids int32 [T, k], the best first, and weights float32 [T, k].

    Raises:
        ValueError, TypeError: a shape, dtype, device or option is invalid; the message quotes it.
    """
    options = k, scoring, renormalise, groups, top_groups, float(scale)
    if isinstance(bias, torch.Tensor):
        bias = bias.detach()  # the weights do not depend on it: a bias alone requires no gradient
    weights, ids = ROUTER(world, Sequential(), RouterOperands(logits, bias, ids), options)
    return ids, weights


@dataclass(frozen=True, eq=False)
class TopKRouter:
    """A router: it computes logits [T, E] = x [T, H] @ weight^T + bias, and `gate` chooses each token's k experts from
    them.

    Args:
        weight: [E, H], of the dtype of x.
        k, scoring, renormalise, groups, top_groups, scale: as in `gate`.
        bias: [E], of that dtype, or None.
        choice_bias: [E], a bias that affects only the choice (`bias` of `gate`), or None.

    Raises:
        ValueError: k is not from 1 to 16.
    """

    weight: torch.Tensor
    k: int
    bias: torch.Tensor | None = None
    scoring: str = "softmax"
    renormalise: bool = True
    choice_bias: torch.Tensor | None = None
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= MAX_K:
            raise ValueError(f"TopKRouter: k must be from 1 to {MAX_K}, got {self.k!r}")

    @property
    def options(self) -> RouterOptions:
        """Return the options of `gate` except k."""
        return RouterOptions(self.scoring, self.renormalise, self.groups, self.top_groups, float(self.scale))

    def __call__(
        self, x: torch.Tensor, *, world: World, ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids int32 [T, k] and weights float32 [T, k] of the experts that are chosen for x, and the logits [T,
        E]. ids: as in `gate`."""
        logits = torch.nn.functional.linear(x, self.weight, self.bias)
        ids, weights = gate(logits, self.k, world=world, bias=self.choice_bias, ids=ids, **self.options._asdict())
        return ids, weights, logits


class RouterOperands(NamedTuple):
    logits: torch.Tensor
    bias: torch.Tensor | None = None
    ids: torch.Tensor | None = None


def run_gate(
    world: World, operands: RouterOperands, weights: torch.Tensor, k: int, options: RouterOptions
) -> torch.Tensor:
    """Write the weights [T, k]. Return the ids, in memory that no operand uses."""
    (logits, bias, given_ids), stream = operands, world.current_stream()
    (rows, e), ids = logits.shape, world.empty(weights.shape, torch.int32)
    if given_ids is not None:
        world.copy(ids, given_ids, stream)
        world.call(weights.zero_, [], [weights], stream)
    if rows:
        launch = _choose(world, rows, e, k, options, given_ids is not None)
        launch(stream, logits=logits, bias=bias, ids=ids, weights=weights)
    return ids


@prepared
def _choose(world: World, rows: int, experts: int, k: int, options: RouterOptions, ids_given: bool) -> Launch:
    """Return the launch of the router. ids_given: whether the ids are given."""
    sizes = gate_sizes(experts, k, options, ids_given)
    programs = min(-(-rows // sizes.R.value), world.sm_count * 4)
    launch_options = dict(num_warps=GATE_WARPS, local=True)
    return Launch(world, choose, programs, launch_options, rows=rows, scale=options.scale, s=sizes)


def gate_sizes(
    experts: int, k: int, options: RouterOptions, ids_given: bool = False, warps: int = GATE_WARPS
) -> GateSizes:
    """Return the sizes for `choose` in programs of `warps` warps."""
    g, top = (options.groups, options.top_groups) if options.top_groups else (1, 0)
    gp, sp = power(g), power(experts // g)
    return constants(
        GateSizes,
        K=k,
        E=experts,
        G=g,
        GP=gp,
        SP=sp,
        TOP=top,
        SCORING=SCORINGS[options.scoring].value,
        RENORMALISE=options.renormalises,
        IDS_GIVEN=ids_given,
        R=rows_per_block(gp * sp) * warps // GATE_WARPS,
    )


def rows_per_block(columns: int) -> int:
    """Return the number of rows in a block of `columns` columns."""
    return 4 if columns <= 128 else 2 if columns <= MAX_EXPERTS else 1


@dataclass(frozen=True)
class RouterCall(RowsCall):
    """The number of tokens, the number of experts per token, and the options of the router."""

    k: int
    options: RouterOptions


def run_router(
    world: World, call: RouterCall, plan: Plan, operands: RouterOperands, out: torch.Tensor
) -> tuple[torch.Tensor]:
    return (run_gate(world, operands, out, call.k, call.options),)


@prepared
def _choose_backward(world: World, rows: int, experts: int, k: int, options: RouterOptions) -> Launch:
    p = power(experts)
    sizes = dict(rows=rows, scale=options.scale, K=k, E=experts, P=p, R=rows_per_block(p))
    programs = min(-(-rows // rows_per_block(p)), world.sm_count * 4)
    flags = dict(SCORING=SCORINGS[options.scoring], RENORMALISE=options.renormalises)
    return Launch(world, router_backward, programs, dict(num_warps=4, local=True), **sizes, **flags)


class RouterOp(Local[RouterCall]):
    """Operands: logits, bias, ids or None; options: k, scoring, renormalise, groups, top_groups, scale. Results:
    weights, ids."""

    name = "moe_gate"
    public = OP
    signature = (
        "Tensor logits, Tensor? bias, Tensor? ids, SymInt k, str scoring, bool renormalise, SymInt groups,"
        " SymInt top_groups, float scale"
    )
    results = 2
    operand_type = RouterOperands
    runs = {Sequential: unprepared(run_router)}

    def check(self, world: World, operands: RouterOperands, options: CallOptions) -> RouterCall:
        k, router_options = options[0], RouterOptions._make(options[1:])
        check_gate(world, operands, k, router_options)
        return RouterCall(operands.logits.shape[0], k, router_options)

    def outputs(self, world: World, call: RouterCall) -> Shapes:
        return [((call.m, call.k), dtype) for dtype in (torch.float32, torch.int32)]

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Operands:
        return operands[0], results[1]

    def backward(self, world: World, ctx: Backward) -> list[torch.Tensor | None]:
        (logits, ids), dweights = ctx.saved, ctx.gradients[0]
        assert logits is not None and ids is not None
        if dweights is None:
            return [None] * 3
        call: RouterCall = ctx.call
        logits, ids, dweights = logits.contiguous(), ids.contiguous(), dweights.contiguous()
        dlogits = world.empty(logits.shape, logits.dtype)
        if call.rows:
            launch = _choose_backward(world, len(logits), logits.shape[1], call.k, call.options)
            launch(world.current_stream(), logits=logits, ids=ids, dweights=dweights, dlogits=dlogits)
        return [dlogits, None, None]


ROUTER = registered(RouterOp())


def check_gate(world: World, operands: RouterOperands, k: int, options: RouterOptions) -> None:
    """Raise as `gate` does."""
    (logits, bias, ids), (scoring, _, groups, top_groups, _) = operands, options
    check_devices(OP, world, operands._asdict())
    if ids is not None and (ids.shape != (*logits.shape[:1], k) or ids.dtype != torch.int32):
        raise ValueError(f"{OP}: ids {dims(ids)} must be int32 [T, {k}], for logits {dims(logits)}")
    if logits.dtype not in LOGITS:
        raise TypeError(f"{OP}: logits are {dims(logits)}; bfloat16, float16 and float32 are supported")
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"{OP}: logits must be [T, E] with E from 1 to {MAX_EXPERTS}, got {dims(logits)}")
    e = logits.shape[1]
    if not isinstance(k, int) or not 1 <= k <= min(MAX_K, e):
        raise ValueError(f"{OP}: k must be from 1 to {min(MAX_K, e)} for {e} experts, got {k!r}")
    if scoring not in SCORINGS:
        raise ValueError(f"{OP}: scoring {scoring!r} is not one of {', '.join(SCORINGS)}")
    if bias is not None and (bias.shape != (e,) or bias.dtype not in (torch.float32, logits.dtype)):
        raise ValueError(f"{OP}: bias {dims(bias)} must be [{e}], float32 or of the dtype of logits {dims(logits)}")
    if (groups > 0) != (top_groups > 0) or groups < 0:
        raise ValueError(f"{OP}: groups {groups} and top_groups {top_groups} go together")
    if groups and (e % groups or top_groups > groups):
        raise ValueError(f"{OP}: {e} experts do not make {groups} equal groups of which {top_groups} can be taken")
    if groups and top_groups * (e // groups) < k:
        raise ValueError(f"{OP}: {top_groups} groups of {e // groups} experts have fewer than k = {k}")
