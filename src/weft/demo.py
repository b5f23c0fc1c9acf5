"""`weft demo`: the tensor-parallel MLP of a Llama layer, the same code on GPUs and in the emulator.

    x shard [M / W, H] -> all-gather + GEMM -> SiLU-mul -> GEMM + reduce-scatter -> y shard [M / W, H]

With two or more GPUs there is one process per GPU and a real shape. On GPUs the demo compares sequential (cuBLAS, then
NCCL) with `auto` and with the computation alone, without communication. The picture shows one call of each plan.
Otherwise the demo runs four emulated ranks and a small shape. Every plan kind runs under several schedules, each of
which is checked for races and deadlocks. The picture shows sequential and decomposed on one axis, with times from the
shipped profile of four H200s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .backends.base import Backend
from .launch import spmd
from .nn import ParallelMLP
from .planner.parts import PartTimes
from .planner.profile import Profile, shipped
from .span import Span
from .timing import interleaved, length, repeated, span
from .trace.picture import draw
from .trace.profile import profiled
from .world import World

if TYPE_CHECKING:
    from .emulator.tasks import Costs

REAL = (8192, 4096, 14336)  # M, H, I on GPUs
LAYER_SIZES = "{:,} tokens, hidden {:,}, inner {:,}"  # of M, H and I
EMULATED = (128, 64, 256)  # M, H, I in the emulator
EMULATED_RANKS, SCHEDULES = 4, 8
SHOWN = 0  # the seed of the drawn timeline, which always runs the ready task with the least virtual time
EMULATED_PLANS = {"sequential": "nothing", "decomposed": "chunks", "fused": "tiles"}  # by plan, the work that overlaps
EMULATED_DRAWN = {"sequential": "communication after the GEMM", "decomposed": "weft"}  # by plan, the picture's name
EMULATED_SMS = 12
ACTIVATION = "silu_mul"
KERNELS = {ACTIVATION: "SiLU-mul", "sum_staged": "sum"}  # with their names in the picture
PROFILE = "nvidia-h200-x4"  # the shipped profile that supplies the picture's times
GPU_PLANS = {"sequential": "sequential (cuBLAS, then NCCL)", "auto": "auto"}  # with their names in the picture
DRAWN = "CUDA graph"  # how the drawn calls are launched
SHOWN_RANKS = 4  # on GPUs the picture shows at most this many ranks
HIDDEN = ("silu_mul", "all_gather_gemm", "copied_gemm")  # kernels of the layer's first half; the last one ends it
TOLERANCE = 1e-2  # relative Frobenius error of two bf16 ops in sequence


@dataclass
class DemoResult:
    """The table, the lines below the table, and whether all results were right."""

    table: Table
    notes: list[str] = field(default_factory=list)
    ok: bool = True


class DemoLayer:
    """One rank's tokens x [M / W, H] and its shards of the MLP's weights, bf16, drawn from fixed seeds."""

    def __init__(self, world: World, shape: tuple[int, int, int]) -> None:
        tokens, self.hidden, self.inner = shape
        self.world, size = world, world.size

        def drawn(seed: int, rows: int, columns: int, scale: float) -> torch.Tensor:
            generator = torch.Generator(world.device).manual_seed(seed + world.rank)
            values = torch.randn(rows, columns, generator=generator, device=world.device)
            return (values * scale).bfloat16()

        self.x = drawn(0, tokens // size, self.hidden, 1.0)
        self.weights = {
            "gate_proj.weight": drawn(100, self.inner // size, self.hidden, self.hidden**-0.5),
            "up_proj.weight": drawn(200, self.inner // size, self.hidden, self.hidden**-0.5),
            "down_proj.weight": drawn(300, self.hidden, self.inner // size, self.inner**-0.5),
        }

    def module(self, plan: str) -> ParallelMLP:
        mlp = ParallelMLP(self.hidden, self.inner, world=self.world, plan=plan).requires_grad_(False)
        mlp.load_state_dict(self.weights)
        return mlp

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's partial sum of the result for all tokens x [M, H], computed in torch at the precision of
        `x`."""
        w_gate, w_up, w_down = (w.to(x.dtype).T for w in self.weights.values())
        return (torch.nn.functional.silu(x @ w_gate) * (x @ w_up)) @ w_down


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.to(reference.dtype) - reference).norm() / reference.norm()).item()


