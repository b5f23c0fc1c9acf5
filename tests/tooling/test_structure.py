"""Tests of the source's layers: the planner asks the registry for the properties of an op."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import weft
from tests.tooling import structure
from weft.op import REGISTRY, Op, collectives, registered

SOURCE = Path(weft.__file__).parent
PLANNER = sorted((SOURCE / "planner").rglob("*.py"))


@pytest.mark.parametrize("path", PLANNER, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_planner_names_no_op(path: Path) -> None:
    """Collectives are excluded, because one of them has the name of an op."""
    names = set(REGISTRY) - set(collectives().values())
    constants = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [f"{path.name}:{node.lineno}" for node in constants if node.value in names]


def test_the_planner_imports_no_module_of_an_op() -> None:
    defined = {type(op).__module__.removeprefix("weft.") for op in REGISTRY.values()}
    planner = [module for name, module in structure.modules().items() if name.partition(".")[0] == "planner"]
    assert not [f"{m.path}:{line}: {name}" for m in planner for name, line in m.imports if name in defined]


def test_every_op_is_defined_whole() -> None:
    assert set(collectives()) <= set(REGISTRY)
    for op in REGISTRY.values():
        assert (
            next(iter(op.kinds)) == "sequential"
            and (op.emulator_plan if isinstance(op.emulator_plan, type) else type(op.emulator_plan)) in op.runs
        )
        assert all(inspect.isfunction(run) for run in op.runs.values()), op.name
        assert all(type(plan) in op.runs for plan in op.variants), op.name


def test_two_ops_of_one_name_are_refused() -> None:
    class AllReduce(Op):  # type: ignore[type-arg, unused-ignore]
        name, runs = "all_reduce", REGISTRY["all_reduce"].runs
        check = sizes = outputs = lambda *_: None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="an op named 'all_reduce' exists"):
        registered(AllReduce())


CASES = Path(__file__).parents[1] / "emulated"


@pytest.mark.parametrize("package", sorted(p.parent.name for p in (SOURCE / "ops").rglob("op.py")))
def test_the_cases_of_an_op_are_found_by_its_name(package: str) -> None:
    text = (CASES / f"cases_{package}.py").read_text()
    assert [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.args.args]


# -- the counters of tests/tooling/structure.py find violations ----------------------------------------------------------------
LAYERS = (("base",), ("left", "right"), ("top",), ("weft",))


def planted(tmp_path: Path, inner: dict[str, str] | None = None, **files: str) -> dict[str, structure.Module]:
    """Return the modules of files with these texts; the keys of `inner` are paths."""
    for name, text in {**files, **(inner or {})}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return structure.modules(tmp_path)


def test_the_source_is_within_its_limits() -> None:
    assert structure.broken(structure.modules())[1] == []


def test_upward_imports_are_found(tmp_path: Path) -> None:
    lazy = "def f():\n    from .top import x\n"
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .top import x\n"
    modules = planted(tmp_path, base=lazy, left="from . import right, base\n", right=checked, top="import weft.left\n")
    violations = structure.upward(modules, LAYERS, {})
    assert [line.rpartition(": ")[2] for line in violations] == [
        "base imports top, which is no layer below its own",
        "left imports right, which is no layer below its own",
    ]
    assert structure.upward(modules, (*LAYERS, ("else",)), {("base", "top"): "why", ("left", "right"): "why"}) == [
        f"{tmp_path / 'left.py'}:1: the door from left to right is inside a function only"
    ]
    assert "take the door out" in structure.upward(modules, LAYERS, {("base", "left"): "why"})[-1]


def test_modules_of_no_layer_are_found(tmp_path: Path) -> None:
    modules = planted(tmp_path, base="", other="")
    assert structure.upward(modules, LAYERS, {}) == [f"{tmp_path / 'other.py'}: other is in no layer"]


def test_circles_are_found(tmp_path: Path) -> None:
    modules = planted(
        tmp_path,
        base="def f():\n    from . import top__inner\n    from .left import x\n",
        left="from .right import x\n",
        right="from .base import f\n",
        top="from .base import f\n",
    )
    assert structure.circles(modules, {}) == ["a circle of imports: base -> left -> right -> base"]
    assert structure.circles(modules, {("base", "left"): "why"}) == []


def test_arrows_that_go_up_are_found(tmp_path: Path) -> None:
    """Imports inside functions and for type checking count; a package is in its highest layer."""
    low = "if TYPE_CHECKING:\n    from .mixed import above\ndef f():\n    from . import high\n"
    inner = {"mixed/above": "from .. import low\n", "mixed/below": "from ..high import x\n"}
    modules = planted(tmp_path, inner, low=low, high="from .mixed import above, below\n")
    assert structure.arrows_up(modules, (("mixed.below",), ("low",), ("mixed",), ("high",))) == [
        "low -> high: low imports high",
        "low -> mixed: low imports mixed.above",
        "mixed -> high: mixed.below imports high",
    ]


def test_comparisons_of_capabilities_are_found(tmp_path: Path) -> None:
    base = "fast = world.capability >= 90\nsame = capability\nslow = x < HOPPER\nbulk = cuda_capability_geq(9)\n"
    modules = planted(tmp_path, base=base, architectures="known = capability in FEATURES\n")
    lines = [violation.split(":")[1] for violation in structure.decisions_by_capability(modules)]
    assert lines == ["1", "3", "4"]


def test_packages_are_distinguished_from_their_modules(tmp_path: Path) -> None:
    inner = {"top/__init__": "from . import a\nfrom .a import x\n", "top/a": "from .. import base\n"}
    modules = planted(tmp_path, inner, base="")
    assert modules["top"].imports == [("top.a", 1), ("top.a", 2)]
    assert modules["top.a"].imports == [("base", 1)]


def test_long_functions_are_found(tmp_path: Path) -> None:
    body = "    x = 1\n" * 60
    device = "    x = 1\n" * 79
    modules = planted(
        tmp_path,
        a=f"class C:\n    def short(self):\n        '''Said\n        at length.'''\n{body[:-10].replace('    x', '        x')}",
        b=f"def long():\n{body}",
        c=f"@weft.jit(do_not_specialize=('n',))\ndef kernel():\n{device}",
        d=f"@jit\ndef longer():\n{device}    y = 1\n",
    )
    violations = structure.long_functions(modules, {})
    assert [line.rpartition(": ")[2] for line in violations] == [
        "b.long has 61 lines, at most 60",
        "d.longer has 81 lines, at most 80",
    ]
    allowed = {"b.long": (61, "why"), "d.longer": (80, "why"), "a.C.short": (70, "why")}
    longer, needless = structure.long_functions(modules, allowed)
    assert longer.endswith("d.longer has 81 lines, at most 80")
    assert needless == "a.C.short is within the limit of lines: take it out"


def test_only_parameters_of_device_functions_are_counted(tmp_path: Path) -> None:
    many = ", ".join(f"a{i}" for i in range(17))
    modules = planted(tmp_path, a=f"@jit\ndef kernel({many}):\n    pass\n\ndef host({many}):\n    pass\n")
    assert [line.rpartition(": ")[2] for line in structure.many_parameters(modules, {})] == [
        "a.kernel has 17 parameters, at most 16"
    ]
    assert structure.many_parameters(modules, {"a.kernel": 17}) == []
    assert "take it out" in structure.many_parameters(modules, {"a.kernel": 17, "a.host": 17})[0]


def test_lines_are_counted(tmp_path: Path) -> None:
    text = f'''"""Any of these is a word."""
import typing
from typing import Any
x: Any = [Any, typing.Any]
y = 1  # fmt: skip
z = "{"z" * 116}"
'''
    module = planted(tmp_path, a=text)["a"]
    assert structure.any_lines(module) == [3, 4]
    assert structure.skipped(module) == [5]
    assert structure.wide(module) == [6]


def test_names_of_two_modules_are_found(tmp_path: Path) -> None:
    modules = planted(tmp_path, a="class C: ...\nN, M = 1, 2\n_P = 1\n", b="class C: ...\nN: int = 1\n_P = 1\nm = 1\n")
    assert structure.shared_names(modules) == {"C": ["a", "b"], "N": ["a", "b"]}


def test_docstrings_without_a_subject_are_found(tmp_path: Path) -> None:
    text = '''"""From here on."""
def f():
    """By rank, its rows."""
class C:
    """Of all ranks."""
    def g(self):
        """Return what `f` gives, by rank."""
'''
    assert structure.fragments(planted(tmp_path, a=text)["a"]) == [1, 2, 4]


def test_banned_names_are_found_wherever_they_are_bound(tmp_path: Path) -> None:
    text = """
    import numpy as of
    class Turn:
        other: int = 0
        def told(self, at): self._found = [here for here in at]
    def good(first_row, each_row, *, key): return key.more(first=first_row)
    """
    module = planted(tmp_path, words=inspect.cleandoc(text))["words"]
    assert [name for _, name in structure.banned_names(module)] == ["of", "other", "_found", "at", "here", "told"]
    violations = structure.without_meaning(planted(tmp_path, words=inspect.cleandoc(text), clean="x = 1\n"))
    assert len(violations) == 6 and all("words.py:" in line for line in violations)


@pytest.mark.parametrize("directory", structure.NAMED)
def test_names_outside_the_source_have_meanings(directory: str) -> None:
    modules = structure.modules_beside_source((directory,))
    assert modules and structure.without_meaning(modules) == []


def test_the_lint_refuses_banned_names_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lint covers each directory and its subdirectories, and nothing else."""
    text = "def good(row):\n    found = row\n"
    for directory in (*structure.NAMED, "docs"):
        (tmp_path / directory / "inner").mkdir(parents=True)
        (tmp_path / directory / "a.py").write_text(text)
        (tmp_path / directory / "inner/b.py").write_text(text)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    assert structure.main() == 1
    lines = capsys.readouterr().err.split("broken:\n")[1].splitlines()
    assert lines == [
        f"{tmp_path / directory / file}:2: `found` says nothing of what it holds"
        for directory in structure.NAMED
        for file in ("a.py", "inner/b.py")
    ]


