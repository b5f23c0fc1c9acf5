"""weft overlaps communication with computation inside multi-GPU LLM layers."""

from . import lang, models, nn, plan
from .errors import Deadlock, MemoryFault, Mismatch, Race, SignalError, Timeout, Unsupported, WeftError
from .lang.jit import jit
from .ops import all_gather_matmul, all_reduce, all_reduce_rms_norm, matmul_all_reduce, matmul_reduce_scatter
from .ops.api import silu_mul
from .ops.matmul_all_to_all import Routing, matmul_all_to_all, route
from .ops.norm import Remap, residual_add, rms_norm
from .plan import Plan
from .plan.simulate import simulate
from .world import World, init, spmd

__all__ = [
    "Deadlock", "MemoryFault", "Mismatch", "Plan", "Race", "SignalError", "Timeout", "Unsupported", "WeftError", "World",
    "Remap", "Routing", "all_gather_matmul", "all_reduce", "all_reduce_rms_norm", "init", "jit", "lang", "matmul_all_reduce",
    "matmul_all_to_all", "matmul_reduce_scatter", "models", "nn", "plan", "residual_add", "rms_norm", "route", "silu_mul",
    "simulate", "spmd",
]  # fmt: skip
