"""Mixtures of experts of Transformers, woven: Mixtral, Qwen3-MoE and GPT-OSS.

Transformers' own expert parallelism has every rank route all tokens, copy those of its experts' routes, run them, and
sum over ranks by an all-reduce. A woven layer's hidden states (nn/decoder_layer.py) are, by the tokens of the pass:

    replicated   qkv | attention | o | all_reduce_rms_norm | router, own experts | all_reduce_rms_norm
    sharded      all-gather + qkv | attention | o + reduce-scatter | norm | router, weft.moe over the ranks | norm

replicated, of few tokens: every rank has all of them, and `weft.moe` of this rank alone gives what its experts, or its
columns of all of them, add to their sums; no token travels. That leaves a partial sum, as a dense MLP does, and two
exchanges of activations a layer, which go under the GEMMs of another token part where there are two. sharded: a rank
keeps the rows that it owns, routes those alone, and tokens travel under the GEMMs before and behind which they are
needed. Attention is tensor-parallel in both, its three projections one GEMM.

`experts_forward` is the experts alone, for Transformers' registry of experts' implementations: weft's grouped GEMMs on
the experts that a rank holds, under whatever parallelism Transformers has around them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from ...errors import Unsupported
from ...nn.split import Share, routed
from ...ops.moe.expert_parallel.op import moe, pack
from ...ops.moe.routing.router import gate
from ...tensor_checks import DTYPES
from ...world import World
from .parameters import Parameters, local_of, shard_of
from .shards import HeadsShard, Module
from .woven import Woven

Tensor = torch.Tensor


class Kind(NamedTuple):
    """activation: of `weft.moe.moe`; scoring: of `weft.moe.gate`; layout: of gate and up, as `weft.moe.pack` has it."""

    activation: str
    scoring: str
    layout: str

    @property
    def transposed(self) -> bool:
        """Whether matrices are [in, out]."""
        return self.layout == "interleaved"


EXPERT_KINDS = {  # by class of the experts
    "MixtralExperts": Kind("swiglu", "softmax", "blocked"),
    "Qwen3MoeExperts": Kind("swiglu", "softmax", "blocked"),
    "GptOssExperts": Kind("gpt_oss", "softmax_after", "interleaved"),
}
LAYERS = ("MixtralDecoderLayer", "Qwen3MoeDecoderLayer", "GptOssDecoderLayer")
HELD_EXPERTS = "_weft_experts"  # the attribute of a module whose experts are packed, where nothing else is woven
GPT_OSS_GATE = (1.702, 7.0)  # alpha and limit of GPT-OSS's activation


# -- what can be woven -------------------------------------------------------------------------------------------------
def check_experts(name: str, experts: Module) -> None:
    """Raises Unsupported, naming what is not known, for the experts of a layer."""
    if type(experts).__name__ not in EXPERT_KINDS:
        raise Unsupported(f"{name} is {type(experts).__name__}; weave knows {', '.join(EXPERT_KINDS)}")
    dtype = experts.gate_up_proj.dtype
    if dtype not in DTYPES:
        raise Unsupported(f"{name}.gate_up_proj is {dtype}; bfloat16 and float16 are supported")
    if hasattr(experts, "alpha") and (experts.alpha, experts.limit) != GPT_OSS_GATE:
        raise Unsupported(f"{name} has alpha and limit {experts.alpha, experts.limit}, not {GPT_OSS_GATE}")


def router_of(mlp: Module) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def parallel_of(parameter: Tensor) -> str:
    """Whether experts are split over ranks whole, or by their columns (Transformers' tensor parallelism)."""
    by_columns = isinstance(parameter, DTensor) and getattr(parameter.placements[0], "dim", 0) != 0
    return "tensor" if by_columns else "expert"


# -- experts -----------------------------------------------------------------------------------------------------------
class RankExperts:
    """This rank's experts of a module that is whole, or that Transformers has split, as `weft.moe.moe` takes them;
    `split` says which. Gate and up are packed, which takes their bytes once more, and GPT-OSS's second matrices are
    transposed, which takes theirs.

    local: the module's tensors are this rank's alone, and what its router gives are numbers among them, from 0 on.
    """

    def __init__(self, module: Module, world: World, local: bool = False) -> None:
        self.kind, self.module, self.local = EXPERT_KINDS[type(module).__name__], module, local
        self.world, self.activation, first, second = world, self.kind.activation, module.gate_up_proj, module.down_proj
        self.alone = world.alone
        inner, count = second.shape[1 if self.kind.transposed else 2], first.shape[0]
        parallel = parallel_of(first)
        ranks = self.alone if local and parallel == "expert" else world
        self.split = Share.of(ranks, parallel, count, inner, False)
        self.w13: Tensor | None = None
        self.w2: Tensor | None = None
        self.b13: Tensor | None = None
        self.b2: Tensor | None = None
        self.parameters = Parameters([module], self._bind, packed=True)

    def _bind(self) -> None:
        module = self.module
        self.w13 = kept(self.w13, self._packed(module.gate_up_proj))
        second = self._mine(module.down_proj)
        self.w2 = second if second.is_contiguous() else kept(self.w2, second.contiguous())
        if self.kind.transposed:
            self.b13 = kept(self.b13, self._packed(module.gate_up_proj_bias))
            self.b2 = None if self.split.part else self._mine(module.down_proj_bias).contiguous()

    def _packed(self, t: Tensor) -> Tensor:
        return pack(self._mine(t), world=self.world, layout=self.kind.layout)

    def _mine(self, t: Tensor) -> Tensor:
        mine = local_of(t).detach()
        if not isinstance(t, DTensor) and not self.local:
            mine = mine[self.split.own]
        return mine.transpose(1, 2) if self.kind.transposed and t.dim() == 3 else mine

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, H], this rank's part in the sum of every token of x [T, H], which all ranks have. None waits for
        another."""
        assert self.w13 is not None and self.w2 is not None
        given = x, *self.split.own_routes(ids, weights), self.w13, self.w2
        return moe(*given, b13=self.b13, b2=self.b2, activation=self.activation, world=self.alone, out=out)

    def over_ranks(self, x: Tensor, ids: Tensor, weights: Tensor, shards: Sequence[int] | None) -> Tensor:
        """[m_r, H], the sums of this rank's own tokens x [m_r, H] over the experts of all ranks."""
        assert self.w13 is not None and self.w2 is not None
        operands = x, ids, weights, self.w13, self.w2, self.b13, self.b2
        return routed(self.split, *operands, activation=self.activation, rows=shards, world=self.world)


