"""`weft demo`: the tensor-parallel MLP of a Llama layer, the same code on GPUs and in the emulator.

    x shard [M / W, H] -> all-gather + GEMM -> SiLU-mul -> GEMM + reduce-scatter -> y shard [M / W, H]

With two or more GPUs: a process each, a real shape, sequential (cuBLAS, then NCCL) against `auto`. Otherwise: four
emulated ranks, a small shape, every plan kind under several schedules, each checked for races and deadlocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import weft

from .backends.base import Backend
from .errors import WeftError
from .trace.picture import draw, waited
from .trace.profile import profiled
from .trace.span import Span
from .world import World, spmd

UNIT = "virtual time (1 = one SM touches 1 kB)"  # of the emulator's spans
REAL = (8192, 4096, 14336)  # M, H, I on GPUs
SMALL = (128, 64, 128)  # M, H, I in the emulator
EMULATED_RANKS, SCHEDULES = 4, 16
EMULATED_PLANS = ("sequential", "decomposed", "fused")
TOLERANCE = 1e-2  # relative Frobenius error of two bf16 ops, one after the other


@dataclass
class Result:
    table: Table
    notes: list[str] = field(default_factory=list)
    ok: bool = True


@dataclass
class Layer:
    """One rank's inputs of the MLP, bf16, and its part of the result in fp32 or better."""

    x: torch.Tensor  # [M / W, H]
    gate_up: torch.Tensor  # [2 I / W, H]
    down: torch.Tensor  # [H, I / W]

    @classmethod
    def random(cls, world: World, shape: tuple[int, int, int]) -> Layer:
        tokens, hidden, inner = shape

        def draw_from(seed: int, rows: int, columns: int, scale: float) -> torch.Tensor:
            generator = torch.Generator(world.device).manual_seed(seed)
            values = torch.randn(rows, columns, generator=generator, device=world.device)
            return (values * scale).bfloat16()

        w, r = world.size, world.rank
        return cls(
            draw_from(r, tokens // w, hidden, 1.0),
            draw_from(100 + r, 2 * inner // w, hidden, hidden**-0.5),
            draw_from(200 + r, hidden, inner // w, inner**-0.5),
        )

    def forward(self, world: World, plan: str) -> torch.Tensor:
        both = weft.all_gather_matmul(self.x, self.gate_up, world=world, plan=plan)
        return weft.matmul_reduce_scatter(weft.silu_mul(both), self.down, world=world, plan=plan)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's term of the result for all tokens, at the precision of `x`; sum over ranks for the result."""
        gate, up = (x @ self.gate_up.to(x.dtype).T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ self.down.to(x.dtype).T


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return ((y.to(reference.dtype) - reference).norm() / reference.norm()).item()


def run(picture: Path, bar: Progress) -> Result:
    gpus = torch.cuda.device_count()
    return on_gpus(gpus, picture, bar) if gpus > 1 else emulated(picture, bar)


# -- emulator ----------------------------------------------------------------------------------------------------------
def layer(world: World, plan: str = EMULATED_PLANS[-1]) -> float:
    """One rank of the emulated demo; returns its error against torch in float64."""
    mine = Layer.random(world, SMALL)
    y = mine.forward(world, plan)
    x = torch.cat(world.exchange(mine.x)).double()
    parts = world.exchange(mine.partial(x))
    return relative_error(y, torch.stack(parts).sum(0).chunk(world.size)[world.rank])


def _emulated_rank(backend: Backend, plan: str) -> float:
    return layer(World(backend), plan)


def _waiting(spans: list[Span]) -> float:
    return sum(waited(spans).values())


def emulated(picture: Path, bar: Progress) -> Result:
    from .backends.emulated import spmd as spmd_with_report

    table = Table(title=f"tensor-parallel MLP, {EMULATED_RANKS} emulated ranks, M, H, I = {SMALL}")
    for column in ("plan", "schedules", "switches between tasks", "races", "deadlocks", "error against torch"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    result = Result(table)
    task = bar.add_task("emulated schedules", total=SCHEDULES * len(EMULATED_PLANS))
    shown: list[Span] = []  # of the schedule of the last plan that waited most
    for plan in EMULATED_PLANS:
        worst, done, switches = 0.0, 0, 0
        for seed in range(SCHEDULES):
            bar.update(task, description=f"{plan}, seed {seed}")
            try:
                errors, report = spmd_with_report(partial(_emulated_rank, plan=plan), EMULATED_RANKS, seed=seed)
            except WeftError as error:
                result.ok = False
                result.notes.append(f"[bold red]{plan}, seed {seed}: {type(error).__name__}[/]: {escape(str(error))}")
                break
            worst, done, switches = max(worst, *errors), done + 1, switches + report.switches
            shown = max(shown, report.timeline, key=_waiting) if seed else report.timeline
            bar.advance(task)
        correct = worst < TOLERANCE
        result.ok &= correct
        found = "none" if done == SCHEDULES else "see below"
        table.add_row(
            plan, str(done), str(switches), found, found, f"{worst:.1e}" + ("" if correct else " [bold red]wrong")
        )
    if shown:
        draw({f"{plan} plan, {EMULATED_RANKS} emulated ranks": shown}, picture, unit=UNIT)
        result.notes.append(f"Who waited for whom: {picture}")
    result.notes.append("No time here is a speed: without a GPU the kernels are emulated.")
    return result


# -- GPUs --------------------------------------------------------------------------------------------------------------
@dataclass
class Measured:
    """One rank's figures of one plan; times in microseconds by mode."""

    error: float
    times: dict[str, float]
    spans: list[Span]


def _median_us(runs: dict[str, Callable[[], object]], world: World, rounds: int = 30) -> dict[str, float]:
    """Median time of each function, interleaved; the slowest rank's."""
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for number in range(rounds + 5):
        for name, fn in runs.items():
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            fn()
            pair[1].record()
            if number >= 5:
                marks[name].append(pair)
    world.synchronize()
    mine = {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs) for name, pairs in marks.items()}
    theirs = world.exchange(mine)
    return {name: max(t[name] for t in theirs) for name in runs}


def measure_rank(world: World, shape: tuple[int, int, int], plans: tuple[str, ...]) -> dict[str, Measured]:
    """One rank of the GPU demo."""
    mine = Layer.random(world, shape)
    x = torch.empty(shape[0], shape[1], dtype=torch.bfloat16, device=world.device)
    world.all_gather(x, mine.x, world.current_stream())
    reference = torch.empty(mine.x.shape, dtype=torch.float32, device=world.device)
    world.reduce_scatter(reference, mine.partial(x.float()), world.current_stream())

    eager: dict[str, Callable[[], object]] = {p: partial(mine.forward, world, p) for p in plans}
    errors = {p: relative_error(mine.forward(world, p), reference) for p in plans}
    graphs: dict[str, Callable[[], object]] = {}
    for plan in plans:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mine.forward(world, plan)
        graphs[plan] = graph.replay
    times = {"eager": _median_us(eager, world), "CUDA graph": _median_us(graphs, world)}
    spans = {}
    for plan in plans:
        world.exchange(plan)  # all ranks start together
        spans[plan] = profiled(world.rank, graphs[plan])
    worst = {p: max(world.exchange(errors[p])) for p in plans}
    return {p: Measured(worst[p], {mode: t[p] for mode, t in times.items()}, spans[p]) for p in plans}


def on_gpus(gpus: int, picture: Path, bar: Progress) -> Result:
    ranks = 1 << (gpus.bit_length() - 1)  # the shape splits over powers of two
    bar.add_task(f"tensor-parallel MLP on {ranks} GPUs", total=None)
    plans = ("sequential", "auto")
    results: list[dict[str, Measured]] = spmd(partial(measure_rank, shape=REAL, plans=plans), ranks)
    base = results[0]["sequential"]
    table = Table(title=f"tensor-parallel MLP, {ranks} x {torch.cuda.get_device_name(0)}, M, H, I = {REAL}")
    table.add_column("plan")
    for column in ("eager, us", "vs sequential", "CUDA graph, us", "vs sequential", "error against fp32"):
        table.add_column(column, justify="right")
    ok = True
    for plan in plans:
        got = results[0][plan]
        cells = []
        for mode, us in got.times.items():
            cells += [f"{us:.0f}", f"{base.times[mode] / us:.2f}x"]
        correct = got.error < max(TOLERANCE, 1.5 * base.error)
        ok &= correct
        table.add_row(plan, *cells, f"{got.error:.1e}" + ("" if correct else " [bold red]wrong"))
    shown = range(min(ranks, 4))
    panels = {plan: [s for rank in shown for s in results[rank][plan].spans] for plan in plans}
    draw({f"{plan}, CUDA graph, ranks 0 to {shown[-1]}": s for plan, s in panels.items()}, picture, unit="microseconds")
    return Result(table, [f"Timeline of both: {picture}"], ok)
