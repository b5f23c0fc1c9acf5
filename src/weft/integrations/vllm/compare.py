"""Choose which passes of an engine run with weft. At the engine's start weft times whole forward passes of the loaded
model with and without its operators, in the mode in which requests run, at both ends of ranges of tokens up to the
engine's limit.

A pass of a size that vLLM captures is captured and replayed. The host launches passes of all other sizes back to back;
with weft's operators it launches the graphs of their pieces (pieces.py). A form (`PASS_FORMS`) is chosen for a range if
it is at least MIN_SPEEDUP times as fast as vLLM's own pass at both ends; if several forms are, the fastest is chosen.
If another form is faster at the high end, the range is divided (`Comparison.divided`). Ranges are compared in
descending order, and forms that cannot win in the lower ranges are not timed there (`Comparison.hopeful`). The ranges
are stored together with everything that the times depend on, so that later starts time nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from ...chooser import MIN_SPEEDUP, Choice, Chooser
from ...plans import Plan, Sequential
from ...timing import CallTime, back_to_back
from .flashinfer import FlashInfer
from .interface import VllmObject
from .row_norm_column import PASS_FORMS, OwnRows, WovenLayers
from .twin import Passes, Switched, step_above
from .woven import FEWEST_TOKENS

VLLM = "vLLM"  # the candidate for vLLM's own pass
PassWay: TypeAlias = Plan | str
RunPass: TypeAlias = Callable[[int], object]  # runs a pass with this number of tokens
Times: TypeAlias = dict[PassWay, CallTime]  # the time of a pass in each way
Named: TypeAlias = tuple[int, dict[str, CallTime]]  # a number of tokens, and a pass's time by the way's name
IN_GRAPHS = (Sequential(), OwnRows())  # the forms for few tokens, that is, for no more than one tile of a GEMM
# A way is not timed in rounds if its first timed passes are slower than the fastest way's by this factor, which is
# larger in graphs, because short passes vary more.
SLOWER = {"eager": 1.02, "graph": 1.2}
FAR_SLOWER = 1.2  # a form that is slower than vLLM's own pass by this factor is not timed in lower ranges
PASSES_TIMED = 2  # short passes that are timed together, so that the host prepares the second while the first runs
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
    """The result for a range of tokens. `form` is None if vLLM's own pass runs. `us` contains the times of passes in
    the range, as (tokens, {way: time}); it is empty if no form was worth timing. `in_graphs` is true if pieces
    of the form were timed in graphs (pieces.py)."""

    low: int
    high: int
    form: Plan | None
    us: tuple[Named, ...]
    in_graphs: bool = False

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
        figures = "; ".join(ends) or "not timed: by the times with more tokens no other way can win"
        return f"{self.low} to {self.high} tokens: {self.form or VLLM} ({figures})"


def host_bound(time: CallTime) -> str:
    return " (host-bound)" if time.host >= HOST_BOUND * time.gpu else ""


# -- comparing ---------------------------------------------------------------------------------------------------------
def spans(passes: Passes) -> Iterator[TokenSpan]:
    """Yield the ranges: powers of four divide the captured sizes, powers of two the other sizes. If a form is the
    fastest only at the high end of a range, the upper half of the range is tried, then the upper quarter, and then the
    upper eighth. Of the last range, the tokens that the twin pads to the largest number are tried too, because most
    steps have the largest number if prompts wait. No two parts share a size of the twin. Beyond the captured sizes a
    low end is the worst case: it has the most padding, and each rank's shard of the rows ends with the smallest part of
    a tile."""
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
        step = step_above(low - 1)
        parts = [(high - low + 1) // step * part // 8 for part in PARTS]
        starts = [low, *((low - 1) // step * step + part * step + 1 for part in parts if part)]
        if high == passes.max_tokens:
            starts.append(max(low, (high - 1) // step * step + 1))
        yield TokenSpan(high, tuple((start, start) for start in dict.fromkeys(starts)), "eager")


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


def compare(passes: Passes, allowed: Sequence[Plan], run: RunPass, vocabulary: int) -> Comparison:
    """Compare the ways in each range. The tokens are random ids of a vocabulary of this size. The call is
    collective."""
    generator = torch.Generator("cpu").manual_seed(0)  # the same tokens on all ranks
    ids = torch.randint(vocabulary, (passes.max_tokens,), generator=generator, device="cpu")
    passes.stack.__dict__["weft_ids"] = ids.to(passes.world.device)
    passes.put(Compared)
    comparison = Comparison(passes, run)
    for span in reversed(list(spans(passes))):
        forms = comparison.hopeful(allowed, span)
        whole = Range(span.lows[0][0], span.high, None, ())
        comparison.ranges[:0] = comparison.divided(span, forms) if forms else [whole]
    passes.serve(())
    passes.put()
    del passes.stack.__dict__["weft_ids"]
    return comparison


@dataclass
class Comparison:
    """The results up to now. `ranges` are in ascending order. `far_slower` contains the forms, with the mode, that were
    far slower at the high end of a range, and `in_graphs` the forms whose pieces were captured. `host` is, by form, the
    host's shortest time for a pass of a size that vLLM does not capture, and `vllm` the shortest time of vLLM's own
    pass of such a size, in us. `timed_seconds` is the time of all timed passes. All ranks have the same times, so they
    make the same decisions."""

    passes: Passes
    run: RunPass
    ranges: list[Range] = field(default_factory=list)
    far_slower: set[tuple[Plan, str]] = field(default_factory=set)
    in_graphs: set[Plan] = field(default_factory=set)
    host: dict[Plan, float] = field(default_factory=dict)
    vllm: float = math.inf
    timed_seconds: float = 0.0

    def hopeful(self, allowed: Sequence[Plan], span: TokenSpan) -> list[Plan]:
        """Return the forms to time in a range. The host's time hardly depends on the number of tokens. So beyond the
        sizes that vLLM captures, a form cannot win if the host needs longer for it than vLLM's whole pass took with
        more tokens."""
        forms = [form for form in allowed if may_run(form, span) and (form, span.mode) not in self.far_slower]
        return [form for form in forms if span.mode == "graph" or self.host.get(form, 0.0) * MIN_SPEEDUP <= self.vllm]

    def divided(self, span: TokenSpan, forms: Sequence[Plan]) -> list[Range]:
        """Return the ranges into which one of these forms, or several, divide a range of tokens. From the widest part
        of the range to the narrowest, each low end is timed with the way that is chosen so far, which is vLLM's own
        pass at first, and with its rivals, the forms that are faster at the high end. From the low end at which a rival
        is faster too, the fastest rival is chosen. Since the time of a pass is almost linear in the number of tokens,
        a rival is not timed where it is not faster by interpolation between the widest part's two ends."""
        high = self.time(span.high, VLLM, forms, span.mode)
        slowest = FAR_SLOWER * high[VLLM].gpu
        self.far_slower |= {(form, span.mode) for form in forms if high[form].gpu > slowest}
        times: dict[int, Times] = {span.high: high}
        parts: list[tuple[int, PassWay]] = [(span.lows[0][0], VLLM)]  # each part's low end and way
        for low, size in span.lows:
            _, chosen = parts[-1]
            rivals = [form for form in forms if is_faster(form, chosen, high)]
            if low > parts[0][0] and rivals:
                between = interpolated(span.lows[0][1], times[span.lows[0][1]], span.high, high, size)
                rivals = [form for form in rivals if is_faster(form, chosen, between)]
            if not rivals:
                continue
            at_low = self.time(size, chosen, rivals, span.mode)
            times[size] = times.get(size, {}) | at_low
            if chosen != VLLM and not is_faster(chosen, VLLM, at_low):
                chosen, parts[-1] = VLLM, (parts[-1][0], VLLM)  # from here on a form has to win against vLLM's own pass
            faster = [form for form in rivals if is_faster(form, chosen, at_low)]
            if faster:
                parts.append((low, max(faster, key=lambda form: min(gain(form, at_low), gain(form, high)))))
        ends = [low - 1 for low, _ in parts[1:]] + [span.high]
        named = [(tokens, {str(way): us for way, us in ways.items()}) for tokens, ways in times.items()]
        return [
            Range(
                low,
                end,
                way if isinstance(way, Plan) else None,
                tuple(t for t in named if low <= t[0] <= end),
                span.mode == "eager" and way in self.in_graphs,
            )
            for (low, way), end in zip(parts, ends, strict=True)
            if low <= end
        ]

    def time(self, tokens: int, chosen: PassWay, forms: Sequence[Plan], mode: str) -> Times:
        """Return the times of passes of `tokens` tokens in the way that is chosen so far, in these forms, and of
        vLLM's own pass."""
        if mode == "eager":  # all ways run before the first capture
            for way in dict.fromkeys((VLLM, chosen, *forms)):
                serve(self.passes, tokens, way)
                self.passes.warm_up(tokens, lambda: self.run(tokens))
        # A Chooser times each size once, and a range of one size needs two trials.
        chooser = Chooser(self.clock, self.passes.world.backend.capturing, self.passes.world)
        trial = chooser.trial(choice(self.passes, tokens, chosen, (VLLM, *forms), mode, self.run))
        assert trial is not None
        if self.passes.graphs is not None:
            self.in_graphs |= {form for _, form in self.passes.graphs.captured}
            self.passes.graphs.keep(set())
        if mode == "eager":
            self.vllm = min(self.vllm, trial.times[VLLM].gpu)
            for form in forms:
                self.host[form] = min(self.host.get(form, math.inf), trial.times[form].host)
        return trial.times

    def clock(self, run: Callable[[], object], times: int, ahead: float) -> CallTime:
        """Time passes, and add the time of the measurement to `timed_seconds`."""
        began = time.monotonic()
        measured = back_to_back(run, times, ahead)
        self.timed_seconds += time.monotonic() - began
        return measured


