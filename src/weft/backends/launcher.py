"""Launches `weft.jit` kernels on a GPU: checked and loaded once per specialisation, then with as little Python as
possible.

Checked before the first launch: the grid must be resident at once (a program that never starts never signals), and the
kernel is loaded before anything spins, because lazy loading can wedge behind a spinning grid.

Triton's own launch binds and specialises every argument and encodes every TMA descriptor on each call, which
at small M takes longer than the kernel (docs/design-notes.md). A prepared launch (`launches.Launch`) does so once for
each variant; the expanded argument list is kept and sent again with the addresses of the call (`_triton.repeated`,
which says what is left to Triton).
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
from ..lang.descriptors import for_gpu
from .base import Arguments, Options

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from ..kernel_launch import Launch
    from .cuda import GpuBackend


def _parts(value: object) -> Iterator[object]:
    """An argument; of a NamedTuple each of its fields, a constant by its value."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value.value if isinstance(value, tl.constexpr) else value


def _kinds(value: object) -> Hashable:
    """What tells variants of a moving NamedTuple apart."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_kinds, value)) if isinstance(value, tuple) else value


def _kind(value: object) -> object:
    """What of an argument Triton compiles for, but for its address."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, TensorDescriptor):
        return (value.base.dtype, *value.block_shape)
    return value if isinstance(value, int | str | tl.dtype) else type(value)


class Launcher:
    def __init__(self, backend: GpuBackend) -> None:
        _triton.require()
        self.backend = backend
        self._checked: set[Hashable] = set()
        self._co_resident_with: CompiledKernel | None = None  # the kernel last loaded to run beside another

    def launch(
        self, kernel: JITFunction, grid: int, values: Arguments, options: Options, stream: torch.cuda.Stream
    ) -> CompiledKernel:
        """Once, through Triton, behind the checks of `load`."""
        with torch.cuda.stream(stream):
            self.load(kernel, grid, values, options)
            return kernel[(grid,)](**for_gpu(values, self.backend.capability), **_triton.options(options))

    def run(self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Any]) -> None:
        """A prepared launch, which goes with the addresses of this call. Triton compiles for dtypes and for addresses
        of whole 16-byte words, so each combination of these is a variant."""
        kinds: list[object] = []
        addresses: list[object] = []
        try:
            values = [moving[name] for name in launch.moving]
        except KeyError:
            launch.arguments(moving)  # which says what is not given
            raise
        for value in values:
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                kinds.append(value.dtype if address % 16 == 0 else (value.dtype,))
                addresses.append(address)
            elif type(value) is int:  # which the kernel does not specialise
                kinds.append(int)
                addresses.append(value)
            else:  # a NamedTuple, or None
                kinds.append(_kinds(value))
                addresses.append(_triton.address(value, fixed=False))
        ready = launch.variants.get(tuple(kinds))
        if ready is None:
            self._first(launch, stream, moving, tuple(kinds))
        elif torch._C._cuda_getDevice() == self.backend.device.index:
            ready(stream.cuda_stream, addresses)
        else:  # a thread of the user's that has not set its device, to which CUDA holds a launch
            with torch.cuda.device(self.backend.device):
                ready(stream.cuda_stream, addresses)

    def _first(self, launch: Launch, stream: torch.cuda.Stream, moving: Mapping[str, Any], kinds: Hashable) -> None:
        values = launch.arguments(moving)
        compiled = self.launch(launch.kernel, launch.grid, values, launch.options, stream)
        given = for_gpu(values, self.backend.capability)
        if any(given[name] is not values[name] for name in launch.moving):
            return  # a descriptor that goes in parts, whose address is not all that moves: Triton launches
        ready = _triton.repeated(launch.kernel, compiled, launch.grid, given, launch.moving)
        if ready is not None:
            launch.variants[kinds] = ready

    def load(self, kernel: JITFunction, grid: int, values: Arguments, options: Options) -> None:
        """Compile and load a variant the first time; raise Unsupported unless its programs fit and are resident at
        once."""
        free = {p.name for p in kernel.params if p.do_not_specialize}
        parts = [part for name, value in values.items() if name not in free for part in _parts(value)]
        # Triton compiles for addresses of whole 16-byte words, and without.
        aligned = (v.data_ptr() % 16 == 0 for v in parts if isinstance(v, torch.Tensor))
        variant = (kernel, grid, *options.values(), *map(_kind, parts), *aligned)
        co_resident, self._co_resident_with = self._co_resident_with, None  # for the load that follows it alone
        if variant in self._checked and co_resident is None:
            return
        try:
            arguments = for_gpu(values, self.backend.capability)
            with _triton.no_compile_hooks():
                compiled = kernel.warmup(**arguments, **_triton.options(options), grid=(grid,))
            compiled._init_handles()
        except OutOfResources as e:  # Triton's own is no RuntimeError
            raise Unsupported(f"{kernel.fn.__name__}: a program does not fit on this GPU: {e}") from e
        if options.get("co_resident"):
            self._co_resident_with = compiled
            _triton.share_all_memory(compiled)
        elif co_resident is not None and not self.fits(compiled, co_resident):
            raise Unsupported(
                f"{kernel.fn.__name__}: the pulling programs do not fit on an SM beside the computing ones"
            )
        if grid > self.backend.sm_count * self.occupancy(compiled):
            raise Unsupported(
                f"{kernel.fn.__name__}: {grid} programs are not resident at once on {self.backend.sm_count} SMs, "
                f"{self.occupancy(compiled)} a SM"
            )
        self._checked.add(variant)

    def fits(self, a: CompiledKernel, b: CompiledKernel) -> bool:
        """Whether one program of each compiled kernel is resident on one SM at once."""
        props: Any = torch.cuda.get_device_properties(self.backend.device)
        registers = sum((k.n_regs + 7) // 8 * 8 * k.metadata.num_warps * 32 for k in (a, b))
        shared = sum(k.metadata.shared + 1024 for k in (a, b))
        return registers <= props.regs_per_multiprocessor and shared <= props.shared_memory_per_multiprocessor

    def occupancy(self, compiled: CompiledKernel) -> int:
        """Programs of a compiled kernel that fit on one SM, by shared memory, registers and threads."""
        props: Any = torch.cuda.get_device_properties(self.backend.device)
        threads = compiled.metadata.num_warps * 32
        by_shared = props.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024)
        registers = (compiled.n_regs + 7) // 8 * 8 * threads
        return min(
            by_shared, props.regs_per_multiprocessor // registers, props.max_threads_per_multi_processor // threads
        )
