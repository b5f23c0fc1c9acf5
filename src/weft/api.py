"""This module lists the public names of weft, and nothing else. `__init__.py` imports `hf` and `parallel` when they are
first used: they need DTensor, whose import takes most of a second."""

from typing import TYPE_CHECKING

from . import lang, models, moe, nn, plans, vllm
from . import torch as torch
from .errors import Deadlock, MemoryFault, Mismatch, Overflow, Race, SignalError, Timeout, Unsupported, WeftError
from .kernel_launch import Launch, Matrix
from .lang.jit import jit
from .launch import init, spmd
from .op import Call, Op, registered
from .ops.activation import silu_mul, silu_mul_quantized
from .ops.all_gather_matmul.op import all_gather_matmul, all_gather_matmul_with_gathered
from .ops.all_reduce.op import all_reduce, all_reduce_rms_norm, all_reduce_rms_norm_quantized
from .ops.attention.key_ranges import zigzag_positions, zigzag_restore, zigzag_rows, zigzag_split
from .ops.attention.op import gathered_attention
from .ops.matmul_all_to_all.op import Routing, matmul_all_to_all, route
from .ops.matmul_all_to_all_routed.op import matmul_all_to_all_routed
from .ops.matmul_reduce.op import (
    matmul_all_reduce,
    matmul_all_reduce_tiles,
    matmul_reduce_scatter,
    matmul_reduce_scatter_tiles,
)
from .ops.moe.tensor_parallel.op import all_gather_grouped_matmul, grouped_matmul_reduce_scatter
from .ops.norm import Remap, residual_add, rms_norm
from .ops.product import matmul
from .ops.quantize import quantize
from .planner.auto import explain
from .planner.prepare import prepare
from .planner.simulate import simulate
from .plans import Plan
from .scaled_tensor import ScaledTensor
from .world import World

if TYPE_CHECKING:
    from . import hf, parallel

__all__ = [
    "Call", "Deadlock", "Launch", "Matrix", "MemoryFault", "Mismatch", "Op", "Overflow", "Plan", "Race", "Remap",
    "Routing", "ScaledTensor", "SignalError", "Timeout", "Unsupported", "WeftError", "World",
    "all_gather_grouped_matmul", "all_gather_matmul", "all_gather_matmul_with_gathered", "all_reduce",
    "all_reduce_rms_norm", "all_reduce_rms_norm_quantized", "explain", "gathered_attention",
    "grouped_matmul_reduce_scatter", "hf", "init", "jit", "lang", "matmul", "matmul_all_reduce",
    "matmul_all_reduce_tiles", "matmul_all_to_all", "matmul_all_to_all_routed", "matmul_reduce_scatter",
    "matmul_reduce_scatter_tiles", "models", "moe", "nn", "parallel", "plans", "prepare", "quantize",
    "registered", "residual_add", "rms_norm", "route", "silu_mul", "silu_mul_quantized", "simulate", "spmd", "vllm",
    "zigzag_positions", "zigzag_restore", "zigzag_rows", "zigzag_split",
]  # fmt: skip
