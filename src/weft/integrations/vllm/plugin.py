"""The vLLM plugin: vLLM calls it in each of its processes, and it changes a model there after loading.

All ranks must make the same changes. So each rank first examines its model and changes nothing; the ranks compare their
candidates, make the World together, and only then change classes. After any error the model stays vLLM's own, and the
log has a line.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch.distributed as dist
from torch import nn

from ...backends.library_gemm import make_one_trial_an_octave
from ...launch import init
from ...nn.weave import two_parts_from
from ...op import Known
from ...world import World
from ..torch_async_tp import AsyncTP, async_tp
from . import fp8, layers, timing
from .dataflow import Flow, flow_of
from .interface import FP8_METHODS, FUSED_NORM, Interface, VllmObject, parameter_mismatch, read_interface
from .layers import Classes, Undo
from .row_norm_column import row_norm_column

log = logging.getLogger("vllm.weft")  # vLLM shows the loggers below its own name
WEFT_VLLM = "WEFT_VLLM"  # the environment variable that turns the plugin on with 1
FUSED = "fused_allreduce_rms_norm"  # a function of new-style models
OPS = ("row_norm_column", "row_all_reduce")

_models: list[ServedModel] = []  # one for each model that this process has loaded
_worlds: dict[str, World] = {}  # by the group's name


@dataclass
class ServedModel:
    """The changes to one model. `served` and `left` have a line for each change and reason; `undo` restores vLLM's
    classes."""

    model: str
    version: str
    served: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    world: World | None = None
    async_tp: AsyncTP | None = None
    undo: list[Undo] = field(default_factory=list)

    def line(self) -> str:
        """Return the report as one line, for the log."""
        return f"{self.version}: {self.model}: " + "; ".join(
            [f"serves {line}" for line in self.served or ["nothing"]] + [f"leaves to vLLM {line}" for line in self.left]
        )

    def text(self) -> str:
        ranks = "" if self.world is None else f", {self.world.size} ranks ({self.world.backend.name})"
        lines = [f"{self.version}: {self.model}{ranks}"]
        lines += [f"  serves {line}" for line in self.served] + [f"  leaves to vLLM {line}" for line in self.left]
        lines += [f"  {name}: {count} calls decided, by {plan}" for (name, plan), count in self.decided().items()]
        return "\n".join(lines + ([] if self.async_tp is None else [f"  {self.async_tp.report()}"]))

    def decided(self) -> Counter[tuple[str, str]]:
        """Count the different calls so far, by operator and kind of plan."""
        decided = {} if self.world is None else self.world.decided
        keyed = ((key, call.plan.kind) for key, call in decided.items() if isinstance(call, Known))
        return Counter((key[0], kind) for key, kind in keyed if isinstance(key, tuple) and key[0] in OPS)


# -- vLLM's side -------------------------------------------------------------------------------------------------------
def register() -> None:
    """Register the plugin. This is the entry point in the group `vllm.general_plugins`, and never raises."""
    if os.environ.get(WEFT_VLLM) != "1":
        return
    try:
        interface = read_interface(fp8.asked_for())
        if interface.unusable:
            log.warning("%s: serves nothing: %s", versions(interface), interface.unusable)
            return
        hook(interface)
    except Exception as error:
        log.warning("weft: serves nothing: %s: %s", type(error).__name__, error)


def versions(interface: Interface) -> str:
    """Return the versions of weft and vLLM, for the report."""
    tried = "" if interface.tried else ", untried"
    return f"weft {metadata.version('weft')} under vLLM {interface.version}{tried}"


def hook(interface: Interface) -> None:
    """Make vLLM serve every model with weft after loading it. A second call in a process does nothing."""
    loader = interface.objects["load_model"]
    original = loader.load_model
    if hasattr(original, "weft"):
        return

    @functools.wraps(original)
    def load_model(self: object, vllm_config: VllmObject, model_config: VllmObject, prefix: str = "") -> nn.Module:
        model: nn.Module = original(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        serve(model, vllm_config, interface)
        return model

    load_model.weft = True  # type: ignore[attr-defined]
    loader.load_model = load_model
    if "worker" in interface.objects:
        interface.objects["worker"].weft_report = lambda worker: text()


def text() -> str:
    """Return the reports of all models that this process has loaded."""
    return "\n".join(report.text() for report in _models) or "weft has served no model in this process"


# -- a model -----------------------------------------------------------------------------------------------------------
@dataclass
class Candidates:
    """The modules that a rank can serve: the sites of `flow`, and further row-parallel linears `rows`. With a reason
    `why_not` there are none. `fp8_reasons` are those of `Fp8Linears`."""

    why_not: str | None = None
    flow: Flow = field(default_factory=Flow)
    rows: list[nn.Module] = field(default_factory=list)
    fp8_reasons: Mapping[int, str] = field(default_factory=dict)

    def linears(self) -> list[nn.Module]:
        """Return the linears whose GEMM weft may compute."""
        of_sites = [linear for site in self.flow.sites for linear in (site.reduction, site.column)]
        return [linear for linear in (*of_sites, *self.rows) if linear is not None]

    def fingerprint(self) -> tuple[VllmObject, ...]:
        """Return what must be the same on all ranks."""
        sites = tuple((site.name, site.residual, site.column is None) for site in self.flow.sites)
        accepted = tuple(reason == "" for reason in self.fp8_reasons.values())
        return self.why_not, sites, self.flow.by_rows, len(self.rows), accepted


def serve(model: nn.Module, config: VllmObject, interface: Interface) -> None:
    """Put weft's operators into the model. Never raises: after an error the model stays vLLM's own."""
    report = ServedModel(type(model).__name__, versions(interface))
    report.left += [f"calls of {why}" for why in interface.missing.values()]
    group = interface.objects["group"]()
    try:
        if group.world_size > 1:
            _serve(model, config, interface, group, report)
        else:
            report.left.append("all: one rank has nothing to overlap")
    except Exception as error:
        for undo in reversed(report.undo):
            undo()
        report.served, report.world = [], None
        report.left.append(f"all: {type(error).__name__}: {error}")
        log.debug("weft serves nothing", exc_info=True)
    _models.append(report)
    if group.rank_in_group == 0:
        log.info("%s", report.line())


def _serve(model: nn.Module, config: VllmObject, interface: Interface, group: VllmObject, report: ServedModel) -> None:
    classes = Classes(
        row=interface.objects["row"],
        column=interface.objects["column"],
        norm=interface.objects["norm"],
        unquantized=interface.objects["unquantized"],
        gemma_norm=interface.objects.get("gemma_norm"),
        runner=interface.objects.get("runner"),
        fp8=fp8.Fp8Linears(tuple(interface.objects[name] for name in FP8_METHODS if name in interface.objects)),
    )
    candidates = find_candidates(model, config, classes)
    fingerprints = gather_objects(candidates.fingerprint(), group)
    if why := next((fingerprint[0] for fingerprint in fingerprints if fingerprint[0] is not None), None):
        report.left.append(f"all: {why}")
        if passes_fuse(config):
            report.async_tp = async_tp()
            report.served.append("torch.ops.symm_mem.fused_*, which its passes call")
        return
    if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
        report.left.append("all: ranks have different models")
        return
    report.world = world_of(group)
    keep_equal_products(candidates, config, classes, report.world, group)
    limit_captures(report.world, config)
    timed = report.world.backend.clock is not None
    if timed:
        make_one_trial_an_octave()
    rows_from, woven_from = thresholds(candidates.flow, config, classes, report.world)
    if timed:
        max_tokens = config.scheduler_config.max_num_batched_tokens
        timing.prepare_sizes(candidates.flow, classes, report.world, max_tokens, rows_from, woven_from)
    put_in_place(candidates, rows_from, woven_from, classes, report)
    name_compiled_code(config, report.world, candidates, rows_from, woven_from)


def keep_equal_products(
    candidates: Candidates, config: VllmObject, classes: Classes, world: World, group: VllmObject
) -> None:
    """Leave to vLLM the GEMMs of FP8 linears that weft computes otherwise. Collective if there are any."""
    if not candidates.fp8_reasons:
        return
    dtype = config.model_config.dtype
    classes.fp8.compare(candidates.linears(), world, dtype, lambda reasons: gather_objects(reasons, group))
    for site in candidates.flow.sites:
        if site.column is not None and not classes.is_column(site.column):
            site.column = None
    candidates.rows = [row for row in candidates.rows if classes.is_gemm(row)]


def name_compiled_code(config: VllmObject, world: World, candidates: Candidates, *tokens: int) -> None:
    """Add the constants of this model's compiled code to the key under which vLLM caches it. `tokens` are the
    thresholds, which are timed at every start and may differ at the next one."""
    additional = getattr(config, "additional_config", None)
    if isinstance(additional, dict):
        additional["weft"] = [
            metadata.version("weft"),
            world.name.rpartition(":")[0],
            repr(candidates.fingerprint()),
            *tokens,
        ]


def gather_objects(value: tuple[VllmObject, ...], group: VllmObject) -> list[tuple[VllmObject, ...]]:
    """Return the `value` of every rank. Collective."""
    values: list[VllmObject] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def find_candidates(model: nn.Module, config: VllmObject, classes: Classes) -> Candidates:
    """Find the modules that weft can serve. Never raises, since a collective of all ranks follows."""
    try:
        if why := reason_to_skip(config):
            return Candidates(why)
        classes.fp8.find(m for m in model.modules() if isinstance(m, classes.row | classes.column))
        flow = flow_of(model, classes)
        in_sites = {id(site.reduction) for site in flow.sites}
        rows = [m for m in model.modules() if isinstance(m, classes.row) and classes.reduces(m)]
        rows = [m for m in rows if id(m) not in in_sites and classes.is_gemm(m)]
        why_not = None if flow.sites or rows else "no sum over ranks that could be served"
        return Candidates(why_not, flow, rows, classes.fp8.reasons)
    except Exception as error:
        return Candidates(f"{type(error).__name__}: {error}")


def reason_to_skip(config: VllmObject) -> str | None:
    """Return why the whole model stays vLLM's own, or None."""
    parallel = config.parallel_config
    if passes_fuse(config):
        return "its passes shard the tokens (enable_sp)"
    if getattr(config, "lora_config", None) is not None:
        return "LoRA adapters wrap the linears"
    if getattr(config, "speculative_config", None) is not None:
        return "speculative decoding reads hidden states between layers"
    if getattr(parallel, "enable_dbo", False):
        return "two batches at once (enable_dbo)"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "prefill context parallelism"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return "VLLM_BATCH_INVARIANT asks for its own kernels"
    return None


