"""Choose which passes of an engine run with weft. At the engine's start weft times whole forward passes of the loaded
model with and without its operators, in the mode in which requests run, at both ends of ranges of tokens up to the
engine's limit.

A pass of a size that vLLM captures is captured and replayed; the host launches passes of all other sizes back to back.
A form (`PASS_FORMS`) is chosen for a range if it is at least MIN_SPEEDUP times as fast as vLLM's own pass at both ends;
if several forms are, the fastest is chosen. Ranges are compared in descending order. A form that is far slower than
vLLM's own pass at the high end of a range is not timed in the lower ranges of the same mode, where the host's time
weighs more. The ranges are stored together with everything that the times depend on, so that later starts time nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from ...chooser import MIN_SPEEDUP, Choice, Chooser
from ...plans import Plan, Sequential
from ...timing import CallTime, back_to_back
from .flashinfer import FlashInfer
from .interface import VllmObject
from .row_norm_column import PASS_FORMS, OwnRows, WovenLayers
from .twin import STEP, Passes, Switched
from .woven import FEWEST_TOKENS

VLLM = "vLLM"  # the candidate for vLLM's own pass
PassWay: TypeAlias = Plan | str
RunPass: TypeAlias = Callable[[int], object]  # runs a pass with this number of tokens
Times: TypeAlias = tuple[int, dict[str, CallTime]]  # a number of tokens, and the time of a pass in each way
IN_GRAPHS = (Sequential(), OwnRows())  # the forms for few tokens, that is, for no more than one tile of a GEMM
FAR_SLOWER = 1.2  # timing of a form stops if it is slower than vLLM's own pass by this factor
PARTS = (0, 4, 6, 7)  # the low ends to try, in eighths of a range
HOST_BOUND = 0.9  # the GPU waits for the host if the host needs at least this part of a pass's time


class TokenSpan(NamedTuple):
    """A range of tokens to compare at its two ends. `high` is the high end, and `lows` contains the low ends to try,
    each as (first number of tokens, number of tokens to time), the widest range first. `mode` is "graph" or "eager"."""

    high: int
    lows: tuple[tuple[int, int], ...]
    mode: str


@dataclass(frozen=True)
class Range:
    """The result for a range of tokens. `form` is None if vLLM's own pass runs. `us` contains the times of the passes
    at both ends, as (tokens, {way: time}); it is empty if no form was worth timing."""

    low: int
    high: int
    form: Plan | None
    us: tuple[Times, ...]

    def line(self) -> str:
        """Return the report's line for the range, which contains the speed of each form relative to vLLM's own pass."""
        ends = []
        for tokens, times in self.us:
            others = [
                f"{times[VLLM].gpu / time.gpu:.3f}x by {way}{host_bound(time)}"
                for way, time in times.items()
                if way != VLLM
            ]
            ends.append(f"{tokens} tokens {times[VLLM].gpu:.0f} us{host_bound(times[VLLM])}, {', '.join(others)}")
        figures = "; ".join(ends) or "not timed: all others are far slower with more tokens"
        return f"{self.low} to {self.high} tokens: {self.form or VLLM} ({figures})"


def host_bound(time: CallTime) -> str:
    return " (host-bound)" if time.host >= HOST_BOUND * time.gpu else ""


# -- comparing ---------------------------------------------------------------------------------------------------------
def spans(passes: Passes) -> Iterator[TokenSpan]:
    """Yield the ranges: powers of four divide the captured sizes, powers of two the other sizes. If a form wins only at
    the high end of a range, the upper half of the range is tried, then the upper quarter, and then the upper eighth."""
    captured = passes.captured
    high = 0
    for _, group in itertools.groupby(captured, lambda size: ((size - 1).bit_length() + 1) // 2):
        sizes = list(group)
        firsts = [size + 1 for size in (high, *sizes)]  # for each size, the least number of tokens that is padded to it
        lows = dict.fromkeys(len(sizes) * part // 8 for part in PARTS)
        yield TokenSpan(sizes[-1], tuple((firsts[i], sizes[i]) for i in lows), "graph")
        high = sizes[-1]
    while high < passes.max_tokens:
        low, high = high + 1, min(1 << high.bit_length(), passes.max_tokens)
        steps = (high - low + 1) // STEP
        lows = dict.fromkeys(low + steps * part // 8 * STEP for part in PARTS)
        yield TokenSpan(high, tuple((low, low) for low in lows), "eager")


def forms_of(by_rows: bool, passes: Passes) -> Sequence[Plan]:
    """Return the forms that the model and the World allow. Batch invariance allows only the first form, since rows must
    have the same bits in passes of any number of tokens."""
    if passes.world.batch_invariant:
        return PASS_FORMS[:1]
    forms = PASS_FORMS if by_rows and passes.world.backend.symmetric_unsupported is None else PASS_FORMS[:1]
    return [form for form in forms if passes.woven is not None or not isinstance(form, WovenLayers)]


def may_run(form: Plan, span: TokenSpan) -> bool:
    """Return whether a form is allowed for every number of tokens in a range."""
    if isinstance(form, FlashInfer):
        return span.high <= form.max_tokens
    if isinstance(form, WovenLayers) and span.lows[0][0] < FEWEST_TOKENS:
        return False
    return span.mode == "eager" or form in IN_GRAPHS


def compare(passes: Passes, allowed: Sequence[Plan], run: RunPass, vocabulary: int) -> list[Range]:
    """Return the fastest way in each range. The tokens are random ids of a vocabulary of this size. The call is
    collective."""
    generator = torch.Generator().manual_seed(0)  # the same tokens on all ranks
    ids = torch.randint(vocabulary, (passes.max_tokens,), generator=generator)
    passes.stack.__dict__["weft_ids"] = ids.to(passes.world.device)
    passes.put(Compared)

    def timed(tokens: int, forms: Sequence[Plan], mode: str) -> tuple[Times, dict[Plan, float]]:
        """Return the times of passes of `tokens` tokens, and the gain of each form that is fast enough."""
        # A Chooser times each size once, and a range of one size needs two trials.
        chooser = Chooser(back_to_back, passes.world.backend.capturing, passes.world)
        trial = chooser.trial(choice(passes, tokens, forms, mode, run))
        assert trial is not None
        gains = {form: trial.times[VLLM].gpu / trial.times[form].gpu for form in forms}
        times = {str(way): time for way, time in trial.times.items()}
        return (tokens, times), {form: gain for form, gain in gains.items() if gain >= MIN_SPEEDUP}

    ranges: list[Range] = []
    hopeless: set[tuple[Plan, str]] = set()
    for span in reversed(list(spans(passes))):
        forms = [form for form in allowed if may_run(form, span) and (form, span.mode) not in hopeless]
        if not forms:
            ranges.append(Range(span.lows[0][0], span.high, None, ()))
            continue
        high_times, high_gains = timed(span.high, forms, span.mode)
        limit = FAR_SLOWER * high_times[1][VLLM].gpu
        hopeless |= {(form, span.mode) for form in forms if high_times[1][str(form)].gpu > limit}
        lost: list[Times] = []
        best, begin = None, span.lows[0][0]
        for low, size in span.lows if high_gains else ():
            times, gains = timed(size, list(high_gains), span.mode)
            if gains:
                best, begin = max(gains, key=lambda form: min(gains[form], high_gains[form])), low
                break
            lost.append(times)
        if best is None:
            ranges.append(Range(begin, span.high, None, (high_times, *lost)))
            continue
        ranges.append(Range(begin, span.high, best, tuple(dict([high_times, times]).items())))
        if lost:
            ranges.append(Range(span.lows[0][0], begin - 1, None, tuple(lost)))
    passes.serve(())
    passes.put()
    del passes.stack.__dict__["weft_ids"]
    return ranges[::-1]


def choice(passes: Passes, tokens: int, candidates: Sequence[Plan], mode: str, run: RunPass) -> Choice[PassWay]:
    """Return the Choice of the way in which passes of `tokens` tokens run."""
    graphs: dict[PassWay, torch.cuda.CUDAGraph] = {}

    def in_way(way: PassWay) -> None:
        passes.serve(() if isinstance(way, str) else [(tokens, tokens, way)])
        run(tokens)

    def prepare(way: PassWay) -> None:
        if mode == "graph":
            in_way(way)
            in_way(way)  # weft prepares a plan for graphs at the second call of a size
            graphs[way] = captured(passes, lambda: in_way(way))

    def once(way: PassWay) -> None:
        graphs[way].replay() if mode == "graph" else in_way(way)

    expected, title = (lambda mode: VLLM), "whole passes"
    key = ("passes", tokens)
    return Choice(key, expected, lambda: candidates, once, prepare, title, (tokens,), hopeless=FAR_SLOWER)


class Compared(Switched):
    """A stack of layers that replaces the tokens of its passes by random tokens. In vLLM's own dummy runs all tokens
    are the same, so the router would send all of them to the same few experts."""

    def __call__(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        passes: Passes = self.__dict__["weft_passes"]
        ids = passes.named(args, kwargs).get("input_ids")
        if ids is not None:
            ids.copy_(self.__dict__["weft_ids"][: len(ids)])
        return super().__call__(*args, **kwargs)


class Captured(Compared):
    """A stack of layers that captures its passes."""

    def __call__(self, *args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        graph: torch.cuda.CUDAGraph = self.__dict__["weft_graph"]
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            return super().__call__(*args, **kwargs)


def captured(passes: Passes, one_pass: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of the stack's part of one pass, captured as in vLLM."""
    graph = torch.cuda.CUDAGraph()
    capture = importlib.import_module("vllm.distributed.parallel_state").graph_capture
    passes.stack.__dict__["weft_graph"] = graph
    passes.put(Captured)
    try:
        with capture(device=passes.world.device):
            one_pass()
    finally:
        passes.put(Compared)
        del passes.stack.__dict__["weft_graph"]
    return graph


