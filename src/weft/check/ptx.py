"""Reads PTX as a graph of basic blocks and follows what a protocol rests on along every path.

`broken_rules(ptx)` names each place where a rule does not hold:

    release     nothing stored before a release may still be on its way: ordinary stores have passed a block barrier,
                bulk (TMA) stores `cp.async.bulk.wait_group 0`, a proxy fence of global memory and a block barrier;
                before a relaxed count that stands for a release also `fence.acq_rel.sys`
    once        a program's signals are made by one thread
    acquire     on every path from the kernel's start, an acquire, a block barrier (where one thread polls) and, for
                bulk loads, a proxy fence stand before the first load that has to wait for others. A branch around
                nothing but a wait counts as not taken: Triton makes it of a loop (over the tile's channels) or of
                `if` (a flattened loop's next tile), and predicates the loads behind it alike

Which atomics are signals, and which loads have to wait, the caller says.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triton import JITFunction

PACKAGE = Path(__file__).resolve().parents[1]

# How far an ordinary, and a bulk, store may be from being released: the worst over all paths counts.
RELEASED, DRAINED, FENCED, COMPLETE, STORED = range(5)
# What an acquire still lacks
READY, UNFENCED, UNSHARED, NOTHING = range(4)


@dataclass
class Instruction:
    """One instruction, or one block of inline assembly."""

    text: str
    file: str
    line: int
    number: int  # in the PTX
    calls: tuple[tuple[str, int], ...] = ()  # file, without its folder, and line of each call that was made part of it

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
    """This package's file for one that Triton compiled, maybe of another checkout (its cache goes by content)."""
    own = PACKAGE / path.rpartition("/weft/")[2]
    return str(own) if own.is_file() else path


def blocks_of(ptx: str) -> dict[str, BasicBlock]:
    """Basic blocks by label, in program order; the first is the entry."""
    named = re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', ptx, re.M)
    files = {number: source_file(f"{where}/{name}" if name else where) for number, where, name in named}
    body = ptx[ptx.index("\n{", ptx.index(".entry")) :]
    blocks, name = {"entry": BasicBlock()}, "entry"
    assembly: list[str] | None = None
    at: tuple[str, int, tuple[tuple[str, int], ...]] = ("", 0, ())
    ended = False
    for number, raw in enumerate(body.splitlines()):
        line = raw.strip()
        if assembly is not None:
            if line.startswith("// end inline asm"):
                if any(assembly):  # `keep_before` has none
                    blocks[name].steps.append(Instruction("\n".join(assembly), at[0], at[1], number, at[2]))
                assembly = None
            elif not line.startswith(".loc"):  # of its own lines, since Triton 3.9
                assembly.append(line)
            continue
        if line.startswith("// begin inline asm"):
            assembly = []
            continue
        line, _, said = (part.strip() for part in line.partition("//"))
        if found := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            calls = re.findall(r"@\[ ([^\s:]+):(\d+)", said)
            at = files.get(found[1], ""), int(found[2]), tuple((name, int(line)) for name, line in calls)
        elif found := re.match(r"(\$L__BB\w+):", line):
            if not ended:
                blocks[name].after.append(found[1])
            name = found[1]
            blocks[name], ended = BasicBlock(), False
        elif found := re.match(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L__BB\w+);", line):
            blocks[name].after.append(found[2])
            if found[1]:  # goes on in a block of its own
                blocks[name].after.append(f"{name}+")
                name += "+"
                blocks[name] = BasicBlock()
            else:
                ended = True
        elif found := re.match(r"(\$L__BB\w+)[,;]", line):  # in a table of `brx.idx`
            blocks[name].after.append(found[1])
        elif line.startswith(("ret;", "brx.idx")):
            ended = True
        elif line and line[0] not in ".{}$()":
            blocks[name].steps.append(Instruction(line, at[0], at[1], number, at[2]))
    return blocks


TOKEN = re.compile(
    r"(?P<bulk_store>cp\.async\.bulk\.tensor\.\dd\.global\.shared)|(?P<bulk_load>cp\.async\.bulk\.tensor\.\dd\.shared)"
    r"|(?P<load>cp\.async\.c[ag]\.shared)|(?P<plain_load>(?<![\w.])ld\.global)"
    r"|(?P<wait>cp\.async\.bulk\.wait_group\s+0)|(?P<proxy>fence\.proxy\.async(?:\.global)?;)"
    r"|(?P<fence>fence\.acq_rel\.sys)"
    r"|(?P<barrier>bar\.sync\s+0|barrier\.sync)|(?P<acquire>ld\.acquire)|(?P<store>(?<!\.)st\.global)"
    r"|(?P<atomic>(?<![a-z])(?:atom|red)\.global\S*)"
)


