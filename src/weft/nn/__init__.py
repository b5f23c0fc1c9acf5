"""Tensor-parallel modules over the ops, in the sequence-parallel layout: every rank holds some rows of the activation."""

from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .sharded import full_state_dict

__all__ = ["ColumnParallelLinear", "ParallelMLP", "RowParallelLinear", "full_state_dict"]
