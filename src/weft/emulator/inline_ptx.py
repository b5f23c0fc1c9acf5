"""Inline PTX in kernels: the instructions that published kernels use to synchronise.

`tl.inline_asm_elementwise` runs its text for each element of a block, on the threads that hold that element. Every
thread of the program holds a scalar. In the emulator these threads take turns: each thread runs until it jumps
backwards, which means that its spin loop has not ended. The model knows

    ld, st           ordinary accesses; with .volatile, .relaxed, .acquire or .release atomic ones, of one thread
    atom, red        atomic updates of one thread
    fence, membar    the thread's later relaxed accesses release, and its earlier ones acquire
    bar.sync 0       a barrier of the program's threads

and moves, comparisons and integer arithmetic; it refuses any other instruction, and names it. An acquire by one thread
orders the other threads of its program only after their next barrier (`Programs.thread_access`).

A value that the text computes from %tid or %laneid has a separate value for each thread (`ThreadTensor`). As the
condition of an `if`, such a value selects the threads that run the body; `interpret` stores them in `Task.threads`.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import triton.language as tl

from ..errors import Unsupported
from . import interpret
from .interpret import TensorHandle

_SIZES = {"pred": 1, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
_SIZES |= {f"{kind}{8 * size}": size for kind in "bus" for size in (1, 2, 4, 8)}
_ORDERS = {
    "weak": "",
    "relaxed": "relaxed",
    "volatile": "relaxed",
    "acquire": "acquire",
    "release": "release",
    "acq_rel": "acq_rel",
    "sc": "acq_rel",
}
_SCOPES = {"cta": "CTA", "gpu": "GPU", "gl": "GPU", "sys": "SYSTEM"}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    **{name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "and", "or", "xor")},
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": min,
    "max": max,
}
_UPDATE: dict[str, Callable[[int, int], int]] = {
    "exch": lambda old, value: value,
    "inc": lambda old, most: 0 if old >= most else old + 1,
    "dec": lambda old, most: most if old == 0 or old > most else old - 1,
    **{name: _COMPUTE[name] for name in ("add", "and", "or", "xor", "min", "max")},
}
_HINTS = {"global", "generic", "ca", "cg", "cs", "cv", "lu", "wb", "wt"}
_FLOAT = re.compile(r"(f|bf|tf|e\dm)\d+\w*")
_HINT = re.compile(r"L[12]_\w+")


@dataclass(frozen=True)
class AsmInstruction:
    """One instruction: the words between dots, the operands as text, and the predicate that guards the instruction."""

    words: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.guard} " if self.guard else ""
        return f"{guard}{'.'.join(self.words)} {', '.join(self.operands)}".strip()

    @functools.cached_property
    def type(self) -> str:
        return next((w for w in reversed(self.words) if w in _SIZES), "b32")

    @functools.cached_property
    def order(self) -> str:
        """Return the ordering that the instruction's words specify; an `atom` or `red` without an ordering is
        relaxed."""
        default = "relaxed" if self.words[0] in ("atom", "red") else ""
        return next((_ORDERS[w] for w in self.words if w in _ORDERS), default)

    @functools.cached_property
    def scope(self) -> str:
        """Return the scope that the words specify. A volatile access is as strong as a relaxed access at scope
        "sys"."""
        default = "SYSTEM" if "volatile" in self.words else "GPU"
        return next((_SCOPES[w] for w in self.words if w in _SCOPES), default)

    @functools.cached_property
    def integers(self) -> bool:
        """Return whether the words specify no floating-point type."""
        return not any(_FLOAT.fullmatch(w) for w in self.words[1:])

    @property
    def local(self) -> bool:
        """Return whether the instruction uses only registers, and no special register that differs between
        programs."""
        accesses = ("ld", "st", "atom", "red", "fence", "membar", "bar", "barrier", "bra")
        return self.words[0] not in accesses and not any("ctaid" in operand for operand in self.operands)

    def unknown(self, known: set[str]) -> list[str]:
        """Return the words after the first one that this model does not support."""
        common = known | _HINTS | set(_SIZES) | set(_ORDERS) | set(_SCOPES)
        return [w for w in self.words[1:] if w not in common and not _HINT.fullmatch(w)]


@functools.cache
def parsed(text: str) -> tuple[tuple[AsmInstruction, ...], dict[str, int]]:
    """Return the instructions of an assembly text, and the index of the instruction after each label."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    instructions: list[AsmInstruction] = []
    labels: dict[str, int] = {}
    for statement in _statements(text):
        while label := re.match(r"([$\w]+):\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if not statement or statement.startswith(".reg"):
            continue
        guard = re.match(r"@(!?)(%?[\w<>]+)\s+", statement)
        body = statement[guard.end() :] if guard else statement
        name, _, operands = body.partition(" ")
        words = tuple(name.replace("::", "_").split("."))  # hints have forms such as L2::128B
        negated = bool(guard and guard[1])
        instructions.append(AsmInstruction(words, tuple(_operands(operands)), guard[2] if guard else "", negated))
    return tuple(instructions), labels


def _statements(text: str) -> Iterator[str]:
    """Yield the statements between semicolons, without the braces of blocks. The braces of a vector, which begins with
    a register, belong to its statement."""
    depth, current = 0, ""
    for i, c in enumerate(text):
        if c == "{" and re.match(r"\{\s*[$%][\w]+\s*[,}]", text[i:]):
            depth += 1
        elif c in "{}" and not depth:
            continue
        current += c
        if c == "}" and depth:
            depth -= 1
        if c == ";" and not depth:
            yield " ".join(current[:-1].split())
            current = ""
    if current.strip():
        yield " ".join(current.split())


def _operands(text: str) -> list[str]:
    return re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text)


