"""Tensor-parallel styles for torch's `parallelize_module` and Lightning's `ModelParallelStrategy`, weft's ops inside.

    norm      SequenceParallel()                          rows in, rows out
    w1, w3    ColwiseParallel(input_layouts=Shard(1))     all-gather + GEMM, one gather for all that take the same x
    w2        RowwiseParallel(output_layouts=Shard(1))    GEMM + reduce-scatter

They are torch's classes with another forward: parameters are split as torch splits them, so state dicts, checkpoints
and optimisers see the same DTensors. What weft does not compute (layouts without a collective beside the GEMM, other
dtypes, groups that have no World) goes torch's own way; `report` says which does, and why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import style
from torch.distributed.tensor.placement_types import Placement

from ..op import Op
from ..ops.all_gather_matmul.op import ALL_GATHER_MATMUL, all_gather_matmul
from ..ops.matmul_reduce.op import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, matmul_all_reduce, matmul_reduce_scatter
from ..plans import Plan
from ..tensor_checks import DTYPES
from ..world import World
from .torch_async_tp import world_of

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "report"]

Tensor = torch.Tensor
NOTE = "_weft_parallel"  # the attribute of a module that says what served its last call


def report(module: nn.Module) -> str:
    """A line for each module with one of these styles: served by weft, or torch's own and why, in its last call."""
    notes = {name: vars(m)[NOTE] for name, m in module.named_modules() if NOTE in vars(m)}
    return "\n".join(f"{name or '(itself)'}: {note}" for name, note in notes.items()) or "no module has a style of weft"


if TYPE_CHECKING:
    _Torchs = style.ColwiseParallel  # and RowwiseParallel, whose methods have the same types
else:
    _Torchs = object


class _LinearStyle(_Torchs):
    """A base class before one of torch's styles. An `nn.Linear` has its parameters split as there, and the forward pass
    `_linear`."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        plan: str | Plan = "auto",
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._op(output_layouts).check_plan(plan)
        self.plan = plan

    def _op(self, output_layouts: Placement | None) -> Op:
        """Return the op that `plan` is for."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            return _noted(super()._apply(module, device_mesh), f"torch's own: {type(module).__name__}")
        distribute_module(module, device_mesh, self._partition_linear_fn)
        module.forward = lambda x: self._linear(module, device_mesh, x)  # type: ignore[method-assign,assignment]
        return _noted(module, "not called yet")

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _own(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor, desired: tuple[Placement, ...]) -> Tensor:
        """Return the linear's output as torch computes it, from x laid out as `desired`."""
        x = self._prepare_input_fn(self.input_layouts, desired, module, (x,), mesh)
        y = F.linear(x, module.weight, module.bias)
        return self._prepare_output_fn(self.output_layouts, self.use_local_output, module, y, mesh)


class ColwiseParallel(_LinearStyle, style.ColwiseParallel):
    """torch's ColwiseParallel, in which an `nn.Linear` with input_layouts=Shard(d), d any dimension but the last, is an
    all-gather + GEMM (`weft.all_gather_matmul`), and its gradient a GEMM + reduce-scatter.

    Modules that take the same tensor one after another (queries, keys and values; gate and up) share one gather, under
    the first one's GEMM. It is kept for the backward pass, as torch keeps it. Under torch.inference_mode, whose tensors
    do not say when they are written, each gathers for itself, and so it does in the capture of a CUDA graph, whose
    memory is its own; under torch.no_grad they share.

    plan: that of `weft.all_gather_matmul`; raises ValueError for one that it does not have. Tensors are bfloat16 or
    float16, or under autocast to one of them.
    """

    def _op(self, output_layouts: Placement | None) -> Op:
        return ALL_GATHER_MATMUL

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        world = world_of(mesh.get_group().group_name, x)
        given, why = _given(world, module, x, self.input_layouts)
        dim = _row_dimension(self.input_layouts[0], x)
        if why is None and (dim is None or self.output_layouts != (Shard(-1),)):
            why = f"{self.input_layouts[0]} to {self.output_layouts[0]}"
        _noted(module, "all-gather + GEMM by weft" if why is None else f"torch's own: {why}")
        if why is not None or world is None or given is None or dim is None:
            return self._own(module, mesh, x, (Replicate(),))
        y = gathered(world, module, x, given, dim, self.plan)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.output_layouts, run_check=False)


