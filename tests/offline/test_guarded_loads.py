"""Loops with waits that Triton pipelines or flattens (lang/guarded_loads.py). The gate refuses kernels as Triton alone
compiles them, and accepts kernels as `weft.jit` compiles them. The emulator, which interprets the source, computes the
same results from both kernels."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton import knobs

import weft
from tests.emulated.cases_guarded_loads import (
    CHAINS,
    FORMS,
    PRODUCTS,
    chained,
    count_wrong_sums,
    exchange_and_sum,
    multiplying,
    product,
    product_launch,
    summing,
)
from tests.gates import some
from weft import World, check
from weft._triton import ptxas
from weft.check.offline import Compiled, compile_kernel
from weft.check.ptx import blocks_of, broken_rules, forward, no_instruction
from weft.lang import guarded_loads

EARLY = "acquire: may be loaded before the wait"


def compiled(main: Callable[[World], Any]) -> check.CheckedKernel:
    """Return the kernel of `main` after two schedules in the emulator have found it clean."""
    exploration = check.search(main, 2, range(2))
    assert not exploration.findings, exploration.findings
    (one,), refused = check.compile_and_check(exploration.ran, 90)
    assert refused == []
    return one


ASYNC_LOAD = re.compile(r"cp\.async\.cg|cp\.async\.bulk\.tensor\.\dd\.shared")


def loads_ahead(one: check.CheckedKernel) -> int:
    return len(ASYNC_LOAD.findall(one.compiled.ptx))


def missing_waits(one: check.CheckedKernel) -> int:
    """Return the largest number of waits that are missing before the loads seen so far; each part of the sum has one
    wait and two loads. Every loop is entered once, and every `if` is taken. In a pipelined loop, the loads of the first
    iterations precede the loop."""
    blocks = blocks_of(one.compiled.ptx)
    counts: dict[str, tuple[int, int]] = {}  # the numbers of waits and loads before each block
    missing = 0
    for name in forward(blocks):
        waits, loads = counts.get(name, (0, 0))
        for step in blocks[name].steps:
            waits += "ld.acquire" in step.text
            loads += len(ASYNC_LOAD.findall(step.text))
            missing = max(missing, (loads + 1) // 2 - waits)
        for target in blocks[name].after:
            old = counts.get(target, (0, 0))
            counts[target] = max(old[0], waits), max(old[1], loads)
    return missing


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a separate cache for the test: Triton's cache depends on the source, but not on a test's substitute for the
    rewriting."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("form", some(FORMS))
def test_loads_stay_behind_their_waits_and_are_pipelined(form: str, own_cache: None) -> None:
    """The gate requires only that some wait precedes a load. The gate therefore accepts a loop whose first iteration's
    wait precedes the loop."""
    alone, guarded = (compiled(summing(form, guard)) for guard in (False, True))
    assert missing_waits(alone) > 0 and missing_waits(guarded) == 0
    assert guarded.problems == []
    assert all(problem.startswith(EARLY) for problem in alone.problems)
    assert (alone.problems == []) == (form == "for_the_next_iteration")
    assert loads_ahead(guarded) == loads_ahead(alone) > 0
    assert guarded.compiled.warnings == ()


@pytest.mark.parametrize("form", FORMS)
def test_late_parts(form: str) -> None:
    kernel = weft.jit(exchange_and_sum)
    late = partial(count_wrong_sums, form=form, kernel=kernel, n=16, parts=4, delays=([0, 2, 0, 1], [1, 0, 3, 0]))
    assert weft.spmd(late, 2, backend="emulated") == [0, 0]


@weft.jit
def without_a_wait(received, received_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        total += tl.dot(received_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
    return total


def test_a_missing_wait_is_a_race_despite_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "without_a_wait", without_a_wait)
    exploration = check.search(summing("without_a_wait", True), 2, range(4))
    assert any("Race" in str(finding) for finding in exploration.findings), exploration.findings


MUTATIONS = {
    "a pointer that depends on nothing": ("_guard_pointer", "with_pointers", lambda *_: None),
    "an index that depends on nothing": ("_guard_index", "with_descriptors", lambda *_: None),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_gate_finds_loads_that_are_left_out(name: str, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    method, form, instead = MUTATIONS[name]
    monkeypatch.setattr(guarded_loads.Rewriting, method, instead)
    assert all(problem.startswith(EARLY) for problem in compiled(summing(form, True)).problems)
    assert compiled(summing(form, True)).problems


@pytest.mark.gate
def test_loads_that_forget_the_wait_of_the_iteration_before_are_found(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_loads, "_has_early_load", lambda block: False)
    assert missing_waits(compiled(summing("for_the_next_iteration", True))) > 0


@pytest.mark.gate
def test_the_call_number_that_a_wait_reads_costs_no_depth(
    own_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = loads_ahead(compiled(summing("with_pointers", True)))
    monkeypatch.setattr(guarded_loads, "_numbers_for_waits", lambda block: set())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "again"))
    assert loads_ahead(compiled(summing("with_pointers", True))) < whole


def instructions_of_a_step(ptx: str) -> int:
    """Return the number of instructions of the shortest loop with tensor-core instructions in the GPU's own code."""
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([*ptxas("sm_90a"), source, "-o", code], check=True, capture_output=True)
        disassembler = Path(knobs.nvidia.nvdisasm.path)
        text = subprocess.run([disassembler, "-c", code], check=True, capture_output=True, text=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in map(str.strip, text.splitlines()):
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
            if back := re.search(r"BRA.*`\((\.L_\w+)\)", line):
                loops.append(instructions[labels.get(back[1], len(instructions)) :])
    return min(len(loop) for loop in loops if any("GMMA" in instruction for instruction in loop))


def product_at_full_size(form: str, guard: bool) -> Compiled:
    launches: list[tuple[Any, ...]] = []
    kernel = weft.jit(guard_loads=guard)(product)

    def main(world: World) -> None:
        a, b = (torch.zeros(size, 8192, dtype=torch.bfloat16) for size in (128, 256))
        with mock.patch.object(World, "launch", lambda world, *launch: launches.append(launch)):
            product_launch(world, form, kernel, a, b, 8, (128, 256, 64), 132, 8)[0]()

    assert not check.search(main, 1, range(1)).findings
    kernel, _, args, options, _ = launches[0]
    return compile_kernel(kernel, args, options)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("form", "most"), [("step_by_step", 2), ("step_by_step_with_pointers", 29), ("by_segments", 0)]
)
def test_the_instructions_of_a_guard(form: str, most: int, own_cache: None) -> None:
    """Without a guard, a K step has 163, 158 and 109 instructions in Triton 3.6."""
    alone, guarded = (product_at_full_size(form, guard) for guard in (False, True))
    assert instructions_of_a_step(guarded.ptx) - instructions_of_a_step(alone.ptx) <= most
    assert guarded.spills == alone.spills == 0
    if form == "by_segments":
        assert guarded.ptx == alone.ptx


