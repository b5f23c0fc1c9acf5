"""Graphs of the twin's pieces for more tokens than vLLM captures (pieces.py), with a stand-in for vLLM's wrapper of
pieces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.integrations import vllm_standin as standin
from tests.integrations.test_vllm_start import CAPTURED, MOST, engine, faked, times_of
from weft.integrations.vllm import compare, plugin, start
from weft.integrations.vllm.interface import read_interface
from weft.integrations.vllm.pieces import PieceGraphs
from weft.integrations.vllm.row_norm_column import PASS_FORMS
from weft.integrations.vllm.served import ServedModel
from weft.integrations.vllm.twin import Passes
from weft.op import CalledOnce


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with standin.served_by_plugin(monkeypatch):
        faked(monkeypatch)
        monkeypatch.setattr(compare, "forms_of", lambda by_rows, passes: PASS_FORMS[:2])
        times_of(monkeypatch, lambda tokens, form: 2.0 if form == PASS_FORMS[0] else 0.5)
        yield


def started(
    world: weft.World, capture: Callable[..., Any] = standin.graph_capture
) -> tuple[Any, ServedModel, standin.CUDAGraphWrapper]:
    """Return the worker of an engine that compiles, its report, and the wrapper of the twin's only piece."""
    worker = engine(world)
    (report,) = (model for model in plugin.models if model.config is worker.vllm_config)
    passes = report.passes
    assert passes is not None
    passes.graphs = PieceGraphs(read_interface().objects | dict(capture=capture), report.group, world.device, MOST)
    wrapper = passes.twin = standin.CUDAGraphWrapper(passes.twin)
    worker.determine_available_memory()
    worker.compile_or_warm_up_model()
    return worker, report, wrapper


