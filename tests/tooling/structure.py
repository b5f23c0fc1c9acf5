"""Print the structure of the source in numbers, and check its limits: `python tests/tooling/structure.py` (`make
structure`).

A module may import only modules of its own layer's name and of lower layers. DOORS lists the exceptions, all of them
imports inside functions. Modules must not import each other in a circle, except through a door; imports inside
functions count here, imports for type checking alone do not. Imports for type checking do count as arrows, however. An
arrow leads from a package, or from a module beside the packages, to each other package or module that it imports. UP is
the number of arrows that may lead from a lower to a higher one.

Only `architectures` compares compute capabilities.

A limit that the source does not meet yet is set to today's number, with the goal beside it: lower it together with the
number. In the code outside src that NAMED lists, only names are checked. `--lines` instead prints the lines of code,
beside the numbers in CODE_LINES.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "weft"

# The layers from the bottom; names on one line do not import each other. A module belongs to the longest listed name
# with which it begins.
LAYERS: Sequence[Sequence[str]] = (
    ("errors",),
    ("architectures",),
    ("_triton", "residency", "span", "symmetric", "timing"),
    ("plans", "scaled_tensor"),
    ("scale", "chooser"),
    ("lang",),
    ("kernel_launch",),
    ("emulator",),  # the emulator of the kernels' language; backends.emulated runs ranks on it
    ("backends",),
    ("world",),
    ("launch", "tensor_checks"),
    ("prepared",),
    ("torch_library",),
    ("cost",),
    ("op",),
    ("transport", "compute"),
    ("ops",),
    ("planner",),
    ("nn",),
    ("models", "moe"),
    ("integrations",),
    ("hf", "parallel", "torch", "vllm"),
    ("trace",),
    ("check",),
    ("demo", "doctor"),
    ("cli",),
    ("api",),
    ("weft",),
)
DOORS = {
    ("op", "planner.auto"): 'plan "auto" asks the planner, which reads the registry of ops',
    ("backends.library_gemm", "integrations.quack"): "a product asks for quack's GEMM, which is timed against cuBLAS",
}

UP = 4  # the largest number of arrows that lead up: the doors, and `torch_library`'s import of `op` for types
LINES, KERNEL_LINES = 60, 80  # the most lines of a function and of a device function, without the docstring
LONGER: dict[str, tuple[int, str]] = {}
PARAMETERS = 16  # the largest number of parameters of a device function; MORE lists the exceptions
MORE: dict[str, int] = {}

ANY = 146  # lines that name Any; Transformers' modules have no other type
SKIPS = 24  # lines that the formatter must skip
WIDE = 0  # lines wider than COLUMNS
COLUMNS = 120
FRAGMENTS = 0  # docstrings that begin with a preposition, and so have no subject
PREPOSITIONS = frozenset("As At Behind Beside Between By For From In Of On To Under With Without".split())
SHARED_NAMES = 0  # names that several modules give to different classes, constants or types
ALIASES = 0  # aliases of a type for which another module has an alias too
BROKEN_TABLES = 0  # rows of tables in docstrings that were wrapped as prose

# Names without a meaning (instead of `found`, name the object that was found), and private words for which the field
# has others.
BANNED = frozenset(
    "of at by made given found met told what first more lie came want got said mine theirs there here now each both "
    "other own settle settled turn turned turns tell hear hears heard say board agree agreed meet meeting meetings "
    "beside aside lasting lies places sight square piece pieces joint joined weaving few posted summed Lacks sharing "
    "movers senders summers pullers pushers".split()
)
NAMED = ("bench", "examples", "tests")
# Lines of code (`code_lines`) in November 2026, before calls were prepared: later numbers are compared with these.
CODE_LINES = {"src": 31494, "examples": 801, "bench": 8770}
NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
ALLOWED = {
    ("emulator.interpret", "other"): "the name of the parameter in Triton and in Python's operators",
    ("plans", "pieces"): "the key of stored plans, in tuning caches and in bench/results",
}


@dataclass(frozen=True)
class Function:
    """`name` follows the names of its module, classes and functions. `lines` excludes decorators and docstring."""

    name: str
    line: int
    lines: int
    parameters: int
    device: bool


@dataclass
class Module:
    """One file. `name` is relative to the package; the package itself is "weft". `imports` lists (module, line) for all
    imports, including those inside functions."""

    name: str
    path: Path
    text: str
    package: bool
    imports: list[tuple[str, int]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # imported modules, including imports for type checking
    functions: list[Function] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)


def modules(source: Path = SOURCE) -> dict[str, Module]:
    modules_by_name = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts) or "weft"
        modules_by_name[name] = Module(name, path, path.read_text(encoding="utf-8"), package)
    for module in modules_by_name.values():
        module.imports = sorted(set(_imports(module, modules_by_name, _run)), key=lambda i: (i[1], i[0]))
        module.named = {name for name, _ in _imports(module, modules_by_name, ast.walk)}
        module.functions = list(_functions(module.tree, module.name))
    return modules_by_name


def modules_beside_source(directories: Sequence[str] = NAMED) -> dict[str, Module]:
    """Return the modules below these directories of the repository, without their imports and functions. Names are like
    `tests.tooling.structure`."""
    modules_by_name = {}
    for path in sorted(path for directory in directories for path in (ROOT / directory).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        modules_by_name[name] = Module(name, path, path.read_text(encoding="utf-8"), False)
    return modules_by_name


# -- imports -----------------------------------------------------------------------------------------------------------
def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all descendants, except those for type checking alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statement in child.orelse:
                yield statement
                yield from _run(statement)
            continue
        yield child
        yield from _run(child)


def _imports(
    module: Module, known: Mapping[str, Module], nodes: Callable[[ast.AST], Iterator[ast.AST]]
) -> Iterator[tuple[str, int]]:
    """Yield the modules of this package that a module imports in `nodes` of its tree. `from package import name` yields
    the module `package.name`, if it exists."""
    package = [] if module.name == "weft" else module.name.split(".")
    package = package if module.package else package[:-1]
    for node in nodes(module.tree):
        if isinstance(node, ast.Import):
            imported = [
                a.name.removeprefix("weft.") for a in node.names if a.name == "weft" or a.name.startswith("weft.")
            ]
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                base = package[: len(package) - node.level + 1] + parts
            elif parts[:1] == ["weft"]:
                base = parts[1:]
            else:
                continue
            imported = []
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                imported.append(inner if inner in known else ".".join(base) or "weft")
        else:
            continue
        for name in imported:
            if name != module.name:
                yield name, node.lineno  # type: ignore[attr-defined]


def layer_of(name: str, layers: Sequence[Sequence[str]]) -> tuple[int, str] | None:
    """Return the number of the layer that contains a module, counted from the bottom, and the layer's name."""
    matches = [(i, n) for i, names in enumerate(layers) for n in names if name == n or name.startswith(f"{n}.")]
    return max(matches, key=lambda match: len(match[1]), default=None)


