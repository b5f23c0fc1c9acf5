"""Cases of a decoder, written once for every backend: each function runs on one rank and returns its error."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import weft
from tests.emulated.cases import distance, draw
from weft.models import Batch, Cache, Config, Graphs, Llama
from weft.models.cache import LONG_PROMPT
from weft.nn.weave import LayerPlan

Tensor, CPU = torch.Tensor, torch.device("cpu")
HALF = 5e-3  # error of float16 through the layers of SMALL; bfloat16's is eight times as large
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


SIZES = {k: TINY[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {  # names and keys as in Transformers' configs
    "mixtral": dict(SIZES, intermediate_size=48, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        SIZES, intermediate_size=80, moe_intermediate_size=40, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False,
        shared_expert_intermediate_size=72,
    ),
    "qwen3_moe": dict(
        SIZES, intermediate_size=96, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[0],
    ),
}  # fmt: skip
for kind, config in MIXTURES.items():
    config["model_type"] = kind
DENSE = {kind: dict(TINY, model_type=kind) for kind in ("qwen2", "qwen3")}
del DENSE["qwen2"]["head_dim"]  # the default is the hidden size divided by the number of heads
LARGER = dict(hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8, vocab_size=512)


def larger(kind: str) -> dict[str, Any]:
    """Return the configuration of a mixture that is large enough for GPUs."""
    sizes = dict(moe_intermediate_size=384, num_experts=32, num_experts_per_tok=4)
    if kind == "mixtral":
        sizes = dict(intermediate_size=768, num_local_experts=8)
    return MIXTURES[kind] | LARGER | sizes | dict(head_dim=64)


def state(config: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return unsharded weights under Hugging Face's names, scaled so that the logits differ clearly and every layer
    matters."""
    return dict(_state(Config.from_hf(config), seed, dtype))


