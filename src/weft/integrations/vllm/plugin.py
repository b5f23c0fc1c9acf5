"""The vLLM plugin. vLLM calls the plugin in each of its processes, and the plugin makes a twin of a loaded model
(twin.py).

All ranks must make the same changes. So each rank first examines its model without changing it; the ranks compare their
candidates, make the World together, and only then make twins. Before vLLM captures its graphs, the plugin decides which
passes a twin runs (start.py, compare.py). After any error vLLM runs all passes itself, and the plugin logs a line.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

from ...backends.library_gemm import one_trial_per_power_of_two
from ...launch import init
from ...plans import Plan
from ...world import World
from .. import switched_off
from . import compare, flashinfer, fp8, layers
from .dataflow import Flow, calls_of, first_sentence, flow_of, stacks
from .interface import (
    CAPTURES,
    COMMUNICATING,
    FP8_METHODS,
    Interface,
    VllmObject,
    gather_objects,
    option,
    read_interface,
)
from .layers import Classes
from .pieces import PieceGraphs
from .row_norm_column import PASS_FORMS
from .served import ServedModel, models, text
from .start import hook_worker
from .twin import PADDED, Passes, copied, twin_of
from .woven import woven_pass

log = logging.getLogger("vllm.weft")  # vLLM shows only the loggers below its own name
SOURCES = Path(__file__).parents[2]  # weft's package
# The environment variable that turns the plugin off with 0. With 1 the plugin also serves models for which no
# measurement shows that weft is never slower than vLLM, and models that weft cannot time.
WEFT_VLLM = "WEFT_VLLM"

# A stack of layers must have these arguments, so that the twin can run all passes of an engine without pipeline
# parallelism.
ARGUMENTS = {"self", *PADDED, "intermediate_tensors"}

_worlds: dict[tuple[str, bool], World] = {}  # the key is the group's name, and whether the World is batch-invariant


# -- vLLM's side -------------------------------------------------------------------------------------------------------
def register() -> None:
    """Register the plugin. This function is the entry point in the group `vllm.general_plugins`, and never raises."""
    if switched_off(WEFT_VLLM):
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


@functools.cache
def hash_of_sources() -> str:
    """Return a hash of weft's files, since a commit may change kernels and tables without a new version. Hashing takes
    some 10 ms."""
    digest = hashlib.sha256()
    paths = (path for path in SOURCES.rglob("*") if "__pycache__" not in path.parts and path.is_file())
    for path in sorted(paths):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def hook(interface: Interface) -> None:
    """Make vLLM call weft after it has loaded a model. A second call in a process does nothing."""
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


# -- a model -----------------------------------------------------------------------------------------------------------
@dataclass
class Candidates:
    """The modules of a `stack` of layers that a rank can serve: the sites of `flow`, and further row-parallel linears
    `rows`. If there is a reason `why_not`, the rank can serve none. `fp8_reasons` are the reasons in `Fp8Linears`."""

    why_not: str | None = None
    stack: VllmObject = None
    flow: Flow = field(default_factory=Flow)
    rows: list[nn.Module] = field(default_factory=list)
    fp8_reasons: Mapping[int, str] = field(default_factory=dict)

    def linears(self) -> list[nn.Module]:
        """Return the linears for which weft may compute the GEMM."""
        of_sites = [linear for site in self.flow.sites for linear in (site.reduction, site.column)]
        return [linear for linear in (*of_sites, *self.rows) if linear is not None]

    def fingerprint(self) -> tuple[VllmObject, ...]:
        """Return the properties that must be the same on all ranks."""
        sites = tuple((site.name, site.residual, site.column is None) for site in self.flow.sites)
        accepted = tuple(reason == "" for reason in self.fp8_reasons.values())
        return self.why_not, type(self.stack).__name__, sites, self.flow.by_rows, len(self.rows), accepted

    def shapes(self) -> Counter[tuple[VllmObject, ...]]:
        """Count the shapes of the linears and norms."""
        weights = [getattr(m, "weight", None) for m in (*self.linears(), *(site.norm for site in self.flow.sites))]
        return Counter((tuple(w.shape), str(w.dtype)) if isinstance(w, torch.Tensor) else () for w in weights)


def serve(model: nn.Module, config: VllmObject, interface: Interface) -> None:
    """Make a twin of the model. Never raises: after an error vLLM runs the model without weft."""
    group = interface.objects["group"]()
    report = ServedModel(type(model).__name__, versions(interface), config, group)
    report.left += [f"calls of {why}" for why in interface.missing.values()]
    try:
        if group.world_size > 1:
            _serve(model, interface, report)
        else:
            report.left.append("all: one rank has nothing to overlap")
    except Exception as error:
        report.give_up(f"{type(error).__name__}: {error}")
        log.debug("weft serves nothing", exc_info=True)
    models.append(report)
    if group.rank_in_group == 0:
        log.info("%s", report.line())


def _serve(model: nn.Module, interface: Interface, report: ServedModel) -> None:
    config, group = report.config, report.group
    fp8_methods = () if batch_invariant() else FP8_METHODS
    names = "row", "column", "norm", "unquantized", "gemma_norm", "runner"
    classes = Classes(
        **{name: interface.objects.get(name) for name in names},
        fp8=fp8.Fp8Linears(tuple(interface.objects[name] for name in fp8_methods if name in interface.objects)),
    )
    candidates = find_candidates(model, config, classes)
    fingerprints = gather_objects(candidates.fingerprint(), group)
    if why := next((fingerprint[0] for fingerprint in fingerprints if fingerprint[0] is not None), None):
        report.give_up(why)
        return
    if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
        report.give_up("ranks have different models")
        return
    report.depends_on = what_times_depend_on(candidates, interface, report)
    stored = compare.read(compare.stored_at(report.model, report.depends_on))
    report.ranges = gather_objects(stored, group)[0]
    if report.ranges is not None and not any(compared.form for compared in report.ranges):
        report.give_up("no pass was 1% faster with weft at an earlier start")
        return
    report.world = world_of(group)
    if report.world.backend.clock is None and not asked_for():
        report.give_up(f"passes cannot be timed here; {WEFT_VLLM}=1 serves them all")
        return
    keep_equal_products(candidates, classes, report)
    limit_captures(report.world, config)
    report.passes = passes_of(candidates, classes, interface, report)
    report.forms = compare.forms_of(candidates.flow.by_rows, report.passes)
    if report.world.backend.clock is not None:
        add_flashinfer(candidates, classes, report)
        one_trial_per_power_of_two()
        hook_worker()
    else:  # times are meaningless, for example on CPUs
        report.started = True
        report.passes.put()
        report.passes.serve(untimed(report.passes))


def untimed(passes: Passes) -> list[tuple[int, int, Plan]]:
    """Return the ranges and forms that weft serves if it cannot time passes."""
    return [(1, passes.max_tokens, PASS_FORMS[0])]


def add_flashinfer(candidates: Candidates, classes: Classes, report: ServedModel) -> None:
    """Add FlashInfer's kernel to the forms to compare, if vLLM's own passes would use it for the model's norms and if
    there are no stored ranges without it. If the kernel is not available, drop stored ranges that use it. The call is
    collective."""
    world, config = report.world, report.config
    assert world is not None
    if world.batch_invariant:
        return
    wanted = report.ranges is None or any(isinstance(c.form, flashinfer.FlashInfer) for c in report.ranges)
    norms: list[VllmObject] = [site.norm for site in candidates.flow.sites]
    dtype = config.model_config.dtype
    widths = {norm.weight.numel() for norm in norms if type(norm) is classes.norm and norm.weight.dtype == dtype}
    if wanted and len(widths) == 1 and flashinfer.asked_for(config):
        (h,) = widths
        tokens = flashinfer.limit(world, h, dtype, config.scheduler_config.max_num_batched_tokens)
        error = flashinfer.prepare(world, h, dtype, tokens, report.group)
        if not error:
            report.forms = [*report.forms, flashinfer.FlashInfer(tokens)]
            return
        report.left.append(f"FlashInfer's all-reduce and norm: {error}")
    if wanted:
        report.ranges = None


def what_times_depend_on(candidates: Candidates, interface: Interface, report: ServedModel) -> dict[str, object]:
    """Return, by name, everything on which the times of passes depend: the model's shape, the GPU, the ranks, the
    versions, weft's sources, and the engine's options."""
    config = report.config
    return dict(
        layers=sorted(candidates.shapes().items(), key=repr),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        ranks=report.group.world_size,
        versions=(versions(interface), torch.__version__, hash_of_sources()),
        tokens=config.scheduler_config.max_num_batched_tokens,
        requests=option(config, "scheduler_config.max_num_seqs"),
        captured=captured_sizes(config),
        passes=repr(option(config, "compilation_config.pass_config")),
        flashinfer=flashinfer.installed(),
        mode=tuple(str(option(config, f"compilation_config.{name}")) for name in ("mode", "cudagraph_mode")),
        fp8=fp8.asked_for(),
        batch_invariant=batch_invariant(),
    )


def keep_equal_products(candidates: Candidates, classes: Classes, report: ServedModel) -> None:
    """Leave the GEMMs of FP8 linears to vLLM if weft's results differ from vLLM's. The call is collective if the model
    has FP8 linears."""
    if not candidates.fp8_reasons:
        return
    assert report.world is not None
    classes.fp8.compare(candidates.linears(), report.world, report.config.model_config.dtype, report.group)
    for site in candidates.flow.sites:
        if site.column is not None and not classes.is_column(site.column):
            site.column = None
    candidates.rows = [row for row in candidates.rows if classes.is_gemm(row)]


def find_candidates(model: nn.Module, config: VllmObject, classes: Classes) -> Candidates:
    """Find the modules that weft can serve. Never raises, since a collective of all ranks follows."""
    try:
        if why := reason_to_skip(config):
            return Candidates(why)
        if has_experts(model, config, classes):
            if batch_invariant():
                return Candidates("VLLM_BATCH_INVARIANT with a mixture of experts")
            if not asked_for():
                return Candidates(f"a mixture of experts is served with {WEFT_VLLM}=1")
        if calls := calls_of(model, COMMUNICATING):
            lines = (f"{kind} calls {', '.join(sorted(names))}" for kind, names in calls.items())
            return Candidates(f"layers communicate by themselves: {'; '.join(lines)}")
        classes.fp8.find(m for m in model.modules() if isinstance(m, classes.row | classes.column))
        whole = [stack for stack in stacks(model, classes) if "positions" in arguments_of_pass(stack)]
        if len(whole) != 1:
            names = [type(stack).__name__ for stack in whole]
            return Candidates(f"{len(whole)} stacks of layers with sums over ranks: {', '.join(names)}")
        (stack,) = whole
        if batch_invariant() and (further := arguments_of_pass(stack) - ARGUMENTS):
            return Candidates(f"VLLM_BATCH_INVARIANT with passes that may have {', '.join(sorted(further))}")
        flow = flow_of(stack, classes)
        in_sites = {id(site.reduction) for site in flow.sites}
        rows = [m for m in stack.modules() if isinstance(m, classes.row) and classes.reduces(m)]
        rows = [m for m in rows if id(m) not in in_sites and classes.is_gemm(m)]
        why_not = None if flow.sites or rows else "no sum over ranks that could be served"
        return Candidates(why_not, stack, flow, rows, classes.fp8.reasons)
    except Exception as error:
        return Candidates(f"{type(error).__name__}: {error}")


def asked_for() -> bool:
    return os.environ.get(WEFT_VLLM) == "1"


def batch_invariant() -> bool:
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def has_experts(model: nn.Module, config: VllmObject, classes: Classes) -> bool:
    runs_experts = classes.runner is not None and any(isinstance(m, classes.runner) for m in model.modules())
    return runs_experts or bool(option(config, "model_config.is_moe"))


def arguments_of_pass(stack: nn.Module) -> set[str]:
    """Return the names of the forward's arguments, without `**keywords`."""
    parameters = inspect.signature(type(stack).forward).parameters
    return {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}