def passes_fuse(config: VllmObject) -> bool:
    """Return whether vLLM's own passes (up to 0.31) shard the tokens, and call torch's fused operators."""
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    return bool(getattr(passes, "enable_sp", False) or getattr(passes, "fuse_gemm_comms", False))


def world_of(group: VllmObject) -> World:
    """Return the World of vLLM's tensor-parallel group. Collective the first time."""
    name = group.device_group.group_name
    world = _worlds.get(name)
    if world is None or world.group is not group.device_group:  # a group of an earlier engine may have had this name
        world = _worlds[name] = init(group.device_group)
    return world


def limit_captures(world: World, config: VllmObject) -> None:
    """Let no call of more tokens than vLLM captures be prepared for a capture. A prompt's number of tokens is often
    new, and preparing it runs a second plan at the second layer."""
    sizes = getattr(getattr(config, "compilation_config", None), "cudagraph_capture_sizes", None)
    if sizes is not None:
        world.max_captured_rows = max([world.max_captured_rows or 0, *sizes])


def put_in_place(
    candidates: Candidates, rows_from: int, woven_from: int, classes: Classes, report: ServedModel
) -> None:
    """Replace the candidates' classes and add lines to the report."""
    world, flow = report.world, candidates.flow
    assert world is not None
    counts: Counter[str] = Counter()
    for site in flow.sites:
        reduction: VllmObject = site.reduction
        has_gemm = classes.is_gemm(reduction)
        report.undo.append(layers.put(reduction, layers.PassThroughLinear) if has_gemm else layers.leave_sum(reduction))
        if site.column is not None:
            report.undo.append(layers.put(site.column, layers.PassThroughLinear))
        served = layers.Served(reduction if has_gemm else None, site.column, rows_from, woven_from, world)
        gemma = type(site.norm) is classes.gemma_norm
        report.undo.append(layers.put(site.norm, layers.SummedGemmaNorm if gemma else layers.SummedNorm, weft=served))
        reduction_name = "experts" if not isinstance(reduction, classes.row) else "a row-parallel linear"
        gemm = f" with its {classes.gemm_name(reduction)}" if has_gemm else ""
        counts[f"the sum of {reduction_name}{gemm}, residual and norm"] += 1
        counts[f"the column-parallel {classes.gemm_name(site.column)} after it"] += site.column is not None
    for row in candidates.rows:
        report.undo.append(layers.put(row, layers.Row, weft=world))
        counts[f"a row-parallel {classes.gemm_name(row)} and its sum"] += 1
    serve_fused_norms(world, report, counts)
    report.served += [f"{line} ({count} times)" for line, count in counts.items() if count]
    if flow.sites:
        report.served.append(residual_line(flow, rows_from, woven_from, world))
    report.left += flow.left + classes.fp8.left()


