"""The switches that make this GPU behave like an older one, and the checks that use the switches."""

from __future__ import annotations

import logging
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

import weft
from tests.emulated.cases import distance, draw
from tests.gpu import gpu_older, older
from tests.gpu.gpu_record import with_results
from weft.backends.cuda import CudaBackend
from weft.check.offline import OfflineDriver, standing_in
from weft.lang.descriptors import for_gpu, tiles_of


@weft.jit
def twice(x_desc, y_desc):
    x_desc, y_desc = tiles_of(x_desc), tiles_of(y_desc)
    y_desc.store([0, 0], x_desc.load([0, 0]) * 2)
    tl.debug_barrier()


def test_code_for_an_older_gpu_is_assembled_for_the_one_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(CUDABackend, "make_cubin", CUDABackend.make_cubin)
    # This statement replaces the dictionary's entry. monkeypatch would later restore an attribute to its old value,
    # which would hide the environment from then on.
    monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    older.as_gpu(80, 90)
    assert triton.knobs.cache.dir == str(tmp_path / "sm_80_on_sm_90")
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    tile = TensorDescriptor.from_tensor(x, [16, 64])
    args = for_gpu(dict(x_desc=tile, y_desc=tile), 80)
    with standing_in(OfflineDriver(80)):
        compiled = twice.warmup(**args, num_warps=4, grid=(1,))
    assert ".target sm_80" in compiled.asm["ptx"] and "cp.async.bulk" not in compiled.asm["ptx"]
    assert "ld.global.v4" in compiled.asm["ptx"] or "cp.async.cg.shared.global" in compiled.asm["ptx"], (
        "loads must have 16 bytes"
    )
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    flags = struct.unpack_from("<I", compiled.asm["cubin"], 48)[0]
    assert 90 in (flags & 0xFF, flags >> 8 & 0xFF), hex(flags)  # the field depends on the ELF version


def test_without_peer_access_there_is_no_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_access(backend: Any) -> None:
        backend.peers_unsupported = backend.symmetric_unsupported = None

    for hidden, peers in (("atomics", None), ("peers", "the tests hide the peers' memory")):
        with monkeypatch.context() as patch:
            patch.setattr(CudaBackend, "_compare_devices", full_access)
            patch.setattr(CudaBackend, "symmetric", CudaBackend.symmetric)
            older.without(hidden)
            backend: Any = CudaBackend.__new__(CudaBackend)
            backend._compare_devices()
            assert backend.peers_unsupported == peers and "the tests hide" in backend.symmetric_unsupported
            if peers:
                with pytest.raises(AssertionError, match="without peer access"):
                    backend.symmetric(16, "x")


def names(peers_unsupported: str | None, symmetric_unsupported: str | None) -> list[str]:
    backend = SimpleNamespace(
        capability=80, peers_unsupported=peers_unsupported, symmetric_unsupported=symmetric_unsupported
    )
    world: Any = SimpleNamespace(size=4, backend=backend)
    return [name for name, _, _ in gpu_older.checks(world)]


def test_the_checks_are_those_that_the_switches_leave() -> None:
    nccl, stored, counted = names("hidden", "hidden"), names(None, "hidden"), names(None, None)
    for fewer, larger in ((nccl, stored), (stored, counted)):
        assert len(fewer) > 20 and set(fewer) < set(larger) and len(set(larger)) == len(larger)
    assert not any("fused" in name or "copies" in name for name in stored)
    assert any("signaled" in name for name in nccl) and any("low latency" in name for name in stored)


def test_a_check_that_fell_back_to_another_plan_fails() -> None:
    def falls_back() -> float:
        logging.getLogger("weft").warning("all_reduce: sequential instead of fused: why")
        return 0.0

    assert gpu_older.as_planned(lambda: 0.5) == 0.5
    with pytest.raises(AssertionError, match="sequential instead of fused: why"):
        gpu_older.as_planned(falls_back)


def test_rows_of_a_switch_have_a_place_of_their_own() -> None:
    row = dict(check="a", ranks=4, gpus=1, outcome="passed", date="", seconds=1, parts={}, like=", compiled for sm_80")
    results = dict(
        tree="t" * 40,
        machine="1 x GPU",
        versions=dict(triton="3.6.0"),
        date="",
        minutes={},
        trouble=[],
        fuzz=[],
        rows=[row],
    )
    assert list(with_results(results, {})["checks"]) == ["4 ranks on 1 GPU, compiled for sm_80"]


def test_the_timed_ways_multiply() -> None:
    """Every way to compute the GEMM is checked twice."""

    def main(world: weft.World) -> dict[str, float]:
        x, w = draw(1, 256, 128), draw(2, 512, 128)
        out, expected, errors = world.empty((256, 512), x.dtype), x.float() @ w.float().t(), {}
        for name, run_way in gpu_older.ways(world, x, w, out).items():
            for _ in range(2):
                out.zero_()
                run_way()
                world.synchronize()
                error = (
                    distance(out.float().norm(), expected.norm())
                    if "tiles" in name
                    else distance(out.float(), expected)
                )
                errors[name] = max(errors.get(name, 0.0), error)
        return errors

    (errors,) = weft.spmd(main, 1, backend="emulated")
    assert {"rows, a wave a group", "tiles, one group", "no signals"} < errors.keys() and len(errors) >= 9
    assert max(errors.values()) < gpu_older.BF16, errors
