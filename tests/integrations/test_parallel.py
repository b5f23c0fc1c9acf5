"""`weft.parallel` implements torch's tensor-parallel styles with weft's ops. The tests run on emulated ranks, and over
gloo against torch's own styles."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module, style

import weft
from tests.emulated.cases import distance
from weft.integrations import torch_parallel_styles as parallel

BF = torch.bfloat16
B, S, H, INNER = 2, 8, 16, 32


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.w1, self.w3 = nn.Linear(H, INNER, bias=bias), nn.Linear(H, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, H, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


def whole(dtype: torch.dtype = torch.float64) -> Block:
    torch.manual_seed(0)
    block = Block()
    with torch.no_grad():
        block.norm.weight.add_(torch.randn(H) * 0.1)
    return block.to(dtype)


def plan(styles: Any, dim: int, reduce: bool = True) -> dict[str, Any]:
    out = Shard(dim) if reduce else Replicate()
    return dict(
        norm=styles.SequenceParallel(sequence_dim=dim),
        w1=styles.ColwiseParallel(input_layouts=Shard(dim)),
        w3=styles.ColwiseParallel(input_layouts=Shard(dim)),
        w2=styles.RowwiseParallel(output_layouts=out),
    )


# -- on emulated ranks -------------------------------------------------------------------------------------------------
@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Return a mesh of two ranks for torch, while ops run on the emulated World of the current thread."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(parallel, "world_of", lambda name, x: thread_local.world)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


thread_local = threading.local()


def split(block: nn.Module, mesh: DeviceMesh, rank: int, styles: dict[str, Any]) -> nn.Module:
    """Apply the styles, and replace every parameter by this rank's shard, because all fake ranks are rank 0."""
    full = {name: p.detach().clone() for name, p in block.named_parameters()}
    for one in styles.values():
        one.src_data_rank = None
    parallelize_module(block, mesh, styles)
    for name, p in list(block.named_parameters()):
        assert isinstance(p, DTensor)
        place = p.placements[0]
        part = full[name].chunk(2, place.dim)[rank].contiguous() if isinstance(place, Shard) else full[name]
        owner, leaf = name.rsplit(".", 1)
        local_part = DTensor.from_local(part, mesh, p.placements, run_check=False)
        block.get_submodule(owner).register_parameter(leaf, nn.Parameter(local_part))
    return block


def gradients(block: nn.Module, rank: int, sums: bool) -> dict[str, torch.Tensor]:
    """Return the local gradients of a split module's parameters, or the same shards of a whole module's gradients."""
    gradients_by_name = {}
    for name, p in block.named_parameters():
        grad = p.grad
        assert grad is not None
        if isinstance(grad, DTensor):
            gradients_by_name[name] = grad.to_local()
            continue
        dim = {"w1": 0, "w3": 0, "w2": 1}.get(name.split(".")[0]) if name != "w2.bias" else None
        gradients_by_name[name] = grad if dim is None else grad.chunk(2, dim)[rank]
    return gradients_by_name


