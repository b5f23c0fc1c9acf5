"""The rotary embedding of queries and keys in the emulator, against its definition."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.emulated.cases import distance, draw
from weft.ops.rotary import rotary


def defined(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """Rotate heads [M, heads, D] by the definition."""
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.double()
    a, b = x.chunk(2, -1)
    return x * cos.double()[:, None] + torch.cat([-b, a], -1) * sin.double()[:, None]


@pytest.mark.parametrize(("m", "d", "heads", "kv", "period"), [(1, 16, 1, 1, 1), (18, 8, 4, 2, 9), (33, 20, 3, 1, 33)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("angles", [torch.float32, torch.bfloat16])
def test_rotary(m: int, d: int, heads: int, kv: int, period: int, normed: bool, angles: torch.dtype) -> None:
    qkv, angle = draw(1, m, (heads + 2 * kv) * d), draw(2, 1, period, d // 2).float() * 6
    cos, sin = (torch.cat([t, t], -1).to(angles) for t in (angle.cos(), angle.sin()))
    norms = (draw(3, d), draw(4, d)) if normed else None

    def main(world: weft.World) -> torch.Tensor:
        return rotary(qkv, cos, sin, heads, kv, norms, 1e-5, world=world)

    (actual,) = weft.spmd(main, 1, backend="emulated", seed=m)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.split([heads * d, kv * d, kv * d], -1))
    cos_sin = [t[0].repeat(m // period, 1) for t in (cos, sin)]
    expected = [defined(q, *cos_sin, norms and norms[0]), defined(k, *cos_sin, norms and norms[1]), v.double()]
    assert distance(actual.double(), torch.cat([t.flatten(1) for t in expected], 1)) < 4e-3


def test_wrong_arguments_are_refused() -> None:
    qkv, angle, norm = draw(1, 3, 32), torch.zeros(3, 8), draw(2, 8)

    def main(world: weft.World) -> None:
        for arguments, error in (
            ((qkv.float(), angle, angle, 2, 1), TypeError),
            ((qkv, angle, angle, 3, 1), ValueError),
            ((qkv, angle[:, :4], angle[:, :4], 2, 1), ValueError),
            ((qkv, angle, angle[:2], 2, 1), ValueError),
            ((qkv, angle, angle, 2, 1, (norm[:4], norm)), ValueError),
            ((qkv, angle, angle, 2, 1, (norm, norm), 0.0), ValueError),
            ((qkv.requires_grad_(), angle, angle, 2, 1), ValueError),
        ):
            with pytest.raises(error, match="rotary"):
                rotary(*arguments, world=world)

    weft.spmd(main, 1, backend="emulated")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_known_call_is_of_its_dtypes(ranks: int) -> None:
    """The operands may have different dtypes, and tensors have new addresses in each call."""
    qkv, angle, norm = draw(1, 4, 32), draw(2, 4, 8).float(), draw(3, 8)

    def main(world: weft.World) -> float:
        expected, worst = None, 0.0
        for kind in (torch.bfloat16, torch.float32):
            for operands in (
                (angle.to(kind), angle, norm, norm),
                (angle, angle.to(kind), norm.to(kind), norm.to(kind)),
            ):
                for _ in range(2):
                    cos, sin, *norms = (t.clone() for t in operands)
                    actual = rotary(qkv.clone(), cos, sin, 2, 1, (norms[0], norms[1]), world=world).float()
                    expected = actual if expected is None else expected
                    worst = max(worst, distance(actual, expected))
        return worst

    assert max(weft.spmd(main, ranks, backend="emulated")) < 1e-2
