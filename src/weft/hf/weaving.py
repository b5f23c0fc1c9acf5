"""`weave`, `unweave` and `report`: which models can be woven, and what is put into them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import Unsupported
from ..op import check_call
from ..operands import DTYPES
from ..plans import Plan
from ..world import World, init
from . import moe
from .joints import Woven, layer_forward, model_forward
from .parts import linear_part, mlp_part

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")
HELD = "_weft"  # the attribute of a woven model


def weave(model: nn.Module, world: World | None = None, *, plan: str | Plan = "auto") -> nn.Module:
    """The model itself, its layers' communication and element-wise work by weft from now on.

    Args:
        model: Llama, Mistral, Qwen2 (and 2.5), Qwen3, Mixtral, Qwen3-MoE or GPT-OSS of Transformers, as the causal
            model or its base, bfloat16 or float16, on the World's device. Either loaded with
            `distributed_config=DistributedConfig(tp_size=..)`, its experts split whole or by columns, or whole on every
            rank, of which a rank then computes with its part; its tensors stay as they are, so `state_dict` and
            `save_pretrained` give what they gave. Experts' matrices are laid out anew, which takes their bytes again.
        world: the ranks. None: those that the model is split over, by `weft.init`.
        plan: of `all_reduce_rms_norm`.

    Logits agree with the model's own to rounding: sums over ranks, residual and norm are computed in float32 and
    rounded once. `forward`, `generate`, caches and CUDA graphs work as before; all ranks make the same calls. Hidden
    states are gathered where `output_hidden_states` asks for them. `unweave` puts the model back, `report` says what
    was done.

    Raises:
        Unsupported, naming the module: a model that is not one of these, quantised or adapted linears, heads that the
            ranks do not divide, another dtype or activation.
        ValueError: a model that is woven already, or is whole and comes without a World. A call that needs a gradient.
    """
    if getattr(model, HELD, None) is not None:
        raise ValueError("this model is woven already; weft.hf.unweave puts it back")
    base: Any = getattr(model, "base_model", model)
    layers: list[Any] = [*getattr(base, "layers", ())]
    _check(base, layers)
    world = _world_of(layers[0]) if world is None else world
    check_call("weave", world, plan)
    _check_split(layers, world)
    done = Woven(world, plan)
    if type(layers[0]).__name__ in moe.LAYERS:
        moe.weave_layers(layers, base.norm, done)
    else:
        _weave_dense(base, layers, done)
    done.forward(base, model_forward(base, done))
    done.left += [(name, "Transformers' own") for name, _ in _others(model, base)]
    setattr(model, HELD, done)
    return model


def _weave_dense(base: Any, layers: list[Any], done: Woven) -> None:
    world = done.world
    for name in (*BY_COLUMNS[:3], BY_ROWS[0]):
        for layer in layers:
            done.forward(layer.get_submodule(name), linear_part(layer.get_submodule(name), world, name in BY_ROWS))
        done.replaced.append(f"layers.*.{name}: this rank's part" + (", a partial sum" if name in BY_ROWS else ""))
    for layer in layers:
        done.forward(layer.mlp, mlp_part(layer.mlp, world))
    done.replaced.append("layers.*.mlp: gate and up in one GEMM, SiLU-mul in one launch, a partial sum")
    norms = [layer.input_layernorm for layer in layers[1:]] + [base.norm]
    for layer, norm in zip(layers, norms, strict=True):
        done.forward(layer, layer_forward(layer, norm, done))
    done.forward(base.norm, lambda carried: carried.normed)
    done.replaced.append(f"layers.*, norm: all_reduce_rms_norm, plan {done.plan}, in place of all-reduce, add and norm")


def unweave(model: nn.Module) -> nn.Module:
    """The model as it was before `weave`. Raises ValueError for one that is not woven."""
    done = _woven(model)
    for undo in reversed(done.undo):
        undo()
    delattr(model, HELD)
    return model


def report(model: nn.Module) -> str:
    """What `weave` replaced, and what it left alone, a line each. Raises ValueError for a model that is not woven."""
    done = _woven(model)
    world = done.world
    lines = [f"woven over {world.size} ranks, this one {world.rank}"]
    lines += [f"  {what}" for what in done.replaced]
    return "\n".join([*lines, *(f"  {name}: {why}" for name, why in done.left)])


def _woven(model: nn.Module) -> Woven:
    done = getattr(model, HELD, None)
    if done is None:
        raise ValueError(f"{type(model).__name__} is not woven")
    assert isinstance(done, Woven)
    return done


# -- what can be woven -------------------------------------------------------------------------------------------------
def _check(base: nn.Module, layers: list[Any]) -> None:
    known = *KNOWN_LAYERS, *moe.LAYERS
    if not layers or any(type(layer).__name__ not in known for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers}) or [type(base).__name__]
        raise Unsupported(f"weave knows {', '.join(known)}; this model has {', '.join(kinds)}")
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
        act = getattr(layer.self_attn.config, "hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"layers.{i}.mlp has activation {act!r}; silu is supported")


def _check_split(layers: list[Any], world: World) -> None:
    """Whole heads, and as many columns or experts, on every rank."""
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
    yield f"{names[id(base.layers)]}.*.self_attn: rotary, cache and attention", base.layers