def own_words(step: Instruction) -> bool:
    """Words of `BlockChannel.state` and the arena's turn: read by later work of the stream only."""
    return "ch.state" in step.source or "tl.store(turn" in step.source


State = tuple[int, int, int]  # ordinary stores, bulk stores, acquire
Which = Callable[[Instruction], bool]


def every(step: Instruction) -> bool:
    return True


def none(step: Instruction) -> bool:
    return False


def of_the_language(step: Instruction) -> bool:
    """Whether the step is made by weft.lang. What a kernel's author makes of atomics may be data."""
    return step.file.startswith(f"{PACKAGE / 'lang'}/")


def within(step: Instruction, functions: Sequence[JITFunction]) -> bool:
    """Whether the step comes from one of these `weft.jit` functions."""
    for fn in functions:
        code = fn.fn.__code__
        last = max(line for _, _, line in code.co_lines() if line is not None)
        if step.file == code.co_filename and code.co_firstlineno <= step.line <= last:
            return True
    return False


def follow(state: State, at: Instruction, broken: list[str] | None, waits: Which, signal: Which) -> State:
    """The state after a step; with `broken`, notes what it may not do in the state before."""
    plain, bulk, acquired = state
    for token in TOKEN.finditer(at.text):
        kind = token.lastgroup
        if kind == "store" and not own_words(at):
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
            acquired = UNSHARED if "%tid.x" in at.text else UNFENCED
        elif kind in ("load", "bulk_load", "plain_load"):
            most = READY if kind == "bulk_load" else UNFENCED
            if broken is not None and acquired > most and waits(at):
                broken.append(f"acquire: may be loaded before the wait: {at}")
        elif kind == "atomic":
            if broken is not None and signal(at):
                broken += _wrong_signal(plain, bulk, at, token)
            if ".acq" in token[0]:
                acquired = min(acquired, UNSHARED)
    return plain, bulk, acquired


def _wrong_signal(plain: int, bulk: int, at: Instruction, token: re.Match[str]) -> list[str]:
    wrong = []
    release = ".release" in token[0] or ".acq_rel" in token[0]
    most = DRAINED if release else RELEASED
    if "TICKET" not in at.source and (plain > most or bulk > most):
        what = "an ordinary store" if plain > most else "a bulk store"
        wrong.append(f"release: {what} may still be on its way at {at}")
    if not re.match(r"@%p\d+\s+(atom|red)\.", at.text[: token.end()].splitlines()[-1]):
        wrong.append(f"once: on every thread: {at}")
    return wrong


def paths(blocks: dict[str, BasicBlock]) -> dict[str, list[str]]:
    """Edges of the graph, without those around nothing but a wait."""
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
                if j > i and "acquire" in skipped and not work:
                    after[name].remove(target)
    return after


def descriptors(ptx: str) -> list[list[str]]:
    """Registers that hold the address of each tensor descriptor argument, in their order."""
    head = ptx[ptx.index(".entry") : ptx.index("\n{", ptx.index(".entry"))]
    out = []
    for param in re.findall(r"\.b8 (\w+)\[128\]", head):
        moved = re.findall(rf"mov\.b(?:32|64)\s+(%rd?\d+), {param};", ptx)
        moved += [r for m in moved for r in re.findall(rf"cvt\.u64\.u32\s+(%rd\d+), {m};", ptx)]  # since Triton 3.9
        out.append([r for m in moved for r in re.findall(rf"cvta\.param\.u64\s+(%rd\d+), {m};", ptx)])
    return out


def broken_rules(ptx: str, waits: Which = none, signal: Which = every) -> list[str]:
    """waits: which loads read what other programs or ranks write. signal: which atomics others wait for."""
    blocks = blocks_of(ptx)
    after = paths(blocks)
    states: dict[str, State] = {"entry": (RELEASED, RELEASED, NOTHING)}
    queue = ["entry"]
    while queue:
        name = queue.pop()
        state = states[name]
        for step in blocks[name].steps:
            state = follow(state, step, None, waits, signal)
        for target in after[name]:
            old = states.get(target)
            joined = state if old is None else tuple(max(a, b) for a, b in zip(old, state, strict=True))
            if joined != old:
                states[target] = joined  # type: ignore[assignment]
                queue.append(target)
    broken = [f"no path leads to {name}" for name in blocks if name not in states and blocks[name].steps]
    for name, state in states.items():
        for step in blocks[name].steps:
            state = follow(state, step, broken, waits, signal)
    return broken


def steps_of(ptx: str) -> list[Instruction]:
    return [step for block in blocks_of(ptx).values() for step in block.steps]


