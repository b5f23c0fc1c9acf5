"""A `Launch` is made once. It consists of a kernel and the arguments that are the same in each call.

    @prepared
    def _staged_sum(world: World, rows: int, n: int, dtype: torch.dtype) -> Launch:
        programs = min(world.sm_count, rows)
        return Launch(world, sum_staged, programs, dict(num_warps=8), rows=rows, N=n, out_desc=Matrix(rows, n, (1, n)))

    _staged_sum(world, rows, n, out.dtype)(stream, staging=staging, out_desc=out)

The other arguments change from call to call. The changing arguments are the kernel's parameters for which the launch
fixes no value, or fixes only the view of a tensor, as a `Matrix` (the geometry of a TMA descriptor) or as `Words`. In
each call the caller passes all of them by name, with their addresses in that call (backends/launcher.py). Therefore no
launch can use an address of an earlier call or keep a caller's tensor alive. A function decorated with `prepared`
depends only on its arguments, which are the cache key of its launch; `prepared` refuses tensors among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from triton import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .lang.jit import Options
from .symmetric import Stream, outlives_call

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

Args = ParamSpec("Args")
Prepared = TypeVar("Prepared")
# An argument that changes between calls: a tensor, a NamedTuple with tensors, None, or an integer for which the kernel
# is not specialised.
Moved = torch.Tensor | tuple[Any, ...] | int | None

MOST_PREPARED = 8192  # the most prepared objects of a World; each is a few hundred bytes on the host, and its sequences


@dataclass(frozen=True)
class Matrix:
    """The view of a call's tensor as a row-major [rows, cols] matrix. The kernel's argument is a TMA descriptor with
    blocks of block[0] x block[1] elements."""

    rows: int
    cols: int
    block: tuple[int, int]

    def argument(self, t: torch.Tensor) -> TensorDescriptor:
        """Return the descriptor of a tensor with rows * cols elements."""
        return TensorDescriptor(t, [self.rows, self.cols], [self.cols, 1], list(self.block))


@dataclass(frozen=True)
class Matrices:
    """The view of a call's tensor as `count` matrices, [count, rows, cols], with blocks that stay inside one matrix."""

    count: int
    rows: int
    cols: int
    block: tuple[int, int]

    def argument(self, t: torch.Tensor) -> TensorDescriptor:
        strides = [self.rows * self.cols, self.cols, 1]
        return TensorDescriptor(t, [self.count, self.rows, self.cols], strides, [1, *self.block])


@dataclass(frozen=True)
class Words:
    """The view of a call's tensor as int32 words; the tensor is contiguous, or is one row with any stride."""

    def argument(self, t: torch.Tensor) -> torch.Tensor:
        return t.view(-1).view(torch.int32)


class LaunchTarget(Protocol):
    """An object that launches kernels: a World or a backend."""

    def run_launch(self, launch: Launch, stream: Stream, moving: Mapping[str, Moved], /) -> None: ...

    def load(
        self,
        kernel: JITFunction,
        grid: int,
        args: Mapping[str, object],
        options: Options,
        co_resident: CompiledKernel | None = None,
        /,
    ) -> CompiledKernel | None: ...


