"""Attention of a batch's new tokens to the cache.

long       prompts and chunks of many tokens (`cache.is_long`) in a batch that is known on the host: the fastest
           library (ops/attention/libraries.py) request by request, a chunk's own tokens with a causal mask, those
           before it without, and one merge. A library that makes a plan for each length (cuDNN) makes few
flash      torch's flash attention over requests of any lengths, which it reads from tables on the device
others     scaled_dot_product_attention request by request, where that does not run
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ops.attention.libraries import CUDNN
from ..ops.attention.segmented import Heads, Keys, merged
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
    """[rows, heads D]: the first `heads` heads of qkv [rows, ..], each token attending to its request's tokens up to
    itself in the cache (keys, values [slots, max_len, kv_heads, D]). In `out`, or, where one kernel does all, in its
    own memory. What padding gets means nothing."""
    rows, d, single = part.rows, keys.shape[-1], part.single.rows
    q = qkv[:, : heads * d].view(rows, heads, d)
    of = Heads((), heads, keys.shape[-2], d, q.dtype, d**-0.5)
    if part.long and (flash or not single) and fastest(world, of):
        if single:
            out.view(q.shape)[:single].copy_(_flash(q[:single], part.single, keys, values))
        _long(world, of, qkv, q, part, keys, values, out.view(q.shape))
        return out
    if flash:
        if single == 0 or single == rows:
            return _flash(q, part.single if single else part.several, keys, values).reshape(rows, heads * d)
        out.view(q.shape)[:single].copy_(_flash(q[:single], part.single, keys, values))
        out.view(q.shape)[single:].copy_(_flash(q[single:], part.several, keys, values))
        return out
    pieces = part.pieces  # as they are now: with a layout that is filled again the next call may have others

    def each() -> None:
        out.zero_()
        for row, n, slot, end in pieces:
            k, v = (t[slot, :end].transpose(0, 1)[None] for t in (keys, values))
            mine = q[row : row + n].transpose(0, 1)[None]
            seen = None if n == 1 else torch.ones(n, end, dtype=torch.bool, device=q.device).tril(end - n)
            y = F.scaled_dot_product_attention(mine, k, v, attn_mask=seen, enable_gqa=heads != keys.shape[-2])
            out[row : row + n] = y[0].transpose(0, 1).reshape(n, heads * d)

    world.call(each, [qkv, keys, values], [out], world.current_stream())
    return out


def fastest(world: World, of: Heads) -> bool:
    """Whether a library is there that is faster than flash attention."""
    return world.device.type == "cuda" and of.able(world, "forward", CUDNN.least)[0] is CUDNN


def _long(
    world: World,
    of: Heads,
    qkv: torch.Tensor,
    q: torch.Tensor,
    part: Part,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """q, a view of qkv, and out [rows, heads, D]."""
    for row, n, slot, end in part.pieces:
        if row < part.single.rows:
            continue
        mine, to, start = q[row : row + n], out[row : row + n], end - n
        found = [
            partial(world, of, 0, mine, Keys(keys[slot, lo:hi], values[slot, lo:hi]), causal)
            for lo, hi, causal in ((start, end, True), (0, start, False))
            if lo < hi
        ]
        if len(found) > 1:
            merged(world, found, None, to, world.empty((of.heads, n), torch.float32))
        else:
            world.copy(to, found[0].out, world.current_stream())


def _flash(q: torch.Tensor, region: Rows, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """torch.nn.attention.varlen's kernel. Slots lie one after another in the cache, so that a request's keys begin at
    row kv_at of [slots max_len, kv_heads, D]; kv_len, not the next request's kv_at, says where they end."""
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, region.cu_q, region.kv_at, region.max_q, region.max_k, 0.0, True, False, seqused_k=region.kv_len
    )[0]


def flash_works(world: World, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `_flash` runs here, and gives what scaled_dot_product_attention gives: tried on a chunk of a request and
    a whole one, and on single tokens."""
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
    wanted = []
    for row, n, slot, end in ((0, 2, 2, 7), (2, 3, 0, 3), (0, 1, 1, 5), (1, 1, 2, 8)):
        a, b, c = (t.transpose(0, 1)[None].float() for t in (q[row : row + n], keys[slot, :end], values[slot, :end]))
        seen = torch.ones(n, end, dtype=torch.bool, device=world.device).tril(end - n)
        wanted.append(F.scaled_dot_product_attention(a, b, c, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    try:
        got = torch.cat([_flash(q, several, keys, values), _flash(q[:2], single, keys, values)])
    except (RuntimeError, TypeError) as error:
        world.log_once(f"attention request by request: flash attention does not run here ({error})")
        return False
    if (got.float() - torch.cat(wanted)).abs().max() > 0.02:
        world.log_once("attention request by request: flash attention over requests of any lengths is wrong here")
        return False
    return True
