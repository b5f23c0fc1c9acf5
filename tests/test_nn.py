"""The modules on emulated ranks beside the unsharded ones: outputs, gradients, training, state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import draw
from cases_nn import WholeMLP, emulate, linear_pair, mlp_inference, mlp_training, round_trip, whole_mlp

import weft
from weft.ops.all_gather_matmul import gate_block

SHARDS = [[16, 16], [20, 7], [16, 16, 16], [17, 0, 3]]


@pytest.mark.parametrize("shards", SHARDS)
def test_training_beside_the_unsharded_mlp(shards: list[int]) -> None:
    """40 columns a rank are 2.5 blocks of 16: the last ones are padded."""
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
    for inner in (32, 40, 13):  # whole blocks, padded ones, rows that TMA cannot take
        errors = emulate(lambda world, n=inner: mlp_inference(world, shards, 64, n * world.size), len(shards))
        assert max(errors) < 5e-3, (inner, errors)


@pytest.mark.parametrize("reduce", ["scatter", "all"])
@pytest.mark.parametrize("shards", SHARDS)
def test_linear_layers(shards: list[int], reduce: str) -> None:
    errors = emulate(lambda world: linear_pair(world, shards, 64, 48 * len(shards), reduce), len(shards))
    assert max(errors) < 7e-3, errors  # two ops, one after the other


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


def test_weights_are_drawn_apart_and_biases_alike() -> None:
    def rank(world: weft.World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        row = weft.nn.RowParallelLinear(64, 32, world=world)
        mlp = weft.nn.ParallelMLP(64, 80, world=world)
        blocks = mlp.gate_up.view(-1, 2, gate_block(world), 64)
        assert not blocks[-1, :, 40 % gate_block(world) :].any()
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
        with pytest.raises(RuntimeError, match=r"up_proj.weight: \[80, 32\] is neither .* nor the part \[40, 64\]"):
            mlp.load_state_dict({**state, "up_proj.weight": torch.zeros(80, 32)})
        with pytest.raises(RuntimeError, match='Missing key.*"up_proj.weight"'):
            mlp.load_state_dict({k: v for k, v in state.items() if k != "up_proj.weight"})
        with pytest.raises(RuntimeError, match='Unexpected key.*"up_proj.bias"'):
            mlp.load_state_dict({**state, "up_proj.bias": torch.zeros(80)})
        some = {"down_proj.weight": state["down_proj.weight"], "other": torch.zeros(1)}
        found = mlp.load_state_dict(some, strict=False)
        assert sorted(found.missing_keys) == ["gate_proj.weight", "up_proj.weight"]
        assert found.unexpected_keys == ["other"]

    emulate(rank, 2)
