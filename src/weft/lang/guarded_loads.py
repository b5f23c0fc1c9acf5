"""This module keeps the loads of a loop after the loop's waits, whatever Triton's pipeliner does to the loop.

A pipelined loop issues the loads of later iterations ahead of time, but does not move waits. So loads would run before
the wait on which they depend. `guard_loads` rewrites a kernel's Triton IR, with all calls inlined, before Triton's own
passes. `is_pipelined` returns whether Triton pipelines a loop. Each pipelined loop with a wait is rewritten in one of
two ways:

    no signal in the loop     Every load is made to depend on the last wait before it in the source, in this iteration
                              or the previous one: a zero is added to the load's address. An opaque instruction computes
                              the zero from the word that the wait returned, so the pipeliner has to move the wait along
                              with the load. The wait is inside an `if` that is always taken, because the pipeliner can
                              omit an `if` in iterations that do not exist.
    a signal in the loop      The loop is neither pipelined nor flattened. Otherwise a wait could run ahead of an
                              earlier notification by the same program, and the notification for which it waits may
                              depend on the earlier one through other programs or ranks.

In both cases the waits and signals of a program stay in the order of the source, so the compiled kernel hangs only if
the source program would hang. Loops without waits and loops that are not pipelined stay unchanged, because only the
pipeliner moves a load across the assembly of a wait.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

VALUE = r"%[\w.$-]+(?:#\d+)?"
ZERO_HINT = 1 << 20  # Triton assumes that the zero is divisible by this number, so that an address keeps its alignment
ADDRESS_OPS = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast")
BULK_LOADS = ("tt.descriptor_load", "tt.descriptor_gather")
LOADS = ("tt.load", *BULK_LOADS)


@dataclass(eq=False)
class Operation:
    """An operation of the IR: the text up to the first region, the regions and the text between them, and the text
    after the last region."""

    text: str
    regions: list[list[Operation]] = field(default_factory=list)
    separators: list[str] = field(default_factory=list)
    end: str = ""

    @property
    def name(self) -> str:
        match = re.match(rf'\s*(?:{VALUE}(?::\d+)?(?:, )?)*(?: = )?"?([\w.]+)', self.text)
        return match[1] if match else ""

    @property
    def result(self) -> str:
        match = re.match(rf"\s*({VALUE})(?::\d+)? = ", self.text)
        return match[1] if match else ""

    @property
    def location(self) -> str:
        match = re.search(r" loc\(.*\)$", self.end or self.text)
        return match[0] if match else ""

    def inside(self) -> Iterator[Operation]:
        """Yield this operation and all operations inside it."""
        yield self
        for op in itertools.chain.from_iterable(self.regions):
            yield from op.inside()

    def lines(self) -> Iterator[str]:
        yield self.text
        for i, region in enumerate(self.regions):
            for op in region:
                yield from op.lines()
            yield self.separators[i] if i < len(self.separators) else self.end


def parse(text: str) -> list[Operation]:
    """Parse printed IR and return its operations. Triton prints one operation per line; a brace at the end of a line
    opens a region."""
    top: list[Operation] = []
    stack: list[tuple[Operation | None, list[Operation]]] = [(None, top)]
    for line in text.splitlines():
        bare = line.strip()
        owner, block = stack[-1]
        if bare.startswith("}") and owner is not None:
            if bare.endswith("{"):
                owner.separators.append(line)
                owner.regions.append([])
                stack[-1] = owner, owner.regions[-1]
            else:
                owner.end = line
                stack.pop()
            continue
        op = Operation(line)
        block.append(op)
        if bare.endswith("{"):
            op.regions.append([])
            stack.append((op, op.regions[0]))
    return top


def may_wait(text: str) -> bool:
    """Return whether printed IR may contain loads that must be guarded."""
    return "scf.for" in text and ("ld.acquire" in text or "tt.atomic" in text)


def is_loop(op: Operation) -> bool:
    return op.name in ("scf.for", "scf.while")


def is_pipelined(loop: Operation) -> bool:
    """Return whether Triton may issue loads of later iterations of this loop ahead of time. Triton may do so if the
    loop is flattened or contains other loops only inside an `if`. In such a loop, it moves loads whose values are
    operands of a dot product, or any loads if the kernel's author specifies a number of stages."""
    if loop.name != "scf.for" or "tt.flatten" not in loop.end and any(map(is_loop, loop.regions[0])):
        return False
    if stages := re.search(r"tt\.num_stages = (\d+)", loop.end):
        return int(stages[1]) > 1
    return any(op.name.startswith("tt.dot") for op in loop.inside())


