"""Tests of Triton's versions: the supported versions, the refusal of other versions, and the arguments of their
launchers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from typer.testing import CliRunner

import weft
from weft import WeftError, _triton
from weft.backends.launcher import Launcher
from weft.check.offline import OfflineDriver
from weft.cli import app
from weft.kernel_launch import prepared

NEWER = "3.10.0"
REFUSED = r"weft was tried with Triton 3\.6 to 3\.9, and this is 3\.10\.0: pip install 'triton>=3\.6,<3\.10'"


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0", "3.9.1+git0a1b2c3", "3.8.0.post2"])
def test_a_version_that_was_tried_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    _triton.require()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "3.10.0.dev20270101", "4.0.0"])
def test_another_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    for use in (_triton.require, _triton.interpreter, lambda: _triton.ptxas("sm_90a"), lambda: Launcher(SimpleNamespace())):  # type: ignore[arg-type]  # fmt: skip
        with pytest.raises(
            WeftError, match=f"tried with Triton 3.6 to 3.9, and this is {re.escape(version)}: pip install"
        ):
            use()


def test_an_untried_triton_is_refused_before_private_names_are_read() -> None:
    """A separate process runs this test, because a newer Triton may lack any private name, such as its whole
    interpreter."""
    script = f"""
import sys, triton
triton.__version__, sys.modules["triton.runtime.interpreter"] = "{NEWER}", None
import weft
weft.spmd(lambda world: None, 2, backend="emulated")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.fullmatch(f"weft.errors.WeftError: {REFUSED}", done.stderr.splitlines()[-1]), done.stderr


def test_commands_print_errors_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", NEWER)
    result = CliRunner().invoke(app, ["check", "kernel.py"])
    assert result.exit_code == 1 and re.fullmatch(REFUSED, result.output.strip())


def test_doctor_names_the_tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", "--quick"], terminal_width=300)
    assert re.search(
        rf"triton +{re.escape(triton.__version__)} \(tried: 3\.6 to 3\.9; on GPUs: 3\.6 and 3\.9\)", result.output
    )
    monkeypatch.setattr(triton, "__version__", NEWER)
    result = CliRunner().invoke(app, ["doctor", "--quick"], terminal_width=300)
    assert result.exit_code == 0 and re.search(f"weft will use +nothing: {REFUSED}", " ".join(result.output.split()))


def test_the_package_requires_tested_versions() -> None:
    wanted = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (oldest, past) = re.findall(r'"triton>=3\.(\d+),<3\.(\d+);', wanted)[0]
    assert _triton.TRIED == tuple((3, minor) for minor in range(int(oldest), int(past)))


# -- functions ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    word: Any
    n: Any


@weft.jit(
    do_not_specialize=("many",),
)
def everything(x_desc, out, pair, one, many, scale, out_desc, BLOCK: tl.constexpr, LAST: tl.constexpr = 3):
    x = x_desc.load([0, 0]).to(tl.float32) * scale + tl.load(pair.word) + pair.n + one + many
    out_desc.store([0, 0], x.to(out_desc.dtype))
    tl.store(out + tl.arange(0, BLOCK), LAST)


def test_the_line_of_a_function_is_that_of_its_def() -> None:
    lines, start = inspect.getsourcelines(everything.fn)
    assert lines[_triton.first_line(everything) - start].startswith("def everything(")


@weft.jit
def picked(out, LIST: tl.constexpr):
    for i in range(2):
        tl.store(out + i, LIST[i])


@weft.jit
def scaled(out, TWO: tl.constexpr):
    tl.store(out, tl.constexpr(TWO) * (tl.load(out + 1) + 3))


@weft.jit
def added(parts, out):
    tl.store(out, tl.load(parts[0]) + tl.load(parts[1]))


@weft.jit
def passed_on(box, flag, out, SEM: tl.constexpr, LIMIT: tl.constexpr):
    """The first program stores to the box, and the second loads from it once the flag is set, or after its time
    limit."""
    if tl.program_id(0) == 0:
        tl.store(box, 7)
        tl.debug_barrier()
        tl.atomic_store(flag, 1, sem=SEM)
    elif LIMIT is None:
        tl.atomic_poll(flag, 1)
        tl.store(out, tl.load(box) + tl.atomic_load(flag))
    else:
        while not tl.atomic_poll(flag, 1, timeout_ns=LIMIT):
            pass
        tl.store(out, tl.load(box) + tl.atomic_load(flag, sem="relaxed"))


