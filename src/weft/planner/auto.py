"""This module determines the plan that plan="auto" expects to be fastest; `weft.explain(..)` prints the decision.

For a shape in the measured table, this plan is the stored one. For any other shape, it is the plan predicted to be
fastest from the machine's profile. The plan is sequential unless a different plan was measured or predicted to be
faster. Without a profile, and for eager calls that the host may bound, a shape that is not in the table is timed: on a
Hopper GPU its first call times the op's plans (`unmeasured`), and if several plans are predicted to be about equally
fast, it times these. weft reports once that it cannot use a profile file.
Ranks that share a GPU run no timing, and use the decisions of the most similar machine with a profile.

All ranks must choose the same plan, so the ranks compare their profiles once. Predictions use the launch time that the
slowest host measures at its start, which all ranks exchange. A GPU whose speed differs from its profile (`self_check`)
only causes a warning.
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

from ..architectures import device_capability, features
from ..backends import library_gemm
from ..chooser import LAUNCH_MODES, AnyTrial
from ..cost.model import ITEM, SHOTS
from ..op import REGISTRY, Call, Op, collectives, trial_title
from ..ops.recipes import check_name
from ..plans import Decomposed, Plan, Sequential, Signaled
from ..timing import length, repeated, span
from ..world import World
from .parts import NotMeasured
from .predict import Predictor
from .probes.calls import most_low_latency_bytes
from .profile import Profile, ProfileError, find, names, nearest_machine, read, shipped, this_machine
from .search import Decision, Option, Planner, near
from .table import exact, gpu_model, gpu_of, row

__all__ = ["auto", "explain", "unmeasured"]

log = logging.getLogger("weft")
CHECK = (4096, 4096, 2048)  # M, N, K of the self-check's GEMM
ALIKE = 1.25  # the largest ratio of the rows of calls for which one of several close plans is the fastest
# The memory that stays allocated for a trial's plans, divided by the bytes that the collective transfers: each plan has
# its own staging memory, at most two halves.
TRIAL_MEMORY = 6
DRIFT = 0.10  # weft warns if the time of the check GEMM differs from the profile's time by more than this fraction
UNUSABLE = "unusable"  # replaces the planner of a World whose profile cannot be used


def auto(op: str, world: World, m: int, n: int, k: int, mode: str) -> Plan:
    """Return the plan expected to be fastest for one call. mode: "graph" or "eager". The call is collective the first
    time it is made with a shape that is not in the table."""
    if m == 0:
        return Sequential()
    limits = world.backend.limits_ctas
    stored = _stored(gpu_of(world), op, world.size, m, n, k, mode, limits)
    if stored is not None:
        return stored
    passes = REGISTRY[op].elementwise_passes
    planner = planner_on(world) if passes is not None or op in collectives() else None  # other ops lack a model
    if planner is None:
        return Sequential()
    try:
        if passes is not None:
            return planner.sum(m * n * ITEM, passes)
        return planner.nearest(op, m, n, k, mode, limits)
    except NotMeasured as e:
        world.log_once(f"{op}: sequential: {e}")
        return Sequential()


def unmeasured(op: Op, world: World, call: Call) -> Sequence[Plan]:
    """Return plans to time at the first call in addition to the op's own. Such plans exist for a shape without a table
    row if the machine has no profile, or if the host may bound the eager call (`Planner.host_bounds`), and for operands
    of 8 bits, for which no profile has rates. Otherwise the plans are those that predictions cannot rank
    (`Planner.rivals`), unless calls of very different numbers of rows share the trial. The plans are timed only on
    Hopper, because nobody has run the kernels on newer GPUs. Collective at the first call."""
    if (
        not op.variants
        or world.backend.capturing()
        or world.backend.name != "cuda"
        or world.backend.symmetric_unsupported is not None
    ):
        return ()
    if not _is_measured(world.device):
        return ()
    m, n, k = op.sizes(call)
    if not op.scaling(call):
        if all(exact(gpu_model(world.device), op.name, world.size, m, n, k, mode) for mode in LAUNCH_MODES):
            return ()
        planner = _planner_or_unusable(world)
        if planner == UNUSABLE:
            return ()
        if isinstance(planner, Planner) and not planner.host_bounds(op.name, m, n, k):
            plans = _rivals(planner, op.name, (m, n, k), world.backend.limits_ctas)
            return plans if plans and _has_memory(world, op.gemm_call(m, n, k).moved(m)) else ()
    nbytes = op.gemm_call(m, n, k).moved(m)
    shots = [plan for plan in SHOTS if nbytes <= most_low_latency_bytes(op.name, plan, world.size)]
    return [*op.variants, *([op.default(world, Decomposed)] if Decomposed in op.runs else ()), *shots]


def _rivals(planner: Planner, op: str, mnk: tuple[int, int, int], limits: bool) -> Sequence[Plan]:
    """Return the plans that predictions cannot rank; none if calls of very different numbers of rows share a trial."""
    return planner.rivals(op, *mnk, limits) if library_gemm.rows_ratio() <= ALIKE else ()


def _has_memory(world: World, nbytes: int) -> bool:
    """Return whether every rank has free GPU memory for the plans of a trial of calls that transfer this many bytes,
    since a call whose predicted plan fits should not fail in a trial. Collective."""
    free, _ = torch.cuda.mem_get_info(world.device)
    return all(world.exchange(free >= TRIAL_MEMORY * nbytes, "memory for a trial"))


@functools.cache
def _is_measured(device: torch.device) -> bool:
    """Return whether the plans of "auto" were measured on GPUs with this capability."""
    return features(device_capability(device)).wgmma


def _stored(gpu: str, op: str, size: int, m: int, n: int, k: int, mode: str, limits: bool) -> Plan | None:
    """Return the table's plan for exactly this shape, or None. limits: whether a communicator's CTAs can be limited."""
    plan = exact(gpu, op, size, m, n, k, mode)
    limited = isinstance(plan, Signaled) and not plan.copies  # NCCL moves the groups, with the plan's number of CTAs
    return None if limited and not limits else plan


def _planner_or_unusable(world: World) -> Planner | str | None:
    """Return the result of `_make_planner` from this World's first call."""
    return world.cached("planner", lambda: _make_planner(world))


