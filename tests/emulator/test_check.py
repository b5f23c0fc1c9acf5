"""`weft check` loads a file as `python FILE` does, compiles the kernels that ran, and checks the rules of their
code."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from weft import World, check
from weft.architectures import capability_of
from weft.check.offline import refusal
from weft.check.ptx import blocks_of, broken_kernel_rules, broken_rules, paths, steps_of
from weft.errors import WeftError


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weft check` can load the file from any working directory, even by a relative path."""
    kernels_dir, elsewhere = tmp_path / "kernels", tmp_path / "elsewhere"
    kernels_dir.mkdir(), elsewhere.mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    for i, (target, cwd) in enumerate(
        [(kernels_dir / "a.py", elsewhere), (Path("../kernels/b.py"), elsewhere), (Path("c.py"), kernels_dir)]
    ):
        (kernels_dir / f"neighbour_{i}.py").write_text(f"number = {i}\n")
        (kernels_dir / target.name).write_text(
            f"import neighbour_{i}\n\n\ndef main(world):\n    return neighbour_{i}.number\n"
        )
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(kernels_dir))])
        monkeypatch.chdir(cwd)
        assert check.load(str(target))(None) == i


def test_a_checked_file_hides_no_module_from_others(tmp_path: Path) -> None:
    """The file's folder is on the import path only while the file is loaded and run; the file's main may import modules
    from that folder too."""
    before = list(sys.path)
    (tmp_path / "imported_late.py").write_text("seen = []\n")
    (tmp_path / "copy.py").write_text(
        "def main(world):\n    import imported_late\n\n    imported_late.seen.append(world.rank)\n"
    )
    main = check.load(str(tmp_path / "copy.py"))
    assert sys.path == before
    assert not check.search(main, 2, range(1)).findings
    assert sys.path == before
    assert sys.modules.pop("imported_late").seen == [0, 1]


# -- the check compiles the kernels that ran ---------------------------------------------------------------------------


def gated(main: Callable[[World], Any], ranks: int = 2) -> list[check.CheckedKernel]:
    exploration = check.search(main, ranks, range(2))
    assert not exploration.findings, exploration.findings
    checked, refused = check.compile_and_check(exploration.ran, 90)
    assert refused == []
    return checked


@weft.jit(do_not_specialize=("free",))
def fill(out, offset, n, free, N: tl.constexpr):
    tl.store(out + offset[0] + tl.arange(0, N), n + free)


def test_each_variant_is_compiled_once_and_told_from_the_others() -> None:
    def main(world: World) -> None:
        for i, (n, width, start) in enumerate([(48, 16, 0), (64, 16, 0), (50, 16, 0), (48, 32, 0), (48, 16, 1)]):
            out = world.zeros((64,), torch.float32)[start:]
            args = dict(out=out, offset=(world.rank, None), n=n, free=i, N=width)
            world.launch(fill, 1, args, dict(num_warps=1), world.current_stream())
            world.launch(fill, 1, args, dict(num_warps=1, per_sm=2), world.current_stream())

    checked = gated(main)
    assert len({one.compiled.hash for one in checked}) == len(checked) == 8, (
        "per rank, two of five launches share a kernel"
    )
    names = [one.name for one in checked]
    assert len(set(names)) == 8 and all(name.startswith("fill (") for name in names)
    assert sum("n no multiple of 16" in name for name in names) == 2 and sum("N = 32" in name for name in names) == 2
    assert sum("not at a multiple of 16 bytes" in name for name in names) == 2


def test_triton_compiles_for_the_gpu_again_afterwards() -> None:
    config: Any = triton.runtime.driver
    driver = object()
    before, config._active = config._active, driver
    try:
        gated(lambda world: world.launch(fill, 1, dict(out=world.zeros((64,), torch.float32), offset=(0,), n=1, free=1, N=16), {}, world.current_stream()), 1)  # fmt: skip
        assert config._active is driver and 0 not in fill.device_caches
    finally:
        config._active = before


