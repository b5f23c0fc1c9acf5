"""In the emulator, every public function of Triton's language either gives the results of numpy and torch, or is
refused with an error that names it."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.extra import cuda, libdevice

import weft
from weft.errors import MemoryFault

N = 16
RNG = np.random.default_rng(0)
X = np.concatenate([[-2.5, -1.5, -1, -0.5, 0, 0.25, 0.5, 1], RNG.normal(size=8)]).astype(np.float32)
Y = RNG.uniform(0.1, 3, N).astype(np.float32)
INTS = np.array([0, 1, -1, 2, 3, 7, -8, 100, -(2**31), 2**31 - 1, 12345, -777, 5, 6, 15, 255], np.int32)
K = np.array([3, 1, 4, 2, 5, 9, 7, 6, 8, 3, 11, 13, 4, 1, 2, 10], np.int32)
M = RNG.normal(size=(N, N)).astype(np.float32)
INPUTS = dict(x=X, y=Y, i=INTS, k=K, m=M)
bf = tl.bfloat16

HEAD = """
import triton.language as tl
import weft
from triton.language import exp2 as imported_exp2, load as imported_load, store
from triton.language.extra import cuda, hip, libdevice
from triton.language.extra.cuda.libdevice import expm1 as imported_expm1
from triton.language.extra.libdevice import tanh as imported_tanh
from triton.language.math import rsqrt as imported_rsqrt
"""
KERNEL = """
@weft.jit
def kernel_{number}(xs, ys, ints, ks, ms, out, N: tl.constexpr):
    at = tl.arange(0, N)
    all = at[:, None] * N + at[None, :]
    x, y, i, k = tl.load(xs + at), tl.load(ys + at), tl.load(ints + at), tl.load(ks + at)
    m = tl.load(ms + all)
"""


def by_torch(fn: Callable[..., torch.Tensor], *arrays: np.ndarray) -> np.ndarray:
    return fn(*map(torch.from_numpy, arrays)).numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    return by_torch(lambda t: torch.softmax(t, 0), x)


# For each function: statements, the last of which is an expression (with N elements or one element), and its value.
CASES: dict[str, tuple[str, Any]] = {
    "inline_asm_elementwise": (
        "tl.inline_asm_elementwise('add.s32 $0, $1, $1;', '=r, r', [(x * 10).to(tl.int32)], tl.int32, is_pure=True, pack=1)",
        (X * 10).astype(np.int32) * 2,
    ),
    "abs": ("tl.abs(x)", np.abs(X)),
    "add": ("tl.add(x, y)", X + Y),
    "sub": ("tl.sub(x, y)", X - Y),
    "mul": ("tl.mul(x, y)", X * Y),
    "arange": ("tl.arange(4, 20)", np.arange(4, 20)),
    "argmax": ("tl.argmax(m, 1)", M.argmax(1)),
    "argmin": ("tl.argmin(m, 1)", M.argmin(1)),
    "assume": ("tl.assume(N > 0)\nx", X),
    "broadcast": ("tl.broadcast(x[:, None], y[None, :])[0].sum(1)", X * N),
    "broadcast_to": ("tl.broadcast_to(x[:, None], [N, N]).sum(1)", X * N),
    "cast": ("tl.cast(x * 10, tl.int32)", (X * 10).astype(np.int32)),
    "cat": ("tl.sum(tl.cat(x, y, can_reorder=True), 0) + x", np.float32(X.sum() + Y.sum()) + X),
    "cdiv": ("tl.cdiv(k, 4)", -(-K // 4)),
    "ceil": ("tl.ceil(x)", np.ceil(X)),
    "clamp": ("tl.clamp(x, -0.5, 0.5)", np.clip(X, -0.5, 0.5)),
    "cos": ("tl.cos(x)", np.cos(X)),
    "cumprod": ("tl.cumprod(y, 0)", np.cumprod(Y)),
    "cumsum": ("tl.cumsum(x, 0, reverse=True)", np.cumsum(X[::-1])[::-1]),
    "debug_barrier": ("tl.debug_barrier()\nx", X),
    "device_assert": ("tl.device_assert(k > 0)\nx", X),
    "device_print": ('tl.device_print("k", tl.sum(k, 0))\nx', X),
    "div_rn": ("tl.div_rn(x, y)", X / Y),
    "dot": ("tl.dot(m, m, input_precision='ieee').sum(1)", (M @ M).sum(1)),
    "erf": ("tl.erf(x)", by_torch(torch.erf, X)),
    "exp": ("tl.exp(x)", np.exp(X)),
    "exp2": ("imported_exp2(x)", np.exp2(X)),
    "expand_dims": ("tl.expand_dims(x, 1).sum(1)", X),
    "fdiv": ("tl.fdiv(x, y)", X / Y),
    "flip": ("tl.flip(x, 0)", X[::-1]),
    "floor": ("tl.floor(x)", np.floor(X)),
    "fma": ("tl.fma(x, y, x)", (X.astype(np.float64) * Y + X).astype(np.float32)),
    "full": ("tl.full([N], 3, tl.int32)", np.full(N, 3)),
    "gather": ("tl.gather(x, k, 0)", X[K]),
    "histogram": ("tl.histogram(k, N)", np.bincount(K, minlength=N)),
    "interleave": ("tl.interleave(x, y).reshape([N, 2]).sum(1)", X + Y),
    "join": ("tl.join(x, y).sum(1)", X + Y),
    "split": ("a, b = tl.split(tl.join(x, y))\na - b", X - Y),
    "load": ("imported_load(xs + at)", X),
    "store": ("store(out + at, x)\ntl.load(out + at)", X),
    "log": ("tl.log(y)", np.log(Y)),
    "log2": ("tl.log2(y)", np.log2(Y)),
    "make_block_ptr": ("tl.load(tl.make_block_ptr(ms, [N, N], [N, 1], [0, 0], [N, N], [1, 0])).sum(1)", M.sum(1)),
    "advance": (
        "tl.load(tl.advance(tl.make_block_ptr(xs, [N], [1], [0], [N], [0]), [4]), boundary_check=[0])\n"
        "tl.load(tl.advance(tl.make_block_ptr(xs, [N], [1], [0], [8], [0]), [8])).sum(0) + x",
        X[8:].sum() + X,
    ),
    "make_tensor_descriptor": ("tl.make_tensor_descriptor(ms, [N, N], [N, 1], [N, N]).load([0, 0]).sum(1)", M.sum(1)),
    "load_tensor_descriptor": (
        "tl.load_tensor_descriptor(tl.make_tensor_descriptor(ms, [N, N], [N, 1], [N, N]), [8, 0]).sum(0)",
        M[8:].sum(0),
    ),
    "store_tensor_descriptor": (
        "tl.store_tensor_descriptor(tl.make_tensor_descriptor(out, [N], [1], [N]), [0], x)\n"
        "weft.lang.flush_stores()\nx",
        X,
    ),
    "max": ("tl.max(m, 1)", M.max(1)),
    "min": ("tl.min(m, 1)", M.min(1)),
    "max_constancy": ("tl.max_constancy(x, 4)", X),
    "max_contiguous": ("tl.max_contiguous(x, 4)", X),
    "multiple_of": ("tl.multiple_of(x, 4)", X),
    "maximum": ("tl.maximum(x, y)", np.maximum(X, Y)),
    "minimum": ("tl.minimum(x, y)", np.minimum(X, Y)),
    "num_programs": ("x + tl.num_programs(0)", X + 1),
    "program_id": ("x + tl.program_id(0)", X),
    "permute": ("tl.permute(m, 1, 0).sum(1)", M.sum(0)),
    "trans": ("tl.trans(m).sum(1)", M.sum(0)),
    "ravel": ("tl.ravel(m).sum(0) + x", M.sum() + X),
    "reshape": ("tl.reshape(m, [N // 2, N * 2]).sum(0).reshape([2, N]).sum(0)", M.sum(0)),
    "view": ("tl.view(m, [N * N]).sum(0) + x", M.sum() + X),
    "range": ("for j in tl.range(3):\n    x += j\nx", X + 3),
    "static_range": ("for j in tl.static_range(3):\n    x += j\nx", X + 3),
    "condition": ("j = 0\nwhile tl.condition(j < 3):\n    j += 1\nx + j", X + 3),
    "reduce_or": ("tl.reduce_or(k, 0) + k", np.bitwise_or.reduce(K) + K),
    "xor_sum": ("tl.xor_sum(k, 0) + k", np.bitwise_xor.reduce(K) + K),
    "rsqrt": ("imported_rsqrt(y)", 1 / np.sqrt(Y)),
    "sigmoid": ("tl.sigmoid(x)", 1 / (1 + np.exp(-X))),
    "sin": ("tl.sin(x)", np.sin(X)),
    "softmax": ("tl.softmax(x)", softmax(X)),
    "sort": ("tl.sort(x)", np.sort(X)),
    "topk": ("tl.topk(x, 4).sum(0) + x", np.sort(X)[-4:].sum() + X),
    "bitonic_merge": ("tl.bitonic_merge(tl.abs(at - 8))", np.sort(np.abs(np.arange(N) - 8))),
    "sqrt": ("tl.sqrt(y)", np.sqrt(Y)),
    "sqrt_rn": ("tl.sqrt_rn(y)", np.sqrt(Y)),
    "static_assert": ("tl.static_assert(N == 16)\nx", X),
    "static_print": ("tl.static_print(N)\nx", X),
    "sum": ("tl.sum(m, 1)", M.sum(1)),
    "swizzle2d": (
        "a, b = tl.swizzle2d(at // 4, at % 4, 4, 4, 2)\na * 4 + b",
        [i // 8 * 8 + i % 2 * 4 + i % 8 // 2 for i in range(N)],
    ),
    "umulhi": ("tl.umulhi(k.to(tl.uint32) * 2**27, (k * 0 + 64).to(tl.uint32))", (K.astype(np.uint64) * 2**33 >> 32)),
    "where": ("tl.where(x > 0, x, y)", np.where(X > 0, X, Y)),
    "zeros": ("tl.zeros([N], tl.float32)", np.zeros(N)),
    "zeros_like": ("tl.zeros_like(x)", np.zeros(N)),
}


def philox(seed: int, *counters: np.ndarray) -> list[np.ndarray]:
    """Return the four words of Philox 4x32-10 (Salmon et al., 2011)."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    c = [x.astype(np.uint64) for x in np.broadcast_arrays(*counters)]
    for _ in range(10):
        a, b = c[2] * np.uint64(0xCD9E8D57), c[0] * np.uint64(0xD2511F53)
        c = [a >> 32 ^ c[1] ^ low, a & 0xFFFFFFFF, b >> 32 ^ c[3] ^ high, b & 0xFFFFFFFF]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [x.astype(np.uint32) for x in c]


