"""CUDA's libdevice on numpy: the functions behind `triton.language.extra.libdevice`, by symbol.

fp32 functions are computed in fp64 and rounded once. A GPU's results differ in the last bits, because its functions may
have an error of a few units in the last place. The Bessel functions are correct to 1e-6.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

Array = np.ndarray
ArrayFunction = Callable[..., Array]


def _of_numpy(names: str) -> dict[str, ArrayFunction]:
    """Return numpy's functions with these names."""
    return {name: getattr(np, name) for name in names.split()}


def _by_torch(fn: Callable[..., torch.Tensor]) -> ArrayFunction:
    return lambda *args: fn(*(torch.from_numpy(np.array(a)) for a in args)).numpy()


def _by_math(fn: Callable[..., float]) -> ArrayFunction:
    """Return a function of arrays that applies `fn` to each element; the result is NaN for elements for which `fn`
    raises an error."""

    def of_elements(*args: float) -> float:
        try:
            return fn(*args)
        except (ValueError, ZeroDivisionError):
            return math.nan
        except OverflowError:
            return math.inf

    return lambda *args: np.vectorize(of_elements, otypes=[np.float64])(*args)


def _bessel(order: Array, x: Array, order_0: ArrayFunction, order_1: ArrayFunction) -> Array:
    """Return a Bessel function of integer order, computed from the functions of order 0 and 1 by the recurrence in the
    order. The recurrence loses digits if the order is much larger than the argument."""
    out = np.empty(np.broadcast_shapes(order.shape, x.shape))
    orders = np.broadcast_to(order, out.shape)
    for n in np.unique(orders):
        low, high = order_0(x), order_1(x)
        for k in range(1, int(n)):
            low, high = high, 2 * k / x * high - low
        out[orders == n] = np.broadcast_to(high if n > 0 else low if n == 0 else np.nan, out.shape)[orders == n]
    return out


_j0, _j1, _y0, _y1 = (_by_torch(getattr(torch.special, f"bessel_{name}")) for name in ("j0", "j1", "y0", "y1"))
_erfc, _ndtri = _by_torch(torch.special.erfc), _by_torch(torch.special.ndtri)

# Functions of real numbers, with fp64 arguments.
OF_REAL_NUMBERS: dict[str, ArrayFunction] = {
    **_of_numpy("sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh hypot"),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "exp10": lambda x: np.power(10.0, x),
    "pow": np.power,
    "powi": np.power,
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)),
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "norm3d": lambda *x: np.sqrt(sum(np.square(a) for a in x)),
    "norm4d": lambda *x: np.sqrt(sum(np.square(a) for a in x)),
    "rnorm3d": lambda *x: 1 / np.sqrt(sum(np.square(a) for a in x)),
    "rnorm4d": lambda *x: 1 / np.sqrt(sum(np.square(a) for a in x)),
    "erf": _by_torch(torch.special.erf),
    "erfc": _erfc,
    "erfcx": _by_torch(torch.special.erfcx),
    "erfinv": _by_torch(torch.special.erfinv),
    "erfcinv": lambda x: -_ndtri(x / 2) / np.sqrt(2),
    "normcdf": lambda x: _erfc(-x / np.sqrt(2)) / 2,
    "normcdfinv": _ndtri,
    "lgamma": _by_math(math.lgamma),
    "tgamma": _by_math(math.gamma),
    "j0": _j0,
    "j1": _j1,
    "y0": _y0,
    "y1": _y1,
    "jn": functools.partial(_bessel, order_0=_j0, order_1=_j1),
    "yn": functools.partial(_bessel, order_0=_y0, order_1=_y1),
    "cyl_bessel_i0": _by_torch(torch.special.i0),
    "cyl_bessel_i1": _by_torch(torch.special.i1),
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "scalbn": lambda x, n: np.ldexp(x, n.astype(np.int32)),
    "fma": lambda x, y, z: x * y + z,
    "saturate": lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)),
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.where(x > y, x - y, 0.0)),
    "fast_fdivide": np.divide,
}
FAST = "sin", "cos", "tan", "exp", "exp10", "log", "log2", "log10", "pow"
OF_REAL_NUMBERS |= {f"fast_{name}": OF_REAL_NUMBERS[name] for name in FAST}


def _half_away(x: Array) -> Array:
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(1, x), whole).astype(x.dtype)


def _exponent(x: Array) -> Array:
    """Return the exponent of each number; for 0 and for infinite or NaN numbers, return the result of C's logb."""
    exponent = np.frexp(x)[1].astype(np.float64) - 1
    return np.where(x == 0, -np.inf, np.where(np.isnan(x), np.nan, np.where(np.isinf(x), np.inf, exponent)))


def _ilogb(x: Array) -> Array:
    lowest, highest = -(2**31), 2**31 - 1
    kept = np.where(np.isfinite(x) & (x != 0), x, 1)
    of_infinity = np.where(np.isinf(x), highest, lowest)
    return np.where(np.isfinite(x) & (x != 0), np.frexp(kept)[1] - 1, of_infinity)


