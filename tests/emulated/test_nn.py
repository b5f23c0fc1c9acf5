"""The modules on emulated ranks, compared with the unsharded modules: outputs, gradients, training, state dicts."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import weft
from tests.emulated.cases import draw
from tests.emulated.cases_nn import (
    WholeMLP,
    emulate,
    linear_pair,
    mlp_inference,
    mlp_training,
    round_trip,
    rows_of_rank,
    whole_mlp,
)
from weft.backends.cuda import CudaBackend
from weft.backends.uploads import Uploads
from weft.ops.all_gather_matmul import op as all_gather_matmul

SHARDS = [[16, 16], [20, 7], [16, 16, 16], [17, 0, 3]]


@pytest.mark.parametrize("shards", SHARDS)
def test_training_beside_the_unsharded_mlp(shards: list[int]) -> None:
    """40 columns per rank are 2.5 blocks of 16: the last block is padded."""
    ratios = emulate(lambda world: mlp_training(world, shards, 64, 40 * len(shards)), len(shards))
    assert max(ratios) < 1.5, ratios


@pytest.mark.parametrize("plan", ["sequential", "decomposed", "fused"])
def test_every_plan(plan: str) -> None:
    shards = [16, 16]
    ratios = emulate(lambda world: mlp_training(world, shards, 64, 64, plan, steps=1, rate=0.1), 2)
    errors = emulate(lambda world: mlp_inference(world, shards, 64, 64, plan), 2)
    assert max(ratios) < 1.5 and max(errors) < 5e-3


@pytest.mark.parametrize("shards", SHARDS)
def test_inference(shards: list[int]) -> None:
    for inner in (32, 40, 13):  # whole blocks, padded blocks, and rows that TMA cannot load
        errors = emulate(lambda world, n=inner: mlp_inference(world, shards, 64, n * world.size), len(shards))
        assert max(errors) < 5e-3, (inner, errors)


@pytest.mark.parametrize("reduce", ["scatter", "all"])
@pytest.mark.parametrize("shards", SHARDS)
def test_linear_layers(shards: list[int], reduce: str) -> None:
    errors = emulate(lambda world: linear_pair(world, shards, 64, 48 * len(shards), reduce), len(shards))
    assert max(errors) < 7e-3, errors  # the error of two successive ops


@pytest.mark.parametrize("shards", [[16, 16], [20, 7]])
def test_the_gathered_activation_is_kept(shards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are right without a second all-gather, also when compiled."""

    def never(*args: Any) -> None:
        raise AssertionError("gathered again")

    monkeypatch.setattr(all_gather_matmul, "gather_in_backward", never)

    def rank(world: weft.World) -> tuple[float, float]:
        training = functools.partial(mlp_training, world, shards, 64, 80, steps=1, rate=0.1, keep=True)
        return max(training(), training(compiled="aot_eager")), linear_pair(world, shards, 64, 96, keep=True)

    torch._dynamo.reset()
    assert all(ratio < 1.5 and error < 7e-3 for ratio, error in emulate(rank, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_state_dict_round_trip(ranks: int) -> None:
    emulate(lambda world: round_trip(world, 64, 40 * ranks), ranks)


def test_whole_state_dict_loads_into_the_whole_module() -> None:
    def rank(world: weft.World) -> None:
        state = weft.nn.full_state_dict(weft.nn.ParallelMLP(64, 80, world=world))
        WholeMLP(64, 80).load_state_dict(state)
        pair = torch.nn.Sequential(
            weft.nn.ColumnParallelLinear(64, 80, world=world),
            weft.nn.RowParallelLinear(80, 64, world=world, bias=False),
        )
        whole = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 64, bias=False))
        whole.load_state_dict(weft.nn.full_state_dict(pair))
        twice = torch.nn.ModuleDict({"a": pair[0], "b": pair[0]})
        assert {tuple(t.shape) for n, t in weft.nn.full_state_dict(twice).items() if n.endswith("weight")} == {(80, 64)}

    emulate(rank, 2)