@pytest.mark.parametrize("form", some(PRODUCTS, 0))
def test_products_of_awaited_rows(form: str, own_cache: None) -> None:
    alone, guarded = (compiled(multiplying(form, guard)) for guard in (False, True))
    assert guarded.problems == [] and loads_ahead(guarded) == loads_ahead(alone)


# -- loops in which a tile waits for the previous tile's notify --------------------------------------------------------


def waits_run_ahead(ptx: str) -> bool:
    """Return whether a path leads from one wait to the next one without a notify."""
    blocks = blocks_of(ptx)
    is_wait = lambda step: "ld.acquire" in step.text  # noqa: E731
    is_notify = lambda step: re.search(r"(?:atom|red)\.global\S*release", step.text)  # noqa: E731
    waiting: set[str] = set()  # blocks that a path enters between a wait and a notify
    queue: list[tuple[str, bool]] = [(name, False) for name in blocks]
    while queue:
        name, awaited = queue.pop()
        for step in blocks[name].steps:
            if is_wait(step):
                if awaited:
                    return True
                awaited = True
            elif is_notify(step):
                awaited = False
        if awaited:
            queue += [(target, True) for target in blocks[name].after if target not in waiting]
            waiting.update(blocks[name].after)
    return False


@pytest.mark.parametrize("form", some(CHAINS))
def test_waits_and_notifies_stay_in_order(form: str, own_cache: None) -> None:
    """A flattened loop would wait for the next tile before it notifies for this one, so it would never end here. The
    other loop would load too early."""
    alone, guarded = (compiled(chained(form, guard)) for guard in (False, True))
    assert waits_run_ahead(alone.compiled.ptx) == (form == "tiles_of_a_gemm")
    assert not waits_run_ahead(guarded.compiled.ptx) and guarded.problems == []


@pytest.mark.gate
def test_a_loop_with_signals_that_stays_flattened_is_found(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_loads, "in_order", lambda loop: None)
    assert waits_run_ahead(compiled(chained("tiles_of_a_gemm", True)).compiled.ptx)


# -- tests of the text of the IR ---------------------------------------------------------------------------------------

