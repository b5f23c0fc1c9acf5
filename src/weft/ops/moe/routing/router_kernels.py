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

from ....lang.jit import jit

SOFTMAX, SOFTMAX_AFTER, SIGMOID, LLAMA4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # SCORING
TAKEN = tl.constexpr(-(2**31))  # below the key of any number
NOT_A_NUMBER = tl.constexpr(-(2**31) + 1)  # below all of those too


@jit
def key_of(x):
    """Return int32 in the order of the float32 numbers; the two zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), NOT_A_NUMBER)


@jit
def take(key, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return int32 [R, P]: in which of N rounds the column was the greatest of its row, or -1. Ties go to the left."""
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
    """Return [R, GP * SP]: whether a column is of one of the row's N best groups, by the sum of the two best of their S
    experts."""
    by_group = tl.reshape(selection, (R, GP, SP))
    score, at = tl.max(by_group, 2, return_indices=True, return_indices_tie_break_left=True)
    if S > 1:
        others = tl.where(tl.arange(0, SP)[None, None, :] == at[:, :, None], float("-inf"), by_group)
        score += tl.max(others, 2)
    key = tl.where(tl.arange(0, GP)[None, :] < G, key_of(score), TAKEN)
    best = (take(key, N, R, GP) >= 0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(best[:, :, None], (R, GP, SP)), (R, GP * SP)) > 0


@jit
def scores_of(x, SCORING: tl.constexpr):
    """Return what weights are made of, for logits x [R, P], -inf where there is no expert."""
    if SCORING == SOFTMAX:
        w = tl.exp(x - tl.max(x, 1)[:, None])
        w = w / tl.sum(w, 1)[:, None]
    elif SCORING == SOFTMAX_AFTER:
        w = x
    else:
        w = 1.0 / (1.0 + tl.exp(-x))
    return w


@jit
def given_order(ids, row, ok, expert, K: tl.constexpr, R: tl.constexpr, P: tl.constexpr):
    """Return what `take` returns, for the ids [rows, K] that a caller gave."""
    order = tl.full((R, P), -1, tl.int32)
    for j in range(K):
        order = tl.where(tl.load(ids + row * K + j, mask=ok, other=-1) == expert[None, :], j, order)
    return order


@jit
def among_chosen(w, x, chosen, SCORING: tl.constexpr, RENORMALISE: tl.constexpr):
    """Return [R, P] and [R]: scores w of logits x before they are divided by the sum, and that sum, 1 where they are
    not."""
    if SCORING == SOFTMAX_AFTER:
        best = tl.max(tl.where(chosen, x, float("-inf")), 1)
        w = tl.exp(x - tl.where(best == float("-inf"), 0.0, best)[:, None])
    total = tl.full((w.shape[0],), 1.0, tl.float32)
    if SCORING == SOFTMAX_AFTER or RENORMALISE:
        total = tl.sum(tl.where(chosen, w, 0.0), 1) + 1e-20
    return w, total


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
    GIVEN: tl.constexpr,
    R: tl.constexpr,
):
    """ids int32, weights float32 [rows, K]: the K best of E experts for every row of logits [rows, E], and their
    weights. bias [E], or None, is added for the choice alone. G groups, padded to GP of SP columns; TOP: of how many to
    choose, 0 for all. GIVEN: the ids are there. R: rows of a block."""
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
        w = scores_of(x, SCORING)
        selection = x  # alone, of the order of the scores, which rounding may make equal
        if (SCORING == SOFTMAX or SCORING == SIGMOID) and (bias is not None or TOP > 0):
            selection = tl.where(there[None, :], w, float("-inf"))
        if bias is not None:
            selection += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)[None, :]
        if GIVEN:
            order = given_order(ids, row, ok, tl.where(there, expert, E), K, R, P)
        else:
            key = tl.where(there[None, :], key_of(selection), TAKEN)
            if TOP > 0:
                key = tl.where(in_best_groups(selection, TOP, R, G, GP, S, SP), key, TAKEN)
            order = take(key, K, R, P)

        chosen = order >= 0
        w, total = among_chosen(w, x, chosen, SCORING, RENORMALISE)
        if SCORING == SOFTMAX_AFTER or RENORMALISE:
            w = w / total[:, None]
        at = row * K + order
        if not GIVEN:
            tl.store(ids + at, tl.broadcast_to(expert[None, :], (R, P)), mask=ok & chosen)
        tl.store(weights + at, w * scale, mask=ok & chosen)


@jit(do_not_specialize=("rows",))
def gate_gradient(
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
    """dlogits [rows, E] of dweights float32 [rows, K], of the ids [rows, K] that `choose` took or was given. P: E
    rounded up to a power of two."""
    expert = tl.arange(0, P)
    there = expert < E
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        ok = row < rows
        x = tl.load(logits + row * E + expert[None, :], mask=ok & there[None, :], other=0.0).to(tl.float32)
        x = tl.where(there[None, :], x, float("-inf"))
        order = given_order(ids, row, ok, expert, K, R, P)
        chosen = (order >= 0) & there[None, :]
        score = scores_of(x, SCORING)
        w, total = among_chosen(score, x, chosen, SCORING, RENORMALISE)
        d = tl.load(dweights + row * K + order, mask=ok & chosen, other=0.0) * scale
        if SCORING == SOFTMAX_AFTER or RENORMALISE:
            mean = tl.sum(tl.where(chosen, d * w, 0.0), 1) / total
            d = tl.where(chosen, (d - mean[:, None]) / total[:, None], 0.0)
        if SCORING == SOFTMAX:
            d = w * (d - tl.sum(d * w, 1)[:, None])
        elif SCORING == SOFTMAX_AFTER:
            d = tl.where(chosen, w * d, 0.0)
        else:
            d = w * (1.0 - w) * d
        at = row * E + expert[None, :]
        tl.store(dlogits + at, d.to(dlogits.dtype.element_ty), mask=ok & there[None, :])