def residual_line(flow: Flow, rows_from: int, woven_from: int, world: World) -> str:
    """Return, for the report, how the ranks hold residuals, depending on the number of tokens."""
    if not rows_from:
        why = "faster so" if flow.by_rows else "they are read between layers"
        return f"residuals whole on every rank: {world.symmetric_reason or why}"
    parts = f", from {woven_from} on in two parts" if woven_from else ""
    return f"residuals from {rows_from} tokens on by the rows that a rank owns{parts}"


def thresholds(flow: Flow, config: VllmObject, classes: Classes, world: World) -> tuple[int, int]:
    """Return the number of tokens from which on each rank holds only its own rows of residuals, and the number from
    which on passes run in two token parts; 0: never. Collective if the first one is timed."""
    if not flow.by_rows or world.symmetric_reason:
        return 0, 0
    weight: VllmObject = flow.sites[0].norm.weight
    min_tokens = world.scale.replicated_bytes // (weight.numel() * weight.element_size()) + 1
    if world.backend.clock is not None:
        min_tokens = timing.rows_from(flow, classes, world, min_tokens, config.scheduler_config.max_num_batched_tokens)
    text_config = getattr(config.model_config, "hf_text_config", None)
    sizes = [getattr(text_config, name, 0) for name in ("hidden_size", "intermediate_size")]
    parts = two_parts_from(world, *sizes)[0] if min_tokens and all(sizes) else None
    return min_tokens, max(parts, min_tokens) if parts else 0