def reason_to_skip(config: VllmObject) -> str | None:
    """Return why weft cannot serve any part of the model, or None."""
    parallel, passes = config.parallel_config, option(config, "compilation_config.pass_config")
    captures = option(config, "compilation_config.cudagraph_mode.name")
    reasons = {
        "its passes shard the tokens (enable_sp)": option(passes, "enable_sp"),
        "its passes fuse collectives (fuse_gemm_comms)": option(passes, "fuse_gemm_comms"),
        "LoRA adapters wrap the linears": option(config, "lora_config") is not None,
        "speculative decoding reads hidden states between layers": option(config, "speculative_config") is not None,
        "two batches at once (enable_dbo, ubatch_size)": option(parallel, "use_ubatching"),
        "prefill context parallelism": option(parallel, "prefill_context_parallel_size", 1) > 1,
        "data parallelism, whose engines run their passes in step": option(parallel, "data_parallel_size", 1) > 1,
        "pipeline parallelism": option(parallel, "pipeline_parallel_size", 1) > 1,
        "experts move between ranks (enable_eplb)": option(parallel, "enable_eplb"),
        "sleep mode discards weft's memory too (enable_sleep_mode)": option(config, "model_config.enable_sleep_mode"),
        "only batches that decode are captured": captures == "FULL_DECODE_ONLY",
        f"VLLM_BATCH_INVARIANT is served with {WEFT_VLLM}=1": batch_invariant() and not asked_for(),
        # vLLM computes the first norm: with FlashInfer's kernel up to a number of tokens, and with another one above.
        "VLLM_BATCH_INVARIANT with fuse_allreduce_rms": batch_invariant() and flashinfer.asked_for(config),
    }
    return next((reason for reason, so in reasons.items() if so), None)


