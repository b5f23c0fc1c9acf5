"""What weft uses of Triton that Triton does not document, by the versions that it was tried with.

How the interpreter is built, what the launcher is handed and how the assembler is called change between minor versions.
What differs is told apart here and nowhere else, and a version that nobody tried is refused before any of it is used.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .errors import WeftError

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

TRIED = ((3, 6), (3, 7), (3, 8), (3, 9))
SPAN = f"{TRIED[0][0]}.{TRIED[0][1]} to {TRIED[-1][0]}.{TRIED[-1][1]}"
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in per cent
ON_GPUS = "3.6 and 3.9"


Ready = Callable[[int, Sequence[object]], None]
_MAPS = 4096  # TMA descriptors, of 128 bytes, that are kept of one argument of a launch


def version() -> tuple[int, int]:
    """Major and minor number of the Triton that runs."""
    major, minor = re.findall(r"\d+", triton.__version__)[:2]
    return int(major), int(minor)


def untried() -> str | None:
    """Why weft does not run with this Triton and what to install, or None where it does."""
    if version() in TRIED:
        return None
    oldest, (major, minor) = TRIED[0], TRIED[-1]
    install = f"pip install 'triton>={oldest[0]}.{oldest[1]},<{major}.{minor + 1}'"
    return f"weft was tried with Triton {SPAN}, and this is {triton.__version__}: {install}"


def require() -> None:
    """Raise WeftError for a Triton that nobody tried."""
    if why := untried():
        raise WeftError(why)


def interpreter() -> tuple[ModuleType, type]:
    """Triton's interpreter, and the class of its functions that are run while compiling."""
    require()
    from triton.runtime import interpreter
    from triton.runtime.jit import ConstexprFunction

    return interpreter, ConstexprFunction


def first_line(fn: triton.JITFunction) -> int:
    """The line of `def` in the function's file."""
    ahead = next(i for i, line in enumerate(fn.raw_src) if line.lstrip().startswith("def "))
    return fn.starting_line_number + ahead


# -- compiling ---------------------------------------------------------------------------------------------------------


def options(given: Mapping[str, int]) -> dict[str, int]:
    """What Triton is told of a launch's options. Fused multiply-adds were always on, and 3.10 is to turn them off."""
    weft_only = ("co_resident", "local", "per_sm", "few_registers")
    told = {"enable_fp_fusion": True} | {name: value for name, value in given.items() if name not in weft_only}
    # 3.9 assembles with ptxas 13.4, which spills where 12.9 did not, unless LLVM puts instructions in order for it.
    return told | {"sched4reg": True} if given.get("few_registers") and version() >= (3, 9) else told


@contextmanager
def no_compile_hooks() -> Iterator[None]:
    """Compile unseen by Triton's hooks (vLLM sets one that warns of compilation while it serves): before it calls them
    Triton writes a kernel's constants as JSON, and of those inside a tuple it can write no dtype."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None
        yield


def ptxas(arch: str) -> list[str]:
    """The assembler and its flags as Triton calls it for an architecture ("sm_90a"); files are left to add."""
    require()
    from triton.backends.nvidia.compiler import get_ptxas

    registers = ["--regAllocOptLevel=2"] if version() >= (3, 7) else []
    path = get_ptxas(int(re.sub(r"\D", "", arch))).path
    return [path, "-v", *registers, f"--gpu-name={arch}"]


def share_all_memory(compiled: CompiledKernel) -> None:
    """Have an SM on which this kernel runs divide none of its memory off as cache. How it is divided is fixed while
    anything runs there, so beside a kernel that shares nothing a GEMM's programs would find no place."""
    cuda = ctypes.CDLL("libcuda.so.1")
    status = cuda.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, 100)
    if status:
        raise WeftError(f"cuFuncSetAttribute(preferred shared memory) failed with {status}")


# -- launching ---------------------------------------------------------------------------------------------------------


