"""Processes of one machine exchange data through shared memory. A rank can read another rank's post at any time, but
can receive a gloo message only while it waits for one.

Every rank writes its posts, one after another, into its own ring of 2 LEAD slots, and reads the posts of all other
ranks. The head of a slot contains the number of its post and a checksum of the number and the data. A reader therefore
never accepts a half-written post, in whatever order the writes become visible to its core. Every rank holds a file lock
on its byte while it runs, so the other ranks notice when it has ended.

A rank reuses a slot without checking whether all ranks have read it. When a rank writes post n, it has collected all
posts up to n - LEAD from every rank. Every rank that has posted n - LEAD had before collected all posts up to n - 2
LEAD, and post n reuses the slot of post n - 2 LEAD.
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
from contextlib import suppress
from pathlib import Path

from ..errors import Timeout

FOLDER = Path("/dev/shm")
LEAD = 32  # the number of posts by which a rank may be ahead of the posts that it has collected
BYTES = 4096  # the length of the longest post; longer data is sent by messages
_HEAD = struct.Struct("<qiI")  # number, starting from 1; length; checksum
_SLOT = _HEAD.size + BYTES
_PART = 2 * LEAD * _SLOT
_PREFIX = "weft-"  # the beginning of the file's name
_ABANDONED = 10.0  # seconds after which an unlocked file is removed; a rank locks its file as soon as it has made it
_SPIN = 2e-3  # seconds for which a wait polls before it sleeps between polls


class SharedMemoryExchange:
    """The access of rank `rank` to the memory of `file`, an open descriptor of one file on all ranks; `close` also
    closes the descriptor. `seconds` bounds every wait."""

    @staticmethod
    def shared(
        rank: int, size: int, seconds: float, exchange: Callable[[object], Sequence[object]]
    ) -> SharedMemoryExchange | None:
        """Return this rank's exchange, or None unless all ranks can open the same file. The file is unlinked once they
        have opened it. The call is collective, through `exchange`, which returns the objects of all ranks."""
        path = FOLDER / str(exchange(f"{_PREFIX}{uuid.uuid4().hex}")[0])
        shm, opened = None, [False]
        try:
            for opens in (rank == 0, rank != 0):  # rank 0 creates the file before the other ranks open it
                if opens:
                    shm = _opened(path, rank, size, seconds)
                opened = [bool(is_open) for is_open in exchange(shm is not None)]
        finally:
            if rank == 0:
                path.unlink(missing_ok=True)
            if shm is not None and not all(opened):
                shm.close()
        return shm if all(opened) else None

    def __init__(self, file: int, rank: int, size: int, seconds: float) -> None:
        self.file, self.rank, self.size, self.seconds = file, rank, size, seconds
        self.memory = mmap.mmap(file, size * (_PART + _SLOT))
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(rank))
        self.close = weakref.finalize(self, _close, self.memory, file)
        self.close.atexit = False
        _open_exchanges.add(self)
        self.post_count = self.collect_count = 0
        self._lost = ""  # the reason why this rank can no longer match the ranks' posts

    def post(self, data: bytes) -> None:
        """Post `data` as this rank's next post. Raises Timeout if an earlier `collect` raised it."""
        if self._lost:
            raise Timeout(self._lost)
        assert self.post_count - self.collect_count < LEAD, "collect first"
        offset = self._offset(self.rank, self.post_count)
        self.post_count += 1
        self._write(offset, self.post_count, data)

    def end(self, data: bytes, seconds: float) -> list[bytes | None]:
        """Write this rank's final data. Return, by rank, the final data that ranks wrote within `seconds`, and None for
        all other ranks. Final data has separate slots, which no post uses."""
        start = self.size * _PART
        self._write(start + self.rank * _SLOT, 1, data)
        ends: list[bytes | None] = []

        def all_posted() -> bool:
            ends[:] = [self._read(start + rank * _SLOT, 1) for rank in range(self.size)]
            return None not in ends

        _within(seconds, all_posted)
        return ends

    def _write(self, offset: int, number: int, data: bytes) -> None:
        self.memory[offset + _HEAD.size : offset + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self.memory, offset, number, len(data), zlib.crc32(data, number))

    def collect(self, patience: float | None) -> list[bytes] | None:
        """Return, by rank, the post after the last collected one, or None if a rank has not posted it within `patience`
        seconds. With patience=None, raise Timeout when the time limit of a wait expires, or when a rank has ended."""
        posts: list[bytes | None] = [None] * self.size

        def all_posted() -> bool:
            for rank, data in enumerate(posts):
                if data is None:
                    posts[rank] = self._next(rank)
            return None not in posts

        if not all_posted():
            if patience is None:
                self._until(all_posted)
            elif not _within(patience, all_posted):
                return None
        self.collect_count += 1
        return posts  # type: ignore[return-value]

    def _next(self, rank: int) -> bytes | None:
        return self._read(self._offset(rank, self.collect_count), self.collect_count + 1)

    def _read(self, offset: int, expected: int) -> bytes | None:
        number, length, checksum = _HEAD.unpack_from(self.memory, offset)
        if number != expected or not 0 <= length <= BYTES:
            return None
        data = self.memory[offset + _HEAD.size : offset + _HEAD.size + length]
        return data if zlib.crc32(data, number) == checksum else None

    def _offset(self, rank: int, number: int) -> int:
        return rank * _PART + number % (2 * LEAD) * _SLOT

    def _until(self, arrived: Callable[[], bool]) -> None:
        if _within(_SPIN, arrived):
            return
        end = time.monotonic() + self.seconds
        while not arrived():
            if ended := [rank for rank in range(self.size) if self._has_ended(rank) and not arrived()]:
                self._lost = f"rank {self.rank}: the connection to a rank is lost: rank {ended[0]} has ended"
            elif time.monotonic() > end:
                self._lost = f"rank {self.rank}: not every rank joined within {self.seconds:g} s"
            if self._lost:
                raise Timeout(self._lost)
            time.sleep(2e-4)

    def _has_ended(self, rank: int) -> bool:
        """Return whether no process holds the rank's lock."""
        held = fcntl.fcntl(self.file, fcntl.F_OFD_GETLK, _lock(rank))
        return rank != self.rank and struct.unpack_from("h", held)[0] == fcntl.F_UNLCK


