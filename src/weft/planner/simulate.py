"""Predicted times of ops and layers on machines that were not measured: other links, fewer GPUs, many nodes.

The profile of a real machine is scaled to a topology, and the same predictor uses the scaled profile. GEMMs, tiles and
slow-downs stay as measured, because the GPUs are those of the profile. Times of transfers are scaled:

    bytes      the whole tensor crosses every boundary of a level (a ring through all links of the boundary at once), so
               the slowest boundary sets the rate; the library's share of a link's nominal rate, by size, is the
               profile's
    latency    steps of a tree or of a ring, whichever takes less time, each with its level's latency; the rest of the
               profile's shortest time (launch, protocol) stays
    pulling    programs that read peers keep their measured rate, but are no faster than a copy engine on a slower link

Copies, pulling programs and their barriers need memory that all ranks can address: a topology of one level. Topologies
of several levels allow plans with NCCL's collectives (sequential, decomposed all-reduce, signaled). Topologies of two
levels also allow the two-level plans, if GPUs of the inner level can address each other's memory. NCCL's collectives
over all ranks follow the first rule: all network cards of a node together carry the whole tensor once, as NCCL's rings
do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..cost.fused import Pulling
from ..cost.model import ITEM, GemmCall
from ..cost.signaled import Signaling
from ..cost.two_level import OverNodes
from ..op import REGISTRY, collectives, op_around
from ..plans import Fused, Plan, Sequential, Signaled
from .parts import NotMeasured
from .predict import Predictor
from .profile import SEND_TO_NODE, Latency, Profile
from .search import Decision, Planner, brief, gain

CURVE_SIZES = tuple(1 << i for i in range(16, 33))
# For each collective, the bytes that cross a boundary divided by the tensor's bytes.
MOVED = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}


@dataclass(frozen=True)
class Level:
    """A level of `count` GPUs, or of `count` groups of the level below. latency_us: the latency of one message. gbs:
    GB/s of a GPU in one direction."""

    count: int
    latency_us: float
    gbs: float


@dataclass(frozen=True)
class Topology:
    """The levels of a machine, starting with the innermost. The number of GPUs is the product of the levels' counts.
    peer_access: GPUs of the innermost level can address each other's memory."""

    name: str
    levels: tuple[Level, ...]
    peer_access: bool = True

    def __post_init__(self) -> None:
        wrong = [x for x in self.levels if type(x.count) is not int or x.count < 1 or x.latency_us < 0 or x.gbs <= 0]
        if not self.levels or wrong:
            raise ValueError(f"{self}: a level has a whole number of GPUs, at least one, a latency and a rate")

    @property
    def gpus(self) -> int:
        return math.prod(x.count for x in self.levels)

    @property
    def one_level(self) -> bool:
        return self.peer_access and all(x.count == 1 for x in self.levels[1:])

    def resized(self, gpus: int) -> Topology:
        """Return a topology of `gpus` GPUs with the same links: inner levels are filled first, and the outermost level
        grows."""
        counts, left = [], gpus
        for x in self.levels[:-1]:
            counts.append(math.gcd(x.count, left))
            left //= counts[-1]
        counts.append(left)
        levels = tuple(replace(x, count=c) for x, c in zip(self.levels, counts, strict=True))
        return replace(self, levels=levels)

    def rate(self) -> float:
        """Return the rate, in GB/s, of a GPU in a ring through all GPUs. The slowest boundary determines the rate; all
        GPUs inside a boundary share its links."""
        inside, rates = 1, []
        for x in self.levels:
            if x.count > 1:
                rates.append(x.gbs * inside)
            inside *= x.count
        return min(rates, default=math.inf)

    def latency(self) -> float:
        """Return the time, in us, of all steps of a ring or a tree through all GPUs in one direction."""
        used = [x for x in self.levels if x.count > 1]
        tree = sum(math.ceil(math.log2(x.count)) * x.latency_us for x in used)
        ring = (self.gpus - 1) * max((x.latency_us for x in used), default=0.0)
        return min(tree, ring)


