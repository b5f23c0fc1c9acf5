"""The kernels of the router's losses and of the gradients of these losses. No rank and no program waits for another.

    every program    sums over its rows of logits -> its partial sums -> counts itself as arrived
    the last one     adds the partial sums in the order of the programs -> the loss; sets the count back to 0

Memory order: each program releases its partial sums when it increments the count. The program that increments the count
last acquires the sums of all other programs and reads them. Which rows a program sums and the order of the sums are
fixed, so the bits of a loss do not depend on which program is last. A later launch on the same stream starts with a
count of 0. The host orders calls on different streams (`lock`).
"""

import triton.language as tl

from ....lang.intrinsics import flush_stores
from ....lang.jit import jit


@jit
def is_last_program(arrivals):
    """Count this program as arrived, and return whether all other programs have arrived. If they have, their stores are
    visible to this program."""
    flush_stores(False)
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1
    tl.store(arrivals, 0, mask=is_last)
    return is_last


@jit
def load_rows(logits, row, rows, E: tl.constexpr, P: tl.constexpr):
    """Return float32 [R, P], the logits of these rows; -inf in columns without an expert, 0 in rows from `rows` on."""
    expert = tl.arange(0, P)[None, :]
    x = tl.load(logits + row * E + expert, mask=(row < rows) & (expert < E), other=0.0).to(tl.float32)
    return tl.where(expert < E, x, float("-inf"))


@jit
def softmax(x, E: tl.constexpr, P: tl.constexpr):
    """Return the softmax of each row of x [R, P] over its first E columns. The result is 0 in the other columns, and in
    all columns of a row without a softmax."""
    p = tl.exp(x - tl.max(x, 1)[:, None])
    return tl.where(tl.arange(0, P)[None, :] < E, p / tl.sum(p, 1)[:, None], 0.0)


@jit
def logsumexp(x):
    """Return float32 [R], which is infinite for a row whose greatest logit is infinite."""
    greatest = tl.max(x, 1)
    shift = tl.where(tl.abs(greatest) == float("inf"), 0.0, greatest)
    return tl.log(tl.sum(tl.exp(x - shift[:, None]), 1)) + shift


@jit(do_not_specialize=("rows",))
def balance_loss(
    logits,
    ids,
    probabilities,
    routes,
    arrivals,
    loss,
    share,
    rows,
    K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
):
    """Compute the balance loss and share [E] for logits [rows, E] and ids [rows, K]. share is the fraction of all
    routes that each expert receives; loss = E times the sum over the experts of share x mean probability.

    probabilities (float32) and routes (int32), both [programs, P], are memory for partial sums. P: E rounded up to a
    power of two. R: the number of rows in a block.
    """
    expert = tl.arange(0, P)
    is_expert = expert < E
    probability, count = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        p = softmax(load_rows(logits, row, rows, E, P), E, P)
        probability += tl.sum(tl.where(row < rows, p, 0.0), 0)
        for j in range(K):
            chosen = tl.load(ids + row * K + j, mask=row < rows, other=0) == expert[None, :]
            count += tl.sum((chosen & (row < rows)).to(tl.int32), 0)
    offset = tl.program_id(0) * P + expert
    tl.store(probabilities + offset, probability)
    tl.store(routes + offset, count)
    if is_last_program(arrivals):
        probability, count = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.int32)
        program = tl.arange(0, R)[:, None]
        for begin in range(0, tl.num_programs(0), R):
            mask = (begin + program < tl.num_programs(0)) & is_expert[None, :]
            offsets = (begin + program) * P + expert[None, :]
            probability += tl.sum(tl.load(probabilities + offsets, mask=mask, other=0.0), 0)
            count += tl.sum(tl.load(routes + offsets, mask=mask, other=0), 0)
        count = tl.where(is_expert, count, 0)
        part = count.to(tl.float32) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
        tl.store(share + expert, part, mask=is_expert)
        tl.store(loss, E * tl.sum(part * probability, 0) / rows.to(tl.float32))


@jit(do_not_specialize=("rows",))
def balance_backward(
    logits,
    share,
    dloss,
    dlogits,
    rows,
    E: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
):
    """Compute dlogits [rows, E] = the gradient of `balance_loss` with respect to the logits, times dloss."""
    expert = tl.arange(0, P)[None, :]
    part = tl.load(share + expert, mask=expert < E, other=0.0)
    scale = tl.load(dloss) * E / rows.to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        p = softmax(load_rows(logits, row, rows, E, P), E, P)
        d = scale * p * (part - tl.sum(part * p, 1)[:, None])
        tl.store(dlogits + row * E + expert, d.to(dlogits.dtype.element_ty), mask=(row < rows) & (expert < E))


@jit(do_not_specialize=("rows",))
def square_loss(
    logits,
    sums,
    arrivals,
    loss,
    rows,
    E: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    PROGRAMS_P: tl.constexpr,
):
    """Compute loss = the mean of logsumexp^2 over the rows of logits [rows, E]. sums float32 [programs] is memory for
    partial sums; PROGRAMS_P: programs, rounded up to a power of two."""
    total = 0.0
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = block * R + tl.arange(0, R)
        z = logsumexp(load_rows(logits, row.to(tl.int64)[:, None], rows, E, P))
        total += tl.sum(tl.where(row < rows, z * z, 0.0), 0)
    tl.store(sums + tl.program_id(0), total)
    if is_last_program(arrivals):
        program = tl.arange(0, PROGRAMS_P)
        partial = tl.load(sums + program, mask=program < tl.num_programs(0), other=0.0)
        tl.store(loss, tl.sum(partial, 0) / rows.to(tl.float32))


@jit(do_not_specialize=("rows",))
def square_backward(logits, dloss, dlogits, rows, E: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """Compute dlogits [rows, E] = the gradient of `square_loss` with respect to the logits, times dloss."""
    expert = tl.arange(0, P)[None, :]
    scale = 2.0 * tl.load(dloss) / rows.to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)[:, None]
        x = load_rows(logits, row, rows, E, P)
        z = logsumexp(x)[:, None]
        d = scale * z * tl.exp(x - z)
        tl.store(dlogits + row * E + expert, d.to(dlogits.dtype.element_ty), mask=(row < rows) & (expert < E))