def repeated(
    kernel: triton.JITFunction,
    compiled: CompiledKernel,
    grid: int,
    values: Mapping[str, object],
    moving: Sequence[str] = (),
) -> Ready | None:
    """A function that launches `compiled` again with these arguments, given the raw stream and, in the order of
    `moving`, the addresses of those that move: an integer for a tensor or a descriptor, a tuple for a NamedTuple, None
    for what is None. None is returned where Triton itself has to launch.

    Triton binds and specialises every argument and encodes every TMA descriptor on each launch; here that is done once,
    and once for each address that a descriptor comes with. Left to Triton: kernels with scratch memory or
    instrumentation, descriptors that became no TMA descriptor, and all kernels while a launch hook is set.
    """
    run, hooks = compiled.run, triton.knobs.runtime
    if any(getattr(h, "calls", h) for h in (hooks.launch_enter_hook, hooks.launch_exit_hook)):
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    given = [values[p.name] if p.name in values else p.default for p in kernel.params]
    encodings = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if len(encodings) != sum(isinstance(value, TensorDescriptor) for value in given):
        return None
    left, slot_of = iter(encodings), {}
    arguments: list[object] = []
    maps: dict[str, TensorMaps] = {}
    for p, value in zip(kernel.params, given, strict=True):
        slot_of[p.name] = len(arguments)
        if isinstance(value, TensorDescriptor):
            maps[p.name] = TensorMaps(value, next(left))
            arguments += maps[p.name].expanded(value)
        else:
            arguments.append(address(value, fixed=p.name not in moving))
    slots = [slot_of[name] for name in moving]
    descriptors = [(slot_of[name], i, maps[name]) for i, name in enumerate(moving) if name in maps]
    cooperative, dependent, packed = run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata
    unhooked = None, None, None  # what hooks are told, and the two
    head: tuple[object, ...]
    if one_by_one := version() < (3, 7):  # a launcher for each signature, whose arguments follow one by one
        launch, head = run.launch, (None, None, packed, *unhooked)
        if launch.__name__ == "inner":  # encodes descriptors, then calls it
            launch = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
    else:  # one launcher for all kernels, which is told how to read the list of arguments
        launch = triton.runtime.driver.active.utils.launch
        head = packed, *unhooked, None, None, run.arg_annotations, run.kernel_signature

    def ready(stream: int, addresses: Sequence[object]) -> None:
        now = arguments
        if slots:
            now = arguments.copy()  # threads may launch the same
            for slot, address in zip(slots, addresses, strict=True):
                now[slot] = address
            for slot, i, tensor_maps in descriptors:
                now[slot] = tensor_maps[addresses[i]]
        rest = now if one_by_one else (now,)
        # The function is read from `compiled`, which stays alive: since Triton 3.8 the GPU's code is unloaded with it.
        launch(grid, 1, 1, stream, compiled.function, cooperative, dependent, *head, *rest)

    return ready


class TensorMaps(dict[object, object]):
    """The TMA descriptors of matrices of one shape, by address; they keep no memory of the matrices alive."""

    def __init__(self, descriptor: TensorDescriptor, encoding: object) -> None:
        super().__init__()
        self._encoding, self._dtype = encoding, descriptor.base.dtype
        self._geometry = descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.padding

    def expanded(self, descriptor: TensorDescriptor) -> list[object]:
        """A descriptor as Triton's launcher takes it: its TMA descriptor, shape and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launch = ((),) if version() >= (3, 8) else ()  # the launch's own arguments, which NVIDIA's does not look at
        arguments: list[object] = make_tensordesc_arg(descriptor, self._encoding, *launch)
        return arguments

    def __missing__(self, address: int) -> object:
        if len(self) >= _MAPS:
            self.clear()
        self[address] = self.expanded(TensorDescriptor(_Memory(address, self._dtype), *self._geometry))[0]
        return self[address]


class _Memory(NamedTuple):
    """What a descriptor asks of its base."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def address(value: object, fixed: bool) -> object:
    """An argument as the launcher takes it. A NamedTuple that is fixed goes as it is: what it holds, a channel or
    constants, is there for as long as its World; a plain tuple's tensors go by their addresses, so that nothing holds
    their memory."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if type(value) is tuple or (isinstance(value, tuple) and not fixed):
        return tuple(address(part, fixed) for part in value)
    return value
