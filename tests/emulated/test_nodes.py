"""Worlds over several nodes, which WEFT_NODE names in these tests: plans that use cuBLAS and NCCL, and Worlds inside a
node."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft
from tests.emulated.cases_ops import case
from tests.emulated.test_world import of_gpus
from weft import Unsupported
from weft.backends import cuda, shm_exchange
from weft.backends.base import BETWEEN_CTAS
from weft.backends.cuda import CudaBackend
from weft.backends.nodes import host_name, numbered, spread
from weft.op import REGISTRY
from weft.plans import OneShot, Sequential

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_nodes.py"


# -- which ranks are on one node ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hosts", "nodes", "says"),
    [
        ("a", (0,), None),
        ("aaaa", (0, 0, 0, 0), None),
        ("bbbbaa", (0, 0, 0, 0, 1, 1), "its ranks are on 2 nodes, 4 + 2"),
        ("abab", (0, 1, 0, 1), "its ranks are on 2 nodes, 2 each"),
        ("cab", (0, 1, 2), "its ranks are on 3 nodes, 1 each"),
        ("aba", (0, 1, 0), "its ranks are on 2 nodes, 2 + 1"),
    ],
)
def test_nodes_are_numbered_by_their_first_ranks(hosts: str, nodes: Sequence[int], says: str | None) -> None:
    assert numbered(hosts) == nodes and spread(nodes) == says


def test_a_node_is_a_host_of_one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers of one host have the same boot id but different names."""
    monkeypatch.delenv("WEFT_NODE", raising=False)
    monkeypatch.setattr("platform.node", lambda: "pod-1")
    host = host_name()
    assert host == host_name() and host.startswith("pod-1 ")
    monkeypatch.setattr("platform.node", lambda: "pod-2")
    assert host_name() != host and host_name().split()[1:] == host.split()[1:]
    monkeypatch.setattr("platform.node", lambda: "pod-1")
    readlink = os.readlink
    for kind in ("ipc", "pid"):  # containers that share the host's network
        with monkeypatch.context() as patch:
            patch.setattr("os.readlink", lambda path, kind=kind: "another" if path.name == kind else readlink(path))
            assert host_name() != host and host_name().split()[:2] == host.split()[:2]
    monkeypatch.setenv("WEFT_NODE", "first")
    assert host_name() == "first"


