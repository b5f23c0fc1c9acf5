"""What the chooser expects of plan="auto": what is stored as the fastest for exactly this op, M, N, K, or predicted to
be from the machine's profile; and `weft.explain(..)`, which says so.

Neither takes a plan measured or predicted slower than sequential. Without a profile, a shape that is not stored is
sequential until it is timed: on a Hopper GPU the op's variants then run beside it at the first call (`unmeasured`). A
profile that is there and cannot be used is said once. Ranks that share a GPU, where no time says anything, decide as on
the nearest machine that was measured, and time nothing.

All ranks must take the same plan, so they compare their profiles once. Of what a rank measures at its start, the
slowest host's time for a launch is computed with, which all ranks know; a GPU's drift (the self-check) is said.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..chooser import LAUNCHED, AnyTrial, length, span
from ..op import REGISTRY, Call, Op, collectives, trial_title
from ..ops.recipes import SCALINGS
from ..plans import Decomposed, OneShot, Plan, Sequential, Signaled
from ..world import World
from .parts import ITEM, Lacks
from .predict import Predictor
from .profile import Profile, ProfileError, find, names, nearest_machine, read, shipped, this_machine
from .search import Decision, Option, Planner, near
from .table import exact, gpu_model, gpu_of

__all__ = ["auto", "explain", "unmeasured"]

log = logging.getLogger("weft")
CHECK = (4096, 4096, 2048)  # the GEMM of the self-check
DRIFT = 0.10  # a GPU further than this from its profile is said to be
UNUSABLE = "unusable"
GENERATION = 9  # Hopper: the first number of its compute capability


def auto(op: str, world: World, m: int, n: int, k: int, mode: str) -> Plan:
    """The expected plan of one call, `mode` "graph" or "eager". Collective the first time that the table does not have
    it."""
    if m == 0:
        return Sequential()
    limits = world.backend.limits_ctas
    stored = _stored(gpu_of(world), op, world.size, m, n, k, mode, limits)
    if stored is not None:
        return stored
    passed = REGISTRY[op].alone
    planner = planner_on(world) if passed is not None or op in collectives() else None  # of others there is no model
    if planner is None:
        return Sequential()
    try:
        if passed is not None:
            return planner.sum(m * n * ITEM, passed)
        return planner.nearest(op, m, n, k, mode, limits)
    except Lacks as e:
        world.log_once(f"{op}: sequential: {e}")
        return Sequential()


def unmeasured(op: Op, world: World, call: Call) -> Sequence[Plan]:
    """Return the plans that are timed beside those that the op names, where the machine has neither a profile nor this
    shape's row, or operands are of 8 bits, for which no profile has rates; and where its GPUs are Hopper's: of a newer
    one's kernels nobody knows that they are right. Collective the first time."""
    if not op.variants or world.capturing() or world.backend.name != "cuda" or world.symmetric_reason is not None:
        return ()
    if _generation(world.device) != GENERATION:
        return ()
    if not op.scaling(call):
        stored = (exact(gpu_model(world.device), op.name, world.size, *op.sizes(call), mode) for mode in LAUNCHED)
        if all(stored) or _known(world) is not None:
            return ()
    return [*op.variants, *(op.default(world, kind) for kind in (Decomposed, OneShot) if kind in op.runs)]


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _limited(plan: Plan) -> bool:
    """Whether a communicator has to be held to the plan's number of CTAs."""
    return isinstance(plan, Signaled) and not plan.copies


def _stored(gpu: str, op: str, size: int, m: int, n: int, k: int, mode: str, limits: bool) -> Plan | None:
    plan = exact(gpu, op, size, m, n, k, mode)
    return None if plan is not None and _limited(plan) and not limits else plan


def _known(world: World) -> Planner | str | None:
    return world.cached("planner", lambda: _planner(world))


def planner_on(world: World) -> Planner | None:
    """What decides on this World's machine; None without a profile of use. Collective the first time."""
    planner = _known(world)
    return planner if isinstance(planner, Planner) else None