def values_of(ptx: str) -> dict[str, list[str]]:
    """Register: what is computed into it, as "operation a, b"."""
    defined: dict[str, list[str]] = {}
    for step in steps_of(ptx):
        for line in step.text.splitlines():
            if found := re.match(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(%\w+),(.*)", line):
                defined.setdefault(found[2], []).append(f"{found[1]} {found[3].strip(' ;')}")
    return defined


def counts(ptx: str, signal: Which) -> list[tuple[Instruction, str]]:
    """Signals that one thread or a few make, with their predicate."""
    found = ((step, re.match(r"@(%p\d+)\s+(?:atom|red)\.global", step.text.splitlines()[-1])) for step in steps_of(ptx))
    return [(step, match[1]) for step, match in found if match and signal(step)]


def made_by_thread_zero(ptx: str, signal: Which = every) -> list[str]:
    """Signals whose predicate does not come from the thread's number."""
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


def behind_the_first_warps_fence(ptx: str, signal: Which = every) -> list[str]:
    """Relaxed counts for other GPUs, which rest on a fence by the first warp, that other warps' threads make too."""
    defined = values_of(ptx)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])  # type: ignore[index]
    do: dict[str, Callable[..., int]] = {"mov": lambda a: a, "and": lambda a, b: a & b, "or": lambda a, b: a | b}
    do |= {"shr": lambda a, b: a >> b, "bfe": lambda a, b, c: a >> b & (1 << c) - 1}
    do |= {"setp.eq": lambda a, b: a == b, "setp.ne": lambda a, b: a != b, "setp.lt": lambda a, b: a < b}

    def value(word: str, tid: int) -> int | None:
        """None: not known, of a predicate: it may hold."""
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
        given = [value(w, tid) for w in words]
        if operation == "and.pred":
            return False if False in given else None if None in given else True
        return None if None in given else do[name](*given)

    return [
        f"release: not by the first warp: {step}"
        for step, predicate in counts(ptx, signal)
        if ".sys.relaxed" in step.text and any(value(predicate, tid) is not False for tid in range(32, threads))
    ]


def forward(blocks: dict[str, BasicBlock]) -> list[str]:
    """The blocks, each behind all that lead to it other than by an edge back to a loop's head."""
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
    """Loads to which no way leads through a wait, edges back to a loop's head left out: the compiler has put them
    before it. A way past a wait that the source has too, as around a loop of no turns, is not held against the load."""
    blocks = blocks_of(ptx)
    order = {name: i for i, name in enumerate(forward(blocks))}
    before, broken = {"entry": NOTHING}, list[str]()
    for name in order:
        state: State = (RELEASED, RELEASED, before[name])
        for step in blocks[name].steps:
            state = follow(state, step, broken, waits, none)
        for target in blocks[name].after:
            if order[target] > order[name]:
                before[target] = min(state[2], before.get(target, NOTHING))
    return broken


@functools.cache
def _statements(file: str) -> list[tuple[int, int]]:
    """First and last line of each, the shortest first."""
    try:
        nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        return []
    lines = [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.stmt)]
    return sorted(lines, key=lambda s: s[1] - s[0])


def _leads(calls: Sequence[tuple[str, int]], awaited: Sequence[tuple[str, int]]) -> bool:
    """Whether these may be the same calls: one may be said at another line of its statement."""
    if not calls or len(calls) != len(awaited):
        return True
    for (name, line), (file, at) in zip(calls, awaited, strict=True):
        first, last = next((s for s in _statements(file) if s[0] <= at <= s[1]), (at, at))
        if name != Path(file).name or not first <= line <= last:
            return False
    return True


def broken_by_a_kernel(ptx: str, ttgir: str, awaited: Collection[tuple[tuple[str, int], ...]]) -> list[str]:
    """The rules, of a kernel of which is known only that weft.lang's atomics are its signals. awaited: loads, by file
    and line and those of the calls around them, that need a wait and come after one in the source. A function that is
    called twice, behind a wait and where there is nothing to wait for, is one line but two loads."""
    places: dict[tuple[tuple[str, ...], int], list[Sequence[tuple[str, int]]]] = {}
    for (file, line), *calls in awaited:  # by folder and file: Triton's cache may name the file as it was elsewhere
        places.setdefault((Path(file).parts[-2:], line), []).append(calls)

    def waits(step: Instruction) -> bool:
        return any(_leads(step.calls, calls) for calls in places.get((Path(step.file).parts[-2:], step.line), ()))

    broken = loads_before_waits(ptx, waits)
    broken += broken_rules(ptx, signal=of_the_language)
    broken += made_by_thread_zero(ptx, of_the_language) + behind_the_first_warps_fence(ptx, of_the_language)
    if "ttg.warp_specialize" in ttgir and (places or "ld.acquire" in ptx):
        broken.append("acquire: warp_specialize and waits do not go together: the compiler may drop the wait")
    return list(
        {said.rpartition("): ")[0] or said: said for said in broken}.values()
    )  # one of a statement's instructions
