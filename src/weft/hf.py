"""A Transformers model's tensor parallelism by weft: model = weft.hf.weave(model).

Transformers leaves a full activation on every rank behind each row-parallel linear: a GEMM, NCCL's all-reduce, the add
of the residual and the norm, one after another, and 25 us of host time for each linear that it wraps. A woven model
computes the same in other steps:

    linears          this rank's part alone, without wrappers; the row-parallel ones leave partial sums
    joints           `all_reduce_rms_norm`: sum over ranks, residual and norm in one, where the residual is held by
                     rows at their owners if tokens are many
    MLP              gate and up in one GEMM, SiLU-mul in one launch

Decoder layers hand on (residual, normed) in place of hidden states; the model between them does not look inside. What
Transformers does beside (embedding, attention, caches, masks, output head, generate) stays its own. For inference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import Unsupported
from .lang.mapping import balanced_rows
from .models.llama import keeps_shards
from .op import check_call
from .operands import DTYPES
from .ops.activation import silu_mul
from .ops.all_reduce.op import all_reduce_rms_norm
from .plans import Plan
from .world import World, init

__all__ = ["report", "unweave", "weave"]

KNOWN_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
BY_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BY_ROWS = ("self_attn.o_proj", "mlp.down_proj")
HELD = "_weft"  # the attribute of a woven model


class Carried(NamedTuple):
    """What decoder layers hand on. residual: [.., H] of all tokens, or the rows [m_r, H] that this rank owns; first,
    since Transformers records a layer's first output as its hidden states. normed: [.., H]."""

    residual: torch.Tensor
    normed: torch.Tensor


@dataclass
class Woven:
    """What was done to a model. replaced: a line for each kind of module; left: module and reason. undo: puts a
    module's own forward back. causal: in this forward pass every token attends to all before it, and to no other."""

    world: World
    plan: str | Plan
    causal: bool = False
    replaced: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """`module` runs `forward` from now on, as Transformers' own styles install theirs: on the instance."""
        before = module.__dict__.get("forward")

        def undo() -> None:
            if before is None:
                del module.forward
            else:
                module.forward = before

        module.forward = forward
        self.undo.append(undo)


def weave(model: nn.Module, world: World | None = None, *, plan: str | Plan = "auto") -> nn.Module:
    """The model itself, its layers' communication and element-wise work by weft from now on.

    Args:
        model: Llama, Mistral, Qwen2 (and 2.5) or Qwen3 of Transformers, as the causal model or its base, bfloat16 or
            float16, on the World's device. Either loaded with `distributed_config=DistributedConfig(tp_size=..)`, or
            whole on every rank, of which a rank then computes with its part; its tensors stay as they are, so
            `state_dict` and `save_pretrained` give what they gave.
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
    world = _world_of(layers[0].self_attn.q_proj.weight) if world is None else world
    check_call("weave", world, plan)
    _check_split(layers[0], world)
    done = Woven(world, plan)
    for name in (*BY_COLUMNS[:3], BY_ROWS[0]):
        for layer in layers:
            done.forward(layer.get_submodule(name), _linear(layer.get_submodule(name), world, name in BY_ROWS))
        done.replaced.append(f"layers.*.{name}: this rank's part" + (", a partial sum" if name in BY_ROWS else ""))
    for layer in layers:
        done.forward(layer.mlp, _mlp(layer.mlp, world))
    done.replaced.append("layers.*.mlp: gate and up in one GEMM, SiLU-mul in one launch, a partial sum")
    norms = [layer.input_layernorm for layer in layers[1:]] + [base.norm]
    for layer, norm in zip(layers, norms, strict=True):
        done.forward(layer, _layer(layer, norm, done))
    done.forward(base.norm, lambda carried: carried.normed)
    done.forward(base, _pass(base, done))
    done.replaced.append(f"layers.*, norm: all_reduce_rms_norm, plan {plan}, in place of all-reduce, add and norm")
    done.left += [(name, "Transformers' own") for name, _ in _others(model, base)]
    setattr(model, HELD, done)
    return model


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
    if not layers or any(type(layer).__name__ not in KNOWN_LAYERS for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers}) or [type(base).__name__]
        raise Unsupported(f"weave knows {', '.join(KNOWN_LAYERS)}; this model has {', '.join(kinds)}")
    for i, layer in enumerate(layers):
        for name in (*BY_COLUMNS, *BY_ROWS):
            linear = layer.get_submodule(name)
            if type(linear) is not nn.Linear:
                raise Unsupported(f"layers.{i}.{name} is {type(linear).__name__}, not a plain nn.Linear")
            if linear.weight.dtype not in DTYPES:
                raise Unsupported(f"layers.{i}.{name} is {linear.weight.dtype}; bfloat16 and float16 are supported")
        act = getattr(layer.mlp.config, "hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"layers.{i}.mlp has activation {act!r}; silu is supported")


def _check_split(layer: Any, world: World) -> None:
    """Whole heads, and as many columns, on every rank."""
    config, head = layer.self_attn.config, layer.self_attn.head_dim
    for name, count in (("heads", config.num_attention_heads), ("key-value heads", config.num_key_value_heads)):
        if count % world.size:
            raise Unsupported(f"{count} {name} of {head} columns over {world.size} ranks")
    if config.intermediate_size % (8 * world.size):
        raise Unsupported(f"intermediate size {config.intermediate_size} over {world.size} ranks, not by eights")


def _world_of(weight: torch.Tensor) -> World:
    if not isinstance(weight, DTensor):
        raise ValueError("this model is whole on every rank: weave it with a World (weave(model, weft.init()))")
    return init(weight.device_mesh.get_group())


def _others(model: nn.Module, base: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules that stay as they are, by name: none inside a layer but attention itself."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in (*base.children(), *(model.children() if model is not base else ())):
        if module not in (base, base.layers, base.norm):
            yield names[id(module)], module
    yield f"{names[id(base.layers)]}.*.self_attn: rotary, cache and attention", base.layers


# -- parts of linears --------------------------------------------------------------------------------------------------
def _part(weight: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part: a view of a whole tensor."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    share = weight.shape[dim] // world.size
    return weight.detach().narrow(dim, world.rank * share, share)


def _bias(linear: nn.Linear, world: World, rows: bool) -> torch.Tensor | None:
    """Of columns this rank's; of rows the whole one, which the first rank adds to its partial sum."""
    if linear.bias is None:
        return None
    if not rows:
        return _part(linear.bias, 0, world)
    bias = linear.bias.to_local() if isinstance(linear.bias, DTensor) else linear.bias.detach()
    return bias if world.rank == 0 else None


