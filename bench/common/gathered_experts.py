"""An MoE layer as vLLM runs it by default with experts over data-parallel ranks: NCCL gathers the tokens and routes of
all ranks in one launch, each rank applies its own experts to the tokens routed to them, and NCCL reduce-scatters the
sums. The experts are vLLM's `fused_experts`, with vLLM's tuned tiles for the GPU if it has any, or quack's grouped
GEMMs. The router is weft's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import weft
from bench.common.quack_moe import QuackExperts, local_routes, usable
from bench.common.timing import time_interleaved
from weft.backends.library_gemm import Form
from weft.integrations import quack

if TYPE_CHECKING:
    from bench.measure.moe import Layer

Tensor = torch.Tensor
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # all tokens, ids, weights -> this rank's part of the sums


def gathered(layer: Layer) -> list[Tensor]:
    """Gather the tokens, ids and weights of all ranks for the layer's next routing."""
    world, parts = layer.world, layer.routed()
    sent = [part.contiguous().view(torch.uint8) for part in parts]
    whole = [world.empty((world.size * len(part), part.shape[1]), torch.uint8) for part in sent]
    stream = world.current_stream()
    world.backend.all_gather_together(whole, sent, stream)
    world.finish(stream)
    return [full.view(part.dtype) for full, part in zip(whole, parts, strict=True)]


def layer_by(layer: Layer, experts: Experts) -> Callable[[], Tensor]:
    """Return a function that runs the layer with these experts between the two collectives."""

    def run() -> Tensor:
        world, partial = layer.world, experts(*gathered(layer))
        out, stream = world.empty((layer.tokens, layer.model.hidden), partial.dtype), world.current_stream()
        world.reduce_scatter(out, partial, stream)
        world.finish(stream)
        return out

    return run


def vllm_experts(layer: Layer) -> Experts:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts

    config, world, count = VllmConfig(), layer.world, layer.model.experts
    local = count // world.size
    expert_map = torch.full((count,), -1, dtype=torch.int32, device=world.device)
    expert_map[world.rank * local :][:local] = torch.arange(local, dtype=torch.int32, device=world.device)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with set_current_vllm_config(config):
            return fused_experts(x, layer.w13, layer.w2, weights, ids, global_num_experts=count, expert_map=expert_map)

    return run


def quack_experts(layer: Layer, forms: Sequence[Form]) -> Experts:
    """Return quack's GEMMs in the forms that were fastest for one routing of the layer."""
    world, local = layer.world, layer.model.experts // layer.world.size
    experts = QuackExperts(world, layer.w13, layer.w2, layer.model.k)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts.sums(x, local_routes(ids, weights, world.rank * local, local))

    x, ids, weights = gathered(layer)
    routed = local_routes(ids, weights, world.rank * local, local)
    experts.tune(x, routed, forms, partial(time_interleaved, mode="graph", calls=3, rounds=3))
    return run


def installed(world: weft.World) -> tuple[dict[str, Callable[[Layer], Experts]], dict[str, str]]:
    """Return, for each installed library, a function that makes the library's experts, and the library's version. Rank
    0 compiles quack's forms within 75 s. Collective."""
    makers: dict[str, Callable[[Layer], Experts]] = {}
    versions: dict[str, str] = {}
    if version := vllm_version():
        makers["vllm"], versions["vllm"] = vllm_experts, version
    if lacks := quack.lacks():
        print(f"rank {world.rank}, quack: {lacks}", flush=True)
        return makers, versions
    shared = [usable(75) if world.rank == 0 else None]
    dist.broadcast_object_list(shared)
    if forms := shared[0]:
        makers["quack"], versions["quack"] = partial(quack_experts, forms=forms), str(quack.installed())
    return makers, versions


def vllm_version() -> str | None:
    try:
        import vllm
    except Exception as error:  # a library may raise any exception if its dependencies have unsuitable versions
        print(f"vllm: {type(error).__name__}: {error}"[:300], flush=True)
        return None
    return str(vllm.__version__)
