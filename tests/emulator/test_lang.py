"""Tests of guarantees for kernel authors: launches that agree on every rank, counted signals, errors that name the
mistake, and scans in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
import weft.lang as wl
from weft.backends.base import Backend
from weft.emulator import intrinsics
from weft.lang import stock


@weft.jit
def ring(ch, epoch, extra):
    """Every rank notifies its neighbour once plus `extra` times, and then waits."""
    me = wl.rank_of(ch)
    for _ in range(1 + extra):
        wl.channel_notify(ch, 0, (me + 1) % ch.world, False)
    wl.channel_wait(ch, 0, 1, 0, (me + 1) % ch.world)
    wl.end_call(ch, epoch, 1)


@weft.jit(do_not_specialize=("rank",))
def own_number(ch, epoch, out, rank):
    tl.store(out, rank)
    wl.end_call(ch, epoch, 1)


@weft.jit
def running_sum(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


def call_ring(world: weft.World, extra: int, arrivals: int | None, calls: int = 3) -> None:
    ch = world.channel("ring", 1, None, arrivals)
    epoch = world.zeros((1,), torch.int32)
    for _ in range(calls):
        world.launch(ring, 1, dict(ch=ch, epoch=epoch, extra=extra), dict(num_warps=1), world.current_stream())
    world.synchronize()


@pytest.mark.parametrize("seed", range(4))
def test_a_doubled_signal_is_reported(seed: int) -> None:
    weft.spmd(lambda w: call_ring(w, 0, 1), 3, backend="emulated", seed=seed)
    with pytest.raises(weft.SignalError, match=r"doubled signal: ring\[0\] of rank \d is 6 at the end, not 3"):
        weft.spmd(lambda w: call_ring(w, 1, 1), 3, backend="emulated", seed=seed)


def test_a_lost_signal_is_reported_where_nobody_waits() -> None:
    with pytest.raises(weft.SignalError, match=r"lost signal: ring\[0\] of rank \d is 3 at the end, not 6"):
        weft.spmd(lambda w: call_ring(w, 0, 2), 2, backend="emulated")


def test_a_deadlock_names_the_channel() -> None:
    def main(world: weft.World) -> None:
        world.channel("something else", 3, None)
        ch, epoch = world.channel("ring", 1, None), world.zeros((1,), torch.int32)
        if world.rank == 0:
            args = dict(ch=ch, epoch=epoch, extra=0)
            weft.Launch(world, ring, 1, dict(num_warps=1), **args)(world.current_stream())
        world.synchronize()

    with pytest.raises(weft.Deadlock, match=r"ring\[0\] waits for channel 0 of ring of rank 0 >= 1, now 0"):
        weft.spmd(main, 2, backend="emulated")


@weft.jit
def past_the_end(ch, epoch, WAIT: tl.constexpr):
    if WAIT:
        wl.channel_wait(ch, 3, 1, -1, -1)
    else:
        wl.channel_notify(ch, 3, (wl.rank_of(ch) + 1) % ch.world, False)
    wl.end_call(ch, epoch, 1)


@pytest.mark.parametrize("wait, says", [(False, "notify"), (True, "wait")])
def test_a_channel_number_past_the_end_is_a_fault(wait: bool, says: str) -> None:
    def main(world: weft.World) -> None:
        args = dict(ch=world.channel("three", 3, None), epoch=world.zeros((1,), torch.int32), WAIT=wait)
        world.launch(past_the_end, 1, args, dict(num_warps=1), world.current_stream())
        world.synchronize()

    with pytest.raises(
        weft.MemoryFault, match=rf'{says} past the end: channel 3 of "three.*", which has channels 0\.\.2\n'
    ):
        weft.spmd(main, 2, backend="emulated")


@weft.jit
def ask(ch, epoch, END: tl.constexpr):
    """Rank 0 answers the other rank. Either the last of its two programs omits `end_call`, or both programs do."""
    me, p = wl.rank_of(ch), tl.program_id(0)
    if p == 0:
        wl.peer_tile_notify(ch, 0, 1 - me, False)
        wl.peer_tile_wait(ch, 0, 1 - me)
    if p < END:
        wl.end_call(ch, epoch, 2)


def ask_once(world: weft.World, end: int, arrivals: int | None) -> None:
    ch, epoch = world.channel("answer", 1, None, arrivals), world.zeros((1,), torch.int32)
    world.launch(ask, 2, dict(ch=ch, epoch=epoch, END=end), dict(num_warps=1), world.current_stream())
    world.synchronize()


@pytest.mark.parametrize("arrivals", [None, 1])
@pytest.mark.parametrize("end", [0, 1])
def test_a_call_that_is_not_counted_is_reported(end: int, arrivals: int | None) -> None:
    weft.spmd(lambda w: ask_once(w, 2, arrivals), 2, backend="emulated")
    with pytest.raises(weft.SignalError, match="launched 1 times, 0 calls counted: end_call missing, or"):
        weft.spmd(lambda w: ask_once(w, end, arrivals), 2, backend="emulated")


def test_unknown_arrivals_are_not_checked() -> None:
    weft.spmd(lambda w: call_ring(w, 1, None), 2, backend="emulated")


def test_integers_that_differ_between_ranks_raise_before_the_launch() -> None:
    def main(world: weft.World) -> str:
        with pytest.raises(weft.Mismatch) as caught:
            call_ring(world, world.rank, None)
        return str(caught.value)

    for message in weft.spmd(main, 2, backend="emulated"):
        assert (
            "launch of ring" in message
            and "extra=0" in message
            and "extra=1" in message
            and "wl.rank_of(ch)" in message
        )


@weft.jit
def has_a_grid(ch, epoch, grid):
    wl.end_call(ch, epoch, 1)


def test_grids_that_differ_between_ranks_raise_before_the_launch() -> None:
    def main(world: weft.World) -> None:
        stream = world.current_stream()
        args = dict(ch=world.channel("ring", 1, None), epoch=world.zeros((1,), torch.int32))
        with pytest.raises(weft.Mismatch, match="launch of ring by 1 programs; rank 1: launch of ring by 2 programs"):
            world.launch(ring, 1 + world.rank, dict(args, extra=0), {}, stream)
        with pytest.raises(weft.Mismatch, match="launch of has_a_grid by 1 programs"):
            world.launch(has_a_grid, 1 + world.rank, dict(args, grid=5), {}, stream)

    weft.spmd(main, 2, backend="emulated")


BAD_LAUNCHES: list[tuple[Any, Any, type[Exception], str]] = [
    ((2, 3), {}, TypeError, r"the grid is a number of programs, not \(2, 3\)"),
    (1.0, {}, TypeError, "not 1.0"),
    (lambda meta: (1,), {}, TypeError, "the grid is a number"),
    (0, {}, ValueError, "a grid of 0 programs"),
    (1, dict(num_warp=4), ValueError, "no option num_warp; there are num_warps, num_stages"),
    (1, None, TypeError, "options are a dict, not None"),
]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("grid, options, error, says", BAD_LAUNCHES)
def test_a_launch_beyond_every_gpus_limits_is_refused(
    grid: Any, options: Any, error: type[Exception], says: str, prepared: bool
) -> None:
    def main(world: weft.World) -> None:
        args = dict(x=torch.ones(8), out=world.zeros((8,), torch.float32), N=8)
        with pytest.raises(error, match=f"running_sum: .*{says}"):
            if prepared:
                weft.Launch(world, running_sum, grid, options, **args)(world.current_stream())
            world.launch(running_sum, grid, args, options, world.current_stream())

    weft.spmd(main, 1, backend="emulated")


def test_a_launch_is_checked_before_any_backend() -> None:
    class Elsewhere:
        rank, size, device, name, nodes = 0, 1, torch.device("cpu"), "elsewhere", (0,)
        clock, capturing, group, sm_count = None, Backend.capturing, None, 1
        name_counters = Backend.name_counters
        name_calls = Backend.name_calls
        world_numbers = Backend.world_numbers

    with pytest.raises(ValueError, match="no option num_warp"):
        weft.World(Elsewhere()).launch(running_sum, 1, {}, dict(num_warp=4), None)  # type: ignore[arg-type]


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(x=[1.0] * 8), TypeError, "x: a list is no argument: tensors, numbers, NamedTuples of them and None are"),
    (dict(x=np.ones(8)), TypeError, "x: a ndarray is no argument"),
    (dict(x="x"), TypeError, "x: a str is no argument"),
    (dict(x=(torch.ones(8), {})), TypeError, "x.1: a dict is no argument"),
    (
        dict(x=(TensorDescriptor(torch.ones(8, 8), [8, 8], [8, 1], [8, 8]),)),
        TypeError,
        "x.0: a TensorDescriptor must be",
    ),
    (dict(x=torch.ones(8, device="meta")), ValueError, "x: a tensor on meta, and this rank is on cpu"),
    (dict(x=(torch.ones(8, device="meta"),)), ValueError, "x.0: a tensor on meta"),
]


@pytest.mark.parametrize("wrong, error, says", BAD_ARGUMENTS)
def test_an_unused_argument_is_named(wrong: dict[str, Any], error: type[Exception], says: str) -> None:
    def main(world: weft.World) -> None:
        args = dict(x=torch.ones(8), out=world.zeros((8,), torch.float32), N=8) | wrong
        with pytest.raises(error, match=f"running_sum, argument {says}"):
            world.launch(running_sum, 1, args, {}, world.current_stream())

    weft.spmd(main, 1, backend="emulated")


def no_kernel(x: Any) -> None: ...


def test_launches_outside_the_world_are_refused() -> None:
    def main(world: weft.World) -> None:
        stream, ch = world.current_stream(), world.channel("c", 1, None)
        with pytest.raises(TypeError, match="no_kernel is not a kernel: decorate it with @weft.jit"):
            world.launch(no_kernel, 1, {}, {}, stream)
        with pytest.raises(TypeError, match="running_sum: arguments are a dict by name, not list"):
            world.launch(running_sum, 1, [torch.ones(8)], {}, stream)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"running_sum\[grid\]\(...\) is Triton's launch; here it is World.launch"):
            running_sum[(1,)](torch.ones(8), torch.ones(8), 8)
        with pytest.raises(RuntimeError, match="running_sum runs on a device only: give it to World.launch"):
            running_sum(torch.ones(8), torch.ones(8), 8)
        with pytest.raises(RuntimeError, match="rank_of runs on a device only"):
            wl.rank_of(ch)

    weft.spmd(main, 1, backend="emulated")


@weft.jit
def reads_epoch(ch, epoch, out):
    tl.store(out, tl.load(epoch))
    wl.end_call(ch, epoch, 1)


def test_a_call_needs_no_epoch() -> None:
    def main(world: weft.World) -> int:
        ch, stream = world.channel("ring", 1, None, 1), world.current_stream()
        for _ in range(3):
            world.launch(ring, 1, dict(ch=ch, epoch=None, extra=0), dict(num_warps=1), stream)
        world.synchronize()
        return int(ch.state[wl.channel.CALLS.value])

    assert weft.spmd(main, 2, backend="emulated") == [3, 3]


def test_a_kernel_without_epoch_compiles() -> None:
    from weft.check.offline import compile_kernel

    (ch,) = weft.spmd(lambda world: world.channel("ring", 1, None), 1, backend="emulated")
    assert "acq_rel" in compile_kernel(ring, dict(ch=ch, epoch=None, extra=0), dict(num_warps=1)).ptx


def test_an_error_in_a_kernel_quotes_its_arguments() -> None:
    def main(world: weft.World) -> None:
        args = dict(ch=world.channel("c", 1, None), epoch=None, out=world.zeros((1,), torch.int32))
        world.launch(reads_epoch, 1, args, {}, world.current_stream())
        world.synchronize()

    with pytest.raises(AttributeError) as caught:
        weft.spmd(main, 1, backend="emulated")
    notes = caught.value.__notes__
    assert "launched with ch: BlockChannel, epoch=None, out: pointer<int32>" in notes, notes


def test_streams_and_events_are_the_worlds() -> None:
    def main(world: weft.World) -> None:
        x, word, stream = world.zeros((4,), torch.float32), world.zeros((1,), torch.int32), world.current_stream()
        args = dict(x=x, out=x, N=4)
        for wrong in (None, "main"):
            for give in (
                lambda s: world.launch(running_sum, 1, args, {}, s),
                lambda s: world.copy(x, x.clone(), s),
                lambda s: world.call(lambda: None, [], [], s),
                lambda s: world.signal(word, word, s),
                lambda s: world.wait(word, word, s),
                lambda s: world.all_reduce(x, s),
                lambda s: world.record(s),
                lambda s: world.wait_event(s, world.record(stream)),
            ):
                with pytest.raises(TypeError, match=r"a stream is World.current_stream\(\) or a World.side_stream"):
                    give(wrong)
        with pytest.raises(TypeError, match=r"an event is what World.record\(stream\) returned, not EmulatedStream"):
            world.wait_event(stream, world.side_stream("copy"))
        with pytest.raises(TypeError, match="World.call takes a function .* not Tensor"):
            world.call(x.add_(1), [x], [x], stream)  # type: ignore[arg-type]

    weft.spmd(main, 1, backend="emulated")


def test_tensors_are_needed() -> None:
    def main(world: weft.World) -> None:
        x, stream = world.zeros((4,), torch.float32), world.current_stream()
        for give in (
            lambda: world.copy(x, [1.0] * 4, stream),  # type: ignore[arg-type]
            lambda: wl.rank_copy_data(world, x, [1.0] * 4, stream),  # type: ignore[arg-type]
            lambda: world.all_gather(x, [1.0] * 4, stream),  # type: ignore[arg-type]
            lambda: world.reduce_scatter([1.0] * 4, x, stream),  # type: ignore[arg-type]
            lambda: world.all_reduce([1.0], stream),  # type: ignore[arg-type]
            lambda: world.backend.all_to_all([[1.0]], [x], stream),  # type: ignore[list-item]
            lambda: world.call(lambda: None, [[1.0]], [], stream),  # type: ignore[list-item]
            lambda: world.signal([1], x, stream),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match="tensors are needed, not list"):
                give()
        with pytest.raises(TypeError, match="ch is what World.channel returned, a BlockChannel, not 'c'"):
            wl.rank_notify(world, "c", 0, 0, world.tensor([1], torch.int32), stream)  # type: ignore[arg-type]

    weft.spmd(main, 1, backend="emulated")


@pytest.mark.parametrize("way", ["rank_copy_data", "copy"])
def test_a_copy_that_no_copy_engine_makes_is_refused(way: str) -> None:
    def main(world: weft.World) -> None:
        copy = world.copy if way == "copy" else lambda *operands: wl.rank_copy_data(world, *operands)
        x, stream = world.zeros((4, 4), torch.float32), world.current_stream()
        for dst, src, says in (
            (x[:, :2], x[:, 2:], r"from a tensor that is not contiguous: \[4, 2\], strides \(4, 1\)"),
            (x[:, 0], x[0], r"to a tensor that is not contiguous: \[4\], strides \(4,\)"),
            (x, x[0], r"copy of \[4\] torch.float32 to \[4, 4\] torch.float32"),
            (x, x.half(), "copy of .* torch.float16 to .* torch.float32"),
        ):
            with pytest.raises(ValueError, match=says):
                copy(dst, src, stream)

    weft.spmd(main, 1, backend="emulated")


def test_a_copy_is_checked_before_any_backend() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        wl.rank_copy_data(None, torch.zeros(4, 4)[:, 0], torch.zeros(4), None)  # type: ignore[arg-type]


def test_channels_that_cannot_be_are_refused() -> None:
    def main(world: weft.World) -> None:
        for counters in (0, -64):
            with pytest.raises(ValueError, match=f"channel 'a' of {counters} counters"):
                world.channel("a", counters, None)
        with pytest.raises(ValueError, match="channel 'a' of 3 counters, but arrivals of 2"):
            world.channel("a", 3, None, [1, 1])
        ch = world.channel("a", 3, None, 1)
        assert world.channel("a", 3, None).counters is world.channel("a", 3, None, 1).counters is ch.counters
        with pytest.raises(ValueError, match="channel 'a' was made with arrivals 1, not 2"):
            world.channel("a", 3, None, 2)
        world.channel("b", 2, None, [1, 2])
        assert (
            world.channel("b", 2, None, (1, 2)).counters is world.channel("b", 2, None, torch.tensor([1, 2])).counters
        )
        with pytest.raises(ValueError, match=r"channel 'b' was made with arrivals \[1, 2\], not \[2, 1\]"):
            world.channel("b", 2, None, [2, 1])
        bad: list[tuple[tuple[Any, ...], str]] = [
            ((3, "a", None), "a channel has a name and a number of counters, not 3 and 'a'"),
            (("c", 1.0, None), "not 'c' and 1.0"),
            (("c", 1, 8), "channel 'c': the mapping is a StaticMapping, a TableMapping or None, not 8"),
            (("c", 2, None, 1.0), "channel 'c': arrivals are an integer, or one a counter, not 1.0"),
            (("c", 2, None, [1, 0.5]), r"one a counter, not \[1, 0.5\]"),
        ]
        for arguments, says in bad:
            with pytest.raises(TypeError, match=says):
                world.channel(*arguments)

    weft.spmd(main, 2, backend="emulated")


def test_ranks_that_make_different_channels_or_memory_disagree() -> None:
    def main(world: weft.World) -> None:
        me = world.rank
        with pytest.raises(weft.Mismatch, match="rank 0: channel 'a0'; rank 1: channel 'a1'"):
            world.channel(f"a{me}", 1, None)
        with pytest.raises(weft.Mismatch, match="rank 0: channel 'a' counters=1; rank 1: channel 'a' counters=2"):
            world.channel("a", 1 + me, None)
        with pytest.raises(weft.Mismatch, match="rank 0: symmetric 'x' dtype=torch.float32; rank 1: symmetric 'x'"):
            world.symmetric((4,), [torch.float32, torch.int32][me], "x")
        with pytest.raises(weft.Mismatch, match=r"shape=\(4, 2\); rank 1: symmetric 'x' shape=\(2, 4\)"):
            world.symmetric([(4, 2), (2, 4)][me], torch.float32, "x")
        assert world.channel("a", 1, None, me).counters.numel() == 1  # only this rank increments the arrivals

    weft.spmd(main, 2, backend="emulated")


def test_integers_that_are_not_specialised_may_differ() -> None:
    def main(world: weft.World) -> int:
        ch, epoch, out = world.channel("own", 1, None), world.zeros((1,), torch.int32), world.zeros((1,), torch.int32)
        args = dict(ch=ch, epoch=epoch, out=out, rank=world.rank)
        world.launch(own_number, 1, args, dict(num_warps=1), world.current_stream())
        world.synchronize()
        return int(out)

    assert weft.spmd(main, 3, backend="emulated") == [0, 1, 2]


def test_a_counter_is_the_named_rank_s() -> None:
    def main(world: weft.World) -> list[int]:
        ch, second_channel = world.channel("a", 3, None), world.channel("b", 2, None)
        if world.rank == 0:
            world.counter(ch, 2, 1).fill_(7)
        world.exchange("written")
        with pytest.raises(weft.WeftError, match="channel 3 of 3"):
            world.counter(ch, 3, 0)
        return [*ch.counters.tolist(), *second_channel.counters.tolist()]

    assert weft.spmd(main, 2, backend="emulated") == [[0] * 5, [0, 0, 7, 0, 0]]


def test_a_scan_of_bf16_runs_in_the_emulator() -> None:
    x = torch.arange(8).bfloat16()

    def main(world: weft.World) -> torch.Tensor:
        out = world.zeros((8,), torch.bfloat16)
        world.launch(running_sum, 1, dict(x=x, out=out, N=8), dict(num_warps=1), world.current_stream())
        world.synchronize()
        return out

    (out,) = weft.spmd(main, 1, backend="emulated")
    assert torch.equal(out, x.cumsum(0))


@weft.jit
def push_all(addresses):
    wl.tile_push_data(addresses, 0, 3 + tl.arange(0, 1), tl.full((1,), 1, tl.int32), None)


def test_an_element_of_symmetric_memory_is_named() -> None:
    def main(world: weft.World) -> None:
        args = dict(addresses=world.symmetric((2, 2), torch.int32, "f").addresses)
        world.launch(push_all, 1, args, {}, world.current_stream())
        world.synchronize()

    with pytest.raises(weft.Race, match=r"race on f\[1, 1\] of rank 0"):
        weft.spmd(main, 2, backend="emulated")


@weft.jit
def push(x, buffers, to, BUG: tl.constexpr):
    offsets = tl.arange(0, 8)
    if BUG == "argument":
        wl.tile_push_data(buffers, to, offsets, tl.load(x + offsets))
    else:
        wl.tile_push_data(buffers, to, offsets, tl.load(x + offsets), None)


@pytest.mark.parametrize(
    "as_passed, to, bug, error, says",
    [
        (lambda t: t, 0, "", TypeError, "push, argument buffers: a SymmetricTensor is no argument: pass its"),
        (lambda t: t.local, 0, "", TypeError, "fp32 is no address .* SymmetricTensor.addresses"),
        (lambda t: t.addresses, 0, "argument", TypeError, r"^tile_push_data\(\) missing .* 'mask'"),
        (lambda t: t.addresses, 2, "", weft.MemoryFault, r"read of buffers\[2\] of rank \d, which has the shape \[2\]"),
        (
            lambda t: t.addresses,
            -1,
            "",
            weft.MemoryFault,
            r"read of buffers\[-1\] of rank \d, which has the shape \[2\]",
        ),
    ],
)
def test_wrong_arguments_are_named(as_passed: Callable[[Any], Any], to: int, bug: str, error: Any, says: str) -> None:
    def main(world: weft.World) -> None:
        args = dict(x=torch.ones(8), buffers=as_passed(world.symmetric((8,), torch.float32, "x")), to=to, BUG=bug)
        world.launch(push, 1, args, {}, world.current_stream())
        world.synchronize()

    with pytest.raises(error, match=says):
        weft.spmd(main, 2, backend="emulated")


def test_wrong_arguments_of_a_host_signal_are_named() -> None:
    def main(world: weft.World) -> None:
        ch, call, stream = world.channel("a", 2, None), world.tensor([1], torch.int32), world.current_stream()
        for rank in (2, -1):
            with pytest.raises(ValueError, match=f"rank {rank} of a world of 2"):
                wl.rank_notify(world, ch, 0, rank, call, stream)
        for wrong in (1, torch.ones(1)):
            with pytest.raises(TypeError, match="the call is an int32 tensor of one word"):
                wl.rank_notify(world, ch, 0, 0, wrong, stream)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="the call is an int32 tensor of one word"):
                wl.rank_wait(world, ch, 0, wrong, stream)  # type: ignore[arg-type]

    weft.spmd(main, 2, backend="emulated")


@weft.jit
def notify_tile(ch, epoch, MODE: tl.constexpr):
    wl.producer_tile_notify(ch, 0, MODE, False)
    wl.end_call(ch, epoch, 1)


def test_an_unknown_mode_of_a_notify_is_refused() -> None:
    def main(world: weft.World) -> None:
        ch = world.channel("rows", 2, wl.StaticMapping.over(32, world.size, tile_rows=16, channel_rows=16, arrivals=1))
        args = dict(ch=ch, epoch=world.zeros((1,), torch.int32), MODE="all")
        world.launch(notify_tile, 1, args, dict(num_warps=1), world.current_stream())
        world.synchronize()

    with pytest.raises(AssertionError, match="MODE must be p2p or broadcast"):
        weft.spmd(main, 2, backend="emulated")


def test_a_notify_of_a_tile_in_two_channels_is_refused() -> None:
    """The notify would increment only the first channel."""

    def main(world: weft.World, rows: int) -> None:
        mapping = wl.StaticMapping.over(32, 2, tile_rows=rows, channel_rows=8, arrivals=1)
        args = dict(ch=world.channel("rows", 4, mapping), epoch=world.zeros((1,), torch.int32), MODE="broadcast")
        world.launch(notify_tile, 1, args, dict(num_warps=1), world.current_stream())
        world.synchronize()

    weft.spmd(lambda w: main(w, 3), 2, backend="emulated")
    with pytest.raises(AssertionError, match="producer_tile_notify of a tile that lies in several channels"):
        weft.spmd(lambda w: main(w, 9), 2, backend="emulated")


def test_every_signal_and_wait_has_a_form_in_stock_triton() -> None:
    """Only functions that order bulk accesses or use multicast addresses have no such form."""
    missing = {name for name in intrinsics.Intrinsic.emulated if not hasattr(stock, name)}
    assert missing == {"flush_stores", "window_fence", "window_store", "window_sum"}
