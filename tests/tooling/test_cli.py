"""The `weft` command is tested as a user runs it: its exit codes, its output, and its reports of broken kernels."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.table import Table
from typer.testing import CliRunner, Result

import weft as package
from tests.gates import some
from weft import doctor
from weft.architectures import Features
from weft.check import offline
from weft.cli import app
from weft.demo import DemoResult

no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="says what happens without a GPU")

KERNEL = """
import torch
import triton.language as tl
import weft
import weft.lang as wl


@weft.jit
def shift(x, boxes, out, turn, ch, N: tl.constexpr):
    \"\"\"Every rank's x [N] goes to the next rank's out [N].\"\"\"
    me = wl.rank_of(ch)
    at = tl.arange(0, N)
    wl.tile_push_data(boxes, (me + 1) % ch.world, at, tl.load(x + at), at < N)
    wl.peer_tile_notify(ch, 0, (me + 1) % ch.world)
    wl.peer_tile_wait(ch, 0, (me + ch.world - 1) % ch.world)
    tl.store(out + at, wl.tile_pull_data(boxes, me, at, at < N, tl.float32))
    wl.end_call(ch, turn, 1)


def main(world):
    x = torch.full((16,), float(world.rank))
    box = world.symmetric((16,), torch.float32)
    out = world.empty((16,), torch.float32)
    args = dict(x=x, boxes=box.addresses, out=out, ch=world.channel("shift", 1, None), N=16)
    args["turn"] = world.zeros((1,), torch.int32)
    world.launch(shift, 1, args, {}, world.current_stream())
    world.synchronize()
    assert (out == (world.rank - 1) % world.size).all(), f"rank {world.rank} got {out}"
"""


def weft(*arguments: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def kernel(tmp_path: Path):
    """Write the kernel with a part of its text replaced, and return its path."""

    def write(old: str = "", new: str = "") -> Path:
        assert old in KERNEL
        path = tmp_path / "kernel.py"
        path.write_text(KERNEL.replace(old, new) if old else KERNEL)
        return path

    return write


@no_gpu
def test_doctor_names_the_backend_and_the_reason() -> None:
    result = weft("doctor")
    assert result.exit_code == 0
    assert "emulated" in result.output and torch.__version__ in result.output and "CPU" in result.output
    assert "cuBLAS" not in result.output, "no GPU calls it"


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\t0-31\t0
GPU1\tNV18\t X \tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \t32-63\t1

Legend:
  X    = Self
"""


@pytest.mark.parametrize(("blind", "access"), [((), "every pair"), ((1, 2), "not between 1 and 2")])
def test_doctor_reads_links_and_peer_access(
    monkeypatch: pytest.MonkeyPatch, blind: tuple[int, ...], access: str
) -> None:
    monkeypatch.setattr(doctor, "_ask", lambda *command: TOPOLOGY)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) != blind)
    lines = dict(doctor._links(3))
    assert lines == {"kind": "PCIe across sockets (2 pairs); NVLink, 18 links (1 pairs)", "peer access": access}


@no_gpu
def test_bench_reports_that_it_needs_gpus() -> None:
    result = weft("bench")
    assert result.exit_code == 1 and "needs at least 2 GPUs" in result.output


def test_report_outside_a_clone_fails_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = weft("bench", "--report")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "bench/pages/pages.py is not here: run this in a clone of weft" in result.output
    assert not any(tmp_path.rglob("*"))


WITHOUT_GREENLET = """
import sys
from importlib import metadata

version = metadata.version
metadata.version = lambda name: version("no such package" if name == "greenlet" else name)
sys.modules["greenlet"] = None  # an import of it fails
from weft.cli import app
from weft.demo import DemoResult

app(sys.argv[1:])
"""


