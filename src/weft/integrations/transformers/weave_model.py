"""The functions `weave`, `unweave`, `repack` and `report`, and the checks whether a model can be woven."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import Unsupported
from ...launch import init
from ...nn.decoder_layer import Sublayer
from ...nn.weave import two_parts_from
from ...op import check_call
from ...ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from ...plans import Plan
from ...tensor_checks import DTYPES
from ...world import World
from . import moe
from .forwards import SHARDED_FROM, LayerForward, ModelForward, norm_forward
from .generation import refuse_batch, same_draws
from .modules import Hooks, Layers, Numbers, check_modules, class_of, copy_reason, refuse_copy
from .shards import AttentionShard, HeadShard, HeadsShard, MlpShard, Module
from .woven import Woven

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
COLUMN_PARALLEL = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
WOVEN_ATTRIBUTE = "_weft"  # the attribute in which a woven model stores its state


def weave(
    model: nn.Module, world: World | None = None, *, plan: str | Plan = "auto", two_parts: str | int | None = "auto"
) -> nn.Module:
    """Replace the communication and the element-wise operations of the model's layers by weft's, and return the model.

    Args:
        model: Llama, Mistral, Qwen2 (and 2.5), Qwen3, Mixtral, Qwen3-MoE or GPT-OSS of Transformers, as the causal
            model or its base, bfloat16 or float16, on the World's device. It is either loaded with
            `distributed_config=DistributedConfig(tp_size=..)`, which splits experts whole or by columns, or loaded
            whole on every rank, which then computes with its shard. `state_dict` and `save_pretrained` are unchanged,
            and later writes to the parameters take effect. The weights of linears that one GEMM computes become views
            of one weight. Experts are packed into copies, which need the experts' bytes a second time (`repack`).
        world: the ranks. None: `weft.init` makes a World from the ranks over which the model is split.
        plan: the plan of `all_reduce_rms_norm`.
        two_parts: the least number of tokens for which a pass runs through a layer in two token parts. One part's
            all-reduce and norm overlap the other part's GEMMs (TokenWeave, section 4); attention computes both parts at
            once. "auto": the least number for which two parts were measured to be faster than one, on this GPU, for
            these sizes and this number of ranks; a model with experts always runs in one part, since none was measured.
            None: every pass runs in one part.

    Logits agree with the model's own up to rounding: sums over ranks, residual and norm are computed in float32 and
    rounded once. `forward`, `generate`, caches and CUDA graphs work as before. All ranks must make the same calls. If
    `generate` samples, all ranks use the draws of rank 0. `output_hidden_states` gathers the hidden states;
    `output_attentions` is rejected. `unweave` restores the model; `report` lists the replaced modules. On a
    batch-invariant World (`weft.init`) weft's results are batch-invariant, while Transformers still computes attention,
    the embedding and an output head that is whole on every rank; experts are rejected.

    Raises:
        Unsupported, naming the module: any other model, quantised or adapted linears, a number of heads that is not a
            multiple of the number of ranks, any other dtype or activation; a class, a forward or a hook inside a layer
            that is not Transformers' own (at the next pass, if the user set it later).
        ValueError: a model that is already woven; a model that is whole on every rank, without a `world`; a plan that
            `all_reduce_rms_norm` does not have; a call that needs a gradient.
    """
    if getattr(model, WOVEN_ATTRIBUTE, None) is not None:
        raise ValueError("this model is woven already; weft.hf.unweave puts it back")
    base: Module = getattr(model, "base_model", model)
    layers: list[Module] = [*getattr(base, "layers", ())]
    _check(base, layers)
    world = _world_of(layers[0]) if world is None else world
    check_call("weave", world, plan)
    ALL_REDUCE_RMS_NORM.check_plan(plan)
    _check_split(layers, world)
    called = list(_called_hooks(layers))
    check_modules(layers, called)
    with_experts = [hasattr(layer.mlp, "experts") for layer in layers]
    if world.batch_invariant and any(with_experts):
        raise Unsupported(f"{class_of(layers[0].mlp)} on a batch-invariant World: experts do not keep its promise")
    two_parts_from, two_parts_plan = _two_parts(world, layers[0], plan, two_parts)
    woven = Woven(model, world, plan, two_parts_from, two_parts_plan, any(with_experts), all(with_experts))
    try:
        attention = _weave_layers(base, woven)
        woven.replaced.append(_describe_parts(woven))
        _weave_model(model, base, attention, woven)
    except BaseException:
        woven.undo_all()
        raise
    if why := copy_reason(model):
        for module in (model, base) if base is not model else (model,):
            woven.replace(module, "__deepcopy__", functools.partial(refuse_copy, why))
    woven.layers = Layers(base, layers, called, woven.numbers)
    setattr(model, WOVEN_ATTRIBUTE, woven)
    return model


def _weave_model(model: nn.Module, base: Module, attention: HeadsShard, woven: Woven) -> None:
    woven.forward(base, ModelForward(base, attention, woven).forward)
    loaded = base.register_load_state_dict_post_hook(woven.refresh)
    woven.undo.append(loaded.remove)
    head: Module = getattr(model, "lm_head", None)
    if split := HeadShard.fits(head, woven.world):
        shard = HeadShard(head, woven.world)
        woven.follow(shard)
        woven.forward(head, shard.forward)
        woven.replaced.append("lm_head: this rank's columns, gathered")
    untouched = [name for name, module in _other_modules(model, base) if module is not head or not split]
    woven.left += [(name, "Transformers' own") for name in untouched]
    _generate(model, woven)


def _generate(model: Module, woven: Woven) -> None:
    if hasattr(model, "generate") and woven.world.size > 1:
        woven.replace(model, "generate", same_draws(model.generate, woven.world))
    if hasattr(model, "generate_batch") and woven.world.backend.name == "emulated":
        woven.replace(model, "generate_batch", refuse_batch)


def _called_hooks(layers: list[Module]) -> Iterator[Hooks]:
    """Yield the hooks that a woven model calls: the hooks of routers and, in a dense model, the pre-hooks of attention,
    whose input is the normalised hidden states."""
    for layer in layers:
        if type(layer).__name__ not in moe.LAYERS:
            yield layer.self_attn._forward_pre_hooks
        elif hasattr(layer.mlp, "experts"):
            router = moe.router_of(layer.mlp)
            yield from (router._forward_hooks, router._forward_pre_hooks)


def _weave_layers(base: Module, woven: Woven) -> HeadsShard:
    """Replace the forwards of the layers and of the final norm. Return the attention of one layer."""
    layers = [*base.layers]
    for index, layer in enumerate(layers):
        attention, mlp = _weave_attention(layer, woven), _weave_mlp(layer.mlp, woven)
        woven.forward(layer, LayerForward(base, index, attention, mlp, woven).forward)
    woven.forward(base.norm, norm_forward)
    woven.replaced += _describe_layers(layers, woven)
    return attention


def _weave_attention(layer: Module, woven: Woven) -> HeadsShard:
    if type(layer).__name__ in moe.LAYERS:
        return moe.weave_attention(layer.self_attn, woven)
    attention = AttentionShard(layer.self_attn, woven.world)
    woven.follow(attention, attention.qkv, attention.out)
    woven.numbers.append(Numbers.built_in(layer.self_attn, *AttentionShard.followed))
    woven.forward(layer.self_attn, attention.forward)
    return attention


def _weave_mlp(mlp: Module, woven: Woven) -> Sublayer:
    if hasattr(mlp, "experts"):
        return moe.weave_experts(mlp, woven)
    shard = MlpShard(mlp, woven.world)
    woven.follow(shard.gate_up, shard.down)
    return shard


def unweave(model: nn.Module) -> nn.Module:
    """Restore the model as it was before `weave`, and return it. Raises ValueError for a model that is not woven."""
    woven = _woven(model)
    woven.undo_all()
    delattr(model, WOVEN_ATTRIBUTE)
    return model


def repack(model: nn.Module) -> nn.Module:
    """Pack the experts of a woven model, or of a model with `register_experts`, from their parameters again. Return the
    model.

    A pass repacks the experts itself after `load_state_dict`, `copy_` and writes through `data`. Call `repack` after
    writes that torch does not count, such as the writes of a collective (`torch.distributed.broadcast`) or a kernel,
    and after any write before the replay of a CUDA graph. The graph stays valid, since packed experts keep their
    memory. All other weights share the memory of the parameters.
    """
    woven = getattr(model, WOVEN_ATTRIBUTE, None)
    registered = [
        vars(module)[moe.EXPERTS_ATTRIBUTE].parameters
        for module in model.modules()
        if moe.EXPERTS_ATTRIBUTE in vars(module)
    ]
    for parameters in (*registered, *(woven.parameters if isinstance(woven, Woven) else ())):
        if parameters.packed:
            parameters.bind()
    return model


def report(model: nn.Module) -> str:
    """Return a line for each kind of module that `weave` replaced and for each module that it did not replace. Raises
    ValueError for a model that is not woven."""
    woven = _woven(model)
    world = woven.world
    lines = [f"woven over {world.size} ranks, this one {world.rank}"]
    lines += [f"  {line}" for line in woven.replaced]
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in woven.left)])


def _two_parts(
    world: World, layer: Module, plan: str | Plan, two_parts: str | int | None
) -> tuple[int | None, str | Plan]:
    """Return the least number of tokens for which a pass runs in two parts, or None, and the plan of the norms.
    For "auto" both come from measurements of a decoder of these sizes (`two_parts_from`). Only dense decoders
    were measured, so a model with experts runs in two parts only if `two_parts` is a number."""
    if two_parts is None or world.size == 1:
        return None, plan
    measured, measured_plan = None, plan
    if type(layer).__name__ not in moe.LAYERS:
        config = layer.self_attn.config
        measured, measured_plan = two_parts_from(world, config.hidden_size, config.intermediate_size)
    if two_parts == "auto":
        two_parts = measured
    if two_parts is not None and (not isinstance(two_parts, int) or two_parts < 1):
        raise ValueError(f'two_parts: {two_parts!r} is not "auto", a number of tokens or None')
    return two_parts, measured_plan if plan == "auto" else plan


def _describe_layers(layers: list[Module], woven: Woven) -> Iterator[str]:
    attention, single_rank = layers[0].self_attn, woven.world.size == 1
    gemms = "in one GEMM" if single_rank or isinstance(attention.q_proj.weight, DTensor) else "by a GEMM each"
    norms = "norms of heads and rotary" if hasattr(attention, "q_norm") else "rotary"
    if type(layers[0]).__name__ in moe.LAYERS:
        yield "layers.*.self_attn.q_proj, k_proj, v_proj: one GEMM of this rank's heads; o_proj: this rank's columns"
    else:
        yield f"layers.*.self_attn: q, k and v {gemms}; {norms} in one launch; o_proj: a partial sum"
    for mlp in {type(layer.mlp).__name__: layer.mlp for layer in layers}.values():
        if hasattr(mlp, "experts"):
            yield f"layers.*.mlp ({type(mlp).__name__}): weft.moe, {moe.split_of(mlp.experts)} on every rank"
        else:
            without = " without experts" if woven.experts else ""
            yield f"layers.*.mlp{without}: gate and up {gemms}, SiLU-mul in one launch; down_proj: a partial sum"
    norm = f"layers.*, norm: all_reduce_rms_norm, plan {woven.plan}, in place of all-reduce, add and norm"
    yield norm + (f", below {SHARDED_FROM} tokens and in two parts; else rows by their owners" * woven.shards_tokens)


def _describe_parts(woven: Woven) -> str:
    if woven.two_parts is None:
        return "in one part, whatever the tokens"
    plan = woven.two_parts_plan if isinstance(woven.two_parts_plan, str) else woven.two_parts_plan.kind
    norms = f"one's all_reduce_rms_norm, plan {plan}, under the other's GEMMs"
    return f"from {woven.two_parts} tokens on in two parts, {norms}"


def _woven(model: nn.Module) -> Woven:
    woven = getattr(model, WOVEN_ATTRIBUTE, None)
    if woven is None:
        raise ValueError(f"{type(model).__name__} is not woven")
    assert isinstance(woven, Woven)
    return woven


# -- what can be woven -------------------------------------------------------------------------------------------------
def _check(base: nn.Module, layers: list[Module]) -> None:
    supported = *KNOWN_LAYERS, *moe.LAYERS
    if not layers or any(type(layer).__name__ not in supported for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers}) or [type(base).__name__]
        raise Unsupported(
            f"weave knows {', '.join(supported)}; this model has {', '.join(kinds)}. weft.hf.styles(), called before "
            "loading, serves the linears of any architecture that Transformers splits"
        )
    for i, layer in enumerate(layers):
        mixture = type(layer).__name__ in moe.LAYERS and not hasattr(layer.mlp, "gate_proj")
        if mixture:
            moe.check_experts(f"layers.{i}.mlp.experts", getattr(layer.mlp, "experts", None))
        for name in (*COLUMN_PARALLEL, *ROW_PARALLEL):
            if mixture and name.startswith("mlp."):
                continue
            linear = layer.get_submodule(name)
            if type(linear) is not nn.Linear:
                raise Unsupported(f"layers.{i}.{name} is {class_of(linear)}, not a plain nn.Linear")
            if linear.weight.dtype not in DTYPES:
                raise Unsupported(f"layers.{i}.{name} is {linear.weight.dtype}; bfloat16 and float16 are supported")
        for names in (COLUMN_PARALLEL[:3], COLUMN_PARALLEL[3:] if not mixture else ()):
            if len({layer.get_submodule(name).bias is None for name in names}) > 1:
                raise Unsupported(f"layers.{i}: some of {', '.join(names)} have a bias and some do not")
        act = getattr(layer.self_attn.config, "hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"layers.{i}.mlp has activation {act!r}; silu is supported")


def _check_split(layers: list[Module], world: World) -> None:
    """Check that every rank has whole heads, and that all ranks have the same number of columns or experts."""
    config, head = layers[0].self_attn.config, layers[0].self_attn.head_dim
    for name, count in (("heads", config.num_attention_heads), ("key-value heads", config.num_key_value_heads)):
        if count % world.size:
            raise Unsupported(f"{count} {name} of {head} columns do not divide by {world.size} ranks")
    for mlp in (layer.mlp for layer in layers):
        if hasattr(mlp, "experts"):
            moe.check_split(mlp.experts, world)
        elif config.intermediate_size % (8 * world.size):
            raise Unsupported(
                f"intermediate size {config.intermediate_size} is not a multiple of 8 times {world.size} ranks"
            )


def _world_of(layer: nn.Module) -> World:
    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):
            return init(parameter.device_mesh.get_group())
    raise ValueError("this model is whole on every rank: weave it with a World (weave(model, weft.init()))")


def _other_modules(model: nn.Module, base: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each module that Transformers still computes. Inside layers this is only
    attention."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (*base.children(), *(model.children() if model is not base else ())):
        if module not in (base, base.layers, base.norm):
            yield names[id(module)], module
    yield f"{names[id(base.layers)]}.*.self_attn: cache and attention", base.layers
