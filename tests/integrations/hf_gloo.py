"""Two ranks over gloo, for tests of `weft.hf` on models that Transformers has split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import weft

called: list[int] = []  # rows of weft.hf.styles' matmul_all_reduce


def matmul_all_reduce(x: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
    called.append(x.shape[0])
    return weft.matmul_all_reduce(x, *operands, **options)


def on_two_ranks(fn: Callable[[], None], store: Path) -> None:
    """Run `fn`, a function at module level, in two processes."""
    mp.spawn(_rank, (str(store), fn), nprocs=2)


def _rank(rank: int, store: str, fn: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    with mock.patch("weft.integrations.transformers.styles.matmul_all_reduce", matmul_all_reduce):
        fn()
    dist.destroy_process_group()


def split(model: Any, **options: Any) -> Any:
    """Return the model as Transformers splits it over all ranks."""
    from transformers.distributed import DistributedConfig

    over = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    load_options = dict(state_dict=model.state_dict(), dtype=model.dtype, distributed_config=over, **options)
    return type(model).from_pretrained(None, config=model.config, **load_options).eval()
