"""The benchmark of all-reduce + residual + RMSNorm compares every plan with NCCL and torch's symmetric memory, by
number of tokens.

torchrun --nproc-per-node N -m bench.measure.norm --out DIR [--tokens ...] [--hidden 8192] [--modes graph eager]

All methods compute normalised rows on every rank and the new residual from partial sums x [M, H] in bfloat16. `sequential` is NCCL's
all-reduce in place and a torch.compile'd residual add + RMSNorm of all rows. weft's plans shard the residual and write to symmetric
memory, and `pull` plans read x from there, where a producing GEMM would write it.
The program compares every method with a float32 sum before it times it, and prints and leaves out a method that fails. It
appends rows to DIR/all_reduce_rms_norm.jsonl (M: tokens, N: hidden size), and the times of weft's plans to DIR/sweep.jsonl (for
bench/pages/table.py). `limit_us`: the bytes that a rank must receive over 378 GB/s, a copy engine's rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm

import weft
from bench.common.program import Program, gains, options, worst_error
from bench.common.resume import keep
from bench.common.timing import RIGHT, error_of, time_interleaved
from weft.lang.mapping import balanced_rows
from weft.planner.auto import auto as chosen
from weft.planner.search import brief
from weft.plans import Decomposed, OneShot, Plan, Sequential, TwoShotLowLatency, TwoShotPull, TwoShotPush

BF = torch.bfloat16
OP = "all_reduce_rms_norm"
LINK = 378.0  # GB/s
EPS = 1e-6
Method = tuple[Callable[[], Any], Callable[[], torch.Tensor]]  # a call, and the normalised rows that it returns


def plans(tokens: int, hidden: int) -> list[Plan]:
    """Return the plans to time for a size: one-shot plans if their memory is small, and two-shot plans in several forms
    and with several numbers of programs."""
    candidates: list[Plan] = []
    if tokens * hidden * 2 <= 4 << 20:
        candidates += [OneShot(warps=w) for w in (8, 16)]
    if tokens <= 1024:
        candidates += [TwoShotLowLatency(warps=w) for w in (8, 16)]
    if tokens <= 256:
        candidates += [TwoShotPush(spread=True), TwoShotPush(), TwoShotPull()]
        return candidates
    candidates += [Decomposed(), TwoShotPush(spread=True)]
    for programs in (0, 64, 32, 16):
        candidates += [TwoShotPush(programs), TwoShotPull(programs)]
    return candidates


def compiled_norm() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def add_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.float() + residual.float()
        kept.copy_(h)
        out.copy_(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight.float())
        return out, kept

    torch._dynamo.config.recompile_limit = 64
    return torch.compile(add_norm, dynamic=False)  # torch compiles a kernel for every size


class Bench(Program):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__(a, f"{OP}.jsonl", dtype="bfloat16")
        self.norm = compiled_norm()
        self.log(f"{self.world.size} GPUs, link {self.link:.0f} GB/s")
        symm.enable_symm_mem_for_group(dist.group.WORLD.group_name)

    def tokens(self, m: int, h: int, modes: list[str]) -> None:
        world = self.world
        rows = balanced_rows(m, world.size)
        lo = sum(rows[: world.rank])
        torch.manual_seed(world.rank)
        x = torch.randn(m, h, device="cuda").to(BF)
        torch.manual_seed(99)
        residual, weight = torch.randn(m, h, device="cuda").to(BF), torch.randn(h, device="cuda").to(BF)
        residual_shard = residual[lo : lo + rows[world.rank]].clone()
        total = x.float()
        dist.all_reduce(total)
        total += residual.float()
        expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()
        methods = self.methods(m, h, x, residual, residual_shard, weight)
        calls = self.right(methods, expected)
        del total, expected
        buffer = torch.zeros_like(x)
        calls["nccl alone"] = lambda: dist.all_reduce(buffer)
        for mode in modes:
            self.measure(m, h, mode, calls)

    def right(self, methods: dict[str, Method], expected: torch.Tensor) -> dict[str, Callable[[], Any]]:
        """Return the calls of the methods whose result is correct on every rank."""

        def error(name: str) -> float:
            call, result = methods[name]
            return worst_error(self.world, name, call, lambda _: error_of(result(), expected))

        return {name: call for name, (call, _) in methods.items() if error(name) < RIGHT}

    def methods(
        self,
        m: int,
        h: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        residual_shard: torch.Tensor,
        weight: torch.Tensor,
    ) -> dict[str, Method]:
        world = self.world
        methods: dict[str, Method] = {}
        out, kept = torch.empty_like(x), torch.empty_like(x)
        group = dist.group.WORLD.group_name

        def in_place(reduce: Callable[[torch.Tensor], Any], part: torch.Tensor) -> Method:
            """Return a method with an in-place collective. The result of the first call is kept, because later calls
            sum the sums again."""
            results: list[torch.Tensor] = []

            def call() -> None:
                if not results:
                    part.copy_(x)
                reduce(part)
                self.norm(part, residual, weight, out, kept)
                if not results:
                    results.append(out.clone())

            return call, lambda: results[0]

        methods["sequential"] = in_place(dist.all_reduce, torch.empty_like(x))
        for name in ("two_shot", "one_shot") if m <= 256 else ("two_shot",):
            try:  # memory for each, because the two-shot all-reduce replaces the partial sums in its memory by the sum
                memory = world.cached(("torch", name, m, h), lambda: symm.empty(m, h, device="cuda", dtype=BF))
                world.cached(("torch handle", name, m, h), lambda p=memory: symm.rendezvous(p, dist.group.WORLD))
            except Exception as e:
                self.log("torch symm_mem:", repr(e)[:200])
                continue
            if name == "two_shot":
                reduce: Any = lambda p: torch.ops.symm_mem.two_shot_all_reduce_(p, "sum", group)  # noqa: E731
                methods["torch two_shot"] = in_place(reduce, memory)
            else:
                memory.copy_(x)

                def call(memory: torch.Tensor = memory) -> None:
                    self.norm(torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", group), residual, weight, out, kept)

                methods["torch one_shot"] = call, lambda: out
        symmetric_out = world.cached(("out", m, h), lambda: world.symmetric((m, h), BF, "normalised")).local
        place = world.cached(("x", m, h), lambda: world.symmetric((m, h), BF, "partial")).local
        place.copy_(x)
        torch.cuda.synchronize()
        todo: dict[str, tuple[torch.Tensor, Plan | str]] = {"auto": (place, "auto")}
        for plan in plans(m, h):
            pull = isinstance(plan, Decomposed | TwoShotPull)
            todo[plan.to_json()] = (place if pull else x, plan)
        for name, (part, plan) in todo.items():
            results: list[torch.Tensor] = [x]

            def call(part=part, plan=plan, results=results) -> None:
                results[0], _ = weft.all_reduce_rms_norm(
                    part, residual_shard, weight, EPS, out=symmetric_out, world=world, plan=plan
                )

            methods[name] = call, lambda results=results: results[0]
        return methods

    def measure(self, m: int, h: int, mode: str, calls: dict[str, Callable[[], Any]]) -> None:
        world = self.world
        many = 20 if m <= 2048 else 8
        times = time_interleaved(calls, mode=mode, calls=many, rounds=self.a.rounds)
        nccl = times.pop("nccl alone")
        limit = 2 * (world.size - 1) / world.size * m * h * 2 / LINK / 1e3
        if world.rank:
            return
        names = {p.to_json(): brief(p) for p in plans(m, h)}
        trial = world.choices.last(OP, (m, h, 1))
        seq, auto = times["sequential"], (trial.chosen(mode) if trial else chosen(OP, world, m, h, 1, mode)).to_json()
        shape = dict(op=OP, name=f"{m} tokens", M=m, N=h, K=1, mode=mode)
        fixed = dict(gemm_us=0.0, comm_us=round(nccl, 2), limit_us=round(limit, 2))
        tuned = {plan: us for plan, us in times.items() if plan.startswith("{")}
        plans_of = {"auto": auto} | {plan: plan for plan in tuned}
        self.keep(
            dict(shape, method=names.get(method, method), us=round(us, 2), plan=plans_of.get(method), **fixed)
            for method, us in times.items()
        )
        tuned[Sequential().to_json()] = seq
        keep(world, self.a.out / "sweep.jsonl", [dict(shape, world=world.size, times=tuned)])
        shown = gains({names.get(method, method): us for method, us in times.items()}, "sequential")
        self.log(f"{m} tokens, {mode}: nccl {nccl:.1f}, limit {limit:.1f} | {shown}")


def main() -> None:
    tokens = [16, 64, 256, 1024, 2048, 4096, 8192, 16384, 1]
    a = options(tokens=tokens, hidden=8192, modes=["graph", "eager"], rounds=5)
    bench = Bench(a)
    for m in bench.cases({f"norm {tokens} x {a.hidden}": tokens for tokens in a.tokens}):
        with bench.tolerating(f"{m} tokens"):
            bench.tokens(m, a.hidden, a.modes)
    bench.end()


if __name__ == "__main__":
    main()
