"""The bits of vLLM's batch-invariant mode: `gpu/vllm.sh invariant N`, with a GPU for each rank.

torchrun starts the program once for each MODE: "stock" without the mode, in which the comparison should find
differences; "vllm" in the mode without weft; and "weft" in the mode with weft, which serves all passes here whatever
its own comparison of times decides. The program prints that decision. The model has a few layers of Llama-8B's sizes.

The engine first answers each prompt alone, in passes of whole prompts. In all other phases the tokens and log probabilities
must have the same bits: in batches of 64 requests the prompts are at random places among random others, steps of few
tokens split the prompts, and requests read the prefix cache, which the phase before has filled. After an error in a
phase the next phase still runs. OUT/vllm_invariant-N-MODE.json contains all results in full, and the answers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.common.timing import events_on_gpu
from bench.measure.vllm_engine import MODELS

MODES = {
    "stock": {"VLLM_BATCH_INVARIANT": "0", "WEFT_VLLM": "0"},
    "vllm": {"VLLM_BATCH_INVARIANT": "1", "WEFT_VLLM": "0"},
    "weft": {"VLLM_BATCH_INVARIANT": "1", "WEFT_VLLM": "1"},
}
LAYERS, REQUESTS, TOKENS, TOP = 4, 64, 16, 5  # TOP: the number of log probabilities for each token of an answer
MOST, FEW = 2048, 192  # the tokens of a step; with FEW, most prompts are split
LONGEST = 1200  # the length of a printed line
LENGTHS = (1, 2, 5, 16, 17, 31, 64, 100, 127, 128, 129, 200, 255, 257, 400, 511, 513, 777, 1200, 1900)
GEMMS = {"vllm": "matmul_kernel_persistent", "weft": "whole_matmul"}  # the kernel that a mode's layers must run

Prompt = list[int]
Answer = dict[str, list[Any]]
Answers = dict[int, Answer]  # by the index of a prompt


class Phase(NamedTuple):
    """A way to run the prompts. Without a seed each prompt runs alone. `tokens` is the largest number of tokens of a
    step, and `cached` is whether requests read the prefix cache."""

    seed: int | None = None
    tokens: int = MOST
    cached: bool = False

    def __str__(self) -> str:
        who = "alone" if self.seed is None else f"batch {self.seed} of {REQUESTS}"
        return f"{who}, {self.tokens} tokens a step{', prefix cache' if self.cached else ''}"


PHASES = (
    *(Phase(seed, tokens, cached) for seed in (1, 2) for tokens in (MOST, FEW) for cached in (False, True)),
    *(Phase(cached=True), Phase(tokens=FEW), Phase()),
)


class Request(NamedTuple):
    """`index` is the index of a compared prompt, or None for one of the others."""

    index: int | None
    prompt: Prompt
    tokens: int


# -- the requests ------------------------------------------------------------------------------------------------------
def drawn_prompts(vocabulary: int) -> list[Prompt]:
    draw = random.Random(0)
    return [draw.choices(range(vocabulary), k=length) for length in LENGTHS]


def batch(prompts: Sequence[Prompt], vocabulary: int, seed: int) -> list[Request]:
    """Return the prompts at random places among others with answers of different lengths. Every second one of the
    others begins like a prompt, so that they share blocks of the prefix cache."""
    draw = random.Random(seed)
    requests = [Request(i, prompt, TOKENS) for i, prompt in enumerate(prompts)]
    for i in range(REQUESTS - len(prompts)):
        shared = draw.choice(prompts) if i % 2 else []
        prompt = shared[: draw.randrange(len(shared) + 1)] + draw.choices(range(vocabulary), k=draw.randrange(1, 500))
        requests.append(Request(None, prompt[: MOST - 2 * TOKENS], draw.randrange(1, 2 * TOKENS)))
    draw.shuffle(requests)
    return requests


def answer_of(output: Any) -> Answer:
    """Return the tokens, the largest log probabilities of each step (not their tokens, since equal ones may come in any
    order), and the log probabilities of the prompt's own tokens, if the request asked for them."""
    steps = [[entry.logprob for entry in step.values()] for step in output.outputs[0].logprobs]
    prompt = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
    return {
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": [sorted(step, reverse=True)[:TOP] for step in steps],
        "prompt": [step[token].logprob for token, step in prompt],
    }


