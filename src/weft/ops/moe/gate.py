"""The gate of a mixture of experts, local: no rank waits for another. And the losses that keep experts in use."""

from __future__ import annotations

from typing import Any

import torch

from ...op import check_call
from ...operands import check_device, dims, places, requires_grad
from ...world import World
from .gate_kernels import LLAMA4, SIGMOID, SOFTMAX, SOFTMAX_AFTER, choose

OP = "gate"
SCORINGS = {"softmax": SOFTMAX, "softmax_after": SOFTMAX_AFTER, "sigmoid": SIGMOID, "llama4": LLAMA4}
RENORMALISED = ("softmax", "sigmoid")
LOGITS = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS, MOST = 512, 16  # the largest E and k


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts of every token, and their weights.

    Args:
        logits: [T, E], bfloat16, float16 or float32; T may be 0, E at most 512.
        k: experts a token, 1 to 16.
        world: whose device it is. No rank waits for another.
        scoring: what a weight is before it is scaled:
            "softmax"        softmax over all experts (Mixtral, Qwen3, DeepSeek-V2)
            "softmax_after"  softmax over the chosen experts' logits (GPT-OSS)
            "sigmoid"        sigmoid of the logit (DeepSeek-V3)
            "llama4"         the same, chosen by the logits and never divided by the sum
        renormalise: divide by the sum of the chosen experts' weights ("softmax" and "sigmoid" only).
        bias: [E], float32 or of the dtype of logits, added to the scores (where chosen by them: the logits) for the
            choice alone, not to the weights (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing").
        groups, top_groups: choose from the best top_groups of so many groups of consecutive experts; a group's score is
            the sum of its two best biased scores (DeepSeek-V3, section 2.1.2). 0: no groups.
        scale: what the weights are multiplied by in the end.

    Computed in float32. Chosen are the greatest scores, of equal ones that of the lower expert. A NaN comes after all
    numbers, so the ids of a token are distinct whatever the logits are.

    Returns:
        ids int32 [T, k], from the best on, and weights float32 [T, k].

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options that do not fit, quoted; an operand that requires a
            gradient.
    """
    _check(logits, k, world, scoring, bias, groups, top_groups)
    rows, e = logits.shape
    logits, bias = logits.contiguous(), None if bias is None else bias.contiguous()
    ids, weights = world.empty((rows, k), torch.int32), world.empty((rows, k), torch.float32)
    if rows:
        g = groups if top_groups else 1
        gp, sp = _power(g), _power(e // g)
        block = 4 if gp * sp <= 128 else 2 if gp * sp <= MOST_EXPERTS else 1
        sizes = dict(rows=rows, scale=float(scale), K=k, E=e, G=g, GP=gp, SP=sp, TOP=top_groups, R=block)
        renormalise = renormalise and scoring in RENORMALISED

        def args() -> dict[str, Any]:
            return dict(
                logits=logits,
                bias=logits if bias is None else bias,
                ids=ids,
                weights=weights,
                **sizes,
                SCORING=SCORINGS[scoring],
                RENORMALISE=renormalise,
                BIAS=bias is not None,
            )

        key = (OP, *sizes.values(), scoring, renormalise, logits.dtype, bias is not None and bias.dtype)
        key = (*key, *places(logits, bias, ids, weights))
        programs = min(-(-rows // block), world.sm_count * 4)
        world.launch(choose, programs, args, dict(num_warps=4, local=True), world.current_stream(), key)
    world.finish(world.current_stream())
    return ids, weights


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _check(
    logits: torch.Tensor, k: int, world: World, scoring: str, bias: torch.Tensor | None, groups: int, top_groups: int
) -> None:
    check_call(OP, world)
    for name, t in (("logits", logits), ("bias", bias)):
        if t is not None or name == "logits":
            check_device(OP, world, name, t)
    if torch.is_grad_enabled() and requires_grad(logits, bias):
        raise ValueError(f"{OP}: an operand requires a gradient, and this op has none; use torch.no_grad()")
    if logits.dtype not in LOGITS:
        raise TypeError(f"{OP}: logits are {dims(logits)}; bfloat16, float16 and float32 are supported")
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ValueError(f"{OP}: logits must be [T, E] with E from 1 to {MOST_EXPERTS}, got {dims(logits)}")
    e = logits.shape[1]
    if not isinstance(k, int) or not 1 <= k <= min(MOST, e):
        raise ValueError(f"{OP}: k must be from 1 to {min(MOST, e)} for {e} experts, got {k!r}")
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


# -- losses ------------------------------------------------------------------------------------------------------------


def load_balancing_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """E * sum over experts of f_e * P_e (Fedus et al. 2021, "Switch Transformers", equations 4 to 6, without alpha).

    Args:
        logits: [T, E], of any floating dtype; the gradient goes through them.
        ids: integer [T, k], the chosen experts; -1 for none.

    f_e is the share of all routes that go to expert e (for k = 1 the paper's share of tokens), P_e the mean of the
    softmax of e's logits. 1 where both are even over the experts.

    Returns: float32 [], 0 without tokens or routes. Raises ValueError for shapes that do not fit. Of this rank's tokens
        alone.
    """
    if logits.dim() != 2 or ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
        raise ValueError(f"load_balancing_loss: logits {dims(logits)} are not [T, E], or ids {dims(ids)} not [T, k]")
    tokens, experts = logits.shape
    mean = torch.softmax(logits.float(), -1).sum(0) / max(tokens, 1)
    routes = torch.zeros(experts + 1, device=ids.device)  # the last: of those that go nowhere
    routes.scatter_add_(
        0, torch.where(ids < 0, experts, ids).flatten().long(), torch.ones(ids.numel(), device=ids.device)
    )
    share = routes[:experts] / routes[:experts].sum().clamp_min(1)
    return experts * (share * mean).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small (Zoph et al. 2022, "ST-MoE", equation 5,
    without its coefficient).

    Args:
        logits: [T, E], of any floating dtype; the gradient goes through them.

    Returns:
        float32 [], 0 without tokens. Raises ValueError for logits of another shape. Of this rank's tokens alone.
    """
    if logits.dim() != 2:
        raise ValueError(f"z_loss: logits must be [T, E], got {dims(logits)}")
    return torch.logsumexp(logits.float(), -1).square().sum() / max(logits.shape[0], 1)
