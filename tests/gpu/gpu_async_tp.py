"""The GPU checks of torch's fused operators that weft serves; gpu_main.py runs them. `checks` yields a name, a bound
and a function for each. If weft served no call, a check's error is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.emulated.cases import distance, draw
from tests.emulated.cases_fp8 import factors
from weft.integrations.torch_async_tp import FUSED_GATHER, FUSED_SCATTER, AsyncTP, async_tp

BF16 = 1e-2


def name_of(world: weft.World) -> str:
    assert world.group is not None
    return world.group.group_name


def judged(counts: AsyncTP, errors: list[float], served: int) -> float:
    return max(errors) if counts.served.total() == served and not counts.fell_through else float("inf")


def gathers(world: weft.World) -> float:
    """Compare the gather of matrices and batches along their first and second dimensions, with one weight and with
    three, with torch's definition."""
    import torch.distributed._symmetric_memory as torch_symm_mem

    errors, calls = [], 0
    with async_tp(world) as counts:
        for shape, dim in (((128, 256), 0), ((64, 5, 256), 0), ((3, 96, 256), 1), ((8, 64, 32), 1), ((8, 64, 32), 0)):
            for count in (1, 3):
                x = draw(world.rank, *shape).to(world.device)
                bs = [draw(10 * i + world.rank, 320 + 64 * i, shape[-1]).to(world.device) for i in range(count)]
                bs = [b.t() if i % 2 == 0 else b.t().contiguous() for i, b in enumerate(bs)]
                a, ys = torch.ops.symm_mem.fused_all_gather_matmul(x, bs, dim, name_of(world))
                whole, expected = torch_symm_mem._fused_all_gather_matmul_fallback(x, bs, dim, name_of(world))
                errors += [0.0 if torch.equal(a, whole) else float("inf")]
                errors += [distance(y.float(), z.float()) for y, z in zip(ys, expected, strict=True)]
                errors += [0.0 if y.stride() == z.stride() else float("inf") for y, z in zip(ys, expected, strict=True)]
                calls += 1
    return judged(counts, errors, calls)


def scatters(world: weft.World) -> float:
    import torch.distributed._symmetric_memory as torch_symm_mem

    errors, calls = [], 0
    with async_tp(world) as counts:
        for shape, dim in (((128 * world.size, 256), 0), ((8 * world.size, 5, 256), 0), ((3, 16 * world.size, 256), 1)):
            for transposed in (True, False):
                x, b = draw(world.rank, *shape).to(world.device), draw(50 + world.rank, 384, shape[-1]).to(world.device)
                b = b.t() if transposed else b.t().contiguous()
                reduce_op = "sum" if transposed else "avg"
                y = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, reduce_op, dim, name_of(world))
                expected = torch_symm_mem._fused_matmul_reduce_scatter_fallback(
                    x.float(), b.float(), reduce_op, dim, name_of(world)
                )
                errors.append(distance(y.float(), expected))
                calls += 1
    return judged(counts, errors, calls)


def in_8_bits(world: weft.World) -> float:
    """Compare both operators with operands that are scaled by tensor and by row with torch's definition."""
    import torch.distributed._symmetric_memory as torch_symm_mem

    errors, calls, n = [], 0, 320
    with async_tp(world) as counts:
        for scaling in ("tensor", "row"):
            x, w, xs, ws = factors(1, 64 * world.size, n, 256, scaling, world.device)
            w_scale, dtype = (ws.view(1, -1) if scaling == "row" else ws), torch.bfloat16
            own_x = x.chunk(world.size)[world.rank].contiguous()
            own_scale = xs.chunk(world.size)[world.rank].contiguous() if scaling == "row" else xs
            arguments = (own_x, [w.t()], own_scale, [w_scale], 0, name_of(world), [None], [None], [dtype], [False])
            a, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(*arguments)
            whole, (expected,) = torch_symm_mem._fused_all_gather_scaled_matmul_fallback(*arguments)
            errors += [0.0 if torch.equal(a.view(torch.uint8), whole.view(torch.uint8)) else float("inf")]
            errors += [distance(y.float(), expected.float())]
            rest = ("sum", 0, 0, name_of(world), [len(x), n], None, None, dtype, False)
            z = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(x, w.t(), xs, w_scale, *rest)
            expected = torch_symm_mem._fused_scaled_matmul_reduce_scatter_fallback(x, w.t(), xs, w_scale, *rest)
            errors += [distance(z.float(), expected.float())]
            calls += 2
    return judged(counts, errors, calls)


