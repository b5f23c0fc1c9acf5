"""The FP8 linears of a model in vLLM that weft's operators support, and the products with their weights and scales.

An operator that combines such a GEMM with a collective uses weft's kernels to quantise x and to multiply. If no
collective overlaps the GEMM, vLLM's own kernel computes the product (`product`). WEFT_VLLM_FP8=1 turns FP8 GEMMs on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ...ops.product import MATMUL, matmul
from ...ops.quantize import quantize
from ...ops.recipes import UNSCALED, ProductOptions, ScaledFactors
from ...scaled_tensor import E4M3, SCALE_BLOCK
from ...tensor_checks import DTYPES
from ...world import World
from .interface import VllmObject, gather_objects

WEFT_VLLM_FP8 = "WEFT_VLLM_FP8"  # the environment variable that turns FP8 GEMMs on with 1
SAMPLE_ROWS = 64  # the number of random rows for comparing products; below 32 rows vLLM may use a different kernel
# The largest accepted difference of products, relative to their norm. If weft and vLLM rounded x to e4m3 with different
# scales, the difference would be 0.025 or more (K 256 and 4096, normal distribution).
ROUNDING = torch.finfo(torch.bfloat16).eps

# The accepted linears by the addresses of their weights. The arguments of an operator are a linear's tensors rather
# than the linear, because layers share compiled code, and shared code must not name one linear.
_linear_by_address: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def asked_for() -> bool:
    """Return whether weft should serve FP8 GEMMs."""
    return os.environ.get(WEFT_VLLM_FP8) == "1"


# -- weights -----------------------------------------------------------------------------------------------------------
class LinearWeight(NamedTuple):
    """A linear's weight [N, K] and, if the weight is e4m3, its scales in float32: [N], [1] for the whole weight, or [N
    / 128, K / 128] by block. Both are views of the linear's parameters, because a copy could become stale: vLLM reloads
    parameters in place without a change of their version, so compiled code and CUDA graphs would not detect it."""

    weight: Tensor
    scale: Tensor | None


def weight_of(linear: VllmObject) -> LinearWeight:
    """Return the weight of a linear that is unquantised or has passed `layout_problem`. vLLM stores an FP8 weight
    transposed, unless the weight has scales by block."""
    if linear.weight.dtype != E4M3:
        return LinearWeight(linear.weight, None)
    scale = scale_of(linear)
    if getattr(linear, "weight_block_size", None):
        return LinearWeight(linear.weight, scale)
    return LinearWeight(linear.weight.t(), scale.view(-1))


def scale_of(linear: VllmObject) -> VllmObject:
    """Return the scales of an FP8 weight as the linear stores them, or None."""
    inverse = getattr(linear, "weight_scale_inv", None)  # the name of the scales in DeepSeek's checkpoints
    return getattr(linear, "weight_scale", None) if inverse is None else inverse


def is_of_whole_weight(scale: Tensor) -> bool:
    return scale.shape == (1,)


def block_scale_shape(n: int, k: int) -> tuple[int, int]:
    return -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)


def operand_specs(
    name: str, weight: Tensor | None, scale: Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes that the operands `name` and `name`_scale must have, for `check_operands`."""
    scale_shape: tuple[int, ...] = shape[:1] if scale is None or scale.dim() == 1 else block_scale_shape(*shape)
    if scale is not None and is_of_whole_weight(scale):
        scale_shape = (1,)
    return {
        name: (weight, shape, dtype if scale is None else E4M3),
        f"{name}_scale": (scale, scale_shape, torch.float32),
    }


def layout_problem(linear: VllmObject) -> str:
    """Return why `weight_of` or weft's operators do not support the layout of an FP8 linear, "" if both do."""
    weight, scale, bias = linear.weight, scale_of(linear), linear.bias
    blocks, n, k = linear.weight_block_size, linear.output_size_per_partition, linear.input_size_per_partition
    if blocks and list(blocks) != [SCALE_BLOCK, SCALE_BLOCK]:
        return f"scales are of blocks {list(blocks)}"
    known_scales = [block_scale_shape(n, k)] if blocks else [(), (1,), (n,), (n, 1)]
    stored, multiple = ((n, k), SCALE_BLOCK) if blocks else ((k, n), 16)
    problems = {
        "the scale of the input is static": linear.input_scale is not None,
        "the weight is packed or padded": weight.dtype != E4M3
        or weight.shape != stored
        or not (weight if blocks else weight.t()).is_contiguous(),
        "the scales are packed or padded": not isinstance(scale, Tensor)
        or scale.dtype != torch.float32
        or tuple(scale.shape) not in known_scales
        or not scale.is_contiguous(),
        f"N {n} and K {k} are no multiples of 8 and {multiple}": n % 8 or k % multiple,
        "the bias has more than 16 bits": bias is not None and bias.dtype not in DTYPES,
    }
    return next((problem for problem, is_so in problems.items() if is_so), "")


