"""Trace the model's own forward symbolically, to find reductions whose only reader is a norm.

A reduction is a module that ends in an all-reduce: a row-parallel linear, or the runner of a mixture of experts. The
graph has one node for each module that contains no reduction. So the graph shows how sums, norms and column-parallel
linears are connected, regardless of the names of the model and its modules. An RMSNorm that is the only reader of a
reduction can compute its sum (`Site`). A module stays unchanged unless the graph proves how it is used.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import NamedTuple, TypeAlias

import torch
from torch import fx, nn

from .layers import Classes

Reduces: TypeAlias = Callable[[nn.Module], bool]  # returns whether a module ends in a reduction


@dataclass
class Site:
    """A chain reduction -> norm -> column. `residual` is true if the norm adds a residual. `column` is the
    column-parallel linear that is the only reader of the normalised rows, or None if there is no such linear. `name` is
    the norm's name."""

    name: str
    reduction: nn.Module
    norm: nn.Module
    residual: bool
    column: nn.Module | None = None


@dataclass
class Flow:
    """The sites of a model, in the order of the forward pass. `by_rows` is true if the norms of sites are the only
    readers of the residuals that these norms return. `left` contains a reason for each part of the model that could not
    be traced."""

    sites: list[Site] = field(default_factory=list)
    by_rows: bool = False
    left: list[str] = field(default_factory=list)


# -- tracing -----------------------------------------------------------------------------------------------------------
class Symbol(fx.Proxy):
    """A tensor with arbitrary sizes of its two dimensions. If the forward reads the sizes of a node, the node is
    marked, since this read counts as a reader."""

    @property
    def shape(self) -> torch.Size:
        self.node.meta["sized"] = True
        return torch.Size((8, 1 << 20))

    def size(self, dim: int | None = None) -> object:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    ndim = property(dim)


EMBEDDED = ("input_ids", "intermediate_tensors")  # these arguments are None in a pass of embeddings


class TracedForward(nn.Module):
    """A module's forward with only the tensors that the tracer passes, by name. The arguments in `absent` are None."""

    optional = ("inputs_embeds", "residual")  # the tracer passes these arguments although they have defaults

    def __init__(self, module: nn.Module, tracer: fx.Tracer, absent: Sequence[str]) -> None:
        super().__init__()
        self.module, self.tracer, self.absent = module, tracer, absent

    def forward(self) -> object:
        arguments: dict[str, object] = {}
        for name, parameter in inspect.signature(type(self.module).forward).parameters.items():
            if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name in self.absent:
                arguments[name] = None
            elif parameter.default is parameter.empty or name in self.optional:
                arguments[name] = self.tracer.create_proxy("placeholder", name, (), {})
        forward: Callable[..., object] = type(self.module).forward
        return forward(self.module, **arguments)


class Tracer(fx.Tracer):
    """A tracer that enters only modules that contain a reduction."""

    def __init__(self, reduces: Reduces) -> None:
        super().__init__()
        self.reduces = reduces

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not contains(module, self.reduces)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Symbol(node, self)


def contains(module: nn.Module, reduces: Reduces) -> bool:
    """Return whether the module, which is not a reduction itself, contains one."""
    return not reduces(module) and any(reduces(child) for child in module.modules())


def calls_of(model: nn.Module, modules: tuple[str, ...]) -> dict[str, set[str]]:
    """Map the name of each class of the model's modules to the functions in these Python modules that the methods of
    the class call."""
    calls: dict[str, set[str]] = {}
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        methods = [inspect.unwrap(m) for base in kind.__mro__ for m in vars(base).values() if inspect.isfunction(m)]
        if names := {name for method in methods for name in functions_called(method, modules)}:
            calls[kind.__name__] = names
    return calls