def is_wait(op: Operation) -> bool:
    """Return whether the operation is an acquire. weft's waits, and atomics on one word, are acquires."""
    if op.name == "tt.elementwise_inline_asm":
        return "ld.acquire" in op.text
    return op.name.startswith("tt.atomic") and re.search(r"\bacq", op.text) is not None and "tensor<" not in op.text


def is_signal(op: Operation) -> bool:
    """Return whether other programs may wait for the operation. They may wait for an atomic, and for assembly that has
    effects and is not a wait."""
    if op.name == "tt.elementwise_inline_asm":
        return "pure = true" not in op.text and "ld.acquire" not in op.text
    return op.name.startswith("tt.atomic")


def guard_loads(text: str) -> str | None:
    """Return the IR after rewriting it so that every load in a pipelined loop stays after the loop's waits. Return None
    if nothing has to change."""
    top = parse(text)
    rewriting = Rewriting()
    changed = False
    for function in (op for root in top for op in root.inside() if op.name == "tt.func"):
        changed |= _visit(function, rewriting)
    return "\n".join(line for op in top for line in op.lines()) + "\n" if changed else None


def _visit(op: Operation, rewriting: Rewriting) -> bool:
    """Rewrite the pipelined loops inside `op`, and return whether one of them had a wait."""
    changed = False
    for region in op.regions:
        for inner in list(region):
            inside = list(inner.inside())[1:]
            if is_pipelined(inner) and any(map(is_wait, inside)):
                changed = True
                if any(map(is_signal, inside)) or not _can_depend(inside):
                    in_order(inner)
                    _visit(inner, rewriting)
                else:
                    region[:] = rewriting.guarded(region, inner)
            else:
                changed |= _visit(inner, rewriting)
    return changed


def _can_depend(inside: Iterable[Operation]) -> bool:
    """Return whether loads can be made to depend on these waits. The waits must be assembly, and no load may use a
    block pointer."""
    for op in inside:
        if is_wait(op) and not (op.name == "tt.elementwise_inline_asm" and f"-> i32{op.location}" in op.text):
            return False
        if op.name == "scf.while" and any(map(is_wait, op.inside())):
            return False
        if op.name == "tt.load" and "!tt.ptr<tensor<" in op.text:
            return False
    return True


def in_order(loop: Operation) -> None:
    """Keep Triton from pipelining or flattening the loop."""
    attributes = re.search(r"\{(.*?)\}(?= loc|$)", loop.end[loop.end.index("}") + 1 :])
    names = attributes[1].split(", ") if attributes else []
    kept = [name for name in names if not name.startswith(("tt.num_stages", "tt.flatten"))]
    indent = loop.end[: loop.end.index("}")]
    loop.end = f"{indent}}} {{{', '.join([*kept, 'tt.num_stages = 1 : i32'])}}}{loop.location}"


