"""One vLLM engine in a separate process. The engine runs the requests that the parent process sends through a pipe
(vllm_serving.py).

The process sets its environment before it imports vLLM or torch.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import random
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.measure import vllm_timeline

LAYERS = 16
MAX_MODEL_LEN, MAX_NUM_SEQS = 16384, 256
LLAMA = dict(architecture="Llama", rope_theta=500000.0)
MODELS: dict[str, dict[str, Any]] = {
    "Llama-70B": dict(LLAMA, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, vocab_size=128256),
    "Llama-8B": dict(LLAMA, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256),
    "Qwen2.5-32B": dict(
        architecture="Qwen2", hidden_size=5120, intermediate_size=27648, num_attention_heads=40, num_key_value_heads=8, vocab_size=152064
    ),
    "Qwen3-30B-A3B": dict(
        architecture="Qwen3Moe", hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        vocab_size=151936, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
}  # fmt: skip
STOCK_AGAIN = "stock again"
METHODS: dict[str, dict[str, bool]] = {  # the compilation passes that differ from vLLM's defaults
    "stock": {},
    STOCK_AGAIN: {},
    "weft": {},
    "stock unfused": {"fuse_allreduce_rms": False},
    "async tp": {"enable_sp": True, "fuse_gemm_comms": True},
}
# flashinfer's other fused all-reduce ("mnnvl", which vLLM tries first) needs NVLink multicast, and so do NVLS and multimem.
NO_MULTICAST = dict(
    VLLM_FLASHINFER_ALLREDUCE_BACKEND="trtllm",
    NCCL_NVLS_ENABLE="0",
    TORCH_SYMM_MEM_DISABLE_MULTICAST="1",
    NVSHMEM_DISABLE_NVLS="1",
)


@dataclass(frozen=True)
class Setup:
    """The arguments of an engine. utilization: its share of each GPU's memory. cache: the bytes of its keys and values
    on a rank. layers: the number of the model's layers."""

    model: str
    method: str
    gpus: tuple[int, ...]
    tokens_a_step: int
    utilization: float
    cache: int
    layers: int = LAYERS


@dataclass
class Load:
    """Requests as (tokens, tokens of the answer). At most `in_flight` requests run at once. They arrive at an average
    of `rate` per second (a Poisson process), or all at once if `rate` is 0."""

    lengths: list[tuple[int, int]]
    in_flight: int
    rate: float = 0.0

    def arrivals(self) -> list[float]:
        """Return the arrival time of each request in seconds; the times are the same in every call."""
        draw, arrival = random.Random(2), 0.0
        if not self.rate:
            return [0.0] * len(self.lengths)
        return [arrival := arrival + draw.expovariate(self.rate) for _ in self.lengths]

    def run(self, llm: Any) -> Served:
        return serve(llm.llm_engine, self, *requests(self))


@dataclass
class TracedLoad:
    """A load that an engine of `layers` layers runs while torch.profiler traces its workers. file: it gets the traces."""

    load: Load
    tokens: int
    layers: int
    file: Path

    def run(self, llm: Any) -> dict[str, Any]:
        """Return the timeline of a step of `tokens` tokens, or the error, with which the engine continues."""
        try:
            epoch = time.time_ns()
            started = llm.collective_rpc("start_trace")
            if any(started):
                raise RuntimeError(f"start_trace: {started}")
            seconds = self.load.run(llm).seconds
            traces = llm.collective_rpc("stop_trace", args=(epoch,))
            if errors := [trace for trace in traces if isinstance(trace, str)]:
                raise RuntimeError(f"stop_trace: {errors}")
            self.file.write_bytes(gzip.compress(json.dumps(traces).encode()))
            row = vllm_timeline.timeline([*map(vllm_timeline.parsed, traces)], self.tokens, self.layers)
            return {"traced_seconds": round(seconds, 4), **row}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"[:2000]}


@dataclass
class Served:
    """The seconds from the first request to the last answer, from each request's arrival to its first token, and
    between tokens."""

    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)