def test_whole_state_dict_of_a_wrapped_module() -> None:
    """Wrappers strip their names from state dicts, not from named_modules()."""

    def rank(world: weft.World) -> None:
        state = whole_mlp(64, 80)
        model = torch.nn.Sequential(checkpoint_wrapper(weft.nn.ParallelMLP(64, 80, world=world)))
        model.load_state_dict({f"0.{k}": v for k, v in state.items()})
        full = weft.nn.full_state_dict(model)
        assert full.keys() == {f"0.{k}" for k in state}
        assert all(torch.equal(full[f"0.{k}"], v) for k, v in state.items())
        assert model.state_dict()["0.up_proj.weight"].shape == (40, 64), "the module must have this rank's part"
        again = torch.nn.Sequential(checkpoint_wrapper(weft.nn.ParallelMLP(64, 80, world=world)))
        again.load_state_dict(full)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

    emulate(rank, 2)


class Adapted(weft.nn.ColumnParallelLinear):
    """A module with its own parameter, buffer and submodule."""

    def __init__(self, world: weft.World) -> None:
        super().__init__(64, 80, world=world)
        self.lora_a = torch.nn.Parameter(torch.randn(2, 64))
        self.lora_b = torch.nn.Linear(2, 4)
        self.register_buffer("scale", torch.randn(1))


def test_a_subclass_saves_and_loads_its_own_tensors() -> None:
    def rank(world: weft.World) -> None:
        torch.manual_seed(0)
        saved, again = (torch.nn.Sequential(Adapted(world)) for _ in range(2))
        calls: list[str] = []
        again[0].register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
        order = [name for name, _ in again.named_parameters()]
        for state in (saved.state_dict(), weft.nn.full_state_dict(saved)):
            assert {k.removeprefix("0.") for k in state} == {
                "weight", "bias", "lora_a", "lora_b.weight", "lora_b.bias", "scale"
            }  # fmt: skip
            again.load_state_dict(copy.deepcopy(state))
            loaded = again.state_dict()
            assert all(torch.equal(loaded[k], v) for k, v in saved.state_dict().items())
        assert calls == ["before"] * 2
        again.load_state_dict({k: v.double() for k, v in saved.state_dict().items()}, assign=True)
        assert again[0].lora_a.dtype == torch.float64 and again[0].weight.dtype == torch.bfloat16
        assert order == [name for name, _ in again.named_parameters()], "an optimizer's state relies on this order"
        with pytest.raises(RuntimeError, match=r'Missing key.*"0.lora_a"'):
            again.load_state_dict({k: v for k, v in saved.state_dict().items() if k != "0.lora_a"})
        with pytest.raises(RuntimeError, match=r'Unexpected key.* "weight"'):
            again.load_state_dict({**saved.state_dict(), "weight": torch.zeros(1)})

    emulate(rank, 2)


def test_wholes_and_parts_in_one_module_are_refused() -> None:
    """A checkpoint with half the intermediate size is refused: its gate and up look like one rank's shards, but its
    down is unsharded."""

    def rank(world: weft.World) -> None:
        mlp, state = weft.nn.ParallelMLP(64, 80, world=world), whole_mlp(64, 40)
        before = copy.deepcopy(mlp.state_dict())
        with pytest.raises(
            RuntimeError, match=r"some tensors are unsharded and some are shards .*up_proj.weight \[40, 64\]"
        ):
            mlp.load_state_dict({**state, "down_proj.weight": whole_mlp(64, 80)["down_proj.weight"]})
        assert all(torch.equal(v, before[k]) for k, v in mlp.state_dict().items())

    emulate(rank, 2)


