"""Check `weft.hf` on GPUs against Transformers' own tensor parallelism for the same model in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

import weft
from tests.emulated.cases import distance
from weft import hf

BF = torch.bfloat16
BOUND = 3e-2  # the difference between the logits of two bf16 models that round in different places
SIZES = dict(
    vocab_size=1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=1023,
)  # fmt: skip


def unsplit(kind: str) -> Any:
    """Return a model whose random weights are the same every time and on every rank."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES, dtype=BF)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(BF).eval()


def loaded(world: weft.World, kind: str) -> Any:
    """Return the model that Transformers has split over all ranks. If each rank drew separate weights, the shards would
    be equal, and two logits would be equal and largest everywhere."""
    from transformers.distributed import DistributedConfig

    whole, split = unsplit(kind), DistributedConfig(tp_size=world.size, tp_plan="auto")
    options = dict(config=whole.config, state_dict=whole.state_dict(), dtype=BF, distributed_config=split)
    return type(whole).from_pretrained(None, **options).to(world.device).eval()


def ids_of(world: weft.World, *shape: int) -> torch.Tensor:
    generator = torch.Generator(world.device).manual_seed(1)
    return torch.randint(2, 1000, shape, device=world.device, generator=generator)


@torch.no_grad()
def forward(world: weft.World, kind: str) -> float:
    """Run three sizes: few tokens, whose whole residual every rank holds; many tokens, whose residual rows are split
    over ranks, in one part and in two; and a prompt that is long enough for the faster attention."""
    model, worst = loaded(world, kind), 0.0
    for shape, two_parts in (((2, 5), None), ((3, 700), None), ((2, 5), 2), ((3, 700), 2), ((1, 2048), None)):
        ids = ids_of(world, *shape)
        expected = model(ids, use_cache=False).logits
        hf.weave(model, two_parts=two_parts)
        with torch.inference_mode():  # the next pass must be able to use memory that this pass allocates
            model(ids, use_cache=False)
        actual = model(ids, use_cache=False).logits
        again = model(ids, use_cache=False, output_hidden_states=True)
        hf.unweave(model)
        worst = max(worst, distance(actual, expected), distance(again.logits, expected))
        worst = max(worst, 0.0 if again.hidden_states[1].shape == (*shape, SIZES["hidden_size"]) else 1.0)
        worst = max(worst, 0.0 if (model(ids, use_cache=False).logits == expected).all() else 1.0)
    return worst


@torch.no_grad()
def captured(model: Any, ids: torch.Tensor, world: weft.World) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture one forward pass over `ids` in a CUDA graph; return the graph, and the logits that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(ids, use_cache=False)
    world.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = model(ids, use_cache=False).logits
    return graph, logits


@torch.no_grad()
def replayed(model: Any, ids: torch.Tensor, world: weft.World) -> float:
    """Return the distance between the logits of a CUDA graph's replays, each with different tokens, and those of eager
    calls."""
    graph, logits = captured(model, ids, world)
    worst = 0.0
    for replay in range(3):
        ids.copy_((ids * 7 + replay) % 1000 + 2)
        graph.replay()
        worst = max(worst, distance(logits, model(ids, use_cache=False).logits))
    world.synchronize()
    return worst


def graph(world: weft.World, two_parts: int | None) -> float:
    return replayed(hf.weave(loaded(world, "Llama"), two_parts=two_parts), ids_of(world, 1, 256), world)


@torch.no_grad()
def written(model: Any, ids: torch.Tensor, world: weft.World) -> float:
    """Return the distance between a woven model whose parameters were overwritten, together with its graph, and the
    same model woven again. The test writes experts' parameters as a collective does, which a pass would not notice, and
    then packs them again."""
    hf.weave(model, world)
    graph, logits = captured(model, ids, world)
    graph.replay()
    before = logits.clone()
    for name, p in model.named_parameters():
        if "proj" in name or "experts" in name:
            torch.Tensor.data.__get__(getattr(p, "_local_tensor", p)).mul_(1.5)
    hf.repack(model)
    graph.replay()
    world.synchronize()
    replayed_, eager = logits.clone(), model(ids, use_cache=False).logits
    expected = hf.weave(hf.unweave(model), world)(ids, use_cache=False).logits
    if (before == expected).all():
        return 1.0
    return max(distance(replayed_, expected), distance(eager, expected))


@torch.no_grad()
def drawn(world: weft.World) -> float:
    """Return whether all ranks generate the same tokens, although each rank has a separate generator."""
    torch.manual_seed(world.rank)
    ids = ids_of(world, 2, 17)
    wanted = dict(max_new_tokens=8, do_sample=True, temperature=4.0, attention_mask=torch.ones_like(ids))
    tokens = hf.weave(loaded(world, "Llama")).generate(ids, **wanted).tolist()
    return 0.0 if all(tokens_of_rank == tokens for tokens_of_rank in world.exchange(tokens)) else 1.0