def serve(engine: Any, load: Load, prompts: list[Any], params: list[Any]) -> Served:
    """Run all requests on an `LLMEngine` and return the times. Without a rate a request arrives when it is sent."""
    arrivals, served = load.arrivals(), Served()
    last_token: dict[str, float] = {}  # the time of a request's last token, or of its arrival if it has none
    answered: set[str] = set()
    sent, start = 0, time.perf_counter()
    while sent < len(prompts) or last_token:
        elapsed = time.perf_counter() - start
        while sent < len(prompts) and arrivals[sent] <= elapsed and len(last_token) < load.in_flight:
            engine.add_request(str(sent), prompts[sent], params[sent])
            last_token[str(sent)] = arrivals[sent] if load.rate else elapsed
            sent += 1
        if not last_token:
            time.sleep(max(0.0, arrivals[sent] - elapsed))
            continue
        for output in engine.step():
            elapsed, tokens = time.perf_counter() - start, len(output.outputs[0].token_ids)
            times = [elapsed - last_token[output.request_id]] + [0.0] * (tokens - 1) if tokens else []
            if times and output.request_id not in answered:
                served.first_token.append(times.pop(0))
                answered.add(output.request_id)
            served.between_tokens += times
            last_token[output.request_id] = elapsed if tokens else last_token[output.request_id]
            if output.finished:
                del last_token[output.request_id]
    served.seconds = time.perf_counter() - start
    return served


class WorkerExtension:
    """vLLM adds these methods to its workers."""

    def fused_all_reduce(self) -> dict[str, Any]:
        """Return the backend of flashinfer's fused all-reduce in this worker (None: it is off), and how many matches its pass replaced."""
        from vllm.distributed.device_communicators import flashinfer_all_reduce

        workspace = flashinfer_all_reduce._fi_ar_workspace
        backend = None if workspace is None else workspace.backend
        return {"backend": backend, "matches": replaced_matches("AllReduceFusionPass")}

    def allocated(self) -> tuple[int, int]:
        """Return the number of segments that torch's allocator has asked CUDA for so far, and their bytes."""
        import torch

        memory = torch.cuda.memory_stats()
        return memory["segment.all.allocated"], memory["reserved_bytes.all.allocated"]

    def start_trace(self: Any) -> str | None:
        """Start torch.profiler on the GPU and the CUDA calls, but not on the host's operations, which would last longer.
        Each `execute_model` until `stop_trace` adds a step in (begin ns, end ns, tokens). Returns the error if one is
        raised: after an exception on one rank vLLM would read the answers of later ranks as those of the next call."""
        import torch

        execute, self.traced_steps = self.execute_model, []

        def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.time_ns()
            result = execute(scheduled, *args, **kwargs)
            self.traced_steps.append((begin, time.time_ns(), scheduled.total_num_scheduled_tokens))
            return result

        # CUPTI must stay initialized between traces, because the engine replays CUDA graphs.
        os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
        try:
            self.tracer = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.tracer.start()
        except Exception:
            return traceback.format_exc()
        self.execute_model = timed
        return None

    def stop_trace(self: Any, epoch: int) -> dict[str, list[Any]] | str:
        """Return the fields of a `vllm_timeline.Trace`, with times from `epoch` in ns, or the error."""
        import torch

        del self.execute_model
        try:
            torch.cuda.synchronize()
            self.tracer.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self.tracer.export_chrome_trace(str(path))
                return vllm_timeline.trace_of(json.loads(path.read_text()), self.traced_steps, epoch)
        except Exception:
            return traceback.format_exc()