@functools.lru_cache(maxsize=4)
def _state(c: Config, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    q, kv, h = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size
    shapes = {"model.embed_tokens.weight": (c.vocab_size, h), "lm_head.weight": (c.vocab_size, h)}
    for layer in range(c.num_hidden_layers):
        for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = shape
        prefix = f"model.layers.{layer}."
        if c.qkv_bias:
            shapes |= {f"{prefix}self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {prefix + "mlp." + name: shape for name, shape in _mlp_shapes(c, layer).items()}
    weights = {
        name: (
            draw(seed * 1000 + n, *shape, dtype=torch.float32) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
        ).to(dtype)
        for n, (name, shape) in enumerate(shapes.items())
    }
    norms = [f"model.layers.{n}.{which}_layernorm.weight" for n in range(c.num_hidden_layers) for which in ("input", "post_attention")]  # fmt: skip
    for n, name in enumerate([*norms, "model.norm.weight"]):
        weights[name] = (1 + 0.1 * draw(seed * 1000 + 500 + n, h, dtype=torch.float32)).to(dtype)
    if c.qk_norm:
        for n in range(2 * c.num_hidden_layers):
            name = f"model.layers.{n // 2}.self_attn.{'qk'[n % 2]}_norm.weight"
            weights[name] = (1 + 0.3 * draw(seed * 1000 + 700 + n, c.head_dim, dtype=torch.float32)).to(dtype)
    if c.mixture:
        _decide(c, weights, seed)
    return weights


def _mlp_shapes(c: Config, layer: int) -> dict[str, tuple[int, ...]]:
    def dense(inner: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
        h = c.hidden_size
        return {
            f"{prefix}{n}_proj.weight": s for n, s in (("gate", (inner, h)), ("up", (inner, h)), ("down", (h, inner)))
        }

    m, h = c.mixture, c.hidden_size
    if m is None or layer in m.dense_layers:
        return dense(c.intermediate_size)
    e, i = m.num_experts, m.intermediate_size
    shapes = {"gate.weight": (e, h), "experts.gate_up_proj": (e, 2 * i, h), "experts.down_proj": (e, h, i)}
    if m.shared_intermediate_size:
        shapes |= dense(m.shared_intermediate_size, "shared_expert.") | {"shared_expert_gate.weight": (1, h)}
    return shapes


def _decide(c: Config, weights: dict[str, Tensor], seed: int) -> None:
    """Set routers and embeddings so that a token's id determines its experts by a margin far larger than any rounding;
    the experts differ between layers. Otherwise two experts with nearly equal logits could swap, and change the model's
    logits."""
    assert c.mixture is not None
    e, k, embedding = c.mixture.num_experts, c.mixture.top_k, "model.embed_tokens.weight"
    towards = (
        torch.linalg.qr(draw(seed * 1000 + 900, c.hidden_size, e, dtype=torch.float32))[0].t() * c.hidden_size**0.5
    )
    token_ids = torch.arange(c.vocab_size)
    pulled = sum((1 - 0.5 * j / k) * towards[(token_ids + j) % e] for j in range(k))
    weights[embedding] = (draw(seed * 1000 + 901, *weights[embedding].shape, dtype=torch.float32) + 4 * pulled).to(
        weights[embedding].dtype
    )
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            router = 6 * towards.roll(int(name.split(".")[2]), 0) / c.hidden_size
            weights[name] = router.to(weights[name].dtype)


def rotary(config: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [length, head_dim / 2] of the positions in float64, as Hugging Face defines them
    (`_compute_default_rope_parameters`, `_compute_linear_scaling_rope_parameters`, `_compute_llama3_parameters`). In
    llama3 the wavelength of a frequency determines whether it is kept, divided, or interpolated between the two."""
    c = Config.from_hf(config)
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


def swiglu(y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.nn.functional.silu(y @ gate.t()) * (y @ up.t())) @ down.t()


def mixture(c: Config, w: dict[str, Tensor], y: Tensor) -> Tensor:
    """Return the experts' weighted sum plus the shared expert, token by token. Fail if rounding could change the choice
    of an expert."""
    m = c.mixture
    assert m is not None
    logits = y @ w["gate.weight"].t()
    best = logits.topk(min(m.top_k + 1, m.num_experts))
    if m.top_k < m.num_experts:
        assert (best.values[:, -2] - best.values[:, -1]).min() > 0.2, (
            "two experts have nearly equal scores: use another seed"
        )
    ids, share = best.indices[:, : m.top_k], logits.softmax(-1)
    out = torch.zeros_like(y)
    for token, experts in enumerate(ids.tolist()):
        chosen = share[token, experts]
        for e, weight in zip(experts, chosen / chosen.sum() if m.renormalise else chosen, strict=True):
            out[token] += weight * swiglu(y[token], *w["experts.gate_up_proj"][e].chunk(2), w["experts.down_proj"][e])
    if m.shared_intermediate_size:
        shared = swiglu(y, *(w[f"shared_expert.{n}_proj.weight"] for n in ("gate", "up", "down")))
        out += (y @ w["shared_expert_gate.weight"].t()).sigmoid() * shared
    return out


def reference(config: Any, weights: dict[str, Tensor], ids: Tensor, device: torch.device = CPU) -> Tensor:
    """Return logits [tokens, vocab] of one request's tokens by the definition of the model, in float64 on one rank."""
    c = Config.from_hf(config)
    w = {k: v.to(device).double() for k, v in weights.items()}
    t, d = len(ids), c.head_dim
    ids = ids.to(device)
    cos, sin = (part[:, None].to(device) for part in rotary(c, t))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt() * w[name]

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][ids]
    later = torch.ones(t, t, dtype=torch.bool, device=device).triu(1)
    for layer in range(c.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        y = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (y @ w[f"{prefix}self_attn.{n}_proj.weight"].t() + w.get(f"{prefix}self_attn.{n}_proj.bias", 0)).view(
                t, -1, d
            )
            for n in "qkv"
        )
        if c.qk_norm:
            q, k = norm(q, prefix + "self_attn.q_norm.weight"), norm(k, prefix + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k)
        share = c.num_attention_heads // c.num_key_value_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        seen = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", seen, v).flatten(1) @ w[prefix + "self_attn.o_proj.weight"].t()
        y = norm(x, prefix + "post_attention_layernorm.weight")
        if c.mixture is None or layer in c.mixture.dense_layers:
            x = x + swiglu(y, *(w[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))
        else:
            x = x + mixture(
                c, {n.removeprefix(prefix + "mlp."): v for n, v in w.items() if n.startswith(prefix + "mlp.")}, y
            )
    return (norm(x, "model.norm.weight") @ w["lm_head.weight"].t()).cpu()


def build_llama(
    world: weft.World, config: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sure: bool = False,
    parallel: str = "expert",
) -> Llama:  # fmt: skip
    """With `sure`, the output head strongly prefers one token, the second to last of the vocabulary. A wrong layer then
    changes the greedy token, and another plan's rounding does not."""
    model, weights = Llama(config, world=world, dtype=dtype, parallel=parallel), state(config, seed, dtype)
    if sure:
        weights["lm_head.weight"] = 0.3 * weights["lm_head.weight"] + weights["model.embed_tokens.weight"].roll(-1, 0)
        weights["model.embed_tokens.weight"] = 16 * weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@dataclass
class Requests:
    """Prompts that are processed in chunks, and the number of tokens processed of each."""

    prompts: list[Tensor]
    done: list[int]
    slots: list[int]

    @classmethod
    def random(cls, seed: int, count: int, longest: int, vocab: int, slots: int) -> Requests:
        rng = random.Random(seed)
        prompts = [torch.tensor([rng.randrange(vocab) for _ in range(rng.randint(1, longest))]) for _ in range(count)]
        return cls(prompts, [0] * count, rng.sample(range(slots), count))

    def batch(self, lengths: dict[int, int]) -> tuple[Tensor, Batch]:
        """Return each request's next tokens."""
        ids, starts = [], []
        for r, n in lengths.items():
            ids.append(self.prompts[r][self.done[r] : self.done[r] + n])
            starts.append(self.done[r])
            self.done[r] += n
        return torch.cat(ids), Batch(tuple(lengths.values()), tuple(starts), tuple(self.slots[r] for r in lengths))

    def steps(self, rng: random.Random) -> Iterator[tuple[Tensor, Batch, list[int]]]:
        """Yield random chunks of random requests until all are processed; many chunks are single tokens, as in
        decoding."""
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
    dtype: torch.dtype = torch.bfloat16, parallel: str = "expert",
) -> float:  # fmt: skip
    """Process random requests in random chunks mixed with single tokens, compare the logits of every chunk's last
    token with the reference's, and return the largest error of a step."""
    c = Config.from_hf(config)
    model = build_llama(world, c, seed, dtype, parallel=parallel)
    cache = Cache(c, world=world, slots=count + 2, max_len=longest + 3, dtype=dtype)
    requests, rng, worst = Requests.random(seed, count, longest, c.vocab_size, cache.slots), random.Random(seed), 0.0
    whole = [reference(c, state(c, seed, dtype), ids, world.device) for ids in requests.prompts]
    for ids, batch, chosen in requests.steps(rng):
        logits = model(ids.to(world.device), batch, cache, plan)
        world.synchronize()
        worst = max(worst, distance(logits.cpu(), torch.stack([whole[r][requests.done[r] - 1] for r in chosen])))
    return worst


def halves(
    world: weft.World, plan: LayerPlan, config: Any = TINY, *, seed: int = 0, lengths: Sequence[int] = (9, 11, 4),
    parallel: str = "expert",
) -> float:  # fmt: skip
    """Compare a woven batch with its prefix and its suffix as two successive, unwoven batches. Both runs make the same
    kernel calls, so logits and cache must be equal bit for bit. With `history`, the cache already holds half of every
    request. Return 0."""
    c = Config.from_hf(config)
    model = build_llama(world, c, seed, parallel=parallel)
    caches = [Cache(c, world=world, slots=len(lengths), max_len=max(lengths) + 1) for _ in range(2)]
    requests = Requests.random(seed, len(lengths), 1, c.vocab_size, len(lengths))
    requests.prompts = [torch.arange(n) * 7 % c.vocab_size for n in lengths]
    history = requests.batch({r: n // 2 for r, n in enumerate(lengths)})
    ids, batch = requests.batch({r: n - n // 2 for r, n in enumerate(lengths)})
    apart = LayerPlan("fused", sms=plan.sms, norm=plan.norm)
    for cache in caches:
        model(history[0].to(world.device), history[1], cache, apart)
    ids = ids.to(world.device)
    woven_logits = model(ids, batch, caches[0], plan)
    parts = batch.split(plan.split)
    ends = [model(i, b, caches[1], apart) for i, b in zip(ids.split([b.tokens for b in parts]), parts, strict=True)]
    straddles = parts[0].requests + parts[1].requests > batch.requests
    expected = torch.cat([ends[0][: parts[0].requests - straddles], ends[1]])
    world.synchronize()
    same = torch.equal(woven_logits, expected) and all(torch.equal(getattr(caches[0], n), getattr(caches[1], n)) for n in ("keys", "values"))  # fmt: skip
    return 0.0 if same else float("inf")


def greedy(
    world: weft.World,
    plan: str | LayerPlan,
    other_plan: str | LayerPlan,
    config: Any = TINY,
    *,
    steps: int = 6,
    lengths: Sequence[int] = (7, 3, 12),
    seed: int = 0,
) -> float:
    """Return the share of tokens that differ between two plans that decode the same prompts greedily."""
    tokens, c = [], Config.from_hf(config)
    model = build_llama(world, c, seed, sure=True)
    for p in (plan, other_plan):
        cache = Cache(c, world=world, slots=len(lengths), max_len=max(lengths) + steps)
        ids = torch.cat([torch.arange(n) * 5 % c.vocab_size for n in lengths]).to(world.device)
        logits, out, positions = model(ids, Batch.prefill(lengths), cache, p), [], list(lengths)
        for _ in range(steps):
            world.synchronize()
            out.append(logits.argmax(-1))
            logits = model(out[-1], Batch.decode(positions), cache, p)
            positions = [n + 1 for n in positions]
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
    parallel: str = "expert",
) -> float:
    """Compare `Graphs` with the reference over batches that are padded to the same few sizes."""
    c = Config.from_hf(config)
    model, cache = build_llama(world, c, seed, parallel=parallel), Cache(c, world=world, slots=count, max_len=longest)
    graphs = Graphs(model, cache, sizes=sizes, several=count, plan=plan)
    requests, rng, worst = Requests.random(seed, count, longest, c.vocab_size, count), random.Random(seed), 0.0
    whole = [reference(c, state(c, seed), ids, world.device) for ids in requests.prompts]
    for ids, batch, chosen in requests.steps(rng):
        logits = graphs(ids.to(world.device), batch)
        world.synchronize()
        worst = max(worst, distance(logits.cpu(), torch.stack([whole[r][requests.done[r] - 1] for r in chosen])))
    return worst


def lengthy(world: weft.World, kind: str, config: Any = TINY, *, long: int) -> float:
    """Compare a prompt of `long` tokens with the reference. The batch also contains the second chunk of a prompt twice
    as long and, if a separate kernel attends to single tokens, a single token. On GPUs the pass is captured and
    replayed."""
    c = Config.from_hf(config)
    model, cache = build_llama(world, c), Cache(c, world=world, slots=4, max_len=2 * long + 8)
    requests, worst = Requests.random(0, 3, 1, c.vocab_size, 4), 0.0
    requests.prompts = [torch.arange(n) * 7 % c.vocab_size for n in (4, 2 * long, long)]
    whole = [reference(c, state(c), ids, world.device) for ids in requests.prompts]
    single = {0: 1} if model.flash else {}
    plan = LayerPlan(kind, len(single) + long) if kind == "woven" else LayerPlan(kind)
    for lengths in ({0: 3}, {1: long}, {**single, 1: long, 2: long}):
        ids, batch = requests.batch(lengths)
        ids, layout = ids.to(world.device), model.layout(batch, cache, plan if len(lengths) > 1 else "plain")
        assert layout.parts[-1].long == (0 not in lengths or len(lengths) > 1)
        logits = model(ids, layout)
        if world.device.type == "cuda" and len(lengths) > 1:
            logits, replay = captured(lambda ids=ids, layout=layout: model(ids, layout))
            logits.zero_()
            replay()
        world.synchronize()
        expected = torch.stack([whole[r][requests.done[r] - 1] for r in lengths])
        worst = max(worst, distance(logits.cpu(), expected))
    return worst


def captured(fn: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture `fn` in a CUDA graph; return its result, and a function that replays the graph."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = fn()
    return out, graph.replay


def delays(world: weft.World, plans: Sequence[LayerPlan], config: Any, calls: int, lengths: Sequence[int]) -> float:
    """Delay random ranks in every call and plan: the bits must equal the plan's first result. Return 0."""
    c, rng = Config.from_hf(config), random.Random(100 + world.rank)
    model, cache = build_llama(world, c), Cache(c, world=world, slots=len(lengths), max_len=max(lengths))
    ids, batch = (torch.arange(sum(lengths)) * 7 % c.vocab_size).to(world.device), Batch.prefill(lengths)
    layouts = [model.layout(batch, cache, plan) for plan in plans]
    first_logits = [model(ids, layout).clone() for layout in layouts]
    wrong = torch.zeros((), device=world.device, dtype=torch.int64)
    for i in range(calls):
        if rng.random() < 0.4:
            torch.cuda._sleep(rng.randrange(1000, 600000))
        wrong += (model(ids, layouts[i % len(plans)]) != first_logits[i % len(plans)]).any()
    world.synchronize()
    return float("inf") if wrong.item() else 0.0


def gpu_cases(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield the name, the error bound and the function of each GPU case, for a driver that runs them all on one
    World."""
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
    for split in (64, 150, 200):
        for n in (0, sms):
            plan = LayerPlan("woven", split, n)
            yield (
                f"decoder halves at {split}, {n or 'all'} SMs",
                0.0,
                partial(halves, world, plan, SMALL, lengths=(300, 211, 64)),
            )
    yield "decoder woven, long prompts", 8 * HALF, partial(lengthy, world, "woven", SMALL, long=LONG_PROMPT)
    yield "decoder delays, 100 calls", 0.0, partial(delays, world, list(plans.values()), SMALL, 100, (300, 211, 64))
    yield (
        "decoder greedy, 64 tokens",
        0.0,
        partial(greedy, world, "woven", "plain", SMALL, steps=64, lengths=(70, 3, 120)),
    )
    yield from mixture_cases(world)


def mixture_cases(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    for kind in MIXTURES:
        config = larger(kind)
        yield (
            f"decoder {kind}, chunked",
            HALF,
            partial(chunked, world, "auto", config, count=4, longest=300, dtype=torch.float16),
        )
        yield (
            f"decoder {kind}, graphs",
            8 * HALF,
            partial(padded, world, "auto", config, longest=200, sizes=(4, 128, 512, 1200)),
        )
        yield from woven_mixture_cases(world, kind)
    for kind, config in DENSE.items():
        sizes = {
            n: SMALL[n]
            for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
        }
        for plan in ("fused", "sequence"):
            yield (
                f"decoder {kind}, {plan}",
                HALF,
                partial(chunked, world, plan, config | sizes, count=4, longest=300, dtype=torch.float16),
            )
    plans = [LayerPlan("sequence"), LayerPlan("fused"), LayerPlan("woven"), LayerPlan("woven", 128)]
    yield (
        "decoder qwen2_moe, delays, 100 calls",
        0.0,
        partial(delays, world, plans, larger("qwen2_moe"), 100, (301, 64)),
    )


def woven_mixture_cases(world: weft.World, kind: str) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Return cases whose tokens form two parts and whose ranks hold all rows, for whole experts and for experts split
    by columns."""
    config, lengths = larger(kind), (300, 211, 64)
    for parallel in ("expert", "tensor"):
        options = dict(config=config, parallel=parallel)
        big = partial(chunked, world, "woven", count=4, longest=300, dtype=torch.float16, **options)
        yield f"decoder {kind} woven, {parallel}, chunked", HALF, big
        graphs = partial(padded, world, "woven", longest=200, sizes=(4, 128, 512, 1200), **options)
        yield f"decoder {kind} woven, {parallel}, graphs", 8 * HALF, graphs
        parts = partial(halves, world, LayerPlan("woven", 150), lengths=lengths, **options)
        yield f"decoder {kind} woven, {parallel}, halves", 0.0, parts
