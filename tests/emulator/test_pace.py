"""The emulator announces a long call before it runs."""

from __future__ import annotations

import pytest
import torch

import weft
from weft import moe


class Stop(Exception):
    """An exception that replaces the launch."""


def notices(fn, ranks: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def launch(*a: object, **options: object) -> None:
        raise Stop

    monkeypatch.setattr("weft.backends.emulated.EmulatedBackend.launch", launch)
    with pytest.raises(Stop):
        weft.spmd(fn, ranks, backend="emulated")
    return [record.getMessage() for record in caplog.records]


def test_a_call_of_hours_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has the sizes of a real layer."""

    def main(world: weft.World) -> None:
        x, w = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (8192 // world.size, 28672 // world.size))
        weft.all_gather_matmul(x, w, world=world)

    (notice,) = notices(main, 4, caplog, monkeypatch)
    assert notice.startswith("all_gather_matmul of M, N, K = 8192, 7168, 4096 takes about ")
    assert " hours in the emulator; smaller sizes: " in notice


def test_a_layer_of_experts_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(world: weft.World) -> None:
        x, ids = torch.empty(512, 2048, dtype=torch.bfloat16), torch.zeros(512, 1, dtype=torch.int32)
        w13, w2 = (torch.zeros(1, *shape, dtype=torch.bfloat16) for shape in ((1536, 2048), (2048, 768)))
        moe.moe(x, ids, torch.ones(512, 1), moe.pack(w13, world=world), w2, world=world)

    (notice,) = notices(main, 2, caplog, monkeypatch)
    assert notice.startswith("moe of M, N, K = 512, 768, 2048 takes about ") and " minutes in the emulator; " in notice


def test_a_call_of_seconds_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: weft.World) -> None:
        weft.all_gather_matmul(torch.zeros(16, 32).bfloat16(), torch.zeros(16, 32).bfloat16(), world=world)

    weft.spmd(main, 2, backend="emulated")
    assert not caplog.records


def test_a_plan_of_the_librarys_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def main(world: weft.World) -> None:
        x, w = torch.zeros(1024, 1024).bfloat16(), torch.zeros(1024, 1024).bfloat16()
        weft.all_gather_matmul(x, w, world=world, plan="sequential")

    weft.spmd(main, 2, backend="emulated")
    assert not caplog.records