def upward(
    modules_by_name: Mapping[str, Module], layers: Sequence[Sequence[str]], doors: Mapping[tuple[str, str], str]
) -> list[str]:
    """Return imports that do not lead down, modules without a layer, and doors that no module uses."""
    violations, used = [], set()
    for module in modules_by_name.values():
        layer = layer_of(module.name, layers)
        if layer is None:
            violations.append(f"{module.path}: {module.name} is in no layer")
            continue
        for name, line in module.imports:
            imported_layer = layer_of(name, layers)
            if imported_layer is None or imported_layer == layer or imported_layer[0] < layer[0]:
                continue
            if (module.name, name) in doors:
                used.add((module.name, name))
                if not _inside(module, line):
                    violations.append(
                        f"{module.path}:{line}: the door from {module.name} to {name} is inside a function only"
                    )
                continue
            violations.append(f"{module.path}:{line}: {module.name} imports {name}, which is no layer below its own")
    violations += [f"no import goes from {a} to {b}: take the door out" for a, b in doors if (a, b) not in used]
    return violations


def arrows_up(modules_by_name: Mapping[str, Module], layers: Sequence[Sequence[str]]) -> list[str]:
    """Return pairs of a package, or a module beside the packages, and a higher one that it imports, each pair with its
    imports. A package is in its highest layer."""
    level = {name.split(".")[0]: i for i, names in enumerate(layers) for name in names}
    arrows = defaultdict[str, list[str]](list)
    for module in modules_by_name.values():
        for name in sorted(module.named):
            low, high = module.name.split(".")[0], name.split(".")[0]
            if level.get(low, 0) < level.get(high, 0):
                arrows[f"{low} -> {high}"].append(f"{module.name} imports {name}")
    return [f"{arrow}: {', '.join(imports)}" for arrow, imports in sorted(arrows.items())]


