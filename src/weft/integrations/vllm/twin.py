"""A second forward pass of a loaded model, with weft's operators. vLLM's own pass stays unchanged.

vLLM must never be slower with weft than without it. The twin ensures this by construction:

1. vLLM loads, compiles, measures and captures its own model unchanged: weft changes no class, configuration or cache
   key.
2. `twin_of` makes the twin of the stack of layers. Modules that weft serves are copies with weft's forward, and their
   parent modules are copies too; all other modules, and all parameters, buffers and `Attention` objects, are the
   model's own. So weights and KV cache exist only once. The twin's forward has a code object and a name of its own,
   because vLLM drops Dynamo's guards and so compiles one graph for each code object. vLLM compiles the twin like any
   model, with separate pieces, CUDA graphs and a separate entry in vLLM's compile cache.
3. At the start weft compares whole passes of the model and the twin (compare.py). If the twin wins nowhere, weft drops
   it and leaves no trace in the model. Otherwise the class of the stack changes to one whose `__call__` looks up the
   number of tokens in a table, `Passes.sizes`, where 0 denotes vLLM's own pass. vLLM captures graphs only afterwards,
   so that each captured size has one graph.
4. The twin has a finite number of sizes, to which passes are padded: the sizes that vLLM captures, and further
   sizes above these (`step_above`). The compared times include the padding. The model runs with every size, and with
   padding, before the first request. So everything that depends on the number of tokens (kernels, plans, channels,
   tables, workspaces, graphs) exists by then, and no request creates anything new.

A compiler pass for only some ranges of tokens (`compile_ranges_endpoints`) would save the second trace. But vLLM fixes
such ranges before weft can time anything, and they change vLLM's own graphs and cache keys. A compiler pass would also
search a graph for vLLM's operators, which differ with the version and the options, while the twin needs only the
modules. And an engine without compilation runs no compiler passes.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import pad

from ...errors import WeftError
from ...plans import Plan
from ...world import World
from .interface import VllmObject, gather_objects
from .row_norm_column import WovenLayers, forms

if TYPE_CHECKING:
    from .pieces import PieceGraphs
    from .woven import WovenPass

STEPS = 8, 128  # the smallest and the largest step, in tokens, between the sizes that vLLM does not capture
PADDED = ("input_ids", "positions", "inputs_embeds")  # the arguments of a pass that have a row or column for each token


def step_above(tokens: int) -> int:
    """Return the step from a size to the next one: a sixteenth of the last power of two, at least 8 and at most 128. In
    steps of 128, passes of Qwen2.5-32B on 2 H200s were 1.047x as fast as vLLM's own with 1,024 tokens, and 0.934x with
    897 tokens, which became 1,024 (2026-11)."""
    smallest, largest = STEPS
    return min(max((1 << tokens.bit_length()) // 32, smallest), largest)


# -- modules -----------------------------------------------------------------------------------------------------------
def copied(module: nn.Module, served: type | None = None, **attributes: object) -> VllmObject:
    """Return a copy of the module that shares its children, parameters and buffers. With `served`, the class of the
    copy is a subclass of the module's class with the methods of `served`. So isinstance checks work as before, and
    torch.compile traces the forward like any module's forward."""
    original = type(module)
    copy: nn.Module = object.__new__(original)
    copy.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            copy.__dict__[name] = MethodType(value.__func__, copy)
    copy.__dict__["_modules"] = dict(module._modules)
    if served is not None:
        copy.__class__ = type(f"Weft{original.__name__}", (served, original), {"__module__": __name__})
    copy.__dict__.update(attributes)
    return copy


