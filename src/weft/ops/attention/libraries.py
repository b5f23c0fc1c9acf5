"""Attention by a library (cuDNN, FlashAttention or torch), which also returns the log-sum-exp for merging partial
results.

    cudnn    calls aten._scaled_dot_product_cudnn_attention, the fastest on Hopper
    flash    calls aten._scaled_dot_product_flash_attention, FlashAttention 2, which every CUDA build of torch contains
    plain    uses torch's float32 arithmetic with all scores in memory at once, for CPUs

The first two are private functions of torch. So each process compares their results with the results of `plain`, once
for every GPU, dtype and numbers of heads, and separately for forward and backward passes. The process uses the first
library with correct results. All libraries return natural logarithms, and each library's backward pass accepts the
forward results of any other library.

The shapes are q [m, heads, D], k and v [n, kv heads, D], out [m, heads, D] and lse float32 [heads, m]. The number of
heads is a multiple of the number of kv heads, D is contiguous, and rows may be strided. In a causal call m = n, and
query i sees keys 0 to i. Packed sequences and windows use flash. Their causal mask aligns the last query with the last
key, so that a sequence may have fewer queries than keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import Unsupported
from ...tensor_checks import dense

MAX_HEAD_DIM = 256
_aten = torch.ops.aten
_TOLERANCE = 2e-2  # the relative error: rounding to 16 bits causes 3e-3, a wrong convention more than 0.3


class Packed(NamedTuple):
    """Packed sequences. cu_queries and cu_keys contain the offset at which each sequence begins, followed by the end. A
    causal query sees all keys up to its own position, or with a window only the last `window` of them (0 means no
    window). The last query is at the same position as the last key."""

    cu_queries: tuple[int, ...]
    cu_keys: tuple[int, ...]
    causal: bool
    window: int


class BackwardOperands(NamedTuple):
    """The operands and results of a forward pass, and the gradient of `out`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor

    def part(self, first_query: int, k: Tensor, v: Tensor) -> BackwardOperands:
        """Return the operands for the queries from `first_query` on, with these keys and values."""
        q, _, _, out, lse, dout = self
        return BackwardOperands(q[first_query:], k, v, out[first_query:], lse[:, first_query:], dout[first_query:])


SequenceOffsets = tuple[Tensor, Tensor]  # the cu_queries and cu_keys of a Packed as int32 tensors on the device
Result = tuple[Tensor, Tensor]  # out, lse
QkvGradients = tuple[Tensor, Tensor, Tensor]  # the gradients of q, k and v
ForwardFunction = Callable[..., Result]  # a function of q, k, v, mask, offsets, scale
BackwardFunction = Callable[..., QkvGradients]  # a function of operands, mask, offsets, scale


@dataclass(frozen=True)
class AttentionLibrary:
    """The attention functions of a library. forward(q, k, v, causal, None, scale) returns out and lse.
    backward(operands, causal, None, scale) returns dq, dk and dv for the keys in `operands`; the out and lse in
    `operands` may cover more keys. packed and packed_backward receive packed sequences and their offsets in place of
    `causal` and None. weft does not call the library with fewer than `min_rows` queries or keys."""

    name: str
    forward: ForwardFunction
    backward: BackwardFunction
    packed: ForwardFunction | None = None
    packed_backward: BackwardFunction | None = None
    min_rows: int = 1

    def function(self, use: str) -> Callable[..., tuple[Tensor, ...]]:
        """Return this library's function for `use`, which is one of USES and must be available."""
        function: Callable[..., tuple[Tensor, ...]] = getattr(self, use)
        return function


def _by_head(t: Tensor) -> Tensor:
    """Return [rows, heads, D] as torch's [1, heads, rows, D], without a copy."""
    return t.transpose(0, 1).unsqueeze(0)


def _by_row(t: Tensor) -> Tensor:
    """Return torch's [1, heads, rows, D] as contiguous [rows, heads, D]."""
    return t[0].transpose(0, 1).contiguous()


def _result(results: tuple[Tensor, ...], q: Tensor) -> Result:
    return _by_row(results[0]), results[1].reshape(q.shape[1], q.shape[0])


