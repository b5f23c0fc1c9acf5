"""NCCL's collectives: by torch.distributed, or called directly under weft's watch. A stand-in replaces the library."""

from __future__ import annotations

import gc
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.backends import nccl
from weft.errors import WeftError

FUNCTIONS = [
    f"nccl{name}"
    for name in (
        "AllGather",
        "ReduceScatter",
        "AllReduce",
        "Send",
        "Recv",
        "GroupStart",
        "GroupEnd",
        "CommGetAsyncError",
    )
]
CUDA = torch.device("cuda", 3)
ROOT = Path(__file__).parents[2]
STREAM = SimpleNamespace(cuda_stream=77)


class Event:
    """An event that completes when its `done` is set."""

    def __init__(self) -> None:
        self.done, self.streams = True, list[object]()

    def record(self, stream: object) -> None:
        self.done = False
        self.streams.append(stream)

    def query(self) -> bool:
        return self.done


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on GPU 3."""

    def get_device(self) -> int:
        return 3


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A communicator of 4 ranks on GPU 3, and what was called: by torch, in NCCL, and in what state."""
    stand_in = SimpleNamespace(torch=[], waits=[], nccl=[], current=3, capturing=False, communicator=1000, statuses={})

    def by_torch(name: str) -> Callable[..., SimpleNamespace | None]:
        def enqueue(*_: object) -> SimpleNamespace | None:
            stand_in.torch.append(name)
            return stand_in.work

        return enqueue

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        stand_in.made_current.append(stream)
        stand_in.on = stream
        yield
        stand_in.on = None

    def by_nccl(name: str) -> Callable[..., int]:
        return lambda *arguments: stand_in.nccl.append((name, arguments)) or stand_in.statuses.get(name, 0)

    stand_in.make_current, stand_in.made_current = on, list[object]()
    stand_in.work = SimpleNamespace(wait=lambda: stand_in.waits.append(stand_in.on))
    names = "_allgather_base", "_reduce_scatter_base", "allreduce", "alltoall"
    stand_in.backend = SimpleNamespace(**{name: by_torch(name) for name in names})
    stand_in.backend.options = SimpleNamespace(_timeout=timedelta(seconds=50))
    stand_in.backend._comm_ptr = lambda: stand_in.communicator
    coalesced = "allgather_into_tensor_coalesced"
    stand_in.group = SimpleNamespace(
        **{coalesced: by_torch(coalesced)}, _get_backend=lambda device: stand_in.backend, size=lambda: 4, rank=lambda: 1
    )
    functions = {name: by_nccl(name) for name in FUNCTIONS}
    library = stand_in.library = SimpleNamespace(**functions, ncclGetErrorString=lambda status: b"system error")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: stand_in.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: stand_in.capturing, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(nccl, "_watches", lambda: stand_in.watches)
    monkeypatch.setattr(nccl, "_library", lambda: library)
    stand_in.watches, stand_in.dumped = list[Any](), list[int]()
    stand_in.collectives = nccl.collectives(stand_in.group, CUDA, stand_in.make_current, False)  # type: ignore[arg-type]
    return stand_in


def test_collectives_call_nccl_on_torchs_communicator(stand_in: SimpleNamespace) -> None:
    """NCCL sends a gather's rows as bytes, so that every dtype has one. A reduction counts elements of its dtype."""
    x, whole, part = on_gpu(2, 8), on_gpu(8, 8), on_gpu(2, 8)
    stand_in.collectives.all_gather(STREAM, whole, x)
    stand_in.collectives.reduce_scatter(STREAM, part, whole)
    stand_in.collectives.all_reduce(STREAM, x.float().as_subclass(OnGpu))
    assert not stand_in.torch and not stand_in.made_current, "NCCL takes the stream, which need not be the current one"
    (gather, gathered), (scatter, scattered), (reduce, reduced) = stand_in.nccl
    assert (gather, gathered) == ("ncclAllGather", (x.data_ptr(), whole.data_ptr(), 32, nccl.UINT8, 1000, 77))
    assert (scatter, scattered) == (
        "ncclReduceScatter", (whole.data_ptr(), part.data_ptr(), 16, 9, nccl.SUM, 1000, 77)
    )  # fmt: skip
    assert reduce == "ncclAllReduce" and reduced[0] == reduced[1] and reduced[2:] == (16, 7, nccl.SUM, 1000, 77)


