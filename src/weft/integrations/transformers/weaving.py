"""`weave`, `unweave` and `report`: which models can be woven, and what is put into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import Unsupported
from ...launch import init
from ...nn.weave import two_parts_from
from ...op import check_call
from ...ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from ...plans import Plan
from ...tensor_checks import DTYPES
from ...world import World
from . import moe
from .generation import drawn_alike, not_emulated
from .joints import Woven, layer_forward, model_forward, norm_forward
from .modules import Hooks, Layers, check_modules
from .parts import AttentionPart, HeadPart, MlpPart, Module

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")
HELD = "_weft"  # the attribute of a woven model


def weave(
    model: nn.Module, world: World | None = None, *, plan: str | Plan = "auto", two_parts: str | int | None = "auto"
) -> nn.Module:
    """The model itself, its layers' communication and element-wise work by weft from now on.

    Args:
        model: Llama, Mistral, Qwen2 (and 2.5), Qwen3, Mixtral, Qwen3-MoE or GPT-OSS of Transformers, as the causal
            model or its base, bfloat16 or float16, on the World's device. Either loaded with
            `distributed_config=DistributedConfig(tp_size=..)`, its experts split whole or by columns, or whole on every
            rank, of which a rank then computes with its part. `state_dict` and `save_pretrained` give what they gave,
            and what is written into the parameters later is what is computed with. Of linears that are one GEMM they
            become views of one weight; experts' matrices are packed, which takes their bytes again (`repack`).
        world: the ranks. None: those that the model is split over, by `weft.init`.
        plan: of `all_reduce_rms_norm`.
        two_parts: from how many tokens of a pass on its rows go through a layer in two parts, one's all-reduce and norm
            under the other's GEMMs (TokenWeave, section 4); attention is of both at once. "auto": from where that was
            measured to pay on this GPU, for these sizes and as many ranks; with experts, of which nothing was, never.
            None: never.

    Logits agree with the model's own to rounding: sums over ranks, residual and norm are computed in float32 and
    rounded once. `forward`, `generate`, caches and CUDA graphs work as before; all ranks make the same calls, and take
    what the first one draws where `generate` samples. Hidden states are gathered where `output_hidden_states` asks for
    them; attention weights are refused. `unweave` puts the model back, `report` says what
    was done.

    Raises:
        Unsupported, naming the module: a model that is not one of these, quantised or adapted linears, heads that the
            ranks do not divide, another dtype or activation; a class, a forward or a hook inside a layer that is not
            Transformers' own, also one that is put there later, at the next pass.
        ValueError: a model that is woven already, or is whole and comes without a World; a plan that
            `all_reduce_rms_norm` does not have. A call that needs a gradient.
    """
    if getattr(model, HELD, None) is not None:
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
    mixtures = type(layers[0]).__name__ in moe.LAYERS
    done = Woven(world, plan, *_two_parts(world, layers[0], plan, two_parts))
    try:
        (moe.weave_layers if mixtures else _weave_dense)(layers, base.norm, done)
        done.replaced.append(_parts_said(done))
        _weave_model(model, base, done)
    except BaseException:
        done.undo_all()
        raise
    done.layers = Layers(base, layers, called)
    setattr(model, HELD, done)
    return model


def _weave_model(model: nn.Module, base: Module, done: Woven) -> None:
    done.forward(base, model_forward(base, done))
    loaded = base.register_load_state_dict_post_hook(lambda *_: done.refresh(base))
    done.undo.append(loaded.remove)
    head: Module = getattr(model, "lm_head", None)
    if split := HeadPart.fits(head, done.world):
        part = HeadPart(head, done.world)
        done.follow(part)
        done.forward(head, part.forward)
        done.replaced.append("lm_head: this rank's columns, gathered")
    done.left += [(name, "Transformers' own") for name, other in _others(model, base) if other is not head or not split]
    _generate(model, done)


def _generate(model: Module, done: Woven) -> None:
    if hasattr(model, "generate") and done.world.size > 1:
        done.replace(model, "generate", drawn_alike(model.generate, done.world))
    if hasattr(model, "generate_batch") and done.world.backend.name == "emulated":
        done.replace(model, "generate_batch", not_emulated(model.generate_batch))


def _called_hooks(layers: list[Module]) -> Iterator[Hooks]:
    """The hooks of routers, and those before a dense model's attention, which takes the normed hidden states."""
    for layer in layers:
        if type(layer).__name__ not in moe.LAYERS:
            yield layer.self_attn._forward_pre_hooks
        elif hasattr(layer.mlp, "experts"):
            router = moe.router_of(layer.mlp)
            yield from (router._forward_hooks, router._forward_pre_hooks)


