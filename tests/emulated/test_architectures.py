"""GPUs other than Hopper: plans without symmetric memory, without atomics over the link, and without bulk copies; and
tiles that fit on these GPUs. test_offline_architectures.py compiles the kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.emulated.cases_all_gather_matmul import all_gather_case
from tests.emulated.cases_matmul_all_to_all import all_to_all_case, drawn
from tests.emulated.cases_matmul_reduce import reduce_case
from tests.emulated.cases_ops import FUSED, OPS
from tests.gates import some
from tests.planner.test_predict import MACHINE, made_up_profile
from weft import architectures
from weft.backends import cuda
from weft.backends.shared_gpu import RankDevice
from weft.ops.tiles import with_architecture_tiles, with_shape_tiles
from weft.planner.predict import Predictor
from weft.planner.probes.calls import variants
from weft.planner.probes.common import SIZES, fitted
from weft.planner.search import Planner
from weft.plans import (
    Decomposed,
    Fused,
    GemmTile,
    Multicast,
    OneShot,
    Plan,
    Sequential,
    Signaled,
    TwoShotLowLatency,
    TwoShotPush,
    is_low_latency,
)
from weft.scale import SMALL_SIGNALED

BF16 = 5e-3
AG, RS, AR = OPS
NO_PEERS = "GPU 0 has no peer access to GPUs [1]"
NO_ATOMICS = "GPU 0 has no atomics in the memory of GPUs [1], as over PCIe"


def emulate(main: Callable[[weft.World], Any], ranks: int = 2, seed: int = 0) -> list[Any]:
    return weft.spmd(main, ranks, backend="emulated", seed=seed)


def without_peers(world: weft.World) -> None:
    """Make ranks behave like GPUs over PCIe without peer access, where symmetric memory cannot be allocated."""
    backend: Any = world.backend
    backend.peers_unsupported = backend.symmetric_unsupported = NO_PEERS
    backend.symmetric = None


def run(world: weft.World, op: str, plan: Plan | str, rows: int, n: int, k: int, **options: Any) -> float:
    """`rows` is the number of rows of each rank."""
    if op == AG:
        return all_gather_case(world, [rows] * world.size, n, k, plan, **options)
    return reduce_case(world, rows * world.size, n, k, plan, everywhere=op == AR, **options)


@pytest.mark.parametrize("ranks", some([2, 3, 4], 2))
def test_plans_with_nccl_transfers_need_no_symmetric_memory(ranks: int, caplog: Any) -> None:
    """Decomposed and signaled plans of all ops run without a warning, also with few rows and with uneven groups."""

    def main(world: weft.World) -> float:
        without_peers(world)
        worst = 0.0
        for op in OPS:
            for rows, groups in ((9, ()), (1, ()), (8, (1, 1, 2) if ranks == 4 else ())):
                worst = max(worst, run(world, op, Decomposed(groups), rows, 24, 16, bias=True, calls=2))
        for op in (RS, AR):
            worst = max(worst, run(world, op, SMALL_SIGNALED, 40, 72, 40, bias=True, calls=2))
        to = drawn(1, ranks, [50] * ranks)
        return max(worst, all_to_all_case(world, to, 72, 40, SMALL_SIGNALED, bias=True))

    with caplog.at_level(logging.WARNING, "weft"):
        assert max(emulate(main, ranks)) < BF16
    assert not caplog.records


def test_a_decomposed_all_gather_without_symmetric_memory_returns_the_gathered_rows() -> None:
    def main(world: weft.World) -> bool:
        without_peers(world)
        x, w = torch.full((5, 16), world.rank + 1.0).bfloat16(), torch.ones(8, 16).bfloat16()
        y, full = weft.all_gather_matmul_with_gathered(x, w, world=world, plan=Decomposed())
        world.synchronize()
        expected = torch.cat([torch.full((5, 16), r + 1.0) for r in range(world.size)])
        return torch.equal(full.float(), expected) and torch.equal(y.float(), expected @ w.float().t())

    assert all(emulate(main, 3))


def test_low_latency_plans_need_no_atomics_over_the_link(caplog: Any) -> None:
    """Low-latency rows carry their flags. For every plan with counters, weft runs the sequential plan and logs the
    reason."""

    def main(world: weft.World) -> tuple[float, int]:
        world.backend.symmetric_unsupported = NO_ATOMICS
        worst, counting = 0.0, 0
        for op, plans in {AG: [OneShot(warps=4)], RS: [OneShot(warps=4)], AR: [TwoShotLowLatency(warps=4)]}.items():
            worst = max([worst, *(run(world, op, plan, 4, 32, 32) for plan in plans)])
        x = torch.ones(4, 64).bfloat16() * (world.rank + 1)
        for plan in (OneShot(warps=4), TwoShotLowLatency(warps=4), TwoShotPush(warps=4), Sequential()):
            y = weft.all_reduce(x, world=world, plan=plan)
            world.synchronize()
            assert torch.equal(y.float(), torch.full((4, 64), 3.0)), plan
            counting += not is_low_latency(plan) and plan != Sequential()
        return max(worst, run(world, AG, "fused", 8, 32, 32)), counting

    with caplog.at_level(logging.WARNING, "weft"):
        results = emulate(main)
    assert max(worst for worst, _ in results) < BF16
    messages = {r.getMessage() for r in caplog.records}
    assert messages == {f"{op}: sequential instead of {kind}: {NO_ATOMICS}" for op, kind in (("all_reduce", "two_shot"), (AG, "fused"))}  # fmt: skip


def test_multicast_needs_hopper(caplog: Any) -> None:
    def main(world: weft.World) -> None:
        world.backend.capability = 80
        weft.all_reduce(torch.ones(4, 64).bfloat16(), world=world, plan=Multicast())
        world.synchronize()

    with caplog.at_level(logging.WARNING, "weft"):
        emulate(main)
    why = "multicast addresses need compute capability 9.0, and this GPU has 8.0"
    assert {r.getMessage() for r in caplog.records} == {f"all_reduce: sequential instead of multicast: {why}"}


def test_results_of_8_bits_need_ada() -> None:
    def main(world: weft.World) -> None:
        world.backend.capability = 86
        x = torch.ones(4, 64).bfloat16()
        weft.all_reduce_rms_norm_quantized(x, None, torch.ones(64).bfloat16(), "row", world=world)

    with pytest.raises(weft.Unsupported, match=r"float8_e4m3fn need compute capability 8.9, and this GPU has 8.6"):
        emulate(main)


def test_the_signaled_gemm_needs_ampere(caplog: Any) -> None:
    def main(world: weft.World) -> float:
        world.backend.capability = 75
        return run(world, AR, SMALL_SIGNALED, 8, 32, 32)

    with caplog.at_level(logging.WARNING, "weft"):
        assert max(emulate(main)) < BF16
    why = "weft's kernels need compute capability 8.0, and this GPU has 7.5"
    assert {r.getMessage() for r in caplog.records} == {f"{AR}: sequential instead of signaled: {why}"}


@pytest.mark.parametrize(
    ("capability", "signaled", "fused"),
    [(80, (128, 256, 64), (128, 128, 64)), (89, (128, 256, 32), (128, 128, 64)), (90, (128, 256, 64), (128, 256, 64)),
     (100, (128, 256, 64), (128, 256, 64)), (120, (128, 256, 32), (128, 128, 64))],
)  # fmt: skip
def test_tiles_fit_the_memory_of_the_architecture(
    capability: int, signaled: tuple[int, ...], fused: tuple[int, ...]
) -> None:
    for plan, tile in ((Signaled(), signaled), *((plan, fused) for plan in FUSED.values())):
        suited_plan: Any = with_shape_tiles(plan, [4096], 8192, 132, capability)
        assert (suited_plan.tile.block_m, suited_plan.tile.block_n, suited_plan.tile.block_k) == tile
    chosen_plan = Signaled(tile=GemmTile(block_m=64, block_n=128))
    assert with_architecture_tiles(chosen_plan, capability) == chosen_plan, "the caller's tiles must stay"


def test_why_ranks_cannot_count_in_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver determines the reason. Ranks that share a GPU can use counters, and so can ranks without a driver."""
    two = [RankDevice("host", ("a", "b"), index, None) for index in (0, 1)]

    def fake_driver(atomics: int) -> Any:
        def attribute(value: Any, which: int, a: int, b: int) -> int:
            assert which == 3 and {a, b} == {0, 1}
            ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = atomics
            return 0

        return lambda name: SimpleNamespace(cuDeviceGetP2PAttribute=attribute)

    monkeypatch.setattr(cuda.ctypes, "CDLL", fake_driver(0))
    assert cuda._why_no_atomics(two) == f"{NO_ATOMICS} (rank 0)"
    assert cuda._why_no_atomics([two[0], two[0]]) is None
    monkeypatch.setattr(cuda.ctypes, "CDLL", fake_driver(1))
    assert cuda._why_no_atomics(two) is None

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    assert cuda._why_no_atomics(two) is None


