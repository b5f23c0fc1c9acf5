"""Token weaving (TokenWeave, section 4): the tokens of a batch in two, one's communication under the other's compute.

A layer is a run of stages, each a computation on this rank's part of the weights followed by what sums it over the
ranks: all-reduce, residual add, norm. With two token parts the stages' computations take turns on the caller's stream
and the reductions run on a second stream:

    caller's   attn(0) | attn(1) | mlp(0)  | mlp(1)  | attn(0)' | ...
    "weave"              norm(0) | norm(1) | norm(0) | norm(1)  | ...

attn(0)' is of the next layer, under which the suffix's last norm of this one goes on. The suffix attends to the prefix
through the cache, which attn(0) has filled before attn(1) starts, so each token meets the same keys as without weaving.
`Weave` is this order, of which decoder_layer.py makes use.

Where to split: a GEMM's time goes up in steps, when a row of tiles more needs a wave more. `LayerTimes.split` takes the
split whose two halves together take the least time (smart split).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch

from ..backends.base import Event
from ..ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from ..planner.table import gpu_of
from ..plans import Plan
from ..world import World

LAYER_KINDS = ("plain", "fused", "woven", "sequence")


@dataclass(frozen=True)
class LayerPlan:
    """How a decoder's layers run.

    kind: "plain", the library's all-reduce, then add and norm; "fused", `all_reduce_rms_norm`; "woven", that in two
    parts, the first of `split` tokens; "sequence", activations sharded by tokens between layers, on all-gather + GEMM
    and GEMM + reduce-scatter.
    sms: SMs that the GEMMs take, by weft's own kernel, to leave the others to the communication; 0: the library's
    GEMMs.
    norm: plan of `all_reduce_rms_norm`: "auto", a kind, or a Plan, which is kept as its JSON.
    Raises ValueError for what is none of these, for the split of a plan that is not woven, and for SMs or a norm
    with "sequence".
    """

    kind: str = "plain"
    split: int = 0
    sms: int = 0
    norm: str | Plan = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.norm, Plan):
            object.__setattr__(self, "norm", self.norm.to_json())
        if self.kind not in LAYER_KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {list(LAYER_KINDS)}")
        if self.split < 0 or self.sms < 0:
            raise ValueError(f"{self}: split and sms must be at least 0")
        plan, known = self.norm_plan, ["auto", *ALL_REDUCE_RMS_NORM.kinds]
        if (plan.kind if isinstance(plan, Plan) else plan) not in known:
            raise ValueError(f"norm {self.norm!r} is not one of {known}, or a Plan of them")
        if self.split and self.kind != "woven":
            raise ValueError(f"{self}: only a woven layer is split")
        if self.kind == "sequence" and (self.sms or self.norm != "auto"):
            raise ValueError(
                f"{self}: the operators of a sequence-parallel layer take no sms, and it has no all_reduce_rms_norm"
            )

    @property
    def norm_plan(self) -> str | Plan:
        kept = self.norm
        return Plan.from_json(kept) if isinstance(kept, str) and kept.startswith("{") else kept


class Weave:
    """The order of the stages of one token part, or of two whose reductions run on a second stream. Raises ValueError
    for other numbers of parts.

    For each part: `wait`, the stage's computation on the caller's stream, and, inside `reducing`, its reduction.
    """

    def __init__(self, world: World, parts: int) -> None:
        if parts not in (1, 2):
            raise ValueError(f"{parts} parts: one or two are woven")
        self.world, self.parts = world, parts
        self._pending: dict[int, tuple[Event, tuple[object, ...]]] = {}  # by part, and what is not to be freed yet

    def wait(self, part: int) -> None:
        """Have the caller's stream wait for the part's last reduction."""
        if part in self._pending:
            event, _ = self._pending[part]
            self.world.wait_event(self.world.current_stream(), event)
            del self._pending[part]

    def reducing(self, part: int, *operands: object) -> AbstractContextManager[object]:
        """A context manager in which the current stream is the one of reductions, behind the part's computation.

        operands: what a reduction reads and nobody else holds. They are kept until `wait`, because the caching
        allocator may give memory that is freed before to the next computation on the caller's stream.
        """
        return nullcontext() if self.parts == 1 else self._on_second_stream(part, operands)

    @contextmanager
    def _on_second_stream(self, part: int, operands: tuple[object, ...]) -> Iterator[None]:
        world, main, side = self.world, self.world.current_stream(), self.world.side_stream("weave")
        world.wait_event(side, world.record(main))
        with world.on(side):
            yield
        self._pending[part] = world.record(side), operands


def run(
    world: World,
    parts: Sequence[torch.Tensor],
    compute: Sequence[Callable[[int, torch.Tensor], torch.Tensor]],
    reduce: Callable[[int, int, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Run all stages on one or two token parts. Return what `reduce` made of each at the end, ordered on the caller's
    stream.

    parts: what the first stage takes. `compute[k](part, y)`: stage k's partial output of y. reduce(k, part, partial):
    what the next stage takes; with two parts it runs on the second stream, as its current one. Raises ValueError for
    other numbers of parts.
    """
    ys, weave = list(parts), Weave(world, len(parts))
    for k, stage in enumerate(compute):
        for i in range(len(ys)):
            weave.wait(i)
            partial = stage(i, ys[i])
            with weave.reducing(i, partial):
                ys[i] = reduce(k, i, partial)
    for i in range(len(ys)):
        weave.wait(i)
    return ys


