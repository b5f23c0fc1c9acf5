"""The plugin's state for each model that this process has loaded, and the report."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...chooser import Chooser
from ...plans import Plan
from ...prepared import Prepared
from ...world import World
from . import flashinfer
from .compare import Range
from .interface import VllmObject
from .twin import Passes

models: list[ServedModel] = []  # one entry for each model that this process has loaded


@dataclass
class ServedModel:
    """One loaded model. `served` contains a line for each kind of module in the twin; `left` contains a line for each
    reason why vLLM computes a part of the model. `passes` is None if vLLM computes the whole model. `ranges` is None
    until weft has compared the ranges, which had this `cost`, or has read them from the file that an earlier start
    stored for a model with the same `depends_on`. `error` is the error of an attempt to run the twin; `started` is true
    once weft has decided which passes to serve. `counts` are the counts at the end of the start."""

    model: str
    version: str
    config: VllmObject
    group: VllmObject
    served: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    world: World | None = None
    passes: Passes | None = None
    forms: Sequence[Plan] = ()
    ranges: list[Range] | None = None
    cost: str = ""
    depends_on: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    started: bool = False
    counts: Counter[str] | None = None

    def give_up(self, why: str) -> None:
        """Leave the whole model to vLLM."""
        if self.passes is not None:
            self.passes.serve(())
            self.passes.remove()
            flashinfer.drop(self.passes.world)
        self.passes, self.world, self.served, self.started = None, None, [], True
        self.left.append(f"all: {why}")

    def line(self) -> str:
        """Return the report as one line, for the log."""
        return f"{self.version}: {self.model}: " + "; ".join(
            [f"serves {line}" for line in self.served or ["nothing"]]
            + [f"leaves to vLLM {line}" for line in self.left]
            + [compared.line() for compared in self.ranges or ()]
        )

    def text(self) -> str:
        ranks = "" if self.world is None else f", {self.world.size} ranks ({self.world.backend.name})"
        lines = [f"{self.version}: {self.model}{ranks}"]
        lines += [f"  serves {line}" for line in self.served] + [f"  leaves to vLLM {line}" for line in self.left]
        if self.passes is not None and self.passes.unwoven is not None:
            lines.append(f"  runs no pass in two parts over whole layers: {self.passes.unwoven}")
        lines += [f"  {self.cost}"] if self.cost else []
        if self.passes is not None and self.passes.graphs is not None:
            lines.append(f"  {self.passes.graphs.text()}")
        lines += [f"  {compared.line()}" for compared in self.ranges or ()]
        lines += [f"  {name}: {count} calls decided, by {plan}" for (name, plan), count in self.decided().items()]
        if self.counts is not None and self.world is not None:
            later = counts(self.world)
            since = ", ".join(f"{later[name] - count} {name}" for name, count in self.counts.items())
            lines.append(f"  since the start: {since}")
        return "\n".join(lines)

    def decided(self) -> Counter[tuple[str, str]]:
        """Count the distinct calls so far, by operator and kind of plan."""
        decided = {} if self.world is None else self.world.decided
        calls = [call for call in decided.values() if isinstance(call, Prepared)]
        return Counter((call.op.name, call.plan.kind) for call in calls)


def counts(world: World) -> Counter[str]:
    """Return the number of events so far, for each kind of event that may delay a request. `preparations` counts the
    launches and calls that are prepared now: fewer after the World has dropped them, and more after calls have prepared
    them again. `allocations` counts the segments that torch's allocator has asked CUDA for, and `collections` counts
    Python's collections of all objects."""
    launches = sum(not isinstance(prepared, Prepared) for prepared in world.prepared.values())
    trials = len(world.choices.trials) + len(Chooser.alone.trials)
    memory = torch.cuda.memory_stats(world.device) if world.device.type == "cuda" else {}
    return Counter(
        compiles=world.backend.kernels,
        trials=trials,
        decisions=len(world.decided),
        uploads=world.uploads,
        preparations=launches + len(world.prepared_calls),
        allocations=memory.get("segment.all.allocated", 0),
        collections=gc.get_stats()[-1]["collections"],
    )


def text() -> str:
    """Return the reports of all models that this process has loaded."""
    return "\n".join(model.text() for model in models) or "weft has served no model in this process"
