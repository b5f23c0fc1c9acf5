"""Mixtures of experts with FSDP2: experts are distributed over the ranks, and `fully_shard` shards everything else
over the same ranks. The tests run on two CPU processes over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from weft import moe

PAGE = Path(__file__).parents[2] / "docs" / "moe.md"
H, INNER, E, K, VOCAB, S, RANKS, STEPS = 16, 8, 4, 2, 12, 6, 2, 4


class Block(nn.Module):
    def __init__(self, world: weft.World) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.experts = moe.MoE(H, INNER, E, K, world=world, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (H,))).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.experts(F.rms_norm(x, (H,)).flatten(0, 1)).view_as(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder like Mixtral's: attention, then top-2 of the experts."""

    def __init__(self, world: weft.World) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(VOCAB, H), nn.ModuleList(Block(world) for _ in range(2))
        self.head = nn.Linear(H, VOCAB, bias=False)
        for layer in (block.experts for block in self.blocks):
            assert isinstance(layer, moe.MoE)
            state = {"gate.weight": torch.randn(E, H), "experts.gate_up_proj": torch.randn(E, 2 * INNER, H) * 0.2}
            layer.load_experts(state | {"experts.down_proj": torch.randn(E, H, INNER) * 0.2})
        self.to(torch.bfloat16).requires_grad_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        count = RANKS * tokens[:, 1:].numel()  # of all ranks, because gradients are sums
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count


def train(model: nn.Module, rank: int, to_sum: list[nn.Parameter]) -> list[float]:
    """Return the losses of all ranks' tokens. The gradients of the parameters `to_sum` are summed over the ranks
    here."""
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (RANKS, 2, S), generator=torch.Generator().manual_seed(step % 2))[rank]
        loss = model(tokens)
        loss.backward()
        for p in to_sum:
            assert p.grad is not None
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    return losses


def over_gloo(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    world = weft.init()
    plain = Decoder(world)
    expected = train(plain, rank, [p for name, p in plain.named_parameters() if not name.endswith((".w13", ".w2"))])
    model = Decoder(world)
    (code,) = re.findall(r"<!-- FSDP2 -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(code, dict(model=model, mesh=init_device_mesh("cpu", (RANKS,))))
    for part in (*model.blocks, model):
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum with factors
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert {name.rpartition(".")[2] for name in whole} == {"w13", "w2"} and "blocks.0.experts.router" in sharded
    actual = train(model, rank, [])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert expected[-1] < 0.9 * expected[0]
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        full = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(full, q, rtol=1e-4, atol=1e-4, msg=name)
    dist.destroy_process_group()


def test_experts_beside_fully_shard_over_gloo(tmp_path: Path) -> None:
    """The code on the page gives the same losses and parameters as training without FSDP."""
    mp.spawn(over_gloo, (str(tmp_path / "store"),), nprocs=RANKS)
