"""Woven mixtures of experts of Transformers: Mixtral, Qwen3-MoE and GPT-OSS.

In Transformers' own expert parallelism every rank routes all tokens, copies the tokens of its own experts and computes
these experts; an all-reduce then sums the results. In a woven layer (nn/decoder_layer.py) the layout of the hidden
states depends on the number of tokens of the pass:

    replicated   qkv | attention | o | all_reduce_rms_norm | router, own experts | all_reduce_rms_norm
    sharded      all-gather + qkv | attention | o + reduce-scatter | norm | router, weft.moe over the ranks | norm

Few tokens are replicated: every rank has all tokens, and calls `weft.moe` without its peers to compute the contribution
of its experts, or of its columns of all experts, to each token. No token is sent. The result is a partial sum, as for a
dense MLP, and a layer exchanges activations twice. If there are two token parts, the exchanges overlap the GEMMs of the
other part. Many tokens are sharded: a rank routes only its own rows, and the exchange of tokens overlaps the grouped
GEMMs. In both layouts attention is tensor-parallel and one GEMM computes its three projections.

`experts_forward` computes only the experts of a rank by weft's grouped GEMMs, under Transformers' own parallelism. weft
adds it to Transformers' registry of experts implementations.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import Unsupported
from ...nn.split import Share, routed
from ...ops.moe.expert_parallel.op import moe, pack
from ...ops.moe.routing.router import gate
from ...tensor_checks import DTYPES
from ...world import World
from .modules import Numbers, class_of
from .parameters import Bound, Parameters, local_of, shard_of
from .shards import ColumnShards, HeadsShard, Module
from .woven import Woven


class Kind(NamedTuple):
    """The activation for `weft.moe.moe`, the scoring for `weft.moe.gate`, and the layout of gate and up for
    `weft.moe.pack`."""

    activation: str
    scoring: str
    layout: str

    @property
    def transposed(self) -> bool:
        """Return whether the module's matrices are [in, out]."""
        return self.layout == "interleaved"


EXPERT_KINDS = {  # the key is the class of the experts module
    "MixtralExperts": Kind("swiglu", "softmax", "blocked"),
    "Qwen3MoeExperts": Kind("swiglu", "softmax", "blocked"),
    "GptOssExperts": Kind("gpt_oss", "softmax_after", "interleaved"),
}
LAYERS = ("MixtralDecoderLayer", "Qwen3MoeDecoderLayer", "GptOssDecoderLayer")
EXPERTS_ATTRIBUTE = "_weft_experts"  # the attribute in which `register_experts` stores a module's packed experts
GPT_OSS_GATE = (1.702, 7.0)  # the alpha and the limit of GPT-OSS's activation


# -- what can be woven -------------------------------------------------------------------------------------------------
def check_experts(name: str, experts: Module) -> None:
    """Raise Unsupported for experts of an unknown class, dtype or activation."""
    if type(experts).__name__ not in EXPERT_KINDS:
        raise Unsupported(f"{name} is {class_of(experts)}; weave knows {', '.join(EXPERT_KINDS)}")
    dtype = experts.gate_up_proj.dtype
    if dtype not in DTYPES:
        raise Unsupported(f"{name}.gate_up_proj is {dtype}; bfloat16 and float16 are supported")
    if hasattr(experts, "alpha") and (experts.alpha, experts.limit) != GPT_OSS_GATE:
        raise Unsupported(f"{name} has alpha and limit {experts.alpha, experts.limit}, not {GPT_OSS_GATE}")


def router_of(mlp: Module) -> Any:
    """Return the router module of an MLP with experts."""
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def parallel_of(parameter: Tensor) -> str:
    """Return "tensor" if Transformers has split the columns of every expert, "expert" otherwise."""
    splits_columns = isinstance(parameter, DTensor) and getattr(parameter.placements[0], "dim", 0) != 0
    return "tensor" if splits_columns else "expert"


