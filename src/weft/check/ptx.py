"""This module reads PTX as a graph of basic blocks and checks the rules of the protocol along every path.

`broken_rules(ptx)` returns each instruction that breaks a rule:

    release     no store before a release may still be in flight: ordinary stores have passed a block barrier, bulk
                (TMA) stores `cp.async.bulk.wait_group 0`, a proxy fence of global memory and a block barrier; before a
                relaxed atomic that serves as a release there is `fence.acq_rel.sys` too
    once        one thread makes each of a program's signals
    acquire     on every path from the kernel's start, an acquire, a block barrier (where one thread polls) and, for
                bulk loads, a proxy fence come before the first load that has to wait for others. A branch around
                nothing but a wait is treated as not taken: Triton generates it for a loop (over the tile's channels) or
                for an `if` (a flattened loop's next tile), and predicates the loads after it in the same way

The caller specifies which atomics are signals and which loads have to wait.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]

# The progress of an ordinary store, and of a bulk store, towards its release; of all paths, the worst state counts.
RELEASED, DRAINED, FENCED, COMPLETE, STORED = range(5)
# The steps that are still missing before an acquired value may be loaded.
READY, UNFENCED, UNSHARED, NOTHING = range(4)


@dataclass
class Instruction:
    """One instruction, or one block of inline assembly."""

    text: str
    file: str
    line: int
    number: int  # the line of the step in the PTX
    calls: tuple[tuple[str, int], ...] = ()  # the file, without its folder, and the line of each enclosing inlined call

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.source}): {self.text.split(';')[0].strip()[:90]}"


@dataclass
class BasicBlock:
    steps: list[Instruction] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def source_file(path: str) -> str:
    """Return the file of this package that corresponds to a file compiled by Triton, possibly in a different checkout
    (Triton's cache is keyed by content)."""
    own_path = PACKAGE / path.rpartition("/weft/")[2]
    return str(own_path) if own_path.is_file() else path


def files_of(ptx: str) -> dict[str, str]:
    """Return the files that the code names, by their numbers in the code."""
    named = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', ptx, re.M)
    return {number: source_file(f"{where}/{name}" if name else where) for number, where, name in named}


def blocks_of(ptx: str) -> dict[str, BasicBlock]:
    """Return the basic blocks by label, in program order; the first is the entry."""
    files = files_of(ptx)
    body = ptx[ptx.index("\n{", ptx.index(".entry")) :]
    blocks, name = {"entry": BasicBlock()}, "entry"
    assembly: list[str] | None = None
    location: tuple[str, int, tuple[tuple[str, int], ...]] = ("", 0, ())
    ended = False
    for number, raw in enumerate(body.splitlines()):
        line = raw.strip()
        if assembly is not None:
            if line.startswith("// end inline asm"):
                if any(assembly):  # `keep_before` has empty assembly
                    text = "\n".join(assembly)
                    blocks[name].steps.append(Instruction(text, location[0], location[1], number, location[2]))
                assembly = None
            elif not line.startswith(".loc"):  # since Triton 3.9 there are .loc lines between the assembly's lines
                assembly.append(line)
            continue
        if line.startswith("// begin inline asm"):
            assembly = []
            continue
        line, _, comment = (part.strip() for part in line.partition("//"))
        if match := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            calls = re.findall(r"@\[ ([^\s:]+):(\d+)", comment)
            location = files.get(match[1], ""), int(match[2]), tuple((name, int(line)) for name, line in calls)
        elif match := re.match(r"(\$L__BB\w+):", line):
            if not ended:
                blocks[name].after.append(match[1])
            name = match[1]
            blocks[name], ended = BasicBlock(), False
        elif match := re.match(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);", line):
            blocks[name].after.append(match[2])
            if match[1]:  # the code after a conditional branch is a separate block
                blocks[name].after.append(f"{name}+")
                name += "+"
                blocks[name] = BasicBlock()
            else:
                ended = True
        elif match := re.match(r"(\$L__BB\w+)[,;]", line):  # a line in a table of `brx.idx`
            blocks[name].after.append(match[1])
        elif line.startswith(("ret;", "brx.idx")):
            ended = True
        elif line and line[0] not in ".{}$()":
            blocks[name].steps.append(Instruction(line, location[0], location[1], number, location[2]))
    return blocks


TOKEN = re.compile(
    r"(?P<bulk_store>cp\.async\.bulk\.tensor\.\dd\.global\.shared)|(?P<bulk_load>cp\.async\.bulk\.tensor\.\dd\.shared)"
    r"|(?P<load>cp\.async\.c[ag]\.shared)"
    # A wait of weft.lang, and the code that Triton generates for an atomic that adds 0.
    r"|(?P<acquire>ld\.acquire)|(?P<acquire_by_atomic>(?<![\w.])ld\.global\.\w+\.acquire)"
    r"|(?P<plain_load>(?<![\w.])ld\.global)"
    r"|(?P<wait>cp\.async\.bulk\.wait_group\s+0)|(?P<proxy>fence\.proxy\.async(?:\.global)?;)"
    r"|(?P<fence>fence\.acq_rel\.sys)"
    r"|(?P<barrier>bar\.sync\s+0|barrier\.sync)|(?P<store>(?<!\.)st\.global)"
    r"|(?P<atomic>(?<![a-z])(?:atom|red)\.global\S*)"
)


def is_stream_local(step: Instruction) -> bool:
    """Return whether the step stores a word of `BlockChannel.state` or increments an epoch, as `end_call` does. Only
    later work on the stream reads these words."""
    return "ch.state" in step.source or re.search(r"tl\.store\((\w+), tl\.load\(\1\) \+ 1\)", step.source) is not None


ProtocolState = tuple[int, int, int]  # ordinary stores, bulk stores, acquire
Which = Callable[[Instruction], bool]


def any_instruction(step: Instruction) -> bool:
    return True


def no_instruction(step: Instruction) -> bool:
    return False


def from_weft_lang(step: Instruction) -> bool:
    """Return whether the step comes from weft.lang. Atomics in a kernel's own source may operate on data."""
    return step.file.startswith(f"{PACKAGE / 'lang'}/")


def follow(
    state: ProtocolState, step: Instruction, broken: list[str] | None, waits: Which, signal: Which
) -> ProtocolState:
    """Return the state after a step. The rules that the step breaks are appended to `broken`."""
    plain, bulk, acquired = state
    for token in TOKEN.finditer(step.text):
        kind = token.lastgroup
        if kind == "store" and not is_stream_local(step):
            plain = STORED
        elif kind == "bulk_store":
            bulk = STORED
        elif kind == "wait":
            bulk = min(bulk, COMPLETE)
        elif kind == "proxy":
            bulk = FENCED if bulk == COMPLETE else bulk
            acquired = READY if acquired == UNFENCED else acquired
        elif kind == "barrier":
            plain = min(plain, DRAINED)
            bulk = DRAINED if bulk == FENCED else bulk
            acquired = UNFENCED if acquired == UNSHARED else acquired
        elif kind == "fence":
            plain = RELEASED if plain == DRAINED else plain
            bulk = RELEASED if bulk == DRAINED else bulk
        elif kind == "acquire":
            acquired = UNSHARED if "%tid.x" in step.text else UNFENCED
        elif kind == "acquire_by_atomic":
            acquired = min(acquired, UNSHARED)
        elif kind in ("load", "bulk_load", "plain_load"):
            most = READY if kind == "bulk_load" else UNFENCED
            if broken is not None and acquired > most and waits(step):
                broken.append(f"acquire: may be loaded before the wait: {step}")
        elif kind == "atomic":
            if broken is not None and signal(step):
                broken += _wrong_signal(plain, bulk, step, token)
            if ".acq" in token[0]:
                acquired = min(acquired, UNSHARED)
    return plain, bulk, acquired


def _wrong_signal(plain: int, bulk: int, step: Instruction, token: re.Match[str]) -> list[str]:
    broken = []
    release = ".release" in token[0] or ".acq_rel" in token[0]
    most = DRAINED if release else RELEASED
    if "TICKET" not in step.source and (plain > most or bulk > most):
        store = "an ordinary store" if plain > most else "a bulk store"
        broken.append(f"release: {store} may still be in flight at {step}")
    if not re.match(r"@%p\d+\s+(atom|red)\.", step.text[: token.end()].splitlines()[-1]):
        broken.append(f"once: on every thread: {step}")
    return broken


def paths(blocks: dict[str, BasicBlock]) -> dict[str, list[str]]:
    """Return the edges of the graph, except edges that only skip a wait."""
    names = list(blocks)
    kinds = {
        name: {t.lastgroup for step in block.steps for t in TOKEN.finditer(step.text)} for name, block in blocks.items()
    }
    after = {}
    for i, name in enumerate(names):
        after[name] = list(blocks[name].after)
        if len(after[name]) == 2:
            for target in blocks[name].after:
                j = names.index(target)
                skipped = set().union(*(kinds[n] for n in names[i + 1 : j]))
                work = skipped & {"load", "bulk_load", "store", "bulk_store", "atomic"}
                # If the skipped blocks do not lead to the target, they are the first half of an if, and the target is
                # its second half.
                continues = any(target in blocks[n].after for n in names[i + 1 : j])
                if j > i and continues and skipped & {"acquire", "acquire_by_atomic"} and not work:
                    after[name].remove(target)
    return after


def broken_rules(ptx: str, waits: Which = no_instruction, signal: Which = any_instruction) -> list[str]:
    """Return the broken rules, as sentences. waits: returns whether a load reads memory that other programs or ranks
    write. signal: returns whether other programs wait for an atomic."""
    blocks = blocks_of(ptx)
    after = paths(blocks)
    states: dict[str, ProtocolState] = {"entry": (RELEASED, RELEASED, NOTHING)}
    queue = ["entry"]
    while queue:
        name = queue.pop()
        state = states[name]
        for step in blocks[name].steps:
            state = follow(state, step, None, waits, signal)
        for target in after[name]:
            old = states.get(target)
            worst = state if old is None else tuple(max(a, b) for a, b in zip(old, state, strict=True))
            if worst != old:
                states[target] = worst  # type: ignore[assignment]
                queue.append(target)
    broken = [f"no path leads to {name}" for name in blocks if name not in states and blocks[name].steps]
    for name, state in states.items():
        for step in blocks[name].steps:
            state = follow(state, step, broken, waits, signal)
    return broken


def steps_of(ptx: str) -> list[Instruction]:
    return [step for block in blocks_of(ptx).values() for step in block.steps]


def values_of(ptx: str) -> dict[str, list[str]]:
    """Return the instructions that compute each register, in the form "operation a, b"."""
    defined: dict[str, list[str]] = {}
    for step in steps_of(ptx):
        for line in step.text.splitlines():
            if match := re.match(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%\w+),(.*)", line):
                defined.setdefault(match[2], []).append(f"{match[1]} {match[3].strip(' ;')}")
    return defined


def counts(ptx: str, signal: Which) -> list[tuple[Instruction, str]]:
    """Return the signals that only one or a few threads execute, with their predicates."""
    matches = (
        (step, re.match(r"@(%p\d+)\s+(?:atom|red)\.global", step.text.splitlines()[-1])) for step in steps_of(ptx)
    )
    return [(step, match[1]) for step, match in matches if match and signal(step)]


def signals_not_by_thread_zero(ptx: str, signal: Which = any_instruction) -> list[str]:
    """Return the signals whose predicate does not depend on the thread's number."""
    defined, bad = values_of(ptx), []
    for step, predicate in counts(ptx, signal):
        seen, queue = set(), [predicate]
        while queue:
            register = queue.pop()
            if register not in seen:
                seen.add(register)
                queue += [r for text in defined.get(register, ()) for r in re.findall(r"%[\w.]+", text)]
        if "%tid.x" not in seen:
            bad.append(f"once: by no one thread: {step}")
    return bad


def signals_outside_first_warp(ptx: str, signal: Which = any_instruction) -> list[str]:
    """Return the relaxed signals to other GPUs that threads outside the first warp also execute: only the first warp
    executes the preceding fence."""
    defined = values_of(ptx)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
    do: dict[str, Callable[..., int]] = {"mov": lambda a: a, "and": lambda a, b: a & b, "or": lambda a, b: a | b}
    do |= {"shr": lambda a, b: a >> b, "bfe": lambda a, b, c: a >> b & (1 << c) - 1}
    do |= {"setp.eq": lambda a, b: a == b, "setp.ne": lambda a, b: a != b, "setp.lt": lambda a, b: a < b}

    def value(word: str, tid: int) -> int | None:
        """Return the value of the word in a thread, or None if the value is unknown (a predicate may then hold)."""
        if word == "%tid.x" or not word.startswith("%"):
            return tid if word == "%tid.x" else int(word, 0)
        texts = [*{*defined.get(word, [])}]
        if len(texts) != 1:
            return None
        operation, rest = texts[0].split(" ", 1)
        name = ".".join(operation.split(".")[: 2 if operation.startswith("setp") else 1])
        words = [w.strip() for w in rest.split(",")]
        if not all(re.fullmatch(r"%[\w.]+|-?\w+", w) for w in words) or name not in do:
            return None
        arguments = [value(w, tid) for w in words]
        if operation == "and.pred":
            return False if False in arguments else None if None in arguments else True
        return None if None in arguments else do[name](*arguments)

    return [
        f"release: not by the first warp: {step}"
        for step, predicate in counts(ptx, signal)
        if ".sys.relaxed" in step.text and any(value(predicate, tid) is not False for tid in range(32, threads))
    ]


def forward(blocks: dict[str, BasicBlock]) -> list[str]:
    """Return the blocks in an order in which each block follows all its predecessors, except for edges back to a loop's
    head."""
    seen, done, stack = {"entry"}, [], [("entry", iter(blocks["entry"].after))]
    while stack:
        name, rest = stack[-1]
        target = next((t for t in rest if t not in seen), None)
        if target is None:
            done.append(name)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(blocks[target].after)))
    return done[::-1]


