"""Programs that use only torch and Triton run on emulated ranks. The tests cover streams, graphs and libraries, and the
calls that are refused.
"""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl
from typer.testing import CliRunner

from tests.check import symmetric_kernels
from tests.check.symmetric_kernels import Memory, same, thread_number
from weft.check import load, search
from weft.check.torch_ranks.ranks import untracked
from weft.cli import app
from weft.errors import Deadlock, Race, Unsupported
from weft_pytest import emulated_ranks  # noqa: F401  (the fixture, also where weft is not installed anew)

N = 64


@triton.jit
def add_kernel(x, value, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x + offsets, tl.load(x + offsets) + value)


def checked(main, ranks: int = 2, seeds: int = 3, **options: object):
    """Return the first error that a program raises, or None."""
    exploration = search(functools.partial(main, **options), ranks, range(seeds))
    if not exploration.findings:
        assert exploration.programs
        return None
    return exploration.findings[0][1]


def streams(rank: int, world_size: int, ordered: bool = True) -> None:
    x, side = torch.zeros(N, device="cuda"), torch.cuda.Stream()
    add_kernel[(1,)](x, 1.0, N)
    x.mul_(2)  # behind the kernel, as on a GPU
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        add_kernel[(1,)](x, 1.0, N)
        event = side.record_event()
    if ordered:
        event.wait()
    assert x.sum().item() == 3 * N
    assert x.device == torch.device("cuda", rank) and x.cpu().tolist() == [3.0] * N


def test_operations_of_torch_are_in_the_order_of_their_stream():
    assert checked(streams) is None
    assert isinstance(checked(streams, ordered=False), Race)


def graphs(rank: int, world_size: int) -> None:
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        add_kernel[(1,)](y, 2.0, N)
        x.copy_(y)
    same(x, 0)
    for replays in (1, 2):
        graph.replay()
        same(x, 3 * replays)


def test_a_graph_does_what_it_captured_at_each_replay():
    assert checked(graphs) is None


def random_numbers(rank: int, world_size: int) -> None:
    """Seed generators again before their operations have run, and draw in several ways."""
    x = torch.zeros(N, device="cuda")
    add_kernel[(1,)](x, 1.0, N)  # the host runs ahead of the kernel
    generator = torch.Generator("cuda")
    assert isinstance(generator, torch.Generator) and generator.device.type == "cuda"
    drawn = []
    with untracked():
        of_torch = torch.Generator().manual_seed(3)
        torch.randn(N, generator=of_torch)
        numbers_of_torch = torch.rand(N, generator=of_torch)
    for _ in range(2):
        torch.manual_seed(3)
        generator.manual_seed(4)
        of_rank = torch.randn(N, device="cuda"), torch.empty(N, device="cuda").uniform_(), torch.bernoulli(x / 2)
        of_generator = (
            torch.randn(N, device="cuda", generator=generator),
            torch.empty(N, device="cuda").normal_(generator=generator),
        )
        assert of_rank[1].tolist() == numbers_of_torch.tolist()
        drawn.append((*of_rank, *of_generator, torch.randperm(N, generator=torch.Generator().manual_seed(5))))
    for draw, draw_again in zip(*drawn, strict=True):
        assert torch.equal(draw, draw_again)
    assert not torch.equal(drawn[0][0], torch.randn(N, device="cuda")) and not torch.equal(*drawn[0][3:5])


def replayed_random_numbers(rank: int, world_size: int) -> None:
    add_kernel[(1,)](torch.zeros(N, device="cuda"), 1.0, N)
    graph, draws = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        x = torch.randn(N, device="cuda")
    for _ in range(2):
        graph.replay()
        draws.append(x.clone())
    assert not torch.equal(*draws)


@pytest.mark.parametrize("main", [random_numbers, replayed_random_numbers])
def test_random_numbers_depend_on_what_the_host_did_before_it_drew_them(main):
    assert checked(main, seeds=8) is None


@pytest.mark.parametrize(
    "line", ["torch.manual_seed(0)", "DEVICE = triton.runtime.driver.active.get_active_torch_device()"]
)
def test_a_file_may_seed_torch_and_name_the_device_when_it_is_loaded(tmp_path, line):
    file = tmp_path / "loaded.py"
    file.write_text(f"import torch\nimport triton\n\n{line}\n\n\ndef main(rank, world_size):\n    pass\n")
    assert callable(load(str(file)))


def tools(rank: int, world_size: int) -> None:
    active = triton.runtime.driver.active
    assert active.get_current_target().backend == "cuda" and active.get_active_torch_device().index == rank
    assert active.utils.get_device_properties(rank)["multiprocessor_count"] > 0
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.nvtx.range("a name"):
        add_kernel[(1,)](torch.zeros(N, device="cuda"), 1.0, N)


def test_programs_may_use_tools_that_have_no_effect_here():
    before = vars(triton.runtime.driver)["_active"]
    assert checked(tools) is None
    assert vars(triton.runtime.driver)["_active"] is before


