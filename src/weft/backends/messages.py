"""Messages between the hosts of a World's ranks over gloo: the bytes of tensors, and pickled objects."""

from __future__ import annotations

import datetime
import itertools
import pickle
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import Mismatch, Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

CALL_KINDS = ("a host-side exchange", "a gather or a sum", "an all-to-all")
EXCHANGE, GATHER, ALL_TO_ALL = range(len(CALL_KINDS))


class Messages:
    """Messages among the ranks of a process group alone; `seconds` bounds every wait.

    This class does not use `new_group`, which names a group by the number of groups in this process. Ranks with
    different numbers of groups would wait for each other under different names.
    """

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.rank, self.size, self.seconds = dist.get_rank(group), dist.get_world_size(group), seconds
        self._lost = ""  # the reason why messages no longer have one order on all ranks, or None
        store = _get_process_group_store(group)
        # The number of Worlds over this group so far, which is the same on every rank.
        count = store.add(f"weft/{self.rank}", 1)
        with self._bounded():
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore(f"weft/{count}", store),
                self.rank,
                self.size,
                timeout=datetime.timedelta(seconds=seconds),
            )
        self._held: list[Any] = [gloo]  # torch does not declare the methods of this object
        # Gloo's threads may drop a call's tensors after the call, for which they need the interpreter's lock. A process
        # aborts if they request the lock while the interpreter ends (pytorch/pytorch#179291). Therefore the threads are
        # ended before the interpreter ends.
        self.close = weakref.finalize(self, self._held.clear)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Raise Timeout for a message that does not arrive in time, and for all later messages."""
        if self._lost:
            raise Timeout(self._lost)
        try:
            yield
        except RuntimeError as e:
            late = "timed out" in str(e).lower() or "timeout" in str(e).lower()
            reason = f"not every rank joined within {self.seconds:g} s" if late else "the connection to a rank is lost"
            self._lost = f"rank {self.rank}: {reason}: {e}"
            raise Timeout(self._lost) from e

    def objects(self, obj: object) -> list[Any]:
        """All-gather a picklable object; return the objects by rank."""
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = [header[0] for header in self._headers(EXCHANGE, [data.numel()] * self.size)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        gathered = self._gathered(padded)
        return [
            pickle.loads(padded_bytes[:n].numpy().tobytes()) for padded_bytes, n in zip(gathered, sizes, strict=True)
        ]

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All-gather x, of any dtype, with one shape and dtype on all ranks; return the tensors by rank."""
        nbytes = x.numel() * x.element_size()
        sizes = [header[0] for header in self._headers(GATHER, [nbytes] * self.size)]
        if len(set(sizes)) > 1:
            raise Mismatch(f"ranks give a gather or a sum {', '.join(map(str, sizes))} bytes, by rank")
        return self._gathered(x) if nbytes else [x.clone() for _ in sizes]

    def exchanged(self, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Send inputs[r] to rank r and receive outs[r] from it; tensors are contiguous."""
        sent = [_bytes_of(data) for data in inputs]
        sizes = [out.numel() * out.element_size() for out in outs]
        headers = self._headers(ALL_TO_ALL, [data.numel() for data in sent], sizes)
        for rank, source in itertools.product(range(self.size), repeat=2):
            expected, sent_bytes = headers[rank][self.size + source], headers[source][rank]
            if expected != sent_bytes:
                raise Mismatch(f"rank {rank} expects {expected} bytes from rank {source}, which sends {sent_bytes}")
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if any(itertools.chain(*headers)):
            with self._bounded():
                self._held[0].alltoall_base(received, torch.cat(sent), sizes, [data.numel() for data in sent]).wait()
        for out, data in zip(outs, received.split(sizes), strict=True):
            out.copy_(data.view(out.dtype).view(out.shape))

    def _headers(self, kind: int, sends: Sequence[int], expects: Sequence[int] | None = None) -> list[list[int]]:
        """Return, by rank, the numbers of bytes that the rank sends to each rank, then the numbers that it expects from
        each rank. A header precedes every message, because gloo ends the process if it receives bytes that it does not
        expect. Raise Mismatch, on every rank, if ranks make different calls."""
        header = torch.tensor([kind, *sends, *(sends if expects is None else expects)], device="cpu")
        headers = [header_words.tolist() for header_words in self._gathered(header)]
        kinds = [header[0] for header in headers]
        if len(set(kinds)) > 1:
            calls = ", ".join(f"rank {rank}: {CALL_KINDS[kind]}" for rank, kind in enumerate(kinds))
            raise Mismatch(f"ranks make different calls: {calls}")
        return [header[1:] for header in headers]

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._bounded():
            self._held[0].allgather([[_bytes_of(out) for out in outs]], [_bytes_of(x.contiguous())]).wait()
        return outs


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8 [bytes]: gloo supports fewer dtypes than torch."""
    return t.detach().view(-1).view(torch.uint8)
