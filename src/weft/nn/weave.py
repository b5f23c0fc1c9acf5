"""Token weaving (TokenWeave, section 4): the communication of one token part runs under the other part's compute.

A layer is a sequence of stages. Each stage is a computation with this rank's shard of the weights, followed by a
reduction over the ranks: all-reduce, residual add and norm. With two token parts, the computations alternate on the
caller's stream and the reductions run on a second stream:

    caller's   attn(0) | attn(1) | mlp(0)  | mlp(1)  | attn(0)' | ...
    "weave"              norm(0) | norm(1) | norm(0) | norm(1)  | ...

attn(0)' belongs to the next layer and overlaps the suffix's last norm of this layer. The suffix attends to the prefix
through the cache, which attn(0) has filled before attn(1) starts. Each token therefore attends to the same keys as
without weaving. `Weave` enforces this order; decoder_layer.py uses it.

The time of a GEMM rises in steps, each time an additional row of tiles requires an additional wave. `LayerTimes.split`
returns the split with the smallest total time of both parts (TokenWeave's smart split).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields

import torch

from ..backends.base import Event
from ..ops.all_reduce.op import ALL_REDUCE_RMS_NORM
from ..planner.table import DECODER, StoredRow, gpu_of, layers
from ..plans import Plan
from ..world import World

LAYER_KINDS = ("plain", "fused", "woven", "sequence")


@dataclass(frozen=True)
class LayerPlan:
    """How a decoder's layers run.

    kind: "plain" is NCCL's all-reduce, then add and norm; "fused" is `all_reduce_rms_norm`; "woven" is "fused" in two
        token parts, the first of `split` tokens; "sequence" shards activations by tokens between layers, with
        all-gather + GEMM and GEMM + reduce-scatter.
    sms: the number of SMs of weft's GEMM kernel; the remaining SMs communicate. 0: cuBLAS computes the GEMMs.
    norm: the plan of `all_reduce_rms_norm`: "auto", a kind, or a Plan, which is stored as its JSON.

    Raises ValueError for any other value, for a split with a kind other than "woven", and for SMs or a norm with
    "sequence".
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
        plan, kinds = self.norm_plan, ["auto", *ALL_REDUCE_RMS_NORM.kinds]
        if (plan.kind if isinstance(plan, Plan) else plan) not in kinds:
            raise ValueError(f"norm {self.norm!r} is not one of {kinds}, or a Plan of them")
        if self.split and self.kind != "woven":
            raise ValueError(f"{self}: only a woven layer is split")
        if self.kind == "sequence" and (self.sms or self.norm != "auto"):
            raise ValueError(
                f"{self}: the operators of a sequence-parallel layer take no sms, and it has no all_reduce_rms_norm"
            )

    @property
    def norm_plan(self) -> str | Plan:
        """Return the plan of `all_reduce_rms_norm` that `norm` names: a kind, or a Plan for its JSON."""
        norm = self.norm
        return Plan.from_json(norm) if isinstance(norm, str) and norm.startswith("{") else norm


class Weave:
    """The order of the stages of one token part, or of two parts whose reductions run on a second stream.

    For each stage and part, call `wait`, compute on the caller's stream, and reduce inside `reducing`. A caller that
    catches an exception between a `reducing` and its `wait` must call `World.join_side_streams`, because the reduction
    still uses its operands. Raises ValueError for any other number of parts.
    """

    def __init__(self, world: World, parts: int) -> None:
        if parts not in (1, 2):
            raise ValueError(f"{parts} parts: one or two are woven")
        self.world, self.parts = world, parts
        # For each part, the event at the end of its reduction, and the tensors that must stay alive until that event.
        self._pending: dict[int, tuple[Event, tuple[object, ...]]] = {}

    def wait(self, part: int) -> None:
        """Make the caller's stream wait for the part's last reduction."""
        if part in self._pending:
            event, _ = self._pending[part]
            self.world.wait_event(self.world.current_stream(), event)
            del self._pending[part]

    def reducing(self, part: int, *operands: object) -> AbstractContextManager[object]:
        """Return a context in which the current stream is the reductions' stream, ordered after the part's computation.

        `operands` are tensors that the reduction reads. The operands stay alive until `wait`, because the caching
        allocator could otherwise assign their memory to the next computation on the caller's stream.
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
    """Run all stages on one or two token parts. Return the last stage's reduced tensors, ordered on the caller's
    stream.

    parts: the inputs of the first stage. `compute[k](part, y)` returns the partial sum of stage k. `reduce(k, part,
    partial)` returns the next stage's input; with two parts it runs with the second stream as the current stream.
    Raises ValueError for any other number of parts.
    """
    ys, weave = list(parts), Weave(world, len(parts))
    try:
        for k, stage in enumerate(compute):
            for i in range(len(ys)):
                weave.wait(i)
                partial = stage(i, ys[i])
                with weave.reducing(i, partial):
                    ys[i] = reduce(k, i, partial)
        for i in range(len(ys)):
            weave.wait(i)
    except BaseException:
        world.join_side_streams()
        raise
    return ys


def halves(tokens: int, step: int = 128) -> int:
    """Return the number of tokens of the prefix. The number is half the tokens, rounded down to a multiple of `step`,
    because GEMMs compute whole tiles of rows. If that multiple is 0, the half is not rounded."""
    return tokens // 2 // step * step or tokens // 2


@dataclass(frozen=True)
class LayerTimes:
    """The times, in us, of a layer's steps at `step`, 2 `step`, .. tokens: the GEMMs around attention, the GEMMs of the
    MLP, and one `all_reduce_rms_norm` on the SMs that it uses while GEMMs run (empty: not measured)."""

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
        """Return the times, for up to `rows` tokens, of GEMMs with a known tile. attention and mlp contain (N, K) of
        each GEMM, and time(tiles, K) returns the time of a GEMM in us."""
        bm, bn = tile

        def us(gemms: Sequence[tuple[int, int]]) -> tuple[float, ...]:
            return tuple(
                float(sum(time(t * math.ceil(n / bn), k) for n, k in gemms)) for t in range(1, math.ceil(rows / bm) + 1)
            )

        return cls(bm, us(attention), us(mlp))

    def _time(self, us: tuple[float, ...], tokens: int) -> float:
        """Return the time at `tokens`; beyond the last measured time, it is extrapolated in proportion."""
        i = math.ceil(tokens / self.step)
        return us[i - 1] if i <= len(us) else us[-1] * i / len(us)

    def layer(self, prefix: int, suffix: int) -> float:
        """Return the time of a woven layer, in us: four steps, each of which lasts as long as the longer of its
        computation and the other part's norm."""
        total = 0.0
        for gemms in (self.attention, self.mlp):
            for computing, reducing in ((prefix, suffix), (suffix, prefix)):
                norm = self._time(self.norm, reducing) if self.norm else 0.0
                total += max(self._time(gemms, computing), norm)
        return total

    def split(self, tokens: int, least: int = 1) -> int:
        """Return the number of tokens of the prefix. The split is the most even one among the multiples of `step`
        within 1% of the smallest time. Neither part has fewer tokens than `least`. If there is no such multiple, the
        split is in the middle."""
        splits = [s for s in range(self.step, tokens, self.step) if min(s, tokens - s) >= least]
        if not splits:
            return tokens // 2
        us = {s: self.layer(s, tokens - s) for s in splits}
        best = min(us.values())
        return min((s for s in splits if us[s] <= 1.01 * best), key=lambda s: (abs(2 * s - tokens), s))


