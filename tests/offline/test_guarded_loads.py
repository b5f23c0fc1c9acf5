"""Loops with waits that Triton pipelines or flattens (lang/guarded_loads.py): the gate refuses them as Triton alone compiles them, and
passes them as `weft.jit` does. The emulator, which interprets the source, gets the same results from either."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from tests.gates import some
from weft import World, check
from weft.check.ptx import blocks_of
from weft.compute.gemm import gemm_tile
from weft.lang import guarded_loads

N, PARTS, STAGES = 32, 4, 3
EARLY = "acquire: may be loaded before the wait"


# -- loops of which each iteration needs a part that another rank has sent ---------------------------------------------


@weft.jit
def with_pointers(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    at = tl.arange(0, N)
    block = at[:, None] * N + at[None, :]
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(tl.load(mine + part * N * N + block), tl.load(w + part * N * N + block))
    return total


@weft.jit
def with_moving_pointers(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    at = tl.arange(0, N)
    block = at[:, None] * N + at[None, :]
    total = tl.zeros((N, N), tl.float32)
    a, b = mine + block, w + block
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(tl.load(a), tl.load(b))
        a += N * N
        b += N * N
    return total


@weft.jit
def with_descriptors(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        wl.peer_tile_wait(ch, part, -1)
        total += tl.dot(mine_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
    return total


@weft.jit
def for_the_next_iteration(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    wl.peer_tile_wait(ch, 0, -1)
    for part in range(parts):
        total += tl.dot(mine_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
        wl.peer_tile_wait(ch, min(part + 1, parts - 1), -1)
    return total


@weft.jit
def for_several_iterations(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    at = tl.arange(0, N)
    block = at[:, None] * N + at[None, :]
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        if part % 2 == 0:
            wl.peer_tile_wait(ch, part, -1)
            wl.peer_tile_wait(ch, part + 1, -1)
        total += tl.dot(tl.load(mine + part * N * N + block), tl.load(w + part * N * N + block))
    return total


@weft.jit
def in_a_loop_within_an_if(mine, mine_desc, w, w_desc, ch, parts, N: tl.constexpr):
    total = tl.zeros((N, N), tl.float32)
    for part in range(parts):
        if part % 2 == 0:
            for awaited in range(part, part + 2):
                wl.peer_tile_wait(ch, awaited, -1)
        total += tl.dot(mine_desc.load([part * N, 0]), w_desc.load([part * N, 0]))
    return total


FORMS = {
    form.fn.__name__: form
    for form in (
        with_pointers, with_moving_pointers, with_descriptors, for_the_next_iteration, for_several_iterations,
        in_a_loop_within_an_if,
    )
}  # fmt: skip


def exchange_and_sum(w, mine, boxes, mine_desc, w_desc, out, epoch, ch, parts, total_of: tl.constexpr, N: tl.constexpr):
    """out [N, N] = sum over parts of mine [parts, N, N] @ w [parts, N, N], where `mine` is the w of the rank before."""
    at = tl.arange(0, N)
    block = at[:, None] * N + at[None, :]
    to = (wl.rank_of(ch) + 1) % ch.world
    for part in range(parts):
        wl.tile_push_data(boxes, to, part * N * N + block, tl.load(w + part * N * N + block), None)
        wl.peer_tile_notify(ch, part, to, False)
    tl.store(out + block, total_of(mine, mine_desc, w, w_desc, ch, parts, N))
    wl.end_call(ch, epoch, 1)


def summing(form: str, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(exchange_and_sum)

    def main(world: World) -> None:
        generators = [torch.Generator().manual_seed(rank) for rank in range(world.size)]
        weights = [torch.randint(-2, 3, (PARTS, N, N), generator=g).bfloat16() for g in generators]
        w, before = weights[world.rank].to(world.device), weights[world.rank - 1]
        mine, out = world.symmetric((PARTS, N, N), torch.bfloat16, "mine"), world.empty((N, N), torch.float32)
        blocks = [TensorDescriptor.from_tensor(t.view(PARTS * N, N), [N, N]) for t in (mine.local, w)]
        args = dict(w=w, mine=mine.local, boxes=mine.addresses, mine_desc=blocks[0], w_desc=blocks[1], out=out)
        args |= dict(epoch=world.zeros((1,), torch.int32), ch=world.channel("parts", PARTS, None), parts=PARTS)
        args |= dict(total_of=FORMS[form], N=N)
        world.launch(kernel, 1, args, dict(num_stages=STAGES), world.current_stream())
        world.synchronize()
        expected = (before.float() @ weights[world.rank].float()).sum(0)
        assert torch.equal(out.cpu(), expected)

    return main


def compiled(main: Callable[[World], Any]) -> check.CheckedKernel:
    """The kernel of `main`, which two schedules in the emulator have found clean."""
    found = check.search(main, 2, range(2))
    assert not found.findings, found.findings
    (one,), refused = check.compile_and_check(found.ran, 90)
    assert refused == []
    return one


def loads_ahead(one: check.CheckedKernel) -> int:
    return len(re.findall(r"cp\.async\.cg|cp\.async\.bulk\.tensor\.\dd\.shared", one.compiled.ptx))


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's cache goes by what is compiled, and not by what a test puts in place of the rewriting."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("form", some(FORMS))
def test_loads_stay_behind_their_waits_and_are_pipelined(form: str, own_cache: None) -> None:
    alone, guarded = (compiled(summing(form, guard)) for guard in (False, True))
    assert alone.problems and all(said.startswith(EARLY) for said in alone.problems)
    assert guarded.problems == []
    assert loads_ahead(guarded) == loads_ahead(alone) > 0
    assert guarded.compiled.spills == 0 and guarded.compiled.warnings == ()


MUTATIONS = {
    "a pointer that depends on nothing": ("_guard_pointer", "with_pointers", lambda *_: None),
    "an index that depends on nothing": ("_guard_index", "with_descriptors", lambda *_: None),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_gate_finds_loads_that_are_left_out(name: str, own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    method, form, instead = MUTATIONS[name]
    monkeypatch.setattr(guarded_loads.Rewriting, method, instead)
    assert all(said.startswith(EARLY) for said in compiled(summing(form, True)).problems)
    assert compiled(summing(form, True)).problems


@pytest.mark.gate
def test_the_gate_finds_loads_that_forget_the_wait_of_the_iteration_before(
    own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_loads, "_has_early_load", lambda block: False)
    assert compiled(summing("for_the_next_iteration", True)).problems


@pytest.mark.gate
def test_the_call_number_that_a_wait_reads_costs_no_depth(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loads_ahead(compiled(summing("with_descriptors", True)))
    monkeypatch.setattr(guarded_loads, "_numbers_for_waits", lambda block: set())
    monkeypatch.setattr(guarded_loads, "_has_early_load", lambda block: False)
    assert loads_ahead(compiled(summing("with_descriptors", True))) < whole


# -- loops in which a tile waits for the notify of the tile before -----------------------------------------------------


@weft.jit
def tiles_of_a_gemm(a_desc, b_desc, out_desc, ch, me, tiles, K, N: tl.constexpr):
    for t in tl.range(0, tiles, flatten=True):
        wl.peer_tile_wait(ch, t, me)
        acc = gemm_tile(a_desc, b_desc, t * N, 0, K, N, N, N)
        out_desc.store([t * N, 0], acc.to(tl.bfloat16))
        wl.peer_tile_notify(ch, t + 1, me)


@weft.jit
def steps_of_a_gemm(a_desc, b_desc, out_desc, ch, me, tiles, K, N: tl.constexpr):
    for t in range(tiles):
        wl.peer_tile_wait(ch, t, me)
        acc = tl.dot(a_desc.load([t * N, 0]), b_desc.load([0, 0]).T)
        out_desc.store([t * N, 0], acc.to(tl.bfloat16))
        wl.peer_tile_notify(ch, t + 1, me)


CHAINS = {chain.fn.__name__: chain for chain in (tiles_of_a_gemm, steps_of_a_gemm)}


def chain(a_desc, b_desc, out_desc, epoch, ch, tiles, K, tiles_in_turn: tl.constexpr, N: tl.constexpr):
    me = wl.rank_of(ch)
    wl.peer_tile_notify(ch, 0, me)
    tiles_in_turn(a_desc, b_desc, out_desc, ch, me, tiles, K, N)
    wl.end_call(ch, epoch, 1)


def chained(form: str, guard: bool) -> Callable[[World], None]:
    kernel = weft.jit(guard_loads=guard)(chain)

    def main(world: World) -> None:
        k = N if form == "steps_of_a_gemm" else 2 * N
        a = torch.randint(-2, 3, (PARTS * N, k), generator=torch.Generator().manual_seed(0)).bfloat16().to(world.device)
        out = world.empty((PARTS * N, N), torch.bfloat16)
        descriptors = [TensorDescriptor.from_tensor(t, [N, N]) for t in (a, a[:N], out)]
        args = dict(zip(("a_desc", "b_desc", "out_desc"), descriptors, strict=True))
        args |= dict(epoch=world.zeros((1,), torch.int32), ch=world.channel("tiles", PARTS + 1, None), tiles=PARTS, K=k)
        args |= dict(tiles_in_turn=CHAINS[form], N=N)
        world.launch(kernel, 1, args, dict(num_stages=STAGES), world.current_stream())
        world.synchronize()
        assert torch.equal(out.cpu(), (a.float() @ a[:N].float().t()).bfloat16().cpu())

    return main


def waits_run_ahead(ptx: str) -> bool:
    """Whether a path leads from one wait to the next without a notify between them."""
    blocks = blocks_of(ptx)
    is_wait = lambda step: "ld.acquire" in step.text  # noqa: E731
    is_notify = lambda step: re.search(r"(?:atom|red)\.global\S*release", step.text)  # noqa: E731
    waiting: set[str] = set()  # blocks that are entered after a wait and before a notify
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
    """A flattened loop waits for the next tile before it notifies this one, which here never ends. The other loop loads too early."""
    alone, guarded = (compiled(chained(form, guard)) for guard in (False, True))
    assert waits_run_ahead(alone.compiled.ptx) == (form == "tiles_of_a_gemm")
    assert not waits_run_ahead(guarded.compiled.ptx) and guarded.problems == []


@pytest.mark.gate
def test_a_loop_with_signals_that_stays_flattened_is_found(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_loads, "in_order", lambda loop: None)
    assert waits_run_ahead(compiled(chained("tiles_of_a_gemm", True)).compiled.ptx)


# -- the text of the IR ------------------------------------------------------------------------------------------------

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


def test_a_kernel_without_waits_in_loops_is_left_alone() -> None:
    assert guarded_loads.guard_loads(TEXT) is None