def _opened(path: Path, rank: int, size: int, seconds: float) -> SharedMemoryExchange | None:
    """Return the exchange of a rank over the file of that name, which rank 0 creates; None if the file cannot be
    opened."""
    file = None
    try:
        if rank == 0:
            _remove_abandoned()
        file = os.open(path, os.O_RDWR | (0 if rank else os.O_CREAT | os.O_EXCL), 0o600)
        if rank == 0:
            os.posix_fallocate(file, 0, size * (_PART + _SLOT))  # without free space a later write would kill a rank
        return SharedMemoryExchange(file, rank, size, seconds)
    except OSError:
        if file is not None:
            os.close(file)
        return None


def _remove_abandoned() -> None:
    """Remove the files of ranks that were killed while they started: no process holds a lock on these files."""
    for path in FOLDER.glob(_PREFIX + "[0-9a-f]" * 32):  # other programs' files may have the same prefix
        with suppress(OSError):  # the file belongs to another user, or was removed meanwhile
            with path.open("r+b") as file:
                held = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock(0, bytes=0))
                locked = struct.unpack_from("h", held)[0] != fcntl.F_UNLCK
            if not locked and path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink()


def _close(memory: mmap.mmap, file: int) -> None:
    """Release the rank's lock, which belongs to the open file: close the descriptor and the mapping, because both keep
    the file open."""
    memory.close()
    os.close(file)


_open_exchanges: weakref.WeakSet[SharedMemoryExchange] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the exchanges in a forked child, such as a DataLoader's worker. Otherwise the child could hold the rank's
    lock after the rank has ended. In a child of that child they are already closed. The second child closes nothing,
    because the descriptors may refer to different files by then."""
    for shm in _open_exchanges:
        shm.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(rank: int, bytes: int = 1) -> bytes:
    """Return the struct flock for `bytes` bytes, starting at the rank's byte; bytes=0 means all bytes from there on."""
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, rank, bytes, 0)


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true within `seconds`."""
    end = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > end:
            return False
    return True