@contextmanager
def limited(llm: Any, tokens: int) -> Iterator[list[int]]:
    """Limit the tokens of a step, as max_num_batched_tokens does, and yield the numbers of tokens of all steps."""
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, list[int]()
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(output.total_num_scheduled_tokens)
        return output

    with (
        mock.patch.object(scheduler, "max_num_scheduled_tokens", tokens),
        mock.patch.object(scheduler, "schedule", noted),
    ):
        yield steps


def run(llm: Any, phase: Phase, prompts: Sequence[Prompt], vocabulary: int) -> tuple[Answers, dict[str, Any]]:
    """Return the answers of a phase, and facts that show what the engine did. Requests that read the prefix cache have
    no log probabilities of prompts, because vLLM does not compute the cached tokens."""
    from vllm import SamplingParams

    def asked(request: Request) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=request.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP,
            prompt_logprobs=None if phase.cached or request.index is None else 0,
            skip_reading_prefix_cache=not phase.cached,
        )

    batches = [[Request(i, prompt, TOKENS)] for i, prompt in enumerate(prompts)]
    if phase.seed is not None:
        batches = [batch(prompts, vocabulary, phase.seed)]
    began, answers, cached = time.monotonic(), dict[int, Answer](), 0
    if not phase.cached:
        llm.reset_prefix_cache()
    with limited(llm, phase.tokens) as steps:
        for requests in batches:
            ids = [{"prompt_token_ids": request.prompt} for request in requests]
            outputs = llm.generate(ids, [asked(request) for request in requests], use_tqdm=False)
            for request, output in zip(requests, outputs, strict=True):
                cached += output.num_cached_tokens or 0
                if request.index is not None:
                    answers[request.index] = answer_of(output)
    facts = dict(steps=len(steps), most=max(steps), cached=cached, seconds=round(time.monotonic() - began, 1))
    if max(steps) > phase.tokens or (cached > 0) != phase.cached:
        raise AssertionError(f"the engine did not run the phase as asked: {facts}")
    return answers, facts


# -- the comparison ----------------------------------------------------------------------------------------------------
def differences(actual: Answers, expected: Answers) -> list[str]:
    """Return a line for each prompt whose answers differ in any bit."""
    lines = []
    for i, reference in expected.items():
        answer, parts = actual[i], []
        for part, right in reference.items():
            values = answer[part]
            if part == "prompt" and not values:
                continue
            wrong = [position for position, pair in enumerate(zip(values, right, strict=True)) if pair[0] != pair[1]]
            if wrong:
                position = wrong[0]
                distance = distance_of(values[position], right[position])
                parts.append(f"{part}: {len(wrong)} of {len(right)}, the first at {position}: {distance}")
        if parts:
            lines.append(f"prompt {i} of {LENGTHS[i]} tokens: {'; '.join(parts)}")
    return lines


def distance_of(value: Any, right: Any) -> str:
    if isinstance(right, int):
        return f"{value}, not {right}"
    pairs = zip(value, right, strict=True) if isinstance(right, list) else [(value, right)]
    return f"{max(abs(a - b) for a, b in pairs):.2e} off"


def degenerate(answers: Answers) -> str:
    """Return why equal answers would show nothing, or ""."""
    logprobs = [value for answer in answers.values() for step in answer["logprobs"] for value in step]
    tokens = {token for answer in answers.values() for token in answer["tokens"]}
    if not all(map(math.isfinite, logprobs)):
        return "log probabilities are not finite"
    similar = len(tokens) < len(answers) or len(set(logprobs)) < len(logprobs) // 4
    return f"answers of {len(tokens)} tokens and {len(set(logprobs))} log probabilities" if similar else ""


