"""What bench/models.py compares: both sides give the same, on emulated ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from cases import distance
from cases_models import MIXTURES, made
from cases_nn import emulate

import weft
from weft.models import Batch, Cache

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import models as bench

HALF, FLOAT16 = 4e-3, torch.float16


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_libraries_give_what_the_decoder_gives(kind: str) -> None:
    """Of a model that no forward pass went through before, which has no table of rotary positions yet."""
    config, lengths, ids = MIXTURES[kind], (7, 4), torch.arange(11) * 5 % 96

    def rank(world: weft.World) -> float:
        model = made(world, config, dtype=FLOAT16)
        cache = Cache(config, world=world, slots=2, max_len=7, dtype=FLOAT16)
        layout = model.layout(Batch.prefill(lengths), cache, "sequence")
        with torch.no_grad():
            got = bench.mixture_by_libraries(model, ids, layout).clone()
            want = model.hidden(ids, layout)[0]
            world.synchronize()
        return distance(got, want)

    assert max(emulate(rank, 2)) < HALF