def loads_before_waits(ptx: str, waits: Which) -> list[str]:
    """Return the loads that no path reaches through a wait (without edges back to a loop's head): the compiler has
    moved them before the wait. A path around the wait that the source also contains, such as around a loop with no
    iterations, is allowed."""
    blocks = blocks_of(ptx)
    order = {name: i for i, name in enumerate(forward(blocks))}
    before, broken = {"entry": NOTHING}, list[str]()
    for name in order:
        state: ProtocolState = (RELEASED, RELEASED, before[name])
        for step in blocks[name].steps:
            state = follow(state, step, broken, waits, no_instruction)
        for target in blocks[name].after:
            if order[target] > order[name]:
                before[target] = min(state[2], before.get(target, NOTHING))
    return broken


@functools.cache
def _statements(file: str) -> list[tuple[int, int]]:
    """Return the first and last line of each statement of a file, the shortest first."""
    try:
        nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        return []
    lines = [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.stmt)]
    return sorted(lines, key=lambda s: s[1] - s[0])


def _may_be_same_calls(calls: Sequence[tuple[str, int]], awaited: Sequence[tuple[str, int]]) -> bool:
    """Return whether two lists of calls may be the same calls. The compiler may record a different line of the
    statement that contains a call."""
    if not calls or len(calls) != len(awaited):
        return True
    for (name, line), (file, awaited_line) in zip(calls, awaited, strict=True):
        first_line, last_line = next(
            (s for s in _statements(file) if s[0] <= awaited_line <= s[1]), (awaited_line, awaited_line)
        )
        if name != Path(file).name or not first_line <= line <= last_line:
            return False
    return True


