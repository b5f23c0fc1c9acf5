"""The MoE layer on one GPU, compared with vLLM's fused experts and with quack's and torch's grouped GEMMs, compiled or
not.

torchrun --nproc-per-node 1 -m bench.measure.moe_one_gpu --out DIR [--models ...] [--tokens ...] [--zipf 0 1] [--compile TOKENS ...]
    [--methods ...] [--seconds S]

The program appends rows to DIR/moe_one_gpu.jsonl, size by size in the order of --zipf, --tokens and --models, and the reason to
DIR/moe_one_gpu_failed.jsonl if a method fails at a size; a later run with the same DIR continues after them. `us` is a layer with its
router (GEMM, softmax, top-k, weights that sum to one), in a CUDA graph in which the tokens change from call to call, the median of
interleaved rounds. The methods are "weft", plan="auto"; "weft, one launch", the plan whose launch includes the router (uniform routing
only); "vllm", `fused_topk` and `fused_experts` with vLLM's own table of tiles for the GPU, if there is one; "quack", its gathering, gated
grouped GEMM and its plain one, each in the fastest of its forms (bench/common/quack_moe.py); "torch", sort, gather, `torch._grouped_mm`
and sums, with all sizes on the device; and "torch compiled", the same under torch.compile, at the tokens of --compile. A method that is
not installed has no row. error: the relative error of a method's result against torch's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench.common.gathered_experts import vllm_version
from bench.common.program import Program, options
from bench.common.quack_moe import QuackExperts, usable
from bench.common.timing import capture, error_of, time_interleaved
from bench.measure import moe
from bench.measure.moe import MODELS, ROUTINGS, Layer, Model
from weft.backends.library_gemm import Form
from weft.integrations import quack
from weft.plans import Plan

KNOWN = MODELS | {"DeepSeek-V3": Model(7168, 2048, 256, 8)}
TOKENS = [8192, 512, 2048, 64, 16384]  # the most important sizes first
Method = Callable[[torch.Tensor], torch.Tensor]


def by_torch(layer: Layer) -> Method:
    """Return the layer as users write it with torch's grouped GEMM, without a synchronization with the host."""
    model, router, skew = layer.model, layer.router, None if layer.even else layer.skew
    w13, w2 = layer.w13.transpose(1, 2), layer.w2.transpose(1, 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = F.linear(x, router)
        logits = logits if skew is None else (logits + skew).to(x.dtype)
        weights, ids = torch.topk(logits.float().softmax(-1), model.k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.histc(flat.float(), bins=model.experts, min=0, max=model.experts - 1).cumsum(0).int()
        gate, up = torch._grouped_mm(x[order // model.k], w13, offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, w2, offs=ends)
        in_order = rows[order.argsort()].view(*ids.shape, -1)
        return (in_order * weights.to(x.dtype)[:, :, None]).sum(1)

    return run


def by_vllm(layer: Layer) -> Method:
    """Return vLLM's router and experts."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk

    def run(x: torch.Tensor) -> torch.Tensor:
        with set_current_vllm_config(VllmConfig()):
            weights, ids, _ = fused_topk(x, layer.logits(x), layer.model.k, renormalize=True)
            return fused_experts(x, layer.w13, layer.w2, weights, ids)

    return run


def by_quack(layer: Layer, forms: Sequence[Form]) -> Method:
    """Return quack's GEMMs in the forms that are fastest for these tokens."""
    experts = QuackExperts(layer.world, layer.w13, layer.w2, layer.model.k)
    x = layer.xs[0]
    experts.tune(
        x, experts.routed(layer.logits(x)), forms, lambda fns: time_interleaved(fns, mode="graph", calls=3, rounds=3)
    )
    print(f"  quack's forms: {experts.gated_form} and {experts.down_form}", flush=True)
    return lambda x: experts(x, layer.logits(x))


def by_weft(layer: Layer, plan: str | Plan) -> Method:
    return partial(layer.layer, plan=plan)


COMPILED, ONE_LAUNCH = "torch compiled", "weft, one launch"


class Size(NamedTuple):
    model: str
    tokens: int
    zipf: float
    compiled: bool = False  # also by torch.compile

    @property
    def name(self) -> str:
        return f"{self.model}-{self.tokens}"


FAILED = "moe_one_gpu_failed.jsonl"


class Bench(Program):
    """The state that all sizes share: the installed methods, with their versions."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__(a, "moe_one_gpu.jsonl")
        self.methods, self.versions = ["weft", ONE_LAUNCH, "torch"], dict(torch=torch.__version__)
        lost = {r["method"] for r in stored(a.out / FAILED) if r["fatal"]}
        if "vllm" in a.methods and (version := vllm_version()):
            self.methods.append("vllm")
            self.versions["vllm"] = version
        self.forms: list[Form] = []
        lacks = quack.lacks()
        if "quack" in a.methods and "quack" not in lost and lacks is None:
            self.forms = usable(a.compile_seconds)
            self.versions["quack"] = str(quack.installed())
        self.log(f"quack: {lacks or f'{len(self.forms)} forms'}")
        if self.forms:
            self.methods.append("quack")
        self.methods = [m for m in self.methods if m in a.methods and m not in lost]

    def method(self, name: str, layer: Layer) -> Method:
        if name == COMPILED:
            torch._dynamo.reset()
            return torch.compile(by_torch(layer), dynamic=False)
        if name == "vllm":
            return by_vllm(layer)
        if name in ("weft", ONE_LAUNCH):
            return by_weft(layer, "auto" if name == "weft" else moe.ONE_LAUNCH)
        return by_quack(layer, self.forms) if name == "quack" else by_torch(layer)

    def fail(self, size: Size, method: str, error: Exception) -> None:
        """Write the reason, and raise the error if no further call to the GPU can succeed."""
        reason = f"{type(error).__name__}: {error}"[:500]
        fatal = not isinstance(error, torch.OutOfMemoryError) and is_lost()
        self.keep([dict(name=size.name, zipf=size.zipf, method=method, reason=reason, fatal=fatal)], FAILED)
        self.log(f"{size.name} {method}: {reason}")
        if fatal:
            raise error

    def prepared(self, size: Size, layer: Layer) -> tuple[dict[str, Method], dict[str, float]]:
        """Return the methods that run at this size, also in a CUDA graph, and their errors."""
        expected, runs, errors = by_torch(layer)(layer.xs[0]), dict[str, Method](), dict[str, float]()
        names = [name for name in self.methods if name != ONE_LAUNCH or layer.even]
        for name in dict.fromkeys(["weft", *names, *[COMPILED] * size.compiled]):
            try:
                fn = self.method(name, layer)
                errors[name] = error_of(fn(layer.xs[0]), expected)
                capture(partial(fn, layer.xs[0]), 1)
                runs[name] = fn
            except Exception as error:  # a library may raise any exception
                self.fail(size, name, error)
                torch.cuda.empty_cache()
        return runs, errors

    def measure(self, size: Size) -> list[dict]:
        model = KNOWN[size.model]
        layer = Layer(self.world, model, size.tokens, size.zipf)
        runs, errors = self.prepared(size, layer)
        steps = dict.fromkeys(runs, 0)

        def run_next(name: str) -> object:
            steps[name] += 1
            return runs[name](layer.xs[steps[name] % ROUTINGS])

        calls = 2 * ROUTINGS if size.tokens <= 2048 else ROUTINGS
        times = time_interleaved({name: partial(run_next, name) for name in runs}, mode="graph", calls=calls, rounds=7)
        shape = dict(op="moe on one GPU", name=size.name, M=size.tokens, N=model.inner, K=model.hidden, E=model.experts)
        fixed = dict(top_k=model.k, zipf=size.zipf, mode="graph", versions=self.versions)
        return [dict(shape, method=m, us=round(us, 1), error=round(errors[m], 5), **fixed) for m, us in times.items()]

    def run(self, sizes: Sequence[Size]) -> None:
        for size in self.cases({str(size): size for size in sizes}):
            try:
                rows = self.keep(self.measure(size))
            except Exception as error:  # the error concerns all methods, such as a lack of memory for the graphs
                self.fail(size, "all", error)
                continue
            times = " | ".join(f"{r['method']} {r['us']:.0f} ({r['error']:.4f})" for r in rows)
            self.log(f"{size.name} zipf {size.zipf}: {times}")


def is_lost() -> bool:
    """Return whether the GPU refuses all further calls, as after an access out of bounds."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def stored(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    methods = ["weft", ONE_LAUNCH, "vllm", "quack", "torch"]
    a = options(models=list(KNOWN), tokens=TOKENS, zipf=[0.0], methods=methods, compile=[], compile_seconds=75.0)
    bench = Bench(a)
    with torch.no_grad():
        bench.run(ordered(a.models, a.tokens, a.zipf, [*map(int, a.compile)]))
    bench.end()


def ordered(models: Sequence[str], tokens: Sequence[int], zipf: Sequence[float], compiled: Sequence[int]) -> list[Size]:
    """Return the sizes in order of routing, then of the number of tokens, then of the model. Compiled sizes come last,
    because each takes about 20 s."""
    plain = [Size(model, t, z) for z in zipf for t in tokens for model in models]
    return [*plain, *(Size(model, t, zipf[0], True) for t in compiled for model in models)]


if __name__ == "__main__":
    main()