@pytest.mark.parametrize(
    ("text", "capability"),
    [("sm_90a", 90), ("90", 90), ("9.0", 90), ("sm_100a", 100), ("12.0", 120), ("sm_80", 80), ("8.9", 89)],
)
def test_targets(text: str, capability: int) -> None:
    assert capability_of(text) == capability


@pytest.mark.parametrize("text", ["sm_75", "sm_99", "gfx942", "h200", ""])
def test_targets_that_weft_cannot_compile_for(text: str) -> None:
    with pytest.raises(WeftError, match="no GPU that weft compiles for: sm_80, sm_86, sm_89, sm_90"):
        capability_of(text)


def test_a_refusal_is_a_sentence() -> None:
    """The error quotes the line of the kernel instead of ptxas' whole report or the compiler's failure, which name no
    line."""
    first_line = rf"{__file__}:{fill.fn.__code__.co_firstlineno + 1}: "
    log = "Internal error\n`ptxas` stderr:\nptxas x.ptx, line 9; error   : Feature 'a' requires b\nptxas fatal   : Aborted"
    assert refusal(PTXASError(log), fill, []) == f"{first_line}ptxas: Feature 'a' requires b"
    assert (
        refusal(RuntimeError("PassManager::run\n failed"), fill, [])
        == f"{first_line}RuntimeError: PassManager::run failed"
    )


# -- rules of the code -------------------------------------------------------------------------------------------------


def sum_parts(w, boxes, received, out, log, epoch, ch, parts, N: tl.constexpr, LATE: tl.constexpr):
    """out [N, N] = sum over parts of received [parts, N, N] @ w [parts, N, N]; `received` comes from the previous
    rank."""
    me = wl.rank_of(ch)
    offsets = tl.arange(0, N)
    block = offsets[:, None] * N + offsets[None, :]
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        wl.tile_push_data(boxes, (me + 1) % ch.world, part * N * N + block, tl.load(w + part * N * N + block), None)
        wl.peer_tile_notify(ch, part, (me + 1) % ch.world)
        if not LATE:
            wl.peer_tile_wait(ch, part, -1)
            tl.store(log + part, part)
    for part in range(parts):
        if LATE:
            wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(tl.load(received + part * N * N + block), tl.load(w + part * N * N + block))
    tl.store(out + block, total)
    wl.end_call(ch, epoch, 1)