def _bits(x: Array, width: int) -> Array:
    """Return the bits [.., width] of integers, starting with the lowest."""
    return (x.view(f"u{width // 8}")[..., None] >> np.arange(width, dtype=f"u{width // 8}")) & 1


def _leading_zeros(x: Array) -> Array:
    bits = _bits(x, x.itemsize * 8)[..., ::-1]
    return np.where(bits.any(-1), bits.argmax(-1), x.itemsize * 8)


def _first_set(x: Array) -> Array:
    bits = _bits(x, x.itemsize * 8)
    return np.where(bits.any(-1), bits.argmax(-1) + 1, 0)


def _reversed_bits(x: Array) -> Array:
    width = x.itemsize * 8
    unsigned = np.dtype(f"u{x.itemsize}")
    weights = np.left_shift(np.ones((), unsigned), np.arange(width, dtype=unsigned))
    return (_bits(x, width)[..., ::-1] * weights).sum(-1, dtype=unsigned).view(x.dtype)


def _in_python(fn: Callable[..., int]) -> ArrayFunction:
    """Return a function of arrays that applies `fn` to Python integers, which do not overflow; the result has the first
    array's dtype."""

    def of_arrays(*args: Array) -> Array:
        dtype = args[0].dtype
        wrapped = np.vectorize(lambda *x: fn(*map(int, x)) % 2 ** (8 * dtype.itemsize), otypes=[object])(*args)
        return wrapped.astype(f"u{dtype.itemsize}").view(dtype)

    return of_arrays


def _byte_perm(low: int, high: int, selector: int) -> int:
    pool = ((high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF)).to_bytes(8, "little")
    return int.from_bytes([pool[selector >> 4 * i & 7] for i in range(4)], "little")


def _low_24(x: int, signed: bool) -> int:
    x &= 0xFFFFFF
    return x - (1 << 24) if signed and x >> 23 else x


# Functions of bits and of exact numbers, with arguments in their own dtypes.
IN_OWN_DTYPE: dict[str, ArrayFunction] = {
    **_of_numpy("abs fabs floor ceil trunc rint isnan isinf isfinite signbit copysign nextafter fmod"),
    "llabs": np.abs,
    "nearbyint": np.rint,
    "llrint": lambda x: _to_integer(np.rint(x), np.dtype(np.int64)),
    "round": _half_away,
    "llround": lambda x: _to_integer(_half_away(x), np.dtype(np.int64)),
    "finite": np.isfinite,
    "remainder": _by_math(math.remainder),
    "logb": _exponent,
    "ilogb": _ilogb,
    "clz": _leading_zeros,
    "popc": lambda x: _bits(x, x.itemsize * 8).sum(-1),
    "ffs": _first_set,
    "brev": _reversed_bits,
    "byte_perm": _in_python(_byte_perm),
    "mulhi": _in_python(lambda a, b: a * b >> 32),
    "mul64hi": _in_python(lambda a, b: a * b >> 64),
    "mul24": _in_python(lambda a, b: _low_24(a, True) * _low_24(b, True)),
    "umul24": _in_python(lambda a, b: _low_24(a, False) * _low_24(b, False)),
    "sad": _in_python(lambda a, b, c: abs(a - b) + c),
    "hadd": _in_python(lambda a, b: (a + b) >> 1),
    "rhadd": _in_python(lambda a, b: (a + b + 1) >> 1),
    "int_as_float": lambda x: x.view(np.float32),
    "uint_as_float": lambda x: x.view(np.float32),
    "float_as_int": lambda x: x.view(np.int32),
    "float_as_uint": lambda x: x.view(np.int32),
    "longlong_as_double": lambda x: x.view(np.float64),
    "double_as_longlong": lambda x: x.view(np.int64),
    "double2loint": lambda x: x.view(np.int64).astype(np.int32),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "hiloint2double": lambda high, low: (high.astype(np.int64) << 32 | low.view(np.uint32)).view(np.float64),
}
# Symbols that differ from their functions' names by more than a prefix u (unsigned) or a suffix f, d or ll.
UNLIKE = {"umulhi": "mulhi", "umul64hi": "mul64hi", "usad": "sad", "uhadd": "hadd", "urhadd": "rhadd"}

# -- rounding to a given side ------------------------------------------------------------------------------------------

TO_INTEGER = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
ARITHMETIC: dict[str, tuple[ArrayFunction, Callable[..., Fraction]]] = {  # rounded to the dtype, and exact
    "add": (np.add, lambda x, y: x + y),
    "sub": (np.subtract, lambda x, y: x - y),
    "mul": (np.multiply, lambda x, y: x * y),
    "div": (np.divide, lambda x, y: x / y),
    "rcp": (np.reciprocal, lambda x: 1 / x),
    "fma": (lambda x, y, z: x * y + z, lambda x, y, z: x * y + z),
    "sqrt": (np.sqrt, lambda x: x),  # the square of the exact value is known
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: x),
}
INTEGERS: dict[str, np.dtype] = {
    "int": np.dtype(np.int32),
    "uint": np.dtype(np.uint32),
    "ll": np.dtype(np.int64),
    "ull": np.dtype(np.uint64),
}