def error_of_passes(report: ServedModel, tokens: int) -> float:
    """Return the largest difference between passes of the twin and vLLM's own pass of random tokens."""
    passes = report.passes
    assert passes is not None
    model, positions = passes.stack, torch.arange(tokens)
    errors = []
    for seed in range(2):
        ids = torch.randint(32, (tokens,), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            expected = passes.own_class.forward(model, ids, positions, None)
            errors.append((model(ids, positions, None) - expected).abs().max().item())
    return max(errors)


def test_all_sizes_beyond_vllms_are_captured_before_requests() -> None:
    """Requests capture nothing, and the graphs read each pass's tokens."""

    def main(world: weft.World) -> tuple[Any, ...]:
        _, report, wrapper = started(world)
        assert report.passes is not None and report.passes.graphs is not None
        keys = sorted(size for size, _ in report.passes.graphs.captured)
        entries, captures = len(wrapper.concrete_cudagraph_entries), wrapper.captures
        errors = [error_of_passes(report, tokens) for tokens in range(1, MOST + 1)]
        wrapper.clear_graphs()  # vLLM may do so
        errors.append(error_of_passes(report, MOST))
        return keys, entries, wrapper.captures - captures, max(errors), report.text()

    for keys, entries, later, error, text in standin.run(main):
        assert keys == [8, MOST] and max(CAPTURED) == 4  # sizes increase by 8 from 8 on
        assert entries == len(keys) and later == 0  # the comparison's graphs are dropped
        assert error < 0.05
        assert f"captures passes of {len(keys)} sizes beyond vLLM's\n" in text + "\n", text


def test_a_failed_capture_on_one_rank_leaves_all_ranks_without_graphs() -> None:
    @contextmanager
    def failing(rank: int, device: Any) -> Iterator[None]:
        yield  # emulated ranks wait for each other in a capture
        if rank == 1:
            raise torch.OutOfMemoryError("no memory for graphs")

    def main(world: weft.World) -> tuple[Any, ...]:
        _, report, wrapper = started(world, functools.partial(failing, world.rank))
        assert report.passes is not None and report.passes.graphs is not None
        error = error_of_passes(report, MOST - 1)
        return report.passes.graphs.captured, len(wrapper.concrete_cudagraph_entries), error, report.text()

    for captured, entries, error, text in standin.run(main):
        assert not captured and not entries and error < 0.05
        assert "captures passes of 0 sizes beyond vLLM's, and no more: OutOfMemoryError: no memory for graphs" in text


def test_a_form_that_cannot_be_captured_runs_without_graphs() -> None:
    """Another form keeps its graphs. Passes that were timed without graphs stay weft's."""
    objects = read_interface().objects
    group: Any = SimpleNamespace(world=SimpleNamespace(exchange=lambda value: [value]))
    graphs = PieceGraphs(objects, group, torch.device("cpu"), MOST)
    context = standin.BatchDescriptor(0)
    wrapper = standin.CUDAGraphWrapper(lambda: None)

    def one_pass(form: Any) -> None:
        if form == PASS_FORMS[2]:
            raise RuntimeError("cannot be captured. Further words")
        (descriptor,) = (value for key, value in graphs.captured.items() if key[1] == form)
        wrapper.concrete_cudagraph_entries[descriptor] = context

    for form in (PASS_FORMS[2], PASS_FORMS[0]):
        graphs.capture((MOST, form), functools.partial(one_pass, form))
    assert list(graphs.captured) == [(MOST, PASS_FORMS[0])] and graphs.why_not is None
    assert graphs.text().endswith(f"; none by {PASS_FORMS[2]}: RuntimeError: cannot be captured"), graphs.text()
    keys = {tokens: (MOST, PASS_FORMS[2] if tokens < 3 else PASS_FORMS[0]) for tokens in range(1, 5)}
    passes: Any = SimpleNamespace(graphs=graphs, sizes=[0, *[MOST] * 4], key_of_graphs=keys.get)
    passes.world = SimpleNamespace(batch_invariant=False)
    Passes.leave_uncaptured(passes, (3, 4))
    assert passes.sizes == [0, *[MOST] * 4]
    graphs.keep(set())
    Passes.leave_uncaptured(passes, (3, 4))
    assert passes.sizes == [0, MOST, MOST, 0, 0]


def test_a_size_that_cannot_be_captured_leaves_other_sizes_captured() -> None:
    """The form has graphs of a larger size. Passes of the size without graphs are vLLM's, since graphs were timed."""
    group: Any = SimpleNamespace(world=SimpleNamespace(exchange=lambda value: [value]))
    graphs = PieceGraphs(read_interface().objects, group, torch.device("cpu"), MOST)
    wrapper, form = standin.CUDAGraphWrapper(lambda: None), PASS_FORMS[0]

    def one_pass(size: int) -> None:
        if size == 8:
            raise RuntimeError("cannot be captured")
        wrapper.concrete_cudagraph_entries[graphs.captured[size, form]] = ()

    for size in (MOST, 8, 6):
        graphs.capture((size, form), functools.partial(one_pass, size))
    assert set(graphs.captured) == {(MOST, form), (6, form)}
    assert graphs.text().endswith(f"; not all by {form}: RuntimeError: cannot be captured"), graphs.text()
    passes: Any = SimpleNamespace(graphs=graphs, sizes=[0, 6, 8, MOST], world=SimpleNamespace(batch_invariant=False))
    passes.key_of_graphs = lambda tokens: (passes.sizes[tokens], form) if tokens else None
    Passes.leave_uncaptured(passes, range(4))
    assert passes.sizes == [0, 6, 0, MOST]


@pytest.mark.parametrize("lacking", [(True, True), (False, False), (False, True)])
def test_a_later_start_serves_what_was_timed(
    lacking: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first start stores whether it timed graphs. A later start without memory for graphs leaves to vLLM only the
    passes that were timed in graphs."""
    monkeypatch.setattr(compare, "stored_at", lambda model, depends_on: tmp_path / "ranges.json")

    def main(world: weft.World) -> tuple[list[int], bool]:
        _, report, _ = started(world)
        assert report.passes is not None
        sizes, compared = list(report.passes.sizes), bool(report.cost)
        report.give_up("the test ends")
        return sizes, compared

    results = []
    for lacks in lacking:
        monkeypatch.setattr(PieceGraphs, "lack_of_memory", lambda graphs, lacks=lacks: "0 MiB" if lacks else "")
        results.append(standin.run(main)[0])
    (first_sizes, compared), (later_sizes, compared_again) = results
    assert compared and not compared_again
    assert first_sizes == [0, 1, 2, 4, 4, *[8] * 4, *[MOST] * 4]
    assert later_sizes == (first_sizes if lacking[0] == lacking[1] else [0, 1, 2, 4, 4, *[0] * 8])


def test_no_rank_captures_if_one_rank_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's context of captures is collective, so a rank that entered it alone would wait forever."""
    lacking = lambda graphs: "0 MiB would be free" if graphs.group.rank_in_group == 1 else ""  # noqa: E731
    monkeypatch.setattr(PieceGraphs, "lack_of_memory", lacking)

    def main(world: weft.World) -> tuple[Any, ...]:
        _, report, wrapper = started(world, capture=lambda device: pytest.fail("entered"))
        return wrapper.captures, report.error, report.text()

    for captures, error, text in standin.run(main):
        assert not captures and error is None and "and no more: 0 MiB would be free" in text, text


def test_sizes_whose_capture_fails_at_last_stay_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their graphs were timed. Without graphs the host may need longer than vLLM's whole pass."""
    lack = lambda graphs: "0 MiB would be free" if graphs.captured and graphs.group.world.cached("last", list) else ""  # noqa: E731
    monkeypatch.setattr(PieceGraphs, "lack_of_memory", lack)

    def main(world: weft.World) -> tuple[Any, ...]:
        monkeypatch.setattr(start, "free_cached_memory", lambda world: world.cached("last", list).append(1))
        _, report, wrapper = started(world)
        assert report.passes is not None
        sizes, error = list(report.passes.sizes), error_of_passes(report, 5)
        assert wrapper.concrete_cudagraph_entries
        assert "5 to 8 tokens: vLLM (8 tokens 1000 us, 2.000x by" in report.text()
        assert "9 to 12 tokens: Sequential() (" in report.text()
        report.give_up("the test ends")
        return sizes, error, len(wrapper.concrete_cudagraph_entries)

    for sizes, error, graphs in standin.run(main):
        assert sizes == [0, 1, 2, 4, 4, *[0] * 4, *[MOST] * 4], sizes
        assert not error and not graphs


def test_captures_are_tried_again_without_the_memory_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs only save the host's time, so they are captured for passes that were timed without graphs."""
    lack = lambda graphs: "" if graphs.group.world.cached("freed", list) else "0 MiB would be free"  # noqa: E731
    monkeypatch.setattr(PieceGraphs, "lack_of_memory", lack)

    def main(world: weft.World) -> tuple[Any, ...]:
        monkeypatch.setattr(start, "free_cached_memory", lambda world: world.cached("freed", list).append(1))
        _, report, _ = started(world)
        assert report.passes is not None and report.passes.graphs is not None and report.ranges is not None
        in_graphs = any(compared.in_graphs for compared in report.ranges)
        return sorted(size for size, _ in report.passes.graphs.captured), in_graphs, report.text()

    for sizes, in_graphs, text in standin.run(main):
        assert sizes == [8, MOST] and not in_graphs
        assert "captures passes of 2 sizes beyond vLLM's\n" in text, text


@pytest.mark.parametrize(("on_side_stream", "grows"), [(False, False), (True, False), (True, True)])
def test_one_pass_on_a_side_stream_prepares_a_capture(on_side_stream: bool, grows: bool) -> None:
    """A pass calls some operators once, such as the last norm. On the default stream, weft prepares their plans for
    graphs at the second call. If weft drops prepared calls during a pass on any rank, all ranks repeat the pass."""
    form = PASS_FORMS[2]

    def main(world: weft.World) -> list[int]:
        engine(world)
        (report,) = (model for model in plugin.models if model.world is world)
        passes, unprepared = report.passes, list[int]()
        assert passes is not None
        world.max_captured_rows, world.backend.reference = MOST, False  # type: ignore[attr-defined]
        passes.graphs = PieceGraphs(read_interface().objects, report.group, world.device, MOST)
        world.backend.on_side_stream = lambda: on_side_stream  # type: ignore[method-assign]
        passes.put()
        passes.serve([(1, MOST, form)])

        def one_pass(size: int) -> None:
            passes.stack(torch.zeros(size, dtype=torch.long), torch.arange(size), None)
            unprepared.append(sum(isinstance(decision, CalledOnce) for decision in world.decided.values()))
            if grows and size < MOST and world.rank == 1:
                world.forget_prepared()

        with torch.inference_mode():
            for size in (MOST, 8):  # the memory for the larger pass suffices for the smaller one
                unprepared.clear()
                passes.warm_up(size, functools.partial(one_pass, size))
        return unprepared

    for unprepared in standin.run(main):
        assert (unprepared[0] > 0) == (not on_side_stream), unprepared
        assert unprepared[1:] == ([0] if grows or not on_side_stream else []), unprepared


def test_everything_exists_before_the_first_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs contain addresses of prepared calls, which weft drops when a call needs more shared memory."""

    def noted(name: str) -> Callable[..., None]:
        method = getattr(Passes, name)

        def call(self: Passes, tokens: int, one_pass: Any) -> None:
            method(self, tokens, one_pass)
            if self.key_of_graphs(tokens) is not None:
                self.world.cached("steps", list).append((name, tokens))

        return call

    for name in ("warm_up", "capture"):
        monkeypatch.setattr(Passes, name, noted(name))

    def main(world: weft.World) -> list[tuple[str, int]]:
        started(world)
        steps: list[tuple[str, int]] = world.cached("steps", list)
        return steps

    for steps in standin.run(main):
        groups = [(name, len(list(group))) for name, group in itertools.groupby(steps, lambda step: step[0])]
        (*_, (warm_up, warmed), (capture, captured)) = groups
        assert (warm_up, capture) == ("warm_up", "capture") and warmed == captured >= 2, groups
        assert groups[0] == ("warm_up", 2), "both forms of a trial run before its first capture"


def test_vllm_may_capture_only_while_weft_captures() -> None:
    graphs = PieceGraphs(read_interface().objects, SimpleNamespace(), torch.device("cpu"), MOST)
    standin.set_cudagraph_capturing_enabled(False)
    with graphs.capturing():
        assert standin.cudagraph_capturing_enabled
    assert not standin.cudagraph_capturing_enabled


def test_graphs_have_a_pool_of_their_own() -> None:
    """torch fails in a capture into a pool whose graphs are all dropped, and vLLM captures into its own pool later."""
    graphs, wrapper = graphs_of_one_piece()
    graphs.pool = "weft's"
    with graphs.capturing():
        assert wrapper.graph_pool == "weft's"
    assert wrapper.graph_pool == "vLLM's"
    graphs.captured[8, PASS_FORMS[0]] = None
    graphs.keep(set())
    assert graphs.pool is None


def test_graphs_read_which_tokens_are_padding() -> None:
    graphs, _ = graphs_of_one_piece()
    graphs.captured[key := (8, PASS_FORMS[0])] = graphs.descriptor(num_tokens=8)
    read = []
    for tokens in (8, 3):
        padding = torch.zeros(tokens, dtype=torch.bool)
        context: Any = SimpleNamespace(is_padding=padding, cudagraph_runtime_mode="NONE", batch_descriptor=None)
        with graphs.replayed(context, key):
            read.append((context.is_padding.data_ptr(), context.is_padding.sum().item()))
        assert context.is_padding is padding
    assert read == [(read[0][0], 0), (read[0][0], 5)]


def graphs_of_one_piece() -> tuple[PieceGraphs, standin.CUDAGraphWrapper]:
    graphs = PieceGraphs(read_interface().objects, SimpleNamespace(), torch.device("cpu"), MOST)
    return graphs, standin.CUDAGraphWrapper(lambda: None)


def test_two_forms_of_one_size_have_graphs_of_their_own() -> None:
    graphs = PieceGraphs(read_interface().objects, SimpleNamespace(), torch.device("cpu"), MOST)
    descriptors = [graphs.descriptor(num_tokens=8), graphs.descriptor(num_tokens=8), standin.BatchDescriptor(8)]
    assert {descriptor.num_tokens for descriptor in descriptors} == {8} and len(set(descriptors)) == 3


def test_passes_that_graphs_cannot_read_run_without_them() -> None:
    """Some models have several positions for each token, or embeddings instead of ids."""
    graphs = PieceGraphs(read_interface().objects, SimpleNamespace(), torch.device("cpu"), MOST)
    graphs.captured[key := (8, PASS_FORMS[0])] = graphs.descriptor(num_tokens=8)
    graphs.is_capturing = True
    assert graphs.fit(key, dict(input_ids=torch.arange(3), positions=torch.arange(3)))
    assert not graphs.fit((4, PASS_FORMS[0]), dict(input_ids=torch.arange(3), positions=torch.arange(3)))
    assert not graphs.fit(key, dict(positions=torch.zeros(3, 3)))
    assert not graphs.fit(key, dict(positions=torch.arange(3), inputs_embeds=torch.zeros(3, 4)))
