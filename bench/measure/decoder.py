"""The decoder's benchmark: layers of Llama-3.3-70B, or of another model, over all ranks, for prefill, decode and request mixes.

torchrun --nproc-per-node N -m bench.measure.decoder --out DIR [--parts prefill decode eager mixes] [--tune] [--layers 8] [--sms 116 ..]
         [--models 70B ..] [--norms auto ..] [--seconds S]

The program appends rows to DIR/decoder.jsonl. It times all methods of one size in one interleaved run of CUDA graphs of whole forward
passes (embedding, layers, final norm; no output head); `us` is the slowest rank's median over rounds. The methods:
    sequential       cuBLAS + NCCL all-reduce, then add and norm in one kernel
    fused            all_reduce_rms_norm, not woven
    equal split      woven, half the tokens each
    smart split      woven, split by the measured profile of cuBLAS; without a profile one half of the tokens is whole tiles
    n SMs            woven on weft's own GEMM with n programs, split by the wave model
    sequence         all-gather + GEMM and GEMM + reduce-scatter, plan "auto"
    auto             the choice of the shipped table or, with --tune, of the table that this run has measured
    no communication the GEMMs, attention and norms alone: `gemm_us` of every row
A mix runs for half a second at a time, in which the GPU's power limit lowers its clock. The part "eager" times prefill passes whose kernels the host launches; with --tune they decide what "auto" runs outside graphs.
--tune times all methods once, measures the profile, and writes DIR/decoder-table.json, for src/weft/planner/tables/<gpu>.json.
A method that fails is printed and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import weft
from bench.common.collectives import norm_alone
from bench.common.program import Program, gains, options, worst_error
from bench.common.timing import time_interleaved
from weft.models import Batch, Cache, Graphs, Llama, llama
from weft.nn import weave
from weft.nn.weave import LayerPlan, LayerTimes, Table
from weft.planner.table import gpu_model

_LLAMA_3 = dict(
    rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
)  # fmt: skip


def _model(hidden: int, inner: int, heads: int, **fields: Any) -> dict[str, Any]:
    return dict(
        vocab_size=1024,  # small: a whole output head would take longer than 8 of 80 layers
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-5, **fields,
    )  # fmt: skip


MODELS = {
    "70B": _model(8192, 28672, 64, **_LLAMA_3),
    "Llama-8B": _model(4096, 14336, 32, **_LLAMA_3),
    "Qwen2.5-32B": _model(5120, 27648, 40, model_type="qwen2", rope_theta=1000000.0),
}
PREFILL = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HISTORY = 1024  # the number of tokens in the cache before a decode step
CHUNK, MAX_LEN = 2048, 8192
MIXES = {  # mean, median and 90th percentile of the tokens of a prompt, and of an output
    "ShareGPT": ((299, 36, 829), (324, 280, 683)),
    "arXiv-4K": ((2588, 2730, 3702), (291, 167, 372)),
    "Azure": ((1155, 1020, 2735), (211, 129, 424)),
}
GAIN = 1.02  # a way with a smaller gain is not chosen

Run = Callable[[], object]


# -- lengths of requests -----------------------------------------------------------------------------------------------


def _mean_between(a: float, b: float) -> float:
    return a if b <= a * 1.0001 else (b - a) / math.log(b / a)


def lengths(stats: tuple[int, int, int], count: int, rng: random.Random, most: int = 4096) -> list[int]:
    """Return random lengths with this mean, median and 90th percentile. Their logarithms are uniform between the
    shortest length, the median, the 90th percentile and the longest. The shortest and the longest are chosen so that
    the mean is right."""
    mean, median, high = stats
    middle = 0.4 * _mean_between(median, high)

    def solve(value: Callable[[float], float], lo: float, hi: float) -> float:
        for _ in range(60):
            middle = (lo + hi) / 2
            lo, hi = (middle, hi) if value(middle) < mean else (lo, middle)
        return (lo + hi) / 2

    short = median / 4
    longest = solve(lambda x: 0.5 * _mean_between(short, median) + middle + 0.1 * _mean_between(high, x), high, most)
    short = solve(lambda x: 0.5 * _mean_between(x, median) + middle + 0.1 * _mean_between(high, longest), 1, median)
    logs = np.log([short, median, high, longest])
    drawn = (np.exp(np.interp(rng.random(), (0, 0.5, 0.9, 1), logs)) for _ in range(count))
    return [max(1, round(float(length))) for length in drawn]


def schedule(mix: str, slots: int, requests: int, sizes: tuple[int, ...]) -> list[Batch]:
    """Return the steps of an engine to which all requests are sent at once. A step contains the tokens of all requests
    that decode, then chunks of prompts, up to CHUNK rows. sizes: numbers of rows to which single tokens are padded, so
    that a padded step is no longer than CHUNK."""
    rng = random.Random(len(mix))
    prompts, outputs = (lengths(stats, requests, rng) for stats in MIXES[mix])
    waiting, running, free = list(range(requests))[::-1], {}, list(range(slots))[::-1]  # type: ignore[var-annotated]
    done, steps = [0] * requests, []
    while waiting or running:
        while waiting and free:
            running[waiting.pop()] = free.pop()
        decoding = [r for r in running if done[r] >= prompts[r]]
        rows = {r: 1 for r in decoding}
        left = CHUNK - (next(s for s in sizes if s >= len(decoding)) if decoding else 0)
        for r in running:
            if r not in rows and left > 0:
                rows[r] = min(left, prompts[r] - done[r])
                left -= rows[r]
        rows = dict(sorted(rows.items(), key=lambda item: item[1] > 1))
        steps.append(Batch(tuple(rows.values()), tuple(done[r] for r in rows), tuple(running[r] for r in rows)))
        for r, n in rows.items():
            done[r] += n
            if done[r] >= prompts[r] + outputs[r]:
                free.append(running.pop(r))
    return steps


# -- ways to run -------------------------------------------------------------------------------------------------------


class Bench(Program):
    def __init__(self, a: argparse.Namespace, model_name: str, world: weft.World) -> None:
        super().__init__(a, "decoder.jsonl", world, dtype="bfloat16", layers=a.layers)
        self.model_name = model_name
        self.config = dict(MODELS[model_name], num_hidden_layers=a.layers)
        self.model = Llama(self.config, world=self.world)
        c = self.model.config
        self.name = weave.name_of(self.world, c.hidden_size, c.intermediate_size)
        self.profile: LayerTimes | None = None
        self.choices: dict[int, LayerPlan] = {}
        self.eager: dict[int, LayerPlan] = {}
        self.smart: list[float] = []  # the gains of smart splits over equal splits
        self.fixed |= dict(
            op="decoder", attention="flash" if self.model.flash else "sdpa", N=c.hidden_size, K=c.intermediate_size
        )
        self.log(
            f"{model_name}, {gpu_model(self.world.device)}, attention {self.fixed['attention']}, link {self.link:.0f} GB/s"
        )

    def cache(self, slots: int, max_len: int) -> Cache:
        cache = Cache(self.config, world=self.world, slots=slots, max_len=max_len)
        cache.keys.normal_()
        cache.values.normal_()
        return cache

    def ids(self, batch: Batch) -> torch.Tensor:
        return torch.randint(self.model.config.vocab_size, (batch.tokens,), device=self.world.device)

    def methods(self, tokens: int) -> dict[str, LayerPlan]:
        """Return the plans of a method by name."""
        model = self.model
        out = {"sequential": LayerPlan("plain")}
        for norm in self.a.norms:
            tail = "" if norm == self.a.norms[0] else f", norm {norm}"
            out[f"fused{tail}"] = LayerPlan("fused", norm=norm)
            if tokens < self.a.weave_from:
                continue
            smart = model.plan(LayerPlan("woven", norm=norm), tokens)
            out[f"equal split{tail}"] = LayerPlan("woven", tokens // 2, norm=norm)
            if smart.split != tokens // 2:
                out[f"smart split{tail}"] = smart
            for sms in self.a.sms:
                plan = model.plan(LayerPlan("woven", sms=sms, norm=norm), tokens)
                out[f"{sms} SMs{tail}"] = plan
                if plan.split != weave.halves(tokens):
                    out[f"{sms} SMs, halves{tail}"] = replace(plan, split=weave.halves(tokens))
        out["sequence"] = LayerPlan("sequence")
        return out

    def forward(self, ids: torch.Tensor, batch: Batch, cache: Cache, plan: LayerPlan, norm: Any = None) -> Run:
        return partial(self.model.hidden, ids, self.model.layout(batch, cache, plan), norm)

    def working(self, todo: dict[str, Run]) -> dict[str, Run]:
        """Return the methods that run on every rank."""
        return {name: run for name, run in todo.items() if worst_error(self.world, name, run) == 0}

    def time(self, todo: dict[str, Run], us_guess: float, rounds: int) -> dict[str, float]:
        calls = max(1, min(10, int(20000 / us_guess)))
        times = time_interleaved(todo, mode="graph", calls=calls, rounds=rounds)
        gc.collect()
        torch.cuda.empty_cache()
        return times

    # -- one batch, forward pass after forward pass
    def size(self, name: str, batch: Batch, cache: Cache) -> None:
        tokens, world, model = batch.tokens, self.world, self.model
        ids = self.ids(batch)
        guess = self.a.layers * (60 + tokens * 0.4)
        methods = self.methods(tokens)
        fn = {q: self.forward(ids, batch, cache, plan) for q, plan in methods.items()}
        fn["no communication"] = self.forward(ids, batch, cache, LayerPlan("plain"), norm_alone)
        fn = self.working(fn)
        if self.a.tune:
            times = self.time(fn, guess, 3)
            self.log(f"tuning {name}: {gains(times, 'sequential')}")
            best = min((q for q in times if q in methods), key=times.__getitem__)
            plan = methods[best] if times["sequential"] / times[best] >= GAIN else LayerPlan("plain")
            usual = model.plan(replace(plan, split=0), tokens) == plan  # the split that the plan gets in any case
            self.choices[tokens] = replace(plan, split=0) if usual else plan
            halves = {q: times.get(q.replace("smart", "equal")) for q in times if q.startswith("smart")}
            self.smart += [us / times[q] for q, us in halves.items() if us]
            weave.learn_layers(self.name, Table(tuple(sorted(self.choices.items())), self.profile))
        auto = model.plan("auto", tokens)
        same = next((q for q, plan in methods.items() if plan == auto and q in fn), None)
        if same is None:
            fn |= self.working({"auto": self.forward(ids, batch, cache, auto)})
        times = self.time(fn, guess, self.a.rounds)
        if same:
            times["auto"] = times[same]
        self.log(f"{name}: {gains(times, 'sequential')}")
        none = times.pop("no communication", None)
        c, w = model.config, world.size
        received = 2 * self.a.layers * 2 * tokens * c.hidden_size * 2 * (w - 1) / w
        link = received / self.fixed["link_gbs"] / 1e3
        limits = dict(gemm_us=none and round(none, 2), limit_us=none and round(max(none, link), 2))
        self.keep_times(dict(name=name, M=tokens, mode="graph", **limits), times, methods | {"auto": auto})

    def launched(self, name: str, batch: Batch, cache: Cache) -> None:
        """Time forward passes without a graph, whose kernels the host launches one by one."""
        tokens, ids = batch.tokens, self.ids(batch)
        plans = self.methods(tokens)
        plan = self.model.plan("auto", tokens, "eager")
        if plan not in plans.values():
            plans["what auto takes"] = plan
        fn = self.working({q: self.forward(ids, batch, cache, plan) for q, plan in plans.items()})
        times = time_interleaved(fn, mode="eager", calls=2, rounds=self.a.rounds)
        if self.a.tune:
            best = min(times, key=lambda q: times[q])
            plan = plans[best] if times["sequential"] / times[best] >= GAIN else plans["sequential"]
            self.eager[tokens] = replace(plan, split=0)
        times["auto"] = times[next(q for q in plans if plans[q] == plan)]
        self.log(f"{name}, eager: {gains(times, 'sequential')}")
        self.keep_times(dict(name=name, M=tokens, mode="eager"), times, plans | {"auto": plan})

    def keep_times(self, shape: dict[str, Any], times: dict[str, float], plans: dict[str, LayerPlan]) -> None:
        """Keep a row for each method, with its plan."""
        as_json = {method: json.dumps({"kind": plan.kind, **vars(plan)}) for method, plan in plans.items()}
        self.keep(dict(shape, method=method, us=round(us, 2), plan=as_json[method]) for method, us in times.items())

    # -- the profile of the layer's GEMMs
    def measure_profile(self, rows: int, step: int = 128) -> None:
        """Measure the us of a layer's GEMMs by cuBLAS and of the fused norm at every `step` tokens, on the slowest
        rank."""
        world, model = self.world, self.model
        layer: Any = model.model.layers[0]
        weights = [layer.self_attn.qkv, layer.self_attn.out, layer.mlp.gate_up, layer.mlp.down]
        widest = max(max(w.shape) for w in weights)
        xs = torch.randn(rows, widest, device=world.device, dtype=torch.bfloat16)
        out = torch.empty(rows * widest, device=world.device, dtype=torch.bfloat16)

        def us(fn: Run, calls: int) -> float:
            return time_interleaved({"x": fn}, mode="graph", calls=calls, rounds=3)["x"]

        def gemm(w: torch.Tensor, m: int) -> Run:
            x, y = xs.view(-1)[: m * w.shape[1]].view(m, -1), out[: m * w.shape[0]].view(m, -1)
            return lambda: world.backend.linear(x, w, None, world.current_stream(), y)

        sizes = list(range(step, rows + 1, step))
        gemm_us: list[list[float]] = [[], []]
        for m in sizes:
            for i in (0, 1):
                fns = [gemm(w, m) for w in weights[2 * i : 2 * i + 2]]
                gemm_us[i].append(round(us(lambda fns=fns: [f() for f in fns], 5), 1))  # type: ignore[misc]
        hidden, norm = model.config.hidden_size, layer.input_layernorm.weight
        plan = LayerPlan(norm=self.a.norms[0]).norm_plan
        points = []
        coarse = [m for m in sizes if m & (m - 1) == 0 or m == sizes[-1]]
        for m in coarse:
            x = torch.randn(m, hidden, device=world.device, dtype=torch.bfloat16)
            shard = torch.randn(
                weft.lang.balanced_rows(m, world.size)[world.rank], hidden, device=world.device, dtype=x.dtype
            )
            points.append(
                us(lambda x=x, r=shard: weft.all_reduce_rms_norm(x, r, norm, 1e-5, world=world, plan=plan), 5)  # type: ignore[misc]
            )
        norms = [round(float(us), 1) for us in np.interp(sizes, coarse, points)]
        self.profile = LayerTimes(step, tuple(gemm_us[0]), tuple(gemm_us[1]), tuple(norms))
        weave.learn_layers(self.name, Table((), self.profile))
        self.log(f"profile: {len(sizes)} sizes; {sizes[-1]} tokens {[c[-1] for c in (*gemm_us, norms)]}")

    # -- request mixes
    def mix(self, name: str) -> None:
        """Time some steps from the middle of a schedule, one after another. Tables and graphs are made before the
        timing."""
        world, model, a = self.world, self.model, self.a
        slots = min(1024, 128 * world.size)
        sizes = (*(s for s in (1, 2, 4, 8, 16, 32, 64) if s < CHUNK), *range(128, CHUNK + 1, 128))
        steps = schedule(name, slots, 2 * slots, sizes)
        steps = steps[len(steps) // 3 :][: a.steps]
        several = max(b.requests - b.singles for b in steps)
        cache = self.cache(slots, MAX_LEN)
        ids = [self.ids(b) for b in steps]
        every: dict[str, list[Run]] = {}
        plans: dict[str, str | LayerPlan] = {
            "sequential": "plain",
            "no communication": "plain",
            "fused": "fused",
            "auto": "auto",
        }
        plans |= {f"fused, norm {norm}": LayerPlan("fused", norm=norm) for norm in a.norms[1:]}
        plans |= {"sequence": "sequence", "woven": LayerPlan("woven", norm=a.norms[-1])}
        for method, plan in plans.items():
            graphs = Graphs(model, cache, sizes=sizes, several=several, plan=plan)
            summing = llama.all_reduce_then_norm
            if method == "no communication":
                llama.all_reduce_then_norm = norm_alone
            try:
                runs = [graphs.prepare(i, b) for i, b in zip(ids, steps, strict=True)]
                if worst_error(world, f"{name} {method}", partial(run_all, runs)) == 0:  # the first calls capture
                    every[method] = runs
            finally:
                llama.all_reduce_then_norm = summing
        tokens = sum(b.tokens for b in steps)
        fns = {q: partial(run_all, runs) for q, runs in every.items()}
        times = time_interleaved(fns, mode="eager", calls=1, rounds=a.rounds)  # each step replays a graph
        self.log(f"{name}, {len(steps)} steps, {tokens} tokens: {gains(times, 'sequential')}")
        none = times.pop("no communication", None)
        alone = none and round(none / len(steps), 2)
        shape = dict(name=f"{self.model_name}-{name}", M=CHUNK, mode="graph", gemm_us=alone, limit_us=alone, plan=None)
        self.keep(dict(shape, method=method, us=round(us / len(steps), 2)) for method, us in times.items())

    def table(self) -> None:
        """Write the table of choices, in which consecutive equal choices share one entry. The profile is kept if smart
        splits gained in most cases. Entries that this run did not measure are unchanged."""
        if self.smart and statistics.median(self.smart) < 1:
            self.log(f"no profile: smart splits gained {[round(g, 3) for g in self.smart]}")
            self.profile = None
        c = self.model.config
        weave._learned.pop(self.name, None)
        before = weave.table(self.world, c.hidden_size, c.intermediate_size)
        table = replace(before, eager=_runs(self.eager)) if self.eager else before
        if self.choices:
            table = replace(table, choices=_runs(self.choices), profile=self.profile)
        weave.learn_layers(self.name, table)
        if self.world.rank == 0:
            path = self.a.out / "decoder-table.json"
            size = self.world.size, c.hidden_size, c.intermediate_size
            rows = json.loads(path.read_text()) if path.exists() else []
            others = [r for r in rows if (r["world"], r["N"], r["K"]) != size]
            path.write_text(json.dumps(others + table.to_rows(*size)) + "\n")
            print(f"rows -> {path}, for src/weft/planner/tables/{gpu_model(self.world.device)}.json", flush=True)


def run_all(runs: list[Run]) -> None:
    for run in runs:
        run()


def _runs(best: dict[int, LayerPlan]) -> weave.Choices:
    kept: list[tuple[int, LayerPlan]] = []
    for tokens, plan in sorted(best.items()):
        if not kept or kept[-1][1] != plan:
            kept.append((tokens, plan))
    return tuple(kept)


def prompts(tokens: int) -> Batch:
    """Return a batch of four equally long prompts, or of more prompts if four would be longer than 4,096 tokens
    each."""
    count = max(4, tokens // 4096)
    return Batch.prefill([tokens // count] * count)


def measure(bench: Bench, a: argparse.Namespace) -> None:
    model, todo = bench.model_name, dict[str, Run]()
    prefill, decode = bench.cache(8, 4096), bench.cache(max(a.decode), HISTORY + 8)
    if a.tune and a.profile:
        todo["profile"] = partial(bench.measure_profile, a.profile)
    for n in a.prefill if "prefill" in a.parts else ():
        todo[f"{model}-prefill-{n}"] = partial(bench.size, f"{model}-prefill-{n}", prompts(n), prefill)
    for n in a.decode if "decode" in a.parts else ():
        todo[f"{model}-decode-{n}"] = partial(bench.size, f"{model}-decode-{n}", Batch.decode([HISTORY] * n), decode)
    for n in a.eager if "eager" in a.parts else ():
        todo[f"{model}-eager-{n}"] = partial(bench.launched, f"{model}-prefill-{n}", prompts(n), prefill)
    if a.tune:
        todo["table"] = bench.table
    if "mixes" in a.parts:
        todo |= {mix: partial(bench.mix, mix) for mix in a.mixes}
    for run in bench.cases({f"decoder {model}, {name}": run for name, run in todo.items()}):
        with bench.tolerating(model):
            run()


def main() -> None:
    sizes = dict(
        prefill=list(PREFILL), eager=list(PREFILL), decode=list(DECODE), mixes=list(MIXES), layers=8, sms=[116]
    )
    a = options(
        choices=dict(models=MODELS), parts=["prefill", "decode", "mixes"], models=["70B"], **sizes, norms=["auto"],
        weave_from=128, rounds=5, steps=120, tune=False, profile=16384,
    )  # fmt: skip
    world = weft.init()
    for model_name in a.models:
        torch.manual_seed(0)
        bench = Bench(a, model_name, world)
        measure(bench, a)
    bench.end()


if __name__ == "__main__":
    main()