def test_an_architecture_is_named_as_nvidia_does() -> None:
    assert architectures.lacks(89, "tma", "these") == "these need compute capability 9.0, and this GPU has 8.9"
    assert architectures.lacks(120, "tma", "these") is None and architectures.dotted(120) == "12.0"


def test_an_unknown_gpu_has_the_features_of_the_next_older_one() -> None:
    ampere, ada, unknown = (architectures.features(capability) for capability in (86, 89, 87))
    assert not unknown.e4m3 and unknown.bf16 and unknown == ampere and ada.e4m3 and not ada.tma
    turing, later = architectures.features(75), architectures.features(130)
    assert not turing.bf16 and turing.shared_kib == later.shared_kib == 99 and later.tma and not later.wgmma
    assert [known for known, can in architectures.FEATURES.items() if can.wgmma] == [architectures.HOPPER]


def test_the_planner_needs_measured_copy_engines() -> None:
    """The profile of a machine over PCIe contains only collectives and GEMMs."""
    moved = ("copy", "barrier", "one_shot", "two_shot")
    whole = made_up_profile(machine=replace(MACHINE, link="pcie"))
    profile = replace(whole, latencies=tuple(x for x in whole.latencies if not x.operation.startswith(moved)))
    planner = Planner(Predictor(profile))
    for op in (RS, AR, "matmul_all_to_all"):
        for mode in ("graph", "eager"):
            decision = planner.decide(op, 8192, 8192, 2048, mode)
            plans = [option.plan for option in decision.options]
            assert any(isinstance(plan, Signaled) for plan in plans)
            by_nccl = (Sequential, Signaled, Decomposed) if op == AR else (Sequential, Signaled)
            assert all(isinstance(plan, by_nccl) and not getattr(plan, "copies", False) for plan in plans)
    assert isinstance(planner.decide(AG, 8192, 8192, 2048, "graph").plan, Sequential)


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_tuning_measures_the_tiles_that_plans_have_there(capability: int) -> None:
    sizes = fitted(SIZES, capability)
    plans = [
        *(plan for op_plans in variants(capability).values() for plan in op_plans if isinstance(plan, Fused)),
        sizes.signaled,
    ]
    assert all(with_architecture_tiles(plan, capability) == plan for plan in plans)
    measured = {(tile.block_m, tile.block_n, tile.block_k) for tile, _ in sizes.tiles}
    tile = sizes.signaled.tile
    assert (tile.block_m, tile.block_n, tile.block_k) in measured
    if capability == 90:
        assert sizes is SIZES