class RowwiseParallel(_LinearStyle, style.RowwiseParallel):  # type: ignore[misc]
    """torch's RowwiseParallel, in which an `nn.Linear` with output_layouts=Shard(d), d any dimension but the last, is a
    GEMM + reduce-scatter (`weft.matmul_reduce_scatter`), and with Replicate() a GEMM + all-reduce
    (`weft.matmul_all_reduce`); the first one's gradient is an all-gather + GEMM.

    plan: that of the op; raises ValueError for one that it does not have. Tensors are bfloat16 or float16, or under
    autocast to one of them. A dimension that the ranks do not divide goes torch's own way.
    """

    def _op(self, output_layouts: Placement | None) -> Op:
        return MATMUL_REDUCE_SCATTER if isinstance(output_layouts, Shard) else MATMUL_ALL_REDUCE

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        world = world_of(mesh.get_group().group_name, x)
        given, why = _given(world, module, x, self.input_layouts)
        dim, whole = _row_dimension(self.output_layouts[0], x), self.output_layouts == (Replicate(),)
        if why is None and (self.input_layouts != (Shard(-1),) or (dim is None and not whole)):
            why = f"{self.input_layouts[0]} to {self.output_layouts[0]}"
        if why is None and world is not None and dim is not None and x.shape[dim] % world.size:
            why = f"{x.shape[dim]} rows over {world.size} ranks"
        op = "all-reduce" if whole else "reduce-scatter"
        _noted(module, f"GEMM + {op} by weft" if why is None else f"torch's own: {why}")
        if why is not None or world is None or given is None:
            return self._own(module, mesh, x, (Shard(-1),))
        y = summed(world, given, dim, self.plan)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.output_layouts, run_check=False)


class SequenceParallel(style.SequenceParallel):
    """torch's SequenceParallel, for norms. The module runs on this rank's rows as they are, without DTensors around
    every operator; gradients of its parameters are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = module.forward
        distribute_module(module, device_mesh, self._replicate_module_fn)
        module.forward = lambda x: self._rows(module, own, device_mesh, x)
        return _noted(module, "not called yet")

    def _rows(self, module: nn.Module, own: Callable[[Tensor], Tensor], mesh: DeviceMesh, x: Tensor) -> Tensor:
        world = world_of(mesh.get_group().group_name, x)
        why = None if world is not None else f"a group on {x.device.type}"
        if not module._parameters:  # a dropout's draws differ by rank, as torch has them
            why = "no parameters"
        elif isinstance(x, DTensor) and x.placements != self.sequence_sharding:
            why = f"given {x.placements[0]}"
        _noted(module, "on local rows" if why is None else f"torch's own: {why}")
        if why is not None:
            y = own(self._prepare_input_fn(self.sequence_sharding, module, (x,), mesh))
            return self._prepare_output_fn(self.use_local_output, module, y, mesh)
        local = x.to_local() if isinstance(x, DTensor) else x
        kept, group = dict(module._parameters), mesh.get_group()
        here = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in kept.items()}
        shared: dict[str, Any] = {n: None if p is None else SharedGradient.apply(p, group) for n, p in here.items()}
        module._parameters.update(shared)
        try:
            y = own(local)
        finally:
            module._parameters.update(kept)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.sequence_sharding, run_check=False)


class SharedGradient(torch.autograd.Function):
    """A tensor that is the same on all ranks, each of which has a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


