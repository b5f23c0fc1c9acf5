"""vLLM's own pass for asynchronous tensor parallelism (up to 0.31), with weft's operators where its graph calls
torch's. The patterns come from a vLLM wheel whose Python files are in the folder VLLM_WHEEL, or otherwise from
equivalent lines in this file.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.pattern_matcher as pm
import torch.fx.experimental.proxy_tensor
from torch import fx

import weft

WHEEL = os.environ.get("VLLM_WHEEL")
PASS = "vllm/compilation/passes/fusion/collective_fusion.py"
PATTERNS = ("GEMMReduceScatterPattern", "AllGatherGEMMPattern")
M, K, N = 8, 16, 24


class Gemm:
    """The pass's pattern and its replacement."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype, self.device = dtype, device


class GEMMReduceScatterPattern(Gemm):
    def register(self, pm_pass: Any) -> None:
        def pattern(x: Any, w: Any) -> Any:
            mm = torch.ops.aten.mm.default(x, w)
            return torch.ops.vllm.reduce_scatter.default(
                mm, dim=0, world_size=self.tp_size, group_name=self.tp.unique_name
            )

        def replacement(x: Any, w: Any) -> Any:
            name = self.tp.device_group.group_name
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", scatter_dim=0, group_name=name)

        example_inputs = [torch.empty(16, 4, dtype=self.dtype), torch.empty(4, 4, dtype=self.dtype)]
        pm.register_replacement(pattern, replacement, example_inputs, pm.fwd_only, pm_pass)


class AllGatherGEMMPattern(Gemm):
    def register(self, pm_pass: Any) -> None:
        def pattern(x: Any, w: Any) -> Any:
            every = torch.ops.vllm.all_gather.default(x, dim=0, world_size=self.tp_size, group_name=self.tp.unique_name)
            return torch.ops.aten.mm.default(every, w)

        def replacement(x: Any, w: Any) -> Any:
            name = self.tp.device_group.group_name
            _, ys = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], gather_dim=0, group_name=name)
            return ys

        example_inputs = [torch.empty(4, 4, dtype=self.dtype), torch.empty(4, 4, dtype=self.dtype)]
        pm.register_replacement(pattern, replacement, example_inputs, pm.fwd_only, pm_pass)


def patterns(wheel: str | None) -> list[type]:
    if wheel is None:
        return [GEMMReduceScatterPattern, AllGatherGEMMPattern]
    tree = ast.parse((Path(wheel) / PASS).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in PATTERNS]
    names: dict[str, Any] = dict(torch=torch, pm=pm, PatternMatcherPass=pm.PatternMatcherPass, BasePattern=Gemm)
    exec(compile(tree, PASS, "exec"), names)
    return [names[name] for name in PATTERNS]


def engines_collectives(world: weft.World) -> Any:
    """Return vLLM's collectives, as operators."""
    library = torch.library.Library("vllm", "DEF")
    for name in ("reduce_scatter", "all_gather"):
        library.define(f"{name}(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")

    def scattered(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
        return tensor.new_empty(tensor.shape[0] // world_size, *tensor.shape[1:])

    def gathered(tensor: torch.Tensor, dim: int, world_size: int, group_name: str) -> torch.Tensor:
        return tensor.new_empty(tensor.shape[0] * world_size, *tensor.shape[1:])

    for name, fake in (("reduce_scatter", scattered), ("all_gather", gathered)):
        library.impl(name, fake, "CompositeExplicitAutograd")
    return library


def rank(world: weft.World, wheel: str | None = None) -> tuple[list[str], float, str]:
    """Return a rank's graph after the pass, the errors of its outputs, and the report."""
    held, size = engines_collectives(world), world.size
    name = world.group.group_name  # type: ignore[union-attr]
    tp = SimpleNamespace(unique_name="tp:0", device_group=SimpleNamespace(group_name=name))
    matcher = pm.PatternMatcherPass()
    for kind in patterns(wheel):
        gemm_pattern = kind(torch.bfloat16, "cpu")
        gemm_pattern.tp, gemm_pattern.tp_size = tp, size
        gemm_pattern.register(matcher)

    def layer(x: Any, w: Any, h: Any, v: Any) -> Any:
        options = dict(dim=0, world_size=size, group_name="tp:0")
        y = torch.ops.aten.mm.default(torch.ops.vllm.all_gather.default(x, **options), w)
        return y, torch.ops.vllm.reduce_scatter.default(torch.ops.aten.mm.default(h, v), **options)

    g = torch.Generator().manual_seed(0)
    x, w, h, v = (
        torch.randn(size, *shape, generator=g).bfloat16() for shape in ((M // size, K), (K, N), (M, K), (K, N))
    )
    own_operands = [t[world.rank] for t in (x, w, h, v)]
    graph = fx.experimental.proxy_tensor.make_fx(layer, tracing_mode="fake")(*own_operands)
    matcher.apply(graph.graph)
    graph.recompile()
    serving = weft.torch.async_tp(world)
    gathered, scattered = graph(*own_operands)
    exact = x.flatten(0, 1).float() @ w[world.rank].float()
    reduced = sum(h[r].float() @ v[r].float() for r in range(size)).chunk(size)[world.rank]  # type: ignore[union-attr]
    error = max(((a.float() - b).norm() / b.norm()).item() for a, b in ((gathered, exact), (scattered, reduced)))
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    del held
    return targets, error, serving.report()


def from_wheel(world: weft.World) -> tuple[list[str], float, str]:
    return rank(world, WHEEL)


@pytest.mark.parametrize(
    "fn", [rank, pytest.param(from_wheel, marks=pytest.mark.skipif(not WHEEL, reason="VLLM_WHEEL names no folder"))]
)
def test_the_passs_graph_calls_weft(fn: Any) -> None:
    for targets, error, text in weft.spmd(fn, 2, backend="gloo"):
        assert not any("vllm" in target for target in targets), targets
        assert error < 5e-3, error
        assert "fused_all_gather_matmul: 1 served" in text and "fused_matmul_reduce_scatter: 1 served" in text, text
