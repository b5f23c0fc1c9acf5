"""What the hosts of a World's ranks send each other over gloo: bytes of tensors, and pickled objects."""

from __future__ import annotations

import datetime
import itertools
import pickle
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import Mismatch, Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ("an exchange of the host's", "a gather or a sum", "an all-to-all")
EXCHANGE, GATHER, ALL_TO_ALL = range(len(WAYS))


class Messages:
    """Messages among the ranks of a process group alone; `seconds` bounds every wait.

    `new_group` is not used: it names a group by how many groups this process has, and ranks that are in different
    numbers of groups would wait for each other under different names."""

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self.rank, self.size, self.seconds = dist.get_rank(group), dist.get_world_size(group), seconds
        store = _get_process_group_store(group)
        count = store.add(f"weft/{self.rank}", 1)  # Worlds over this group, of which every rank makes the same
        with self._bounded():
            self._gloo: Any = dist.ProcessGroupGloo(  # whose methods torch does not declare
                dist.PrefixStore(f"weft/{count}", store),
                self.rank,
                self.size,
                timeout=datetime.timedelta(seconds=seconds),
            )

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            late = "timed out" in str(e).lower() or "timeout" in str(e).lower()
            reason = f"not every rank joined within {self.seconds:g} s" if late else "the connection to a rank is lost"
            raise Timeout(f"rank {self.rank}: {reason}: {e}") from e

    def objects(self, obj: object) -> list[Any]:
        """All-gather a picklable object; return the objects by rank."""
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        sizes = [each[0] for each in self._headers(EXCHANGE, [data.numel()] * self.size)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = self._gathered(padded)
        return [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(parts, sizes, strict=True)]

    def gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All-gather x, of one shape and dtype on all ranks, which may be any; return the tensors by rank."""
        nbytes = x.numel() * x.element_size()
        sizes = [each[0] for each in self._headers(GATHER, [nbytes] * self.size)]
        if len(set(sizes)) > 1:
            raise Mismatch(f"ranks give a gather or a sum {', '.join(map(str, sizes))} bytes, by rank")
        return self._gathered(x) if nbytes else [x.clone() for _ in sizes]

    def exchanged(self, parts: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Send parts[r] to rank r and receive outs[r] from it; tensors are contiguous."""
        sent = [_bytes_of(part) for part in parts]
        sizes = [out.numel() * out.element_size() for out in outs]
        headers = self._headers(ALL_TO_ALL, [part.numel() for part in sent], sizes)
        for rank, source in itertools.product(range(self.size), repeat=2):
            expected, given = headers[rank][self.size + source], headers[source][rank]
            if expected != given:
                raise Mismatch(f"rank {rank} expects {expected} bytes of rank {source}, which sends {given}")
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        if any(itertools.chain(*headers)):
            with self._bounded():
                self._gloo.alltoall_base(received, torch.cat(sent), sizes, [part.numel() for part in sent]).wait()
        for out, part in zip(outs, received.split(sizes), strict=True):
            out.copy_(part.view(out.dtype).view(out.shape))

    def _headers(self, kind: int, sends: Sequence[int], expects: Sequence[int] | None = None) -> list[list[int]]:
        """Return, by rank, the bytes that the rank has for every rank, then those that it expects of every rank. This
        goes ahead of everything that is sent: gloo ends the process where ranks send what others do not expect. Raise
        Mismatch, on every rank, where ranks are at different calls."""
        header = torch.tensor([kind, *sends, *(sends if expects is None else expects)])
        headers = [part.tolist() for part in self._gathered(header)]
        kinds = [header[0] for header in headers]
        if len(set(kinds)) > 1:
            said = ", ".join(f"rank {rank}: {WAYS[kind]}" for rank, kind in enumerate(kinds))
            raise Mismatch(f"ranks are at different calls: {said}")
        return [header[1:] for header in headers]

    def _gathered(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._bounded():
            self._gloo.allgather([[_bytes_of(part) for part in parts]], [_bytes_of(x.contiguous())]).wait()
        return parts


def _bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 [bytes]: gloo knows fewer dtypes than torch."""
    return t.detach().view(-1).view(torch.uint8)
