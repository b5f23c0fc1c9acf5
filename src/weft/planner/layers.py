"""How long a decoder's layer will take by each way of running it, computed from a profile, and which is the fastest.

    plain      GEMMs + all-reduces + adds and norms
    fused      GEMMs + two shots by SMs, which add and norm the rows that they sum
    sequence   the four calls as `Predictor` has them, adds and norms of the own rows
    woven      four steps, each as long as its GEMMs or the other half's join by copy engines (barriers, two rounds of
               copies, a sum), but no shorter than one half's GEMMs and joins one after another

What all ways have alike (attention, rotary positions) is left out. GEMMs of a pass take longer than one alone: weights
come from memory, and the power limit holds the clock down. While links work and tensor cores do not, a GPU cools, so
that GEMMs run faster afterwards: sums by SMs cost less than they take, and what copy engines move under GEMMs costs
little, but not nothing. HEAT, RESTS and MOVES say how much; they and the other constants are of layers of Llama-70B's
sizes on two and four H200s, and were checked against those of two other models (tests/planner/test_layers.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ..op import collectives
from ..plans import Fused, GemmTile, Sequential
from ..world import World
from .auto import planner_on
from .parts import Occupancy
from .predict import ITEM, SHOTS, Lacks, by_posted_rows
from .search import Planner, gain, near

HEAT = 1.2  # how many times as long GEMMs take in a pass as alone
RESTS, LATENCY = 0.65, 20.0  # the share that a join by SMs costs of the time that it takes beyond so many us
MOVES = 0.2  # the share that a transfer by copy engines under GEMMs costs of the time that it takes alone
CACHED = 0.7  # elementwise kernels take this share of a copy's time: they find part of what they read in the L2 cache
WAITS = 4.0  # us that ranks wait for each other at a collective
STEP = 8.0  # us of the events between two steps of a woven layer
TAIL = 0.1  # the part of a wave that programs of weft's GEMM lose by sharing the last tiles
HALF = 512  # fewest rows of a half: of fewer, halves were often much slower than predicted
# The host's time for a layer, in its times for a library's GEMM with a collective; and a host that is as many times as
# slow as the one that the profile was made on.
HOST, SLOW = {"plain": 10, "fused": 18, "sequence": 13, "woven": 30}, 2.0


class Way(NamedTuple):
    """One way of running a layer; the fields are those of `nn.weave.LayerPlan`."""

    kind: str
    split: int = 0
    sms: int = 0
    norm: str = "auto"


_PLAIN = Way("plain")


@dataclass(frozen=True)
class DecoderSizes:
    """(N, K) of a layer's GEMMs on one rank: queries, keys and values; attention's output; gate and up; down."""

    qkv: tuple[int, int]
    out: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]

    @property
    def hidden(self) -> int:
        return self.out[0]

    @property
    def words(self) -> bool:
        """Whether weft's own GEMM takes them: rows of whole 16-byte words."""
        return all(n % 8 == 0 == k % 8 for n, k in (self.qkv, self.out, self.gate_up, self.down))


