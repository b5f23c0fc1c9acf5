"""Compare gathered attention with attention of the whole sequence in float32; each function runs on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from weft.plans import Plan


@dataclass(frozen=True)
class Shape:
    """`rows` lists the ranks' numbers of keys, and `queries` their numbers of queries (None: as many as keys). `bounds`
    are the bounds of packed sequences."""

    rows: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    causal: bool = False
    layout: str = "contiguous"
    queries: tuple[int, ...] | None = None
    window: int | None = None
    bounds: tuple[int, ...] | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None

    def positions(self, rank: int, queries: bool = False) -> torch.Tensor:
        """Return the positions of a rank's keys or queries."""
        size = len(self.rows)
        if self.layout == "zigzag":
            halves = [n - n // 2 for n in self.rows] + [n // 2 for n in reversed(self.rows)]
            starts = torch.tensor([0, *halves]).cumsum(0)
            return torch.cat([torch.arange(starts[c], starts[c + 1]) for c in (rank, 2 * size - 1 - rank)])
        start = sum(self.rows[:rank])
        positions = torch.arange(start, start + self.rows[rank])
        if not queries or self.queries is None:
            return positions
        most = self.queries[rank]
        return positions[len(positions) - most :] if self.causal or self.bounds else torch.arange(most)

    def sees(self, rank: int) -> torch.Tensor:
        """bool [m, S]."""
        queries, keys = self.positions(rank, True)[:, None], torch.arange(sum(self.rows))[None]
        out = torch.ones(len(queries), keys.shape[1], dtype=torch.bool)
        if self.causal:
            out &= keys <= queries
        if self.window:
            out &= keys > queries - self.window
        if self.bounds:
            ends = torch.tensor(self.bounds[1:])
            out &= torch.bucketize(keys, ends, right=True) == torch.bucketize(queries, ends, right=True)
        return out


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse in the dtype of q; each query attends to the keys that `sees` [m, S] marks."""
    heads_per_kv = q.shape[1] // k.shape[1]
    s = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(heads_per_kv, 1)) * scale
    s = s.masked_fill(~sees.to(s.device), float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hmn,nhd->mhd", p, v.repeat_interleave(heads_per_kv, 1)), s.logsumexp(-1)


@dataclass
class Inputs:
    """The operands of one call: the whole sequence's operands on the host, and this rank's operands on the device."""

    world: weft.World
    shape: Shape
    seed: int

    def __post_init__(self) -> None:
        shape, world, total = self.shape, self.world, sum(self.shape.rows)
        keys = [draw(self.seed + i, total, shape.kv_heads, shape.dim, dtype=shape.dtype) for i in (1, 2)]
        place = shape.positions(world.rank, True)
        others = draw(self.seed + 10 + world.rank, len(place), shape.heads, shape.dim, dtype=shape.dtype)
        whole = draw(self.seed, total, shape.heads, shape.dim, dtype=shape.dtype)
        self.q = whole[place] if shape.queries is None or shape.causal or shape.bounds else others
        self.k, self.v = keys
        self.sinks = draw(self.seed + 3, shape.heads, dtype=torch.float32) if shape.sinks else None

    def local_qkv(self) -> list[torch.Tensor]:
        key_positions, device = self.shape.positions(self.world.rank), self.world.device
        return [t.clone().to(device) for t in (self.q, self.k[key_positions], self.v[key_positions])]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape, device = self.shape, self.world.device
        scale = shape.dim**-0.5 if shape.scale is None else shape.scale
        wide = torch.float32 if device.type == "cuda" else torch.float64
        q, k, v = (t.to(device, wide) for t in (self.q, self.k, self.v))
        return attention(q, k, v, shape.sees(self.world.rank), scale, self.sinks)

    def options(self) -> dict:
        shape, rows = self.shape, self.shape.rows
        return dict(
            causal=shape.causal,
            layout=shape.layout,
            window=shape.window,
            cu_seqlens=shape.bounds,
            sinks=None if self.sinks is None else self.sinks.clone().to(self.world.device),
            rows=None if len(set(rows)) == 1 else rows,
            scale=shape.scale,
            world=self.world,
        )


def attention_case(
    world: weft.World, shape: Shape, plan: str | Plan | Sequence[Plan], calls: int = 2, seed: int = 0, into: bool = False, streams: Sequence[str] = ()
) -> float:  # fmt: skip
    """Return the largest error over calls whose operands are rewritten in the same memory without synchronising.
    Calls cycle through the plans and the streams."""
    kept, held, plans = [], {}, [plan] if isinstance(plan, str | Plan) else plan
    for call in range(calls):
        inputs = Inputs(world, shape, 100 * (seed + call))
        with on_stream(world, streams[call % len(streams)] if streams else "main"):
            stream, name = world.current_stream(), streams[call % len(streams)] if streams else ""
            operands = []
            for i, t in enumerate(inputs.local_qkv()):
                to = held.setdefault((name, i), world.empty(t.shape, t.dtype))
                world.call(lambda to=to, t=t: to.copy_(t), [], [to], stream)
                operands.append(to)
            out = held.setdefault((name, "out"), world.empty(operands[0].shape, shape.dtype)) if into else None
            actual, lse = weft.gathered_attention(
                *operands, **inputs.options(), plan=plans[call % len(plans)], return_lse=True, out=out
            )
            copies = [world.empty(t.shape, t.dtype) for t in (actual, lse)]
            for to, t in zip(copies, (actual, lse), strict=True):
                world.call(lambda to=to, t=t: to.copy_(t), [t], [to], stream)
        kept.append((copies, inputs.expected()))
    world.synchronize()
    errors = []
    for (actual, lse), (expected, expected_lse) in kept:
        assert lse.dtype == torch.float32 and lse.shape == expected_lse.shape
        errors += [distance(actual, expected), distance(lse, expected_lse)]
    return max(errors)


def gradients_case(world: weft.World, shape: Shape, plan: str | Plan = "segmented", seed: int = 0) -> float:
    """Return the largest error of the gradients of q, k, v and the sinks, compared with autograd over the whole
    sequence. The loss, and the gradients of the sinks, are summed over ranks."""
    inputs, size = Inputs(world, shape, 100 * seed), world.size
    leaves = [t.requires_grad_() for t in inputs.local_qkv()]
    options = inputs.options()
    if inputs.sinks is not None:
        options["sinks"] = options["sinks"].requires_grad_()
    total = sum(shape.rows)
    dout = draw(100 * seed + 50, total, shape.heads, shape.dim, dtype=shape.dtype)
    query_positions = [shape.positions(rank, True) for rank in range(size)]
    out_local = weft.gathered_attention(*leaves, **options, plan=plan)
    (out_local * dout[query_positions[world.rank]].to(world.device)).sum().backward()
    world.synchronize()

    wide = torch.float32 if world.device.type == "cuda" else torch.float64
    q = draw(100 * seed, total, shape.heads, shape.dim, dtype=shape.dtype)
    whole = [t.to(world.device, wide).requires_grad_() for t in (q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else inputs.sinks.detach().to(world.device, wide).requires_grad_()
    scale = shape.dim**-0.5 if shape.scale is None else shape.scale
    loss = torch.zeros((), device=world.device, dtype=wide)
    for rank, place in enumerate(query_positions):
        out, _ = attention(whole[0][place], whole[1], whole[2], shape.sees(rank), scale, sinks)
        loss = loss + (out * dout[place].to(out)).sum()
    loss.backward()
    key_positions = shape.positions(world.rank)
    expected_grads = [whole[0].grad[query_positions[world.rank]], *(t.grad[key_positions] for t in whole[1:])]
    errors = [distance(leaf.grad, expected) for leaf, expected in zip(leaves, expected_grads, strict=True)]
    if sinks is not None:
        parts = [t.to(world.device) for t in world.exchange(options["sinks"].grad.cpu())]
        errors.append(distance(sum(parts), sinks.grad))
    return max(errors)
