"""What gathered attention must compute, against attention of the whole sequence in float32; each function runs on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import weft
from tests.emulated.cases import distance, draw, on_stream
from weft.plans import Plan


@dataclass(frozen=True)
class Shape:
    """rows: keys of every rank. queries: of every rank, or None: as many. bounds: of packed sequences."""

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
        """Where a rank's keys stand, or its queries."""
        size, at = len(self.rows), 0
        if self.layout == "zigzag":
            halves = [n - n // 2 for n in self.rows] + [n // 2 for n in reversed(self.rows)]
            starts = torch.tensor([0, *halves]).cumsum(0)
            return torch.cat([torch.arange(starts[c], starts[c + 1]) for c in (rank, 2 * size - 1 - rank)])
        at = sum(self.rows[:rank])
        places = torch.arange(at, at + self.rows[rank])
        if not queries or self.queries is None:
            return places
        most = self.queries[rank]
        return places[len(places) - most :] if self.causal or self.bounds else torch.arange(most)

    def sees(self, rank: int) -> torch.Tensor:
        """bool [m, S]."""
        at, keys = self.positions(rank, True)[:, None], torch.arange(sum(self.rows))[None]
        out = torch.ones(len(at), keys.shape[1], dtype=torch.bool)
        if self.causal:
            out &= keys <= at
        if self.window:
            out &= keys > at - self.window
        if self.bounds:
            ends = torch.tensor(self.bounds[1:])
            out &= torch.bucketize(keys, ends, right=True) == torch.bucketize(at, ends, right=True)
        return out


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in the dtype of q, of keys where `sees` [m, S] says."""
    each = q.shape[1] // k.shape[1]
    s = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(each, 1)) * scale
    s = s.masked_fill(~sees.to(s.device), float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s)[:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hmn,nhd->mhd", p, v.repeat_interleave(each, 1)), s.logsumexp(-1)


@dataclass
class Given:
    """One call's operands: of the whole sequence, on the host, and this rank's, on its device."""

    world: weft.World
    of: Shape
    seed: int

    def __post_init__(self) -> None:
        of, world, total = self.of, self.world, sum(self.of.rows)
        keys = [draw(self.seed + i, total, of.kv_heads, of.dim, dtype=of.dtype) for i in (1, 2)]
        place = of.positions(world.rank, True)
        others = draw(self.seed + 10 + world.rank, len(place), of.heads, of.dim, dtype=of.dtype)
        whole = draw(self.seed, total, of.heads, of.dim, dtype=of.dtype)
        self.q = whole[place] if of.queries is None or of.causal or of.bounds else others
        self.k, self.v = keys
        self.sinks = draw(self.seed + 3, of.heads, dtype=torch.float32) if of.sinks else None

    def there(self) -> list[torch.Tensor]:
        mine, device = self.of.positions(self.world.rank), self.world.device
        return [t.clone().to(device) for t in (self.q, self.k[mine], self.v[mine])]

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        of, device = self.of, self.world.device
        scale = of.dim**-0.5 if of.scale is None else of.scale
        wide = torch.float32 if device.type == "cuda" else torch.float64
        q, k, v = (t.to(device, wide) for t in (self.q, self.k, self.v))
        return attention(q, k, v, of.sees(self.world.rank), scale, self.sinks)

    def options(self) -> dict:
        of, rows = self.of, self.of.rows
        return dict(
            causal=of.causal,
            layout=of.layout,
            window=of.window,
            cu_seqlens=of.bounds,
            sinks=None if self.sinks is None else self.sinks.clone().to(self.world.device),
            rows=None if len(set(rows)) == 1 else rows,
            scale=of.scale,
            world=self.world,
        )


def attention_case(
    world: weft.World, of: Shape, plan: str | Plan | Sequence[Plan], calls: int = 2, seed: int = 0, into: bool = False, streams: Sequence[str] = ()
) -> float:  # fmt: skip
    """Largest error over calls with fresh operands in memory that is written again, without a synchronisation between; by the
    plans, and on the streams, in turn."""
    kept, held, plans = [], {}, [plan] if isinstance(plan, str | Plan) else plan
    for call in range(calls):
        given = Given(world, of, 100 * (seed + call))
        with on_stream(world, streams[call % len(streams)] if streams else "main"):
            stream, name = world.current_stream(), streams[call % len(streams)] if streams else ""
            operands = []
            for i, t in enumerate(given.there()):
                to = held.setdefault((name, i), world.empty(t.shape, t.dtype))
                world.call(lambda to=to, t=t: to.copy_(t), [], [to], stream)
                operands.append(to)
            out = held.setdefault((name, "out"), world.empty(operands[0].shape, of.dtype)) if into else None
            got, lse = weft.gathered_attention(
                *operands, **given.options(), plan=plans[call % len(plans)], return_lse=True, out=out
            )
            copies = [world.empty(t.shape, t.dtype) for t in (got, lse)]
            for to, t in zip(copies, (got, lse), strict=True):
                world.call(lambda to=to, t=t: to.copy_(t), [t], [to], stream)
        kept.append((copies, given.want()))
    world.synchronize()
    errors = []
    for (got, lse), (want, want_lse) in kept:
        assert lse.dtype == torch.float32 and lse.shape == want_lse.shape
        errors += [distance(got, want), distance(lse, want_lse)]
    return max(errors)


def gradients_case(world: weft.World, of: Shape, plan: str | Plan = "segmented", seed: int = 0) -> float:
    """Largest error of the gradients of q, k, v and the sinks, the latter summed over the ranks, against autograd of the whole
    sequence. The loss is the sum over ranks."""
    given, size = Given(world, of, 100 * seed), world.size
    leaves = [t.requires_grad_() for t in given.there()]
    options = given.options()
    if given.sinks is not None:
        options["sinks"] = options["sinks"].requires_grad_()
    total = sum(of.rows)
    dout = draw(100 * seed + 50, total, of.heads, of.dim, dtype=of.dtype)
    places = [of.positions(rank, True) for rank in range(size)]
    got = weft.gathered_attention(*leaves, **options, plan=plan)
    (got * dout[places[world.rank]].to(world.device)).sum().backward()
    world.synchronize()

    wide = torch.float32 if world.device.type == "cuda" else torch.float64
    q = draw(100 * seed, total, of.heads, of.dim, dtype=of.dtype)
    whole = [t.to(world.device, wide).requires_grad_() for t in (q, given.k, given.v)]
    sinks = None if given.sinks is None else given.sinks.detach().to(world.device, wide).requires_grad_()
    scale = of.dim**-0.5 if of.scale is None else of.scale
    loss = torch.zeros((), device=world.device, dtype=wide)
    for rank, place in enumerate(places):
        out, _ = attention(whole[0][place], whole[1], whole[2], of.sees(rank), scale, sinks)
        loss = loss + (out * dout[place].to(out)).sum()
    loss.backward()
    mine = of.positions(world.rank)
    wants = [whole[0].grad[places[world.rank]], *(t.grad[mine] for t in whole[1:])]
    errors = [distance(leaf.grad, want) for leaf, want in zip(leaves, wants, strict=True)]
    if sinks is not None:
        parts = [t.to(world.device) for t in world.exchange(options["sinks"].grad.cpu())]
        errors.append(distance(sum(parts), sinks.grad))
    return max(errors)
