"""At its start, an engine compares whole passes with and without weft, and removes the forms that are never faster; it
creates nothing during requests. Stand-ins replace vLLM's classes, in the emulator, and times come from a table."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.integrations.vllm_standin as standin
import weft
from tests.integrations.vllm_standin import DecoderLayer, Model, SparseMlp, Worker
from weft import chooser
from weft.chooser import Choice, Chooser
from weft.integrations.vllm import compare, plugin, start, twin
from weft.integrations.vllm.compare import VLLM, Range
from weft.integrations.vllm.row_norm_column import PASS_FORMS, OwnRows
from weft.integrations.vllm.row_norm_column import forms as forms_of
from weft.integrations.vllm.served import ServedModel, counts
from weft.integrations.vllm.twin import Passes
from weft.plans import Plan, Sequential
from weft.timing import CallTime

STORED_AT = compare.stored_at
MOST, CAPTURED = 12, (1, 2, 4)
Gain = Callable[[int, Plan], float]  # for a form compared with vLLM's own pass, by the number of tokens


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.served_by_plugin(monkeypatch):
        faked(monkeypatch)
        monkeypatch.setattr(standin.ModelRunner, "_dummy_run", lambda self, num_tokens, **options: None)
        yield


def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the plugin for engines whose graphs are passes."""
    monkeypatch.setattr(plugin, "one_trial_per_power_of_two", lambda: None)
    monkeypatch.setattr(chooser, "ROUNDS", 1)
    monkeypatch.setattr(compare, "captured", lambda passes, one_pass: SimpleNamespace(replay=one_pass))
    plugin.register()


def times_of(monkeypatch: pytest.MonkeyPatch, gain: Gain) -> list[tuple[int, str]]:
    """Assign times to passes that result in these gains. Return the list to which each timed pass is added."""
    timed: list[tuple[int, str]] = []

    def time(self: Chooser, choice: Choice[Any], way: Any, *_: Any) -> CallTime:
        choice.run(way)
        timed.append((choice.sizes[0], str(way)))
        us = 1000.0 if way == VLLM else 1000.0 / gain(choice.sizes[0], way)
        return CallTime(us, us / 2)

    monkeypatch.setattr(Chooser, "time", time)
    return timed


def engine(world: weft.World, **passes: bool) -> Worker:
    """Return the worker of a model on a rank whose times count. `passes` are the passes of vLLM's compiler."""
    world.backend.clock = lambda *_: pytest.fail("really timed")  # type: ignore[method-assign,assignment]
    world.backend.reference = True  # ops run through cuBLAS and NCCL, because their results are tested elsewhere
    compilation = SimpleNamespace(
        pass_config=SimpleNamespace(**passes),
        cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
        cudagraph_capture_sizes=list(CAPTURED),
    )
    config = standin.config(
        lambda: Model(standin.DecoderLayer),
        compilation_config=compilation,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST, max_num_seqs=4),
    )
    model = standin.BaseModelLoader().load_model(vllm_config=config, model_config=None)
    return Worker(model, config)


def started(world: weft.World, **passes: bool) -> tuple[Worker, ServedModel]:
    worker = engine(world, **passes)
    assert worker.determine_available_memory() == 1
    assert worker.compile_or_warm_up_model() == 2.0
    (report,) = (model for model in plugin.models if model.config is worker.vllm_config)
    return worker, report


def served_tokens(passes: Passes | None) -> list[int]:
    return [] if passes is None else [tokens for tokens, size in enumerate(passes.sizes) if size]


