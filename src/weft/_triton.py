"""The undocumented parts of Triton that weft uses, for the versions with which weft was tested.

The interpreter's construction, the launcher's arguments and the call of the assembler differ between minor versions.
Only this module depends on Triton's version. `require` raises an error for an untested version before any other
function of this module runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .errors import WeftError

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

TRIED = ((3, 6), (3, 7), (3, 8), (3, 9))
TRIED_VERSIONS = f"{TRIED[0][0]}.{TRIED[0][1]} to {TRIED[-1][0]}.{TRIED[-1][1]}"
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in per cent
ON_GPUS = "3.6 and 3.9"


RepeatedLaunch = Callable[[int, Sequence[object]], None]
_MAPS = 4096  # the number of cached TMA descriptors, of 128 bytes each, per argument of a launch


def version() -> tuple[int, int]:
    """Return the major and minor version of the installed Triton."""
    major, minor = re.findall(r"\d+", triton.__version__)[:2]
    return int(major), int(minor)


def untried() -> str | None:
    """Return the reason why weft does not run with this Triton and the version to install, or None if weft runs with
    it."""
    if version() in TRIED:
        return None
    oldest, (major, minor) = TRIED[0], TRIED[-1]
    install = f"pip install 'triton>={oldest[0]}.{oldest[1]},<{major}.{minor + 1}'"
    return f"weft was tried with Triton {TRIED_VERSIONS}, and this is {triton.__version__}: {install}"


def require() -> None:
    """Raise WeftError for a version of Triton with which weft was not tested."""
    if why := untried():
        raise WeftError(why)


def interpreter() -> tuple[ModuleType, type]:
    """Return Triton's interpreter, and the class of the interpreter's functions that run at compile time."""
    require()
    from triton.runtime import interpreter
    from triton.runtime.jit import ConstexprFunction

    return interpreter, ConstexprFunction


def first_line(fn: triton.JITFunction) -> int:
    """Return the line of `def` in the function's file."""
    ahead = next(i for i, line in enumerate(fn.raw_src) if line.lstrip().startswith("def "))
    return fn.starting_line_number + ahead


# -- compiling ---------------------------------------------------------------------------------------------------------


def options(weft_options: Mapping[str, int]) -> dict[str, int]:
    """Return Triton's options for a launch's options. Triton has always enabled fused multiply-adds; 3.10 will disable
    them."""
    weft_only = ("co_resident", "local", "per_sm", "few_registers")
    triton_options = {"enable_fp_fusion": True} | {
        name: value for name, value in weft_options.items() if name not in weft_only
    }
    # Triton 3.9 assembles with ptxas 13.4, which spills registers where 12.9 did not, unless LLVM schedules
    # instructions to save registers.
    return (
        triton_options | {"sched4reg": True}
        if weft_options.get("few_registers") and version() >= (3, 9)
        else triton_options
    )


@functools.cache
def rewritten_source(concerns: Callable[[str], bool], rewrite: Callable[[str], str | None]) -> type:
    """Return a class of kernel source for Triton's compiler, whose IR `rewrite` changes before Triton's own passes.
    `rewrite` receives the printed IR, with calls inlined and loops unrolled, and returns new IR or None. concerns:
    returns whether `rewrite` may change a source; the IR of other sources is not printed.

    Triton's cache key includes the file that defines `rewrite`, so kernels with different rewrites are cached
    separately.
    """
    require()
    from triton._C.libtriton import ir, passes
    from triton.compiler import ASTSource

    edition = hashlib.sha256(Path(rewrite.__code__.co_filename).read_bytes()).hexdigest()

    def parsed(text: str, context: object) -> ir.module:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.ttir"
            path.write_text(text)
            module = ir.parse_mlir_module(str(path), context)
        module.context = context
        return module

    class RewrittenSource(ASTSource):
        def hash(self) -> str:
            return f"{super().hash()}-{edition}"

        def make_ir(
            self, target: object, options: object, codegen_fns: object, module_map: object, context: object
        ) -> ir.module:
            module = super().make_ir(target, options, codegen_fns, module_map, context)
            if not concerns(text := str(module)):
                return module
            inlined = parsed(text, context)  # a copy, so that a kernel that is not rewritten remains unchanged
            manager = ir.pass_manager(context)
            passes.common.add_inliner(manager)
            passes.common.add_canonicalizer(manager)
            passes.common.add_symbol_dce(manager)
            passes.ttir.add_loop_unroll(manager)
            manager.run(inlined, "rewritten_source")
            rewritten = rewrite(str(inlined))
            if rewritten is None:
                return module
            try:
                return parsed(rewritten, context)
            except RuntimeError as error:
                raise WeftError(
                    f"{self.name}: its loads cannot be kept behind its waits: Triton {triton.__version__} does not "
                    "take the rewritten IR; @weft.jit(guard_loads=False) leaves the kernel to Triton"
                ) from error

    return RewrittenSource


