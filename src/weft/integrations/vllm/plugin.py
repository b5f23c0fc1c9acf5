"""The plugin: what vLLM calls in each of its processes, and what happens to a model there once it is loaded.

All ranks must put the same in the same places. So each looks at its model and changes nothing, they compare what they
found, make the World together, compare again, and only then change classes. Whatever is raised on the way ends in a
model that is vLLM's own, and in a line of the log.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata

import torch.distributed as dist
from torch import nn

from ...launch import init
from ...nn.weave import two_parts_from
from ...op import Known
from ...world import World
from ..torch_async_tp import AsyncTP, async_tp
from . import layers, timing
from .dataflow import Flow, flow_of
from .interface import FUSED_NORM, Interface, Theirs, read_interface, takes_others
from .layers import Classes, Undo
from .row_norm_column import row_norm_column

log = logging.getLogger("vllm.weft")  # vLLM shows what is logged below its own name
WEFT_VLLM = "WEFT_VLLM"  # the variable of the environment that turns the plugin off, as 0
FUSED = "fused_allreduce_rms_norm"  # the function of new-style models
OPS = ("row_norm_column", "row_all_reduce")

_models: list[ServedModel] = []  # for the models that this process has loaded
_worlds: dict[str, World] = {}  # by the name of the group


@dataclass
class ServedModel:
    """What was done to one model. served, left: a line each. undo: puts vLLM's classes back."""

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
            [f"serves {what}" for what in self.served or ["nothing"]] + [f"leaves to vLLM {what}" for what in self.left]
        )

    def text(self) -> str:
        ranks = "" if self.world is None else f", {self.world.size} ranks ({self.world.backend.name})"
        lines = [f"{self.version}: {self.model}{ranks}"]
        lines += [f"  serves {what}" for what in self.served] + [f"  leaves to vLLM {what}" for what in self.left]
        lines += [f"  {name}: {count} calls decided, by {plan}" for (name, plan), count in self.decided().items()]
        return "\n".join(lines + ([] if self.async_tp is None else [f"  {self.async_tp.report()}"]))

    def decided(self) -> Counter[tuple[str, str]]:
        """Calls of different shapes so far, by operator and kind of plan."""
        known = {} if self.world is None else self.world.decided
        keyed = ((key, each.plan.kind) for key, each in known.items() if isinstance(each, Known))
        return Counter((key[0], kind) for key, kind in keyed if isinstance(key, tuple) and key[0] in OPS)


# -- vLLM's side -------------------------------------------------------------------------------------------------------
def register() -> None:
    """The entry point of group `vllm.general_plugins`. Never raises."""
    if os.environ.get(WEFT_VLLM) == "0":
        return
    try:
        found = read_interface()
        if found.unusable:
            log.warning("%s: serves nothing: %s", versions(found), found.unusable)
            return
        hook(found)
    except Exception as error:
        log.warning("weft: serves nothing: %s: %s", type(error).__name__, error)


def versions(found: Interface) -> str:
    tried = "" if found.tried else ", untried"
    return f"weft {metadata.version('weft')} under vLLM {found.version}{tried}"