def kept(held: Tensor | None, t: Tensor) -> Tensor:
    """Return t in the memory that `held` has, if any, which a captured graph may read."""
    return t if held is None else held.copy_(t)


class Router:
    """A router's forward: logits, weights and ids of all experts, in Transformers' order."""

    def __init__(self, router: Module, kind: Kind, world: World) -> None:
        self.module = router
        self.gate = functools.partial(
            gate,
            k=router.top_k,
            world=world,
            scoring=kind.scoring,
            renormalise=getattr(router, "norm_topk_prob", True),
        )
        self.parameters = Parameters([router], self._bind)

    def _bind(self) -> None:
        bias = getattr(self.module, "bias", None)
        self.weight, self.bias = whole(self.module.weight), None if bias is None else whole(bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.flatten(0, -2), self.weight, self.bias)
        ids, weights = self.gate(logits)
        return logits, weights, ids


def whole(t: Tensor) -> Tensor:
    return local_of(t).detach()


def experts_forward(world_of: Callable[[], World]) -> Callable[..., Tensor]:
    """An implementation of experts for Transformers' `ExpertsInterface`, as `weft.hf.register_experts` puts it there:
    of a module's experts here, whose ids begin at 0; the id past them goes nowhere. Laid out at the first call, and
    again where one of the module's tensors is another, or was written."""

    def forward(module: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        world, experts = world_of(), vars(module).get(HELD_EXPERTS)
        if experts is None or experts.world is not world:
            check_experts(type(module).__name__, module)
            experts = module.__dict__[HELD_EXPERTS] = RankExperts(module, world, local=True)
        experts.parameters.refresh(world, lambda module: type(module).__name__)
        return experts.partial(hidden_states, top_k_index.int(), top_k_weights.float())

    return forward


class Registered(threading.local):
    """The World that this thread registered: emulated ranks are threads of one process, and each has its own."""

    world: World | None = None
    last: ClassVar[World]  # of any thread: of a process that is one rank, all take it

    def set(self, world: World) -> None:
        self.world = Registered.last = world

    def get(self) -> World:
        return Registered.last if self.world is None else self.world


_registered = Registered()


def register_experts(world: World) -> None:
    """Make `experts_implementation="weft"` known to Transformers: weft's grouped GEMMs for Mixtral, Qwen3-MoE and
    GPT-OSS, on the experts that a rank holds.

    world: the ranks that Transformers splits the experts over, which have the same tokens; of a process the one that
    was registered last, of an emulated rank its own. Transformers' parallelism around the experts stays as it is;
    `weave` replaces that too. For inference. Experts are packed at a module's first call, which takes their bytes once
    more, and again where a parameter was written (`repack`).
    """
    from transformers.integrations.moe import ExpertsInterface

    _registered.set(world)
    ExpertsInterface.register("weft", experts_forward(_registered.get))


# -- attention ---------------------------------------------------------------------------------------------------------
class Projections(HeadsShard):
    """Transformers' own attention of this rank's heads between weft's projections."""

    def __init__(self, attention: Module, world: World) -> None:
        super().__init__(attention, world)
        self.attend = lambda normed, *, project, **kwargs: attention(project(self.qkv, normed), **kwargs)


def weave_attention(attention: Module, done: Woven) -> Projections:
    """Make `attention` take the projected queries, keys and values in place of hidden states, and return its heads."""
    projections, start = Projections(attention, done.world), 0
    done.follow(projections.qkv, projections.out)
    for linear, width in zip(projections.qkv.linears, projections.qkv.widths, strict=True):
        done.forward(linear, functools.partial(torch.narrow, dim=-1, start=start, length=width))
        start += width
    done.forward(attention.o_proj, lambda heads: heads)
    if hasattr(attention, "sinks"):
        done.follow(Sinks(attention, done.world))
        done.undo.append(lambda: attention.__dict__.pop("sinks"))
    return projections


class Sinks:
    """This rank's attention sinks, one a head; they shadow the parameter, which stays whole."""

    def __init__(self, attention: Module, world: World) -> None:
        self.attention, self.world = attention, world
        self.parameters = Parameters([attention], self._bind)

    def _bind(self) -> None:
        self.attention.__dict__["sinks"] = shard_of(self.attention._parameters["sinks"], 0, self.world)


# -- MLPs --------------------------------------------------------------------------------------------------------------
class RoutedExperts(NamedTuple):
    """The router, a module, and this rank's experts, in place of an MLP."""

    router: Module
    experts: RankExperts

    def partial(self, x: Tensor, out: Tensor | None, part: int) -> Tensor:
        self.experts.world.finish(self.experts.world.current_stream())
        _, weights, ids = self.router(x)
        return self.experts.partial(x, ids, weights, out)

    def sharded(self, x: Tensor, shards: Sequence[int] | None) -> Tensor:
        _, weights, ids = self.router(x)
        return self.experts.over_ranks(x, ids, weights, shards)


def weave_experts(mlp: Module, done: Woven) -> RoutedExperts:
    router, experts = router_of(mlp), RankExperts(mlp.experts, done.world)
    woven_router = Router(router, experts.kind, done.world)
    done.follow(experts, woven_router)
    done.forward(router, woven_router.forward)
    return RoutedExperts(router, experts)


def split_of(experts: Module) -> str:
    return "whole experts" if parallel_of(experts.gate_up_proj) == "expert" else "columns of all experts"


def split_reason(experts: Module, world: World) -> str | None:
    """Why the ranks cannot share these experts; None if they can."""
    count = experts.gate_up_proj.shape[0]
    if parallel_of(experts.gate_up_proj) == "expert" and count % world.size:
        return f"{count} experts over {world.size} ranks"
    return None