def test_names_of_different_things_and_aliases_of_one_type_are_found(tmp_path: Path) -> None:
    left = "import torch\nTensor = torch.Tensor\nclass Call: ...\nRow = tuple[int, ...]\nT = TypeVar('T')\n"
    right = (
        "from torch import Tensor as T\nTensor = torch.Tensor\nCall = tuple[int]\nRow = tuple[int, ...]\n_Own = int\n"
    )
    modules = planted(tmp_path, left=left, right=right, top="class _Own: ...\n")
    assert structure.shared_names(modules) == {"Call": ["left", "right"]}
    assert structure.shared_aliases(modules) == {"torch.Tensor": ["left", "right"]}


def test_rows_of_a_table_that_were_wrapped_as_prose_are_found(tmp_path: Path) -> None:
    row = "    forwarders      they tell all owners, and a release reaches"
    rest = "                    only this GPU"
    broken = f'"""Title.\n\n{row}\n    only\n{rest}\n"""\n'
    whole = f'"""Title.\n\n{row}\n{rest}\n    pullers         sum\n\nArgs:\n    x: more\n        of it\n"""\n'
    modules = planted(tmp_path, left=broken, right=whole)
    assert [structure.broken_tables(module) for module in modules.values()] == [[4], []]


def test_lines_of_code_are_counted(tmp_path: Path) -> None:
    """Strings that are not docstrings count with all their lines, and so does a statement of several lines."""
    text = '"""Title.\n\nMore.\n"""\n# why\n\ndef f(\n    a,  # what\n):\n    """Do."""\n    return """x\n\ny"""\n'
    assert structure.code_lines(text) == 6
    (tmp_path / "src" / "weft").mkdir(parents=True)
    (tmp_path / "src" / "weft" / "f.py").write_text(text)
    assert structure.code_lines_by_directory(tmp_path) == {"src": 6, "examples": 0, "bench": 0}
