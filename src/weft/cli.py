"""The `weft` command. This module parses arguments, calls the functions that do the work, and prints their results."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .errors import WeftError

if TYPE_CHECKING:
    from .emulator.ran import Ran
    from .span import Span
    from .world import World

app = typer.Typer(
    help="Overlap communication with computation in multi-GPU LLMs, and fuse kernels around both.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
DEFINES = "A Python file that defines main(world), or main(rank, world_size) as torchrun would run it."
Target = Annotated[str, typer.Argument(metavar="FILE[:FUNCTION]", help=DEFINES)]
ProfileName = Annotated[
    str | None,
    typer.Option(help="A profile's file, or nvidia-h200-x2 or -x4, which weft ships. Default: this machine's."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Schedules to try at each world size.")]


def progress() -> Progress:
    """Yield a progress bar with a description, counts and the elapsed time; the bar disappears at the end, and logs do
    not contain it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_line(text: str) -> None:
    """Print a line that the terminal may wrap but that remains one line when it is copied."""
    console.print(text, highlight=False, soft_wrap=True)


def fail(message: str) -> typer.Exit:
    print_line(f"[bold red]{escape(message)}")
    return typer.Exit(1)


def explain_missing_gpu(error: Exception) -> None:
    """Print what to change if torch raised the error because `main(world)` requested a GPU. Torch's message only
    says to install a driver, or a different torch."""
    if any(text in str(error) for text in ("Found no NVIDIA driver", "Torch not compiled with CUDA enabled")):
        print_line('Emulated ranks need no GPU: in main(world), create tensors with device=world.device, not "cuda".')


def check_folder(path: Path) -> None:
    """Fail early if the folder of an output file does not exist."""
    if not path.parent.is_dir():
        raise fail(f"{path.parent}: no such folder")


def check_picture(path: Path) -> Path:
    """Return the path of a picture, with .png if it has no suffix. Fail early if no picture can be written there."""
    from matplotlib.backend_bases import FigureCanvasBase

    check_folder(path)
    if path.is_dir():
        raise fail(f"{path} is a folder: name a file in it")
    path = path if path.suffix else path.with_suffix(".png")
    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise fail(f"{path}: {path.suffix} is not a format of pictures: use .png, .svg or .pdf")
    return path


def _print_version(asked: bool) -> None:
    if asked:
        print_line(metadata.version("weft"))
        raise typer.Exit