class _Thread:
    """One thread's execution of the text. values: the placeholders $0, $1, ..: outputs, then inputs. number: the
    thread's number in its program, which has `threads` threads."""

    def __init__(self, text: str, values: list[int], number: int, threads: int) -> None:
        self.instructions, self.labels = parsed(text)
        self.values, self.number, self.threads = values, number, threads
        self.registers: dict[str, int] = {}
        self.looked: int | None = None  # the address of the thread's last access

    def steps(self, everywhere: bool) -> Iterator[_Thread]:
        """Run to the end; yield at each jump backwards. everywhere: all threads of the program run the same text on the
        same values."""
        self.everywhere, position = everywhere, 0
        while position < len(self.instructions):
            instruction = self.instructions[position]
            position += 1
            if instruction.guard and bool(self.read(instruction.guard)) == instruction.negated:
                continue
            if instruction.words[0] == "bra":
                (label,) = instruction.operands
                if label not in self.labels:
                    raise refused(instruction, "the text has no such label")
                if self.labels[label] < position:
                    yield self
                position = self.labels[label]
            elif instruction.words[0] in ("ret", "exit"):
                return
            else:
                self.run(instruction)

    # -- operands
    def read(self, operand: str) -> int:
        if operand.startswith("$"):
            return self.values[int(operand[1:])]
        if operand in self.registers:
            return self.registers[operand]
        if special := re.fullmatch(r"%(n?ctaid|n?tid)\.([xyz])", operand):
            task, axis = interpret.hooks.current, "xyz".index(special[2])
            kind = special[1]
            if kind.endswith("ctaid"):
                return (task.index if kind == "ctaid" else task.grid)[axis]
            return 0 if kind == "tid" and axis else self.number if kind == "tid" else 1 if axis else self.threads
        if operand == "%laneid":
            return self.number % 32
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            return int(operand.rstrip("U"), 0)
        raise Unsupported(f"inline PTX: the emulator does not know what {operand} is\n{interpret.hooks.machine.me()}")

    def write(self, operand: str, value: int, size: int) -> None:
        value &= (1 << 8 * size) - 1
        if operand.startswith("$"):
            self.values[int(operand[1:])] = value
        else:
            self.registers[operand] = value

    def address(self, operand: str) -> int:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.read(base.strip()) + (int(offset, 0) if offset else 0)

    # -- instructions
    def run(self, instruction: AsmInstruction) -> None:
        name, operands = instruction.words[0], instruction.operands
        size = _SIZES[instruction.type]
        integers = instruction.integers
        if name in ("ld", "st"):
            self._moved(instruction, size, store=name == "st")
        elif name == "atom":
            self.write(operands[0], self._updated(instruction, size, *operands[1:]), size)
        elif name == "red":
            self._updated(instruction, size, *operands)
        elif name in ("fence", "membar"):
            self._fence(instruction)
        elif name in ("bar", "barrier") and "sync" in instruction.words and operands[0] == "0":
            interpret.hooks.flush_stores(bulk=False)
        elif name == "griddepcontrol":
            pass  # waits for the end of the stream's previous kernel; in the emulator kernels begin only after that
        elif name == "mov" or (name in ("cvt", "cvta") and integers):
            self.write(operands[0], self.read(operands[1]), size)
        elif name == "setp" and instruction.words[1] in _COMPARE and integers and len(operands) == 3:
            a, b = (_signed(self.read(x), instruction.type) for x in operands[1:])
            self.write(operands[0], int(_COMPARE[instruction.words[1]](a, b)), 1)
        elif name == "selp":
            self.write(operands[0], self.read(operands[1] if self.read(operands[3]) else operands[2]), size)
        elif name in _COMPUTE and integers and len(operands) == 3 and {"hi", "wide"}.isdisjoint(instruction.words):
            a, b = (_signed(self.read(x), instruction.type) for x in operands[1:])
            self.write(operands[0], _COMPUTE[name](a, b), size)
        else:
            raise refused(instruction)

    def _access(
        self,
        instruction: AsmInstruction,
        address: int,
        size: int,
        new: Callable[[int], int] | None = None,
        **kind: bool,
    ) -> int:
        self.looked = address
        order, scope = instruction.order, instruction.scope
        return interpret.hooks.thread_access(address, size, order, scope, new, everywhere=self.everywhere, **kind)

    def _moved(self, instruction: AsmInstruction, size: int, store: bool) -> None:
        """Load into a register or a vector of registers, or store from it."""
        if instruction.unknown({"v2", "v4", "v8"}):
            raise refused(instruction)
        registers, memory = instruction.operands[::-1] if store else instruction.operands
        address = self.address(memory)
        for i, register in enumerate(registers.strip("{}").replace(" ", "").split(",")):
            if store:
                value = self.read(register) & (1 << 8 * size) - 1
                self._access(instruction, address + i * size, size, lambda _, value=value: value, store=True)
            else:
                self.write(register, self._access(instruction, address + i * size, size), size)

    def _updated(self, instruction: AsmInstruction, size: int, memory: str, *values: str) -> int:
        """Perform an atomic update, and return the value before the update."""
        operation = next((w for w in instruction.words[1:] if w in _UPDATE or w == "cas"), "")
        if not operation or instruction.unknown({operation}) or instruction.type[0] == "f" or size < 4:
            raise refused(instruction)
        numbers, whole = [self.read(v) for v in values], (1 << 8 * size) - 1

        def new(old: int) -> int:
            if operation == "cas":
                return numbers[1] & whole if old == numbers[0] & whole else old
            return _UPDATE[operation](*(_signed(x, instruction.type) for x in (old, numbers[0]))) & whole

        return self._access(instruction, self.address(memory), size, new)

    def _fence(self, instruction: AsmInstruction) -> None:
        if "proxy" in instruction.words:
            interpret.hooks.bulk_fence()
        elif instruction.scope != "CTA":
            interpret.hooks.acquire_fence(instruction.scope == "SYSTEM", self.everywhere)
            interpret.hooks.release_fence(instruction.scope == "SYSTEM")