class Launch:
    """A launch of a `weft.jit` kernel, created once and called often. A launch has `grid` programs, options
    (`Backend.launch`), and arguments that remain `fixed` as long as the World exists. A call of the object launches the
    kernel; the caller passes the other arguments (`moving`) by name."""

    def __init__(
        self, machine: LaunchTarget, kernel: JITFunction, grid: int, options: Options, **fixed: object
    ) -> None:
        self.kernel, self.grid, self.options, self.fixed = kernel, grid, options, fixed
        if unknown := fixed.keys() - kernel.arg_names:
            raise TypeError(f"{kernel.__name__} has no parameter {', '.join(sorted(unknown))}")
        self.views = {name: value for name, value in fixed.items() if isinstance(value, Matrix | Matrices | Words)}
        # The parameters that a call passes: parameters with a view, and parameters with neither a fixed value nor a
        # default.
        self.moving = tuple(
            [p.name for p in kernel.params if p.name in self.views or (p.name not in fixed and not p.has_default)]
        )
        self.variants: dict[Hashable, Any] = {}  # the backend fills it, by dtypes and alignment of `moving`
        self._run, self._load = machine.run_launch, machine.load

    def __call__(self, stream: Stream, /, **moving: Moved) -> None:
        self._run(self, stream, moving)

    def load(self, co_resident: CompiledKernel | None = None, /, **moving: Moved) -> CompiledKernel | None:
        """Compile, check and load the kernel for tensors of these dtypes and alignments, without running it, and return
        the loaded kernel. co_resident: as in `Backend.load`."""
        return self._load(self.kernel, self.grid, self.arguments(moving), self.options, co_resident)

    def arguments(self, moving: Mapping[str, Moved]) -> dict[str, object]:
        """Return all arguments by name. Raises TypeError unless the names of `moving` are exactly `self.moving`."""
        if moving.keys() != set(self.moving):
            raise TypeError(
                f"{self.kernel.__name__} is launched with {', '.join(self.moving)}, not with {', '.join(moving)}"
            )
        if special := [
            p.name for p in self.kernel.params if type(moving.get(p.name)) is int and not p.do_not_specialize
        ]:
            raise TypeError(
                f"{self.kernel.__name__} is compiled for each value of {', '.join(special)}: pass it to Launch"
            )
        arguments = {**self.fixed, **moving}
        for name, view in self.views.items():
            if isinstance(value := moving[name], torch.Tensor):
                arguments[name] = view.argument(value)
        return arguments


class BoundLaunch(NamedTuple):
    """A launch and its arguments for one call."""

    launch: Launch
    moving: Mapping[str, Moved]

    def on(self, stream: Stream) -> None:
        self.launch(stream, **self.moving)


def load_in_order(steps: Iterable[BoundLaunch]) -> None:
    """Load the kernels of these launches. The programs of a launch must fit on an SM together with a program of the
    launch before it if that has the option co_resident. Raises Unsupported if they do not fit."""
    co_resident = None
    for launch, moving in steps:
        is_co_resident = launch.options.get("co_resident")
        loaded = launch.load(None if is_co_resident else co_resident, **moving)
        co_resident = loaded if is_co_resident else None


class Ahead:
    """Load all kernels of a call before the first of them runs: CUDA may delay the loading of a kernel until a running
    kernel ends, and that kernel may itself wait for the kernel to load. The kernels are loaded once for each
    combination of alignments of the caller's tensors, because Triton compiles a separate kernel for addresses that are
    multiples of 16."""

    def __init__(self) -> None:
        self._loaded: set[Hashable] = set()

    def __call__(
        self,
        tensors: Iterable[torch.Tensor | None],
        steps: Callable[[], Iterable[BoundLaunch]],
        variant: Hashable = None,
    ) -> None:
        """Load the kernels of the launches that `steps` returns (all launches of the call), unless they have been
        loaded for these alignments. tensors: the caller's tensors. variant: distinguishes the calls that share this
        object."""
        aligned = (variant, *[None if t is None else t.data_ptr() % 16 == 0 for t in tensors])
        if aligned not in self._loaded:
            load_in_order(steps())
            self._loaded.add(aligned)


class Keeper(Protocol):
    """An object that caches prepared objects, such as a World."""

    prepared: dict[Hashable, Any]

    def forget_prepared(self) -> None:
        """Drop the prepared objects, so that the next calls create new ones."""


Keeping = TypeVar("Keeping", bound=Keeper)


def prepared(make: Callable[Concatenate[Keeping, Args], Prepared]) -> Callable[Concatenate[Keeping, Args], Prepared]:
    """Decorate a function that creates an object, such as a Launch, for calls of one kind. The function runs at the
    first call with given arguments, which must be hashable. The World caches the object until memory that calls share
    has to grow. Raises TypeError for a tensor among the arguments."""

    @functools.wraps(make)
    def kept(world: Keeping, /, *args: Args.args, **kwargs: Args.kwargs) -> Prepared:
        assert not kwargs, f"{make.__name__} takes positional arguments"
        key = (make, *args)
        result: Prepared | None = world.prepared.get(key)
        if result is None:
            _no_tensor(make.__name__, args)
            with outlives_call():
                result = make(world, *args, **kwargs)
            if len(world.prepared) >= MOST_PREPARED:
                world.forget_prepared()
            world.prepared[key] = result
        return result

    return kept


def _no_tensor(name: str, values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name}: a tensor changes from call to call: pass it to the launch, not to what prepares it"
            )
        if isinstance(value, tuple):
            _no_tensor(name, value)
