"""The operations that Triton's language lacks, as opaque assembly blocks. emulator/intrinsics.py contains their
emulated forms.

Proxy fences name global memory, which is the only memory in which weft orders ordinary accesses against bulk accesses.
Without the qualifier for global memory, ptxas compiles each fence into a fence of the whole GPU, on every thread.

The blocks are opaque assembly, because a `tl.debug_barrier()` or an atomic spin inside a flattened persistent loop
keeps Triton from overlapping a tile's epilogue with the next tile's loads, whereas an assembly block does not. Scalar
assembly runs on every thread of the program, so operations that must happen only once are predicated on thread 0.

The guard block (int64 words, one block per rank, shared by all waits of a World):
    0  bound of a wait in ns
    1  aborted: 0, or 1 once any wait of this rank has expired; every later wait falls through
    2  address of the record in pinned host memory, int64 words:
         0 flag, written last: EXPIRED, or DIFFERS (ranks make different calls), 1 address of the awaited word,
         2 target (0: low-latency words), 3 value seen, 4 tile, 5 peer; from 6 on the guard's words from 3 on
    3  rows dropped for lack of room, in all calls so far; 4 + r: rows that rank r dropped (all of them if r is this
       rank, else only the rows of this rank's tokens)
"""

from collections.abc import Callable

import triton.language as tl

from . import stock
from .bulk import bulk_copies
from .bulk import bulk_fence as bulk_fence
from .jit import Intrinsic, Kernel

EXPIRED, DIFFERS = 1, 2
GUARD_WORDS, RECORD_WORDS = 36, 39  # the guard has one word for each of at most 32 ranks
NUMBER_BITS = 20  # the low bits of a `same_call` word hold the call's number; the high bits count the calls
CALL = -2  # the record of a failed wait in `same_call` contains this value as the tile


def intrinsic(fn: Callable[..., object]) -> Intrinsic | Kernel:
    """Decorate a device function whose body is inline assembly (see `Intrinsic`). If stock.py is in use and defines a
    function with the same name, return that function instead."""
    in_stock: Kernel | None = getattr(stock, fn.__name__, None)
    return in_stock if stock.IN_USE and in_stock else Intrinsic(fn)