class LayerPredictor:
    """us of one layer, in a pass of several, on the machine of `planner`'s profile. limits: as `Planner.decide` takes
    it. Raises Lacks where the profile does not tell."""

    def __init__(self, planner: Planner, sizes: DecoderSizes, limits: bool = True) -> None:
        self.planner, self.p, self.sizes, self.limits = planner, planner.predictor, sizes, limits
        self.best = functools.cache(self._best)
        self.calls = {moved: op for op, moved in reversed(collectives().items())}  # of a user's and weft's own, weft's

    def ways(self, tokens: int) -> list[Way]:
        """What may be run for so many tokens."""
        found = [_PLAIN, Way("fused"), Way("sequence")]
        if tokens >= 2 * HALF:
            sms = (0, self.p.sms) if self.sizes.words else (0,)
            found += [Way("woven", sms=n, norm="decomposed") for n in sms]
        return found

    def time(self, way: Way, tokens: int, mode: str = "graph") -> float:
        """us of one layer run by `way`. mode: "graph" or "eager"."""
        us: float = getattr(self, f"_{way.kind}")(way, tokens)
        if mode == "eager":
            slow = 1.0 if way == _PLAIN else SLOW
            us = max(us, slow * HOST[way.kind] * self._host)
        return us

    def _best(self, tokens: int, mode: str = "graph") -> Way:
        """The fastest way, or plain where none is predicted faster by more than `gain`."""
        us = {way: self.time(way, tokens, mode) for way in self.ways(tokens)}
        first = min(us, key=lambda way: us[way])
        return first if us[_PLAIN] > gain(mode) * us[first] else _PLAIN

    # -- parts
    @functools.cached_property
    def _host(self) -> float:
        """The host's time for a library's GEMM with a collective, now: the shortest eager call of the profile cannot
        have taken it longer."""
        library = Sequential().to_json()
        calls = [r.us for r in self.p.profile.ran if (r.plan, r.mode) == (library, "eager")]
        return self.p.pace * min(calls, default=0.0)

    def _gemm(self, m: int, n: int, k: int) -> float:
        return HEAT * self.p.gemm(m, n, k)

    def _own_gemm(self, m: int, n: int, k: int) -> float:
        """us of a GEMM by weft's own kernel on all SMs, whose programs share the last tiles."""
        tile, sms = GemmTile(), self.p.sms
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
        shared = min(1.0, (tiles / sms + TAIL) / -(-tiles // sms))
        return HEAT * shared * self.p.tiles(Occupancy(tile), sms, tiles, m, n, k)

    def _passed(self, nbytes: float) -> float:
        """us of an elementwise kernel that reads as many bytes as it writes, `nbytes`."""
        return CACHED * self.p.optional("local", nbytes)

    def _gate(self, m: int) -> float:
        return self._passed(1.5 * m * self.sizes.down[1] * ITEM)

    def _norm(self, m: int) -> float:
        return self._passed(2 * m * self.sizes.hidden * ITEM)

    def _bytes(self, m: int) -> int:
        return m * self.sizes.hidden * ITEM

    def _compute(self, m: int) -> float:
        s = self.sizes
        return sum(self._gemm(m, *of) for of in (s.qkv, s.out, s.gate_up, s.down)) + self._gate(m)

    def _shots(self, m: int) -> float:
        """us of one or two shots alone, by low-latency rows: for more bytes than were measured, two shots' curve is
        extended."""
        known = self.p.posted("all_reduce", self._bytes(m))
        if known:
            return min(known.values())
        return self.p.latency(by_posted_rows("all_reduce", SHOTS[-1]), self._bytes(m))

    def _by_copies(self, m: int) -> float:
        """us of two shots whose rows copy engines move."""
        p, nbytes = self.p, self._bytes(m)
        met, moved = p.latency("barrier") + p.chunking.gap, nbytes * (p.world - 1) / p.world
        return 3 * met + 2 * p.chunking.copy * p.latency("copy", moved) + p.optional("sum", nbytes / p.world)

    # -- ways
    def _plain(self, way: Way, m: int) -> float:
        return self._compute(m) + 2 * (WAITS + self.p.latency("all_reduce", self._bytes(m)) + self._norm(m))

    def _fused(self, way: Way, m: int) -> float:
        us = self._shots(m)
        return self._compute(m) + 2 * (min(us, LATENCY) + RESTS * max(us - LATENCY, 0.0))

    def _sequence(self, way: Way, m: int) -> float:
        p, s, own = self.p, self.sizes, -(-m // self.p.world)
        total = 2 * self._norm(own)
        for what, (n, k) in zip(("all_gather", "reduce_scatter") * 2, (s.qkv, s.out, s.gate_up, s.down), strict=True):
            call = self.planner.decide(self.calls[what], m, n, k, even=m % p.world == 0, limits=self.limits)
            assert call.us is not None
            moved = p.latency("copy", (m - own) * (k if what == "all_gather" else n) * ITEM)
            total += self._gemm(m, n, k) + max(call.us - p.gemm(m, n, k), MOVES * moved)
            if (n, k) == s.gate_up and not isinstance(call.plan, Fused):  # whose epilogue is the gate
                total += self._gate(m)
        return total

    def _woven(self, way: Way, m: int) -> float:
        s, gemm = self.sizes, self._own_gemm if way.sms else self._gemm
        halves = m // 2, m - m // 2
        attention = [gemm(h, *s.qkv) + gemm(h, *s.out) for h in halves]
        mlp = [gemm(h, *s.gate_up) + gemm(h, *s.down) + (0.0 if way.sms else self._gate(h)) for h in halves]
        joins = [self._by_copies(h) for h in halves]
        steps = sum(max(of[i], joins[1 - i]) + STEP for of in (attention, mlp) for i in (0, 1))
        chain = max(a + b + 2 * join for a, b, join in zip(attention, mlp, joins, strict=True))
        return max(steps, chain) + 2 * MOVES * sum(joins)


def predicted(world: World, sizes: DecoderSizes, tokens: int, mode: str) -> Way:
    """The way that is predicted fastest for layers of these sizes on this World's machine; plain without a profile, or
    where the ranks have no memory in common. Collective the first time. mode: "graph" or "eager"."""
    planner = None if world.symmetric_reason or tokens == 0 else planner_on(world)
    if planner is None:
        return _PLAIN
    layers = world.cached(("layers", sizes), lambda: LayerPredictor(planner, sizes, world.backend.limits_ctas))
    try:
        return layers.best(near(tokens, planner.predictor.world), mode)
    except Lacks as e:
        world.say_once(f"decoder: plain: {e}")
        return _PLAIN
