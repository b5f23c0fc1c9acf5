"""`plan="auto"`: which Plan serves an (op, M, N, K) on this machine, and `weft.plan(..)`, which says so.

In this order: the measured table's row of exactly this shape; the fastest predicted from the machine's profile; where there is
no profile, the row of the nearest shape. None of them takes a plan measured or predicted slower than sequential. A profile that
is there and cannot be used is said once, and what was not measured exactly is sequential then.

All ranks must take the same plan, so they compare their profiles once, and what a rank measures at its start (the self-check)
is said and not computed with.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from ..world import World
from .plan import Plan, Sequential
from .predict import COLLECTIVE, ITEM, Lacks, Predictor
from .profile import Profile, ProfileError, find, names, read, shipped, this_machine
from .search import Decision, Planner
from .table import exact, gpu_model, nearest

log = logging.getLogger("weft")
CHECK = (4096, 4096, 2048)  # the GEMM of the self-check
DRIFT = 0.10  # a GPU further than this from its profile is said to be
UNUSABLE = "unusable"


def auto(op: str, world: World, m: int, n: int, k: int, mode: str) -> Plan:
    """The Plan for one call, `mode` "graph" or "eager". Collective the first time."""
    if m == 0:
        return Sequential()
    gpu = gpu_model(world.device)
    measured = exact(gpu, op, world.size, m, n, k, mode)
    if measured is not None:
        return measured
    planner = world.cached("planner", lambda: _planner(world))
    if planner is None or op not in (*COLLECTIVE, "all_reduce"):
        return nearest(gpu, op, world.size, m, n, k, mode)
    try:
        if op == "all_reduce":
            return planner.sum(m * n * ITEM) if isinstance(planner, Planner) else Sequential()
        return planner.nearest(op, m, n, k, mode) if isinstance(planner, Planner) else Sequential()
    except Lacks as e:
        world.say_once(f"{op}: sequential: {e}")
        return Sequential()


def _planner(world: World) -> Planner | str | None:
    """Collective. What decides on this World's machine; None without a profile, UNUSABLE where the file is no use."""
    if world.backend.name != "cuda" or world.size == 1:
        return None
    profile, said = None, None
    try:
        profile = find(this_machine(world.device, world.size))
    except ProfileError as e:
        said = str(e)
    seen = world.exchange(said or (profile.digest if profile else None))
    if all(s is None for s in seen):
        return None
    if said or profile is None or len(set(seen)) > 1:
        said = said or f"the ranks have different profiles ({', '.join(map(str, seen))})"
        world.say_once(f'"auto" is sequential for shapes that were not measured: {said}')
        return UNUSABLE
    drift = self_check(profile, world.device)
    if drift is not None and abs(drift - 1) > DRIFT:
        log.warning(
            "rank %d: a GEMM takes %.0f%% of the time that the profile of %s says: clocks or versions changed since %s, "
            "and predictions are off by as much; `weft tune` measures again",
            world.rank, 100 * drift, profile.machine.name, profile.made[:10],
        )  # fmt: skip
    return Planner(Predictor(profile))


def self_check(profile: Profile, device: torch.device) -> float | None:
    """How many times as long the profile's check GEMM takes now, in about 20 ms; None where the profile has none."""
    known = profile.constant("check")
    return None if known is None else time_check(device) / known


def time_check(device: torch.device) -> float:
    """us of the check GEMM: the median of 5 runs of 20, on the current stream."""
    m, n, k = CHECK
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    took = []
    for i in range(6):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(20 if i else 2):
            torch.mm(x, w.t(), out=out)
        b.record()
        b.synchronize()
        took.append(a.elapsed_time(b) * 1e3 / 20)
    return statistics.median(took[1:])


def decide(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    world: World | int | None = None,
    mode: str = "graph",
    profile: Profile | Path | str | None = None,
    received: int | None = None,
) -> Decision:
    """What "auto" would run for this shape, among what, and the predicted times of all of it. `weft.plan(...)` is this function.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce" or "matmul_all_to_all".
        m, n, k: the GEMM on one rank; m counts the rows of all ranks (all-to-all: of the rank that sends most).
        world: the World, or the number of GPUs. Default: the profile's.
        mode: "graph" (captured in a CUDA graph) or "eager".
        profile: a Profile, a file, or the name of one that ships with weft ("nvidia-h200-x4"). Default: this machine's.
        received: all-to-all: rows that the rank gets which gets most, where that is more than m.

    Returns:
        A Decision; print it.

    Raises:
        ProfileError: there is no profile, or it cannot be used, or it lacks what this needs.
        ValueError: an unknown op or mode, a size below 1.
    """
    if op not in COLLECTIVE:
        raise ValueError(f"the planner knows {sorted(COLLECTIVE)}, not {op!r}")
    if mode not in ("graph", "eager"):
        raise ValueError(f'{op}: mode {mode!r} must be "graph" or "eager"')
    if min(m, n, k) < 1:
        raise ValueError(f"{op}: M {m}, N {n} and K {k} must be at least 1")
    size = world.size if isinstance(world, World) else world
    found = profile_for(profile, size)
    if size is not None and size != found.machine.world:
        raise ProfileError(f"the profile of {found.machine.name} is not of {size} GPUs; weft.simulate scales one")
    decision = _planner_of(found).decide(op, m, n, k, mode, m % found.machine.world == 0, received)
    measured = exact(found.machine.gpu, op, found.machine.world, m, n, k, mode)
    if measured is None:
        return decision
    return replace(
        decision, plan=measured, why="measured: a row of exactly this shape is in the table; times are predicted"
    )


def profile_for(given: Profile | Path | str | None, size: int | None) -> Profile:
    """What `decide` takes as `profile`, for `size` GPUs where that is left open."""
    if isinstance(given, Profile):
        return given
    if given is not None:
        named = shipped(given) if isinstance(given, str) else None
        if named is None and not Path(given).exists():
            raise ProfileError(f"{given} is neither a file nor a profile that ships with weft: {', '.join(names())}")
        return named or read(Path(given))
    if torch.cuda.is_available():
        machine = this_machine(torch.device("cuda", torch.cuda.current_device()), size or torch.cuda.device_count())
        found = find(machine)
        if found is not None:
            return found
        raise ProfileError(f"nobody measured {machine.name}: run `weft tune`")
    raise ProfileError(f"no GPU here, so name a profile: a file, or one that ships with weft: {', '.join(names())}")


_planners: dict[str, Planner] = {}


def _planner_of(profile: Profile) -> Planner:
    if profile.digest not in _planners:
        _planners[profile.digest] = Planner(Predictor(profile))
    return _planners[profile.digest]
