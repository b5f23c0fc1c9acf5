"""Launch `weft.jit` kernels on a GPU. Each specialisation is checked and loaded once, and is then launched with as
little Python as possible.

Before the first launch, the launcher checks that the grid can be resident at once (a program that never starts never
signals). The launcher also loads the kernel before any kernel spins, because lazy loading can block until a spinning
grid ends.

Triton's own launch binds and specialises every argument and encodes every TMA descriptor in each call, which at small M
takes longer than the kernel (docs/design-notes.md). A prepared launch (`kernel_launch.Launch`) does this once for each
variant, keeps the expanded argument list, and reuses it with the addresses of each call (`_triton.repeated`, which
lists the cases that are left to Triton).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from triton import JITFunction, OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import _triton
from ..errors import Unsupported
from ..kernel_launch import Launch
from ..lang.descriptors import for_gpu
from ..lang.jit import Options
from ..residency import Noting, ResidentPrograms
from .base import Arguments

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from .cuda import GpuBackend


SLOT = 128  # a program counts as at least this number of threads, because an SM holds at most 16, 24 or 32 programs


def _flattened(value: object) -> Iterator[object]:
    """Return the argument itself, or each field of a NamedTuple. A constant is returned as its value."""
    if isinstance(value, tuple):
        for part in value:
            yield from _flattened(part)
    else:
        yield value.value if isinstance(value, tl.constexpr) else value


def _kinds(value: object) -> Hashable:
    """Return a key that distinguishes the variants of a NamedTuple whose fields change between calls."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_kinds, value)) if isinstance(value, tuple) else value


