"""Attention for Transformers' continuous batching: requests of any lengths in one row of tokens.

Without flash-attn installed, Transformers' own continuous batching takes attention with a dense mask of all tokens of a
step to all that it reads. This one takes the lengths, by the flash attention that torch brings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

OLD, NEW = "paged|weft", "weft_flash"


def paged(model: nn.Module) -> nn.Module:
    """The model itself; its continuous batching (`generate_batch`, `ContinuousBatchingManager`) attends by torch's
    flash attention from now on, woven or not.

    Registers the attention with Transformers' `AttentionInterface` and sets it: as "paged|weft" where continuous
    batching has attentions of its own; where it has not (Transformers 5.23), as "weft_flash", since it refuses names
    without "flash" there. It serves continuous batching alone: `model.set_attn_implementation("sdpa")` goes back, for
    `forward` and `generate`. With "paged|weft" CUDA graphs are to be asked for:
    `ContinuousBatchingConfig(use_cuda_graph=True)`.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = OLD if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else NEW
    AttentionInterface.register(name, attend)  # and no function that makes masks: then none is made
    config: Any = model.config
    config._attn_implementation = name  # set_attn_implementation would look for a package of a name with "flash"
    return model


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[1, M, heads, D] of query [1, heads, M, D]. key, value [1, kv_heads, M, D] go to the cache, which says what is
    read back. Raises ValueError outside continuous batching."""
    if cache is None:
        raise ValueError(
            "the attention that weft.hf.paged sets is for continuous batching (generate_batch); "
            'model.set_attn_implementation("sdpa") before other calls'
        )
    if "max_seqlen_q" in kwargs:
        key, value = cache.update(key, value, module.layer_idx, kwargs["read_index"], kwargs["write_index"])
        longest_q, longest_k, lengths = kwargs["max_seqlen_q"], kwargs["max_seqlen_k"], kwargs["cu_seq_lens_k"]
        if isinstance(lengths, dict):
            kind = "sliding_attention" if sliding_window else "full_attention"
            longest_k, lengths = longest_k[kind], lengths[kind]
    else:
        key, value = (t[0].transpose(0, 1) for t in cache.update(key, value, module.layer_idx, kwargs=kwargs))
        longest_q, longest_k, lengths = kwargs["max_length_q"], kwargs["max_length_k"], kwargs["cu_seq_lens_k"]
    q, starts = query[0].transpose(0, 1), kwargs["cu_seq_lens_q"]
    if q.is_cuda:
        # Queries are the last of their request's tokens, so the causal mask ends in its last corner.
        window = dict(window_size_left=sliding_window - 1, window_size_right=0) if sliding_window else {}
        out = torch.ops.aten._flash_attention_forward(
            q, key, value, starts.int(), lengths.int(), longest_q, longest_k, 0.0, True, False, scale=scaling, **window
        )[0]
    else:
        out = _one_by_one(q, key, value, starts.tolist(), lengths.tolist(), scaling, sliding_window)
    return out[None], None


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: list[int], ends: list[int], scale: Any, window: int | None
) -> torch.Tensor:
    """The definition, request by request: q [M, heads, D], k, v [N, kv_heads, D]."""
    out = torch.zeros_like(q)
    for a, b, c, d in zip(at, at[1:], ends, ends[1:], strict=False):
        if a == b:
            continue
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        if window:
            seen = seen.triu(d - c - (b - a) - window + 1)
        mine, keys, values = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        y = F.scaled_dot_product_attention(mine, keys, values, attn_mask=seen, scale=scale, enable_gqa=True)
        out[a:b] = y[0].transpose(0, 1)
    return out
