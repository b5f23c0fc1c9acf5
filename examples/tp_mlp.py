"""A tensor-parallel Llama MLP: every rank has some rows of x and its shard of the weights.

On GPUs:            torchrun --nproc-per-node 8 examples/tp_mlp.py
On emulated ranks:  python examples/tp_mlp.py --emulated
"""

import torch
from torch.nn.functional import silu

import weft


def main(world, hidden=64, intermediate=96, tokens=48):
    draw = torch.Generator(world.device).manual_seed(0)  # unsharded tensors, the same on every rank

    def randn(rows, scale=1.0):
        return (torch.randn(rows, hidden, generator=draw, device=world.device) * scale).bfloat16()

    x = randn(tokens)
    gate, up, down_t = (randn(intermediate, hidden**-0.5) for _ in range(3))
    mlp = weft.nn.ParallelMLP(hidden, intermediate, world=world)
    mlp.load_state_dict({"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down_t.t()})
    with torch.no_grad():
        y = mlp(x.chunk(world.size)[world.rank])  # this rank's rows -> the same rows of the result
    expected = (silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t())) @ down_t.float()
    torch.testing.assert_close(
        y.float(), expected.chunk(world.size)[world.rank], rtol=0.05, atol=0.05 * expected.std().item()
    )


if __name__ == "__main__":
    from launch import launch

    launch(main, 4096, 14336, 8192)