def interpreted(kernel: Any, **args: Any) -> list[int]:
    def main(world: weft.World) -> list[int]:
        out = world.zeros((2,), torch.int32)
        world.launch(kernel, 1, dict(out=out, **args), {}, world.current_stream())
        world.synchronize()
        return out.tolist()

    return weft.spmd(main, 1, backend="emulated")[0]


@pytest.mark.filterwarnings("error:Conversion of an array:DeprecationWarning")  # numpy 2.4 raises an error itself
def test_a_scalar_is_a_number_to_python() -> None:
    assert interpreted(picked, LIST=(4, 5)) == [4, 5]


def test_the_product_of_a_constexpr_and_a_tensor_is_a_tensor() -> None:
    assert interpreted(scaled, TWO=2) == [6, 0]


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="Triton has it since 3.9")
@pytest.mark.parametrize("limit", [None, 1000])
def test_atomic_loads_stores_and_polls(limit: int | None) -> None:
    def passing(sem: str, seed: int) -> list[Any]:
        def main(world: weft.World) -> list[int]:
            box, flag, out = (world.zeros((1,), torch.int32) for _ in range(3))
            args = dict(box=box, flag=flag, out=out, SEM=sem, LIMIT=limit)
            world.launch(passed_on, 2, args, {}, world.current_stream())
            world.synchronize()
            return out.tolist()

        return weft.spmd(main, 1, backend="emulated", seed=seed)[0]

    assert [passing("release", seed) for seed in range(5)] == [[8]] * 5
    with pytest.raises(weft.Race):
        passing("relaxed", 0)


# -- launches ----------------------------------------------------------------------------------------------------------


class RecordedDriver(OfflineDriver):
    """A driver that launches nothing, and keeps the arguments that Triton's launcher in C would receive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.backends.nvidia import driver

        self.launched: list[tuple[Any, ...]] = []
        self.launcher_cls = driver.CudaLauncher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, binary, shared, device: (1, 0xC0DE, 32, 0, 1024),
            unload_module=lambda module: None,
            fill_tma_descriptor=lambda *geometry: ("descriptor", *geometry),
            fill_tma_descriptor_tiled=lambda *geometry: ("descriptor", *geometry),
            build_signature_metadata=tuple,
            launch=lambda *args: self.launched.append(args),
        )
        # Triton before 3.7 creates a launcher for each signature; later versions have one launcher, with annotations
        # made in C.
        source_module = SimpleNamespace(launch=self.utils.launch)
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **how: source_module, raising=False)
        monkeypatch.setattr(driver, "library_dirs", lambda: [])
        monkeypatch.setattr(driver, "PyKernelArg", lambda nested_tuple, type: (type, nested_tuple), raising=False)
        source_module.launch.__name__ = "launch"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedDriver]:
    driver = RecordedDriver(monkeypatch)
    triton.runtime.driver.set_active(driver)
    yield driver
    for kernel in (everything, added):
        for compiled in kernel.device_caches[0][0].values():
            compiled.module = None  # leaves no module for a driver to unload
        kernel.device_caches.clear()
    triton.runtime.driver.set_active(OfflineDriver())


def arguments() -> dict[str, Any]:
    x, out, word = torch.ones(64, 64, dtype=torch.float16), torch.zeros(16), torch.ones(1)
    descriptors = {name: TensorDescriptor.from_tensor(x, [32, 64]) for name in ("x_desc", "out_desc")}
    return dict(**descriptors, out=out, pair=Pair(word, 48), one=1, many=7, scale=0.5, BLOCK=16)


def plain(value: Any) -> Any:
    """Return the arguments as the C launcher reads them, without hooks that call nothing and without the hooks'
    arguments."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return None if type(value).__name__ in ("HookChain", "LazyDict") else value


def test_a_repeated_launch_passes_the_arguments_that_triton_passes(recorded: RecordedDriver) -> None:
    args = arguments()
    options = _triton.options(dict(num_warps=4, per_sm=2))
    compiled = everything[(5,)](**args, **options)
    ready = _triton.repeated(everything, compiled, 5, args)
    assert ready is not None
    ready(recorded.get_current_stream(), ())
    first_launch, repeated_launch = recorded.launched
    assert plain(first_launch) == plain(repeated_launch)
    assert repeated_launch[:5] == (5, 1, 1, 0, 0xC0DE) and (4, 1, compiled.metadata.shared) in repeated_launch
    flat = repr(plain(repeated_launch))
    assert flat.count("'descriptor'") == 2 and str(args["out"].data_ptr()) in flat


