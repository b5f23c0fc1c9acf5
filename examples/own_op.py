"""Your own operator, y [W m, H] = RMSNorm(all_gather(x)): NCCL's all-gather and a norm, or one kernel that pushes its rows to every
rank and normalises those that arrive. The class provides plan="auto", CUDA graphs, torch.compile and gradients.
Checked on emulated ranks:  weft check examples/own_op.py
A row in the benchmark:     torchrun --nproc-per-node 2 -m bench.measure.run --out DIR --file examples/own_op.py
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import weft
import weft.lang as wl
from weft.plans import Sequential


@dataclass(frozen=True)
class Pushed(weft.Plan):
    kind = "pushed"
    rows: int = 4  # the rows of a block


@weft.jit
def push_and_norm(x, memory, peers, out, ch, M: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr):
    """`memory` has two halves, used alternately: a rank in call n has all rows of call n - 1, so all have read call n - 2's."""
    me, blocks = wl.rank_of(ch), M // ROWS
    half = (wl.calls_of(ch) & 1) * (ch.world * M * H)  # correct also after 2^31 calls
    column = tl.arange(0, triton.next_power_of_2(H))[None, :]
    offsets, mask = tl.arange(0, ROWS)[:, None] * H + column, column < H
    for b in range(tl.program_id(0), blocks, tl.num_programs(0)):
        rows = tl.load(x + b * ROWS * H + offsets, mask=mask, other=0.0)
        for rank in range(ch.world):
            wl.tile_push_data(peers, rank, half + (me * M + b * ROWS) * H + offsets, rows, mask)
        wl.channel_broadcast(ch, me * blocks + b, False)  # after this program's stores to all ranks
    for i in range(tl.program_id(0), ch.world * blocks, tl.num_programs(0)):
        block = (me * blocks + i) % (ch.world * blocks)  # local rows first
        wl.channel_wait(ch, block, 1, block, block // blocks)
        rows = tl.load(memory + half + block * ROWS * H + offsets, mask=mask, other=0.0).to(tl.float32)
        y = rows * tl.rsqrt(tl.sum(rows * rows, axis=1) / H + 1e-6)[:, None]
        tl.store(out + block * ROWS * H + offsets, y.to(out.dtype.element_ty), mask=mask)
    wl.end_call(ch, None, tl.num_programs(0))


@dataclass(frozen=True)
class GatherNormCall(weft.Call):
    m: int
    h: int
    world: int
    dtype: torch.dtype
    rows = property(lambda call: call.m * call.world)


def sequential(world, call, plan):
    def run(operands, out):
        full, stream = world.empty(out.shape, out.dtype), world.current_stream()
        world.all_gather(full, operands[0], stream)
        world.call(lambda: out.copy_(torch.rms_norm(full.float(), (call.h,), eps=1e-6)), [full], [out], stream)

    return run


def pushed(world, call, plan):  # made once for all calls of a shape: all but x and out
    memory = world.cached((call, plan), lambda: world.symmetric((2, call.rows, call.h), call.dtype, "gathered rows"))
    ch = world.channel(f"{call} {plan}", call.rows // plan.rows, None, 1)
    fixed = dict(memory=memory.local, peers=memory.addresses, ch=ch, M=call.m, H=call.h, ROWS=plan.rows)
    launch = weft.Launch(world, push_and_norm, world.sm_count, dict(num_warps=8), **fixed)
    return lambda operands, out: launch(world.current_stream(), x=operands[0], out=out)


class GatherNorm(weft.Op):
    name = "all_gather_rms_norm"
    signature = "Tensor x"
    runs = {Sequential: sequential, Pushed: pushed}
    emulator_plan = Pushed(rows=2)  # what "auto" runs in the emulator
    autotune_plans = (Pushed(), Pushed(rows=1), Pushed(rows=8))  # what "auto" times against sequential on GPUs

    def check(self, world, operands, options):
        if operands[0].dim() != 2:
            raise ValueError(f"x must be [m, H], got {list(operands[0].shape)}")
        return GatherNormCall(*operands[0].shape, world.size, operands[0].dtype)

    def outputs(self, world, call):
        return [((call.rows, call.h), call.dtype)]

    def unsupported(self, world, call, plan, requested):
        return world.backend.symmetric_unsupported or (f"{call.m} rows in {plan.rows}s" if call.m % plan.rows else None)

    def backward(self, world, ctx):  # the norm's Jacobian is the same on every rank, so it is applied once, to the sum
        (x,), (dy,) = ctx.saved, ctx.gradients
        dx, g, stream = world.empty(x.shape, x.dtype), world.empty(x.shape, dy.dtype), world.current_stream()
        world.reduce_scatter(g, dy.contiguous(), stream)

        def norm_backward():
            scale = torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)
            dx.copy_(scale * (g - x * scale * (g * x * scale).mean(1, keepdim=True)))

        world.call(norm_backward, [x, g], [dx], stream)
        return [dx]

    def examples(self, world):
        return {f"rows-{m}": ((torch.randn(m, 4096, device=world.device).bfloat16(),), ()) for m in (16, 256, 2048)}


GATHER_NORM = weft.registered(GatherNorm())


def all_gather_rms_norm(x: torch.Tensor, *, world: weft.World, plan: str | weft.Plan = "auto") -> torch.Tensor:
    return GATHER_NORM(world, plan, (x,))


def main(world):
    for plan in ("auto", "pushed", "sequential", "pushed"):
        shards = torch.randn(world.size, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        y = all_gather_rms_norm(shards[world.rank].to(world.device), world=world, plan=plan)
        world.synchronize()
        expected = torch.rms_norm(shards.view(-1, 64).float(), (64,), eps=1e-6)
        assert (y.cpu().float() - expected).abs().max() < 0.02
