"""A World is the only object between an op and the machine.

`weft.init` creates a World from torchrun's environment or a ProcessGroup; `weft.spmd` runs one function as N ranks of
any backend. An op allocates channels and arenas through the World, and enqueues launches, copies and library calls on
its streams. An op never tests which backend runs it. The functions that only authors of ops and engines need are
methods of `world.backend` (backends/base.py), which is as public as the World.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import logging
import math
import operator
import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import triton.language as tl
from triton import JITFunction

from .backends.barrier import barrier
from .backends.base import (
    Arguments,
    Backend,
    CallRecord,
    Stream,
    StreamWork,
    SymmetricTensor,
    timeout_seconds,
)
from .backends.nodes import spread
from .chooser import Chooser
from .errors import Mismatch, Overflow, Timeout, Unsupported, WeftError
from .kernel_launch import Launch
from .lang.channel import STATE_WORDS, BlockChannel
from .lang.intrinsics import GUARD_WORDS, NUMBER_BITS
from .lang.jit import Options, check_arguments, check_launch
from .lang.mapping import StaticMapping, TableMapping
from .residency import Launches
from .symmetric import check_memory

log = logging.getLogger("weft")
P = ParamSpec("P")
R = TypeVar("R")
Lost = TypeVar("Lost", Timeout, Mismatch)
_MISSING = object()
PATIENCE = 1e-3  # the seconds for which a rank waits for the other ranks before a call that it makes for the first time
LATE = 16  # a rank makes at most LATE first calls ahead of the slowest rank
# A World keeps at most so many sequences. 400 shapes of a decomposed gather occupied 92 MiB (4 H200, 2026-11) when each
# group of shards was a sequence of its own; at this size per shape, so many sequences would occupy 236 MiB.
MOST_SEQUENCES = 1024
_COUNTERS = 1 << 20  # the number of counters in one block of channel memory, 4 MiB per rank


def _padded(counters: int) -> int:
    """Return the number of counters that a channel occupies."""
    return (counters + 63) // 64 * 64


def _delegated(method: Callable[Concatenate[Backend, P], R]) -> Callable[Concatenate[World, P], R]:
    """Return a property of the World whose value is the backend's method itself, which saves a call; `help` shows the
    method's signature."""
    signature = inspect.signature(method)
    parameters = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    called = signature.replace(parameters=parameters, return_annotation=signature.empty)
    doc = f"{method.__name__}{called}: {inspect.getdoc(method)}"
    return property(operator.attrgetter(f"backend.{method.__name__}"), doc=doc)  # type: ignore[return-value]


HOST_EXCHANGE = "exchange"
COMPARED = "compared call"  # the rank launches nothing before it has compared this call with the other ranks' calls
POSTED = "posted call"  # the rank may have launched the call before it was compared
CALL_MESSAGES = (COMPARED, POSTED)


class Message(NamedTuple):
    """A message from a rank's host to the hosts of all other ranks. All ranks send their messages in one order, so the
    n-th messages of all ranks belong together. kind: COMPARED or POSTED, with a CallRecord as `content`; or the title
    of an exchange."""

    kind: str
    content: Any


def _as_call(call: object) -> tuple[str, dict[str, Hashable]]:
    """Return the (title, fields) of a call, or the beginning of the repr of an object that is not a call."""
    if isinstance(call, Message):
        return _as_call(call.content) if call.kind in CALL_MESSAGES else (f"{call.kind} of {call.content!r:.80}", {})
    if isinstance(call, tuple) and len(call) == 2 and isinstance(call[1], tuple):
        return call[0], dict(call[1])
    return f"{call!r:.80}", {}


def disagreement(calls: Mapping[int, object]) -> Mismatch:
    """Return the Mismatch that names each rank's call, with the fields that differ between ranks.
    calls: by rank, the (title, fields) of the call that the rank makes, or the object that it exchanges."""
    records = {rank: _as_call(call) for rank, call in calls.items()}
    descriptions = []
    for rank, (title, own_fields) in records.items():
        words = [f"rank {rank}: {title}"]
        for name, value in own_fields.items():
            others = [fields.get(name, _MISSING) for _, fields in records.values()]
            if any(value != peer_value for peer_value in others):
                words.append(f"{name}={_shortened(value, others)}")
        descriptions.append(" ".join(words))
    return Mismatch(f"ranks disagree on this call: {'; '.join(descriptions)}")


def _shortened(value: object, others: Sequence[object]) -> str:
    """Return a value as text. A dataclass, such as a plan, is shortened to the fields that differ among the ranks'
    values of its type, unless no other rank's value has its type."""
    alike = [peer for peer in others if type(peer) is type(value)]
    if not is_dataclass(value) or len(alike) == 1:
        return str(value)
    differing = []
    for name in (field.name for field in fields(value)):
        own_value, peer_values = getattr(value, name), [getattr(peer, name) for peer in alike]
        if any(peer_value != own_value for peer_value in peer_values):
            differing.append(
                f"{name}={_shortened(own_value, peer_values) if is_dataclass(own_value) else repr(own_value)}"
            )
    return f"{type(value).__name__}({', '.join(differing)})"


