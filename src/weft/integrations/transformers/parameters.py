"""The parameters of a woven model. A user may write them as in any model: by `load_state_dict`, `copy_` or merged
adapters.

Shards compute with views of the parameters, so that in-place writes have an immediate effect, even in a captured graph.
If one GEMM computes several linears, their parameters become views of the stacked weight. Only experts are packed into
copies, since no view has their layout; after a parameter was written, they are packed again in place. At the start of
each pass `refresh` checks whether each parameter is still the same tensor, and whether a parameter of packed experts
was written.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import Unsupported, WeftError
from ...world import World


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor of this rank's elements: the parameter itself unless it is a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def shard_of(parameter: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """Return this rank's shard along `dim`: the local tensor of a DTensor, a view of any other parameter. Raises
    Unsupported for a DTensor that is split differently, as by FSDP."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        split = [(n, getattr(p, "dim", None)) for n, p in zip(mesh.shape, placements, strict=True) if n > 1]
        if split != [(world.size, dim)] * (world.size > 1):
            raise Unsupported(
                f"a parameter {list(parameter.shape)} has placements {placements} over {tuple(mesh.shape)} ranks; "
                f"tensor parallelism over {world.size} ranks needs it split along dimension {dim} only"
            )
        return local_of(parameter).detach()
    rows = parameter.shape[dim] // world.size
    return parameter.detach().narrow(dim, world.rank * rows, rows)


def stacked(parameters: Sequence[torch.Tensor], previous: torch.Tensor | None) -> torch.Tensor:
    """Return a stack of the rows of all parameters, and make the parameters views of it. If there is an earlier stack,
    `previous`, the new one reuses its memory, which a captured graph may read."""
    parts = [local_of(p) for p in parameters]
    stack = torch.cat([part.detach() for part in parts]) if previous is None else previous
    for part, rows in zip(parts, stack.split([part.shape[0] for part in parts]), strict=True):
        if part.data_ptr() != rows.data_ptr():
            rows.copy_(part)
            part.data = rows
    return stack


class WatchedParameter(nn.Parameter):
    """A parameter that counts accesses to its `data`, because writes through `data` change no version counter."""

    data_accesses = 0

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Parameter:
        """Return an unwatched copy. Copying does not access `data`, since it writes nothing."""
        if id(self) not in memo:
            data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
            memo[id(self)] = nn.Parameter(data.clone(memory_format=torch.preserve_format), self.requires_grad)
        copied = memo[id(self)]
        assert isinstance(copied, nn.Parameter)
        return copied

    @property
    def data(self) -> torch.Tensor:
        self.data_accesses += 1
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.data_accesses += 1
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class ParameterState(NamedTuple):
    """A parameter as it was when a shard was bound to it. `owner` is the `_parameters` of its module, and `name` is the
    parameter's key there. The state keeps the tensors alive, so that no new tensor can get the same address. `form` is
    the dtype, shape and device, for errors; `writes` are the version counters."""

    owner: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter | None
    local: torch.Tensor | None
    form: str
    writes: tuple[int, ...]


class Unchanged:
    """A check that all parameters are still the same tensors. It runs at each pass, so its loops run in C."""

    def __init__(self, states: Sequence[ParameterState]) -> None:
        self._owners, self._names = [s.owner for s in states], [s.name for s in states]
        self._parameters = [s.parameter for s in states]
        dtensors = [s for s in states if isinstance(s.parameter, DTensor)]
        plain = [s for s in states if s.parameter is not None and not isinstance(s.parameter, DTensor)]
        self._plain, self._dtensors = [s.parameter for s in plain], [s.parameter for s in dtensors]
        self._addresses = [s.local.data_ptr() for s in (*plain, *dtensors) if s.local is not None]

    def holds(self) -> bool:
        if not all(map(operator.is_, map(dict.get, self._owners, self._names), self._parameters)):
            return False
        tensors = itertools.chain(self._plain, map(operator.attrgetter("_local_tensor"), self._dtensors))
        return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self._addresses))


class Bound:
    """A shard with tensors that `_bind` derives from the parameters of modules. `bound` names these tensors. A deep
    copy does not copy the tensors: its first forward pass binds the copy to the parameters of the copied modules."""

    bound: ClassVar[tuple[str, ...]]
    parameters: Parameters

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in self.bound}


class Parameters:
    """The parameters of some modules, to which a shard is bound.

    `bind` derives the shard's tensors from the parameters. It is called again for a deep copy and after a parameter was
    replaced by a new tensor; if the shard has `packed` copies, also after a parameter was written.
    """

    _unchanged: Unchanged | None = None

    def __init__(self, modules: Sequence[nn.Module], bind: Callable[[], None], packed: bool = False) -> None:
        self.modules, self._bind, self.packed = modules, bind, packed
        self.bind()

    def __getstate__(self) -> dict[str, object]:
        """Return the state for a deep copy, with only the form of each ParameterState."""
        return vars(self) | {"_unchanged": None, "states": [state._replace(local=None) for state in self.states]}

    def bind(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a later call may run outside inference mode
            self._bind()
        self.states = [
            self._state(module._parameters, name, p)
            for module in self.modules
            for name, p in module._parameters.items()
        ]
        self._unchanged = Unchanged(self.states)

    def _state(self, owner: dict[str, nn.Parameter | None], name: str, p: nn.Parameter | None) -> ParameterState:
        if p is None:
            return ParameterState(owner, name, None, None, "None", ())
        if self.packed and p.is_inference():
            raise Unsupported(
                f"{name} was made under torch.inference_mode, whose tensors do not count writes: load the model outside"
                " of it"
            )
        if self.packed and type(p) is nn.Parameter:
            p.__class__ = WatchedParameter
        return ParameterState(owner, name, p, local_of(p).detach(), _form(p), self._writes(p))

    def _writes(self, p: nn.Parameter | None) -> tuple[int, ...]:
        if p is None or not self.packed:
            return ()
        return p._version, local_of(p)._version, getattr(p, "data_accesses", 0)

    def changed(self) -> bool:
        if self._unchanged is None or not self._unchanged.holds():
            return True
        return any(s.writes != self._writes(s.parameter) for s in self.states)

    def refresh(self, world: World, path: Callable[[nn.Module], str]) -> None:
        """Bind the shard again if a parameter has changed. `path` returns a module's name, for errors. Raises
        Unsupported if a shape, dtype or device has changed, and WeftError inside a CUDA graph capture."""
        if not self.changed():
            return
        for module in self.modules:
            for state in self.states:
                form = _form(state.owner.get(state.name))
                if state.owner is module._parameters and form != state.form:
                    raise Unsupported(
                        f"{path(module)}.{state.name} was {state.form} when the model was woven and is {form} now: "
                        "call weft.hf.unweave(model) and weave it again"
                    )
        if world.backend.capturing():
            raise WeftError(
                f"{path(self.modules[0])}: its parameters have changed since the last call, and cannot be bound again "
                "while a CUDA graph is captured; call the model once before the capture"
            )
        self.bind()

    def release(self) -> None:
        for state in self.states:
            if isinstance(state.parameter, WatchedParameter):
                object.__setattr__(state.parameter, "__class__", nn.Parameter)


def _form(p: torch.Tensor | None) -> str:
    if p is None:
        return "None"
    local = local_of(p)
    return f"{str(local.dtype).removeprefix('torch.')} {list(local.shape)} on {local.device}"