# -- the ops -----------------------------------------------------------------------------------------------------------
@dataclass
class LinearOperands:
    """A call's local operands, in the dtype that it is computed in. bias: this rank's part for a column-parallel
    linear, all of it for a row-parallel one."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass
class Gathered:
    """What was gathered last, for other modules that take the same x: the tensor itself, unwritten since."""

    of: weakref.ref[Tensor]
    version: int
    key: tuple[object, ...]
    rows: Tensor
    served: set[int] = field(default_factory=set)

    def serves(self, x: Tensor, key: tuple[object, ...], module: nn.Module) -> bool:
        """Whether these rows are what the module gathers from x. A module that comes again is in another pass, and
        gathers anew."""
        same = self.of() is x and (self.version, self.key) == (x._version, key)
        return same and id(module) not in self.served


_gathered: dict[str, Gathered] = {}  # by the name of the World


def gathered(world: World, module: nn.Module, x: Tensor, given: LinearOperands, dim: int, plan: str | Plan) -> Tensor:
    """all_gather(x) along `dim` @ weight.T + bias."""
    front = given.x.movedim(dim, 0)
    key = dim, given.x.dtype, plan, torch.is_grad_enabled()
    last = _gathered.get(world.name)
    # An inference tensor has no version, so nobody could know that it was written since. What was gathered outside a
    # capture or in another one is not there when this one is replayed.
    if x.is_inference() or world.capturing():
        y = all_gather_matmul(front.flatten(0, -2), given.weight, given.bias, world=world, plan=plan)
    elif last is not None and last.serves(x, key, module):
        last.served.add(id(module))
        y = F.linear(last.rows, given.weight, given.bias)
    else:
        rows = front.flatten(0, -2)
        y, full = all_gather_matmul(rows, given.weight, given.bias, world=world, plan=plan, return_gathered=True)
        name = world.name
        held = Gathered(weakref.ref(x, lambda of: _forget(name, of)), x._version, key, full, {id(module)})
        _gathered[name] = held
    lead = world.size * front.shape[0], *front.shape[1:-1]
    return y.view(*lead, y.shape[1]).movedim(0, dim)


def _forget(name: str, of: weakref.ref[Tensor]) -> None:
    if name in _gathered and _gathered[name].of is of:
        del _gathered[name]


def summed(world: World, given: LinearOperands, dim: int | None, plan: str | Plan) -> Tensor:
    """The sum over ranks of x @ weight.T, + bias: this rank's part along `dim`, or, where that is None, all of it."""
    if dim is None:
        y = matmul_all_reduce(given.x.flatten(0, -2), given.weight, given.bias, world=world, plan=plan)
        return y.view(*given.x.shape[:-1], y.shape[1])
    front = given.x.movedim(dim, 0)
    y = matmul_reduce_scatter(front.flatten(0, -2), given.weight, given.bias, world=world, plan=plan)
    lead = front.shape[0] // world.size, *front.shape[1:-1]
    return y.view(*lead, y.shape[1]).movedim(0, dim).contiguous()


def _given(
    world: World | None, module: nn.Linear, x: Tensor, layouts: tuple[Placement, ...]
) -> tuple[LinearOperands | None, str | None]:
    """The operands, or why weft does not compute with them."""
    if world is None:
        return None, f"a group on {x.device.type}"
    if isinstance(x, DTensor) and x.placements != layouts:
        return None, f"given {x.placements[0]} for {layouts[0]}"
    if x.dim() < 2:
        return None, f"{x.dim()} dimension"
    weight, bias = (t.to_local() if isinstance(t, DTensor) else t for t in (module.weight, module.bias))
    given = LinearOperands(x.to_local() if isinstance(x, DTensor) else x, weight, bias)
    if torch.is_autocast_enabled(given.x.device.type):
        dtype = torch.get_autocast_dtype(given.x.device.type)
        given = LinearOperands(given.x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    found = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (given.x, given.weight))
    if given.x.dtype not in DTYPES or len(found) > 1:
        return None, f"of {', '.join(found)}"
    return given, None


def _row_dimension(layout: Placement, x: Tensor) -> int | None:
    """Return the dimension along which x is split by rows; None for another layout."""
    if type(layout) is not Shard:
        return None
    dim = layout.dim % x.dim()
    return dim if dim < x.dim() - 1 else None


def _noted(module: nn.Module, note: str) -> nn.Module:
    vars(module)[NOTE] = note
    return module
