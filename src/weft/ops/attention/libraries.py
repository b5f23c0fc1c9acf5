"""Attention that a library computes, with the log-sum-exp by which partial results are merged.

    cudnn    aten._scaled_dot_product_cudnn_attention: the fastest on Hopper
    flash    aten._scaled_dot_product_flash_attention: FlashAttention 2, in every CUDA build of torch
    plain    float32 arithmetic of torch, which holds all scores at once: on CPUs

torch declares the first two for its own use alone. So each is tried once a process on a GPU, dtype and kind of heads,
forward and backward apart, against `plain`; the first whose numbers are right is taken. All give the natural logarithm,
and a backward pass of one takes what another's forward pass gave.

q [m, heads, D], k and v [n, kv heads, D], heads a multiple of kv heads; D is contiguous, rows may lie apart. Causal:
m = n, query i sees keys 0 to i. out [m, heads, D], lse float32 [heads, m]. Packed sequences, and windows, go to flash:
its causal mask ends with the last query at the last key, so that a sequence may have fewer queries than keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ...errors import Unsupported
from ...tensor_checks import dense

Tensor = torch.Tensor
MOST_D = 256
_aten = torch.ops.aten
_CLOSE = 2e-2  # of a right result of 16-bit numbers: rounding gives 3e-3, a wrong convention more than 0.3


class Packed(NamedTuple):
    """Sequences one behind another. queries, keys: where each begins, and the last ends. A causal query sees the keys
    up to its own place, or of these the last `window`; the last query's place is that of the last key. window: 0 for
    none."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int


