"""The predicted time of a decoder layer for each way of running it, from a profile, and the fastest way.

    plain      GEMMs + all-reduces + adds and norms
    fused      GEMMs + low-latency two-shot all-reduces on SMs, whose kernel also adds and norms
    sequence   the four calls as `Predictor` models them, and adds and norms of this rank's rows
    woven      four steps, each as long as the longer of its GEMMs and the other half's all-reduce by copy engines
               (barriers, two rounds of copies, a sum), but no shorter in all than one half's GEMMs and all-reduces in a
               row

The prediction omits the parts that all ways share (attention, rotary embedding). GEMMs need more time in a pass than
alone, because weights are read from memory and the power limit lowers the clock. While only links work, the GPU cools,
and the next GEMMs run faster than without the pause. An all-reduce on SMs therefore costs less than its own time, and
transfers by copy engines during GEMMs have a small cost. HEAT, SUM_SHARE and COPY_SHARE model these effects. These and
the other constants were fitted to layers of Llama-70B's sizes on two and four H200s (2026-11), and checked against two
other models (tests/planner/test_layers.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ..cost.model import ITEM, SHOTS, Occupancy, low_latency_name
from ..op import REGISTRY, collectives
from ..plans import Fused, GemmTile, Sequential
from ..world import World
from .auto import planner_on
from .parts import NotMeasured
from .search import Planner, gain, near

HEAT = 1.2  # the time of a GEMM in a pass divided by its time alone
SUM_SHARE, SUM_LATENCY = 0.65, 20.0  # an all-reduce on SMs costs its first SUM_LATENCY us and this fraction of the rest
COPY_SHARE = 0.2  # a transfer by copy engines during GEMMs costs this fraction of its time alone
CACHED_SHARE = 0.7  # an elementwise kernel takes this share of a copy's time: part of its input is in L2
WAIT = 4.0  # the time, in us, for which ranks wait for each other at every collective
STEP_GAP = 8.0  # the time, in us, of the events between two steps of a woven layer
TAIL = 0.1  # waves that the programs of weft's GEMM lose by sharing the last tiles
HALF = 512  # the smallest number of rows of a half; smaller halves were often much slower than predicted
# The host's time for a layer, divided by its time for a library GEMM with a collective; and the slow-down of the host
# relative to the profile's host at which overlapped plans must still be faster.
HOST_CALLS, SLOW_HOSTS = {"plain": 10, "fused": 18, "sequence": 13, "woven": 30}, 2.0


class Way(NamedTuple):
    """One way of running a layer. The fields are those of `nn.weave.LayerPlan`."""

    kind: str
    split: int = 0
    sms: int = 0
    norm: str = "auto"


_PLAIN = Way("plain")


@dataclass(frozen=True)
class DecoderSizes:
    """(N, K) of a layer's GEMMs on one rank: queries, keys and values; the output projection; gate and up; down."""

    qkv: tuple[int, int]
    out: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]

    @property
    def hidden(self) -> int:
        return self.out[0]

    @property
    def has_16_byte_rows(self) -> bool:
        """Return whether weft's own GEMM supports these sizes: rows must be whole 16-byte words."""
        return all(n % 8 == 0 == k % 8 for n, k in (self.qkv, self.out, self.gate_up, self.down))