def planner_on(world: World) -> Planner | None:
    """Return the Planner of this World's machine, or None if there is no usable profile. Collective at the first
    call."""
    planner = _planner_or_unusable(world)
    return planner if isinstance(planner, Planner) else None


def _make_planner(world: World) -> Planner | str | None:
    """Return the Planner of this World's machine; None without a profile, UNUSABLE if the file cannot be used.
    Collective."""
    if world.backend.name != "cuda" or world.size == 1:
        return None
    # A rank whose shape is in the table, or which has no rows, exchanges nothing here. The next check of the call then
    # raises Mismatch.
    world.check_same_on_all_ranks('the first call with plan="auto"')
    profile, problem = None, None
    shares, machine = world.backend.shares_gpu, this_machine(world.device, world.size)
    try:
        profile = nearest_machine(machine) if shares else find(machine)
    except ProfileError as e:
        problem = str(e)
    except Exception as e:  # the other ranks must learn of the failure
        problem = f"no profile can be read: {type(e).__name__}: {e}"
    launch = time_launch(world.device) if profile and not shares else None
    own_profile = problem or (profile.digest if profile else None), launch
    digests, launches = zip(*world.exchange(own_profile, "profile"), strict=True)
    if all(digest is None for digest in digests):
        return None
    planner = None
    if profile is not None and len(set(digests)) == 1:
        try:  # all ranks have the same profile, so either all ranks fail or none does
            planner = planner_of(profile, host_time(launches, profile.constant("launch")))
        except Exception as e:
            problem = f"the planner cannot use its profile: {type(e).__name__}: {e}"
    if problem or profile is None or len(set(digests)) > 1:
        problem = problem or f"the ranks have different profiles ({', '.join(map(str, digests))})"
        world.log_once(f'"auto" is sequential for shapes that were not measured: {problem}')
        return UNUSABLE
    drift = None if shares else self_check(profile, world.device)
    if drift is not None and abs(drift - 1) > DRIFT:
        log.warning(
            "rank %d: a GEMM takes %.0f%% of its time in the profile of %s: clocks or versions changed since "
            "%s, and predictions are off by as much; `weft tune --again` measures anew",
            world.rank,
            100 * drift,
            profile.machine.name,
            profile.created[:10],
        )
    return planner


def self_check(profile: Profile, device: torch.device) -> float | None:
    """Return the current time of the check GEMM divided by its time in the profile. Return None if the profile has no
    such time, or if there is no free memory for the operands. The measurement lasts about 20 ms."""
    known = profile.constant("check")
    if known is None:
        return None
    try:
        return time_check(device) / known
    except torch.OutOfMemoryError:
        return None