def _check_channel(
    name: str, counters: int, mapping: StaticMapping | TableMapping | None, arrivals: int | Sequence[int] | None
) -> list[int] | None:
    """Raise an error for arguments from which no channel can be created; return the arrivals of each counter."""
    if not isinstance(name, str) or not isinstance(counters, int):
        raise TypeError(f"a channel has a name and a number of counters, not {name!r} and {counters!r}")
    if counters < 1:
        raise ValueError(f"channel {name!r} of {counters} counters")
    if counters > _COUNTERS:
        raise WeftError(f"{name}: {counters} channels; at most {_COUNTERS}")
    if mapping is not None and not isinstance(mapping, tuple):
        raise TypeError(f"channel {name!r}: the mapping is a StaticMapping, a TableMapping or None, not {mapping!r}")
    if arrivals is None:
        return None
    try:
        counts = [operator.index(n) for n in ([arrivals] * counters if isinstance(arrivals, int) else arrivals)]
    except TypeError:
        raise TypeError(f"channel {name!r}: arrivals are an integer, or one a counter, not {arrivals!r}") from None
    if len(counts) != counters:
        raise ValueError(f"channel {name!r} of {counters} counters, but arrivals of {len(counts)}")
    return counts


@dataclass(eq=False)
class Arena:
    """Two halves of symmetric memory, to which one-launch ops write alternately, and the counter that selects the half.

    An op's kernel writes half `epoch % 2` and adds one to `epoch` when it ends. Every such kernel acquires from every
    peer, so no kernel writes to a half while a peer may still read it (ops/all_gather_matmul/kernels.py contains the
    proof).
    """

    memory: SymmetricTensor
    half: int  # bytes of a half
    slack: int  # bytes after the two halves
    epoch: torch.Tensor  # int32 [1], the number of calls so far
    last_stream: Stream = None
    last_captured: Stream = None


@dataclass(frozen=True, eq=False)
class Levels:
    """The two Worlds of a rank whose World spans several nodes of equal size. `node` contains the ranks of this rank's
    node, which can address each other's memory. `across` contains, from each node, the rank with this rank's local
    rank, in the order of the nodes."""

    node: World
    across: World


Collect = Callable[[float | None], list[Any] | None]  # returned by `Backend.post`
Memo = dict[Hashable, Any]


class PreparedCalls(Protocol):
    """An object prepared for calls that refers to memory that the World may replace (`prepared.Prepared`)."""

    def forget(self) -> None: ...


class Workspace(Protocol):
    """Memory shared by calls that may be on several streams (`World.order`), with the stream of the last call outside
    captures and the stream of the last call in a capture."""

    last_stream: Stream
    last_captured: Stream