class LayerPredictor:
    """Predict the time, in us, of one layer in a pass of several layers, on the machine of the planner's profile.
    limits: as for `candidates`. Raises NotMeasured if the profile lacks a measurement."""

    def __init__(self, planner: Planner, sizes: DecoderSizes, limits: bool = True) -> None:
        self.planner, self.p, self.sizes, self.limits = planner, planner.predictor, sizes, limits
        self.best = functools.cache(self._best)
        # For each collective, weft's op, which is registered before users' ops with the same collective.
        self.op_names = {name: op for op, name in reversed(collectives().items())}

    def ways(self, tokens: int) -> list[Way]:
        """Return the ways that can run this number of tokens."""
        ways = [_PLAIN, Way("fused"), Way("sequence")]
        if tokens >= 2 * HALF:
            sms = (0, self.p.sms) if self.sizes.has_16_byte_rows else (0,)
            ways += [Way("woven", sms=n, norm="decomposed") for n in sms]
        return ways

    def time(self, way: Way, tokens: int, mode: str = "graph") -> float:
        """Return the time of one layer in us. mode: "graph" or "eager"."""
        us: float = getattr(self, f"_{way.kind}")(way, tokens)
        if mode == "eager":
            slow = 1.0 if way == _PLAIN else SLOW_HOSTS
            us = max(us, slow * HOST_CALLS[way.kind] * self._host)
        return us

    def _best(self, tokens: int, mode: str = "graph") -> Way:
        """Return the fastest way, or plain if no way is predicted faster than plain by more than `gain`."""
        times = {way: self.time(way, tokens, mode) for way in self.ways(tokens)}
        fastest = min(times, key=lambda way: times[way])
        return fastest if times[_PLAIN] > gain(mode) * times[fastest] else _PLAIN

    # -- parts
    @functools.cached_property
    def _host(self) -> float:
        """Return the host's current time for one library GEMM with a collective; the profile's shortest eager call is
        an upper bound for this time."""
        library = Sequential().to_json()
        calls = [r.us for r in self.p.profile.calls if (r.plan, r.mode) == (library, "eager")]
        return self.p.pace * min(calls, default=0.0)

    def _gemm(self, m: int, n: int, k: int) -> float:
        return HEAT * self.p.gemm(m, n, k)

    def _own_gemm(self, m: int, n: int, k: int) -> float:
        """Return the time, in us, of weft's own GEMM on all SMs; its programs share the last tiles."""
        tile, sms = GemmTile(), self.p.sms
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
        shared = min(1.0, (tiles / sms + TAIL) / -(-tiles // sms))
        return HEAT * shared * self.p.tiles(Occupancy(tile), sms, tiles, m, n, k)

    def _elementwise(self, nbytes: float) -> float:
        """Return the time, in us, of an elementwise kernel that reads `nbytes` and writes `nbytes`."""
        return CACHED_SHARE * self.p.optional("local", nbytes)

    def _activation(self, m: int) -> float:
        return self._elementwise(1.5 * m * self.sizes.down[1] * ITEM)

    def _norm(self, m: int) -> float:
        return self._elementwise(2 * m * self.sizes.hidden * ITEM)

    def _bytes(self, m: int) -> int:
        return m * self.sizes.hidden * ITEM

    def _compute(self, m: int) -> float:
        s = self.sizes
        return sum(self._gemm(m, *weight) for weight in (s.qkv, s.out, s.gate_up, s.down)) + self._activation(m)

    def _low_latency_sum(self, m: int) -> float:
        """Return the time, in us, of a one-shot or two-shot low-latency all-reduce alone. Beyond the measured sizes,
        the two-shot curve is extrapolated."""
        times = self.p.low_latency_times("all_reduce", self._bytes(m))
        if times:
            return min(times.values())
        return self.p.latency(low_latency_name("all_reduce", SHOTS[-1]), self._bytes(m))

    def _by_copies(self, m: int) -> float:
        """Return the time, in us, of a two-shot all-reduce by copy engines."""
        p, nbytes = self.p, self._bytes(m)
        barrier, moved = p.latency("barrier") + p.chunking.gap, nbytes * (p.world - 1) / p.world
        return 3 * barrier + 2 * p.chunking.copy * p.latency("copy", moved) + p.optional("sum", nbytes / p.world)

    # -- ways
    def _plain(self, way: Way, m: int) -> float:
        return self._compute(m) + 2 * (WAIT + self.p.latency("all_reduce", self._bytes(m)) + self._norm(m))

    def _fused(self, way: Way, m: int) -> float:
        us = self._low_latency_sum(m)
        return self._compute(m) + 2 * (min(us, SUM_LATENCY) + SUM_SHARE * max(us - SUM_LATENCY, 0.0))

    def _sequence(self, way: Way, m: int) -> float:
        p, s, own_rows = self.p, self.sizes, -(-m // self.p.world)
        total = 2 * self._norm(own_rows)
        for name, (n, k) in zip(("all_gather", "reduce_scatter") * 2, (s.qkv, s.out, s.gate_up, s.down), strict=True):
            call = self.planner.decide(self.op_names[name], m, n, k, even=m % p.world == 0, limits=self.limits)
            assert call.us is not None
            moved = p.latency("copy", REGISTRY[self.op_names[name]].gemm_call(m, n, k).moved(m - own_rows))
            total += self._gemm(m, n, k) + max(call.us - p.gemm(m, n, k), COPY_SHARE * moved)
            if (n, k) == s.gate_up and not isinstance(call.plan, Fused):  # fused in the GEMM's epilogue
                total += self._activation(m)
        return total

    def _woven(self, way: Way, m: int) -> float:
        s, gemm = self.sizes, self._own_gemm if way.sms else self._gemm
        halves = m // 2, m - m // 2
        attention = [gemm(h, *s.qkv) + gemm(h, *s.out) for h in halves]
        mlp = [gemm(h, *s.gate_up) + gemm(h, *s.down) + (0.0 if way.sms else self._activation(h)) for h in halves]
        sums = [self._by_copies(h) for h in halves]
        steps = sum(max(gemms[i], sums[1 - i]) + STEP_GAP for gemms in (attention, mlp) for i in (0, 1))
        chain = max(
            attention_time + mlp_time + 2 * sum_us
            for attention_time, mlp_time, sum_us in zip(attention, mlp, sums, strict=True)
        )
        return max(steps, chain) + 2 * COPY_SHARE * sum(sums)


def predicted(world: World, sizes: DecoderSizes, tokens: int, mode: str) -> Way:
    """Return the way that is predicted to be fastest for layers of these sizes on this World's machine. The way is
    plain without a profile, or if ranks cannot address each other's memory. The first call is collective. mode: "graph"
    or "eager"."""
    planner = None if world.backend.symmetric_unsupported or tokens == 0 else planner_on(world)
    if planner is None:
        return _PLAIN
    layers = world.cached(("layers", sizes), lambda: LayerPredictor(planner, sizes, world.backend.limits_ctas))
    try:
        return layers.best(near(tokens, planner.predictor.world), mode)
    except NotMeasured as e:
        world.log_once(f"decoder: plain: {e}")
        return _PLAIN
