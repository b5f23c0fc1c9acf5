"""Each rank's host code runs on separate threads, and the emulator lets one thread run at a time.

Programs and streams are greenlets of one thread. Host code cannot be a greenlet, because torch keeps the gradient mode,
autograd's queue and more per thread. Two ranks inside `torch.no_grad()` or `backward()` would mix these states. A
rank's greenlet therefore only represents its host thread. The greenlet hands control to the thread, waits, and runs
those requests of the thread that need the machine's thread.

The function that a rank runs may start threads, whose calls belong to the rank too. Each call holds the rank's lock
from its beginning to its end, which serializes these calls. Without the lock a second thread would act while another
rank runs.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TypeVar

import triton
from greenlet import GreenletExit

from ..errors import WeftError

E = TypeVar("E", bound=BaseException)
_PACKAGE = Path(__file__).parents[1]
_EMULATOR = _PACKAGE / "emulator", _PACKAGE / "backends" / "emulated.py", Path(triton.__file__).parent
SILENT = 60.0  # seconds after which the emulator reports host code that makes no call, as in an endless loop
log = logging.getLogger("weft")
LIMIT, RECOMPILES = "recompile_limit", 256  # the option of torch.compile, and its value: functions of one code
LEFT_BEHIND = 5.0  # seconds for host code to end after a failed run; a thread that waits for another thread may not end


class HostThread:
    """The thread that runs one rank's function, and the greenlet that represents the thread (`run`)."""

    def __init__(self, rank: int, body: Callable[[], None]) -> None:
        self.rank = rank
        self._thread = threading.Thread(target=self._whole, args=(body,), daemon=True)
        # Requests of the rank's threads to the machine's thread (None when the rank's function has ended), and the
        # errors of these requests. At most one request is pending, so each queue hands control to the other side.
        self._requests: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._lock = threading.RLock()  # held by this rank's thread that is making a call
        self._caller: int | None = None  # the identifier of the thread that holds the lock
        self._machine: int | None = None  # the identifier of the thread that runs programs and streams
        self._failed: BaseException | None = None
        self._ended = False

    def _whole(self, body: Callable[[], None]) -> None:
        failed: BaseException | None = None
        try:
            _allow_recompiles()
            body()
        except BaseException as error:
            failed = error
        with self._lock:  # wait until another thread of this rank has ended its call
            self._failed, self._ended = failed, True
            self._requests.put(None)

    def run(self) -> None:
        """Serve the requests of the rank's threads until its function ends, as the greenlet's body; raise the
        function's error."""
        self._machine = threading.get_ident()
        self._thread.start()
        request = self._next_request()
        while request is not None:
            failed: BaseException | None = None
            try:
                request()
            except BaseException as error:  # the machine ends the run, and thereby this thread
                failed = error
            self._answers.put(failed)
            try:
                request = self._next_request() if failed is None else self._requests.get(timeout=LEFT_BEHIND)
            except Empty:
                return
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def _next_request(self) -> Callable[[], object] | None:
        """Wait until the rank's function makes a call or ends. If the wait is long, log the line that the function is
        running."""
        try:
            return self._requests.get(timeout=SILENT)
        except Empty:
            frame = sys._current_frames().get(self._thread.ident or 0)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "its end"
            log.warning("rank %d's function has made no call of weft for %g seconds: at %s", self.rank, SILENT, place)
            return self._requests.get()

    def outside(self) -> bool:
        """Return whether the caller is not on the machine's thread, and therefore must use `ask`."""
        return threading.get_ident() != self._machine

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Return a context manager around a call of host code, which serializes it with the calls of the rank's other
        threads. The context manager raises WeftError in a thread that is still running when the rank's function has
        returned."""
        if not self.outside():  # the machine's thread acts for a call that holds the lock
            yield
            return
        with self._lock:
            outer, self._caller = self._caller, threading.get_ident()
            try:
                self._require_running()
                yield
            finally:
                self._caller = outer

    @property
    def in_call(self) -> bool:
        """Return whether the calling thread is inside a call of host code (`calling`)."""
        return self._caller == threading.get_ident()

    @property
    def on_rank_thread(self) -> bool:
        """Return whether the calling thread runs the rank's function, and is not a thread that the function started."""
        return threading.current_thread() is self._thread

    def _require_running(self) -> None:
        if self._ended:
            raise WeftError(
                f"rank {self.rank}'s function has returned, and thread {threading.current_thread().name!r} of it "
                "goes on: join the threads that call operators before the function given to spmd returns"
            )

    def ask(self, request: Callable[[], object]) -> None:
        """Run `request` on the machine's thread, where the request may switch tasks. Called on a thread of the rank."""
        self._requests.put(request)
        error = self._answers.get()
        _allow_recompiles()
        if error is not None:
            if isinstance(error, GreenletExit) and threading.current_thread() is not self._thread:
                raise WeftError(f"the emulated run of rank {self.rank} has ended with an error of another task")
            raise error


def _allow_recompiles() -> None:
    """Let torch.compile cache as many compiled functions as several runs have ranks. The limit applies to the calling
    thread."""
    config = sys.modules.get("torch._dynamo.config")
    if config is not None and getattr(config, LIMIT) < RECOMPILES:
        setattr(config, LIMIT, RECOMPILES)


def folded(error: E) -> E:
    """Return the error without the traceback frames of the machinery that runs ranks. The frames of callers, of the
    rank's function and of kernels remain. The last frame, which raised the error, also remains unless the error is a
    WeftError."""
    frames: list[TracebackType] = []
    frame_below = error.__traceback__
    while frame_below is not None:
        frames.append(frame_below)
        frame_below = frame_below.tb_next
    kept = [frame for frame in frames if not _runs_ranks(frame)]
    if kept and kept[-1] is not frames[-1] and not isinstance(error, WeftError):
        kept.append(frames[-1])
    below: TracebackType | None = None
    for frame in reversed(kept):
        below = TracebackType(below, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(below) if kept else error


def _runs_ranks(frame: TracebackType) -> bool:
    code = frame.tb_frame.f_code
    path = Path(code.co_filename)
    emulator = any(path.is_relative_to(part) for part in _EMULATOR)
    return emulator or (path == _PACKAGE / "launch.py" and code.co_name in ("spmd", "<lambda>"))