@pytest.mark.parametrize("command", some(["doctor --quick", "check nowhere.py", "trace", "demo"]))
@no_gpu
def test_without_greenlet_it_names_the_package_to_install(command: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_GREENLET, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    output = " ".join(run.stdout.split())
    assert "the emulator needs greenlet, which is not installed: pip install greenlet" in output, (
        run.stdout + run.stderr
    )
    assert "Traceback" not in run.stderr
    if command.startswith("doctor"):
        assert run.returncode == 0 and "greenlet not installed" in output and "weft will use nothing: " in output
    else:
        assert run.returncode == 1


def test_check_passes_a_good_kernel(kernel) -> None:
    result = weft("check", kernel(), "--seeds", 3)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.partition(" seeds")[0] for line in lines[:3]] == [f"clean with {n} ranks: 3" for n in (2, 3, 4)]
    figures = r"\d+ registers, 0 bytes spilled, \d+ bytes of shared memory"
    for size, line in zip((2, 3, 4), lines[3:], strict=True):
        assert re.fullmatch(rf"compiled shift \(ch.world = {size}\): {figures}", line), result.output


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("    wl.peer_tile_wait(ch, 0, (me + ch.world - 1) % ch.world)\n", "", "Race"),
        ("    wl.peer_tile_notify(ch, 0, (me + 1) % ch.world)\n", "", "Deadlock"),
        ("(world.rank - 1)", "(world.rank + 1)", "AssertionError"),
    ],
    ids=["no wait", "no notify", "wrong result"],
)
def test_check_finds_broken_kernels(kernel, old: str, new: str, says: str) -> None:
    path = kernel(old, new)
    result = weft("check", path, "--seeds", 20, "--world", 3)
    assert result.exit_code == 1, result.output
    assert f"{says} with 3 ranks, seed " in result.output
    again = result.output.split("The same again: weft ")[1].split()
    repeated = weft(*again)
    assert (
        repeated.exit_code == 1 and f"{says} with 3 ranks, seed {again[again.index('--seed') + 1]}:" in repeated.output
    )


START = "    me = wl.rank_of(ch)\n"
HELPER = "@weft.jit\ndef helper(me):\n    if me == 0:\n        v = 0\n    else:\n        v = 0.5\n    return v\n\n\n"
REFUSED = {  # code after START of the kernel, or before it; the line that the error names, and the error's message
    "break": ("    for i in range(3):\n        if i == 1:\n            break\n", 3, "unsupported AST node type: Break"),
    "comprehension": ("    parts = [tl.load(x + i) for i in range(2)]\n", 1, "only tuple comprehensions are supported"),
    "two types": ("    if me == 0:\n        v = 0\n    else:\n        v = 0.5\n", 1, "Mismatched type for v"),
    "in a function": (HELPER, 3, "Mismatched type for v between then block (int32) and else block (fp32)"),
}


@pytest.mark.parametrize("construct", REFUSED)
def test_check_fails_on_kernels_that_triton_refuses(kernel, construct: str) -> None:
    """Python accepts these kernels, and so does the emulator."""
    code, line, says = REFUSED[construct]
    path = kernel("@weft.jit\n", code + "@weft.jit\n") if code == HELPER else kernel(START, START + code)
    if code == HELPER:
        path.write_text(path.read_text().replace(START, START + "    helper(me)\n"))
    line += path.read_text()[: path.read_text().index(code)].count("\n")
    result = weft("check", path, "--seeds", 1)
    assert result.exit_code == 1 and result.output.count("clean with") == 3
    assert result.output.count("does not compile") == 1, "the fault must be reported once, not for every World"
    assert f"shift does not compile: {path}:{line}: {says}" in result.output
    assert weft("check", path, "--seeds", 1, "--world", 2, "--no-compile").exit_code == 0


def test_check_fails_on_kernels_that_do_not_fit(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "features", lambda capability: Features("", shared_kib=0))
    result = weft("check", kernel(), "--seeds", 1, "--world", 2)
    assert result.exit_code == 1 and re.search(r"a program needs \d+ bytes of shared memory, of 0", result.output)


def test_check_compiles_for_the_target(kernel) -> None:
    unknown = weft("check", kernel(), "--target", "gfx942")
    assert unknown.exit_code == 1 and "gfx942: no GPU that weft compiles for" in unknown.output
    result = weft("check", kernel(), "--seeds", 1, "--world", 2, "--target", "sm_100a")
    assert result.exit_code == 0 and "compiled shift: " in result.output


def test_check_names_a_missing_file_and_function(kernel) -> None:
    missing = weft("check", "nowhere.py")
    assert missing.exit_code == 1 and "nowhere.py: no such file" in missing.output
    assert "a folder, not a Python file" in weft("check", Path(kernel()).parent).output
    result = weft("check", f"{kernel()}:other")
    assert result.exit_code == 1 and "defines no function other(world)" in result.output
    assert "FILE:FUNCTION" in result.output


def test_check_names_the_line_where_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import weft\n\nraise ValueError('no such thing')\n")
    failed = weft("check", tmp_path / "broken.py")
    assert failed.exit_code == 1 and "broken.py:3: ValueError: no such thing" in " ".join(failed.output.split())


