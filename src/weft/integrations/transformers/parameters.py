"""The parameters of a woven model, which is written to as any other: `load_state_dict`, `copy_`, a merge of adapters.

Parts compute with views of the parameters, so that writes in place need nothing, and a captured graph sees them too.
Where several linears are one GEMM, the parameters become views of the stacked weight. Experts alone are packed, which
no view can be: they are packed again, in place, once a parameter was written. At the start of each pass `refresh` looks
whether a parameter is another tensor than before, and a packed one also whether it was written.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import Unsupported, WeftError
from ...world import World


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's elements; the parameter itself, where it is not split."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def part_of(parameter: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part along `dim`: all that it holds of a split parameter, a view of a whole one. Raises Unsupported
    for one that is split otherwise, as FSDP does."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        split = [(n, getattr(p, "dim", None)) for n, p in zip(mesh.shape, placements, strict=True) if n > 1]
        if split != [(world.size, dim)] * (world.size > 1):
            raise Unsupported(
                f"a parameter {list(parameter.shape)} is placed {placements} over {tuple(mesh.shape)} ranks; for "
                f"tensor parallelism over {world.size} it would be split along dimension {dim} alone"
            )
        return local_of(parameter).detach()
    rows = parameter.shape[dim] // world.size
    return parameter.detach().narrow(dim, world.rank * rows, rows)


def stacked(parameters: Sequence[torch.Tensor], held: torch.Tensor | None) -> torch.Tensor:
    """The rows of all parameters one behind another, of which the parameters are views from now on: in `held`, the
    stack of before, which a captured graph may read, or in new memory."""
    parts = [local_of(p) for p in parameters]
    stack = torch.cat([part.detach() for part in parts]) if held is None else held
    for part, rows in zip(parts, stack.split([part.shape[0] for part in parts]), strict=True):
        if part.data_ptr() != rows.data_ptr():
            rows.copy_(part)
            part.data = rows
    return stack


class WatchedParameter(nn.Parameter):
    """A parameter that counts how often somebody took or set its `data`, through which writes leave no trace."""

    taken = 0

    @property
    def data(self) -> torch.Tensor:
        self.taken += 1
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.taken += 1
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class Seen(NamedTuple):
    """A parameter as it was when a part was bound to it: `held`, its module's `_parameters`, has it under `name`. The
    tensors are kept, so that no other one comes to be at the address. form: dtype, shape and device, for errors."""

    held: dict[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter | None
    local: torch.Tensor | None
    address: int
    form: str
    writes: tuple[int, ...]


class Same:
    """Whether every one of many parameters is the tensor that it was: at each pass, so the loops are not Python's."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._held, self._names = [s.held for s in seen], [s.name for s in seen]
        self._parameters = [s.parameter for s in seen]
        split = [s for s in seen if isinstance(s.parameter, DTensor)]
        whole = [s for s in seen if s.parameter is not None and not isinstance(s.parameter, DTensor)]
        self._whole, self._split = [s.parameter for s in whole], [s.parameter for s in split]
        self._addresses = [s.address for s in (*whole, *split)]

    def holds(self) -> bool:
        if not all(map(operator.is_, map(dict.get, self._held, self._names), self._parameters)):
            return False
        tensors = itertools.chain(self._whole, map(operator.attrgetter("_local_tensor"), self._split))
        return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self._addresses))


class Parameters:
    """Those of some modules, to which a part is bound.

    bind: derives what the part computes with, anew whenever a parameter is another tensor; where `packed`, from copies,
    also whenever one was written.
    """

    def __init__(self, modules: Sequence[nn.Module], bind: Callable[[], None], packed: bool = False) -> None:
        self.modules, self._bind, self.packed = modules, bind, packed
        self.bind()

    def bind(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a later call may come outside it
            self._bind()
        self.seen = [
            self._see(module._parameters, name, p) for module in self.modules for name, p in module._parameters.items()
        ]
        self._same = Same(self.seen)

    def _see(self, held: dict[str, nn.Parameter | None], name: str, p: nn.Parameter | None) -> Seen:
        if p is None:
            return Seen(held, name, None, None, 0, "None", ())
        if self.packed and p.is_inference():
            raise Unsupported(
                f"{name} was made under torch.inference_mode, whose tensors do not tell that they are written: load "
                "the model outside of it"
            )
        if self.packed and type(p) is nn.Parameter:
            p.__class__ = WatchedParameter
        local = local_of(p)
        return Seen(held, name, p, local.detach(), local.data_ptr(), _form(p), self._writes(p))

    def _writes(self, p: nn.Parameter | None) -> tuple[int, ...]:
        if p is None or not self.packed:
            return ()
        return p._version, local_of(p)._version, getattr(p, "taken", 0)

    def changed(self) -> bool:
        return not (self._same.holds() and all(s.writes == self._writes(s.parameter) for s in self.seen))

    def refresh(self, world: World, path: Callable[[nn.Module], str]) -> None:
        """Bind the part anew if a parameter has changed. path: of a module, for errors. Raises Unsupported for another
        shape, dtype or device than before, WeftError inside the capture of a CUDA graph."""
        if not self.changed():
            return
        for module in self.modules:
            for seen in self.seen:
                now = _form(seen.held.get(seen.name))
                if seen.held is module._parameters and now != seen.form:
                    raise Unsupported(
                        f"{path(module)}.{seen.name} was {seen.form} when the model was woven and is {now} now: "
                        "weft.hf.unweave(model), and weave it again"
                    )
        if world.capturing():
            raise WeftError(
                f"{path(self.modules[0])}: its parameters changed since the last call, and a CUDA graph is being "
                "captured, in which they cannot be taken over; call the model once before"
            )
        self.bind()

    def release(self) -> None:
        for seen in self.seen:
            if isinstance(seen.parameter, WatchedParameter):
                object.__setattr__(seen.parameter, "__class__", nn.Parameter)


def _form(p: torch.Tensor | None) -> str:
    if p is None:
        return "None"
    local = local_of(p)
    return f"{str(local.dtype).removeprefix('torch.')} {list(local.shape)} on {local.device}"