@app.callback()
def _weft(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if "--help" in sys.argv:
        return
    from . import _triton  # imports torch, which takes seconds
    from .backends.base import timeout_seconds

    try:
        timeout_seconds()
    except ValueError as error:
        raise fail(str(error)) from None
    if context.invoked_subcommand != "doctor" and (why := _triton.untried()):
        raise fail(why)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure bandwidth.")] = False,
) -> None:
    """Print the installed packages, the hardware of this machine, the backend that weft will use, and the reason."""
    from .doctor import examine

    sections, backend, why = examine(measure=not quick)
    table = Table.grid(padding=(0, 2))
    for section, lines in sections.items():
        table.add_row(f"[bold]{section}", "")
        for name, value in lines:
            table.add_row(f"  {escape(name)}", escape(value))
    table.add_row("[bold]weft will use", f"[bold green]{backend}[/]: {escape(why)}")
    console.print(table, highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="File for the picture.")] = Path("weft-demo.png"),
) -> None:
    """Run and draw a tensor-parallel MLP with and without overlap: on all GPUs, or without GPUs in the emulator."""
    from .demo import run

    picture = check_picture(out)
    try:
        with progress() as bar:
            result = run(picture, bar)
    except WeftError as error:
        raise fail(str(error)) from None
    console.print(result.table)
    for line in result.notes:
        print_line(line)
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def check(
    target: Target,
    seeds: Seeds = 20,
    world: Annotated[
        list[int] | None,
        typer.Option("--world", "--ranks", min=1, help="World size; may be repeated. Default: 2, 3 and 4."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    gpu: Annotated[
        str, typer.Option("--target", help="GPU architecture to compile for; none has to be present.")
    ] = "sm_90a",
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Skip compiling the kernels that ran.")] = False,
) -> None:
    """Run a kernel on emulated ranks under many schedules, then compile the kernels that ran. Exit with 1 at the first
    race, deadlock or wrong result, if no kernel ran, if a kernel does not compile, or if the code breaks a rule of the
    protocol."""
    programs = 0
    try:
        from .architectures import capability_of
        from .check import load, search, takes_rank
        from .emulator.ran import Ran

        ran, capability, main = Ran(), capability_of(gpu), load(target)
    except WeftError as error:
        raise fail(str(error)) from None
    for size in world or (2, 3, 4):
        with progress() as bar:
            exploration = search(main, size, bar.track(range(seed, seed + seeds), description=f"{size} ranks"))
        for number, finding in exploration.findings:
            if not isinstance(finding, WeftError):
                print_line(escape("".join(traceback.format_exception(finding))))
            print_line(
                f"[bold red]{type(finding).__name__}[/] with {size} ranks, seed {number}:\n{escape(str(finding))}"
            )
            explain_missing_gpu(finding)
            again = f"weft check {shlex.quote(target)} --world {size} --seed {number} --seeds 1"
            print_line(f"The same again: {escape(again)}")
            raise typer.Exit(1)
        ran.add(exploration.ran)
        programs += exploration.programs
        status = "[bold green]clean[/]" if exploration.programs else "no kernel ran"
        print_line(f"{status} with {size} ranks: {exploration.runs} seeds, {exploration.schedules} different schedules")
    if not programs:
        raise fail(f"{target} launches no kernel, so there was nothing to check")
    if takes_rank(main):
        print_line("Not compiled: the rules for generated code are those of kernels written with weft.lang.")
    elif not no_compile:
        _compile(ran, capability)


def _compile(ran: Ran, capability: int) -> None:
    from .check import compile_and_check

    with progress() as bar:
        compiled, refused = compile_and_check(ran, capability, functools.partial(bar.track, description="compiling"))
    for kernel in compiled:
        print_line(f"[bold {'red' if kernel.problems else 'green'}]compiled[/] {escape(str(kernel))}")
        for line in kernel.problems:
            print_line(f"    [bold red]{escape(line)}")
    for line in refused:
        print_line(f"[bold red]{escape(line)}")
    if refused or any(kernel.problems for kernel in compiled):
        raise typer.Exit(1)


@app.command()
def trace(
    target: Annotated[
        str | None, typer.Argument(metavar="FILE[:FUNCTION]", help=f"{DEFINES} Default: the demo's layer.")
    ] = None,
    world: Annotated[int, typer.Option("--world", "--ranks", min=1, help="World size.")] = 4,
    seed: Annotated[int, typer.Option(help="The seed of the schedule.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the timeline to OUT.json and OUT.png.")] = None,
) -> None:
    """Show how long the programs of each rank compute and wait in one emulated run, up to the error if the run fails.
    With --out, also write the timeline as JSON for ui.perfetto.dev and as a picture."""
    from .demo import layer

    if out is not None:
        check_folder(out)
    try:
        from .check import load, run
        from .emulator.tasks import H200

        main = load(target) if target else layer
    except WeftError as error:
        raise fail(str(error)) from None
    report, failure = run(main, world, seed)
    if report.timeline and out is not None:
        end = f", up to the {type(failure).__name__}" if failure else ""
        title = f"{Path(target).name if target else 'tensor-parallel MLP'}: {world} ranks, seed {seed}{end}"
        _write_timeline(report.timeline, out, title, H200.unit)
    elif report.timeline:
        for rank in range(world):
            spans = [span for span in report.timeline if span.rank == rank]
            compute, wait = (sum(s.end - s.start for s in spans if s.kind == kind) for kind in ("compute", "wait"))
            print_line(f"rank {rank}: its programs compute for {compute:.0f} and wait for {wait:.0f}")
        print_line(f"in {H200.unit}; --out PATH writes the timeline")
    elif failure is None:
        raise fail(f"{target} launches nothing, so there is nothing to draw")
    if failure is not None:
        if not isinstance(failure, WeftError):
            print_line(escape("".join(traceback.format_exception(failure))))
        explain_missing_gpu(failure)
        raise fail(f"{type(failure).__name__}: {failure}")


def _write_timeline(timeline: list[Span], out: Path, title: str, unit: str) -> None:
    from .trace.perfetto import write_json
    from .trace.picture import draw

    base = out.with_suffix("") if out.suffix in (".json", ".png") else out
    events, picture = (base.with_name(base.name + suffix) for suffix in (".json", ".png"))
    write_json(timeline, events)
    draw({title: timeline}, picture, unit=unit)
    print_line(escape(f"{events} (open in ui.perfetto.dev) and {picture}"))


@app.command()
def tune(
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, after a few seconds to start.")] = 100,
    out: Annotated[
        Path | None, typer.Option(help="File for the profile. Default: where weft looks for this machine's.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure everything again and replace the file.")] = False,
) -> None:
    """Measure this machine for the planner; another run continues where the last run ended. Run it alone or under
    torchrun."""
    import torch

    from .launch import spmd

    gpus = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count()))
    if torch.cuda.device_count() < 1 or gpus < 2:
        raise fail(f"weft tune needs at least 2 GPUs, and there {'is' if gpus == 1 else 'are'} {gpus} here")
    try:
        path, have, wanted = spmd(functools.partial(_tune_rank, seconds=seconds, out=out, again=again), gpus)[0]
    except WeftError as error:
        raise fail(str(error)) from None
    except torch.multiprocessing.ProcessRaisedException as error:
        raise fail(error.msg.strip().splitlines()[-1]) from error
    if os.environ.get("RANK", "0") == "0":
        after = "`weft tune --again` measures anew" if have == wanted else "run `weft tune` again for the rest"
        print_line(f"{path}: {have} of {wanted} measurements; {after}")
        _show_gains(Path(path))


