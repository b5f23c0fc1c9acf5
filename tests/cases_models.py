"""What a decoder must compute, written once for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cases import distance, draw

import weft
from weft.models import Batch, Cache, Config, Graphs, Llama
from weft.nn.weave import LayerPlan

Tensor, CPU = torch.Tensor, torch.device("cpu")
HALF = 5e-3  # float16's rounding through the layers of SMALL; bfloat16 rounds 8 times as coarsely
TINY = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip
SMALL = dict(
    vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=256
    ),
)  # fmt: skip


def state(config: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Whole weights under Hugging Face's names. Scaled so that logits spread and layers matter."""
    return dict(_state(Config.of(config), seed, dtype))


@functools.lru_cache(maxsize=4)
def _state(c: Config, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    q, kv, h, i = (
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
        c.hidden_size,
        c.intermediate_size,
    )
    shapes = {"model.embed_tokens.weight": (c.vocab_size, h), "lm_head.weight": (c.vocab_size, h)}
    for layer in range(c.num_hidden_layers):
        for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = shape
    made = {
        name: (draw(seed * 1000 + n, *shape, dtype=torch.float32) * 1.5 * shape[1] ** -0.5).to(dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }
    norms = [f"model.layers.{n}.{which}_layernorm.weight" for n in range(c.num_hidden_layers) for which in ("input", "post_attention")]  # fmt: skip
    for n, name in enumerate([*norms, "model.norm.weight"]):
        made[name] = (1 + 0.1 * draw(seed * 1000 + 500 + n, h, dtype=torch.float32)).to(dtype)
    return made


def rotary(config: Any, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim / 2] of the positions, in float64, as Hugging Face defines them
    (`_compute_default_rope_parameters`, `_compute_linear_scaling_rope_parameters`, `_compute_llama3_parameters`): in llama3 a
    frequency's wavelength says whether it is kept, divided, or something between the two."""
    c = Config.of(config)
    angles = torch.empty(length, c.head_dim // 2, dtype=torch.float64)
    for i in range(c.head_dim // 2):
        frequency = 1.0 / c.rope_theta ** (2 * i / c.head_dim)
        if c.rope == "linear":
            frequency /= c.rope_numbers[0]
        elif c.rope == "llama3":
            factor, low, high, context = c.rope_numbers
            wavelength = 2 * math.pi / frequency
            if wavelength > context / low:
                frequency /= factor
            elif wavelength >= context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        angles[:, i] = torch.arange(length, dtype=torch.float64) * frequency
    return angles.cos(), angles.sin()


def reference(config: Any, weights: dict[str, Tensor], ids: Tensor, device: torch.device = CPU) -> Tensor:
    """Logits [tokens, vocab] of one request's tokens, by the model's definition, in float64 on one rank."""
    c = Config.of(config)
    w = {k: v.to(device).double() for k, v in weights.items()}
    t, d = len(ids), c.head_dim
    ids = ids.to(device)
    cos, sin = (part[:, None].to(device) for part in rotary(c, t))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * w[name]

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    later = torch.ones(t, t, dtype=torch.bool, device=device).triu(1)
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = ((y @ w[f"{at}self_attn.{n}_proj.weight"].t()).view(t, -1, d) for n in "qkv")
        q, k = turned(q), turned(k)
        share = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        seen = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", seen, v).flatten(1) @ w[at + "self_attn.o_proj.weight"].t()
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ w[f"{at}mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].t()
    return (norm(x, "model.norm.weight") @ w["lm_head.weight"].t()).cpu()


def made(
    world: weft.World, config: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sure: bool = False
) -> Llama:
    """sure: an output head that prefers the token before the last one in the vocabulary, so that rounding, which differs
    between plans, does not pick another token, and a wrong layer does."""
    model, weights = Llama(config, world=world, dtype=dtype), state(config, seed, dtype)
    if sure:
        weights["lm_head.weight"] = 0.3 * weights["lm_head.weight"] + weights["model.embed_tokens.weight"].roll(-1, 0)
        weights["model.embed_tokens.weight"] = 16 * weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@dataclass
class Requests:
    """Prompts that come chunk by chunk, and how far each has come."""

    prompts: list[Tensor]
    done: list[int]
    slots: list[int]

    @classmethod
    def random(cls, seed: int, count: int, longest: int, vocab: int, slots: int) -> Requests:
        rng = random.Random(seed)
        prompts = [torch.tensor([rng.randrange(vocab) for _ in range(rng.randint(1, longest))]) for _ in range(count)]
        return cls(prompts, [0] * count, rng.sample(range(slots), count))

    def batch(self, lengths: dict[int, int]) -> tuple[Tensor, Batch]:
        """The next tokens of some requests, by request."""
        ids, starts = [], []
        for r, n in lengths.items():
            ids.append(self.prompts[r][self.done[r] : self.done[r] + n])
            starts.append(self.done[r])
            self.done[r] += n
        return torch.cat(ids), Batch(tuple(lengths.values()), tuple(starts), tuple(self.slots[r] for r in lengths))

    def steps(self, rng: random.Random) -> Iterator[tuple[Tensor, Batch, list[int]]]:
        """Random chunks of random requests until all are through; single tokens often, as when decoding."""
        while left := [r for r in range(len(self.prompts)) if self.done[r] < len(self.prompts[r])]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            room = {r: len(self.prompts[r]) - self.done[r] for r in chosen}
            lengths = {r: 1 if rng.random() < 0.3 else rng.randint(1, room[r]) for r in chosen}
            if rng.random() < 0.6:
                lengths = dict(sorted(lengths.items(), key=lambda item: item[1] > 1))
            ids, batch = self.batch(lengths)
            yield ids, batch, list(lengths)


def chunked(
    world: weft.World, plan: str | LayerPlan, config: Any = TINY, *, seed: int = 0, count: int = 3, longest: int = 14,
    dtype: torch.dtype = torch.bfloat16,
) -> float:  # fmt: skip
    """Random requests in random chunks, mixed with single tokens: the logits of every chunk's last token beside the
    reference's; the largest error of a step."""
    c = Config.of(config)
    model, cache = made(world, c, seed, dtype), Cache(c, world=world, slots=count + 2, max_len=longest + 3, dtype=dtype)
    requests, rng, worst = Requests.random(seed, count, longest, c.vocab_size, cache.slots), random.Random(seed), 0.0
    whole = [reference(c, state(c, seed, dtype), ids, world.device) for ids in requests.prompts]
    for ids, batch, chosen in requests.steps(rng):
        got = model(ids.to(world.device), batch, cache, plan)
        world.synchronize()
        worst = max(worst, distance(got.cpu(), torch.stack([whole[r][requests.done[r] - 1] for r in chosen])))
    return worst


def halves(
    world: weft.World, plan: LayerPlan, config: Any = TINY, *, seed: int = 0, lengths: Sequence[int] = (9, 11, 4)
) -> float:
    """A woven batch is its prefix and its suffix as two batches, one after the other, not woven: the same calls of the same
    kernels, so the same bits, in the logits and in the cache. With history: half of every request came before. Returns 0."""
    c = Config.of(config)
    model = made(world, c, seed)
    caches = [Cache(c, world=world, slots=len(lengths), max_len=max(lengths) + 1) for _ in range(2)]
    requests = Requests.random(seed, len(lengths), 1, c.vocab_size, len(lengths))
    requests.prompts = [torch.arange(n) * 7 % c.vocab_size for n in lengths]
    first = requests.batch({r: n // 2 for r, n in enumerate(lengths)})
    ids, batch = requests.batch({r: n - n // 2 for r, n in enumerate(lengths)})
    apart = LayerPlan("fused", sms=plan.sms, norm=plan.norm)
    for cache in caches:
        model(first[0].to(world.device), first[1], cache, apart)
    ids = ids.to(world.device)
    got = model(ids, batch, caches[0], plan)
    pieces = batch.split(plan.split)
    ends = [model(i, b, caches[1], apart) for i, b in zip(ids.split([b.tokens for b in pieces]), pieces, strict=True)]
    straddles = pieces[0].requests + pieces[1].requests > batch.requests
    want = torch.cat([ends[0][: pieces[0].requests - straddles], ends[1]])
    world.synchronize()
    same = torch.equal(got, want) and all(torch.equal(getattr(caches[0], n), getattr(caches[1], n)) for n in ("keys", "values"))  # fmt: skip
    return 0.0 if same else float("inf")


def greedy(
    world: weft.World,
    plan: str | LayerPlan,
    other: str | LayerPlan,
    config: Any = TINY,
    *,
    steps: int = 6,
    lengths: Sequence[int] = (7, 3, 12),
    seed: int = 0,
) -> float:
    """The share of tokens that differ when two plans decode greedily from the same prompts."""
    tokens, c = [], Config.of(config)
    model = made(world, c, seed, sure=True)
    for p in (plan, other):
        cache = Cache(c, world=world, slots=len(lengths), max_len=max(lengths) + steps)
        ids = torch.cat([torch.arange(n) * 5 % c.vocab_size for n in lengths]).to(world.device)
        logits, out, at = model(ids, Batch.prefill(lengths), cache, p), [], list(lengths)
        for _ in range(steps):
            world.synchronize()
            out.append(logits.argmax(-1))
            logits = model(out[-1], Batch.decode(at), cache, p)
            at = [n + 1 for n in at]
        world.synchronize()
        tokens.append(torch.stack(out))
    return (tokens[0] != tokens[1]).float().mean().item()


def padded(
    world: weft.World,
    plan: str | LayerPlan,
    config: Any = TINY,
    *,
    seed: int = 0,
    count: int = 4,
    longest: int = 14,
    sizes: tuple[int, ...] = (4, 8, 16, 64),
) -> float:
    """`Graphs`, batch after batch in the same few sizes, beside the reference."""
    c = Config.of(config)
    model, cache = made(world, c, seed), Cache(c, world=world, slots=count, max_len=longest)
    graphs = Graphs(model, cache, sizes=sizes, several=count, plan=plan)
    requests, rng, worst = Requests.random(seed, count, longest, c.vocab_size, count), random.Random(seed), 0.0
    whole = [reference(c, state(c, seed), ids, world.device) for ids in requests.prompts]
    for ids, batch, chosen in requests.steps(rng):
        got = graphs(ids.to(world.device), batch)
        world.synchronize()
        worst = max(worst, distance(got.cpu(), torch.stack([whole[r][requests.done[r] - 1] for r in chosen])))
    return worst


def delays(world: weft.World, plans: Sequence[LayerPlan], config: Any, calls: int, lengths: Sequence[int]) -> float:
    """Random ranks start late, call after call, plan after plan: the same bits every time as with that plan at first.
    Returns 0."""
    c, rng = Config.of(config), random.Random(100 + world.rank)
    model, cache = made(world, c), Cache(c, world=world, slots=len(lengths), max_len=max(lengths))
    ids, batch = (torch.arange(sum(lengths)) * 7 % c.vocab_size).to(world.device), Batch.prefill(lengths)
    layouts = [model.layout(batch, cache, plan) for plan in plans]
    first = [model(ids, layout).clone() for layout in layouts]
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(calls):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        wrong += (model(ids, layouts[i % len(plans)]) != first[i % len(plans)]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def gpu_cases(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Name, bound on the error, and case: for a driver that runs them all on one world."""
    big = dict(config=SMALL, count=5, longest=400)
    sms = max(world.sm_count - 16, 1)
    plans = {
        "plain": LayerPlan("plain"), "fused": LayerPlan("fused"), "woven": LayerPlan("woven"),
        "woven, own GEMM": LayerPlan("woven", sms=sms), "sequence": LayerPlan("sequence"),
    }  # fmt: skip
    for name, plan in plans.items():
        for seed in (0, 1):
            yield f"decoder {name}, chunked {seed}", 8 * HALF, partial(chunked, world, plan, seed=seed, **big)
        yield f"decoder {name}, float16", HALF, partial(chunked, world, plan, dtype=torch.float16, **big)
        yield (
            f"decoder {name}, graphs",
            8 * HALF,
            partial(padded, world, plan, SMALL, longest=300, sizes=(4, 128, 512, 1200)),
        )
    for at in (64, 150, 200):
        for n in (0, sms):
            plan = LayerPlan("woven", at, n)
            yield (
                f"decoder halves at {at}, {n or 'all'} SMs",
                0.0,
                partial(halves, world, plan, SMALL, lengths=(300, 211, 64)),
            )
    yield "decoder delays, 100 calls", 0.0, partial(delays, world, list(plans.values()), SMALL, 100, (300, 211, 64))
    yield (
        "decoder greedy, 64 tokens",
        0.0,
        partial(greedy, world, "woven", "plain", SMALL, steps=64, lengths=(70, 3, 120)),
    )
