"""Which reductions of a model end in a norm: found in the model's own forward, traced symbolically.

A reduction is a module that ends in an all-reduce: a row-parallel linear, or the runner of a mixture of experts. The
graph has one node for each module that contains none, so it shows where sums, norms and column-parallel linears meet,
whatever the model and its modules are called. A reduction whose only reader is an RMSNorm can leave its sum to it
(`Site`). What is not proved by the graph stays as it is.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import fx, nn


class Kinds(Protocol):
    """What an engine's modules are."""

    def reduces(self, module: nn.Module) -> bool:
        """Whether the module's output ends in an all-reduce that it can leave out."""

    def gives_bias(self, module: nn.Module) -> bool:
        """Whether it returns (output, bias)."""

    def is_norm(self, module: nn.Module) -> bool: ...

    def is_column(self, module: nn.Module) -> bool: ...


@dataclass
class Site:
    """reduction -> norm -> column. residual: the norm adds one. column: the one reader of the normalised rows, where
    that is a column-parallel linear, or None. name: the norm's."""

    name: str
    reduction: nn.Module
    norm: nn.Module
    residual: bool
    column: nn.Module | None = None


@dataclass
class Flow:
    """sites: in the order of the forward pass. by_rows: whether the residual that each site's norm returns goes to
    another site's norm alone. left: why a part of the model could not be traced."""

    sites: list[Site] = field(default_factory=list)
    by_rows: bool = False
    left: list[str] = field(default_factory=list)


# -- tracing -----------------------------------------------------------------------------------------------------------
class Symbol(fx.Proxy):
    """A tensor of two sizes that do not matter. A node whose sizes were asked for is marked: it is read."""

    @property
    def shape(self) -> torch.Size:
        self.node.meta["sized"] = True
        return torch.Size((8, 1 << 20))

    def size(self, dim: int | None = None) -> object:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    ndim = property(dim)


class Forward(nn.Module):
    """A module's forward with the arguments that the tracer gives it: tensors alone, by name."""

    constants: Mapping[str, None] = {"input_ids": None, "intermediate_tensors": None}
    optional = ("inputs_embeds", "residual")  # given although they have defaults

    def __init__(self, module: nn.Module, tracer: fx.Tracer) -> None:
        super().__init__()
        self.module, self.tracer = module, tracer

    def forward(self) -> object:
        given: dict[str, object] = {}
        for name, parameter in inspect.signature(type(self.module).forward).parameters.items():
            if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name in self.constants:
                given[name] = None
            elif parameter.default is parameter.empty or name in self.optional:
                given[name] = self.tracer.create_proxy("placeholder", name, (), {})
        forward: Callable[..., object] = type(self.module).forward
        return forward(self.module, **given)


class Tracer(fx.Tracer):
    """Goes into modules that contain a reduction, and into no other."""

    def __init__(self, kinds: Kinds) -> None:
        super().__init__()
        self.kinds = kinds

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not contains(module, self.kinds)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Symbol(node, self)


def contains(module: nn.Module, kinds: Kinds) -> bool:
    """Whether there is a reduction inside the module, which is none itself."""
    return not kinds.reduces(module) and any(kinds.reduces(child) for child in module.modules())