def world_of(group: VllmObject) -> World:
    """Return the World of vLLM's tensor-parallel group. The first call is collective."""
    key = group.device_group.group_name, batch_invariant()
    world = _worlds.get(key)
    if world is None or world.group is not group.device_group:  # an earlier engine's group may have had this name
        world = _worlds[key] = init(group.device_group, batch_invariant=batch_invariant() or None)
    return world


def captured_sizes(config: VllmObject) -> tuple[int, ...]:
    """Return the numbers of tokens that vLLM captures in CUDA graphs."""
    if option(config, "compilation_config.cudagraph_mode.name", "NONE") == "NONE":
        return ()
    return tuple(option(config, "compilation_config.cudagraph_capture_sizes", ()))


def limit_captures(world: World, config: VllmObject) -> None:
    """Limit the calls that weft prepares for a capture to the numbers of tokens that vLLM captures. A prompt's number
    of tokens is often new, and preparing it for a capture would run a second plan at the second layer. (`passes_of`
    raises the limit for a twin whose larger passes weft captures, because it pads them to a finite number of sizes.)"""
    sizes = option(config, "compilation_config.cudagraph_capture_sizes")
    if sizes is not None:
        world.max_captured_rows = max([world.max_captured_rows or 0, *sizes])


def passes_of(candidates: Candidates, classes: Classes, interface: Interface, report: ServedModel) -> Passes:
    """Make a twin of the stack and return the stack's passes with it. Adds lines to the report."""
    world, config, flow = report.world, report.config, candidates.flow
    assert world is not None
    counted: Counter[str] = Counter()
    copies: dict[int, VllmObject] = {}
    for site in flow.sites:
        reduction: VllmObject = site.reduction
        has_gemm, gemma = classes.is_gemm(reduction), type(site.norm) is classes.gemma_norm
        copies[id(reduction)] = (
            copied(reduction, layers.PassThroughLinear) if has_gemm else layers.without_sum(reduction)
        )
        if site.column is not None:
            copies[id(site.column)] = copied(site.column, layers.PassThroughLinear)
        served = layers.Served(reduction if has_gemm else None, site.column, world)
        copies[id(site.norm)] = copied(site.norm, layers.SummedGemmaNorm if gemma else layers.SummedNorm, weft=served)
        reduction_name = "experts" if not isinstance(reduction, classes.row) else "a row-parallel linear"
        gemm = f" with its {classes.gemm_name(reduction)}" if has_gemm else ""
        counted[f"the sum of {reduction_name}{gemm}, residual and norm"] += 1
        counted[f"the column-parallel {classes.gemm_name(site.column)} after it"] += site.column is not None
    for row in candidates.rows:
        copies[id(row)] = copied(row, layers.Row, weft=world)
        counted[f"a row-parallel {classes.gemm_name(row)} and its sum"] += 1
    served_modules = dict(copies)
    twin = twin_of(candidates.stack, copies, name_of(candidates, world), interface.objects.get("compiler"))
    report.served += [f"{line} ({count} times)" for line, count in counted.items() if count]
    report.left += flow.left + classes.fp8.left()
    if world.batch_invariant:
        report.left.append("attention, embedding, lm_head, sampler and the first GEMM, as in its batch-invariant mode")
    max_tokens = config.scheduler_config.max_num_batched_tokens
    contexts = interface.objects["context"], interface.objects["capture"]
    passes = Passes(candidates.stack, twin, world, *contexts, max_tokens, captured_sizes(config))
    if CAPTURES.keys() <= interface.objects.keys() and not getattr(candidates.stack, "do_not_compile", True):
        passes.graphs = PieceGraphs(interface.objects, report.group, world.device, max_tokens)
        world.max_captured_rows = max_tokens
    why = ""
    try:
        passes.woven = woven_pass(candidates.stack, served_modules, world, config, classes, interface.objects)
    except Exception as error:
        why = first_sentence(error)
    passes.weave_on_all_ranks(why, report.group)
    return passes


def name_of(candidates: Candidates, world: World) -> str:
    """Return the name of the twin's compiled code. The name contains the constants of the code."""
    constants = hash_of_sources(), world.name.rpartition(":")[0], candidates.fingerprint()
    return f"weft-{hashlib.sha256(repr(constants).encode()).hexdigest()[:12]}"
