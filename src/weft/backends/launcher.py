"""Launches a `weft.jit` kernel on a GPU: checked and loaded once per specialisation.

`weft.jit` promises that what makes overlapped kernels hang is caught before launch: the grid must be resident at once,
and the kernel must be loaded before anything spins, because lazy loading can wedge behind a spinning grid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import Unsupported

if TYPE_CHECKING:
    from .cuda import GpuBackend


class Launcher:
    def __init__(self, backend: GpuBackend) -> None:
        self.backend = backend
        self._checked: set[Any] = set()

    def launch(self, kernel: Any, grid: int, args: dict[str, Any], options: dict[str, Any], stream: Any) -> None:
        if stream != torch.cuda.current_stream(self.backend.device):
            with torch.cuda.stream(stream):
                self._run(kernel, grid, args, options)
        else:
            self._run(kernel, grid, args, options)

    def _run(self, kernel: Any, grid: int, args: dict[str, Any], options: dict[str, Any]) -> None:
        compiled = kernel[(grid,)](**args, **options)
        key = (compiled, grid)
        if key not in self._checked:
            self._checked.add(key)
            if grid > self.backend.sm_count * self.occupancy(compiled):
                raise Unsupported(f"{kernel.fn.__name__}: {grid} programs do not fit on {self.backend.sm_count} SMs at once")

    def occupancy(self, compiled: Any) -> int:
        """Programs of a compiled kernel that fit on one SM, by shared memory, registers and threads."""
        props = torch.cuda.get_device_properties(self.backend.device)
        threads = compiled.metadata.num_warps * 32
        shared = compiled.metadata.shared + 1024
        by_shared = props.shared_memory_per_multiprocessor // shared
        registers = (compiled.n_regs + 7) // 8 * 8 * threads
        return max(1, min(by_shared, props.regs_per_multiprocessor // registers, props.max_threads_per_multi_processor // threads))