def sums(late: bool, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(sum_parts)

    def main(world: World) -> None:
        n, parts = 32, 4
        box = world.symmetric((parts, n, n), torch.bfloat16, "box")
        args = dict(w=torch.ones(parts, n, n, dtype=torch.bfloat16), boxes=box.addresses, received=box.local)
        args |= dict(out=world.empty((n, n), torch.float32), log=world.empty((parts,), torch.int32), parts=parts, N=n)
        args |= dict(epoch=world.zeros((1,), torch.int32), ch=world.channel("parts", parts, None), LATE=late)
        world.launch(kernel, 1, args, dict(num_stages=3), world.current_stream())

    return main


def test_a_wait_inside_a_pipelined_loop_is_found() -> None:
    """The emulator interprets the source and finds no bug."""
    (one,) = gated(sums(late=True, guard=False))
    (problem,) = one.problems
    assert re.match(
        r"acquire: may be loaded before the wait: test_check.py:\d+ \(total \+= tl.dot\(tl.load\(received", problem
    ), problem
    (one,) = gated(sums(late=True, guard=True))
    assert one.problems == []


def test_a_verdict_does_not_depend_on_tritons_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the copy, Triton's cache returns the code of the original file, which names the original file's lines."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    source = Path(__file__).read_text()
    for name in ("original", "copy"):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        for loaded in (path, path):  # the second load uses the cache
            for kernel in gated(check.load(f"{loaded}:late_sums")):
                assert [problem.partition(" (")[0].rpartition(":")[0] for problem in kernel.problems] == [
                    f"acquire: may be loaded before the wait: {name}.py"
                ]


def late_sums(world: World) -> None:
    sums(late=True, guard=False)(world)


def test_waits_of_a_loop_that_might_make_no_turn_are_waits() -> None:
    (one,) = gated(sums(late=False, guard=False))
    assert one.problems == []
    assert "cp.async" in one.compiled.ptx, "a pipelined loop"


@weft.jit
def spin(x, inbox, peers, out, ch, N: tl.constexpr, BY: tl.constexpr):
    lane = tl.arange(0, N)
    wl.tile_push_data(peers, (wl.rank_of(ch) + 1) % ch.world, lane, tl.load(x + lane), None)
    wl.channel_notify(ch, 0, (wl.rank_of(ch) + 1) % ch.world, False)
    if BY == "add":
        while tl.atomic_add(ch.counters, 0, sem="acquire", scope="sys") < 1:
            pass
    else:
        while tl.atomic_cas(ch.counters, 1, 1, sem="acquire", scope="sys") < 1:
            pass
    tl.store(out + lane, tl.load(inbox + lane))
    wl.end_call(ch, None, 1)


@pytest.mark.parametrize("atomic", ["add", "cas"])
def test_a_spin_by_an_atomic_that_acquires_is_a_wait(atomic: str) -> None:
    def main(world: World) -> None:
        inbox, out = world.symmetric((16,), torch.float32, "inbox"), world.empty((16,), torch.float32)
        args = dict(x=torch.ones(16), inbox=inbox.local, peers=inbox.addresses, out=out, N=16, BY=atomic)
        world.launch(spin, 1, args | dict(ch=world.channel("row", 1, None)), {}, world.current_stream())

    (one,) = gated(main)
    assert one.problems == []
    relaxed = one.compiled.ptx.replace(".acquire", ".relaxed")
    assert relaxed != one.compiled.ptx
    awaited = [((__file__, spin.fn.__code__.co_firstlineno + 11),)]
    (problem,) = broken_kernel_rules(relaxed, "", awaited)
    assert problem.startswith("acquire: may be loaded before the wait: test_check.py"), problem


@weft.jit
def tile(desc, epoch, ch, BULK: tl.constexpr):
    desc.store([0, 0], tl.zeros((16, 16), tl.float32))
    wl.channel_notify(ch, 0, wl.rank_of(ch), BULK)
    wl.end_call(ch, epoch, 1)


@pytest.mark.parametrize("bulk", [True, False])
def test_a_notify_that_leaves_out_bulk_stores_is_found(bulk: bool) -> None:
    def main(world: World) -> None:
        desc = TensorDescriptor.from_tensor(world.empty((16, 16), torch.float32), [16, 16])
        args = dict(desc=desc, epoch=world.zeros((1,), torch.int32), ch=world.channel("tile", 1, None), BULK=bulk)
        world.launch(tile, 1, args, {}, world.current_stream())

    (one,) = gated(main)
    assert [problem.partition(" at ")[0] for problem in one.problems] == [
        "release: a bulk store may still be in flight"
    ] * (not bulk)
    assert broken_kernel_rules(one.compiled.ptx, "ttg.warp_specialize", ()) == one.problems
    waits = one.compiled.ptx + "\n// ld.acquire"
    assert any("warp_specialize" in problem for problem in broken_kernel_rules(waits, "ttg.warp_specialize", ()))


@triton.jit
def histogram(x, counts, scratch, N: tl.constexpr):
    """Use a jump table, and atomics on data that every thread executes."""
    p = tl.program_id(0)
    offsets = tl.arange(0, N)
    tl.store(scratch + p * N + offsets, offsets)
    tl.atomic_add(counts + tl.load(x + offsets), 1)
    if p == 0:
        tl.store(scratch + offsets, 1)
    elif p == 1:
        tl.atomic_add(counts + 1, 5)
    elif p == 2:
        tl.store(scratch + 2 * N + offsets, tl.load(x + offsets) * 3)
    elif p == 3:
        tl.store(scratch + 3 * N + offsets, tl.load(x + offsets) * tl.load(x + offsets))
    elif p == 4:
        tl.atomic_add(counts + 2, 7)
    tl.store(scratch + p * N + offsets, tl.load(scratch + p * N + offsets) + 1)


def test_a_kernel_without_signals_breaks_no_rule() -> None:
    def main(world: World) -> None:
        args = dict(x=torch.arange(128, dtype=torch.int32), counts=world.zeros((128,), torch.int32))
        args |= dict(scratch=world.zeros((5 * 128,), torch.int32), N=128)
        world.launch(histogram, 5, args, {}, world.current_stream())

    (one,) = gated(main)
    assert one.problems == [] and "brx.idx" in one.compiled.ptx
    assert any(rule.startswith("release: ") for rule in broken_rules(one.compiled.ptx)), (
        "its atomics break a rule if they count as signals"
    )


def test_assembly_that_only_keeps_an_order_is_no_instruction() -> None:
    ptx = """.visible .entry k(
)
.reqntid 32
{
	// begin inline asm
	
	// end inline asm
	// begin inline asm
	nanosleep.u32 20;
	// end inline asm
	ret;
}
"""
    assert [step.text for step in steps_of(ptx)] == ["nanosleep.u32 20;"]


def test_one_line_before_and_after_a_wait_is_two_loads() -> None:
    """Without a separate epoch, the emulator records only the load that needs the wait. The compiled code contains a
    second load that needs no wait."""
    place = (__file__, 10)
    lines_and_calls = lambda calls: [(step.line, step.calls) for step in steps_of(calls)]  # noqa: E731
    ptx = """.visible .entry k(
)
.reqntid 32
{
	.file	1 "TESTS/FILE"
	.loc	1 10 5                         // FILE:10:5 @[ FILE:20:3 ]
	ld.global.b32 	%r1, [%rd1];
	.loc	1 12 5
	ld.acquire.sys.b32 	%r2, [%rd2];
	bar.sync 	0;
	.loc	1 10 5                         // FILE:10:5 @[ FILE:24:3 ]
	ld.global.b32 	%r3, [%rd3];
	ret;
}
""".replace("FILE", Path(__file__).name).replace("TESTS", str(Path(__file__).parent))
    assert lines_and_calls(ptx)[0] == (10, ((Path(__file__).name, 20),))
    assert broken_kernel_rules(ptx, "", [(place, (__file__, 24))]) == []
    for behind in (20, None):  # either the first line also occurs later, or the load has no known caller
        (wrong,) = broken_kernel_rules(ptx, "", [(place, *([(__file__, behind)] if behind else []))])
        assert wrong.startswith("acquire: may be loaded before the wait"), behind


@pytest.mark.parametrize("has_else", [False, True])
def test_an_edge_is_ignored_only_if_it_skips_a_wait(has_else: bool) -> None:
    """A branch to the second half of an if is an edge of its own, although the first half is a wait."""
    leave = "\tbra.uni $L__BB0_2;\n" if has_else else ""
    code = ".visible .entry kernel()\n{\n\t@%p1 bra $L__BB0_1;\n\tld.acquire.gpu.b32 %r1, [%rd1];\n" + leave
    code += "$L__BB0_1:\n\tst.global.b32 [%rd2], %r2;\n$L__BB0_2:\n\tret;\n}\n"
    blocks = blocks_of(code)
    assert blocks["entry"].after == ["$L__BB0_1", "entry+"]
    assert paths(blocks)["entry"] == (["$L__BB0_1", "entry+"] if has_else else ["entry+"])
    assert broken_rules(code) == []