def run(picture: Path, bar: Progress) -> DemoResult:
    gpus = torch.cuda.device_count()
    return on_gpus(gpus, picture, bar) if gpus > 1 else emulated(picture, bar)


# -- emulator ----------------------------------------------------------------------------------------------------------
def layer(world: World, plan: str = "fused") -> float:
    """Run one rank of the emulated demo, and return its error relative to torch in float64."""
    demo_layer = DemoLayer(world, EMULATED)
    y = demo_layer.module(plan)(demo_layer.x)
    x = torch.cat(world.exchange(demo_layer.x)).double()
    partials = world.exchange(demo_layer.partial(x))
    return relative_error(y, torch.stack(partials).sum(0).chunk(world.size)[world.rank])


def emulated(picture: Path, bar: Progress) -> DemoResult:
    from .check.schedules import explore

    table = Table(title=f"MLP on {EMULATED_RANKS} emulated ranks: {LAYER_SIZES.format(*EMULATED)}")
    for column in ("plan", "overlaps", "schedules", "races", "deadlocks", "error"):
        table.add_column(column, justify="left" if column in ("plan", "overlaps") else "right")
    result = DemoResult(table)
    for plan, overlapped in EMULATED_PLANS.items():
        errors: list[float] = []

        def rank(backend: Backend, plan: str = plan, errors: list[float] = errors) -> None:
            errors.append(layer(World(backend), plan))

        exploration = explore(rank, EMULATED_RANKS, bar.track(range(SCHEDULES), description=plan))
        worst = max(errors, default=math.inf)
        correct = worst < TOLERANCE
        table.add_row(
            plan,
            overlapped,
            str(exploration.schedules),
            str(len(exploration.races)),
            str(len(exploration.deadlocks)),
            f"{worst:.1e}" + ("" if correct else " [bold red]wrong"),
        )
        result.ok &= correct and not exploration.findings
        for seed, error in exploration.findings[:1]:
            result.notes.append(f"[bold red]{plan}, seed {seed}: {type(error).__name__}[/]: {escape(str(error))}")
    if result.ok:
        result.notes.append("Errors are against torch in float64; each schedule is another order of the ranks' steps.")
        result.notes += compared(picture)
    return result


def compared(picture: Path) -> list[str]:
    """Draw rank 0 under each plan of `EMULATED_DRAWN` on one time axis, and return a description of the picture."""
    from .backends.emulated import spmd as spmd_with_report

    profile, lanes = shipped(PROFILE), {}
    assert profile is not None
    for plan, title in EMULATED_DRAWN.items():

        def rank(backend: Backend, plan: str = plan) -> None:
            layer(World(backend), plan)

        _, report = spmd_with_report(rank, EMULATED_RANKS, seed=SHOWN, sm_count=EMULATED_SMS, costs=costs_of(profile))
        lanes[title] = on_two_lanes([s for s in report.timeline if s.rank == 0])
    sizes = f"{LAYER_SIZES.format(*REAL)}, {EMULATED_RANKS} GPUs"
    heading = f"tensor-parallel MLP of {sizes}: emulated, in times of the profile {PROFILE}"
    draw(lanes, picture, unit="us", heading=heading)
    before, after = (max(s.end for s in spans) - min(s.start for s in spans) for spans in lanes.values())
    return [
        f"{picture} shows the layer twice on one time axis: with communication after the GEMM, and with weft.",
        f"With weft it ends {1 - after / before:.0%} earlier, after {after:.0f} instead of {before:.0f} us ({sizes}).",
        "These times are emulated, not measured: each GEMM, copy and collective lasts as long as alone on four H200s"
        f" (profile {PROFILE}).",
    ]