def _weave_dense(layers: list[Module], last: nn.Module, done: Woven) -> None:
    world = done.world
    norms = [layer.input_layernorm for layer in layers[1:]] + [last]
    for layer, norm in zip(layers, norms, strict=True):
        attention, mlp = AttentionPart(layer.self_attn, world), MlpPart(layer.mlp, world)
        done.follow(attention, attention.qkv, attention.out, mlp.first, mlp.down)
        done.forward(layer.self_attn, attention.forward)
        done.forward(layer, layer_forward(layer, norm, attention, mlp, norm is last, done))
    done.forward(last, norm_forward)
    done.replaced += _said(layers, done)


def unweave(model: nn.Module) -> nn.Module:
    """The model as it was before `weave`. Raises ValueError for one that is not woven."""
    done = _woven(model)
    done.undo_all()
    delattr(model, HELD)
    return model


def repack(model: nn.Module) -> nn.Module:
    """The model itself, woven or with `register_experts`' experts, which are packed again from their parameters.

    A pass does so by itself where it sees that a parameter was written, by `load_state_dict`, `copy_` or through
    `data`. Call this after what leaves no trace, a collective or a kernel that writes into an expert's parameters
    (`torch.distributed.broadcast`), and before the replay of a CUDA graph: packed experts keep their memory. Other
    weights are the parameters' own memory and need nothing.
    """
    done = getattr(model, HELD, None)
    registered = [
        vars(module)[moe.HELD_EXPERTS].parameters for module in model.modules() if moe.HELD_EXPERTS in vars(module)
    ]
    for parameters in (*registered, *(done.parameters if isinstance(done, Woven) else ())):
        if parameters.packed:
            parameters.bind()
    return model


def report(model: nn.Module) -> str:
    """What `weave` replaced, and what it left alone, a line each. Raises ValueError for a model that is not woven."""
    done = _woven(model)
    world = done.world
    lines = [f"woven over {world.size} ranks, this one {world.rank}"]
    lines += [f"  {what}" for what in done.replaced]
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in done.left)])


def _two_parts(world: World, layer: Module, plan: str | Plan, asked: str | int | None) -> tuple[int | None, str | Plan]:
    """The number of tokens from which on a pass goes in two parts (None: never), and the joints' plan. "auto" takes
    them from measurements of the decoder of these sizes (nn/weave.py), where nothing but weaving is faster from there
    on. Only dense decoders are measured: one with experts goes in two parts where `asked` is a number."""
    if asked is None or world.size == 1:
        return None, plan
    measured, of = None, plan
    if type(layer).__name__ not in moe.LAYERS:
        config = layer.self_attn.config
        measured, of = two_parts_from(world, config.hidden_size, config.intermediate_size)
    if asked == "auto":
        asked = measured
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ValueError(f'two_parts: {asked!r} is not "auto", a number of tokens or None')
    return asked, of if plan == "auto" else plan