def test_weft_runs_where_it_wins_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with sharded rows are faster from 5 tokens on. Passes with whole residuals are faster only up to 11
    tokens, that is, at one end of their range."""
    times_of(monkeypatch, lambda tokens, form: {Sequential(): 1.2 if tokens < 12 else 0.9, OwnRows(): 1.1}.get(form, 0.5) if tokens > 4 else 1.0)  # fmt: skip

    def main(world: weft.World) -> tuple[Any, list[int], dict[int, Plan], list[str]]:
        worker, report = started(world)
        assert report.passes is not None and report.ranges is not None
        ranges = [(compared.low, compared.high, compared.form) for compared in report.ranges]
        forms = {tokens: forms_of(world)[size] for tokens, size in enumerate(report.passes.sizes) if size}
        return ranges, served_tokens(report.passes), forms, worker.model_runner.log

    for ranges, tokens, forms, log in standin.run(main):
        assert ranges == [
            (1, 1, None), (2, 4, None), (5, 8, Sequential()), (9, 12, OwnRows())
        ]  # fmt: skip
        assert tokens == list(range(5, 13)) and forms[8] == Sequential() and forms[9] == OwnRows()
        assert log == ["profile", *["profile"] * len(PASS_FORMS), "capture"]


def test_a_form_that_is_far_slower_is_hardly_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that is far slower than vLLM's own pass is timed twice at the highest number of tokens, and at lower
    numbers only if they are captured. A form that is slower than the fastest one is timed twice. vLLM's own pass is
    timed to the end even if it is far slower."""
    gains = {Sequential(): 1.5, OwnRows(): 0.7, PASS_FORMS[2]: 1.3}
    timed = times_of(monkeypatch, lambda tokens, form: 1.1 if tokens <= 4 else gains.get(form, 1.2))
    monkeypatch.setattr(chooser, "ROUNDS", 3)

    def main(world: weft.World) -> list[tuple[int, int, Plan | None]]:
        ranges = started(world)[1].ranges
        assert ranges is not None
        return [(compared.low, compared.high, compared.form) for compared in ranges]

    for ranges in standin.run(main):
        assert ranges == [(1, 1, Sequential()), (2, 4, Sequential()), (5, 8, Sequential()), (9, 12, Sequential())]
    passes = {
        way: [timed.count((tokens, way)) // 2 for tokens in (12, 8, 4)] for way in map(str, (VLLM, *PASS_FORMS[:4]))
    }
    assert list(passes.values()) == [[4, 4, 4], [4, 4, 4], [2, 0, 4], [2, 2, 0], [2, 2, 0]], passes


def test_a_form_whose_first_passes_alone_are_slow_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times_of(monkeypatch, lambda tokens, form: 0.3 if is_first_pass(tokens, form) else 1.2)
    seen: set[tuple[int, int, Plan]] = set()

    def is_first_pass(tokens: int, form: Plan) -> bool:
        key = id(standin.current_world()), tokens, form
        return not (key in seen or seen.add(key))  # type: ignore[func-returns-value]

    def main(world: weft.World) -> list[Plan | None]:
        return [compared.form for compared in started(world)[1].ranges or ()]

    assert all(forms == [Sequential()] * 4 for forms in standin.run(main))


def test_the_time_of_timed_passes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 3.0, 7.0, 7.5))
    monkeypatch.setattr(compare, "back_to_back", lambda run, times, ahead: CallTime(times, ahead))
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    comparison = compare.Comparison(None, None)  # type: ignore[arg-type]
    assert [comparison.clock(lambda: None, 1, 2.0) for _ in range(2)] == [CallTime(1, 2.0)] * 2
    assert comparison.timed_seconds == 2.5


