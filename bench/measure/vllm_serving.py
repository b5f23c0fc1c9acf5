"""The throughput and latency of vLLM with the plugin, compared with stock vLLM, on the GPUs of one machine.

python -m bench.measure.vllm_serving --out DIR [--gpus 0 1] [--models ..] [--methods ..] [--mixes ..] [--layers L] [--rate R] [--seconds S]

--gpus are all GPUs of the machine by default, --rate is the number of requests that arrive per second (0: a request
arrives when another ends), and --cache is the GiB of keys and values for each rank of an engine.

All engines of a model share the same GPUs at the same time, one process each (vllm_engine.py), and run requests in
turns while the others are idle: a repeat is stock, the other methods, stock. A drift of the machine therefore affects
all of them, and the difference between the two turns of stock in a repeat bounds the meaning of a ratio. "stock" is
vLLM as it is installed, with flashinfer's fused all-reduce + norm; "stock unfused" is without it; "async tp" has vLLM's
own sequence parallelism; "stock again" is stock in a second engine. Two turns of one engine cannot show how far equal
engines differ, for example by the placement of their memory and processes; the rows of "stock again" show it.

Models have random weights, their published layer sizes and --layers layers, by default 16, so that engines start in minutes, with vLLM's
default CUDA graphs and compiled code and without prefix caching.

A row of DIR/vllm_serving.jsonl compares a method with stock for one mix: `seconds` of each repeat and `baseline_seconds` of the two turns of
stock around it; `ratio`, the median of stock's mean over the method's; `ratio_range`; `null_range`, of the ratio of stock's two turns;
`first`, the seconds of the method's first turn of this mix; [median, 99th percentile] in milliseconds of the time from a request's arrival
to its first token and between tokens; "fused all-reduce": whether the engine was asked for it, its workers' backend, and the matches in
the compiled model that it replaced. The program writes rows mix by mix, and the engines' logs to the same folder; at
its end a log has the memory that the engine allocated during requests.

The mix "timeline" is to be the last: torch.profiler traces steps of TRACED's tokens. DIR/vllm_timeline.jsonl has a row for each engine and step,
with `ratio_step` and `ratio_layer`, stock's time over the method's by class of kernels; DIR/vllm_timeline.txt lists the kernels of a layer, and
DIR/vllm_trace-MODEL-LAYERS-METHOD-TOKENS.json.gz has all kernels, calls and steps of the ranks (`vllm_timeline.trace_of`). Traced
steps are slower: `untraced_seconds` and `traced_seconds` are those of the whole load.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.resume import keep, unfinished
from bench.measure import vllm_engine, vllm_timeline
from bench.measure.vllm_engine import LAYERS, METHODS, MODELS, Load, Served, Setup, TracedLoad

STOCK = "stock"
REPEATS, REPEAT_SECONDS = 7, 3.0
MEMORY = 0.85  # the share of each GPU's memory for all engines together
TURN_TIMEOUT = 120.0


@dataclass(frozen=True)
class Tokens:
    """Lengths that are all `median`, or log-normal with this median and 90th percentile and at most `most`."""

    median: int
    p90: int = 0
    most: int = 0

    def draw(self, source: random.Random) -> int:
        if not self.p90:
            return self.median
        sigma = math.log(self.p90 / self.median) / statistics.NormalDist().inv_cdf(0.9)
        return max(1, min(round(self.median * math.exp(source.gauss(0, sigma))), self.most))


@dataclass(frozen=True)
class Mix:
    """A kind of requests, of which `in_flight` run at once."""

    in_flight: int
    prompt: Tokens
    answer: Tokens

    def load(self, requests: int, rate: float) -> Load:
        """Return this many requests, which are the same in every call."""
        draw = random.Random(0)
        lengths = [(self.prompt.draw(draw), self.answer.draw(draw)) for _ in range(requests)]
        return Load(lengths, self.in_flight, rate)


MIXES = {
    # ShareGPT's published percentiles; the longest is such that the mean is the published one too (299 and 324 tokens).
    "chat": Mix(128, Tokens(36, 829, 3072), Tokens(280, 683, 700)),
    "papers": Mix(32, Tokens(2730, 3702, 4096), Tokens(167, 372, 1024)),  # summaries of arXiv's papers of up to 4,096 tokens
    "fixed": Mix(64, Tokens(1024), Tokens(128)),
    "prompts": Mix(64, Tokens(2048), Tokens(1)),
    "decode": Mix(8, Tokens(128), Tokens(128)),
}  # fmt: skip

TIMELINE, TRACE_TIMEOUT = "timeline", 60.0
# The load that has steps of this number of tokens: prompts of 2,048 as in the mix, single prompts, or answers (after long prompts for 24).
TRACED = {
    8192: Load([(2048, 1)] * 20, 20),
    4096: Load([(4096, 1)] * 5, 1),
    2048: Load([(2048, 1)] * 5, 1),
    1024: Load([(1024, 1)] * 5, 1),
    64: Load([(16, 24)] * 64, 64),
    24: Load([(2730, 40)] * 24, 24),
}  # fmt: skip


class Failed(RuntimeError):
    """Raised if an engine did not start, or did not answer."""


@dataclass
class Engine:
    """The parent's handle of an engine's process."""

    setup: Setup
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = spawn.Pipe()
        self.process = spawn.Process(target=vllm_engine.main, args=(self.setup, child_pipe, self.log))
        self.process.start()
        child_pipe.close()

    def answer(self, timeout: float) -> Any:
        if not self.pipe.poll(max(0.0, timeout)):
            raise Failed(f"{self.setup.method}: no answer within {timeout:.0f} s, see {self.log}")
        try:
            answer = self.pipe.recv()
        except EOFError:
            answer = "its process ended"
        if isinstance(answer, str):
            raise Failed(f"{self.setup.method}: {answer.strip().splitlines()[-1]}, see {self.log}")
        return answer

    def serve(self, load: Load) -> Served:
        self.pipe.send(load)
        served: Served = self.answer(TURN_TIMEOUT)
        return served

    def timeline(self, load: Load, tokens: int) -> dict[str, Any]:
        name = f"{self.setup.model}-{self.setup.layers}-{self.setup.method.replace(' ', '_')}-{tokens}"
        file = self.log.with_name(f"vllm_trace-{name}.json.gz")
        self.pipe.send(TracedLoad(load, tokens, self.setup.layers, file))
        row: dict[str, Any] = self.answer(TRACE_TIMEOUT)
        return row

    def stop(self) -> None:
        """End the engine and all of its processes."""
        if self.process.is_alive():
            try:
                self.pipe.send(None)
            except OSError:
                pass
            self.process.join(10)
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.join()


def start_engines(engines: list[Engine], end: float) -> None:
    """Start all engines at once. The plugin compares whole passes after its two compilations, when the other engines,
    which compile once, are idle; the logs have the times."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.facts = engine.answer(end - time.monotonic())
        print(f"{time.strftime('%H:%M:%S')} {engine.setup.model} {engine.setup.method}: {engine.facts}", flush=True)


