"""This module interprets Triton's language on numpy: one program of a kernel runs as ordinary Python.

The source of a kernel is rewritten once: assignments convert values to tensors, and `range` yields tensors, as in the
compiler. The rewritten code is executed in the globals of the kernel's own module, which stay unchanged: closure
variables supply the names that the code needs. `patched()` replaces `triton.language` by its interpreted form and later
restores it, so the same process can compile the same kernel.

Every memory access, barrier and atomic calls `hooks`, the running machine (machine.py). This module contains no code
for ranks, streams or races. The module corrects wrong results of Triton's own interpreter: bf16 is computed in fp32 and
rounded to nearest even, fp16 dots accumulate in fp32, and minimum and maximum ignore NaN as on a GPU.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import functools
import inspect
import itertools
import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch
import triton.language as tl
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.language.extra import cuda, hip
from triton.language.extra import libdevice as generic_libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import _triton
from ..architectures import HOPPER
from ..errors import Deadlock, Unsupported
from . import libdevice
from .bounds import ADDRESS
from .thread_values import Branch, ThreadTensor, refuse_thread_values

if TYPE_CHECKING:
    from .programs import Programs

T = TypeVar("T")
Function = Callable[..., object]
Scalar: TypeAlias = tl.tensor | tl.constexpr | int
Constant: TypeAlias = tl.constexpr | int | str | None  # an argument of a tl.constexpr parameter

stock, ConstexprFunction = _triton.interpreter()
TensorHandle = stock.TensorHandle
TURNS = 100_000  # a `while` loop with more turns, which take about two seconds, counts as endless
hooks: Programs = None  # the Programs of the running Machine; None without a run
assembly: Function = None  # the function that runs inline PTX, set by inline_ptx.py
# A function of the (kernel, grid, *arguments, **options) of a Triton launch; None if launches are refused.
user_launch: Function | None = None

# -- rewriting ---------------------------------------------------------------------------------------------------------

# Rewritten functions, except Triton's own, by id, because a code object hashes its whole code.
_users: dict[int, CodeType] = {}


class _Rewriter(ast.NodeTransformer):
    """Make assignments convert numbers to tensors, drop annotations (but keep `tl.constexpr`), count the turns of
    `while` loops, and allow a branch that only some threads of the program take (`Branch`)."""

    branches = 0
    operands = 0
    around: tuple[str, ...] = ()  # the branches around the statement that is being visited

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.branches += 1
        name, outer = f"__branch_{self.branches}", self.around
        self.around = (*outer, name)
        self.generic_visit(node)
        self.around = outer
        call = functools.partial(_method_call, name)

        def part(method: str, body: list[ast.stmt]) -> ast.If:
            return ast.If(call(method), [ast.Try(body, [], [], [ast.Expr(call("leave"))])], [])

        condition = ast.Call(ast.Name("__branch", ast.Load()), [node.test], [])
        out: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], condition), part("then", node.body)]
        if node.orelse:
            out.append(part("otherwise", node.orelse))
        for statement in out:
            ast.copy_location(statement, node)
        return out

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Compute `and` and `or` as Triton does: of tensors, every operand is computed, element by element."""
        self.generic_visit(node)
        word = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        value = node.values[0]
        for operand in node.values[1:]:
            self.operands += 1
            name = f"__operand_{self.operands}"
            named = ast.NamedExpr(ast.Name(name, ast.Store()), value)
            decides = ast.Call(ast.Name("__decides", ast.Load()), [named, word], [])
            combination = ast.Call(ast.Name("__combined", ast.Load()), [ast.Name(name, ast.Load()), operand, word], [])
            value = ast.copy_location(ast.IfExp(decides, ast.Name(name, ast.Load()), combination), node)
        return value

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(ast.Call(ast.Name("__not", ast.Load()), [node.operand], []), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        return ast.copy_location(ast.Call(ast.Name("__chained", ast.Load()), [], []), node)

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        self.generic_visit(node)
        calls = [ast.copy_location(ast.Expr(_method_call(name, "returns")), node) for name in self.around]
        return [*calls, node]

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = ast.Call(ast.Name("__to_tensor", ast.Load()), [node.value], [])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.Assign([node.target], self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        target = node.target
        if not isinstance(target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(target.id, ast.Load()), node.op, node.value)
        return ast.Assign([target], ast.Call(ast.Name("__to_tensor", ast.Load()), [value], []))

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self.generic_visit(node)
        counter = f"__turns_{node.lineno}"
        count = ast.Attribute(ast.Call(ast.Name("__turns", ast.Load()), [], []), "__next__", ast.Load())
        begin = ast.Assign([ast.Name(counter, ast.Store())], count)
        node.test = ast.Call(ast.Name("__one", ast.Load()), [node.test], [])
        node.body.insert(0, ast.Expr(ast.Call(ast.Name(counter, ast.Load()), [], [])))
        return [ast.copy_location(begin, node), node]


def _method_call(name: str, method: str) -> ast.expr:
    return ast.Call(ast.Attribute(ast.Name(name, ast.Load()), method, ast.Load()), [], [])


class _Reach(ast.NodeTransformer):
    """Add a report of the line before every statement."""

    def __init__(self, fn: JITFunction) -> None:
        self.key = f"{fn.fn.__code__.co_filename}"

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.Module):
                setattr(node, field, list(itertools.chain.from_iterable(self.mark(s) for s in block)))
        return node

    def mark(self, statement: ast.stmt) -> list[ast.stmt]:
        call = ast.Call(ast.Name("__reached", ast.Load()), [ast.Constant((self.key, statement.lineno))], [])
        return [ast.copy_location(ast.Expr(call), statement), statement]


def source_tree(fn: JITFunction) -> ast.Module:
    """Return the function's source, with the line numbers of its file."""
    tree = ast.parse(fn.src)
    ast.increment_lineno(tree, _triton.first_line(fn) - 1)
    return tree


def rewrite(fn: JITFunction, change: Callable[[ast.Module], None] | None = None, reach: bool = False) -> Function:
    """Return the interpreted form of `fn`. change: edits the tree first (a mutation). reach: report the statements that
    the program reaches."""
    tree = source_tree(fn)
    if change is not None:
        change(tree)
    if reach:
        tree = _Reach(fn).visit(tree)
    tree = _Rewriter().visit(tree)
    define = tree.body[0]
    assert isinstance(define, ast.FunctionDef)
    define.decorator_list, define.returns = [], None
    for arg in itertools.chain(define.args.posonlyargs, define.args.args, define.args.kwonlyargs):
        arg.annotation = None
    raw = fn.fn
    free = dict(zip(raw.__code__.co_freevars, (c.cell_contents for c in raw.__closure__ or ()), strict=True))
    used = {node.id: raw.__globals__.get(node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {name: _late(value) for name, value in used.items() if _is_language(value)}
    rewriting_names = {"__to_tensor": to_tensor, "range": _range, "__reached": _reached, "__turns": _count_turns}
    rewriting_names |= {"__branch": _branch, "__decides": _decides, "__combined": _combination, "__not": _not}
    rewriting_names |= {"__chained": _chained, "__one": _one}
    extremes = {name: _extreme(name) for name in ("min", "max") if name not in raw.__globals__}
    closure = {**rewriting_names, **extremes, **imported, **free}
    outer = ast.parse(f"def __outer({', '.join(closure)}):\n    return {define.name}")
    outer.body[0].body.insert(0, define)  # type: ignore[attr-defined]
    ast.fix_missing_locations(outer)
    space: dict[str, Function] = {}
    exec(compile(outer, raw.__code__.co_filename, "exec", dont_inherit=True), raw.__globals__, space)
    interpreted = space["__outer"](**closure)
    interpreted.__qualname__ = raw.__qualname__
    if not fn.__module__.startswith("triton."):
        _users[id(interpreted.__code__)] = interpreted.__code__
    return interpreted


def _reached(key: tuple[str, int]) -> None:
    hooks.machine.report.reached.add(key)


def _count_turns() -> Iterator[None]:
    """Yield once for each turn of a loop. Raise Deadlock after more turns than a finite loop would make."""
    yield from itertools.repeat(None, TURNS)
    raise Deadlock(f"a loop has made {TURNS} turns and has not ended\n{hooks.machine.me()}")


def _branch(condition: object) -> Branch:
    return Branch(hooks.current, _one(condition))


def _one(condition: T) -> T:
    """Return the condition of an `if` or `while`, which in Triton has one element."""
    if type(condition) is tl.tensor and condition.handle.data.size > 1:
        raise ValueError(f"a condition of {condition.handle.data.size} elements: reduce it to one element")
    return condition


def _decides(operand: object, word: str) -> bool:
    """Return whether the first operand of an `and` or `or` is a constant that decides the result, so that Triton does
    not compile the second one."""
    return not isinstance(operand, tl.tensor) and bool(plain(operand)) is (word == "or")


def _combination(left: object, right: object, word: str) -> object:
    """Return `left and right` or `left or right`, where `left` does not decide. A constant that does not decide has no
    effect on tensors."""
    if not isinstance(right, tl.tensor):
        return left if isinstance(left, tl.tensor) and not _decides(right, word) else right
    if not isinstance(left, tl.tensor):
        return right
    if type(left) is not tl.tensor or type(right) is not tl.tensor or left.type is right.type is tl.int1:
        return _bool(bool(left) and bool(right) if word == "and" else bool(left) or bool(right))
    return semantic.logical_and(left, right) if word == "and" else semantic.logical_or(left, right)


def _not(operand: object) -> object:
    """Return `not operand`, which of a tensor is computed element by element."""
    if not isinstance(operand, tl.tensor):
        return not plain(operand)
    return semantic.not_(operand) if type(operand) is tl.tensor else _bool(not operand)


def _chained() -> NoReturn:
    raise TypeError("Triton does not compile a chain of comparisons: join two comparisons by `&`")


def where() -> tuple[tuple[str, int, str], ...]:
    """Return (file, line, function) of the running program's frames in the user's source, innermost first."""
    frame = sys._getframe(1)
    frames: list[tuple[str, int, str]] = []
    while frame is not None:
        if id(frame.f_code) in _users:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)


def trail() -> tuple[int, ...]:
    """Return a key that distinguishes different values of `where()`, at a lower cost than `where()`."""
    frame = sys._getframe(1)
    codes: list[int] = []
    while frame is not None:
        code = id(frame.f_code)
        if code in _users:
            codes += code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(codes)


# -- scalars -----------------------------------------------------------------------------------------------------------


_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _float8(kind: tl.dtype) -> torch.dtype:
    """Return torch's dtype of an 8-bit float."""
    if (dtype := _FLOAT8.get(kind)) is None:
        raise NotImplementedError(f"{kind} is no type of these GPUs: they have float8e4nv and float8e5")
    return dtype


def to_float8(x: np.ndarray, kind: tl.dtype) -> np.ndarray:
    """Return the bits of 8-bit floats, as `cvt.rn.satfinite` does: round to nearest even, map infinity and too large
    numbers to the largest number, and map every NaN to the positive NaN."""
    dtype = _float8(kind)
    largest = torch.finfo(dtype).max
    wide = torch.from_numpy(np.array(x, np.float32))
    bits = wide.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(wide.isnan(), 0x7F, bits).to(torch.uint8).numpy()


def _f32(h: TensorHandle) -> np.ndarray:
    """Return the numbers of a handle; if the handle stores bits of bf16 or 8-bit floats, return them in fp32."""
    kind = h.dtype.scalar
    if kind.name == "bf16":
        return (h.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind.is_fp8():
        return torch.from_numpy(np.array(h.data)).view(_float8(kind)).float().numpy()
    return h.data


def to_bf16(x: np.ndarray, truncate: bool = False) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if truncate:
        return (bits >> np.uint32(16)).astype(np.uint16)
    out = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(x)
    if nan.any():
        out[nan] = 0x7FC0
    return out.reshape(np.shape(x))


_small: dict[int, tl.tensor] = {}


def int32(value: int) -> tl.tensor:
    """Return a scalar of the language; small scalars are shared, because nothing changes a scalar in place."""
    scalar = _small.get(value)
    if scalar is None:
        if not -(2**31) <= value < 2**31:
            value = (value + 2**31) % 2**32 - 2**31
        scalar = tl.tensor(TensorHandle(np.array([value], np.int32), tl.int32), tl.int32)
        if -64 <= value < 8192:
            _small[value] = scalar
    return scalar


@functools.cache
def _bool(value: bool) -> tl.tensor:
    return tl.tensor(TensorHandle(np.array([value], np.bool_), tl.int1), tl.int1)


def to_tensor(x: object) -> tl.tensor | tuple:
    kind = type(x)
    if kind is tl.tensor:
        return x
    if kind is int and -(2**31) <= x < 2**31:
        return int32(x)
    if kind is tuple:
        return tuple(to_tensor(part) for part in x)
    if isinstance(x, tuple):  # a NamedTuple: its fields are tensors, or constants that remain constants
        return x
    return semantic.to_tensor(x, False)


def as_int(x: Scalar) -> int:
    """Return a kernel's scalar as a Python integer."""
    if isinstance(x, tl.tensor):
        return int(x.handle.data.item())
    return int(x.value if isinstance(x, tl.constexpr) else x)


def _range(a: Scalar, b: Scalar | None = None, step: Scalar | None = None, **_: object) -> Iterator[tl.tensor]:
    wide = any(isinstance(x, tl.tensor) and x.type != tl.int32 for x in (a, b, step))
    bounds = (0, as_int(a)) if b is None else (as_int(a), as_int(b))
    for i in range(*bounds, 1 if step is None else as_int(step)):
        yield semantic.cast(int32(i), tl.int64) if wide else int32(i)


def _static_range(a: Scalar, b: Scalar | None = None, step: Scalar | None = None, **_: object) -> Iterator[int]:
    bounds = (0, as_int(a)) if b is None else (as_int(a), as_int(b))
    return iter(range(*bounds, 1 if step is None else as_int(step)))


def _condition(condition: T, disable_licm: object = False) -> T:
    return condition


def _extreme(name: str) -> Function:
    """Return the element-wise min or max of tensors for kernels."""

    def call(*args: object) -> object:
        if any(isinstance(a, tl.tensor) for a in args):
            return getattr(tl.core, f"builtin_{name}")(*args)
        return getattr(builtins, name)(*map(plain, args))

    return call


_COMPARE: dict[str, Function] = {f"__{name}__": getattr(operator, name) for name in "lt le gt ge eq ne".split()}
_LOGIC: dict[str, Function] = {"__and__": operator.and_, "__or__": operator.or_}
_COMMON: dict[str, Function] = {  # the operators on Python's integers and on numpy's blocks
    **_COMPARE,
    **_LOGIC,
    "__add__": operator.add,
    "__radd__": operator.add,
    "__sub__": operator.sub,
    "__rsub__": lambda a, b: b - a,
    "__mul__": operator.mul,
    "__rmul__": operator.mul,
}


def _division(quotient: Function) -> dict[str, Function]:
    """Return the division operators, computed from the quotient rounded to zero."""
    return {
        "__floordiv__": quotient,
        "__rfloordiv__": lambda a, b: quotient(b, a),
        "__mod__": lambda a, b: a - b * quotient(a, b),
        "__rmod__": lambda a, b: b - a * quotient(b, a),
    }


_SCALAR_DIVISION = _division(lambda a, b: a // b if (a < 0) == (b < 0) else -((-a) // b))
_BLOCK_DIVISION = _division(lambda a, b: (a - np.fmod(a, b)) // b)
_PLAIN: dict[int, type] = {id(tl.int32): np.int32, id(tl.int64): np.int64, id(tl.float32): np.float32}
_INTEGERS = {id(tl.int32), id(tl.int64)}


def _fast(name: str, slow: Function) -> Function:
    """Return a method that computes on int32 scalars and on operands of plain types without Triton's type rules, and
    otherwise calls `slow`."""
    compares = name in _COMPARE
    make: Callable[[int], tl.tensor] = _bool if compares else int32
    scalar, block = ({**_COMMON, **division}[name] for division in (_SCALAR_DIVISION, _BLOCK_DIVISION))
    others = {id(tl.int1)} if name in _LOGIC else set() if name in _BLOCK_DIVISION else {id(tl.float32)}
    kinds = _INTEGERS | others
    add = name in ("__add__", "__radd__")
    sign = -1 if name == "__sub__" else int(add)  # the sign of a pointer's offset; 0 for operations without an offset

    def method(self: tl.tensor, other: object, **_: object) -> object:
        kind = type(other)
        if kind is tl.constexpr:
            other = other.value
            kind = type(other)
        if self.type is tl.int32:
            if kind is tl.tensor:
                if other.type is tl.int32:
                    return make(scalar(self.handle.data.item(), other.handle.data.item()))
            elif kind is int and -(2**31) <= other < 2**31:
                return make(scalar(self.handle.data.item(), other))
        element = self.dtype
        known, integers = id(element) in kinds, id(element) in _INTEGERS
        if kind is tl.tensor:
            same = other.dtype is element
            if known and (same or (integers and id(other.dtype) in _INTEGERS)):
                common = tl.int1 if compares else element if same else tl.int64
                return _tensor(block(self.handle.data, other.handle.data), common, self, other)
            if add and type(element) is tl.pointer_type and id(other.dtype) in _INTEGERS:
                offset = other.handle.data.astype(np.uint64)
                step = max(1, element.element_ty.primitive_bitwidth // 8)
                return _tensor(self.handle.data + offset * np.uint64(step), element, self, other)
        elif kind is int and sign and type(element) is tl.pointer_type and -(2**31) < other < 2**31:
            step = sign * max(1, element.element_ty.primitive_bitwidth // 8)
            return _tensor(self.handle.data + np.uint64(other * step % 2**64), element, self)
        elif (kind is int and integers and -(2**31) <= other < 2**31) or (
            kind is float and known and element is tl.float32
        ):
            return _tensor(block(self.handle.data, _PLAIN[id(element)](other)), tl.int1 if compares else element, self)
        return slow(self, other)

    return method


def _tensor(data: np.ndarray, element: tl.dtype, *operands: tl.tensor) -> tl.tensor:
    """Return a tensor with the operands' broadcast shape."""
    for operand in operands:
        if type(operand.type) is tl.block_type:
            return tl.tensor(TensorHandle(data, element), _block_type(element, data.shape))
    return tl.tensor(TensorHandle(data, element), element)


# -- the builder -------------------------------------------------------------------------------------------------------


@functools.cache
def _enum(x: object) -> str:
    return str(x).rsplit(".", 1)[-1]


class Desc(stock.TensorDescHandle):
    """A tensor descriptor; `plain` is its geometry in bytes as Python integers."""

    plain: tuple[int, list[int], list[int], int, np.dtype]
    fill: float  # the value of loads outside the tensor

    def validate(self) -> None:
        super().validate()
        self.fill = 0
        if _enum(self.padding) == "PAD_NAN":
            self.fill = 0x7FC0 if self.base.dtype.element_ty == tl.bfloat16 else float("nan")
        element = self.base.dtype.element_ty
        size = max(1, element.primitive_bitwidth // 8)
        strides = [int(s.data.item()) * size for s in self.strides]
        dims = [int(s.data.item()) for s in self.shape]
        self.plain = (int(self.base.data.item()), dims, strides, size, stock._get_np_dtype(element))


class Builder(stock.InterpreterBuilder):
    """Triton's numpy builder, which passes memory accesses to `hooks` and corrects wrong numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.options = stock.InterpreterOptions(debug=True, sanitize_overflow=False)  # debug enables device_assert

    # programs
    def create_get_program_id(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([hooks.current.index[axis]], np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([hooks.current.grid[axis]], np.int32), tl.int32)

    def create_barrier(self) -> None:
        hooks.flush_stores(bulk=False)

    def create_grid_dependency_wait(self) -> None:
        """Do nothing, as for `griddepcontrol.wait`: a kernel starts when the kernel before it has ended."""

    create_grid_dependency_launch_dependents = create_grid_dependency_wait  # Triton has both operations since 3.9

    def create_print(self, prefix: str, hex: bool, values: list[TensorHandle], _: object) -> None:
        for value in values:
            data, style = _f32(value), None
            if hex:
                data, style = value.data.view(f"u{value.data.itemsize}"), {"all": lambda bits: f"{bits:#x}"}
            print(f"{hooks.current.name}{prefix}{np.array2string(data, formatter=style)}")

    def create_assert(self, condition: TensorHandle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(f"tl.device_assert: {message}\n{hooks.machine.me()}")

    def create_inline_asm(
        self, text: str, constraints: str, inputs: list[TensorHandle], types: list[tl.dtype], _: bool, pack: int
    ) -> object:
        self.assembled = assembly(text, constraints, inputs, types, pack)
        return self.assembled

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: list[TensorHandle], kind: tl.dtype, pure: bool
    ) -> TensorHandle:
        function = libdevice.function_of(symbol)
        if function is None:
            raise NotImplementedError(f"the emulator has no form of the library function {symbol}")
        dtype = stock._get_np_dtype(kind)
        return TensorHandle(np.asarray(function(*(a.data for a in args))).astype(dtype), kind.scalar)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error for an operation that Triton's interpreter lacks; the error is an AttributeError where Triton
        itself tests for it."""
        if not name.startswith("create_"):
            raise AttributeError(name)
        raise NotImplementedError(f"the emulator has no form of the operation {name.removeprefix('create_')}")

    # memory; `caching` represents two hints, or since Triton 3.9 one policy
    def create_load(self, ptr: TensorHandle, *caching_and_volatile: object) -> TensorHandle:
        return self.create_masked_load(ptr, None, None, *caching_and_volatile)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle | None, other: TensorHandle | None, *caching_and_volatile: object
    ) -> TensorHandle:
        element = ptrs.get_element_ty()
        dtype = stock._get_np_dtype(element)
        fill = other.data if other is not None else np.zeros((), dtype) if semantic.other_given else None
        data = hooks.load(ptrs.data, _mask(mask), fill, dtype, caching_and_volatile[-1])
        return TensorHandle(data, element)

    def create_store(self, ptr: TensorHandle, val: TensorHandle, *caching: object) -> None:
        hooks.store(ptr.data, val.data, None)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle | None, *caching: object
    ) -> None:
        hooks.store(ptrs.data, value.data, _mask(mask))

    def create_atomic_rmw(
        self, op: object, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, sem: object, scope: object
    ) -> TensorHandle:
        do = functools.partial(super().create_atomic_rmw, op, _plain(ptr), _dense(val), _dense(mask), sem, scope)
        if val.dtype.scalar == tl.bfloat16:
            do = functools.partial(_atomic_bf16, _enum(op), ptr, val, mask)
        elif _enum(op) == "XCHG" and val.data.dtype.kind == "f":  # Triton's interpreter exchanges integers only
            do = functools.partial(_exchange_floats, do.func, op, _plain(ptr), _dense(val), _dense(mask), sem, scope)
        return hooks.atomic(ptr.data, _mask(mask), val.data.dtype, do, _enum(sem), _enum(scope))

    def create_atomic_cas(
        self, ptr: TensorHandle, cmp: TensorHandle, val: TensorHandle, sem: object, scope: object
    ) -> TensorHandle:
        do = functools.partial(super().create_atomic_cas, _plain(ptr), _dense(cmp), _dense(val), sem, scope)
        return hooks.atomic(ptr.data, None, val.data.dtype, do, _enum(sem), _enum(scope))

    # Triton calls these three methods since version 3.9.
    def create_atomic_load(self, ptr: TensorHandle, mask: TensorHandle, sem: object, scope: object) -> TensorHandle:
        do = functools.partial(super().create_masked_load, _plain(ptr), _dense(mask), None, None, True)
        dtype = stock._get_np_dtype(ptr.get_element_ty())
        return hooks.atomic(ptr.data, _mask(mask), dtype, do, _enum(sem), _enum(scope))

    def create_atomic_store(
        self, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, sem: object, scope: object
    ) -> None:
        do = functools.partial(super().create_masked_store, _plain(ptr), _dense(val), _dense(mask), None)
        hooks.atomic(ptr.data, _mask(mask), val.data.dtype, do, _enum(sem), _enum(scope))

    def create_atomic_poll(
        self, ptr: TensorHandle, expected: TensorHandle, timeout_ns: object, sem: object, scope: object
    ) -> TensorHandle:
        """Poll until every word has the expected value. With a time limit, poll once, because one poll exceeds it. Only
        words that have the expected value are acquired."""
        everywhere = TensorHandle(np.ones(ptr.data.shape, bool), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, everywhere, "RELAXED", scope)
            matched = TensorHandle(seen.data == expected.data, tl.int1)
            if isinstance(timeout_ns, TensorHandle) or matched.data.all():
                break
        if _enum(sem) != "RELAXED" and matched.data.any():
            self.create_atomic_load(ptr, matched, sem, scope)
        return matched

    def create_make_tensor_descriptor(
        self,
        base: TensorHandle,
        shape: list[TensorHandle],
        strides: list[TensorHandle],
        tensor_shape: list[int],
        is_signed: bool,
        padding: object = "zero",
    ) -> Desc:
        desc = Desc(base, shape, strides, tensor_shape, padding)
        desc.validate()
        return desc

    def create_descriptor_load(self, desc: Desc, indices: list[TensorHandle], *caching: object) -> TensorHandle:
        offsets = [int(np.asarray(i.data).item()) for i in indices]
        return TensorHandle(hooks.bulk_load(desc, offsets), desc.base.dtype.element_ty)

    def create_descriptor_store(self, desc: Desc, value: TensorHandle, indices: list[TensorHandle]) -> None:
        hooks.bulk_store(desc, [int(np.asarray(i.data).item()) for i in indices], value.data)

    # numbers
    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(to_bf16(np.array([value], np.float32)), tl.bfloat16)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: object) -> TensorHandle:
        hooks.worked(2 * a.data.size * b.data.shape[-1])
        if a.dtype.scalar.is_int():
            return super().create_dot(a, b, d, *rest)
        x, y = _f32(a), _f32(b)
        if x.dtype == np.float16:
            x, y = x.astype(np.float32), y.astype(np.float32)
        out = _matmul(x, y)
        if out.dtype != d.data.dtype:
            return TensorHandle((out + d.data).astype(d.data.dtype), d.dtype.scalar)
        out += d.data
        return TensorHandle(out, d.dtype.scalar)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
        element = lhs.dtype.scalar
        if element == tl.bfloat16:
            out = op(_f32(lhs), _f32(rhs))
            return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else TensorHandle(to_bf16(out), element)
        if element.primitive_bitwidth == 8 and element.is_fp8():
            raise NotImplementedError("GPUs compute no 8-bit floats: cast them first")
        out = op(lhs.data, rhs.data)
        if out.dtype == np.bool_:
            return TensorHandle(out, tl.int1)
        if not isinstance(element, tl.pointer_type):
            dtype = stock._get_np_dtype(element)
            if out.dtype != dtype:
                out = out.astype(dtype)
        return TensorHandle(out, element)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_ashr(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        signed = [TensorHandle(h.data.astype(stock._get_signed_np_dtype(h.data.dtype)), h.dtype) for h in (lhs, rhs)]
        return self.binary_op(signed[0], signed[1], np.right_shift)

    def unary_op(self, arg: TensorHandle, op: Callable[..., np.ndarray]) -> TensorHandle:
        if arg.dtype.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(op(_f32(arg))), tl.bfloat16)
        return super().unary_op(arg, op)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def ternary_op(
        self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Callable[..., np.ndarray]
    ) -> TensorHandle:
        if other.dtype.scalar == tl.bfloat16 and op is not np.where:
            return TensorHandle(to_bf16(op(_f32(lhs), _f32(rhs), _f32(other))), tl.bfloat16)
        return super().ternary_op(lhs, rhs, other, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if z.dtype.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(_f32(x) * _f32(y) + _f32(z)), tl.bfloat16)
        return super().create_fma(x, y, z)

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype, truncate: bool = False) -> TensorHandle:
        target = dst_type.scalar
        if target == tl.bfloat16:
            if src.dtype.scalar == tl.bfloat16:
                return TensorHandle(src.data, target)
            return TensorHandle(to_bf16(src.data.astype(np.float32), truncate), target)
        return TensorHandle(_f32(src).astype(stock._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding: object) -> TensorHandle:
        if 8 in (src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth):
            return self._cast_of_8_bits(src, dst_type.scalar, _enum(rounding) == "RTZ")
        return self.cast_impl(src, dst_type, _enum(rounding) == "RTZ")

    def _cast_of_8_bits(self, src: TensorHandle, kind: tl.dtype, truncate: bool) -> TensorHandle:
        """Cast to or from 8-bit floats with the numbers of Triton's code for Hopper (PTX of Triton 3.6)."""
        source = src.dtype.scalar
        if (source.is_fp8() and kind.is_fp8()) or tl.float64 in (source, kind):
            raise NotImplementedError(f"there is no cast from {source} to {kind}: cast to float16 in between")
        if truncate and not (kind == tl.float8e5 and source == tl.float32):
            raise NotImplementedError(f"a cast from {source} to {kind} rounds to nearest only")
        if truncate:  # round to fp16, because the result is its upper byte
            half = libdevice.directed("rz", np.dtype(np.float16), src.data)
            half[np.isnan(src.data)] = np.uint16(0x7FFF).view(np.float16)
            return TensorHandle((half.view(np.uint16) >> 8).astype(np.uint8), kind)
        wide = _f32(src).astype(np.float32)
        if kind.is_fp8():
            return TensorHandle(to_float8(wide, kind), kind)
        if source == tl.float8e5 and kind == tl.bfloat16:  # by a shift and a product, so all-ones exponents are numbers
            finite = (src.data & 0x7F).astype(np.uint16) << 5
            signed = (finite | (src.data & 0x80).astype(np.uint16) << 8).astype(np.uint32) << np.uint32(16)
            wide = signed.view(np.float32) * np.float32(2.0**112)
        return self.cast_impl(TensorHandle(wide, tl.float32), kind)

    create_fp_ext = create_fp_trunc = create_si_to_fp = create_ui_to_fp = cast_impl
    create_fp_to_si = create_fp_to_ui = cast_impl

    def create_int_cast(self, src: TensorHandle, dst_type: tl.dtype, is_signed: bool) -> TensorHandle:
        return self.cast_impl(src, dst_type)


def _atomic_bf16(op: str, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle) -> TensorHandle:
    """Add to, or exchange, bf16 numbers in memory, one after another; return the previous numbers."""
    if op not in ("FADD", "XCHG"):
        raise NotImplementedError(f"GPUs have no atomic {op.lower()} of bf16")
    addresses, values, on = np.broadcast_arrays(_plain(ptr).data, val.data, mask.data)
    before = np.zeros_like(values)
    for i in np.ndindex(addresses.shape):
        if on[i]:
            word = ctypes.c_uint16.from_address(int(addresses[i]))
            before[i] = word.value
            old, added = (TensorHandle(np.array([bits], np.uint16), tl.bfloat16) for bits in (word.value, values[i]))
            word.value = int(builder.create_fadd(old, added).data[0] if op == "FADD" else values[i])
    return TensorHandle(before, tl.bfloat16)


def _exchange_floats(
    exchange: Function, op: object, ptr: TensorHandle, val: TensorHandle, *rest: object
) -> TensorHandle:
    """Exchange the bits of numbers in memory; return the previous numbers."""
    before = exchange(op, ptr, TensorHandle(val.data.view(f"u{val.data.itemsize}"), val.dtype), *rest)
    return TensorHandle(before.data.view(val.data.dtype), val.dtype.scalar)


def _matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the matrix product, computed by torch on one thread: numpy would wait for a second thread, which costs
    more time than such a product."""
    if x.dtype != np.float32:
        return np.matmul(x, y)
    operands = [torch.from_numpy(a if a.flags.writeable else a.copy()) for a in (x, y)]
    return torch.matmul(*operands).numpy()


def _mask(mask: TensorHandle | np.ndarray | None) -> np.ndarray | None:
    return mask.data if isinstance(mask, TensorHandle) else mask


def _plain(ptr: TensorHandle) -> TensorHandle:
    """Return the addresses without the numbers of tensors."""
    return TensorHandle(ptr.data & np.uint64(ADDRESS), ptr.dtype)


def _dense(tensor: TensorHandle) -> TensorHandle:
    """Return the tensor in contiguous memory, as Triton's atomics read it. Broadcast tensors are views of stride 0."""
    return TensorHandle(np.asarray(tensor.data, order="C"), tensor.dtype)


class _Semantic(stock.TritonSemantic):
    """Triton's semantics, with faster implementations of frequent operations."""

    other_given = False  # whether the load that is being built has an `other`

    def load(self, ptr: tl.tensor, mask: object, other: object, *rest: object) -> tl.tensor:
        scalar = other is None or type(other.type) is not tl.block_type
        if scalar and rest[:-1] == _PLAIN_LOAD and (element := _pointed(ptr)):
            if mask is other is None:
                return _tensor(hooks.load(ptr.handle.data, None, None, _np_dtype(element), rest[-1]), element, ptr)
            if mask is not None and type(ptr.type) is tl.block_type:
                ptr, mask = self.broadcast_impl_value(ptr, mask)
                fill = None if other is None else self.cast(other, element).handle.data
                data = hooks.load(ptr.handle.data, mask.handle.data, fill, _np_dtype(element), rest[-1])
                return _tensor(data, element, ptr)
        # Triton tests for an `other` by `if other`, which is false for an `other` with one element that is 0.
        self.other_given = other is not None
        return super().load(ptr, mask, other, *rest)

    def to_tensor(self, x: object, check_type: bool = True) -> tl.tensor:
        # Python turns the product of a constexpr and a tensor into a constexpr, which since Triton 3.9 may not hold a
        # tensor.
        return super().to_tensor(plain(x), check_type)

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if lhs.shape is rhs.shape:  # tensors of one shape share the list
            return lhs, rhs
        try:
            shape = np.broadcast(lhs.handle.data, rhs.handle.data).shape
        except ValueError:
            return super().broadcast_impl_value(lhs, rhs)  # raises with Triton's message
        return _broadcast(lhs, shape), _broadcast(rhs, shape)

    def where(self, condition: tl.tensor, x: object, y: object) -> tl.tensor:
        tensors = [t for t in (x, y) if type(t) is tl.tensor]
        if condition.dtype is tl.int1 and tensors:
            kind = tensors[0].dtype
            a, b = _operand(x, kind), _operand(y, kind)
            if a is not None and b is not None:
                return _tensor(np.where(condition.handle.data, a, b), kind, condition, *tensors)
        return super().where(condition, x, y)

    def cast(self, input: tl.tensor, dst_ty: tl.dtype, *rest: object) -> tl.tensor:
        kind = input.dtype
        if kind is dst_ty:
            return input
        if id(kind) in _NUMBERS and id(dst_ty) in _NUMBERS and not any(rest):
            return _tensor(builder.cast_impl(input.handle, dst_ty).data, dst_ty, input)
        if type(dst_ty) is tl.pointer_type and not kind.is_ptr() and kind not in (tl.int64, tl.uint64):
            raise TypeError(
                f"{kind} is no address of a rank's memory: kernels get those as SymmetricTensor.addresses, "
                "where .local is this rank's memory itself"
            )
        return super().cast(input, dst_ty, *rest)


def _broadcast(tensor: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    if tensor.handle.data.shape == shape and type(tensor.type) is tl.block_type:
        return tensor
    data = TensorHandle(np.broadcast_to(tensor.handle.data, shape), tensor.handle.dtype)
    return tl.tensor(data, _block_type(tensor.dtype, shape))


def _pointed(ptr: object) -> tl.dtype | None:
    """Return the type of the numbers to which a tensor of pointers points; None if Triton's own code must decide."""
    element = getattr(ptr.dtype, "element_ty", None) if type(ptr) is tl.tensor else None
    return element if type(element) is tl.dtype and element is not tl.int1 else None


def _operand(x: object, kind: tl.dtype) -> object:
    """Return the numbers of an operand of type `kind`, or of a constant converted to that type; None for any other
    operand."""
    if type(x) is tl.tensor:
        return x.handle.data if x.dtype is kind else None
    if (type(x) is int and kind is tl.int32 and -(2**31) <= x < 2**31) or (type(x) is float and kind is tl.float32):
        return _PLAIN[id(kind)](x)
    return None


_PLAIN_LOAD = ((), "", "", "")  # no boundary check, padding or cache hints
_NUMBERS = {id(kind) for kind in (tl.int32, tl.int64, tl.float32, tl.float16, tl.bfloat16)}
builder = Builder()
semantic = _Semantic(builder)


# -- arguments ---------------------------------------------------------------------------------------------------------

_DTYPES = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
    torch.uint16: tl.uint16,
    torch.int32: tl.int32,
    torch.uint32: tl.uint32,
    torch.int64: tl.int64,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@functools.cache
def _pointer(dtype: torch.dtype) -> tl.pointer_type:
    return tl.pointer_type(_DTYPES[dtype])


def convert(arg: object, name: str = "") -> object:
    """Return a launch argument in the kernel's form; reports call it `name`."""
    if isinstance(arg, tl.constexpr):
        return arg.value
    if isinstance(arg, bool):
        return _bool(arg)
    if isinstance(arg, int):
        return semantic.to_tensor(arg)
    if isinstance(arg, float):
        return tl.tensor(TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
    if isinstance(arg, torch.Tensor):
        kind = _pointer(arg.dtype)
        return tl.tensor(TensorHandle(np.array([hooks.machine.bounds.pointer(arg, name)], np.uint64), kind), kind)
    if isinstance(arg, tuple):
        names = getattr(arg, "_fields", range(len(arg)))
        fields = [convert(a, f"{name}.{key}") for key, a in zip(names, arg, strict=True)]
        return type(arg)(*fields) if hasattr(arg, "_fields") else tuple(fields)
    if isinstance(arg, TensorDescriptor):
        strides = [convert(s) for s in arg.strides[:-1]] + [tl.constexpr(1)]
        if arg.strides[-1] != 1:
            raise ValueError(f"a tensor descriptor's last stride must be 1, not {arg.strides[-1]}")
        return semantic.make_tensor_descriptor(
            convert(arg.base, name),
            [convert(s) for s in arg.shape],
            strides,
            [tl.constexpr(b) for b in arg.block_shape],
            padding_option=arg.padding,
        )
    return arg


def bind(kernel: JITFunction, args: Mapping[str, object]) -> dict[str, object]:
    """Return all parameters of a kernel by name: constexprs as plain values, all others converted."""
    known = {p.name for p in kernel.params}
    if extra := sorted(set(args) - known):
        raise TypeError(f"{kernel.__name__} has no parameter {', '.join(extra)}")
    out = {}
    for p in kernel.params:
        if p.name in args:
            value = args[p.name]
        elif p.has_default:
            value = p.default
        else:
            raise TypeError(f"{kernel.__name__} needs the argument {p.name}")
        if p.is_constexpr:
            out[p.name] = value.value if isinstance(value, tl.constexpr) else value
        else:
            out[p.name] = convert(value, p.name)
    return out


# -- the language ------------------------------------------------------------------------------------------------------


class _InFloat32:
    """Compute reductions and scans of bf16 in fp32."""

    def apply(self, input: tl.tensor | tuple) -> tl.tensor | tuple:
        if not isinstance(input, tuple):
            return self.apply((input,))[0]
        kinds = [t.dtype for t in input]
        wide = tuple(semantic.cast(t, tl.float32) if k == tl.bfloat16 else t for t, k in zip(input, kinds, strict=True))
        out = super().apply(wide)  # type: ignore[misc]
        if len(out) != len(kinds):
            return out
        return tuple(semantic.cast(t, k) if k == tl.bfloat16 else t for t, k in zip(out, kinds, strict=True))


class _Reduce(_InFloat32, stock.ReduceOps):
    pass


class _Scan(_InFloat32, stock.ScanOps):
    pass


def plain(x: tl.constexpr | T) -> T:
    return x.value if isinstance(x, tl.constexpr) else x


def _reduce(
    input: tl.tensor | tuple, axis: Constant, combine_fn: JITFunction, keep_dims: Constant = False, **_: object
) -> tl.tensor | tuple:
    return _Reduce(plain(axis), combine_fn, plain(keep_dims)).apply(input)


def _scan(
    input: tl.tensor | tuple, axis: Constant, combine_fn: JITFunction, reverse: Constant = False, **_: object
) -> tl.tensor | tuple:
    return _Scan(plain(axis), combine_fn, plain(reverse)).apply(input)


def _dot(
    input: tl.tensor, other: tl.tensor, acc: tl.tensor | None = None, *rest: object, **kwargs: object
) -> tl.tensor:
    element = input.dtype
    plain_type = element is tl.bfloat16 or element is tl.float16 or element is tl.float32
    if rest or not plain_type or other.dtype is not element or acc is None or acc.dtype is not tl.float32:
        return _stock_dot(input, other, acc, *rest, **kwargs)
    a, b, c = input.handle, other.handle, acc.handle
    if a.data.ndim != 2 or (a.data.shape[0], b.data.shape[1]) != c.data.shape:
        return _stock_dot(input, other, acc, *rest, **kwargs)
    return tl.tensor(builder.create_dot(a, b, c), acc.type)


def _of_triton(fn: Function) -> Function:
    """Mark a function so that Triton omits it from the hash of a kernel, which host code may request during a run."""
    setattr(fn, tl.core.TRITON_BUILTIN, True)
    return fn


NOT_RUN = " does not run in the emulator: "


def _builtin(member: Function, title: str) -> Function:
    """Return the interpreted form of a function of the language. If the emulator has no such form, the error names the
    function by its title."""

    body = getattr(member, "__wrapped__", member)  # without Triton's check that a kernel makes the call

    def call(*args: object, **kwargs: object) -> object:
        if ThreadTensor.exist:
            refuse_thread_values(*args, *kwargs.values())
        kwargs["_semantic"] = semantic
        try:
            return body(*args, **kwargs)
        except (NotImplementedError, Unsupported) as error:
            if isinstance(error, Unsupported) and not title.startswith("tl.extra."):  # tl.extra is itself inline PTX
                raise
            reason = str(error).partition(NOT_RUN)[2] or str(error)
            raise NotImplementedError(f"{title}{NOT_RUN}{reason}") from None

    return _of_triton(call)


def _refused(title: str, reason: str) -> Function:
    """Return the form of a function of the language that the emulator does not run."""

    def call(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{title}{NOT_RUN}{reason}")

    return _of_triton(call)


_SPACES = {
    "tl": (tl, tl.core, tl.core.tensor, tl.math),
    "tl.tensor_descriptor": (tl.core.tensor_descriptor_base,),
    "tl.extra.cuda": (cuda,),
    "tl.extra.cuda.libdevice": (cuda.libdevice,),
}
_OTHER_GPUS = "it is for other GPUs than NVIDIA's"
_REFUSED = {
    "tl.dot_scaled": "scale the blocks, and use tl.dot",
    "tl.map_elementwise": "use tl.where in place of control flow for each element",
    **dict.fromkeys(
        (f"tl.tensor_descriptor.atomic_{name}" for name in ("add", "and", "max", "min", "or", "xor")),
        "use tl.atomic_add and its like, by pointers",
    ),
    **dict.fromkeys(
        ("tl.extra.cuda.num_warps", "tl.extra.cuda.num_threads"),
        "the number is an option of the launch: pass it as a constant too",
    ),
}


def _late(member: Function) -> Function:
    """Return a function that, when the kernel runs, calls the current form of a function of the language that the
    kernel's module imported by name."""
    return lambda *args, **kwargs: getattr(sys.modules[member.__module__], member.__name__)(*args, **kwargs)


def _is_language(value: object) -> bool:
    """Return whether a global of a kernel's module is a function of the language. `libdevice` has ordinary functions
    without a body, which Triton replaces by functions of the GPU's own module when it compiles."""
    return tl.core.is_builtin(value) or (inspect.isfunction(value) and value.__module__ == generic_libdevice.__name__)


def _inline_asm(*args: object, **kwargs: object) -> object:
    """Return the outputs of inline assembly; outputs that differ between threads are ThreadTensors."""
    outputs = _stock_inline_asm(*args, **kwargs)
    several = not isinstance(outputs, tl.tensor)
    tensors = [
        t if values is None else ThreadTensor(t, values)
        for t, values in zip(outputs if several else (outputs,), builder.assembled.threads, strict=True)
    ]
    return tuple(tensors) if several else tensors[0]


def _call(self: JITFunction, *args: object, **kwargs: object) -> object:
    if hooks.current.run is None:
        raise RuntimeError(f"{self.__name__} runs on a device only: give it to World.launch, or call it in a kernel")
    kwargs.pop("_semantic", None)
    kwargs.pop("_generator", None)
    return hooks.interpreted(self)(*args, **kwargs)


def _launch(self: JITFunction, grid: object) -> Function:
    if user_launch is not None:
        return functools.partial(user_launch, self, grid)
    raise TypeError(
        f"{self.__name__}[grid](...) is Triton's launch; here it is World.launch(kernel, grid, args, options, stream)"
    )


def _get(self: JITFunction, instance: object, owner: type | None = None) -> Function:
    return self if instance is None else functools.partial(self, instance)


def _constexpr_call(self: ConstexprFunction, *args: object, _semantic: object = None, **kwargs: object) -> object:
    return self.fn(*[plain(a) for a in args], **{k: plain(v) for k, v in kwargs.items()})


_stock_dot = _builtin(tl.core.dot, "tl.dot")
_stock_inline_asm = _builtin(tl.core.inline_asm_elementwise, "tl.inline_asm_elementwise")
_np_dtypes: dict[tl.dtype, np.dtype] = {}


def _np_dtype(kind: tl.dtype) -> np.dtype:
    """Return the result of Triton's function of this name, from a cache."""
    if type(kind) is tl.block_type:
        kind = kind.element_ty
    if type(kind) is tl.pointer_type:
        return _ADDRESS
    dtype = _np_dtypes.get(kind)
    if dtype is None:
        dtype = _np_dtypes[kind] = _stock_np_dtype(kind)
    return dtype


_ADDRESS = np.dtype(np.uint64)
_stock_np_dtype = stock._get_np_dtype
_shapes: dict[tuple[int, ...], tuple[tl.core.tuple, tl.constexpr]] = {}


def _tensor_init(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle = handle
    self.type = type
    self.dtype, key = (type.element_ty, type.sizes) if type.__class__ is tl.block_type else (type.scalar, ())
    shape_and_numel = _shapes.get(key)
    if shape_and_numel is None:
        shape_and_numel = tl.core.tuple([tl.constexpr(s) for s in key]), tl.constexpr(int(np.prod(key, dtype=np.int64)))
        _shapes[key] = shape_and_numel
    self.shape, self.numel = shape_and_numel


def _handle_init(self: TensorHandle, data: np.ndarray, dtype: tl.dtype, attr: dict | None = None) -> None:
    """Initialise the handle as Triton's `__init__` does, but without the check of the array's item size."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


_block_types: dict[tuple[Hashable, tuple[int, ...]], tl.block_type] = {}


def _block_type(element: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    """Return the block type from a cache keyed by element type and shape; `sizes` contains the shape as a Python
    tuple."""
    key: tuple[Hashable, tuple[int, ...]] = (id(element), shape)
    if type(element) is tl.pointer_type:
        key = ((id(element.element_ty), element.address_space, element.const), shape)
    known = _block_types.get(key)
    if known is None:
        known = object.__new__(tl.block_type)
        _stock_block_type(known, element, list(shape))
        known.sizes = shape
        _block_types[key] = known  # keeps the element type alive, so that no other object receives its id
    return known


def _block_type_init(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Scalar]) -> None:
    self.__dict__.update(_block_type(element_ty, tuple([plain(n) for n in shape])).__dict__)


_stock_block_type = tl.block_type.__init__
_stock_tuple_eq = tl.core.tuple.__eq__
_SAME = tl.constexpr(True)
_WHOLE = slice(None)


def _tuple_eq(self: tl.core.tuple, other: object) -> tl.constexpr:
    return _SAME if self is other else _stock_tuple_eq(self, other)


def _getitem(self: tl.tensor, slices: object) -> tl.tensor:
    """Return the tensor with new axes, by a faster implementation for the usual index of a block."""
    if type(self.type) is tl.block_type and type(slices) is tuple and all(s is None or s == _WHOLE for s in slices):
        if len(slices) - slices.count(None) <= self.handle.data.ndim:
            return _tensor(self.handle.data[slices], self.dtype, self)
    return _stock_getitem(self, slices)


_stock_getitem = _builtin(tl.core.tensor.__getitem__, "tl.tensor.__getitem__")


Change = tuple[object, str, object]  # object, attribute, value


class _Recorder:
    """Collect the attributes that Triton's own patching would set, without setting them."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def set_attr(self, obj: object, name: str, value: object) -> None:
        self.changes.append((obj, name, value))


@functools.cache
def _changes() -> list[Change]:
    """Return (object, attribute, interpreted value) of each patched attribute; the list is computed once while the
    language is unpatched."""
    scope = _Recorder()
    for path, spaces in _SPACES.items():
        for space, (name, member) in ((s, named) for s in spaces for named in inspect.getmembers(s)):
            if tl.core.is_builtin(member):
                title = f"{path}.{name}"
                reason = _REFUSED.get(title)
                scope.set_attr(space, name, _refused(title, reason) if reason else _builtin(member, title))
    for name, _ in inspect.getmembers(generic_libdevice, inspect.isfunction):
        title, of_cuda = f"tl.extra.libdevice.{name}", getattr(cuda.libdevice, name, None)
        interpreted = _refused(title, _OTHER_GPUS) if of_cuda is None else _builtin(of_cuda, title)
        scope.set_attr(generic_libdevice, name, interpreted)
    for path, space in (("tl.extra.hip", hip), ("tl.extra.hip.libdevice", hip.libdevice)):
        for name, _ in inspect.getmembers(space, tl.core.is_builtin):
            scope.set_attr(space, name, _refused(f"{path}.{name}", _OTHER_GPUS))
    scope.set_attr(tl.target_info, "current_target", _of_triton(lambda: GPUTarget("cuda", HOPPER, 32)))
    stock._patch_lang_tensor(tl.core.tensor, scope)
    scope.set_attr(tl.core.tensor, "__index__", as_int)  # numpy 2.4 does not convert an array with one element
    for space in (tl, tl.core):
        stock._patch_lang_core(space, scope)
        for name, value in (
            ("range", _range),
            ("static_range", _static_range),
            ("condition", _condition),
            ("reduce", _reduce),
            ("associative_scan", _scan),
        ):
            scope.set_attr(space, name, value)
    for space in (tl, tl.core):
        scope.set_attr(space, "dot", _dot)
        scope.set_attr(space, "inline_asm_elementwise", _inline_asm)
    for name in (*_COMMON, *_BLOCK_DIVISION):
        scope.set_attr(tl.core.tensor, name, _fast(name, _builtin(vars(tl.core.tensor)[name], f"tl.tensor.{name}")))
    scope.set_attr(tl.core.tensor, "__init__", _tensor_init)
    scope.set_attr(tl.core.block_type, "__init__", _block_type_init)
    scope.set_attr(tl.core.tensor, "__getitem__", _getitem)
    scope.set_attr(tl.core.tuple, "__eq__", _tuple_eq)
    scope.set_attr(TensorHandle, "__init__", _handle_init)
    scope.set_attr(stock, "_get_np_dtype", _np_dtype)
    scope.set_attr(JITFunction, "__call__", _call)
    scope.set_attr(JITFunction, "__getitem__", _launch)
    scope.set_attr(JITFunction, "__get__", _get)
    scope.set_attr(ConstexprFunction, "__call__", _constexpr_call)
    return scope.changes


@contextmanager
def patched(programs: Programs) -> Iterator[None]:
    """Interpret `triton.language`, passing memory accesses and barriers to `programs`, until the block ends."""
    global hooks
    if hooks is not None:
        raise RuntimeError("an emulated run is already going on in this process")
    undo: list[Change] = []
    nothing = SimpleNamespace()
    hooks, ThreadTensor.exist = programs, False
    try:
        for obj, name, value in _changes():
            undo.append((obj, name, vars(obj).get(name, nothing)))
            setattr(obj, name, value)
        yield
    finally:
        for obj, name, value in reversed(undo):
            if value is nothing:
                delattr(obj, name)
            else:
                setattr(obj, name, value)
        hooks = None