def test_a_range_of_one_size_is_timed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms are faster only in the first trial of 1 and of 4 tokens, which has two samples of each form."""
    times_of(monkeypatch, lambda tokens, form: 1.2 if tokens in (1, 4) and samples(tokens, form) <= 2 else 1.0)

    def samples(tokens: int, form: Plan) -> int:
        seen = standin.current_world().cached("samples", Counter)
        seen[tokens, form] += 1
        return int(seen[tokens, form])

    def main(world: weft.World) -> list[Plan | None]:
        return [compared.form for compared in started(world)[1].ranges or ()]

    assert all(set(forms) == {None} for forms in standin.run(main))


def test_ranges_are_divided_down_to_eighths() -> None:
    """Among the sizes that vLLM captures, the comparison finds a form that is faster only from 481 to 512 tokens. In the
    last range, the comparison finds a form that is faster only with the largest size."""
    captured = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    spans = {span.high: span for span in compare.spans(SimpleNamespace(captured=captured, max_tokens=4096))}  # type: ignore[arg-type]
    assert spans[512] == (512, ((257, 272), (385, 400), (449, 464), (481, 496)), "graph")
    assert spans[4096] == (4096, tuple((low, low) for low in (2049, 3073, 3585, 3841, 3969)), "eager")


SHARDED, FUSED, PARTS, WOVEN, WOVEN_16 = PASS_FORMS[2:]


def test_a_form_that_is_slower_than_vllm_inside_its_range_loses_the_part_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMM + all-reduce wins at both ends of a range, but not in the middle, where its rival is timed with it and does
    not win either."""
    gains = {FUSED: {1: 1.05, 5: 0.9, 8: 1.05}, SHARDED: {1: 0.98, 5: 1.0, 8: 1.3}}
    span = compare.TokenSpan(8, ((1, 1), (5, 5)), "graph")
    comparison = compare.Comparison(None, None)  # type: ignore[arg-type]

    def time(tokens: int, chosen: Any, forms: Any, mode: str) -> Any:
        return {way: CallTime(1 / gains.get(way, {}).get(tokens, 1.0), 0.0) for way in (compare.VLLM, chosen, *forms)}

    monkeypatch.setattr(comparison, "time", time)
    assert {(r.low, r.high, r.form) for r in comparison.divided(span, [FUSED, SHARDED])} == {(1, 8, None)}


# Llama-70B with 16 layers on four H200s: the times of vLLM's own passes in ms, and the gains of the forms, by the
# number of tokens.
VLLM_MS = {1024: 15.9, 1025: 19.2, 2048: 28.4, 2049: 29.9, 3073: 42.2, 4096: 54.9, 4097: 54.1, 8192: 108.3}
GAINS: dict[Plan, dict[int, float]] = {
    Sequential(): {1024: 0.702, 2048: 0.951, 4096: 0.960, 8192: 0.971},
    OwnRows(): {1024: 0.652, 1025: 0.665, 2048: 1.043, 2049: 0.814, 3073: 0.925, 4096: 1.046, 4097: 0.94, 8192: 1.031},
    SHARDED: {1024: 0.523, 1025: 0.53, 2048: 1.056, 2049: 0.809, 3073: 0.829, 4096: 1.134, 4097: 0.855, 8192: 1.122},
    FUSED: {1024: 0.559, 1025: 0.591, 2048: 1.068, 2049: 0.983, 3073: 1.023, 4096: 1.109, 4097: 1.045, 8192: 1.105},
    PARTS: {2048: 0.762, 4096: 0.958, 8192: 0.992},
    WOVEN: {2048: 0.736, 4096: 0.848, 4097: 0.873, 8192: 1.128},
    WOVEN_16: {2048: 0.824, 4096: 0.95, 4097: 0.962, 8192: 1.082},
}