def _kind(value: object) -> object:
    """Return the properties of an argument, other than its address, for which Triton specialises a kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, TensorDescriptor):
        return (value.base.dtype, *value.block_shape)
    return value if isinstance(value, int | str | tl.dtype) else type(value)


class Launcher:
    """Launches the kernels of one rank."""

    def __init__(self, backend: GpuBackend) -> None:
        _triton.require()
        self.backend = backend
        self.loaded: dict[Hashable, CompiledKernel] = {}  # by variant

    def launch(
        self, kernel: JITFunction, grid: int, values: Arguments, options: Options, stream: torch.cuda.Stream
    ) -> CompiledKernel:
        """Launch through Triton, after the checks of `load`."""
        with torch.cuda.stream(stream):
            self.load(kernel, grid, values, options)
            return kernel[(grid,)](**for_gpu(values, self.backend.capability), **_triton.options(options))

    def run(self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Any]) -> None:
        """Run a prepared launch with the addresses of this call. Triton specialises for dtypes and for addresses that
        are multiples of 16, so each combination of these is a variant."""
        kinds: list[object] = []
        addresses: list[object] = []
        try:
            for name in launch.moving:
                value = address = kind = moving[name]  # None remains None
                if isinstance(value, torch.Tensor):
                    address = value.data_ptr()
                    kind = (value.dtype,) if address % 16 else value.dtype
                elif type(value) is int:  # an integer that the kernel does not specialise
                    kind = int
                elif value is not None:  # a NamedTuple
                    kind, address = _kinds(value), _triton.address(value, fixed=False)
                kinds.append(kind)
                addresses.append(address)
        except KeyError:
            launch.arguments(moving)  # raises the error that names the missing argument
            raise
        ready = launch.variants.get(key := tuple(kinds))
        if ready is None:
            self._launch_first(launch, stream, moving, key)
        elif torch._C._cuda_getDevice() == self.backend.device.index:
            ready(stream.cuda_stream, addresses)
        else:  # a user's thread with a different current device; CUDA launches on the current device
            with torch.cuda.device(self.backend.device):
                ready(stream.cuda_stream, addresses)

    def _launch_first(
        self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Any], kinds: Hashable
    ) -> None:
        values = launch.arguments(moving)
        compiled = self.launch(launch.kernel, launch.grid, values, launch.options, stream)
        arguments = for_gpu(values, self.backend.capability)
        if any(arguments[name] is not values[name] for name in launch.moving):
            return  # Triton launches a descriptor that is passed as its fields, because more than its address changes
        ready = _triton.repeated(launch.kernel, compiled, launch.grid, arguments, launch.moving)
        if ready is not None:
            launch.variants[kinds] = ready

    def load(
        self,
        kernel: JITFunction,
        grid: int,
        values: Arguments,
        options: Options,
        co_resident: CompiledKernel | None = None,
    ) -> CompiledKernel:
        """Compile and load a variant on its first use, and return it. Raise Unsupported unless the kernel's programs
        fit on an SM, together with a program of `co_resident`, and can all be resident at once. The last condition
        does not apply if the launch is `local`, since its programs do not wait for each other. Only the caller knows
        which launches share an SM (`kernel_launch.load_in_order`), since the next load may be another operator's."""
        unspecialized = {p.name for p in kernel.params if p.do_not_specialize}
        leaves = [part for name, value in values.items() if name not in unspecialized for part in _flattened(value)]
        # Triton compiles separate kernels for addresses that are multiples of 16 and for other addresses.
        aligned = (v.data_ptr() % 16 == 0 for v in leaves if isinstance(v, torch.Tensor))
        variant = (kernel, grid, *options.values(), *map(_kind, leaves), *aligned)
        if variant not in self.loaded:
            self.loaded[variant] = self._checked(kernel, grid, values, options)
        compiled = self.loaded[variant]
        if co_resident is not None and not self.fits(co_resident, *[compiled] * options.get("per_sm", 1)):
            raise Unsupported(
                f"{kernel.fn.__name__}: its programs do not fit on an SM together with those of the launch before it"
            )
        return compiled

    def _checked(self, kernel: JITFunction, grid: int, values: Arguments, options: Options) -> CompiledKernel:
        """Compile and load a variant. Raise Unsupported if a program does not fit on an SM, or if programs that wait
        for each other are not all resident."""
        compiled = self.compiled(kernel, grid, values, options)
        if options.get("co_resident"):
            _triton.share_all_memory(compiled)
        if not options.get("local") and grid > self.backend.sm_count * self.occupancy(compiled):
            raise Unsupported(
                f"{kernel.fn.__name__}: {grid} programs are not resident at once on {self.backend.sm_count} SMs, "
                f"{self.occupancy(compiled)} an SM"
            )
        return compiled

    def compiled(self, kernel: JITFunction, grid: int, values: Arguments, options: Options) -> CompiledKernel:
        """Return the compiled and loaded kernel of a launch. Raises Unsupported if a program does not fit."""
        try:
            arguments = for_gpu(values, self.backend.capability)
            with _triton.no_compile_hooks():
                compiled: CompiledKernel = kernel.warmup(**arguments, **_triton.options(options), grid=(grid,))
            compiled._init_handles()
        except OutOfResources as e:  # Triton's error is no RuntimeError
            raise Unsupported(f"{kernel.fn.__name__}: a program does not fit on this GPU: {e}") from e
        return compiled

    def fits(self, *programs: CompiledKernel) -> bool:
        """Return whether programs of these compiled kernels can be resident on one SM at once."""
        needed = map(sum, zip(*map(taken_by, programs), strict=True))
        return all(taken <= room for taken, room in zip(needed, room_of(self.backend.device), strict=True))

    def occupancy(self, compiled: CompiledKernel) -> int:
        """Return the number of programs of a compiled kernel that fit on one SM."""
        room = room_of(self.backend.device)
        return min(have // taken for taken, have in zip(taken_by(compiled), room, strict=True))


def room_of(device: torch.device) -> tuple[int, ...]:
    """Return the numbers of registers, bytes of shared memory and threads of an SM."""
    props: Any = torch.cuda.get_device_properties(device)
    return (
        props.regs_per_multiprocessor,
        props.shared_memory_per_multiprocessor,
        props.max_threads_per_multi_processor,
    )


def taken_by(compiled: CompiledKernel) -> tuple[int, ...]:
    """Return the part of `room_of` that a program occupies."""
    threads = compiled.metadata.num_warps * 32
    return (compiled.n_regs + 7) // 8 * 8 * threads, compiled.metadata.shared + 1024, threads


class NotingLauncher:
    """The launcher of a rank while the launches of a call are noted."""

    def __init__(self, launcher: Launcher, noting: Noting) -> None:
        self.launcher, self._noting, self.load = launcher, noting, launcher.load

    def launch(
        self, kernel: JITFunction, grid: int, values: Arguments, options: Options, stream: torch.cuda.Stream
    ) -> None:
        self.launcher.launch(kernel, grid, values, options, stream)
        self._note(kernel, grid, values, options, stream)

    def run(self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Any]) -> None:
        self.launcher.run(launch, stream, moving)
        self._note(launch.kernel, launch.grid, launch.arguments(moving), launch.options, stream)

    def _note(
        self, kernel: JITFunction, grid: int, values: Arguments, options: Options, stream: torch.cuda.Stream
    ) -> None:
        if not options.get("local"):
            with torch.cuda.device(self.launcher.backend.device):
                compiled = self.launcher.compiled(kernel, grid, values, options)
            registers, shared, threads = taken_by(compiled)
            self._noting.add(stream, ResidentPrograms(grid, (registers, shared, max(threads, SLOT))))
