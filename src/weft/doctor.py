"""`weft doctor` prints this machine's GPUs, links, measured bandwidth and symmetric memory, the backend that weft uses,
and the reason.

One process measures everything. `weft doctor` queries multicast support but does not use it: neither weft nor NCCL
creates a multicast object.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
import triton
import triton.language as tl

from . import _triton, architectures
from .errors import WeftError
from .integrations import quack, sglang, vllm
from .ops.attention import libraries
from .planner.profile import ProfileError, find, this_machine
from .planner.table import gpu_model, load

SIZE = 64 << 20  # bytes of a measured copy
_MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


def examine(measure: bool) -> tuple[dict[str, list[tuple[str, str]]], str, str]:
    """Return lines of (name, value) by section, the backend that weft will use, and the reason."""
    sections = {"versions": _versions()}
    gpus = torch.cuda.device_count()
    if gpus:
        sections["GPUs"] = _gpus(gpus)
    sections["GEMM"] = [
        ("libraries", "cuBLAS" if gpus else "torch's for CPUs"),
        ("quack", quack.lacks() or f"{quack.installed()}, by measurement"),
    ]
    sections["attention"] = _attention()
    sections["engines"] = [("vLLM", vllm.state()), ("SGLang", sglang.state())]
    if gpus > 1:
        sections["links"] = _links(gpus)
        sections["symmetric memory"] = _symmetric(gpus)
        if measure:
            sections["bandwidth, one direction"] = _bandwidth(gpus)
    how = (
        "each by all hosts (WEFT_CHECK)"
        if os.environ.get("WEFT_CHECK") == "1"
        else "by kernels; WEFT_CHECK=1: by hosts"
    )
    sections["calls"] = [("compared across ranks", how)]
    return sections, *_verdict(gpus)


def _versions() -> list[tuple[str, str]]:
    def version_of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    lines = [("weft", version_of("weft")), ("torch", f"{torch.__version__}, {cuda}")]
    lines.append(("triton", f"{triton.__version__} (tried: {_triton.TRIED_VERSIONS}; on GPUs: {_triton.ON_GPUS})"))
    lines += [(package, version_of(package)) for package in ("greenlet", "numpy")]
    lines.append(("C compiler, Python's headers", _lacks_for_stub() or "there, for Triton's stub of the driver"))
    if torch.cuda.is_available():
        lines.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
        driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        lines.append(("driver", driver.splitlines()[0] if driver else "unknown (nvidia-smi says nothing)"))
    return [("python", f"{sys.version.split()[0]} on {platform.system()} {platform.machine()}"), *lines]


def _lacks_for_stub() -> str | None:
    """Return the missing tools that Triton needs to build its driver stub at its first use of a GPU, and the packages
    to install; None if no tool is missing."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # the same query as Triton's
    headers = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    lacks = [] if compiler and shutil.which(compiler) else ["no gcc or clang (apt install gcc)"]
    lacks += [] if headers.is_file() else [f"no {headers} (apt install python3-dev)"]
    return ", ".join(lacks) or None