def test_a_range_is_divided_among_forms_that_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers in two parts win only with the largest size. A form is timed neither where it is slower by
    interpolation, nor in a range for which the host alone needs longer than vLLM's whole pass. A way that is slower
    than the chosen way is not timed in rounds."""
    timed: dict[int, Counter[Any]] = {}
    monkeypatch.setattr(chooser, "ROUNDS", 5)

    def between(points: dict[int, float], tokens: int) -> float:
        return float(np.interp(tokens, list(points), list(points.values())))

    def time(self: Chooser, choice: Choice[Any], way: Any, *_: Any) -> CallTime:
        (tokens,) = choice.sizes
        timed.setdefault(tokens, Counter())[way] += 1
        ms = between(VLLM_MS, tokens) / (1.0 if way == VLLM else between(GAINS[way], tokens))
        return CallTime(ms, min(ms, 14.0 if way == VLLM else 38.0 if way in (PARTS, WOVEN, WOVEN_16) else 26.0))

    monkeypatch.setattr(Chooser, "time", time)
    backend = SimpleNamespace(capturing=lambda: False)
    world: Any = SimpleNamespace(device="cpu", backend=backend, exchange=lambda times, title: [times])
    stubs = dict(stack=SimpleNamespace(), serve=lambda ranges: None, put=lambda kind=None: None, graphs=None)
    stubs["warm_up"] = stubs["capture"] = lambda tokens, one_pass: one_pass()
    prepared = list[Callable[[], object]]()
    stubs["prepare_capture"] = prepared.append
    passes: Any = SimpleNamespace(world=world, captured=(512,), max_tokens=8192, **stubs)
    with torch.device("meta"):  # the tokens are made on the host for any default device
        ranges = compare.compare(passes, PASS_FORMS, lambda tokens: None, 32).ranges
    assert [(compared.low, compared.high, compared.form) for compared in ranges] == [
        (1, 512, None), (513, 1024, None), (1025, 2048, None),
        (2049, 3072, None), (3073, 4096, FUSED), (4097, 8064, FUSED), (8065, 8192, WOVEN),
    ]  # fmt: skip
    assert all(compared.high in Passes.known_sizes(passes) for compared in ranges)
    in_graphs = sum(way != VLLM for tokens, ways in timed.items() if tokens <= 512 for way in ways)
    assert len(prepared) >= in_graphs > 0, "before its capture, a whole pass is prepared"
    rows = {Sequential(), OwnRows(), SHARDED, FUSED}
    assert timed[8065] == {VLLM: 2, SHARDED: 6, FUSED: 6, WOVEN: 6}
    assert {tokens: set(ways) - {VLLM} for tokens, ways in timed.items() if tokens > 512} == {
        8192: set(PASS_FORMS), 4097: {OwnRows(), SHARDED, FUSED, WOVEN, WOVEN_16}, 8065: {SHARDED, FUSED, WOVEN},
        4096: set(PASS_FORMS), 2049: rows - {Sequential()}, 3073: {FUSED},
        2048: rows, 1025: rows - {Sequential()},
    }  # fmt: skip


@pytest.mark.parametrize("experts", [False, True])
def test_experts_are_served_if_asked_for(monkeypatch: pytest.MonkeyPatch, experts: bool) -> None:
    """Dense models are served without any setting."""
    monkeypatch.delenv("WEFT_VLLM")
    times_of(monkeypatch, lambda tokens, form: 2.0)
    layer = functools.partial(DecoderLayer, mlp=SparseMlp) if experts else DecoderLayer
    monkeypatch.setattr(standin, "DecoderLayer", layer)

    def main(world: weft.World) -> tuple[bool, str]:
        report = started(world)[1]
        return report.passes is not None, report.text()

    for served, text in standin.run(main):
        assert served != experts, text
        assert ("leaves to vLLM all: a mixture of experts is served with WEFT_VLLM=1" in text) == experts


@pytest.mark.parametrize("slow", [0, 8])
def test_batch_invariance_needs_all_ranges(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Rows have different bits in vLLM's own pass and in every form except the sequential one."""
    times_of(monkeypatch, lambda tokens, form: 1.0 if tokens == slow else 2.0 if form == OwnRows() else 1.5)

    def main(world: weft.World) -> tuple[list[Plan | None], str]:
        world.batch_invariant = True
        report = started(world)[1]
        return [compared.form for compared in report.ranges or ()], report.text()

    for forms, text in standin.run(main):
        assert set(forms) <= {Sequential(), None} and (None in forms) == bool(slow)
        assert ("batch invariance needs one way for all, and 5 to 8 tokens are not 1% faster" in text) == bool(slow), (
            text
        )


@pytest.mark.parametrize("gain", [0.7, 0.9, 1.0, 1.009])
def test_a_model_in_which_weft_wins_nowhere_is_vllms(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """The model is as if weft were not installed, except for the report, which contains the figures."""
    times_of(monkeypatch, lambda tokens, form: gain)

    def main(world: weft.World) -> tuple[set[str], bool, str]:
        worker, report = started(world)
        model = worker.model_runner.model
        kinds = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        return kinds, any("weft" in name for name in vars(model)) or type(model) is not Model, report.text()

    for kinds, changed, text in standin.run(main):
        assert not any(kind.startswith("weft.") for kind in kinds) and not changed
        assert "leaves to vLLM all: no pass is 1% faster with weft" in text
        assert ("5 to 8 tokens: vLLM (not timed: by the times with more tokens no other way can win)" in text) == (
            gain == 0.7
        )
        assert f"9 to 12 tokens: vLLM (12 tokens 1000 us, {gain:.3f}x by Sequential()" in text, text


def test_a_losing_pass_sees_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs vLLM's own forward, and the twin is not called."""
    times_of(monkeypatch, lambda tokens, form: 2.0 if tokens > 8 else 0.5)

    def main(world: weft.World) -> list[str]:
        worker, report = started(world)
        assert report.passes is not None
        called: list[str] = []
        run, context = type(report.passes.twin).__call__, standin.get_forward_context()

        def recorded(*args: Any, **kwargs: Any) -> Any:
            called.append(f"twin of {len(context.slot_mapping['layer'])}")
            return run(*args, **kwargs)

        monkeypatch.setattr(type(report.passes.twin), "__call__", recorded)
        model = worker.model_runner.model
        for tokens in (8, 9, 12, 3):
            called.append(str(tokens))
            context.slot_mapping = {"layer": torch.arange(tokens)}
            with torch.inference_mode():
                assert len(model(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), None)) == tokens
        return called

    assert standin.run(main) == [["8", "9", "twin of 12", "12", "twin of 12", "3"]] * 2