def passed_on(world: weft.World) -> float:
    """Check that float32 operands reach torch's own operator and its kernels."""
    import torch.distributed._symmetric_memory as torch_symm_mem

    x, b = draw(world.rank, 64, 32).float().to(world.device), draw(7, 16, 32).float().to(world.device).t()
    with async_tp(world) as counts:
        _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, name_of(world))
        z = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, "sum", 0, name_of(world))
    if counts.fell_through != {(FUSED_GATHER, "of float32"): 1, (FUSED_SCATTER, "of float32"): 1}:
        return float("inf")
    _, (expected_gather,) = torch_symm_mem._fused_all_gather_matmul_fallback(x, [b], 0, name_of(world))
    expected_scatter = torch_symm_mem._fused_matmul_reduce_scatter_fallback(x, b, "sum", 0, name_of(world))
    return max(distance(y, expected_gather), distance(z, expected_scatter))


def compiled(world: weft.World, dim: int) -> float:
    """Compare a sequence-parallel MLP of DTensors under torch.compile, forward and backward, with the same MLP in eager
    mode. weft serves both fused operators of the forward pass; torch determines their number in the backward pass."""
    torch.manual_seed(0)  # the same weights on every rank
    layers = torch.nn.Linear(256, 512, bias=False), torch.nn.SiLU(), torch.nn.Linear(512, 256, bias=False)
    mlp = torch.nn.Sequential(*layers).to(world.device, torch.bfloat16)
    plan = {"0": ColwiseParallel(input_layouts=Shard(dim)), "2": RowwiseParallel(output_layouts=Shard(dim))}
    mlp = parallelize_module(mlp, DeviceMesh.from_group(world.group, "cuda"), plan)
    shape = (128, 256) if dim == 0 else (2, 128, 256)
    x, dy = (draw(10 * i + world.rank, *shape).to(world.device) for i in range(2))

    def step(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        mlp.zero_grad()
        x_leaf = x.clone().requires_grad_()
        y = run(x_leaf)
        y.backward(dy)
        grads = [p.grad.to_local().float().clone() for p in mlp.parameters()]
        return [y.detach().float().clone(), x_leaf.grad.float(), *grads]

    expected = step(mlp)
    torch._dynamo.reset()
    with async_tp(world) as counts:
        run = torch.compile(mlp, fullgraph=True)
        kept = [step(run) for _ in range(4)]
    torch.cuda.synchronize()
    torch._dynamo.reset()
    if min(counts.served[FUSED_GATHER], counts.served[FUSED_SCATTER]) < 4:
        print(f"rank {world.rank}: {counts.report()}", flush=True)
        return float("inf")
    return max(distance(a, b) for actual in kept for a, b in zip(actual, expected, strict=True))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    if world.group is None or world.size == 1:
        return
    yield "async_tp all-gather, eager", BF16, partial(gathers, world)
    yield "async_tp reduce-scatter, eager", BF16, partial(scatters, world)
    yield "async_tp of 8-bit operands", BF16, partial(in_8_bits, world)
    yield "async_tp float32 by torch", 1e-3, partial(passed_on, world)
    yield "async_tp compiled", 2 * BF16, partial(compiled, world, 0)
    yield "async_tp compiled, second dimension", 2 * BF16, partial(compiled, world, 1)