def _planner(world: World) -> Planner | str | None:
    """Collective. What decides on this World's machine; None without a profile, UNUSABLE where the file is no use."""
    if world.backend.name != "cuda" or world.size == 1:
        return None
    world.check_same_on_all_ranks(
        'the first call with plan="auto"'
    )  # a rank whose shape is measured, or empty, is elsewhere
    profile, said = None, None
    shares, machine = world.backend.shares_gpu, this_machine(world.device, world.size)
    try:
        profile = nearest_machine(machine) if shares else find(machine)
    except ProfileError as e:
        said = str(e)
    except Exception as e:  # another rank may be well: it has to hear of this one
        said = f"no profile can be read: {type(e).__name__}: {e}"
    launch = time_launch(world.device) if profile and not shares else None
    seen, launches = zip(*world.exchange((said or (profile.digest if profile else None), launch)), strict=True)
    if all(s is None for s in seen):
        return None
    planner = None
    if profile is not None and len(set(seen)) == 1:
        try:  # of the same profile, so all ranks fail or none
            planner = planner_of(profile, host_time(launches))
        except Exception as e:
            said = f"the planner cannot use its profile: {type(e).__name__}: {e}"
    if said or profile is None or len(set(seen)) > 1:
        said = said or f"the ranks have different profiles ({', '.join(map(str, seen))})"
        world.log_once(f'"auto" is sequential for shapes that were not measured: {said}')
        return UNUSABLE
    drift = None if shares else self_check(profile, world.device)
    if drift is not None and abs(drift - 1) > DRIFT:
        log.warning(
            "rank %d: a GEMM takes %.0f%% of the time that the profile of %s says: clocks or versions changed since "
            "%s, and predictions are off by as much; `weft tune --again` measures anew",
            world.rank,
            100 * drift,
            profile.machine.name,
            profile.made[:10],
        )
    return planner


def self_check(profile: Profile, device: torch.device) -> float | None:
    """How many times as long the profile's check GEMM takes now, in about 20 ms; None where the profile has none, or a
    model has left no memory for it."""
    known = profile.constant("check")
    if known is None:
        return None
    try:
        return time_check(device) / known
    except torch.OutOfMemoryError:
        return None


def time_check(device: torch.device) -> float:
    """us of the check GEMM: the median of 5 runs of 20, on the current stream."""
    m, n, k = CHECK
    own = torch.Generator(device).manual_seed(0)  # the user's numbers stay as they are
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=own) for rows in (m, n))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(x, w.t(), out=out)

    took = []
    for i in range(6):
        events = span(functools.partial(multiply, 20 if i else 2))
        events[1].synchronize()
        took.append(length(events) / 20)
    return statistics.median(took[1:])


@functools.cache
def time_launch(device: torch.device) -> float | None:
    """us that the host takes for a copy on a stream and the event that orders what comes next, in about 2 ms; None
    without a GPU."""
    if device.type != "cuda":
        return None
    word, stream, side = torch.zeros(2, device=device), torch.cuda.current_stream(device), torch.cuda.Stream(device)
    took = []
    for _ in range(6):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(50):
            with torch.cuda.stream(side):
                word[:1].copy_(word[1:], non_blocking=True)
            stream.wait_event(side.record_event())
        took.append((time.perf_counter() - began) / 50 * 1e6)
    torch.cuda.synchronize(device)
    return statistics.median(took[1:])


def host_time(launches: Iterable[float | None]) -> float | None:
    """The slowest rank's, to a power of two: what little it varies from start to start changes no plan."""
    known = [us for us in launches if us is not None]
    return 2.0 ** round(math.log2(max(known))) if known else None


