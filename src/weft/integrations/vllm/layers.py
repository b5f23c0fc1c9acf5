"""The classes of vLLM's modules, and the forwards of the copies that replace these modules in the twin."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ...ops.all_reduce.op import WIDEST
from ...tensor_checks import DTYPES
from ...world import World
from .fp8 import Fp8Linears, weight_of
from .interface import VllmObject
from .row_all_reduce import ROW_ALL_REDUCE
from .row_norm_column import ROW_NORM_COLUMN, LayerTensors
from .twin import copied

# The attributes of a linear that the functions below read.
LINEAR = ("weight", "bias", "quant_method", "return_bias", "skip_bias_add", "tp_size")


# -- the kinds of vLLM's modules ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Classes:
    """The classes of the installed vLLM (`read_interface`); a missing optional class is None. `runner` is the class
    that runs a mixture of experts. `fp8` contains the model's FP8 linears."""

    row: VllmObject
    column: VllmObject
    norm: VllmObject
    unquantized: VllmObject
    gemma_norm: VllmObject = None
    runner: VllmObject = None
    fp8: Fp8Linears = field(default_factory=Fp8Linears)

    def reduces(self, module: VllmObject) -> bool:
        """Return whether a module ends in an all-reduce that a copy of the module can omit."""
        if isinstance(module, self.row):
            linear = all(hasattr(module, name) for name in (*LINEAR, "reduce_results", "input_is_parallel"))
            return bool(linear and module.reduce_results and module.tp_size > 1 and not module.skip_bias_add)
        return self.runner is not None and isinstance(module, self.runner) and sums_experts(module)

    def gives_bias(self, module: VllmObject) -> bool:
        """Return whether a module returns (output, bias)."""
        return isinstance(module, self.row) and bool(getattr(module, "return_bias", False))

    def is_norm(self, module: VllmObject) -> bool:
        if type(module) not in (self.norm, self.gemma_norm):
            return False
        if getattr(module, "variance_size_override", None) is not None or not getattr(module, "has_weight", True):
            return False
        width = module.weight.numel()
        return width % 8 == 0 and width <= WIDEST and hasattr(module, "variance_epsilon")

    def is_column(self, module: VllmObject) -> bool:
        if not isinstance(module, self.column) or getattr(module, "gather_output", True):
            return False
        return self.multiplies(module) and not module.skip_bias_add

    def is_gemm(self, reduction: VllmObject) -> bool:
        """Return whether a reduction is a row-parallel linear that computes nothing but a GEMM before the
        all-reduce."""
        return isinstance(reduction, self.row) and self.multiplies(reduction) and bool(reduction.input_is_parallel)

    def multiplies(self, linear: VllmObject) -> bool:
        """Return whether weft's operators support the weight of a linear."""
        return self.plain(linear) or self.fp8.accepts(linear)

    def gemm_name(self, linear: VllmObject) -> str:
        return "FP8 GEMM" if self.fp8.accepts(linear) else "GEMM"

    def plain(self, linear: VllmObject) -> bool:
        """Return whether a linear is unquantised, with a contiguous 16-bit weight [N, K]."""
        if not all(hasattr(linear, name) for name in LINEAR) or type(linear.quant_method) is not self.unquantized:
            return False
        weight = linear.weight
        return bool(weight.dim() == 2 and weight.numel() and weight.dtype in DTYPES and weight.is_contiguous())


def sums_experts(runner: VllmObject) -> bool:
    """Return whether a runner of experts ends in an all-reduce that its configuration can turn off."""
    config: VllmObject = getattr(runner, "moe_config", None)
    if getattr(config, "skip_final_all_reduce", True) or getattr(config, "is_sequence_parallel", True):
        return False
    if getattr(config, "dp_size", 2) > 1 or getattr(config, "pcp_size", 1) > 1:
        return False
    # A transform of latent experts reads the sum, and the output of a zero expert is added after the sum.
    if getattr(runner, "routed_output_transform", None) is not None or hasattr(
        getattr(runner, "router", None), "zero_expert_output"
    ):
        return False
    return bool(config.tp_size * config.ep_size > 1) and not getattr(runner, "_fused_output_is_reduced", True)


# -- forwards ----------------------------------------------------------------------------------------------------------
class Served(NamedTuple):
    """The linears before and after a norm, for the norm's call of ROW_NORM_COLUMN. A linear is None if the norm does
    not compute the linear's GEMM."""

    row: VllmObject | None
    column: VllmObject | None
    world: World


class PassThroughLinear:
    """A linear without its GEMM, because the norm before or after the linear computes it."""

    return_bias: bool

    def forward(self, input_: Tensor) -> VllmObject:
        return (input_, None) if self.return_bias else input_


class SummedNorm:
    """An RMSNorm that first sums its input over the ranks."""

    weft: Served
    weight: Tensor
    variance_epsilon: float

    def scale(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor, residual: Tensor | None = None) -> VllmObject:
        row, column, world = self.weft
        none = (None, None, None)
        row_weight, row_scale, row_bias = none if row is None else (*weight_of(row), row.bias)
        column_weight, column_scale, column_bias = none if column is None else (*weight_of(column), column.bias)
        operands = LayerTensors(
            *(x, residual, self.scale(), row_weight, row_bias, column_weight, column_bias, row_scale, column_scale)
        )
        y, new_residual = ROW_NORM_COLUMN(world, "auto", operands, (self.variance_epsilon,))
        return y if residual is None else (y, new_residual)


class SummedGemmaNorm(SummedNorm):
    """A Gemma norm, which scales by 1 + weight in float32."""

    def scale(self) -> Tensor:
        return self.weight.float() + 1.0


class Row:
    """A row-parallel linear whose GEMM overlaps its own all-reduce."""

    weft: World
    weight: Tensor
    bias: Tensor | None
    return_bias: bool

    def forward(self, input_: Tensor) -> VllmObject:
        weight, scale = weight_of(self)
        y = ROW_ALL_REDUCE(self.weft, "auto", (input_.flatten(0, -2), weight, self.bias, scale))
        y = y.view(*input_.shape[:-1], y.shape[1])
        return (y, None) if self.return_bias else y


# -- copies ------------------------------------------------------------------------------------------------------------
def without_sum(reduction: VllmObject) -> VllmObject:
    """Return a copy of the module that returns the partial sum without the all-reduce."""
    if hasattr(reduction, "reduce_results"):
        return copied(reduction, reduce_results=False)
    config = copy(reduction.moe_config)
    config.skip_final_all_reduce = True
    return copied(reduction, moe_config=config)