class World:
    """A rank's view of all ranks. `weft.init` and `weft.spmd` make it."""

    _all: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()

    def __init__(self, backend: Backend, name: str | None = None, *, batch_invariant: bool | None = None) -> None:
        """batch_invariant: as in `weft.init`."""
        timeout_seconds()  # raises an error for an invalid WEFT_TIMEOUT, even if this World never waits
        self.backend = backend
        self.rank, self.size, self.device = backend.rank, backend.size, backend.device
        self.group = backend.group  # the group of torch.distributed; None for emulated ranks
        self.sm_count = backend.sm_count  # the number of SMs of this rank's GPU, or of an emulated rank
        self.nodes = backend.nodes  # the number of each rank's node, in the order of the nodes' first ranks
        self.node = self.nodes[self.rank]  # `split(world.node)` creates the World of the ranks on this node
        self.other_ranks = tuple((self.rank + step) % self.size for step in range(1, self.size))  # the next one first
        self.multi_node_unsupported = spread(
            backend.nodes
        )  # the reason why only NCCL can move data (there are several nodes), or None on one node
        asked = os.environ.get("WEFT_BATCH_INVARIANT", "0") == "1" if batch_invariant is None else batch_invariant
        self.batch_invariant = asked  # whether ops keep the promise of `weft.init(batch_invariant=True)`
        if asked and (reason := self.multi_node_unsupported or backend.reference and "CPU processes compute by torch"):
            raise Unsupported(f"batch_invariant: {reason}, whose order of sums depends on the batch")
        # The name is the same in each run, for caches of compiled code. The name contains the size, because torch
        # caches compiled graphs for later processes under the World's name.
        self.name = name or f"{backend.name}:{next(backend.world_numbers)}:{self.rank}/{self.size}"
        self._channels: dict[Hashable, BlockChannel] = {}
        self._arrivals: dict[Hashable, int | list[int] | None] = {}  # by channel, as passed by the caller
        self._channel_memory: dict[int, SymmetricTensor] = {}  # keyed by the address of this rank's counters
        self._ranges: list[tuple[int, int, str]] = []  # sorted (first address, bytes, name)
        self._shared: list[tuple[int, int, SymmetricTensor]] = []  # sorted (first address, number, memory)
        self._block: SymmetricTensor | None = None
        self._used = 0
        self._arenas: list[Arena] = []  # the last arena is in use; CUDA graphs refer to the epochs of the earlier ones
        self._buffers: dict[str, SymmetricTensor] = {}
        self._messages = 0  # messages sent so far; the same on every rank, even after messages were found to differ
        self._numbers: dict[CallRecord, int] = {}  # the number of each call that was the same on all ranks
        self._calls: dict[int, CallRecord] = {0: ("no call", ())}  # by number, which is the index of the call's message
        self.reported_losses, self._reported_by_rank = 0, [0] * (GUARD_WORDS - 4)  # dropped rows already reported
        self.number = 0  # the number of this rank's current or last call
        self._uncompared: list[tuple[CallRecord, Collect]] = []  # posted calls that have not been compared yet
        self._logged: set[str] = set()
        self._closed = False
        self._lost: Timeout | Mismatch | None = None  # the error that every later use raises (`_lose`)
        self._levels: Levels | None = None
        self._cache: Memo = {}
        self.prepared: Memo = {}  # prepared launches and calls (`Prepared`, `kernel_launch.prepared`)
        self.prepared_calls: weakref.WeakSet[PreparedCalls] = (
            weakref.WeakSet()
        )  # prepared calls that refer to memory that calls share
        self._sequences = 0  # the sequences made since prepared calls were last dropped (`sequence`)
        self.decided: Memo = {}  # the plan of each call whose arguments were checked and compared across ranks
        self.ran: Any = None  # the call and plan that an op ran last (`prepared.Prepared`)
        self.forward_passes: Memo = {}  # calls of compiled graphs (`torch_library.ForwardKey`), for backward passes
        self.choices = Chooser(backend.clock, backend.capturing, self)  # the candidates that were timed
        self.uploads = 0  # number of calls of `tensor`
        self.drops = 0  # number of calls of `forget_prepared`
        self.max_captured_rows: int | None = None  # no CUDA graph captures calls with more rows; None: no limit
        World._all[self.name] = self
        backend.name_counters(self._describe)
        backend.name_calls(self._disagreement)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend.name!r}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """Return the same World: a copy of a module that refers to a World communicates with the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a World cannot be pickled; save a module's state_dict() instead")

    def split(self, color: Hashable) -> World:
        """Return the World of the ranks that pass the same `color`, in the order of their ranks in this World (as
        MPI_Comm_split). The call is collective.

        With 4 ranks, `split(rank // 2)` creates the Worlds of ranks (0, 1) and (2, 3), and `split(rank % 2)` creates
        the Worlds of ranks (0, 2) and (1, 3). The new World has separate memory, channels and plans. If Worlds share
        ranks, all ranks must call the ops of these Worlds in one order. The caller must keep the new World alive,
        because no op does. Raises Unsupported if this World itself contains only some of torch.distributed's ranks.
        """
        colors = self.exchange(color)
        groups = [
            [rank for rank, rank_color in enumerate(colors) if rank_color == group_color]
            for group_color in dict.fromkeys(colors)
        ]
        return World(self.backend.split(groups), batch_invariant=self.batch_invariant)

    @property
    def levels(self) -> Levels:
        """Return the node's World and the World across nodes. The first access is collective; later accesses return the
        same Worlds. If a wait expires in one of them, this World also raises its Timeout. Raises Unsupported if the
        ranks do not form two levels (`Backend.two_level_unsupported`)."""
        if self._levels is None:
            if self.backend.two_level_unsupported is not None:
                raise Unsupported(f"no two levels: {self.backend.two_level_unsupported}")
            self._no_capture("levels")
            self._levels = Levels(*map(World, self.backend.levels()))
        return self._levels

    @property
    def alone(self) -> World:
        """Return the World of this rank alone, always the same object. The ops of that World wait for no other rank, so
        they may run at the same time as an op of this World on a different stream. With plan FusedMoe, whose programs
        wait for each other, the two ops run at the same time only if both fit on the SMs. The call is not
        collective."""

        def make() -> World:
            return World(self.backend.alone(), batch_invariant=self.batch_invariant)

        return self if self.size == 1 else self.cached("alone", make)

    def may_capture(self, rows: int) -> bool:
        """Return whether a CUDA graph may capture calls with this number of rows."""
        return self.max_captured_rows is None or rows <= self.max_captured_rows

    # -- agreement ---------------------------------------------------------------------------------------------------
    def check_same_on_all_ranks(self, title: str, /, **fields: Hashable) -> int:
        """Return the number of this call, the same on every rank. Raise Mismatch on every rank unless all ranks make
        the same call with the same fields.

        The check is collective the first time that this rank makes the call (title, fields), and costs nothing
        afterwards.
        """
        key = (title, tuple(fields.items()))
        known = self._numbers.get(key)
        if known is not None:
            if self._uncompared:
                self._collect(None)
            return known
        self._compare(key)
        return self._numbered(key)

    def post_call(self, title: str, /, **fields: Hashable) -> int:
        """Return the number of this call as `check_same_on_all_ranks` does, but wait at most PATIENCE for late ranks.
        The calls of late ranks are compared at the next call of an op, exchange or `synchronize`, which raises Mismatch
        on every rank. Until then the results of ranks that disagree are undefined. Only ops whose waits are all bounded
        may use this method (`Op.check_same_on_all_ranks`)."""
        key = (title, tuple(fields.items()))
        known = self._numbers.get(key)
        if known is not None:
            return known
        self._no_capture(title)
        if len(self._uncompared) == LATE:
            self._collect(None)
        self._raise_if_lost()
        collect = self.backend.post(Message(POSTED, key))
        if collect is None:
            self._compare(key)
            return self._numbered(key)
        self._messages += 1
        number = self._numbered(key)
        self._uncompared.append((key, collect))
        self._collect(PATIENCE)
        return number

    def _numbered(self, key: CallRecord) -> int:
        """Return the number of a call, which is the number of the last message sent."""
        number = self._numbers[key] = self._messages
        self._calls[number] = key
        return number

    def begin(self, number: int | None, launches: Launches | None = None, capturing: bool = False) -> None:
        """Begin the call with this number (`check_same_on_all_ranks`) on this rank; number is None for a call that
        ranks do not compare. launches: the call's launches that wait for other ranks, or None (`order_residents`).

        From now on kernels compare the number across ranks in memory (`lang.intrinsics.same_call`). Raises the errors
        of `check`, and Mismatch if the backend compares every call on the host and ranks make different calls.
        """
        if self._closed:
            raise WeftError(f"rank {self.rank}'s World is closed: an operator needs an open one")
        if self._lost is not None:
            self._raise_if_lost()
        compares = number is not None and self.backend.compares
        if self._uncompared:
            self._collect(None if compares else 0.0)
        try:  # the body of `_bounded`, inlined because this line runs in every call
            self.backend.check()
            if self._levels is not None:
                self._check_node(self._levels)
            if number is not None:
                self.number = number
            if compares:
                title, fields = self._calls[self.number]
                calls = self.backend.compared((title, (*fields, ("first_call", False))))
                if calls:
                    raise self._lose(disagreement(calls))
        except Timeout as error:
            self._lose(error)
            raise
        if launches is not None and (ledgers := self.backend.ledgers) is not None:
            ledger = ledgers.captured if capturing else ledgers.eager
            stream, last = self.backend.current_stream(), ledger.last_stream
            if launches not in ledger.recent or not (stream is last or stream == last):
                self.order_residents(launches, capturing)

    def calls(self, name: str) -> BlockChannel:
        """Return the channel in which launches compare the numbers of their calls (`lang.intrinsics.same_call`). Every
        rank must make these launches in the same order. The first call is collective."""
        return self.channel(f"calls of {name}", 2 * self.size, None)

    def _disagreement(self, words: Mapping[int, int]) -> Mismatch:
        """Return the Mismatch that kernels found. The World is lost, because ranks are no longer at the same call."""
        numbers = {rank: word & (1 << NUMBER_BITS) - 1 for rank, word in sorted(words.items())}
        return self._lose(disagreement({r: self._calls.get(n, f"call {n}") for r, n in numbers.items()}))

    def _collect(self, patience: float | None) -> None:
        """Compare the posted calls that all ranks post within `patience` seconds; with None, wait and compare all
        posted calls."""
        while self._uncompared:
            key, collect = self._uncompared[0]
            messages = self._bounded(collect, patience)
            if messages is None:
                return
            del self._uncompared[0]
            self._raise_unless_same(key, messages)

    def _compare(self, key: CallRecord) -> None:
        """Raise Mismatch on every rank unless all ranks make this call. Collective."""
        self._no_capture(key[0])
        self._raise_unless_same(key, self._gathered(Message(COMPARED, key)))

    def _raise_unless_same(self, key: CallRecord, messages: Sequence[object]) -> None:
        calls = Message(COMPARED, key), Message(POSTED, key)
        if not all([message in calls for message in messages]):
            raise self._mismatch(messages)

    def exchange(self, obj: R, title: str = HOST_EXCHANGE) -> list[R]:
        """Return every rank's object, by rank. The call is collective, and blocks the host until all ranks have made
        it. Raises Mismatch on every rank if a rank exchanges under a different title, or calls an op instead."""
        messages = self._gathered(Message(title, obj))
        if not all([isinstance(m, Message) and m.kind == title for m in messages]):
            raise self._mismatch(messages)
        return [m.content for m in messages]

    def _mismatch(self, messages: Sequence[object]) -> Mismatch:
        """Return the Mismatch for messages that do not belong together. The World is lost if one of them was POSTED:
        its sender may have launched the call, and may have sent messages of later calls."""
        mismatch = disagreement(dict(enumerate(messages)))
        if any(isinstance(m, Message) and m.kind == POSTED for m in messages):
            self._lose(mismatch)
        self.decided.clear()
        self.choices.trials.clear()
        return mismatch

    def _gathered(self, message: Message) -> list[Message]:
        """Return the messages of all ranks, by rank. Collective."""
        if self._uncompared:
            self._collect(None)
        self._raise_if_lost()
        self._messages += 1
        if self.backend.compares_at_once:
            # Another rank may instead make a call here that it has made before. If all ranks are in an exchange, their
            # messages are compared.
            title, fields = message.content if message.kind in CALL_MESSAGES else (message.kind, ())
            calls = self.backend.compared((title, (*fields, ("first_call", True))))
            if calls and any(("first_call", True) not in peer_fields for _, peer_fields in calls.values()):
                raise self._lose(disagreement(calls))
        return self._bounded(self.backend.exchange, message)

    # -- the end of a World ------------------------------------------------------------------------------------------
    def _bounded(self, wait: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of wait(..), in which ranks wait for each other. After a Timeout, this rank can no longer
        match the messages and signals of other ranks with its own: the World is lost."""
        try:
            return wait(*args, **kwargs)
        except Timeout as error:
            self._lose(error)
            raise

    def _lose(self, error: Lost) -> Lost:
        """Make every later use of the World raise the error, and return the error."""
        if self._lost is None:
            self._lost = type(error)(
                f"rank {self.rank}'s World is unusable since ranks went apart (weft.init makes another): {error}"
            )
        self._uncompared.clear()
        self.decided.clear()  # a call that is in the cache is not checked
        return error

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    def check(self) -> None:
        """Raise Timeout if a device-side wait has expired, Mismatch if ranks were found to disagree, and WeftError if
        the World is closed. The check is cheap enough to run in every call."""
        self.begin(None)

    def _check_node(self, levels: Levels) -> None:
        """Raise the error of a wait that expired in the node's World, which numbers its ranks differently."""
        try:
            levels.node.check()
        except Timeout as e:
            raise Timeout(f"node {self.node}, whose ranks count from 0: {e}") from None

    def synchronize(self) -> None:
        """Wait until all operations on this rank's streams are done. Raises the errors of `check`, and raises Overflow
        once for rows that were dropped for lack of room."""
        self.wait_for_streams()
        self.result_or_overflow(None, self.backend.left_out())

    def wait_for_streams(self) -> None:
        """Wait as `synchronize` does, but raise no Overflow: inside a call, a rank that has dropped rows must continue
        like the other ranks."""
        if self._uncompared:
            self._collect(None)  # first, because other ranks may not make a call for whose kernels this rank waits
        self._raise_if_lost()
        self._bounded(self.backend.synchronize)
        if self._levels is not None:
            self._bounded(self._check_node, self._levels)

    def result_or_overflow(self, result: R, lost: int) -> R:
        """Return the result of a call that has run. If earlier calls dropped rows, raise Overflow with that result,
        once for these rows (`lost`: the number of rows dropped in all calls). A backward pass does not raise Overflow,
        because the other ranks continue the pass."""
        if lost > self.reported_losses and torch._C._current_graph_task_id() == -1:
            reported, self._reported_by_rank = self._reported_by_rank, self.backend.left_out_by_rank()
            self.reported_losses = max(lost, sum(self._reported_by_rank))  # a running call may have counted more rows
            counts = [current - before for current, before in zip(self._reported_by_rank, reported, strict=True)]
            lines = [self._overflow_of(rank, rows) for rank, rows in enumerate(counts) if rows]
            raise Overflow(
                f"rank {self.rank}: {'; '.join(lines)} more than max_rows (or max_m) has room for; "
                "these were dropped, in a call before this one, which was made: its result is this error's `result`",
                result,
            )
        return result

    def _overflow_of(self, rank: int, rows: int) -> str:
        return (
            f"its experts received {rows} rows"
            if rank == self.rank
            else f"rank {rank}'s experts received {rows} rows of this rank's tokens"
        )

    def finish(self, stream: Stream) -> None:
        """Finish results on `stream` that are about to be returned to the caller (`Backend.finish`)."""
        if self._uncompared:
            self._collect(0.0)
        self.backend.finish(stream)

    def close(self) -> None:
        """Make operators on this World raise WeftError. The World's memory is released when Python collects the World,
        which must not happen while another thread captures a CUDA graph. Graphs that captured the World's calls must
        not be replayed after that."""
        self._closed = True
        self.decided.clear()  # a call that is in the cache is not checked
        if self._levels is not None:
            self._levels.node.close()
            self._levels.across.close()

    def _no_capture(self, title: str) -> None:
        if self.backend.capturing():
            raise WeftError(
                f"{title}: first use of this shape inside a CUDA graph capture, where its workspace cannot be "
                "allocated; call it twice with the same shapes before capturing"
            )

    def log_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message that is the same on all ranks, once for each World, by rank 0."""
        if message not in self._logged:
            self._logged.add(message)
            if self.rank == 0:
                log.log(level, message)

    def cached(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return the object that an op caches under a key (workspace, descriptors), which is created on first use."""
        if key not in self._cache:
            self._no_capture(str(key))
            with self.persistent_allocation():
                self._cache[key] = make()
        return self._cache[key]

    # -- symmetric memory --------------------------------------------------------------------------------------------
    def symmetric(self, shape: Sequence[int], dtype: torch.dtype, name: str = "user") -> SymmetricTensor:
        """Return a zeroed tensor of one shape on every rank, which all ranks can address. The call is collective.
        Raises Mismatch on every rank if the ranks' arguments differ.

        Every call allocates new memory. The name appears in reports and errors, and need not be unique.
        """
        shape = check_memory(shape, dtype)
        self._compare((f"symmetric {name!r}", (("shape", shape), ("dtype", dtype))))
        with self.persistent_allocation():
            memory = self._bounded(self.backend.symmetric, max(math.prod(shape), 1) * dtype.itemsize, name)
        self._name_range(memory.local, name)
        bisect.insort(self._shared, (memory.local.data_ptr(), len(self._shared), memory))
        tensor = memory.view(0, shape, dtype)
        self.backend.name_elements(tensor.local, name)
        return tensor

    def shared(self, t: torch.Tensor) -> tuple[SymmetricTensor, tuple[int, int]] | None:
        """Return `t` as a symmetric tensor with its location (the number of the allocation, the byte offset), which
        must be the same on all ranks; or None unless `t` is contiguous and inside memory that `symmetric` allocated.
        """
        i = bisect.bisect_right(self._shared, (t.data_ptr(), len(self._shared))) - 1
        if i < 0 or not t.is_contiguous():
            return None
        start, number, memory = self._shared[i]
        offset, nbytes = t.data_ptr() - start, t.numel() * t.element_size()
        if offset + nbytes > memory.local.numel():
            return None
        view = self.cached(
            ("shared", t.data_ptr(), t.shape, t.dtype), lambda: memory.view(offset, tuple(t.shape), t.dtype)
        )
        return view, (number, offset)

    def _name_range(self, memory: torch.Tensor, name: str) -> tuple[int, int, str]:
        named = (memory.data_ptr(), memory.numel() * memory.element_size(), name)
        bisect.insort(self._ranges, named)
        return named

    def _describe(self, address: int) -> str:
        i = bisect.bisect_right(self._ranges, (address, 1 << 62, "")) - 1
        start, nbytes, name = self._ranges[i] if i >= 0 else (0, 0, "")
        if address < start + nbytes:
            return f"channel {(address - start) // 4} of {name}"
        if address < start + _padded(nbytes // 4) * 4:
            return (
                f'past the end: channel {(address - start) // 4} of "{name}", which has channels 0..{nbytes // 4 - 1}'
            )
        return f"address {address:#x}"

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a small device tensor that contains `values`. The host does not wait for the device."""
        self.uploads += 1
        return self.backend.tensor(values, dtype)

    def words(self, *tables: Sequence[int]) -> list[torch.Tensor]:
        """Return int32 tensors of these values, all filled by one copy to the device; each begins at a multiple of 16
        bytes."""
        values: list[int] = []
        spans = []
        for table in tables:
            spans.append(slice(len(values), len(values) + len(table)))
            values += [*table, *[0] * (-len(table) % 4)]
        words = self.tensor(values, torch.int32)
        return [words[span] for span in spans]

    def channel(
        self,
        name: str,
        counters: int,
        mapping: StaticMapping | TableMapping | None,
        arrivals: int | Sequence[int] | None = None,
    ) -> BlockChannel:
        """Return the BlockChannel of this name, with `counters` counters on every rank. The first use is collective,
        and zeroes the counters.

        arrivals: the number of notifies that each counter receives in every call (one number, or one per counter), if
        that is fixed; the emulator then reports lost and doubled signals. The kernel must then count its calls
        (`wl.end_call`). arrivals may differ between ranks; name and `counters` may not (Mismatch on every rank).
        """
        key = (name, counters)
        channel = self._channels.get(key)
        if channel is None:
            counts_per_call = _check_channel(name, counters, mapping, arrivals)
            self._compare((f"channel {name!r}", (("counters", counters),)))
            self._arrivals[key] = arrivals if isinstance(arrivals, int) else counts_per_call
            with self.persistent_allocation():
                if self._block is None or self._used + counters > _COUNTERS:
                    self._block, self._used = self._bounded(self.backend.symmetric, _COUNTERS * 4, "channels"), 0
                memory = self._block.view(self._used * 4, (counters,), torch.int32)
                state = self.tensor([self.rank] + [0] * (STATE_WORDS - 1), torch.int32)
            self._used += _padded(counters)
            for rank, peer_counters in enumerate(memory.peers):
                self._name_range(peer_counters, name if rank == self.rank else f"{name}, rank {rank}'s copy")
            self._channel_memory[memory.local.data_ptr()] = memory
            self.backend.register_channel(name, memory.local, state, counts_per_call)
            channel = self._channels[key] = BlockChannel(
                memory.local, memory.addresses, state, self.backend.guard(), mapping, tl.constexpr(self.size)
            )
        elif arrivals is not None and arrivals != (registered := self._arrivals[key]):
            if isinstance(arrivals, int) or list(arrivals) != registered:
                raise ValueError(f"channel {name!r} was made with arrivals {registered}, not {arrivals}")
        return channel._replace(mapping=mapping)

    def local_channel(self, name: str, arrivals: Sequence[int]) -> BlockChannel:
        """Return a new BlockChannel in this rank's own memory. arrivals: for each counter, the number of notifies that
        it receives in every call."""
        with self.persistent_allocation():
            counters = self.backend.zeros((len(arrivals),), torch.int32)
            state = self.tensor([self.rank] + [0] * (STATE_WORDS - 1), torch.int32)
            nowhere = self.backend.zeros((self.size,), torch.int64)
        named = self._name_range(counters, name)
        weakref.finalize(counters, self._ranges.remove, named)
        self.backend.register_channel(name, counters, state, list(arrivals))
        return BlockChannel(counters, nowhere, state, self.backend.guard(), None, tl.constexpr(self.size))

    def counter(self, ch: BlockChannel, channel: int, rank: int) -> torch.Tensor:
        """Return a rank's counter of a channel, as an int32 tensor of one word (for `signal` and `wait`)."""
        memory = self._channel_memory.get(ch.counters.data_ptr())
        if memory is None or not 0 <= channel < memory.local.numel():
            raise WeftError(f"channel {channel} of {ch.counters.numel()} is not one of this World's")
        return memory.peers[rank][channel : channel + 1]

    def arena(self, half: int, row: int = 0) -> Arena:
        """Return two halves of at least `half` bytes each; the second begins at a multiple of `row` bytes. The call is
        collective if the memory has to grow; the memory then at least doubles."""
        if not self._arenas or self._arenas[-1].half < half or self._arenas[-1].slack < row:
            self._no_capture("arena")
            if self._arenas:
                self.wait_for_streams()
                self.exchange(None, "growth of the arena")
                half = max(half, 2 * self._arenas[-1].half)
            half = (half + (1 << 21) - 1) // (1 << 21) * (1 << 21) if half > 1 << 16 else (half + 255) // 256 * 256
            slack = max(row, 1 << 17 if half > 1 << 16 else 1 << 12)
            memory = self.symmetric((2 * half + slack,), torch.uint8, "arena")
            self.forget_prepared()
            with self.persistent_allocation():
                self._arenas.append(Arena(memory, half, slack, self.zeros((1,), torch.int32)))
        return self._arenas[-1]

    def buffer(self, name: str, nbytes: int) -> SymmetricTensor:
        """Return the symmetric buffer of this name, of at least `nbytes`, which calls of one op share. The call is
        collective if the buffer has to grow; the buffer then at least doubles."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.local.numel() < nbytes:
            self._no_capture(name)
            if buffer is not None:
                self.wait_for_streams()
                self.exchange(None, f"growth of {name}")
                nbytes = max(nbytes, 2 * buffer.local.numel())
            self.forget_prepared()
            self._buffers[name] = self.symmetric(((nbytes + 255) // 256 * 256,), torch.uint8, name)
        return self._buffers[name]

    def forget_prepared(self) -> None:
        """Drop everything prepared for calls. If memory that prepared calls use is replaced, all ranks replace it in
        the same call, so that their later calls use the same memory."""
        self.drops += 1
        self._sequences = 0
        self.prepared.clear()
        for call in list(self.prepared_calls):
            call.forget()
        self.prepared_calls.clear()

    def order(self, holder: Workspace, stream: Stream) -> None:
        """Serialise the uses of a shared workspace (`holder.last_stream`) by different streams of this rank; inside a
        capture, serialise the uses by the streams in that capture, and outside, the uses by the other streams."""
        capturing = self.backend.capturing()
        if capturing:
            last, holder.last_captured = holder.last_captured, stream
        else:
            last, holder.last_stream = holder.last_stream, stream
        if last is stream or last is None or last == stream:  # `is` first, since torch compares streams in Python
            return
        # An event of a captured stream would add an eager call's stream to the capture.
        if self.backend.captures(last) == capturing:
            self.backend.wait_event(stream, self.backend.record(last))

    def order_residents(self, launches: Launches, capturing: bool) -> None:
        """Make a call on the current stream start after those calls on other streams that might leave too few SMs free
        for it (`residency.py`). Launches that each wait for SMs that the other occupies would never end."""
        ledgers = self.backend.ledgers
        if ledgers is None:
            return
        ledger, stream = ledgers.captured if capturing else ledgers.eager, self.current_stream()
        for earlier in ledger.enter(stream, launches):
            if self.backend.captures(earlier) == capturing:
                self.backend.start_after(stream, earlier)

    def join_side_streams(self) -> None:
        """Make the current stream wait for all side streams of this rank, after an exception in a call that uses them.

        Copies and kernels on the side streams may still access memory that the exception frees and that the allocator
        gives to the current stream's next operation.
        """
        if not (sides := self.backend.side_streams()):
            return
        stream, capturing = self.current_stream(), self.backend.capturing()
        for side in sides:
            if side != stream and self.backend.captures(side) == capturing:
                self.wait_event(stream, self.record(side))

    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments | Callable[[], Arguments],
        options: Options,
        stream: Stream,
    ) -> None:
        """Run `grid` programs of a `weft.jit` kernel (`Backend.launch`). A `weft.Launch` costs less host time for a
        kernel that is launched repeatedly.

        If the kernel has a BlockChannel argument, ranks first compare its grid and its integers, for which Triton would
        compile different kernels. That comparison is collective for each new combination, and raises Mismatch on every
        rank.
        """
        check_launch(kernel, grid, options)
        args = args() if callable(args) else args
        check_arguments(kernel, args, self.device)
        if any(isinstance(a, BlockChannel) for a in args.values()):
            free = {p.name for p in kernel.params if p.do_not_specialize}
            numbers = {n: a for n, a in args.items() if isinstance(a, int) and n not in free}
            try:
                self.begin(self.check_same_on_all_ranks(f"launch of {kernel.__name__} by {grid} programs", **numbers))
            except Mismatch as e:
                raise Mismatch(
                    f"{e}. A kernel reads its rank by wl.rank_of(ch); another integer that differs is named in "
                    "@weft.jit(do_not_specialize=...)"
                ) from None
        self.backend.launch(kernel, grid, args, options, stream)

    # -- stream operations built here --------------------------------------------------------------------------------
    def barrier(self, stream: Stream = None, name: str = "barrier") -> torch.Tensor:
        """Make a stream wait for all ranks. Every rank must call the barriers of one name in the same order. Return the
        number of barriers of this name so far, int32 [1] on the device, which the next barrier increments."""
        launch, count = self.cached(("barrier", name), lambda: self._barrier(name))
        launch(stream or self.current_stream(), number=self.number)
        return count

    def sequence(self, stream: Stream, work: Callable[[StreamWork], object]) -> Callable[[], StreamWork]:
        """Return a function that returns the StreamWork of a call (`Backend.sequence`). The barriers of `work` contain
        `number`, which is still the previous call's while a trial makes calls. Therefore each number has a sequence of
        its own. A sequence occupies GPU memory, so beyond MOST_SEQUENCES the World drops everything prepared for
        calls."""

        @functools.cache
        def sequence_of(number: int) -> Callable[[], StreamWork]:
            if self._sequences >= MOST_SEQUENCES:
                self.forget_prepared()
            self._sequences += 1
            return self.backend.sequence(stream, work)

        return lambda: sequence_of(self.number)()

    def _barrier(self, name: str) -> tuple[Launch, torch.Tensor]:
        count = self.zeros((1,), torch.int32)
        return Launch(self, barrier, 1, dict(num_warps=1), calls=self.calls(name), epoch=count), count

    # -- backend methods that kernel authors call, documented in backends/base.py -------------------------------------
    empty = _delegated(Backend.empty)
    zeros = _delegated(Backend.zeros)
    persistent_allocation = _delegated(Backend.persistent_allocation)
    current_stream = _delegated(Backend.current_stream)
    side_stream = _delegated(Backend.side_stream)
    on = _delegated(Backend.on)
    record = _delegated(Backend.record)
    wait_event = _delegated(Backend.wait_event)
    run_launch = _delegated(Backend.run_launch)
    load = _delegated(Backend.load)
    copy = _delegated(Backend.copy)
    signal = _delegated(Backend.signal)
    wait = _delegated(Backend.wait)
    call = _delegated(Backend.call)
    all_gather = _delegated(Backend.all_gather)
    reduce_scatter = _delegated(Backend.reduce_scatter)
    all_reduce = _delegated(Backend.all_reduce)
