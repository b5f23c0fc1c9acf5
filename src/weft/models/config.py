"""The sizes of a decoder, read from a Hugging Face config object or a dict with its keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_MISSING = object()


@dataclass(frozen=True)
class Mixture:
    """The sizes of the layers with experts, which are all layers but `dense_layers`. `top_k` is the number of experts
    per token, `intermediate_size` the size of an expert, and `shared_intermediate_size` the size of the shared expert
    (0: none). If `renormalise` is true, the chosen experts' probabilities are divided by their sum. `parallel` is
    "expert" (each rank has some experts) or "tensor" (each rank has some columns of every expert), as for
    `weft.moe.MoE`. Raises ValueError for impossible sizes."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool = True
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    parallel: str = "expert"

    def __post_init__(self) -> None:
        if self.parallel not in ("expert", "tensor"):
            raise ValueError(f'parallel {self.parallel!r} is not "expert" or "tensor"')
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k {self.top_k} must be from 1 to the {self.num_experts} experts")
        if self.intermediate_size < 1 or self.shared_intermediate_size < 0:
            raise ValueError(f"{self}: intermediate_size must be at least 1")


@dataclass(frozen=True)
class Config:
    """The sizes of a decoder, named as in Hugging Face's LlamaConfig. `rope` is "default", "linear" or "llama3", with
    its numbers in `rope_numbers`: factor, for llama3 also low_freq_factor, high_freq_factor and
    original_max_position_embeddings. With `qkv_bias` queries, keys and values have a bias; with `qk_norm` each head of
    queries and keys is normalised before the rotary embedding. `mixture` is None if no layer has experts. `recipe` is
    the recipe of 8-bit weights, or None. Raises ValueError for impossible sizes or an unknown rope."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: str = "default"
    rope_numbers: tuple[float, ...] = ()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mixture: Mixture | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: the rotary embedding rotates pairs")
        if self.rope not in _NUMBERS:
            raise ValueError(f"rotary scaling {self.rope!r} is not one of {sorted(_NUMBERS)}")
        if len(self.rope_numbers) != len(_NUMBERS[self.rope]):
            raise ValueError(f"rotary scaling {self.rope!r} takes {_NUMBERS[self.rope]}, got {self.rope_numbers}")

    @classmethod
    def from_hf(cls, source: Config | Mapping[str, object] | object) -> Config:
        """Return the Config of a Config, a dict, or any object with these attributes (`transformers.LlamaConfig`).

        Raises ValueError for a missing size and for features that the decoder does not support: other model types and
        biases, activations other than SiLU, sliding windows, and other kinds of rotary scaling.
        """
        if isinstance(source, Config):
            return source

        get = _values_of(source)
        kind = get("model_type", "llama")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type {kind!r}: only {', '.join(MODEL_TYPES)} are computed")
        if get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {get('hidden_act')!r}: only silu is computed")
        windows = get("use_sliding_window", not kind.startswith("qwen"))
        for name in ("attention_bias", "mlp_bias", *["sliding_window"] * windows):
            if get(name, False):
                raise ValueError(f"{name}={get(name)!r} is not computed")
        hidden, heads = get("hidden_size"), get("num_attention_heads")
        theta, rope, numbers = _rope(get)
        return cls(
            vocab_size=get("vocab_size"),
            hidden_size=hidden,
            intermediate_size=get("intermediate_size"),
            num_hidden_layers=get("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=get("num_key_value_heads", heads),
            head_dim=get("head_dim", hidden // max(heads, 1)),
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope=rope,
            rope_numbers=numbers,
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and bool(get("qkv_bias", True))),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            mixture=_mixture(kind, get),
        )

    def rotary(self, length: int, device: torch.device) -> torch.Tensor:
        """Return float32 [length, head_dim], the cosines and then the sines of the rotary embedding's angles (position
        times frequency), computed in float64."""
        frequency = self.rope_theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        if self.rope == "linear":
            frequency = frequency / self.rope_numbers[0]
        elif self.rope == "llama3":
            factor, low, high, original = self.rope_numbers
            rotations = original * frequency / (2 * math.pi)  # full rotations over the original context length
            keep = ((rotations - low) / (high - low)).clamp(0, 1)
            frequency = frequency * (keep + (1 - keep) / factor)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
        return torch.cat([angle.cos(), angle.sin()], 1).float().to(device)


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _values_of(source: Mapping[str, object] | object) -> Callable[..., Any]:
    """Return a function of a name and a default, which returns a value of a config: a dict's key or an object's
    attribute. It raises ValueError for a value that is missing or None and has no default."""

    def get(name: str, default: object = _MISSING) -> object:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is None and default is _MISSING:
            raise ValueError(f"config has no {name}")
        return default if value is None else value

    return get


def _rope(get: Callable[..., Any]) -> tuple[float, str, tuple[float, ...]]:
    """Return the base, kind and numbers of the rotary embedding."""
    scaling = dict(get("rope_parameters", None) or get("rope_scaling", {}))  # rope_parameters since transformers 5
    rope = scaling.get("rope_type", scaling.get("type"))
    if rope is None and scaling.keys() - {"rope_theta"}:
        raise ValueError(f"rotary scaling {scaling} has no rope_type")
    rope = rope or "default"
    names = _NUMBERS.get(rope, ())
    if missing := [name for name in names if name not in scaling]:
        raise ValueError(f"rotary scaling {rope!r} has no {', '.join(missing)}")
    theta = float(scaling.get("rope_theta", get("rope_theta", 10000.0)))
    return theta, rope, tuple(float(scaling[name]) for name in names)


def _mixture(kind: str, get: Callable[..., Any]) -> Mixture | None:
    if kind == "mixtral":
        return Mixture(get("num_local_experts"), get("num_experts_per_tok"), get("intermediate_size"))
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return None
    step, dense = get("decoder_sparse_step", 1), set(get("mlp_only_layers", ()))
    layers = range(get("num_hidden_layers"))
    return Mixture(
        num_experts=get("num_experts", None) or get("num_local_experts"),
        top_k=get("num_experts_per_tok"),
        intermediate_size=get("moe_intermediate_size"),
        renormalise=bool(get("norm_topk_prob", False)),
        shared_intermediate_size=get("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
        dense_layers=tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
    )