def _gradients(gradients: QkvGradients) -> QkvGradients:
    dq, dk, dv = gradients
    return _by_row(dq), _by_row(dk), _by_row(dv)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, offsets: None, scale: float) -> Result:
    args = *map(_by_head, (q, k, v)), None, True, 0.0, causal, False
    return _result(_aten._scaled_dot_product_cudnn_attention(*args, scale=scale), q)


def _cudnn_backward(operands: BackwardOperands, causal: bool, offsets: None, scale: float) -> QkvGradients:
    q, k, v, out, lse, dout = operands
    seed = torch.zeros(1, dtype=torch.int64, device=q.device)  # the seed for dropout, whose probability is 0
    tensors = *map(_by_head, (dout, q, k, v, out)), dense(lse)[None, ..., None]
    args = *tensors, seed, seed, None, None, None, len(q), len(k), 0.0, causal
    return _gradients(_aten._scaled_dot_product_cudnn_attention_backward(*args, scale=scale))


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, offsets: None, scale: float) -> Result:
    args = *map(_by_head, (q, k, v)), 0.0, causal, False
    return _result(_aten._scaled_dot_product_flash_attention(*args, scale=scale), q)


def _flash_backward(operands: BackwardOperands, causal: bool, offsets: None, scale: float) -> QkvGradients:
    q, k, v, out, lse, dout = operands
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    tensors = *map(_by_head, (dout, q, k, v, out)), dense(lse)[None]
    args = *tensors, None, None, len(q), len(k), 0.0, causal, seed, seed
    return _gradients(_aten._scaled_dot_product_flash_attention_backward(*args, scale=scale))


def _flash_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, offsets: SequenceOffsets, scale: float) -> Result:
    args = q, k, v, *offsets, *_max_lengths(packed), 0.0, packed.causal, False
    out, lse, *_ = _aten._flash_attention_forward(*args, scale=scale, **_window(packed))
    return out, lse.reshape(q.shape[1], q.shape[0])


def _flash_packed_backward(
    operands: BackwardOperands, packed: Packed, offsets: SequenceOffsets, scale: float
) -> QkvGradients:
    q, k, v, out, lse, dout = operands
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    args = dout, q, k, v, out, dense(lse), *offsets, *_max_lengths(packed), 0.0, packed.causal, seed, seed
    dq, dk, dv = _aten._flash_attention_backward(*args, scale=scale, **_window(packed))
    return dq, dk, dv


def _max_lengths(packed: Packed) -> tuple[int, int]:
    """Return the largest number of queries and the largest number of keys in a sequence."""
    queries, keys = (max(hi - lo for lo, hi in pairwise(cu)) for cu in (packed.cu_queries, packed.cu_keys))
    return queries, keys


def _window(packed: Packed) -> dict[str, int]:
    return dict(window_size_left=packed.window - 1, window_size_right=0) if packed.window else {}


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: int) -> Tensor:
    """Return the scores float32 [heads, m, n], -inf where the mask hides a key."""
    s = torch.einsum("mhd,nhd->hmn", q.float(), _repeated(k, q.shape[1])) * scale
    if causal:
        visible = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).tril(len(k) - len(q))
        s = s.masked_fill(~(visible.triu(len(k) - len(q) + 1 - window) if window else visible), float("-inf"))
    return s


