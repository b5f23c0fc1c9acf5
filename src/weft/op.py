"""Op: the definition of an operator, and the life of one call, written once for all operators; and the registry.

    entry      under torch.compile the operator of torch.library; with a gradient an autograd.Function; else straight on
               (`torch_library`)
    key        decisions are found by the op, the plan asked for, the mode, the options and the operands' layouts
    first call    check -> choose a plan -> check that all ranks agree -> prepare -> remember; at the second call, warm
                  up a capture
    each call     `World.begin` -> allocate -> run -> finish (`prepared.Prepared`)

On the host a known call costs a look-up and its launches.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from . import torch_library
from .backends import library_gemm
from .chooser import Choice
from .cost.model import AnyCost, GemmCall
from .errors import Unsupported
from .kernel_launch import MOST_PREPARED
from .plans import RENAMED_KINDS, Plan, Sequential, TwoLevel, is_low_latency
from .prepared import Operands, OwnResult, Prepare, Prepared, Returned, Run
from .residency import UNKNOWN
from .tensor_checks import bulk
from .torch_library import Backward, CallOptions
from .world import Memo, World

Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor

REGISTRY: dict[str, Op] = {}


class CalledOnce(NamedTuple):
    """The decision for a capture of a size that was called only once, by this plan (`Op._warm_up_key`)."""

    plan: Plan


def registered(op: Op) -> Op:
    """Register the op under its name, also for torch.compile, and return it. Raises ValueError if another class already
    has the name, or if the same class had a different signature."""
    known = REGISTRY.get(op.name)
    if known is not None and type(known).__qualname__ != type(op).__qualname__:
        raise ValueError(f"an op named {op.name!r} exists: {type(known).__qualname__}")
    if known is not None and (known.signature, known.results) != (op.signature, op.results):
        raise ValueError(f"{op.name}: signature {op.signature!r} was {known.signature!r}")
    REGISTRY[op.name] = op
    # The cached properties are computed now, because torch.compile cannot trace the lock that guards their first use.
    _ = op.operands, op.outcomes, op.postprocesses, op.differentiable, op.kinds
    if known is None and op.signature:
        torch_library.register(op, REGISTRY)
    return op


def collectives() -> dict[str, str]:
    """Return, for each op with one GEMM, the NCCL collective before or after the GEMM."""
    return {name: op.collective for name, op in REGISTRY.items() if op.collective}


def collective(op: str) -> str:
    return REGISTRY[op].collective


def op_around(collective_name: str) -> str:
    """Return the op that has this collective."""
    return next(name for name, library_collective in collectives().items() if library_collective == collective_name)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, apart from its plan; hashable. Subclasses add fields."""

    @property
    def rows(self) -> int:
        """Return M, the number of rows on all ranks. If M is 0, no kernel is launched."""
        raise NotImplementedError

    def same_on_all_ranks(self) -> dict[str, Hashable]:
        """Return the values that must be the same on all ranks, under the names that a Mismatch prints: all fields,
        unless a class overrides this method."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class RowsCall(Call):
    """The arguments of a call for m rows, on this rank or on all ranks."""

    m: int

    @property
    def rows(self) -> int:
        return self.m


C = TypeVar("C", bound=Call)


def trial_title(op: str, scaling: str) -> str:
    """Return the title of an op's trials (`Op.scaling`)."""
    return f"{op} of 8-bit operands by {scaling}" if scaling else op