def _said(layers: list[Module], done: Woven) -> Iterator[str]:
    attention = layers[0].self_attn
    gemms = "in one GEMM" if done.world.size == 1 or isinstance(attention.q_proj.weight, DTensor) else "by a GEMM each"
    norms = "norms of heads and rotary" if hasattr(attention, "q_norm") else "rotary"
    yield f"layers.*.self_attn: q, k and v {gemms}; {norms} in one launch; o_proj: a partial sum"
    yield f"layers.*.mlp: gate and up {gemms}, SiLU-mul in one launch; down_proj: a partial sum"
    yield f"layers.*, norm: all_reduce_rms_norm, plan {done.plan}, in place of all-reduce, add and norm"


def _parts_said(done: Woven) -> str:
    if done.two_parts is None:
        return "in one part, whatever the tokens"
    plan = done.two_parts_plan if isinstance(done.two_parts_plan, str) else done.two_parts_plan.kind
    return (
        f"from {done.two_parts} tokens on in two parts, one's all_reduce_rms_norm, plan {plan}, under the other's GEMMs"
    )


def _woven(model: nn.Module) -> Woven:
    done = getattr(model, HELD, None)
    if done is None:
        raise ValueError(f"{type(model).__name__} is not woven")
    assert isinstance(done, Woven)
    return done


# -- what can be woven -------------------------------------------------------------------------------------------------
def _check(base: nn.Module, layers: list[Module]) -> None:
    known = *KNOWN_LAYERS, *moe.LAYERS
    if not layers or any(type(layer).__name__ not in known for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers}) or [type(base).__name__]
        raise Unsupported(
            f"weave knows {', '.join(known)}; this model has {', '.join(kinds)}. Of any architecture that Transformers "
            "splits, weft.hf.styles() serves the linears: call it before loading"
        )
    for i, layer in enumerate(layers):
        mixture = type(layer).__name__ in moe.LAYERS and not hasattr(layer.mlp, "gate_proj")
        if mixture:
            moe.check_experts(f"layers.{i}.mlp.experts", getattr(layer.mlp, "experts", None))
        for name in (*BY_COLUMNS, *BY_ROWS):
            if mixture and name.startswith("mlp."):
                continue
            linear = layer.get_submodule(name)
            if type(linear) is not nn.Linear:
                raise Unsupported(f"layers.{i}.{name} is {type(linear).__name__}, not a plain nn.Linear")
            if linear.weight.dtype not in DTYPES:
                raise Unsupported(f"layers.{i}.{name} is {linear.weight.dtype}; bfloat16 and float16 are supported")
        for names in (BY_COLUMNS[:3], BY_COLUMNS[3:] if not mixture else ()):
            if len({layer.get_submodule(name).bias is None for name in names}) > 1:
                raise Unsupported(f"layers.{i}: of {', '.join(names)} some have a bias and others none")
        act = getattr(layer.self_attn.config, "hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"layers.{i}.mlp has activation {act!r}; silu is supported")


def _check_split(layers: list[Module], world: World) -> None:
    """Check that every rank has whole heads, and as many columns or experts as the others."""
    config, head = layers[0].self_attn.config, layers[0].self_attn.head_dim
    for name, count in (("heads", config.num_attention_heads), ("key-value heads", config.num_key_value_heads)):
        if count % world.size:
            raise Unsupported(f"{count} {name} of {head} columns over {world.size} ranks")
    for mlp in (layer.mlp for layer in layers):
        if hasattr(mlp, "experts"):
            if why := moe.split_reason(mlp.experts, world):
                raise Unsupported(why)
        elif config.intermediate_size % (8 * world.size):
            raise Unsupported(f"intermediate size {config.intermediate_size} over {world.size} ranks, not by eights")


def _world_of(layer: nn.Module) -> World:
    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):
            return init(parameter.device_mesh.get_group())
    raise ValueError("this model is whole on every rank: weave it with a World (weave(model, weft.init()))")


def _others(model: nn.Module, base: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules that stay as they are, by name: none inside a layer but attention itself."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (*base.children(), *(model.children() if model is not base else ())):
        if module not in (base, base.layers, base.norm):
            yield names[id(module)], module
    yield f"{names[id(base.layers)]}.*.self_attn: cache and attention", base.layers
