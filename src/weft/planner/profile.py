"""What one machine measured, and how it is kept: the numbers that the predictor computes with (`predict.py`).

A profile is made by `weft tune` and holds measurements only, no conclusion: times of library GEMMs, of waves of Triton
tiles, of collectives and copies by size, how much they slow each other down, and some calls of whole ops. It is JSON,
one line a measurement, in the user's cache directory, one file for each machine (GPU model, number of ranks, link,
versions of torch, Triton and NCCL); profiles that ship with weft lie in `profiles/<gpu>-x<ranks>.json`. A file that
stops half way is still a profile: `weft tune` goes on where it ended.
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

from ..errors import WeftError
from ..op import REGISTRY, collectives
from ..plans import FusedGather, Plan, Signaled
from .table import gpu_model

SEND_TO_NODE = "send to a node"
FORMAT = 3  # the version of a profile's rows, and of the plans in them


class ProfileError(WeftError):
    """A profile file that cannot be used; says which and why."""


@dataclass(frozen=True)
class Hardware:
    """What a profile is valid for. link: "nvlink18" (links a GPU), "pcie", "network" where ranks span hosts."""

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

    def differences(self, other: Hardware) -> list[str]:
        """Say in words which fields of `other` differ from this machine's."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name} {theirs}, here {ours}" for name, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True)
class Gemm:
    """The library's GEMM [m, k] x [n, k]^T alone: us a call."""

    m: int
    n: int
    k: int
    us: float


@dataclass(frozen=True)
class Wave:
    """A persistent Triton GEMM of `tiles` tiles over `programs` programs, per_sm on each SM they use: us a call."""

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
    """Time of one thing of one size.

    what: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" (bytes of the whole tensor: gathered, unreduced,
    reduced, sent by a rank; ctas as the communicator is limited, 0: not), "one_shot all_gather" and the like (the same
    by low-latency rows), "copy" (one of a chain of copies from a peer),
    "local" (one within a GPU), "sum" (adding up the partial sums of all ranks; bytes of the result), "barrier", "check"
    (the GEMM of the self-check), "launch" (the host's time for something that it gives to a stream, with its event),
    SEND_TO_NODE (every rank sends so many bytes to the rank with its place in another node).
    """

    what: str
    ctas: int
    nbytes: int
    us: float


@dataclass(frozen=True)
class Beside:
    """How many times as long a GEMM and `what` take while both run. ctas as in Latency."""

    what: str
    ctas: int
    gemm: float
    other: float


@dataclass(frozen=True)
class Takes:
    """CTAs that `what` was seen to run with, on a communicator limited to `ctas` (0: not limited)."""

    what: str
    ctas: int
    nbytes: int
    seen: int


@dataclass(frozen=True)
class TimedCall:
    """One measured call of an op: `plan` as JSON, `mode` "graph" or "eager"."""

    op: str
    plan: str
    m: int
    n: int
    k: int
    mode: str
    us: float


Measurement = Gemm | Wave | Latency | Beside | Takes | TimedCall