@app.command("explain")
def explain_plan(
    op: Annotated[str, typer.Argument(help="all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, ..")],
    m: Annotated[int, typer.Argument(help="Rows (tokens) of all ranks together.")],
    n: Annotated[int, typer.Argument(help="Columns of the GEMM on one rank.")],
    k: Annotated[int, typer.Argument(help="K of the GEMM on one rank.")],
    profile: ProfileName = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Plan for calls outside CUDA graphs, with the profile's host time.")
    ] = False,
) -> None:
    """Print the plan that "auto" runs for a size, the reason, and the predicted times of the other plans."""
    from .planner.auto import explain
    from .planner.profile import ProfileError

    try:
        decision = explain(op, m, n, k, mode="eager" if eager else "graph", profile=profile)
    except ProfileError as error:
        raise fail(f"{error}; --profile names a profile") from None
    except (WeftError, ValueError) as error:
        raise fail(str(error)) from None
    print_line(escape(str(decision)))


@app.command("simulate")
def simulate_layer(
    workload: Annotated[str, typer.Argument(help="mlp, decoder, or an op.")],
    size: Annotated[
        list[str], typer.Argument(metavar="M,H,I ..", help="Tokens, hidden, intermediate size; for an op M,N,K.")
    ],
    gpus: Annotated[
        int, typer.Option(min=2, help="More than 8 GPUs form nodes of 8, with 50 GB/s a GPU between nodes.")
    ] = 8,
    profile: ProfileName = None,
) -> None:
    """Predict the times of a layer on more or fewer GPUs than were measured."""
    from .planner.profile import ProfileError
    from .planner.simulate import cluster, nvlink, simulate

    try:
        sizes = [(int(a), int(b), int(c)) for a, b, c in (text.split(",") for text in size)]
    except ValueError:
        raise fail(f"{' '.join(size)}: a size is three whole numbers, such as 8192,8192,28672") from None
    try:
        result = simulate(nvlink(gpus) if gpus <= 8 else cluster(gpus), workload, sizes, profile=profile)
    except ProfileError as error:
        raise fail(f"{error}; --profile names a profile") from None
    except (WeftError, ValueError) as error:
        raise fail(str(error)) from None
    print_line(escape(str(result)))


def _show_gains(path: Path) -> None:
    """Print the profile's predictions as a table, and plot them next to the file."""
    from .planner import summary
    from .planner.profile import read

    profile, picture = read(path), path.with_suffix(".png")
    console.print(summary.table(profile))
    summary.plot(profile, picture)
    print_line(f"{picture}: the same as a plot")


def _tune_rank(world: World, seconds: float, out: Path | None, again: bool) -> tuple[str, int, int]:
    from .planner.tune import run

    with progress() if world.rank == 0 else contextlib.nullcontext() as bar:
        task = bar.add_task("measuring") if bar else None

        def show(done: int, total: int, step: str) -> None:
            assert bar is not None and task is not None
            if step.startswith("left out"):
                bar.console.print(escape(step), highlight=False)
            bar.update(task, completed=done, total=total, description=escape(step))

        return run(world, seconds, out, show, again)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    report: Annotated[
        bool, typer.Option("--report", help="Only write the pages and README from bench/results.")
    ] = False,
) -> None:
    """Benchmark all GPUs of this machine (other arguments are passed to bench/measure/run.py), or write the report."""
    module = "pages.pages" if report else "measure.run"
    script = Path(f"bench/{module.replace('.', '/')}.py")
    if not (report or context.args):
        raise fail(
            "weft bench --out DIR [--ops ..] [--shapes ..] [--size M,H,I] [--modes graph eager] [--tune] "
            "[--seconds S] measures into DIR and needs at least 2 GPUs; --report writes the pages"
        )
    if not script.is_file():
        raise fail(f"{script} is not here: run this in a clone of weft")
    raise typer.Exit(subprocess.run([sys.executable, "-m", f"bench.{module}", *context.args]).returncode)


def main() -> None:
    """Run the command. A command that runs a user's file does so in a child process, because the file may end its
    process with any status, including 0, before anything is checked."""
    if sys.argv[1:2] not in (["check"], ["trace"]):
        app()
    ended, end = os.pipe()
    child = os.fork()  # no thread runs yet, because no imported module starts one
    if not child:
        try:
            app()
        finally:
            os.write(end, b"!")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # end the child; the terminal signals it too
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else lambda n, _: os.kill(child, n))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(ended, False)  # processes that the file left running keep the write end of the pipe open
    try:
        os.read(ended, 1)
    except BlockingIOError:
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        print_line(f"[bold red]the process ended {how} before the command did: a file must not end it")
        raise SystemExit(1) from None
    raise SystemExit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
