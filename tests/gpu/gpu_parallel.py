"""Check `weft.parallel` on GPUs: forward passes, gradients and training steps are compared with torch's own styles in
the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module, style

import weft
from tests.emulated.cases import distance
from weft import parallel

BATCH, ROWS, HIDDEN, INNER = 2, 512, 512, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.w1, self.w3, self.w2 = nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


def parallelized(styles: Any, mesh: DeviceMesh, dtype: torch.dtype, out: Any) -> nn.Module:
    torch.manual_seed(3)
    block = Block().to(mesh.device_type, dtype)
    plan = dict(
        norm=styles.SequenceParallel(),
        w1=styles.ColwiseParallel(input_layouts=Shard(1)),
        w3=styles.ColwiseParallel(input_layouts=Shard(1)),
        w2=styles.RowwiseParallel(output_layouts=out),
    )
    return parallelize_module(block, mesh, plan)


def local(t: torch.Tensor | None) -> torch.Tensor:
    assert t is not None
    return t.full_tensor() if isinstance(t, DTensor) else t


def beside_torchs(world: weft.World, amp: bool, whole: bool) -> float:
    assert world.group is not None
    mesh = DeviceMesh.from_group(world.group, "cuda")
    dtype, out = torch.float32 if amp else torch.bfloat16, Replicate() if whole else Shard(1)
    results = []
    for styles in (style, parallel):
        block = parallelized(styles, mesh, dtype, out)
        generator = torch.Generator(world.device).manual_seed(world.rank)
        x = torch.randn(BATCH, ROWS // world.size, HIDDEN, device=world.device, generator=generator).to(dtype)
        x.requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            y = block(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, *(local(p.grad) for p in block.parameters())])
    report = parallel.report(block)
    if report.count("by weft") != 3 or "norm: on local rows" not in report:
        return float("inf")
    world.synchronize()
    return max(distance(b.detach().float(), a.detach().float()) for a, b in zip(*results, strict=True))


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    yield "parallel styles, bf16, reduce-scatter", 3e-2, partial(beside_torchs, world, False, False)
    yield "parallel styles, autocast, all-reduce", 3e-2, partial(beside_torchs, world, True, True)