TEXT = """module {
  tt.func public @k(%x: !tt.ptr<f32> loc("x"(#loc))) attributes {noinline = false} {
    %0:2 = scf.for %i = %a to %b step %c iter_args(%v = %x, %u = %y) -> (f32, i32)  : i32 {
      %1 = scf.if %p -> (i32) {
        scf.yield %d : i32 loc(#loc)
      } else {
        scf.yield %e : i32 loc(#loc)
      } loc(#loc2)
      "tt.reduce"(%v) <{axis = 0 : i32}> ({
      ^bb0(%l: f32 loc("l"), %r: f32 loc("r")):
        tt.reduce.return %l : f32 loc(#loc)
      }) : (tensor<4xf32>) -> f32 loc(#loc)
      scf.yield %v, %1 : f32, i32 loc(#loc)
    } {tt.flatten, tt.num_stages = 3 : i32} loc(#loc3)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_parsed_text_is_printed_again() -> None:
    top = guarded_loads.parse(TEXT)
    assert "\n".join(line for op in top for line in op.lines()) + "\n" == TEXT
    (loop,) = (op for op in top[0].inside() if guarded_loads.is_loop(op))
    assert [op.name for op in loop.regions[0]] == ["scf.if", "tt.reduce", "scf.yield"] and loop.result == "%0"
    assert guarded_loads.is_pipelined(loop)
    guarded_loads.in_order(loop)
    assert loop.end == "    } {tt.num_stages = 1 : i32} loc(#loc3)" and not guarded_loads.is_pipelined(loop)


SPIN = """\
module {
  tt.func public @spin(%word: !tt.ptr<i32>, %x: tensor<8x!tt.ptr<f32>>, %n: i32) {
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %true = arith.constant true
    scf.for %i = %zero to %n step %one  : i32 {
      %seen = tt.atomic_rmw add, ORDER, gpu, %word, %zero, %true : (!tt.ptr<i32>, i32, i1) -> i32
      %value = tt.load %x : tensor<8x!tt.ptr<f32>>
    } {tt.num_stages = 3 : i32}
    tt.return
  }
}
"""


@pytest.mark.parametrize("order", ["acquire", "acq_rel"])
def test_loads_stay_behind_a_wait_by_atomics(order: str) -> None:
    """Loads cannot be made to depend on such a wait, so Triton does not pipeline the loop."""
    guarded = guarded_loads.guard_loads(SPIN.replace("ORDER", order))
    assert guarded == SPIN.replace("ORDER", order).replace("tt.num_stages = 3", "tt.num_stages = 1")
    cas = SPIN.replace("atomic_rmw add, ORDER", f"atomic_cas {order}").replace(
        "!tt.ptr<i32>, i32, i1", "!tt.ptr<i32>, i32, i32"
    )
    assert (guarded_loads.guard_loads(cas) or "").count("tt.num_stages = 1") == 1


@pytest.mark.parametrize("order", ["relaxed", "release"])
def test_atomics_that_acquire_nothing_are_no_waits(order: str) -> None:
    assert guarded_loads.guard_loads(SPIN.replace("ORDER", order)) is None


def test_a_kernel_without_waits_in_loops_does_not_change() -> None:
    assert guarded_loads.guard_loads(TEXT) is None


def test_ir_that_triton_refuses_is_an_error_with_advice(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        guarded_loads.Rewriting, "_if_taken", lambda self, op: [guarded_loads.Operation("no operation")]
    )
    exploration = check.search(summing("with_pointers", True), 2, range(1))
    _, (refused,) = check.compile_and_check(exploration.ran, 90)
    assert "exchange_and_sum: its loads cannot be kept behind its waits" in refused
    assert "@weft.jit(guard_loads=False)" in refused


SPIN_PTX = """
.visible .entry spin(
)
{
    ORDER %r1, [%rd1], 0;
    bar.sync 0;
    ld.global.f32 %f1, [%rd2];
    ret;
}
"""


@pytest.mark.parametrize(
    ("atomic", "waits"),
    [
        ("atom.global.gpu.acquire.add.u32", True),
        ("atom.global.sys.acq_rel.cas.b32", True),
        ("atom.global.gpu.relaxed.add.u32", False),
        ("atom.global.sys.release.add.u32", False),
    ],
)
def test_the_rules_count_acquiring_atomics_as_waits(atomic: str, waits: bool) -> None:
    ptx = SPIN_PTX.replace("ORDER", atomic)
    is_load = lambda step: "ld.global" in step.text  # noqa: E731
    broken = [rule for rule in broken_rules(ptx, is_load, no_instruction) if rule.startswith(EARLY)]
    assert bool(broken) is not waits
    unshared = broken_rules(ptx.replace("    bar.sync 0;\n", ""), is_load, no_instruction)
    assert any(rule.startswith(EARLY) for rule in unshared), "threads other than the polling one load too"
