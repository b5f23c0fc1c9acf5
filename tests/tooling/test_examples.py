"""The examples give right results under many schedules, the emulator finds a bug planted in the first example under
every schedule, and docs/writing-kernels.md shows the examples unchanged."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

import weft
from tests.gates import covered, some
from weft import Deadlock, MemoryFault, Mismatch, Race, SignalError, check
from weft.emulator.ran import Ran, Variant

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FIRST = EXAMPLES / "all_gather_rowwise.py"
APART = {
    "launch",
    "hf_generate",
    "hf_serve",
    "lightning_tp",
    "two_nodes",
    "vllm_serve",
}  # examples that also need other packages: tests/integrations and tests/emulated/test_nodes.py run them
NAMES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - APART)


def emulate(path: Path, ranks: int, seed: int) -> None:
    """Run the file as `weft check` does."""
    weft.spmd(check.load(str(path)), ranks, backend="emulated", seed=seed)


# -- correct examples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", some(range(6)))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_example(name: str, ranks: int, seed: int) -> None:
    emulate(EXAMPLES / f"{name}.py", ranks, seed)


@pytest.mark.parametrize("name", some(NAMES, 3))
def test_example_on_other_numbers_of_ranks(name: str) -> None:
    for ranks, seed in ((1, 0), (3, 1), (3, 2), (5, 3))[: 3 if name == "tp_mlp" else 4]:  # not divisible by 5
        emulate(EXAMPLES / f"{name}.py", ranks, seed)


# test_example tests the examples' output, and one function prints the usage of all examples that run without arguments.
@covered("(?!all_gather_rowwise).*", covering="[all_gather_rowwise]")
@pytest.mark.parametrize("name", some([name for name in NAMES if name != "own_op"], 3))  # own_op is no script
def test_an_example_prints_its_result_or_its_usage(name: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key != "RANK"}
        command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    done = run("--emulated")
    assert done.returncode == 0, done.stderr
    assert re.search(r": right on \d emulated ranks$", done.stdout.strip())
    asked = run()
    assert asked.returncode == 1 and "--emulated" in asked.stderr and "torchrun" in asked.stderr


def test_the_first_example_is_short() -> None:
    assert len(FIRST.read_text().splitlines()) < 60


# -- planted bugs ------------------------------------------------------------------------------------------------------

WAIT = "        wl.consumer_tile_wait(ch, tile)\n"
PLACE = "gathered.peers[peer][n % 2, row : row + CHUNK], shard[lo : lo + CHUNK]"
COPY = f"                wl.rank_copy_data(world, {PLACE}, on)\n"
NOTIFY = "                wl.rank_notify(world, ch, row // CHUNK, peer, call, on)\n"
JOIN = "        world.wait_event(stream, world.record(copies))\n"
FORK = "        world.wait_event(copies, world.record(stream))\n"
STORE = "        tl.store(out + offsets"
BUGS: dict[str, tuple[str, str, Any, str]] = {  # the replaced text, its replacement, the error and its message
    "no wait": (WAIT, "", Race, r"race on gathered\["),
    "signal before copy": (COPY + NOTIFY, NOTIFY + COPY, Race, r"race on gathered\["),
    "one half only": ("n % 2", "0", Race, r"race on gathered\["),
    "one signal a shard": (NOTIFY, NOTIFY[4:], Deadlock, r"rms_norm\[\d+\] waits? for .*, tiles? \d+.*, peer \d"),
    "too many arrivals": ("CHUNK, arrivals=1", "CHUNK, arrivals=2", Deadlock, r">= 2, now 1, tiles 0, 1, peer 0"),
    "other arrivals": ("mapping, arrivals=1", "mapping, arrivals=2", SignalError, r"lost signal: .* not 8 \(4 calls"),
    "no event before the copies": (FORK, "", Race, r"signal at "),
    "no event after the copies": (JOIN, "", Race, r"signal at "),
    "a row too far": ("(row + tl", "(row + 1 + tl", (Race, MemoryFault), r"(gathered|out|x)\["),
    "output read": (STORE, f"        tl.load(out + offsets)\n{STORE}", MemoryFault, r"read of out\["),
}


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[str], Path]:
    def write(bug: str) -> Path:
        old, new = BUGS[bug][:2]
        source = FIRST.read_text()
        assert old in source
        path = tmp_path / f"{bug.replace(' ', '_')}.py"
        path.write_text(source.replace(old, new))
        return path

    return write


@pytest.mark.parametrize("seed", some(range(4)))
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str, seed: int, planted: Callable[[str], Path]) -> None:
    with pytest.raises(BUGS[bug][2], match=BUGS[bug][3]):
        emulate(planted(bug), 2, seed)


def test_call_that_is_not_ended_is_found(tmp_path: Path) -> None:
    """Later waits end too early. The emulator reports a race or, if the copies still come first, calls that were not
    counted. If the host compares before the late copy, the comparison reads an old row."""
    path = tmp_path / "not_ended.py"
    path.write_text(FIRST.read_text().replace("    wl.end_call(ch, epoch, tl.num_programs(0))\n", ""))
    kinds = []
    for seed in range(4):
        with pytest.raises((Race, SignalError, AssertionError)) as raised:
            emulate(path, 2, seed)
        kinds.append(raised.type)
    assert sum(issubclass(kind, (Race, SignalError)) for kind in kinds) >= 3, kinds


# -- compiled kernels --------------------------------------------------------------------------------------------------


def variants(path: Path, ranks: int) -> tuple[Ran, list[Variant]]:
    """Return the launches that occur when the file is run."""
    result = check.search(check.load(str(path)), ranks, range(1))
    assert not result.findings
    return result.ran, list(result.ran.variants.values())


@pytest.mark.parametrize("name", ["all_gather_rowwise", "all_to_all_table", "gemm_ring_reduce_scatter"])
def test_kernel_compiles_and_waits_before_it_loads(name: str) -> None:
    _, (launched,) = variants(EXAMPLES / f"{name}.py", 2)
    ptx = check.compile_kernel(launched.kernel, launched.args, launched.options).ptx
    body = ptx[ptx.index("ld.acquire.sys") :]
    assert body.index("ld.acquire.sys") < body.index("fence.proxy.async") < body.index("atom.global.gpu.acq_rel")
    if name == "all_gather_rowwise":
        assert "ld.global.v" in body and "ld.global.v" not in ptx[: ptx.index("ld.acquire.sys")]


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_examples_break_no_rule(name: str) -> None:
    checked, refused = check.compile_and_check(variants(EXAMPLES / f"{name}.py", 3)[0], 90)
    assert checked and refused == [] and [one.problems for one in checked] == [[]] * len(checked)


# -- docs/writing-kernels.md -------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "writing-kernels.md").read_text()
BLOCKS = re.findall(r"(?:<!-- (.*?) -->\n)?```(\w*)\n(.*?)```", PAGE, re.S)


def test_the_page_quotes_the_examples() -> None:
    quoted = [(mark, code) for mark, language, code in BLOCKS if language == "python"]
    unmarked = [code for mark, code in quoted if not mark]
    others = [(mark, code) for mark, code in quoted if mark.startswith(("examples/", "src/"))]
    assert len(unmarked) == 3 and len(others) == 1
    for name, code in [*((f"examples/{FIRST.name}", code) for code in unmarked), *others]:
        assert code in (ROOT / name).read_text(), code


@pytest.mark.parametrize(
    "old, new, error, says",
    [
        ("        wl.consumer_tile_wait(ch, tile)\n", "", Race, r"race on received\[.*: read after write"),
        ("(tl.load(epoch) & 1) * half", "0 * half", Race, r"race on received\["),
        ("range(0, MAX_ROWS, rows)", "range(0, count, rows)", Mismatch, r"exchange_silu .* SENDS=\d+ GETS=\d+; rank 1"),
    ],
    ids=["no wait", "one half only", "no empty tiles"],
)
def test_a_bug_in_the_all_to_all_is_found(old: str, new: str, error: Any, says: str, tmp_path: Path) -> None:
    source = (EXAMPLES / "all_to_all_table.py").read_text()
    assert old in source
    (tmp_path / "wrong.py").write_text(source.replace(old, new))
    with pytest.raises(error, match=says):
        emulate(tmp_path / "wrong.py", 3, 0)


def test_the_tables_on_the_page() -> None:
    (code,) = (code for mark, _, code in BLOCKS if mark == "uneven")

    def rank(world: weft.World) -> int:
        names: dict[str, Any] = {"world": world, "wl": weft.lang, "torch": torch}
        exec(code, names)
        return names["ch"].mapping.row_hi[-1].item()

    assert weft.spmd(rank, 3, backend="emulated") == [5 + 9 + 1] * 3


@pytest.mark.parametrize("seed", some(range(6)))
def test_the_kernel_on_the_page_runs(seed: int, tmp_path: Path) -> None:
    (code,) = (code for mark, _, code in BLOCKS if mark == "runs")
    (tmp_path / "page.py").write_text(code)
    emulate(tmp_path / "page.py", 3, seed)


def test_nothing_is_wrong_with_the_kernel_on_the_page(tmp_path: Path) -> None:
    (code,) = (code for mark, _, code in BLOCKS if mark == "runs")
    (tmp_path / "page.py").write_text(code)
    (one,), refused = check.compile_and_check(variants(tmp_path / "page.py", 3)[0], 90)
    assert (one.problems, refused) == ([], [])


def test_the_page_shows_the_report_on_compiled_code() -> None:
    (shown,) = (text.removeprefix("compiled ") for mark, _, text in BLOCKS if mark == "compiled")
    ran, _ = variants(FIRST, 2)
    ran.add(variants(FIRST, 3)[0])
    checked, _ = check.compile_and_check(ran, 90)
    figure = r"\d+(?= reg| bytes of)"
    assert re.sub(figure, "#", shown.strip()) == re.sub(figure, "#", str(checked[0]))


OUTPUTS = [(mark.partition(": ")[2], text) for mark, _, text in BLOCKS if mark.startswith("output of weft check: ")]


def shape(line: str) -> str:
    """Return a line of a report without the parts that depend on the schedule or on line numbers in weft's source; the
    example's line number remains."""
    line, place = line.partition(" at ")[0], re.search(r"(\S*)\.py:(\d+)", line)
    in_example = f" at line {place[2]}" if place and "weft/" not in place[1] else ""
    return re.sub(r"\d+", "#", re.sub(r"stream \w+", "stream S", line)) + in_example