def stacks(model: nn.Module, kinds: Kinds) -> Iterator[nn.Module]:
    """Modules that have a list of layers in which there are reductions."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if any(contains(layer, kinds) for layers in lists for layer in layers):
            yield module


class Graph(NamedTuple):
    root: nn.Module
    nodes: list[fx.Node]


def traced(module: nn.Module, kinds: Kinds) -> Graph:
    """Return the graph of the module's forward, traced on symbols. Raises whatever that forward raises on them. What it
    sets on modules is as it was before."""
    tracer, held = Tracer(kinds), [(each, dict(each.__dict__)) for each in module.modules()]
    root = Forward(module, tracer)
    try:
        return Graph(root, list(tracer.trace(root).nodes))
    finally:
        for each, before in held:
            each.__dict__.clear()
            each.__dict__.update(before)


# -- reading the graph -------------------------------------------------------------------------------------------------
def flow_of(model: nn.Module, kinds: Kinds) -> Flow:
    """Return the sites of every stack of layers. A stack whose forward cannot be traced as a whole is traced layer by
    layer; sites that lie between its layers are not seen then."""
    flow, graphs, names = Flow(), [], {id(module): name for name, module in model.named_modules()}
    for stack in stacks(model, kinds):
        try:
            graphs.append(traced(stack, kinds))
            continue
        except Exception as error:
            flow.left.append(f"{type(stack).__name__}: {said(error)}")
        for layer in (each for child in stack.children() if isinstance(child, nn.ModuleList) for each in child):
            if contains(layer, kinds):
                try:
                    graphs.append(traced(layer, kinds))
                except Exception as error:
                    flow.left.append(f"{type(layer).__name__}: {said(error)}")
    flow.left = list(dict.fromkeys(flow.left))
    chained = not flow.left
    for graph in graphs:
        found = sites(graph, kinds, names)
        chained &= bool(found) and residuals_stay(graph, {id(site.norm) for site in found})
        flow.sites += found
    flow.by_rows = chained and bool(flow.sites)
    return flow


def said(error: Exception) -> str:
    """Return the first sentence of the error's message, or its type's name where it has none."""
    return f"{error}".split(". ")[0].splitlines()[0] if f"{error}" else type(error).__name__


def sites(graph: Graph, kinds: Kinds, names: Mapping[int, str]) -> list[Site]:
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    found = []
    for node in graph.nodes:
        reduction = module_of(graph, node)
        if reduction is None or not kinds.reduces(reduction):
            continue
        summed = first_of(node) if kinds.gives_bias(reduction) else node
        reader = only_reader(summed)
        norm = module_of(graph, reader)
        if reader is None or norm is None or not kinds.is_norm(norm) or reader.kwargs:
            continue
        if len(reader.args) > 2 or reader.args[0] is not summed or calls[node.target] + calls[reader.target] > 2:
            continue
        if len(reader.args) == 2 and first_of(reader) is None:
            continue
        site = Site(names[id(norm)], reduction, norm, len(reader.args) == 2 and reader.args[1] is not None)
        behind = only_reader(first_of(reader) if site.residual else reader)
        column = module_of(graph, behind)
        if behind is not None and column is not None and kinds.is_column(column) and calls[behind.target] == 1:
            site.column = column
        found.append(site)
    return found


def residuals_stay(graph: Graph, norms: set[int]) -> bool:
    """Whether what sites return as the residual is read by sites alone, as theirs."""
    for node in graph.nodes:
        if id(module_of(graph, node)) not in norms or len(node.args) < 2:
            continue
        for item in node.users:
            if item.args[1:] == (0,):
                continue
            for reader in item.users:
                taken = len(reader.args) == 2 and reader.args[1] is item and reader.args[0] is not item
                if id(module_of(graph, reader)) not in norms or not taken:
                    return False
    return True


def module_of(graph: Graph, node: fx.Node | None) -> nn.Module | None:
    if node is None or node.op != "call_module":
        return None
    return graph.root.get_submodule(str(node.target))


def first_of(node: fx.Node) -> fx.Node | None:
    """Return the node that reads the first item of the pair that `node` gives; None where the pair is read as a whole.
    A residual is read by its index."""
    items: dict[object, fx.Node] = {}
    for user in node.users:
        if user.op != "call_function" or getattr(user.target, "__name__", "") != "getitem":
            return None
        items[user.args[1]] = user
    return items.get(0)


def only_reader(node: fx.Node | None) -> fx.Node | None:
    """The one node that reads another, once, and whose sizes nobody asked for."""
    if node is None or len(node.users) != 1 or node.meta.get("sized"):
        return None
    (reader,) = node.users
    return reader if sum(each is node for each in reader.all_input_nodes) == 1 else None