def _repeated(t: Tensor, heads: int) -> Tensor:
    """Return keys or values in float32, repeated for each query head."""
    return t.float().repeat_interleave(heads // t.shape[1], 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, offsets: None, scale: float, window: int = 0) -> Result:
    s = _scores(q, k, causal, scale, window)
    lse = s.logsumexp(-1)
    out = torch.einsum("hmn,nhd->mhd", (s - lse[:, :, None]).exp(), _repeated(v, q.shape[1]))
    return out.to(q.dtype), lse


def _plain_backward(
    operands: BackwardOperands, causal: bool, offsets: None, scale: float, window: int = 0
) -> QkvGradients:
    q, k, v, out, lse, dout = operands
    heads, (n, kv_heads, d) = q.shape[1], k.shape
    dout = dout.float()
    p = (_scores(q, k, causal, scale, window) - lse[:, :, None]).exp()
    delta = (dout * out.float()).sum(-1).t()
    ds = p * (torch.einsum("mhd,nhd->hmn", dout, _repeated(v, heads)) - delta[:, :, None]) * scale
    dq = torch.einsum("hmn,nhd->mhd", ds, _repeated(k, heads))
    dk, dv = (
        torch.einsum("hmn,mhd->nhd", a, b).view(n, kv_heads, heads // kv_heads, d).sum(2)
        for a, b in ((ds, q.float()), (p, dout))
    )
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _sequences(packed: Packed) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each sequence."""
    pairs = zip(pairwise(packed.cu_queries), pairwise(packed.cu_keys), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in pairs]


def _plain_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, offsets: SequenceOffsets, scale: float) -> Result:
    results = [_plain(q[i], k[j], v[j], packed.causal, None, scale, packed.window) for i, j in _sequences(packed)]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results], 1)


def _plain_packed_backward(
    operands: BackwardOperands, packed: Packed, offsets: SequenceOffsets, scale: float
) -> QkvGradients:
    q, k, v, out, lse, dout = operands
    gradients = []
    for i, j in _sequences(packed):
        sequence = BackwardOperands(q[i], k[j], v[j], out[i], lse[:, i], dout[i])
        gradients.append(_plain_backward(sequence, packed.causal, None, scale, packed.window))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*gradients, strict=True))
    return dq, dk, dv


CUDNN = AttentionLibrary("cudnn", _cudnn, _cudnn_backward, min_rows=64)  # torch does not use cuDNN for a single row
FLASH = AttentionLibrary("flash", _flash, _flash_backward, _flash_packed, _flash_packed_backward)
REFERENCE = AttentionLibrary("plain", _plain, _plain_backward, _plain_packed, _plain_packed_backward)
USES = ("forward", "backward", "packed", "packed_backward")


@functools.lru_cache
def right(
    use: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int
) -> tuple[AttentionLibrary, ...]:
    """Return the libraries with correct results for `use` (one of USES), the fastest first. The call waits for the
    device. Raises Unsupported, with each library's error, if none is correct."""
    if device.type == "cpu":
        return (REFERENCE,)
    errors = library_errors(use, device, dtype, heads, kv_heads, d)
    libraries = tuple(library for library, error in errors.items() if not error)
    if libraries:
        return libraries
    reasons = "; ".join(f"{library.name}: {error}" for library, error in errors.items())
    raise Unsupported(f"no attention {use} of {heads} and {kv_heads} heads, D {d}, {dtype} on {device}: {reasons}")


def library_errors(
    use: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int
) -> dict[AttentionLibrary, str]:
    """Return for each library a description of the error: wrong results, or the exception that it raised. The
    description is "" if the results are correct."""
    generator = torch.Generator(device).manual_seed(0)  # a separate generator leaves the user's generator unchanged

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    q, kv, dout = draw(128, heads, d), draw(192, 2, kv_heads, d), draw(128, heads, d)
    k, v, scale = kv[:, 0], kv[:, 1], d**-0.5
    packed = Packed((0, 50, 128), (0, 70, 192), True, 40)
    offsets = torch.tensor(packed.cu_queries, device=device).int(), torch.tensor(packed.cu_keys, device=device).int()

    of_packed = use.startswith("packed")
    masks = [(192, packed, offsets)] if of_packed else [(192, False, None), (128, True, None)]

    def results(library: AttentionLibrary) -> list[Tensor]:
        tensors: list[Tensor] = []
        if getattr(library, use) is None:
            return tensors
        function = library.function(use)
        for keys, *mask in masks:
            qkv = q, k[:keys], v[:keys]
            if use.endswith("backward"):
                out, lse = REFERENCE.function("packed" if of_packed else "forward")(*qkv, *mask, scale)
                tensors += function(BackwardOperands(*qkv, out, lse, dout), *mask, scale)
            else:
                tensors += function(*qkv, *mask, scale)
        return tensors

    return {library: _error(results, library) for library in (CUDNN, FLASH)}


def _error(results: Callable[[AttentionLibrary], list[Tensor]], library: AttentionLibrary) -> str:
    try:
        actual = results(library)
    except RuntimeError as e:  # torch rejects the call
        return f"{e}".splitlines()[0][:200]
    for a, b in zip(actual, results(REFERENCE), strict=False):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item() if a.shape == b.shape else float("inf")
        if not error < _TOLERANCE:
            return f"results are off by {error:.2g}"
    return "" if actual else "the library has no such call"
