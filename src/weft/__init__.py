"""weft overlaps communication with computation inside multi-GPU LLM layers."""

from . import lang, models, nn, plan
from .errors import Deadlock, MemoryFault, Mismatch, Race, SignalError, Timeout, Unsupported, WeftError
from .lang.jit import jit
from .ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .ops.api import silu_mul
from .plan import Plan
from .world import World, init, spmd

__all__ = [
    "Deadlock", "MemoryFault", "Mismatch", "Plan", "Race", "SignalError", "Timeout", "Unsupported", "WeftError", "World",
    "all_gather_matmul", "init", "jit", "lang", "matmul_all_reduce", "matmul_reduce_scatter", "nn", "plan",
    "silu_mul", "spmd", "models",
]  # fmt: skip