@contextmanager
def no_compile_hooks() -> Iterator[None]:
    """Compile without Triton's hooks (vLLM sets one that warns of compilation while it serves). Before it calls a hook,
    Triton writes a kernel's constants as JSON, which fails for a dtype inside a tuple."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None
        yield


def ptxas(arch: str) -> list[str]:
    """Return the assembler and its flags as Triton calls it for an architecture ("sm_90a"), without file names."""
    require()
    from triton.backends.nvidia.compiler import get_ptxas

    registers = ["--regAllocOptLevel=2"] if version() >= (3, 7) else []
    path = get_ptxas(int(re.sub(r"\D", "", arch))).path
    return [path, "-v", *registers, f"--gpu-name={arch}"]


def share_all_memory(compiled: CompiledKernel) -> None:
    """Configure an SM that runs this kernel to use all of its on-chip memory as shared memory and none of it as L1
    cache. The split is fixed while any program runs on the SM, so a GEMM's programs would not fit next to a kernel that
    uses no shared memory."""
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
) -> RepeatedLaunch | None:
    """Return a function that launches `compiled` again with these arguments. The arguments of the returned function are
    the raw stream and the addresses of the arguments in `moving`, in that order. The address is an integer for a tensor
    or a descriptor, a tuple for a NamedTuple, and None for an absent argument. The result is None if Triton itself has
    to launch the kernel.

    Triton binds and specialises every argument and encodes every TMA descriptor on each launch. The returned function
    binds and specialises only once, and encodes each descriptor once for each address. Triton itself launches kernels
    with scratch memory or instrumentation, kernels with a descriptor that is not a TMA descriptor, and all kernels
    while a launch hook is set.
    """
    run, hooks = compiled.run, triton.knobs.runtime
    if any(getattr(h, "calls", h) for h in (hooks.launch_enter_hook, hooks.launch_exit_hook)):
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    parameter_values = [values[p.name] if p.name in values else p.default for p in kernel.params]
    encodings = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    if len(encodings) != sum(isinstance(value, TensorDescriptor) for value in parameter_values):
        return None
    encodings_left, position_of = iter(encodings), {}
    arguments: list[object] = []
    maps: dict[str, TensorMaps] = {}
    for p, value in zip(kernel.params, parameter_values, strict=True):
        position_of[p.name] = len(arguments)
        if isinstance(value, TensorDescriptor):
            maps[p.name] = TensorMaps(value, next(encodings_left))
            arguments += maps[p.name].expanded(value)
        else:
            arguments.append(address(value, fixed=p.name not in moving))
    positions = [position_of[name] for name in moving]
    descriptors = [(position_of[name], i, maps[name]) for i, name in enumerate(moving) if name in maps]
    cooperative, dependent, packed = run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata
    unhooked = None, None, None  # the hooks' metadata and the two hooks
    head: tuple[object, ...]
    if one_by_one := version() < (3, 7):  # a launcher for each signature, with separate arguments
        launch, head = run.launch, (None, None, packed, *unhooked)
        if launch.__name__ == "inner":  # a wrapper that encodes descriptors, then calls the launcher
            launch = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))["launcher"].cell_contents
    else:  # one launcher for all kernels, with a list of arguments and its signature
        launch = triton.runtime.driver.active.utils.launch
        head = packed, *unhooked, None, None, run.arg_annotations, run.kernel_signature

    def ready(stream: int, addresses: Sequence[object]) -> None:
        current = arguments
        if positions:
            current = arguments.copy()  # other threads may launch the same kernel
            for position, address in zip(positions, addresses, strict=True):
                current[position] = address
            for position, i, tensor_maps in descriptors:
                current[position] = tensor_maps[addresses[i]]
        launch_arguments = current if one_by_one else (current,)
        # The function is read from `compiled` to keep `compiled` alive: since Triton 3.8, freeing it unloads the GPU's
        # code.
        launch(grid, 1, 1, stream, compiled.function, cooperative, dependent, *head, *launch_arguments)

    return ready


class TensorMaps(dict[object, object]):
    """The TMA descriptors of matrices of one shape, by address. This object does not keep its matrix alive."""

    def __init__(self, descriptor: TensorDescriptor, encoding: object) -> None:
        super().__init__()
        self._encoding, self._dtype = encoding, descriptor.base.dtype
        self._geometry = descriptor.shape, descriptor.strides, descriptor.block_shape, descriptor.padding

    def expanded(self, descriptor: TensorDescriptor) -> list[object]:
        """Return a descriptor as the arguments of Triton's launcher: its TMA descriptor, shape and strides."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        launch = ((),) if version() >= (3, 8) else ()  # the launch's arguments, which NVIDIA's driver ignores
        arguments: list[object] = make_tensordesc_arg(descriptor, self._encoding, *launch)
        return arguments

    def __missing__(self, address: int) -> object:
        if len(self) >= _MAPS:
            self.clear()
        self[address] = self.expanded(TensorDescriptor(_Memory(address, self._dtype), *self._geometry))[0]
        return self[address]


class _Memory(NamedTuple):
    """A stand-in for a descriptor's base tensor. A descriptor reads only the address and dtype of that tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def address(value: object, fixed: bool) -> object:
    """Return an argument in the launcher's form. A fixed NamedTuple stays unchanged, because its channel or constants
    exist as long as its World. A plain tuple's tensors become addresses, so that the launch does not keep their memory
    alive."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if type(value) is tuple or (isinstance(value, tuple) and not fixed):
        return tuple(address(part, fixed) for part in value)
    return value