def test_a_repeated_launch_passes_current_addresses(recorded: RecordedDriver) -> None:
    """The addresses follow a descriptor, which occupies several places; the next launch passes its own addresses
    again."""
    args = arguments()
    compiled = everything[(5,)](**args, **_triton.options({}))
    ready = _triton.repeated(everything, compiled, 5, args, ["out"])
    assert ready is not None
    elsewhere = torch.zeros(16)
    for out in (elsewhere, args["out"]):
        ready(recorded.get_current_stream(), [out.data_ptr()])
    first_launch, moved_launch, repeated_launch = map(plain, recorded.launched)
    assert first_launch == repeated_launch
    assert (
        repr(moved_launch)
        == repr(first_launch).replace(str(args["out"].data_ptr()), str(elsewhere.data_ptr()))
        != repr(first_launch)
    )


def test_a_repeated_launch_keeps_its_code_loaded(recorded: RecordedDriver) -> None:
    """Since 3.8 a compiled kernel without references is unloaded from the GPU."""
    args = arguments()
    compiled = everything[(5,)](**args, **_triton.options({}))
    ready = _triton.repeated(everything, compiled, 5, args)
    assert compiled in (cell.cell_contents for cell in ready.__closure__)  # type: ignore[union-attr]


def test_a_repeated_launch_holds_no_tensor_of_a_tuple(recorded: RecordedDriver) -> None:
    """The tensors are passed by address, as Triton passes them."""
    a, b, out = torch.ones(1), torch.ones(1), torch.zeros(1)
    args = dict(parts=(a, b), out=out)
    compiled = added[(1,)](**args, **_triton.options({}))
    ready = _triton.repeated(added, compiled, 1, args)
    assert ready is not None
    ready(recorded.get_current_stream(), ())
    first_launch, repeated_launch = recorded.launched
    assert plain(first_launch) == plain(repeated_launch)
    recorded.launched.clear()
    gone = weakref.ref(a)
    del args, a, first_launch, repeated_launch
    assert gone() is None


def test_a_repeated_launch_passes_other_descriptors_and_tuples(recorded: RecordedDriver) -> None:
    """The launch passes the arguments that Triton would pass, for the new arguments and then again for the first
    arguments; an encoded descriptor is reused."""
    first_args, second_args = arguments(), arguments()
    for args in (first_args, second_args):
        everything[(5,)](**args, **_triton.options({}))
    compiled = everything[(5,)](**first_args, **_triton.options({}))
    moving = ["x_desc", "pair", "out_desc", "out"]
    ready = _triton.repeated(everything, compiled, 5, first_args, moving)
    assert ready is not None
    recorded.launched, wanted = [], recorded.launched[:2]
    for args in (first_args, second_args, first_args):
        ready(recorded.get_current_stream(), [_triton.address(moved(args[name]), fixed=False) for name in moving])
    assert [plain(args) for args in recorded.launched] == [plain(wanted[i]) for i in (0, 1, 0)]


def moved(value: Any) -> Any:
    """Return the tensor of a descriptor."""
    return value.base if isinstance(value, TensorDescriptor) else value


