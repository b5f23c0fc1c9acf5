"""Mixtures of experts of Transformers, woven: Mixtral, Qwen3-MoE and GPT-OSS.

Transformers' own expert parallelism has every rank route all tokens, copy those of its experts' routes, run them, and
sum over ranks by an all-reduce. A woven layer has one of two forms, by how many tokens a pass has:

    few     qkv | attention | o | all_reduce_rms_norm | router, own experts | all_reduce_rms_norm    (joints.py)
    many    all-gather + qkv | attention | o + reduce-scatter | norm | router, weft.moe over the ranks | norm

few: every rank has all tokens, and `weft.moe` of this rank alone gives what its experts, or its columns of all of them,
add to their sums; no token travels. That leaves a partial sum, as a dense MLP does, and two exchanges of activations a
layer, which go under the GEMMs of another part of the tokens where there are two parts. many: a rank keeps the rows
that it owns, routes those alone, and tokens travel under the GEMMs before and behind which they are needed. Attention
is tensor-parallel in both, its three projections one GEMM.

`experts_forward` is the experts alone, for Transformers' registry of experts' implementations: weft's grouped GEMMs on
the experts that a rank holds, under whatever parallelism Transformers has around them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from ...errors import Unsupported
from ...lang.mapping import balanced_rows
from ...nn.split import Share, in_parts
from ...ops.matmul_reduce.op import matmul_reduce_scatter
from ...ops.moe.expert_parallel.op import moe, pack
from ...ops.moe.routing.router import gate
from ...ops.norm import rms_norm
from ...tensor_checks import DTYPES
from ...transport.collectives import gather
from ...world import World
from . import joints
from .joints import Carried, Pass, Woven
from .parameters import Parameters, local_of, part_of
from .parts import Columns, MlpPart, Module, RowPart, Rows, window_of

Tensor = torch.Tensor
MANY_TOKENS = 1024  # tokens from which a rank keeps its own rows alone


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


class OwnRows(NamedTuple):
    """What layers of many tokens hand on: residual and normed [m_r, H], the rows that this rank owns, of hidden states
    of `shape`."""

    residual: Tensor
    normed: Tensor
    shape: torch.Size


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

    def across(self, x: Tensor, ids: Tensor, weights: Tensor, rows: tuple[int, ...] | None) -> Tensor:
        """[m_r, H], the sums of this rank's own tokens x [m_r, H] over the experts of all ranks."""
        assert self.w13 is not None and self.w2 is not None
        given, world = (x, ids, weights, self.w13, self.w2), self.world
        if self.split.sharing == 1:
            return moe(*given, b13=self.b13, b2=self.b2, activation=self.activation, rows=rows, world=world)
        return in_parts(
            self.split,
            *given,
            b13=self.b13,
            b2=self.b2,
            shared=None,
            activation=self.activation,
            rows=rows,
            world=world,
            plan="auto",
        )


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
class Projections:
    """Transformers' own attention of this rank's heads between weft's projections."""

    def __init__(self, attention: Module, world: World) -> None:
        self.module, self.window = attention, window_of(attention)
        self.qkv = Columns((attention.q_proj, attention.k_proj, attention.v_proj), world)
        self.out = RowPart(attention.o_proj, world)

    def attend(self, normed: Tensor, *, columns: Callable[[Columns, Tensor], Tensor], **kwargs: Any) -> Any:
        qkv = columns(self.qkv, normed.flatten(0, -2))
        return self.module(qkv.view(*normed.shape[:-1], -1), **kwargs)


def weave_attention(attention: Module, done: Woven) -> Projections:
    """Make `attention` take the projected queries, keys and values in place of hidden states, and return its heads."""
    made, first = Projections(attention, done.world), 0
    done.follow(made.qkv, made.out)
    for linear, width in zip(made.qkv.linears, made.qkv.widths, strict=True):
        done.forward(linear, functools.partial(torch.narrow, dim=-1, start=first, length=width))
        first += width
    done.forward(attention.o_proj, lambda heads: heads)
    if hasattr(attention, "sinks"):
        done.follow(Sinks(attention, done.world))
        done.undo.append(lambda: attention.__dict__.pop("sinks"))
    return made


class Sinks:
    """This rank's attention sinks, one a head; they shadow the parameter, which stays whole."""

    def __init__(self, attention: Module, world: World) -> None:
        self.attention, self.world = attention, world
        self.parameters = Parameters([attention], self._bind)

    def _bind(self) -> None:
        self.attention.__dict__["sinks"] = part_of(self.attention._parameters["sinks"], 0, self.world)


# -- layers ------------------------------------------------------------------------------------------------------------
def weave_layers(layers: list[Module], norm: Module, done: Woven) -> None:
    """Weave decoder layers and the last norm. A model with dense layers too always takes the form for few tokens."""
    world = done.world
    mixed = all(hasattr(layer.mlp, "experts") for layer in layers)
    norms = [layer.input_layernorm for layer in layers[1:]] + [norm]
    for layer, following in zip(layers, norms, strict=True):
        projections = weave_attention(layer.self_attn, done)
        experts = mlp = None
        if hasattr(layer.mlp, "experts"):
            router = router_of(layer.mlp)
            experts = RankExperts(layer.mlp.experts, world)
            woven_router = Router(router, experts.kind, world)
            done.follow(experts, woven_router)
            done.forward(router, woven_router.forward)
            mlp = partial_sums(router, experts)
        else:
            mlp = MlpPart(layer.mlp, world)
            done.follow(mlp.first, mlp.down)
        few = joints.layer_forward(layer, following, projections, mlp, following is norm, done)
        many = many_tokens(layer, projections, experts, following, done) if experts is not None and mixed else few
        done.forward(layer, layer_forward(layer, few, many, projections.window is None, done))
    done.forward(norm, functools.partial(normed_whole, world=world))
    done.replaced += list(said(layers, done))


