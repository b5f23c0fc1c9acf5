"""Training a small decoder with mixtures of experts (as Mixtral: attention, then top-2 of the experts): every rank has sequences of
its own and some of the experts, and a copy of all else, whose gradients are summed. The losses are those of the whole model in
one process, to rounding.

On GPUs:            torchrun --nproc-per-node 2 examples/train_moe.py
On emulated ranks:  python examples/train_moe.py --emulated
"""

import torch
import torch.nn.functional as F

from weft import moe

K = 2  # experts of a token


def made(vocab, hidden, inner, layers, experts, device):
    """Parameters by name, float32, the same on every rank."""
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
    """Sum over tokens [B, S] of the next one's cross entropy. experts: what a layer's number makes of rows [B S, H]."""
    x = p["embedding"][tokens[:, :-1]]
    b, s, h = x.shape
    for i in range(layers):
        q, k, v = (F.rms_norm(x, (h,)) @ p[f"{i}.qkv"].t()).view(b, s, 3, -1, 16).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.transpose(1, 2).reshape(b, s, h) @ p[f"{i}.out"].t()
        x = x + experts(i, F.rms_norm(x, (h,)).view(-1, h)).view(b, s, h)
    logits = F.rms_norm(x, (h,)) @ p["embedding"].t() * h**-0.5
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def over_ranks(world, p):
    """Experts of which this rank has its own, in bfloat16."""

    def experts(i, x):
        ids, weights = moe.gate(x @ p[f"{i}.router"].t(), K, world=world)
        w13, w2 = moe.pack(p[f"{i}.w13"].bfloat16(), world=world), p[f"{i}.w2"].bfloat16()
        return moe.moe(x.bfloat16(), ids, weights, w13, w2, world=world).float()

    return experts


def in_one_process(p):
    """All experts, of which a token's are picked, in bfloat16."""

    def experts(i, x):
        scores, ids = (x @ p[f"{i}.router"].t()).softmax(-1).topk(K, -1)
        w13, w2, out = p[f"{i}.w13"].bfloat16(), p[f"{i}.w2"].bfloat16(), torch.zeros_like(x)
        weights = scores / scores.sum(-1, keepdim=True)
        for e in range(w13.shape[0]):
            t, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[t].bfloat16() @ w13[e].t()).chunk(2, -1)
            out = out.index_add(0, t, weights[t, slot, None] * ((F.silu(gate) * up) @ w2[e].t()).float())
        return out

    return experts


def train(world, p, layers, tokens, steps, experts, shared):
    """Losses a token. shared: names of the parameters whose gradients, as the losses, are summed over the ranks."""
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
    tokens, mine = tokens.to(world.device), slice(2 * world.rank, 2 * world.rank + 2)
    whole = {name: t.requires_grad_() for name, t in made(vocab, hidden, inner, layers, experts, world.device).items()}
    own = {
        name: t.detach()[mine if ".w" in name else slice(None)].clone().requires_grad_() for name, t in whole.items()
    }
    copied = [name for name in own if ".w" not in name]
    losses = train(world, own, layers, tokens[world.rank], steps, over_ranks(world, own), copied)
    want = train(world, whole, layers, tokens.flatten(0, 1), steps, in_one_process(whole), [])
    torch.testing.assert_close(losses, want, rtol=0.01, atol=0.01)
    if world.rank == 0:
        print(f"{steps} steps: loss {losses[0]:.4f} to {losses[-1]:.4f}; in one process to {want[-1]:.4f}")


if __name__ == "__main__":
    from launch import launch

    launch(main, 512, 256, 512, 2, 8, 129, 50, emulated=2)