# -- the engine --------------------------------------------------------------------------------------------------------
def random_weights(loader: Any, model: torch.nn.Module, model_config: Any) -> None:
    """Fill the weights so that all layers affect the logits; vLLM's own dummy weights are too small for that. Norms
    have the same weights on all ranks."""
    for name, weight in model.named_parameters():
        matrix = weight.dim() == 2
        seed = zlib.crc32(name.encode()) + matrix * int(os.environ["RANK"])
        generator = torch.Generator(weight.device).manual_seed(seed)
        values = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        weight.data.copy_(1.5 * values / weight.shape[1] ** 0.5 if matrix else 1 + values / 8)


@contextmanager
def serving_all() -> Iterator[list[Any]]:
    """Make weft serve all passes, and yield the ranges that its own comparison of times found (or the error)."""
    from weft.integrations.vllm import compare

    timed, ranges = compare.compare, list[Any]()

    def compared(passes: Any, allowed: Any, run: Any, vocabulary: int) -> compare.Comparison:
        try:
            ranges.extend(timed(passes, allowed, run, vocabulary).ranges)
        except Exception:
            ranges.append(traceback.format_exc())
            passes.serve(())
            passes.put()
        return compare.Comparison(passes, run, [compare.Range(1, passes.max_tokens, allowed[0], ())])

    with mock.patch.object(compare, "compare", compared), mock.patch.object(compare, "stored_at", lambda *_: None):
        yield ranges


def engine(mode: str, ranks: int, fuse: bool) -> tuple[Any, int]:
    """Return the engine and the size of its vocabulary. FlashInfer's fused all-reduce is off: vLLM uses it only for few
    tokens, so that rows would have other bits in larger passes."""
    import transformers
    from vllm import LLM

    loader = "vllm.model_executor.model_loader.dummy_loader.DummyModelLoader.load_weights"
    sizes = dict(MODELS["Llama-8B"])
    kind = sizes.pop("architecture")
    with tempfile.TemporaryDirectory() as folder, mock.patch(loader, random_weights):
        getattr(transformers, f"{kind}Config")(
            **sizes,
            num_hidden_layers=LAYERS,
            max_position_embeddings=MOST,
            architectures=[f"{kind}ForCausalLM"],
            torch_dtype="bfloat16",
            tie_word_embeddings=False,
        ).save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=ranks,
            distributed_executor_backend="external_launcher",
            max_model_len=MOST,
            max_num_batched_tokens=MOST,
            max_num_seqs=REQUESTS,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=4 << 30,
            enable_prefix_caching=True,
            enforce_eager=mode == "stock",
            seed=0,
            compilation_config={"pass_config": {"fuse_allreduce_rms": fuse}},
        )
    return llm, sizes["vocab_size"]


def served(llm: Any, ranges: Sequence[Any]) -> dict[str, Any]:
    """Return what weft serves, and what it decided by itself."""
    import weft
    from weft.integrations.vllm.served import models

    passes = models[-1].passes
    alone = all(getattr(compared, "form", None) is not None for compared in ranges)
    return {
        "report": weft.vllm.report(llm).splitlines(),
        "by itself": "everything" if ranges and alone else "nothing",
        "timed": [compared if isinstance(compared, str) else compared.line() for compared in ranges],
        "serves all": passes is not None and all(passes.sizes[1:]),
    }


