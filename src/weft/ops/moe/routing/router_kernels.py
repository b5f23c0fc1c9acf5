"""The router's kernels: they compute each row's best experts and their weights from a row of logits, and the gradient.
No rank waits for another.

A program processes a few rows at a time, and each row in one warp if there are enough rows. Each column of the block
represents an expert. With groups, which are padded to powers of two, the columns are [group, expert of the group], so
columns and experts are in the same order.

    scores -> sort keys (integers in the order of the numbers) -> [mask all but the best groups] -> K times: take the
        greatest key and mask its column

Among equal keys the kernel chooses the leftmost one, which is the lower expert. A NaN sorts after all numbers, so that
ids are always distinct experts.
"""

from typing import NamedTuple

import triton.language as tl

from ....lang.jit import jit

# The values of SCORING.
SOFTMAX, SOFTMAX_AFTER, SIGMOID, LLAMA4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TAKEN = tl.constexpr(-(2**31))  # the key of a column that has been chosen; it is below all other keys
NOT_A_NUMBER = tl.constexpr(-(2**31) + 1)  # a key below the key of any number and above TAKEN


class GateSizes(NamedTuple):
    """The sizes and options of `choose`.

    K of E experts are chosen. The G groups are padded to GP groups of SP columns each. TOP: the number of groups from
    which experts are chosen, 0 for all groups. IDS_GIVEN: the ids are inputs. R: rows of a block.
    """

    K: tl.constexpr
    E: tl.constexpr
    G: tl.constexpr
    GP: tl.constexpr
    SP: tl.constexpr
    TOP: tl.constexpr
    SCORING: tl.constexpr
    RENORMALISE: tl.constexpr
    IDS_GIVEN: tl.constexpr
    R: tl.constexpr


@jit
def key_of(x):
    """Return int32 sort keys in the order of the float32 numbers. Positive and negative zero have the same key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOT_A_NUMBER)


@jit
def take(key, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Choose the greatest remaining column of each row in each of N rounds. Among equal columns, the leftmost one is
    chosen. Return int32 [R, P]: the round in which a column was chosen, or -1."""
    c = tl.arange(0, P)[None, :]
    order = tl.full((R, P), -1, tl.int32)
    for j in range(N):
        is_greatest = c == tl.argmax(key, 1, tie_break_left=True)[:, None]
        order = tl.where(is_greatest, j, order)
        key = tl.where(is_greatest, TAKEN, key)
    return order


@jit
def in_best_groups(
    selection, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr
):
    """Return [R, GP * SP]: whether the column belongs to one of the row's N best groups. A group's score is the sum of
    the two best scores of its S experts."""
    by_group = tl.reshape(selection, (R, GP, SP))
    score, best_index = tl.max(by_group, 2, return_indices=True, return_indices_tie_break_left=True)
    if S > 1:
        without_best = tl.where(tl.arange(0, SP)[None, None, :] == best_index[:, :, None], float("-inf"), by_group)
        score += tl.max(without_best, 2)
    key = tl.where(tl.arange(0, GP)[None, :] < G, key_of(score), TAKEN)
    best = (take(key, N, R, GP) >= 0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(best[:, :, None], (R, GP, SP)), (R, GP * SP)) > 0


@jit
def scores_of(x, SCORING: tl.constexpr):
    """Return the unnormalised weights of logits x [R, P]. The logits are -inf in columns without an expert."""
    if SCORING == SOFTMAX:
        w = tl.exp(x - tl.max(x, 1)[:, None])
        w = w / tl.sum(w, 1)[:, None]
    elif SCORING == SOFTMAX_AFTER:
        w = x
    else:
        w = 1.0 / (1.0 + tl.exp(-x))
    return w


