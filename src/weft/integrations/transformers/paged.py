"""Attention for Transformers' continuous batching, in which one row of tokens contains requests of any lengths.

Without flash-attn, Transformers' continuous batching uses a dense mask of a step's tokens and all cached tokens. This
attention passes the requests' lengths to torch's flash attention instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

OLD, NEW = "paged|weft", "weft_flash"


def paged(model: nn.Module) -> nn.Module:
    """Make the model's continuous batching (`generate_batch`, `ContinuousBatchingManager`) use torch's flash attention,
    whether the model is woven or not. Return the model.

    `paged` registers the attention with Transformers' `AttentionInterface` and sets it as the model's attention. Its
    name is "paged|weft" if continuous batching has its own attentions; Transformers 5.23 and later reject names without
    "flash", so there the name is "weft_flash". The attention supports only continuous batching: call
    `model.set_attn_implementation("sdpa")` before `forward` and `generate`. With "paged|weft" CUDA graphs need
    `ContinuousBatchingConfig(use_cuda_graph=True)`.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = OLD if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else NEW
    AttentionInterface.register(name, attend)  # without a mask function Transformers makes no mask
    config: Any = model.config
    config._attn_implementation = name  # set_attn_implementation would look for a flash package
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
    """Return attention [1, M, heads, D] of query [1, heads, M, D].

    Before Transformers 5.24 key and value [1, kv_heads, M, D] update the cache, which returns the keys and values to
    attend to. Since 5.24 the caller has updated the cache, and passes these keys and values [1, kv_heads, N, D]. Raises
    ValueError outside continuous batching.
    """
    if "cu_seq_lens_q" not in kwargs:
        raise ValueError(
            "the attention that weft.hf.paged sets is only for continuous batching (generate_batch); call "
            'model.set_attn_implementation("sdpa") before other calls'
        )
    if "max_seqlen_q" in kwargs:
        key, value = cache.update(key, value, module.layer_idx, kwargs["read_index"], kwargs["write_index"])
        max_q, max_k, lengths = kwargs["max_seqlen_q"], kwargs["max_seqlen_k"], kwargs["cu_seq_lens_k"]
        if isinstance(lengths, dict):
            kind = "sliding_attention" if sliding_window else "full_attention"
            max_k, lengths = max_k[kind], lengths[kind]
    else:
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx, kwargs=kwargs)
        key, value = (t[0].transpose(0, 1) for t in (key, value))
        max_q, max_k, lengths = kwargs["max_length_q"], kwargs["max_length_k"], kwargs["cu_seq_lens_k"]
    q, starts = query[0].transpose(0, 1), kwargs["cu_seq_lens_q"]
    if q.is_cuda:
        # The queries are the last tokens of each request, so the causal mask aligns the last query with the last key.
        window = dict(window_size_left=sliding_window - 1, window_size_right=0) if sliding_window else {}
        out = torch.ops.aten._flash_attention_forward(
            q, key, value, starts.int(), lengths.int(), max_q, max_k, 0.0, True, False, scale=scaling, **window
        )[0]
    else:
        out = _request_by_request(q, key, value, starts.tolist(), lengths.tolist(), scaling, sliding_window)
    return out[None], None


def _request_by_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: list[int],
    kv_offsets: list[int],
    scale: Any,
    window: int | None,
) -> torch.Tensor:
    """Compute the attention of one request at a time, as a reference: q is [M, heads, D], k and v are [N, kv_heads,
    D]."""
    out = torch.zeros_like(q)
    for a, b, c, d in zip(q_offsets, q_offsets[1:], kv_offsets, kv_offsets[1:], strict=False):
        if a == b:
            continue
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        if window:
            mask = mask.triu(d - c - (b - a) - window + 1)
        queries, keys, values = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        out[a:b] = y[0].transpose(0, 1)
    return out
