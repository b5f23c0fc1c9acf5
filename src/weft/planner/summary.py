"""The last output of `weft tune`: the profile's predictions for the operators of a Llama-70B layer on this machine, as
a table and as a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from ..op import REGISTRY, op_around
from ..plans import Plan
from .parts import NotMeasured
from .predict import Predictor
from .profile import Profile
from .search import Planner, brief

H, INNER_SIZE = 8192, 28672  # hidden and intermediate sizes of Llama-70B
TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Gain:
    """The predicted time, in us, of one operator in a CUDA graph, for the sequential plan (cuBLAS and NCCL) and for the
    plan that "auto" chooses."""

    op: str
    tokens: int
    sequential: float
    taken: float
    plan: Plan

    @property
    def ratio(self) -> float:
        return self.sequential / self.taken


def gains(profile: Profile) -> list[Gain]:
    """Return the predictions for Llama-70B's MLP, split over the profile's GPUs. Sizes for which the profile lacks
    measurements are omitted."""
    planner, gpus = Planner(Predictor(profile)), profile.machine.world
    gains = []
    for op in map(op_around, COLLECTIVES):
        n, k = (2 * INNER_SIZE // gpus, H) if REGISTRY[op].gathers else (H, INNER_SIZE // gpus)
        for tokens in TOKENS:
            try:
                decision = planner.decide(op, tokens, n, k, "graph", tokens % gpus == 0)
            except NotMeasured:
                continue
            if decision.us and decision.sequential:
                gains.append(Gain(op, tokens, decision.sequential, decision.us, decision.plan))
    return gains


def table(profile: Profile) -> Table:
    """Return the gains as a table for the terminal."""
    title = f"{profile.machine.name}: Llama-70B's MLP, predicted, us in a CUDA graph"
    grid = Table("operator", "tokens", "cuBLAS, then NCCL", '"auto"', "times as fast", "plan", title=title)
    for gain in gains(profile):
        times = f"{gain.sequential:.0f}", f"{gain.taken:.0f}", f"{gain.ratio:.2f}x"
        grid.add_row(gain.op, f"{gain.tokens:,}", *times, brief(gain.plan))
    return grid


def plot(profile: Profile, path: Path) -> None:
    """Draw the predicted speedup of "auto" over cuBLAS and NCCL, by the number of tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.subplots()
    every = gains(profile)
    for op in dict.fromkeys(gain.op for gain in every):
        points = [(gain.tokens, gain.ratio) for gain in every if gain.op == op]
        axes.plot(*zip(*points, strict=True), marker="o", label=op)
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TOKENS, [f"{tokens:,}" for tokens in TOKENS])
    axes.set(xlabel="tokens of all ranks", ylabel="times as fast as cuBLAS, then NCCL")
    axes.set_title(f"{profile.machine.name}: Llama-70B's MLP, predicted", fontsize=10)
    if every:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
