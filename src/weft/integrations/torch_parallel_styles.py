"""Tensor-parallel styles for torch's `parallelize_module` and Lightning's `ModelParallelStrategy`, with weft's
operators.

    norm      SequenceParallel()                          rows in, rows out
    w1, w3    ColwiseParallel(input_layouts=Shard(1))     all-gather + GEMM, one gather for all linears with the same x
    w2        RowwiseParallel(output_layouts=Shard(1))    GEMM + reduce-scatter

These classes are subclasses of torch's styles with weft's forward. torch splits the parameters, so that state dicts,
checkpoints and optimisers see the same DTensors. Calls that weft does not support (layouts without a collective at the
GEMM, other dtypes, groups without a World) run torch's own code; `report` lists these with the reasons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import style
from torch.distributed.tensor.placement_types import Placement

from ..op import Op
from ..ops.all_gather_matmul.op import ALL_GATHER_MATMUL, all_gather_matmul, all_gather_matmul_with_gathered
from ..ops.matmul_reduce.op import MATMUL_ALL_REDUCE, MATMUL_REDUCE_SCATTER, matmul_all_reduce, matmul_reduce_scatter
from ..plans import Plan
from ..tensor_checks import DTYPES
from ..world import World
from .torch_async_tp import world_of

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "report"]

STYLED = "_weft_parallel"  # the attribute in which a module stores its Styled


@dataclass
class Styled:
    """The state that a style stores in a module: the module's own forward, and whether weft computed the last call.

    The style's forward is a method of the module, so that a deep copy of the module computes with the copy's own
    parameters.
    """

    forward: Callable[..., Any]
    note: str

    def __deepcopy__(self, memo: dict[int, object]) -> Styled:
        return Styled(deepcopy(self.forward, memo), self.note)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a module with a style of weft.parallel cannot be pickled; save its state_dict() instead")


def report(module: nn.Module) -> str:
    """Return a line for each module with one of these styles. The line states whether weft or torch computed the last
    call, and why."""
    notes = {name: vars(m)[STYLED].note for name, m in module.named_modules() if STYLED in vars(m)}
    return "\n".join(f"{name or '(itself)'}: {note}" for name, note in notes.items()) or "no module has a style of weft"


if TYPE_CHECKING:
    _TorchStyle = style.ColwiseParallel  # for the type checker; RowwiseParallel's methods have the same types
else:
    _TorchStyle = object


class _LinearStyle(_TorchStyle):
    """A mixin that precedes one of torch's styles among the base classes. torch splits the parameters of an
    `nn.Linear`, and `_linear` becomes the forward of the linear."""

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
        """Return the operator that runs `plan`."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            vars(module)[STYLED] = Styled(module.forward, f"torch's own: {type(module).__name__}")
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _styled(module, lambda module, x: self._linear(module, device_mesh, x))

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _torch_linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor, desired: tuple[Placement, ...]) -> Tensor:
        """Return the linear's output as torch computes it, from x with the placements `desired`."""
        x = self._prepare_input_fn(self.input_layouts, desired, module, (x,), mesh)
        y = F.linear(x, module.weight, module.bias)
        return self._prepare_output_fn(self.output_layouts, self.use_local_output, module, y, mesh)


class ColwiseParallel(_LinearStyle, style.ColwiseParallel):
    """torch's ColwiseParallel with weft's operators. An `nn.Linear` with input_layouts=Shard(d), for any dimension d
    but the last, becomes an all-gather + GEMM (`weft.all_gather_matmul`), and its gradient becomes a GEMM +
    reduce-scatter.

    Consecutive modules with the same input (queries, keys and values; gate and up) share one gather, which overlaps the
    first module's GEMM. The gathered rows are saved for the backward pass, as in torch. Each module gathers separately
    under torch.inference_mode, where tensors do not count writes, and in a CUDA graph capture, which has separate
    memory; under torch.no_grad modules share the gather.

    `plan` is a plan of `weft.all_gather_matmul`; any other plan raises ValueError. Tensors are bfloat16 or float16, or
    autocast converts them to one of these dtypes.
    """

    def _op(self, output_layouts: Placement | None) -> Op:
        return ALL_GATHER_MATMUL

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        world = world_of(mesh.get_group().group_name, x)
        operands, why = _linear_operands(world, module, x, self.input_layouts)
        dim = _row_dimension(self.input_layouts[0], x)
        if why is None and (dim is None or self.output_layouts != (Shard(-1),)):
            why = f"{self.input_layouts[0]} to {self.output_layouts[0]}"
        _note(module, "all-gather + GEMM by weft" if why is None else f"torch's own: {why}")
        if why is not None or world is None or operands is None or dim is None:
            return self._torch_linear(module, mesh, x, (Replicate(),))
        y = gathered_linear(world, module, x, operands, dim, self.plan)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.output_layouts, run_check=False)


