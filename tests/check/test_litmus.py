"""Litmus tests of PTX's memory model. Each test names the axiom of the model (PTX ISA, "Memory Consistency Model",
"Axioms") that decides it, and states the allowed outcomes independently of the emulator.

A thread is written as PTX over words x, y and z and results r0 and r1. A plain `ld` or `st` is weak. Each thread runs
on its own GPU or, with `gpus=1`, in its own program of one kernel. The verdict "race" means that weak accesses conflict
and no causality order relates them; "ordered" means that a causality order relates them. For tests with only strong
accesses, `allowed` contains all outcomes that PTX allows. `reached` contains the outcomes that a sequentially
consistent order can give; the emulator reaches exactly these.

All threads of a block run the same text, so `bar` (bar.sync 0) separates their weak stores from every thread's release.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
import triton
import triton.language as tl

from tests.check.symmetric_kernels import Memory
from weft.check import search
from weft.errors import Race

SEEDS = 16


@triton.jit
def litmus_kernel(words, out, first_thread, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    thread = first_thread + tl.program_id(0)
    x = tl.load(words.to(tl.pointer_type(tl.uint64))).to(tl.pointer_type(tl.int32))
    for i in tl.static_range(4):
        if thread == i:
            r0, r1 = tl.inline_asm_elementwise(
                (T0, T1, T2, T3)[i],
                "=r,=r,l,l,l",
                [x, x + 1, x + 2],
                dtype=(tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
            tl.store(out + 2 * thread, r0)
            tl.store(out + 2 * thread + 1, r1)


def ptx(thread: str) -> str:
    """Return the assembly of a thread. `until y ld` repeats the load until the word is not 0."""
    thread = re.sub(r"until (\w+) (ld[\w.]+)", r"\1: \2 r0, [\1]; setp.eq.u32 %p, r0, 0; @%p bra \1", thread)
    thread = thread.replace("bar;", "bar.sync 0;")
    thread = re.sub(r"\b(ld|st)([.\w]*)(?= )", r"\1\2.global.u32", thread)
    thread = re.sub(r"\[(\w)\]", lambda word: f"[${2 + 'xyz'.index(word[1])}]", thread)
    return re.sub(r"\br[01]\b", lambda register: "$" + register[0][1], thread)


def main(rank: int, world_size: int, threads: tuple[str, ...], gpus: int, outcomes: dict) -> None:
    memory = Memory(rank, world_size, 4)
    memory.buffer.fill_(0)
    memory.handle.barrier()
    out = torch.zeros(2 * len(threads), dtype=torch.int32, device="cuda")
    texts = [*map(ptx, threads), *[""] * (4 - len(threads))]
    programs = len(threads) if gpus == 1 else 1
    litmus_kernel[(programs,)](memory.pointers[0], out, rank, *texts)
    memory.handle.barrier()
    thread_results = out.tolist() if gpus == 1 else out[2 * rank : 2 * rank + 2].tolist()
    final = memory.handle.get_buffer(0, (1,), torch.int32).item()
    outcomes.setdefault("runs", []).append((rank, thread_results, final))


def run(threads: tuple[str, ...], gpus: int | None = None):
    """Return the verdict, the set of outcomes (the results of all threads in a row), and the set of final values of
    x."""
    gpus = gpus or len(threads)
    outcomes: dict[str, list] = {}
    exploration = search(functools.partial(main, threads=threads, gpus=gpus, outcomes=outcomes), gpus, range(SEEDS))
    for _, error in exploration.findings:
        assert isinstance(error, Race), error
    if exploration.findings:
        return "race", set(), set()
    runs = sorted_runs(outcomes["runs"], gpus)
    return "ordered", {tuple(itertools.chain(*(r for _, r, _ in run))) for run in runs}, {run[0][2] for run in runs}


def sorted_runs(results: list, gpus: int) -> list[list]:
    """Return the results of each run by rank; the runs are sequential."""
    return [sorted(results[i : i + gpus]) for i in range(0, len(results), gpus)]


# -- message passing ---------------------------------------------------------------------------------------------------------
MESSAGE_PASSING = {
    # Causality: a release pattern synchronizes with the acquire pattern that reads it, if they are morally strong.
    "release and acquire": (
        "st [x], 1; bar; st.release.sys [y], 1;",
        "until y ld.acquire.sys; ld r1, [x];",
        2,
        "ordered",
    ),
    "no release pattern": ("st [x], 1; bar; st.relaxed.sys [y], 1;", "until y ld.acquire.sys; ld r1, [x];", 2, "race"),
    "no acquire pattern": ("st [x], 1; bar; st.release.sys [y], 1;", "until y ld.relaxed.sys; ld r1, [x];", 2, "race"),
    "volatile is relaxed": ("st [x], 1; bar; st.release.sys [y], 1;", "until y ld.volatile; ld r1, [x];", 2, "race"),
    # A fence followed by a relaxed store is a release pattern; a relaxed load followed by a fence is an acquire
    # pattern.
    "fences": (
        "st [x], 1; bar; fence.acq_rel.sys; st.relaxed.sys [y], 1;",
        "until y ld.relaxed.sys; fence.acq_rel.sys; ld r1, [x];",
        2,
        "ordered",
    ),
    "fence too early": (
        "fence.acq_rel.sys; st [x], 1; bar; st.relaxed.sys [y], 1;",
        "until y ld.relaxed.sys; fence.acq_rel.sys; ld r1, [x];",
        2,
        "race",
    ),
    # Moral strength: each access is in the scope of the other.
    "scope gpu, two GPUs": ("st [x], 1; bar; st.release.gpu [y], 1;", "until y ld.acquire.gpu; ld r1, [x];", 2, "race"),
    "one scope gpu": ("st [x], 1; bar; st.release.sys [y], 1;", "until y ld.acquire.gpu; ld r1, [x];", 2, "race"),
    "scope gpu, one GPU": (
        "st [x], 1; bar; st.release.gpu [y], 1;",
        "until y ld.acquire.gpu; ld r1, [x];",
        1,
        "ordered",
    ),
    "scope cta, two blocks": (
        "st [x], 1; bar; st.release.cta [y], 1;",
        "until y ld.acquire.cta; ld r1, [x];",
        1,
        "race",
    ),
    "fence of scope gpu": (
        "st [x], 1; bar; fence.acq_rel.gpu; st.relaxed.sys [y], 1;",
        "until y ld.relaxed.sys; fence.acq_rel.sys; ld r1, [x];",
        2,
        "race",
    ),
    "fence behind of scope gpu": (
        "st [x], 1; bar; fence.acq_rel.sys; st.relaxed.sys [y], 1;",
        "until y ld.relaxed.sys; fence.acq_rel.gpu; ld r1, [x];",
        2,
        "race",
    ),
    # A weak store of the flag is not morally strong with any load.
    "weak flag": ("st [x], 1; bar; st [y], 1;", "until y ld.acquire.sys; ld r1, [x];", 2, "race"),
    # Causality: observation order, then base causality order. The store that a relaxed load reads is ordered before the
    # operations after the load; operations before that store are not.
    "the observed store, then a weak store": (
        "st.relaxed.sys [x], 1;",
        "until x ld.relaxed.sys; st [x], 2;",
        2,
        "ordered",
    ),
    "the observed store, then a weak load": (
        "st.relaxed.sys [x], 1;",
        "until x ld.relaxed.sys; ld r1, [x];",
        2,
        "ordered",
    ),
    "a store that nobody observed": ("st.relaxed.sys [x], 1;", "st [x], 2;", 2, "race"),
    "observed at scope gpu": ("st.relaxed.gpu [x], 1;", "until x ld.relaxed.gpu; st [x], 2;", 2, "race"),
}


@pytest.mark.parametrize("name", MESSAGE_PASSING)
def test_message_passing(name):
    *threads, gpus, verdict = MESSAGE_PASSING[name]
    result, outcomes, _ = run(tuple(threads), gpus)
    assert result == verdict
    assert all(outcome[3] in (0, 1) and outcome[2] == 1 for outcome in outcomes)
    if "ld r1, [x]" in threads[1]:
        assert all(outcome[3] == 1 for outcome in outcomes)


@pytest.mark.parametrize("order", ["acquire", "relaxed"])
def test_causality_is_transitive(order):
    """Causality: a third thread that acquires and then releases extends the synchronization to other threads."""
    release = "release" if order == "acquire" else "relaxed"
    result, outcomes, _ = run(
        (
            "st [x], 1; bar; st.release.sys [y], 1;",
            f"until y ld.{order}.sys; st.{release}.sys [z], 1;",
            "until z ld.acquire.sys; ld r1, [x];",
        )
    )
    assert result == ("ordered" if order == "acquire" else "race")
    assert all(outcome[5] == 1 for outcome in outcomes)


# -- strong accesses alone ---------------------------------------------------------------------------------------------------
BITS = set(itertools.product((0, 1), repeat=2))
STRONG = {
    # Fence-SC: morally strong fences of kind .sc have one order, so one thread observes the other's store.
    "store buffering, fences": (
        ("st.relaxed.sys [x], 1; fence.sc.sys; ld.relaxed.sys r0, [y];", "st.relaxed.sys [y], 1; fence.sc.sys; ld.relaxed.sys r0, [x];"),
        BITS - {(0, 0)},
        BITS - {(0, 0)},
    ),
    # No axiom forbids that both loads precede both stores, but values in the emulator are sequentially consistent.
    "store buffering": (
        ("st.relaxed.sys [x], 1; ld.relaxed.sys r0, [y];", "st.relaxed.sys [y], 1; ld.relaxed.sys r0, [x];"),
        BITS,
        BITS - {(0, 0)},
    ),
    # No-Thin-Air forbids a cycle of dependencies alone: the stores do not depend on the loads.
    "load buffering": (
        ("ld.relaxed.sys r0, [x]; st.relaxed.sys [y], 1;", "ld.relaxed.sys r0, [y]; st.relaxed.sys [x], 1;"),
        BITS,
        BITS - {(1, 1)},
    ),
    "load buffering, dependent": (
        ("ld.relaxed.sys r0, [x]; st.relaxed.sys [y], r0;", "ld.relaxed.sys r0, [y]; st.relaxed.sys [x], r0;"),
        {(0, 0)},
        {(0, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRONG)
def test_strong_accesses(name):
    threads, allowed, reached = STRONG[name]
    result, outcomes, _ = run(threads)
    assert result == "ordered"
    assert reached <= allowed
    assert {(outcome[0], outcome[2]) for outcome in outcomes} == reached


def test_independent_reads_of_independent_writes():
    """Fence-SC forbids that two readers observe two stores in opposite orders if .sc fences separate each reader's
    loads. Without these fences PTX allows that outcome, even with acquire loads; the emulator does not reach it."""
    for order, fence in (("relaxed", "fence.sc.sys; "), ("acquire", "")):
        readers = [f"ld.{order}.sys r0, [{a}]; {fence}ld.{order}.sys r1, [{b}];" for a, b in ("xy", "yx")]
        result, outcomes, _ = run(("st.relaxed.sys [x], 1;", "st.relaxed.sys [y], 1;", *readers))
        assert result == "ordered"
        seen = {outcome[4:] for outcome in outcomes}
        assert (1, 0, 1, 0) not in seen
        assert {outcome[:2] for outcome in seen} >= {(0, 0), (1, 1)}


def test_coherence():
    """SC-per-Location: morally strong accesses to one word have one order, which agrees with each thread's program
    order."""
    result, outcomes, final = run(
        ("st.relaxed.sys [x], 1; st.relaxed.sys [x], 2;", "ld.relaxed.sys r0, [x]; ld.relaxed.sys r1, [x];")
    )
    assert result == "ordered" and final == {2}
    seen = {outcome[2:] for outcome in outcomes}
    assert seen <= {(a, b) for a in range(3) for b in range(3) if a <= b} and {(0, 0), (2, 2)} <= seen


def test_atomicity():
    """Atomicity: no other morally strong write comes between an update's read and its write."""
    update = "atom.global.relaxed.{}.add.u32 r0, [x], 1;"
    result, _, final = run((update.format("sys"),) * 2)
    assert result == "ordered" and final == {2 * 128}  # by each of 128 threads
    assert run((update.format("gpu"),) * 2)[0] == "race"
    assert run((update.format("gpu"),) * 2, gpus=1)[0] == "ordered"