def test_clipped_by_the_norm_of_the_whole_model() -> None:
    def rank(world: weft.World) -> torch.Tensor:
        model = torch.nn.Sequential(
            weft.nn.ColumnParallelLinear(64, 80, world=world), weft.nn.RowParallelLinear(80, 64, world=world),
            weft.nn.ParallelMLP(64, 80, world=world),
        )  # fmt: skip
        assert weft.nn.clip_grad_norm_(model, 1.0, world=world) == 0, "without gradients the norm is zero"
        whole, gradient = weft.nn.full_state_dict(model), copy.deepcopy(model)
        for n, name in enumerate(whole):
            whole[name] = draw(n, *whole[name].shape) * (1 + n)
        gradient.load_state_dict(whole)
        for p, g in zip(model.parameters(), gradient.parameters(), strict=True):
            p.grad = g.detach().clone()
        total = torch.cat([t.double().flatten() for t in whole.values()]).norm()
        norm = weft.nn.clip_grad_norm_(model, 2 * float(total), world=world)
        assert abs(norm / total - 1) < 1e-5
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradient.parameters(), strict=True))
        assert torch.equal(weft.nn.clip_grad_norm_(model, 1.0, world=world), norm), (
            "clipping must return the norm before clipping"
        )
        again = weft.nn.clip_grad_norm_(model, 1.0, world=world)
        assert abs(again - 1) < 1e-2
        return torch.cat([model[1].bias.grad, norm[None]])

    assert len({tuple(t.tolist()) for t in emulate(rank, 4)}) == 1, "every rank must scale by the same factor"