# Rates are the makers' figures: an NVLink 4 link carries 26.562 GB/s one way (nvidia-smi nvlink -s), and a GPU has 18;
# PCIe 5 x16 carries 64 GB/s, PCIe 4 x16 32 GB/s, a 400 Gb/s network card 50 GB/s, one for each GPU. The latencies are
# typical orders of magnitude.
def nvlink(gpus: int = 8, links: int = 18) -> Topology:
    """Return the topology of one node whose GPUs each have `links` NVLink 4 links to a switch."""
    return Topology(f"NVLink, {links} links", (Level(gpus, 1.3, 26.562 * links),))


def pcie(gpus: int = 8, generation: int = 5) -> Topology:
    """Return the topology of one node whose GPUs each have 16 lanes of PCIe."""
    return Topology(f"PCIe {generation}", (Level(gpus, 2.5, 64.0 * 2 ** (generation - 5)),))


def cluster(gpus: int, per_node: int = 8, gbs: float = 50.0) -> Topology:
    """Return the topology of nodes of GPUs with NVLink, connected by a network of `gbs` GB/s per GPU in each direction.
    If there are fewer GPUs than `per_node`, they form one smaller node. Raises ValueError if `gpus` is not a multiple
    of `per_node`."""
    per_node = min(per_node, gpus)
    if per_node < 1 or gpus % per_node:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {per_node}")
    return Topology(
        f"nodes of {per_node}, {gbs:g} GB/s a GPU",
        (Level(per_node, 1.3, 26.562 * 18), Level(gpus // per_node, 5.0, gbs)),
    )


class ScaledPredictor(Predictor):
    """A predictor of a topology that was not measured. The predictor scales the times of transfers, and keeps the
    fitted parameters of the measured predictor."""

    def __init__(self, measured: Predictor, topology: Topology, measured_on: Topology) -> None:
        self.measured, self.topology = measured, topology
        profile = measured.profile
        self.slower = measured_on.levels[0].gbs / topology.levels[0].gbs if topology.one_level else 1.0
        machine = replace(profile.machine, world=topology.gpus, link=topology.name)
        rows = _latencies(measured, topology, measured_on)
        super().__init__(replace(profile, machine=machine, latencies=tuple(rows), calls=()))
        used = [x for x in topology.levels if x.count > 1]
        if topology.peer_access and len(used) == 2 and topology.levels[0].count > 1:
            self.over_nodes = _over_nodes(measured, used[0], used[1], measured_on)

    def measured_plans(self, op: str) -> list[Plan]:
        plans = self.measured.measured_plans(op) if self.topology.one_level else []
        return [plan for plan in plans if isinstance(plan, Fused)]

    def parameters(self, op: str, plan: Plan) -> object:
        if self.cost(op, plan).start(plan) is None:
            return None
        parameters = self.measured.parameters(op, plan)
        if isinstance(parameters, Signaling):
            return parameters
        if not isinstance(parameters, Pulling):
            return super().parameters(op, plan)
        most = max(
            (c.sizes[-1] / c.us[-1] / 1e3 for (operation, _), c in self.curves.items() if operation == "copy"),
            default=math.inf,
        )
        rate, drain = (min(rate, most) for rate in (parameters.rate, parameters.drain))
        return replace(parameters, rate=rate, drain=drain) if self.slower > 1 else parameters

    def _correction(self, op: str, plan: Plan) -> Callable[[int, int, int], float]:
        return self.measured._correction(op, plan)


def _over_nodes(measured: Predictor, node: Level, network: Level, measured_on: Topology) -> OverNodes:
    """Return the times of two levels: a node is a separate topology, a transfer over the network takes as long as
    between a pair of GPUs, and an all-reduce takes as long as over one GPU per node."""
    inside = Planner(ScaledPredictor(measured, Topology("a node", (node,)), measured_on))
    across = ScaledPredictor(measured, Topology("a GPU a node", (network,), peer_access=False), measured_on)
    pair = ScaledPredictor(measured, Topology("a pair", (replace(network, count=2),), peer_access=False), measured_on)

    def node_us(call: GemmCall) -> float:
        op = op_around(call.collective)
        us = inside.decide(op, call.m, call.n, call.k, "graph", call.m % node.count == 0).us
        if us is None:
            raise NotMeasured(f"{op} {call.m} x {call.n} x {call.k} cannot be predicted")
        return us

    return OverNodes(
        network.count,
        inside.predictor,
        node_us,
        send=lambda nbytes: pair.latency("all_gather", 2 * nbytes),
        all_reduce=lambda nbytes: across.latency("all_reduce", nbytes),
    )


def over_nodes(profile: Profile, nodes: int) -> Topology:
    """Return a topology of `nodes` nodes like the profile's machine, connected by the link that `weft tune` measured
    between nodes. The link has the latency of the shortest message and the rate of the longest message. Raises
    NotMeasured if the profile lacks this link."""
    sends = {x.nbytes: x.us for x in profile.latencies if x.operation == SEND_TO_NODE}
    if len(sends) < 2:
        raise NotMeasured(f"the link between nodes was not measured on {profile.machine.name}")
    shortest, longest = min(sends), max(sends)
    gbs = (longest - shortest) / max(sends[longest] - sends[shortest], 1e-3) / 1e3
    links, short = links_of(profile), sends[shortest]
    return Topology(f"nodes of {links.gpus}, {gbs:.1f} GB/s a GPU", (*links.levels, Level(nodes, short, gbs)))


def _latencies(measured: Predictor, topology: Topology, measured_on: Topology) -> list[Latency]:
    rows = []
    w, w0 = topology.gpus, measured_on.gpus
    for (operation, ctas), curve in measured.curves.items():
        if operation in MOVED:
            short = curve(0)
            base = max(short - measured_on.latency() * MOVED[operation], 0.0)
            for size in CURVE_SIZES:
                moved = size * (w - 1) / w
                same = moved * w0 / (w0 - 1)  # bytes of the tensor for which each measured GPU moved as many bytes
                bandwidth = (curve(same) - short) * measured_on.rate() / topology.rate()
                us = base + topology.latency() * MOVED[operation] + max(bandwidth, 0.0)
                rows.append(Latency(operation, ctas, size, us))
        elif operation == "copy" and topology.one_level:
            slower = measured_on.levels[0].gbs / topology.levels[0].gbs
            rows += [
                Latency(operation, ctas, s, curve(0) + max(curve(s) - curve(0), 0.0) * slower) for s in CURVE_SIZES
            ]
        elif operation == "barrier" and topology.one_level:
            rows.append(Latency(operation, ctas, 0, max(curve(0) + topology.latency() - measured_on.latency(), 1.0)))
        elif operation == "local":
            rows += [Latency(operation, ctas, s, curve(s)) for s in CURVE_SIZES]
        elif operation == "sum":
            share = (w + 1) / (w0 + 1)  # one partial sum of every rank is read, and the sum is written
            rows += [Latency(operation, ctas, s, curve(0) + (curve(s) - curve(0)) * share) for s in CURVE_SIZES]
    return rows


# -- ops and layers --------------------------------------------------------------------------------------------------
SimulatedCall = tuple[str, int, int, int]  # op, M, N, K on one rank


def calls_of(workload: str, size: tuple[int, int, int], gpus: int) -> list[SimulatedCall]:
    """Return the ops of a workload, with their sizes on one of `gpus` ranks. size: (tokens, hidden, intermediate) for
    "mlp" and "decoder", (M, N, K) of the whole layer for an op. A decoder's ops are its four projections, without
    attention."""
    part = lambda n: max(-(-n // gpus) + 7, 8) // 8 * 8  # noqa: E731
    m, a, b = size
    if workload in ("mlp", "decoder"):
        gather, scatter = op_around("all_gather"), op_around("reduce_scatter")
        mlp = [(gather, m, part(2 * b), a), (scatter, m, a, part(b))]
        attention = [(gather, m, part(3 * a), a), (scatter, m, a, part(a))]
        return mlp if workload == "mlp" else attention + mlp
    if workload not in collectives():
        raise ValueError(f'{workload!r} is not "mlp", "decoder" or one of {sorted(collectives())}')
    return [(workload, m, part(a), b) if REGISTRY[workload].gathers else (workload, m, a, part(b))]


@dataclass(frozen=True)
class Simulated:
    """The predictions for one size: the times, in us, of the fastest plans, of sequential plans, and of GEMMs and of
    transfers alone."""

    size: tuple[int, int, int]
    us: float
    sequential: float
    gemm: float
    comm: float
    plans: tuple[Plan, ...]

    @property
    def speedup(self) -> float:
        return self.sequential / self.us


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`, which can be printed (`print`) or drawn (`plot`)."""

    topology: Topology
    workload: str
    source: str
    rows: tuple[Simulated, ...]

    def __str__(self) -> str:
        lines = [f"{self.workload} on {self.topology.gpus} GPUs, {self.topology.name} (us, simulated; {self.source})"]
        lines.append(f"{'size':>22} {'sequential':>11} {'best':>9} {'':>6} {'GEMM':>9} {'comm.':>9}  plans")
        for r in self.rows:
            plans = ", ".join(brief(p) for p in r.plans)
            size = " x ".join(map(str, r.size))
            lines.append(
                f"{size:>22} {r.sequential:11.1f} {r.us:9.1f} {r.speedup:5.2f}x {r.gemm:9.1f} {r.comm:9.1f}  {plans}"
            )
        return "\n".join(lines)

    def plot(self, path: Path | str) -> None:
        """Draw, for each size, bars of the best time and of sequential, GEMMs and transfers alone."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6, 1.2 * len(self.rows) + 3), 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        bars = {"sequential": "#b9c0ca", "best plans": "#3b6fb6", "GEMM alone": "#7aa95c", "transfers alone": "#d08a3c"}
        for i, (label, colour) in enumerate(bars.items()):
            values = [(r.sequential, r.us, r.gemm, r.comm)[i] for r in self.rows]
            axes.bar([x + (i - 1.5) * 0.2 for x in range(len(values))], values, 0.19, label=label, color=colour)
        axes.set_xticks(range(len(self.rows)), [" x ".join(map(str, r.size)) for r in self.rows], fontsize=8)
        axes.set_ylabel("us")
        axes.set_title(f"{self.workload}, {self.topology.gpus} GPUs, {self.topology.name} (simulated)", fontsize=10)
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130)


def simulate(
    topology: Topology,
    workload: str,
    sizes: Iterable[tuple[int, int, int]],
    *,
    profile: Profile | Path | str | None = None,
    measured_on: Topology | None = None,
    eight_bits: bool = False,
) -> Simulation:
    """Predict an op or a layer on a topology.

    Args:
        topology: GPUs and links (`nvlink`, `pcie`, `cluster`, or your own levels); the GPUs are the profile's model.
        workload: "mlp", "decoder" (a decoder's projections), or an op ("matmul_all_reduce", ..).
        sizes: (tokens, hidden, intermediate) of the layer, or (M, N, K) of the op, before they are divided over the
            GPUs.
        profile: as in `weft.explain`. Default: this machine's.
        measured_on: the links of the profile's machine. Default: NVLink with as many links as in the profile, or PCIe
            5.
        eight_bits: operands of GEMMs have 8 bits, sums and results 16. No profile has 8-bit rates: an 8-bit GEMM is
            assumed to be as fast as a 16-bit GEMM of half K, whose rows have as many bytes. The Simulation prints this.

    Returns:
        A Simulation.

    Raises:
        ProfileError: there is no profile, it cannot be used, or it lacks a measurement that the simulation needs.
        TypeError: `topology` is not a Topology.
        ValueError: the workload is unknown, an entry of `sizes` is not three positive integers, or `measured_on`
            and the profile have different numbers of GPUs.
    """
    from .auto import profile_for

    if not isinstance(topology, Topology):
        raise TypeError(f"topology {topology!r} is no Topology: weft.planner.simulate.nvlink(8), say")
    sizes = list(sizes)  # a generator can be read only once
    if any(not isinstance(s, Sequence) or len(s) != 3 or any(type(v) is not int or v < 1 for v in s) for s in sizes):
        raise ValueError(f"sizes {sizes}: each is three numbers from 1, whole ones")
    measured_profile = profile_for(profile, None)
    links = measured_on or links_of(measured_profile)
    if links.gpus != measured_profile.machine.world:
        raise ValueError(
            f"measured_on has {links.gpus} GPUs, and the profile of {measured_profile.machine.name} does not"
        )
    return simulate_from(Predictor(measured_profile), topology, workload, sizes, links, eight_bits)


def links_of(profile: Profile) -> Topology:
    machine = profile.machine
    if machine.link.startswith("nvlink"):
        return nvlink(machine.world, int(machine.link.removeprefix("nvlink")))
    if machine.link == "pcie":
        return pcie(machine.world)
    raise ValueError(f"the links of {machine.name} are not known ({machine.link!r}): give measured_on=")


def simulate_from(
    measured: Predictor,
    topology: Topology,
    workload: str,
    sizes: Sequence[tuple[int, int, int]],
    measured_on: Topology,
    eight_bits: bool = False,
) -> Simulation:
    """Simulate with a predictor of the measured machine, which many topologies can share."""
    predictor = ScaledPredictor(measured, topology, measured_on)
    planner, rows = Planner(predictor), []
    for size in sizes:
        plans: list[Plan] = []
        us = sequential = gemm = comm = 0.0
        for op, m, n, k in calls_of(workload, size, topology.gpus):
            k = max(k // 16 * 8, 8) if eight_bits else k
            decision = planner.decide(op, m, n, k, "graph", m % topology.gpus == 0)
            best = _without_signals(decision) if eight_bits else decision
            if best.us is None or decision.sequential is None:
                raise NotMeasured(f"{op} {m} x {n} x {k} cannot be predicted")
            plans.append(best.plan)
            us, sequential = us + best.us, sequential + decision.sequential
            gemm += predictor.gemm(m, n, k)
            call = REGISTRY[op].gemm_call(m, n, k)
            comm += predictor.latency(call.collective, call.moved(m)) if predictor.world > 1 else 0
        if workload in ("mlp", "decoder"):  # the activation reads gate and up, and writes their product
            activation = predictor.latency("local", size[0] * -(-size[2] // topology.gpus) * 3 * ITEM // 2)
            us, sequential = us + activation, sequential + activation
        rows.append(Simulated(size, us, sequential, gemm, comm, tuple(plans)))
    source = f"from the profile of {measured.machine.name}, {measured.profile.source}"
    if eight_bits:
        source += "; 8-bit operands: GEMMs not measured, assumed as fast as 16-bit ones of half K"
    return Simulation(topology, workload, source, tuple(rows))


def _without_signals(decision: Decision) -> Decision:
    """Return the decision among the plans that support 8-bit operands."""
    if not isinstance(decision.plan, Signaled) or decision.sequential is None:
        return decision
    others = (o.plan for o in decision.options if not isinstance(o.plan, Signaled))
    fastest = next(others, Sequential())  # options are sorted by time
    us = next((o.us for o in decision.options if o.plan == fastest), decision.sequential)
    return replace(decision, plan=fastest if decision.sequential > gain("graph") * us else Sequential())
