"""Op: what an operator defines, and the life of one call, written once for all of them; and the registry.

    ways     torch.compile: the operator of torch.library; a gradient: an autograd.Function; else straight on
    (`library`)
    key      what decisions go by: the op, the plan asked for, the mode, the options, layouts of the operands
    first    check -> choose a plan -> the ranks agree -> remember; the second time: what a capture takes
    then     allocate -> run the plan -> finish

A known call costs a look-up and its launches; one of contiguous operands by the library alone goes straight there
(`direct`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch

from . import torch_library
from .chooser import Choice
from .plans import Plan, Sequential, TwoLevel
from .tensor_checks import bulk, contiguous, output, overlap
from .torch_library import Backward, CallOptions
from .world import Memo, World

Operands: TypeAlias = Any  # tensors, None for an absent one; a NamedTuple where the op names them (`takes`)
Returned: TypeAlias = Any  # a tensor, or a tuple, as the op says
Run: TypeAlias = Callable[
    ..., Returned
]  # (world, call, plan, operands, out): writes out, and returns what comes beside
Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]  # of tensors, each with its dtype
Direct = Callable[..., Returned]

REGISTRY: dict[str, Op] = {}
ONCE = "called once"  # where the plan of a later capture of a call would be, once it is ready


def registered(op: Op) -> Op:
    """The op, known by its name from now on, also to torch.compile. Raises ValueError for a name that another class
    has, or the same with another signature."""
    known = REGISTRY.get(op.name)
    if known is not None and type(known).__qualname__ != type(op).__qualname__:
        raise ValueError(f"an op named {op.name!r} exists: {type(known).__qualname__}")
    if known is not None and (known.signature, known.results) != (op.signature, op.results):
        raise ValueError(f"{op.name}: signature {op.signature!r} was {known.signature!r}")
    REGISTRY[op.name] = op
    _ = (
        op.operands,
        op.outcomes,
        op.differentiable,
    )  # kept from now on: torch.compile cannot trace the lock that guards the first use
    if known is None and op.signature:
        torch_library.register(op, REGISTRY)
    return op


def collectives() -> dict[str, str]:
    """Return, for each op around one GEMM, the library's collective before or after it."""
    return {name: op.collective for name, op in REGISTRY.items() if op.collective}


def collective(op: str) -> str:
    return REGISTRY[op].collective


def around(what: str) -> str:
    """Return the op whose collective is `what`."""
    return next(name for name, each in collectives().items() if each == what)


@dataclass(frozen=True)
class Call:
    """What one call computes, besides its plan; hashable. Subclasses add fields."""

    @property
    def rows(self) -> int:
        """Rows of all ranks, M; without any nothing is launched."""
        raise NotImplementedError

    def agreed(self) -> dict[str, Hashable]:
        """What all ranks must have alike, by the names that a Mismatch gives it: all fields, unless a class says
        otherwise."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


C = TypeVar("C", bound=Call)


def trial_title(op: str, scaling: str) -> str:
    """Return the title of an op's trials (`Op.scaling`)."""
    return f"{op} of 8-bit operands by {scaling}" if scaling else op


@dataclass(frozen=True)
class Known(Generic[C]):
    """What was decided for calls of one key."""

    call: C
    plan: Plan
    direct: Direct | None
    number: int | None  # for `World.begin`


