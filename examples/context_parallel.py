"""Context-parallel prefill of a Llama: every rank has all weights and some rows of one long prompt.

On GPUs:            torchrun --nproc-per-node 2 examples/context_parallel.py
On emulated ranks:  python examples/context_parallel.py --emulated
"""

import time

import torch
from torch.nn.functional import embedding

import weft
from weft.models import Batch, Cache, Llama

LLAMA_8B = dict(  # with a small vocabulary and few layers
    vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
)  # fmt: skip
SMALL = LLAMA_8B | dict(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def whole_model(sizes, world):
    """Return a model with the same weights on every rank, in a World of that rank alone."""
    model, draw = Llama(sizes, world=world.split(world.rank)), torch.Generator(world.device).manual_seed(0)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, weight.shape[1] ** -0.5, generator=draw)
    return model


def zigzag_attention(world, plan="auto"):
    def attention(q, k, v):
        return weft.gathered_attention(q, k, v, causal=True, layout="zigzag", world=world, plan=plan)

    return attention


@torch.no_grad()
def prefill(model, ids, positions, rotary, attention):
    """Return the normalised output [n, H] of the last layer for this rank's rows of a prompt, which have these `positions`.
    `rotary` has the cosines and sines of all positions; attention(q, k, v) attends to all ranks' rows."""
    c, alone, d = model.config, model.world, model.config.head_dim
    cos, sin = rotary[positions][:, None].chunk(2, -1)

    def rotated(x):
        left, right = x.float().chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)

    def norm(x, weight):
        return weft.rms_norm(x, weight, c.rms_norm_eps, world=alone)

    x = embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        part = layer.self_attn
        qkv = (norm(x, layer.input_layernorm.weight) @ part.qkv.t()).view(len(x), -1, d)
        q, k, v = qkv.split([part.heads, part.kv_heads, part.kv_heads], 1)
        x = x + attention(rotated(q), rotated(k), v.contiguous()).flatten(1) @ part.out.t()
        x = x + layer.mlp(norm(x, layer.post_attention_layernorm.weight))
    return norm(x, model.model.norm.weight)


def main(world, sizes=SMALL, rows=8):
    """Compare the last token's logits with those of the model's own forward pass of the whole prompt."""
    model, length = whole_model(sizes, world), rows * world.size
    draw = torch.Generator(world.device).manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (length,), device=world.device, generator=draw)
    rank_ids, positions = weft.zigzag_split(ids, world), weft.zigzag_positions(length, world)
    rotary = model.config.rotary(length, world.device)
    for plan in ("sequential", "auto", "auto"):
        world.synchronize()
        start = time.perf_counter()
        hidden = prefill(model, rank_ids, positions, rotary, zigzag_attention(world, plan))
        world.synchronize()
        if world.rank == 0 and world.backend.name == "cuda":
            # The first call of a plan includes trials and preparation.
            print(f"{plan}: {(time.perf_counter() - start) * 1e3:.1f} ms")
    if world.rank == 0:  # in the zigzag layout rank 0 has the last chunk
        alone = model.world
        expected = model(ids, Batch.prefill([length]), Cache(sizes, world=alone, slots=1, max_len=length), "plain")[0]
        actual = hidden[-1] @ model.lm_head.weight.t()
        error = (actual.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.05, f"logits are off by {error:.3f}"


if __name__ == "__main__":
    from launch import launch

    launch(main, LLAMA_8B, 8192)