def scaled(stock: Any, mix: Mix, rate: float) -> Load:
    """Return the number of requests that keep stock vLLM busy for REPEAT_SECONDS. The first turn is not counted,
    because vLLM may compile during it."""
    requests = mix.in_flight
    stock.serve(mix.load(requests, rate))
    for _ in range(3):
        seconds = stock.serve(mix.load(requests, rate)).seconds
        if seconds >= REPEAT_SECONDS:
            break
        requests = math.ceil(1.1 * requests * REPEAT_SECONDS / seconds)
    return mix.load(requests, rate)


def take_turns(engines: dict[str, Any], load: Load, repeats: int, end: float) -> dict[str, list[Served]]:
    """Run the load on stock, on the other engines and on stock again, `repeats` times or until `end`. A repeat has two
    results of stock."""
    order = [STOCK, *(method for method in engines if method != STOCK), STOCK]
    results: dict[str, list[Served]] = {method: [] for method in engines}
    for _ in range(repeats):
        begun = time.monotonic()
        for method in order:
            results[method].append(engines[method].serve(load))
        if 2 * time.monotonic() - begun > end:  # the next repeat would end too late
            break
    return results


def latency(results: list[Served]) -> dict[str, list[float]]:
    """Return the [median, 99th percentile] of all results, in milliseconds."""
    times = {
        "first_token_ms": [t for served in results for t in served.first_token],
        "between_tokens_ms": [t for served in results for t in served.between_tokens],
    }
    return {name: [round(1e3 * quantile(ts, q), 3) for q in (0.5, 0.99)] for name, ts in times.items() if ts}


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def comparison(results: dict[str, list[Served]], method: str) -> dict[str, Any]:
    """Return the fields of a row that compare a method with stock."""
    seconds = [served.seconds for served in results[method]]
    stock = [served.seconds for served in results[STOCK]]
    pairs = list(zip(stock[::2], stock[1::2], strict=True))
    ratios = [sum(pair) / 2 / t for pair, t in zip(pairs, seconds, strict=True)]
    nulls = [before / after for before, after in pairs]
    return {
        "seconds": [round(t, 4) for t in seconds],
        "baseline_seconds": [[round(t, 4) for t in pair] for pair in pairs],
        "ratio": round(statistics.median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "null_range": [round(min(nulls), 4), round(max(nulls), 4)],
        "latency": {name: latency(results[name]) for name in (STOCK, method)},
    }


def measure_mix(engines: dict[str, Engine], name: str, args: argparse.Namespace, end: float) -> None:
    """Measure one mix, and append a row that compares each method with stock."""
    load = scaled(engines[STOCK], MIXES[name], args.rate)
    others = [method for method in engines if method != STOCK]
    first_seconds = {method: engines[method].serve(load).seconds for method in others}
    results = take_turns(engines, load, args.repeats, end)
    setup = engines[STOCK].setup
    for method in others:
        facts = {name: engines[name].facts for name in (STOCK, method)}
        row = dict(
            op="vllm serving", model=setup.model, layers=setup.layers, ranks=len(setup.gpus), mix=name, method=method, baseline=STOCK,
            **comparison(results, method), first=round(first_seconds[method], 4), requests=len(load.lengths), in_flight=load.in_flight, rate=load.rate,
            tokens_in=sum(tokens for tokens, _ in load.lengths), tokens_out=sum(tokens for _, tokens in load.lengths),
            tokens_a_step=setup.tokens_a_step, engines=len(engines), vllm=facts[method]["vllm"], gpu=facts[method]["gpu"],
            **{"fused all-reduce": {name: engine_facts["fused all-reduce"] for name, engine_facts in facts.items()}},
            commit=os.environ.get("WEFT_COMMIT"), date=time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        print(
            f"{setup.model} {name}: {method} {row['ratio']:.3f}x of {row['ratio_range']}, null {row['null_range']}",
            flush=True,
        )
        keep(None, args.out / "vllm_serving.jsonl", [row])


def measure_timeline(engines: dict[str, Any], args: argparse.Namespace) -> None:
    """Append a row for each method and traced number of tokens, with the ratios to stock. All untraced turns come before
    the first trace, which leaves CUPTI in the workers."""
    setup = engines[STOCK].setup
    loads = {tokens: load for tokens, load in TRACED.items() if tokens <= setup.tokens_a_step}
    cases = [(method, tokens) for tokens in loads for method in sorted(engines, key=lambda method: method != STOCK)]
    for method, tokens in cases:
        engines[method].serve(loads[tokens])  # vLLM may compile during it
    untraced = {(method, tokens): engines[method].serve(loads[tokens]).seconds for method, tokens in cases}
    for engine in engines.values():
        engine.timeline(loads[64], 64)  # CUPTI loads its code during the first trace
    stock: dict[str, Any] = {}
    for method, tokens in cases:
        row = dict(
            op="vllm timeline", model=setup.model, layers=setup.layers, ranks=len(setup.gpus), tokens=tokens, method=method,
            untraced_seconds=round(untraced[method, tokens], 4), **engines[method].timeline(loads[tokens], tokens),
            vllm=engines[method].facts["vllm"], gpu=engines[method].facts["gpu"], commit=os.environ.get("WEFT_COMMIT"), date=time.strftime("%Y-%m-%d"),
        )  # fmt: skip
        stock = row if method == STOCK else stock
        show_timeline(row, stock, args.out)


def show_timeline(row: dict[str, Any], stock: dict[str, Any], out: Path) -> None:
    """Add the ratios to a method's row, print its summary, and append it to both files."""
    heading = f"{row['model']} {row['tokens']} tokens, {row['method']}"
    if "error" in row:
        print(f"{heading}: {row['error']}", flush=True)
    else:
        if row is not stock and "error" not in stock:
            row |= {f"ratio_{part}": vllm_timeline.ratios(stock[part], row[part]) for part in ("step", "layer")}
        ratios = "".join(
            f"\nstock / {row['method']} by {key}: {row[key]}" for key in ("ratio_step", "ratio_layer") if key in row
        )
        print(f"{heading}: {vllm_timeline.summary(row)}{ratios}", flush=True)
        with (out / "vllm_timeline.txt").open("a") as file:
            file.write(f"{heading}: {vllm_timeline.text(row)}{ratios}\n\n")
    keep(None, out / "vllm_timeline.jsonl", [row])


def measure(model: str, args: argparse.Namespace, end: float) -> bool:
    """Start the engines of a model and measure the mixes until the time is over. Return True if no engine failed."""
    share = round(MEMORY / len(args.methods), 3)
    engines = {}
    for method in args.methods:
        log = args.out / f"vllm_serving-{model}-{args.layers}-{len(args.gpus)}-{method.replace(' ', '_')}.log"
        setup = Setup(model, method, tuple(args.gpus), args.tokens_a_step, share, int(args.cache * 2**30), args.layers)
        engines[method] = Engine(setup, log)
    began = time.monotonic()
    try:
        start_engines(list(engines.values()), end)
        print(f"{model}: {len(engines)} engines started in {time.monotonic() - began:.0f} s", flush=True)
        cases = {f"{model} x{len(args.gpus)} of {args.layers} layers {name}": name for name in args.mixes}
        for name in unfinished(None, args.out, cases, args.seconds - 10 * REPEAT_SECONDS):
            if name == TIMELINE:
                measure_timeline(engines, args)
            else:
                measure_mix(engines, name, args, end)
        return True
    except Failed as error:
        print(f"{model}: {error}", flush=True)
        return False
    finally:
        for engine in engines.values():
            if hasattr(engine, "process"):
                engine.stop()


def main() -> None:
    # Each engine's process imports this module before it sets its environment and imports vLLM.
    import torch

    from bench.common.program import options

    choices = dict(models=MODELS, methods=METHODS, mixes=[*MIXES, TIMELINE])
    words = dict(models=["Llama-70B"], methods=[STOCK, "weft"], mixes=list(MIXES))
    args = options(
        choices=choices, seconds=560, gpus=[], **words, layers=LAYERS, rate=0.0, tokens_a_step=8192, cache=8.0, repeats=REPEATS
    )  # fmt: skip
    if STOCK not in args.methods or len(args.methods) < 2:
        raise SystemExit(f"--methods {' '.join(args.methods)}: {STOCK} and at least one other are compared")
    args.gpus = [*map(int, args.gpus)] or list(range(torch.cuda.device_count()))
    end = time.monotonic() + args.seconds
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=vllm_engine.compile_fused_all_reduce, args=(args.out / "vllm_serving-nvcc.log",)).start()
    sys.exit(not all([measure(model, args, end) for model in args.models]))


if __name__ == "__main__":
    main()
