"""Train layers with Lightning's `ModelParallelStrategy`, 20 steps with torch's tensor-parallel styles and 20 with weft's, and compare
the losses.

torchrun --nproc-per-node N examples/lightning_tp.py       on N GPUs
python examples/lightning_tp.py --gloo                     on two CPU processes
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import ModuleType
from typing import Any

import pytorch_lightning as pl  # pip install ".[lightning]"
import torch
import torch.multiprocessing as mp
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module, style

import weft

STEPS, BATCH, ROUNDING = 20, 2, 2e-2


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Layers(pl.LightningModule):
    """Layers between which the rows of the sequence are split over the ranks: x [batch, rows / ranks, hidden]."""

    def __init__(self, styles: ModuleType, hidden: int, rows: int) -> None:
        super().__init__()
        self.styles, self.hidden, self.rows, self.losses = styles, hidden, rows, [0.0] * 0
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(MLP(hidden, 4 * hidden) for _ in range(4)))

    def configure_model(self) -> None:
        s, mesh = self.styles, self.device_mesh["tensor_parallel"]
        for layer in self.layers:
            plan = dict(
                norm=s.SequenceParallel(),
                gate=s.ColwiseParallel(input_layouts=Shard(1)),
                up=s.ColwiseParallel(input_layouts=Shard(1)),
                down=s.RowwiseParallel(output_layouts=Shard(1)),
            )
            parallelize_module(layer, mesh, plan)

    def training_step(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        ranks, rank = self.trainer.world_size, self.global_rank
        x = batch.chunk(ranks, 1)[rank]
        loss = (self.layers(x).float() - x.float().roll(1, -1)).square().mean() / ranks
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        self.losses.append(total.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        batches = [torch.randn(BATCH, self.rows, self.hidden, generator=draw).bfloat16() for _ in range(STEPS)]
        return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def train(styles: ModuleType, ranks: int) -> Layers:
    gpus = torch.cuda.is_available()
    module = Layers(styles, *((1024, 4096) if gpus else (32, 16)))
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
    trainer = pl.Trainer(
        accelerator="gpu" if gpus else "cpu", devices=ranks, strategy=strategy, precision="bf16-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    return module


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    ranks = int(os.environ["WORLD_SIZE"])
    stock, woven = train(style, ranks), train(weft.parallel, ranks)
    for step, (a, b) in enumerate(zip(stock.losses, woven.losses, strict=True)):
        assert abs(a - b) <= ROUNDING * a, f"step {step}: {b} is not {a}"
    assert len(stock.losses) == STEPS and stock.losses[-1] < stock.losses[0]
    if woven.global_rank == 0:
        print(weft.parallel.report(woven.layers[0]))
        print("torch's", *(f"{loss:.4f}" for loss in stock.losses[:: STEPS // 4]))
        print("weft's ", *(f"{loss:.4f}" for loss in woven.losses[:: STEPS // 4]), flush=True)
    torch.distributed.destroy_process_group()


def gloo_rank(rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getppid() % 20000)
    )  # fmt: skip
    main()


if __name__ == "__main__":
    if sys.argv[1:] == ["--gloo"]:
        mp.spawn(gloo_rank, nprocs=2)
    else:
        main()
