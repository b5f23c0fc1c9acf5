"""Host code of a rank on a thread of its own, of which exactly one runs at a time.

Programs and streams are greenlets of one thread. Host code cannot be one: torch keeps the gradient mode, autograd's
queue and more per thread, and two ranks inside `torch.no_grad()` or `backward()` would mix theirs. So a rank's greenlet
only stands for its host thread: it hands control over, waits, and does for it what needs the machine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class HostThread:
    def __init__(self, body: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._whole, args=(body,), daemon=True)
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._request: Callable[[], object] | None = None
        self._failed: BaseException | None = None

    def _whole(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            self._failed = error
        self._request = None
        self._back.release()

    def run(self) -> None:
        """The greenlet's body: serve the thread until it ends; raise what it raised."""
        self._thread.start()
        while True:
            self._back.acquire()
            if self._request is None:
                break
            try:
                self._request()
            except BaseException as error:  # the run is being ended: so is the thread
                self._failed = error
            self._turn.release()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def outside(self) -> bool:
        """Whether the caller is the host thread itself."""
        return threading.get_ident() == self._thread.ident

    def ask(self, request: Callable[[], object]) -> None:
        """From the host thread: have `request` done on the machine's thread, where it may switch tasks."""
        self._request = request
        self._back.release()
        self._turn.acquire()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