@pytest.mark.parametrize("bug, shown", OUTPUTS, ids=[bug for bug, _ in OUTPUTS])
def test_the_page_shows_the_report_of_weft_check(bug: str, shown: str, planted: Callable[[str], Path]) -> None:
    with pytest.raises(BUGS[bug][2]) as caught:
        emulate(planted(bug), 2, 0)
    headline, *lines = (line for line in shown.splitlines() if not line.startswith("The same again"))
    assert headline == f"{type(caught.value).__name__} with 2 ranks, seed 0:"
    assert list(map(shape, lines)) == list(map(shape, str(caught.value).splitlines()[: len(lines)]))


def test_the_page_prints_the_signatures_of_the_primitives() -> None:
    reference = PAGE[PAGE.index("## Reference: primitives") : PAGE.index("## Reference: the World")]
    shown = re.findall(r"`(\w+)\(([^`]*)\)`", "".join(re.findall(r"^\| (`.*?) \|", reference, re.M)))
    assert len(shown) > 25
    for name, signature in shown:
        fn = getattr(weft.lang, name)
        parameters = inspect.signature(getattr(fn, "fn", fn)).parameters.values()
        real = [p.name if p.default is p.empty else f"{p.name}={_default(p.default)}" for p in parameters]
        assert signature.replace("ch.mapping", "m").replace('"', "'") == ", ".join(real), name


def _default(value: Any) -> str:
    return repr(value.value if isinstance(value, tl.constexpr) else value)


def test_weft_or_an_extra_installs_the_imports_of_examples() -> None:
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [
        requirement for extra in project["optional-dependencies"].values() for requirement in extra
    ]
    packages = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in wanted}
    for example in EXAMPLES.glob("*.py"):
        imported = {name.split(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", example.read_text(), re.M)}
        assert imported - packages - sys.stdlib_module_names <= {"weft", "vllm"}, example.name  # vllm loads weft
