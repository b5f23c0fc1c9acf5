"""Break a protocol on purpose, one call at a time, to test whether the emulator or the test's own check notices.

The mutated sites are those that a recorded run (`record=True`) reached. In kernels, a mutation removes a wait, notify,
barrier or signal, doubles a signal, makes a release or acquire relaxed, narrows a scope to one GPU, or lowers a wait's
target by one arrival. In host code, it drops an event edge, a wait, a signal or a barrier of streams.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triton import JITFunction

from weft.backends.emulated import EmulatedBackend, spmd
from weft.emulator import Report
from weft.emulator.interpret import source_tree
from weft.emulator.ran import Function
from weft.lang.jit import Intrinsic

Value = str | int | None  # the value of a constant

_ATOMICS = tuple(f"atomic_{op}" for op in ("add", "max", "min", "or", "and", "xor", "xchg", "cas"))
_POSTS = ("post",)  # stores of low-latency words, which their reader polls
_BARRIERS = ("debug_barrier", "flush_stores", "bulk_fence", "release_fence")
_BOUND = {
    "wait_until": ("ptr", "target", "guard", "tile", "peer", "SCOPE", "MANY"),
    "flush_stores": ("BULK",),
    "release_fence": ("SCOPE",),
}


@dataclass(frozen=True)
class Mutation:
    """One change of one line. `position` is (line, column) of the changed node in its file."""

    file: str
    line: int
    description: str
    kind: str  # "remove", "double", "set", "lower", or "drop" (host code)
    function: str = ""  # qualified name of the kernel or device function
    position: tuple[int, int] = (0, 0)
    argument: str | int = ""  # "set" and "lower" change the argument of this keyword or index
    value: Value = None
    method: str = ""  # "drop" removes calls of this method from the backend

    def __str__(self) -> str:
        path = os.path.relpath(self.file)
        return f"{self.file if path.startswith('..') else path}:{self.line} {self.description}"

    def changes(self, fn: JITFunction) -> bool:
        return self.function == fn.fn.__qualname__ and self.file == fn.fn.__code__.co_filename

    def drops(self, site: tuple[str, int, str]) -> bool:
        return self.kind == "drop" and site == (self.file, self.line, self.method)

    def apply(self, tree: ast.Module) -> None:
        changed = _Edit(self)
        changed.visit(tree)
        if not changed.done:
            raise LookupError(f"{self}: not found in the source")


class _Edit(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self.mutation, self.done = mutation, False

    def _is_target(self, node: ast.stmt | ast.expr) -> bool:
        return (node.lineno, node.col_offset) == self.mutation.position

    def _statement(self, node: ast.stmt) -> ast.AST | list[ast.stmt]:
        if self._is_target(node) and self.mutation.kind in ("remove", "double"):
            self.done = True
            return ast.copy_location(ast.Pass(), node) if self.mutation.kind == "remove" else [node, node]
        return self.generic_visit(node)

    visit_Expr = visit_While = _statement

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        m = self.mutation
        if m.kind not in ("set", "lower") or not self._is_target(node):
            return node
        self.done = True

        def changed(old: ast.expr) -> ast.expr:
            constant = ast.Constant(m.value)
            return ast.BinOp(old, ast.Sub(), ast.Constant(1)) if m.kind == "lower" else constant

        if isinstance(m.argument, int):
            node.args[m.argument] = changed(node.args[m.argument])
        elif keyword := next((k for k in node.keywords if k.arg == m.argument), None):
            keyword.value = changed(keyword.value)
        else:
            node.keywords.append(ast.keyword(m.argument, ast.Constant(m.value)))
        return ast.fix_missing_locations(node)


# -- finding the sites -------------------------------------------------------------------------------------------------


def _scope_of(fn: JITFunction) -> dict[str, object]:
    return {**fn.fn.__globals__, **inspect.getclosurevars(fn.fn).nonlocals}


def _callee(call: ast.Call, scope: dict[str, object]) -> object:
    node, path = call.func, []
    while isinstance(node, ast.Attribute):
        path.append(node.attr)
        node = node.value
    target = scope.get(node.id) if isinstance(node, ast.Name) else None
    for name in reversed(path):
        target = getattr(target, name, None)
    return target


def _name(call: ast.Call) -> str:
    f = call.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _expressions_of(statement: ast.stmt) -> list[ast.AST]:
    """Return the statement's expressions, but not the statements inside it."""
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    return [] if isinstance(statement, ast.FunctionDef) else [statement]


def _facts(fn: JITFunction, seen: set[str] | None = None) -> tuple[bool, bool]:
    """Return whether the function is part of a protocol, and whether it moves data. Each property may come from the
    function's own body or from a function that it calls."""
    seen = seen if seen is not None else set()
    key = f"{fn.__module__}.{fn.fn.__qualname__}"
    if key in seen:
        return False, False
    seen.add(key)
    if isinstance(fn, Intrinsic):
        return True, False
    protocol = data = False
    scope = _scope_of(fn)
    for call in _calls(source_tree(fn)):
        name, target = _name(call), _callee(call, scope)
        protocol |= name in _ATOMICS or name in _BARRIERS or name in _POSTS
        data |= name in ("store", "dot")
        if isinstance(target, JITFunction) and not target.__module__.startswith("triton."):
            p, d = _facts(target, seen)
            protocol, data = protocol or p, data or d
    return protocol, data


def _text(call: ast.Call) -> str:
    return f"{ast.unparse(call.func)}(...)"


