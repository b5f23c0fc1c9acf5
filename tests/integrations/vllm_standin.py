"""The part of vLLM that the plugin uses: stand-ins for its classes with the same names, modules and parameters, on
emulated ranks. The models are written like vLLM's. The greenlet identifies the rank."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import greenlet
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from tests.emulated.cases_fp8 import dequantized, scaled
from weft.integrations.vllm import compare, flashinfer, fp8, interface, pieces, plugin, served, start, twin

BF = torch.bfloat16
H, INNER, HEADS, EXPERTS = 64, 96, 64, 4
_worlds: dict[int, weft.World] = {}


def current_world() -> weft.World:
    return _worlds[id(greenlet.getcurrent())]


def enter(world: weft.World) -> None:
    """Make `world` the World of the current greenlet."""
    _worlds[id(greenlet.getcurrent())] = world


def drawn(seed: int, *shape: int) -> nn.Parameter:
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    return nn.Parameter(t.to(BF), requires_grad=False)


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    world = current_world()
    return weft.all_reduce(input_, world=world, plan="auto" if world.batch_invariant else "sequential")


def get_tp_group() -> Any:
    world = current_world()
    return SimpleNamespace(world=world, world_size=world.size, rank_in_group=world.rank)


_contexts: dict[int, Any] = {}
_configs: dict[int, Any] = {}


def get_forward_context() -> Any:
    """Return the context of the current rank's pass."""
    return _contexts.setdefault(
        id(current_world()),
        SimpleNamespace(slot_mapping={}, cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None),
    )


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    """Set the configuration that constructors of the current rank read."""
    _configs[id(current_world())] = vllm_config
    try:
        yield
    finally:
        del _configs[id(current_world())]


@contextmanager
def override_forward_context(forward_context: Any) -> Iterator[None]:
    """Set a different context for the code that the current rank runs in this block."""
    key, outer_context = id(current_world()), get_forward_context()
    _contexts[key] = forward_context
    try:
        yield
    finally:
        _contexts[key] = outer_context


class CUDAGraphMode:
    NONE, PIECEWISE = "NONE", "PIECEWISE"

    def has_piecewise_cudagraphs(self) -> bool:
        raise NotImplementedError


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int


cudagraph_capturing_enabled = False


def set_cudagraph_capturing_enabled(enabled: bool) -> None:
    global cudagraph_capturing_enabled
    cudagraph_capturing_enabled = enabled


@contextmanager
def graph_capture(device: Any) -> Iterator[None]:
    yield


class CUDAGraphWrapper:
    """A piece of a compiled model. A replay reads the tensors of the capture, as a CUDA graph does."""

    _all_instances: ClassVar[weakref.WeakSet[CUDAGraphWrapper]] = weakref.WeakSet()

    def __init__(self, runnable: Callable[..., Any]) -> None:
        self.runnable, self.captures, self.graph_pool = runnable, 0, "vLLM's"
        self.concrete_cudagraph_entries: dict[Any, Any] = {}
        self._all_instances.add(self)

    def clear_graphs(self) -> None:
        self.concrete_cudagraph_entries.clear()

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
            return self.runnable(*args)
        entries = self.concrete_cudagraph_entries
        if context.batch_descriptor not in entries:
            assert cudagraph_capturing_enabled
            entries[context.batch_descriptor] = args
            self.captures += 1
        return self.runnable(*entries[context.batch_descriptor])


class CustomOp(nn.Module):
    """An operator in an engine that compiles: its forward method is the one that the compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class UBatchSlice:
    request_slice: slice
    token_slice: slice


@dataclass
class Batch:
    """vLLM's CommonAttentionMetadata. `slots` contains the cache slots of each request's tokens, in order."""

    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    num_actual_tokens: int
    causal: Any = True

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)


def split_attn_metadata(ubatch_slices: list[UBatchSlice], common_attn_metadata: Batch) -> list[Batch]:
    batch, parts = common_attn_metadata, []
    for part in ubatch_slices:
        requests, begin, end = part.request_slice, part.token_slice.start, part.token_slice.stop
        starts = batch.query_start_loc_cpu[requests.start : requests.stop + 1]
        inside = starts.clamp(begin, end)
        assert (inside[1:] > inside[:-1]).all(), f"{part} has requests without tokens: {starts.tolist()}"
        lengths = batch.seq_lens[requests] - (starts[1:] - inside[1:])
        parts.append(Batch(inside - begin, lengths, batch.slots[requests], end - begin))
    return parts


class FullAttentionSpec:
    pass


class MambaSpec:
    pass


class AttentionGroup:
    def __init__(self, builder: Builder) -> None:
        self.builder, self.kv_cache_spec = builder, builder.kv_cache_spec

    def get_metadata_builder(self, ubatch_id: int = 0) -> Builder:
        return self.builder


class Builder:
    """A builder whose metadata use the builder's own buffer, as FlashAttention's may."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names, self.buffer = kv_cache_spec, layer_names, SimpleNamespace()
        self.config = next(iter(_configs.values()), None)  # the ranks of a test share one context

    def build(self, common_prefix_len: int, common_attn_metadata: Batch) -> Any:
        assert common_prefix_len == 0
        self.buffer.batch = common_attn_metadata
        return self.buffer


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