def explain(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    world: World | int | None = None,
    mode: str = "graph",
    profile: Profile | Path | str | None = None,
    received: int | None = None,
    recipe: str | None = None,
) -> Decision:
    """What "auto" would run for this shape, among what, and the predicted times of all of it. `weft.explain(...)` is
    this function.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce" or "matmul_all_to_all"; or any other, with
            the World of a call of these sizes that was timed: then the times are what it measured.
        m, n, k: the GEMM on one rank; m counts the rows of all ranks (all-to-all: of the rank that sends most).
        world: the World, of which trials of earlier calls count, or the number of GPUs. Default: the profile's.
        mode: "graph" (captured in a CUDA graph) or "eager".
        profile: a Profile, a file, or the name of one that ships with weft ("nvidia-h200-x4"). Default: this machine's.
        received: all-to-all: rows that the rank gets which gets most, where that is more than m.
        recipe: of 8-bit operands, "tensor", "row" or "block". No profile has rates of these, so "auto" times plans at
            the first call of a size, which `world` knows; without such a call nothing is predicted.

    Returns:
        A Decision; print it.

    Raises:
        ProfileError: there is no profile, or it cannot be used, or it lacks what this needs.
        TypeError: a size that is no int.
        ValueError: an unknown op or mode, a size below 1.
    """
    if mode not in ("graph", "eager"):
        raise ValueError(f'{op}: mode {mode!r} must be "graph" or "eager"')
    try:
        m, n, k = map(operator.index, (m, n, k))
    except TypeError:
        raise TypeError(f"{op}: M {m!r}, N {n!r} and K {k!r} must be ints") from None
    if min(m, n, k) < 1:
        raise ValueError(f"{op}: M {m}, N {n} and K {k} must be at least 1")
    if recipe is not None:
        return _explained_in_8_bits(op, (m, n, k), world, mode, recipe)
    trial = world.choices.last(op, (m, n, k)) if isinstance(world, World) else None
    if op not in collectives():
        if trial is None or not isinstance(world, World):
            raise ValueError(f"the planner knows {sorted(collectives())}, not {op!r}, of which no such call was timed")
        timed = _timed(trial, mode)
        return Decision(op, m, n, k, world.size, mode, trial.taken(mode), trial.said(mode), timed)
    size = world.size if isinstance(world, World) else world
    shares = isinstance(world, World) and world.backend.shares_gpu
    found = profile_for(profile, size, shares)
    if size is not None and size != found.machine.world:
        raise ProfileError(f"the profile of {found.machine.name} is not of {size} GPUs; weft.simulate scales one")
    limits = world.backend.limits_ctas if isinstance(world, World) else True
    planner, gpus = planner_of(found), found.machine.world
    decision = planner.decide(op, m, n, k, mode, m % gpus == 0, received, limits=limits)
    plan = _stored(found.machine.gpu, op, gpus, m, n, k, mode, limits)
    why = "measured: a row of exactly this shape is in the table; times are predicted"
    if plan is None:
        plan, at = planner.nearest(op, m, n, k, mode, limits), near(m, gpus)
        why = decision.why + ("" if at == m else f"; as for M {at}, the next that plans are found for")
    if shares:
        why = f"ranks that share a GPU decide as on {found.machine.name}: {why}"
    if isinstance(world, World) and world.nodes_reason:
        plan, why = Sequential(), f"nothing else was timed there, and {world.nodes_reason}; times are of one node"
    if trial is not None:
        plan, why = trial.faster[mode] or plan, trial.said(mode)
    options = decision.options
    if all(o.plan != plan for o in options):
        with contextlib.suppress(Lacks):
            us = planner.predictor.time(op, plan, m, n, k, mode, received)
            options = tuple(sorted([*options, Option(plan, us)], key=lambda o: o.us))
    return replace(decision, plan=plan, why=why, options=options)


def _explained_in_8_bits(
    op: str, sizes: tuple[int, int, int], world: World | int | None, mode: str, recipe: str
) -> Decision:
    """`explain` of 8-bit operands: what the trial of a call found."""
    if recipe not in SCALINGS:
        raise ValueError(f"{op}: recipe {recipe!r} is not one of {sorted(SCALINGS)}")
    trial = world.choices.last(trial_title(op, recipe), sizes) if isinstance(world, World) else None
    size = world.size if isinstance(world, World) else world or 0
    if trial is None:
        why = f"no profile has rates of 8-bit GEMMs ({recipe}), and no call of this size was timed: the first one is"
        return Decision(op, *sizes, size, mode, Sequential(), why, ())
    why = f"8-bit operands by {recipe}; {trial.said(mode)}"
    return Decision(op, *sizes, size, mode, trial.taken(mode), why, _timed(trial, mode))


def _timed(trial: AnyTrial, mode: str) -> tuple[Option, ...]:
    """The plans of a trial, the fastest first."""
    return tuple(sorted((Option(plan, took.us(mode)) for plan, took in trial.took.items()), key=lambda o: o.us))


def profile_for(given: Profile | Path | str | None, size: int | None, shares: bool = False) -> Profile:
    """What `explain` takes as `profile`, for `size` GPUs where that is left open; shares: for ranks that share one."""
    if isinstance(given, Profile):
        return given
    if given is not None:
        named = shipped(given) if isinstance(given, str) else None
        if named is None and not Path(given).exists():
            raise ProfileError(f"{given} is neither a file nor a profile that ships with weft: {', '.join(names())}")
        return named or read(Path(given))
    if torch.cuda.is_available():
        machine = this_machine(torch.device("cuda", torch.cuda.current_device()), size or torch.cuda.device_count())
        found = nearest_machine(machine) if shares else find(machine)
        if found is not None:
            return found
        raise ProfileError(f"nobody measured {machine.name}: run `weft tune`")
    raise ProfileError(f"no GPU here, so name a profile: a file, or one that ships with weft: {', '.join(names())}")


_planners: dict[tuple[str, float | None], Planner] = {}


def planner_of(profile: Profile, launch: float | None = None) -> Planner:
    """One for all Worlds of a machine: what it is fitted to takes a second, and what it decided is the same for all.
    launch: as Predictor takes it."""
    key = profile.digest, launch
    if key not in _planners:
        _planners[key] = Planner(Predictor(profile, launch=launch))
    return _planners[key]