def uniform(words: np.ndarray) -> np.ndarray:
    signed = words.view(np.int32).astype(np.int64)
    return (np.where(signed < 0, -signed - 1, signed) * 4.6566127342e-10).astype(np.float32)


def normal(u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    radius, angle = np.sqrt(-2 * np.log(np.maximum(u, 1e-7))), 2 * np.pi * v
    return radius * np.cos(angle), radius * np.sin(angle)


AT, ZERO = np.arange(N), np.zeros(N, np.int64)
WORDS = philox(7, AT, ZERO, ZERO, ZERO)
UNIFORM = [uniform(words) for words in WORDS]
NORMAL = [*normal(*UNIFORM[:2]), *normal(*UNIFORM[2:])]
LINEAR = list(
    itertools.accumulate(zip(X.tolist(), Y.tolist(), strict=True), lambda a, b: (a[0] * b[1] + b[0], a[1] * b[1]))
)
CASES |= {
    "philox": ("a, b, c, d = tl.philox(7, at, 0, 0, 0)\n(a ^ b ^ c ^ d).to(tl.int64)", np.bitwise_xor.reduce(WORDS)),
    "philox_impl": (
        "zero = (at * 0).to(tl.uint32)\n"
        "a, b, c, d = tl.philox_impl(at.to(tl.uint32), zero, zero, zero, zero + 7, zero)\n(a ^ b ^ c ^ d).to(tl.int64)",
        np.bitwise_xor.reduce(WORDS),
    ),
    "randint": ("tl.randint(7, at).to(tl.int64)", WORDS[0]),
    "randint4x": ("a, b, c, d = tl.randint4x(7, at)\nd.to(tl.int64)", WORDS[3]),
    "rand": ("tl.rand(7, at)", UNIFORM[0]),
    "rand4x": ("a, b, c, d = tl.rand4x(7, at)\na + b + c + d", sum(UNIFORM)),
    "randn": ("tl.randn(7, at)", NORMAL[0]),
    "randn4x": ("a, b, c, d = tl.randn4x(7, at)\na + b + c + d", sum(NORMAL)),
    "pair_uniform_to_normal": ("a, b = tl.pair_uniform_to_normal(y / 4, y / 5)\na + b", sum(normal(Y / 4, Y / 5))),
    "uint_to_uniform_float": ("tl.uint_to_uniform_float(k.to(tl.uint32))", uniform(K.view(np.uint32))),
    "reduce": ("tl.reduce(m, 1, largest_magnitude)", M[AT, np.abs(M).argmax(1)]),
    "associative_scan": ("a, b = tl.associative_scan((x, y), 0, linear)\na", np.array([a for a, _ in LINEAR])),
}
HEAD += """

@weft.jit
def largest_magnitude(a, b):
    return tl.where(tl.abs(a) >= tl.abs(b), a, b)


@weft.jit
def linear(a, b, c, d):
    return a * d + c, b * d
"""
INT_ATOMICS = {
    "add": K + 5, "and": K & 5, "max": np.maximum(K, 5), "min": np.minimum(K, 5), "or": K | 5, "xor": K ^ 5, "xchg": ZERO + 5,
}  # fmt: skip
CASES |= {
    f"atomic_{name}": (f"a = tl.atomic_{name}(ks + at, 5)\ntl.load(ks + at) * 100 + a", value * 100 + K)
    for name, value in INT_ATOMICS.items()
}
CASES["atomic_cas"] = ("a = tl.atomic_cas(ks + at, k * 0 + 3, k * 0 + 50)\ntl.load(ks + at)", np.where(K == 3, 50, K))
CASES |= {
    "and": ("((k > 2) and (x < 0)).to(tl.int32)", (K > 2) & (X < 0)),
    "or of three": ("((k > 5) or (x < 0) or (y < 0)).to(tl.int32)", (K > 5) | (X < 0) | (Y < 0)),
    "not": ("(not (k > 2)).to(tl.int32)", K <= 2),
    "and, or, not of scalars": (
        "n = tl.max(k, 0)\nk + ((n > 0) and not (n < 0)).to(tl.int32) + ((n < 0) or (n > 0)).to(tl.int32)",
        K + 2,
    ),
    "and, or of constants": (
        "k + (N or 1) + ((N > 0) and 2) + (None or 3) + (0 if None and tl.load(xs + 999) else 4)",
        K + N + 9,
    ),
    "a constant in a condition of tensors": ("((k > 2) and N).to(tl.int32) + (0 or (k > 2)).to(tl.int32)", 2 * (K > 2)),
}
DESC = "d = tl.make_tensor_descriptor(ms, [N, N], [N, 1], {block})\n"
# For each method of a tensor or descriptor that is not a function of the language, and for each operator.
OTHERS: dict[str, tuple[str, Any]] = {
    "item": ("tl.sum(x, 0).item() + x", X.sum() + X),
    "extra.cuda.gdc_wait": ("cuda.gdc_wait()\nx", X),
    "extra.cuda.gdc_launch_dependents": ("cuda.gdc_launch_dependents()\nx", X),
    "to": ("(x * 10).to(tl.int32)", (X * 10).astype(np.int32)),
    "to bitcast": ("x.to(tl.int32, bitcast=True)", X.view(np.int32)),
    "T": ("m.T.sum(1)", M.sum(0)),
    "logical_and": ("(x > 0).logical_and(y > 1)", (X > 0) & (Y > 1)),
    "logical_or": ("(x > 0).logical_or(y > 1)", (X > 0) | (Y > 1)),
    "builtin_min": ("min(tl.sum(k, 0), 3) + x", X + 3),
    "builtin_max": ("max(tl.sum(k, 0), 3) + x", X + K.sum()),
    "min of blocks": ("min(x, y)", np.minimum(X, Y)),
    "max of numbers": ("x + max(N, 3)", X + N),
    "to_tensor": ("tl.to_tensor(3) + x" if hasattr(tl, "to_tensor") else "x + 3", X + 3),
    "descriptor load": (DESC.format(block="[8, N]") + "d.load([8, 0]).sum(0)", M[8:].sum(0)),
    "descriptor store": (
        DESC.format(block="[N, N]") + "d.store([0, 0], m * 2)\nweft.lang.flush_stores()\ntl.sum(tl.load(ms + all), 1)",
        (M * 2).sum(1),
    ),
    "descriptor gather": (DESC.format(block="[1, N]") + "d.gather(k, 0).sum(1)", M[K].sum(1)),
    "descriptor scatter": (
        DESC.format(block="[1, N]")
        + "d.scatter(m, (at + 1) % N, 0)\nweft.lang.flush_stores()\ntl.sum(tl.load(ms + all), 1)",
        np.roll(M, 1, 0).sum(1),
    ),
    "descriptor shape": (DESC.format(block="[8, N]") + "x + d.block_shape[0] + d.shape[0]", X + 8 + N),
    "/": ("k / 4 + x / y", K / 4 + X / Y),
    "//": ("i // k", np.trunc(INTS / K.astype(np.float64)).astype(np.int64)),
    "%": ("i % k", np.fmod(INTS, K)),
    "64 bits // 32 bits": ("(i.to(tl.int64) * 3) // k", np.trunc(INTS * 3.0 / K).astype(np.int64)),
    "64 bits % 32 bits": ("(i.to(tl.int64) * 3) % k", np.fmod(INTS * np.int64(3), K)),
    "& of numbers": ("(i & 6) + (k | 1) + (tl.sum(k, 0) & 12)", (INTS & 6) + (K | 1) + (K.sum() & 12)),
    "% of floats": ("x % y", np.fmod(X, Y)),
    "<<": ("k << 3", K << 3),
    ">>": ("i >> 2", INTS >> 2),
    ">> of unsigned": ("(i.to(tl.uint32) >> 2).to(tl.int64)", INTS.view(np.uint32) >> 2),
    "&": ("i & k", INTS & K),
    "|": ("i | k", INTS | K),
    "^": ("i ^ k", INTS ^ K),
    "~": ("~i", ~INTS),
    "-": ("-x", -X),
    "not": ("a = not (tl.sum(k, 0) > 0)\nx + a", X),
    "compare": ("(x < y) & (x <= y) | (x == y) | (x != y) & (x > y) | (x >= y)", (X < Y) | (X == Y) | (X > Y)),
    "overflow": ("(i + i).to(tl.int64)", (INTS.astype(np.int64) * 2).astype(np.int32)),
    "[None]": ("x[:, None].sum(1)", X),
    "int8": ("(i.to(tl.int8)).to(tl.int32)", INTS.astype(np.int8)),
    "uint8": ("(i.to(tl.uint8)).to(tl.int32)", INTS.astype(np.uint8)),
    "float16": ("(x.to(tl.float16) * y.to(tl.float16)).to(tl.float32)", (X.astype(np.float16) * Y.astype(np.float16))),
    "bfloat16": (
        "(x.to(tl.bfloat16) * y.to(tl.bfloat16)).to(tl.float32)",
        by_torch(lambda a, b: (a.bfloat16() * b.bfloat16()).float(), X, Y),
    ),
    "float64": ("(x.to(tl.float64) / 3).to(tl.float32)", X / 3),
    "capability": ("x + (tl.target_info.cuda_capability_geq(9) and tl.target_info.is_cuda())", X + 1),
    "imported tanh": ("imported_tanh(x)", np.tanh(X)),
    "imported expm1": ("imported_expm1(x)", np.expm1(X)),
}
METHODS = ["item", "to", "logical_and", "logical_or"]
# Public names of the language that are not functions for kernels.
NO_FUNCTIONS = {
    "PropagateNan", "block_type", "const", "constexpr", "constexpr_type", "dtype", "pointer_type", "slice", "str_to_ty",
    "tensor", "tensor_descriptor", "tensor_descriptor_type", "tuple", "tuple_type",
}  # fmt: skip
REFUSED = {
    "dot_scaled": "tl.dot_scaled(m.to(tl.float8e5), None, 'e5m2', m.to(tl.float8e5), None, 'e5m2')",
    "map_elementwise": "tl.map_elementwise(linear, x, y, x, y)",
    "extra.cuda.smid": "cuda.smid()",
    "extra.cuda.globaltimer": "cuda.globaltimer()",
    "extra.cuda.num_warps": "cuda.num_warps()",
    "extra.cuda.num_threads": "cuda.num_threads()",
    **{
        f"extra.cuda.convert_custom_float8_{sm}": f"cuda.convert_custom_float8_{sm}(x.to(tl.float16), tl.float8e4b15)"
        for sm in ("sm70", "sm80")
    },
    "extra.hip.libdevice.tanh": "hip.libdevice.tanh(x)",
    **{
        f"tensor_descriptor.atomic_{name}": DESC.format(block="[N, N]") + f"d.atomic_{name}([0, 0], m)"
        for name in ("add", "and", "max", "min", "or", "xor")
    },
}


@pytest.fixture(scope="module")
def kernel_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Return a kernel that stores the value of the statements. The function writes a module that contains the
    kernel."""
    folder, numbers = tmp_path_factory.mktemp("language"), itertools.count()

    def write(statements: str) -> Any:
        number = next(numbers)
        *lines, value = statements.splitlines()
        body = [*lines, f"tl.store(out + at, {value})"]
        path = folder / f"language_{number}.py"
        path.write_text(HEAD + KERNEL.format(number=number) + "".join(f"    {line}\n" for line in body))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, f"kernel_{number}")

    return write


def computed(kernel: Any, dtype: torch.dtype, **changed: np.ndarray) -> np.ndarray:
    inputs = {**INPUTS, **changed}

    def main(world: weft.World) -> torch.Tensor:
        out = world.empty((N,), dtype)
        args = dict(xs="x", ys="y", ints="i", ks="k", ms="m")
        tensors = {name: torch.from_numpy(np.array(inputs[key])) for name, key in args.items()}
        world.launch(kernel, 1, tensors | dict(out=out, N=N), {}, world.current_stream())
        world.synchronize()
        return out

    return weft.spmd(main, 1, backend="emulated")[0].numpy()


def compare(out: np.ndarray, expected: Any, tolerance: float = 2e-6) -> None:
    expected = np.asarray(expected)
    if out.dtype.kind == "f":
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    else:
        assert (out == expected).all(), (out, expected)


def dtype_of(value: Any) -> torch.dtype:
    return torch.float32 if np.asarray(value).dtype.kind == "f" else torch.int64


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_a_function_gives_the_results_of_numpy_and_torch(kernel_of: Callable[[str], Any], name: str) -> None:
    statements, expected = (CASES | OTHERS)[name]
    compare(computed(kernel_of(statements), dtype_of(expected)), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_does_not_run_is_refused_by_name(kernel_of: Callable[[str], Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"tl\.{name} does not run in the emulator: \w+"):
        computed(kernel_of(REFUSED[name]), torch.float32)


def test_both_operands_of_and_are_computed(kernel_of: Callable[[str], Any]) -> None:
    """Triton computes both operands of tensors, so that the first one does not guard a load in the second one."""
    kernel = kernel_of("n = tl.sum(k * 0, 0)\nwhile n < N and tl.load(xs + n) < 1e9:\n        n += 1\nn")
    with pytest.raises(MemoryFault, match=rf"read of xs\[{N}\]"):
        computed(kernel, torch.int64)


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("tl.where(1 < k < 3, 1, 0)", "does not compile a chain of comparisons"),
        ("if k > 3:\n        k += 1\nk", f"a condition of {N} elements"),
        ("while k > 3:\n        k -= 1\nk", f"a condition of {N} elements"),
        ("n = tl.max(k, 0)\n(n and n).to(tl.int32)", "Cannot bitcast"),
    ],
)
def test_conditions_that_triton_does_not_compile_are_refused(
    kernel_of: Callable[[str], Any], statements: str, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        computed(kernel_of(statements), torch.int64)


def test_a_descriptor_refuses_offsets_of_64_bits(kernel_of: Callable[[str], Any]) -> None:
    kernel = kernel_of(DESC.format(block="[8, N]") + "d.load([tl.sum(k, 0).to(tl.int64), 0]).sum(0)")
    with pytest.raises(AssertionError, match="only support 32 bit"):
        computed(kernel, torch.float32)


@weft.jit
def added(sums, values, before, TIMES: tl.constexpr, N: tl.constexpr):
    """Add every element of `values` to one of four sums, `TIMES` times."""
    lane = tl.arange(0, N)
    for _ in range(TIMES):
        old = tl.atomic_add(sums + lane % 4, tl.load(values + lane), mask=lane < N - 4)
        tl.store(before + lane, old, mask=lane < N - 4)


@weft.jit
def counted(sums, N: tl.constexpr):
    """Replace every 5 by 6, and add 5 to every element under the same mask."""
    lane = tl.arange(0, N)
    five = tl.load(sums)
    old, _ = tl.broadcast(five, lane)
    new, _ = tl.broadcast(five + 1, lane)
    mask, _ = tl.broadcast(five == 5, lane)
    tl.atomic_cas(sums + lane, old, new)
    tl.atomic_add(sums + lane, old, mask=mask)


def test_atomics_take_a_broadcast_number() -> None:
    """Triton's atomics read contiguous memory, but the emulator's broadcast tensors are views with stride 0."""

    def main(world: weft.World) -> torch.Tensor:
        sums = world.zeros((N,), torch.int32).fill_(5)
        world.launch(counted, 1, dict(sums=sums, N=N), {}, world.current_stream())
        world.synchronize()
        return sums

    (sums,) = weft.spmd(main, 1, backend="emulated")
    assert sums.tolist() == [11] * N


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64]
)
def test_atomics_add_in_every_type(dtype: torch.dtype) -> None:
    values = torch.arange(N).to(dtype) / 2 if dtype.is_floating_point else torch.arange(N, dtype=dtype)

    def main(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
        sums, before = world.zeros((4,), dtype), world.zeros((N,), dtype)
        args = dict(sums=sums, values=values, before=before, TIMES=2, N=N)
        world.launch(added, 1, args, {}, world.current_stream())
        world.synchronize()
        return sums, before

    sums, before = weft.spmd(main, 1, backend="emulated")[0]
    kept = values[: N - 4].reshape(-1, 4)
    torch.testing.assert_close(sums, (kept.double().sum(0) * 2).to(dtype))
    torch.testing.assert_close(before[4:8], (kept.double().sum(0) + kept[0].double()).to(dtype))


@weft.jit
def exchanged(words, values, before, N: tl.constexpr):
    lane = tl.arange(0, N)
    old = tl.atomic_xchg(words + lane, tl.load(values + lane), mask=lane < N - 4)
    tl.store(before + lane, old, mask=lane < N - 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_atomics_exchange_floats_and_integers(dtype: torch.dtype) -> None:
    values = torch.arange(N).to(dtype) + (0.5 if dtype.is_floating_point else 0)

    def main(world: weft.World) -> tuple[torch.Tensor, torch.Tensor]:
        words, before = torch.full((N,), 7, dtype=dtype), torch.zeros(N, dtype=dtype)
        world.launch(exchanged, 1, dict(words=words, values=values, before=before, N=N), {}, world.current_stream())
        world.synchronize()
        return words, before

    words, before = weft.spmd(main, 1, backend="emulated")[0]
    assert words.tolist() == values[: N - 4].tolist() + [7] * 4
    assert before.tolist() == [7] * (N - 4) + [0] * 4


# -- casts to and from 8 bits -------------------------------------------------------------------------------------------

ALL_16 = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
FLOAT8 = {torch.float8_e4m3fn: (tl.float8e4nv, 4, 3, 448.0), torch.float8_e5m2: (tl.float8e5, 5, 2, 57344.0)}


@weft.jit
def casted(xs, out, AS: tl.constexpr, TO: tl.constexpr, ROUNDING: tl.constexpr, N: tl.constexpr):
    lane = tl.arange(0, N)
    x = tl.load(xs + lane)
    tl.store(out + lane, x.to(TO, fp_downcast_rounding=ROUNDING).to(AS, bitcast=True))


def cast(x: torch.Tensor, to: tl.dtype, rounding: str | None = None) -> np.ndarray:
    bits = {8: (torch.uint8, tl.uint8), 16: (torch.uint16, tl.uint16), 32: (torch.uint32, tl.uint32)}
    dtype, kind = bits[to.primitive_bitwidth]

    def main(world: weft.World) -> torch.Tensor:
        out = world.empty((x.numel(),), dtype)
        args = dict(xs=x, out=out, AS=kind, TO=to, ROUNDING=rounding, N=x.numel())
        world.launch(casted, 1, args, {}, world.current_stream())
        world.synchronize()
        return out

    return weft.spmd(main, 1, backend="emulated")[0].numpy()


def value_of_8_bits(bits: int, exponent_bits: int, mantissa_bits: int) -> float:
    exponent, mantissa = bits >> mantissa_bits & (1 << exponent_bits) - 1, bits & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == 0:
        return math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_to_8_bits_is_that_of_the_hardware(source: torch.dtype, dtype: torch.dtype) -> None:
    """For all 16-bit numbers, the cast equals `cvt.rn.satfinite`, which rounds to the nearest number of the format,
    with ties to even. The test finds the nearest number by a search."""
    kind, exponent_bits, mantissa_bits, largest = FLOAT8[dtype]
    x = torch.from_numpy(ALL_16).view(torch.float16 if source == torch.float32 else source)
    if source == torch.float32:  # all 16-bit numbers, and numbers next to and between them
        x = (x.float() * 1.001).contiguous()
    wide = x.double().numpy()
    values = [value_of_8_bits(bits, exponent_bits, mantissa_bits) for bits in range(128)]
    values = np.array([v for v in values if v <= largest])
    size = np.minimum(np.abs(np.nan_to_num(wide, nan=0, posinf=1e9, neginf=1e9)), largest)
    above = np.searchsorted(values, size).clip(max=len(values) - 1)
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - values[below], values[above] - size
    bits = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    expected = np.where(np.isnan(wide), 0x7F, bits | np.signbit(wide) << 7)
    out = cast(x, kind)
    assert (out == expected).all(), [(wide[i], out[i], expected[i]) for i in np.flatnonzero(out != expected)[:5]]


def test_a_truncating_cast_to_8_bits_is_that_of_the_hardware() -> None:
    x = torch.from_numpy(ALL_16).view(torch.float16).float() * 1.001
    out, exact = cast(x, tl.float8e5, "rtz"), x.double().numpy()
    back = torch.from_numpy(out).view(torch.float8_e5m2).double().numpy()
    number = np.isfinite(exact)
    assert (out[np.isnan(exact)] == 0x7F).all() and (np.abs(back[number]) <= np.abs(exact[number])).all()
    next_out = torch.from_numpy(out + 1).view(torch.float8_e5m2).double().numpy()
    assert (np.abs(next_out[number]) > np.abs(exact[number])).all()
    for source, to in ((torch.float16, tl.float8e5), (torch.float32, tl.float8e4nv), (torch.bfloat16, tl.float8e4nv)):
        with pytest.raises(NotImplementedError, match=r"a cast from \w+ to \w+ rounds to nearest only"):
            cast(x[:16].to(source), to, "rtz")


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cast_from_8_bits_is_that_of_the_hardware(to: torch.dtype, dtype: torch.dtype) -> None:
    """The cast is exact, but Triton converts e5m2 to bf16 by a shift and a product, which turn infinity into 2^16, and
    NaN into a larger number."""
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.from_numpy(cast(x, getattr(tl, str(to).removeprefix("torch.")))).view(to)
    expected = x.double()
    if dtype == torch.float8_e5m2 and to == torch.bfloat16:
        special = ~expected.isfinite()
        size = torch.tensor([value_of_8_bits(bits & 127, 5, 2) for bits in range(256)]).double()
        expected = torch.where(special, torch.where(torch.arange(256) > 127, -size, size), expected)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("statements", ["m8 + m8", "m8 > m8", "-m8"])
def test_operations_without_8_bits_on_gpus_are_refused(kernel_of: Callable[[str], Any], statements: str) -> None:
    with pytest.raises(NotImplementedError, match="GPUs compute no 8-bit floats: cast them first"):
        computed(kernel_of(f"m8 = x.to(tl.float8e5)\na = {statements}\nx"), torch.float32)


def test_every_function_is_run_or_refused() -> None:
    functions = {name for name in dir(tl) if not name.startswith("_") and callable(getattr(tl, name))} - NO_FUNCTIONS
    assert functions == {*CASES, *REFUSED} & functions, functions - {*CASES, *REFUSED}
    members = {name for space in (tl.math, tl.core) for name, _ in inspect.getmembers(space, tl.core.is_builtin)}
    known = {*CASES, *REFUSED, *OTHERS, "extern_elementwise"}
    assert {member for member in members if not member.startswith("_")} <= known, members - known
    methods = {name for name in vars(tl.tensor) if not name.startswith("_") and callable(getattr(tl.tensor, name))}
    assert methods <= {*CASES, *REFUSED, *METHODS}, methods - {*CASES, *REFUSED, *METHODS}
    for space, path in ((tl.core.tensor_descriptor_base, "tensor_descriptor"), (cuda, "extra.cuda")):
        for name, _ in inspect.getmembers(space, tl.core.is_builtin):
            assert f"{path}.{name}" in {*REFUSED, *OTHERS} or f"descriptor {name}" in OTHERS, name


# -- libdevice ---------------------------------------------------------------------------------------------------------

mp = mpmath.mp
HALF = mp.mpf(0.5)
# For each function: its value for real arguments, computed to 30 digits, and the ranges from which the arguments are
# drawn.
REAL: dict[str, tuple[Callable[..., Any], tuple[tuple[float, float], ...]]] = {
    "sqrt": (mp.sqrt, ((0, 9),)),
    "rsqrt": (lambda x: 1 / mp.sqrt(x), ((0.1, 9),)),
    "cbrt": (lambda x: mp.sign(x) * mp.cbrt(abs(x)), ((-9, 9),)),
    "rcbrt": (lambda x: mp.sign(x) / mp.cbrt(abs(x)), ((-9, 9),)),
    "exp": (mp.exp, ((-5, 5),)),
    "exp2": (lambda x: mp.power(2, x), ((-5, 5),)),
    "exp10": (lambda x: mp.power(10, x), ((-5, 5),)),
    "expm1": (mp.expm1, ((-1, 1),)),
    "log": (mp.log, ((0.1, 9),)),
    "log2": (lambda x: mp.log(x, 2), ((0.1, 9),)),
    "log10": (mp.log10, ((0.1, 9),)),
    "log1p": (mp.log1p, ((-0.5, 1),)),
    "pow": (mp.power, ((0.1, 5), (-3, 3))),
    "sin": (mp.sin, ((-9, 9),)),
    "cos": (mp.cos, ((-9, 9),)),
    "tan": (mp.tan, ((-1.5, 1.5),)),
    "sinpi": (mp.sinpi, ((-9, 9),)),
    "cospi": (mp.cospi, ((-9, 9),)),
    "asin": (mp.asin, ((-1, 1),)),
    "acos": (mp.acos, ((-1, 1),)),
    "atan": (mp.atan, ((-9, 9),)),
    "atan2": (mp.atan2, ((-9, 9), (-9, 9))),
    "sinh": (mp.sinh, ((-3, 3),)),
    "cosh": (mp.cosh, ((-3, 3),)),
    "tanh": (mp.tanh, ((-3, 3),)),
    "asinh": (mp.asinh, ((-9, 9),)),
    "acosh": (mp.acosh, ((1.1, 9),)),
    "atanh": (mp.atanh, ((-0.9, 0.9),)),
    "hypot": (mp.hypot, ((-9, 9), (-9, 9))),
    "rhypot": (lambda x, y: 1 / mp.hypot(x, y), ((-9, 9), (-9, 9))),
    "norm3d": (lambda *x: mp.norm(x), ((-9, 9),) * 3),
    "norm4d": (lambda *x: mp.norm(x), ((-9, 9),) * 4),
    "rnorm3d": (lambda *x: 1 / mp.norm(x), ((-9, 9),) * 3),
    "rnorm4d": (lambda *x: 1 / mp.norm(x), ((-9, 9),) * 4),
    "erf": (mp.erf, ((-3, 3),)),
    "erfc": (mp.erfc, ((-3, 3),)),
    "erfcx": (lambda x: mp.exp(x * x) * mp.erfc(x), ((-2, 5),)),
    "erfinv": (mp.erfinv, ((-0.9, 0.9),)),
    "erfcinv": (lambda x: mp.erfinv(1 - x), ((0.1, 1.9),)),
    "normcdf": (mp.ncdf, ((-3, 3),)),
    "normcdfinv": (lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1), ((0.1, 0.9),)),
    "lgamma": (lambda x: mp.log(abs(mp.gamma(x))), ((0.1, 9),)),
    "tgamma": (mp.gamma, ((0.1, 9),)),
    "j0": (lambda x: mp.besselj(0, x), ((0.1, 9),)),
    "j1": (lambda x: mp.besselj(1, x), ((0.1, 9),)),
    "y0": (lambda x: mp.bessely(0, x), ((0.1, 9),)),
    "y1": (lambda x: mp.bessely(1, x), ((0.1, 9),)),
    "cyl_bessel_i0": (lambda x: mp.besseli(0, x), ((0.1, 5),)),
    "cyl_bessel_i1": (lambda x: mp.besseli(1, x), ((0.1, 5),)),
    "fma": (lambda x, y, z: x * y + z, ((1, 9),) * 3),
    "saturatef": (lambda x: min(max(x, mp.mpf(0)), mp.mpf(1)), ((-1, 2),)),
    "fdim": (lambda x, y: max(x - y, mp.mpf(0)), ((-9, 9), (-9, 9))),
    "fast_dividef": (lambda x, y: x / y, ((-9, 9), (0.1, 9))),
}
REAL |= {f"fast_{name}f": REAL[name] for name in ("sin", "cos", "tan", "exp", "exp10", "log", "log2", "log10", "pow")}
# For each function: its value for numbers of the dtype itself, which must be equal to the last bit.
EXACT: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "rint": np.rint,
    "nearbyint": np.rint,
    "round": lambda x: math.copysign(math.floor(abs(float(x)) + 0.5), x),
    "isnan": np.isnan,
    "isinf": np.isinf,
    "signbit": np.signbit,
    "copysign": np.copysign,
    "nextafter": np.nextafter,
    "fmod": math.fmod,
    "remainder": math.remainder,
    "logb": lambda x: math.frexp(x)[1] - 1,
    "ilogb": lambda x: math.frexp(x)[1] - 1,
    "llrint": lambda x: round(float(x)),
    "llround": lambda x: int(math.copysign(math.floor(abs(float(x)) + 0.5), x)),
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "float_as_int": lambda x: x.view(np.int32),
    "float_as_uint": lambda x: x.view(np.int32),
    "double_as_longlong": lambda x: x.view(np.int64),
    "double2loint": lambda x: int(x.view(np.int64)) & 0xFFFFFFFF,
    "double2hiint": lambda x: x.view(np.int64) >> 32,
}


def unsigned(x: Any, bits: int = 32) -> int:
    return int(x) % 2**bits


def byte_perm(low: int, high: int, selector: int) -> int:
    pool = unsigned(low).to_bytes(4, "little") + unsigned(high).to_bytes(4, "little")
    return int.from_bytes(bytes(pool[selector >> shift & 7] for shift in (0, 4, 8, 12)), "little")


def umul24(bits: int, a: int, b: int) -> int:
    return unsigned(a, 24) * unsigned(b, 24)


def of_24_bits(x: int) -> int:
    return (unsigned(x, 24) ^ 1 << 23) - (1 << 23)


# For each function: its value for integers with a given number of bits, modulo their range.
INTEGER: dict[str, Callable[..., int]] = {
    "abs": lambda bits, x: abs(x),
    "clz": lambda bits, x: bits - unsigned(x, bits).bit_length(),
    "popc": lambda bits, x: unsigned(x, bits).bit_count(),
    "ffs": lambda bits, x: (unsigned(x, bits) & -unsigned(x, bits)).bit_length(),
    "brev": lambda bits, x: int(f"{unsigned(x, bits):0{bits}b}"[::-1], 2),
    "byte_perm": lambda bits, a, b, c: byte_perm(a, b, unsigned(c)),
    "mulhi": lambda bits, a, b: a * b >> bits,
    "mul24": lambda bits, a, b: of_24_bits(a) * of_24_bits(b),
    "hadd": lambda bits, a, b: (a + b) >> 1,
    "rhadd": lambda bits, a, b: (a + b + 1) >> 1,
    "int_as_float": lambda bits, x: np.int32(x).view(np.float32),
    "longlong_as_double": lambda bits, x: np.int64(x).view(np.float64),
}
ROUNDED: dict[str, tuple[int, Callable[..., Fraction]]] = {
    "add": (2, lambda x, y: x + y),
    "sub": (2, lambda x, y: x - y),
    "mul": (2, lambda x, y: x * y),
    "div": (2, lambda x, y: x / y),
    "rcp": (1, lambda x: 1 / x),
    "fma": (3, lambda x, y, z: x * y + z),
}
WHOLE = {"rn": round, "rz": math.trunc, "rd": math.floor, "ru": math.ceil}
# Tested below one by one.
OTHER_FUNCTIONS = {"ldexp", "scalbn", "jn", "yn", "sad", "sqrt", "rsqrt", "uint_as_float", "hiloint2double", "fma"}
REFUSED_FUNCTIONS = {"rcp64h", "fast_tanhf"}


@weft.jit
def call(a, b, c, d, out, NAME: tl.constexpr, ARITY: tl.constexpr, N: tl.constexpr):
    lane = tl.arange(0, N)
    if ARITY == 1:
        tl.store(out + lane, getattr(libdevice, NAME)(tl.load(a + lane)))
    elif ARITY == 2:
        tl.store(out + lane, getattr(libdevice, NAME)(tl.load(a + lane), tl.load(b + lane)))
    elif ARITY == 3:
        tl.store(out + lane, getattr(libdevice, NAME)(tl.load(a + lane), tl.load(b + lane), tl.load(c + lane)))
    else:
        x = tl.load(c + lane)
        tl.store(out + lane, getattr(libdevice, NAME)(tl.load(a + lane), tl.load(b + lane), x, tl.load(d + lane)))


Call = tuple[str, list[np.ndarray], type]  # function, arguments, dtype of the result


def called(calls: list[Call]) -> Iterator[tuple[Call, np.ndarray]]:
    """Yield each call with its result in one emulated run."""

    def main(world: weft.World) -> list[np.ndarray]:
        outs = []
        for name, arrays, dtype in calls:
            tensors = [torch.from_numpy(a) for a in arrays]
            outs.append(torch.empty(N, dtype=torch.from_numpy(np.empty(0, dtype)).dtype))
            args = dict(zip("abcd", tensors + [tensors[0]] * (4 - len(tensors)), strict=True))
            args |= dict(out=outs[-1], NAME=name, ARITY=len(tensors), N=N)
            world.launch(call, 1, args, {}, world.current_stream())
        world.synchronize()
        return [out.numpy() for out in outs]

    return zip(calls, weft.spmd(main, 1, backend="emulated")[0], strict=True)


def takes(name: str) -> set[str]:
    """Return the types that a libdevice function accepts as its first argument."""
    text = inspect.getsource(getattr(cuda.libdevice, name))
    return {
        kind for kind in ("int32", "int64", "uint32", "uint64", "fp32", "fp64") if f'(core.dtype("{kind}"), ' in text
    }


DTYPES = {
    "fp32": np.float32,
    "fp64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "uint64": np.uint64,
}


def test_real_functions_of_libdevice() -> None:
    calls: list[Call] = []
    for name, (_, ranges) in REAL.items():
        for kind in takes(name) & {"fp32", "fp64"}:
            arrays = [RNG.uniform(low, high, N).astype(DTYPES[kind]) for low, high in ranges]
            calls.append((name, arrays, DTYPES[kind]))
    for (name, arrays, dtype), out in called(calls):
        expected = [float(REAL[name][0](*(mp.mpf(float(a[i])) for a in arrays))) for i in range(N)]
        tolerance = 2e-6 if name[0] in "jy" else 2e-7 if dtype == np.float32 else 1e-10
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance, err_msg=name)


def test_exact_functions_of_libdevice() -> None:
    specials = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3, -7.25, 1e3, -1e-3], np.float64)
    calls: list[Call] = []
    for name, fn in EXACT.items():
        for kind in takes(name) & {"fp32", "fp64"}:
            x = np.concatenate([specials, RNG.normal(size=N - len(specials))]).astype(DTYPES[kind])
            y = RNG.permutation(x)
            arity = 2 if name in ("copysign", "nextafter", "fmod", "remainder") else 1
            if name in ("isnan", "isinf", "finitef", "isfinited"):
                x[:3] = np.nan, np.inf, -np.inf
            result = np.asarray(fn(*[x[0], y[0]][:arity])).dtype if name not in ("ilogb", "double2loint") else np.int32
            calls.append((name, [x, y][:arity], DTYPES[kind] if np.dtype(result).kind == "f" else np.int64))
    for (name, arrays, dtype), out in called(calls):
        expected = [EXACT[name](*(a[i] for a in arrays)) for i in range(N)]
        if name == "double2loint":
            expected = [int(np.uint32(x).view(np.int32)) for x in expected]
        assert (out == np.array(expected).astype(dtype)).all(), (name, arrays, out, expected)


def test_integer_functions_of_libdevice() -> None:
    calls: list[Call] = []
    for name, fn in INTEGER.items():
        for kind in takes(name) - {"fp32", "fp64"}:
            limits = np.iinfo(DTYPES[kind])
            arity = len(inspect.signature(fn).parameters) - 1
            arrays = [RNG.integers(limits.min, limits.max, N, dtype=DTYPES[kind], endpoint=True) for _ in range(arity)]
            arrays[0][:3] = 0, 1, limits.max
            as_float = {"int_as_float": np.float32, "longlong_as_double": np.float64}.get(name)
            calls.append((name, arrays, as_float or DTYPES[kind]))
    for (name, arrays, dtype), out in called(calls):
        bits = arrays[0].itemsize * 8
        fn = umul24 if name == "mul24" and dtype == np.uint32 else INTEGER[name]
        expected = [fn(bits, *(int(a[i]) for a in arrays)) for i in range(N)]
        if dtype in (np.float32, np.float64):
            np.testing.assert_array_equal(out, expected)
        else:
            assert [unsigned(x, bits) for x in out] == [unsigned(x, bits) for x in expected], (name, arrays, out)


@pytest.mark.parametrize("side", WHOLE)
def test_rounding_functions_of_libdevice(side: str) -> None:
    calls: list[Call] = []
    for name, (arity, _) in ROUNDED.items():
        for kind in ("fp32", "fp64"):
            calls.append(
                (f"{name}_{side}", [RNG.normal(size=N).astype(DTYPES[kind]) for _ in range(arity)], DTYPES[kind])
            )
    for kind in ("fp32", "fp64"):
        calls.append((f"sqrt_{side}", [RNG.uniform(0.1, 9, N).astype(DTYPES[kind])], DTYPES[kind]))
    for function in dir(libdevice):
        source, _, target = function.removesuffix(f"_{side}").partition("2")
        if function.endswith(f"_{side}") and target:
            (kind,) = takes(function)
            x = RNG.normal(size=N) * 1e6 if kind[0] == "f" else RNG.integers(0, 2**31 - 1, N)
            result = {"float": np.float32, "double": np.float64}.get(target, np.int64 if "ll" in target else np.int32)
            calls.append((function, [x.astype(DTYPES[kind])], result))
    for (name, arrays, dtype), out in called(calls):
        operation, exactly = name.removesuffix(f"_{side}"), lambda x: x
        if operation in ROUNDED:
            exactly = ROUNDED[operation][1]
        for i in range(N):
            exact, rounded = exactly(*(Fraction(a[i].item()) for a in arrays)), Fraction(out[i].item())
            if operation == "sqrt":
                rounded *= rounded
            if np.dtype(dtype).kind == "i":
                least, most = (0, 2**64) if "2u" in name else (-(2**63), 2**63)
                assert rounded == min(max(WHOLE[side](exact), least), most), (name, arrays[0][i], out[i])
                continue
            below, above = (Fraction(np.nextafter(out[i], dtype(to)).item()) for to in (-np.inf, np.inf))
            if operation == "sqrt":
                below, above = below * below, above * above
            if side == "rd" or (side == "rz" and exact > 0):
                assert rounded <= exact < above, name
            elif side in ("ru", "rz"):
                assert below < exact <= rounded, name
            else:
                assert abs(rounded - exact) <= min(above - rounded, rounded - below), name


def test_the_other_functions_of_libdevice() -> None:
    x, n, u = Y, np.arange(N, dtype=np.int32) % 4, K.view(np.uint32)
    high, low = (
        np.array([3.25, -1e9]).view(np.int64)[[0, 1] * 8] >> 32,
        np.array([3.25, -1e9]).view(np.int64)[[0, 1] * 8],
    )
    expected: list[tuple[Call, Any]] = [
        (("ldexp", [x, n], np.float32), x * 2.0**n),
        (("scalbn", [x, n], np.float32), x * 2.0**n),
        (("pow", [x, n], np.float32), x.astype(np.float64) ** n),
        (("jn", [n, x], np.float32), [float(mp.besselj(int(a), float(b))) for a, b in zip(n, x, strict=True)]),
        (("yn", [n, x], np.float32), [float(mp.bessely(int(a), float(b))) for a, b in zip(n, x, strict=True)]),
        (("sad", [K, K[::-1].copy(), u], np.int32), np.abs(K - K[::-1]) + K),
        (("rsqrt_rn", [x], np.float32), (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)),
        (("uint_as_float", [x.view(np.uint32)], np.float32), x),
        (("hiloint2double", [high.astype(np.int32), low.astype(np.int32)], np.float64), [3.25, -1e9] * 8),
    ]
    for (_, of_function), out in zip(expected, (out for _, out in called([c for c, _ in expected])), strict=True):
        np.testing.assert_allclose(out, of_function, rtol=1e-6)


def test_every_function_of_libdevice_is_run_or_refused() -> None:
    run = {*REAL, *EXACT, *INTEGER, *OTHER_FUNCTIONS, *REFUSED_FUNCTIONS}
    functions = {name for name, _ in inspect.getmembers(libdevice, inspect.isfunction)}
    functions |= {name for name, _ in inspect.getmembers(cuda.libdevice, tl.core.is_builtin)}
    left = {name for name in functions - run if name[-3:] not in ("_rn", "_rz", "_rd", "_ru")}
    assert not left
    for name in REFUSED_FUNCTIONS & functions:
        with pytest.raises(NotImplementedError, match=f"tl.extra.libdevice.{name} does not run in the emulator: "):
            list(called([(name, [Y.astype(np.float64 if name == "rcp64h" else np.float32)], np.float64)]))