def hook(found: Interface) -> None:
    """Models that are loaded from now on are served; once a process."""
    loader = found.found["load_model"]
    own = loader.load_model
    if hasattr(own, "weft"):
        return

    @functools.wraps(own)
    def load_model(self: object, vllm_config: Theirs, model_config: Theirs, prefix: str = "") -> nn.Module:
        model: nn.Module = own(self, vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        serve(model, vllm_config, found)
        return model

    load_model.weft = True  # type: ignore[attr-defined]
    loader.load_model = load_model
    if "worker" in found.found:
        found.found["worker"].weft_report = lambda worker: text()


def text() -> str:
    """Return the reports of all models that this process has loaded."""
    return "\n".join(report.text() for report in _models) or "weft has served no model here"


# -- a model -----------------------------------------------------------------------------------------------------------
@dataclass
class Candidates:
    """What a rank found. flow, rows: None and empty where a reason is given. rows: further row-parallel linears."""

    why_not: str | None = None
    flow: Flow = field(default_factory=Flow)
    rows: list[nn.Module] = field(default_factory=list)

    def same(self) -> tuple[Theirs, ...]:
        """What all ranks must have alike."""
        sites = tuple((site.name, site.residual, site.column is None) for site in self.flow.sites)
        return self.why_not, sites, self.flow.by_rows, len(self.rows)


def serve(model: nn.Module, config: Theirs, found: Interface) -> None:
    """Put weft's operators into the model. Never raises: a model in which anything is amiss stays vLLM's."""
    report = ServedModel(type(model).__name__, versions(found))
    report.left += [f"what goes through {why}" for why in found.missing.values()]
    group = found.found["group"]()
    try:
        if group.world_size > 1:
            _serve(model, config, found, group, report)
        else:
            report.left.append("all: one rank has nothing to overlap")
    except Exception as error:
        for undo in reversed(report.undo):
            undo()
        report.served, report.world = [], None
        report.left.append(f"all: {type(error).__name__}: {error}")
    _models.append(report)
    if group.rank_in_group == 0:
        log.info("%s", report.line())


def _serve(model: nn.Module, config: Theirs, found: Interface, group: Theirs, report: ServedModel) -> None:
    classes = Classes(
        row=found.found["row"],
        column=found.found["column"],
        norm=found.found["norm"],
        unquantized=found.found["unquantized"],
        gemma_norm=found.found.get("gemma_norm"),
        runner=found.found.get("runner"),
    )
    mine = look(model, config, classes)
    everybody = of_all_ranks(mine.same(), group)
    if why := next((each[0] for each in everybody if each[0] is not None), None):
        report.left.append(f"all: {why}")
        if passes_fuse(config):
            report.async_tp = async_tp()
            report.served.append("torch.ops.symm_mem.fused_*, which its passes call")
        return
    if any(each != everybody[0] for each in everybody):
        report.left.append("all: ranks have different models")
        return
    report.world = world_of(group)
    rows_from, woven_from = thresholds(mine.flow, config, classes, report.world)
    put_in_place(mine, rows_from, woven_from, classes, report)
    name_compiled_code(config, report.world, mine, rows_from, woven_from)


def name_compiled_code(config: Theirs, world: World, mine: Candidates, *tokens: int) -> None:
    """Have vLLM keep the compiled code of this model apart from that of others: its name has what is a constant of it.
    tokens: the thresholds, which are timed at every start, and so may be others at the next one."""
    seen = getattr(config, "additional_config", None)
    if isinstance(seen, dict):
        seen["weft"] = [metadata.version("weft"), world.name.rpartition(":")[0], repr(mine.same()), *tokens]


def of_all_ranks(mine: tuple[Theirs, ...], group: Theirs) -> list[tuple[Theirs, ...]]:
    """Collective. Return what every rank gives, by rank."""
    everybody: list[Theirs] = [None] * group.world_size
    dist.all_gather_object(everybody, mine, group=group.cpu_group)
    return everybody


def look(model: nn.Module, config: Theirs, classes: Classes) -> Candidates:
    """Find what weft can serve in the model. Never raises, since a rendezvous of the ranks follows."""
    try:
        if why := leaves_all(config):
            return Candidates(why)
        flow = flow_of(model, classes)
        taken = {id(site.reduction) for site in flow.sites}
        rows = [m for m in model.modules() if isinstance(m, classes.row) and classes.reduces(m)]
        rows = [m for m in rows if id(m) not in taken and classes.is_gemm(m)]
        return Candidates(None if flow.sites or rows else "no sum over ranks that could be served", flow, rows)
    except Exception as error:
        return Candidates(f"{type(error).__name__}: {error}")


def leaves_all(config: Theirs) -> str | None:
    """Why a model stays vLLM's as a whole; None where it need not."""
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


def passes_fuse(config: Theirs) -> bool:
    """Whether vLLM's own passes (up to 0.31) shard the tokens, and call torch's fused operators."""
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    return bool(getattr(passes, "enable_sp", False) or getattr(passes, "fuse_gemm_comms", False))


def world_of(group: Theirs) -> World:
    """Return the World of vLLM's tensor-parallel group. Collective the first time."""
    name = group.device_group.group_name
    known = _worlds.get(name)
    if known is None or known.group is not group.device_group:  # another engine's group may have the name of this
        known = _worlds[name] = init(group.device_group)
    return known


def put_in_place(mine: Candidates, rows_from: int, woven_from: int, classes: Classes, report: ServedModel) -> None:
    world, flow = report.world, mine.flow
    assert world is not None
    counts: Counter[str] = Counter()
    for site in flow.sites:
        reduction: Theirs = site.reduction
        own = classes.is_gemm(reduction)
        report.undo.append(layers.put(reduction, layers.PassedOn) if own else layers.leave_sum(reduction))
        if site.column is not None:
            report.undo.append(layers.put(site.column, layers.PassedOn))
        served = layers.Served(reduction if own else None, site.column, rows_from, woven_from, world)
        gemma = type(site.norm) is classes.gemma_norm
        report.undo.append(layers.put(site.norm, layers.SummedGemmaNorm if gemma else layers.SummedNorm, weft=served))
        of = "experts" if not isinstance(reduction, classes.row) else "a row-parallel linear"
        counts[f"the sum of {of}{' with its GEMM' if own else ''}, residual and norm"] += 1
        counts["the column-parallel GEMM behind it"] += site.column is not None
    for row in mine.rows:
        report.undo.append(layers.put(row, layers.Row, weft=world))
        counts["a row-parallel GEMM and its sum"] += 1
    serve_fused_norms(world, report, counts)
    report.served += [f"{what} ({count} times)" for what, count in counts.items() if count]
    if flow.sites:
        report.served.append(forms(flow, rows_from, woven_from, world))
    report.left += flow.left


def forms(flow: Flow, rows_from: int, woven_from: int, world: World) -> str:
    """Say, for the report, how residuals are held, depending on a batch's number of tokens."""
    if not rows_from:
        why = "faster so" if flow.by_rows else "they are read between layers"
        return f"residuals whole on every rank: {world.symmetric_reason or why}"
    parts = f", from {woven_from} on in two parts" if woven_from else ""
    return f"residuals from {rows_from} tokens on by the rows that a rank owns{parts}"


def thresholds(flow: Flow, config: Theirs, classes: Classes, world: World) -> tuple[int, int]:
    """Return the number of tokens from which on residuals are held by rows, and the number from which on these tokens
    go in two parts; 0: never. Collective where the first is timed."""
    if not flow.by_rows or world.symmetric_reason:
        return 0, 0
    weight: Theirs = flow.sites[0].norm.weight
    least = world.scale.replicated_bytes // (weight.numel() * weight.element_size()) + 1
    if world.backend.clock is not None:
        least = timing.rows_from(flow, classes, world, least, config.scheduler_config.max_num_batched_tokens)
    text_config = getattr(config.model_config, "hf_text_config", None)
    sizes = [getattr(text_config, name, 0) for name in ("hidden_size", "intermediate_size")]
    parts = two_parts_from(world, *sizes)[0] if least and all(sizes) else None
    return least, max(parts, least) if parts else 0


def serve_fused_norms(world: World, report: ServedModel, counts: Counter[str]) -> None:
    """Serve `fused_allreduce_rms_norm` of new-style models, wherever it was imported."""
    for name, module in list(sys.modules.items()):
        own = getattr(module, FUSED, None) if name.startswith("vllm.models.") else None
        if own is None or hasattr(own, "weft"):
            continue
        if why := takes_others(own, FUSED_NORM):
            report.left.append(f"{name}.{FUSED}, which {why}")
            continue
        setattr(module, FUSED, fused_norm(own, world))
        report.undo.append(functools.partial(setattr, module, FUSED, own))
        counts[f"{FUSED} of new-style models"] += 1


def fused_norm(own: Callable[..., Theirs], world: World) -> Callable[..., Theirs]:
    @functools.wraps(own)
    def served(hidden_states: Theirs, residual: Theirs, norm: Theirs) -> Theirs:
        if hidden_states.dim() != 2 or residual is None:
            return own(hidden_states, residual, norm)
        return row_norm_column(hidden_states, residual, norm.weight, norm.variance_epsilon, world=world)

    served.weft = True  # type: ignore[attr-defined]
    return served
