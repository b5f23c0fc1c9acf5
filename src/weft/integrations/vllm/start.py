"""The start of an engine. The engine's worker runs each model's twin when it measures memory, and compares model and
twin before it captures graphs. After an error on any rank, vLLM runs the model on all ranks."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable

import torch

from ...errors import WeftError
from ...world import World
from . import compare, flashinfer
from .dataflow import first_sentence
from .interface import VllmObject, gather_objects, resolve
from .row_norm_column import WovenLayers
from .served import ServedModel, counts, models
from .twin import Passes

log = logging.getLogger("vllm.weft")
WORKER = "vllm.v1.worker.gpu_worker:Worker"


def hook_worker() -> None:
    """Make an engine's worker run each model's twin when it measures memory, and compare model and twin before it
    captures graphs. Raises ImportError, AttributeError or TypeError if the worker's class is unknown."""
    worker = resolve(f"{WORKER}.compile_or_warm_up_model(self)")
    resolve(f"{WORKER}.determine_available_memory(self)")
    if hasattr(worker.compile_or_warm_up_model, "weft"):
        return
    warm_up, measure = worker.compile_or_warm_up_model, worker.determine_available_memory

    @functools.wraps(warm_up)
    def compile_or_warm_up_model(self: VllmObject) -> VllmObject:
        result = around(self, "capture_model", warm_up, before=start)
        for model in unfinished(self):
            start(model, self.model_runner)  # the worker captures nothing
        for model in models_of(self):
            allocate(model, self.model_runner)
            model.counts = None if model.world is None else counts(model.world)
        return result

    @functools.wraps(measure)
    def determine_available_memory(self: VllmObject) -> VllmObject:
        return around(self, "profile_run", measure, after=profile)

    compile_or_warm_up_model.weft = True  # type: ignore[attr-defined]
    worker.compile_or_warm_up_model = compile_or_warm_up_model
    worker.determine_available_memory = determine_available_memory


StartStep = Callable[[ServedModel, VllmObject], None]


def around(
    worker: VllmObject,
    name: str,
    call: Callable[[VllmObject], VllmObject],
    before: StartStep | None = None,
    after: StartStep | None = None,
) -> VllmObject:
    """Return the result of call(worker). If it calls the model runner's method of that name, the steps `before` and
    `after` run before and after the method for each model with undecided passes."""
    runner, models = worker.model_runner, unfinished(worker)
    if not models:
        return call(worker)
    method = getattr(runner, name)

    def with_steps(*args: VllmObject, **kwargs: VllmObject) -> VllmObject:
        setattr(runner, name, method)  # a step may call the method itself
        for model in models if before else ():
            before(model, runner)  # type: ignore[misc]
        result = method(*args, **kwargs)
        for model in models if after else ():
            after(model, runner)  # type: ignore[misc]
        return result

    setattr(runner, name, with_steps)
    try:
        return call(worker)
    finally:
        setattr(runner, name, method)


def models_of(worker: VllmObject) -> list[ServedModel]:
    """Return the models that this worker has loaded."""
    return [model for model in models if model.config is worker.vllm_config]


def unfinished(worker: VllmObject) -> list[ServedModel]:
    """Return the worker's models for which weft has not yet decided which passes to run."""
    return [model for model in models_of(worker) if model.passes is not None and not model.started]


# -- a model -----------------------------------------------------------------------------------------------------------
def profile(model: ServedModel, runner: VllmObject) -> None:
    """Run the twin with the largest number of tokens in each form, so that the twin's compiled code and memory exist
    before the engine measures free memory. Never raises."""
    passes = model.passes
    assert passes is not None
    try:
        forms = model.forms if model.ranges is None else [compared.form for compared in model.ranges if compared.form]
        passes.put()
        for form in dict.fromkeys(forms):  # a set's order may differ between ranks
            passes.serve([(1, passes.max_tokens, form)])
            runner.profile_run()
    except Exception as error:
        model.error = f"{type(error).__name__}: {error}"
        log.debug("weft's pass failed", exc_info=True)
    finally:
        passes.serve(())
        passes.remove()


def start(model: ServedModel, runner: VllmObject) -> None:
    """Decide which passes weft runs, then run the twin in each of its sizes, and in each form with padding. Never
    raises. The call is collective."""
    try:
        raise_errors(model)
        run_on_all_ranks(model, lambda: decide(model, runner))
    except Exception as error:
        model.give_up(f"{error}")
    model.started = True
    if model.group.rank_in_group == 0:
        log.info("%s", model.text())


def run_on_all_ranks(model: ServedModel, step: Callable[[], object]) -> None:
    """Run a step of the start. Raises WeftError on all ranks if it fails on any rank. The call is collective."""
    try:
        step()
    except Exception as error:
        model.error = f"{type(error).__name__}: {error}"
        log.debug("a step of weft's start failed", exc_info=True)
    raise_errors(model)