def printed(rank: int, world_size: int) -> None:
    x = torch.zeros(N, device="cuda")
    add_kernel[(1,)](x, 1.0, N)
    assert repr(x[:2]) == str(x[:2]) == f"{x[:2]}" == "tensor([1., 1.])"


def test_a_printed_tensor_has_the_values_of_its_stream():
    assert checked(printed, seeds=8) is None


def collectives(rank: int, world_size: int, wait: bool = True) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, device="cuda")
    add_kernel[(1,)](x, float(rank), N)
    total, full = x.clone(), torch.empty(world_size * N, device="cuda")
    work = dist.all_reduce(total, async_op=True)
    dist.all_gather_into_tensor(full, x)
    if wait:
        work.wait()
    torch.testing.assert_close(full.view(world_size, N).sum(0), total)
    part = torch.empty(N, device="cuda")
    dist.reduce_scatter_tensor(part, full)
    torch.testing.assert_close(part, world_size * full[rank * N :][:N])
    torch.testing.assert_close(
        total, world_size * (x - rank) + sum(range(world_size))
    )  # all have the same random numbers


def test_collectives_are_waited_for():
    assert checked(collectives) is None
    assert isinstance(checked(collectives, wait=False), Race)


@triton.jit
def assembly_kernel(x, TEXT: tl.constexpr, n: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, "=r, l", [x + tl.arange(0, n)], dtype=tl.int32, is_pure=False, pack=1)


def assembly(rank: int, world_size: int, text: str) -> None:
    assembly_kernel[(1,)](torch.zeros(N, dtype=torch.int32, device="cuda"), text, N)


@pytest.mark.parametrize(
    "text",
    [
        "multimem.st.relaxed.sys.global.f32 [$1], 0f00000000;",
        "cp.async.bulk.commit_group;",
        "atom.global.add.f32 $0, [$1], 0f00000000;",
        "add.f32 $0, $1, $1;",
        "ld.global.frobnicate.b32 $0, [$1];",
        "mov.u32 $0, %clock;",
        "bra nowhere;",
    ],
)
def test_assembly_that_is_not_modelled_is_refused_by_name(text):
    error = checked(assembly, text=text)
    assert isinstance(error, Unsupported) and "inline PTX" in str(error)
    assert "test_torch_ranks.py" in str(error)


