"""torch's asynchronous tensor parallelism, computed by weft.

torch.compile's micro-pipeline pass and eager libraries call four operators of torch that fuse a GEMM with a collective:

    symm_mem.fused_all_gather_matmul             all_gather(A) @ B for one B or several
    symm_mem.fused_matmul_reduce_scatter         reduce_scatter(A @ B)
    symm_mem.fused_all_gather_scaled_matmul      the same for 8-bit operands with scales by tensor or by row
    symm_mem.fused_scaled_matmul_reduce_scatter

`async_tp` registers weft's operators in place of torch's in the dispatcher, so that neither code nor graphs change.
Where weft does not support a call, torch's own implementation runs it, and weft counts the call under the reason.
The choice depends only on properties that are equal on all ranks (shapes, dtype, dimension, group), so all ranks make
the same choice.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..backends.gloo import serves
from ..launch import init
from ..nn.scaled import Activation, ProductKeywords
from ..ops.all_gather_matmul.op import ALL_GATHER_MATMUL, all_gather_matmul, all_gather_matmul_with_gathered
from ..ops.matmul_reduce.op import MATMUL_REDUCE_SCATTER, matmul_reduce_scatter
from ..ops.product import matmul
from ..plans import Plan
from ..scaled_tensor import E4M3, ScaledTensor
from ..tensor_checks import DTYPES
from ..world import World

FUSED_GATHER, FUSED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
SCALED_GATHER, SCALED_SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"

_active: list[AsyncTP] = []  # calls use the plan of the last AsyncTP, and every AsyncTP counts all calls
_libraries: list[torch.library.Library] = []  # weft's registrations with the dispatcher
_worlds: dict[str, World] = {}  # the key is the group's name


def async_tp(*groups: ProcessGroup | World, plan: str | Plan = "auto") -> AsyncTP:
    """Replace torch's `symm_mem` fused operators by weft's until the result is closed.

    Args:
        groups: the tensor-parallel groups for which torch.compile's micro-pipeline pass is enabled. Without groups,
            weft computes only explicit calls of the operators. A World in place of its group computes the group's
            calls.
        plan: the plan of `weft.all_gather_matmul` and `weft.matmul_reduce_scatter`: "auto" or a kind that both have.

    Returns:
        an AsyncTP, which counts calls. It restores torch's operators at the end of its context, or in `close()`.

    Raises ValueError for a plan that one of the two operators does not have. At the first use of a group, `weft.init`,
    which is a collective of the group's ranks, makes the group's World.
    """
    return AsyncTP(groups, plan)


class AsyncTP(contextlib.AbstractContextManager["AsyncTP"]):
    """weft's implementation of torch's operators. `served` counts the calls that weft computed, by operator;
    `fell_through` counts the calls that torch computed, by (operator, reason). Both include calls from compiled code,
    but not replays of CUDA graphs."""

    def __init__(self, groups: Sequence[ProcessGroup | World], plan: str | Plan) -> None:
        for op in (ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER):
            op.check_plan(plan)
        self.plan = plan
        self.served: Counter[str] = Counter()
        self.fell_through: Counter[tuple[str, str]] = Counter()
        self._undo = contextlib.ExitStack()
        for world in groups:
            if isinstance(world, World) and world.group is not None:
                _worlds[world.group.group_name] = world
        process_groups = [group.group if isinstance(group, World) else group for group in groups]
        if names := [group.group_name for group in process_groups if group is not None]:
            self._undo.enter_context(_pipelined(names))
        if not _active:
            _libraries.append(_installed())
        _active.append(self)

    def close(self) -> None:
        """Restore torch's operators if no other AsyncTP is active. Compiled code then calls torch's operators as
        well."""
        if self in _active:
            _active.remove(self)
            self._undo.close()
        if not _active:
            while _libraries:
                _libraries.pop()._destroy()

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self) -> str:
        """Return a line for each operator that was called, with the counts of its calls."""
        lines = [f"{name}: {n} served" for name, n in sorted(self.served.items())]
        lines += [f"{name}: {n} by torch ({why})" for (name, why), n in sorted(self.fell_through.items())]
        return "\n".join(lines) or "none of torch's fused operators was called"


class Factor(NamedTuple):
    """A weight [K, N], and the bias of its product with x. A weight in e4m3 also has scales, and the dtype and the
    accumulation mode of the product."""

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    dtype: torch.dtype | None = None
    fast_accum: bool = False

    def arguments(self, x: Activation) -> tuple[Activation, Activation, Tensor | None]:
        """Return the operands of the product, scaled like x."""
        weight = self.weight.t()
        if self.scales is None or not isinstance(x, ScaledTensor):
            return x, weight, self.bias
        return x, x._replace(values=weight, scales=self.scales), self.bias

    @property
    def options(self) -> ProductKeywords:
        return ProductKeywords(out_dtype=self.dtype, use_fast_accum=self.fast_accum)


# -- the operators -----------------------------------------------------------------------------------------------------
def rows_of(front: Tensor, scales: Tensor | None) -> Activation:
    """Return the rows of front [.., K], with their scales if there are any: one scale for each row, or one for all
    rows."""
    rows = front.flatten(0, -2)
    if scales is None:
        return rows
    if scales.numel() == 1:
        return ScaledTensor(rows, scales.view(1), "tensor")
    return ScaledTensor(rows, scales.reshape(-1, 1), "row")


def gather(
    world: World, x: Tensor, scales: Tensor | None, factors: Sequence[Factor], dim: int, return_gathered: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return all_gather(x) along `dim`, or None without `return_gathered`, and the products of the gathered x with the
    factors. The gather concatenates the ranks' x [.., K] along `dim`, which is not the last dimension. `scales` are the
    scales of an x in e4m3, one for each row or one for all rows.

    The widest weight's GEMM overlaps the gather; the other GEMMs follow. A weight that is the transpose of a contiguous
    matrix, as in `torch.nn.Linear`, is used in place; any other weight is copied.
    """
    front, plan, stream = x.movedim(dim, 0), _active[-1].plan, world.current_stream()
    rows = rows_of(front, scales if scales is None or scales.numel() == 1 else scales.movedim(dim, 0))

    def restore_shape(y: Tensor) -> Tensor:
        return y.view(world.size * front.shape[0], *front.shape[1:-1], y.shape[1]).movedim(0, dim)

    widest = max(factors, key=lambda factor: factor.weight.shape[1])
    if not return_gathered and len(factors) == 1:
        y = all_gather_matmul(*widest.arguments(rows), world=world, plan=plan, **widest.options)
        return None, [restore_shape(y)]
    y, gathered = all_gather_matmul_with_gathered(*widest.arguments(rows), world=world, plan=plan, **widest.options)

    def product(factor: Factor) -> Tensor:
        if factor is widest:
            return y
        if isinstance(gathered, ScaledTensor):
            return matmul(*factor.arguments(gathered), world=world, **factor.options)
        return world.backend.linear(gathered, factor.weight.t(), factor.bias, stream)

    products = [restore_shape(product(factor)) for factor in factors]
    world.finish(stream)
    values = gathered.values if isinstance(gathered, ScaledTensor) else gathered
    return restore_shape(values) if return_gathered else None, products


