"""A profile contains the measurements of one machine, and is stored in a file. The predictor computes with these
numbers (`predict.py`).

`weft tune` makes a profile. A profile contains only measurements and no conclusions: times of library GEMMs, of waves
of Triton tiles, and of collectives and copies by size; the factors by which a GEMM and a transfer slow each other down;
and some calls of whole ops. The file of a profile is JSON with one measurement per line, in the user's cache directory.
There is one file for each machine (GPU model, number of ranks, link, versions of torch, Triton and NCCL). Profiles that
ship with weft are `profiles/<gpu>-x<ranks>.json`. A profile that `weft tune` has not finished is valid; the next run
continues it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton

from ..errors import WeftError
from ..op import REGISTRY, collectives
from ..plans import FusedGather, Plan, Signaled
from .table import gpu_model

SEND_TO_NODE = "send to a node"
FORMAT = 3  # version of the file, which includes the format of the plans in it


class ProfileError(WeftError):
    """A profile cannot be used. The message names the profile and the reason."""


@dataclass(frozen=True)
class Hardware:
    """The machine for which a profile is valid. link: "nvlink18" (18 links a GPU), "pcie", "network" if ranks span
    hosts."""

    gpu: str
    world: int
    link: str
    sms: int
    torch: str
    triton: str
    nccl: str

    @property
    def name(self) -> str:
        return f"{self.gpu}-x{self.world}"

    def differences(self, measured: Hardware) -> list[str]:
        """Return, in words, the fields in which a profile's machine, `measured`, differs from this machine."""
        pairs = [(f.name, getattr(self, f.name), getattr(measured, f.name)) for f in fields(self)]
        return [
            f"{name} {measured_value}, here {value}" for name, value, measured_value in pairs if value != measured_value
        ]


@dataclass(frozen=True)
class Gemm:
    """The time, in us per call, of the library's GEMM [m, k] x [n, k]^T alone."""

    m: int
    n: int
    k: int
    us: float


@dataclass(frozen=True)
class Wave:
    """The time, in us per call, of a persistent Triton GEMM with `tiles` tiles on `programs` programs, with per_sm
    programs on each SM that they use."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    per_sm: int
    programs: int
    tiles: int
    k: int
    us: float


@dataclass(frozen=True)
class Latency:
    """The time, in us, of one operation of one size.

    operation:
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all": bytes of the whole tensor (gathered, unreduced,
            reduced, sent by a rank); ctas: limit of the communicator, 0 for none
        "one_shot all_gather" and the like: the same bytes by a low-latency plan
        "copy": one of a chain of copies from a peer
        "local": a copy within a GPU
        "sum": adding the partial sums of all ranks; bytes of the result
        "barrier"
        "check": the GEMM of the self-check
        "launch": the host's time for submitting an operation to a stream, with its event
        SEND_TO_NODE: every rank sends these bytes to the rank with the same local rank on another node
    """

    operation: str
    ctas: int
    nbytes: int
    us: float


@dataclass(frozen=True)
class Slowdown:
    """The times of a GEMM and of a transfer while both run, each divided by its time alone. operation, ctas: as for
    `Latency`."""

    operation: str
    ctas: int
    gemm: float
    transfer: float


@dataclass(frozen=True)
class UsedCtas:
    """The number of CTAs that an operation was observed to use, on a communicator limited to `ctas` (0: no limit)."""

    operation: str
    ctas: int
    nbytes: int
    used: int


@dataclass(frozen=True)
class TimedCall:
    """One measured call of an op. plan: as JSON. mode: "graph" or "eager"."""

    op: str
    plan: str
    m: int
    n: int
    k: int
    mode: str
    us: float


Measurement = Gemm | Wave | Latency | Slowdown | UsedCtas | TimedCall


@dataclass(frozen=True)
class Profile:
    """All measurements of one machine. created: ISO date. source: "weft tune", or the origin of a derived profile."""

    machine: Hardware
    created: str
    source: str
    gemms: tuple[Gemm, ...] = ()
    waves: tuple[Wave, ...] = ()
    latencies: tuple[Latency, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    used_ctas: tuple[UsedCtas, ...] = ()
    calls: tuple[TimedCall, ...] = ()

    def rows(self) -> Iterator[Measurement]:
        for name in SECTIONS:
            yield from getattr(self, name)

    def __add__(self, rows: Iterable[Measurement]) -> Profile:
        """Return this profile with further measurements, which replace earlier measurements with the same
        `identity`."""
        measured = {identity(row): row for row in (*self.rows(), *rows)}
        sections: dict[str, Any] = {
            name: tuple(row for row in measured.values() if type(row) is cls) for name, (cls, _) in SECTIONS.items()
        }
        return replace(self, **sections)

    def constant(self, operation: str) -> float | None:
        """Return the time, in us, of an operation that has no size, or None."""
        return next((x.us for x in self.latencies if x.operation == operation), None)

    def to_json(self) -> str:
        head = {"format": FORMAT, "machine": asdict(self.machine), "made": self.created, "source": self.source}
        parts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        for name, (_, key) in SECTIONS.items():
            rows = ",\n".join(json.dumps(astuple(row)) for row in getattr(self, name))
            parts.append(f"{json.dumps(key)}: [\n{rows}\n]")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @staticmethod
    def from_json(text: str, where: str = "profile") -> Profile:
        """Read a profile. Raises ProfileError for text that is not a profile of this format."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']}, this weft reads {FORMAT}")
            sections = {name: tuple(_row(cls, row) for row in data[key]) for name, (cls, key) in SECTIONS.items()}
            # A plan is measured once: removed fields, which an older weft wrote, must not make it a different plan.
            sections["calls"] = tuple(replace(c, plan=Plan.from_json(c.plan).to_json()) for c in sections["calls"])
            machine = _row(Hardware, [data["machine"][f.name] for f in fields(Hardware)])
            profile = Profile(machine, str(data["made"]), str(data["source"]), **sections)
            _check(profile)
            return profile
        except (KeyError, TypeError, ValueError) as e:
            problem = f"it lacks {e}" if isinstance(e, KeyError) else str(e)
            raise ProfileError(f"{where}: not a usable profile: {problem}; move it away, or `weft tune --again`") from e

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