# -- experts -----------------------------------------------------------------------------------------------------------
class RankExperts(Bound):
    """This rank's experts in the layout of `weft.moe.moe`, from a module that every rank has whole or that Transformers
    has split. `split` describes the rank's part. The packed gate and up are copies, and so are the transposed second
    matrices of GPT-OSS. These weights therefore occupy memory twice.

    With `local` the module's tensors are already this rank's experts, and the routed ids of these experts start at 0.
    `numbers` are the module's numbers, which are all constants in the kernels.
    """

    bound = "w13", "w2", "b13", "b2"
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None

    def __init__(self, module: Module, world: World, local: bool = False) -> None:
        self.kind, self.module, self.local = EXPERT_KINDS[type(module).__name__], module, local
        self.world, self.activation, w13, w2 = world, self.kind.activation, module.gate_up_proj, module.down_proj
        self.alone = world.alone
        inner, count = w2.shape[1 if self.kind.transposed else 2], w13.shape[0]
        parallel = parallel_of(w13)
        ranks = self.alone if local and parallel == "expert" else world
        self.split = Share.for_rank(ranks, parallel, count, inner, False)
        self.numbers = Numbers.built_in(module)
        self.parameters = Parameters([module], self._bind, packed=True)

    def _bind(self) -> None:
        module = self.module
        self.w13 = in_memory_of(self.w13, self._packed(module.gate_up_proj))
        w2 = self._local(module.down_proj)
        self.w2 = w2 if w2.is_contiguous() else in_memory_of(self.w2, w2.contiguous())
        if self.kind.transposed:
            self.b13 = in_memory_of(self.b13, self._packed(module.gate_up_proj_bias))
            self.b2 = None if self.split.part else self._local(module.down_proj_bias).contiguous()

    def _packed(self, t: Tensor) -> Tensor:
        return pack(self._local(t), world=self.world, layout=self.kind.layout)

    def _local(self, t: Tensor) -> Tensor:
        """Return this rank's experts of t, with each matrix as [out, in]."""
        local = local_of(t).detach()
        if not isinstance(t, DTensor) and not self.local:
            local = local[self.split.expert_range]
        return local.transpose(1, 2) if self.kind.transposed and t.dim() == 3 else local

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's partial sums [T, H] for the tokens x [T, H], which all ranks have. The call does not wait
        for other ranks."""
        assert self.w13 is not None and self.w2 is not None
        operands = x, *self.split.local_routes(ids, weights), self.w13, self.w2
        return moe(*operands, b13=self.b13, b2=self.b2, activation=self.activation, world=self.alone, out=out)

    def over_ranks(self, x: Tensor, ids: Tensor, weights: Tensor, shards: Sequence[int] | None) -> Tensor:
        """Return [m_r, H], the output of the experts of all ranks for this rank's tokens x [m_r, H]."""
        assert self.w13 is not None and self.w2 is not None
        operands = x, ids, weights, self.w13, self.w2, self.b13, self.b2
        return routed(self.split, *operands, activation=self.activation, rows=shards, world=self.world)


def in_memory_of(previous: Tensor | None, t: Tensor) -> Tensor:
    """Return t, copied into the memory of `previous` if there is one, since a captured graph may read that memory."""
    return t if previous is None else previous.copy_(t)


class Router(Bound):
    """The forward pass of a router, which returns logits, weights and ids, as Transformers' routers do. The router
    reads the `followed` numbers at every call."""

    bound = "weight", "bias"
    followed = "top_k", "norm_topk_prob"

    def __init__(self, router: Module, kind: Kind, world: World) -> None:
        self.module, self.world, self.scoring = router, world, kind.scoring
        self.always_renormalises = not hasattr(router, "norm_topk_prob")
        self.parameters = Parameters([router], self._bind)

    def _bind(self) -> None:
        bias = getattr(self.module, "bias", None)
        self.weight = local_of(self.module.weight).detach()
        self.bias = None if bias is None else local_of(bias).detach()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.flatten(0, -2), self.weight, self.bias)
        module = self.module
        renormalise = self.always_renormalises or module.norm_topk_prob
        ids, weights = gate(logits, k=module.top_k, world=self.world, scoring=self.scoring, renormalise=renormalise)
        return logits, weights, ids