def scatter(world: World, front: Tensor, scales: Tensor | None, factor: Factor, dim: int, reduce_op: str) -> Tensor:
    """Sum or average front @ factor over the ranks, and return this rank's part along `dim`, which is not the last
    dimension. `front` [.., K] has `dim` as its first dimension."""
    arguments = factor.arguments(rows_of(front, scales))
    y = matmul_reduce_scatter(*arguments, world=world, plan=_active[-1].plan, **factor.options)
    total = y.view(front.shape[0] // world.size, *front.shape[1:-1], y.shape[1]).movedim(0, dim).contiguous()
    return total.div_(world.size) if reduce_op == "avg" else total


def _all_gather(A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True) -> object:
    _check_operands(group_name, A, Bs, gather_dim)
    if _native(A, Bs, gather_dim, group_name):
        raise NotServed(f"its native kernel, by {NATIVE}")
    return gather(_world(group_name), A, None, [Factor(B) for B in Bs], gather_dim, return_A)


def _reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> object:
    _check_operands(group_name, A, [B], scatter_dim)
    world = _world_of_scatter(group_name, reduce_op, A.shape[scatter_dim])
    return scatter(world, A.movedim(scatter_dim, 0), None, Factor(B), scatter_dim, reduce_op)


def _all_gather_scaled(
    A: Tensor,
    Bs: list[Tensor],
    A_scale: Tensor,
    B_scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[torch.dtype | None],
    use_fast_accum: list[bool],
) -> object:
    dtypes = _symm_mem()._maybe_convert_scalar_types_to_dtypes(out_dtypes)
    _check_operands(group_name, A, Bs, gather_dim, E4M3)
    for weight, scale, result_scale, dtype in zip(Bs, B_scales, result_scales, dtypes, strict=True):
        _check_scales(weight, A_scale, scale, result_scale, dtype)
    world, size = _world(group_name), A.shape[gather_dim]
    if A_scale.numel() > 1 and A_scale.shape[gather_dim] == world.size * size != size:  # all ranks' rows
        A_scale = A_scale.narrow(gather_dim, world.rank * size, size)
    if A_scale.numel() > 1 and A_scale.shape[:-1] != A.shape[:-1]:
        raise NotServed("scales that do not fit")
    factors = [Factor(*fields) for fields in zip(Bs, B_scales, biases, dtypes, use_fast_accum, strict=True)]
    return gather(world, A, A_scale, factors, gather_dim, True)


def _scaled_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: list[int],
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> object:
    lead, dim = tuple(output_shape[:-1]), orig_scatter_dim
    _check_operands(group_name, A, [B], 0, E4M3)
    _check_scales(B, A_scale, B_scale, result_scale, out_dtype)
    if bias is not None:
        raise NotServed("a bias, which torch adds on every rank")
    if not 0 <= dim < len(lead) or (A_scale.numel() > 1 and A_scale.numel() * A.shape[-1] != A.numel()):
        raise NotServed("shapes that do not fit")
    world = _world_of_scatter(group_name, reduce_op, lead[dim])
    front = A.reshape(*lead, A.shape[-1]).movedim(dim, 0)
    scales = A_scale if A_scale.numel() == 1 else A_scale.reshape(*lead, 1).movedim(dim, 0)
    return scatter(world, front, scales, Factor(B, B_scale, None, out_dtype, use_fast_accum), dim, reduce_op)


# -- which calls weft computes -----------------------------------------------------------------------------------------
class NotServed(Exception):
    """Raised for a call that weft does not compute. The message states the reason."""


def _with_fallback(name: str, compute: Callable[..., object]) -> Callable[..., object]:
    """Return weft's implementation of an operator. It calls `compute`, or torch's implementation if `compute` raises
    NotServed, and counts the calls."""

    def run(x: Tensor, *args: object, **kwargs: object) -> object:
        try:
            with torch.no_grad():
                result = compute(x, *args, **kwargs)
        except NotServed as reason:
            why = f"{reason}"
        else:
            for service in _active:
                service.served[name] += 1
            return result
        for service in _active:
            service.fell_through[name, why] += 1
        return _torchs(name, x)(x, *args, **kwargs)

    return run


def _check_operands(
    group_name: str, x: Tensor, weights: Sequence[Tensor], dim: int, dtype: torch.dtype | None = None
) -> None:
    """Raise NotServed for operands that weft does not multiply. This check runs before the World is made, since a fake
    group cannot have a World. `dtype` is the dtype that the operands must have; None means either 16-bit dtype."""
    if _symm_mem()._is_test_mode:
        raise NotServed("torch's test mode")
    if not _has_world(group_name, x):
        raise NotServed(f"a group on {x.device.type}")
    if dim in (-1, x.dim() - 1):
        raise NotServed("along the last dimension")
    if not 0 <= dim < x.dim() or any(w.dim() != 2 or w.shape[0] != x.shape[-1] for w in weights):
        raise NotServed("shapes that do not fit")
    if x.dtype not in ((dtype,) if dtype else DTYPES) or any(w.dtype != x.dtype for w in weights):
        dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (x, *weights))
        raise NotServed(f"of {', '.join(dtypes)}")
    if not weights:
        raise NotServed("no matrix")