def kernels(llm: Any, prompts: Sequence[Prompt], mode: str) -> dict[str, int]:
    """Return how often each kernel runs for the answer to a prompt, the most frequent first."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    ids = [{"prompt_token_ids": prompts[LENGTHS.index(200)]}]
    names = Counter(event.name[:60] for event in events_on_gpu(lambda: llm.generate(ids, params, use_tqdm=False)))
    if mode in GEMMS and not any(GEMMS[mode] in name for name in names):
        raise AssertionError(f"no {GEMMS[mode]} among {dict(names)}")
    return dict(names.most_common(16))


# -- the program -------------------------------------------------------------------------------------------------------
class Record:
    """The results of a rank. Rank 0 writes all results to a file and prints a line for each; the other ranks print
    failures only."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path, self.rank, self.results, self.failed = path, int(os.environ["RANK"]), dict(facts), False

    def add(self, name: str, result: Mapping[str, Any] | str, failed: bool = False) -> None:
        self.failed |= failed
        self.results[name] = result
        if self.rank == 0:
            self.path.write_text(json.dumps(self.results, indent=1))
        if self.rank == 0 or failed:
            text = " | ".join(result.splitlines()) if isinstance(result, str) else json.dumps(result)
            print(f"\ninvariant: rank {self.rank}, {name}: {'FAILED: ' * failed}{text[-LONGEST:]}", flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record an error as the step's result, and go on."""
        try:
            yield
        except Exception:
            self.add(name, traceback.format_exc(), failed=True)


def follow(llm: Any, mode: str, vocabulary: int, record: Record) -> None:
    """Run all phases, and compare each with the prompts alone. Without the mode, differences are expected."""
    prompts = drawn_prompts(vocabulary)
    expected, facts = run(llm, Phase(), prompts, vocabulary)
    record.results["answers"], why = expected, degenerate(expected)
    record.add("reference", facts | {"degenerate": why}, failed=bool(why))
    for number, phase in enumerate(PHASES):
        if mode == "stock" and phase.seed == 2:
            continue
        with record.step(f"phase {number}, {phase}"):
            answers, facts = run(llm, phase, prompts, vocabulary)
            lines = differences(answers, expected)
            row = facts | {"equal": len(prompts) - len(lines), "prompts": len(prompts), "different": lines}
            record.add(f"phase {number}, {phase}", row, failed=bool(lines) and mode != "stock")
    with record.step("kernels"):
        record.add("kernels", kernels(llm, prompts, mode))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fuse", action="store_true", help="leave FlashInfer's fused all-reduce on")
    args = parser.parse_args()
    os.environ |= MODES[args.mode] | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ranks, began = int(os.environ["WORLD_SIZE"]), time.monotonic()
    record = Record(args.out / f"vllm_invariant-{ranks}-{args.mode}.json", mode=args.mode, ranks=ranks)
    with record.step("engine"), serving_all() if args.mode == "weft" else nullcontext([]) as ranges:
        llm, vocabulary = engine(args.mode, ranks, args.fuse)
        device = f"{current_device()}, commit {os.environ.get('WEFT_COMMIT')}"
        record.add("engine", f"started in {time.monotonic() - began:.0f} s on {device}")
        if args.mode == "weft":
            with record.step("weft"):
                weft_serves = served(llm, ranges)
                record.add("weft", weft_serves, failed=not weft_serves["serves all"])
        with record.step("answers alone"):
            follow(llm, args.mode, vocabulary, record)
        without_weft = args.out / f"vllm_invariant-{ranks}-vllm.json"
        if args.mode == "weft" and without_weft.exists():
            with record.step("vLLM's answers"):
                stored = {int(i): answer for i, answer in json.loads(without_weft.read_text())["answers"].items()}
                equal = len(stored) - len(differences(record.results["answers"], stored))
                record.add("vLLM's answers", f"{equal} of {len(stored)} have the same bits without weft")
    verdict = "FAILED" if record.failed else "ok"
    record.add("ended", f"{args.mode}: {verdict} after {time.monotonic() - began:.0f} s")
    time.sleep(3 * (record.rank > 0))  # torchrun ends all ranks when one fails, and rank 0 must print first
    os._exit(record.failed)


def current_device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


if __name__ == "__main__":
    main()