class Rewriting:
    """A rewriter that makes the loads of loops depend on the waits of these loops. In the methods, `word` is the name
    of the zero that depends on the last wait so far."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._start = ""  # a zero that does not depend on a wait

    def _new(self) -> str:
        return f"%weft_{next(self._count)}"

    def guarded(self, region: list[Operation], loop: Operation) -> list[Operation]:
        """Rewrite the loop, and return the operations of the block that contains it."""
        self._start = self._new()
        i = region.index(loop)
        start = Operation(f"{self._start} = arith.constant 0 : i32")
        if _has_early_load(loop.regions[0]):
            self._loop(loop, self._start, False)
        else:
            loop.regions[0], _ = self._block(loop.regions[0], self._start, False)
        return [*region[:i], start, loop, *region[i + 1 :]]

    def _zero(self, words: list[str], location: str) -> tuple[Operation, str]:
        """Return an opaque zero that depends on these words."""
        name = self._new()
        words = [word for word in words if word != self._start]
        text = (
            f'{name} = tt.elementwise_inline_asm "mov.b32 $0, 0;" {{constraints = "=r{",r" * len(words)}", '
            f"packed_element = 1 : i32, pure = true, tt.divisibility = dense<{ZERO_HINT}> : tensor<1xi32>}} "
            f"{', '.join(words)} : {', '.join(['i32'] * len(words))} -> i32{location}"
        )
        return Operation(text), name

    def _loop(self, loop: Operation, word: str, conditional: bool) -> tuple[list[Operation], str]:
        """Rewrite a loop with waits so that it passes the word from one iteration to the next and yields it. Return the
        operations that must follow the loop, and the word. conditional: whether the loop is inside an `if` of a
        pipelined loop."""
        carried, result = self._new(), self._new()
        if "iter_args(" in loop.text:
            arguments = rf"iter_args(\1, {carried} = {word}) -> (\2, i32)"
            loop.text = re.sub(r"iter_args\((.*?)\) -> \((.*)\)", arguments, loop.text)
        else:
            loop.text = re.sub(r" +(: \w+ \{)$", rf" iter_args({carried} = {word}) -> (i32) \1", loop.text)
        loop.regions[0], word = self._block(loop.regions[0], carried, conditional)
        _yield(loop.regions[0], word)
        _add_result(loop, result)
        zero, word = self._zero([result], loop.location)
        return [zero], word

    def _if(self, op: Operation, word: str, conditional: bool) -> tuple[list[Operation], str]:
        """Rewrite an `if` with waits in the same way as `_loop` rewrites a loop."""
        result = self._new()
        for i, region in enumerate(op.regions):
            op.regions[i], last = self._block(region, word, True)
            _yield(op.regions[i], last)
        if len(op.regions) == 1:
            op.separators.append("} else {")
            op.regions.append([])
            _yield(op.regions[1], word)
        if " -> (" in op.text:
            op.text = re.sub(r" -> \((.*)\) \{$", r" -> (\1, i32) {", op.text)
        else:
            op.text = re.sub(r" \{$", " -> (i32) {", op.text)
        _add_result(op, result)
        zero, word = self._zero([result], op.location)
        return [zero], word

    def _block(self, block: list[Operation], word: str, conditional: bool) -> tuple[list[Operation], str]:
        """Rewrite a block so that its loads depend on the last wait before them in the block, or on `word` if there is
        none. Return the block, and the word at its end. If the block is not conditional and contains no loop, its waits
        need a separate `if`."""
        out: list[Operation] = []
        defined: dict[str, Operation] = {}  # the operations since the last wait that compute pointers, by result name
        predicated = not conditional and not any(map(is_loop, block))
        alone = _numbers_for_waits(block) if predicated else ()
        for op in block:
            if is_wait(op):
                zero, last = self._zero([op.result, word], op.location)
                out += *(self._if_taken(op) if predicated else [op]), zero
                word, defined = last, {}
            elif op.regions and any(map(is_wait, op.inside())):
                rewrite = self._loop if is_loop(op) else self._if
                after, word = rewrite(op, word, conditional)
                out += op, *after
                defined = {}
            else:
                for i, region in enumerate(op.regions):
                    op.regions[i], _ = self._block(region, word, True)
                out.append(op)
                if op.name == "tt.load":
                    self._guard_pointer(op, word, defined, out)
                    if op in alone:
                        out[-1:] = self._if_taken(op)
                elif op.name in BULK_LOADS:
                    self._guard_index(op, word, out)
                if op.result:
                    defined[op.result] = op
        return out, word

    def _if_taken(self, op: Operation) -> list[Operation]:
        """Wrap the operation in an `if` that is always taken, and return the resulting operations. Triton cannot detect
        that the condition is always true; only the assembler can."""
        programs, least, taken, inner_result, otherwise = (self._new() for _ in range(5))
        result, kind, location = op.result, op.text.removesuffix(op.location).rsplit(" ", 1)[1], op.location
        kind = re.sub(r"^!tt\.ptr<(.*)>$", r"\1", kind) if op.name == "tt.load" else kind
        inner = replace(op, text=op.text.replace(f"{result} = ", f"{inner_result} = ", 1))
        yields = [Operation(f"scf.yield {name} : {kind}") for name in (inner_result, otherwise)]
        return [
            Operation(f"{programs} = tt.get_num_programs x : i32{location}"),
            Operation(f"{least} = arith.constant 0 : i32"),
            Operation(f"{otherwise} = arith.constant 0 : {kind}"),
            Operation(f"{taken} = arith.cmpi sgt, {programs}, {least} : i32{location}"),
            Operation(
                f"{result} = scf.if {taken} -> ({kind}) {{",
                [[inner, yields[0]], [yields[1]]],
                ["} else {"],
                f"}}{location}",
            ),
        ]

    def _guard_pointer(self, load: Operation, word: str, defined: dict[str, Operation], out: list[Operation]) -> None:
        """Add the zero to the load's pointer. If a block of pointers is computed from one scalar after the wait, add
        the zero to the scalar instead."""
        user = load
        while (source := defined.get(_operand(user))) is not None and source.name in ADDRESS_OPS:
            user = source
        pointer = _operand(user)
        if pointer.startswith("%weft_"):
            return  # the zero was added to this pointer for an earlier load
        kind = _type(user)
        added, offset, offset_kind = self._new(), word, "i32"
        guards = []
        if kind.startswith("tensor<"):
            offset = self._new()
            offset_kind = re.sub(r"!tt\.ptr<.*>(?=>$)", "i32", kind)
            guards.append(Operation(f"{offset} = tt.splat {word} : i32 -> {offset_kind}{load.location}"))
        guards.append(Operation(f"{added} = tt.addptr {pointer}, {offset} : {kind}, {offset_kind}{load.location}"))
        user.text = user.text.replace(f"{user.name} {pointer}", f"{user.name} {added}", 1)
        i = next((i for i, op in enumerate(out) if op is user), len(out))
        out[i:i] = guards

    def _guard_index(self, load: Operation, word: str, out: list[Operation]) -> None:
        """Add the zero to the last index of a load through a descriptor."""
        indices = re.search(r"\[(.*?)\]", load.text)
        assert indices is not None
        last, added = indices[1].split(", ")[-1], self._new()
        out[-1:] = [Operation(f"{added} = arith.addi {last}, {word} : i32{load.location}"), load]
        load.text = f"{load.text[: indices.end() - 1 - len(last)]}{added}{load.text[indices.end() - 1 :]}"


def _has_early_load(block: list[Operation]) -> bool:
    """Return whether a load comes before the block's first wait. Loads that compute the arguments of the wait do not
    count."""
    arguments = _numbers_for_waits(block)
    for op in block:
        if any(map(is_wait, op.inside())):
            return any(map(_has_early_load, op.regions))
        if any(inner.name in LOADS and inner not in arguments for inner in op.inside()):
            return True
    return False


def _numbers_for_waits(block: list[Operation]) -> set[Operation]:
    """Return the loads of integers from which a wait's arguments are computed. If these loads were not inside an `if`,
    the pipeliner would treat their values as addresses for the loads after the wait, and halve the pipeline's depth."""
    by_result = {op.result: op for op in block if op.result}
    queue = [op for op in block if any(map(is_wait, op.inside()))]
    seen = set[Operation]()
    while queue:
        op = queue.pop()
        if op not in seen:
            seen.add(op)
            queue += [by_result[name] for name in re.findall(VALUE, " ".join(op.lines())) if name in by_result]
    return {op for op in seen if op.name == "tt.load" and re.fullmatch(r"!tt\.ptr<i\d+>", _type(op))}


def _operand(op: Operation) -> str:
    """Return the first operand."""
    match = re.search(rf"{re.escape(op.name)} ({VALUE})", op.text)
    return match[1] if match else ""


def _type(op: Operation) -> str:
    """Return the type of the first operand."""
    types = op.text.removesuffix(op.location).rsplit(" : ", 1)[1]
    return types.split(" -> ")[0].split(", ")[0].strip()


def _add_result(op: Operation, name: str) -> None:
    bare = op.text.lstrip()
    op.text = re.sub(r" = scf\.", f", {name} = scf.", bare, count=1) if bare.startswith("%") else f"{name} = {bare}"


def _yield(block: list[Operation], word: str) -> None:
    """Add the word to the values that the block yields."""
    if block and block[-1].name == "scf.yield":
        last = block[-1]
        values, types = last.text.removesuffix(last.location).rsplit(" : ", 1)
        last.text = f"{values}, {word} : {types}, i32{last.location}"
    else:
        block.append(Operation(f"scf.yield {word} : i32"))