def _ask(*command: str) -> str:
    """Return the output of a command, or "" if the command is missing, fails or hangs."""
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpus(gpus: int) -> list[tuple[str, str]]:
    lines = []
    for i in range(gpus):
        p = torch.cuda.get_device_properties(i)
        size = f"{p.total_memory / 2**30:.0f} GiB"
        lines.append((f"cuda:{i}", f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {size}"))
    return lines


def _attention() -> list[tuple[str, str]]:
    """Return, for each use, the library that gathered attention calls for 32 query heads, 8 key heads and D 128, and
    the reasons why it does not call the other libraries."""
    if not torch.cuda.is_available():
        return [("library", f"{libraries.REFERENCE.name}: float32 arithmetic of torch, to try things")]
    lines = []
    for use in libraries.USES:
        try:
            reasons = libraries.library_errors(use, torch.device("cuda", 0), torch.bfloat16, 32, 8, 128)
        except RuntimeError as error:  # for example, because the GPU is out of memory
            reasons = {library: f"{error}".splitlines()[0] for library in (libraries.CUDNN, libraries.FLASH)}
        chosen = next((library.name for library, reason in reasons.items() if not reason), "none")
        lacks = [f"{library.name}: {reason}" for library, reason in reasons.items() if reason]
        lines.append((use, "; ".join([chosen, *lacks])))
    return lines


def _without_access(gpus: int) -> list[tuple[int, int]]:
    pairs = [(i, j) for i in range(gpus) for j in range(gpus) if i != j]
    return [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]


def _links(gpus: int) -> list[tuple[str, str]]:
    kinds: Counter[str] = Counter()
    for line in _ask("nvidia-smi", "topo", "-m").splitlines():
        cells = line.split()
        if cells and cells[0].startswith("GPU") and "X" in cells:
            kinds.update(cell for cell in cells[1 : gpus + 1] if cell != "X")
    names = {"NV": "NVLink, {} links", "SYS": "PCIe across sockets", "NODE": "PCIe across host bridges"}
    names |= {"PHB": "PCIe through the host bridge", "PXB": "PCIe switches", "PIX": "one PCIe switch"}
    kinds_of_link = []
    for kind, count in kinds.most_common():
        name = names.get(kind.rstrip("0123456789"), kind).format(kind[2:])
        kinds_of_link.append(f"{name} ({count // 2} pairs)")
    without_access = _without_access(gpus)
    access = (
        "every pair" if not without_access else "not between " + ", ".join(f"{i} and {j}" for i, j in without_access)
    )
    return [("kind", "; ".join(kinds_of_link) or "unknown (nvidia-smi topo says nothing)"), ("peer access", access)]


def _symmetric(gpus: int) -> list[tuple[str, str]]:
    import torch.distributed._symmetric_memory as symm

    backends = ["CUDA", "NVSHMEM"] if symm.is_nvshmem_available() else ["CUDA"]
    supported = [i for i in range(gpus) if _multicast(i)]
    off = [f"{k}={os.environ[k]}" for k in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST") if k in os.environ]
    multicast = "the driver offers it on every GPU" if len(supported) == gpus else "not offered by the driver"
    return [
        ("backends", ", ".join(backends)),
        ("multicast", f"{multicast}; weft uses it in plan 'multicast' alone" + (f" ({', '.join(off)})" if off else "")),
    ]


def _multicast(device: int) -> bool:
    """Return whether the driver reports that the GPU supports multicast. This only queries the attribute."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST, handle)
    return not failed and bool(value.value)


@triton.jit
def _copy(dst, src, n, BLOCK: tl.constexpr):
    for i in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offsets = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < n), mask=offsets < n)


def _rate(nbytes: int, fn: Callable[[], object], gpus: int, repeat: int = 10) -> str:
    def synchronize_all() -> None:
        for i in range(gpus):
            torch.cuda.synchronize(i)

    for _ in range(2):
        fn()
    synchronize_all()
    start = time.perf_counter()
    for _ in range(repeat):
        fn()
    synchronize_all()
    return f"{nbytes * repeat / (time.perf_counter() - start) / 1e9:.0f} GB/s"


def _bandwidth(gpus: int) -> list[tuple[str, str]]:
    """Return the bandwidth of copies between cuda:0 and cuda:1, issued by either GPU, and of an all-gather over all
    GPUs."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NCCL would make multicast objects
    words = SIZE // 4
    local = torch.zeros(words, dtype=torch.int32, device="cuda:0")
    peer = torch.zeros(words, dtype=torch.int32, device="cuda:1")
    lines: list[tuple[str, str]] = []

    def line(label: str, nbytes: int, fn: Callable[[], object]) -> None:
        try:
            lines.append((label, _rate(nbytes, fn, gpus)))
        except (RuntimeError, ValueError) as error:
            lines.append((label, f"failed: {str(error).splitlines()[0]}"))

    with torch.cuda.device(0):
        line("copy engine, write to a peer", SIZE, lambda: peer.copy_(local))
        line("copy engine, read from a peer", SIZE, lambda: local.copy_(peer))
        if torch.cuda.can_device_access_peer(0, 1):  # the copies above have enabled access
            run, options = _copy[(32,)], _triton.options(dict(num_warps=16))
            line("SMs (32 programs), write to a peer", SIZE, lambda: run(peer, local, words, BLOCK=8192, **options))
            line("SMs (32 programs), read from a peer", SIZE, lambda: run(local, peer, words, BLOCK=8192, **options))
    shard = words // gpus
    shards = [torch.zeros(shard, dtype=torch.int32, device=f"cuda:{i}") for i in range(gpus)]
    whole = [torch.zeros(shard * gpus, dtype=torch.int32, device=f"cuda:{i}") for i in range(gpus)]
    nbytes_received = shard * 4 * (gpus - 1)
    line(f"NCCL all-gather over {gpus} GPUs", nbytes_received, lambda: torch.cuda.nccl.all_gather(shards, whole))
    return lines


def _emulator() -> str | None:
    """Return the reason why the emulator does not run on this machine; None if it does."""
    try:
        from . import emulator  # noqa: F401
    except (WeftError, ImportError) as error:
        return str(error)
    return None


def _verdict(gpus: int) -> tuple[str, str]:
    if why := _triton.untried():
        return "nothing", why
    if not gpus:
        reason = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no NVIDIA GPU"
        if lacks := _emulator():
            return "nothing", f"{reason}, and {lacks}"
        return "emulated", f"{reason}: kernels run on the CPU, in the emulator, which checks them and is not fast"
    if lacks := _lacks_for_stub():
        return "nothing", f"Triton cannot build its stub of the driver: {lacks}"
    if gpus == 1:
        shared = 'weft.spmd(fn, 4, backend="shared"), or torchrun with WEFT_SHARE_GPU=1'
        return "cuda", f"one GPU: a World of one rank is sequential; several ranks share it, for function: {shared}"
    sequential = "ops run sequentially, as cuBLAS then NCCL, and say so once"
    nccl_plans = (
        "plans in which NCCL moves the bytes serve (sequential, decomposed, signaled); of others ops say so once"
    )
    without_access = _without_access(gpus)
    if without_access:
        i, j = without_access[0]
        return "cuda", f"cuda:{i} cannot access cuda:{j}: {nccl_plans}"
    capability = architectures.device_capability(torch.device("cuda", 0))
    if why := architectures.lacks(capability, "bf16", "weft's kernels"):
        return "cuda", f"{why}: {sequential}"
    model = gpu_model(torch.device("cuda", 0))
    serves = f"{gpus} GPUs with peer access: symmetric memory"
    try:
        profile = find(this_machine(torch.device("cuda", 0), gpus))
    except ProfileError as e:
        return "cuda", f'{serves}; plan="auto" is sequential but for the shapes measured on {model}: {e}'
    if profile:
        return "cuda", f"{serves}, and plans predicted from the profile of {profile.created[:10]}"
    if not load(model):
        action = (
            "measures plans at the first call of a size"
            if architectures.features(capability).wgmma
            else "is sequential"
        )
        return "cuda", f'{serves}; plan="auto" {action}, as none was measured on {model}: run `weft tune`'
    return "cuda", f"{serves}, and the plans measured on {model}; `weft tune` measures this machine for other shapes"