# -- emulated ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(3))
def test_emulated_nodes(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """NCCL moves all data between the nodes; on a World inside one node, kernels overlap transfers with computation."""

    def main(world: weft.World) -> None:
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
            for plan in ("fused", "decomposed"):
                assert case(world, op, [4, 8, 3], 32, 32, plan) < 5e-3
        with pytest.raises(Unsupported, match="channels: no symmetric memory: its ranks are on 2 nodes, 2 . 1"):
            world.channel("over nodes", 4, None)
        node, across = world.split(world.node), world.split(world.rank != 1)
        assert (node.nodes, across.nodes) == [((0, 0), (0, 1)), ((0, 0), (0,)), ((0,), (0, 1))][world.rank]
        assert node.backend.symmetric_unsupported is None
        assert (across.backend.symmetric_unsupported is None) == (world.rank == 1)
        assert case(node, "all_gather_matmul", [8] * node.size, 32, 32, "fused") < 5e-3
        world.synchronize()

    weft.spmd(main, 3, backend="emulated", seed=seed, nodes=(2, 1))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("every op of this World runs by its sequential plan: its ranks are on 2 nodes, 2 + 1; ")


@pytest.mark.parametrize(("nodes", "says"), [(1, (0, 0, 0, 0)), (2, (0, 0, 1, 1)), ((1, 3), (0, 1, 1, 1))])
def test_emulated_ranks_are_put_on_nodes(nodes: Any, says: Sequence[int]) -> None:
    assert weft.spmd(lambda world: world.nodes, 4, backend="emulated", nodes=nodes) == [says] * 4


@pytest.mark.parametrize("nodes", [0, -2, 3, (), (4, 0), (2, 1)])
def test_nodes_that_do_not_make_the_ranks_are_refused(nodes: Any) -> None:
    with pytest.raises(
        ValueError, match="for 4 ranks it is a number of nodes of equal size, or the ranks on each node"
    ):
        weft.spmd(lambda world: None, 4, backend="emulated", nodes=nodes)


# -- six ranks on nodes of 4 and of 2 ----------------------------------------------------------------------------------
NODES = (0, 0, 0, 0, 1, 1)


class Lines(logging.Handler):
    """A handler that collects the log lines about nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("weft").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "nodes" in record.getMessage():
            self.lines.append(record.getMessage())


def ops_of_several_nodes(world: weft.World, log: Lines) -> None:
    """Check that every requested plan gives the right result, and that one log line explains why it runs by cuBLAS and
    NCCL."""
    rows = [9, 16, 0, 5, 8, 3]
    for plan in ("sequential", "auto", "fused"):
        assert case(world, "all_gather_matmul", rows, 48, 64, plan, bias=True) < 5e-3
        assert bool(log.lines) == (plan != "sequential" and world.rank == 0)
    assert case(world, "matmul_reduce_scatter", rows, 48, 64, "auto", bias=True) < 5e-3
    assert weft.all_reduce(torch.full((8,), 1.0 + world.rank), world=world, plan="one_shot")[0].item() == 21
    weft.silu_mul(torch.ones(2, 64, dtype=torch.bfloat16), world=world)
    if world.rank == 0:
        (line,) = log.lines
        assert "by its sequential plan: its ranks are on 2 nodes, 4 + 2; " in line and "world.split(world.node)" in line


def worlds_inside(world: weft.World, log: Lines) -> None:
    """Create a World for each node, and Worlds with one rank from each node; if nodes are unequal, some ranks are
    alone."""
    log.lines.clear()
    node = world.split(world.node)
    assert (node.size, node.rank, node.multi_node_unsupported) == (
        (4, 2)[world.node],
        world.rank - 4 * world.node,
        None,
    )
    assert case(node, "matmul_all_reduce", [8] * node.size, 48, 64, "auto", bias=True) < 5e-3
    assert not log.lines
    across = world.split(node.rank)
    assert across.nodes == ((0, 1) if node.rank < 2 else (0,))
    total = weft.all_reduce(torch.full((8,), 1.0 + world.rank), world=across)[0].item()
    assert total == (2 * node.rank + 6 if node.rank < 2 else world.rank + 1)
    assert bool(log.lines) == (world.rank < 2)


def gpus_of_nodes(rank: int, store: Path) -> None:
    """Imitate processes on GPUs: shared host memory and symmetric memory exist only inside a node."""
    shm_exchange.FOLDER = store.parent / f"shm{NODES[rank]}"
    with of_gpus(rank - 4 * NODES[rank]):
        whole = CudaBackend()
        assert whole.nodes == NODES and whole._shm is None and not whole.shares_gpu
        assert whole.peers_unsupported == whole.symmetric_unsupported == "its ranks are on 2 nodes, 4 + 2"
        assert whole.exchange(rank) == list(range(6)) and whole.post("a call") is None
        with pytest.raises(Unsupported, match="user: no symmetric memory: its ranks are on 2 nodes, 4 . 2"):
            whole.symmetric(256, "user")
        world, op = weft.World(whole), REGISTRY["all_reduce"]
        call: Any = None
        for plan in ("auto", "one_shot", OneShot(), Sequential()):
            assert op.choose(world, call, plan, False) == Sequential()
        node = whole.split([[0, 1, 2, 3], [4, 5]])
        assert node.symmetric_unsupported is None and node._shm is not None and set(node.nodes) == {0}
        assert node.exchange(rank) == ([0, 1, 2, 3] if rank < 4 else [4, 5])
        across = whole.split([[0, 4], [1, 5], [2], [3]])
        assert (across.nodes, across.symmetric_unsupported) == (
            ((0, 1), "its ranks are on 2 nodes, 1 each") if rank not in (2, 3) else ((0,), None)
        )


def of_six(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["WEFT_NODE"] = "ab"[NODES[rank]]
    dist.init_process_group("gloo", store=dist.FileStore(store, 6), rank=rank, world_size=6)
    world = weft.init()
    assert world.nodes == NODES and world.node == NODES[rank]
    log = Lines()
    ops_of_several_nodes(world, log)
    worlds_inside(world, log)
    gpus_of_nodes(rank, Path(store))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gate
def test_unequal_nodes(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"shm{node}").mkdir()
    mp.spawn(of_six, (str(tmp_path / "store"),), nprocs=6)


# -- four ranks on two equal nodes -------------------------------------------------------------------------------------
def gpus_of_nodes_alike(rank: int, store: Path) -> None:
    """Imitate processes on GPUs that support two-level plans. Communication between nodes uses only a few CTAs, and
    kernels inside a node leave SMs free for them. Two-level plans are unsupported if the GPUs of one node lack peer
    access, even if the other node has it."""
    shm_exchange.FOLDER = store.parent / f"shm{rank // 2}"
    limits: list[int] = []
    with (
        of_gpus(rank % 2),
        mock.patch.object(cuda, "_limited", limits.append),
        mock.patch.object(CudaBackend, "_warm_up", lambda self, group, size: limits.append(size)),
    ):
        whole = CudaBackend()
        assert whole.two_level_unsupported is None and whole.symmetric_unsupported == "its ranks are on 2 nodes, 2 each"
        pair = CudaBackend(dist.new_group([0, 2], use_local_synchronization=True)) if rank in (0, 2) else None
        assert pair is None or pair.two_level_unsupported == "its ranks are on 2 nodes, 1 each"
        dist.barrier()
        over_gloo = dist.new_group
        with mock.patch.object(dist, "new_group", lambda ranks, timeout, **options: over_gloo(ranks, timeout=timeout)):
            node, across = whole.levels()
        assert limits == [BETWEEN_CTAS, BETWEEN_CTAS, 2]
        assert (node.nodes, node.rank, node.sm_count) == ((0, 0), rank % 2, whole.sm_count - BETWEEN_CTAS)
        assert (across.nodes, across.rank, across.sm_count) == ((0, 1), rank // 2, whole.sm_count)
        assert (node.exchange(rank), across.exchange(rank)) == (
            [rank // 2 * 2, rank // 2 * 2 + 1],
            [rank % 2, rank % 2 + 2],
        )
        with mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: rank < 2):
            reason = (
                "its ranks are on 2 nodes, 2 each, and on that of rank 2 GPU 0 has no peer access to GPUs [1] (rank 0)"
            )
            assert CudaBackend().two_level_unsupported == reason


def of_four(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["WEFT_NODE"] = "ab"[rank // 2]
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    world, log = weft.init(), Lines()
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        assert case(world, op, [5, 9, 0, 2], 48, 64, "two_level", bias=True) < 5e-3
    says = "its ranks are on 2 nodes, 2 each, and ranks are CPU processes, which have no symmetric memory; to overlap"
    assert world.rank or (len(log.lines) == 1 and says in log.lines[0])
    gpus_of_nodes_alike(rank, Path(store))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gate
def test_nodes_alike(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"shm{node}").mkdir()
    mp.spawn(of_four, (str(tmp_path / "store"),), nprocs=4)


# -- the example -------------------------------------------------------------------------------------------------------
@pytest.mark.gate  # starts seven processes that import torch
def test_the_example_trains_on_two_nodes() -> None:
    """The test starts torchrun twice, as on two machines; their names distinguish the nodes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WEFT_NODE")}
    command = [sys.executable, EXAMPLE, "--gloo"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"losses \d\.\d+ to \d\.\d+: right on 2 nodes of 2 ranks", done.stdout), done.stdout
