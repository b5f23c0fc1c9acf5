"""A tensor-parallel MLP in plain torch under torch.compile; weft computes its GEMMs with collectives.

On GPUs:            torchrun --nproc-per-node 8 examples/torch_async_tp.py
On emulated ranks:  python examples/torch_async_tp.py --emulated  (the operators only, without torch.compile)
"""

import torch
from torch.nn.functional import silu

import weft


def main(world, tokens=16, hidden=64, inner=32):
    """Call the operators that torch.compile's pass would put into the MLP. This rank's tokens go in and out."""
    group = world.group.group_name if world.group else world.name
    draw = torch.Generator(world.device).manual_seed(0)  # the same on every rank
    options = dict(generator=draw, dtype=torch.bfloat16, device=world.device)
    x, up, down = (
        torch.randn(*shape, **options) * scale
        for shape, scale in (
            ((world.size * tokens, hidden), 1.0),
            ((world.size * inner, hidden), hidden**-0.5),
            ((hidden, world.size * inner), (world.size * inner) ** -0.5),
        )
    )
    rank_rows = slice(world.rank * tokens, (world.rank + 1) * tokens)
    up_r, down_r = up.chunk(world.size)[world.rank], down.chunk(world.size, 1)[world.rank]
    with weft.torch.async_tp() as counts:
        _, (h,) = torch.ops.symm_mem.fused_all_gather_matmul(x[rank_rows], [up_r.t()], 0, group, return_A=False)
        y = torch.ops.symm_mem.fused_matmul_reduce_scatter(silu(h), down_r.t(), "sum", 0, group)
    assert counts.served.total() >= 2 and not counts.fell_through, counts.report()
    expected = silu(x.float() @ up.float().t()) @ down.float().t()
    torch.testing.assert_close(y.float(), expected[rank_rows], rtol=0.05, atol=0.05 * expected.std().item())


def compiled(world, tokens=1024, hidden=4096, inner=14336):
    """Run torch's own tensor parallelism, sequence-parallel between its layers. One more line runs its operators with weft."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = torch.nn.Linear(hidden, inner, bias=False), torch.nn.SiLU(), torch.nn.Linear(inner, hidden, bias=False)
    mlp = torch.nn.Sequential(*layers).to(world.device, torch.bfloat16)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    mlp = parallelize_module(mlp, DeviceMesh.from_group(world.group, "cuda"), plan)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=world.device)
    with torch.no_grad():
        expected = mlp(x)
        with weft.torch.async_tp(world) as counts:  # the one line
            y = torch.compile(mlp, fullgraph=True)(x)
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05 * expected.std().item())
    if world.rank == 0:
        print(counts.report())


if __name__ == "__main__":
    from launch import launch

    launch(main, 1024, 4096, 1792, on_gpus=compiled)