class RowwiseParallel(_LinearStyle, style.RowwiseParallel):  # type: ignore[misc]
    """torch's RowwiseParallel with weft's operators. An `nn.Linear` with output_layouts=Shard(d), for any dimension d
    but the last, becomes a GEMM + reduce-scatter (`weft.matmul_reduce_scatter`), and its gradient becomes an all-gather
    + GEMM. An `nn.Linear` with Replicate() becomes a GEMM + all-reduce (`weft.matmul_all_reduce`).

    `plan` is a plan of the operator; any other plan raises ValueError. Tensors are bfloat16 or float16, or autocast
    converts them to one of these dtypes. If the size of dimension d is not a multiple of the number of ranks, torch's
    own code runs.
    """

    def _op(self, output_layouts: Placement | None) -> Op:
        return MATMUL_REDUCE_SCATTER if isinstance(output_layouts, Shard) else MATMUL_ALL_REDUCE

    def _linear(self, module: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        world = world_of(mesh.get_group().group_name, x)
        operands, why = _linear_operands(world, module, x, self.input_layouts)
        dim, all_reduce = _row_dimension(self.output_layouts[0], x), self.output_layouts == (Replicate(),)
        if why is None and (self.input_layouts != (Shard(-1),) or (dim is None and not all_reduce)):
            why = f"{self.input_layouts[0]} to {self.output_layouts[0]}"
        if why is None and world is not None and dim is not None and x.shape[dim] % world.size:
            why = f"{x.shape[dim]} rows do not divide by {world.size} ranks"
        op = "all-reduce" if all_reduce else "reduce-scatter"
        _note(module, f"GEMM + {op} by weft" if why is None else f"torch's own: {why}")
        if why is not None or world is None or operands is None:
            return self._torch_linear(module, mesh, x, (Shard(-1),))
        y = reduced_linear(world, operands, dim, self.plan)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.output_layouts, run_check=False)


