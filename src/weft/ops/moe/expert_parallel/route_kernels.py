"""The router as the first work in the single launch of an MoE layer (fused_kernels.py). All programs share this work.

    all programs   tiles of logits = x @ router^T + bias | grid barrier | experts of some rows | grid barrier
    the first                                                                  .. | compare calls

Between the two grid barriers the logits are in local memory, rounded to the dtype of x, as a separate GEMM would round
them. The device function that chooses a row's experts is the one that the separate router kernel calls
(routing/router_kernels.py), so equal logits give equal ids and weights. A call writes its logits only after all
programs of the previous launch have ended.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from ....lang.intrinsics import same_call
from ....lang.jit import jit
from ..routing.router_kernels import GateSizes, choose_rows


class RouterTensors(NamedTuple):
    """The caller's router: weight [E, H], bias [E], and choice_bias [E], which affects only the choice. Either bias may
    be None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    choice_bias: torch.Tensor | None


class RouterSizes(NamedTuple):
    """The sizes of the router. A tile of logits covers ROWS tokens and COLS experts; a K step covers BK elements.
    EVEN_K: H is a multiple of BK. SCALE: the factor by which the weights are multiplied."""

    ROWS: tl.constexpr
    COLS: tl.constexpr
    BK: tl.constexpr
    EVEN_K: tl.constexpr
    SCALE: tl.constexpr
    gate: GateSizes


@jit
def compare_calls_once(calls, number):
    """Compare the ranks' calls. Only the first program of the launch does so. number: int32 [1], the number of this
    call.

    The last program could do it instead, but `end_call` also compares with the index of the last program: the compiler
    would keep this index in a register for the whole kernel and spill it (4 bytes on sm_90a). If calls were compared
    before the logits are computed, another value would spill (GELU, tiles of 128 x 256)."""
    if tl.program_id(0) == 0:
        same_call(calls, tl.load(number))


@jit
def logits_tile(x, weight, t, e, T, H: tl.constexpr, s):
    """Return fp32 [ROWS, COLS]: the tokens t below T of x [T, H], times the experts e of weight [E, H]."""
    c = tl.arange(0, s.BK)[None, :]
    token_pointers = x + t.to(tl.int64)[:, None] * H + c
    expert_pointers = weight + e[:, None] * H + c
    is_token = (t < T)[:, None]
    is_expert = (e < s.gate.E)[:, None]
    acc = tl.zeros((s.ROWS, s.COLS), tl.float32)
    for k in range(0, H, s.BK):
        token_mask = is_token if s.EVEN_K else is_token & (k + c < H)
        expert_mask = is_expert if s.EVEN_K else is_expert & (k + c < H)
        tokens = tl.load(token_pointers + k, mask=token_mask, other=0.0)
        acc = tl.dot(tokens, tl.load(expert_pointers + k, mask=expert_mask, other=0.0).T, acc)
    return acc


@jit
def compute_logits(x, router, logits, T, H: tl.constexpr, s):
    """Compute and store this program's tiles of logits [T, E] = x [T, H] @ weight^T + bias. H is a constant here, which
    saves registers: 249 instead of 254 for Qwen3-30B's layer on sm_90a."""
    tiles_n: tl.constexpr = (s.gate.E + s.COLS - 1) // s.COLS
    for tile in range(tl.program_id(0), tl.cdiv(T, s.ROWS) * tiles_n, tl.num_programs(0)):
        t = tile // tiles_n * s.ROWS + tl.arange(0, s.ROWS)
        e = tile % tiles_n * s.COLS + tl.arange(0, s.COLS)
        acc = logits_tile(x, router.weight, t, e, T, H, s)
        if router.bias is not None:
            acc += tl.load(router.bias + e, mask=e < s.gate.E, other=0.0).to(tl.float32)[None, :]
        mask = (t < T)[:, None] & (e < s.gate.E)[None, :]
        tl.store(logits + t[:, None] * s.gate.E + e[None, :], acc.to(logits.dtype.element_ty), mask=mask)


@jit
def choose_experts(router, logits, ids, weights, T, s):
    """Store ids and weights [T, K] of this program's rows of logits."""
    choose_rows(logits, router.choice_bias, ids, weights, T, s.SCALE, s.gate)
