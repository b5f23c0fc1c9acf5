"""Attention of a batch's new tokens to the cache, by torch's kernels: flash attention over requests of any lengths where it
runs, else scaled_dot_product_attention request by request."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..world import World
from .cache import Part


def attend(
    world: World, qkv: torch.Tensor, part: Part, keys: torch.Tensor, values: torch.Tensor, heads: int, out: torch.Tensor,
    flash: bool,
) -> torch.Tensor:  # fmt: skip
    """[rows, heads D]: the first `heads` heads of qkv [rows, ..], each token attending to its request's tokens up to itself
    in the cache (keys, values [slots, max_len, kv_heads, D]); in `out`, or, with `flash`, in memory of its own. What it
    gives for padding means nothing (in `out`: zeros)."""
    rows, d = part.rows, keys.shape[-1]
    q = qkv[:, : heads * d].view(rows, heads, d)
    if flash:
        return _flash(q, part, keys, values).view(rows, heads * d)
    batch = part.batch  # as it is now: with a padded layout the next call may have another

    def each() -> None:
        at = 0
        for n, slot, end in zip(batch.lengths, batch.slots, batch.ends, strict=True):
            k, v = (t[slot, :end].transpose(0, 1)[None] for t in (keys, values))
            mine = q[at : at + n].transpose(0, 1)[None]
            seen = None if n == 1 else torch.ones(n, end, dtype=torch.bool, device=q.device).tril(end - n)
            y = F.scaled_dot_product_attention(mine, k, v, attn_mask=seen, enable_gqa=heads != keys.shape[-2])
            out[at : at + n] = y[0].transpose(0, 1).reshape(n, heads * d)
            at += n
        out[at:] = 0

    world.call(each, [qkv, keys, values], [out], world.current_stream())
    return out


def _flash(q: torch.Tensor, part: Part, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """torch.nn.attention.varlen's kernel. Slots lie one after another in the cache, so that a request's keys begin at row
    kv_at of [slots max_len, kv_heads, D]; kv_len, not the next request's kv_at, says where they end."""
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, part.cu_q, part.kv_at, part.max_q, part.max_k, 0.0, True, False, seqused_k=part.kv_len
    )[0]


def flash_works(world: World, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `_flash` runs here, and gives what scaled_dot_product_attention gives: tried on two small requests."""
    if world.device.type != "cuda":
        return False
    g = torch.Generator(world.device).manual_seed(0)
    q, k, v = (torch.randn(n, h, head_dim, dtype=dtype, device=world.device, generator=g) for n, h in ((5, 4), (24, 2), (24, 2)))  # fmt: skip
    i32 = dict(dtype=torch.int32, device=world.device)
    table = [torch.tensor(t, **i32) for t in ([0] * 5, [0] * 5, [0, 2, 5], [16, 0, 0], [7, 3], [0, 0])]  # type: ignore[arg-type]
    part = Part(None, 5, 2, 3, 8, *table)  # type: ignore[arg-type]
    try:
        got = _flash(q, part, k.view(3, 8, 2, head_dim), v.view(3, 8, 2, head_dim))
    except (RuntimeError, TypeError) as error:
        world.say_once(f"attention request by request: flash attention does not run here ({error})")
        return False
    wanted = []
    for lo, n, at, end in ((0, 2, 16, 7), (2, 3, 0, 3)):
        a, b, c = (t.transpose(0, 1)[None].float() for t in (q[lo : lo + n], k[at : at + end], v[at : at + end]))
        seen = torch.ones(n, end, dtype=torch.bool, device=world.device).tril(end - n)
        wanted.append(F.scaled_dot_product_attention(a, b, c, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    if (got.float() - torch.cat(wanted)).abs().max() > 0.02:
        world.say_once("attention request by request: flash attention over requests of any lengths is wrong here")
        return False
    return True