@pytest.mark.parametrize(("dim", "amp"), [(1, False), (0, False), (1, True)])
def test_a_block_and_its_gradients(mesh: DeviceMesh, dim: int, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = (torch.randn(B, S, H, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    reference = whole()
    want_x = x.double().requires_grad_()
    expected = reference(want_x)
    (expected * g.double()).sum().backward()
    dtype = torch.float32 if amp else BF
    calls: list[str] = []
    gather = parallel.all_gather_matmul_with_gathered
    monkeypatch.setattr(
        parallel, "all_gather_matmul_with_gathered", lambda *a, **k: (calls.append("gather"), gather(*a, **k))[1]
    )

    def summed_over(world: weft.World) -> None:
        """Sum the norm's gradients over the emulated ranks, because torch has only one rank here."""
        monkeypatch.setattr(
            parallel.dist, "all_reduce", lambda t, group: t.copy_(sum(thread_local.world.exchange(t.clone())))
        )

    def main(world: weft.World) -> tuple[Any, ...]:
        thread_local.world = world
        summed_over(world)
        block = split(whole(dtype), mesh, world.rank, plan(parallel, dim))
        own_x = x.chunk(2, dim)[world.rank].to(dtype).clone().requires_grad_()
        with torch.autocast("cpu", BF, enabled=amp):
            y = block(own_x)
        (y.float() * g.chunk(2, dim)[world.rank]).sum().backward()
        world.synchronize()
        report = parallel.report(block)
        return y.detach(), own_x.grad, gradients(block, world.rank, True), report

    results = weft.spmd(main, 2, backend="emulated")
    assert len(calls) == 2, "w1 and w3 take one gather"
    for rank, (y, dx, grads, report) in enumerate(results):
        assert report.count("all-gather + GEMM by weft") == 2 and "GEMM + reduce-scatter by weft" in report, report
        assert "norm: on local rows" in report
        assert want_x.grad is not None
        assert distance(y.double(), expected.detach().chunk(2, dim)[rank]) < 1e-2
        assert distance(dx.double(), want_x.grad.chunk(2, dim)[rank]) < 2e-2
        for name, grad in gradients(reference, rank, False).items():
            assert distance(grads[name].double(), grad) < 2e-2, name


def test_a_gather_is_shared_within_one_pass(mesh: DeviceMesh) -> None:
    def main(world: weft.World) -> None:
        thread_local.world = world
        block = split(whole(BF), mesh, world.rank, plan(parallel, 1))
        x = torch.randn(B, S // 2, H).to(BF)
        with torch.no_grad():
            first_result = block.w1(x).clone()
            x.mul_(2)
            doubled = block.w1(x)
            bias = block.w1.bias.to_local()
            assert distance(doubled.float() - bias.float(), 2 * (first_result.float() - bias.float())) < 2e-2
            held = parallel._gathered[world.name]
            assert block.w3(x) is not None and parallel._gathered[world.name] is held
            assert block.w3(x) is not None and parallel._gathered[world.name] is not held
            del x, held
        assert world.name not in parallel._gathered, "nothing is held once x is gone"

    weft.spmd(main, 2, backend="emulated")


@pytest.mark.parametrize("write", ["in place", "by out="])
def test_a_gather_of_a_written_tensor_is_not_shared(mesh: DeviceMesh, write: str) -> None:
    """If a second module reads the tensor for the first time, it does not share the gather either."""

    def main(world: weft.World) -> None:
        thread_local.world = world
        block = split(whole(BF), mesh, world.rank, plan(parallel, 1))
        x = torch.randn(B, S // 2, H, generator=torch.Generator().manual_seed(world.rank)).to(BF)
        with torch.no_grad():
            block.w1(x)
            if write == "in place":
                x.zero_()
            else:
                torch.mul(x, 0, out=x)
            assert (block.w3(x) == block.w3.bias.to_local()).all()

    weft.spmd(main, 2, backend="emulated")


def test_no_gather_is_shared_across_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a graph is replayed, activations that were gathered outside it have been freed or overwritten."""
    gathers: list[nn.Module] = []

    def gather(x: torch.Tensor, weight: torch.Tensor, bias: Any, **_: Any) -> torch.Tensor:
        gathers.append(module)
        return x @ weight.t()

    monkeypatch.setattr(parallel, "all_gather_matmul", gather)
    monkeypatch.setattr(parallel, "all_gather_matmul_with_gathered", lambda x, *args, **_: (gather(x, *args), x))
    for captures in ((False, True), (True, False), (True, True), (False, False)):
        x, modules = torch.randn(3, H), (nn.Linear(H, 4), nn.Linear(H, 4))
        gathers.clear()
        for module, is_capturing in zip(modules, captures, strict=True):
            backend = SimpleNamespace(capturing=lambda is_capturing=is_capturing: is_capturing)
            world: Any = SimpleNamespace(name="captured", size=1, backend=backend)
            operands = parallel.LinearOperands(x, module.weight.detach(), None)
            parallel.gathered_linear(world, module, x, operands, 0, "auto")
        assert gathers == list(modules if any(captures) else modules[:1]), captures


def test_an_unknown_plan_is_refused_by_name() -> None:
    auto = "all_gather_matmul: plan 'fusd' is not \"auto\", one of \\['decomposed'"
    for make_style, says in (
        (lambda: parallel.ColwiseParallel(plan="fusd"), auto),
        (lambda: parallel.RowwiseParallel(output_layouts=Shard(1), plan="flag_gated"), "scatter: plan 'flag_gated'"),
        (lambda: parallel.RowwiseParallel(plan="fusd"), "matmul_all_reduce: plan 'fusd'"),
        (lambda: parallel.ColwiseParallel(plan=weft.plans.Signaled()), "all_gather_matmul: Signaled"),
        (lambda: weft.torch.async_tp(plan="flag_gated"), "matmul_reduce_scatter: plan 'flag_gated'"),
    ):
        with pytest.raises(ValueError, match=says):
            make_style()
    assert parallel.RowwiseParallel(output_layouts=Shard(1), plan="signaled").plan == "signaled"


def test_in_inference_mode_every_module_gathers(mesh: DeviceMesh) -> None:
    """Tensors in inference mode do not record writes."""

    def main(world: weft.World) -> None:
        thread_local.world = world
        block = split(whole(BF), mesh, world.rank, plan(parallel, 1))
        with torch.inference_mode():
            x = torch.randn(B, S // 2, H, generator=torch.Generator().manual_seed(world.rank)).to(BF)
            first_result, expected = block.w1(x), block.w1(x.clone())
            x.zero_()
            assert (first_result == expected).all() and (block.w1(x) == block.w1.bias.to_local()).all()
            assert (block.w3(x) == block.w3.bias.to_local()).all() and block(x).shape == x.shape

    weft.spmd(main, 2, backend="emulated")


def test_calls_left_to_torch_are_reported(mesh: DeviceMesh) -> None:
    def main(world: weft.World) -> None:
        thread_local.world = world
        block = split(whole(torch.float32), mesh, world.rank, plan(parallel, 1))
        cases: list[tuple[str, Any, str]] = [
            ("w1", torch.randn(B, S // 2, H), "of float32"),
            ("w2", torch.randn(INNER // 2), "1 dimension"),
        ]
        for name, x, why in cases:
            operands, reason = parallel._linear_operands(world, block.get_submodule(name), x, (Shard(1),))
            assert operands is None and reason == why
        assert parallel._linear_operands(None, block.w1, cases[0][1], (Shard(1),)) == (None, "a group on cpu")

    weft.spmd(main, 2, backend="emulated")


def test_gemm_and_all_reduce(mesh: DeviceMesh) -> None:
    def main(world: weft.World) -> tuple[torch.Tensor, str]:
        thread_local.world = world
        block = split(whole(BF), mesh, world.rank, plan(parallel, 1, reduce=False))
        x = torch.randn(B, S, INNER, generator=torch.Generator().manual_seed(3)).to(BF)
        return block.w2(x.chunk(2, -1)[world.rank]).detach(), parallel.report(block)

    x = torch.randn(B, S, INNER, generator=torch.Generator().manual_seed(3)).to(BF)
    expected = whole().w2(x.double())
    for y, report in weft.spmd(main, 2, backend="emulated"):
        assert (
            distance(y.double(), expected) < 1e-2
            and "w2: GEMM + all-reduce by weft" in report
            and "not called yet" in report
        )


# -- over gloo ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "served"), [(BF, "by weft"), (torch.float32, "torch's own: of float32")])
def test_a_deep_copy_computes_with_its_own_parameters(one_rank: DeviceMesh, dtype: torch.dtype, served: str) -> None:
    """A pickled model would lose the style, so pickling is refused."""
    block = parallelize_module(whole(dtype), one_rank, plan(parallel, 1))
    twin, x = copy.deepcopy(block), torch.randn(B, S, H).to(dtype)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
        for name, linear in (("w1", twin.w1), ("w3", twin.w3), ("w2", twin.w2), ("norm", twin.norm)):
            rows = torch.randn(B, S, INNER).to(dtype) if name == "w2" else x
            assert torch.equal(linear(rows), 2 * block.get_submodule(name)(rows)), name
        fresh = parallelize_module(whole(dtype), one_rank, plan(parallel, 1))
        assert torch.equal(block(x), fresh(x))
    assert parallel.report(twin).count(served) == 3 and "norm: on local rows" in parallel.report(twin)
    with pytest.raises(TypeError, match=r"style of weft.parallel cannot be pickled; save its state_dict\(\)"):
        pickle.dumps(block)


def over_gloo(rank: int, store: str) -> None:
    """Train three steps from the same state dict. weft's ops in bfloat16 equal torch's own up to rounding; the float32
    operations that weft does not compute are equal bit for bit."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for dtype, served in ((torch.float32, "torch's own: of float32"), (BF, "by weft")):
        seen = []
        for styles in (style, parallel):
            block = parallelize_module(whole(dtype), mesh, plan(styles, 1))
            optimizer, losses = torch.optim.SGD(block.parameters(), lr=0.1), []
            for step in range(3):
                x = torch.randn(B, S, H, generator=torch.Generator().manual_seed(step)).to(dtype).chunk(2, 1)[rank]
                loss = block(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            seen.append((losses, {name: p.full_tensor() for name, p in block.state_dict().items()}))
        (torch_losses, before), (weft_losses, after) = seen
        assert parallel.report(block).count(served) == 3 and "norm: on local rows" in parallel.report(block)
        if dtype == BF:
            assert (
                max(abs(a - b) / a for a, b in zip(torch_losses, weft_losses, strict=True)) < 1e-2
                and torch_losses[0] != torch_losses[2]
            )
            assert max(distance(after[name].double(), p.double()) for name, p in before.items()) < 2e-2
        else:
            assert torch_losses == weft_losses and all(torch.equal(p, after[name]) for name, p in before.items())
    embedding = parallel.RowwiseParallel(input_layouts=Replicate())
    parallelize_module(block, mesh, {})
    table = parallelize_module(nn.Embedding(8, H), mesh, embedding)
    assert parallel.report(table) == "(itself): torch's own: Embedding" and table(torch.arange(8)).shape == (8, H)
    dist.destroy_process_group()


def test_two_ranks_over_gloo(tmp_path: Path) -> None:
    mp.spawn(over_gloo, (str(tmp_path / "store"),), nprocs=2)


def test_lightning_trains_as_with_torchs_styles() -> None:
    pytest.importorskip("pytorch_lightning")
    example = Path(__file__).parents[2] / "examples" / "lightning_tp.py"
    run = subprocess.run([sys.executable, example, "--gloo"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.count("by weft") == 3, run.stderr[-2000:]
