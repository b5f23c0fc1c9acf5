"""The gate of a mixture of experts: a row of logits to its best experts and their weights. No rank waits here.

A program takes a few rows at a time, each in one warp where there are enough of them. A column of the block is an
expert; with groups (padded to powers of two) the columns are [group, expert of the group], so that columns and experts
have one order.

    scores -> keys: integers in the order of the numbers -> [limit to the best groups] -> K times: the greatest key, its
    column taken out

Ties go to the lower expert: of equal keys the leftmost is taken. A NaN comes after all numbers, so that ids are always
distinct experts.
"""

import triton.language as tl

from ...lang.jit import jit

SOFTMAX, SOFTMAX_AFTER, SIGMOID, LLAMA4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # SCORING
TAKEN = tl.constexpr(-(2**31))  # below the key of any number
NOT_A_NUMBER = tl.constexpr(-(2**31) + 1)  # below all of those too


@jit
def key_of(x):
    """int32 in the order of the float32 numbers; the two zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOT_A_NUMBER)


@jit
def take(key, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """int32 [R, P]: in which of N rounds the column was the greatest of its row, or -1. Ties to the left."""
    c = tl.arange(0, P)[None, :]
    order = tl.full((R, P), -1, tl.int32)
    for j in range(N):
        taken = c == tl.argmax(key, 1, tie_break_left=True)[:, None]
        order = tl.where(taken, j, order)
        key = tl.where(taken, TAKEN, key)
    return order


@jit
def in_best_groups(
    selection, N: tl.constexpr, R: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr
):
    """[R, GP * SP]: whether a column is of one of the row's N best groups, by the sum of the two best of their S
    experts."""
    by_group = tl.reshape(selection, (R, GP, SP))
    score, at = tl.max(by_group, 2, return_indices=True, return_indices_tie_break_left=True)
    if S > 1:
        others = tl.where(tl.arange(0, SP)[None, None, :] == at[:, :, None], float("-inf"), by_group)
        score += tl.max(others, 2)
    key = tl.where(tl.arange(0, GP)[None, :] < G, key_of(score), TAKEN)
    best = (take(key, N, R, GP) >= 0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(best[:, :, None], (R, GP, SP)), (R, GP * SP)) > 0


@jit(do_not_specialize=("rows",))
def choose(
    logits,
    bias,
    ids,
    weights,
    rows,
    scale,
    K: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    TOP: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    R: tl.constexpr,
):
    """ids int32, weights float32 [rows, K]: the K best of E experts for every row of logits [rows, E], and their
    weights. bias [E] is added for the choice alone. G groups, padded to GP of SP columns; TOP: of how many of them to
    choose, 0 for all. R: rows of a block."""
    P: tl.constexpr = GP * SP
    S: tl.constexpr = E // G
    c = tl.arange(0, P)
    expert = c // SP * S + c % SP
    there = (c // SP < G) & (c % SP < S)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        ok = row < rows
        x = tl.load(logits + row * E + expert[None, :], mask=ok & there[None, :], other=0.0).to(tl.float32)
        x = tl.where(there[None, :], x, float("-inf"))
        w = x
        if SCORING == SOFTMAX:
            w = tl.exp(x - tl.max(x, 1)[:, None])
            w = w / tl.sum(w, 1)[:, None]
        if SCORING == SIGMOID or SCORING == LLAMA4:
            w = 1.0 / (1.0 + tl.exp(-x))

        selection = x  # alone, of the order of the scores, which rounding may make equal
        if (SCORING == SOFTMAX or SCORING == SIGMOID) and (BIAS or TOP > 0):
            selection = tl.where(there[None, :], w, float("-inf"))
        if BIAS:
            selection += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)[None, :]
        key = tl.where(there[None, :], key_of(selection), TAKEN)
        if TOP > 0:
            key = tl.where(in_best_groups(selection, TOP, R, G, GP, S, SP), key, TAKEN)
        order = take(key, K, R, P)

        chosen = order >= 0
        if SCORING == SOFTMAX_AFTER:
            w = tl.exp(x - tl.max(tl.where(chosen, x, float("-inf")), 1)[:, None])
        if SCORING == SOFTMAX_AFTER or RENORMALISE:
            w = w / (tl.sum(tl.where(chosen, w, 0.0), 1) + 1e-20)[:, None]
        at = row * K + order
        tl.store(ids + at, tl.broadcast_to(expert[None, :], (R, P)), mask=ok & chosen)
        tl.store(weights + at, w * scale, mask=ok & chosen)