def replaced_matches(pass_name: str) -> int:
    """Return how many matches the passes of this class in the process replaced, each in the graph that it compiled last; 0 if an
    earlier process compiled the code. The pass itself counts, since vLLM's table of matches does not include
    AllReduceFusionPass."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # get_objects omits frozen objects, and vLLM freezes all objects of a worker at its start
    count = sum(live.matched_count for live in gc.get_objects() if type(live).__name__ == pass_name)
    if frozen:
        gc.freeze()
    return count


def checkpoint(model: str, layers: int, folder: str) -> None:
    """Write the configuration of a model with this number of layers; vLLM generates the weights (load_format="dummy")."""
    import transformers

    sizes = dict(MODELS[model])
    kind = sizes.pop("architecture")
    config = getattr(transformers, f"{kind}Config")(
        **sizes,
        num_hidden_layers=layers,
        max_position_embeddings=2 * MAX_MODEL_LEN,
        architectures=[f"{kind}ForCausalLM"],
        torch_dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)


def start(setup: Setup) -> Any:
    """Return the engine. The size of the engine's cache is explicit, because vLLM's own estimate would count the memory
    of other engines."""
    from vllm import LLM

    passes = METHODS[setup.method]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(setup.model, setup.layers, folder)
        return LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=len(setup.gpus),
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=setup.tokens_a_step,
            max_num_seqs=MAX_NUM_SEQS,
            gpu_memory_utilization=setup.utilization,
            kv_cache_memory_bytes=setup.cache,
            enable_prefix_caching=False,
            seed=0,
            worker_extension_cls=f"{__name__}.WorkerExtension",
            **({"compilation_config": {"pass_config": passes}} if passes else {}),
        )


def facts(llm: Any, setup: Setup) -> dict[str, Any]:
    """Return the fields of a row that describe an engine, and print weft's report."""
    import vllm
    from vllm.platforms import current_platform

    if setup.method == "weft":
        import weft

        print(weft.vllm.report(llm), flush=True)
    passes = llm.llm_engine.vllm_config.compilation_config.pass_config
    fused = llm.collective_rpc("fused_all_reduce")
    if any(fusion != fused[0] for fusion in fused):
        raise RuntimeError(f"workers fuse all-reduces differently: {fused}")
    return {
        "vllm": vllm.__version__,
        "gpu": current_platform.get_device_name(),
        "fused all-reduce": {"asked": bool(passes.fuse_allreduce_rms), **fused[0]},
    }


def allocations(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> str:
    """Return the line of the log on the memory that each rank allocated between two calls of
    `WorkerExtension.allocated`. A request waits for such an allocation."""
    lines = [
        f"{segments - earlier_segments} segments of {nbytes - earlier_nbytes >> 20} MiB in all"
        for (earlier_segments, earlier_nbytes), (segments, nbytes) in zip(before, after, strict=True)
    ]
    return f"allocated during requests, by rank: {', '.join(lines)}"


def requests(load: Load) -> tuple[list[Any], list[Any]]:
    """Return the random prompts and the parameters of a load, which are the same in every call."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    draw, tokens = random.Random(1), range(1000, 30000)
    prompts = [{"type": "token", "prompt_token_ids": draw.choices(tokens, k=length)} for length, _ in load.lengths]
    params = [
        SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        for _, answer in load.lengths
    ]
    return prompts, params


def redirect(log: Path) -> None:
    """Redirect the output of this process and its children to the log."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def compile_fused_all_reduce(log: Path) -> None:
    """Compile flashinfer's fused all-reduce by nvcc (three minutes) unless it lies compiled in flashinfer's folder
    data/aot, so that no engine waits for it. flashinfer finds an earlier build again."""
    redirect(log)
    from flashinfer.jit.comm import gen_trtllm_comm_module

    start = time.perf_counter()
    library = gen_trtllm_comm_module()
    if not library.is_aot:
        library.build(verbose=True)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)


def main(setup: Setup, pipe: Connection, log: Path) -> None:
    """Start an engine and run the loads that arrive through the pipe, until None arrives. The pipe returns results,
    or the text of a traceback."""
    os.setsid()  # the parent kills this process group, with vLLM's processes
    redirect(log)
    os.environ |= NO_MULTICAST | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, setup.gpus)),
        "WEFT_VLLM": str(int(setup.method == "weft")),
        # Engines that start concurrently must not overwrite each other's compiled code.
        "VLLM_CACHE_ROOT": str(Path.home() / ".cache/vllm" / setup.method.replace(" ", "_")),
    }
    try:
        llm = start(setup)
        allocated = llm.collective_rpc("allocated")
        pipe.send(facts(llm, setup))
        gc.collect()
        gc.freeze()  # vLLM does so in its server and its workers: a collection of all objects would delay requests
        while (load := pipe.recv()) is not None:
            pipe.send(load.run(llm))
        print(allocations(allocated, llm.collective_rpc("allocated")), flush=True)
        if setup.method == "weft":
            facts(llm, setup)
    except Exception:
        traceback.print_exc()
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()