def test_passes_that_the_start_did_not_see_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes have no tokens, more than max_num_batched_tokens tokens, or tensors of another pipeline stage."""
    times_of(monkeypatch, lambda tokens, form: 2.0)

    def main(world: weft.World) -> list[bool]:
        worker, report = started(world)
        passes, called = report.passes, list[int]()
        assert passes is not None and served_tokens(passes) == list(range(1, MOST + 1))
        monkeypatch.setattr(passes, "run", lambda size, *_: called.append(size))
        stage, stayed = object(), []
        for tokens, further in ((0, None), (MOST + 1, None), (4, stage), (4, None)):
            count = len(called)
            with torch.inference_mode():
                passes.stack(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), further)
            stayed.append(len(called) == count)
        return stayed

    assert standin.run(main) == [[True, True, True, False]] * 2


def test_the_start_runs_each_size_and_pads_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA loads the kernels that pad at their first launch, and may wait for the GPU. The memory of the comparison is
    freed. After vLLM's capture, which frees all cached memory, the passes without graphs run again."""
    times_of(monkeypatch, lambda tokens, form: 2.0 if form == (OwnRows() if tokens <= 4 else PASS_FORMS[2]) else 0.5)
    ran: dict[int, list[Any]] = {0: [], 1: []}

    def note(event: Any) -> None:
        ran[standin.current_world().rank].append(event)

    monkeypatch.setattr(standin.ModelRunner, "_dummy_run", lambda self, tokens, **options: note(tokens))
    monkeypatch.setattr(standin.ModelRunner, "capture_model", lambda self: note("capture"))
    monkeypatch.setattr(start, "free_cached_memory", lambda world: note("freed"))
    standin.run(lambda world: started(world) and None)
    assert all(events[-11:] == ["freed", 12, 8, 4, 2, 1, 5, 3, "capture", 12, 8] for events in ran.values()), ran


def test_an_engine_without_memory_for_its_largest_passes_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    times_of(monkeypatch, lambda tokens, form: 2.0 if form == PASS_FORMS[2] else 0.5)
    captured: list[bool] = []

    def run(self: Any, tokens: int, **options: Any) -> None:
        if captured:
            raise torch.OutOfMemoryError("no memory after the capture")

    monkeypatch.setattr(standin.ModelRunner, "_dummy_run", run)
    monkeypatch.setattr(standin.ModelRunner, "capture_model", lambda self: captured.append(True))
    standin.run(lambda world: started(world) and None)
    assert captured


