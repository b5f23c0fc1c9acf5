"""A number changes after a model is woven (`weft.hf`). The woven model follows each change or refuses it by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import weft
from tests.integrations.test_hf import IDS, KINDS, run, tiny_model
from tests.integrations.test_hf_moe import KINDS as MIXTURES
from tests.integrations.test_hf_moe import tiny_mixture
from tests.integrations.test_hf_parameters import small
from weft import hf
from weft.integrations.transformers import moe as hf_moe

transformers = pytest.importorskip("transformers")
CHANGES = {  # numbers in place of None
    "Mistral": dict(sliding_window=2),
    "Qwen2": dict(use_sliding_window=True, sliding_window=2, max_window_layers=1),
    "Mixtral": dict(sliding_window=2),
    "Qwen3Moe": dict(mlp_only_layers=[0], intermediate_size=96),
}
ROUNDED = 0.03  # how far logits of two models may be that round at other places, relative to their norm


class Change(NamedTuple):
    """A new value of a number in a module, or in the configuration ("config")."""

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
                yield from (Change(owner, name, value + step) for step in (1, -1) if value + step >= 0)


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
    """Return a description of the fault in a woven model's result, or None."""
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
    """The test changes each number that the original model reads, first separately and then together with all other
    numbers. Numbers that a woven model refuses, and numbers that enable training, whose draws are random, also change
    separately."""
    make = tiny_model if kind in KINDS else tiny_mixture
    plain, woven = (make(kind, **CHANGES.get(kind, {})) for _ in range(2))
    hf.weave(woven, world)
    unread, faults, read = [], [], 0
    with torch.no_grad():
        before = result(plain)
        for change in changes_of(plain):
            expected = result(plain, change)
            if isinstance(expected, torch.Tensor) and torch.equal(expected, torch.as_tensor(before)):
                unread.append(change)
            else:
                read += 1
                faults.append(wrong(expected, result(woven, change), [change]))
        for training in (False, True):
            left = refused = [change for change in unread if (change.name == "training") == training]
            while refused:
                actual = result(woven, *left)
                refused = [change for change in left if refuses(actual, change)]
                left = [change for change in left if change not in refused]
            faults.append(wrong(before, actual, left))
            assert len(left) > 10
    assert read > 10 and not [fault for fault in faults if fault]


@pytest.mark.parametrize(
    ("kind", "names"), [("Qwen3", ("scaling", "variance_epsilon")), ("Mixtral", ("scaling", "top_k"))]
)
def test_numbers_are_followed_on_every_rank(kind: str, names: tuple[str, ...]) -> None:
    """All numbers with these names change together."""

    def main(world: weft.World) -> None:
        plain, woven = small(kind), hf.weave(small(kind), world)
        changes = [change for change in changes_of(plain) if change.name in names]
        with torch.no_grad():
            before, expected, actual = result(plain), result(plain, *changes), result(woven, *changes)
        assert wrong(expected, actual, changes) is None and wrong(before, actual, changes)

    run(main)


def test_changed_limits_are_refused_for_registered_experts() -> None:
    def main(world: weft.World) -> None:
        experts, forward = small("GptOss").model.layers[0].mlp.experts, hf_moe.experts_forward(lambda: world)
        inputs = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with torch.no_grad():
            forward(experts, *inputs)
            experts.limit = 5.0
            with pytest.raises(weft.Unsupported, match="GptOssExperts.limit was 7.0 when .* 5.0 now"):
                forward(experts, *inputs)

    run(main, 1)


def test_draws_that_a_woven_model_does_not_make_are_refused(world: weft.World) -> None:
    model = tiny_mixture("Mixtral", num_hidden_layers=1, router_jitter_noise=0.1)
    with pytest.raises(weft.Unsupported, match=r"MixtralSparseMoeBlock.jitter_noise is 0.1: call model.eval\(\)"):
        hf.weave(model.train(), world)
    hf.weave(model.eval(), world)
    with torch.no_grad(), pytest.raises(weft.Unsupported, match="layers.0.mlp.training was False .* is True now"):
        model.train()(IDS[:1, :4])


def test_compiled_code_follows_a_number(world: weft.World) -> None:
    plain, woven = small("Qwen3"), hf.weave(small("Qwen3"), world)
    compiled = torch.compile(woven, backend="eager", fullgraph=True)
    change = Change("model.layers.0.self_attn", "scaling", 0.75)
    with torch.no_grad():
        before = compiled(IDS[:1, :4], use_cache=False).logits.float()
        change.holder(woven).scaling = change.value
        after = compiled(IDS[:1, :4], use_cache=False).logits.float()
        assert wrong(result(plain), before, []) is None and wrong(result(plain, change), after, [change]) is None
    assert wrong(before, after, [change])