class Fp8LinearMethod:
    """x is quantised by row if the weight has a single scale or one per row, and otherwise by block like the weight."""

    block_scale = "weight_scale_inv"

    def __init__(self, recipe: str = "tensor") -> None:
        self.recipe = recipe

    def process_weights_after_loading(self, layer: Any) -> None:
        block = self.recipe == "block"
        weight, scale = scaled(layer.weight.data, self.recipe, 128)
        layer.weight_block_size, layer.input_scale = [128, 128] if block else None, None
        layer.weight = nn.Parameter(weight if block else weight.t(), requires_grad=False)
        scale = scale.view(()) if self.recipe == "tensor" else scale
        setattr(layer, self.block_scale if block else "weight_scale", nn.Parameter(scale, requires_grad=False))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rounded to e4m3."""
        return dequantized(*scaled(x, "block" if self.recipe == "block" else "row"))

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.recipe == "block":
            weight = dequantized(layer.weight, getattr(layer, self.block_scale), 128)
        else:
            weight = layer.weight.t().float() * layer.weight_scale
        y = (self.quantized(x) @ weight.t()).to(x.dtype)
        return y if bias is None else y + bias


class CompressedTensorsLinearMethod(Fp8LinearMethod):
    block_scale = "weight_scale"

    def __init__(self, recipe: str = "row") -> None:
        super().__init__(recipe)


def in_fp8(model: nn.Module, method: Fp8LinearMethod) -> nn.Module:
    """Quantise all linears of the model."""
    for linear in model.modules():
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
            linear.quant_method = method
            method.process_weights_after_loading(linear)
    return model


class ColumnParallelLinear(nn.Module):
    def __init__(self, seed: int, n: int, k: int, quant_method: Any = None) -> None:
        super().__init__()
        self.output_size_per_partition, self.input_size_per_partition = n // current_world().size, k
        self.tp_size, self.gather_output, self.skip_bias_add, self.return_bias = (
            current_world().size,
            False,
            False,
            True,
        )
        self.quant_method = quant_method or UnquantizedLinearMethod()
        self.weight = nn.Parameter(
            drawn(seed, n, k).chunk(self.tp_size)[current_world().rank].contiguous(), requires_grad=False
        )
        self.bias = None

    def forward(self, input_: torch.Tensor) -> Any:
        return self.quant_method.apply(self, input_, self.bias), None


class QKVParallelLinear(ColumnParallelLinear):
    pass


class RowParallelLinear(nn.Module):
    def __init__(self, seed: int, n: int, k: int, bias: bool = False, quant_method: Any = None) -> None:
        super().__init__()
        self.output_size_per_partition, self.input_size_per_partition = n, k // current_world().size
        self.tp_size, self.tp_rank, self.reduce_results, self.input_is_parallel = (
            current_world().size,
            current_world().rank,
            True,
            True,
        )
        self.skip_bias_add, self.return_bias = False, True
        self.quant_method = quant_method or UnquantizedLinearMethod()
        whole = drawn(seed, n, k)
        self.weight = nn.Parameter(whole.chunk(self.tp_size, 1)[self.tp_rank].contiguous(), requires_grad=False)
        self.bias = drawn(seed + 1, n) if bias else None

    def forward(self, input_: torch.Tensor) -> Any:
        y = self.quant_method.apply(self, input_, None if self.tp_rank else self.bias)
        return (tensor_model_parallel_all_reduce(y) if self.reduce_results else y), None


class RMSNorm(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + drawn(seed, H), requires_grad=False), 1e-6
        self.variance_size_override, self.has_weight = None, True

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        h = x.float() if residual is None else x.float() + residual.float()
        y = (torch.rms_norm(h, h.shape[-1:], eps=self.variance_epsilon) * self.scale()).to(x.dtype)
        return y if residual is None else (y, h.to(x.dtype))

    def scale(self) -> torch.Tensor:
        return self.weight.float()

    def forward(self, *args: Any) -> Any:
        return self.forward_native(*args)


class GemmaRMSNorm(RMSNorm):
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return super().forward_native(x, residual)

    def scale(self) -> torch.Tensor:
        return self.weight.float() + 1


class MoERunner(nn.Module):
    """Experts split by columns: each rank holds a part of the inner dimension of all experts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        w = current_world()
        self.moe_config = SimpleNamespace(
            skip_final_all_reduce=False, is_sequence_parallel=False, tp_size=w.size, ep_size=1, dp_size=1, pcp_size=1
        )
        self.up = nn.Parameter(drawn(seed, EXPERTS, H, INNER).chunk(w.size, 2)[w.rank].contiguous())
        self.down = nn.Parameter(drawn(seed + 1, EXPERTS, INNER, H).chunk(w.size, 1)[w.rank].contiguous())
        self.requires_grad_(False)

    _fused_output_is_reduced = False

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        chosen = router_logits[:, :EXPERTS].float().softmax(1)  # for all tokens: the first one could depend on rounding
        hidden = torch.einsum("th,ehi->eti", hidden_states.float(), self.up.float()).relu()
        y = torch.einsum("eti,eih,te->th", hidden, self.down.float(), chosen).to(BF)
        return y if self.moe_config.skip_final_all_reduce else tensor_model_parallel_all_reduce(y)