@torch.no_grad()
def generate(world: weft.World, static: bool) -> float:
    """Compare the tokens with those that Transformers alone generates, unless its two best logits are equal up to
    rounding."""
    model = loaded(world, "Qwen3")
    ids = ids_of(world, 2, 17)
    cache_options: dict[str, Any] = dict(cache_implementation="static", disable_compile=True) if static else {}
    options = dict(max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(ids), **cache_options)
    expected = model.generate(ids, **options)
    actual = hf.weave(model).generate(ids, **options)
    same = (actual == expected).long().cumprod(1)
    teacher = hf.unweave(model)(expected, use_cache=False).logits.float().topk(2).values
    for row, position in enumerate(same.sum(1).tolist()):
        if position < expected.shape[1]:
            best, second = teacher[row, position - 1].tolist()
            if best - second > 4 * 2**-8 * abs(best):
                return 1.0
    return 0.0


@torch.no_grad()
def forced(world: weft.World, kind: str, steps: int = 64) -> float:
    """In many steps, each of which continues the tokens that Transformers chose on one GPU, the woven model must choose
    the same next token as Transformers, unless the two best logits are within 4 ulps of bfloat16."""
    from transformers import DynamicCache

    whole, ids = unsplit(kind).to(world.device), ids_of(world, 2, 17)
    options = dict(max_new_tokens=steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens = whole.generate(ids, attention_mask=torch.ones_like(ids), **options)
    prompt_len, count = ids.shape[1], tokens.shape[1] - ids.shape[1]
    best = whole(tokens, use_cache=False).logits[:, prompt_len - 1 : -1].float().topk(2).values
    near = best[..., 0] - best[..., 1] <= 4 * 2**-8 * best[..., 0].abs()
    model = hf.weave(loaded(world, kind))
    cache = DynamicCache(config=model.config)
    step_inputs = [ids, *tokens[:, prompt_len:-1].split(1, 1)]
    chosen = torch.cat([model(t, past_key_values=cache).logits[:, -1:].argmax(-1) for t in step_inputs], 1)
    right = (chosen == tokens[:, prompt_len:]) | near
    return 0.0 if count == steps and right.all() and near.float().mean() < 0.5 else 1.0


def serve(world: weft.World, graph: bool) -> float:
    """Continuous batching must give the same tokens as generate, unless the two best logits are equal up to
    rounding."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = hf.weave(loaded(world, "Qwen3"))
    prompts = [ids_of(world, 1, n)[0].tolist() for n in (3, 40, 17, 300)]
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    expected = [model.generate(torch.tensor([p], device=world.device), **options)[0] for p in prompts]
    room = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128, use_cuda_graph=graph)
    requests = hf.paged(model).generate_batch(prompts, GenerationConfig(**options), room)
    model.set_attn_implementation("sdpa")
    for expected_tokens, prompt, request in zip(expected, prompts, requests.values(), strict=True):
        actual = torch.tensor(prompt + request.generated_tokens, device=world.device)
        position = int((actual == expected_tokens).long().cumprod(0).sum())
        if position < len(expected_tokens):
            with torch.no_grad():
                best, second = (
                    model(expected_tokens[None], use_cache=False)
                    .logits[0, position - 1]
                    .float()
                    .topk(2)
                    .values.tolist()
                )
            if best - second > 4 * 2**-8 * abs(best):
                return 1.0
    return 0.0


@torch.no_grad()
def styled(world: weft.World) -> float:
    """Compare weft's styles for Transformers with Transformers' own styles."""
    ids, reference = ids_of(world, 2, 300), loaded(world, "Llama")
    with hf.styles() as styled_parts:
        model = loaded(world, "Llama")
    for parameter, reference_parameter in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.copy_(reference_parameter)
    off = distance(model(ids, use_cache=False).logits, reference(ids, use_cache=False).logits)
    return off if styled_parts.linears == 7 * SIZES["num_hidden_layers"] else 1.0


def checks(world: weft.World) -> Iterator[tuple[str, float, Callable[[], float]]]:
    if find_spec("transformers") is None:
        return
    for kind in ("Llama", "Qwen3"):
        yield f"hf {kind}", BOUND, partial(forward, world, kind)
    yield "hf in a graph", BOUND, partial(graph, world, None)
    yield "hf in a graph, in two parts", BOUND, partial(graph, world, 2)
    yield "hf written", BOUND, lambda: written(loaded(world, "Qwen3"), ids_of(world, 1, 256), world)
    yield "hf draws", 0.0, partial(drawn, world)
    yield "hf styles", BOUND, partial(styled, world)
    yield "hf generate", 0.0, partial(generate, world, False)
    yield "hf generate, static cache", 0.0, partial(generate, world, True)
    yield "hf tokens of one GPU over 64 steps", 0.0, partial(forced, world, "Llama")
    yield "hf continuous batching", 0.0, partial(serve, world, False)
    yield "hf continuous batching, in graphs", 0.0, partial(serve, world, True)