def test_several_transfers_are_one_group(stand_in: SimpleNamespace) -> None:
    rows, scales = on_gpu(2, 8), on_gpu(2, 1, dtype=torch.float32)
    outs = [on_gpu(8, 8), on_gpu(8, 1, dtype=torch.float32)]
    stand_in.collectives.all_gather_together(STREAM, outs, [rows, scales])
    gathers = [
        ("ncclAllGather", (x.data_ptr(), out.data_ptr(), nbytes, nccl.UINT8, 1000, 77))
        for x, out, nbytes in ((rows, outs[0], 32), (scales, outs[1], 8))
    ]
    assert stand_in.nccl == [("ncclGroupStart", ()), *gathers, ("ncclGroupEnd", ())]
    stand_in.nccl.clear()
    sent, received = [[on_gpu(n) for n in counts] for counts in ((3, 0, 2, 1), (3, 4, 0, 0))]
    stand_in.collectives.all_to_all(STREAM, received, sent)
    transfers = [
        (name, (tensors[peer].data_ptr(), 2 * len(tensors[peer]), nccl.UINT8, peer, 1000, 77))
        for name, tensors, peers in (("ncclSend", sent, (0, 2, 3)), ("ncclRecv", received, (0, 1)))
        for peer in peers
    ]
    assert stand_in.nccl == [("ncclGroupStart", ()), *transfers, ("ncclGroupEnd", ())]
    assert stand_in.collectives._watch._recorded and not stand_in.torch


@pytest.mark.parametrize("failing", ["ncclGroupStart", "ncclAllGather", "ncclSend", "ncclGroupEnd"])
def test_an_error_of_any_call_of_a_group_is_raised(stand_in: SimpleNamespace, failing: str) -> None:
    stand_in.statuses[failing] = 5
    with pytest.raises(WeftError, match="NCCL failed with 5"):
        if failing == "ncclSend":
            stand_in.collectives.all_to_all(STREAM, [on_gpu(1)] * 4, [on_gpu(1)] * 4)
        else:
            stand_in.collectives.all_gather_together(STREAM, [on_gpu(8, 8)], [on_gpu(2, 8)])
    assert stand_in.nccl[-1] == ("ncclGroupEnd", ())


def test_an_exception_leaves_no_group_open(stand_in: SimpleNamespace) -> None:
    """NCCL would not launch the thread's later collectives, not even torch's."""

    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    stand_in.library.ncclAllGather = interrupted
    with pytest.raises(KeyboardInterrupt):
        stand_in.collectives.all_gather_together(STREAM, [on_gpu(8, 8)], [on_gpu(2, 8)])
    assert [name for name, _ in stand_in.nccl] == ["ncclGroupStart", "ncclGroupEnd"]


def test_a_communicator_that_does_not_block_is_waited_for(stand_in: SimpleNamespace) -> None:
    looks = iter((7, 7, 0, 7, 5))

    def status(communicator: int, pointer: Any) -> int:
        assert communicator == 1000
        pointer._obj.value = next(looks)
        return 0

    stand_in.statuses["ncclAllReduce"], stand_in.library.ncclCommGetAsyncError = 7, status
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    assert stand_in.collectives._watch._recorded
    with pytest.raises(WeftError, match="NCCL failed with 5"):
        stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    stand_in.library.ncclCommGetAsyncError = lambda *_: 0
    stand_in.backend.options._timeout = timedelta(seconds=0.01)
    with pytest.raises(WeftError, match="NCCL failed with 7"):
        stand_in.collectives.all_reduce(STREAM, on_gpu(4))


def test_torch_enqueues_groups_that_do_not_fit(stand_in: SimpleNamespace) -> None:
    stand_in.collectives.all_gather_together(STREAM, [on_gpu(7, 8)], [on_gpu(2, 8)])
    mixed = [on_gpu(8, 8, dtype=torch.float16)], [on_gpu(2, 8)]
    stand_in.collectives.all_gather_together(STREAM, *mixed)
    for counts in ((3, 3), (4, 3), (3, 4)):
        lists = [[on_gpu(1)] * count for count in counts]
        stand_in.collectives.all_to_all(STREAM, *lists)
    assert stand_in.torch == ["allgather_into_tensor_coalesced"] * 2 + ["alltoall"] * 3 and not stand_in.nccl