def broken_kernel_rules(ptx: str, ttgir: str, awaited: Collection[tuple[tuple[str, int], ...]]) -> list[str]:
    """Return the broken rules of a kernel, assuming that only weft.lang's atomics are its signals. awaited: the loads
    that need a wait and follow one in the source. Each load is given by its file and line, followed by the file and
    line of each enclosing call. If a function is called twice, once after a wait and once where no wait is needed, one
    line contains two loads."""
    calls_by_line: dict[tuple[tuple[str, ...], int], list[Sequence[tuple[str, int]]]] = {}
    for (file, line), *calls in awaited:  # by folder and file, since Triton's cache may name a different checkout
        calls_by_line.setdefault((Path(file).parts[-2:], line), []).append(calls)

    def waits(step: Instruction) -> bool:
        return any(
            _may_be_same_calls(step.calls, calls)
            for calls in calls_by_line.get((Path(step.file).parts[-2:], step.line), ())
        )

    broken = loads_before_waits(ptx, waits)
    broken += broken_rules(ptx, signal=from_weft_lang)
    broken += signals_not_by_thread_zero(ptx, from_weft_lang) + signals_outside_first_warp(ptx, from_weft_lang)
    if "ttg.warp_specialize" in ttgir and (calls_by_line or "ld.acquire" in ptx):
        broken.append("acquire: warp_specialize and waits do not go together: the compiler may drop the wait")
    # Several instructions of one statement are reported once.
    return list({rule.rpartition("): ")[0] or rule: rule for rule in broken}.values())
