"""How a batch's new tokens attend to the cache.

long       for prompts and chunks of many tokens (`cache.is_long`) in a batch that the host knows: the fastest library
           (ops/attention/libraries.py) computes one request at a time, the chunk's own tokens with a causal mask and
           earlier tokens without a mask, and weft merges both. Lengths are multiples of a step, so that a library that
           builds a plan for each length (cuDNN) builds few plans
flash      torch's flash attention over requests of any lengths, which it reads from tables on the device
request    scaled_dot_product_attention for one request at a time, where flash attention does not run
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.attention.libraries import CUDNN
from ..ops.attention.segmented import AttentionConfig, KeyValues, merge_partials
from ..ops.attention.segmented import attend as partial
from ..world import World
from .cache import Part, Rows


def attend(
    world: World,
    qkv: torch.Tensor,
    part: Part,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    out: torch.Tensor,
    flash: bool,
) -> torch.Tensor:
    """Return [rows, heads D], the attention of the first `heads` heads of qkv [rows, ..]. Each token attends to its
    request's tokens in the cache up to itself: keys and values [slots, max_len, kv_heads, D]. The result is `out`, or
    the tensor that a kernel returned. Rows of padding are undefined."""
    rows, d, single = part.rows, keys.shape[-1], part.single.rows
    q = qkv[:, : heads * d].view(rows, heads, d)
    config = AttentionConfig((), heads, keys.shape[-2], d, q.dtype, d**-0.5)
    if part.long and (flash or not single) and fastest(world, config):
        if single:
            out.view(q.shape)[:single].copy_(_flash(q[:single], part.single, keys, values))
        _long(world, config, qkv, q, part, keys, values, out.view(q.shape))
        return out
    if flash:
        if single == 0 or single == rows:
            return _flash(q, part.single if single else part.several, keys, values).reshape(rows, heads * d)
        out.view(q.shape)[:single].copy_(_flash(q[:single], part.single, keys, values))
        out.view(q.shape)[single:].copy_(_flash(q[single:], part.several, keys, values))
        return out
    chunks = part.chunks  # read only once, since a layout that is filled again gets new chunks

    def attend_to_requests() -> None:
        out.zero_()
        for row, n, slot, end in chunks:
            k, v = (t[slot, :end].transpose(0, 1)[None] for t in (keys, values))
            queries = q[row : row + n].transpose(0, 1)[None]
            mask = None if n == 1 else torch.ones(n, end, dtype=torch.bool, device=q.device).tril(end - n)
            y = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=heads != keys.shape[-2])
            out[row : row + n] = y[0].transpose(0, 1).reshape(n, heads * d)

    world.call(attend_to_requests, [qkv, keys, values], [out], world.current_stream())
    return out


def fastest(world: World, config: AttentionConfig) -> bool:
    """Return whether this machine supports cuDNN's attention, which is expected to be faster than flash attention."""
    return world.device.type == "cuda" and config.usable(world, "forward", CUDNN.min_rows)[0] is CUDNN


def _long(
    world: World,
    config: AttentionConfig,
    qkv: torch.Tensor,
    q: torch.Tensor,
    part: Part,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention for one request at a time. q, a view of qkv, and out are [rows, heads, D]."""
    for row, n, slot, end in part.chunks:
        if row < part.single.rows:
            continue
        queries, result, start = q[row : row + n], out[row : row + n], end - n
        partials = [
            partial(world, config, 0, queries, KeyValues(keys[slot, lo:hi], values[slot, lo:hi]), causal)
            for lo, hi, causal in ((start, end, True), (0, start, False))
            if lo < hi
        ]
        if len(partials) > 1:
            merge_partials(world, partials, None, result, world.empty((config.heads, n), torch.float32))
        else:
            world.copy(result, partials[0].out, world.current_stream())


def _flash(q: torch.Tensor, region: Rows, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Call the kernel of torch.nn.attention.varlen. The keys of a request begin at row kv_at of the flattened cache
    [slots max_len, kv_heads, D], and kv_len, not the next request's kv_at, is their number."""
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, region.cu_q, region.kv_at, region.max_q, region.max_k, 0.0, True, False, seqused_k=region.kv_len
    )[0]


def flash_works(world: World, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `_flash` runs on this GPU and agrees with scaled_dot_product_attention for a chunk of a request, a
    whole request, and single tokens."""
    if world.device.type != "cuda":
        return False

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=world.device)

    g = torch.Generator(world.device).manual_seed(0)
    q, keys, values = (
        torch.randn(*shape, head_dim, dtype=dtype, device=world.device, generator=g)
        for shape in ((5, 4), (3, 8, 2), (3, 8, 2))
    )
    several = Rows(5, 3, 8, ints(0, 2, 5), ints(16, 0, 0), ints(7, 3))
    single = Rows(2, 1, 8, ints(0, 1, 2), ints(8, 16, 0), ints(5, 8))
    expected = []
    for row, n, slot, end in ((0, 2, 2, 7), (2, 3, 0, 3), (0, 1, 1, 5), (1, 1, 2, 8)):
        a, b, c = (t.transpose(0, 1)[None].float() for t in (q[row : row + n], keys[slot, :end], values[slot, :end]))
        mask = torch.ones(n, end, dtype=torch.bool, device=world.device).tril(end - n)
        expected.append(F.scaled_dot_product_attention(a, b, c, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    try:
        actual = torch.cat([_flash(q, several, keys, values), _flash(q[:2], single, keys, values)])
    except (RuntimeError, TypeError) as error:
        world.log_once(f"attention runs request by request: flash attention does not run on this GPU ({error})")
        return False
    if (actual.float() - torch.cat(expected)).abs().max() > 0.02:
        world.log_once(
            "attention runs request by request: flash attention over requests of any lengths is wrong on this GPU"
        )
        return False
    return True
