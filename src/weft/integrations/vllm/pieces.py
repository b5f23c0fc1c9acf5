"""CUDA graphs for passes with more tokens than vLLM captures.

vLLM divides a compiled model at its attention layers and captures the pieces between them, by default for up to 512
tokens. In passes with more tokens the host launches every kernel. With weft's operators the host then needs longer than
the GPU: 26 ms for 16 layers of Llama-70B on four H200s, for which vLLM's whole pass takes 16 ms at 1,024 tokens and
28 ms at 2,048. But the twin has a finite number of sizes (twin.py), so vLLM's own wrapper of pieces can capture all of
them. Attention stays outside graphs, as in vLLM's captured passes, so a graph fits any requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass

import torch
from torch import Tensor

from ...errors import WeftError
from ...plans import Plan
from .dataflow import first_sentence
from .interface import VllmObject, gather_objects

FREE_BYTES = (
    2 << 30
)  # a GPU with less free memory captures no further pieces, so that requests do not run out of memory
Key = tuple[int, Plan]  # a number of tokens and a form


@dataclass(eq=False)
class PieceGraphs:
    """The graphs of one model's pieces. vLLM's wrapper keeps a graph for each `batch_descriptor` of a pass; `captured`
    maps each captured size and form to its descriptor. A graph reads the tokens from `inputs`. If weft captures no more
    pieces, `why_not` is the reason."""

    objects: Mapping[str, VllmObject]
    group: VllmObject
    device: torch.device
    max_tokens: int
    captured: dict[Key, VllmObject] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    why_not: str | None = None

    def __post_init__(self) -> None:
        # Two forms of one size differ, and none equals a descriptor of vLLM's own passes.
        identity = {"__eq__": object.__eq__, "__hash__": object.__hash__}
        self.descriptor = make_dataclass(
            "TwinDescriptor", [], bases=(self.objects["batch"],), frozen=True, eq=False, namespace=identity
        )

    def fit(self, arguments: Mapping[str, VllmObject]) -> bool:
        """Return whether graphs can read a pass's arguments: one id and one position for each token."""
        return arguments.get("inputs_embeds") is None and arguments["positions"].dim() == 1

    def fixed(self, name: str, rows: Tensor | None, size: int) -> Tensor | None:
        """Return the argument of that name with `size` tokens in memory that graphs read. Further tokens are 0."""
        if rows is None:
            return None
        if name not in self.inputs:
            self.inputs[name] = rows.new_zeros(self.max_tokens)
        tokens, fixed = len(rows), self.inputs[name][:size]
        fixed[:tokens].copy_(rows)
        fixed[tokens:].zero_()
        return fixed

    @contextmanager
    def replayed(self, context: VllmObject, key: Key) -> Iterator[None]:
        """Let vLLM's wrapper replay the pieces' graphs of this size and form, or capture them at the first pass."""
        before = context.cudagraph_runtime_mode, context.batch_descriptor
        context.cudagraph_runtime_mode = self.objects["graph_mode"].PIECEWISE
        context.batch_descriptor = self.captured[key]
        try:
            yield
        finally:
            context.cudagraph_runtime_mode, context.batch_descriptor = before

    def capture(self, key: Key, one_pass: Callable[[], object]) -> None:
        """Capture the pieces of a size and form in a pass, unless any rank fails. The call is collective; a capture
        runs no kernel of weft's, so no rank waits for a rank that fails."""
        if self.why_not is not None or key in self.captured:
            return
        self.captured[key] = self.descriptor(num_tokens=key[0])
        error = ""
        try:
            self.require_memory()
            with self.capturing():
                one_pass()
            if not any(self.captured[key] in wrapper.concrete_cudagraph_entries for wrapper in self.wrappers()):
                raise WeftError("vLLM captures no pieces of the model")
        except Exception as failed:  # of CUDA, vLLM or weft
            error = f"{type(failed).__name__}: {first_sentence(failed)}"
        if error := next(filter(None, gather_objects(error, self.group)), ""):
            self.why_not = error
            self.keep(self.captured.keys() - {key})

    def require_memory(self) -> None:
        if self.device.type == "cuda" and (free := torch.cuda.mem_get_info(self.device)[0]) < FREE_BYTES:
            raise MemoryError(f"{free >> 20} MiB of GPU memory are free")

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allow vLLM's wrapper to capture, on a stream for captures."""
        allow = self.objects["allow_captures"]
        allowed = allow.__globals__["cudagraph_capturing_enabled"]
        allow(True)
        try:
            with self.objects["capture"](device=self.device):
                yield
        finally:
            allow(allowed)

    def keep(self, keys: set[Key]) -> None:
        """Drop the graphs of all other sizes and forms."""
        dropped = [self.captured.pop(key) for key in self.captured.keys() - keys]
        for wrapper in self.wrappers() if dropped else ():
            for descriptor in dropped:
                wrapper.concrete_cudagraph_entries.pop(descriptor, None)

    def wrappers(self) -> list[VllmObject]:
        """Return the wrappers of all pieces in this process."""
        return list(self.objects["wrapper"]._all_instances)