def test_check_fails_without_a_kernel_run(tmp_path: Path) -> None:
    """Cases: a file or a rank that ends the process, functions that only create a coroutine, and a file without a
    kernel."""
    for text, says in (
        ("import sys\n\nsys.exit(0)\n", "file.py:3: SystemExit: 0"),
        ("import sys\ndef main(world):\n    assert world.rank != 1 or sys.exit(0)\n", "rank 1 ended by sys.exit(0)"),
        ("async def main(world):\n    raise ValueError\n", "main is async or a generator"),
        ("def main(world):\n    yield\n", "main is async or a generator"),
        ("def main(world):\n    world.exchange(1)\n", "launches no kernel, so there was nothing to check"),
    ):
        (tmp_path / "file.py").write_text(text)
        result = weft("check", tmp_path / "file.py", "--seeds", 2)
        assert result.exit_code == 1 and says in " ".join(result.output.split()), (text, result.output)
        assert "clean" not in result.output


@no_gpu
@pytest.mark.parametrize("command", ["check", "trace"])
def test_a_tensor_on_cuda_in_main_is_explained(command: str, tmp_path: Path) -> None:
    """The line follows torch's message alone, not other errors."""
    path = tmp_path / "gpu.py"
    for body, lines in (("torch.zeros(4, device='cuda')", 1), ("1 / 0", 0)):
        path.write_text(f"import torch\n\n\ndef main(world):\n    {body}\n")
        result = weft(command, path, "--world", 2)
        assert result.exit_code == 1 and result.output.count("with device=world.device") == lines, result.output


@pytest.mark.parametrize("end", ["os._exit(0)", "os.execlp('true', 'true')"])
def test_check_does_not_pass_a_file_that_ends_the_process(tmp_path: Path, end: str) -> None:
    path = tmp_path / "file.py"
    path.write_text(f"import os\n{end}\n")
    done = subprocess.run([sys.executable, "-m", "weft.cli", "check", str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "before the command did" in done.stdout, done


def test_check_hands_its_own_status_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "weft.cli", "check"], capture_output=True, text=True)
    assert done.returncode == 2 and "Missing argument" in done.stderr and not done.stdout, done


def test_check_leaves_its_arguments_to_itself(kernel) -> None:
    path = kernel("import torch\n", "import argparse\nimport torch\nargparse.ArgumentParser().parse_args()\n")
    before = list(sys.argv)
    sys.argv[1:] = ["check", str(path), "--seeds", "1"]
    try:
        assert weft("check", path, "--seeds", 1, "--world", 2).exit_code == 0
        assert sys.argv[1] == "check"
    finally:
        sys.argv[:] = before


def test_the_command_that_check_prints_repeats_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "a [red]b[green].py"
    path.write_text("def main(world):\n    raise ValueError('no [red]')\n")
    result = weft("check", path, "--world", 2)
    again = shlex.split(result.output.split("The same again: weft ")[1])
    assert again[:2] == ["check", str(path)] and "no [red]" in result.output
    assert weft(*again).output == result.output


def test_trace_reports_errors(kernel, tmp_path: Path) -> None:
    quiet = tmp_path / "quiet.py"
    quiet.write_text("def main(world):\n    pass\n")
    for arguments, says in (
        ((quiet, "--out", tmp_path / "t"), "quiet.py launches nothing, so there is nothing to draw"),
        (
            (kernel("(world.rank - 1)", "(world.rank + 1)"), "--world", 3, "--out", tmp_path / "t"),
            "AssertionError: rank",
        ),
        ((quiet, "--out", tmp_path / "none" / "t"), "none: no such folder"),
    ):
        result = weft("trace", *arguments)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert says in " ".join(result.output.split()), result.output


@pytest.mark.parametrize(
    ("old", "new", "says", "drawn"),
    [
        ("    wl.peer_tile_wait(ch, 0, (me + ch.world - 1) % ch.world)\n", "", "Race", "compute"),
        ("    wl.peer_tile_notify(ch, 0, (me + 1) % ch.world)\n", "", "Deadlock", "wait"),
        ("(world.rank - 1)", "(world.rank + 1)", "AssertionError", "compute"),
    ],
    ids=["race", "deadlock", "wrong result"],
)
def test_trace_draws_up_to_the_failure(kernel, tmp_path: Path, old: str, new: str, says: str, drawn: str) -> None:
    """The trace contains the completed spans, and the spans that the failure interrupted."""
    result = weft("trace", kernel(old, new), "--world", 3, "--out", tmp_path / "t")
    assert result.exit_code == 1 and f"{says}: " in result.output, result.output
    slices = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert drawn in {e["cat"] for e in slices if e["name"] == "shift"}
    in_vain = [e["args"]["detail"] for e in slices if e["cat"] == "wait" and "in vain" in e["args"]["detail"]]
    assert all(re.match(r"channel 0 of shift of rank \d", detail) for detail in in_vain)
    assert len(in_vain) == (3 if says == "Deadlock" else len(in_vain))
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("out", "base"), [("run.v1", "run.v1"), ("run.v1.png", "run.v1"), ("t.json", "t")])
def test_trace_adds_to_the_path(kernel, tmp_path: Path, out: str, base: str) -> None:
    assert weft("trace", kernel(), "--world", 2, "--out", tmp_path / out).exit_code == 0
    assert {p.name for p in tmp_path.iterdir()} >= {f"{base}.json", f"{base}.png"}


