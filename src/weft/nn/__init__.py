"""Tensor-parallel modules in the sequence-parallel layout: between modules each rank holds some of the rows."""

from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .sharded import clip_grad_norm_, full_state_dict

__all__ = ["ColumnParallelLinear", "ParallelMLP", "RowParallelLinear", "clip_grad_norm_", "full_state_dict", "weave"]
