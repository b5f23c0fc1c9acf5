"""Your own experts between weft.moe.dispatch and combine: torch's grouped GEMMs, and two microbatches on separate streams, so that
one is exchanged while the other computes.

On GPUs:            torchrun --nproc-per-node 2 examples/moe_own_experts.py
On emulated ranks:  python examples/moe_own_experts.py --emulated
"""

import torch
from torch.nn.functional import silu

from weft import moe


def run(world, batches, experts, w13, w2):
    """Return the outputs [T, H] of every (x, ids, weights). w13 [El, 2 I, H] and w2 [El, H, I] are this rank's experts."""
    main, dispatched, results = world.current_stream(), [], []
    streams = [world.side_stream(f"microbatch {i}", urgent=False) for i in range(len(batches))]
    for stream, batch in zip(streams, batches, strict=True):
        world.wait_event(stream, world.record(main))
        with world.on(stream):
            dispatched.append(moe.dispatch(*batch, experts=experts, world=world, expert_alignment=16))
    for stream, (rows, handle) in zip(streams, dispatched, strict=True):
        with world.on(stream):
            ends = handle.offsets[1:]  # on the device, so that nothing waits for the host
            gate, up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=ends).chunk(2, -1)
            y = torch._grouped_mm(silu(gate) * up, w2.transpose(1, 2), offs=ends)
            results.append(moe.combine(y, handle))
        world.wait_event(main, world.record(stream))
    return results


def main(world, hidden=32, inner=48, tokens=6, k=2):
    experts, me = 2 * world.size, world.rank
    draw = torch.Generator(world.device).manual_seed(0)  # the same on every rank

    def randn(*shape):
        return torch.randn(*shape, generator=draw, device=world.device)

    xs = [randn(world.size, tokens, hidden).bfloat16() for _ in range(2)]
    scores, ids = randn(2, world.size, tokens, experts).softmax(-1).topk(k, -1)
    w13, w2 = (randn(experts, 2 * inner, hidden) * 0.2).bfloat16(), (randn(experts, hidden, inner) * 0.2).bfloat16()
    local_experts = slice(2 * me, 2 * me + 2)
    with torch.no_grad():
        batches = [(x[me], ids[i, me].int(), scores[i, me]) for i, x in enumerate(xs)]
        results = run(world, batches, experts, w13[local_experts], w2[local_experts])
    for (x, chosen, score), y in zip(batches, results, strict=True):
        gate, up = torch.einsum("th,enh->ten", x.float(), w13.float()).chunk(2, -1)
        all_experts = torch.einsum("ten,ehn->teh", silu(gate) * up, w2.float())
        expected = (all_experts.gather(1, chosen.long()[:, :, None].expand(-1, -1, hidden)) * score[:, :, None]).sum(1)
        torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05 * expected.std().item())


if __name__ == "__main__":
    from launch import launch

    launch(main, 2048, 768, 2048, 2)
