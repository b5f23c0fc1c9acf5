"""Launches `weft.jit` kernels on a GPU: checked and loaded once per specialisation, then with as little Python as
possible.

Checked before the first launch: the grid must be resident at once (a program that never starts never signals), and the
kernel is loaded before anything spins, because lazy loading can wedge behind a spinning grid.

Triton's own launch binds and specialises every argument and encodes every TMA descriptor on each call, which
at small M takes longer than the kernel (docs/design-notes.md). One given a `key` does so once; the expanded argument
list is kept and sent again (`_triton.repeated`, which says where that is left to Triton), with the addresses of the day
of what the allocator gives now here and now there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from triton import JITFunction, OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import _triton
from ..errors import Unsupported
from ..lang.descriptors import for_gpu
from .base import NONE_MOVING, Arguments, Moving, Options

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from .cuda import GpuBackend

_KEPT = 8192  # prepared launches; each holds a few hundred bytes and no GPU memory


def _parts(value: object) -> Iterator[object]:
    """An argument; of a NamedTuple each of its fields, a constant by its value."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value.value if isinstance(value, tl.constexpr) else value


def _kind(value: object) -> object:
    """What of an argument Triton compiles for and all ranks have alike."""
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
        self._prepared: dict[Hashable, _triton.Ready] = {}
        self._beside: CompiledKernel | None = None  # the kernel last loaded to run beside another

    def launch(
        self,
        kernel: JITFunction,
        grid: int,
        args: Arguments | Callable[[], Arguments],
        options: Options,
        stream: torch.cuda.Stream,
        key: Hashable,
        moving: Moving = NONE_MOVING,
    ) -> None:
        places = [t.data_ptr() for t in moving.values()]
        if key is not None:
            if places:  # Triton compiles for addresses of whole 16-byte words, and without
                key = (key, *(place % 16 for place in places))
            ready = self._prepared.get(key)
            if ready is not None:
                if torch._C._cuda_getDevice() == self.backend.device.index:
                    ready(stream.cuda_stream, places)
                else:  # a thread of the user's that has not set its device, to which CUDA holds a launch
                    with torch.cuda.device(self.backend.device):
                        ready(stream.cuda_stream, places)
                return
        values = args() if callable(args) else args
        with torch.cuda.stream(stream):
            self.load(kernel, grid, values, options)
            values = for_gpu(values, self.backend.capability)
            compiled = kernel[(grid,)](**values, **_triton.options(options))
        if key is not None:
            ready = _triton.repeated(kernel, compiled, grid, values, moving)
            if ready is not None:
                if len(self._prepared) >= _KEPT:
                    self._prepared.clear()
                self._prepared[key] = ready

    def load(self, kernel: JITFunction, grid: int, values: Arguments, options: Options) -> bool:
        """Compile and load a variant the first time, and say whether its sizes are new; raise Unsupported unless its
        programs fit and are resident at once."""
        free = {p.name for p in kernel.params if p.do_not_specialize}
        parts = [part for name, value in values.items() if name not in free for part in _parts(value)]
        sizes = (kernel, grid, *options.values(), *map(_kind, parts))
        # Triton compiles for addresses of whole 16-byte words, and without; where one lies may differ by rank.
        variant = (sizes, *(v.data_ptr() % 16 == 0 for v in parts if isinstance(v, torch.Tensor)))
        beside, self._beside = self._beside, None  # for the load that follows it alone
        if variant in self._checked and beside is None:
            return False
        try:
            arguments = for_gpu(values, self.backend.capability)
            compiled = kernel.warmup(**arguments, **_triton.options(options), grid=(grid,))
            compiled._init_handles()
        except OutOfResources as e:  # Triton's own is no RuntimeError
            raise Unsupported(f"{kernel.fn.__name__}: a program does not fit on this GPU: {e}") from e
        if options.get("beside"):
            self._beside = compiled
            _triton.share_all_memory(compiled)
        elif beside is not None and not self.fits(compiled, beside):
            raise Unsupported(
                f"{kernel.fn.__name__}: the pulling programs do not fit on an SM beside the computing ones"
            )
        if grid > self.backend.sm_count * self.occupancy(compiled):
            raise Unsupported(
                f"{kernel.fn.__name__}: {grid} programs are not resident at once on {self.backend.sm_count} SMs, "
                f"{self.occupancy(compiled)} a SM"
            )
        new = sizes not in self._checked
        self._checked.update((sizes, variant))
        return new

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