def pass_of(runner: VllmObject, config: VllmObject) -> RunPass:
    """Return a function that runs a pass of random requests without a graph. Each request attends to its own tokens."""
    accepted = inspect.signature(runner._dummy_run).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    mode = importlib.import_module("vllm.config").CUDAGraphMode.NONE
    fixed = dict(cudagraph_runtime_mode=mode, force_attention=True, skip_eplb=True, remove_lora=False)
    fixed = {name: value for name, value in fixed.items() if takes_any or name in accepted}

    def run(tokens: int) -> object:
        requests = min(tokens, config.scheduler_config.max_num_seqs)
        longest = tokens // requests + tokens % requests
        of_size = {"profile_seq_lens": longest} if "profile_seq_lens" in accepted else {}
        return runner._dummy_run(tokens, **fixed, **of_size)

    return run


# -- storing -----------------------------------------------------------------------------------------------------------
def stored_at(model: str, depends_on: Mapping[str, object]) -> Path | None:
    """Return the file for the ranges of this model, in the user's cache directory. None without platformdirs."""
    try:
        from platformdirs import user_cache_dir
    except ModuleNotFoundError:
        return None
    digest = hashlib.sha256(repr(sorted(depends_on.items())).encode()).hexdigest()[:16]
    return Path(user_cache_dir("weft")) / "vllm" / f"{re.sub(r'[^A-Za-z0-9]', '_', model)}-{digest}.json"


def read(path: Path | None) -> list[Range] | None:
    """Return the stored ranges, None if there are none. Never raises."""
    try:
        stored = json.loads(path.read_text()) if path is not None else None
        return stored and [
            Range(
                low,
                high,
                form and Plan.from_json(form),
                tuple((tokens, {way: CallTime(*us) for way, us in ways.items()}) for tokens, ways in times),
            )
            for low, high, form, times in stored["ranges"]
        ]
    except Exception:
        return None


def write(path: Path | None, ranges: Sequence[Range], depends_on: Mapping[str, object]) -> None:
    """Store the ranges. A reader never sees a half-written file. Raises OSError."""
    if path is None:
        return
    rows = [(r.low, r.high, r.form and r.form.to_json(), r.us) for r in ranges]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"depends_on": {k: str(v) for k, v in depends_on.items()}, "ranges": rows}, indent=1))
    part.replace(path)