def _check_scales(
    weight: Tensor, x_scale: Tensor, scale: Tensor, result_scale: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Raise NotServed for scales of a kind that weft does not support."""
    if result_scale is not None:
        raise NotServed("a scale of the result")
    if dtype not in DTYPES:
        raise NotServed(f"results of {str(dtype).removeprefix('torch.')}")
    if x_scale.dtype != torch.float32 or scale.dtype != torch.float32:
        raise NotServed("scales that are not float32")
    rowwise = x_scale.numel() > 1, scale.numel() > 1
    if rowwise not in ((False, False), (True, True)) or scale.numel() not in (1, weight.shape[1]):
        raise NotServed("scales neither by tensor nor by row")
    if weight.shape[0] % 16 or weight.shape[1] % 8:
        raise NotServed(f"K {weight.shape[0]} or N {weight.shape[1]} of no whole 16-byte words")


def _world_of_scatter(group_name: str, reduce_op: str, rows: int) -> World:
    """Return the group's World. Raises NotServed if weft does not reduce by `reduce_op` or cannot scatter `rows`."""
    if reduce_op not in ("sum", "avg"):
        raise NotServed(f"reduces by {reduce_op}")
    world = _world(group_name)
    if rows % world.size:
        raise NotServed("does not divide by the ranks")
    return world


def _native(x: Tensor, weights: Sequence[Tensor], dim: int, group_name: str) -> bool:
    """Return whether torch would use its native kernel, which the environment variable NATIVE requests."""
    return NATIVE in os.environ and _symm_mem()._should_use_fused_all_gather_matmul_native(x, weights, dim, group_name)


def _has_world(group_name: str, x: Tensor) -> bool:
    """Return whether the group can have a World. A group of GPUs can, and so can a group of CPU processes over gloo, or
    the group of an emulated World."""
    return x.is_cuda or group_name in World._all or serves(_group(group_name))


def world_of(group_name: str, x: Tensor) -> World | None:
    """Return the group's World, which is made at the first use, or None for a group that cannot have one."""
    return _world(group_name) if _has_world(group_name, x) else None


def _world(group_name: str) -> World:
    if group_name in World._all:
        return World._all[group_name]
    group = _group(group_name)
    world = _worlds.get(group_name)
    if world is None or world.group is not group:  # a new group may have the same name as a destroyed group
        world = _worlds[group_name] = init(group)
    return world


def _group(name: str) -> ProcessGroup:
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# -- torch's -----------------------------------------------------------------------------------------------------------
@functools.cache
def _symm_mem() -> ModuleType:
    """Return torch's module of symmetric memory. Its import defines the operators."""
    import torch.distributed._symmetric_memory as module

    return module


def _torchs(name: str, x: Tensor) -> Callable[..., object]:
    """Return torch's own implementation: the registered operator for tensors on GPUs, else torch's fallback."""
    function: Callable[..., object] = getattr(_symm_mem(), f"_{name}" if x.is_cuda else f"_{name}_fallback")
    return function


@contextlib.contextmanager
def _pipelined(names: Sequence[str]) -> Iterator[None]:
    """Enable torch.compile's micro-pipeline pass for these groups. Inductor's CUDA graphs exclude the operators,
    because the allocations of a first call outlive the call, and Inductor would reuse their memory."""
    from torch._inductor import config

    with warnings.catch_warnings():
        # torch deprecates this function, but the pass still checks that it was called.
        warnings.simplefilter("ignore", FutureWarning)
        for name in names:
            _symm_mem().enable_symm_mem_for_group(name)
    served = FUSED_GATHER, FUSED_SCATTER, SCALED_GATHER, SCALED_SCATTER
    partitioned = [*config.custom_should_partition_ops, *(f"symm_mem::{op}" for op in served)]
    with config.patch(_micro_pipeline_tp=True, custom_should_partition_ops=partitioned):
        yield


def _installed() -> torch.library.Library:
    """Register weft's operators in place of torch's. `_destroy()` of the returned library restores torch's."""
    _symm_mem()
    library = torch.library.Library("symm_mem", "IMPL")
    implementations: dict[str, Callable[..., object]] = {FUSED_GATHER: _all_gather, FUSED_SCATTER: _reduce_scatter}
    implementations |= {SCALED_GATHER: _all_gather_scaled, SCALED_SCATTER: _scaled_reduce_scatter}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # about overridden operators
        for name, compute in implementations.items():
            for key in ("CUDA", "CPU"):
                library.impl(name, _with_fallback(name, compute), key, allow_override=True)
    return library