def serve_fused_norms(world: World, report: ServedModel, counts: Counter[str]) -> None:
    """Serve `fused_allreduce_rms_norm` of new-style models in every module that has imported it."""
    for name, module in list(sys.modules.items()):
        original = getattr(module, FUSED, None) if name.startswith("vllm.models.") else None
        if original is None or hasattr(original, "weft"):
            continue
        if why := parameter_mismatch(original, FUSED_NORM):
            report.left.append(f"{name}.{FUSED}, which {why}")
            continue
        setattr(module, FUSED, fused_norm(original, world))
        report.undo.append(functools.partial(setattr, module, FUSED, original))
        counts[f"{FUSED} of new-style models"] += 1


def fused_norm(original: Callable[..., VllmObject], world: World) -> Callable[..., VllmObject]:
    """Return a replacement of vLLM's `fused_allreduce_rms_norm`, which calls the original where it does not apply."""

    @functools.wraps(original)
    def served(hidden_states: VllmObject, residual: VllmObject, norm: VllmObject) -> VllmObject:
        if hidden_states.dim() != 2 or residual is None:
            return original(hidden_states, residual, norm)
        return row_norm_column(hidden_states, residual, norm.weight, norm.variance_epsilon, world=world)

    served.weft = True  # type: ignore[attr-defined]
    return served