def halves(tokens: int, step: int = 128) -> int:
    """Tokens of the prefix: half of them, in whole steps where there are some, as GEMMs take rows in whole tiles."""
    return tokens // 2 // step * step or tokens // 2


@dataclass(frozen=True)
class LayerTimes:
    """The times, in us, of a layer's parts at `step`, 2 `step`, .. tokens: the GEMMs around attention, the GEMMs of the
    MLP, and one `all_reduce_rms_norm` with the SMs that it has beside them (empty: not known)."""

    step: int
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    norm: tuple[float, ...] = ()

    @classmethod
    def of_tiles(
        cls,
        attention: Sequence[tuple[int, int]],
        mlp: Sequence[tuple[int, int]],
        *,
        tile: tuple[int, int],
        time: Callable[[int, int], float],
        rows: int,
    ) -> LayerTimes:
        """The model of a GEMM whose tiles are known, up to `rows` tokens. attention, mlp: (N, K) of their GEMMs;
        time(tiles, K): how long one takes."""
        bm, bn = tile

        def us(gemms: Sequence[tuple[int, int]]) -> tuple[float, ...]:
            return tuple(
                float(sum(time(t * math.ceil(n / bn), k) for n, k in gemms)) for t in range(1, math.ceil(rows / bm) + 1)
            )

        return cls(bm, us(attention), us(mlp))

    def _at(self, us: tuple[float, ...], tokens: int) -> float:
        """Return the time at so many tokens; past the end, in proportion."""
        i = math.ceil(tokens / self.step)
        return us[i - 1] if i <= len(us) else us[-1] * i / len(us)

    def layer(self, prefix: int, suffix: int) -> float:
        """Return the time of a woven layer, in us: four steps, each as long as its compute or the other part's norm."""
        total = 0.0
        for gemms in (self.attention, self.mlp):
            for mine, other in ((prefix, suffix), (suffix, prefix)):
                norm = self._at(self.norm, other) if self.norm else 0.0
                total += max(self._at(gemms, mine), norm)
        return total

    def split(self, tokens: int) -> int:
        """Tokens of the prefix: of the splits at whole steps that take the least time (within a hundredth), the most
        even. Fewer than two steps are split in the middle."""
        at = range(self.step, tokens, self.step)
        if len(at) == 0:
            return tokens // 2
        us = {s: self.layer(s, tokens - s) for s in at}
        best = min(us.values())
        return min((s for s in at if us[s] <= 1.01 * best), key=lambda s: (abs(2 * s - tokens), s))


Choices = tuple[tuple[int, LayerPlan], ...]  # (the number of tokens from which on it is best, plan), rising


@dataclass(frozen=True)
class Table:
    """What was measured of one model on one GPU model and world.

    choices: those in a CUDA graph; a woven plan's `split` is found by the profile. eager: those for launches by the
    host, which few tokens wait for, so that more launches cost more. Below the first number of tokens of either, the
    plan is plain. What is empty was not measured.
    """

    choices: Choices = ()
    profile: LayerTimes | None = None
    eager: Choices = ()

    def to_json(self) -> dict[str, object]:
        return {
            "choices": [[tokens, asdict(plan)] for tokens, plan in self.choices],
            "eager": [[tokens, asdict(plan)] for tokens, plan in self.eager],
            "profile": None if self.profile is None else asdict(self.profile),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Table:
        p = data["profile"]
        profile = p and LayerTimes(p["step"], tuple(p["attention"]), tuple(p["mlp"]), tuple(p["norm"]))
        graph, eager = (
            tuple((tokens, LayerPlan(**plan)) for tokens, plan in data.get(mode, ())) for mode in ("choices", "eager")
        )
        return cls(graph, profile, eager)

    def choose(self, tokens: int, mode: str = "graph") -> LayerPlan | None:
        """mode: "graph" or "eager". None where nobody measured in this mode."""
        choices = self.choices if mode == "graph" else self.eager
        if not choices:
            return None
        return next((plan for least, plan in reversed(choices) if tokens >= least), LayerPlan())


def two_parts_from(world: World, hidden: int, intermediate: int) -> tuple[int | None, str | Plan]:
    """Return the number of tokens from which on a decoder of these sizes goes in two parts (None: never), and the plan
    of its norms then. Both come from measurements on this GPU and as many ranks, where nothing but weaving is faster
    from there on."""
    woven: list[tuple[int, LayerPlan]] = []
    for tokens, choice in table(world, hidden, intermediate).choices if world.size > 1 else ():
        woven = [] if choice.kind in ("plain", "fused") else [*woven, *([(tokens, choice)] * (choice.kind == "woven"))]
    return (woven[0][0], woven[0][1].norm_plan) if woven else (None, "auto")


_learned: dict[str, Table] = {}


def name_of(world: World, hidden: int, intermediate: int) -> str:
    return f"{world.size} x {hidden} x {intermediate}"


def learn_layers(name: str, table: Table) -> None:
    """Use a table measured in this process, before the shipped one. Every rank must learn the same."""
    _learned[name] = table


def table(world: World, hidden: int, intermediate: int) -> Table:
    """Return the table learned in this process, or that in `planner/tables/decoder/<gpu>.json`; an empty one where
    nobody measured."""
    name = name_of(world, hidden, intermediate)
    if name not in _learned:
        path = resources.files("weft.planner") / "tables" / "decoder" / f"{gpu_of(world)}.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
        _learned[name] = Table.from_json(found[name]) if name in found else Table()
    return _learned[name]
