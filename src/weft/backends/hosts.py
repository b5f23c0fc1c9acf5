"""What a rank exchanges with the other hosts, on a thread of its own: some of it is waited for, some heard of later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..errors import Mismatch


class Exchanges:
    """All exchanges of a rank, in the order in which it asks for them.

    exchange: an all-gather among the hosts. Where what comes of one shows that ranks disagree, it shows so on every
    rank, at the same exchange. What a rank asks for behind that one is not sent, but raises the same Mismatch, until
    the rank has been told: so whatever ranks exchange then, after they caught it, is of one call again.
    """

    def __init__(self, exchange: Callable[[Any], list[Any]]) -> None:
        self._exchange = exchange
        self._thread = ThreadPoolExecutor(1, "weft exchange")
        self._later: deque[Future[list[Any]]] = deque()
        self._found: Mismatch | None = None  # and not told yet

    def now(self, obj: Any) -> list[Any]:
        """Of all ranks. Raises what an exchange before it found."""
        return self._heard(self._thread.submit(self._send, obj, None))

    def later(self, obj: Any, then: Callable[[list[Any]], None]) -> None:
        """The same without waiting; `then` is given the result, and what it raises, `check` or `wait` raises."""
        self._later.append(self._thread.submit(self._send, obj, then))

    def check(self) -> None:
        """Raise what those that are over have found."""
        while self._later and self._later[0].done():
            self._heard(self._later.popleft())

    def wait(self) -> None:
        """The same of all."""
        while self._later:
            self._heard(self._later.popleft())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, obj: Any, then: Callable[[list[Any]], None] | None) -> list[Any]:
        if self._found is not None:
            raise self._found
        theirs = self._exchange(obj)
        if then is not None:
            try:
                then(theirs)
            except Mismatch as e:
                self._found = e
                raise
        return theirs

    def _heard(self, future: Future[list[Any]]) -> list[Any]:
        try:
            return future.result()
        except Mismatch:
            for unsent in self._later:  # which end at once
                unsent.exception()
            self._later.clear()
            self._found = None
            raise