@triton.jit
def by_thread_kernel(x, FORM: tl.constexpr):
    thread = thread_number()
    if FORM == "branch":
        if thread == 3:
            tl.inline_asm_elementwise(
                "red.global.add.u32 [$1], 1;", "=r, l", [x], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            tl.inline_asm_elementwise(
                "red.global.add.u32 [$1], 2;", "=r, l", [x], dtype=tl.int32, is_pure=False, pack=1
            )
    elif FORM == "barrier":
        if thread < 32:
            tl.debug_barrier()
    elif FORM == "return":
        if thread != 0:
            return
        tl.store(x, 1)
    elif FORM == "all":
        tl.inline_asm_elementwise("red.global.add.u32 [$1], 1;", "=r, l", [x], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(x + thread, 1)


def by_thread(rank: int, world_size: int, form: str, expected: int = 0) -> None:
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    by_thread_kernel[(1,)](x, form, num_warps=2)
    assert x.item() == expected


def test_threads_take_their_branches_and_run_assembly_once_each():
    assert checked(by_thread, form="branch", expected=1 + 2 * 63) is None
    assert checked(by_thread, form="all", expected=64) is None
    assert isinstance(checked(by_thread, form="address"), Unsupported)


def test_a_branch_of_some_threads_that_the_others_would_notice_is_refused():
    """A program hangs if only its first warp meets a barrier; if some threads return, the other threads keep
    running."""
    error = checked(by_thread, form="barrier")
    assert isinstance(error, Unsupported) and "a barrier in a branch that 32 of 64 threads take" in str(error)
    error = checked(by_thread, form="return", expected=1)
    assert isinstance(error, Unsupported) and "a return in a branch" in str(error)


def filled_by_peer(rank: int, world_size: int, collective: str) -> None:
    """Rank 1 writes to rank 0's memory before the collective, and rank 0 reads it after the collective."""
    memory = Memory(rank, world_size, N)
    memory.buffer.fill_(0)
    memory.handle.barrier()
    x = torch.ones(2, device="cuda")
    if rank == 1:
        add_kernel[(1,)](memory.handle.get_buffer(0, (N,), memory.buffer.dtype), 1.0, N)
    if collective == "broadcast":
        dist.broadcast(x, src=0)
    elif collective == "all_to_all_single":
        sends, receives = ([1, 1], [1, 0]) if rank == 0 else ([0, 1], [1, 1])
        dist.all_to_all_single(torch.zeros(sum(receives), device="cuda"), x[: sum(sends)], receives, sends)
    else:
        dist.all_reduce(x)
    if rank == 0:
        memory.buffer.sum().item()


@pytest.mark.parametrize("collective", ["broadcast", "all_to_all_single", "all_reduce"])
def test_a_collective_orders_a_rank_after_the_ranks_it_receives_from(collective):
    error = checked(filled_by_peer, collective=collective)
    assert error is None if collective == "all_reduce" else isinstance(error, Race), error


def signals(rank: int, world_size: int, wait_for: int = 1) -> None:
    memory = Memory(rank, world_size, N)
    add_kernel[(1,)](torch.zeros(N, device="cuda"), 1.0, N)
    memory.handle.put_signal((rank + 1) % world_size, channel=3)
    memory.handle.wait_signal((rank - wait_for) % world_size, channel=3)


def test_a_missing_signal_is_a_deadlock():
    assert checked(signals, ranks=3) is None
    error = checked(signals, ranks=3, wait_for=2)
    assert isinstance(error, Deadlock) and " at ?" not in str(error)
    assert re.search(r"stream main, wait_signal from rank \d at .*:\d+ polls signal pad\[\d+\] of rank", str(error))


@triton.jit
def announce_kernel(peer_data, peer_flag, flag, data, out, n: tl.constexpr, SEM: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(peer_data + offsets, 1.0)
    tl.debug_barrier()
    tl.atomic_xchg(peer_flag, 1, sem=SEM, scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + offsets, tl.load(data + offsets))


def announced(rank: int, world_size: int, sem: str = "release") -> None:
    data, peer = Memory(rank, world_size, N), (rank + 1) % world_size
    flags = symm_mem.rendezvous(symm_mem.empty(N, dtype=torch.int32, device="cuda"))
    flags.tensor.zero_()
    flags.barrier()
    buffers = data.handle.get_buffer(peer, (N,), torch.float32), flags.get_buffer(peer, (N,), torch.int32)
    announce_kernel[(1,)](*buffers, flags.tensor, data.buffer, torch.empty(N, device="cuda"), N, sem)


def test_a_relaxed_signal_is_named_as_the_cause():
    assert checked(announced) is None
    error = checked(announced, sem="relaxed")
    assert isinstance(error, Race) and "the first program has made no release so far" in str(error)


def polled_flags(rank: int, world_size: int) -> None:
    Memory(rank, world_size, N)
    flags = symm_mem.rendezvous(symm_mem.empty(N, dtype=torch.int32, device="cuda"))
    add_kernel[(1,)](torch.zeros(N, device="cuda"), 1.0, N)
    if rank == 0:
        flags.wait_signal(1)


def test_reports_number_the_symmetric_tensors():
    error = checked(polled_flags)
    assert isinstance(error, Deadlock) and "signal pad 2[1] of rank 0" in str(error)


@pytest.mark.parametrize("name", ["send", "init_device_mesh", "scatter"])
def test_what_is_not_modelled_of_torch_is_refused_by_name(name):
    error = checked(lambda rank, world_size: getattr(dist, name)(torch.zeros(1)))
    assert isinstance(error, Unsupported) and name in str(error)


def test_the_command_says_clean_only_of_kernels_that_ran(tmp_path):
    file = symmetric_kernels.__file__
    run = CliRunner().invoke(app, ["check", f"{file}:two_shot", "--ranks", "2", "--seeds", "2"])
    assert run.exit_code == 0 and "clean with 2 ranks: 2 seeds" in run.output
    (tmp_path / "nothing.py").write_text("def main(rank, world_size):\n    pass\n")
    run = CliRunner().invoke(app, ["check", str(tmp_path / "nothing.py"), "--ranks", "2", "--seeds", "2"])
    assert run.exit_code == 1 and "launches no kernel" in run.output and "clean with" not in run.output


def test_the_fixture_of_pytest(emulated_ranks):  # noqa: F811
    emulated_ranks(2, symmetric_kernels.one_shot, schedules=2)
    with pytest.raises(Race) as raised:
        emulated_ranks(2, functools.partial(symmetric_kernels.one_shot, LAST=False))
    assert any("schedules=1, seed=" in note for note in raised.value.__notes__)
    with pytest.raises(pytest.fail.Exception, match="no kernel was launched"):
        emulated_ranks(2, lambda rank, world_size: None, schedules=1)


def test_torch_is_restored_after_a_run():
    before = torch.cuda.Stream, dist.all_reduce, torch.manual_seed, triton.JITFunction.run
    assert checked(streams) is None
    assert (torch.cuda.Stream, dist.all_reduce, torch.manual_seed, triton.JITFunction.run) == before
    assert not torch.cuda.is_available() and not dist.is_initialized()


@triton.jit
def dependent_kernel(x, n: tl.constexpr, launch_pdl: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    offsets = tl.arange(0, n)
    tl.store(x + offsets, tl.load(x + offsets) + 1)
    tl.extra.cuda.gdc_launch_dependents()


def dependent_launches(rank: int, world_size: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert torch.accelerator.current_device_index() == rank and torch.accelerator.device_count() == world_size
    x = torch.zeros(N, device=device)
    for _ in range(2):
        dependent_kernel[(1,)](x, N, launch_pdl=True)
    torch.accelerator.synchronize()
    same(x, 2)


def test_a_dependent_launch_and_torch_accelerator():
    assert checked(dependent_launches) is None