def with_copies(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Replace the module's descendants by their `copies`, which maps the id of an original to the copy. Return the
    module itself if it has no such descendant, else a copy of the module, which is added to `copies`."""
    if id(module) in copies:
        return copies[id(module)]
    children = {name: child and with_copies(child, copies) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    copy = copies[id(module)] = copied(module)
    copy._modules.update(children)
    return copy


def own_forward(forward: Callable[..., object], name: str) -> FunctionType:
    """Return the function with a code object and a name of its own. The name is the key in vLLM's compile cache."""
    assert isinstance(forward, FunctionType)
    code = forward.__code__.replace(co_name=f"{forward.__code__.co_name}_with_weft")
    function = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__, function.__annotations__ = forward.__kwdefaults__, forward.__annotations__
    function.__qualname__, function.__module__ = name, forward.__module__
    return function


def twin_of(stack: VllmObject, copies: dict[int, nn.Module], name: str, wrapper: VllmObject) -> VllmObject:
    """Return the stack's twin, with `copies` in place of the modules that weft serves. `name` is the name of the twin's
    compiled code: vLLM's cache has one entry for each name. vLLM compiles with the class `wrapper`. The caller must
    have set vLLM's current configuration."""
    if id(stack) in copies:
        raise WeftError(f"{type(stack).__name__} is itself one of the modules to serve")
    twin = with_copies(stack, copies)
    forward = own_forward(type(stack).forward, f"{type(stack).__name__}.forward with {name}")
    twin.__class__ = type(f"Weft{type(stack).__name__}", (type(stack),), {"forward": forward, "__module__": __name__})
    if not getattr(stack, "do_not_compile", True):  # vLLM compiles the forward of this class
        if wrapper is None or not isinstance(stack, wrapper):
            raise WeftError(f"{type(stack).__name__} is compiled by another class than is known")
        wrapper.__init__(twin, compile_prefix=name)
        twin.__dict__.update(aot_compiled_fn=None, was_aot_compile_fn_loaded_from_disk=False)
    return twin


# -- passes ------------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class Passes:
    """A stack of layers with its twin, for passes of up to `max_tokens` tokens; `captured` are the numbers of tokens
    that vLLM captures, within `capture_context`, and `context` returns the context of a pass, in which attention finds
    its slots. `sizes` maps each number of tokens to the padded number with which the twin runs, or to 0 for vLLM's own
    pass. `names` are the names of the arguments of a pass. `graphs` are those of sizes that vLLM does not capture; None
    if there can be none. `woven` runs passes in two parts over whole layers; if it is None, `unwoven` is the reason."""

    stack: VllmObject
    twin: VllmObject
    world: World
    context: Callable[[], VllmObject]
    capture_context: Callable[..., AbstractContextManager[object]]
    max_tokens: int
    captured: tuple[int, ...] = ()
    graphs: PieceGraphs | None = None
    woven: WovenPass | None = None
    unwoven: str | None = None

    def __post_init__(self) -> None:
        self.own_class = type(self.stack)
        self.names = tuple(inspect.signature(self.own_class.forward).parameters)[1:]
        self.sizes = [0] * (self.max_tokens + 1)
        self.captured = tuple(sorted({size for size in self.captured if size <= self.max_tokens}))

    def known_sizes(self) -> list[int]:
        """Return the sizes of the twin in ascending order: those that vLLM captures, then further ones (`step_above`).
        Every power of two is a size, so that no two ranges share a size."""
        above, further = max(self.captured, default=0), [1, 2, 4, 8]
        while further[-1] < self.max_tokens:
            further.append(further[-1] + step_above(further[-1]))
        return sorted({*self.captured, *(n for n in further if above < n < self.max_tokens), self.max_tokens})

    def serve(self, ranges: Iterable[tuple[int, int, Plan]]) -> None:
        """Let the twin run passes with a number of tokens in these ranges, (low, high, form), and vLLM's own model all
        other passes."""
        table, known = forms(self.world), self.known_sizes()
        self.sizes[:] = [0] * len(self.sizes)
        table.clear()
        for low, high, form in ranges:
            for tokens in range(low, high + 1):
                self.sizes[tokens] = size = known[bisect_left(known, tokens)]
                table[size] = form

    def warm_ups(self) -> list[int]:
        """Return the numbers of tokens of the passes to run before requests: all sizes in descending order, and for
        each form the least number that is padded, because CUDA loads the kernels for padding at their first launch."""
        table = forms(self.world)
        padded_tokens = {table[size]: tokens for tokens, size in reversed(list(enumerate(self.sizes))) if size > tokens}
        return [*sorted(set(self.sizes) - {0}, reverse=True), *padded_tokens.values()]

    def last_warm_ups(self) -> list[int]:
        """Return the numbers of tokens of the passes to run after the last capture, in descending order: the sizes
        without graphs, and beyond the sizes that vLLM captures the largest number that runs in each way, vLLM's own
        included."""
        table, most_captured = forms(self.world), max(self.captured, default=0)
        in_graphs = () if self.graphs is None else (size for size, _ in self.graphs.captured)
        largest = {table.get(size): size or tokens for tokens, size in enumerate(self.sizes) if tokens > most_captured}
        return sorted({*largest.values()} | set(self.sizes) - {0, *self.captured, *in_graphs}, reverse=True)

    def weave_on_all_ranks(self, why: str, group: VllmObject) -> None:
        """Turn off passes in two parts over whole layers if any rank cannot run them. `why` is this rank's reason, or
        "". The call is collective."""
        if reason := next(filter(None, gather_objects(why, group)), ""):
            if self.woven is not None:
                self.woven.release()
            self.woven, self.unwoven = None, reason

    def put(self, kind: type | None = None) -> None:
        """Make the stack look up the number of tokens at each pass, by a class with this lookup: `kind`, or Switched if
        `kind` is None."""
        namespace = {"__module__": self.own_class.__module__}
        self.stack.__dict__["weft_passes"] = self
        self.stack.__class__ = type(self.own_class.__name__, (kind or Switched, self.own_class), namespace)

    def remove(self) -> None:
        """Restore the stack as if weft were not installed."""
        if self.graphs is not None:
            self.graphs.keep(set())  # torch.compile may hold the twin's pieces
        if self.woven is not None:
            self.woven.release()
        self.stack.__class__ = self.own_class
        for name in [name for name in self.stack.__dict__ if name.startswith("weft_")]:
            del self.stack.__dict__[name]

    def named(self, args: Sequence[VllmObject], kwargs: Mapping[str, VllmObject]) -> dict[str, VllmObject]:
        """Map the names of a pass's arguments to the arguments."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)

    def run(self, size: int, tokens: int, args: Sequence[VllmObject], kwargs: Mapping[str, VllmObject]) -> VllmObject:
        """Run the twin with `size` tokens; all tokens after the first `tokens` are padding."""
        form = forms(self.world)[size]
        if isinstance(form, WovenLayers):
            return self.run_woven(form, size, tokens, args, kwargs)
        in_graphs: AbstractContextManager[None]
        if self.graphs is not None and self.graphs.fit((size, form), self.named(args, kwargs)):
            argument = functools.partial(self.graphs.fixed, size=size)
            in_graphs = self.graphs.replayed(self.context(), (size, form))
        elif size == tokens:
            return self.twin(*args, **kwargs)
        else:
            argument, in_graphs = functools.partial(padded, further=size - tokens), nullcontext()
        rows = [argument(name, value) for name, value in zip(self.names, args, strict=False)]
        named_rows = {name: argument(name, value) for name, value in kwargs.items()}
        with padded_slots(self.context(), size - tokens), in_graphs:
            return first_rows(self.twin(*rows, **named_rows), tokens)

    def warm_up(self, tokens: int, one_pass: Callable[[], object]) -> None:
        """Run a pass of this number of tokens until all that it needs exists, except graphs. The call is collective."""
        if self.key_of_graphs(tokens) is None:
            one_pass()
        else:
            self.prepare_capture(one_pass)

    def prepare_capture(self, one_pass: Callable[[], object]) -> None:
        """Run a pass before its capture. On a side stream, such as the stream of vLLM's workers on GPUs, weft prepares
        plans for graphs in the first pass, and on the default stream in the second. The pass is also repeated if memory
        that calls share grew during it on any rank, because weft then drops prepared calls. The call is collective."""
        before = self.world.drops
        one_pass()
        again = self.world.drops > before or not self.world.backend.on_side_stream()
        if any(self.world.exchange(again, "whether to repeat a pass")):
            one_pass()

    def capture(self, tokens: int, one_pass: Callable[[], object]) -> None:
        """Capture the pieces of a pass of this number of tokens, unless vLLM captures its size. All passes that may
        need more memory must have run, since weft drops prepared calls when memory grows. The call is collective."""
        if (key := self.key_of_graphs(tokens)) is not None and self.graphs is not None:
            self.graphs.capture(key, one_pass)

    def key_of_graphs(self, tokens: int) -> tuple[int, Plan] | None:
        """Return the size and form of a pass of this number of tokens; None if weft captures no pieces of it."""
        size = self.sizes[tokens]
        if self.graphs is None or not size or size in self.captured:
            return None
        form = forms(self.world)[size]
        return None if isinstance(form, WovenLayers) else (size, form)

    def leave_uncaptured(self, timed_in_graphs: Iterable[int]) -> None:
        """Leave to vLLM the passes of these numbers of tokens whose pieces could not be captured now, because without
        graphs the host may need longer. Raises WeftError if all passes have to run in one way."""
        if self.graphs is None:
            return
        keys = {tokens: self.key_of_graphs(tokens) for tokens in timed_in_graphs}
        lost = [tokens for tokens, key in keys.items() if key is not None and key not in self.graphs.captured]
        if lost and self.world.batch_invariant:
            raise WeftError(f"batch invariance needs one way for all, and some have no graphs: {self.graphs.text()}")
        for tokens in lost:
            self.sizes[tokens] = 0

    def run_woven(
        self, form: WovenLayers, size: int, tokens: int, args: Sequence[VllmObject], kwargs: Mapping[str, VllmObject]
    ) -> VllmObject:
        """Run the pass in two parts of `size` tokens in all, or vLLM's own pass if this pass cannot be split. All ranks
        make the same choice, since the batch is the same on all ranks."""
        arguments = self.named(args, kwargs)
        if self.woven is None or arguments.get("inputs_embeds") is not None or not self.woven.can_run(size):
            return self.own_class.__call__(self.stack, *args, **kwargs)
        input_ids, positions = (padded(name, arguments[name], size - tokens) for name in ("input_ids", "positions"))
        assert input_ids is not None and positions is not None
        with padded_slots(self.context(), size - tokens):
            return first_rows(self.woven(form, input_ids, positions), tokens)


class Switched:
    """A stack of layers with a twin, which runs some of the stack's passes."""

    def __call__(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        passes: Passes = self.__dict__["weft_passes"]
        arguments = passes.named(args, kwargs)
        tokens = arguments["positions"].shape[-1]
        size = passes.sizes[tokens] if tokens <= passes.max_tokens else 0
        if not size or any(value is not None for name, value in arguments.items() if name not in PADDED):
            if size and passes.world.batch_invariant:
                passes.world.log_once("a pass with further arguments is vLLM's own, whose rows have other bits")
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return passes.run(size, tokens, args, kwargs)


def padded(name: str, rows: Tensor | None, further: int) -> Tensor | None:
    """Return the argument of that name with `further` more tokens, which are 0; None if it is absent."""
    if rows is None:
        return None
    return pad(rows, (0, 0, 0, further) if name == "inputs_embeds" else (0, further))


@contextmanager
def padded_slots(context: VllmObject, further: int) -> Iterator[None]:
    """Set the slot of padding tokens in the KV cache to -1 (none), as in vLLM, while the context is active. Otherwise
    some kernels would write a slot for each padding token."""
    if not further:
        yield
        return
    slots, padding = context.slot_mapping, getattr(context, "is_padding", None)
    tensors = {id(t): t for t in (slots or {}).values()}
    longer = {key: pad(t, (0, further), value=-1) for key, t in tensors.items()}
    context.slot_mapping = slots and {name: longer[id(t)] for name, t in slots.items()}
    if padding is not None:
        context.is_padding = pad(padding, (0, further), value=True)
    try:
        yield
    finally:
        context.slot_mapping = slots
        if padding is not None:
            context.is_padding = padding


def first_rows(output: VllmObject, tokens: int) -> VllmObject:
    """Return the first rows of each tensor in a pass's output."""
    if isinstance(output, Tensor):
        return output[:tokens]
    return type(output)(first_rows(part, tokens) for part in output)