@jit
def order_of_ids(ids, row, mask, expert, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return the result that `take` would return if it had chosen the given ids [rows, K]."""
    order = tl.full((R, P), -1, tl.int32)
    for j in range(K):
        order = tl.where(tl.load(ids + row * K + j, mask=mask, other=-1) == expert[None, :], j, order)
    return order


@jit
def among_chosen(w, x, chosen, SCORING: tl.constexpr, RENORMALISE: tl.constexpr):
    """Return the scores w [R, P] of logits x before normalisation. Also return [R], the sum by which each row's scores
    are divided; it is 1 if they are not divided."""
    if SCORING == SOFTMAX_AFTER:
        best = tl.max(tl.where(chosen, x, float("-inf")), 1)
        w = tl.exp(x - tl.where(best == float("-inf"), 0.0, best)[:, None])
    total = tl.full((w.shape[0],), 1.0, tl.float32)
    if SCORING == SOFTMAX_AFTER or RENORMALISE:
        total = tl.sum(tl.where(chosen, w, 0.0), 1) + 1e-20
    return w, total


@jit
def choose_rows(logits, bias, ids, weights, rows, scale, s):
    """Do this program's part of `choose`."""
    P: tl.constexpr = s.GP * s.SP
    S: tl.constexpr = s.E // s.G
    c = tl.arange(0, P)
    expert = c // s.SP * S + c % s.SP
    is_expert = (c // s.SP < s.G) & (c % s.SP < S)
    for block in range(tl.program_id(0), tl.cdiv(rows, s.R), tl.num_programs(0)):
        row = (block * s.R + tl.arange(0, s.R)).to(tl.int64)[:, None]
        mask = row < rows
        x = tl.load(logits + row * s.E + expert[None, :], mask=mask & is_expert[None, :], other=0.0).to(tl.float32)
        x = tl.where(is_expert[None, :], x, float("-inf"))
        w = scores_of(x, s.SCORING)
        selection = x  # the logits have the order of the scores, without the ties that rounding the scores could cause
        if (s.SCORING == SOFTMAX or s.SCORING == SIGMOID) and (bias is not None or s.TOP > 0):
            selection = tl.where(is_expert[None, :], w, float("-inf"))
        if bias is not None:
            selection += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
        if s.IDS_GIVEN:
            order = order_of_ids(ids, row, mask, tl.where(is_expert, expert, s.E), s.K, s.R, P)
        else:
            key = tl.where(is_expert[None, :], key_of(selection), TAKEN)
            if s.TOP > 0:
                key = tl.where(in_best_groups(selection, s.TOP, s.R, s.G, s.GP, S, s.SP), key, TAKEN)
            order = take(key, s.K, s.R, P)

        chosen = order >= 0
        w, total = among_chosen(w, x, chosen, s.SCORING, s.RENORMALISE)
        if s.SCORING == SOFTMAX_AFTER or s.RENORMALISE:
            w = w / total[:, None]
        # The hint affects only the layout: each element has its own mask, so no store becomes wider. Without the hint,
        # the layout of the stores spreads a row over all warps, and Triton computes the weights a second time in this
        # layout (39 registers for 16 experts, 23 with the hint). Sums in this layout are also in a different order with
        # 8 warps than with 4.
        offsets = tl.max_contiguous(row * s.K + order, (1, 2))
        if not s.IDS_GIVEN:
            tl.store(ids + offsets, tl.broadcast_to(expert[None, :], (s.R, P)), mask=mask & chosen)
        tl.store(weights + offsets, w * scale, mask=mask & chosen)


@jit(do_not_specialize=("rows",))
def choose(logits, bias, ids, weights, rows, scale, s):
    """Store ids int32 and weights float32 [rows, K]: the K best of E experts for every row of logits [rows, E], and
    their weights.

    bias [E] affects only the choice; it may be None. s: `GateSizes`.
    """
    choose_rows(logits, bias, ids, weights, rows, scale, s)


@jit(do_not_specialize=("rows",))
def router_backward(
    logits,
    ids,
    dweights,
    dlogits,
    rows,
    scale,
    K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    R: tl.constexpr,
):
    """Compute dlogits [rows, E] = the gradient of the weights with respect to the logits, times dweights float32 [rows,
    K]. ids [rows, K] are the experts that `choose` chose or received. P: E rounded up to a power of two."""
    expert = tl.arange(0, P)
    is_expert = expert < E
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        mask = row < rows
        x = tl.load(logits + row * E + expert[None, :], mask=mask & is_expert[None, :], other=0.0).to(tl.float32)
        x = tl.where(is_expert[None, :], x, float("-inf"))
        order = order_of_ids(ids, row, mask, expert, K, R, P)
        chosen = (order >= 0) & is_expert[None, :]
        score = scores_of(x, SCORING)
        w, total = among_chosen(score, x, chosen, SCORING, RENORMALISE)
        d = tl.load(dweights + row * K + order, mask=mask & chosen, other=0.0) * scale
        if SCORING == SOFTMAX_AFTER or RENORMALISE:
            mean = tl.sum(tl.where(chosen, d * w, 0.0), 1) / total
            d = tl.where(chosen, (d - mean[:, None]) / total[:, None], 0.0)
        if SCORING == SOFTMAX:
            d = w * (d - tl.sum(d * w, 1)[:, None])
        elif SCORING == SOFTMAX_AFTER:
            d = tl.where(chosen, w * d, 0.0)
        else:
            d = w * (1.0 - w) * d
        offsets = row * E + expert[None, :]
        tl.store(dlogits + offsets, d.to(dlogits.dtype.element_ty), mask=mask & is_expert[None, :])
