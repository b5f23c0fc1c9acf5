"""After its parameters are written in any of the usual ways, a woven model (`weft.hf`) computes with the new
parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from tests.gates import covered
from tests.integrations.test_hf import IDS, run, tiny_model
from tests.integrations.test_hf_moe import tiny_mixture
from weft import hf
from weft.integrations.transformers import moe as hf_moe
from weft.integrations.transformers.shards import ColumnShards, RowShard

transformers = pytest.importorskip("transformers")
DENSE, MIXTURES = ("Llama", "Qwen2", "Qwen3"), ("Qwen3Moe", "GptOss")


def small(kind: str) -> Any:
    return (tiny_model if kind in DENSE else tiny_mixture)(kind, num_hidden_layers=1)


def other_parameters(kind: str) -> dict[str, torch.Tensor]:
    """Return another model's parameters, all of which differ from the first one's."""
    return {name: t.flip(0) * 0.75 + 0.03125 for name, t in small(kind).state_dict().items()}


# -- ways to write -----------------------------------------------------------------------------------------------------
def load(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state)


def assign(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)


def attributes(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as attributes of their modules."""
    for name in dict(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        yield name, getattr(model.get_submodule(owner), leaf)


def copy_in_place(model: Any, state: dict[str, torch.Tensor]) -> None:
    for name, p in attributes(model):
        p.copy_(state[name])


def write_data(model: Any, state: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        p.data.copy_(state[name])


def merge(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Merge adapters: add the product to `data`, and assign the result."""
    for name, p in model.named_parameters():
        p.data *= 0
        p.data += state[name]


def set_data(model: Any, state: dict[str, torch.Tensor]) -> None:
    for name, p in attributes(model):
        p.data = state[name].clone()


def put_others(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Replace parameters as FSDP does: a module receives a new parameter, possibly at the address of an earlier one."""
    for name in dict(model.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        module = model.get_submodule(owner)
        delattr(module, leaf)
        setattr(module, leaf, nn.Parameter(state[name].clone(), requires_grad=False))


WAYS: tuple[Callable[[Any, dict[str, torch.Tensor]], None], ...] = (
    load, assign, copy_in_place, write_data, merge, set_data, put_others,
)  # fmt: skip


@covered("Qwen3Moe-2", covering="[GptOss-2]")
@covered("Qwen3-2", covering="[Llama-2]")
@pytest.mark.parametrize(("kind", "ranks"), [("Llama", 2), ("Qwen2", 1), ("Qwen3", 2), ("Qwen3Moe", 2), ("GptOss", 2)])
def test_written_parameters_are_used(kind: str, ranks: int) -> None:
    """Whole models give the same bits as a model that is woven with the new parameters. The models' parameters are
    views on several ranks, and parts of a stack on a single rank. Two ways to write alternate."""
    states = [other_parameters(kind), small(kind).state_dict()]

    def main(world: weft.World) -> None:
        with torch.no_grad():
            wanted = []
            for state in states:
                fresh = small(kind)
                fresh.load_state_dict(state)
                wanted.append(hf.weave(fresh, world)(IDS).logits)
            assert (wanted[0] - wanted[1]).norm() > 0.1 * wanted[1].norm()
            model = hf.weave(small(kind), world)
            for i, write in enumerate((*WAYS, *WAYS[:1])):
                write(model, states[i % 2])
                logits = model(IDS).logits
                assert (logits == wanted[i % 2]).all(), write.__name__
                assert all((t == states[i % 2][name]).all() for name, t in model.state_dict().items())
            hf.unweave(model)
            assert all(type(p) is nn.Parameter for p in model.parameters())

    run(main, ranks)


def test_invisible_writes_are_packed_on_request() -> None:
    state = other_parameters("Qwen3Moe")

    def main(world: weft.World) -> None:
        with torch.no_grad():
            model = hf.weave(small("Qwen3Moe"), world)
            before = model(IDS).logits
            for name, p in model.named_parameters():
                torch.Tensor.data.__get__(p).copy_(state[name])
            hf.repack(model)
            logits = model(IDS).logits
            fresh = small("Qwen3Moe")
            fresh.load_state_dict(state)
            expected = hf.weave(fresh, world)(IDS).logits
        assert (logits == expected).all() and not (before == expected).all()
        experts, forward = small("Qwen3Moe").model.layers[0].mlp.experts, hf_moe.experts_forward(lambda: world)
        inputs = torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
        with torch.no_grad():
            first_result = forward(experts, *inputs)
            torch.Tensor.data.__get__(experts.gate_up_proj).zero_()
            assert (forward(experts, *inputs) == first_result).all() and not forward(hf.repack(experts), *inputs).any()

    run(main, 1)


def test_packed_experts_keep_their_memory() -> None:
    """A captured graph reads that memory, which also remains in use after `load_state_dict` without a pass."""

    def main(world: weft.World) -> None:
        model = hf.weave(small("GptOss"), world)
        packed = [p for p in model._weft.parameters if p.packed]
        experts = packed[0]._bind.__self__
        held = experts.w13, experts.w2, experts.b13
        model.load_state_dict(other_parameters("GptOss"))
        fresh = hf_moe.RankExperts(model.model.layers[0].mlp.experts, world)
        assert (experts.w13, experts.w2, experts.b13) == held
        assert all((t == again).all() for t, again in zip(held, (fresh.w13, fresh.w2, fresh.b13), strict=True))

    run(main, 2)


@pytest.mark.parametrize("kind", MIXTURES)
def test_registered_experts_follow_every_tensor_of_the_module(kind: str) -> None:
    def main(world: weft.World) -> None:
        model = small(kind)
        experts, forward = model.model.layers[0].mlp.experts, hf_moe.experts_forward(lambda: world)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        ids, weights = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
        with torch.no_grad():
            before = forward(experts, x, ids, weights)
            for name in dict(experts.named_parameters()):
                for write in (lambda p: p.mul_(2), lambda p: p.data.mul_(2), None):
                    if write is None:
                        value = getattr(experts, name).detach() * 2
                        delattr(experts, name)
                        setattr(experts, name, nn.Parameter(value, requires_grad=False))
                    else:
                        write(getattr(experts, name))
                    after = forward(experts, x, ids, weights)
                    alone = copy.deepcopy(experts)
                    del alone._weft_experts
                    assert (after == forward(alone, x, ids, weights)).all() and not (after == before).all(), name
                    before = after

    run(main, 1)


def test_registered_experts_of_emulated_ranks_are_each_ranks_own() -> None:
    """In the original forward pass each rank holds half of the experts, and the sum of both halves is the whole
    result."""

    def main(world: weft.World) -> None:
        hf.register_experts(world)
        world.exchange(None)
        model = small("Qwen3Moe")
        experts = model.model.layers[0].mlp.experts
        x, ids = (
            torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
            torch.tensor([[0, 5]] * 4),
        )
        weights = torch.full((4, 2), 0.5, dtype=torch.bfloat16)
        with torch.no_grad():
            expected = experts(x, ids, weights).float()
            count = experts.num_experts // world.size
            for name, p in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(p.detach().split(count)[world.rank].clone()))
            model.config._experts_implementation = "weft"
            local_ids = ids - world.rank * count
            part = experts(x, local_ids.masked_fill((local_ids < 0) | (local_ids >= count), count), weights).float()
            assert experts._weft_experts.world is world
            parts = world.exchange(part)
        assert (sum(parts) - expected).norm() <= 2e-2 * expected.norm()

    run(main)


def test_another_dtype_is_named() -> None:
    def main(world: weft.World) -> None:
        model = hf.weave(small("Llama"), world)
        with torch.no_grad():
            model.half()
            with pytest.raises(
                weft.Unsupported, match=r"layers.0.self_attn.q_norm|proj.weight was bfloat16 .* is float16"
            ):
                model(IDS)
            assert hf.weave(hf.unweave(model), world)(IDS).logits.dtype == torch.float16

    run(main)


def test_saved_and_loaded(tmp_path: Any) -> None:
    """Parameters in one stack are saved one by one."""

    def main(world: weft.World) -> None:
        model = hf.weave(small("Llama"), world)
        model.save_pretrained(tmp_path)
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
        assert all((again[name] == t).all() for name, t in model.state_dict().items())

    run(main, 1)


# -- split by Transformers ---------------------------------------------------------------------------------------------
@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def split_linear(mesh: DeviceMesh, columns: int, dim: int = 0) -> nn.Linear:
    linear = nn.Linear(8, columns, bias=False)
    local = linear.weight.detach().chunk(2, dim)[0].clone()
    linear.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False))
    return linear


def test_linears_that_are_split_are_views_of_one_stack(mesh: DeviceMesh) -> None:
    """Every way to write a parameter updates the stack, which needs no memory in addition to the parameters."""
    world: Any = SimpleNamespace(
        size=2, rank=0, batch_invariant=False, backend=SimpleNamespace(capturing=lambda: False)
    )
    linears = [split_linear(mesh, n) for n in (8, 4, 6)]
    columns, x = ColumnShards(linears, world), torch.randn(3, 8)
    (stack,) = columns.weights

    def check() -> None:
        columns.parameters.refresh(world, lambda module: "layers.0")
        parts = [linear.weight.to_local() for linear in linears]
        expected = torch.cat([x @ part.t() for part in parts], 1)
        assert torch.allclose(columns(x), expected) and columns.weights[0] is stack
        assert {part.untyped_storage().data_ptr() for part in parts} == {stack.untyped_storage().data_ptr()}

    with torch.no_grad():
        check()
        linears[0].weight.to_local().mul_(2)
        check()
        linears[1].weight.to_local().data.zero_()
        check()
        linears[1].weight.copy_(linears[1].weight + 1)
        check()
        value = DTensor.from_local(torch.randn(3, 8), mesh, [Shard(0)], run_check=False)
        linears[2].load_state_dict({"weight": value}, assign=True)
        check()
        linears[0].weight = nn.Parameter(DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)], run_check=False))
        check()
        linears[0].weight = nn.Parameter(DTensor.from_local(torch.randn(2, 8), mesh, [Shard(0)], run_check=False))
        with pytest.raises(weft.Unsupported, match=r"layers.0.weight was float32 \[4, 8\] .* is float32 \[2, 8\]"):
            check()
    with pytest.raises(weft.Unsupported, match="along dimension 1 only"):
        RowShard(split_linear(mesh, 4), world)
    with pytest.raises(weft.Unsupported, match="along dimension 0 only"):
        ColumnShards([split_linear(mesh, 4, 1)], world)


def test_a_change_inside_a_capture_is_refused(mesh: DeviceMesh) -> None:
    world: Any = SimpleNamespace(size=2, rank=0, backend=SimpleNamespace(capturing=lambda: True))
    linear = split_linear(mesh, 8)
    columns = ColumnShards([linear], world)
    columns.parameters.refresh(world, lambda module: "layers.0")
    linear.weight = nn.Parameter(DTensor.from_local(torch.randn(4, 8), mesh, [Shard(0)], run_check=False))
    with pytest.raises(weft.WeftError, match="call the model once before"):
        columns.parameters.refresh(world, lambda module: "layers.0")