@pytest.fixture
def launched_here(recorded: RecordedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """Return a launcher that uses the recorded driver in place of a GPU."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(Launcher, "load", lambda *_: True)
    yield Launcher(SimpleNamespace(capability=90, device=torch.device("cuda", 0)))  # type: ignore[arg-type]


def prepared_launch(launcher: Launcher, **fixed: Any) -> weft.Launch:
    machine: Any = SimpleNamespace(run_launch=launcher.run, load=lambda *_: None)
    return weft.Launch(machine, everything, 5, {}, one=1, many=7, scale=0.5, BLOCK=16, **fixed)


def test_a_launch_passes_the_tensors_of_each_call(recorded: RecordedDriver, launched_here: Launcher) -> None:
    """Triton itself passes the same pointers, matrix views and tensors of a NamedTuple."""
    matrix, stream = weft.Matrix(64, 64, (32, 64)), SimpleNamespace(cuda_stream=0)
    launch = prepared_launch(launched_here, x_desc=matrix, out_desc=matrix)
    assert launch.moving == ("x_desc", "out", "pair", "out_desc")
    calls = [arguments() for _ in range(3)]
    for args in (*calls, calls[0]):
        everything[(5,)](**args, **_triton.options({}))
        launch(stream, **{name: moved(args[name]) for name in launch.moving})
    handed = [plain(args) for args in recorded.launched]
    assert handed[::2] == handed[1::2] and handed[0] != handed[2]
    assert len(launch.variants) == 1


def test_a_launch_keeps_no_tensor_of_a_call(recorded: RecordedDriver, launched_here: Launcher) -> None:
    matrix, stream = weft.Matrix(64, 64, (32, 64)), SimpleNamespace(cuda_stream=0)
    launch = prepared_launch(launched_here, x_desc=matrix, out_desc=matrix)
    args = {name: moved(value) for name, value in arguments().items() if name in launch.moving}
    for _ in range(2):
        launch(stream, **args)
    gone = [weakref.ref(t) for t in (args["x_desc"], args["out"], args["pair"].word)]
    recorded.launched.clear()
    del args
    assert [ref() for ref in gone] == [None] * 3


def test_another_alignment_or_dtype_is_another_variant(recorded: RecordedDriver, launched_here: Launcher) -> None:
    matrix, stream = weft.Matrix(64, 64, (32, 64)), SimpleNamespace(cuda_stream=0)
    launch = prepared_launch(launched_here, x_desc=matrix, out_desc=matrix)
    args = {name: moved(value) for name, value in arguments().items() if name in launch.moving}
    for out in (torch.zeros(16), torch.zeros(17)[1:], torch.zeros(16, dtype=torch.int32), torch.zeros(16)):
        launch(stream, **args | dict(out=out))
    assert len(launch.variants) == 3


def test_a_launch_moves_exactly_the_tensors(launched_here: Launcher) -> None:
    matrix, stream = weft.Matrix(64, 64, (32, 64)), SimpleNamespace(cuda_stream=0)
    with pytest.raises(TypeError, match="everything has no parameter z"):
        prepared_launch(launched_here, z=1)
    launch = prepared_launch(launched_here, x_desc=matrix, out_desc=matrix)
    with pytest.raises(TypeError, match="everything is launched with x_desc, out, pair, out_desc, not with scale"):
        launch(stream, scale=0.5)


def test_a_prepared_launch_depends_on_no_tensor() -> None:
    @prepared
    def prepared_sizes(world: weft.World, n: int, operand: Any) -> list[int]:
        return [n]

    def main(world: weft.World) -> None:
        assert (
            prepared_sizes(world, 1, ("a", 2))
            is prepared_sizes(world, 1, ("a", 2))
            is not prepared_sizes(world, 2, ("a", 2))
        )
        with pytest.raises(TypeError, match="prepared_sizes: a tensor changes from call to call"):
            prepared_sizes(world, 1, (torch.ones(1), 2))
        kept = prepared_sizes(world, 1, None)
        world.buffer("grows", 1 << 10)
        assert prepared_sizes(world, 1, None) is not kept, "the shared memory has moved"

    weft.spmd(main, 1, backend="emulated")


@pytest.mark.parametrize("reason", ["a hook", "scratch memory", "no TMA descriptor"])
def test_launches_that_weft_leaves_to_triton(
    recorded: RecordedDriver, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    args = arguments()
    compiled = everything[(5,)](**args, **_triton.options({}))
    if reason == "a hook":
        monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [lambda metadata: None])
    elif reason == "scratch memory":
        compiled.run.global_scratch_size = 128
    else:
        compiled.metadata = SimpleNamespace(tensordesc_meta=[])
    assert _triton.repeated(everything, compiled, 5, args) is None


def test_hooks_of_the_compiler_do_not_see_weft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would write constants to JSON for these arguments, and fails at a dtype inside a tuple."""
    compiled_kernels = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **compiled: compiled_kernels.append(compiled)
    )
    with _triton.no_compile_hooks():
        assert triton.knobs.runtime.jit_post_compile_hook is None and triton.knobs.runtime.jit_cache_hook is None
    triton.knobs.runtime.jit_post_compile_hook(key="")
    assert compiled_kernels == [dict(key="")]
