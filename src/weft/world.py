"""World: the one object between an op and the machine.

`init` makes it from torchrun's environment or a ProcessGroup; `spmd` runs one function as N ranks of any backend. An op
allocates channels and arenas through it, gives it launches, copies and library calls in stream order, and never asks
which backend it is on.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import logging
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import triton.language as tl
from torch.distributed import ProcessGroup
from triton import JITFunction

from .backends.base import (
    Arguments,
    Backend,
    Options,
    Stream,
    SymmetricTensor,
    check_memory,
    timeout_seconds,
)
from .backends.nodes import spread
from .chooser import Chooser
from .errors import Mismatch, Overflow, Timeout, Unsupported, WeftError
from .kernel_launch import Launch
from .lang.channel import STATE_WORDS, BlockChannel
from .lang.intrinsics import NUMBER_BITS
from .lang.jit import check_arguments, check_launch
from .lang.mapping import StaticMapping, TableMapping
from .scale import Scale

log = logging.getLogger("weft")
_numbers = itertools.count()
P = ParamSpec("P")
R = TypeVar("R")
_ABSENT = object()
PATIENCE = 1e-3  # seconds that a rank waits for others before a call that it makes for the first time
LATE = 16  # such calls that a rank makes at most before all others have made the first of them
_COUNTERS = 1 << 20  # counters of one block of channel memory: 4 MiB a rank


def _padded(counters: int) -> int:
    """Counters that a channel takes up."""
    return (counters + 63) // 64 * 64


def _passed_on(method: Callable[Concatenate[Backend, P], R]) -> Callable[Concatenate[World, P], R]:
    """The backend's method as the World's own, without a call in between; `help` shows how it is called."""
    signature = inspect.signature(method)
    parameters = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    called = signature.replace(parameters=parameters, return_annotation=signature.empty)
    doc = f"{method.__name__}{called}: {inspect.getdoc(method)}"
    return property(operator.attrgetter(f"backend.{method.__name__}"), doc=doc)  # type: ignore[return-value]


def _told(call: object) -> tuple[str, dict[str, Hashable]]:
    """Return (what, fields) of a call, or the first words of anything else."""
    if isinstance(call, tuple) and len(call) == 2 and isinstance(call[1], tuple):
        return call[0], dict(call[1])
    return f"{call!r:.80}", {}


def disagreement(calls: Mapping[int, object]) -> Mismatch:
    """Return the Mismatch that says, for each rank, what of its call is not the same on all of them, or the first words
    of something else that it exchanges. calls: (what, fields) of the call that each rank is at, by rank."""
    told = {rank: _told(call) for rank, call in calls.items()}
    said = []
    for rank, (what, mine) in told.items():
        words = [f"rank {rank}: {what}"]
        for name, value in mine.items():
            others = [fields.get(name, _ABSENT) for _, fields in told.values()]
            if any(value != other for other in others):
                words.append(f"{name}={_shortened(value, others)}")
        said.append(" ".join(words))
    return Mismatch(f"ranks disagree on this call: {'; '.join(said)}")


def _shortened(value: object, others: Sequence[object]) -> str:
    """A plan or another dataclass by the fields in which those of its type differ; all of it where there is no
    other."""
    alike = [other for other in others if type(other) is type(value)]
    if not is_dataclass(value) or len(alike) == 1:
        return str(value)
    said = []
    for name in (field.name for field in fields(value)):
        mine, theirs = getattr(value, name), [getattr(other, name) for other in alike]
        if any(their != mine for their in theirs):
            said.append(f"{name}={_shortened(mine, theirs) if is_dataclass(mine) else repr(mine)}")
    return f"{type(value).__name__}({', '.join(said)})"


def _check_channel(
    name: str, counters: int, mapping: StaticMapping | TableMapping | None, arrivals: int | Sequence[int] | None
) -> list[int] | None:
    """Raise for what no channel can be made of; return the arrivals of each counter."""
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
        each = [operator.index(n) for n in ([arrivals] * counters if isinstance(arrivals, int) else arrivals)]
    except TypeError:
        raise TypeError(f"channel {name!r}: arrivals are an integer, or one a counter, not {arrivals!r}") from None
    if len(each) != counters:
        raise ValueError(f"channel {name!r} of {counters} counters, but arrivals of {len(each)}")
    return each


@dataclass(eq=False)
class Arena:
    """Two halves of symmetric memory that one-launch ops write alternately, and the word that says whose turn it is.

    An op's kernel writes half `turn % 2` and adds one to `turn` when it ends. Every such kernel hears from every peer,
    so a half is never written while a peer may still read it (ops/all_gather_matmul/kernels.py has the argument).
    """

    memory: SymmetricTensor
    half: int  # bytes
    slack: int  # bytes behind the two halves
    turn: torch.Tensor  # int32 [1]
    last_stream: Stream = None
    last_captured: Stream = None


@dataclass(frozen=True, eq=False)
class Levels:
    """The two Worlds of a rank of a World over several nodes alike: that of its node, whose ranks address each other's
    memory, and that of the ranks with its place in their nodes, one a node in the order of the nodes."""

    node: World
    across: World


Told = tuple[str, tuple[tuple[str, Hashable], ...]]  # a call: what, and its fields
Heard = Callable[[float | None], list[Any] | None]  # `Backend.tell`
Kept = dict[Hashable, Any]  # what was made once, by what it was made for


class Workspace(Protocol):
    """What is shared by calls that may come on several streams (`World.order`): the stream of the last one, outside
    captures and in one."""

    last_stream: Stream
    last_captured: Stream


class World:
    """A rank's view of all ranks. Made by `weft.init` or `weft.spmd`, not directly."""

    _all: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()

    def __init__(self, backend: Backend, name: str | None = None) -> None:
        timeout_seconds()  # refused where nothing is waited for, too
        self.backend = backend
        self.rank, self.size, self.device = backend.rank, backend.size, backend.device
        self.other_ranks = tuple((self.rank + step) % self.size for step in range(1, self.size))  # the next one first
        self.nodes_reason = spread(backend.nodes)  # why only the library's collectives serve: several nodes; else None
        # The name is the same in each run, for caches of compiled code. It has the size in it, as torch keeps compiled
        # graphs for later processes by what they are told of a World.
        self.name = name or f"{backend.name}:{next(_numbers)}:{self.rank}/{self.size}"
        self._channels: dict[Hashable, BlockChannel] = {}
        self._arrivals: dict[Hashable, int | list[int] | None] = {}  # as given
        self._parts: dict[int, SymmetricTensor] = {}  # by address of the own counters
        self._ranges: list[tuple[int, int, str]] = []  # first address, bytes, name; sorted
        self._shared: list[tuple[int, int, SymmetricTensor]] = []  # first address, number, memory; sorted
        self._block: SymmetricTensor | None = None
        self._used = 0
        self._arenas: list[Arena] = []  # the last is the one in use; graphs hold the words of those before it
        self._buffers: dict[str, SymmetricTensor] = {}
        self._numbers: dict[Told, int] = {}  # the number of each call that all ranks agreed on
        self._calls: list[Told] = [("no call", ())]  # by number; the same on every rank, as they agree in one order
        self._left_out = 0  # rows, as far as it was said
        self.number = 0  # that of the call which this rank makes, or made last
        self._told: list[tuple[Told, Heard]] = []  # what was said and not yet compared
        self._said: set[str] = set()
        self._closed = False
        self._levels: Levels | None = None
        self._cache: Kept = {}
        self.prepared: Kept = {}  # launches and the like (`launches.prepared`), which refer to shared memory
        self.decided: Kept = {}  # by call: the plan, once arguments were checked and ranks agreed
        self.ran: Any = None  # what the last call of an op ran: its call and plan (`op.Known`)
        self.forward_passes: Kept = {}  # what compiled ones ran (`torch_library.ForwardKey`), for their backward passes
        self.choices = Chooser(backend.clock, backend.capturing, self)  # what was timed
        World._all[self.name] = self
        backend.name_counters(self._describe)
        backend.name_calls(self._disagreement)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend.name!r}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> World:
        """Itself: a copy of a module that holds it is of the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a World cannot be pickled; of a module, save state_dict()")

    def split(self, part: Hashable) -> World:
        """Collective. The World of the ranks that give the same `part`, in the order that they have here.

        With 4 ranks, `split(rank // 2)` makes the Worlds of 0, 1 and of 2, 3; `split(rank % 2)` those of 0, 2 and of 1,
        3. Its memory, channels and plans are its own. Ops of several Worlds that share ranks come in one order on all
        of them. Keep it: no op holds it. Raises Unsupported for a World that is itself of a part of torch.distributed's
        ranks.
        """
        parts = self.exchange(part)
        groups = [[rank for rank, p in enumerate(parts) if p == each] for each in dict.fromkeys(parts)]
        return World(self.backend.split(groups))

    @property
    def levels(self) -> Levels:
        """Collective the first time. The node's World and the one across nodes; kept. What expires in them is raised by
        this World too. Raises Unsupported where there are none (`levels_reason`)."""
        if self._levels is None:
            if self.levels_reason is not None:
                raise Unsupported(f"no two levels: {self.levels_reason}")
            self._no_capture("levels")
            self._levels = Levels(*map(World, self.backend.levels()))
        return self._levels

    @property
    def alone(self) -> World:
        """The World of this rank alone; kept. Its ops wait for no other rank's, so that they may run while an op of
        this World runs on another stream. Not collective."""
        made: World = self if self.size == 1 else self.cached("alone", lambda: World(self.backend.alone()))
        return made

    # -- agreement ---------------------------------------------------------------------------------------------------
    def check_same_on_all_ranks(self, what: str, /, **fields: Hashable) -> int:
        """Return the number of this call, the same on every rank. Raise Mismatch on every rank unless all ranks are at
        the same call with the same fields.

        Collective the first time this rank sees (what, fields), free afterwards.
        """
        number = self.tell(what, **fields)
        if self._told:
            self._hear(None)
        return number

    def tell(self, what: str, /, **fields: Hashable) -> int:
        """Return the number of this call as `check_same_on_all_ranks` does, but wait no longer than PATIENCE for ranks
        that are late: what they say is then compared at the next call of an op, exchange or `synchronize`, which
        raises Mismatch, on every rank. Until then the results of ranks that disagree are undefined. It serves work
        whose waits are all bounded (`Op.check_same_on_all_ranks`)."""
        key = (what, tuple(fields.items()))
        known = self._numbers.get(key)
        if known is not None:
            return known
        self._no_capture(what)
        if len(self._told) == LATE:
            self._hear(None)
        heard = self.backend.tell(key)
        if heard is None:
            self._compare(key)
        number = self._numbers[key] = len(self._calls)
        self._calls.append(key)
        if heard is not None:
            self._told.append((key, heard))
            self._hear(PATIENCE)
        return number

    def begin(self, number: int | None) -> None:
        """This rank now makes the call of that number (`check_same_on_all_ranks`); None: one on which ranks agree on
        nothing.

        From now on the number goes with what ranks tell each other in memory (`lang.intrinsics.same_call`). Raise
        Mismatch where the backend compares every call on the host, and another rank makes another one."""
        if number is not None:
            self.number = number
            if self.backend.compares:
                if self._told:
                    self._hear(None)
                calls = self.backend.compared(self._calls[number])
                if calls is not None:
                    self._raise_unless_same(calls)

    def calls(self, name: str) -> BlockChannel:
        """Collective on first use. Return the channel in which launches that come in one order on every rank compare
        the numbers of their calls (`lang.intrinsics.same_call`)."""
        return self.channel(f"calls of {name}", 2 * self.size, None)

    def _disagreement(self, words: Mapping[int, int]) -> Mismatch:
        numbers = {rank: word & (1 << NUMBER_BITS) - 1 for rank, word in sorted(words.items())}
        return disagreement({r: self._calls[n] if n < len(self._calls) else f"call {n}" for r, n in numbers.items()})

    def _hear(self, patience: float | None) -> None:
        """Compare what was told, as far as all ranks have come so far within `patience` seconds; None: all of it."""
        while self._told:
            key, heard = self._told[0]
            theirs = heard(patience)
            if theirs is None:
                return
            del self._told[0]
            if any(t != key for t in theirs):
                self._numbers.pop(key, None)
            self._raise_unless_same(dict(enumerate(theirs)))

    def _compare(self, key: Told) -> None:
        """Collective. Raise Mismatch on every rank unless all are here with the same key."""
        self._raise_unless_same(dict(enumerate(self.exchange(key))))

    def _raise_unless_same(self, calls: Mapping[int, object]) -> None:
        first, *others = calls.values()
        if any(other != first for other in others):
            self.decided.clear()
            self.choices.trials.clear()
            raise disagreement(calls)

    def exchange(self, obj: R) -> list[R]:
        """Collective. Return what every rank gives, by rank; blocks the host until all are here."""
        if self._told:
            self._hear(None)
        return self.backend.exchange(obj)

    def check(self) -> None:
        """Raise Timeout if a device-side wait has expired, Mismatch if ranks were found to disagree, WeftError if the
        World is closed; cheap enough for every call."""
        if self._closed:
            raise WeftError(f"rank {self.rank}'s World is closed: an operator needs one that is not")
        if self._told:
            self._hear(0.0)
        self.backend.check()
        if self._levels is not None:
            self._check_node(self._levels)

    def _check_node(self, levels: Levels) -> None:
        """Raise what expired on the node's own World, whose ranks have other numbers than here."""
        try:
            levels.node.check()
        except Timeout as e:
            raise Timeout(f"node {self.node}, whose ranks count from 0: {e}") from None

    def synchronize(self) -> None:
        """Wait until everything given to this rank's streams is done; raises what `check` does, and Overflow once for
        rows that found no room."""
        self.wait_for_streams()
        self.behind(None, self.backend.left_out())

    def wait_for_streams(self) -> None:
        """`synchronize` inside a call, which a rank that left rows out makes as the others do."""
        if self._told:
            self._hear(None)  # before waiting for kernels of a call that the others do not make
        self.backend.synchronize()
        if self._levels is not None:
            self._check_node(self._levels)

    def behind(self, result: R, lost: int) -> R:
        """Return the result of a call that was made, or, once where calls before it left out rows (`lost`: those of all
        calls), raise Overflow with that result. Nothing is raised in a backward pass, which the other ranks go on
        with."""
        if lost != self._left_out and torch._C._current_graph_task_id() == -1:
            more, self._left_out = lost - self._left_out, lost
            raise Overflow(
                f"rank {self.rank}: {more} rows more came to its experts than max_rows (or max_m) has room for; they "
                "were left out, in a call before this one, which was made: its result is this error's `result`",
                result,
            )
        return result

    def finish(self, stream: Stream) -> None:
        """Results given to `stream` are about to be handed to the caller (`Backend.finish`)."""
        if self._told:
            self._hear(0.0)
        self.backend.finish(stream)

    def close(self) -> None:
        """Release what the backend holds. Operators on this World raise WeftError afterwards."""
        self._closed = True
        self.decided.clear()  # a call that is known checks nothing
        if self._levels is not None:
            self._levels.node.close()
            self._levels.across.close()
        self.backend.close()

    def _no_capture(self, what: str) -> None:
        if self.backend.capturing():
            raise WeftError(
                f"{what}: first use of this shape inside a CUDA graph capture, where its workspace cannot be "
                "allocated; call it twice with the same shapes before capturing"
            )

    def say_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message that is the same on all ranks, once for each World, by rank 0."""
        if message not in self._said:
            self._said.add(message)
            if self.rank == 0:
                log.log(level, message)

    def cached(self, key: Hashable, make: Callable[[], R]) -> R:
        """Return what an op prepared for a key (workspace, descriptors), made on first use."""
        if key not in self._cache:
            self._no_capture(str(key))
            with self.backend.persistent_allocation():
                self._cache[key] = make()
        return self._cache[key]

    # -- symmetric memory --------------------------------------------------------------------------------------------
    def symmetric(self, shape: Sequence[int], dtype: torch.dtype, name: str = "user") -> SymmetricTensor:
        """Collective. A zeroed tensor of one shape on every rank, addressable by all. Raises Mismatch on every rank.

        Every call makes new memory: a name given again is only what reports and errors call it, and nothing is found by
        it.
        """
        shape = check_memory(shape, dtype)
        self._compare((f"symmetric {name!r}", (("shape", shape), ("dtype", dtype))))
        with self.backend.persistent_allocation():
            memory = self.backend.symmetric(max(math.prod(shape), 1) * dtype.itemsize, name)
        self._name_range(memory.local, name)
        bisect.insort(self._shared, (memory.local.data_ptr(), len(self._shared), memory), key=lambda entry: entry[0])
        made = memory.view(0, shape, dtype)
        self.backend.name_elements(made.local, name)
        return made

    def shared(self, t: torch.Tensor) -> tuple[SymmetricTensor, tuple[int, int]] | None:
        """`t`, if it is contiguous and lies in memory that `symmetric` made: as a tensor of every rank, and where it
        lies (which memory, which byte of it), which the ranks have to agree on."""
        i = bisect.bisect_right(self._shared, t.data_ptr(), key=lambda entry: entry[0]) - 1
        if i < 0 or not t.is_contiguous():
            return None
        start, number, memory = self._shared[i]
        at, nbytes = t.data_ptr() - start, t.numel() * t.element_size()
        if at + nbytes > memory.local.numel():
            return None
        view = self.cached(("shared", t.data_ptr(), t.shape, t.dtype), lambda: memory.view(at, tuple(t.shape), t.dtype))
        return view, (number, at)

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

    def words(self, *tables: Sequence[int]) -> list[torch.Tensor]:
        """Return int32 tensors of these values, in one copy to the device; each begins at a multiple of 16 bytes."""
        padded = [[*table, *[0] * (-len(table) % 4)] for table in tables]
        made = self.tensor(list(itertools.chain(*padded)), torch.int32).split([len(table) for table in padded])
        return [part[: len(table)] for part, table in zip(made, tables, strict=True)]

    def channel(
        self,
        name: str,
        counters: int,
        mapping: StaticMapping | TableMapping | None,
        arrivals: int | Sequence[int] | None = None,
    ) -> BlockChannel:
        """Collective on first use. The BlockChannel of that name: `counters` zeroed counters on every rank.

        arrivals: how many notifies each counter gets in every call (one number, or one a counter), where that is fixed;
        the emulator then reports lost and doubled signals. Needs a kernel that counts its calls (`wl.end_call`). They
        may differ by rank; name and `counters` may not (Mismatch on every rank).
        """
        key = (name, counters)
        found = self._channels.get(key)
        if found is None:
            self._no_capture(name)
            each = _check_channel(name, counters, mapping, arrivals)
            self._compare((f"channel {name!r}", (("counters", counters),)))
            self._arrivals[key] = arrivals if isinstance(arrivals, int) else each
            with self.backend.persistent_allocation():
                if self._block is None or self._used + counters > _COUNTERS:
                    self._block, self._used = self.backend.symmetric(_COUNTERS * 4, "channels"), 0
                part = self._block.view(self._used * 4, (counters,), torch.int32)
                state = self.backend.tensor([self.rank] + [0] * (STATE_WORDS - 1), torch.int32)
            self._used += _padded(counters)
            for rank, counts in enumerate(part.peers):
                self._name_range(counts, name if rank == self.rank else f"{name}, rank {rank}'s copy")
            self._parts[part.local.data_ptr()] = part
            self.backend.register_channel(name, part.local, state, each)
            found = self._channels[key] = BlockChannel(
                part.local, part.addresses, state, self.backend.guard(), mapping, tl.constexpr(self.size)
            )
        elif arrivals is not None and arrivals != (made := self._arrivals[key]):
            if isinstance(arrivals, int) or list(arrivals) != made:
                raise ValueError(f"channel {name!r} was made with arrivals {made}, not {arrivals}")
        return found._replace(mapping=mapping)

    def local_channel(self, name: str, arrivals: Sequence[int]) -> BlockChannel:
        """A new BlockChannel that no other rank sees: one counter for each of `arrivals`, its notifies in every
        call."""
        with self.backend.persistent_allocation():
            counters = self.backend.zeros((len(arrivals),), torch.int32)
            state = self.backend.tensor([self.rank] + [0] * (STATE_WORDS - 1), torch.int32)
            nowhere = self.backend.zeros((self.size,), torch.int64)
        named = self._name_range(counters, name)
        weakref.finalize(counters, self._ranges.remove, named)
        self.backend.register_channel(name, counters, state, list(arrivals))
        return BlockChannel(counters, nowhere, state, self.backend.guard(), None, tl.constexpr(self.size))

    def counter(self, ch: BlockChannel, channel: int, rank: int) -> torch.Tensor:
        """A rank's counter of a channel, as an int32 tensor of one word (for `signal` and `wait`)."""
        part = self._parts.get(ch.counters.data_ptr())
        if part is None or not 0 <= channel < part.local.numel():
            raise WeftError(f"channel {channel} of {ch.counters.numel()} is not one of this World's")
        return part.peers[rank][channel : channel + 1]

    def arena(self, half: int, row: int = 0) -> Arena:
        """Collective when it has to grow, at least twofold. Two halves of at least `half` bytes each, of which the
        second may begin at a whole row of so many bytes."""
        if not self._arenas or self._arenas[-1].half < half or self._arenas[-1].slack < row:
            self._no_capture("arena")
            if self._arenas:
                self.wait_for_streams()
                self.exchange("arena")
                half = max(half, 2 * self._arenas[-1].half)
            half = (half + (1 << 21) - 1) // (1 << 21) * (1 << 21) if half > 1 << 16 else (half + 255) // 256 * 256
            slack = max(row, 1 << 17 if half > 1 << 16 else 1 << 12)
            memory = self.symmetric((2 * half + slack,), torch.uint8, "arena")
            self.prepared.clear()
            with self.backend.persistent_allocation():
                self._arenas.append(Arena(memory, half, slack, self.zeros((1,), torch.int32)))
        return self._arenas[-1]

    def buffer(self, name: str, nbytes: int) -> SymmetricTensor:
        """Collective when it has to grow, at least twofold. A named symmetric buffer of at least `nbytes`, shared by
        calls of one op."""
        held = self._buffers.get(name)
        if held is None or held.local.numel() < nbytes:
            self._no_capture(name)
            if held is not None:
                self.wait_for_streams()
                self.exchange(name)
                nbytes = max(nbytes, 2 * held.local.numel())
            self.prepared.clear()
            self._buffers[name] = self.symmetric(((nbytes + 255) // 256 * 256,), torch.uint8, name)
        return self._buffers[name]

    def order(self, holder: Workspace, stream: Stream) -> None:
        """Serialise the uses of a shared workspace (`holder.last_stream`) by different streams of this rank; in a
        capture, those that are in it too."""
        capturing = self.backend.capturing()
        if capturing:
            last, holder.last_captured = holder.last_captured, stream
        else:
            last, holder.last_stream = holder.last_stream, stream
        if last is not None and last != stream and (not capturing or self.backend.captures(last)):
            self.backend.wait_event(stream, self.backend.record(last))

    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments | Callable[[], Arguments],
        options: Options,
        stream: Stream,
    ) -> None:
        """Run `grid` programs of a `weft.jit` kernel (`Backend.launch`). What is launched again and again is a
        `weft.Launch`, which costs less host time.

        A kernel that takes a BlockChannel is first checked to be the same on every rank: its grid, and its integers,
        which Triton would specialise into different kernels. Collective for each new combination. Raises Mismatch on
        every rank.
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
        """Barrier of all ranks on a stream. Those of one name must come in the same order on every rank. Returns how
        many there were of this name, int32 [1], which the next one counts up."""
        barrier, count = self.cached(("barrier", name), lambda: self._barrier(name))
        barrier(stream or self.current_stream(), number=self.number)
        return count

    def _barrier(self, name: str) -> tuple[Launch, torch.Tensor]:
        from .transport.barrier import barrier

        count = self.zeros((1,), torch.int32)
        return Launch(self, barrier, 1, dict(num_warps=1), calls=self.calls(name), turn=count), count

    # -- the backend's (backends/base.py has what each does) ---------------------------------------------------------
    @property
    def sm_count(self) -> int:
        return self.backend.sm_count

    @property
    def scale(self) -> Scale:
        return self.backend.scale

    @property
    def reference(self) -> bool:
        return self.backend.reference

    @property
    def group(self) -> ProcessGroup | None:
        return self.backend.group

    @property
    def capability(self) -> int:
        """The compute capability of the GPU that kernels are compiled for, times ten: 89 for NVIDIA's 8.9."""
        return self.backend.capability

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of each rank's node, by rank; nodes are counted in the order of their first ranks."""
        return self.backend.nodes

    @property
    def node(self) -> int:
        """The number of this rank's node; `world.split(world.node)` makes the World of the ranks there."""
        return self.nodes[self.rank]

    @property
    def levels_reason(self) -> str | None:
        """Why there are no `levels`: why a World of several nodes is the library's alone, or that it is of one node."""
        return self.backend.levels_reason

    @property
    def peer_reason(self) -> str | None:
        """Why peers' memory cannot be stored to, which is all that low-latency rows need; None where it can."""
        return self.backend.peer_reason

    @property
    def symmetric_reason(self) -> str | None:
        return self.backend.symmetric_reason

    empty = _passed_on(Backend.empty)
    zeros = _passed_on(Backend.zeros)
    tensor = _passed_on(Backend.tensor)
    guard = _passed_on(Backend.guard)
    current_stream = _passed_on(Backend.current_stream)
    side_stream = _passed_on(Backend.side_stream)
    on = _passed_on(Backend.on)
    record = _passed_on(Backend.record)
    wait_event = _passed_on(Backend.wait_event)
    capturing = _passed_on(Backend.capturing)
    on_side_stream = _passed_on(Backend.on_side_stream)
    persistent_allocation = _passed_on(Backend.persistent_allocation)
    run_launch = _passed_on(Backend.run_launch)
    load = _passed_on(Backend.load)
    copy = _passed_on(Backend.copy)
    signal = _passed_on(Backend.signal)
    wait = _passed_on(Backend.wait)
    call = _passed_on(Backend.call)
    results = _passed_on(Backend.results)
    linear = _passed_on(Backend.linear)
    all_gather = _passed_on(Backend.all_gather)
    reduce_scatter = _passed_on(Backend.reduce_scatter)
    all_reduce = _passed_on(Backend.all_reduce)
    all_to_all = _passed_on(Backend.all_to_all)
    communicator = _passed_on(Backend.communicator)