def _inside(module: Module, line: int) -> bool:
    """Return whether a line is in a function."""
    return any(
        isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.lineno < line <= (n.end_lineno or 0)
        for n in ast.walk(module.tree)
    )


def circles(modules_by_name: Mapping[str, Module], doors: Mapping[tuple[str, str], str]) -> list[str]:
    """Return groups of modules that import each other, each as one circular path."""
    to = {
        m.name: {n for n, _ in m.imports if n in modules_by_name and (m.name, n) not in doors}
        for m in modules_by_name.values()
    }
    reached: dict[str, set[str]] = {}
    for name in to:
        seen: set[str] = set()
        left = [*to[name]]
        while left:
            module = left.pop()
            if module not in seen:
                seen.add(module)
                left += to[module]
        reached[name] = seen
    violations, reported = [], set()
    for name in sorted(to):
        group = {member for member in reached[name] if name in reached[member]}
        if group and name not in reported:
            reported |= group
            violations.append("a circle of imports: " + " -> ".join(_way_round(name, to)))
    return violations


def _way_round(name: str, to: Mapping[str, set[str]]) -> list[str]:
    """Return the shortest path from a module to itself."""
    ways = [[name]]
    seen: set[str] = set()
    while ways:
        way = ways.pop(0)
        for imported in sorted(to[way[-1]]):
            if imported == name:
                return [*way, name]
            if imported not in seen:
                seen.add(imported)
                ways.append([*way, imported])
    return [name]


def decisions_by_capability(modules_by_name: Mapping[str, Module]) -> list[str]:
    """Return comparisons of a compute capability outside `architectures`, whose table lists the features of GPUs."""
    return [
        f"{module.path}:{node.lineno}: {module.name} compares a compute capability: ask architectures.features"
        for module in modules_by_name.values()
        if module.name != "architectures"
        for node in ast.walk(module.tree)
        if (
            any("capability" in name or name in ("AMPERE", "HOPPER") for name in map(_identifier, ast.walk(node)))
            if isinstance(node, ast.Compare)
            else isinstance(node, ast.Call) and _identifier(node.func) == "cuda_capability_geq"
        )
    ]


def _identifier(node: ast.AST) -> str:
    """Return the identifier of a name, the last identifier of an attribute, or "" for any other node."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# -- functions ---------------------------------------------------------------------------------------------------------
def _functions(node: ast.AST, within: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = f"{within}.{child.name}" if hasattr(child, "name") and isinstance(child.name, str) else within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            statement = child.body[0]
            docstring_lines = (
                (statement.end_lineno or 0) - statement.lineno + 1
                if ast.get_docstring(child, clean=False) is not None
                else 0
            )
            a = child.args
            yield Function(
                name=name,
                line=child.lineno,
                lines=(child.end_lineno or 0) - child.lineno + 1 - docstring_lines,
                parameters=len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs),
                device=any(_is_jit(d) for d in child.decorator_list),
            )
        yield from _functions(child, name)


def _is_jit(decorator: ast.expr) -> bool:
    """Return whether the node is jit, weft.jit, or a call of it."""
    return _identifier(decorator.func if isinstance(decorator, ast.Call) else decorator) == "jit"


def long_functions(modules_by_name: Mapping[str, Module], allowed: Mapping[str, tuple[int, str]]) -> list[str]:
    return _over(
        modules_by_name,
        {name: lines for name, (lines, _) in allowed.items()},
        lambda f: f.lines,
        lambda f: KERNEL_LINES if f.device else LINES,
        "lines",
    )


def many_parameters(modules_by_name: Mapping[str, Module], allowed: Mapping[str, int]) -> list[str]:
    return _over(
        modules_by_name, allowed, lambda f: f.parameters if f.device else 0, lambda f: PARAMETERS, "parameters"
    )


def _over(
    modules_by_name: Mapping[str, Module],
    allowed: Mapping[str, int],
    size: Callable[[Function], int],
    limit: Callable[[Function], int],
    unit: str,
) -> list[str]:
    """Return functions that exceed the limit or their allowance, and unnecessary allowances."""
    violations, used = [], set()
    for module in modules_by_name.values():
        for f in module.functions:
            if size(f) > limit(f):
                used.add(f.name)
            most = max(limit(f), allowed.get(f.name, 0))
            if size(f) > most:
                violations.append(f"{module.path}:{f.line}: {f.name} has {size(f)} {unit}, at most {most}")
    return violations + [f"{name} is within the limit of {unit}: take it out" for name in allowed if name not in used]


# -- lines -------------------------------------------------------------------------------------------------------------
def any_lines(module: Module) -> list[int]:
    """Return the lines of code that contain the name Any."""
    named = set()
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Name)
            and node.id == "Any"
            or isinstance(node, ast.Attribute)
            and node.attr == "Any"
            or isinstance(node, ast.alias)
            and node.name == "Any"
        ):
            named.add(node.lineno)
    return sorted(named)


def skipped(module: Module) -> list[int]:
    """Return the lines with a mark that stops the formatter from changing these lines."""
    return [i for i, line in enumerate(module.text.splitlines(), 1) if "# fmt: skip" in line]


def wide(module: Module) -> list[int]:
    return [i for i, line in enumerate(module.text.splitlines(), 1) if len(line) > COLUMNS]


def fragments(module: Module) -> list[int]:
    """Return the lines of docstrings that begin with a preposition."""
    lines = []
    for node in ast.walk(module.tree):
        if isinstance(node, DOCUMENTED) and (words := (ast.get_docstring(node) or "").split()):
            if words[0].rstrip(",:") in PREPOSITIONS:
                lines.append(getattr(node, "lineno", 1))
    return sorted(lines)


def shared_names(modules_by_name: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return the names that several modules give to different public classes, constants or aliases of types, each with
    its modules. TypeVars are ignored, and aliases of one type under one name count once (`shared_aliases`)."""
    by_name: dict[str, dict[str, str]] = defaultdict(dict)  # for each name, a module for each meaning
    for module in modules_by_name.values():
        for name, value in _named(module):
            if not name.startswith("_"):
                by_name[name].setdefault(value, module.name)
    return {name: sorted(set(where.values())) for name, where in sorted(by_name.items()) if len(where) > 1}