# For each field of a Profile that contains measurements, the class of the measurements and the key in the file.
SECTIONS: dict[str, tuple[type, str]] = {
    "gemms": (Gemm, "gemms"),
    "waves": (Wave, "waves"),
    "latencies": (Latency, "latencies"),
    "slowdowns": (Slowdown, "beside"),
    "used_ctas": (UsedCtas, "takes"),
    "calls": (TimedCall, "ran"),
}
_RESULTS = {"us", "gemm", "transfer", "used"}  # fields that contain a result; the other fields identify the measurement


def identity(row: Measurement) -> tuple:
    """Return the fields that identify the measurement, without its results."""
    return type(row), *(value for name, value in vars(row).items() if name not in _RESULTS)


def _check(profile: Profile) -> None:
    """Raise ValueError for rows that no measurement can produce, because a prediction that uses them would fail later,
    in a call of an op."""
    sms, seen = profile.machine.sms, set()
    for row in (profile.machine, *profile.rows()):
        for name, value in vars(row).items():
            if isinstance(value, int) and value < (name not in ("ctas", "nbytes")):
                raise ValueError(f"{name} = {value} in {row}")
    for row in profile.rows():
        if identity(row) in seen:
            raise ValueError(f"{row} appears twice")
        seen.add(identity(row))
        if isinstance(row, Latency | Slowdown | UsedCtas) and row.ctas >= sms:
            raise ValueError(f"{row} is of more CTAs than leave one of {sms} SMs")
        if isinstance(row, TimedCall):
            if row.op not in collectives() or row.mode not in ("graph", "eager"):
                raise ValueError(f"{row} is of no op and mode that this weft plans")
            plan = Plan.from_json(row.plan)
            REGISTRY[row.op].check_plan(plan)
            pulling = plan.pull_programs if isinstance(plan, FusedGather) else 0
            ctas = plan.ctas if isinstance(plan, Signaled) else 0
            if ctas >= sms or pulling >= sms * getattr(plan, "per_sm", 1):
                raise ValueError(f"{row} leaves nothing of {sms} SMs to the GEMM")


@functools.cache
def _types(cls: type) -> tuple[tuple[str, type], ...]:
    return tuple(typing.get_type_hints(cls).items())


