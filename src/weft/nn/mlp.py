"""The MLP of a Llama layer: x shard -> all-gather + GEMM -> SiLU-mul -> GEMM + reduce-scatter -> y shard.

One parameter holds gate and up, so that one GEMM computes both. Blocks of gate rows alternate with blocks of up rows.
Every tile of the GEMM contains whole blocks, and the last two blocks are padded with zero rows:

    gate_up [S, H]    gate 0..B | up 0..B | gate B..2B | up B..2B | ... | gate, 0 | up, 0

A tile then holds matching blocks, and without gradients the GEMM's epilogue computes silu(gate) * up, so that the
activation [M, 2 I / W] is never written. With gradients the activation is written, because the backward pass needs it.
Padding has zero gradients and stays zero. State dicts do not contain the padding.

With 8-bit weights (`recipe`), gate and up are one block each. SiLU-mul writes 8-bit rows with their scales, which a
GEMM's epilogue cannot compute because it holds only part of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..ops.activation import silu_mul_blocks, silu_mul_quantized
from ..ops.all_gather_matmul.op import all_gather_matmul, all_gather_matmul_with_gathered, all_gather_swiglu
from ..ops.matmul_reduce.op import matmul_reduce_scatter
from ..plans import Plan
from ..tensor_checks import requires_grad
from ..world import World
from .scaled import NAMES, Activation, ScaledModule, product_operands
from .sharded import divide_by_ranks


class ParallelMLP(ScaledModule):
    """SwiGLU: (silu(x @ gate_proj.T) * (x @ up_proj.T)) @ down_proj.T, without biases; a rank holds I / W of the hidden
    columns.

        forward     x [m_r, H] -> [m_r, H], the same rows
        state dict  gate_proj.weight, up_proj.weight [I / W, H], down_proj.weight [H, I / W], named as in Hugging Face's
                    LlamaMLP; `load_state_dict` loads its state dict; see `weft.nn.full_state_dict`
        parameters  gate_up [S, H], down [H, I / W]; S is 2 I / W rounded up to whole blocks

    H is hidden_size, I intermediate_size, W the number of ranks, m_r the rows of this rank, M the rows of all ranks.
    keep_gathered: save the gathered x [M, H] for the backward pass, which otherwise gathers it again. `state_dict()`
    copies gate_proj and up_proj from gate_up: write to parameters, not to these copies. recipe: "row" or "block", as in
    ColumnParallelLinear: weights are e4m3 without a gradient, each with a weight_scale or weight_scale_inv; x has 16
    bits, or is a `weft.ScaledTensor`, as `weft.quantize` or `all_reduce_rms_norm_quantized` returns it. Raises
    ValueError if W does not divide I, TypeError for a dtype other than bfloat16 and float16.
    """

    sharded_dim = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    sharded_parameters = ("gate_up", "down", "gate_up_scale", "down_scale")
    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        world: World,
        keep_gathered: bool = False,
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
        recipe: str | None = None,
    ) -> None:
        inner = divide_by_ranks("ParallelMLP: intermediate_size", intermediate_size, world)
        super().__init__(world, dtype, recipe)
        self.hidden_size, self.intermediate_size, self.plan = hidden_size, intermediate_size, plan
        self.keep_gathered = keep_gathered
        self.inner, self.block = inner, world.backend.scale.interleave if recipe is None else inner
        half = -(-inner // self.block) * self.block
        self.add_matrix("gate_up", [half, half], hidden_size)
        self.add_matrix("down", [hidden_size], inner)
        self.name_scales("gate_proj.", "up_proj.", "down_proj.")
        bound = hidden_size**-0.5
        self.fill({"gate_proj.weight": bound, "up_proj.weight": bound, "down_proj.weight": intermediate_size**-0.5})

    @property
    def weights(self) -> tuple[Activation, Activation]:
        """Return the weights of the GEMMs before and after the activation, as operands for ops."""
        return self.weight_operand("gate_up"), self.weight_operand("down")

    def forward(self, x: Activation, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Apply the MLP. rows: the number of rows of every rank's x, if they are not all equal."""
        world, plan = self.world, self.plan
        if self.recipe is not None:
            return self._in_8_bits(x, rows, self.recipe)
        x = cast(torch.Tensor, x)  # the op rejects anything else
        if torch.is_grad_enabled() and requires_grad(x, self.gate_up, self.down):
            if self.keep_gathered and self.gate_up.requires_grad:
                gate_up, _ = all_gather_matmul_with_gathered(x, self.gate_up, world=world, plan=plan, rows=rows)
            else:
                gate_up = all_gather_matmul(x, self.gate_up, world=world, plan=plan, rows=rows)
            hidden = silu_mul_blocks(gate_up, self.inner, self.block, world)
        else:
            hidden = all_gather_swiglu(x, self.gate_up, self.inner, world, plan, rows)
        return matmul_reduce_scatter(hidden, self.down, world=world, plan=plan, rows=rows)

    def _in_8_bits(self, x: Activation, rows: Sequence[int] | None, recipe: str) -> torch.Tensor:
        world, plan, dtype = self.world, self.plan, self.dtype
        gate_up, down = self.weights
        x, options = product_operands(x, gate_up, dtype, world)
        y = all_gather_matmul(x, gate_up, world=world, plan=plan, rows=rows, **options)
        hidden, options = product_operands(silu_mul_quantized(y, recipe, world=world), down, dtype, world)
        return matmul_reduce_scatter(hidden, down, world=world, plan=plan, rows=rows, **options)

    def _half(self, name: str) -> torch.Tensor:
        """Return the blocks [S / 2B, B, H] of gate or up, as a view."""
        blocks = self.gate_up.view(-1, 2, self.block, self.hidden_size)
        return blocks[:, 0 if name == "gate_proj.weight" else 1]

    def get_shard(self, name: str) -> torch.Tensor:
        projection, _, parameter = name.partition(".")
        if parameter in NAMES.values():
            assert self.gate_up_scale is not None and self.down_scale is not None
            if projection == "down_proj":
                return self.down_scale
            return self.gate_up_scale.chunk(2)[projection == "up_proj"]
        if name == "down_proj.weight":
            return self.down
        return self._half(name).reshape(-1, self.hidden_size)[: self.inner]

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        if name not in ("gate_proj.weight", "up_proj.weight"):
            super().set_shard(name, value)
            return
        half = self._half(name)
        padding = half.shape[0] * self.block - self.inner
        half.copy_(nn.functional.pad(value.to(half), (0, 0, 0, padding)).view(half.shape))

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, {super().extra_repr()}"
