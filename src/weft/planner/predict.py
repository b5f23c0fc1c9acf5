"""How long a plan will take, computed from a profile without running it (FlashOverlap, section 4).

Each kind of plan has a short model of what runs beside what (`models`):

    sequential    GEMM + collective
    one shot, two shots    GEMM + the same by low-latency rows, in as many bytes as were measured
    decomposed    chunk GEMMs and chunk transfers, each transfer after its GEMM (or the reverse), on queues of their
                  own; GEMMs on two streams share the SMs
    signaled      waves of tiles on the SMs that the collective leaves; the transfer of group i starts at the later of
                  the group's signal and a gap after the end of transfer i - 1 (the accumulate rule), and is slowed by
                  the GEMM for as long as that runs; moved by copies, as decomposed
    two-level     the node's op of one node's rows after another, and transfers between nodes on a queue of their own
    fused         all-gather: a tile starts when its chunk has been pulled, and the slowest chunk decides by the waves
                  that are left behind it; the reducing ops: tiles are pulled at one rate under the GEMM and at another
                  when it is done

Parts come from the profile (`parts`): library GEMMs, waves of Triton tiles, collectives and copies by size, and how
much two of them slow each other down. What cannot be measured alone is fitted to the profile's calls of the plan's kind
(`fits`). At last the ratio of the profile's own calls to the model, near the shape asked for, corrects what the model
leaves out.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace

from ..op import REGISTRY, collective, collectives
from ..plans import Decomposed, Fused, FusedGather, FusedGatherByCopies, Plan, Sequential, Signaled, TwoLevel
from .curves import near_mean
from .fits import Fits, family
from .models import decomposed, fused, signaled, two_level
from .parts import ITEM, SHOTS, Lacks, by_posted_rows
from .profile import Profile, identity
from .queues import Step, end

HIDES = 1.5  # an eager call that takes as many times as long as the host needs hides that


class Predictor(Fits):
    """Times of any plan at any shape on the profile's machine, in us. M, N, K are those of the GEMM on one rank, M that
    of all ranks. `clock`: how many times as long GEMMs take now as when the profile was made. `launch`: us that the
    host takes for one of a call's `operations`, now; None: as the profile has it, where it does. over_nodes: what ranks
    on several nodes take."""

    over_nodes: two_level.OverNodes | None = None

    def __init__(self, profile: Profile, clock: float = 1.0, launch: float | None = None) -> None:
        super().__init__(profile, clock)
        then = profile.constant("launch")
        self.launch = then if launch is None else launch
        self.pace = 1.0 if self.launch is None or then is None else self.launch / then  # of the host, then and now
        self._eagers: dict[str, tuple[float, float]] = {}
        self._corrections: dict[Hashable, Callable[[int, int, int], float]] = {}

    def time(
        self,
        op: str,
        plan: Plan,
        m: int,
        n: int,
        k: int,
        mode: str = "graph",
        received: int | None = None,
        slow: float = 1.0,
    ) -> float:
        """us of one call, back to back with others. received: for all-to-all, rows that the busiest rank gets, where
        that is more than M, the rows that the busiest one sends. slow: of an eager call, a host that takes as many
        times as long as the profile, or a launch now, tells. Raises Lacks where the profile does not tell."""
        us = self.model(op, plan, m, n, k, received) * math.exp(self._correction(op, plan)(m, n, k))
        if mode == "eager":
            gap, host = self._eager(plan.kind if isinstance(plan, Fused) else family(plan))
            given = (self.launch or 0.0) * self.operations(op, plan)
            return max(us + gap, slow * host * self.pace * self._launches(plan), slow * given)
        return us

    def operations(self, op: str, plan: Plan) -> int:
        """What the host gives to streams in one call: kernels, copies, barriers, collectives. Each takes it about as
        long, with the event that orders it."""
        moved, others = collective(op), self.world - 1
        groups = len(plan.groups) or self.world if isinstance(plan, Decomposed | Signaled) else 0
        if isinstance(plan, Decomposed):
            if moved == "all_reduce":
                return 2 * groups
            if moved == "reduce_scatter":  # a barrier, then by piece: multiplied, pushed, a barrier, and summed
                return 1 + plan.pieces * (groups + others + 2)
            whole = plan.groups[:1] not in ((), (1,))  # the own rows are multiplied with others, so put beside them
            return 3 + whole + others + groups  # staged, copied, multiplied, and two barriers
        if isinstance(plan, Signaled):
            return 2 + groups * (3 + others if plan.copies else 2)
        if isinstance(plan, FusedGatherByCopies):
            return 4 + 2 * others  # a copy and a signal for every peer
        return 1 if isinstance(plan, FusedGather) else 2

    def _launches(self, plan: Plan) -> int:
        """How the host's time for a call grows with the plan's groups."""
        return 3 + (len(plan.groups) or self.world) if isinstance(plan, Decomposed | Signaled) else 1

    def _eager(self, alike: str) -> tuple[float, float]:
        """Return, for a family (all fused plans are one), the us that an eager call takes beyond one in a graph, and
        the host's us for a launch: the shortest measured eager call cannot have taken longer on the host."""
        if alike not in self._eagers:
            calls = [
                r for (_, name), rs in self.ran.items() if ("fused" if name[0] == "{" else name) == alike for r in rs
            ]
            graph = {identity(replace(r, mode="eager")): r.us for r in calls if r.mode == "graph"}
            eager = [(r, self._launches(Plan.from_json(r.plan))) for r in calls if r.mode == "eager"]
            host = min((r.us / launches for r, launches in eager), default=0.0)
            seen = [r for r, launches in eager if identity(r) in graph and r.us > HIDES * host * launches]
            more = [r.us - graph[identity(r)] for r in seen]  # of what hides the host's time
            self._eagers[alike] = max(min(more, default=0.0), 0.0), host
        return self._eagers[alike]

    def model(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> float:
        """`time` without the correction by what ran."""
        if op not in REGISTRY or not collective(op):
            raise ValueError(f"{op!r} is not one of {sorted(collectives())}")
        if self.world == 1:
            return self.gemm(m, n, k)
        if isinstance(plan, Fused):
            return fused.us(self, op, plan, m, n, k, self.pulling(op, plan), self.chunking)
        return end(self.steps(op, plan, m, n, k, received))

    def steps(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> list[Step]:
        """What runs when, for the plans that run several things: a picture of the prediction."""
        if isinstance(plan, TwoLevel) and self.over_nodes is not None:
            return two_level.steps(self.over_nodes, op, plan, m, n, k)
        if isinstance(plan, Decomposed):
            return decomposed.steps(self, op, plan, m, n, k, self.chunking)
        if isinstance(plan, Signaled) and plan.copies:
            return signaled.steps_by_copies(self, op, plan, m, n, k, self.chunking, self.moving(op), received)
        if isinstance(plan, Signaled):
            return signaled.steps(self, op, plan, m, n, k, self.signaling(op), received)
        if not isinstance(plan, Sequential) and plan not in SHOTS:
            raise Lacks(f"no model of {plan} as steps")
        what = collective(op) if isinstance(plan, Sequential) else by_posted_rows(collective(op), plan)
        nbytes = max(m, received or 0) * (k if collective(op) == "all_gather" else n) * ITEM
        gemm, moved = self.gemm(m, n, k), self.latency(what, nbytes)
        if collective(op) == "all_gather":
            return [Step("comm", what, 0, moved), Step("gemm", "gemm", moved, moved + gemm)]
        if what == "all_to_all":  # rows are put in the order of their ranks in between
            before = gemm + self.optional("local", m * n * ITEM)
            return [Step("gemm", "gemm", 0, before), Step("comm", what, before, before + moved)]
        return [Step("gemm", "gemm", 0, gemm), Step("comm", what, gemm, gemm + moved)]

    def signaled_parts(
        self, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None = None
    ) -> signaled.SignaledParts:
        """What the accumulate rule works with."""
        return signaled.parts(self, op, plan, m, n, k, self.signaling(op), received)

    def fit(self) -> None:
        """Do now what the first predictions would wait for."""
        for op, _ in list(self.ran):
            for plan in (Sequential(), Decomposed(), Signaled(), Signaled(copies=True), *self.variants(op)):
                with contextlib.suppress(Lacks):
                    self._correction(op, plan)

    def _correction(self, op: str, plan: Plan) -> Callable[[int, int, int], float]:
        """log of measured / model, by shape, from the profile's calls of this family."""
        key = (op, family(plan))
        if key not in self._corrections:
            points: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for r in self.graphs(*key):
                model = self.model(op, Plan.from_json(r.plan), r.m, r.n, r.k)
                points[r.m, r.n, r.k].append(math.log(r.us / model))
            self._corrections[key] = near_mean(points)
        return self._corrections[key]