def _signed(value: int, kind: str) -> int:
    """Return the value of a register, interpreted as the type."""
    bits = 8 * _SIZES[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> bits - 1 else value


def refused(instruction: AsmInstruction, reason: str = "the emulator does not model it") -> Unsupported:
    return Unsupported(f"inline PTX `{instruction}`: {reason}\n{interpret.hooks.machine.me()}")


class Outputs:
    """The outputs of one call, in the types of Triton's language. threads: for each output, the values by thread, if
    they differ between threads."""

    def __init__(self, handles: Sequence[TensorHandle], threads: Sequence[np.ndarray | None]) -> None:
        self.handles, self.threads = handles, threads

    def get_result(self, number: int) -> TensorHandle:
        return self.handles[number]


def run(text: str, constraints: str, inputs: Sequence[TensorHandle], types: Sequence[tl.dtype], pack: int) -> Outputs:
    """Run the text for each element of `inputs`, which have one shape, and return an output of each type."""
    if pack != 1:
        raise Unsupported(f"inline PTX with pack={pack}: the emulator runs one element at a time\n{_me()}")
    words = constraints.replace(" ", "").split(",")
    outputs = sum(w.startswith("=") for w in words)
    shape = inputs[0].data.shape if inputs else (1,)
    columns = [_bits(np.broadcast_to(h.data, shape)).ravel().tolist() for h in inputs]
    task, total = interpret.hooks.current, interpret.hooks.threads
    active = np.arange(total) if task.threads is None else np.flatnonzero(task.threads)
    by_thread, count = "%tid" in text or "%laneid" in text, int(np.prod(shape))
    if by_thread and count > 1:
        raise Unsupported(f"inline PTX that reads the number of a thread, for each element of a block\n{_me()}")
    if not inputs and task.threads is None and all(instruction.local for instruction in parsed(text)[0]):
        lanes = _values_by_thread(text, outputs, total)
        kinds = [interpret.stock._get_np_dtype(kind.scalar) for kind in types]
        by_type = [_of_type(np.array(column, np.uint64), kind) for column, kind in zip(lanes, kinds, strict=True)]
        handles = [TensorHandle(v[:1], kind.scalar) for v, kind in zip(by_type, types, strict=True)]
        return Outputs(handles, by_type if by_thread else [None] * len(types))
    if count > 1 and (handles_of_block := _block_move(text, outputs, inputs, types)) is not None:
        return Outputs(handles_of_block, [None] * len(types))
    repeats = "atom" in text or "red." in text  # other instructions have the same effect however often they run
    copies = [int(t) for t in active] if count == 1 and (by_thread or repeats) else [int(active[0])]
    if count > 1 and repeats:
        copies *= max(1, len(active) // count)  # with fewer elements than threads, several threads hold each element
    everywhere = count == 1 and len(active) == total
    threads = [
        (e, _Thread(text, [0] * outputs + [column[e] for column in columns], number, total))
        for e in range(count)
        for number in copies
    ]
    _take_turns([thread.steps(everywhere) for _, thread in threads])
    handles: list[TensorHandle] = []
    values: list[np.ndarray | None] = []
    for output, kind in enumerate(types):
        dtype = interpret.stock._get_np_dtype(kind.scalar)
        bits = np.zeros(count, np.uint64)
        bits[[e for e, _ in threads]] = [thread.values[output] if outputs else 0 for _, thread in threads]
        handles.append(TensorHandle(_of_type(bits, dtype).reshape(shape), kind.scalar))
        lanes = np.zeros(total, np.uint64)
        if by_thread:
            lanes[copies] = [thread.values[output] for _, thread in threads]
        values.append(_of_type(lanes, dtype) if by_thread else None)
    return Outputs(handles, values)


def _block_move(
    text: str, outputs: int, inputs: Sequence[TensorHandle], types: Sequence[tl.dtype]
) -> list[TensorHandle] | None:
    """Run a text of one relaxed or ordinary load or store for all elements at once. Return its outputs, or None for any
    other text."""
    instructions, _ = parsed(text)
    if len(instructions) != 1 or instructions[0].words[0] not in ("ld", "st"):
        return None
    (instruction,) = instructions
    store = instruction.words[0] == "st"
    registers, memory = instruction.operands[::-1] if store else instruction.operands
    address = re.fullmatch(r"\[\s*\$(\d+)\s*(?:\+\s*(\d+))?\s*\]", memory)
    names = registers.strip("{}").replace(" ", "").split(",")
    plain = (
        instruction.order in ("", "relaxed") and not instruction.guard and not instruction.unknown({"v2", "v4", "v8"})
    )
    if not plain or address is None or any(not re.fullmatch(r"\$\d+", name) for name in names):
        return None
    strong, size = instruction.order == "relaxed", _SIZES[instruction.type]
    pointers = inputs[int(address[1]) - outputs].data.astype(np.uint64) + np.uint64(address[2] or 0)
    results = []
    for i, name in enumerate(names):
        addresses, number = pointers + np.uint64(i * size), int(name[1:])
        if store:
            value = np.broadcast_to(_bits(inputs[number - outputs].data), addresses.shape).astype(f"u{size}")
            interpret.hooks.store(addresses, value, None, low_latency=strong, scope=instruction.scope)
        else:
            bits = interpret.hooks.load(addresses, None, None, np.dtype(f"u{size}"), strong, scope=instruction.scope)
            dtype = interpret.stock._get_np_dtype(types[number].scalar)
            results.append(TensorHandle(_of_type(bits, dtype), types[number].scalar))
    return results or [TensorHandle(np.zeros(pointers.shape, np.int32), tl.int32)]


@functools.cache
def _values_by_thread(text: str, outputs: int, total: int) -> list[list[int]]:
    """Return the outputs, by thread, of a text that accesses only registers."""
    threads = [_Thread(text, [0] * outputs, number, total) for number in range(total)]
    for thread in threads:
        for _ in thread.steps(everywhere=True):
            raise AssertionError("a text without jumps spins")
    return [list(column) for column in zip(*(thread.values for thread in threads), strict=True)]


def _bits(data: np.ndarray) -> np.ndarray:
    """Return the bits of the elements as unsigned integers."""
    data = np.ascontiguousarray(data)
    return data.astype(np.uint8) if data.dtype == np.bool_ else data.view(f"u{data.dtype.itemsize}")


def _of_type(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return bits.astype(np.bool_) if dtype == np.bool_ else bits.astype(f"u{dtype.itemsize}").view(dtype)


def _me() -> str:
    return interpret.hooks.machine.me()


def _take_turns(threads: list[Iterator[_Thread]]) -> None:
    """Run all threads to their ends; in each turn a thread runs up to its next jump backwards."""
    while threads:
        spinning = [(steps, thread) for steps in threads if (thread := next(steps, None)) is not None]
        threads = [steps for steps, _ in spinning]
        if spinning:
            interpret.hooks.look_again(spinning[0][1].looked if len(spinning) == 1 else None)


interpret.assembly = run
