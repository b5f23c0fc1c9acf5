"""The emulator runs a world of ranks on one CPU thread. A seed determines the order of kernels, streams, copies and
collectives.

The emulator executes the source of the kernels. The emulator reports races, deadlocks, lost and doubled signals, reads
of unwritten memory, and accesses outside the tensor with which a kernel was launched. `backends/emulated.py` is the
entry point; `check/schedules.py` runs many schedules.

    interpret   Triton's language on numpy, one program
    libdevice   CUDA's mathematical functions on numpy
    memory      the history of accesses to each element
    bounds      the tensor that a pointer comes from
    threads     a program's loads of elements that its other threads have stored
    machine     the scheduler, vector clocks, counters
    programs    a running program's operations on memory and counters
    streams     host code's operations on streams: launches, copies, collectives
    host        a rank's host code, on a thread of its own
    torch_order a rank's torch operations in the order of its stream; torch_operation: an operation's reads and writes
    ran         the kernels that ran, for compiling them
    deadlock    the wait-for graph as text

It sees the reads and writes of host code's torch operations while a stream of the rank has work left, or if hosts run
ahead. The emulator does not observe the reads and writes of compiled torch operations, the layout of blocks over
threads, the compiler's reordering of waits and loads (`weft check` reads the PTX for that), or integer overflow. Inline
assembly runs if inline_ptx.py supports its instructions, and is refused otherwise. Triton's specialisation of integer
arguments has no effect in the emulator.
"""

from importlib.util import find_spec

from ..errors import WeftError

if find_spec("greenlet") is None:
    raise WeftError("the emulator needs greenlet, which is not installed: pip install greenlet")

from . import inline_ptx, intrinsics  # noqa: F401  (they register what inline PTX and weft.lang's intrinsics do)
from .machine import Machine
from .tasks import Report

__all__ = ["Machine", "Report"]