@dataclass(frozen=True)
class Profile:
    """All that one machine measured. made: date, ISO. source: "weft tune", or what else it was derived from."""

    machine: Hardware
    made: str
    source: str
    gemms: tuple[Gemm, ...] = ()
    waves: tuple[Wave, ...] = ()
    latencies: tuple[Latency, ...] = ()
    beside: tuple[Beside, ...] = ()
    takes: tuple[Takes, ...] = ()
    ran: tuple[TimedCall, ...] = ()

    def rows(self) -> Iterator[Measurement]:
        for name in SECTIONS:
            yield from getattr(self, name)

    def __add__(self, more: Iterable[Measurement]) -> Profile:
        """This profile with `more` measurements, which replace those of the same thing."""
        rows = {identity(row): row for row in (*self.rows(), *more)}
        sections: dict[str, Any] = {
            name: tuple(row for row in rows.values() if type(row) is cls) for name, cls in SECTIONS.items()
        }
        return replace(self, **sections)

    def constant(self, what: str, ctas: int = 0) -> float | None:
        """A Latency that does not depend on a size."""
        return next((x.us for x in self.latencies if (x.what, x.ctas) == (what, ctas)), None)

    def to_json(self) -> str:
        head = {"format": FORMAT, "machine": asdict(self.machine), "made": self.made, "source": self.source}
        parts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        for name in SECTIONS:
            rows = ",\n".join(json.dumps(astuple(row)) for row in getattr(self, name))
            parts.append(f"{json.dumps(name)}: [\n{rows}\n]")
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @staticmethod
    def from_json(text: str, where: str = "profile") -> Profile:
        """Read a profile. Raises ProfileError for anything that is not a profile of this format."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']}, this weft reads {FORMAT}")
            sections = {name: tuple(_row(cls, row) for row in data[name]) for name, cls in SECTIONS.items()}
            machine = _row(Hardware, [data["machine"][f.name] for f in fields(Hardware)])
            made = Profile(machine, str(data["made"]), str(data["source"]), **sections)
            _check(made)
            return made
        except (KeyError, TypeError, ValueError) as e:
            said = f"it lacks {e}" if isinstance(e, KeyError) else str(e)
            raise ProfileError(f"{where}: not a usable profile: {said}; move it away, or `weft tune --again`") from e

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


SECTIONS: dict[str, type] = {
    "gemms": Gemm,
    "waves": Wave,
    "latencies": Latency,
    "beside": Beside,
    "takes": Takes,
    "ran": TimedCall,
}
_RESULTS = {"us", "gemm", "other", "seen"}  # the other fields say of what


def identity(row: Measurement) -> tuple:
    """What was measured, without the result."""
    return type(row), *(value for name, value in vars(row).items() if name not in _RESULTS)


def _check(profile: Profile) -> None:
    """Raises ValueError for rows that no measurement gives, with which a prediction would fail later, in a call of an
    op."""
    sms, seen = profile.machine.sms, set()
    for row in (profile.machine, *profile.rows()):
        for name, value in vars(row).items():
            if isinstance(value, int) and value < (name not in ("ctas", "nbytes")):
                raise ValueError(f"{name} = {value} in {row}")
    for row in profile.rows():
        if identity(row) in seen:
            raise ValueError(f"{row} is there twice")
        seen.add(identity(row))
        if isinstance(row, Latency | Beside | Takes) and row.ctas >= sms:
            raise ValueError(f"{row} is of more CTAs than leave one of {sms} SMs")
        if isinstance(row, TimedCall):
            if row.op not in collectives() or row.mode not in ("graph", "eager"):
                raise ValueError(f"{row} is of no op and mode that this weft plans")
            plan = Plan.from_json(row.plan)
            if type(plan) not in REGISTRY[row.op].runs:
                raise ValueError(f"{row} is of a plan that {row.op} does not have")
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
    out: list[object] = []
    for (name, kind), given in zip(types, values, strict=True):
        value: object = float(given) if kind is float and type(given) is int else given
        if (kind is float and not (type(value) is float and 0 < value < 1e9)) or type(value) is not kind:
            raise ValueError(f"{name} = {value!r} in {values!r} is no {kind.__name__} that was measured")
        out.append(value)
    return cls(*out)


# -- where it is kept ------------------------------------------------------------------------------------------------
def this_machine(device: torch.device, world: int) -> Hardware:
    gpus = torch.cuda.device_count()
    return Hardware(
        gpu_model(device),
        world,
        "network" if world > gpus else _link(device, gpus),
        torch.cuda.get_device_properties(device).multi_processor_count,
        _plain(torch.__version__),
        _plain(_triton_version()),
        ".".join(map(str, torch.cuda.nccl.version())),
    )


def _triton_version() -> str:
    import triton

    return triton.__version__


def _plain(version: str) -> str:
    return version.split("+")[0]


def cache_path(machine: Hardware) -> Path | None:
    """Where `weft tune` keeps this machine's profile: $XDG_CACHE_HOME/weft/profiles or the like. None where weft runs
    from its source without what it depends on."""
    try:
        from platformdirs import user_cache_dir
    except ModuleNotFoundError:
        return None
    m = machine
    name = f"{m.name}-{m.link}-torch{m.torch}-triton{m.triton}-nccl{m.nccl}.json"
    return Path(user_cache_dir("weft")) / "profiles" / re.sub(r"[^\w.\-]", "_", name)


def shipped(name: str) -> Profile | None:
    """The profile that comes with weft, by name ("nvidia-h200-x4"), if there is one."""
    path = resources.files(__package__) / "profiles" / f"{name}.json"
    return Profile.from_json(path.read_text(), f"{name}.json") if path.is_file() else None


def names() -> list[str]:
    """The profiles that come with weft."""
    found = (resources.files(__package__) / "profiles").iterdir()
    return sorted(f.name.removesuffix(".json") for f in found if f.name.endswith(".json"))


def exists(path: Path) -> bool:
    """Whether the file exists. Raises ProfileError where that cannot be seen, as in another user's directory."""
    try:
        return path.exists()
    except OSError as e:
        raise ProfileError(f"{path}: {e}") from e


def read(path: Path) -> Profile:
    """Read a file. Raises ProfileError where it is missing, unreadable or not a profile."""
    try:
        return Profile.from_json(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ProfileError(f"{path}: {e}") from e


def write(profile: Profile, path: Path) -> None:
    """Write the profile whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(profile.to_json())
    part.replace(path)


def find(machine: Hardware) -> Profile | None:
    """The cached profile of exactly this machine, else the shipped one of its GPU, count and link; None where nobody
    measured. Raises ProfileError for one that is there and cannot be used."""
    path = cache_path(machine)
    if path is not None and exists(path):
        profile = read(path)
        other = machine.differences(profile.machine)
        if other:
            raise ProfileError(
                f"{path}: measured on another machine ({', '.join(other)}); `weft tune --again` measures this one"
            )
        return profile
    known = shipped(machine.name)
    if known is None or (known.machine.link, known.machine.sms) != (machine.link, machine.sms):
        return None
    return known


def nearest_machine(machine: Hardware) -> Profile | None:
    """Return the shipped profile of as many GPUs, of this model where there is one, for ranks that share a GPU; None
    where there is no such profile."""
    same = [p for p in map(shipped, names()) if p is not None and p.machine.world == machine.world]
    return min(same, key=lambda p: p.machine.gpu != machine.gpu, default=None)


def _link(device: torch.device, gpus: int) -> str:
    """How this GPU is connected, from NVML: its active NVLinks, or PCIe."""
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