class SequenceParallel(style.SequenceParallel):
    """torch's SequenceParallel for norms, without the cost of DTensors. The module computes on plain tensors of this
    rank's rows, and the ranks sum the gradients of its parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, self._replicate_module_fn)
        return _styled(module, lambda module, x: self._rows(module, device_mesh, x))

    def _rows(self, module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
        module_forward: Callable[[Tensor], Tensor] = vars(module)[STYLED].forward
        world = world_of(mesh.get_group().group_name, x)
        why = None if world is not None else f"a group on {x.device.type}"
        if not module._parameters:  # for example a dropout, for which torch draws different numbers on each rank
            why = "no parameters"
        elif isinstance(x, DTensor) and x.placements != self.sequence_sharding:
            why = f"x has {x.placements[0]}"
        _note(module, "on local rows" if why is None else f"torch's own: {why}")
        if why is not None:
            y = module_forward(self._prepare_input_fn(self.sequence_sharding, module, (x,), mesh))
            return self._prepare_output_fn(self.use_local_output, module, y, mesh)
        local = x.to_local() if isinstance(x, DTensor) else x
        parameters, group = dict(module._parameters), mesh.get_group()
        local_parameters = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in parameters.items()}
        replicated: dict[str, Any] = {
            name: None if p is None else SummedGradient.apply(p, group) for name, p in local_parameters.items()
        }
        module._parameters.update(replicated)
        try:
            y = module_forward(local)
        finally:
            module._parameters.update(parameters)
        return y if self.use_local_output else DTensor.from_local(y, mesh, self.sequence_sharding, run_check=False)


class SummedGradient(torch.autograd.Function):
    """A tensor that is the same on all ranks. The gradient of the tensor is the sum of the ranks' gradients."""

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
    """The local operands of a call, in the dtype in which the product is computed. `bias` is this rank's shard for a
    column-parallel linear, and the full bias for a row-parallel linear."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass
class Gathered:
    """The rows that were gathered last. Later modules reuse them if their x is the same tensor and has not been written
    since."""

    x: weakref.ref[Tensor]
    version: int
    key: tuple[object, ...]
    rows: Tensor
    served: set[int] = field(default_factory=set)

    def serves(self, x: Tensor, key: tuple[object, ...], module: nn.Module) -> bool:
        """Return whether these are the rows that the module would gather from x. A second call by the same module
        belongs to a later pass, so the module gathers again."""
        same = self.x() is x and (self.version, self.key) == (x._version, key)
        return same and id(module) not in self.served


_gathered: dict[str, Gathered] = {}  # the key is the World's name


def gathered_linear(
    world: World, module: nn.Module, x: Tensor, operands: LinearOperands, dim: int, plan: str | Plan
) -> Tensor:
    """Return all_gather(x) along `dim` @ weight.T + bias."""
    front = operands.x.movedim(dim, 0)
    key = dim, operands.x.dtype, plan, torch.is_grad_enabled()
    last = _gathered.get(world.name)
    # An inference tensor has no version counter, so a later write could not be detected. Rows that were gathered
    # outside this capture may be gone when its graph is replayed.
    if x.is_inference() or world.backend.capturing():
        y = all_gather_matmul(front.flatten(0, -2), operands.weight, operands.bias, world=world, plan=plan)
    elif last is not None and last.serves(x, key, module):
        last.served.add(id(module))
        y = F.linear(last.rows, operands.weight, operands.bias)
    else:
        rows = front.flatten(0, -2)
        y, full = all_gather_matmul_with_gathered(rows, operands.weight, operands.bias, world=world, plan=plan)
        name = world.name
        reference = weakref.ref(x, lambda dead: _forget(name, dead))
        _gathered[name] = Gathered(reference, x._version, key, full, {id(module)})
    lead = world.size * front.shape[0], *front.shape[1:-1]
    return y.view(*lead, y.shape[1]).movedim(0, dim)


def _forget(name: str, reference: weakref.ref[Tensor]) -> None:
    if name in _gathered and _gathered[name].x is reference:
        del _gathered[name]


def reduced_linear(world: World, operands: LinearOperands, dim: int | None, plan: str | Plan) -> Tensor:
    """Sum x @ weight.T over the ranks and add the bias. Return this rank's part along `dim`, or all of it if `dim` is
    None."""
    if dim is None:
        y = matmul_all_reduce(operands.x.flatten(0, -2), operands.weight, operands.bias, world=world, plan=plan)
        return y.view(*operands.x.shape[:-1], y.shape[1])
    front = operands.x.movedim(dim, 0)
    y = matmul_reduce_scatter(front.flatten(0, -2), operands.weight, operands.bias, world=world, plan=plan)
    lead = front.shape[0] // world.size, *front.shape[1:-1]
    return y.view(*lead, y.shape[1]).movedim(0, dim).contiguous()


def _linear_operands(
    world: World | None, module: nn.Linear, x: Tensor, layouts: tuple[Placement, ...]
) -> tuple[LinearOperands | None, str | None]:
    """Return the operands, or None and the reason why weft does not compute the call."""
    if world is None:
        return None, f"a group on {x.device.type}"
    if isinstance(x, DTensor) and x.placements != layouts:
        return None, f"x has {x.placements[0]}, not {layouts[0]}"
    if x.dim() < 2:
        return None, f"{x.dim()} dimension"
    weight, bias = (t.to_local() if isinstance(t, DTensor) else t for t in (module.weight, module.bias))
    operands = LinearOperands(x.to_local() if isinstance(x, DTensor) else x, weight, bias)
    if torch.is_autocast_enabled(operands.x.device.type):
        dtype = torch.get_autocast_dtype(operands.x.device.type)
        operands = LinearOperands(operands.x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    dtypes = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (operands.x, operands.weight))
    if operands.x.dtype not in DTYPES or len(dtypes) > 1:
        return None, f"of {', '.join(dtypes)}"
    return operands, None


def _row_dimension(layout: Placement, x: Tensor) -> int | None:
    """Return the dimension along which x is sharded, unless it is the last dimension; None for any other layout."""
    if type(layout) is not Shard:
        return None
    dim = layout.dim % x.dim()
    return dim if dim < x.dim() - 1 else None


def _styled(module: nn.Module, forward: Callable[..., Tensor]) -> nn.Module:
    """Make `forward` the module's forward. The first argument of `forward` is the module."""
    vars(module)[STYLED] = Styled(module.forward, "not called yet")
    module.forward = MethodType(forward, module)
    return module


def _note(module: nn.Module, note: str) -> None:
    vars(module)[STYLED].note = note