def raise_errors(model: ServedModel) -> None:
    """Raise WeftError on all ranks if any rank has an error. The call is collective."""
    errors = gather_objects(model.error, model.group)
    if any(errors):
        raise WeftError("; ".join(f"rank {rank}: {error}" for rank, error in enumerate(errors) if error))


def decide(model: ServedModel, runner: VllmObject) -> None:
    """Read the stored ranges, or compare model and twin. The twin then runs the ranges in which it is faster; a twin
    that is faster in no range is dropped."""
    passes = model.passes
    assert passes is not None
    run = compare.pass_of(runner, model.config)
    attach(model, runner)
    passes.put()
    with torch.inference_mode():
        if model.ranges is None:
            model.ranges = compared_ranges(model, passes, run)
            if model.group.rank_in_group == 0:
                store(model)
        free_cached_memory(passes.world)  # of the comparison
        if passes.graphs is not None:
            passes.graphs.why_not = None  # the freed memory may suffice
        won = [(compared.low, compared.high, compared.form) for compared in model.ranges if compared.form is not None]
        if not won:
            model.give_up("no pass is 1% faster with weft")
            return
        lost = [f"{compared.low} to {compared.high}" for compared in model.ranges if compared.form is None]
        if lost and passes.world.batch_invariant:
            model.give_up(f"batch invariance needs one way for all, and {', '.join(lost)} tokens are not 1% faster")
            return
        if not any(isinstance(form, flashinfer.FlashInfer) for _, _, form in won):
            flashinfer.drop(passes.world)
        passes.serve(won)
        if passes.woven is not None and not any(isinstance(form, WovenLayers) for _, _, form in won):
            passes.woven.release()
        for step in (passes.warm_up, passes.capture):
            for tokens in passes.warm_ups():
                step(tokens, functools.partial(run, tokens))
        in_graphs = (range(compared.low, compared.high + 1) for compared in model.ranges if compared.in_graphs)
        passes.leave_uncaptured(itertools.chain.from_iterable(in_graphs))
        model.ranges = compare.as_served(model.ranges, passes.sizes)
        passes.world.wait_for_streams()


def compared_ranges(model: ServedModel, passes: Passes, run: compare.RunPass) -> list[compare.Range]:
    """Compare model and twin, and return the ranges. Adds the cost of the comparison to the report."""
    began, before = time.monotonic(), counts(passes.world)
    comparison = compare.compare(passes, model.forms, run, model.config.model_config.get_vocab_size())
    seconds, added = time.monotonic() - began, counts(passes.world) - before
    model.cost = (
        f"compared in {seconds:.0f} s, of which timed passes took {comparison.timed_seconds:.0f} s,"
        f" with {added['compiles']} compiles and {added['trials']} trials of operators"
    )
    return comparison.ranges


def allocate(model: ServedModel, runner: VllmObject) -> None:
    """Run again the passes without graphs and the largest passes. While the start ran passes, memory that calls share
    may have grown, so that weft dropped the prepared calls of earlier passes; and vLLM frees torch's cached memory
    before it captures graphs. Requests would wait while weft prepares calls and CUDA allocates memory. Never raises:
    graphs that use the twin exist already, so it cannot be dropped here, and an engine without memory for these passes
    may still serve smaller ones. After each pass the ranks exchange their errors, since a rank would wait forever in a
    pass that another rank does not start. The call is collective."""
    if model.passes is None:
        return

    def run(tokens: int) -> None:
        compare.pass_of(runner, model.config)(tokens)

    try:
        for tokens in model.passes.last_warm_ups():
            run_on_all_ranks(model, functools.partial(run, tokens))
    except Exception as error:
        log.warning("weft: the memory of the largest passes is not allocated: %s", error)


def free_cached_memory(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def attach(model: ServedModel, runner: VllmObject) -> None:
    """Attach woven passes to the engine's batches, unless there are stored ranges and none is woven. If the batches
    cannot be split, use no woven passes."""
    passes, ranges = model.passes, model.ranges
    assert passes is not None
    stored = ranges is None or any(isinstance(compared.form, WovenLayers) for compared in ranges)
    if passes.woven is None or not stored:
        return
    why = ""
    try:
        passes.woven.attach(runner)
    except Exception as error:  # vLLM's constructors may raise any exception
        why = first_sentence(error)
    passes.weave_on_all_ranks(why, model.group)
    if passes.woven is None:
        model.forms = [form for form in model.forms if not isinstance(form, WovenLayers)]


def store(model: ServedModel) -> None:
    try:
        compare.write(compare.stored_at(model.model, model.depends_on), model.ranges or (), model.depends_on)
    except OSError as error:
        log.warning("weft: the comparison is not stored: %s", error)