def test_demo_asks_for_its_folder_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.demo.run", lambda picture, bar: pytest.fail("ran"))
    result = weft("demo", "--out", tmp_path / "none" / "demo.png")
    assert result.exit_code == 1 and "no such folder" in result.output


@pytest.mark.parametrize(("name", "reason"), [("demo.xyz", ".xyz is not a format of pictures"), (".", "is a folder")])
def test_demo_refuses_a_file_that_cannot_be_a_picture_before_it_runs(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.demo.run", lambda picture, bar: pytest.fail("ran"))
    result = weft("demo", "--out", tmp_path / name)
    assert result.exit_code == 1 and reason in result.output


@pytest.mark.parametrize(("name", "written"), [("demo", "demo.png"), ("demo.svg", "demo.svg")])
def test_demo_names_the_file_that_it_writes(
    name: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """matplotlib appends a suffix to a name without one."""
    monkeypatch.setattr("weft.demo.run", lambda picture, bar: DemoResult(Table(), [picture.name]))
    result = weft("demo", "--out", tmp_path / name)
    assert result.exit_code == 0 and result.output.splitlines()[-1] == written


def test_a_hanging_tool_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*a: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 60)

    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor._ask("nvidia-smi") == ""


def test_bench_without_arguments_prints_usage() -> None:
    result = weft("bench")
    assert result.exit_code == 1 and "weft bench --out DIR [--ops ..]" in result.output


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["check", "--help"]])
def test_commands_that_need_no_torch_do_not_import_it(arguments: list[str]) -> None:
    """Importing torch takes seconds."""
    code = "import sys; from weft.cli import app; app(standalone_mode=False); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "False", run.stdout + run.stderr


def test_public_names_are_there_at_their_first_use() -> None:
    code = """
import weft, sys
assert "torch" not in sys.modules and "spmd" in dir(weft)
from weft.planner import table
from weft.op import REGISTRY
assert set(weft.__all__) - set(vars(weft)) == {"hf", "parallel"} and "matmul_all_reduce" in REGISTRY
assert not {"weft.hf", "weft.parallel", "torch.distributed.tensor._api"} & set(sys.modules)
from weft import *
print(World is weft.World and hf is weft.hf and parallel is sys.modules["weft.parallel"], weft.torch.__name__, hasattr(weft, "nonsense"))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "True weft.torch False\n", run.stdout + run.stderr


def test_a_bound_that_is_no_time_is_refused_by_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TIMEOUT", "abc")
    for command in (["doctor", "--quick"], ["check", "file.py"]):
        result = weft(*command)
        assert result.exit_code == 1 and "WEFT_TIMEOUT='abc' must be a number of seconds" in result.output


@pytest.mark.parametrize("command", ["check", "trace"])
def test_help_names_both_forms_of_main(command: str) -> None:
    output = weft(command, "--help").output
    assert "main(world), or main(rank, world_size)" in output and "[[" not in output


@pytest.mark.parametrize("command", ["check --seeds 1 --no-compile", "trace"])
def test_check_and_trace_accept_ranks_for_world(kernel, command: str) -> None:
    name, *options = command.split()
    result = weft(name, kernel(), *options, "--ranks", "2")
    assert result.exit_code == 0 and "rank 2:" not in result.output and "with 3 ranks" not in result.output


def test_trace_leaves_no_file_unasked(kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kernel()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = weft("trace", path, "--world", 2)
    assert result.exit_code == 0 and not any((tmp_path / "empty").iterdir())
    assert re.match(r"rank 0: its programs compute for \d+ and wait for \d+\nrank 1: ", result.output), result.output


def test_version() -> None:
    result = weft("--version")
    assert result.exit_code == 0 and result.output.strip() == metadata.version("weft") == package.__version__


def test_trace_writes_json_and_picture(kernel, tmp_path: Path) -> None:
    result = weft("trace", kernel(), "--world", 2, "--out", tmp_path / "t")
    assert result.exit_code == 0, result.output
    names = {e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert "shift" in names
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@no_gpu
def test_demo_is_correct_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.demo.SCHEDULES", 1)
    result = weft("demo", "--out", tmp_path / "demo.png")
    assert result.exit_code == 0, result.output
    for plan in ("sequential", "decomposed", "fused"):
        assert re.search(rf"│ {plan} +│ \w+ +│ +1 │ +0 │ +0 │ +\d", result.output), result.output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@no_gpu
def test_demo_fails_where_the_result_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.demo.SCHEDULES", 1)
    monkeypatch.setattr("weft.demo.DemoLayer.partial", lambda self, x: x)
    result = weft("demo", "--out", tmp_path / "demo.png")
    assert result.exit_code == 1 and result.output.count("wrong") == 3


def test_doctor_names_the_missing_compiler_of_tritons_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slim container, for example, has no compiler."""
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    missing = f"no gcc or clang (apt install gcc), no {tmp_path}/Python.h (apt install python3-dev)"
    assert dict(doctor._versions())["C compiler, Python's headers"] == missing
    assert doctor._verdict(2) == ("nothing", f"Triton cannot build its stub of the driver: {missing}")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor._lacks_for_stub() is None