def _to_integer(x: Array, dtype: np.dtype) -> Array:
    """Return integral floating-point numbers as integers; a number out of range becomes the nearest integer in range.
    NaN becomes 0 in 32 bits, and only the top bit is set in 64 bits."""
    limits, nan = np.iinfo(dtype), 0 if dtype.itemsize == 4 else 1 << 63
    whole = [nan if math.isnan(v) else limits.max if v > limits.max else max(limits.min, int(v)) for v in x.ravel()]
    bits = np.array([w % 2 ** (8 * dtype.itemsize) for w in whole], f"u{dtype.itemsize}")
    return bits.view(f"i{dtype.itemsize}").reshape(x.shape)


def _rounded(nearest: Array, exact: Fraction, root: bool, side: str, dtype: np.dtype) -> Array:
    """Return the number of `dtype` that is next to `exact`, or to its square root, on the given side. nearest: a number
    close to the exact value."""
    lowest, highest = dtype.type(-np.inf), dtype.type(np.inf)

    def above(x: float) -> Fraction:
        """Return a number with the sign of the difference from the exact value."""
        if math.isinf(x):
            return Fraction(1 if x > 0 else -1)
        return Fraction(float(x)) ** (2 if root else 1) - exact

    low = dtype.type(nearest)
    while above(low) > 0:
        low = np.nextafter(low, lowest)
    while above(high := np.nextafter(low, highest)) <= 0:
        low = high
    if above(low) == 0:
        return low
    if side == "rn":
        distance = above(high) + above(low)
        even = int(np.array(low).view(f"i{dtype.itemsize}")) % 2 == 0
        return low if distance > 0 or (distance == 0 and even) else high
    return low if side == "rd" or (side == "rz" and exact > 0) else high


def _arithmetic(operation: str, side: str, *args: Array) -> Array:
    in_dtype, exactly = ARITHMETIC[operation]
    dtype, args = args[0].dtype, tuple(np.broadcast_arrays(*args))
    if operation == "rsqrt":  # libdevice has this function only for fp32, rounded to nearest
        return in_dtype(*(a.astype(np.float64) for a in args)).astype(dtype)
    out = np.array(in_dtype(*args))
    if side == "rn" and operation != "fma":
        return out
    for i in np.ndindex(out.shape):
        try:
            exact = exactly(*(Fraction(float(a[i])) for a in args))
        except (ValueError, OverflowError, ZeroDivisionError):  # the result is not finite
            continue
        if not np.isnan(out[i]) and exact:
            out[i] = _rounded(out[i], exact, operation == "sqrt", side, dtype)
    return out


def directed(side: str, dtype: np.dtype, x: Array) -> Array:
    """Return numbers as floats of a dtype, rounded by `side`: rn, rz, rd or ru."""
    out = x.astype(dtype)
    if side == "rn":
        return out
    comparable = (out.astype(np.float64), x) if x.dtype.kind == "f" else (_AS_INTEGERS(out), _AS_INTEGERS(x))
    beyond = {"rz": lambda a, b: abs(a) > abs(b), "rd": operator.gt, "ru": operator.lt}[side](*comparable)
    towards = dtype.type({"rz": 0, "rd": -np.inf, "ru": np.inf}[side])
    return np.where(beyond.astype(bool) & np.isfinite(x), np.nextafter(out, towards), out)


_AS_INTEGERS = np.vectorize(int, otypes=[object])


def _converter(symbol: str) -> ArrayFunction | None:
    """Return the function of a symbol such as float2int_rd or dadd_ru, whose last letters name the rounding."""
    name, _, side = symbol.rpartition("_")
    if side not in TO_INTEGER:
        return None
    source, _, target = name.partition("2")
    if target in INTEGERS:
        to_whole, dtype = TO_INTEGER[side], INTEGERS[target]
        return lambda x: _to_integer(to_whole(x), dtype)
    if target:
        return functools.partial(directed, side, np.dtype(np.float32 if target == "float" else np.float64))
    operation = source.removesuffix("f") if source.startswith("fma") else source[1:]
    return functools.partial(_arithmetic, operation, side) if operation in ARITHMETIC else None


@functools.cache
def function_of(symbol: str) -> ArrayFunction | None:
    """Return the function of libdevice's symbol, or None if this module does not implement it. Its arguments are
    broadcast arrays."""
    name = UNLIKE.get(symbol.removeprefix("__nv_"), symbol.removeprefix("__nv_"))
    for known in (name, re.sub(r"(f|d|ll)$", "", name)):
        if (exact := IN_OWN_DTYPE.get(known)) is not None:
            return exact
        if (real := OF_REAL_NUMBERS.get(known)) is not None:
            return functools.partial(_of_reals, real)
    return _converter(name)


def _of_reals(fn: ArrayFunction, *args: Array) -> Array:
    wide = [a if a.dtype.kind in "iu" else a.astype(np.float64) for a in args]
    return fn(*wide)
