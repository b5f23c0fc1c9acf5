"""Rotary embedding (Su et al. 2021) of queries and keys, after an optional RMSNorm of their heads. No rank waits for
another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..compute.elementwise import ROWS, rotate
from ..kernel_launch import Launch
from ..op import Local, RowsCall, registered
from ..plans import Plan, Sequential
from ..prepared import Run
from ..tensor_checks import DTYPES, check_devices, dims
from ..torch_library import CallOptions
from ..world import World

_OP = "rotary"


@dataclass(frozen=True)
class RotaryCall(RowsCall):
    """A checked call for qkv [m, (heads + 2 kv_heads) d]. Row r is rotated by the angles in row r % period. If eps is
    0, there are no norms."""

    heads: int
    kv_heads: int
    d: int
    period: int
    eps: float
    dtype: torch.dtype


class RotaryOperands(NamedTuple):
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


def prepare_rotary(world: World, call: RotaryCall, plan: Plan) -> Run:
    heads, half = call.heads + 2 * call.kv_heads, 1 << (call.d // 2 - 1).bit_length()
    programs = min(world.sm_count * 4, -(-call.m // ROWS.value) * heads)
    sizes = dict(rows=call.m, period=call.period, HEADS=call.heads, KV=call.kv_heads, D=call.d, EPS=call.eps, HALF=half)
    launch = Launch(world, rotate, programs, dict(num_warps=4), **sizes)

    def run(operands: RotaryOperands, out: torch.Tensor) -> None:
        qkv, cos, sin, query_norm, key_norm = operands
        if query_norm is None:
            query_norm = key_norm = qkv
        stream = world.current_stream()
        launch(stream, qkv=qkv, cos=cos, sin=sin, out=out, query_norm=query_norm, key_norm=key_norm)

    return run


class Rotary(Local[RotaryCall]):
    """The op of the rotary embedding. The options are heads, kv_heads and eps."""

    name = _OP
    signature = (
        "Tensor qkv, Tensor cos, Tensor sin, Tensor? query_norm, Tensor? key_norm,"
        " SymInt heads, SymInt kv_heads, float eps"
    )
    operand_type = RotaryOperands
    runs = {Sequential: prepare_rotary}
    batch_invariant_plans = (Sequential,)

    def check(self, world: World, operands: RotaryOperands, options: CallOptions) -> RotaryCall:
        (qkv, cos, sin, *norms), (heads, kv_heads, eps) = operands, options
        check_devices(_OP, world, operands._asdict())
        if qkv.dtype not in DTYPES:
            raise TypeError(f"{_OP}: qkv is {dims(qkv)}; bfloat16 and float16 are supported")
        parts = heads + 2 * kv_heads
        d = qkv.shape[-1] // parts
        if qkv.dim() != 2 or qkv.shape[-1] % parts or d % 2 or cos.shape != sin.shape or cos.shape[-1] != d:
            raise ValueError(
                f"{_OP}: qkv {dims(qkv)} of {heads} heads and {kv_heads} for keys and values, with angles {dims(cos)},"
                f" {dims(sin)}"
            )
        if (norms[0] is None) != (norms[1] is None) or any(n is not None and n.shape != (d,) for n in norms):
            raise ValueError(f"{_OP}: norms of heads must be two [{d}], or none")
        if norms[0] is not None and not eps > 0:
            raise ValueError(f"{_OP}: eps {eps} of the heads' norms must be above 0")
        return RotaryCall(
            qkv.shape[0], heads, kv_heads, d, cos.numel() // d, 0.0 if norms[0] is None else eps, qkv.dtype
        )

    def outputs(self, world: World, call: RotaryCall) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((call.m, (call.heads + 2 * call.kv_heads) * call.d), call.dtype)]

    def sizes(self, call: RotaryCall) -> tuple[int, int, int]:
        return call.m, (call.heads + 2 * call.kv_heads) * call.d, 1


ROTARY = registered(Rotary())


def rotary(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    kv_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    *,
    world: World,
) -> torch.Tensor:
    """Return qkv with rotated queries and keys and unchanged values, computed in one launch. For c < D / 2, out[c] =
    x[c] cos[c] - x[c + D / 2] sin[c] and out[c + D / 2] = x[c + D / 2] cos[c] + x[c] sin[c], where x is a head or its
    RMSNorm.

    Args:
        qkv: [M, (heads + 2 kv_heads) D], bfloat16 or float16: queries, then keys, then values.
        cos, sin: [.., D] with P rows in all. Only columns 0 to D / 2 - 1 are read. Row r of qkv is rotated by the
            angles in row r % P.
        norms: two weights [D], for the RMSNorm of every query head and of every key head before the rotation; None: no
            norm.

    The result is computed in float32 and rounded once. It has no gradient. Raises ValueError or TypeError for operands
    with an invalid shape, dtype or device.
    """
    norm_weights = (None, None) if norms is None else norms
    rotated: torch.Tensor = ROTARY(world, Sequential(), (qkv, cos, sin, *norm_weights), (heads, kv_heads, float(eps)))
    return rotated