def _named(module: Module) -> Iterator[tuple[str, str]]:
    """Yield (name, meaning) of a module's classes, constants and aliases of types."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, module.name
        for name, value in _assigned(node):
            if name.isupper():
                yield name, module.name
            elif _is_type_alias(name, value):
                yield name, ast.unparse(value)


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, value) of an assignment, unless it creates a TypeVar or ParamSpec."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign):
        targets, value = [node.target], node.value  # type: ignore[assignment]
    else:
        return
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec"):
        return
    for target in targets:
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(name, ast.Name):
                yield name.id, value


def _is_type_alias(name: str, value: ast.expr | None) -> TypeGuard[ast.expr]:
    """Return whether an assignment creates a second name for a type: `Tensor = torch.Tensor`, `Row = tuple[int,
    ...]`."""
    camel = name[:1].isupper() and not name.isupper()
    is_type = isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp)
    return camel and is_type and ast.unparse(value) != "Any"  # type: ignore[arg-type]


def shared_aliases(modules_by_name: Mapping[str, Module]) -> dict[str, list[str]]:
    """Return each class for which several modules have an alias, such as `torch.Tensor`, with these modules."""
    by_type: dict[str, list[str]] = defaultdict(list)
    for module in modules_by_name.values():
        for name, value in (pair for node in module.tree.body for pair in _assigned(node)):
            if _is_type_alias(name, value) and isinstance(value, ast.Name | ast.Attribute):
                by_type[ast.unparse(value)].append(module.name)
    return {kind: where for kind, where in sorted(by_type.items()) if len(where) > 1}


def banned_names(module: Module, banned: Collection[str] = BANNED) -> list[tuple[int, str]]:
    """Return (line, name) of variables, parameters, attributes, functions, classes and import aliases whose name is
    banned, with or without leading underscores."""
    occurrences = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                pass
            case _:
                continue
        if name.lstrip("_") in banned and (module.name, name) not in ALLOWED:
            occurrences.add((node.lineno, name))
    return sorted(occurrences)


def without_meaning(modules_by_name: Mapping[str, Module]) -> list[str]:
    """Return banned names, each with its file and line."""
    return [
        f"{module.path}:{line}: `{name}` says nothing of what it holds"
        for module in modules_by_name.values()
        for line, name in banned_names(module)
    ]


def broken_tables(module: Module) -> list[int]:
    """Return the lines of docstrings where a row of a table is wrapped as prose: such a line starts left of the table's
    text column and is between lines that start in that column."""
    lines = []
    for node in ast.walk(module.tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            text: ast.Expr = node.body[0]  # type: ignore[assignment]
            rows = ast.get_docstring(node, clean=False).splitlines()  # type: ignore[union-attr]
            lines += [text.lineno + i for i in _broken_rows(rows)]
    return sorted(lines)


def _broken_rows(rows: Sequence[str]) -> Iterator[int]:
    column = 0  # the column where the text of the table's rows begins; 0 outside tables
    for i, row in enumerate(rows):
        indent = len(row) - len(row.lstrip())
        label = re.match(r" *\S.*? {2,}(?=\S)", row)
        if label:
            column = label.end()
        elif not row.strip():
            column = 0
        elif column and indent < column:
            after = rows[i + 1] if i + 1 < len(rows) else ""
            if after.strip() and len(after) - len(after.lstrip()) == column:
                yield i
            column = 0


def code_lines(text: str) -> int:
    """Return the number of lines of code, without blank lines, comments and docstrings."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def code_lines_by_directory(root: Path = ROOT) -> dict[str, int]:
    """Return the number of lines of code in each directory of CODE_LINES."""
    return {
        directory: sum(code_lines(path.read_text(encoding="utf-8")) for path in (root / directory).rglob("*.py"))
        for directory in CODE_LINES
    }


