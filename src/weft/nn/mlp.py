"""The MLP of a Llama layer: x shard -> all-gather + GEMM -> SiLU-mul -> GEMM + reduce-scatter -> y shard.

One parameter holds gate and up, so that one GEMM computes both. Its rows alternate blocks of gate and of up, whole ones
in every tile of the GEMM, the last two padded with zero rows:

    gate_up [S, H]    gate 0..B | up 0..B | gate B..2B | up B..2B | ... | gate, 0 | up, 0

A tile then holds matching blocks, and where no gradients are needed the GEMM's epilogue computes silu(gate) * up: the
activation [M, 2 I / W] is never written. With gradients it is, because the backward pass needs it. Padding gets zero
gradients and stays zero. State dicts know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..ops.activation import silu_mul_blocks
from ..ops.all_gather_matmul.op import all_gather_matmul, all_gather_swiglu
from ..ops.matmul_reduce.op import matmul_reduce_scatter
from ..plans import Plan
from ..tensor_checks import requires_grad
from ..world import World
from .sharded import Sharded, divide_by_ranks


class ParallelMLP(Sharded):
    """SwiGLU: (silu(x @ gate_proj.T) * (x @ up_proj.T)) @ down_proj.T, no biases; a rank holds I / W of the middle.

        forward     x [m_r, H] -> [m_r, H], the same rows
        state dict  gate_proj.weight, up_proj.weight [I / W, H], down_proj.weight [H, I / W]; the names are those of
                    Hugging Face's LlamaMLP, whose state dict `load_state_dict` takes; see `weft.nn.full_state_dict`
        parameters  gate_up [S, H], down [H, I / W]; S is 2 I / W rounded up to whole blocks

    H hidden_size, I intermediate_size, W ranks, m_r rows of this rank, M of all. keep_gathered: the backward pass finds
    the gathered x [M, H] kept, and does not gather it again. `state_dict()` copies gate_proj and up_proj out of
    gate_up: write to parameters, not to its values. Raises ValueError if W does not divide I, TypeError for a dtype
    other than bfloat16 and float16.
    """

    sharded_dim = {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}
    sharded_parameters = ("gate_up", "down")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        world: World,
        keep_gathered: bool = False,
        plan: str | Plan = "auto",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        inner = divide_by_ranks("ParallelMLP: intermediate_size", intermediate_size, world)
        super().__init__(world, dtype)
        self.hidden_size, self.intermediate_size, self.plan = hidden_size, intermediate_size, plan
        self.keep_gathered = keep_gathered
        self.inner, self.block = inner, world.scale.interleave
        blocks = -(-inner // self.block)
        device = world.device
        self.gate_up = nn.Parameter(torch.zeros(2 * blocks * self.block, hidden_size, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(hidden_size, inner, dtype=dtype, device=device))
        bound = hidden_size**-0.5
        self.fill({"gate_proj.weight": bound, "up_proj.weight": bound, "down_proj.weight": intermediate_size**-0.5})

    def forward(self, x: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """rows: rows of every rank's x, where they are not all equal."""
        world, plan = self.world, self.plan
        if torch.is_grad_enabled() and requires_grad(x, self.gate_up, self.down):
            keep = self.keep_gathered and self.gate_up.requires_grad
            made = all_gather_matmul(x, self.gate_up, world=world, plan=plan, rows=rows, return_gathered=keep)
            both = made[0] if isinstance(made, tuple) else made
            hidden = silu_mul_blocks(both, self.inner, self.block, world)
        else:
            hidden = all_gather_swiglu(x, self.gate_up, self.inner, world, plan, rows)
        return matmul_reduce_scatter(hidden, self.down, world=world, plan=plan, rows=rows)

    def _half(self, name: str) -> torch.Tensor:
        """Blocks [S / 2B, B, H] of gate or up, a view."""
        blocks = self.gate_up.view(-1, 2, self.block, self.hidden_size)
        return blocks[:, 0 if name == "gate_proj.weight" else 1]

    def get_shard(self, name: str) -> torch.Tensor:
        if name == "down_proj.weight":
            return self.down
        return self._half(name).reshape(-1, self.hidden_size)[: self.inner]

    def set_shard(self, name: str, value: torch.Tensor) -> None:
        if name == "down_proj.weight":
            self.down.copy_(value)
            return
        half = self._half(name)
        padding = half.shape[0] * self.block - self.inner
        half.copy_(nn.functional.pad(value.to(half), (0, 0, 0, padding)).view(half.shape))

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, {super().extra_repr()}"