def time_check(device: torch.device) -> float:
    """Return the time of the check GEMM in us: the median of 5 runs of 20, on the current stream."""
    m, n, k = CHECK
    generator = torch.Generator(device).manual_seed(0)  # does not change the user's generator
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=generator) for rows in (m, n))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    times = []
    for i in range(6):
        events = span(repeated(lambda: torch.mm(x, w.t(), out=out), 20 if i else 2))
        events[1].synchronize()
        times.append(length(events) / 20)
    return statistics.median(times[1:])


@functools.cache
def time_launch(device: torch.device) -> float | None:
    """Return the time, in us, that the host needs for a copy on a side stream and the event that orders it; None
    without a GPU. The measurement lasts about 2 ms."""
    if device.type != "cuda":
        return None
    word, stream, side = torch.zeros(2, device=device), torch.cuda.current_stream(device), torch.cuda.Stream(device)
    times = []
    for _ in range(6):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(50):
            with torch.cuda.stream(side):
                word[:1].copy_(word[1:], non_blocking=True)
            stream.wait_event(side.record_event())
        times.append((time.perf_counter() - began) / 50 * 1e6)
    torch.cuda.synchronize(device)
    return statistics.median(times[1:])


def host_time(launches: Iterable[float | None], profiled: float | None = None) -> float | None:
    """Return the slowest rank's time, rounded to the profile's time (or 1 us) multiplied by a power of two, so that
    small differences between two starts do not change plans."""
    known, unit = [us for us in launches if us is not None], profiled or 1.0
    return unit * 2.0 ** round(math.log2(max(known) / unit)) if known else None