class Op(ABC, Generic[C]):
    """One operator. An instance has no state: the World keeps the objects that calls prepare."""

    name: ClassVar[str]
    # The public function that errors name, if its name differs from the op's.
    public: ClassVar[str] = ""
    # The op's operands, followed by its options, in torch.library's syntax. An op without a signature supports neither
    # torch.compile nor gradients.
    signature: ClassVar[str] = ""
    results: ClassVar[int] = 1
    # The number of tensors that a run also returns for the backward pass (`saved_shapes`, `saved_tensors`) if its last
    # option, `bool gradient`, is true: `__call__` adds this option, and sets it if an operand requires a gradient.
    num_saved: ClassVar[int] = 0
    # The number of results after the first one that are memory of the World; compiled calls copy them.
    num_borrowed_outputs: ClassVar[int] = 0
    # The NamedTuple of its operands.
    operand_type: ClassVar[Callable[..., Operands] | None] = None
    # For each plan class that the op supports, the function that prepares its calls (prepared.py).
    runs: ClassVar[Mapping[type[Plan], Prepare]]
    # For each plan class, the fields that the op refuses because it could not apply them.
    unsupported_fields: ClassVar[Mapping[type[Plan], Sequence[str]]] = {}
    # One number for all ops, increased whenever a change alters the decisions of "auto".
    table_version: ClassVar[int] = 0
    # NCCL's collective before or after the op's one GEMM, and whether the collective precedes the GEMM and transfers
    # its input.
    collective: ClassVar[str] = ""
    gathers: ClassVar[bool] = False
    # The cost models of the plan classes with a predictable time, in the order in which the planner tries them.
    costs: ClassVar[Mapping[type[Plan], AnyCost]] = {}
    # For a collective without a GEMM: the bytes that the kernels after NCCL's read and write, divided by the
    # collective's bytes.
    elementwise_passes: ClassVar[float | None] = None
    # Plans of one kind, each of which is the fastest for some shapes. `weft tune` measures them, and "auto" times them
    # on a Hopper GPU without a profile.
    variants: ClassVar[Sequence[Plan]] = ()
    # Plans without a cost model in the planner, which "auto" times at the first call of a size.
    autotune_plans: ClassVar[Sequence[Plan]] = ()
    # Plans that "auto" times for ranks on several nodes.
    over_nodes: ClassVar[Sequence[Plan]] = ()
    # The plan of "auto" on ranks with few programs, as in the emulator; or a plan class, whose default plan is used.
    emulator_plan: ClassVar[Plan | type[Plan]] = Sequential

    # The plans that keep the promise of `weft.init(batch_invariant=True)`. A batch-invariant World refuses an op
    # without such plans.
    batch_invariant_plans: ClassVar[tuple[type[Plan], ...]] = ()

    keeps_decisions: ClassVar[bool] = False  # whether the op, not the World, keeps them (`decisions`)
    depends_on_addresses: ClassVar[bool] = False  # decisions depend on `operand_addresses`
    partial: ClassVar[bool] = False  # whether a call leaves some elements of its result unwritten
    by_library: ClassVar[bool] = True  # on a World of one rank, a library call runs instead of the plan

    # -- methods that an operator defines
    @abstractmethod
    def check(self, world: World, operands: Operands, options: CallOptions) -> C:
        """Return the Call. Raise ValueError or TypeError, quoting the arguments, for errors that this rank can detect
        by itself."""

    @abstractmethod
    def outputs(self, world: World, call: C) -> Shapes:
        """Return the shape and dtype of the result, which the caller may pass as `out=`, and of further results."""

    def meta(self, world: World, operands: Operands, options: CallOptions) -> Shapes:
        """Return `outputs` while torch.compile traces, when sizes may be symbols."""
        return self.outputs(world, self.check(world, operands, options))

    def fake(self, world: World, operands: Operands, options: CallOptions) -> list[torch.Tensor]:
        """Return tensors that resemble the results, without values, while torch.compile traces."""
        like, results = operands[0], self.meta(world, operands, options)
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in results]

    def saved_shapes(self, world: World, call: C, plan: str | Plan) -> Shapes:
        """Return the shapes and dtypes of the tensors that a run saves for the backward pass: at most `num_saved`; a
        plan may save fewer. plan: the plan that runs or, while torch.compile traces, the caller's plan."""
        return ()

    def saved_tensors(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Return the tensors that the backward pass needs. results: the results, then the tensors that the run saved.
        needs: for each operand, whether its gradient is requested."""
        return operands

    def backward(self, world: World, context: Backward) -> Sequence[torch.Tensor | None]:
        """Return the operands' gradients, computed by other ops; None for gradients that are not requested. All ranks
        must communicate in the same way."""
        raise NotImplementedError

    def sizes(self, call: C) -> tuple[int, int, int]:
        """Return M, N, K as the measured table and the planner define them: M counts the rows of all ranks, and N and K
        are the sizes of one rank's GEMM."""
        return call.rows, 1, 1

    def gemm_call(self, m: int, n: int, k: int, received: int | None = None) -> GemmCall:
        """Return the sizes of a call with one GEMM, for the cost models of its plans."""
        return GemmCall(self.collective, self.gathers, m, n, k, received)

    def multiply_adds(self, call: C) -> int:
        """Return the number of multiply-adds of the op's kernels on one rank."""
        return math.prod(self.sizes(call))

    def examples(self, world: World) -> Mapping[str, tuple[Operands, CallOptions]]:
        """Return the operands and options of the benchmark's calls, by name of the call."""
        return {}

    def auto(self, world: World, call: C, mode: str) -> Plan:
        """Return the plan that "auto" runs unless a trial found a faster one. mode: "graph" or "eager"."""
        return world.backend.scale.preset(self.emulator_plan) or self.expected(world, call, mode)

    def expected(self, world: World, call: C, mode: str) -> Plan:
        """Return the plan that is stored or predicted as the fastest for such a call. A trial replaces it only by a
        faster plan."""
        from .planner.auto import auto  # imported here, because the planner imports the registry

        return auto(self.name, world, *self.sizes(call), mode)

    def default(self, world: World, kind: type[Plan]) -> Plan:
        """Return the plan to run when a caller passes a kind's name; `kind` is the first class of that kind in
        `runs`."""
        return world.backend.scale.plan(kind)

    def unsupported(self, world: World, call: C, plan: Plan, asked: str | Plan) -> str | None:
        """Return the reason why the plan cannot run this call, or None. The reason must be the same on every rank.
        Raise Unsupported for a plan that cannot run on this machine in any call."""
        return None

    def batch_invariance_unsupported(self, world: World, call: C, plan: Plan) -> str | None:
        """Return the reason why the plan does not keep the promise of `weft.init(batch_invariant=True)` for this call,
        or None. A World of one rank keeps the promise, because it sums nothing over ranks."""
        plans = self.batch_invariant_plans
        if isinstance(plan, plans) or (plans and world.size == 1 and isinstance(plan, Sequential)):
            return None
        return "the order in which it sums a row may depend on the other rows"

    def scaling(self, call: C) -> str:
        """Return the scaling of the call's 8-bit operands; "" for other operands. The planner has no rates for 8-bit
        operands."""
        return ""

    def _with_operand_tiles(self, call: C, plan: Plan) -> Plan:
        """Return the plan with the tiles that this call needs."""
        return plan

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        """Return whether copy engines can move the plan's groups when `world` ranks have M rows together."""
        return True

    def candidates(self, world: World, call: C) -> Sequence[Plan]:
        """Return the plans to time for this call, the same on all ranks. The method may be collective."""
        return self.autotune_plans

    def trial_key(self, call: C) -> Hashable:
        """Return the key of this call's trial, which is the same on every rank; calls with one key share one trial."""
        return tuple(call.same_on_all_ranks().items())

    def balanced(self, world: World, call: C, operands: Operands) -> tuple[C, Operands]:
        """Return the call and operands to time. The call and operands differ from the caller's if the time depends on
        the operands' values."""
        return call, operands

    def without_rows(self, world: World, call: C, out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return all results of a call without rows, which runs no plan. out: the tensor for the first result."""
        further = [world.empty(shape, dtype) for shape, dtype in self.outputs(world, call)[1:]]
        return out, *further, *[None] * (self.results - 1 - len(further))

    def without_overlap(self, world: World, plan: Plan, operands: Operands, out: torch.Tensor) -> Operands | None:
        """Return operands with which the plan can write to `out`, although `out` overlaps some of the caller's
        operands. Return None if the plan must first write the result to separate memory."""
        return None

    def postprocess(
        self, world: World, plan: str | Plan, operands: Operands, options: CallOptions, results: Operands
    ) -> Returned:
        """Convert a run's results into the caller's, if the op overrides this."""
        return results

    # -- a call
    def __call__(
        self,
        world: World,
        plan: str | Plan,
        operands: Operands,
        options: CallOptions = (),
        out: torch.Tensor | None = None,
    ) -> Returned:
        """Run the op, and return the result and further results. out: the tensor to which the result is written; such a
        call is not differentiable. Only eager calls without a gradient read operands beyond the signature; in other
        calls `postprocess` handles them."""
        compiling, gradient = torch.compiler.is_compiling(), False
        if type(world) is not World and not compiling:
            check_call(self.title, world, plan)
        if torch.is_grad_enabled():
            for t in operands:
                if t is not None and getattr(t, "requires_grad", False):  # `check` refuses objects that are not tensors
                    self._check_gradient(operands, out)
                    gradient = True
                    break
        if self.num_saved:
            options = (*options, gradient)
        if compiling:
            results = self._compiled(world, plan, operands[: self.operands or None], options, out)
            return self.postprocess(world, plan, operands, options, results) if self.postprocesses else results
        lost = world.backend.left_out()
        if gradient:
            results = torch_library.differentiated(self, world, plan, operands[: self.operands or None], options)
        else:
            results = self.call(world, plan, operands, options, out)
        if self.postprocesses:
            results = self.postprocess(world, plan, operands, options, results)
        return results if lost == world.reported_losses else world.result_or_overflow(results, lost)

    def typed(self, operands: Sequence[torch.Tensor | None]) -> Operands:
        """Return the operands as the op's NamedTuple, if it has one."""
        return operands if self.operand_type is None else self.operand_type(*operands)

    def no_gradient(self, operands: Sequence[torch.Tensor | None]) -> str | None:
        """Return the reason why a call of these operands has no gradient, or None."""
        return None if self.differentiable else "this op does not have"

    def _check_gradient(self, operands: Sequence[torch.Tensor | None], out: torch.Tensor | None) -> None:
        if why := self.no_gradient(operands):
            raise ValueError(f"{self.title}: an operand requires a gradient, which {why}; use torch.no_grad()")
        if out is not None:
            raise ValueError(
                f"{self.title}: out= has no gradient, and an operand requires one; omit it, or use torch.no_grad()"
            )

    def _compiled(
        self, world: World, plan: str | Plan, operands: Operands, options: CallOptions, out: torch.Tensor | None
    ) -> Returned:
        operator = getattr(torch.ops.weft, self.name)
        results = operator(*operands, *options, world.name, torch_library.text_of(plan))
        if self.num_saved:
            results = torch_library.one_or_tuple(results[: self.results])
        if out is None:
            return results
        if self.results == 1:
            return torch_library.into(self.title, out, results)
        return (torch_library.into(self.title, out, results[0]), *results[1:])

    @property
    def title(self) -> str:
        """Return the name of the public function."""
        return self.public or self.name

    @cached_property
    def operands(self) -> int:
        """Return the number of tensor arguments of the operator."""
        return sum(argument.startswith("Tensor") for argument in self.signature.split(", "))

    @cached_property
    def outcomes(self) -> int:
        """Return the number of tensors that the operator returns."""
        return self.results + self.num_saved

    def _check_present(self, operands: Operands) -> None:
        """Raise TypeError for None in place of an operand that the signature requires."""
        for argument, t in zip(self.signature.split(", "), operands, strict=False):
            if t is None and argument.startswith("Tensor "):
                raise TypeError(f"{self.title}: {argument.removeprefix('Tensor ')} must be a tensor, got None")

    @cached_property
    def postprocesses(self) -> bool:
        return type(self).postprocess is not Op.postprocess

    @cached_property
    def differentiable(self) -> bool:
        return type(self).backward is not Op.backward

    def call(
        self, world: World, plan: str | Plan, operands: Operands, options: CallOptions, out: torch.Tensor | None
    ) -> Returned:
        """Make a call that needs no gradient, outside torch.compile."""
        if type(world) is not World or type(plan) is not str:
            check_call(self.title, world, plan)
        if type(operands) is tuple:  # torch.library and autograd pass plain tuples
            operands = self.typed(operands)
        try:
            layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands]
        except AttributeError:
            self._check_present(operands)
            self.check(world, operands, options)  # raises a TypeError that names the operand
            raise
        addresses = self.operand_addresses(world, operands, out) if self.depends_on_addresses else None
        capturing = world.backend.capturing()
        key = (self.name, plan, capturing, Op.table_version, options, addresses, *layouts)
        decisions = self.decisions(world, options) if self.keeps_decisions else world.decided
        try:
            known = decisions.get(key)
            if known is None:
                known = self._decide(world, plan, operands, options, out, key, decisions, addresses)
            world.begin(known.number, known.launches, capturing)
            results = known(operands, out) if known.noted else known.note(operands, out)
        except BaseException:  # including interrupts: only the end of a run joins the side streams of its transports
            world.join_side_streams()
            raise
        world.ran = known  # set last, because this call may have made other calls
        return results

    def _decide(
        self,
        world: World,
        asked: str | Plan,
        operands: Operands,
        options: CallOptions,
        out: torch.Tensor | None,
        key: Hashable,
        decisions: Memo,
        addresses: Hashable,
    ) -> Prepared[C]:
        """Check the call, choose its plan, check that all ranks agree, and prepare. Collective."""
        self._check_present(operands)
        call, capturing = self.check(world, operands, options), world.backend.capturing()
        world.check()
        if any(self.waits(world, kind) for kind in self.runs):  # trials and a capture's warm-up run in `_decide`
            world.order_residents(UNKNOWN, capturing)
        if (
            asked == "auto"
            and not world.backend.scale.presets
            and call.rows
            and (world.size > 1 or not self.by_library)
        ):
            world.choices.trial(self.choice(world, call, operands))
        plan, final = self.choose(world, call, asked, capturing), True
        if asked == "auto" and capturing:
            plan, final = self._plan_for_capture(world, call, plan, decisions, addresses)
        # If one rank alone warms up, its check is compared with the check that the other ranks make here, and all ranks
        # raise Mismatch.
        if asked == "auto" and not capturing and self.may_capture(world, call):
            final = self._ready_for_capture(world, call, plan, operands, out, decisions, addresses)
        known = self.prepared(world, call, plan, addresses)
        known.number = self.check_same_on_all_ranks(world, call, plan, **self.compared(plan, addresses))
        if not isinstance(plan, Sequential):
            world.backend.begins(self.title, self.sizes(call), self.multiply_adds(call))
        if known.launches is None and self.waits(world, plan):
            known.launches, known.noted = UNKNOWN, False
        if final:
            decisions[key] = known
        return known

    def prepared(self, world: World, call: C, plan: Plan, addresses: Hashable = None) -> Prepared[C]:
        """Return the calls of this shape by this plan, which are prepared once for all decisions and trials."""
        kept, key = self.kept(world, call), (self.name, call, plan, addresses)
        known: Prepared[C] | None = kept.get(key)
        if known is None:
            if len(world.prepared) >= MOST_PREPARED:
                world.forget_prepared()
            known = kept[key] = Prepared(self, world, call, plan)
        return known

    def kept(self, world: World, call: C) -> Memo:
        """Return the table in which prepared calls are stored."""
        return world.prepared

    def prepare(self, world: World, call: C, plan: Plan) -> Run | OwnResult:
        """Return the run of calls of one shape by a plan (prepared.py)."""
        if call.rows:
            return self.runs[type(plan)](world, call, plan)
        shape, dtype = self.outputs(world, call)[0]
        return OwnResult(
            lambda operands, out: self.without_rows(world, call, world.empty(shape, dtype) if out is None else out)
        )

    def waits(self, world: World, plan: Plan | type[Plan]) -> bool:
        """Return whether programs of a call wait for other ranks, or for programs of their launch that have not
        started. On one rank, only the programs of a launch with a grid barrier wait. Other launches order their work so
        that no program waits for a later one."""
        return world.size > 1 or plan.grid_barrier

    def operand_addresses(self, world: World, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """Return the properties of the addresses of operands and `out` on which a decision depends. The properties are
        the same on every rank."""
        return None

    def compared(self, plan: Plan, addresses: Hashable) -> Mapping[str, Hashable]:
        """Return the parts of `operand_addresses` that ranks have to compare, by name."""
        return {}

    def decisions(self, world: World, options: CallOptions) -> Memo:
        """Return the store of decisions."""
        return world.decided

    def check_same_on_all_ranks(self, world: World, call: C, plan: Plan, **further: Hashable) -> int | None:
        """Raise Mismatch unless all ranks make this call, with this plan and `further` values. Collective at the first
        call. Return the call's number for `World.begin`, or None for a call that ranks do not compare.

        If all waits of the plan are bounded, the Mismatch may be raised as late as in the next check
        (`World.post_call`): a launch that the other ranks do not make ends with a timeout. An NCCL collective that
        ranks enter with different sizes never ends, and can block a host before any check, for example while CUDA loads
        a module. In a plan with such a collective, this method therefore waits for all ranks.
        """
        if self.public:
            further["op"] = self.name
        if world.batch_invariant:
            further["batch_invariant"] = True
        return (world.post_call if plan.bounded else world.check_same_on_all_ranks)(
            self.title, **call.same_on_all_ranks(), plan=plan, **further
        )

    def _ready_for_capture(
        self,
        world: World,
        call: C,
        plan: Plan,
        operands: Operands,
        out: torch.Tensor | None,
        decisions: Memo,
        addresses: Hashable,
    ) -> bool:
        """Warm up a later capture: if "auto" runs a different plan inside a CUDA graph, run that plan once, because a
        capture can neither allocate nor compile. The warm-up runs at the second call of a size, because a size that is
        called once should not pay for a graph that is never captured. The warm-up also runs at the first call on a side
        stream, where callers warm up. Return False at a first call that does not warm up. The World does not store that
        call, so all ranks return here together."""
        key = self._warm_up_key(call, addresses)
        if key not in decisions and not world.backend.on_side_stream():
            decisions[key] = CalledOnce(plan)
            return False
        in_capture, ready = self.choose(world, call, "auto", True), decisions.get(key)
        decisions[key] = in_capture
        if in_capture not in (plan, ready):
            # The current stream may differ between ranks. A rank that warms up alone raises Mismatch here, instead of
            # waiting forever in a collective that the other ranks do not enter.
            self.check_same_on_all_ranks(world, call, in_capture, warm_up=True)
            # Ranks cannot exchange messages during the capture itself.
            self.check_same_on_all_ranks(world, call, in_capture, **self.compared(in_capture, addresses))
            self.warm_up_capture(self.prepared(world, call, in_capture, addresses), operands, out)
        return True

    def _plan_for_capture(
        self, world: World, call: C, plan: Plan, decisions: Memo, addresses: Hashable
    ) -> tuple[Plan, bool]:
        """Return the plan for a capture, and whether that plan is final. The plan is the one that earlier calls ran
        for the capture: since then a trial of another number of rows may have changed the choice, which is `plan`. If
        there was only one call, or if no capture was expected (`World.may_capture`), it is the plan of eager calls."""
        if not self.may_capture(world, call):
            return self.choose(world, call, "auto", False), True
        ready = decisions.get(self._warm_up_key(call, addresses), plan)
        if not isinstance(ready, CalledOnce):
            return ready, True
        if ready.plan == plan:
            return plan, True
        world.log_once(
            f"{self.title}: a capture after a single call takes the plan of eager calls ({ready.plan.kind}); call a "
            f"size twice before its capture for {plan.kind}"
        )
        return ready.plan, False

    def may_capture(self, world: World, call: C) -> bool:
        """Return whether a CUDA graph may capture such calls."""
        return world.may_capture(call.rows)

    def _warm_up_key(self, call: C, addresses: Hashable) -> Hashable:
        """Return the key of a call's warm-up, which does not depend on the operands' layouts. Under this key, the
        decisions contain the plan that earlier calls ran for a capture, or CalledOnce. The key is the same on every
        rank, so either all ranks warm up or none does."""
        return self.name, "warm-up", tuple(call.same_on_all_ranks().items()), addresses

    def warm_up_capture(self, prepared: Prepared[C], operands: Operands, out: torch.Tensor | None) -> None:
        """Make a call only to prepare later calls. The call does not write to `out`, which may overlap an operand."""
        prepared(operands, None)

    def choose(self, world: World, call: C, asked: str | Plan, capturing: bool) -> Plan:
        """Return the Plan to run. If the plan cannot run the call, the op falls back to sequential, and weft logs this
        once. Ranks of a reference World run only sequential plans; ranks on several nodes run only TwoLevel or
        sequential plans."""
        if isinstance(asked, str):
            asked = RENAMED_KINDS.get(asked, asked)
        self.check_plan(asked)
        if world.batch_invariant:
            return self._batch_invariant_plan(world, call, asked, capturing)
        if world.multi_node_unsupported is not None and len(self.runs) > 1:
            return self._between_nodes(world, call, asked, capturing)
        plan = self._named(world, call, asked, capturing) if isinstance(asked, str) else asked
        if isinstance(plan, Sequential) or world.backend.reference or (world.size == 1 and self.by_library):
            return Sequential()
        levels = isinstance(plan, TwoLevel)
        reason = world.backend.two_level_unsupported if levels else self.unsupported(world, call, plan, asked)
        if reason is None:
            return plan
        if reason:
            world.log_once(f"{self.title}: sequential instead of {plan.kind}: {reason}")
        return Sequential()

    def _batch_invariant_plan(self, world: World, call: C, asked: str | Plan, capturing: bool) -> Plan:
        """Return the Plan to run on a batch-invariant World. The Plan is the caller's plan or, for "auto", the op's
        choice or otherwise the first default plan that can run there. Raise Unsupported if there is no such plan: a
        plan that the caller named has no fallback."""
        plan = self._named(world, call, asked, capturing) if isinstance(asked, str) else asked
        plans = [Sequential()] if world.size == 1 and self.by_library else [plan]
        if asked == "auto":
            plans += self._defaults(world)
        reasons = {candidate: self._reason_against(world, call, candidate, candidate) for candidate in plans}
        for candidate, reason in reasons.items():
            if reason is None:
                return candidate
        raise Unsupported(f"{self.title}: plan {plan.kind!r} on a batch-invariant World: {reasons[plans[0]]}")

    def _defaults(self, world: World) -> list[Plan]:
        """Return the default plan of each class that keeps the promise of a batch-invariant World."""
        return [self.default(world, kind) for kind in self.batch_invariant_plans]

    def _reason_against(self, world: World, call: C, plan: Plan, asked: str | Plan) -> str | None:
        """Return the reason why the plan cannot run the call on this World, or None. `unsupported` returns the reasons
        other than batch invariance."""
        if world.batch_invariant and (reason := self.batch_invariance_unsupported(world, call, plan)) is not None:
            return reason
        return None if isinstance(plan, Sequential) else self.unsupported(world, call, plan, asked)

    def _between_nodes(self, world: World, call: C, asked: str | Plan, capturing: bool) -> Plan:
        """Return the Plan of ranks on several nodes, between which only NCCL moves data: TwoLevel if the caller
        requests it, or if "auto" measured it to be faster than Sequential; otherwise Sequential. If the caller names a
        different plan, the reason is logged once."""
        if asked in (Sequential(), Sequential.kind):
            return Sequential()
        if TwoLevel not in self.runs or world.backend.two_level_unsupported is not None:
            subject, reason = f"{self.title} on", world.multi_node_unsupported
            if world.backend.two_level_unsupported is not None:
                subject, reason = "every op of", world.backend.two_level_unsupported
            world.log_once(
                f"{subject} this World runs by its sequential plan: {reason}; to overlap, give ops the World of one "
                "node (world.split(world.node), or weft.init(group) of its ranks)"
            )
            return Sequential()
        if asked == "auto":
            default = self.default(world, TwoLevel)
            preset = world.backend.scale.presets and self.unsupported(world, call, default, asked) is None
            timed = self._timed(world, call, "graph" if capturing else "eager")
            return timed or (default if preset else Sequential())
        plan = self.default(world, TwoLevel) if asked == TwoLevel.kind else asked
        reason = (
            self.unsupported(world, call, plan, asked) if isinstance(plan, TwoLevel) else world.multi_node_unsupported
        )
        if reason is None:
            assert isinstance(plan, TwoLevel)
            return plan
        world.log_once(
            f"{self.title}: sequential instead of {asked if isinstance(asked, str) else asked.kind}: {reason}"
        )
        return Sequential()

    def _named(self, world: World, call: C, name: str, capturing: bool) -> Plan:
        if name != "auto":
            return self.default(world, self.kinds[name])
        mode = "graph" if capturing else "eager"
        return self._timed(world, call, mode) or self.auto(world, call, mode)

    def _timed(self, world: World, call: C, mode: str) -> Plan | None:
        """Return the plan that was fastest in the trial of such calls, among the plans that can run this call."""

        def usable(plan: Plan) -> bool:
            return self._reason_against(world, call, plan, "auto") is None

        timed: Plan | None = world.choices.remembered(self._key(call), mode, usable)
        return timed

    def _key(self, call: C) -> Hashable:
        """Return the key of the decision, which calls with the same `trial_key` share."""
        return Op.table_version, self.name, self.trial_key(call)

    def choice(self, world: World, call: C, operands: Operands) -> Choice[Plan]:
        """Return the choice that "auto" makes for such a call. Listing its candidates may be collective."""
        from .planner.auto import unmeasured  # imported here, because the planner imports the registry

        def candidates() -> Sequence[Plan]:
            if world.multi_node_unsupported is not None:
                named: Sequence[Plan] = self.over_nodes
            else:
                named = *self.candidates(world, call), *unmeasured(self, world, call)
            if world.batch_invariant and len(self.batch_invariant_plans) > 1:
                # Low-latency rows occupy several times the memory of their data, so an op lists such plans only for
                # small sizes.
                named = *named, *(plan for plan in self._defaults(world) if not is_low_latency(plan))
            fitted = dict.fromkeys(self._with_operand_tiles(call, plan) for plan in named)
            fit = [plan for plan in fitted if self._reason_against(world, call, plan, "auto") is None]
            return [plan for plan in fit if self.choose(world, call, plan, False) == plan]

        addresses = self.operand_addresses(world, operands, None)

        @functools.cache
        def timed() -> tuple[C, Operands]:
            return self.balanced(world, call, operands)

        def run(plan: Plan) -> None:
            timed_call, timed_operands = timed()
            self.prepared(world, timed_call, plan)(timed_operands, None)

        return Choice(
            self._key(call),
            lambda mode: self.choose(world, call, "auto", mode == "graph"),
            candidates,
            run,
            lambda plan: self.check_same_on_all_ranks(world, timed()[0], plan, **self.compared(plan, addresses)),
            trial_title(self.name, self.scaling(call)),
            self.sizes(call),
            # For the smallest call that shares this trial, the host needs as long as for this call, and the GPU needs
            # less time.
            host_factor=library_gemm.rows_ratio(),
        )

    def check_plan(self, plan: str | Plan) -> None:
        """Raise ValueError for a plan or kind that the op does not have, or for a field that the op refuses."""
        if isinstance(plan, str):
            if plan != "auto" and plan not in self.kinds:
                raise ValueError(f'{self.title}: plan {plan!r} is not "auto", one of {sorted(self.kinds)}, or a Plan')
        elif type(plan) not in self.runs:
            raise ValueError(f"{self.title}: {plan} is not one of {[plan_class.__name__ for plan_class in self.runs]}")
        for name in self.unsupported_fields.get(type(plan), ()):  # type: ignore[arg-type]
            if getattr(plan, name) != getattr(type(plan), name):
                raise ValueError(f"{self.title}: {plan}: {name} means nothing to this op")

    def has(self, plan: Plan) -> bool:
        """Return whether the op supports the plan and refuses none of its fields."""
        try:
            self.check_plan(plan)
        except ValueError:
            return False
        return True

    @cached_property
    def kinds(self) -> dict[str, type[Plan]]:
        """Return, for each kind of plan that the op supports, the kind's first class in `runs`."""
        classes: dict[str, type[Plan]] = {}
        for plan in self.runs:
            classes.setdefault(plan.kind, plan)
        return classes

    def dense_operands(self, plan: Plan, operands: Operands) -> Operands:
        """Return the operands in a layout that the plan accepts. Operands that are not dense are copied."""
        return type(operands)(*bulk(operands)) if self.operand_type is not None else tuple(bulk(operands))


class Local(Op[C]):
    """An op without waits between ranks. Such an op has one plan, and ranks compare nothing."""

    def expected(self, world: World, call: C, mode: str) -> Plan:
        return Sequential()

    def waits(self, world: World, plan: Plan | type[Plan]) -> bool:
        return False

    def check_same_on_all_ranks(self, world: World, call: C, plan: Plan, **further: Hashable) -> int | None:
        return None


def check_call(op: str, world: World, plan: str | Plan = "auto") -> None:
    """Raise TypeError if `world` is not a World, or `plan` is not a plan."""
    if not isinstance(world, World):
        raise TypeError(f"{op}: world must be a weft.World, got {type(world).__name__}")
    if not isinstance(plan, (str, Plan)):
        raise TypeError(f'{op}: plan must be "auto", a kind or a Plan, got {plan!r}')