def gain(way: PassWay, times: Times) -> float:
    """Return how many times as fast as vLLM's own pass a pass is."""
    return times[VLLM].gpu / times[way].gpu


def is_faster(form: PassWay, chosen: PassWay, times: Times) -> bool:
    """Return whether a form is faster than vLLM's own pass and the chosen way, by more than equal passes differ."""
    return gain(form, times) >= MIN_SPEEDUP * max(gain(chosen, times), 1.0)


def interpolated(low: int, low_times: Times, high: int, high_times: Times, tokens: int) -> Times:
    """Return the times of passes between two numbers of tokens, for the ways that were timed at both."""
    part = (tokens - low) / (high - low)
    ends = {way: zip(time, high_times[way], strict=True) for way, time in low_times.items()}
    return {way: CallTime(*(a + part * (b - a) for a, b in times)) for way, times in ends.items()}


def serve(passes: Passes, tokens: int, way: PassWay) -> None:
    """Let passes of `tokens` tokens run in this way."""
    passes.serve(() if isinstance(way, str) else [(tokens, tokens, way)])


def choice(
    passes: Passes, tokens: int, chosen: PassWay, candidates: Sequence[PassWay], mode: str, run: RunPass
) -> Choice[PassWay]:
    """Return the Choice of the way in which passes of `tokens` tokens run."""
    graphs: dict[PassWay, torch.cuda.CUDAGraph] = {}

    def in_way(way: PassWay) -> None:
        serve(passes, tokens, way)
        run(tokens)

    def prepare(way: PassWay) -> None:
        if mode == "graph":
            passes.prepare_capture(lambda: in_way(way))
            graphs[way] = captured(passes, lambda: in_way(way))
        else:
            serve(passes, tokens, way)
            passes.capture(tokens, lambda: run(tokens))

    def once(way: PassWay) -> None:
        graphs[way].replay() if mode == "graph" else in_way(way)

    return Choice(
        ("passes", tokens),
        expected=lambda mode: chosen,
        candidates=lambda: candidates,
        run=once,
        prepare=prepare,
        title="whole passes",
        sizes=(tokens,),
        hopeless=SLOWER[mode],
        together=PASSES_TIMED,
    )


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
    passes.stack.__dict__["weft_graph"] = graph
    passes.put(Captured)
    try:
        with passes.capture_context(device=passes.world.device):
            one_pass()
    finally:
        passes.put(Compared)
        del passes.stack.__dict__["weft_graph"]
    return graph