@pytest.mark.parametrize(
    "why", ["no communicator yet", "another current GPU", "strided", "wrong size", "dtype", "on the CPU"]
)
def test_torch_enqueues_what_it_must_begin_or_refuse(stand_in: SimpleNamespace, why: str) -> None:
    x, whole = on_gpu(2, 8), on_gpu(8, 8)
    if why == "no communicator yet":
        stand_in.communicator = 0
    elif why == "another current GPU":
        stand_in.current = 0
    elif why == "strided":
        x = on_gpu(2, 16)[:, ::2]
    elif why == "wrong size":
        whole = on_gpu(6, 8)
    elif why == "dtype":
        whole = on_gpu(8, 8, dtype=torch.float16)
    else:
        x = torch.zeros(2, 8, dtype=torch.bfloat16)
    stand_in.collectives.all_gather(STREAM, whole, x)
    stand_in.collectives.reduce_scatter(STREAM, x, whole)
    assert (
        stand_in.torch == ["_allgather_base", "_reduce_scatter_base"]
        and stand_in.waits == stand_in.collectives._watch.latest.streams == [STREAM, STREAM]
        and not stand_in.nccl
    )


def test_torch_sums_dtypes_that_are_not_listed(stand_in: SimpleNamespace) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4, dtype=torch.int32))
    assert stand_in.torch == ["allreduce"] and stand_in.waits == stand_in.made_current == [STREAM]
    stand_in.work = None  # torch returns none if the stream already waits
    stand_in.collectives.all_reduce(STREAM, on_gpu(4, dtype=torch.int32))
    assert stand_in.torch == ["allreduce"] * 2 and stand_in.waits == [STREAM]


def test_an_error_of_nccl_is_raised(stand_in: SimpleNamespace) -> None:
    stand_in.statuses["ncclAllReduce"] = 2
    with pytest.raises(WeftError, match="NCCL failed with 2: system error"):
        stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    assert not stand_in.collectives._watch._recorded


def test_an_event_follows_each_collective_outside_captures(stand_in: SimpleNamespace) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    watch = stand_in.collectives._watch
    assert watch.latest.streams == [STREAM]
    stand_in.capturing = True
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    assert watch.latest.streams == [STREAM] and len(stand_in.nccl) == 2


def test_a_collective_that_does_not_end_is_found(stand_in: SimpleNamespace) -> None:
    """The time limit is the group's when the collective is first seen."""
    watch = stand_in.collectives._watch
    stand_in.backend.options._timeout = timedelta(seconds=40)
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    assert not watch.look(0.0) and not watch.look(40.0) and watch.look(41.0)


def test_torchs_watchdog_comes_first(stand_in: SimpleNamespace) -> None:
    """By the network torch enqueues. If its watchdog has not ended the process at twice the time limit, weft does."""
    by_network = nccl.collectives(stand_in.group, CUDA, stand_in.make_current, True)  # type: ignore[arg-type]
    by_network.all_gather(STREAM, on_gpu(8, 8), on_gpu(2, 8))  # type: ignore[arg-type]
    assert stand_in.torch == ["_allgather_base"] and not stand_in.nccl
    watch = by_network._watch
    assert watch is not None and not watch.look(0.0) and not watch.look(100.0) and watch.look(101.0)


def test_collectives_that_end_late_together_but_not_alone_are_no_error(stand_in: SimpleNamespace) -> None:
    """A busy host is always ahead of the GPU, so that the newest collective has never ended at a look."""
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    watch = stand_in.collectives._watch
    for second in range(0, 1000, 30):
        event = watch.latest
        stand_in.collectives.all_reduce(STREAM, on_gpu(4))
        assert not watch.look(second)  # takes the event that was just recorded
        stand_in.collectives.all_reduce(STREAM, on_gpu(4))
        assert watch.latest is not event and not event.query()
        event.done = True
        assert not watch.look(second + 29)