def _kernel_sites(fn: JITFunction, report: Report, names: Sequence[str]) -> Iterator[Mutation]:
    file, function, scope = fn.fn.__code__.co_filename, fn.fn.__qualname__, _scope_of(fn)
    library = fn.__module__.startswith("weft.lang")

    def mutation(
        node: ast.stmt | ast.expr, description: str, kind: str, argument: str | int = "", value: Value = None
    ) -> Mutation:
        return Mutation(file, node.lineno, description, kind, function, (node.lineno, node.col_offset), argument, value)

    for statement in ast.walk(source_tree(fn)):
        if not isinstance(statement, ast.stmt) or (file, statement.lineno) not in report.reached:
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            name, target = _name(call), _callee(call, scope)
            signal = name in _ATOMICS
            protocol = signal or name in _BARRIERS or name in _POSTS or name in names
            if isinstance(target, JITFunction) and not target.__module__.startswith("triton."):
                takes_part, moves = _facts(target)
                protocol |= takes_part and (not moves or target.__module__.startswith("weft.lang"))
                signal |= protocol and any(word in name for word in ("notify", "broadcast", "signal"))
            if library and name == "store" and _facts(fn)[0]:
                protocol = True
            if protocol:
                yield mutation(statement, f"remove {_text(call)}", "remove")
            if signal:
                yield mutation(statement, f"double {_text(call)}", "double")
        if isinstance(statement, ast.While) and all(isinstance(s, ast.Pass) for s in statement.body):
            if any(_name(c) in _ATOMICS or _name(c) == "load" for c in _calls(statement.test)):
                yield mutation(statement, f"remove while {ast.unparse(statement.test)}", "remove")
        for part in _expressions_of(statement):
            for call in _calls(part):
                yield from _weaker(call, mutation, report, file)


def _weaker(call: ast.Call, mutation: Callable[..., Mutation], report: Report, file: str) -> Iterator[Mutation]:
    name = _name(call)
    bound = _BOUND.get(name, ())
    arguments: list[tuple[str, str | int, ast.expr]] = [
        (bound[i] if i < len(bound) else "", i, a) for i, a in enumerate(call.args)
    ]
    arguments += [(k.arg or "", k.arg or "", k.value) for k in call.keywords]
    place = (file, call.lineno)
    for parameter, key, node in arguments:
        constant = node.value if isinstance(node, ast.Constant) else None
        if name in _ATOMICS and parameter == "sem" and constant in ("release", "acquire", "acq_rel"):
            yield mutation(call, f"make {_text(call)} relaxed instead of {constant}", "set", key, "relaxed")
        elif parameter.lower() == "scope" or constant == "sys":
            low_level = name in (*_ATOMICS, "wait_until", "release_fence")
            if place in report.sys_lines if low_level else constant == "sys":
                yield mutation(call, f'narrow {_text(call)} to scope "gpu"', "set", key, "gpu")
        elif name == "flush_stores" and parameter == "BULK" and place in report.bulk_lines:
            yield mutation(call, "make flush_stores(...) not wait for bulk stores", "set", key, False)
        elif name == "wait_until" and parameter == "target":
            yield mutation(call, "let wait_until(...) pass one arrival early", "lower", key)
        elif name == "wait_until" and parameter == "MANY":
            yield mutation(call, "let wait_until(...) not wait for the last of its words", "lower", key)
    if name == "flush_stores" and not arguments and place in report.bulk_lines:
        yield mutation(call, "make flush_stores() not wait for bulk stores", "set", "BULK", False)


def sites(
    kernels: Sequence[JITFunction] | None, trace_run: Report | Callable[[], Report], names: Sequence[str] = ()
) -> list[Mutation]:
    """Return every mutation of the calls that a recorded run (`record=True`) reached. `trace_run` is the run's report,
    or a function that returns it.

    kernels: restrict the kernel sites to these kernels and the functions that they call; None: all kernels that ran.
    names: further functions whose calls are removed, in addition to weft.lang's functions that wait, notify or flush
    stores.
    """
    report = trace_run if isinstance(trace_run, Report) else trace_run()
    functions = [f for f in report.ran.functions.values() if not f.__module__.startswith("triton.")]
    if kernels is not None:
        wanted: set[Function] = set()
        queue = list(kernels)
        while queue:
            fn = queue.pop()
            if fn.fn in wanted:
                continue
            wanted.add(fn.fn)
            scope = _scope_of(fn)
            queue += [t for c in _calls(source_tree(fn)) if isinstance(t := _callee(c, scope), JITFunction)]
        functions = [f for f in functions if f.fn in wanted]
    mutations = [m for fn in functions for m in _kernel_sites(fn, report, names)]
    mutations += [
        Mutation(file, line, f"drop {method}", "drop", method=method) for file, line, method in report.host_sites
    ]
    return sorted(set(mutations), key=lambda m: (m.file, m.line, m.position, m.description))


def kill_rate(
    fn: Callable[[EmulatedBackend], object],
    size: int,
    mutations: Iterable[Mutation],
    seeds: Iterable[int],
    **options: Any,
) -> list[tuple[Mutation, str | None]]:
    """Return each mutation with the error of the first seed that caught it (an exception of `fn` itself counts), or
    None."""
    seeds = list(seeds)
    out: list[tuple[Mutation, str | None]] = []
    for mutation in mutations:
        caught = None
        for seed in seeds:
            try:
                spmd(fn, size, seed=seed, mutation=mutation, **options)
            except Exception as error:
                caught = f"{type(error).__name__}: {error}".partition("\n")[0]
                break
        out.append((mutation, caught))
    return out