def test_ranks_stop_together_if_one_of_them_cannot_run_its_largest_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would wait forever in a later pass that the failed rank does not start."""
    times_of(monkeypatch, lambda tokens, form: 2.0 if form == PASS_FORMS[2] else 0.5)
    captured: dict[int, list[int]] = {}

    def run(self: Any, tokens: int, **options: Any) -> None:
        rank = standin.current_world().rank
        if rank in captured:
            captured[rank].append(tokens)
            if rank == 1:
                raise torch.OutOfMemoryError("no memory on this rank")

    monkeypatch.setattr(standin.ModelRunner, "_dummy_run", run)
    monkeypatch.setattr(
        standin.ModelRunner, "capture_model", lambda self: captured.setdefault(standin.current_world().rank, [])
    )

    def main(world: weft.World) -> int:
        report = started(world)[1]
        assert report.passes is not None
        return len(report.passes.last_warm_ups())

    assert all(count > 1 for count in standin.run(main))
    assert captured == {0: [MOST], 1: [MOST]}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scheduler_config.max_num_batched_tokens", 16), ("scheduler_config.max_num_seqs", 2),
        ("compilation_config.cudagraph_capture_sizes", [1]), ("compilation_config.pass_config.fuse_allreduce_rms", True),
    ],
)  # fmt: skip
def test_another_option_is_compared_again(option: str, value: Any) -> None:
    """The name of the file with the times contains everything on which an engine's passes depend."""

    def main(world: weft.World) -> int:
        config = engine(world, fuse_allreduce_rms=False).vllm_config
        *holders, name = option.split(".")
        setattr(functools.reduce(getattr, holders, config), name, value)
        standin.BaseModelLoader().load_model(vllm_config=config, model_config=None)
        return len({STORED_AT(report.model, report.depends_on) for report in plugin.models if report.config is config})

    assert standin.run(main) == [2, 2]


def test_padding_has_no_slots_in_the_cache() -> None:
    """vLLM pads too, and some kernels write a slot for each token. Afterwards the pass uses its own slots again."""
    slots, padding = torch.tensor([7, 9]), torch.tensor([False, False])
    own_slots = {"layer 0": slots, "layer 1": slots}
    context = SimpleNamespace(slot_mapping=own_slots, is_padding=padding)
    with pytest.raises(ZeroDivisionError), twin.padded_slots(context, 2):
        assert [t.tolist() for t in context.slot_mapping.values()] == [[7, 9, -1, -1]] * 2
        assert context.slot_mapping["layer 0"] is context.slot_mapping["layer 1"]
        assert context.is_padding.tolist() == [False, False, True, True]
        raise ZeroDivisionError
    assert context.slot_mapping is own_slots and context.is_padding is padding


def test_the_counts_after_the_start_contain_preparations_and_collections() -> None:
    def main(world: weft.World) -> tuple[int, int, bool]:
        before = counts(world)
        world.prepared["a call"] = object()
        gc.collect()
        later = counts(world)
        further = {name: later[name] - count for name, count in before.items()}
        return further["preparations"], further["allocations"], further["collections"] > 0

    assert standin.run(main) == [(1, 0, True)] * 2


def test_a_dropped_call_counts_when_it_is_prepared_again() -> None:
    """The World drops all prepared calls when memory that they share grows. The decisions keep the dropped calls, so
    that the table of prepared calls does not grow again."""

    def main(world: weft.World) -> tuple[int, int]:
        x, weight = torch.ones(4, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)

        def call() -> None:
            weft.all_reduce_rms_norm(x, None, weight, world=world, plan="two_shot")

        call()
        world.forget_prepared()
        before = counts(world)
        call()
        later = counts(world)
        call()
        return later["preparations"] - before["preparations"], counts(world)["preparations"] - later["preparations"]

    assert standin.run(main) == [(1, 0)] * 2


def test_the_last_passes_of_the_start_are_those_without_graphs_and_the_largest_of_vllm() -> None:
    def main(world: weft.World) -> list[int]:
        passes = Passes(torch.nn.Identity(), None, world, lambda: None, standin.graph_capture, 1024, captured=(1, 2, 4))
        passes.serve([(1, 4, OwnRows()), (385, 700, OwnRows())])
        return passes.last_warm_ups()

    sizes = [1024, *range(704, 511, -32), *range(496, 399, -16)]
    assert standin.run(main) == [sizes] * 2


@pytest.mark.parametrize("captured", [(), (1, 2, 4, 8, 16), tuple(range(8, 513, 8)), tuple(range(8, 393, 8))])
def test_sizes_beyond_those_that_vllm_captures_are_a_sixteenth_or_8_tokens_apart(captured: tuple[int, ...]) -> None:
    """Every power of two is a size, because ranges of tokens end there."""

    def main(world: weft.World) -> list[int]:
        passes = Passes(torch.nn.Identity(), None, world, lambda: None, standin.graph_capture, 5000, captured=captured)
        return passes.known_sizes()

    sizes, _ = standin.run(main)
    assert sizes[-1] == 5000 and {1 << power for power in range(13)} - {*range(max(captured, default=0))} <= {*sizes}
    further = [size for size in sizes if size >= max(captured, default=8)]
    assert all(size - before <= max(before / 16, 8) for before, size in itertools.pairwise(further))
    assert len(further) < 130