# -- the whole report --------------------------------------------------------------------------------------------------
def broken(modules_by_name: Mapping[str, Module]) -> tuple[list[str], list[str]]:
    """Return the numbers, and the limits that the source exceeds."""
    violations = upward(modules_by_name, LAYERS, DOORS) + circles(modules_by_name, DOORS)
    violations += (
        decisions_by_capability(modules_by_name)
        + long_functions(modules_by_name, LONGER)
        + many_parameters(modules_by_name, MORE)
        + without_meaning(modules_by_name)
    )
    arrows = arrows_up(modules_by_name, LAYERS)
    numbers = [f"{len(arrows):5} arrows that go up, at most {UP}"]
    if len(arrows) > UP:
        violations += [f"{len(arrows)} arrows go up, at most {UP}", *(f"    {arrow}" for arrow in arrows)]
    for title, lines_of, most in (
        ("lines that name Any", any_lines, ANY),
        ("lines that the formatter leaves", skipped, SKIPS),
        (f"lines over {COLUMNS} columns", wide, WIDE),
        ("docstrings that begin with a preposition", fragments, FRAGMENTS),
        ("rows of docstrings' tables wrapped as prose", broken_tables, BROKEN_TABLES),
    ):
        counts = Counter({str(m.path): len(lines_of(m)) for m in modules_by_name.values()})
        numbers.append(f"{counts.total():5} {title}, at most {most}")
        if counts.total() > most:
            violations.append(f"{counts.total()} {title}, at most {most}; most of them in")
            violations += [f"    {count:3} {path}" for path, count in counts.most_common(10) if count]
    twice = shared_names(modules_by_name)
    numbers.append(f"{len(twice):5} names that modules give to different things, at most {SHARED_NAMES}")
    if len(twice) > SHARED_NAMES:
        violations.append(f"{len(twice)} names stand for different things in different modules, at most {SHARED_NAMES}")
        violations += [f"    {name}: {', '.join(where)}" for name, where in twice.items()]
    aliases = shared_aliases(modules_by_name)
    count = sum(len(where) for where in aliases.values())
    numbers.append(f"{count:5} aliases of types that other modules have an alias of, at most {ALIASES}")
    if count > ALIASES:
        violations.append(f"{count} aliases of types that other modules have an alias of, at most {ALIASES}")
        violations += [f"    {kind}: {', '.join(where)}" for kind, where in aliases.items()]
    functions = [f for m in modules_by_name.values() for f in m.functions]
    numbers.append(f"{max(f.lines for f in functions):5} lines of the longest function, {LINES} or {KERNEL_LINES}")
    numbers.append(f"{len(MORE):5} device functions of more than {PARAMETERS} parameters")
    return numbers, violations


def main() -> int:
    if sys.argv[1:] == ["--lines"]:
        for directory, lines in code_lines_by_directory().items():
            print(f"{lines:7,} lines of code in {directory}, {lines - CODE_LINES[directory]:+,} since November 2026")
        return 0
    numbers, violations = broken(modules())
    violations += without_meaning(modules_beside_source())
    print("\n".join(numbers))
    if violations:
        print("\n".join(["", "broken:", *violations]), file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