def _row(cls: type, values: object) -> Any:
    types = _types(cls)
    if not isinstance(values, list) or len(values) != len(types):
        raise ValueError(f"{values!r} is no {cls.__name__}")
    fields_: list[object] = []
    for (name, kind), stored in zip(types, values, strict=True):
        value: object = float(stored) if kind is float and type(stored) is int else stored
        if (kind is float and not (type(value) is float and 0 < value < 1e9)) or type(value) is not kind:
            raise ValueError(f"{name} = {value!r} in {values!r} is no {kind.__name__} that was measured")
        fields_.append(value)
    return cls(*fields_)


# -- where it is kept ------------------------------------------------------------------------------------------------
def this_machine(device: torch.device, world: int) -> Hardware:
    gpus = torch.cuda.device_count()
    return Hardware(
        gpu_model(device),
        world,
        "network" if world > gpus else _link(device, gpus),
        torch.cuda.get_device_properties(device).multi_processor_count,
        _plain(torch.__version__),
        _plain(triton.__version__),
        ".".join(map(str, torch.cuda.nccl.version())),
    )


def _plain(version: str) -> str:
    return version.split("+")[0]


def cache_path(machine: Hardware) -> Path | None:
    """Return the file in which `weft tune` stores this machine's profile, $XDG_CACHE_HOME/weft/profiles/.. on Linux.
    Return None if platformdirs is not installed, as in a source tree with only torch and Triton."""
    try:
        from platformdirs import user_cache_dir
    except ModuleNotFoundError:
        return None
    m = machine
    name = f"{m.name}-{m.link}-torch{m.torch}-triton{m.triton}-nccl{m.nccl}.json"
    return Path(user_cache_dir("weft")) / "profiles" / re.sub(r"[^\w.\-]", "_", name)


def shipped(name: str) -> Profile | None:
    """Return the profile that ships with weft under this name ("nvidia-h200-x4"), or None."""
    path = resources.files(__package__) / "profiles" / f"{name}.json"
    return Profile.from_json(path.read_text(), f"{name}.json") if path.is_file() else None


def names() -> list[str]:
    """Return the names of the profiles that ship with weft."""
    files = (resources.files(__package__) / "profiles").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def exists(path: Path) -> bool:
    """Return whether the file exists. Raises ProfileError if the file is missing, unreadable or not a profile."""
    try:
        return path.exists()
    except OSError as e:
        raise ProfileError(f"{path}: {e}") from e


def read(path: Path) -> Profile:
    """Read a file. Raises ProfileError if it is missing, unreadable or not a profile."""
    try:
        return Profile.from_json(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ProfileError(f"{path}: {e}") from e


def write(profile: Profile, path: Path) -> None:
    """Write the profile atomically: a reader never reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(profile.to_json())
    part.replace(path)


def find(machine: Hardware) -> Profile | None:
    """Return the cached profile of exactly this machine, or otherwise the shipped profile of its GPU, number of GPUs
    and link; None if neither exists. Raises ProfileError if the file cannot be used."""
    path = cache_path(machine)
    if path is not None and exists(path):
        profile = read(path)
        differences = machine.differences(profile.machine)
        if differences:
            raise ProfileError(
                f"{path}: measured on another machine ({', '.join(differences)}); `weft tune --again` measures this one"
            )
        return profile
    known = shipped(machine.name)
    if known is None or (known.machine.link, known.machine.sms) != (machine.link, machine.sms):
        return None
    return known


def nearest_machine(machine: Hardware) -> Profile | None:
    """Return the shipped profile with this number of GPUs, preferably of this GPU model, or None. The planner uses it
    for ranks that share a GPU."""
    same = [p for p in map(shipped, names()) if p is not None and p.machine.world == machine.world]
    return min(same, key=lambda p: p.machine.gpu != machine.gpu, default=None)


def _link(device: torch.device, gpus: int) -> str:
    """Return the kind of this GPU's link, from NVML: "nvlink" and its number of active links, "pcie", "none" or
    "unknown"."""
    if gpus < 2:
        return "none"
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return "unknown"
        active, state = 0, ctypes.c_int()
        for link in range(36):
            if nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0:
                active += state.value == 1
        nvml.nvmlShutdown()
        return f"nvlink{active}" if active else "pcie"
    except (OSError, AttributeError):
        return "unknown"
