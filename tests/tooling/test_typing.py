"""Types as a user's type checker reads them: the package declares that it is typed and passes `mypy --strict`; no op
returns Any, and mypy refuses an impossible call."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_overloads, get_type_hints

import pytest

import weft
from weft.world import World

PACKAGE = Path(weft.__file__).parent
ROOT = Path(__file__).parents[2]

CONFIG = """
[mypy]
strict = True
follow_imports = silent

[mypy-triton.*]
ignore_missing_imports = True

# Nothing of these is looked at below, and reading them takes longer than all the rest.
[mypy-torch.*,sympy.*,networkx.*,matplotlib.*,rich.*,typer.*]
follow_imports = skip

[mypy-torch,torch._tensor,torch._C.*,torch.types]
follow_imports = silent
"""

USER = """
from typing import assert_type

import torch
import triton.language as tl

import weft
import weft.lang as wl
from weft import Remap


@weft.jit
def double(x, out, ch, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))
    wl.end_call(ch, None, tl.num_programs(0))


@weft.jit(do_not_specialize=("rank",))
def own(out, rank):  # type: ignore[no-untyped-def]
    tl.store(out, rank)


def main(world: weft.World) -> torch.Tensor:
    x, w = world.empty((4, 8), torch.bfloat16), world.zeros((8, 8), dtype=torch.bfloat16)
    ch = world.channel("rows", 1, None, arrivals=1)
    args = dict(x=x, out=world.symmetric((4, 8), torch.bfloat16, "out").local, ch=ch, N=32)
    with world.on(world.side_stream("copy", urgent=False)):
        world.launch(double, world.sm_count, args, dict(num_warps=4), world.current_stream())
    wl.rank_notify(world, ch, 0, world.rank, world.tensor([1], torch.int32), world.current_stream())
    world.synchronize()
    assert_type(x, torch.Tensor)
    assert_type(weft.all_gather_matmul(x, w, world=world), torch.Tensor)
    assert_type(weft.all_gather_matmul_with_gathered(x, w, world=world), tuple[torch.Tensor, torch.Tensor])
    x8, w8 = (weft.quantize(t, "row", world=world) for t in (x, w))
    assert_type(weft.all_gather_matmul(x8, w8, world=world), torch.Tensor)
    assert_type(weft.all_gather_matmul_with_gathered(x8, w8, world=world), tuple[torch.Tensor, weft.ScaledTensor])
    assert_type(weft.matmul_reduce_scatter(x, w, world=world, rows=[2, 2], plan=weft.plans.FusedReduceScatter()), torch.Tensor)
    assert_type(weft.matmul_reduce_scatter_tiles(x, w, world=world), tuple[torch.Tensor, Remap | None])
    assert_type(weft.matmul_all_reduce(x, w, world=world), torch.Tensor)
    y, remap = weft.matmul_all_reduce_tiles(x, w, world=world)
    assert_type(weft.rms_norm(y, w[0], 1e-6, world=world, remap=remap), torch.Tensor)
    assert_type(weft.rms_norm(y, w[0], 1e-6, world=world, residual=x), tuple[torch.Tensor, torch.Tensor])
    assert_type(weft.all_reduce_rms_norm(x, None, w[0], world=world), tuple[torch.Tensor, torch.Tensor])
    assert_type(weft.matmul_all_to_all_routed(x, w, destinations=x, world=world), tuple[torch.Tensor, torch.Tensor])
    assert_type(weft.matmul_all_to_all(x, w, destinations=weft.route([0] * 4, world=world), world=world), torch.Tensor)
    return weft.all_reduce(weft.silu_mul(x, world=world), world=world)


assert_type(weft.spmd(main, 2, backend="emulated", seed=1), list[torch.Tensor])
"""

WRONG = {  # a line of main, and mypy's message about it
    "weft.all_reduce(x)": 'Missing named argument "world"',
    "weft.all_gather_matmul([[1.0]], w, world=world)": 'incompatible type "list[list[float]]"',
    "weft.matmul_all_reduce(x, w, world=world, plan=3)": 'incompatible type "int"; expected "str | Plan"',
    "weft.matmul_all_reduce(x, w, world=world, reorder=False)": 'incompatible type "bool"; expected "Never"',
    "weft.matmul_all_reduce_tiles(x, w, world=world, out=x)": 'Unexpected keyword argument "out"',
    "weft.rms_norm(x, 1e-6, w, world=world)": "No overload variant",
    "world.empti((4,), torch.bfloat16)": 'has no attribute "empti"',
    "world.empty(4, torch.bfloat16)": 'incompatible type "int"; expected "Sequence[int]"',
    "world.launch(double, 1, {}, {})": 'Missing positional argument "stream"',
    "world.channel('rows', 1.5, None)": 'incompatible type "float"; expected "int"',
}


@pytest.fixture(scope="module")
def mypy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return mypy's output for a file; mypy is fast after its first run."""
    folder, kept = tmp_path_factory.mktemp("user"), request.config.cache.mkdir("mypy")
    (folder / "mypy.ini").write_text(CONFIG)

    def check(text: str) -> str:
        (folder / "user.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(kept), "user.py"]
        run = subprocess.run(
            command, cwd=folder, env=os.environ | {"MYPYPATH": str(PACKAGE.parent)}, capture_output=True, text=True
        )
        assert run.returncode in (0, 1), run.stdout + run.stderr
        return run.stdout

    return check


def test_a_users_file_passes(mypy: Callable[[str], str]) -> None:
    assert mypy(USER).startswith("Success")


def test_impossible_calls_are_refused(mypy: Callable[[str], str]) -> None:
    last = "    return weft.all_reduce("
    output = mypy(USER.replace(last, "".join(f"    {line}\n" for line in WRONG) + last))
    first_line = USER[: USER.index(last)].count("\n") + 1
    for number, (line, says) in enumerate(WRONG.items(), first_line):
        errors = re.findall(rf"^user.py:{number}: error: (.*)$", output, re.M)
        assert any(says in text for text in errors), (line, errors)
    assert len(set(re.findall(r"^user.py:(\d+): error", output, re.M))) == len(WRONG), output


def test_the_package_declares_that_it_is_typed() -> None:
    """An empty file declares to mypy that the package is typed; the wheel contains all files of the package."""
    assert (PACKAGE / "py.typed").read_text() == ""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/weft"], "force-include": {"src/weft_pytest.py": "weft_pytest.py"}}


def returned(fn: Callable[..., Any]) -> list[Any]:
    """Return the type that the function, or each of its overloads, returns."""
    return [get_type_hints(f).get("return", Any) for f in get_overloads(fn) or [fn]]


def test_no_op_returns_any() -> None:
    public = [(name, getattr(weft, name)) for name in weft.__all__]
    functions = [(n, fn) for n, fn in public if inspect.isfunction(fn)]
    assert len(functions) >= 13
    assert not [name for name, fn in functions if Any in returned(fn)]


def test_the_worlds_methods_are_the_backends() -> None:
    def main(world: World) -> None:
        for name in ("empty", "all_reduce", "on", "record"):
            assert getattr(world, name) == getattr(world.backend, name)
        assert world.sm_count == world.backend.sm_count and world.group is None and world.nodes == (0,)

    weft.spmd(main, 1, backend="emulated")