def test_weights_are_drawn_apart_and_biases_alike() -> None:
    def rank(world: weft.World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        row = weft.nn.RowParallelLinear(64, 32, world=world)
        mlp = weft.nn.ParallelMLP(64, 80, world=world)
        blocks = mlp.gate_up.view(-1, 2, world.backend.scale.interleave, 64)
        assert not blocks[-1, :, 40 % world.backend.scale.interleave :].any()
        assert mlp.gate_up.abs().max() <= 64**-0.5
        return row.weight.detach(), row.bias.detach(), mlp.get_shard("up_proj.weight").detach()  # type: ignore[union-attr]

    (w0, b0, u0), (w1, b1, u1) = emulate(rank, 2)
    assert torch.equal(b0, b1)
    assert not torch.equal(w0, w1) and not torch.equal(u0, u1)
    assert abs(u0.float().std() - 64**-0.5 / 3**0.5) < 0.01


def test_frozen_weights_still_pass_gradients_to_the_input() -> None:
    def rank(world: weft.World) -> None:
        mlp = weft.nn.ParallelMLP(64, 80, world=world).requires_grad_(False)
        x = draw(1, 8, 64).requires_grad_()
        mlp(x).sum().backward()
        assert x.grad is not None and x.grad.any() and mlp.gate_up.grad is None
        mlp.requires_grad_(True)
        assert not mlp(x.detach()).isnan().any()

    emulate(rank, 2)


def test_deepcopy_shares_the_world_and_nothing_else() -> None:
    def rank(world: weft.World) -> None:
        mlp = weft.nn.ParallelMLP(64, 80, world=world)
        twin = copy.deepcopy(torch.nn.Sequential(mlp))[0]
        assert twin.world is world and twin.gate_up.data_ptr() != mlp.gate_up.data_ptr()
        x = draw(1, 8, 64)
        with torch.no_grad():
            assert torch.equal(twin(x), mlp(x))

    emulate(rank, 2)


def test_a_deep_copy_of_every_module_computes_with_its_own_parameters() -> None:
    def rank(world: weft.World) -> None:
        for module, width in (
            (weft.nn.ColumnParallelLinear(64, 32, world=world), 64),
            (weft.nn.RowParallelLinear(64, 32, world=world), 32),
            (weft.nn.ParallelMLP(64, 80, world=world), 64),
            (weft.moe.MoE(64, 32, 4, 2, world=world, bias=True, capacity_factor=1.0), 64),
        ):
            x, twin = draw(1, 8, width), copy.deepcopy(module)
            with torch.no_grad():
                before = module(x)
                for p in twin.parameters():
                    p.zero_()
                assert not twin(x).any() and torch.equal(module(x), before)

    emulate(rank, 2)


class Holder(torch.nn.Module):
    """A user's module that contains the World."""

    def __init__(self, world: weft.World) -> None:
        super().__init__()
        self.world, self.weight = world, torch.nn.Parameter(torch.ones(64))


def test_a_world_is_neither_copied_nor_pickled() -> None:
    def rank(world: weft.World) -> None:
        twin = copy.deepcopy(torch.nn.Sequential(Holder(world), weft.nn.ParallelMLP(64, 80, world=world)))
        assert twin[0].world is world and twin[1].world is world
        with pytest.raises(TypeError, match=r"a World cannot be pickled; save a module.s state_dict\(\) instead"):
            pickle.dumps(twin)

    emulate(rank, 2)


def test_from_linear_keeps_frozen_parameters_and_accepts_a_dtype() -> None:
    def rank(world: weft.World) -> None:
        linear = torch.nn.Linear(64, 80)
        linear.weight.requires_grad_(False)
        column = weft.nn.ColumnParallelLinear.from_linear(linear, world=world, dtype=torch.float16)
        assert torch.equal(column.weight, rows_of_rank(world, linear.weight, [40, 40]).half())
        assert not column.weight.requires_grad and column.bias.requires_grad  # type: ignore[union-attr]
        with pytest.raises(TypeError, match="ColumnParallelLinear: dtype torch.float32; bfloat16 and float16"):
            weft.nn.ColumnParallelLinear.from_linear(linear, world=world)
        with pytest.raises(TypeError, match="ParallelMLP: dtype torch.float32"):
            weft.nn.ParallelMLP(64, 80, world=world, dtype=torch.float32)

    emulate(rank, 2)


def test_autocast_does_not_reach_the_librarys_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, F.linear would return a dtype that differs from the op's output."""
    backend = CudaBackend.__new__(CudaBackend)
    backend.device, backend._like = torch.device("cpu"), {}
    backend.uploads = Uploads(backend.device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *_: pytest.fail("rewritten by autocast"))
    x, w = draw(1, 8, 64), draw(2, 16, 64)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert torch.equal(backend.linear(x, w, None, SimpleNamespace(cuda_stream=0)), x @ w.t())


def test_bad_input() -> None:
    def rank(world: weft.World) -> None:
        with pytest.raises(ValueError, match="intermediate_size 81 is not divisible by the world size 2"):
            weft.nn.ParallelMLP(64, 81, world=world)
        with pytest.raises(ValueError, match="out_features 81 is not"):
            weft.nn.ColumnParallelLinear(64, 81, world=world)
        with pytest.raises(ValueError, match="in_features 81 is not"):
            weft.nn.RowParallelLinear(81, 64, world=world)
        with pytest.raises(ValueError, match="reduce 'sum'"):
            weft.nn.RowParallelLinear(80, 64, world=world, reduce="sum")
        mlp, state = weft.nn.ParallelMLP(64, 80, world=world), whole_mlp(64, 80)
        with pytest.raises(RuntimeError, match=r"up_proj.weight: \[80, 32\] is neither .* nor the shard \[40, 64\]"):
            mlp.load_state_dict({**state, "up_proj.weight": torch.zeros(80, 32)})
        with pytest.raises(RuntimeError, match='Missing key.*"up_proj.weight"'):
            mlp.load_state_dict({k: v for k, v in state.items() if k != "up_proj.weight"})
        with pytest.raises(RuntimeError, match='Unexpected key.*"up_proj.bias"'):
            mlp.load_state_dict({**state, "up_proj.bias": torch.zeros(80)})
        some = {"down_proj.weight": state["down_proj.weight"], "other": torch.zeros(1)}
        incompatible = mlp.load_state_dict(some, strict=False)
        assert sorted(incompatible.missing_keys) == ["gate_proj.weight", "up_proj.weight"]
        assert incompatible.unexpected_keys == ["other"]

    emulate(rank, 2)
