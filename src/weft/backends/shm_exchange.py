"""Hosts of one machine exchange data through shared memory, in place of messages, which a rank can only get when it
waits for them.

Every rank writes what it posts, one thing after another, into slots of its own, and reads those of all others. A slot's
head has the number of what is in it and a checksum of both, so that a reader never takes half of one, whatever order
its processor sees the writes in. Every rank holds a lock on its part for as long as it lives: that is how others notice
that it is gone.

A slot is used again once all ranks have read what it held, without asking them: a rank is at most LEAD things ahead of
what it has collected, it has collected what all have posted, and each of those is at most LEAD ahead of what it has
collected.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import Timeout

FOLDER = Path("/dev/shm")
LEAD, BYTES = 32, 4096  # what is longer goes by messages
_HEAD = struct.Struct("<qiI")  # number, from 1 on; length; checksum
_SLOT = _HEAD.size + BYTES
_PART = 2 * LEAD * _SLOT
_SPIN = 2e-3  # seconds that are waited without sleep


class SharedMemoryExchange:
    """Rank `rank`'s access to the memory behind `file`, an open descriptor of one file on all ranks. `seconds` bounds
    every wait."""

    @staticmethod
    def shared(
        rank: int, size: int, seconds: float, exchange: Callable[[object], Sequence[object]]
    ) -> SharedMemoryExchange | None:
        """Collective, by `exchange`. Return this rank's Board, or None where not all ranks can open the one file, which
        is unlinked once they have."""
        path = FOLDER / str(exchange(f"weft-{uuid.uuid4().hex}")[0])
        board = None
        for turn in (rank == 0, rank != 0):  # the first makes the file
            try:
                if turn:
                    file = os.open(path, os.O_RDWR | (0 if rank else os.O_CREAT | os.O_EXCL), 0o600)
                    if rank == 0:
                        os.posix_fallocate(
                            file, 0, size * (_PART + _SLOT)
                        )  # so that no rank is killed where there is no room
                    board = SharedMemoryExchange(file, rank, size, seconds)
            except OSError:
                pass
            there = exchange(board is not None)
        if rank == 0:
            path.unlink(missing_ok=True)
        return board if all(there) else None

    def __init__(self, file: int, rank: int, size: int, seconds: float) -> None:
        self.file, self.rank, self.size, self.seconds = file, rank, size, seconds
        self.memory = mmap.mmap(file, size * (_PART + _SLOT))
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(rank))
        _boards.add(self)
        self.said = self.read = 0

    def say(self, data: bytes) -> None:
        """Post `data`, which the others read as this rank's next."""
        assert self.said - self.read < LEAD, "hear first"
        at = self._at(self.rank, self.said)
        self.said += 1
        self._write(at, self.said, data)

    def end(self, data: bytes, seconds: float) -> list[bytes | None]:
        """Write what this rank ends with; return, by rank, what those ended with that did within so many seconds, None
        for the others. This is apart from all that is posted."""
        first = self.size * _PART
        self._write(first + self.rank * _SLOT, 1, data)
        ends: list[bytes | None] = []

        def all_there() -> bool:
            ends[:] = [self._read(first + rank * _SLOT, 1) for rank in range(self.size)]
            return None not in ends

        _within(seconds, all_there)
        return ends

    def _write(self, at: int, number: int, data: bytes) -> None:
        self.memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self.memory, at, number, len(data), zlib.crc32(data, number))

    def hear(self, patience: float | None) -> list[bytes] | None:
        """Collect what every rank posted next after what was collected last, by rank; return None where not all have
        within `patience` seconds. With patience=None raise Timeout in the end, or when a rank is gone."""
        heard: list[bytes | None] = [None] * self.size

        def all_there() -> bool:
            for rank, data in enumerate(heard):
                if data is None:
                    heard[rank] = self._next(rank)
            return None not in heard

        if not all_there():
            if patience is None:
                self._until(all_there)
            elif not _within(patience, all_there):
                return None
        self.read += 1
        return heard  # type: ignore[return-value]

    def _next(self, rank: int) -> bytes | None:
        return self._read(self._at(rank, self.read), self.read + 1)

    def _read(self, at: int, expected: int) -> bytes | None:
        number, length, checksum = _HEAD.unpack_from(self.memory, at)
        if number != expected or not 0 <= length <= BYTES:
            return None
        data = self.memory[at + _HEAD.size : at + _HEAD.size + length]
        return data if zlib.crc32(data, number) == checksum else None

    def _at(self, rank: int, number: int) -> int:
        return rank * _PART + number % (2 * LEAD) * _SLOT

    def _until(self, there: Callable[[], bool]) -> None:
        if _within(_SPIN, there):
            return
        end = time.monotonic() + self.seconds
        while not there():
            if gone := [rank for rank in range(self.size) if self._gone(rank) and not there()]:
                raise Timeout(f"rank {self.rank}: the connection to a rank is lost: rank {gone[0]} has ended")
            if time.monotonic() > end:
                raise Timeout(f"rank {self.rank}: not every rank joined within {self.seconds:g} s")
            time.sleep(2e-4)

    def _gone(self, rank: int) -> bool:
        """Whether nobody holds the rank's lock."""
        held = fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, _lock(rank))
        return rank != self.rank and struct.unpack_from("h", held)[0] == fcntl.F_UNLCK


_boards: weakref.WeakSet[SharedMemoryExchange] = weakref.WeakSet()


def _let_go() -> None:
    """Close the memory and the file in a forked child, such as a DataLoader's worker, which would otherwise hold the
    rank's lock for longer than the rank lives. The lock belongs to the open file, which its descriptor and the memory's
    own both keep open."""
    for board in _boards:
        board.memory.close()
        os.close(board.file)


os.register_at_fork(after_in_child=_let_go)


def _lock(rank: int) -> bytes:
    """The struct flock of the byte that stands for the rank."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)


def _within(seconds: float, there: Callable[[], bool]) -> bool:
    end = time.perf_counter() + seconds
    while not there():
        if time.perf_counter() > end:
            return False
    return True
