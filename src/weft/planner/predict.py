"""Predict the time of a plan from a profile, without running it (FlashOverlap, section 4).

Each kind of plan has a short model of what runs concurrently (`models`):

    sequential    GEMM + collective
    one shot, two shots    GEMM + the low-latency collective, up to the measured number of bytes
    decomposed    chunk GEMMs and chunk transfers on queues, each transfer after its GEMM (or the reverse); GEMMs on two
                  streams share the SMs
    signaled      waves of tiles on the SMs that the collective leaves; the transfer of group i starts at the later of
                  the group's signal and a gap after the end of transfer i - 1 (the accumulate rule), and is slowed
                  until the GEMM ends; moved by copies, as decomposed
    two-level     the node's op on one node's rows after another, and transfers between nodes on a queue of their own
    fused         all-gather: a tile starts when its chunk has been pulled, and the call ends with the slowest chunk and
                  the waves behind it; reducing ops: tiles are pulled at one rate under the GEMM and at another after it

Parts come from the profile (`parts`); parameters that cannot be measured alone are fitted to the profile's calls of the
plan's kind (`fits`). Finally the measured / predicted ratio of the profile's own calls near the shape corrects what the
model leaves out.
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
from .parts import ITEM, SHOTS, NotMeasured, low_latency_name
from .profile import Profile, identity
from .queues import Step, end

GPU_BOUND = 1.5  # an eager call that takes this many times the host's time is bound by the GPU


class Predictor(Fits):
    """Times of any plan at any shape on the profile's machine, in us. M, N, K are those of the GEMM on one rank, but M
    counts the rows of all ranks.

    clock: time of a GEMM now over its time when the profile was made. launch: us that the host takes now for one of a
    call's `operations`; None: the profile's time, if it has one. over_nodes: times between nodes, for ranks on several
    nodes.
    """

    over_nodes: two_level.OverNodes | None = None

    def __init__(self, profile: Profile, clock: float = 1.0, launch: float | None = None) -> None:
        super().__init__(profile, clock)
        profile_launch = profile.constant("launch")
        self.launch = profile_launch if launch is None else launch
        # The host's time for a launch now, over that in the profile.
        self.pace = 1.0 if self.launch is None or profile_launch is None else self.launch / profile_launch
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
        """Return the us of one call, back to back with others. received: all-to-all: rows that the busiest receiver
        gets, if more than M, the rows that the busiest sender sends. slow: eager calls: slow-down of the host against
        the profile, or against a launch now. Raises NotMeasured if the profile lacks a part."""
        us = self.model(op, plan, m, n, k, received) * math.exp(self._correction(op, plan)(m, n, k))
        if mode == "eager":
            gap, host = self._eager(plan.kind if isinstance(plan, Fused) else family(plan))
            launches_us = (self.launch or 0.0) * self.operations(op, plan)
            return max(us + gap, slow * host * self.pace * self._launches(plan), slow * launches_us)
        return us

    def operations(self, op: str, plan: Plan) -> int:
        """Return the number of operations that the host submits to streams in one call: kernels, copies, barriers,
        collectives. Each takes the host about as long, including the event that orders it."""
        collective_name, peers = collective(op), self.world - 1
        groups = len(plan.groups) or self.world if isinstance(plan, Decomposed | Signaled) else 0
        if isinstance(plan, Decomposed):
            if collective_name == "all_reduce":
                return 2 * groups
            if collective_name == "reduce_scatter":  # a barrier; for each piece GEMMs, pushes, a barrier and a sum
                return 1 + plan.pieces * (groups + peers + 2)
            # If one GEMM takes this rank's rows and others, its rows are copied next to them.
            copies_own_rows = plan.groups[:1] not in ((), (1,))
            return 3 + copies_own_rows + peers + groups  # a staging copy, two barriers, copies and GEMMs
        if isinstance(plan, Signaled):
            return 2 + groups * (3 + peers if plan.copies else 2)
        if isinstance(plan, FusedGatherByCopies):
            return 4 + 2 * peers  # each peer takes a copy and a signal
        return 1 if isinstance(plan, FusedGather) else 2

    def _launches(self, plan: Plan) -> int:
        """Return the factor by which the host's time for a call grows with the plan's groups."""
        return 3 + (len(plan.groups) or self.world) if isinstance(plan, Decomposed | Signaled) else 1

    def _eager(self, group: str) -> tuple[float, float]:
        """Return, for a family (all fused plans are one), the us by which an eager call is longer than a captured one,
        and the host's us for a launch, of which the shortest measured eager call is an upper bound."""
        if group not in self._eagers:
            calls = [
                r for (_, name), rs in self.calls.items() if ("fused" if name[0] == "{" else name) == group for r in rs
            ]
            graph = {identity(replace(r, mode="eager")): r.us for r in calls if r.mode == "graph"}
            eager = [(r, self._launches(Plan.from_json(r.plan))) for r in calls if r.mode == "eager"]
            host = min((r.us / launches for r, launches in eager), default=0.0)
            gpu_bound = [r for r, launches in eager if identity(r) in graph and r.us > GPU_BOUND * host * launches]
            differences = [r.us - graph[identity(r)] for r in gpu_bound]  # calls whose GPU time hides the host's
            self._eagers[group] = max(min(differences, default=0.0), 0.0), host
        return self._eagers[group]

    def model(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> float:
        """Return `time` in a CUDA graph without the correction by measured calls."""
        if op not in REGISTRY or not collective(op):
            raise ValueError(f"{op!r} is not one of {sorted(collectives())}")
        if self.world == 1:
            return self.gemm(m, n, k)
        if isinstance(plan, Fused):
            return fused.us(self, op, plan, m, n, k, self.pulling(op, plan), self.chunking)
        return end(self.steps(op, plan, m, n, k, received))

    def steps(self, op: str, plan: Plan, m: int, n: int, k: int, received: int | None = None) -> list[Step]:
        """Return the start and end of each step, for plans of several steps."""
        if isinstance(plan, TwoLevel) and self.over_nodes is not None:
            return two_level.steps(self.over_nodes, op, plan, m, n, k)
        if isinstance(plan, Decomposed):
            return decomposed.steps(self, op, plan, m, n, k, self.chunking)
        if isinstance(plan, Signaled) and plan.copies:
            return signaled.steps_by_copies(self, op, plan, m, n, k, self.chunking, self.moving(op), received)
        if isinstance(plan, Signaled):
            return signaled.steps(self, op, plan, m, n, k, self.signaling(op), received)
        if not isinstance(plan, Sequential) and plan not in SHOTS:
            raise NotMeasured(f"no model of {plan} as steps")
        transfer_name = collective(op) if isinstance(plan, Sequential) else low_latency_name(collective(op), plan)
        nbytes = max(m, received or 0) * (k if collective(op) == "all_gather" else n) * ITEM
        gemm, transfer_us = self.gemm(m, n, k), self.latency(transfer_name, nbytes)
        if collective(op) == "all_gather":
            return [Step("comm", transfer_name, 0, transfer_us), Step("gemm", "gemm", transfer_us, transfer_us + gemm)]
        if transfer_name == "all_to_all":  # between the two, rows are sorted by destination rank
            gemm_end = gemm + self.optional("local", m * n * ITEM)
            return [Step("gemm", "gemm", 0, gemm_end), Step("comm", transfer_name, gemm_end, gemm_end + transfer_us)]
        return [Step("gemm", "gemm", 0, gemm), Step("comm", transfer_name, gemm, gemm + transfer_us)]

    def signaled_parts(
        self, op: str, plan: Signaled, m: int, n: int, k: int, received: int | None = None
    ) -> signaled.SignaledParts:
        """Return what the accumulate rule works with."""
        return signaled.parts(self, op, plan, m, n, k, self.signaling(op), received)

    def fit(self) -> None:
        """Fit all parameters now, so that no prediction waits for it."""
        for op, _ in list(self.calls):
            for plan in (Sequential(), Decomposed(), Signaled(), Signaled(copies=True), *self.variants(op)):
                with contextlib.suppress(NotMeasured):
                    self._correction(op, plan)

    def _correction(self, op: str, plan: Plan) -> Callable[[int, int, int], float]:
        """Return log(measured / model) by shape, from the profile's calls of this family."""
        key = (op, family(plan))
        if key not in self._corrections:
            points: dict[tuple[int, int, int], list[float]] = defaultdict(list)
            for r in self.graphs(*key):
                model = self.model(op, Plan.from_json(r.plan), r.m, r.n, r.k)
                points[r.m, r.n, r.k].append(math.log(r.us / model))
            self._corrections[key] = near_mean(points)
        return self._corrections[key]