def test_doctor_names_the_library_that_computes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._attention() == [("library", "plain: float32 arithmetic of torch, to try things")]
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)

    def library_errors(use: str, *_: object) -> dict:
        from weft.ops.attention.libraries import CUDNN, FLASH

        if use.startswith("packed"):
            raise RuntimeError("no memory\nat all")
        return {CUDNN: "" if use == "forward" else "refuses", FLASH: ""}

    monkeypatch.setattr(doctor.libraries, "library_errors", library_errors)
    libraries = dict(doctor._attention())
    neither = "none; cudnn: no memory; flash: no memory"
    assert libraries == dict(forward="cudnn", backward="flash; cudnn: refuses", packed=neither, packed_backward=neither)


def test_doctor_offers_to_share_one_gpu() -> None:
    backend, why = doctor._verdict(1)
    assert backend == "cuda" and 'backend="shared"' in why and "WEFT_SHARE_GPU=1" in why


@no_gpu
@pytest.mark.parametrize("call", ["explain matmul_all_reduce 8 4096 4096", "simulate mlp 8192,8192,28672"])
def test_without_a_gpu_the_planner_names_the_option_for_a_profile(call: str) -> None:
    result = weft(*call.split())
    assert result.exit_code == 1 and "nvidia-h200-x4; --profile names a profile" in " ".join(result.output.split())


def test_explain_and_simulate() -> None:
    """A measured size is printed with its time; a size, op or machine that does not exist is refused."""
    scatter = ("explain", "matmul_reduce_scatter", "8192", "4096", "3584", "--profile", "nvidia-h200-x4")
    result = weft(*scatter)
    assert result.exit_code == 0
    assert "in a CUDA graph: fused (pull_programs=64)\n  measured: 367.0 us, 1.47x as fast" in result.stdout
    assert ", eager: " in weft(*scatter, "--eager").stdout
    layer = ("simulate", "mlp", "8192,8192,28672", "4096,4096,14336", "--profile", "nvidia-h200-x4")
    result = weft(*layer, "--gpus", "16")
    assert result.exit_code == 0 and result.stdout.startswith("mlp on 16 GPUs, nodes of 8, 50 GB/s a GPU")
    assert [line.split("  ")[1].strip() for line in result.stdout.splitlines()[2:]] == list(
        ("8192 x 8192 x 28672", "4096 x 4096 x 14336")
    )
    for arguments, says in (
        ((*scatter[:2], "0", *scatter[3:]), "M 0"),
        (("explain", "nothing", *scatter[2:]), "not 'nothing'"),
        ((*scatter[:-1], "nvidia-h900"), "nvidia-h900 is neither a file nor a profile"),
        (("simulate", "mlp", "8192,8192", *layer[4:]), "8192,8192: a size is three whole numbers"),
        ((*layer, "--gpus", "12"), "12 GPUs are not whole nodes of 8"),
    ):
        result = weft(*arguments)
        assert result.exit_code == 1 and says in result.stdout, result.stdout
