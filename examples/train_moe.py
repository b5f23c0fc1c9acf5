"""Train a small decoder with mixtures of experts (as Mixtral: attention, then the top 2 experts). Every rank has its own sequences,
some of the experts, and a copy of the other parameters, whose gradients are summed. The losses equal those of the whole model in
one process to rounding.

On GPUs:            torchrun --nproc-per-node 2 examples/train_moe.py
On emulated ranks:  python examples/train_moe.py --emulated
"""

import torch
import torch.nn.functional as F

from weft import moe

K = 2  # experts of a token


def make_parameters(vocab, hidden, inner, layers, experts, device):
    """Return float32 parameters by name, the same on every rank."""
    draw = torch.Generator(device).manual_seed(0)

    def randn(*shape, scale=hidden**-0.5):
        return torch.randn(*shape, generator=draw, device=device) * scale

    p = {"embedding": randn(vocab, hidden, scale=1.0)}
    for i in range(layers):
        p |= {f"{i}.qkv": randn(3 * hidden, hidden), f"{i}.out": randn(hidden, hidden)}
        p |= {f"{i}.router": randn(experts, hidden)}
        p |= {f"{i}.w13": randn(experts, 2 * inner, hidden), f"{i}.w2": randn(experts, hidden, inner)}
    return p


def loss_of(p, layers, tokens, experts):
    """Return the sum over tokens [B, S] of the cross entropy of the next token. experts(i, x) computes layer i's experts for rows
    x [B S, H]."""
    x = p["embedding"][tokens[:, :-1]]
    b, s, h = x.shape
    for i in range(layers):
        q, k, v = (F.rms_norm(x, (h,)) @ p[f"{i}.qkv"].t()).view(b, s, 3, -1, 16).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + heads.transpose(1, 2).reshape(b, s, h) @ p[f"{i}.out"].t()
        x = x + experts(i, F.rms_norm(x, (h,)).view(-1, h)).view(b, s, h)
    logits = F.rms_norm(x, (h,)) @ p["embedding"].t() * h**-0.5
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def over_ranks(world, p):
    """Return the bfloat16 experts of a layer, split over the ranks."""

    def experts(i, x):
        ids, weights = moe.gate(x @ p[f"{i}.router"].t(), K, world=world)
        w13, w2 = moe.pack(p[f"{i}.w13"].bfloat16(), world=world), p[f"{i}.w2"].bfloat16()
        return moe.moe(x.bfloat16(), ids, weights, w13, w2, world=world).float()

    return experts


def in_one_process(p):
    """Return the bfloat16 experts of a layer, all on this rank."""

    def experts(i, x):
        scores, ids = (x @ p[f"{i}.router"].t()).softmax(-1).topk(K, -1)
        w13, w2, out = p[f"{i}.w13"].bfloat16(), p[f"{i}.w2"].bfloat16(), torch.zeros_like(x)
        weights = scores / scores.sum(-1, keepdim=True)
        for e in range(w13.shape[0]):
            t, topk_slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[t].bfloat16() @ w13[e].t()).chunk(2, -1)
            out = out.index_add(0, t, weights[t, topk_slot, None] * ((F.silu(gate) * up) @ w2[e].t()).float())
        return out

    return experts


def train(world, p, layers, tokens, steps, experts, shared):
    """Return each step's loss per token. The gradients of the parameters `shared`, and the losses, are summed over the ranks."""
    losses, optimizer = [], torch.optim.SGD(p.values(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        loss = loss_of(p, layers, tokens, experts)
        loss.backward()
        sums = torch.cat([loss.detach().view(1), *(p[name].grad.flatten() for name in shared)])
        if shared:
            world.all_reduce(sums, world.current_stream())
            world.synchronize()
        count = tokens[:, 1:].numel() * (world.size if shared else 1)
        losses.append(sums[0].item() / count)
        parts = sums[1:].split([p[name].numel() for name in shared])
        for name, part in zip(shared, parts, strict=True):
            p[name].grad.copy_(part.view_as(p[name]))
        for t in p.values():
            t.grad /= count
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(world, vocab=16, hidden=16, inner=16, layers=1, sequences=1, length=5, steps=2):
    experts = 2 * world.size
    tokens = torch.randint(vocab, (world.size, sequences, length), generator=torch.Generator().manual_seed(1))
    tokens, local_experts = tokens.to(world.device), slice(2 * world.rank, 2 * world.rank + 2)
    unsharded = {
        name: t.requires_grad_()
        for name, t in make_parameters(vocab, hidden, inner, layers, experts, world.device).items()
    }
    sharded = {
        name: t.detach()[local_experts if ".w" in name else slice(None)].clone().requires_grad_()
        for name, t in unsharded.items()
    }
    replicated = [name for name in sharded if ".w" not in name]
    losses = train(world, sharded, layers, tokens[world.rank], steps, over_ranks(world, sharded), replicated)
    expected = train(world, unsharded, layers, tokens.flatten(0, 1), steps, in_one_process(unsharded), [])
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0.01)
    if world.rank == 0:
        print(f"{steps} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}; in one process to {expected[-1]:.4f}")


if __name__ == "__main__":
    from launch import launch

    launch(main, 512, 256, 512, 2, 8, 129, 50, emulated=2)