class Op(ABC, Generic[C]):
    """One operator. An instance holds no state of its own: what calls prepare is kept by the World."""

    name: ClassVar[str]
    public: ClassVar[str] = ""  # the function that errors name, where it is called otherwise than the op
    signature: ClassVar[str] = (
        ""  # operands, then options, as torch.library writes them; without one no torch.compile and no gradient
    )
    results: ClassVar[int] = 1
    keeps: ClassVar[int] = 0  # what a run also returns, for the backward pass, where the last option, `bool gradient`,
    # which `__call__` adds, says that an operand requires a gradient (`kept`, `saved`)
    lends: ClassVar[int] = 0  # so many results, behind the first, are the World's memory, which compiled calls copy
    wraps: ClassVar[bool] = False  # callers get what `wrapped` makes of the results
    takes: ClassVar[Callable[..., Operands] | None] = None  # a NamedTuple of its operands
    runs: ClassVar[Mapping[type[Plan], Run]]  # the kinds of plans that serve it, and what runs each
    refuses: ClassVar[Mapping[type[Plan], Sequence[str]]] = {}  # fields of plans that it could only ignore
    knowledge: ClassVar[int] = 0  # one number for all ops; it grows when "auto" may decide anew
    collective: ClassVar[str] = ""  # the library's, before or after the GEMM of an op around one
    alone: ClassVar[float | None] = None  # of a collective without a GEMM, whose bytes decide: how many times kernels
    # behind the library's read and write them
    variants: ClassVar[Sequence[Plan]] = ()  # plans of one kind that differ in speed by shape: what tuning tries, and
    # "auto" on a Hopper GPU that nobody measured
    tries: ClassVar[
        Sequence[Plan]
    ] = ()  # what "auto" times at the first call of a size: plans that the planner has no model of
    over_nodes: ClassVar[Sequence[Plan]] = ()  # the same for ranks on several nodes
    small: ClassVar[Plan | type[Plan]] = Sequential  # what "auto" runs on ranks of few programs, as in the emulator; of
    # a class, the plan that its name stands for there

    keeps_decisions: ClassVar[bool] = False  # decisions are kept elsewhere than with the World (`decisions`)
    looks_at_addresses: ClassVar[bool] = False  # a decision depends on where operands and `out` lie (`lie`)
    partial: ClassVar[bool] = False  # a call leaves parts of its result as they were
    by_library: ClassVar[bool] = True  # one rank runs it by the library's calls; else by the plan, as several do

    # -- what an operator defines
    @abstractmethod
    def check(self, world: World, operands: Operands, options: CallOptions) -> C:
        """The Call. Raise ValueError or TypeError, quoting what was given, for anything that this rank alone can see is
        wrong."""

    @abstractmethod
    def outputs(self, world: World, call: C) -> Shapes:
        """Shape and dtype of the result, which `out=` may hold, and of what is returned beside it."""

    def meta(self, world: World, operands: Operands, options: CallOptions) -> Shapes:
        """`outputs` while torch.compile traces, where sizes may be symbols."""
        return self.outputs(world, self.check(world, operands, options))

    def fake(self, world: World, operands: Operands, options: CallOptions) -> list[torch.Tensor]:
        """Tensors like the results, of no values, while torch.compile traces."""
        like, results = operands[0], self.meta(world, operands, options)
        return [like.new_empty(shape, dtype=dtype) for shape, dtype in results]

    def kept(self, world: World, call: C, plan: str | Plan) -> Shapes:
        """Shapes and dtypes of the `keeps` tensors, or the first of them, that a run leaves for the backward pass. A
        plan may keep nothing. plan: the one that runs, or, while torch.compile traces, the one that was asked for."""
        return ()

    def saved(
        self, operands: Operands, results: Operands, options: CallOptions, needs: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """What the backward pass takes of operands and results. results: behind them, what the run kept. needs: by
        operand, whether its gradient is asked for."""
        return operands

    def backward(self, world: World, given: Backward) -> Sequence[torch.Tensor | None]:
        """The operands' gradients, in terms of other ops; None where none is asked for. Communicates on all ranks
        alike."""
        raise NotImplementedError

    def sizes(self, call: C) -> tuple[int, int, int]:
        """Return M, N, K as measured tables and the planner have them: those of the GEMM on one rank, but M that of all
        ranks."""
        return call.rows, 1, 1

    def multiply_adds(self, call: C) -> int:
        """Return the number of multiply-adds of its kernels on one rank."""
        return math.prod(self.sizes(call))

    def examples(self, world: World) -> Mapping[str, tuple[Operands, CallOptions]]:
        """Operands and options that the benchmark times, by name."""
        return {}

    def auto(self, world: World, call: C, mode: str) -> Plan:
        """What plan="auto" means where no plan was timed faster, `mode` "graph" or "eager"."""
        return world.scale.preset(self.small) or self.expected(world, call, mode)

    def expected(self, world: World, call: C, mode: str) -> Plan:
        """What is stored as the fastest plan for such a call, or predicted to be: what a timed plan has to beat."""
        from .planner.auto import auto  # above the ops, which it finds in the registry

        return auto(self.name, world, *self.sizes(call), mode)

    def default(self, world: World, kind: type[Plan]) -> Plan:
        """What a kind's name means; `kind` is the first class of that kind in `runs`."""
        return world.scale.plan(kind)

    def fits(self, world: World, call: C, plan: Plan, asked: str | Plan) -> str | None:
        """Why the plan cannot serve this call; None where it can. The same on every rank. Raise Unsupported for a plan
        that never could on this machine."""
        return None

    def scaling(self, call: C) -> str:
        """How 8-bit operands of the call are scaled, of which the planner has no rates; "" for others."""
        return ""

    def fitted(self, call: C, plan: Plan) -> Plan:
        """The plan as it serves the call, where its tiles are other calls'."""
        return plan

    def movable(self, plan: Plan, m: int, world: int) -> bool:
        """Whether copy engines can move what the plan wants of them when `world` ranks have M rows together."""
        return True

    def candidates(self, world: World, call: C) -> Sequence[Plan]:
        """Return those of `tries` that are worth a trial of this call, the same on all ranks. May be collective."""
        return self.tries

    def alike(self, call: C) -> Hashable:
        """What calls for which one trial is made have in common; the same on every rank."""
        return tuple(call.agreed().items())

    def balanced(self, world: World, call: C, operands: Operands) -> tuple[C, Operands]:
        """Return what is timed in place of a call: another one, where its time hangs on what its operands hold."""
        return call, operands

    def direct(self, world: World, call: C, plan: Plan) -> Direct | None:
        """A function of contiguous operands that makes such a call in as little host time as Python takes; None:
        `execute` does."""
        return None

    def returned(self, world: World, call: C, result: torch.Tensor, more: object) -> Returned:
        """What a call returns: its result, and what its plan gave beside it."""
        return result

    def wrapped(
        self, world: World, plan: str | Plan, operands: Operands, options: CallOptions, results: Operands
    ) -> Returned:
        """What a caller gets of the results of an op that `wraps`."""
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
        """The result, and what comes beside it. out: where to write the result; not differentiable. Operands that the
        signature does not have are given to eager calls without a gradient alone (`wrapped` sees to them else)."""
        compiling, gradient = torch.compiler.is_compiling(), False
        if type(world) is not World and not compiling:
            check_call(self.title, world, plan)
        if torch.is_grad_enabled():
            for t in operands:
                if t is not None and getattr(t, "requires_grad", False):  # what is no tensor is refused further on
                    self._check_gradient(operands, out)
                    gradient = True
                    break
        if self.keeps:
            options = (*options, gradient)
        if compiling:
            results = self._compiled(world, plan, operands[: self.operands or None], options, out)
            return self.wrapped(world, plan, operands, options, results) if self.wraps else results
        lost = world.backend.left_out()
        if gradient:
            results = torch_library.differentiated(self, world, plan, operands[: self.operands or None], options)
        else:
            results = self.call(world, plan, operands, options, out)
        return world.result_or_overflow(
            self.wrapped(world, plan, operands, options, results) if self.wraps else results, lost
        )

    def typed(self, operands: Sequence[torch.Tensor | None]) -> Operands:
        """Return the operands by name, for an op that names them."""
        return operands if self.takes is None else self.takes(*operands)

    def no_gradient(self, operands: Sequence[torch.Tensor | None]) -> str | None:
        """Why a call of these operands has no gradient; None where it has."""
        return None if self.differentiable else "this op does not have"

    def _check_gradient(self, operands: Sequence[torch.Tensor | None], out: torch.Tensor | None) -> None:
        if why := self.no_gradient(operands):
            raise ValueError(f"{self.title}: an operand requires a gradient, which {why}; use torch.no_grad()")
        if out is not None:
            raise ValueError(
                f"{self.title}: out= has no gradient, and an operand requires one; omit it, or use torch.no_grad()"
            )

    def _compiled(
        self,
        world: World,
        plan: str | Plan,
        operands: Operands,
        options: CallOptions,
        out: torch.Tensor | None,
    ) -> Returned:
        operator = getattr(torch.ops.weft, self.name)
        made = operator(*operands, *options, world.name, torch_library.text_of(plan))
        if self.keeps:
            made = torch_library.returned(made[: self.results])
        if out is None:
            return made
        if self.results == 1:
            return torch_library.into(self.title, out, made)
        return (torch_library.into(self.title, out, made[0]), *made[1:])

    @property
    def title(self) -> str:
        """What users call it."""
        return self.public or self.name

    @cached_property
    def operands(self) -> int:
        """How many tensors it takes."""
        return sum(argument.startswith("Tensor") for argument in self.signature.split(", "))

    @cached_property
    def outcomes(self) -> int:
        """How many tensors its operator returns."""
        return self.results + self.keeps

    def _check_present(self, operands: Operands) -> None:
        """Raise TypeError for None in place of an operand that the signature does not leave out."""
        for argument, t in zip(self.signature.split(", "), operands, strict=False):
            if t is None and argument.startswith("Tensor "):
                raise TypeError(f"{self.title}: {argument.removeprefix('Tensor ')} must be a tensor, got None")

    @cached_property
    def differentiable(self) -> bool:
        return type(self).backward is not Op.backward

    def call(
        self,
        world: World,
        plan: str | Plan,
        operands: Operands,
        options: CallOptions,
        out: torch.Tensor | None,
    ) -> Returned:
        """A call that needs no gradient, outside torch.compile."""
        if type(world) is not World or type(plan) is not str:
            check_call(self.title, world, plan)
        if type(operands) is tuple:  # from torch.library or autograd
            operands = self.typed(operands)
        try:
            layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in operands]
        except AttributeError:
            self._check_present(operands)
            self.check(world, operands, options)  # which says what is no tensor
            raise
        addresses = self.lie(world, operands, out) if self.looks_at_addresses else None
        key = (self.name, plan, world.capturing(), Op.knowledge, options, addresses, *layouts)
        decisions = self.decisions(world, options) if self.keeps_decisions else world.decided
        known = decisions.get(key) or self._first(key, world, plan, operands, options, out)
        world.begin(known.number)
        if known.direct is not None and out is None:
            results = known.direct(*operands)
        else:
            results = self.execute(world, known.call, known.plan, operands, out)
        world.ran = known  # behind the calls that this one made
        return results

    def _first(
        self,
        key: Hashable,
        world: World,
        asked: str | Plan,
        operands: Operands,
        options: CallOptions,
        out: torch.Tensor | None,
    ) -> Known[C]:
        """Collective: check, choose, agree."""
        self._check_present(operands)
        call = self.check(world, operands, options)
        world.check()
        if asked == "auto" and not world.scale.presets and call.rows and (world.size > 1 or not self.by_library):
            world.choices.trial(self.choice(world, call, operands))
        plan, settled = self.choose(world, call, asked, world.capturing()), True
        decisions = self.decisions(world, options)
        if asked == "auto" and world.capturing():
            plan, settled = self._rehearsed(world, call, plan, operands, out, decisions)
        number = self.check_same_on_all_ranks(world, call, plan)
        if not isinstance(plan, Sequential):
            world.backend.begins(self.title, self.sizes(call), self.multiply_adds(call))
        if asked == "auto" and not world.capturing():
            settled = self._ready_for_capture(world, call, plan, operands, out, decisions)
        usual = call.rows > 0 and world.size > 1 and contiguous(*operands)
        known = Known(call, plan, self.direct(world, call, plan) if usual else None, number)
        if settled:
            decisions[key] = known
        return known

    def lie(self, world: World, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """Where operands and `out` lie, as far as a decision depends on it. The same on every rank."""
        return None

    def decisions(self, world: World, options: CallOptions) -> Memo:
        """Where what was decided is kept."""
        return world.decided

    def check_same_on_all_ranks(self, world: World, call: C, plan: Plan, **more: Hashable) -> int | None:
        """Collective the first time: raise Mismatch unless all ranks make this call, with this plan and `more`; its
        number, for `World.begin`, or None where that is left to `execute`.

        For a plan whose waits are bounded, Mismatch may be raised at the next check only (`World.post_call`): a launch
        that the other ranks do not make ends in an expired wait. An NCCL collective that ranks enter with different
        sizes never ends, and a host can block behind it before any check, for example where CUDA loads a module: such a
        plan waits here for all ranks."""
        if self.public:
            more["op"] = self.name
        return (world.post_call if plan.bounded else world.check_same_on_all_ranks)(
            self.title, **call.agreed(), plan=plan, **more
        )

    def _ready_for_capture(
        self,
        world: World,
        call: C,
        plan: Plan,
        operands: Operands,
        out: torch.Tensor | None,
        decisions: Memo,
    ) -> bool:
        """Where "auto" takes another plan inside a CUDA graph, run that once: a capture cannot make what it needs. This
        is at the second call of a size, since one that is called once should pay nothing for a graph that never comes,
        not even the search for that plan, or at the first on a stream of its own, where people warm up. Return False at
        a first call that does not: it is not remembered, so that the ranks come here together again."""
        key = self._rehearsal(world, call, operands, out)
        if key not in decisions and not world.on_side_stream():
            decisions[key] = ONCE
            return False
        other, ready = self.choose(world, call, "auto", True), decisions.get(key)
        decisions[key] = other
        if other not in (plan, ready):
            # Which stream is current is each rank's own. One that rehearses alone waits here, for a Mismatch, and not
            # for good in a collective that the others do not enter.
            self.check_same_on_all_ranks(world, call, other, rehearsal=True)
            self.check_same_on_all_ranks(world, call, other)  # what the capture will say, which can ask no one
            self.rehearse(world, call, other, operands, out)
        return True

    def _rehearsed(
        self,
        world: World,
        call: C,
        plan: Plan,
        operands: Operands,
        out: torch.Tensor | None,
        decisions: Memo,
    ) -> tuple[Plan, bool]:
        """What a capture takes, and whether that is final: `plan`, or that of eager calls after a single one."""
        eager = self.choose(world, call, "auto", False)
        if eager == plan or decisions.get(self._rehearsal(world, call, operands, out)) is not ONCE:
            return plan, True
        world.log_once(
            f"{self.title}: a capture after a single call takes the plan of eager calls ({eager.kind}); call a size "
            f"twice before its capture for {plan.kind}"
        )
        return eager, False

    def _rehearsal(self, world: World, call: C, operands: Operands, out: torch.Tensor | None) -> Hashable:
        """Return the key of a call's rehearsal, the same on every rank, so that all of them rehearse, or none."""
        return (self.name, "rehearsal", tuple(call.agreed().items()), self.lie(world, operands, out))

    def rehearse(self, world: World, call: C, plan: Plan, operands: Operands, out: torch.Tensor | None) -> None:
        """A call that is made only for what it prepares, so it leaves `out` alone, which may hold an operand."""
        self.execute(world, call, plan, operands, None)

    def choose(self, world: World, call: C, asked: str | Plan, capturing: bool) -> Plan:
        """The Plan to run. One that cannot serve the call falls back to sequential, said once; ranks that are the
        reference run no other, and those on several nodes none but TwoLevel."""
        self.check_plan(asked)
        if world.nodes_reason is not None and len(self.runs) > 1:
            return self._between_nodes(world, call, asked, capturing)
        plan = self._named(world, call, asked, capturing) if isinstance(asked, str) else asked
        if isinstance(plan, Sequential) or world.reference or (world.size == 1 and self.by_library):
            return Sequential()
        levels = isinstance(plan, TwoLevel)
        reason = world.levels_reason if levels else self.fits(world, call, plan, asked)
        if reason is None:
            return plan
        if reason:
            world.log_once(f"{self.title}: sequential instead of {plan.kind}: {reason}")
        return Sequential()

    def _between_nodes(self, world: World, call: C, asked: str | Plan, capturing: bool) -> Plan:
        """The Plan of ranks on several nodes, between which only the library's collectives go: TwoLevel where it is
        asked for, or "auto" measured that it is faster; else Sequential, with the reason said once where another plan
        was asked for."""
        if asked in (Sequential(), Sequential.kind):
            return Sequential()
        if TwoLevel not in self.runs or world.levels_reason is not None:
            which, reason = f"{self.title} on", world.nodes_reason
            if world.levels_reason is not None:
                which, reason = "every op of", world.levels_reason
            world.log_once(
                f"{which} this World runs by its sequential plan: {reason}; to overlap, give ops the World of one node "
                "(world.split(world.node), or weft.init(group) of its ranks)"
            )
            return Sequential()
        if asked == "auto":
            usual = self.default(world, TwoLevel)
            preset = world.scale.presets and self.fits(world, call, usual, asked) is None
            timed = self._timed(world, call, "graph" if capturing else "eager")
            return timed or (usual if preset else Sequential())
        plan = self.default(world, TwoLevel) if asked == TwoLevel.kind else asked
        reason = self.fits(world, call, plan, asked) if isinstance(plan, TwoLevel) else world.nodes_reason
        if reason is None:
            assert isinstance(plan, TwoLevel)
            return plan
        world.log_once(
            f"{self.title}: sequential instead of {asked if isinstance(asked, str) else asked.kind}: {reason}"
        )
        return Sequential()

    def _named(self, world: World, call: C, name: str, capturing: bool) -> Plan:
        if name != "auto":
            return self.default(world, next(kind for kind in self.runs if kind.kind == name))
        mode = "graph" if capturing else "eager"
        return self._timed(world, call, mode) or self.auto(world, call, mode)

    def _timed(self, world: World, call: C, mode: str) -> Plan | None:
        """Return the plan that was timed fastest for such calls, if it serves this one."""
        timed: Plan | None = world.choices.remembered(self._key(call), mode)
        return timed if timed is not None and self.fits(world, call, timed, "auto") is None else None

    def _key(self, call: C) -> Hashable:
        """Return the key of what calls that share a decision have in common."""
        return Op.knowledge, self.name, self.alike(call)

    def choice(self, world: World, call: C, operands: Operands) -> Choice[Plan]:
        """Return what "auto" chooses among for such a call. Its candidates may be collective."""
        from .planner.auto import unmeasured  # above the ops, which it finds in the registry

        def candidates() -> Sequence[Plan]:
            if world.nodes_reason is not None:
                named: Sequence[Plan] = self.over_nodes
            else:
                named = *self.candidates(world, call), *unmeasured(self, world, call)
            fitted = dict.fromkeys(self.fitted(call, plan) for plan in named)
            fit = [plan for plan in fitted if self.fits(world, call, plan, "auto") is None]
            return [plan for plan in fit if self.choose(world, call, plan, False) == plan]

        @functools.cache
        def timed() -> tuple[C, Operands]:
            return self.balanced(world, call, operands)

        def run(plan: Plan) -> None:
            what, given = timed()
            self.execute(world, what, plan, given, None)

        return Choice(
            self._key(call),
            lambda mode: self.choose(world, call, "auto", mode == "graph"),
            candidates,
            run,
            lambda plan: self.check_same_on_all_ranks(world, timed()[0], plan),
            trial_title(self.name, self.scaling(call)),
            self.sizes(call),
        )

    def check_plan(self, plan: str | Plan) -> None:
        """Raise ValueError for a plan, or the name of a kind, that the op does not have, or a field that it refuses."""
        if isinstance(plan, str):
            if plan != "auto" and plan not in self.kinds:
                raise ValueError(f'{self.title}: plan {plan!r} is not "auto", one of {sorted(self.kinds)}, or a Plan')
        elif type(plan) not in self.runs:
            raise ValueError(f"{self.title}: {plan} is not one of {[each.__name__ for each in self.runs]}")
        for name in self.refuses.get(type(plan), ()):  # type: ignore[arg-type]
            if getattr(plan, name) != getattr(type(plan), name):
                raise ValueError(f"{self.title}: {plan}: {name} means nothing to this op")

    @property
    def kinds(self) -> list[str]:
        """The names of the kinds of plans that serve it."""
        return list(dict.fromkeys(plan.kind for plan in self.runs))

    def laid(self, plan: Plan, operands: Operands) -> Operands:
        """Operands as the plan takes them: dense, if need be copies."""
        return type(operands)(*bulk(operands)) if self.takes is not None else tuple(bulk(operands))

    def execute(self, world: World, call: C, plan: Plan, operands: Operands, out: torch.Tensor | None) -> Returned:
        """Run a call that was decided. The result goes to memory of its own first where `out` is no place for bulk
        stores, or for tiles that are done before others have read what they need."""
        world.check()
        shape, dtype = self.outputs(world, call)[0]
        given = output(self.title, world, out, shape, dtype)
        if not call.rows:
            return self.returned(world, call, given, None)
        operands = self.laid(plan, operands)
        apart = out is not None and (out.data_ptr() % 16 != 0 or overlap(out, *operands))
        result = (world.zeros if self.partial else world.empty)(shape, dtype) if apart else given
        stream = world.current_stream()
        more = self.runs[type(plan)](world, call, plan, operands, result)
        if apart:
            world.copy(given, result, stream)
        world.finish(stream)
        return self.returned(world, call, given, more)


class Local(Op[C]):
    """An op in which no rank waits for another: it has one plan, and ranks agree on nothing."""

    def expected(self, world: World, call: C, mode: str) -> Plan:
        return Sequential()

    def check_same_on_all_ranks(self, world: World, call: C, plan: Plan, **more: Hashable) -> int | None:
        return None


def check_call(op: str, world: World, plan: str | Plan = "auto") -> None:
    """Raise TypeError for what is no World or no plan."""
    if not isinstance(world, World):
        raise TypeError(f"{op}: world must be a weft.World, got {type(world).__name__}")
    if not isinstance(plan, (str, Plan)):
        raise TypeError(f'{op}: plan must be "auto", a kind or a Plan, got {plan!r}')