def experts_forward(world_of: Callable[[], World]) -> Callable[..., Tensor]:
    """Return the implementation of experts that `weft.hf.register_experts` adds to Transformers' `ExpertsInterface`.
    The implementation computes a module's local experts, whose ids start at 0, and drops routes to the id after the
    last expert. It packs the experts at the first call, and again after one of the module's tensors was replaced or
    written."""

    def forward(module: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        world, experts = world_of(), vars(module).get(EXPERTS_ATTRIBUTE)
        if experts is None or experts.world is not world:
            check_experts(type(module).__name__, module)
            experts = module.__dict__[EXPERTS_ATTRIBUTE] = RankExperts(module, world, local=True)
        experts.numbers.check(type(module).__name__)
        experts.parameters.refresh(world, lambda module: type(module).__name__)
        return experts.partial(hidden_states, top_k_index.int(), top_k_weights.float())

    return forward


class Registered(threading.local):
    """The World that this thread registered. Emulated ranks are threads of one process, each with its own World; a
    thread that registered no World uses the World that the process registered last."""

    world: World | None = None
    process_world: ClassVar[World]

    def set(self, world: World) -> None:
        self.world = Registered.process_world = world

    def get(self) -> World:
        return Registered.process_world if self.world is None else self.world


_registered = Registered()


def register_experts(world: World) -> None:
    """Add `experts_implementation="weft"` to Transformers. It computes the local experts of Mixtral, Qwen3-MoE and
    GPT-OSS by weft's grouped GEMMs, for inference only.

    `world` contains the ranks over which Transformers splits the experts; all ranks have the same tokens. A process
    uses the World that it registered last; an emulated rank uses its own World. Transformers' parallelism around the
    experts does not change (`weave` would replace it as well). The first call of a module packs its experts, which then
    occupy memory twice. After a parameter was written, the experts are packed again (`repack`).
    """
    from transformers.integrations.moe import ExpertsInterface

    _registered.set(world)
    ExpertsInterface.register("weft", experts_forward(_registered.get))


# -- attention ---------------------------------------------------------------------------------------------------------
class Projections(HeadsShard):
    """Transformers' own attention on this rank's heads, between weft's projections. `sinks` are the attention sinks of
    these heads, if the module has sinks and there are several ranks."""

    bound = ("sinks",)
    sinks: Tensor | None = None

    def __init__(self, attention: Module, world: World) -> None:
        super().__init__(attention, world)
        self.parameters = Parameters([attention], self._bind)

    def _bind(self) -> None:
        if hasattr(self.module, "sinks") and self.world.size > 1:
            self.sinks = shard_of(self.module.sinks, 0, self.world)

    def attend(self, normed: Tensor, *, project: Callable[[ColumnShards, Tensor], Tensor], **kwargs: Any) -> Any:
        module, projected = self.module, project(self.qkv, normed)
        if self.sinks is None:
            return module(projected, **kwargs)
        # During the call this rank's sinks shadow the module's parameter, which contains the sinks of all heads.
        module.__dict__["sinks"] = self.sinks
        try:
            return module(projected, **kwargs)
        finally:
            del module.__dict__["sinks"]


def weave_attention(attention: Module, woven: Woven) -> Projections:
    """Make `attention` read projected queries, keys and values in place of hidden states, and return the heads'
    output."""
    projections, start = Projections(attention, woven.world), 0
    woven.follow(projections, projections.qkv, projections.out)
    for linear, width in zip(projections.qkv.linears, projections.qkv.widths, strict=True):
        woven.forward(linear, functools.partial(torch.narrow, dim=-1, start=start, length=width))
        start += width
    woven.forward(attention.o_proj, unprojected)
    return projections


def unprojected(heads: Tensor) -> Tensor:
    """Return the heads' output unchanged. This function replaces the forward of the output projection, which runs after
    attention."""
    return heads


# -- MLPs --------------------------------------------------------------------------------------------------------------
class RoutedExperts(NamedTuple):
    """A router module and this rank's experts, which form the sublayer that replaces an MLP."""

    router: Module
    experts: RankExperts

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        self.experts.world.finish(self.experts.world.current_stream())
        _, weights, ids = self.router(x)
        return self.experts.partial(x, ids, weights, out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        _, weights, ids = self.router(x)
        return self.experts.over_ranks(x, ids, weights, shards)


def weave_experts(mlp: Module, woven: Woven) -> RoutedExperts:
    router, experts = router_of(mlp), RankExperts(mlp.experts, woven.world)
    woven_router = Router(router, experts.kind, woven.world)
    woven.follow(experts, woven_router)
    woven.numbers += [experts.numbers, Numbers.built_in(router, *Router.followed), *numbers_of_block(mlp)]
    woven.forward(router, woven_router.forward)
    return RoutedExperts(router, experts)


def numbers_of_block(mlp: Module) -> list[Numbers]:
    """Return the numbers that turn Mixtral's jitter noise on, which a woven model does not draw. Raises Unsupported for
    a block that draws this noise."""
    if not hasattr(mlp, "jitter_noise"):
        return []
    if mlp.training and mlp.jitter_noise:
        raise Unsupported(f"{type(mlp).__name__}.jitter_noise is {mlp.jitter_noise}: call model.eval()")
    names = ("jitter_noise", "training") if mlp.jitter_noise else ("jitter_noise",)
    return [Numbers(mlp, names, tuple(getattr(mlp, name) for name in names))]


def split_of(experts: Module) -> str:
    """Return the part of the experts that each rank has, as text for the report."""
    return "whole experts" if parallel_of(experts.gate_up_proj) == "expert" else "columns of all experts"


def check_split(experts: Module, world: World) -> None:
    """Raise Unsupported for experts that the ranks cannot split."""
    count = experts.gate_up_proj.shape[0]
    if parallel_of(experts.gate_up_proj) == "expert" and count % world.size:
        raise Unsupported(f"{count} experts do not divide by {world.size} ranks")