def requests(world: weft.World, count: int) -> tuple[str, int]:
    """Start an engine in a separate process, and run this many passes of random sizes."""
    with pytest.MonkeyPatch.context() as monkeypatch, standin.served_by_plugin(monkeypatch):
        faked(monkeypatch)
        times_of(monkeypatch, lambda tokens, form: 2.0)
        standin.enter(world)
        worker, report = started(world)
        world.backend.compares = False  # for every call on the host, where most of the time is spent
        before, draw = len(world.prepared), random.Random(0)
        for _ in range(count):
            worker.model_runner._dummy_run(draw.randint(1, MOST))
        return report.text(), len(world.prepared) - before


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.gate)])
def test_nothing_is_made_during_requests(count: int) -> None:
    """Passes of random sizes on CPU ranks cause no compile, trial, decision or upload."""
    for text, prepared in weft.spmd(functools.partial(requests, count=count), 2, backend="gloo"):
        assert "since the start: 0 compiles, 0 trials, 0 decisions, 0 uploads, 0 preparations" in text, text
        assert "2 to 4 tokens: Sequential()" in text and prepared == 0


@pytest.mark.parametrize("stage", ["profile", "compare"])
def test_an_error_on_one_rank_leaves_all_to_vllm(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    times_of(monkeypatch, lambda tokens, form: 2.0)
    if stage == "compare":
        monkeypatch.setattr(start.compare, "compare", lambda *_: fail())
    else:
        monkeypatch.setattr(Passes, "put", lambda self, kind=None: fail())

    def fail() -> compare.Comparison:
        if standin.current_world().rank == 1:
            raise RuntimeError("of this rank alone")
        return compare.Comparison(None, None, ranges=[Range(1, MOST, OwnRows(), ())])  # type: ignore[arg-type]

    def main(world: weft.World) -> tuple[bool, str]:
        worker, report = started(world)
        return type(worker.model_runner.model) is Model, report.text()

    for unchanged, text in standin.run(main):
        assert unchanged and "leaves to vLLM all: rank 1: RuntimeError: of this rank alone" in text, text


def test_an_engine_whose_passes_cannot_be_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "pass_of", lambda *_: 1 / 0)

    def main(world: weft.World) -> str:
        return started(world)[1].text()

    assert all("leaves to vLLM all: rank 0: ZeroDivisionError" in text for text in standin.run(main))


def test_a_later_start_times_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "stored_at", lambda model, depends_on: tmp_path / "ranges.json")
    timed = times_of(monkeypatch, lambda tokens, form: 1.5 if tokens > 8 and form == OwnRows() else 0.5)

    def main(world: weft.World) -> tuple[list[str], list[int], list[str]]:
        worker, report = started(world)
        return (
            [compared.line() for compared in report.ranges or ()],
            served_tokens(report.passes),
            worker.model_runner.log,
        )

    earlier = standin.run(main)
    count = len(timed)
    second = standin.run(main)
    assert len(timed) == count > 0 and [result[:2] for result in second] == [result[:2] for result in earlier]
    assert second[0][2] == ["profile", "profile", "capture"]  # its one form


@pytest.mark.parametrize("forms", [PASS_FORMS, PASS_FORMS[::-1]])
def test_memory_is_measured_with_the_forms_in_the_order_of_the_ranges(forms: Any) -> None:
    """The ranks run the same form at the same time only if the order is the same in every process."""
    ran: list[Plan] = []
    passes = SimpleNamespace(put=lambda: None, remove=lambda: None, max_tokens=8)
    passes.serve = lambda ranges: ran.extend(form for _, _, form in ranges)
    ranges = [Range(low, low, form, ()) for low, form in enumerate((*forms, None, *forms))]
    model: Any = SimpleNamespace(passes=passes, ranges=ranges, error=None)
    start.profile(model, SimpleNamespace(profile_run=lambda: None))
    assert ran == list(forms) and model.error is None