@intrinsic
def wait_until(
    ptr, target, guard, tile, peer, SCOPE: tl.constexpr = tl.constexpr("gpu"), MANY: tl.constexpr = tl.constexpr(1)
):
    """Acquire: block until `*ptr >= target` (int32, modulo 2^32), or until the guard's bound expires.

    MANY: the number of words from `ptr` on, at most 32, for which the program waits concurrently. The words belong to
    ranks `peer`, `peer` + 1, and so on. If the program waited for one word after another, each wait would cost a round
    trip to memory.

    After the wait, ordinary loads and bulk (TMA) loads of this program see all stores that were released before the
    counter reached `target`. `tile` and `peer` are used only in the record of an expired wait (peer -1 means any rank).
    SCOPE is "gpu" if every writer of the counter runs on this GPU, else "sys". One thread per word polls, with pauses,
    and a block barrier extends this thread's acquire to all threads. If a thousand warps polled one word, they would
    keep the word's slice of L2 from serving other accesses.
    """
    tl.static_assert(MANY <= 32, "a warp polls at most 32 words")
    asm: tl.constexpr = (
        """{
        .reg .pred p, q; .reg .b32 v, seen, tid; .reg .b64 at, t0, t1, bound, flag, rec, wide;
        mov.b32 v, 0; mov.u32 tid, %tid.x; setp.ge.u32 q, tid, $6; @q bra JOIN;
        mul.wide.u32 at, tid, 4; add.s64 at, at, $1;
        ld.acquire."""
        + SCOPE
        + """.global.b32 v, [at];
        sub.s32 seen, v, $2; setp.ge.s32 p, seen, 0; @p bra JOIN;
        mov.u64 t0, %globaltimer; ld.global.b64 bound, [$3];
        SPIN:
        nanosleep.u32 64;
        ld.acquire."""
        + SCOPE
        + """.global.b32 v, [at];
        sub.s32 seen, v, $2; setp.ge.s32 p, seen, 0; @p bra JOIN;
        ld.relaxed.gpu.global.b64 flag, [$3+8]; setp.ne.b64 q, flag, 0; @q bra JOIN;
        mov.u64 t1, %globaltimer; sub.u64 t1, t1, t0; setp.lt.u64 q, t1, bound; @q bra SPIN;
        atom.relaxed.gpu.global.exch.b64 flag, [$3+8], 1; setp.ne.b64 q, flag, 0; @q bra JOIN;
        ld.global.b64 rec, [$3+16];
        st.relaxed.sys.global.b64 [rec+8], at;
        cvt.s64.s32 wide, $2; st.relaxed.sys.global.b64 [rec+16], wide;
        cvt.s64.s32 wide, v; st.relaxed.sys.global.b64 [rec+24], wide;
        cvt.s64.s32 wide, $4; st.relaxed.sys.global.b64 [rec+32], wide;
        add.s32 v, tid, $5; cvt.s64.s32 wide, v; st.relaxed.sys.global.b64 [rec+40], wide;
        mov.b64 wide, 1; st.release.sys.global.b64 [rec], wide;
        JOIN:
        bar.warp.sync 0xffffffff;
        bar.sync 0;
        """
        + ("fence.proxy.async.global;" if bulk_copies() else "")
        + """ mov.b32 $0, v;
        }"""
    )
    return tl.inline_asm_elementwise(
        asm,
        "=r,l,r,l,r,r,r",
        [ptr.to(tl.int64), target, guard.to(tl.int64), tile, peer, MANY],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def same_call(calls, number):
    """Check that this launch belongs to call `number` (`World.begin`) on every rank. If it does not, Mismatch is
    raised. One program of a launch calls this function.

    The function stores a word to every rank's memory. The word contains the number and, in the bits above, the count of
    these launches. Then the function waits (acquire) for the words of all ranks. calls: a BlockChannel of 2 W counters
    (`World.calls`); launches alternate between the two halves of these counters. A half may be overwritten, because a
    rank that stores its word of launch n + 2 has read all words of launch n + 1, and each rank stored its word of
    launch n + 1 after it had read all words of launch n. The store is relaxed unless a `release_fence` precedes it,
    which makes it a release.

    If a number differs, the difference is recorded like an expired wait, and every later wait returns immediately,
    because the rows that this launch reads may belong to another call.
    """
    tl.static_assert(calls.world <= 32, "a warp polls at most 32 words")
    tl.inline_asm_elementwise(
        """{
        .reg .pred p, q; .reg .b32 v, seen, tid, call, base, word, off; .reg .b64 at, t0, t1, bound, flag, rec, wide;
        mov.b32 v, 0; mov.u32 tid, %tid.x;
        ld.global.b32 call, [$3+4]; add.s32 call, call, 1;
        shl.b32 base, call, 20; and.b32 word, $5, 0xfffff; or.b32 word, word, base;
        setp.ge.u32 q, tid, $6; @q bra JOIN;
        and.b32 off, call, 1; mul.lo.s32 off, off, $6; ld.global.b32 seen, [$3]; add.s32 seen, seen, off;
        mul.wide.u32 wide, tid, 8; add.s64 at, $2, wide; ld.global.b64 at, [at];
        mul.wide.u32 wide, seen, 4; add.s64 at, at, wide; st.relaxed.sys.global.b32 [at], word;
        add.s32 off, off, tid; mul.wide.u32 wide, off, 4; add.s64 at, $1, wide;
        ld.acquire.sys.global.b32 v, [at]; sub.s32 seen, v, base; setp.ge.s32 p, seen, 0; @p bra HERE;
        mov.u64 t0, %globaltimer; ld.global.b64 bound, [$4];
        SPIN:
        nanosleep.u32 64;
        ld.acquire.sys.global.b32 v, [at]; sub.s32 seen, v, base; setp.ge.s32 p, seen, 0; @p bra HERE;
        ld.relaxed.gpu.global.b64 flag, [$4+8]; setp.ne.b64 q, flag, 0; @q bra JOIN;
        mov.u64 t1, %globaltimer; sub.u64 t1, t1, t0; setp.lt.u64 q, t1, bound; @q bra SPIN;
        mov.b64 bound, 1; bra RECORD;
        HERE:
        setp.eq.s32 p, v, word; @p bra JOIN;
        mov.b64 bound, 2;
        RECORD:
        atom.relaxed.gpu.global.exch.b64 flag, [$4+8], 1; setp.ne.b64 q, flag, 0; @q bra JOIN;
        ld.global.b64 rec, [$4+16];
        st.relaxed.sys.global.b64 [rec+8], at;
        cvt.s64.s32 wide, word; st.relaxed.sys.global.b64 [rec+16], wide;
        cvt.s64.s32 wide, v; st.relaxed.sys.global.b64 [rec+24], wide;
        mov.b64 wide, -2; st.relaxed.sys.global.b64 [rec+32], wide;
        cvt.u64.u32 wide, tid; st.relaxed.sys.global.b64 [rec+40], wide;
        st.release.sys.global.b64 [rec], bound;
        JOIN:
        bar.warp.sync 0xffffffff;
        bar.sync 0;
        """
        + ("fence.proxy.async.global;" if bulk_copies() else "")
        + """
        setp.eq.u32 p, tid, 0; @p st.global.b32 [$3+4], call;
        mov.b32 $0, 0;
        }""",
        "=r,l,l,l,l,r,r",
        [
            calls.counters.to(tl.int64),
            calls.peers.to(tl.int64),
            calls.state.to(tl.int64),
            calls.guard.to(tl.int64),
            number,
            calls.world,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def count_lost(guard, rank, rows):
    """Count `rows` (int32) rows that `rank` dropped for lack of room. The next call on this rank then raises Overflow.
    One program of a launch calls this function. The host polls only the total count; if it is not zero, the host also
    reads the counts of the single ranks."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p, q; .reg .b32 tid; .reg .b64 lost, sum, rec, off, at;
        mov.u32 tid, %tid.x; setp.ne.u32 p, tid, 0; setp.le.s32 q, $3, 0; or.pred p, p, q; @p bra KEPT;
        cvt.s64.s32 lost, $3; mul.wide.u32 off, $2, 8; ld.global.b64 rec, [$1+16];
        add.s64 at, $1, off; atom.relaxed.gpu.global.add.u64 sum, [at+32], lost; add.s64 sum, sum, lost;
        add.s64 at, rec, off; st.relaxed.sys.global.b64 [at+56], sum;
        atom.relaxed.gpu.global.add.u64 sum, [$1+24], lost; add.s64 sum, sum, lost;
        st.release.sys.global.b64 [rec+48], sum;
        KEPT:
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [guard.to(tl.int64), rank, rows],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def flush_stores(BULK: tl.constexpr = True):
    """Complete every thread's earlier stores, so that a release by one thread (the next atomic) covers all of them.

    BULK: whether the function also waits until this program's bulk (TMA) stores have reached global memory (not only
    until they have been read from shared memory), and orders them with ordinary accesses.
    """
    if BULK and bulk_copies():
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.sync 0; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@intrinsic
def release_fence(SCOPE: tl.constexpr = tl.constexpr("sys")):
    """Make each later relaxed atomic of this program, of up to 32 elements, release all stores that have been flushed
    so far. So one fence suffices for many notifications.

    Only the first warp, which executes such atomics, executes the fence. Its fence covers all stores before the last
    barrier. Fences in the other warps would only wait for more stores: with an unqualified proxy fence they took 0.5%
    to 5.0% of the time of fused sums (2 H200, 2026-11).
    """
    asm: tl.constexpr = (
        "{.reg .pred p; .reg .b32 tid; mov.u32 tid, %tid.x; setp.lt.u32 p, tid, 32; @p fence.acq_rel."
        + SCOPE
        + "; mov.b32 $0, 0;}"
    )
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@intrinsic
def post(ptr, w0, w1, w2, w3, ok):
    """Store four int32 words to each 16-byte address of a block, where `ok` is true. The reader polls these words
    themselves (`peek`). The four words are written by one store, but a reader may see them in any order, and the store
    does not order other accesses."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.relaxed.sys.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0;}",
        "=r,l,r,r,r,r,r",
        [ptr.to(tl.int64), ok.to(tl.int32), w0, w1, w2, w3],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def peek(ptr, ok):
    """Return int32 words that another rank may be posting. Each word has its old or its new value, or is 0 where `ok`
    is false."""
    return tl.load(ptr, mask=ok, other=0, volatile=True)


@intrinsic
def store_pairs(ptr, x):
    """Store 32-bit words directly from the registers into which the tensor cores wrote them. Each thread stores its
    pairs of neighbouring words, which must have neighbouring addresses. An ordinary store would first move the words
    through shared memory, to write longer contiguous runs."""
    tl.inline_asm_elementwise(
        "st.global.v2.b32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;",
        "=r,=r,l,l,r,r",
        [ptr.to(tl.int64), x.to(tl.int32, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=2,
    )


@intrinsic
def load_pairs(ptr, seen):
    """Load the float32 words that `store_pairs` stored, after the wait that returned `seen`. Without the operand
    `seen`, the compiler might move the load before the wait, because it is opaque and declared to have no effects. If
    the load were declared to have effects, the compiler would execute it twice, once for each of two layouts."""
    words = tl.inline_asm_elementwise(
        "ld.global.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l,l,r,r",
        [ptr.to(tl.int64), seen],
        dtype=tl.int32,
        is_pure=True,
        pack=2,
    )
    return words.to(tl.float32, bitcast=True)


@intrinsic
def look_again(tries, began, guard, ptr, tile, peer):
    """Return whether to continue polling for posted words at `ptr`. The result is 1, or 0 once the wait, which began at
    time `began` (`globaltimer`), has taken longer than the guard's bound. All threads receive the same result. tries:
    the number of polls so far; every 64th poll reads the clock. tile, peer: as in `wait_until`."""
    asm: tl.constexpr = """{
        .reg .pred p, q; .reg .b32 v, tid; .reg .b64 t, bound, flag, rec, wide;
        mov.b32 $0, 1; and.b32 v, $1, 63; setp.ne.s32 p, v, 63; @p bra OUT;
        mov.u32 tid, %tid.x; setp.ne.u32 q, tid, tid; setp.ne.u32 p, tid, 0; @p bra VOTE;
        ld.relaxed.gpu.global.b64 flag, [$3+8]; setp.ne.b64 q, flag, 0; @q bra VOTE;
        mov.u64 t, %globaltimer; sub.u64 t, t, $2; ld.global.b64 bound, [$3]; setp.ge.u64 q, t, bound; @!q bra VOTE;
        atom.relaxed.gpu.global.exch.b64 flag, [$3+8], 1; setp.ne.b64 p, flag, 0; @p bra VOTE;
        ld.global.b64 rec, [$3+16];
        st.relaxed.sys.global.b64 [rec+8], $4;
        mov.b64 wide, 0; st.relaxed.sys.global.b64 [rec+16], wide; st.relaxed.sys.global.b64 [rec+24], wide;
        cvt.s64.s32 wide, $5; st.relaxed.sys.global.b64 [rec+32], wide;
        cvt.s64.s32 wide, $6; st.relaxed.sys.global.b64 [rec+40], wide;
        mov.b64 wide, 1; st.release.sys.global.b64 [rec], wide;
        VOTE:
        bar.warp.sync 0xffffffff;
        bar.red.or.pred q, 0, q;
        selp.b32 $0, 0, 1, q;
        OUT:
        }"""
    return tl.inline_asm_elementwise(
        asm,
        "=&r,r,l,l,l,r,r",
        [tries, began, guard.to(tl.int64), ptr.to(tl.int64), tile, peer],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def globaltimer():
    """Return the time of this GPU's clock in ns."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@intrinsic
def window_fence():
    """Order this program's accesses through a multicast address with its accesses through ordinary addresses of the
    same memory."""
    tl.inline_asm_elementwise("fence.proxy.alias; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@intrinsic
def window_sum(row, H: tl.constexpr, P: tl.constexpr, DTYPE: tl.constexpr):
    """Read H elements of DTYPE (bfloat16 or float16) from the multicast address `row` on, and return their sums over
    all ranks, fp32 [P], padded with zeros. The switch adds in fp32, in an unspecified order. H is a multiple of 8, and
    `row` is a multiple of 16 bytes."""
    KIND: tl.constexpr = "bf16x2" if DTYPE == tl.bfloat16 else "f16x2"
    asm: tl.constexpr = (
        """{
        .reg .pred p; setp.ne.s32 p, $5, 0;
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        @p multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4."""
        + KIND
        + """ {$0, $1, $2, $3}, [$4];
        }"""
    )
    i = tl.arange(0, P // 8)
    words = tl.inline_asm_elementwise(
        asm,
        "=&r,=&r,=&r,=&r,l,r",
        [row + i.to(tl.int64) * 16, (i < H // 8).to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    # Element 4 c + 2 b + a of a vector is half `a` of word 2 c + b.
    low = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    high = low >> 16
    packed = tl.join(low.to(tl.int16), high.to(tl.int16))
    return tl.reshape(packed, (P,)).to(DTYPE, bitcast=True).to(tl.float32)


@intrinsic
def window_store(row, y, H: tl.constexpr, P: tl.constexpr):
    """Store the first H of [P] 16-bit elements to the multicast address `row`, on every rank. H and `row` are as in
    `window_sum`."""
    low, high = tl.split(tl.reshape(y.to(tl.int16, bitcast=True), (P // 8, 2, 2, 2)))
    packed = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)  # [.., c, b]
    even, odd = tl.split(packed)
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    i = tl.arange(0, P // 8)
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0;}",
        "=r,l,r,r,r,r,r",
        [row + i.to(tl.int64) * 16, (i < H // 8).to(tl.int32), w0, w1, w2, w3],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@intrinsic
def keep_before(x):
    """Return x (float32), and make the compiler compute it before all assembly that follows, including tensor-core
    instructions and their waits. Otherwise LLVM would move the arithmetic after the start of an asynchronous
    tensor-core instruction, where it would need registers that this instruction writes."""
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)