def _linear(linear: nn.Linear, world: World, rows: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = _part(linear.weight, int(rows), world), _bias(linear, world, rows)
    return lambda x: F.linear(x, weight, bias)


def _mlp(mlp: Any, world: World) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gate and up are stacked, which takes their bytes once more."""
    first = [_part(linear.weight, 0, world) for linear in (mlp.gate_proj, mlp.up_proj)]
    weight, biases = torch.cat(first), [_bias(linear, world, False) for linear in (mlp.gate_proj, mlp.up_proj)]
    bias = None if biases[0] is None or biases[1] is None else torch.cat([biases[0], biases[1]])
    down = _linear(mlp.down_proj, world, True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        both = F.linear(x.flatten(0, -2), weight, bias)
        return down(silu_mul(both, world=world)).view(x.shape)

    return forward


# -- joints ------------------------------------------------------------------------------------------------------------
def _pass(base: Any, done: Woven) -> Callable[..., Any]:
    """A forward pass of all layers. Inside a CUDA graph's capture Transformers hands attention a mask of all pairs of
    tokens also where there is none but the causal one, and with a mask torch has no fast attention."""
    own = base.forward

    def forward(input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        alone = attention_mask is None and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
        done.causal = alone and base.config._attn_implementation == "sdpa"
        return own(input_ids, attention_mask=attention_mask, **kwargs)

    return forward


def _layer(layer: Any, following: Any, done: Woven) -> Callable[..., Carried]:
    """A decoder layer from Carried, or the embedding's hidden states, to Carried. following: the next layer's norm."""
    join = functools.partial(_joined, world=done.world, plan=done.plan)
    slides = getattr(layer.self_attn, "sliding_window", None) is not None

    def forward(hidden_states: torch.Tensor | Carried, attention_mask: Any = None, **kwargs: Any) -> Carried:
        if isinstance(hidden_states, Carried):
            carried = hidden_states
        else:
            carried = Carried(_held(hidden_states, done.world), layer.input_layernorm(hidden_states))
        mask = None if done.causal and not slides else attention_mask
        partial, _ = layer.self_attn(carried.normed, attention_mask=mask, **kwargs)
        carried = join(partial, carried.residual, layer.post_attention_layernorm)
        return join(layer.mlp(carried.normed), carried.residual, following)

    return forward


def _held(hidden: torch.Tensor, world: World) -> torch.Tensor:
    """Of the embedding's rows what this rank holds of the residual: its own, where tokens are many and nobody asked for
    hidden states."""
    rows = hidden.flatten(0, -2)
    if _recorded() or not keeps_shards(world, rows.shape[0], rows.shape[1], rows.dtype):
        return hidden
    counts = balanced_rows(rows.shape[0], world.size)
    first = sum(counts[: world.rank])
    return rows[first : first + counts[world.rank]].contiguous()


def _recorded() -> bool:
    """Whether Transformers records hidden states in this forward pass."""
    from transformers.utils.output_capturing import _active_collector

    recorded = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return recorded is not None and "hidden_states" in recorded


def _joined(partial: torch.Tensor, residual: torch.Tensor, norm: Any, *, world: World, plan: str | Plan) -> Carried:
    whole = residual.shape == partial.shape  # [batch, tokens, H]; rows of this rank are [m_r, H]
    rows, held = partial.flatten(0, -2), residual.view(-1, residual.shape[-1])
    weight, eps = norm.weight, norm.variance_epsilon
    normed, kept = all_reduce_rms_norm(rows, held, weight, eps, full_residual=whole, world=world, plan=plan)
    return Carried(kept.view(residual.shape), normed.view(partial.shape))