def test_other_sources_are_compared_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A commit changes kernels without a new version, and a file may keep its size and date. Files that Python compiles
    beside the sources are ignored, even before Python has renamed them."""
    monkeypatch.setattr(compare, "stored_at", STORED_AT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plugin, "SOURCES", tmp_path / "weft")
    timed = times_of(monkeypatch, lambda tokens, form: 1.5)
    kernel = tmp_path / "weft" / "ops" / "kernels.py"
    (kernel.parent / "__pycache__").mkdir(parents=True)
    timed_counts = []
    for source in ("x = 1", "x = 1", "x = 2"):
        kernel.write_text(source)
        os.utime(kernel, (0, 0))
        (kernel.parent / f"__pycache__/kernels.cpython-312.pyc.{len(timed_counts)}").write_text("")
        plugin.hash_of_sources.cache_clear()
        standin.run(started)
        timed_counts.append(len(timed))
    plugin.hash_of_sources.cache_clear()
    assert 0 < timed_counts[0] == timed_counts[1] < timed_counts[2]


def test_the_hash_of_the_sources_is_cheap() -> None:
    """The best of five runs lasts less than 50 ms, since other processes use this machine."""
    plugin.hash_of_sources.cache_clear()
    seconds = min(timeit.repeat(plugin.hash_of_sources.__wrapped__, number=1, repeat=5))
    assert seconds < 0.05, seconds


def test_a_stored_loss_makes_no_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compare, "stored_at", lambda model, depends_on: tmp_path / "ranges.json")
    times = {VLLM: CallTime(1.0, 0.5), "x": CallTime(2.0, 1.8)}
    compare.write(tmp_path / "ranges.json", [Range(1, MOST, None, ((1, times),))], {})
    monkeypatch.setattr(plugin, "world_of", lambda group: pytest.fail("a World"))

    def main(world: weft.World) -> str:
        return started(world)[1].text()

    for text in standin.run(main):
        assert (
            "no pass was 1% faster with weft at an earlier start" in text and "1 us, 0.500x by x (host-bound))" in text
        )


def test_another_worker_leaves_the_model_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self, further: 1)

    def main(world: weft.World) -> str:
        engine(world)
        return plugin.models[-1].text()

    assert all("leaves to vLLM all: TypeError: takes self, further, not self" in text for text in standin.run(main))


def test_the_twins_code_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keys compiled code by the name of the forward and by its code object. The twin shares the parameters."""
    times_of(monkeypatch, lambda tokens, form: 2.0)

    def main(world: weft.World) -> tuple[bool, bool, bool]:
        worker, report = started(world)
        assert report.passes is not None
        model, copy = worker.model_runner.model, report.passes.twin
        forward = type(copy).forward
        shared = [a is b for a, b in zip(model.parameters(), copy.parameters(), strict=True)]
        name = f"Model.forward with {plugin.name_of(plugin.find_candidates(report.passes.stack, report.config, classes()), world)}"
        return forward.__code__ is not Model.forward.__code__, forward.__qualname__ == name, all(shared)

    def classes() -> Any:
        objects = plugin.read_interface().objects
        return plugin.Classes(
            **{n: objects[n] for n in ("row", "column", "norm", "unquantized", "gemma_norm", "runner")}
        )

    assert standin.run(main) == [(True, True, True)] * 2


def test_compared_passes_have_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens of vLLM's dummy runs are the same, and use few experts. Later passes use their own tokens."""
    times_of(monkeypatch, lambda tokens, form: 2.0)
    different: list[int] = []
    monkeypatch.setattr(Model, "__call__", lambda self, ids, *_: different.append(ids.unique().numel()) or ids)

    def main(world: weft.World) -> None:
        engine(world)
        passes = plugin.models[-1].passes
        assert passes is not None

        def run(tokens: int) -> None:
            passes.stack(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), None)

        compare.compare(passes, PASS_FORMS[:1], run, 32)
        run(MOST)

    standin.run(main)
    assert max(different[:-2]) > 4 and different[-1] == 1