def pass_of(runner: VllmObject, config: VllmObject) -> RunPass:
    """Return a function that runs a pass of random requests outside vLLM's graphs. Each request attends to its own
    tokens."""
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


def as_served(ranges: Sequence[Range], sizes: Sequence[int]) -> list[Range]:
    """Return the ranges divided into what runs: vLLM's own pass runs where `sizes`, by the number of tokens, contains
    no size of the twin. A part keeps the times of its whole range."""
    parts = []
    for compared in ranges:
        for runs, group in itertools.groupby(range(compared.low, compared.high + 1), lambda tokens: sizes[tokens] > 0):
            tokens = list(group)
            parts.append(replace(compared, low=tokens[0], high=tokens[-1], form=compared.form if runs else None))
    return parts


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
                in_graphs,
            )
            for low, high, form, times, in_graphs in stored["ranges"]
        ]
    except Exception:
        return None


def write(path: Path | None, ranges: Sequence[Range], depends_on: Mapping[str, object]) -> None:
    """Store the ranges. A reader never sees a half-written file. Raises OSError."""
    if path is None:
        return
    rows = [(r.low, r.high, r.form and r.form.to_json(), r.us, r.in_graphs) for r in ranges]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"depends_on": {k: str(v) for k, v in depends_on.items()}, "ranges": rows}, indent=1))
    part.replace(path)