def test_a_stuck_collective_is_found_behind_collectives_that_ended(stand_in: SimpleNamespace) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    watch = stand_in.collectives._watch
    assert not watch.look(0.0)
    ended = watch._watched
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))  # never ends
    ended.done = True
    assert not any(watch.look(second) for second in (1.0, 2.0, 3.0, 52.0)) and watch.look(53.0)


def test_without_collectives_nothing_is_watched(stand_in: SimpleNamespace) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    watch = stand_in.collectives._watch
    watch.look(0.0)
    watch._watched.done = True
    assert not any(watch.look(second) for second in (1.0, 2.0, 1000.0)) and watch._watched is None


class Ended(Exception):
    pass


@pytest.fixture
def thread(stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return the thread's function, in which each second of its sleep takes 20. The end of the process, and second
    1,000, raise Ended."""
    seconds, relaxed = [0.0], list[bool]()

    def sleep(_: float) -> None:
        seconds[0] += 20
        if seconds[0] > 1000:
            raise Ended("nothing was late")

    @contextmanager
    def any_call_allowed() -> Iterator[None]:
        relaxed.append(True)
        yield
        relaxed.pop()

    def query(event: Event) -> bool:
        assert relaxed, "a query while another thread captures would be an error"
        return event.done

    def abort() -> None:
        raise Ended("the process")

    monkeypatch.setattr(nccl.time, "sleep", sleep)
    monkeypatch.setattr(nccl.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(nccl, "any_call_allowed", any_call_allowed)
    monkeypatch.setattr(Event, "query", query)
    monkeypatch.setattr(nccl.os, "abort", abort)
    monkeypatch.setattr(nccl.faulthandler, "dump_traceback", stand_in.dumped.append)
    return lambda: nccl._look_at(stand_in.watches)


def test_the_thread_ends_the_process_at_a_collective_that_does_not_end(
    stand_in: SimpleNamespace, thread: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    with pytest.raises(Ended, match="the process"):
        thread()
    assert "rank 1 on cuda:3: a collective of NCCL has not ended within 50 s" in capfd.readouterr().err
    assert stand_in.dumped == [nccl.STDERR]


def test_the_process_ends_although_nothing_can_be_printed(
    stand_in: SimpleNamespace, thread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int, data: bytes) -> None:
        raise BrokenPipeError

    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    monkeypatch.setattr(nccl.os, "write", broken)
    with pytest.raises(Ended, match="the process"):
        thread()


def test_the_thread_goes_on_after_an_error_of_the_gpu(
    stand_in: SimpleNamespace, thread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU's collectives are still watched."""
    healthy = nccl.collectives(stand_in.group, CUDA, stand_in.make_current, False)  # type: ignore[arg-type]

    def failed(moment: float) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stand_in.collectives._watch, "look", failed)
    healthy.all_reduce(STREAM, on_gpu(4))  # type: ignore[arg-type]
    with pytest.raises(Ended, match="the process"):
        thread()


def test_a_dropped_world_is_watched_until_its_last_collective_has_ended(
    stand_in: SimpleNamespace, thread: Callable[[], None]
) -> None:
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    watch, backend = stand_in.collectives._watch, weakref.ref(stand_in.backend._comm_ptr)
    stand_in.collectives = stand_in.group = stand_in.backend = None
    gc.collect()
    assert backend() is None, "the thread would keep torch's process group at the end of the process"
    with pytest.raises(Ended, match="the process"):
        thread()
    watch._watched.done = True
    with pytest.raises(Ended, match="nothing was late"):
        thread()
    assert stand_in.watches == []


