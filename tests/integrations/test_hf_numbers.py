"""Woven models (`weft.hf`) of which a number changed after weaving: each is followed, or refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import weft
from tests.integrations.test_hf import IDS, KINDS, tiny_model
from tests.integrations.test_hf_moe import KINDS as MIXTURES
from tests.integrations.test_hf_moe import tiny_mixture
from weft import hf

transformers = pytest.importorskip("transformers")
CHANGES = {  # numbers in place of None
    "Mistral": dict(sliding_window=2),
    "Qwen2": dict(use_sliding_window=True, sliding_window=2, max_window_layers=1),
    "Mixtral": dict(sliding_window=2),
    "Qwen3Moe": dict(mlp_only_layers=[0], intermediate_size=96),
}
ROUNDED = 0.03  # how far logits of two models may be that round at other places, relative to their norm


class Change(NamedTuple):
    """Another value of a number of a module, or of the configuration ("config")."""

    owner: str
    name: str
    value: float

    def holder(self, model: Any) -> Any:
        return model.config if self.owner == "config" else model.get_submodule(self.owner)


def changes_of(model: Any) -> Iterator[Change]:
    for owner, holder in (*model.named_modules(), ("config", model.config)):
        for name, value in vars(holder).items():
            if isinstance(value, bool):
                yield Change(owner, name, not value)
            elif isinstance(value, float):
                yield Change(owner, name, value * 1.5 + 0.25)
            elif isinstance(value, int):
                yield from (Change(owner, name, other) for other in (value + 1, value - 1) if other >= 0)


def result(model: Any, *changes: Change) -> torch.Tensor | Exception:
    """Return the logits with these changes, or the error."""
    before = [getattr(change.holder(model), change.name) for change in changes]
    for change in changes:
        setattr(change.holder(model), change.name, change.value)
    try:
        logits: torch.Tensor = model(IDS[:1, :4]).logits.float()
        return logits
    except Exception as error:
        return error
    finally:
        for change, value in zip(changes, before, strict=True):
            setattr(change.holder(model), change.name, value)


def refuses(error: torch.Tensor | Exception, change: Change) -> bool:
    """Return whether the error refuses this change by its name."""
    return f"{change.owner.removeprefix('model.')}.{change.name} was" in str(error)


def wrong(plain: torch.Tensor | Exception, woven: torch.Tensor | Exception, changes: list[Change]) -> str | None:
    """Return what is wrong with the result of a woven model, or None."""
    if isinstance(woven, Exception):
        refused = isinstance(plain, Exception) or any(change.name in str(woven) for change in changes)
        return None if refused else f"{changes}: {woven!r}"
    if isinstance(plain, Exception):
        return f"{changes}: the model itself raises {plain!r}"
    off = ((woven - plain).norm() / plain.norm()).item()
    return f"{changes}: off by {off:.3f}" if off > ROUNDED else None


@pytest.fixture(scope="module")
def world() -> Iterator[weft.World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield weft.init()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [*KINDS, *MIXTURES])
def test_every_number_is_followed_or_refused_by_name(kind: str, world: weft.World) -> None:
    """Numbers that the model itself reads change one at a time. Those that it does not read change together, but for
    those that a woven model refuses, and those that say whether it is trained, which make its draws random, apart."""
    make = tiny_model if kind in KINDS else tiny_mixture
    plain, woven = (make(kind, **CHANGES.get(kind, {})) for _ in range(2))
    hf.weave(woven, world)
    unread, found, read = [], [], 0
    with torch.no_grad():
        before = result(plain)
        for change in changes_of(plain):
            expected = result(plain, change)
            if isinstance(expected, torch.Tensor) and torch.equal(expected, torch.as_tensor(before)):
                unread.append(change)
            else:
                read += 1
                found.append(wrong(expected, result(woven, change), [change]))
        for training in (False, True):
            left = refused = [change for change in unread if (change.name == "training") == training]
            while refused:
                actual = result(woven, *left)
                refused = [change for change in left if refuses(actual, change)]
                left = [change for change in left if change not in refused]
            found.append(wrong(before, actual, left))
            assert len(left) > 10
    assert read > 10 and not [each for each in found if each]