class Attention(nn.Module):
    """Attention between adjacent tokens, so that a token's result depends on other rows."""

    def __init__(self, seed: int, row_bias: bool = False, quant_method: Any = None) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(seed, HEADS, H)
        self.o_proj = RowParallelLinear(seed + 1, H, HEADS, row_bias, quant_method)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        heads = qkv.view(*qkv.shape[:-1], qkv.shape[-1])
        output, _ = self.o_proj(torch.tanh(heads) + positions[:, None].to(BF) * 0.01)
        return output


class MLP(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = ColumnParallelLinear(seed, INNER, H), RowParallelLinear(seed + 1, H, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(F.silu(x))
        return x


class SparseMlp(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.experts = MoERunner(seed)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.dim() <= 2
        num_tokens, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        return self.experts(hidden_states=hidden_states, router_logits=hidden_states)


class DecoderLayer(nn.Module):
    """A layer like Llama's. `mlp` is the class of the layer's MLP, and `attention_options` are the options of its
    attention."""

    def __init__(
        self, seed: int, mlp: type[nn.Module] = MLP, norm: type[RMSNorm] = RMSNorm, **attention_options: Any
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(seed, **attention_options), mlp(seed + 10)
        self.input_layernorm, self.post_attention_layernorm = norm(seed + 20), norm(seed + 21)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Gemma2Layer(DecoderLayer):
    """A layer with norms before and after both halves."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, norm=GemmaRMSNorm)
        self.pre_feedforward_layernorm = GemmaRMSNorm(seed + 22)
        self.post_feedforward_layernorm = GemmaRMSNorm(seed + 23)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), residual


class ScaledLayer(DecoderLayer):
    """A layer like Granite's: each half's result is scaled before it is added, so that no norm reads a sum."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        hidden_states = hidden_states + 0.5 * self.self_attn(positions, self.input_layernorm(hidden_states))
        return hidden_states + 0.5 * self.mlp(self.post_attention_layernorm(hidden_states)), None


class Model(nn.Module):
    """`layer` creates one layer from a seed. `recorded` lists layers whose hidden states are returned too, as
    speculative decoding needs."""

    def __init__(self, layer: Callable[[int], nn.Module], norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, H, dtype=BF, _weight=drawn(5, 32, H).data)
        self.layers = nn.ModuleList(layer(100 * i) for i in range(1, 3))
        self.norm, self.recorded = norm(7), ()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any,
        inputs_embeds: torch.Tensor | None = None,
        **extra_layer_kwargs: Any,
    ) -> Any:
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual, seen = None, []
        for i, layer in enumerate(self.layers):
            hidden_states, residual = layer(positions, hidden_states, residual, **extra_layer_kwargs)
            if i in self.recorded:
                seen.append(hidden_states + residual)
        if residual is None:
            return self.norm(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return (hidden_states, seen) if seen else hidden_states


class BaseModelLoader:
    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        model: nn.Module = vllm_config.make()
        return model


class TorchCompileWithNoGuardsWrapper:
    def __init__(self, compile_prefix: str = "", is_encoder: bool = False) -> None:
        self.compile_prefix = compile_prefix


class WorkerBase:
    def get_model(self) -> nn.Module:
        raise NotImplementedError


class ModelRunner:
    """Runs passes of a model, and records the requests in `log`."""

    def __init__(self, model: nn.Module, max_tokens: int) -> None:
        self.model, self.max_tokens, self.log = model, max_tokens, list[str]()

    def _dummy_run(self, num_tokens: int, **options: Any) -> Any:
        with torch.inference_mode():
            return self.model(torch.zeros(num_tokens, dtype=torch.long), torch.arange(num_tokens), None)

    def profile_run(self) -> None:
        self.log.append("profile")
        self._dummy_run(self.max_tokens)

    def capture_model(self) -> int:
        self.log.append("capture")
        return 0


class Worker(WorkerBase):
    """The worker on GPUs. A start calls `determine_available_memory`, then `compile_or_warm_up_model`."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_runner = ModelRunner(model, vllm_config.scheduler_config.max_num_batched_tokens)

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        return 1

    def compile_or_warm_up_model(self) -> float:
        self.model_runner.capture_model()
        return 2.0


def config(make: Callable[[], nn.Module], **changes: Any) -> Any:
    parts = dict(
        make=make,
        parallel_config=SimpleNamespace(enable_dbo=False, prefill_context_parallel_size=1),
        model_config=SimpleNamespace(
            dtype=BF, get_vocab_size=lambda: 32, hf_text_config=SimpleNamespace(hidden_size=H, intermediate_size=INNER)
        ),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=16),
        lora_config=None,
        speculative_config=None,
        additional_config={},
    )
    return SimpleNamespace(**{**parts, **changes})


PLACES: dict[str, tuple[Any, ...]] = {
    "vllm": (),
    "vllm.config": (set_current_vllm_config, CUDAGraphMode),
    "vllm.forward_context": (get_forward_context, override_forward_context, BatchDescriptor),
    "vllm.model_executor.custom_op": (CustomOp,),
    "vllm.v1.worker.ubatch_utils": (UBatchSlice, split_attn_metadata),
    "vllm.compilation.wrapper": (TorchCompileWithNoGuardsWrapper,),
    "vllm.compilation.cuda_graph": (CUDAGraphWrapper,),
    "vllm.compilation.monitor": (set_cudagraph_capturing_enabled,),
    "vllm.distributed.parallel_state": (graph_capture,),
    "vllm.distributed": (tensor_model_parallel_all_reduce, get_tp_group),
    "vllm.model_executor.model_loader.base_loader": (BaseModelLoader,),
    "vllm.model_executor.layers.linear": (RowParallelLinear, ColumnParallelLinear, UnquantizedLinearMethod),
    "vllm.model_executor.layers.quantization.fp8": (Fp8LinearMethod,),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors": (CompressedTensorsLinearMethod,),
    "vllm.model_executor.layers.layernorm": (RMSNorm, GemmaRMSNorm),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": (MoERunner,),
    "vllm.v1.worker.worker_base": (WorkerBase,),
    "vllm.v1.worker.gpu_worker": (Worker,),
}


@contextmanager
def served_by_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Install the modules as in vLLM 0.32, for a plugin whose ranks are emulated."""
    for module in (flashinfer, fp8, pieces, plugin, start, twin):
        monkeypatch.setattr(module, "gather_objects", lambda value, group: group.world.exchange(value))
    loaded: list[served.ServedModel] = []
    for module in (plugin, start, served):
        monkeypatch.setattr(module, "models", loaded)
    monkeypatch.setattr(plugin, "world_of", lambda group: group.world)
    monkeypatch.setattr(compare, "stored_at", lambda model, depends_on: None)
    monkeypatch.setattr(interface, "installed", lambda: "0.32.0")
    monkeypatch.setenv("WEFT_VLLM", "1")
    monkeypatch.delenv("WEFT_VLLM_FP8", raising=False)
    with installed() as modules:
        yield modules


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """Install the modules, and afterwards undo a test's changes to the classes."""
    modules = {name: ModuleType(name) for name in PLACES}
    for name, things in PLACES.items():
        for thing in things:
            setattr(modules[name], thing.__name__, thing)
    before = {name: sys.modules.get(name) for name in modules}
    methods = [
        (BaseModelLoader, "load_model"), (Worker, "determine_available_memory"), (Worker, "compile_or_warm_up_model")
    ]  # fmt: skip
    originals = [getattr(owner, name) for owner, name in methods]
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for (owner, name), original in zip(methods, originals, strict=True):
            setattr(owner, name, original)
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def run(fn: Callable[[weft.World], Any], ranks: int = 2) -> list[Any]:
    def main(world: weft.World) -> Any:
        enter(world)
        return fn(world)

    return weft.spmd(main, ranks, backend="emulated")
