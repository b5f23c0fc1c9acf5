"""Test `weft.spmd` on GPUs, which ranks share if there are too few. The examples run there as a user starts them.
gpu_main.py, which gpu/run.sh starts, checks every op on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

import weft
from tests.gpu import gpu_run
from weft.plans import OneShot

ROOT = Path(__file__).parents[2]
FIRST_USES = dict(
    any=lambda y: y.bool().any(), sum=lambda y: y.double().sum(), norm=lambda y: y.norm(), var=lambda y: y.var(), cumsum=lambda y: y.cumsum(1),
    topk=lambda y: y.topk(5), argmax=lambda y: y.argmax(1), sort=lambda y: y.sort(), median=lambda y: y.median(1), softmax=lambda y: y.softmax(1),
    randn=torch.randn_like, layer_norm=lambda y: torch.nn.functional.layer_norm(y, y.shape[1:]),
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


def first_uses(world: weft.World) -> torch.Tensor:
    """Run a rank's first operations while its kernel waits for the last rank's kernel. The rank's operations must not
    delay the last rank."""
    y = torch.ones(3, 1024, device=world.device)
    weft.all_reduce(y, world=world, plan=OneShot(programs=3))
    for use in FIRST_USES.values():
        world.synchronize()
        world.exchange(None)
        if world.rank == world.size - 1:
            time.sleep(0.3)
        total = weft.all_reduce(y, world=world, plan=OneShot(programs=3))
        if world.rank < world.size - 1:
            use(y)
    world.synchronize()
    return total


def fails(world: weft.World) -> None:
    if world.rank == 1:
        raise KeyError("mine")
    time.sleep(100)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_spmd(ranks: int) -> None:
    """Ranks that wait for each other return their results on the CPU; a rank that fails ends the other ranks."""
    for total in weft.spmd(first_uses, ranks, backend="shared"):
        assert total.device.type == "cpu" and torch.equal(total, torch.full((3, 1024), float(ranks)))
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="KeyError: 'mine'"):
        weft.spmd(fails, ranks, backend="shared")


@pytest.mark.parametrize("example", gpu_run.EXAMPLES)
def test_example(example: str) -> None:
    run = [*gpu_run.torchrun(2), str(ROOT / "examples" / f"{example}.py")]
    env = os.environ | {"WEFT_SHARE_GPU": "1"}
    done = subprocess.run(run, capture_output=True, text=True, timeout=220, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
