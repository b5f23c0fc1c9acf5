"""Compile a kernel for sm_90a with no GPU, and read what came out: PTX, registers, spills, shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from weft import _triton


class OfflineDriver(DriverBase):
    """Stands in for the CUDA driver, so that `JITFunction.warmup` compiles for a Hopper GPU that is not there."""

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", 90, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass


@dataclass(frozen=True)
class Compiled:
    ptx: str
    ttgir: str
    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes
    warnings: tuple[str, ...]  # ptxas' own, as of tensor cores that wait for each other


def compile_sm90(kernel: Any, args: dict[str, Any], options: dict[str, Any]) -> Compiled:
    """Compile `kernel` for arguments `args` (by name; CPU tensors stand for device ones) and read ptxas' report."""
    triton.runtime.driver.set_active(OfflineDriver())
    k = kernel.warmup(**args, **_triton.options(options), grid=(1,))
    ptx = k.asm["ptx"]
    with tempfile.TemporaryDirectory() as d:
        src = Path(d) / "k.ptx"
        src.write_text(ptx)
        run = subprocess.run(
            [*_triton.ptxas("sm_90a"), str(src), "-o", str(Path(d) / "k.cubin")],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    text = run.stderr + run.stdout
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", text))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    warnings = tuple(re.findall(r"Potential Performance Loss.*", text))
    return Compiled(ptx, k.asm["ttgir"], registers, spills, k.metadata.shared, warnings)