def functions_called(method: FunctionType, modules: tuple[str, ...]) -> Iterator[str]:
    """Yield the names of the functions that these Python modules define and a function calls by a global name."""
    codes = [method.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for function in map(method.__globals__.get, code.co_names):
            if getattr(function, "__module__", None) in modules:
                yield getattr(function, "__name__", "")


def stacks(model: nn.Module, classes: Classes) -> Iterator[nn.Module]:
    """Yield the modules that contain a list of layers with reductions."""
    for module in model.modules():
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if any(contains(layer, classes.reduces) for layers in lists for layer in layers):
            yield module


class Graph(NamedTuple):
    root: nn.Module
    nodes: list[fx.Node]


def traced(module: nn.Module, reduces: Reduces, absent: Sequence[str] = EMBEDDED) -> Graph:
    """Return the graph of the module's forward, traced on symbols, without the arguments `absent`. Raises any error
    that the forward raises on symbols. Restores the attributes that the forward sets on modules."""
    tracer, saved = Tracer(reduces), [(child, dict(child.__dict__)) for child in module.modules()]
    root = TracedForward(module, tracer, absent)
    try:
        return Graph(root, list(tracer.trace(root).nodes))
    finally:
        for child, attributes in saved:
            child.__dict__.clear()
            child.__dict__.update(attributes)


# -- reading the graph -------------------------------------------------------------------------------------------------
def flow_of(model: nn.Module, classes: Classes) -> Flow:
    """Return the sites of every stack of layers. If the forward of a stack cannot be traced, its layers are traced one
    by one, which misses the sites between layers."""
    flow, graphs, names = Flow(), [], {id(module): name for name, module in model.named_modules()}
    for stack in stacks(model, classes):
        try:
            graphs.append(traced(stack, classes.reduces))
            continue
        except Exception as error:
            flow.left.append(f"{type(stack).__name__}: {first_sentence(error)}")
        for layer in (layer for child in stack.children() if isinstance(child, nn.ModuleList) for layer in child):
            if contains(layer, classes.reduces):
                try:
                    graphs.append(traced(layer, classes.reduces))
                except Exception as error:
                    flow.left.append(f"{type(layer).__name__}: {first_sentence(error)}")
    flow.left = list(dict.fromkeys(flow.left))
    chained = not flow.left
    for graph in graphs:
        graph_sites = sites(graph, classes, names)
        chained &= bool(graph_sites) and residuals_stay(graph, {id(site.norm) for site in graph_sites})
        flow.sites += graph_sites
    flow.by_rows = chained and bool(flow.sites)
    return flow


def first_sentence(error: Exception) -> str:
    """Return the first sentence of the error's message, or the name of its type if the message is empty."""
    return f"{error}".split(". ")[0].splitlines()[0] if f"{error}" else type(error).__name__


def sites(graph: Graph, classes: Classes, names: Mapping[int, str]) -> list[Site]:
    """Return the sites in a graph."""
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    graph_sites = []
    for node in graph.nodes:
        reduction = module_of(graph, node)
        if reduction is None or not classes.reduces(reduction):
            continue
        total = first_item(node) if classes.gives_bias(reduction) else node
        reader = only_reader(total)
        norm = module_of(graph, reader)
        if reader is None or norm is None or not classes.is_norm(norm) or reader.kwargs:
            continue
        if len(reader.args) > 2 or reader.args[0] is not total or calls[node.target] + calls[reader.target] > 2:
            continue
        if len(reader.args) == 2 and first_item(reader) is None:
            continue
        site = Site(names[id(norm)], reduction, norm, len(reader.args) == 2 and reader.args[1] is not None)
        following = only_reader(first_item(reader) if site.residual else reader)
        column = module_of(graph, following)
        if following is not None and column is not None and classes.is_column(column) and calls[following.target] == 1:
            site.column = column
        graph_sites.append(site)
    return graph_sites


def residuals_stay(graph: Graph, norms: set[int]) -> bool:
    """Return whether the norms of sites are the only readers of the residuals that these norms return, and read them as
    residuals."""
    for node in graph.nodes:
        if id(module_of(graph, node)) not in norms or len(node.args) < 2:
            continue
        for item in node.users:
            if item.args[1:] == (0,):
                continue
            for reader in item.users:
                as_residual = len(reader.args) == 2 and reader.args[1] is item and reader.args[0] is not item
                if id(module_of(graph, reader)) not in norms or not as_residual:
                    return False
    return True


def module_of(graph: Graph, node: fx.Node | None) -> nn.Module | None:
    """Return the module that a node calls, or None."""
    if node is None or node.op != "call_module":
        return None
    return graph.root.get_submodule(str(node.target))


def first_item(node: fx.Node) -> fx.Node | None:
    """Return the node that reads the first item of the pair `node`. Return None if no node reads it, or if a node uses
    the pair as a whole."""
    items: dict[object, fx.Node] = {}
    for user in node.users:
        if user.op != "call_function" or getattr(user.target, "__name__", "") != "getitem":
            return None
        items[user.args[1]] = user
    return items.get(0)


def only_reader(node: fx.Node | None) -> fx.Node | None:
    """Return the only node that reads `node`; None if there are several readers or reads, or if the forward reads the
    sizes of `node`."""
    if node is None or len(node.users) != 1 or node.meta.get("sized"):
        return None
    (reader,) = node.users
    return reader if sum(operand is node for operand in reader.all_input_nodes) == 1 else None