def test_other_threads_may_add_watches_during_a_look(stand_in: SimpleNamespace, thread: Callable[[], None]) -> None:
    class Adding:
        over = True

        def look(self, moment: float) -> bool:
            stand_in.watches.append(stand_in.collectives._watch)
            return False

    stand_in.watches[:] = [Adding()]
    stand_in.collectives.all_reduce(STREAM, on_gpu(4))
    with pytest.raises(Ended, match="the process"):
        thread()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING=0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING=2"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, "NCCL_ASYNC_ERROR_HANDLING=0"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT=1"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, None),
        ({"NCCL_BLOCKING_WAIT": "True"}, "NCCL_BLOCKING_WAIT=True"),
        ({"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}, "TORCH_NCCL_USE_COMM_NONBLOCKING=1"),
        ({"wrapped": True}, "communicator"),
    ],
)
def test_torch_keeps_the_collectives_whose_errors_it_treats(
    stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    for name, value in change.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    if "wrapped" in change:  # by TORCH_DISTRIBUTED_DEBUG=DETAIL
        del stand_in.backend._comm_ptr
    given_reason = nccl.why_unwatched(stand_in.group, CUDA)
    assert given_reason is None if reason is None else reason in str(given_reason)
    for by_network in (False, True):
        chosen = nccl.collectives(stand_in.group, CUDA, stand_in.make_current, by_network)  # type: ignore[arg-type]
        assert isinstance(chosen, nccl.DirectCollectives) == (reason is None and not by_network)
        assert (chosen._watch is None) == (reason is not None)
        chosen.all_reduce(STREAM, on_gpu(4))  # type: ignore[arg-type]


def test_torch_enqueues_if_nccls_library_is_not_known(
    stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_library", lambda: None)
    chosen = nccl.collectives(stand_in.group, CUDA, stand_in.make_current, False)  # type: ignore[arg-type]
    assert type(chosen) is nccl.Collectives and chosen._watch is not None


def test_only_the_nccl_that_torch_has_loaded_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator is an address in the library that made it."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    for version, is_torchs in ((22809, True), (22304, False)):
        library = SimpleNamespace(**{name: SimpleNamespace() for name in [*FUNCTIONS, "ncclGetErrorString"]})
        library.ncclGetVersion = lambda pointer, version=version: setattr(pointer._obj, "value", version)
        monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name, mode, library=library: library)
        assert (nccl._library.__wrapped__() is library) == is_torchs
        if is_torchs:  # the size of an address and of a count: by default ctypes passes ints of 32 bits
            for function, sizes in (
                ("AllGather", "888488"),
                ("AllReduce", "8884488"),
                ("ReduceScatter", "8884488"),
                ("Send", "884488"),
                ("Recv", "884488"),
            ):
                argtypes = getattr(library, f"nccl{function}").argtypes
                assert "".join(str(nccl.ctypes.sizeof(argtype)) for argtype in argtypes) == sizes

    def absent(name: str, mode: int) -> None:
        raise OSError(name)

    monkeypatch.setattr(nccl.ctypes, "CDLL", absent)
    assert nccl._library.__wrapped__() is None


def test_the_stored_times_of_the_host_give_the_ratios_of_the_comment() -> None:
    """The runs alternated on one machine, so that each ratio is of one run."""
    rows = [
        json.loads(line)
        for line in (ROOT / "bench/results/nvidia-h200-x2/experiments/host-nccl.jsonl").read_text().splitlines()
    ]
    us = {(row["nccl"], row["run"], row["op"], row["method"]): row["us"] for row in rows}
    for way, end in (("direct", "0.76x to 1.02x of"), ("torch", "1.14x to 1.29x by torch")):
        ratios = [
            time / us[(*key, "library")]
            for (*key, method), time in us.items()
            if key[0] == way and method == "sequential" and (*key, "library") in us
        ]
        assert len(ratios) == 8 and f"{min(ratios):.2f}x to {max(ratios):.2f}x {end.rpartition('x ')[2]}" == end
        assert end in " ".join(str(nccl.__doc__).split())


def test_the_stored_times_of_single_collectives_give_the_figures_of_the_comment() -> None:
    path = ROOT / "bench/results/nvidia-h200-x2/experiments/nccl-calls.jsonl"
    us: dict[str, list[float]] = defaultdict(list)
    for row in map(json.loads, path.read_text().splitlines()):
        us[row["way"]].append(row["us"])
    torchs, nccls = (f"{min(us[way]):.0f} to {max(us[way]):.0f} us" for way in ("torch's NCCL backend", "NCCL"))
    comment = " ".join(str(nccl.__doc__).split())
    assert f"{torchs} to enqueue a collective by torch.distributed's backend, and {nccls} by NCCL" in comment
