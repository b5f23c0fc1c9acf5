"""A world of ranks on one CPU thread: kernels, streams, copies and collectives, in an order that a seed decides.

It runs the kernels' own source and reports races, deadlocks, lost and doubled signals, reads of memory that nothing
wrote and accesses outside of the tensor that a kernel was given. `backends/emulated.py` is the way in; `mutate`
breaks a protocol on purpose, one call at a time, to see that it is noticed; `check/schedules.py` runs many schedules.

    interpret   Triton's language on numpy, one program
    memory      who touched what, per element
    bounds      which tensor a pointer comes from
    threads     a program's loads of what its other threads have stored
    machine     the scheduler, vector clocks, counters
    programs    what a running program does to memory and counters
    streams     what host code gives to streams: launches, copies, collectives
    host        a rank's host code, on a thread of its own
    ran         what is to be compiled of it
    deadlock    the wait-for graph in words

What it does not see: what host code itself reads and writes, how the compiler lays blocks out over threads, its
reordering of waits and loads (`weft check` reads the PTX for that), integer overflow, and inline assembly
other than weft.lang's intrinsics, which it refuses to run. Specialisation of integer arguments has no effect here.
"""

from importlib.util import find_spec

from ..errors import SignalError, WeftError

if find_spec("greenlet") is None:
    raise WeftError("the emulator needs greenlet, which is not installed: pip install greenlet")

from . import intrinsics  # noqa: F401  (gives weft.lang's intrinsics their meaning)
from .machine import Machine
from .mutate import Mutation, sites
from .tasks import Report

__all__ = ["Machine", "Mutation", "Report", "SignalError", "sites"]
