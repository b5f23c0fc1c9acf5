"""Compile a kernel without a GPU, and read the result: PTX, registers, spills, shared memory and ptxas' warnings."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.compiler.errors import CompilationError

from .. import _triton
from ..architectures import HOPPER, features
from ..emulator.interpret import source_tree
from ..lang.descriptors import for_gpu
from ..lang.jit import check_tuple
from .ptx import files_of


class OfflineDriver(DriverBase):
    """A stand-in for the CUDA driver, so that `JITFunction.warmup` compiles for a GPU that need not be present."""

    def __init__(self, capability: int = HOPPER) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError

    def get_current_device(self) -> GPUTarget:
        return self.target  # with the number of a real GPU, the keys would equal those of kernels compiled for that GPU

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def set_current_device(self, device: object) -> None:
        pass


@contextmanager
def standing_in(driver: OfflineDriver) -> Iterator[None]:
    """Return a context manager in which Triton compiles for `driver`."""
    config: Any = triton.runtime.driver
    before = config._active  # `active` raises without a GPU
    config.set_active(driver)
    try:
        yield
    finally:
        config.set_active(before)


@dataclass(frozen=True)
class Compiled:
    hash: str  # Triton's key of the compiled kernel; two launches of one compiled kernel have the same key
    ptx: str
    ttgir: str
    registers: int  # per thread
    spills: int  # the bytes stored and loaded by spills
    shared: int  # bytes
    warnings: tuple[str, ...]  # ptxas' warnings, for example that wgmma instructions are serialized


def compile_kernel(
    kernel: JITFunction, args: Mapping[str, object], options: Mapping[str, int], capability: int = HOPPER
) -> Compiled:
    """Compile `kernel` in the same way as a launch with these arguments and options. CPU tensors or stand-ins may
    replace device tensors."""
    for name, value in args.items():
        check_tuple(f"{kernel.__name__}, argument {name}", value)
    with standing_in(OfflineDriver(capability)), redirect_stdout(io.StringIO()):  # Triton prints a whole failing file
        compile_it = functools.partial(
            kernel.warmup, **for_gpu(args, capability), **_triton.options(options), grid=(1,)
        )
        compiled = compile_it()
        if not names_own_files(kernel, compiled.asm["ptx"]):
            with triton.knobs.compilation.scope():
                triton.knobs.compilation.always_compile = True
                kernel.device_caches.clear()
                compiled = compile_it()
    text = _ptxas(compiled.asm["ptx"], capability)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    warnings = tuple(re.findall(r"Potential Performance Loss.*|(?<=warning : ).*", text))
    return Compiled(
        compiled.hash, compiled.asm["ptx"], compiled.asm["ttgir"], registers, spills, compiled.metadata.shared, warnings
    )


def names_own_files(kernel: JITFunction, ptx: str) -> bool:
    """Return whether the code names only lines of the kernel's file and of other files that this process has loaded.
    Triton's cache is keyed by content, so it may contain code compiled from a copy of the file, with the line numbers
    of that copy."""
    named, kernel_file = set(files_of(ptx).values()), kernel.fn.__code__.co_filename
    loaded = {kernel_file, *(file for m in list(sys.modules.values()) if (file := getattr(m, "__file__", None)))}
    if not named <= loaded:  # the same files may have different names, such as links
        named, loaded = ({str(Path(file).resolve()) for file in files} for files in (named, loaded))
        kernel_file = str(Path(kernel_file).resolve())
    return kernel_file in named and named <= loaded


@functools.lru_cache(maxsize=64)
def _ptxas(ptx: str, capability: int) -> str:
    """Return ptxas' report on the code. Triton also runs ptxas, but does not store the report."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "k.ptx"
        source.write_text(ptx)
        command = [
            *_triton.ptxas(sm_arch_from_capability(capability)),
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stderr + run.stdout


def too_large(compiled: Compiled, capability: int) -> str:
    """Return the reason why no program fits on the GPU, or "" if one fits."""
    available = features(capability).shared_kib * 1024
    if compiled.shared <= available:
        return ""
    return f"a program needs {compiled.shared} bytes of shared memory, of {available}"


def refusal(error: Exception, kernel: JITFunction, functions: Iterable[JITFunction]) -> str:
    """Return one sentence with the line at which `kernel` did not compile, and the reason. functions: the functions
    whose lines the sentence can name."""
    where, reason = _line(kernel, 1), f"{type(error).__name__}: {error}"
    if failed := re.search(r"(?:; error|ptxas fatal)\s*: (.*)", str(error)):  # one line of ptxas' output
        reason = f"ptxas: {failed[1]}"
    by_source = {fn.src: fn for fn in functions}
    cause: BaseException | None = error
    while isinstance(cause, CompilationError):  # first the kernel's error, then the error of the function called there
        if cause.src in by_source and hasattr(cause.node, "lineno"):
            where = _line(by_source[cause.src], cause.node.lineno)
        inner = cause.__cause__ or cause.__context__
        reason = cause.error_message or reason
        if reason == repr(inner):
            reason = str(inner)
        cause = inner
    return f"{where}: {' '.join(reason.split())}"


def _line(fn: JITFunction, number: int) -> str:
    """Return file:line of the `number`-th line of a function; its `def` is line 1."""
    return f"{fn.fn.__code__.co_filename}:{source_tree(fn).body[0].lineno + number - 1}"
