"""CUDA graphs for passes with more tokens than vLLM captures.

vLLM divides a compiled model at its attention layers and captures the pieces between them, by default for up to 512
tokens. In passes with more tokens the host launches every kernel of vLLM's model. With weft's operators this would take
the host longer than the GPU: depending on the form, 16 layers of Llama-70B took 21 to 30 ms at 1,024 tokens, and vLLM's
own pass 16 ms (4 H200, 2026-11). But the twin has a finite number of sizes (twin.py), so vLLM's own wrapper of pieces
can capture all of them. Attention stays outside graphs, as in vLLM's captured passes, so a graph fits any requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass

import torch
from torch import Tensor

from ...plans import Plan
from .dataflow import first_sentence
from .interface import VllmObject, gather_objects

# A GPU with less free memory captures no further pieces, so that requests do not run out of memory.
FREE_BYTES = 2 << 30
NO_PIECES = "vLLM captures no pieces of the model"
Key = tuple[int, Plan]  # a number of tokens and a form


@dataclass(eq=False)
class PieceGraphs:
    """The graphs of one model's pieces. vLLM's wrapper keeps a graph for each `batch_descriptor` of a pass; `captured`
    maps each captured size and form to its descriptor. A graph reads the tokens from `inputs`. If weft captures no more
    pieces, `why_not` is the reason. `failures` contains a form's last error, and `worked` the forms that all ranks have
    captured once; a form that failed before it ever worked is not captured again. `wrapper` is a wrapper that has
    graphs.

    `pool` is the memory of the graphs. torch cannot capture into a pool whose graphs are all dropped while a tensor in
    it (such as cuBLAS's workspace) still exists. vLLM's own pool therefore stays unused, and after the last graph is
    dropped the next capture has a new pool. All captures use one `stream`, since each stream has such a workspace."""

    objects: Mapping[str, VllmObject]
    group: VllmObject
    device: torch.device
    max_tokens: int
    captured: dict[Key, VllmObject] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    why_not: str | None = None
    wrapper: VllmObject = None
    pool: VllmObject = None
    stream: torch.cuda.Stream | None = None
    is_capturing: bool = False
    failures: dict[Plan, str] = field(default_factory=dict)
    worked: set[Plan] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Two forms of one size differ, and none equals a descriptor of vLLM's own passes.
        identity = {"__eq__": object.__eq__, "__hash__": object.__hash__}
        self.descriptor = make_dataclass(
            "TwinDescriptor", [], bases=(self.objects["batch"],), frozen=True, eq=False, namespace=identity
        )

    def text(self) -> str:
        """Return the report's line."""
        line = f"captures passes of {len(self.captured)} sizes beyond vLLM's"
        line += f", and no more: {self.why_not}" if self.why_not else ""
        amount = {form: "not all" if form in self.worked else "none" for form in self.failures}
        return line + "".join(f"; {amount[form]} by {form}: {error}" for form, error in self.failures.items())

    def fit(self, key: Key, arguments: Mapping[str, VllmObject]) -> bool:
        """Return whether graphs of this size and form exist and can read a pass's arguments: one id and one position
        for each token. vLLM may have dropped the graphs of all pieces, and would capture during a request."""
        descriptor = self.captured.get(key)
        if descriptor is None or arguments.get("inputs_embeds") is not None or arguments["positions"].dim() != 1:
            return False
        return self.is_capturing or descriptor in self.wrapper.concrete_cudagraph_entries

    def fixed(self, name: str, rows: Tensor | None, size: int, further: int = 0) -> Tensor | None:
        """Return the argument of that name with `size` tokens in memory that graphs read. Tokens after those of `rows`
        are `further`."""
        if rows is None:
            return None
        if name not in self.inputs:
            self.inputs[name] = rows.new_zeros(self.max_tokens)
        tokens, fixed = len(rows), self.inputs[name][:size]
        fixed[:tokens].copy_(rows)
        fixed[tokens:].fill_(further)
        return fixed

    @contextmanager
    def replayed(self, context: VllmObject, key: Key) -> Iterator[None]:
        """Let vLLM's wrapper replay the pieces' graphs of this size and form, or capture them at the first pass."""
        padding = getattr(context, "is_padding", None)
        before = context.cudagraph_runtime_mode, context.batch_descriptor
        context.cudagraph_runtime_mode = self.objects["graph_mode"].PIECEWISE
        context.batch_descriptor = self.captured[key]
        if padding is not None:  # experts read it
            context.is_padding = self.fixed("is_padding", padding, key[0], further=1)
        try:
            yield
        finally:
            context.cudagraph_runtime_mode, context.batch_descriptor = before
            if padding is not None:
                context.is_padding = padding

    def capture(self, key: Key, one_pass: Callable[[], object]) -> None:
        """Capture the pieces of a size and form in a pass, unless any rank fails. The call is collective; a capture
        runs no kernel of weft's, so no rank waits for a rank that fails. Everything that the pass needs must exist, and
        stay as it is: the graphs contain its addresses."""
        if self.why_not is not None or key[1] in self.failures.keys() - self.worked or key in self.captured:
            return
        self.why_not = self.first_error(self.lack_of_memory())  # vLLM's `graph_capture` is collective
        if self.why_not is not None:
            return
        descriptor = self.captured[key] = self.descriptor(num_tokens=key[0])
        error = ""
        try:
            with self.capturing():
                one_pass()
            entered = (w for w in self.wrappers() if descriptor in w.concrete_cudagraph_entries)
            self.wrapper = next(entered, self.wrapper)
            if self.wrapper is None:
                error = NO_PIECES
        except Exception as failed:  # of CUDA, vLLM or weft
            error = f"{type(failed).__name__}: {first_sentence(failed)}"
        first_error = self.first_error(error)
        if first_error is None:
            self.worked.add(key[1])
            return
        self.keep(self.captured.keys() - {key})
        if first_error == NO_PIECES or first_error.startswith(torch.OutOfMemoryError.__name__):
            self.why_not = first_error
        else:
            self.failures[key[1]] = first_error

    def first_error(self, error: str) -> str | None:
        """Return the error of the first rank that has one, None if no rank has. The call is collective."""
        return next(filter(None, gather_objects(error, self.group)), None)

    def lack_of_memory(self) -> str:
        """Return an error if the GPU has too little free memory for a capture, or "". The first capture needs as much
        memory as the passes before it, whose memory is cached. Later captures have fewer tokens, and reuse it."""
        if self.device.type != "cuda":
            return ""
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] - (0 if self.captured else cached)
        return "" if free >= FREE_BYTES else f"{max(free, 0) >> 20} MiB of GPU memory would be free"

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allow vLLM's wrapper to capture, on the stream for captures and into weft's pool."""
        allow = self.objects["allow_captures"]
        allowed = allow.__globals__["cudagraph_capturing_enabled"]
        pools = [(wrapper, wrapper.graph_pool) for wrapper in self.wrappers()]
        if self.device.type == "cuda":
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.stream = self.stream or torch.cuda.Stream(self.device)
            self.stream.wait_stream(torch.cuda.current_stream())
        self.is_capturing = True
        allow(True)
        try:
            for wrapper, _ in pools:
                wrapper.graph_pool = self.pool
            with self.objects["capture"](device=self.device), torch.cuda.stream(self.stream):
                yield
        finally:
            self.is_capturing = False
            allow(allowed)
            for wrapper, pool in pools:
                wrapper.graph_pool = pool
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)

    def keep(self, keys: set[Key]) -> None:
        """Drop the graphs of all other sizes and forms."""
        dropped = [self.captured.pop(key) for key in self.captured.keys() - keys]
        for wrapper in self.wrappers() if dropped else ():
            for descriptor in dropped:
                wrapper.concrete_cudagraph_entries.pop(descriptor, None)
        if not self.captured:
            self.pool = None

    def wrappers(self) -> list[VllmObject]:
        """Return the wrappers of all pieces in this process."""
        return list(self.objects["wrapper"]._all_instances)