def said(layers: list[Module], done: Woven) -> Iterable[str]:
    yield "layers.*.self_attn.q_proj, k_proj, v_proj: one GEMM of this rank's heads; o_proj: this rank's columns"
    for mlp in {type(layer.mlp).__name__: layer.mlp for layer in layers}.values():
        if not hasattr(mlp, "experts"):
            yield "layers.*.mlp without experts: gate and up in one GEMM, SiLU-mul in one launch, a partial sum"
            continue
        where = "whole experts" if parallel_of(mlp.experts.gate_up_proj) == "expert" else "columns of all experts"
        yield f"layers.*.mlp ({type(mlp).__name__}): weft.moe, {where} on every rank"
    few = f"below {MANY_TOKENS} tokens, and in two parts, all_reduce_rms_norm, plan {done.plan}"
    yield f"layers.*, norm: {few}; else rows by their owners"


def layer_forward(
    layer: Module, few: Callable[..., Carried], many: Callable[..., Any], unmasked: bool, done: Woven
) -> Callable[..., Any]:
    world = done.world

    def forward(hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Carried | OwnRows:
        if isinstance(hidden_states, Tensor):
            normed, on = layer.input_layernorm(hidden_states), Pass(done, hidden_states, recorded("router_logits"))
            if many is not few and keeps_rows(hidden_states, on):
                residual, own = (own_rows(t, world) for t in (hidden_states, normed))
                hidden_states = OwnRows(residual, own, hidden_states.shape)
            else:
                residual = on.residuals[0]
                hidden_states = Carried(residual.view(on.shape) if on.recorded else residual, normed, on)
        if isinstance(hidden_states, Carried):
            return few(hidden_states, attention_mask=attention_mask, **kwargs)
        return many(hidden_states, attention_mask=None if done.causal and unmasked else attention_mask, **kwargs)

    return forward


def keeps_rows(hidden: Tensor, on: Pass) -> bool:
    many = on.world.size > 1 and hidden.shape[:-1].numel() >= MANY_TOKENS and not on.twice
    return many and not recorded("hidden_states", "router_logits")


def recorded(*names: str) -> bool:
    """Whether Transformers records one of these in this forward pass."""
    from transformers.utils.output_capturing import _active_collector

    recorded = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return recorded is not None and any(name in recorded for name in names)


def own_rows(hidden: Tensor, world: World) -> Tensor:
    rows = hidden.flatten(0, -2)
    counts = balanced_rows(rows.shape[0], world.size)
    return rows.narrow(0, sum(counts[: world.rank]), counts[world.rank]).contiguous()


def shards_of(shape: torch.Size, world: World) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Rows of every rank; and as ops take them: None where they are all equal."""
    counts = tuple(balanced_rows(shape[:-1].numel(), world.size))
    return counts, None if len(set(counts)) == 1 else counts


def partial_sums(router: Module, experts: RankExperts) -> Rows:
    def forward(x: Tensor, out: Tensor | None = None) -> Tensor:
        experts.world.finish(experts.world.current_stream())
        _, weights, ids = router(x)
        return experts.partial(x, ids, weights, out)

    return forward


def many_tokens(
    layer: Module, projections: Projections, experts: RankExperts, following: Module, done: Woven
) -> Callable[..., OwnRows]:
    world, router, post = done.world, router_of(layer.mlp), layer.post_attention_layernorm
    out = projections.out

    def forward(own: OwnRows, **kwargs: Any) -> OwnRows:
        rows = shards_of(own.shape, world)[1]
        qkv = projections.qkv.gathered(own.normed, rows)
        heads, _ = layer.self_attn(qkv.view(*own.shape[:-1], -1), **kwargs)
        y = matmul_reduce_scatter(heads.flatten(0, -2), out.weight, out.whole_bias, world=world, rows=rows)
        y, residual = add_norm(y, own.residual, post, world)
        _, weights, ids = router(y)
        y = experts.across(y, ids, weights, rows)
        y, residual = add_norm(y, residual, following, world)
        return OwnRows(residual, y, own.shape)

    return forward


def add_norm(x: Tensor, residual: Tensor, norm: Module, world: World) -> tuple[Tensor, Tensor]:
    return rms_norm(x, norm.weight.to(x.dtype), norm.variance_epsilon, world=world, residual=residual)


def normed_whole(carried: Carried | OwnRows, *, world: World) -> Tensor:
    """The model's output [.., H] on every rank, behind the last norm."""
    if isinstance(carried, Carried):
        return joints.norm_forward(carried)
    (counts, _), stream = shards_of(carried.shape, world), world.current_stream()
    gathered = gather(carried.normed, world, counts, stream)
    world.finish(stream)
    return gathered.view(carried.shape)


def split_reason(experts: Module, world: World) -> str | None:
    """Why the ranks cannot share these experts; None if they can."""
    count = experts.gate_up_proj.shape[0]
    if parallel_of(experts.gate_up_proj) == "expert" and count % world.size:
        return f"{count} experts over {world.size} ranks"
    return None