# -- products ----------------------------------------------------------------------------------------------------------
def product(world: World, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. On a batch-invariant World weft's own GEMM computes the product. For a weight in e4m3
    vLLM computes it, or weft if no linear with this weight is known."""
    if world.batch_invariant:
        return matmul(x.contiguous(), weight, bias, world=world)
    stream = world.current_stream()
    if scale is None:
        return world.backend.linear(x.contiguous(), weight, bias, stream)
    linear: VllmObject = _linear_by_address.get(weight.data_ptr())
    if linear is None or linear.weight.data_ptr() != weight.data_ptr():  # the linear has a new weight
        return own_product(world, x, weight, bias, scale)
    rows, shape = x.contiguous(), (x.shape[0], weight.shape[0])
    reads = [rows, linear.weight, scale] + ([] if bias is None else [bias])
    (y,) = world.backend.results(
        lambda: [linear.quant_method.apply(linear, rows, bias)], [(shape, x.dtype)], reads, stream
    )
    return y


def own_product(world: World, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Return x @ weight.T + bias for a weight in e4m3, computed by weft's kernels alone."""
    product: Tensor = MATMUL(world, "auto", *scaled_operands(world, x, weight, bias, scale))
    return product


def scaled_operands(
    world: World, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None
) -> tuple[ScaledFactors, ProductOptions]:
    """Return the operands and options of weft's ops for this product, whose result has x's dtype. For a weight in e4m3,
    x is quantised. A scale of the whole weight is expanded to one scale for each row, since the ops do not combine a
    scale by tensor with scales of x's rows."""
    if scale is None:
        return ScaledFactors(x, weight, bias), UNSCALED
    if is_of_whole_weight(scale):
        scale = scale.expand(weight.shape[0]).contiguous()
    recipe = "row" if scale.dim() == 1 else "block"
    values, x_scale, _ = quantize(x, recipe, world=world)
    return ScaledFactors(values, weight, bias, x_scale, scale), ProductOptions(recipe, x.dtype, fast_accum=True)


def difference(world: World, linear: VllmObject, dtype: torch.dtype) -> str:
    """Compare weft's product of random rows with vLLM's. Return a description of the difference if it exceeds rounding,
    "" otherwise. Never raises, because the ranks then compare their results."""
    try:
        weight, scale = weight_of(linear)
        assert scale is not None
        x = torch.randn(SAMPLE_ROWS, weight.shape[1], device=world.device).to(dtype)
        actual = own_product(world, x, weight, None, scale)
        world.synchronize()
        expected = linear.quant_method.apply(linear, x, None).float()
        relative = float((actual.float() - expected).norm() / expected.norm())
        return "" if relative <= ROUNDING else f"weft's product differs by {relative:.0e} of its norm"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# -- of a model --------------------------------------------------------------------------------------------------------
@dataclass
class Fp8Linears:
    """The linears of a model with a `quant_method` of one of the classes `methods`. `reasons` maps the id of each
    linear to the reason why vLLM computes its GEMM, or to "" if weft may compute it."""

    methods: tuple[type, ...] = ()
    reasons: dict[int, str] = field(default_factory=dict)

    def find(self, linears: Iterable[nn.Module]) -> None:
        """Add the linears that one of the methods quantises. A linear is accepted if its layout is known."""
        for linear in linears:
            if type(getattr(linear, "quant_method", None)) in self.methods:
                try:
                    self.reasons[id(linear)] = layout_problem(linear)
                except Exception as error:
                    self.reasons[id(linear)] = f"{type(error).__name__}: {error}"

    def accepts(self, linear: VllmObject) -> bool:
        return self.reasons.get(id(linear)) == ""

    def compare(self, linears: Sequence[nn.Module], world: World, dtype: torch.dtype, group: VllmObject) -> None:
        """Compare weft's products with vLLM's for the accepted linears. Reject a linear if its products differ on any
        rank of vLLM's group. The call is collective."""
        compared = [linear for linear in linears if self.accepts(linear)]
        by_rank = gather_objects([difference(world, linear, dtype) for linear in compared], group)
        for linear, reasons in zip(compared, zip(*by_rank, strict=True), strict=True):
            self.reasons[id(linear)] = next(filter(None, reasons), "")
            if self.accepts(linear):
                _linear_by_address[linear.weight.data_ptr()] = linear  # type: ignore[operator]

    def left(self) -> list[str]:
        """Return a line for each reason why vLLM computes GEMMs of these linears."""
        counts = Counter(filter(None, self.reasons.values()))
        return [f"the GEMM of {count} quantised linears: {reason}" for reason, count in counts.items()]