class Passed(NamedTuple):
    """What a forward pass was given and gave, and the gradient of its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


Bounds = tuple[Tensor, Tensor]  # Packed.queries and keys, int32, on the device
Result = tuple[Tensor, Tensor]  # out, lse
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v
Forward = Callable[[Tensor, Tensor, Tensor, bool, float], Result]
Backward = Callable[[Passed, bool, float], Gradients]
ForwardPacked = Callable[[Tensor, Tensor, Tensor, Packed, Bounds, float], Result]
BackwardPacked = Callable[[Passed, Packed, Bounds, float], Gradients]


@dataclass(frozen=True)
class AttentionLibrary:
    """forward(q, k, v, causal, scale) -> out, lse. backward(passed, causal, scale) -> dq, dk, dv, of its keys alone
    where out and lse are of more. packed, packed_backward: the same with packed sequences and their bounds instead of
    causal. least: queries, and keys, of the smallest call that it is given."""

    name: str
    forward: Forward
    backward: Backward
    packed: ForwardPacked | None = None
    packed_backward: BackwardPacked | None = None
    least: int = 1


def _by_head(t: Tensor) -> Tensor:
    """[1, heads, rows, D] as torch has it, without a copy."""
    return t.transpose(0, 1).unsqueeze(0)


def _by_row(t: Tensor) -> Tensor:
    return t[0].transpose(0, 1).contiguous()


def _result(made: tuple[Tensor, ...], q: Tensor) -> Result:
    return _by_row(made[0]), made[1].reshape(q.shape[1], q.shape[0])


def _gradients(attention: Callable[..., Gradients], of: Passed) -> Gradients:
    """attention(dout, q, k, v, out, lse [1, heads, m]): as torch has them."""
    dq, dk, dv = attention(*map(_by_head, (of.dout, of.q, of.k, of.v, of.out)), dense(of.lse)[None])
    return _by_row(dq), _by_row(dk), _by_row(dv)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Result:
    given = *map(_by_head, (q, k, v)), None, True, 0.0, causal, False
    return _result(_aten._scaled_dot_product_cudnn_attention(*given, scale=scale), q)


def _cudnn_backward(of: Passed, causal: bool, scale: float) -> Gradients:
    seed = torch.zeros(1, dtype=torch.int64, device=of.q.device)  # of a dropout that there is not

    def attention(*tensors: Tensor) -> Gradients:
        *given, lse = tensors
        more = seed, seed, None, None, None, len(of.q), len(of.k), 0.0, causal
        made: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(*given, lse[..., None], *more, scale=scale)
        return made

    return _gradients(attention, of)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Result:
    given = *map(_by_head, (q, k, v)), 0.0, causal, False
    return _result(_aten._scaled_dot_product_flash_attention(*given, scale=scale), q)


def _flash_backward(of: Passed, causal: bool, scale: float) -> Gradients:
    seed = torch.zeros(2, dtype=torch.uint64, device=of.q.device)

    def attention(*given: Tensor) -> Gradients:
        more = None, None, len(of.q), len(of.k), 0.0, causal, seed, seed
        made: Gradients = _aten._scaled_dot_product_flash_attention_backward(*given, *more, scale=scale)
        return made

    return _gradients(attention, of)


def _flash_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, bounds: Bounds, scale: float) -> Result:
    given, window = (*bounds, *_longest(packed), 0.0, packed.causal), _window(packed)
    made = _aten._flash_attention_forward(q, k, v, *given, False, scale=scale, **window)
    return made[0], made[1].reshape(q.shape[1], q.shape[0])


def _flash_packed_backward(of: Passed, packed: Packed, bounds: Bounds, scale: float) -> Gradients:
    seed = torch.zeros(2, dtype=torch.uint64, device=of.q.device)
    tensors = of.dout, of.q, of.k, of.v, of.out, dense(of.lse)
    given, window = (*bounds, *_longest(packed), 0.0, packed.causal), _window(packed)
    dq, dk, dv = _aten._flash_attention_backward(*tensors, *given, seed, seed, scale=scale, **window)
    return dq, dk, dv


def _longest(packed: Packed) -> tuple[int, int]:
    """Queries, and keys."""
    most = [max(hi - lo for lo, hi in pairwise(ends)) for ends in (packed.queries, packed.keys)]
    return most[0], most[1]


def _window(packed: Packed) -> dict[str, int]:
    return dict(window_size_left=packed.window - 1, window_size_right=0) if packed.window else {}


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: int = 0) -> Tensor:
    """float32 [heads, m, n]."""
    s = torch.einsum("mhd,nhd->hmn", q.float(), _repeated(k, q.shape[1])) * scale
    if causal:
        sees = torch.ones(s.shape[1:], dtype=torch.bool, device=s.device).tril(len(k) - len(q))
        s = s.masked_fill(~(sees.triu(len(k) - len(q) + 1 - window) if window else sees), float("-inf"))
    return s


def _repeated(t: Tensor, heads: int) -> Tensor:
    """float32 keys or values, once for each query head."""
    return t.float().repeat_interleave(heads // t.shape[1], 1)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0) -> Result:
    s = _scores(q, k, causal, scale, window)
    lse = s.logsumexp(-1)
    out = torch.einsum("hmn,nhd->mhd", (s - lse[:, :, None]).exp(), _repeated(v, q.shape[1]))
    return out.to(q.dtype), lse


def _plain_backward(of: Passed, causal: bool, scale: float, window: int = 0) -> Gradients:
    heads, (n, kv_heads, d) = of.q.shape[1], of.k.shape
    dout = of.dout.float()
    p = (_scores(of.q, of.k, causal, scale, window) - of.lse[:, :, None]).exp()
    delta = (dout * of.out.float()).sum(-1).t()
    ds = p * (torch.einsum("mhd,nhd->hmn", dout, _repeated(of.v, heads)) - delta[:, :, None]) * scale
    dq = torch.einsum("hmn,nhd->mhd", ds, _repeated(of.k, heads))
    dk, dv = (
        torch.einsum("hmn,mhd->nhd", a, b).view(n, kv_heads, heads // kv_heads, d).sum(2)
        for a, b in ((ds, of.q.float()), (p, dout))
    )
    return dq.to(of.q.dtype), dk.to(of.q.dtype), dv.to(of.q.dtype)


def _sequences(packed: Packed) -> list[tuple[slice, slice]]:
    """Queries and keys of each."""
    return [(slice(*a), slice(*b)) for a, b in zip(pairwise(packed.queries), pairwise(packed.keys), strict=True)]


def _plain_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, bounds: Bounds, scale: float) -> Result:
    made = [_plain(q[i], k[j], v[j], packed.causal, scale, packed.window) for i, j in _sequences(packed)]
    return torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made], 1)


def _plain_packed_backward(of: Passed, packed: Packed, bounds: Bounds, scale: float) -> Gradients:
    made = []
    for i, j in _sequences(packed):
        one = Passed(of.q[i], of.k[j], of.v[j], of.out[i], of.lse[:, i], of.dout[i])
        made.append(_plain_backward(one, packed.causal, scale, packed.window))
    dq, dk, dv = (torch.cat(parts) for parts in zip(*made, strict=True))
    return dq, dk, dv


CUDNN = AttentionLibrary("cudnn", _cudnn, _cudnn_backward, least=64)  # of one row it has none, as torch says
FLASH = AttentionLibrary("flash", _flash, _flash_backward, _flash_packed, _flash_packed_backward)
REFERENCE = AttentionLibrary("plain", _plain, _plain_backward, _plain_packed, _plain_packed_backward)
USES = ("forward", "backward", "packed", "packed_backward")


@functools.lru_cache
def right(
    use: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int
) -> tuple[AttentionLibrary, ...]:
    """The libraries whose `use` (of USES) gives right numbers, the fastest first. Waits for the device. Raises
    Unsupported, with what each said, where none does."""
    if device.type == "cpu":
        return (REFERENCE,)
    said = answers(use, device, dtype, heads, kv_heads, d)
    found = tuple(library for library, reason in said.items() if not reason)
    if found:
        return found
    reasons = "; ".join(f"{library.name}: {reason}" for library, reason in said.items())
    raise Unsupported(f"no attention {use} of {heads} and {kv_heads} heads, D {d}, {dtype} here: {reasons}")


def answers(
    use: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, d: int
) -> dict[AttentionLibrary, str]:
    """What is wrong with each library's results, or what it says; nothing where they are right."""
    own = torch.Generator(device).manual_seed(0)  # the user's numbers stay as they are

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=own)

    q, both, dout = draw(128, heads, d), draw(192, 2, kv_heads, d), draw(128, heads, d)
    k, v, scale = both[:, 0], both[:, 1], d**-0.5
    packed = Packed((0, 50, 128), (0, 70, 192), True, 40)
    bounds = torch.tensor(packed.queries, device=device).int(), torch.tensor(packed.keys, device=device).int()

    def results(library: AttentionLibrary) -> list[Tensor]:
        if use == "packed":
            return list(library.packed(q, k, v, packed, bounds, scale)) if library.packed else []
        if use == "packed_backward":
            assert REFERENCE.packed is not None
            of = Passed(q, k, v, *REFERENCE.packed(q, k, v, packed, bounds, scale), dout)
            return list(library.packed_backward(of, packed, bounds, scale)) if library.packed_backward else []
        out: list[Tensor] = []
        for causal, n in ((False, 192), (True, 128)):
            given = q, k[:n], v[:n]
            if use == "forward":
                out += library.forward(*given, causal, scale)
            else:
                of = Passed(*given, *REFERENCE.forward(*given, causal, scale), dout)
                out += library.backward(of, causal, scale)
        return out

    return {library: _wrong(results, library) for library in (CUDNN, FLASH)}


def _wrong(results: Callable[[AttentionLibrary], list[Tensor]], library: AttentionLibrary) -> str:
    try:
        got = results(library)
    except RuntimeError as e:  # what it refuses
        return f"{e}".splitlines()[0][:200]
    for a, b in zip(got, results(REFERENCE), strict=False):
        error = ((a.float() - b.float()).norm() / b.float().norm()).item() if a.shape == b.shape else float("inf")
        if not error < _CLOSE:
            return f"results are off by {error:.2g}"
    return "" if got else "has none"