def costs_of(profile: Profile) -> Costs:
    """Return costs with which the emulated GEMMs, copies and collectives last as long as the profile says for the sizes
    in `REAL`."""
    from .emulator.tasks import Costs

    parts, (m, h, i) = PartTimes(profile), REAL
    tokens, hidden, inner = EMULATED
    ranks, gathered = EMULATED_RANKS, 2 * m * h
    product, emulated_received = 2 * tokens * hidden * 2 * inner / ranks, 2 * tokens * hidden * (ranks - 1) / ranks
    gemm, moved = parts.gemm(m, 2 * i // ranks, h), parts.latency("all_gather", gathered)
    touched = parts.optional("local", gathered) / (2 * 2 * tokens * hidden)  # a local copy reads and writes each byte
    return Costs(EMULATED_SMS * gemm / product, EMULATED_SMS * touched, moved / emulated_received, "us")


def on_two_lanes(spans: Sequence[Span]) -> list[Span]:
    """Return one rank's work, without its waits: GEMMs and kernels on a lane of its SMs, copies and collectives on a
    lane of its link."""
    half = min(s.start for s in spans if s.name == ACTIVATION)
    out: list[Span] = []
    for s in sorted(spans, key=lambda s: s.start):
        gather = s.end <= half
        if s.kind == "copy" and s.name != "barrier":
            name, kind = ("all-gather", "gather") if gather else ("reduce-scatter", "reduce")
            out.append(replace(s, track="link", name=name, kind=kind))
        elif s.kind == "call":
            out.append(replace(s, track="SMs", name="gate, up GEMM" if gather else "down GEMM", kind="compute"))
        elif s.kind == "compute" and s.name in KERNELS:
            name = KERNELS[s.name]
            if out and out[-1].name == name:  # the span belongs to another program of the launch
                out[-1] = replace(out[-1], end=max(s.end, out[-1].end))
            else:
                out.append(replace(s, track="SMs", name=name, kind="local"))
    return out


# -- GPUs --------------------------------------------------------------------------------------------------------------
@dataclass
class RankTimes:
    """One rank's measurements of one plan. Times are in microseconds, by mode."""

    error: float
    times: dict[str, float]
    spans: list[Span]
    alone: float = math.nan  # the time, in us, of the computation without communication, in a CUDA graph


def _median_us(runs: dict[str, Callable[[], object]], world: World, calls: int = 10) -> dict[str, float]:
    """Return the time in microseconds of one call of each function: the slowest rank's median over interleaved rounds
    of back-to-back calls."""

    def sample(name: str) -> float:
        world.synchronize()
        world.exchange(name)
        events = span(repeated(runs[name], calls))
        world.synchronize()
        return length(events) / calls

    samples = interleaved(list(runs), sample, 9)
    medians = world.exchange({name: statistics.median(values[1:]) for name, values in samples.items()})
    return {name: max(of_rank[name] for of_rank in medians) for name in runs}


def measure_rank(world: World, shape: tuple[int, int, int], plans: tuple[str, ...]) -> dict[str, RankTimes]:
    """Run one rank of the GPU demo."""
    demo_layer = DemoLayer(world, shape)
    x = torch.empty(shape[0], shape[1], dtype=torch.bfloat16, device=world.device)
    world.all_gather(x, demo_layer.x, world.current_stream())
    reference = torch.empty(demo_layer.x.shape, dtype=torch.float32, device=world.device)
    world.reduce_scatter(reference, demo_layer.partial(x.float()), world.current_stream())

    modules = {p: demo_layer.module(p) for p in plans}
    errors = {p: relative_error(mlp(demo_layer.x), reference) for p, mlp in modules.items()}
    eager: dict[str, Callable[[], object]] = {p: partial(mlp, demo_layer.x) for p, mlp in modules.items()}
    graphs: dict[str, Callable[[], object]] = {}
    for plan in plans:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            modules[plan](demo_layer.x)
        graphs[plan] = graph.replay
    computed = torch.cuda.CUDAGraph()
    demo_layer.partial(x)
    with torch.cuda.graph(computed):
        demo_layer.partial(x)
    captured = _median_us(graphs | {"alone": computed.replay}, world)
    times = {"eager": _median_us(eager, world), DRAWN: captured}
    spans = {plan: staged(profiled(world, graphs[plan])) for plan in plans}
    worst = {p: max(world.exchange(errors[p])) for p in plans}
    return {p: RankTimes(worst[p], {m: t[p] for m, t in times.items()}, spans[p], captured["alone"]) for p in plans}


def staged(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of the layer under the names of its stages. A GEMM's span has the GEMM's name, and a copy's span
    has the name of the collective to which it belongs."""
    half = max((s.end for s in spans if s.detail in HIDDEN), default=0.0)

    def named(s: Span) -> Span:
        in_first_half = s.start < half
        if s.kind == "copy":
            name, kind = ("all-gather", "gather") if in_first_half else ("reduce-scatter", "reduce")
            return replace(s, name=name, kind=kind)
        return replace(s, name=s.name.replace("GEMM", "gate, up GEMM" if in_first_half else "down GEMM"))

    return [named(s) for s in spans]


def on_gpus(gpus: int, picture: Path, bar: Progress) -> DemoResult:
    ranks = 1 << (gpus.bit_length() - 1)  # the shape splits over powers of two
    bar.add_task(f"tensor-parallel MLP on {ranks} GPUs", total=None)
    results: list[dict[str, RankTimes]] = spmd(partial(measure_rank, shape=REAL, plans=tuple(GPU_PLANS)), ranks)
    base = results[0]["sequential"]
    table = Table(
        title=f"tensor-parallel MLP on {ranks} x {torch.cuda.get_device_name(0)}: {LAYER_SIZES.format(*REAL)}"
    )
    table.add_column("plan")
    for column in ("eager, us", "vs sequential", "CUDA graph, us", "vs sequential", "error against fp32"):
        table.add_column(column, justify="right")
    ok = True
    for plan, times in results[0].items():
        cells = []
        for mode, us in times.times.items():
            cells += [f"{us:.0f}", f"{base.times[mode] / us:.2f}x"]
        correct = times.error < max(TOLERANCE, 1.5 * base.error)
        ok &= correct
        table.add_row(plan, *cells, f"{times.error:.1e}" + ("" if correct else " [bold red]wrong"))
    weft = results[0]["auto"]
    sentence = (
        f"In a {DRAWN} this layer takes {base.times[DRAWN]:.0f} us with cuBLAS + NCCL, {weft.times[DRAWN]:.0f} us with "
        f"weft, {weft.alone:.0f} us without communication."
    )
    if not all(times.spans for of_rank in results for times in of_rank.values()):
        return DemoResult(table, ["No timeline: torch.profiler recorded nothing on a GPU.", sentence], ok)
    draw(panels(results), picture, unit="us", heading=f"{table.title}: one call in a {DRAWN}")
    return DemoResult(table, [f"Timeline of both: {picture}", sentence], ok)


def panels(results: Sequence[dict[str, RankTimes]]) -> dict[str, list[Span]]:
    """Return the plans' timelines. The title of each call is the plan's name and its time without a profiler. results:
    by rank."""
    titled = {}
    for plan, times in results[0].items():
        us, base = times.times[DRAWN], results[0]["sequential"].times[DRAWN]
        ratio = "" if plan == "sequential" else f", {base / us:.2f}x"
        spans = [s for of_rank in results[:SHOWN_RANKS] for s in of_rank[plan].spans]
        titled[f"{GPU_PLANS[plan]}: median {us:.0f} us{ratio}"] = spans
    return titled