def _timed_later(planner: Planner, op: str, mnk: tuple[int, int, int], mode: str, limits: bool) -> str:
    """Return words on the plans that `unmeasured` lists for such calls; "" if it lists none."""
    if not REGISTRY[op].variants:
        return ""
    if planner.host_bounds(op, *mnk):
        reason = "the host may bound such a call, so Hopper GPUs time the plans" if mode == "eager" else ""
    else:
        rivals = len(_rivals(planner, op, mnk, limits))
        reason = f"{rivals} plans are too close to be ranked, so Hopper GPUs time them" if rivals else ""
    return f"; {reason} at the first eager call" if reason else ""


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
    """Return the plan that "auto" runs for this shape, the reason, and the predicted times of all candidates.
    `weft.explain(...)` is this function.

    Args:
        op: "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce" or "matmul_all_to_all". For any other op,
            pass the World that timed a call of these sizes; the Decision then has the measured times.
        m, n, k: sizes of the GEMM on one rank; m counts the rows of all ranks (all-to-all: of the rank that sends
            most).
        world: the World, with its trials of earlier calls, or the number of GPUs. Default: the profile's number.
        mode: "graph" (captured in a CUDA graph) or "eager". The host's time of an eager call is scaled as "auto" scaled
            it in this process; before the first call of "auto" it is the profile's.
        profile: a Profile, a file, or the name of a profile that ships with weft ("nvidia-h200-x4"). Default: this
        machine's.
        received: for an all-to-all, the number of rows of the rank that receives most, if it exceeds m.
        recipe: "tensor", "row" or "block", for 8-bit operands. No profile has rates for them: "auto" times plans at the
            first call of a size, and `world` stores the times. Without an earlier call nothing is predicted.

    Returns:
        A Decision; print it.

    Raises:
        ProfileError: there is no profile, it cannot be used, or it lacks a measurement that the prediction needs.
        TypeError: a size is not an int.
        ValueError: the op or mode is unknown, or a size is below 1.
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
        check_name(op, recipe)
    title, size = trial_title(op, recipe or ""), world.size if isinstance(world, World) else world
    trial = world.choices.last(title, (m, n, k)) if isinstance(world, World) else None
    if title != op or op not in collectives():
        return _explained_by_trial(op, (m, n, k), size or 0, mode, title, trial)
    shares = isinstance(world, World) and world.backend.shares_gpu
    used_profile = profile_for(profile, size, shares)
    if size is not None and size != used_profile.machine.world:
        raise ProfileError(
            f"the profile of {used_profile.machine.name} is not of {size} GPUs; weft.simulate scales a profile"
        )
    limits = world.backend.limits_ctas if isinstance(world, World) else True
    planner, gpus = planner_of(used_profile), used_profile.machine.world
    decision = planner.decide(op, m, n, k, mode, m % gpus == 0, received, limits=limits)
    plan = _stored(used_profile.machine.gpu, op, gpus, m, n, k, mode, limits)
    if plan is not None:
        measured = row(used_profile.machine.gpu, op, gpus, m, n, k, mode)
        assert measured is not None
        time = "" if measured.us is None else f"{measured.us:.1f} us, "
        why = f"measured: {time}{measured.speedup:.2f}x as fast as cuBLAS + NCCL; the times below are predicted"
    else:
        plan, planned_m = planner.nearest(op, m, n, k, mode, limits), near(m, gpus)
        why = decision.why + ("" if planned_m == m else f"; as for M {planned_m}, the next that plans are found for")
        why += "" if shares else _timed_later(planner, op, (m, n, k), mode, limits)
    if shares:
        why = f"ranks that share a GPU decide as on {used_profile.machine.name}: {why}"
    if isinstance(world, World) and world.multi_node_unsupported:
        plan = Sequential()
        why = f"nothing else was timed there, and {world.multi_node_unsupported}; times are of one node"
    if trial is not None:
        plan, why = next(iter(trial.faster[mode]), plan), trial.timings(mode)
    options = decision.options
    if all(o.plan != plan for o in options):
        with contextlib.suppress(NotMeasured):
            us = planner.predictor.time(op, plan, m, n, k, mode, received)
            options = tuple(sorted([*options, Option(plan, us)], key=lambda o: o.us))
    return replace(decision, plan=plan, why=why, options=options)


def _explained_by_trial(
    op: str, sizes: tuple[int, int, int], size: int, mode: str, title: str, trial: AnyTrial | None
) -> Decision:
    """Return `explain`'s Decision for calls without predictions, such as calls with 8-bit operands. The Decision comes
    from the trial of an earlier call."""
    if trial is not None:
        why = trial.timings(mode) if title == op else f"{title}: {trial.timings(mode)}"
        return Decision(op, *sizes, size, mode, trial.chosen(mode), why, _timed(trial, mode))
    if title == op:
        raise ValueError(f"the planner predicts {sorted(collectives())}, not {op!r}, and no such call was timed")
    why = f"no profile has rates of {title}, and no call of this size was timed: the first one is"
    return Decision(op, *sizes, size, mode, Sequential(), why, ())


def _timed(trial: AnyTrial, mode: str) -> tuple[Option, ...]:
    """Return the plans of a trial with their times, starting with the fastest plan."""
    return tuple(sorted((Option(plan, time.us(mode)) for plan, time in trial.times.items()), key=lambda o: o.us))


def profile_for(profile: Profile | Path | str | None, size: int | None, shares: bool = False) -> Profile:
    """Return the profile that `explain` uses for its argument `profile`, for `size` GPUs if the argument does not
    determine their number. shares: the ranks share a GPU."""
    if isinstance(profile, Profile):
        return profile
    if profile is not None:
        named = shipped(profile) if isinstance(profile, str) else None
        if named is None and not Path(profile).exists():
            raise ProfileError(f"{profile} is neither a file nor a profile that ships with weft: {', '.join(names())}")
        return named or read(Path(profile))
    if torch.cuda.is_available():
        machine = this_machine(torch.device("cuda", torch.cuda.current_device()), size or torch.cuda.device_count())
        measured = nearest_machine(machine) if shares else find(machine)
        if measured is not None:
            return measured
        raise ProfileError(f"{machine.name} was not measured: run `weft tune`")
    raise ProfileError(f"no GPU here, so name a profile: a file, or one that ships with weft: {', '.join(names())}")


_planners: dict[tuple[str, float | None], Planner] = {}


def planner_of(profile: Profile, launch: float | None = None) -> Planner:
    """Return the Planner that all Worlds of a machine share: fitting a planner takes a second, and its decisions are
    the same for all Worlds. launch: as for `Predictor`; None: the time that the process's last World has measured, if
    one has, so that `explain` predicts what "auto" predicts there."""
    if launch is None:
        launch = next((known_launch for digest, known_launch in reversed(_planners) if digest == profile.digest), None)
    key = profile.digest, launch
    if key not in _planners:
        _planners[key] = Planner(Predictor(profile, launch=launch))
    return _planners[key]