# (the smallest number of tokens for which the plan is the fastest, the plan), in ascending order
Choices = tuple[tuple[int, LayerPlan], ...]


@dataclass(frozen=True)
class Table:
    """Measurements of one model on one GPU model with one number of ranks.

    `choices` applies to CUDA graphs, and `eager` to launches by the host: with few tokens the GPU's work does not hide
    the launch time. The `split` of a woven plan comes from the profile. Below the smallest number of tokens the plan is
    plain. An empty field was not measured.
    """

    choices: Choices = ()
    profile: LayerTimes | None = None
    eager: Choices = ()

    def to_rows(self, world: int, hidden: int, intermediate: int) -> list[StoredRow]:
        """Return the table as rows of the planner's table (`planner.table`)."""
        key = {"op": DECODER, "world": world, "N": hidden, "K": intermediate}
        plans = [("eager", *choice) for choice in self.eager] + [("graph", *choice) for choice in self.choices]
        rows = [key | {"M": tokens, "mode": mode, "plan": asdict(plan)} for mode, tokens, plan in plans]
        steps = [self.profile] if self.profile else []
        return rows + [key | {"M": p.step, "mode": "profile", "plan": asdict(p)} for p in steps]

    @classmethod
    def from_rows(cls, rows: Sequence[StoredRow]) -> Table:
        """Return the table that `to_rows` converted to rows."""
        choices: dict[str, list[tuple[int, LayerPlan]]] = {"graph": [], "eager": []}
        profile = None
        for r in rows:
            if r["mode"] == "profile":
                step, *us = (r["plan"][field.name] for field in fields(LayerTimes))
                profile = LayerTimes(step, *map(tuple, us))
            else:
                choices[r["mode"]].append((r["M"], LayerPlan(**r["plan"])))
        return cls(tuple(choices["graph"]), profile, tuple(choices["eager"]))

    def choose(self, tokens: int, mode: str = "graph") -> LayerPlan | None:
        """Return the plan for `tokens` in `mode`, "graph" or "eager"; None if that mode was not measured."""
        choices = self.choices if mode == "graph" else self.eager
        if not choices:
            return None
        return next((plan for min_tokens, plan in reversed(choices) if tokens >= min_tokens), LayerPlan())


def two_parts_from(world: World, hidden: int, intermediate: int) -> tuple[int | None, str | Plan]:
    """Return the smallest number of tokens for which a decoder of these sizes runs in two token parts (None: never),
    and the plan of its norms. Both results come from measurements on this GPU with this number of ranks: for that
    number of tokens and every larger one, weaving was faster than the plain and the fused plan."""
    woven: list[tuple[int, LayerPlan]] = []
    for tokens, choice in table(world, hidden, intermediate).choices if world.size > 1 else ():
        woven = [] if choice.kind in ("plain", "fused") else [*woven, *([(tokens, choice)] * (choice.kind == "woven"))]
    return (woven[0][0], woven[0][1].norm_plan) if woven else (None, "auto")


_learned: dict[str, Table] = {}


def name_of(world: World, hidden: int, intermediate: int) -> str:
    """Return the name of a table: the ranks and the sizes of the decoder."""
    return f"{world.size} x {hidden} x {intermediate}"


def learn_layers(name: str, table: Table) -> None:
    """Use a table measured in this process instead of the shipped one. `name` is a result of `name_of`. Every rank must
    use the same table."""
    _learned[name] = table


def table(world: World, hidden: int, intermediate: int) -> Table:
    """Return the table from `learn_layers`, or otherwise the planner's rows for these sizes, if there are any."""
    name = name_of(world, hidden, intermediate)
    if name not in _learned:
        _learned[name] = Table.from_rows(layers(gpu_of(world), world.size, hidden, intermediate))
    return _learned[name]
